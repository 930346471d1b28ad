//! The driver's side of a split virtqueue (virtio 1.2, 2.7), and raw access to all of its parts.
//!
//! This module only reads and writes memory. The queue above sends and waits for notifications. The server is not trusted:
//! a used index that runs ahead of what was made available is an error.

use std::sync::atomic::{Ordering, fence};

use spile_core::Result;
use spile_mem::Segment;

use super::raw::broken;

/// The chain goes on at `next`.
pub const DESC_NEXT: u16 = 1;
/// The device writes the buffer.
pub const DESC_WRITE: u16 = 2;
/// The buffer is a table of descriptors.
pub const DESC_INDIRECT: u16 = 4;

/// Bytes of a descriptor.
pub const DESC_BYTES: usize = 16;

const AVAIL_NO_INTERRUPT: u16 = 1;
const USED_NO_NOTIFY: u16 = 1;

/// One descriptor (2.7.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// The guest address of its buffer.
    pub address: u64,
    /// The length of its buffer in bytes.
    pub len_bytes: u32,
    /// 1: goes on at `next`; 2: the device writes; 4: the buffer is a table of descriptors.
    pub flags: u16,
    /// The next descriptor of the chain.
    pub next: u16,
}

impl Descriptor {
    /// The flag of a chain that goes on.
    pub const NEXT: u16 = DESC_NEXT;
    /// The flag of a buffer that the device writes.
    pub const WRITE: u16 = DESC_WRITE;
    /// The flag of a table.
    pub const INDIRECT: u16 = DESC_INDIRECT;

    fn to_bytes(self) -> [u8; DESC_BYTES] {
        let low = u128::from(self.address) | u128::from(self.len_bytes) << 64;
        (low | u128::from(self.flags) << 96 | u128::from(self.next) << 112).to_le_bytes()
    }

    fn parse(bytes: [u8; DESC_BYTES]) -> Self {
        let word = u128::from_le_bytes(bytes);
        Self {
            address: word as u64,
            len_bytes: (word >> 64) as u32,
            flags: (word >> 96) as u16,
            next: (word >> 112) as u16,
        }
    }
}

/// A table of descriptors: that of a ring, or an indirect one.
#[derive(Clone, Debug)]
pub struct DescriptorTable(pub Segment);

impl DescriptorTable {
    /// Writes descriptor `index`.
    ///
    /// # Panics
    /// When the table has no descriptor of that number.
    pub fn set(&self, index: usize, descriptor: Descriptor) {
        self.0.copy_from_slice(index * DESC_BYTES, &descriptor.to_bytes());
    }

    /// Reads descriptor `index`.
    ///
    /// # Panics
    /// When the table has no descriptor of that number.
    pub fn get(&self, index: usize) -> Descriptor {
        Descriptor::parse(self.0.read_array(index * DESC_BYTES))
    }
}

/// One element of the used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The head of the chain.
    pub id: u32,
    /// How many bytes the device wrote.
    pub len_bytes: u32,
}

/// The memory of a ring. Every field can be read and written.
#[derive(Clone, Debug)]
pub struct RingParts {
    /// The descriptor table.
    pub descriptors: DescriptorTable,
    /// The available ring: flags, index, heads, used event.
    pub available: Segment,
    /// The used ring: flags, index, elements, available event.
    pub used: Segment,
    /// Descriptors, a power of two up to 32768.
    pub size: u16,
}

impl RingParts {
    /// The bytes of the three parts of a ring of `size`.
    pub fn lengths(size: u16) -> [usize; 3] {
        let size = usize::from(size);
        [size * DESC_BYTES, 6 + 2 * size, 6 + 8 * size]
    }

    fn slot(&self, index: u16) -> usize {
        usize::from(index & (self.size - 1))
    }

    /// Puts `head` at the place of available index `index`.
    pub fn set_available(&self, index: u16, head: u16) {
        self.available.store_u16(4 + 2 * self.slot(index), head.to_le(), Ordering::Relaxed);
    }

    /// The available index.
    pub fn available_index(&self) -> u16 {
        u16::from_le(self.available.load_u16(2, Ordering::Acquire))
    }

    /// Publishes everything up to `index`.
    pub fn set_available_index(&self, index: u16) {
        self.available.store_u16(2, index.to_le(), Ordering::Release);
    }

    /// Sets the available ring's flags (1: no calls wanted).
    pub fn set_available_flags(&self, flags: u16) {
        self.available.store_u16(0, flags.to_le(), Ordering::Relaxed);
    }

    /// Asks for a call once the used index passes `index`.
    pub fn set_used_event(&self, index: u16) {
        self.available.store_u16(4 + 2 * usize::from(self.size), index.to_le(), Ordering::Relaxed);
    }

    /// The used ring's flags (1: no kicks wanted).
    pub fn used_flags(&self) -> u16 {
        u16::from_le(self.used.load_u16(0, Ordering::Relaxed))
    }

