//! systemd's journal, natively: one datagram for each record, with fields that `journalctl` can select by
//! (<https://systemd.io/JOURNAL_NATIVE_PROTOCOL/>).
//!
//! The protocol is lines of `FIELD=value`. Libraries for it want a log facade of their own, or cannot be pointed at another socket, as tests
//! need.

use std::fmt::{Debug, Display, Write as _};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use spile_core::Error;
use tracing::field::{Field, Visit};
use tracing::{Event, Level};

use super::{Line, ONLY_FOR_FIELDS, line_of, printable};
use crate::serving::api::types::Failure;

/// Where the journal listens.
const SOCKET: &str = "/run/systemd/journal/socket";

/// The journal's socket.
#[derive(Debug)]
pub struct Journal {
    socket: UnixDatagram,
    /// Records that neither the journal nor stderr had room for.
    lost: AtomicU64,
}

impl Journal {
    /// The journal, if stderr leads there: systemd says to which file it leads in JOURNAL_STREAM. `None` also when the journal cannot be
    /// reached, as in a container.
    pub fn of_stderr() -> Option<Self> {
        let stream = std::env::var("JOURNAL_STREAM").ok()?;
        let stat = fstat(std::io::stderr()).ok()?;
        is_stream(&stream, stat.st_dev, stat.st_ino).then(|| Self::at(Path::new(SOCKET)).ok()).flatten()
    }

    /// The journal that listens at `socket`.
    ///
    /// # Errors
    /// The system's, when nobody listens there.
    pub fn at(socket: &Path) -> std::io::Result<Self> {
        let datagrams = UnixDatagram::unbound()?;
        datagrams.connect(socket)?;
        // A worker that reports something must not wait.
        datagrams.set_nonblocking(true)?;
        Ok(Self { socket: datagrams, lost: AtomicU64::new(0) })
    }

    /// Sends a record. False when the journal does not take it, and it has to go to stderr. A journal that hangs is not waited for: what it has no room
    /// for is lost, and the next record that it takes is followed by one that says how many were.
    pub fn send(&self, event: &Event<'_>) -> bool {
        let mut record = Record::default();
        let metadata = event.metadata();
        let mut line = Line::default();
        event.record(&mut line);
        let line = line.finish();
        record.add("MESSAGE", &line);
        record.add("PRIORITY", priority(*metadata.level()));
        record.add("SYSLOG_IDENTIFIER", "spile");
        record.add("SPILE_MODULE", metadata.target());
        event.record(&mut record);
        match self.socket.send(record.lines.as_bytes()) {
            Ok(_) => self.tell_lost(),
            // Stderr is a stream to the same journal, with room of its own.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                match send_at_once(std::io::stderr(), &line_of(&line)) {
                    Ok(()) => {}
                    Err(Errno::NOTSOCK) => return false,
                    Err(_) => drop(self.lost.fetch_add(1, Ordering::Relaxed)),
                }
            }
            Err(_) => return false,
        }
        true
    }

    fn tell_lost(&self) {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let mut record = Record::default();
            record.add("MESSAGE", format_args!("{lost} messages were lost, for which the journal had no room"));
            record.add("PRIORITY", priority(Level::WARN));
            record.add("SYSLOG_IDENTIFIER", "spile");
            if self.socket.send(record.lines.as_bytes()).is_err() {
                self.lost.fetch_add(lost, Ordering::Relaxed);
            }
        }
    }
}

/// Sends a line on a socket that has room for all of it now.
fn send_at_once(socket: impl AsFd, line: &str) -> rustix::io::Result<()> {
    match send(socket, line.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL)? {
        sent if sent < line.len() => Err(Errno::AGAIN),
        _ => Ok(()),
    }
}

/// True when `stream`, which is DEVICE:INODE, is that file.
fn is_stream(stream: &str, device: u64, inode: u64) -> bool {
    stream
        .split_once(':')
        .is_some_and(|(its_device, its_inode)| its_device.parse() == Ok(device) && its_inode.parse() == Ok(inode))
}

