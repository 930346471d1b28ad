//! Checkpoints by the commands: whatever happens to a disk or its server, each block that differs is among the changed ones.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::guests::{self, Load, rest_of_stderr};
use crate::common::mount::Mount;
use crate::common::nbd::Client;
use crate::common::{Served, eventually, fails, faulty_sync, json, ok, spile};
use nix::sys::signal::Signal;
use serde_json::Value;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 64 << 10;
const SIZE: u64 = 64 * MIB;

/// Serves `args` with a control socket in the folder of such sockets, where commands look for it.
fn serve(dir: &Path, args: &[&str]) -> Served {
    let mut served = None;
    // The kernel may keep the disk of a server that was killed for longer than the next one waits.
    eventually("a server starts", || {
        let mut command = spile();
        command.arg("serve").args(args).args(["--nbd", "unix:n"]).current_dir(dir);
        let is_busy =
            |said: &str| said.contains("in use by another process") || said.contains("another server listens");
        served = Served::spawn(&mut command, dir.join("n")).map_err(|said| assert!(is_busy(&said), "{said}")).ok();
        served.is_some()
    });
    served.unwrap()
}

/// What the disk holds, read by a command.
fn content(dir: &Path, disk: &str) -> Vec<u8> {
    ok(dir, &["convert", disk, "content.raw"]);
    let bytes = fs::read(dir.join("content.raw")).unwrap();
    fs::remove_file(dir.join("content.raw")).unwrap();
    bytes
}

fn changed(dir: &Path, disk: &str, since: &str) -> Value {
    json(dir, &["changed", disk, "--since", since])
}

/// The numbers of the blocks that an answer has.
fn blocks(changed: &Value) -> Vec<u64> {
    let number = |value: &Value| value.as_u64().unwrap();
    let mut blocks = Vec::new();
    for range in changed["ranges"].as_array().unwrap() {
        let start = number(&range["offset_bytes"]);
        blocks.extend(start / BLOCK..(start + number(&range["length_bytes"])).div_ceil(BLOCK));
    }
    assert_eq!(number(&changed["changed_bytes"]), blocks.len() as u64 * BLOCK);
    blocks
}

/// Each block that differs counts as changed.
fn check_covers(before: &[u8], after: &[u8], changed: &Value) {
    let blocks = blocks(changed);
    let mut differ = 0;
    for block in 0..after.len() as u64 / BLOCK {
        let bytes = (block * BLOCK) as usize..((block + 1) * BLOCK) as usize;
        if before.get(bytes.clone()) != Some(&after[bytes]) {
            differ += 1;
            assert!(blocks.contains(&block), "block {block} differs and is not among those that have changed");
        }
    }
    assert!(differ > 0, "nothing differs: the test shows nothing");
}

fn is_everything(changed: &Value) -> bool {
    changed["changed_bytes"] == changed["virtual_size_bytes"] && changed["warning"].is_string()
}

/// Writes to one half of the disk's blocks until the server is gone. Returns how many writes were answered.
fn writer(uri: spile::uri::NbdUri, written: Arc<AtomicU64>) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let client = Client::connect(&uri).unwrap();
        let mut place = 1_u64;
        loop {
            place = place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (place >> 33) % (SIZE / 2 / 4096) * 4096;
            let data = [place as u8 | 1; 4096];
            if client.write(at, &data, false).is_err() {
                return;
            }
            if written.fetch_add(1, Ordering::Relaxed) % 64 == 63 && client.flush().is_err() {
                return;
            }
        }
    })
}

