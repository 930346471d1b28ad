//! Processes of a measurement: they end with it, whatever ends it.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use spile_core::{Error, ErrorKind, Result, ResultExt};

use super::folder::memory_path;

/// How long a process may take until all its sockets and files are there.
const PATIENCE: Duration = Duration::from_secs(120);

/// The hidden subcommand that becomes another one, which is killed when we end.
pub const TIED: &str = "bench-tied";

/// Becomes `PROGRAM ARGS…`, by default this program, killed by the kernel when the process that started this one ends.
///
/// # Errors
/// When that cannot be.
pub fn become_tied(program: Option<&Path>, args: &[OsString]) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|e| Error::io("ask for our end", e.into()))?;
    let program = program.map_or_else(this_program, |program| Ok(program.to_owned()))?;
    Err(Error::io("start", Command::new(&program).args(args).exec()).at_path(&program))
}

fn this_program() -> Result<PathBuf> {
    std::env::current_exe().map_err(|e| Error::io("find this program", e))
}

/// Another process of this program, with other arguments. It is killed when this is dropped, and when this process ends. Start it from a
/// thread that lives as long as it: the kernel kills it when the thread ends that has started it.
pub struct Tied {
    child: Child,
    name: String,
}

impl Tied {
    /// Starts it; what it says on stdout is dropped.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(name: impl Into<String>, args: impl IntoIterator<Item = OsString>) -> Result<Self> {
        Self::start_with(name, args, None)
    }

    /// Starts it with a variable in its environment.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_with(
        name: impl Into<String>,
        args: impl IntoIterator<Item = OsString>,
        variable: Option<(&str, String)>,
    ) -> Result<Self> {
        let mut command = command(None, args)?;
        command.envs(variable);
        Self::spawn(name, command)
    }

    /// Starts another program in the same way.
    ///
    /// # Errors
    /// When it cannot be started. A program that is not installed has ended at the first [`Self::check`].
    pub fn start_program(
        name: impl Into<String>,
        program: &str,
        args: impl IntoIterator<Item = OsString>,
    ) -> Result<Self> {
        let mut command = command(Some(program), args)?;
        // It has its own words for what we do to it.
        command.stderr(Stdio::null());
        Self::spawn(name, command)
    }

    fn spawn(name: impl Into<String>, mut command: Command) -> Result<Self> {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        Ok(Self { child: child.map_err(|e| Error::io("start this program once more", e))?, name: name.into() })
    }

    /// Waits until it has made its sockets or files.
    ///
    /// # Errors
    /// As [`Self::check`]; `TimedOut` after [`PATIENCE`].
    pub fn wait_for(&mut self, paths: impl IntoIterator<Item: AsRef<Path>>) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        for path in paths {
            while !path.as_ref().exists() {
                self.check()?;
                if Instant::now() > end {
                    let what = format!("{} does not begin to serve", self.name);
                    return Err(Error::new(ErrorKind::TimedOut, what)).at_path(path.as_ref());
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(())
    }

    /// Waits until it has done its work.
    ///
    /// # Errors
    /// `Io` when it fails; it has said why on stderr.
    pub fn wait_for_success(mut self) -> Result<()> {
        let ended = self.child.wait().map_err(|e| Error::io(format!("wait for {}", self.name), e))?;
        match ended.success() {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Io, format!("{} has failed: {ended}", self.name))),
        }
    }

    /// Asks it to end, and waits until it has. What it has open is closed then, and unlocked.
    ///
    /// # Errors
    /// `Io` when it fails.
    pub fn stop(self) -> Result<()> {
        let pid = Pid::from_raw(self.id().cast_signed()).expect("a child has a number");
        kill_process(pid, Signal::TERM).map_err(|e| Error::io(format!("end {}", self.name), e.into()))?;
        self.wait_for_success()
    }

    /// Ends it now.
    pub fn end(&mut self) {
        // One that has ended already cannot be killed, and need not.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// An error when it has ended.
    ///
    /// # Errors
    /// `Io` with its exit status.
    pub fn check(&mut self) -> Result<()> {
        match self.child.try_wait() {
            Ok(Some(status)) => Err(Error::new(ErrorKind::Io, format!("{} has ended: {status}", self.name))),
            _ => Ok(()),
        }
    }
}

impl Drop for Tied {
    fn drop(&mut self) {
        self.end();
    }
}

/// A disk as the program's command line takes it: its path, in which commas are doubled, and its options, each with a comma before it.
pub fn disk_argument(path: &Path, options: &str) -> OsString {
    let bytes =
        path.as_os_str().as_bytes().iter().flat_map(|byte| if *byte == b',' { vec![b','; 2] } else { vec![*byte] });
    OsString::from_vec(bytes.chain(options.bytes()).collect())
}

fn command(program: Option<&str>, args: impl IntoIterator<Item = OsString>) -> Result<Command> {
    let mut command = Command::new(this_program()?);
    // The marks of failed syncs are the host's own business; those of an experiment go with its folder.
    command.env("SPILE_RUN_DIR", memory_path());
    command.arg(TIED).args(program.map(|program| format!("--program={program}"))).arg("--").args(args);
    Ok(command)
}

/// A process that takes lines on stdin and answers each with a line on stdout.
pub struct Talking {
    tied: Tied,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Talking {
    /// Starts it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(name: impl Into<String>, args: impl IntoIterator<Item = OsString>) -> Result<Self> {
        let failed = |e| Error::io("start this program once more", e);
        let mut child = command(None, args)?.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        let (input, output) = (child.stdin.take().expect("it is piped"), child.stdout.take().expect("it is piped"));
        let (sender, lines) = sync_channel(1);
        std::thread::Builder::new()
            .name("bench-lines".into())
            .spawn(move || {
                for line in BufReader::new(output).lines().map_while(std::io::Result::ok) {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            })
            .map_err(failed)?;
        Ok(Self { tied: Tied { child, name: name.into() }, input, lines })
    }

    /// Sends it a line.
    ///
    /// # Errors
    /// When it has ended.
    pub fn say(&mut self, line: &str) -> Result<()> {
        let said = writeln!(self.input, "{line}").and_then(|()| self.input.flush());
        said.map_err(|e| Error::io(format!("cannot speak to {}", self.tied.name), e))
    }

    /// Its next line.
    ///
    /// # Errors
    /// When it has ended, or has no line for `patience`.
    pub fn hear(&mut self, patience: Duration) -> Result<String> {
        self.lines.recv_timeout(patience).map_err(|e| match e {
            RecvTimeoutError::Timeout => {
                let seconds = patience.as_secs();
                Error::new(ErrorKind::TimedOut, format!("{} says nothing for {seconds} s", self.tied.name))
            }
            RecvTimeoutError::Disconnected => {
                Error::new(ErrorKind::Io, format!("{} has ended without an answer", self.tied.name))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_of_a_path_are_no_options() {
        assert_eq!(disk_argument(Path::new("/srv/a,name=b.raw"), ",format=raw"), "/srv/a,,name=b.raw,format=raw");
    }
}
