//! Shapes of requests: the bytes are right with each of them, they change while a disk is served, and a successor keeps them.

use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

use crate::common::control::ask;
use crate::common::guests::{Load, serve, succeed};
use crate::common::nbd::{raw_connection, read_request_at};
use crate::common::xen::Xen;
use crate::common::{fails, json, ok};
use serde_json::Value;
use spile_lab::GuestQueue;
use spile_lab::vhost::{Device, DeviceOptions, Queue, QueueOptions};

/// The counter `name` of the disk `d`.
fn counter(dir: &Path, name: &str) -> u64 {
    let (status, stats) = ask(&dir.join("c"), "GET", "/v1/disks/d/stats", "");
    assert_eq!(status, 200, "{stats}");
    let layers = stats["layers"].as_array().unwrap();
    let disk = layers.iter().find(|layer| layer["kind"] == "disk").unwrap();
    disk["counters"][name].as_u64().unwrap_or_else(|| panic!("{disk}"))
}

fn load(dir: &Path, target: &str, args: &[&str]) -> Value {
    let words = ["load", target, "--verify", "--seed", "3"];
    let report = json(dir, &[&words[..], args].concat());
    assert!(report["read_back_blocks"].as_u64() > Some(0), "{args:?}: {report}");
    report
}

#[test]
fn a_verified_load_finds_everything_right_with_every_shape() {
    for (disk, shapes) in
        [("d.raw", &["split=64k", "merge=256k", "auto", "off"][..]), ("d.vhd", &["split=128k", "merge=1M"])]
    {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        ok(dir, &["create", disk, "--size", "64M"]);
        let served = serve(dir, &[&format!("{disk},shape={}", shapes[0]), "--vhost-user", "v", "--nbd", "unix:n"]);
        for shape in shapes {
            ok(dir, &["shape", "c", shape]);
            let large = ["--rw", "randrw", "--bs", "1M", "--depth", "4", "--ios", "150", "--flush-every", "20"];
            load(dir, "vhost-user:v", &[&large[..], &["--segment", "12k"]].concat());
            load(dir, "nbd+unix:///?socket=n", &[&large[..], &["--fua"]].concat());
            // Neighbours come together when a sequential load has many requests in flight.
            let small = ["--rw", "rw", "--bs", "4k", "--depth", "32", "--ios", "3000"];
            load(dir, "vhost-user:v", &small);
            load(dir, "nbd+unix:///?socket=n", &small);
        }
        assert!(counter(dir, "splits_total") >= 300 && counter(dir, "merges_total") > 100, "{disk}");
        assert!(served.terminate().success());
        assert_eq!(json(dir, &["check", disk])["result"], "sound");
    }
}

/// Reads of 4 KiB that are sent together in the next test.
const TOGETHER: u64 = 32;

#[test]
fn with_each_front_all_neighbours_that_were_sent_become_one_request() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.raw", "--size", "64M"]);
    let served = serve(dir, &["d.raw,shape=merge=1M", "--vhost-user", "v", "--nbd", "unix:n"]);
    let mut nbd = raw_connection(&dir.join("n"));
    let requests: Vec<u8> = (0..TOGETHER).flat_map(|page| read_request_at(page, page << 12, 4 << 10)).collect();
    nbd.write_all(&requests).unwrap();
    // Each answer has a head of 16 bytes.
    nbd.read_exact(&mut vec![0; TOGETHER as usize * (16 + (4 << 10))]).unwrap();
    assert_eq!(counter(dir, "merges_total"), TOGETHER - 1, "NBD");

    let mut device = Device::connect(&dir.join("v"), DeviceOptions::default()).unwrap();
    let options = QueueOptions { depth: TOGETHER as u16, ..QueueOptions::default() };
    let mut queue = device.start(&options).unwrap().remove(0);
    (0..TOGETHER).for_each(|page| queue.submit(page as usize, Queue::READ, page << 12, 4 << 10));
    queue.publish();
    while queue.outstanding() > 0 {
        if queue.take().unwrap().is_none() {
            assert!(queue.sleep(Duration::from_secs(600)).unwrap(), "{} are not answered", queue.outstanding());
        }
    }
    assert_eq!(counter(dir, "merges_total"), 2 * (TOGETHER - 1), "vhost-user");
    drop((nbd, queue, device));
    assert!(served.terminate().success());
}

#[test]
fn the_shape_changes_under_a_load() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.vhd", "--size", "64M"]);
    let served = serve(dir, &["d.vhd", "--vhost-user", "v"]);
    assert_eq!(ok(dir, &["shape", "c"]).trim(), "off");
    let mut load = Load::start(dir, "v", &["--bs", "64k", "--depth", "16"]);
    for round in 0..6 {
        load.goes_on(&served);
        for shape in ["split=4k", "merge=1M", "off", "auto", "split=16k"] {
            ok(dir, &["shape", "c", shape]);
            assert!(ok(dir, &["shape", "c"]).starts_with(shape), "round {round}");
        }
    }
    load.goes_on(&served);
    assert_eq!(load.end(), 0, "the guest has connected again");
    assert!(counter(dir, "splits_total") > 0);
    assert!(served.terminate().success());
    assert_eq!(json(dir, &["check", "d.vhd"])["result"], "sound");
}

#[test]
fn a_successor_keeps_the_shape_unless_it_is_told_another_one() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.raw", "--size", "64M"]);
    ok(dir, &["create", "e.raw", "--size", "64M"]);
    let shape = |name: &str| json(dir, &["show", "c", "--name", name])["shape"].as_str().unwrap().to_owned();
    let args = ["d.raw", "e.raw,shape=auto", "--nbd", "unix:n"];
    let served = serve(dir, &args);
    assert_eq!((shape("d"), shape("e")), ("off".to_owned(), "auto".to_owned()));
    let (status, disk) = ask(&dir.join("c"), "PATCH", "/v1/disks/d", "{\"shape\":\"split=128k\"}");
    assert_eq!((status, &disk["shape"]), (200, &"split=128k".into()));
    ok(dir, &["shape", "c", "--name", "e", "off"]);
    let served = succeed(dir, &args, served);
    assert_eq!((shape("d"), shape("e")), ("split=128k".to_owned(), "auto".to_owned()), "e was told a shape");
    let served = succeed(dir, &[&args[..], &["--shape", "merge=1M"]].concat(), served);
    assert_eq!((shape("d"), shape("e")), ("merge=1M".to_owned(), "auto".to_owned()));
    assert!(served.terminate().success());
}

#[test]
fn the_disk_of_a_xen_guest_has_a_shape() {
    let mut xen = Xen::start_with(&["--shape", "split=64k"]);
    let (_vbd, _front, _queue) = xen.attach();
    let (dir, control) = (xen.dir.path(), "run/3-51712.control");
    assert_eq!(ok(dir, &["shape", control]).trim(), "split=64k");
    ok(dir, &["shape", control, "auto"]);
    assert_eq!(json(dir, &["show", control])["shape"], "auto");
}

#[test]
fn what_is_no_shape_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for args in [["null:1M,shape=split=100k", "--shape=off"], ["null:1M", "--shape=wide"]] {
        fails(dir, 2, &["serve", args[0], args[1], "--nbd", "unix:n"]);
    }
    let served = serve(dir, &["null:1M", "--nbd", "unix:n"]);
    fails(dir, 2, &["shape", "c", "split"]);
    let (status, answer) = ask(&dir.join("c"), "PATCH", "/v1/disks/null", "{\"shape\":\"tuned\"}");
    assert_eq!(status, 400, "{answer}");
    assert!(served.terminate().success());
}
