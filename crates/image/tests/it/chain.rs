//! Chains as a guest sees them, against a plain vector of bytes: every kind of layer, killed, closed and opened
//! again, and what other programs find in the files afterwards.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::support::*;
use proptest::prelude::*;
use spile_core::{Disk, Extent, ExtentKind, Segments, WriteZeroes};
use spile_image::check::Severity;
use spile_image::formats::vhd::check;
use spile_image::formats::vhd::codec::batmap::{self, BatmapHeader};
use spile_image::formats::vhd::codec::footer::{DiskType, Footer};
use spile_image::{Graph, OpenOptions};
use spile_node::Aligned;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn discard(disk: &impl Disk, range: std::ops::Range<u64>) {
    block_on(disk.discard(Extent::from_range(range))).unwrap();
}

fn zero(disk: &impl Disk, range: std::ops::Range<u64>, may_unmap: bool) {
    let how = WriteZeroes { may_unmap, only_if_fast: false };
    block_on(disk.write_zeroes(Extent::from_range(range), how)).unwrap();
}

fn flush(disk: &impl Disk) {
    block_on(disk.flush()).unwrap();
}

#[track_caller]
fn sound(world: &World, path: &str) {
    let report = block_on(check(&world.files.store(path), &*world.env)).unwrap();
    assert!(report.worst() < Some(Severity::Corruption), "{path}: {:?}", report.findings);
}

/// Changes an image without allocated blocks into one that another program could have made: without a batmap, and so
/// without a journal.
fn make_foreign(file: &MemFile) {
    edit_footer(file, |footer| footer.creator = *b"win ");
}

// The model.

#[derive(Clone, Debug)]
enum Base {
    Raw(u64),
    Fixed(u64),
    Dynamic(u64, u32),
}

#[derive(Clone, Debug)]
enum Op {
    Write(Place, u64, bool),
    Zero(Place, bool),
    Discard(Place),
    Read(Place),
    Extents(usize),
    Flush,
    Reopen,
    Kill,
    Reboot,
    /// A child is put on top: its size, its blocks, whether it looks like another program's.
    Snapshot(u64, u32, bool),
}

/// A part of the disk: start and length in units, both modulo what there is.
#[derive(Clone, Debug)]
struct Place {
    unit: u64,
    start: prop::sample::Index,
    len: prop::sample::Index,
}

impl Place {
    fn range(&self, size: u64) -> std::ops::Range<u64> {
        let units = (size / self.unit).max(1) as usize;
        let start = self.start.index(units) as u64 * self.unit;
        let most = ((size - start) / self.unit).clamp(1, 40) as usize;
        let len = (self.len.index(most) as u64 + 1) * self.unit;
        start..(start + len).min(size)
    }
}

fn any_place() -> impl Strategy<Value = Place> {
    let unit = prop_oneof![Just(1u64), Just(512), Just(4096), Just(16 * KIB), Just(64 * KIB)];
    (unit, any::<prop::sample::Index>(), any::<prop::sample::Index>()).prop_map(|(unit, start, len)| Place {
        unit,
        start,
        len,
    })
}

fn any_size() -> impl Strategy<Value = u64> {
    // Multiples of 4 KiB, so that they suit every store; shorter and longer than each other, and than a zone.
    prop_oneof![(1u64..40).prop_map(|n| n * 4096), (100u64..700).prop_map(|n| n * 4096)]
}

fn any_block() -> impl Strategy<Value = u32> {
    prop_oneof![Just(4096u32), Just(16 << 10), Just(64 << 10), Just(2 << 20)]
}

fn any_base() -> impl Strategy<Value = Base> {
    prop_oneof![
        (1u64..2_000_000).prop_map(Base::Raw),
        any_size().prop_map(Base::Fixed),
        (any_size(), any_block()).prop_map(|(size, block)| Base::Dynamic(size, block)),
    ]
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (any_place(), any::<u64>(), prop::bool::weighted(0.1)).prop_map(|(place, seed, fua)| Op::Write(place, seed, fua)),
        3 => (any_place(), any::<bool>()).prop_map(|(place, unmap)| Op::Zero(place, unmap)),
        4 => any_place().prop_map(Op::Discard),
        4 => any_place().prop_map(Op::Read),
        2 => (1usize..20).prop_map(Op::Extents),
        3 => Just(Op::Flush),
        1 => Just(Op::Reopen),
        2 => Just(Op::Kill),
        1 => Just(Op::Reboot),
        2 => (any_size(), any_block(), prop::bool::weighted(0.3)).prop_map(|(size, block, foreign)| Op::Snapshot(size, block, foreign)),
    ]
}

