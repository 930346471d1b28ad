//! Servers under measurement: started on one core, ready when they accept, ended by SIGTERM.

use super::Plan;
use super::lines::{Cache, Format, Side};
use crate::Result;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for a server to accept or to end.
const LIMIT: Duration = Duration::from_secs(30);

/// Who serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Spile,
    Qemu,
    Nbdkit,
}

impl Kind {
    /// The program that has to be installed; none for our own.
    pub fn program(self) -> Option<&'static str> {
        match self {
            Kind::Spile => None,
            Kind::Qemu => Some("qemu-nbd"),
            Kind::Nbdkit => Some("nbdkit"),
        }
    }
}

/// A running server; dropping it ends it.
pub struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    /// Starts `side`'s server on `image` and waits until it accepts.
    pub fn start(plan: &Plan, side: &Side, image: &Path) -> Result<Server> {
        let socket = std::env::temp_dir().join(format!("spile-bench-{}.sock", std::process::id()));
        let mut command = command(plan, side, image, &socket);
        Server::spawn(&mut command, socket)
    }

    /// Starts `command`, which is to listen on `socket`.
    pub fn spawn(command: &mut Command, socket: PathBuf) -> Result<Server> {
        // A server before may have left it when it was ended the hard way.
        let _ = std::fs::remove_file(&socket);
        let shown = format!("{command:?}");
        // Servers tell of clients that only look whether they are there; a failure is told below.
        let log = socket.with_extension("log");
        let errors = File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        let child = command.spawn().map_err(|error| format!("cannot run {shown}: {error}"))?;
        let mut server = Server { child, socket };
        server.wait_until_ready().map_err(|problem| {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            format!("{shown}: {problem}\n{said}")
        })?;
        Ok(server)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let end = Instant::now() + LIMIT;
        while UnixStream::connect(&self.socket).is_err() {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(status.to_string());
            }
            if Instant::now() > end {
                return Err(format!("not ready after {LIMIT:?}"));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The address of its one export.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.socket.with_extension("log"));
        let pid = self.child.id().to_string();
        let asked = Command::new("kill").args(["-TERM", &pid]).status();
        let end = Instant::now() + LIMIT;
        while asked.is_ok() && Instant::now() < end {
            if let Ok(Some(_)) = self.child.try_wait() {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // It did not end when asked: it must not disturb what comes after.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A command that runs on `core`; anywhere when there are not two.
pub fn pinned(core: usize, program: impl AsRef<OsStr>) -> Command {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores < 2 {
        return Command::new(program);
    }
    let mut command = Command::new("taskset");
    command.args(["-c", &core.to_string()]).arg(program);
    command
}

fn command(plan: &Plan, side: &Side, image: &Path, socket: &Path) -> Command {
    match side.server {
        Kind::Spile => spile(plan, side, image, socket),
        Kind::Qemu => qemu(side, image, socket),
        Kind::Nbdkit => {
            let mut command = pinned(1, "nbdkit");
            command.args(["--foreground", "--unix"]).arg(socket).arg("file").arg(image);
            command
        }
    }
}

fn spile(plan: &Plan, side: &Side, image: &Path, socket: &Path) -> Command {
    let mut command = pinned(1, &plan.spile);
    let cache = if side.cache == Cache::Direct { "direct" } else { "page" };
    command.arg("serve").arg(image).arg("--nbd").arg(format!("unix:{}", socket.display()));
    command.args(["--cache", cache]);
    command
}

fn qemu(side: &Side, image: &Path, socket: &Path) -> Command {
    let mut command = pinned(1, "qemu-nbd");
    command.args(["--persistent", "--shared=16", "--export-name=", "--socket"]).arg(socket);
    let format = match side.format {
        Format::Raw => "raw",
        Format::Vhd | Format::Vpc => "vpc",
        Format::Qcow2 => "qcow2",
    };
    command.arg(format!("--format={format}"));
    command.args(match side.cache {
        Cache::Page => ["--cache=writeback", "--aio=threads"],
        Cache::Direct => ["--cache=none", "--aio=io_uring"],
    });
    command.arg(image);
    command
}
