//! Flush and close: what makes acknowledged writes durable, in the order of the rules in the module above.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use spile_core::{Error, ErrorKind, Result, Segments, Store, StoreOffset, Via};

use super::alloc::Ready;
use super::check::write_batmap;
use super::codec::batmap::BatmapHeader;
use super::journal::{Pending, Turned};
use super::{SECTOR, Sparse};

/// Joins concurrent flushes: a caller is served by any run that begins after its call.
pub(crate) struct Flusher {
    pub(super) running: async_lock::Mutex<()>,
    /// Runs that began.
    begun: AtomicU64,
    /// The last run that ended, and how.
    ended: Mutex<(u64, Option<Error>)>,
    batmap_valid: AtomicBool,
    /// The BAT in the file may differ from the one in memory.
    broken: AtomicBool,
    voiding: async_lock::Mutex<()>,
}

impl Flusher {
    pub(crate) fn new(batmap_valid: bool) -> Self {
        Self {
            running: async_lock::Mutex::new(()),
            begun: AtomicU64::new(0),
            ended: Mutex::new((0, None)),
            batmap_valid: AtomicBool::new(batmap_valid),
            broken: AtomicBool::new(false),
            voiding: async_lock::Mutex::new(()),
        }
    }
}

impl Flusher {
    /// The batmap calls no block full.
    pub(super) fn note_void_batmap(&self) {
        self.batmap_valid.store(false, Ordering::Release);
    }

    /// From now on every write fails, until the image is opened again.
    pub(super) fn refuse_writes(&self) {
        self.broken.store(true, Ordering::Release);
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }
}

impl<S: Store> Sparse<S> {
    /// Makes everything that was acknowledged before the call durable.
    pub(crate) async fn flush(&self) -> Result<()> {
        let came = self.flusher.begun.load(Ordering::SeqCst);
        let _running = self.flusher.running.lock().await;
        {
            let ended = self.flusher.ended.lock().unwrap_or_else(|e| e.into_inner());
            if ended.0 > came {
                return ended.1.as_ref().map_or(Ok(()), |error| Err(error.duplicate()));
            }
        }
        let run = self.flusher.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let result = self.flush_once().await;
        if result.is_err() {
            // The medium may name these blocks for ever: no later sync has to write what one has failed to write.
            self.alloc.lock().released.lose_unsettled();
        }
        let error = result.as_ref().err().map(Error::duplicate);
        *self.flusher.ended.lock().unwrap_or_else(|e| e.into_inner()) = (run, error);
        result
    }

    async fn flush_once(&self) -> Result<()> {
        if self.is_read_only() {
            return Ok(());
        }
        let (gone, punched) = self.take_released();
        if !self.journal.has_records() {
            self.store.sync().await?;
            self.alloc.add_ready(punched);
            return self.punch_released(gone).await;
        }
        let Turned { half, pending, has_left } = self.journal.turn().await;
        let bitmaps = self.snapshot(&pending);
        self.store.sync().await?;
        let retired = self.retire_half(half, bitmaps).await;
        // Not before: a record may name the place together with a block that may get it again, and the next process would believe it.
        match retired.is_ok() && !has_left {
            true => self.alloc.add_ready(punched),
            false => self.alloc.lock().released.punched.extend(punched),
        }
        retired?;
        self.punch_released(gone).await
    }

    /// Writes the bitmaps that the journal's half has records for, and drops it.
    async fn retire_half(&self, half: usize, bitmaps: Vec<(u32, Segments)>) -> Result<()> {
        for (sector, bytes) in bitmaps {
            self.store.write_at(StoreOffset(u64::from(sector) * SECTOR), &bytes, Via::Cached).await?;
        }
        self.store.sync().await?;
        self.journal.retire(&self.store, half).await
    }

    /// The bitmaps as they are now: every bit in them has its data written, and the sync to come makes these durable.
    fn snapshot(&self, pending: &Pending) -> Vec<(u32, Segments)> {
        let len = self.layout.bitmap_bytes as usize;
        pending
            .iter()
            .filter(|(block, (sector, _))| self.bat.get(**block) == Some(*sector))
            .map(|(_, (sector, bits))| (*sector, Segments::copied(&bits.to_bytes(len))))
            .collect()
    }

    /// How many released blocks without readers the coming sync settles, and the punched ones that it makes ready.
    fn take_released(&self) -> (usize, Vec<Ready>) {
        let mut state = self.alloc.lock();
        let released = &mut state.released;
        if released.waiting.is_none() && !released.fresh.is_empty() {
            released.waiting = Some((self.grace.turn(), std::mem::take(&mut released.fresh)));
        }
        let over = released.waiting.as_ref().is_some_and(|(phase, _)| self.grace.is_over(*phase));
        let gone = released.waiting.take_if(|_| over).map_or_else(Vec::new, |(_, blocks)| blocks);
        (released.add_gone(gone), std::mem::take(&mut released.punched))
    }

    /// Rule 5: punches blocks and bitmaps whose release is durable and which nobody reads any more. Neighbours go together: a punch waits
    /// for all reads of the file, however much it punches.
    async fn punch_released(&self, settled: usize) -> Result<()> {
        let mut sectors = {
            let released = &mut self.alloc.lock().released;
            released.settle(settled);
            released.next_to_punch()
        };
        sectors.sort_unstable();
        for group in sectors.chunk_by(|one, next| self.are_neighbours(*one, *next)) {
            let places = self.empty_places(group).await?;
            self.alloc.lock().released.punched.extend(places);
        }
        Ok(())
    }

