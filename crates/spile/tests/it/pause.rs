//! `spile pause` and `spile resume`: what waits, what a copy of the files is, and what ends a pause.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::guests::{self, Load};
use crate::common::nbd::Client;
use crate::common::{Served, eventually, fails, json, ok, run};
use serde_json::Value;
use spile_lab::GuestQueue;
use spile_lab::vhost::Queue;

const ARGS: [&str; 5] = ["disk.vhd", "--vhost-user", "v", "--nbd", "unix:n"];

fn new_disk(dir: &Path) -> Served {
    ok(dir, &["create", "disk.vhd", "--size", "64M"]);
    guests::serve(dir, &ARGS)
}

fn disk(dir: &Path) -> Value {
    json(dir, &["ls", "c"])["disks"][0].clone()
}

/// Pauses the disk. Returns the pause's id.
fn pause(dir: &Path, at_most: &str) -> String {
    json(dir, &["pause", "c", "--at-most", at_most])["id"].as_str().unwrap().to_owned()
}

/// Ends the pause of this id, which has lasted until now.
fn resume(dir: &Path, id: &str) -> String {
    ok(dir, &["resume", "c", "--pause", id])
}

/// The pause of this id is over, and its copy is worth nothing.
fn is_over(dir: &Path, id: &str) -> String {
    let said = fails(dir, 1, &["resume", "c", "--pause", id]);
    assert!(said.contains("copy it again"), "{said}");
    said
}

fn copies(dir: &Path, name: &str) -> Vec<u8> {
    fs::copy(dir.join("disk.vhd"), dir.join(name)).unwrap();
    fs::read(dir.join(name)).unwrap()
}

fn raw_of(dir: &Path, image: &str) -> Vec<u8> {
    ok(dir, &["convert", image, "out.raw"]);
    let bytes = fs::read(dir.join("out.raw")).unwrap();
    fs::remove_file(dir.join("out.raw")).unwrap();
    bytes
}

#[test]
fn a_copy_of_a_paused_disk_is_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let served = new_disk(dir);
    let mut load = Load::start(dir, "v", &["--span", "48M"]);
    for round in 0..3 {
        load.goes_on(&served);
        let paused = json(dir, &["pause", "c", "--at-most", "5m"]);
        let id = paused["id"].as_str().unwrap();
        assert!(paused["at_most_s"] == 300.0 && paused["time_s"].as_f64().unwrap() < 300.0, "{paused}");
        let first = copies(dir, "first.vhd");
        assert!(disk(dir)["state"] == "paused" && disk(dir)["paused"]["at_most_s"] == 300.0, "{}", disk(dir));
        let end = format!("`spile resume disk --pause {id}`");
        assert!(ok(dir, &["ls", "c"]).contains("paused since") && ok(dir, &["show", "c"]).contains(&end));
        thread::sleep(Duration::from_millis(200));
        assert!(copies(dir, "second.vhd") == first, "the file has changed in round {round}");
        let said = resume(dir, id);
        assert!(said.contains("goes on, after a pause of"), "{said}");
        assert_eq!(disk(dir)["state"], "running");
        // A copy that was taken by any tool is an image in order.
        let checked = run(dir, &["check", "first.vhd"]).status.code();
        assert!(matches!(checked, Some(0 | 4)), "{checked:?}: it may have unused space, as the disk has");
    }
    load.goes_on(&served);
    assert_eq!(load.end(), 0);
    assert!(served.terminate().success());
}

#[test]
fn what_was_acknowledged_is_in_the_copy_and_what_waits_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let served = new_disk(dir);
    let client = Client::connect(&guests::nbd(dir, "")).unwrap();
    client.write(0, &[1; 4096], false).unwrap();
    client.write(5 << 20, &[2; 4096], false).unwrap();
    let id = pause(dir, "60s");
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            client.write(0, &[3; 4096], true).unwrap();
            is_done.store(true, Ordering::SeqCst);
        });
        // A write that came while the disk is paused waits, and does not fail.
        thread::sleep(Duration::from_millis(300));
        assert!(!is_done.load(Ordering::SeqCst));
        copies(dir, "copy.vhd");
        resume(dir, &id);
    });
    let copy = raw_of(dir, "copy.vhd");
    assert!(copy[..4096] == [1; 4096] && copy[5 << 20..][..4096] == [2; 4096]);
    let mut now = [0; 4096];
    client.read(0, &mut now).unwrap();
    assert_eq!(now, [3; 4096]);
    drop(client);
    assert!(served.terminate().success());
}

#[test]
fn a_pause_ends_by_itself_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut served = new_disk(dir);
    let id = pause(dir, "200ms");
    eventually("the disk goes on", || disk(dir)["state"] == "running");
    guests::complains(&mut served, "its 0.2 s are over");
    // It is said as often as somebody asks.
    for _ in 0..2 {
        let said = is_over(dir, &id);
        assert!(said.contains("its 0.2 s are over"), "{said}");
    }
    for refused in ["0s", "2h"] {
        let said = fails(dir, 2, &["pause", "c", "--at-most", refused]);
        assert!(said.contains("no pause lasts so long"), "{said}");
    }
    assert!(served.terminate().success());
}

