//! Snapshots inside a qcow2 image as their users meet them.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::host::{bytes_of, serve};
use crate::common::nbd::Client;
use crate::common::{fails, json, ok};

const MIB: u64 = 1 << 20;
const DISK: &str = "internal.qcow2";

/// Writes `byte` to a part of the disk by a server of its own.
fn write(dir: &Path, at: u64, byte: u8) {
    let served = serve(dir, &[DISK]);
    Client::connect(&served.uri()).unwrap().write(at, &vec![byte; 1 << 20], true).unwrap();
    assert!(served.terminate().success());
}

fn disk(dir: &Path) {
    ok(dir, &["create", DISK, "--size", "8M"]);
    write(dir, 0, 1);
}

fn names(dir: &Path) -> Vec<String> {
    let listed = json(dir, &["internal-snapshot", DISK, "--list"]);
    let all = listed["snapshots"].as_array().unwrap();
    all.iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn snapshots_are_made_listed_applied_and_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    disk(dir);
    let none = ok(dir, &["internal-snapshot", DISK, "--list"]);
    assert!(none.contains("no snapshots inside the image"), "{none}");
    let made = json(dir, &["internal-snapshot", DISK, "--create", "monday"]);
    let one = &made["snapshots"][0];
    assert_eq!((one["id"].as_str(), one["name"].as_str()), (Some("1"), Some("monday")), "{made}");
    assert_eq!((one["disk_bytes"].as_u64(), one["guest_state_bytes"].as_u64()), (Some(8 * MIB), Some(0)));
    let monday = bytes_of(dir, DISK);
    write(dir, 2 * MIB, 2);
    // The letters are those of qemu-img snapshot.
    let said = ok(dir, &["internal-snapshot", "-c", "tuesday", DISK]);
    assert!(said.contains("tuesday (id 2) holds what the disk holds"), "{said}");
    let listed = ok(dir, &["internal-snapshot", "-l", DISK]);
    assert!(listed.contains("monday") && listed.contains("tuesday") && listed.contains("8 MiB"), "{listed}");
    assert_eq!(names(dir), ["monday", "tuesday"]);
    assert_eq!(json(dir, &["info", DISK])["layers"][0]["facts"]["snapshots"][1]["name"], "tuesday");
    ok(dir, &["internal-snapshot", "-a", "monday", DISK]);
    assert!(bytes_of(dir, DISK) == monday);
    ok(dir, &["internal-snapshot", "-d", "1", DISK]);
    assert_eq!(names(dir), ["tuesday"]);
    assert!(bytes_of(dir, DISK) == monday);
    ok(dir, &["internal-snapshot", DISK, "--delete", "tuesday"]);
    let checked = json(dir, &["check", DISK]);
    assert_eq!((checked["result"].as_str(), names(dir).len()), (Some("sound"), 0), "{checked}");
}

#[test]
fn what_is_refused_says_why_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    disk(dir);
    ok(dir, &["internal-snapshot", DISK, "--create", "monday"]);
    let before = fs::read(dir.join(DISK)).unwrap();
    let refused = |code: i32, args: &[&str], part: &str| {
        let said = fails(dir, code, &[&["internal-snapshot"], args].concat());
        assert!(said.contains(part), "{args:?}: {said}");
    };
    refused(1, &[DISK, "--create", "monday"], "choose another name");
    refused(1, &[DISK, "--delete", "sunday"], "--list shows those");
    refused(2, &[DISK, "--create", ""], "1 to 255 bytes");
    refused(2, &[DISK], "--list");
    refused(2, &[DISK, "--list", "--create", "x"], "--list");
    ok(dir, &["create", "a.vhd", "--size", "1M"]);
    refused(1, &["a.vhd", "--list"], "no snapshots inside it");
    refused(1, &["a.vhd", "--create", "x"], "no snapshots inside it");
    let served = serve(dir, &[DISK]);
    refused(1, &[DISK, "--create", "x"], "spile snapshot internal --name");
    refused(1, &[DISK, "--list"], "spile info");
    assert!(served.terminate().success());
    assert!(fs::read(dir.join(DISK)).unwrap() == before);
    // A child would show other bytes.
    ok(dir, &["create", "child.qcow2", "--parent", DISK]);
    refused(1, &[DISK, "--apply", "monday"], "child.qcow2 is a child");
    assert!(fs::read(dir.join(DISK)).unwrap() == before);
    ok(dir, &["internal-snapshot", DISK, "--apply", "monday", "--write-parent"]);
}

/// A disk whose only snapshot, `monday`, has its L1 table where the disk's is.
fn contradicting_disk(dir: &Path) {
    disk(dir);
    ok(dir, &["internal-snapshot", DISK, "--create", "monday"]);
    let file = File::options().read(true).write(true).open(dir.join(DISK)).unwrap();
    let field = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    file.write_all_at(&field(40).to_be_bytes(), field(64)).unwrap();
}

#[test]
fn an_image_that_contradicts_itself_is_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    contradicting_disk(dir);
    let before = fs::read(dir.join(DISK)).unwrap();
    for change in ["--create", "--apply", "--delete"] {
        let name = if change == "--create" { "x" } else { "monday" };
        let said = fails(dir, 1, &["internal-snapshot", DISK, change, name]);
        assert!(said.contains("nothing was changed") && said.contains("spile check"), "{said}");
    }
    assert!(fs::read(dir.join(DISK)).unwrap() == before);
}

#[test]
fn a_snapshot_that_is_not_applied_takes_nothing_from_the_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    contradicting_disk(dir);
    ok(dir, &["checkpoint", DISK, "c"]);
    let said = fails(dir, 1, &["internal-snapshot", DISK, "--apply", "monday"]);
    assert!(said.contains("nothing was changed"), "{said}");
    let said = json(dir, &["changed", DISK, "--since", "c"]);
    assert_eq!((said["changed_bytes"].as_u64(), said["warning"].as_str()), (Some(0), None), "{said}");
}

#[test]
fn checkpoints_go_on_but_after_going_back_everything_counts_as_changed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    disk(dir);
    ok(dir, &["checkpoint", DISK, "c"]);
    let changed = || json(dir, &["changed", DISK, "--since", "c"])["changed_bytes"].as_u64().unwrap();
    ok(dir, &["internal-snapshot", DISK, "--create", "monday"]);
    assert_eq!(changed(), 0);
    write(dir, 4 * MIB, 4);
    assert_eq!(changed(), MIB);
    fails(dir, 1, &["internal-snapshot", DISK, "--apply", "sunday"]);
    assert_eq!(changed(), MIB, "what was refused changes nothing");
    ok(dir, &["internal-snapshot", DISK, "--create", "tuesday"]);
    ok(dir, &["internal-snapshot", DISK, "--delete", "tuesday"]);
    assert_eq!(changed(), MIB);
    ok(dir, &["internal-snapshot", DISK, "--apply", "monday"]);
    assert_eq!(changed(), 8 * MIB);
}