struct Bench {
    world: World,
    kind: Kind,
    cache_bytes: usize,
    path: String,
    depth: usize,
    disk: Option<Aligned<Graph<MemStore>>>,
    model: Vec<u8>,
}

impl Bench {
    fn new(base: &Base, kind: Kind, cache_bytes: usize) -> Self {
        let world = World::new();
        let (path, size) = match *base {
            Base::Raw(size) => {
                world.raw("/vm/0.img", &vec![0; size as usize]);
                ("/vm/0.img", size)
            }
            Base::Fixed(size) => {
                world.vhd("/vm/0.vhd", DiskType::Fixed, size, 2 << 20);
                ("/vm/0.vhd", size)
            }
            Base::Dynamic(size, block) => {
                world.vhd_on("/vm/0.vhd", kind, DiskType::Dynamic, size, block);
                ("/vm/0.vhd", size)
            }
        };
        let model = vec![0; size as usize];
        let mut bench = Self { world, kind, cache_bytes, path: path.into(), depth: 0, disk: None, model };
        bench.open();
        bench
    }

    fn open(&mut self) {
        let options = OpenOptions { metadata_cache_bytes: self.cache_bytes, ..OpenOptions::default() };
        let disk = Aligned::new(self.world.try_open(&self.path, &options).unwrap());
        assert_eq!(disk.info().size_bytes, self.model.len() as u64);
        self.disk = Some(disk);
    }

    fn disk(&self) -> &Aligned<Graph<MemStore>> {
        self.disk.as_ref().unwrap()
    }

    fn close(&mut self) {
        block_on(self.disk().close()).unwrap();
        self.disk = None;
        if self.path.ends_with(".vhd") {
            sound(&self.world, &self.path);
        }
    }

    fn run(&mut self, op: &Op) {
        let size = self.model.len() as u64;
        match op {
            Op::Write(place, seed, fua) => {
                let range = place.range(size);
                let bytes = pattern(*seed, (range.end - range.start) as usize);
                let extent = Extent::from_range(range.clone());
                block_on(self.disk().write(extent, &Segments::copied(&bytes), *fua)).unwrap();
                self.model[range.start as usize..range.end as usize].copy_from_slice(&bytes);
            }
            Op::Zero(place, may_unmap) => {
                let range = place.range(size);
                zero(self.disk(), range.clone(), *may_unmap);
                self.model[range.start as usize..range.end as usize].fill(0);
            }
            Op::Discard(place) => self.discard(place.range(size)),
            Op::Read(place) => self.compare(place.range(size)),
            Op::Extents(max_runs) => self.check_extents(*max_runs),
            Op::Flush => flush(self.disk()),
            Op::Reopen => {
                self.close();
                self.open();
            }
            Op::Kill => {
                self.disk = None;
                self.open();
            }
            Op::Reboot => {
                flush(self.disk());
                self.disk = None;
                self.world.env.reboot();
                self.open();
            }
            Op::Snapshot(size, block, foreign) => self.snapshot(*size, *block, *foreign),
        }
    }

    /// What was discarded reads as before or as zeroes, sector by sector.
    fn discard(&mut self, range: std::ops::Range<u64>) {
        discard(self.disk(), range.clone());
        let now = read(self.disk(), range.clone());
        let before = &mut self.model[range.start as usize..range.end as usize];
        let mut at = 0;
        while at < now.len() {
            let end = ((range.start as usize + at) / 512 * 512 + 512 - range.start as usize).min(now.len());
            let zeroed = now[at..end].iter().all(|&byte| byte == 0);
            assert!(zeroed || now[at..end] == before[at..end], "discard {range:?} changed {at:#x}");
            at = end;
        }
        before.copy_from_slice(&now);
    }

    fn snapshot(&mut self, size: u64, block: u32, foreign: bool) {
        self.close();
        self.depth += 1;
        let path = format!("/vm/{}.vhd", self.depth);
        let file = self.world.child_on(&path, self.kind, &self.path, size, block);
        if foreign && !self.kind.is_device {
            make_foreign(&file);
        }
        self.path = path;
        self.model.resize(size as usize, 0);
        self.open();
    }

    fn compare(&self, range: std::ops::Range<u64>) {
        let bytes = read(self.disk(), range.clone());
        let model = &self.model[range.start as usize..range.end as usize];
        if let Some(at) = (0..bytes.len()).find(|&at| bytes[at] != model[at]) {
            let at_disk = range.start + at as u64;
            panic!("byte {at_disk:#x} of {range:?} is {:#x}, not {:#x}", bytes[at], model[at]);
        }
    }