#[test]
fn what_was_written_when_a_server_is_killed_counts_as_changed() {
    for disk in ["kept.raw", "kept.vhd"] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        ok(dir, &["create", disk, "--size", "64M"]);
        let mut before = Vec::new();
        for round in 0..3 {
            let served = serve(dir, &[disk]);
            if round == 0 {
                served_client(&served).write(0, &[9; 4096], true).unwrap();
                ok(dir, &["checkpoint", "kept", "monday"]);
                before = content(dir, disk);
            }
            let written = Arc::new(AtomicU64::new(0));
            let writer = writer(served.uri(), written.clone());
            eventually("writes", || written.load(Ordering::Relaxed) > 100);
            if round == 1 {
                // A plain snapshot, and another checkpoint while it works.
                if disk.ends_with("vhd") {
                    ok(dir, &["snapshot", "kept", "--name", "snap.vhd"]);
                }
                ok(dir, &["checkpoint", "kept", "tuesday"]);
            }
            served.kill();
            writer.join().unwrap();
            // By a command, and by the next server.
            eventually("the disk is free", || !fails_busy(dir, disk));
            let answer = changed(dir, disk, "monday");
            assert!(answer["warning"].is_null(), "{answer}");
            let after = content(dir, disk);
            check_covers(&before, &after, &answer);
            assert!(blocks(&answer).iter().all(|block| *block < SIZE / 2 / BLOCK), "blocks that nobody wrote to");
            let served = serve(dir, &[disk]);
            assert_eq!(blocks(&changed(dir, "kept", "monday")), blocks(&answer));
            if round == 2 {
                assert!(blocks(&changed(dir, "kept", "tuesday")).len() <= blocks(&answer).len());
            }
            assert!(served.terminate().success());
        }
        assert_eq!(json(dir, &["checkpoint", disk, "--list"])["checkpoints"].as_array().unwrap().len(), 2);
    }
}

fn served_client(served: &Served) -> Client {
    Client::connect(&served.uri()).unwrap()
}

fn fails_busy(dir: &Path, disk: &str) -> bool {
    let output = crate::common::run(dir, &["checkpoint", disk, "--list"]);
    !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("in use")
}

#[test]
fn checkpoints_go_over_to_a_successor_under_load() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "over.vhd", "--size", "64M"]);
    let before = content(dir, "over.vhd");
    let args = ["over.vhd", "--vhost-user", "v"];
    let served = guests::serve(dir, &args);
    ok(dir, &["checkpoint", "c", "a"]);
    let mut load = Load::start(dir, "v", &["--span", "16M"]);
    load.goes_on(&served);
    let next = guests::succeed(dir, &args, served);
    load.goes_on(&next);
    ok(dir, &["checkpoint", "c", "b"]);
    let next = guests::succeed(dir, &args, next);
    load.goes_on(&next);
    assert_eq!(load.end(), 0);
    assert_eq!(json(dir, &["show", "c"])["checkpoints"], serde_json::json!(["a", "b"]));
    let answer = changed(dir, "c", "a");
    assert!(answer["warning"].is_null() && changed(dir, "c", "b")["warning"].is_null(), "{answer}");
    assert!(next.terminate().success());
    check_covers(&before, &content(dir, "over.vhd"), &answer);
    assert!(blocks(&answer).iter().all(|block| *block < 16 * MIB / BLOCK));
    // In order: the answer is the same, and the second removal leaves nothing.
    assert_eq!(blocks(&changed(dir, "over.vhd", "a")), blocks(&answer));
    ok(dir, &["checkpoint", "over.vhd", "a", "--remove"]);
    ok(dir, &["checkpoint", "over.vhd", "b", "--remove"]);
    assert!(!dir.join(".over.vhd.spile-changes").exists());
    assert!(fails(dir, 1, &["changed", "over.vhd", "--since", "a"]).contains("no checkpoint"));
}

/// A disk that nobody serves, with a checkpoint and one block that was written since.
fn offline(dir: &Path, disk: &str) {
    ok(dir, &["create", disk, "--size", "64M"]);
    ok(dir, &["checkpoint", disk, "a"]);
    let served = serve(dir, &[disk]);
    served_client(&served).write(3 * BLOCK, &[7; 4096], true).unwrap();
    assert!(served.terminate().success());
    assert_eq!(blocks(&changed(dir, disk, "a")), [3]);
}

