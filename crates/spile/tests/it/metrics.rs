//! `/metrics`: what Prometheus is told, over the control socket and over TCP.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use crate::common::control::http;
use crate::common::guests::{guest, nbd, rest_of_stderr, serve, succeed, try_serve};
use crate::common::nbd::Client;
use crate::common::xen::Xen;
use crate::common::{Served, eventually, fails, ok};
use spile_lab::GuestQueue;
use spile_server::serving::metrics::ROOM_METRICS;

/// The most series of a disk at the detail `disk`: 31 for each operation with a histogram, 4 for each other one, 17 for the disk. Each of its
/// limits has one more.
const MAX_SERIES: usize = 3 * 31 + 4 * 4 + 17;

/// The series of an answer in one of the text formats.
fn series(text: &str) -> BTreeMap<String, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let pairs = lines.map(|line| line.rsplit_once(' ').unwrap_or_else(|| panic!("{line:?}")));
    let mut all = BTreeMap::new();
    for (name, value) in pairs {
        let value = value.parse().unwrap_or_else(|_| panic!("{name} {value}"));
        assert_eq!(all.insert(name.to_owned(), value), None, "{name} comes twice");
    }
    all
}

fn scrape(dir: &Path, query: &str) -> BTreeMap<String, f64> {
    let (status, body) = http(&dir.join("c"), &format!("GET /metrics{query} HTTP/1.1\r\nhost: x\r\n\r\n"));
    assert_eq!(status, 200, "{body}");
    series(&body)
}

/// Sends bytes to a TCP address and reads until the server hangs up: the status, the head and the body.
fn over_tcp(address: SocketAddr, request: &str) -> (u16, String, Vec<u8>) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
    // A server that refuses may hang up before it has read all.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").map_or(answer.len(), |at| at + 4);
    let head = String::from_utf8_lossy(&answer[..end]).to_lowercase();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    (status, head, answer.split_off(end))
}

fn get(address: SocketAddr, path: &str, accept: &str) -> (u16, String, Vec<u8>) {
    over_tcp(address, &format!("GET {path} HTTP/1.1\r\nhost: x\r\naccept: {accept}\r\n\r\n"))
}

/// A TCP address that no other program listens on, now or later: this process has a loopback address of its own.
fn own_address() -> SocketAddr {
    static PORT: AtomicU16 = AtomicU16::new(9000);
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    (Ipv4Addr::new(127, 64 | high, middle, low), PORT.fetch_add(1, Ordering::Relaxed)).into()
}

fn start(args: &[&str]) -> (tempfile::TempDir, Served) {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "a.raw", "--size", "16M"]);
    let served = serve(dir.path(), args);
    (dir, served)
}

fn work(dir: &Path) {
    let (_device, mut queue) = guest(&dir.join("v"));
    (0..10).for_each(|_| queue.write(0, &[1; 4096]).unwrap());
    let client = Client::connect(&nbd(dir, "a")).unwrap();
    client.flush().unwrap();
    (0..5).for_each(|_| client.read(0, &mut [0; 512]).unwrap());
}

