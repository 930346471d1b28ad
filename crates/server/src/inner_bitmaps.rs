//! Bitmaps inside the image of a disk, as checkpoints of the disk: those of a disk that is open for writing are followed, and those of one that is open for
//! reading are read from the image.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use spile_core::{Error, ErrorKind, Extent, Result, Store as _};
use spile_image::bitmaps::{BitmapState, BrokenBitmaps, ChangedSince, InnerBitmap, KeptBitmaps, LaterRanges};
use spile_image::layer::Layer;
use spile_image::{Graph, GraphLayer};
use spile_life::changes::header::Grain;
use spile_life::changes::{Changed, Changes, Checkpoint, is_hidden};
use spile_store::{HostStore, OsFiles};

/// The finest blocks that bitmaps of an image ask for, and the usual ones.
const BLOCK_BYTES: std::ops::RangeInclusive<u64> = 4096..=64 << 10;
/// The file of changed blocks has no more blocks because of them.
const MOST_BLOCKS: u64 = 1 << 28;

/// The bitmaps of an image that its disk's changes are to be noted in.
pub async fn recording(image: &impl Layer<HostStore>) -> Result<Vec<InnerBitmap>> {
    let there = image.bitmaps().await?.unwrap_or_default();
    let is_good =
        |bitmap: &InnerBitmap| bitmap.records && bitmap.state == BitmapState::Good && !is_hidden(&bitmap.name);
    Ok(there.into_iter().filter(is_good).collect())
}

/// True when the image of `graph` has a bitmap of this name, whatever its state.
///
/// # Errors
/// Those of the image.
pub async fn has(graph: &Graph<HostStore>, name: &str) -> Result<bool> {
    let there = graph.handles()[0].image().bitmaps().await?.unwrap_or_default();
    Ok(there.iter().any(|bitmap| bitmap.name == name))
}

/// How finely the changes of a disk of `disk_bytes` are kept that has these bitmaps, and no checkpoint yet.
pub fn grain(bitmaps: &[InnerBitmap], disk_bytes: u64) -> Grain {
    let finest = bitmaps.iter().map(|bitmap| bitmap.granularity_bytes).min().unwrap_or(*BLOCK_BYTES.end());
    let mut block_bytes = finest.clamp(*BLOCK_BYTES.start(), *BLOCK_BYTES.end());
    while disk_bytes / block_bytes > MOST_BLOCKS {
        block_bytes *= 2;
    }
    let area_bytes = u64::from(Grain::default().area_bytes).max(block_bytes);
    Grain { block_bytes: block_bytes as u32, area_bytes: area_bytes as u32 }
}

/// Has bitmaps of the image of `graph` be checkpoints of `changes`, and the image get them back when it is closed.
///
/// # Errors
/// Those of the image.
pub async fn follow(changes: &Arc<Changes<OsFiles>>, graph: &Graph<HostStore>) -> Result<()> {
    let image = graph.handles()[0].image();
    let path = image.store().path().to_owned();
    let followed = changes.follow_bitmaps(image, image.size_bytes()).await?;
    for (name, error) in &followed.left {
        tell_left(&path, name, &error.to_string());
    }
    let is_behind = followed.is_behind;
    if followed.kept.is_empty() && !is_behind {
        return Ok(());
    }
    let changed = Arc::new(changes.keeper(&followed.kept).await);
    let names = followed.kept.clone();
    let kept = image.keep_bitmaps(KeptBitmaps { names, changed, is_behind, broken: BrokenBitmaps::Nothing }).await;
    if kept.is_err() && is_behind {
        changes.stay_behind().await;
    }
    let kept = kept?;
    for name in followed.kept.iter().filter(|name| !kept.contains(name)) {
        tell_left(&path, name, "the image uses its space for something else, too (spile check)");
    }
    Ok(())
}

/// Has nobody keep up the bitmaps of the image of `graph`: those that are in use stay so.
///
/// # Errors
/// Those of the image.
pub async fn keep_none(graph: &Graph<HostStore>) -> Result<()> {
    struct Nobody;
    impl ChangedSince for Nobody {
        fn changed<'a>(&'a self, name: &'a str, _: Range<u64>, _: u64) -> LaterRanges<'a> {
            let error = Error::new(ErrorKind::NotFound, format!("nobody keeps the bitmap {name:?} up"));
            Box::pin(std::future::ready(Err(error)))
        }
    }
    let (names, changed, broken) = (Vec::new(), Arc::new(Nobody), BrokenBitmaps::Nothing);
    let nobody = KeptBitmaps { names, changed, is_behind: false, broken };
    graph.handles()[0].image().keep_bitmaps(nobody).await.map(drop)
}

