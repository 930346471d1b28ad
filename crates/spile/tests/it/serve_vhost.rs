//! `spile serve --vhost-user`: what is said on the command line, and what a guest then finds at the socket.

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::common::guests::{guest, names_in, nbd, open_files, serve, serve_again, try_serve};
use crate::common::nbd::Client;
use crate::common::{Served, eventually, fails, have, ok, run, spile};
use nix::sys::signal::Signal;
use spile_lab::GuestQueue;
use spile_lab::vhost::proto::feature;
use spile_lab::vhost::{Device, DeviceOptions};

const MIB: u64 = 1 << 20;

#[test]
fn what_makes_no_sense_is_refused_with_a_reason_and_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("file"), "precious").unwrap();
    let long = "x".repeat(120);
    let cases: [(&[&str], i32, &str); 19] = [
        (&["--vhost-user", ""], 2, "the PATH of the socket is empty"),
        (&["--vhost-user", ",export=x"], 2, "the PATH of the socket is empty"),
        (&["--vhost-user", "v,disk=x"], 2, "`disk=x` is not an option; use export=NAME"),
        (&["--vhost-user", "v,1"], 2, "a comma in the path is doubled"),
        (&["--vhost-user", "v", "--queues", "0"], 2, "--queues"),
        (&["--vhost-user", "v", "--queues", "257"], 2, "--queues"),
        (&["--vhost-user", "v", "--poll", "10001"], 2, "--poll"),
        (&["--vhost-user", "v", "--control", "none", "--takeover"], 2, "--control"),
        (&[], 2, "there is nowhere to listen (say --vhost-user PATH"),
        (&["--control", "c"], 2, "there is nowhere to listen"),
        (&["--control", "c", "--takeover"], 2, "there is nowhere to listen"),
        (&["--vhost-user", "v,export=y"], 1, "no disk is exported as \"y\" (the exports are \"\", \"x\")"),
        (&["--vhost-user", "v", "--vhost-user", "w,export=y"], 1, "no disk is exported as \"y\""),
        (&["--vhost-user", "v", "--nbd", "unix:./v"], 2, "/v is given twice"),
        (&["--vhost-user", "v", "--vhost-user", "v"], 2, "/v is given twice"),
        (&["--vhost-user", "file"], 1, "file: a file that is no socket is in the way (remove it"),
        (&["--vhost-user", "v", "--control", "file"], 1, "file: a file that is no socket is in the way"),
        (&["--vhost-user", "gone/v"], 1, "gone/v: cannot listen on this socket: No such file or directory"),
        (&["--vhost-user", &long], 2, "(choose a shorter path)"),
    ];
    for (args, code, says) in cases {
        let err = fails(dir, code, &[&["serve", "null:1M,name=x"], args].concat());
        assert!(err.contains(says), "{args:?}: {err}");
        assert_eq!(names_in(dir), ["file"], "{args:?} leaves nothing behind");
    }
    assert_eq!(fs::read(dir.join("file")).unwrap(), b"precious");
}

#[test]
fn a_guest_finds_its_disk() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir(dir.join("sub")).unwrap();
    for (disk, size) in [("a.raw", "16M"), ("b.vhd", "32M"), ("c.raw", "48M")] {
        ok(dir, &["create", disk, "--size", size]);
    }
    let disks = ["a.raw", "b.vhd,name=y,serial=twenty-bytes-and-mor", "c.raw,read-only"];
    let sockets = ["--vhost-user", "sub/a,,1", "--vhost-user", "./b,export=y", "--vhost-user", "ro,export=c"];
    let served = serve(dir, &[&disks[..], &sockets, &["--queues", "3", "--nbd", "unix:n"]].concat());
    assert_eq!(names_in(&dir.join("sub")), ["a,1"]);
    let expected = [("sub/a,1", 16, false, "a"), ("b", 32, false, "twenty-bytes-and-mor"), ("ro", 48, true, "c")];
    for (socket, mib, read_only, serial) in expected {
        let (device, mut queue) = guest(&dir.join(socket));
        assert_eq!((device.config().size_bytes(), device.max_queues()), (mib * MIB, 3), "{socket}");
        assert_eq!(device.features() & feature::BLK_RO != 0, read_only, "{socket}");
        assert_eq!(queue.disk_id().unwrap(), serial.as_bytes());
        assert_eq!(queue.write(0, &[mib as u8; 512]).is_ok(), !read_only);
    }
    // NBD clients see what guests wrote.
    let mut bytes = [0; 512];
    Client::connect(&nbd(dir, "y")).unwrap().read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [32; 512]);
    assert!(served.terminate().success());
    assert_eq!(names_in(dir), ["a.raw", "b.vhd", "c.raw", "sub"]);
    assert_eq!(names_in(&dir.join("sub")), Vec::<String>::new());
}

