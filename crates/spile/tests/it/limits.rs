//! Limits of served disks: they hold, they change while requests wait, they hold up nobody else and no end, and a successor keeps them.
//!
//! A limit of one byte in a second stands for "never": whatever passes then was let go.

use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::control::ask;
use crate::common::guests::{nbd, serve, simple_guest, succeed};
use crate::common::nbd::{Client, raw_connection_to, read_request};
use crate::common::{Served, eventually, fails, json, ok};
use serde_json::{Value, json};
use spile_lab::GuestQueue;
use spile_lab::vhost::Queue;
use spile_nbd_wire::request::{Command, Request};

const MIB: u64 = 1 << 20;
/// The bytes of an NBD reply without data.
const REPLY_BYTES: usize = 16;

/// A folder with two disks of 64 MiB, served with `args`.
fn start(args: &[&str]) -> (tempfile::TempDir, Served) {
    let dir = tempfile::tempdir().unwrap();
    for disk in ["a.raw", "b.raw"] {
        ok(dir.path(), &["create", disk, "--size", "64M"]);
    }
    let served = serve(dir.path(), &[args, &["--nbd", "unix:n"]].concat());
    (dir, served)
}

fn limits(dir: &Path, disk: &str) -> Value {
    json(dir, &["limit", "c", "--name", disk])
}

fn waiting(dir: &Path, disk: &str) -> u64 {
    limits(dir, disk)["waiting_requests"].as_u64().unwrap()
}

#[test]
fn a_limit_holds_and_is_told() {
    let (dir, served) = start(&["a.raw,iops=50,burst=10ms", "b.raw"]);
    let dir = dir.path();
    let (a, b) = (Client::connect(&nbd(dir, "a")).unwrap(), Client::connect(&nbd(dir, "b")).unwrap());
    let begun = Instant::now();
    (0..26).for_each(|_| a.read(0, &mut [0; 4096]).unwrap());
    assert!(begun.elapsed() >= Duration::from_millis(490), "{:?}", begun.elapsed());
    (0..26).for_each(|_| b.read(0, &mut [0; 4096]).unwrap());
    let [limited, free] = ["a", "b"].map(|disk| limits(dir, disk));
    assert_eq!(limited["own"], json!({ "iops": 50, "burst_s": 0.01 }));
    assert!(limited["delayed_requests"].as_u64() >= Some(20) && limited["delayed_s"].as_f64() > Some(0.3), "{limited}");
    assert_eq!((&free["own"], &free["delayed_requests"]), (&json!({}), &json!(0)));
    let said = ok(dir, &["show", "c"]);
    assert!(said.contains("limits: 50 requests/s; bursts of 10.0 ms\n") && said.contains("\ndelayed: "), "{said}");
    assert!(ok(dir, &["limit", "c", "--name", "b"]).starts_with("limits: none\n"));
    assert!(served.terminate().success());
}

/// Not as a look-up in the image.
#[test]
fn the_wait_for_a_limit_is_a_phase_of_its_own() {
    let (dir, served) = start(&["a.raw,iops=20,burst=10ms"]);
    let dir = dir.path();
    let client = Client::connect(&nbd(dir, "")).unwrap();
    (0..10).for_each(|_| client.read(0, &mut [0; 4096]).unwrap());
    let slow = json(dir, &["slow", "c"]);
    let time = |name: &str| {
        let phases = slow["answered"][0]["phases"].as_array().unwrap();
        phases.iter().find(|phase| phase["name"] == name).unwrap()["time_us"].as_f64().unwrap()
    };
    assert!(time("limit") > 20_000.0 && time("map") < time("limit") / 2.0, "{slow}");
    ok(dir, &["limit", "c", "--bps", "1"]);
    let (mut waits, asked) = (raw_connection_to(&served.socket, ""), read_request(1, 4096));
    waits.write_all(&asked).unwrap();
    eventually("it waits", || waiting(dir, "a") == 1);
    assert!(ok(dir, &["ls", "c"]).contains("running, limited"));
    assert!(served.terminate().success());
}

