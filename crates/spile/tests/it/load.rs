//! The load generator: it finds what is wrong, keeps to what was asked, and its figures agree with each other.

use std::path::Path;

use crate::common::faulty::{self, Fault};
use crate::common::nbd::Client;
use crate::common::{Running, Served, eventually, fails, have, json, ok, run};
use nix::sys::signal::Signal;
use spile::load::{LoadOutcome, Options, Pattern, Report};
use spile::uri::{Address, NbdUri};
use spile_core::ErrorKind;

fn uri(socket: &Path) -> NbdUri {
    NbdUri::new(Address::Unix(socket.to_owned()), "")
}

/// A verified load that writes blocks 0 to 119 of the disk's first `span_blocks`, once each or in rounds.
fn load_with(fault: Fault, span_blocks: u64) -> LoadOutcome {
    let options = Options {
        pattern: Pattern { random: false, read_percent: 0 },
        depth: 8,
        ios: Some(120),
        span_bytes: Some(span_blocks * 4096),
        verify: true,
        ..Options::new(uri(Path::new("")))
    };
    load_faulty(fault, options)
}

fn load_faulty(fault: Fault, options: Options) -> LoadOutcome {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    faulty::serve(&socket, fault);
    spile::load::run(&Options { uri: uri(&socket).into(), ..options }, |_| {}).unwrap()
}

fn kinds(outcome: &LoadOutcome) -> Vec<(u64, &'static str)> {
    let mut kinds: Vec<_> = outcome.mismatches.iter().map(|m| (m.offset_bytes / 4096, m.kind())).collect();
    kinds.dedup();
    kinds
}

#[test]
fn a_right_server_passes() {
    let pattern = Pattern { random: true, read_percent: 50 };
    let options = Options { pattern, ios: Some(1000), verify: true, ..Options::new(uri(Path::new(""))) };
    let outcome = load_faulty(Fault::None, options);
    assert!(outcome.error.is_none() && outcome.mismatches.is_empty(), "{outcome:?}");
    assert_eq!(outcome.stats.read.ios + outcome.stats.write.ios, 1000);
    assert!(outcome.read_back_blocks > 0);
}

#[test]
fn a_lost_write_is_found() {
    assert_eq!(kinds(&load_with(Fault::Lose, 256)), [(100, "zeroes")]);
    // In the second round over 64 blocks, the broken write is the second of its block.
    assert_eq!(kinds(&load_with(Fault::Lose, 64)), [(36, "lost")]);
}

#[test]
fn a_misplaced_write_is_found() {
    assert_eq!(kinds(&load_with(Fault::Misplace, 256)), [(50, "misplaced")]);
}

#[test]
fn a_torn_write_is_found() {
    assert_eq!(kinds(&load_with(Fault::Tear, 256)), [(100, "torn")]);
}

#[test]
fn a_refused_write_ends_the_run_with_its_offset() {
    let error = load_with(Fault::Refuse, 256).error.unwrap();
    assert_eq!((error.kind(), error.os_errno()), (ErrorKind::Io, Some(5)));
    assert!(error.offset_bytes().is_some(), "{error}");
}

#[test]
fn an_answer_to_nothing_is_a_broken_protocol() {
    assert_eq!(load_with(Fault::WrongCookie, 256).error.unwrap().kind(), ErrorKind::Protocol);
}

#[test]
fn a_lost_connection_leaves_the_figures_and_the_model() {
    let outcome = load_with(Fault::HangUp, 256);
    assert_eq!(outcome.error.as_ref().unwrap().kind(), ErrorKind::Io);
    assert!(outcome.stats.write.ios > 0 && outcome.models[0].acknowledged_blocks() > 0);
}

#[test]
fn a_mismatch_is_reported_exactly_and_by_the_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    faulty::serve(&dir.path().join("s"), Fault::Tear);
    let args = ["load", "nbd+unix:///?socket=s", "--rw", "write", "--ios", "200", "--verify"];
    let output = run(dir.path(), &args);
    assert_eq!(output.status.code(), Some(3));
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(err.starts_with("spile: mismatch: offset 0x") && err.contains("expected version"), "{err}");
}

