//! What `spile bench` leaves behind: nothing of its own when something ends it, and the results of earlier runs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::common::{Running, fails, json, ok, run, spile};
use nix::sys::signal::Signal;
use serde_json::{Value, json as value};

/// Waits for something that an experiment does within seconds.
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(600);
    while !is_so() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).unwrap().count() == 0
}

/// The loop devices that have a file in `folder`, also one that is deleted.
fn loop_devices(folder: &Path) -> Vec<OsString> {
    let devices = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let has_file = |device: &std::fs::DirEntry| {
        let file = std::fs::read_to_string(device.path().join("loop/backing_file"));
        file.is_ok_and(|file| Path::new(&file).starts_with(folder))
    };
    devices.filter(has_file).map(|device| device.file_name()).collect()
}

fn has_loop_device(folder: &Path) -> bool {
    !loop_devices(folder).is_empty()
}

/// Takes the loop devices of a folder away when the test fails.
struct NoDevices(PathBuf);

impl Drop for NoDevices {
    fn drop(&mut self) {
        for device in loop_devices(&self.0) {
            let _ = std::process::Command::new("losetup").arg("--detach").arg(Path::new("/dev").join(device)).status();
        }
    }
}

/// Runs an experiment with its files in the folder `d` and its sockets in `r`, until `is_time`.
fn begin(dir: &Path, args: &[&str], is_time: impl Fn(&Path) -> bool) -> Running {
    let at = |name: &str| dir.canonicalize().unwrap().join(name);
    ["d", "r"].iter().for_each(|name| std::fs::create_dir_all(at(name)).unwrap());
    let mut command = spile();
    command.arg("bench").args(args).args(["--quick", "--folder", "d"]).env("XDG_RUNTIME_DIR", at("r"));
    let running = Running::start(&mut command, dir);
    wait_until("its moment", || is_time(&at("d")));
    running
}

const LAYERS: [&str; 3] = ["layers", "--size", "8M"];
const DENSITY: [&str; 4] = ["density", "--disks", "10", "--guests"];

#[test]
fn a_signal_leaves_nothing_of_an_experiment() {
    let is_later = |begun: Instant, ms| move |folder: &Path| !is_empty(folder) && begun.elapsed().as_millis() > ms;
    let has_files = |folder: &Path| !is_empty(folder);
    let is_root = nix::unistd::geteuid().is_root();
    for args in [&LAYERS[..], &DENSITY] {
        for moment in ["first file", "device", "middle"] {
            let dir = tempfile::tempdir().unwrap();
            let _devices = NoDevices(dir.path().canonicalize().unwrap());
            let running = match moment {
                "first file" => begin(dir.path(), args, has_files),
                "device" if is_root && args == LAYERS && Path::new("/dev/loop-control").exists() => {
                    // Where the kernel has no loop devices after all, it is the middle of the transfers.
                    let (begun, limit) = (Instant::now(), 3000);
                    begin(dir.path(), args, |folder| has_loop_device(folder) || is_later(begun, limit)(folder))
                }
                "device" => continue,
                _ => begin(dir.path(), args, is_later(Instant::now(), 1500)),
            };
            assert_eq!(running.end(Signal::SIGTERM).0, Some(143), "{args:?} at {moment}");
            let folder = dir.path().canonicalize().unwrap().join("d");
            // The servers of the experiment end after it, and the kernel takes the devices away then.
            wait_until("no device", || !has_loop_device(&folder));
            for name in ["d", "r"] {
                let left: Vec<_> =
                    std::fs::read_dir(dir.path().join(name)).unwrap().map(|e| e.unwrap().path()).collect();
                assert!(left.is_empty(), "{args:?} at {moment}: {left:?}");
            }
        }
    }
}

#[test]
fn what_a_killed_run_has_left_goes_with_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    for args in [&LAYERS[..], &DENSITY] {
        let running = begin(dir.path(), args, |folder| !is_empty(folder));
        running.end(Signal::SIGKILL);
    }
    let folder = dir.path().canonicalize().unwrap().join("d");
    assert!(!is_empty(&folder) && !is_empty(&dir.path().join("r")));
    std::fs::create_dir(folder.join("spile-bench-2026")).unwrap();
    std::fs::write(folder.join("spile-bench-2026/results"), "of somebody").unwrap();
    let mut next = spile();
    next.args(["bench", "warmup", "--quick", "--size", "1M", "--way", "bare", "--folder", "d"]);
    let output = next.env("XDG_RUNTIME_DIR", dir.path().join("r")).current_dir(dir.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("removed what a killed run had left"), "{said}");
    let left: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["spile-bench-2026"], "what others have stays");
    assert!(is_empty(&dir.path().join("r")));
}

