//! A planned restart: a second server takes everything from a running one, and its guests notice nothing.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crate::common::control::ask;
use crate::common::guests::{
    Load, guest, names_in, nbd, open_files, rest_of_stderr, serve, serve_again, simple_guest, succeed, try_serve,
};
use crate::common::nbd::Client;
use crate::common::{Served, eventually, fails, json, ok};
use nix::sys::signal::Signal;
use spile::uri::{Address, NbdUri};
use spile_lab::GuestQueue;
use spile_lab::vhost::Watch;

const MIB: u64 = 1 << 20;

fn inodes(dir: &Path, names: &[&str]) -> Vec<u64> {
    names.iter().map(|name| fs::symlink_metadata(dir.join(name)).unwrap().ino()).collect()
}

#[test]
fn guests_notice_nothing_of_several_successors_and_nbd_clients_connect_again() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.raw", "--size", "64M"]);
    let args = ["d.raw,format=raw", "--vhost-user", "v", "--nbd", "unix:n", "--queues", "2"];
    let mut served = serve(dir, &args);
    let names = ["c", "n", "v"];
    let before = inodes(dir, &names);
    let mut load = Load::start(dir, "v", &["--queues", "2", "--span", "32M"]);
    load.goes_on(&served);
    let mut files = None;
    for round in 0..4u8 {
        let client = Client::connect(&nbd(dir, "")).unwrap();
        client.write(48 * MIB, &[round + 1; 4096], false).unwrap();
        served = succeed(dir, &args, served);
        client.read(48 * MIB, &mut [0; 4096]).expect_err("NBD clients are hung up on");
        let client = Client::connect(&nbd(dir, "")).unwrap();
        let mut bytes = [0; 4096];
        client.read(48 * MIB, &mut bytes).unwrap();
        assert_eq!(bytes, [round + 1; 4096]);
        drop(client);
        load.goes_on(&served);
        assert_eq!(inodes(dir, &names), before, "the sockets are the same");
        // The second successor has nothing that the first had not.
        let most = *files.get_or_insert(open_files(&served));
        eventually("no descriptor is left over", || open_files(&served) <= most);
    }
    assert_eq!(load.end(), 0, "the guest has connected again");
    assert!(served.terminate().success());
    assert_eq!(names_in(dir), ["d.raw", "v.model"], "the last removes the names");
}

/// For a moment nobody has the disk's file locked. A command that comes just then must not get it: it would find no server, and change the disk by itself.
#[test]
fn commands_that_come_in_the_middle_do_not_get_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.vhd", "--size", "64M"]);
    let args = ["d.vhd", "--vhost-user", "v", "--nbd", "unix:n"];
    let mut served = serve(dir, &args);
    let mut load = Load::start(dir, "v", &["--span", "32M"]);
    let is_over = AtomicBool::new(false);
    let served = std::thread::scope(|scope| {
        // The socket of the server is not where commands look for servers, so that each of them tries to have the disk for itself.
        for command in
            [&["check", "d.vhd"][..], &["snapshot", "d.vhd", "--name", "never"], &["checkpoint", "d.vhd", "never"]]
        {
            let is_over = &is_over;
            scope.spawn(move || {
                // Each waits for some seconds for a file that is in use.
                for _ in 0..30 {
                    if is_over.load(Relaxed) {
                        break;
                    }
                    let said = fails(dir, 1, command);
                    assert!(said.contains("in use by another process"), "{command:?}: {said}");
                }
            });
        }
        for _ in 0..6 {
            load.goes_on(&served);
            served = succeed(dir, &args, served);
        }
        is_over.store(true, Relaxed);
        served
    });
    load.goes_on(&served);
    assert_eq!(load.end(), 0);
    assert!(served.terminate().success());
    assert_eq!(names_in(dir), ["d.vhd", "v.model"]);
}

