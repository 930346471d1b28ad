//! The front end's side of a ring, with raw access to all of it.
//!
//! With *split rings* ([`split`]) responses come in a ring of their own. A request's slot is free again as soon as
//! the back end has taken it, not only when it is answered, and what bounds the requests in flight are the slots for
//! responses.

use std::sync::atomic::{Ordering, fence};

use spile_core::{Error, ErrorKind, Result};
use spile_mem::Segment;
use spile_xen::blkif::{Abi, RING_HEADER_BYTES, Request, Response, index, split};

/// A ring in shared memory, and the front end's own copies of its indices.
#[derive(Debug)]
pub struct Ring {
    bytes: Segment,
    abi: Abi,
    slots: u32,
    /// The ring of responses, if it is not the ring of requests.
    responses: Option<Responses>,
    /// Requests pushed, of which those before `published` are the back end's to see.
    pushed: u32,
    published: u32,
    /// Responses taken.
    taken: u32,
}

#[derive(Debug)]
struct Responses {
    bytes: Segment,
    slots: u32,
}

impl Ring {
    /// Makes a ring of `slots` slots in `bytes`, which are zeroed before.
    ///
    /// # Panics
    /// When the ring does not fit, or `slots` is not a power of two.
    pub fn new(bytes: Segment, abi: Abi, slots: u32) -> Self {
        assert!(slots.is_power_of_two());
        assert!(RING_HEADER_BYTES + slots as usize * abi.slot_bytes() <= bytes.len());
        bytes.fill(0);
        let ring = Self { bytes, abi, slots, responses: None, pushed: 0, published: 0, taken: 0 };
        ring.set_index(index::REQ_EVENT, 1);
        ring.set_index(index::RSP_EVENT, 1);
        ring
    }

    /// Turns the ring into split rings: responses come in `bytes`, which are zeroed now and have room for `slots`
    /// responses ([`split`]). Must be called before a request is pushed.
    ///
    /// # Panics
    /// When the responses do not fit, or `slots` is not a power of two.
    pub fn with_responses(mut self, bytes: Segment, slots: u32) -> Self {
        assert!(slots.is_power_of_two());
        assert!(RING_HEADER_BYTES + slots as usize * split::RESPONSE_BYTES <= bytes.len());
        bytes.fill(0);
        self.responses = Some(Responses { bytes, slots });
        self.set_index(index::RSP_EVENT, 1);
        self
    }

    /// All bytes of the ring of requests. A test may change them.
    pub fn bytes(&self) -> &Segment {
        &self.bytes
    }

    /// All bytes of the ring of responses. Without split rings this is the ring of requests.
    pub fn response_bytes(&self) -> &Segment {
        self.responses.as_ref().map_or(&self.bytes, |responses| &responses.bytes)
    }

    /// The layout of requests and responses.
    pub fn abi(&self) -> Abi {
        self.abi
    }

    /// The number of requests that fit into the ring.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// True when responses come in a ring of their own.
    pub fn is_split(&self) -> bool {
        self.responses.is_some()
    }

    /// The largest number of requests in flight.
    pub fn max_in_flight(&self) -> u32 {
        self.responses.as_ref().map_or(self.slots, |responses| responses.slots)
    }

    /// One of the shared indices (`spile_xen::blkif::index`), in whichever ring it counts.
    pub fn index(&self, at: usize) -> u32 {
        self.index_bytes(at).load_u32(at, Ordering::Acquire)
    }

    /// Sets one of the shared indices, in whichever ring it counts.
    pub fn set_index(&self, at: usize, value: u32) {
        self.index_bytes(at).store_u32(at, value, Ordering::Release);
    }

    fn index_bytes(&self, at: usize) -> &Segment {
        if matches!(at, index::RSP_PROD | index::RSP_EVENT) { self.response_bytes() } else { &self.bytes }
    }

    /// With split rings, how many requests the back end says it has taken ([`split::TAKEN`]).
    pub fn requests_taken(&self) -> u32 {
        self.bytes.load_u32(split::TAKEN, Ordering::Acquire)
    }

    /// With split rings, sets the number that [`Ring::requests_taken`] returns.
    pub fn set_requests_taken(&self, value: u32) {
        self.bytes.store_u32(split::TAKEN, value, Ordering::Release);
    }

    /// The bytes of the slot for the request of that number, counted from the ring's start; in one ring the
    /// response's too.
    pub fn slot(&self, number: u32) -> Segment {
        let (len, number) = (self.abi.slot_bytes(), (number & (self.slots - 1)) as usize);
        let at = RING_HEADER_BYTES + number * len;
        self.bytes.slice(at..at + len)
    }

