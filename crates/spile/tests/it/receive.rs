//! `spile receive`: disks that come from another host, under load, over kills of either side; what is refused, and what stays behind.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::guests::Load;
use crate::common::moves::{self, job, let_go, noted, receive, to};
use crate::common::nbd::Client;
use crate::common::{Served, eventually, fails, faulty_sync, have, json, ok, spile};
use serde_json::Value;

const MIB: usize = 1 << 20;

pub fn serve(dir: &Path, args: &[&str]) -> Served {
    let mut command = spile();
    command.arg("serve").args(args).args(["--nbd", "unix:n"]).current_dir(dir);
    Served::spawn(&mut command, dir.join("n")).unwrap_or_else(|err| panic!("serve {args:?}: {err}"))
}

/// A folder with `old/NAME.vhd`, 64 MiB, with a parent and data in places, and an empty folder `there`.
pub fn world(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = vec![0; 64 * MIB];
    for at in (0..64 * MIB).step_by(5 * MIB) {
        bytes[at..at + MIB].fill(1 + (at / MIB) as u8);
    }
    ["old", "there"].into_iter().for_each(|folder| fs::create_dir(dir.path().join(folder)).unwrap());
    fs::write(dir.path().join("bytes.raw"), &bytes).unwrap();
    ok(dir.path(), &["convert", "bytes.raw", "old/parent.vhd"]);
    fs::remove_file(dir.path().join("bytes.raw")).unwrap();
    ok(dir.path(), &["create", &format!("old/{name}.vhd"), "--parent", "old/parent.vhd"]);
    dir
}

fn names(dir: &Path, folder: &str) -> Vec<String> {
    let names = fs::read_dir(dir.join(folder)).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    // What is noted of a disk's changes is another test's matter.
    let mut names: Vec<_> = names.filter(|name: &String| !name.ends_with(".spile-changes")).collect();
    names.sort();
    names
}

fn same(dir: &Path, one: &str, other: &str) {
    ok(dir, &["compare", one, other]);
}