fn tell_left(path: &Path, name: &str, why: &str) {
    let path = path.display();
    tracing::warn!(
        "{path}: the bitmap {name:?} inside the image is not kept up, and no program believes it after the next change: {why}"
    );
}

/// The bitmaps of a disk that is open for reading, as its image has them.
#[derive(Clone)]
pub struct Seen {
    image: Arc<GraphLayer<HostStore>>,
    bitmaps: Arc<Vec<InnerBitmap>>,
    /// The parents of the image are others than they were, which none of its bitmaps tells.
    is_unknown: bool,
}

impl Seen {
    /// Those of `graph`, but for those of the names `others`. What cannot be read is not there. `is_unknown`: none of them tells all that has changed.
    pub async fn of(graph: &Graph<HostStore>, others: &[String], is_unknown: bool) -> Option<Self> {
        let image = graph.handles()[0].clone();
        let mut bitmaps = recording(image.image()).await.unwrap_or_default();
        bitmaps.retain(|bitmap| !others.contains(&bitmap.name));
        (!bitmaps.is_empty()).then(|| Self { image, bitmaps: Arc::new(bitmaps), is_unknown })
    }

    /// Their names.
    pub fn names(&self) -> Vec<String> {
        self.bitmaps.iter().map(|bitmap| bitmap.name.clone()).collect()
    }

    /// True when there is one of this name.
    pub fn has(&self, name: &str) -> bool {
        self.bitmaps.iter().any(|bitmap| bitmap.name == name)
    }

    /// The finest of their blocks.
    pub fn block_bytes(&self) -> u32 {
        let all = self.bitmaps.iter().map(|bitmap| bitmap.granularity_bytes);
        all.min().unwrap_or_default() as u32
    }

    /// All of them as checkpoints. Nobody knows when they were made.
    ///
    /// # Errors
    /// Those of the image.
    pub async fn checkpoints(&self) -> Result<Vec<Checkpoint>> {
        let (mut all, size) = (Vec::new(), self.image.image().size_bytes());
        for bitmap in self.bitmaps.iter() {
            let (mut at, mut changed_bytes) = if self.is_unknown { (size, size) } else { (0, 0) };
            while at < size {
                let part = self.image.image().bitmap_part(&bitmap.name, at..size).await?;
                changed_bytes += part.ranges.iter().map(|range| range.len_bytes).sum::<u64>();
                at = part.end;
            }
            let name = bitmap.name.clone();
            all.push(Checkpoint { name, created_unix_s: 0, changed_bytes, is_bitmap: true });
        }
        Ok(all)
    }

    /// What is set in the bitmap `name` that touches the part `within` of the disk.
    ///
    /// # Errors
    /// Those of the image.
    pub async fn changed(&self, name: &str, within: Range<u64>) -> Result<Changed> {
        let found = self.bitmaps.iter().find(|bitmap| bitmap.name == name);
        let block_bytes = found.map_or(0, |bitmap| bitmap.granularity_bytes) as u32;
        let mut changed = Changed { block_bytes, ..Changed::default() };
        if self.is_unknown {
            let whole = Extent::from_range(within.start..within.end.max(within.start));
            changed.ranges.extend((!whole.is_empty()).then_some(whole));
            changed.warning = Some("the image's parents were changed: everything counts as changed".to_owned());
            return Ok(changed);
        }
        let mut at = within.start;
        while at < within.end {
            let part = self.image.image().bitmap_part(name, at..within.end).await?;
            let touches = |range: &&Extent| range.start() < within.end && range.end() > within.start;
            for range in part.ranges.iter().filter(touches) {
                match changed.ranges.last_mut() {
                    // A part may begin with what the one before has ended with.
                    Some(last) if last.end() >= range.start() => {
                        *last = Extent::from_range(last.start()..range.end().max(last.end()));
                    }
                    _ => changed.ranges.push(*range),
                }
            }
            at = part.end;
        }
        Ok(changed)
    }
}

/// Tells that bitmaps of an image cannot be looked at.
pub fn tell_unread(graph: &Graph<HostStore>, error: &Error) {
    let path = graph.handles()[0].path().display().to_string();
    tracing::warn!("{path}: the bitmaps inside the image are not kept up: {error}");
}
