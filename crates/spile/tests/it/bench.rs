//! `spile bench`, as short as it goes: what it says, not how fast anything is.

use std::path::Path;

use crate::common::{fails, json, ok, run};
use serde::de::DeserializeOwned;
use serde_json::Value;
use spile::bench::{Figures, Outcome, density, depth, geometry, layers, warmup};

fn rows(outcome: &Value) -> &Vec<Value> {
    outcome["rows"].as_array().expect("rows")
}

/// Everything in a row is plain but for the phases, and what must be positive is.
fn assert_plain(row: &Value, positive: &[&str]) {
    let fields = row.as_object().expect("a row is an object");
    assert!(fields.iter().all(|(name, value)| name == "phases" || value.is_number() || value.is_string()), "{row}");
    for field in positive {
        assert!(row[*field].as_f64().is_some_and(|value| value > 0.0), "{field} in {row}");
    }
}

fn assert_host(outcome: &Value) {
    let host = &outcome["host"];
    assert!(host["cpus"].as_u64().is_some_and(|cpus| cpus > 0));
    assert_eq!(host["spile_version"], env!("CARGO_PKG_VERSION"));
    let date = host["date_utc"].as_str().unwrap();
    assert!(date.len() == 20 && date.starts_with("20") && date.ends_with('Z'), "{date}");
    assert!(host["kernel"].as_str().is_some_and(|kernel| kernel.contains('.')));
}

const PHASES: [&str; 9] = [
    "kick_us",
    "pickup_us",
    "copy_in_or_map_us",
    "submit_us",
    "complete_us",
    "copy_out_or_unmap_us",
    "response_us",
    "notify_us",
    "guest_end_us",
];

fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or_else(|| panic!("{field} in {row}"))
}

#[test]
fn queues_grow_shorter_on_their_way_down() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["bench", "depth", "--quick", "--depths", "1,16", "--size", "1M", "--folder", ".", "--out", "o"];
    let outcome = json(dir.path(), &args);
    assert_host(&outcome);
    for (store, way) in [("delay", "nbd"), ("delay", "vhost-user"), ("device", "nbd"), ("device", "vhost-user")] {
        for depth in [1.0, 16.0] {
            let here = |row: &&Value| {
                row["part"] == "growing" && row["store"] == store && row["way"] == way && row["queue_depth"] == depth
            };
            let here: Vec<&Value> = rows(&outcome).iter().filter(here).collect();
            let layers: Vec<&str> = here.iter().filter_map(|row| row["layer"].as_str()).collect();
            assert!(layers.starts_with(&["client", "front", "disk", "image"]), "{layers:?}");
            // The host's device is where other programs are, too.
            let ours: Vec<&&Value> = here.iter().filter(|row| row["queue_size_avg"].is_number()).collect();
            for row in &ours {
                let (integrated, by_ticks) = (number(row, "queue_size_avg"), number(row, "queue_size_iostat"));
                assert!((integrated - by_ticks).abs() < 0.05 * depth, "{row}");
            }
            let queues: Vec<f64> = ours.iter().map(|row| number(row, "queue_size_avg")).collect();
            assert!(queues[0] <= depth && queues[0] > 0.5 * depth, "{queues:?}");
            assert!(queues.windows(2).all(|pair| pair[1] < 1.02 * pair[0]), "{queues:?}");
        }
    }
    let intervals: Vec<&Value> = rows(&outcome).iter().filter(|row| row["part"] == "intervals").collect();
    let at_disk: Vec<&&Value> = intervals.iter().filter(|row| row["layer"] == "disk").collect();
    assert_eq!(at_disk.len(), 10);
    let differ = |row: &&&&Value| {
        let integrated = number(row, "queue_size_avg");
        (integrated - number(row, "queue_size_iostat")).abs() > 0.5 * integrated
    };
    assert!(at_disk.iter().filter(differ).count() > 2, "{at_disk:?}");
    let kept: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(kept, ["o"], "the file is removed");
    assert!(dir.path().join("o/depth.json").exists());
}

