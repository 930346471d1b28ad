//! Disks that are moved, and how far their moves are.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::{Served, eventually, json, spile};

const MIB: usize = 1 << 20;

/// A folder with `old/NAME.raw`, 48 MiB and full, and an empty folder `new`.
pub fn full(name: &str, new: &str) -> (tempfile::TempDir, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..48 * MIB).map(|at| 1 + (at / 4096 % 251) as u8).collect();
    ["old", new].into_iter().for_each(|folder| fs::create_dir(dir.path().join(folder)).unwrap());
    fs::write(dir.path().join(format!("old/{name}.raw")), &bytes).unwrap();
    (dir, bytes)
}

/// How many bytes of the disk the note of its move says to be durable in the half; 0 while it says nothing.
pub fn noted(dir: &Path, disk: &str) -> u64 {
    let note = fs::read_to_string(dir.join(format!("old/.{disk}.raw.spile-job"))).unwrap_or_default();
    let copied = note.lines().find_map(|line| line.strip_prefix("copied ")?.split(' ').next()?.parse().ok());
    copied.unwrap_or_default()
}

/// The other host, which takes disks in for the folder `there`.
pub fn receive(dir: &Path) -> Served {
    receive_in(dir, "there")
}

/// A host that takes disks in for `folder`.
pub fn receive_in(dir: &Path, folder: &str) -> Served {
    receive_by(spile(), dir, folder)
}

/// As [`receive_in`], by a command that runs the program on the arguments that it is given.
fn receive_by(mut command: Command, dir: &Path, folder: &str) -> Served {
    let socket = dir.join(format!("{folder}.nbd"));
    command.args(["receive", folder, "--nbd", &format!("unix:{folder}.nbd")]).current_dir(dir).stdout(Stdio::null());
    let there = Served { child: command.spawn().unwrap(), socket };
    eventually("it answers", || UnixStream::connect(&there.socket).is_ok());
    there
}

/// As [`receive`], of a host that was started anew: whatever was in its memory is gone, as far as it says. `None` where the test may not have a name space of its own.
pub fn receive_after_reboot(dir: &Path) -> Option<Served> {
    std::fs::write(dir.join("boot_id"), "00112233-4455-6677-8899-aabbccddeeff\n").unwrap();
    let mount = "mount --bind boot_id /proc/sys/kernel/random/boot_id";
    let may = ["-rm", "-m"].into_iter().find(|how| {
        let mut command = Command::new("unshare");
        command
            .args([how, "sh", "-c", mount])
            .current_dir(dir)
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|done| done.success())
    });
    let program = spile();
    let mut command = Command::new("unshare");
    command.args([may?, "sh", "-c", &format!("{mount} && exec \"$@\""), "sh"]).arg(program.get_program());
    command.envs(program.get_envs().filter_map(|(key, value)| Some((key, value?))));
    Some(receive_by(command, dir, "there"))
}

/// Where the disk `name` goes at the host of [`receive`].
pub fn to(dir: &Path, name: &str) -> String {
    to_host(dir, "there", name)
}

/// Where the disk `name` goes at the host that takes disks in for `folder`.
pub fn to_host(dir: &Path, folder: &str, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", dir.join(format!("{folder}.nbd")).display())
}

/// The last job of the disk.
pub fn job(dir: &Path, disk: &str) -> Value {
    let jobs = json(dir, &["jobs"]);
    let found = jobs["jobs"].as_array().unwrap().iter().rfind(|job| job["disk"] == disk);
    found.unwrap_or_else(|| panic!("{disk} has no job: {jobs}")).clone()
}

/// Waits until nobody has the disk open.
pub fn let_go(dir: &Path, disk: &str) {
    let mut checks = spile();
    checks.args(["check", disk]).current_dir(dir);
    eventually("nobody has it open any more", || checks.output().unwrap().status.success());
}
