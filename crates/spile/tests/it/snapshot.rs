//! Snapshots and clones by the commands: of disks that are served under load, and of those that nobody uses.

use std::fs;
use std::path::Path;

use crate::common::guests::{self, Load};
use crate::common::host::serve;
use crate::common::nbd::Client;
use crate::common::{Served, fails, json, ok};
use nix::sys::signal::Signal;
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// The names of the files in `dir` that are images, or are left of making one.
pub fn images(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name.contains(".vhd") || name.contains("spile-")).collect();
    names.sort();
    names
}

/// The file names of a disk's layers, leaf first.
pub fn chain(dir: &Path, disk: &str) -> Vec<String> {
    let info = json(dir, &["info", disk, "--chain"]);
    let name =
        |layer: &Value| Path::new(layer["path"].as_str().unwrap()).file_name().unwrap().to_str().unwrap().to_owned();
    info["layers"].as_array().unwrap().iter().map(name).collect()
}

pub fn raw_of(dir: &Path, disk: &str, out: &str) -> Vec<u8> {
    ok(dir, &["convert", disk, out]);
    let bytes = fs::read(dir.join(out)).unwrap();
    fs::remove_file(dir.join(out)).unwrap();
    bytes
}

#[test]
fn a_disk_under_load_gets_snapshots_that_never_change() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "snap-live.vhd", "--size", "64M"]);
    let served = serve(dir, &["snap-live.vhd", "--vhost-user", "v"]);
    let mut load = Load::start(dir, "v", &["--span", "48M"]);
    for number in 0..4 {
        load.goes_on(&served);
        let name = format!("s{number}");
        let made = json(dir, &["snapshot", "snap-live", "--name", &name]);
        assert_eq!(
            made["snapshot_path"],
            dir.canonicalize().unwrap().join(format!("snap-live-s{number}.vhd")).to_str().unwrap()
        );
        assert!(made["longest_stall_us"].as_f64().unwrap() > 0.0 && made["trouble"].is_null(), "{made}");
    }
    let shown = json(dir, &["show", "snap-live"]);
    let layers: Vec<_> =
        shown["layers"].as_array().unwrap().iter().map(|layer| layer["path"].as_str().unwrap()).collect();
    assert_eq!(layers.len(), 5);
    assert!(layers[0].ends_with("/snap-live.vhd") && layers[1].ends_with("-s3.vhd") && layers[4].ends_with("-s0.vhd"));
    // A snapshot is readable while the disk goes on.
    let before = raw_of(dir, "snap-live-s2.vhd", "before.raw");
    load.goes_on(&served);
    assert_eq!(load.end(), 0);
    assert!(raw_of(dir, "snap-live-s2.vhd", "after.raw") == before, "a snapshot has changed");
    assert!(served.terminate().success());
    assert_eq!(
        chain(dir, "snap-live.vhd"),
        ["snap-live.vhd", "snap-live-s3.vhd", "snap-live-s2.vhd", "snap-live-s1.vhd", "snap-live-s0.vhd"]
    );
    assert_eq!(images(dir).len(), 5);
    ok(dir, &["check", "snap-live.vhd"]);
}

#[test]
fn several_disks_get_one_point_in_time_or_none() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for disk in ["snap-a.vhd", "snap-b.vhd"] {
        ok(dir, &["create", disk, "--size", "16M"]);
    }
    let _served = serve(dir, &["snap-a.vhd", "snap-b.vhd"]);
    let made = json(dir, &["snapshot", "snap-a", "snap-b", "--name", "x"]);
    assert_eq!(made["disks"].as_array().unwrap().len(), 2);
    assert_eq!(images(dir), ["snap-a-x.vhd", "snap-a.vhd", "snap-b-x.vhd", "snap-b.vhd"]);
    // The second one's name is taken: the first one's snapshot is taken back.
    fs::write(dir.join("snap-b-y.vhd"), "x").unwrap();
    let said = fails(dir, 1, &["snapshot", "snap-a", "snap-b", "--name", "y"]);
    assert!(said.contains("snap-b-y.vhd") && said.contains("choose another"), "{said}");
    assert_eq!(images(dir), ["snap-a-x.vhd", "snap-a.vhd", "snap-b-x.vhd", "snap-b-y.vhd", "snap-b.vhd"]);
    assert_eq!(json(dir, &["show", "snap-a"])["layers"].as_array().unwrap().len(), 2);
    // And the disks can have the next one.
    ok(dir, &["snapshot", "snap-a", "snap-b", "--name", "z"]);
    assert_eq!(chain(dir, "snap-a.vhd"), ["snap-a.vhd", "snap-a-z.vhd", "snap-a-x.vhd"]);
}

