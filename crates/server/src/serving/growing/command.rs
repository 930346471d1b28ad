//! Runs the command that makes a device longer.
//!
//! It is a program with fixed arguments, and no shell looks at them. It sees nothing of the server's environment, and blocks none of the signals that the server
//! blocks: a command that takes too long is asked to end by one of them. It has a process group of its own, so that its end can be asked of all that it has
//! started.
//!
//! What it says on stderr goes to the log, within bounds. Its stderr is memory and no pipe: when the server ends, or hands its disks over, the command
//! goes on, and a pipe that nobody reads would end it in the middle of its work.

use std::ffi::{CStr, CString, OsString};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn};
use nix::sys::signal::{SigSet, Signal as NixSignal};
use rustix::fs::{Access, MemfdFlags, OFlags, access, fcntl_setfl, memfd_create};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, kill_process_group, test_kill_process_group, waitpid};
use spile_core::{Error, ErrorKind, Result};

/// All that the command sees of an environment, but for its disk. PATH says where its own programs are found.
const ENVIRONMENT: [&CStr; 2] = [c"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", c"LC_ALL=C"];
/// Runs the program that is its first argument in the folder `/`, so that it keeps no file system from being unmounted. The shell looks at nothing but its own words.
const IN_ROOT: [&CStr; 3] = [c"/bin/sh", c"-c", c"cd / && unset OLDPWD && exec \"$0\" \"$@\""];
/// How often the command is looked at while it runs.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How often the rest of a command's processes is looked at while they end.
const LOOK_AT_REST_EVERY: Duration = Duration::from_millis(100);
/// How long a command that takes too long may take to end in order. A volume manager that is killed in the middle of a change may leave a
/// volume suspended.
pub(super) const END_PATIENCE: Duration = Duration::from_secs(5);
/// So many lines of a command go to the log, and so many bytes of each.
const MOST_LINES: usize = 50;
const MOST_LINE_BYTES: usize = 400;
/// So much of what a command says is kept. When it says more before it is looked at again, only the end of that is heard.
const MOST_KEPT_BYTES: u64 = 64 << 10;

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
        let stderr = new_stderr()?;
        let child = self.start(&stderr)?;
        let mut words = Words::new(stderr, self.disk);
        let end = Instant::now() + self.timeout;
        let status = match wait(&child, &mut words, end)? {
            Some(status) => status,
            None => {
                stop(&child, &mut words)?;
                let (program, last) = (self.program.display(), words.last_words());
                let what = format!("{program} has not ended in {:?}, and was ended{last}", self.timeout);
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

    /// Starts it. The standard library's way to do that would pass the server's blocked signals on.
    fn start(&self, stderr: &File) -> Result<Child> {
        let failed = |source: std::io::Error| Error::io("run a command", source).at_path(self.program);
        // The shell would only tell by its exit code.
        access(self.program, Access::EXEC_OK).map_err(|errno| failed(errno.into()))?;
        let text = |bytes: Vec<u8>| CString::new(bytes).map_err(|_| failed(std::io::ErrorKind::InvalidInput.into()));
        let mut arguments = IN_ROOT.map(CStr::to_owned).to_vec();
        arguments.push(text(self.program.as_os_str().as_bytes().to_vec())?);
        for argument in &self.arguments {
            arguments.push(text(argument.clone().into_vec())?);
        }
        let mut environment = ENVIRONMENT.map(CStr::to_owned).to_vec();
        environment.push(text(format!("SPILE_DISK={}", self.disk).into_bytes())?);
        let nothing = File::options().read(true).write(true).open("/dev/null").map_err(failed)?;
        let spawn = || -> nix::Result<nix::unistd::Pid> {
            let mut files = PosixSpawnFileActions::init()?;
            files.add_dup2(nothing.as_raw_fd(), 0)?;
            files.add_dup2(nothing.as_raw_fd(), 1)?;
            files.add_dup2(stderr.as_raw_fd(), 2)?;
            let mut how = PosixSpawnAttr::init()?;
            how.set_flags(
                PosixSpawnFlags::POSIX_SPAWN_SETPGROUP
                    | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK
                    | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF,
            )?;
            how.set_pgroup(nix::unistd::Pid::from_raw(0))?;
            how.set_sigmask(&SigSet::empty())?;
            // Rust's programs ignore this one.
            how.set_sigdefault(&NixSignal::SIGPIPE.into())?;
            posix_spawn(IN_ROOT[0], &files, &how, &arguments, &environment)
        };
        let pid = spawn().map_err(|errno| failed(errno.into()))?;
        Ok(Child(Pid::from_raw(pid.as_raw()).expect("a process has a number")))
    }
}

/// The command, until its end was taken note of.
struct Child(Pid);

impl Child {
    /// How it has ended; `None` while it has not.
    fn try_wait(&self) -> Result<Option<ExitStatus>> {
        self.ended(WaitOptions::NOHANG)
    }

    fn wait(&self) -> Result<Option<ExitStatus>> {
        self.ended(WaitOptions::empty())
    }

    fn ended(&self, how: WaitOptions) -> Result<Option<ExitStatus>> {
        loop {
            match waitpid(Some(self.0), how) {
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::io("wait for a command", errno.into())),
                Ok(ended) => return Ok(ended.map(|(_, status)| ExitStatus::from_raw(status.as_raw()))),
            }
        }
    }
}

