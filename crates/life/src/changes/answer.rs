//! What the changed blocks of a disk say, and how they are closed.

use std::ops::Range;
use std::sync::Arc;

use spile_core::{Disk as _, Error, ErrorKind, Extent, Files, GuestOffset, Result, Segment, Store, yield_now};
use spile_image::Graph;

use super::bits::Bits;
use super::header::{Header, Interval, Stamp};
use super::loss::remove_own;
use super::tracked::Tracked;
use super::{Changes, Checkpoint, Loss, State, find, forget_last};

/// So many blocks of each interval are counted in one go.
const STEP_BLOCKS: u64 = 1 << 16;

/// So many runs of an image are noted at once.
const RUNS_AT_ONCE: usize = 1 << 16;

/// What may have changed since a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changed {
    /// The ranges, in order; no two touch.
    pub ranges: Vec<Extent>,
    /// The size of a block in bytes: ranges begin and end with blocks, or with the disk.
    pub block_bytes: u32,
    /// Why more counts as changed than was written, if it does.
    pub warning: Option<String>,
}

impl Changed {
    /// The bytes in all ranges.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.len_bytes).sum()
    }
}

impl<F: Files + Clone> Changes<F> {
    /// What may have changed since the checkpoint `name` of the disk, which is `disk_bytes` long now.
    ///
    /// # Errors
    /// `NotFound` when there is no such checkpoint.
    pub async fn since(&self, name: &str, disk_bytes: u64) -> Result<Changed> {
        self.between(name, None, 0..disk_bytes, disk_bytes).await
    }

    /// What may have changed from the checkpoint `name` to the later checkpoint `until`, or to now, in the part `within` of the disk, which is
    /// `disk_bytes` long now. Ranges begin and end with blocks, so they may be longer than that part.
    ///
    /// # Errors
    /// `NotFound` when there is no such checkpoint; `InvalidInput` when `until` is not later.
    pub async fn between(
        &self,
        name: &str,
        until: Option<&str>,
        within: Range<u64>,
        disk_bytes: u64,
    ) -> Result<Changed> {
        let state = self.state.lock().await;
        let within = within.start.min(disk_bytes)..within.end.min(disk_bytes);
        if state.is_damaged {
            return Ok(state.changed_everywhere(within, "the file of changed blocks is damaged"));
        }
        let number = |name: &str| find(&state.header, name).map_err(|error| error.at_path(&self.path));
        let first = number(name)?;
        let end = until.map(number).transpose()?.unwrap_or(state.header.intervals.len());
        if end <= first {
            let what = format!("the checkpoint {:?} is not later than {name:?}", until.unwrap_or_default());
            return Err(Error::new(ErrorKind::InvalidInput, what));
        }
        if let Some(Loss { why, .. }) = self.giving.loss() {
            return Ok(state.changed_everywhere(within, &format!("changes are not tracked any more: {why}")));
        }
        Ok(state.between(first..end, within, disk_bytes))
    }

    /// The names of the checkpoints, oldest first, and the size of a block in bytes.
    pub async fn names(&self) -> (Vec<String>, u32) {
        let state = self.state.lock().await;
        let names = state.header.intervals.iter().map(|interval| interval.name.clone()).collect();
        (names, state.header.grain.block_bytes)
    }

    /// Why changes are not tracked any more, if that is so.
    pub fn loss(&self) -> Option<&Loss> {
        self.giving.loss()
    }

    /// The disk has another image now, which looks like `stamp`. A process that is killed before this returns leaves a disk of which
    /// everything counts as changed.
    ///
    /// # Errors
    /// The system's.
    pub async fn note_image(&self, stamp: Stamp) -> Result<()> {
        let mut state = self.state.lock().await;
        let is_same = state.header.stamp.is_same_file(&stamp);
        if state.is_damaged || is_same || self.is_read_only || self.giving.loss().is_some() {
            return Ok(());
        }
        let mut header = state.header.clone();
        header.set_stamp(stamp);
        self.write(&mut state, header).await
    }

    /// The checkpoints, oldest first. Others run in between: there may be many bits to count.
    pub async fn checkpoints(&self, disk_bytes: u64) -> Vec<Checkpoint> {
        let (header, tracked) = {
            let state = self.state.lock().await;
            (state.header.clone(), state.tracked.clone())
        };
        let changed = match self.giving.loss() {
            Some(_) => vec![disk_bytes; header.intervals.len()],
            None => count_changed(&header, &tracked, disk_bytes).await,
        };
        let checkpoint = |(interval, changed_bytes): (Interval, u64)| Checkpoint {
            name: interval.name,
            created_unix_s: interval.created_unix_s,
            changed_bytes,
            is_bitmap: interval.is_bitmap,
        };
        header.intervals.into_iter().zip(changed).map(checkpoint).collect()
    }

