//! [`Chain`]: a leaf and its parents as one disk.
//!
//! A read asks each layer where its bytes lie, without locks or awaits as long as the maps are in memory, and goes
//! to the store that has them. Writes go to the leaf, block by block.

use std::ops::Range;
use std::sync::Arc;

use futures_util::future::join_all;
use spile_core::{
    Disk, DiskInfo, Env, Error, ErrorKind, Extent, ExtentKind, ExtentStatus, Files, Io, Locator, Op, Result, ResultExt,
    SECTOR_BYTES, Segments, Store, StoreOffset, Via, WriteZeroes,
};

use crate::facts::LayerInfo;
use crate::formats::AnyLayer;
use crate::layer::{EncodedUnit, Found, Layer, MapPiece, Reserved};
use crate::open::{OpenOptions, open_layers};
use crate::zones::{NOWHERE, ZONE_BYTES, Zone, Zones};

/// The longest chain that is opened, leaf included.
pub const MAX_CHAIN_LAYERS: usize = 255;

/// A leaf and its parents.
pub struct Chain<S: Store> {
    /// Leaf first.
    layers: Vec<AnyLayer<S>>,
    zones: Zones,
    read_only: bool,
    /// But for the size, which the leaf knows.
    info: DiskInfo,
}

/// Where a run of the disk lies.
#[derive(Clone, Copy)]
enum Step {
    Bytes { layer: usize, at: At },
    Zero,
    Load { layer: usize, piece: MapPiece },
    LoadZone(u64),
}

/// Where a run lies in its layer.
#[derive(Clone, Copy)]
enum At {
    Plain(StoreOffset),
    Encoded { unit: EncodedUnit, within_bytes: u32 },
}

/// The zone that was loaded last, for the request that needed it: the cache may be too small to keep it.
type LastZone = Option<(u64, Arc<Zone>)>;

/// One store operation of a read.
struct Piece {
    layer: usize,
    at: At,
    start: usize,
    len: usize,
}

impl<S: Store> Chain<S> {
    /// Opens the image at `at` and all its parents.
    ///
    /// # Errors
    /// What is wrong with which file: unknown format, corrupt metadata, a parent that is missing, another than
    /// expected, outside the allowed folders, or part of a loop; a parent that cannot be made durable.
    pub async fn open<F: Files<Store = S>>(
        files: &F,
        env: Arc<dyn Env>,
        at: impl Into<Locator>,
        options: &OpenOptions,
    ) -> Result<Self> {
        let layers = open_layers(files, &env, &at.into(), options).await?;
        Ok(Self::assemble(layers, options.read_only, options.metadata_cache_bytes / 2))
    }

    /// The whole of `store` as a raw disk, for stores that have no path (`null:`, `mem:`).
    pub fn from_raw_store(store: S, read_only: bool) -> Self {
        Self::assemble(vec![AnyLayer::bare(store)], read_only, 0)
    }

    fn assemble(layers: Vec<AnyLayer<S>>, read_only: bool, zone_budget_bytes: usize) -> Self {
        let info = disk_info(&layers[0], read_only);
        Self { layers, zones: Zones::new(zone_budget_bytes), read_only, info }
    }

    /// What there is to know of each layer, leaf first.
    pub fn layers(&self) -> Vec<LayerInfo> {
        self.layers.iter().map(layer_info).collect()
    }

    fn size_bytes(&self) -> u64 {
        self.leaf().size_bytes()
    }

    fn check(&self, extent: Extent, aligned: bool) -> Result<()> {
        if extent.end() > self.size_bytes() {
            return Err(self.error(ErrorKind::OutOfRange, extent, "past the end of the disk"));
        }
        if aligned && !extent.is_aligned(u64::from(self.info.request_align_bytes)) {
            return Err(self.error(ErrorKind::InvalidInput, extent, "not on the disk's alignment"));
        }
        Ok(())
    }

    fn check_write(&self, extent: Extent) -> Result<()> {
        match self.read_only {
            true => Err(self.error(ErrorKind::ReadOnly, extent, "the disk is open for reading only")),
            false => self.check(extent, true),
        }
    }

