//! The bitmap journal: lets a first write be acknowledged after one small cached write, and no sync.
//!
//! A set bit says that a sector's data are in this file. It must not become durable before the data are, or a power
//! cut would show what lay there before. Nor may it be lost when only the process dies. So a bit is first recorded
//! here, in an area of the file that other readers ignore; the next flush syncs the data, writes the real bitmaps,
//! and drops the record. A record counts only in the boot of the host that wrote it: the page cache of that boot
//! still holds everything that had returned. So a store that is not local has no journal. After a power cut or a reboot the boot is another, and the journal is void.
//!
//! The area has two halves, used in turn, so that records go on while a flush retires the other half. Each half:
//! one header in its first 4 KiB (magic, version, boot id, image UUID, generation, CRC-32), then 32-byte records
//! (block, sector of the block, first sector, sectors, generation, CRC-32 over all this and the slot). A write that did not
//! end may have left any of its records, so a replay looks at every slot.
//!
//! Records that come while one is written wait, and are then written together: many requests at a time cost few writes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use event_listener::{Event, EventListener};
use spile_core::{Result, Segments, Store, StoreOffset, Via};

use super::bits::Bits;

const MAGIC: &[u8; 8] = b"spiljrnl";
const VERSION: u32 = 1;
const HEADER_BYTES: u64 = 4096;
const RECORD_BYTES: u64 = 32;

/// A record: these sectors of the block that lies there are in this file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub block: u32,
    /// The BAT's value for the block: a record is void once its block was released or moved.
    pub at_sector: u32,
    pub sectors: Range<u32>,
}

/// The boot of the host and the image that a journal belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub boot_id: [u8; 16],
    pub image_uuid: [u8; 16],
}

pub(crate) struct Journal {
    /// Where the area lies in the store; `None` when the image has none, or the store is on another host. Each new bit waits
    /// for a sync then.
    area: Option<Area>,
    owner: Owner,
    slots: u64,
    state: Mutex<State>,
    /// Notified when a record is complete and when a half is retired.
    changed: Event,
    /// Notified when a write of records has ended.
    wrote: Event,
}

struct Area {
    at: AtomicU64,
    /// Where the area is to lie next, while it moves: all is written there as well. 0 when it does not move.
    next_at: AtomicU64,
    half_bytes: u64,
}

struct State {
    current: usize,
    halves: [Half; 2],
}

#[derive(Default)]
struct Half {
    generation: u64,
    /// The half's header is in the file, or may be.
    begun: bool,
    /// The header may not be in the file, because a write of it, or one that was to remove it, has failed, or not where the area is to lie next:
    /// the next record needs it written anew.
    is_headless: bool,
    used: u64,
    in_flight: usize,
    /// Slots before this one are in the file, or their requests are gone.
    written: u64,
    /// The records of the slots from `written` on, one after the other.
    unwritten: Vec<u8>,
    is_writing: bool,
    /// The file may have a record that was never confirmed, of any block.
    is_unsure: bool,
    /// It has records that are not where the area is to lie next.
    is_left_behind: bool,
    /// Blocks with bits that are recorded here and not in their bitmaps.
    pending: Pending,
}

/// Blocks whose bitmaps must be written, with the sector each lies at. In order, so that a simulated run can be repeated.
pub(crate) type Pending = BTreeMap<u32, (u32, Arc<Bits>)>;

/// What [`Journal::turn`] leaves to be retired.
pub(crate) struct Turned {
    /// The half that takes no more records.
    pub half: usize,
    /// All that is pending: what was left by a retirement that failed, or by an earlier process, too.
    pub pending: Pending,
    /// The other half, which takes records now, has some that a retirement has left.
    pub has_left: bool,
}

/// The slot of a record that is to be written; a retirement of its half waits for it.
pub(crate) struct Slot<'a> {
    journal: &'a Journal,
    half: usize,
    number: u64,
    record: Record,
}

/// What a slot's owner has to do.
enum Turn<'a> {
    /// The record is in the file.
    Written,
    /// Look again when another write has ended.
    Wait(EventListener),
    Write(Batch<'a>),
}

/// Records of one half that are written together.
struct Batch<'a> {
    journal: &'a Journal,
    half: usize,
    first: u64,
    bytes: Segments,
    /// The generation, if the half has no header yet.
    header: Option<u64>,
    is_written: bool,
}

