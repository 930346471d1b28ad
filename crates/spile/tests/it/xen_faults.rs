//! What goes wrong around a Xen guest's disk: syncs that fail, programs that are replaced, toolstacks that get in each other's
//! way.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::xen::{PATIENCE, Xen, request, wait_until};
use crate::common::{faulty_sync, ok};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use spile_lab::GuestQueue;
use spile_lab::xen::Blkfront;
use spile_lab::xen::blkfront::{Op, Queue};
use spile_lab::xen::toolstack::Vbd;
use spile_xen::store::Tx;

/// A Xen with a disk and its guest.
fn world(command: impl FnOnce(&Path) -> Option<Command>) -> (Xen, Vbd, Blkfront, Queue) {
    let mut xen = Xen::start();
    if let Some(command) = command(xen.dir.path()) {
        xen.replace_backend(command);
    }
    let (vbd, front, queue) = xen.attach();
    (xen, vbd, front, queue)
}

fn faulty_world() -> (Xen, Vbd, Blkfront, Queue) {
    world(|dir| Some(faulty_sync(dir)))
}

fn end(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap();
}

/// The next sync fails.
fn fail_sync(xen: &Xen) {
    std::fs::write(xen.path("fail-sync"), "").unwrap();
}

fn submit_flush(queue: &mut Queue) {
    queue.submit(1, Op::Flush, 0, 0);
    queue.publish();
}

/// The flush is not answered, but what comes after it is.
fn assert_held(queue: &mut Queue) {
    submit_flush(queue);
    request(queue, Op::Write, 0, 4096);
    std::thread::sleep(Duration::from_millis(300));
    assert!(queue.take().unwrap().is_none(), "the flush was answered");
}

/// The kernel has told of it, and will not again.
#[test]
fn a_sync_that_fails_at_the_end_of_a_process_is_remembered() {
    let (xen, vbd, _front, mut queue) = faulty_world();
    request(&mut queue, Op::Write, 0, 4096);
    let pid = xen.process(&vbd, None);
    fail_sync(&xen);
    end(pid, Signal::SIGTERM);
    let pid = xen.process(&vbd, Some(pid));
    assert!(!xen.path("fail-sync").exists());
    assert_held(&mut queue);
    end(pid, Signal::SIGKILL);
    xen.process(&vbd, Some(pid));
    request(&mut queue, Op::Read, 0, 4096);
    assert_eq!(queue.outstanding(), 1);
}

#[test]
fn a_sync_that_fails_in_a_pause_ends_the_pause() {
    let (mut xen, vbd, _front, mut queue) = faulty_world();
    request(&mut queue, Op::Write, 0, 4096);
    fail_sync(&xen);
    let pid = xen.process(&vbd, None);
    xen.set_key(&vbd, "pause", "");
    xen.process(&vbd, Some(pid));
    assert_held(&mut queue);
    assert_eq!(xen.key(&vbd, "pause-done"), None, "the toolstack was told that all is well");
}

/// A process that opens an image makes durable what one that was killed may have left in its parents.
#[test]
fn a_sync_that_fails_when_a_disk_is_opened_is_remembered() {
    let (mut xen, vbd, _front, mut queue) = faulty_world();
    let dir = xen.dir.path();
    ok(dir, &["create", "parent.vhd", "--size", "1M"]);
    ok(dir, &["create", "child.vhd", "--parent", "parent.vhd"]);
    let child = xen.path("child.vhd").display().to_string();
    xen.pause(&vbd);
    xen.set_key(&vbd, "params", &format!("vhd:{child}"));
    fail_sync(&xen);
    xen.go_on(&vbd);
    wait_until("the sync", || !xen.path("fail-sync").exists());
    assert_held(&mut queue);
}

#[test]
fn a_guest_that_connects_anew_can_flush_again() {
    let (xen, vbd, mut front, mut queue) = faulty_world();
    let pid = xen.process(&vbd, None);
    fail_sync(&xen);
    assert_held(&mut queue);
    front.set_state(6).unwrap();
    xen.process(&vbd, Some(pid));
    wait_until("the end", || [2, 6].contains(&front.backend_state().unwrap()));
    let mut queue = front.restart().unwrap().remove(0);
    request(&mut queue, Op::Flush, 0, 0);
}

