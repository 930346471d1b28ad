//! `spile rebase`: another parent, and the disk reads the same.

use std::fs;
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::Path;

use crate::common::nbd::Client;
use crate::common::{Served, eventually, fails, json, ok, run};

const MIB: usize = 1 << 20;

/// A VHD of 16 MiB that holds these runs: offset, byte, length.
fn base(dir: &Path, name: &str, runs: &[(usize, u8, usize)]) {
    ok(dir, &["create", "fill.raw", "--size", "16M"]);
    let raw = fs::File::options().write(true).open(dir.join("fill.raw")).unwrap();
    for (at, byte, len) in runs {
        raw.write_all_at(&vec![*byte; *len], *at as u64).unwrap();
    }
    ok(dir, &["convert", "fill.raw", name]);
    fs::remove_file(dir.join("fill.raw")).unwrap();
}

/// A child of `parent` that holds 64 KiB of `byte` at 4 MiB.
fn child(dir: &Path, name: &str, parent: &str, byte: u8) {
    ok(dir, &["create", name, "--parent", parent]);
    let served = Served::try_start(dir, &[name, "--control", "none"]).unwrap();
    Client::connect(&served.uri()).unwrap().write(4 * MIB as u64, &[byte; 64 << 10], true).unwrap();
    assert!(served.terminate().success());
}

fn content(dir: &Path, disk: &str) -> Vec<u8> {
    ok(dir, &["convert", disk, "out.raw"]);
    let bytes = fs::read(dir.join("out.raw")).unwrap();
    fs::remove_file(dir.join("out.raw")).unwrap();
    bytes
}

fn parent_of(dir: &Path, disk: &str) -> String {
    let info = json(dir, &["info", disk, "--chain"]);
    Path::new(info["layers"][1]["path"].as_str().unwrap()).file_name().unwrap().to_str().unwrap().to_owned()
}

#[test]
fn a_parent_that_reads_the_same_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    base(dir, "a.vhd", &[(MIB, 7, 100_000)]);
    // Where the child has its own data, parents may differ.
    base(dir, "b.vhd", &[(MIB, 7, 100_000), (4 * MIB, 9, 64 << 10)]);
    child(dir, "c.vhd", "a.vhd", 3);
    let before = content(dir, "c.vhd");
    let told = json(dir, &["rebase", "c.vhd", "--parent", "b.vhd", "--check"]);
    assert_eq!((&told["same"], &told["rebased"]), (&true.into(), &false.into()));
    assert_eq!(parent_of(dir, "c.vhd"), "a.vhd");
    let told = json(dir, &["rebase", "c.vhd", "--parent", "b.vhd"]);
    assert_eq!((&told["rebased"], &told["copied_bytes"]), (&true.into(), &0.into()));
    assert_eq!((parent_of(dir, "c.vhd").as_str(), content(dir, "c.vhd") == before), ("b.vhd", true));
    assert!(ok(dir, &["check", "c.vhd"]).contains("c.vhd"));
}

#[test]
fn a_parent_that_differs_is_refused_or_what_differs_is_copied() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    base(dir, "a.vhd", &[(MIB, 7, 100_000), (15 * MIB + 512, 1, 512)]);
    base(dir, "b.vhd", &[(MIB, 7, 50_000), (8 * MIB, 2, 3 * MIB)]);
    child(dir, "c.vhd", "a.vhd", 3);
    let before = content(dir, "c.vhd");
    let check = ["rebase", "c.vhd", "--parent", "b.vhd", "--check"];
    fails(dir, 1, &check);
    let said = fails(dir, 1, &["rebase", "c.vhd", "--parent", "b.vhd"]);
    assert!(said.contains(&format!("first at {:#x}", MIB + 50_000)) && said.contains("--copy"), "{said}");
    assert_eq!((parent_of(dir, "c.vhd").as_str(), content(dir, "c.vhd") == before), ("a.vhd", true));

    let told = json(dir, &["rebase", "c.vhd", "--parent", "b.vhd", "--copy"]);
    // From the unit of 4 KiB in which 50,000 lies to the one in which 100,000 lies; three MiB; one unit.
    let units = (100_000_usize.div_ceil(4096) - 50_000 / 4096) * 4096;
    assert_eq!(told["copied_bytes"], units + 3 * MIB + 4096);
    assert_eq!((parent_of(dir, "c.vhd").as_str(), content(dir, "c.vhd") == before), ("b.vhd", true));
    fails(dir, 2, &["rebase", "c.vhd", "--parent", "c.vhd"]);
}