    fn check_extents(&self, max_runs: usize) {
        let mut at = 0;
        let size = self.model.len() as u64;
        while at < size {
            let runs = block_on(self.disk().extents(Extent::from_range(at..size), max_runs)).unwrap();
            assert!(!runs.is_empty() && runs.len() <= max_runs);
            let mut last = None;
            for run in runs {
                assert_eq!(run.extent.start(), at);
                assert!(last != Some((run.kind, run.depth)), "two runs that are alike at {at:#x}");
                last = Some((run.kind, run.depth));
                at = run.extent.end();
                let bytes = &self.model[run.extent.start() as usize..at as usize];
                assert!(run.kind == ExtentKind::Data || bytes.iter().all(|&byte| byte == 0), "{run:?}");
            }
        }
        assert_eq!(at, size);
    }
}

fn any_kind() -> impl Strategy<Value = Kind> {
    prop_oneof![3 => Just(FILE), 2 => Just(FILE_4K), 1 => Just(SLOW_FILE), 2 => Just(DEVICE)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]
    #[test]
    fn a_chain_is_a_vector_of_bytes(
        base in any_base(),
        kind in any_kind(),
        cache_bytes in prop_oneof![Just(0usize), Just(64 << 20)],
        ops in prop::collection::vec(any_op(), 1..60),
    ) {
        let mut bench = Bench::new(&base, kind, cache_bytes);
        for op in &ops {
            bench.run(op);
        }
        let size = bench.model.len() as u64;
        bench.compare(0..size);
        bench.close();
        bench.open();
        bench.compare(0..size);
    }
}

// Chains.