#[test]
fn a_disk_comes_whole_or_not_at_all_and_goes_on_under_load() {
    let dir = world("receive-live");
    let dir = dir.path();
    let mut there = receive(dir);
    let served = serve(dir, &["old/receive-live.vhd", "--vhost-user", "v"]);
    let mut load = Load::start(dir, "v", &["--span", "48M"]);
    load.goes_on(&served);
    let begun = json(dir, &["move", "receive-live", "--to", &to(dir, "disk.vhd"), "--rate", "4M", "--background"]);
    load.goes_on(&served);
    // A half has no name by which it could be taken for a disk, not even for those who ask by NBD.
    assert_eq!(names(dir, "there"), [".disk.vhd.spile-received", ".disk.vhd.spile-receiving"]);
    let said = fails(dir, 1, &["info", &to(dir, "disk.vhd")]);
    assert!(said.contains("not handed over yet"), "{said}");
    assert_eq!(json(dir, &["receive", "there", "--list"])["disks"][0]["state"], "half");
    there.kill();
    load.goes_on(&served);
    assert_eq!(job(dir, "receive-live")["state"], "running");
    there = receive(dir);
    ok(dir, &["job", begun["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it is done", || job(dir, "receive-live")["state"] == "done");
    println!("{}", job(dir, "receive-live")["motion"]);
    assert_eq!(names(dir, "there"), [".disk.vhd.spile-received", "disk.vhd"]);
    load.goes_on(&served);
    assert_eq!(load.end(), 0);
    // What was flushed outlives the other host's process, and guests go on with the next one.
    let client = Client::connect(&served.uri()).unwrap();
    client.write(0, &[6; 4096], false).unwrap();
    client.flush().unwrap();
    there.kill();
    there = receive(dir);
    client.write(4096, &[6; 4096], true).unwrap();
    drop(client);
    assert!(served.terminate().success());
    assert_eq!(json(dir, &["receive", "there", "--list"])["disks"][0]["state"], "whole");
    // The old host may start with the new place, and the new host with the file, when nobody else uses it.
    let again = serve(dir, &[&to(dir, "disk.vhd")]);
    Client::connect(&again.uri()).unwrap().write(0, &[7; 4096], true).unwrap();
    assert!(again.terminate().success());
    let_go(dir, "there/disk.vhd");
    let own = serve(dir, &["there/disk.vhd"]);
    let mut read = [0; 4096];
    Client::connect(&own.uri()).unwrap().read(0, &mut read).unwrap();
    assert_eq!(read, [7; 4096]);
    assert!(own.terminate().success() && there.terminate().success());
}

#[test]
fn a_move_goes_on_with_its_own_half_when_its_host_was_killed() {
    let dir = world("receive-killed");
    let dir = dir.path();
    let there = receive(dir);
    let mut served = serve(dir, &["old/receive-killed.vhd"]);
    json(dir, &["move", "receive-killed", "--to", &to(dir, "disk.raw"), "--rate", "2M", "--background"]);
    eventually("some is copied", || job(dir, "receive-killed")["done_bytes"].as_u64() > Some(4 << 20));
    served.kill();
    // Nobody else gets the name meanwhile.
    ok(dir, &["create", "old/receive-other.raw", "--size", "64M"]);
    let said = fails(dir, 1, &["move", "old/receive-other.raw", "--to", &to(dir, "disk.raw")]);
    assert!(said.contains("by another move"), "{said}");
    served = serve(dir, &["old/receive-killed.vhd"]);
    ok(dir, &["job", job(dir, "receive-killed")["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it is done", || job(dir, "receive-killed")["state"] == "done");
    assert!(served.terminate().success() && there.terminate().success());
    same(dir, "old/receive-killed.moved.vhd", "there/disk.raw");
}

/// A folder with `old/NAME.raw`, 48 MiB and full, and an empty folder `there`.
fn full(name: &str) -> (tempfile::TempDir, Vec<u8>) {
    moves::full(name, "there")
}

#[test]
fn after_a_kill_of_either_side_or_of_both_only_the_rest_and_what_has_changed_is_sent() {
    for (disk, kills) in [("receive-rest-here", "here"), ("receive-rest-there", "there"), ("receive-rest-both", "both")]
    {
        let (dir, mut bytes) = full(disk);
        let dir = dir.path();
        let mut there = receive(dir);
        let mut served = serve(dir, &[&format!("old/{disk}.raw")]);
        let mut write = |served: &Served, at: usize, value: u8| {
            Client::connect(&served.uri()).unwrap().write(at as u64, &[value; 4096], value.is_multiple_of(2)).unwrap();
            bytes[at..at + 4096].fill(value);
        };
        json(dir, &["move", disk, "--to", &to(dir, "disk.vhd"), "--rate", "8M", "--background"]);
        eventually("half of it is copied and that is noted", || noted(dir, disk) >= 16 << 20);
        write(&served, MIB, 201);
        write(&served, 41 * MIB, 202);
        let mut before = 0;
        match kills {
            "there" => {
                there.kill();
                write(&served, 3 * MIB, 203);
                before = job(dir, disk)["done_bytes"].as_u64().unwrap();
                there = receive(dir);
            }
            "both" => {
                served.kill();
                there.kill();
                served = serve(dir, &[&format!("old/{disk}.raw")]);
                write(&served, 3 * MIB, 203);
                eventually("it waits for the other host", || job(dir, disk)["motion"]["phase"] == "failing");
                there = receive(dir);
            }
            _ => {
                served.kill();
                served = serve(dir, &[&format!("old/{disk}.raw")]);
                write(&served, 3 * MIB, 203);
            }
        }
        let until = noted(dir, disk);
        // What was sent to a process that has died, and was not flushed there, is sent again.
        let twice = if kills == "there" { 16 << 20 } else { 0 };
        eventually("it goes on", || noted(dir, disk) > until);
        write(&served, 5 * MIB, 204);
        ok(dir, &["job", job(dir, disk)["id"].as_str().unwrap(), "rate", "none"]);
        eventually("it is done", || job(dir, disk)["state"] == "done");
        let copied = job(dir, disk)["done_bytes"].as_u64().unwrap() - before;
        println!("{kills}: {until} bytes were noted, {copied} copied after that");
        assert!(copied <= (48 << 20) - until + twice + 10 * (64 << 10), "more was copied than the rest");
        assert!(served.terminate().success() && there.terminate().success());
        ok(dir, &["convert", "there/disk.vhd", "bytes.raw"]);
        assert!(fs::read(dir.join("bytes.raw")).unwrap() == bytes, "what was acknowledged is lost");
    }
}

/// A host whose link was cut comes again before the other side has noticed that: it is let in as soon as the old link's requests have ended.
#[test]
fn a_new_link_comes_in_the_place_of_one_that_is_still_connected() {
    let dir = world("receive-links");
    let dir = dir.path();
    let there = receive(dir);
    let order = |order: String| there.export(&format!(".spile-receive/{order}/disk.raw"));
    let (id, links) = ("a7".repeat(16), ["3c".repeat(16), "5d".repeat(16)]);
    let begun = Client::connect(&order(format!("begin/{id}/{}", 4 * MIB))).unwrap();
    let one = Client::connect(&order(format!("go-on/{id}/{}", links[0]))).unwrap();
    one.write(0, &[1; 4096], false).unwrap();
    let other = Client::connect(&order(format!("go-on/{id}/{}", links[1]))).unwrap();
    other.write(4096, &[2; 4096], true).unwrap();
    assert!(one.write(0, &[3; 4096], false).is_err(), "an old link writes");
    // Where an order is answered there is nothing to write to.
    let _ = begun.write(0, &[3; 4096], false);
    assert!(Client::connect(&order(format!("go-on/{id}/{}", links[0]))).is_err(), "an old link comes again");
    // One that was cut when the next one came does not come again, either; and no old one when the disk is whole.
    drop(other);
    let last = "6e".repeat(16);
    let third = Client::connect(&order(format!("go-on/{id}/{last}"))).unwrap();
    third.write(8192, &[3; 4096], true).unwrap();
    drop(third);
    let old = || links.iter().map(|link| Client::connect(&order(format!("go-on/{id}/{link}"))));
    assert!(old().all(|link| link.is_err()), "an old link comes again");
    Client::connect(&order(format!("finish/{id}"))).unwrap();
    assert!(old().all(|link| link.is_err()), "an old link comes to a disk that is whole");
    let third = Client::connect(&order(format!("go-on/{id}/{last}"))).unwrap();
    third.write(12288, &[4; 4096], true).unwrap();
    drop(third);
    assert!(there.terminate().success());
    let disk = fs::read(dir.join("there/disk.raw")).unwrap();
    (0..4).for_each(|at| assert_eq!(disk[at * 4096..][..4096], [at as u8 + 1; 4096]));
}

#[test]
fn a_half_that_is_gone_there_is_never_taken_for_what_was_copied() {
    let (dir, bytes) = full("receive-half-gone");
    let dir = dir.path();
    let there = receive(dir);
    let served = serve(dir, &["old/receive-half-gone.raw"]);
    ok(dir, &["checkpoint", "receive-half-gone", "nightly"]);
    let said = spile().args(["move", "receive-half-gone", "--to", "nbd://127.0.0.1:1/x"]).current_dir(dir).output();
    let said = String::from_utf8(said.unwrap().stderr).unwrap();
    assert!(said.contains("the checkpoints nightly go along to an export only where"), "{said}");
    json(dir, &["move", "receive-half-gone", "--to", &to(dir, "disk.raw"), "--rate", "8M", "--background"]);
    eventually("some is noted", || noted(dir, "receive-half-gone") > 0);
    there.kill();
    fs::remove_file(dir.join("there/.disk.raw.spile-receiving")).unwrap();
    fs::remove_file(dir.join("there/.disk.raw.spile-received")).unwrap();
    let there = receive(dir);
    // The process that has copied to it knows that it is gone, and makes no other one in its place.
    eventually("that is told", || {
        let trouble = job(dir, "receive-half-gone")["motion"]["trouble"].as_str().unwrap_or_default().to_owned();
        trouble.contains("no image of this move")
    });
    assert!(names(dir, "there").is_empty(), "{:?}", names(dir, "there"));
    served.kill();
    // The next one begins anew.
    let served = serve(dir, &["old/receive-half-gone.raw"]);
    eventually("it goes on", || job(dir, "receive-half-gone")["motion"]["phase"] == "copying");
    ok(dir, &["job", job(dir, "receive-half-gone")["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it is done", || job(dir, "receive-half-gone")["state"] == "done");
    assert!(job(dir, "receive-half-gone")["done_bytes"].as_u64() >= Some(48 << 20));
    assert!(served.terminate().success() && there.terminate().success());
    assert!(fs::read(dir.join("there/disk.raw")).unwrap() == bytes, "the copy is another disk");
}

/// The process that has made the copy was killed between the answer that the copy has its name, and the end of its job's note.
#[test]
fn a_copy_that_has_its_name_is_never_written_to_again_by_its_job() {
    let (dir, bytes) = full("receive-named");
    let dir = dir.path();
    let there = receive(dir);
    let served = serve(dir, &["old/receive-named.raw"]);
    let begun = json(dir, &["move", "receive-named", "--to", &to(dir, "disk.raw"), "--mirror-only"]);
    eventually("it is in step, and that is noted", || noted(dir, "receive-named") == 48 << 20);
    let left = [".receive-named.raw.spile-job", ".receive-named.raw.spile-changes"].map(|name| {
        let path = dir.join("old").join(name);
        (fs::read(&path).unwrap(), path)
    });
    ok(dir, &["job", begun["id"].as_str().unwrap(), "finish"]);
    eventually("it is done", || job(dir, "receive-named")["state"] == "done");
    served.kill();
    for notes in [&left[..], &left[..1]] {
        notes.iter().for_each(|(content, path)| fs::write(path, content).unwrap());
        let served = serve(dir, &["old/receive-named.raw"]);
        Client::connect(&served.uri()).unwrap().write(9 * MIB as u64, &[5; 4096], true).unwrap();
        eventually("it has failed", || job(dir, "receive-named")["state"] == "failed");
        assert!(job(dir, "receive-named")["error"].to_string().contains("is complete and has its name"));
        assert!(served.terminate().success());
        assert_eq!(names(dir, "there"), [".disk.raw.spile-received", "disk.raw"]);
        assert!(fs::read(dir.join("there/disk.raw")).unwrap() == bytes, "a disk that is whole was written to");
    }
    assert!(there.terminate().success());
}

/// The answer to the first order to name the copy was lost, and a server there has it since.
#[test]
fn a_copy_that_is_used_where_it_has_come_can_be_named_again() {
    let dir = world("receive-again");
    let dir = dir.path();
    let there = receive(dir);
    let id = "a7".repeat(16);
    let order = |order: &str| Client::connect(&there.export(&format!(".spile-receive/{order}/disk.raw"))).map(drop);
    order(&format!("begin/{id}/{}", 4 * MIB)).unwrap();
    order(&format!("finish/{id}")).unwrap();
    let used = serve(dir, &["there/disk.raw"]);
    let client = Client::connect(&used.uri()).unwrap();
    client.write(0, &[6; 4096], true).unwrap();
    order(&format!("finish/{id}")).unwrap();
    assert!(order(&format!("drop/{id}")).is_err() && order(&format!("ask/{id}")).is_err());
    client.write(4096, &[7; 4096], true).unwrap();
    assert_eq!(names(dir, "there"), [".disk.raw.spile-received", "disk.raw"]);
    drop(client);
    assert!(used.terminate().success() && there.terminate().success());
    let held = fs::read(dir.join("there/disk.raw")).unwrap();
    assert!(held[..4096] == [6; 4096] && held[4096..8192] == [7; 4096]);
}

#[test]
fn a_copy_that_is_to_be_left_gets_its_name_only_when_the_other_host_says_so() {
    let dir = world("receive-copy");
    let dir = dir.path();
    let mut there = receive(dir);
    let served = serve(dir, &["old/receive-copy.vhd"]);
    let begun = json(dir, &["move", "receive-copy", "--to", &to(dir, "disk.vhd"), "--mirror-only"]);
    eventually("it is in step", || job(dir, "receive-copy")["motion"]["phase"] == "in step");
    Client::connect(&served.uri()).unwrap().write(9 * MIB as u64, &[5; 64 << 10], true).unwrap();
    there.kill();
    ok(dir, &["job", begun["id"].as_str().unwrap(), "finish"]);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(job(dir, "receive-copy")["state"], "running");
    assert_eq!(names(dir, "there"), [".disk.vhd.spile-received", ".disk.vhd.spile-receiving"]);
    there = receive(dir);
    eventually("it is done", || job(dir, "receive-copy")["state"] == "done");
    assert_eq!(names(dir, "there"), [".disk.vhd.spile-received", "disk.vhd"]);
    assert!(served.terminate().success());
    same(dir, "old/receive-copy.vhd", "there/disk.vhd");
    assert!(there.terminate().success());
}

#[test]
fn a_move_that_is_cancelled_leaves_nothing_and_what_a_dead_host_has_left_can_be_removed() {
    let dir = world("receive-left");
    let dir = dir.path();
    let there = receive(dir);
    let served = serve(dir, &["old/receive-left.vhd"]);
    let begun = json(dir, &["move", "receive-left", "--to", &to(dir, "disk.vhd"), "--rate", "1M", "--background"]);
    let said = fails(dir, 1, &["receive", "there", "--remove", "disk.vhd"]);
    assert!(said.contains("in use") || said.contains("lock"), "{said}");
    ok(dir, &["job", begun["id"].as_str().unwrap(), "cancel"]);
    eventually("it is cancelled", || job(dir, "receive-left")["state"] == "cancelled");
    assert!(names(dir, "there").is_empty(), "{:?}", names(dir, "there"));
    json(dir, &["move", "receive-left", "--to", &to(dir, "disk.vhd"), "--rate", "1M", "--background"]);
    served.kill();
    // The connection's end is noticed, and the half closed.
    let mut removes = spile();
    removes.args(["receive", "there", "--remove", "disk.vhd"]).current_dir(dir);
    eventually("the half is let go", || removes.output().unwrap().status.success());
    assert!(names(dir, "there").is_empty(), "{:?}", names(dir, "there"));
    assert!(there.terminate().success());
}

/// The process of the old place has died after the disk had lost its old name, and before the other host was told.
#[test]
fn a_host_that_was_not_told_of_the_hand_over_is_told_by_whoever_opens_the_old_path() {
    let dir = world("receive-late");
    let dir = dir.path();
    let there = receive(dir);
    let served = serve(dir, &["old/receive-late.vhd"]);
    json(dir, &["move", "receive-late", "--to", &to(dir, "disk.vhd"), "--rate", "1M", "--background"]);
    drop(served);
    let note = fs::read_to_string(dir.join("old/.receive-late.vhd.spile-job")).unwrap();
    let id = note.lines().find_map(|line| line.strip_prefix("move ")).unwrap();
    fs::rename(dir.join("old/receive-late.vhd"), dir.join("old/receive-late.moved.vhd")).unwrap();
    let finish = to(dir, &format!(".spile-receive/finish/{id}/disk.vhd"));
    let (uri, image) = (to(dir, "disk.vhd"), dir.join("old/receive-late.moved.vhd"));
    let text = format!("spile moved 1\nto {uri}\nimage {}\nfinish {finish}\nend\n", image.display());
    fs::write(dir.join("old/.receive-late.vhd.spile-moved"), text).unwrap();
    // Who only looks changes nothing.
    assert!(fails(dir, 1, &["info", "old/receive-late.vhd"]).contains("was moved to"));
    assert_eq!(names(dir, "there"), [".disk.vhd.spile-received", ".disk.vhd.spile-receiving"]);
    let said = fails(dir, 1, &["serve", "old/receive-late.vhd", "--nbd", "unix:x", "--control", "none"]);
    assert!(said.contains("was moved to"), "{said}");
    assert_eq!(names(dir, "there"), [".disk.vhd.spile-received", "disk.vhd"]);
    assert!(!fs::read_to_string(dir.join("old/.receive-late.vhd.spile-moved")).unwrap().contains("finish"));
    assert!(there.terminate().success());
}

#[test]
fn nothing_is_overwritten_and_nothing_outside_of_the_folder_is_touched() {
    let dir = world("receive-no");
    let dir = dir.path();
    let there = receive(dir);
    fs::write(dir.join("there/own.raw"), [1; 4096]).unwrap();
    fs::write(dir.join("secret.raw"), [2; 4096]).unwrap();
    std::os::unix::fs::symlink("../secret.raw", dir.join("there/link.raw")).unwrap();
    std::os::unix::fs::symlink("../nowhere.raw", dir.join("there/dangling.raw")).unwrap();
    let before = names(dir, "there");
    let disk = "old/receive-no.vhd";
    for (name, why) in [
        ("own.raw", "there is a file of the new name"),
        ("link.raw", "there is a link of this name"),
        ("dangling.raw", "there is a link of this name"),
        ("..%2Fsecret.raw", "needs the name of one file"),
        ("../secret.raw", "needs the name of one file"),
        (".hidden.raw", "needs the name of one file"),
        ("-rf.raw", "needs the name of one file"),
        ("a%E2%80%AEwar.raw", "needs the name of one file"),
        ("disk", "cannot tell the format"),
    ] {
        let said = fails(dir, 1, &["move", disk, "--to", &to(dir, name)]);
        assert!(said.contains(why), "{name}: {said}");
        assert!(names(dir, "old").contains(&"receive-no.vhd".to_owned()));
    }
    assert_eq!(names(dir, "there"), before);
    assert!(!dir.join("nowhere.raw").exists());
    // What was not moved here is not there for anybody.
    for name in ["own.raw", "link.raw", ""] {
        fails(dir, 1, &["info", &to(dir, name)]);
    }
    ok(dir, &["move", disk, "--to", &to(dir, "disk.raw")]);
    // A file in the place of the disk is another one.
    fs::remove_file(dir.join("there/disk.raw")).unwrap();
    fs::copy(dir.join("secret.raw"), dir.join("there/disk.raw")).unwrap();
    let said = fails(dir, 1, &["info", &to(dir, "disk.raw")]);
    assert!(said.contains("no disk of this name"), "{said}");
    assert!(there.terminate().success());
    assert_eq!(fs::read(dir.join("secret.raw")).unwrap(), [2; 4096]);
    let said = fails(dir, 2, &["receive", "there", "--nbd", "tcp:127.0.0.1:0"]);
    assert!(said.contains("--tls-ca") && said.contains("--insecure"), "{said}");
}

#[test]
fn a_move_that_fails_leaves_nothing_on_the_other_host() {
    let dir = world("receive-failed");
    let dir = dir.path();
    let there = receive(dir);
    let mut command = faulty_sync(dir);
    command.args(["serve", "old/receive-failed.vhd", "--nbd", "unix:n", "--engine", "threads"]).current_dir(dir);
    let served = Served::spawn(&mut command, dir.join("n")).unwrap();
    let begun = json(dir, &["move", "receive-failed", "--to", &to(dir, "disk.vhd"), "--rate", "4M", "--background"]);
    eventually("something was copied", || job(dir, "receive-failed")["done_bytes"].as_u64() > Some(0));
    let client = Client::connect(&served.uri()).unwrap();
    // The sync that fails may be that of the job's note.
    eventually("a flush fails", || {
        fs::write(dir.join("fail-sync"), "").unwrap();
        client.write(0, &[5; 4096], true).is_err()
    });
    ok(dir, &["job", begun["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it has failed", || job(dir, "receive-failed")["state"] == "failed");
    assert_eq!(names(dir, "there"), Vec::<String>::new(), "the name is blocked");
    ok(dir, &["accept-loss", "receive-failed"]);
    drop(client);
    served.terminate();
    assert!(there.terminate().success());
}

/// From now on no disk called `name` gets its name there: the folder is in the way of what is removed first.
fn block_naming(dir: &Path, name: &str) {
    fs::create_dir(dir.join(format!("there/.{name}.spile-gone"))).unwrap();
}

fn unblock_naming(dir: &Path, name: &str) {
    fs::remove_dir(dir.join(format!("there/.{name}.spile-gone"))).unwrap();
}

fn state_there(dir: &Path) -> Value {
    json(dir, &["receive", "there", "--list"])["disks"][0]["state"].clone()
}

/// Between the hand-over and its name an image that was taken in is the disk, and only the other host knows.
#[test]
fn what_may_be_the_disk_is_not_removed_as_a_half_that_was_given_up_and_has_its_name_kept() {
    let dir = world("receive-may-be");
    let dir = dir.path();
    let there = receive(dir);
    block_naming(dir, "disk.vhd");
    let mut served = serve(dir, &["old/receive-may-be.vhd"]);
    json(dir, &["move", "receive-may-be", "--to", &to(dir, "disk.vhd"), "--background"]);
    eventually("it is to be named", || job(dir, "receive-may-be")["motion"]["phase"] == "naming");
    Client::connect(&served.uri()).unwrap().write(0, &[6; 4096], true).unwrap();
    assert_eq!(state_there(dir), "handing-over");
    // Nobody takes what keeps the name for a disk, nor the name.
    assert_eq!(fs::metadata(dir.join("there/disk.vhd")).unwrap().len(), 0);
    fails(dir, 1, &["create", "there/disk.vhd", "--size", "64M"]);
    served.signal(nix::sys::signal::Signal::SIGTERM);
    let mut said = String::new();
    std::io::Read::read_to_string(served.child.stderr.as_mut().unwrap(), &mut said).unwrap();
    assert!(said.contains("start a server with the old path first"), "{said}");
    assert!(served.child.wait().unwrap().success());
    let said = fails(dir, 1, &["serve", &to(dir, "disk.vhd"), "--nbd", "unix:x", "--control", "none"]);
    assert!(said.contains("handed over here") && said.contains("the old path"), "{said}");
    let said = fails(dir, 1, &["receive", "there", "--remove", "disk.vhd"]);
    assert!(said.contains("may be the disk") && said.contains("--force"), "{said}");
    assert_eq!(state_there(dir), "handing-over");
    unblock_naming(dir, "disk.vhd");
    let said = fails(dir, 1, &["serve", "old/receive-may-be.vhd", "--nbd", "unix:x", "--control", "none"]);
    assert!(said.contains("was moved to"), "{said}");
    assert_eq!(state_there(dir), "whole");
    let again = serve(dir, &[&to(dir, "disk.vhd")]);
    let mut read = [0; 4096];
    Client::connect(&again.uri()).unwrap().read(0, &mut read).unwrap();
    assert_eq!(read, [6; 4096]);
    assert!(again.terminate().success() && there.terminate().success());
}

#[test]
fn a_hand_over_that_did_not_come_leaves_half_a_copy_again() {
    let dir = world("receive-not-yet");
    let dir = dir.path();
    let there = receive(dir);
    let id = "a7".repeat(16);
    let order =
        |order: &str| Client::connect(&there.export(&format!(".spile-receive/{order}/{id}/disk.raw"))).map(drop);
    let begin = || Client::connect(&there.export(&format!(".spile-receive/begin/{id}/{}/disk.raw", 4 * MIB))).map(drop);
    let half = [".disk.raw.spile-received", ".disk.raw.spile-receiving"];
    let handing_over = [&half[..], &["disk.raw"]].concat();
    begin().unwrap();
    order("hand-over").unwrap();
    order("hand-over").unwrap();
    assert_eq!(names(dir, "there"), handing_over);
    // The old place has the disk still: a process that was started anew goes on with the copy.
    order("ask").unwrap();
    assert_eq!((state_there(dir), names(dir, "there")), ("half".into(), half.map(str::to_owned).to_vec()));
    // What has got the name meanwhile is not touched.
    order("hand-over").unwrap();
    fs::write(dir.join("there/disk.raw"), [1; 512]).unwrap();
    assert!(order("finish").is_err());
    order("ask").unwrap();
    assert!(order("hand-over").is_err(), "the name is taken");
    assert_eq!(fs::read(dir.join("there/disk.raw")).unwrap(), [1; 512]);
    fs::remove_file(dir.join("there/disk.raw")).unwrap();
    order("hand-over").unwrap();
    ok(dir, &["receive", "there", "--remove", "disk.raw", "--force"]);
    assert!(names(dir, "there").is_empty(), "{:?}", names(dir, "there"));
    // A note of another version is told of.
    fs::write(dir.join("there/.new.raw.spile-received"), "spile received 9\nwhatever\nend\n").unwrap();
    let said = fails(dir, 1, &["receive", "there", "--list"]);
    assert!(said.contains("another version"), "{said}");
    assert!(there.terminate().success());
}

#[test]
fn a_copy_that_is_to_be_named_is_not_copied_to_any_more_and_a_cancel_asks_the_other_host() {
    let (dir, bytes) = full("receive-naming");
    let dir = dir.path();
    let there = receive(dir);
    let mut served = serve(dir, &["old/receive-naming.raw"]);
    let copy = |name: &str| {
        let begun = json(dir, &["move", "receive-naming", "--to", &to(dir, name), "--mirror-only"]);
        eventually("it is in step", || job(dir, "receive-naming")["motion"]["phase"] == "in step");
        block_naming(dir, name);
        ok(dir, &["job", begun["id"].as_str().unwrap(), "finish"]);
        eventually("it is to be named", || job(dir, "receive-naming")["motion"]["phase"] == "naming");
        begun["id"].as_str().unwrap().to_owned()
    };
    let cancelled = |id: &str, state: &str| {
        ok(dir, &["job", id, "cancel"]);
        eventually("it is over", || job(dir, "receive-naming")["state"] != "running");
        assert_eq!(job(dir, "receive-naming")["state"], state);
    };
    // The other host answers: it has no name, and goes.
    cancelled(&copy("a.raw"), "cancelled");
    assert_eq!(names(dir, "there"), [".a.raw.spile-gone"]);
    // The next process only has it named.
    copy("b.raw");
    served.kill();
    served = serve(dir, &["old/receive-naming.raw"]);
    Client::connect(&served.uri()).unwrap().write(9 * MIB as u64, &[5; 4096], true).unwrap();
    eventually("it is to be named", || job(dir, "receive-naming")["motion"]["phase"] == "naming");
    unblock_naming(dir, "b.raw");
    eventually("it is done", || job(dir, "receive-naming")["state"] == "done");
    assert!(fs::read(dir.join("there/b.raw")).unwrap() == bytes, "it was written to after its point in time");
    // Nobody answers: nobody knows.
    let id = copy("c.raw");
    there.kill();
    cancelled(&id, "failed");
    assert!(job(dir, "receive-naming")["error"].to_string().contains("it is not known whether"));
    assert!(served.terminate().success());
}

#[test]
fn an_export_that_has_come_in_the_place_of_spile_receive_is_not_overwritten() {
    let (dir, _) = full("receive-replaced");
    let dir = dir.path();
    let there = receive(dir);
    let served = serve(dir, &["old/receive-replaced.raw"]);
    json(dir, &["move", "receive-replaced", "--to", &to(dir, "disk.raw"), "--rate", "2M", "--background"]);
    eventually("it is taken in", || !names(dir, "there").is_empty());
    served.kill();
    assert!(there.terminate().success());
    ok(dir, &["create", "used.raw", "--size", "48M"]);
    let mut command = spile();
    command.args(["serve", "used.raw,name=disk.raw", "--nbd", "unix:there.nbd", "--control", "none"]).current_dir(dir);
    let other = Served::spawn(&mut command, dir.join("there.nbd")).unwrap();
    let served = serve(dir, &["old/receive-replaced.raw"]);
    eventually("it has failed", || job(dir, "receive-replaced")["state"] == "failed");
    let error = job(dir, "receive-replaced")["error"].to_string();
    assert!(error.contains("there is another server now"), "{error}");
    assert!(served.terminate().success() && other.terminate().success());
    assert!(
        fs::read(dir.join("used.raw")).unwrap().iter().all(|byte| *byte == 0),
        "a disk that is used is overwritten"
    );
}

#[test]
fn another_server_in_the_place_of_a_host_that_is_away_is_not_overwritten_by_a_copy_that_goes_on() {
    let test = "another_server_in_the_place_of_a_host_that_is_away_is_not_overwritten_by_a_copy_that_goes_on";
    if !have("nbdkit", test) {
        return;
    }
    let (dir, bytes) = full("receive-away");
    let dir = dir.path();
    let there = receive(dir);
    let served = serve(dir, &["old/receive-away.raw"]);
    let begun = json(dir, &["move", "receive-away", "--to", &to(dir, "disk.raw"), "--rate", "4M", "--background"]);
    eventually("it has begun", || job(dir, "receive-away")["done_bytes"].as_u64() > Some(0));
    there.kill();
    // It takes any name for its export, which has the disk's size.
    fs::write(dir.join("any.raw"), vec![0x77; 48 * MIB]).unwrap();
    fs::remove_file(dir.join("there.nbd")).unwrap();
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-U", "there.nbd", "file", "any.raw"]).current_dir(dir);
    let nbdkit = Served { child: command.spawn().unwrap(), socket: dir.join("there.nbd") };
    eventually("the copy has looked there", || {
        let job = job(dir, "receive-away");
        let is_seen = job["motion"]["trouble"].to_string().contains("no `spile receive`");
        is_seen || fs::read(dir.join("any.raw")).unwrap().iter().any(|byte| *byte != 0x77)
    });
    assert!(fs::read(dir.join("any.raw")).unwrap().iter().all(|byte| *byte == 0x77), "it was written to");
    nbdkit.kill();
    let there = receive(dir);
    ok(dir, &["job", begun["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it is done", || job(dir, "receive-away")["state"] == "done");
    assert!(served.terminate().success() && there.terminate().success());
    assert!(fs::read(dir.join("there/disk.raw")).unwrap() == bytes, "the disk holds something else there");
}

#[test]
fn one_server_at_a_time_has_a_disk_there_and_who_only_reads_keeps_nobody_out() {
    let dir = world("receive-alone");
    let dir = dir.path();
    let mut there = receive(dir);
    let first = serve(dir, &["old/receive-alone.vhd"]);
    ok(dir, &["move", "receive-alone", "--to", &to(dir, "disk.vhd"), "--wait"]);
    let uri = to(dir, "disk.vhd");
    let second = ["serve", &uri, "--nbd", "unix:x", "--control", "none"];
    let said = fails(dir, 1, &second);
    assert!(said.contains("has this disk") && said.contains(&format!("process {}", first.child.id())), "{said}");
    // Clients that do not say who they are may look.
    ok(dir, &["info", &uri]);
    let qemu = |args: &[&str]| std::process::Command::new("qemu-io").args(args).arg(&uri).output().unwrap();
    let read = qemu(&["-r", "-f", "raw", "-c", "read 0 4k"]);
    assert!(read.status.success(), "{read:?}");
    let write = qemu(&["-f", "raw", "-c", "write 0 4k"]);
    assert!(!write.status.success(), "{write:?}");
    // The first one comes again at once.
    let client = Client::connect(&first.uri()).unwrap();
    client.write(0, &[6; 4096], true).unwrap();
    there.kill();
    there = receive(dir);
    client.write(4096, &[7; 4096], true).unwrap();
    fails(dir, 1, &second);
    drop(client);
    // Once it has ended, the next one gets in; while nobody has it, so does a client without a name.
    first.kill();
    let next = serve(dir, &[&uri]);
    let mut read = [0; 8192];
    Client::connect(&next.uri()).unwrap().read(0, &mut read).unwrap();
    assert!(read[..4096] == [6; 4096] && read[4096..] == [7; 4096]);
    assert!(next.terminate().success());
    eventually("a client without a name writes", || qemu(&["-f", "raw", "-c", "write 0 4k"]).status.success());
    let said = fails(dir, 1, &["receive", "there", "--nbd", "unix:r2"]);
    assert!(said.contains("another process takes disks in"), "{said}");
    assert!(there.terminate().success());
}

/// A signal comes at a moment near the end of a move: what waits to be heard of does not hold the connection to the new place.
#[test]
fn a_server_that_is_told_to_end_while_a_move_ends_does_end() {
    for later_ms in [0, 30, 60, 90] {
        let dir = world("receive-end");
        let dir = dir.path();
        let there = receive(dir);
        let served = serve(dir, &["old/receive-end.vhd"]);
        json(dir, &["move", "receive-end", "--to", &to(dir, "disk.vhd"), "--rate", "16M", "--background"]);
        let id = job(dir, "receive-end")["id"].as_str().unwrap().to_owned();
        ok(dir, &["job", &id, "rate", "none"]);
        std::thread::sleep(Duration::from_millis(later_ms));
        assert!(served.terminate().success());
        if !dir.join("there/disk.vhd").exists() {
            let served = serve(dir, &["old/receive-end.vhd"]);
            eventually("the move is done", || dir.join("there/disk.vhd").exists());
            assert!(served.terminate().success());
        }
        assert!(there.terminate().success());
    }
}

#[test]
fn storage_that_hangs_for_one_disk_keeps_no_other_one_waiting_nor_the_end() {
    use std::os::unix::fs::MetadataExt;
    let dir = world("receive-hangs");
    let dir = dir.path();
    let mut command = faulty_sync(dir);
    command
        .args(["receive", "there", "--nbd", "unix:there.nbd", "--engine", "threads"])
        .current_dir(dir)
        .stdout(Stdio::null());
    let mut there = Served { child: command.spawn().unwrap(), socket: dir.join("there.nbd") };
    eventually("it answers", || UnixStream::connect(&there.socket).is_ok());
    let export = |order: String| there.export(&format!(".spile-receive/{order}.raw"));
    let id = "a7".repeat(16);
    let link = |name: &str| {
        Client::connect(&export(format!("begin/{id}/{}/{name}", 4 * MIB))).unwrap();
        Client::connect(&export(format!("go-on/{id}/{}/{name}", "3c".repeat(16)))).unwrap()
    };
    let hung = link("hung");
    hung.write(0, &[1; 4096], false).unwrap();
    let inode = fs::metadata(dir.join("there/.hung.raw.spile-receiving")).unwrap().ino();
    fs::write(dir.join("hang-sync"), inode.to_string()).unwrap();
    let finish = export(format!("finish/{id}/hung"));
    let finishing = std::thread::spawn(move || Client::connect(&finish).is_err());
    eventually("it hangs", || dir.join("hangs").exists());
    // More orders about it than there could wait.
    let more: Vec<_> = (0..20).map(|_| export(format!("finish/{id}/hung"))).collect();
    let more = more.into_iter().map(|uri| std::thread::spawn(move || Client::connect(&uri).is_err()));
    let more: Vec<_> = more.collect();
    let other = link("other");
    other.write(0, &[2; 4096], true).unwrap();
    Client::connect(&export(format!("finish/{id}/other"))).unwrap();
    assert!(dir.join("there/other.raw").exists());
    assert!(more.into_iter().all(|thread| thread.join().unwrap()));
    drop((other, hung));
    there.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(there.child.wait().unwrap().code(), Some(1));
    assert!(finishing.join().unwrap());
}

/// The copy was told to get its name, and nobody knows whether it has: the guest goes on here only when the other host says that it has not.
#[test]
fn a_guest_goes_on_here_only_when_the_other_host_does_not_have_the_disk() {
    let dir = world("receive-doubt");
    let dir = dir.path();
    let there = receive(dir);
    let served = serve(dir, &["old/receive-doubt.vhd", "--vhost-user", "v"]);
    let begun = json(dir, &["move", "receive-doubt", "--to", &to(dir, "disk.vhd"), "--mirror-only"]);
    eventually("it is in step", || job(dir, "receive-doubt")["motion"]["phase"] == "in step");
    block_naming(dir, "disk.vhd");
    let id = begun["id"].as_str().unwrap();
    let said = fails(dir, 1, &["job", id, "hand-over"]);
    assert!(said.contains("it is not known whether the other host has the disk"), "{said}");
    let said = fails(dir, 1, &["resume", "receive-doubt"]);
    assert!(
        said.contains("the other host may have the disk") && said.contains(&format!("spile job {id} cancel")),
        "{said}"
    );
    ok(dir, &["job", id, "cancel"]);
    eventually("it is cancelled", || job(dir, "receive-doubt")["state"] == "cancelled");
    assert_eq!(names(dir, "there"), [".disk.vhd.spile-gone"]);
    ok(dir, &["resume", "receive-doubt"]);
    Client::connect(&served.uri()).unwrap().write(0, &[6; 4096], true).unwrap();
    assert!(served.terminate().success() && there.terminate().success());
}