    fn error(&self, kind: ErrorKind, extent: Extent, why: &str) -> Error {
        Error::new(kind, format!("{why}: {extent} of {:#x} bytes", self.size_bytes()))
            .at_path(self.leaf().store().path())
    }

    fn leaf(&self) -> &AnyLayer<S> {
        &self.layers[0]
    }

    /// Where the bytes from `at` lie, and how far that holds, at most `len_bytes`.
    fn step(&self, at: u64, len_bytes: u64, last: &LastZone) -> (Step, u64) {
        let (found, len) = self.leaf().find(at, len_bytes);
        match step_at(0, found) {
            Some(step) => (step, len),
            None if self.layers.len() > 2 => self.step_in_zone(at, len, last),
            None => self.walk(1, at, len),
        }
    }

    /// [`Chain::step`] from layer `from` down, without the merged map.
    fn walk(&self, from: usize, at: u64, len_bytes: u64) -> (Step, u64) {
        let mut len = len_bytes;
        for (number, layer) in self.layers.iter().enumerate().skip(from) {
            let size = layer.size_bytes();
            if at >= size {
                return (Step::Zero, len);
            }
            let (found, run) = layer.find(at, len.min(size - at));
            len = run;
            if let Some(step) = step_at(number, found) {
                return (step, len);
            }
        }
        (Step::Zero, len)
    }

    /// [`Chain::step`] below the leaf, by the merged map of the parents.
    fn step_in_zone(&self, at: u64, len_bytes: u64, last: &LastZone) -> (Step, u64) {
        let number = at / ZONE_BYTES;
        let (layer, len) = match last.as_ref().filter(|(last, _)| *last == number) {
            Some((_, zone)) => zone.find(at % ZONE_BYTES, len_bytes),
            None => match self.zones.get(number) {
                Some(zone) => zone.find(at % ZONE_BYTES, len_bytes),
                None => return (Step::LoadZone(number), len_bytes),
            },
        };
        if layer == NOWHERE {
            return (Step::Zero, len);
        }
        let number = layer as usize;
        let size = self.layers[number].size_bytes();
        if at >= size {
            return (Step::Zero, len.min(SECTOR_BYTES - at % SECTOR_BYTES));
        }
        let (found, len) = self.layers[number].locate(at, len.min(size - at));
        (step_at(number, found).unwrap_or(Step::Zero), len)
    }

    /// Reads what a step needs.
    async fn load(&self, step: Step, last: &mut LastZone) -> Result<()> {
        match step {
            Step::Load { layer, piece } => self.load_piece(layer, piece).await,
            Step::LoadZone(number) => {
                *last = Some((number, self.load_zone(number).await?));
                Ok(())
            }
            Step::Bytes { .. } | Step::Zero => Ok(()),
        }
    }

    async fn load_piece(&self, layer: usize, piece: MapPiece) -> Result<()> {
        let layer = &self.layers[layer];
        layer.load(piece).await.at_path(layer.store().path())
    }

    /// Merges all parents for one zone, and keeps the result: each paints what it has over what is below it.
    async fn load_zone(&self, number: u64) -> Result<Arc<Zone>> {
        let start = number * ZONE_BYTES;
        let end = (start + ZONE_BYTES).min(self.size_bytes());
        let mut owners = vec![NOWHERE; (end - start).div_ceil(SECTOR_BYTES) as usize];
        for layer in (1..self.layers.len()).rev() {
            self.paint(layer, start..end, &mut owners).await?;
        }
        Ok(self.zones.insert(number, Zone::new(owners)))
    }

    /// Enters into `owners`, one for each sector of `range`, what `layer` has. Past its own end it hides what is below.
    async fn paint(&self, number: usize, range: Range<u64>, owners: &mut [u8]) -> Result<()> {
        let layer = &self.layers[number];
        let sectors = |bytes: Range<u64>| {
            let at = |byte: u64| ((byte - range.start).div_ceil(SECTOR_BYTES)) as usize;
            at(bytes.start)..at(bytes.end)
        };
        let end = layer.size_bytes().clamp(range.start, range.end);
        owners[sectors(end..range.end)].fill(NOWHERE);
        let mut at = range.start;
        while at < end {
            let (found, len) = layer.find(at, end - at);
            match found {
                Found::Data(_) | Found::Encoded { .. } => owners[sectors(at..at + len)].fill(number as u8),
                Found::Zero => owners[sectors(at..at + len)].fill(NOWHERE),
                Found::Below => {}
                Found::Miss(piece) => {
                    let damaged_bytes = self.load_or_skip(number, piece, at, end - at).await?;
                    owners[sectors(at..at + damaged_bytes)].fill(number as u8);
                    at += damaged_bytes;
                    continue;
                }
            }
            at += len;
        }
        Ok(())
    }

