//! `spile convert` in places that are there already, in pipes, and where there is no room; and `spile measure`.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::host;
use crate::common::{fails, json, ok, run, spile};

/// 4 MiB with data at both ends and in the middle.
fn pattern() -> Vec<u8> {
    let mut bytes = vec![0; 4 << 20];
    bytes[..5000].fill(1);
    bytes[2 << 20..(2 << 20) + 512].fill(2);
    *bytes.last_mut().unwrap() = 3;
    bytes
}

/// Runs it in `dir` with `bytes` on stdin, through a pipe.
fn piped(dir: &Path, args: &[&str], bytes: &[u8]) -> Output {
    let mut command = spile();
    command.args(args).current_dir(dir).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // One that has failed reads nothing more.
    let _ = stdin.write_all(bytes);
    drop(stdin);
    child.wait_with_output().unwrap()
}

#[test]
fn a_pipe_becomes_a_disk_and_a_disk_goes_into_a_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let raw = piped(dir, &["convert", "-", "a.raw", "--json"], &pattern());
    assert!(raw.status.success(), "{raw:?}");
    let told: serde_json::Value = serde_json::from_slice(&raw.stdout).unwrap();
    assert_eq!(told["virtual_size_bytes"], 4 << 20);
    assert!(fs::read(dir.join("a.raw")).unwrap() == pattern());
    assert!(fs::metadata(dir.join("a.raw")).unwrap().blocks() * 512 < 1 << 20, "zeroes are holes");
    assert!(piped(dir, &["convert", "-", "a.vhd", "--size", "6M"], &pattern()).status.success());
    let out = run(dir, &["convert", "a.vhd", "-"]);
    assert!(out.status.success() && out.stdout[..4 << 20] == pattern() && out.stdout.len() == 6 << 20);
    assert!(out.stdout[4 << 20..].iter().all(|byte| *byte == 0));
    // A file on stdin has a length, and needs no --size.
    let mut command = spile();
    command.args(["convert", "-", "b.vhd"]).current_dir(dir).stdin(fs::File::open(dir.join("a.raw")).unwrap());
    assert!(command.status().unwrap().success());
    ok(dir, &["compare", "a.raw", "b.vhd"]);
}

#[test]
fn what_cannot_go_through_a_pipe_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.raw", "--size", "1M"]);
    let cases: [(&[&str], i32, &str); 6] = [
        (&["convert", "-", "b.vhd"], 2, "--size"),
        (&["convert", "-", "b.vhd", "--size", "1M"], 1, "more bytes than the disk"),
        (&["convert", "-", "b.raw", "--from", "vhd"], 2, "only raw bytes"),
        (&["convert", "a.raw", "-", "--to", "vhd"], 2, "only raw bytes"),
        (&["convert", "a.raw", "-", "--json"], 2, "nothing beside them"),
        (&["convert", "-", "-"], 2, "stdin to stdout"),
    ];
    for (args, code, says) in cases {
        let output = piped(dir, args, &pattern());
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(code) && err.contains(says), "{args:?}: {err}");
    }
    assert_eq!(fs::read_dir(dir).unwrap().count(), 1, "nothing is left");
}

#[test]
fn a_file_is_overwritten_only_when_that_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("a.raw"), pattern()).unwrap();
    fs::write(dir.join("b.vhd"), vec![7; 8 << 20]).unwrap();
    let inode = || fs::metadata(dir.join("b.vhd")).unwrap().ino();
    let before = inode();
    assert!(fails(dir, 1, &["convert", "a.raw", "b.vhd"]).contains("--onto"));
    ok(dir, &["convert", "a.raw", "b.vhd", "--onto"]);
    ok(dir, &["compare", "a.raw", "b.vhd"]);
    assert_eq!(json(dir, &["check", "b.vhd"])["result"], "sound");
    assert_eq!(inode(), before, "it is the same file");
    fails(dir, 1, &["convert", "a.raw", "gone.raw", "--onto"]);
}

