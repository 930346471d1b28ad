//! An acknowledged write survives kill −9 of the server, and a panic in it, flushed or not: on raw, dynamic and differencing disks,
//! with both engines and both cache modes.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::nbd::Client;
use crate::common::{Blow, Served, engines, load_at_work, ok, run, spile};
use spile::load::{self, Options, Pattern};
use spile_store::NbdOptions;

/// Ends a server under load, by each blow, and demands every acknowledged write each time.
fn kill_and_verify(dir: &Path, disk: &str, engine: &str, cache: &str) {
    let args = [disk, "--engine", engine, "--cache", cache, "--workers", "2"];
    for (round, blow) in [Blow::Kill, Blow::Kill, Blow::Panic].into_iter().enumerate() {
        let mut command = spile();
        command.current_dir(dir).arg("serve").args(args).args(["--nbd", "unix:nbd.sock"]);
        let mut served = Served::spawn(blow.prepare(&mut command, 1000), dir.join("nbd.sock")).unwrap();
        let options = Options {
            pattern: Pattern { random: true, read_percent: 20 },
            depth: 16,
            connections: 2,
            verify: true,
            seed: round as u64,
            flush_every: if round == 0 { 0 } else { 200 },
            span_bytes: Some(24 << 20),
            ..Options::new(served.uri())
        };
        let running = load_at_work(options);
        blow.strike(&mut served);
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

/// A client that connects again sends again what was not answered.
#[test]
fn an_nbd_client_goes_on_with_the_server_after_one_that_panicked() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.raw", "--size", "16M"]);
    let start = |blow: Option<Blow>| {
        let mut command = spile();
        command.current_dir(dir).args(["serve", "d.raw", "--nbd", "unix:nbd.sock"]);
        if let Some(blow) = blow {
            blow.prepare(&mut command, 100);
        }
        Served::spawn(&mut command, dir.join("nbd.sock")).unwrap()
    };
    let mut served = start(Some(Blow::Panic));
    let patient = NbdOptions { reconnect_limit: Duration::from_secs(600), ..NbdOptions::default() };
    let client = Client::connect_with(&served.uri(), patient, 1).unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let until = is_over.clone();
    let writer = std::thread::spawn(move || {
        let mut writes = 0u64;
        while !until.load(Ordering::Relaxed) || writes < 1000 {
            client.write(writes % 4096 * 4096, &writes.to_le_bytes().repeat(64), true).unwrap();
            let mut found = [0; 512];
            client.read(writes % 4096 * 4096, &mut found).unwrap();
            assert_eq!(found[..], writes.to_le_bytes().repeat(64));
            writes += 1;
        }
    });
    for left in (0..5).rev() {
        Blow::Panic.strike(&mut served);
        served = start((left > 0).then_some(Blow::Panic));
    }
    is_over.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    assert!(served.terminate().success());
}
