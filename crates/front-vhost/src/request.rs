//! [`Parser`]: reads a descriptor chain as a request of a block device.
//!
//! Virtual I/O Device Version 1.2, section 5.2.6: a request has a header of 16 bytes that the device reads, data, and
//! one status byte that the device writes. How these are cut into descriptors has no meaning (2.7.4.1). A chain that
//! breaks the rules of rings (2.7.5) breaks the ring. A chain that keeps them, but whose request makes no sense, is
//! answered with an error.

use smallvec::SmallVec;
use spile_core::metrics::Op;
use spile_core::metrics::span::Span;
use spile_core::{GuestOffset, MAX_REQUEST_BYTES, SECTOR_BYTES, Segments};

use crate::memory::GuestMemory;
use crate::ring::{Broken, Descriptor, Ring};

/// The bytes of a request's header: type, reserved, sector.
const HEADER_BYTES: u64 = 16;
/// The most descriptors in one chain, even when the table is larger (the kernel's and QEMU's limit).
const MAX_CHAIN: usize = 1024;
/// The most segments of one request's data. There may be more of them than descriptors: one descriptor may cover
/// several small regions.
const MAX_SEGMENTS: usize = 2 * MAX_CHAIN;
/// A request that is used again keeps room for so many segments.
const KEPT_SEGMENTS: usize = 256;

/// What a request asks for (section 5.2.6, VIRTIO_BLK_T_*).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Command {
    /// Read sectors (IN).
    #[default]
    Read,
    /// Write sectors (OUT).
    Write,
    /// Make acknowledged writes durable (FLUSH).
    Flush,
    /// Tell the disk's serial number (GET_ID).
    GetId,
    /// Free ranges (DISCARD).
    Discard,
    /// Write zeroes to ranges (WRITE_ZEROES).
    WriteZeroes,
    /// A type that is not known here.
    Unknown(u32),
}

impl Command {
    /// The kind under which the request is counted.
    pub fn op(self) -> Op {
        match self {
            Self::Read => Op::Read,
            Self::Write => Op::Write,
            Self::Flush => Op::Flush,
            Self::Discard => Op::Discard,
            Self::WriteZeroes => Op::WriteZeroes,
            Self::GetId | Self::Unknown(_) => Op::Other,
        }
    }
}

impl From<u32> for Command {
    fn from(number: u32) -> Self {
        match number {
            0 => Self::Read,
            1 => Self::Write,
            4 => Self::Flush,
            8 => Self::GetId,
            11 => Self::Discard,
            13 => Self::WriteZeroes,
            other => Self::Unknown(other),
        }
    }
}

/// One request. A slot uses it again for its next request, so its lists keep their room.
#[derive(Debug, Default)]
pub struct Request {
    /// The head of its chain, which goes into the used ring.
    pub head: u16,
    /// What it asks for.
    pub command: Command,
    /// The offset of a read or write on the disk; `None` when the offset of its sector overflows.
    pub offset: Option<GuestOffset>,
    /// The guest's memory that the device reads (without the header), or, for a read and GET_ID, that it writes
    /// (without the status).
    pub data: Segments,
    /// The address of the status byte in the guest's memory.
    pub status_addr: u64,
    /// The parts of the guest's memory that the device writes, without the status. They are for the log of dirty pages.
    pub written: SmallVec<[(u64, u32); 2]>,
    /// False when data or header lie outside the guest's memory.
    pub is_sound: bool,
    /// When it was taken from the ring, in nanoseconds of CLOCK_MONOTONIC.
    pub begun_ns: u64,
    /// Its moments.
    pub span: Option<&'static Span>,
}

impl Request {
    /// Drops the references to the guest's memory, which an idle slot must not keep, and the room that only unusual
    /// requests need.
    pub fn clear(&mut self) {
        if self.data.as_slice().len() > KEPT_SEGMENTS {
            self.data = Segments::new();
        }
        self.data.clear();
        if self.written.len() > KEPT_SEGMENTS {
            self.written = SmallVec::new();
        }
        self.written.clear();
    }
}

/// Reads chains. It keeps the room of its lists from one chain to the next.
#[derive(Default)]
pub struct Parser {
    /// The chain's memory: address and length in bytes of each part. What the device reads comes first.
    parts: Vec<(u64, u32)>,
    /// The first part with data: those before it hold the header.
    data_from: usize,
    /// The first part that the device writes.
    writable_from: usize,
    /// True when indirect descriptors have been agreed on.
    pub has_indirect: bool,
    /// True when the parts that the device writes are to be listed.
    pub is_logged: bool,
}

