//! Allocation: the one place where blocks of an image are given out and taken back.
//!
//! Decisions are made under a lock that is never held over I/O; the I/O of one allocation holds up only requests for
//! the same block. Space is prepared in large steps, so that a first write waits for no sync.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use event_listener::Event;
use spile_core::{Error, ErrorKind, Result, Segments, Store, StoreOffset, Timer, Via};

use super::bits::Bits;
use super::{SECTOR, Sparse, Table};
use crate::layer::{GIVEN_BACK_A_FLUSH, GivenBack};

/// Space prepared in one step of a file, in bytes of guest data: as much as the file holds, within these bounds. The step
/// is length only, and takes no space on the host, so that few steps, each with its sync, are enough: a disk of 2 TiB that is
/// written from end to end takes about 40.
const STEP_MIN_BYTES: u64 = 64 << 20;
const STEP_MAX_BYTES: u64 = 64 << 30;

/// The most that is prepared at a time on a device, where each place of a block has to be emptied.
const DEVICE_STEP_MAX_BYTES: u64 = 1 << 30;

/// The most blocks of a step: each is kept in memory until it is used.
const STEP_MAX_BLOCKS: u64 = 32 << 10;

/// So many released blocks are used again before the file grows, however large the step would be. A step in gaps has no more
/// either, as each of its places is emptied by itself.
const RECYCLED_AT_ONCE: u64 = 128;

/// The most blocks that are kept from being punched ([`Alloc::hold_space`]), as each is kept in memory.
const MOST_HELD: usize = 1 << 20;

/// A punch that ends elsewhere writes zeroes, and frees nothing.
const PAGE_BYTES: u64 = 4096;

/// Where a block lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    pub sector: u32,
    /// True when this call has placed it.
    pub is_new: bool,
}

/// A place for a block, safe to use: whatever a crash leaves, its bitmap reads as zeroes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ready {
    pub sector: u32,
    /// True when its data read as zeroes, too.
    pub zeroed: bool,
}

/// Blocks on their way from released to ready (rule 5).
#[derive(Default)]
pub(crate) struct Released {
    /// Released since the last turn of the grace period.
    pub fresh: Vec<u32>,
    /// Waiting until no reader of that phase is left.
    pub waiting: Option<(usize, Vec<u32>)>,
    /// Without readers. A sync that begins later has to end before they are punched.
    gone: Vec<u32>,
    /// To be punched: such a sync has ended.
    settled: Vec<u32>,
    /// A block that is punched bit by bit, and how much of it is, in bytes.
    begun: Option<(u32, u64)>,
    /// Punched, not yet synced.
    pub punched: Vec<Ready>,
    /// Nothing is punched now.
    holds: bool,
    /// Settled, and left as they are when that has ended: flushes do not punch them. New blocks take them, and whoever gives back beside flushes.
    left: Vec<u32>,
}

impl Released {
    fn count(&self) -> usize {
        let waiting = self.waiting.as_ref().map_or(0, |(_, blocks)| blocks.len());
        let begun = usize::from(self.begun.is_some());
        self.fresh.len() + waiting + self.gone.len() + self.settled.len() + begun + self.punched.len()
    }

    /// Blocks whose last reader is gone. Returns how many of them a sync that begins now settles.
    pub(super) fn add_gone(&mut self, blocks: Vec<u32>) -> usize {
        self.gone.extend(blocks);
        self.gone.len()
    }

    /// The sync has ended that settles the first `count` blocks without readers.
    pub(super) fn settle(&mut self, count: usize) {
        let count = count.min(self.gone.len());
        self.settled.extend(self.gone.drain(..count));
    }

    /// Forgets all whose release no sync has made durable: these places are used again only after the image was opened anew, as any other gap.
    pub(super) fn lose_unsettled(&mut self) {
        self.fresh.clear();
        self.waiting.iter_mut().for_each(|(_, blocks)| blocks.clear());
        self.gone.clear();
    }

    /// The next blocks that a flush punches.
    pub(super) fn next_to_punch(&mut self) -> Vec<u32> {
        if self.holds && self.settled.len() < MOST_HELD {
            return Vec::new();
        }
        // So that a guest's flush after a large discard does not wait for all of it.
        let rest = self.settled.len().saturating_sub(GIVEN_BACK_A_FLUSH);
        self.settled.split_off(rest)
    }

