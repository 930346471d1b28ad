//! What the tests of the program share: running it, serving with it, ending it.

pub mod chains;
pub mod control;
pub mod faulty;
pub mod guests;
pub mod host;
pub mod json_schema;
pub mod mount;
pub mod moves;
pub mod nbd;
pub mod xen;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use spile::load::{self, LoadOutcome, Options, Progress};
use spile::uri::{Address, NbdUri};

/// Nothing here takes longer, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// The program under test.
pub fn spile() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_spile"));
    // The control sockets of servers that were not told where to have theirs.
    command.env("SPILE_RUN_DIR", run_dir());
    command
}

/// The run folder of this test's programs.
pub fn run_dir() -> PathBuf {
    format!("{}/run-{}", env!("CARGO_TARGET_TMPDIR"), std::process::id()).into()
}

/// The program, whose syncs fail or take long when files in `dir` say so (`faulty_sync.c`).
pub fn faulty_sync(dir: &Path) -> Command {
    let shim = dir.join("faulty_sync.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/common/faulty_sync.c");
    let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&shim).arg(source).arg("-ldl").status();
    assert!(made.expect("cc, which the linker needs too").success());
    let mut command = spile();
    command.env("LD_PRELOAD", shim).env("FAULTS", dir);
    command
}

/// Runs it to its end in `dir`.
pub fn run(dir: &Path, args: &[&str]) -> Output {
    spile().args(args).current_dir(dir).output().expect("the program starts")
}

/// Runs it and demands success; returns stdout.
pub fn ok(dir: &Path, args: &[&str]) -> String {
    let output = run(dir, args);
    let (out, err) = texts(&output);
    assert!(output.status.success(), "{args:?}: {}\n{out}{err}", output.status);
    out
}

/// Runs it and demands this exit code; returns stderr.
pub fn fails(dir: &Path, code: i32, args: &[&str]) -> String {
    let output = run(dir, args);
    let (out, err) = texts(&output);
    assert_eq!(output.status.code(), Some(code), "{args:?}\n{out}{err}");
    err
}

