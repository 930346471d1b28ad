//! One disk, several workers: futures of the same disk polled on different threads. Each thread owns some pages of
//! every block, so that all of them meet in the same bitmaps, BAT entries, journal halves and releases; what a
//! thread wrote last is what it must read, at any time, and after the death of the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::*;
use spile_core::{Disk, Extent, Segments, WriteZeroes};
use spile_image::check::Severity;
use spile_image::formats::vhd::check;
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_image::{Graph, OpenOptions};

const THREADS: u64 = 4;
const PAGE: u64 = 4096;
const SIZE: u64 = 1 << 20;
/// A page for each thread.
const BLOCK: u32 = 16 << 10;
const A: &str = "/vm/a.vhd";

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// One thread's work on its pages, with a model of them: every eighth of a page is written by itself.
fn work(disk: &Graph<MemStore>, thread: u64, seed: u64, rounds: u64, model: &mut [u8]) {
    let mut random = Random(seed * 100 + thread);
    for round in 0..rounds {
        let page = random.below(SIZE / PAGE / THREADS) * THREADS + thread;
        let bytes = &mut model[(page * PAGE) as usize..((page + 1) * PAGE) as usize];
        let all = Extent::from_range(page * PAGE..(page + 1) * PAGE);
        match random.below(16) {
            0..8 => {
                let part = random.below(8) * 512;
                let data = pattern(round ^ seed ^ thread << 40, 512);
                bytes[part as usize..part as usize + 512].copy_from_slice(&data);
                let extent = Extent::from_range(page * PAGE + part..page * PAGE + part + 512);
                block_on(disk.write(extent, &Segments::copied(&data), false)).unwrap();
            }
            8..12 => {
                bytes.fill(0);
                let how = WriteZeroes { may_unmap: random.below(4) > 0, only_if_fast: false };
                block_on(disk.write_zeroes(all, how)).unwrap();
            }
            12 => block_on(disk.flush()).unwrap(),
            13 => drop(block_on(disk.extents(Extent::from_range(0..SIZE), 1000)).unwrap()),
            _ => {}
        }
        let now = read(disk, page * PAGE..(page + 1) * PAGE);
        assert!(
            now == model[(page * PAGE) as usize..((page + 1) * PAGE) as usize],
            "thread {thread}, page {page}, round {round}"
        );
    }
}

/// Runs all threads, kills, opens again, several times. `model` is what is on the disk at first.
fn hammer(world: &World, mut model: Vec<u8>, cache_bytes: usize) {
    let options = OpenOptions { metadata_cache_bytes: cache_bytes, ..OpenOptions::default() };
    for life in 0..6 {
        let disk = Arc::new(world.try_open(A, &options).unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let flusher = std::thread::spawn({
            let (disk, stop) = (disk.clone(), stop.clone());
            move || {
                while !stop.load(Ordering::Relaxed) {
                    block_on(disk.flush()).unwrap();
                }
            }
        });
        let workers: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (disk, mut mine) = (disk.clone(), model.clone());
                std::thread::spawn(move || {
                    work(&disk, thread, life, 400, &mut mine);
                    mine
                })
            })
            .collect();
        for (thread, worker) in workers.into_iter().enumerate() {
            let mine = worker.join().expect("a worker failed");
            for page in (thread..(SIZE / PAGE) as usize).step_by(THREADS as usize) {
                let range = page * PAGE as usize..(page + 1) * PAGE as usize;
                model[range.clone()].copy_from_slice(&mine[range]);
            }
        }
        stop.store(true, Ordering::Relaxed);
        flusher.join().unwrap();
        if life % 3 == 2 {
            block_on(disk.close()).unwrap();
        }
        drop(disk);
        let report = block_on(check(&world.files.store(A), &*world.env)).unwrap();
        assert!(report.worst() < Some(Severity::Corruption), "{:?}", report.findings);
        assert!(read(&world.open(A), 0..SIZE) == model, "life {life}");
    }
    let len = world.files.file(A).len();
    assert!(len < 12 * SIZE, "the file has {len} bytes");
}

#[test]
fn workers_share_a_dynamic_disk() {
    let world = World::new();
    world.vhd_on(A, SLOW_FILE, DiskType::Dynamic, SIZE, BLOCK);
    hammer(&world, vec![0; SIZE as usize], 64 << 20);
}

#[test]
fn workers_share_a_child_whose_parent_is_half_full() {
    for cache_bytes in [0, 64 << 20] {
        let world = World::new();
        world.vhd("/vm/p.vhd", DiskType::Dynamic, SIZE, BLOCK);
        let parent = world.open("/vm/p.vhd");
        let mut model = vec![0; SIZE as usize];
        let half = pattern(1, SIZE as usize / 2);
        write(&parent, 0, &half);
        model[..half.len()].copy_from_slice(&half);
        block_on(parent.close()).unwrap();
        world.child_on(A, SLOW_FILE, "/vm/p.vhd", SIZE, BLOCK);
        hammer(&world, model, cache_bytes);
    }
}

#[test]
fn workers_share_a_device_that_cannot_punch() {
    let world = World::new();
    world.vhd_on(A, Kind { slow: true, ..DEVICE }, DiskType::Dynamic, SIZE, BLOCK);
    hammer(&world, vec![0; SIZE as usize], 0);
}

#[test]
fn workers_share_an_image_without_a_journal() {
    let world = World::new();
    world.vhd("/vm/p.vhd", DiskType::Dynamic, SIZE, BLOCK);
    let file = world.child_on(A, SLOW_FILE, "/vm/p.vhd", SIZE, BLOCK);
    edit_footer(&file, |footer| footer.creator = *b"win ");
    hammer(&world, vec![0; SIZE as usize], 64 << 20);
}
