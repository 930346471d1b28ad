//! The data path of one virtqueue. Its slots have fixed memory, and each slot can hold one request at a time.
//!
//! A slot's descriptors, header, status and data never move, so a request costs a header, at most a few descriptors, and
//! one entry of the available ring. A sleep is one system call: the call eventfd is watched edge-triggered, so that nobody
//! has to read it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use spile_core::{Error, ErrorKind, Result};
use spile_mem::{Segment, Segments};

use super::backend::is_readable;
use super::link::{Link, LinkState};
use super::memory::Area;
use super::raw::broken;
use super::request::{HEADER_AT, ID_AT, META_BYTES, Op, RANGE_AT, STATUS_AT, STATUS_NONE, STATUS_OK, STATUS_UNSUPP};
use super::ring::{Descriptor, DescriptorTable, Ring, RingParts};
use crate::queue::{Completion, GuestQueue};

/// Looks at the used ring between two looks at the clock: a few microseconds.
const SPINS: u32 = 100;

/// The parts of a queue that its device uses too: the ring's memory, and both eventfds.
#[derive(Debug)]
pub(crate) struct QueueHandles {
    pub parts: RingParts,
    /// Descriptor table, available ring, used ring.
    pub areas: [Area; 3],
    pub kick: OwnedFd,
    pub call: OwnedFd,
}

impl QueueHandles {
    pub fn new(areas: [Area; 3], size: u16) -> Result<Self> {
        let event = || {
            let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            fd.map_err(|e| Error::io("cannot make an eventfd", e.into()))
        };
        let [descriptors, available, used] = areas.clone().map(|area| area.bytes);
        let parts = RingParts { descriptors: DescriptorTable(descriptors), available, used, size };
        Ok(Self { parts, areas, kick: event()?, call: event()? })
    }
}

/// Signals an eventfd. It can only fail when it is full of signals already.
pub(crate) fn signal(eventfd: impl AsFd) {
    let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}

/// The memory of one slot.
#[derive(Debug)]
pub(crate) struct SlotMemory {
    /// Pieces of data: guest address, length.
    pub pieces: Vec<(u64, u32)>,
    /// The same bytes.
    pub data: Segments,
}

/// The memory of a queue beside its ring.
#[derive(Debug)]
pub(crate) struct QueueMemory {
    /// [`META_BYTES`] for each slot.
    pub meta: Area,
    /// A table of `chain` descriptors for each slot, when chains are indirect.
    pub tables: Option<Area>,
    /// Descriptors of the longest chain.
    pub chain: usize,
    pub slots: Vec<SlotMemory>,
}

#[derive(Debug)]
struct Slot {
    memory: SlotMemory,
    /// The operation and length that the slot's descriptors describe now.
    shape: Option<(Op, u32)>,
    outstanding: bool,
}

/// One virtqueue with its slots. It belongs to one thread.
#[derive(Debug)]
pub struct Queue {
    shared: Arc<QueueHandles>,
    link: Arc<Link>,
    ring: Ring,
    calls: OwnedFd,
    meta: Area,
    /// The descriptors of all slots.
    tables: DescriptorTable,
    tables_address: u64,
    indirect: bool,
    chain: usize,
    slots: Vec<Slot>,
    /// For each descriptor of the ring, the slot that it is the head of.
    slot_of: Vec<Option<u16>>,
    outstanding: usize,
}

