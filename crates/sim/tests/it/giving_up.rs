//! A child gives up what it has, part by part, gets another parent or none, and grows, while clients read and write, in a host that ends at
//! any step. Each ordering rule is broken on purpose, too, and must be found.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use spile_core::{Disk, Error, Extent, Files, OpenMode, Segments};
use spile_image::check::Severity;
use spile_image::create::NewParent;
use spile_image::formats::vhd::codec::batmap::BatmapHeader;
use spile_image::formats::vhd::codec::footer::Footer;
use spile_image::formats::vhd::codec::header::Header;
use spile_image::formats::vhd::{self, CreateParams, VhdParent};
use spile_image::layer::Layer;
use spile_image::{Format, Graph, GraphLayer, OpenOptions, open_layer};
use spile_sim::exec::{Ended, Executor, block_on};
use spile_sim::faults::{Choice, Sabotage};
use spile_sim::oracle::{Change, Crash, Oracle};
use spile_sim::pages::Pages;
use spile_sim::qcow2::Form;
use spile_sim::regions::{Part, empties_batmap, part_of};
use spile_sim::rng::Rng;
use spile_sim::stamp::{self, SECTOR};
use spile_sim::{Hardware, SimStore, World};

const BASE: &str = "/base.raw";
pub const BLOCK: u64 = 16 << 10;
const BLOCK_SECTORS: u64 = BLOCK / 512;
const SIZE: u64 = 8 * BLOCK + 4096;
const SECTORS: u64 = SIZE / 512;

/// A process that works on one disk, and what stays over its lives.
pub struct Host {
    world: World,
    /// The format of the children.
    format: Format,
    /// That of qcow2 images, and the size of their clusters.
    form: (Form, u32),
    oracle: RefCell<Oracle>,
    /// Sectors that clients write to, and the part that is being given up.
    busy: RefCell<Vec<Range<u64>>>,
    moving: RefCell<Range<u64>>,
    /// How often something was given up, or the parent changed.
    done: Cell<u64>,
    /// The parents that the leaf may name: the one that was told last, and the one that was asked for since.
    parents: RefCell<Vec<Option<&'static str>>>,
    /// As with the parents: the sizes that the leaf may have, in bytes.
    sizes: RefCell<Vec<u64>>,
}

/// The disk in one life.
struct Open {
    graph: Graph<SimStore>,
    /// The base for writing, where it is.
    base: Option<Graph<SimStore>>,
}