    /// The next block that is punched beside flushes, and how much of it is punched already.
    fn next_beside(&mut self) -> Option<(u32, u64)> {
        let next = self.begun.take().or_else(|| self.settled.pop().map(|sector| (sector, 0)));
        match self.holds {
            true => next.or_else(|| self.left.pop().map(|sector| (sector, 0))),
            false => next,
        }
    }
}

pub(crate) struct Alloc {
    pub state: Mutex<AllocState>,
    /// Held while space is prepared.
    preparing: async_lock::Mutex<()>,
}

#[derive(Default)]
pub(crate) struct AllocState {
    ready: VecDeque<Ready>,
    /// How many blocks were given out since the image was opened.
    given_out: u64,
    /// Blocks whose BAT entry is under way.
    placing: HashMap<u32, Arc<Event>>,
    pub released: Released,
    /// Where the next prepared block may start; everything from here on is unused.
    pub next_free: u64,
    /// The file was cut at the end of its blocks in this session, so what it gains reads as zeroes.
    tail_is_clean: bool,
    step_blocks: u64,
    /// Unused runs between blocks, as an earlier session left them; used before the file grows.
    gaps: Vec<Range<u64>>,
    /// Places that earlier sessions released may be used ([`Sparse::settle`]).
    is_settled: bool,
    /// The file is never cut before this offset: another program may keep something before it, or a table may name a block
    /// there that the map in memory does not have.
    keep_end: u64,
    /// Where a device ended when its last sector was last known to be the footer's place: blocks lie before that.
    pub device_end: u64,
    footers: FooterState,
}

/// Which of the two footers are whole.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FooterState {
    pub copy_is_bad: bool,
    pub trailing_is_gone: bool,
}

impl AllocState {
    /// Takes what is ready for the size of a step: when half of it is used up, the next step is prepared.
    fn note_step(&mut self) {
        self.step_blocks = self.ready.len() as u64;
    }

    /// The file is not cut before `offset_bytes` any more.
    fn keep_until(&mut self, offset_bytes: u64) {
        self.keep_end = self.keep_end.max(offset_bytes);
    }
}

impl Alloc {
    /// The allocator of an image that has the unused runs `gaps`, and nothing but a footer from `next_free` on. The store ends at `end`.
    pub(crate) fn new(next_free: u64, gaps: Vec<Range<u64>>, keep_end: u64, end: u64, footers: FooterState) -> Self {
        let state = AllocState { next_free, gaps, keep_end, device_end: end, footers, ..AllocState::default() };
        Self { state: Mutex::new(state), preparing: async_lock::Mutex::new(()) }
    }

    /// True when the trailing footer is not behind the last block, by this session's doing, or is not there at all.
    pub(crate) fn needs_footer(&self) -> bool {
        let state = self.lock();
        state.tail_is_clean || state.footers.trailing_is_gone
    }

    /// True when the file may not end with a footer.
    pub(crate) fn trailing_is_gone(&self) -> bool {
        self.lock().footers.trailing_is_gone
    }

    pub(crate) fn set_trailing_is_gone(&self, is_gone: bool) {
        self.lock().footers.trailing_is_gone = is_gone;
    }

    /// The first multiple of `align_bytes` behind everything that is in use or prepared, and behind a footer there.
    pub(super) fn free_from(&self, align_bytes: u64) -> u64 {
        (self.lock().next_free + SECTOR).next_multiple_of(align_bytes)
    }

    pub(crate) fn set_copy_is_bad(&self) {
        self.lock().footers.copy_is_bad = true;
    }

    /// The file is not cut before `offset_bytes` any more.
    pub(super) fn keep_until(&self, offset_bytes: u64) {
        self.lock().keep_until(offset_bytes);
    }

    /// Where the file may end at the earliest, given the end of what is in use.
    pub(crate) fn end_for(&self, used_end: u64) -> u64 {
        self.lock().keep_end.max(used_end).next_multiple_of(SECTOR)
    }

