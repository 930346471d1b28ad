//! Disks on a file system that is really full: a thin one under a verified load, until there is space again, and a merge, which makes some.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::guests::{Load, nbd, serve};
use crate::common::host::bytes_of;
use crate::common::nbd::Client;
use crate::common::{eventually, fails, json, ok};

const MIB: u64 = 1 << 20;
/// The file system, what fills it up at first, and the disk: without the ballast the disk has room.
const FILE_SYSTEM_BYTES: u64 = 128 * MIB;
const BALLAST_BYTES: u64 = 80 * MIB;
const DISK: &str = "64M";

fn does(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    output.status.success().then_some(()).ok_or_else(|| format!("{command:?}: {}", said.trim()))
}

/// A small ext4 of our own, on a loop device.
struct Mounted(PathBuf);

impl Mounted {
    fn new(dir: &Path) -> Result<Self, String> {
        let (image, at) = (dir.join("image"), dir.join("mnt"));
        std::fs::File::create(&image).unwrap().set_len(FILE_SYSTEM_BYTES).unwrap();
        std::fs::create_dir(&at).unwrap();
        does(Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0"]).arg(&image))?;
        does(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&at))?;
        Ok(Self(at))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A process that was killed a moment ago may still hold a file.
        let unmounted = (0..100).find_map(|_| {
            let done = does(Command::new("umount").arg(&self.0));
            std::thread::sleep(std::time::Duration::from_millis(if done.is_ok() { 0 } else { 100 }));
            done.ok()
        });
        if unmounted.is_none() {
            println!("{} stays mounted", self.0.display());
        }
    }
}

fn fills_up_and_goes_on(name: &str, test: &str, cache: &str) {
    let dir = tempfile::tempdir().unwrap();
    let mounted = match Mounted::new(dir.path()) {
        Ok(mounted) => mounted,
        Err(why) => return println!("SKIP {test}: {why}"),
    };
    let at = mounted.0.as_path();
    let ballast = std::fs::File::create(at.join("ballast")).unwrap();
    rustix::fs::fallocate(&ballast, rustix::fs::FallocateFlags::empty(), 0, BALLAST_BYTES).unwrap();
    drop(ballast);
    ok(at, &["create", name, "--size", DISK]);
    let served = serve(at, &[name, "--vhost-user", "v", "--on-error", "pause", "--cache", cache]);
    let mut load = Load::start(at, "v", &["--depth", "16"]);
    let disk = || json(at, &["ls", "c"])["disks"][0].clone();
    eventually("the disk waits", || disk()["state"] == "waiting");
    assert_eq!(disk()["waiting"]["error"]["kind"], "no_space");
    std::fs::remove_file(at.join("ballast")).unwrap();
    eventually("the disk goes on", || disk()["state"] == "running");
    load.goes_on(&served);
    assert_eq!(load.end(), 0, "the guest has seen an end of its server");
    assert!(served.terminate().success());
    if name.ends_with(".vhd") {
        ok(at, &["check", name]);
    }
}

/// It has no name yet, and its user knows the one that it is to have.
#[test]
fn a_backup_without_space_is_told_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let mounted = match Mounted::new(dir.path()) {
        Ok(mounted) => mounted,
        Err(why) => return println!("SKIP a_backup_without_space_is_told_by_its_name: {why}"),
    };
    std::fs::write(dir.path().join("big.raw"), vec![7; FILE_SYSTEM_BYTES as usize]).unwrap();
    let target = mounted.0.join("b.raw");
    let said = fails(dir.path(), 1, &["backup", "big.raw", target.to_str().unwrap()]);
    assert!(said.contains("b.raw") && !said.contains("/proc/"), "{said}");
    assert!(!target.exists());
}

#[test]
fn a_raw_disk_that_fills_up_loses_nothing() {
    fills_up_and_goes_on("thin.raw", "a_raw_disk_that_fills_up_loses_nothing", "direct");
}

#[test]
fn a_vhd_that_fills_up_loses_nothing() {
    fills_up_and_goes_on("thin.vhd", "a_vhd_that_fills_up_loses_nothing", "direct");
}

#[test]
fn a_vhd_through_the_page_cache_that_fills_up_loses_nothing() {
    fills_up_and_goes_on("thin.vhd", "a_vhd_through_the_page_cache_that_fills_up_loses_nothing", "page");
}

