//! Images that keep their data in another file, by the commands.

use std::fs;
use std::path::Path;

use crate::common::host::names;
use crate::common::{fails, json, ok};

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