    /// Waits until no space is prepared, and keeps others from it.
    pub(crate) async fn preparing(&self) -> async_lock::MutexGuard<'_, ()> {
        self.preparing.lock().await
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, AllocState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// How many blocks were given out since the image was opened.
    pub(crate) fn given_out(&self) -> u64 {
        self.lock().given_out
    }

    /// Has flushes punch nothing, or go on with it. Then what was held stays as it is, for new blocks: it may be the space of a whole
    /// disk, and no guest's flush is to wait for that.
    pub(super) fn hold_space(&self, holds: bool) {
        let released = &mut self.lock().released;
        if std::mem::replace(&mut released.holds, holds) && !holds {
            released.lose_unsettled();
            let begun = released.begun.take().map(|(sector, _)| sector);
            released.left.extend(begun.into_iter().chain(released.settled.drain(..)));
        }
    }

    pub(crate) fn add_ready(&self, blocks: impl IntoIterator<Item = Ready>) {
        self.lock().ready.extend(blocks);
    }

    /// Forgets prepared space at the end: the file is about to be cut.
    pub(crate) fn cut(&self, used_end: u64) {
        let mut state = self.lock();
        state.ready.clear();
        state.released = Released::default();
        state.next_free = used_end;
        state.tail_is_clean = false;
        state.footers.trailing_is_gone = false;
    }
}

enum Turn {
    Placed(u32),
    Wait(event_listener::EventListener),
    Prepare,
    Place(Ready),
}

impl<S: Store> Sparse<S> {
    /// The sector of `block`, allocated if need be. The caller holds the block's lock.
    pub(super) async fn place(&self, block: u32) -> Result<Placed> {
        loop {
            match self.next_turn(block) {
                Turn::Placed(sector) => return Ok(Placed { sector, is_new: false }),
                Turn::Wait(done) => done.await,
                Turn::Prepare => self.prepare(block).await?,
                Turn::Place(ready) => {
                    let placed = self.write_new_block(block, ready).await;
                    let mut state = self.alloc.lock();
                    state.given_out += u64::from(placed.is_ok());
                    if placed.is_err() {
                        state.keep_until(self.layout.block_end(ready.sector));
                    }
                    if let Some(waiters) = state.placing.remove(&block) {
                        waiters.notify(usize::MAX);
                    }
                    return placed.map(|()| Placed { sector: ready.sector, is_new: true });
                }
            }
        }
    }

    fn next_turn(&self, block: u32) -> Turn {
        let mut state = self.alloc.lock();
        if let Some(sector) = self.bat.get(block) {
            return Turn::Placed(sector);
        }
        if let Some(waiters) = state.placing.get(&block) {
            return Turn::Wait(waiters.listen());
        }
        let Some(ready) = state.ready.pop_front() else { return Turn::Prepare };
        state.placing.insert(block, Arc::new(Event::new()));
        Turn::Place(ready)
    }

    /// True while nothing is ready, and nobody places `block` or has placed it.
    fn needs_place(&self, block: u32) -> bool {
        let state = self.alloc.lock();
        state.ready.is_empty() && self.bat.get(block).is_none() && !state.placing.contains_key(&block)
    }

    /// Rule 2: bitmap, then BAT, both cached; then the map in memory. On an error the place is leaked, not reused:
    /// its BAT entry may have reached the file.
    async fn write_new_block(&self, block: u32, ready: Ready) -> Result<()> {
        let all_ones = ready.zeroed && !self.is_differencing();
        if all_ones {
            let ones = Segments::zeroed(self.layout.bitmap_bytes as usize);
            let sectors = self.layout.sectors_per_block();
            let bits = Bits::new(sectors);
            bits.set(0..sectors);
            ones.copy_from_slice(0, &bits.to_bytes(self.layout.bitmap_bytes as usize));
            self.store.write_at(StoreOffset(u64::from(ready.sector) * SECTOR), &ones, Via::Cached).await?;
            self.bits.remove(block);
            self.bat.set_full(block, true);
        } else {
            self.bits.remove(block);
            self.bits.insert(block, Bits::new(self.layout.sectors_per_block()));
            self.bat.set_full(block, false);
        }
        let table = self.table.read().await;
        self.write_bat_entry(&table, block, ready.sector).await?;
        self.bat.set(block, ready.sector);
        Ok(())
    }

