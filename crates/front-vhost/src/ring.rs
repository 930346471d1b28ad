//! The device's side of a split virtqueue: it pops the heads of descriptor chains, publishes used ones, and decides
//! whether the driver is notified.
//!
//! Layout and rules: Virtual I/O Device Version 1.2, sections 2.7 (split virtqueues) and 2.7.7 to 2.7.10 (notification
//! suppression). The guest owns the descriptors and the available ring and may change them at any moment; every number
//! is read once. Our own indices are kept here and are never read back from the guest.

use std::cell::Cell;
use std::sync::atomic::{Ordering, fence};

use spile_core::Segment;

/// The largest queue (section 2.7).
pub const MAX_QUEUE_SIZE: u16 = 32768;

const AVAIL_FLAGS: usize = 0;
const AVAIL_IDX: usize = 2;
const AVAIL_RING: usize = 4;
const USED_FLAGS: usize = 0;
const USED_IDX: usize = 2;
const USED_RING: usize = 4;
const NO_INTERRUPT: u16 = 1;
const NO_NOTIFY: u16 = 1;

/// The bytes of the descriptor table of a queue of that size.
pub fn descriptors_bytes(size: u16) -> usize {
    16 * usize::from(size)
}

/// The bytes of the available ring of a queue of that size, with the event index.
pub fn available_bytes(size: u16) -> usize {
    AVAIL_RING + 2 * usize::from(size) + 2
}

/// The bytes of the used ring of a queue of that size, with the event index.
pub fn used_bytes(size: u16) -> usize {
    USED_RING + 8 * usize::from(size) + 2
}

/// Which rule the driver has broken. The ring is unusable until it is set up again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken(pub &'static str);

/// One descriptor, read once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// The address in the guest's memory.
    pub addr: u64,
    /// The length in bytes.
    pub len: u32,
    /// The flags: NEXT, WRITE, INDIRECT.
    pub flags: u16,
    /// The index of the chain's next descriptor, if NEXT is set.
    pub next: u16,
}

impl Descriptor {
    /// True when another descriptor of the chain follows.
    pub const NEXT: u16 = 1;
    /// True when the device writes the memory.
    pub const WRITE: u16 = 2;
    /// True when the memory is a table of descriptors.
    pub const INDIRECT: u16 = 4;

    /// Decodes a descriptor.
    pub fn decode(bytes: [u8; 16]) -> Self {
        let number = u128::from_le_bytes(bytes);
        Self::from_halves(number as u64, (number >> 64) as u64)
    }

    /// Decodes a descriptor from its two halves.
    pub fn from_halves(addr: u64, rest: u64) -> Self {
        Self { addr, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
    }
}

/// The memory of a ring's parts.
pub struct Parts {
    /// The number of descriptors: a power of two, at most [`MAX_QUEUE_SIZE`].
    pub size: u16,
    /// The descriptor table: [`descriptors_bytes`], at an address that is a multiple of 16.
    pub descriptors: Segment,
    /// The available ring: [`available_bytes`], at an address that is a multiple of 2.
    pub available: Segment,
    /// The used ring: [`used_bytes`], at an address that is a multiple of 4.
    pub used: Segment,
}

/// A split virtqueue. One task uses it; its state is in cells, so that the worker may look at the ring too.
pub struct Ring {
    parts: Parts,
    has_event_idx: bool,
    next_avail: Cell<u16>,
    /// The driver's index as it was last read.
    seen_avail: Cell<u16>,
    /// The index after the last element that was written to the used ring.
    next_used: Cell<u16>,
    /// The index that the driver has been shown.
    published: Cell<u16>,
}

impl Ring {
    /// A ring that goes on at the index `next_avail` of the available ring. The used ring itself tells where it goes
    /// on.
    pub fn new(parts: Parts, has_event_idx: bool, next_avail: u16) -> Self {
        let used = parts.used.load_u16(USED_IDX, Ordering::Relaxed);
        let cell = Cell::new;
        let (next_avail, seen_avail) = (cell(next_avail), cell(next_avail));
        Self { parts, has_event_idx, next_avail, seen_avail, next_used: cell(used), published: cell(used) }
    }

    /// The number of descriptors.
    pub fn size(&self) -> u16 {
        self.parts.size
    }

    /// The index of the next element to pop, as SET and GET_VRING_BASE mean it.
    pub fn next_avail(&self) -> u16 {
        self.next_avail.get()
    }

    /// The used index that the driver has been shown.
    pub fn published(&self) -> u16 {
        self.published.get()
    }

    /// True when the used ring's memory has been lost.
    pub fn is_lost(&self) -> bool {
        [&self.parts.descriptors, &self.parts.available, &self.parts.used].into_iter().any(Segment::is_lost)
    }

    fn slot(&self, index: u16) -> usize {
        usize::from(index & (self.parts.size - 1))
    }

    fn load_avail(&self) -> u16 {
        self.parts.available.load_u16(AVAIL_IDX, Ordering::Acquire)
    }

