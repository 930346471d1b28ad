//! What a device keeps outside its process: the journals of its rings, and which connection they are of.
//!
//! Two files in a folder that a new boot of the host finds empty: `DOMAIN-DEVICE.journal`, the journals one after the
//! other, and `DOMAIN-DEVICE.connection`, the rings as the guest named them. The second is written when the first is
//! whole, and removed before it: without it, or when the guest names other rings, there is nothing to go on with.

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

/// Syncs of a disk's that have failed. The kernel tells of each once only, so it is noted at once where a successor looks,
/// whoever had asked for the sync: no flush of the guest's succeeds any more.
#[derive(Clone)]
pub struct FailedSyncs {
    keeping: Keeping,
    is_any: Arc<AtomicBool>,
}

impl FailedSyncs {
    /// None yet, of the disk of a back end's path, what is kept of which is in `run_dir`.
    ///
    /// # Errors
    /// When the path is no back end's.
    pub fn new(run_dir: &Path, backend_path: &str) -> Result<Self> {
        let (domain, device) = guest_of(backend_path)?;
        Ok(Self { keeping: Keeping::new(run_dir, domain, device), is_any: Arc::default() })
    }

    /// One has failed.
    pub fn note(&self) {
        self.is_any.store(true, Ordering::Release);
        self.keeping.flush_failed();
    }

    /// One has failed, here or in a process before.
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
    /// Those of `device` of `domain` in `folder`.
    fn new(folder: &Path, domain: DomId, device: u32) -> Self {
        let name = format!("{domain}-{device}");
        Self { journal: folder.join(format!("{name}.journal")), connection: folder.join(format!("{name}.connection")) }
    }

    /// Memory for the journals of rings of so many slots each.
    ///
    /// # Errors
    /// What the system says.
    pub fn begin(&self, slots: &[u32]) -> Result<Vec<Segment>> {
        self.forget();
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(&self.journal);
        let file = file.map_err(|source| self.error("make", source))?;
        let len = places(slots).map(|(_, end)| end).last().unwrap_or(0);
        // Memory that is not there when it is written to would be lost without a word.
        let made = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, len);
        made.map_err(|errno| self.error("make", errno.into()))?;
        self.map(&file, slots)
    }

    /// Notes in the journals, if there are any, that a sync has failed. By writing to the file and not to memory: it may be
    /// shorter than it should be while it is made.
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

    /// True when that is noted in any, or cannot be read.
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

    /// The journals of before, if they are of the connection that `wish` describes.
    ///
    /// # Errors
    /// `NotFound` when there are none; `Corrupt` when they are of another connection.
    pub fn resume(&self, wish: &Wish, slots: &[u32]) -> Result<Vec<Segment>> {
        let kept = fs::read_to_string(&self.connection);
        let kept = kept.map_err(|source| Error::io("read", source).at_path(&self.connection))?;
        if kept != text(wish) {
            let what = "the guest has other rings than those that were served before";
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

    /// Notes that the journals are those of `wish`.
    ///
    /// # Errors
    /// What the system says.
    pub fn keep(&self, wish: &Wish) -> Result<()> {
        let new = self.connection.with_extension("new");
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(0o600).open(&new);
        let written = file.and_then(|mut file| file.write_all(text(wish).as_bytes()));
        let renamed = written.and_then(|()| fs::rename(&new, &self.connection));
        renamed.map_err(|source| Error::io("write", source).at_path(&self.connection))
    }

    /// Removes both.
    pub fn forget(&self) {
        for path in [&self.connection, &self.journal] {
            // They are mostly not there.
            let _ = fs::remove_file(path);
        }
    }

    fn error(&self, what: &'static str, source: std::io::Error) -> Error {
        Error::io(what, source).at_path(&self.journal)
    }
}

/// Does something for each journal of a file, at whose first byte it is.
fn each_journal(file: &fs::File, mut act: impl FnMut(u64) -> std::io::Result<()>) -> std::io::Result<()> {
    let mut at = 0;
    while let Some(slots) = journal::slots_of(|offset, into| file.read_exact_at(into, at + offset))? {
        act(at)?;
        at = (at + journal_bytes(slots) as u64).next_multiple_of(PAGE_BYTES);
    }
    Ok(())
}

/// Where each journal begins and ends in the file.
fn places(slots: &[u32]) -> impl Iterator<Item = (u64, u64)> {
    slots.iter().scan(0, |end, slots| {
        let start = *end;
        *end = (start + journal_bytes(*slots) as u64).next_multiple_of(PAGE_BYTES);
        Some((start, *end))
    })
}

/// One line for the guest, and one for each ring. Another version of this program must write the same, or an upgrade would
/// find other rings than it left.
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