#[test]
fn what_leaves_the_content_as_it_is_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    offline(dir, "d.vhd");
    let check = |what: &str, expected: &[u64]| {
        let answer = changed(dir, "d.vhd", "a");
        assert!(answer["warning"].is_null() && blocks(&answer) == expected, "{what}: {answer}");
    };
    ok(dir, &["snapshot", "d.vhd", "--name", "s.vhd"]);
    check("a snapshot", &[3]);
    let served = serve(dir, &["d.vhd"]);
    served_client(&served).write(9 * BLOCK, &[7; 4096], true).unwrap();
    ok(dir, &["coalesce", "d", "--wait"]);
    assert!(served.terminate().success());
    check("a merge by a server", &[3, 9]);
    ok(dir, &["snapshot", "d.vhd", "--name", "t.vhd"]);
    ok(dir, &["flatten", "d.vhd"]);
    check("a flatten", &[3, 9]);
    ok(dir, &["resize", "d.vhd", "65M"]);
    let new: Vec<u64> = (64 * MIB / BLOCK..65 * MIB / BLOCK).collect();
    check("a new size", &[&[3, 9], &new[..]].concat());
    // A clone and a copy have no checkpoints.
    ok(dir, &["clone", "t.vhd", "clone.vhd"]);
    assert!(fails(dir, 1, &["changed", "clone.vhd", "--since", "a"]).contains("no checkpoint"));
    ok(dir, &["delete", "d.vhd"]);
    assert!(!dir.join(".d.vhd.spile-changes").exists());
}

#[test]
fn what_may_have_changed_everything_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    type Change<'a> = (&'a str, &'a dyn Fn(&str));
    let changes: [Change<'_>; 3] = [
        ("another program", &|disk| {
            File::options().write(true).open(dir.join(disk)).unwrap().write_all_at(&[1], 0).unwrap()
        }),
        ("another file in its place", &|disk| {
            fs::copy(dir.join(disk), dir.join("copy")).unwrap();
            fs::rename(dir.join("copy"), dir.join(disk)).unwrap();
        }),
        ("a file of changed blocks that is damaged", &|disk| {
            let side = dir.join(format!(".{disk}.spile-changes"));
            File::options().write(true).open(side).unwrap().write_all_at(&[0xff; 4096], 36 << 10).unwrap();
        }),
    ];
    for (number, (what, change)) in changes.iter().enumerate() {
        let disk = format!("e{number}.raw");
        offline(dir, &disk);
        change(&disk);
        let answer = changed(dir, &disk, "a");
        assert!(is_everything(&answer), "{what}: {answer}");
        assert!(is_everything(&changed(dir, &disk, "a")), "{what}: the first answer has made it forget");
        // From the next checkpoint on it is known again.
        ok(dir, &["checkpoint", &disk, "b"]);
        assert_eq!(changed(dir, &disk, "b")["changed_bytes"], 0, "{what}");
    }
}

/// What only the old leaf has, or only the images under the new one, counts as changed: no more, and no less.
#[test]
fn a_disk_that_goes_back_still_knows_what_has_changed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    offline(dir, "r.vhd");
    let check = |what: &str, since: &str, expected: &[u64]| {
        let answer = changed(dir, "r.vhd", since);
        assert!(answer["warning"].is_null() && blocks(&answer) == expected, "{what}: {answer}");
    };
    let write = |block: u64| {
        let served = serve(dir, &["r.vhd"]);
        served_client(&served).write(block * BLOCK, &[7; 4096], true).unwrap();
        assert!(served.terminate().success());
    };
    ok(dir, &["snapshot", "r.vhd", "--name", "s.vhd"]);
    write(40);
    ok(dir, &["checkpoint", "r.vhd", "b"]);
    write(50);
    // The leaf has blocks 40 and 50: since b, both are other than they were.
    ok(dir, &["revert", "r.vhd", "s.vhd", "--keep", "t.vhd"]);
    check("back to s", "a", &[3, 40, 50]);
    check("back to s", "b", &[40, 50]);
    ok(dir, &["checkpoint", "r.vhd", "c"]);
    check("a new checkpoint", "c", &[]);
    write(60);
    // And forth again, to a snapshot that is none of the leaf's parents.
    ok(dir, &["revert", "r.vhd", "t.vhd", "--discard"]);
    check("on to t", "c", &[40, 50, 60]);
    assert!(fails(dir, 2, &["revert", "r.vhd", "r.vhd", "--discard"]).contains("the disk itself"));
    check("nothing", "c", &[40, 50, 60]);
    // A shorter one, and then it grows again: what was cut off is lost.
    ok(dir, &["checkpoint", "r.vhd", "e"]);
    ok(dir, &["clone", "s.vhd", "short.vhd"]);
    ok(dir, &["resize", "short.vhd", "2M", "--shrink", "--discard"]);
    ok(dir, &["revert", "r.vhd", "short.vhd", "--discard"]);
    ok(dir, &["resize", "r.vhd", "64M"]);
    let answer = changed(dir, "r.vhd", "e");
    assert!((32..1024).all(|block| blocks(&answer).contains(&block)), "{answer}");
    ok(dir, &["revert", "r.vhd", "t.vhd", "--discard"]);
    // An image without a parent in common.
    ok(dir, &["create", "other.vhd", "--size", "64M"]);
    ok(dir, &["revert", "r.vhd", "other.vhd", "--discard"]);
    let answer = changed(dir, "r.vhd", "c");
    assert!([3, 40, 50, 60].iter().all(|block| blocks(&answer).contains(block)), "{answer}");
}

