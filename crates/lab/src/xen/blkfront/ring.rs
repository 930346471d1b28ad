//! The front end's side of a ring, with raw access to all of it.

use std::sync::atomic::{Ordering, fence};

use spile_core::{Error, ErrorKind, Result};
use spile_mem::Segment;
use spile_xen::blkif::{Abi, RING_HEADER_BYTES, Request, Response, index};

/// A ring in shared memory, and what of it is our own.
#[derive(Debug)]
pub struct Ring {
    bytes: Segment,
    abi: Abi,
    slots: u32,
    /// Requests pushed, of which those before `published` are the back end's to see.
    pushed: u32,
    published: u32,
    /// Responses taken.
    taken: u32,
}

impl Ring {
    /// Makes a ring of `slots` slots in `bytes`, which are zeroed before.
    ///
    /// # Panics
    /// When it does not fit, or the slots are no power of two.
    pub fn new(bytes: Segment, abi: Abi, slots: u32) -> Self {
        assert!(slots.is_power_of_two());
        assert!(RING_HEADER_BYTES + slots as usize * abi.slot_bytes() <= bytes.len());
        bytes.fill(0);
        let ring = Self { bytes, abi, slots, pushed: 0, published: 0, taken: 0 };
        ring.set_index(index::REQ_EVENT, 1);
        ring.set_index(index::RSP_EVENT, 1);
        ring
    }

    /// All of its bytes, to do with as one likes.
    pub fn bytes(&self) -> &Segment {
        &self.bytes
    }

    /// The layout of what is in it.
    pub fn abi(&self) -> Abi {
        self.abi
    }

    /// How many slots it has.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// One of the shared indices (`spile_xen::blkif::index`).
    pub fn index(&self, at: usize) -> u32 {
        self.bytes.load_u32(at, Ordering::Acquire)
    }

    /// Sets one of the shared indices.
    pub fn set_index(&self, at: usize, value: u32) {
        self.bytes.store_u32(at, value, Ordering::Release);
    }

    /// The bytes of the slot for the request or response of that number, counted from the ring's start.
    pub fn slot(&self, number: u32) -> Segment {
        let (len, number) = (self.abi.slot_bytes(), (number & (self.slots - 1)) as usize);
        let at = RING_HEADER_BYTES + number * len;
        self.bytes.slice(at..at + len)
    }

    /// Starts all four indices elsewhere, such as shortly before they wrap. For before the back end connects.
    pub fn start_at(&mut self, number: u32) {
        (self.pushed, self.published, self.taken) = (number, number, number);
        for (at, value) in [(index::REQ_PROD, number), (index::RSP_PROD, number)] {
            self.set_index(at, value);
        }
        for at in [index::REQ_EVENT, index::RSP_EVENT] {
            self.set_index(at, number.wrapping_add(1));
        }
    }

    /// Slots without a request whose response was not taken.
    pub fn free(&self) -> u32 {
        self.slots - self.pushed.wrapping_sub(self.taken)
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

    /// Shows the back end what was pushed, and says whether it wants to be told.
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
    /// `Protocol` when there are more than requests.
    pub fn pop(&mut self) -> Result<Option<Response>> {
        let waiting = self.index(index::RSP_PROD).wrapping_sub(self.taken);
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > self.published.wrapping_sub(self.taken) {
            let message = format!("the back end has {waiting} more answers than we took, and not so many requests");
            return Err(Error::new(ErrorKind::Protocol, message));
        }
        let at = RING_HEADER_BYTES + (self.taken & (self.slots - 1)) as usize * self.abi.slot_bytes();
        // What counts of a response is its first 12 bytes in both layouts.
        let response = Response::decode(&self.bytes.read_array::<12>(at));
        self.taken = self.taken.wrapping_add(1);
        Ok(Some(response))
    }

    /// Asks to be told of the next response; false when there is one already.
    pub fn arm(&self) -> bool {
        self.set_index(index::RSP_EVENT, self.taken.wrapping_add(1));
        fence(Ordering::SeqCst);
        !self.has_response()
    }

    /// Asks not to be told before all slots have gone round.
    pub fn disarm(&self) {
        self.set_index(index::RSP_EVENT, self.taken);
    }
}