#[test]
fn every_way_to_a_disk_has_a_line() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = spile();
    command.args(["serve", "mem:1M", "mem:2M,name=x", "--vhost-user", "v", "--vhost-user", "w", "--vhost-user"]);
    command.args(["u,export=x", "--nbd", "unix:n", "--control", "c"]).current_dir(dir.path());
    let child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut served = Served { child, socket: dir.path().join("n") };
    eventually("the sockets are there", || names_in(dir.path()) == ["c", "n", "u", "v", "w"]);
    served.signal(nix::sys::signal::Signal::SIGINT);
    assert!(served.wait().success());
    let mut out = String::new();
    served.child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    let guests = |size: &str, socket: &str| {
        let socket = dir.path().join(socket);
        format!("serving mem ({size} raw) to guests by vhost-user on unix:{}", socket.display())
    };
    for line in [guests("1 MiB", "v"), guests("1 MiB", "w"), guests("2 MiB", "u")] {
        assert_eq!(out.lines().filter(|other| **other == *line).count(), 1, "{line}\n{out}");
    }
    assert_eq!(out.lines().filter(|line| line.contains("as nbd+unix:///")).count(), 3, "{out}");
}

#[test]
fn sockets_of_a_killed_server_are_replaced_and_those_of_a_live_one_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.raw", "--size", "16M"]);
    let args = ["d.raw", "--vhost-user", "v", "--vhost-user", "w", "--nbd", "unix:n"];
    let served = serve(dir, &args);
    for taken in [&["--vhost-user", "v"][..], &["--nbd", "unix:n"], &["--nbd", "unix:m", "--control", "c"]] {
        let err = fails(dir, 1, &[&["serve", "null:1M"], taken].concat());
        assert!(err.contains("another server listens on this socket"), "{taken:?}: {err}");
    }
    let (_device, mut queue) = guest(&dir.join("v"));
    queue.write(0, &[3; 512]).unwrap();
    served.kill();
    assert_eq!(names_in(dir), ["c", "d.raw", "n", "v", "w"]);
    let served = serve_again(dir, &args);
    for socket in ["v", "w"] {
        let (_device, mut queue) = guest(&dir.join(socket));
        assert_eq!(queue.read(0, 512).unwrap(), [3; 512]);
    }
    assert!(served.terminate().success());
    assert_eq!(names_in(dir), ["d.raw"]);
}