#[test]
fn a_result_is_not_replaced_without_a_word() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("o/warmup.json");
    let args = ["bench", "warmup", "--quick", "--size", "1M", "--way", "bare", "--folder", ".", "--out", "o"];
    let keep = |result: Value| std::fs::write(&file, result.to_string()).unwrap();
    std::fs::create_dir(dir.path().join("o")).unwrap();
    let long = value!({ "experiment": "warmup", "parameters": { "quick": false }, "rows": [] });
    for (old, why) in [(long.clone(), "the result of a long run"), (value!({ "mine": 1 }), "no result of `warmup`")] {
        keep(old.clone());
        let output = run(dir.path(), &args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{said}");
        assert_eq!(serde_json::from_slice::<Value>(&std::fs::read(&file).unwrap()).unwrap(), old);
    }
    std::fs::write(&file, [0xff, b'a']).unwrap();
    assert!(!run(dir.path(), &args).status.success(), "what cannot be read is not replaced");
    keep(value!({ "experiment": "warmup", "parameters": { "quick": true } }));
    ok(dir.path(), &args);
    assert!(std::fs::read_dir(dir.path().join("o")).unwrap().all(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        ["warmup.json", "warmup.svg"].contains(&name.as_str())
    }));
    let output = run(dir.path(), &["bench", "warmup", "--quick", "--out", "/proc/nowhere"]);
    assert!(!output.status.success() && output.stdout.is_empty(), "it is said before the run");
}

#[test]
fn a_set_keeps_the_results_of_other_options() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["bench", "all", "--quick", "--out", "o", "--only", "warmup"];
    let here = |more: &[&'static str]| [&args[..], &["--folder", "."], more].concat();
    let first = json(dir.path(), &here(&[]));
    assert_eq!(first["experiments"][0]["state"], "finished");
    let total = |summary: &Value| summary["seconds"].as_f64().unwrap();
    assert!(total(&first) >= first["experiments"][0]["seconds"].as_f64().unwrap());
    let state = || serde_json::from_slice::<Value>(&std::fs::read(dir.path().join("o/all.state")).unwrap()).unwrap();
    assert_eq!(total(&state()), total(&first), "the total is kept");
    let result = std::fs::read(dir.path().join("o/warmup.json")).unwrap();
    // Without --folder the files lie elsewhere: it is another measurement.
    let output = run(dir.path(), &args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("which would be lost") && said.contains("--again"), "{said}");
    assert_eq!(std::fs::read(dir.path().join("o/warmup.json")).unwrap(), result);
    ok(dir.path(), &[&args[..], &["--again"]].concat());
    let output = run(dir.path(), &here(&[]));
    assert!(!output.status.success(), "the result is now that of the other options");
}

#[test]
fn a_set_ends_within_its_time() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["bench", "all", "--quick", "--out", "o", "--folder", ".", "--only", "warmup", "--only", "geometry"];
    let output = run(dir.path(), &[&args[..], &["--within", "1s", "--json"]].concat());
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(!output.status.success());
    let states: Vec<&Value> = summary["experiments"].as_array().unwrap().iter().map(|entry| &entry["state"]).collect();
    assert_eq!(states, ["left_out", "left_out"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("left out, as the time was over: geometry, warmup"));
    // The next run makes what was left out.
    let summary = json(dir.path(), &[&args[..], &["--within", "1h"]].concat());
    let entries = summary["experiments"].as_array().unwrap();
    assert!(entries.iter().all(|entry| entry["state"] == "finished" && entry["kept"] == false), "{summary}");
}

#[test]
fn more_than_a_quarter_of_the_free_space_is_not_taken() {
    let dir = tempfile::tempdir().unwrap();
    let said = fails(dir.path(), 1, &["bench", "layers", "--quick", "--size", "1000T", "--folder", "."]);
    assert!(said.contains("an experiment takes a quarter at most") && said.contains("another folder"), "{said}");
    assert!(is_empty(dir.path()));
    let said = fails(dir.path(), 1, &["bench", "paths", "--quick", "--span", "1000T", "--path", "nbd", "--store", "."]);
    assert!(said.contains("an experiment takes a quarter at most"), "{said}");
    assert!(is_empty(dir.path()));
}