#[test]
fn both_ways_to_the_queue_depth_agree() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::start(dir.path(), &["mem:64M"]);
    for (connections, bs, depth) in [(1, 4096, 1), (2, 4096, 32), (1, 1 << 20, 4)] {
        let options = Options {
            pattern: Pattern { random: true, read_percent: 50 },
            block_bytes: bs,
            depth,
            connections,
            ios: Some(2000),
            ..Options::new(served.uri())
        };
        let outcome = spile::load::run(&options, |_| {}).unwrap();
        let report = Report::new(&options, &outcome);
        assert!(report.error.is_none() && report.depths_agree(), "{report:?}");
        assert!(report.queue_depth_avg <= f64::from(depth * connections) + 0.01, "{report:?}");
        assert_eq!(report.read.requests + report.write.requests, 2000);
    }
}

#[test]
fn every_pattern_runs_and_says_what_it_did() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::start(dir.path(), &["mem:8M"]);
    let (uri, pid) = (served.uri().to_string(), served.child.id().to_string());
    for rw in ["read", "write", "randread", "randwrite", "rw", "randrw"] {
        let args = ["load", &uri, "--rw", rw, "--ios", "300", "--bs", "8k", "--server-pid", &pid];
        let report = json(dir.path(), &args);
        let (reads, writes) = (&report["read"]["requests"], &report["write"]["requests"]);
        assert_eq!(reads.as_u64().unwrap() + writes.as_u64().unwrap(), 300, "{rw}");
        let both = rw.ends_with("rw");
        assert_eq!(reads.as_u64() > Some(0), both || rw.ends_with("read"), "{rw}");
        assert_eq!(writes.as_u64() > Some(0), both || rw.ends_with("write"), "{rw}");
        assert!(report["server_cpu_us_per_request"].as_f64() > Some(0.0), "{rw}");
    }
}

#[test]
fn a_size_in_bytes_ends_it_too_and_flushes_are_sent() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::start(dir.path(), &["mem:8M"]);
    let uri = served.uri().to_string();
    let args = ["load", &uri, "--rw", "write", "--size", "1M", "--fua", "--flush-every", "10"];
    let report = json(dir.path(), &args);
    let (writes, flushes) = (report["write"]["requests"].as_u64(), report["flush"]["requests"].as_u64());
    assert_eq!(writes.unwrap() + flushes.unwrap(), 256);
    assert_eq!(flushes, Some(23));
}

#[test]
fn a_model_can_be_kept_and_checked_later() {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "d.raw", "--size", "8M"]);
    let served = Served::start(dir.path(), &["d.raw"]);
    let uri = served.uri().to_string();
    let load = ["load", &uri, "--rw", "randwrite", "--ios", "500", "--verify", "--connections", "3"];
    ok(dir.path(), &[&load[..], &["--save-model", "m"]].concat());
    let checked = json(dir.path(), &["load", &uri, "--verify-model", "m"]);
    assert_eq!(checked["read_back_blocks"], checked["acknowledged_blocks"]);
    // Another run over it: the first model's versions are gone.
    ok(dir.path(), &[&load[..], &["--seed", "2"]].concat());
    let err = fails(dir.path(), 3, &["load", &uri, "--verify-model", "m"]);
    assert!(err.contains("mismatch"), "{err}");
}

#[test]
fn what_cannot_be_is_refused_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::start(dir.path(), &["mem:1M,read-only"]);
    let uri = served.uri().to_string();
    let cases: [(&[&str], i32, &str); 7] = [
        (&["--depth", "65536", "--bs", "1M"], 2, "more than 4 GiB of memory"),
        (&["--rw", "randwrite"], 1, "read-only"),
        (&["--bs", "64M"], 2, "--bs must be"),
        (&["--verify", "--bs", "100"], 2, "multiple of 512"),
        (&["--connections", "300"], 2, "too small"),
        (&["--depth", "0"], 2, "--depth"),
        (&["--rw", "sideways"], 2, "sideways"),
    ];
    for (args, code, says) in cases {
        let err = fails(dir.path(), code, &[&["load", uri.as_str()], args].concat());
        assert!(err.contains(says), "{args:?}: {err}");
    }
    let err = fails(dir.path(), 1, &["load", &served.export("nothere").to_string()]);
    assert!(err.contains("no such export") || err.contains("nothere"), "{err}");
}

