//! Servers under measurement: started on one core, ready when they accept, ended by SIGTERM.

use super::Plan;
use super::kinds::{Aio, Front, Kind, Role};
use super::lines::{Cache, Format, Side, State};
use crate::Result;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for a server to accept or to end.
const LIMIT: Duration = Duration::from_secs(30);

/// A running server; dropping it ends it.
pub struct Server {
    process: Process,
    socket: PathBuf,
    front: Front,
}

/// A running program. When it is dropped, the program gets SIGTERM, and SIGKILL if it does not end.
struct Process(Child);

impl Process {
    /// Starts `command` without input and output.
    fn spawn(command: &mut Command) -> Result<Process> {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        child.map(Process).map_err(|error| format!("cannot run {command:?}: {error}"))
    }
}

impl Server {
    /// Starts `side`'s server on `image` and waits until it accepts.
    pub fn start(plan: &Plan, side: &Side, image: &Path) -> Result<Server> {
        let socket = std::env::temp_dir().join(format!("spile-bench-{}.sock", std::process::id()));
        let mut command = command(plan, side, image, &socket);
        Server::spawn(&mut command, socket, side.server.front())
    }

    /// Starts `command`, which is to listen on `socket`.
    pub fn spawn(command: &mut Command, socket: PathBuf, front: Front) -> Result<Server> {
        // A server before may have left it when it was ended the hard way.
        let _ = std::fs::remove_file(&socket);
        // Servers tell of clients that only look whether they are there; a failure is told below.
        let log = socket.with_extension("log");
        let errors = File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        let process = Process::spawn(command.stderr(errors))?;
        let mut server = Server { process, socket, front };
        server.wait_until_ready().map_err(|problem| {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            format!("{command:?}: {problem}\n{said}")
        })?;
        Ok(server)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let end = Instant::now() + LIMIT;
        while UnixStream::connect(&self.socket).is_err() {
            if let Ok(Some(status)) = self.process.0.try_wait() {
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
        self.process.0.id()
    }

    /// The address of its one export.
    pub fn uri(&self) -> String {
        match self.front {
            Front::Nbd => format!("nbd+unix:///?socket={}", self.socket.display()),
            Front::Vhost => format!("vhost-user:{}", self.socket.display()),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.socket.with_extension("log"));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let pid = self.0.id().to_string();
        let asked = Command::new("kill").args(["-TERM", &pid]).status();
        let end = Instant::now() + LIMIT;
        while asked.is_ok() && Instant::now() < end {
            if let Ok(Some(_)) = self.0.try_wait() {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // It did not end when asked: it must not disturb what comes after.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Cores that this program may use.
pub fn core_count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The first `count` cores.
pub fn server_cores(count: usize) -> String {
    format!("0-{}", count - 1)
}

/// The next `count` cores after the first `count`.
pub fn client_cores(count: usize) -> String {
    format!("{count}-{}", 2 * count - 1)
}

/// A command that runs on `cores`; anywhere when there are not two.
pub fn pinned(cores: &str, program: impl AsRef<OsStr>) -> Command {
    if core_count() < 2 {
        return Command::new(program);
    }
    let mut command = Command::new("taskset");
    command.args(["-c", cores]).arg(program);
    command
}

fn command(plan: &Plan, side: &Side, image: &Path, socket: &Path) -> Command {
    let cores = server_cores(side.cores);
    match side.server {
        Kind::Spile(front) => {
            let before = plan.before.as_ref().filter(|_| side.role == Role::Before);
            spile(pinned(&cores, before.unwrap_or(&plan.spile)), front, side, image, socket)
        }
        Kind::Qemu => qemu(pinned(&cores, "qemu-nbd"), side, image, socket),
        Kind::Nbdkit => {
            let mut command = pinned(&cores, "nbdkit");
            command.args(["--foreground", "--unix"]).arg(socket).arg("file").arg(image);
            command
        }
        Kind::Daemon(aio) => daemon(pinned(&cores, "qemu-storage-daemon"), aio, side, image, socket),
        // It serves nobody; asked for all the same, it says so by ending.
        Kind::Fio => Command::new("false"),
    }
}

fn spile(mut command: Command, front: Front, side: &Side, image: &Path, socket: &Path) -> Command {
    let cache = if side.cache == Cache::Direct { "direct" } else { "page" };
    command.arg("serve").arg(image).args(["--cache", cache]);
    // The images of a chain are measured one by one, so some are parents of others.
    if matches!(side.state, State::Chain(_)) {
        command.arg("--write-parent");
    }
    match front {
        Front::Nbd => command.arg("--nbd").arg(format!("unix:{}", socket.display())),
        Front::Vhost => command.arg("--vhost-user").arg(socket),
    };
    if front == Front::Vhost && !side.options.contains(&"--workers") {
        // On one core a second worker would only be in the way of the first.
        command.args(["--workers", "1"]);
    }
    command.args(side.options);
    command
}

fn qemu_format(format: Format) -> &'static str {
    match format {
        Format::Raw | Format::Null => "raw",
        Format::Vhd | Format::Vpc => "vpc",
        Format::Qcow2 => "qcow2",
    }
}

fn qemu(mut command: Command, side: &Side, image: &Path, socket: &Path) -> Command {
    command.args(["--persistent", "--shared=16", "--export-name=", "--socket"]).arg(socket);
    command.arg(format!("--format={}", qemu_format(side.format)));
    command.args(match side.cache {
        Cache::Page => ["--cache=writeback", "--aio=threads"],
        Cache::Direct => ["--cache=none", "--aio=io_uring"],
    });
    command.arg(image);
    command
}

fn daemon(mut command: Command, aio: Aio, side: &Side, image: &Path, socket: &Path) -> Command {
    let direct = if side.cache == Cache::Direct { "on" } else { "off" };
    let mut node = |options: String| {
        command.arg("--blockdev").arg(options);
    };
    let file = format!("driver=file,filename={},cache.direct={direct},aio={}", image.display(), aio_name(aio));
    match side.format {
        Format::Null => {
            let fill = if aio == Aio::NoFill { "off" } else { "on" };
            node(format!("driver=null-co,node-name=disk,size={},read-zeroes={fill}", super::images::NULL_BYTES));
        }
        // Without the raw format above it, which has nothing to do: the shortest way that this server has.
        Format::Raw => node(format!("{file},node-name=disk")),
        format => {
            node(format!("{file},node-name=file"));
            let format = qemu_format(format);
            node(format!("driver={format},node-name=disk,file=file,cache.direct={direct}"));
        }
    }
    let address = format!("addr.type=unix,addr.path={}", socket.display());
    command.arg("--export");
    command.arg(format!("type=vhost-user-blk,id=export,node-name=disk,writable=on,num-queues=4,{address}"));
    command
}

fn aio_name(aio: Aio) -> &'static str {
    match aio {
        Aio::Uring => "io_uring",
        Aio::Native => "native",
        Aio::Threads | Aio::NoFill => "threads",
    }
}