#[test]
fn a_successor_takes_over_after_a_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "snap-over.vhd", "--size", "64M"]);
    let args = ["snap-over.vhd", "--vhost-user", "v"];
    let served = guests::serve(dir, &args);
    let mut load = Load::start(dir, "v", &["--span", "48M"]);
    load.goes_on(&served);
    ok(dir, &["snapshot", "c", "--name", "s"]);
    let next = guests::succeed(dir, &args, served);
    load.goes_on(&next);
    ok(dir, &["snapshot", "c", "--name", "t"]);
    assert_eq!(load.end(), 0);
    assert!(next.terminate().success());
    assert_eq!(chain(dir, "snap-over.vhd"), ["snap-over.vhd", "snap-over-t.vhd", "snap-over-s.vhd"]);
}

#[test]
fn a_disk_that_nobody_serves_is_frozen_and_cloned() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("base.raw"), vec![7; MIB as usize]).unwrap();
    ok(dir, &["convert", "base.raw", "a.vhd", "--size", "16M"]);
    let made = json(dir, &["snapshot", "a.vhd", "--name", "s.vhd"]);
    assert_eq!(made["longest_stall_us"], 0.0);
    assert_eq!(chain(dir, "a.vhd"), ["a.vhd", "s.vhd"]);
    let cloned = json(dir, &["clone", "s.vhd", "b.vhd"]);
    assert!(cloned["snapshot"].is_null());
    assert_eq!(chain(dir, "b.vhd"), ["b.vhd", "s.vhd"]);
    assert!(raw_of(dir, "a.vhd", "x.raw") == raw_of(dir, "b.vhd", "y.raw"));
    // A clone of a disk in use begins with a snapshot, and says its name.
    let _served = serve(dir, &["a.vhd,name=snap-clone"]);
    let cloned = json(dir, &["clone", "snap-clone", "c.vhd"]);
    assert!(cloned["parent_path"].as_str().unwrap().ends_with("/a-before-c.vhd"), "{cloned}");
    assert_eq!(chain(dir, "c.vhd"), ["c.vhd", "a-before-c.vhd", "s.vhd"]);
}

/// What lies beside a disk has longer names than the disk.
#[test]
fn a_disk_of_the_longest_name_can_all_that_others_can() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let [long, longer] = [224, 225].map(|len| format!("{}.vhd", "n".repeat(len)));
    assert!(fails(dir, 2, &["create", &longer, "--size", "1M"]).contains("228 bytes"));
    ok(dir, &["create", &long, "--size", "1M"]);
    ok(dir, &["checkpoint", &long, "one"]);
    ok(dir, &["snapshot", &long, "--name", "of-long"]);
    ok(dir, &["move", &long, "--to", &format!("m{}", &long[1..]), "--wait"]);
    ok(dir, &["gc", "."]);
}

