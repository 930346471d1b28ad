//! Runs the command that makes a device longer.
//!
//! It is a program with fixed arguments, and no shell looks at them. It sees nothing of the server's environment. It has a process group of
//! its own, so that its end can be asked of all that it has started. What it says on stderr goes to the log, within bounds.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, Signal, kill_process_group};
use spile_core::{Error, ErrorKind, Result};

/// Where the command's own programs are found.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// How often the command is looked at while it runs.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long a command that takes too long may take to end in order. A volume manager that is killed in the middle of a change may leave a
/// volume suspended.
pub(super) const END_PATIENCE: Duration = Duration::from_secs(5);
/// So many lines of a command go to the log, and so many bytes of each.
const MOST_LINES: usize = 50;
const MOST_LINE_BYTES: usize = 400;

/// What is run.
pub(super) struct Run<'a> {
    pub program: &'a Path,
    pub arguments: Vec<OsString>,
    /// The disk's name, which the command sees as `SPILE_DISK`.
    pub disk: &'a str,
    pub timeout: Duration,
}

impl Run<'_> {
    /// Runs the command to its end. It blocks for as long as that takes.
    ///
    /// # Errors
    /// `Io` with the command's last words when it fails; `TimedOut`; the system's when it cannot be started.
    pub fn finish(&self) -> Result<()> {
        let mut child = self.start()?;
        let mut words = Words::new(child.stderr.take(), self.disk);
        let end = Instant::now() + self.timeout;
        let status = match wait(&mut child, &mut words, end)? {
            Some(status) => status,
            None => {
                stop(&mut child, &mut words)?;
                let what = format!("{} has not ended in {:?}, and was ended", self.program.display(), self.timeout);
                return Err(Error::new(ErrorKind::TimedOut, what).hint("a longer time: --grow-timeout"));
            }
        };
        match status.success() {
            true => Ok(()),
            false => Err(Error::new(
                ErrorKind::Io,
                format!("{} failed ({status}){}", self.program.display(), words.last_words()),
            )),
        }
    }

    fn start(&self) -> Result<Child> {
        let mut command = Command::new(self.program);
        command.args(&self.arguments).env_clear().env("PATH", PATH).env("LC_ALL", "C").env("SPILE_DISK", self.disk);
        command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
        command.spawn().map_err(|source| Error::io("run a command", source).at_path(self.program))
    }
}

/// Waits for the end of the command, for `None` at most until `end`.
fn wait(child: &mut Child, words: &mut Words<'_>, end: Instant) -> Result<Option<ExitStatus>> {
    loop {
        words.hear(LOOK_EVERY);
        if let Some(status) = child.try_wait().map_err(|source| Error::io("wait for a command", source))? {
            // Whoever else has its stderr may keep it for ever.
            words.hear(Duration::ZERO);
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            return Ok(None);
        }
    }
}

/// Asks the command and all that it has started to end, and ends them when they do not. It returns when the command is gone: until then no
/// other one may run.
fn stop(child: &mut Child, words: &mut Words<'_>) -> Result<()> {
    let group = Pid::from_child(child);
    let _ = kill_process_group(group, Signal::TERM);
    if wait(child, words, Instant::now() + END_PATIENCE)?.is_none() {
        let _ = kill_process_group(group, Signal::KILL);
        child.wait().map_err(|source| Error::io("wait for a command", source))?;
    }
    Ok(())
}

/// What the command says on stderr.
struct Words<'a> {
    stderr: Option<ChildStderr>,
    disk: &'a str,
    line: Vec<u8>,
    last: String,
    lines: usize,
}

impl<'a> Words<'a> {
    fn new(stderr: Option<ChildStderr>, disk: &'a str) -> Self {
        // One that cannot be read without a wait is not read.
        let stderr = stderr.filter(|stderr| ioctl_fionbio(stderr, true).is_ok());
        Self { stderr, disk, line: Vec::new(), last: String::new(), lines: 0 }
    }