    /// True when the driver has made something available.
    pub fn has_next(&self) -> bool {
        self.seen_avail.get() != self.next_avail.get() || self.load_avail() != self.next_avail.get()
    }

    /// The head of the next chain.
    ///
    /// # Errors
    /// When the driver's index is further ahead than the ring is long, or the head lies outside the table.
    pub fn pop(&self) -> Result<Option<u16>, Broken> {
        let next = self.next_avail.get();
        if self.seen_avail.get() == next {
            let seen = self.load_avail();
            if seen == next {
                return Ok(None);
            }
            if seen.wrapping_sub(next) > self.parts.size {
                return Err(Broken("the available index is further ahead than the ring is long"));
            }
            self.seen_avail.set(seen);
        }
        let head = self.parts.available.load_u16(AVAIL_RING + 2 * self.slot(next), Ordering::Relaxed);
        if head >= self.parts.size {
            return Err(Broken("an available element names a descriptor outside the table"));
        }
        self.next_avail.set(next.wrapping_add(1));
        Ok(Some(head))
    }

    /// Reads the descriptor with that index.
    ///
    /// # Panics
    /// When `index` is outside the table.
    #[inline]
    pub fn descriptor(&self, index: u16) -> Descriptor {
        let (at, table) = (16 * usize::from(index), &self.parts.descriptors);
        Descriptor::from_halves(table.load_u64(at, Ordering::Relaxed), table.load_u64(at + 8, Ordering::Relaxed))
    }

    /// Tells the driver that it need not kick, because the worker looks at the ring.
    pub fn suppress(&self) {
        // With event indices nothing has to be written: the driver has passed our event index, so it does not kick.
        if !self.has_event_idx {
            self.parts.used.store_u16(USED_FLAGS, NO_NOTIFY, Ordering::Relaxed);
        }
    }

    /// Asks the driver to kick for the next element. True when there is an element already: no kick may come for that.
    pub fn arm(&self) -> bool {
        if self.has_event_idx {
            let at = USED_RING + 8 * usize::from(self.parts.size);
            self.parts.used.store_u16(at, self.next_avail.get(), Ordering::Relaxed);
        } else {
            self.parts.used.store_u16(USED_FLAGS, 0, Ordering::Relaxed);
        }
        // The driver writes its index and then reads our event index. We write our event index and then read its index.
        fence(Ordering::SeqCst);
        self.has_next()
    }

    /// Writes a used element, which the driver does not see before [`Ring::publish`].
    #[inline]
    pub fn add_used(&self, head: u16, written_bytes: u32) {
        let next = self.next_used.get();
        let at = USED_RING + 8 * self.slot(next);
        self.parts.used.store_u32(at, u32::from(head), Ordering::Relaxed);
        self.parts.used.store_u32(at + 4, written_bytes, Ordering::Relaxed);
        self.next_used.set(next.wrapping_add(1));
    }

    /// Shows the driver all used elements.
    pub fn publish(&self) {
        self.published.set(self.next_used.get());
        self.parts.used.store_u16(USED_IDX, self.published.get(), Ordering::Release);
    }

    /// True when the driver wants to be notified of what was published after the index `before`.
    pub fn wants_call(&self, before: u16) -> bool {
        // The driver writes its event index and then reads our used index. We wrote our used index and now read its
        // event index.
        fence(Ordering::SeqCst);
        if !self.has_event_idx {
            return self.parts.available.load_u16(AVAIL_FLAGS, Ordering::Relaxed) & NO_INTERRUPT == 0;
        }
        let at = AVAIL_RING + 2 * usize::from(self.parts.size);
        let event = self.parts.available.load_u16(at, Ordering::Relaxed);
        let now = self.published.get();
        now.wrapping_sub(event).wrapping_sub(1) < now.wrapping_sub(before)
    }

