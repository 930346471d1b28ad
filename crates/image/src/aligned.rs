//! [`Aligned`]: a disk that takes any byte range, over one that wants alignment.
//!
//! Aligned requests pass through untouched. For the rest there is a bounce buffer, and for writes a
//! read-modify-write of the edges under an exclusive range lock, so that two writes to different bytes of one
//! sector never undo each other.

use spile_core::{Disk, DiskInfo, Error, ErrorKind, Extent, ExtentStatus, Result, SECTOR_BYTES, Segments, WriteZeroes};

use crate::range_lock::RangeLock;

/// A disk without alignment rules over one that has them.
pub struct Aligned<D> {
    inner: D,
    align: u64,
    memory_align: usize,
    writes: RangeLock,
}

impl<D: Disk> Aligned<D> {
    /// Wraps `inner`.
    pub fn new(inner: D) -> Self {
        let info = inner.info();
        let align = u64::from(info.request_align_bytes);
        let memory_align = info.memory_align_bytes as usize;
        Self { inner, align, memory_align, writes: RangeLock::default() }
    }

    /// The disk below.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Before any rounding, which could overflow.
    fn check(&self, extent: Extent) -> Result<()> {
        match extent.end() > self.inner.info().size_bytes {
            true => Err(Error::new(ErrorKind::OutOfRange, format!("{extent} is past the end of the disk"))),
            false => Ok(()),
        }
    }

    fn outer(&self, extent: Extent) -> Extent {
        let start = extent.start() / self.align * self.align;
        let end = extent.end().next_multiple_of(self.align).min(self.inner.info().size_bytes);
        Extent::from_range(start..end)
    }

    /// The largest aligned extent inside.
    fn inside(&self, extent: Extent) -> Extent {
        Extent::from_range(extent.start().next_multiple_of(self.align)..extent.end() / self.align * self.align)
    }

    fn fits(&self, extent: Extent, memory: &Segments) -> bool {
        extent.is_aligned(self.align) && memory.is_aligned(self.memory_align)
    }

    async fn read_bounced(&self, extent: Extent, into: &Segments) -> Result<()> {
        let outer = self.outer(extent);
        let bounce = Segments::zeroed(outer.len_bytes as usize);
        self.inner.read(outer, &bounce).await?;
        let skip = (extent.start() - outer.start()) as usize;
        into.copy_from(&bounce.slice(skip..skip + extent.len_bytes as usize));
        Ok(())
    }

    /// Writes through a bounce buffer whose edges are read first, with all that they read held exclusively.
    async fn write_bounced(&self, extent: Extent, from: &Segments, fua: bool) -> Result<()> {
        // Found once: it could reach further once the disk has grown.
        let outer = self.outer(extent);
        let _held = self.writes.exclusive(outer.range()).await;
        let bounce = Segments::zeroed(outer.len_bytes as usize);
        let unit = self.align.min(outer.len_bytes);
        if !extent.start().is_multiple_of(self.align) {
            let head = Extent::from_range(outer.start()..outer.start() + unit);
            self.inner.read(head, &bounce.slice(0..unit as usize)).await?;
        }
        if extent.end() != outer.end() {
            let start = (outer.end() - 1) / self.align * self.align;
            let at = (start - outer.start()) as usize;
            self.inner.read(Extent::from_range(start..outer.end()), &bounce.slice(at..bounce.len())).await?;
        }
        let skip = (extent.start() - outer.start()) as usize;
        bounce.slice(skip..skip + from.len()).copy_from(from);
        self.inner.write(outer, &bounce, fua).await
    }

    async fn zero_edge(&self, extent: Extent) -> Result<()> {
        if extent.is_empty() {
            return Ok(());
        }
        self.write_bounced(extent, &Segments::zeroed(extent.len_bytes as usize), false).await
    }
}

impl<D: Disk> Disk for Aligned<D> {
    fn info(&self) -> DiskInfo {
        DiskInfo { request_align_bytes: 1, memory_align_bytes: 1, ..self.inner.info() }
    }

    async fn read(&self, extent: Extent, into: &Segments) -> Result<()> {
        self.check(extent)?;
        match self.fits(extent, into) {
            true => self.inner.read(extent, into).await,
            false => self.read_bounced(extent, into).await,
        }
    }

    async fn write(&self, extent: Extent, from: &Segments, fua: bool) -> Result<()> {
        self.check(extent)?;
        if self.align == 1 && self.memory_align == 1 {
            return self.inner.write(extent, from, fua).await;
        }
        if extent.is_aligned(self.align) {
            let _held = self.writes.shared(extent.range()).await;
            return match from.is_aligned(self.memory_align) {
                true => self.inner.write(extent, from, fua).await,
                false => {
                    let bounce = Segments::zeroed(from.len());
                    bounce.copy_from(from);
                    self.inner.write(extent, &bounce, fua).await
                }
            };
        }
        self.write_bounced(extent, from, fua).await
    }

    async fn flush(&self) -> Result<()> {
        self.inner.flush().await
    }

    async fn discard(&self, extent: Extent) -> Result<()> {
        self.check(extent)?;
        let inside = self.inside(extent);
        if inside.is_empty() {
            return Ok(());
        }
        let _held = self.writes.shared(inside.range()).await;
        self.inner.discard(inside).await
    }

    async fn write_zeroes(&self, extent: Extent, how: WriteZeroes) -> Result<()> {
        self.check(extent)?;
        let inside = self.inside(extent);
        if inside.is_empty() {
            return self.zero_edge(extent).await;
        }
        {
            let _held = self.writes.shared(inside.range()).await;
            self.inner.write_zeroes(inside, how).await?;
        }
        self.zero_edge(Extent::from_range(extent.start()..inside.start())).await?;
        self.zero_edge(Extent::from_range(inside.end()..extent.end())).await
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        self.check(extent)?;
        // Runs of sectors that end before the extent begins are dropped, so as many more are asked for.
        let spare = (self.align / SECTOR_BYTES) as usize;
        let mut runs = self.inner.extents(self.outer(extent), max_runs + spare).await?;
        for run in &mut runs {
            let range = run.extent.range();
            run.extent = Extent::from_range(range.start.max(extent.start())..range.end.min(extent.end()));
        }
        runs.retain(|run| !run.extent.is_empty());
        runs.truncate(max_runs);
        Ok(runs)
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.inner.resize(size_bytes).await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}