#[test]
fn a_disk_that_was_made_shorter_still_knows_what_has_changed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for disk in ["z.raw", "z.vhd"] {
        offline(dir, disk);
        let size = 63 * MIB + 4096;
        ok(dir, &["resize", disk, &size.to_string(), "--shrink"]);
        let answer = changed(dir, disk, "a");
        let ranges = answer["ranges"].as_array().unwrap();
        assert!(answer["warning"].is_null() && ranges.len() == 2, "{disk}: {answer}");
        // The block in which the disk ends now.
        assert_eq!((&ranges[0]["offset_bytes"], &ranges[1]["offset_bytes"]), (&(3 * BLOCK).into(), &(63 * MIB).into()));
        ok(dir, &["resize", disk, "64M"]);
        let answer = changed(dir, disk, "a");
        let new: Vec<u64> = (63 * MIB / BLOCK..64 * MIB / BLOCK).collect();
        assert_eq!(blocks(&answer), [&[3], &new[..]].concat(), "{disk}: {answer}");
    }
}

/// After a process that was killed, the image is another file, by a command or by hand.
#[test]
fn another_file_is_noticed_after_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for way in ["revert", "convert", "copy", "trust"] {
        let disk = format!("{way}.vhd");
        offline(dir, &disk);
        ok(dir, &["snapshot", &disk, "--name", &format!("{way}-s")]);
        let served = serve(dir, &[&disk]);
        served_client(&served).write(5 * BLOCK, &[7; 4096], true).unwrap();
        served.kill();
        eventually("the disk is free", || !fails_busy_to_read(dir, &disk));
        match way {
            "revert" => drop(ok(dir, &["revert", &disk, &format!("{way}-s.vhd"), "--discard"])),
            "convert" => {
                ok(dir, &["create", "small.raw", "--size", "1M"]);
                ok(dir, &["convert", "small.raw", &disk, "--onto"]);
            }
            "trust" => {
                fs::copy(dir.join(format!("{way}-s.vhd")), dir.join("other.vhd")).unwrap();
                ok(dir, &["rebase", &disk, "--parent", "other.vhd", "--trust"]);
            }
            _ => {
                fs::copy(dir.join(&disk), dir.join("copy")).unwrap();
                fs::rename(dir.join("copy"), dir.join(&disk)).unwrap();
            }
        }
        match way {
            // They are removed before the image is written to.
            "convert" | "trust" => {
                assert!(fails(dir, 1, &["changed", &disk, "--since", "a"]).contains("no checkpoint"))
            }
            "revert" => assert_eq!(blocks(&changed(dir, &disk, "a")), [3, 5], "the server's write, which is lost"),
            _ => assert!(is_everything(&changed(dir, &disk, "a")), "{way}"),
        }
    }
}

/// True while the kernel keeps the files of a process that was killed. The checkpoints are not looked at.
fn fails_busy_to_read(dir: &Path, disk: &str) -> bool {
    let output = crate::common::run(dir, &["info", disk]);
    !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("in use")
}