    /// Writes the entry of a block, where the table lies and where it is to lie.
    pub(super) async fn write_bat_entry(&self, table: &Table, block: u32, sector: u32) -> Result<()> {
        for at in [Some(table.at), table.next_at].into_iter().flatten() {
            let offset = StoreOffset(at + u64::from(block) * 4);
            self.store.write_at(offset, &Segments::copied(&sector.to_be_bytes()), Via::Cached).await?;
        }
        Ok(())
    }

    /// True when a step should be prepared before the last one is used up.
    pub(super) fn is_running_low(&self) -> bool {
        let state = self.alloc.lock();
        (state.ready.len() as u64) < state.step_blocks.div_ceil(2)
    }

    /// Rule 1: prepares the next step of space, unless another task has just done that, or has taken the last place for the same `block`.
    async fn prepare(&self, block: u32) -> Result<()> {
        let _one = self.alloc.preparing.lock().await;
        if !self.needs_place(block) {
            return Ok(());
        }
        let no_space = |result: &Result<()>| matches!(result, Err(error) if error.kind() == ErrorKind::NoSpace);
        let count = self.step_blocks().max(1);
        let mut done = self.prepare_step(count).await;
        if no_space(&done) && count > 1 {
            // A file may be as long as one block more needs, and no longer.
            done = self.prepare_step(1).await;
        }
        // What was released needs no longer device, and no answer of it.
        match done.is_err() && self.recycle(1).await? {
            true => Ok(()),
            false => done,
        }
    }

    /// Prepares the next step before the last one is used up, unless another task is doing that. A failure is not told
    /// here: this write has its place, and the first write that finds none gets the error.
    pub(super) async fn prepare_early(&self) {
        let Some(_one) = self.alloc.preparing.try_lock() else { return };
        if self.is_read_only() {
            return;
        }
        let count = self.step_blocks();
        if count == 0 || self.prepare_step(count).await.is_err() {
            self.alloc.lock().step_blocks = 0;
        }
    }

    /// Makes at least one block ready, and up to `count`: released ones if they are worth the syncs, then gaps, then
    /// new space.
    async fn prepare_step(&self, count: u64) -> Result<()> {
        self.settle().await?;
        if self.recycle((count / 4).clamp(1, RECYCLED_AT_ONCE)).await?
            || self.prepare_gaps(count.min(RECYCLED_AT_ONCE)).await?
        {
            return Ok(());
        }
        match self.store.info().grows_zeroed {
            true => self.grow_file(count).await,
            false => self.prepare_on_device(count).await,
        }
    }

    /// Applies rule 5, once, to what earlier sessions released, before any of those places is used. The BAT as it was
    /// read is made durable: else a power cut could leave entries that point at places that were cut off or given
    /// away. Both halves of the journal are retired: they may have records of what lay there.
    async fn settle(&self) -> Result<()> {
        let is_settled = self.alloc.lock().is_settled;
        if !is_settled {
            self.flush().await?;
            if self.journal.has_records() {
                self.flush().await?;
            }
            self.alloc.lock().is_settled = true;
        }
        Ok(())
    }

    /// Makes released blocks ready, if there are at least `least` of them. Returns true when some are ready now. (Each
    /// of the three steps of rule 5 takes a flush; readers may hold up the first.)
    async fn recycle(&self, least: u64) -> Result<bool> {
        if (self.alloc.lock().released.count() as u64) < least {
            return Ok(false);
        }
        for _ in 0..3 {
            self.flush().await?;
        }
        let mut state = self.alloc.lock();
        state.note_step();
        Ok(!state.ready.is_empty())
    }