#[test]
fn a_chain_of_thirty_layers_reads_each_layers_own() {
    let world = World::new();
    let mut model = pattern(0, 4 * MIB as usize + 700);
    world.raw("/vm/base.img", &model);
    model.resize(5 * MIB as usize, 0);
    let mut parent = "/vm/base.img".to_owned();
    for layer in 1..30u64 {
        let path = format!("/vm/{layer}.vhd");
        world.child(&path, &parent, 5 * MIB, [64 << 10, 2 << 20][layer as usize % 2]);
        let disk = world.open(&path);
        for n in 0..8 {
            let at = (layer * 7919 + n * 104_729) % (10 * KIB) * 512 % (5 * MIB - 4096);
            let at = at / 512 * 512;
            let bytes = pattern(layer * 100 + n, 512 * (1 + (n as usize % 6)));
            write(&disk, at, &bytes);
            model[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
        }
        block_on(disk.close()).unwrap();
        parent = path;
    }
    let disk = world.open(&parent);
    assert_eq!(disk.layers().len(), 30);
    assert!(read(&disk, 0..5 * MIB) == model);
    for at in (0..5 * MIB - 3000).step_by(77_777) {
        assert!(read(&disk, at..at + 3000) == model[at as usize..at as usize + 3000], "{at:#x}");
    }
    // And with a cache that keeps nothing.
    let options = OpenOptions { metadata_cache_bytes: 0, ..OpenOptions::default() };
    assert!(read(&world.try_open(&parent, &options).unwrap(), 0..5 * MIB) == model);
}

#[test]
fn a_raw_parent_with_an_odd_size_ends_at_its_last_byte() {
    for extra in [1, 511, 513, 4095] {
        let world = World::new();
        let len = MIB + extra;
        world.raw("/vm/p.img", &pattern(1, len as usize));
        world.child("/vm/a.vhd", "/vm/p.img", 2 * MIB, 64 << 10);
        world.child("/vm/b.vhd", "/vm/a.vhd", 2 * MIB, 2 << 20);
        for path in ["/vm/a.vhd", "/vm/b.vhd"] {
            let disk = world.open(path);
            let bytes = read(&disk, MIB - 512..MIB + 8192);
            let known = (len - (MIB - 512)) as usize;
            assert!(bytes[..known] == pattern(1, len as usize)[(MIB - 512) as usize..], "{path} {extra}");
            assert!(bytes[known..].iter().all(|&byte| byte == 0), "{path} {extra}");
        }
        // Bytes written into the sector in which the parent ends keep what is beside them.
        let disk = Aligned::new(world.open("/vm/b.vhd"));
        let mut model = pattern(1, len as usize);
        model.resize(2 * MIB as usize, 0);
        write(&disk, len - 1, &[7, 8, 9]);
        model[len as usize - 1..len as usize + 2].copy_from_slice(&[7, 8, 9]);
        assert!(read(&disk, 0..2 * MIB) == model, "{extra}");
    }
}

#[test]
fn the_middle_of_a_chain_may_be_shorter_than_its_ends() {
    let world = World::new();
    world.vhd("/vm/0.vhd", DiskType::Dynamic, 4 * MIB, 2 << 20);
    let disk = world.open("/vm/0.vhd");
    write(&disk, 0, &pattern(1, 4 * MIB as usize));
    block_on(disk.close()).unwrap();
    world.child("/vm/1.vhd", "/vm/0.vhd", MIB + 512, 64 << 10);
    world.child("/vm/2.vhd", "/vm/1.vhd", 4 * MIB, 64 << 10);
    world.child("/vm/3.vhd", "/vm/2.vhd", 4 * MIB, 64 << 10);
    for path in ["/vm/2.vhd", "/vm/3.vhd"] {
        let bytes = read(&world.open(path), 0..4 * MIB);
        let split = (MIB + 512) as usize;
        assert!(bytes[..split] == pattern(1, 4 * MIB as usize)[..split], "{path}");
        assert!(bytes[split..].iter().all(|&byte| byte == 0), "{path}");
    }
}

// Space.

/// Blocks of 64 KiB in a file of that many.
fn thin(world: &World, blocks: u64) -> (Graph<MemStore>, Arc<MemFile>) {
    let file = world.vhd("/vm/a.vhd", DiskType::Dynamic, blocks * 64 * KIB, 64 << 10);
    (world.open("/vm/a.vhd"), file)
}

#[test]
fn discarded_blocks_are_used_again() {
    let world = World::new();
    let (disk, file) = thin(&world, 64);
    for cycle in 0..50 {
        write(&disk, 0, &pattern(cycle, 32 * 64 * KIB as usize));
        flush(&disk);
        discard(&disk, 0..32 * 64 * KIB);
        flush(&disk);
        flush(&disk);
    }
    // Never more than the whole disk and the blocks on their way.
    assert!(file.len() < MIB + 2 * 64 * 70 * KIB, "{}", file.len());
    flush(&disk);
    // What is left is the metadata, and for each place the page of its bitmap.
    assert!(file.allocated_bytes() < 64 * 4 * KIB + 64 * KIB, "{} bytes are left", file.allocated_bytes());
}

#[test]
fn a_guest_that_never_flushes_does_not_fill_the_host() {
    let world = World::new();
    let (disk, file) = thin(&world, 64);
    for cycle in 0..2000 {
        let at = cycle % 8 * 64 * KIB;
        write(&disk, at, &pattern(cycle, 64 * KIB as usize));
        discard(&disk, at..at + 64 * KIB);
    }
    assert!(file.allocated_bytes() < 16 * MIB, "{} bytes in use", file.allocated_bytes());
    assert!(file.len() < 64 * MIB, "{} bytes long", file.len());
}

#[test]
fn a_full_disk_is_rewritten_without_growing() {
    for kind in [FILE, DEVICE] {
        let world = World::new();
        let file = world.vhd_on("/vm/a.vhd", kind, DiskType::Dynamic, 2 * MIB, 64 << 10);
        if kind.is_device {
            // Room for the metadata, the blocks and the footer, and for nothing else.
            file.set_len(MIB + 64 * KIB + 32 * (64 + 4) * KIB);
            file.patch(file.len() - 512, &file.bytes(0, 512));
        }
        let disk = world.open("/vm/a.vhd");
        write(&disk, 0, &pattern(1, 2 * MIB as usize));
        let len = file.len();
        for cycle in 2..5 {
            write(&disk, 0, &pattern(cycle, 2 * MIB as usize));
            assert_eq!(read(&disk, 0..2 * MIB), pattern(cycle, 2 * MIB as usize));
        }
        assert_eq!(file.len(), len);
        block_on(disk.close()).unwrap();
        assert_eq!(read(&world.open("/vm/a.vhd"), 0..2 * MIB), pattern(4, 2 * MIB as usize));
    }
}

#[test]
fn a_full_device_says_so_and_serves_on_and_takes_what_a_discard_frees() {
    let world = World::new();
    let file = world.vhd_on("/vm/a.vhd", DEVICE, DiskType::Dynamic, 4 * MIB, 64 << 10);
    file.set_len(MIB + 64 * KIB + 20 * (64 + 4) * KIB);
    file.patch(file.len() - 512, &file.bytes(0, 512));
    let disk = world.open("/vm/a.vhd");
    let block = 64 * KIB as usize;
    let mut written = 0;
    let error = loop {
        let extent = Extent::from_range(written * 64 * KIB..(written + 1) * 64 * KIB);
        match block_on(disk.write(extent, &Segments::copied(&pattern(written, block)), false)) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), spile_core::ErrorKind::NoSpace, "{error}");
    assert!((18..22).contains(&written), "{written}");
    write(&disk, 0, &pattern(99, block));
    assert_eq!(read(&disk, 64 * KIB..128 * KIB), pattern(1, block));
    discard(&disk, 64 * KIB..128 * KIB);
    write(&disk, 3 * MIB, &pattern(77, block));
    assert!(read(&disk, 64 * KIB..128 * KIB).iter().all(|&byte| byte == 0));
    assert_eq!(read(&disk, 3 * MIB..3 * MIB + 64 * KIB), pattern(77, block));
}

