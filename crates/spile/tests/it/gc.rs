//! `spile delete` of a snapshot with a child, and `spile gc`: what nobody needs goes, and nothing else.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use crate::common::control::ask;
use crate::common::host::serve;
use crate::common::nbd::Client;
use crate::common::{Served, eventually, fails, json, ok, run, spile};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Makes a.vhd over s2.vhd over s1.vhd, each with something of its own.
fn make(dir: &Path, name: &str) {
    ok(dir, &["create", "a.vhd", "--size", "16M"]);
    let served = serve(dir, &[&format!("a.vhd,name={name}")]);
    let client = Client::connect(&served.uri()).unwrap();
    for (number, snapshot) in [(1, Some("s1.vhd")), (2, Some("s2.vhd")), (3, None)] {
        client.write(u64::from(number) * MIB, &vec![number; 3 << 20], true).unwrap();
        if let Some(snapshot) = snapshot {
            ok(dir, &["snapshot", name, "--name", snapshot]);
        }
    }
    drop(client);
    assert!(served.terminate().success());
}

/// The names of all files that are images, or belong to work on them.
fn files(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name.contains(".vhd")).collect();
    names.sort();
    names
}

/// What a disk holds. A process that was killed may have it locked for a moment still.
fn raw_of(dir: &Path, disk: &str) -> Vec<u8> {
    eventually("the disk can be read", || run(dir, &["convert", disk, "out.raw"]).status.success());
    let bytes = fs::read(dir.join("out.raw")).unwrap();
    fs::remove_file(dir.join("out.raw")).unwrap();
    bytes
}

/// What `gc` says of each thing: its kind, the name of its file, and its state.
fn collected(found: &Value) -> Vec<(String, String, String)> {
    let text = |value: &Value| value.as_str().unwrap().rsplit('/').next().unwrap().to_owned();
    let of = |item: &Value| (text(&item["kind"]), text(&item["path"]), text(&item["state"]));
    found["found"].as_array().unwrap().iter().map(of).collect()
}

fn is(kind: &str, path: &str, state: &str) -> (String, String, String) {
    (kind.to_owned(), path.to_owned(), state.to_owned())
}

#[test]
fn a_deleted_snapshot_goes_and_what_others_hold_stays() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-offline");
    let (disk, first) = (raw_of(dir, "a.vhd"), raw_of(dir, "s1.vhd"));
    let deleted = json(dir, &["delete", "s2.vhd"]);
    assert!(deleted["child_path"].as_str().unwrap().ends_with("/a.vhd") && deleted["freed_bytes"] == 0, "{deleted}");
    assert_eq!(files(dir), [".s2.vhd.spile-gone", "a.vhd", "s1.vhd", "s2.vhd"]);
    assert!(ok(dir, &["tree", "."]).contains("deleted, waits for gc"));
    let tree = json(dir, &["tree", "."]);
    let of =
        |name: &str| tree["images"].as_array().unwrap().iter().find(|i| i["path"].as_str().unwrap().ends_with(name));
    assert!(of("s2.vhd").unwrap()["gc_frees_at_most_bytes"].as_u64().unwrap() > 0);
    assert!(of("s1.vhd").unwrap()["deleted"] == false && tree["beside"].as_array().unwrap().is_empty());
    assert_eq!(collected(&json(dir, &["gc", ".", "--dry-run"])), [is("deleted", "s2.vhd", "found")]);
    assert_eq!(files(dir).len(), 4);
    assert_eq!(collected(&json(dir, &["gc", "."])), [is("deleted", "s2.vhd", "done")]);
    assert_eq!(files(dir), ["a.vhd", "s1.vhd"]);
    assert!(raw_of(dir, "a.vhd") == disk && raw_of(dir, "s1.vhd") == first);
    // Nothing that was not named goes.
    assert!(ok(dir, &["gc", "."]).contains("nothing to do"));
    assert_eq!(files(dir), ["a.vhd", "s1.vhd"]);
}