/// The conversion is refused with this exit code and these words, with locks and without, and `file` stays as it is.
fn refused_unchanged(dir: &Path, args: &[&str], file: &str, code: i32, says: &str) {
    let before = fs::read(dir.join(file)).unwrap();
    for locks in [&[][..], &["--no-lock"]] {
        let said = fails(dir, code, &[&["convert"], args, &["--onto"], locks].concat());
        assert!(said.contains(says), "{args:?} {locks:?}: {said}");
        assert!(fs::read(dir.join(file)).unwrap() == before, "{args:?} {locks:?}: {file} has changed");
    }
}

#[test]
fn no_layer_of_the_source_is_overwritten_under_any_name() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("base.raw"), pattern()).unwrap();
    ok(dir, &["create", "p.vhd", "--parent", "base.raw"]);
    ok(dir, &["create", "c.vhd", "--parent", "p.vhd"]);
    fs::create_dir(dir.join("other")).unwrap();
    std::os::unix::fs::symlink("../base.raw", dir.join("other/link.raw")).unwrap();
    fs::hard_link(dir.join("p.vhd"), dir.join("other/hard.vhd")).unwrap();
    // --write-parent is for children other than the source.
    let cases: [(&[&str], &str); 6] = [
        (&["base.raw", "base.raw"], "base.raw"),
        (&["c.vhd", "c.vhd"], "c.vhd"),
        (&["c.vhd", "p.vhd", "--write-parent"], "p.vhd"),
        (&["c.vhd", "base.raw", "--write-parent"], "base.raw"),
        (&["c.vhd", "other/link.raw", "--write-parent"], "base.raw"),
        (&["c.vhd", "other/hard.vhd", "--write-parent"], "p.vhd"),
    ];
    for (args, file) in cases {
        refused_unchanged(dir, args, file, 2, "cannot be written over while it is copied");
    }
    // As stdout and stdin.
    let open = |name: &str| fs::File::options().read(true).write(true).open(dir.join(name)).unwrap();
    let mut out = spile();
    out.args(["convert", "c.vhd", "-", "--no-lock"]).current_dir(dir).stdout(open("base.raw"));
    let mut stdin = spile();
    let mut part = open("base.raw");
    std::io::Seek::seek(&mut part, std::io::SeekFrom::Start(512)).unwrap();
    stdin.args(["convert", "-", "base.raw", "--size", "4M", "--onto", "--write-parent"]).current_dir(dir).stdin(part);
    for mut command in [out, stdin] {
        let output = command.stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && said.contains("while it is copied"), "{said}");
        assert!(fs::read(dir.join("base.raw")).unwrap() == pattern());
    }
}

#[test]
fn a_parent_is_overwritten_only_when_that_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("a.raw"), pattern()).unwrap();
    for parent in ["p.vhd", "base.raw"] {
        ok(dir, &["create", parent, "--size", "4M"]);
        ok(dir, &["create", "c.vhd", "--parent", parent]);
        std::os::unix::fs::symlink(dir.join(parent), dir.join("link")).unwrap();
        refused_unchanged(dir, &["a.raw", parent], parent, 1, "c.vhd is a child of this disk");
        refused_unchanged(dir, &["a.raw", "link", "--to", "raw"], parent, 1, "--write-parent");
        ok(dir, &["convert", "a.raw", parent, "--onto", "--write-parent"]);
        ok(dir, &["compare", "a.raw", parent]);
        fs::remove_file(dir.join("c.vhd")).unwrap();
        fs::remove_file(dir.join("link")).unwrap();
        ok(dir, &["convert", "a.raw", parent, "--onto"]);
    }
    fails(dir, 2, &["convert", "a.raw", "new.raw", "--write-parent"]);
}

#[test]
fn an_export_is_not_copied_onto_itself() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("a.raw"), pattern()).unwrap();
    ok(dir, &["convert", "a.raw", "a.vhd"]);
    // The file of a VHD as an export.
    let served = crate::common::Served::start(dir, &["a.vhd,format=raw", "--control", "none"]);
    let uri = served.uri().to_string();
    let before = fs::read(dir.join("a.vhd")).unwrap();
    std::os::unix::fs::symlink("nbd.sock", dir.join("link")).unwrap();
    let spellings = ["nbd.sock", "./nbd.sock", "link"].map(|socket| format!("nbd+unix:///?socket={socket}"));
    for dst in [&[uri.clone(), "nbd+unix:///a?socket=nbd.sock".to_owned()], &spellings[..]].concat() {
        let said = fails(dir, 2, &["convert", "--from", "vhd", &uri, &dst]);
        assert!(said.contains("while it is copied"), "{dst}: {said}");
    }
    assert!(served.terminate().success());
    assert!(fs::read(dir.join("a.vhd")).unwrap() == before);
}