#[test]
fn a_parent_that_has_moved_is_named_anew() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    base(dir, "a.vhd", &[(MIB, 7, 100_000)]);
    child(dir, "c.vhd", "a.vhd", 3);
    let before = content(dir, "c.vhd");
    fs::rename(dir.join("a.vhd"), dir.join("moved.vhd")).unwrap();
    let said = fails(dir, 1, &["rebase", "c.vhd", "--parent", "moved.vhd"]);
    assert!(said.contains("spile rebase") && said.contains("--trust"), "{said}");
    let told = json(dir, &["rebase", "c.vhd", "--parent", "moved.vhd", "--trust"]);
    assert!(told["same"].is_null() && told["rebased"] == true, "{told}");
    assert_eq!((parent_of(dir, "c.vhd").as_str(), content(dir, "c.vhd") == before), ("moved.vhd", true));
}

#[test]
fn a_disk_without_a_parent_one_in_use_and_a_loop_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    base(dir, "a.vhd", &[(MIB, 7, 100_000)]);
    base(dir, "b.vhd", &[(MIB, 7, 100_000)]);
    child(dir, "c.vhd", "a.vhd", 3);
    ok(dir, &["create", "d.vhd", "--parent", "c.vhd"]);
    // It has no parent; it is a child of the disk; it is a parent of another disk, whose content would be another one.
    for (disk, parent, code) in [("b.vhd", "a.vhd", 1), ("c.vhd", "d.vhd", 2), ("c.vhd", "b.vhd", 1)] {
        for way in [&[][..], &["--trust"]] {
            fails(dir, code, &[&["rebase", disk, "--parent", parent], way].concat());
        }
    }
    assert_eq!((parent_of(dir, "c.vhd").as_str(), parent_of(dir, "d.vhd").as_str()), ("a.vhd", "c.vhd"));
    fs::remove_file(dir.join("d.vhd")).unwrap();
    let served = Served::try_start(dir, &["c.vhd", "--control", "none"]).unwrap();
    fails(dir, 1, &["rebase", "c.vhd", "--parent", "b.vhd"]);
    assert!(served.terminate().success());
    assert_eq!(parent_of(dir, "c.vhd"), "a.vhd");
}

#[test]
fn a_disk_that_cannot_have_it_is_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    base(dir, "a.vhd", &[(MIB, 7, 100_000)]);
    base(dir, "b.vhd", &[(3 * MIB, 8, 100_000)]);
    base(dir, "s.vhd", &[]);
    ok(dir, &["create", "r.raw", "--size", "16M"]);
    fs::copy(dir.join("a.vhd"), dir.join(r"a\b.vhd")).unwrap();
    child(dir, "c.vhd", "a.vhd", 3);
    child(dir, "j.vhd", "a.vhd", 3);
    fs::write(dir.join(".j.vhd.spile-job"), "a job that was left").unwrap();
    let cases = [
        ("s.vhd", "b.vhd", 1, "has no parent"),
        ("r.raw", "b.vhd", 1, "has no parent"),
        ("c.vhd", r"a\b.vhd", 2, "cannot name the parent"),
        ("c.vhd", "c.vhd", 2, "its own parent"),
        ("j.vhd", "b.vhd", 1, "has not come to its end"),
    ];
    for (disk, parent, code, why) in cases {
        let before = fs::read(dir.join(disk)).unwrap();
        for way in ["--check", "--copy", "--trust"] {
            let said = fails(dir, code, &["rebase", disk, "--parent", parent, way]);
            assert!(said.contains(why), "{disk} {way}: {said}");
            assert!(fs::read(dir.join(disk)).unwrap() == before, "{disk} {way} has written to the disk");
        }
    }
}