#[test]
fn nothing_else_is_done_to_a_paused_disk() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let served = new_disk(dir);
    let id = pause(dir, "60s");
    let busy: [&[&str]; 5] = [
        &["pause", "c"],
        &["snapshot", "c", "--name", "s.vhd"],
        &["resize", "c", "128M"],
        &["detach", "c", "--force"],
        &["flatten", "c"],
    ];
    for refused in busy {
        let said = fails(dir, 1, refused);
        assert!(said.contains("a pause"), "{refused:?}: {said}");
    }
    // A takeover is refused too, and the server goes on.
    let refused = guests::try_serve(dir, &[&ARGS[..], &["--takeover"]].concat()).err().unwrap();
    assert!(refused.contains("a pause of the disk"), "{refused}");
    ok(dir, &["limit", "c", "--iops", "100000"]);
    resume(dir, &id);
    ok(dir, &["snapshot", "c", "--name", "s.vhd"]);
    assert!(served.terminate().success());
    let said = fails(dir, 1, &["pause", "disk.vhd"]);
    assert!(said.contains("no server has this disk") && said.contains("copy it as it is"), "{said}");
}

#[test]
fn a_guest_that_stops_and_a_server_that_ends_wait_for_no_pause() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let served = new_disk(dir);
    let (device, mut queue) = guests::guest(&dir.join("v"));
    let id = pause(dir, "1h");
    queue.data(0).fill(7);
    queue.submit(0, Queue::WRITE, 0, 4096);
    queue.publish();
    assert!(!queue.sleep(Duration::from_millis(200)).unwrap(), "a request of a paused disk is answered");
    // The guest goes, and its ring comes to an end with the request that it holds.
    drop((queue, device));
    eventually("the pause ends", || disk(dir)["state"] == "running");
    let said = is_over(dir, &id);
    assert!(said.contains("was stopped"), "{said}");
    // A server that is told to end does so, and what its guest was told is there.
    let mut load = Load::start(dir, "v", &["--span", "48M", "--reconnect", "1m"]);
    load.goes_on(&served);
    let id = pause(dir, "1h");
    assert!(served.terminate().success());
    let next = guests::serve_again(dir, &ARGS);
    load.goes_on(&next);
    assert_eq!(disk(dir)["state"], "running");
    is_over(dir, &id);
    assert_eq!(load.end(), 1);
    assert!(next.terminate().success());
}

#[test]
fn a_killed_server_leaves_a_disk_that_is_not_paused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let served = new_disk(dir);
    let mut load = Load::start(dir, "v", &["--span", "48M", "--reconnect", "1m"]);
    load.goes_on(&served);
    let id = pause(dir, "1h");
    served.kill();
    let next = guests::serve_again(dir, &ARGS);
    load.goes_on(&next);
    is_over(dir, &id);
    assert_eq!(load.end(), 1);
    assert!(next.terminate().success());
}

#[test]
fn a_pause_is_ended_by_its_id_alone() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let served = new_disk(dir);
    // Whoever has trouble in mind ends no pause.
    let first = pause(dir, "1h");
    let said = fails(dir, 1, &["resume", "c"]);
    assert!(said.contains("is paused") && said.contains(&format!("--pause {first}")), "{said}");
    assert_eq!(disk(dir)["state"], "paused");
    // Somebody else has ended it by its id: the second one hears of it.
    resume(dir, &first);
    is_over(dir, &first);
    ok(dir, &["resume", "c"]);
    // Two who pause: the first one's time is over before the second one begins.
    let first = pause(dir, "100ms");
    eventually("the disk goes on", || disk(dir)["state"] == "running");
    let second = pause(dir, "1h");
    assert_ne!(first, second);
    is_over(dir, &first);
    assert_eq!(disk(dir)["state"], "paused", "the first one has ended the second one's pause");
    resume(dir, &second);
    is_over(dir, "");
    assert!(served.terminate().success());
}

/// A request below that does not end, and a caller that has gone.
#[test]
fn nobody_waits_for_a_pause_whose_caller_has_gone() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "disk.vhd", "--size", "64M"]);
    let mut command = crate::common::spile();
    command.arg("serve").args(ARGS).args(["--control", "c"]).current_dir(dir).env("SPILE_TEST_SLOW", "600000:4096");
    let served = Served::spawn(&mut command, dir.join("n")).unwrap();
    let [slow, other] = [(); 2].map(|()| Client::connect(&guests::nbd(dir, "")).unwrap());
    thread::scope(|scope| {
        // It comes to no end before its server does.
        scope.spawn(|| slow.write(0, &[1; 4096], false).unwrap_err());
        let in_flight = || {
            let shown = json(dir, &["show", "c"]);
            let meters = shown["meters"].as_array().unwrap().iter();
            let mut operations = meters.flat_map(|meter| meter["operations"].as_array().unwrap());
            operations.any(|operation| operation["in_flight"] == 1)
        };
        eventually("the request is in flight", in_flight);
        let mut caller = crate::common::spile();
        caller.args(["pause", "c", "--at-most", "1h"]).current_dir(dir).stderr(Stdio::null());
        let mut caller = caller.spawn().unwrap();
        eventually("the pause begins", || disk(dir)["state"] == "paused");
        caller.kill().unwrap();
        caller.wait().unwrap();
        eventually("the disk goes on", || disk(dir)["state"] == "running");
        other.write(1 << 20, &[2; 4096], false).unwrap();
        assert!(in_flight(), "the request has ended: nothing was to be waited for");
        served.kill();
    });
}
