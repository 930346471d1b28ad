//! Writing the bits of bitmaps into the image, and taking a bitmap out of it.

use std::ops::Range;

use spile_core::{Error, ErrorKind, Result, Segments, Store, StoreOffset, Via, yield_now};

use super::super::Qcow2;
use super::super::alloc::runs;
use super::super::codec::bitmap::{Bitmap, BitmapsExtension, flag};
use super::super::codec::extension::kind;
use super::super::codec::header::{Header, feature};
use super::super::codec::table::encode;
use super::super::create::write;
use super::super::first_cluster;
use super::super::open::read_head;
use super::super::writing::{AUTOCLEAR_AT, Writing};
use super::directory::{Directory, Found, clusters_of, extension_at, must_note};
use super::{KEPT_UP, is_too_large};
use crate::bitmaps::{BrokenBitmaps, KeptBitmaps};

/// So much of the disk is asked for at once.
const ASKED_BYTES: u64 = 1 << 30;
/// What a power cut leaves whole, in bytes.
const SECTOR: u64 = 512;

/// What a new directory brings and leaves.
#[derive(Default)]
struct Exchange {
    /// Clusters that nothing refers to before.
    new: Vec<u64>,
    /// Clusters that nothing refers to after.
    old: Vec<u64>,
}

impl<S: Store> Qcow2<S> {
    /// Saves the bitmaps that somebody keeps up. What cannot be saved stays in use, which is told in the log.
    pub(in super::super) async fn save_bitmaps(&self, writing: &Writing) {
        // It stays there meanwhile: what is kept up is in use only while the header says that somebody keeps it up.
        let Some(kept) = writing.bitmaps.lock().await.clone() else { return };
        if kept.names.is_empty() || writing.is_broken() {
            return;
        }
        if let Err(error) = self.save_all(&kept).await {
            let path = self.store.path().display();
            tracing::warn!(
                "{path}: the bitmaps inside the image are not saved, and no other program believes them: {error}"
            );
        }
    }

    async fn save_all(&self, kept: &KeptBitmaps) -> Result<()> {
        let Some(mut directory) = self.sound().await? else { return Ok(()) };
        let is_late = kept.broken == BrokenBitmaps::InUseLate;
        let is_unsaved = |bitmap: &Bitmap| bitmap.flags & flag::IN_USE != 0 || is_late;
        let is_kept = |bitmap: &Bitmap| kept.names.iter().any(|name| name.as_bytes() == bitmap.name);
        if !directory.entries.iter().any(|(bitmap, _)| is_kept(bitmap) && is_unsaved(bitmap)) {
            return Ok(());
        }
        let writing = self.writing().await?;
        if is_late {
            self.write_in_use(*directory, must_note).await?;
            let Some(again) = self.sound().await? else { return Ok(()) };
            directory = again;
        }
        let mut exchange = Exchange::default();
        let saved = self.save_each(writing, kept, &mut directory, &mut exchange).await;
        if saved.is_err() {
            // A write to them may be under way still.
            writing.space().lost.append(&mut exchange.new);
        }
        match saved? {
            true => self.exchange(writing, *directory, exchange, kept.broken).await,
            false => Ok(()),
        }
    }

    async fn sound(&self) -> Result<Option<Box<Directory>>> {
        Ok(match Directory::read(&self.store).await? {
            Found::Sound(directory) => Some(directory),
            _ => None,
        })
    }

