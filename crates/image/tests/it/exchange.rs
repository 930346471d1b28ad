//! Graphs that are exchanged while requests run: what began under the old graph ends under it, and nobody sees a
//! difference. Futures are polled by hand, so that requests of two graphs overlap as a test wants them to.

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

use crate::support::*;
use proptest::prelude::*;
use spile_core::{Disk, ErrorKind, Extent, Result, Segments, WriteZeroes};
use spile_image::check::Severity;
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_image::formats::vhd::{VhdParent, check};
use spile_image::{Graph, GraphLayer, OpenOptions, open_layer};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 4 * MIB;
const BLOCK: u32 = 16 << 10;
const BASE: &str = "/vm/base.vhd";

type Disks = Arc<Graph<MemStore>>;
type Request = Pin<Box<dyn Future<Output = Result<()>>>>;

fn at(start: u64, len: u64) -> Extent {
    Extent::from_range(start..start + len)
}

/// A write that is under way: it has been polled once, and is not done.
fn begin_write(graph: &Disks, start: u64, bytes: &[u8]) -> Request {
    let mut request = write_request(graph, start, bytes);
    assert!(poll_once(request.as_mut()).is_pending(), "the write is done already");
    request
}

fn write_request(graph: &Disks, start: u64, bytes: &[u8]) -> Request {
    let (graph, bytes) = (graph.clone(), Segments::copied(bytes));
    Box::pin(async move { graph.write(at(start, bytes.len() as u64), &bytes, false).await })
}

fn leaf_path(number: usize) -> String {
    format!("/vm/leaf{number}.vhd")
}

/// A base, `children` on it, and the graph of all of them. Every layer has a block of its own pattern: layer n, from the
/// base (0) up, in block n.
fn world_with(kind: Kind, children: usize) -> (World, Disks) {
    let world = World::new();
    world.vhd_on(BASE, kind, DiskType::Dynamic, SIZE, BLOCK);
    let mut path = BASE.to_owned();
    for number in 0..=children {
        if number > 0 {
            let child = leaf_path(number);
            world.child_on(&child, kind, &path, SIZE, BLOCK);
            path = child;
        }
        let disk = world.open(&path);
        write(&disk, number as u64 * u64::from(BLOCK), &pattern(100 + number as u64, BLOCK as usize));
        block_on(disk.close()).unwrap();
    }
    let graph = Arc::new(world.open(&path));
    (world, graph)
}

/// A new child of the leaf of `graph`, open as a layer.
fn new_leaf(world: &World, graph: &Graph<MemStore>, number: usize, kind: Kind) -> Arc<GraphLayer<MemStore>> {
    let parent = graph.layers().swap_remove(0);
    let name = parent.path.file_name().unwrap().to_str().unwrap().to_owned();
    let uuid = parent.identity.unwrap().0;
    let parent = VhdParent { relative_path: name.clone(), absolute_path: None, uuid, timestamp: 0, name };
    let path = leaf_path(number);
    world.child_of(&path, kind, parent, SIZE, BLOCK);
    let options = OpenOptions::default();
    block_on(open_layer(&world.files, world.env.clone(), Path::new(&path), &options)).unwrap()
}

/// The graph with a new leaf, number `number`.
fn exchanged(world: &World, graph: &Disks, number: usize, kind: Kind) -> Disks {
    let leaf = new_leaf(world, graph, number, kind);
    Arc::new(block_on(graph.with_leaf(leaf)).unwrap())
}

#[track_caller]
fn sound(world: &World, path: &str) {
    let report = block_on(check(&world.files.store(path), &*world.env)).unwrap();
    assert_eq!(report.worst().filter(|worst| *worst >= Severity::Leak), None, "{path}: {:?}", report.findings);
}

#[test]
fn a_write_under_the_old_graph_is_read_under_the_new_one_once_it_is_done() {
    let (world, old) = world_with(SLOW_FILE, 1);
    let start = 5 * u64::from(BLOCK);
    let mut write_old = begin_write(&old, start, &pattern(1, 1024));
    let new = exchanged(&world, &old, 2, SLOW_FILE);
    assert_eq!(read(&*new, start..start + 1024), vec![0; 1024], "nobody has acknowledged it");
    write(&*new, start, &pattern(2, 512));
    assert_eq!(read(&*new, start..start + 512), pattern(2, 512));
    block_on(write_old.as_mut()).unwrap();
    let both = [pattern(2, 512), pattern(1, 1024)[512..].to_vec()].concat();
    assert_eq!(read(&*new, start..start + 1024), both, "the leaf's own, and below it what came late");
    block_on(new.seal_parents()).unwrap();
    assert_eq!(read(&*new, start..start + 1024), both);
    assert_eq!(block_on(old.write(at(0, 512), &Segments::zeroed(512), false)).unwrap_err().kind(), ErrorKind::ReadOnly);
    block_on(new.close()).unwrap();
    drop((old, new, write_old));
    sound(&world, &leaf_path(1));
    assert_eq!(read(&world.open(&leaf_path(2)), start..start + 1024), both);
}