#[test]
fn idle_guests_wake_nothing() {
    // A signal or a debugger makes threads run that nothing has woken; such a run is repeated.
    let is_still = |row: &Value| number(row, "thread_runs") == 0.0 && number(row, "cpu_us") == 0.0;
    assert!((0..3).any(|_| idle_rows().iter().all(is_still)), "threads ran in each of three runs");
}

/// The idle rows of a short run with guests, in which no worker is woken.
fn idle_rows() -> Vec<Value> {
    let dir = tempfile::tempdir().unwrap();
    let args = ["bench", "density", "--quick", "--disks", "4", "--each", "2", "--seconds", "500ms", "--guests"];
    let outcome = json(dir.path(), &[&args[..], &["--row", "250ms", "--folder", "."]].concat());
    assert_host(&outcome);
    assert_idle(&outcome);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the images are removed");
    rows(&outcome).iter().filter(|row| row["phase"] == "idle").cloned().collect()
}

fn assert_idle(outcome: &Value) {
    let of = |layout: &str, phase: &str| -> Vec<&Value> {
        rows(outcome).iter().filter(|row| row["layout"] == layout && row["phase"] == phase).collect()
    };
    for (layout, disks, idle) in [("shared", 4.0, 2), ("each", 2.0, 1)] {
        let (attachment, idle_rows) = (of(layout, "attachment"), of(layout, "idle"));
        assert_eq!((attachment.len(), idle_rows.len()), (1, idle), "{outcome}");
        assert!(number(attachment[0], "wakeups_kick") >= disks, "each guest has kicked: {}", attachment[0]);
        assert!(number(attachment[0], "thread_runs") > 0.0 && number(attachment[0], "cpu_us") > 0.0, "{outcome}");
        for row in idle_rows {
            assert_plain(row, &["seconds", "resident_bytes", "proportional_bytes", "threads"]);
            for cause in ["wakeups_kick", "wakeups_completion", "wakeups_control", "wakeups_timer"] {
                assert_eq!(number(row, cause), 0.0, "{row}");
            }
            assert_eq!(number(row, "disks"), disks);
        }
    }
}

#[test]
fn files_and_partitions_have_the_tables_of_the_article() {
    let dir = tempfile::tempdir().unwrap();
    let args =
        ["bench", "layers", "--quick", "--size", "1M", "--sizes", "4k,64k", "--seconds", "20ms", "--folder", "."];
    let outcome = json(dir.path(), &args);
    assert_host(&outcome);
    let left_out = outcome["parameters"]["left_out"].as_array().unwrap();
    for place in ["file", "partition", "volume"] {
        let here = rows(&outcome).iter().filter(|row| row["place"] == place);
        let reason = left_out.iter().find_map(|reason| reason.as_str().filter(|reason| reason.starts_with(place)));
        assert_eq!(here.count(), if reason.is_some() { 0 } else { 4 * 3 * 2 }, "{place}: {left_out:?}");
        assert!(place != "file" || reason.is_none());
        if let Some(reason) = reason {
            println!("SKIP files_and_partitions_have_the_tables_of_the_article: {reason}");
        }
    }
    for row in rows(&outcome) {
        assert!(number(row, "bytes") > 0.0 && number(row, "seconds") > 0.0, "{row}");
        assert!(number(row, "bytes") <= f64::from(1 << 20), "{row}");
        assert_eq!(
            row["cut"] == true,
            number(row, "bytes") + number(row, "request_bytes") <= f64::from(1 << 20),
            "{row}"
        );
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the files are removed");
    let args = ["bench", "layers", "--quick", "--size", "1M", "--sizes", "64k", "--seconds", "20ms", "--folder", "."];
    let said = ok(dir.path(), &[&args[..], &["--place", "file", "--way", "bare", "--way", "nbd"]].concat());
    assert!(
        said.contains("file, nbd: 1 MiB in blocks") && said.contains("no partition to set the file beside"),
        "{said}"
    );
}

#[test]
fn sizes_grow_until_the_time_or_the_space_is_over() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["bench", "warmup", "--quick", "--folder", ".", "--way", "bare", "--way", "xen"];
    let outcome = json(dir.path(), &[&args[..], &["--size", "4M"]].concat());
    assert_host(&outcome);
    let sizes = [1.0, 2.0, 4.0].map(|mib| mib * f64::from(1 << 20));
    assert_eq!(rows(&outcome).len(), sizes.len() * 3 * 2);
    for size in sizes {
        let of_size: Vec<&Value> = rows(&outcome).iter().filter(|row| number(row, "size_bytes") == size).collect();
        assert_eq!(of_size.len(), 3 * 2);
        assert!(of_size.iter().all(|row| number(row, "bytes") == size), "all of it is moved: {outcome}");
    }
    assert!(outcome["parameters"]["ended_early"].is_null());
    let args = [&args[..], &["--size", "16G", "--seconds", "1ms"]].concat();
    let reason = json(dir.path(), &args)["parameters"]["ended_early"].to_string();
    assert!(reason.contains("does not suffice for 1 MiB"), "{reason}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the file is removed");
}