#[test]
fn a_deleted_snapshot_below_one_that_is_kept_gives_its_space_back() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-kept");
    // The snapshot that is kept has two children.
    ok(dir, &["clone", "s2.vhd", "b.vhd"]);
    let (disk, second) = (raw_of(dir, "a.vhd"), raw_of(dir, "s2.vhd"));
    let said = ok(dir, &["delete", "s1.vhd"]);
    assert!(said.contains("s2.vhd, its only child"), "{said}");
    let shown = &json(dir, &["tree", "s1.vhd"])["images"][0];
    assert!(shown["deleted"] == true && shown["gc_frees_at_most_bytes"].as_u64().unwrap() > 0, "{shown}");
    let dry = json(dir, &["gc", ".", "--dry-run"]);
    assert_eq!(collected(&dry), [is("deleted", "s1.vhd", "found")]);
    assert!(dry["found"][0]["frees_at_most_bytes"].as_u64().unwrap() > 0, "{dry}");
    let used = |dir: &Path| -> u64 {
        let sizes = files(dir).into_iter().map(|name| fs::metadata(dir.join(name)).unwrap());
        sizes.map(|stat| std::os::unix::fs::MetadataExt::blocks(&stat) * 512).sum()
    };
    let before = used(dir);
    assert_eq!(collected(&json(dir, &["gc", "."])), [is("deleted", "s1.vhd", "done")]);
    assert_eq!(files(dir), ["a.vhd", "b.vhd", "s2.vhd"]);
    // 2 MiB of the first were hidden by the second; the maps are larger.
    assert!(used(dir) + MIB <= before, "{} of {before} bytes are left", used(dir));
    assert!(raw_of(dir, "s2.vhd") == second && raw_of(dir, "b.vhd") == second && raw_of(dir, "a.vhd") == disk);
    for image in ["a.vhd", "b.vhd"] {
        assert!(ok(dir, &["info", image]).contains("s2.vhd"));
        ok(dir, &["check", image]);
    }
    assert!(ok(dir, &["gc", "."]).contains("nothing to do"));
}

#[test]
fn snapshots_that_were_deleted_one_over_the_other_all_go() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-both");
    ok(dir, &["snapshot", "a.vhd", "--name", "s3.vhd"]);
    let (disk, third) = (raw_of(dir, "a.vhd"), raw_of(dir, "s3.vhd"));
    ok(dir, &["delete", "s2.vhd"]);
    let said = ok(dir, &["delete", "s1.vhd"]);
    assert!(said.contains("can do nothing now") && said.contains("s2.vhd was deleted, too"), "{said}");
    let both = [is("deleted", "s1.vhd", "done"), is("deleted", "s2.vhd", "done")];
    assert_eq!(collected(&json(dir, &["gc", "."])), both);
    assert_eq!(files(dir), ["a.vhd", "s3.vhd"]);
    assert!(raw_of(dir, "s3.vhd") == third && raw_of(dir, "a.vhd") == disk);
}

#[test]
fn the_server_of_a_disk_merges_below_a_snapshot_that_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-kept-made");
    ok(dir, &["snapshot", "a.vhd", "--name", "s3.vhd"]);
    let kept = ["s2.vhd", "s3.vhd"].map(|name| raw_of(dir, name));
    let served = serve(dir, &["a.vhd,name=gc-kept-live"]);
    let client = Client::connect(&served.uri()).unwrap();
    ok(dir, &["delete", "s1.vhd"]);
    client.write(8 * MIB, &[8; 4096], false).unwrap();
    assert_eq!(collected(&json(dir, &["gc", "."])), [is("deleted", "s1.vhd", "done")]);
    assert_eq!(files(dir), ["a.vhd", "s2.vhd", "s3.vhd"]);
    let mut page = [0; 4096];
    for (at, value) in [(MIB, 1), (2 * MIB, 2), (3 * MIB, 3), (8 * MIB, 8)] {
        client.read(at, &mut page).unwrap();
        assert_eq!(page, [value; 4096], "at {at:#x}");
    }
    assert!(["s2.vhd", "s3.vhd"].map(|name| raw_of(dir, name)) == kept);
    // The server goes on with the chain as it is now.
    ok(dir, &["delete", "s2.vhd"]);
    assert_eq!(collected(&json(dir, &["gc", "."])), [is("deleted", "s2.vhd", "done")]);
    assert!(raw_of(dir, "s3.vhd") == kept[1]);
    // Nobody else gets a name that was not deleted.
    ok(dir, &["snapshot", "gc-kept-live", "--name", "s4.vhd"]);
    let order = serde_json::json!({ "disk": "gc-kept-live", "kind": "coalesce", "layer": "s4", "keep_name": true });
    let socket = json(dir, &["show", "gc-kept-live"])["server"].as_str().unwrap().to_owned();
    let (status, said) = ask(Path::new(&socket), "POST", "/v1/jobs", &order.to_string());
    assert!(status >= 400 && said.to_string().contains("only an image that was deleted"), "{status} {said}");
    drop(client);
    assert!(served.terminate().success());
    assert_eq!(files(dir), ["a.vhd", "s3.vhd", "s4.vhd"]);
}

