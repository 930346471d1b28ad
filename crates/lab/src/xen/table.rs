//! A grant table as it lies in shared memory: version 1 of public/grant_table.h.
//!
//! | entry, 8 bytes | |
//! |---|---|
//! | flags u16 | 0 |
//! | domain u16 | 2 |
//! | frame u32 | 4 |
//!
//! The guest and the user of a grant both change flags and domain together, by compare-and-exchange.

use std::sync::atomic::Ordering;

use spile_mem::Segment;
use spile_xen::{DomId, GrantRef, GrantStatus};

use crate::sys::compare_exchange_u32;

const ENTRY_BYTES: usize = 8;
/// The number of times that a claim is tried before the entry counts as unstable, as on Xen.
const MAX_TRIES: u32 = 5;

/// Flags of an entry (GTF_*).
pub mod flag {
    /// The type: the domain may use the page.
    pub const PERMIT_ACCESS: u16 = 1;
    /// The bits of the flags that hold the type; 0: the entry grants nothing.
    pub const TYPE_MASK: u16 = 3;
    /// The page may only be read.
    pub const READONLY: u16 = 4;
    /// The page is being read. The user of the grant sets this.
    pub const READING: u16 = 8;
    /// The page is being written. The user of the grant sets this.
    pub const WRITING: u16 = 16;
}

/// An entry of a grant table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// See [`flag`].
    pub flags: u16,
    /// The domain that may use the page.
    pub domain: u16,
    /// The frame number of the page.
    pub frame: u32,
}

impl Entry {
    fn word(self) -> u32 {
        u32::from(self.flags) | u32::from(self.domain) << 16
    }
}

fn flags(word: u32) -> u16 {
    word as u16
}

/// A grant table in shared memory.
#[derive(Clone, Debug)]
pub struct Table(Segment);

impl Table {
    /// The table in `bytes`.
    pub(crate) fn new(bytes: Segment) -> Self {
        Self(bytes)
    }

    /// The number of entries.
    pub fn entries(&self) -> u32 {
        (self.0.len() / ENTRY_BYTES) as u32
    }

    fn at(&self, gref: GrantRef) -> usize {
        assert!(gref.0 < self.entries(), "grant {} of {}", gref.0, self.entries());
        gref.0 as usize * ENTRY_BYTES
    }

    fn word(&self, gref: GrantRef) -> u32 {
        self.0.load_u32(self.at(gref), Ordering::Acquire)
    }

    /// The page of an entry.
    pub(crate) fn frame(&self, gref: GrantRef) -> u32 {
        self.0.load_u32(self.at(gref) + 4, Ordering::Acquire)
    }

    /// An entry as it is now.
    ///
    /// # Panics
    /// When the table has no such entry, as for all methods.
    pub fn get(&self, gref: GrantRef) -> Entry {
        let word = self.word(gref);
        Entry { flags: flags(word), domain: (word >> 16) as u16, frame: self.frame(gref) }
    }

    /// Writes an entry without a look at its old value or its use. Flags and domain are written last.
    pub fn set(&self, gref: GrantRef, entry: Entry) {
        let at = self.at(gref);
        self.0.store_u32(at + 4, entry.frame, Ordering::Release);
        self.0.store_u32(at, entry.word(), Ordering::Release);
    }

    /// Revokes a grant. False when it is in use; then nothing has changed.
    pub fn end_access(&self, gref: GrantRef) -> bool {
        let at = self.at(gref);
        let mut word = self.word(gref);
        loop {
            if flags(word) & (flag::READING | flag::WRITING) != 0 {
                return false;
            }
            match compare_exchange_u32(&self.0, at, word, 0) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
    }

    /// Marks a grant as in use, if `domain` may use it in this way.
    pub(crate) fn claim(&self, gref: GrantRef, domain: DomId, is_write: bool) -> Result<(), GrantStatus> {
        let at = self.at(gref);
        let mut word = self.word(gref);
        for _ in 0..MAX_TRIES {
            let is_granted = flags(word) & flag::TYPE_MASK == flag::PERMIT_ACCESS && word >> 16 == u32::from(domain.0);
            if !is_granted || is_write && flags(word) & flag::READONLY != 0 {
                return Err(GrantStatus::GENERAL_ERROR);
            }
            let use_flags = if is_write { flag::READING | flag::WRITING } else { flag::READING };
            match compare_exchange_u32(&self.0, at, word, word | u32::from(use_flags)) {
                Ok(_) => return Ok(()),
                Err(now) => word = now,
            }
        }
        Err(GrantStatus::GENERAL_ERROR)
    }

    /// Removes marks of use.
    pub(crate) fn clear(&self, gref: GrantRef, use_flags: u16) {
        let at = self.at(gref);
        let mut word = self.word(gref);
        // Each failure means that somebody else changed the entry; a guest that does so without end harms its own only.
        for _ in 0..1000 {
            match compare_exchange_u32(&self.0, at, word, word & !u32::from(use_flags)) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }
}