/// The stderr of a command: memory that is there for as long as the command has it.
fn new_stderr() -> Result<File> {
    let failed = |error: Errno| Error::io("create memory for what a command says", error.into());
    let file = memfd_create("stderr", MemfdFlags::CLOEXEC).map_err(failed)?;
    // Whatever is cut off behind the command's back, it goes on at the end.
    fcntl_setfl(&file, OFlags::APPEND).map_err(failed)?;
    Ok(file.into())
}

/// Waits for the end of the command, for `None` at most until `end`.
fn wait(child: &Child, words: &mut Words<'_>, end: Instant) -> Result<Option<ExitStatus>> {
    loop {
        let status = child.try_wait()?;
        words.hear();
        if status.is_some() || Instant::now() >= end {
            return Ok(status);
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Asks the command and all that it has started to end, and ends them when they do not. It returns when all are gone: until then no
/// other one may run. A shell is gone at once, and the volume manager that it has started may still be at work.
fn stop(child: &Child, words: &mut Words<'_>) -> Result<()> {
    let (group, end) = (child.0, Instant::now() + END_PATIENCE);
    let _ = kill_process_group(group, Signal::TERM);
    let has_ended = wait(child, words, end)?.is_some();
    while is_alive(group) && Instant::now() < end {
        std::thread::sleep(LOOK_AT_REST_EVERY);
    }
    if is_alive(group) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    if !has_ended {
        child.wait()?;
    }
    while is_alive(group) {
        std::thread::sleep(LOOK_AT_REST_EVERY);
    }
    words.hear();
    Ok(())
}

/// True while a process of the group runs. One that has ended, and whose end nobody has taken note of, runs no more: in a container nobody may
/// ever do.
fn is_alive(group: Pid) -> bool {
    match test_kill_process_group(group) {
        Ok(()) => {}
        // Processes of another user are there as well.
        Err(error) => return error != Errno::SRCH,
    }
    let Ok(processes) = std::fs::read_dir("/proc") else { return true };
    let stats = processes.flatten().filter_map(|process| std::fs::read_to_string(process.path().join("stat")).ok());
    stats.into_iter().any(|stat| runs_in(&stat, group))
}

/// True when the process of this line of `/proc/PID/stat` runs and belongs to the group.
fn runs_in(stat: &str, group: Pid) -> bool {
    // Behind the program's name, which may hold anything: the state, the parent, the group.
    let mut fields = stat.rsplit(')').next().unwrap_or("").split_whitespace();
    let (state, of_group) = (fields.next(), fields.nth(1));
    of_group == Some(group.to_string().as_str()) && !matches!(state, Some("Z" | "X"))
}

/// What the command says on stderr.
struct Words<'a> {
    stderr: File,
    /// Up to here it was heard.
    at: u64,
    disk: &'a str,
    line: Vec<u8>,
    last: String,
    lines: usize,
}

impl<'a> Words<'a> {
    fn new(stderr: File, disk: &'a str) -> Self {
        Self { stderr, at: 0, disk, line: Vec::new(), last: String::new(), lines: 0 }
    }

    /// Takes what was said since the last time, or the end of that. What was heard is not kept for long.
    fn hear(&mut self) {
        let len = self.stderr.metadata().map_or(self.at, |stat| stat.len());
        // A command that opens its stderr anew empties it.
        self.at = if self.at > len { 0 } else { self.at };
        if len - self.at > MOST_KEPT_BYTES {
            self.end_line();
            self.at = len - MOST_KEPT_BYTES;
        }
        let mut bytes = [0; 4096];
        while self.at < len
            && let Ok(count @ 1..) = self.stderr.read_at(&mut bytes, self.at)
        {
            self.at += count as u64;
            self.take(&bytes[..count]);
        }
        if len >= MOST_KEPT_BYTES && self.stderr.set_len(0).is_ok() {
            self.at = 0;
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
        let file = file.display();
        let stubborn = format!("trap '' TERM; sleep 1000 & echo $! > {file}; wait; sleep 1000");
        // Here the shell ends when it is asked to, and what it has started does not.
        let leaves = format!("(trap '' TERM; exec sleep 1000) & echo $! > {file}; sleep 1000");
        for script in [stubborn, leaves] {
            let error = shell(&script, Duration::from_millis(300)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
            let pid = std::fs::read_to_string(dir.path().join("pid")).unwrap();
            let is_over = match std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())) {
                Ok(stat) => stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z')),
                Err(_) => true,
            };
            assert!(is_over, "what the command has started goes on: {script}");
        }
    }

    /// A server blocks the signals that end it, in all of its threads.
    #[test]
    fn a_command_hears_that_it_is_to_end() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ended");
        SigSet::all().thread_block().unwrap();
        let script = format!("trap 'echo in order > {}; exit 0' TERM; sleep 1000 & wait", file.display());
        let error = shell(&script, Duration::from_millis(300)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert_eq!(std::fs::read_to_string(file).unwrap(), "in order\n");
    }

    #[test]
    fn the_processes_of_a_group_that_run_are_told_from_others() {
        let group = Pid::from_raw(77).unwrap();
        assert!(runs_in("80 (a) Z 1 (b) D 1 77 77 0", group));
        assert!(!runs_in("80 (a) Z 1 77 77 0", group));
        assert!(!runs_in("77 (a) S 77 78 77 0", group));
        assert!(!runs_in("", group));
    }

    #[test]
    fn a_command_goes_on_when_nobody_hears_it_any_more() {
        let dir = tempfile::tempdir().unwrap();
        let (go, done) = (dir.path().join("go"), dir.path().join("done"));
        let script = format!(
            "while test ! -e {}; do sleep 0.01; done; set -e; echo one >&2; echo two > /dev/stderr; : > {}",
            go.display(),
            done.display()
        );
        let arguments = ["-c", &script].map(OsString::from).to_vec();
        let stderr = new_stderr().unwrap();
        let child = Run { program: Path::new("/bin/sh"), arguments, disk: "d", timeout: LONG }.start(&stderr).unwrap();
        drop(stderr);
        std::fs::write(go, "").unwrap();
        assert!(child.wait().unwrap().unwrap().success() && done.exists());
    }

    #[test]
    fn the_last_words_are_the_last_however_much_was_said() {
        for lines in [1000, 100_000] {
            let stderr = new_stderr().unwrap();
            let mut words = Words::new(stderr.try_clone().unwrap(), "d");
            std::io::Write::write_all(&mut &stderr, "some words\n".repeat(lines).as_bytes()).unwrap();
            std::io::Write::write_all(&mut &stderr, b"the end").unwrap();
            words.hear();
            assert_eq!(words.last_words(), ": the end");
            assert!(stderr.metadata().unwrap().len() < MOST_KEPT_BYTES);
            std::io::Write::write_all(&mut &stderr, b"more\n").unwrap();
            words.hear();
            assert_eq!(words.last_words(), ": more");
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
        let mut words = Words::new(new_stderr().unwrap(), "d");
        words.take(&[b'x'; 1 << 20]);
        assert_eq!(words.line.len(), MOST_LINE_BYTES);
        words.end_line();
        (0..1000).for_each(|_| words.take(b"line\n"));
        assert_eq!((words.lines, words.last_words().as_str()), (1001, ": line"));
    }
}
