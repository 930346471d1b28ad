//! A VHD that is made longer or shorter while nobody uses it, in a host that ends at any step: it opens with the old size or with the
//! new one, with all that was in it, and takes writes.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;

use spile_core::{Disk, Extent, Files, OpenMode, Segments};
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_image::formats::vhd::{CreateParams, create};
use spile_image::{Graph, OpenOptions};
use spile_sim::exec::{Executor, block_on};
use spile_sim::rng::Rng;
use spile_sim::{SimStore, World};

use crate::hosts::with_file_or_device;

const DISK: &str = "/disk.vhd";
const OLD_BYTES: u64 = 1 << 20;
const BLOCK_BYTES: u32 = 4096;
const DEVICE_BYTES: u64 = 8 << 20;
/// Data are at the start, in the middle and at the end.
const DATA: [u64; 3] = [0, OLD_BYTES / 2, OLD_BYTES - 4096];

async fn open(world: &World) -> Graph<SimStore> {
    Graph::open(&world.files(), world.env(), Path::new(DISK), &OpenOptions::default()).await.unwrap()
}

async fn write(disk: &Graph<SimStore>, at: u64, byte: u8) {
    disk.write(Extent::from_range(at..at + 4096), &Segments::copied(&[byte; 4096]), false).await.unwrap();
}

async fn read(disk: &Graph<SimStore>) -> Vec<u8> {
    let size_bytes = disk.info().size_bytes;
    let into = Segments::copied(&vec![9; size_bytes as usize]);
    disk.read(Extent::from_range(0..size_bytes), &into).await.unwrap();
    into.to_vec()
}

/// A host with an image, closed or left by a process that was killed after a flush.
fn host(seed: u64, disk_type: DiskType) -> World {
    let mut rng = Rng::new(seed).split(3);
    let world = with_file_or_device(seed, &mut rng, 3, DISK, DEVICE_BYTES);
    let there = world.clone();
    block_on(&world, async move {
        let params = CreateParams { block_size_bytes: BLOCK_BYTES, ..CreateParams::new(disk_type, OLD_BYTES) };
        let store = there.files().open(&Path::new(DISK).into(), OpenMode::ReadWrite).await.unwrap();
        create(&store, &*there.env(), &params).await.unwrap();
        drop(store);
        let disk = open(&there).await;
        for at in DATA {
            write(&disk, at, 1).await;
        }
        disk.flush().await.unwrap();
        if rng.chance(1, 2) {
            disk.close().await.unwrap();
        }
    });
    world
}

/// One life of at most `limit` steps once the disk is open; whether the resize ended in it.
fn life(world: &World, seed: u64, new_bytes: u64, limit: u64, power: bool) -> bool {
    let there = world.clone();
    let disk = block_on(world, async move { open(&there).await });
    let mut executor = Executor::new(world.clone(), Rng::new(seed));
    let told = Rc::new(Cell::new(false));
    let told_there = told.clone();
    executor.spawn(async move {
        disk.resize_unused(new_bytes).await.unwrap();
        told_there.set(true);
    });
    executor.run(limit);
    if power {
        world.cut_power()
    } else {
        world.kill()
    }
    told.get()
}

/// Opens the disk and looks at all of it, twice: writes come between.
fn check(world: &World, disk_type: DiskType, new_bytes: u64, was_told: bool) -> bool {
    let there = world.clone();
    let (first, second) = block_on(world, async move {
        let disk = open(&there).await;
        let first = read(&disk).await;
        let last = disk.info().size_bytes - 4096;
        write(&disk, last, 2).await;
        write(&disk, 8192, 2).await;
        disk.close().await.unwrap();
        drop(disk);
        (first, read(&open(&there).await).await)
    });
    let size = first.len() as u64;
    assert!(size == new_bytes || (size == OLD_BYTES && !was_told), "{size} bytes, told: {was_told}");
    for at in 0..size / 4096 {
        let offset = at as usize * 4096;
        let expected = u8::from(DATA.contains(&(at * 4096)));
        let page = &first[offset..offset + 4096];
        // Until the last step of a fixed image, one of its footers lies behind the end that does not count.
        let is_footer = disk_type == DiskType::Fixed && at * 4096 == new_bytes.min(OLD_BYTES) && !was_told;
        assert!(is_footer || page.iter().all(|byte| *byte == expected), "at {offset:#x} of {size:#x}");
        let is_written = at == 2 || (at + 1) * 4096 == size;
        let page_now = &second[offset..offset + 4096];
        assert!(if is_written { page_now.iter().all(|byte| *byte == 2) } else { page_now == page }, "{offset:#x}");
    }
    size == new_bytes
}

fn explore(disk_type: DiskType, new_bytes: u64, seeds: u64, steps: u64) {
    let (mut told, mut grown) = (0, 0);
    for seed in 0..seeds {
        let world = host(seed, disk_type);
        let was_told = life(&world, seed, new_bytes, Rng::new(seed).split(2).below(steps), seed % 2 == 0);
        told += u64::from(was_told);
        grown += u64::from(check(&world, disk_type, new_bytes, was_told));
    }
    assert!(told > seeds / 20 && grown > told && grown < seeds, "{told} told, {grown} grown");
}

#[test]
fn an_image_gets_shorter_at_any_step() {
    explore(DiskType::Fixed, OLD_BYTES / 4 * 3, 300, 20);
    explore(DiskType::Dynamic, OLD_BYTES / 4 * 3, 300, 60);
}

/// What was cut off does not come back when the disk grows again, wherever the host ended.
#[test]
fn what_was_cut_off_is_zero_when_it_is_there_again() {
    for seed in 0..200 {
        let world = host(seed, DiskType::Dynamic);
        // In the middle of a page with data, which is a block.
        let shorter = OLD_BYTES / 2 + 512;
        life(&world, seed, shorter, Rng::new(seed).split(2).below(60), seed % 2 == 0);
        let there = world.clone();
        block_on(&world, async move {
            let disk = open(&there).await;
            let size_bytes = disk.info().size_bytes;
            disk.resize_unused(2 * OLD_BYTES).await.unwrap();
            let bytes = read(&open(&there).await).await;
            assert!(bytes[size_bytes as usize..].iter().all(|byte| *byte == 0), "seed {seed}, from {size_bytes}");
        });
    }
}

#[test]
fn a_fixed_image_grows_at_any_step() {
    explore(DiskType::Fixed, 2 << 20, 300, 60);
}

#[test]
fn a_dynamic_image_with_a_new_table_grows_at_any_step() {
    explore(DiskType::Dynamic, 2 << 20, 300, 150);
}
