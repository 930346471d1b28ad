//! The states of xenbus: connecting, closing, connecting again, growing, pausing.

use spile_front_blkif::device::End;
use spile_front_blkif::pages::Access;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op};
use spile_lab::xen::toolstack::Vbd;
use spile_xen::blkif::status;

use crate::common::{GUEST, PATIENCE, SIZE, Setup, pattern, read, request, wait_until, write};

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

#[test]
fn a_toolstack_pauses_the_disk() {
    let mut world = Setup::new(Access::Copy).start();
    let (_front, mut queue) = world.connect_one(BlkfrontOptions::default());
    write(&mut queue, 0, &pattern(1, 4096));
    world.set_backend_key("pause", "");
    wait_until("the pause", || world.backend_key("pause-done").is_some());
    world.disk.take_did();
    queue.submit(0, Op::Read, 0, 4096);
    queue.publish();
    assert!(!queue.sleep(std::time::Duration::from_millis(50)).unwrap());
    assert_eq!(world.disk.take_did(), []);
    let path = format!("{}/pause", world.vbd.backend_path());
    world.store.remove(spile_xen::store::Tx::NONE, &path).unwrap();
    assert_eq!(crate::common::next(&mut queue), (0, status::OKAY));
    wait_until("its end", || world.backend_key("pause-done").is_none());
    assert_eq!(read(&mut queue, 0, 4096), pattern(1, 4096));
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