    /// Makes places of what was left ([`Released::left`]), and in the gaps that earlier sessions left, once these are settled. True when there were any.
    async fn prepare_gaps(&self, count: u64) -> Result<bool> {
        let places = self.take_gap_places(count);
        if places.is_empty() {
            return Ok(false);
        }
        let mut ready = Vec::with_capacity(places.len());
        for sector in places {
            ready.push(self.empty_place(sector).await?);
        }
        self.alloc.lock().released.punched.extend(ready);
        // A flush gives them out when no record of the journal may name them any more. Of two that succeed one retires each half.
        for _ in 0..2 {
            self.flush().await?;
        }
        let mut state = self.alloc.lock();
        state.note_step();
        Ok(!state.ready.is_empty())
    }

    fn take_gap_places(&self, count: u64) -> Vec<u32> {
        let mut state = self.alloc.lock();
        let left = &mut state.released.left;
        let mut places = left.split_off(left.len().saturating_sub(count as usize));
        while (places.len() as u64) < count {
            let Some(gap) = state.gaps.pop() else { break };
            let more = self.places(gap.clone(), count - places.len() as u64);
            if let Some(&last) = more.last() {
                state.gaps.push(self.layout.block_end(last)..gap.end);
            }
            places.extend(more);
        }
        places
    }

    /// Makes the place of a block read as an empty one: its bytes punched, or at least its bitmap zero.
    pub(super) async fn empty_place(&self, sector: u32) -> Result<Ready> {
        let offset = StoreOffset(u64::from(sector) * SECTOR);
        let zeroed = self.store.info().punches;
        match zeroed {
            true => self.store.punch_hole(offset, self.layout.bitmap_bytes + self.layout.block_bytes).await?,
            false => {
                let zeroes = Segments::zeroed(self.layout.bitmap_bytes as usize);
                self.store.write_at(offset, &zeroes, Via::Cached).await?;
            }
        }
        Ok(Ready { sector, zeroed })
    }

    /// As [`Self::empty_place`], of blocks that lie side by side, the first one first.
    pub(super) async fn empty_places(&self, sectors: &[u32]) -> Result<Vec<Ready>> {
        let (Some(first), Some(last)) = (sectors.first(), sectors.last()) else { return Ok(Vec::new()) };
        if !self.store.info().punches {
            let mut ready = Vec::new();
            for sector in sectors {
                ready.push(self.empty_place(*sector).await?);
            }
            return Ok(ready);
        }
        let start = u64::from(*first) * SECTOR;
        self.store.punch_hole(StoreOffset(start), self.layout.block_end(*last) - start).await?;
        Ok(sectors.iter().map(|sector| Ready { sector: *sector, zeroed: true }).collect())
    }

    /// Punches about `most_bytes` of what may be punched. No flush and no end of the file comes in between: for one that is under way this waits,
    /// and does not count that time.
    pub(super) async fn give_back(&self, most_bytes: u64, timer: &dyn Timer) -> Result<GivenBack> {
        let _running = self.flusher.running.lock().await;
        let begun_ns = timer.now_ns();
        let bytes = self.punch_settled(most_bytes).await?;
        let took = Duration::from_nanos(timer.now_ns().saturating_sub(begun_ns));
        let waiting = self.alloc.lock().released.waiting.as_ref().map(|(phase, _)| *phase);
        Ok(GivenBack { bytes, took, has_readers: waiting.is_some_and(|phase| !self.grace.is_over(phase)) })
    }

    /// Punches about `most_bytes` of what is settled, and returns how many bytes that were. The caller keeps flushes out.
    async fn punch_settled(&self, most_bytes: u64) -> Result<u64> {
        if self.is_read_only() {
            return Ok(0);
        }
        let Some((sector, done)) = self.alloc.lock().released.next_beside() else { return Ok(0) };
        let (start, end) = (u64::from(sector) * SECTOR + done, self.layout.block_end(sector));
        let most_bytes = most_bytes.max(PAGE_BYTES);
        let cut = start.saturating_add(most_bytes) / PAGE_BYTES * PAGE_BYTES;
        // A small rest goes along: it would take as long as the whole.
        if cut < end && end - cut > most_bytes / 2 && self.store.info().punches {
            self.store.punch_hole(StoreOffset(start), cut - start).await?;
            self.alloc.lock().released.begun = Some((sector, cut - u64::from(sector) * SECTOR));
            return Ok(cut - start);
        }
        let mut group = vec![sector];
        if done == 0 {
            let mut state = self.alloc.lock();
            while let Some(next) = state.released.settled.last().copied()
                && (group.len() as u64 + 1) * self.layout.block_bytes <= most_bytes
                && self.are_neighbours(next, group[group.len() - 1])
            {
                state.released.settled.pop();
                group.push(next);
            }
        }
        group.reverse();
        // What is punched of a block already is punched once more, which costs nothing.
        let ready = self.empty_places(&group).await?;
        self.alloc.lock().released.punched.extend(ready);
        Ok(end - start + (group.len() as u64 - 1) * self.layout.block_bytes)
    }

