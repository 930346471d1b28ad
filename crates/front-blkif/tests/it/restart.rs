//! A back end that ends under a live guest, and another that goes on.

use spile_front_blkif::device::End;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op};
use spile_xen::blkif::status;

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
