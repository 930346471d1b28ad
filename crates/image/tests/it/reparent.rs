//! A differencing VHD that gives up what it has, and gets another parent or none, in memory.

use std::ops::Range;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::support::*;
use spile_core::{Disk, ErrorKind, Extent, Locator, Segments, Timer};
use spile_image::check::Severity;
use spile_image::create::NewParent;
use spile_image::formats::vhd::codec::footer::{DiskType, Footer};
use spile_image::formats::vhd::codec::header::Header;
use spile_image::layer::Layer;
use spile_image::{Format, Graph, GraphLayer, OpenOptions, open_layer};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 64 << 10;
const PARENT: &str = "/vm/parent.vhd";
const LEAF: &str = "/vm/leaf.vhd";

/// A parent with a pattern all over, and a child whose first ten blocks hold the same.
fn pair(kind: Kind, batmap: bool) -> (World, Arc<MemFile>) {
    let world = World::new();
    world.vhd(PARENT, DiskType::Dynamic, 2 * MIB, BLOCK as u32);
    let parent = world.open(PARENT);
    write(&parent, 0, &pattern(1, 2 * MIB as usize));
    block_on(parent.close()).unwrap();
    let file = world.child_on(LEAF, kind, PARENT, 2 * MIB, BLOCK as u32);
    let leaf = world.open(LEAF);
    write(&leaf, 0, &pattern(1, 10 * BLOCK as usize));
    match batmap {
        true => block_on(leaf.close()).unwrap(),
        false => block_on(leaf.flush()).unwrap(),
    }
    drop(leaf);
    file.forget_ways();
    (world, file)
}

fn leaf_of(graph: &Graph<MemStore>) -> Arc<GraphLayer<MemStore>> {
    graph.handles()[0].clone()
}

fn forget(graph: &Graph<MemStore>, range: Range<u64>) {
    block_on(leaf_of(graph).image().forget(Extent::from_range(range))).unwrap();
}

fn give_back(leaf: &GraphLayer<MemStore>, most_bytes: u64) -> u64 {
    block_on(leaf.image().give_back(most_bytes, &Watch::default())).unwrap().bytes
}

/// A clock that goes on by a microsecond whenever somebody looks at it.
#[derive(Default)]
struct Watch {
    now_us: AtomicU64,
}

impl Timer for Watch {
    fn sleep(&self, _: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(async {})
    }

    fn now_ns(&self) -> u64 {
        self.now_us.fetch_add(1, Relaxed) * 1000
    }
}

fn all(disk: &impl Disk) -> Vec<u8> {
    read(disk, 0..disk.info().size_bytes)
}

fn held(graph: &Graph<MemStore>) -> Vec<u64> {
    let (leaf, mut at, mut held) = (leaf_of(graph), 0, Vec::new());
    while let Some(part) = leaf.image().next_held(Extent::from_range(at..2 * MIB)) {
        held.push(part.start() / BLOCK);
        at = part.end();
    }
    held
}

#[track_caller]
fn assert_sound(world: &World, path: &str) {
    let report = block_on(Format::Vhd.check(&world.files.store(path), &*world.env)).unwrap();
    let bad: Vec<_> = report.findings.iter().filter(|finding| finding.severity == Severity::Corruption).collect();
    assert!(bad.is_empty(), "{bad:?}");
}

/// Changes the bytes below, and looks from which layer those of the leaf come.
fn is_below(world: &World, graph: &Graph<MemStore>, at: u64) -> bool {
    let parent = world.files.file(PARENT);
    let sector = u64::from(entry(&parent, at / BLOCK)) * 512 + 512 + at % BLOCK;
    let before = parent.bytes(sector, 512);
    parent.patch(sector, &[0xEE; 512]);
    let seen = read(graph, at..at + 512);
    parent.patch(sector, &before);
    seen == [0xEE; 512]
}