/// The level as syslog has it.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// The fields of a record, a line each. Control characters are escaped, so no value has several lines.
#[derive(Default)]
struct Record {
    lines: String,
}

impl Record {
    fn add(&mut self, name: &str, value: impl Display) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.lines, "{name}={}", printable(&value.to_string()));
    }

    /// A field of the code: `offset_bytes` becomes SPILE_OFFSET_BYTES. The message is in the record already.
    fn add_own(&mut self, field: &Field, value: impl Display) {
        let name = field.name().strip_prefix(ONLY_FOR_FIELDS).unwrap_or(field.name());
        if name != "message" {
            let name = name.to_ascii_uppercase().replace(|c: char| !c.is_ascii_alphanumeric(), "_");
            self.add(&format!("SPILE_{name}"), value);
        }
    }
}

impl Visit for Record {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add_own(field, format_args!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add_own(field, value);
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.add_own(field, value);
        let Some(error) = value.downcast_ref::<Error>() else { return };
        let (_, Failure { error: detail }) = Failure::of(error);
        self.add("SPILE_ERROR_KIND", detail.kind);
        detail.path.into_iter().for_each(|path| self.add("SPILE_PATH", path));
        // Where in that file; the offset in the disk is SPILE_OFFSET_BYTES.
        detail.offset_bytes.into_iter().for_each(|offset| self.add("SPILE_PATH_OFFSET_BYTES", offset));
        detail.hint.into_iter().for_each(|hint| self.add("SPILE_HINT", hint));
        error.os_errno().into_iter().for_each(|errno| self.add("ERRNO", errno));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::error::Error as StdError;

    use spile_core::{ErrorKind, LogLimit};
    use spile_front::{FailedRequest, log_failure};
    use tracing::subscriber::with_default;

    use super::super::Log;
    use super::*;

    /// The fields of each record that `work` writes.
    fn records(work: impl FnOnce()) -> Vec<BTreeMap<String, String>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let socket = UnixDatagram::bind(&path).unwrap();
        with_default(Log { journal: Some(Journal::at(&path).unwrap()) }, work);
        socket.set_nonblocking(true).unwrap();
        let mut bytes = vec![0; 1 << 20];
        let datagrams = std::iter::from_fn(|| socket.recv(&mut bytes).ok().map(|len| bytes[..len].to_vec()));
        let fields = |line: &str| {
            let (name, value) = line.split_once('=').unwrap_or_else(|| panic!("{line:?}"));
            let is_allowed = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
            assert!(name.len() <= 64 && name.chars().all(is_allowed) && name.starts_with(|c: char| c != '_'), "{name}");
            (name.to_owned(), value.to_owned())
        };
        datagrams.map(|datagram| String::from_utf8(datagram).unwrap().lines().map(fields).collect()).collect()
    }

    fn assert_has(record: &BTreeMap<String, String>, fields: &[(&str, &str)]) {
        for (name, value) in fields {
            assert_eq!(record.get(*name).map(String::as_str), Some(*value), "{name} in {record:?}");
        }
    }

    #[test]
    fn a_failed_request_is_a_record_with_fields() {
        let error = Error::errno("write", 28).at_path("/disks/a.raw".as_ref()).at_offset(77).hint("make room");
        let failed = FailedRequest {
            front: "NBD",
            disk: "a",
            command: &"Write",
            offset_bytes: Some(4096),
            len_bytes: 512,
            outcome: "failed",
            reason: &error,
        };
        let records = records(|| log_failure(&LogLimit::default(), &failed));
        let [record] = &records[..] else { panic!("{records:?}") };
        assert_has(
            record,
            &[
                ("PRIORITY", "4"),
                ("SYSLOG_IDENTIFIER", "spile"),
                ("SPILE_FRONT", "NBD"),
                ("SPILE_DISK", "a"),
                ("SPILE_OFFSET_BYTES", "4096"),
                ("SPILE_LEN_BYTES", "512"),
                ("SPILE_ERROR_KIND", "no_space"),
                ("SPILE_PATH", "/disks/a.raw"),
                ("SPILE_PATH_OFFSET_BYTES", "77"),
                ("SPILE_HINT", "make room"),
                ("ERRNO", "28"),
                ("SPILE_MODULE", "spile_front::log"),
            ],
        );
        let message = &record["MESSAGE"];
        assert!(message.starts_with("NBD request failed (disk=a, command=\"Write\", offset_bytes=4096, "), "{message}");
        assert!(message.contains("No space left") && !message.contains("front="), "{message}");
    }

