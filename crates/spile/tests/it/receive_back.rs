//! The way back of a disk that went to another host: only what has changed since goes, onto the old image, and only when that is as it was left.

use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::common::chains::{chain, family, file};
use crate::common::host::bytes_of;
use crate::common::moves::{full, job, let_go, receive_in, to_host};
use crate::common::nbd::Client;
use crate::common::{Running, Served, eventually, fails, have, json, ok, spile};
use spile_core::ErrorKind;

const MIB: usize = 1 << 20;
const BLOCK: u64 = 64 << 10;

fn serve(dir: &Path, disk: &str) -> Served {
    let mut command = spile();
    command.args(["serve", disk, "--nbd", "unix:n"]).current_dir(dir);
    Served::spawn(&mut command, dir.join("n")).unwrap_or_else(|err| panic!("serve {disk}: {err}"))
}

fn to(dir: &Path, folder: &str, name: &str) -> String {
    to_host(dir, folder, &format!("{name}.raw"))
}

/// Both sides of a disk that goes to and fro, and what it holds.
struct World {
    dir: tempfile::TempDir,
    name: &'static str,
    bytes: Vec<u8>,
    value: u8,
}

impl World {
    /// The disk lies in `old`, full, and both hosts take disks in.
    fn new(name: &'static str) -> (Self, Served, Served) {
        let (dir, bytes) = full(name, "there");
        let (old, there) = (receive_in(dir.path(), "old"), receive_in(dir.path(), "there"));
        (Self { dir, name, bytes, value: 200 }, old, there)
    }

    fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn disk(&self, folder: &str) -> String {
        format!("{folder}/{}.raw", self.name)
    }

    fn write(&mut self, served: &Served, at: usize) {
        self.value = self.value % 250 + 1;
        let (client, page) = (Client::connect(&served.uri()).unwrap(), [self.value; 4096]);
        client.write(at as u64, &page, self.value.is_multiple_of(2)).unwrap();
        self.bytes[at..at + 4096].fill(self.value);
    }

    /// Moves the disk, which `served` has, to `folder` of the other host, and writes once it is there: how many bytes were copied.
    fn go(&mut self, served: Served, folder: &str) -> u64 {
        let to = to(self.dir(), folder, self.name);
        let moved = json(self.dir(), &["move", self.name, "--to", &to, "--wait"]);
        assert!(moved["state"] == "done" && moved["motion"]["trouble"].is_null(), "{moved}");
        self.write(&served, 41 * MIB);
        assert!(served.terminate().success());
        let_go(self.dir(), &self.disk(folder));
        moved["done_bytes"].as_u64().unwrap()
    }

    fn assert_is_in(&self, folder: &str) {
        assert!(fs::read(self.dir().join(self.disk(folder))).unwrap() == self.bytes, "what was acknowledged is lost");
    }
}

#[test]
fn each_way_sends_only_what_has_changed_since() {
    let (mut world, old, there) = World::new("back-fro");
    let mut served = serve(world.dir(), &world.disk("old"));
    ok(world.dir(), &["checkpoint", "back-fro", "then"]);
    world.write(&served, MIB);
    assert!(world.go(served, "there") >= 48 << 20);
    for (from, folder) in [("there", "old"), ("old", "there"), ("there", "old")] {
        served = serve(world.dir(), &world.disk(from));
        world.write(&served, 20 * MIB);
        // What a killed server has noted counts.
        served.kill();
        served = serve(world.dir(), &world.disk(from));
        world.write(&served, 30 * MIB);
        let copied = world.go(served, folder);
        println!("to {folder}: {copied} bytes");
        assert!(copied <= 5 * BLOCK, "{copied} bytes were copied to {folder}");
        world.assert_is_in(folder);
        assert!(!world.dir().join(format!("{folder}/back-fro.moved.raw")).exists());
    }
    let told = json(world.dir(), &["changed", &world.disk("old"), "--since", "then"]);
    assert_eq!(told["changed_bytes"], 4 * BLOCK, "{told}");
    assert!(told["warning"].is_null() && old.terminate().success() && there.terminate().success());
}