/// A toolstack that has lost its patience removes the device while its last requests are at work.
#[test]
fn what_was_removed_stays_removed() {
    let (mut xen, vbd, front, mut queue) = faulty_world();
    std::fs::write(xen.path("slow-sync"), "").unwrap();
    submit_flush(&mut queue);
    std::thread::sleep(Duration::from_millis(200));
    xen.set_key(&vbd, "online", "0");
    xen.set_key(&vbd, "state", "5");
    xen.store.remove(Tx::NONE, front.path()).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    xen.store.remove(Tx::NONE, &vbd.backend_path()).unwrap();
    wait_until("the end of the process", || !xen.path("run/3-51712.pid").exists());
    assert!(xen.store.list(Tx::NONE, &vbd.backend_path()).is_err(), "the device is there again");
}

/// One toolstack has the image to make a snapshot, and another detaches the disk.
#[test]
fn an_image_in_a_pause_is_not_touched_when_its_disk_is_detached() {
    let (mut xen, vbd, mut front, mut queue) = world(|_| None);
    request(&mut queue, Op::Write, 0, 4096);
    xen.pause(&vbd);
    wait_until("the end of the process", || !xen.path("run/3-51712.pid").exists());
    let image = std::fs::read(xen.path("a.raw")).unwrap();
    queue.data(0).fill(0x77);
    queue.submit(0, Op::Write, 8192, 4096);
    queue.publish();
    xen.set_key(&vbd, "online", "0");
    xen.set_key(&vbd, "state", "5");
    std::thread::sleep(Duration::from_millis(500));
    assert!(queue.take().unwrap().is_none() && std::fs::read(xen.path("a.raw")).unwrap() == image);
    xen.go_on(&vbd);
    let until = Instant::now() + PATIENCE;
    while queue.take().unwrap().is_none() {
        assert!(Instant::now() < until, "no answer after the pause");
        queue.sleep(Duration::from_millis(100)).unwrap();
    }
    front.stop(vec![queue]).unwrap();
    wait_until("its end", || xen.key(&vbd, "state").as_deref() == Some("6"));
}

/// As a package manager does: the new program gets the old one's name.
#[test]
fn a_program_that_is_replaced_or_removed_is_started_all_the_same() {
    let copy = |to: &Path| {
        std::fs::copy(env!("CARGO_BIN_EXE_spile"), to).unwrap();
    };
    let (xen, vbd, _front, mut queue) = world(|dir| {
        copy(&dir.join("program"));
        Some(Command::new(dir.join("program")))
    });
    let mut pid = xen.process(&vbd, None);
    let mut end_and_look = || {
        end(pid, Signal::SIGTERM);
        pid = xen.process(&vbd, Some(pid));
        request(&mut queue, Op::Write, 0, 4096);
        std::fs::read_link(format!("/proc/{pid}/exe")).unwrap()
    };
    copy(&xen.path("new"));
    std::fs::rename(xen.path("new"), xen.path("program")).unwrap();
    assert_eq!(end_and_look(), xen.path("program"), "it is the new one");
    std::fs::remove_file(xen.path("program")).unwrap();
    assert!(end_and_look().to_string_lossy().ends_with("(deleted)"), "it is the old one");
}

#[test]
fn a_panic_ends_a_disks_process_as_if_it_were_killed() {
    if std::env::var_os("PANIC").is_some() {
        spile::panics::abort_on_panic();
        let _ = std::thread::spawn(|| panic!("on purpose")).join();
        return;
    }
    let name = "xen_faults::a_panic_ends_a_disks_process_as_if_it_were_killed";
    let mut command = Command::new(std::env::current_exe().unwrap());
    let done = command.args([name, "--exact"]).env("PANIC", "").output().unwrap();
    assert_eq!(done.status.signal(), Some(Signal::SIGABRT as i32));
}
