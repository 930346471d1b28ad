//! A back end that ends under a live guest, and another that goes on.

use spile_front_blkif::device::End;
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op};
use spile_xen::blkif::status;

use crate::common::disk::Did;
use crate::common::{ACCESSES, Setup, next, pattern, wait_until, write};

#[test]
fn a_successor_goes_on_with_what_the_guest_has_sent_meanwhile() {
    for access in ACCESSES {
        let mut world = Setup::new(access).start();
        let persistent = access == spile_front_blkif::pages::Access::Persistent;
        let (mut front, mut queues) =
            world.connect(BlkfrontOptions { queues: 2, persistent, ..BlkfrontOptions::default() });
        for round in 0..5u64 {
            queues.iter_mut().for_each(|queue| write(queue, 0, &pattern(round, 512)));
            assert_eq!(world.stop(), End::Stopped);
            for (number, queue) in queues.iter_mut().enumerate() {
                queue.data(3).copy_from_slice(0, &pattern(round + 7, 8192));
                queue.submit(3, Op::Write, 16384 * (1 + number as u64), 8192);
                queue.publish();
            }
            world.serve();
            queues.iter_mut().for_each(|queue| assert_eq!(next(queue), (3, status::OKAY)));
            assert_eq!(world.disk.bytes(16384, 8192), pattern(round + 7, 8192), "{access:?}");
            assert_eq!(world.disk.bytes(32768, 8192), pattern(round + 7, 8192), "{access:?}");
            assert_eq!(front.backend_state().unwrap(), 4);
        }
    }
}

/// What was taken is answered before the process ends, and not again.
#[test]
fn a_stop_waits_for_what_was_taken() {
    let mut world = Setup::new(spile_front_blkif::pages::Access::Copy).start();
    let (_front, mut queue) = world.connect_one(BlkfrontOptions::default());
    world.disk.hold();
    (0..8).for_each(|slot| queue.submit(slot, Op::Write, 4096 * slot as u64, 4096));
    queue.publish();
    wait_until("all are at work", || world.disk.held() == 8);
    let device = world.device.as_ref().unwrap();
    device.stop();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(!device.has_ended());
    world.disk.release();
    assert_eq!(world.stop(), End::Stopped);
    world.disk.take_did();
    world.serve();
    let mut slots: Vec<_> = (0..8).map(|_| next(&mut queue).0).collect();
    slots.sort_unstable();
    assert_eq!(slots, (0..8).collect::<Vec<_>>());
    assert_eq!(world.disk.take_did(), [], "nothing was done twice");
}

/// The disk leaves requests undone when the process ends while they wait for trouble to pass.
#[test]
fn what_the_disk_leaves_undone_is_done_by_a_successor() {
    let mut world = Setup::new(spile_front_blkif::pages::Access::Copy).start();
    let (_front, mut queue) = world.connect_one(BlkfrontOptions::default());
    world.disk.fail(Some(spile_core::ErrorKind::Shutdown));
    for (slot, op) in [Op::Write, Op::Read, Op::Flush].into_iter().enumerate() {
        let len_bytes = if op == Op::Flush { 0 } else { 4096 };
        queue.submit(slot, op, 4096 * slot as u64, len_bytes);
    }
    queue.publish();
    let mut did = 0;
    wait_until("all were tried", || {
        did += world.disk.take_did().len();
        did == 3
    });
    assert_eq!(world.stop(), End::Stopped);
    assert_eq!((queue.outstanding(), is_answered(&mut queue)), (3, false), "what was left undone is answered");
    world.disk.fail(None);
    world.serve();
    let mut slots: Vec<_> = (0..3).map(|_| next(&mut queue)).collect();
    slots.sort_unstable();
    assert_eq!(slots, [(0, status::OKAY), (1, status::OKAY), (2, status::OKAY)]);
    assert_eq!(held(&mut world), 0, "a flush that was left undone counts as failed");
}

