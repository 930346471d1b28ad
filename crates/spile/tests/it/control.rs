//! The control socket: disks that grow under their guests, and clients that talk nonsense, too much, or not at all.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use crate::common::guests::{Load, guest, nbd, open_files, serve};
use crate::common::nbd::Client;
use crate::common::{Served, eventually, fails, have, ok};
use spile_lab::GuestQueue;
use spile_lab::vhost::{BlkConfig, Device, DeviceOptions, Socket, Watch};

const MIB: u64 = 1 << 20;

/// Watches a device and tells of the sizes that its server announces.
fn sizes_of(device: Device) -> (Watch, mpsc::Receiver<u64>) {
    let (sender, sizes) = mpsc::channel();
    let on_config = move |config: &BlkConfig| sender.send(config.size_bytes()).unwrap();
    (Watch::start(device, None, Some(Box::new(on_config))).unwrap(), sizes)
}

#[test]
fn a_disk_grows_under_its_guests() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.raw", "--size", "32M"]);
    ok(dir, &["create", "b.raw", "--size", "16M"]);
    let ways = ["--vhost-user", "a", "--vhost-user", "a2,export=a", "--vhost-user", "b,export=b", "--nbd", "unix:n"];
    let served = serve(dir, &[&["a.raw", "b.raw"], &ways[..]].concat());
    let mut load = Load::start(dir, "a", &["--span", "32M"]);
    let (device, mut queue) = guest(&dir.join("a2"));
    let (watch, sizes) = sizes_of(device);
    let (other, other_sizes) = sizes_of(guest(&dir.join("b")).0);
    let early = Client::connect(&nbd(dir, "")).unwrap();
    load.goes_on(&served);
    for size in [48 * MIB, 64 * MIB] {
        ok(dir, &["resize", "c", &size.to_string()]);
        assert_eq!(sizes.recv_timeout(Duration::from_secs(600)), Ok(size));
        assert_eq!(queue.read(size - 4096, 4096).unwrap(), [0; 4096], "what is new reads as zeroes");
        queue.write(size - 4096, &[5; 4096]).unwrap();
        assert_eq!(std::fs::metadata(dir.join("a.raw")).unwrap().len(), size);
    }
    // NBD has no way to tell: who connects now sees it, by either name.
    assert_eq!(early.facts().size_bytes, 32 * MIB);
    early.read(0, &mut [0; 512]).unwrap();
    for name in ["", "a"] {
        let mut bytes = [0; 4096];
        let client = Client::connect(&nbd(dir, name)).unwrap();
        assert_eq!(client.facts().size_bytes, 64 * MIB);
        client.read(64 * MIB - 4096, &mut bytes).unwrap();
        assert_eq!(bytes, [5; 4096]);
    }
    ok(dir, &["resize", "c", "24M", "--name", "b"]);
    assert_eq!(other_sizes.recv_timeout(Duration::from_secs(600)), Ok(24 * MIB));
    assert!(sizes.try_recv().is_err(), "the other disk's guests are left alone");
    drop((watch.stop(), other.stop()));
    load.goes_on(&served);
    assert_eq!(load.end(), 0);
    // Who attaches now sees it too.
    let device = Device::connect(&dir.join("a"), DeviceOptions::default()).unwrap();
    assert_eq!(device.config().size_bytes(), 64 * MIB);
    assert!(served.terminate().success());
}

#[test]
fn what_cannot_grow_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.raw", "--size", "32M"]);
    ok(dir, &["create", "b.vhd", "--size", "32M"]);
    ok(dir, &["create", "ro.raw", "--size", "32M"]);
    let disks = ["a.raw", "b.vhd", "ro.raw,read-only", "--vhost-user", "v"];
    let served = serve(dir, &disks);
    let cases: [(&[&str], i32, &str); 9] = [
        (&["c", "16M"], 2, "a.raw: the disk has 33554432 bytes and cannot shrink to 16777216 (`spile resize --shrink`"),
        (&["c", "33554433"], 2, "no whole number of sectors"),
        (&["c", "16M", "--name", "b"], 1, "b.vhd: the disk has 33554432 bytes and cannot shrink"),
        (&["c", "64M", "--name", "ro"], 1, "ro.raw: the disk is open for reading only"),
        (&["c", "64M", "--name", "x"], 1, "as \"x\" (the disks are \"a\", \"b\", \"ro\")"),
        (&["gone", "64M"], 1, "no server has a disk \"gone\" (`spile ls` lists"),
        (&["a.raw", "64M"], 1, "a.raw: the file is in use"),
        (&["v", "64M"], 1, "the server has hung up on the control socket"),
        (&["c", "much"], 2, "much"),
    ];
    for (args, code, says) in cases {
        let said = fails(dir, code, &[&["resize"], args].concat());
        assert!(said.contains(says), "{args:?}: {said}");
    }
    ok(dir, &["resize", "c", "32M"]);
    // A VHD grows as well.
    ok(dir, &["resize", "c", "5G", "--name", "b"]);
    served.kill();
    let said = fails(dir, 1, &["resize", "c", "64M"]);
    assert!(said.contains("c: no server listens on this control socket"), "{said}");
}