    /// The used index.
    pub fn used_index(&self) -> u16 {
        u16::from_le(self.used.load_u16(2, Ordering::Acquire))
    }

    /// The element at the place of used index `index`.
    pub fn used(&self, index: u16) -> Used {
        let word = u64::from_le(u64::from_ne_bytes(self.used.read_array(4 + 8 * self.slot(index))));
        Used { id: word as u32, len_bytes: (word >> 32) as u32 }
    }

    /// The available index that the device wants to be kicked at.
    pub fn available_event(&self) -> u16 {
        u16::from_le(self.used.load_u16(4 + 8 * usize::from(self.size), Ordering::Relaxed))
    }
}

/// The driver's place in a ring.
#[derive(Debug)]
pub struct Ring {
    parts: RingParts,
    event_idx: bool,
    /// The next free place of the available ring; not published yet when it is past `published`.
    next_available: u16,
    published: u16,
    /// The next element to take from the used ring.
    next_used: u16,
    /// The used index as it was last seen.
    seen_used: u16,
}

impl Ring {
    /// A ring over zeroed parts; `event_idx` as negotiated.
    pub fn new(parts: RingParts, event_idx: bool) -> Self {
        debug_assert!(parts.size.is_power_of_two() && parts.size <= 32768);
        Self { parts, event_idx, next_available: 0, published: 0, next_used: 0, seen_used: 0 }
    }

    /// The memory.
    pub fn parts(&self) -> &RingParts {
        &self.parts
    }

    /// Descriptors.
    pub fn size(&self) -> u16 {
        self.parts.size
    }

    /// Chains that were made available and not used yet.
    pub fn outstanding(&self) -> u16 {
        self.next_available.wrapping_sub(self.next_used)
    }

    /// Makes the chain at `head` available; the device sees it after [`Ring::publish`].
    pub fn push(&mut self, head: u16) {
        self.parts.set_available(self.next_available, head);
        self.next_available = self.next_available.wrapping_add(1);
    }

    /// Shows the device what was pushed; true when it wants a kick for that.
    pub fn publish(&mut self) -> bool {
        let old = self.published;
        if old == self.next_available {
            return false;
        }
        self.published = self.next_available;
        self.parts.set_available_index(self.published);
        // The index must be visible before we look whether somebody watches for it (2.7.13.4.1).
        fence(Ordering::SeqCst);
        match self.event_idx {
            true => passes(self.parts.available_event(), self.published, old),
            false => self.parts.used_flags() & USED_NO_NOTIFY == 0,
        }
    }

    /// True when the device has used something that was not taken yet.
    pub fn has_used(&mut self) -> bool {
        if self.seen_used == self.next_used {
            self.seen_used = self.parts.used_index();
        }
        self.seen_used != self.next_used
    }

    /// Takes the next used element.
    ///
    /// # Errors
    /// `Protocol` when the used index is past what was made available.
    pub fn pop(&mut self) -> Result<Option<Used>> {
        if !self.has_used() {
            return Ok(None);
        }
        let ahead = self.seen_used.wrapping_sub(self.next_used);
        if ahead > self.published.wrapping_sub(self.next_used) {
            return Err(broken(format!("the used index {} is past all that was made available", self.seen_used)));
        }
        let used = self.parts.used(self.next_used);
        self.next_used = self.next_used.wrapping_add(1);
        Ok(Some(used))
    }

    /// Asks for a call at the next used element; false when there is one already, so that nobody may sleep.
    pub fn arm(&mut self) -> bool {
        match self.event_idx {
            true => self.parts.set_used_event(self.next_used),
            false => self.parts.set_available_flags(0),
        }
        // The wish must be visible before we look for the last time.
        fence(Ordering::SeqCst);
        !self.has_used()
    }

    /// Asks for no calls for a while. With EVENT_IDX this needs nothing: each wish for a call counts once.
    pub fn disarm(&self) {
        if !self.event_idx {
            self.parts.set_available_flags(AVAIL_NO_INTERRUPT);
        }
    }
}