fn extent(sectors: &Range<u64>) -> Extent {
    Extent::from_range(sectors.start * 512..sectors.end * 512)
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Lets others run.
async fn yield_now() {
    let mut was = false;
    std::future::poll_fn(|context| {
        context.waker().wake_by_ref();
        match std::mem::replace(&mut was, true) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
}

impl Host {
    /// A base, and a child of it of the format `format` on which leaves are made; qcow2 with clusters of that size.
    pub fn new(seed: u64, format: Format, cluster_bytes: u32) -> Rc<Self> {
        let mut rng = Rng::new(seed).split(3);
        let align_bytes = if rng.chance(1, 2) { 512 } else { 4096 };
        let world = World::new(seed, Hardware { align_bytes, punches: true, devices: false });
        world.install_empty(BASE, SIZE);
        let form = Form::draw(&mut Rng::new(seed).split(7), cluster_bytes);
        let host = Rc::new(Self {
            world,
            format,
            form: (form, cluster_bytes),
            oracle: RefCell::default(),
            busy: RefCell::default(),
            moving: RefCell::new(0..0),
            done: Cell::new(0),
            parents: RefCell::new(vec![Some(middle(format))]),
            sizes: RefCell::new(vec![SIZE]),
        });
        host.create(middle(format), BASE, [0; 16]);
        host
    }

    fn leaf(&self) -> &'static Path {
        Path::new(leaf(self.format))
    }

    /// Makes an empty child.
    fn create(&self, path: &'static str, parent: &'static str, uuid: [u8; 16]) {
        let world = self.world.clone();
        if self.format == Format::Qcow2 {
            let (form, cluster_bytes) = self.form;
            let format = if parent == BASE { "raw" } else { "qcow2" };
            let up = if path == FAR { "../" } else { "" };
            let parent_name = format!("{up}{}", &parent[1..]);
            return world.install(path, &form.empty_image(SIZE, cluster_bytes, Some((&parent_name, format))));
        }
        world.install_empty(path, 0);
        block_on(&self.world, async move {
            let (name, timestamp) = (parent[1..].to_owned(), 0);
            let parent = VhdParent { relative_path: name.clone(), absolute_path: None, uuid, timestamp, name };
            let params = CreateParams { block_size_bytes: BLOCK as u32, ..CreateParams::child(SIZE, parent) };
            let store = world.files().open(&Path::new(path).into(), OpenMode::ReadWrite).await.unwrap();
            vhd::create(&store, &*world.env(), &params).await.unwrap();
        });
        self.world.settle(Path::new(path));
    }

    fn uuid(&self, path: &'static str) -> [u8; 16] {
        let world = self.world.clone();
        block_on(&self.world, async move {
            let options = OpenOptions { read_only: true, ..OpenOptions::default() };
            let layer = open_layer(&world.files(), world.env(), Path::new(path), &options).await.unwrap();
            layer.image().identity().unwrap().0
        })
    }

    /// The leaf over the base, which takes writes as well.
    async fn open_both(&self) -> Result<Open, Error> {
        let (files, env, options) = (self.world.files(), self.world.env(), OpenOptions::default());
        let base = Graph::open(&files, env.clone(), Path::new(BASE), &options).await?;
        let leaf = open_layer(&files, env, self.leaf(), &options).await?;
        Ok(Open { graph: base.with_leaf(leaf).await?, base: Some(base) })
    }

    /// The leaf over the parents that it names.
    async fn open_chain(&self) -> Result<Open, Error> {
        let options = OpenOptions::default();
        let graph = Graph::open(&self.world.files(), self.world.env(), self.leaf(), &options).await?;
        Ok(Open { graph, base: None })
    }

    async fn client(self: Rc<Self>, open: Rc<Open>, mut rng: Rng) {
        for _ in 0..30 {
            let all = open.graph.size_bytes() / 512;
            let start = rng.below(all / 8) * 8;
            let sectors = start..(start + rng.between(1, 3) * 8).min(all);
            match rng.below(10) {
                0..4 => self.write(&open.graph, sectors).await,
                4..8 => self.read(&open.graph, sectors).await,
                8 => self.write_block(&open.graph, start / BLOCK_SECTORS).await,
                _ => self.flush(&open.graph).await,
            }
        }
    }

    async fn write_block(&self, graph: &Graph<SimStore>, block: u64) {
        let start = block * BLOCK_SECTORS;
        self.write(graph, start..(start + BLOCK_SECTORS).min(graph.size_bytes() / 512)).await;
    }

    async fn write(&self, graph: &Graph<SimStore>, sectors: Range<u64>) {
        if overlap(&self.moving.borrow(), &sectors) {
            return yield_now().await;
        }
        self.busy.borrow_mut().push(sectors.clone());
        self.stamp(graph, &sectors).await;
        let mut busy = self.busy.borrow_mut();
        let at = busy.iter().position(|range| *range == sectors).unwrap();
        busy.swap_remove(at);
    }

    /// Writes what the oracle knows to be new.
    async fn stamp(&self, disk: &Graph<SimStore>, sectors: &Range<u64>) {
        let pending = self.oracle.borrow_mut().begin(sectors.clone(), Change::Data, false);
        let mut bytes = vec![0; (sectors.end - sectors.start) as usize * SECTOR];
        for (sector, bytes) in sectors.clone().zip(bytes.chunks_exact_mut(SECTOR)) {
            stamp::stamp(sector, pending.write, bytes);
        }
        disk.write(extent(sectors), &Segments::copied(&bytes), false).await.unwrap();
        self.oracle.borrow_mut().end(&pending, true);
    }

    async fn read(&self, graph: &Graph<SimStore>, sectors: Range<u64>) {
        let issued = self.oracle.borrow_mut().begin_read();
        let into = Segments::zeroed((sectors.end - sectors.start) as usize * SECTOR);
        into.fill(0xA5);
        graph.read(extent(&sectors), &into).await.unwrap();
        self.oracle
            .borrow_mut()
            .end_read(issued, sectors.start, &into.to_vec())
            .unwrap_or_else(|what| panic!("{what}"));
    }

    async fn flush(&self, graph: &Graph<SimStore>) {
        let issued = self.oracle.borrow_mut().begin_flush();
        graph.flush().await.unwrap();
        self.oracle.borrow_mut().end_flush(issued);
    }

    /// Gives up one part after the other: copied below, durable there, given up, and most often written anew below.
    async fn give_up(self: Rc<Self>, open: Rc<Open>, mut rng: Rng) {
        for _ in 0..12 {
            let part = self.part(&mut rng);
            if self.busy.borrow().iter().any(|range| overlap(range, &part)) {
                yield_now().await;
                continue;
            }
            *self.moving.borrow_mut() = part.clone();
            self.move_down(&open, &part, &mut rng).await;
            *self.moving.borrow_mut() = 0..0;
            self.done.set(self.done.get() + 1);
        }
    }

    async fn move_down(&self, open: &Open, part: &Range<u64>, rng: &mut Rng) {
        let base = open.base.as_ref().unwrap();
        let bytes = Segments::zeroed((part.end - part.start) as usize * SECTOR);
        open.graph.read(extent(part), &bytes).await.unwrap();
        base.write(extent(part), &bytes, false).await.unwrap();
        base.flush().await.unwrap();
        open.graph.handles()[0].image().forget(extent(part)).await.unwrap();
        if rng.chance(3, 4) {
            self.stamp(base, part).await;
        }
    }

    /// Gives the leaf one parent after the other. All of them read the same.
    async fn change_parents(self: Rc<Self>, open: Rc<Open>, uuid: [u8; 16], mut rng: Rng) {
        for _ in 0..4 {
            for _ in 0..rng.skewed(200) {
                yield_now().await;
            }
            let middle = Some(middle(self.format));
            let to = *rng.pick(&[Some(BASE), middle, Some(BASE), middle, None]);
            if self.parents.borrow().iter().all(Option::is_none) && to.is_some() {
                return;
            }
            self.parents.borrow_mut().push(to);
            let new = to.map(|path| new_parent(path, self.format, uuid));
            open.graph.handles()[0].image().set_parent(new.as_ref()).await.unwrap();
            *self.parents.borrow_mut() = vec![to];
            self.done.set(self.done.get() + 1);
        }
    }

    /// Makes the leaf longer, by a few blocks or by many.
    async fn grow(self: Rc<Self>, open: Rc<Open>, mut rng: Rng) {
        for _ in 0..3 {
            for _ in 0..rng.skewed(200) {
                yield_now().await;
            }
            let more = if rng.chance(1, 2) { rng.between(1, 4) } else { rng.between(100, 200) };
            let size_bytes = open.graph.size_bytes() + more * BLOCK / 4;
            self.sizes.borrow_mut().push(size_bytes);
            open.graph.resize(size_bytes).await.unwrap();
            *self.sizes.borrow_mut() = vec![size_bytes];
            self.done.set(self.done.get() + 1);
        }
    }

    /// The leaf names what was told last, or asked for since; and it is sound.
    async fn check(&self, leaf: &Arc<GraphLayer<SimStore>>) {
        let named = leaf.image().parent().await.unwrap().map(|parent| parent.names[0].clone());
        let mut parents = self.parents.borrow_mut();
        let name = |parent: &Option<&str>| parent.map(|path| Path::new(".").join(&path[1..]));
        let is_named = |parent: &Option<&'static str>| match (&named, name(parent)) {
            (Some(named), Some(name)) => named.file_name() == name.file_name(),
            (named, name) => named.is_none() && name.is_none(),
        };
        assert!(parents.iter().any(is_named), "the leaf names {named:?}, and not one of {parents:?}");
        parents.retain(is_named);
    }

    async fn check_file(&self) {
        let store = self.world.files().open(&self.leaf().into(), OpenMode::ReadOnly).await.unwrap();
        let report = self.format.check(&store, &*self.world.env()).await.unwrap();
        let bad = report.findings.iter().find(|found| found.severity == Severity::Corruption);
        assert!(bad.is_none(), "the check found: {bad:?}");
    }

    /// One life: everything is read, then clients and `work` go on until the life ends. Returns true when it ended by itself.
    fn live<W: Future<Output = ()> + 'static>(
        self: &Rc<Self>,
        rng: &mut Rng,
        limit: u64,
        is_both: bool,
        work: impl FnOnce(Rc<Open>, Rng) -> W,
    ) -> bool {
        self.busy.borrow_mut().clear();
        *self.moving.borrow_mut() = 0..0;
        let mut executor = Executor::new(self.world.clone(), Rng::new(rng.word()));
        let (host, slot) = (self.clone(), Rc::new(RefCell::new(None)));
        let into = slot.clone();
        executor.spawn(async move {
            if is_both {
                // Once the disk is open, space is prepared beside this.
                host.check_file().await;
            }
            let opened = if is_both { host.open_both().await } else { host.open_chain().await };
            let open = Rc::new(opened.unwrap_or_else(|error| panic!("the disk does not open: {error:?}")));
            if !is_both {
                // Where a life ended between the two footers, opening the image for writing has made them agree.
                host.check_file().await;
                host.check(&open.graph.handles()[0]).await;
            }
            let size_bytes = open.graph.size_bytes();
            let sizes = host.sizes.borrow().clone();
            assert!(sizes.contains(&size_bytes), "the leaf has {size_bytes} bytes, and not one of {sizes:?}");
            *host.sizes.borrow_mut() = vec![size_bytes];
            host.read(&open.graph, 0..size_bytes / 512).await;
            *into.borrow_mut() = Some(open);
        });
        assert_eq!(executor.run(u64::MAX), Ended::Done);
        let open = slot.take().unwrap();
        executor.spawn(work(open.clone(), Rng::new(rng.word())));
        for _ in 0..2 {
            executor.spawn(self.clone().client(open.clone(), Rng::new(rng.word())));
        }
        let limit = executor.steps() + limit;
        let mut ended = executor.run(limit);
        if ended == Ended::Done && rng.chance(1, 2) {
            executor.spawn(async move { open.graph.close().await.unwrap() });
            ended = executor.run(limit);
        }
        let crash = if rng.chance(1, 2) { Crash::Death } else { Crash::PowerCut };
        match crash {
            Crash::Death => self.world.kill(),
            Crash::PowerCut => self.world.cut_power(),
        }
        drop(executor);
        self.oracle.borrow_mut().crash(crash);
        ended == Ended::Done
    }
}

