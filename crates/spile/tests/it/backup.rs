//! Backups by the commands: of disks that are served, and of those that nobody uses; what is refused, and what is left.

use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::Duration;
use std::{fs, io};

use crate::common::host::{names, raw, serve};
use crate::common::nbd::Client;
use crate::common::{eventually, fails, faulty_sync, json, ok, spile};
use nix::sys::signal::Signal;
use serde_json::Value;

const MIB: usize = 1 << 20;

fn state_of(dir: &Path, id: &str) -> Value {
    let jobs = json(dir, &["jobs"]);
    jobs["jobs"].as_array().unwrap().iter().find(|job| job["id"] == id).unwrap_or(&Value::Null).clone()
}

#[test]
fn disks_that_nobody_serves_are_backed_up_and_restored() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let bytes = raw(dir, "a.raw", 7);
    ok(dir, &["convert", "a.raw", "b.vhd"]);
    fs::create_dir(dir.join("both")).unwrap();
    let made = json(dir, &["backup", "a.raw", "b.vhd", "both", "--to", "raw"]);
    let states: Vec<_> = made["jobs"].as_array().unwrap().iter().map(|job| &job["state"]).collect();
    assert_eq!(states, ["done", "done"]);
    assert_eq!(names(&dir.join("both")), ["a.raw", "a.raw.spile-backup", "b.raw", "b.raw.spile-backup"]);
    ok(dir, &["backup", "b.vhd", "c.vhd"]);
    for backup in ["both/a.raw", "both/b.raw", "c.vhd"] {
        let verified = json(dir, &["verify", backup]);
        assert!(verified["is_right"] == true && verified["virtual_size_bytes"] == 16 * MIB, "{verified}");
        ok(dir, &["restore", backup, "restored.raw"]);
        assert!(fs::read(dir.join("restored.raw")).unwrap() == bytes, "{backup} restores something else");
        fs::remove_file(dir.join("restored.raw")).unwrap();
    }
    // A backup takes no more than its data.
    assert!(json(dir, &["info", "both/a.raw"])["used_bytes"].as_u64().unwrap() < 9 * MIB as u64);
    raw(dir, "over.raw", 9);
    assert!(fails(dir, 1, &["restore", "c.vhd", "over.raw"]).contains("--onto"));
    ok(dir, &["restore", "c.vhd", "over.raw", "--onto"]);
    assert!(fs::read(dir.join("over.raw")).unwrap() == bytes);
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "refused.raw", 1);
    raw(dir, "other.raw", 2);
    let before = names(dir);
    let refused = |code, args: &[&str], words: &str| {
        let said = fails(dir, code, args);
        assert!(said.contains(words), "{args:?}: {said}");
    };
    let served = serve(dir, &["refused.raw", "other.raw"]);
    for disk in ["refused.raw", "refused"] {
        refused(1, &["backup", disk, "other.raw"], "a full backup is a new file");
        refused(2, &["backup", disk, "mem:1M"], "nothing is kept there");
        refused(1, &["backup", disk, "nowhere/backup.raw"], "backup.raw");
        refused(1, &["backup", disk, "nbd+unix:///?socket=nobody"], "nobody");
        refused(1, &["backup", disk, "x.raw", "--fleece", "nowhere"], "--fleece names another folder");
    }
    refused(2, &["backup", "refused", "refused", dir.to_str().unwrap()], "would have their backup in");
    // Neither onto the disk itself, nor onto another one that the server has.
    for export in ["", "refused", "other"] {
        let own = format!("nbd+unix:///{export}?socket={}", dir.join("n").display());
        refused(2, &["backup", "refused", &own], "of a server of this host");
        refused(2, &["backup", "refused", &own, "--overwrite"], "serves the export itself");
        refused(2, &["restore", "refused.raw", &own], "a guest may use it");
    }
    refused(2, &["backup", "refused", "other", "both"], "TARGET is a folder");
    refused(1, &["restore", "other.raw", "new.raw"], "has no manifest here");
    // A manifest takes the place of nothing else.
    refused(1, &["backup", "refused", "new.raw", "--manifest", "other.raw"], "take the place of something else");
    refused(2, &["backup", "refused", "new.raw", "--manifest", "new.raw"], "another file than the backup");
    assert!(served.terminate().success());
    assert_eq!(names(dir), before);
    assert!(!json(dir, &["jobs"]).to_string().contains(dir.to_str().unwrap()), "a job is left");
}