impl Journal {
    pub(crate) fn new(area: Option<Range<u64>>, owner: Owner, first_generation: u64) -> Self {
        let half_bytes = area.as_ref().map_or(0, |area| (area.end - area.start) / 2);
        let slots = half_bytes.saturating_sub(HEADER_BYTES) / RECORD_BYTES;
        let half = |n| Half { generation: first_generation.wrapping_add(n), ..Half::default() };
        let area = area.filter(|_| slots > 0).map(|area| Area {
            at: AtomicU64::new(area.start),
            next_at: AtomicU64::new(0),
            half_bytes,
        });
        let state = Mutex::new(State { current: 0, halves: [half(0), half(1)] });
        Self { area, owner, slots, state, changed: Event::new(), wrote: Event::new() }
    }

    pub(crate) fn has_area(&self) -> bool {
        self.area.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Where a half lies, and where it is to lie next.
    fn half_starts(&self, half: usize) -> impl Iterator<Item = u64> + use<> {
        let starts = self.area.as_ref().map_or([0; 2], |area| {
            let start_of = |at: &AtomicU64| match at.load(Ordering::Acquire) {
                0 => 0,
                at => at + half as u64 * area.half_bytes,
            };
            [start_of(&area.at), start_of(&area.next_at)]
        });
        starts.into_iter().filter(|&start| start != 0)
    }

    /// Begins to write all that comes to `next_at` as well, where the area is to lie next. 0 ends that.
    pub(crate) fn write_also_to(&self, next_at: u64) {
        let Some(area) = &self.area else { return };
        let mut state = self.lock();
        area.next_at.store(next_at, Ordering::Release);
        for half in &mut state.halves {
            half.is_left_behind = half.used > 0;
            // A process that died before its first record has left a header alone: no flush retires that one, and it is not at `next_at`.
            half.is_headless |= half.begun;
        }
    }

    /// True when some record is not where the area is to lie next: flushes retire it.
    pub(crate) fn has_left_behind(&self) -> bool {
        self.lock().halves.iter().any(|half| half.is_left_behind)
    }

    /// The area lies where all that has come was written as well.
    pub(crate) fn moved(&self) {
        let Some(area) = &self.area else { return };
        area.at.store(area.next_at.load(Ordering::Acquire), Ordering::Release);
        area.next_at.store(0, Ordering::Release);
    }

    /// Takes a slot in the current half for `record`; `None` when it is full and must be retired first.
    pub(crate) fn reserve(&self, record: &Record) -> Option<Slot<'_>> {
        let mut state = self.lock();
        let current = state.current;
        let half = &mut state.halves[current];
        if half.used >= self.slots {
            return None;
        }
        let slot = Slot { journal: self, half: current, number: half.used, record: record.clone() };
        half.unwritten.extend(encode_record(record, half.generation, half.used));
        half.used += 1;
        half.in_flight += 1;
        Some(slot)
    }

    /// True when the current half is half full, so that a flush should retire it while the rest takes records.
    pub(crate) fn is_filling(&self) -> bool {
        let state = self.lock();
        self.has_area() && state.halves[state.current].used * 2 > self.slots
    }

    /// Sets bits that have no record because there is no area: they are pending all the same.
    pub(crate) fn set_unrecorded(&self, block: u32, at_sector: u32, bits: Arc<Bits>, sectors: Range<u32>) {
        let mut state = self.lock();
        let current = state.current;
        bits.set(sectors);
        state.halves[current].pending.insert(block, (at_sector, bits));
    }

    /// True when all bits of `sectors` are set and survive the death of the process: recorded, or in the bitmap.
    pub(crate) fn is_settled(&self, block: u32, bits: &Bits, sectors: Range<u32>) -> bool {
        let state = self.lock();
        let pending = || state.halves.iter().any(|half| half.pending.contains_key(&block));
        bits.has_all(sectors) && (self.has_area() || !pending())
    }

    /// True when a half has records or pending bits, so that a flush must retire it. (Records alone count too: they
    /// may name a released block, and must be gone before its place is used again.)
    pub(crate) fn has_records(&self) -> bool {
        self.lock().halves.iter().any(|half| half.used > 0 || !half.pending.is_empty())
    }

    /// True when the file may have a record of `block`. Nobody writes to the block meanwhile.
    pub(crate) fn may_name(&self, block: u32) -> bool {
        self.lock().halves.iter().any(|half| half.is_unsure || half.pending.contains_key(&block))
    }

