//! The data path of one ring. Its slots have fixed pages, and each slot can hold one request at a time.
//!
//! With split rings more requests can be in flight than the ring of requests has slots. A request that finds no slot waits
//! in a list here, in order. It goes into the ring as soon as the back end has taken other requests. The queue looks for
//! that in [`GuestQueue::publish`], for some microseconds, as a back end takes all requests that it sees at once; and in
//! [`GuestQueue::take`], [`GuestQueue::sleep`] and [`GuestQueue::spin`]. A back end sends no signal when it takes requests,
//! so the queue sleeps only for a short time while requests wait.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use spile_core::{Error, ErrorKind, Result};
use spile_mem::Segments;
use spile_xen::blkif::{Request, Response, status};
use spile_xen::{DomId, GrantRef};

use super::bell::Bell;
use super::ring::Ring;
use super::slots::{Asked, Op, SlotMemory};
use crate::queue::{Completion, GuestQueue};
use crate::xen::guest::{EventPort, Frames, Guest};

/// Looks at the ring between two looks at the clock: a few microseconds.
const SPINS: u32 = 100;
/// How often `publish` looks at a full ring of requests: some tens of microseconds, enough for a back end that is awake.
const FULL_SPINS: u32 = 1000;
/// How long the queue sleeps at a time while requests wait for a slot of the ring.
const NAP: Duration = Duration::from_millis(1);
/// Bits of a request's number that say its slot; the others count the slot's requests, so that a late answer is
/// noticed.
const SLOT_BITS: u32 = 16;

#[derive(Debug)]
struct Slot {
    memory: SlotMemory,
    asked: Option<Asked>,
    requests: u64,
}

/// The parts of a queue.
pub(super) struct QueueParts {
    pub guest: Arc<Guest>,
    pub backend: DomId,
    pub ring: Ring,
    /// The grants of the ring's pages.
    pub ring_refs: Vec<GrantRef>,
    /// The grants of the ring of responses, if it has pages of its own.
    pub response_refs: Vec<GrantRef>,
    pub event: EventPort,
    pub slots: Vec<SlotMemory>,
    /// All memory of ring and slots.
    pub frames: Vec<Frames>,
    pub is_persistent: bool,
    pub handle: u16,
}

/// One ring with its slots. It belongs to one thread.
#[derive(Debug)]
pub struct Queue {
    guest: Arc<Guest>,
    backend: DomId,
    ring: Ring,
    ring_refs: Vec<GrantRef>,
    response_refs: Vec<GrantRef>,
    event: EventPort,
    bell: Bell,
    slots: Vec<Slot>,
    /// The slots whose requests were submitted and are not in the ring yet.
    waiting: VecDeque<usize>,
    frames: Vec<Frames>,
    outstanding: usize,
    is_persistent: bool,
    handle: u16,
}

impl Queue {
    pub(super) fn new(parts: QueueParts) -> Result<Self> {
        let QueueParts { guest, backend, ring, ring_refs, response_refs, event, slots, frames, is_persistent, handle } =
            parts;
        let bell = Bell::new(&event.call)?;
        if is_persistent {
            let pages = slots.iter().flat_map(|slot| slot.pages.iter().chain(&slot.indirect));
            pages.for_each(|page| page.grant(&guest, backend, false));
        }
        let slots: Vec<_> = slots.into_iter().map(|memory| Slot { memory, asked: None, requests: 0 }).collect();
        ring.disarm();
        Ok(Self {
            guest,
            backend,
            ring,
            ring_refs,
            response_refs,
            event,
            bell,
            waiting: VecDeque::with_capacity(slots.len()),
            slots,
            frames,
            outstanding: 0,
            is_persistent,
            handle,
        })
    }

    /// The number of outstanding requests that still wait for a slot in the ring.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The grants of a slot's pages of data. Unless grants are persistent, they are valid only while a request is outstanding.
    pub fn grants(&self, slot: usize) -> impl Iterator<Item = GrantRef> {
        self.slots[slot].memory.pages.iter().map(|page| page.gref)
    }

