//! A sync that has failed: no flush of that disk succeeds any more, on any front and in any process, until somebody accepts the loss.

use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use crate::common::guests::{guest, nbd, rest_of_stderr};
use crate::common::nbd::Client;
use crate::common::xen::{Xen, request, wait_until};
use crate::common::{Served, eventually, faulty_sync, json, ok, run};
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
    serve_disk(dir, "a.raw")
}

/// Serves any disk as [`serve`] does that of the world.
fn serve_disk(dir: &Path, disk: &str) -> Served {
    let mut command = faulty_sync(dir);
    command.args(["serve", disk, "--nbd", "unix:n", "--vhost-user", "v", "--control", "c", "--on-error", "pause"]);
    command.arg("--write-parent").env("SPILE_RUN_DIR", dir.join("run")).current_dir(dir);
    Served::spawn(&mut command, dir.join("n")).unwrap()
}

/// Runs it with the marks of this world; returns its exit code and all that it said.
fn says(dir: &Path, args: &[&str]) -> (Option<i32>, String) {
    let output =
        crate::common::spile().args(args).env("SPILE_RUN_DIR", dir.join("run")).current_dir(dir).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

fn spile_in(dir: &Path, args: &[&str]) -> String {
    let (code, said) = says(dir, args);
    assert_eq!(code, Some(0), "{args:?}: {said}");
    said
}

fn fail_next_sync(dir: &Path) {
    std::fs::write(dir.join("fail-sync"), "").unwrap();
}

/// A server of `disk` sees a flush fail, and is killed.
fn mark(dir: &Path, disk: &str) {
    let served = serve_disk(dir, disk);
    fail_next_sync(dir);
    flush_by_nbd(dir).unwrap_err();
    served.kill();
    // The kernel may keep the locks of a process that was killed for some time.
    eventually("the disk can be opened", || run(dir, &["info", disk]).status.success());
}

/// [`world`] whose last server saw a flush fail, and was killed.
fn marked_world() -> TempDir {
    let dir = world();
    mark(dir.path(), "a.raw");
    dir
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
    let dir = marked_world();
    let dir = dir.path();
    let told = spile_in(dir, &["accept-loss", "a.raw"]);
    assert!(told.contains("a sync has failed"), "{told}");
    assert!(spile_in(dir, &["accept-loss", "a.raw"]).contains("no failed sync"));
    let _served = serve(dir);
    assert_flushes(dir);
}

#[test]
fn the_loss_of_a_parent_is_accepted_by_its_own_name() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "p.vhd", "--size", "1M"]);
    ok(dir, &["create", "c.vhd", "--parent", "p.vhd"]);
    ok(dir, &["create", "d.vhd", "--parent", "p.vhd"]);
    mark(dir, "c.vhd");
    mark(dir, "p.vhd");
    let parent = dir.join("p.vhd").canonicalize().unwrap().display().to_string();
    let names_parent = |(code, said): (Option<i32>, String)| {
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains(&format!("`spile accept-loss {parent}`")), "{said}");
        said
    };
    // The mark of the child goes, the one of the parent stays for its other child.
    assert!(names_parent(says(dir, &["accept-loss", "c.vhd"])).contains("accepted: "));
    assert!(names_parent(says(dir, &["accept-loss", "c.vhd"])).contains("no failed sync of this disk"));
    let mut served = serve_disk(dir, "d.vhd");
    flush_by_nbd(dir).unwrap_err();
    assert!(names_parent(says(dir, &["accept-loss", "c"])).contains("then `spile accept-loss d`"));
    flush_by_nbd(dir).unwrap_err();
    served.signal(nix::sys::signal::Signal::SIGTERM);
    served.wait();
    let logged = rest_of_stderr(&mut served);
    assert!(logged.contains(&format!("`spile accept-loss {parent}` and then `spile accept-loss d`")), "{logged}");
    // Once the parent's loss is accepted, the child that is served has to be told.
    let _served = serve_disk(dir, "d.vhd,name=e");
    flush_by_nbd(dir).unwrap_err();
    let said = spile_in(dir, &["accept-loss", "p.vhd"]);
    assert!(said.contains("p.vhd: a sync has failed"), "{said}");
    flush_by_nbd(dir).unwrap_err();
    spile_in(dir, &["accept-loss", "c"]);
    assert_flushes(dir);
    assert!(spile_in(dir, &["accept-loss", "c.vhd"]).contains("no failed sync"));
}