#[test]
fn each_detail_tells_the_same_work() {
    let (dir, served) = start(&["a.raw,name=a", "--vhost-user", "v", "--nbd", "unix:n"]);
    let dir = dir.path();
    work(dir);
    let reads = "spile_disk_requests_total{disk=\"a\",layer=\"front\",operation=\"read\"}";
    // A request counts as ended a moment after its answer was sent.
    eventually("all requests are counted", || scrape(dir, "")[reads] == 5.0);
    let few = scrape(dir, "");
    let of = |name: &str, op: &str| few[&format!("spile_disk_{name}{{disk=\"a\",layer=\"front\",operation=\"{op}\"}}")];
    assert_eq!([of("requests_total", "write"), of("request_bytes_total", "write")], [10.0, 40960.0]);
    assert_eq!([of("requests_total", "read"), of("request_bytes_total", "read")], [5.0, 2560.0]);
    assert_eq!([of("requests_total", "flush"), of("request_errors_total", "flush")], [1.0, 0.0]);
    assert_eq!(of("request_duration_seconds_count", "write"), 10.0);
    let sum_s = of("request_duration_seconds_sum", "write");
    assert!(sum_s > 0.0 && sum_s <= few["spile_disk_request_depth_seconds_total{disk=\"a\",layer=\"front\"}"]);
    let bucket = |le: &str| {
        few[&format!(
            "spile_disk_request_duration_seconds_bucket{{disk=\"a\",layer=\"front\",operation=\"write\",le=\"{le}\"}}"
        )]
    };
    assert_eq!([bucket("1.024e-06"), bucket("8.589934592"), bucket("+Inf")], [0.0, 10.0, 10.0]);
    assert!(few.keys().filter(|name| name.contains("disk=\"a\"")).count() <= MAX_SERIES);
    assert_eq!(few["spile_disk_size_bytes{disk=\"a\"}"], f64::from(16 << 20));
    assert_eq!(few["spile_disk_sync_failed{disk=\"a\"}"], 0.0);
    assert!(few["process_cpu_seconds_total"] >= 0.0);
    let more = scrape(dir, "?detail=layer");
    let layer =
        |labels: &str| more[&format!("spile_disk_requests_total{{disk=\"a\",layer={labels},operation=\"write\"}}")];
    let path = dir.join("a.raw").canonicalize().unwrap();
    let image = format!("\"image\",path=\"{}\"", path.display());
    for labels in ["\"front\",protocol=\"vhost-user\",export=\"\"", "\"disk\"", &image] {
        assert_eq!(layer(labels), 10.0, "{labels}");
    }
    assert_eq!(layer("\"front\",protocol=\"nbd\",export=\"a\""), 0.0);
    for query in ["?detail=all", "?what=1"] {
        let (status, body) = http(&dir.join("c"), &format!("GET /metrics{query} HTTP/1.1\r\nhost: x\r\n\r\n"));
        assert_eq!(status, 400, "{body}");
    }
    assert!(served.terminate().success());
}

#[test]
fn every_operation_of_a_disk_fits_into_its_share_of_series() {
    let (dir, served) = start(&["a.raw,name=a", "--vhost-user", "v", "--nbd", "unix:n"]);
    let dir = dir.path();
    let client = Client::connect(&nbd(dir, "a")).unwrap();
    client.write(0, &[1; 4096], false).unwrap();
    client.write_zeroes(0, 1 << 20).unwrap();
    ok(dir, &["map", "nbd+unix:///a?socket=n"]);
    let few = scrape(dir, "");
    for op in ["read", "write", "flush", "write_zeroes", "extents"] {
        assert!(
            few.contains_key(&format!("spile_disk_requests_total{{disk=\"a\",layer=\"front\",operation=\"{op}\"}}")),
            "{op}"
        );
    }
    let count = few.keys().filter(|name| name.contains("disk=\"a\"")).count();
    // Of seven operations two have never come: a discard, and what is none of the others.
    assert_eq!(count, MAX_SERIES - 2 * 4);
    let limit = format!("{MAX_SERIES} at most");
    assert!(
        docs("metrics.md").contains(&limit) && ok(dir, &["serve", "--help"]).contains(&format!("at most {MAX_SERIES}"))
    );
    assert!(served.terminate().success());
}

/// The kind and the meaning of each metric that a server says.
fn families(text: &str) -> BTreeMap<&str, (&str, &str)> {
    let of = |word: &str| -> BTreeMap<&str, &str> {
        text.lines().filter_map(|line| line.strip_prefix("# ")?.strip_prefix(word)?.trim().split_once(' ')).collect()
    };
    let (kinds, helps) = (of("TYPE"), of("HELP"));
    assert!(kinds.keys().eq(helps.keys()));
    kinds.into_iter().map(|(name, kind)| (name, (kind, helps[name]))).collect()
}

/// All that a server says of a disk that was used, as text.
fn all(dir: &Path) -> String {
    let (status, text) = http(&dir.join("c"), "GET /metrics?detail=queue HTTP/1.1\r\nhost: x\r\n\r\n");
    assert_eq!(status, 200);
    text
}

fn docs(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(path)).unwrap()
}

#[test]
fn the_page_has_each_metric_with_its_meaning_and_no_other() {
    let (dir, served) = start(&["a.raw,name=a,iops=1000000,bps=1T", "--vhost-user", "v", "--nbd", "unix:n"]);
    work(dir.path());
    let text = all(dir.path());
    let mut said = families(&text);
    // No disk of this test lies on a device.
    said.extend(ROOM_METRICS.map(|(name, kind, help)| (name, (kind, help))));
    let page = docs("metrics.md");
    let rows = page.lines().filter(|line| line.starts_with("| `spile_") || line.starts_with("| `process_"));
    let rows: BTreeMap<_, _> = rows
        .map(|line| {
            let cells: Vec<_> = line.trim_matches('|').split(" | ").map(|cell| cell.trim().trim_matches('`')).collect();
            (cells[0], (cells[1], cells[2]))
        })
        .collect();
    assert_eq!(rows, said);
    assert!(served.terminate().success());
}