impl Host {
    /// A block, or some sectors of one where these can be given up.
    fn part(&self, rng: &mut Rng) -> Range<u64> {
        let start = rng.below(SECTORS.div_ceil(BLOCK_SECTORS)) * BLOCK_SECTORS;
        let end = (start + BLOCK_SECTORS).min(SECTORS);
        let is_whole_only = self.format == Format::Qcow2 && !self.form.0.is_extended;
        if rng.chance(1, 3) || is_whole_only {
            return start..end;
        }
        let from = start + rng.below((end - start) / 8) * 8;
        from..(from + rng.between(1, 3) * 8).min(end)
    }
}

/// A name that has no room in the first sector of an image.
const FAR: &str = concat!(
    "/ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff/",
    "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm.qcow2"
);

fn middle(format: Format) -> &'static str {
    if format == Format::Qcow2 { FAR } else { "/middle.vhd" }
}

fn leaf(format: Format) -> &'static str {
    if format == Format::Qcow2 { "/leaf.qcow2" } else { "/leaf.vhd" }
}

fn new_parent(path: &str, format: Format, uuid: [u8; 16]) -> NewParent {
    let is_raw = path == BASE;
    let identity = (!is_raw && format == Format::Vhd).then_some(spile_image::layer::Identity(uuid));
    let (name, format) = (path[1..].to_owned(), if is_raw { Format::Raw } else { format });
    NewParent { relative_path: name.clone(), name, format, identity, changed_unix_s: None }
}

