//! The in-flight region: it notes which requests are in flight, in memory that the front end keeps for the next server.
//!
//! The layout, and the order in which it is written, are those of QEMU's `docs/interop/vhost-user.rst`, "Inflight I/O
//! tracking". This process may be killed at any moment. So a request is noted before it is started, and its note is
//! removed only after the driver has been shown its answer in the used ring. Between the two, the list of the last
//! batch tells which answers the used ring may already have.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags};
use spile_core::{Error, ErrorKind, Result, Segment};

use crate::memory::map_file;
use crate::ring::MAX_QUEUE_SIZE;
use crate::wire::InflightInfo;

const VERSION_AT: usize = 8;
const SIZE_AT: usize = 10;
const LAST_BATCH_AT: usize = 12;
const USED_AT: usize = 14;
const TABLE_AT: usize = 16;
const ENTRY_BYTES: usize = 16;
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;
const VERSION: u16 = 1;
/// Each queue's part begins on its own cache line.
const PART_ALIGN: usize = 64;
/// Our own trailer, behind the parts of all queues, with which the specification ends: it keeps how the guest has
/// switched its write cache, and the pass of a guest that was let in. The front end may write anything there.
const TRAILER_BYTES: usize = PART_ALIGN;
/// Builds before the pass have noted here that the disk was handed over to another host.
const IS_GONE_AT: usize = 1;
const PASS_AT: usize = 16;
const IS_WRITEBACK: u8 = 1;
const IS_WRITE_THROUGH: u8 = 2;

fn part_bytes(queue_size: u16) -> usize {
    (TABLE_AT + ENTRY_BYTES * usize::from(queue_size)).next_multiple_of(PART_ALIGN)
}

/// The whole region: the parts of all queues, and our trailer.
#[derive(Clone)]
pub struct InflightRegion {
    /// The layout as the front end was told it.
    pub info: InflightInfo,
    /// The file, to hand it over.
    pub file: Arc<OwnedFd>,
    bytes: Segment,
}

impl InflightRegion {
    /// A new, empty region for the front end to keep. It cannot be made shorter.
    ///
    /// # Errors
    /// `InvalidInput` for impossible counts; else the system's.
    pub fn create(queues: u16, queue_size: u16, max_queues: u16) -> Result<Self> {
        check_counts(queues, queue_size, max_queues)?;
        let len_bytes = u64::from(queues) * part_bytes(queue_size) as u64 + TRAILER_BYTES as u64;
        let failed = |source: rustix::io::Errno| Error::io("make a region for requests in flight", source.into());
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("vhost-inflight", flags).map_err(failed)?;
        rustix::fs::ftruncate(&file, len_bytes).map_err(failed)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL).map_err(failed)?;
        Self::map(InflightInfo { len_bytes, file_offset_bytes: 0, queues, queue_size }, Arc::new(file), max_queues)
    }

    /// A region that the front end has kept and brings back.
    ///
    /// # Errors
    /// `InvalidInput` when counts, length or offset do not fit each other or the file.
    pub fn map(info: InflightInfo, file: Arc<OwnedFd>, max_queues: u16) -> Result<Self> {
        check_counts(info.queues, info.queue_size, max_queues)?;
        let needed = usize::from(info.queues) * part_bytes(info.queue_size);
        if info.len_bytes < needed as u64 || !info.file_offset_bytes.is_multiple_of(PART_ALIGN as u64) {
            return Err(refused(format!("{info:?} is too short for its queues, or begins at an odd offset")));
        }
        let len_bytes = info.len_bytes.min((needed + TRAILER_BYTES) as u64);
        let bytes = map_file("the region of requests in flight", &file, info.file_offset_bytes, len_bytes)?;
        Ok(Self { info, file, bytes })
    }

    /// The offset of the trailer. A region that another program has made has none.
    fn trailer(&self) -> Option<usize> {
        let at = usize::from(self.info.queues) * part_bytes(self.info.queue_size);
        (at + TRAILER_BYTES <= self.bytes.len()).then_some(at)
    }

    /// Keeps how the guest has switched its write cache, for the next server.
    pub fn keep_write_cache(&self, is_writeback: bool) {
        if let Some(at) = self.trailer() {
            self.bytes.store_u8(at, if is_writeback { IS_WRITEBACK } else { IS_WRITE_THROUGH }, Ordering::Release);
        }
    }

    /// How the guest has switched its write cache: true for write-back, false for write-through. `None` in a new
    /// region, in which nobody has noted it. When it cannot be known, it is write-through, with which nothing is lost.
    pub fn kept_write_cache(&self) -> Option<bool> {
        let is_used = self.is_used();
        match self.trailer().map(|at| self.bytes.load_u8(at, Ordering::Acquire)) {
            Some(IS_WRITEBACK) => Some(true),
            Some(0) | None if !is_used => None,
            _ => Some(false),
        }
    }

    /// True when a queue has started with this region, here or in another process.
    pub fn is_used(&self) -> bool {
        self.bytes.load_u16(VERSION_AT, Ordering::Acquire) != 0
    }

    /// True when a build before the pass has noted that the guest's disk was handed over to another host.
    pub fn is_gone(&self) -> bool {
        self.trailer().is_some_and(|at| self.bytes.load_u8(at + IS_GONE_AT, Ordering::Acquire) == 1)
    }

    /// Removes that note.
    pub fn forget_gone(&self) {
        if let Some(at) = self.trailer() {
            self.bytes.store_u8(at + IS_GONE_AT, 0, Ordering::Release);
        }
    }

    /// Keeps, for the next server, the secret by which it knows that the guest was let in. A region that another program has made cannot keep it.
    pub fn keep_pass(&self, [first, second]: [u64; 2]) {
        if let Some(at) = self.trailer() {
            self.bytes.store_u64(at + PASS_AT, first, Ordering::Relaxed);
            self.bytes.store_u64(at + PASS_AT + 8, second, Ordering::Release);
        }
    }

    /// What the region has in the place of the secret.
    pub fn pass(&self) -> Option<[u64; 2]> {
        self.trailer().map(|at| [at + PASS_AT, at + PASS_AT + 8].map(|at| self.bytes.load_u64(at, Ordering::Acquire)))
    }

    /// The part of queue number `index`, whose size is `queue_size`.
    ///
    /// # Errors
    /// `InvalidInput` when the region has no such queue, or one of another size.
    pub fn queue(&self, index: usize, queue_size: u16) -> Result<InflightQueue> {
        if index >= usize::from(self.info.queues) || queue_size > self.info.queue_size {
            return Err(refused(format!("there is no room for queue {index} of {queue_size} in {:?}", self.info)));
        }
        let start = index * part_bytes(self.info.queue_size);
        let bytes = self.bytes.slice(start..start + part_bytes(queue_size));
        Ok(InflightQueue { bytes, size: queue_size, counter: Cell::new(0) })
    }
}