#[test]
fn a_disk_has_one_backup_at_a_time_and_one_that_is_cancelled_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "busy.raw", 1);
    let mut served = serve(dir, &["busy.raw"]);
    let made = json(dir, &["backup", "busy", "slow.raw", "--rate", "64k", "--background"]);
    let id = made["jobs"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(made["jobs"][0]["to"], dir.canonicalize().unwrap().join("slow.raw").to_str().unwrap());
    assert!(fails(dir, 1, &["backup", "busy", "second.raw"]).contains("has a job already"));
    assert!(fails(dir, 1, &["restore", "second.raw", "busy.raw", "--onto"]).contains("second.raw"));
    assert_eq!(json(dir, &["job", &id, "cancel"])["id"], id);
    eventually("the job is cancelled", || state_of(dir, &id)["state"] == "cancelled");
    ok(dir, &["backup", "busy", "second.raw", "--wait"]);
    assert!(fails(dir, 1, &["restore", "second.raw", "busy.raw", "--onto"]).contains("in use"));
    assert_eq!(names(dir), ["busy.raw", "second.raw", "second.raw.spile-backup"]);
    // One that is at work when its server dies, or ends, leaves nothing either.
    ok(dir, &["backup", "busy", "third.raw", "--rate", "64k", "--background"]);
    served.signal(nix::sys::signal::Signal::SIGKILL);
    served.wait();
    assert_eq!(names(dir), ["busy.raw", "second.raw", "second.raw.spile-backup"]);
    fs::remove_file(dir.join("n")).unwrap();
    let served = serve(dir, &["busy.raw"]);
    ok(dir, &["backup", "busy", "third.raw", "--rate", "64k", "--background"]);
    assert!(served.terminate().success());
    assert_eq!(names(dir), ["busy.raw", "second.raw", "second.raw.spile-backup"]);
}