impl Queue {
    pub(crate) fn new(
        shared: Arc<QueueHandles>,
        link: Arc<Link>,
        event_idx: bool,
        memory: QueueMemory,
    ) -> Result<Self> {
        let failed = |e: rustix::io::Errno| Error::io("cannot watch an eventfd", e.into());
        let calls = epoll::create(CreateFlags::CLOEXEC).map_err(failed)?;
        let flags = EventFlags::IN | EventFlags::ET;
        epoll::add(&calls, &shared.call, EventData::new_u64(0), flags).map_err(failed)?;
        let ring = Ring::new(shared.parts.clone(), event_idx);
        ring.disarm();
        let QueueMemory { meta, tables, chain, slots } = memory;
        let indirect = tables.is_some();
        let tables = tables.unwrap_or_else(|| shared.areas[0].clone());
        let new_slot = |memory| Slot { memory, shape: None, outstanding: false };
        let mut queue = Self {
            tables: DescriptorTable(tables.bytes),
            tables_address: tables.address,
            slot_of: vec![None; usize::from(ring.size())],
            slots: slots.into_iter().map(new_slot).collect(),
            outstanding: 0,
            shared,
            link,
            ring,
            calls,
            meta,
            indirect,
            chain,
        };
        queue.assign_heads();
        Ok(queue)
    }

    fn assign_heads(&mut self) {
        for slot in 0..self.slots.len() {
            self.set_status(slot);
            let head = self.head(slot);
            self.slot_of[usize::from(head)] = Some(slot as u16);
            if self.indirect {
                self.point_to_table(slot, 2);
            }
        }
    }

    /// The descriptor that a slot's chain begins with.
    fn head(&self, slot: usize) -> u16 {
        (if self.indirect { slot } else { slot * self.chain }) as u16
    }

    /// The name that a GET_ID in this slot has brought, 20 bytes.
    pub fn id(&self, slot: usize) -> Segment {
        let at = slot * META_BYTES + ID_AT;
        self.meta.bytes.slice(at..at + super::request::ID_BYTES)
    }

    /// Asks for the disk's name, without the zeroes at its end.
    ///
    /// # Errors
    /// As [`GuestQueue::run_well`].
    pub fn disk_id(&mut self) -> Result<Vec<u8>> {
        self.run_well(Op::GetId, 0, 0)?;
        let mut id = self.id(0).to_vec();
        let len = id.iter().position(|byte| *byte == 0).unwrap_or(id.len());
        id.truncate(len);
        Ok(id)
    }

    /// The connection's state.
    pub fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// The ring, for reading.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// The ring, for chains that a test pushes itself. The test must also take their answers from the ring.
    pub fn ring_mut(&mut self) -> &mut Ring {
        &mut self.ring
    }

    /// The eventfd that wakes the server.
    pub fn kick_fd(&self) -> BorrowedFd<'_> {
        self.shared.kick.as_fd()
    }

    /// The eventfd by which the server wakes the queue.
    pub fn call_fd(&self) -> BorrowedFd<'_> {
        self.shared.call.as_fd()
    }

    /// Wakes the server, whether it wants that or not.
    pub fn kick(&self) {
        signal(&self.shared.kick);
    }

    fn describe(&mut self, slot: usize, op: Op, len_bytes: u32) {
        let (base, meta) = (slot * self.chain, self.meta.address + (slot * META_BYTES) as u64);
        // Links within an indirect table count from its own start.
        let (tables, link) = (&self.tables, if self.indirect { 0 } else { base });
        let mut count = 0;
        op.buffers(len_bytes, meta, &self.slots[slot].memory.pieces, |address, len_bytes, flags| {
            let next = (link + count + 1) as u16;
            tables.set(base + count, Descriptor { address, len_bytes, flags: flags | Descriptor::NEXT, next });
            count += 1;
        });
        let last = tables.get(base + count - 1);
        tables.set(base + count - 1, Descriptor { flags: last.flags & !Descriptor::NEXT, next: 0, ..last });
        if self.indirect {
            self.point_to_table(slot, count);
        }
        self.slots[slot].shape = Some((op, len_bytes));
    }

    fn point_to_table(&self, slot: usize, count: usize) {
        let at = slot * self.chain * super::ring::DESC_BYTES;
        let address = self.tables_address + at as u64;
        let len_bytes = (count * super::ring::DESC_BYTES) as u32;
        let descriptor = Descriptor { address, len_bytes, flags: Descriptor::INDIRECT, next: 0 };
        self.shared.parts.descriptors.set(slot, descriptor);
    }

    fn set_status(&self, slot: usize) {
        self.meta.bytes.store_u8(slot * META_BYTES + STATUS_AT, STATUS_NONE, Ordering::Relaxed);
    }

    /// Waits for a call of the server, at most for `timeout`.
    fn wait_for_call(&self, mut timeout: Duration) -> Result<()> {
        // The system call below counts in milliseconds, which is too coarse for one who paces requests.
        if timeout < Duration::from_secs(1) {
            is_readable(&self.calls, timeout)?;
            timeout = Duration::ZERO;
        }
        let timeout = Timespec::try_from(timeout).ok();
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }];
        match epoll::wait(&self.calls, &mut events, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(Error::io("cannot wait for a call", e.into())),
        }
    }

    fn check_link(&self) -> Result<()> {
        match self.link.state() {
            LinkState::Lost => Err(self.link.error()),
            LinkState::Up | LinkState::Broken => Ok(()),
        }
    }
}

