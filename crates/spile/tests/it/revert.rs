//! The way back to a snapshot by the commands: of disks that are served and of those that nobody uses.

use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::host::serve;
use crate::common::nbd::Client;
use crate::common::{Served, eventually, fails, json, ok};
use crate::snapshot::{chain, images, raw_of, with_snapshot};

const BLOCK: u64 = 4096;

#[test]
fn a_disk_goes_back_to_its_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    with_snapshot(dir);
    let first = |disk: &str| raw_of(dir, disk, "out.raw")[0];
    assert_eq!((first("a.vhd"), first("s.vhd")), (2, 1));
    fails(dir, 2, &["revert", "a.vhd", "s.vhd"]);
    let kept = json(dir, &["revert", "a.vhd", "s.vhd", "--keep", "t.vhd"]);
    assert!(kept["kept_path"].as_str().unwrap().ends_with("/t.vhd"));
    assert_eq!((first("a.vhd"), first("t.vhd"), first("s.vhd")), (1, 2, 1));
    assert_eq!(images(dir), ["a.vhd", "s.vhd", "t.vhd"]);
    assert!(fails(dir, 2, &["revert", "a.vhd", "a.vhd", "--discard"]).contains("the disk itself"));
    assert!(fails(dir, 2, &["rebase", "a.vhd", "--parent", "a.vhd"]).contains("its own parent"));
    // Forward again, to the branch that was kept.
    ok(dir, &["revert", "a.vhd", "t", "--discard"]);
    assert_eq!((first("a.vhd"), chain(dir, "a.vhd")), (2, vec!["a.vhd".into(), "t.vhd".into(), "s.vhd".into()]));
}

#[test]
fn a_served_disk_goes_back_while_nobody_is_connected() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    with_snapshot(dir);
    let served = serve(dir, &["a.vhd,name=back-idle"]);
    let first = |served: &crate::common::Served| {
        let mut byte = [0];
        Client::connect(&served.uri()).unwrap().read(0, &mut byte).unwrap();
        byte[0]
    };
    assert_eq!(first(&served), 2);
    ok(dir, &["checkpoint", "back-idle", "c"]);
    // By the disk's name, and the snapshot's.
    eventually("the client has gone", || {
        crate::common::run(dir, &["revert", "back-idle", "s", "--discard"]).status.success()
    });
    assert_eq!(first(&served), 1);
    let shown = json(dir, &["show", "back-idle"]);
    let path = |number: usize| shown["layers"][number]["path"].as_str().unwrap().to_owned();
    assert!(
        path(0).ends_with("/a.vhd") && path(1).ends_with("/s.vhd") && shown["layers"].as_array().unwrap().len() == 2
    );
    let changed = json(dir, &["changed", "back-idle", "--since", "c"]);
    assert_eq!((&changed["ranges"][0]["offset_bytes"], &changed["warning"]), (&0.into(), &serde_json::Value::Null));
    // What it gets from then on is its own, also after the server was killed.
    Client::connect(&served.uri()).unwrap().write(BLOCK, &[3; 4096], true).unwrap();
    served.kill();
    let bytes = raw_of(dir, "a.vhd", "out.raw");
    assert_eq!((bytes[0], bytes[BLOCK as usize], chain(dir, "a.vhd")), (1, 3, vec!["a.vhd".into(), "s.vhd".into()]));
    assert_eq!(images(dir), [".a.vhd.spile-changes", "a.vhd", "s.vhd"]);
}

#[test]
fn a_disk_in_use_goes_back_only_by_an_order_that_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    with_snapshot(dir);
    let served = serve(dir, &["a.vhd,name=back-used"]);
    let client = Client::connect(&served.uri()).unwrap();
    let first = || {
        let mut byte = [0];
        client.read(0, &mut byte).unwrap();
        byte[0]
    };
    assert_eq!(first(), 2);
    let said = fails(dir, 1, &["revert", "back-used", "s", "--discard"]);
    assert!(said.contains("in use by 1 connection") && said.contains("--in-use"), "{said}");
    assert_eq!((first(), images(dir)), (2, vec!["a.vhd".into(), "s.vhd".into()]));
    let went = json(dir, &["revert", "back-used", "s", "--keep", "t.vhd", "--in-use"]);
    assert!(went["kept_path"].as_str().unwrap().ends_with("/t.vhd") && went["trouble"].is_null(), "{went}");
    assert_eq!(first(), 1);
    // What it held can be read and cloned at once; and it can be gone on to.
    assert_eq!(raw_of(dir, "t.vhd", "out.raw")[0], 2);
    ok(dir, &["clone", "t.vhd", "u.vhd"]);
    client.write(0, &[5; 4096], true).unwrap();
    ok(dir, &["revert", "back-used", "t", "--discard", "--in-use"]);
    assert_eq!(first(), 2);
    drop(client);
    assert!(served.terminate().success());
    assert_eq!(images(dir), ["a.vhd", "s.vhd", "t.vhd", "u.vhd"]);
    assert_eq!(chain(dir, "a.vhd"), ["a.vhd", "t.vhd", "s.vhd"]);
    assert_eq!(raw_of(dir, "a.vhd", "out.raw")[0], 2);
}