#[test]
fn a_way_back_goes_on_over_kills_of_either_side() {
    let (mut world, mut old, there) = World::new("back-kill");
    let served = serve(world.dir(), &world.disk("old"));
    world.go(served, "there");
    let mut served = serve(world.dir(), &world.disk("there"));
    for number in 0..32 {
        world.write(&served, number * MIB);
    }
    let uri = to(world.dir(), "old", world.name);
    let begun = json(world.dir(), &["move", "back-kill", "--to", &uri, "--rate", "256K", "--background"]);
    eventually("it has begun", || !world.dir().join("old/back-kill.moved.raw").exists());
    old.kill();
    old = receive_in(world.dir(), "old");
    eventually("it goes on", || job(world.dir(), "back-kill")["motion"]["failing_for_s"].is_null());
    assert_eq!(job(world.dir(), "back-kill")["id"], begun["id"]);
    served.kill();
    served = serve(world.dir(), &world.disk("there"));
    world.write(&served, 33 * MIB);
    ok(world.dir(), &["job", job(world.dir(), "back-kill")["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it is done", || job(world.dir(), "back-kill")["state"] == "done");
    let job = job(world.dir(), "back-kill");
    assert!(job["done_bytes"].as_u64() <= Some(36 * BLOCK), "{job}");
    assert!(served.terminate().success());
    let_go(world.dir(), &world.disk("old"));
    world.assert_is_in("old");
    assert!(old.terminate().success() && there.terminate().success());
}

#[test]
fn an_old_image_that_is_not_as_it_was_left_stays_and_all_is_copied() {
    let (mut world, old, there) = World::new("back-other");
    let mut served = serve(world.dir(), &world.disk("old"));
    world.go(served, "there");
    let image = world.dir().join("old/back-other.moved.raw");
    let left = fs::read(&image).unwrap();
    let touch = |content: &[u8]| fs::write(&image, content).unwrap();
    let mut other = left.clone();
    other[9 * MIB..10 * MIB].fill(0);
    touch(&other);
    served = serve(world.dir(), &world.disk("there"));
    assert!(world.go(served, "old") >= 48 << 20);
    world.assert_is_in("old");
    assert!(fs::read(&image).unwrap() == other, "an image of somebody was written to");
    fs::remove_file(&image).unwrap();
    // And there, where what has changed is not known any more.
    fs::remove_file(world.dir().join("old/.back-other.raw.spile-changes")).unwrap();
    served = serve(world.dir(), &world.disk("old"));
    assert!(world.go(served, "there") >= 48 << 20);
    world.assert_is_in("there");
    assert!(old.terminate().success() && there.terminate().success());
}

#[test]
fn an_old_image_that_has_a_child_by_now_stays() {
    let (world, old, there) = World::new("back-child");
    let dir = world.dir();
    ok(dir, &["convert", "old/back-child.raw", "old/disk.vhd"]);
    let uri = |folder: &str| to_host(dir, folder, "disk.vhd");
    ok(dir, &["move", "old/disk.vhd", "--to", &uri("there")]);
    let_go(dir, "there/disk.vhd");
    ok(dir, &["create", "old/child.vhd", "--parent", "old/disk.moved.vhd"]);
    let moved = json(dir, &["move", "there/disk.vhd", "--to", &uri("old")]);
    assert!(moved["done_bytes"].as_u64() >= Some(48 << 20), "{moved}");
    ok(dir, &["compare", "old/child.vhd", "old/back-child.raw"]);
    assert!(dir.join("old/disk.moved.vhd").exists());
    // And on one host.
    fs::create_dir(dir.join("away")).unwrap();
    ok(dir, &["convert", "old/back-child.raw", "old/near.vhd"]);
    ok(dir, &["move", "old/near.vhd", "--to", "away"]);
    ok(dir, &["create", "old/other.vhd", "--parent", "old/near.moved.vhd"]);
    let moved = json(dir, &["move", "away/near.vhd", "--to", "old"]);
    assert!(moved["done_bytes"].as_u64() >= Some(48 << 20), "{moved}");
    ok(dir, &["compare", "old/other.vhd", "old/back-child.raw"]);
    assert!(old.terminate().success() && there.terminate().success());
}

/// When the hidden mark of the disk's move was begun, in seconds since 1970, as the file of changed blocks says it.
fn mark_began(dir: &Path, name: &str) -> u64 {
    let file = fs::read(dir.join(format!("old/.{name}.raw.spile-changes"))).unwrap();
    let number = |at: usize, len: usize| file[at..at + len].iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte));
    let intervals = (0..number(84, 4) as usize).map(|interval| 256 + 128 * interval);
    let mark = intervals.into_iter().find(|at| file[at + 40..at + 40 + file[at + 29] as usize] == *b"\x01move");
    number(mark.expect("the move has its mark") + 16, 8)
}

