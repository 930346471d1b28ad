//! Takeovers that fail: whatever becomes of the successor, the running server goes on, and its guests see a pause at most.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::common::guests::{
    Load, complains, guest, names_in, nbd, open_files, rest_of_stderr, serve, serve_again, simple_guest, succeed,
    try_serve,
};
use crate::common::nbd::Client;
use crate::common::{Served, eventually, fails, ok};
use nix::sys::signal::Signal;
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::{Resource, Rlimit};
use spile::serving::control::{Answer, LAYOUT, Link, Request};
use spile::serving::fronts::{Listening, Role, key};
use spile::serving::identity::{Exported, Identity};
use spile::serving::takeover::{self, Inheritance, Orders, ask};
use spile::uri::Address;
use spile_core::OpenMode;
use spile_lab::GuestQueue;
use spile_lab::vhost::{Op, STATUS_OK};
use spile_store::{CacheMode, FileStore};

/// A disk `d.raw` with a guest's socket, one for NBD and the one for orders.
const ARGS: [&str; 5] = ["d.raw", "--vhost-user", "v", "--nbd", "unix:n"];

fn start() -> (tempfile::TempDir, Served) {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "d.raw", "--size", "64M"]);
    let served = serve(dir.path(), &ARGS);
    (dir, served)
}

/// Takes everything, as a successor with the same options does before it opens the disks.
fn take(dir: &Path) -> Inheritance {
    let (keys, exports) = what_is_served(dir);
    ask(&dir.join("c"), keys, 16, exports).unwrap().expect("a server is there")
}

/// The keys of the sockets, and the disks.
fn what_is_served(dir: &Path) -> (Vec<String>, Vec<Exported>) {
    let dir = &dir.canonicalize().unwrap();
    let disk = dir.join("d.raw").display().to_string();
    let unix = |name: &str| Address::Unix(dir.join(name));
    let keys = [
        key(&Role::Vhost(String::new()), Some(&disk), Some(&unix("v"))),
        key(&Role::Nbd, None, Some(&unix("n"))),
        key(&Role::Control, None, Some(&unix("c"))),
    ];
    let disk = Identity::of(&dir.join("d.raw").display().to_string().parse().unwrap(), None, None);
    (keys.to_vec(), vec![Exported { name: String::new(), disk }])
}

fn refused(dir: &Path, args: &[&str]) -> String {
    match try_serve(dir, &[args, &["--takeover"]].concat()) {
        Ok(_) => panic!("{args:?} has taken over"),
        Err(said) => said,
    }
}

/// A new NBD client finds the disk.
fn answers_nbd(dir: &Path) {
    Client::connect(&nbd(dir, "")).unwrap().read(0, &mut [0; 512]).unwrap();
}

#[test]
fn who_could_not_go_on_with_everything_is_refused_before_anything_stops() {
    let (dir, served) = start();
    let dir = dir.path();
    ok(dir, &["create", "other.raw", "--size", "64M"]);
    let mut load = Load::start(dir, "v", &[]);
    load.goes_on(&served);
    let client = Client::connect(&nbd(dir, "")).unwrap();
    let cases: [(&[&str], &str); 8] = [
        (&["d.raw", "--vhost-user", "v"], "does not listen on nbd unix:"),
        (&["d.raw", "--nbd", "unix:n"], "does not listen on vhost-user \"\" ("),
        (&["other.raw", "--vhost-user", "v", "--nbd", "unix:n"], "the successor asks for other.raw (raw, inode"),
        (&["d.raw,read-only", "--vhost-user", "v", "--nbd", "unix:n"], "asks for d.raw (raw, read-only, inode"),
        (&["d.raw,name=x", "--vhost-user", "v,export=x", "--nbd", "unix:n"], "vhost-user \"\" ("),
        (&["d.raw", "--vhost-user", "v", "--nbd", "unix:n", "--queues", "15"], "--queues 15 and this server 16"),
        (&["d.raw", "--vhost-user", "v,export=y", "--nbd", "unix:n"], "the exports are \"\""),
        (&["d.raw", "--vhost-user", "v", "--nbd", "unix:n", "--tls-cert", "x", "--tls-key", "x"], "x"),
    ];
    for (args, says) in cases {
        let said = refused(dir, &[args, &["--exactly"]].concat());
        assert!(said.contains(says), "{args:?}: {said}");
        client.read(0, &mut [0; 512]).expect("NBD clients are still connected");
    }
    load.goes_on(&served);
    assert_eq!(load.end(), 0);
    assert!(served.terminate().success());
}

