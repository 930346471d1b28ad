//! The commands that work on files: what they make, what they say, how they end.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{Running, Served, eventually, fails, have, json, ok, run, spile};
use nix::sys::signal::Signal;

/// 4 MiB with data at both ends and in the middle.
fn pattern() -> Vec<u8> {
    let mut bytes = vec![0; 4 << 20];
    bytes[..5000].fill(1);
    bytes[2 << 20..(2 << 20) + 512].fill(2);
    *bytes.last_mut().unwrap() = 3;
    bytes
}

#[test]
fn info_knows_what_create_made() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "p.vhd", "--size", "1G"]);
    ok(dir, &["create", "c.vhd", "--parent", "p.vhd"]);
    ok(dir, &["create", "f.vhd", "--size", "1M", "--subformat", "fixed"]);
    ok(dir, &["create", "r", "--size", "1536", "--format", "raw"]);
    let child = json(dir, &["info", "--chain", "c.vhd"]);
    assert_eq!(child["virtual_size_bytes"], 1u64 << 30);
    assert_eq!(child["layers"].as_array().unwrap().len(), 2);
    let (leaf, parent) = (&child["layers"][0]["facts"], &child["layers"][1]["facts"]);
    assert_eq!(
        (child["layers"][0]["subformat"].as_str(), leaf["parent_name"].as_str()),
        (Some("differencing"), Some("p.vhd"))
    );
    assert_eq!(leaf["parent_uuid"], parent["uuid"]);
    assert_eq!(json(dir, &["info", "f.vhd"])["layers"][0]["subformat"], "fixed");
    assert_eq!(json(dir, &["info", "r", "--format", "raw"])["virtual_size_bytes"], 1536);
    let text = ok(dir, &["info", "--chain", "c.vhd"]);
    assert!(text.contains("virtual size:   1 GiB") && text.contains("parent 1:"), "{text}");
}

#[test]
fn a_map_shows_data_holes_and_depth() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("a.raw"), pattern()).unwrap();
    ok(dir, &["convert", "a.raw", "p.vhd"]);
    ok(dir, &["create", "c.vhd", "--parent", "p.vhd"]);
    let map = json(dir, &["map", "c.vhd"]);
    let runs = map["runs"].as_array().unwrap();
    let ends: Vec<u64> =
        runs.iter().map(|r| r["offset_bytes"].as_u64().unwrap() + r["len_bytes"].as_u64().unwrap()).collect();
    assert_eq!(runs[0]["offset_bytes"], 0);
    assert_eq!(ends.last(), Some(&(4 << 20)));
    assert_eq!((runs[0]["kind"].as_str(), runs[0]["depth"].as_u64()), (Some("data"), Some(1)));
    // The bytes are where the map says.
    let at = runs[0]["file_offset_bytes"].as_u64().unwrap() as usize;
    assert_eq!(fs::read(dir.join("p.vhd")).unwrap()[at..at + 5000], pattern()[..5000]);
    assert!(map["layers"][1]["path"].as_str().unwrap().ends_with("p.vhd"), "{map}");
    let sum = ["data_bytes", "zero_bytes", "hole_bytes"].map(|kind| map["summary"][kind].as_u64().unwrap());
    assert_eq!((sum.iter().sum::<u64>(), map["summary"]["run_count"].as_u64()), (4 << 20, Some(runs.len() as u64)));
    let text = ok(dir, &["map", "c.vhd"]);
    assert!(text.contains("runs: ") && text.contains("depth 1: "), "{text}");
    assert_eq!(text.lines().count(), 1 + runs.len() + 1 + 1 + 2);
    assert!(text.lines().filter(|line| !line.starts_with("depth")).all(|line| line.len() <= 80), "{text}");
}