#[test]
fn a_disk_whose_changes_cannot_be_noted_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    offline(dir, "f.raw");
    let mut command = faulty_sync(dir);
    command.args(["serve", "f.raw", "--nbd", "unix:n", "--control", "c"]).current_dir(dir);
    let mut served = Served::spawn(&mut command, dir.join("n")).unwrap();
    let client = served_client(&served);
    fs::write(dir.join("fail-sync"), "").unwrap();
    // The first write to an area of the disk in this process waits until that is durably noted.
    client.write(20 * BLOCK, &[7; 4096], false).unwrap();
    assert!(!dir.join("fail-sync").exists(), "no sync has failed");
    client.flush().unwrap();
    client.write(30 * BLOCK, &[7; 4096], true).unwrap();
    assert!(is_everything(&changed(dir, "c", "a")));
    let shown = json(dir, &["show", "c"]);
    assert!(shown["checkpoints_lost"].as_str().unwrap().contains("sync"), "{shown}");
    assert!(ok(dir, &["show", "c"]).contains("checkpoints are lost"));
    assert!(!dir.join(".f.raw.spile-changes").exists(), "a power cut could bring back what is too little");
    // A new one begins anew.
    ok(dir, &["checkpoint", "c", "b"]);
    client.write(40 * BLOCK, &[7; 4096], true).unwrap();
    assert_eq!(blocks(&changed(dir, "c", "b")), [40]);
    drop(client);
    served.signal(Signal::SIGTERM);
    assert!(served.wait().success());
    let said = rest_of_stderr(&mut served);
    assert!(said.contains("not noted any more") && said.contains("f.raw"), "{said}");
    assert_eq!(blocks(&changed(dir, "f.raw", "b")), [40]);
}

#[test]
fn a_first_checkpoint_for_which_there_is_no_space_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "f.raw", "--size", "64M"]);
    let mut command = faulty_sync(dir);
    command.args(["serve", "f.raw", "--nbd", "unix:n", "--control", "c"]).current_dir(dir);
    let served = Served::spawn(&mut command, dir.join("n")).unwrap();
    let client = served_client(&served);
    client.write(0, &[1; 4096], true).unwrap();
    // Of the file's first header, and of its bits; one of the disk itself comes next, and then the checkpoint is noted.
    for syncs in [0, 1, 2, 4, 5] {
        fs::write(dir.join("full-sync"), syncs.to_string()).unwrap();
        let said = fails(dir, 1, &["checkpoint", "c", "a"]);
        assert!(!dir.join("full-sync").exists() && said.contains("No space left"), "{syncs}: {said}");
        assert!(!dir.join(".f.raw.spile-changes").exists(), "{syncs}");
        assert_eq!(json(dir, &["checkpoint", "c", "--list"])["checkpoints"].as_array().unwrap().len(), 0);
        client.write(syncs * BLOCK, &[2; 4096], true).unwrap();
    }
    ok(dir, &["checkpoint", "c", "a"]);
    client.write(20 * BLOCK, &[7; 4096], true).unwrap();
    assert_eq!(blocks(&changed(dir, "c", "a")), [20]);
    drop(client);
    assert!(served.terminate().success());
    assert_eq!(blocks(&changed(dir, "f.raw", "a")), [20]);
}

#[test]
fn checkpoints_that_find_no_space_at_the_new_place_stay_behind_and_new_ones_are_made() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let test = "checkpoints_that_find_no_space_at_the_new_place_stay_behind_and_new_ones_are_made";
    let Some(mount) = Mount::new(dir, 32 * MIB, test) else { return };
    ok(dir, &["create", "f.raw", "--size", "512G"]);
    let served = guests::serve(dir, &["f.raw", "--nbd", "unix:n"]);
    let client = Client::connect(&guests::nbd(dir, "")).unwrap();
    client.write(0, &[1; 4096], true).unwrap();
    // 16 MiB of bits.
    ok(dir, &["checkpoint", "c", "a", "--block-bytes", "4K"]);
    let ballast = File::create(mount.path.join("ballast")).unwrap();
    rustix::fs::fallocate(&ballast, rustix::fs::FallocateFlags::empty(), 0, 12 * MIB).unwrap();
    let new = mount.path.join("new.raw");
    ok(dir, &["move", "c", "--to", new.to_str().unwrap(), "--wait"]);
    assert!(!mount.path.join(".new.raw.spile-changes").exists() && new.exists());
    assert!(!dir.join(".f.raw.spile-changes").exists(), "nobody needs it any more");
    assert_eq!(json(dir, &["checkpoint", "c", "--list"])["checkpoints"].as_array().unwrap().len(), 0);
    drop(ballast);
    fs::remove_file(mount.path.join("ballast")).unwrap();
    ok(dir, &["checkpoint", "c", "a"]);
    client.write(20 * BLOCK, &[7; 4096], true).unwrap();
    assert_eq!(blocks(&changed(dir, "c", "a")), [20]);
    drop(client);
    assert!(served.terminate().success());
    assert_eq!(blocks(&changed(dir, new.to_str().unwrap(), "a")), [20]);
}