#[test]
fn a_block_that_is_given_up_reads_from_below_and_frees_its_space() {
    for (kind, batmap) in [(FILE, false), (FILE, true), (DEVICE, true)] {
        let (world, file) = pair(kind, batmap);
        let graph = world.open(LEAF);
        let before = all(&graph);
        let taken = file.allocated_bytes();
        for block in 0..9 {
            forget(&graph, block * BLOCK..(block + 1) * BLOCK);
        }
        assert_eq!(held(&graph), [9]);
        assert!(is_below(&world, &graph, 5 * BLOCK) && !is_below(&world, &graph, 9 * BLOCK));
        assert!(all(&graph) == before);
        (0..3).for_each(|_| block_on(graph.flush()).unwrap());
        assert!(kind.is_device || file.allocated_bytes() + 8 * BLOCK < taken, "the space is not given back");
        block_on(graph.close()).unwrap();
        drop(graph);
        assert_sound(&world, LEAF);
        assert!(all(&world.open(LEAF)) == before);
    }
}

#[test]
fn blocks_whose_release_a_failed_sync_may_have_lost_are_not_used_again() {
    for flushes_before in 0..2 {
        let (world, file) = pair(FILE, true);
        let graph = world.open(LEAF);
        let (before, taken) = (all(&graph), file.allocated_bytes());
        (0..9).for_each(|block| forget(&graph, block * BLOCK..(block + 1) * BLOCK));
        file.fails.store(true, Relaxed);
        assert!((0..=flushes_before).all(|_| block_on(graph.flush()).is_err()));
        file.fails.store(false, Relaxed);
        (0..4).for_each(|_| block_on(graph.flush()).unwrap());
        assert_eq!(give_back(&leaf_of(&graph), u64::MAX), 0);
        assert!(file.allocated_bytes() + BLOCK > taken, "the medium may name these places");
        // What is released from now on is as ever.
        forget(&graph, 9 * BLOCK..10 * BLOCK);
        (0..4).for_each(|_| block_on(graph.flush()).unwrap());
        assert!(file.allocated_bytes() < taken);
        assert!(all(&graph) == before);
        block_on(graph.close()).unwrap();
    }
}

/// What becomes of a place that a record of the journal names.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// The record goes before it is ready.
    Retired,
    /// The record was to go, and that has failed.
    FailsAgain,
    /// The place is held for a merge, which is cancelled.
    Held,
}

#[test]
fn a_place_that_a_record_may_name_is_not_used_again() {
    // Other blocks take the places that are ready before, so the block gets its old place again with one of these numbers.
    let is_used_again = |others, way| {
        let (world, file) = pair(FILE, false);
        let graph = world.open(LEAF);
        let (at, before) = (20 * BLOCK, all(&graph));
        let fail_in = |changes| {
            file.fails_in.store(changes, Relaxed);
            assert!(block_on(graph.flush()).is_err());
            assert_eq!(file.fails_in.load(Relaxed), 0);
        };
        write(&graph, at, &[7; 512]);
        let place = entry(&file, 20);
        // The header of the journal's half is the last thing that a flush writes: here behind two syncs with a bitmap between them.
        fail_in(4);
        // A merge that is cancelled leaves what it has given up as it is, for later.
        graph.hold_own_space(way == Way::Held);
        forget(&graph, at..at + BLOCK);
        block_on(graph.flush()).unwrap();
        graph.hold_own_space(false);
        // The record of what was given up is still there, and its place could be ready now.
        match way {
            Way::FailsAgain => fail_in(3),
            Way::Retired => block_on(graph.flush()).unwrap(),
            Way::Held => {}
        }
        let blocks = (10..20).chain(21..32);
        blocks.take(others).for_each(|block| write(&graph, block * BLOCK, &[9; 512]));
        write(&graph, at + 4096, &[8; 512]);
        let is_used_again = entry(&file, 20) == place;
        // The process is killed.
        drop(graph);
        let (after, start) = (all(&world.open(LEAF)), at as usize);
        assert!(after[start..start + 4096] == before[start..start + 4096], "{others} {way:?} {is_used_again}");
        assert_eq!(after[start + 4096..start + 4608], [8; 512]);
        is_used_again
    };
    for way in [Way::Retired, Way::FailsAgain, Way::Held] {
        let again = (14..22).filter(|others| is_used_again(*others, way)).count();
        assert!(again > 0, "{way:?}: the place is lost");
    }
}