    /// Writes the bits of each bitmap that is in use and kept up to new places, and changes the directory in memory. False when there is none.
    async fn save_each(
        &self,
        writing: &Writing,
        kept: &KeptBitmaps,
        directory: &mut Directory,
        exchange: &mut Exchange,
    ) -> Result<bool> {
        let mut saved = false;
        for name in &kept.names {
            let Some(number) = directory.find(name) else { continue };
            let bitmap = directory.entries[number].0.clone();
            if bitmap.flags & flag::IN_USE == 0 {
                continue;
            }
            let header = &directory.head.header;
            let size = header.size_bytes;
            if is_too_large(bitmap.needed_entries(size, header.cluster_bits), header) {
                let path = self.store.path().display();
                tracing::warn!(
                    "{path}: the bitmap {name:?} stays in use: QEMU opens no image with one of so many bits"
                );
                continue;
            }
            let old = clusters_of(&self.store, &directory.head, &bitmap).await?;
            match self.write_bits(writing, kept, (name, &bitmap), size, exchange).await {
                // Nobody knows of it any more.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                written => {
                    let (table_offset, entries) = written?;
                    directory.set_table(number, table_offset, entries);
                }
            }
            directory.set_flags(number, bitmap.flags & !flag::IN_USE);
            exchange.old.extend(old);
            saved = true;
        }
        Ok(saved)
    }

    /// Writes what has changed since the bitmap was made to new clusters. Returns where its table is, and how many entries that has.
    async fn write_bits(
        &self,
        writing: &Writing,
        kept: &KeptBitmaps,
        (name, bitmap): (&str, &Bitmap),
        size_bytes: u64,
        exchange: &mut Exchange,
    ) -> Result<(u64, u32)> {
        let (cluster_bytes, span) = (self.head.header.cluster_bytes(), self.entry_span(bitmap));
        let mut table = Vec::new();
        for start in (0..size_bytes.div_ceil(span)).map(|number| number * span) {
            let within = start..start.saturating_add(span).min(size_bytes);
            let bits = bits_of(kept, (name, bitmap), within.clone(), size_bytes, cluster_bytes as usize).await?;
            let count = (within.end - within.start).div_ceil(1 << bitmap.granularity_bits);
            table.push(match bits {
                None => 0,
                Some(bits) if are_all_set(&bits, count) => 1,
                Some(bits) => {
                    let cluster = self.take_cluster(writing).await?;
                    exchange.new.push(cluster);
                    write(&self.store, self.start_of(cluster), &bits).await?;
                    self.start_of(cluster)
                }
            });
            yield_now().await;
        }
        let run = self.take_run(writing, (table.len() as u64 * 8).div_ceil(cluster_bytes)).await?;
        exchange.new.extend(run.clone());
        write(&self.store, self.start_of(run.start), &encode(&table)).await?;
        Ok((self.start_of(run.start), table.len() as u32))
    }

    /// Has the header name `directory`, at another place, in the place of the one that it names. What that refers to alone is free then.
    async fn exchange(
        &self,
        writing: &Writing,
        mut directory: Directory,
        mut exchange: Exchange,
        broken: BrokenBitmaps,
    ) -> Result<()> {
        exchange.old.extend(directory.clusters());
        let written = async {
            let cluster_bytes = self.head.header.cluster_bytes();
            let run = self.take_run(writing, (directory.bytes.len() as u64).div_ceil(cluster_bytes)).await?;
            exchange.new.extend(run.clone());
            write(&self.store, self.start_of(run.start), &directory.bytes).await?;
            if broken == BrokenBitmaps::FreedEarly {
                self.free_all(writing, std::mem::take(&mut exchange.old)).await;
            }
            if broken != BrokenBitmaps::NamedEarly {
                self.store.sync().await?;
            }
            Ok::<_, Error>(run)
        };
        let written = written.await;
        let run = match written {
            Ok(run) => run,
            Err(error) => {
                writing.space().lost.append(&mut exchange.new);
                return Err(error);
            }
        };
        let was = directory.place;
        directory.place.count = directory.entries.len() as u32;
        directory.place.directory_bytes = directory.bytes.len() as u64;
        directory.place.directory_offset = self.start_of(run.start);
        {
            let _alone = writing.header.lock().await;
            let at = match self.place_to_write(&was, &directory.place).await {
                Ok(at) => at,
                Err(error) => {
                    writing.space().lost.append(&mut exchange.new);
                    return Err(error);
                }
            };
            let new = directory.place.to_bytes();
            // A size that stays needs no sector of its own for all of it. When this fails, the header may name either directory: neither is freed.
            let from = if was.count == directory.place.count { 16 } else { 0 };
            self.store.write_at(StoreOffset(at + from as u64), &Segments::copied(&new[from..]), Via::Cached).await?;
            self.store.sync().await?;
            self.now.set_bitmaps(read_head(&self.store).await?);
        }
        self.free_all(writing, exchange.old).await;
        Ok(())
    }

    /// Where the header names the bitmaps now, while nobody else changes it: another parent's name may have moved that since the directory was read.
    async fn place_to_write(&self, was: &BitmapsExtension, new: &BitmapsExtension) -> Result<u64> {
        let head = read_head(&self.store).await?;
        if head.extensions.bitmaps.as_ref() != Some(was) {
            return Err(
                Error::new(ErrorKind::Corrupt, "the image names other bitmaps than it did").at_path(self.store.path())
            );
        }
        let at = extension_at(&head);
        if was.count != new.count && at % SECTOR > SECTOR - new.to_bytes().len() as u64 {
            return Err(cannot_remove());
        }
        Ok(at)
    }

    /// Frees what nothing refers to any more, durably. What cannot be freed is leaked.
    async fn free_all(&self, writing: &Writing, mut clusters: Vec<u64>) {
        clusters.sort_unstable();
        let mut counts = writing.counts.lock().await;
        for run in runs(&clusters) {
            if let Err(error) = self.release(&mut counts, run).await {
                let path = self.store.path().display();
                tracing::warn!("{path}: space of a bitmap is lost (spile check --repair reclaims it): {error}");
            }
        }
    }

    /// Takes the bitmap number `number` out of the directory.
    pub(super) async fn remove_entry(&self, writing: &Writing, mut directory: Directory, number: usize) -> Result<()> {
        if directory.entries.len() == 1 {
            return self.remove_last(writing, directory).await;
        }
        let (bitmap, within) = directory.entries.remove(number);
        directory.bytes.drain(within);
        let old = clusters_of(&self.store, &directory.head, &bitmap).await?;
        self.exchange(writing, directory, Exchange { new: Vec::new(), old }, BrokenBitmaps::Nothing).await
    }

    /// Takes the only bitmap out of the image, and with it the directory: first no bitmap is called consistent any more.
    async fn remove_last(&self, writing: &Writing, directory: Directory) -> Result<()> {
        let mut old = clusters_of(&self.store, &directory.head, &directory.entries[0].0).await?;
        old.extend(directory.clusters());
        {
            let _alone = writing.header.lock().await;
            self.name_none(&directory.place).await?;
            self.now.set_bitmaps(read_head(&self.store).await?);
        }
        self.free_all(writing, old).await;
        Ok(())
    }

    /// Has the header name no bitmaps any more, in the place of `was`, while nobody else changes it.
    async fn name_none(&self, was: &BitmapsExtension) -> Result<()> {
        let at = self.place_to_write(was, was).await?;
        let head = read_head(&self.store).await?;
        let all = &head.extensions.all;
        let is_at_end = all.last().is_some_and(|extension| extension.kind == kind::BITMAPS);
        let others = all.iter().filter(|extension| extension.kind != kind::BITMAPS).cloned().collect();
        let header = Header { autoclear: head.header.autoclear & !(feature::BITMAPS | KEPT_UP), ..head.header.clone() };
        let autoclear = Segments::copied(&header.autoclear.to_be_bytes());
        let change = first_cluster::change(&head, header, others, head.backing.as_deref());
        if !is_at_end && change.is_none() {
            return Err(cannot_remove());
        }
        self.store.write_at(StoreOffset(AUTOCLEAR_AT), &autoclear, Via::Cached).await?;
        self.store.sync().await?;
        match change {
            // What begins with zeroes ends the extensions.
            _ if is_at_end => self.store.write_at(StoreOffset(at - 8), &Segments::zeroed(8), Via::Cached).await?,
            Some(change) => change.write(&self.store).await?,
            None => {}
        }
        self.store.sync().await
    }
}

