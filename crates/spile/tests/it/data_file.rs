//! Images that keep their data in another file, by the commands.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Command;

use crate::common::host::{names, serve};
use crate::common::mount::Mount;
use crate::common::{fails, faulty_sync, json, ok};
use nix::sys::signal::Signal;

const ALLOW: &str = "--allow-data-file";

fn make(dir: &Path, image: &str, more: &[&str]) {
    let data = image.replace(".qcow2", ".raw");
    ok(dir, &[&["create", image, "--data-file", &data], more].concat());
}

#[test]
fn what_a_snapshot_that_was_broken_off_has_left_goes_with_the_next_open() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "a.qcow2", &["--size", "16M"]);
    ok(dir, &["create", "s.qcow2", "--size", "16M"]);
    ok(dir, &["create", "new.qcow2", "--parent", "s.qcow2"]);
    // As if the process had been killed when the old leaf had its second name.
    fs::rename(dir.join("new.qcow2"), dir.join(".a.qcow2.spile-new")).unwrap();
    fs::remove_file(dir.join("s.qcow2")).unwrap();
    fs::hard_link(dir.join("a.qcow2"), dir.join("s.qcow2")).unwrap();
    ok(dir, &["resize", "a.qcow2", "32M", ALLOW]);
    assert_eq!(names(dir), ["a.qcow2", "a.raw"]);
    // Another image of the same data file is no second name.
    fs::copy(dir.join("a.qcow2"), dir.join("s.qcow2")).unwrap();
    assert!(fails(dir, 1, &["resize", "a.qcow2", "64M", ALLOW]).contains("s.qcow2"));
}

#[test]
fn a_delete_is_told_that_the_data_file_goes_too() {
    for raw in [&[][..], &["--data-file-raw"]] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        make(dir, "a.qcow2", &[&["--size", "16M"], raw].concat());
        let said = fails(dir, 1, &["delete", "a.qcow2", ALLOW]);
        assert!(said.contains("a.raw") && said.contains("--with-data-file"), "{said}");
        assert_eq!(names(dir), ["a.qcow2", "a.raw"]);
        let said = json(dir, &["delete", "a.qcow2", ALLOW, "--with-data-file"]);
        assert!(said["data_path"].as_str().unwrap().ends_with("/a.raw"), "{said}");
        assert_eq!(names(dir), [""; 0]);
        make(dir, "a.qcow2", &["--size", "16M"]);
        let said = ok(dir, &["delete", "a.qcow2", ALLOW, "--with-data-file"]);
        assert!(said.contains("a.qcow2 and ") && said.contains("/a.raw"), "{said}");
    }
}

#[test]
fn the_name_of_a_data_file_says_that_it_is_raw() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for data in ["a.data", "data", "a.vhd", "b.qcow2"] {
        let said = fails(dir, 2, &["create", "a.qcow2", "--size", "16M", "--data-file", data]);
        assert!(said.contains(".raw or .img"), "{said}");
    }
    assert_eq!(names(dir), [""; 0]);
    // As another program makes it: the guest's first bytes would be taken for an image with parents.
    make(dir, "a.qcow2", &["--size", "16M"]);
    let bytes = fs::read(dir.join("a.qcow2")).unwrap();
    let at = bytes.windows(6).position(|found| found == b"/a.raw").unwrap();
    fs::rename(dir.join("a.raw"), dir.join("a.vhd")).unwrap();
    let renamed = [&bytes[..at], b"/a.vhd", &bytes[at + 6..]].concat();
    fs::write(dir.join("a.qcow2"), renamed).unwrap();
    let said = fails(dir, 1, &["resize", "a.qcow2", "32M", ALLOW]);
    assert!(said.contains("a.vhd") && said.contains("--write-parent"), "{said}");
}

/// All files of `dir` with what they hold.
fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    names(dir).into_iter().map(|name| (name.clone(), fs::read(dir.join(name)).unwrap())).collect()
}