#[test]
fn a_server_that_is_killed_below_a_kept_snapshot_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-kept-killed");
    let (disk, second) = (raw_of(dir, "a.vhd"), raw_of(dir, "s2.vhd"));
    ok(dir, &["delete", "s1.vhd"]);
    let served = serve(dir, &["a.vhd,name=gc-kept-kill"]);
    let mut gc = spile();
    gc.args(["gc", ".", "--rate", "1M"]).current_dir(dir).stdout(Stdio::null()).stderr(Stdio::null());
    let mut gc = gc.spawn().unwrap();
    eventually("the merge has begun", || dir.join(".a.vhd.spile-job").exists());
    served.kill();
    gc.wait().unwrap();
    assert!(raw_of(dir, "s2.vhd") == second && raw_of(dir, "a.vhd") == disk);
    assert!(fails(dir, 1, &["delete", "s1.vhd", "--undo"]).contains("is merged into it"));
    let mark = fs::read(dir.join(".s1.vhd.spile-gone")).unwrap();
    eventually("gc finishes it", || run(dir, &["gc", "."]).status.success() && !dir.join("s1.vhd").exists());
    assert_eq!(files(dir), ["a.vhd", "s2.vhd"]);
    assert!(raw_of(dir, "s2.vhd") == second && raw_of(dir, "a.vhd") == disk);
    // As a kill leaves it just before the old name goes: neither name can be used for what would change the file.
    fs::hard_link(dir.join("s2.vhd"), dir.join("s1.vhd")).unwrap();
    fs::write(dir.join(".s1.vhd.spile-gone"), mark).unwrap();
    for refused in [&["serve", "s1.vhd", "--nbd", "unix:x"][..], &["clone", "s1.vhd", "c.vhd"], &["delete", "s2.vhd"]] {
        assert!(!run(dir, refused).status.success(), "{refused:?}");
    }
    assert!(fails(dir, 1, &["coalesce", "a.vhd"]).contains("has the name"));
    ok(dir, &["delete", "s1.vhd"]);
    assert_eq!(files(dir), ["a.vhd", "s2.vhd"]);
    assert!(raw_of(dir, "s2.vhd") == second && raw_of(dir, "a.vhd") == disk);
}

/// What cannot be merged ever is not marked: the user hears at once why, and what to do.
#[test]
fn a_snapshot_that_could_not_be_merged_is_not_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.qcow2", "--size", "8M"]);
    ok(dir, &["create", "s.qcow2", "--parent", "a.qcow2", "--size", "4M"]);
    ok(dir, &["create", "x.qcow2", "--parent", "s.qcow2", "--size", "6M"]);
    let said = fails(dir, 1, &["delete", "s.qcow2"]);
    assert!(said.contains("one of its own parents is longer") && said.contains("spile flatten"), "{said}");
    assert_eq!(collected(&json(dir, &["gc", "."])), []);
    ok(dir, &["flatten", "x.qcow2", "--wait"]);
    ok(dir, &["delete", "s.qcow2"]);
    assert!(!dir.join("s.qcow2").exists());
    ok(dir, &["check", "x.qcow2"]);
}

/// Also while a server has it open, as all parents of its disks.
#[test]
fn a_snapshot_with_two_children_is_not_deleted_and_the_reason_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-two");
    ok(dir, &["clone", "s2.vhd", "b.vhd"]);
    let served = serve(dir, &["a.vhd,name=gc-two"]);
    let said = fails(dir, 1, &["delete", "s2.vhd"]);
    assert!(said.contains("is a child of this image") && !said.contains("in use"), "{said}");
    assert!(served.terminate().success());
}