#[test]
fn a_copy_that_was_in_step_for_long_sends_only_what_has_changed_lately() {
    let (mut world, old, there) = World::new("back-step");
    let mut served = serve(world.dir(), &world.disk("old"));
    let uri = to(world.dir(), "there", world.name);
    json(world.dir(), &["move", "back-step", "--to", &uri, "--mirror-only"]);
    eventually("it is in step", || job(world.dir(), "back-step")["motion"]["phase"] == "in step");
    let begun = mark_began(world.dir(), "back-step");
    for block in 0..40 * 16 {
        world.write(&served, block * BLOCK as usize);
    }
    let written = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    eventually("the mark moves forward", || {
        world.write(&served, 0);
        mark_began(world.dir(), "back-step") > written.max(begun)
    });
    eventually("it is in step", || job(world.dir(), "back-step")["motion"]["lag_bytes"] == 0);
    served.kill();
    served = serve(world.dir(), &world.disk("old"));
    world.write(&served, 47 * MIB);
    eventually("it goes on", || job(world.dir(), "back-step")["motion"]["phase"] == "in step");
    let resumed = job(world.dir(), "back-step");
    println!("{resumed}");
    assert!(resumed["done_bytes"].as_u64() <= Some(8 << 20), "{resumed}");
    ok(world.dir(), &["job", resumed["id"].as_str().unwrap(), "finish"]);
    eventually("it is done", || job(world.dir(), "back-step")["state"] == "done");
    assert!(served.terminate().success() && old.terminate().success() && there.terminate().success());
    world.assert_is_in("there");
}

/// Gives an order by hand: true when the host of `folder` has obeyed it.
fn is_obeyed(dir: &Path, folder: &str, order: &str) -> bool {
    let uri = format!("nbd+unix:///.spile-receive/{order}?socket={}", dir.join(format!("{folder}.nbd")).display());
    let mut said = [0; 22];
    match Client::connect(&uri.parse().unwrap()) {
        Ok(answer) => answer.read(0, &mut said).unwrap(),
        Err(error) => {
            println!("{order}: {error}");
            assert_ne!(error.kind(), ErrorKind::NotFound, "a refusal is no sign of another server: {error}");
        }
    }
    said == *b"spile receive has done"
}

/// The move by which a disk has left, as this note says it.
fn left_by(dir: &Path, note: &str) -> String {
    let note = fs::read_to_string(dir.join(note)).unwrap();
    note.lines().next().unwrap().strip_prefix("move ").unwrap().to_owned()
}

#[test]
fn an_old_image_is_taken_by_its_own_move_only_and_only_as_it_was_left() {
    let (mut world, old, there) = World::new("back-hand");
    let served = serve(world.dir(), &world.disk("old"));
    world.go(served, "there");
    let dir = world.dir();
    let [image, half, aside] =
        ["back-hand.moved.raw", ".back-hand.raw.spile-receiving", "aside"].map(|name| dir.join("old").join(name));
    let of = &left_by(dir, "old/.back-hand.raw.spile-left");
    let [id, other] = ["a1".repeat(16), "b2".repeat(16)];
    let back = |id: &str, of: &str, size: usize| is_obeyed(dir, "old", &format!("back/{id}/{of}/{size}/back-hand.raw"));
    assert!(!back(&id, &other, 48 * MIB) && !back(&id, of, 49 * MIB));
    fs::hard_link(&image, &aside).unwrap();
    assert!(!back(&id, of, 48 * MIB), "what has another name, too, is not to be written to");
    fs::remove_file(&aside).unwrap();
    // A copy of the same bytes and times, and a link to the image itself.
    fs::rename(&image, &aside).unwrap();
    fs::copy(&aside, &image).unwrap();
    let written = aside.metadata().unwrap().modified().unwrap();
    fs::File::options().write(true).open(&image).unwrap().set_modified(written).unwrap();
    assert!(!back(&id, of, 48 * MIB));
    fs::remove_file(&image).unwrap();
    std::os::unix::fs::symlink(&aside, &image).unwrap();
    assert!(!back(&id, of, 48 * MIB) && aside.exists());
    fs::rename(&aside, &image).unwrap();
    // Nobody would be told of a link that leads nowhere before the end of the move.
    std::os::unix::fs::symlink("nowhere", dir.join(world.disk("old"))).unwrap();
    assert!(!back(&id, of, 48 * MIB));
    fs::remove_file(dir.join(world.disk("old"))).unwrap();
    assert!(image.exists() && !half.exists());
    // The answer is not heard, and the host is killed.
    assert!(back(&id, of, 48 * MIB) && !image.exists() && half.exists());
    assert!(back(&id, of, 48 * MIB) && back(&id, of, 48 * MIB));
    old.kill();
    let old = receive_in(dir, "old");
    // The kernel may still have connected to the one that was killed.
    eventually("it is obeyed again", || back(&id, of, 48 * MIB));
    // The next move back finds it, as long as nobody has written to it, and the one before does not any more.
    assert!(back(&other, of, 48 * MIB) && !is_obeyed(dir, "old", &format!("hand-over/{id}/back-hand.raw")));
    assert!(back(&id, of, 48 * MIB) && !is_obeyed(dir, "old", &format!("hand-over/{other}/back-hand.raw")));
    // What was taken is not as it was left any more once somebody has written to it.
    let bytes = fs::read(&half).unwrap();
    fs::write(&half, &bytes).unwrap();
    assert!(!back(&id, of, 48 * MIB) && !back(&other, of, 48 * MIB));
    assert!(is_obeyed(dir, "old", &format!("begin/{id}/{}/back-hand.raw", 48 * MIB)) && half.exists());
    assert!(!is_obeyed(dir, "old", &format!("drop/{id}/back-hand.raw")) && !half.exists());
    assert!(!back(&id, of, 48 * MIB));
    assert!(old.terminate().success() && there.terminate().success());
}