#[test]
fn a_target_is_read_all_over_and_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..8 << 20).map(|at: u32| (at >> 9) as u8).collect();
    // A comma in a path is no option of the disk.
    std::fs::write(dir.path().join("t,name=x"), &bytes).unwrap();
    let outcome = json(dir.path(), &["bench", "geometry", "t,name=x", "--quick", "--length", "1M", "--every", "2M"]);
    assert_host(&outcome);
    let offsets: Vec<u64> = rows(&outcome)
        .iter()
        .filter(|row| row["way"] == "vhost-user")
        .map(|row| row["offset_bytes"].as_u64().unwrap() >> 20)
        .collect();
    assert_eq!(offsets, [0, 2, 4, 6]);
    assert_eq!(rows(&outcome).len(), 8);
    for row in rows(&outcome) {
        assert!(["bytes", "seconds", "bytes_per_s"].iter().all(|field| number(row, field) > 0.0), "{row}");
        assert_eq!(row["cut"] == true, number(row, "bytes") < f64::from(1 << 20), "{row}");
    }
    assert_eq!(std::fs::read(dir.path().join("t,name=x")).unwrap(), bytes);
    let said = ok(dir.path(), &["bench", "geometry", "--quick", "--size", "4M", "--length", "1M", "--folder", "."]);
    assert!(said.contains("direct reads of 1 MiB every 1 MiB of a file (4 MiB)"), "{said}");
    assert!(
        fails(dir.path(), 2, &["bench", "geometry", "t,name=x", "--quick", "--length", "1G"]).contains("shorter than")
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "the file is removed");
}

/// The figures that are drawn of a result file, whose texts neither overlap nor leave the page.
fn assert_well_drawn<P: DeserializeOwned, R: DeserializeOwned>(file: &Path, figures: fn(&Outcome<P, R>) -> Figures) {
    let json = std::fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let outcome = serde_json::from_str(&json).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    for (name, figure) in figures(&outcome) {
        assert_eq!(figure.faults(), Vec::<String>::new(), "{name}");
        let drawn = std::fs::read_to_string(file.with_file_name(format!("{name}.svg"))).unwrap();
        assert_eq!(drawn, figure.to_svg(), "{name} is drawn from its file as from its run");
    }
}

