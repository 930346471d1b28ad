//! A file that another program has cut short while it is a store.
//!
//! Nothing tells of it. The kernel reads nothing behind the end of a file, calls all of that a hole, and lets a write there
//! make the file longer again, with zeroes in between. So the store looks where it costs nothing: at a read that comes back
//! short, at a hole up to the end, and after each sync. From then on every request behind the end of the file fails,
//! and so does every sync, because what had been written there is lost. It is logged once.
//!
//! What this cannot see: which bytes below the new end are zeroes because a write came before the cut was seen. The failing
//! syncs say that something is lost.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use spile_core::{Error, ErrorKind, Result};

/// Where a file was cut short, if it was.
pub(crate) struct Cut {
    /// The end of the file as it was found; `u64::MAX` while it is as long as it should be.
    end_bytes: AtomicU64,
    /// Counts beginnings and ends of changes of the length by the store itself.
    changes: AtomicU64,
}

impl Default for Cut {
    fn default() -> Self {
        Self { end_bytes: AtomicU64::new(u64::MAX), changes: AtomicU64::new(0) }
    }
}

/// A change of the length by the store itself, until it is dropped.
pub(crate) struct Changing<'a>(&'a AtomicU64);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// A comparison of the length that a file should have with the one that is found.
pub(crate) struct Look<'a> {
    cut: &'a Cut,
    /// The count of changes when it began.
    before: u64,
    expected_bytes: u64,
}

impl Look<'_> {
    /// Notes a file that is too short, unless the store itself has changed the length meanwhile.
    pub(crate) fn found(self, found_bytes: u64, path: &Path) {
        let is_still = self.before.is_multiple_of(2) && self.cut.changes.load(Ordering::Acquire) == self.before;
        if found_bytes < self.expected_bytes && is_still {
            self.cut.note(found_bytes, path);
        }
    }
}

impl Cut {
    /// No request may go behind this offset, in bytes.
    pub(crate) fn end(&self) -> u64 {
        self.end_bytes.load(Ordering::Relaxed)
    }

    /// Fails when the file was cut short.
    pub(crate) fn check(&self) -> Result<()> {
        match self.end() {
            u64::MAX => Ok(()),
            end => Err(cut_short(end)),
        }
    }

    /// Marks that the store changes the length of the file. One change at a time.
    pub(crate) fn changing(&self) -> Changing<'_> {
        self.changes.fetch_add(1, Ordering::AcqRel);
        Changing(&self.changes)
    }

    /// Begins to compare the length of the file with what it should be; `len_bytes` tells that.
    pub(crate) fn look(&self, len_bytes: &AtomicU64) -> Look<'_> {
        let before = self.changes.load(Ordering::Acquire);
        Look { cut: self, before, expected_bytes: len_bytes.load(Ordering::Acquire) }
    }

    /// Notes that the file ends at `end_bytes`, where it should not.
    pub(crate) fn note(&self, end_bytes: u64, path: &Path) {
        if self.end_bytes.fetch_min(end_bytes, Ordering::AcqRel) == u64::MAX {
            tracing::error!("{}: {}", path.display(), cut_short(end_bytes));
        }
    }
}

/// The error of a request behind the end of a file that was cut short.
pub(crate) fn cut_short(end_bytes: u64) -> Error {
    let what = format!("another program has cut the file short, to {end_bytes} bytes: what lay behind that is lost");
    Error::new(ErrorKind::Corrupt, what).hint("end this program, and restore the disk from a copy")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_cut_by_others_counts() {
        let (cut, path, len) = (Cut::default(), Path::new("x"), AtomicU64::new(100));
        cut.look(&len).found(100, path);
        cut.look(&len).found(u64::MAX, path);
        let changing = cut.changing();
        cut.look(&len).found(50, path);
        drop(changing);
        cut.check().unwrap();
        // The store itself makes the file shorter between the two looks.
        let look = cut.look(&len);
        drop(cut.changing());
        look.found(50, path);
        cut.check().unwrap();
        cut.look(&len).found(50, path);
        assert_eq!((cut.end(), cut.check().unwrap_err().kind()), (50, ErrorKind::Corrupt));
    }
}
