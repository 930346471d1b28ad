//! What the changed blocks of a disk say, and how they are closed.

use spile_core::{Extent, Files, GuestOffset, Result, Segment};

use super::bits::Bits;
use super::header::Stamp;
use super::{Changes, Checkpoint, State, find, forget_last};

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

impl<F: Files> Changes<F> {
    /// What may have changed since the checkpoint `name` of the disk, which is `disk_bytes` long now.
    ///
    /// # Errors
    /// `NotFound` when there is no such checkpoint.
    pub async fn since(&self, name: &str, disk_bytes: u64) -> Result<Changed> {
        let state = self.state.lock().await;
        if state.is_damaged {
            return Ok(state.changed_everywhere(disk_bytes, "the file of changed blocks is damaged"));
        }
        let first = find(&state.header, name).map_err(|error| error.at_path(&self.path))?;
        Ok(state.since(first, disk_bytes))
    }

    /// The checkpoints, oldest first.
    pub async fn checkpoints(&self, disk_bytes: u64) -> Vec<Checkpoint> {
        let state = self.state.lock().await;
        let checkpoint = |(number, interval): (usize, &super::Interval)| Checkpoint {
            name: interval.name.clone(),
            created_unix_s: interval.created_unix_s,
            changed_bytes: state.since(number, disk_bytes).bytes(),
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
        match state.header.intervals.len().checked_sub(1) {
            Some(last) => {
                state.header.stamp = stamp;
                self.settle(&mut state, last).await
            }
            None if state.is_damaged => Ok(()),
            None => self.around.files.remove(&self.path).await,
        }
    }
}

impl<S: spile_core::Store> State<S> {
    /// What may have changed since the interval of number `first` began.
    fn since(&self, first: usize, disk_bytes: u64) -> Changed {
        let block_bytes = u64::from(self.header.grain.block_bytes);
        let blocks = disk_bytes.div_ceil(block_bytes);
        let all = Bits::new(Segment::zeroed(blocks.div_ceil(64) as usize * 8), blocks);
        for (interval, tracked) in self.header.intervals.iter().zip(&self.tracked).skip(first) {
            all.or(tracked.bits());
            // A block of which only a part is covered counts as changed, unless the disk ends there.
            let known = match interval.covered_bytes {
                _ if tracked.bits().is_lost() => 0,
                covered if covered == disk_bytes => blocks,
                covered => covered / block_bytes,
            };
            all.set(known.min(blocks)..blocks);
        }
        let mut known = self.header.intervals.iter().zip(&self.tracked).skip(first);
        let is_unknown = known.any(|(interval, tracked)| interval.covered_bytes == 0 || tracked.bits().is_lost());
        let warning = "the disk was changed in a way that was not seen, or what was known is damaged: everything counts as changed";
        Changed {
            ranges: ranges(&all, block_bytes, disk_bytes),
            block_bytes: self.header.grain.block_bytes,
            warning: is_unknown.then(|| warning.to_owned()),
        }
    }

    fn changed_everywhere(&self, disk_bytes: u64, why: &str) -> Changed {
        let ranges = vec![Extent { offset: GuestOffset(0), len_bytes: disk_bytes }];
        Changed {
            ranges,
            block_bytes: self.header.grain.block_bytes,
            warning: Some(format!("{why}: everything counts as changed")),
        }
    }
}

/// The ranges of blocks that are set, joined.
fn ranges(bits: &Bits, block_bytes: u64, disk_bytes: u64) -> Vec<Extent> {
    let mut ranges: Vec<Extent> = Vec::new();
    for block in bits.ones() {
        let (start, end) = (block * block_bytes, ((block + 1) * block_bytes).min(disk_bytes));
        match ranges.last_mut() {
            Some(last) if last.offset.0 + last.len_bytes == start => last.len_bytes += end - start,
            _ => ranges.push(Extent { offset: GuestOffset(start), len_bytes: end - start }),
        }
    }
    ranges
}