    /// True when some bitmap in memory is ahead of the file.
    pub(crate) fn has_pending(&self) -> bool {
        self.lock().halves.iter().any(|half| !half.pending.is_empty())
    }

    /// Forgets a block that was released.
    pub(crate) fn forget(&self, block: u32) {
        self.lock().halves.iter_mut().for_each(|half| {
            half.pending.remove(&block);
        });
    }

    /// Switches to the other half and waits for the records of the old one that are under way. One caller at a time, each followed by
    /// [`Journal::retire`].
    pub(crate) async fn turn(&self) -> Turned {
        let (old, left, has_left) = {
            let mut state = self.lock();
            let old = state.current;
            state.current = 1 - old;
            let other = &state.halves[1 - old];
            (old, other.pending.clone(), other.used > 0)
        };
        loop {
            let listener = self.changed.listen();
            {
                let mut state = self.lock();
                let half = &mut state.halves[old];
                if half.in_flight == 0 {
                    // What is unwritten now belongs to requests that are gone.
                    half.written = half.used;
                    half.unwritten.clear();
                    let mut pending = half.pending.clone();
                    pending.extend(left.iter().map(|(block, at)| (*block, at.clone())));
                    return Turned { half: old, pending, has_left };
                }
            }
            listener.await;
        }
    }

    /// Drops a half whose pending bits are durable in their bitmaps.
    pub(crate) async fn retire<S: Store>(&self, store: &S, half: usize) -> Result<()> {
        let (begun, generation) = {
            let state = self.lock();
            let old = &state.halves[half];
            let next = old.generation.wrapping_add(2);
            (old.begun, next)
        };
        if begun && let Err(error) = self.write_header(store, half, None).await {
            // It stays begun: the next process may still find its records. It may also find none, and the next retirement may be long after
            // the next record.
            self.lock().halves[half].is_headless = true;
            return Err(error);
        }
        let mut state = self.lock();
        state.halves[half] = Half { generation, ..Half::default() };
        drop(state);
        self.changed.notify(usize::MAX);
        Ok(())
    }

    async fn write_header<S: Store>(&self, store: &S, half: usize, generation: Option<u64>) -> Result<()> {
        let mut bytes = [0; 512];
        if let Some(generation) = generation {
            encode_header(&mut bytes, &self.owner, generation);
        }
        for start in self.half_starts(half) {
            store.write_at(StoreOffset(start), &Segments::copied(&bytes), Via::Cached).await?;
        }
        Ok(())
    }

    /// Reads the records of an earlier process in this boot of the host, and adopts them: they stay pending here.
    pub(crate) async fn replay<S: Store>(&self, store: &S) -> Result<Vec<(usize, Record)>> {
        let mut found = Vec::new();
        if !self.has_area() {
            return Ok(found);
        }
        for half in 0..2 {
            let Some(start) = self.half_starts(half).next() else { continue };
            let header = Segments::zeroed(512);
            store.read_at(StoreOffset(start), &header, Via::Cached).await?;
            let Some(generation) = decode_header(&header.to_vec(), &self.owner) else { continue };
            let records = Segments::zeroed((self.slots * RECORD_BYTES) as usize);
            store.read_at(StoreOffset(start + HEADER_BYTES), &records, Via::Cached).await?;
            let bytes = records.to_vec();
            let mut used = 0;
            for (slot, bytes) in bytes.chunks_exact(RECORD_BYTES as usize).enumerate() {
                if let Some(record) = decode_record(bytes, generation, slot as u64) {
                    used = slot as u64 + 1;
                    found.push((half, record));
                }
            }
            self.lock().halves[half] = Half { generation, begun: true, used, written: used, ..Half::default() };
        }
        Ok(found)
    }

    /// Notes the bits of a replayed record as pending in its half.
    pub(crate) fn adopt(&self, half: usize, record: &Record, bits: Arc<Bits>) {
        self.lock().halves[half].pending.insert(record.block, (record.at_sector, bits));
    }
}

impl<'a> Slot<'a> {
    /// Writes the record; then sets the bits in `bits`, so that no reader sees a bit that a dying process could lose.
    pub(crate) async fn record<S: Store>(self, store: &S, bits: Arc<Bits>) -> Result<()> {
        loop {
            match self.turn() {
                Turn::Written => break,
                Turn::Wait(wrote) => wrote.await,
                Turn::Write(batch) => batch.write(store).await?,
            }
        }
        bits.set(self.record.sectors.clone());
        let mut state = self.journal.lock();
        state.halves[self.half].pending.insert(self.record.block, (self.record.at_sector, bits));
        Ok(())
    }

