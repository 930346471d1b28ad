//! How the program ends: exit codes, and the shape of its last words.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::error::ContextValue;
use nix::sys::signal::Signal;
use spile_core::{Error, ErrorKind, exact_json, printable, printable_lines};

use crate::log;
use crate::serving::api::types::Failure;
use crate::signals;

/// How the program ends when nothing failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// As asked.
    Ok,
    /// `compare`: the contents differ.
    Differs,
    /// `check`: a file that the image needs cannot be opened.
    Incomplete,
    /// `check`, `load`: wrong bytes.
    Corrupt,
    /// `check`: leaks only.
    Leaks,
    /// `load`: ended in order by a signal.
    Ended(Signal),
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        let code = match exit {
            Exit::Ok => 0u8,
            Exit::Differs | Exit::Incomplete => 1,
            Exit::Corrupt => 3,
            Exit::Leaks => 4,
            Exit::Ended(signal) => return (signals::exit_code(signal) as u8).into(),
        };
        code.into()
    }
}

/// The exit code of an error: 2 when what was asked for makes no sense, else 1. What the kernel calls an invalid argument is
/// a failure, as nobody typed it.
pub fn failure(error: &Error) -> ExitCode {
    match (error.kind(), error.os_errno()) {
        (ErrorKind::InvalidInput, None) => 2.into(),
        _ => ExitCode::FAILURE,
    }
}

/// How an error is written to stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorFormat {
    /// A line for people.
    Text,
    /// One line with a JSON object, the same as the control API's.
    Json,
}

impl ErrorFormat {
    /// JSON when `--json` is among the options. It is looked for before the command line is understood, because an error may be
    /// just that it is not.
    pub fn of_arguments(mut words: impl Iterator<Item = OsString>) -> Self {
        match words.by_ref().take_while(|word| word != "--").any(|word| word == "--json") {
            true => Self::Json,
            false => Self::Text,
        }
    }

    /// Writes the error.
    pub fn complain(self, error: &Error) {
        match (self, serde_json::to_string(&Failure::of(error).1)) {
            // When stderr is closed, the line is lost.
            (Self::Json, Ok(line)) => drop(writeln!(std::io::stderr(), "{}", exact_json(&line))),
            _ => log::complain(error),
        }
    }

    /// Ends a command line that was not understood, or that asked for help or the version.
    pub fn usage(self, mut error: clap::Error) -> ExitCode {
        make_tame(&mut error);
        let plain = error.to_string();
        if !error.use_stderr() {
            // The answer to --help or --version: it is lost when it cannot be written, unless nobody wants more of it.
            if let Err(failed) = error.print().and_then(|()| std::io::stdout().flush())
                && failed.kind() != std::io::ErrorKind::BrokenPipe
            {
                self.complain(&Error::io("cannot write to stdout", failed));
                return ExitCode::FAILURE;
            }
        } else if self == Self::Text && printable_lines(&plain) == plain {
            // When nobody reads it, it is lost.
            let _ = error.print();
        } else if self == Self::Text {
            // It names an argument that a terminal would obey, as `*` makes one of a stranger's file.
            let _ = std::io::stderr().write_all(printable_lines(&plain).as_bytes());
        } else {
            let first = plain.split("\n\n").next().unwrap_or_default();
            let words: Vec<_> = first.trim_start_matches("error: ").split_whitespace().collect();
            self.complain(&Error::new(ErrorKind::InvalidInput, words.join(" ")));
        }
        (error.exit_code() as u8).into()
    }
}

/// Escapes what a terminal would obey, or would end a line, in the words of the command line that `error` names.
fn make_tame(error: &mut clap::Error) {
    let named: Vec<_> = error.context().map(|(kind, value)| (kind, value.clone())).collect();
    for (kind, value) in named {
        let tame = match value {
            ContextValue::String(word) => ContextValue::String(printable(&word)),
            ContextValue::Strings(words) => ContextValue::Strings(words.iter().map(|word| printable(word)).collect()),
            _ => continue,
        };
        error.insert(kind, tame);
    }
}