/// Each write that was answered is in what the disk held, or in what it holds.
#[test]
fn no_write_falls_between_what_a_disk_held_and_what_it_holds() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "w.vhd", "--size", "256M"]);
    ok(dir, &["snapshot", "w.vhd", "--name", "empty.vhd"]);
    let served = serve(dir, &["w.vhd,name=back-written"]);
    let (written, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let writer = {
        let (client, written, is_over) = (Client::connect(&served.uri()).unwrap(), written.clone(), is_over.clone());
        std::thread::spawn(move || {
            for number in 0..256 * 256 {
                if is_over.load(Ordering::SeqCst) {
                    return;
                }
                client.write(number * BLOCK, &[1; BLOCK as usize], false).unwrap();
                written.store(number + 1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_micros(200));
            }
        })
    };
    let more = |than: u64| eventually("the writer goes on", || written.load(Ordering::SeqCst) > than);
    more(50);
    json(dir, &["revert", "back-written", "empty", "--keep", "before.vhd", "--in-use"]);
    more(written.load(Ordering::SeqCst) + 50);
    is_over.store(true, Ordering::SeqCst);
    writer.join().unwrap();
    served.kill();
    let (held, holds) = (raw_of(dir, "before.vhd", "out.raw"), raw_of(dir, "w.vhd", "out.raw"));
    let has = |bytes: &[u8], number: u64| bytes[(number * BLOCK) as usize] == 1;
    let written = written.load(Ordering::SeqCst);
    let before = (0..written).take_while(|number| has(&held, *number)).count() as u64;
    assert!(before >= 50 && before < written - 40, "{before} of {written}");
    for number in 0..written {
        assert_eq!((has(&held, number), has(&holds, number)), (number < before, number >= before), "write {number}");
    }
}

/// Checkpoints wait for flushes, and flushes for the way back: neither may wait for the other.
#[test]
fn a_disk_goes_back_while_it_gets_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    with_snapshot(dir);
    let served = serve(dir, &["a.vhd,name=back-checkpoints"]);
    ok(dir, &["checkpoint", "back-checkpoints", "first"]);
    let client = Client::connect(&served.uri()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..12 {
                ok(dir, &["checkpoint", "back-checkpoints", &format!("c{number}")]);
            }
        });
        for number in 0..12_u64 {
            client.write(number * BLOCK, &[7; BLOCK as usize], true).unwrap();
            ok(dir, &["revert", "back-checkpoints", "s", "--discard", "--in-use"]);
        }
    });
    let mut bytes = vec![9; 12 * BLOCK as usize];
    client.read(0, &mut bytes).unwrap();
    assert!(
        bytes[..BLOCK as usize].iter().all(|byte| *byte == 1) && bytes[BLOCK as usize..].iter().all(|byte| *byte == 0)
    );
    let changed = json(dir, &["changed", "back-checkpoints", "--since", "first"]);
    assert_eq!((&changed["ranges"][0]["offset_bytes"], &changed["warning"]), (&0.into(), &serde_json::Value::Null));
    drop(client);
    assert!(served.terminate().success());
}

#[test]
fn a_served_disk_keeps_its_size() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    with_snapshot(dir);
    ok(dir, &["resize", "a.vhd", "32M"]);
    let served = serve(dir, &["a.vhd,name=back-sized"]);
    Client::connect(&served.uri()).unwrap().write(20 << 20, &[9; 4096], true).unwrap();
    ok(dir, &["create", "long.vhd", "--size", "64M"]);
    eventually("the client has gone", || {
        let said = fails(dir, 2, &["revert", "back-sized", "./long.vhd", "--discard", "--in-use"]);
        said.contains("64 MiB") && said.contains("spile resize")
    });
    ok(dir, &["revert", "back-sized", "s", "--discard", "--in-use"]);
    let client = Client::connect(&served.uri()).unwrap();
    let (mut first, mut behind) = ([0], [1]);
    client.read(0, &mut first).unwrap();
    client.read(20 << 20, &mut behind).unwrap();
    assert_eq!((first, behind), ([1], [0]));
    client.write(20 << 20, &[4; 4096], true).unwrap();
    drop(client);
    assert!(served.terminate().success());
    let bytes = raw_of(dir, "a.vhd", "out.raw");
    assert_eq!(
        (bytes.len(), bytes[0], bytes[20 << 20], images(dir)),
        (32 << 20, 1, 4, vec!["a.vhd".into(), "long.vhd".into(), "s.vhd".into()])
    );
}