    fn turn(&self) -> Turn<'a> {
        let journal = self.journal;
        let mut state = journal.lock();
        let half = &mut state.halves[self.half];
        if half.written > self.number {
            return Turn::Written;
        }
        if half.is_writing {
            return Turn::Wait(journal.wrote.listen());
        }
        half.is_writing = true;
        Turn::Write(Batch {
            journal,
            half: self.half,
            first: half.written,
            bytes: Segments::copied(&half.unwritten),
            header: (!half.begun || half.is_headless).then_some(half.generation),
            is_written: false,
        })
    }
}

impl Batch<'_> {
    async fn write<S: Store>(mut self, store: &S) -> Result<()> {
        let journal = self.journal;
        if self.header.is_some() {
            journal.write_header(store, self.half, self.header).await?;
        }
        for start in journal.half_starts(self.half) {
            let at = start + HEADER_BYTES + self.first * RECORD_BYTES;
            store.write_at(StoreOffset(at), &self.bytes, Via::Cached).await?;
        }
        self.is_written = true;
        Ok(())
    }
}

impl Drop for Batch<'_> {
    /// The write has ended, or is given up. The next one takes what is not in the file then.
    fn drop(&mut self) {
        let mut state = self.journal.lock();
        let half = &mut state.halves[self.half];
        half.is_writing = false;
        if self.header.is_some() {
            // A write that has failed may have taken effect.
            (half.begun, half.is_headless) = (true, !self.is_written);
        }
        if self.is_written {
            half.unwritten.drain(..self.bytes.len());
            half.written = self.first + self.bytes.len() as u64 / RECORD_BYTES;
        }
        drop(state);
        self.journal.wrote.notify(usize::MAX);
    }
}

impl Drop for Slot<'_> {
    /// The record is in the file, or its write has failed or is given up. Then no later batch may write it: after the death of
    /// the process the bits would be set, although the guest was told otherwise.
    fn drop(&mut self) {
        let mut state = self.journal.lock();
        let half = &mut state.halves[self.half];
        half.in_flight -= 1;
        if let Some(place) = self.number.checked_sub(half.written) {
            let at = (place * RECORD_BYTES) as usize;
            half.unwritten[at..at + RECORD_BYTES as usize].fill(0);
            half.is_unsure = true;
        }
        drop(state);
        self.journal.changed.notify(usize::MAX);
    }
}

fn encode_header(bytes: &mut [u8; 512], owner: &Owner, generation: u64) {
    bytes[0..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_be_bytes());
    bytes[12..28].copy_from_slice(&owner.boot_id);
    bytes[28..44].copy_from_slice(&owner.image_uuid);
    bytes[44..52].copy_from_slice(&generation.to_be_bytes());
    let crc = crc32fast::hash(&bytes[..52]);
    bytes[52..56].copy_from_slice(&crc.to_be_bytes());
}

/// The generation in the header, if the header is whole and belongs to `owner`.
fn decode_header(bytes: &[u8], owner: &Owner) -> Option<u64> {
    let bytes: &[u8; 512] = bytes.try_into().ok()?;
    let generation = u64::from_be_bytes(bytes[44..52].try_into().ok()?);
    let mut expected = [0; 512];
    encode_header(&mut expected, owner, generation);
    (bytes == &expected).then_some(generation)
}

fn encode_record(record: &Record, generation: u64, slot: u64) -> [u8; RECORD_BYTES as usize] {
    let mut bytes = [0; RECORD_BYTES as usize];
    let fields = [record.block, record.at_sector, record.sectors.start, record.sectors.end];
    for (field, chunk) in fields.iter().zip(bytes.chunks_exact_mut(4)) {
        chunk.copy_from_slice(&field.to_be_bytes());
    }
    bytes[16..24].copy_from_slice(&generation.to_be_bytes());
    let crc = record_crc(&bytes, slot);
    bytes[24..28].copy_from_slice(&crc.to_be_bytes());
    bytes
}

fn record_crc(bytes: &[u8], slot: u64) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes[..24]);
    hasher.update(&slot.to_be_bytes());
    hasher.finalize()
}

