//! One disk's storage hangs: the server, its other disks and their jobs go on. Syncs hang by a library that is loaded into the server.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;

use crate::common::control::ask;
use crate::common::guests::{nbd, serve, try_serve};
use crate::common::nbd::Client;
use crate::common::{Served, eventually, faulty_sync, ok, spile};
use nix::sys::signal::Signal;
use rustix::fs::{FlockOperation, fcntl_lock};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// A server of `disks` under `dir`, whose syncs hang when they are told to.
fn start(dir: &Path, disks: &[&str]) -> Served {
    let mut command = faulty_sync(dir);
    command.arg("serve").args(disks).args(["--nbd", "unix:n", "--control", "c"]).current_dir(dir);
    Served::spawn(&mut command, dir.join("n")).unwrap()
}

/// From now on syncs of this file hang.
fn hang(dir: &Path, name: &str) {
    let inode = fs::metadata(dir.join(name)).unwrap().ino();
    fs::write(dir.join("hang-sync.new"), inode.to_string()).unwrap();
    fs::rename(dir.join("hang-sync.new"), dir.join("hang-sync")).unwrap();
}

fn hangs(dir: &Path) -> bool {
    dir.join("hangs").exists()
}

fn let_go(dir: &Path) {
    fs::remove_file(dir.join("hang-sync")).unwrap();
}

fn write(dir: &Path, disk: &str) {
    Client::connect(&nbd(dir, disk)).unwrap().write(0, &[7; 4096], false).unwrap();
}

fn post(dir: &Path, path: &str, body: &str) -> (u16, Value) {
    ask(&dir.join("c"), "POST", path, body)
}

fn grow(dir: &Path, disk: &str, size_bytes: u64) -> (u16, Value) {
    ask(&dir.join("c"), "PATCH", &format!("/v1/disks/{disk}"), &format!("{{\"virtual_size_bytes\":{size_bytes}}}"))
}

fn two_disks(dir: &Path) {
    for disk in ["a.vhd", "b.vhd"] {
        ok(dir, &["create", disk, "--size", "64M"]);
    }
}

#[test]
fn while_a_disk_grows_on_storage_that_hangs_the_server_answers() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    two_disks(dir);
    let served = start(dir, &["a.vhd", "b.vhd"]);
    hang(dir, "a.vhd");
    let folder = dir.to_owned();
    let growing = thread::spawn(move || grow(&folder, "a", 128 * MIB));
    eventually("the resize hangs", || hangs(dir));
    // Other disks have their snapshots and new sizes.
    let (status, said) = post(dir, "/v1/snapshots", "{\"disks\":[\"b\"],\"name\":\"s\"}");
    assert_eq!(status, 201, "{said}");
    let (status, said) = grow(dir, "b", 96 * MIB);
    assert_eq!(status, 200, "{said}");
    // The disk itself has nothing else done to its images.
    let (status, said) = grow(dir, "a", 256 * MIB);
    assert!(status >= 400 && said.to_string().contains("a resize"), "{said}");
    let (status, said) = post(dir, "/v1/snapshots", "{\"disks\":[\"a\"],\"name\":\"s\"}");
    assert!(status >= 400 && said.to_string().contains("a resize"), "{said}");
    let_go(dir);
    let (status, said) = growing.join().unwrap();
    assert!(status == 200 && said["virtual_size_bytes"] == 128 * MIB, "{said}");
    assert_eq!(grow(dir, "a", 256 * MIB).0, 200);
    assert!(served.terminate().success());
}