    /// Waits for words for `patience` at most, and takes those that are there.
    fn hear(&mut self, patience: Duration) {
        let Some(stderr) = &mut self.stderr else { return std::thread::sleep(patience) };
        let timeout = Timespec::try_from(patience).unwrap_or_default();
        let _ = poll(&mut [PollFd::new(&*stderr, PollFlags::IN)], Some(&timeout));
        let mut bytes = [0; 4096];
        match stderr.read(&mut bytes) {
            Ok(0) => self.stderr = None,
            Ok(count) => self.take(&bytes[..count]),
            Err(_) => {}
        }
        if self.stderr.is_none() {
            self.end_line();
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        for byte in bytes {
            match byte {
                b'\n' => self.end_line(),
                byte if self.line.len() < MOST_LINE_BYTES => self.line.push(*byte),
                _ => {}
            }
        }
    }

    fn end_line(&mut self) {
        let line = String::from_utf8_lossy(&std::mem::take(&mut self.line)).trim().to_owned();
        if line.is_empty() {
            return;
        }
        self.lines += 1;
        if self.lines <= MOST_LINES {
            let disk = self.disk;
            tracing::warn!(journal.disk = disk, "the command that makes room for the disk {disk:?} says: {line}");
        }
        self.last = line;
    }

    /// The last line, to follow what has failed.
    fn last_words(&mut self) -> String {
        self.end_line();
        if self.last.is_empty() { String::new() } else { format!(": {}", self.last) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, timeout: Duration) -> Result<()> {
        let arguments = ["-c", script, "hook", "/dev/x y", "1"].map(OsString::from).to_vec();
        Run { program: Path::new("/bin/sh"), arguments, disk: "a disk", timeout }.finish()
    }

    const LONG: Duration = Duration::from_secs(100);

    #[test]
    fn a_command_has_its_arguments_and_nothing_of_our_environment() {
        shell(r#"test "$1" = "/dev/x y" && test "$2" = 1 && test "$SPILE_DISK" = "a disk" && test "$PWD" = /"#, LONG)
            .unwrap();
        shell(r#"test -z "$CARGO_PKG_NAME$HOME""#, LONG).unwrap();
        assert!(std::env::var_os("CARGO_PKG_NAME").is_some());
    }

    #[test]
    fn a_command_that_fails_is_told_with_its_last_words() {
        let error = shell("echo first >&2; printf 'no extents are left' >&2; exit 5", LONG).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(text.contains("exit status: 5") && text.contains(": no extents are left"), "{text}");
        let missing = Run { program: Path::new("/no/such"), arguments: Vec::new(), disk: "d", timeout: LONG };
        assert_eq!(missing.finish().unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_command_that_hangs_is_ended_with_all_that_it_has_started() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let script = format!("trap '' TERM; sleep 1000 & echo $! > {}; wait; sleep 1000", file.display());
        let error = shell(&script, Duration::from_millis(300)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        let pid: i32 = std::fs::read_to_string(file).unwrap().trim().parse().unwrap();
        let is_over = || match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z')),
            Err(_) => true,
        };
        let end = Instant::now() + LONG;
        while !is_over() {
            assert!(Instant::now() < end, "what the command has started goes on");
            std::thread::sleep(LOOK_EVERY);
        }
    }

    #[test]
    fn a_command_may_leave_a_helper_that_keeps_its_stderr() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        shell(&format!("sleep 1000 & echo $! > {}", file.display()), LONG).unwrap();
        let pid: i32 = std::fs::read_to_string(file).unwrap().trim().parse().unwrap();
        // It is there still: nobody has waited for its end.
        rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }

    #[test]
    fn what_a_command_says_is_bounded() {
        let mut words = Words::new(None, "d");
        words.take(&[b'x'; 1 << 20]);
        assert_eq!(words.line.len(), MOST_LINE_BYTES);
        words.end_line();
        (0..1000).for_each(|_| words.take(b"line\n"));
        assert_eq!((words.lines, words.last_words().as_str()), (1001, ": line"));
    }
}