#[test]
fn every_disk_and_socket_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for disk in ["a.raw", "base.vhd", "b.vhd"] {
        ok(dir, &["create", disk, "--size", "32M"]);
    }
    {
        let base = Served::start(dir, &["base.vhd"]);
        Client::connect(&base.uri()).unwrap().write(31 * MIB, &[7; 512], true).unwrap();
        assert!(base.terminate().success());
    }
    ok(dir, &["create", "child.vhd", "--parent", "base.vhd"]);
    let disks = ["a.raw", "child.vhd", "b.vhd,name=x", "base.vhd,name=ro,read-only"];
    let ways = ["a", "a2", "child,export=child", "x,export=x", "ro,export=ro"];
    let args: Vec<&str> = disks.into_iter().chain(ways.into_iter().flat_map(|way| ["--vhost-user", way])).collect();
    let mut served = serve(dir, &args);
    let mut loads: Vec<Load> =
        ["a", "child", "x"].iter().map(|socket| Load::start(dir, socket, &["--span", "16M"])).collect();
    // A second guest of the first disk, whose front end knows nothing of requests in flight, and one that only reads.
    let (second, mut queue) = simple_guest(&dir.join("a2"));
    let (reader, mut base) = guest(&dir.join("ro"));
    for round in 1..=3u8 {
        loads.iter_mut().for_each(|load| load.goes_on(&served));
        queue.write(20 * MIB, &[round; 8192]).unwrap();
        served = succeed(dir, &args, served);
        assert_eq!(queue.read(20 * MIB, 8192).unwrap(), [round; 8192]);
        assert_eq!(base.read(31 * MIB, 512).unwrap(), [7; 512]);
    }
    drop((second, reader));
    loads.iter_mut().for_each(|load| load.goes_on(&served));
    loads.into_iter().for_each(|load| assert_eq!(load.end(), 0));
    assert!(served.terminate().success());
    for disk in ["child.vhd", "b.vhd"] {
        assert_eq!(json(dir, &["check", disk])["result"], "sound", "{disk}");
    }
}

/// What is in flight takes longer than the old server waits for anybody: syncs of much that was written to the page cache.
#[test]
fn slow_requests_are_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.raw", "--size", "256M"]);
    let args = ["d.raw", "--vhost-user", "v", "--cache", "page"];
    let mut served = serve(dir, &args);
    let mut load = Load::start(dir, "v", &["--bs", "1M", "--depth", "64", "--flush-every", "16", "--rwmix", "0"]);
    for _ in 0..3 {
        load.goes_on(&served);
        served = succeed(dir, &args, served);
    }
    assert_eq!(load.end(), 0);
}

#[test]
fn where_nobody_is_the_successor_starts_afresh() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.raw", "--size", "16M"]);
    let args = ["d.raw", "--vhost-user", "v", "--takeover"];
    let served = serve(dir, &args);
    let (_device, mut queue) = guest(&dir.join("v"));
    queue.write(0, &[1; 512]).unwrap();
    // The same when only the names of a dead one are there.
    served.kill();
    assert_eq!(names_in(dir), ["c", "d.raw", "v"]);
    let served = serve_again(dir, &args);
    let (_device, mut queue) = guest(&dir.join("v"));
    assert_eq!(queue.read(0, 512).unwrap(), [1; 512]);
    assert!(served.terminate().success());
    assert_eq!(names_in(dir), ["d.raw"]);
}

#[test]
fn a_guest_that_was_handed_over_hears_of_its_disks_growth() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.raw", "--size", "16M"]);
    let args = ["d.raw", "--vhost-user", "v"];
    let served = serve(dir, &args);
    let (device, mut queue) = guest(&dir.join("v"));
    let (sender, sizes) = std::sync::mpsc::channel();
    let on_config = move |config: &spile_lab::vhost::BlkConfig| sender.send(config.size_bytes()).unwrap();
    let watch = Watch::start(device, None, Some(Box::new(on_config))).unwrap();
    let served = succeed(dir, &args, served);
    ok(dir, &["resize", "c", "24M"]);
    assert_eq!(sizes.recv_timeout(Duration::from_secs(600)), Ok(24 * MIB));
    queue.write(24 * MIB - 512, &[3; 512]).unwrap();
    drop(watch.stop());
    assert!(served.terminate().success());
}

/// A takeover stops a merge. In the successor it is paused if it was, and as slow as it was.
#[test]
fn a_job_goes_on_in_the_successor_as_its_users_wanted_it() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, control) = (dir.path(), dir.path().join("c"));
    ok(dir, &["create", "base.vhd", "--size", "32M"]);
    ok(dir, &["create", "d.vhd", "--parent", "base.vhd"]);
    let args = ["d.vhd", "--vhost-user", "v"];
    let served = serve(dir, &args);
    let (_device, mut queue) = guest(&dir.join("v"));
    (0..8).for_each(|n: u8| queue.write(u64::from(n) * 4 * MIB, &[n + 1; 8192]).unwrap());
    let new = "{\"disk\":\"d\",\"kind\":\"coalesce\",\"limit_bytes_per_s\":4096}";
    let (status, begun) = ask(&control, "POST", "/v1/jobs", new);
    assert_eq!(status / 100, 2, "{begun}");
    let job = || ask(&control, "GET", "/v1/jobs", "").1["jobs"][0].clone();
    let change = |what: &str| {
        let (status, answer) = ask(&control, "PATCH", &format!("/v1/jobs/{}", job()["id"].as_str().unwrap()), what);
        assert_eq!(status, 200, "{answer}");
    };
    change("{\"state\":\"paused\",\"limit_bytes_per_s\":1048576}");
    let served = succeed(dir, &args, served);
    eventually("the successor has the job", || job()["state"] == "paused");
    assert_eq!(job()["limit_bytes_per_s"], MIB);
    assert_ne!(job()["id"], begun["id"]);
    change("{\"state\":\"running\",\"limit_bytes_per_s\":0}");
    eventually("the merge is done", || job()["state"] == "done");
    assert!(!dir.join("base.vhd").exists());
    (0..8).for_each(|n: u8| assert_eq!(queue.read(u64::from(n) * 4 * MIB, 8192).unwrap(), [n + 1; 8192]));
    assert!(served.terminate().success());
    assert_eq!(json(dir, &["check", "d.vhd"])["result"], "sound");
}