#[test]
fn conversions_keep_the_bytes_and_leave_out_the_zeroes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("a.raw"), pattern()).unwrap();
    for (n, extra) in [&["--cache", "page"][..], &["--cache", "direct"], &["--subformat", "fixed"]].iter().enumerate() {
        let (vhd, raw) = (format!("{n}.vhd"), format!("{n}.raw"));
        let made = json(dir, &[&["convert", "a.raw", &vhd], *extra].concat());
        assert!(made["written_bytes"].as_u64().unwrap() < 100 << 10, "{made}");
        ok(dir, &["convert", &vhd, &raw]);
        assert!(fs::read(dir.join(&raw)).unwrap() == pattern(), "{extra:?}");
        ok(dir, &["compare", "a.raw", &vhd]);
        if have("qemu-img", "convert with qemu-img") {
            let args = ["compare", "-f", "raw", "-F", "vpc", "a.raw", &vhd];
            assert!(Command::new("qemu-img").args(args).current_dir(dir).status().unwrap().success());
        }
    }
}

#[test]
fn a_size_that_a_vhd_cannot_have_is_rounded_up() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.raw"), [9; 1000]).unwrap();
    ok(dir.path(), &["convert", "a.raw", "a.vhd"]);
    let said = ok(dir.path(), &["compare", "a.raw", "a.vhd"]);
    assert!(said.contains("sizes differ") && said.contains("reads as zeroes"), "{said}");
}

#[test]
fn compare_tells_where_disks_differ() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut bytes = pattern();
    fs::write(dir.join("a.raw"), &bytes).unwrap();
    bytes[3 << 20] = 1;
    fs::write(dir.join("b.raw"), &bytes).unwrap();
    for (a, b) in [("a.raw", "b.raw"), ("b.raw", "a.raw")] {
        let output = run(dir, &["compare", a, b]);
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8(output.stdout).unwrap().contains("first at offset 0x300000"));
    }
    // A longer disk is the same only if the rest is zero.
    fs::write(dir.join("short.raw"), &pattern()[..1 << 20]).unwrap();
    assert!(fails(dir, 2, &["compare", "a.raw", "missing.raw"]).contains("missing.raw"));
    let output = run(dir, &["compare", "a.raw", "short.raw", "--json"]);
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["differs_at_offset_bytes"], 2 << 20);
}

#[test]
fn check_finds_and_mends() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("a.raw"), pattern()).unwrap();
    ok(dir, &["convert", "a.raw", "a.vhd"]);
    assert_eq!(json(dir, &["check", "a.vhd"])["result"], "sound");
    assert_eq!(json(dir, &["check", "a.raw"])["result"], "sound");
    // The trailing footer is gone, as after a kill.
    let vhd = dir.join("a.vhd");
    let whole = fs::read(&vhd).unwrap();
    fs::write(&vhd, &whole[..whole.len() - 512]).unwrap();
    assert_eq!(json(dir, &["check", "a.vhd"])["findings"][0]["severity"], "note");
    let mended = json(dir, &["check", "a.vhd", "--repair"]);
    assert_eq!((mended["result"].as_str(), mended["findings"].as_array().unwrap().len()), (Some("sound"), 0));
    assert!(!mended["repaired"].as_array().unwrap().is_empty(), "{mended}");
    assert!(fs::read(&vhd).unwrap() == whole);
}

#[test]
fn an_unfinished_copy_is_left_to_be_completed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("a.raw"), pattern()).unwrap();
    ok(dir, &["convert", "a.raw", "a.vhd"]);
    let whole = fs::read(dir.join("a.vhd")).unwrap();
    let copy = dir.join("copy.vhd");
    for len in [whole.len() - 513, whole.len() - (1 << 20), whole.len() / 2] {
        fs::write(&copy, &whole[..len]).unwrap();
        for args in [&["check", "copy.vhd", "--json"][..], &["check", "copy.vhd", "--repair", "--json"]] {
            let output = run(dir, args);
            assert_eq!(output.status.code(), Some(3), "{len} bytes");
            let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(told["result"], "corrupt", "{told}");
            assert_eq!(told["missing_bytes"], whole.len() - len, "{told}");
            assert_eq!(told["findings"][1]["can_discard_lost"], true, "{told}");
        }
        let output = run(dir, &["check", "copy.vhd", "--repair"]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("cut short") && text.contains("--discard-lost"), "{text}");
        assert!(fs::read(&copy).unwrap() == whole[..len], "check changed the file");
        fs::write(&copy, &whole).unwrap();
        ok(dir, &["compare", "a.raw", "copy.vhd"]);
    }
    fs::write(&copy, &whole[..whole.len() / 2]).unwrap();
    fails(dir, 2, &["check", "copy.vhd", "--discard-lost"]);
    let mended = json(dir, &["check", "copy.vhd", "--repair", "--discard-lost"]);
    assert_eq!((mended["result"].as_str(), mended["missing_bytes"].as_u64()), (Some("sound"), Some(0)));
    fs::write(dir.join("odd.raw"), [1; 1000]).unwrap();
    assert_eq!(json(dir, &["check", "odd.raw"])["findings"][0]["severity"], "note");
}