    /// The grants of a slot's pages of segments.
    pub fn indirect_grants(&self, slot: usize) -> impl Iterator<Item = GrantRef> {
        self.slots[slot].memory.indirect.iter().map(|page| page.gref)
    }

    /// Grants all of a slot's pages for reading and writing, for requests that a test builds itself ([`Ring::push`]).
    pub fn grant_all(&self, slot: usize) {
        let memory = &self.slots[slot].memory;
        memory.pages.iter().chain(&memory.indirect).for_each(|page| page.grant(&self.guest, self.backend, false));
    }

    /// The request that [`GuestQueue::submit`] would put into the ring, for a test that changes it and pushes it itself.
    /// Its pages are not granted, and its number belongs to no slot.
    ///
    /// # Panics
    /// As [`GuestQueue::submit`].
    pub fn draft(&self, slot: usize, op: Op, offset_bytes: u64, len_bytes: u32) -> Request {
        let asked = Asked { op, id: u64::MAX, handle: self.handle, offset_bytes, len_bytes };
        self.slots[slot].memory.request(&asked)
    }

    /// The guest.
    pub fn guest(&self) -> &Arc<Guest> {
        &self.guest
    }

    /// The ring, for reading.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// The ring, for requests that a test pushes itself. The test must also take their responses from the ring.
    pub fn ring_mut(&mut self) -> &mut Ring {
        &mut self.ring
    }

    /// The grants of the ring's pages.
    pub fn ring_refs(&self) -> &[GrantRef] {
        &self.ring_refs
    }

    /// The grants of the ring of responses; none when there is one ring for both.
    pub fn response_refs(&self) -> &[GrantRef] {
        &self.response_refs
    }

    /// The guest's end of the event channel.
    pub fn event(&self) -> &EventPort {
        &self.event
    }

    /// Signals the back end, whether it wants that or not.
    pub fn kick(&self) {
        self.event.notify();
    }

    fn show(&mut self) {
        if self.ring.publish() {
            self.kick();
        }
    }

    /// Puts waiting requests into the ring, as many as fit, and shows them to the back end.
    fn show_waiting(&mut self) {
        if self.waiting.is_empty() || self.ring.free() == 0 {
            return;
        }
        while self.ring.free() > 0
            && let Some(slot) = self.waiting.pop_front()
        {
            let Slot { memory, asked, .. } = &self.slots[slot];
            self.ring.push(&memory.request(asked.as_ref().expect("what waits was submitted")));
        }
        self.show();
    }

    /// Ends the queue's grants and its event channel, and gives its memory back. The back end must have closed before.
    ///
    /// # Errors
    /// `Protocol` when the back end still uses a page.
    pub(super) fn close(self) -> Result<()> {
        let pages = self.slots.iter().flat_map(|slot| slot.memory.pages.iter().chain(&slot.memory.indirect));
        let all = pages.map(|page| page.gref).chain(self.ring_refs.iter().chain(&self.response_refs).copied());
        let held = all.filter(|gref| !self.guest.end_access(*gref)).count();
        // A guest that is gone for the host has no channels to close.
        let _ = self.guest.close(self.event.port);
        if held == 0 {
            self.frames.into_iter().for_each(|frames| self.guest.give_frames(frames));
            return Ok(());
        }
        Err(Error::new(ErrorKind::Protocol, format!("the back end has closed and still uses {held} pages")))
    }
}

impl GuestQueue for Queue {
    type Op = Op;
    type Status = i16;

    const READ: Op = Op::Read;
    const WRITE: Op = Op::Write;
    const FLUSH: Op = Op::Flush;

    fn slots(&self) -> usize {
        self.slots.len()
    }

    fn outstanding(&self) -> usize {
        self.outstanding
    }

    fn is_outstanding(&self, slot: usize) -> bool {
        self.slots[slot].asked.is_some()
    }

    fn data(&self, slot: usize) -> &Segments {
        &self.slots[slot].memory.data
    }