#[test]
fn the_loss_of_an_export_is_accepted_by_its_uri() {
    let dir = world();
    let dir = dir.path();
    let upstream = || {
        let mut command = crate::common::spile();
        command.args(["serve", "a.raw", "--nbd", "unix:up", "--control", "none"]).current_dir(dir);
        Served::spawn(&mut command, dir.join("up")).unwrap()
    };
    let first = upstream();
    let uri = first.uri().to_string();
    let served = serve_disk(dir, &uri);
    assert_flushes(dir);
    Client::connect(&nbd(dir, "")).unwrap().write(0, &[1; 512], false).unwrap();
    // The export's server ends with a write that was not flushed, and another file takes the place of the one that had it.
    first.kill();
    std::fs::copy(dir.join("a.raw"), dir.join("b.raw")).unwrap();
    std::fs::rename(dir.join("b.raw"), dir.join("a.raw")).unwrap();
    let _second = upstream();
    flush_by_nbd(dir).unwrap_err();
    served.kill();
    let (other, bare) =
        (uri.replace("nbd+unix:///?", "nbd+unix:///other?"), uri.replace("nbd+unix:///?", "nbd+unix://?"));
    assert!(spile_in(dir, &["accept-loss", &other]).contains("no failed sync"));
    let said = spile_in(dir, &["accept-loss", &bare]);
    assert!(said.contains("accepted: ") && said.contains("nbd+unix:"), "{said}");
    assert!(spile_in(dir, &["accept-loss", &uri]).contains("no failed sync"));
    let _served = serve_disk(dir, &uri);
    assert_flushes(dir);
}

#[test]
fn another_file_in_its_place_has_no_mark() {
    let dir = marked_world();
    let dir = dir.path();
    std::fs::remove_file(dir.join("a.raw")).unwrap();
    ok(dir, &["create", "a.raw", "--size", "1M"]);
    let _served = serve(dir);
    assert_flushes(dir);
}

#[test]
fn a_disk_with_a_failed_sync_is_not_served_to_a_xen_guest() {
    let dir = marked_world();
    let mut command = crate::common::spile();
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

/// What is lost of a copy of its disk does not concern a Xen guest, whose flushes go on.
#[test]
fn a_copy_whose_sync_fails_does_not_hold_the_flushes_of_a_xen_guest() {
    let faults = tempfile::tempdir().unwrap();
    let mut xen = Xen::start_by(faulty_sync(faults.path()), &["--engine", "threads"]);
    let (_vbd, _front, mut queue) = xen.attach();
    let dir = xen.dir.path().to_owned();
    request(&mut queue, Op::Write, 0, 4096);
    spile_in(&dir, &["move", "run/3-51712.control", "--to", "copy.raw", "--mirror-only"]);
    let copy = dir.join(".copy.raw.spile-moving");
    wait_until("a copy in step", || spile_in(&dir, &["jobs"]).contains("in step"));
    let inode = std::fs::metadata(copy).unwrap().ino();
    let told = faults.path().join("fail-sync-of");
    std::fs::write(&told, inode.to_string()).unwrap();
    let jobs: serde_json::Value = serde_json::from_str(&spile_in(&dir, &["jobs", "--json"])).unwrap();
    says(&dir, &["job", jobs["jobs"][0]["id"].as_str().unwrap(), "finish"]);
    wait_until("the failed sync", || !told.exists());
    request(&mut queue, Op::Write, 4096, 4096);
    request(&mut queue, Op::Flush, 0, 0);
}

/// A server that does not answer may have the disk open, and would go on failing its flushes.
#[test]
fn nothing_is_accepted_while_a_server_does_not_answer() {
    let dir = marked_world();
    let dir = dir.path();
    std::fs::create_dir_all(dir.join("run")).unwrap();
    let hung = UnixListener::bind(dir.join("run/hung.control")).unwrap();
    let (code, said) = says(dir, &["accept-loss", "a.raw"]);
    assert!(code != Some(0) && !said.contains("accepted: "), "{said}");
    assert!(said.contains("does not answer") && said.contains("may have the disk open"), "{said}");
    drop(hung);
    assert!(spile_in(dir, &["accept-loss", "a.raw"]).contains("accepted: "));
}

/// A merge would move what may be lost into an image without a mark.
#[test]
fn no_job_moves_what_may_be_lost() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "p.vhd", "--size", "1M"]);
    ok(dir, &["create", "c.vhd", "--parent", "p.vhd"]);
    mark(dir, "c.vhd");
    for job in ["coalesce", "flatten"] {
        let (code, said) = says(dir, &[job, "c.vhd"]);
        assert!(code != Some(0) && said.contains("a sync has failed") && said.contains("accept-loss"), "{said}");
    }
    spile_in(dir, &["accept-loss", "c.vhd"]);
    spile_in(dir, &["coalesce", "c.vhd"]);
    assert!(!dir.join("p.vhd").exists());
}
