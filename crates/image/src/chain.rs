//! [`Chain`]: a leaf and its parents as one disk.
//!
//! A read asks each layer where its bytes lie, without locks or awaits as long as the maps are in memory, and goes
//! to the store that has them. Writes go to the leaf, block by block.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::future::join_all;
use spile_core::{
    Disk, DiskInfo, Env, Error, ErrorKind, Extent, ExtentKind, ExtentStatus, Files, Io, Op, OpenMode, Result,
    ResultExt, SECTOR_BYTES, Segments, Store, StoreOffset, Via, WriteZeroes,
};

use crate::format::Format;
use crate::layer::{Layer, LayerInfo, open_layer, open_parent};
use crate::parents::Policy;
use crate::raw::Raw;
use crate::vhd::{BlockPart, Found, Sparse};
use crate::zones::{NOWHERE, ZONE_BYTES, Zone, Zones};

/// The longest chain that is opened, leaf included.
pub const MAX_CHAIN_LAYERS: usize = 255;

/// How to open a chain.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The leaf's format; `None` = what its extension says.
    pub format: Option<Format>,
    /// Open the leaf for reading only.
    pub read_only: bool,
    /// Folders, besides the leaf's own, that parents may lie in.
    pub allow_parents: Vec<PathBuf>,
    /// Memory for maps that can be read again (bitmaps, merged zones), in bytes for the whole chain.
    pub metadata_cache_bytes: usize,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self { format: None, read_only: false, allow_parents: Vec::new(), metadata_cache_bytes: 64 << 20 }
    }
}

/// A leaf and its parents.
pub struct Chain<S: Store> {
    /// Leaf first.
    layers: Vec<Layer<S>>,
    zones: Zones,
    read_only: bool,
    /// But for the size, which the leaf knows.
    info: DiskInfo,
}

/// Where a run of the disk lies.
enum Step {
    Data { layer: usize, offset: StoreOffset },
    Zero,
    LoadBits { layer: usize, block: u32 },
    LoadZone(u64),
}

/// The zone that was loaded last, for the request that needed it: the cache may be too small to keep it.
type LastZone = Option<(u64, Arc<Zone>)>;

/// One store operation of a read.
struct Piece {
    layer: usize,
    offset: StoreOffset,
    start: usize,
    len: usize,
}

