//! Snapshots inside a qcow2 image are made, applied and deleted in a host that ends at any step: the disk reads as before or as after,
//! each snapshot holds what it held, and a check finds no corruption. Each rule of the order of writes (the head of `formats/qcow2/inner` in
//! `spile-image`) is broken on purpose, and must be found.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use spile_core::{Disk, Error, ErrorKind, Extent, Files, OpenMode, Segments, Store, StoreOffset, Via};
use spile_image::check::Severity;
use spile_image::formats::qcow2::codec::header::Header;
use spile_image::formats::qcow2::codec::refcount;
use spile_image::formats::qcow2::codec::table::decode;
use spile_image::inner::{InnerChange, Which};
use spile_image::layer::Layer;
use spile_image::{Format, Graph, OpenOptions};
use spile_sim::exec::{Ended, Executor, block_on};
use spile_sim::faults::{Choice, Sabotage, Touch};
use spile_sim::pages::Pages;
use spile_sim::qcow2::Form;
use spile_sim::rng::Rng;
use spile_sim::{SimStore, World};

use crate::giving_up::{Done, bites, finds_nothing};
use crate::hosts::with_file_or_device;

const IMAGE: &str = "/a.qcow2";
const DEVICE_BYTES: u64 = 2 << 20;
/// Lives that are cut short, for each seed.
const TURNS: u64 = 4;

/// Snapshots by their names, with what each holds, oldest first.
type Held = Vec<(String, Vec<u8>)>;

/// A host with one image, and what that holds.
struct Host {
    world: World,
    form: Form,
    disk: Vec<u8>,
    snapshots: Held,
    made: u64,
}

async fn open(world: &World) -> Graph<SimStore> {
    let opened = Graph::open(&world.files(), world.env(), Path::new(IMAGE), &OpenOptions::default()).await;
    opened.unwrap_or_else(|error| panic!("the disk does not open: {error:?}"))
}

async fn content(graph: &Graph<SimStore>) -> Vec<u8> {
    let into = Segments::zeroed(graph.size_bytes() as usize);
    graph.read(Extent::from_range(0..graph.size_bytes()), &into).await.unwrap();
    into.to_vec()
}

/// Changes the snapshots, and closes the image. Where that is refused, nothing is changed.
async fn change(world: World, change: InnerChange) -> Result<(), Error> {
    let graph = open(&world).await;
    let done = graph.handles()[0].image().change_inner_unused(&change, &()).await;
    graph.close().await.unwrap();
    done.map(drop)
}

fn named(name: &str) -> Which {
    Which { text: name.to_owned(), is_id: false }
}

