//! Servers of guests, and guests' work that goes on over their restarts.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use serde_json::Value;
use spile::uri::{Address, NbdUri};
use spile_lab::vhost::proto::protocol_feature;
use spile_lab::vhost::{Device, DeviceOptions, Queue, QueueOptions};

use super::{PATIENCE, Running, Served, eventually, json, spile};

/// Where a server hears orders, in its folder.
pub const CONTROL: &str = "c";

/// Serves `args` with a control socket, and waits until it is ready.
pub fn serve(dir: &Path, args: &[&str]) -> Served {
    try_serve(dir, args).unwrap_or_else(|err| panic!("serve {args:?}: {err}"))
}

/// The same; what it said on stderr when it ended before it was ready.
pub fn try_serve(dir: &Path, args: &[&str]) -> Result<Served, String> {
    let mut command = spile();
    command.arg("serve").args(args).args(["--control", CONTROL]).current_dir(dir);
    Served::spawn(&mut command, dir.join("n"))
}

/// Starts a server as a service manager does: again when it fails. On a host where many rings end at once the kernel may
/// keep the disk and the sockets of one that was killed for longer than a server waits.
pub fn serve_again(dir: &Path, args: &[&str]) -> Served {
    let mut served = None;
    let is_busy = |said: &str| said.contains("in use by another process") || said.contains("another server listens");
    eventually("a fresh server starts", || {
        served = try_serve(dir, args).map_err(|said| assert!(is_busy(&said), "{said}")).ok();
        served.is_some()
    });
    served.expect("it has started")
}

/// A successor that takes over. The old server ends in order.
pub fn succeed(dir: &Path, args: &[&str], mut old: Served) -> Served {
    let new = serve(dir, &[args, &["--takeover"]].concat());
    assert_eq!(old.wait().code(), Some(0), "{}", rest_of_stderr(&mut old));
    new
}

/// An export on the NBD socket `n` of a folder.
pub fn nbd(dir: &Path, export: &str) -> NbdUri {
    NbdUri::new(Address::Unix(dir.join("n")), export)
}

/// What an ended server has said on stderr.
pub fn rest_of_stderr(served: &mut Served) -> String {
    let mut said = String::new();
    let _ = served.child.stderr.as_mut().expect("piped").read_to_string(&mut said);
    said
}

/// Waits until a server says something on stderr.
pub fn complains(served: &mut Served, says: &'static str) {
    let err = BufReader::new(served.child.stderr.take().expect("read once"));
    let (sender, said) = mpsc::channel();
    // It ends with the server. What it reads on keeps the server from waiting for us.
    std::thread::spawn(move || {
        for _ in err.lines().map_while(Result::ok).filter(|line| line.contains(says)) {
            let _ = sender.send(());
        }
    });
    said.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("never said: {says}"));
}

/// Descriptors that a process has open.
pub fn open_files(served: &Served) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", served.child.id())).unwrap().count()
}

/// The files in a folder.
pub fn names_in(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A verified load of a guest, until it is told to end.
pub struct Load {
    running: Running,
    dir: PathBuf,
    socket: String,
}

impl Load {
    pub fn start(dir: &Path, socket: &str, args: &[&str]) -> Self {
        let mut command = spile();
        command.args(["load", &format!("vhost-user:{socket}"), "--rw", "randrw", "--verify", "--runtime", "1h"]);
        command.args(["--json", "--save-model", &model(socket)]).args(args);
        if !args.contains(&"--flush-every") {
            command.args(["--flush-every", "100"]);
        }
        command.stdin(Stdio::null());
        Self { running: Running::start(&mut command, dir), dir: dir.to_owned(), socket: socket.to_owned() }
    }

    /// Waits until the server has worked for it for a while: an idle server needs no processor.
    pub fn goes_on(&mut self, served: &Served) {
        let clock = clock_getcpuclockid(Pid::from_raw(served.child.id() as i32)).unwrap();
        let used = || Duration::from(clock_gettime(clock).unwrap());
        let start = used();
        eventually("the load is served", || {
            assert_eq!(self.running.has_ended(), None, "the load of {}", self.socket);
            used() - start > Duration::from_millis(40)
        });
    }

    /// Ends it. Nothing has failed, and all that was acknowledged is there; returns how often it has connected again.
    pub fn end(self) -> u64 {
        let (code, out) = self.running.end(Signal::SIGINT);
        assert_eq!(code, Some(130), "{out}");
        let report: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(report["error"], Value::Null, "{report}");
        let uri = format!("vhost-user:{}", self.socket);
        let checked = json(&self.dir, &["load", &uri, "--verify-model", &model(&self.socket)]);
        assert!(checked["acknowledged_blocks"].as_u64() > Some(0), "{checked}");
        println!("{}: the longest write took {} µs", self.socket, report["write"]["latency_max_us"]);
        report["reconnects"].as_u64().unwrap()
    }
}

fn model(socket: &str) -> String {
    format!("{socket}.model")
}

/// A guest in this process, with one queue of few requests.
pub fn guest(socket: &Path) -> (Device, Queue) {
    boot(socket, DeviceOptions::default())
}

/// The same with a front end that knows nothing of requests in flight.
pub fn simple_guest(socket: &Path) -> (Device, Queue) {
    let default = DeviceOptions::default();
    let protocol_features = default.protocol_features & !protocol_feature::INFLIGHT_SHMFD;
    boot(socket, DeviceOptions { protocol_features, ..default })
}

fn boot(socket: &Path, options: DeviceOptions) -> (Device, Queue) {
    let mut device = Device::connect(socket, options).unwrap();
    let mut queues = device.start(&QueueOptions { depth: 4, ..QueueOptions::default() }).unwrap();
    (device, queues.remove(0))
}