    /// The parts of the used ring that were written since its index was `before`, for the log of dirty pages: offset
    /// and length in bytes from its start.
    pub fn written_since(&self, before: u16) -> impl Iterator<Item = (u64, u64)> {
        let count = self.published.get().wrapping_sub(before).min(self.parts.size);
        let elements = (0..count).map(move |at| USED_RING + 8 * self.slot(before.wrapping_add(at)));
        elements.map(|at| (at as u64, 8)).chain([(0, USED_RING as u64)])
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A driver of the ring in `memory`: descriptors, available and used ring in three segments.
    pub(crate) struct Driver {
        pub(crate) size: u16,
        pub(crate) descriptors: Segment,
        pub(crate) available: Segment,
        pub(crate) used: Segment,
    }

    impl Driver {
        pub(crate) fn new(size: u16) -> Self {
            let (descriptors, available) = (descriptors_bytes(size), available_bytes(size));
            Self {
                size,
                descriptors: Segment::zeroed(descriptors),
                available: Segment::zeroed(available),
                used: Segment::zeroed(used_bytes(size)),
            }
        }

        pub(crate) fn ring(&self, has_event_idx: bool, next_avail: u16) -> Ring {
            let (descriptors, available) = (self.descriptors.clone(), self.available.clone());
            let parts = Parts { size: self.size, descriptors, available, used: self.used.clone() };
            Ring::new(parts, has_event_idx, next_avail)
        }

        pub(crate) fn set_indices(&self, idx: u16) {
            self.available.store_u16(AVAIL_IDX, idx, Ordering::Release);
            self.used.store_u16(USED_IDX, idx, Ordering::Release);
        }

        pub(crate) fn avail_idx(&self) -> u16 {
            self.available.load_u16(AVAIL_IDX, Ordering::Relaxed)
        }

        pub(crate) fn offer(&self, head: u16) {
            let idx = self.avail_idx();
            let at = AVAIL_RING + 2 * usize::from(idx & (self.size - 1));
            self.available.store_u16(at, head, Ordering::Relaxed);
            self.available.store_u16(AVAIL_IDX, idx.wrapping_add(1), Ordering::Release);
        }

        pub(crate) fn describe(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
            let rest = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
            self.descriptors.store_u64(16 * usize::from(index), addr, Ordering::Relaxed);
            self.descriptors.store_u64(16 * usize::from(index) + 8, rest, Ordering::Relaxed);
        }

        fn used_element(&self, at: u16) -> (u32, u32) {
            let at = USED_RING + 8 * usize::from(at & (self.size - 1));
            (self.used.load_u32(at, Ordering::Relaxed), self.used.load_u32(at + 4, Ordering::Relaxed))
        }

        fn set_used_event(&self, idx: u16) {
            self.available.store_u16(AVAIL_RING + 2 * usize::from(self.size), idx, Ordering::Relaxed);
        }

        fn avail_event(&self) -> u16 {
            self.used.load_u16(USED_RING + 8 * usize::from(self.size), Ordering::Relaxed)
        }
    }

    #[test]
    fn indices_wrap_while_the_ring_is_full() {
        let driver = Driver::new(4);
        let start = u16::MAX - 1;
        driver.set_indices(start);
        let ring = driver.ring(true, start);
        for round in 0..3u16 {
            (0..4).for_each(|head| driver.offer(head));
            let heads: Vec<_> = std::iter::from_fn(|| ring.pop().unwrap()).collect();
            assert_eq!(heads, [0, 1, 2, 3]);
            let before = ring.published();
            heads.iter().for_each(|head| ring.add_used(*head, 1));
            assert_eq!(ring.published(), before);
            ring.publish();
            assert_eq!(ring.published(), start.wrapping_add(4 * (round + 1)));
            assert_eq!(driver.used_element(before.wrapping_add(2)), (2, 1));
        }
        assert_eq!(ring.next_avail(), start.wrapping_add(12));
    }

    #[test]
    fn an_index_too_far_ahead_or_going_back_breaks_the_ring() {
        for ahead in [5u16, 0x8000, u16::MAX] {
            let driver = Driver::new(4);
            driver.available.store_u16(AVAIL_IDX, ahead, Ordering::Relaxed);
            assert!(driver.ring(true, 0).pop().is_err(), "{ahead}");
        }
        let driver = Driver::new(4);
        driver.offer(4);
        assert!(driver.ring(true, 0).pop().is_err());
    }

    #[test]
    fn calls_follow_the_event_index() {
        let driver = Driver::new(8);
        let ring = driver.ring(true, 0);
        let publish = |count: u16| {
            let before = ring.published();
            (0..count).for_each(|_| ring.add_used(0, 0));
            ring.publish();
            ring.wants_call(before)
        };
        driver.set_used_event(2);
        assert!(!publish(1) && !publish(1) && publish(1) && !publish(1));
        driver.set_used_event(4);
        assert!(publish(8));
    }

    #[test]
    fn calls_and_kicks_follow_the_flags_without_it() {
        let driver = Driver::new(8);
        let ring = driver.ring(false, 0);
        assert!(ring.wants_call(0));
        driver.available.store_u16(AVAIL_FLAGS, NO_INTERRUPT, Ordering::Relaxed);
        assert!(!ring.wants_call(0));
        ring.suppress();
        assert_eq!(driver.used.load_u16(USED_FLAGS, Ordering::Relaxed), NO_NOTIFY);
        assert!(!ring.arm());
        assert_eq!(driver.used.load_u16(USED_FLAGS, Ordering::Relaxed), 0);
    }

    #[test]
    fn arming_sees_what_came_before() {
        let driver = Driver::new(8);
        let ring = driver.ring(true, 0);
        assert!(!ring.has_next() && !ring.arm());
        driver.offer(1);
        assert!(ring.has_next() && ring.arm());
        ring.pop().unwrap();
        assert!(!ring.arm());
        assert_eq!(driver.avail_event(), 1);
    }

    #[test]
    fn the_log_covers_what_was_written() {
        let driver = Driver::new(4);
        let ring = driver.ring(true, 0);
        let before = ring.published();
        (0..2).for_each(|_| ring.add_used(0, 0));
        ring.publish();
        assert_eq!(ring.written_since(before).collect::<Vec<_>>(), [(4, 8), (12, 8), (0, 4)]);
    }
}