/// A disk that has come from another host is its guest's from then on, whatever else comes and goes on its server.
#[test]
fn a_disk_that_has_come_stays_no_export_when_others_are_attached_and_detached() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.raw", "--size", "1M"]);
    let served = serve(dir, &["a.raw", "--vhost-user", "v,incoming", "--nbd", "unix:n"]);
    let is_export =
        |name: &str| Client::connect(&served.export(name)).is_ok_and(|client| client.read(0, &mut [0; 512]).is_ok());
    let resume = || {
        let out = spile().args(["resume", "c"]).current_dir(dir).output().unwrap();
        (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    assert!(is_export(""));
    // A copy that has failed, by the same program, and one that is whole.
    let onto = served.export("").to_string();
    ok(dir, &["create", "larger.raw", "--size", "2M"]);
    assert!(!spile().args(["convert", "larger.raw", &onto]).current_dir(dir).status().unwrap().success());
    let (is_resumed, said) = resume();
    assert!(!is_resumed && said.contains("the copy may be half"), "{said}");
    ok(dir, &["create", "same.raw", "--size", "1M"]);
    ok(dir, &["convert", "same.raw", &onto]);
    eventually("the disk is let in", || resume().0);
    assert!(!is_export(""));
    ok(dir, &["attach", "c", "mem:1M,name=b"]);
    assert_eq!((is_export(""), is_export("b")), (false, true));
    ok(dir, &["detach", "c", "--name", "b"]);
    assert!(!is_export(""));
    assert!(served.terminate().success());
    // Nobody has said anything: whoever says `resume` knows better.
    let served = serve(dir, &["a.raw", "--vhost-user", "v,incoming", "--nbd", "unix:n"]);
    let is_export =
        |name: &str| Client::connect(&served.export(name)).is_ok_and(|client| client.read(0, &mut [0; 512]).is_ok());
    assert!(!resume().0 && is_export(""));
    // The client that has just looked is gone in a moment.
    let resume_as_it_is = || run(dir, &["resume", "c", "--as-it-is"]).status.success();
    eventually("the disk is let in as it is", resume_as_it_is);
    assert!(!is_export(""));
    assert!(served.terminate().success());
}

/// Two servers, `here` with a disk of that name, which is mirrored to the other one.
struct Mirrored {
    dir: tempfile::TempDir,
    here: Served,
    there: Served,
    job: String,
}

impl Mirrored {
    fn begin() -> Self {
        Self::begin_with(&[])
    }

    /// The other server has these options, too.
    fn begin_with(options: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let start = |name: &str, socket: &str, more: &[&str]| {
            ok(dir.path(), &["create", &format!("{name}.raw"), "--size", "1M"]);
            let mut command = spile();
            command.args(["serve", &format!("{name}.raw"), "--nbd", &format!("unix:{socket}")]).args(more);
            command.env("SPILE_RUN_DIR", dir.path().join("run")).current_dir(dir.path());
            Served::spawn(&mut command, dir.path().join(socket)).unwrap()
        };
        let (here, there) = (start("here", "n", &["--vhost-user", "v"]), start("there", "m", options));
        let mut mirrored = Self { dir, here, there, job: String::new() };
        let to = format!("nbd+unix:///?socket={}", mirrored.dir.path().join("m").display());
        assert!(mirrored.spile(&["move", "here", "--to", &to, "--mirror-only"]).0);
        eventually("a copy in step", || mirrored.spile(&["jobs"]).1.contains("in step"));
        let jobs: serde_json::Value = serde_json::from_str(&mirrored.spile(&["jobs", "--json"]).1).unwrap();
        mirrored.job = jobs["jobs"][0]["id"].as_str().unwrap().to_owned();
        mirrored
    }

    /// What an operator types here: whether it succeeds, and what it says.
    fn spile(&self, args: &[&str]) -> (bool, String) {
        let mut command = spile();
        command.args(args).env("SPILE_RUN_DIR", self.dir.path().join("run")).current_dir(self.dir.path());
        let out = command.output().unwrap();
        (out.status.success(), String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned())
    }

    fn hand_over(&self) -> (bool, String) {
        self.spile(&["job", &self.job, "hand-over"])
    }

    fn is_export(&self) -> bool {
        Client::connect(&self.here.uri()).is_ok_and(|client| client.read(0, &mut [0; 512]).is_ok())
    }
}

/// From the hand-over on nobody writes to the disk here, until somebody says that it stays here.
#[test]
fn a_disk_that_was_handed_over_is_no_export_until_it_stays_here_after_all() {
    let mirrored = Mirrored::begin();
    // One that is refused changes nothing.
    let client = Client::connect(&mirrored.here.uri()).unwrap();
    client.write(0, &[1; 512], true).unwrap();
    let (is_done, said) = mirrored.hand_over();
    assert!(!is_done && said.contains("an NBD client is connected"), "{said}");
    client.write(0, &[2; 512], true).unwrap();
    drop(client);
    assert!(mirrored.is_export());
    eventually("the hand-over", || mirrored.hand_over().0);
    assert!(!mirrored.is_export());
    assert!(mirrored.spile(&["resume", "here"]).0 && mirrored.is_export());
    assert!(mirrored.here.terminate().success() && mirrored.there.terminate().success());
}

/// Nobody but the server itself remembers it: no guest was connected.
#[test]
fn the_server_after_one_that_was_killed_knows_that_the_disk_was_handed_over() {
    let mirrored = Mirrored::begin();
    let dir = mirrored.dir.path().to_owned();
    eventually("the hand-over", || mirrored.hand_over().0);
    mirrored.here.signal(Signal::SIGKILL);
    // No command changes what a guest elsewhere goes on with.
    for args in
        [&["snapshot", "here.raw", "--name", "s"][..], &["resize", "here.raw", "2M"], &["checkpoint", "here.raw", "c"]]
    {
        let (is_done, said) = mirrored.spile(args);
        assert!(!is_done && said.contains("was handed over to another host"), "{args:?}: {said}");
    }
    assert!(mirrored.spile(&["info", "here.raw"]).0);
    let mut command = spile();
    command.args(["serve", "here.raw", "--nbd", "unix:n2", "--vhost-user", "v2"]).current_dir(&dir);
    command.env("SPILE_RUN_DIR", dir.join("run"));
    let again = Served::spawn(&mut command, dir.join("n2")).unwrap();
    let is_export = || Client::connect(&again.uri()).is_ok_and(|client| client.read(0, &mut [0; 512]).is_ok());
    assert!(!is_export() && mirrored.spile(&["ls", "--json"]).1.contains("handed_over"));
    assert!(mirrored.spile(&["resume", "here"]).0 && is_export());
    again.kill();
    // It stays here.
    assert!(mirrored.spile(&["resize", "here.raw", "2M"]).0);
    assert!(mirrored.there.terminate().success());
}

/// The host that copies has died: what it has left is no disk for a guest until somebody says so.
#[test]
fn a_copy_that_was_not_handed_over_is_no_disk_where_it_has_come() {
    let mirrored = Mirrored::begin_with(&["--vhost-user", "w,incoming"]);
    let (dir, there) = (mirrored.dir.path().to_owned(), mirrored.there.export(""));
    let resume = |more: &[&str]| mirrored.spile(&[&["resume", "there"], more].concat());
    assert!(resume(&[]).1.contains("still writes to the disk"));
    mirrored.here.signal(Signal::SIGKILL);
    eventually("the link's end", || resume(&[]).1.contains("the copy may be half"));
    // Who only looks, and says good-bye, tells nothing of the copy.
    let uri = there.to_string();
    assert!(mirrored.spile(&["info", &uri]).0);
    assert!(resume(&[]).1.contains("the copy may be half"));
    let mut command = spile();
    command.args(["serve", "here.raw", "--nbd", "unix:n2", "--vhost-user", "v2"]).current_dir(&dir);
    command.env("SPILE_RUN_DIR", dir.join("run"));
    let again = Served::spawn(&mut command, dir.join("n2")).unwrap();
    eventually("a copy in step", || mirrored.spile(&["jobs"]).1.contains("in step"));
    let jobs: serde_json::Value = serde_json::from_str(&mirrored.spile(&["jobs", "--json"]).1).unwrap();
    let job = jobs["jobs"][0]["id"].as_str().unwrap();
    eventually("the hand-over", || mirrored.spile(&["job", job, "hand-over"]).0);
    eventually("the disk is let in", || resume(&[]).0);
    assert!(again.terminate().success() && mirrored.there.terminate().success());
}

/// The other host gives no answer: nobody knows whether it has the disk, so no guest goes on here by itself.
#[test]
fn a_hand_over_without_an_answer_keeps_the_disk_shut() {
    let mirrored = Mirrored::begin();
    mirrored.there.signal(Signal::SIGSTOP);
    let (is_done, said) = mirrored.hand_over();
    assert!(!is_done && said.contains("it is not known whether the other host has the disk"), "{said}");
    assert!(mirrored.spile(&["ls", "--json"]).1.contains("handed_over") && !mirrored.is_export());
    // The other host may still answer, and have the disk. A name is not enough while a server does not say what it has.
    let (is_resumed, said) = mirrored.spile(&["resume", "here.raw"]);
    assert!(!is_resumed && said.contains(&format!("spile job {} cancel", mirrored.job)), "{said}");
    mirrored.there.signal(Signal::SIGCONT);
    // It may have come to its end by now.
    let (is_cancelled, said) = mirrored.spile(&["job", &mirrored.job, "cancel"]);
    assert!(is_cancelled || said.contains("over") || said.contains("done"), "{said}");
    eventually("the disk is let in", || mirrored.spile(&["resume", "here"]).0);
    assert!(mirrored.is_export());
    assert!(mirrored.here.terminate().success() && mirrored.there.terminate().success());
}

#[test]
fn sockets_that_systemd_passes_are_for_nbd_beside_those_for_guests() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let listener = UnixListener::bind(dir.join("n")).unwrap();
    let script = "exec 3<&0 0</dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" serve mem:1M --vhost-user v";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_spile")]).current_dir(dir);
    command.stdin(std::os::fd::OwnedFd::from(listener));
    let served = Served::spawn(&mut command, dir.join("n")).unwrap();
    Client::connect(&served.uri()).unwrap().write(0, &[6; 512], false).unwrap();
    let (_device, mut queue) = guest(&dir.join("v"));
    assert_eq!(queue.read(0, 512).unwrap(), [6; 512]);
    assert!(served.terminate().success());
    assert_eq!(names_in(dir), ["n"], "the socket is systemd's to remove");
}

