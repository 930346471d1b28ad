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

/// *Split rings*, an extension of our own: requests and responses in rings of their own, so that a request's slot is free
/// as soon as it was taken, and more requests are in flight than one ring has slots.
///
/// The ring of requests is as ever, but where the other has the index of responses it has the count of requests that were
/// taken ([`TAKEN`](split::TAKEN)). The ring of responses has the usual header, of which only the indices of responses are used,
/// and responses of 16 bytes in both ABIs. At most as many requests are in flight as that has slots.
///
/// The back end offers it by `feature-spile-split-rings` = 1. A front end that wants it writes `spile-split-rings` = 1, the
/// pages of each ring of responses as `spile-response-ref0`, … beside the other keys of the ring, and, when they are more
/// than one, `spile-response-page-order`.
pub mod split {
    /// Where the ring of requests has the count of those that were taken.
    pub const TAKEN: usize = super::index::RSP_PROD;
    /// Bytes of a response.
    pub const RESPONSE_BYTES: usize = 16;
    /// What the back end offers.
    pub const FEATURE: &str = "feature-spile-split-rings";
    /// What the front end wants.
    pub const WANTED: &str = "spile-split-rings";
    /// How many pages a ring of responses has.
    pub const ORDER: &str = "spile-response-page-order";
    /// The pages, with their number behind.
    pub const REF: &str = "spile-response-ref";

    /// Slots of a ring of responses of 2^`order` pages.
    pub fn response_slots(order: u32) -> u32 {
        128 << order
    }
}