#[test]
fn while_a_disk_that_hangs_is_detached_the_server_answers() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    two_disks(dir);
    let served = start(dir, &["a.vhd", "b.vhd"]);
    write(dir, "a");
    let client = Client::connect(&nbd(dir, "a")).unwrap();
    hang(dir, "a.vhd");
    let flush = thread::spawn(move || client.flush());
    eventually("a flush hangs", || hangs(dir));
    let folder = dir.to_owned();
    let detaching = thread::spawn(move || ok(&folder, &["detach", "c", "--name", "a", "--force"]));
    let disks = || ask(&dir.join("c"), "GET", "/v1/disks", "").1["disks"].as_array().map(Vec::len);
    eventually("it is served no more", || disks() == Some(1));
    let (status, said) = post(dir, "/v1/snapshots", "{\"disks\":[\"b\"],\"name\":\"s\"}");
    assert_eq!(status, 201, "{said}");
    assert_eq!(grow(dir, "b", 96 * MIB).0, 200);
    // Nobody gets it before it is closed, whatever its name.
    for disk in ["a.vhd", "a.vhd,name=other"] {
        let (status, said) = post(dir, "/v1/disks", &format!("{{\"disk\":\"{}\"}}", dir.join(disk).display()));
        assert!(status >= 400 && said.to_string().contains("is being detached"), "{said}");
    }
    assert!(!detaching.is_finished(), "it did not hang");
    let_go(dir);
    detaching.join().unwrap();
    let _ = flush.join().unwrap();
    let (status, said) = post(dir, "/v1/disks", &format!("{{\"disk\":\"{}\"}}", dir.join("a.vhd").display()));
    assert_eq!(status, 201, "{said}");
    assert!(served.terminate().success());
}

#[test]
fn while_a_disk_that_hangs_is_attached_the_server_answers() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    two_disks(dir);
    ok(dir, &["create", "c.vhd", "--size", "64M"]);
    let served = start(dir, &["b.vhd"]);
    let attach = |folder: &Path, disk: &str| {
        post(folder, "/v1/disks", &format!("{{\"disk\":\"{}\"}}", folder.join(disk).display()))
    };
    hang(dir, "a.vhd");
    let folder = dir.to_owned();
    let attaching = thread::spawn(move || attach(&folder, "a.vhd"));
    eventually("the disk hangs while it is opened", || hangs(dir));
    let (status, said) = attach(dir, "c.vhd");
    assert!(status == 201 && said["disks"].as_array().unwrap().len() == 2, "{said}");
    assert_eq!(grow(dir, "b", 96 * MIB).0, 200);
    // Neither its name nor its image is for anybody else.
    let (status, said) = attach(dir, "b.vhd,name=a");
    assert!(status == 409 && said.to_string().contains("an attach of the disk \\\"a\\\" is under way"), "{said}");
    let (status, said) = attach(dir, "a.vhd,name=other");
    assert!(status == 409 && said.to_string().contains("is being attached, as"), "{said}");
    let Err(said) = try_serve(dir, &["b.vhd", "c.vhd", "--nbd", "unix:n", "--takeover"]) else {
        panic!("it has taken over")
    };
    assert!(said.contains("an attach"), "{said}");
    assert!(!attaching.is_finished(), "it did not hang");
    let_go(dir);
    let (status, said) = attaching.join().unwrap();
    assert!(status == 201 && said["disks"].as_array().unwrap().len() == 3, "{said}");
    write(dir, "a");
    let (status, said) = attach(dir, "a.vhd,name=other");
    assert!(status == 409 && said.to_string().contains("served already"), "{said}");
    assert!(served.terminate().success());
}

#[test]
fn who_is_told_that_a_disk_is_not_attached_may_use_its_image_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    two_disks(dir);
    let served = start(dir, &["b.vhd"]);
    let disk = dir.join("a.vhd");
    let attach = |socket: &Path| {
        let body = format!("{{\"disk\":\"{}\",\"vhost_user\":[\"{}\"]}}", disk.display(), socket.display());
        post(dir, "/v1/disks", &body)
    };
    for _ in 0..5 {
        let (status, said) = attach(&dir.join("nowhere/v"));
        assert!(status >= 400 && said.to_string().contains("nowhere"), "{said}");
        let file = fs::File::options().write(true).open(&disk).unwrap();
        fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).expect("nobody has the image any more");
    }
    let (status, said) = attach(&dir.join("v"));
    assert!(status == 201 && said["disks"].as_array().unwrap().len() == 2, "{said}");
    assert!(served.terminate().success());
}

#[test]
fn a_server_that_ends_closes_what_was_just_being_attached() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    two_disks(dir);
    let mut served = start(dir, &["b.vhd"]);
    write(dir, "");
    hang(dir, "a.vhd");
    let folder = dir.to_owned();
    let body = format!("{{\"disk\":\"{}\"}}", dir.join("a.vhd").display());
    let attaching = thread::spawn(move || post(&folder, "/v1/disks", &body));
    eventually("the disk hangs while it is opened", || hangs(dir));
    served.signal(Signal::SIGTERM);
    closes_the_other_disk(dir, &mut served);
    let_go(dir);
    assert!(served.wait().success());
    // The caller is not told that it is served.
    let (status, said) = attaching.join().unwrap();
    assert_eq!(status, 503, "{said}");
    assert!(ok(dir, &["check", "a.vhd"]).contains("sound"));
}

