//! The files in which a device keeps what the next process needs: the journals of its rings, and the connection to
//! which they belong.
//!
//! There are two files, in a folder that a new boot of the host finds empty. `DOMAIN-DEVICE.journal` holds the
//! journals, one after the other. `DOMAIN-DEVICE.connection` holds the rings as the guest has named them. The second
//! file is written when the first is whole, and removed before it. Without the second file, or when the guest names
//! other rings, the journals are of no use.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::FallocateFlags;
use spile_core::{Error, ErrorKind, Result, Segment};
use spile_xen::{DomId, GrantRef};

use crate::journal;
use crate::journal::journal_bytes;
use crate::xenbus::{RingWish, Wish, guest_of};

const PAGE_BYTES: u64 = 4096;

/// The files of one device.
#[derive(Clone)]
pub struct Keeping {
    journal: PathBuf,
    connection: PathBuf,
}

/// Notes that a sync of a disk has failed, whoever had asked for the sync: after that no flush of the guest succeeds.
/// The kernel reports a failed sync once only, so it is noted at once in the journals, where the next process looks.
#[derive(Clone)]
pub struct FailedSyncs {
    keeping: Keeping,
    is_any: Arc<AtomicBool>,
}

impl FailedSyncs {
    /// For the disk of the back end's path in xenstore, whose files lie in `run_dir`. No sync has failed yet.
    ///
    /// # Errors
    /// `InvalidInput` when the path names no back end.
    pub fn new(run_dir: &Path, backend_path: &str) -> Result<Self> {
        let (domain, device) = guest_of(backend_path)?;
        Ok(Self { keeping: Keeping::new(run_dir, domain, device), is_any: Arc::default() })
    }

    /// Notes that a sync has failed.
    pub fn note(&self) {
        self.is_any.store(true, Ordering::Release);
        self.keeping.flush_failed();
    }

    /// True when a sync has failed, in this process or in one before it.
    pub fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Acquire) || self.keeping.has_failed_flush()
    }

    pub(crate) fn keeping(&self) -> Keeping {
        self.keeping.clone()
    }

    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        self.is_any.clone()
    }
}

impl Keeping {
    /// The files of the device `device` of the guest `domain` in `folder`.
    fn new(folder: &Path, domain: DomId, device: u32) -> Self {
        let name = format!("{domain}-{device}");
        Self { journal: folder.join(format!("{name}.journal")), connection: folder.join(format!("{name}.connection")) }
    }

