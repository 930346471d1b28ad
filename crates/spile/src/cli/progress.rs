//! How far the work of a command is, on stderr: a bar on a terminal; elsewhere, as in a log, a line from time to time.

use std::io::IsTerminal as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::log::complain;
use crate::units::format_size;

/// The time between two lines.
const EVERY: Duration = Duration::from_secs(10);

/// How far work is.
pub(super) struct Progress {
    bar: indicatif::ProgressBar,
    what: &'static str,
    /// Where stderr is no terminal: when the next line is due.
    due: Option<Mutex<Due>>,
}

/// When a line is due.
struct Due(Instant);

impl Due {
    /// True when a line is to be written `now`.
    fn is_now(&mut self, now: Instant) -> bool {
        let is_now = now >= self.0;
        if is_now {
            self.0 = now + EVERY;
        }
        is_now
    }
}

/// Shows how far work on `total_bytes` is; on a terminal also how long it takes still. `what` is done: `moving`.
pub(super) fn progress_bar(total_bytes: u64, what: &'static str) -> Progress {
    let template = "{msg} {wide_bar} {binary_bytes} of {binary_total_bytes} {decimal_bytes_per_sec}, {eta} left";
    let style =
        indicatif::ProgressStyle::with_template(template).unwrap_or_else(|_| indicatif::ProgressStyle::default_bar());
    let bar = indicatif::ProgressBar::new(total_bytes).with_style(style).with_message(what);
    let due = (!std::io::stderr().is_terminal()).then(|| Mutex::new(Due(Instant::now() + EVERY)));
    Progress { bar, what, due }
}

impl Progress {
    /// There are so many bytes in all.
    pub fn set_length(&self, total_bytes: u64) {
        self.bar.set_length(total_bytes);
    }

    /// So many bytes are done in all.
    pub fn set_position(&self, done_bytes: u64) {
        self.bar.set_position(done_bytes);
        self.tell();
    }

    /// So many more bytes are done.
    pub fn inc(&self, bytes: u64) {
        self.bar.inc(bytes);
        self.tell();
    }

    /// The work is over.
    pub fn finish_and_clear(&self) {
        self.bar.finish_and_clear();
    }

    fn tell(&self) {
        let Some(due) = &self.due else { return };
        if due.lock().unwrap_or_else(PoisonError::into_inner).is_now(Instant::now()) {
            let of = self.bar.length().map_or(String::new(), |total| format!(" of {}", format_size(total)));
            let left_s = self.bar.eta().as_secs();
            let left = if left_s > 0 { format!(", {left_s} s left") } else { String::new() };
            complain(format_args!("{}: {}{of}{left}", self.what, format_size(self.bar.position())));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_comes_from_time_to_time_and_not_with_each_step() {
        let begin = Instant::now();
        let mut due = Due(begin + EVERY);
        let lines = (0..1000).filter(|step| due.is_now(begin + EVERY * *step / 100)).count();
        assert_eq!(lines, 9);
    }
}