#[test]
fn a_change_lets_waiting_requests_go() {
    let (dir, served) = start(&["a.raw,bps=1", "b.raw"]);
    let dir = dir.path();
    for change in [&["--off"][..], &["--bps", "0"], &["--bps", "1T"], &["--group", "g", "--bps", "0"]] {
        let mut client = raw_connection_to(&dir.join("n"), "a");
        (0..8).for_each(|cookie| client.write_all(&read_request(cookie, 4096)).unwrap());
        eventually("requests wait", || waiting(dir, "a") >= 7);
        ok(dir, &[&["limit", "c"], change].concat());
        client.read_exact(&mut vec![0; 8 * (REPLY_BYTES + 4096)]).unwrap();
        ok(dir, &["limit", "c", "--bps", "1", "--no-group"]);
    }
    // A disk in a group waits for the group's limits, too.
    ok(dir, &["limit", "c", "--off", "--group", "g"]);
    let said = ok(dir, &["limit", "c", "--whole-group", "--bps", "1"]);
    assert!(said.contains("group g, shared by 1 disk(s): 1 B/s"), "{said}");
    let mut client = raw_connection_to(&dir.join("n"), "a");
    (0..8).for_each(|cookie| client.write_all(&read_request(cookie, 4096)).unwrap());
    eventually("requests wait", || waiting(dir, "a") >= 7);
    ok(dir, &["limit", "c", "--whole-group", "--off"]);
    client.read_exact(&mut vec![0; 8 * (REPLY_BYTES + 4096)]).unwrap();
    drop(client);
    assert!(served.terminate().success());
}

#[test]
fn what_makes_no_sense_is_refused() {
    let (dir, served) = start(&["a.raw", "b.raw"]);
    let dir = dir.path();
    let says = |code, args: &[&str], what: &str| {
        let error = fails(dir, code, args);
        assert!(error.contains(what), "{args:?}: {error}");
    };
    says(2, &["limit", "c", "--burst", "2h"], "an hour at most");
    says(2, &["limit", "c", "--group", ""], "--no-group");
    says(2, &["limit", "c", "--iops", "5k"], "write it out");
    says(2, &["limit", "c", "--whole-group", "--iops", "5"], "in no group");
    says(2, &["serve", "a.raw,iops=0", "--nbd", "unix:m"], "let nothing pass");
    says(2, &["serve", "a.raw", "--group", "iops=5", "--nbd", "unix:m"], "name of a group");
    for (path, body) in [
        ("/v1/groups/g", "{\"group\":\"h\"}"),
        ("/v1/groups/g", "{\"burst_s\":-1}"),
        ("/v1/disks/a", "{\"limits\":{\"speed\":1}}"),
    ] {
        let (status, answer) = ask(&dir.join("c"), "PATCH", path, body);
        assert_eq!(status, 400, "{path} {body}: {answer}");
    }
    assert_eq!(limits(dir, "a")["own"], json!({}));
    assert!(served.terminate().success());
}

#[test]
fn a_successor_keeps_limits_and_groups_unless_it_is_told_others() {
    let args = ["a.raw", "b.raw,iops=1000", "--nbd", "unix:n"];
    let (dir, served) = start(&args[..2]);
    let dir = dir.path();
    ok(dir, &["limit", "c", "--write-bps", "5M", "--burst", "1s", "--group", "g"]);
    ok(dir, &["limit", "c", "--whole-group", "--iops", "777"]);
    ok(dir, &["limit", "c", "--name", "b", "--iops", "5"]);
    let of_a = |group_iops: u64| json!([{ "write_bps": 5 * MIB, "burst_s": 1.0 }, { "name": "g", "disk_count": 1, "limits": { "iops": group_iops } }]);
    let now = |disk: &str| json!([limits(dir, disk)["own"], limits(dir, disk)["group"]]);
    assert_eq!(now("a"), of_a(777));
    let served = succeed(dir, &args, served);
    assert_eq!((now("a"), now("b")), (of_a(777), json!([{ "iops": 1000 }, null])));
    let served = succeed(dir, &[&args[..], &["--group", "g,iops=888"]].concat(), served);
    assert_eq!(now("a"), of_a(888));
    // A limit is not only told: requests meet it.
    let (status, _) = ask(&dir.join("c"), "PATCH", "/v1/groups/g", "{\"bps\":1}");
    assert_eq!(status, 200);
    let mut client = raw_connection_to(&dir.join("n"), "a");
    (0..3).for_each(|cookie| client.write_all(&read_request(cookie, 4096)).unwrap());
    eventually("requests wait", || waiting(dir, "a") >= 2);
    // A takeover waits for none of them.
    let served = succeed(dir, &args, served);
    assert_eq!(limits(dir, "a")["group"]["limits"]["bps"], 1);
    assert!(served.terminate().success());
}

