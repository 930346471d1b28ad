//! The one table from the data path's errors to the error numbers of the NBD wire ("Error values").

use spile_core::{Error, ErrorKind};

use crate::wire::request::{Command, FLAG_FAST_ZERO};

/// `NBD_EPERM`
pub const EPERM: u32 = 1;
/// `NBD_EIO`
pub const EIO: u32 = 5;
/// `NBD_ENOMEM`
pub const ENOMEM: u32 = 12;
/// `NBD_EINVAL`
pub const EINVAL: u32 = 22;
/// `NBD_ENOSPC`
pub const ENOSPC: u32 = 28;
/// `NBD_EOVERFLOW`
pub const EOVERFLOW: u32 = 75;
/// `NBD_ENOTSUP`
pub const ENOTSUP: u32 = 95;
/// `NBD_ESHUTDOWN`
pub const ESHUTDOWN: u32 = 108;

/// The wire's number for `error` as the answer to `command` with `flags`.
///
/// Two kinds depend on the command: past the end is `ENOSPC` for writes and `EINVAL` otherwise; `ENOTSUP` may
/// answer nothing but a fast zero.
pub fn wire_errno(error: &Error, command: Command, flags: u16) -> u32 {
    match error.kind() {
        ErrorKind::InvalidInput => EINVAL,
        ErrorKind::OutOfRange => out_of_range(command),
        ErrorKind::ReadOnly | ErrorKind::Denied => EPERM,
        ErrorKind::NoSpace => ENOSPC,
        ErrorKind::Exhausted => ENOMEM,
        ErrorKind::Shutdown => ESHUTDOWN,
        ErrorKind::Unsupported if flags & FLAG_FAST_ZERO != 0 => ENOTSUP,
        ErrorKind::Unsupported => EINVAL,
        _ => EIO,
    }
}

/// The number for a request past the end of the export.
pub fn out_of_range(command: Command) -> u32 {
    match command {
        Command::Write | Command::WriteZeroes => ENOSPC,
        _ => EINVAL,
    }
}

/// What the client's user is told: the message alone. Paths, offsets in files and hints stay on this side of
/// the wire; they are for the log.
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