fn check_counts(queues: u16, queue_size: u16, max_queues: u16) -> Result<()> {
    let size_fits = queue_size.is_power_of_two() && queue_size <= MAX_QUEUE_SIZE;
    match size_fits && (1..=max_queues).contains(&queues) {
        true => Ok(()),
        false => Err(refused(format!("{queues} queues of {queue_size} (at most {max_queues} queues)"))),
    }
}

fn refused(what: String) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("requests in flight: {what}"))
}

/// The part of one queue.
pub struct InflightQueue {
    bytes: Segment,
    size: u16,
    counter: Cell<u64>,
}

impl InflightQueue {
    fn entry(&self, head: u16) -> usize {
        TABLE_AT + ENTRY_BYTES * usize::from(head)
    }

    /// True when the region's memory has been lost.
    pub fn is_lost(&self) -> bool {
        self.bytes.is_lost()
    }

    /// Notes that the chain at `head` has been popped.
    pub fn note(&self, head: u16) {
        let (entry, counter) = (self.entry(head), self.counter.get());
        self.bytes.store_u64(entry + COUNTER_AT, counter, Ordering::Relaxed);
        self.counter.set(counter.wrapping_add(1));
        self.bytes.store_u8(entry, 1, Ordering::Release);
    }

    /// Puts a chain that goes to the used ring into the list of the batch. Call it before the used index is published.
    pub fn link(&self, head: u16) {
        let last = self.bytes.load_u16(LAST_BATCH_AT, Ordering::Relaxed);
        self.bytes.store_u16(self.entry(head) + NEXT_AT, last, Ordering::Relaxed);
        self.bytes.store_u16(LAST_BATCH_AT, head, Ordering::Release);
    }

    /// Removes the notes of a batch. Call it after the used index `used_idx` is published.
    pub fn unnote(&self, batch: &[u16], used_idx: u16) {
        batch.iter().for_each(|head| self.bytes.store_u8(self.entry(*head), 0, Ordering::Release));
        self.bytes.store_u16(USED_AT, used_idx, Ordering::Release);
    }

    /// Takes over the region from the server before; `used_idx` is the index that the used ring shows. Returns the
    /// heads of the chains that are to be done again, in the order in which they were popped; `None` when the region is
    /// new.
    pub fn recover(&self, used_idx: u16) -> Option<Vec<u16>> {
        if self.bytes.load_u16(VERSION_AT, Ordering::Acquire) == 0 {
            self.bytes.store_u16(SIZE_AT, self.size, Ordering::Relaxed);
            self.bytes.store_u16(USED_AT, used_idx, Ordering::Relaxed);
            self.bytes.store_u16(VERSION_AT, VERSION, Ordering::Release);
            return None;
        }
        self.finish_batch(used_idx);
        let is_noted = |head: &u16| self.bytes.load_u8(self.entry(*head), Ordering::Acquire) != 0;
        let counter = |head: u16| self.bytes.load_u64(self.entry(head) + COUNTER_AT, Ordering::Relaxed);
        let mut noted: Vec<(u64, u16)> = (0..self.size).filter(is_noted).map(|head| (counter(head), head)).collect();
        noted.sort_unstable();
        self.counter.set(noted.last().map_or(0, |(counter, _)| counter.wrapping_add(1)));
        Some(noted.into_iter().map(|(_, head)| head).collect())
    }