#[test]
fn figures_of_memory_are_told_from_those_of_a_disk() {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
        println!("SKIP figures_of_memory_are_told_from_those_of_a_disk: there is no /dev/shm");
        return;
    };
    for name in ["geometry", "warmup", "layers"] {
        let output = run(dir.path(), &["bench", name, "--quick", "--size", "32M", "--folder", ".", "--out", "o"]);
        let said = String::from_utf8_lossy(&output.stderr);
        if said.contains("Invalid argument") {
            println!("SKIP figures_of_memory_are_told_from_those_of_a_disk: this kernel has no O_DIRECT in memory");
            return;
        }
        assert!(output.status.success(), "{said}");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("these are not the figures of a disk") && text.contains("tmpfs"), "{text}");
        let kept: Value =
            serde_json::from_slice(&std::fs::read(dir.path().join(format!("o/{name}.json"))).unwrap()).unwrap();
        assert!(kept["parameters"]["no_device"].is_string(), "{kept}");
    }
    assert_well_drawn(&dir.path().join("o/geometry.json"), geometry::figures);
    assert_well_drawn(&dir.path().join("o/warmup.json"), warmup::figures);
    assert_well_drawn(&dir.path().join("o/layers.json"), layers::figures);
}

#[test]
fn a_set_goes_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["bench", "all", "--quick", "--folder", ".", "--out", "o", "--only", "depth", "--only", "geometry"];
    let args = [&args[..], &["--within", "1h", "--only", "warmup", "--only", "layers", "--only", "density"]].concat();
    let states = |summary: &Value| -> Vec<(String, bool)> {
        let entries = summary["experiments"].as_array().unwrap().iter();
        let state = |entry: &Value| {
            assert_eq!(entry["state"], "finished", "{entry}");
            assert!(!entry["found_here"].as_str().unwrap().is_empty() && !entry["found_there"].is_null(), "{entry}");
            (entry["experiment"].as_str().unwrap().to_owned(), entry["kept"] == true)
        };
        entries.map(state).collect()
    };
    let names = ["depth", "layers", "geometry", "warmup", "density"];
    let first = states(&json(dir.path(), &args));
    assert_eq!(first, names.map(|name| (name.to_owned(), false)));
    let out = dir.path().join("o");
    assert_well_drawn(&out.join("depth.json"), depth::figures);
    assert_well_drawn(&out.join("layers.json"), layers::figures);
    assert_well_drawn(&out.join("geometry.json"), geometry::figures);
    assert_well_drawn(&out.join("warmup.json"), warmup::figures);
    assert_well_drawn(&out.join("density.json"), density::figures);
    // Interrupted in the middle of geometry: what it would have left is there, and nothing else is done again.
    std::fs::remove_file(out.join("geometry.json")).unwrap();
    let second = states(&json(dir.path(), &args));
    assert_eq!(second, names.map(|name| (name.to_owned(), name != "geometry")));
    let args = ["bench", "all", "--quick", "--folder", ".", "--out", "o", "--only", "geometry"];
    let other = [&args[..], &["--again"]].concat();
    assert_eq!(states(&json(dir.path(), &args)), [("geometry".to_owned(), true)]);
    assert_eq!(states(&json(dir.path(), &other)), [("geometry".to_owned(), false)]);
    let kept: Value = serde_json::from_slice(&std::fs::read(out.join("all.state")).unwrap()).unwrap();
    assert_eq!(kept["experiments"].as_array().unwrap().len(), 5, "the others are not forgotten");
    assert!(fails(dir.path(), 2, &["bench", "all", "--only", "everything"]).contains("there is no experiment"));
}

#[test]
fn every_experiment_says_what_it_shows_and_which_article_it_repeats() {
    let dir = tempfile::tempdir().unwrap();
    let help = ok(dir.path(), &["bench", "depth", "--help"]);
    assert!(help.contains("It repeats: Average Queue Size and Storage IO Metrics (2014)."), "{help}");
    let said = ok(dir.path(), &["bench", "crowd", "--quick", "--disks", "2", "--rounds", "1"]);
    assert!(said.contains("What hundreds of idle disks cost a busy one in the same server."), "{said}");
}