    #[test]
    fn levels_words_and_lines_of_strangers() {
        let other = std::io::Error::other("broken");
        let records = records(|| {
            tracing::error!(text = "two\nlines\u{1b}", "the file \u{7} is bad");
            tracing::warn!(error = &other as &(dyn StdError + 'static), "it fails");
            tracing::info!("not heard");
        });
        let [first, second] = &records[..] else { panic!("{records:?}") };
        assert_has(first, &[("PRIORITY", "3"), ("SPILE_TEXT", "two\\nlines\\u{1b}")]);
        assert!(first["MESSAGE"].starts_with("the file \\u{7} is bad"), "{first:?}");
        assert_has(second, &[("PRIORITY", "4"), ("SPILE_ERROR", "broken"), ("MESSAGE", "it fails: broken")]);
        assert!(!second.contains_key("SPILE_ERROR_KIND"));
    }

    #[test]
    fn what_waits_is_told_with_its_disk() {
        use spile_core::metrics::Op;
        use spile_node::{News, Waiting};
        let error = Error::new(ErrorKind::TimedOut, "no answer").at_path("/mnt/a".as_ref());
        let waiting = Waiting { requests: 1, since_unix_s: 0, time: std::time::Duration::ZERO, op: Op::Flush, error };
        let records = records(|| crate::serving::trouble::tell("a", &News::Begins(waiting)));
        assert_has(
            &records[0],
            &[
                ("SPILE_DISK", "a"),
                ("SPILE_ERROR_KIND", "timed_out"),
                ("SPILE_PATH", "/mnt/a"),
                ("SPILE_OPERATION", "flush"),
            ],
        );
    }

    #[test]
    fn a_journal_that_is_gone_takes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let socket = UnixDatagram::bind(&path).unwrap();
        let journal = Journal::at(&path).unwrap();
        drop(socket);
        assert!(Journal::at(&dir.path().join("nothing")).is_err());
        assert!(journal.socket.send(b"MESSAGE=x\n").is_err());
    }

    #[test]
    fn a_stream_that_is_full_is_not_waited_for() {
        let (stream, reader) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(send_at_once(&stream, "a line\n"), Ok(()));
        while send_at_once(&stream, &"x".repeat(4096)).is_ok() {}
        assert_eq!(send_at_once(&stream, "a line\n"), Err(Errno::AGAIN));
        drop(reader);
        assert_eq!(send_at_once(tempfile::tempfile().unwrap(), "a line\n"), Err(Errno::NOTSOCK));
    }

    #[test]
    fn what_was_lost_is_told_when_there_is_room_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let socket = UnixDatagram::bind(&path).unwrap();
        let journal = Journal::at(&path).unwrap();
        journal.lost.store(3, Ordering::Relaxed);
        journal.tell_lost();
        journal.tell_lost();
        let mut bytes = [0; 4096];
        let len = socket.recv(&mut bytes).unwrap();
        assert!(String::from_utf8_lossy(&bytes[..len]).starts_with("MESSAGE=3 messages were lost"));
        socket.set_nonblocking(true).unwrap();
        assert!(socket.recv(&mut bytes).is_err(), "told twice");
    }

    #[test]
    fn stderr_is_the_journal_only_when_it_is_that_file() {
        assert!(is_stream("8:77", 8, 77));
        for other in ["8:78", "9:77", "8", "", "8:77:1", "a:b"] {
            assert!(!is_stream(other, 8, 77), "{other}");
        }
    }
}
