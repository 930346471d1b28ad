//! The log: warnings and errors of all threads, one line each on stderr, such as a request that failed or a connection that
//! could not be accepted. The code that reports an event bounds how often it does so. Where stderr is systemd's journal, events go
//! there with their fields ([`journal`]).

mod journal;

use std::fmt::{Debug, Display, Write as _};
use std::io::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber, callsite, subscriber};

use journal::Journal;
pub use spile_core::printable;

/// How the names of fields begin that the journal has and a line leaves out, because its message says the same.
const ONLY_FOR_FIELDS: &str = "journal.";

/// Prints one line on stderr; when stderr is closed, the line is lost. It passes [`printable`], because parts of it may
/// come from a file that a stranger made, and must not reach the terminal.
pub fn complain(text: impl Display) {
    // In one piece: other processes may write there, too.
    let _ = std::io::stderr().write_all(line_of(text).as_bytes());
}

/// A line of the log on stderr.
fn line_of(text: impl Display) -> String {
    format!("spile: {}\n", printable(&text.to_string()))
}

/// From now on, what all threads report goes to stderr, or to the journal if stderr leads there: warnings and errors, until [`set_level`]
/// says otherwise.
pub fn to_stderr() {
    // This fails when there is a subscriber already. Then that one is used.
    let _ = subscriber::set_global_default(Log { journal: Journal::of_stderr() });
}

/// The index of the level in [`LEVELS`] up to which events are written.
static LEVEL: AtomicUsize = AtomicUsize::new(1);
const LEVELS: [Level; 5] = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE];

/// From now on, events up to this level are written. At the start that is warnings and errors.
pub fn set_level(level: Level) {
    let index = LEVELS.iter().position(|other| *other == level).unwrap_or(1);
    LEVEL.store(index, Ordering::Relaxed);
    // Each place in the code that reports remembers whether anybody wants to hear it.
    callsite::rebuild_interest_cache();
}

fn level() -> Level {
    LEVELS[LEVEL.load(Ordering::Relaxed)]
}

struct Log {
    journal: Option<Journal>,
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= level()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(level().into())
    }

    fn event(&self, event: &Event<'_>) {
        if self.journal.as_ref().is_some_and(|journal| journal.send(event)) {
            return;
        }
        let mut line = Line::default();
        event.record(&mut line);
        complain(line.finish());
    }

    // There are no spans: `enabled` refuses them.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// `message (name=value, …): error`.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
    error: String,
}

impl Line {
    fn finish(self) -> String {
        let fields = if self.fields.is_empty() { String::new() } else { format!(" ({})", self.fields) };
        let error = if self.error.is_empty() { String::new() } else { format!(": {}", self.error) };
        format!("{}{fields}{error}", self.message)
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let comma = if self.fields.is_empty() { "" } else { ", " };
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            "error" => write!(self.error, "{value:?}"),
            name if name.starts_with(ONLY_FOR_FIELDS) => Ok(()),
            name => write!(self.fields, "{comma}{name}={value:?}"),
        };
    }
}