#[test]
fn a_disk_that_keeps_its_chain_comes_back_by_what_has_changed() {
    let (dir, mut bytes) = family("there", "back-chain.vhd", 10);
    let dir = dir.path();
    let (old, there) = (receive_in(dir, "old"), receive_in(dir, "there"));
    let images = ["back-chain.vhd", "mid.vhd", "base.raw"];
    let seen = |folder: &str| images.map(|name| file(dir, &format!("{folder}/{name}")).0);
    let before = seen("old");
    let order = |folder: &str, words: &[&str]| {
        let to = to_host(dir, folder, "back-chain.vhd");
        json(dir, &[&["move", "back-chain", "--to", &to, "--chain", "keep"], words].concat())
    };
    let arrived = |folder: &str, bytes: &[u8]| {
        let_go(dir, &format!("{folder}/back-chain.vhd"));
        assert_eq!(chain(dir, &format!("{folder}/back-chain.vhd")), images);
        assert!(bytes_of(dir, &format!("{folder}/back-chain.vhd")) == bytes, "the bytes in {folder} are others");
    };
    let mut value = 99;
    for (from, folder) in [("old", "there"), ("there", "old"), ("old", "there")] {
        let served = serve(dir, &format!("{from}/back-chain.vhd"));
        value += 1;
        Client::connect(&served.uri()).unwrap().write(8 << 20, &[value; 4096], false).unwrap();
        bytes[8 * MIB..8 * MIB + 4096].fill(value);
        let moved = order(folder, &["--wait"]);
        assert!(moved["state"] == "done" && moved["motion"]["trouble"].is_null(), "{moved}");
        let copied = moved["done_bytes"].as_u64().unwrap();
        // The first one takes the parents along.
        assert_eq!(copied <= 2 * BLOCK, (from, value) != ("old", 100), "{copied} bytes were copied to {folder}");
        assert!(served.terminate().success());
        arrived(folder, &bytes);
    }
    // One that is killed on its way back goes on, and sends no parent either.
    let served = serve(dir, "there/back-chain.vhd");
    Client::connect(&served.uri()).unwrap().write(32 << 20, &vec![7; 4 * MIB], false).unwrap();
    bytes[32 * MIB..36 * MIB].fill(7);
    order("old", &["--rate", "1M", "--background"]);
    eventually("some of it is copied", || job(dir, "back-chain")["done_bytes"].as_u64() > Some(1 << 20));
    served.kill();
    let served = serve(dir, "there/back-chain.vhd");
    eventually("its job goes on", || job(dir, "back-chain")["state"] == "running");
    let id = job(dir, "back-chain")["id"].as_str().unwrap().to_owned();
    ok(dir, &["job", &id, "rate", "none"]);
    eventually("it is there", || job(dir, "back-chain")["state"] == "done");
    assert!(job(dir, "back-chain")["done_bytes"].as_u64() <= Some(4 * MIB as u64 + 2 * BLOCK));
    assert!(served.terminate().success());
    arrived("old", &bytes);
    assert_eq!(seen("old"), before, "an image was made anew");
    // Where the old host cannot use the old image, the parents would have to be sent, and their names are taken there.
    let served = serve(dir, "old/back-chain.vhd");
    assert_eq!(order("there", &["--wait"])["state"], "done");
    assert!(served.terminate().success());
    arrived("there", &bytes);
    let parent = fs::File::options().write(true).open(dir.join("old/mid.vhd")).unwrap();
    parent.set_modified(std::time::SystemTime::now()).unwrap();
    let to = to_host(dir, "old", "back-chain.vhd");
    let said = fails(dir, 1, &["move", "there/back-chain.vhd", "--to", &to, "--chain", "keep"]);
    assert!(said.contains("mid.vhd") && said.contains("not come here as a parent"), "{said}");
    assert!(dir.join("old/back-chain.moved.vhd").exists() && !dir.join("old/back-chain.vhd").exists());
    arrived("there", &bytes);
    assert!(old.terminate().success() && there.terminate().success());
}