/// The bytes of a backup.
/// A backup that takes all night keeps a disk neither from its snapshots, nor from a merge, nor from growing; and copies what the disk held.
#[test]
fn a_disk_changes_its_images_while_it_is_backed_up() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.vhd", "--size", "8M"]);
    let served = serve(dir, &["d.vhd"]);
    let client = Client::connect(&served.uri()).unwrap();
    let write = |at: u64, byte: u8| client.write(at, &vec![byte; 1 << 20], true).unwrap();
    (0..4).for_each(|mib| write(mib << 20, 1));
    ok(dir, &["snapshot", "d", "--name", "before"]);
    (1..3).for_each(|mib| write(mib << 20, 2));
    let held = [1, 2, 2, 1, 0, 0, 0, 0].map(|byte| vec![byte; 1 << 20]).concat();
    let made = json(dir, &["backup", "d", "b.raw", "--rate", "64k", "--background"]);
    let id = made["jobs"][0]["id"].as_str().unwrap();
    (3..5).for_each(|mib| write(mib << 20, 3));
    ok(dir, &["snapshot", "d", "--name", "meanwhile"]);
    write(0, 4);
    ok(dir, &["coalesce", "d", "--layer", "meanwhile", "--wait"]);
    ok(dir, &["coalesce", "d", "--wait"]);
    ok(dir, &["resize", "d", "9M"]);
    let busy = fails(dir, 1, &["move", "d", "--to", "elsewhere.vhd"]);
    assert!(busy.contains("has a job already") && busy.contains("a backup"), "{busy}");
    assert_eq!(state_of(dir, id)["state"], "running", "it was to be slow");
    ok(dir, &["job", id, "rate", "none"]);
    eventually("the backup is done", || state_of(dir, id)["state"] == "done");
    ok(dir, &["verify", "b.raw"]);
    assert!(fs::read(dir.join("b.raw")).unwrap() == held, "the backup is not what the disk held");
    // Nor does a merge keep a backup from beginning.
    ok(dir, &["snapshot", "d", "--name", "last"]);
    write(5 << 20, 5);
    let merge = json(dir, &["coalesce", "d", "--rate", "64k", "--background"]);
    ok(dir, &["backup", "d", "second.raw", "--wait"]);
    let now = [4, 2, 2, 3, 3, 5, 0, 0, 0].map(|byte| vec![byte; 1 << 20]).concat();
    assert!(fs::read(dir.join("second.raw")).unwrap() == now);
    let id = merge["id"].as_str().unwrap();
    // However many have come and gone, the one that is under way is not forgotten.
    for number in 0..9 {
        ok(dir, &["backup", "d", &format!("n{number}.raw"), "--wait"]);
    }
    assert_eq!(state_of(dir, id)["state"], "running");
    assert!(fails(dir, 1, &["flatten", "d"]).contains("has a job already"));
    ok(dir, &["backup", "d", "slow.raw", "--rate", "64k", "--background"]);
    let two = fails(dir, 2, &["job", "d", "cancel"]);
    assert!(two.contains("has two jobs") && two.contains(id), "{two}");
    ok(dir, &["job", id, "cancel"]);
    eventually("the merge is cancelled", || state_of(dir, id)["state"] == "cancelled");
    // Both end with the server.
    ok(dir, &["coalesce", "d", "--rate", "64k", "--background"]);
    assert!(fails(dir, 1, &["backup", "d", "third.raw", "--rate", "64k"]).contains("has a job already"));
    assert!(served.terminate().success());
    assert_eq!(names(dir).iter().filter(|name| name.contains("slow")).count(), 0, "{:?}", names(dir));
    ok(dir, &["convert", "d.vhd", "now.raw"]);
    assert!(fs::read(dir.join("now.raw")).unwrap() == now);
}

fn bytes_of(dir: &Path, backup: &str) -> Vec<u8> {
    assert_eq!(json(dir, &["verify", backup])["is_right"], true, "{backup}");
    ok(dir, &["restore", backup, "restored.raw"]);
    let bytes = fs::read(dir.join("restored.raw")).unwrap();
    fs::remove_file(dir.join("restored.raw")).unwrap();
    bytes
}

#[test]
fn a_backup_that_is_cut_off_is_not_restored_over_a_disk() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "a.raw", 1);
    ok(dir, &["backup", "a.raw", "b.raw"]);
    let over = raw(dir, "over.raw", 2);
    assert!(fails(dir, 2, &["restore", "b.raw", "-"]).contains("stdout"));
    fs::File::options().write(true).open(dir.join("b.raw")).unwrap().set_len(9 * MIB as u64).unwrap();
    assert!(fails(dir, 1, &["restore", "b.raw", "over.raw", "--onto"]).contains("its disk had"));
    assert!(fs::read(dir.join("over.raw")).unwrap() == over, "the disk was changed");
}

#[test]
fn an_older_backup_that_has_a_child_is_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "d.raw", 1);
    let served = serve(dir, &["d.raw"]);
    ok(dir, &["backup", "d", "sun.raw", "--checkpoint", "sunday", "--wait"]);
    ok(dir, &["backup", "d", "mon.vhd", "--since", "sunday", "--parent", "sun.raw", "--wait"]);
    let said = fails(dir, 1, &["backup", "d", "sun.raw", "--since", "sunday", "--wait"]);
    assert!(said.contains("mon.vhd") && said.contains("make a full backup"), "{said}");
    assert!(served.terminate().success());
    for backup in ["sun.raw", "mon.vhd"] {
        assert_eq!(json(dir, &["verify", backup])["is_right"], true, "{backup}");
    }
}

