//! `spile stat` on running servers: what it says of a load, of each layer, and of a server that is replaced.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use crate::common::control::ask;
use crate::common::guests::{Load, nbd, serve, succeed};
use crate::common::nbd::Client;
use crate::common::{eventually, ok, spile};
use serde_json::Value;
use spile_server::serving::api::rates::Interval;
use spile_server::serving::api::stats::DiskStats;

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Whether a front's or disk's queue is its rate times its latency, by Little's law. A server that waits for a processor in the middle of a reading
/// counts what is in flight for some milliseconds more.
fn follows_littles_law(layer: &Value) -> bool {
    let (queue, rate) = (number(&layer["queue_size_avg"]), number(&layer["requests_per_s"]));
    let by_law = rate * number(&layer["latency_mean_us"]) / 1e6;
    (queue - by_law).abs() < 0.2 + queue / 5.0
}

#[test]
fn every_layer_tells_what_a_load_does() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.raw", "--size", "16M"]);
    let served = serve(dir, &["a.raw", "--vhost-user", "v"]);
    let mut load = Load::start(dir, "v", &["--depth", "4"]);
    load.goes_on(&served);
    // A device that stands still while a reading ends has requests in flight for long that are in no latency yet.
    let mut stat = Value::Null;
    eventually("the queue follows Little's law", || {
        stat = crate::common::json(dir, &["stat", "c", "--interval", "1"]);
        let is_busy = |layer: &&Value| layer["requests_per_s"].as_f64().is_some_and(|rate| rate > 0.0);
        let layers = stat["layers"].as_array().unwrap().iter().filter(is_busy);
        layers.filter(|layer| layer["kind"] == "front" || layer["kind"] == "disk").all(follows_littles_law)
    });
    let layers = stat["layers"].as_array().unwrap();
    let kinds: Vec<_> = layers.iter().map(|layer| layer["kind"].as_str().unwrap()).collect();
    // The second front is an NBD socket that nobody uses.
    assert_eq!(kinds[..4], ["front", "front", "disk", "image"], "{stat:#}");
    let busy = layers.iter().find(|layer| layer["kind"] == "front" && number(&layer["requests_per_s"]) > 0.0);
    let (front, disk) = (busy.unwrap_or_else(|| panic!("{stat:#}")), &layers[2]);
    assert_eq!(kinds.contains(&"device"), stat["no_host_device"].is_null(), "{stat:#}");
    assert_eq!(stat["host_device"].is_null(), !stat["no_host_device"].is_null(), "{stat:#}");
    for layer in [front, disk] {
        assert!(number(&layer["reads_per_s"]) > 0.0 && number(&layer["writes_per_s"]) > 0.0, "{layer:#}");
        assert!(number(&layer["queue_size_avg"]) <= 4.1, "{layer:#}");
        let quantiles = ["latency_p50_us", "latency_p99_us", "latency_p999_us", "latency_max_us"];
        let quantiles = quantiles.map(|name| number(&layer[name]));
        assert!(quantiles.is_sorted() && quantiles[0] > 0.0, "{quantiles:?}");
    }
    assert!(number(&front["queue_size_avg"]) >= 0.95 * number(&disk["queue_size_avg"]), "{stat:#}");
    let table = ok(dir, &["stat", "c", "--layers", "--interval", "200ms"]);
    let line = |name: &str| table.lines().find(|line| line.starts_with(name)).map(str::to_owned);
    assert!(["front", "disk", "image", "device"].iter().all(|name| line(name).is_some()), "{table}");
    assert!(table.contains("A layer's queue is larger"), "{table}");
    load.end();
    assert!(served.terminate().success());
}

fn stats(dir: &Path) -> DiskStats {
    let (status, answer) = ask(&dir.join("c"), "GET", "/v1/disks/a/stats", "");
    assert_eq!(status, 200, "{answer}");
    serde_json::from_value(answer).unwrap()
}

