//! `spile move --chain keep` to `spile receive`: the parents come first, are found there by the next disk, and survive kills of either side; what is refused.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use crate::common::chains::{MIB, chain, family, file};
use crate::common::guests::Load;
use crate::common::host::{bytes_of, serve};
use crate::common::moves::{job, let_go, receive, to};
use crate::common::nbd::Client;
use crate::common::{eventually, fails, json, ok};

/// What is in the folder of the other host, but for what is noted of changes.
fn names(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir.join("there")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| !name.ends_with("-changes")).collect();
    names.sort();
    names
}

#[test]
fn a_disk_takes_its_parents_to_another_host_under_load_and_the_next_one_finds_them() {
    let (dir, bytes) = family("there", "there-live.qcow2", 10);
    let dir = dir.path();
    let there = receive(dir);
    let served = serve(dir, &["old/there-live.qcow2", "--vhost-user", "v"]);
    let mut load = Load::start(dir, "v", &["--span", "48M"]);
    load.goes_on(&served);
    let moved = json(dir, &["move", "there-live", "--to", &to(dir, "disk.qcow2"), "--chain", "keep", "--wait"]);
    assert_eq!((&moved["state"], &moved["motion"]["parents_done"]), (&"done".into(), &2.into()), "{moved}");
    load.goes_on(&served);
    assert_eq!(load.end(), 0);
    assert!(served.terminate().success());
    let_go(dir, "there/disk.qcow2");
    assert_eq!(chain(dir, "there/disk.qcow2"), ["disk.qcow2", "mid.vhd", "base.raw"]);
    // The old parents stay, for others; sparse stays sparse; a UUID stays.
    let parents = ["base.raw", "mid.vhd"]
        .map(|name| (file(dir, &format!("old/{name}")).1, file(dir, &format!("there/{name}")).1));
    assert!(parents[0].1 <= parents[0].0 + (1 << 20) && parents[1].1 < 8 << 20, "{parents:?}");
    let uuid = |folder: &str| fs::read(dir.join(folder).join("mid.vhd")).unwrap()[68..84].to_vec();
    assert_eq!(uuid("old"), uuid("there"));
    let listed = json(dir, &["receive", "there", "--list"]);
    let listed = listed["disks"].as_array().unwrap().iter();
    let listed: Vec<_> = listed.map(|disk| (disk["name"].as_str().unwrap(), disk["is_parent"] == true)).collect();
    assert_eq!(listed, [("base.raw", true), ("disk.qcow2", false), ("mid.vhd", true)]);

    let before = ["there/base.raw", "there/mid.vhd"].map(|path| file(dir, path));
    let moved = json(dir, &["move", "old/other.vhd", "--to", &to(dir, "other.vhd"), "--chain", "keep"]);
    assert_eq!(moved["state"], "done", "{moved}");
    assert_eq!(["there/base.raw", "there/mid.vhd"].map(|path| file(dir, path)), before, "a parent was sent again");
    let_go(dir, "there/other.vhd");
    assert_eq!(chain(dir, "there/other.vhd"), ["other.vhd", "mid.vhd", "base.raw"]);
    assert!(file(dir, "there/other.vhd").1 < 1 << 20, "the new leaf holds what its parents have");
    assert!(bytes_of(dir, "there/other.vhd") == bytes, "the bytes are others");
    assert!(there.terminate().success());
}

