//! What the changed blocks of a disk say, and how they are closed.

use std::ops::Range;

use spile_core::{Error, ErrorKind, Extent, Files, GuestOffset, Result, Segment};

use super::bits::Bits;
use super::header::{Header, Stamp};
use super::{Changes, Checkpoint, Loss, State, find, forget_last};

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
        let end = until.map(number).transpose()?.unwrap_or(state.tracked.len());
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
        if state.is_damaged || state.header.stamp.is_same_file(&stamp) || self.giving.loss().is_some() {
            return Ok(());
        }
        let header = Header { stamp, ..state.header.clone() };
        self.write(&mut state, header).await
    }

    /// The checkpoints, oldest first.
    pub async fn checkpoints(&self, disk_bytes: u64) -> Vec<Checkpoint> {
        let state = self.state.lock().await;
        let checkpoint = |(number, interval): (usize, &super::Interval)| Checkpoint {
            name: interval.name.clone(),
            created_unix_s: interval.created_unix_s,
            changed_bytes: state.between(number..state.tracked.len(), 0..disk_bytes, disk_bytes).bytes(),
        };
        state.header.intervals.iter().enumerate().map(checkpoint).collect()
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
        let mut header = state.header.clone();
        forget_last(&mut header);
        self.write(&mut state, header).await
    }

    /// Closes the changed blocks of a disk that is closed, and whose image looks like `stamp` now. Without a checkpoint nothing
    /// is left of them. Another process can have the file once this value and the disk's node are dropped.
    ///
    /// # Errors
    /// The system's. The next one to open them then knows as much as after the death of this process.
    pub async fn close(&self, stamp: Stamp) -> Result<()> {
        let mut state = self.state.lock().await;
        match state.header.intervals.is_empty() {
            _ if self.giving.loss().is_some() => Ok(()),
            false => {
                let settled = self.settle_all(&mut state, stamp).await;
                if let Err(error) = &settled {
                    self.giving.up(error).await;
                }
                settled
            }
            true if state.is_damaged => Ok(()),
            true => self.around.files.remove(&self.path).await,
        }
    }

    /// Removes the file of a disk that has gone to another place, where it has no checkpoints.
    ///
    /// # Errors
    /// The system's.
    pub async fn leave(&self) -> Result<()> {
        let _state = self.state.lock().await;
        if self.giving.loss().is_some() { Ok(()) } else { self.around.files.remove(&self.path).await }
    }
}

impl<S: spile_core::Store> State<S> {
    /// What may have changed in the intervals of these numbers, in the part `within` of the disk.
    fn between(&self, numbers: Range<usize>, within: Range<u64>, disk_bytes: u64) -> Changed {
        let block_bytes = u64::from(self.header.grain.block_bytes);
        let blocks = disk_bytes.div_ceil(block_bytes);
        let base = within.start / block_bytes / 64 * 64;
        let count = within.end.div_ceil(block_bytes).saturating_sub(base);
        let all = Bits::new(Segment::zeroed(count.div_ceil(64) as usize * 8), count);
        let mut is_unknown = false;
        for (interval, tracked) in self.header.intervals[numbers.clone()].iter().zip(&self.tracked[numbers]) {
            all.or_from(tracked.bits(), base);
            // A block of which only a part is covered counts as changed, unless the disk ends there.
            let known = match interval.covered_bytes {
                _ if tracked.is_lost() => 0,
                covered if covered == disk_bytes => blocks,
                covered => covered / block_bytes,
            };
            all.set(known.saturating_sub(base).min(count)..count);
            is_unknown |= interval.covered_bytes == 0 || tracked.is_lost();
        }
        let warning = "the disk was changed in a way that was not seen, or what was known is damaged: everything counts as changed";
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
