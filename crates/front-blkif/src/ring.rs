//! The back end's side of a blkif ring: takes requests, publishes responses, decides whether the guest is notified.
//!
//! Layout and rules: public/io/ring.h. The guest may change every byte of the shared pages at any moment: its producer
//! index is read once for each look, a slot is copied once, and our own indices are kept here and never read back.

use std::cell::Cell;
use std::sync::atomic::{Ordering, fence};

use spile_core::Segment;
use spile_xen::blkif::{Abi, RING_HEADER_BYTES, Response, index, ring_slots, split};

/// The bytes of the largest slot.
pub const SLOT_BYTES: usize = Abi::X86_64.slot_bytes();

/// A copy of a request's slot.
pub type Slot = [u8; SLOT_BYTES];

/// Which rule of rings the guest has broken. The ring is unusable until the guest connects again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken(pub &'static str);

/// The pages of a ring, which the guest may write at the same time.
pub trait SharedPages {
    /// Reads the number at the offset `at`.
    fn load(&self, at: usize, order: Ordering) -> u32;
    /// Writes a number at the offset `at`.
    fn store(&self, at: usize, value: u32, order: Ordering);
    /// A full memory fence: other processors see the writes before it before the reads after it are done.
    fn fence(&self);
    /// Copies bytes from the offset `at`, and looks at each once: the guest may change them meanwhile.
    fn read(&self, at: usize, into: &mut [u8]);
    /// Copies bytes to the offset `at`.
    fn write(&self, at: usize, from: &[u8]);
}

impl SharedPages for Segment {
    fn load(&self, at: usize, order: Ordering) -> u32 {
        self.load_u32(at, order)
    }

    fn store(&self, at: usize, value: u32, order: Ordering) {
        self.store_u32(at, value, order);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    fn read(&self, at: usize, into: &mut [u8]) {
        // Slots have these lengths.
        match into.len() {
            112 => into.copy_from_slice(&self.read_array::<112>(at)),
            108 => into.copy_from_slice(&self.read_array::<108>(at)),
            _ => self.copy_to_slice(at, into),
        }
    }

    fn write(&self, at: usize, from: &[u8]) {
        self.copy_from_slice(at, from);
    }
}

/// A ring at work.
pub struct Ring<M = Segment> {
    memory: M,
    abi: Abi,
    slots: u32,
    /// The separate pages for responses, if there are any, and how many responses fit there.
    responses: Option<(M, u32)>,
    /// The index of the next request to take.
    req_cons: Cell<u32>,
    /// The guest's producer index as it was last read.
    req_prod: Cell<u32>,
    /// The index of the next response to write.
    rsp_prod: Cell<u32>,
    /// The index of responses that the guest has been shown.
    published: Cell<u32>,
}

impl Ring<Segment> {
    /// A ring of 2^`order` pages in `memory`. It goes on at the index `req_cons` of requests and `rsp_prod` of
    /// responses.
    ///
    /// # Panics
    /// When `memory` is shorter than the ring.
    pub fn new(memory: Segment, abi: Abi, order: u32, req_cons: u32, rsp_prod: u32) -> Self {
        let len = RING_HEADER_BYTES + ring_slots(order) as usize * abi.slot_bytes();
        assert!(memory.len() >= len, "the ring's memory is too short");
        Self::over(memory, abi, order, req_cons, rsp_prod)
    }

    /// The same ring with its responses in 2^`order` separate pages ([`split`]).
    ///
    /// # Panics
    /// When `memory` is shorter than the ring of responses.
    pub fn with_responses(self, memory: Segment, order: u32) -> Self {
        let len = RING_HEADER_BYTES + split::response_slots(order) as usize * split::RESPONSE_BYTES;
        assert!(memory.len() >= len, "the memory of the ring of responses is too short");
        self.with_responses_over(memory, order)
    }
}

impl<M: SharedPages> Ring<M> {
    /// As [`Ring::new`], for memory that is known to be long enough.
    pub fn over(memory: M, abi: Abi, order: u32, req_cons: u32, rsp_prod: u32) -> Self {
        let slots = ring_slots(order);
        Self {
            memory,
            abi,
            slots,
            responses: None,
            req_cons: Cell::new(req_cons),
            req_prod: Cell::new(req_cons),
            rsp_prod: Cell::new(rsp_prod),
            published: Cell::new(rsp_prod),
        }
    }

    /// As [`Ring::with_responses`], for memory that is known to be long enough.
    pub fn with_responses_over(mut self, memory: M, order: u32) -> Self {
        self.responses = Some((memory, split::response_slots(order)));
        self
    }

    /// The most requests in flight.
    pub fn max_in_flight(&self) -> u32 {
        self.responses.as_ref().map_or(self.slots, |(_, slots)| *slots)
    }

    /// The guest's layout.
    pub fn abi(&self) -> Abi {
        self.abi
    }

    /// The index of the next request.
    pub fn req_cons(&self) -> u32 {
        self.req_cons.get()
    }