#[test]
fn a_disk_that_was_detached_and_comes_again_counts_from_zero() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.vhd", "--size", "16M"]);
    let served = serve(dir, &["null:1M,name=b", "--nbd", "unix:n"]);
    let came = |reads: u64, len: usize| {
        ok(dir, &["attach", "c", "a.vhd,name=a"]);
        let client = Client::connect(&nbd(dir, "a")).unwrap();
        (0..reads).for_each(|_| client.read(0, &mut vec![0; len]).unwrap());
        drop(client);
        let front = |stats: &DiskStats| stats.layers[0].operations.first().map_or(0, |reads| reads.requests);
        // A request counts as ended a moment after its answer was sent.
        eventually("all reads are counted", || front(&stats(dir)) == reads);
        stats(dir)
    };
    let earlier = came(3, 1 << 20);
    ok(dir, &["detach", "c", "--name", "a", "--force"]);
    // No count of requests falls, and their bytes do.
    let later = came(7, 512);
    assert!(earlier.layers.len() >= 4 && earlier.layers.len() == later.layers.len());
    for (before, now) in earlier.layers.iter().zip(&later.layers) {
        assert_eq!(before.name, now.name);
        assert!(before.made_ns > 0 && before.at_ns < now.made_ns && now.made_ns < now.at_ns, "{now:?}");
    }
    let rates = Interval::between(&earlier, &later).unwrap().rates();
    let count = |per_s: f64| (per_s * rates.layers[0].interval_s).round();
    assert_eq!([count(rates.layers[0].reads_per_s), count(rates.layers[0].read_bytes_per_s)], [7.0, 7.0 * 512.0]);
    assert!(rates.layers.iter().all(|layer| layer.little_gap.is_none()), "{rates:?}");
    assert!(served.terminate().success());
}

#[test]
fn the_device_is_the_one_that_the_server_sees() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.raw", "--size", "1M"]);
    let served = serve(dir, &["a.raw", "--nbd", "unix:n"]);
    let socket = dir.join("c");
    let stat = |folder| crate::common::json(folder, &["stat", socket.to_str().unwrap(), "--interval", "100ms"]);
    let elsewhere = tempfile::tempdir().unwrap();
    let (here, there) = (stat(dir), stat(elsewhere.path()));
    for key in ["host_device", "no_host_device"] {
        assert_eq!(here[key], there[key]);
    }
    assert!(
        here["host_device"].is_string() || here["no_host_device"].as_str().unwrap().contains("lies on"),
        "{here:#}"
    );
    let told = stats(dir);
    assert_eq!(told.host_device.map(|device| device.name).as_deref(), here["host_device"].as_str());
    assert!(served.terminate().success());
}

#[test]
fn a_server_that_is_replaced_is_told_and_not_counted() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.raw", "--size", "1M"]);
    let args = ["a.raw", "--nbd", "unix:n"];
    let served = serve(dir, &args);
    let mut stat = spile();
    stat.args(["stat", "c", "--interval", "100ms", "--count", "1000000", "--json"]).current_dir(dir);
    let mut stat = stat.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(stat.stdout.take().unwrap()).lines();
    let mut pid = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap()["pid"].as_u64();
    assert_eq!(pid(), Some(u64::from(served.child.id())));
    let next = succeed(dir, &args, served);
    let mut said = String::new();
    BufReader::new(stat.stderr.take().unwrap()).read_line(&mut said).unwrap();
    assert!(said.contains(&format!("process {} serves the disk now", next.child.id())), "{said}");
    eventually("the next server is told", || pid() == Some(u64::from(next.child.id())));
    stat.kill().unwrap();
    stat.wait().unwrap();
    assert!(next.terminate().success());
}

#[test]
fn nobody_reads_any_more_and_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let served = serve(dir, &["null:1M", "--nbd", "unix:n"]);
    let mut stat = spile();
    stat.args(["stat", "c", "--interval", "50ms", "--count", "1000000"]).current_dir(dir);
    let mut stat = stat.stdout(Stdio::piped()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(stat.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.contains("served by process"), "{first}");
    assert_eq!(stat.wait().unwrap().code(), Some(0));
    assert!(served.terminate().success());
}