/// Runs it with --json and reads that.
pub fn json(dir: &Path, args: &[&str]) -> serde_json::Value {
    serde_json::from_str(&ok(dir, &[args, &["--json"]].concat())).expect("JSON on stdout")
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// A running program that is not a server; killed when dropped.
pub struct Running(Served);

impl Running {
    /// Starts it in `dir` with its output kept.
    pub fn start(command: &mut Command, dir: &Path) -> Self {
        let child = command.current_dir(dir).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        Self(Served { child: child.expect("the program starts"), socket: PathBuf::new() })
    }

    pub fn pid(&self) -> u32 {
        self.0.child.id()
    }

    /// What it said, if it has ended already.
    pub fn has_ended(&mut self) -> Option<String> {
        let status = self.0.child.try_wait().expect("it is our child")?;
        let mut said = status.to_string();
        let _ = self.0.child.stdout.take().map(|mut out| out.read_to_string(&mut said));
        let _ = self.0.child.stderr.take().map(|mut err| err.read_to_string(&mut said));
        Some(said)
    }

    /// Sends a signal and waits for the end: the exit code and stdout.
    pub fn end(mut self, signal: Signal) -> (Option<i32>, String) {
        self.0.signal(signal);
        let code = self.0.wait().code();
        let mut out = String::new();
        let _ = std::io::Read::read_to_string(self.0.child.stdout.as_mut().expect("piped"), &mut out);
        (code, out)
    }
}

/// A running `spile serve`; killed when dropped.
pub struct Served {
    pub child: Child,
    pub socket: PathBuf,
}

impl Served {
    /// Serves `args` on a Unix socket in `dir`, and waits until it is ready.
    pub fn start(dir: &Path, args: &[&str]) -> Self {
        Self::try_start(dir, args).unwrap_or_else(|err| panic!("serve {args:?}: {err}"))
    }

    /// The same; what it said on stderr when it ended before it was ready.
    pub fn try_start(dir: &Path, args: &[&str]) -> Result<Self, String> {
        let socket = dir.join("nbd.sock");
        let mut command = spile();
        command.arg("serve").args(args).arg("--nbd").arg(format!("unix:{}", socket.display()));
        Self::spawn(command.current_dir(dir), socket)
    }

    /// Runs `command`, a server on `socket`.
    pub fn spawn(command: &mut Command, socket: PathBuf) -> Result<Self, String> {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut served = Self { child: child.expect("the program starts"), socket };
        let mut first = String::new();
        let out = served.child.stdout.as_mut().expect("piped");
        BufReader::new(out).read_line(&mut first).expect("stdout can be read");
        if first.starts_with("serving ") {
            return Ok(served);
        }
        let mut said = String::new();
        let err = served.child.stderr.as_mut().expect("piped");
        let _ = std::io::Read::read_to_string(err, &mut said);
        Err(said)
    }

    pub fn address(&self) -> Address {
        Address::Unix(self.socket.clone())
    }

    /// The default export.
    pub fn uri(&self) -> NbdUri {
        self.export("")
    }

    pub fn export(&self, name: &str) -> NbdUri {
        NbdUri::new(self.address(), name)
    }

    pub fn signal(&self, signal: Signal) {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, signal).expect("the server lives");
    }

    /// SIGTERM, and waits for the end.
    pub fn terminate(mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.wait()
    }

    /// SIGTERM, and waits for the end; also what it has said on stderr.
    pub fn terminate_and_hear(mut self) -> (ExitStatus, String) {
        self.signal(Signal::SIGTERM);
        let (status, mut said) = (self.wait(), String::new());
        let _ = self.child.stderr.as_mut().expect("piped").read_to_string(&mut said);
        (status, said)
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(mut self) {
        self.child.kill().expect("the server lives");
        self.wait();
    }

    /// Waits for the end, within bounds.
    pub fn wait(&mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("the server is our child") {
                return status;
            }
            assert!(Instant::now() < end, "the server did not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// How a test ends a server in the middle of its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blow {
    /// By SIGKILL.
    Kill,
    /// One of its threads panics at some request.
    Panic,
}

impl Blow {
    /// Has a server panic at about one in `one_in` requests, if that is the way it is to end.
    pub fn prepare(self, command: &mut Command, one_in: u32) -> &mut Command {
        match self {
            Self::Kill => command,
            Self::Panic => command.env("SPILE_TEST_PANIC", one_in.to_string()),
        }
    }

    /// The server's end: at once by SIGKILL, or when it panics, which it has to say.
    pub fn strike(self, served: &mut Served) {
        if self == Self::Kill {
            served.child.kill().expect("the server lives");
        }
        let status = served.wait();
        if self == Self::Panic {
            let said = guests::rest_of_stderr(served);
            assert_eq!(status.signal(), Some(Signal::SIGABRT as i32), "{status}: {said}");
            for says in ["a bug: the thread spile-worker-", "fault.rs:", "takes up their requests", "please report"] {
                assert!(said.contains(says), "{says}: {said}");
            }
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Begins a load on another thread. Returns once many of its writes are answered, or when it has ended before that.
pub fn load_at_work(options: Options) -> JoinHandle<LoadOutcome> {
    let options = Options { report_every: Duration::from_millis(10), ..options };
    let (tell, is_at_work) = mpsc::channel();
    let running = std::thread::spawn(move || {
        let told = |so_far: Progress| _ = (so_far.writes >= 500).then(|| tell.send(()));
        load::run(&options, told).unwrap()
    });
    let _ = is_at_work.recv();
    running
}

/// Waits for something to become true, within bounds.
pub fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < end, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The engines that work on this host; tells which do not.
pub fn engines(dir: &Path, test: &str) -> Vec<&'static str> {
    let works = |engine: &&'static str| match Served::try_start(dir, &["null:1M", "--engine", engine]) {
        Ok(_) => true,
        Err(err) => {
            assert!(err.contains("cannot be used here"), "{engine}: {err}");
            println!("SKIP {test} with {engine}: {}", err.trim());
            false
        }
    };
    ["uring", "aio", "threads"].into_iter().filter(works).collect()
}

/// True when the program is installed; tells when it is not.
pub fn have(program: &str, test: &str) -> bool {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if found.is_err() {
        println!("SKIP {test}: {program} is not installed");
    }
    found.is_ok()
}

/// What qemu-img says, which must succeed.
pub fn qemu_img(dir: &Path, args: &[&str]) -> String {
    let out = Command::new("qemu-img").args(args).current_dir(dir).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "qemu-img {args:?}: {}{}", text(&out.stdout), text(&out.stderr));
    text(&out.stdout)
}

/// Voluntary context switches of all threads: how often they went to sleep, so how often they were woken.
fn wake_ups(pid: u32) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of = |status: String| -> u64 {
        let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
        line.unwrap().trim().parse().unwrap()
    };
    tasks.map(|task| of(std::fs::read_to_string(task.unwrap().path().join("status")).unwrap())).sum()
}

/// The process comes to rest, and has six seconds without a single wake-up: longer than from one wake-up of an idle thread of io_uring to
/// the next.
pub fn assert_silent(pid: u32, what: &str) {
    let mut counts = Vec::new();
    // What the last requests left to do may end first, which takes long on a busy host.
    for _ in 0..5 {
        let before = wake_ups(pid);
        std::thread::sleep(Duration::from_secs(6));
        // A thread that has ended takes its count away.
        counts.push(wake_ups(pid).abs_diff(before));
        if counts.ends_with(&[0]) {
            return;
        }
    }
    panic!("{what}: {counts:?} wake-ups in six seconds each");
}