#[test]
fn space_that_flushes_hold_is_given_back_bit_by_bit() {
    for (kind, stops) in [(FILE, false), (FILE, true), (DEVICE, false)] {
        let (world, file) = pair(kind, true);
        let graph = world.open(LEAF);
        let (before, leaf, taken) = (all(&graph), leaf_of(&graph), file.allocated_bytes());
        let give_back = |most_bytes| give_back(&leaf, most_bytes);
        leaf.image().hold_space(true);
        (0..9).for_each(|block| forget(&graph, block * BLOCK..(block + 1) * BLOCK));
        assert_eq!(give_back(u64::MAX), 0, "a power cut could bring the blocks back");
        (0..3).for_each(|_| block_on(graph.flush()).unwrap());
        assert!(file.allocated_bytes() + BLOCK > taken, "flushes hold the space");
        if !kind.is_device {
            let held = file.allocated_bytes();
            for steps in 1..=3 {
                assert!((4096..=8192).contains(&give_back(8192)), "a bit of a block");
                assert_eq!((held - file.allocated_bytes()).div_ceil(8192), steps);
            }
        }
        // What is begun is never used for something else.
        write(&graph, 20 * BLOCK, &before[20 * BLOCK as usize..][..512]);
        if stops {
            let held = file.allocated_bytes();
            leaf.image().hold_space(false);
            (0..4).for_each(|_| block_on(graph.flush()).unwrap());
            assert_eq!(give_back(u64::MAX), 0);
            assert_eq!(file.allocated_bytes(), held, "guests' flushes free all that was held");
            // What is given up from now on is freed as ever.
            forget(&graph, 9 * BLOCK..10 * BLOCK);
            (0..3).for_each(|_| block_on(graph.flush()).unwrap());
            assert!(file.allocated_bytes() < held);
            // Whoever begins anew gives back what was left.
            leaf.image().hold_space(true);
            let given: u64 = (0..3).map(|_| give_back(BLOCK)).sum();
            assert!(given >= 2 * BLOCK && give_back(BLOCK) > 0);
            leaf.image().hold_space(false);
        } else {
            let mut given = 0;
            while let more @ 1.. = give_back(3 * BLOCK) {
                assert!(more <= 3 * (BLOCK + 4096));
                given += more;
            }
            assert!(given >= 8 * BLOCK);
            assert!(kind.is_device || file.allocated_bytes() + 7 * BLOCK < taken);
        }
        // A sync later the places may be used again.
        block_on(graph.flush()).unwrap();
        write(&graph, 12 * BLOCK, &before[12 * BLOCK as usize..20 * BLOCK as usize]);
        assert!(all(&graph) == before);
        block_on(graph.close()).unwrap();
        drop((leaf, graph));
        assert_sound(&world, LEAF);
        assert!(all(&world.open(LEAF)) == before);
    }
}

#[test]
fn the_time_of_a_guests_flush_is_not_that_of_giving_back() {
    let (world, file) = pair(FILE, true);
    let graph = world.open(LEAF);
    let (leaf, watch) = (leaf_of(&graph), Watch::default());
    leaf.image().hold_space(true);
    (0..4).for_each(|block| forget(&graph, block * BLOCK..(block + 1) * BLOCK));
    (0..3).for_each(|_| block_on(graph.flush()).unwrap());
    file.holds_syncs.store(true, Relaxed);
    let (mut flush, mut give_back) = (pin!(graph.flush()), pin!(leaf.image().give_back(BLOCK, &watch)));
    assert!(poll_once(flush.as_mut()).is_pending() && poll_once(give_back.as_mut()).is_pending());
    watch.now_us.fetch_add(1_000_000, Relaxed);
    file.holds_syncs.store(false, Relaxed);
    block_on(flush).unwrap();
    let given = block_on(give_back).unwrap();
    assert!(given.bytes >= BLOCK && !given.has_readers);
    assert_eq!(given.took, Duration::from_micros(1), "the flush is in it");
}

