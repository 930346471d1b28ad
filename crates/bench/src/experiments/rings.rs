//! The ways from a guest's ring to a disk: one line each.

use spile_xen::blkif::{ring_slots, split};

/// A way from a guest's ring to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPath {
    /// Its name in figures.
    pub name: &'static str,
    /// How the back end reaches the guest's pages, as `spile xen-disk --access` says it.
    pub access: &'static str,
    /// Segments of the front end's indirect requests; 0: none, and requests have at most 11 segments, 44 KiB.
    pub indirect_segments: u32,
    /// Responses have a ring of their own.
    pub is_split: bool,
    /// It is measured unless others are named.
    pub is_usual: bool,
}

/// Segments that Linux's blkfront asks for unless told else: requests of up to 128 KiB.
const LINUX: u32 = 32;
/// As many as the back end offers: requests of up to 1 MiB.
const MOST: u32 = 256;

/// The path that the others are held against in figures: ours.
pub const BASE: &str = "grant-copy";

/// All of them.
pub const RINGS: &[RingPath] = &[
    // As tapdisk2.
    RingPath { is_usual: true, ..ring("grant-map-memcpy", "map-copy", 0) },
    ring("grant-map-memcpy-indirect", "map-copy", LINUX),
    // As blkback.
    RingPath { is_usual: true, ..ring("grant-map", "map", LINUX) },
    // As qemu's qdisk.
    RingPath { is_usual: true, ..ring("persistent", "persistent", LINUX) },
    // As tapdisk3.
    RingPath { is_usual: true, ..ring("grant-copy-44k", "copy", 0) },
    RingPath { is_usual: true, is_split: true, ..ring("grant-copy-44k-split", "copy", 0) },
    // Ours.
    RingPath { is_usual: true, ..ring("grant-copy", "copy", LINUX) },
    RingPath { is_split: true, ..ring("grant-copy-split", "copy", LINUX) },
    ring("grant-copy-1m", "copy", MOST),
];

const fn ring(name: &'static str, access: &'static str, indirect_segments: u32) -> RingPath {
    RingPath { name, access, indirect_segments, is_split: false, is_usual: false }
}

/// The way of that name.
pub fn find(name: &str) -> Option<RingPath> {
    RINGS.iter().find(|ring| ring.name == name).copied()
}

impl RingPath {
    /// Requests that its rings, of a page each, hold.
    pub fn slots(&self) -> u32 {
        if self.is_split { split::response_slots(0) } else { ring_slots(0) }
    }
}