#[test]
fn what_cannot_have_a_snapshot_says_why_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.raw", "--size", "16M"]);
    ok(dir, &["create", "a.vhd", "--size", "16M"]);
    ok(dir, &["create", "parent.vhd", "--size", "16M"]);
    ok(dir, &["create", "child.vhd", "--parent", "parent.vhd"]);
    let all = images(dir);
    let refused = |code, disk: &str, name: &str, why: &str| {
        let said = fails(dir, code, &["snapshot", disk, "--name", name]);
        assert!(said.contains(why), "{disk}: {said}");
        assert_eq!(images(dir), all);
    };
    refused(1, "a.raw", "s", "spile convert");
    refused(2, "a.vhd", "x/y", "no name for a snapshot");
    refused(2, "a.vhd", "a\nb", "control character");
    assert!(fails(dir, 2, &["clone", "a.vhd", "c\nd.vhd"]).contains("control character"));
    assert!(fails(dir, 2, &["create", "c\td.vhd", "--size", "1M"]).contains("control character"));
    assert!(fails(dir, 2, &["backup", "a.vhd", "c\nd.vhd"]).contains("control character"));
    // A backup goes with its manifest.
    ok(dir, &["backup", "a.vhd", "backup.vhd"]);
    let deleted = json(dir, &["delete", "backup.vhd"]);
    assert!(deleted["manifest_path"].as_str().unwrap().ends_with("/backup.vhd.spile-backup"), "{deleted}");
    assert!(!dir.join("backup.vhd.spile-backup").exists());
    assert_eq!(images(dir), all);
    refused(2, "a.vhd", &"x".repeat(245), "too long");
    refused(1, "a.vhd", "parent.vhd", "choose another name");
    refused(1, "./missing.vhd", "s", "it cannot be found");
    refused(1, "parent.vhd", "s", "child.vhd");
    refused(1, "missing.vhd", "s", "missing.vhd");
    {
        let _served = serve(dir, &["a.vhd,name=snap-ro,read-only", "null:1M,name=snap-null", "a.raw,name=snap-raw"]);
        refused(1, "snap-ro", "s", "reading only");
        refused(1, "snap-null", "s", "no folder");
        refused(1, "snap-raw", "s", "misread");
    }
    {
        // No command finds this server: who has the disk open is said all the same.
        let served = serve(dir, &["a.vhd", "--control", "none"]);
        refused(1, "a.vhd", "s", &format!("it is open in spile ({})", served.child.id()));
    }
    let served = serve(dir, &["a.vhd,name=snap-gone"]);
    fs::rename(dir.join("a.vhd"), dir.join("elsewhere.vhd")).unwrap();
    let said = fails(dir, 1, &["snapshot", "snap-gone", "--name", "s"]);
    assert!(said.contains("not at its path"), "{said}");
    assert!(!dir.join("s.vhd").exists() && !dir.join("a.vhd").exists());
    served.signal(Signal::SIGKILL);
}

#[test]
fn what_a_crash_has_left_goes_with_the_next_open() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.vhd", "--size", "16M"]);
    ok(dir, &["create", "s.vhd", "--size", "16M"]);
    ok(dir, &["create", "new.vhd", "--parent", "s.vhd"]);
    // As if the process had been killed when the old leaf had its second name.
    fs::rename(dir.join("new.vhd"), dir.join(".a.vhd.spile-new")).unwrap();
    fs::remove_file(dir.join("s.vhd")).unwrap();
    fs::hard_link(dir.join("a.vhd"), dir.join("s.vhd")).unwrap();
    ok(dir, &["info", "a.vhd"]);
    let tree = json(dir, &["tree", "."]);
    let half_made = tree["images"].as_array().unwrap().iter().filter(|image| image["half_made"] == true);
    let half_made: Vec<_> =
        half_made.map(|image| image["path"].as_str().unwrap().rsplit('/').next().unwrap()).collect();
    assert_eq!(half_made, ["s.vhd"]);
    assert!(ok(dir, &["tree", "."]).contains("of a snapshot that is not whole"));
    assert_eq!(images(dir).len(), 3, "who only looks changes nothing");
    fails(dir, 2, &["resize", "a.vhd", "1M"]);
    assert_eq!(images(dir), ["a.vhd"]);
    // Another file of the snapshot's name is none of it.
    ok(dir, &["create", "s.vhd", "--size", "16M"]);
    ok(dir, &["create", "new.vhd", "--parent", "s.vhd"]);
    fs::rename(dir.join("new.vhd"), dir.join(".a.vhd.spile-new")).unwrap();
    fails(dir, 2, &["resize", "a.vhd", "1M"]);
    assert_eq!(images(dir), ["a.vhd", "s.vhd"]);
}