    /// Loads a piece of a layer's map. Where the map is damaged, returns how many bytes from `at` it is damaged for: an
    /// error for whoever reads those, and for nobody else.
    async fn load_or_skip(&self, number: usize, piece: MapPiece, at: u64, len_bytes: u64) -> Result<u64> {
        match self.load_piece(number, piece).await {
            Err(error) if error.kind() == ErrorKind::Corrupt => match self.layers[number].find(at, len_bytes) {
                (Found::Miss(_), damaged_bytes) => Ok(damaged_bytes),
                _ => Ok(0),
            },
            other => other.map(|()| 0),
        }
    }

    /// Resolves a read: zeroes are filled in at once, the rest is listed.
    async fn resolve(&self, extent: Extent, into: &Segments) -> Result<Vec<Piece>> {
        let mut pieces: Vec<Piece> = Vec::new();
        let mut last = None;
        let mut at = extent.start();
        while at < extent.end() {
            let (step, len) = self.step(at, extent.end() - at, &last);
            let start = (at - extent.start()) as usize;
            match step {
                Step::Bytes { layer, at } => pieces.push(Piece { layer, at, start, len: len as usize }),
                Step::Zero => into.slice(start..start + len as usize).fill(0),
                Step::Load { .. } | Step::LoadZone(_) => {
                    self.load(step, &mut last).await?;
                    continue;
                }
            }
            at += len;
        }
        Ok(pieces)
    }

    /// Reads a run that lies in one piece.
    async fn read_at(&self, layer: usize, at: At, into: &Segments) -> Result<()> {
        match at {
            At::Plain(offset) => self.read_plain(layer, offset, into).await,
            At::Encoded { unit, within_bytes } => {
                let layer = &self.layers[layer];
                layer.read_encoded(unit, within_bytes, into).await.at_path(layer.store().path())
            }
        }
    }

    /// Reads from one layer's store, directly where everything is aligned for it.
    async fn read_plain(&self, layer: usize, offset: StoreOffset, into: &Segments) -> Result<()> {
        let layer = &self.layers[layer];
        let info = layer.data_store().info();
        let aligned = (offset.0 | into.len() as u64) & (u64::from(info.offset_align_bytes) - 1) == 0
            && into.is_aligned(info.memory_align_bytes as usize);
        let via = if aligned { layer.via() } else { Via::Cached };
        layer.data_store().read_at(offset, into, via).await
    }

    /// True when the whole of `extent` reads as zeroes below the leaf, as far as the maps say.
    async fn below_is_zero(&self, extent: Extent) -> Result<bool> {
        let mut at = extent.start();
        let end = extent.end().min(self.size_bytes());
        while at < end {
            let (step, len) = self.walk(1, at, end - at);
            match step {
                Step::Zero => at += len,
                Step::Bytes { .. } => return Ok(false),
                _ => self.load(step, &mut None).await?,
            }
        }
        Ok(true)
    }

    /// Runs `each` on every part of `extent`, or only on those that the leaf has space for, one after the other.
    async fn each_part(&self, extent: Extent, only_held: bool, each: impl AsyncFn(Extent) -> Result<()>) -> Result<()> {
        let mut at = extent.start();
        while at < extent.end() {
            let rest = Extent::from_range(at..extent.end());
            let part = match only_held {
                true => match self.leaf().next_held(rest) {
                    Some(part) => part,
                    None => return Ok(()),
                },
                false => Extent::from_range(at..at + self.leaf().part_len(rest)),
            };
            at = part.end();
            each(part).await?;
        }
        Ok(())
    }

