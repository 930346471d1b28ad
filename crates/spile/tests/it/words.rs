//! Words that users of QEMU type, and answers that lead on: what the commands say, and to what they listen.

use std::fs;
use std::process::{Command, Stdio};

use crate::common::host::{names, raw, serve};
use crate::common::nbd::Client;
use crate::common::{fails, have, json, ok, run, run_dir, spile};

#[test]
fn words_of_qemu_mean_the_same_here() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "-f", "qcow2", "disk", "16M"]);
    assert_eq!(json(dir, &["info", "-f", "qcow2", "disk"])["virtual_size_bytes"], 16 << 20);
    ok(dir, &["create", "-f", "qcow2", "-b", "disk", "-F", "qcow2", "child.qcow2"]);
    ok(dir, &["convert", "-f", "qcow2", "-O", "vhd", "disk", "copy"]);
    ok(dir, &["compare", "-f", "qcow2", "-F", "vhd", "disk", "copy"]);
    ok(dir, &["measure", "-f", "qcow2", "-O", "raw", "disk"]);
    assert!(fails(dir, 2, &["create", "two.vhd", "1M", "--size", "1M"]).contains("cannot be used with"));
    assert!(fails(dir, 2, &["create", "none.vhd"]).contains("SIZE"));
    assert_eq!(json(dir, &["resize", "-f", "vhd", "copy", "+16M"])["virtual_size_bytes"], 32 << 20);
    assert!(fails(dir, 2, &["resize", "copy", "-f", "vhd", "+8388608T"]).contains("large"));
    ok(dir, &["rm", "child.qcow2"]);
    assert_eq!(names(dir), ["copy", "disk"]);
    raw(dir, "words-list.raw", 1);
    let served = serve(dir, &["words-list.raw"]);
    assert!(ok(dir, &["list"]).contains("words-list") && ok(dir, &["status", "words-list"]).contains("words-list"));
    assert_eq!(json(dir, &["resize", "words-list", "+1M"])["virtual_size_bytes"], 17 << 20);
    assert!(served.terminate().success());
}

#[test]
fn a_disk_of_a_server_is_named_in_one_way() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "words-a.raw", 1);
    raw(dir, "words-b.raw", 1);
    let served = serve(dir, &["words-a.raw", "words-b.raw", "--control", "c"]);
    for option in ["--disk", "--name"] {
        assert_eq!(json(dir, &["show", "c", option, "words-b"])["name"], "words-b");
    }
    assert!(served.terminate().success());
}

#[test]
fn what_is_set_and_what_has_happened_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "words-told.raw", 1);
    let served = serve(dir, &["words-told.raw", "--control", "c"]);
    assert_eq!(ok(dir, &["on-error", "c"]), "on error: report\n");
    ok(dir, &["on-error", "c", "pause", "--pause-at-most", "5s"]);
    assert_eq!(ok(dir, &["on-error", "c"]), "on error: pause, for at most 5 s\n");
    assert_eq!(json(dir, &["on-error", "c"])["on_error"], "pause");
    ok(dir, &["backup", "c", "b.raw"]);
    for words in [&["events", "c"][..], &["events", "c", "--disk", "words-told"]] {
        assert!(ok(dir, words).contains("a backup, is done"), "{words:?}");
    }
    fails(dir, 1, &["events", "c", "--disk", "other"]);
    for (target, says) in [("third", "say --to raw"), ("nowhere/", "no such folder")] {
        let said = fails(dir, if target == "third" { 2 } else { 1 }, &["backup", "c", target]);
        assert!(said.contains(says) && !said.contains("--format"), "{said}");
    }
    ok(dir, &["limit", "c", "--bps", "5M", "--write-bps", "50000000"]);
    let limits = ok(dir, &["limit", "c"]);
    assert!(limits.contains("5M (5.24 MB/s)") && limits.contains("50000000 (50.0 MB/s)"), "{limits}");
    assert!(served.terminate().success());
}

/// A help that nobody gets is a failure.
#[test]
fn a_help_that_cannot_be_written_fails() {
    for words in [&["--help"][..], &["--version"], &["create", "--help"]] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let output = spile().args(words).stdout(full).stderr(Stdio::piped()).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && said.contains("cannot write to stdout"), "{words:?}: {said}");
    }
}