impl GuestQueue for Queue {
    type Op = Op;
    type Status = u8;

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
        self.slots[slot].outstanding
    }

    fn data(&self, slot: usize) -> &Segments {
        &self.slots[slot].memory.data
    }

    fn submit(&mut self, slot: usize, op: Op, offset_bytes: u64, len_bytes: u32) {
        assert!(!self.slots[slot].outstanding, "slot {slot} is taken");
        if self.slots[slot].shape != Some((op, len_bytes)) {
            self.describe(slot, op, len_bytes);
        }
        let meta = slot * META_BYTES;
        self.meta.bytes.copy_from_slice(meta + HEADER_AT, &op.header(offset_bytes));
        if let Some(range) = op.range(offset_bytes, len_bytes) {
            self.meta.bytes.copy_from_slice(meta + RANGE_AT, &range);
        }
        self.slots[slot].outstanding = true;
        self.outstanding += 1;
        let head = self.head(slot);
        self.ring.push(head);
    }

    fn publish(&mut self) {
        if self.ring.publish() {
            self.kick();
        }
    }

    fn take(&mut self) -> Result<Option<Completion<u8>>> {
        let Some(used) = self.ring.pop()? else { return Ok(None) };
        let slot = self.slot_of.get(used.id as usize).copied().flatten().map(usize::from);
        let Some(slot) = slot.filter(|slot| self.slots[*slot].outstanding) else {
            return Err(broken(format!("the server answered chain {}, which is not outstanding", used.id)));
        };
        self.slots[slot].outstanding = false;
        self.outstanding -= 1;
        let status = self.meta.bytes.load_u8(slot * META_BYTES + STATUS_AT, Ordering::Relaxed);
        self.set_status(slot);
        Ok(Some(Completion { slot, status }))
    }

    fn sleep(&mut self, timeout: Duration) -> Result<bool> {
        let deadline = Instant::now() + timeout;
        while self.ring.arm() {
            self.check_link()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.ring.disarm();
                return Ok(false);
            }
            self.wait_for_call(left)?;
        }
        self.ring.disarm();
        Ok(true)
    }

    fn spin(&mut self, timeout: Duration) -> Result<bool> {
        let mut start = None;
        loop {
            for _ in 0..SPINS {
                if self.ring.has_used() {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            self.check_link()?;
            if start.get_or_insert_with(Instant::now).elapsed() >= timeout {
                return Ok(false);
            }
        }
    }

    fn is_served(&self) -> bool {
        self.link.state() == LinkState::Up
    }

    fn error_kind(status: u8) -> Option<ErrorKind> {
        match status {
            STATUS_OK => None,
            STATUS_UNSUPP => Some(ErrorKind::Unsupported),
            _ => Some(ErrorKind::Io),
        }
    }
}

#[cfg(test)]
mod tests;
