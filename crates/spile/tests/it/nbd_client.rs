//! Our NBD client against our own server: the store with two workers, and the commands on NBD locators.

use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::nbd::Client;
use crate::common::{Served, fails, json, ok};
use serde_json::Value;
use spile_core::{Segments, Store, StoreOffset, Via};
use spile_store::NbdOptions;

const MIB: u64 = 1 << 20;

#[test]
fn two_workers_have_many_requests_in_flight_on_two_connections() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::start(dir.path(), &["mem:64M", "--workers", "2", "--control", "c"]);
    let client = Client::connect_with(&served.uri(), NbdOptions::default(), 2).unwrap();
    let (engine, store) = client.parts();
    let left = Arc::new(AtomicU64::new(0));
    for number in 0..64u64 {
        let (store, left) = (store.clone(), left.clone());
        left.fetch_add(1, Ordering::SeqCst);
        // Writer and reader of a block are on different workers, and so on different connections.
        engine.spawn_on(number as usize, move || async move {
            let at = StoreOffset(number * 300_000);
            let bytes = Segments::copied(&vec![number as u8 + 1; 250_000]);
            store.write_at(at, &bytes, Via::Direct).await.unwrap();
            left.fetch_sub(1, Ordering::SeqCst);
        });
    }
    crate::common::eventually("all is written", || left.load(Ordering::SeqCst) == 0);
    assert_eq!(json(dir.path(), &["show", "c"])["connections"], 2, "one for each worker");
    for number in 0..64u64 {
        let store = store.clone();
        let back = engine.run_on(number as usize + 1, move || async move {
            let into = Segments::zeroed(250_000);
            store.read_at(StoreOffset(number * 300_000), &into, Via::Direct).await.map(|()| into.to_vec())
        });
        assert!(back.unwrap().iter().all(|byte| *byte == number as u8 + 1), "{number}");
    }
    client.flush().unwrap();
}

#[test]
fn a_disk_is_converted_onto_an_export() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, path) = (dir.path(), dir.path().join("source.raw"));
    let mut source = vec![0; 4 * MIB as usize];
    for at in [0, 70_000, MIB as usize - 100, 3_500_000] {
        source[at..at + 5000].fill(7);
    }
    std::fs::write(&path, &source).unwrap();
    ok(dir, &["convert", "source.raw", "source.vhd"]);
    // The export is longer, and full of something else.
    std::fs::write(dir.join("old.raw"), vec![9; 6 * MIB as usize]).unwrap();
    let served = Served::start(dir, &["old.raw"]);
    let uri = served.uri().to_string();
    let report = json(dir, &["convert", "source.vhd", &uri]);
    assert_eq!((&report["format"], &report["virtual_size_bytes"]), (&"raw".into(), &(6 * MIB).into()), "{report}");
    let same = ok(dir, &["compare", "source.raw", &uri]);
    assert!(same.contains("the longer one's rest reads as zeroes"), "{same}");
    assert!(served.terminate().success());
    let mut whole = source;
    whole.resize(6 * MIB as usize, 0);
    assert!(std::fs::read(dir.join("old.raw")).unwrap() == whole);
}

#[test]
fn what_cannot_be_converted_onto_an_export_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("small.raw"), vec![9; MIB as usize]).unwrap();
    std::fs::write(dir.join("source.raw"), vec![1; 2 * MIB as usize]).unwrap();
    let served = Served::start(dir, &["small.raw"]);
    let uri = served.uri().to_string();
    let err = fails(dir, 1, &["convert", "source.raw", &uri]);
    assert!(err.contains("it has 1 MiB, and the disk 2 MiB") && err.contains("2097152 bytes at least"), "{err}");
    let err = fails(dir, 1, &["convert", "source.raw", &uri, "--to", "vhd"]);
    assert!(err.contains("only be overwritten as a raw disk"), "{err}");
    assert!(served.terminate().success());
    assert!(std::fs::read(dir.join("small.raw")).unwrap() == vec![9; MIB as usize]);
    let served = Served::start(dir, &["small.raw,read-only"]);
    let uri = served.uri().to_string();
    let err = fails(dir, 2, &["convert", "small.raw", &uri]);
    assert!(err.contains("cannot be written over while it is copied"), "{err}");
    std::fs::write(dir.join("other.raw"), vec![1; MIB as usize]).unwrap();
    let err = fails(dir, 1, &["convert", "other.raw", &uri]);
    assert!(err.contains("for reading only"), "{err}");
}

/// The object of `list` whose `name` is `value`.
fn found(list: &Value, name: &str, value: &str) -> Value {
    list.as_array().unwrap().iter().find(|of| of[name] == value).unwrap_or_else(|| panic!("{value}: {list}")).clone()
}

#[test]
fn many_runs_of_an_export_are_learned_by_few_questions() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let file = std::fs::File::create(dir.join("holes.raw")).unwrap();
    file.set_len(16 * MIB).unwrap();
    for number in 0..256 {
        file.write_all_at(&[(number % 250) as u8 + 1; 4096], number * (64 << 10)).unwrap();
    }
    let served = Served::start(dir, &["holes.raw,name=holes", "--control", "c"]);
    ok(dir, &["convert", &served.export("holes").to_string(), "copy.raw"]);
    let said = json(dir, &["show", "c"]);
    assert!(served.terminate().success());
    assert_eq!(std::fs::read(dir.join("copy.raw")).unwrap(), std::fs::read(dir.join("holes.raw")).unwrap());
    let asked = found(&found(&said["meters"], "layer", "front nbd \"holes\"")["operations"], "operation", "extents");
    assert!((1..=16).contains(&asked["requests"].as_u64().unwrap()), "{said}");
}

#[test]
fn exports_are_looked_at_like_files() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.vhd", "--size", "64M"]);
    let served = Served::start(dir, &["d.vhd,name=shown,read-only", "mem:1M,name=mem"]);
    let shown = served.export("shown").to_string();
    assert_eq!(json(dir, &["info", &shown])["virtual_size_bytes"], 64 * MIB);
    assert_eq!(json(dir, &["check", &shown])["result"], "sound");
    assert!(ok(dir, &["compare", &shown, "d.vhd"]).contains("the same"));
    assert!(served.terminate().success());
    // The image itself, through an export of its bytes.
    let served = Served::start(dir, &["d.vhd,format=raw"]);
    let uri = served.uri().to_string();
    assert_eq!(json(dir, &["info", &uri, "--format", "vhd"])["virtual_size_bytes"], 64 * MIB);
    assert_eq!(json(dir, &["check", &uri, "--format", "vhd"])["result"], "sound");
    assert_eq!(json(dir, &["check", &uri, "--format", "vhd", "--repair"])["result"], "sound");
    ok(dir, &["map", &uri, "--format", "vhd"]);
    assert!(fails(dir, 1, &["create", &uri, "--size", "1M", "--format", "raw"]).contains("NBD export"));
}