    fn submit(&mut self, slot: usize, op: Op, offset_bytes: u64, len_bytes: u32) {
        let place = &mut self.slots[slot];
        assert!(place.asked.is_none(), "slot {slot} is taken");
        place.requests += 1;
        let id = place.requests << SLOT_BITS | slot as u64;
        let asked = Asked { op, id, handle: self.handle, offset_bytes, len_bytes };
        let request = place.memory.request(&asked);
        if self.is_persistent {
            if op != Op::Read {
                copy_pages(&place.memory, &asked, true);
            }
        } else {
            let used = SlotMemory::used_pages(&asked);
            for (number, page) in place.memory.granted(&asked).enumerate() {
                page.grant(&self.guest, self.backend, op != Op::Read || number >= used);
            }
        }
        place.asked = Some(asked);
        self.outstanding += 1;
        // Those that wait go first.
        if self.waiting.is_empty() && self.ring.free() > 0 {
            self.ring.push(&request);
        } else {
            self.waiting.push_back(slot);
        }
    }

    fn publish(&mut self) {
        self.show();
        for _ in 0..FULL_SPINS {
            if self.waiting.is_empty() {
                return;
            }
            std::hint::spin_loop();
            self.show_waiting();
        }
    }

    fn take(&mut self) -> Result<Option<Completion<i16>>> {
        self.show_waiting();
        let Some(response) = self.ring.pop()? else { return Ok(None) };
        let slot = (response.id & ((1 << SLOT_BITS) - 1)) as usize;
        let place = self.slots.get_mut(slot);
        let Some((place, asked)) = place.and_then(|place| {
            let asked = place.asked.filter(|asked| asked.id == response.id)?;
            Some((place, asked))
        }) else {
            return Err(broken(&response, "which is not outstanding"));
        };
        if response.op != asked.op.raw() {
            return Err(broken(&response, &format!("which was operation {}", asked.op.raw())));
        }
        place.asked = None;
        self.outstanding -= 1;
        if self.is_persistent {
            if asked.op == Op::Read && response.status == status::OKAY {
                copy_pages(&place.memory, &asked, false);
            }
        } else if !place.memory.granted(&asked).all(|page| self.guest.table().end_access(page.gref)) {
            return Err(broken(&response, "whose pages it still uses"));
        }
        Ok(Some(Completion { slot, status: response.status }))
    }

    fn sleep(&mut self, timeout: Duration) -> Result<bool> {
        let deadline = Instant::now() + timeout;
        while self.ring.arm() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.ring.disarm();
                return Ok(false);
            }
            self.show_waiting();
            self.bell.wait(if self.waiting.is_empty() { left } else { left.min(NAP) })?;
        }
        self.ring.disarm();
        Ok(true)
    }

    fn spin(&mut self, timeout: Duration) -> Result<bool> {
        let mut start = None;
        loop {
            for _ in 0..SPINS {
                self.show_waiting();
                if self.ring.has_response() {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            if start.get_or_insert_with(Instant::now).elapsed() >= timeout {
                return Ok(false);
            }
        }
    }

    fn error_kind(status: i16) -> Option<ErrorKind> {
        match status {
            status::OKAY => None,
            status::EOPNOTSUPP => Some(ErrorKind::Unsupported),
            _ => Some(ErrorKind::Io),
        }
    }
}

/// Copies a request's data into the pages that the back end sees (`is_out`), or out of them. Used with persistent grants.
fn copy_pages(memory: &SlotMemory, asked: &Asked, is_out: bool) {
    let used = SlotMemory::used_pages(asked);
    for (page, data) in memory.pages[..used].iter().zip(memory.data.iter()) {
        if is_out { page.bytes.copy_from(data) } else { data.copy_from(&page.bytes) }
    }
}

fn broken(response: &Response, what: &str) -> Error {
    let message = format!("the back end answered request {:#x} as operation {}, {what}", response.id, response.op);
    Error::new(ErrorKind::Protocol, message)
}
