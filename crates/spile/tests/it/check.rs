//! `spile check`: what it calls corruption, and what it calls by other names.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::common::{fails, json, ok, run};

/// The exit code, and what is told in JSON.
fn checked(dir: &Path, args: &[&str]) -> (Option<i32>, Value) {
    let output = run(dir, &[&["check", "--json"][..], args].concat());
    let told = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{args:?}: {output:?}"));
    (output.status.code(), told)
}

fn said(told: &Value) -> String {
    told["findings"].to_string()
}

/// Writes over some bytes of a file.
fn patch(path: &Path, at: usize, bytes: &[u8]) {
    let mut file = fs::read(path).unwrap();
    file[at..at + bytes.len()].copy_from_slice(bytes);
    fs::write(path, file).unwrap();
}

#[test]
fn a_parent_that_is_missing_is_no_corruption_of_its_child() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for kind in ["vhd", "qcow2"] {
        let [parent, child] = ["p", "c"].map(|name| format!("{name}.{kind}"));
        ok(dir, &["create", &parent, "--size", "1M"]);
        ok(dir, &["create", &child, "--parent", &parent]);
        fs::remove_file(dir.join(&parent)).unwrap();
        let (code, told) = checked(dir, &[&child]);
        assert_eq!((code, told["result"].as_str()), (Some(1), Some("incomplete")), "{told}");
        let said = said(&told);
        assert!(said.contains("the image itself was checked") && said.matches(&parent).count() == 1, "{said}");
        assert!(told["total_blocks"].as_u64() > Some(0), "{told}");
    }
    // One that took its place is another matter.
    ok(dir, &["create", "p.vhd", "--size", "1M"]);
    assert_eq!(checked(dir, &["c.vhd"]).0, Some(3));
}

#[test]
fn what_the_options_do_not_open_is_no_corruption() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ["base", "own"].iter().for_each(|folder| fs::create_dir(dir.join(folder)).unwrap());
    ok(dir, &["create", "apart.qcow2", "--size", "1M", "--data-file", "apart.raw"]);
    ok(dir, &["create", "base/p.vhd", "--size", "1M"]);
    ok(dir, &["create", "own/c.vhd", "--parent", "base/p.vhd", "--allow-parents", "base"]);
    ok(dir, &["create", "p.raw", "--size", "1M"]);
    ok(dir, &["create", "unnamed.qcow2", "--parent", "p.raw"]);
    let bytes = fs::read(dir.join("unnamed.qcow2")).unwrap();
    let at = bytes.windows(4).position(|word| word == [0xe2, 0x79, 0x2a, 0xca]).unwrap();
    patch(&dir.join("unnamed.qcow2"), at, &[1; 4]);
    for (disk, word, option) in [
        ("apart.qcow2", "--allow-data-file", "--allow-data-file"),
        ("own/c.vhd", "--allow-parents", "--allow-parents=base"),
        ("unnamed.qcow2", "--backing-format", "--backing-format=raw"),
    ] {
        let (code, told) = checked(dir, &[disk]);
        assert_eq!((code, told["result"].as_str()), (Some(0), Some("sound")), "{told}");
        let said = said(&told);
        assert!(said.contains("and no other file") && said.contains(word), "{said}");
        assert_eq!(checked(dir, &[disk, option]).1["findings"], serde_json::json!([]), "{disk}");
    }
}

#[test]
fn another_format_is_named_and_is_no_corruption() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.qcow2", "--size", "1M"]);
    ok(dir, &["create", "a.vhd", "--size", "1M"]);
    ok(dir, &["create", "a.raw", "--size", "1M"]);
    fs::write(dir.join("b.vhd"), [b"vhdxfile".as_slice(), &[0; 4096]].concat()).unwrap();
    ok(dir, &["checkpoint", "a.raw", "monday"]);
    for (disk, format, says) in [
        ("a.qcow2", "vhd", "this is a qcow2 image, and no vhd"),
        ("a.vhd", "qcow2", "this is a VHD, and no qcow2"),
        ("a.raw", "qcow2", "nothing in the file says that it is a qcow2"),
        ("a.raw", "vhd", "nothing in the file says that it is a vhd"),
        ("b.vhd", "vhd", "this is a VHDX, and no vhd"),
    ] {
        for repair in [&[][..], &["--repair"]] {
            let said = fails(dir, 2, &[&["check", disk, "--format", format][..], repair].concat());
            assert!(said.contains(says), "{disk} as {format}: {said}");
        }
        if disk != "a.raw" {
            assert!(fails(dir, 2, &["info", disk, "--format", format]).contains(says));
        }
    }
    assert!(
        ok(dir, &["checkpoint", "a.raw", "--list"]).contains("monday"),
        "a repair of something else has removed it"
    );
}

#[test]
fn fields_that_mean_nothing_are_a_warning_and_are_mended() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "sound.qcow2", "--size", "1M"]);
    for (at, bytes, says) in [(16, &[0, 0, 0, 23][..], "name of a backing file"), (95, &[2], "autoclear bit 1")] {
        let odd = dir.join("odd.qcow2");
        fs::copy(dir.join("sound.qcow2"), &odd).unwrap();
        patch(&odd, at, bytes);
        let before = fs::read(&odd).unwrap();
        let (code, told) = checked(dir, &["odd.qcow2"]);
        assert_eq!((code, told["result"].as_str()), (Some(0), Some("sound")), "{told}");
        assert_eq!(told["findings"][0]["can_repair"], true, "{told}");
        assert!(said(&told).contains(says), "{told}");
        assert!(ok(dir, &["info", "odd.qcow2"]).contains(says));
        assert_eq!(json(dir, &["info", "odd.qcow2"])["layers"][0]["facts"]["data_file_is_raw"], false);
        ok(dir, &["map", "odd.qcow2"]);
        ok(dir, &["compare", "sound.qcow2", "odd.qcow2"]);
        assert!(fs::read(&odd).unwrap() == before);
        assert_eq!(checked(dir, &["odd.qcow2", "--repair"]).1["findings"], serde_json::json!([]));
        assert!(fs::read(&odd).unwrap() == fs::read(dir.join("sound.qcow2")).unwrap());
        // What writes to such an image mends it, too.
        patch(&odd, at, bytes);
        ok(dir, &["snapshot", "odd.qcow2", "--name", &format!("s{at}")]);
        ok(dir, &["resize", "odd.qcow2", "2M"]);
        assert_eq!(checked(dir, &["odd.qcow2"]).0, Some(0));
    }
}
