//! Files of formats that are not read here, by their content and by their extensions; and raw disks that look like them.

use std::fs;

use crate::common::{fails, json, ok, run};

const CONTAINERS: [(&str, usize, &[u8], &str, &str); 9] = [
    ("luks", 0, b"LUKS\xba\xbe\0\x01", "LUKS 1 container", "cryptsetup open"),
    ("luks", 0, b"LUKS\xba\xbe\0\x02", "LUKS 2 container", "cryptsetup open"),
    ("hdd", 0, b"WithoutFreeSpace", "Parallels image", "qemu-img convert -f parallels"),
    ("hds", 0, b"WithouFreSpacExt", "Parallels image", "qemu-img convert -f parallels"),
    ("qcow", 0, b"QFI\xfb\0\0\0\x01", "qcow image of version 1", "qemu-img convert -f qcow"),
    ("vmdk", 0, b"KDMV", "VMDK", "qemu-img convert -f vmdk"),
    ("vdi", 0x40, b"\x7f\x10\xda\xbe", "VDI", "qemu-img convert -f vdi"),
    ("vhdx", 0, b"vhdxfile", "VHDX", "qemu-img convert -f vhdx"),
    ("gz", 0, b"\x1f\x8b\x08", "gzip file", "gzip -d"),
];

#[test]
fn a_container_that_is_not_read_here_is_named_with_what_reads_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for (extension, at, mark, name, way) in CONTAINERS {
        let mut bytes = vec![0; 8192];
        bytes[at..at + mark.len()].copy_from_slice(mark);
        // An extension that means nothing, and that of the format.
        for file in ["disk", &format!("disk.{extension}")] {
            fs::write(dir.join(file), &bytes).unwrap();
            for args in [&["info", file][..], &["check", file], &["map", file], &["convert", file, "new.raw"]] {
                let said = fails(dir, 2, args);
                assert!(said.contains(name) && said.contains(way) && !said.contains("format raw"), "{args:?}: {said}");
            }
            let said = fails(dir, 2, &["serve", file, "--nbd", "unix:n", "--control", "none"]);
            assert!(said.contains(name) && said.contains(way), "{said}");
        }
        // A raw disk is one all the same, and its user is warned.
        fs::write(dir.join("disk.raw"), &bytes).unwrap();
        assert!(ok(dir, &["info", "disk.raw"]).contains(&format!("looks like a {name}")));
        assert_eq!(json(dir, &["info", "disk.raw"])["layers"][0]["facts"]["looks_like"], name);
        let output = run(dir, &["convert", "disk.raw", "copy.raw"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains(name) && said.contains(way), "{said}");
        assert!(fs::read(dir.join("copy.raw")).unwrap() == bytes);
        fs::remove_file(dir.join("copy.raw")).unwrap();
    }
}

#[test]
fn an_extension_alone_names_the_format_too() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.vmdk"), [0; 8192]).unwrap();
    let said = fails(dir.path(), 2, &["info", "a.vmdk"]);
    assert!(said.contains("by its extension") && said.contains("qemu-img convert -f vmdk"), "{said}");
    fs::write(dir.path().join("a"), [0; 8192]).unwrap();
    assert!(fails(dir.path(), 2, &["info", "a"]).contains("cannot tell the format"));
    ok(dir.path(), &["create", "a.qcow2", "--size", "1M"]);
    fs::rename(dir.path().join("a.qcow2"), dir.path().join("a")).unwrap();
    let said = fails(dir.path(), 2, &["info", "a"]);
    assert!(said.contains("looks like a qcow2 image") && said.contains("--format qcow2"), "{said}");
}

#[test]
fn a_data_file_elsewhere_is_not_called_a_parent() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.qcow2", "--size", "1M", "--data-file", "a.raw"]);
    let elsewhere = tempfile::tempdir().unwrap();
    fs::rename(dir.join("a.raw"), elsewhere.path().join("a.raw")).unwrap();
    std::os::unix::fs::symlink(elsewhere.path().join("a.raw"), dir.join("a.raw")).unwrap();
    let said = fails(dir, 1, &["map", "a.qcow2", "--allow-data-file"]);
    assert!(said.contains("data file") && said.contains("outside") && !said.contains("the parent"), "{said}");
}