/// A verified load on another program's server; its socket is the last argument.
fn load_foreign(program: &str, args: &[&str]) {
    if !have(program, "a verified load on it") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    std::fs::File::create(dir.path().join("d.raw")).unwrap().set_len(64 << 20).unwrap();
    let mut command = std::process::Command::new(program);
    command.args(args).current_dir(dir.path());
    command.arg(&socket);
    let child = command.spawn().unwrap();
    let _server = Served { child, socket: socket.clone() };
    let uri = uri(&socket);
    eventually("it answers", || Client::connect(&uri).is_ok());
    for (bs, connections) in [("4k", "1"), ("512", "2"), ("1M", "2")] {
        let uri = uri.to_string();
        let load = ["load", &uri, "--rw", "randrw", "--ios", "500", "--verify", "--flush-every", "50"];
        let report = json(dir.path(), &[&load[..], &["--bs", bs, "--connections", connections]].concat());
        assert!(report["read_back_blocks"].as_u64() > Some(0), "{program} {bs}: {report}");
    }
}

#[test]
fn it_loads_qemu_nbd() {
    load_foreign("qemu-nbd", &["-f", "raw", "-t", "-x", "", "-e", "9", "d.raw", "-k"]);
}

#[test]
fn it_loads_nbdkit() {
    load_foreign("nbdkit", &["-f", "memory", "64M", "-U"]);
}

#[test]
fn a_signal_ends_it_with_its_figures() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::start(dir.path(), &["mem:64M"]);
    let mut command = crate::common::spile();
    let uri = served.uri().to_string();
    command.args(["load", &uri, "--rw", "randrw", "--verify", "--runtime", "1h", "--json", "--save-model", "m"]);
    let running = Running::start(&mut command, dir.path());
    let threads = || std::fs::read_dir(format!("/proc/{}/task", running.pid())).unwrap().count();
    // The one that started, the one that waits for signals, and the connection's.
    eventually("it runs", || threads() >= 3);
    let (code, out) = running.end(Signal::SIGINT);
    assert_eq!(code, Some(130), "{out}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&report["interrupted"], &report["error"]), (&true.into(), &serde_json::Value::Null), "{report}");
    ok(dir.path(), &["load", &uri, "--verify-model", "m"]);
}

#[test]
fn a_slow_rate_does_not_outlast_the_runtime() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::start(dir.path(), &["mem:1M"]);
    let uri = served.uri().to_string();
    // The second request would be due in a day.
    let report = json(dir.path(), &["load", &uri, "--rate", "0.00001", "--runtime", "200ms"]);
    assert_eq!(report["read"]["requests"], 1);
}

#[test]
fn what_a_load_cannot_keep_in_mind_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::start(dir.path(), &["null:1P"]);
    let uri = served.uri().to_string();
    let err = fails(dir.path(), 2, &["load", &uri, "--rw", "randwrite", "--verify"]);
    assert!(err.contains("--span"), "{err}");
    let model = r#"[{"run":1,"block_bytes":4096,"first_block":0,"acked":[1,1],"issued":[1]}]"#;
    std::fs::write(dir.path().join("m"), model).unwrap();
    let err = fails(dir.path(), 2, &["load", &uri, "--verify-model", "m"]);
    assert!(err.contains("contradicts itself"), "{err}");
}

#[test]
fn a_server_that_never_stops_talking_is_left() {
    use std::io::Write;
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
        // The replies to GO: information of a kind that nobody knows, without end.
        let mut reply = 0x0003_e889_0455_65a9u64.to_be_bytes().to_vec();
        reply.extend([7u32, 3, 2].map(u32::to_be_bytes).concat());
        reply.extend(99u16.to_be_bytes());
        while stream.write_all(&reply).is_ok() {}
    });
    let error = Client::connect(&uri(&socket)).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
}