    /// The index of the next response.
    pub fn rsp_prod(&self) -> u32 {
        self.rsp_prod.get()
    }

    /// True when there is a request, or a wrong producer index for which [`Ring::pop`] returns an error.
    pub fn has_next(&self) -> bool {
        self.memory.load(index::REQ_PROD, Ordering::Relaxed) != self.req_cons.get()
    }

    /// Copies the next request into `slot`; false when there is none.
    ///
    /// # Errors
    /// When the guest claims more requests than the ring has room for, or has taken some back.
    #[inline]
    pub fn pop(&self, slot: &mut Slot) -> Result<bool, Broken> {
        let next = self.req_cons.get();
        if next == self.req_prod.get() {
            let seen = self.memory.load(index::REQ_PROD, Ordering::Acquire);
            // A response that is written but not shown frees no slot: an honest guest does not know of it.
            let in_flight = next.wrapping_sub(self.published.get());
            let room = self.max_in_flight().saturating_sub(in_flight);
            if seen.wrapping_sub(next) > room.min(self.slots) {
                return Err(Broken("the guest claims more requests than its ring has room for"));
            }
            self.req_prod.set(seen);
            if seen == next {
                return Ok(false);
            }
        }
        let len = self.abi.slot_bytes();
        self.memory.read(self.slot_at(next), &mut slot[..len]);
        self.req_cons.set(next.wrapping_add(1));
        Ok(true)
    }

    /// With separate rings, gives the slots of the requests that were taken back to the guest.
    pub fn give_back(&self) {
        if self.responses.is_some() {
            self.memory.store(split::TAKEN, self.req_cons.get(), Ordering::Release);
        }
    }

    /// Asks the guest to notify us of the next request. True when there is a request already: no notification may come
    /// for that.
    pub fn arm(&self) -> bool {
        self.memory.store(index::REQ_EVENT, self.req_cons.get().wrapping_add(1), Ordering::Relaxed);
        // The guest writes its producer index and then reads our event index. We write our event index and then read
        // its producer index.
        self.memory.fence();
        self.has_next()
    }

    /// Writes a response, which the guest does not see before [`Ring::publish`].
    ///
    /// # Panics
    /// When more responses are written than requests were taken.
    pub fn put(&self, response: &Response) {
        let next = self.rsp_prod.get();
        assert_ne!(next, self.req_cons.get(), "a response without a request");
        match &self.responses {
            Some((memory, slots)) => {
                let at = RING_HEADER_BYTES + (next & (slots - 1)) as usize * split::RESPONSE_BYTES;
                memory.write(at, &response.encode());
            }
            None => self.memory.write(self.slot_at(next), &response.encode()[..self.abi.response_bytes()]),
        }
        self.rsp_prod.set(next.wrapping_add(1));
    }

    /// Shows the guest all responses.
    pub fn publish(&self) {
        self.published.set(self.rsp_prod.get());
        self.response_memory().store(index::RSP_PROD, self.published.get(), Ordering::Release);
    }

    /// True when the guest wants to be notified of what was published after the index `before`.
    pub fn wants_notice(&self, before: u32) -> bool {
        // The guest writes its event index and then reads our producer index. We wrote our producer index and now read
        // its event index.
        self.memory.fence();
        let event = self.response_memory().load(index::RSP_EVENT, Ordering::Relaxed);
        let now = self.published.get();
        now.wrapping_sub(event) < now.wrapping_sub(before)
    }

    /// The index of responses that the guest has been shown.
    pub fn published(&self) -> u32 {
        self.published.get()
    }

    fn response_memory(&self) -> &M {
        self.responses.as_ref().map_or(&self.memory, |(memory, _)| memory)
    }

    fn slot_at(&self, index: u32) -> usize {
        RING_HEADER_BYTES + (index & (self.slots - 1)) as usize * self.abi.slot_bytes()
    }
}

/// The index of responses in the shared memory of a ring, or of a separate ring of responses. The next process needs it
/// when a back end was killed.
pub fn shared_rsp_prod(memory: &Segment) -> u32 {
    memory.load_u32(index::RSP_PROD, Ordering::Acquire)
}

#[cfg(test)]
mod tests {
    use super::*;
    use spile_xen::blkif::{PlainRequest, Request, status};

    struct Guest {
        memory: Segment,
        abi: Abi,
        req_prod: u32,
    }

    impl Guest {
        fn new(abi: Abi, start: u32) -> Self {
            let memory = Segment::zeroed(4096);
            for at in [index::REQ_PROD, index::RSP_PROD] {
                memory.store_u32(at, start, Ordering::Relaxed);
            }
            for at in [index::REQ_EVENT, index::RSP_EVENT] {
                memory.store_u32(at, start.wrapping_add(1), Ordering::Relaxed);
            }
            Self { memory, abi, req_prod: start }
        }

        fn ring(&self) -> Ring {
            Ring::new(self.memory.clone(), self.abi, 0, self.req_prod, self.req_prod)
        }