/// What a seed did: how many parts or parents, and how many lives ended before their work did.
pub type Done = (u64, u64);

/// Four lives of a leaf that gives up its parts, and a last one without a base that takes writes.
fn give_up(seed: u64, sabotage: Sabotage) -> Done {
    give_up_of(&Host::new(seed, Format::Vhd, 0), seed, sabotage)
}

pub fn give_up_of(host: &Rc<Host>, seed: u64, sabotage: Sabotage) -> Done {
    let mut rng = Rng::new(seed).split(4);
    host.create(leaf(host.format), BASE, [0; 16]);
    *host.parents.borrow_mut() = vec![Some(BASE)];
    host.world.set_sabotage(sabotage);
    let mut cut = 0;
    for _ in 0..4 {
        let (limit, there) = (rng.below(1200), host.clone());
        cut += u64::from(!host.live(&mut rng, limit, true, |open, rng| there.give_up(open, rng)));
    }
    host.world.set_sabotage(Sabotage::None);
    host.live(&mut rng, 200, false, |_, _| async {});
    host.live(&mut rng, 0, false, |_, _| async {});
    (host.done.get(), cut)
}

/// Five lives of a leaf whose parent changes.
fn change_parents(seed: u64, sabotage: Sabotage) -> Done {
    change_parents_of(&Host::new(seed, Format::Vhd, 0), seed, sabotage)
}