    /// Removes the notes of the last batch, which was published but whose notes were not all removed.
    fn finish_batch(&self, used_idx: u16) {
        let before = self.bytes.load_u16(USED_AT, Ordering::Relaxed);
        let mut head = self.bytes.load_u16(LAST_BATCH_AT, Ordering::Relaxed);
        // The number of steps is bounded, whatever the region holds.
        for _ in 0..used_idx.wrapping_sub(before).min(self.size) {
            if head >= self.size {
                break;
            }
            self.bytes.store_u8(self.entry(head), 0, Ordering::Relaxed);
            head = self.bytes.load_u16(self.entry(head) + NEXT_AT, Ordering::Relaxed);
        }
        self.bytes.store_u16(USED_AT, used_idx, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(region: &InflightRegion) -> InflightQueue {
        region.queue(1, 8).unwrap()
    }

    fn region() -> InflightRegion {
        let region = InflightRegion::create(2, 8, 4).unwrap();
        assert_eq!(queue(&region).recover(0), None);
        region
    }

    #[test]
    fn what_is_in_flight_is_done_again_in_its_order() {
        let region = region();
        let first = queue(&region);
        [5, 2, 7, 0].iter().for_each(|head| first.note(*head));
        // 2 ends before the others, which the order of the available ring alone would not tell.
        first.link(2);
        first.unnote(&[2], 1);
        assert_eq!(queue(&region).recover(1), Some(vec![5, 7, 0]));
        // The counter goes on after theirs.
        let second = queue(&region);
        second.recover(1);
        second.note(2);
        assert_eq!(queue(&region).recover(1), Some(vec![5, 7, 0, 2]));
    }

    #[test]
    fn killed_between_any_two_writes_each_is_answered_once() {
        // Steps of a batch of two, with the used index (3, then 5) published between the links and the rest.
        for died_after in 0..=5 {
            let region = region();
            let first = queue(&region);
            first.unnote(&[], 3);
            [1, 4, 6].iter().for_each(|head| first.note(*head));
            let published = if died_after >= 3 { 5 } else { 3 };
            let steps: [&dyn Fn(); 5] = [
                &|| first.link(4),
                &|| first.link(6),
                &|| (),
                &|| first.bytes.store_u8(first.entry(4), 0, Ordering::Relaxed),
                &|| first.bytes.store_u8(first.entry(6), 0, Ordering::Relaxed),
            ];
            steps[..died_after.min(5)].iter().for_each(|step| step());
            let again = queue(&region).recover(published).unwrap();
            let expected: &[u16] = if published == 5 { &[1] } else { &[1, 4, 6] };
            assert_eq!(again, expected, "died after {died_after}");
        }
    }

    #[test]
    fn a_region_that_lies_is_bounded() {
        let region = region();
        let part = queue(&region);
        part.bytes.store_u16(LAST_BATCH_AT, 3, Ordering::Relaxed);
        // A list that bites its tail, and an index far away.
        part.bytes.store_u16(part.entry(3) + NEXT_AT, 3, Ordering::Relaxed);
        assert_eq!(part.recover(40_000), Some(vec![]));
        part.bytes.store_u16(LAST_BATCH_AT, u16::MAX, Ordering::Relaxed);
        assert_eq!(part.recover(7), Some(vec![]));
    }

    #[test]
    fn the_write_cache_is_kept_and_unknown_is_write_through() {
        let region = InflightRegion::create(2, 8, 4).unwrap();
        assert_eq!(region.kept_write_cache(), None);
        region.keep_write_cache(true);
        region.queue(0, 8).unwrap().recover(0);
        let again = |info| InflightRegion::map(info, region.file.clone(), 4).unwrap().kept_write_cache();
        assert_eq!(again(region.info), Some(true));
        region.keep_write_cache(false);
        assert_eq!(again(region.info), Some(false));
        // Another program's region, as long as the specification has it.
        assert_eq!(again(InflightInfo { len_bytes: region.info.len_bytes - 64, ..region.info }), Some(false));
    }

    #[test]
    fn impossible_regions_are_refused() {
        for (queues, size) in [(0, 8), (5, 8), (u16::MAX, 8), (1, 0), (1, 7), (1, u16::MAX)] {
            assert!(InflightRegion::create(queues, size, 4).is_err(), "{queues} {size}");
        }
        let region = region();
        let map = |info| InflightRegion::map(info, region.file.clone(), 4);
        let good = region.info;
        assert!(map(good).is_ok());
        assert!(map(InflightInfo { len_bytes: good.len_bytes - 65, ..good }).is_err());
        assert!(map(InflightInfo { file_offset_bytes: 4096, ..good }).is_err());
        assert!(map(InflightInfo { file_offset_bytes: !63, ..good }).is_err());
        assert!(map(InflightInfo { queues: 3, ..good }).is_err());
        assert!(region.queue(2, 8).is_err() && region.queue(0, 16).is_err());
    }

    #[test]
    fn nobody_can_cut_our_region_short() {
        assert!(rustix::fs::ftruncate(&*region().file, 0).is_err());
    }
}
