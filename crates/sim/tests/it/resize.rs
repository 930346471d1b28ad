//! A raw disk that grows while it is written to, in a host that ends at any step: the new size that was told is there
//! after a power cut, and what lies in the disk is as it was.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;

use spile_core::{Disk, Extent, Segments};
use spile_image::{Graph, OpenOptions};
use spile_sim::exec::{Executor, block_on};
use spile_sim::rng::Rng;
use spile_sim::{Hardware, SimStore, World};

const DISK: &str = "/disk.raw";
const OLD_BYTES: u64 = 64 << 10;
const NEW_BYTES: u64 = 256 << 10;

async fn open(world: &World) -> Graph<SimStore> {
    Graph::open(&world.files(), world.env(), Path::new(DISK), &OpenOptions::default()).await.unwrap()
}

/// Writes into the second half of what there is, and flushes.
async fn write(disk: &Graph<SimStore>, mut rng: Rng) {
    for _ in 0..rng.between(1, 10) {
        let page = disk.info().size_bytes / 4096;
        let start = (page / 2 + rng.below(page / 2)) * 4096;
        let from = Segments::copied(&[2; 4096]);
        disk.write(Extent::from_range(start..start + 4096), &from, rng.chance(1, 4)).await.unwrap();
    }
}

/// One life of at most `limit` steps once the disk is open; whether the new size was told in it.
fn life(world: &World, seed: u64, limit: u64) -> bool {
    let world_there = world.clone();
    let disk = Rc::new(block_on(world, async move { open(&world_there).await }));
    let mut executor = Executor::new(world.clone(), Rng::new(seed));
    let told = Rc::new(Cell::new(false));
    let (disk_there, told_there) = (disk.clone(), told.clone());
    executor.spawn(async move {
        disk_there.resize(NEW_BYTES).await.unwrap();
        assert_eq!(disk_there.info().size_bytes, NEW_BYTES);
        told_there.set(true);
    });
    executor.spawn(async move { write(&disk, Rng::new(seed).split(1)).await });
    executor.run(limit);
    world.cut_power();
    told.get()
}

fn check(world: &World, was_told: bool) -> u64 {
    let world_there = world.clone();
    let (size_bytes, content) = block_on(world, async move {
        let disk = open(&world_there).await;
        let size_bytes = disk.info().size_bytes;
        let into = Segments::copied(&vec![9; size_bytes as usize]);
        disk.read(Extent::from_range(0..size_bytes), &into).await.unwrap();
        (size_bytes, into.to_vec())
    });
    assert!(size_bytes == NEW_BYTES || (size_bytes == OLD_BYTES && !was_told), "{size_bytes} bytes, told: {was_told}");
    let (old, new) = content.split_at(OLD_BYTES as usize);
    assert!(old[..old.len() / 2].iter().all(|byte| *byte == 1) && old.iter().all(|byte| [1, 2].contains(byte)));
    assert!(new.iter().all(|byte| [0, 2].contains(byte)));
    size_bytes
}

#[test]
fn a_size_that_was_told_survives_a_power_cut() {
    let (mut told, mut grown) = (0, 0);
    for seed in 0..600 {
        let align_bytes = if seed % 2 == 0 { 512 } else { 4096 };
        let world = World::new(seed, Hardware { align_bytes, punches: true, devices: false });
        world.install(DISK, &vec![1; OLD_BYTES as usize]);
        let was_told = life(&world, seed, Rng::new(seed).split(2).below(60));
        told += u64::from(was_told);
        grown += u64::from(check(&world, was_told) == NEW_BYTES);
    }
    assert!(told > 50 && grown > told && grown < 600, "{told} told, {grown} grown");
}