#[test]
fn every_path_has_its_rows() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = json(
        dir.path(),
        &[
            "bench",
            "paths",
            "--quick",
            "--rounds",
            "1",
            "--requests",
            "10",
            "--sizes",
            "4k,64k",
            "--write",
            "--span",
            "1M",
        ],
    );
    assert_host(&outcome);
    assert_eq!(outcome["experiment"], "paths");
    let paths = [
        "host-direct",
        "grant-map-memcpy",
        "grant-map",
        "persistent",
        "grant-copy-44k",
        "grant-copy-44k-split",
        "grant-copy",
        "vhost-user",
        "nbd",
    ];
    for path in paths {
        let rows: Vec<&Value> = rows(&outcome).iter().filter(|row| row["way"] == path).collect();
        assert_eq!(rows.len(), 4, "two sizes, both ways: {path}");
        for row in rows {
            assert_plain(row, &["request_bytes", "latency_p50_us", "latency_mean_us", "bytes_per_s"]);
            assert_eq!((row["requests"].as_u64(), row["requests_kept"].as_u64()), (Some(10), Some(6)), "{row}");
        }
    }
    assert_eq!(rows(&outcome).len(), 4 * paths.len());
}

#[test]
fn phases_add_up_to_the_latency() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["bench", "paths", "--quick", "--rounds", "1", "--sizes", "4k,1M", "--path", "grant-copy-44k"];
    let outcome = json(dir.path(), &args);
    assert_eq!(rows(&outcome).len(), 2);
    for row in rows(&outcome) {
        let sum: f64 = PHASES
            .iter()
            .map(|phase| row["phases"][*phase].as_f64().unwrap_or_else(|| panic!("{phase} in {row}")))
            .sum();
        let mean = row["latency_mean_us"].as_f64().unwrap();
        assert!((sum / mean - 1.0).abs() < 0.001, "{sum} of {mean}");
        assert!(
            row["phases"]["pickup_us"].as_f64().unwrap() > 0.0
                && row["phases"]["copy_out_or_unmap_us"].as_f64().unwrap() > 0.0
        );
    }
}

#[test]
fn aggregate_has_a_row_for_each_point() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["bench", "aggregate", "--quick", "--seconds", "50ms", "--sizes", "64k", "--disks", "1"];
    let outcome = json(dir.path(), &args);
    assert_host(&outcome);
    let rows = rows(&outcome);
    assert_eq!(rows.len(), 2 * 2 * 3, "both ways, one and two guests, three paths");
    for row in rows {
        assert_plain(row, &["guests", "disks", "request_bytes", "bytes_per_s"]);
        let mut fields: Vec<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
        fields.sort_unstable();
        let expected = ["bytes_per_s", "bytes_per_s_p10", "bytes_per_s_p90", "disks", "guests", "operation"];
        assert_eq!(fields[..6], expected);
        let ratio = "ratio_to_grant_copy";
        assert_eq!(fields[6..], [ratio, "ratio_to_grant_copy_p10", "ratio_to_grant_copy_p90", "request_bytes", "way"]);
    }
    let has = |path: &str, op: &str| rows.iter().any(|row| row["way"] == path && row["operation"] == op);
    assert!(has("grant-copy", "read") && has("grant-map-memcpy", "write") && has("grant-copy-44k", "read"));
}

#[test]
fn plots_are_kept_beside_the_figures() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["bench", "aggregate", "--quick", "--seconds", "20ms", "--guests", "1", "--disks", "1", "--out", "o"];
    let text = ok(dir.path(), &[&args[..], &["--store", "mem", "--span", "1M"]].concat());
    assert!(text.contains("÷ grant-map-memcpy") && text.contains("aggregate-read.svg"), "{text}");
    for name in ["aggregate-write.svg", "aggregate-read.svg", "aggregate-ratio.svg"] {
        let svg = std::fs::read_to_string(dir.path().join("o").join(name)).unwrap();
        assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n") && svg.contains("<polyline"), "{svg}");
    }
    let kept: Value = serde_json::from_slice(&std::fs::read(dir.path().join("o/aggregate.json")).unwrap()).unwrap();
    assert_eq!(rows(&kept).len(), 2 * 2 * 3);
}

