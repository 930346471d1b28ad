//! Bitmaps inside an image while it is open: which of them are kept up, and how they are saved.
//!
//! # Order of writes
//!
//! 1. Before the first change of the image, and at once where its bits lack what is known to have changed, each bitmap that must note all changes is in use,
//!    durably: from then on no program believes its bits. The directory is changed in place; the bit of the header that calls bitmaps consistent stays set.
//! 2. When the image is sealed, the bits of those that somebody keeps up are written to clusters that nothing refers to, with new tables and a
//!    new directory, in which these bitmaps are not in use. Then a sync.
//! 3. The header names the new directory: by one field that is in one sector. Then a sync.
//! 4. The old directory, tables and bits are free.
//!
//! So whatever ends meanwhile, all these bitmaps are in use, or all are true: space may be leaked. A bitmap that was in use before, that nobody
//! keeps up, or that does not note changes, stays as it is, byte for byte. What cannot be saved stays in use.
//!
//! A bit of the header that no other program knows, and that therefore each one clears before it writes, says that all changes since come from who keeps
//! bitmaps up ([`KEPT_UP`]). It is durable before any bitmap is in use. So after a kill it tells whether anybody else has written.
//!
//! A bitmap is removed by a new directory, too: it and its number are named by one write within a sector.

mod directory;
mod save;

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use async_lock::OnceCell;
use spile_core::{Error, ErrorKind, Extent, Result, ResultExt, Segments, Store, StoreOffset, Via};

use self::directory::{Directory, Found, clusters_of, must_note, table_part};
use super::Qcow2;
use super::codec::bitmap::{Bitmap, Bits, flag};
use super::codec::header::{Header, feature};
use super::data_file;
use super::open::read;
use super::refcounts::Refcounts;
use super::writing::{AUTOCLEAR_AT, Writing};
use crate::bitmaps::{BitmapPart, BitmapState, BrokenBitmaps, InnerBitmap, KeptBitmaps};
use crate::layer::Layer as _;

/// Granularities that other programs know.
const GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;
/// QEMU does not open an image with a bitmap whose table stands for more clusters than that.
const MOST_BITS_BYTES: u64 = 512 << 20;
/// The autoclear feature of an image that nobody has written to since but who keeps its bitmaps up.
pub(super) const KEPT_UP: u64 = 1 << 63;
/// An answer has about so many ranges at most.
const MOST_RANGES: usize = 16 << 10;
/// So many entries of a table without ranges are gone through for one answer.
const MOST_ENTRIES: usize = 1 << 12;

/// The directory of an image that is open for reading only, once somebody has asked for it: nobody changes it meanwhile, and a map of changed blocks takes many
/// questions.
#[derive(Default)]
pub(super) struct SeenDirectory(OnceCell<Arc<Found>>);

impl<S: Store> Qcow2<S> {
    /// The directory as the file has it.
    async fn directory(&self) -> Result<Arc<Found>> {
        let read = async || Directory::read(&self.store).await.map(Arc::new);
        match self.writing {
            Some(_) => read().await,
            None => self.seen_directory.0.get_or_try_init(read).await.cloned(),
        }
    }

    /// The bitmaps of the image; `None` where they are not consistent.
    pub(super) async fn list_bitmaps(&self) -> Result<Option<Vec<InnerBitmap>>> {
        Ok(match &*self.directory().await? {
            Found::None => Some(Vec::new()),
            Found::Unsound => None,
            Found::Sound(directory) => {
                let in_use = match directory.head.header.autoclear & KEPT_UP != 0 {
                    true => BitmapState::KeptUp,
                    false => BitmapState::InUse,
                };
                Some(directory.entries.iter().filter_map(|(bitmap, _)| told(bitmap, in_use)).collect())
            }
        })
    }

