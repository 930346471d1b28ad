//! `spile serve`: from create to check, its sockets, its signals, its silence when idle.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::nbd::{Client, raw_connection, read_request};
use crate::common::{Served, assert_silent, engines, eventually, fails, have, json, load_at_work, ok, spile};
use nix::sys::signal::Signal;

#[test]
fn created_served_loaded_ended_checked_and_compared() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.vhd", "--size", "64M"]);
    let served = Served::start(dir, &["d.vhd"]);
    let uri = served.uri().to_string();
    let load = ["load", &uri, "--rw", "randrw", "--ios", "3000", "--verify", "--connections", "2"];
    assert_eq!(json(dir, &load)["mismatches"], serde_json::json!([]));
    let socket = served.socket.clone();
    assert!(served.terminate().success());
    assert!(!socket.exists(), "the socket is removed");
    assert_eq!(json(dir, &["check", "d.vhd"])["result"], "sound");
    ok(dir, &["convert", "d.vhd", "d.raw"]);
    ok(dir, &["compare", "d.vhd", "d.raw"]);
    if have("qemu-img", "compare with qemu-img") {
        let args = ["compare", "-f", "vpc", "-F", "raw", "d.vhd", "d.raw"];
        assert!(Command::new("qemu-img").args(args).current_dir(dir).status().unwrap().success());
    }
}

#[test]
fn several_exports_are_told() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a,b.raw"), [7; 4096]).unwrap();
    let args = ["a,,b.raw,read-only", "mem:1M,name=scratch", "null:2M"];
    let served = Served::start(dir.path(), &args);
    for (name, is_there) in [("", true), ("a,b", true), ("null", true), ("scratch", true), ("b", false)] {
        assert_eq!(Client::connect(&served.export(name)).is_ok(), is_there, "{name:?}");
    }
    let a = Client::connect(&served.uri()).unwrap();
    assert!(a.facts().is_read_only() && a.facts().size_bytes == 4096);
    let mut bytes = [0; 512];
    a.read(512, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 512]);
    a.write(0, &bytes, false).unwrap_err();
    let scratch = Client::connect(&served.export("scratch")).unwrap();
    scratch.write(3, b"hello", true).unwrap();
    scratch.write_zeroes(4, 2).unwrap();
    scratch.flush().unwrap();
    assert_eq!(Client::connect(&served.export("null")).unwrap().facts().size_bytes, 2 << 20);
    drop(scratch);
    assert!(served.terminate().success());
}

#[test]
fn every_export_and_address_has_a_line() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = spile();
    command.args(["serve", "mem:20M,name=x", "--nbd", "unix:s", "--nbd", "tcp:127.0.0.1:0"]);
    let child = command.current_dir(dir.path()).stdout(Stdio::piped()).spawn().unwrap();
    let mut served = Served { child, socket: dir.path().join("s") };
    eventually("the socket is there", || served.socket.exists());
    served.signal(Signal::SIGINT);
    assert!(served.wait().success());
    let mut out = String::new();
    served.child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 5, "{out}");
    let (engine, lines) = lines.split_last().unwrap();
    assert!(engine.starts_with("engine "), "{out}");
    assert!(lines.iter().all(|line| line.starts_with("serving mem (20 MiB raw) as nbd")), "{out}");
    assert!(lines[0].contains("nbd+unix:///?socket=/") && lines[2].contains("nbd+unix:///x?"), "{out}");
    assert!(lines[1].contains("nbd://127.0.0.1:") && !lines[1].contains(":0/"), "{out}");
}

#[test]
fn a_second_server_is_told_that_the_socket_and_the_disk_are_busy() {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "d.raw", "--size", "1M"]);
    let served = Served::start(dir.path(), &["d.raw"]);
    let err = fails(dir.path(), 1, &["serve", "mem:1M", "--nbd", "unix:nbd.sock"]);
    assert!(err.contains("nbd.sock") && err.contains("another server listens"), "{err}");
    let err = fails(dir.path(), 1, &["serve", "d.raw", "--nbd", "unix:other.sock"]);
    assert!(err.contains("d.raw"), "{err}");
    assert_eq!(names_in(dir.path()), ["d.raw", "nbd.sock"], "nothing is left behind");
    // The socket of a server that was killed is replaced.
    served.kill();
    assert!(dir.path().join("nbd.sock").exists());
    assert!(Served::start(dir.path(), &["d.raw"]).terminate().success());
    assert_eq!(names_in(dir.path()), ["d.raw"]);
}