#[test]
fn a_disk_opens_when_the_storage_of_its_changes_is_full() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    offline(dir, "f.raw");
    fs::write(dir.join("full-sync"), "").unwrap();
    let mut command = faulty_sync(dir);
    command.args(["serve", "f.raw", "--nbd", "unix:n", "--control", "c"]).current_dir(dir);
    let mut served = Served::spawn(&mut command, dir.join("n")).unwrap();
    assert!(!dir.join("full-sync").exists(), "no sync has failed");
    served_client(&served).write(20 * BLOCK, &[7; 4096], true).unwrap();
    assert!(is_everything(&changed(dir, "c", "a")));
    assert_eq!(json(dir, &["checkpoint", "c", "--list"])["checkpoints"][0]["changed_bytes"], SIZE);
    let shown = json(dir, &["show", "c"]);
    assert!(shown["checkpoints_lost"].is_string(), "{shown}");
    assert!(!dir.join(".f.raw.spile-changes").exists(), "the next process would believe it");
    ok(dir, &["checkpoint", "c", "b"]);
    served_client(&served).write(40 * BLOCK, &[7; 4096], true).unwrap();
    assert_eq!(blocks(&changed(dir, "c", "b")), [40]);
    served.signal(Signal::SIGTERM);
    assert!(served.wait().success());
    let said = rest_of_stderr(&mut served);
    assert!(said.contains("checkpoints are lost"), "{said}");
}

#[test]
fn whoever_only_reads_is_told_what_has_changed_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    offline(dir, "r.vhd");
    ok(dir, &["checkpoint", "r.vhd", "b"]);
    let is_right = |disk: &str| {
        assert_eq!(blocks(&changed(dir, disk, "a")), [3], "{disk}");
        let list = json(dir, &["checkpoint", disk, "--list"]);
        let told: Vec<_> = list["checkpoints"].as_array().unwrap().iter().map(|one| &one["changed_bytes"]).collect();
        assert_eq!(told, [&Value::from(BLOCK), &Value::from(0)], "{disk}");
    };
    let side = dir.join(".r.vhd.spile-changes");
    let before = fs::read(&side).unwrap();
    is_right("r.vhd");
    let served = serve(dir, &["r.vhd,read-only,name=r"]);
    is_right("r");
    // Several may read it.
    is_right("r.vhd");
    let refused = fails(dir, 1, &["checkpoint", "r", "c"]);
    assert!(refused.contains("reading only"), "{refused}");
    assert!(served.terminate().success());
    assert_eq!(fs::read(&side).unwrap(), before);
    // After a process that was killed, too.
    let served = serve(dir, &["r.vhd"]);
    served_client(&served).write(9 * BLOCK, &[7; 4096], true).unwrap();
    served.kill();
    eventually("the disk is free", || !fails_busy(dir, "r.vhd"));
    let before = fs::read(&side).unwrap();
    let served = serve(dir, &["r.vhd,read-only,name=r"]);
    assert_eq!((blocks(&changed(dir, "r", "a")), blocks(&changed(dir, "r", "b"))), (vec![3, 9], vec![9]));
    assert!(served.terminate().success());
    assert_eq!(fs::read(&side).unwrap(), before);
}

#[test]
fn a_paused_disk_gets_no_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    offline(dir, "p.raw");
    let served = serve(dir, &["p.raw"]);
    let pause = json(dir, &["pause", "p", "--at-most", "10m"]);
    let before = fs::read(dir.join(".p.raw.spile-changes")).unwrap();
    for args in [&["checkpoint", "p", "b"][..], &["checkpoint", "p", "a", "--remove"]] {
        let said = fails(dir, 1, args);
        assert!(said.contains("a pause of the disk"), "{said}");
    }
    assert!(fs::read(dir.join(".p.raw.spile-changes")).unwrap() == before, "its files have changed in the pause");
    assert_eq!(blocks(&changed(dir, "p", "a")), [3]);
    ok(dir, &["resume", "p", "--pause", pause["id"].as_str().unwrap()]);
    ok(dir, &["checkpoint", "p", "b"]);
    assert!(served.terminate().success());
}

