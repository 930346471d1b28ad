//! The life of `spile serve`: signals that do not end it, disks that are in use, very many disks, and what an end leaves behind.

use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::common::guests::{complains, rest_of_stderr};
use crate::common::mount::Mount;
use crate::common::nbd::{Client, raw_connection, raw_connection_to, read_request};
use crate::common::xen::{Xen, request};
use crate::common::{Served, engines, eventually, fails, ok, run, spile};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::fs::{FlockOperation, OFlags, fcntl_lock};
use rustix::process::{Resource, Rlimit, getrlimit, prlimit};
use spile_lab::xen::blkfront::Op;

const NOT_ENDS: [Signal; 4] = [Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGPIPE];

#[test]
fn hup_usr1_and_usr2_end_nothing_and_usr1_tells_what_was_counted() {
    let dir = tempfile::tempdir().unwrap();
    let mut served = Served::start(dir.path(), &["mem:1M,name=x"]);
    let client = Client::connect(&served.uri()).unwrap();
    client.write(0, &[1; 4096], true).unwrap();
    for signal in NOT_ENDS.into_iter().chain(NOT_ENDS) {
        served.signal(signal);
        client.read(0, &mut [0; 4096]).unwrap();
    }
    // Each is heard in the order in which it came, so this one comes last.
    std::thread::sleep(Duration::from_millis(100));
    assert!(served.socket.exists());
    served.signal(Signal::SIGTERM);
    assert!(served.wait().success());
    assert!(!served.socket.exists());
    let said = rest_of_stderr(&mut served);
    for says in [
        "SIGHUP: this server goes on",
        "statistics: disk \"x\" (mem:): ",
        "front nbd \"\": write: 1 requests, 0 failed",
    ] {
        assert!(said.contains(says), "{says}: {said}");
    }
}

#[test]
fn a_server_whose_log_nobody_reads_is_ended_by_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    let mut served = Served::start(dir.path(), &["mem:1M"]);
    let stderr = format!("/proc/{}/fd/2", served.child.id());
    let mut stderr =
        std::fs::File::options().write(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(stderr).unwrap();
    for piece in [&[b'x'; 4096][..], b"x"] {
        while stderr.write(piece).is_ok() {}
    }
    for signal in NOT_ENDS {
        served.signal(signal);
        // Signals that come together are heard in no order.
        std::thread::sleep(Duration::from_millis(50));
    }
    served.signal(Signal::SIGTERM);
    assert!(served.wait().success());
}

#[test]
fn they_do_not_end_the_processes_of_a_xen_host_either() {
    let mut xen = Xen::start();
    let (vbd, _front, mut queue) = xen.attach();
    request(&mut queue, Op::Write, 0, 4096);
    let pid = xen.process(&vbd, None);
    for signal in NOT_ENDS {
        for process in [pid, xen.backend.id() as i32] {
            kill(Pid::from_raw(process), signal).unwrap();
        }
        request(&mut queue, Op::Write, 0, 4096);
    }
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!((xen.process(&vbd, None), xen.backend.try_wait().unwrap()), (pid, None));
}

#[test]
fn a_server_that_waits_for_its_disk_says_so_at_once_and_hears_a_second_signal() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "d.raw", "--size", "1M"]);
    let file = std::fs::File::options().write(true).open(dir.join("d.raw")).unwrap();
    fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
    let mut command = spile();
    command.args(["serve", "d.raw", "--nbd", "unix:n"]).current_dir(dir).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut waiting = Served { child: command.spawn().unwrap(), socket: dir.join("n") };
    complains(&mut waiting, "d.raw: the file is in use by another process");
    // Two signals that come together are one.
    eventually("it has heard a second signal", || {
        waiting.signal(Signal::SIGINT);
        waiting.child.try_wait().unwrap().is_some()
    });
    assert_eq!(waiting.wait().code(), Some(130));
    // When it can be had within the time, it is served.
    let mut waiting = Served { child: command.spawn().unwrap(), socket: dir.join("n") };
    complains(&mut waiting, "waiting 5 s for it");
    drop(file);
    eventually("it serves", || Client::connect(&waiting.uri()).is_ok());
    assert!(waiting.terminate().success());
}

