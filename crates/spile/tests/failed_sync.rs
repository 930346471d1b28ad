//! A sync that has failed: no flush of that disk succeeds any more, on any front and in any process, until somebody accepts the loss.

mod common;

use std::path::Path;
use std::time::Duration;

use common::guests::{guest, nbd, rest_of_stderr};
use common::nbd::Client;
use common::xen::{Xen, request, wait_until};
use common::{Served, faulty_sync, json, ok, run};
use spile_core::{ErrorKind, Result};
use spile_lab::GuestQueue;
use spile_lab::xen::Blkfront;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op};
use spile_lab::xen::toolstack::{Vbd, add_vbd};
use spile_xen::DomId;
use tempfile::TempDir;

/// A raw disk in a folder, which is also the folder of its marks.
fn world() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "a.raw", "--size", "1M"]);
    dir
}

fn serve(dir: &Path) -> Served {
    let mut command = faulty_sync(dir);
    command.args(["serve", "a.raw", "--nbd", "unix:n", "--vhost-user", "v", "--control", "c", "--on-error", "pause"]);
    command.env("SPILE_RUN_DIR", dir.join("run")).current_dir(dir);
    Served::spawn(&mut command, dir.join("n")).unwrap()
}

fn spile_in(dir: &Path, args: &[&str]) -> String {
    let output = common::spile().args(args).env("SPILE_RUN_DIR", dir.join("run")).current_dir(dir).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn fail_next_sync(dir: &Path) {
    std::fs::write(dir.join("fail-sync"), "").unwrap();
}

fn flush_by_nbd(dir: &Path) -> Result<()> {
    let client = Client::connect(&nbd(dir, ""))?;
    client.write(0, &[1; 512], false)?;
    client.flush()
}

fn flush_by_vhost(dir: &Path) -> Result<()> {
    type Queue = spile_lab::vhost::Queue;
    let (_device, mut queue) = guest(&dir.join("v"));
    queue.run_well(<Queue as GuestQueue>::WRITE, 4096, 512).unwrap();
    queue.run_well(<Queue as GuestQueue>::FLUSH, 0, 0)
}

fn assert_no_flush(dir: &Path) {
    assert_eq!(flush_by_nbd(dir).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(flush_by_vhost(dir).unwrap_err().kind(), ErrorKind::Io);
    let listed = json(dir, &["ls", "c"]);
    let disk = &listed["disks"][0];
    assert_eq!(disk["state"], "sync_failed", "{disk}");
    assert!(disk["failed_sync"]["path"].as_str().unwrap().ends_with("a.raw"), "{disk}");
}

fn assert_flushes(dir: &Path) {
    flush_by_nbd(dir).unwrap();
    flush_by_vhost(dir).unwrap();
    assert_eq!(json(dir, &["ls", "c"])["disks"][0]["state"], "running");
}

#[test]
fn a_flush_that_failed_stays_failed_also_in_the_next_server() {
    let dir = world();
    let dir = dir.path();
    let served = serve(dir);
    assert_flushes(dir);
    fail_next_sync(dir);
    assert_eq!(flush_by_vhost(dir).unwrap_err().kind(), ErrorKind::Io);
    assert!(!dir.join("fail-sync").exists(), "no sync was tried");
    assert_no_flush(dir);
    served.kill();
    let mut served = serve(dir);
    assert_no_flush(dir);
    // Data can be read, and written without a promise; a write that promises fails.
    let client = Client::connect(&nbd(dir, "")).unwrap();
    client.read(0, &mut [0; 512]).unwrap();
    assert_eq!(client.write(0, &[2; 512], true).unwrap_err().kind(), ErrorKind::Io);
    drop(client);
    let told = spile_in(dir, &["accept-loss", "c"]);
    assert!(told.contains("a.raw: a sync has failed: Input/output error"), "{told}");
    assert_flushes(dir);
    served.signal(nix::sys::signal::Signal::SIGTERM);
    let status = served.wait();
    let said = rest_of_stderr(&mut served);
    assert_eq!(status.code(), Some(0), "{said}");
    assert!(said.contains("accept-loss"), "the new server has not said why: {said}");
    let _served = serve(dir);
    assert_flushes(dir);
}

#[test]
fn the_loss_can_be_accepted_while_nobody_serves_the_disk() {
    let dir = world();
    let dir = dir.path();
    let served = serve(dir);
    fail_next_sync(dir);
    flush_by_nbd(dir).unwrap_err();
    served.kill();
    let told = spile_in(dir, &["accept-loss", "a.raw"]);
    assert!(told.contains("a sync has failed"), "{told}");
    assert!(spile_in(dir, &["accept-loss", "a.raw"]).contains("no failed sync"));
    let _served = serve(dir);
    assert_flushes(dir);
}

#[test]
fn another_file_in_its_place_has_no_mark() {
    let dir = world();
    let dir = dir.path();
    let served = serve(dir);
    fail_next_sync(dir);
    flush_by_nbd(dir).unwrap_err();
    served.kill();
    std::fs::remove_file(dir.join("a.raw")).unwrap();
    ok(dir, &["create", "a.raw", "--size", "1M"]);
    let _served = serve(dir);
    assert_flushes(dir);
}

#[test]
fn a_disk_with_a_failed_sync_is_not_served_to_a_xen_guest() {
    let dir = world();
    let served = serve(dir.path());
    fail_next_sync(dir.path());
    flush_by_nbd(dir.path()).unwrap_err();
    served.kill();
    let mut command = common::spile();
    command.env("SPILE_RUN_DIR", dir.path().join("run"));
    let mut xen = Xen::start_by(command, &[]);
    let vbd = Vbd::new(DomId(3), format!("raw:{}", dir.path().join("a.raw").display()));
    add_vbd(&mut xen.store, &vbd).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(xen.key(&vbd, "state").as_deref(), Some("1"), "it is offered to the guest");
    spile_in(dir.path(), &["accept-loss", "a.raw"]);
    wait_until("the disk is offered", || xen.key(&vbd, "state").as_deref() == Some("2"));
    let mut front = Blkfront::new(xen.guest(3), vbd.device, BlkfrontOptions::default()).unwrap();
    let mut queue = front.start().unwrap().remove(0);
    request(&mut queue, Op::Flush, 0, 0);
    assert!(run(dir.path(), &["accept-loss", "gone.raw"]).status.code() == Some(1));
}