#[test]
fn another_disk_is_refused_where_only_nbd_clients_would_see_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for (disk, size) in [("d.raw", "16M"), ("other.raw", "32M"), ("e.raw", "16M")] {
        ok(dir, &["create", disk, "--size", size]);
    }
    fs::hard_link(dir.join("d.raw"), dir.join("moved.raw")).unwrap();
    let served = serve(dir, &["d.raw,name=x", "e.raw", "--nbd", "unix:n"]);
    let client = Client::connect(&nbd(dir, "x")).unwrap();
    client.write(0, &[1; 512], true).unwrap();
    let cases: [(&[&str], &str); 5] = [
        (&["other.raw,name=x", "e.raw"], "export \"\" is d.raw (raw, inode"),
        (&["e.raw,name=x", "d.raw,name=e"], "the successor asks for e.raw (raw, inode"),
        (&["d.raw,name=x,read-only", "e.raw"], "the successor asks for d.raw (raw, read-only, inode"),
        (&["d.raw,name=x,format=vhd", "e.raw"], "the successor asks for d.raw (vhd, inode"),
        (&["d.raw,name=x"], "export \"e\" is e.raw (raw, inode"),
    ];
    for (disks, says) in cases {
        let said = refused(dir, &[disks, &["--nbd", "unix:n"]].concat());
        assert!(said.contains("hands nothing over: ") && said.contains(says), "{disks:?}: {said}");
        client.read(0, &mut [0; 512]).expect("NBD clients are still connected");
    }
    // Its path does not matter, and the client that is cut off is spoken of.
    let mut served = served;
    let new = serve(dir, &["moved.raw,name=x", "e.raw", "--nbd", "unix:n", "--takeover"]);
    assert!(served.wait().success());
    let said = rest_of_stderr(&mut served);
    assert!(said.contains("cuts off 1 NBD client"), "{said}");
    let mut bytes = [0; 512];
    Client::connect(&nbd(dir, "x")).unwrap().read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [1; 512]);
    assert!(new.terminate().success());
}

/// What older builds ask: they do not say which disks they serve.
#[test]
fn an_older_successor_gets_what_its_sockets_tell_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.raw", "--size", "16M"]);
    let served = serve(dir, &["d.raw", "--nbd", "unix:n"]);
    let old_line = |sockets: &[String]| {
        let sockets = serde_json::to_string(sockets).unwrap();
        let stream = std::os::unix::net::UnixStream::connect(dir.join("c")).unwrap();
        let line = format!("{{\"fds\":0,\"message\":{{\"take_over\":{{\"sockets\":{sockets},\"queues\":16}}}}}}\n");
        (&stream).write_all(line.as_bytes()).unwrap();
        let mut answer = String::new();
        BufReader::new(&stream).read_line(&mut answer).unwrap();
        answer
    };
    let dir_path = dir.canonicalize().unwrap();
    let unix = |name: &str| Address::Unix(dir_path.join(name));
    let control = key(&Role::Control, None, Some(&unix("c")));
    let said = old_line(&[key(&Role::Nbd, None, Some(&unix("n"))), control.clone()]);
    assert!(said.contains("does not say which disks"), "{said}");
    assert!(served.terminate().success());
    let served = serve(dir, &["d.raw", "--vhost-user", "v"]);
    let disk = dir_path.join("d.raw").display().to_string();
    let vhost = key(&Role::Vhost(String::new()), Some(&disk), Some(&unix("v")));
    let said = old_line(&[vhost, control]);
    assert!(said.contains("{\"socket\":"), "{said}");
    assert!(served.terminate().success());
}