#[test]
fn disks_may_be_files_which_go_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("d")).unwrap();
    let args = ["bench", "paths", "--quick", "--rounds", "1", "--requests", "5", "--sizes", "4k", "--span", "1M"];
    let paths = ["--store", "d", "--path", "host-direct", "--path", "grant-copy", "--path", "nbd"];
    let outcome = json(dir.path(), &[&args[..], &paths[..]].concat());
    assert_eq!(rows(&outcome).len(), 3);
    assert_eq!(outcome["parameters"]["storage"], "d");
    assert_eq!(std::fs::read_dir(dir.path().join("d")).unwrap().count(), 0);
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let refused = |args: &[&str], code: i32| fails(Path::new("/"), code, &[&["bench"], args].concat());
    assert!(refused(&["paths", "--path", "carrier-pigeon"], 2).contains("host-direct, grant-map-memcpy"));
    assert!(refused(&["aggregate", "--path", "nbd"], 2).contains("there is no path `nbd` here"));
    assert!(refused(&["paths", "--sizes", "100"], 2).contains("multiples of 512"));
    assert!(refused(&["paths", "--store", "/nowhere/at/all"], 2).contains("use null, mem or a folder"));
    refused(&["everything"], 2);
}

#[test]
fn an_exchange_of_graphs_makes_nobody_wait_for_slow_writes() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = json(dir.path(), &["bench", "exchange", "--quick", "--depth", "4", "--folder", "."]);
    assert_host(&outcome);
    assert_eq!(rows(&outcome).len(), 3);
    for row in rows(&outcome) {
        assert_plain(row, &["longest_without_us", "longest_with_us", "exchange_us", "old_epoch_us"]);
        // Each write takes 20 ms, also those that an exchange meets.
        assert!(["longest_without_us", "longest_with_us"].iter().all(|run| row[run].as_f64().unwrap() >= 20_000.0));
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the images are removed");
    let said = ok(dir.path(), &["bench", "exchange", "--quick"]);
    assert!(said.contains("makes the longest request") && said.contains("3 rounds, 32 writes in flight"), "{said}");
}

#[test]
fn snapshots_are_measured_for_each_kind_of_disk() {
    let dir = tempfile::tempdir().unwrap();
    let few = ["--disks", "1", "--disks", "2", "--chain", "1", "--chain", "3"];
    let args = [&["bench", "snapshot", "--quick", "--folder", ".", "--out", "o"], &few[..]].concat();
    let outcome = json(dir.path(), &args);
    assert_host(&outcome);
    let case = |row| ["disks", "chain", "slow_ms"].map(|key| number(row, key));
    let cases: Vec<_> = rows(&outcome).iter().map(case).collect();
    let wanted = [[1., 1., 0.], [1., 3., 0.], [1., 1., 100.], [2., 1., 0.], [2., 3., 0.], [2., 1., 100.]];
    assert_eq!(cases, wanted);
    for row in rows(&outcome) {
        let positive = ["snapshots", "longest_without_us", "longest_with_us", "p99_without_us", "longest_stall_us"];
        assert_plain(row, &positive);
        let stall_us = number(row, "longest_stall_us");
        assert!(stall_us < number(row, "snapshot_us"), "gates are closed for a part of the time: {row}");
    }
    let kept: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(kept, ["o"], "the disks are removed");
}

#[test]
fn merges_are_measured_until_they_end() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = json(dir.path(), &["bench", "merge", "--quick", "--size", "16M", "--folder", "."]);
    assert_host(&outcome);
    let works: Vec<_> = rows(&outcome).iter().map(|row| row["work"].as_str().unwrap()).collect();
    assert_eq!(works, ["middle", "leaf", "flatten", "leaf-under-writes"]);
    for row in rows(&outcome) {
        let positive = ["quiet_p50_us", "quiet_p99_us", "beside_p99_us", "beside_s", "alone_s", "moved_bytes"];
        assert!(positive.iter().all(|field| number(row, field) > 0.0), "{row}");
        assert_eq!(row["converged"], true, "{row}");
        assert!(number(row, "extra_bytes") <= f64::from(16 << 20), "no more than the whole disk: {row}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the images are removed");
}

