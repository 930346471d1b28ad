//! Functions for the fuzz targets: they feed hostile bytes to the parsers and check the bounds that these promise.
//!
//! The server as a whole has its own fuzz target, which needs nothing from here.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use spile_core::Segment;

use crate::inflight::InflightRegion;
use crate::memory::{GuestMemory, Region};
use crate::request::{Parser, Request};
use crate::ring::{MAX_QUEUE_SIZE, Parts, Ring, available_bytes, descriptors_bytes, used_bytes};
use crate::wire::{HEADER_BYTES, Header, MAX_PAYLOAD_BYTES, MAX_TABLE_REGIONS, Message, RegionInfo, config_fits};

/// Reads a stream of messages, each after a byte that says how many descriptors came with it.
pub fn messages(mut data: &[u8]) {
    while let Some((fds, rest)) = data.split_first() {
        let Some((bytes, rest)) = rest.split_first_chunk::<HEADER_BYTES>() else { return };
        let Ok(header) = Header::parse(bytes) else { return };
        let size = header.size as usize;
        assert!(size <= MAX_PAYLOAD_BYTES);
        let payload = &rest[..size.min(rest.len())];
        if let Ok(message) = Message::parse(&header, payload, usize::from(*fds)) {
            check_message(&message, payload.len(), usize::from(*fds));
        }
        data = &rest[payload.len()..];
    }
}

fn check_message(message: &Message, len: usize, fds: usize) {
    match message {
        Message::SetMemTable(regions) => {
            assert!(regions.len() <= MAX_TABLE_REGIONS && regions.len() == fds && len == 8 + 32 * regions.len());
        }
        Message::GetConfig { len: bytes, .. } => assert_eq!(12 + *bytes as usize, len),
        Message::SetConfig { offset, bytes } => assert!(config_fits(*offset, bytes.len() as u32)),
        Message::GetInflightFd { info, len: answered } => {
            assert!(*answered == len && info.encode(len).len() == len);
        }
        _ => assert!(fds <= 1),
    }
}

const QUEUE_SIZE: u16 = 8;
/// The guest addresses at which the regions begin: two regions touch, and the third lies behind a hole.
const STARTS: [u64; 3] = [0x1000, 0x2000, 0x4000];
const REGION_BYTES: usize = 0x1000;

/// Reads the chain at a head: features, head, descriptor table, and then the guest's memory.
pub fn chain(data: &[u8]) {
    let Some(([flags, head], rest)) = data.split_first_chunk() else { return };
    let memory = memory();
    let table = Segment::zeroed(descriptors_bytes(QUEUE_SIZE));
    let (descriptors, mut rest) = rest.split_at(rest.len().min(table.len()));
    table.copy_from_slice(0, descriptors);
    for start in STARTS {
        let (part, after) = rest.split_at(rest.len().min(REGION_BYTES));
        memory.contiguous(start, REGION_BYTES).expect("a region is whole").copy_from_slice(0, part);
        rest = after;
    }
    let [available, used] = [available_bytes(QUEUE_SIZE), used_bytes(QUEUE_SIZE)].map(Segment::zeroed);
    let ring = Ring::new(Parts { size: QUEUE_SIZE, descriptors: table, available, used }, true, 0);
    let mut request = Request::default();
    let mut parser = Parser::new(flags & 1 != 0, flags & 2 != 0);
    // Twice: a list that is used again must not show what it held before.
    for _ in 0..2 {
        if parser.parse(&ring, &memory, u16::from(*head), &mut request).is_ok() {
            check_request(&request, &memory, flags & 2 != 0);
        }
        request.clear();
        assert!(request.data.is_empty());
    }
}

fn check_request(request: &Request, memory: &GuestMemory, is_logged: bool) {
    assert!(memory.contiguous(request.status_addr, 1).is_some(), "no place for the status");
    assert_eq!(request.data.len(), request.data.iter().map(Segment::len).sum());
    assert!(request.data.iter().all(|segment| segment.len() <= REGION_BYTES));
    assert!(is_logged || request.written.is_empty());
    for (addr, len) in &request.written {
        let mut bytes = spile_core::Segments::new();
        assert!(memory.append(*addr, u64::from(*len), &mut bytes), "it would write where there is nothing");
    }
}

fn memory() -> GuestMemory {
    STARTS.iter().fold(GuestMemory::default(), |memory, start| {
        let (len_bytes, user_addr) = (REGION_BYTES as u64, start | 1 << 40);
        let info = RegionInfo { guest_addr: *start, len_bytes, user_addr, file_offset_bytes: 0 };
        let region = Region::map(info, file(len_bytes)).expect("memory is to be had");
        memory.with(region).expect("regions lie apart")
    })
}

fn file(len: u64) -> Arc<OwnedFd> {
    let fd = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("memory is to be had");
    ftruncate(&fd, len).expect("memory is to be had");
    Arc::new(fd)
}

/// Takes over a region of requests in flight that holds any bytes, at any used index.
pub fn inflight(data: &[u8]) {
    let Some(([log2, low, high], rest)) = data.split_first_chunk() else { return };
    let (size, used) = (1u16 << (log2 % 10), u16::from_le_bytes([*low, *high]));
    assert!(size <= MAX_QUEUE_SIZE);
    let region = InflightRegion::create(1, size, 1).expect("memory is to be had");
    let bytes = Segment::map_shared(&*region.file, 0, region.info.len_bytes as usize).expect("the region is whole");
    bytes.copy_from_slice(0, &rest[..rest.len().min(bytes.len())]);
    let queue = region.queue(0, size).expect("it has one queue");
    let Some(again) = queue.recover(used) else {
        assert_eq!(queue.recover(used).map(|left| left.len() <= usize::from(size)), Some(true), "it is in use now");
        return;
    };
    let mut heads = again.clone();
    heads.sort_unstable();
    heads.dedup();
    assert!(heads.len() == again.len() && heads.last().is_none_or(|head| *head < size));
    // What is to be done again is still noted, and comes back in the same order.
    assert_eq!(queue.recover(used), Some(again));
    assert_eq!(bytes.load_u16(14, Ordering::Relaxed), used);
}