#[test]
fn with_the_last_checkpoint_the_file_goes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    offline(dir, "l.raw");
    let served = serve(dir, &["l.raw"]);
    let side = dir.join(".l.raw.spile-changes");
    assert!(side.exists());
    ok(dir, &["checkpoint", "l", "a", "--remove"]);
    assert!(!side.exists());
    served_client(&served).write(0, &[7; 4096], true).unwrap();
    // Nothing is left of it, the size of its blocks neither.
    ok(dir, &["checkpoint", "l", "b", "--block-bytes", "4K"]);
    served_client(&served).write(8192, &[7; 4096], true).unwrap();
    assert_eq!(changed(dir, "l", "b")["ranges"][0]["offset_bytes"], 8192);
    assert!(served.terminate().success());
    assert_eq!(changed(dir, "l.raw", "b")["changed_bytes"], 4096);
}

#[test]
fn a_file_that_has_come_in_the_place_of_the_checkpoints_stays() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    offline(dir, "p.raw");
    let served = serve(dir, &["p.raw"]);
    let side = dir.join(".p.raw.spile-changes");
    // As when the disk was moved away and has come back.
    fs::write(dir.join("other"), "of another disk").unwrap();
    fs::rename(dir.join("other"), &side).unwrap();
    ok(dir, &["checkpoint", "p", "a", "--remove"]);
    assert!(served.terminate().success());
    assert_eq!(fs::read(&side).expect("it is there"), b"of another disk");
}

#[test]
fn a_list_says_of_each_checkpoint_what_has_changed_since() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    // Its last block is a short one, and there are more blocks than are counted in one go.
    let size = (300 << 20) + 512;
    ok(dir, &["create", "m.raw", "--size", &size.to_string()]);
    let served = serve(dir, &["m.raw"]);
    let client = served_client(&served);
    for number in 0..7_u64 {
        ok(dir, &["checkpoint", "m", &number.to_string(), "--block-bytes", "4K"]);
        for place in [number * 7 * 4096, (290 << 20) + number * 4096, size - 512 * u64::from(number > 3) - 4096] {
            client.write(place / 512 * 512, &[7; 512], false).unwrap();
        }
    }
    client.write(size - 512, &[7; 512], true).unwrap();
    let list = json(dir, &["checkpoint", "m", "--list"]);
    for number in 0..7 {
        let told = &list["checkpoints"][number]["changed_bytes"];
        assert_eq!(*told, changed(dir, "m", &number.to_string())["changed_bytes"], "{number}");
        assert!(told.as_u64().unwrap() % 4096 == 512, "{told}");
    }
    drop(client);
    assert!(served.terminate().success());
}

#[test]
fn refusals_say_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "x.raw", "--size", "1M"]);
    ok(dir, &["checkpoint", "x.raw", "a", "--block-bytes", "4K"]);
    for (args, says) in [
        (&["checkpoint", "x.raw", "a"][..], "already"),
        (&["checkpoint", "x.raw", ""][..], "cannot be the name"),
        (&["checkpoint", "x.raw", "b", "--block-bytes", "64K"][..], "4096 bytes already"),
        (&["checkpoint", "x.raw", "b", "--remove"][..], "there are: a"),
        (&["changed", "x.raw", "--since", "b"][..], "there are: a"),
    ] {
        let output = crate::common::run(dir, args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(says), "{args:?}: {said}");
    }
    // XenServer's log of it: a header of 48 bytes, and a bit for each 64 KiB. The file must be new.
    let log = ["changed", "x.raw", "--since", "a", "--cbtlog", "log"];
    ok(dir, &log);
    assert_eq!(
        fs::read(dir.join("log")).unwrap()[32..],
        [&[1, 0, 0, 0, 0, 0, 0, 0][..], &MIB.to_le_bytes(), &[0; 2]].concat()
    );
    assert!(fails(dir, 1, &log).contains("already"));
    let list = json(dir, &["checkpoint", "x.raw", "--list"]);
    assert_eq!((&list["block_bytes"], &list["checkpoints"][0]["name"]), (&4096.into(), &"a".into()));
    assert_eq!(list["checkpoints"][0]["changed_bytes"], 0);
}