#[test]
fn a_missing_parent_is_named_and_no_corruption() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "p.vhd", "--size", "1M"]);
    ok(dir, &["create", "c.vhd", "--parent", "p.vhd"]);
    fs::remove_file(dir.join("p.vhd")).unwrap();
    for args in [&["info", "--chain", "c.vhd"][..], &["map", "c.vhd"]] {
        let err = fails(dir, 1, args);
        assert!(err.contains("p.vhd") && err.contains("--allow-parents"), "{err}");
    }
    ok(dir, &["info", "c.vhd"]);
}

#[test]
fn parents_elsewhere_need_a_word() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir_all(dir.join("base")).unwrap();
    fs::create_dir_all(dir.join("leaf")).unwrap();
    ok(dir, &["create", "base/p.vhd", "--size", "1M"]);
    ok(dir, &["create", "leaf/c.vhd", "--parent", "base/p.vhd", "--allow-parents", "base"]);
    let err = fails(dir, 1, &["info", "--chain", "leaf/c.vhd"]);
    assert!(err.contains("outside the folders") && err.contains("--allow-parents"), "{err}");
    ok(dir, &["info", "--chain", "leaf/c.vhd", "--allow-parents", "base"]);
    let err = fails(dir, 2, &["info", "leaf/c.vhd", "--allow-parents", "base"]);
    assert!(err.contains("--chain"), "{err}");
}

#[test]
fn info_opens_the_image_alone_and_names_its_parent() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "p.vhd", "--size", "1M"]);
    ok(dir, &["create", "c.vhd", "--parent", "p.vhd"]);
    // What the parent holds does not matter: it is not opened.
    fs::write(dir.join("p.vhd"), "no VHD").unwrap();
    let info = json(dir, &["info", "c.vhd"]);
    assert_eq!(info["layers"].as_array().unwrap().len(), 1);
    let leaf = &info["layers"][0]["facts"];
    assert_eq!((leaf["parent_name"].as_str(), leaf["parent_format"].as_str()), (Some("p.vhd"), Some("vhd")));
    let text = ok(dir, &["info", "c.vhd"]);
    assert!(text.contains("p.vhd (vhd, ") && !text.contains("parent 1:"), "{text}");
    fails(dir, 1, &["info", "c.vhd", "--backing-chain"]);
}

#[test]
fn no_parents_refuses_a_parent_in_the_own_folder() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "p.vhd", "--size", "1M"]);
    ok(dir, &["create", "c.vhd", "--parent", "p.vhd"]);
    for args in [&["convert", "c.vhd", "x.raw"][..], &["map", "c.vhd"], &["info", "--chain", "c.vhd"]] {
        let err = fails(dir, 1, &[args, &["--no-parents"]].concat());
        assert!(err.contains("p.vhd") && err.contains("--no-parents"), "{err}");
        ok(dir, args);
    }
    ok(dir, &["map", "p.vhd", "--no-parents"]);
}

#[test]
fn a_raw_disk_with_a_guests_vhd_footer_stays_raw() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "v.vhd", "--size", "1M", "--subformat", "fixed"]);
    fs::copy(dir.join("v.vhd"), dir.join("r.raw")).unwrap();
    let info = json(dir, &["info", "r.raw"]);
    assert_eq!((info["format"].as_str(), info["virtual_size_bytes"].as_u64()), (Some("raw"), Some((1 << 20) + 512)));
}