#[test]
fn an_old_image_with_a_parent_is_taken_unless_that_was_written_to() {
    let (world, old, there) = World::new("back-parent");
    let dir = world.dir();
    ok(dir, &["convert", "old/back-parent.raw", "old/parent.vhd"]);
    ok(dir, &["create", "old/leaf.vhd", "--parent", "old/parent.vhd"]);
    let go = |from: &str, to_folder: &str| {
        let uri = to_host(dir, to_folder, "leaf.vhd");
        let moved = json(dir, &["move", &format!("{from}/leaf.vhd"), "--to", &uri]);
        let_go(dir, &format!("{to_folder}/leaf.vhd"));
        ok(dir, &["compare", &format!("{to_folder}/leaf.vhd"), "old/back-parent.raw"]);
        moved["done_bytes"].as_u64().unwrap()
    };
    assert!(go("old", "there") >= 48 << 20);
    assert!(go("there", "old") <= BLOCK);
    assert_eq!(json(dir, &["info", "old/leaf.vhd", "--chain"])["layers"].as_array().unwrap().len(), 2);
    go("old", "there");
    let parent = fs::File::options().write(true).open(dir.join("old/parent.vhd")).unwrap();
    parent.set_modified(std::time::SystemTime::now()).unwrap();
    assert!(go("there", "old") >= 48 << 20);
    fs::remove_file(dir.join("there/leaf.moved.vhd")).unwrap();
    fs::remove_file(dir.join("old/leaf.moved.vhd")).unwrap();
    // A half under its hidden name is a child, too.
    fs::remove_file(dir.join("old/leaf.vhd")).unwrap();
    ok(dir, &["create", "old/leaf.vhd", "--parent", "old/parent.vhd"]);
    ok(dir, &["delete", "old/parent.vhd"]);
    go("old", "there");
    let of = left_by(dir, "old/.leaf.vhd.spile-left");
    assert!(is_obeyed(dir, "old", &format!("back/{}/{of}/{}/leaf.vhd", "a1".repeat(16), 48 * MIB)));
    assert!(!dir.join("old/leaf.moved.vhd").exists());
    let said = fails(dir, 1, &["convert", "old/back-parent.raw", "--onto", "old/parent.vhd"]);
    assert!(said.contains("parent"), "{said}");
    let half = dir.join("old/.leaf.vhd.spile-receiving");
    let before = (fs::read(&half).unwrap(), fs::read(dir.join("old/parent.vhd")).unwrap());
    let found = &json(dir, &["gc", "old"])["found"];
    assert!(found[0]["state"] == "waits" && found[0]["reason"].to_string().contains("is being moved"), "{found}");
    ok(dir, &["delete", "old/parent.vhd", "--undo"]);
    let said = fails(dir, 1, &["delete", "old/parent.vhd"]);
    assert!(said.contains(".leaf.vhd.spile-receiving is a child of this image"), "{said}");
    // Another child is not merged into it, either.
    ok(dir, &["create", "old/other.vhd", "--parent", "old/parent.vhd"]);
    let said = fails(dir, 1, &["delete", "old/parent.vhd"]);
    assert!(said.contains("is a child of this image"), "{said}");
    assert!((fs::read(&half).unwrap(), fs::read(dir.join("old/parent.vhd")).unwrap()) == before);
    assert!(old.terminate().success() && there.terminate().success());
}

