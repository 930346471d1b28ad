//! A panic in a server: it ends the process, as if it had been killed.
//!
//! A panic is a bug, and nothing is served by code that has failed: a guest whose request has lost its task would wait for
//! ever, and so would all who need the locks that the task held. The next process finds what was in flight, as after kill −9,
//! and answers all of it.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::PanicHookInfo;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::log::printable;

/// How long the message waits for a reader of stderr. Nobody may keep a process that has failed alive.
const PATIENCE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// A pipe that has room takes so many bytes at once.
const PIECE_BYTES: usize = 4096;

/// From now on a panic of any thread ends this process by SIGABRT, after a message on stderr.
pub fn abort_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        say(&message(panic));
        // It is empty unless RUST_BACKTRACE asks for it.
        let backtrace = Backtrace::capture();
        if backtrace.status() == BacktraceStatus::Captured {
            say(&format!("{backtrace}\n"));
        }
        std::process::abort();
    }));
}

fn message(panic: &PanicHookInfo<'_>) -> String {
    let place = panic.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or("without a name");
    format!(
        "spile: a bug: the thread {thread} panicked at {place}: {}\n\
         spile: this process ends at once, as if it had been killed. Nothing that was acknowledged is lost. Guests wait, and the \
         next server on the same sockets takes up their requests; NBD clients connect again\n\
         spile: please report the lines above with the version ({}); RUST_BACKTRACE=1 adds where it was called from\n",
        printable(text(panic.payload())),
        env!("CARGO_PKG_VERSION"),
    )
}

fn text(payload: &dyn Any) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("(no text)")
}

/// Writes `text`, which ends with a line break, to stderr without its lock, which a thread that waits for a full pipe may hold. What
/// nobody reads in time is lost: the process can end in any case.
pub(crate) fn say(text: &str) {
    let stderr = std::io::stderr();
    for piece in text.as_bytes().chunks(PIECE_BYTES) {
        let has_room = poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], Some(&PATIENCE)).is_ok_and(|ready| ready > 0);
        if !has_room || rustix::io::write(&stderr, piece).is_err() {
            return;
        }
    }
}