pub fn change_parents_of(host: &Rc<Host>, seed: u64, sabotage: Sabotage) -> Done {
    let mut rng = Rng::new(seed).split(5);
    let uuid = host.uuid(middle(host.format));
    host.create(leaf(host.format), middle(host.format), uuid);
    host.world.set_sabotage(sabotage);
    let mut cut = 0;
    for _ in 0..4 {
        let (limit, there) = (rng.below(1500), host.clone());
        cut += u64::from(!host.live(&mut rng, limit, false, |open, rng| there.change_parents(open, uuid, rng)));
    }
    host.world.set_sabotage(Sabotage::None);
    host.live(&mut rng, 0, false, |_, _| async {});
    (host.done.get(), cut)
}

/// Five lives of a leaf that grows.
fn grow(seed: u64, sabotage: Sabotage) -> Done {
    grow_of(&Host::new(seed, Format::Vhd, 0), seed, sabotage)
}

pub fn grow_of(host: &Rc<Host>, seed: u64, sabotage: Sabotage) -> Done {
    let mut rng = Rng::new(seed).split(6);
    host.create(leaf(host.format), BASE, [0; 16]);
    *host.parents.borrow_mut() = vec![Some(BASE)];
    host.world.set_sabotage(sabotage);
    let mut cut = 0;
    for _ in 0..4 {
        let (limit, there) = (rng.below(1500), host.clone());
        cut += u64::from(!host.live(&mut rng, limit, false, |open, rng| there.grow(open, rng)));
    }
    host.world.set_sabotage(Sabotage::None);
    host.live(&mut rng, 0, false, |_, _| async {});
    (host.done.get(), cut)
}

pub const SEEDS: u64 = 300;

pub fn finds_nothing(run: impl Fn(u64, Sabotage) -> Done) {
    let sums = (0..SEEDS).map(|seed| {
        print!("{seed} ");
        run(seed, Sabotage::None)
    });
    let (done, cut) = sums.fold((0, 0), |sum, more| (sum.0 + more.0, sum.1 + more.1));
    println!("{done} done, {cut} lives cut short");
    assert!(done > 2 * SEEDS && cut > SEEDS && cut < 4 * SEEDS, "{done} done, {cut} lives cut short");
}

/// Some seed finds the broken rule, by a message with `sign`.
pub fn bites(run: impl Fn(u64, Sabotage) -> Done, rule: &str, sign: &str, sabotage: Sabotage) {
    let finds = |seed: &u64| {
        let found = catch_unwind(AssertUnwindSafe(|| run(*seed, sabotage.clone()))).err()?;
        let text = found.downcast_ref::<String>().cloned().unwrap_or_default();
        text.contains(sign).then_some((*seed, text))
    };
    match (0..SEEDS).find_map(|seed| finds(&seed)) {
        Some((seed, text)) => println!("{rule}: seed {seed}: {text}"),
        None => panic!("no seed below {SEEDS} found: {rule}"),
    }
}

fn releases() -> Choice {
    Arc::new(|view, touch| touch.bytes == [0xff; 4] && part_of(view, touch) == Some(Part::Bat))
}

/// A bitmap loses bits.
fn clears_bits() -> Choice {
    Arc::new(|view, touch| {
        let mut before = vec![0; touch.bytes.len()];
        view.read(touch.range.start, &mut before);
        let is_fewer = before.iter().zip(&touch.bytes).any(|(before, now)| before & !now != 0);
        is_fewer && part_of(view, touch) == Some(Part::Bitmap)
    })
}

fn header() -> Choice {
    Arc::new(|_, touch| touch.bytes.starts_with(b"cxsparse"))
}

/// A footer that points at another header than the first.
fn footers() -> Choice {
    Arc::new(|_, touch| touch.bytes.starts_with(b"conectix") && touch.bytes[16..24] != 512u64.to_be_bytes())
}

/// The header that the footer at the end points at.
fn counting_header(view: &Pages) -> Option<Header> {
    let mut bytes = [0; 512];
    view.read(view.len().checked_sub(512)?, &mut bytes);
    let at = Footer::parse(&bytes).ok()?.data_offset?;
    let mut bytes = [0; Header::LEN];
    view.read(at, &mut bytes);
    Header::parse(&bytes).ok()
}

