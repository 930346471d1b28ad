//! `spile stat` on running servers: what it says of a load, of each layer, and of a server that is replaced.

mod common;

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use common::guests::{Load, serve, succeed};
use common::{eventually, ok, spile};
use serde_json::Value;

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn every_layer_tells_what_a_load_does() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.raw", "--size", "16M"]);
    let served = serve(dir, &["a.raw", "--vhost-user", "v"]);
    let mut load = Load::start(dir, "v", &["--depth", "4"]);
    load.goes_on(&served);
    let stat = common::json(dir, &["stat", "c", "--interval", "1"]);
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
        // What is in flight for the time that it takes is the requests' number, by Little's law. A server that waits for a processor in
        // the middle of a reading counts what is in flight for some milliseconds more.
        let (queue, rate) = (number(&layer["queue_size_avg"]), number(&layer["requests_per_s"]));
        let by_law = rate * number(&layer["latency_mean_us"]) / 1e6;
        assert!(queue <= 4.1 && (queue - by_law).abs() < 0.2 + queue / 5.0, "{queue} and {by_law}: {layer:#}");
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