#[test]
fn nothing_is_merged_below_an_image_that_would_have_to_name_another_parent_and_has_a_data_file() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "base.qcow2", "--size", "16M"]);
    ok(dir, &["create", "s1.qcow2", "--parent", "base.qcow2"]);
    make(dir, "s2.qcow2", &["--parent", "s1.qcow2"]);
    ok(dir, &["create", "leaf.qcow2", "--parent", "s2.qcow2", ALLOW]);
    ok(dir, &["create", "other.qcow2", "--parent", "s1.qcow2"]);
    ok(dir, &["create", "below.qcow2", "--parent", "other.qcow2"]);
    let before = contents(dir);
    let said = fails(dir, 1, &["coalesce", "leaf.qcow2", "--layer", "s1", ALLOW]);
    assert!(said.contains("keeps its data in another file"), "{said}");
    // The same layer below a disk that has no data file.
    let said = fails(dir, 1, &["coalesce", "below.qcow2", "--layer", "s1"]);
    assert!(said.contains("s2.qcow2 is a child") && said.contains("keeps its data in another file"), "{said}");
    assert!(contents(dir) == before, "nothing has changed");
}

/// Another program gives it such a name. Its guest writes there what it likes, also what begins as an image.
#[test]
fn a_data_file_whose_name_says_no_format_is_not_asked_for_parents() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "a.qcow2", &["--size", "16M"]);
    let bytes = fs::read(dir.join("a.qcow2")).unwrap();
    let at = bytes.windows(6).position(|found| found == b"/a.raw").unwrap();
    fs::rename(dir.join("a.raw"), dir.join("a.dat")).unwrap();
    fs::write(dir.join("a.qcow2"), [&bytes[..at], b"/a.dat", &bytes[at + 6..]].concat()).unwrap();
    for victim in ["a.qcow2", "other.qcow2"] {
        if victim == "other.qcow2" {
            ok(dir, &["create", victim, "--size", "16M"]);
        }
        ok(dir, &["create", "child.qcow2", "--parent", victim, ALLOW]);
        fs::copy(dir.join("child.qcow2"), dir.join("a.dat")).unwrap();
        fs::remove_file(dir.join("child.qcow2")).unwrap();
        ok(dir, &["resize", victim, "32M", ALLOW]);
    }
    // The same bytes where no image has its data: it may be a child.
    fs::copy(dir.join("a.dat"), dir.join("b.dat")).unwrap();
    let said = fails(dir, 1, &["resize", "other.qcow2", "64M"]);
    assert!(said.contains("b.dat"), "{said}");
    let said = fails(dir, 1, &["delete", "other.qcow2"]);
    assert!(said.contains("b.dat"), "{said}");
    fs::remove_file(dir.join("b.dat")).unwrap();
    ok(dir, &["delete", "other.qcow2"]);
    assert_eq!(names(dir), ["a.dat", "a.qcow2"]);
}

/// A process that writes behind its limit on the length of files is killed there, and cleans up nothing, as by `kill -9`.
#[test]
fn a_disk_whose_space_is_not_taken_yet_has_no_name_and_neither_has_its_data_file() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("empty.raw"), "").unwrap();
    let space = ["--size", "8M", "--preallocate"];
    let refused_at = |kib: u64, made: &[&str]| {
        let limited = format!("ulimit -c 0; ulimit -f {kib}; exec \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &limited, "sh", env!("CARGO_BIN_EXE_spile")]).args(made).current_dir(dir);
        assert_eq!(command.status().unwrap().code(), Some(1), "{made:?}, {kib}");
        assert_eq!(names(dir), ["empty.raw"], "{made:?}, {kib}");
        assert_eq!(fs::metadata(dir.join("empty.raw")).unwrap().len(), 0, "{made:?}, {kib}");
    };
    let raw = [&["create", "a.raw"], &space[..]].concat();
    let fixed = [&["create", "a.vhd", "--subformat", "fixed"], &space[..]].concat();
    let qcow2 = [&["create", "a.qcow2"], &space[..]].concat();
    let data = [&["create", "a.qcow2", "--data-file", "d.raw"], &space[..]].concat();
    let there = [&["create", "a.qcow2", "--data-file", "empty.raw"], &space[..]].concat();
    for made in [&raw, &fixed, &qcow2, &data, &there] {
        [0, 256, 4096].iter().for_each(|kib| refused_at(*kib, made));
        ok(dir, made);
        let holds = names(dir).into_iter().map(|name| fs::metadata(dir.join(name)).unwrap().blocks() * 512);
        assert!(holds.sum::<u64>() >= 8 << 20, "{made:?}: its space is not taken");
        names(dir).iter().filter(|name| *name != "empty.raw").for_each(|name| fs::remove_file(dir.join(name)).unwrap());
        fs::write(dir.join("empty.raw"), "").unwrap();
    }
    // By writing, with no limit but the file system's.
    for made in [&["create", "a.raw"][..], &["create", "a.qcow2", "--data-file", "d.raw"]] {
        ok(dir, &[made, &["--size", "8M", "--preallocate=full"]].concat());
        names(dir).iter().filter(|name| *name != "empty.raw").for_each(|name| fs::remove_file(dir.join(name)).unwrap());
    }
}

