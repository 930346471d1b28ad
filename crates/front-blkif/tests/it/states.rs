//! The states of xenbus: connecting, closing, connecting again, growing, pausing.

use std::time::Duration;

use spile_front_blkif::device::End;
use spile_front_blkif::pages::Access;
use spile_front_blkif::pause;
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op};
use spile_lab::xen::toolstack::Vbd;
use spile_xen::blkif::status;
use spile_xen::store::{Tx, XenStore};

use crate::common::{GUEST, PATIENCE, SIZE, Setup, next, pattern, read, request, wait_until, write};

#[test]
fn a_guest_closes_and_connects_again() {
    let mut world = Setup::new(Access::Copy).start();
    for round in 0..3u64 {
        let (mut front, mut queue) = world.connect_one(BlkfrontOptions::default());
        assert_eq!(front.disk().size_bytes(), SIZE);
        write(&mut queue, 4096 * round, &pattern(round, 4096));
        assert!(world.run_file("connection").exists());
        front.stop(vec![queue]).unwrap();
        wait_until("the end of the connection", || world.backend_key("state").as_deref() == Some("6"));
        assert!(!world.run_file("journal").exists());
        front.set_state(1).unwrap();
        wait_until("another offer", || world.backend_key("state").as_deref() == Some("2"));
    }
    assert_eq!(world.disk.bytes(8192, 4096), pattern(2, 4096));
}

#[test]
fn a_toolstack_detaches_the_disk() {
    let mut world = Setup::new(Access::Copy).start();
    let (mut front, mut queue) = world.connect_one(BlkfrontOptions::default());
    write(&mut queue, 0, &pattern(1, 4096));
    world.set_backend_key("online", "0");
    world.set_backend_key("state", "5");
    assert_eq!(front.wait_for(&[5]).unwrap(), 5);
    front.stop(vec![queue]).unwrap();
    assert_eq!(world.ended(), End::Closed);
    assert_eq!(world.backend_key("state").as_deref(), Some("6"));
}

#[test]
fn a_device_whose_folder_is_removed_ends() {
    let mut world = Setup::new(Access::Copy).start();
    let (_front, _queue) = world.connect_one(BlkfrontOptions::default());
    let path = world.vbd.backend_path();
    world.store.remove(spile_xen::store::Tx::NONE, &path).unwrap();
    assert_eq!(world.ended(), End::Closed);
}

/// A toolstack that has given up waiting for the old device. The removal was not seen.
#[test]
fn a_device_that_was_made_anew_for_another_image_ends() {
    for (key, value) in [("params", "raw:/another"), ("mode", "r")] {
        let mut world = Setup::new(Access::Copy).start();
        let (mut front, queue) = world.connect_one(BlkfrontOptions::default());
        front.stop(vec![queue]).unwrap();
        wait_until("the end of the connection", || world.backend_key("state").as_deref() == Some("6"));
        // The same once more is the same device.
        world.set_backend_key("state", "1");
        front.set_state(1).unwrap();
        wait_until("another offer", || world.backend_key("state").as_deref() == Some("2"));
        world.set_backend_key(key, value);
        world.set_backend_key("state", "1");
        assert_eq!(world.ended(), End::Closed, "{key}");
        assert_eq!(world.backend_key("state").as_deref(), Some("1"), "the next process finds it as it was made");
    }
}

/// Requests wait for room on the host, or for a limit, when the guest begins anew.
#[test]
fn what_is_held_back_ends_with_its_guest() {
    let mut world = Setup::new(Access::Copy).start();
    let (mut front, mut queue) = world.connect_one(BlkfrontOptions::default());
    world.disk.hold_back();
    (0..3).for_each(|slot| queue.submit(slot, Op::Write, 4096 * slot as u64, 4096));
    queue.publish();
    wait_until("all wait", || world.disk.held() == 3);
    front.set_state(6).unwrap();
    wait_until("the end of the connection", || world.backend_key("state").as_deref() == Some("6"));
    world.disk.release();
    let mut queue = front.restart().unwrap().remove(0);
    assert_eq!(read(&mut queue, 0, 3 * 4096), [0; 3 * 4096], "a write that waited was done");
}

#[test]
fn a_disk_that_grows_is_seen_to() {
    let mut world = Setup::new(Access::Copy).start();
    let (mut front, mut queue) = world.connect_one(BlkfrontOptions::default());
    let (engine, disk) = (world.engine.clone(), world.disk.clone());
    engine.run_on(0, move || async move { spile_core::Disk::resize(&*disk, 2 * SIZE).await }).unwrap();
    world.device().resized();
    front.next_change(PATIENCE).unwrap();
    wait_until("the new size", || front.refresh().unwrap().size_bytes() == 2 * SIZE);
    write(&mut queue, 2 * SIZE - 4096, &pattern(9, 4096));
    assert_eq!(front.backend_state().unwrap(), 4);
}