    /// How many blocks of the disk have no place yet, not even a prepared one.
    pub(super) fn lacking_blocks(&self) -> u64 {
        let allocated = self.bat.allocated().count();
        (self.bat.entries() as usize).saturating_sub(allocated + self.alloc.lock().ready.len()) as u64
    }

    /// How many blocks the next step should have: never more than the disk still lacks.
    fn step_blocks(&self) -> u64 {
        let lacking = self.lacking_blocks();
        let state = self.alloc.lock();
        let bytes = match self.store.info().grows_zeroed {
            true => state.next_free.clamp(STEP_MIN_BYTES, STEP_MAX_BYTES),
            false => (state.next_free / 8).clamp(STEP_MIN_BYTES, DEVICE_STEP_MAX_BYTES),
        };
        (bytes / self.layout.block_bytes).clamp(1, STEP_MAX_BLOCKS).min(lacking)
    }

    /// The places of up to `count` blocks inside `within`. Data lie on 4 KiB boundaries, with the bitmap in the
    /// sectors before; a gap of one sector is left in front, where a footer may have been.
    fn places(&self, within: Range<u64>, count: u64) -> Vec<u32> {
        let mut places = Vec::new();
        let mut end = within.start;
        while (places.len() as u64) < count {
            let data = (end + SECTOR + self.layout.bitmap_bytes).next_multiple_of(4096);
            end = data + self.layout.block_bytes;
            match u32::try_from((data - self.layout.bitmap_bytes) / SECTOR) {
                Ok(sector) if sector != u32::MAX && end <= within.end => places.push(sector),
                _ => break,
            }
        }
        places
    }

    async fn grow_file(&self, count: u64) -> Result<()> {
        let (next_free, tail_is_clean) = {
            let state = self.alloc.lock();
            (state.next_free, state.tail_is_clean)
        };
        let places = self.places(next_free..u64::MAX, count);
        let Some(&last) = places.last() else { return Err(self.no_space()) };
        let end = self.layout.block_end(last);
        self.extend(next_free, tail_is_clean, end).await?;
        self.finish_step(places.into_iter().map(|sector| Ready { sector, zeroed: true }).collect(), end);
        Ok(())
    }

    /// Makes a file, whose used part ends at `next_free`, zero from there to `end`, where its footer is then. All of that is durable.
    async fn extend(&self, next_free: u64, tail_is_clean: bool, end: u64) -> Result<()> {
        let footer_at = next_free.next_multiple_of(SECTOR);
        if !tail_is_clean {
            self.clean_tail(footer_at).await?;
        }
        match self.lengthen(end).await {
            Ok(()) => Ok(()),
            Err(error) => {
                self.take_back(footer_at).await;
                Err(error)
            }
        }
    }

    /// Takes `range`, which begins at [`Alloc::free_from`], for metadata. It is zero then. The caller keeps others from preparing
    /// space.
    pub(super) async fn take_room(&self, range: &Range<u64>) -> Result<()> {
        let (next_free, tail_is_clean) = {
            let state = self.alloc.lock();
            (state.next_free, state.tail_is_clean)
        };
        match self.store.info().grows_zeroed {
            true => self.extend(next_free, tail_is_clean, range.end).await?,
            false => {
                if range.end > self.blocks_limit() {
                    self.has_grown().await?;
                }
                if range.end > self.blocks_limit() {
                    return Err(self.no_space());
                }
                self.store.zero_range(StoreOffset(range.start), range.end - range.start).await?;
            }
        }
        let mut state = self.alloc.lock();
        state.tail_is_clean = true;
        state.next_free = range.end;
        Ok(())
    }