/// An entry of a table that is not the one that counts.
fn next_entries() -> Choice {
    Arc::new(|view, touch| {
        let counts = |header: Header| (header.bat_offset_bytes..header.bat_end_bytes()).contains(&touch.range.start);
        touch.bytes.len() == 4 && counting_header(view).is_some_and(|header| !counts(header))
    })
}

/// Records of a journal that is not the one that counts.
fn next_records() -> Choice {
    Arc::new(|view, touch| {
        let is_records = touch.bytes.len() < 512 && !touch.bytes.is_empty() && touch.bytes.len().is_multiple_of(32);
        let counts = |header: Header| {
            let mut bytes = [0; BatmapHeader::LEN];
            view.read(header.bat_end_bytes(), &mut bytes);
            let batmap = BatmapHeader::parse(&bytes).ok();
            batmap.is_some_and(|batmap| batmap.gap_bytes(header.bat_end_bytes()).contains(&touch.range.start))
        };
        is_records && counting_header(view).is_some_and(|header| !counts(header))
    })
}

/// Wrong content, as the oracle words it.
pub const CONTENT: &str = " reads ";

#[test]
fn what_is_given_up_at_any_step_reads_right() {
    finds_nothing(give_up);
}

#[test]
fn a_parent_that_changes_at_any_step_is_one_of_the_two() {
    finds_nothing(change_parents);
}

#[test]
fn a_leaf_that_grows_at_any_step_has_one_of_the_two_sizes() {
    finds_nothing(grow);
}

#[test]
fn entries_go_to_both_tables_while_the_table_moves() {
    bites(grow, "the next table lacks an entry", CONTENT, Sabotage::Lost(next_entries()));
}

#[test]
fn records_go_to_both_journals_while_the_journal_moves() {
    bites(grow, "the next journal lacks a record", CONTENT, Sabotage::Lost(next_records()));
}

#[test]
fn the_next_header_and_table_are_durable_before_a_footer_points_at_them() {
    bites(grow, "the header is not synced", "does not open", Sabotage::Unsynced(header()));
    let table: Choice = Arc::new(|view, touch| {
        let is_table = touch.bytes.len() >= 512 && touch.bytes.ends_with(&[0xff; 4]);
        is_table && part_of(view, touch) != Some(Part::Bitmap)
    });
    bites(grow, "the table is not synced", "", Sabotage::Unsynced(table));
}

#[test]
fn the_new_size_is_durable_before_it_is_told() {
    bites(grow, "the footers are not synced", "the leaf has", Sabotage::Unsynced(footers()));
}

#[test]
fn a_block_is_given_up_before_the_answer() {
    bites(give_up, "the entry is cleared after the answer", CONTENT, Sabotage::Late(releases()));
}

#[test]
fn a_part_is_given_up_before_the_answer() {
    bites(give_up, "the bits are cleared after the answer", CONTENT, Sabotage::Late(clears_bits()));
}

#[test]
fn a_flush_covers_what_was_given_up() {
    bites(give_up, "a released block comes back behind a flush", CONTENT, Sabotage::Unsynced(releases()));
    bites(give_up, "cleared bits come back behind a flush", CONTENT, Sabotage::Unsynced(clears_bits()));
}

#[test]
fn the_records_of_a_part_are_gone_before_its_bits() {
    let retires: Choice = Arc::new(|view, touch| {
        part_of(view, touch) == Some(Part::Journal) && touch.bytes.iter().all(|byte| *byte == 0)
    });
    bites(give_up, "a record brings bits back", CONTENT, Sabotage::Lost(retires));
}

#[test]
fn the_batmap_is_void_before_bits_go() {
    bites(give_up, "the batmap calls a block full", "batmap calls", Sabotage::Lost(Arc::new(empties_batmap)));
}

#[test]
fn the_new_header_is_durable_before_a_footer_points_at_it() {
    bites(change_parents, "the header is not synced", "does not open", Sabotage::Unsynced(header()));
}

#[test]
fn the_footers_are_durable_before_the_answer() {
    bites(change_parents, "the footers are not synced", "the leaf names", Sabotage::Unsynced(footers()));
    bites(change_parents, "the footers are written after the answer", "the leaf names", Sabotage::Late(footers()));
}