#[test]
fn a_request_that_does_not_end_is_told() {
    let (world, file) = pair(SLOW_FILE, true);
    let graph = world.open(LEAF);
    let leaf = leaf_of(&graph);
    leaf.image().hold_space(true);
    let taken = file.allocated_bytes();
    let into = Segments::zeroed(4096);
    let mut read = pin!(graph.read(Extent::from_range(0..4096), &into));
    assert!(poll_once(read.as_mut()).is_pending());
    forget(&graph, 0..BLOCK);
    let give_back = || {
        (0..3).for_each(|_| block_on(graph.flush()).unwrap());
        block_on(leaf.image().give_back(u64::MAX, &Watch::default())).unwrap()
    };
    let given = give_back();
    assert_eq!((given.bytes, given.has_readers, file.allocated_bytes()), (0, true, taken));
    block_on(read).unwrap();
    let given = give_back();
    assert!(given.bytes >= BLOCK && !given.has_readers && file.allocated_bytes() < taken);
}

#[test]
fn a_part_that_is_given_up_stays_below_when_the_process_is_killed() {
    for batmap in [false, true] {
        let (world, _) = pair(FILE, batmap);
        let graph = world.open(LEAF);
        let before = all(&graph);
        // Records of the journal name block 20, which is given up in part, and of which the rest is kept.
        write(&graph, 20 * BLOCK, &before[20 * BLOCK as usize..][..8192]);
        forget(&graph, 20 * BLOCK..20 * BLOCK + 4096);
        forget(&graph, 4096..BLOCK - 512);
        write(&graph, 8192, &before[8192..8704]);
        drop(graph);
        let graph = world.open(LEAF);
        assert!(all(&graph) == before);
        let below = |at| is_below(&world, &graph, at);
        assert!(below(20 * BLOCK) && !below(20 * BLOCK + 4096) && below(4096) && below(BLOCK - 1024));
        assert!(!below(0) && !below(8192) && !below(BLOCK - 512));
        // What is left of both, bit by bit.
        forget(&graph, 0..4096);
        forget(&graph, BLOCK - 512..BLOCK);
        assert!(held(&graph).contains(&0), "one sector is left");
        forget(&graph, 8192..8704);
        forget(&graph, 20 * BLOCK + 4096..20 * BLOCK + 8192);
        assert_eq!(held(&graph), (1..10).collect::<Vec<_>>());
        block_on(graph.close()).unwrap();
        assert_sound(&world, LEAF);
    }
}

/// A flush that has looked at the bitmap before it lost bits does not bring them back.
#[test]
fn a_part_waits_for_the_flush_that_writes_its_bits() {
    let (world, file) = pair(FILE, true);
    let graph = world.open(LEAF);
    let before = all(&graph);
    write(&graph, 20 * BLOCK, &before[20 * BLOCK as usize..][..8192]);
    file.holds_syncs.store(true, Relaxed);
    let leaf = leaf_of(&graph);
    {
        let mut flush = pin!(graph.flush());
        assert!(poll_once(flush.as_mut()).is_pending());
        let mut forget = pin!(leaf.image().forget(Extent::from_range(20 * BLOCK..20 * BLOCK + 512)));
        assert!(poll_once(forget.as_mut()).is_pending());
        file.holds_syncs.store(false, Relaxed);
        while poll_once(flush.as_mut()).is_pending() {}
        while poll_once(forget.as_mut()).is_pending() {}
    }
    drop((graph, leaf));
    let graph = world.open(LEAF);
    assert!(is_below(&world, &graph, 20 * BLOCK) && !is_below(&world, &graph, 20 * BLOCK + 512));
}

/// While a reader may be at the place of a block that was given up, the place is not emptied.
#[test]
fn a_reader_keeps_the_place_of_a_block() {
    let (world, file) = pair(FILE, true);
    let graph = world.open(LEAF);
    let data_at = u64::from(entry(&file, 0)) * 512 + 512;
    file.held_read.store(data_at, Relaxed);
    let into = Segments::zeroed(BLOCK as usize);
    let mut reader = pin!(graph.read(Extent::from_range(0..BLOCK), &into));
    assert!(poll_once(reader.as_mut()).is_pending());
    forget(&graph, 0..BLOCK);
    (0..5).for_each(|_| block_on(graph.flush()).unwrap());
    assert_eq!(file.bytes(data_at, 512), pattern(1, 512), "punched under a reader");
    file.lets_read_go.store(true, Relaxed);
    block_on(reader).unwrap();
    (0..3).for_each(|_| block_on(graph.flush()).unwrap());
    assert_eq!(file.bytes(data_at, 512), [0; 512]);
}