#[test]
fn a_disk_that_is_given_twice_is_told_from_one_in_use_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.vhd", "--size", "1M"]);
    ok(dir, &["create", "base.vhd", "--size", "1M"]);
    ok(dir, &["create", "child.vhd", "--parent", "base.vhd"]);
    std::os::unix::fs::symlink(dir.join("a.vhd"), dir.join("b.vhd")).unwrap();
    let cases: [(&[&str], &str); 4] = [
        (&["a.vhd", "a.vhd"], "a.vhd is given twice: as \"a\" and as \"a\""),
        (&["a.vhd", "b.vhd"], "b.vhd is given twice: as \"a\" and as \"b\""),
        (&["a.vhd", "b.vhd,read-only"], "b.vhd is given twice"),
        (
            &["child.vhd", "base.vhd", "--write-parent"],
            "base.vhd: the file is in use by the disk \"child\" of this server",
        ),
    ];
    for (disks, says) in cases {
        let said = fails(dir, 1, &[&["serve"], disks, &["--nbd", "unix:n"]].concat());
        assert!(said.contains(says) && !said.contains("waiting"), "{disks:?}: {said}");
    }
    let served = Served::start(dir, &["a.vhd,read-only", "b.vhd,read-only", "base.vhd,read-only", "child.vhd"]);
    assert!(served.terminate().success());
}

#[test]
fn three_hundred_disks_are_served_by_one_process() {
    const DISKS: u64 = 300;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let names: Vec<String> = (0..DISKS).map(|number| format!("d{number}.raw")).collect();
    let disks: Vec<&str> = names.iter().map(String::as_str).collect();
    names.iter().for_each(|name| std::fs::File::create(dir.join(name)).unwrap().set_len(1 << 20).unwrap());
    for engine in engines(dir, "three hundred disks") {
        let mut served = Served::start(dir, &[&disks[..], &["--engine", engine]].concat());
        for number in [0, 254, 255, 256, 257, DISKS - 1] {
            let client = Client::connect(&served.export(&format!("d{number}"))).unwrap();
            client.write(4096, &number.to_le_bytes().repeat(64), true).unwrap();
        }
        served.signal(Signal::SIGTERM);
        assert!(served.wait().success());
        assert_eq!(rest_of_stderr(&mut served), "", "{engine}");
        for number in [0, 254, 255, 256, 257, DISKS - 1] {
            let bytes = std::fs::read(dir.join(format!("d{number}.raw"))).unwrap();
            assert_eq!(bytes[4096..4608], number.to_le_bytes().repeat(64), "{engine}");
        }
    }
}

/// Writes 1 MiB at a time until there is no space, or the disk is full.
fn fill(served: &Served, size_bytes: u64) -> bool {
    let client = Client::connect(&served.uri()).unwrap();
    (0..size_bytes >> 20).any(|at| client.write(at << 20, &[1; 1 << 20], false).is_err())
}

#[test]
fn the_file_system_is_free_as_soon_as_the_process_has_ended_and_a_full_one_is_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    let test = "what an end leaves behind";
    let Some(mount) = Mount::new(dir.path(), 64 << 20, test) else { return };
    for engine in engines(dir.path(), test) {
        for (round, format) in ["raw", "vhd", "raw", "vhd"].into_iter().enumerate() {
            let disk = mount.path.join(format!("d.{format}"));
            let disk = disk.to_str().unwrap();
            // Every other time it fills up.
            let size_bytes = if round < 2 { 16 << 20 } else { 256 << 20 };
            ok(dir.path(), &["create", disk, "--size", &size_bytes.to_string()]);
            let mut served = Served::start(dir.path(), &[disk, "--engine", engine]);
            assert_eq!(fill(&served, size_bytes), round >= 2, "{disk}");
            served.signal(Signal::SIGTERM);
            let status = served.wait();
            assert_eq!(mount.remount(), Ok(()), "{engine} {disk}");
            assert!(status.success(), "{engine} {disk}: {status}: {}", rest_of_stderr(&mut served));
            readable(dir.path(), disk);
            std::fs::remove_file(disk).unwrap();
        }
    }
}