#[test]
fn a_disk_in_memory_stays_with_its_server() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let args = ["mem:16M", "--vhost-user", "v"];
    let served = serve(dir, &args);
    let (_device, mut queue) = guest(&dir.join("v"));
    queue.write(0, &[9; 512]).unwrap();
    let said = refused(dir, &args);
    assert!(said.contains("mem:") && said.contains("would be empty"), "{said}");
    assert_eq!(queue.read(0, 512).unwrap(), [9; 512]);
    assert!(served.terminate().success());
}

#[test]
fn without_a_takeover_a_second_server_is_told_who_is_in_the_way() {
    let (dir, served) = start();
    let dir = dir.path();
    let cases: [(&[&str], &str); 4] = [
        (&["d.raw", "--vhost-user", "other"], "d.raw: the file is in use by another process (end the program"),
        (&["null:1M", "--vhost-user", "v"], "/v: another server listens on this socket (stop it"),
        (&["null:1M", "--vhost-user", "other", "--control", "c"], "/c: another server listens on this socket (stop it"),
        // Nobody to take over from hears there.
        (&["d.raw", "--vhost-user", "other", "--control", "c2", "--takeover"], "d.raw: the file is in use"),
    ];
    for (args, says) in cases {
        let said = fails(dir, 1, &[&["serve"], args].concat());
        assert!(said.contains(says), "{args:?}: {said}");
    }
    assert_eq!(names_in(dir), ["c", "d.raw", "n", "v"]);
    assert!(served.terminate().success());
}

#[test]
fn a_successor_that_cannot_open_the_disk_or_dies_changes_nothing() {
    let (dir, mut served) = start();
    let dir = dir.path();
    let mut load = Load::start(dir, "v", &["--queues", "2", "--span", "32M"]);
    // Its place in the ring is known from what was handed over, and from nothing else.
    let (_device, mut queue) = simple_guest(&dir.join("v"));
    load.goes_on(&served);
    let files = open_files(&served);
    for round in 1..=3u8 {
        queue.write(48 << 20, &[round; 4096]).unwrap();
        let said = refused(dir, &[&ARGS[..], &["--format", "vhd"]].concat());
        assert!(said.contains("d.raw"), "{said}");
        assert_eq!(queue.read(48 << 20, 4096).unwrap(), [round; 4096]);
        let inheritance = take(dir);
        assert_eq!((inheritance.sockets.len(), inheritance.connections.len()), (3, 2));
        drop(inheritance);
        assert_eq!(queue.read(48 << 20, 4096).unwrap(), [round; 4096]);
        answers_nbd(dir);
        load.goes_on(&served);
    }
    eventually("no descriptor is left over", || open_files(&served) <= files);
    // And when one succeeds in the end, it has all.
    served = succeed(dir, &ARGS, served);
    load.goes_on(&served);
    assert_eq!(queue.read(48 << 20, 4096).unwrap(), [3; 4096]);
    assert_eq!(load.end(), 0);
    assert!(served.terminate().success());
    assert_eq!(names_in(dir), ["d.raw", "v.model"]);
}

/// Where a process of this test finds the server that it is to take over, and end at once.
const DYING: &str = "SPILE_TEST_DYING_SUCCESSOR";