#[test]
fn a_parent_half_sent_is_never_taken_for_a_whole_one() {
    for (disk, who) in [("there-killed-far", "there"), ("there-killed-near", "here"), ("there-killed-both", "both")] {
        let (dir, mut bytes) = family("there", &format!("{disk}.qcow2"), 10);
        let dir = dir.path();
        let mut there = Some(receive(dir));
        let mut served = serve(dir, &[&format!("old/{disk}.qcow2")]);
        json(dir, &["move", disk, "--to", &to(dir, "disk.vhd"), "--chain", "keep", "--rate", "2M", "--background"]);
        eventually("some of a parent is sent", || job(dir, disk)["done_bytes"].as_u64() > Some(1 << 20));
        assert_eq!(job(dir, disk)["motion"]["phase"], "copying parents");
        assert_eq!(names(dir), [".base.raw.spile-received", ".base.raw.spile-receiving"]);
        // What a guest writes meanwhile: data, zeroes over a parent's data, and data that is discarded.
        let client = Client::connect(&served.uri()).unwrap();
        client.write(4096, &[9; 8192], false).unwrap();
        bytes[4096..4096 + 8192].fill(9);
        client.write(16 << 20, &vec![0; MIB], true).unwrap();
        bytes[16 * MIB..17 * MIB].fill(0);
        drop(client);
        if who != "here" {
            there.take().unwrap().kill();
        }
        if who != "there" {
            served.kill();
            served = serve(dir, &[&format!("old/{disk}.qcow2")]);
        }
        if who != "here" {
            eventually("that is told", || job(dir, disk)["motion"]["phase"] == "failing");
            assert!(!names(dir).contains(&"base.raw".to_owned()));
        }
        let there = there.unwrap_or_else(|| receive(dir));
        eventually("it goes on", || job(dir, disk)["motion"]["phase"] == "copying parents");
        ok(dir, &["job", job(dir, disk)["id"].as_str().unwrap(), "rate", "none"]);
        eventually("it is done", || job(dir, disk)["state"] == "done");
        assert!(served.terminate().success() && there.terminate().success());
        assert_eq!(chain(dir, "there/disk.vhd"), ["disk.vhd", "mid.vhd", "base.raw"]);
        assert!(names(dir).iter().all(|name| !name.ends_with("receiving")), "{:?}", names(dir));
        assert!(bytes_of(dir, "there/disk.vhd") == bytes, "{who}: what was acknowledged is lost");
    }
}

#[test]
fn a_move_that_is_cancelled_leaves_whole_parents_that_nobody_writes_to() {
    let (dir, bytes) = family("there", "there-cancelled.qcow2", 10);
    let dir = dir.path();
    let there = receive(dir);
    let served = serve(dir, &["old/there-cancelled.qcow2"]);
    let disk = to(dir, "disk.vhd");
    let begun =
        json(dir, &["move", "there-cancelled", "--to", &disk, "--chain", "keep", "--rate", "4M", "--background"]);
    eventually("the next parent is sent", || names(dir).contains(&".mid.vhd.spile-receiving".to_owned()));
    ok(dir, &["job", begun["id"].as_str().unwrap(), "cancel"]);
    eventually("it is cancelled", || job(dir, "there-cancelled")["state"] == "cancelled");
    assert_eq!(names(dir), [".base.raw.spile-received", "base.raw"]);
    // Its child may be on its way: it is read, and not written.
    let read = fs::read(dir.join("there/base.raw")).unwrap();
    for place in ["there/base.raw".to_owned(), to(dir, "base.raw")] {
        let said = fails(dir, 1, &["serve", &place, "--nbd", "unix:w", "--control", "none"]);
        assert!(said.contains("parent of a disk that is moved") || said.contains("reading only"), "{said}");
        ok(dir, &["info", &place]);
    }
    // The next move uses it.
    let inode = file(dir, "there/base.raw").0;
    json(dir, &["move", "there-cancelled", "--to", &disk, "--chain", "keep", "--background"]);
    eventually("it is done", || job(dir, "there-cancelled")["state"] == "done");
    assert!(served.terminate().success() && there.terminate().success());
    assert_eq!(file(dir, "there/base.raw").0, inode);
    assert!(fs::read(dir.join("there/base.raw")).unwrap() == read, "a parent was written to");
    assert!(bytes_of(dir, "there/disk.vhd") == bytes, "the bytes are others");
}