impl<S: Store> Chain<S> {
    /// Opens the image at `path` and all its parents.
    ///
    /// # Errors
    /// What is wrong with which file: unknown format, corrupt metadata, a parent that is missing, another than
    /// expected, outside the allowed folders, or part of a loop; a parent that cannot be made durable.
    pub async fn open<F: Files<Store = S>>(
        files: &F,
        env: Arc<dyn Env>,
        path: &Path,
        options: &OpenOptions,
    ) -> Result<Self> {
        let format = Format::of(path, options.format)?;
        let leaf = files.canonical(path).at_path(path)?;
        let policy = Policy::new(files, &leaf, &options.allow_parents)?;
        let mode = if options.read_only { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
        let budget = options.metadata_cache_bytes / 2;
        let store = files.open(&leaf, mode).await?;
        let mut layers = vec![open_layer(store, format, &env, options.read_only, budget).await?];
        let mut visited = vec![leaf];
        while let Some(Layer::Sparse(child)) = layers.last().filter(|layer| layer.has_parent()) {
            let (path, parent) = open_parent(files, &env, child, &policy, &visited, !options.read_only).await?;
            visited.push(path);
            layers.push(parent);
            if layers.len() > MAX_CHAIN_LAYERS {
                return Err(Error::new(ErrorKind::Unsupported, format!("the chain is longer than {MAX_CHAIN_LAYERS}"))
                    .at_path(&visited[0])
                    .hint("coalesce some of its parents"));
            }
        }
        if !options.read_only {
            sync_parents(&layers).await?;
        }
        Ok(Self::assemble(layers, options.read_only, budget))
    }

    /// The whole of `store` as a raw disk, for stores that have no path (`null:`, `mem:`).
    pub fn from_raw_store(store: S, read_only: bool) -> Self {
        let size = store.len_bytes();
        Self::assemble(vec![Layer::Raw(Raw::new(store, size), None)], read_only, 0)
    }

    fn assemble(layers: Vec<Layer<S>>, read_only: bool, zone_budget_bytes: usize) -> Self {
        let info = disk_info(&layers[0], read_only);
        Self { layers, zones: Zones::new(zone_budget_bytes), read_only, info }
    }

    /// What there is to know of each layer, leaf first.
    pub fn layers(&self) -> Vec<LayerInfo> {
        self.layers.iter().map(Layer::info).collect()
    }

    fn size_bytes(&self) -> u64 {
        self.layers[0].size_bytes()
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
            .at_path(self.layers[0].store().path())
    }

    /// Where the bytes from `at` lie, and how far that holds, at most `len_bytes`.
    fn step(&self, at: u64, len_bytes: u64, last: &LastZone) -> (Step, u64) {
        let (found, len) = self.layers[0].find(at, len_bytes);
        match found {
            Found::Data(offset) => (Step::Data { layer: 0, offset }, len),
            Found::Unknown(block) => (Step::LoadBits { layer: 0, block }, len),
            Found::Below if self.layers.len() > 2 => self.step_in_zone(at, len, last),
            Found::Below => self.walk(1, at, len),
        }
    }

    /// The same, from layer `from` down.
    fn walk(&self, from: usize, at: u64, len_bytes: u64) -> (Step, u64) {
        let mut len = len_bytes;
        for (number, layer) in self.layers.iter().enumerate().skip(from) {
            if at >= layer.size_bytes() {
                return (Step::Zero, len);
            }
            let (found, run) = layer.find(at, len.min(layer.size_bytes() - at));
            len = run;
            match found {
                Found::Data(offset) => return (Step::Data { layer: number, offset }, len),
                Found::Unknown(block) => return (Step::LoadBits { layer: number, block }, len),
                Found::Below => {}
            }
        }
        (Step::Zero, len)
    }

    /// The same, by the merged map of the parents.
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
        let size = self.layers[layer as usize].size_bytes();
        if at >= size {
            return (Step::Zero, len.min(SECTOR_BYTES - at % SECTOR_BYTES));
        }
        match self.layers[layer as usize].locate(at, len.min(size - at)) {
            Some((offset, len)) => (Step::Data { layer: layer as usize, offset }, len),
            None => (Step::Zero, len),
        }
    }

    /// Reads what a step needs.
    async fn load(&self, step: &Step, last: &mut LastZone) -> Result<()> {
        match step {
            Step::LoadBits { layer, block } => self.load_bits(*layer, *block).await,
            Step::LoadZone(number) => {
                *last = Some((*number, self.load_zone(*number).await?));
                Ok(())
            }
            Step::Data { .. } | Step::Zero => Ok(()),
        }
    }

    async fn load_bits(&self, layer: usize, block: u32) -> Result<()> {
        match &self.layers[layer] {
            Layer::Sparse(sparse) => sparse.load_bits(block).await.at_path(sparse.store().path()),
            Layer::Raw(..) => Ok(()),
        }
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
                Found::Data(_) => owners[sectors(at..at + len)].fill(number as u8),
                Found::Below => {}
                Found::Unknown(block) => {
                    self.load_bits(number, block).await?;
                    continue;
                }
            }
            at += len;
        }
        Ok(())
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
                Step::Data { layer, offset } => pieces.push(Piece { layer, offset, start, len: len as usize }),
                Step::Zero => into.slice(start..start + len as usize).fill(0),
                Step::LoadBits { .. } | Step::LoadZone(_) => {
                    self.load(&step, &mut last).await?;
                    continue;
                }
            }
            at += len;
        }
        Ok(pieces)
    }

    /// Reads from one layer, directly where everything is aligned for it.
    async fn read_piece(&self, layer: usize, offset: StoreOffset, into: &Segments) -> Result<()> {
        let layer = &self.layers[layer];
        let info = layer.store().info();
        let aligned = (offset.0 | into.len() as u64) & (u64::from(info.offset_align_bytes) - 1) == 0
            && into.is_aligned(info.memory_align_bytes as usize);
        let via = if aligned { layer.via() } else { Via::Cached };
        layer.store().read_at(offset, into, via).await
    }

    /// True when the whole of `extent` reads as zeroes below the leaf, as far as the maps say.
    async fn below_is_zero(&self, extent: Extent) -> Result<bool> {
        let mut at = extent.start();
        let end = extent.end().min(self.size_bytes());
        while at < end {
            let (step, len) = self.walk(1, at, end - at);
            match step {
                Step::Zero => at += len,
                Step::Data { .. } => return Ok(false),
                _ => self.load(&step, &mut None).await?,
            }
        }
        Ok(true)
    }

    /// Runs `each` on every block of `extent` that the leaf has allocated, or on every block if `all`.
    async fn each_block(
        &self,
        sparse: &Sparse<S>,
        extent: Extent,
        all: bool,
        each: impl AsyncFn(BlockPart) -> Result<()>,
    ) -> Result<()> {
        let mut at = extent.start();
        while at < extent.end() {
            if !all {
                let (found, len) = sparse.find(at, extent.end() - at);
                if found == Found::Below && sparse.is_unallocated(at) {
                    at += len;
                    continue;
                }
            }
            let part = sparse.part(at, extent.end());
            at += part.within.end - part.within.start;
            each(part).await?;
        }
        Ok(())
    }
}

