//! An acknowledged write survives kill −9 of the server, flushed or not: on raw, dynamic and differencing disks,
//! with both engines and both cache modes.

mod common;

use std::path::Path;
use std::time::Duration;

use common::{Served, engines, ok, run};
use spile::load::{self, Options, Pattern};

/// Kills a server under load, twice, and demands every acknowledged write each time.
fn kill_and_verify(dir: &Path, disk: &str, engine: &str, cache: &str) {
    let args = [disk, "--engine", engine, "--cache", cache, "--workers", "2"];
    for round in 0..2 {
        let served = Served::start(dir, &args);
        let options = Options {
            pattern: Pattern { random: true, read_percent: 20 },
            depth: 16,
            connections: 2,
            verify: true,
            seed: round,
            flush_every: if round == 0 { 0 } else { 200 },
            span_bytes: Some(24 << 20),
            ..Options::new(served.uri())
        };
        let running = std::thread::spawn(move || load::run(&options, |_| {}).unwrap());
        std::thread::sleep(Duration::from_millis(400));
        served.kill();
        let outcome = running.join().unwrap();
        let what = format!("{disk} {engine} {cache} round {round}");
        assert!(outcome.error.is_some(), "{what}: the load ended before the kill");
        assert_eq!(outcome.mismatches, [], "{what}: while it ran");
        let acknowledged: u64 = outcome.models.iter().map(|m| m.acknowledged_blocks()).sum();
        assert!(acknowledged > 0, "{what}: nothing was acknowledged");
        let served = Served::start(dir, &args);
        let (blocks, mismatches) = load::verify(&served.uri(), &outcome.models).unwrap();
        assert_eq!(mismatches, [], "{what}: of {blocks} blocks");
        assert!(blocks >= acknowledged, "{what}");
        assert!(served.terminate().success(), "{what}");
        // Space that the dead server had taken in advance was given back by the orderly end of the second.
        let checked = run(dir, &["check", disk]);
        assert_eq!(checked.status.code(), Some(0), "{what}: {checked:?}");
    }
}

fn each_way(format: &str, create: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "base.vhd", "--size", "64M"]);
    for engine in engines(dir, format) {
        for cache in ["direct", "page"] {
            let disk = format!("{engine}-{cache}.{format}");
            ok(dir, &[&["create", &disk], create].concat());
            kill_and_verify(dir, &disk, engine, cache);
        }
    }
}

#[test]
fn raw() {
    each_way("raw", &["--size", "64M"]);
}

#[test]
fn dynamic_vhd() {
    each_way("vhd", &["--size", "64M"]);
}

#[test]
fn differencing_vhd() {
    each_way("avhd", &["--parent", "base.vhd"]);
}