    /// Which disk these are of: the same wherever the disk goes. `None` where that is not said.
    pub async fn disk_id(&self) -> Option<[u8; 16]> {
        Some(self.state.lock().await.header.id).filter(|id| *id != [0; 16])
    }

    /// When the checkpoint `name` was made, in seconds since 1970 UTC.
    ///
    /// # Errors
    /// `NotFound`.
    pub async fn made_at(&self, name: &str) -> Result<u64> {
        let state = self.state.lock().await;
        let number = find(&state.header, name)?;
        Ok(state.header.intervals[number].created_unix_s)
    }

    /// Why nobody knows which checkpoints the disk has had, if that is so.
    pub async fn damage(&self) -> Option<&'static str> {
        self.state.lock().await.is_damaged.then_some("the file of changed blocks is damaged")
    }

    /// The whole disk counts as changed since each checkpoint that there is. Durable when it returns: it is to be called before the disk gets
    /// another content by other ways than requests.
    ///
    /// # Errors
    /// The system's.
    pub async fn forget_all(&self) -> Result<()> {
        let mut state = self.state.lock().await;
        if self.giving.loss().is_some() {
            return Ok(());
        }
        let mut header = state.header.clone();
        forget_last(&mut header);
        self.write(&mut state, header).await
    }

    /// Has the blocks of `runs` count as changed since each checkpoint that there is. Durable when it returns: it is to be called before the disk
    /// gets other bytes there by other ways than requests. Requests may go on meanwhile.
    ///
    /// # Errors
    /// `Io` when changes are not tracked any more; the system's.
    pub async fn note(&self, runs: &[Extent]) -> Result<()> {
        let state = self.state.lock().await;
        self.check_usable(&state)?;
        let Some(last) = state.tracked.last() else { return Ok(()) };
        last.set_runs(runs).await?;
        match last.is_lost() {
            true => Err(Error::new(ErrorKind::Io, "the file of changed blocks was cut short").at_path(&self.path)),
            false => Ok(()),
        }
    }

    /// As [`Changes::note`]. Where `runs` cannot be noted, everything counts as changed.
    ///
    /// # Errors
    /// The system's, where that cannot be noted either.
    pub async fn note_surely(&self, runs: &[Extent]) -> Result<()> {
        match self.note(runs).await {
            Ok(()) => Ok(()),
            Err(_) => self.forget_all().await,
        }
    }

    /// The disk `from` is about to be what `to` is: what it loses and what it gets counts as changed from now on, durably. That is all that is in the images
    /// that only one of both has.
    ///
    /// # Errors
    /// Those of the images; the system's.
    pub async fn note_difference<S: Store>(&self, from: &Graph<S>, to: &Graph<S>) -> Result<()> {
        let (of_from, of_to) = (from.layers(), to.layers());
        let both = of_from.iter().rev().zip(of_to.iter().rev());
        let shared = both.take_while(|(one, other)| one.path == other.path).count();
        // A disk that becomes shorter, and longer again later, has lost what lay there.
        let (size, was) = (to.size_bytes().min(from.size_bytes()), from.size_bytes());
        self.note_surely(&[Extent::from_range(size..was)]).await?;
        self.note_layers(from, of_from.len() - shared).await?;
        self.note_layers(to, of_to.len() - shared).await
    }

    /// What the first `layers` images of `graph` have counts as changed.
    async fn note_layers<S: Store>(&self, graph: &Graph<S>, layers: usize) -> Result<()> {
        let (mut at, end) = (0, graph.size_bytes());
        while at < end {
            let runs = graph.own_runs_of(layers, Extent::from_range(at..end), RUNS_AT_ONCE).await?;
            at = if runs.len() < RUNS_AT_ONCE { end } else { runs[runs.len() - 1].end() };
            self.note_surely(&runs).await?;
        }
        Ok(())
    }

    /// Closes the changed blocks of a disk that is closed, and whose image looks like `stamp` now. Without a checkpoint nothing
    /// is left of them. Another process can have the file once this value and the disk's node are dropped.
    ///
    /// # Errors
    /// The system's. The next one to open them then knows as much as after the death of this process.
    pub async fn close(&self, stamp: Stamp) -> Result<()> {
        let mut state = self.state.lock().await;
        match state.header.intervals.is_empty() {
            _ if self.is_read_only || self.giving.loss().is_some() => Ok(()),
            false => {
                let settled = self.settle_all(&mut state, stamp).await;
                if let Err(error) = &settled {
                    self.giving.up(error).await;
                }
                settled
            }
            true if state.is_damaged => Ok(()),
            true => remove_own(&self.around.files, &self.store, &self.path).await,
        }
    }

    /// Removes the file of a disk that has no checkpoint any more, as one that has gone to another place.
    ///
    /// # Errors
    /// The system's.
    pub async fn leave(&self) -> Result<()> {
        let _state = self.state.lock().await;
        if self.is_read_only || self.giving.loss().is_some() {
            return Ok(());
        }
        remove_own(&self.around.files, &self.store, &self.path).await
    }
}

