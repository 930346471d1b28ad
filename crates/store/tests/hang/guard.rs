//! What cleans up after a test, however the test ends.

use std::process::{Child, ChildStdin, Command, Stdio};

/// A process that runs a command once nobody holds the other end of its input: when this value is dropped, or when the test
/// process is gone, also by SIGKILL. It does so after [`LONGEST_S`] in any case, because a process with a thread that hangs in the
/// kernel closes nothing.
pub struct Guardian {
    child: Child,
    input: Option<ChildStdin>,
}

/// Seconds; longer than a test waits for anything.
const LONGEST_S: u32 = 100;

impl Guardian {
    pub fn new(command: &str) -> Self {
        let script = format!("timeout {LONGEST_S} cat >/dev/null; {command}");
        let child =
            Command::new("setsid").args(["sh", "-c", &script]).stdin(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut child = child.unwrap();
        let input = child.stdin.take();
        Self { child, input }
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}