#[test]
fn mistakes_are_told_with_what_and_where() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.raw", "--size", "1M"]);
    let cases: [(&[&str], i32, &str); 18] = [
        (&["create", "a.raw", "--size", "1M"], 1, "a.raw"),
        (&["create", "x", "--size", "1M"], 2, "--format raw, --format vhd or --format qcow2"),
        (&["create", "x.vhd"], 2, "SIZE"),
        (&["create", "x.vhd", "--size", "20GB"], 2, "20G or 20GiB"),
        (&["create", "x.raw", "--size", "8E"], 2, "too large"),
        (&["create", "x.vhd", "--size", "1000"], 2, "multiple of 512"),
        (&["create", "x.vhd", "--size", "3T"], 2, "2040 GiB"),
        (&["create", "x.raw", "--size", "1M", "--subformat", "fixed"], 2, "--subformat"),
        (&["info", "gone.vhdx"], 1, "gone.vhdx: cannot be found"),
        (&["map", "gone"], 1, "gone: cannot be found"),
        (&["check", "."], 2, "a folder"),
        (&["serve", "a.raw,serial=123456789012345678901", "--nbd", "unix:n"], 2, "20 at most"),
        (&["load", "xen-lab:lab", "--params", "raw:gone.raw"], 1, "gone.raw: cannot be found"),
        (&["load", "nbd+unix:///?socket=n", "--rate=-1"], 2, "--rate"),
        (&["resize", "a.raw", "1.2.3"], 2, "1.2.3"),
        (&["convert", "a.raw", "a.raw"], 1, "a.raw"),
        (&["info", "gone.raw"], 1, "gone.raw"),
        (&["frobnicate"], 2, "frobnicate"),
    ];
    for (args, code, says) in cases {
        let err = fails(dir, code, args);
        assert!(err.contains(says), "{args:?}: {err}");
        assert!(err.starts_with("spile: ") || err.starts_with("error: ") && code == 2, "{err}");
        if !["serve", "resize", "frobnicate"].contains(&args[0]) {
            let output = run(dir, &[args, &["--json"]].concat());
            assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(code), &b""[..]), "{args:?}");
            let told: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
            let text = |name: &str| told["error"][name].as_str().unwrap_or_default().to_owned();
            let told = format!("{}: {} ({})", text("path"), text("message"), text("hint"));
            assert!(told.contains(says) && !text("kind").is_empty(), "{args:?}: {told}");
        }
    }
    assert_eq!(files_in(dir), ["a.raw"], "nothing half-made stays");
}

fn files_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn help_man_pages_and_completions_come_from_one_definition() {
    let dir = tempfile::tempdir().unwrap();
    let help = ok(dir.path(), &["--help"]);
    assert!(help.contains("Exit codes:"), "{help}");
    ok(dir.path(), &["man", "man1"]);
    let pages = files_in(&dir.path().join("man1"));
    for page in &pages {
        let text = fs::read_to_string(dir.path().join("man1").join(page)).unwrap();
        for section in ["NAME", "SYNOPSIS", "OPTIONS", "\"EXIT STATUS\"", "EXAMPLES"] {
            assert_eq!(text.matches(&format!(".SH {section}")).count(), 1, "{page}: {section}");
        }
    }
    let script = ok(dir.path(), &["completions", "bash"]);
    // In groups: `Disks:`, `Serving:` and so on.
    let lines = help.lines().skip_while(|line| *line != "Disks:").take_while(|line| *line != "Options:");
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names: Vec<&str> = names.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(names.len() >= 40, "{names:?}");
    for name in names.iter().filter(|name| **name != "help") {
        assert!(pages.contains(&format!("spile-{name}.1")) && script.contains(name), "{name}");
        for option in ["--help", "-h"] {
            let help = ok(dir.path(), &[name, option]);
            let parts = ["Usage: spile", "Exit codes:", "Examples:"];
            assert!(parts.iter().all(|part| help.contains(part)), "{name} {option}: {help}");
        }
    }
}

