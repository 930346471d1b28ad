//! What the program prints for people fits a terminal of 80 columns, whatever the names, paths and figures. A path that is said alone in its
//! line may be longer.

use std::path::{Path, PathBuf};

use crate::common::guests::{nbd, serve};
use crate::common::nbd::Client;
use crate::common::{ok, run};

/// A folder whose path is longer than a line.
fn deep(dir: &Path) -> PathBuf {
    let deep = dir.join("a-folder-with-a-long-name").join("another-one-in-it").join("x".repeat(60));
    std::fs::create_dir_all(&deep).unwrap();
    deep
}

/// Each line is short once the paths in it are.
fn assert_fits(text: &str, folder: &Path) {
    let text = text.replace(folder.to_str().unwrap(), "").replace(&"x".repeat(60), "");
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{} columns: {line}\n{text}", line.chars().count());
    }
}

#[test]
fn tables_of_served_disks_fit() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let folder = deep(dir);
    let (disk, name) = (folder.join("disk.vhd").display().to_string(), "n".repeat(70));
    ok(dir, &["create", &disk, "--size", "2040G"]);
    let spec = format!("{disk},name={name}");
    let null = "null:4194303T,read-only,name=the-largest-disk-that-there-is";
    let served = serve(dir, &[&spec, null, "--nbd", "unix:n", "--vhost-user", "v"]);
    Client::connect(&nbd(dir, "")).unwrap().write(0, &[1; 4096], true).unwrap();
    let list = ok(dir, &["ls", "c"]);
    assert!(list.lines().all(|line| line.chars().count() <= 80), "{list}");
    assert!(list.contains("running") && list.contains("disk.vhd") && list.contains("nbd"), "{list}");
    let shown = ok(dir, &["show", "c"]);
    let lines =
        shown.lines().filter(|line| !["server: ", "image: ", "way: ", &name].iter().any(|of| line.starts_with(of)));
    lines.for_each(|line| assert!(line.chars().count() <= 80, "{line}\n{shown}"));
    assert!(shown.contains("longest") && shown.contains("write"), "{shown}");
    // The first line has the disk's name and path.
    for layers in [&["--layers"][..], &[]] {
        let stat = ok(dir, &[&["stat", "c", "--interval", "50ms"], layers].concat());
        assert!(stat.lines().skip(1).all(|line| line.chars().count() <= 80), "{stat}");
        assert!(stat.contains("front vhost-user"), "{stat}");
    }
    assert!(served.terminate().success());
}

#[test]
fn what_is_said_of_images_fits() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let folder = deep(dir);
    let path = |name: &str| folder.join(name).display().to_string();
    ok(dir, &["create", &path("p.vhd"), "--size", "2040G"]);
    ok(dir, &["create", &path("c.vhd"), "--parent", &path("p.vhd")]);
    ok(dir, &["create", &path("r.raw"), "--size", "7T"]);
    // A geometry that says another size, in a footer of another program.
    for disk in ["p.vhd", "c.vhd", "r.raw"] {
        let disk = path(disk);
        assert_fits(&ok(dir, &["info", "--chain", &disk]), &folder);
        assert_fits(&ok(dir, &["check", &disk]), &folder);
        assert_fits(&ok(dir, &["map", &disk]), &folder);
        assert_fits(&ok(dir, &["measure", &disk, "--to", "raw"]), &folder);
    }
    std::fs::File::options().write(true).open(path("r.raw")).unwrap().set_len((7 << 40) - 512).unwrap();
    ok(dir, &["create", &path("s.raw"), "--size", "7T"]);
    let compared = run(dir, &["compare", &path("r.raw"), &path("s.raw")]);
    assert_eq!(compared.status.code(), Some(0));
    let text = String::from_utf8(compared.stdout).unwrap();
    assert!(text.contains("the sizes differ") && text.contains("7696581394432"), "{text}");
    assert_fits(&text, &folder);
}