#[test]
fn what_an_earlier_snapshot_has_left_goes_with_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.vhd", "--size", "16M"]);
    let _served = serve(dir, &["a.vhd,name=snap-left"]);
    // As if the storage had failed at the rename, and again when the second name was to go.
    ok(dir, &["create", "s.vhd", "--size", "16M"]);
    ok(dir, &["create", "new.vhd", "--parent", "s.vhd"]);
    fs::rename(dir.join("new.vhd"), dir.join(".a.vhd.spile-new")).unwrap();
    fs::remove_file(dir.join("s.vhd")).unwrap();
    fs::hard_link(dir.join("a.vhd"), dir.join("s.vhd")).unwrap();
    ok(dir, &["snapshot", "snap-left", "--name", "t.vhd"]);
    assert_eq!(images(dir), ["a.vhd", "t.vhd"]);
}

/// A disk of two images: `a.vhd` holds twos over ones, `s.vhd` ones.
pub fn with_snapshot(dir: &Path) {
    ok(dir, &["create", "a.vhd", "--size", "16M"]);
    let write = |byte: u8| {
        let served = Served::start(dir, &["a.vhd"]);
        Client::connect(&served.uri()).unwrap().write(0, &[byte; 4096], true).unwrap();
        assert!(served.terminate().success());
    };
    write(1);
    ok(dir, &["snapshot", "a.vhd", "--name", "s.vhd"]);
    write(2);
}

#[test]
fn a_disk_with_a_job_that_is_not_finished_neither_goes_back_nor_goes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    with_snapshot(dir);
    fs::write(dir.join(".a.vhd.spile-job"), "a note").unwrap();
    let before = images(dir);
    for args in [
        &["revert", "a.vhd", "s.vhd", "--discard"][..],
        &["revert", "a.vhd", "s.vhd", "--keep", "t.vhd"],
        &["delete", "a.vhd"],
        &["snapshot", "a.vhd", "--name", "t.vhd"],
    ] {
        let said = fails(dir, 1, args);
        assert!(said.contains("spile jobs"), "{args:?}: {said}");
        assert_eq!((images(dir), raw_of(dir, "a.vhd", "out.raw")[0]), (before.clone(), 2), "{args:?}");
    }
}

#[test]
fn a_way_back_that_fails_leaves_no_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    with_snapshot(dir);
    fs::create_dir(dir.join("other")).unwrap();
    ok(dir, &["create", "other/c.vhd", "--parent", "a.vhd", "--allow-parents", "."]);
    // As a child that another program has made in another folder.
    fs::remove_file(dir.join(".a.vhd.spile-children")).unwrap();
    let before = images(dir);
    // That the image needs the disk's own leaf is found only when the snapshot is there.
    let back = ["revert", "a.vhd", "other/c.vhd", "--keep", "t.vhd", "--no-lock", "--allow-parents", "."];
    let said = fails(dir, 2, &[&back[..], &["--allow-parents", "other"]].concat());
    assert!(said.contains("what would be lost"), "{said}");
    assert_eq!((images(dir), raw_of(dir, "a.vhd", "out.raw")[0]), (before, 2));
}

#[test]
fn a_clone_that_is_refused_leaves_no_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.vhd", "--size", "16M"]);
    fs::create_dir(dir.join("other")).unwrap();
    let _served = serve(dir, &["a.vhd,name=snap-refused"]);
    let said = fails(dir, 1, &["clone", "snap-refused", "other/b.vhd"]);
    assert!(said.contains("--allow-parents"), "{said}");
    fails(dir, 1, &["clone", "snap-refused", "missing/b.vhd"]);
    let said = fails(dir, 2, &["clone", "snap-refused", "b.raw"]);
    assert!(said.contains("ends in .vhd") && !said.contains("snap-refused-before"), "{said}");
    assert_eq!(images(dir), ["a.vhd"]);
    // A failure after the snapshot says its name.
    let said = fails(dir, 1, &["clone", "snap-refused", "/proc/b.vhd", "--allow-parents", "."]);
    assert!(said.contains("a-before-b.vhd"), "{said}");
}

