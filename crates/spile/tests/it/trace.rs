//! Where the time of requests goes: `spile slow`, `spile trace`, and the static probes.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::control::ask;
use crate::common::guests::{guest, nbd, serve};
use crate::common::nbd::Client;
use crate::common::{eventually, fails, have, json, ok, spile};
use serde_json::Value;
use spile_core::metrics::span::{Moment, PHASES};
use spile_lab::GuestQueue;

/// Ends the load on a disk when it is dropped.
struct Load<'a>(&'a AtomicBool);

impl Drop for Load<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does `work` while an NBD client and a guest on vhost-user read and write.
fn under_load(dir: &Path, work: impl FnOnce()) {
    let over = AtomicBool::new(false);
    let begun = [AtomicBool::new(false), AtomicBool::new(false)];
    std::thread::scope(|scope| {
        let _load = Load(&over);
        scope.spawn(|| {
            let client = Client::connect(&nbd(dir, "")).unwrap();
            while !over.load(Ordering::Relaxed) {
                client.write(4096, &[1; 4096], false).unwrap();
                begun[0].store(true, Ordering::Relaxed);
            }
        });
        scope.spawn(|| {
            let (_device, mut queue) = guest(&dir.join("v"));
            while !over.load(Ordering::Relaxed) {
                queue.write(0, &[1; 512]).unwrap();
                begun[1].store(true, Ordering::Relaxed);
            }
        });
        eventually("the load", || begun.iter().all(|begun| begun.load(Ordering::Relaxed)));
        work();
    });
}

fn disk() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "a.vhd", "--size", "16M"]);
    dir
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("{key}: {value}"))
}

fn sum_us(phases: &[Value], key: &str) -> f64 {
    phases.iter().map(|phase| phase[key].as_f64().unwrap()).sum()
}

#[test]
fn the_slowest_requests_are_kept_with_their_phases() {
    let dir = disk();
    let dir = dir.path();
    let served = serve(dir, &["a.vhd", "--nbd", "unix:n", "--vhost-user", "v"]);
    assert_eq!(ok(dir, &["slow", "c"]), "no request yet\n");
    under_load(dir, || ());
    let mut slow = Value::Null;
    // A request is kept a moment after its answer was sent.
    eventually("both fronts have slow requests", || {
        slow = json(dir, &["slow", "c"]);
        let of = |front: &str| list(&slow, "answered").iter().any(|request| request["front"] == front);
        of("front nbd \"\"") && of("front vhost-user \"\"")
    });
    let answered = list(&slow, "answered");
    assert!((2..=16).contains(&answered.len()), "{slow}");
    assert!(answered.is_sorted_by(|one, other| one["latency_us"].as_f64() >= other["latency_us"].as_f64()));
    for request in answered {
        let latency_us = request["latency_us"].as_f64().unwrap();
        assert!((sum_us(list(request, "phases"), "time_us") - latency_us).abs() < 0.1, "{request}");
        assert_eq!((&request["operation"], &request["failed"]), (&"write".into(), &false.into()));
        assert_eq!(request["store_operations"], 1);
    }
    let text = ok(dir, &["slow", "c"]);
    assert!(text.contains("where the time went") && text.contains("write"), "{text}");
    assert!(served.terminate().success());
}

#[test]
fn a_trace_shows_where_the_time_goes_and_its_file_has_every_request() {
    let dir = disk();
    let dir = dir.path();
    let served = serve(dir, &["a.vhd", "--nbd", "unix:n", "--vhost-user", "v"]);
    under_load(dir, || {
        let traced = json(dir, &["trace", "c", "--for", "1s", "--out", "t.json"]);
        let [writes] = list(&traced, "operations") else { panic!("{traced}") };
        let requests = traced["requests"].as_u64().unwrap();
        assert!(requests > 10 && writes["requests"] == requests, "{traced}");
        let phases = list(writes, "phases");
        assert_eq!(phases.len(), PHASES.len());
        assert!(phases.iter().zip(PHASES).all(|(phase, known)| phase["name"] == known.name));
        let mean_us = writes["latency"]["mean_us"].as_f64().unwrap();
        let (before, notify) = phases.split_at(PHASES.len() - 1);
        assert!((sum_us(before, "mean_us") - mean_us).abs() < 0.01 * mean_us, "{writes}");
        assert!((sum_us(before, "share_percent") - 100.0).abs() < 0.01 && notify[0]["share_percent"].is_null());
        // The store is a file, which takes some time.
        assert!(phases[3]["mean_us"].as_f64().unwrap() > 0.0, "{writes}");
        check_file(&dir.join("t.json"), requests);
        // A trace that is full ends before its time.
        let text = ok(dir, &["trace", "c", "--for", "60s", "--max-requests", "5"]);
        assert!(text.starts_with("5 requests in ") && text.contains("99 %"), "{text}");
    });
    assert!(served.terminate().success());
}