#[test]
fn a_second_child_keeps_a_deleted_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-second");
    let second = raw_of(dir, "s2.vhd");
    // A child that is elsewhere for the time being.
    ok(dir, &["clone", "s2.vhd", "b.vhd"]);
    fs::create_dir(dir.join("away")).unwrap();
    fs::rename(dir.join("b.vhd"), dir.join("away/b.vhd")).unwrap();
    ok(dir, &["delete", "s2.vhd"]);
    fs::rename(dir.join("away/b.vhd"), dir.join("b.vhd")).unwrap();
    let found = json(dir, &["gc", "."]);
    assert_eq!(collected(&found), [is("deleted", "s2.vhd", "waits")]);
    assert!(found["found"][0]["reason"].as_str().unwrap().contains("several children"), "{found}");
    assert!(raw_of(dir, "b.vhd") == second);
    // Its child may be in it by now, in part.
    assert!(fails(dir, 1, &["clone", "s2.vhd", "c.vhd"]).contains("was deleted") && !dir.join("c.vhd").exists());
    // Another child than the one that it had when it was deleted proves nothing either.
    fs::remove_file(dir.join("a.vhd")).unwrap();
    let found = json(dir, &["gc", "."]);
    assert!(found["found"][0]["reason"].as_str().unwrap().contains("delete it again"), "{found}");
    assert!(raw_of(dir, "b.vhd") == second);
    // That no child is found proves nothing: it may lie in another folder by now.
    fs::remove_file(dir.join("b.vhd")).unwrap();
    assert_eq!(collected(&json(dir, &["gc", "."])), [is("deleted", "s2.vhd", "waits")]);
    assert_eq!(files(dir), [".s2.vhd.spile-gone", "s1.vhd", "s2.vhd"]);
    ok(dir, &["delete", "s2.vhd"]);
    assert_eq!(collected(&json(dir, &["gc", "."])), []);
    assert_eq!(files(dir), ["s1.vhd"]);
}

#[test]
fn a_deleted_snapshot_can_be_kept_after_all_until_its_merge_has_begun() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-undo");
    let (disk, before) = (raw_of(dir, "a.vhd"), raw_of(dir, "s2.vhd"));
    ok(dir, &["delete", "s2.vhd"]);
    assert_eq!(json(dir, &["delete", "s2.vhd", "--undo"])["is_kept"], true);
    assert_eq!(collected(&json(dir, &["gc", "."])), []);
    assert!(fails(dir, 1, &["delete", "s2.vhd", "--undo"]).contains("not marked"));
    assert!(raw_of(dir, "s2.vhd") == before);
    // The merge is broken off, and the snapshot is one no more.
    ok(dir, &["delete", "s2.vhd"]);
    let mut gc = spile().args(["gc", ".", "--rate", "1M"]).current_dir(dir).stdout(Stdio::null()).spawn().unwrap();
    eventually("the merge has begun", || dir.join(".a.vhd.spile-job").exists());
    gc.kill().unwrap();
    gc.wait().unwrap();
    let said = fails(dir, 1, &["delete", "s2.vhd", "--undo"]);
    assert!(said.contains("is merged into it"), "{said}");
    eventually("gc finishes it", || {
        let found = run(dir, &["gc", ".", "--json"]);
        found.status.success() && !dir.join(".s2.vhd.spile-gone").exists()
    });
    assert_eq!(files(dir), ["a.vhd", "s1.vhd"]);
    assert!(raw_of(dir, "a.vhd") == disk);
}

#[test]
fn a_disk_in_use_is_merged_by_its_server() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-made");
    let served = serve(dir, &["a.vhd,name=gc-live"]);
    let client = Client::connect(&served.uri()).unwrap();
    ok(dir, &["delete", "s2.vhd"]);
    client.write(8 * MIB, &[8; 4096], false).unwrap();
    assert_eq!(collected(&json(dir, &["gc", ".", "--rate", "64M"])), [is("deleted", "s2.vhd", "done")]);
    assert_eq!(files(dir), ["a.vhd", "s1.vhd"]);
    let mut page = [0; 4096];
    for (at, value) in [(MIB, 1), (2 * MIB, 2), (3 * MIB, 3), (8 * MIB, 8)] {
        client.read(at, &mut page).unwrap();
        assert_eq!(page, [value; 4096], "at {at:#x}");
    }
    // A job that was meant for another parent is refused: the disk has had a snapshot meanwhile.
    ok(dir, &["snapshot", "gc-live", "--name", "s3.vhd"]);
    let order = serde_json::json!({ "disk": "gc-live", "kind": "coalesce", "into": dir.join("s1.vhd") });
    let socket = json(dir, &["show", "gc-live"])["server"].as_str().unwrap().to_owned();
    let (status, said) = ask(Path::new(&socket), "POST", "/v1/jobs", &order.to_string());
    assert!(status >= 400 && said.to_string().contains("by now"), "{status} {said}");
    drop(client);
    assert!(served.terminate().success());
    assert_eq!(files(dir), ["a.vhd", "s1.vhd", "s3.vhd"]);
}

