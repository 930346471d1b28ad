//! A front end with its guest: it sets up as it should, and then writes into messages and rings what a test wants.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use spile_core::{ErrorKind, Result};
use spile_lab::vhost::proto::{InflightPayload, Request, VringAddresses, feature, protocol_feature};
use spile_lab::vhost::{
    Area, Connection, Descriptor, DescriptorTable, GuestMemory, MemoryOptions, Region, RingParts, Used,
};

use super::{PATIENCE, until};

/// Types of requests.
pub const READ: u32 = 0;
pub const WRITE: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

/// Statuses.
pub const OK: u8 = 0;
pub const IOERR: u8 = 1;
pub const UNSUPP: u8 = 2;
/// What the status holds before the device writes it.
pub const NONE: u8 = 0xee;

/// Flags of descriptors.
pub const R: u16 = 0;
pub const W: u16 = Descriptor::WRITE;
pub const INDIRECT: u16 = Descriptor::INDIRECT;
pub const NEXT: u16 = Descriptor::NEXT;

/// One buffer of a chain: guest address, length, flags.
pub type Part = (u64, u32, u16);

/// How a guest sets itself up.
#[derive(Clone, Copy)]
pub struct Options {
    pub queues: u16,
    pub ring_size: u16,
    /// Of what the server offers, this is taken.
    pub features: u64,
    pub protocol: u64,
    pub memory: MemoryOptions,
    /// The region of requests in flight is asked for.
    pub inflight: bool,
    /// Where the rings begin.
    pub base: u16,
}

impl Default for Options {
    /// Two queues of 16, all features but the dirty log, two regions of 1 MiB that touch each other.
    fn default() -> Self {
        Self {
            queues: 2,
            ring_size: 16,
            features: !feature::LOG_ALL,
            protocol: u64::MAX,
            memory: MemoryOptions { regions: 2, ..MemoryOptions::new(2 << 20) },
            inflight: false,
            base: 0,
        }
    }
}

/// One queue, from the driver's side.
pub struct Ring {
    pub parts: RingParts,
    pub areas: [Area; 3],
    pub kick: OwnedFd,
    pub call: OwnedFd,
    pub err: OwnedFd,
    /// The next free place of the available ring; those before are shown by [`Ring::publish`].
    pub next_avail: u16,
    /// The next element of the used ring to be taken.
    pub next_used: u16,
    /// The next descriptor to be taken by a chain.
    pub next_desc: u16,
}

/// A request on its way.
#[derive(Clone)]
pub struct Asked {
    pub head: u16,
    pub status: Area,
}

impl Asked {
    pub fn status(&self) -> u8 {
        self.status.bytes.load_u8(0, Ordering::Acquire)
    }
}

pub fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