#[test]
fn a_server_that_takes_any_name_is_not_taken_for_the_old_host() {
    if !have("nbdkit", "a_server_that_takes_any_name_is_not_taken_for_the_old_host") {
        return;
    }
    let (mut world, old, there) = World::new("back-any");
    let served = serve(world.dir(), &world.disk("old"));
    ok(world.dir(), &["checkpoint", "back-any", "then"]);
    world.go(served, "there");
    assert!(old.terminate().success());
    let dir = world.dir();
    let nbdkit = any_name(dir);
    let moved = json(dir, &["move", &world.disk("there"), "--to", &to(dir, "old", world.name)]);
    assert!(moved["done_bytes"].as_u64() >= Some(48 << 20), "{moved}");
    assert!(fs::read(dir.join("any.raw")).unwrap() == world.bytes, "the disk holds something else there");
    assert!(!dir.join("there/.back-any.raw.spile-left").exists());
    nbdkit.kill();
    assert!(there.terminate().success());
}

/// A server of the file `any.raw` in the place of the host of `old`. It takes any name for that.
fn any_name(dir: &Path) -> Served {
    fs::write(dir.join("any.raw"), vec![0x77; 48 * MIB]).unwrap();
    let _ = fs::remove_file(dir.join("old.nbd"));
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-U", "old.nbd", "file", "any.raw"]).current_dir(dir);
    let nbdkit = Served { child: command.spawn().unwrap(), socket: dir.join("old.nbd") };
    eventually("it answers", || UnixStream::connect(&nbdkit.socket).is_ok());
    nbdkit
}

#[test]
fn another_server_in_the_place_of_the_old_host_is_not_overwritten_by_a_way_back_that_goes_on() {
    if !have("nbdkit", "another_server_in_the_place_of_the_old_host_is_not_overwritten_by_a_way_back_that_goes_on") {
        return;
    }
    let (mut world, old, there) = World::new("back-gone");
    let served = serve(world.dir(), &world.disk("old"));
    world.go(served, "there");
    let mut served = serve(world.dir(), &world.disk("there"));
    (0..32).for_each(|number| world.write(&served, number * MIB));
    let uri = to(world.dir(), "old", world.name);
    json(world.dir(), &["move", "back-gone", "--to", &uri, "--rate", "256K", "--background"]);
    eventually("it has begun", || !world.dir().join("old/back-gone.moved.raw").exists());
    served.kill();
    old.kill();
    let nbdkit = any_name(world.dir());
    served = serve(world.dir(), &world.disk("there"));
    eventually("the move has failed", || job(world.dir(), "back-gone")["state"] == "failed");
    assert!(fs::read(world.dir().join("any.raw")).unwrap().iter().all(|byte| *byte == 0x77), "it was written to");
    assert!(world.dir().join(world.disk("there")).exists());
    assert!(served.terminate().success() && there.terminate().success());
    nbdkit.kill();
}

#[test]
fn a_file_of_changes_that_is_said_to_be_whole_twice_stays() {
    let (world, old, there) = World::new("back-twice");
    let (dir, id) = (world.dir(), "a1".repeat(16));
    ok(dir, &["checkpoint", "old/back-twice.raw", "then"]);
    let file = fs::read(dir.join("old/.back-twice.raw.spile-changes")).unwrap();
    let order = |verb: &str| format!("{verb}/{id}/back-twice.raw");
    assert!(is_obeyed(dir, "there", &format!("begin/{id}/{}/back-twice.raw", 48 * MIB)));
    let marks = format!(".spile-receive/marks/{id}/{}/back-twice.raw", file.len());
    let uri = format!("nbd+unix:///{marks}?socket={}", dir.join("there.nbd").display());
    Client::connect(&uri.parse().unwrap()).unwrap().write(0, &file, true).unwrap();
    let adopted = dir.join("there/.back-twice.raw.spile-changes");
    assert!(is_obeyed(dir, "there", &order("marked")) && adopted.exists());
    assert!(is_obeyed(dir, "there", &order("marked")) && adopted.exists());
    assert!(is_obeyed(dir, "there", &order("finish")));
    let_go(dir, "there/back-twice.raw");
    let told = json(dir, &["changed", "there/back-twice.raw", "--since", "then"]);
    assert!(told["warning"].is_null(), "{told}");
    assert!(old.terminate().success() && there.terminate().success());
}