    /// Makes the file of journals, and maps one journal for each ring; `slots` has the number of slots of each ring.
    ///
    /// # Errors
    /// The system's, with the path of the file.
    pub fn begin(&self, slots: &[u32]) -> Result<Vec<Segment>> {
        self.forget();
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(&self.journal);
        let file = file.map_err(|source| self.error("make", source))?;
        let len = places(slots).map(|(_, end)| end).last().unwrap_or(0);
        // The space is taken now: without it, a later write to the mapping would be lost unnoticed.
        let made = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, len);
        made.map_err(|errno| self.error("make", errno.into()))?;
        self.map(&file, slots)
    }

    /// Notes in the journals, if there are any, that a sync has failed. This writes to the file and not to its mapping,
    /// because the file may be shorter than the mapping while it is being made.
    fn flush_failed(&self) {
        let noted = OpenOptions::new().read(true).write(true).open(&self.journal).and_then(|file| {
            each_journal(&file, |at| file.write_all_at(&1u32.to_le_bytes(), at + journal::FAILED_AT as u64))
        });
        match noted {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::error!(path = %self.journal.display(), %error, "blkif: a failed sync cannot be noted");
            }
            _ => {}
        }
    }

    /// True when a journal notes a failed sync, or a journal cannot be read.
    fn has_failed_flush(&self) -> bool {
        let mut has_failed = false;
        let read = fs::File::open(&self.journal).and_then(|file| {
            each_journal(&file, |at| {
                let mut word = [0; 4];
                file.read_exact_at(&mut word, at + journal::FAILED_AT as u64)?;
                has_failed |= word != [0; 4];
                Ok(())
            })
        });
        has_failed || read.is_err_and(|error| error.kind() != std::io::ErrorKind::NotFound)
    }

    /// The journals that another process has left, if they belong to the connection that `wish` describes.
    ///
    /// # Errors
    /// `NotFound` when there are none; `Corrupt` when they belong to another connection.
    pub fn resume(&self, wish: &Wish, slots: &[u32]) -> Result<Vec<Segment>> {
        let kept = fs::read_to_string(&self.connection);
        let kept = kept.map_err(|source| Error::io("read", source).at_path(&self.connection))?;
        if kept != text(wish) {
            let what = "the guest's rings are not those that were served before";
            return Err(Error::new(ErrorKind::Corrupt, what).at_path(&self.connection));
        }
        let file = OpenOptions::new().read(true).write(true).open(&self.journal);
        let file = file.map_err(|source| self.error("open", source))?;
        self.map(&file, slots)
    }

    fn map(&self, file: &fs::File, slots: &[u32]) -> Result<Vec<Segment>> {
        let each = places(slots).map(|(start, end)| Segment::map_shared(file, start, (end - start) as usize));
        each.collect::<std::io::Result<_>>().map_err(|source| self.error("map", source))
    }

    /// Notes that the journals belong to the connection that `wish` describes.
    ///
    /// # Errors
    /// The system's, with the path of the file.
    pub fn keep(&self, wish: &Wish) -> Result<()> {
        let new = self.connection.with_extension("new");
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(0o600).open(&new);
        let written = file.and_then(|mut file| file.write_all(text(wish).as_bytes()));
        let renamed = written.and_then(|()| fs::rename(&new, &self.connection));
        renamed.map_err(|source| Error::io("write", source).at_path(&self.connection))
    }

    /// Removes both files.
    pub fn forget(&self) {
        for path in [&self.connection, &self.journal] {
            // Mostly there are no such files.
            let _ = fs::remove_file(path);
        }
    }

    fn error(&self, what: &'static str, source: std::io::Error) -> Error {
        Error::io(what, source).at_path(&self.journal)
    }
}

/// Calls `act` with the offset in bytes of each journal in a file.
fn each_journal(file: &fs::File, mut act: impl FnMut(u64) -> std::io::Result<()>) -> std::io::Result<()> {
    let mut at = 0;
    while let Some(slots) = journal::slots_of(|offset, into| file.read_exact_at(into, at + offset))? {
        act(at)?;
        at = (at + journal_bytes(slots) as u64).next_multiple_of(PAGE_BYTES);
    }
    Ok(())
}

/// The offsets in bytes at which each journal begins and ends in the file.
fn places(slots: &[u32]) -> impl Iterator<Item = (u64, u64)> {
    slots.iter().scan(0, |end, slots| {
        let start = *end;
        *end = (start + journal_bytes(*slots) as u64).next_multiple_of(PAGE_BYTES);
        Some((start, *end))
    })
}

/// The text of the connection file: one line for the guest, and one for each ring. Every version of this program must
/// write the same text, because the version after an upgrade compares it with the rings that it finds.
fn text(wish: &Wish) -> String {
    let mut lines = format!("1 {} {}\n", wish.abi.name(), u8::from(wish.is_persistent));
    for ring in &wish.rings {
        let list = |refs: &[GrantRef]| refs.iter().map(|gref| gref.0.to_string()).collect::<Vec<_>>().join(",");
        let RingWish { order, refs, response_refs, port } = ring;
        lines += &format!("{} {order} {} [{}]\n", port.0, list(refs), list(response_refs));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use spile_xen::Port;
    use spile_xen::blkif::Abi;

    #[test]
    fn a_connection_is_written_as_ever() {
        let refs = vec![GrantRef(8), GrantRef(9)];
        let ring = RingWish { order: 1, refs, response_refs: vec![GrantRef(7)], port: Port(3) };
        let wish = Wish { abi: Abi::X86_64, is_persistent: true, rings: vec![ring] };
        assert_eq!(text(&wish), "1 x86_64-abi 1\n3 1 8,9 [7]\n");
    }
}