#[test]
fn an_earlier_sessions_gaps_are_used_before_the_file_grows() {
    let world = World::new();
    let (disk, file) = thin(&world, 64);
    write(&disk, 0, &pattern(1, 64 * 64 * KIB as usize));
    discard(&disk, 64 * KIB..40 * 64 * KIB);
    block_on(disk.close()).unwrap();
    let len = file.len();
    let disk = world.open("/vm/a.vhd");
    for block in 1..30 {
        write(&disk, block * 64 * KIB, &pattern(block, 64 * KIB as usize));
    }
    assert_eq!(file.len(), len);
    block_on(disk.close()).unwrap();
    sound(&world, "/vm/a.vhd");
    let disk = world.open("/vm/a.vhd");
    assert_eq!(read(&disk, 64 * KIB..128 * KIB), pattern(1, 64 * KIB as usize));
    assert_eq!(read(&disk, 63 * 64 * KIB..64 * 64 * KIB), pattern(1, 64 * 64 * KIB as usize)[63 * 64 * KIB as usize..]);
}

#[test]
fn a_locator_behind_the_blocks_is_not_taken_for_a_gap() {
    // As after `vhd-util modify -p`: the new locator's text lies at the end of the file.
    let world = World::new();
    world.vhd("/vm/p.vhd", DiskType::Dynamic, 4 * MIB, 64 << 10);
    let file = world.child("/vm/a.vhd", "/vm/p.vhd", 4 * MIB, 64 << 10);
    let disk = world.open("/vm/a.vhd");
    write(&disk, 0, &pattern(1, 8 * 64 * KIB as usize));
    block_on(disk.close()).unwrap();
    let locator = header_of(&file).locators[0].clone();
    let text = file.bytes(locator.offset_bytes, locator.len_bytes as usize);
    let (footer, at) = (file.bytes(0, 512), file.len() - 512);
    file.patch(at, &text);
    file.patch(at + 512, &footer);
    edit_header(&file, |header| {
        header.locators.iter_mut().for_each(|locator| {
            if locator.len_bytes > 0 {
                *locator = spile_image::formats::vhd::codec::locator::Locator {
                    platform: spile_image::formats::vhd::codec::locator::Platform::W2ru,
                    space: 512,
                    len_bytes: text.len() as u32,
                    offset_bytes: at,
                };
            }
        })
    });
    let disk = world.open("/vm/a.vhd");
    write(&disk, 8 * 64 * KIB, &pattern(2, 16 * 64 * KIB as usize));
    discard(&disk, 2 * 64 * KIB..20 * 64 * KIB);
    block_on(disk.close()).unwrap();
    let disk = world.open("/vm/a.vhd");
    write(&disk, 2 * 64 * KIB, &pattern(3, 40 * 64 * KIB as usize));
    block_on(disk.close()).unwrap();
    assert_eq!(file.bytes(at, text.len()), text);
    let disk = world.open("/vm/a.vhd");
    assert_eq!(read(&disk, 2 * 64 * KIB..42 * 64 * KIB), pattern(3, 40 * 64 * KIB as usize));
    assert_eq!(disk.layers().len(), 2);
}