fn cannot_remove() -> Error {
    let what =
        "the bitmap cannot be removed while the image is in use: the first cluster has no room for that in one step";
    Error::new(ErrorKind::Unsupported, what).hint("end its server, and use qemu-img bitmap --remove")
}

/// The bits of a bitmap for the part `within` of the disk, which one cluster has room for; `None` when none is set.
async fn bits_of(
    kept: &KeptBitmaps,
    (name, bitmap): (&str, &Bitmap),
    within: Range<u64>,
    size_bytes: u64,
    cluster_bytes: usize,
) -> Result<Option<Vec<u8>>> {
    let mut bits: Option<Vec<u8>> = None;
    let mut at = within.start;
    while at < within.end {
        let end = within.end.min(at + ASKED_BYTES);
        for range in kept.changed.changed(name, at..end, size_bytes).await? {
            let clipped = range.start().max(within.start)..range.end().min(within.end);
            if clipped.start < clipped.end {
                let bits = bits.get_or_insert_with(|| vec![0; cluster_bytes]);
                let number = |at: u64| (at - within.start) >> bitmap.granularity_bits;
                let dropped = u64::from(kept.broken == BrokenBitmaps::BitDropped);
                (number(clipped.start)..number(clipped.end - 1) + 1 - dropped)
                    .for_each(|bit| bits[bit as usize / 8] |= 1 << (bit % 8));
            }
        }
        at = end;
        yield_now().await;
    }
    Ok(bits)
}

/// True when each of the first `count` bits is set.
fn are_all_set(bits: &[u8], count: u64) -> bool {
    let whole = count as usize / 8;
    let rest = (1u16 << (count % 8)) - 1;
    bits[..whole].iter().all(|byte| *byte == 0xff) && (rest == 0 || u16::from(bits[whole]) & rest == rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_behind_the_end_do_not_matter() {
        assert!(are_all_set(&[0xff, 0xff], 16) && are_all_set(&[0xff, 0x07], 11));
        assert!(!are_all_set(&[0xff, 0x07], 12) && !are_all_set(&[0xfe, 0xff], 16));
    }
}