#[test]
fn the_dashboard_and_the_alerts_name_nothing_that_is_not_there() {
    let (dir, served) = start(&["a.raw,name=a,iops=1000000,bps=1T", "--vhost-user", "v", "--nbd", "unix:n"]);
    work(dir.path());
    let text = all(dir.path());
    // The second one is of `spile xen-backend`, which another test asks.
    let names = text.lines().filter_map(|line| line.split(['{', ' ']).next()).chain(["spile_server_up"]);
    let names = names.chain(ROOM_METRICS.map(|(name, ..)| name));
    let names: BTreeSet<_> = names.collect();
    for (file, least) in [("grafana/spile.json", 12), ("prometheus/alerts.yml", 6), ("metrics.md", 30)] {
        let asked = docs(file);
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let words =
            asked.split(|c| !is_part(c)).filter(|word| word.starts_with("spile_") || word.starts_with("process_"));
        let words: BTreeSet<_> = words.collect();
        assert!(words.len() >= least, "{file}: {words:?}");
        for word in words {
            // A histogram has a name of its own for native buckets.
            assert!(names.contains(word) || names.contains(&*format!("{word}_bucket")), "{file}: there is no {word}");
        }
    }
    // Disks of several servers may have the same name.
    for asked in [docs("grafana/spile.json"), docs("prometheus/alerts.yml")] {
        let groups = asked.split("by (").skip(1).filter_map(|rest| rest.split_once(')'));
        let of_disks: Vec<_> = groups.map(|(group, _)| group).filter(|group| group.contains("disk")).collect();
        assert!(
            of_disks.len() > 3 && of_disks.iter().all(|group| group.starts_with("instance, server, disk")),
            "{of_disks:?}"
        );
    }
    let board: serde_json::Value = serde_json::from_str(&docs("grafana/spile.json")).unwrap();
    let panels = board["panels"].as_array().unwrap();
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len());
    let has_all = |panel: &serde_json::Value| {
        panel["description"].is_string() && panel["fieldConfig"]["defaults"]["unit"].is_string()
    };
    assert!(panels.iter().filter(|panel| panel["type"] != "row").all(has_all));
    assert!(served.terminate().success());
}

#[test]
fn counts_of_a_disk_never_fall_when_another_one_comes_and_goes() {
    let (dir, served) = start(&["a.raw,name=a", "--nbd", "unix:n"]);
    let dir = dir.path();
    let reads = || scrape(dir, "")["spile_disk_requests_total{disk=\"a\",layer=\"front\",operation=\"read\"}"];
    for round in 1..4 {
        Client::connect(&nbd(dir, "a")).unwrap().read(0, &mut [0; 512]).unwrap();
        eventually("the read is counted", || reads() == f64::from(round));
        ok(dir, &["attach", "c", "mem:1M,name=b"]);
        ok(dir, &["detach", "c", "--name", "b"]);
        assert_eq!(reads(), f64::from(round));
    }
    assert!(served.terminate().success());
}

