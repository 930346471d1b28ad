//! Trouble below a disk, on every front: the guest waits and sees no error, and the operator sees why.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use crate::common::faulty::{self, Fault};
use crate::common::guests::{Load, guest, nbd, rest_of_stderr, serve, simple_guest, succeed};
use crate::common::nbd::{Client, raw_connection};
use crate::common::xen::{PATIENCE, Xen};
use crate::common::{Served, assert_silent, eventually, fails, json, ok, run};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use spile::serving::control::{self, Link};
use spile::serving::disks::Opening;
use spile::serving::fronts::{Role, key};
use spile::uri::Address;
use spile_core::ErrorKind;
use spile_lab::GuestQueue;
use spile_lab::vhost::{Device, Queue};
use spile_lab::xen::Blkfront;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op};
use spile_lab::xen::toolstack::{Vbd, add_vbd};
use spile_nbd_wire::request::{Command, Request};
use spile_store::CacheMode;
use spile_xen::DomId;
use tempfile::TempDir;

const ENOSPC: u32 = 28;
const EIO: u32 = 5;

/// A store that refuses writes when it is told to: an export of an NBD server in this process.
struct Below {
    refuses: Arc<AtomicU32>,
    dir: TempDir,
}

impl Below {
    fn new() -> Self {
        let (dir, refuses) = (tempfile::tempdir().unwrap(), Arc::<AtomicU32>::default());
        faulty::serve_refusing(&dir.path().join("below"), Fault::None, refuses.clone());
        Self { refuses, dir }
    }

    fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn refuse(&self, errno: u32) {
        self.refuses.store(errno, SeqCst);
    }