#[test]
fn the_changes_since_a_checkpoint_become_a_child_or_change_the_older_backup() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut bytes = raw(dir, "grow.raw", 1);
    let served = serve(dir, &["grow.raw"]);
    let client = Client::connect(&served.uri()).unwrap();
    let mut write = |offset: usize, len: usize, byte: u8| {
        client.write(offset as u64, &vec![byte; len], false).unwrap();
        bytes[offset..offset + len].fill(byte);
        bytes.clone()
    };
    let sunday = write(0, MIB, 2);
    ok(dir, &["backup", "grow", "sun.vhd", "--checkpoint", "sunday", "--wait"]);
    ok(dir, &["backup", "grow", "grow-backup.raw", "--checkpoint", "sunday-raw", "--wait"]);
    // Data, zeroes over data, and data in what was a hole.
    write(3 * MIB + 4096, 512, 3);
    write(5 * MIB, MIB, 0);
    let monday = write(14 * MIB, 70_000, 4);
    let child =
        ["backup", "grow", "mon.vhd", "--since", "sunday", "--parent", "sun.vhd", "--checkpoint", "monday", "--wait"];
    ok(dir, &child);
    let in_place =
        ["backup", "grow", "grow-backup.raw", "--since", "sunday-raw", "--checkpoint", "monday-raw", "--wait"];
    ok(dir, &in_place);
    let tuesday = write(MIB / 2, 2 * MIB, 5);
    ok(dir, &["backup", "grow", "tue.vhd", "--since", "monday", "--parent", "mon.vhd", "--wait"]);
    for (backup, held) in
        [("sun.vhd", &sunday), ("mon.vhd", &monday), ("grow-backup.raw", &monday), ("tue.vhd", &tuesday)]
    {
        assert!(bytes_of(dir, backup) == *held, "{backup} holds something else");
    }
    assert!(json(dir, &["info", "mon.vhd"])["used_bytes"].as_u64().unwrap() < 3 * MIB as u64);
    // A backup that is not of the checkpoint is refused, and so is a checkpoint that is another one by now.
    let refused = |args: &[&str], words: &str| {
        let said = fails(dir, 2, args);
        assert!(said.contains(words), "{args:?}: {said}");
    };
    refused(
        &["backup", "grow", "x.vhd", "--since", "monday", "--parent", "sun.vhd"],
        "is of the checkpoint \"sunday\"",
    );
    refused(&["backup", "grow", "x.vhd", "--since", "monday", "--parent", "tue.vhd"], "without a checkpoint");
    refused(&in_place, "is of the checkpoint \"monday-raw\"");
    refused(&["backup", "grow", "x.vhd", "--since", "monday"], "--parent");
    fails(dir, 1, &["backup", "grow", "x.vhd", "--since", "friday", "--parent", "tue.vhd"]);
    fails(dir, 1, &["backup", "grow", "x.vhd", "--checkpoint", "monday"]);
    let manifest = dir.join("mon.vhd.spile-backup");
    let text = fs::read_to_string(&manifest).unwrap();
    let mut other: Value = serde_json::from_str(&text).unwrap();
    other["checkpoint_unix_s"] = 1.into();
    other.as_object_mut().unwrap().remove("checksum");
    fs::write(&manifest, other.to_string()).unwrap();
    refused(
        &["backup", "grow", "x.vhd", "--since", "monday", "--parent", "mon.vhd"],
        "another one of that name by now",
    );
    assert!(!dir.join("x.vhd").exists() && !dir.join("x.vhd.spile-backup").exists());
    drop(client);
    assert!(served.terminate().success());
    // Of a disk that no server has, too.
    ok(dir, &["backup", "grow.raw", "x.vhd", "--checkpoint", "x"]);
    assert!(fails(dir, 1, &["backup", "grow.raw", "y.vhd", "--checkpoint", "x"]).contains("already"));
    let served = serve(dir, &["grow.raw"]);
    Client::connect(&served.uri()).unwrap().write(4711 * 512, &[6; 512], true).unwrap();
    assert!(served.terminate().success());
    let made = json(dir, &["backup", "grow.raw", "y.vhd", "--since", "x", "--parent", "x.vhd"]);
    assert_eq!(made["jobs"][0]["total_bytes"], MIB, "more than the piece with the block that has changed");
    ok(dir, &["verify", "y.vhd"]);
    assert_eq!(bytes_of(dir, "y.vhd"), fs::read(dir.join("grow.raw")).unwrap());
    assert!(
        fails(dir, 1, &["backup", "grow.raw", "z.vhd", "--since", "none", "--parent", "x.vhd"])
            .contains("no checkpoint")
    );
}

