//! Requests of a guest that keeps to the rules, by every way to its memory and in both layouts.

use spile_core::ErrorKind;
use spile_front_blkif::pages::Access;
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op};
use spile_xen::blkif::{Abi, status};

use crate::common::disk::Did;
use crate::common::{ACCESSES, SIZE, Setup, next, pattern, read, request, wait_until, write};

fn options(access: Access) -> BlkfrontOptions {
    BlkfrontOptions { persistent: access == Access::Persistent, ..BlkfrontOptions::default() }
}

#[test]
fn what_is_written_is_read_by_every_way() {
    for access in ACCESSES {
        let mut world = Setup::new(access).start();
        for abi in [Abi::X86_64, Abi::X86_32] {
            let (mut front, mut queue) = world.connect_one(BlkfrontOptions { abi, ..options(access) });
            for (at, len) in [(0, 512), (512, 4096), (8192, 45056), (SIZE - 512, 512), (1536, 8704)] {
                let bytes = pattern(at ^ len, len as usize);
                write(&mut queue, at, &bytes);
                assert_eq!(world.disk.bytes(at, len as usize), bytes, "{access:?} {abi:?} {at}");
                assert_eq!(read(&mut queue, at, len as u32), bytes, "{access:?} {abi:?} {at}");
            }
            front.stop(vec![queue]).unwrap();
            front.set_state(1).unwrap();
            wait_until("another offer", || world.backend_key("state").as_deref() == Some("2"));
        }
    }
}

#[test]
fn indirect_requests_carry_a_mebibyte() {
    for access in ACCESSES {
        let world = Setup::new(access).start();
        let sizes = BlkfrontOptions { indirect_segments: 256, data_bytes: 1 << 20, depth: 4, ..options(access) };
        let (_front, mut queue) = world.connect_one(sizes);
        let bytes = pattern(3, 1 << 20);
        write(&mut queue, 4096, &bytes);
        assert_eq!(world.disk.bytes(4096, 1 << 20), bytes, "{access:?}");
        assert_eq!(read(&mut queue, 4096, 1 << 20), bytes, "{access:?}");
    }
}

#[test]
fn every_ring_size_is_used_to_the_full() {
    for ring_order in 0..=4 {
        let world = Setup::new(Access::Copy).start();
        let depth = 32 << ring_order;
        let sizes = BlkfrontOptions { ring_order, depth, data_bytes: 4096, ..BlkfrontOptions::default() };
        let (_front, mut queue) = world.connect_one(sizes);
        assert_eq!(queue.slots(), depth);
        world.disk.hold();
        for slot in 0..depth {
            queue.data(slot).fill(slot as u8);
            queue.submit(slot, Op::Write, 4096 * slot as u64, 4096);
        }
        queue.publish();
        wait_until("all are at work", || world.disk.held() == depth);
        world.disk.release();
        let mut slots: Vec<_> = (0..depth).map(|_| next(&mut queue)).collect();
        slots.sort_unstable();
        assert_eq!(slots, (0..depth).map(|slot| (slot, status::OKAY)).collect::<Vec<_>>());
        assert_eq!(world.disk.bytes(4096 * (depth as u64 - 1), 1), [(depth - 1) as u8]);
    }
}

#[test]
fn queues_are_served_side_by_side() {
    let world = Setup::new(Access::Copy).start();
    let (_front, mut queues) = world.connect(BlkfrontOptions { queues: 4, ..BlkfrontOptions::default() });
    assert_eq!(queues.len(), 4);
    for (number, queue) in queues.iter_mut().enumerate() {
        write(queue, 8192 * number as u64, &pattern(number as u64, 8192));
    }
    for (number, queue) in queues.iter_mut().enumerate() {
        let other = (number as u64 + 1) % 4;
        assert_eq!(read(queue, 8192 * other, 8192), pattern(other, 8192));
    }
}

#[test]
fn flushes_and_discards_reach_the_disk() {
    let world = Setup::new(Access::Copy).start();
    let (front, mut queue) = world.connect_one(BlkfrontOptions::default());
    let features = front.features();
    assert!(features.flush && features.barrier && features.discard);
    assert!(!features.persistent && !features.discard_secure);
    assert_eq!((features.max_indirect_segments, features.max_ring_order, features.max_queues), (256, 4, 4));
    assert_eq!(request(&mut queue, Op::Flush, 0, 0), status::OKAY);
    assert_eq!(request(&mut queue, Op::Discard(false), 65536, 131072), status::OKAY);
    assert_eq!(world.disk.take_did(), [Did::Flush, Did::Discard(65536, 131072)]);
}

