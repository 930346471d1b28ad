//! `spile move`: disks that are served under load, and disks that nobody uses; what is left by kills, and what is refused.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::common::guests::{self, Load};
use crate::common::host::{bytes_of, serve, try_serve};
use crate::common::moves::{self, noted};
use crate::common::nbd::Client;
use crate::common::{Served, eventually, fails, json, ok, run, spile};
use serde_json::Value;

const MIB: usize = 1 << 20;

/// The names of the files in the folder `folder` of `dir`.
fn names(dir: &Path, folder: &str) -> Vec<String> {
    let names = fs::read_dir(dir.join(folder)).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// A folder with `old/disk.vhd` and an empty folder `new`. The disk has a parent, 64 MiB, and data in places.
fn world(name: &str) -> (tempfile::TempDir, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = vec![0; 64 * MIB];
    for at in (0..64 * MIB).step_by(5 * MIB) {
        bytes[at..at + MIB].fill(1 + (at / MIB) as u8);
    }
    fs::create_dir(dir.path().join("old")).unwrap();
    fs::create_dir(dir.path().join("new")).unwrap();
    fs::write(dir.path().join("bytes.raw"), &bytes).unwrap();
    ok(dir.path(), &["convert", "bytes.raw", "old/parent.vhd"]);
    fs::remove_file(dir.path().join("bytes.raw")).unwrap();
    ok(dir.path(), &["create", &format!("old/{name}.vhd"), "--parent", "old/parent.vhd"]);
    (dir, bytes)
}

fn the_job(dir: &Path, disk: &str) -> Value {
    let jobs = json(dir, &["jobs"]);
    let found = jobs["jobs"].as_array().unwrap().iter().find(|job| job["disk"] == disk);
    found.unwrap_or_else(|| panic!("{disk} has no job: {jobs}")).clone()
}

#[test]
fn a_disk_that_nobody_uses_is_moved_and_its_old_path_says_where_it_is() {
    let (dir, bytes) = world("alone");
    let dir = dir.path();
    let moved = json(dir, &["move", "old/alone.vhd", "--to", "new"]);
    assert_eq!((&moved["kind"], &moved["state"]), (&"move".into(), &"done".into()), "{moved}");
    assert_eq!(moved["motion"]["phase"], "done");
    assert_eq!(names(dir, "old"), [".alone.vhd.spile-moved", "alone.moved.vhd", "parent.vhd"]);
    assert_eq!(names(dir, "new"), [".alone.vhd.spile-came", ".alone.vhd.spile-changes", "alone.vhd"]);
    assert_eq!(json(dir, &["info", "new/alone.vhd", "--chain"])["layers"].as_array().unwrap().len(), 1);
    assert!(bytes_of(dir, "new/alone.vhd") == bytes, "the bytes are others");
    for command in [
        &["info"][..],
        &["check"],
        &["serve", "--nbd", "unix:n"],
        &["backup", "b.raw"],
        &["resize", "1G"],
        &["clone", "c.vhd"],
        &["snapshot", "--name", "s"],
        &["checkpoint", "c"],
        &["limit", "--iops", "5"],
        &["coalesce", "--wait"],
        &["move", "--to", "new/again.vhd"],
        &["delete"],
    ] {
        let said = fails(dir, 1, &[&command[..1], &["old/alone.vhd"], &command[1..]].concat());
        assert!(said.contains("was moved to") && said.contains("new/alone.vhd"), "{command:?}: {said}");
    }
    // To another format, and nothing stays.
    ok(dir, &["move", "new/alone.vhd", "--to", "new/alone.raw", "--delete-source"]);
    assert_eq!(names(dir, "new"), [".alone.vhd.spile-moved", "alone.raw"]);
    assert!(fs::read(dir.join("new/alone.raw")).unwrap() == bytes, "the bytes are others");
    // Another disk may have the old path.
    ok(dir, &["create", "old/alone.vhd", "--size", "1M"]);
    ok(dir, &["info", "old/alone.vhd"]);
}

#[test]
fn a_disk_goes_to_another_place_and_back_under_a_guests_load() {
    let (dir, _) = world("motion-live");
    let dir = dir.path();
    let served = serve(dir, &["old/motion-live.vhd", "--vhost-user", "v"]);
    let mut load = Load::start(dir, "v", &["--span", "48M"]);
    load.goes_on(&served);
    for (to, format) in [("new", "vhd"), ("new/motion-live.raw", "raw"), ("old/motion-live.vhd", "vhd")] {
        let moved = json(dir, &["move", "motion-live", "--to", to, "--delete-source", "--wait"]);
        assert_eq!(moved["state"], "done", "{moved}");
        println!("{}", moved["motion"]);
        let shown = json(dir, &["show", "motion-live"]);
        assert_eq!(shown["layers"].as_array().unwrap().len(), 1, "{shown}");
        assert_eq!((&shown["path"], &shown["format"]), (&moved["to"], &format.into()), "{shown}");
        load.goes_on(&served);
    }
    assert_eq!(load.end(), 0);
    assert!(served.terminate().success());
    assert!(names(dir, "new").iter().all(|name| name.ends_with("spile-moved")), "{:?}", names(dir, "new"));
    ok(dir, &["check", "old/motion-live.vhd"]);
}

#[test]
fn a_server_that_is_killed_after_a_move_is_started_with_the_new_path_only() {
    let (dir, mut bytes) = world("motion-killed");
    let dir = dir.path();
    let served = serve(dir, &["old/motion-killed.vhd"]);
    let client = Client::connect(&served.uri()).unwrap();
    ok(dir, &["move", "motion-killed", "--to", "new", "--wait"]);
    client.write(4096, &[9; 8192], false).unwrap();
    bytes[4096..4096 + 8192].fill(9);
    drop(client);
    served.kill();
    let said = try_serve(dir, &["old/motion-killed.vhd"]).map(|_| ()).unwrap_err();
    assert!(said.contains("was moved to") && said.contains("new/motion-killed.vhd"), "{said}");
    assert!(serve(dir, &["new/motion-killed.vhd"]).terminate().success());
    assert!(bytes_of(dir, "new/motion-killed.vhd") == bytes, "what was acknowledged is lost");
}

#[test]
fn a_server_that_is_killed_before_anything_is_noted_begins_anew() {
    let (dir, mut bytes) = world("motion-half");
    let dir = dir.path();
    let served = serve(dir, &["old/motion-half.vhd"]);
    json(dir, &["move", "motion-half", "--to", "new/here.vhd", "--rate", "512K", "--background"]);
    let client = Client::connect(&served.uri()).unwrap();
    client.write(MIB as u64, &[7; 4096], false).unwrap();
    bytes[MIB..MIB + 4096].fill(7);
    assert!(names(dir, "new") == [".here.vhd.spile-moving"], "{:?}", names(dir, "new"));
    drop(client);
    served.kill();
    let served = serve(dir, &["old/motion-half.vhd"]);
    eventually("it goes on", || the_job(dir, "motion-half")["state"] == "running");
    let id = the_job(dir, "motion-half")["id"].as_str().unwrap().to_owned();
    ok(dir, &["job", &id, "rate", "none"]);
    eventually("it is done", || the_job(dir, "motion-half")["state"] == "done");
    assert!(served.terminate().success());
    assert_eq!(names(dir, "new"), [".here.vhd.spile-came", ".here.vhd.spile-changes", "here.vhd"]);
    assert_eq!(names(dir, "old"), [".motion-half.vhd.spile-moved", "motion-half.moved.vhd", "parent.vhd"]);
    assert!(bytes_of(dir, "new/here.vhd") == bytes, "what was acknowledged is lost");
}

/// A folder with `old/NAME.raw`, 48 MiB and full, and an empty folder `new`.
fn full(name: &str) -> (tempfile::TempDir, Vec<u8>) {
    moves::full(name, "new")
}

/// Moves the disk of [`full`] to `to` at a rate, kills its server on the way, and starts the next one after `between`. Guests write before and after. How
/// much the note said to be copied, and how much was copied after that.
fn killed_on_the_way(dir: &Path, disk: &str, to: &str, bytes: &mut [u8], between: impl FnOnce()) -> (u64, u64) {
    let path = format!("old/{disk}.raw");
    let served = serve(dir, &[&path]);
    let mut write = |served: &Served, at: usize, value: u8| {
        Client::connect(&served.uri()).unwrap().write(at as u64, &[value; 8192], value.is_multiple_of(2)).unwrap();
        bytes[at..at + 8192].fill(value);
    };
    json(dir, &["move", disk, "--to", to, "--rate", "8M", "--background"]);
    write(&served, 40 * MIB, 201);
    eventually("half of it is copied and that is noted", || noted(dir, disk) >= 16 << 20);
    write(&served, MIB, 202);
    write(&served, 41 * MIB, 203);
    served.kill();
    let until = noted(dir, disk);
    between();
    let served = serve(dir, &[&path]);
    write(&served, 3 * MIB, 204);
    eventually("it goes on", || the_job(dir, disk)["state"] == "running");
    write(&served, 5 * MIB, 206);
    ok(dir, &["job", the_job(dir, disk)["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it is done", || the_job(dir, disk)["state"] == "done");
    let copied = the_job(dir, disk)["done_bytes"].as_u64().unwrap();
    write(&served, 7 * MIB, 208);
    assert!(served.terminate().success());
    println!("{until} bytes were noted, {copied} copied after that");
    (until, copied)
}

/// Each write of a guest has one or two blocks of 64 KiB copied.
const OF_GUESTS: u64 = 10 * (64 << 10);

#[test]
fn a_server_that_is_killed_goes_on_with_its_half_and_copies_the_rest_and_what_has_changed() {
    for (disk, to) in [("motion-rest", "new/rest.raw"), ("motion-rest-vhd", "new/rest.vhd")] {
        let (dir, mut bytes) = full(disk);
        let dir = dir.path();
        let (until, copied) = killed_on_the_way(dir, disk, to, &mut bytes, || {});
        assert!(copied <= (48 << 20) - until + OF_GUESTS, "more was copied than the rest");
        assert_eq!(names(dir, "old"), [format!(".{disk}.raw.spile-moved"), format!("{disk}.moved.raw")]);
        assert!(bytes_of(dir, to) == bytes, "what was acknowledged is lost");
    }
}

#[test]
fn a_half_that_was_replaced_and_a_disk_that_another_program_wrote_to_are_copied_anew() {
    let (dir, mut bytes) = full("motion-half-gone");
    let dir = dir.path();
    let half = dir.join("new/.there.raw.spile-moving");
    let (_, copied) = killed_on_the_way(dir, "motion-half-gone", "new/there.raw", &mut bytes, || {
        fs::write(dir.join("new/other"), vec![0; 48 * MIB]).unwrap();
        fs::rename(dir.join("new/other"), &half).unwrap();
    });
    assert!(copied >= 48 << 20, "{copied}");
    assert!(bytes_of(dir, "new/there.raw") == bytes, "what was acknowledged is lost");

    let (dir, mut bytes) = full("motion-written");
    let dir = dir.path();
    // A command of ours that notes no changes says so.
    let (_, copied) = killed_on_the_way(dir, "motion-written", "new/there.raw", &mut bytes, || {
        fs::copy(dir.join("old/motion-written.raw"), dir.join("copy.raw")).unwrap();
        // The kernel lets go of a killed server's files a little later.
        let write = ["convert", "copy.raw", "old/motion-written.raw", "--onto"];
        eventually("the killed server's file is free", || run(dir, &write).status.success());
    });
    assert!(copied >= 48 << 20, "{copied}");
    assert!(bytes_of(dir, "new/there.raw") == bytes, "what was acknowledged is lost");
}

#[test]
fn a_command_that_is_ended_goes_on_when_it_is_said_again() {
    let (dir, bytes) = full("motion-again");
    let dir = dir.path();
    let mut command = spile();
    command.args(["move", "old/motion-again.raw", "--to", "new", "--rate", "8M"]).current_dir(dir);
    let mut first = Served { child: command.stderr(Stdio::null()).spawn().unwrap(), socket: dir.join("n") };
    eventually("half of it is copied and that is noted", || noted(dir, "motion-again") >= 16 << 20);
    first.signal(nix::sys::signal::Signal::SIGINT);
    assert_eq!(first.wait().code(), Some(130));
    let until = noted(dir, "motion-again");
    let said = fails(dir, 1, &["move", "old/motion-again.raw", "--to", "new/other.raw"]);
    assert!(said.contains("was begun and is not finished"), "{said}");
    let moved = json(dir, &["move", "old/motion-again.raw", "--to", "new"]);
    assert_eq!(moved["done_bytes"], (48 << 20) - until);
    assert!(bytes_of(dir, "new/motion-again.raw") == bytes);
}

/// The blocks that have changed since a checkpoint, as `spile changed` tells them.
fn changed(dir: &Path, disk: &str, since: &str) -> Vec<u64> {
    let told = json(dir, &["changed", disk, "--since", since]);
    assert!(told["warning"].is_null(), "{told}");
    let ranges = told["ranges"].as_array().unwrap().iter();
    let blocks = ranges.flat_map(|range| {
        let [from, len] = ["offset_bytes", "length_bytes"].map(|key| range[key].as_u64().unwrap() >> 16);
        from..from + len
    });
    blocks.collect()
}

#[test]
fn checkpoints_go_along_with_their_blocks_and_outlive_a_kill_at_the_new_place() {
    let (dir, _) = full("motion-marks");
    let dir = dir.path();
    let mut served = serve(dir, &["old/motion-marks.raw"]);
    let write = |served: &Served, block: u64| {
        Client::connect(&served.uri()).unwrap().write(block << 16, &[9; 4096], true).unwrap();
    };
    ok(dir, &["checkpoint", "motion-marks", "first"]);
    write(&served, 3);
    write(&served, 500);
    ok(dir, &["checkpoint", "motion-marks", "second"]);
    write(&served, 7);
    json(dir, &["move", "motion-marks", "--to", "new/m.vhd", "--rate", "16M", "--background"]);
    write(&served, 600);
    ok(dir, &["job", the_job(dir, "motion-marks")["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it is done", || the_job(dir, "motion-marks")["state"] == "done");
    assert!(the_job(dir, "motion-marks")["motion"]["trouble"].is_null(), "{}", the_job(dir, "motion-marks"));
    write(&served, 8);
    let (first, second) = (vec![3, 7, 8, 500, 600], vec![7, 8, 600]);
    for _ in 0..2 {
        assert_eq!(changed(dir, "motion-marks", "first"), first);
        assert_eq!(changed(dir, "motion-marks", "second"), second);
        let told = json(dir, &["checkpoint", "motion-marks", "--list"]);
        assert_eq!(told["checkpoints"].as_array().unwrap().len(), 2, "{told}");
        served.kill();
        served = serve(dir, &["new/m.vhd,name=motion-marks"]);
    }
    assert!(served.terminate().success());
    // Nobody's server: the command takes them along, too, to another format.
    ok(dir, &["move", "new/m.vhd", "--to", "new/n.raw", "--delete-source"]);
    assert_eq!((changed(dir, "new/n.raw", "first"), changed(dir, "new/n.raw", "second")), (first, second));
    assert_eq!(names(dir, "new"), [".m.vhd.spile-moved", ".n.raw.spile-changes", "n.raw"]);
}

#[test]
fn the_way_back_copies_what_has_changed_since_also_over_a_kill() {
    let (dir, mut bytes) = full("motion-back");
    let dir = dir.path();
    let mut write = |served: &Served, at: usize, value: u8| {
        Client::connect(&served.uri()).unwrap().write(at as u64, &[value; 4096], value.is_multiple_of(2)).unwrap();
        bytes[at..at + 4096].fill(value);
    };
    let back = dir.join("old/motion-back.raw").display().to_string();
    let mut served = serve(dir, &["old/motion-back.raw"]);
    write(&served, MIB, 201);
    let begun = json(dir, &["move", "motion-back", "--to", "new/there.vhd", "--wait"]);
    assert_eq!(begun["state"], "done");
    // There and back again: each way only the difference.
    for (to, other, value) in [(&*back, "new/there.vhd", 202), ("new/there.vhd", "old/motion-back.raw", 206)] {
        write(&served, 20 * MIB, value);
        served.kill();
        served = serve(dir, &[&format!("{other},name=motion-back")]);
        write(&served, 30 * MIB, value + 1);
        let moved = json(dir, &["move", "motion-back", "--to", to, "--wait"]);
        println!("back: {moved}");
        assert!(moved["done_bytes"].as_u64() <= Some(4 * (64 << 10)), "{moved}");
        write(&served, 40 * MIB, value + 2);
    }
    // A way back that is cut off goes on.
    for number in 0..32 {
        write(&served, number * MIB, 210);
    }
    json(dir, &["move", "motion-back", "--to", &back, "--rate", "256K", "--background"]);
    assert!(!dir.join("old/motion-back.moved.raw").exists(), "what is written to is called an old image");
    served.kill();
    served = serve(dir, &["new/there.vhd,name=motion-back"]);
    eventually("it goes on", || the_job(dir, "motion-back")["state"] == "running");
    ok(dir, &["job", the_job(dir, "motion-back")["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it is done", || the_job(dir, "motion-back")["state"] == "done");
    let job = the_job(dir, "motion-back");
    assert!(job["done_bytes"].as_u64() <= Some(36 * (64 << 10)), "{job}");
    assert!(served.terminate().success());
    assert!(bytes_of(dir, "old/motion-back.raw") == bytes, "what was acknowledged is lost");
}

#[test]
fn an_old_image_that_was_written_to_is_not_taken_for_what_was_left() {
    let (dir, bytes) = full("motion-touched");
    let dir = dir.path();
    ok(dir, &["move", "old/motion-touched.raw", "--to", "new"]);
    let old = dir.join("old/motion-touched.moved.raw");
    let mut content = fs::read(&old).unwrap();
    content[9 * MIB..10 * MIB].fill(0);
    fs::write(&old, content).unwrap();
    let moved = json(dir, &["move", "new/motion-touched.raw", "--to", "old"]);
    assert!(moved["done_bytes"].as_u64() >= Some(48 << 20), "{moved}");
    assert!(old.exists() && bytes_of(dir, "old/motion-touched.raw") == bytes);
}

#[test]
fn a_server_that_ends_leaves_the_half_and_whoever_gives_the_move_up_removes_it() {
    let (dir, bytes) = full("motion-left");
    let dir = dir.path();
    let served = serve(dir, &["old/motion-left.raw"]);
    json(dir, &["move", "motion-left", "--to", "new/x.raw", "--rate", "8M", "--background"]);
    eventually("some is noted", || noted(dir, "motion-left") > 0);
    // What the move notes is nobody's checkpoint.
    assert_eq!(json(dir, &["checkpoint", "motion-left", "--list"])["checkpoints"].as_array().unwrap().len(), 0);
    assert!(served.terminate().success());
    assert_eq!(names(dir, "new"), [".x.raw.spile-moving"]);
    assert_eq!(names(dir, "old"), [".motion-left.raw.spile-changes", ".motion-left.raw.spile-job", "motion-left.raw"]);
    let served = serve(dir, &["old/motion-left.raw"]);
    ok(dir, &["job", the_job(dir, "motion-left")["id"].as_str().unwrap(), "cancel"]);
    eventually("it is cancelled", || the_job(dir, "motion-left")["state"] == "cancelled");
    assert!(served.terminate().success());
    assert_eq!((names(dir, "new").len(), names(dir, "old")), (0, vec!["motion-left.raw".to_owned()]));
    assert!(bytes_of(dir, "old/motion-left.raw") == bytes);
}

#[test]
fn another_raw_file_of_that_name_is_not_moved() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir(dir.join("new")).unwrap();
    fs::write(dir.join("motion-raw.raw"), vec![3; 8 * MIB]).unwrap();
    let served = serve(dir, &["motion-raw.raw"]);
    json(dir, &["move", "motion-raw", "--to", "new/", "--rate", "512K", "--background"]);
    eventually("its note is there", || dir.join(".motion-raw.raw.spile-job").exists());
    served.kill();
    // The disk is given up, and the name goes to another one. The old file is kept, so that the new one gets a number of its own.
    fs::rename(dir.join("motion-raw.raw"), dir.join("given-up")).unwrap();
    fs::write(dir.join("motion-raw.raw"), vec![4; 8 * MIB]).unwrap();
    let served = serve(dir, &["motion-raw.raw"]);
    eventually("the note goes", || !dir.join(".motion-raw.raw.spile-job").exists());
    assert!(json(dir, &["jobs"])["jobs"].as_array().unwrap().iter().all(|job| job["disk"] != "motion-raw"));
    assert!(served.terminate().success());
    assert!(
        fs::read(dir.join("motion-raw.raw")).unwrap() == vec![4; 8 * MIB] && !dir.join("new/motion-raw.raw").exists()
    );
}

#[test]
fn a_hand_over_that_was_broken_off_between_the_two_names_is_taken_back() {
    let (dir, bytes) = world("torn");
    let dir = &dir.path().canonicalize().unwrap();
    // As a process leaves it that ends there.
    let at = |name: &str| dir.join(name);
    ok(dir, &["convert", "old/torn.vhd", "new/copy.vhd"]);
    fs::rename(at("new/copy.vhd"), at("new/.torn.vhd.spile-moving")).unwrap();
    fs::rename(at("old/torn.vhd"), at("old/torn.moved.vhd")).unwrap();
    let [to, image, half] =
        ["new/torn.vhd", "old/torn.moved.vhd", "new/.torn.vhd.spile-moving"].map(|name| at(name).display().to_string());
    let note = format!("spile moved 1\nto {to}\nimage {image}\nhalf {half}\nend\n");
    fs::write(at("old/.torn.vhd.spile-moved"), &note).unwrap();
    // Whoever only reads changes nothing.
    let said = fails(dir, 1, &["convert", "old/torn.vhd", "x.raw"]);
    assert!(said.contains("just being moved"), "{said}");
    assert!(serve(dir, &["old/torn.vhd"]).terminate().success());
    assert_eq!((names(dir, "old"), names(dir, "new").len()), (vec!["parent.vhd".to_owned(), "torn.vhd".to_owned()], 0));
    assert!(bytes_of(dir, "old/torn.vhd") == bytes);
    // Not when somebody has the half open: it may be that of another move. And not when the note says that the disk has got there.
    let torn = |half: &str, note: &str| {
        fs::rename(at("old/torn.vhd"), at("old/torn.moved.vhd")).unwrap();
        fs::copy(at("old/parent.vhd"), half).unwrap();
        fs::write(at("old/.torn.vhd.spile-moved"), note).unwrap();
    };
    torn(&half, &format!("spile moved 1\nto {to}\nimage {image}\nend\n"));
    let said = try_serve(dir, &["old/torn.vhd"]).map(|_| ()).unwrap_err();
    assert!(said.contains("was moved to"), "{said}");
    assert!(at("new/.torn.vhd.spile-moving").exists() && !at("old/torn.vhd").exists());
    fs::write(at("old/.torn.vhd.spile-moved"), &note).unwrap();
    let other = try_serve(dir, &["new/.torn.vhd.spile-moving,format=vhd"]).unwrap();
    let said = fails(dir, 1, &["resize", "old/torn.vhd", "128M"]);
    assert!(at("new/.torn.vhd.spile-moving").exists() && !at("old/torn.vhd").exists(), "{said}");
    assert!(other.terminate().success());
    // A link leads to the same note.
    std::os::unix::fs::symlink("old/torn.vhd", at("link.vhd")).unwrap();
    assert!(serve(dir, &["link.vhd"]).terminate().success());
    assert!(at("old/torn.vhd").exists() && !at("new/.torn.vhd.spile-moving").exists());
    // With the new name there, the new image is the disk, whatever else is there.
    fs::rename(at("old/torn.vhd"), at("old/torn.moved.vhd")).unwrap();
    fs::write(at("old/.torn.vhd.spile-moved"), &note).unwrap();
    fs::write(at("new/torn.vhd"), "x").unwrap();
    fs::write(at("new/.torn.vhd.spile-moving"), "x").unwrap();
    let said = try_serve(dir, &["old/torn.vhd"]).map(|_| ()).unwrap_err();
    assert!(said.contains("was moved to"), "{said}");
    // Nothing tells that the new one was not in use: then it is not taken back.
    fs::remove_file(at("new/torn.vhd")).unwrap();
    fs::remove_file(at("new/.torn.vhd.spile-moving")).unwrap();
    let said = try_serve(dir, &["old/torn.vhd"]).map(|_| ()).unwrap_err();
    assert!(said.contains("was moved to") && said.contains("torn.moved.vhd"), "{said}");
}

#[test]
fn a_successor_takes_over_a_disk_that_was_moved() {
    let (dir, _) = world("motion-over");
    let dir = dir.path();
    let served = guests::serve(dir, &["old/motion-over.vhd", "--vhost-user", "v"]);
    let mut load = Load::start(dir, "v", &["--span", "48M"]);
    load.goes_on(&served);
    ok(dir, &["move", "c", "--to", "new", "--wait"]);
    let next = guests::succeed(dir, &["new/motion-over.vhd", "--vhost-user", "v"], served);
    load.goes_on(&next);
    assert_eq!(load.end(), 0);
    assert!(next.terminate().success());
}

#[test]
fn the_old_image_of_a_disk_that_was_moved_is_written_only_when_told() {
    for format in ["vhd", "raw", "qcow2"] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        ["old", "new"].iter().for_each(|folder| fs::create_dir(dir.join(folder)).unwrap());
        let [disk, new, old] = ["old/d.", "new/d.", "old/d.moved."].map(|path| format!("{path}{format}"));
        ok(dir, &["create", &disk, "--size", "16M"]);
        ok(dir, &["move", &disk, "--to", "new"]);
        let says = "this is the old image of the disk";
        let link = format!("old/link.{format}");
        std::os::unix::fs::symlink(format!("d.moved.{format}"), dir.join(&link)).unwrap();
        for path in [&old, &link] {
            let said = try_serve(dir, &[path]).map(|_| ()).unwrap_err();
            assert!(said.contains(says) && said.contains(&new), "{said}");
        }
        for command in [
            &["resize", &old, "32M"][..],
            &["snapshot", &old, "--name", "s"],
            &["checkpoint", &old, "c"],
            &["convert", &new, &old, "--onto", "--to", format],
        ] {
            let said = fails(dir, 1, command);
            assert!(said.contains(says), "{command:?}: {said}");
        }
        // To read it, to be told, and to rename it back is allowed.
        ok(dir, &["info", &old]);
        assert!(try_serve(dir, &[&format!("{old},read-only")]).unwrap().terminate().success());
        assert!(try_serve(dir, &[&old, "--write-moved"]).unwrap().terminate().success());
        let served = guests::serve(dir, &[&new, "--nbd", "unix:n"]);
        let said = fails(dir, 1, &["attach", "c", &format!("{old},name=old")]);
        assert!(said.contains(says), "{said}");
        assert!(served.terminate().success());
        fs::rename(dir.join(&old), dir.join(&disk)).unwrap();
        assert!(try_serve(dir, &[&disk]).unwrap().terminate().success());
        fs::rename(dir.join(&disk), dir.join(&old)).unwrap();
        ok(dir, &["delete", &old]);
    }
}

#[test]
fn what_cannot_be_moved_is_refused_and_stays() {
    let (dir, bytes) = world("motion-stays");
    let dir = dir.path();
    fs::write(dir.join("new/taken.vhd"), "x").unwrap();
    let served = serve(dir, &["old/motion-stays.vhd", "mem:1M,name=motion-mem"]);
    for (code, disk, to, says) in [
        (1, "motion-stays", "new/taken.vhd", "there is a file of the new name already"),
        (2, "motion-stays", "old/motion-stays.moved.vhd", "the disk's old image gets this name"),
        (1, "motion-stays", "gone/x.vhd", "the new folder cannot be found"),
        (2, "motion-stays", "new/x", "say --to-format raw"),
        (1, "motion-mem", "new/x.raw", "the disk is on a device or an export"),
    ] {
        let said = fails(dir, code, &["move", disk, "--to", to]);
        assert!(said.contains(says), "{disk} to {to}: {said}");
    }
    let job = json(dir, &["move", "motion-stays", "--to", "new", "--rate", "512K", "--background"]);
    for command in [
        &["resize", "motion-stays", "128M"][..],
        &["snapshot", "motion-stays", "--name", "s"],
        &["coalesce", "motion-stays"],
    ] {
        let said = fails(dir, 1, command);
        assert!(said.contains(job["id"].as_str().unwrap()), "{command:?}: {said}");
    }
    ok(dir, &["job", job["id"].as_str().unwrap(), "cancel"]);
    eventually("it is cancelled", || the_job(dir, "motion-stays")["state"] == "cancelled");
    assert_eq!(
        (names(dir, "new"), names(dir, "old")),
        (vec!["taken.vhd".to_owned()], vec!["motion-stays.vhd".to_owned(), "parent.vhd".to_owned()])
    );
    // And it may go elsewhere.
    ok(dir, &["move", "motion-stays", "--to", "new", "--wait"]);
    assert!(served.terminate().success());
    assert!(bytes_of(dir, "new/motion-stays.vhd") == bytes);
}

#[test]
fn two_disks_that_go_to_one_place_do_not_meet() {
    let (dir, bytes) = world("motion-first");
    let dir = dir.path();
    fs::create_dir(dir.join("third")).unwrap();
    ok(dir, &["create", "third/motion-second.vhd", "--size", "64M"]);
    let served = serve(dir, &["old/motion-first.vhd", "third/motion-second.vhd"]);
    let first = json(dir, &["move", "motion-first", "--to", "new/x.vhd", "--rate", "512K", "--background"]);
    let said = fails(dir, 1, &["move", "motion-second", "--to", "new/x.vhd"]);
    assert!(said.contains("another disk is being moved to this place"), "{said}");
    assert_eq!(names(dir, "new"), [".x.vhd.spile-moving"]);
    ok(dir, &["job", first["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it is done", || the_job(dir, "motion-first")["state"] == "done");
    assert!(served.terminate().success());
    assert!(bytes_of(dir, "new/x.vhd") == bytes);
}

#[test]
fn a_new_image_that_has_lost_its_name_is_not_handed_over() {
    let (dir, bytes) = world("motion-lost");
    let dir = dir.path();
    let served = serve(dir, &["old/motion-lost.vhd"]);
    let job = json(dir, &["move", "motion-lost", "--to", "new/x.vhd", "--rate", "512K", "--background"]);
    fs::rename(dir.join("new/.x.vhd.spile-moving"), dir.join("new/elsewhere")).unwrap();
    fs::write(dir.join("new/.x.vhd.spile-moving"), "somebody else's").unwrap();
    ok(dir, &["job", job["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it has failed", || the_job(dir, "motion-lost")["state"] == "failed");
    assert_eq!(names(dir, "new"), [".x.vhd.spile-moving", "elsewhere"]);
    assert_eq!(names(dir, "old"), ["motion-lost.vhd", "parent.vhd"]);
    assert!(served.terminate().success());
    assert!(bytes_of(dir, "old/motion-lost.vhd") == bytes);
}

#[test]
fn a_server_that_ends_stops_the_move_and_the_next_one_goes_on() {
    let (dir, bytes) = world("motion-stop");
    let dir = dir.path();
    let served = serve(dir, &["old/motion-stop.vhd"]);
    json(dir, &["move", "motion-stop", "--to", "new", "--rate", "512K", "--background"]);
    std::thread::sleep(Duration::from_millis(100));
    assert!(served.terminate().success());
    assert_eq!(
        (names(dir, "old").contains(&".motion-stop.vhd.spile-job".to_owned()), names(dir, "new").len()),
        (true, 0)
    );
    let said = fails(dir, 1, &["snapshot", "old/motion-stop.vhd", "--name", "s"]);
    assert!(said.contains("has not come to its end"), "{said}");
    ok(dir, &["move", "old/motion-stop.vhd", "--to", "new"]);
    assert!(bytes_of(dir, "new/motion-stop.vhd") == bytes);
    assert_eq!(names(dir, "old"), [".motion-stop.vhd.spile-moved", "motion-stop.moved.vhd", "parent.vhd"]);
}

/// Another server, in the folder `there`, with an export of 64 MiB for a disk that comes.
fn other(dir: &Path) -> Served {
    let at = dir.join("there");
    if !at.exists() {
        fs::create_dir(&at).unwrap();
        ok(&at, &["create", "come.raw", "--size", "64M"]);
    }
    let mut command = spile();
    command.args(["serve", "come.raw", "--nbd", "unix:o", "--control", "none"]).current_dir(&at);
    Served::spawn(&mut command, at.join("o")).unwrap()
}

fn uri_of(other: &Served) -> String {
    format!("nbd+unix:///?socket={}", other.socket.display())
}

#[test]
fn a_disk_goes_to_an_export_under_load_and_comes_back() {
    let (dir, _) = world("motion-export");
    let dir = dir.path();
    let other = other(dir);
    // What it held does not matter.
    Client::connect(&other.uri()).unwrap().write(3 * MIB as u64, &[9; 4 * MIB], true).unwrap();
    let served = serve(dir, &["old/motion-export.vhd", "--vhost-user", "v"]);
    let mut load = Load::start(dir, "v", &["--span", "48M"]);
    load.goes_on(&served);
    let own =
        fails(dir, 2, &["move", "motion-export", "--to", &format!("nbd+unix:///?socket={}", dir.join("n").display())]);
    assert!(own.contains("serves the export itself"), "{own}");
    let moved = json(dir, &["move", "motion-export", "--to", &uri_of(&other), "--wait"]);
    println!("{}", moved["motion"]);
    assert_eq!(json(dir, &["show", "motion-export"])["layers"].as_array().unwrap().len(), 1);
    assert_eq!(names(dir, "old"), [".motion-export.vhd.spile-moved", "motion-export.moved.vhd", "parent.vhd"]);
    load.goes_on(&served);
    // Nothing at an export tells that the disk has left it.
    let said = fails(dir, 1, &["move", "motion-export", "--to", "new/back.vhd"]);
    assert!(said.contains("--leave-unmarked"), "{said}");
    ok(dir, &["move", "motion-export", "--to", "new/back.vhd", "--leave-unmarked", "--wait"]);
    load.goes_on(&served);
    assert_eq!(load.end(), 0);
    assert!(served.terminate().success() && other.terminate().success());
    assert_eq!(names(dir, "new"), ["back.vhd"]);
    ok(dir, &["check", "new/back.vhd"]);
}

#[test]
fn a_place_that_dies_is_waited_for_and_gets_what_it_lacks() {
    let (dir, bytes) = world("motion-cut");
    let dir = dir.path();
    let mut there = other(dir);
    let served = serve(dir, &["old/motion-cut.vhd", "--vhost-user", "v"]);
    let mut load = Load::start(dir, "v", &["--span", "48M"]);
    load.goes_on(&served);
    let job = json(dir, &["move", "motion-cut", "--to", &uri_of(&there), "--mirror-only"]);
    let id = job["id"].as_str().unwrap();
    let phase = || the_job(dir, "motion-cut")["motion"]["phase"].as_str().unwrap().to_owned();
    eventually("it is in step", || phase() == "in step");
    for _ in 0..3 {
        // Writes that were not flushed there are lost with the process, as far as its client knows.
        there.kill();
        load.goes_on(&served);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(the_job(dir, "motion-cut")["state"], "running");
        there = other(dir);
        load.goes_on(&served);
    }
    // While it is away, nothing says that the copy is whole.
    there.kill();
    load.goes_on(&served);
    ok(dir, &["job", id, "finish"]);
    std::thread::sleep(Duration::from_millis(300));
    let seen = the_job(dir, "motion-cut");
    assert_eq!(seen["state"], "running", "a copy that cannot be reached was finished: {seen}");
    assert!(seen["motion"]["lag_bytes"].as_u64() > Some(0), "{seen}");
    assert_eq!(load.end(), 0);
    let there = other(dir);
    eventually("it is done", || the_job(dir, "motion-cut")["state"] == "done");
    assert_eq!(
        json(dir, &["show", "motion-cut"])["layers"].as_array().unwrap().len(),
        2,
        "the disk has left its place"
    );
    assert!(served.terminate().success() && there.terminate().success());
    let copy = fs::read(dir.join("there/come.raw")).unwrap();
    assert!(
        copy == bytes_of(dir, "old/motion-cut.vhd") && copy[60 * MIB..] == bytes[60 * MIB..],
        "the copy is another disk"
    );
}

#[test]
fn a_place_that_is_slower_than_the_guest_is_reached_all_the_same() {
    let (dir, _) = world("motion-slow");
    let dir = dir.path();
    let at = dir.join("there");
    fs::create_dir(&at).unwrap();
    ok(&at, &["create", "come.raw", "--size", "64M"]);
    let mut command = spile();
    command.args(["serve", "come.raw,write-bps=24M", "--nbd", "unix:o", "--control", "none"]).current_dir(&at);
    let other = Served::spawn(&mut command, at.join("o")).unwrap();
    let served = serve(dir, &["old/motion-slow.vhd", "--vhost-user", "v"]);
    // Each write of 4 KiB has a block of 64 KiB copied.
    let mut load = Load::start(dir, "v", &["--span", "48M", "--rwmix", "0"]);
    load.goes_on(&served);
    let moved = json(dir, &["move", "motion-slow", "--to", &uri_of(&other), "--wait"]);
    println!("{}", moved["motion"]);
    assert!(moved["motion"]["held_writes"].as_u64() > Some(0), "nobody was held back: {moved}");
    assert_eq!(load.end(), 0);
    assert!(served.terminate().success() && other.terminate().success());
}

#[test]
fn a_place_that_hangs_for_ever_costs_the_guest_nothing_and_can_be_given_up() {
    let (dir, bytes) = world("motion-hang");
    let dir = dir.path();
    let other = other(dir);
    let served = serve(dir, &["old/motion-hang.vhd"]);
    let client = Client::connect(&served.uri()).unwrap();
    let job = json(dir, &["move", "motion-hang", "--to", &uri_of(&other), "--rate", "4M", "--background"]);
    let writes = |client: &Client| {
        let begun = std::time::Instant::now();
        for number in 0..100 {
            client.write(number * 4096, &[number as u8; 4096], number % 10 == 0).unwrap();
        }
        begun.elapsed()
    };
    let quiet = [writes(&client), writes(&client)].iter().sum::<Duration>();
    other.signal(nix::sys::signal::Signal::SIGSTOP);
    let hanging = [writes(&client), writes(&client)].iter().sum::<Duration>();
    println!("200 writes took {quiet:?} while the place answered, and {hanging:?} while it hung");
    // One write that waited for the place, which does not answer, would take longer than all of them.
    assert!(hanging < quiet * 20, "{quiet:?} and {hanging:?}");
    ok(dir, &["job", job["id"].as_str().unwrap(), "cancel"]);
    eventually("it is cancelled", || the_job(dir, "motion-hang")["state"] == "cancelled");
    assert_eq!(names(dir, "old"), ["motion-hang.vhd", "parent.vhd"]);
    drop(client);
    other.signal(nix::sys::signal::Signal::SIGCONT);
    assert!(served.terminate().success());
    assert!(bytes_of(dir, "old/motion-hang.vhd")[MIB..] == bytes[MIB..]);
}

#[test]
fn what_a_move_leaves_behind_is_said_before() {
    let (dir, _) = world("motion-behind");
    let dir = dir.path();
    ok(dir, &["snapshot", "old/motion-behind.vhd", "--name", "monday"]);
    let said = |words: &[&str]| {
        let output = crate::common::run(dir, words);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{words:?}: {said}");
        said
    };
    let is_told = |said: &str| {
        ["old/motion-behind-monday.vhd", "old/parent.vhd", "--chain keep"].iter().all(|word| said.contains(word))
    };
    assert_eq!(said(&["move", "old/motion-behind.vhd", "--to", "new", "--chain", "keep"]), "");
    let back = said(&["move", "new/motion-behind.vhd", "--to", "new/alone.vhd"]);
    assert!(back.contains("new/motion-behind-monday.vhd") && back.contains("stay behind"), "{back}");
    // What is there no more is told with what there is.
    let refused = fails(dir, 1, &["revert", "new/alone.vhd", "monday", "--discard"]);
    assert!(refused.contains("has no snapshot \"monday\"") && refused.contains("--chain keep"), "{refused}");
    assert_eq!(refused.matches("new/alone.vhd").count(), 1, "{refused}");
    fs::rename(dir.join("old/motion-behind.moved.vhd"), dir.join("old/motion-behind.vhd")).unwrap();
    fs::remove_file(dir.join("old/.motion-behind.vhd.spile-moved")).unwrap();
    let served = serve(dir, &["old/motion-behind.vhd"]);
    let told = said(&["move", "motion-behind", "--to", "new/third.vhd"]);
    assert!(is_told(&told), "{told}");
    assert!(served.terminate().success());
}

#[test]
fn in_a_folder_a_disk_keeps_its_name_and_format() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir(dir.join("new")).unwrap();
    fs::write(dir.join("disk"), [7; MIB]).unwrap();
    let missing = fails(dir, 1, &["move", "disk", "--format", "raw", "--to", "nowhere/"]);
    assert!(missing.contains("no such folder") && !missing.contains("extension"), "{missing}");
    ok(dir, &["move", "disk", "--format", "raw", "--to", "new/"]);
    assert_eq!(fs::read(dir.join("new/disk")).unwrap(), [7; MIB]);
}