#[test]
fn a_successor_that_ends_before_anything_is_handed_over_changes_nothing() {
    if let Some(dir) = std::env::var_os(DYING) {
        let (sockets, disks) = what_is_served(Path::new(&dir));
        let request = Request::TakeOver { sockets, queues: 16, disks: Some(disks), layout: LAYOUT };
        let link = Link::connect(&Path::new(&dir).join("c")).unwrap().expect("a server is there");
        return link.send(&request, &[]).unwrap();
    }
    let (dir, served) = start();
    let dir = dir.path();
    let (_device, mut queue) = guest(&dir.join("v"));
    queue.write(0, &[1; 512]).unwrap();
    let client = Client::connect(&nbd(dir, "")).unwrap();
    // The server hears the request only when nobody is left who has sent it.
    served.signal(Signal::SIGSTOP);
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "takeover_failures::a_successor_that_ends_before_anything_is_handed_over_changes_nothing"]);
    let sent = command.env(DYING, dir).output().unwrap();
    served.signal(Signal::SIGCONT);
    let said = String::from_utf8_lossy(&sent.stdout);
    assert!(sent.status.success() && said.contains("1 passed"), "{said}");
    // It answers one request after the other, so this one comes when the first is settled.
    let said = refused(dir, &["d.raw", "--vhost-user", "v", "--exactly"]);
    assert!(said.contains("does not listen on nbd unix:"), "{said}");
    client.read(0, &mut [0; 512]).expect("NBD clients are still connected");
    assert_eq!(queue.read(0, 512).unwrap(), [1; 512]);
    let served = succeed(dir, &ARGS, served);
    assert_eq!(queue.read(0, 512).unwrap(), [1; 512]);
    assert!(served.terminate().success());
}

#[test]
fn a_silent_successor_is_not_waited_for_and_comes_too_late() {
    let (dir, mut served) = start();
    let dir = dir.path();
    let mut load = Load::start(dir, "v", &[]);
    load.goes_on(&served);
    let mut inheritance = take(dir);
    complains(&mut served, "nothing is handed over");
    load.goes_on(&served);
    let error = inheritance.confirm().unwrap_err();
    assert!(error.to_string().contains("hands nothing over"), "{error}");
    assert_eq!(load.end(), 0);
    assert!(served.terminate().success());
}

#[test]
fn a_child_that_appears_beside_a_served_disk_ends_no_server() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.raw", "--size", "64M"]);
    ok(dir, &["create", "child.vhd", "--parent", "d.raw"]);
    fs::create_dir(dir.join("away")).unwrap();
    fs::rename(dir.join("child.vhd"), dir.join("away/child.vhd")).unwrap();
    let served = serve(dir, &ARGS);
    fs::rename(dir.join("away/child.vhd"), dir.join("child.vhd")).unwrap();
    // The running server opens its disk again when the successor is gone, and the next successor opens it, too.
    drop(take(dir));
    answers_nbd(dir);
    let served = succeed(dir, &ARGS, served);
    answers_nbd(dir);
    // A disk that nobody has served so far is still refused.
    ok(dir, &["create", "e.raw", "--size", "1M"]);
    ok(dir, &["create", "e.vhd", "--parent", "e.raw"]);
    let said = refused(dir, &[&ARGS[..], &["e.raw"]].concat());
    assert!(said.contains("e.vhd is a child of this disk"), "{said}");
    answers_nbd(dir);
    assert!(served.terminate().success());
}

/// Holds the disk as a successor that has opened it, until the file is dropped. This process has what was given to the successor.
fn lock(dir: &Path) -> FileStore {
    let said = fails(dir, 1, &["resize", "d.raw", "2G"]);
    assert!(said.contains("in use"), "it is promised to the successor: {said}");
    FileStore::open(&dir.join("d.raw"), OpenMode::ReadWrite, CacheMode::Page)
        .expect("the old server has closed the disk")
}

#[test]
fn a_silent_successor_that_has_the_disk_is_waited_for() {
    let (dir, mut served) = start();
    let dir = dir.path();
    let (_device, mut queue) = guest(&dir.join("v"));
    queue.write(0, &[1; 512]).unwrap();
    let (mut inheritance, disk) = (take(dir), lock(dir));
    complains(&mut served, "nothing is handed over");
    // It comes at last, and gets what it was given.
    inheritance.confirm().unwrap();
    drop((inheritance, disk));
    assert!(served.wait().success());
    assert_eq!(names_in(dir), ["c", "d.raw", "n", "v"], "the names are the successor's");
}