#[test]
fn the_demo_runs() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["demo", "--seconds", "1", "--span", "64M", "--dir", "."];
    let shown = json(dir.path(), &args);
    assert_eq!((shown["result"].as_str(), &shown["load"]["mismatches"]), (Some("sound"), &serde_json::json!([])));
    let names: Vec<&str> = shown["meters"].as_array().unwrap().iter().map(|l| l["layer"].as_str().unwrap()).collect();
    assert_eq!(names, ["front", "disk", "store"]);
    // Each layer holds a request for a part of the time that the one above holds it.
    let depth = |n: usize| shown["meters"][n]["queue_depth_avg"].as_f64().unwrap();
    assert!(depth(0) >= depth(1) * 0.98 && depth(1) > 0.0, "{shown}");
    assert!(dir.path().join("demo.vhd").exists(), "--dir keeps the disk");
}

/// True when the process has written to a new disk that has no name yet.
fn holds_it(pid: u32) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files
        .filter_map(|file| fs::metadata(file.path()).ok())
        .any(|stat| stat.is_file() && stat.blocks() > 0 && stat.nlink() == 0)
}

#[test]
fn a_disk_whose_space_is_being_taken_has_no_name() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for made in [&["a.raw"][..], &["a.vhd", "--subformat", "fixed"], &["a.qcow2", "--data-file", "a.raw"]] {
        let space = ["--size", "1G", "--preallocate=full"];
        let running = Running::start(spile().arg("create").args(made).args(space), dir);
        eventually("it begins", || holds_it(running.pid()));
        assert_eq!(running.end(Signal::SIGKILL).0, None, "{made:?}");
        assert_eq!(files_in(dir), [""; 0], "{made:?}");
    }
}

#[test]
fn a_conversion_that_is_ended_leaves_no_disk_that_looks_whole() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("a.raw"), vec![1; 256 << 20]).unwrap();
    for (signal, code) in [(Signal::SIGTERM, Some(143)), (Signal::SIGINT, Some(130)), (Signal::SIGKILL, None)] {
        let running = Running::start(spile().args(["convert", "a.raw", "b.vhd"]), dir);
        eventually("it begins", || holds_it(running.pid()));
        assert_eq!(running.end(signal).0, code, "{signal}");
        assert_eq!(files_in(dir), ["a.raw"], "{signal}");
    }
}

/// A process that writes behind its limit on the length of files is killed there, and cleans up nothing, as by `kill -9`.
#[test]
fn a_new_disk_that_is_not_whole_has_no_name() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "p.vhd", "--size", "16M"]);
    ok(dir, &["create", "g.qcow2", "--size", "16M"]);
    let before = files_in(dir);
    for (disk, made) in [
        ("c.vhd", &["clone", "p.vhd", "c.vhd"][..]),
        ("c.qcow2", &["clone", "g.qcow2", "c.qcow2"]),
        ("c.vhd", &["create", "c.vhd", "--parent", "g.qcow2"]),
        ("c.qcow2", &["create", "c.qcow2", "--parent", "p.vhd"]),
        ("c.raw", &["create", "c.raw", "--size", "1M"]),
    ] {
        for half_kib in [0, 1, 2, 3, 8, 128, 256, 320] {
            let limited = format!("ulimit -c 0; ulimit -f {half_kib}; exec \"$@\"");
            let mut command = Command::new("sh");
            command.args(["-c", &limited, "sh", env!("CARGO_BIN_EXE_spile")]).args(made).current_dir(dir);
            let ended = command.output().unwrap().status;
            assert_eq!(ended.code(), Some(1), "{made:?}, {half_kib}");
            assert_eq!(files_in(dir), before, "{made:?}, {half_kib}");
        }
        ok(dir, made);
        ok(dir, &["check", disk]);
        assert!(fails(dir, 1, made).contains("a file of this name already"), "{made:?}");
        fs::remove_file(dir.join(disk)).unwrap();
    }
}

