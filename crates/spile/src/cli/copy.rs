//! The common part of `convert` and `compare`: a disk's data in chunks, several at a time or one after the other.

use std::cell::RefCell;

use futures_util::future::join_all;
use spile_core::{Disk, Extent, ExtentKind, Result, Segments};

/// The most bytes in one chunk.
pub const CHUNK_BYTES: u64 = 1 << 20;
/// Chunks worked on at a time.
const IN_FLIGHT: usize = 8;
/// Runs of a map asked for at a time.
const RUNS_AT_ONCE: usize = 256;

/// A run of a disk, cut into chunks.
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    /// Its place on the disk.
    pub extent: Extent,
    /// True unless the run is known to read as zeroes.
    pub is_data: bool,
}

/// The chunks of a disk, in order: data cut to [`CHUNK_BYTES`], the rest as long as its runs.
pub struct Chunks<'a, D> {
    disk: &'a D,
    at: u64,
    end: u64,
    /// The runs that are left, in reverse order: the next one is the last element.
    ready: Vec<Chunk>,
}

impl<'a, D: Disk> Chunks<'a, D> {
    /// The chunks of `extent`.
    pub fn new(disk: &'a D, extent: Extent) -> Self {
        Self { disk, at: extent.start(), end: extent.end(), ready: Vec::new() }
    }

    /// The next chunk; `None` at the end.
    ///
    /// # Errors
    /// The disk's.
    pub async fn next(&mut self) -> Result<Option<Chunk>> {
        if self.ready.is_empty() && self.at < self.end {
            let rest = Extent::from_range(self.at..self.end);
            for run in self.disk.extents(rest, RUNS_AT_ONCE).await? {
                self.at = run.extent.end();
                cut(run.extent, run.kind == ExtentKind::Data, &mut self.ready);
            }
            self.ready.reverse();
        }
        Ok(self.ready.pop())
    }
}

fn cut(extent: Extent, is_data: bool, into: &mut Vec<Chunk>) {
    let step = if is_data { CHUNK_BYTES } else { extent.len_bytes.max(1) };
    let mut at = extent.start();
    while at < extent.end() {
        // Chunks are cut at multiples of their size, so that no two chunks share a block of the image.
        let end = extent.end().min((at / step + 1) * step).max(at + 1);
        let end = if is_data { end } else { extent.end() };
        into.push(Chunk { extent: Extent::from_range(at..end), is_data });
        at = end;
    }
}

/// Runs `work` on every chunk, several at a time, until one fails.
///
/// # Errors
/// The first failure.
pub async fn for_each<D: Disk>(chunks: Chunks<'_, D>, work: impl AsyncFn(Chunk) -> Result<()>) -> Result<()> {
    let chunks = async_lock::Mutex::new(chunks);
    let failure = RefCell::new(None);
    let lane = async || {
        while failure.borrow().is_none() {
            let next = chunks.lock().await.next().await;
            let done = match next {
                Ok(None) => return,
                Ok(Some(chunk)) => work(chunk).await,
                Err(error) => Err(error),
            };
            if let Err(error) = done {
                failure.borrow_mut().get_or_insert(error);
            }
        }
    };
    join_all((0..IN_FLIGHT).map(|_| lane())).await;
    failure.into_inner().map_or(Ok(()), Err)
}

/// The bytes of `extent`.
///
/// # Errors
/// The disk's.
pub async fn read(disk: &impl Disk, extent: Extent) -> Result<Segments> {
    let buffer = Segments::from(spile_engine::pool().alloc(extent.len_bytes as usize));
    disk.read(extent, &buffer).await?;
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_are_cut_at_multiples_and_zeroes_are_not() {
        let mut chunks = Vec::new();
        cut(Extent::from_range(CHUNK_BYTES - 512..2 * CHUNK_BYTES + 5), true, &mut chunks);
        cut(Extent::from_range(0..10 * CHUNK_BYTES), false, &mut chunks);
        let lens: Vec<u64> = chunks.iter().map(|chunk| chunk.extent.len_bytes).collect();
        assert_eq!(lens, [512, CHUNK_BYTES, 5, 10 * CHUNK_BYTES]);
    }
}
