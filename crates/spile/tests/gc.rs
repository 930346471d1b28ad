//! `spile delete` of a snapshot with a child, and `spile gc`: what nobody needs goes, and nothing else.

mod common;

use std::fs;
use std::path::Path;
use std::process::Stdio;

use common::control::ask;
use common::nbd::Client;
use common::{Served, eventually, json, ok, run, spile};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Serves `args` with a control socket in the folder of such sockets, where commands look for it.
fn serve(dir: &Path, args: &[&str]) -> Served {
    let mut command = spile();
    command.arg("serve").args(args).args(["--nbd", "unix:n"]).current_dir(dir);
    Served::spawn(&mut command, dir.join("n")).unwrap_or_else(|err| panic!("serve {args:?}: {err}"))
}

/// Makes a.vhd over s2.vhd over s1.vhd, each with something of its own.
fn make(dir: &Path, name: &str) {
    ok(dir, &["create", "a.vhd", "--size", "16M"]);
    let served = serve(dir, &[&format!("a.vhd,name={name}")]);
    let client = Client::connect(&served.uri()).unwrap();
    for (number, snapshot) in [(1, Some("s1")), (2, Some("s2")), (3, None)] {
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
fn a_snapshot_whose_child_is_one_waits_until_that_is_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-waits");
    let (disk, second) = (raw_of(dir, "a.vhd"), raw_of(dir, "s2.vhd"));
    ok(dir, &["delete", "s1.vhd"]);
    let found = json(dir, &["gc", "."]);
    assert_eq!(collected(&found), [is("deleted", "s1.vhd", "waits")]);
    assert!(found["found"][0]["reason"].as_str().unwrap().contains("s2.vhd"), "{found}");
    assert!(raw_of(dir, "s2.vhd") == second);
    ok(dir, &["delete", "s2.vhd"]);
    let both = [is("deleted", "s1.vhd", "done"), is("deleted", "s2.vhd", "done")];
    assert_eq!(collected(&json(dir, &["gc", "."])), both);
    assert_eq!(files(dir), ["a.vhd"]);
    assert!(raw_of(dir, "a.vhd") == disk);
}

#[test]
fn a_second_child_keeps_a_deleted_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "gc-second");
    let second = raw_of(dir, "s2.vhd");
    ok(dir, &["delete", "s2.vhd"]);
    ok(dir, &["clone", "s2.vhd", "b.vhd"]);
    let found = json(dir, &["gc", "."]);
    assert_eq!(collected(&found), [is("deleted", "s2.vhd", "waits")]);
    assert!(found["found"][0]["reason"].as_str().unwrap().contains("several children"), "{found}");
    assert!(raw_of(dir, "b.vhd") == second);
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
    ok(dir, &["snapshot", "gc-live", "--name", "s3"]);
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
