//! `spile top` without a terminal, on two servers under load.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::guests::{CONTROL, Load, serve};
use crate::common::json_schema::mistakes;
use crate::common::{eventually, ok, spile};
use serde_json::Value;

/// The program with a folder of control sockets of its own, in which the server of each of these folders has one.
fn host(dir: &Path, servers: &[&Path]) -> Command {
    let run_dir = dir.join("run");
    std::fs::create_dir_all(&run_dir).unwrap();
    for (index, server) in servers.iter().enumerate() {
        std::os::unix::fs::symlink(server.join(CONTROL), run_dir.join(format!("{index}.control"))).unwrap();
    }
    let mut command = spile();
    command.env("SPILE_RUN_DIR", run_dir).current_dir(dir);
    command
}

fn out(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn two_servers_under_load_are_told_in_every_form() {
    let dir = tempfile::tempdir().unwrap();
    let dirs = ["one", "two"].map(|name| dir.path().join(name));
    let disks = ["one.raw", "two.raw"];
    let mut at_work = Vec::new();
    for (dir, disk) in dirs.iter().zip(disks) {
        std::fs::create_dir(dir).unwrap();
        ok(dir, &["create", disk, "--size", "16M"]);
        let served = serve(dir, &[disk, "--vhost-user", "v"]);
        let mut load = Load::start(dir, "v", &["--depth", "2"]);
        load.goes_on(&served);
        at_work.push((served, load));
    }
    let once = |args: &[&str]| {
        let run = tempfile::tempdir().unwrap();
        let mut command = host(run.path(), &[&dirs[0], &dirs[1]]);
        out(command.args(["top", "--interval", "500ms", "--count", "2"]).args(args))
    };
    // On a busy host a server may answer too late for an interval: what is told then has one disk less, and is asked for again.
    let top = |args: &[&str], is_whole: &dyn Fn(&str) -> bool| {
        (0..8).map(|_| once(args)).find(|told| is_whole(told)).unwrap_or_else(|| once(args))
    };
    let schema: Value = serde_json::from_str(&ok(dir.path(), &["schema", "top"])).unwrap();
    let parsed = |told: &str| -> Vec<Value> { told.lines().map(|line| serde_json::from_str(line).unwrap()).collect() };
    let is_whole = |interval: &Value| {
        let disks = interval["disks"].as_array().unwrap();
        disks.len() == 2 && disks.iter().all(|disk| disk["no_interval"].is_null())
    };
    let told = top(&["--json"], &|told| parsed(told).iter().all(is_whole));
    let intervals = parsed(&told);
    assert_eq!(intervals.len(), 2, "{told}");
    for interval in &intervals {
        assert_eq!(mistakes(&schema, interval), [""; 0], "{interval:#}");
        let names: Vec<_> = interval["disks"].as_array().unwrap().iter().map(|disk| disk["name"].clone()).collect();
        assert_eq!(names, ["one", "two"], "{interval:#}");
        for disk in interval["disks"].as_array().unwrap() {
            assert_eq!((&disk["state"], &disk["no_interval"]), (&"running".into(), &Value::Null), "{disk:#}");
            let layers = disk["layers"].as_array().unwrap();
            let at_disk = layers.iter().find(|layer| layer["kind"] == "disk").unwrap();
            assert!(at_disk["reads_per_s"].as_f64() > Some(0.0), "{disk:#}");
            // A server that waits for a processor in the middle of a reading counts what is in flight for some milliseconds more.
            assert!(at_disk["queue_size_avg"].as_f64() < Some(2.2), "{disk:#}");
        }
    }
    // Each form has both disks, with numbers that are not zero.
    for (form, name) in [("plain", "two"), ("iostat", "two"), ("xsiostat", "0,    2:")] {
        let of_disk = |line: &&str| line.trim_start().starts_with(name);
        let told = top(&["--batch", form], &|told| told.lines().filter(of_disk).count() == 2);
        let lines: Vec<_> = told.lines().filter(of_disk).collect();
        assert_eq!(lines.len(), 2, "{told}");
        let reads = |line: &str| line.trim_start()[name.len()..].split_whitespace().next().unwrap().parse::<f64>();
        assert!(lines.iter().all(|line| reads(line).unwrap() > 0.0), "{told}");
    }
    assert_eq!(once(&["--batch"]).lines().next(), once(&["--batch", "plain"]).lines().next());
    for (served, load) in at_work {
        load.end();
        assert!(served.terminate().success());
    }
}

#[test]
fn servers_come_and_go_and_dead_sockets_are_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    [&one, &two].into_iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    let first = serve(&one, &["null:1M,name=first", "--nbd", "unix:n"]);
    let mut command = host(dir.path(), &[&one, &two]);
    command.args(["top", "--json", "--interval", "100ms"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut top = command.spawn().unwrap();
    let mut lines = BufReader::new(top.stdout.take().unwrap()).lines();
    // The disks of the next interval; `None` where a server is silent: on a busy host one may answer too late.
    let mut names = || -> Option<Vec<String>> {
        let interval: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        let name = |disk: &Value| disk["name"].as_str().unwrap().to_owned();
        let names = interval["disks"].as_array().unwrap().iter().map(name).collect();
        interval["silent_servers"].as_array().unwrap().is_empty().then_some(names)
    };
    let mut until = |wanted: &[&str]| {
        eventually(&format!("the disks are {wanted:?}"), || names().is_some_and(|names| names == wanted));
    };
    until(&["first"]);
    let second = serve(&two, &["null:1M,name=second", "--nbd", "unix:n"]);
    until(&["first", "second"]);
    first.kill();
    until(&["second"]);
    assert!(second.terminate().success());
    until(&[]);
    top.kill().unwrap();
    top.wait().unwrap();
}