#[test]
fn a_chain_that_cannot_be_kept_there_is_refused_and_nothing_changes() {
    let (dir, bytes) = family("there", "there-refused.qcow2", 10);
    let dir = dir.path();
    let there = receive(dir);
    let refused = |to: &str, says: &str| {
        let said = fails(dir, 1, &["move", "old/there-refused.qcow2", "--to", to, "--chain", "keep"]);
        assert!(said.contains(says), "{to}: {said}");
    };
    let disk = to(dir, "disk.vhd");
    refused(&to(dir, "x.raw"), "a raw has no parent");
    refused(&to(dir, "mid.vhd"), "two of its images would be");
    // The same name, written otherwise.
    refused(&to(dir, "m%69d.vhd"), "two of its images would be mid.vhd");
    // Files that are no parents that have come.
    fs::write(dir.join("there/disk.vhd"), "mine").unwrap();
    refused(&disk, "another file has this name");
    fs::remove_file(dir.join("there/disk.vhd")).unwrap();
    fs::copy(dir.join("old/base.raw"), dir.join("there/base.raw")).unwrap();
    refused(&disk, "it has not come here as a parent");
    assert_eq!(names(dir), ["base.raw"]);
    fs::remove_file(dir.join("there/base.raw")).unwrap();
    // Parents of another disk, of the same names: with another UUID, and with other bytes.
    let (other, _) = family("there", "there-other.qcow2", 100);
    fs::remove_dir(other.path().join("there")).unwrap();
    std::os::unix::fs::symlink(dir.join("there"), other.path().join("there")).unwrap();
    ok(other.path(), &["move", "old/there-other.qcow2", "--to", &to(dir, "first.vhd"), "--chain", "keep"]);
    let before = names(dir);
    refused(&disk, "its UUID is another");
    let uuid = fs::read(dir.join("there/mid.vhd")).unwrap();
    // The disk on the base alone: a raw image has no UUID.
    ok(dir, &["create", "old/on-base.vhd", "--parent", "old/base.raw"]);
    let said = fails(dir, 1, &["move", "old/on-base.vhd", "--to", &to(dir, "on-base.vhd"), "--chain", "keep"]);
    assert!(said.contains("what it shows differs"), "{said}");
    assert!(names(dir) == before && fs::read(dir.join("there/mid.vhd")).unwrap() == uuid, "{:?}", names(dir));
    assert!(there.terminate().success());
    assert!(bytes_of(dir, "old/there-refused.qcow2") == bytes, "the disk has changed");
}

#[test]
fn a_server_that_knows_no_chains_is_refused() {
    let (dir, _) = family("there", "there-older.qcow2", 10);
    let dir = dir.path();
    let says = "needs a `spile receive` of this version";
    let refused = |socket: &str| {
        let to = format!("nbd+unix:///x.vhd?socket={}", dir.join(socket).display());
        let said = fails(dir, 1, &["move", "old/there-older.qcow2", "--to", &to, "--chain", "keep"]);
        assert!(said.contains(says), "{said}");
    };
    ok(dir, &["create", "export.raw", "--size", "64M"]);
    let other = serve(dir, &["export.raw,name=x.vhd"]);
    let socket = other.socket.file_name().unwrap().to_str().unwrap().to_owned();
    refused(&socket);
    assert!(other.terminate().success());
    // What a `spile receive` says that takes an order for the name of a disk.
    let listener = UnixListener::bind(dir.join("older")).unwrap();
    std::thread::spawn(move || listener.incoming().for_each(|client| drop(answer_as_older(client.unwrap()))));
    refused("older");
    assert!(dir.join("old/there-older.qcow2").exists());
}

/// The handshake of a `spile receive` that does not know the order.
fn answer_as_older(mut client: UnixStream) -> std::io::Result<()> {
    const GO: u32 = 7;
    const REFUSED: u32 = (1 << 31) + 2;
    client.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    client.read_exact(&mut [0; 4])?;
    loop {
        let mut head = [0; 16];
        client.read_exact(&mut head)?;
        let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
        client.read_exact(&mut vec![0; number(12) as usize])?;
        let (kind, words) = match number(8) {
            GO => (REFUSED, "[order_unknown] this `spile receive` does not know the order"),
            _ => (1, ""),
        };
        client.write_all(&0x0003_e889_0455_65a9_u64.to_be_bytes())?;
        for word in [number(8), kind, words.len() as u32] {
            client.write_all(&word.to_be_bytes())?;
        }
        client.write_all(words.as_bytes())?;
    }
}

#[test]
fn a_parent_that_has_come_stays_as_it_is_until_it_is_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir(dir.join("there")).unwrap();
    let there = receive(dir);
    let id = "a7".repeat(16);
    let order = |order: String| Client::connect(&there.export(&format!(".spile-receive/{order}"))).map(drop);
    order(format!("begin-in-chain/{id}/{}/parent/vhd/-/-/-/p.vhd", 4 * MIB)).unwrap();
    order(format!("finish/{id}/p.vhd")).unwrap();
    let_go(dir, "there/p.vhd");
    let refused = |args: &[&str], says: &str| {
        let said = fails(dir, 1, args);
        assert!(said.contains(says), "{args:?}: {said}");
    };
    // No child is here yet; and when another one than the disk that comes is here, it is not merged into it.
    refused(&["serve", "there/p.vhd", "--nbd", "unix:w", "--control", "none"], "parent of a disk that is moved");
    ok(dir, &["create", "there/c.vhd", "--parent", "there/p.vhd"]);
    refused(&["coalesce", "there/c.vhd"], "has come here as a parent");
    ok(dir, &["delete", "there/p.vhd"]);
    ok(dir, &["gc", "there"]);
    assert_eq!(names(dir), ["c.vhd"]);
    assert!(there.terminate().success());
}

