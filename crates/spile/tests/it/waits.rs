//! Commands that begin a job wait for its end; Ctrl-C asks the job to stop, and says what is left.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Stdio};

use crate::common::host::{names, raw, serve};
use crate::common::{eventually, fails, json, ok, spile};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// A disk called `name` over a snapshot, with 8 MiB that its server has to move.
fn disk(dir: &Path, name: &str) {
    raw(dir, "bytes.raw", 1);
    ok(dir, &["convert", "bytes.raw", "base.vhd"]);
    ok(dir, &["create", &format!("{name}.vhd"), "--parent", "base.vhd"]);
    fs::remove_file(dir.join("bytes.raw")).unwrap();
}

/// The last job of the disk, or null.
fn job_of(dir: &Path, disk: &str) -> Value {
    let jobs = json(dir, &["jobs"]);
    jobs["jobs"].as_array().unwrap().iter().rfind(|job| job["disk"] == disk).unwrap_or(&Value::Null).clone()
}

fn begin(dir: &Path, words: &[&str]) -> Child {
    let mut command = spile();
    command.args(words).current_dir(dir).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The exit code, and what was said on stderr.
fn end_of(mut child: Child) -> (Option<i32>, String) {
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    (child.wait().unwrap().code(), said)
}

#[test]
fn what_is_said_after_a_job_meets_what_it_has_done() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    disk(dir, "waits");
    let served = serve(dir, &["waits.vhd"]);
    for words in [&[][..], &["--wait"]] {
        ok(dir, &[&["backup", "waits", "b.raw", "--overwrite"], words].concat());
        ok(dir, &["verify", "b.raw"]);
    }
    ok(dir, &["snapshot", "waits", "--name", "one"]);
    ok(dir, &["coalesce", "waits", "--layer", "one"]);
    assert!(!dir.join("waits-one.vhd").exists());
    assert_eq!(json(dir, &["flatten", "waits"])["state"], "done");
    ok(dir, &["move", "waits", "--to", "there.vhd"]);
    assert_eq!(json(dir, &["show", "waits"])["path"], dir.canonicalize().unwrap().join("there.vhd").to_str().unwrap());
    assert!(served.terminate().success());
}

#[test]
fn in_the_background_a_command_returns_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    disk(dir, "waits-not");
    let served = serve(dir, &["waits-not.vhd"]);
    for words in
        [&["backup", "waits-not", "b.raw"][..], &["flatten", "waits-not"], &["move", "waits-not", "--to", "there.vhd"]]
    {
        let begun = json(dir, &[words, &["--rate", "64k", "--background"]].concat());
        let job = begun["jobs"].get(0).unwrap_or(&begun);
        assert_eq!(job["state"], "running", "{begun}");
        assert_eq!(json(dir, &["job", job["id"].as_str().unwrap(), "cancel"])["state"], "cancelled");
    }
    // A copy that stays in step has no end of its own.
    let copy = json(dir, &["move", "waits-not", "--to", "there.vhd", "--mirror-only"]);
    assert_eq!(copy["state"], "running");
    ok(dir, &["job", copy["id"].as_str().unwrap(), "cancel"]);
    assert!(fails(dir, 2, &["flatten", "waits-not", "--wait", "--background"]).contains("cannot be used with"));
    assert!(served.terminate().success());
    for words in [&["backup", "waits-not.vhd", "b.raw"][..], &["flatten", "waits-not.vhd"]] {
        let said = fails(dir, 2, &[words, &["--background"]].concat());
        assert!(said.contains("no server has this disk"), "{said}");
    }
    assert_eq!(names(dir), ["base.vhd", "waits-not.vhd"]);
}

#[test]
fn ctrl_c_stops_the_job_and_says_what_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    disk(dir, "waits-stopped");
    let served = serve(dir, &["waits-stopped.vhd"]);
    let all = [
        (&["backup", "waits-stopped", "b.raw"][..], "nothing of it is left", Signal::SIGINT),
        (&["flatten", "waits-stopped"], "the same command goes on", Signal::SIGTERM),
        (&["move", "waits-stopped", "--to", "there.vhd"], "the disk is where it was", Signal::SIGINT),
    ];
    for (words, left, signal) in all {
        let child = begin(dir, &[words, &["--rate", "256k"]].concat());
        eventually("it is at work", || job_of(dir, "waits-stopped")["done_bytes"].as_u64() > Some(0));
        let id = job_of(dir, "waits-stopped")["id"].clone();
        // `timeout` sends its signal twice.
        let pid = Pid::from_raw(child.id() as i32);
        kill(pid, signal).unwrap();
        let _ = kill(pid, signal);
        let (code, said) = end_of(child);
        assert_eq!(code, Some(128 + signal as i32), "{said}");
        assert!(said.contains("was stopped") && said.contains(left), "{said}");
        let job = job_of(dir, "waits-stopped");
        assert_eq!((&job["id"], &job["state"]), (&id, &"cancelled".into()), "{job}");
        assert_eq!(names(dir), ["base.vhd", "waits-stopped.vhd"]);
    }
    ok(dir, &["flatten", "waits-stopped"]);
    assert!(served.terminate().success());
}

/// The work is the server's: a terminal that is gone does not end it.
#[test]
fn a_job_outlives_the_terminal_of_its_command() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    disk(dir, "waits-gone");
    let served = serve(dir, &["waits-gone.vhd"]);
    let child = begin(dir, &["flatten", "waits-gone", "--rate", "64k"]);
    eventually("it is at work", || job_of(dir, "waits-gone")["done_bytes"].as_u64() > Some(0));
    kill(Pid::from_raw(child.id() as i32), Signal::SIGHUP).unwrap();
    let (code, said) = end_of(child);
    let job = job_of(dir, "waits-gone");
    assert!(code == Some(129) && said.contains(&format!("the job {} goes on", job["id"].as_str().unwrap())), "{said}");
    assert_eq!(job["state"], "running");
    ok(dir, &["job", "waits-gone", "cancel"]);
    assert!(served.terminate().success());
}

/// A backup counts what it copies: a hole is no work.
#[test]
fn a_backup_counts_data_and_no_holes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("waits-data.raw"), vec![1; 8 << 20]).unwrap();
    fs::File::options().write(true).open(dir.join("waits-data.raw")).unwrap().set_len(64 << 20).unwrap();
    let served = serve(dir, &["waits-data.raw"]);
    let made = json(dir, &["backup", "waits-data", "b.raw"]);
    let job = &made["jobs"][0];
    assert_eq!((&job["done_bytes"], &job["total_bytes"]), (&(8 << 20).into(), &(8 << 20).into()), "{job}");
    assert!(served.terminate().success());
}