#[test]
fn what_was_half_made_goes_and_a_kill_in_the_middle_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-killed");
    let disk = raw_of(dir, "a.vhd");
    ok(dir, &["delete", "s2.vhd"]);
    let mut slow = spile();
    slow.args(["gc", ".", "--rate", "512k"]).current_dir(dir).stdout(Stdio::null()).stderr(Stdio::null());
    let mut slow = slow.spawn().unwrap();
    eventually("the merge has begun", || dir.join(".a.vhd.spile-job").exists());
    slow.kill().unwrap();
    slow.wait().unwrap();
    assert!(raw_of(dir, "a.vhd") == disk);
    fs::write(dir.join(".a.vhd.spile-new"), "half-made").unwrap();
    fs::write(dir.join(".x.vhd.spile-gone"), "of an image that is gone").unwrap();
    let found = collected(&json(dir, &["gc", "."]));
    let expected = [
        is("job", ".a.vhd.spile-job", "done"),
        is("half-made", ".a.vhd.spile-new", "done"),
        is("deleted", "s2.vhd", "done"),
        is("stale-note", ".x.vhd.spile-gone", "done"),
    ];
    assert_eq!(found, expected);
    assert_eq!(files(dir), ["a.vhd", "s1.vhd"]);
    assert!(raw_of(dir, "a.vhd") == disk);
}

#[test]
fn what_cannot_be_done_now_waits_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-reasons");
    let reasons = |found: &Value| {
        let items = found["found"].as_array().unwrap().iter();
        items.map(|item| item["reason"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    // The note of a job whose disk is gone, and a move that was broken off: gc does neither, and fails for neither.
    let merge = "coalesce\nidentity 00000000000000000000000000000000\nlayer /x\nparent /y\n";
    fs::write(dir.join(".gone.vhd.spile-job"), format!("spile job 1\n{merge}end\n")).unwrap();
    let to = dir.join("elsewhere.vhd");
    let plan = format!("move\nto {}\nformat vhd\ndelete yes\nstay no\nunmarked no\n", to.display());
    fs::write(dir.join(".a.vhd.spile-job"), format!("spile job 1\n{plan}end\n")).unwrap();
    let found = json(dir, &["gc", "."]);
    let expected = [is("job", ".a.vhd.spile-job", "waits"), is("job", ".gone.vhd.spile-job", "waits")];
    assert_eq!(collected(&found), expected);
    let said = reasons(&found);
    assert!(said[0].contains("a move") && said[1].contains("its disk is gone"), "{found}");
    assert!(!to.exists());
    fs::remove_file(dir.join(".a.vhd.spile-job")).unwrap();
    fs::remove_file(dir.join(".gone.vhd.spile-job")).unwrap();
    // A disk that another program has open.
    ok(dir, &["delete", "s2.vhd"]);
    let mut hidden = spile();
    hidden.args(["serve", "a.vhd", "--nbd", "unix:n"]).current_dir(dir).env("SPILE_RUN_DIR", dir.join("run"));
    let served = Served::spawn(&mut hidden, dir.join("n")).unwrap();
    let found = json(dir, &["gc", "."]);
    assert_eq!(collected(&found), [is("deleted", "s2.vhd", "waits")]);
    assert!(reasons(&found)[0].contains("in use"), "{found}");
    assert!(served.terminate().success());
    // One image that makes no sense is no reason to do nothing.
    fs::write(dir.join("bad.vhd"), "no image").unwrap();
    fs::write(dir.join(".bad.vhd.spile-gone"), "no note").unwrap();
    let expected = [is("deleted", "bad.vhd", "waits"), is("deleted", "s2.vhd", "done")];
    assert_eq!(collected(&json(dir, &["gc", "."])), expected);
}

#[test]
fn the_same_command_goes_on_with_the_merge_of_a_disk_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-again-made");
    let served = serve(dir, &["a.vhd,name=gc-again"]);
    ok(dir, &["delete", "s2.vhd"]);
    let mut slow = spile();
    slow.args(["gc", ".", "--rate", "256k", "--json"]).current_dir(dir).stdout(Stdio::piped()).stderr(Stdio::null());
    let slow = slow.spawn().unwrap();
    eventually("the merge has begun", || dir.join(".a.vhd.spile-job").exists());
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(slow.id() as i32), nix::sys::signal::Signal::SIGINT).unwrap();
    let ended = slow.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{ended:?}");
    let found = serde_json::from_slice(&ended.stdout).unwrap();
    assert_eq!(collected(&found), [is("deleted", "s2.vhd", "waits")]);
    let jobs = json(dir, &["jobs"]);
    let id = jobs["jobs"].as_array().unwrap().iter().find(|job| job["disk"] == "gc-again").unwrap()["id"].clone();
    ok(dir, &["job", id.as_str().unwrap(), "rate", "1G"]);
    let found = json(dir, &["gc", "."]);
    // With luck the server had ended it before.
    assert!(collected(&found).iter().all(|item| item.2 == "done"), "{found}");
    assert_eq!(files(dir), ["a.vhd", "s1.vhd"]);
    assert!(served.terminate().success());
}