/// The journal of the old leaf is void after a reboot, so only a flush that covers the old leaf keeps its bits.
#[test]
fn a_flush_under_the_new_graph_makes_a_write_under_the_old_one_durable() {
    let (world, old) = world_with(SLOW_FILE, 1);
    let start = 5 * u64::from(BLOCK);
    let mut write_old = begin_write(&old, start, &pattern(1, 512));
    let new = exchanged(&world, &old, 2, SLOW_FILE);
    block_on(write_old.as_mut()).unwrap();
    block_on(new.flush()).unwrap();
    drop((write_old, old, new));
    world.env.reboot();
    assert_eq!(read(&world.open(&leaf_path(2)), start..start + 512), pattern(1, 512));
}

#[test]
fn a_failing_old_leaf_fails_the_flush_and_stays_unsealed() {
    let (world, old) = world_with(FILE, 1);
    write(&*old, 0, &pattern(1, 512));
    let new = exchanged(&world, &old, 2, FILE);
    world.files.file(leaf_path(1)).fails.store(true, Relaxed);
    assert!(block_on(new.flush()).is_err());
    assert!(block_on(new.seal_parents()).is_err());
    assert!(!new.handles()[1].is_sealed());
    assert_eq!(read(&*new, 0..512), pattern(1, 512));
}

/// The merged map of the parents is loaded while a write to the old leaf is under way, and must not hide it.
#[test]
fn the_merged_map_is_not_stale_after_a_late_write() {
    let (world, old) = world_with(SLOW_FILE, 4);
    let start = 2 * u64::from(BLOCK);
    assert_eq!(read(&*old, start..start + 512), pattern(102, BLOCK as usize)[..512]);
    let mut write_old = begin_write(&old, start, &pattern(1, 512));
    let new = exchanged(&world, &old, 5, SLOW_FILE);
    assert_eq!(read(&*new, start..start + 512), pattern(102, BLOCK as usize)[..512]);
    block_on(write_old.as_mut()).unwrap();
    assert_eq!(read(&*new, start..start + 512), pattern(1, 512));
    block_on(new.seal_parents()).unwrap();
    let expected = [pattern(1, 512), pattern(102, BLOCK as usize)[512..].to_vec()].concat();
    assert_eq!(read(&*new, start..start + u64::from(BLOCK)), expected);
}

/// The merged map of the parents is kept: after an exchange, their maps are not read again.
#[test]
fn the_merged_map_survives_an_exchange() {
    let (world, old) = world_with(FILE, 4);
    let all = read(&*old, 0..SIZE);
    let new = exchanged(&world, &old, 5, FILE);
    for sealed in [false, true] {
        if sealed {
            block_on(new.seal_parents()).unwrap();
        }
        world.files.reset_reads();
        assert!(read(&*new, 0..SIZE) == all);
        let maps: u64 = (1..4).map(|n| world.files.file(leaf_path(n)).read_bytes.load(Relaxed)).sum();
        assert_eq!(maps, 3 * u64::from(BLOCK), "more than the data of the three blocks was read");
    }
}

/// An older request may release a block of the old leaf while a newer one reads there.
#[test]
fn a_released_block_of_the_old_leaf_is_not_punched_under_a_reader_of_the_new_graph() {
    let world = World::new();
    let file = world.vhd(BASE, DiskType::Dynamic, SIZE, BLOCK);
    let old: Disks = Arc::new(world.open(BASE));
    let data = pattern(1, BLOCK as usize);
    write(&*old, 0, &data);
    let new = exchanged(&world, &old, 1, FILE);
    let data_at = u64::from(entry(&file, 0)) * 512 + 512;
    file.held_read.store(data_at, Relaxed);
    let (graph, into) = (new.clone(), Segments::zeroed(BLOCK as usize));
    let filled = into.clone();
    let mut reader: Request = Box::pin(async move { graph.read(at(0, u64::from(BLOCK)), &into).await });
    assert!(poll_once(reader.as_mut()).is_pending());
    block_on(old.discard(at(0, u64::from(BLOCK)))).unwrap();
    for _ in 0..5 {
        block_on(new.flush()).unwrap();
    }
    assert!(file.bytes(data_at, BLOCK as usize) == data, "punched under a reader");
    file.lets_read_go.store(true, Relaxed);
    block_on(reader).unwrap();
    assert!(filled.to_vec() == data);
    for _ in 0..3 {
        block_on(new.flush()).unwrap();
    }
    assert!(file.bytes(data_at, BLOCK as usize).iter().all(|&byte| byte == 0), "never punched");
}