#[test]
fn a_disk_that_is_named_by_a_link_finds_its_parent() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, pool) = (dir.path(), dir.path().join("pool"));
    fs::create_dir(&pool).unwrap();
    base(dir, "pool/a.vhd", &[(MIB, 7, 100_000)]);
    child(dir, "pool/c.vhd", "pool/a.vhd", 3);
    let before = content(dir, "pool/c.vhd");
    symlink("pool/c.vhd", dir.join("link.vhd")).unwrap();
    // The policy is that of the disk's folder, not of the link's.
    fs::copy(pool.join("a.vhd"), dir.join("b.vhd")).unwrap();
    let rebase = ["rebase", "link.vhd", "--parent", "b.vhd"];
    for way in [&[][..], &["--trust"]] {
        assert!(fails(dir, 1, &[&rebase, way].concat()).contains("lies outside the folder"));
    }
    // By both ways it is found from the disk's folder.
    for (name, way) in [("d.vhd", None), ("e.vhd", Some("--trust"))] {
        fs::copy(pool.join("a.vhd"), pool.join(name)).unwrap();
        let parent = format!("pool/{name}");
        let told = json(dir, &[&["rebase", "link.vhd", "--parent", &parent], way.as_slice()].concat());
        assert!(told["path"].as_str().unwrap().ends_with("/pool/c.vhd"), "{told}");
        assert_eq!((parent_of(dir, "link.vhd").as_str(), content(dir, "pool/c.vhd") == before), (name, true));
    }
}

#[test]
fn checkpoints_stay_unless_nobody_compares() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    base(dir, "a.vhd", &[(MIB, 7, 100_000)]);
    base(dir, "same.vhd", &[(MIB, 7, 100_000)]);
    base(dir, "other.vhd", &[(MIB, 7, 50_000)]);
    child(dir, "c.vhd", "a.vhd", 3);
    ok(dir, &["checkpoint", "c.vhd", "monday"]);
    let served = Served::try_start(dir, &["c.vhd", "--control", "none"]).unwrap();
    Client::connect(&served.uri()).unwrap().write(2 * MIB as u64, &[5; 4096], true).unwrap();
    assert!(served.terminate().success());
    let changed = |what: &str| {
        let told = json(dir, &["changed", "c.vhd", "--since", "monday"]);
        assert!(told["warning"].is_null() && told["changed_bytes"] == 64 << 10, "{what}: {told}");
    };
    changed("before");
    fails(dir, 1, &["rebase", "c.vhd", "--parent", "other.vhd"]);
    changed("after a refusal");
    ok(dir, &["rebase", "c.vhd", "--parent", "same.vhd"]);
    changed("over a parent that reads the same");
    ok(dir, &["rebase", "c.vhd", "--parent", "other.vhd", "--copy"]);
    changed("after a copy of what differs");
    // What is named by mistake is no parent that has moved.
    let said = fails(dir, 1, &["rebase", "c.vhd", "--parent", "a.vhd", "--trust"]);
    assert!(said.contains("UUID") && said.contains("--other-uuid"), "{said}");
    changed("after a refused trust");
    fs::rename(dir.join("other.vhd"), dir.join("moved.vhd")).unwrap();
    ok(dir, &["rebase", "c.vhd", "--parent", "moved.vhd", "--trust"]);
    assert!(fails(dir, 1, &["changed", "c.vhd", "--since", "monday"]).contains("no checkpoint"));
    ok(dir, &["rebase", "c.vhd", "--parent", "same.vhd", "--trust", "--other-uuid"]);
    assert_eq!(parent_of(dir, "c.vhd"), "same.vhd");
}

#[test]
fn a_parent_whose_server_was_killed_is_closed_first() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    base(dir, "a.vhd", &[(MIB, 7, 100_000)]);
    for way in [None, Some("--copy"), Some("--trust")] {
        ok(dir, &["create", "p.vhd", "--parent", "a.vhd"]);
        child(dir, "c.vhd", "a.vhd", 3);
        let before = content(dir, "c.vhd");
        let served = Served::try_start(dir, &["p.vhd", "--control", "none"]).unwrap();
        Client::connect(&served.uri()).unwrap().write(4 * MIB as u64, &[9; 4096], false).unwrap();
        served.kill();
        eventually("the files are free", || run(dir, &["info", "p.vhd"]).status.success());
        let is_unflushed = || json(dir, &["info", "p.vhd"])["layers"][0]["facts"]["unflushed"] == true;
        assert!(is_unflushed());
        let trust = if way == Some("--trust") { &["--other-uuid"][..] } else { &[] };
        let args = [&["rebase", "c.vhd", "--parent", "p.vhd"], way.as_slice(), trust].concat();
        ok(dir, &args);
        assert!(!is_unflushed(), "{way:?}: the disk's content hangs on what a power cut takes");
        assert_eq!((parent_of(dir, "c.vhd").as_str(), content(dir, "c.vhd") == before), ("p.vhd", true));
        ["c.vhd", "p.vhd"].iter().for_each(|image| fs::remove_file(dir.join(image)).unwrap());
    }
}