#[test]
fn zeroes_free_space_only_if_they_may() {
    let world = World::new();
    let (disk, file) = thin(&world, 16);
    let all = 16 * 64 * KIB;
    write(&disk, 0, &pattern(1, all as usize));
    zero(&disk, 0..4 * 64 * KIB, false);
    assert_ne!(entry(&file, 0), u32::MAX);
    zero(&disk, 4 * 64 * KIB..8 * 64 * KIB, true);
    assert_eq!(entry(&file, 4), u32::MAX);
    zero(&disk, 8 * 64 * KIB + 4096..9 * 64 * KIB, true);
    assert_ne!(entry(&file, 8), u32::MAX);
    let kinds: Vec<_> = block_on(disk.extents(Extent::from_range(0..all), 100)).unwrap();
    let kinds: Vec<_> = kinds.iter().map(|run| (run.extent.len_bytes / KIB, run.kind)).collect();
    use ExtentKind::{Data, Hole, Zero};
    assert_eq!(kinds, [(256, Zero), (256, Hole), (4, Data), (60, Zero), (448, Data)]);
    assert!(read(&disk, 0..8 * 64 * KIB).iter().all(|&byte| byte == 0));
}

#[test]
fn zeroes_hide_a_parents_data() {
    for may_unmap in [true, false] {
        let world = World::new();
        world.raw("/vm/p.img", &pattern(1, MIB as usize));
        world.child("/vm/a.vhd", "/vm/p.img", MIB, 64 << 10);
        let disk = world.open("/vm/a.vhd");
        zero(&disk, 4096..200 * KIB, may_unmap);
        drop(disk);
        let bytes = read(&world.open("/vm/a.vhd"), 0..MIB);
        let mut model = pattern(1, MIB as usize);
        model[4096..200 * KIB as usize].fill(0);
        assert!(bytes == model, "{may_unmap}");
    }
}

#[test]
fn a_discard_never_brings_a_parents_data_back() {
    let world = World::new();
    world.raw("/vm/p.img", &pattern(1, MIB as usize));
    world.child("/vm/a.vhd", "/vm/p.img", MIB, 64 << 10);
    let disk = world.open("/vm/a.vhd");
    write(&disk, 0, &pattern(2, 128 * KIB as usize));
    discard(&disk, 0..128 * KIB);
    assert!(read(&disk, 0..128 * KIB).iter().all(|&byte| byte == 0));
    drop(disk);
    assert!(read(&world.open("/vm/a.vhd"), 0..128 * KIB).iter().all(|&byte| byte == 0));
}

// What is left behind.

#[test]
fn a_closed_image_is_as_other_programs_expect_it() {
    let world = World::new();
    world.raw("/vm/p.img", &pattern(1, MIB as usize));
    let file = world.child("/vm/a.vhd", "/vm/p.img", MIB, 64 << 10);
    let disk = world.open("/vm/a.vhd");
    write(&disk, 0, &pattern(2, 64 * KIB as usize));
    write(&disk, 3 * 64 * KIB, &pattern(3, 4096));
    assert!(file.len() > 1500 * KIB, "space is prepared ahead");
    block_on(disk.close()).unwrap();
    // The footer is behind the last block, and its copy is the same.
    let ends = [0, 3].map(|block| u64::from(entry(&file, block)) * 512 + 512 + 64 * KIB);
    assert_eq!(file.len(), ends[0].max(ends[1]) + 512);
    assert_eq!(file.bytes(file.len() - 512, 512), file.bytes(0, 512));
    assert!(Footer::parse(&file.bytes(0, 512)).is_ok());
    // Bitmaps: one full, one of eight sectors.
    let bitmap = |block| file.bytes(u64::from(entry(&file, block)) * 512, 512);
    assert_eq!(bitmap(0), [vec![0xff; 16], vec![0; 496]].concat());
    assert_eq!(bitmap(3), [vec![0xff; 1], vec![0; 511]].concat());
    // The batmap names the full one, with a checksum that fits.
    let header = BatmapHeader::parse(&file.bytes(header_of(&file).bat_end_bytes(), 512)).unwrap();
    let range = header.map_bytes();
    let map = file.bytes(range.start, (range.end - range.start) as usize);
    assert!(header.matches(&map, MIB));
    assert_eq!((0..16).filter(|&block| batmap::is_full(&map, block)).collect::<Vec<_>>(), [0]);
    // The journal is void.
    let journal = header.journal_area(header_of(&file).bat_end_bytes()).unwrap();
    for half in [journal.start, (journal.start + journal.end) / 2] {
        assert_eq!(file.bytes(half, 512), vec![0; 512]);
    }
    sound(&world, "/vm/a.vhd");
}