#[test]
fn when_the_old_server_is_killed_a_fresh_one_goes_on_with_what_was_in_flight() {
    let (dir, mut served) = start();
    let dir = dir.path();
    let mut load = Load::start(dir, "v", &["--reconnect", "30s", "--queues", "2"]);
    for _ in 0..2 {
        load.goes_on(&served);
        let mut inheritance = take(dir);
        served.kill();
        let error = inheritance.confirm().unwrap_err();
        assert!(error.to_string().contains("start again"), "{error}");
        drop(inheritance);
        served = serve_again(dir, &[&ARGS[..], &["--takeover"]].concat());
    }
    load.goes_on(&served);
    assert_eq!(load.end(), 2);
}

#[test]
fn a_signal_during_a_takeover_is_heeded_when_that_is_settled() {
    // The takeover succeeds: the old server ends anyway, and leaves everything to its successor.
    let (dir, mut served) = start();
    let (_device, mut queue) = guest(&dir.path().join("v"));
    queue.write(0, &[1; 512]).unwrap();
    let mut inheritance = take(dir.path());
    served.signal(Signal::SIGTERM);
    inheritance.confirm().unwrap();
    drop(inheritance);
    assert!(served.wait().success());
    assert_eq!(names_in(dir.path()), ["c", "d.raw", "n", "v"]);
    // It fails: the old server ends in order.
    let mut served = serve(dir.path(), &ARGS);
    let inheritance = take(dir.path());
    served.signal(Signal::SIGTERM);
    drop(inheritance);
    assert!(served.wait().success());
    assert_eq!(names_in(dir.path()), ["d.raw"]);
}

/// A server that hands over, at the socket `c2`, what another has handed over to us; and then waits until the successor is
/// ready, and does not tell it that it is the server now.
fn hand_on(dir: &Path, inheritance: &Inheritance) -> Link {
    let listener = UnixListener::bind(dir.join("c2")).unwrap();
    let mut link = Link::new(listener.accept().unwrap().0).unwrap();
    drop(listener);
    let Some((Request::TakeOver { sockets, layout, .. }, _)) = link.recv().unwrap() else {
        panic!("nobody wants to take over");
    };
    let share = |wanted: &String| {
        let fd = inheritance.sockets.get(wanted)?.try_clone().unwrap();
        Some(Listening { role: Role::Nbd, key: wanted.clone(), address: None, fd, published: None })
    };
    let listening: Vec<Listening> = sockets.iter().filter_map(share).collect();
    assert_eq!(listening.len(), 2, "all but the control socket, which is another");
    takeover::give(&link, layout, Vec::new(), Orders::default(), &listening, &inheritance.connections).unwrap();
    let ready = link.recv::<Answer>().unwrap();
    assert!(matches!(ready, Some((Answer::Done, _))), "the successor is ready");
    link
}

#[test]
fn a_successor_that_was_not_told_to_go_on_touches_no_queue_and_no_name() {
    let (dir, served) = start();
    let dir = dir.path();
    let (_device, mut queue) = simple_guest(&dir.join("v"));
    queue.write(0, &[1; 512]).unwrap();
    let inheritance = take(dir);
    let mut command = crate::common::spile();
    command.args(["serve", "--takeover", "--control", "c2"]).args(ARGS).current_dir(dir).stderr(Stdio::piped());
    let mut successor = Served { child: command.spawn().unwrap(), socket: dir.join("v") };
    let link = hand_on(dir, &inheritance);
    queue.data(0).copy_from_slice(0, &[2; 512]);
    queue.submit(0, Op::Write, 0, 512);
    queue.publish();
    let is_answered = queue.sleep(Duration::from_millis(300)).unwrap();
    assert!(!is_answered, "nobody serves now");
    drop(link);
    assert_eq!(successor.wait().code(), Some(1));
    let said = rest_of_stderr(&mut successor);
    assert!(said.contains("has hung up on the control socket"), "{said}");
    // What it had made itself, in the place of our control socket, is gone.
    assert_eq!(names_in(dir), ["c", "d.raw", "n", "v"]);
    // The old server answers it, once.
    drop(inheritance);
    eventually("the request is answered", || queue.sleep(Duration::from_secs(1)).unwrap());
    assert_eq!(queue.take().unwrap().map(|done| done.status), Some(STATUS_OK));
    assert_eq!(queue.read(0, 512).unwrap(), [2; 512]);
    assert!(served.terminate().success());
}