#[test]
fn the_service_manager_hears_once_who_serves() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.raw", "--size", "16M"]);
    let manager = UnixDatagram::bind(dir.join("notify")).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
    let state = || {
        let mut text = [0; 64];
        let len = manager.recv(&mut text).unwrap();
        String::from_utf8_lossy(&text[..len]).into_owned()
    };
    let start = |extra: &[&str]| {
        let mut command = crate::common::spile();
        command.args(["serve", "d.raw", "--vhost-user", "v", "--control", "c"]).args(extra);
        command.current_dir(dir).env("NOTIFY_SOCKET", dir.join("notify"));
        Served::spawn(&mut command, dir.join("v"))
    };
    let mut old = start(&[]).unwrap();
    assert_eq!(state(), "READY=1");
    start(&["--takeover", "--queues", "1"]).map(|_| ()).expect_err("refused, and not a word to the manager");
    let new = start(&["--takeover"]).unwrap();
    assert_eq!(old.wait().code(), Some(0));
    assert_eq!(state(), format!("READY=1\nMAINPID={}", new.child.id()));
    assert!(new.terminate().success());
    assert_eq!(state(), "STOPPING=1");
}

/// One round: a successor starts, and someone is ended at some moment of that.
#[derive(Clone, Copy, Debug)]
enum End {
    Old(Signal),
    New(Signal),
}