/// While `a.vhd` hangs, the server that is to end closes `b.vhd`, and waits for the other one.
fn closes_the_other_disk(dir: &Path, served: &mut Served) {
    let is_free = |disk: &str| {
        let file = fs::File::options().write(true).open(dir.join(disk)).unwrap();
        fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
    };
    eventually("the other disk is closed", || is_free("b.vhd"));
    assert!(!is_free("a.vhd") && served.child.try_wait().unwrap().is_none(), "the first disk did not hang");
}

#[test]
fn a_disk_that_hangs_keeps_no_other_from_being_closed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    two_disks(dir);
    let mut served = start(dir, &["a.vhd", "b.vhd"]);
    ["a", "b"].into_iter().for_each(|disk| write(dir, disk));
    hang(dir, "a.vhd");
    served.signal(Signal::SIGTERM);
    eventually("the first disk hangs", || hangs(dir));
    closes_the_other_disk(dir, &mut served);
    let_go(dir);
    assert!(served.wait().success());
}

#[test]
fn a_client_whose_disk_hangs_keeps_no_other_disk_from_being_closed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    two_disks(dir);
    let mut served = start(dir, &["a.vhd", "b.vhd"]);
    ["a", "b"].into_iter().for_each(|disk| write(dir, disk));
    let client = Client::connect(&nbd(dir, "a")).unwrap();
    hang(dir, "a.vhd");
    let flush = thread::spawn(move || client.flush());
    eventually("a flush hangs", || hangs(dir));
    served.signal(Signal::SIGTERM);
    closes_the_other_disk(dir, &mut served);
    let_go(dir);
    assert!(served.wait().success());
    flush.join().unwrap().unwrap();
}

#[test]
fn a_snapshot_whose_disk_hangs_keeps_the_other_disks_free() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    two_disks(dir);
    let mut command = spile();
    command.args(["serve", "a.vhd", "b.vhd", "--nbd", "unix:n", "--control", "c"]).current_dir(dir);
    let served = Served::spawn(command.env("SPILE_TEST_SLOW", "30000:4096"), dir.join("n")).unwrap();
    let client = Client::connect(&nbd(dir, "a")).unwrap();
    let writing = thread::spawn(move || client.write(0, &[7; 4096], false).unwrap());
    eventually("the write is under way", || {
        ask(&dir.join("c"), "GET", "/v1/disks/a/stats", "").1.to_string().contains("\"in_flight\":1")
    });
    let folder = dir.to_owned();
    let taking = thread::spawn(move || post(&folder, "/v1/snapshots", "{\"disks\":[\"a\",\"b\"],\"name\":\"s\"}"));
    eventually("the snapshot is taken", || dir.join("b-s.vhd").exists());
    eventually("the other disk may be changed again", || grow(dir, "b", 96 * MIB).0 == 200);
    let (_, said) = grow(dir, "a", 96 * MIB);
    assert!(!writing.is_finished() && said.to_string().contains("a snapshot"), "{said}");
    let (status, said) = taking.join().unwrap();
    assert!(status == 201 && said["trouble"].is_string(), "{said}");
    writing.join().unwrap();
    eventually("the first disk may be changed again", || grow(dir, "a", 96 * MIB).0 == 200);
    assert!(served.terminate().success());
}

#[test]
fn a_job_that_was_left_is_there_before_anything_else_begins() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "base.vhd", "--size", "128M"]);
    ok(dir, &["create", "d.vhd", "--parent", "base.vhd"]);
    let args = ["d.vhd", "--nbd", "unix:n"];
    let served = serve(dir, &args);
    let client = Client::connect(&nbd(dir, "")).unwrap();
    (0..64).for_each(|n| client.write(n * 2 * MIB, &[7; 8192], false).unwrap());
    drop(client);
    let (status, begun) = post(dir, "/v1/jobs", "{\"disk\":\"d\",\"kind\":\"coalesce\",\"limit_bytes_per_s\":4096}");
    assert_eq!(status / 100, 2, "{begun}");
    assert!(served.terminate().success());
    for _ in 0..5 {
        let served = serve(dir, &args);
        // At the first look, and whoever else wants the disk's images is told which job it is.
        let jobs = ask(&dir.join("c"), "GET", "/v1/jobs", "").1;
        assert_eq!(jobs["jobs"].as_array().unwrap().len(), 1, "{jobs}");
        let (status, said) = post(dir, "/v1/snapshots", "{\"disks\":[\"d\"],\"name\":\"s\"}");
        assert!(status >= 400 && said.to_string().contains("a job already"), "{said}");
        assert!(served.terminate().success());
    }
}

