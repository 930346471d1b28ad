//! `spile amend`, and commands that open an image for writing which is dirty.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::common::{Served, fails, json, ok, run};

/// A qcow2 image of 16 MiB, without extended L2 entries.
fn image(dir: &Path, name: &str) {
    ok(dir, &["create", name, "--size", "16M"]);
}

#[test]
fn an_amended_image_keeps_its_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    image(dir, "a.qcow2");
    ok(dir, &["checkpoint", "a.qcow2", "one"]);
    let told = json(dir, &["amend", "a.qcow2", "--compat", "0.10"]);
    assert_eq!((&told["old_version"], &told["version"]), (&3.into(), &2.into()));
    let said = ok(dir, &["amend", "a.qcow2", "-o", "compat=1.1,lazy_refcounts=on"]);
    assert!(said.contains("version 3 (compat 1.1) with lazy refcounts now"), "{said}");
    assert!(ok(dir, &["amend", "a.qcow2", "--lazy-refcounts", "on"]).contains("already"));
    let facts = &json(dir, &["info", "a.qcow2"])["layers"][0]["facts"];
    assert_eq!((&facts["version"], &facts["lazy_refcounts"]), (&3.into(), &true.into()));
    let changed = json(dir, &["changed", "a.qcow2", "--since", "one"]);
    assert_eq!(changed["changed_bytes"], 0, "{changed}");
}

#[test]
fn an_image_in_use_or_below_another_one_is_not_amended() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    image(dir, "a.qcow2");
    let lazy = ["amend", "a.qcow2", "--lazy-refcounts", "on"];
    let served = Served::try_start(dir, &["a.qcow2", "--control", "none"]).unwrap();
    fails(dir, 1, &lazy);
    assert!(served.terminate().success());
    ok(dir, &["create", "child.qcow2", "--parent", "a.qcow2"]);
    let before = fs::read(dir.join("a.qcow2")).unwrap();
    assert!(fails(dir, 1, &lazy).contains("child.qcow2"));
    assert!(fs::read(dir.join("a.qcow2")).unwrap() == before);
    ok(dir, &[&lazy[..], &["--write-parent"]].concat());
    let said = fails(dir, 1, &["amend", "child.qcow2", "--compat", "0.10"]);
    assert!(said.contains("extended L2 entries") && said.contains("spile convert"), "{said}");
    assert!(fails(dir, 2, &["amend", "a.qcow2", "--extended-l2", "on"]).contains("spile convert"));
    fails(dir, 2, &["amend", "a.qcow2"]);
    ok(dir, &["create", "b.vhd", "--size", "16M"]);
    assert!(fails(dir, 1, &["amend", "b.vhd", "--compat", "1.1"]).contains("only a qcow2 image"));
}

fn make_dirty(dir: &Path, name: &str) {
    let file = fs::File::options().write(true).open(dir.join(name)).unwrap();
    file.write_all_at(&[1], 79).unwrap();
}

#[test]
fn a_dirty_parent_is_refused_and_not_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    image(dir, "a.qcow2");
    ok(dir, &["create", "child.qcow2", "--parent", "a.qcow2"]);
    make_dirty(dir, "a.qcow2");
    let before = fs::read(dir.join("a.qcow2")).unwrap();
    assert!(fails(dir, 1, &["resize", "a.qcow2", "20M"]).contains("child.qcow2"));
    let no_lock = ["serve", "a.qcow2", "--nbd", "unix:a.nbd", "--control", "none", "--write-parent", "--no-lock"];
    assert!(fails(dir, 1, &no_lock).contains("is marked dirty"));
    assert!(fs::read(dir.join("a.qcow2")).unwrap() == before);
    ok(dir, &["resize", "a.qcow2", "20M", "--write-parent"]);
}

#[test]
fn commands_repair_what_they_open_for_writing_and_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for (command, repairs) in [
        (&["info", "a.qcow2"][..], false),
        (&["map", "a.qcow2"], false),
        (&["check", "a.qcow2"], false),
        (&["convert", "a.qcow2", "copy.raw"], false),
        (&["snapshot", "a.qcow2", "--name", "one.qcow2"], true),
        (&["resize", "a.qcow2", "20M"], true),
        (&["amend", "a.qcow2", "--lazy-refcounts", "on"], true),
    ] {
        let _ = fs::remove_file(dir.join("a.qcow2"));
        image(dir, "a.qcow2");
        make_dirty(dir, "a.qcow2");
        let before = fs::read(dir.join("a.qcow2")).unwrap();
        let output = run(dir, command);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {said}");
        assert_eq!(said.contains("its refcounts are made anew"), repairs, "{command:?}: {said}");
        assert_eq!(fs::read(dir.join("a.qcow2")).unwrap() == before, !repairs, "{command:?}");
    }
    assert_eq!(json(dir, &["check", "a.qcow2"])["result"], "sound");
}