#[test]
fn a_link_is_not_deleted_and_neither_is_what_it_leads_to() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-link");
    fs::create_dir(dir.join("big")).unwrap();
    fs::rename(dir.join("s2.vhd"), dir.join("big/s2.vhd")).unwrap();
    std::os::unix::fs::symlink("big/s2.vhd", dir.join("s2.vhd")).unwrap();
    assert!(fails(dir, 2, &["delete", "s2.vhd"]).contains("is a link to"));
    assert!(dir.join("big/s2.vhd").exists());
}

#[test]
fn no_clone_is_made_of_what_goes_or_is_half_merged() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-clones");
    // As a kill leaves it between the second name and the new leaf's.
    fs::copy(dir.join("a.vhd"), dir.join(".a.vhd.spile-new")).unwrap();
    fs::hard_link(dir.join("a.vhd"), dir.join("s3.vhd")).unwrap();
    assert!(fails(dir, 1, &["clone", "s3.vhd", "b.vhd"]).contains("broken off"));
    assert!(!dir.join("b.vhd").exists());
    fs::remove_file(dir.join("s3.vhd")).unwrap();
    ok(dir, &["gc", "."]);
    assert_eq!(files(dir), ["a.vhd", "s1.vhd", "s2.vhd"]);
    let mut slow = spile();
    slow.args(["coalesce", "a.vhd", "--rate", "256k"]).current_dir(dir).stdout(Stdio::null()).stderr(Stdio::null());
    let mut slow = slow.spawn().unwrap();
    let note = dir.join(".a.vhd.spile-job");
    eventually("the merge has begun", || fs::read_to_string(&note).is_ok_and(|text| text.ends_with("end\n")));
    slow.kill().unwrap();
    slow.wait().unwrap();
    // A process that was killed may have the images locked for a moment still.
    raw_of(dir, "a.vhd");
    assert!(fails(dir, 1, &["clone", "s2.vhd", "b.vhd"]).contains("a merge of"));
    // As a parent the disk could not go on with its merge.
    assert!(fails(dir, 1, &["clone", "a.vhd", "b.vhd"]).contains("a job on the image"));
    ok(dir, &["clone", "s1.vhd", "b.vhd"]);
}

#[test]
fn a_child_in_another_folder_keeps_its_parent_whole() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir(dir.join("golden")).unwrap();
    ok(dir, &["create", "golden/g.vhd", "--size", "16M"]);
    ok(dir, &["clone", "golden/g.vhd", "vm.vhd"]);
    for refused in [&["delete", "golden/g.vhd"][..], &["serve", "golden/g.vhd", "--nbd", "unix:x"]] {
        let said = run(dir, refused);
        let text = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(!said.status.success() && text.contains("vm.vhd"), "{refused:?}: {text}");
    }
    assert!(dir.join("golden/g.vhd").exists());
    ok(dir, &["check", "vm.vhd"]);
    assert_eq!(collected(&json(dir, &["gc", "golden"])), []);
    // Once the child is gone, nobody needs the image.
    fs::remove_file(dir.join("vm.vhd")).unwrap();
    ok(dir, &["delete", "golden/g.vhd"]);
    assert!(!dir.join("golden/g.vhd").exists());
}