/// A guest whose channel for the server's messages is full, as it never looks at it.
#[test]
fn a_guest_that_does_not_listen_keeps_nobody_from_growing_its_disk() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.raw", "--size", "16M"]);
    let served = serve(dir, &["a.raw", "--vhost-user", "v"]);
    let (deaf, _queue) = guest(&dir.join("v"));
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    deaf.connection().set_backend_channel(ours.as_fd()).unwrap();
    ours.set_nonblocking(true).unwrap();
    while ours.write(&[0; 4096]).is_ok() {}
    ours.set_nonblocking(false).unwrap();
    // Another has begun a message and does not end it.
    let half = Socket::connect(&dir.join("v")).unwrap();
    half.send_bytes(&[1, 0, 0], &[]).unwrap();
    let (watch, sizes) = sizes_of(guest(&dir.join("v")).0);
    ok(dir, &["resize", "c", "32M"]);
    assert_eq!(sizes.recv_timeout(Duration::from_secs(600)), Ok(32 * MIB));
    drop((watch.stop(), theirs));
    assert!(served.terminate().success());
}

fn connect(dir: &Path) -> UnixStream {
    let stream = UnixStream::connect(dir.join("c")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(600))).unwrap();
    stream
}

/// Sends bytes and reads until the server hangs up.
fn say(dir: &Path, bytes: &[u8]) -> String {
    let mut stream = connect(dir);
    // The server may have had enough before all is said, and then what it said may be lost.
    let sent = stream.write_all(bytes);
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    assert!(sent.is_ok() && read.is_ok() || bytes.len() > 1 << 20, "{sent:?} {read:?}");
    String::from_utf8(answer).unwrap()
}

fn start() -> (tempfile::TempDir, Served) {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "a.raw", "--size", "16M"]);
    let served = serve(dir.path(), &["a.raw", "--vhost-user", "v"]);
    (dir, served)
}

#[test]
fn nonsense_is_answered_and_changes_nothing() {
    let (dir, served) = start();
    let dir = dir.path();
    let files = open_files(&served);
    let grow = r#"{"fds":0,"message":{"resize":{"export":"","size_bytes":33554432}}}"#;
    let not_understood = [
        "\n",
        "hello\n",
        "{}\n",
        "{\"fds\":0,\"message\":\"done\"}\n",
        "{\"fds\":0,\"message\":{\"format_disk\":{}}}\n",
        "{\"fds\":0,\"message\":{\"resize\":{\"export\":\"\"}}}\n",
        "{\"fds\":0,\"message\":{\"resize\":{\"export\":\"\",\"size_bytes\":-1}}}\n",
        "{\"fds\":0,\"message\":{\"resize\":{\"export\":\"\",\"size_bytes\":1,\"now\":true}}}\n",
        "{\"fds\":0,\"message\":{\"take_over\":{\"sockets\":7,\"queues\":1}}}\n",
        "\0\n",
    ];
    for line in not_understood {
        let answer = say(dir, line.as_bytes());
        assert!(
            answer.contains("\"error\":\"[request_unknown] a line on the control socket is not understood"),
            "{line}: {answer}"
        );
    }
    let mut not_text = b"\xff\xfe\n".to_vec();
    assert!(say(dir, &not_text).contains("is not understood"));
    let answer = say(dir, format!("{}\n", grow.replace("\"fds\":0", "\"fds\":3")).as_bytes());
    assert!(answer.contains("descriptors are missing"), "{answer}");
    // Longer than any line, with an end and without.
    not_text.splice(0..2, std::iter::repeat_n(b'x', 3 << 20));
    let answer = say(dir, &not_text);
    assert!(answer.is_empty() || answer.contains("too long"), "{answer}");
    // Half a line, and the end. A whole one without the last byte is none either.
    for half in ["", "{\"fds\":0,", grow] {
        let mut stream = connect(dir);
        stream.write_all(half.as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "", "{half}");
    }
    assert_eq!(std::fs::metadata(dir.join("a.raw")).unwrap().len(), 16 * MIB);
    // A person with socat does it like this.
    assert_eq!(say(dir, format!("{grow}\n").as_bytes()), "{\"fds\":0,\"message\":\"done\"}\n");
    assert_eq!(std::fs::metadata(dir.join("a.raw")).unwrap().len(), 32 * MIB);
    eventually("no descriptor is left over", || open_files(&served) <= files);
    assert!(served.terminate().success());
}