#[test]
fn guests_come_and_go_and_leave_nothing_open() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let served = try_serve(dir, &["mem:16M", "--vhost-user", "v", "--vhost-user", "w"]).unwrap();
    let before = open_files(&served);
    for round in 0..10 {
        let (first, mut queue) = guest(&dir.join("v"));
        let (second, mut other) = guest(&dir.join("w"));
        queue.write(round * 4096, &[round as u8; 4096]).unwrap();
        assert_eq!(other.read(round * 4096, 4096).unwrap(), [round as u8; 4096], "two sockets of one disk");
        drop((first, second));
        drop((Device::connect(&dir.join("v"), DeviceOptions::default()), UnixStream::connect(dir.join("w"))));
        eventually("all is closed", || open_files(&served) <= before);
    }
    assert!(served.terminate().success());
}

/// The limit on open files that a process starts with suits few guests: a server takes what it is allowed.
#[test]
fn many_guests_fit_where_the_hard_limit_lets_them() {
    const TEST: &str = "many guests under a low soft limit";
    if !have("prlimit", TEST) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let disks: Vec<String> = (0..4).map(|n| format!("d{n}.raw")).collect();
    disks.iter().for_each(|disk| drop(ok(dir, &["create", disk, "--size", "16M"])));
    let ways: Vec<String> = (0..4).map(|n| format!("--vhost-user=v{n},export=d{n}")).collect();
    let start = |extra: &[&str]| {
        let mut command = Command::new("prlimit");
        command.args(["--nofile=64:4096", env!("CARGO_BIN_EXE_spile"), "serve", "--control", "c"]);
        command.args(&disks).args(&ways).args(extra).current_dir(dir);
        Served::spawn(&mut command, dir.join("v0")).unwrap()
    };
    let mut old = start(&[]);
    let mut guests: Vec<_> = (0..12).map(|n| guest(&dir.join(format!("v{}", n % 4)))).collect();
    let new = start(&["--takeover"]);
    assert!(old.wait().success());
    for (number, (_, queue)) in guests.iter_mut().enumerate() {
        queue.write(number as u64 * 4096, &[number as u8; 512]).unwrap();
    }
    assert!(new.terminate().success());
}