#[test]
fn a_disk_and_its_data_file_get_their_names_together() {
    let dir = tempfile::tempdir().unwrap();
    let (faults, dir) = (dir.path(), &dir.path().join("disks"));
    fs::create_dir(dir).unwrap();
    let inode = fs::metadata(dir).unwrap().ino().to_string();
    fs::write(faults.join("kill-at-sync-of"), &inode).unwrap();
    let mut killed = faulty_sync(faults);
    let made = ["create", "a.qcow2", "--data-file", "a.raw", "--size", "8M"];
    let ended = killed.args(made).current_dir(dir).status().unwrap();
    assert_eq!(ended.signal(), Some(Signal::SIGKILL as i32));
    assert_eq!(names(dir), ["a.qcow2", "a.raw"]);
    ok(dir, &["check", "a.qcow2", ALLOW]);
    assert_eq!(fs::metadata(dir.join("a.raw")).unwrap().len(), 8 << 20);
}

#[test]
fn space_that_is_not_there_leaves_no_disk_and_an_empty_data_file_empty() {
    let dir = tempfile::tempdir().unwrap();
    let test = "space_that_is_not_there_leaves_no_disk_and_an_empty_data_file_empty";
    let Some(mount) = Mount::new(dir.path(), 32 << 20, test) else { return };
    let dir = &mount.path;
    fs::remove_dir(dir.join("lost+found")).unwrap();
    fs::write(dir.join("empty.raw"), "").unwrap();
    for made in [
        &["create", "a.raw"][..],
        &["create", "a.vhd", "--subformat", "fixed"],
        &["create", "a.qcow2"],
        &["create", "a.qcow2", "--data-file", "d.raw"],
        &["create", "a.qcow2", "--data-file", "empty.raw"],
    ] {
        let said = fails(dir, 1, &[made, &["--size", "64M", "--preallocate=full"]].concat());
        assert!(said.contains("are missing"), "{said}");
        assert_eq!(names(dir), ["empty.raw"], "{made:?}");
        let stat = fs::metadata(dir.join("empty.raw")).unwrap();
        assert_eq!((stat.len(), stat.blocks()), (0, 0), "{made:?}");
    }
    fs::write(dir.join("empty.raw"), [0]).unwrap();
    let said = fails(dir, 1, &["create", "a.qcow2", "--data-file", "empty.raw", "--size", "1M"]);
    assert!(said.contains("remove it, also where a spile create that was killed"), "{said}");
}

#[test]
fn a_clone_that_may_not_follow_to_a_data_file_makes_no_snapshot_first() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "a.qcow2", &["--size", "16M"]);
    let served = serve(dir, &["a.qcow2,name=data-served", ALLOW]);
    let before = names(dir);
    let said = fails(dir, 1, &["clone", "data-served", "x.qcow2"]);
    assert!(said.contains("/a.raw") && said.contains(ALLOW), "{said}");
    assert_eq!(names(dir), before);
    ok(dir, &["clone", "data-served", "x.qcow2", ALLOW]);
    fs::remove_file(dir.join("x.qcow2")).unwrap();
    // As if the clone had been killed behind its snapshot. What is said then works.
    let said = fails(dir, 1, &["clone", "data-served", "x.qcow2", ALLOW]);
    let there = dir.join("a-before-x.qcow2").display().to_string();
    assert!(said.contains(&format!("`spile clone {there} x.qcow2 {ALLOW}`")), "{said}");
    ok(dir, &["clone", &there, "x.qcow2", ALLOW]);
    assert!(served.terminate().success());
}