/// What was on its way for long is carried out when another process of the old host, and so another attempt of the move, has begun.
#[test]
fn late_orders_of_an_earlier_attempt_change_nothing_of_a_later_one() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir(dir.join("there")).unwrap();
    let there = receive(dir);
    let connect = |order: String| Client::connect(&there.export(&format!(".spile-receive/{order}")));
    let done = |order: String| connect(order).is_ok();
    let id = |attempt: u32| format!("{}{attempt:08x}", "a7".repeat(12));
    let parent = |attempt: u32| format!("begin-in-chain/{}/{}/parent/raw/-/-/-/base.raw", id(attempt), 4 * MIB);
    let link = |attempt: u32, link: &str| connect(format!("go-on/{}/{}/base.raw", id(attempt), link.repeat(16)));
    assert!(done(parent(7)));
    link(7, "11").unwrap().write(0, &[1; 4096], true).unwrap();
    // Given again it finds what it has begun.
    assert!(done(parent(7)));
    let mut read = [9; 4096];
    link(7, "22").unwrap().read(0, &mut read).unwrap();
    assert_eq!(read, [1; 4096]);
    // The next process does not know what is there: it begins with an empty image.
    assert!(done(parent(8)));
    let filling = link(8, "33").unwrap();
    filling.read(0, &mut read).unwrap();
    assert_eq!(read, [0; 4096]);
    filling.write(4096, &[2; 4096], true).unwrap();
    // Nor is it known to one that has noted another half; one that has noted this one goes on with it.
    assert!(!done(format!("take-over/{}/{}/base.raw", id(10), id(7))));
    assert!(done(format!("take-over/{}/{}/base.raw", id(8), id(7))));
    for late in [parent(7), format!("drop/{}/base.raw", id(7)), format!("finish/{}/base.raw", id(7))] {
        assert!(!done(late.clone()), "{late} was obeyed");
    }
    assert!(link(7, "44").is_err(), "an earlier attempt writes");
    filling.read(4096, &mut read).unwrap();
    assert_eq!(read, [2; 4096]);
    assert_eq!(names(dir), [".base.raw.spile-received", ".base.raw.spile-receiving"]);
    // Whole, it is written to by nobody: not by the link that has filled it, nor by a new one.
    assert!(done(format!("finish/{}/base.raw", id(8))));
    assert!(filling.write(0, &[3; 4096], true).is_err() && link(8, "55").is_err(), "a whole parent is written to");
    for late in [parent(7), parent(8), parent(9), format!("drop/{}/base.raw", id(9))] {
        assert!(!done(late.clone()), "{late} was obeyed");
    }
    let child = |by: u32| format!("begin-in-chain/{}/{}/disk/vhd/-/base.raw/{}/c.vhd", id(8), 4 * MIB, id(by));
    assert!(!done(child(7)) && done(child(8)), "a child is made over a parent that came by another attempt");
    let reader = Client::connect(&there.export("base.raw")).unwrap();
    reader.read(4096, &mut read).unwrap();
    assert!(read == [2; 4096] && reader.write(0, &[3; 4096], true).is_err());
    drop(reader);
    // A later attempt drops the half of an earlier one. It is told so in the place of an export.
    assert!(names(dir).contains(&".c.vhd.spile-receiving".to_owned()));
    let said = connect(format!("drop/{}/c.vhd", id(9))).err().expect("a half that is dropped is no export");
    assert!(said.to_string().contains("the half-made image is removed"), "{said}");
    assert_eq!(names(dir), [".base.raw.spile-received", "base.raw"]);
    assert!(there.terminate().success());
    let bytes = fs::read(dir.join("there/base.raw")).unwrap();
    assert!(bytes[..4096] == [0; 4096] && bytes[4096..8192] == [2; 4096]);
}