/// A write that was left undone is done by the successor: a barrier that came after it waits for that.
#[test]
fn no_barrier_overtakes_what_was_left_undone() {
    let mut world = Setup::new(spile_front_blkif::pages::Access::Copy).start();
    let (_front, mut queue) = world.connect_one(BlkfrontOptions::default());
    world.disk.fail(Some(spile_core::ErrorKind::Shutdown));
    queue.submit(0, Op::Write, 0, 4096);
    queue.publish();
    wait_until("it was tried", || !world.disk.take_did().is_empty());
    world.disk.fail(None);
    queue.submit(1, Op::Barrier, 0, 4096);
    queue.publish();
    // Long enough for it to be taken and answered.
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(world.stop(), End::Stopped);
    assert_eq!((world.disk.take_did(), is_answered(&mut queue)), (vec![], false));
    world.serve();
    let mut slots = [next(&mut queue), next(&mut queue)];
    slots.sort_unstable();
    assert_eq!(slots, [(0, status::OKAY), (1, status::OKAY)]);
    let did = world.disk.take_did();
    assert!(matches!(did[..], [Did::Write { fua: false, .. }, Did::Flush, Did::Write { fua: true, .. }]), "{did:?}");
}

/// True when the guest finds an answer without waiting.
fn is_answered(queue: &mut spile_lab::xen::blkfront::Queue) -> bool {
    queue.take().unwrap().is_some()
}

/// The guest waits for its requests before it lets the disk go, and for us after that.
#[test]
fn a_successor_ends_what_was_being_detached() {
    let mut world = Setup::new(spile_front_blkif::pages::Access::Copy).start();
    let (mut front, mut queue) = world.connect_one(BlkfrontOptions::default());
    world.stop();
    queue.submit(0, Op::Write, 0, 4096);
    queue.publish();
    world.set_backend_key("online", "0");
    world.set_backend_key("state", "5");
    world.serve();
    assert_eq!(next(&mut queue), (0, status::OKAY));
    front.stop(vec![queue]).unwrap();
    assert_eq!(world.ended(), End::Closed);
    assert_eq!(world.backend_key("state").as_deref(), Some("6"));
}

fn held(world: &mut crate::common::World) -> u64 {
    world.device().metrics().first().map_or(0, |ring| ring.held_flushes)
}

/// The kernel tells of a failed sync once. A successor that flushes with success has not saved what was lost.
#[test]
fn a_flush_that_failed_is_not_made_good_by_a_successor() {
    let mut world = Setup::new(spile_front_blkif::pages::Access::Copy).start();
    let (mut front, mut queue) = world.connect_one(BlkfrontOptions::default());
    world.disk.fail(Some(spile_core::ErrorKind::Io));
    queue.submit(5, Op::Flush, 0, 0);
    queue.publish();
    wait_until("the flush", || held(&mut world) == 1);
    world.disk.fail(None);
    world.stop();
    world.serve();
    queue.submit(6, Op::Flush, 0, 0);
    queue.publish();
    wait_until("both flushes", || held(&mut world) == 2);
    write(&mut queue, 0, &pattern(1, 512));
    assert_eq!(queue.outstanding(), 2);
    // A guest that connects anew knows that it has to write again.
    front.set_state(6).unwrap();
    assert_eq!(world.ended(), End::FailedSync);
    assert_eq!(front.backend_state().unwrap(), 6);
    world.serve();
    let mut queue = front.restart().unwrap().remove(0);
    queue.submit(0, Op::Flush, 0, 0);
    queue.publish();
    assert_eq!(next(&mut queue), (0, status::OKAY));
}

#[test]
fn a_successor_tells_of_what_has_grown_meanwhile() {
    let mut world = Setup::new(spile_front_blkif::pages::Access::Copy).start();
    let (mut front, _queue) = world.connect_one(BlkfrontOptions::default());
    world.stop();
    let (engine, disk) = (world.engine.clone(), world.disk.clone());
    let size = 2 * crate::common::SIZE;
    engine.run_on(0, move || async move { spile_core::Disk::resize(&*disk, size).await }).unwrap();
    world.serve();
    wait_until("the new size", || front.refresh().unwrap().size_bytes() == size);
}

/// Older Linux guests say that they close while the disk is mounted, and go on using it.
#[test]
fn a_guest_that_is_about_to_close_is_served_until_it_has() {
    let mut world = Setup::new(spile_front_blkif::pages::Access::Copy).start();
    let (mut front, mut queue) = world.connect_one(BlkfrontOptions::default());
    world.set_backend_key("online", "0");
    world.set_backend_key("state", "5");
    front.set_state(5).unwrap();
    write(&mut queue, 0, &pattern(1, 4096));
    world.stop();
    world.serve();
    write(&mut queue, 4096, &pattern(2, 4096));
    front.stop(vec![queue]).unwrap();
    assert_eq!(world.ended(), End::Closed);
}