/// A successor with one socket too few costs no backup, and disks that are served read-only can be backed up after any refusal.
#[test]
fn a_refused_takeover_leaves_backups_alone() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    two_disks(dir);
    let disks = ["a.vhd", "b.vhd,read-only"];
    let served = start(dir, &disks);
    write(dir, "a");
    let backup = |disk: &str, name: &str| {
        let target = dir.canonicalize().unwrap().join(name).display().to_string();
        let disks = format!("[{{\"disk\":\"{disk}\",\"target\":\"{target}\"}}]");
        post(dir, "/v1/backups", &format!("{{\"disks\":{disks},\"limit_bytes_per_s\":512}}"))
    };
    let states = || {
        let jobs = ask(&dir.join("c"), "GET", "/v1/jobs", "").1;
        let state = |job: &Value| job["state"].as_str().unwrap().to_owned();
        jobs["jobs"].as_array().unwrap().iter().map(state).collect::<Vec<_>>()
    };
    let (status, begun) = backup("a", "a.backup.vhd");
    assert_eq!(status / 100, 2, "{begun}");
    let Err(said) = try_serve(dir, &[&disks[..], &["--nbd", "unix:other", "--takeover", "--exactly"]].concat()) else {
        panic!("it has taken over")
    };
    assert!(said.contains("does not listen on nbd"), "{said}");
    assert_eq!(states(), ["running"]);
    let id = ask(&dir.join("c"), "GET", "/v1/jobs", "").1["jobs"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(ask(&dir.join("c"), "PATCH", &format!("/v1/jobs/{id}"), "{\"state\":\"cancelled\"}").0, 200);
    eventually("the backup is over", || states() == ["cancelled"]);
    // This one is refused once jobs would be stopped: a disk cannot be flushed.
    write(dir, "a");
    fs::write(dir.join("fail-sync"), "").unwrap();
    assert!(try_serve(dir, &[&disks[..], &["--nbd", "unix:n", "--takeover"]].concat()).is_err());
    assert!(!dir.join("fail-sync").exists(), "no sync has failed");
    let (status, said) = backup("b", "b.backup.vhd");
    assert_eq!(status / 100, 2, "{said}");
    served.kill();
}

/// A flatten was left, and then another disk got the name: it is not flattened.
#[test]
fn what_was_left_of_a_job_is_not_done_to_another_disk() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "base.vhd", "--size", "128M"]);
    let args = ["base.vhd", "--nbd", "unix:n"];
    let served = serve(dir, &args);
    let client = Client::connect(&nbd(dir, "")).unwrap();
    (0..64).for_each(|n| client.write(n * 2 * MIB, &[7; 8192], false).unwrap());
    drop(client);
    assert!(served.terminate().success());
    ok(dir, &["create", "d.vhd", "--parent", "base.vhd"]);
    let args = ["d.vhd", "--nbd", "unix:n"];
    let served = serve(dir, &args);
    let (status, begun) = post(dir, "/v1/jobs", "{\"disk\":\"d\",\"kind\":\"flatten\",\"limit_bytes_per_s\":512}");
    assert_eq!(status / 100, 2, "{begun}");
    assert!(served.terminate().success());
    assert!(dir.join(".d.vhd.spile-job").exists());
    fs::remove_file(dir.join("d.vhd")).unwrap();
    ok(dir, &["create", "d.vhd", "--parent", "base.vhd"]);
    let served = serve(dir, &args);
    let jobs = ask(&dir.join("c"), "GET", "/v1/jobs", "").1;
    assert_eq!(jobs["jobs"].as_array().unwrap().len(), 0, "{jobs}");
    assert!(!dir.join(".d.vhd.spile-job").exists());
    assert!(served.terminate().success());
}