/// What a process that was killed wrote to a parent, when that was the leaf, is in the page cache; a flush of the chain
/// promises it, too, and syncs only the leaf.
async fn sync_parents<S: Store>(layers: &[Layer<S>]) -> Result<()> {
    let syncs = layers.iter().skip(1).map(async |layer| layer.store().sync().await.at_path(layer.store().path()));
    join_all(syncs).await.into_iter().collect()
}

fn disk_info<S: Store>(leaf: &Layer<S>, read_only: bool) -> DiskInfo {
    let store = leaf.store().info();
    let direct = leaf.via() == Via::Direct;
    let least = if matches!(leaf, Layer::Sparse(_)) { SECTOR_BYTES as u32 } else { 1 };
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
        let _reader = match &self.layers[0] {
            Layer::Sparse(sparse) => Some(sparse.grace().enter()),
            Layer::Raw(..) => None,
        };
        let mut runs = Runs { list: Vec::new(), max_runs };
        let (mut at, mut last) = (extent.start(), None);
        while at < extent.end() && !runs.is_full() {
            let (step, len) = self.step(at, extent.end() - at, &last);
            let run = Extent::from_range(at..at + len);
            match step {
                Step::Data { layer, offset } => self.add_data_runs(&mut runs, run, layer, offset).await?,
                Step::Zero => runs.add(ExtentStatus { extent: run, kind: ExtentKind::Hole, depth: 0 }),
                Step::LoadBits { .. } | Step::LoadZone(_) => {
                    self.load(&step, &mut last).await?;
                    continue;
                }
            }
            at += len;
        }
        Ok(runs.finish())
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        let path = self.layers[0].store().path();
        match &self.layers[0] {
            _ if self.read_only => {
                Err(Error::new(ErrorKind::ReadOnly, "the disk is open for reading only").at_path(path))
            }
            Layer::Raw(raw, None) => raw.resize(size_bytes).await,
            Layer::Raw(..) | Layer::Sparse(_) => {
                let what = "a VHD cannot grow while it is in use: its size is in its footers and its block table, which \
                            would have to change together";
                let hint = "make a larger one and copy the data to it, or convert it to raw, which can grow";
                Err(Error::new(ErrorKind::Unsupported, what).at_path(path).hint(hint))
            }
        }
    }

    async fn close(&self) -> Result<()> {
        match &self.layers[0] {
            _ if self.read_only => Ok(()),
            Layer::Raw(raw, _) => raw.store().sync().await,
            Layer::Sparse(sparse) => sparse.close().await,
        }
    }
}