/// A block of the new leaf that reads as zeroes is not released because of what lies below while an older write may
/// still land there: zeroes that were written after it would be gone with the block.
#[test]
fn a_late_write_does_not_come_to_light_under_a_discard() {
    for polls in 0..12 {
        let (world, old) = world_with(SLOW_FILE, 1);
        let start = 5 * u64::from(BLOCK);
        let (x, y) = (start, start + 8192);
        let mut late = begin_write(&old, y, &pattern(1, 4096));
        let new = exchanged(&world, &old, 2, SLOW_FILE);
        write(&*new, x, &pattern(2, 4096));
        let graph = new.clone();
        let mut discard: Request = Box::pin(async move { graph.discard(at(x, 4096)).await });
        let done = (0..polls).any(|_| poll_once(discard.as_mut()).is_ready());
        block_on(late.as_mut()).unwrap();
        let how = WriteZeroes { may_unmap: true, only_if_fast: false };
        block_on(new.write_zeroes(at(y, 4096), how)).unwrap();
        if !done {
            block_on(discard).unwrap();
        }
        assert_eq!(read(&*new, y..y + 4096), vec![0; 4096], "after {polls} polls");
    }
}

#[test]
fn two_that_need_the_same_bitmap_read_it_once() {
    let (world, graph) = world_with(FILE, 1);
    write(&*graph, 5 * u64::from(BLOCK), &pattern(1, 512));
    block_on(graph.close()).unwrap();
    drop(graph);
    let (file, graph): (_, Disks) = (world.files.file(leaf_path(1)), Arc::new(world.open(&leaf_path(1))));
    file.held_read.store(u64::from(entry(&file, 5)) * 512, Relaxed);
    world.files.reset_reads();
    let mut readers: Vec<(Request, Segments)> = (0..3)
        .map(|_| {
            let (graph, into) = (graph.clone(), Segments::zeroed(512));
            let filled = into.clone();
            let request: Request = Box::pin(async move { graph.read(at(5 * u64::from(BLOCK), 512), &into).await });
            (request, filled)
        })
        .collect();
    assert!(readers.iter_mut().all(|(reader, _)| poll_once(reader.as_mut()).is_pending()));
    assert_eq!(file.read_bytes.load(Relaxed), 512, "the bitmap, once");
    file.lets_read_go.store(true, Relaxed);
    for (reader, filled) in readers {
        block_on(reader).unwrap();
        assert_eq!(filled.to_vec(), pattern(1, 512));
    }
    assert_eq!(file.read_bytes.load(Relaxed), 512 + 3 * 512);
}