/// What the systemd unit in docs/vhost-user.md says, with a group of this test's.
#[test]
fn members_of_the_sockets_group_may_connect_and_others_may_not() {
    const GROUP: u32 = 4242;
    let dir = tempfile::tempdir().unwrap();
    let name = "members_of_the_sockets_group_may_connect_and_others_may_not";
    if !rustix::process::geteuid().is_root() {
        return println!("SKIP {name}: only root may become another user");
    }
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let args = ["mem:1M", "--vhost-user", "v", "--nbd", "unix:n", "--socket-mode", "0660", "--socket-group", "4242"];
    let served = serve(dir.path(), &args);
    let connects = |socket: &str, group: u32| {
        // The system's own program: this one may lie where other users cannot reach it.
        let script = "import socket,sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])";
        let mut command = Command::new("python3");
        command.args(["-c", script]).arg(dir.path().join(socket)).current_dir("/").stderr(Stdio::null());
        command.uid(GROUP).gid(group).status().is_ok_and(|status| status.success())
    };
    if !have("python3", name) {
        return;
    }
    for socket in ["v", "n"] {
        assert!(connects(socket, GROUP), "{socket}: a member");
        assert!(!connects(socket, GROUP + 1), "{socket}: somebody else");
    }
    assert!(!connects("c", GROUP), "the control socket is the server's own user's");
    assert!(served.terminate().success());
}