#[test]
fn as_many_checkpoints_as_there_can_be_go_along() {
    let (world, old, there) = World::new("back-many");
    let dir = world.dir();
    let served = serve(dir, &world.disk("old"));
    (0..125).for_each(|number| _ = ok(dir, &["checkpoint", "back-many", &format!("c{number}")]));
    assert!(served.terminate().success());
    let is_known = |disk: &str, since: &str| json(dir, &["changed", disk, "--since", since])["warning"].is_null();
    fs::create_dir(dir.join("away")).unwrap();
    ok(dir, &["move", "old/back-many.raw", "--to", "away"]);
    assert!(is_known("away/back-many.raw", "c0") && is_known("away/back-many.raw", "c124"));
    ok(dir, &["checkpoint", "away/back-many.raw", "c125"]);
    ok(dir, &["move", "away/back-many.raw", "--to", &to(dir, "there", world.name)]);
    let_go(dir, "there/back-many.raw");
    assert!(is_known("there/back-many.raw", "c0") && is_known("there/back-many.raw", "c125"));
    assert!(old.terminate().success() && there.terminate().success());
}

#[test]
fn an_old_image_that_gets_its_name_back_does_not_believe_what_was_noted_after_the_hand_over() {
    let (mut world, old, there) = World::new("back-name");
    let dir = world.dir().to_owned();
    let served = serve(&dir, &world.disk("old"));
    ok(&dir, &["checkpoint", "back-name", "x"]);
    json(&dir, &["move", "back-name", "--to", &to(&dir, "there", world.name), "--rate", "24M", "--background"]);
    // A folder has the hidden name of a note that is due once the disk has its name.
    fs::create_dir(dir.join("there/.back-name.raw.spile-gone")).unwrap();
    eventually("it waits for its name", || job(&dir, "back-name")["motion"]["phase"] == "naming");
    world.write(&served, 7 * MIB);
    let said = fails(&dir, 1, &["checkpoint", "back-name", "y"]);
    assert!(said.contains("the disk is on another host now"), "{said}");
    assert_eq!(json(&dir, &["checkpoint", "back-name", "--list"])["checkpoints"].as_array().unwrap().len(), 1);
    served.kill();
    assert!(there.terminate().success());
    fs::rename(dir.join("old/back-name.moved.raw"), dir.join("old/back-name.raw")).unwrap();
    let_go(&dir, "old/back-name.raw");
    let said = json(&dir, &["changed", "old/back-name.raw", "--since", "x"]);
    assert!(said["warning"].is_string(), "{said}");
    assert!(old.terminate().success());
}

#[test]
fn a_host_that_says_neither_yes_nor_no_is_asked_again() {
    let (mut world, old, there) = World::new("back-mute");
    let served = serve(world.dir(), &world.disk("old"));
    world.go(served, "there");
    old.kill();
    let dir = world.dir();
    fs::remove_file(dir.join("old.nbd")).unwrap();
    let (asked, is_over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (count, over, socket) = (asked.clone(), is_over.clone(), UnixListener::bind(dir.join("old.nbd")).unwrap());
    let mute = std::thread::spawn(move || {
        // It hangs up at once.
        while !over.load(Ordering::SeqCst) {
            drop(socket.accept().unwrap());
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    let mut command = spile();
    command.args(["move", &world.disk("there"), "--to", &to(dir, "old", world.name), "--json"]).current_dir(dir);
    let mut moving = Running::start(&mut command, dir);
    eventually("it is asked again", || asked.load(Ordering::SeqCst) > 2 || moving.has_ended().is_some());
    is_over.store(true, Ordering::SeqCst);
    let _ = UnixStream::connect(dir.join("old.nbd"));
    mute.join().unwrap();
    // The socket's file stays: where there is none, nobody takes disks in.
    let old = receive_in(dir, "old");
    let mut said = None;
    eventually("it is over", || {
        said = moving.has_ended();
        said.is_some()
    });
    let said = said.unwrap();
    let moved: serde_json::Value = serde_json::from_str(&said[said.find('{').expect(&said)..]).expect(&said);
    assert!(moved["done_bytes"].as_u64().expect(&said) <= 5 * BLOCK, "{moved}");
    world.assert_is_in("old");
    assert!(old.terminate().success() && there.terminate().success());
}
