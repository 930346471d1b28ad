//! The load on vhost-user-blk: against qemu-storage-daemon, which no one here wrote, and over the end of our own server.

use std::path::Path;

use crate::common::{Blow, Running, Served, eventually, fails, have, json, ok};
use nix::sys::signal::Signal;
use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

const DISK_BYTES: u64 = 64 << 20;

/// A server of one raw disk with two queues at the socket `v`; `None` where it is not installed.
fn serve(dir: &Path, for_what: &str) -> Option<Served> {
    if !have("qemu-storage-daemon", for_what) {
        return None;
    }
    std::fs::File::create(dir.join("d.raw")).unwrap().set_len(DISK_BYTES).unwrap();
    let mut command = std::process::Command::new("qemu-storage-daemon");
    command.current_dir(dir).args(["--blockdev", "file,node-name=d,filename=d.raw", "--export"]);
    command.arg("vhost-user-blk,id=e,node-name=d,writable=on,num-queues=2,addr.type=unix,addr.path=v");
    let served = Served { child: command.spawn().unwrap(), socket: dir.join("v") };
    eventually("it answers", || std::os::unix::net::UnixStream::connect(dir.join("v")).is_ok());
    Some(served)
}

#[test]
fn a_verified_load_finds_everything_right() {
    let dir = tempfile::tempdir().unwrap();
    let Some(served) = serve(dir.path(), "a verified load on it") else { return };
    let pid = served.child.id().to_string();
    let cases: [&[&str]; 5] = [
        &["--bs", "4k"],
        &["--bs", "512", "--poll", "--flush-every", "50"],
        &["--bs", "64k", "--segment", "4k", "--queues", "2"],
        &["--bs", "256k", "--segment", "12k", "--depth", "4"],
        &["--bs", "4k", "--depth", "1", "--rate", "2000"],
    ];
    for args in cases {
        let load = ["load", "vhost-user:v", "--rw", "randrw", "--ios", "600", "--verify", "--server-pid", &pid];
        let report = json(dir.path(), &[&load[..], args].concat());
        assert!(report["read_back_blocks"].as_u64() > Some(0), "{args:?}: {report}");
        assert!(report["server_cpu_us_per_request"].as_f64() > Some(0.0), "{report}");
        let depths = ["queue_depth_avg", "queue_depth_little"].map(|name| report[name].as_f64().unwrap());
        assert!((depths[0] - depths[1]).abs() <= 0.02 * depths[0], "{args:?}: {depths:?}");
        assert_eq!((&report["uri"], &report["reconnects"]), (&"vhost-user:v".into(), &0.into()));
    }
}

#[test]
fn a_model_outlives_the_connection() {
    let dir = tempfile::tempdir().unwrap();
    let Some(_served) = serve(dir.path(), "a model of it") else { return };
    let load = ["load", "vhost-user:v", "--rw", "randwrite", "--ios", "500", "--verify", "--queues", "2"];
    ok(dir.path(), &[&load[..], &["--save-model", "m"]].concat());
    let checked = json(dir.path(), &["load", "vhost-user:v", "--verify-model", "m"]);
    assert_eq!(checked["read_back_blocks"], checked["acknowledged_blocks"]);
    ok(dir.path(), &[&load[..], &["--seed", "2"]].concat());
    let err = fails(dir.path(), 3, &["load", "vhost-user:v", "--verify-model", "m"]);
    assert!(err.contains("mismatch"), "{err}");
}

#[test]
fn what_cannot_be_is_refused_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let err = fails(dir.path(), 2, &["load", "nbd://localhost", "--poll"]);
    assert!(err.contains("for guests only"), "{err}");
    let err = fails(dir.path(), 1, &["load", "vhost-user:v"]);
    assert!(err.contains("v: cannot connect"), "{err}");
    let Some(_served) = serve(dir.path(), "what it refuses") else { return };
    let cases: [(&[&str], i32, &str); 5] = [
        (&["--queues", "3"], 2, "at most 2 queues"),
        (&["--rw", "write", "--fua"], 1, "FUA"),
        (&["--bs", "1M", "--segment", "4k"], 2, "--bs must be"),
        (&["--reconnect", "1s"], 1, "does not track requests in flight"),
        (&["--segment", "0"], 2, "--segment must be"),
    ];
    for (args, code, says) in cases {
        let err = fails(dir.path(), code, &[&["load", "vhost-user:v"], args].concat());
        assert!(err.contains(says), "{args:?}: {err}");
    }
}

/// Our own server, on the socket `v`.
fn serve_ours(dir: &Path, blow: Option<Blow>) -> Served {
    let mut command = crate::common::spile();
    command.args(["serve", "d.raw,format=raw", "--vhost-user", "v", "--queues", "2"]).current_dir(dir);
    if let Some(blow) = blow {
        blow.prepare(&mut command, 3000);
    }
    Served::spawn(&mut command, dir.join("v")).unwrap()
}

/// Waits until the server has worked for a while: an idle one needs no processor.
fn works(served: &Served) {
    let clock = clock_getcpuclockid(Pid::from_raw(served.child.id() as i32)).unwrap();
    let used = || std::time::Duration::from(clock_gettime(clock).unwrap());
    let start = used();
    eventually("it serves the load", || used() - start > std::time::Duration::from_millis(100));
}

fn goes_on_over(blow: Blow, blows: u64) {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "d.raw", "--size", "64M"]);
    let mut served = serve_ours(dir.path(), Some(blow));
    let mut command = crate::common::spile();
    command.args(["load", "vhost-user:v", "--rw", "randrw", "--verify", "--runtime", "1h", "--queues", "2"]);
    command.args(["--reconnect", "5m", "--flush-every", "100", "--save-model", "m", "--json"]);
    let running = Running::start(&mut command, dir.path());
    for left in (0..blows).rev() {
        if blow == Blow::Kill {
            works(&served);
        }
        blow.strike(&mut served);
        served = serve_ours(dir.path(), (left > 0).then_some(blow));
    }
    works(&served);
    let (code, out) = running.end(Signal::SIGINT);
    assert_eq!(code, Some(130), "{out}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&report["reconnects"], &report["error"]), (&blows.into(), &serde_json::Value::Null), "{report}");
    let checked = json(dir.path(), &["load", "vhost-user:v", "--verify-model", "m"]);
    assert!(checked["acknowledged_blocks"].as_u64() > Some(0), "{checked}");
}

#[test]
fn a_verified_load_goes_on_over_kills_of_the_server() {
    goes_on_over(Blow::Kill, 3);
}

#[test]
fn a_verified_load_goes_on_over_panics_of_the_server() {
    goes_on_over(Blow::Panic, 10);
}