/// Its guest waits, and whoever looks has to know.
#[test]
fn a_server_that_was_killed_is_listed_until_the_next_one_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "words-killed.raw", 1);
    serve(dir, &["words-killed.raw"]).kill();
    let line = || ok(dir, &["ls"]).lines().find(|line| line.starts_with("words-killed: ")).map(str::to_owned);
    assert!(line().is_some_and(|line| line.contains("its server has ended") && line.contains("a guest")));
    fs::remove_file(dir.join("n")).unwrap();
    let served = serve(dir, &["words-killed.raw"]);
    assert_eq!(line(), None);
    assert!(served.terminate().success());
    assert_eq!(line(), None);
}

/// Nobody but root has a folder for what servers note without XDG_RUNTIME_DIR; a disk of files needs none.
#[test]
fn a_new_disk_begins_without_a_warning_where_there_is_no_folder_for_servers() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut command = spile();
    command.args(["create", "words-new.vhd", "1M"]).current_dir(dir).env("SPILE_RUN_DIR", "/proc/none");
    let output = command.output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let mut command = spile();
    command.args(["snapshot", "words-new.vhd", "--name", "s"]).current_dir(dir).env("SPILE_RUN_DIR", "/proc/none");
    let said = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert!(!said.contains("may be lost"), "{said}");
}

#[test]
fn a_failed_nbd_request_is_logged_with_its_disk() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "words-log.raw", 1);
    let mut served = serve(dir, &["words-log.raw,read-only"]);
    let client = Client::connect(&served.uri()).unwrap();
    fs::File::options().write(true).open(dir.join("words-log.raw")).unwrap().set_len(4096).unwrap();
    assert!(client.read(8 << 20, &mut [0; 4096]).is_err());
    drop(client);
    served.signal(nix::sys::signal::Signal::SIGTERM);
    served.wait();
    let said = crate::common::guests::rest_of_stderr(&mut served);
    assert!(said.contains("disk=words-log"), "{said}");
}

/// The shell offers the names that there are.
#[test]
fn bash_completes_names_of_disks_snapshots_and_jobs() {
    if !have("bash", "bash_completes_names_of_disks_snapshots_and_jobs") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "words-done.vhd", "16M"]);
    ok(dir, &["snapshot", "words-done.vhd", "--name", "monday"]);
    let served = serve(dir, &["words-done.vhd"]);
    ok(dir, &["checkpoint", "words-done", "since-then"]);
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_spile")).parent().unwrap();
    let offered = |line: &str| {
        let script = format!(
            "source <(spile completions bash); COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _spile_with_names spile \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        );
        let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
        let mut bash = Command::new("bash");
        bash.args(["-c", &script]).env("PATH", path).env("SPILE_RUN_DIR", run_dir()).current_dir(dir);
        String::from_utf8(bash.output().unwrap().stdout).unwrap()
    };
    for (line, name) in [
        ("spile show words-d", "words-done"),
        ("spile status ''", "words-done"),
        ("spile revert words-done mon", "monday"),
        ("spile coalesce words-done --layer ''", "monday"),
        ("spile changed words-done --since ''", "since-then"),
        ("spile cre", "create"),
    ] {
        assert!(offered(line).lines().any(|word| word == name), "{line}: {}", offered(line));
    }
    assert!(!offered("spile show x").contains("words-done"));
    assert!(served.terminate().success());
    assert!(run(dir, &["complete-names", "--", "spile", "show"]).status.success());
}

/// The name of a snapshot belongs to its disk, and a disk of its own may be called as the file of one.
#[test]
fn a_disk_whose_name_begins_like_another_ones_is_no_snapshot_of_that() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for disk in ["vm1.vhd", "vm1-data.vhd"] {
        ok(dir, &["create", disk, "--size", "4M"]);
    }
    ok(dir, &["snapshot", "vm1.vhd", "--name", "s1"]);
    for args in [&["delete", "vm1.vhd", "data"][..], &["revert", "vm1.vhd", "data", "--discard"]] {
        let out = run(dir, args);
        let told = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && !told.contains("snapshots are data"), "{args:?}: {told}");
    }
    for disk in ["vm1.vhd", "vm1-data.vhd", "vm1-s1.vhd"] {
        ok(dir, &["check", disk]);
    }
    ok(dir, &["delete", "vm1-data.vhd"]);
    ok(dir, &["revert", "vm1.vhd", "s1", "--discard"]);
}