#[test]
fn descriptors_that_nobody_asked_for_are_closed() {
    let (dir, served) = start();
    let dir = dir.path();
    let files = open_files(&served);
    let null = std::fs::File::open("/dev/null").unwrap();
    for count in [1, 200, 253] {
        for line in ["{\"fds\":0,\"message\":{\"resize\":{\"export\":\"\",\"size_bytes\":0}}}\n", "x\n", "x"] {
            let stream = connect(dir);
            let socket = Socket::new(stream.try_clone().unwrap()).unwrap();
            // Three times, and half of it without a line's end.
            for _ in 0..3 {
                // The server may have hung up after the first.
                let _ = socket.send_bytes(line.as_bytes(), &vec![null.as_fd(); count]);
            }
            let _ = stream.shutdown(Shutdown::Write);
            let _ = (&stream).read(&mut [0; 4096]);
        }
    }
    ok(dir, &["resize", "c", "32M"]);
    eventually("no descriptor is left over", || open_files(&served) <= files);
    assert!(served.terminate().success());
}

#[test]
fn who_speaks_byte_by_byte_is_not_heard_to_the_end() {
    let (dir, served) = start();
    let dir = dir.path();
    // Each byte comes in time, and the line does not.
    let slow = connect(dir);
    let reader = slow.try_clone().unwrap();
    let feeder = std::thread::spawn(move || {
        while (&slow).write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    // It was there first. Whoever else asks may have to ask again until it is heard.
    eventually("others are heard", || crate::common::run(dir, &["resize", "c", "32M"]).status.success());
    feeder.join().unwrap();
    let mut answer = [0; 256];
    let len = (&reader).read(&mut answer).unwrap();
    assert!(String::from_utf8_lossy(&answer[..len]).contains("says nothing"));
    assert!(served.terminate().success());
}

#[test]
fn other_users_are_not_heard() {
    const TEST: &str = "other users at the control socket";
    if !rustix::process::geteuid().is_root() {
        println!("SKIP {TEST}: only root can be another user");
        return;
    }
    if !have("setpriv", TEST) {
        return;
    }
    let (dir, served) = start();
    let dir = dir.path();
    let as_nobody = |args: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", env!("CARGO_BIN_EXE_spile")]);
        let output = command.args(args).current_dir("/").output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    if as_nobody(&["--version"]).0 != Some(0) {
        println!("SKIP {TEST}: another user cannot run the program where it lies");
        return;
    }
    let open = |path: &Path| std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    let socket = dir.join("c");
    let ask = || as_nobody(&["resize", &socket.display().to_string(), "32M"]);
    let (code, said) = ask();
    assert!(code == Some(1) && said.contains("c: cannot connect to the control socket: Permission denied"), "{said}");
    // Even when the file system lets them in.
    open(dir);
    open(&socket);
    let (code, said) = ask();
    assert!(code == Some(1) && said.contains("only the server's own user and root are heard"), "{said}");
    assert_eq!(std::fs::metadata(dir.join("a.raw")).unwrap().len(), 16 * MIB);
    assert!(served.terminate().success());
}

/// Root's word counts with a server of any user.
#[test]
fn root_does_not_believe_the_server_of_another_user() {
    const TEST: &str = "root at another user's control socket";
    if !rustix::process::geteuid().is_root() {
        println!("SKIP {TEST}: we are not root");
        return;
    }
    if !have("setpriv", TEST) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.raw", "--size", "16M"]);
    for path in [dir, &dir.join("a.raw")] {
        std::os::unix::fs::chown(path, Some(65534), Some(65534)).unwrap();
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", env!("CARGO_BIN_EXE_spile")]);
    command.args(["serve", "a.raw", "--vhost-user", "v", "--control", "c"]).current_dir(dir);
    match Served::spawn(&mut command, dir.join("v")) {
        Ok(served) => {
            let said = fails(dir, 1, &["resize", "c", "32M"]);
            assert!(said.contains("is not believed") && said.contains("run the command as that user"), "{said}");
            assert!(served.terminate().success());
        }
        Err(said) => {
            assert!(said.contains("setpriv"), "{said}");
            println!("SKIP {TEST}: another user cannot run the program where it lies");
        }
    }
}

#[test]
fn orders_are_carried_out_one_after_the_other() {
    let (dir, served) = start();
    let dir = dir.path();
    std::thread::scope(|scope| {
        for n in 2..10u64 {
            scope.spawn(move || {
                crate::common::eventually("the disk has no resize", || {
                    let output = crate::common::run(dir, &["resize", "c", &(n * 16 * MIB).to_string()]);
                    let said = String::from_utf8_lossy(&output.stderr).into_owned();
                    let is_early = said.contains("the disk has a resize (try again when it has ended)");
                    // Whoever comes after a larger one is refused.
                    assert!(output.status.success() || is_early || said.contains("cannot shrink"), "{said}");
                    !is_early
                });
            });
        }
    });
    assert_eq!(std::fs::metadata(dir.join("a.raw")).unwrap().len(), 9 * 16 * MIB);
    assert!(served.terminate().success());
}