#[test]
fn the_tcp_address_answers_scrapes_and_nothing_else() {
    let address = own_address();
    let text = address.to_string();
    let (dir, served) = start(&["a.raw,name=a", "--vhost-user", "v", "--nbd", "unix:n", "--metrics", &text]);
    work(dir.path());
    let (status, head, text) = get(address, "/metrics", "text/plain");
    assert!(status == 200 && head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    assert!(!series(&String::from_utf8(text).unwrap()).is_empty());
    let (status, head, text) = get(address, "/metrics?detail=layer", "application/openmetrics-text;version=1.0.0");
    assert!(status == 200 && head.contains("content-type: application/openmetrics-text; version=1.0.0"), "{head}");
    let text = String::from_utf8(text).unwrap();
    assert!(
        text.ends_with("# EOF\n") && text.contains("# TYPE spile_disk_requests counter\n") && !series(&text).is_empty()
    );
    assert!(!text.contains("layer=\"image\""), "no caller gets more than --metrics-detail says");
    let protobuf = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";
    let (status, head, bytes) = get(address, "/metrics", protobuf);
    assert!(status == 200 && head.contains("content-type: application/vnd.google.protobuf"), "{head}");
    assert!(bytes.windows(30).any(|bytes| bytes == b"spile_disk_request_duration_se"));
    for path in ["/", "/v1/disks", "/v1/shutdown"] {
        assert_eq!(get(address, path, "*/*").0, 404, "{path}");
    }
    assert_eq!(over_tcp(address, "POST /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n").0, 405);
    let long = format!("GET /metrics HTTP/1.1\r\nhost: {}\r\n\r\n", "x".repeat(64 << 10));
    assert!(!(200..300).contains(&over_tcp(address, &long).0));
    // Callers that say nothing do not keep others out for long.
    let silent: Vec<_> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
    assert_eq!(get(address, "/metrics", "*/*").0, 200);
    drop(silent);
    assert!(served.terminate().success());
}

#[test]
fn an_address_that_cannot_be_had_is_told() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let dir = tempfile::tempdir().unwrap();
    let said = try_serve(dir.path(), &["null:1M", "--nbd", "unix:n", "--metrics", &port]).err().unwrap();
    assert!(said.contains(&format!("cannot listen on tcp:127.0.0.1:{port}")), "{said}");
    let said = fails(dir.path(), 2, &["serve", "null:1M", "--nbd", "unix:n", "--metrics", "here"]);
    assert!(said.contains("is not an address for metrics"), "{said}");
    let said = fails(dir.path(), 2, &["serve", "null:1M", "--nbd", "unix:n", "--metrics-detail", "all"]);
    assert!(said.contains("there is no detail `all`"), "{said}");
}

#[test]
fn a_successor_goes_on_at_the_same_address_or_does_without_it() {
    let address = own_address();
    let text = address.to_string();
    let plain = ["a.raw,name=a", "--vhost-user", "v", "--nbd", "unix:n"];
    let args = [&plain[..], &["--metrics", &text, "--metrics-detail", "layer"]].concat();
    let (dir, served) = start(&args);
    let answers = || get(address, "/metrics", "text/plain");
    let started = || {
        let text = String::from_utf8(answers().2).unwrap();
        assert!(text.contains("layer=\"image\""), "{text}");
        series(&text)["process_threads"]
    };
    assert!(started() > 0.0);
    let served = succeed(dir.path(), &args, served);
    assert!(started() > 0.0);
    // One that says nothing of metrics keeps them, and one that wants none has none.
    let served = succeed(dir.path(), &plain, served);
    TcpStream::connect(address).expect("the metrics are gone");
    let served = succeed(dir.path(), &[&plain[..], &["--metrics", "none"]].concat(), served);
    assert!(TcpStream::connect(address).is_err(), "somebody listens there still");
    let mut served = succeed(dir.path(), &args, served);
    assert!(started() > 0.0);
    served.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(served.wait().success(), "{}", rest_of_stderr(&mut served));
}

#[test]
fn the_back_end_of_a_host_answers_for_all_its_disks() {
    let address = own_address();
    let mut xen = Xen::start_with(&["--metrics", &address.to_string()]);
    let (vbd, _front, mut queue) = xen.attach();
    (0..4).for_each(|_| queue.write(0, &[1; 4096]).unwrap());
    let scrape = || series(&String::from_utf8(get(address, "/metrics", "text/plain").2).unwrap());
    let server = format!("{}-{}", vbd.guest, vbd.device);
    let writes = format!("layer=\"front\",operation=\"write\",server=\"{server}\"}}");
    let count = |all: &BTreeMap<String, f64>| {
        let found =
            all.iter().find(|(name, _)| name.starts_with("spile_disk_requests_total") && name.ends_with(&writes));
        found.map_or(0.0, |(_, count)| *count)
    };
    // On a busy host the disk's process may answer too late for a scrape.
    let mut all = BTreeMap::new();
    eventually("the writes are counted", || {
        all = scrape();
        count(&all) == 4.0
    });
    let up = format!("spile_server_up{{server=\"{server}\"}}");
    assert_eq!(all[&up], 1.0);
    let own = all["process_threads"];
    assert!(own > 0.0 && all[&format!("process_threads{{server=\"{server}\"}}")] > 0.0);
    // A server that was killed leaves its socket; another one takes its place.
    let old = xen.process(&vbd, None);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(old), nix::sys::signal::Signal::SIGKILL).unwrap();
    xen.process(&vbd, Some(old));
    eventually("the next process answers", || scrape().get(&up) == Some(&1.0));
}