#[test]
fn the_batmap_is_empty_from_the_first_release_to_the_close() {
    let world = World::new();
    let (disk, file) = thin(&world, 16);
    write(&disk, 0, &pattern(1, 16 * 64 * KIB as usize));
    block_on(disk.close()).unwrap();
    let header = || BatmapHeader::parse(&file.bytes(header_of(&file).bat_end_bytes(), 512)).unwrap();
    let map = || file.bytes(header().map_bytes().start, 512);
    assert_eq!(map()[..3], [0xff, 0xff, 0]);
    let disk = world.open("/vm/a.vhd");
    discard(&disk, 5 * 64 * KIB..6 * 64 * KIB);
    assert_eq!(map(), vec![0; 512]);
    assert!(header().matches(&map(), MIB), "tapdisk opens no image whose batmap's checksum is bad");
    block_on(disk.close()).unwrap();
    assert_eq!(map()[..3], [0b1111_1011, 0xff, 0]);
}

// Death.

/// A child of a parent full of data; returns the disk after one small write that no flush followed.
fn unflushed(world: &World) -> (Arc<MemFile>, Graph<MemStore>) {
    world.raw("/vm/p.img", &pattern(1, MIB as usize));
    let file = world.child("/vm/a.vhd", "/vm/p.img", MIB, 64 << 10);
    let disk = world.open("/vm/a.vhd");
    write(&disk, 8192, &pattern(2, 4096));
    (file, disk)
}

#[test]
fn an_acknowledged_write_survives_the_process() {
    let world = World::new();
    let (_, disk) = unflushed(&world);
    for _ in 0..3 {
        drop(world.open("/vm/a.vhd"));
    }
    drop(disk);
    let disk = world.open("/vm/a.vhd");
    assert!(disk.layers()[0].unflushed);
    assert_eq!(read(&disk, 8192..12288), pattern(2, 4096));
    // What was taken over is written by the next flush, and survives a power cut then.
    flush(&disk);
    drop(disk);
    world.env.reboot();
    let disk = world.open("/vm/a.vhd");
    assert!(!disk.layers()[0].unflushed);
    assert_eq!(read(&disk, 8192..12288), pattern(2, 4096));
    assert_eq!(read(&disk, 0..8192), pattern(1, MIB as usize)[..8192]);
}

#[test]
fn a_journal_of_another_boot_is_void() {
    let world = World::new();
    let (_, disk) = unflushed(&world);
    drop(disk);
    world.env.reboot();
    let disk = world.open("/vm/a.vhd");
    assert_eq!(read(&disk, 0..16384), pattern(1, MIB as usize)[..16384]);
    write(&disk, 4096, &pattern(3, 4096));
    drop(disk);
    let mut model = pattern(1, 16384);
    model[4096..8192].copy_from_slice(&pattern(3, 4096));
    assert_eq!(read(&world.open("/vm/a.vhd"), 0..16384), model);
}

/// Another host may lose what had returned while this one goes on, so the boot of this one says nothing.
#[test]
fn a_store_on_another_host_has_no_journal() {
    let world = World::new();
    let (file, disk) = unflushed(&world);
    drop(disk);
    file.is_local.store(false, Ordering::Relaxed);
    let disk = world.open("/vm/a.vhd");
    assert!(!disk.layers()[0].unflushed);
    assert_eq!(read(&disk, 8192..12288), pattern(1, MIB as usize)[8192..12288], "a record is trusted");
    let bat_end = header_of(&file).bat_end_bytes();
    let area = BatmapHeader::parse(&file.bytes(bat_end, 512)).unwrap().journal_area(bat_end).unwrap();
    let journal = || file.bytes(area.start, (area.end - area.start) as usize);
    let (before, syncs) = (journal(), file.syncs.load(Ordering::Relaxed));
    write(&disk, 4096, &pattern(3, 4096));
    assert!(journal() == before, "a record is written");
    assert!(file.syncs.load(Ordering::Relaxed) > syncs + 1, "data and bitmap are durable before the answer");
    drop(disk);
    assert_eq!(read(&world.open("/vm/a.vhd"), 4096..8192), pattern(3, 4096));
    let report = block_on(check(&world.files.store("/vm/a.vhd"), &*world.env)).unwrap();
    let said = format!("{:?}", report.findings);
    assert!(!said.contains("the journal holds"), "{said}");
}

#[test]
fn a_journal_of_another_image_is_void() {
    let world = World::new();
    let (file, disk) = unflushed(&world);
    drop(disk);
    edit_footer(&file, |footer| footer.uuid = [0x55; 16]);
    assert_eq!(read(&world.open("/vm/a.vhd"), 0..16384), pattern(1, MIB as usize)[..16384]);
}