#[test]
fn idle_disks_wake_no_thread_of_a_busy_server() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = json(dir.path(), &["bench", "crowd", "--quick", "--disks", "8"]);
    assert_host(&outcome);
    assert_eq!(rows(&outcome).len(), 3);
    for row in rows(&outcome) {
        assert_plain(row, &["alone_iops", "crowd_iops", "alone_cpu_us", "crowd_cpu_us"]);
        assert!(row["crowd_threads"].as_u64().unwrap() <= 2, "more than the two workers ran: {row}");
    }
    let said = ok(dir.path(), &["bench", "crowd", "--quick", "--disks", "2"]);
    assert!(said.contains("beside 1 idle disks"), "{said}");
}

#[test]
fn a_store_that_hangs_leaves_its_neighbour_going() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = json(dir.path(), &["bench", "hung", "--quick", "--folder", "."]);
    assert_host(&outcome);
    // The NBD export and the backup always; the files on FUSE where they can be had.
    assert_eq!(rows(&outcome).iter().filter(|row| row["store"] == "backup-target").count(), 2, "{outcome}");
    assert!([4, 6, 8].contains(&rows(&outcome).len()), "{outcome}");
    for row in rows(&outcome) {
        assert_plain(row, &["alone_p99_us", "beside_p99_us", "alone_iops", "beside_iops"]);
        assert!(row["beside_iops"].as_f64().unwrap() > 0.0, "the neighbour stands still: {row}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the image is removed");
}

#[test]
fn writes_with_a_checkpoint_are_set_beside_those_without() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = json(dir.path(), &["bench", "checkpoint", "--quick"]);
    assert_host(&outcome);
    assert_eq!(rows(&outcome).len(), 2);
    for row in rows(&outcome) {
        assert_plain(row, &["without_iops", "with_iops", "without_cpu_us", "with_cpu_us"]);
    }
    let said = ok(dir.path(), &["bench", "checkpoint", "--quick", "--folder", "."]);
    assert!(said.contains("promised: 0.99") && said.contains("CPU, us a write"), "{said}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the disk is removed");
}

#[test]
fn limits_are_measured_beside_their_promises() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = json(dir.path(), &["bench", "limit", "--quick", "--rounds", "2"]);
    assert_host(&outcome);
    assert_eq!(rows(&outcome).len(), 2);
    for row in rows(&outcome) {
        assert_plain(
            row,
            &["iops", "bytes_per_s", "small_bytes_per_s", "large_bytes_per_s", "alone_iops", "beside_iops"],
        );
        // A limit that does nothing would let many times as much pass.
        let limit = |name: &str| outcome["parameters"][name].as_f64().unwrap();
        assert!(number(row, "iops") < 1.5 * limit("limit_iops"), "{row}");
        assert!(number(row, "bytes_per_s") < 1.5 * limit("limit_bytes_per_s"), "{row}");
    }
    let said = ok(dir.path(), &["bench", "limit", "--quick"]);
    assert!(said.contains("requests/s on mixed sizes, by the limit") && said.contains("0.95 to 1.05"), "{said}");
}

