//! Races that threads meet once in a million runs, forced: futures are polled by hand, and the store holds one read or
//! sync back for as long as it takes.

use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

use crate::support::*;
use spile_core::{Disk, Extent, Segments};
use spile_image::OpenOptions;
use spile_image::formats::vhd::codec::footer::DiskType;

const KIB: u64 = 1 << 10;
const SIZE: u64 = 8 << 20;
const BLOCK: u32 = 16 << 10;
const A: &str = "/vm/a.vhd";

fn at(start: u64, len: u64) -> Extent {
    Extent::from_range(start..start + len)
}

fn small_cache() -> OpenOptions {
    OpenOptions { metadata_cache_bytes: 0, ..OpenOptions::default() }
}

/// Puts so many other bitmaps into the cache that an idle one goes.
fn crowd_out(disk: &impl Disk) {
    for block in 1..30 {
        write(disk, block * 16 * u64::from(BLOCK), &[3; 512]);
        block_on(disk.flush()).unwrap();
    }
}

/// A bitmap that was read before a write changed it must not come into the cache after the write's own was written
/// and dropped: the write would be forgotten.
#[test]
fn a_bitmap_read_early_does_not_come_in_late() {
    let world = World::new();
    world.raw("/vm/p.img", &pattern(1, SIZE as usize));
    let file = world.child(A, "/vm/p.img", SIZE, BLOCK);
    let disk = world.open(A);
    write(&disk, 0, &pattern(2, 512));
    block_on(disk.close()).unwrap();

    let disk = world.try_open(A, &small_cache()).unwrap();
    file.held_read.store(u64::from(entry(&file, 0)) * 512, Relaxed);
    let into = Segments::zeroed(512);
    let mut reader = pin!(disk.read(at(0, 512), &into));
    assert!(poll_once(reader.as_mut()).is_pending());
    let data = Segments::copied(&pattern(4, 512));
    let mut writer = pin!(disk.write(at(4096, 512), &data, false));
    let mut acknowledged = poll_once(writer.as_mut()).is_ready();
    if acknowledged {
        block_on(disk.flush()).unwrap();
        crowd_out(&disk);
    }
    file.lets_read_go.store(true, Relaxed);
    block_on(reader).unwrap();
    while !acknowledged {
        acknowledged = poll_once(writer.as_mut()).is_ready();
    }
    assert_eq!(read(&disk, 4096..4608), pattern(4, 512));
    assert_eq!(into.to_vec(), pattern(2, 512));
}

/// A reader that learns late that a block was full must not mark it as full after the block was released and allocated
/// again.
#[test]
fn a_late_reader_does_not_speak_for_a_blocks_next_place() {
    let world = World::new();
    world.vhd("/vm/p.vhd", DiskType::Dynamic, SIZE, BLOCK);
    let file = world.child_on(A, DEVICE, "/vm/p.vhd", SIZE, BLOCK);
    // What a device holds where nothing was ever written.
    let first = file.bytes(0, 2 << 20).iter().rposition(|&byte| byte != 0).unwrap() as u64 + 4096;
    file.patch(first, &vec![0xee; SIZE as usize]);
    let disk = world.open(A);
    write(&disk, 0, &pattern(2, BLOCK as usize));
    block_on(disk.flush()).unwrap();
    drop(disk);

    let disk = world.try_open(A, &small_cache()).unwrap();
    let old = entry(&file, 0);
    file.held_read.store(u64::from(old) * 512, Relaxed);
    let into = Segments::zeroed(512);
    let mut reader = pin!(disk.read(at(512, 512), &into));
    assert!(poll_once(reader.as_mut()).is_pending());
    block_on(disk.discard(at(0, u64::from(BLOCK)))).unwrap();
    write(&disk, 4096, &pattern(5, 512));
    assert_ne!(entry(&file, 0), old, "the place is known to a reader");
    block_on(disk.flush()).unwrap();
    crowd_out(&disk);
    assert!((0..30).all(|block| entry(&file, block * 16) != old), "the place is known to a reader");
    file.lets_read_go.store(true, Relaxed);
    block_on(reader).unwrap();
    let expected = [vec![0; 4096], pattern(5, 512), vec![0; BLOCK as usize - 4608]].concat();
    assert!(read(&disk, 0..u64::from(BLOCK)) == expected);
    block_on(disk.close()).unwrap();
    assert!(read(&world.open(A), 0..u64::from(BLOCK)) == expected);
}