    /// Writes a part of a request that one reservation covers.
    async fn write_part(&self, part: Extent, from: &Segments) -> Result<()> {
        let leaf = self.leaf();
        let reserved = leaf.reserve(part).await?;
        leaf.store().write_at(reserved.offset(), from, leaf.via()).await?;
        reserved.commit().await
    }

    /// Writes a request of several parts, all at the same time.
    async fn write_parts(&self, extent: Extent, from: &Segments) -> Result<()> {
        let mut parts = Vec::new();
        let mut at = extent.start();
        while at < extent.end() {
            let len = self.leaf().part_len(Extent::from_range(at..extent.end()));
            let start = (at - extent.start()) as usize;
            parts.push((Extent::from_range(at..at + len), from.slice(start..start + len as usize)));
            at += len;
        }
        let writes = parts.iter().map(|(part, from)| self.write_part(*part, from));
        join_all(writes).await.into_iter().collect()
    }
}

/// The step to take for what layer `number` has; `None` = look further down.
fn step_at(number: usize, found: Found) -> Option<Step> {
    Some(match found {
        Found::Data(offset) => Step::Bytes { layer: number, at: At::Plain(offset) },
        Found::Encoded { unit, within_bytes } => Step::Bytes { layer: number, at: At::Encoded { unit, within_bytes } },
        Found::Zero => Step::Zero,
        Found::Miss(piece) => Step::Load { layer: number, piece },
        Found::Below => return None,
    })
}

fn layer_info<S: Store>(layer: &AnyLayer<S>) -> LayerInfo {
    LayerInfo {
        path: layer.store().path().to_owned(),
        format: layer.format(),
        virtual_bytes: layer.size_bytes(),
        file_bytes: layer.store().len_bytes(),
        direct: layer.via() == Via::Direct,
        identity: layer.identity(),
        unflushed: layer.is_unflushed(),
        facts: layer.facts(),
    }
}

fn disk_info<S: Store>(leaf: &AnyLayer<S>, read_only: bool) -> DiskInfo {
    let store = leaf.data_store().info();
    let direct = leaf.via() == Via::Direct;
    let least = leaf.request_align_bytes();
    DiskInfo {
        size_bytes: leaf.size_bytes(),
        request_align_bytes: if direct { store.offset_align_bytes.max(least) } else { least },
        memory_align_bytes: if direct { store.memory_align_bytes } else { 1 },
        preferred_bytes: 4096,
        discard_align_bytes: 4096,
        read_only,
        fast_zero: store.punches,
    }
}

impl<S: Store> Disk for Chain<S> {
    fn info(&self) -> DiskInfo {
        DiskInfo { size_bytes: self.size_bytes(), ..self.info.clone() }
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        match io.op {
            Op::Read => self.read_extent(io.extent, io.segments).await,
            Op::Write { fua } => self.write_extent(io.extent, io.segments, fua).await,
            Op::Flush => self.flush_leaf().await,
            Op::Discard => self.discard_extent(io.extent).await,
            Op::WriteZeroes(how) => self.zero_extent(io.extent, how).await,
        }
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        self.check(extent, false)?;
        let _reader = self.leaf().enter();
        let mut runs = Runs { list: Vec::new(), max_runs };
        let (mut at, mut last) = (extent.start(), None);
        while at < extent.end() && !runs.is_full() {
            let (step, len) = self.step(at, extent.end() - at, &last);
            let run = Extent::from_range(at..at + len);
            match step {
                Step::Bytes { layer, at: At::Plain(offset) } => {
                    self.add_data_runs(&mut runs, run, layer, offset).await?
                }
                Step::Bytes { layer, .. } => {
                    runs.add(ExtentStatus { extent: run, kind: ExtentKind::Data, depth: layer as u16 });
                }
                Step::Zero => runs.add(ExtentStatus { extent: run, kind: ExtentKind::Hole, depth: 0 }),
                Step::Load { .. } | Step::LoadZone(_) => {
                    self.load(step, &mut last).await?;
                    continue;
                }
            }
            at += len;
        }
        Ok(runs.finish())
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        match self.read_only {
            true => Err(Error::new(ErrorKind::ReadOnly, "the disk is open for reading only")
                .at_path(self.leaf().store().path())),
            false => self.leaf().resize(size_bytes).await,
        }
    }

