//! A Xen guest goes to another host together with its disk: `spile xen-backend` over a Xen of ordinary processes here, `spile receive` there.

use std::path::Path;
use std::process::Output;
use std::time::Duration;

use crate::common::moves::{self, receive};
use crate::common::xen::{BLOCK, BLOCKS, Load, Xen, chain, content, request, take, wait_until};
use crate::common::{ok, spile};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use spile_lab::GuestQueue;
use spile_lab::xen::Blkfront;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op};
use spile_lab::xen::toolstack::{Vbd, add_vbd};
use spile_xen::DomId;
use spile_xen::blkif::status;

/// What an operator types on this host.
fn run(dir: &Path, args: &[&str]) -> Output {
    let mut command = spile();
    command.args(args).current_dir(dir).env("SPILE_RUN_DIR", dir.join("run"));
    command.output().expect("the program starts")
}

fn done(dir: &Path, args: &[&str]) -> Value {
    let out = run(dir, &[args, &["--json"]].concat());
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("it is JSON")
}

fn refused(dir: &Path, args: &[&str], why: &str) {
    let out = run(dir, args);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains(why), "{args:?}: {said}");
}

fn hand_over(dir: &Path, job: &str) {
    let out = run(dir, &["job", job, "hand-over"]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

fn begin(dir: &Path, name: &str, more: &[&str]) -> String {
    let to = moves::to(dir, name);
    let begun = done(dir, &[&["move", "disk", "--to", &to, "--mirror-only"], more].concat());
    begun["id"].as_str().unwrap().to_owned()
}

/// The job that keeps the copy, once it is in step.
fn in_step(dir: &Path) -> String {
    let mut found = None;
    wait_until("a copy in step", || {
        let jobs = done(dir, &["jobs"]);
        let mut jobs = jobs["jobs"].as_array().unwrap().iter();
        let in_step = jobs.find(|job| job["state"] == "running" && job["motion"]["phase"] == "in step");
        found = in_step.map(|job| job["id"].as_str().unwrap().to_owned());
        found.is_some()
    });
    found.unwrap()
}

fn state(dir: &Path) -> Value {
    let disks = done(dir, &["ls"]);
    disks["disks"][0]["state"].clone()
}

fn killed(xen: &Xen, vbd: &Vbd) {
    let pid = xen.process(vbd, None);
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    xen.process(vbd, Some(pid));
}

/// Nothing that the guest asks for is answered here.
fn waits(load: &mut Load) {
    load.submit();
    std::thread::sleep(Duration::from_millis(300));
    let before = load.done;
    load.collect();
    assert_eq!(load.done, before, "it was answered");
}

#[test]
fn a_guest_and_its_disk_go_to_another_host_over_kills_and_a_host_that_is_gone() {
    let mut xen = Xen::start();
    let dir = xen.dir.path().to_owned();
    std::fs::create_dir(dir.join("there")).unwrap();
    let options = BlkfrontOptions { depth: 16, data_bytes: BLOCK, indirect_segments: 32, ..BlkfrontOptions::default() };
    let vbd = Vbd::new(DomId(3), format!("vhd:{}", chain(&dir).display()));
    add_vbd(&mut xen.store, &vbd).unwrap();
    let mut front = Blkfront::new(xen.guest(3), vbd.device, options.clone()).unwrap();
    let mut load = Load::new(front.start().unwrap());
    load.run(300);

    // The other host is killed while the disk is copied, and so is the disk's process: the copy goes on, as another job.
    let mut there = receive(&dir);
    let job = begin(&dir, "disk.vhd", &["--rate", "2M"]);
    refused(&dir, &["job", &job, "hand-over"], "not in step");
    there.kill();
    load.run(300);
    there = receive(&dir);
    killed(&xen, &vbd);
    load.run(300);
    let mut job = String::new();
    load.run_until(|| {
        let jobs = done(&dir, &["jobs"]);
        job = jobs["jobs"][0]["id"].as_str().unwrap_or_default().to_owned();
        !job.is_empty()
    });
    assert!(run(&dir, &["job", &job, "rate", "none"]).status.success());
    load.drain();
    // What is lost of a copy does not concern the guest.
    load.queues[0].submit(0, Op::Flush, 0, 0);
    load.queues[0].publish();
    assert_eq!(take(&mut load.queues[0]), (0, status::OKAY));
    let job = in_step(&dir);

    // Not while the guest runs.
    let refusing = std::thread::spawn({
        let (dir, job) = (dir.clone(), job.clone());
        move || refused(&dir, &["job", &job, "hand-over"], "a guest uses the disk")
    });
    load.run_until(|| refusing.is_finished());
    refusing.join().unwrap();
    load.run(100);
    load.drain();

    // The toolstack has saved it. Its disk's process is killed before the hand-over and after it.
    killed(&xen, &vbd);
    let job = in_step(&dir);
    hand_over(&dir, &job);
    let moment = load.versions.clone();
    assert_eq!(state(&dir), "handed_over");
    waits(&mut load);
    killed(&xen, &vbd);
    waits(&mut load);
    assert_eq!(state(&dir), "handed_over");

    // The move fails after all, and the guest goes on here.
    assert!(run(&dir, &["resume", "disk"]).status.success());
    load.run(300);
    load.drain();
    assert_eq!(state(&dir), "running");
    let bytes = |versions: &[u64]| -> Vec<u8> {
        (0..BLOCKS).flat_map(|block| content(block, versions[block as usize])).collect()
    };
    std::fs::write(dir.join("moment.raw"), bytes(&moment)).unwrap();
    ok(&dir, &["compare", "moment.raw", "there/disk.vhd"]);

    // And now it succeeds: another domain goes on there, and the one here is ended.
    begin(&dir, "again.vhd", &[]);
    let job = in_step(&dir);
    hand_over(&dir, &job);
    there.kill();
    let new = Vbd::new(DomId(4), format!("vhd:{}", dir.join("there/again.vhd").display()));
    add_vbd(&mut xen.store, &new).unwrap();
    let mut front_there = Blkfront::new(xen.guest(4), new.device, options).unwrap();
    let versions = load.versions.clone();
    waits(&mut load);
    let mut there = Load::new(front_there.start().unwrap());
    there.versions = versions;
    there.run(500);
    xen.set_key(&vbd, "online", "0");
    xen.set_key(&vbd, "state", "5");
    xen.store.remove(spile_xen::store::Tx::NONE, &vbd.frontend_path()).unwrap();
    wait_until("the end of the process here", || !xen.path("run/3-51712.pid").exists());
    there.run(100);
    there.drain();
    std::fs::write(dir.join("wanted.raw"), bytes(&there.versions)).unwrap();
    let Load { queues, .. } = there;
    xen.set_key(&new, "online", "0");
    xen.set_key(&new, "state", "5");
    front_there.stop(queues).unwrap();
    wait_until("the end of the process there", || !xen.path("run/4-51712.pid").exists());
    ok(&dir, &["compare", "wanted.raw", "there/again.vhd"]);
}

/// Who restores a guest before its disk was handed over finds no disk there.
#[test]
fn a_guest_does_not_run_on_the_other_host_before_its_disk_is_there() {
    let mut xen = Xen::start();
    let dir = xen.dir.path().to_owned();
    std::fs::create_dir(dir.join("there")).unwrap();
    let vbd = Vbd::new(DomId(3), format!("vhd:{}", chain(&dir).display()));
    add_vbd(&mut xen.store, &vbd).unwrap();
    let mut front = Blkfront::new(xen.guest(3), vbd.device, BlkfrontOptions::default()).unwrap();
    let mut queue = front.start().unwrap().remove(0);
    queue.data(0).fill(5);
    request(&mut queue, Op::Write, 8192, 4096);
    let _there = receive(&dir);
    begin(&dir, "disk.vhd", &[]);
    let job = in_step(&dir);
    let new = Vbd::new(DomId(4), format!("vhd:{}", dir.join("there/disk.vhd").display()));
    add_vbd(&mut xen.store, &new).unwrap();
    let mut front_there = Blkfront::new(xen.guest(4), new.device, BlkfrontOptions::default()).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(front_there.backend_state().unwrap(), 1, "it is served before its time");
    hand_over(&dir, &job);
    let mut queue = front_there.start().unwrap().remove(0);
    request(&mut queue, Op::Read, 8192, 4096);
    assert_eq!(queue.data(0).slice(0..4096).to_vec(), vec![5; 4096]);
}
