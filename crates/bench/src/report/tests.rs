use std::path::Path;

use serde_json::{Value, json};

use super::*;

fn host() -> Value {
    serde_json::to_value(crate::experiments::HostFacts::now()).unwrap()
}

fn paths(rows: Value) -> Value {
    let parameters = json!({ "storage": "mem", "span_bytes": 1, "rounds": 2, "queue_depth": 1, "quick": true });
    json!({ "experiment": "paths", "host": host(), "parameters": parameters, "rows": rows })
}

fn row(way: &str, request_bytes: u64) -> Value {
    json!({
        "way": way, "operation": "read", "request_bytes": request_bytes, "requests": 10, "requests_kept": 6,
        "latency_p50_us": 5.0, "latency_p10_us": 4.0, "latency_p90_us": 9.0, "latency_mean_us": 5.5, "bytes_per_s": 1e9,
        "ratio_to_grant_copy": 1.5, "ratio_to_grant_copy_p10": 1.2, "ratio_to_grant_copy_p90": 1.7, "phases": null,
    })
}

fn write(dir: &Path, name: &str, json: &Value) {
    std::fs::write(dir.join(name), json.to_string()).unwrap();
}

#[test]
fn a_page_has_the_machine_the_article_the_figures_and_their_values() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "paths.json", &paths(json!([row("grant-copy", 4096), row("nbd", 4096), row("nbd", 8192)])));
    let report = make(&[dir.path().to_owned()]).unwrap();
    assert_eq!((report.results, report.not_understood.len()), (1, 0));
    assert!(report.figures >= 2);
    let html = &report.html;
    for part in [
        "<h2>The machine</h2>",
        "<dt>mitigations</dt>",
        "What the article found",
        "Karcygwins",
        "A read of 4 KiB takes: grant-copy 5.00 µs, nbd 5.00 µs.",
        "quick: few rounds",
        "<summary>The values of this figure</summary>",
        "All 3 rows of paths",
        "prefers-color-scheme:dark",
        "name=\"viewport\"",
    ] {
        assert!(html.contains(part), "{part} is not in the page");
    }
    assert!(!html.contains("<script") && !html.contains("src=") && !html.contains("@import"));
    // The namespace of SVG is the only address.
    assert_eq!(html.matches("http").count(), html.matches("xmlns=\"http://www.w3.org/2000/svg\"").count());
}

#[test]
fn a_machine_is_told_once_with_the_storage_of_each_result() {
    let dir = tempfile::tempdir().unwrap();
    let on = |experiment: &str, file_system: Value, device: Value| {
        let mut host = host();
        (host["file_system"], host["device"]) = (file_system, device);
        write(
            dir.path(),
            &format!("{experiment}.json"),
            &json!({ "experiment": experiment, "host": host, "rows": [] }),
        );
    };
    on("a", json!("ext4 on /dev/x"), json!("x: 1 GiB"));
    on("b", Value::Null, Value::Null);
    on("c", json!("ext4 on /dev/x"), json!("x: 1 GiB"));
    let html = make(&[dir.path().to_owned()]).unwrap().html;
    assert!(html.contains("<h2>The machine</h2>") && html.matches("<dt>processor</dt>").count() == 1);
    assert!(html.contains("<dt>measured on</dt><dd>ext4 on /dev/x; x: 1 GiB (a, c)</dd>"));
    assert!(html.contains("<dt>measured on</dt><dd>no file or device (b)</dd>"));
}

#[test]
fn no_name_is_given_twice() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for dir in [&dir, &other] {
        write(dir.path(), "paths.json", &paths(json!([row("grant-copy", 4096), row("nbd", 4096)])));
    }
    let html = make(&[dir.path().to_owned(), other.path().to_owned()]).unwrap().html;
    let mut ids: Vec<&str> = html.split(" id=\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count);
}

#[test]
fn other_files_are_named_with_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("broken.json"), "{\"experiment\":").unwrap();
    std::fs::write(dir.path().join("binary.json"), [0xff, 0, 0x80]).unwrap();
    std::fs::write(dir.path().join("list.json"), "[1, 2]").unwrap();
    write(dir.path(), "host.json", &json!({ "experiment": "paths", "rows": [], "host": 7 }));
    write(dir.path(), "strange.json", &json!({ "experiment": "<b>new</b>", "host": host(), "rows": [{ "a": 1 }] }));
    write(dir.path(), "rows.json", &paths(json!([{ "way": 5 }])));
    let report = make(&[dir.path().to_owned()]).unwrap();
    let why: Vec<String> = report.not_understood.iter().map(|file| file.why.clone()).collect();
    assert_eq!((why.len(), report.results, report.figures), (4, 2, 0), "{why:?}");
    assert!(report.html.contains("<h2>Not understood</h2>") && report.html.contains("broken.json"));
    assert!(report.html.contains("no figures of it") && report.html.contains("&lt;b&gt;new&lt;/b&gt;"));
    assert!(report.html.contains("Its rows are not understood"));
}

#[test]
fn strange_values_make_no_panic() {
    let dir = tempfile::tempdir().unwrap();
    let numbers =
        [json!(0), json!(-1), json!(1e308), json!(u64::MAX), json!(null), json!("x"), json!([]), json!(1e-300)];
    let good = row("nbd", 4096);
    let mut rows = vec![json!([]), json!([{}]), json!([[1]])];
    for key in good.as_object().unwrap().keys() {
        for number in &numbers {
            let mut bad = good.clone();
            bad[key] = number.clone();
            rows.push(json!([bad, row("grant-copy", 4096)]));
        }
    }
    for rows in rows {
        write(dir.path(), "paths.json", &paths(rows));
        make(&[dir.path().to_owned()]).unwrap();
    }
}

#[test]
fn a_place_without_results_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let error = |place: &Path| make(&[place.to_owned()]).unwrap_err();
    assert_eq!(error(&dir.path().join("nowhere")).kind(), ErrorKind::NotFound);
    assert!(error(&dir.path().join("nowhere")).to_string().contains("nowhere"));
    assert_eq!(error(dir.path()).kind(), ErrorKind::NotFound);
}

#[test]
fn a_page_stays_small() {
    let dir = tempfile::tempdir().unwrap();
    let rows: Vec<Value> = (0..1500).map(|number| row(&format!("nbd{}", number % 3), 4096)).collect();
    for name in ["a.json", "b.json", "c.json", "d.json", "e.json", "f.json"] {
        let strange = json!({ "experiment": name, "host": host(), "rows": rows });
        write(dir.path(), name, &strange);
    }
    let report = make(&[dir.path().to_owned()]).unwrap();
    assert!(report.html.len() < MAX_BYTES && report.html.contains("more rows are in the file"));
}