#[test]
fn a_disk_whose_name_has_slashes_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for name in ["../snap-up", "snap/below"] {
        ok(dir, &["create", "a.vhd", "--size", "16M"]);
        let served = serve(dir, &[&format!("a.vhd,name={name}")]);
        assert_eq!(json(dir, &["show", name])["name"], *name);
        ok(dir, &["snapshot", "a.vhd", "--name", "s.vhd"]);
        assert!(served.terminate().success());
        ["a.vhd", "s.vhd"].iter().for_each(|image| fs::remove_file(dir.join(image)).unwrap());
    }
}

#[test]
fn only_what_nobody_needs_is_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    with_snapshot(dir);
    ok(dir, &["clone", "s.vhd", "b.vhd"]);
    let said = fails(dir, 1, &["delete", "s.vhd"]);
    assert!(said.contains("a.vhd") || said.contains("b.vhd"), "{said}");
    assert!(said.contains("spile coalesce"), "{said}");
    {
        let _served = serve(dir, &["a.vhd,name=snap-kept"]);
        assert!(fails(dir, 1, &["delete", "a.vhd"]).contains("served as"));
    }
    let deleted = json(dir, &["delete", "b.vhd"]);
    assert!(deleted["freed_bytes"].as_u64().unwrap() > 0);
    assert_eq!(images(dir), ["a.vhd", "s.vhd"]);
}

#[test]
fn an_image_whose_parent_is_gone_is_deleted_unless_others_need_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    with_snapshot(dir);
    ok(dir, &["snapshot", "a.vhd", "--name", "t.vhd"]);
    ok(dir, &["clone", "t.vhd", "b.vhd"]);
    fs::remove_file(dir.join("s.vhd")).unwrap();
    fails(dir, 1, &["check", "a.vhd"]);
    assert!(fails(dir, 1, &["delete", "t.vhd"]).contains("would be of no use without it"));
    for image in ["a.vhd", "b.vhd", "t.vhd"] {
        ok(dir, &["delete", image]);
    }
    assert!(images(dir).is_empty());
    assert!(fails(dir, 1, &["delete", "t.vhd"]).contains("cannot be found"));
    fs::write(dir.join("no.vhd"), "no image").unwrap();
    fails(dir, 1, &["delete", "no.vhd"]);
    assert_eq!(images(dir), ["no.vhd"]);
}

#[test]
fn a_tree_shows_families_and_who_uses_them() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    with_snapshot(dir);
    ok(dir, &["clone", "s.vhd", "b.vhd"]);
    ok(dir, &["create", "lone.vhd", "--size", "1M"]);
    fs::write(dir.join(".b.vhd.spile-new"), "half-made").unwrap();
    let served = serve(dir, &["a.vhd,name=snap-tree"]);
    let tree = json(dir, &["tree", "."]);
    let of = |image: &Value| {
        let name = Path::new(image["path"].as_str().unwrap()).file_name().unwrap().to_str().unwrap().to_owned();
        (name, image["depth"].as_u64().unwrap())
    };
    let images = tree["images"].as_array().unwrap();
    let shown: Vec<_> = images.iter().map(of).collect();
    let expected = [("lone.vhd", 0), ("s.vhd", 0), ("a.vhd", 1), ("b.vhd", 1)];
    assert_eq!(shown, expected.map(|(name, depth)| (name.to_owned(), depth)));
    let pid = served.child.id();
    for (image, is_open) in images.iter().zip([false, true, true, false]) {
        assert_eq!(image["open_by"].as_array().unwrap().iter().any(|opener| opener["pid"] == pid), is_open, "{image}");
    }
    assert_eq!((&images[2]["disk"], &images[1]["disk"]), (&"snap-tree".into(), &Value::Null));
    assert_eq!(tree["beside"].as_array().unwrap().len(), 1);
    let family = json(dir, &["tree", "snap-tree"]);
    assert_eq!(family["images"].as_array().unwrap().len(), 3);
    assert!(ok(dir, &["tree", "b.vhd"]).contains("\n  b.vhd  16 MiB vhd"));
    // A link to an image is that image; from elsewhere its parent is found where the image is.
    std::os::unix::fs::symlink("b.vhd", dir.join("link.vhd")).unwrap();
    assert_eq!(json(dir, &["tree", "."])["images"].as_array().unwrap().len(), 4);
    fs::create_dir(dir.join("links")).unwrap();
    std::os::unix::fs::symlink("../b.vhd", dir.join("links/far.vhd")).unwrap();
    assert_eq!(json(dir, &["tree", "links"])["images"][0]["parent_missing"], false);
}