        fn offer(&mut self, id: u64) {
            let mut slot = [0; SLOT_BYTES];
            Request::Plain(PlainRequest { id, ..PlainRequest::default() }).encode(self.abi, &mut slot);
            let at = 64 + (self.req_prod % 32) as usize * self.abi.slot_bytes();
            self.memory.copy_from_slice(at, &slot[..self.abi.slot_bytes()]);
            self.req_prod = self.req_prod.wrapping_add(1);
            self.claim(self.req_prod);
        }

        fn claim(&self, req_prod: u32) {
            self.memory.store_u32(index::REQ_PROD, req_prod, Ordering::Release);
        }

        fn response(&self, index: u32) -> Response {
            let mut bytes = [0; 12];
            self.memory.copy_to_slice(64 + (index % 32) as usize * self.abi.slot_bytes(), &mut bytes);
            Response::decode(&bytes)
        }
    }

    fn answer(id: u64) -> Response {
        Response { id, op: 0, status: status::OKAY }
    }

    fn ids(ring: &Ring) -> Vec<u64> {
        let mut slot = [0; SLOT_BYTES];
        let next = || ring.pop(&mut slot).unwrap().then(|| Request::decode(ring.abi(), &slot).id());
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn indices_wrap_while_the_ring_is_full() {
        for abi in [Abi::X86_64, Abi::X86_32] {
            let start = u32::MAX - 1;
            let mut guest = Guest::new(abi, start);
            let ring = guest.ring();
            for round in 0..3 {
                (0..32).for_each(|id| guest.offer(id));
                assert_eq!(ids(&ring), (0..32).collect::<Vec<_>>());
                (0..32).for_each(|id| ring.put(&answer(100 + id)));
                ring.publish();
                let shown = start.wrapping_add(32 * (round + 1));
                assert_eq!(shared_rsp_prod(&guest.memory), shown);
                assert_eq!(guest.response(shown.wrapping_sub(1)), answer(131));
            }
        }
    }

    /// Cases 1 and 2 of a hostile guest, at every fill.
    #[test]
    fn an_index_too_far_ahead_or_going_back_breaks_the_ring() {
        for taken in [0u32, 1, 31, 32] {
            for claimed in [33u32, 1 << 31, u32::MAX, taken.wrapping_sub(1)] {
                let mut guest = Guest::new(Abi::X86_64, 0);
                let ring = guest.ring();
                (0..taken).for_each(|id| guest.offer(u64::from(id)));
                assert_eq!(ids(&ring).len(), taken as usize);
                guest.claim(claimed);
                assert!(ring.has_next());
                assert_eq!(ring.pop(&mut [0; SLOT_BYTES]).is_err(), claimed != taken, "{taken} {claimed}");
            }
        }
    }

    /// A slot is free again when its response is shown, and not before: the journal has no more entries than that.
    #[test]
    fn a_response_that_is_not_shown_gives_no_room() {
        let mut guest = Guest::new(Abi::X86_64, 0);
        let ring = guest.ring();
        (0..32).for_each(|id| guest.offer(id));
        assert_eq!(ids(&ring).len(), 32);
        ring.put(&answer(0));
        guest.claim(33);
        assert!(ring.pop(&mut [0; SLOT_BYTES]).is_err());
        ring.publish();
        assert_eq!(ring.pop(&mut [0; SLOT_BYTES]), Ok(true));
    }

    /// A guest that writes over the index of responses changes nothing for us.
    #[test]
    fn our_own_indices_are_not_read_back() {
        let mut guest = Guest::new(Abi::X86_64, 0);
        let ring = guest.ring();
        guest.offer(7);
        guest.memory.store_u32(index::RSP_PROD, 0x5555, Ordering::Relaxed);
        assert_eq!(ids(&ring), [7]);
        ring.put(&answer(7));
        ring.publish();
        assert_eq!((ring.published(), shared_rsp_prod(&guest.memory)), (1, 1));
    }

    #[test]
    fn notices_follow_the_event_index() {
        let mut guest = Guest::new(Abi::X86_64, 0);
        let ring = guest.ring();
        (0..8).for_each(|id| guest.offer(id));
        ids(&ring);
        let publish = |count: u32| {
            let before = ring.published();
            (0..count).for_each(|id| ring.put(&answer(u64::from(id))));
            ring.publish();
            ring.wants_notice(before)
        };
        guest.memory.store_u32(index::RSP_EVENT, 3, Ordering::Relaxed);
        assert!(!publish(1) && !publish(1) && publish(1) && !publish(1));
        guest.memory.store_u32(index::RSP_EVENT, 5, Ordering::Relaxed);
        assert!(publish(4));
    }

    #[test]
    fn arming_sees_what_came_before() {
        let mut guest = Guest::new(Abi::X86_64, 0);
        let ring = guest.ring();
        assert!(!ring.has_next() && !ring.arm());
        guest.offer(1);
        assert!(ring.has_next() && ring.arm());
        ids(&ring);
        assert!(!ring.arm());
        assert_eq!(guest.memory.load_u32(index::REQ_EVENT, Ordering::Relaxed), 2);
    }
}