/// Case 23.
#[test]
fn a_barrier_lets_nothing_pass() {
    let world = Setup::new(Access::Copy).start();
    let (_front, mut queue) = world.connect_one(BlkfrontOptions::default());
    world.disk.hold();
    queue.submit(0, Op::Write, 0, 4096);
    queue.submit(1, Op::Read, 8192, 4096);
    queue.submit(2, Op::Barrier, 4096, 4096);
    queue.submit(3, Op::Barrier, 0, 0);
    queue.submit(4, Op::Read, 0, 4096);
    queue.publish();
    wait_until("those before it", || world.disk.held() == 2);
    world.disk.release_at(0);
    assert_eq!(next(&mut queue), (0, status::OKAY));
    assert_eq!(world.disk.held(), 1, "the barrier waits for the read");
    world.disk.release_at(8192);
    assert_eq!(next(&mut queue), (1, status::OKAY));
    wait_until("the barrier's flush", || world.disk.held() == 1);
    world.disk.release_at(u64::MAX);
    wait_until("the barrier's data", || world.disk.held() == 1);
    world.disk.release_at(4096);
    assert_eq!(next(&mut queue), (2, status::OKAY));
    wait_until("the next barrier's flush", || world.disk.held() == 1);
    world.disk.release();
    assert_eq!((next(&mut queue), next(&mut queue)), ((3, status::OKAY), (4, status::OKAY)));
    let wanted = [
        Did::Write { at: 0, len: 4096, fua: false },
        Did::Read(8192, 4096),
        Did::Flush,
        Did::Write { at: 4096, len: 4096, fua: true },
        Did::Flush,
        Did::Read(0, 4096),
    ];
    assert_eq!(world.disk.take_did(), wanted);
}

#[test]
fn failures_are_told_and_a_flush_that_fails_is_held() {
    let world = Setup::new(Access::Copy).start();
    let (_front, mut queue) = world.connect_one(BlkfrontOptions::default());
    world.disk.fail(Some(ErrorKind::Io));
    assert_eq!(request(&mut queue, Op::Read, 0, 4096), status::ERROR);
    assert_eq!(request(&mut queue, Op::Write, 0, 4096), status::ERROR);
    world.disk.fail(Some(ErrorKind::Unsupported));
    assert_eq!(request(&mut queue, Op::Discard(false), 0, 4096), status::EOPNOTSUPP);
    world.disk.fail(Some(ErrorKind::Io));
    queue.submit(7, Op::Flush, 0, 0);
    queue.publish();
    wait_until("the flush", || world.disk.take_did().contains(&Did::Flush));
    world.disk.fail(None);
    // All else goes on; the flush is never answered.
    (0..40).for_each(|_| assert_eq!(request(&mut queue, Op::Read, 0, 4096), status::OKAY));
    assert_eq!(queue.outstanding(), 1);
    let held = world.device.as_ref().unwrap().metrics()[0].held_flushes;
    assert_eq!(held, 1);
}

/// The reason for the default: what the guest does to its pages after it has submitted them changes what is sent when they
/// are mapped, and cannot when they were copied.
#[test]
fn a_guest_that_scribbles_changes_what_is_sent_only_when_its_pages_are_mapped() {
    for (access, changes) in [(Access::Map, true), (Access::Copy, false), (Access::MapCopy, false)] {
        let world = Setup::new(access).start();
        let (_front, mut queue) = world.connect_one(options(access));
        world.disk.hold();
        queue.data(0).fill(0xaa);
        queue.submit(0, Op::Write, 0, 4096);
        queue.publish();
        wait_until("the write is at work", || world.disk.held() == 1);
        queue.data(0).fill(0xbb);
        world.disk.release();
        assert_eq!(next(&mut queue), (0, status::OKAY));
        let sent = if changes { 0xbb } else { 0xaa };
        assert_eq!(world.disk.bytes(0, 4096), vec![sent; 4096], "{access:?}");
    }
}
