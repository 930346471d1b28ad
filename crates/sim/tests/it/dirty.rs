//! A qcow2 image whose refcounts are wrong, as its last writer was killed, is opened for writing in a host that ends at any step, twice: it shows what it
//! showed, takes writes, and is sound then. A store that does not sync is found.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;

use spile_core::{Disk, Extent, Files, OpenMode, Segments, Store, StoreOffset, Via};
use spile_image::create::{NewImage, Options};
use spile_image::{Format, Graph, OpenOptions};
use spile_sim::exec::{Executor, block_on};
use spile_sim::faults::Sabotage;
use spile_sim::rng::Rng;
use spile_sim::{SimStore, World};

use crate::hosts::with_file_or_device;

const DISK: &str = "/disk.qcow2";
const SIZE: u64 = 1 << 20;
const CLUSTER: u64 = 4096;
const DEVICE_BYTES: u64 = 4 << 20;
/// Every third cluster has data.
const DATA_EVERY: u64 = 3;
const SEEDS: u64 = 200;

async fn open(world: &World, read_only: bool) -> Graph<SimStore> {
    let options = OpenOptions { read_only, ..OpenOptions::default() };
    Graph::open(&world.files(), world.env(), Path::new(DISK), &options).await.unwrap()
}

async fn write(disk: &Graph<SimStore>, cluster: u64, byte: u8) {
    let (at, bytes) = (cluster * CLUSTER, Segments::copied(&[byte; CLUSTER as usize]));
    disk.write(Extent::from_range(at..at + CLUSTER), &bytes, false).await.unwrap();
}

/// The byte of each cluster, all of whose bytes are the same.
async fn content(world: &World) -> Vec<u8> {
    let (disk, into) = (open(world, true).await, Segments::zeroed(SIZE as usize));
    disk.read(Extent::from_range(0..SIZE), &into).await.unwrap();
    let bytes = into.to_vec();
    let same = |cluster: &[u8]| if cluster.iter().all(|byte| *byte == cluster[0]) { cluster[0] } else { 0xff };
    bytes.chunks(CLUSTER as usize).map(same).collect()
}

fn expected() -> Vec<u8> {
    (0..SIZE / CLUSTER).map(|cluster| u8::from(cluster % DATA_EVERY == 0)).collect()
}

/// A host with an image that is marked dirty. Each of its counts may be wrong, and too low as well as too high.
fn host(seed: u64) -> World {
    let mut rng = Rng::new(seed).split(3);
    let world = with_file_or_device(seed, &mut rng, 3, DISK, DEVICE_BYTES);
    let there = world.clone();
    block_on(&world, async move {
        let options = Options { lazy_refcounts: true, ..Options::default() };
        let new = NewImage { unit_bytes: Some(CLUSTER as u32), options, ..NewImage::new(SIZE) };
        let store = there.files().open(&Path::new(DISK).into(), OpenMode::ReadWrite).await.unwrap();
        Format::Qcow2.create(&store, &*there.env(), &new).await.unwrap();
        drop(store);
        let disk = open(&there, false).await;
        for cluster in (0..SIZE / CLUSTER).filter(|cluster| cluster % DATA_EVERY == 0) {
            write(&disk, cluster, 1).await;
        }
        disk.close().await.unwrap();
        drop(disk);
        let store = there.files().open(&Path::new(DISK).into(), OpenMode::ReadWrite).await.unwrap();
        spoil(&store, rng).await;
    });
    world.settle(Path::new(DISK));
    world
}

/// Marks the image dirty, and changes half of the counts in its first refcount block.
async fn spoil(store: &SimStore, mut rng: Rng) {
    let put =
        async |at: u64, bytes: &[u8]| store.write_at(StoreOffset(at), &Segments::copied(bytes), Via::Cached).await;
    // New images have the table behind the header, and the block behind the table.
    let counts = (0..SIZE / CLUSTER).filter(|_| rng.chance(1, 2)).collect::<Vec<_>>();
    for cluster in counts {
        put(2 * CLUSTER + cluster * 2, &(rng.below(3) as u16).to_be_bytes()).await.unwrap();
    }
    put(79, &[1]).await.unwrap();
}

/// One life of at most `limit` steps, in which the image is opened for writing; whether that was done in it.
fn life(world: &World, seed: u64, limit: u64, power: bool) -> bool {
    let (mut executor, there) = (Executor::new(world.clone(), Rng::new(seed)), world.clone());
    let is_open = Rc::new(Cell::new(false));
    let told = is_open.clone();
    executor.spawn(async move {
        drop(open(&there, false).await);
        told.set(true);
    });
    executor.run(limit);
    if power {
        world.cut_power()
    } else {
        world.kill()
    }
    is_open.get()
}

/// What is wrong with the image after all that, if something is.
fn fault(world: &World) -> Option<String> {
    let there = world.clone();
    block_on(world, async move {
        if content(&there).await != expected() {
            return Some("the opening has changed what the disk shows".to_owned());
        }
        let disk = open(&there, false).await;
        // Each cluster that the counts call free is used.
        for cluster in 0..SIZE / CLUSTER {
            if cluster % DATA_EVERY == 1 {
                write(&disk, cluster, 2).await;
            }
        }
        disk.close().await.unwrap();
        drop(disk);
        let written = (0..SIZE / CLUSTER).map(|cluster| [1, 2, 0][(cluster % DATA_EVERY) as usize]);
        if content(&there).await != written.collect::<Vec<_>>() {
            return Some("a write has changed other clusters".to_owned());
        }
        let store = there.files().open(&Path::new(DISK).into(), OpenMode::ReadOnly).await.unwrap();
        let report = Format::Qcow2.check(&store, &*there.env()).await.unwrap();
        report.findings.first().map(|found| found.message.clone())
    })
}

#[test]
fn a_dirty_image_is_opened_in_a_host_that_ends_at_any_step() {
    let mut opened = 0;
    for seed in 0..SEEDS {
        let (world, mut rng) = (host(seed), Rng::new(seed).split(2));
        assert_eq!(
            block_on(&world, {
                let there = world.clone();
                async move { content(&there).await }
            }),
            expected()
        );
        for turn in 0..2 {
            opened += u64::from(life(&world, seed + turn, rng.below(120), seed % 3 != 0));
        }
        assert_eq!(fault(&world), None, "seed {seed}");
    }
    assert!(opened > SEEDS / 4 && opened < 2 * SEEDS - SEEDS / 4, "{opened} of {} were opened", 2 * SEEDS);
}

#[test]
fn an_image_whose_new_refcounts_are_not_durable_before_the_mark_falls_is_found() {
    let is_found = |seed| {
        let world = host(seed);
        world.set_sabotage(Sabotage::SkipSync { every: 1, phase: 0 });
        let was_open = life(&world, seed, u64::MAX, true);
        world.set_sabotage(Sabotage::None);
        was_open && std::panic::catch_unwind(|| fault(&world)).is_ok_and(|fault| fault.is_some())
    };
    assert!((0..SEEDS).any(is_found), "no seed has found it");
}