#[test]
fn every_byte_of_a_journal_may_be_damaged() {
    let world = World::new();
    let (file, disk) = unflushed(&world);
    drop(disk);
    let bat_end = header_of(&file).bat_end_bytes();
    let journal = BatmapHeader::parse(&file.bytes(bat_end, 512)).unwrap().journal_area(bat_end).unwrap();
    for at in (0..64).chain(4096..4096 + 28) {
        let byte = file.bytes(journal.start + at, 1)[0];
        file.patch(journal.start + at, &[byte ^ 0x10]);
        let bytes = read(&world.open("/vm/a.vhd"), 8192..12288);
        assert!(bytes == pattern(1, MIB as usize)[8192..12288], "byte {at}: a damaged record counted");
        file.patch(journal.start + at, &[byte]);
    }
    assert_eq!(read(&world.open("/vm/a.vhd"), 8192..12288), pattern(2, 4096));
}

#[test]
fn a_record_of_a_released_block_is_gone_before_its_place_is_used_again() {
    // On a device that cannot punch, the place still holds the old data: a stale record would show them.
    let world = World::new();
    world.vhd("/vm/p.vhd", DiskType::Dynamic, MIB, 64 << 10);
    let file = world.child_on("/vm/a.vhd", DEVICE, "/vm/p.vhd", MIB, 64 << 10);
    file.set_len(MIB + 64 * KIB + 8 * (64 + 4) * KIB);
    file.patch(file.len() - 512, &file.bytes(0, 512));
    for restart in [false, true] {
        let mut disk = world.open("/vm/a.vhd");
        write(&disk, 0, &pattern(1, 4096));
        let place = entry(&file, 0);
        discard(&disk, 0..64 * KIB);
        if restart {
            drop(disk);
            disk = world.open("/vm/a.vhd");
        } else {
            (0..4).for_each(|_| flush(&disk));
        }
        // Block 0 goes to every place in turn, until it is where it was.
        for block in 1..100 {
            write(&disk, 8192, &pattern(2, 4096));
            if entry(&file, 0) == place {
                break;
            }
            discard(&disk, 0..64 * KIB);
            (0..4).for_each(|_| flush(&disk));
            assert!(block < 99, "the place was never used again");
        }
        drop(disk);
        let disk = world.open("/vm/a.vhd");
        assert_eq!(read(&disk, 8192..12288), pattern(2, 4096), "restart: {restart}");
        assert!(read(&disk, 0..8192).iter().all(|&byte| byte == 0), "restart: {restart}");
        discard(&disk, 0..MIB);
        block_on(disk.close()).unwrap();
    }
}

#[test]
fn more_writes_than_the_journal_holds() {
    let world = World::new();
    world.raw("/vm/p.img", &pattern(1, 20 * MIB as usize));
    world.child("/vm/a.vhd", "/vm/p.img", 20 * MIB, 2 << 20);
    let disk = world.open("/vm/a.vhd");
    let mut model = pattern(1, 20 * MIB as usize);
    // A record each: every second sector.
    for n in 0..20_000u64 {
        let at = n * 1024;
        write(&disk, at, &[n as u8; 512]);
        model[at as usize..at as usize + 512].fill(n as u8);
    }
    drop(disk);
    assert!(read(&world.open("/vm/a.vhd"), 0..20 * MIB) == model);
}

#[test]
fn a_store_that_fails_gives_errors_and_no_wrong_data() {
    use std::sync::atomic::Ordering::Relaxed;
    let world = World::new();
    let (file, disk) = unflushed(&world);
    file.fails.store(true, Relaxed);
    let extent = Extent::from_range(0..4096);
    assert!(block_on(disk.write(extent, &Segments::copied(&pattern(9, 4096)), false)).is_err());
    assert!(block_on(disk.write(Extent::from_range(MIB / 2..MIB / 2 + 512), &Segments::zeroed(512), false)).is_err());
    assert!(block_on(disk.flush()).is_err());
    assert!(block_on(disk.discard(Extent::from_range(0..MIB))).is_err());
    file.fails.store(false, Relaxed);
    assert_eq!(read(&disk, 8192..12288), pattern(2, 4096));
    write(&disk, MIB / 2, &pattern(4, 4096));
    flush(&disk);
    block_on(disk.close()).unwrap();
    let disk = world.open("/vm/a.vhd");
    assert_eq!(read(&disk, MIB / 2..MIB / 2 + 4096), pattern(4, 4096));
    assert_eq!(read(&disk, 8192..12288), pattern(2, 4096));
}