#[test]
fn a_conversion_replaces_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("a.raw"), [1; 4096]).unwrap();
    fs::write(dir.join("b.vhd"), "precious").unwrap();
    std::os::unix::fs::symlink("nowhere", dir.join("c.vhd")).unwrap();
    for dst in ["a.raw", "b.vhd", "c.vhd"] {
        let err = fails(dir, 1, &["convert", "a.raw", dst]);
        assert!(err.contains(dst) && err.contains("choose another name") && err.contains("--onto"), "{err}");
    }
    assert_eq!(
        (fs::read(dir.join("a.raw")).unwrap(), fs::read(dir.join("b.vhd")).unwrap()),
        ([1; 4096].into(), b"precious".into())
    );
    let err = fails(dir, 1, &["convert", "a.raw", "nowhere/b.vhd"]);
    assert!(err.contains("nowhere/b.vhd"), "the name that was given, not a passing one: {err}");
    assert_eq!(files_in(dir).len(), 3);
}

#[test]
fn an_image_too_damaged_to_read_is_told_in_json_too() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("bad.vhd"), [7; 4096]).unwrap();
    let output = run(dir.path(), &["check", "bad.vhd", "--json"]);
    assert_eq!(output.status.code(), Some(3));
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (told["result"].as_str(), told["findings"][0]["severity"].as_str()),
        (Some("corrupt"), Some("corruption"))
    );
}

#[test]
fn a_pipe_is_no_disk() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    assert!(Command::new("mkfifo").arg(dir.join("p.raw")).arg(dir.join("p.vhd")).status().unwrap().success());
    for args in [&["info", "p.raw"][..], &["map", "p.vhd"], &["check", "p.vhd"], &["convert", "p.raw", "x.vhd"]] {
        let err = fails(dir, 2, args);
        assert!(err.contains("neither a file nor a block device"), "{args:?}: {err}");
    }
}

#[test]
fn what_cannot_be_said_is_a_failure_and_a_reader_that_left_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("bad.vhd"), [7; 4096]).unwrap();
    ok(dir, &["create", "a.raw", "--size", "1M"]);
    for command in ["info", "map", "check"] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let status = spile().args([command, "a.raw"]).current_dir(dir).stdout(full).stderr(Stdio::null()).status();
        assert_eq!(status.unwrap().code(), Some(1), "{command}");
    }
    for (args, code) in [(["check", "bad.vhd"], 3), (["map", "a.raw"], 0), (["info", "a.raw"], 0)] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let status = spile().args(args).current_dir(dir).stdout(writer).stderr(Stdio::null()).status();
        assert_eq!(status.unwrap().code(), Some(code), "{args:?}");
    }
}

#[test]
fn names_that_are_no_text_or_bite_terminals() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let odd = OsStr::from_bytes(b"o\xffdd.vhd");
    for args in [&["--size", "1M"][..], &[]] {
        let command = if args.is_empty() { "info" } else { "create" };
        let output = spile().arg(command).arg(odd).args(args).arg("--json").current_dir(dir).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(told["path"].as_str().unwrap().ends_with("dd.vhd"), "{told}");
    }
    let child = spile().args(["create", "c.vhd", "--parent"]).arg(odd).current_dir(dir).output().unwrap();
    assert_eq!(child.status.code(), Some(2), "its name cannot be kept in the child: {child:?}");
    assert!(!dir.join("c.vhd").exists());
    let err = fails(dir, 1, &["info", "a\u{1b}[31m.raw"]);
    assert!(!err.contains('\u{1b}') && err.contains("[31m.raw"), "{err}");
}

#[test]
fn a_disk_without_bytes_has_an_empty_map() {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "a.raw", "--size", "0"]);
    let map = json(dir.path(), &["map", "a.raw"]);
    assert_eq!((&map["runs"], &map["summary"]["run_count"]), (&serde_json::json!([]), &serde_json::json!(0)));
    assert!(ok(dir.path(), &["map", "a.raw"]).contains("0 runs: "));
}