impl<S: spile_core::Store> State<S> {
    /// What may have changed in the intervals of these numbers, in the part `within` of the disk.
    pub(super) fn between(&self, numbers: Range<usize>, within: Range<u64>, disk_bytes: u64) -> Changed {
        let block_bytes = u64::from(self.header.grain.block_bytes);
        let base = within.start / block_bytes / 64 * 64;
        let count = within.end.div_ceil(block_bytes).saturating_sub(base);
        let all = Bits::new(Segment::zeroed(count.div_ceil(64) as usize * 8), count);
        let mut is_unknown = false;
        for (interval, tracked) in self.header.intervals[numbers.clone()].iter().zip(&self.tracked[numbers]) {
            all.or_from(tracked.bits(), base);
            let known = known_blocks(interval, tracked, block_bytes, disk_bytes);
            all.set(known.saturating_sub(base).min(count)..count);
            is_unknown |= interval.covered_bytes == 0 || tracked.is_lost();
        }
        let warning = "what has changed since is not known: the disk was changed without its checkpoints, by another program or by a command that forgets \
                       them, or what was noted is damaged or lost; so everything counts as changed";
        all.clear(0..(within.start / block_bytes - base).min(count));
        Changed {
            ranges: ranges(&all, base, block_bytes, disk_bytes),
            block_bytes: self.header.grain.block_bytes,
            warning: is_unknown.then(|| warning.to_owned()),
        }
    }

    fn changed_everywhere(&self, within: Range<u64>, why: &str) -> Changed {
        let whole = Extent { offset: GuestOffset(within.start), len_bytes: within.end - within.start };
        Changed {
            ranges: if whole.is_empty() { Vec::new() } else { vec![whole] },
            block_bytes: self.header.grain.block_bytes,
            warning: Some(format!("{why}: everything counts as changed")),
        }
    }
}

/// How many blocks from the disk's begin on the bits of `interval` tell of. All after them count as changed.
fn known_blocks<S: Store>(interval: &Interval, tracked: &Tracked<S>, block_bytes: u64, disk_bytes: u64) -> u64 {
    match interval.covered_bytes {
        _ if tracked.is_lost() => 0,
        covered if covered == disk_bytes => disk_bytes.div_ceil(block_bytes),
        // A block of which only a part is covered counts as changed, unless the disk ends there.
        covered => covered / block_bytes,
    }
}

/// For each interval, the bytes in blocks that may have changed since it began.
async fn count_changed<S: Store>(header: &Header, tracked: &[Arc<Tracked<S>>], disk_bytes: u64) -> Vec<u64> {
    let block_bytes = u64::from(header.grain.block_bytes);
    let blocks = disk_bytes.div_ceil(block_bytes);
    let mut changed = vec![0; tracked.len()];
    let all = Bits::new(Segment::zeroed(STEP_BLOCKS as usize / 8), STEP_BLOCKS);
    for base in (0..blocks).step_by(STEP_BLOCKS as usize) {
        let count = STEP_BLOCKS.min(blocks - base);
        all.clear(0..STEP_BLOCKS);
        // What has changed since a checkpoint has changed since each earlier one, too.
        for (number, (interval, tracked)) in header.intervals.iter().zip(tracked).enumerate().rev() {
            all.or_from(tracked.bits(), base);
            let known = known_blocks(interval, tracked, block_bytes, disk_bytes);
            all.set(known.saturating_sub(base).min(count)..count);
            all.clear(count..STEP_BLOCKS);
            changed[number] += all.count_ones() * block_bytes;
            // The disk's last block may be a short one.
            if base + count == blocks && all.all_set(count - 1..count) {
                changed[number] -= blocks * block_bytes - disk_bytes;
            }
        }
        yield_now().await;
    }
    changed
}

/// The ranges of blocks that are set, joined. Bit 0 stands for the block `base`.
fn ranges(bits: &Bits, base: u64, block_bytes: u64, disk_bytes: u64) -> Vec<Extent> {
    let mut ranges: Vec<Extent> = Vec::new();
    for block in bits.ones().map(|bit| base + bit) {
        let (start, end) = (block * block_bytes, ((block + 1) * block_bytes).min(disk_bytes));
        match ranges.last_mut() {
            Some(last) if last.offset.0 + last.len_bytes == start => last.len_bytes += end - start,
            _ => ranges.push(Extent { offset: GuestOffset(start), len_bytes: end - start }),
        }
    }
    ranges
}
