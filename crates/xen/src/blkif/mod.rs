//! The ring of Xen's block interface: the layout of the shared memory and the meaning of its numbers
//! (public/io/blkif.h, ring.h).
//!
//! A sector has 512 bytes here, whatever the size of the disk's own sectors.

mod message;

pub use message::{
    Abi, Discard, IndirectRequest, PlainRequest, Request, Response, SEGMENT_BYTES, SegmentEntry, op, status,
};

/// The most segments in a request's own slot.
pub const SLOT_SEGMENTS: usize = 11;
/// The most pages of segments that an indirect request may name.
pub const INDIRECT_PAGES: usize = 8;
/// The number of segments in one such page.
pub const SEGMENTS_PER_PAGE: usize = 512;
/// The bytes before the first slot of a ring.
pub const RING_HEADER_BYTES: usize = 64;
/// Where the ring's header has its indices, in bytes: u32 each.
pub mod index {
    /// The index of requests that the front end has produced.
    pub const REQ_PROD: usize = 0;
    /// The index of the request at which the back end wants to be notified.
    pub const REQ_EVENT: usize = 4;
    /// The index of responses that the back end has produced.
    pub const RSP_PROD: usize = 8;
    /// The index of the response at which the front end wants to be notified.
    pub const RSP_EVENT: usize = 12;
}

/// The number of slots in a ring of 2^`order` pages: 32 in one page, in both ABIs.
pub fn ring_slots(order: u32) -> u32 {
    32 << order
}

/// *Split rings*, our own extension: requests and responses have separate rings. A request's slot is then free as soon
/// as the request was taken, and more requests can be in flight than one ring has slots.
///
/// The ring of requests is a usual ring, except that it has the count of requests that were taken
/// ([`TAKEN`](split::TAKEN)) where a usual ring has the index of responses. The ring of responses has the usual header,
/// of which only the indices of responses are used, and responses of 16 bytes in both ABIs. The most requests in flight
/// are the slots of the ring of responses.
///
/// The back end offers it by `feature-spile-split-rings` = 1. A front end that wants it writes `spile-split-rings` = 1,
/// the pages of each ring of responses as `spile-response-ref0`, … beside the other keys of the ring, and, when they
/// are more than one, `spile-response-page-order`.
pub mod split {
    /// The offset in the ring of requests of the count of requests that were taken.
    pub const TAKEN: usize = super::index::RSP_PROD;
    /// The bytes of a response.
    pub const RESPONSE_BYTES: usize = 16;
    /// The key by which the back end offers split rings.
    pub const FEATURE: &str = "feature-spile-split-rings";
    /// The key by which the front end asks for split rings.
    pub const WANTED: &str = "spile-split-rings";
    /// The key with log2 of the number of pages of a ring of responses.
    pub const ORDER: &str = "spile-response-page-order";
    /// The keys with the pages of a ring of responses. The number of the page follows the name.
    pub const REF: &str = "spile-response-ref";

    /// The number of slots in a ring of responses of 2^`order` pages.
    pub fn response_slots(order: u32) -> u32 {
        128 << order
    }
}
