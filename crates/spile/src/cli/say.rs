//! What commands print on stdout. All of it goes through here, so that no name of a stranger's file reaches a terminal as it is
//! ([`printable`]). Stderr is [`log::complain`](crate::log::complain)'s.

use std::fmt::Display;
use std::io::{Error as IoError, ErrorKind as IoKind, Write};

use serde::Serialize;
use spile_core::{Error, ErrorKind, Result, exact_json, printable, printable_lines};
use utoipa::ToSchema;

use crate::log::complain;

/// Prints a line on stdout. A reader that has gone (`spile map DISK | head`) changes nothing: the exit code is the command's.
/// When stdout cannot be written to for another reason, the program ends with a failure, because its output is lost.
pub(super) fn say(line: impl Display) {
    written(try_say(line));
}

/// [`say`], of several lines: a table, or a text of the program's own. Names in it have passed [`printable`], so that none makes a line.
pub(super) fn say_lines(text: impl Display) {
    written(unless_gone(write_out(&printable_lines(&text.to_string()))));
}

/// [`say`], for those who go on when stdout cannot be written to.
pub(super) fn try_say(line: impl Display) -> std::io::Result<()> {
    unless_gone(write_out(&printable(&line.to_string())))
}

/// [`say_lines`]; false when nobody reads stdout any more, as behind `head`.
///
/// # Errors
/// When stdout cannot be written to for another reason.
pub(super) fn put_lines(text: impl Display) -> Result<bool> {
    is_read(write_out(&printable_lines(&text.to_string())))
}

/// Prints a JSON value in one line; false when nobody reads stdout any more.
///
/// # Errors
/// When stdout cannot be written to for another reason.
pub(super) fn put_json(value: &impl Serialize) -> Result<bool> {
    is_read(write_out(&json_line(value)?))
}

/// A JSON value in one line.
///
/// # Errors
/// When it cannot be written as JSON.
pub(super) fn json_line(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map(|text| exact_json(&text)).map_err(no_json)
}

/// Prints an answer as JSON on stdout. `spile schema` knows its shape.
pub(super) fn print_json(value: &(impl Serialize + ToSchema)) -> Result<()> {
    print_text(value)
}

/// Prints one JSON value on stdout.
pub(super) fn print_text(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(no_json)?;
    written(unless_gone(write_out(&exact_json(&text))));
    Ok(())
}

fn no_json(error: serde_json::Error) -> Error {
    Error::new(ErrorKind::InvalidInput, "cannot write JSON").caused_by(error)
}

fn write_out(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush())
}

fn written(result: std::io::Result<()>) {
    if let Err(error) = result {
        complain(format_args!("cannot write to stdout: {error}"));
        std::process::exit(1);
    }
}

fn is_gone(error: &IoError) -> bool {
    error.kind() == IoKind::BrokenPipe
}

fn unless_gone(result: std::io::Result<()>) -> std::io::Result<()> {
    result.or_else(|error| if is_gone(&error) { Ok(()) } else { Err(error) })
}

fn is_read(result: std::io::Result<()>) -> Result<bool> {
    match result {
        Err(error) if is_gone(&error) => Ok(false),
        result => result.map(|()| true).map_err(|error| Error::io("write to stdout", error)),
    }
}