impl Host {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed).split(11);
        let world = with_file_or_device(seed, &mut rng, 4, IMAGE, DEVICE_BYTES);
        let cluster_bytes = *rng.pick(&[512, 512, 4096, 16 << 10]);
        let form = Form::draw(&mut rng, cluster_bytes);
        let size = rng.between(4, 12) * 16_384 + 4096;
        let image = form.empty_image(size, cluster_bytes, None);
        let there = world.clone();
        block_on(&world, async move {
            let store = there.files().open(&Path::new(IMAGE).into(), OpenMode::ReadWrite).await.unwrap();
            store.write_at(StoreOffset(0), &Segments::copied(&image), Via::Cached).await.unwrap();
        });
        world.settle(Path::new(IMAGE));
        Self { world, form, disk: vec![0; size as usize], snapshots: Vec::new(), made: 0 }
    }

    /// One life that ends in order: the disk is written to, and gets another size now and then.
    fn write(&mut self, rng: &mut Rng) {
        let (world, mut disk, mut rng) = (self.world.clone(), self.disk.clone(), Rng::new(rng.word()));
        let resizes = rng.chance(1, 3) && !self.form.is_version_2;
        self.disk = block_on(&self.world, async move {
            if resizes {
                disk.resize((rng.between(4, 12) * 16_384 + 4096) as usize, 0);
                open(&world).await.resize_unused(disk.len() as u64).await.unwrap();
            }
            let graph = open(&world).await;
            for _ in 0..rng.between(1, 8) {
                let start = rng.below(disk.len() as u64 / 4096) * 4096;
                let end = (start + rng.between(1, 6) * 4096).min(disk.len() as u64);
                let (extent, part) = (Extent::from_range(start..end), start as usize..end as usize);
                disk[part.clone()].fill(rng.below(256) as u8);
                graph.write(extent, &Segments::copied(&disk[part]), false).await.unwrap();
            }
            graph.close().await.unwrap();
            disk
        });
    }

    /// Draws a change, and what the disk and its snapshots are after it.
    fn draw(&mut self, rng: &mut Rng) -> (InnerChange, Vec<u8>, Held) {
        let (disk, mut snapshots) = (self.disk.clone(), self.snapshots.clone());
        let (what, at) = (rng.below(4), rng.index(snapshots.len().max(1)));
        if what < 2 || snapshots.is_empty() {
            self.made += 1;
            let name = format!("snap-{}", self.made);
            snapshots.push((name.clone(), disk.clone()));
            return (InnerChange::Create { name, now_unix_s: 7 }, disk, snapshots);
        }
        let (name, held) = snapshots[at].clone();
        match what {
            2 => (InnerChange::Apply(named(&name)), held, snapshots),
            _ => {
                snapshots.remove(at);
                (InnerChange::Delete(named(&name)), disk, snapshots)
            }
        }
    }

    /// One life of at most `limit` steps in which the snapshots change. True when the change was told, false when it was refused; `None` when the
    /// life ended before.
    fn live(&self, order: InnerChange, limit: u64, seed: u64) -> Option<bool> {
        let mut executor = Executor::new(self.world.clone(), Rng::new(seed));
        let (told, world) = (Rc::new(RefCell::new(None)), self.world.clone());
        let into = told.clone();
        executor.spawn(async move {
            let done = change(world, order).await;
            *into.borrow_mut() = Some(done);
        });
        let ended = executor.run(limit);
        assert!(ended != Ended::Stuck, "the change waits for ever");
        match seed.is_multiple_of(3) {
            true => self.world.kill(),
            false => self.world.cut_power(),
        }
        drop(executor);
        match told.take()? {
            Ok(()) => Some(true),
            // Narrow refcounts, and full devices.
            Err(error) if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::NoSpace) => Some(false),
            Err(error) => panic!("the change failed: {error}"),
        }
    }

    /// A drawn change in a life that is cut short; then the image is as before or as after. Returns what [`Host::live`] does.
    fn turn(&mut self, rng: &mut Rng, limit: u64, sabotage: Sabotage) -> Option<bool> {
        let (order, disk, snapshots) = self.draw(rng);
        self.world.set_sabotage(sabotage);
        let told = self.live(order.clone(), limit, rng.word());
        self.world.set_sabotage(Sabotage::None);
        let (now, names) = self.look();
        let list = |of: &[(String, Vec<u8>)]| of.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        let was = told != Some(true) && now == self.disk && names == list(&self.snapshots);
        let is = told != Some(false) && now == disk && names == list(&snapshots);
        assert!(
            was || is,
            "after {order:?}, told {told:?}, the disk reads as neither before nor after, with {names:?}"
        );
        if is {
            (self.disk, self.snapshots) = (disk, snapshots);
        }
        told
    }

    /// The content of the disk and the names of its snapshots. The image is sound, but for leaks.
    fn look(&self) -> (Vec<u8>, Vec<String>) {
        let world = self.world.clone();
        block_on(&self.world, async move {
            let store = world.files().open(&Path::new(IMAGE).into(), OpenMode::ReadOnly).await.unwrap();
            let report = Format::Qcow2.check(&store, &*world.env()).await.unwrap();
            let bad = report.findings.iter().find(|found| found.severity == Severity::Corruption);
            assert!(bad.is_none(), "the check found: {bad:?}");
            drop(store);
            let graph = open(&world).await;
            let list = graph.handles()[0].image().inner_snapshots().await;
            let list = list.unwrap_or_else(|error| panic!("the list cannot be read: {error}"));
            (content(&graph).await, list.into_iter().map(|snapshot| snapshot.name).collect())
        })
    }

    /// Each snapshot holds what it held, and goes.
    fn end(mut self) {
        while let Some((name, held)) = self.snapshots.pop() {
            let world = self.world.clone();
            let is_applied = block_on(&self.world, change(world.clone(), InnerChange::Apply(named(&name)))).is_ok();
            if is_applied {
                assert!(self.look().0 == held, "{name} does not hold what it held");
            }
            let gone = block_on(&self.world, change(world, InnerChange::Delete(named(&name))));
            gone.unwrap_or_else(|error| panic!("{name} does not go: {error}"));
        }
        assert!(self.look().1.is_empty());
    }
}

/// Lives that are cut short at random steps.
fn run(seed: u64, sabotage: Sabotage) -> Done {
    let (mut host, mut rng) = (Host::new(seed), Rng::new(seed).split(12));
    let (mut done, mut cut) = (0, 0);
    for _ in 0..TURNS {
        host.write(&mut rng);
        let limit = rng.below(700);
        match host.turn(&mut rng, limit, sabotage.clone()) {
            Some(_) => done += 1,
            None => cut += 1,
        }
        if rng.chance(1, 2) {
            // Most often, a second crash follows the first one before anything is written.
            let limit = rng.below(700);
            let _ = host.turn(&mut rng, limit, sabotage.clone());
            let _ = host.turn(&mut rng, u64::MAX, Sabotage::None);
            done += 1;
        }
    }
    host.end();
    (done, cut)
}