/// All that was acknowledged can be read; unused space is allowed.
fn readable(dir: &Path, disk: &str) {
    if disk.ends_with("vhd") {
        let checked = run(dir, &["check", disk]);
        assert!(matches!(checked.status.code(), Some(0 | 4)), "{checked:?}");
    }
}

#[test]
fn idle_clients_of_one_process_do_not_shut_others_out() {
    let dir = tempfile::tempdir().unwrap();
    let mut served = Served::start(dir.path(), &["mem:1M", "--max-connections", "4"]);
    let mut idle: Vec<_> = (0..4).map(|_| raw_connection(&served.socket)).collect();
    let uri = served.uri().to_string();
    let look = ["info", &uri, "--format", "raw"];
    // None has been idle for long: the newcomer gets the reserve, which is for those that hold few.
    ok(dir.path(), &look);
    assert!(UnixStream::connect(&served.socket).unwrap().read(&mut [0]).is_ok_and(|len| len == 0), "it holds most");
    std::thread::sleep(Duration::from_secs(11));
    idle[1].write_all(&read_request(7, 512)).unwrap();
    idle[1].read_exact(&mut [0; 16 + 512]).unwrap();
    ok(dir.path(), &look);
    // One gave up its place: the one that was silent for the longest time. All others were left alone.
    assert_eq!(idle[0].read(&mut [0]).unwrap(), 0);
    for kept in &mut idle[1..] {
        kept.write_all(&read_request(8, 512)).unwrap();
        kept.read_exact(&mut [0; 16 + 512]).unwrap();
    }
    served.signal(Signal::SIGTERM);
    assert!(served.wait().success());
    let said = rest_of_stderr(&mut served);
    assert!(said.contains("NBD: all 4 places for connections are taken, one was turned away"), "{said}");
}

/// How long the process has been on a processor, in clock ticks (1/100 s).
fn ticks(served: &Served) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", served.child.id())).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

fn limit_descriptors(served: &Served, current: u64) {
    let pid = rustix::process::Pid::from_raw(served.child.id() as i32);
    let maximum = getrlimit(Resource::Nofile).maximum;
    prlimit(pid, Resource::Nofile, Rlimit { current: Some(current), maximum }).unwrap();
}