#[test]
fn a_served_disk_that_cannot_go_back_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    with_snapshot(dir);
    ok(dir, &["create", "other.qcow2", "--size", "1M"]);
    let before = images(dir);
    let served = serve(dir, &["a.vhd,name=back-refused"]);
    for (args, code, why) in [
        (&["s.vhd", "--keep", "s.vhd"][..], 1, "already"),
        (&["a.vhd", "--discard"], 2, "the disk itself"),
        (&["missing", "--discard"], 1, "missing"),
        (&["s", "--discard", "--allow-parents", "/"], 2, "--allow-parents is for a disk that no server has"),
        (&["s", "--discard", "--format", "raw"], 2, "--format is for a disk that no server has"),
        (&["/etc/hostname", "--discard", "--in-use"], 2, "extension"),
        // That the disk's name would belie its new leaf is found when what it held is a snapshot already.
        (&["./other.qcow2", "--keep", "t.vhd"], 1, "misread"),
    ] {
        let said = fails(dir, code, &[&["revert", "back-refused"], args].concat());
        assert!(said.contains(why), "{args:?}: {said}");
    }
    // An image that is damaged.
    fs::copy(dir.join("s.vhd"), dir.join("torn.vhd")).unwrap();
    let torn = fs::OpenOptions::new().write(true).open(dir.join("torn.vhd")).unwrap();
    torn.set_len(2048).unwrap();
    torn.write_all_at(&[0; 2048], 0).unwrap();
    fails(dir, 1, &["revert", "back-refused", "torn", "--discard"]);
    fs::remove_file(dir.join("torn.vhd")).unwrap();
    let client = Client::connect(&served.uri()).unwrap();
    let mut byte = [0];
    client.read(0, &mut byte).unwrap();
    client.write(0, &[6; 4096], true).unwrap();
    assert_eq!(byte, [2]);
    drop(client);
    assert!(served.terminate().success());
    assert_eq!((images(dir), raw_of(dir, "a.vhd", "out.raw")[0]), (before, 6));
}

#[test]
fn a_disk_that_waits_to_go_back_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    with_snapshot(dir);
    let mut command = crate::common::spile();
    command.args(["serve", "a.vhd", "--nbd", "unix:n", "--control", "c"]);
    let served = Served::spawn(command.current_dir(dir).env("SPILE_TEST_SLOW", "2500:4096"), dir.join("n")).unwrap();
    let client = Client::connect(&served.uri()).unwrap();
    let state = || json(dir, &["show", "c"])["state"].clone();
    assert_eq!(state(), "running");
    std::thread::scope(|scope| {
        scope.spawn(|| client.write(0, &[7; 4096], false).unwrap());
        let in_flight = || json(dir, &["slow", "c"])["in_flight"].as_array().is_some_and(|those| !those.is_empty());
        eventually("the write is in flight", in_flight);
        let back = scope.spawn(|| ok(dir, &["revert", "c", "s", "--discard", "--in-use"]));
        eventually("the disk waits", || state() == "reverting");
        assert!(ok(dir, &["show", "c"]).contains("because of `spile revert`"));
        back.join().unwrap();
    });
    assert_eq!(state(), "running");
    drop(client);
    assert!(served.terminate().success());
}

#[test]
fn a_name_means_one_image() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    with_snapshot(dir);
    fs::create_dir(dir.join("here")).unwrap();
    let here = dir.join("here");
    // Beside the disk.
    ok(&here, &["revert", "../a.vhd", "s", "--keep", "t.vhd"]);
    ok(&here, &["create", "s.vhd", "--size", "16M"]);
    for name in ["s", "s.vhd"] {
        let said = fails(&here, 2, &["revert", "../a.vhd", name, "--discard"]);
        assert!(said.contains(&format!("several images are called {name}")) && said.contains("/s.vhd"), "{said}");
    }
    // A folder is no image.
    fs::create_dir(here.join("t")).unwrap();
    // A path means what it says, and so does a name that only one image has.
    ok(&here, &["revert", "../a.vhd", "../s.vhd", "--discard"]);
    ok(&here, &["revert", "../a.vhd", "t.vhd", "--discard"]);
    assert_eq!(chain(dir, "a.vhd"), ["a.vhd", "t.vhd", "s.vhd"]);
}