    async fn close(&self) -> Result<()> {
        match self.read_only {
            true => Ok(()),
            false => self.leaf().seal().await,
        }
    }
}

impl<S: Store> Chain<S> {
    async fn read_extent(&self, extent: Extent, into: &Segments) -> Result<()> {
        self.check(extent, false)?;
        let _reader = self.leaf().enter();
        // The common read lies in one piece, and needs no list.
        if let (Step::Bytes { layer, at }, len) = self.step(extent.start(), extent.len_bytes, &None)
            && len == extent.len_bytes
        {
            return self.read_at(layer, at, into).await;
        }
        let pieces = self.resolve(extent, into).await?;
        let reads = pieces.iter().map(async |piece| {
            self.read_at(piece.layer, piece.at, &into.slice(piece.start..piece.start + piece.len)).await
        });
        join_all(reads).await.into_iter().collect()
    }

    async fn write_extent(&self, extent: Extent, from: &Segments, fua: bool) -> Result<()> {
        self.check_write(extent)?;
        match self.leaf().part_len(extent) == extent.len_bytes {
            _ if extent.is_empty() => {}
            true => self.write_part(extent, from).await?,
            false => self.write_parts(extent, from).await?,
        }
        match fua {
            true => self.flush_leaf().await,
            false => Ok(()),
        }
    }

    async fn flush_leaf(&self) -> Result<()> {
        match self.read_only {
            true => Ok(()),
            false => self.leaf().flush().await,
        }
    }

    async fn discard_extent(&self, extent: Extent) -> Result<()> {
        self.check_write(extent)?;
        self.each_part(extent, true, async |part| {
            let below = self.below_is_zero(self.leaf().unit(part)).await?;
            self.leaf().unmap(part, below).await
        })
        .await
    }

    async fn zero_extent(&self, extent: Extent, how: WriteZeroes) -> Result<()> {
        self.check_write(extent)?;
        if how.only_if_fast && !self.info.fast_zero {
            return Err(self.error(ErrorKind::Unsupported, extent, "zeroes are not fast on this store"));
        }
        let only_held = self.layers.len() == 1 && how.may_unmap;
        self.each_part(extent, only_held, async |part| {
            let below = self.below_is_zero(self.leaf().unit(part)).await?;
            self.leaf().zero(part, how.may_unmap, below).await
        })
        .await
    }

    /// Data as the format sees it may be a hole to the store: asked run by run.
    async fn add_data_runs(&self, runs: &mut Runs, run: Extent, number: usize, offset: StoreOffset) -> Result<()> {
        let layer = &self.layers[number];
        let mut done = 0;
        while done < run.len_bytes && !runs.is_full() {
            let found = layer.data_store().extent_at(StoreOffset(offset.0 + done)).await?;
            let len = found.len_bytes.clamp(1, run.len_bytes - done);
            let extent = Extent::from_range(run.start() + done..run.start() + done + len);
            let kind = if found.is_hole { layer.hole_kind() } else { ExtentKind::Data };
            // The depth of a hole means nothing, and must not part it from another.
            let depth = if kind == ExtentKind::Hole { 0 } else { number as u16 };
            runs.add(ExtentStatus { extent, kind, depth });
            done += len;
        }
        Ok(())
    }
}

/// Collects runs, joining those that are alike. Keeps one more than asked for, until it is known where the last ends.
struct Runs {
    list: Vec<ExtentStatus>,
    max_runs: usize,
}

impl Runs {
    fn add(&mut self, run: ExtentStatus) {
        match self.list.last_mut() {
            Some(last) if (last.kind, last.depth) == (run.kind, run.depth) => {
                last.extent = Extent::from_range(last.extent.start()..run.extent.end());
            }
            _ => self.list.push(run),
        }
    }

    fn is_full(&self) -> bool {
        self.list.len() > self.max_runs
    }

    fn finish(mut self) -> Vec<ExtentStatus> {
        self.list.truncate(self.max_runs);
        self.list
    }
}