impl Parser {
    /// A parser for a queue's features.
    pub fn new(has_indirect: bool, is_logged: bool) -> Self {
        Self { has_indirect, is_logged, ..Self::default() }
    }

    /// Reads the chain at `head` into `request`, which is cleared.
    ///
    /// # Errors
    /// When it breaks the rules of rings, or there is no byte where its status could go.
    pub fn parse(&mut self, ring: &Ring, memory: &GuestMemory, head: u16, request: &mut Request) -> Result<(), Broken> {
        debug_assert!(request.data.is_empty() && request.written.is_empty());
        self.collect(ring, memory, head)?;
        (request.head, request.status_addr) = (head, self.take_status(memory)?);
        let header = self.take_header(memory);
        let [number, _, low, high] = header.unwrap_or_default();
        request.command = Command::from(number);
        let sector = u64::from(high) << 32 | u64::from(low);
        request.offset = sector.checked_mul(SECTOR_BYTES).map(GuestOffset);
        let reads_disk = matches!(request.command, Command::Read | Command::GetId);
        let writable = &self.parts[self.writable_from..];
        let list = if reads_disk { writable } else { &self.parts[self.data_from..self.writable_from] };
        let has_data = list.iter().all(|(addr, len)| {
            memory.append(*addr, u64::from(*len), &mut request.data) && request.data.as_slice().len() <= MAX_SEGMENTS
        });
        request.is_sound = header.is_some() && has_data;
        // A request that is refused unread writes nothing. It may claim any length.
        let writes = request.is_sound && reads_disk && request.data.len() as u64 <= MAX_REQUEST_BYTES;
        if self.is_logged && writes {
            request.written.extend_from_slice(writable);
        }
        Ok(())
    }

    /// Lists the memory that the chain's descriptors describe.
    #[inline]
    fn collect(&mut self, ring: &Ring, memory: &GuestMemory, head: u16) -> Result<(), Broken> {
        self.parts.clear();
        self.writable_from = 0;
        let mut index = head;
        for _ in 0..ring.size() {
            if index >= ring.size() {
                return Err(Broken("a descriptor's next one is outside the table"));
            }
            let descriptor = ring.descriptor(index);
            if descriptor.flags & Descriptor::INDIRECT != 0 {
                return self.collect_indirect(memory, &descriptor);
            }
            self.add(&descriptor)?;
            if descriptor.flags & Descriptor::NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
        }
        Err(Broken("a descriptor chain has more links than the ring: a circle"))
    }

    /// Lists the memory that an indirect table describes (section 2.7.5.3). Such a table ends its chain.
    fn collect_indirect(&mut self, memory: &GuestMemory, table: &Descriptor) -> Result<(), Broken> {
        let count = table.len / 16;
        if !self.has_indirect {
            return Err(Broken("an indirect descriptor that was not agreed on"));
        }
        if table.flags & Descriptor::NEXT != 0 || !table.len.is_multiple_of(16) || count == 0 {
            return Err(Broken("an indirect descriptor with a next one, or of an odd length"));
        }
        let Some((region, start)) = memory.region_of(table.addr, table.len as usize) else {
            return Err(Broken("an indirect table lies outside the guest's memory"));
        };
        let mut index = 0;
        for _ in 0..count.min(u32::from(u16::MAX) + 1) {
            if u32::from(index) >= count {
                return Err(Broken("a descriptor's next one is outside its indirect table"));
            }
            let descriptor = Descriptor::decode(region.read_array(start + 16 * usize::from(index)));
            if descriptor.flags & Descriptor::INDIRECT != 0 {
                return Err(Broken("an indirect descriptor in an indirect table"));
            }
            self.add(&descriptor)?;
            if descriptor.flags & Descriptor::NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
        }
        Err(Broken("an indirect table's chain has more links than the table: a circle"))
    }

    #[inline]
    fn add(&mut self, descriptor: &Descriptor) -> Result<(), Broken> {
        let is_writable = descriptor.flags & Descriptor::WRITE != 0;
        if descriptor.len == 0 {
            return Err(Broken("a descriptor of no bytes"));
        }
        if !is_writable && self.writable_from < self.parts.len() {
            return Err(Broken("a descriptor to read behind one to write"));
        }
        if self.parts.len() >= MAX_CHAIN {
            return Err(Broken("a chain of more than 1024 descriptors"));
        }
        self.parts.push((descriptor.addr, descriptor.len));
        self.writable_from += usize::from(!is_writable);
        Ok(())
    }