/// Clients take all the descriptors that they may have, and then there is none at all.
#[test]
fn a_server_without_descriptors_serves_whom_it_has_and_hears_its_operator() {
    let dir = tempfile::tempdir().unwrap();
    let mut served = Served::start(dir.path(), &["mem:1M,name=x", "--control", "c", "--max-connections", "1000"]);
    let client = Client::connect(&served.uri()).unwrap();
    let goes_on = || client.write(0, &[1; 4096], true).unwrap();
    limit_descriptors(&served, 192);
    let mut greedy = Vec::new();
    loop {
        let mut stream = UnixStream::connect(&served.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
        // The server greets first, or hangs up.
        if stream.read(&mut [0; 18]).unwrap() == 0 {
            break;
        }
        greedy.push(stream);
        assert!(greedy.len() < 192, "there is no reserve");
    }
    goes_on();
    let answers = |dir: &Path| ok(dir, &["ls", "c"]).contains('x');
    assert!(answers(dir.path()), "nothing is left for the operator");
    ok(dir.path(), &["create", "more.raw", "--size", "1M"]);
    ok(dir.path(), &["attach", "c", "more.raw,name=y", "--nbd", "unix:y"]);
    // No descriptor at all, and one more client that waits to be let in.
    limit_descriptors(&served, 3);
    let _waits = UnixStream::connect(&served.socket).unwrap();
    let before = ticks(&served);
    std::thread::sleep(Duration::from_secs(2));
    let used = ticks(&served) - before;
    assert!(used < 50, "{used} ticks: somebody tries again and again");
    goes_on();
    limit_descriptors(&served, 1024);
    drop(greedy);
    assert!(answers(dir.path()));
    Client::connect(&served.uri()).unwrap();
    served.signal(Signal::SIGTERM);
    assert!(served.wait().success());
    let said = rest_of_stderr(&mut served);
    assert!(said.contains("too few descriptors are left (ulimit -n)"), "{said}");
}

/// Asks for the greatest reads there are, twice, and takes nothing.
fn takes_nothing(served: &Served) -> UnixStream {
    let mut stream = raw_connection(&served.socket);
    (0..2).for_each(|cookie| stream.write_all(&read_request(cookie, 32 << 20)).unwrap());
    stream
}

#[test]
fn clients_that_hold_all_the_memory_for_requests_stop_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let mut served = Served::start(dir.path(), &["null:64M", "--workers", "1"]);
    let mut greedy: Vec<UnixStream> = (0..3).map(|_| takes_nothing(&served)).collect();
    greedy[..2].iter_mut().for_each(|stream| stream.read_exact(&mut [0; 16]).unwrap());
    // A small request never waits for them. A large one waits until one that has taken nothing for long is hung up on.
    let client = Client::connect(&served.uri()).unwrap();
    client.read(0, &mut [0; 64 << 10]).unwrap();
    client.read(0, &mut vec![0; 4 << 20]).unwrap();
    client.read(0, &mut [0; 64 << 10]).unwrap();
    drop((greedy, client));
    served.signal(Signal::SIGTERM);
    assert!(served.wait().success());
    let said = rest_of_stderr(&mut served);
    assert!(
        said.contains("a client takes no replies, or sends no more of a payload, while others wait for the memory"),
        "{said}"
    );
}

#[test]
fn a_request_for_which_there_is_no_memory_fails_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = spile();
    // Else the C library sets addresses aside for each thread, which the limit below would not stop it from using.
    command.env("MALLOC_ARENA_MAX", "1").current_dir(dir.path());
    command.args(["serve", "null:64M,name=a", "null:64M,name=b", "--workers", "1", "--nbd", "unix:n"]);
    let mut served = Served::spawn(&mut command, dir.path().join("n")).unwrap();
    let pid = served.child.id();
    let client = Client::connect(&served.uri()).unwrap();
    client.read(0, &mut [0; 512]).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let size_kib: u64 = size.trim().trim_end_matches(" kB").parse().unwrap();
    let limit = |current| {
        let maximum = getrlimit(Resource::As).maximum;
        prlimit(rustix::process::Pid::from_raw(pid as i32), Resource::As, Rlimit { current, maximum }).unwrap();
    };
    limit(Some((size_kib << 10) + (4 << 20)));
    // The clients of two disks hold more than the 64 MiB of the worker's pool. The rest has to come from elsewhere.
    let mut clients = ["a", "b"].map(|export| {
        let mut stream = raw_connection_to(&served.socket, export);
        (0..2).for_each(|cookie| stream.write_all(&read_request(cookie, 30 << 20)).unwrap());
        stream
    });
    std::thread::sleep(Duration::from_millis(500));
    let mut errors = Vec::new();
    for stream in &mut clients {
        for _ in 0..2 {
            let mut header = [0; 16];
            stream.read_exact(&mut header).unwrap();
            let error = u32::from_be_bytes(header[4..8].try_into().unwrap());
            let len_bytes = if error == 0 { 30 << 20 } else { 0 };
            stream.read_exact(&mut vec![0; len_bytes]).unwrap();
            errors.push(error);
        }
    }
    assert!(errors.contains(&12) && errors.contains(&0), "{errors:?}");
    client.read(0, &mut [0; 64 << 10]).unwrap();
    limit(None);
    client.read(0, &mut vec![0; 32 << 20]).unwrap();
    served.signal(Signal::SIGTERM);
    assert!(served.wait().success());
    let said = rest_of_stderr(&mut served);
    assert!(said.contains("there is no memory for the data of this request"), "{said}");
}