    /// Where the response of that number is, counted from the ring's start.
    pub fn response_slot(&self, number: u32) -> Segment {
        match &self.responses {
            None => self.slot(number),
            Some(Responses { bytes, slots }) => {
                let at = RING_HEADER_BYTES + (number & (slots - 1)) as usize * split::RESPONSE_BYTES;
                bytes.slice(at..at + split::RESPONSE_BYTES)
            }
        }
    }

    /// Starts all indices at `number`, for example shortly before they wrap. Must be called before the back end is told
    /// of the ring.
    pub fn start_at(&mut self, number: u32) {
        (self.pushed, self.published, self.taken) = (number, number, number);
        for (at, value) in [(index::REQ_PROD, number), (index::RSP_PROD, number)] {
            self.set_index(at, value);
        }
        for at in [index::REQ_EVENT, index::RSP_EVENT] {
            self.set_index(at, number.wrapping_add(1));
        }
        if self.is_split() {
            self.set_requests_taken(number);
        }
    }

    /// How many requests can be pushed now: one for each slot whose request's response was taken; with split rings,
    /// for each slot whose request the back end has taken, as long as all responses have room.
    pub fn free(&self) -> u32 {
        let room = self.max_in_flight() - self.pushed.wrapping_sub(self.taken);
        if !self.is_split() {
            return room;
        }
        // A back end that takes its word back frees nothing.
        room.min(self.slots.saturating_sub(self.pushed.wrapping_sub(self.requests_taken())))
    }

    /// Puts a request into the next slot. The back end sees it after [`Ring::publish`].
    ///
    /// # Panics
    /// When no slot is free.
    pub fn push(&mut self, request: &Request) {
        let mut slot = [0; 112];
        request.encode(self.abi, &mut slot);
        self.push_bytes(&slot[..self.abi.slot_bytes()]);
    }

    /// Puts any bytes into the next slot, at most as many as it has.
    ///
    /// # Panics
    /// When no slot is free.
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        assert!(self.free() > 0, "the ring is full");
        let len = self.abi.slot_bytes();
        let at = RING_HEADER_BYTES + (self.pushed & (self.slots - 1)) as usize * len;
        assert!(bytes.len() <= len, "{} bytes in a slot of {len}", bytes.len());
        self.bytes.copy_from_slice(at, bytes);
        self.pushed = self.pushed.wrapping_add(1);
    }

    /// Shows the back end what was pushed. True when the back end wants a signal.
    #[must_use]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.pushed);
        if old == new {
            return false;
        }
        self.set_index(index::REQ_PROD, new);
        self.published = new;
        fence(Ordering::SeqCst);
        new.wrapping_sub(self.index(index::REQ_EVENT)) < new.wrapping_sub(old)
    }

    /// True when there is a response to take.
    pub fn has_response(&self) -> bool {
        self.index(index::RSP_PROD) != self.taken
    }

    /// Takes the next response.
    ///
    /// # Errors
    /// `Protocol` when there are more than requests, or with split rings when the back end says that it has taken more
    /// requests than there are, or fewer than are answered.
    pub fn pop(&mut self) -> Result<Option<Response>> {
        let waiting = self.index(index::RSP_PROD).wrapping_sub(self.taken);
        let in_flight = self.published.wrapping_sub(self.taken);
        if waiting > in_flight {
            let message = format!("the back end has {waiting} more answers than we took, and not so many requests");
            return Err(Error::new(ErrorKind::Protocol, message));
        }
        // Looked at after the index of responses: whoever has written that has told before what it had taken.
        if self.is_split() && !(waiting..=in_flight).contains(&self.requests_taken().wrapping_sub(self.taken)) {
            let taken = self.requests_taken();
            let message = format!("the back end says that it has taken {taken} requests, which cannot be");
            return Err(Error::new(ErrorKind::Protocol, message));
        }
        if waiting == 0 {
            return Ok(None);
        }
        // What counts of a response is its first 12 bytes in both layouts.
        let response = Response::decode(&self.response_slot(self.taken).read_array::<12>(0));
        self.taken = self.taken.wrapping_add(1);
        Ok(Some(response))
    }

    /// Asks the back end for a signal at the next response. False when there is a response already.
    pub fn arm(&self) -> bool {
        self.set_index(index::RSP_EVENT, self.taken.wrapping_add(1));
        fence(Ordering::SeqCst);
        !self.has_response()
    }

    /// Asks the back end for no signal until all slots have been used once.
    pub fn disarm(&self) {
        self.set_index(index::RSP_EVENT, self.taken);
    }
}