/// Looks at a file for Perfetto: what each event must have, and that phases fill their requests.
fn check_file(path: &Path, requests: u64) {
    let trace: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let (mut names, mut request_us, mut phases_us) = (BTreeSet::new(), 0.0, 0.0);
    let mut found = 0;
    for event in list(&trace, "traceEvents") {
        assert!(event["pid"].is_u64() && event["name"].is_string(), "{event}");
        match event["ph"].as_str().unwrap() {
            "M" => drop(names.insert(event["args"]["name"].as_str().unwrap().to_owned())),
            "X" => {
                let (at_us, time_us) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
                assert!(at_us >= 0.0 && time_us >= 0.0 && event["tid"].is_u64(), "{event}");
                match event["cat"].as_str().unwrap() {
                    "request" => (found, request_us) = (found + 1, request_us + time_us),
                    "phase" => phases_us += time_us,
                    other => panic!("{other}"),
                }
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(found, requests);
    assert!((request_us - phases_us).abs() < 0.001 * request_us, "{request_us} {phases_us}");
    for name in ["front nbd \"\", queue 0", "front vhost-user \"\", queue 0", "request 1 in flight"] {
        assert!(names.contains(name), "{names:?}");
    }
}

/// Begins a trace that nobody waits for, and returns the connection on which it comes.
fn begin_trace(dir: &Path, time_ms: u32) -> UnixStream {
    let mut stream = UnixStream::connect(dir.join("c")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
    let query = format!("for_ms={time_ms}&max_requests=1000000");
    write!(stream, "POST /v1/disks/a/trace?{query} HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut text = Vec::new();
    while !text.ends_with(b"\"queue\":0}}\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        text.push(byte[0]);
    }
    stream
}

/// True when no trace runs.
fn is_free(dir: &Path) -> bool {
    let (status, answer) = ask(&dir.join("c"), "POST", "/v1/disks/a/trace?for_ms=0", "");
    assert!(status == 200 || answer["error"]["kind"] == "busy", "{answer}");
    status == 200
}

#[test]
fn a_trace_ends_in_time_although_its_client_does_not_read() {
    let dir = disk();
    let dir = dir.path();
    let served = serve(dir, &["a.vhd", "--nbd", "unix:n", "--vhost-user", "v"]);
    under_load(dir, || {
        let mut client = begin_trace(dir, 2000);
        assert!(!is_free(dir));
        eventually("the end of the trace", || is_free(dir));
        let mut rest = String::new();
        client.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("{\"end\":"), "{}", &rest[rest.len().saturating_sub(1000)..]);
    });
    assert!(served.terminate().success());
}

#[test]
fn a_trace_ends_when_its_client_goes() {
    let dir = disk();
    let dir = dir.path();
    let served = serve(dir, &["a.vhd", "--vhost-user", "v"]);
    let client = begin_trace(dir, 100_000);
    assert!(!is_free(dir));
    drop(client);
    eventually("the end of the trace", || is_free(dir));
    // A server that ends does not wait for a trace.
    let mut client = begin_trace(dir, 100_000);
    let begun = Instant::now();
    assert!(served.terminate().success());
    assert!(begun.elapsed() < Duration::from_secs(90), "it waited for the end of the trace");
    let mut rest = String::new();
    client.read_to_string(&mut rest).unwrap();
    fails(dir, 1, &["trace", "c"]);
}

#[test]
fn every_moment_is_a_static_probe_and_the_documentation_names_it() {
    if !have("readelf", "every_moment_is_a_static_probe_and_the_documentation_names_it") {
        return;
    }
    let output = std::process::Command::new("readelf").arg("-n").arg(spile().get_program()).output().unwrap();
    let notes = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines: Vec<_> = notes.lines().map(str::trim).collect();
    let probes: BTreeSet<_> = lines
        .windows(2)
        .filter(|pair| pair[0] == "Provider: spile")
        .filter_map(|pair| pair[1].strip_prefix("Name: "))
        .collect();
    assert_eq!(probes, Moment::ALL.iter().map(|moment| moment.name()).collect());
    let text = include_str!("../../../../docs/observing.md");
    let named: BTreeSet<_> = text
        .split("usdt:")
        .skip(1)
        .filter_map(|rest| rest.split_whitespace().next()?.strip_prefix("/usr/bin/spile:spile:"))
        .collect();
    assert!(!named.is_empty() && named.is_subset(&probes), "{named:?}");
    let table: BTreeSet<_> = Moment::ALL.iter().map(|moment| moment.name()).collect();
    assert!(table.iter().all(|name| text.contains(&format!("| `{name}` |"))), "the table of probes");
}