/// What happens in a round depends on the seed and nothing else (SplitMix64).
fn dice(seed: u64, round: u64) -> u64 {
    let mut z = (seed << 32 | round).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// True when a server does what it is asked at the control socket.
fn hears(dir: &Path) -> bool {
    let refusal = crate::common::run(dir, &["resize", "c", "512", "--name", "nobody's"]).stderr;
    String::from_utf8_lossy(&refusal).contains("no disk is exported")
}

/// Who serves after one of the two was ended; `None` when nobody does.
fn survivor(dir: &Path, mut ended: Served, mut other: Served) -> Option<Served> {
    ended.wait();
    let mut is_over = false;
    eventually("the other serves or ends", || {
        is_over = other.child.try_wait().unwrap().is_some();
        is_over || hears(dir)
    });
    (!is_over).then_some(other)
}

#[test]
fn whoever_ends_and_whenever_nothing_is_lost() {
    const SEED: u64 = 3;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.vhd", "--size", "64M"]);
    let args = ["d.vhd", "--vhost-user", "v"];
    let mut served = serve(dir, &args);
    let mut load = Load::start(dir, "v", &["--reconnect", "30s"]);
    let mut afresh = 0;
    for round in 0..12 {
        load.goes_on(&served);
        let mut command = crate::common::spile();
        command.args(["serve", "--takeover", "--control", "c"]).args(args).current_dir(dir);
        let child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
        let new = Served { child, socket: dir.join("v") };
        let dice = dice(SEED, round);
        let wait = Duration::from_micros((dice >> 8) % 40_000);
        std::thread::sleep(wait);
        let signal = if dice & 1 == 0 { Signal::SIGKILL } else { Signal::SIGTERM };
        let end = if dice & 2 == 0 { End::Old(signal) } else { End::New(signal) };
        println!("seed {SEED}, round {round}: {end:?} after {wait:?}");
        let left = match end {
            End::Old(signal) => {
                // It may have ended by itself, and is not reaped yet.
                served.signal(signal);
                survivor(dir, served, new)
            }
            End::New(signal) => {
                new.signal(signal);
                survivor(dir, new, served)
            }
        };
        served = left.unwrap_or_else(|| {
            afresh += 1;
            serve_again(dir, &args)
        });
    }
    load.goes_on(&served);
    let reconnects = load.end();
    println!("started afresh {afresh} times, reconnected {reconnects} times");
    assert!(served.terminate().success());
    assert_eq!(json(dir, &["check", "d.vhd"])["result"], "sound");
}

#[test]
fn a_front_end_stuck_within_a_message_does_not_hold_the_others_up() {
    use std::io::{Read, Write};
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.raw", "--size", "32M"]);
    let args = ["d.raw", "--vhost-user", "v"];
    let served = serve(dir, &args);
    let mut load = Load::start(dir, "v", &[]);
    load.goes_on(&served);
    // Half a header; and questions without end whose answers nobody takes.
    let mut half = UnixStream::connect(dir.join("v")).unwrap();
    half.write_all(&[1, 0, 0, 0, 1]).unwrap();
    let mut deaf = UnixStream::connect(dir.join("v")).unwrap();
    deaf.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let question: Vec<u8> = [1u32, 1, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    while deaf.write_all(&question).is_ok() {}
    let served = succeed(dir, &args, served);
    half.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
    assert_eq!(half.read(&mut [0; 16]).unwrap(), 0, "it is hung up on");
    load.goes_on(&served);
    assert_eq!(load.end(), 0);
}

#[test]
fn a_tcp_port_goes_on_and_a_refused_successor_leaves_no_trace() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.raw", "--size", "16M"]);
    // A port that is free: the system's choice, given back.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("tcp:127.0.0.1:{port}");
    let args = ["d.raw", "--nbd", &address];
    let served = serve(dir, &args);
    let uri = NbdUri::new(Address::Tcp("127.0.0.1".to_owned(), port), "");
    Client::connect(&uri).unwrap().write(0, &[5; 512], false).unwrap();
    let err = try_serve(dir, &["d.raw", "--nbd", "unix:n", "--takeover", "--exactly"]).map(|_| ()).unwrap_err();
    assert!(err.contains(&format!("does not listen on nbd {address}")), "{err}");
    assert_eq!(names_in(dir), ["c", "d.raw"]);
    let mut served = succeed(dir, &args, served);
    let mut bytes = [0; 512];
    Client::connect(&uri).unwrap().read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [5; 512]);
    served.signal(Signal::SIGTERM);
    assert!(served.wait().success());
    assert_eq!(rest_of_stderr(&mut served), "");
}

/// The second server's command line is that of the first one, whatever was attached and detached meanwhile.
#[test]
fn a_successor_takes_over_what_the_running_server_has() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for disk in ["over-a.raw", "over-b.raw", "over-c.raw"] {
        ok(dir, &["create", disk, "--size", "16M"]);
    }
    let metrics = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let start = |args: &[&str]| {
        let mut command = crate::common::spile();
        let words = ["serve", "over-a.raw", "over-b.raw", "--nbd", "unix:n", "--vhost-user", "v"];
        command.args(words).args(args).current_dir(dir);
        Served::spawn(&mut command, dir.join("n")).unwrap()
    };
    // A successor is there once the one before it has ended.
    let succeed = |args: &[&str], mut old: Served| {
        let next = start(&[&["--takeover"], args].concat());
        assert!(old.wait().success());
        next
    };
    let has = |disk: &str| {
        let list = json(dir, &["ls"]);
        list["disks"].as_array().unwrap().iter().any(|served| served["name"] == disk)
    };
    let first = start(&["--metrics", &metrics]);
    ok(dir, &["attach", "over-a", "over-c.raw", "--vhost-user", "vc"]);
    ok(dir, &["detach", "over-b"]);
    let (_device, mut queue) = simple_guest(&dir.join("vc"));
    queue.write(0, &[7; 512]).unwrap();
    // Neither --control nor --metrics is said.
    let second = succeed(&[], first);
    assert!(has("over-a") && has("over-c") && !has("over-b"));
    assert_eq!(queue.read(0, 512).unwrap(), [7; 512]);
    assert!(std::net::TcpStream::connect(&metrics).is_ok(), "the metrics are gone");
    let refused =
        fails(dir, 1, &["serve", "over-a.raw", "--nbd", "unix:n", "--vhost-user", "v", "--takeover", "--exactly"]);
    assert!(refused.contains("no such export"), "{refused}");
    // By the server's name, and once more: the one after it has still the old command line.
    let third = succeed(&["--control", "over-a", "--metrics", "none"], second);
    assert!(has("over-a") && has("over-c") && !has("over-b"));
    assert_eq!(queue.read(0, 512).unwrap(), [7; 512]);
    assert!(std::net::TcpStream::connect(&metrics).is_err());
    assert!(third.terminate().success());
}