/// The record in these 32 bytes, if it is whole and of this generation and slot.
fn decode_record(bytes: &[u8], generation: u64, slot: u64) -> Option<Record> {
    let field = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let record = Record { block: field(0)?, at_sector: field(4)?, sectors: field(8)?..field(12)? };
    let whole = bytes.get(16..24)? == generation.to_be_bytes() && field(24)? == record_crc(bytes, slot);
    (whole && record.sectors.start < record.sectors.end).then_some(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: Owner = Owner { boot_id: [1; 16], image_uuid: [2; 16] };

    #[test]
    fn a_record_counts_only_in_its_generation_and_slot() {
        let record = Record { block: 5, at_sector: 99, sectors: 8..16 };
        let bytes = encode_record(&record, 77, 3);
        assert_eq!(decode_record(&bytes, 77, 3), Some(record));
        assert_eq!(decode_record(&bytes, 78, 3), None);
        assert_eq!(decode_record(&bytes, 77, 4), None);
        for at in 0..28 {
            let mut torn = bytes;
            torn[at] ^= 1;
            assert_eq!(decode_record(&torn, 77, 3), None, "byte {at}");
        }
    }

    #[test]
    fn a_header_counts_only_in_its_boot_and_image() {
        let mut bytes = [0; 512];
        encode_header(&mut bytes, &OWNER, 42);
        assert_eq!(decode_header(&bytes, &OWNER), Some(42));
        assert_eq!(decode_header(&bytes, &Owner { boot_id: [9; 16], ..OWNER }), None);
        assert_eq!(decode_header(&bytes, &Owner { image_uuid: [9; 16], ..OWNER }), None);
        bytes[100] = 1;
        assert_eq!(decode_header(&bytes, &OWNER), None);
    }

    #[test]
    fn a_record_whose_write_has_failed_is_in_no_later_batch() {
        let journal = Journal::new(Some(4096..4096 + 2 * (4096 + 64)), OWNER, 1);
        let record = |block| Record { block, at_sector: 99, sectors: 8..16 };
        let failed = journal.reserve(&record(5));
        let other = journal.reserve(&record(6)).unwrap();
        drop(failed);
        let Turn::Write(batch) = other.turn() else { panic!("nobody else writes") };
        let bytes = batch.bytes.to_vec();
        assert_eq!(decode_record(&bytes[..32], 1, 0), None);
        assert_eq!(decode_record(&bytes[32..], 1, 1), Some(record(6)));
        assert!(journal.may_name(5), "nobody knows how far the write came");
    }

    #[test]
    fn a_header_that_may_be_gone_is_written_with_the_next_record() {
        let journal = Journal::new(Some(4096..4096 + 2 * (4096 + 128)), OWNER, 1);
        let record = Record { block: 5, at_sector: 99, sectors: 8..16 };
        let header_of = |begun, is_headless| {
            (journal.lock().halves[0].begun, journal.lock().halves[0].is_headless) = (begun, is_headless);
            let slot = journal.reserve(&record).unwrap();
            let Turn::Write(batch) = slot.turn() else { panic!("nobody else writes") };
            batch.header
        };
        assert_eq!(header_of(true, false), None);
        assert_eq!(header_of(true, true), Some(1));
        // The batch was given up: nobody knows how much of it is in the file.
        assert_eq!(header_of(false, false), Some(1));
        assert!(journal.lock().halves[0].begun && journal.lock().halves[0].is_headless);
    }

    #[test]
    fn a_header_without_records_is_written_with_the_next_record_where_the_area_moves_to() {
        let journal = Journal::new(Some(4096..4096 + 2 * (4096 + 64)), OWNER, 1);
        // As a replay leaves a half whose header alone was written.
        journal.lock().halves[0].begun = true;
        journal.write_also_to(65536);
        assert!(!journal.has_left_behind(), "there is no record to retire");
        let slot = journal.reserve(&Record { block: 5, at_sector: 99, sectors: 8..16 }).unwrap();
        let Turn::Write(batch) = slot.turn() else { panic!("nobody else writes") };
        assert_eq!(batch.header, Some(1));
    }

    #[test]
    fn a_full_half_gives_no_slot() {
        let journal = Journal::new(Some(4096..4096 + 2 * (4096 + 64)), OWNER, 1);
        let record = Record { block: 5, at_sector: 99, sectors: 8..16 };
        let slots = (journal.reserve(&record), journal.reserve(&record));
        assert!(slots.0.is_some() && slots.1.is_some() && journal.reserve(&record).is_none());
        assert!(journal.is_filling());
    }
}