/// The rows of a quick run of lines of `bench promises`, each with its line, its figure and its one round.
fn promises(lines: &[&str]) -> Vec<(String, String, f64)> {
    let dir = tempfile::tempdir().unwrap();
    let only: Vec<&str> = lines.iter().flat_map(|line| ["--only", line]).collect();
    let outcome = json(dir.path(), &[&["bench", "promises", "--quick", "--folder", "."], &only[..]].concat());
    assert_host(&outcome);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the images are removed");
    let one = |row: &Value| {
        let is_promised = !row["promised"].is_null();
        assert_eq!(is_promised, row["kept"].is_boolean(), "{row}");
        let value = number(row, "median");
        assert!(row["rounds"].as_array().unwrap().len() == 1 && row["rounds"][0] == value && row["worst"] == value);
        (row["line"].as_str().unwrap().to_owned(), row["figure"].as_str().unwrap().to_owned(), value)
    };
    let rows: Vec<_> = rows(&outcome).iter().map(one).collect();
    let mut seen: Vec<&str> = rows.iter().map(|(line, ..)| &**line).collect();
    seen.dedup();
    assert_eq!(seen, lines);
    rows
}

fn value(rows: &[(String, String, f64)], figure: &str) -> f64 {
    let found = rows.iter().find(|row| row.1 == figure);
    found.unwrap_or_else(|| panic!("{figure} is not among {rows:?}")).2
}

#[test]
fn promises_on_images_have_their_lines() {
    let rows = promises(&["clone", "delete", "cold-snapshot", "sparse"]);
    for figure in ["clone-first-answer-ms", "clone-of-a-disk-in-use-ms", "delete-ms", "cold-snapshot-stall-ms"] {
        assert!(value(&rows, figure) > 0.0, "{figure}: {rows:?}");
    }
    assert!(value(&rows, "clone-ms") < value(&rows, "clone-first-answer-ms"), "{rows:?}");
    assert!(value(&rows, "delete-ms") < 1e3 * value(&rows, "delete-space-s"), "{rows:?}");
    for figure in ["sparse-raw-ratio", "sparse-vhd-ratio", "sparse-backup-ratio", "sparse-move-ratio"] {
        // A copy of all the disk would take eight times as much.
        assert!((0.9..2.0).contains(&value(&rows, figure)), "{figure}: {rows:?}");
    }
}

#[test]
fn promises_on_jobs_have_their_lines() {
    let rows = promises(&["four-merges", "killed-merge", "hung-backup", "changes"]);
    for figure in ["limit-gone-ms", "cancel-merge-ms", "cancel-flatten-ms", "cancel-move-ms", "cancel-backup-ms"] {
        assert!(value(&rows, figure) > 0.0, "{figure}: {rows:?}");
    }
    assert!(value(&rows, "merges-at-once") >= 1.0 && value(&rows, "merges-mib-per-s") > 0.0, "{rows:?}");
    // The whole of it would be a second: 8 MiB at this rate.
    assert!(value(&rows, "killed-merge-again-s") < 1.0, "{rows:?}");
}

#[test]
fn promises_on_another_host_have_their_lines() {
    let rows = promises(&["mirror", "hand-over", "link-cut", "return-trip"]);
    assert!(value(&rows, "hand-over-ms") > 0.0, "{rows:?}");
    // What has changed is sent, and of the disk only a part. A checkpoint counts blocks of 64 KiB, of which a mirror sends the 4 KiB that have changed.
    assert!(value(&rows, "link-cut-sent-ratio") >= 1.0 / 16.0 && value(&rows, "link-cut-sent-mib") < 32.0, "{rows:?}");
    assert!(
        value(&rows, "return-trip-sent-ratio") >= 1.0 && value(&rows, "return-trip-of-disk-ratio") < 0.9,
        "{rows:?}"
    );
    assert!(value(&rows, "mirror-lag-mib") > 0.0, "{rows:?}");
}

#[test]
fn promises_are_told_beside_what_was_seen() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["bench", "promises", "--quick", "--folder", ".", "--only", "sparse"];
    let said = ok(dir.path(), &args);
    assert!(said.contains("≤ 1.1") && said.contains("of 4 promises are kept"), "{said}");
    let said = fails(dir.path(), 2, &["bench", "promises", "--only", "flying"]);
    assert!(said.contains("link-cut"), "{said}");
    assert!(fails(dir.path(), 2, &[&args[..], &["--size", "33M"]].concat()).contains("multiples of 16 MiB"));
}