fn names_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn requests_in_flight_are_answered_before_the_end() {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "d.vhd", "--size", "64M"]);
    let served = Served::start(dir.path(), &["d.vhd"]);
    let options = spile::load::Options {
        pattern: spile::load::Pattern { random: true, read_percent: 0 },
        verify: true,
        ..spile::load::Options::new(served.uri())
    };
    let load = load_at_work(options);
    assert!(served.terminate().success());
    let outcome = load.join().unwrap();
    assert!(outcome.error.is_some() && outcome.models[0].acknowledged_blocks() > 0);
    let served = Served::start(dir.path(), &["d.vhd"]);
    let (_, mismatches) = spile::load::verify(&served.uri(), &outcome.models).unwrap();
    assert_eq!(mismatches, []);
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut served = Served::start(dir.path(), &["mem:64M"]);
    // A client that asks for much and takes nothing keeps the server draining.
    let mut stream = raw_connection(&served.socket);
    for cookie in 0..100 {
        stream.write_all(&read_request(cookie, 32 << 20)).unwrap();
    }
    stream.read_exact(&mut [0; 16]).unwrap();
    served.signal(Signal::SIGTERM);
    let refused = || Client::connect(&served.uri()).is_err();
    eventually("it stops accepting", refused);
    assert!(served.child.try_wait().unwrap().is_none(), "it drains");
    served.signal(Signal::SIGINT);
    assert_eq!(served.wait().code(), Some(130));
    assert!(!served.socket.exists(), "the name goes first");
}

#[test]
fn systemd_passes_a_socket_and_is_told_the_state() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, notify) = (dir.path().join("nbd.sock"), dir.path().join("notify"));
    let listener = UnixListener::bind(&socket).unwrap();
    let manager = UnixDatagram::bind(&notify).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
    // The socket is the shell's standard input; it moves it to where systemd would pass it.
    let script = "exec 3<&0 0</dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" serve mem:1M";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_spile")]).env("NOTIFY_SOCKET", &notify);
    command.stdin(std::os::fd::OwnedFd::from(listener));
    let served = Served::spawn(&mut command, socket.clone()).unwrap();
    let state = || {
        let mut text = [0; 64];
        let len = manager.recv(&mut text).unwrap();
        String::from_utf8_lossy(&text[..len]).into_owned()
    };
    assert_eq!(state(), "READY=1");
    assert_eq!(Client::connect(&served.uri()).unwrap().facts().size_bytes, 1 << 20);
    assert!(served.terminate().success());
    assert_eq!(state(), "STOPPING=1");
    assert!(socket.exists(), "the socket is systemd's to remove");
}

#[test]
fn twenty_idle_exports_wake_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let disks: Vec<String> = (0..20).map(|n| format!("d{n}.vhd")).collect();
    for disk in &disks {
        ok(dir.path(), &["create", disk, "--size", "16M"]);
    }
    let disks: Vec<&str> = disks.iter().map(String::as_str).collect();
    for engine in engines(dir.path(), "idle") {
        let served = Served::start(dir.path(), &[&disks[..], &["--engine", engine]].concat());
        let pid = served.child.id();
        assert_silent(pid, &format!("{engine}, nobody connected"));
        let clients: Vec<Client> =
            (0..20).map(|n| Client::connect(&served.export(&format!("d{n}"))).unwrap()).collect();
        for client in &clients {
            client.write(0, &[1; 4096], false).unwrap();
            client.flush().unwrap();
        }
        assert_silent(pid, &format!("{engine}, 20 clients connected"));
        drop(clients);
        assert!(served.terminate().success());
    }
}

#[test]
fn every_engine_and_cache_mode_serves() {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "base.vhd", "--size", "16M"]);
    for engine in engines(dir.path(), "serve") {
        for cache in ["direct", "page"] {
            let name = format!("{engine}-{cache}.vhd");
            ok(dir.path(), &["create", &name, "--parent", "base.vhd"]);
            let args = [&name, "--engine", engine, "--cache", cache, "--workers", "3"];
            let served = Served::start(dir.path(), &args);
            let uri = served.uri().to_string();
            let args = ["load", &uri, "--rw", "randrw", "--ios", "1000", "--verify"];
            ok(dir.path(), &[&args[..], &["--connections", "3", "--bs", "1k"]].concat());
            assert!(served.terminate().success());
            assert_eq!(json(dir.path(), &["check", &name])["result"], "sound", "{name}");
        }
    }
}

#[test]
fn bad_disks_and_addresses_are_refused_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("bad.vhd"), [7; 4096]).unwrap();
    fs::write(dir.join("noext"), [0; 4096]).unwrap();
    let cases: [(&[&str], i32, &str); 8] = [
        (&["mem:1M"], 2, "nowhere to listen"),
        (&["bad.vhd", "--nbd", "unix:s"], 1, "bad.vhd"),
        (&["noext", "--nbd", "unix:s"], 2, "--format"),
        (&["gone.raw", "--nbd", "unix:s"], 1, "gone.raw"),
        (&["mem:1M", "--nbd", "unix:noext"], 1, "no socket is in the way"),
        (&["mem:1M", "mem:1M", "--nbd", "unix:s"], 2, "two exports are named 'mem'"),
        (&["mem:1M,frobnicate", "--nbd", "unix:s"], 2, "frobnicate"),
        (&["mem:1M", "--nbd", "udp:x"], 2, "unix:PATH or tcp:HOST:PORT"),
    ];
    for (args, code, says) in cases {
        let err = fails(dir, code, &[&["serve"], args].concat());
        assert!(err.contains(says), "{args:?}: {err}");
        assert_eq!(names_in(dir), ["bad.vhd", "noext"], "{args:?} leaves nothing behind");
    }
}