    /// Takes the status byte off the end of the writable memory.
    fn take_status(&mut self, memory: &GuestMemory) -> Result<u64, Broken> {
        let Some((addr, len)) = self.parts[self.writable_from..].last_mut() else {
            return Err(Broken("a chain without a byte for its status"));
        };
        *len -= 1;
        let status_addr = addr.checked_add(u64::from(*len)).ok_or(Broken("a descriptor's end overflows"))?;
        if *len == 0 {
            self.parts.pop();
        }
        match memory.has(status_addr) {
            true => Ok(status_addr),
            false => Err(Broken("a chain's status byte lies outside the guest's memory")),
        }
    }

    /// Takes the header, four numbers, off the start of the readable memory.
    fn take_header(&mut self, memory: &GuestMemory) -> Option<[u32; 4]> {
        self.data_from = 0;
        let readable = &mut self.parts[..self.writable_from];
        let (addr, len) = readable.first().copied()?;
        let bytes = match u64::from(len) >= HEADER_BYTES {
            true => memory.read::<{ HEADER_BYTES as usize }>(addr)?,
            false => read_split_header(readable, memory)?,
        };
        let mut left = HEADER_BYTES as u32;
        while let Some((addr, len)) = readable.get_mut(self.data_from).filter(|_| left > 0) {
            let taken = left.min(*len);
            (*addr, *len, left) = (*addr + u64::from(taken), *len - taken, left - taken);
            self.data_from += usize::from(*len == 0);
        }
        let (numbers, _) = bytes.as_chunks::<4>();
        Some(std::array::from_fn(|at| u32::from_le_bytes(numbers[at])))
    }
}

