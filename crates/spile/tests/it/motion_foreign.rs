//! `spile move` to exports of other NBD servers. They keep no identity of an export, and some take any name for their one export.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use crate::common::moves::{self, noted};
use crate::common::nbd::Client;
use crate::common::{Served, eventually, have, json, ok, spile};

const MIB: usize = 1 << 20;

/// A server of the file `there.raw`, which holds `value` everywhere.
fn foreign(dir: &Path, program: &str, value: u8) -> Served {
    fs::write(dir.join("there.raw"), vec![value; 48 * MIB]).unwrap();
    let socket = dir.join("foreign");
    let _ = fs::remove_file(&socket);
    let args: &[&str] = match program {
        "nbdkit" => &["-f", "-U", "foreign", "file", "there.raw"],
        _ => &["-f", "raw", "-t", "-e", "9", "-x", "there", "-k", socket.to_str().unwrap(), "there.raw"],
    };
    let child = Command::new(program).args(args).current_dir(dir).spawn().unwrap();
    let served = Served { child, socket };
    eventually("it answers", || UnixStream::connect(&served.socket).is_ok());
    served
}

fn to(dir: &Path) -> String {
    format!("nbd+unix:///there?socket={}", dir.join("foreign").display())
}

fn serve(dir: &Path, name: &str) -> Served {
    let mut command = spile();
    command.args(["serve", &format!("old/{name}.raw"), "--nbd", "unix:n"]).current_dir(dir);
    Served::spawn(&mut command, dir.join("n")).unwrap_or_else(|err| panic!("serve {name}: {err}"))
}

#[test]
fn a_server_that_takes_any_name_gets_the_disk_and_nothing_else() {
    if !have("nbdkit", "a_server_that_takes_any_name_gets_the_disk_and_nothing_else") {
        return;
    }
    let (dir, bytes) = moves::full("foreign-any", "new");
    let dir = dir.path();
    let nbdkit = foreign(dir, "nbdkit", 0x77);
    ok(dir, &["checkpoint", "old/foreign-any.raw", "then"]);
    json(dir, &["move", "old/foreign-any.raw", "--to", &to(dir)]);
    assert!(fs::read(dir.join("there.raw")).unwrap() == bytes, "the disk holds something else there");
    assert!(!dir.join("old/.foreign-any.raw.spile-left").exists());
    nbdkit.kill();
}

/// The server of the disk is killed, and what lies behind the export is another file of the same size by the time it is there again.
fn begins_anew(program: &str, name: &str) {
    let (dir, mut bytes) = moves::full(name, "new");
    let dir = dir.path();
    let there = foreign(dir, program, 0x77);
    let served = serve(dir, name);
    json(dir, &["move", name, "--to", &to(dir), "--rate", "8M", "--background"]);
    let of_disk = |job: &&serde_json::Value| job["disk"] == name && job["state"] != "interrupted";
    let job = || json(dir, &["jobs"])["jobs"].as_array().unwrap().iter().rfind(of_disk).cloned();
    eventually("half of it is copied", || job().is_some_and(|job| job["done_bytes"].as_u64() >= Some(24 << 20)));
    served.kill();
    assert_eq!(noted(dir, name), 0, "nothing is known of an export that may be another one");
    there.kill();
    let there = foreign(dir, program, 0x78);
    let served = serve(dir, name);
    Client::connect(&served.uri()).unwrap().write(40 << 20, &[9; 4096], false).unwrap();
    bytes[40 * MIB..40 * MIB + 4096].fill(9);
    ok(dir, &["job", job().expect("the move goes on")["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it is done", || job().is_some_and(|job| job["state"] == "done"));
    assert!(job().unwrap()["done_bytes"].as_u64() >= Some(48 << 20));
    assert!(served.terminate().success());
    assert!(fs::read(dir.join("there.raw")).unwrap() == bytes, "the disk holds something else there");
    there.kill();
}

#[test]
fn a_killed_move_to_qemu_nbd_begins_anew() {
    if have("qemu-nbd", "a_killed_move_to_qemu_nbd_begins_anew") {
        begins_anew("qemu-nbd", "foreign-qemu");
    }
}

#[test]
fn a_killed_move_to_nbdkit_begins_anew() {
    if have("nbdkit", "a_killed_move_to_nbdkit_begins_anew") {
        begins_anew("nbdkit", "foreign-nbdkit");
    }
}