    /// Has both footers in their places, whole and durable. The caller keeps others from preparing space.
    pub(super) async fn restore_footers(&self) -> Result<()> {
        self.mend_copy().await?;
        let (next_free, is_clean) = {
            let state = self.alloc.lock();
            (state.next_free, state.tail_is_clean && !state.footers.trailing_is_gone)
        };
        match self.store.info().grows_zeroed {
            _ if is_clean => {}
            true => self.clean_tail(next_free.next_multiple_of(SECTOR)).await?,
            false => {
                self.write_footer_at(self.footer_at()).await?;
                self.store.sync().await?;
                self.alloc.set_trailing_is_gone(false);
            }
        }
        self.alloc.lock().tail_is_clean = true;
        Ok(())
    }

    /// Ends the file with a footer at `at`, behind the last block, and has the copy at the start whole. An earlier process may
    /// have left bytes there: they are cut off, so that the file grows zeroes. The footer is durable before the cut, so that the
    /// file never ends with a block: a guest may have written what looks like a footer there.
    async fn clean_tail(&self, at: u64) -> Result<()> {
        self.mend_copy().await?;
        if self.store.len_bytes() == at + SECTOR && !self.alloc.trailing_is_gone() {
            return Ok(());
        }
        self.alloc.set_trailing_is_gone(true);
        self.write_footer_at(at).await?;
        self.store.sync().await?;
        self.store.set_len(at + SECTOR).await?;
        self.alloc.set_trailing_is_gone(false);
        Ok(())
    }

    /// Moves the end of the file, with its footer, to `end`.
    async fn lengthen(&self, end: u64) -> Result<()> {
        self.alloc.set_trailing_is_gone(true);
        self.store.set_len(end + SECTOR).await?;
        self.write_footer_at(end).await?;
        self.store.sync().await?;
        self.alloc.set_trailing_is_gone(false);
        Ok(())
    }

    /// Ends the file again where it ended before it was to grow, with the footer at `footer_at`. When that fails, the file ends
    /// with zeroes, and the copy at the start counts.
    async fn take_back(&self, footer_at: u64) {
        if self.store.set_len(footer_at + SECTOR).await.is_ok() {
            self.alloc.set_trailing_is_gone(false);
        }
    }

    /// Writes the footer's copy at the start anew, and durably, if it was bad.
    pub(super) async fn mend_copy(&self) -> Result<()> {
        if !self.alloc.lock().footers.copy_is_bad {
            return Ok(());
        }
        self.write_footer_at(0).await?;
        self.store.sync().await?;
        self.alloc.lock().footers.copy_is_bad = false;
        Ok(())
    }

    async fn prepare_on_device(&self, count: u64) -> Result<()> {
        let prepared = self.prepare_behind(count).await;
        self.tell_room(&prepared);
        prepared
    }

    async fn prepare_behind(&self, count: u64) -> Result<()> {
        // Somebody may make the device longer at any time, and then the footer at its end is not at its end any more.
        self.mend_copy().await?;
        let next_free = self.alloc.lock().next_free;
        let mut places = self.places(next_free..self.blocks_limit(), count);
        if places.is_empty() && self.has_grown().await? {
            places = self.places(next_free..self.blocks_limit(), count);
        }
        let Some(&last) = places.last() else { return Err(self.no_space()) };
        let mut ready = Vec::with_capacity(places.len());
        for &sector in &places {
            ready.push(self.empty_place(sector).await?);
        }
        self.store.sync().await?;
        self.finish_step(ready, self.layout.block_end(last));
        Ok(())
    }

    fn finish_step(&self, ready: Vec<Ready>, end: u64) {
        let mut state = self.alloc.lock();
        state.tail_is_clean = true;
        state.next_free = end;
        state.step_blocks = ready.len() as u64;
        state.ready.extend(ready);
    }

    pub(super) fn no_space(&self) -> Error {
        Error::new(ErrorKind::NoSpace, "no room for another block")
            .at_path(self.store.path())
            .at_offset(self.store.len_bytes())
            .hint("enlarge the volume under the image, or discard what the guest does not need")
    }
}
