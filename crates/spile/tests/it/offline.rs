//! Work on disks that no server has: the command that does it is seen and steered as a server's job.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::control::ask;
use crate::common::host::{bytes_of, names, raw};
use crate::common::nbd::Client;
use crate::common::{Running, Served, eventually, fails, json, ok, run, spile};
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
    ok(dir, &["coalesce", "killed.vhd"]);
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

#[test]
fn a_process_that_was_killed_holds_up_no_command() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    full_child(dir, "freed");
    let commands: [&[&str]; 8] = [
        &["info", "freed.vhd"],
        &["check", "freed.vhd"],
        &["backup", "freed.vhd", "copy.vhd"],
        &["snapshot", "freed.vhd", "--name", "now.vhd"],
        &["rebase", "freed.vhd", "--parent", "now.vhd", "--check"],
        &["checkpoint", "freed.vhd", "night"],
        &["coalesce", "freed.vhd"],
        &["create", "child.vhd", "--parent", "freed.vhd"],
    ];
    for command in commands {
        let served = Served::start(dir, &["freed.vhd"]);
        let client = Client::connect(&served.uri()).unwrap();
        client.write(1 << 20, &[4; 1 << 20], false).unwrap();
        served.kill();
        let done = run(dir, command);
        // A killed writer leaves prepared space behind, which `check` tells by 4.
        let is_done = done.status.success() || command[0] == "check" && done.status.code() == Some(4);
        assert!(is_done, "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
    }
}

/// How long `spile ls` takes beside so many servers that take calls and answer none; and what it says on stderr.
fn ls_beside(silent: usize) -> (Duration, String) {
    let dir = tempfile::tempdir().unwrap();
    let sockets = (0..silent).map(|number| UnixListener::bind(dir.path().join(format!("silent-{number}.control"))));
    let sockets: Vec<_> = sockets.collect::<Result<_, _>>().unwrap();
    let begun = Instant::now();
    let output = spile().args(["ls"]).env("SPILE_RUN_DIR", dir.path()).output().unwrap();
    drop(sockets);
    assert!(output.status.success());
    (begun.elapsed(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn servers_that_hang_are_waited_for_side_by_side_and_named() {
    let (one, _) = ls_beside(1);
    let (many, said) = ls_beside(12);
    assert!(many < one * 4, "one took {one:?}, twelve {many:?}");
    for number in 0..12 {
        assert!(said.contains(&format!("silent-{number}.control")), "{said}");
    }
}