#[test]
fn a_disk_that_is_not_served_can_grow() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("a.raw"), pattern()).unwrap();
    ok(dir, &["create", "b.vhd", "--size", "1M"]);
    ok(dir, &["resize", "a.raw", "8M"]);
    let bytes = fs::read(dir.join("a.raw")).unwrap();
    assert!(bytes.len() == 8 << 20 && bytes[..4 << 20] == pattern() && bytes[4 << 20..].iter().all(|byte| *byte == 0));
    assert!(fails(dir, 1, &["resize", "gone.raw", "2M"]).contains("it cannot be found"));
    assert!(fails(dir, 2, &["resize", "a.raw", "16M", "--shrink"]).contains("would make it longer"));
    assert_eq!(fs::metadata(dir.join("a.raw")).unwrap().len(), 8 << 20);
    // VHDs, with what is in them.
    for kind in ["fixed", "dynamic"] {
        let name = format!("{kind}.vhd");
        ok(dir, &["convert", "a.raw", &name, "--subformat", kind]);
        ok(dir, &["resize", &name, "20M"]);
        assert_eq!(json(dir, &["info", &name])["virtual_size_bytes"], 20 << 20);
        assert_eq!(json(dir, &["check", &name])["result"], "sound");
        ok(dir, &["compare", "a.raw", &name]);
        ok(dir, &["resize", &name, "3G"]);
        assert_eq!(json(dir, &["check", &name])["result"], "sound");
        ok(dir, &["compare", "a.raw", &name]);
        assert!(fails(dir, 2, &["resize", &name, "1G"]).contains("--shrink"));
        ok(dir, &["resize", &name, "1G", "--shrink"]);
        assert_eq!(json(dir, &["info", &name])["virtual_size_bytes"], 1 << 30);
        assert_eq!(json(dir, &["check", &name])["result"], "sound");
        ok(dir, &["compare", "a.raw", &name]);
        assert!(fails(dir, 2, &["resize", &name, "2M", "--shrink"]).contains("the first at 2097152"));
        ok(dir, &["resize", &name, "3G"]);
        ok(dir, &["compare", "a.raw", &name]);
        fails(dir, 2, &["resize", &name, "3T"]);
    }
    // A parent is left alone unless told; its child may be longer than it.
    ok(dir, &["create", "child.vhd", "--parent", "dynamic.vhd"]);
    assert!(fails(dir, 1, &["resize", "dynamic.vhd", "4G"]).contains("child.vhd is a child of this disk"));
    ok(dir, &["resize", "child.vhd", "8G"]);
    ok(dir, &["compare", "dynamic.vhd", "child.vhd"]);
    ok(dir, &["resize", "dynamic.vhd", "4G", "--write-parent"]);
    assert_eq!(json(dir, &["info", "child.vhd"])["virtual_size_bytes"], 8u64 << 30);
}

#[test]
fn a_raw_file_is_cut_only_when_that_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("a.raw"), pattern()).unwrap();
    assert!(fails(dir, 2, &["resize", "a.raw", "1M"]).contains("--shrink"));
    assert!(fs::read(dir.join("a.raw")).unwrap() == pattern());
    assert!(fails(dir, 2, &["resize", "a.raw", "1M", "--shrink"]).contains("--discard"));
    assert!(fs::read(dir.join("a.raw")).unwrap() == pattern());
    ok(dir, &["resize", "a.raw", "1M", "--shrink", "--discard"]);
    assert!(fs::read(dir.join("a.raw")).unwrap() == pattern()[..1 << 20]);
    let served = Served::start(dir, &["a.raw"]);
    assert!(fails(dir, 1, &["resize", "a.raw", "512K", "--shrink"]).contains("detach \"a\" first"));
    assert!(served.terminate().success());
}

#[test]
fn a_demo_that_is_ended_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = spile();
    command.args(["demo", "--seconds", "600", "--span", "16M"]).env("TMPDIR", dir.path());
    let running = Running::start(&mut command, dir.path());
    let socket = || fs::read_dir(dir.path()).unwrap().any(|entry| entry.unwrap().path().join("demo.sock").exists());
    eventually("it serves", socket);
    assert_eq!(running.end(Signal::SIGINT).0, Some(130));
    assert_eq!(files_in(dir.path()), Vec::<String>::new());
}