/// Hears one request as a server would, and answers with these bytes.
fn answer_once(dir: &Path, answer: &'static [u8]) -> std::thread::JoinHandle<String> {
    let listener = UnixListener::bind(dir.join("c")).unwrap();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut request = String::new();
        BufReader::new(&stream).read_line(&mut request).unwrap();
        (&stream).write_all(answer).unwrap();
        request
    })
}

#[test]
fn a_server_that_breaks_off_or_talks_nonsense_ends_the_successor_with_a_reason() {
    let cases: [(&[u8], &str); 6] = [
        (b"", "c: the server has hung up on the control socket (if it goes on"),
        (b"what?\n", "c: a line on the control socket is not understood"),
        (b"{\"fds\":0,\"message\":\"done\"}\n", "c: an unexpected answer on the control socket: Done"),
        (b"{\"fds\":1,\"message\":{\"socket\":\"x\"}}\n", "c: descriptors are missing on the control socket"),
        (b"{\"fds\":0,\"message\":{\"socket\":\"x\"}}\n", "c: a descriptor is missing in a takeover"),
        (b"{\"fds\":0,\"message\":{\"error\":\"no, thanks\"}}\n", "hands nothing over: no, thanks"),
    ];
    for (answer, says) in cases {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        ok(dir, &["create", "d.raw", "--size", "16M"]);
        let old = answer_once(dir, answer);
        let said = refused(dir, &ARGS);
        assert!(said.contains(says), "{answer:?}: {said}");
        assert!(old.join().unwrap().contains("take_over"));
        assert_eq!(names_in(dir), ["c", "d.raw"], "it leaves nothing behind");
    }
}

#[test]
fn a_successor_that_fails_once_it_was_ready_leaves_the_names_alone() {
    let (dir, mut served) = start();
    let dir = dir.path();
    let (_device, mut queue) = guest(&dir.join("v"));
    queue.write(0, &[4; 512]).unwrap();
    // A socket of its own is in the way only when all else is done.
    fs::write(dir.join("n2"), "no socket").unwrap();
    let said = refused(dir, &[&ARGS[..], &["--nbd", "unix:n2"]].concat());
    assert!(said.contains("n2: a file that is no socket is in the way"), "{said}");
    assert_eq!(queue.read(0, 512).unwrap(), [4; 512]);
    answers_nbd(dir);
    assert_eq!(names_in(dir), ["c", "d.raw", "n", "n2", "v"]);
    served.signal(Signal::SIGTERM);
    assert!(served.wait().success());
    let said = rest_of_stderr(&mut served);
    assert!(said.contains("nothing is handed over: the successor has ended before it served"), "{said}");
}

/// True when a process has this file open.
fn has_open(pid: u32, path: &Path) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files.filter_map(|file| fs::read_link(file.path()).ok()).any(|found| found == path)
}

#[test]
fn a_successor_that_hangs_with_the_disk_open_is_ended_and_the_old_server_goes_on() {
    let (dir, mut served) = start();
    let dir = &dir.path().canonicalize().unwrap();
    ok(dir, &["create", "late.raw", "--size", "1M"]);
    let (_device, mut queue) = guest(&dir.join("v"));
    queue.write(0, &[1; 512]).unwrap();
    // Its second disk is in use elsewhere, and it waits for that: time to stop it while it has the first one open.
    let file = fs::File::options().write(true).open(dir.join("late.raw")).unwrap();
    fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
    let mut command = crate::common::spile();
    command.args(["serve", "d.raw", "late.raw,name=late", "--vhost-user", "v", "--nbd", "unix:n"]);
    command.args(["--takeover", "--control", "c"]).current_dir(dir).stdout(Stdio::null());
    let mut hanging = Served { child: command.spawn().unwrap(), socket: dir.join("v") };
    eventually("it has the disk open", || has_open(hanging.child.id(), &dir.join("d.raw")));
    hanging.signal(Signal::SIGSTOP);
    complains(&mut served, "hangs with the disks open, and was ended");
    assert_eq!(hanging.wait().code(), None, "a signal has ended it");
    queue.write(512, &[2; 512]).unwrap();
    assert_eq!(queue.read(0, 512).unwrap(), [1; 512]);
    assert!(served.terminate().success());
}