#[test]
fn snapshots_in_an_image_that_change_until_any_step_read_right() {
    finds_nothing(run);
}

/// The same image is changed in lives that end after each number of steps.
#[test]
fn a_crash_at_every_step_finds_nothing() {
    for seed in 0..3 {
        for limit in (0..).step_by(3) {
            let (mut host, mut rng) = (Host::new(seed), Rng::new(seed).split(13));
            let mut told = Vec::new();
            for turn in 0..4 {
                host.write(&mut rng);
                told.push(host.turn(&mut rng, if turn == seed { limit } else { u64::MAX }, Sabotage::None));
            }
            host.end();
            if told[seed as usize].is_some() {
                println!("seed {seed}: {limit} steps");
                break;
            }
        }
    }
}

/// The words that a change writes, beside what is there.
fn words(view: &Pages, touch: &Touch) -> Vec<(u64, u64)> {
    let mut before = vec![0; touch.bytes.len()];
    view.read(touch.range.start, &mut before);
    decode(&before).zip(decode(&touch.bytes)).collect()
}

/// A table in which COPIED is `after`, and was not before.
fn copied(after: bool) -> Choice {
    Arc::new(move |view, touch| {
        let turned = |(old, new): &(u64, u64)| old ^ new == 1 << 63 && (*new >> 63 == 1) == after;
        touch.range.start >= 512 && words(view, touch).iter().any(turned)
    })
}

fn header(view: &Pages) -> Option<Header> {
    let mut bytes = [0; 512];
    view.read(0, &mut bytes);
    Header::parse(&bytes).ok()
}

/// Refcounts that change from one value to another one as `wanted` says.
fn counts(wanted: fn(u64, u64) -> bool) -> Choice {
    Arc::new(move |view, touch| {
        let Some(header) = header(view) else { return false };
        let mut table = vec![0; (u64::from(header.refcount_table_clusters) << header.cluster_bits) as usize];
        view.read(header.refcount_table_offset, &mut table);
        let is_in = |block: u64| block != 0 && (block..block + header.cluster_bytes()).contains(&touch.range.start);
        if touch.bytes.is_empty() || !decode(&table).any(is_in) {
            return false;
        }
        let mut before = vec![0; touch.bytes.len()];
        view.read(touch.range.start, &mut before);
        let order = header.refcount_order;
        let all = 0..(touch.bytes.len() as u64 * 8) >> order;
        all.map(|at| (refcount::get(&before, order, at), refcount::get(&touch.bytes, order, at)))
            .any(|(old, new)| wanted(old, new))
    })
}

/// Fields of the header that begin there.
fn fields(at: u64) -> Choice {
    Arc::new(move |_, touch| touch.range.start == at)
}

/// A table of snapshots.
fn lists() -> Choice {
    Arc::new(|_, touch| touch.range.start >= 512 && touch.bytes.windows(5).any(|word| word == b"snap-"))
}

/// An L1 table where there was none.
fn new_tables() -> Choice {
    Arc::new(|view, touch| {
        let Some(header) = header(view) else { return false };
        let is_entry = |word: u64| word & (header.cluster_bytes() - 1) == 0 && word < 1 << 40;
        let words = words(view, touch);
        touch.range.start >= 512
            && touch.range.start != header.l1_offset
            && words.len() > 2
            && words.iter().all(|(old, new)| *old == 0 && is_entry(*new))
            && words.iter().any(|(_, new)| *new != 0)
    })
}

#[test]
fn copied_is_cleared_durably_before_counts_rise() {
    bites(run, "COPIED is set where the count is 2", "COPIED set", Sabotage::Unsynced(copied(false)));
}

#[test]
fn counts_have_risen_durably_before_the_header_names_what_they_count() {
    let rises = counts(|old, new| old > 0 && new > old);
    bites(run, "counts are too low", "references", Sabotage::Unsynced(rises));
}

#[test]
fn new_tables_are_durable_before_the_header_names_them() {
    bites(run, "the list is not there", "", Sabotage::Unsynced(lists()));
    bites(run, "the L1 table is not there", "", Sabotage::Unsynced(new_tables()));
}

#[test]
fn the_header_is_durable_before_counts_fall() {
    bites(run, "a deleted snapshot comes back", "references", Sabotage::Unsynced(fields(60)));
    bites(run, "the old active table comes back", "", Sabotage::Unsynced(fields(24)));
}

#[test]
fn counts_have_fallen_durably_before_copied_says_so() {
    let falls = counts(|old, new| new > 0 && new < old);
    bites(run, "COPIED is set where the count is 2", "COPIED set", Sabotage::Unsynced(falls));
}