#[test]
fn it_serves_also_when_nobody_reads_its_output() {
    let dir = tempfile::tempdir().unwrap();
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let mut command = spile();
    command.args(["serve", "mem:1M", "--nbd", "unix:s"]).current_dir(dir.path()).stdout(full);
    let served = Served { child: command.spawn().unwrap(), socket: dir.path().join("s") };
    eventually("the socket is there", || served.socket.exists());
    Client::connect(&served.uri()).unwrap().write(0, &[1; 512], true).unwrap();
    assert!(served.terminate().success());
    assert_eq!(names_in(dir.path()), Vec::<String>::new());
}

#[test]
fn a_request_that_fails_is_told_on_stderr() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("d.raw");
    fs::write(&disk, [7; 1 << 20]).unwrap();
    let mut served = Served::start(dir.path(), &["d.raw"]);
    let client = Client::connect(&served.uri()).unwrap();
    // The ground is pulled away.
    fs::File::options().write(true).open(&disk).unwrap().set_len(4096).unwrap();
    client.read(512 << 10, &mut [0; 4096]).unwrap_err();
    served.signal(Signal::SIGTERM);
    served.wait();
    let mut err = String::new();
    served.child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert!(err.contains("spile: NBD request failed") && err.contains("d.raw"), "{err}");
}

/// A socket's path has 107 bytes at most, a file's name 255.
#[test]
fn a_disk_of_a_long_name_is_found_by_every_command() {
    let dir = tempfile::tempdir().unwrap();
    let disks = ["a", "b"].map(|last| format!("{}{last}.vhd", "n".repeat(200)));
    let serve = |disk: &str, socket: &str, folder: &std::path::Path| {
        let mut command = crate::common::spile();
        command.args(["serve", disk, "--nbd", &format!("unix:{socket}")]).env("SPILE_RUN_DIR", folder);
        Served::spawn(command.current_dir(dir.path()), dir.path().join(socket)).unwrap()
    };
    for folder in [dir.path().join("run"), dir.path().join("r".repeat(120))] {
        let spile = |args: &[&str]| {
            let mut command = crate::common::spile();
            let out = command.args(args).env("SPILE_RUN_DIR", &folder).current_dir(dir.path()).output().unwrap();
            assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
            String::from_utf8(out.stdout).unwrap()
        };
        let served: Vec<_> = disks
            .iter()
            .zip(["x", "y"])
            .map(|(disk, socket)| {
                spile(&["create", disk, "--size", "4M"]);
                serve(disk, socket, &folder)
            })
            .collect();
        for disk in &disks {
            spile(&["checkpoint", disk, "c0"]);
            spile(&["snapshot", disk, "--name", &format!("s-{}", &disk[190..201])]);
            spile(&["show", disk.strip_suffix(".vhd").unwrap()]);
        }
        assert!(served.into_iter().all(|served| served.terminate().success()));
        std::fs::read_dir(dir.path()).unwrap().flatten().filter(|entry| entry.path().is_file()).for_each(|entry| {
            std::fs::remove_file(entry.path()).unwrap();
        });
    }
}

/// In a chroot or a namespace without /proc.
#[test]
fn without_proc_disks_are_made_and_servers_say_what_they_need() {
    let dir = tempfile::tempdir().unwrap();
    let without = |args: &str| {
        let script = format!("mount -t tmpfs none /proc && exec \"$0\" {args}");
        let mut command = std::process::Command::new("unshare");
        command.args(["-rm", "sh", "-c", &script, env!("CARGO_BIN_EXE_spile")]).current_dir(dir.path());
        let out = command.env("SPILE_RUN_DIR", dir.path().join("run")).output().unwrap();
        (out.status.success(), String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned())
    };
    let tried = std::process::Command::new("unshare").args(["-rm", "mount", "-t", "tmpfs", "none", "/proc"]).output();
    if !tried.is_ok_and(|out| out.status.success()) {
        return println!("SKIP without /proc: this user may make no namespaces");
    }
    for args in [
        "create a.vhd --size 8M",
        "create b.qcow2 --size 8M",
        "convert a.vhd c.raw",
        "resize a.vhd 16M",
        "snapshot a.vhd --name s",
    ] {
        let (is_done, said) = without(args);
        assert!(is_done || said.contains("/proc"), "{args}: {said}");
        assert!(is_done || !args.starts_with("c"), "{args}: {said}");
    }
    let (is_done, said) = without("serve a.vhd --nbd unix:n");
    assert!(!is_done && said.contains("/proc/self/fd is not there, and a server needs it"), "{said}");
    ok(dir.path(), &["check", "a.vhd"]);
}
