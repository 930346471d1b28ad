//! A limit on the size of files (RLIMIT_FSIZE: `ulimit -f`, LimitFSIZE= of systemd): a request that comes to it fails, and nothing else does.

use std::path::Path;
use std::process::Command;

use spile_core::ErrorKind;

use crate::common::guests::nbd;
use crate::common::nbd::Client;
use crate::common::{Served, eventually, have, json, ok};

const MIB: u64 = 1 << 20;
const KINDS: [&str; 3] = ["raw", "vhd", "qcow2"];

/// The program with a limit, which may be raised while it runs.
fn limited(dir: &Path, bytes: u64) -> Command {
    let mut command = Command::new("prlimit");
    command.arg(format!("--fsize={bytes}:unlimited")).arg(env!("CARGO_BIN_EXE_spile")).current_dir(dir);
    command.env("SPILE_RUN_DIR", crate::common::run_dir());
    command
}

#[test]
fn a_disk_at_the_limit_of_a_files_size_ends_no_server() {
    if !have("prlimit", "a_disk_at_the_limit_of_a_files_size_ends_no_server") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "small.raw", "--size", "1M"]);
    for kind in KINDS {
        let name = format!("big.{kind}");
        ok(dir, &["create", &name, "--size", "20M"]);
        let socket = dir.join("nbd.sock");
        let mut command = limited(dir, 4 * MIB);
        command.args(["serve", "small.raw,name=small", &format!("{name},name=big"), "--control", "none"]);
        command.arg("--nbd").arg(format!("unix:{}", socket.display()));
        let served = Served::spawn(&mut command, socket).unwrap_or_else(|said| panic!("{kind}: {said}"));
        let (big, small) = (Client::connect(&served.export("big")).unwrap(), Client::connect(&served.export("small")));
        let written: Vec<_> = (1..8).map(|mib| big.write(mib * MIB, &[mib as u8; MIB as usize], false)).collect();
        let failed: Vec<_> = written.iter().filter_map(|done| done.as_ref().err().map(|error| error.kind())).collect();
        assert!(!failed.is_empty() && failed.iter().all(|kind| *kind == ErrorKind::NoSpace), "{kind}: {written:?}");
        small.unwrap().write(0, &[9; 4096], true).unwrap();
        let mut read = vec![0; MIB as usize];
        for (mib, _) in (1..8).zip(&written).filter(|(_, done)| done.is_ok()) {
            big.read(mib * MIB, &mut read).unwrap();
            assert!(read.iter().all(|byte| *byte == mib as u8), "{kind}: {mib}");
        }
        drop(big);
        assert!(served.terminate().success(), "{kind}");
        assert_eq!(json(dir, &["check", &name])["result"], "sound", "{kind}");
    }
}

#[test]
fn a_write_at_the_limit_of_a_files_size_waits_where_the_policy_says_so() {
    if !have("prlimit", "a_write_at_the_limit_of_a_files_size_waits_where_the_policy_says_so") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for kind in KINDS {
        let name = format!("big.{kind}");
        ok(dir, &["create", &name, "--size", "20M"]);
        let mut command = limited(dir, 4 * MIB);
        command.args([
            "serve",
            &format!("{name},name=big"),
            "--nbd",
            "unix:n",
            "--on-error",
            "pause",
            "--control",
            "c",
        ]);
        let served = Served::spawn(&mut command, dir.join("n")).unwrap();
        let disk = || json(dir, &["ls", "c"])["disks"][0].clone();
        std::thread::scope(|scope| {
            let write =
                |mib: u64| Client::connect(&nbd(dir, "big")).unwrap().write(mib * MIB, &[7; MIB as usize], false);
            let all = scope.spawn(move || (1..8).try_for_each(write));
            eventually("the disk waits", || disk()["state"] == "waiting");
            let said = disk()["waiting"]["error"].to_string();
            assert!(said.contains("no_space") && said.contains("prlimit"), "{kind}: {said}");
            let pid = format!("--pid={}", served.child.id());
            assert!(Command::new("prlimit").args([&pid, "--fsize=unlimited"]).status().unwrap().success());
            all.join().unwrap().unwrap();
        });
        assert!(served.terminate().success(), "{kind}");
        assert_eq!(json(dir, &["check", &name])["result"], "sound", "{kind}");
    }
}

#[test]
fn a_command_at_the_limit_of_a_files_size_says_so() {
    if !have("prlimit", "a_command_at_the_limit_of_a_files_size_says_so") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("a.raw"), vec![7; 3 << 20]).unwrap();
    for target in ["b.raw", "b.vhd", "b.qcow2"] {
        let output = limited(dir, MIB).args(["convert", "a.raw", target]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{target}: {said}");
        assert!(said.contains("File too large") && said.contains("ulimit -f"), "{target}: {said}");
        assert!(!dir.join(target).exists(), "{target} is there");
    }
}