    /// True when the blocks at these sectors have nothing between them but a gap in which nothing lies: all metadata come before them.
    pub(super) fn are_neighbours(&self, one: u32, next: u32) -> bool {
        let (start, end, next) = (u64::from(one) * SECTOR, self.layout.block_end(one), u64::from(next) * SECTOR);
        end <= next && next - end < 4096 && start >= self.head().metadata_end
    }

    pub(super) async fn write_footer_at(&self, offset: u64) -> Result<()> {
        self.store.write_at(StoreOffset(offset), &Segments::copied(&self.head().footer.to_bytes()), Via::Cached).await
    }

    /// Makes the batmap void, once and durably, before a block's bitmap may lose bits.
    pub(super) async fn void_batmap(&self) -> Result<()> {
        let head = self.head();
        let Some(batmap) = &head.batmap else { return Ok(()) };
        let _one = self.flusher.voiding.lock().await;
        if self.flusher.batmap_valid.load(Ordering::Acquire) {
            let range = batmap.header.map_bytes();
            let empty = vec![0; (range.end - range.start) as usize];
            write_batmap(&self.store, batmap, &empty, &head.footer).await?;
            self.store.sync().await?;
            self.flusher.note_void_batmap();
        }
        Ok(())
    }

    /// Rule 6: leaves the file as other programs expect it; the image can still be read. No request that changes it may be
    /// in flight. Reads and flushes may: those of a graph in which it is a parent.
    pub(super) async fn seal(&self) -> Result<()> {
        let sealed = self.seal_now().await;
        // Work that has nothing left to do still has the file open, and its lock.
        self.beside.wait_for_none().await;
        sealed
    }

    async fn seal_now(&self) -> Result<()> {
        // What runs beside requests ends first, and nothing begins behind it.
        let _preparing = self.alloc.preparing().await;
        self.flush().await?;
        // A flush that ran beside this would empty released places behind the end at which the file is cut. One that waits
        // finds the image read-only and durable.
        let _running = self.flusher.running.lock().await;
        if !self.is_read_only() {
            self.end_file_if_room().await?;
            self.read_only.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// As [`Self::end_file`]. Everything is durable before it, and no reader needs what it writes: a full file system is no failure.
    /// The file then keeps unused space at its end, or an invalid batmap, and a check says so. It is a failure where the file has no
    /// footer at its end: a guest may have written what looks like one there.
    async fn end_file_if_room(&self) -> Result<()> {
        match self.end_file().await {
            Err(error) if error.kind() == ErrorKind::NoSpace && !self.alloc.trailing_is_gone() => {
                self.store.sync().await
            }
            ended => ended,
        }
    }

    async fn end_file(&self) -> Result<()> {
        self.mend_copy().await?;
        if !self.store.info().grows_zeroed {
            // Other programs look for it where the device ends now.
            self.write_footer_at(self.store.look_for_growth().await? - SECTOR).await?;
            self.write_batmap().await?;
            return self.store.sync().await;
        }
        if self.alloc.needs_footer() || self.has_spare_tail() {
            self.cut_tail().await?;
        }
        self.write_batmap().await?;
        self.store.sync().await
    }

    /// True when space lies behind the last block of a file of ours, as a process that was killed leaves it.
    fn has_spare_tail(&self) -> bool {
        let most = self.alloc.end_for(self.used_end()) + self.layout.slack_bytes() + SECTOR;
        self.layout.journal.is_some() && self.store.len_bytes() > most
    }

    /// Moves the trailing footer to the end of the last block, and ends the file there.
    pub(super) async fn cut_tail(&self) -> Result<()> {
        let end = self.alloc.end_for(self.used_end());
        match self.write_footer_at(end).await {
            Ok(()) => self.store.sync().await?,
            Err(error) if error.kind() == ErrorKind::NoSpace => return self.cut_before_footer(end).await,
            Err(error) => return Err(error),
        }
        self.alloc.cut(end);
        self.store.set_len(end + SECTOR).await
    }

    /// Ends the file behind `end`, where its file system has no room for the footer: the cut gives it the room of the old one. In between the file ends
    /// with zeroes, and the copy at the start counts, which is whole and durable before.
    async fn cut_before_footer(&self, end: u64) -> Result<()> {
        self.mend_copy().await?;
        self.store.sync().await?;
        self.alloc.cut(end);
        self.alloc.set_trailing_is_gone(true);
        self.store.set_len(end + SECTOR).await?;
        self.store.sync().await?;
        self.write_footer_at(end).await?;
        self.store.sync().await?;
        self.alloc.set_trailing_is_gone(false);
        Ok(())
    }

    /// One past the last byte that anything refers to.
    pub(super) fn used_end(&self) -> u64 {
        let blocks = self.bat.allocated().map(|(_, sector)| self.layout.block_end(sector)).max();
        blocks.unwrap_or(0).max(self.head().metadata_end)
    }

    /// The map of full blocks, as long as `header` says.
    pub(super) fn batmap_bytes(&self, header: &BatmapHeader) -> Vec<u8> {
        let range = header.map_bytes();
        let mut map = vec![0u8; (range.end - range.start) as usize];
        for (block, _) in self.bat.allocated().filter(|(block, _)| self.bat.is_full(*block)) {
            map[block as usize / 8] |= 0x80 >> (block % 8);
        }
        map
    }

    async fn write_batmap(&self) -> Result<()> {
        let head = self.head();
        let Some(batmap) = &head.batmap else { return Ok(()) };
        let map = self.batmap_bytes(&batmap.header);
        write_batmap(&self.store, batmap, &map, &head.footer).await?;
        self.flusher.batmap_valid.store(true, Ordering::Release);
        Ok(())
    }
}