#[test]
fn a_leaf_of_another_parent_is_refused() {
    let (world, graph) = world_with(FILE, 1);
    world.vhd("/vm/other.vhd", DiskType::Dynamic, SIZE, BLOCK);
    let leaf = new_leaf(&world, &world.open("/vm/other.vhd"), 2, FILE);
    let error = block_on(graph.with_leaf(leaf)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
}

#[test]
fn a_leaf_that_would_make_the_chain_too_long_is_refused_and_stays_as_it_is() {
    let (world, graph) = world_with(FILE, 1);
    let long = graph.with_layers(vec![graph.handles()[0].clone(); spile_image::MAX_LAYERS]).unwrap();
    let leaf = new_leaf(&world, &graph, 2, FILE);
    world.env.runs_beside.store(true, Relaxed);
    let file = world.files.file(leaf_path(2));
    let before = file.bytes(0, file.len() as usize);
    let error = block_on(long.with_leaf(leaf)).err().unwrap();
    run_beside();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(file.bytes(0, file.len() as usize) == before);
}

#[test]
fn parents_alone_are_a_read_only_disk() {
    let (world, old) = world_with(FILE, 2);
    let all = read(&*old, 0..SIZE);
    let new = exchanged(&world, &old, 3, FILE);
    block_on(new.seal_parents()).unwrap();
    write(&*new, 0, &pattern(1, 4096));
    let before = new.with_layers(new.handles()[1..].to_vec()).unwrap();
    assert!(before.info().read_only && read(&before, 0..SIZE) == all);
    assert!(new.with_layers(Vec::new()).is_err());
}

// The model: writes stay under way over exchanges, each to a slot that nothing else touches meanwhile.

const SLOT: u64 = 4096;
const SLOTS: u64 = 24;

#[derive(Clone, Debug)]
enum Act {
    Begin { slot: u64, sectors: u64 },
    Advance { which: usize, polls: usize },
    Write { slot: u64 },
    Zero { slot: u64, slots: u64, may_unmap: bool },
    Discard { slot: u64, slots: u64 },
    Read { slot: u64, slots: u64 },
    Extents,
    Flush,
    Exchange,
    Settle,
    Reboot,
}

fn any_act() -> impl Strategy<Value = Act> {
    let slot = 0..SLOTS;
    prop_oneof![
        4 => (slot.clone(), 1u64..8).prop_map(|(slot, sectors)| Act::Begin { slot, sectors }),
        4 => (any::<usize>(), 0usize..6).prop_map(|(which, polls)| Act::Advance { which, polls }),
        3 => slot.clone().prop_map(|slot| Act::Write { slot }),
        3 => (slot.clone(), 1u64..9, any::<bool>())
            .prop_map(|(slot, slots, may_unmap)| Act::Zero { slot, slots, may_unmap }),
        2 => (slot.clone(), 1u64..9).prop_map(|(slot, slots)| Act::Discard { slot, slots }),
        5 => (slot, 1u64..SLOTS).prop_map(|(slot, slots)| Act::Read { slot, slots }),
        1 => Just(Act::Extents),
        2 => Just(Act::Flush),
        2 => Just(Act::Exchange),
        2 => Just(Act::Settle),
        1 => Just(Act::Reboot),
    ]
}

struct InFlight {
    slot: u64,
    bytes: Vec<u8>,
    request: Request,
}

struct Model {
    world: World,
    graph: Disks,
    /// How many leaves there have been.
    leaves: usize,
    bytes: Vec<u8>,
    in_flight: Vec<InFlight>,
    writes: u64,
}

impl Model {
    fn new() -> Self {
        let (world, graph) = world_with(SLOW_FILE, 2);
        let bytes = read(&*graph, 0..SLOTS * SLOT);
        Self { world, graph, leaves: 2, bytes, in_flight: Vec::new(), writes: 0 }
    }

    fn is_free(&self, slots: std::ops::Range<u64>) -> bool {
        !self.in_flight.iter().any(|write| slots.contains(&write.slot))
    }

    fn next_bytes(&mut self, len: u64) -> Vec<u8> {
        self.writes += 1;
        pattern(1000 + self.writes, len as usize)
    }

    fn finish(&mut self, which: usize) {
        let done = self.in_flight.swap_remove(which);
        let start = (done.slot * SLOT) as usize;
        self.bytes[start..start + done.bytes.len()].copy_from_slice(&done.bytes);
    }

    /// Ends all writes that are under way.
    fn drain(&mut self) {
        while !self.in_flight.is_empty() {
            self.poll_all();
        }
    }

    fn poll_all(&mut self) {
        for which in (0..self.in_flight.len()).rev() {
            if let Poll::Ready(result) = poll_once(self.in_flight[which].request.as_mut()) {
                result.unwrap();
                self.finish(which);
            }
        }
    }

    /// Runs one request of the graph of now to its end. It may have to wait for those under way, so these go on, too.
    fn run<T>(&mut self, request: impl AsyncFnOnce(Disks) -> Result<T>) -> T {
        let mut request = std::pin::pin!(request(self.graph.clone()));
        loop {
            if let Poll::Ready(result) = poll_once(request.as_mut()) {
                return result.unwrap();
            }
            self.poll_all();
        }
    }

    fn act(&mut self, act: Act) {
        let range = |slot: u64, slots: u64| slot..(slot + slots).min(SLOTS);
        match act {
            Act::Begin { slot, sectors } if self.is_free(slot..slot + 1) => {
                let bytes = self.next_bytes(sectors * 512);
                let request = write_request(&self.graph, slot * SLOT, &bytes);
                self.in_flight.push(InFlight { slot, bytes, request });
            }
            Act::Advance { which, polls } if !self.in_flight.is_empty() => {
                let which = which % self.in_flight.len();
                let request = &mut self.in_flight[which].request;
                if (0..polls).any(|_| matches!(poll_once(request.as_mut()), Poll::Ready(Ok(())))) {
                    self.finish(which);
                }
            }
            Act::Write { slot } if self.is_free(slot..slot + 1) => {
                let bytes = self.next_bytes(SLOT);
                let data = Segments::copied(&bytes);
                self.run(async move |graph| graph.write(at(slot * SLOT, SLOT), &data, false).await);
                self.bytes[(slot * SLOT) as usize..][..SLOT as usize].copy_from_slice(&bytes);
            }
            Act::Zero { slot, slots, may_unmap } => self.zero(range(slot, slots), may_unmap),
            Act::Discard { slot, slots } => self.discard(range(slot, slots)),
            Act::Read { slot, slots } => self.read(range(slot, slots)),
            Act::Extents => drop(self.run(async |graph| graph.extents(at(0, SIZE), 1000).await)),
            Act::Flush => self.run(async |graph| graph.flush().await),
            Act::Exchange if self.leaves < 12 => {
                self.leaves += 1;
                self.graph = exchanged(&self.world, &self.graph, self.leaves, SLOW_FILE);
            }
            Act::Settle => {
                self.drain();
                block_on(self.graph.seal_parents()).unwrap();
            }
            Act::Reboot => self.reboot(),
            _ => {}
        }
    }

    fn zero(&mut self, slots: std::ops::Range<u64>, may_unmap: bool) {
        if self.is_free(slots.clone()) {
            let bytes = slots.start * SLOT..slots.end * SLOT;
            let (extent, how) = (Extent::from_range(bytes.clone()), WriteZeroes { may_unmap, only_if_fast: false });
            self.run(async move |graph| graph.write_zeroes(extent, how).await);
            self.bytes[bytes.start as usize..bytes.end as usize].fill(0);
        }
    }

    /// A discard may zero or leave: the model takes over what is read afterwards, if it is either.
    fn discard(&mut self, slots: std::ops::Range<u64>) {
        if !self.is_free(slots.clone()) {
            return;
        }
        let bytes = slots.start * SLOT..slots.end * SLOT;
        let extent = Extent::from_range(bytes.clone());
        self.run(async move |graph| graph.discard(extent).await);
        let found = self.bytes_at(slots);
        let model = &mut self.bytes[bytes.start as usize..bytes.end as usize];
        for (found, model) in found.chunks(512).zip(model.chunks_mut(512)) {
            assert!(found == model || found.iter().all(|&byte| byte == 0), "a discard made up data");
            model.copy_from_slice(found);
        }
    }

    fn bytes_at(&mut self, slots: std::ops::Range<u64>) -> Vec<u8> {
        let into = Segments::zeroed(((slots.end - slots.start) * SLOT) as usize);
        into.fill(0xa5);
        let filled = into.clone();
        let extent = Extent::from_range(slots.start * SLOT..slots.end * SLOT);
        self.run(async move |graph| graph.read(extent, &into).await);
        filled.to_vec()
    }

    /// What is under way may read as before or after; all else is as the model says.
    fn read(&mut self, slots: std::ops::Range<u64>) {
        let known: Vec<bool> = slots.clone().map(|slot| self.is_free(slot..slot + 1)).collect();
        let found = self.bytes_at(slots.clone());
        for ((slot, found), known) in slots.zip(found.chunks(SLOT as usize)).zip(known) {
            let model = &self.bytes[(slot * SLOT) as usize..][..SLOT as usize];
            assert!(!known || found == model, "slot {slot}, {} leaves", self.leaves);
        }
    }

    /// Flushed, then cut off: every acknowledged write is there.
    fn reboot(&mut self) {
        self.drain();
        self.run(async |graph| graph.flush().await);
        self.world.env.reboot();
        self.graph = Arc::new(self.world.open(&leaf_path(self.leaves)));
        self.read(0..SLOTS);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn exchanges_at_random_change_nothing_that_a_guest_sees(acts in prop::collection::vec(any_act(), 1..80)) {
        let mut model = Model::new();
        acts.into_iter().for_each(|act| model.act(act));
        model.read(0..SLOTS);
        model.drain();
        model.read(0..SLOTS);
        block_on(model.graph.close()).unwrap();
        for number in 1..=model.leaves {
            let report = block_on(check(&model.world.files.store(leaf_path(number)), &*model.world.env)).unwrap();
            prop_assert!(report.worst() < Some(Severity::Corruption), "{:?}", report.findings);
        }
    }
}