#[test]
fn the_changes_of_a_disk_that_has_become_shorter_are_right() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.vhd", "--size", "20M"]);
    let served = serve(dir, &["d.vhd"]);
    let client = Client::connect(&served.uri()).unwrap();
    for mib in [3, 10, 15] {
        client.write(mib << 20, &vec![mib as u8; 1 << 20], true).unwrap();
    }
    drop(client);
    ok(dir, &["backup", "d", "full.vhd", "--checkpoint", "c1", "--wait"]);
    ok(dir, &["backup", "d", "full.raw", "--wait"]);
    ok(dir, &["backup", "d", "place.raw", "--checkpoint", "c2", "--wait"]);
    assert!(served.terminate().success());
    // Its end lies within a piece that has a digest.
    ok(dir, &["resize", "d.vhd", "10752K", "--shrink", "--discard"]);
    let served = serve(dir, &["d.vhd"]);
    ok(dir, &["backup", "d", "child.vhd", "--since", "c1", "--parent", "full.vhd", "--wait"]);
    ok(dir, &["backup", "d", "place.raw", "--since", "c2", "--wait"]);
    assert!(served.terminate().success());
    ok(dir, &["convert", "d.vhd", "now.raw"]);
    let now = fs::read(dir.join("now.raw")).unwrap();
    assert_eq!((now.len(), now[10 << 20]), (10752 << 10, 10));
    for backup in ["child.vhd", "place.raw"] {
        assert!(bytes_of(dir, backup) == now, "{backup}");
    }
}

/// Passes the first connection to `from` on to `to`, as soon as it is told to.
fn pass_on(from: &Path, to: &Path) -> mpsc::Sender<()> {
    let (listener, to) = (UnixListener::bind(from).unwrap(), to.to_owned());
    let (go, is_told) = mpsc::channel();
    std::thread::spawn(move || {
        is_told.recv().unwrap();
        let pump = |mut from: UnixStream, mut to: UnixStream| std::thread::spawn(move || io::copy(&mut from, &mut to));
        for stream in listener.incoming().flatten() {
            let server = UnixStream::connect(&to).unwrap();
            pump(stream.try_clone().unwrap(), server.try_clone().unwrap());
            pump(server, stream);
        }
    });
    go
}