pub fn ring_event(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// How often it was rung since the last look.
pub fn rings(event: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(event, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}

/// Waits until `fd` is readable, at most so long.
pub fn is_readable(fd: impl AsFd, timeout: Duration) -> bool {
    let timeout = Timespec::try_from(timeout).unwrap();
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).unwrap() > 0
}

impl Ring {
    pub fn new(areas: [Area; 3], size: u16, base: u16) -> Self {
        let [descriptors, available, used] = areas.clone().map(|area| area.bytes);
        let parts = RingParts { descriptors: DescriptorTable(descriptors), available, used, size };
        let ring = Self {
            parts,
            areas,
            kick: event(),
            call: event(),
            err: event(),
            next_avail: base,
            next_used: base,
            next_desc: 0,
        };
        ring.set_indices();
        ring
    }

    fn set_indices(&self) {
        self.parts.set_available_index(self.next_avail);
        self.set_used_index(self.next_used);
        self.parts.set_used_event(self.next_used);
    }

    /// Scribbles on what only the device may write.
    pub fn set_used_index(&self, index: u16) {
        self.parts.used.store_u16(2, index, Ordering::Release);
    }

    /// As new.
    pub fn clear(&mut self) {
        self.areas.iter().for_each(|area| area.bytes.fill(0));
        (self.next_avail, self.next_used, self.next_desc) = (0, 0, 0);
    }

    /// Links `parts` to a chain of the next descriptors; its head.
    pub fn chain(&mut self, parts: &[Part]) -> u16 {
        let size = self.parts.size;
        let index = |at: usize| self.next_desc.wrapping_add(at as u16) % size;
        for (at, (address, len_bytes, flags)) in parts.iter().copied().enumerate() {
            let flags = flags | if at + 1 < parts.len() { NEXT } else { 0 };
            let descriptor = Descriptor { address, len_bytes, flags, next: index(at + 1) };
            self.parts.descriptors.set(index(at).into(), descriptor);
        }
        let head = index(0);
        self.next_desc = index(parts.len());
        head
    }

    /// Makes a chain available; [`Ring::publish`] shows it.
    pub fn offer(&mut self, head: u16) {
        self.parts.set_available(self.next_avail, head);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    pub fn publish(&self) {
        self.parts.set_available_index(self.next_avail);
    }

    pub fn kick(&self) {
        ring_event(&self.kick);
    }

    pub fn publish_and_kick(&self) {
        self.publish();
        self.kick();
    }

    /// What was used and not taken.
    pub fn used(&self) -> u16 {
        self.parts.used_index().wrapping_sub(self.next_used)
    }

    /// Waits for the next used element.
    pub fn take(&mut self) -> Used {
        until("an answer", || self.used() > 0);
        let used = self.parts.used(self.next_used);
        self.next_used = self.next_used.wrapping_add(1);
        used
    }

    /// Waits for that many; their heads.
    pub fn take_ids(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.take().id).collect()
    }

    /// The queue was stopped by the server, which rang the error event.
    pub fn assert_broken(&self) {
        assert!(is_readable(&self.err, PATIENCE), "the ring should be broken");
        rings(&self.err);
    }
}

/// See the module.
pub struct Guest {
    pub connection: Connection,
    pub memory: GuestMemory,
    pub rings: Vec<Ring>,
    pub features: u64,
    pub options: Options,
    pub inflight: Option<(InflightPayload, OwnedFd)>,
}

/// Connects and agrees on features.
pub fn negotiate(path: &Path, options: &Options) -> (Connection, u64) {
    let mut connection = Connection::connect(path).unwrap();
    connection.socket().set_patience(PATIENCE).unwrap();
    connection.set_owner().unwrap();
    let features = connection.features().unwrap() & options.features;
    let protocol = connection.offered_protocol_features().unwrap() & options.protocol;
    connection.set_protocol_features(protocol).unwrap();
    connection.set_features(features).unwrap();
    (connection, features)
}

impl Guest {
    /// A guest as [`Options::default`] has it, with its queues at work.
    pub fn connect(path: &Path) -> Self {
        Self::with(path, Options::default())
    }

    pub fn with(path: &Path, options: Options) -> Self {
        let mut guest = Self::negotiated(path, options);
        guest.set_up();
        guest
    }

    /// Only negotiated; it has its memory, but has not shown it.
    pub fn negotiated(path: &Path, options: Options) -> Self {
        let (connection, features) = negotiate(path, &options);
        let mut memory = GuestMemory::new(&options.memory).unwrap();
        let take =
            |memory: &mut GuestMemory| RingParts::lengths(options.ring_size).map(|len| memory.take(len, 4096).unwrap());
        let rings = (0..options.queues).map(|_| Ring::new(take(&mut memory), options.ring_size, options.base));
        let rings = rings.collect();
        Self { connection, memory, rings, features, options, inflight: None }
    }

    /// Shows memory and rings, and starts these.
    pub fn set_up(&mut self) {
        self.share_memory().unwrap();
        if self.options.inflight {
            let (payload, fd) = self.connection.inflight(self.options.queues, self.options.ring_size).unwrap();
            self.connection.set_inflight(payload, fd.as_fd()).unwrap();
            self.inflight = Some((payload, fd));
        }
        let base = self.options.base;
        (0..self.rings.len()).for_each(|index| self.set_up_ring(index, base).unwrap());
    }

    pub fn share_memory(&self) -> Result<()> {
        let regions: Vec<_> = self.memory.regions().iter().map(Region::payload).collect();
        self.connection.set_memory_table(&regions, &vec![self.memory.file(); regions.len()])
    }

    /// The addresses of a ring.
    pub fn addresses(&self, index: usize) -> VringAddresses {
        let [descriptors, available, used] = &self.rings[index].areas;
        VringAddresses {
            index: index as u32,
            flags: 0,
            descriptors: descriptors.user_address(),
            used: used.user_address(),
            available: available.user_address(),
            log: used.address,
        }
    }

    /// Describes a ring and enables it.
    pub fn set_up_ring(&self, index: usize, base: u16) -> Result<()> {
        let (connection, ring) = (&self.connection, &self.rings[index]);
        connection.set_vring_size(index as u32, ring.parts.size.into())?;
        connection.set_vring_base(index as u32, base)?;
        connection.set_vring_addresses(self.addresses(index))?;
        for (request, fd) in self.events(index) {
            connection.set_vring_fd(request, index as u8, fd)?;
        }
        connection.enable_vring(index as u32, true)
    }

    fn events(&self, index: usize) -> [(Request, BorrowedFd<'_>); 3] {
        let ring = &self.rings[index];
        [
            (Request::SetVringKick, ring.kick.as_fd()),
            (Request::SetVringCall, ring.call.as_fd()),
            (Request::SetVringErr, ring.err.as_fd()),
        ]
    }

    /// What a driver does to a ring that is broken: all from the start.
    pub fn reset_ring(&mut self, index: usize) {
        self.connection.stop_vring(index as u32).unwrap();
        self.rings[index].clear();
        self.set_up_ring(index, 0).unwrap();
    }

    /// Fresh memory of the guest.
    pub fn take(&mut self, len: usize) -> Area {
        self.memory.take(len, 16).unwrap()
    }

    pub fn header(&mut self, kind: u32, sector: u64) -> Part {
        let area = self.take(16);
        area.bytes.copy_from_slice(0, &kind.to_le_bytes());
        area.bytes.copy_from_slice(8, &sector.to_le_bytes());
        (area.address, 16, R)
    }

    pub fn status(&mut self) -> Area {
        let area = self.take(1);
        area.bytes.fill(NONE);
        area
    }

    /// Makes a request available, with `data` between header and status, and does not publish it.
    pub fn offer(&mut self, ring: usize, kind: u32, sector: u64, data: &[Part]) -> Asked {
        let (header, status) = (self.header(kind, sector), self.status());
        let parts = [&[header], data, &[(status.address, 1, W)]].concat();
        let head = self.rings[ring].chain(&parts);
        self.rings[ring].offer(head);
        Asked { head, status }
    }

    /// [`Guest::offer`], and shows it to the server.
    pub fn ask(&mut self, ring: usize, kind: u32, sector: u64, data: &[Part]) -> Asked {
        let asked = self.offer(ring, kind, sector, data);
        self.rings[ring].publish_and_kick();
        asked
    }

    /// [`Guest::ask`], and waits; the status and the length in the used ring.
    pub fn run(&mut self, ring: usize, kind: u32, sector: u64, data: &[Part]) -> (u8, u32) {
        let asked = self.ask(ring, kind, sector, data);
        let used = self.rings[ring].take();
        assert_eq!(used.id, u32::from(asked.head));
        (asked.status(), used.len_bytes)
    }

    pub fn write(&mut self, ring: usize, sector: u64, bytes: &[u8]) -> u8 {
        let area = self.take(bytes.len());
        area.bytes.copy_from_slice(0, bytes);
        self.run(ring, WRITE, sector, &[(area.address, bytes.len() as u32, R)]).0
    }

    /// Bytes that were read; the status must be good.
    pub fn read(&mut self, ring: usize, sector: u64, len: usize) -> Vec<u8> {
        let area = self.take(len);
        let answer = self.run(ring, READ, sector, &[(area.address, len as u32, W)]);
        assert_eq!(answer, (OK, len as u32 + 1));
        area.bytes.to_vec()
    }

    /// The queue takes a write and a read.
    pub fn assert_works(&mut self, ring: usize) {
        static STAMP: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(1);
        let stamp = [STAMP.fetch_add(1, Ordering::Relaxed); 512];
        // Each ring has a place of its own: what is left over in another must not get into its way.
        let sector = 7 + ring as u64;
        assert_eq!(self.write(ring, sector, &stamp), OK);
        assert!(self.read(ring, sector, 512) == stamp, "not what was written");
    }
}

/// The server answered that it refuses, and stays connected.
pub fn assert_refused<T: std::fmt::Debug>(what: &str, result: Result<T>) {
    let error = result.expect_err(what);
    assert_eq!(error.kind(), ErrorKind::Protocol, "{what}: {error}");
}

/// The server ends the connection.
pub fn assert_hung_up(what: &str, connection: &Connection) {
    let error = connection.socket().receive().expect_err(what);
    assert_eq!(error.kind(), ErrorKind::Io, "{what}: {error}");
}

/// The negotiated protocol features, for a guest that wants no answers to its messages.
pub const WITHOUT_ACK: u64 = !protocol_feature::REPLY_ACK;
