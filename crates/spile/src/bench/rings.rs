//! The ways from a guest's ring to a disk: one line each.

/// A way from a guest's ring to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPath {
    /// Its name in figures.
    pub name: &'static str,
    /// How the back end reaches the guest's pages, as `spile xen-disk --access` says it.
    pub access: &'static str,
    /// Segments of the front end's indirect requests; 0: none, and requests have at most 11 segments, 44 KiB.
    pub indirect_segments: u32,
    /// What it stands for.
    pub stands_for: &'static str,
}

/// As many as the back end offers: requests of up to 1 MiB.
const INDIRECT: u32 = 256;

/// All of them.
pub const RINGS: &[RingPath] = &[
    ring("grant-map-memcpy", "map-copy", 0, "as tapdisk2: pages mapped, copied and unmapped, requests of 44 KiB"),
    ring("grant-map-memcpy-indirect", "map-copy", INDIRECT, "the same with indirect segments"),
    ring("grant-map", "map", INDIRECT, "as blkback: pages mapped for the time of the I/O"),
    ring("persistent", "persistent", INDIRECT, "as qemu's qdisk: pages stay mapped, the guest copies"),
    ring("grant-copy-44k", "copy", 0, "as tapdisk3: the hypervisor copies, requests of 44 KiB"),
    ring("grant-copy", "copy", INDIRECT, "Spile's default: the hypervisor copies, indirect segments"),
];

const fn ring(name: &'static str, access: &'static str, indirect_segments: u32, stands_for: &'static str) -> RingPath {
    RingPath { name, access, indirect_segments, stands_for }
}

/// The way of that name.
pub fn find(name: &str) -> Option<RingPath> {
    RINGS.iter().find(|ring| ring.name == name).copied()
}