#[test]
fn two_disks_of_a_folder_have_snapshots_of_one_name() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for (disk, byte) in [("one", 1), ("other", 2)] {
        fs::write(dir.join("bytes.raw"), vec![byte; MIB as usize]).unwrap();
        ok(dir, &["convert", "bytes.raw", &format!("{disk}.vhd")]);
        ok(dir, &["snapshot", &format!("{disk}.vhd"), "--name", "daily"]);
    }
    fs::remove_file(dir.join("bytes.raw")).unwrap();
    assert_eq!(images(dir), ["one-daily.vhd", "one.vhd", "other-daily.vhd", "other.vhd"]);
    let said = fails(dir, 1, &["snapshot", "one.vhd", "--name", "daily"]);
    assert!(said.contains("has a snapshot daily already") && said.contains("choose another name"), "{said}");
    let _served = serve(dir, &["one.vhd,name=snap-same"]);
    for disk in ["snap-same", "other.vhd"] {
        let gone = json(dir, &["revert", disk, "daily", "--discard"]);
        let own = if disk == "other.vhd" { "/other-daily.vhd" } else { "/one-daily.vhd" };
        assert!(gone["snapshot_path"].as_str().unwrap().ends_with(own), "{gone}");
    }
    // The names that there are.
    for disk in ["snap-same", "other.vhd"] {
        let said = fails(dir, 1, &["revert", disk, "dayly", "--discard"]);
        assert!(said.contains("no snapshot \"dayly\"") && said.contains("its snapshots are daily"), "{said}");
    }
    ok(dir, &["coalesce", "snap-same"]);
    assert_eq!(images(dir), ["one.vhd", "other-daily.vhd", "other.vhd"]);
    // A snapshot is deleted by its disk and its name.
    assert!(fails(dir, 1, &["delete", "snap-same", "daily"]).contains("no snapshot"));
    assert!(json(dir, &["delete", "other.vhd", "daily"])["child_path"].as_str().unwrap().ends_with("/other.vhd"));
    ok(dir, &["gc", "."]);
    assert_eq!(images(dir), ["one.vhd", "other.vhd"]);
}

/// Earlier versions called the file by the name alone.
#[test]
fn a_snapshot_of_an_earlier_version_is_found_and_that_of_another_disk_is_not_taken_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "one.vhd", "--size", "16M"]);
    ok(dir, &["create", "other.vhd", "--size", "16M"]);
    ok(dir, &["snapshot", "one.vhd", "--name", "daily.vhd"]);
    assert_eq!(images(dir), ["daily.vhd", "one.vhd", "other.vhd"]);
    assert!(fails(dir, 1, &["snapshot", "one.vhd", "--name", "daily"]).contains("has a snapshot daily already"));
    ok(dir, &["revert", "one.vhd", "daily", "--keep", "later"]);
    let said = fails(dir, 2, &["revert", "other.vhd", "daily", "--discard"]);
    assert!(said.contains("nothing in common") && said.contains("./daily.vhd"), "{said}");
    assert_eq!(chain(dir, "other.vhd"), ["other.vhd"]);
    // What the disk does not lie over any more is its snapshot all the same.
    ok(dir, &["revert", "one.vhd", "later", "--discard"]);
    assert_eq!(chain(dir, "one.vhd"), ["one.vhd", "one-later.vhd", "daily.vhd"]);
    ok(dir, &["snapshot", "other.vhd", "--name", "daily"]);
    ok(dir, &["coalesce", "one.vhd", "--layer", "later"]);
    assert_eq!(chain(dir, "one.vhd"), ["one.vhd", "daily.vhd"]);
}