#[test]
fn what_becomes_a_child_in_another_folder_keeps_the_parent_whole() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for folder in ["vm", "vm/golden", "golden", "between", "far"] {
        fs::create_dir(dir.join(folder)).unwrap();
    }
    let anywhere = |args: &[&str]| ok(dir, &[args, &["--allow-parents", "."]].concat());
    let refused = |parent: &str, child: &str| {
        for args in [&["delete", parent][..], &["serve", parent, "--nbd", "unix:x"]] {
            let said = run(dir, args);
            let text = String::from_utf8_lossy(&said.stderr).into_owned();
            assert!(!said.status.success() && text.contains(child), "{args:?}: {text}");
        }
    };
    ok(dir, &["create", "vm/golden/g.vhd", "--size", "16M"]);
    anywhere(&["clone", "vm/golden/g.vhd", "vm/a.vhd"]);
    // From here on the snapshot is the child, and a merge that takes its place another one.
    anywhere(&["snapshot", "vm/a.vhd", "--name", "s1.vhd"]);
    refused("vm/golden/g.vhd", "vm/s1.vhd");
    // What was noted first need not be there any more.
    anywhere(&["clone", "vm/s1.vhd", "vm/b.vhd"]);
    ok(dir, &["delete", "vm/a.vhd", "--allow-parents", "."]);
    refused("vm/golden/g.vhd", "vm/s1.vhd");
    anywhere(&["coalesce", "vm/b.vhd"]);
    assert_eq!(files(&dir.join("vm")), ["b.vhd"]);
    refused("vm/golden/g.vhd", "vm/b.vhd");
    // A merge below a snapshot that is kept gives its name to another image.
    anywhere(&["snapshot", "vm/b.vhd", "--name", "s2.vhd"]);
    anywhere(&["snapshot", "vm/b.vhd", "--name", "s3.vhd"]);
    ok(dir, &["delete", "vm/s2.vhd"]);
    ok(dir, &["gc", "vm"]);
    assert_eq!(files(&dir.join("vm")), ["b.vhd", "s3.vhd"]);
    refused("vm/golden/g.vhd", "vm/s3.vhd");
    // A disk that goes back to a snapshot is its child.
    anywhere(&["revert", "vm/b.vhd", "vm/golden/g.vhd", "--discard"]);
    fs::remove_file(dir.join("vm/s3.vhd")).unwrap();
    refused("vm/golden/g.vhd", "vm/b.vhd");
    // The child of a layer that is merged gets the layer's parent, of which its folder has had no child so far.
    ok(dir, &["create", "golden/h.vhd", "--size", "16M"]);
    anywhere(&["clone", "golden/h.vhd", "between/m.vhd"]);
    anywhere(&["clone", "between/m.vhd", "far/b.vhd"]);
    anywhere(&["clone", "between/m.vhd", "far/c.vhd"]);
    anywhere(&["coalesce", "far/b.vhd", "--layer", "m.vhd"]);
    assert!(!dir.join("between/m.vhd").exists());
    refused("golden/h.vhd", "far/");
    fs::remove_file(dir.join("far/b.vhd")).unwrap();
    refused("golden/h.vhd", "far/c.vhd");
    // A folder that is gone has no children any more.
    fs::remove_dir_all(dir.join("far")).unwrap();
    ok(dir, &["delete", "golden/h.vhd"]);
    anywhere(&["check", "vm/b.vhd"]);
}

#[test]
fn a_merge_into_a_deleted_image_that_is_broken_off_can_be_done_by_hand() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-by-hand");
    let (disk, mark) = (raw_of(dir, "a.vhd"), dir.join(".s1.vhd.spile-gone"));
    ok(dir, &["delete", "s1.vhd"]);
    let mut slow = spile();
    slow.args(["gc", ".", "--rate", "256k"]).current_dir(dir).stdout(Stdio::null()).stderr(Stdio::null());
    let mut slow = slow.spawn().unwrap();
    let note = dir.join(".a.vhd.spile-job");
    eventually("the merge has begun", || fs::read_to_string(&note).is_ok_and(|text| text.ends_with("end\n")));
    slow.kill().unwrap();
    slow.wait().unwrap();
    eventually("the disk is free", || run(dir, &["job", "a.vhd", "cancel"]).status.success());
    assert!(fs::read_to_string(&mark).unwrap().contains("merged"));
    ok(dir, &["coalesce", "a.vhd", "--layer", "s2.vhd"]);
    // What was merged is an image as every other one, and can be deleted anew.
    assert_eq!(files(dir), ["a.vhd", "s1.vhd"]);
    ok(dir, &["delete", "s1.vhd"]);
    assert_eq!(collected(&json(dir, &["gc", "."])), [is("deleted", "s1.vhd", "done")]);
    assert_eq!(files(dir), ["a.vhd"]);
    assert!(raw_of(dir, "a.vhd") == disk);
}