    /// What is set in the bitmap `name`, from the start of `asked` on.
    pub(super) async fn read_bitmap_part(&self, name: &str, asked: Range<u64>) -> Result<BitmapPart> {
        let found = self.directory().await?;
        let (directory, number) = found.bitmap(name).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("the image has no bitmap {name:?}")).at_path(self.store.path())
        })?;
        let (head, bitmap) = (&directory.head, &directory.entries[number].0);
        let (size, span) = (head.header.size_bytes, self.entry_span(bitmap));
        let first = asked.start / span;
        let mut part = BitmapPart { ranges: Vec::new(), end: first.saturating_mul(span).min(size) };
        let begin = part.end;
        for entry in table_part(&self.store, head, bitmap, first).await?.into_iter().take(MOST_ENTRIES) {
            let within = part.end..part.end.saturating_add(span).min(size);
            match entry {
                Bits::Clear => {}
                Bits::Set => add(&mut part.ranges, within.clone()),
                Bits::At(place) => {
                    let bytes = read(&self.store, place, head.header.cluster_bytes()).await?;
                    ranges(&bytes, bitmap.granularity_bits, &within).for_each(|range| add(&mut part.ranges, range));
                }
            }
            part.end = within.end;
            if part.end >= size.min(asked.end) || part.ranges.len() >= MOST_RANGES {
                break;
            }
        }
        if part.end < size && part.end == begin {
            return Err(Error::new(ErrorKind::Corrupt, "the table of a bitmap is too short for the disk"));
        }
        Ok(part)
    }

    /// The bytes of the disk that one entry of a bitmap's table is for.
    fn entry_span(&self, bitmap: &Bitmap) -> u64 {
        (self.head.header.cluster_bytes() * 8).saturating_mul(1 << bitmap.granularity_bits)
    }

    /// Notes who keeps up which bitmaps, in the place of who did so before. Nobody does where the clusters of any bitmap are not its own alone, for space that
    /// something else uses would be freed.
    pub(super) async fn keep_sound_bitmaps(&self, kept: KeptBitmaps) -> Result<Vec<String>> {
        let is_behind = kept.is_behind && kept.broken != BrokenBitmaps::BehindLate;
        let names = self.note_kept(kept).await?;
        if is_behind {
            // Bitmaps are in use from here on, those too that nobody keeps up.
            self.writing().await?;
        }
        Ok(names)
    }

    async fn note_kept(&self, mut kept: KeptBitmaps) -> Result<Vec<String>> {
        let writing = self.writing.as_ref().ok_or_else(|| self.read_only_error())?;
        let mut slot = writing.bitmaps.lock().await;
        *slot = None;
        if kept.names.is_empty() {
            return Ok(Vec::new());
        }
        let Found::Sound(directory) = Directory::read(&self.store).await? else { return Ok(Vec::new()) };
        if !self.are_all_own(writing, &directory).await? {
            return Ok(Vec::new());
        }
        kept.names.retain(|name| directory.find(name).is_some());
        let names = kept.names.clone();
        *slot = Some(kept).filter(|kept| !kept.names.is_empty());
        Ok(names)
    }

    /// True when the clusters of the directory and of each bitmap are theirs alone.
    async fn are_all_own(&self, writing: &Writing, directory: &Directory) -> Result<bool> {
        let (mut known, mut counts) = (HashSet::new(), writing.counts.lock().await);
        if !self.are_own(&mut counts, &mut known, directory.clusters().collect()).await? {
            return Ok(false);
        }
        for (bitmap, _) in &directory.entries {
            if is_too_large(bitmap.table_entries.into(), &directory.head.header) {
                return Ok(false);
            }
            let clusters = match clusters_of(&self.store, &directory.head, bitmap).await {
                Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(false),
                clusters => clusters?,
            };
            if !self.are_own(&mut counts, &mut known, clusters).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// True when each of `clusters` is counted once, holds no other table, and is not in `known`, to which all are added.
    async fn are_own(&self, counts: &mut Refcounts, known: &mut HashSet<u64>, clusters: Vec<u64>) -> Result<bool> {
        for cluster in clusters {
            let is_own = known.insert(cluster) && !counts.is_metadata(cluster);
            if !is_own || counts.get(&self.store, cluster).await? != 1 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Has each bitmap that must note all changes be in use. Returns the autoclear features that the image has from then on: that its bitmaps are consistent as a
    /// whole, and that somebody keeps them up. The caller writes them, and syncs.
    pub(super) async fn use_bitmaps(&self, writing: &Writing) -> Result<u64> {
        if self.head.extensions.bitmaps.is_none() {
            return Ok(0);
        }
        let kept = writing.bitmaps.lock().await;
        let directory = Directory::read(&self.store).await;
        // What cannot be read is not called consistent any more.
        let Ok(Found::Sound(directory)) = directory else { return Ok(0) };
        // The mark could hit what is something else's, and bits that share their place are no bits after a change.
        if !self.are_all_own(writing, &directory).await.unwrap_or(false) {
            return Ok(0);
        }
        let features = feature::BITMAPS | kept.as_ref().map_or(0, |_| KEPT_UP);
        if features & KEPT_UP & !directory.head.header.autoclear != 0 {
            // Whoever finds them in use after a power cut knows who has written.
            let all = features | data_file::kept_autoclear(&directory.head.header);
            self.write_header(AUTOCLEAR_AT, &all.to_be_bytes()).await?;
            self.store.sync().await?;
        }
        if kept.as_ref().is_none_or(|kept| kept.broken != BrokenBitmaps::InUseLate) {
            self.write_in_use(*directory, must_note).await?;
        }
        Ok(features)
    }

    /// Writes the directory with those bitmaps in use that `which` says.
    async fn write_in_use(&self, mut directory: Directory, which: impl Fn(&Bitmap) -> bool) -> Result<()> {
        let concerned: Vec<usize> = (0..directory.entries.len()).filter(|n| which(&directory.entries[*n].0)).collect();
        let (Some(first), Some(last)) = (concerned.first(), concerned.last()) else { return Ok(()) };
        for number in &concerned {
            let flags = directory.entries[*number].0.flags | flag::IN_USE;
            directory.set_flags(*number, flags);
        }
        let within = directory.entries[*first].1.start..directory.entries[*last].1.end;
        let at = StoreOffset(directory.place.directory_offset + within.start as u64);
        self.store.write_at(at, &Segments::copied(&directory.bytes[within]), Via::Cached).await
    }

    /// The disk is about to have `size_bytes`: bitmaps whose tables would not fit to that are in use, durably. Those that note changes are so already.
    pub(super) async fn use_bitmaps_of_other_size(&self, writing: &Writing, size_bytes: u64) -> Result<()> {
        if self.head.extensions.bitmaps.is_none() {
            return Ok(());
        }
        let _alone = writing.bitmaps.lock().await;
        let Found::Sound(directory) = Directory::read(&self.store).await? else { return Ok(()) };
        let bits = directory.head.header.cluster_bits;
        // Also those that are in use by what is read: storage may have lost that when an earlier sync failed.
        let is_other = |bitmap: &Bitmap| bitmap.needed_entries(size_bytes, bits) != u64::from(bitmap.table_entries);
        self.write_in_use(*directory, is_other).await?;
        self.store.sync().await
    }

    /// Removes a bitmap that is kept up.
    pub(super) async fn remove_kept_bitmap(&self, name: &str) -> Result<()> {
        let writing = self.writing().await?;
        let mut slot = writing.bitmaps.lock().await;
        let Found::Sound(directory) = Directory::read(&self.store).await? else { return Ok(()) };
        let Some(number) = directory.find(name) else { return Ok(()) };
        let Some(kept) = slot.as_mut().filter(|kept| kept.names.iter().any(|known| known == name)) else {
            // Nobody has looked whether its space is its own.
            let path = self.store.path().display();
            tracing::warn!(
                "{path}: the bitmap {name:?} stays in the image, in use: qemu-img bitmap --remove takes it out"
            );
            return Ok(());
        };
        self.remove_entry(writing, *directory, number).await.at_path(self.store.path())?;
        kept.names.retain(|known| known != name);
        Ok(())
    }
}

/// True for a bitmap with so many entries in its table that QEMU does not open the image.
fn is_too_large(table_entries: u64, header: &Header) -> bool {
    table_entries.saturating_mul(header.cluster_bytes()) > MOST_BITS_BYTES
}

/// What is told of `bitmap`. `in_use`: what those are that are in use.
fn told(bitmap: &Bitmap, in_use: BitmapState) -> Option<InnerBitmap> {
    let is_known = bitmap.knows_extra() && GRANULARITY_BITS.contains(&bitmap.granularity_bits);
    let state = match bitmap.flags & flag::IN_USE != 0 {
        _ if !is_known => BitmapState::Unknown,
        true => in_use,
        false => BitmapState::Good,
    };
    Some(InnerBitmap {
        name: String::from_utf8(bitmap.name.clone()).ok()?,
        granularity_bytes: 1 << bitmap.granularity_bits,
        records: bitmap.flags & flag::AUTO != 0,
        state,
    })
}

/// Adds a range that comes behind the others, or goes on with the last one.
fn add(ranges: &mut Vec<Extent>, range: std::ops::Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end() == range.start => *last = Extent::from_range(last.start()..range.end),
        _ => ranges.push(Extent::from_range(range)),
    }
}

/// The parts of the disk that are set in `bytes`, which are for the part `within`.
fn ranges<'b>(
    bytes: &'b [u8],
    granularity_bits: u8,
    within: &std::ops::Range<u64>,
) -> impl Iterator<Item = std::ops::Range<u64>> + 'b {
    let within = within.clone();
    let set = (0u64..).zip(bytes).filter(|(_, byte)| **byte != 0);
    set.flat_map(|(at, byte)| (0..8).filter(move |bit| byte >> bit & 1 != 0).map(move |bit| at * 8 + bit)).filter_map(
        move |bit| {
            let start = within.start + (bit << granularity_bits);
            (start < within.end).then(|| start..(start + (1 << granularity_bits)).min(within.end))
        },
    )
}