#[test]
fn a_checkpoint_that_is_made_anew_while_a_backup_since_it_begins_fails_that() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "anew.vhd", "--size", "8M"]);
    let there = dir.join("there");
    fs::create_dir(&there).unwrap();
    ok(&there, &["create", "t.raw", "--size", "8M"]);
    let (served, target) = (serve(dir, &["anew.vhd"]), serve(&there, &["t.raw,name=t"]));
    let go = pass_on(&dir.join("slow"), &target.socket);
    let export = format!("nbd+unix:///t?socket={}", dir.join("slow").display());
    let client = Client::connect(&served.uri()).unwrap();
    let backup = |more: &[&str]| {
        let mut words = vec!["backup", "anew", &export, "--manifest", "m", "--wait"];
        words.extend(more);
        let mut command = spile();
        command.args(words).current_dir(dir).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let first = backup(&["--checkpoint", "c"]);
    go.send(()).unwrap();
    assert!(first.wait_with_output().unwrap().status.success());
    client.write(1 << 20, &[1; 4096], true).unwrap();
    // The target does not answer until the checkpoint is another one, which has not seen the write.
    fs::remove_file(dir.join("slow")).unwrap();
    let go = pass_on(&dir.join("slow"), &target.socket);
    let mut second = backup(&["--since", "c"]);
    std::thread::sleep(Duration::from_millis(500));
    ok(dir, &["checkpoint", "anew", "c", "--remove"]);
    std::thread::sleep(Duration::from_millis(1100));
    ok(dir, &["checkpoint", "anew", "c"]);
    assert!(second.try_wait().unwrap().is_none(), "it was to wait for its target");
    go.send(()).unwrap();
    let said = second.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(!said.status.success() && text.contains("was made anew while the backup began"), "{text}");
    assert!(served.terminate().success() && target.terminate().success());
}

#[test]
fn a_full_backup_takes_the_place_of_a_file_when_it_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "place.raw", 1);
    let served = serve(dir, &["place.raw"]);
    let made = ["backup", "place", "b.vhd", "--wait"];
    ok(dir, &made);
    let first = fs::read(dir.join("b.vhd")).unwrap();
    let said = fails(dir, 1, &made);
    assert!(said.contains("--overwrite"), "{said}");
    Client::connect(&served.uri()).unwrap().write(0, &[2; MIB], true).unwrap();
    // One that does not come to its end leaves the older one as it was.
    let slow = ["backup", "place", "b.vhd", "--overwrite", "--rate", "1M", "--background"];
    let id = json(dir, &slow)["jobs"][0]["id"].as_str().unwrap().to_owned();
    eventually("it copies", || state_of(dir, &id)["done_bytes"].as_u64() > Some(0));
    // Nobody else writes to what it is to take the place of.
    assert!(fails(dir, 1, &["resize", "b.vhd", "17M"]).contains("in use"));
    ok(dir, &["job", &id, "cancel"]);
    eventually("the job is cancelled", || state_of(dir, &id)["state"] == "cancelled");
    assert!(fs::read(dir.join("b.vhd")).unwrap() == first);
    ok(dir, &["verify", "b.vhd"]);
    eventually("nothing of it is left", || names(dir) == ["b.vhd", "b.vhd.spile-backup", "place.raw"]);
    ok(dir, &["backup", "place", "b.vhd", "--overwrite", "--wait"]);
    ok(dir, &["verify", "b.vhd"]);
    assert_eq!(bytes_of(dir, "b.vhd"), fs::read(dir.join("place.raw")).unwrap());
    // Neither the disk itself, nor what somebody uses, nor the parent of another image.
    assert!(fails(dir, 2, &["backup", "place", "place.raw", "--overwrite"]).contains("the disk itself"));
    ok(dir, &["create", "child.vhd", "--parent", "b.vhd"]);
    assert!(fails(dir, 1, &["backup", "place", "b.vhd", "--overwrite"]).contains("child.vhd"));
    assert!(fails(dir, 2, &["backup", "place", "x.vhd", "--overwrite", "--since", "x"]).contains("cannot be used"));
    assert!(served.terminate().success());
    // A disk that no server has, and a name that is free.
    fs::remove_file(dir.join("child.vhd")).unwrap();
    ok(dir, &["backup", "place.raw", "b.vhd", "--overwrite"]);
    ok(dir, &["backup", "place.raw", "c.raw", "--overwrite"]);
    assert_eq!(bytes_of(dir, "c.raw"), fs::read(dir.join("place.raw")).unwrap());
    assert!(fails(dir, 2, &["backup", "place.raw", "place.raw", "--overwrite"]).contains("the disk itself"));
    assert_eq!(names(dir), ["b.vhd", "b.vhd.spile-backup", "c.raw", "c.raw.spile-backup", "place.raw"]);
}

