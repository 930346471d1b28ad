//! The block interface's ring: what lies in shared memory and what its numbers mean (public/io/blkif.h, ring.h).
//!
//! Sectors are 512 bytes, whatever the disk's own are.

mod message;

pub use message::{
    Abi, Discard, IndirectRequest, PlainRequest, Request, Response, SEGMENT_BYTES, SegmentEntry, op, status,
};

/// Segments in a request's own slot.
pub const SLOT_SEGMENTS: usize = 11;
/// Pages of segments that an indirect request may name.
pub const INDIRECT_PAGES: usize = 8;
/// Segments in one such page.
pub const SEGMENTS_PER_PAGE: usize = 512;
/// Bytes before the first slot of a ring.
pub const RING_HEADER_BYTES: usize = 64;
/// Where the ring's header has its indices, in bytes: u32 each.
pub mod index {
    /// Requests that the front end has produced.
    pub const REQ_PROD: usize = 0;
    /// The request at which the back end wants to be told.
    pub const REQ_EVENT: usize = 4;
    /// Responses that the back end has produced.
    pub const RSP_PROD: usize = 8;
    /// The response at which the front end wants to be told.
    pub const RSP_EVENT: usize = 12;
}

/// Slots of a ring of 2^`order` pages: 32 for one, the same in both ABIs.
pub fn ring_slots(order: u32) -> u32 {
    32 << order
}