    /// The disk, as `spile serve` takes it.
    fn disk(&self, options: &str) -> String {
        format!("nbd+unix:///?socket={}{options}", self.dir().join("below").display())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    fn serve(&self, options: &str) -> Served {
        serve(self.dir(), &arguments(&self.disk(options)))
    }

    /// What the disk waits for, once it does.
    fn waiting(&self) -> Value {
        let mut disk = Value::Null;
        eventually("the disk waits", || {
            disk = json(self.dir(), &["ls", "c"])["disks"][0].clone();
            disk["state"] == "waiting"
        });
        disk["waiting"].clone()
    }

    fn goes_on(&self) {
        let is_running = || json(self.dir(), &["ls", "c"])["disks"][0]["state"] == "running";
        eventually("the disk goes on", is_running);
    }
}

/// What serves a disk to guests and to clients.
fn arguments(disk: &str) -> Vec<&str> {
    vec![disk, "--vhost-user", "v", "--nbd", "unix:n"]
}

/// The error in the next answer of a guest's queue, if it is one.
fn error_of<Q: GuestQueue>(queue: &mut Q) -> Option<ErrorKind> {
    loop {
        if let Some(done) = queue.take().unwrap() {
            return Q::error_kind(done.status);
        }
        assert!(queue.sleep(PATIENCE).unwrap(), "no answer");
    }
}

fn submit_write<Q: GuestQueue>(queue: &mut Q, slot: usize, at: u64, byte: u8) {
    queue.data(slot).fill(byte);
    queue.submit(slot, Q::WRITE, at, 4096);
    queue.publish();
}

fn assert_reads<Q: GuestQueue>(queue: &mut Q, slot: usize, at: u64, byte: u8) {
    queue.submit(slot, Q::READ, at, 4096);
    queue.publish();
    assert_eq!(error_of(queue), None);
    assert_eq!(queue.data(slot).to_vec()[..4096], [byte; 4096]);
}

/// Ends a server in order; what it has said.
fn end(mut served: Served) -> String {
    served.signal(Signal::SIGTERM);
    let status = served.wait();
    let said = rest_of_stderr(&mut served);
    assert_eq!(status.code(), Some(0), "{said}");
    said
}

#[test]
fn a_guest_on_vhost_user_waits_until_there_is_space() {
    let below = Below::new();
    let served = below.serve(",on-error=pause");
    let (_device, mut queue) = guest(&below.path("v"));
    below.refuse(ENOSPC);
    submit_write(&mut queue, 0, 0, 7);
    submit_write(&mut queue, 1, 4096, 8);
    let waiting = below.waiting();
    assert_eq!((&waiting["operation"], &waiting["error"]["kind"]), (&"write".into(), &"no_space".into()));
    eventually("both wait", || below.waiting()["requests"] == 2);
    let listed = ok(below.dir(), &["ls", "c"]);
    assert!(listed.contains("waiting") && listed.contains("No space left on device"), "{listed}");
    assert!(ok(below.dir(), &["show", "c"]).contains("on error: pause"));
    // Reads are not held up.
    assert_reads(&mut queue, 2, 65536, 0);
    assert_eq!(queue.outstanding(), 2);
    // Nobody tells the server that the trouble is over.
    below.refuse(0);
    assert_eq!([error_of(&mut queue), error_of(&mut queue)], [None, None]);
    below.goes_on();
    assert_reads(&mut queue, 0, 0, 7);
    assert_silent(served.child.id(), "after the trouble");
    let said = end(served);
    assert_eq!(
        (said.matches("waits: a write has failed").count(), said.matches("goes on: 2").count()),
        (1, 1),
        "{said}"
    );
}

#[test]
fn an_nbd_client_waits_until_it_is_told() {
    let below = Below::new();
    let served = below.serve(",on-error=pause");
    let client = Client::connect(&nbd(below.dir(), "")).unwrap();
    below.refuse(EIO);
    std::thread::scope(|scope| {
        let write = scope.spawn(|| client.write(4096, &[9; 4096], true));
        assert_eq!(below.waiting()["error"]["kind"], "io");
        let told = ok(below.dir(), &["resume", "c"]);
        assert!(told.contains("1 request(s)") && !write.is_finished(), "{told}");
        below.refuse(0);
        ok(below.dir(), &["resume", "c"]);
        write.join().unwrap().unwrap();
    });
    let mut bytes = [0; 4096];
    client.read(4096, &mut bytes).unwrap();
    assert_eq!(bytes, [9; 4096]);
    drop(client);
    end(served);
}

#[test]
fn a_write_that_waits_ends_with_its_connection() {
    let below = Below::new();
    let _served = below.serve(",on-error=pause");
    below.refuse(ENOSPC);
    let mut old = raw_connection(&below.path("n"));
    let write = Request { flags: 0, command: Command::Write, cookie: 1, offset_bytes: 0, len_bytes: 4096 };
    old.write_all(&[&write.encode()[..], &[0xaa; 4096]].concat()).unwrap();
    assert_eq!(below.waiting()["requests"], 1);
    drop(old);
    // The disk below refuses writes still. Only the end of the request ends the wait.
    below.goes_on();
    below.refuse(0);
    let new = Client::connect(&nbd(below.dir(), "")).unwrap();
    new.write(0, &[0xbb; 4096], true).unwrap();
    assert_eq!(json(below.dir(), &["ls", "c"])["disks"][0]["state"], "running");
}

#[test]
fn a_guest_on_xen_waits_until_there_is_space() {
    let below = Below::new();
    let mut xen = Xen::start_with(&["--on-error", "pause"]);
    let vbd = Vbd::new(DomId(3), below.disk(""));
    add_vbd(&mut xen.store, &vbd).unwrap();
    let mut front = Blkfront::new(xen.guest(3), vbd.device, BlkfrontOptions::default()).unwrap();
    let mut queue = front.start().unwrap().remove(0);
    below.refuse(ENOSPC);
    submit_write(&mut queue, 0, 0, 7);
    let control = xen.path(&format!("run/{}-{}.control", vbd.guest, vbd.device));
    let control = control.to_str().unwrap();
    let state = || json(below.dir(), &["ls", control])["disks"][0]["state"].clone();
    eventually("the disk waits", || state() == "waiting");
    // A process that ends leaves the request to the next one.
    let old = xen.process(&vbd, None);
    kill(Pid::from_raw(old), Signal::SIGTERM).unwrap();
    xen.process(&vbd, Some(old));
    eventually("the disk waits again", || run(below.dir(), &["ls", control]).status.success() && state() == "waiting");
    assert!(queue.take().unwrap().is_none(), "what was left undone is answered");
    below.refuse(0);
    assert_eq!(error_of(&mut queue), None);
    eventually("the disk goes on", || state() == "running");
    assert_reads(&mut queue, 0, 0, 7);
    queue.submit(0, Op::Flush, 0, 0);
    queue.publish();
    assert_eq!(error_of(&mut queue), None);
}

#[test]
fn the_policy_is_changed_at_run_time() {
    let below = Below::new();
    let served = below.serve("");
    let (_device, mut queue) = guest(&below.path("v"));
    below.refuse(EIO);
    submit_write(&mut queue, 0, 0, 1);
    assert_eq!(error_of(&mut queue), Some(ErrorKind::Io), "`report` is not the default");
    ok(below.dir(), &["on-error", "c", "pause"]);
    submit_write(&mut queue, 0, 0, 1);
    below.waiting();
    ok(below.dir(), &["on-error", "c", "report"]);
    assert_eq!(error_of(&mut queue), Some(ErrorKind::Io));
    ok(below.dir(), &["on-error", "c", "pause", "--pause-at-most", "100ms"]);
    assert_eq!(json(below.dir(), &["show", "c"])["pause_at_most_s"], 0.1);
    submit_write(&mut queue, 0, 0, 1);
    assert_eq!(error_of(&mut queue), Some(ErrorKind::Io), "the bound is not kept");
    let wrong = fails(below.dir(), 2, &["on-error", "c", "stop"]);
    assert!(wrong.contains("report or pause"), "{wrong}");
    below.refuse(0);
    end(served);
}

#[test]
fn a_guest_goes_on_with_the_next_server_after_an_end_or_a_takeover() {
    let below = Below::new();
    let mut served = below.serve(",on-error=pause");
    let mut load = Load::start(below.dir(), "v", &["--depth", "8", "--reconnect", "60s"]);
    load.goes_on(&served);
    for takes_over in [true, false, true] {
        below.refuse(ENOSPC);
        below.waiting();
        let disk = below.disk(",on-error=pause");
        served = match takes_over {
            true => succeed(below.dir(), &arguments(&disk), served),
            false => {
                end(served);
                serve(below.dir(), &arguments(&disk))
            }
        };
        below.waiting();
        below.refuse(0);
        load.goes_on(&served);
        below.goes_on();
    }
    assert_eq!(load.end(), 1, "only the end in order is seen");
    end(served);
}

#[test]
fn a_front_end_without_inflight_tracking_is_handed_over_with_what_waits() {
    let below = Below::new();
    let served = below.serve(",on-error=pause");
    let (_device, mut queue) = simple_guest(&below.path("v"));
    below.refuse(ENOSPC);
    submit_write(&mut queue, 0, 0, 5);
    below.waiting();
    let served = succeed(below.dir(), &arguments(&below.disk(",on-error=pause")), served);
    below.waiting();
    below.refuse(0);
    assert_eq!(error_of(&mut queue), None);
    assert_reads(&mut queue, 0, 0, 5);
    end(served);
}

/// A server that was started with `report` and then told to pause. A write of its guest waits.
fn waits_by_order(below: &Below) -> (Served, Device, Queue) {
    let served = below.serve("");
    let (device, mut queue) = simple_guest(&below.path("v"));
    ok(below.dir(), &["on-error", "c", "pause", "--pause-at-most", "90s"]);
    below.refuse(ENOSPC);
    submit_write(&mut queue, 0, 0, 5);
    below.waiting();
    (served, device, queue)
}

/// What an older build asks, which knows nothing of requests that wait.
fn refuses_older_build(below: &Below) {
    let disk = below.disk("");
    let opening = Opening::new(None, CacheMode::Page, Vec::new()).with_disks(vec![disk.parse().unwrap()]);
    let dir = below.dir();
    let unix = |name: &str| Address::Unix(dir.join(name));
    let sockets = vec![
        key(&Role::Vhost(String::new()), Some(&opening.identity("").unwrap()), Some(&unix("v"))),
        key(&Role::Nbd, None, Some(&unix("n"))),
        key(&Role::Control, None, Some(&unix("c"))),
    ];
    let request = control::Request::TakeOver { sockets, queues: 16, disks: Some(opening.exported()), layout: 1 };
    let error = Link::connect(&dir.join("c")).unwrap().expect("a server is there").ask(&request).unwrap_err();
    assert!(error.to_string().contains("older build that would lose them"), "{error}");
}

#[test]
fn a_takeover_that_fails_loses_neither_what_waits_nor_the_policy() {
    let below = Below::new();
    let (served, _device, mut queue) = waits_by_order(&below);
    refuses_older_build(&below);
    below.waiting();
    let disk = json(below.dir(), &["show", "c"]);
    assert_eq!((&disk["on_error"], &disk["pause_at_most_s"]), (&"pause".into(), &90.0.into()));
    below.refuse(0);
    assert_eq!(error_of(&mut queue), None);
    assert_reads(&mut queue, 0, 0, 5);
    end(served);
}

#[test]
fn a_policy_that_was_set_at_run_time_holds_after_a_takeover() {
    let below = Below::new();
    let (served, _device, mut queue) = waits_by_order(&below);
    let served = succeed(below.dir(), &arguments(&below.disk("")), served);
    below.waiting();
    let policy = || {
        let disk = json(below.dir(), &["show", "c"]);
        (disk["on_error"].clone(), disk["pause_at_most_s"].clone())
    };
    assert_eq!(policy(), ("pause".into(), 90.0.into()));
    below.refuse(0);
    assert_eq!(error_of(&mut queue), None);
    assert_reads(&mut queue, 0, 0, 5);
    // The order holds on, whatever the next servers are started with, until there is another one.
    let served = succeed(below.dir(), &arguments(&below.disk(",on-error=report")), served);
    assert_eq!(policy(), ("pause".into(), 90.0.into()));
    ok(below.dir(), &["on-error", "c", "report", "--pause-at-most", "0"]);
    let served = succeed(below.dir(), &arguments(&below.disk(",on-error=pause")), served);
    assert_eq!(policy().0, "pause", "what was said is what it was started with");
    ok(below.dir(), &["on-error", "c", "report"]);
    let served = succeed(below.dir(), &arguments(&below.disk(",on-error=pause")), served);
    assert_eq!(policy().0, "report");
    end(served);
}

#[test]
fn a_client_gets_no_false_answer_when_the_server_ends_or_the_disk_is_detached() {
    for detaches in [false, true] {
        let below = Below::new();
        let served = below.serve(",on-error=pause,name=d");
        let client = Client::connect(&nbd(below.dir(), "")).unwrap();
        below.refuse(ENOSPC);
        std::thread::scope(|scope| {
            let write = scope.spawn(|| client.write(0, &[1; 4096], false));
            below.waiting();
            match detaches {
                true => drop(ok(below.dir(), &["detach", "c", "--name", "d", "--force"])),
                false => drop(end(served)),
            }
            let error = write.join().unwrap().unwrap_err();
            assert!(error.to_string().contains("hung up"), "{error}");
        });
    }
}
