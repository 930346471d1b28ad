//! Offsets and ranges. A guest's offsets and a store's are different types, so that they cannot be mixed.

use std::fmt;
use std::ops::Range;

/// A byte offset on the virtual disk, as the guest sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestOffset(pub u64);

/// A byte offset in a store (a file, a device).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreOffset(pub u64);

impl fmt::Display for GuestOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for StoreOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A run of bytes on the virtual disk. Its end never overflows: [`Extent::new`] checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Where it starts.
    pub offset: GuestOffset,
    /// How long it is, in bytes.
    pub len_bytes: u64,
}

impl Extent {
    /// The run of `len_bytes` at `offset`; `None` when its end overflows 64 bits.
    pub fn new(offset: u64, len_bytes: u64) -> Option<Self> {
        offset.checked_add(len_bytes)?;
        Some(Self { offset: GuestOffset(offset), len_bytes })
    }

    /// The run from `range.start` up to `range.end`; empty when the range is reversed.
    pub fn from_range(range: Range<u64>) -> Self {
        Self { offset: GuestOffset(range.start), len_bytes: range.end.saturating_sub(range.start) }
    }

    /// First byte.
    pub fn start(&self) -> u64 {
        self.offset.0
    }

    /// One past the last byte.
    pub fn end(&self) -> u64 {
        self.offset.0.saturating_add(self.len_bytes)
    }

    /// The same as a range of byte offsets.
    pub fn range(&self) -> Range<u64> {
        self.start()..self.end()
    }

    /// True when it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// True when both have a byte in common.
    pub fn overlaps(&self, other: &Extent) -> bool {
        self.start() < other.end() && other.start() < self.end()
    }

    /// True when start and end are multiples of `align` bytes (a power of two).
    pub fn is_aligned(&self, align: u64) -> bool {
        (self.start() | self.end()) & (align - 1) == 0
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{:#x}", self.offset, self.len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_past_64_bits_is_refused() {
        assert!(Extent::new(u64::MAX, 1).is_none());
        assert_eq!(Extent::new(u64::MAX, 0).unwrap().end(), u64::MAX);
    }

    #[test]
    fn overlap_and_alignment() {
        let a = Extent::from_range(0..4096);
        assert!(a.overlaps(&Extent::from_range(4095..4097)) && !a.overlaps(&Extent::from_range(4096..4097)));
        assert!(a.is_aligned(4096) && !Extent::from_range(0..4097).is_aligned(512));
    }
}