/// What is in flight is answered first; what comes later is done after the pause, also what came before there was a
/// connection.
#[test]
fn a_toolstack_pauses_the_disk() {
    let mut world = Setup::new(Access::Copy).start();
    let (_front, mut queue) = world.connect_one(BlkfrontOptions::default());
    write(&mut queue, 0, &pattern(1, 4096));
    world.disk.hold();
    queue.submit(1, Op::Read, 0, 4096);
    queue.publish();
    wait_until("a request at the disk", || world.disk.held() == 1);
    world.set_backend_key("pause", "");
    assert!(!queue.sleep(Duration::from_millis(50)).unwrap());
    assert!(!world.device().has_ended());
    world.disk.release();
    assert_eq!(next(&mut queue), (1, status::OKAY));
    assert_eq!(world.ended(), End::Paused);
    // One that is started all the same pauses too.
    world.serve();
    assert_eq!(world.ended(), End::Paused);
    assert_eq!(world.backend_key("state").as_deref(), Some("4"));
    queue.submit(0, Op::Read, 0, 4096);
    queue.publish();
    world.remove_backend_key("pause");
    world.serve();
    assert_eq!(next(&mut queue), (0, status::OKAY));
    assert_eq!(read(&mut queue, 0, 4096), pattern(1, 4096));
}

#[test]
fn a_guest_that_comes_while_its_disk_is_paused_waits() {
    let mut world = Setup::new(Access::Copy).start();
    wait_until("the offer", || world.backend_key("state").as_deref() == Some("2"));
    world.set_backend_key("pause", "");
    assert_eq!(world.ended(), End::Paused);
    std::thread::scope(|scope| {
        let front = world.front(BlkfrontOptions::default());
        let guest = scope.spawn(move || {
            let mut front = front;
            let mut queue = front.start().unwrap().remove(0);
            write(&mut queue, 0, &pattern(1, 4096));
        });
        let mut store = XenStore::open(&world.host.xenstored()).unwrap();
        let front_state = format!("{}/state", world.vbd.frontend_path());
        wait_until("its rings", || store.read_optional(Tx::NONE, &front_state).unwrap().as_deref() == Some("3"));
        world.serve();
        assert_eq!(world.ended(), End::Paused);
        assert_eq!(world.backend_key("state").as_deref(), Some("2"));
        world.remove_backend_key("pause");
        world.serve();
        guest.join().unwrap();
    });
    assert_eq!(world.disk.bytes(0, 4096), pattern(1, 4096));
}

/// Whoever has it for himself shall not lose it because somebody else detaches the disk.
#[test]
fn a_disk_that_is_to_go_goes_after_its_pause() {
    let mut world = Setup::new(Access::Copy).start();
    let (mut front, queue) = world.connect_one(BlkfrontOptions::default());
    world.set_backend_key("pause", "");
    assert_eq!(world.ended(), End::Paused);
    world.set_backend_key("online", "0");
    world.set_backend_key("state", "5");
    world.serve();
    assert_eq!(world.ended(), End::Paused);
    world.remove_backend_key("pause");
    world.serve();
    assert_eq!(front.wait_for(&[5]).unwrap(), 5);
    front.stop(vec![queue]).unwrap();
    assert_eq!(world.ended(), End::Closed);
}

/// What a failed flush was to save is safe nowhere but where it is.
#[test]
fn a_disk_whose_flush_has_failed_is_not_paused() {
    let mut world = Setup::new(Access::Copy).start();
    let (_front, mut queue) = world.connect_one(BlkfrontOptions::default());
    world.disk.fail(Some(spile_core::ErrorKind::Io));
    queue.submit(5, Op::Flush, 0, 0);
    queue.publish();
    wait_until("the flush", || world.device().metrics().first().is_some_and(|ring| ring.held_flushes == 1));
    world.disk.fail(None);
    world.set_backend_key("pause", "");
    write(&mut queue, 0, &pattern(1, 4096));
    std::thread::sleep(Duration::from_millis(50));
    assert!(!world.device().has_ended());
    assert_eq!(read(&mut queue, 0, 4096), pattern(1, 4096));
}

#[test]
fn the_keys_of_a_pause() {
    let mut world = Setup::new(Access::Copy).start();
    let path = world.vbd.backend_path();
    // Nobody asked for one.
    pause::tell(&mut world.store, &path).unwrap();
    assert!(!pause::stays(&mut world.store, &path).unwrap());
    assert_eq!(world.backend_key("pause-done"), None);
    world.set_backend_key("pause", "");
    assert!(!pause::goes_on(&mut world.store, &path).unwrap() && !pause::stays(&mut world.store, &path).unwrap());
    pause::tell(&mut world.store, &path).unwrap();
    assert!(pause::goes_on(&mut world.store, &path).unwrap() && pause::stays(&mut world.store, &path).unwrap());
    world.remove_backend_key("pause");
    assert!(!pause::goes_on(&mut world.store, &path).unwrap());
    // A toolstack that asks at this moment finds that the one before has not ended.
    world.set_backend_key("pause", "");
    assert!(pause::stays(&mut world.store, &path).unwrap());
    world.remove_backend_key("pause");
    assert!(!pause::stays(&mut world.store, &path).unwrap());
    assert_eq!(world.backend_key("pause-done"), None);
}

#[test]
fn a_disk_that_the_toolstack_has_as_read_only_is_that() {
    let vbd = Vbd { is_readonly: true, ..Vbd::new(GUEST, "test") };
    let world = Setup { vbd, ..Setup::new(Access::Copy) }.start();
    let (front, mut queue) = world.connect_one(BlkfrontOptions::default());
    assert!(front.disk().is_readonly() && !front.features().discard);
    assert_eq!(request(&mut queue, Op::Write, 0, 4096), status::ERROR);
    assert_eq!(request(&mut queue, Op::Discard(false), 0, 4096), status::ERROR);
    assert_eq!(request(&mut queue, Op::Flush, 0, 0), status::OKAY);
    assert_eq!(request(&mut queue, Op::Read, 0, 4096), status::OKAY);
}
