//! `spile tune` and `spile bench shape`, as short as they go: what they say and keep, not how fast anything is.

use std::path::Path;

use crate::common::{fails, json, ok, spile};
use serde_json::Value;

/// Runs `spile tune` with its state in the folder.
fn tune(dir: &Path, args: &[&str]) -> (Value, String) {
    let mut command = spile();
    command.current_dir(dir).env("SPILE_STATE_DIR", dir.join("state"));
    command.args(["tune", "--json", "--time", "1s", "--rounds", "1"]).args(args);
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    (serde_json::from_slice(&output.stdout).unwrap(), said)
}

#[test]
fn a_device_is_tuned_and_servers_find_the_shape() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("d.raw"), vec![7; 16 << 20]).unwrap();
    let (outcome, said) = tune(dir, &["d.raw", "--out", "o"]);
    let rows = outcome["rows"].as_array().unwrap();
    assert!(rows.iter().all(|row| {
        let number = |field: &str| row[field].as_u64().unwrap_or_else(|| panic!("{field} in {row}"));
        number("outstanding_bytes") == number("block_bytes") * number("queue_depth")
            && number("queue_depth") <= 1024
            && number("requests") >= number("queue_depth")
            && row["bytes_per_s"].as_f64() > Some(0.0)
    }));
    assert!(rows.iter().any(|row| row["outstanding_bytes"] == 4 << 20 && row["queue_depth"] == 1));
    assert!(dir.join("o/tune.json").exists() && dir.join("o/tune.svg").exists());
    if outcome["parameters"]["device"].is_null() {
        // By its number it would be taken for another device after the next boot.
        assert!(said.contains("not kept for servers") && !dir.join("state").exists(), "{said}");
        println!("SKIP a_device_is_tuned_and_servers_find_the_shape: {}", said.trim());
        return;
    }
    assert!(said.contains("shape=tuned"), "{said}");
    let kept: Vec<_> = std::fs::read_dir(dir.join("state/tune")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(kept.len(), 1, "{kept:?}");
    let mut tuned: Value = serde_json::from_slice(&std::fs::read(&kept[0]).unwrap()).unwrap();
    assert_eq!(tuned["shape"], outcome["parameters"]["shape"]);
    assert_eq!((&tuned["operation"], &tuned["rounds"]), (&"read".into(), &1.into()));
    // What a server of a disk on that device makes of it.
    tuned["shape"] = "split=32k".into();
    std::fs::write(&kept[0], tuned.to_string()).unwrap();
    let mut command = spile();
    command.current_dir(dir).env("SPILE_STATE_DIR", dir.join("state"));
    command.args(["serve", "d.raw", "null:1M", "--shape", "tuned", "--nbd", "unix:n", "--control", "c"]);
    let served = crate::common::Served::spawn(&mut command, dir.join("n")).unwrap();
    let shape = |name: &str| json(dir, &["show", "c", "--name", name])["shape"].clone();
    assert_eq!((shape("d"), shape("null")), ("split=32k".into(), "off".into()));
    assert!(served.terminate().success());
}

#[test]
fn nothing_is_destroyed_unasked() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("precious"), vec![7; 16 << 20]).unwrap();
    let err = fails(dir, 2, &["tune", "precious", "--write", "--time", "1s", "--dry-run"]);
    assert!(err.contains("would be destroyed") && err.contains("--may-destroy"), "{err}");
    tune(dir, &["precious", "--dry-run"]);
    assert_eq!(std::fs::read(dir.join("precious")).unwrap(), vec![7; 16 << 20], "reads only");
    tune(dir, &[".", "--write", "--size", "16M", "--dry-run"]);
    let names: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["precious"], "the file is removed, and nothing is kept");
    tune(dir, &["precious", "--write", "--may-destroy", "--dry-run"]);
    assert_ne!(std::fs::read(dir.join("precious")).unwrap(), vec![7; 16 << 20]);
}

#[test]
fn a_file_that_was_not_written_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "d.raw", "--size", "16M"]);
    let err = fails(dir.path(), 2, &["tune", "d.raw", "--time", "1s", "--dry-run"]);
    assert!(err.contains("were never written") && err.contains("name its folder"), "{err}");
}

#[test]
fn a_guest_whose_reads_are_split_is_faster_than_the_bare_store() {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "d.raw", "--size", "64M"]);
    // Slow pages: the processor has time enough, whatever else the host does. `auto` has too few of them to learn.
    let args = ["bench", "shape", "--quick", "--page-time", "5ms", "--store", "d.raw", "--out", "o"];
    let rate = |outcome: &Value, store: &str, side: &str| {
        let here = |row: &&Value| row["store"] == store && row["side"] == side;
        let row = outcome["rows"].as_array().unwrap().iter().find(here);
        row.and_then(|row| row["bytes_per_s"].as_f64()).unwrap_or_else(|| panic!("{store} {side}"))
    };
    let is_faster = |outcome: &Value| {
        let [bare, off, split, auto] = ["bare", "off", "split", "auto"].map(|side| rate(outcome, "model", side));
        off < 1.1 * bare && split > 1.5 * bare && auto > 0.9 * off
    };
    // The sides are measured one after the other, and a busy host may slow down one of them.
    let mut outcomes = Vec::new();
    while outcomes.len() < 3 && !outcomes.last().is_some_and(is_faster) {
        outcomes.push(json(dir.path(), &args));
    }
    assert!(outcomes.last().is_some_and(is_faster), "{outcomes:?}");
    assert!(["bare", "auto"].iter().all(|side| rate(&outcomes[0], "given", side) > 0.0), "{outcomes:?}");
    assert!(dir.path().join("o/shape.json").exists() && dir.path().join("o/shape.svg").exists());
}