fn read_split_header(readable: &[(u64, u32)], memory: &GuestMemory) -> Option<[u8; HEADER_BYTES as usize]> {
    let (mut bytes, mut list) = ([0; HEADER_BYTES as usize], Segments::new());
    for (addr, len) in readable {
        let left = HEADER_BYTES - list.len() as u64;
        memory.append(*addr, left.min(u64::from(*len)), &mut list).then_some(())?;
        if list.len() as u64 == HEADER_BYTES {
            list.copy_to_slice(0, &mut bytes);
            return Some(bytes);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::tests::memory;
    use crate::ring::tests::Driver;

    const W: u16 = Descriptor::WRITE;

    struct Guest {
        driver: Driver,
        memory: GuestMemory,
        parser: Parser,
    }

    impl Guest {
        fn new() -> Self {
            let parser = Parser::new(true, true);
            Self { driver: Driver::new(8), memory: memory(&[0x1000, 0x2000, 0x4000], 0x1000), parser }
        }

        fn header(&self, at: u64, number: u32, sector: u64) {
            let bytes = self.memory.contiguous(at, 16).unwrap();
            bytes.copy_from_slice(0, &number.to_le_bytes());
            bytes.copy_from_slice(8, &sector.to_le_bytes());
        }

        /// Describes a chain that begins at 0.
        fn chain(&self, parts: &[(u64, u32, u16)]) {
            for (index, (addr, len, flags)) in parts.iter().enumerate() {
                let has_next = index + 1 < parts.len();
                let flags = flags | if has_next { Descriptor::NEXT } else { 0 };
                self.driver.describe(index as u16, *addr, *len, flags, index as u16 + 1);
            }
        }

        fn parse(&mut self) -> Result<Request, Broken> {
            let mut request = Request::default();
            self.parser.parse(&self.driver.ring(true, 0), &self.memory, 0, &mut request).map(|()| request)
        }
    }

    #[test]
    fn a_read_has_its_data_behind_the_header() {
        let mut guest = Guest::new();
        guest.header(0x1000, 0, 7);
        guest.chain(&[(0x1000, 16, 0), (0x2000, 4096, W), (0x1100, 1, W)]);
        let request = guest.parse().unwrap();
        assert_eq!((request.command, request.offset), (Command::Read, Some(GuestOffset(3584))));
        assert_eq!((request.data.len(), request.status_addr, request.is_sound), (4096, 0x1100, true));
        assert_eq!(request.written.as_slice(), [(0x2000, 4096)]);
    }

    #[test]
    fn the_cuts_between_descriptors_mean_nothing() {
        let mut guest = Guest::new();
        guest.header(0x1000, 1, 1);
        // The header in three parts, the last with data behind it; data and status in one.
        guest.chain(&[(0x1000, 3, 0), (0x1003, 5, 0), (0x1008, 8 + 512, 0), (0x2000, 10, W)]);
        let request = guest.parse().unwrap();
        assert_eq!((request.command, request.offset), (Command::Write, Some(GuestOffset(512))));
        assert_eq!((request.data.len(), request.status_addr), (512, 0x2009));
        assert_eq!(request.data.as_slice()[0].as_ptr(), guest.memory.contiguous(0x1010, 1).unwrap().as_ptr());
    }

    #[test]
    fn data_may_go_on_into_the_next_region_but_not_into_a_hole() {
        let mut guest = Guest::new();
        guest.header(0x1000, 0, 0);
        guest.chain(&[(0x1000, 16, 0), (0x1800, 0x1000, W), (0x4000, 1, W)]);
        assert!(guest.parse().unwrap().is_sound);
        guest.chain(&[(0x1000, 16, 0), (0x2800, 0x1000, W), (0x4000, 1, W)]);
        assert!(!guest.parse().unwrap().is_sound);
        guest.chain(&[(0x3ff8, 16, 0), (0x4000, 1, W)]);
        assert!(!guest.parse().unwrap().is_sound);
        guest.chain(&[(0x1000, 8, 0), (0x4000, 1, W)]);
        assert!(!guest.parse().unwrap().is_sound, "half a header");
    }

    #[test]
    fn indirect_tables_are_followed() {
        let mut guest = Guest::new();
        guest.header(0x1000, 4, 0);
        let table = guest.memory.contiguous(0x2000, 48).unwrap();
        let entry = |at: usize, addr: u64, len: u32, flags: u16, next: u16| {
            table.copy_from_slice(16 * at, &addr.to_le_bytes());
            table.copy_from_slice(16 * at + 8, &len.to_le_bytes());
            table.copy_from_slice(16 * at + 12, &flags.to_le_bytes());
            table.copy_from_slice(16 * at + 14, &next.to_le_bytes());
        };
        entry(0, 0x1000, 16, Descriptor::NEXT, 2);
        entry(2, 0x1200, 1, W, 0);
        guest.chain(&[(0x2000, 48, Descriptor::INDIRECT)]);
        let request = guest.parse().unwrap();
        assert_eq!((request.command, request.status_addr), (Command::Flush, 0x1200));
        entry(2, 0x2000, 48, Descriptor::INDIRECT, 0);
        assert!(guest.parse().is_err(), "indirect in indirect");
        entry(2, 0x1200, 1, W | Descriptor::NEXT, 0);
        assert!(guest.parse().is_err(), "a circle");
        entry(2, 0x1200, 1, W | Descriptor::NEXT, 3);
        assert!(guest.parse().is_err(), "outside its table");
        for (addr, len, more) in [(0x2000, 47, 0), (0x2000, 0, 0), (0x2ff0, 48, 0), (0x2000, 48, Descriptor::NEXT)] {
            guest.driver.describe(0, addr, len, Descriptor::INDIRECT | more, 1);
            assert!(guest.parse().is_err(), "{addr:x} {len} {more}");
        }
        guest.driver.describe(0, 0x2000, 48, Descriptor::INDIRECT, 0);
        entry(2, 0x1200, 1, W, 0);
        assert!(guest.parse().is_ok());
        guest.parser.has_indirect = false;
        assert!(guest.parse().is_err(), "not agreed on");
    }

    #[test]
    fn broken_chains_break_the_ring() {
        let mut guest = Guest::new();
        guest.header(0x1000, 0, 0);
        guest.driver.describe(0, 0x1000, 16, Descriptor::NEXT, 0);
        assert!(guest.parse().is_err(), "a circle");
        guest.driver.describe(0, 0x1000, 16, Descriptor::NEXT, 8);
        assert!(guest.parse().is_err(), "outside the table");
        for parts in [
            &[(0x1000, 16, 0)][..],
            &[(0x1000, 16, 0), (0x2000, 0, W), (0x2000, 1, W)],
            &[(0x1000, 16, W), (0x2000, 16, 0)],
            &[(0x1000, 16, 0), (0x3000, 1, W)],
            &[(0x1000, 16, 0), (u64::MAX, 2, W)],
        ] {
            guest.chain(parts);
            assert!(guest.parse().is_err(), "{parts:x?}");
        }
    }

    #[test]
    fn a_sector_that_overflows_is_no_offset() {
        let mut guest = Guest::new();
        guest.header(0x1000, 0, u64::MAX);
        guest.chain(&[(0x1000, 16, 0), (0x2000, 513, W)]);
        let request = guest.parse().unwrap();
        assert_eq!((request.offset, request.data.len()), (None, 512));
    }
}
