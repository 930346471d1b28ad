//! The error numbers of the NBD wire ("Error values"): a column of the fronts' one table, but for two kinds that depend
//! on the command.

use spile_core::{Error, ErrorKind};
use spile_front::WireStatus;
pub use spile_front::nbd::{EINVAL, EIO, ENOMEM, ENOSPC, ENOTSUP, EOVERFLOW, EPERM, ESHUTDOWN};

use crate::wire::request::{Command, FLAG_FAST_ZERO};

/// The number that answers `command` with `flags` when it failed with `error`.
///
/// Two kinds depend on the command: a request past the end is `ENOSPC` for writes and `EINVAL` otherwise; `ENOTSUP` may
/// answer nothing but a fast zero.
pub fn wire_errno(error: &Error, command: Command, flags: u16) -> u32 {
    match error.kind() {
        ErrorKind::OutOfRange => out_of_range(command),
        ErrorKind::Unsupported if flags & FLAG_FAST_ZERO != 0 => ENOTSUP,
        kind => WireStatus::of(kind).nbd,
    }
}

/// The number for a request past the end of the export.
pub fn out_of_range(command: Command) -> u32 {
    match command {
        Command::Write | Command::WriteZeroes => ENOSPC,
        _ => EINVAL,
    }
}

/// The text that the client gets: the message alone. Paths, offsets in files and hints are for the log of the server
/// only.
pub fn wire_message(error: &Error) -> String {
    error.message().to_owned()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn errno(kind: ErrorKind, command: Command, flags: u16) -> u32 {
        wire_errno(&Error::new(kind, "x"), command, flags)
    }

    #[test]
    fn enotsup_answers_only_a_fast_zero() {
        let zero = Command::WriteZeroes;
        assert_eq!(errno(ErrorKind::Unsupported, zero, FLAG_FAST_ZERO), ENOTSUP);
        assert_eq!(errno(ErrorKind::Unsupported, zero, 0), EINVAL);
    }

    #[test]
    fn past_the_end_depends_on_the_command() {
        assert_eq!(errno(ErrorKind::OutOfRange, Command::Read, 0), EINVAL);
        assert_eq!(errno(ErrorKind::OutOfRange, Command::Trim, 0), EINVAL);
        assert_eq!(errno(ErrorKind::OutOfRange, Command::Write, 0), ENOSPC);
    }

    #[test]
    fn unknown_trouble_is_an_io_error() {
        assert_eq!(errno(ErrorKind::Corrupt, Command::Read, 0), EIO);
        assert_eq!(errno(ErrorKind::TimedOut, Command::Read, 0), EIO);
    }

    #[test]
    fn the_wire_learns_no_paths() {
        let error = Error::errno("read failed", 5).at_path(Path::new("/secret"));
        assert_eq!(wire_message(&error), "read failed");
    }
}