#[test]
fn only_what_has_a_parent_gives_up_anything() {
    let (world, _) = pair(FILE, true);
    let parent = world.open(PARENT);
    let error = block_on(leaf_of(&parent).image().forget(Extent::from_range(0..BLOCK))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    drop(parent);
    let graph = world.try_open(LEAF, &OpenOptions { read_only: true, ..OpenOptions::default() }).unwrap();
    let error = block_on(leaf_of(&graph).image().forget(Extent::from_range(0..BLOCK))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnly);
    let error = block_on(leaf_of(&graph).image().set_parent(None)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnly);
}

/// A write that fails leaves the part where it was, and what is written to it then is not lost.
#[test]
fn a_failure_gives_nothing_up() {
    let (world, file) = pair(FILE, true);
    let graph = world.open(LEAF);
    let before = all(&graph);
    for part in [0..BLOCK, 512..1024] {
        file.fails.store(true, Relaxed);
        block_on(leaf_of(&graph).image().forget(Extent::from_range(part))).unwrap_err();
        file.fails.store(false, Relaxed);
    }
    assert!(all(&graph) == before && !is_below(&world, &graph, 512));
}

fn new_parent(world: &World, path: &str) -> NewParent {
    let name = path.rsplit('/').next().unwrap().to_owned();
    let graph = world.try_open(path, &OpenOptions { read_only: true, ..OpenOptions::default() }).unwrap();
    let format = graph.layers()[0].format;
    NewParent {
        relative_path: name.clone(),
        name,
        format,
        identity: leaf_of(&graph).image().identity(),
        changed_unix_s: Some(1_600_000_000),
    }
}

fn header_now(file: &MemFile) -> Header {
    Header::parse(&file.bytes(footer_of(file).data_offset.unwrap(), 1024)).unwrap()
}

fn set_parent(graph: &Graph<MemStore>, parent: Option<&NewParent>) {
    block_on(leaf_of(graph).image().set_parent(parent)).unwrap();
}

/// `base` <- `middle` <- the leaf; the middle one is empty.
fn three(kind: Kind) -> (World, Arc<MemFile>) {
    let world = World::new();
    world.vhd("/vm/base.vhd", DiskType::Dynamic, 2 * MIB, BLOCK as u32);
    let base = world.open("/vm/base.vhd");
    write(&base, 0, &pattern(1, 2 * MIB as usize));
    block_on(base.close()).unwrap();
    world.child("/vm/middle.vhd", "/vm/base.vhd", 2 * MIB, BLOCK as u32);
    let file = world.child_on(LEAF, kind, "/vm/middle.vhd", 2 * MIB, BLOCK as u32);
    write(&world.open(LEAF), 4096, &pattern(2, 4096));
    file.forget_ways();
    (world, file)
}

#[test]
fn another_parent_is_found_from_then_on() {
    for kind in [FILE, DEVICE] {
        let (world, file) = three(kind);
        let graph = world.open(LEAF);
        let before = all(&graph);
        set_parent(&graph, Some(&new_parent(&world, "/vm/base.vhd")));
        assert!(all(&graph) == before);
        let copy = Footer::parse(&file.bytes(0, 512)).unwrap();
        assert_eq!(copy, footer_of(&file));
        write(&graph, MIB, &pattern(3, 4096));
        // It is killed.
        drop(graph);
        assert_sound(&world, LEAF);
        let graph = world.open(LEAF);
        assert_eq!(graph.layers().len(), 2);
        assert_eq!((read(&graph, 0..4096), read(&graph, MIB..MIB + 4096)), (pattern(1, 4096), pattern(3, 4096)));
        block_on(graph.close()).unwrap();
        drop(graph);
        let report = block_on(Format::Vhd.check(&world.files.store(LEAF), &*world.env)).unwrap();
        assert!(report.findings.iter().all(|found| found.severity == Severity::Note), "{:?}", report.findings);
        let header = header_now(&file);
        assert_eq!((header.parent_name.as_str(), header.parent_timestamp), ("base.vhd", 1_600_000_000 - 946_684_800));
        assert_eq!(world.open(LEAF).layers().len(), 2);
    }
}

#[test]
fn a_parent_that_changes_again_and_again_takes_one_pair_of_places() {
    for (kind, is_foreign) in [(FILE, false), (FILE, true), (DEVICE, false)] {
        let (world, file) = three(kind);
        if is_foreign {
            // Without a batmap there is no journal, as in a file that another program has made.
            edit_footer(&file, |footer| footer.creator = *b"win ");
        }
        let parents = ["/vm/base.vhd", "/vm/middle.vhd"].map(|path| new_parent(&world, path));
        let mut longest = None;
        for round in 0..12 {
            let graph = world.open(LEAF);
            let before = all(&graph);
            for parent in &parents[..1 + round % 2] {
                set_parent(&graph, Some(parent));
            }
            // In another program's file, what a killed process has prepared for blocks is not used again.
            if !is_foreign {
                write(&graph, (round as u64 % 5) * BLOCK, &before[(round % 5) * BLOCK as usize..][..512]);
            }
            if round % 3 == 0 {
                block_on(graph.close()).unwrap();
            }
            drop(graph);
            file.forget_ways();
            assert_sound(&world, LEAF);
            let graph = world.open(LEAF);
            assert_eq!((graph.layers().len(), all(&graph) == before), (2 + round % 2, true), "round {round}");
            // What the disk needs by itself is taken by now.
            block_on(graph.close()).unwrap();
            drop(graph);
            file.forget_ways();
            let most = *longest.get_or_insert(file.len() + 4 * (BLOCK + 8192));
            assert!(file.len() <= most, "round {round}: {} bytes, and not {most}", file.len());
        }
    }
}

#[test]
fn without_a_parent_the_bytes_under_clear_bits_are_zero() {
    let world = World::new();
    world.raw("/vm/parent.img", &vec![0; 2 * MIB as usize]);
    let file = world.child(LEAF, "/vm/parent.img", 2 * MIB, BLOCK as u32);
    let graph = world.open(LEAF);
    write(&graph, 0, &pattern(1, BLOCK as usize));
    write(&graph, 5 * BLOCK, &pattern(2, 4096));
    // Bytes that nobody may see: their bits are clear.
    forget(&graph, 8192..BLOCK);
    let before = all(&graph);
    let data_at = u64::from(entry(&file, 0)) * 512 + 512;
    assert_ne!(file.bytes(data_at + 8192, 512), [0; 512]);
    set_parent(&graph, None);
    assert_eq!(file.bytes(data_at, BLOCK as usize), before[..BLOCK as usize]);
    assert!(all(&graph) == before);
    write(&graph, 9 * BLOCK + 512, &pattern(3, 512));
    drop(graph);
    assert_sound(&world, LEAF);
    let graph = world.open(LEAF);
    assert_eq!(read(&graph, 9 * BLOCK + 512..9 * BLOCK + 1024), pattern(3, 512));
    assert!(read(&graph, 0..9 * BLOCK) == before[..9 * BLOCK as usize]);
    assert_eq!((graph.layers().len(), footer_of(&file).disk_type), (1, DiskType::Dynamic));
    set_parent(&graph, None);
    let error = block_on(leaf_of(&graph).image().set_parent(Some(&NewParent {
        relative_path: "parent.img".into(),
        name: "parent.img".into(),
        format: Format::Raw,
        identity: None,
        changed_unix_s: None,
    })))
    .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    block_on(graph.close()).unwrap();
    let header = header_now(&file);
    assert_eq!((header.parent_uuid, header.parent_name.as_str()), ([0; 16], ""));
}

/// When the last step fails, another call does it, and is not content with what the image is in memory.
#[test]
fn without_a_parent_is_said_only_when_it_is_durable() {
    let world = World::new();
    world.raw("/vm/parent.img", &vec![0; 2 * MIB as usize]);
    let file = world.child(LEAF, "/vm/parent.img", 2 * MIB, BLOCK as u32);
    let graph = world.open(LEAF);
    write(&graph, 0, &pattern(1, 4096));
    file.fails_at_start.store(true, Relaxed);
    for _ in 0..2 {
        block_on(leaf_of(&graph).image().set_parent(None)).unwrap_err();
    }
    file.fails_at_start.store(false, Relaxed);
    let syncs = file.syncs.load(Relaxed);
    set_parent(&graph, None);
    assert!(file.syncs.load(Relaxed) > syncs);
    assert_eq!(Footer::parse(&file.bytes(0, 512)).unwrap().disk_type, DiskType::Dynamic);
}

/// Blocks that hold only a part of their bytes hold all of them afterwards, part by part, and nothing is left to the change of the parent.
#[test]
fn what_a_leaf_has_space_for_is_filled_with_zeroes() {
    let world = World::new();
    world.raw("/vm/parent.img", &vec![0; 2 * MIB as usize]);
    let file = world.child(LEAF, "/vm/parent.img", 2 * MIB, BLOCK as u32);
    let graph = world.open(LEAF);
    write(&graph, 8192, &pattern(1, 4096));
    write(&graph, 5 * BLOCK, &pattern(2, BLOCK as usize));
    let before = all(&graph);
    // Bytes that nobody may see: their bits are clear.
    let data_at = u64::from(entry(&file, 0)) * 512 + 512;
    file.patch(data_at, &[0xEE; 512]);
    let unfilled = |at: u64| block_on(graph.next_unfilled(Extent::from_range(at..2 * MIB))).unwrap();
    assert_eq!(unfilled(0), Some(Extent::from_range(0..8192)));
    assert_eq!((unfilled(8192), unfilled(BLOCK)), (Some(Extent::from_range(12288..BLOCK)), None));
    block_on(graph.own_zeroes(Extent::from_range(0..BLOCK / 2))).unwrap();
    assert_eq!(unfilled(0), Some(Extent::from_range(BLOCK / 2..BLOCK)));
    block_on(graph.own_zeroes(Extent::from_range(BLOCK / 2..2 * MIB))).unwrap();
    assert_eq!((unfilled(0), held(&graph)), (None, vec![0, 5]));
    // The process is killed, and the bits are there.
    drop(graph);
    let graph = world.open(LEAF);
    assert_eq!(block_on(graph.next_unfilled(Extent::from_range(0..2 * MIB))).unwrap(), None);
    assert!(all(&graph) == before);
    set_parent(&graph, None);
    drop(graph);
    assert_sound(&world, LEAF);
    assert!(all(&world.open(LEAF)) == before);
}

#[test]
fn a_name_that_a_vhd_cannot_express_changes_nothing() {
    let (world, file) = three(FILE);
    let graph = world.open(LEAF);
    let parent = NewParent { relative_path: "a\\b.vhd".into(), ..new_parent(&world, "/vm/base.vhd") };
    let error = block_on(leaf_of(&graph).image().set_parent(Some(&parent))).unwrap_err();
    assert_eq!((error.kind(), footer_of(&file).data_offset), (ErrorKind::InvalidInput, Some(512)));
}

/// A layer that is opened for writing by itself, as a merge does with an inner one.
#[test]
fn an_inner_image_gives_up_its_blocks_too() {
    let (world, _) = pair(FILE, true);
    let at = Locator::from(std::path::Path::new(LEAF));
    let layer = block_on(open_layer(&world.files, world.env.clone(), at, &OpenOptions::default())).unwrap();
    for block in 0..10 {
        block_on(layer.image().forget(Extent::from_range(block * BLOCK..(block + 1) * BLOCK))).unwrap();
    }
    assert_eq!(layer.image().next_held(Extent::from_range(0..2 * MIB)), None);
    block_on(layer.seal()).unwrap();
    drop(layer);
    assert_sound(&world, LEAF);
    assert!(all(&world.open(LEAF)) == pattern(1, 2 * MIB as usize));
}