#[test]
fn a_mark_that_cannot_be_written_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("full");
    fs::create_dir(&at).unwrap();
    let mounted = std::process::Command::new("mount").args(["-t", "tmpfs", "-o", "size=16m", "none"]).arg(&at).status();
    if !mounted.is_ok_and(|status| status.success()) {
        return println!("SKIP a_mark_that_cannot_be_written_is_none: no file system can be mounted");
    }
    let full = || {
        ok(&at, &["create", "s.vhd", "--size", "16M"]);
        ok(&at, &["clone", "s.vhd", "a.vhd"]);
        let mut ballast = fs::File::create(at.join("ballast")).unwrap();
        while std::io::Write::write(&mut ballast, &[1; 4096]).is_ok() {}
        let said = fails(&at, 1, &["delete", "s.vhd"]);
        assert!(said.contains("the disk is as it was; free some space"), "{said}");
        (at.join(".s.vhd.spile-gone").exists(), ok(&at, &["tree", "."]))
    };
    let seen = std::panic::catch_unwind(full);
    eventually("the file system goes", || {
        std::process::Command::new("umount").arg(&at).status().is_ok_and(|status| status.success())
    });
    let (is_marked, tree) = seen.unwrap();
    assert!(!is_marked && !tree.contains("deleted"), "{tree}");
}

#[test]
fn a_set_of_snapshots_that_is_not_whole_says_so_until_they_are_gone() {
    let dir = tempfile::tempdir().unwrap();
    for disk in ["a.vhd", "b.vhd"] {
        ok(dir.path(), &["create", disk, "--size", "4M"]);
    }
    ok(dir.path(), &["snapshot", "a.vhd", "b.vhd", "--name", "one"]);
    assert_eq!(files(dir.path()), ["a-one.vhd", "a.vhd", "b-one.vhd", "b.vhd"], "a set that is whole has no notes");
    // As a server that was killed leaves them.
    for of in ["a-one", "b-two"] {
        fs::write(dir.path().join(format!(".{of}.vhd.spile-set")), "").unwrap();
    }
    let tree = json(dir.path(), &["tree", "."]);
    let broken = tree["images"].as_array().unwrap().iter().filter(|image| image["of_broken_set"] == true);
    let broken: Vec<_> = broken.map(|image| image["path"].as_str().unwrap().rsplit('/').next().unwrap()).collect();
    assert_eq!(broken, ["a-one.vhd"]);
    assert!(ok(dir.path(), &["tree", "."]).contains("of a set of snapshots that was broken off"));
    let found = json(dir.path(), &["gc", "."]);
    assert_eq!(collected(&found), [("stale-note".into(), ".b-two.vhd.spile-set".into(), "done".into())]);
    // One alone is whole, whatever an earlier set of that name has left.
    fs::write(dir.path().join(".alone.vhd.spile-set"), "").unwrap();
    ok(dir.path(), &["snapshot", "b.vhd", "--name", "alone.vhd"]);
    ok(dir.path(), &["delete", "a.vhd"]);
    assert_eq!(files(dir.path()), [".a-one.vhd.spile-set", "a-one.vhd", "alone.vhd", "b-one.vhd", "b.vhd"]);
    ok(dir.path(), &["delete", "a-one.vhd"]);
    assert_eq!(files(dir.path()), ["alone.vhd", "b-one.vhd", "b.vhd"]);
}

/// A kill between two steps of a merge leaves one more name of an image. When its disk and its note are gone, no merge takes it away.
#[test]
fn a_second_name_that_a_merge_has_left_goes_and_an_only_name_stays() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.vhd", "--size", "16M"]);
    ok(dir, &["create", "b.vhd", "--size", "16M"]);
    fs::hard_link(dir.join("a.vhd"), dir.join(".kept.vhd.spile-taking")).unwrap();
    fs::rename(dir.join("b.vhd"), dir.join(".only.vhd.spile-taking")).unwrap();
    let both = |state: &str| {
        [is("second-name", ".kept.vhd.spile-taking", state), is("second-name", ".only.vhd.spile-taking", "waits")]
    };
    let dry = json(dir, &["gc", ".", "--dry-run"]);
    assert_eq!(collected(&dry)[0], both("found")[0]);
    let found = json(dir, &["gc", "."]);
    assert_eq!(collected(&found), both("done"));
    let why = found["found"][1]["reason"].as_str().unwrap();
    assert!(why.contains("no other name in this folder"), "{why}");
    assert_eq!(files(dir), [".only.vhd.spile-taking", "a.vhd"]);
    ok(dir, &["check", "a.vhd"]);
}