/// Looking at all of a folder's images may take too long.
#[test]
fn a_file_is_not_overwritten_when_not_all_images_beside_it_were_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("a.raw"), pattern()).unwrap();
    fs::write(dir.join("b.raw"), b"precious").unwrap();
    for number in 0..2100 {
        fs::write(dir.join(format!("{number}.vhd")), b"").unwrap();
    }
    refused_unchanged(dir, &["a.raw", "b.raw"], "b.raw", 1, "--write-parent");
    ok(dir, &["convert", "a.raw", "b.raw", "--onto", "--write-parent"]);
}

#[test]
fn a_larger_disk_ends_in_zeroes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("a.raw"), pattern()).unwrap();
    ok(dir, &["convert", "a.raw", "b.vhd", "--size", "1G"]);
    let said = json(dir, &["compare", "a.raw", "b.vhd"]);
    assert_eq!(said["same"], true);
    assert_eq!(json(dir, &["info", "b.vhd"])["virtual_size_bytes"], 1u64 << 30);
    assert!(fails(dir, 1, &["convert", "a.raw", "c.raw", "--size", "1M"]).contains("it needs 4194304 bytes at least"));
}

/// A loop device over a file, or why there is none.
struct Loop(PathBuf);

impl Loop {
    fn over(file: &Path) -> Result<Self, String> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        match made {
            Ok(output) if output.status.success() => Ok(Self(String::from_utf8(output.stdout).unwrap().trim().into())),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Err(error) => Err(format!("losetup: {error}")),
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
fn a_disk_on_a_block_device_has_no_snapshots_and_what_is_said_to_do_works() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for format in ["qcow2", "vhd", "raw"] {
        fs::write(dir.join("device"), vec![0; 8 << 20]).unwrap();
        let device = match Loop::over(&dir.join("device")) {
            Ok(device) => device,
            Err(why) => {
                return println!("SKIP a_disk_on_a_block_device_has_no_snapshots_and_what_is_said_to_do_works: {why}");
            }
        };
        fs::write(dir.join("a.raw"), vec![1; 2 << 20]).unwrap();
        let path = device.0.to_str().unwrap();
        ok(dir, &["convert", "a.raw", path, "--onto", "--to", format]);
        let refused = |args: &[&str]| {
            let said = fails(dir, 1, args);
            assert!(said.contains("has no room beside it") && said.contains("(copy it to"), "{args:?}: {said}");
            assert!(said.contains("spile convert") && !said.contains("rename it"), "{args:?}: {said}");
        };
        refused(&["snapshot", path, "--name", "s", "--format", format]);
        let served = host::serve(dir, &[&format!("{path},format={format},name=device-of-{format}")]);
        refused(&["snapshot", &format!("device-of-{format}"), "--name", "s"]);
        assert!(served.terminate().success());
        ok(dir, &["convert", path, &format!("{format}.qcow2"), "--from", format]);
    }
}

#[test]
fn a_block_device_is_overwritten_with_the_disk_and_zeroes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("a.raw"), pattern()).unwrap();
    fs::write(dir.join("device"), vec![7; 8 << 20]).unwrap();
    let device = match Loop::over(&dir.join("device")) {
        Ok(device) => device,
        Err(why) => return println!("SKIP a_block_device_is_overwritten_with_the_disk_and_zeroes: {why}"),
    };
    let path = device.0.to_str().unwrap();
    let said = fails(dir, 1, &["convert", "a.raw", path]);
    assert!(said.contains("this is a block device (--onto overwrites all that is on it)"), "{said}");
    assert!(fails(dir, 2, &["convert", "a.raw", path, "--onto"]).contains("say --to raw"));
    ok(dir, &["convert", "a.raw", path, "--onto", "--to", "raw"]);
    let bytes = fs::read(path).unwrap();
    assert!(bytes[..4 << 20] == pattern() && bytes[4 << 20..].iter().all(|byte| *byte == 0));
    fs::write(dir.join("long.raw"), vec![1; 9 << 20]).unwrap();
    assert!(fails(dir, 1, &["convert", "long.raw", path, "--onto", "--to", "raw"]).contains("9437184 bytes at least"));
    // The device under another name. A device that one program reads can be taken by another one, so the locks do not tell.
    let link = dir.join("link");
    std::os::unix::fs::symlink(path, &link).unwrap();
    let before = fs::read(path).unwrap();
    for locks in [&[][..], &["--no-lock"]] {
        let onto = ["convert", path, "link", "--from", "raw", "--to", "vhd", "--onto"];
        assert!(fails(dir, 2, &[&onto[..], locks].concat()).contains("while it is copied"));
        assert!(fs::read(path).unwrap() == before);
    }
    // A VHD on a device, over bytes that are not zero.
    fs::write(path, vec![7; 8 << 20]).unwrap();
    ok(dir, &["convert", "a.raw", path, "--onto", "--to", "vhd"]);
    ok(dir, &["compare", "a.raw", path, "--to", "vhd"]);
}