#[test]
fn a_backup_is_overwritten_by_one_of_the_same_disk_only_and_keeps_its_mode() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "host.root.raw", 1);
    raw(dir, "host.data.raw", 2);
    fs::create_dir(dir.join("kept")).unwrap();
    let served = serve(dir, &["host.root.raw", "host.data.raw"]);
    // A name is no file's: what follows its last dot belongs to it.
    ok(dir, &["backup", "host.root", "host.data", "kept", "--wait"]);
    let made = ["host.data.vhd", "host.data.vhd.spile-backup", "host.root.vhd", "host.root.vhd.spile-backup"];
    assert_eq!(names(&dir.join("kept")), made);
    fs::set_permissions(dir.join("kept/host.root.vhd"), fs::Permissions::from_mode(0o600)).unwrap();
    let said = fails(dir, 1, &["backup", "host.data", "kept/host.root.vhd", "--overwrite", "--wait"]);
    assert!(said.contains("another disk") && said.contains("host.root.raw"), "{said}");
    ok(dir, &["backup", "host.root.raw", "kept", "--overwrite", "--wait"]);
    let mode = fs::metadata(dir.join("kept/host.root.vhd")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(names(&dir.join("kept")), made);
    ok(dir, &["verify", "kept/host.root.vhd"]);
    assert!(served.terminate().success());
    // The same disk by another path to it.
    std::os::unix::fs::symlink(dir, dir.join("link")).unwrap();
    ok(dir, &["backup", "link/host.root.raw", "kept", "--overwrite"]);
    let said = fails(dir, 1, &["backup", "host.data.raw", "kept/host.root.vhd", "--overwrite"]);
    assert!(said.contains("another disk"), "{said}");
}

/// Events that nobody reads any more end who passes them on.
#[test]
fn who_follows_events_ends_with_its_reader() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "followed.raw", 1);
    let served = serve(dir, &["followed.raw"]);
    let mut command = spile();
    command.args(["events", "--follow", "--json"]).current_dir(dir).stdout(Stdio::piped());
    let mut follows = command.spawn().unwrap();
    let mut out = io::BufReader::new(follows.stdout.take().unwrap());
    ok(dir, &["backup", "followed", "one.vhd", "--wait"]);
    let mut line = String::new();
    io::BufRead::read_line(&mut out, &mut line).unwrap();
    assert!(line.contains("job_ended"), "{line}");
    drop(out);
    ok(dir, &["backup", "followed", "other.vhd", "--wait"]);
    eventually("it has ended", || follows.try_wait().unwrap().is_some());
    assert!(served.terminate().success());
}

#[test]
fn a_backup_writes_over_no_disk_that_a_server_of_this_host_has() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "guests-own.raw", 1);
    raw(dir, "other.raw", 2);
    let served = serve(dir, &["guests-own.raw"]);
    let uri = served.export("").to_string();
    let before = fs::read(dir.join("guests-own.raw")).unwrap();
    let said = fails(dir, 2, &["backup", "other.raw", &uri]);
    assert!(said.contains("guests-own") && said.contains("--overwrite"), "{said}");
    assert!(fs::read(dir.join("guests-own.raw")).unwrap() == before);
    ok(dir, &["backup", "other.raw", &uri, "--overwrite"]);
    assert!(fs::read(dir.join("guests-own.raw")).unwrap() == fs::read(dir.join("other.raw")).unwrap());
    assert!(served.terminate().success());
}

