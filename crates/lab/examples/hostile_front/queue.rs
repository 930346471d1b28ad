//! A ring and its pages: requests by hand, and their answers.

use std::time::Instant;

use spile_lab::xen::blkfront::Ring;
use spile_lab::xen::{Gntalloc, Granted, UnboundPort};
use spile_xen::blkif::{Abi, IndirectRequest, PlainRequest, Request, SEGMENT_BYTES, SegmentEntry, ring_slots};
use spile_xen::{GrantRef, XEN_PAGE_BYTES};

use crate::front::{BACK_END, PATIENCE, QUIET};

/// Pages for data.
pub const PAGES: usize = 32;

/// A ring of one page, pages for data, and one for the segments of indirect requests.
pub struct Queue {
    pub ring: Ring,
    pub data: Granted,
    pub channel: UnboundPort,
    segments: Granted,
    page: Granted,
}

impl Queue {
    pub fn new(gntalloc: &Gntalloc, channel: UnboundPort) -> Self {
        let grant = |pages| gntalloc.grant(BACK_END, pages, true).expect("pages");
        let page = grant(1);
        let ring = Ring::new(page.bytes.clone(), Abi::X86_64, ring_slots(0));
        Self { ring, data: grant(PAGES as u32), channel, segments: grant(1), page }
    }

    pub fn ring_ref(&self) -> GrantRef {
        self.page.refs[0]
    }

    /// All pages get bytes of their own.
    pub fn fill(&self, seed: u8) {
        for page in 0..PAGES {
            for at in (0..XEN_PAGE_BYTES).step_by(64) {
                self.data.bytes.copy_from_slice(page * XEN_PAGE_BYTES + at, &[seed, page as u8, (at / 64) as u8]);
            }
        }
    }

    /// What is in the first pages.
    pub fn bytes(&self, pages: usize) -> Vec<u8> {
        self.data.bytes.slice(0..pages * XEN_PAGE_BYTES).to_vec()
    }

    /// A whole page of data.
    pub fn segment(&self, page: usize) -> SegmentEntry {
        SegmentEntry { gref: self.data.refs[page % PAGES], first_sect: 0, last_sect: 7 }
    }

    /// A request of whole pages.
    pub fn plain(&self, op: u8, pages: usize, sector: u64) -> PlainRequest {
        let segments = std::array::from_fn(|page| self.segment(page));
        PlainRequest { op, nr_segments: pages as u8, handle: 0, id: 0, sector, segments }
    }

    /// A request whose segments are in the page that is for them.
    pub fn indirect(&self, op: u8, count: u16, sector: u64) -> IndirectRequest {
        let pages = [self.segments.refs[0]; 8];
        IndirectRequest { op, nr_segments: count, id: 0, sector, handle: 0, pages }
    }

    /// Puts these segments into that page.
    pub fn put_segments(&self, segments: &[SegmentEntry]) {
        self.segments.bytes.fill(0);
        for (number, segment) in segments.iter().enumerate() {
            self.segments.bytes.copy_from_slice(number * SEGMENT_BYTES, &segment.encode());
        }
    }

    /// Puts requests into the ring, with their places as their numbers, and tells the back end.
    pub fn push(&mut self, requests: &[Request]) {
        for (number, request) in requests.iter().enumerate() {
            self.ring.push(&numbered(*request, number as u64));
        }
        if self.ring.publish() {
            self.channel.notify();
        }
    }

    /// Waits for the answers of what was pushed: each comes once, with its request's operation.
    pub fn answers(&mut self, requests: &[Request]) -> Vec<i16> {
        let mut statuses = vec![None; requests.len()];
        for _ in 0..requests.len() {
            self.wait_response();
            let response = self.ring.pop().expect("a sound ring").expect("a response");
            let request = requests.get(response.id as usize).unwrap_or_else(|| panic!("nobody asked for {response:?}"));
            assert_eq!(response.op, request.response_op(), "{request:?}");
            let status = &mut statuses[response.id as usize];
            assert!(status.replace(response.status).is_none(), "{request:?} is answered twice");
        }
        assert!(!self.ring.has_response(), "there are more answers than requests");
        statuses.into_iter().map(|status| status.expect("all are answered")).collect()
    }

    fn wait_response(&mut self) {
        let begun = Instant::now();
        while self.ring.arm() {
            assert!(begun.elapsed() < PATIENCE, "no answer");
            self.channel.wait(QUIET).expect("an event channel");
        }
    }

    pub fn ask_all(&mut self, requests: &[Request]) -> Vec<i16> {
        self.push(requests);
        self.answers(requests)
    }

    /// Gives all pages back, the ring's too.
    pub fn forget_all(self) -> UnboundPort {
        self.channel
    }

    pub fn ask(&mut self, request: impl Into<Request>) -> i16 {
        self.ask_all(&[request.into()])[0]
    }
}

fn numbered(mut request: Request, number: u64) -> Request {
    match &mut request {
        Request::Plain(plain) => plain.id = number,
        Request::Discard(discard) => discard.id = number,
        Request::Indirect(indirect) => indirect.id = number,
    }
    request
}