/// The layer in the middle has 15 MiB that its parent has, too, and 5 MiB for which the parent needs space: more than is free.
fn is_merged(name: &str, test: &str) {
    let dir = tempfile::tempdir().unwrap();
    let mounted = match Mounted::new(dir.path()) {
        Ok(mounted) => mounted,
        Err(why) => return println!("SKIP {test}: {why}"),
    };
    let at = mounted.0.as_path();
    ok(at, &["create", name, "--size", DISK]);
    let served = serve(at, &[&format!("{name},name=d"), "--nbd", "unix:n"]);
    let client = Client::connect(&nbd(at, "d")).unwrap();
    for (from_mib, len_mib, byte, snapshot) in [(0, 20, 1, "s1"), (5, 20, 2, "s2")] {
        (from_mib..from_mib + len_mib).for_each(|mib| client.write(mib * MIB, &[byte; MIB as usize], false).unwrap());
        ok(at, &["snapshot", "c", "--name", snapshot]);
    }
    drop(client);
    assert!(served.terminate().success());
    let before = bytes_of(at, name);
    let free = rustix::fs::statvfs(at).map(|stat| stat.f_bavail * stat.f_frsize).unwrap();
    let ballast = std::fs::File::create(at.join("ballast")).unwrap();
    rustix::fs::fallocate(&ballast, rustix::fs::FallocateFlags::empty(), 0, free - MIB).unwrap();
    ok(at, &["coalesce", name, "--layer", "s2", "--wait"]);
    ballast.set_len(0).unwrap();
    let middle = at.join(name.replace("thin", "thin-s2"));
    assert!(!middle.exists(), "the layer is there still");
    assert!(bytes_of(at, name) == before, "the disk shows something else");
}

#[test]
fn a_merge_without_space_makes_some_of_what_needs_none() {
    is_merged("thin.qcow2", "a_merge_without_space_makes_some_of_what_needs_none");
}

#[test]
fn a_merge_of_vhds_without_space_makes_some_of_what_needs_none() {
    is_merged("thin.vhd", "a_merge_of_vhds_without_space_makes_some_of_what_needs_none");
}

/// Takes all the space that is left.
fn fill_up(at: &Path) {
    let mut ballast = std::fs::File::options().create(true).append(true).open(at.join("ballast")).unwrap();
    for len in [MIB as usize, 4096, 1] {
        while std::io::Write::write_all(&mut ballast, &vec![1; len]).is_ok() {}
    }
}

/// A disk has space prepared ahead when its file system gets full. It goes back when the disk is closed, or by a repair where its server was killed.
fn gives_back(name: &str, test: &str) {
    for is_killed in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let mounted = match Mounted::new(dir.path()) {
            Ok(mounted) => mounted,
            Err(why) => return println!("SKIP {test}: {why}"),
        };
        let at = mounted.0.as_path();
        ok(at, &["create", name, "--size", DISK]);
        let empty_bytes = std::fs::metadata(at.join(name)).unwrap().len();
        let served = serve(at, &[&format!("{name},name=d"), "--nbd", "unix:n"]);
        let client = Client::connect(&nbd(at, "d")).unwrap();
        client.write(0, &[7; 2 * MIB as usize], true).unwrap();
        drop(client);
        fill_up(at);
        match is_killed {
            false => assert!(served.terminate().success()),
            true => served.kill(),
        }
        if is_killed {
            ok(at, &["check", name, "--repair"]);
        }
        let told = json(at, &["check", name]);
        assert_eq!((told["result"].as_str(), &told["leaked_bytes"]), (Some("sound"), &0.into()), "{is_killed}: {told}");
        let len_bytes = std::fs::metadata(at.join(name)).unwrap().len();
        assert!(is_killed || len_bytes < empty_bytes + 3 * MIB, "the file has {len_bytes} bytes");
    }
}

#[test]
fn a_vhd_that_is_closed_when_all_is_full_gives_back_what_was_prepared() {
    gives_back("thin.vhd", "a_vhd_that_is_closed_when_all_is_full_gives_back_what_was_prepared");
}

#[test]
fn a_qcow2_that_is_closed_when_all_is_full_gives_back_what_was_prepared() {
    gives_back("thin.qcow2", "a_qcow2_that_is_closed_when_all_is_full_gives_back_what_was_prepared");
}