#[test]
fn a_backup_that_was_half_changed_is_known_and_the_checkpoint_of_one_that_failed_goes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "half.raw", 1);
    let served = serve(dir, &["half.raw"]);
    ok(dir, &["backup", "half", "b.raw", "--checkpoint", "one", "--wait"]);
    let client = Client::connect(&served.uri()).unwrap();
    client.write(0, &vec![2; 8 * MIB], false).unwrap();
    let slow = ["backup", "half", "b.raw", "--since", "one", "--checkpoint", "two", "--rate", "64k", "--background"];
    let id = json(dir, &slow)["jobs"][0]["id"].as_str().unwrap().to_owned();
    let is_marked = || fs::read_to_string(dir.join("b.raw.spile-backup")).unwrap().contains("under_way");
    eventually("the older backup is marked", is_marked);
    ok(dir, &["job", &id, "cancel"]);
    eventually("the job is cancelled", || state_of(dir, &id)["state"] == "cancelled");
    let names = |list: &Value| {
        list["checkpoints"].as_array().unwrap().iter().map(|one| one["name"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&json(dir, &["checkpoint", "half", "--list"])), ["one"]);
    for args in [&["verify", "b.raw"][..], &["restore", "b.raw", "new.raw"], &slow] {
        let said = fails(dir, 1, args);
        assert!(said.contains("half changed") && said.contains("make a full one"), "{args:?}: {said}");
    }
    ok(dir, &["backup", "half", "again.raw", "--checkpoint", "two", "--wait"]);
    drop(client);
    assert!(served.terminate().success());
    assert_eq!(bytes_of(dir, "again.raw"), fs::read(dir.join("half.raw")).unwrap());
}

#[test]
fn a_fleece_that_is_full_fails_the_backup_and_no_write() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let before = raw(dir, "full.raw", 1);
    let served = serve(dir, &["full.raw"]);
    let made = json(dir, &["backup", "full", "b.raw", "--rate", "64k", "--fleece-limit", "1M", "--background"]);
    let id = made["jobs"][0]["id"].as_str().unwrap().to_owned();
    let client = Client::connect(&served.uri()).unwrap();
    let bytes = vec![2; 4 * MIB];
    client.write(4 * MIB as u64, &bytes, false).unwrap();
    eventually("the backup fails", || state_of(dir, &id)["state"] == "failed");
    let error = state_of(dir, &id)["error"].clone();
    assert_eq!(error["kind"], "no_space");
    assert!(error["message"].as_str().unwrap().contains("the limit of the fleece"), "{error}");
    // With room enough the next one succeeds.
    ok(dir, &["backup", "full", "b.raw", "--wait"]);
    drop(client);
    assert!(served.terminate().success());
    let now = fs::read(dir.join("b.raw")).unwrap();
    assert!(now[..4 * MIB] == before[..4 * MIB] && now[4 * MIB..8 * MIB] == bytes);
    assert_eq!(names(dir), ["b.raw", "b.raw.spile-backup", "full.raw"]);
}

#[test]
fn a_backup_that_was_killed_while_it_got_its_name_is_made_by_the_same_command() {
    let dir = tempfile::tempdir().unwrap();
    let (faults, dir) = (dir.path(), &dir.path().join("disks"));
    fs::create_dir(dir).unwrap();
    raw(dir, "killed.raw", 1);
    let inode = fs::metadata(dir).unwrap().ino().to_string();
    fs::write(faults.join("kill-at-sync-of"), &inode).unwrap();
    let mut killed = faulty_sync(faults);
    let ended = killed.args(["backup", "killed.raw", "b.vhd"]).current_dir(dir).status().unwrap();
    assert_eq!(ended.signal(), Some(Signal::SIGKILL as i32));
    assert_eq!(names(dir), ["b.vhd.spile-backup", "killed.raw"], "no backup that nothing is known of");
    ok(dir, &["backup", "killed.raw", "b.vhd"]);
    ok(dir, &["verify", "b.vhd"]);
    // What is whole is lost to nobody.
    assert!(fails(dir, 1, &["backup", "killed.raw", "b.vhd"]).contains("choose another name"));
    ok(dir, &["verify", "b.vhd"]);
    assert_eq!(names(dir), ["b.vhd", "b.vhd.spile-backup", "killed.raw"]);
}