/// A caller that stops in the middle of a takeover, and after how much of it.
#[test]
fn a_caller_that_says_nothing_holds_up_nobody() {
    let (dir, served) = start();
    let dir = dir.path();
    let (_device, mut queue) = guest(&dir.join("v"));
    let silent = Link::connect(&dir.join("c")).unwrap().expect("a server is there");
    queue.write(0, &[1; 512]).unwrap();
    // A whole takeover comes in between.
    let served = succeed(dir, &ARGS, served);
    assert_eq!(queue.read(0, 512).unwrap(), [1; 512]);
    drop(silent);
    assert!(served.terminate().success());
}

#[test]
fn an_old_server_that_hangs_is_spoken_of_and_goes_on_when_it_wakes_up() {
    let (dir, mut served) = start();
    let dir = dir.path();
    let (_device, mut queue) = guest(&dir.join("v"));
    queue.write(0, &[1; 512]).unwrap();
    served.signal(Signal::SIGSTOP);
    let mut command = crate::common::spile();
    command.arg("serve").args(ARGS).args(["--takeover", "--control", "c"]).current_dir(dir);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut successor = Served { child: command.spawn().unwrap(), socket: dir.join("v") };
    complains(&mut successor, "has not answered in the takeover for 5 s: it is waited for, at most 120 s");
    served.signal(Signal::SIGCONT);
    assert!(served.wait().success());
    assert!(rest_of_stderr(&mut served).contains(&format!("(process {}) serves", successor.child.id())));
    assert_eq!(queue.read(0, 512).unwrap(), [1; 512]);
    assert!(successor.terminate().success());
}

#[test]
fn a_successor_that_has_everything_and_hangs_is_spoken_of() {
    let (dir, mut served) = start();
    let mut inheritance = take(dir.path());
    inheritance.confirm().unwrap();
    complains(&mut served, "has everything and does not say that it serves");
    assert!(served.wait().success());
}

#[test]
fn a_lack_of_descriptors_after_a_failed_takeover_is_waited_for() {
    let (dir, mut served) = start();
    let dir = dir.path();
    let (_device, mut queue) = guest(&dir.join("v"));
    queue.write(0, &[1; 512]).unwrap();
    let inheritance = take(dir);
    let pid = rustix::process::Pid::from_raw(served.child.id() as i32);
    let limit = |current| {
        let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
        let limit = Rlimit { current: Some(current), maximum };
        rustix::process::prlimit(pid, Resource::Nofile, limit).unwrap();
    };
    limit(3);
    drop(inheritance);
    complains(&mut served, "the disks are tried again");
    limit(1024);
    assert_eq!(queue.read(0, 512).unwrap(), [1; 512]);
    answers_nbd(dir);
    assert!(served.terminate().success());
}

/// After a takeover that fails the old server opens its disks again, by their paths. Another file may lie there by now.
#[test]
fn another_disk_in_the_place_of_one_that_was_served_is_not_served_after_a_failed_takeover() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for disk in ["d.raw", "other.raw"] {
        ok(dir, &["create", disk, "--size", "64M"]);
    }
    let mut served = serve(dir, &["d.raw", "--nbd", "unix:n"]);
    fs::rename(dir.join("d.raw"), dir.join("moved.raw")).unwrap();
    fs::rename(dir.join("other.raw"), dir.join("d.raw")).unwrap();
    // The successor names the disk that is served, and another one that it cannot open.
    fs::write(dir.join("bad.vhd"), [0; 4096]).unwrap();
    refused(dir, &["moved.raw", "bad.vhd", "--nbd", "unix:n"]);
    assert_eq!(served.wait().code(), Some(1));
    let said = rest_of_stderr(&mut served);
    assert!(said.contains("another disk lies in the place"), "{said}");
}