/// Whoever waits until a guest's queue has stopped, the server ended or the disk is gone does not wait for limits.
#[test]
fn ends_do_not_wait_for_limits() {
    let (dir, served) = start(&["a.raw", "b.raw", "--vhost-user", "v"]);
    let dir = dir.path();
    let (device, mut queue) = simple_guest(&dir.join("v"));
    ok(dir, &["limit", "c", "--bps", "1"]);
    let slots = queue.slots();
    let submit = |queue: &mut Queue| {
        (0..slots).for_each(|slot| queue.submit(slot, Queue::READ, 0, 4096));
        queue.publish();
        eventually("requests wait", || waiting(dir, "a") as usize >= slots - 1);
    };
    let take_all = |queue: &mut Queue| while queue.take().unwrap().is_some() {};
    submit(&mut queue);
    let bases = device.stop().unwrap();
    take_all(&mut queue);
    assert_eq!((queue.outstanding(), waiting(dir, "a")), (0, 0));
    // Once the queue has stopped, the limit holds again.
    device.resume(&bases).unwrap();
    submit(&mut queue);
    // NBD clients of a disk that is taken away, and of a server that ends, are cut off.
    ok(dir, &["limit", "c", "--name", "b", "--bps", "1"]);
    let [of_a, of_b] = ["a", "b"].map(|disk| {
        let before = waiting(dir, disk);
        let mut client = raw_connection_to(&dir.join("n"), disk);
        (0..8).for_each(|cookie| client.write_all(&read_request(cookie, 4096)).unwrap());
        eventually("requests wait", || waiting(dir, disk) >= before + 7);
        client
    });
    ok(dir, &["detach", "c", "--name", "b", "--force"]);
    assert!(served.terminate().success());
    take_all(&mut queue);
    assert_eq!(queue.outstanding(), 0, "the guest's requests are answered at the end");
    drop((of_a, of_b));
}

/// The client of a limited disk sends more than a worker has memory for. Another disk on the same worker goes on.
#[test]
fn a_limited_disk_takes_no_memory_of_others() {
    let (dir, served) = start(&["a.raw,write-bps=1", "b.raw", "--workers", "1"]);
    let dir = dir.path();
    let floods: Vec<_> = (0..6)
        .map(|_| {
            let mut client = raw_connection_to(&dir.join("n"), "a");
            client.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
            std::thread::spawn(move || {
                for cookie in 0..8 {
                    let (offset_bytes, len_bytes) = (0, 16 << 20);
                    let head = Request { flags: 0, command: Command::Write, cookie, offset_bytes, len_bytes }.encode();
                    let sent = client.write_all(&head).and_then(|()| client.write_all(&vec![1; len_bytes as usize]));
                    if sent.is_err() {
                        break;
                    }
                }
                // Nothing is read from this client any more.
                client
            })
        })
        .collect();
    let floods: Vec<_> = floods.into_iter().map(|flood| flood.join().unwrap()).collect();
    assert!(waiting(dir, "a") > 0);
    let other = Client::connect(&nbd(dir, "b")).unwrap();
    for round in 0..4 {
        other.write(round * 16 * MIB, &vec![2; 16 << 20], false).unwrap();
        other.read(round * 16 * MIB, &mut vec![0; 16 << 20]).unwrap();
    }
    drop((floods, other));
    assert!(served.terminate().success());
}
