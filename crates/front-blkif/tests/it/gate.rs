//! A disk that goes to another host: its guest waits while it is not here.

use std::time::Duration;

use spile_core::ErrorKind;
use spile_front::{Door, Passage};
use spile_front_blkif::device::End;
use spile_front_blkif::pages::Access;
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op, Queue};
use spile_xen::blkif::status;

use crate::common::{Setup, World, next, pattern, read, wait_until, write};

/// What the guest asks for now is not answered.
fn asks_in_vain(queue: &mut Queue) {
    queue.submit(0, Op::Read, 0, 4096);
    queue.publish();
    assert!(!queue.sleep(Duration::from_millis(100)).unwrap(), "it did not wait");
}

fn hand_over(world: &mut World) {
    world.device().gate().shut().unwrap();
    assert_eq!(world.device().gate().passage(), Passage::Gone);
    assert!(world.backend_key("handed-over").is_some());
}

#[test]
fn a_guest_waits_from_the_hand_over_on_until_it_is_let_in() {
    let mut world = Setup::new(Access::Copy).start();
    let (_front, mut queue) = world.connect_one(BlkfrontOptions::default());
    write(&mut queue, 0, &pattern(1, 4096));
    let gate = world.device().gate();
    hand_over(&mut world);
    asks_in_vain(&mut queue);
    assert_eq!(gate.shut().unwrap_err().kind(), ErrorKind::Busy);
    gate.let_in().unwrap();
    assert_eq!(next(&mut queue), (0, status::OKAY));
    assert_eq!(read(&mut queue, 0, 4096), pattern(1, 4096));
    assert_eq!((gate.passage(), world.backend_key("handed-over")), (Passage::Open, None));
    // It may go again, and who says it twice changes nothing.
    hand_over(&mut world);
    gate.let_in().unwrap();
    gate.let_in().unwrap();
    write(&mut queue, 0, &pattern(2, 4096));
}

/// The same with processes that end in between, in order and by a pause.
#[test]
fn the_next_process_knows_that_the_disk_is_gone() {
    let mut world = Setup::new(Access::Copy).start();
    let (_front, mut queue) = world.connect_one(BlkfrontOptions::default());
    write(&mut queue, 0, &pattern(1, 4096));
    hand_over(&mut world);
    assert_eq!(world.stop(), End::Stopped);
    queue.submit(0, Op::Read, 0, 4096);
    queue.publish();
    world.serve();
    wait_until("the gate", || world.device().gate().passage() == Passage::Gone);
    assert!(!queue.sleep(Duration::from_millis(100)).unwrap(), "it did not wait");
    world.set_backend_key("pause", "");
    assert_eq!(world.ended(), End::Paused);
    world.remove_backend_key("pause");
    world.serve();
    wait_until("the gate", || world.device().gate().passage() == Passage::Gone);
    world.device().gate().let_in().unwrap();
    assert_eq!(next(&mut queue), (0, status::OKAY));
    assert_eq!(read(&mut queue, 0, 4096), pattern(1, 4096));
}

#[test]
fn a_disk_is_not_handed_over_under_a_guest_that_runs() {
    let mut world = Setup::new(Access::Copy).start();
    let (_front, mut queue) = world.connect_one(BlkfrontOptions::default());
    let gate = world.device().gate();
    // A request at the disk.
    world.disk.hold();
    queue.submit(1, Op::Read, 0, 4096);
    queue.publish();
    wait_until("a request at the disk", || world.disk.held() == 1);
    assert_eq!(gate.shut().unwrap_err().kind(), ErrorKind::Busy);
    world.disk.release();
    assert_eq!(next(&mut queue), (1, status::OKAY));
    // One request after the other.
    let refused = std::thread::scope(|scope| {
        let shutting = scope.spawn(|| gate.shut().unwrap_err());
        while !shutting.is_finished() {
            write(&mut queue, 0, &pattern(3, 4096));
        }
        shutting.join().unwrap()
    });
    assert_eq!((refused.kind(), gate.passage()), (ErrorKind::Busy, Passage::Open));
    assert_eq!(read(&mut queue, 0, 4096), pattern(3, 4096));
}

/// The toolstack ends the guest here when it has gone on at the other host.
#[test]
fn a_device_ends_also_when_its_disk_is_gone() {
    let mut world = Setup::new(Access::Copy).start();
    let (front, queue) = world.connect_one(BlkfrontOptions::default());
    hand_over(&mut world);
    world.set_backend_key("online", "0");
    world.set_backend_key("state", "5");
    let frontend = world.vbd.frontend_path();
    world.store.remove(spile_xen::store::Tx::NONE, &frontend).unwrap();
    assert_eq!(world.ended(), End::Closed);
    drop((front, queue));
}

/// Another kernel may start in the guest that waits. It gets no ring either.
#[test]
fn a_guest_that_connects_waits_as_well() {
    let mut world = Setup::new(Access::Copy).start();
    let (mut front, queue) = world.connect_one(BlkfrontOptions::default());
    hand_over(&mut world);
    front.stop(vec![queue]).unwrap();
    wait_until("the end of the connection", || world.backend_key("state").as_deref() == Some("6"));
    front.set_state(1).unwrap();
    wait_until("another offer", || world.backend_key("state").as_deref() == Some("2"));
    let gate = world.device().gate();
    std::thread::scope(|scope| {
        let guest = scope.spawn(move || {
            let mut queue = front.start().unwrap().remove(0);
            write(&mut queue, 0, &pattern(1, 4096));
        });
        let end = std::time::Instant::now() + Duration::from_millis(150);
        while std::time::Instant::now() < end {
            assert_eq!(world.backend_key("state").as_deref(), Some("2"), "it did not wait");
            std::thread::sleep(Duration::from_millis(5));
        }
        gate.let_in().unwrap();
        guest.join().unwrap();
    });
    assert_eq!(world.disk.bytes(0, 4096), pattern(1, 4096));
}

#[test]
fn nobody_is_asked_when_the_device_has_ended() {
    let mut world = Setup::new(Access::Copy).start();
    let gate = world.device().gate();
    world.stop();
    assert_eq!(gate.shut().unwrap_err().kind(), ErrorKind::Shutdown);
    // A gate that is open has nobody to ask, one that is shut has.
    gate.let_in().unwrap();
    world.serve();
    hand_over(&mut world);
    let gate = world.device().gate();
    world.stop();
    assert_eq!(gate.let_in().unwrap_err().kind(), ErrorKind::Shutdown);
}