#[test]
fn what_lies_beneath_the_source_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("disk.raw"), pattern()).unwrap();
    fs::write(dir.join("other.raw"), pattern()).unwrap();
    let file = dir.join("disk.raw");
    let (one, other) = match (Loop::over(&file), Loop::over(&file)) {
        (Ok(one), Ok(other)) => (one, other),
        (Err(why), _) | (_, Err(why)) => {
            return println!("SKIP what_lies_beneath_the_source_is_not_overwritten: {why}");
        }
    };
    let [one, other] = [&one, &other].map(|device| device.0.to_str().unwrap());
    for (src, dst) in [(one, "disk.raw"), ("disk.raw", one), (one, other)] {
        let args = [src, dst, "--from", "raw", "--to", "raw"];
        refused_unchanged(dir, &args, "disk.raw", 2, "while it is copied");
    }
    ok(dir, &["convert", "other.raw", one, "--to", "raw", "--onto"]);
    ok(dir, &["convert", one, "other.raw", "--from", "raw", "--onto"]);
}

#[test]
fn what_measure_says_is_what_a_conversion_takes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("a.raw"), vec![1; 3 << 20]).unwrap();
    ok(dir, &["create", "empty.raw", "--size", "64M"]);
    fs::File::options().write(true).open(dir.join("a.raw")).unwrap().set_len(64 << 20).unwrap();
    for (src, to, kind) in
        [("a.raw", "raw", None), ("a.raw", "vhd", None), ("a.raw", "vhd", Some("fixed")), ("empty.raw", "vhd", None)]
    {
        let kind: Vec<&str> = kind.map_or(Vec::new(), |kind| vec!["--subformat", kind]);
        let told = json(dir, &[&["measure", src, "--to", to], &kind[..]].concat());
        let number = |name: &str| told[name].as_u64().unwrap();
        let _ = fs::remove_file(dir.join("made"));
        ok(dir, &[&["convert", src, "made", "--to", to], &kind[..]].concat());
        let made = fs::metadata(dir.join("made")).unwrap();
        // An image without data may be cut up to a page shorter.
        let spare = number("file_bytes").checked_sub(made.len());
        let most = if src == "empty.raw" { 4096 } else { 0 };
        assert!(spare.is_some_and(|spare| spare <= most), "{src} as {to} {kind:?}: {} and {told}", made.len());
        let used = made.blocks() * 512;
        assert!(used <= number("used_bytes") && number("used_bytes") <= used + (64 << 10), "{used}: {told}");
        assert!(number("fully_allocated_file_bytes") >= 64 << 20 && number("virtual_size_bytes") == 64 << 20, "{told}");
        let empty = json(dir, &[&["measure", "--size", "64M", "--to", to], &kind[..]].concat());
        assert_eq!(empty["fully_allocated_file_bytes"], told["fully_allocated_file_bytes"]);
        assert!(empty["file_bytes"].as_u64() <= told["file_bytes"].as_u64());
    }
    assert!(ok(dir, &["measure", "a.raw", "--to", "vhd"]).contains("file length:"));
    fails(dir, 2, &["measure", "--to", "vhd"]);
    assert!(ok(dir, &["measure", "a.raw", "--to", "qcow2", "--cluster-size", "4k"]).contains("file length:"));
    assert!(fails(dir, 2, &["measure", "a.raw", "--to", "vhd", "--cluster-size", "4k"]).contains("--format qcow2"));
}