impl<S: Store> Chain<S> {
    async fn read_extent(&self, extent: Extent, into: &Segments) -> Result<()> {
        self.check(extent, false)?;
        let leaf = &self.layers[0];
        let _reader = match leaf {
            Layer::Sparse(sparse) if !self.read_only => Some(sparse.grace().enter()),
            _ => None,
        };
        // The common read lies in one piece, and needs no list.
        if let (Step::Data { layer, offset }, len) = self.step(extent.start(), extent.len_bytes, &None)
            && len == extent.len_bytes
        {
            return self.read_piece(layer, offset, into).await;
        }
        let pieces = self.resolve(extent, into).await?;
        let reads = pieces.iter().map(async |piece| {
            self.read_piece(piece.layer, piece.offset, &into.slice(piece.start..piece.start + piece.len)).await
        });
        join_all(reads).await.into_iter().collect()
    }

    async fn write_extent(&self, extent: Extent, from: &Segments, fua: bool) -> Result<()> {
        self.check_write(extent)?;
        match &self.layers[0] {
            _ if extent.is_empty() => {}
            Layer::Raw(raw, _) => raw.write(extent, from).await?,
            Layer::Sparse(sparse) => write_sparse(sparse, extent, from).await?,
        }
        match fua {
            true => self.flush_leaf().await,
            false => Ok(()),
        }
    }

    async fn flush_leaf(&self) -> Result<()> {
        match &self.layers[0] {
            _ if self.read_only => Ok(()),
            Layer::Raw(raw, _) => raw.store().sync().await,
            Layer::Sparse(sparse) => sparse.flush().await,
        }
    }

    async fn discard_extent(&self, extent: Extent) -> Result<()> {
        self.check_write(extent)?;
        match &self.layers[0] {
            Layer::Raw(raw, _) => raw.discard(extent).await,
            Layer::Sparse(sparse) => {
                self.each_block(sparse, extent, false, async |part| {
                    let below = self.below_is_zero(sparse.block_extent(part.block)).await?;
                    sparse.discard_part(&part, below).await
                })
                .await
            }
        }
    }

    async fn zero_extent(&self, extent: Extent, how: WriteZeroes) -> Result<()> {
        self.check_write(extent)?;
        if how.only_if_fast && !self.info.fast_zero {
            return Err(self.error(ErrorKind::Unsupported, extent, "zeroes are not fast on this store"));
        }
        let sparse = match &self.layers[0] {
            Layer::Raw(raw, _) => return raw.write_zeroes(extent, how).await,
            Layer::Sparse(sparse) => sparse,
        };
        let all = self.layers.len() > 1 || !how.may_unmap;
        self.each_block(sparse, extent, all, async |part| {
            let below = self.below_is_zero(sparse.block_extent(part.block)).await?;
            sparse.zero_part(&part, how.may_unmap, below).await
        })
        .await
    }

    /// Data as the format sees it may be a hole to the store: asked run by run.
    async fn add_data_runs(&self, runs: &mut Runs, run: Extent, layer: usize, offset: StoreOffset) -> Result<()> {
        let mut done = 0;
        while done < run.len_bytes && !runs.is_full() {
            let found = self.layers[layer].store().extent_at(StoreOffset(offset.0 + done)).await?;
            let len = found.len_bytes.clamp(1, run.len_bytes - done);
            let extent = Extent::from_range(run.start() + done..run.start() + done + len);
            let raw = matches!(self.layers[layer], Layer::Raw(_, None));
            let kind = match found.is_hole {
                true if raw => ExtentKind::Hole,
                true => ExtentKind::Zero,
                false => ExtentKind::Data,
            };
            // The depth of a hole means nothing, and must not part it from another.
            let depth = if kind == ExtentKind::Hole { 0 } else { layer as u16 };
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

async fn write_sparse<S: Store>(sparse: &Sparse<S>, extent: Extent, from: &Segments) -> Result<()> {
    let first = sparse.part(extent.start(), extent.end());
    if first.within.end - first.within.start == extent.len_bytes {
        return sparse.write_part(&first, from).await;
    }
    let mut parts = Vec::new();
    let mut at = extent.start();
    while at < extent.end() {
        let part = sparse.part(at, extent.end());
        let len = part.within.end - part.within.start;
        let start = (at - extent.start()) as usize;
        parts.push((part, from.slice(start..start + len as usize)));
        at += len;
    }
    let writes = parts.iter().map(|(part, from)| sparse.write_part(part, from));
    join_all(writes).await.into_iter().collect()
}