/// True when an index that went from `old` to `new` has passed `event` (2.7.7.1).
fn passes(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring over plain memory.
    fn ring(size: u16, event_idx: bool) -> Ring {
        let [descriptors, available, used] = RingParts::lengths(size).map(Segment::zeroed);
        Ring::new(RingParts { descriptors: DescriptorTable(descriptors), available, used, size }, event_idx)
    }

    /// A device that uses chains in turn.
    struct Device {
        parts: RingParts,
        available: u16,
        used: u16,
    }

    impl Device {
        fn new(ring: &Ring) -> Self {
            Self { parts: ring.parts().clone(), available: 0, used: 0 }
        }

        fn use_element(&mut self, id: u32, len_bytes: u32) {
            let at = 4 + 8 * self.parts.slot(self.used);
            self.parts.used.store_u32(at, id.to_le(), Ordering::Relaxed);
            self.parts.used.store_u32(at + 4, len_bytes.to_le(), Ordering::Relaxed);
            self.used = self.used.wrapping_add(1);
            self.parts.used.store_u16(2, self.used.to_le(), Ordering::Release);
        }

        fn answer_all(&mut self) -> usize {
            let new = self.parts.available_index().wrapping_sub(self.available);
            for _ in 0..new {
                let at = 4 + 2 * self.parts.slot(self.available);
                let head = u16::from_le(self.parts.available.load_u16(at, Ordering::Relaxed));
                self.available = self.available.wrapping_add(1);
                self.use_element(u32::from(head), u32::from(self.available));
            }
            usize::from(new)
        }

        fn want_kick_at(&self, index: u16) {
            let at = 4 + 8 * usize::from(self.parts.size);
            self.parts.used.store_u16(at, index.to_le(), Ordering::Relaxed);
        }
    }

    #[test]
    fn descriptors_read_back_and_lie_as_specified() {
        let table = DescriptorTable(Segment::zeroed(64));
        let descriptor = Descriptor { address: 0x1122_3344_5566_7788, len_bytes: 0x99aa_bbcc, flags: 3, next: 0x0201 };
        table.set(2, descriptor);
        assert_eq!(table.get(2), descriptor);
        let bytes = table.0.read_array::<16>(32);
        assert_eq!(bytes, [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0xcc, 0xbb, 0xaa, 0x99, 3, 0, 1, 2]);
    }

    #[test]
    fn heads_come_back_in_turn_while_the_indices_wrap() {
        let mut ring = ring(8, true);
        let mut device = Device::new(&ring);
        let mut head = 0;
        // More than 65536 chains, five at a time, so that indices wrap inside a batch.
        for round in 0..15_000u32 {
            let heads: Vec<u16> = (0..5).map(|i| (head + i) % 8).collect();
            heads.iter().for_each(|head| ring.push(*head));
            assert_eq!(ring.outstanding(), 5);
            ring.publish();
            assert_eq!(device.answer_all(), 5);
            let back: Vec<u32> = (0..5).map(|_| ring.pop().unwrap().unwrap().id).collect();
            assert_eq!(back, heads.iter().map(|head| u32::from(*head)).collect::<Vec<_>>(), "round {round}");
            assert_eq!(ring.pop().unwrap(), None);
            head = (head + 5) % 8;
        }
    }

    #[test]
    fn nothing_is_seen_before_it_is_published() {
        let mut ring = ring(4, false);
        let mut device = Device::new(&ring);
        ring.push(3);
        assert_eq!(device.answer_all(), 0);
        assert!(ring.publish());
        assert_eq!(device.answer_all(), 1);
        assert_eq!(ring.pop().unwrap(), Some(Used { id: 3, len_bytes: 1 }));
    }

    #[test]
    fn an_event_is_passed_once_also_over_the_wrap() {
        assert!(passes(4, 5, 4) && passes(4, 9, 4) && passes(4, 9, 2));
        assert!(!passes(4, 4, 2) && !passes(4, 9, 5) && !passes(4, 5, 5));
        assert!(passes(u16::MAX, 0, u16::MAX) && passes(0, 1, 65_530) && !passes(1, 1, 65_530));
    }

    #[test]
    fn kicks_follow_the_available_event() {
        let mut ring = ring(8, true);
        let device = Device::new(&ring);
        let push = |ring: &mut Ring, count| {
            (0..count).for_each(|i| ring.push(i));
            ring.publish()
        };
        assert!(push(&mut ring, 1));
        assert!(!push(&mut ring, 2));
        device.want_kick_at(4);
        assert!(!push(&mut ring, 1));
        assert!(push(&mut ring, 2));
        assert!(!ring.publish(), "nothing new");
    }

    #[test]
    fn kicks_follow_the_flag_without_event_idx() {
        let mut ring = ring(8, false);
        ring.push(0);
        assert!(ring.publish());
        ring.parts().used.store_u16(0, 1u16.to_le(), Ordering::Relaxed);
        ring.push(1);
        assert!(!ring.publish());
    }

    #[test]
    fn who_wants_to_sleep_is_told_of_what_came_meanwhile() {
        for event_idx in [false, true] {
            let mut ring = ring(8, event_idx);
            let mut device = Device::new(&ring);
            ring.push(0);
            ring.publish();
            assert!(ring.arm());
            device.answer_all();
            assert!(!ring.arm());
            ring.pop().unwrap().unwrap();
            assert!(ring.arm());
            let wish = u16::from_le(ring.parts().available.load_u16(4 + 16, Ordering::Relaxed));
            assert_eq!(wish, if event_idx { 1 } else { 0 });
        }
    }

    #[test]
    fn a_used_index_that_runs_ahead_is_an_error() {
        let mut ring = ring(8, true);
        let mut device = Device::new(&ring);
        ring.push(1);
        ring.publish();
        device.use_element(1, 0);
        device.use_element(2, 0);
        assert!(ring.pop().is_err());
    }
}