/// Without a journal a write waits for its bit to be durable; so must a second write to the same sectors.
#[test]
fn without_a_journal_no_write_is_acknowledged_on_anothers_promise() {
    for whole_block in [false, true] {
        let world = World::new();
        world.raw("/vm/p.img", &pattern(1, SIZE as usize));
        let file = world.child(A, "/vm/p.img", SIZE, BLOCK);
        edit_footer(&file, |footer| footer.creator = *b"win ");
        let disk = world.open(A);
        write(&disk, 8 * KIB, &pattern(6, 512));
        let len = if whole_block { u64::from(BLOCK) } else { 4096 };
        let (first, second) = (pattern(2, len as usize), pattern(3, 512));
        let (first_data, second_data) = (Segments::copied(&first), Segments::copied(&second));
        file.holds_syncs.store(true, Relaxed);
        let acknowledged = {
            let mut a = pin!(disk.write(at(0, len), &first_data, false));
            assert!(poll_once(a.as_mut()).is_pending());
            let mut b = pin!(disk.write(at(0, 512), &second_data, false));
            matches!(poll_once(b.as_mut()), Poll::Ready(Ok(())))
        };
        // Death of the process, with both under way.
        drop(disk);
        file.holds_syncs.store(false, Relaxed);
        let found = read(&world.open(A), 0..512);
        assert!(!acknowledged || found == second, "an acknowledged write is gone");
    }
}

/// While readers may use a released block's place, it is not given out again. Flushes do not wait for these readers.
#[test]
fn a_reader_that_never_ends_holds_up_one_place_only() {
    let world = World::new();
    let file = world.vhd(A, DiskType::Dynamic, SIZE, BLOCK);
    let disk = world.open(A);
    write(&disk, 0, &pattern(1, BLOCK as usize));
    let data_at = u64::from(entry(&file, 0)) * 512 + 512;
    file.held_read.store(data_at, Relaxed);
    let into = Segments::zeroed(BLOCK as usize);
    let mut reader = pin!(disk.read(at(0, u64::from(BLOCK)), &into));
    assert!(poll_once(reader.as_mut()).is_pending());
    block_on(disk.discard(at(0, u64::from(BLOCK)))).unwrap();
    for _ in 0..5 {
        block_on(disk.flush()).unwrap();
    }
    assert_eq!(file.bytes(data_at, BLOCK as usize), pattern(1, BLOCK as usize), "punched under a reader");
    file.lets_read_go.store(true, Relaxed);
    block_on(reader).unwrap();
    assert_eq!(into.to_vec(), pattern(1, BLOCK as usize));
    for _ in 0..3 {
        block_on(disk.flush()).unwrap();
    }
    assert!(file.bytes(data_at, BLOCK as usize).iter().all(|&byte| byte == 0), "never punched");
}

/// Flushes that come while one is running are served by the next, all together.
#[test]
fn flushes_join() {
    let world = World::new();
    let file = world.vhd(A, DiskType::Dynamic, SIZE, BLOCK);
    let disk = world.open(A);
    write(&disk, 0, &pattern(1, 4096));
    let before = file.syncs.load(Relaxed);
    file.holds_syncs.store(true, Relaxed);
    let mut flushes: Vec<_> = (0..20).map(|_| Box::pin(disk.flush())).collect();
    assert!(flushes.iter_mut().all(|flush| poll_once(flush.as_mut()).is_pending()));
    file.holds_syncs.store(false, Relaxed);
    let mut open: Vec<_> = flushes.iter_mut().collect();
    for _ in 0..100 {
        open.retain_mut(|flush| match poll_once(flush.as_mut()) {
            Poll::Ready(result) => {
                result.unwrap();
                false
            }
            Poll::Pending => true,
        });
    }
    assert!(open.is_empty(), "{} flushes never ended", open.len());
    assert_eq!(file.syncs.load(Relaxed) - before, 2);
}