#[test]
fn all_space_can_be_taken_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let used = |name: &str| fs::metadata(dir.join(name)).unwrap().blocks() * 512;
    ok(dir, &["create", "a.raw", "--size", "8M", "--preallocate"]);
    fs::write(dir.join("b.vhd"), b"precious").unwrap();
    refused_unchanged(dir, &["a.raw", "b.vhd", "--preallocate"], "b.vhd", 2, "--subformat fixed");
    ok(dir, &["convert", "a.raw", "b.vhd", "--subformat", "fixed", "--onto", "--preallocate"]);
    assert!(used("b.vhd") >= 8 << 20);
    ok(dir, &["create", "f.vhd", "--size", "8M", "--subformat", "fixed", "--preallocate"]);
    ok(dir, &["convert", "a.raw", "b.raw", "--preallocate"]);
    for name in ["a.raw", "f.vhd", "b.raw"] {
        assert!(used(name) >= 8 << 20, "{name}: {}", used(name));
    }
    assert!(fails(dir, 2, &["create", "t.vhd", "--size", "8M", "--preallocate"]).contains("--subformat fixed"));
    let said = fails(dir, 1, &["create", "huge.raw", "--size", "4E", "--preallocate"]);
    assert!(said.contains("huge.raw") && (said.contains("are missing") || said.contains("too large")), "{said}");
    assert!(!dir.join("t.vhd").exists() && !dir.join("huge.raw").exists());
}

/// A small file system in memory.
struct Small(PathBuf);

impl Small {
    fn mount(folder: PathBuf, size: &str) -> Option<Self> {
        fs::create_dir(&folder).unwrap();
        let option = format!("size={size}");
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", &option, "small"]).arg(&folder).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success()).then_some(Self(folder))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn what_does_not_fit_fails_before_it_begins() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(_small) = Small::mount(dir.join("small"), "4M") else {
        return println!("SKIP what_does_not_fit_fails_before_it_begins: no file system can be mounted here");
    };
    fs::write(dir.join("data.raw"), vec![1; 8 << 20]).unwrap();
    fs::write(dir.join("zeroes.raw"), vec![0; 8 << 20]).unwrap();
    for src in ["data.raw", "zeroes.raw"] {
        for dst in ["small/a.raw", "small/a.vhd"] {
            let said = fails(dir, 1, &["convert", src, dst]);
            assert!(said.contains(dst) && said.contains("missing (free some space; --no-space-check"), "{said}");
        }
    }
    assert!(fails(dir, 1, &["convert", "data.raw", "small/a.raw", "--no-space-check"]).contains("free some space"));
    fs::write(dir.join("small/old.raw"), b"precious").unwrap();
    refused_unchanged(dir, &["data.raw", "small/old.raw", "--preallocate"], "small/old.raw", 1, "are missing");
    fs::remove_file(dir.join("small/old.raw")).unwrap();
    let missing = ["create", "small/a.raw", "--size", "8M", "--preallocate"];
    assert!(fails(dir, 1, &missing).contains("4 MiB are missing"));
    assert_eq!(fs::read_dir(dir.join("small")).unwrap().count(), 0, "nothing is left");
    // Only reading shows that these are zeroes.
    ok(dir, &["convert", "zeroes.raw", "small/a.raw", "--no-space-check"]);
    ok(dir, &["compare", "zeroes.raw", "small/a.raw"]);
    ok(dir, &["create", "small/b.raw", "--size", "2M", "--preallocate"]);
}
