//! How the device under a thin disk is made longer: what `spile serve` is told of it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use spile_core::{Error, ErrorKind, Result};

use crate::units::{parse_duration, parse_size};

/// The options of a DISK that concern its growth, for messages.
pub const OPTIONS: &str = "grow=COMMAND, grow-ahead=SIZE, grow-timeout=TIME";

/// With less room than this the device is to be made longer. `lvextend` takes about a second, and several where hosts share the volume group; a
/// guest writes a gibibyte in that time at most, on most storage.
pub const DEFAULT_AHEAD_BYTES: u64 = 1 << 30;
/// The longest time that a command may take.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// No command may take longer. Guests give up long before.
const MOST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// What is said of the growth of a disk, or of all disks of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GrowOptions {
    /// The program that makes the device longer.
    pub command: Option<PathBuf>,
    /// With less room than this, the device is to be made longer.
    pub ahead_bytes: Option<u64>,
    /// The longest time that the program may take.
    pub timeout: Option<Duration>,
    /// A disk that can never need the program is served without it, and not refused.
    pub leaves_others: bool,
}

impl GrowOptions {
    /// Takes an option of a DISK. False when it is none of these.
    ///
    /// # Errors
    /// A message fit for a command line.
    pub fn read_option(&mut self, key: &str, value: &str) -> std::result::Result<bool, String> {
        match key {
            "grow" => self.command = Some(value.into()),
            "grow-ahead" => self.ahead_bytes = Some(parse_size(value)?),
            "grow-timeout" => self.timeout = Some(parse_duration(value)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// These options, and where they say nothing, those of the server.
    #[must_use]
    pub fn or(&self, server: &Self) -> Self {
        Self {
            command: self.command.clone().or_else(|| server.command.clone()),
            ahead_bytes: self.ahead_bytes.or(server.ahead_bytes),
            timeout: self.timeout.or(server.timeout),
            leaves_others: self.command.is_none() && server.leaves_others,
        }
    }

    /// Refuses a program that could not be run, and a time that is none.
    ///
    /// # Errors
    /// `InvalidInput` when it is no absolute path, or no program, or may take more than a day; the system's.
    pub fn check(&self) -> Result<()> {
        if self.timeout.is_some_and(|timeout| timeout > MOST_TIMEOUT) {
            let what = "the command that makes a device longer may take a day at most";
            return Err(Error::new(ErrorKind::InvalidInput, what).hint("a shorter time: --grow-timeout"));
        }
        self.command.as_deref().map_or(Ok(()), check_program)
    }
}

fn check_program(program: &Path) -> Result<()> {
    let refuse = |what: &str, hint: &str| Err(Error::new(ErrorKind::InvalidInput, what).at_path(program).hint(hint));
    if !program.is_absolute() {
        return refuse("the command that makes a device longer is no absolute path", "say the program's whole path");
    }
    let stat = std::fs::metadata(program).map_err(|source| Error::io("stat", source).at_path(program))?;
    match stat.is_file() && stat.permissions().mode() & 0o111 != 0 {
        true => Ok(()),
        false => refuse("the command that makes a device longer is no program", "make it executable: chmod +x"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_options_of_its_own_or_the_servers() {
        let mut own = GrowOptions::default();
        assert_eq!(own.read_option("grow-ahead", "64M"), Ok(true));
        assert_eq!(own.read_option("iops", "1"), Ok(false));
        assert!(own.read_option("grow-timeout", "soon").unwrap_err().contains("not a length of time"));
        let server = GrowOptions {
            command: Some("/bin/true".into()),
            ahead_bytes: Some(1),
            timeout: Some(Duration::from_secs(5)),
            leaves_others: true,
        };
        assert_eq!(own.or(&server), GrowOptions { ahead_bytes: Some(64 << 20), ..server.clone() });
        // Who names a program for one disk means that disk.
        own.read_option("grow", "/bin/false").unwrap();
        assert!(!own.or(&server).leaves_others);
    }

    #[test]
    fn only_a_program_with_a_whole_path_is_run() {
        let of = |path: &str| GrowOptions { command: Some(path.into()), ..GrowOptions::default() }.check();
        of("/bin/sh").unwrap();
        assert_eq!(of("sh").unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(of("/etc/passwd").unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(of("/no/such").unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_command_takes_a_day_at_most() {
        let of = |timeout: &str| {
            let mut options = GrowOptions::default();
            options.read_option("grow-timeout", timeout).unwrap();
            options.check()
        };
        of("86400").unwrap();
        assert_eq!(of("86401").unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(of("18000000000000000000").unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}
