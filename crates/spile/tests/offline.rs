//! Work on disks that no server has: the command that does it is seen and steered as a server's job.

mod common;

use std::fs;
use std::path::Path;

use common::control::ask;
use common::host::{bytes_of, names, raw};
use common::nbd::Client;
use common::{Running, Served, eventually, fails, json, ok, run, spile};
use nix::sys::signal::Signal;
use serde_json::Value;

/// A disk whose parent has all of its bytes, which are returned.
fn child_of_full(dir: &Path, disk: &str) -> Vec<u8> {
    let bytes = raw(dir, "bytes.raw", 3);
    let parent = format!("{disk}-base.vhd");
    ok(dir, &["convert", "bytes.raw", &parent]);
    fs::remove_file(dir.join("bytes.raw")).unwrap();
    ok(dir, &["create", &format!("{disk}.vhd"), "--parent", &parent]);
    bytes
}

/// Begins a command that works so slowly that it does not come to its end, and waits until its job on `disk` is seen.
fn begin(dir: &Path, disk: &str, command: &[&str]) -> (Running, Value) {
    let mut slow = spile();
    slow.args(command).args(["--rate", "64k"]);
    let mut running = Running::start(&mut slow, dir);
    let mut job = Value::Null;
    eventually("the job is seen", || {
        assert_eq!(running.has_ended(), None, "{command:?}");
        job = job_of(dir, disk);
        job["state"] == "running"
    });
    (running, job)
}

fn job_of(dir: &Path, disk: &str) -> Value {
    let jobs = json(dir, &["jobs"]);
    jobs["jobs"].as_array().unwrap().iter().find(|job| job["disk"] == disk).unwrap_or(&Value::Null).clone()
}

#[test]
fn work_without_a_server_is_seen_and_obeys() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let bytes = child_of_full(dir, "steered");
    let before = names(dir);
    let commands: [&[&str]; 3] = [
        &["flatten", "steered.vhd"],
        &["move", "steered.vhd", "--to", "new.vhd"],
        &["backup", "steered.vhd", "copy.vhd"],
    ];
    for command in commands {
        let (mut running, job) = begin(dir, "steered", command);
        assert!(job["kind"] == command[0] && job["pid"] == running.pid(), "{job}");
        assert_eq!(Path::new(job["path"].as_str().unwrap()).canonicalize().unwrap(), dir.join("steered.vhd"));
        let id = job["id"].as_str().unwrap();
        assert_eq!(json(dir, &["job", "steered.vhd", "pause"])["state"], "paused", "{command:?}");
        assert_eq!(json(dir, &["job", "steered", "rate", "1M"])["limit_bytes_per_s"], 1 << 20, "{command:?}");
        assert_eq!(job_of(dir, "steered")["state"], "paused", "{command:?}");
        assert_eq!(json(dir, &["job", id, "resume"])["state"], "running", "{command:?}");
        // It has jobs, and is no server.
        let socket = Path::new(job["server"].as_str().unwrap()).to_owned();
        assert_eq!(ask(&socket, "GET", "/v1/disks", "").0, 404);
        assert!(fails(dir, 2, &["job", id, "hand-over"]).contains("cannot be made"), "{command:?}");
        assert_eq!(json(dir, &["ls"])["disks"].as_array().unwrap().len(), 0);
        assert_eq!(json(dir, &["job", id, "cancel"])["state"], "cancelled", "{command:?}");
        // The disk may have the next job at once.
        ok(dir, &["check", "steered.vhd"]);
        ok(dir, &["resize", "steered.vhd", "16M"]);
        let mut said = None;
        eventually("the command has ended", || {
            said = running.has_ended();
            said.is_some()
        });
        let said = said.unwrap();
        assert!(said.starts_with("exit status: 1") && said.contains("was cancelled"), "{command:?}: {said}");
        assert!(!socket.exists() && job_of(dir, "steered").is_null(), "{command:?}");
        assert_eq!(names(dir), before, "{command:?}");
    }
    assert!(bytes_of(dir, "steered.vhd") == bytes);
}

/// Makes the disk NAME.vhd, with 8 MiB of its own, over NAME-base.vhd.
fn full_child(dir: &Path, disk: &str) {
    let (parent, leaf) = (format!("{disk}-base.vhd"), format!("{disk}.vhd"));
    ok(dir, &["create", &parent, "--size", "16M"]);
    ok(dir, &["create", &leaf, "--parent", &parent]);
    let served = Served::start(dir, &[&leaf, "--control", "none"]);
    let client = Client::connect(&served.uri()).unwrap();
    (0..8).for_each(|mib| client.write(mib << 20, &[3; 1 << 20], true).unwrap());
    drop(client);
    assert!(served.terminate().success());
}

#[test]
fn whoever_meets_a_disk_in_work_is_told_by_whom_and_what() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    full_child(dir, "met");
    let (running, job) = begin(dir, "met", &["coalesce", "met.vhd"]);
    let (pid, id) = (running.pid(), job["id"].as_str().unwrap());
    let commands: [&[&str]; 4] = [
        &["snapshot", "met.vhd", "--name", "x"],
        &["coalesce", "met.vhd"],
        &["revert", "met.vhd", "met-base.vhd", "--discard"],
        &["create", "other.vhd", "--parent", "met-base.vhd"],
    ];
    for command in commands {
        let said = fails(dir, 1, command);
        let by = format!("the command with process {pid} merges ");
        assert!(said.contains(&by) && said.contains("met.vhd into its parent"), "{command:?}: {said}");
        assert!(said.contains(&format!("spile job {id} cancel")), "{command:?}: {said}");
    }
    // Ctrl-C does what it did.
    let (code, _) = running.end(Signal::SIGINT);
    assert_eq!(code, Some(130));
    assert!(job_of(dir, "met").is_null());
    ok(dir, &["coalesce", "met.vhd"]);
}

#[test]
fn a_command_that_was_killed_leaves_a_socket_that_nobody_trips_over() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    full_child(dir, "killed");
    let (running, job) = begin(dir, "killed", &["coalesce", "killed.vhd"]);
    let socket = Path::new(job["server"].as_str().unwrap()).to_owned();
    let (code, _) = running.end(Signal::SIGKILL);
    assert!(code.is_none() && socket.exists());
    assert!(job_of(dir, "killed").is_null());
    assert_eq!(json(dir, &["ls"])["disks"].as_array().unwrap().len(), 0);
    // The kernel lets go of the killed command's files soon.
    eventually("the same command goes on", || run(dir, &["coalesce", "killed.vhd"]).status.success());
    assert!(!socket.exists(), "the next command removes it");
}

#[test]
fn merges_of_gc_are_seen_and_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    full_child(dir, "swept");
    ok(dir, &["delete", "swept-base.vhd"]);
    let (mut running, job) = begin(dir, "swept", &["gc", "."]);
    assert!(job["kind"] == "coalesce" && job["pid"] == running.pid(), "{job}");
    assert_eq!(json(dir, &["job", job["id"].as_str().unwrap(), "cancel"])["state"], "cancelled");
    let mut said = None;
    eventually("gc has ended", || {
        said = running.has_ended();
        said.is_some()
    });
    let said = said.unwrap();
    assert!(said.starts_with("exit status: 0") && said.contains("was cancelled"), "{said}");
    ok(dir, &["gc", "."]);
    assert_eq!(names(dir), ["swept.vhd"]);
}
