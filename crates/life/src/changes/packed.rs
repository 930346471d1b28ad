//! [`Packed`]: the changed blocks of a disk on their way to another host, and [`Changes::adopt`], their arrival there.
//!
//! The other host gets a file as any other one, whose intervals are all settled. Bits that are set while it is sent may be missing in it. Whoever
//! sends it sees to those: the blocks of which data come to the other host after [`Changes::adopt`] are marked there, and what changes from the begin of the
//! sending on is copied after that.

use std::path::Path;
use std::sync::Arc;

use spile_core::{Error, ErrorKind, Files, OpenMode, Result, ResultExt, Segments, Store, StoreOffset, Via, yield_now};

use super::header::{COPY_BYTES, Grain, Header, Interval, MOST_CHECKPOINTS, PAGE_BYTES};
use super::tracked::Tracked;
use super::{Changes, Found, Surroundings, check_name, is_hidden, names, new_header};
use crate::motion::BACK_THERE;
use crate::work::Put;

/// So much is sent at once.
const PIECE_BYTES: usize = 256 << 10;

/// The changed blocks of a disk, as a file for another host.
pub struct Packed<S> {
    header: Header,
    /// For each interval of the header, those that it is made of: a hidden checkpoint stays here, and what has changed since belongs to the one before.
    parts: Vec<Vec<Arc<Tracked<S>>>>,
}

impl<F: Files + Clone> Changes<F> {
    /// What another host is to have of the checkpoints of the disk, which is `disk_bytes` long; and one more, `since`, from now on. `goes`: the disk goes there, and there is no other one of
    /// the same checkpoints then. `None` when there is nothing. Until [`Packed::send`] has ended nobody makes or removes checkpoints.
    ///
    /// # Errors
    /// `Corrupt` when the file is damaged; `Exhausted` when it would be too large.
    pub async fn pack(&self, disk_bytes: u64, since: Option<&str>, goes: bool) -> Result<Option<Packed<F::Store>>> {
        let state = self.state.lock().await;
        self.check_usable(&state)?;
        if state.is_damaged {
            return Err(Error::new(ErrorKind::Corrupt, "the file of changed blocks is damaged").at_path(&self.path));
        }
        let mut packed = Packed { header: new_header(disk_bytes, state.header.grain), parts: Vec::new() };
        if goes {
            packed.header.id = state.header.id;
        }
        for (interval, tracked) in state.header.intervals.iter().zip(&state.tracked) {
            let covered_bytes = interval.covered_bytes.min(disk_bytes);
            if is_hidden(&interval.name) {
                if let (Some(before), Some(parts)) = (packed.header.intervals.last_mut(), packed.parts.last_mut()) {
                    before.covered_bytes = before.covered_bytes.min(covered_bytes);
                    parts.push(tracked.clone());
                }
                continue;
            }
            let mut interval = interval.clone();
            (interval.covered_bytes, interval.room_bytes) = (covered_bytes, interval.room_bytes.min(disk_bytes));
            interval.is_bitmap = false;
            packed.put(interval, vec![tracked.clone()])?;
        }
        // The way back is of less use than the checkpoints.
        if let Some(name) = since.filter(|_| packed.header.intervals.len() < MOST_CHECKPOINTS) {
            let created_unix_s = self.around.env.now_unix_s();
            let (offset_bytes, room_bytes, settled) = (0, disk_bytes, None);
            let covered_bytes = disk_bytes;
            let name = name.to_owned();
            packed.put(
                Interval { name, created_unix_s, offset_bytes, covered_bytes, room_bytes, settled, is_bitmap: false },
                Vec::new(),
            )?;
        }
        Ok(Some(packed).filter(|packed| !packed.parts.is_empty()))
    }

    /// Takes the file at `packed`, which another host has sent, for that of the disk at `disk`, which is `disk_bytes` long and as `found`, in the place
    /// of one that is there. Whoever has that open uses it no more. No request may change the disk before [`Changes::attach`].
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported` when it is no such file; `InvalidInput` when it is that of another disk; the system's. What was there may be gone then.
    pub async fn adopt(
        around: Surroundings<F>,
        packed: &Path,
        disk: &Path,
        disk_bytes: u64,
        found: Found,
    ) -> Result<Self> {
        let side = names::changes(disk);
        let store = around.files.open(&packed.into(), OpenMode::ReadWrite).await?;
        let bytes = Segments::zeroed(store.len_bytes().min(2 * COPY_BYTES as u64) as usize);
        store.read_at(StoreOffset(0), &bytes, Via::Cached).await?;
        let mut header = Header::of_file(&bytes.to_vec()).map_err(|_| not_whole(packed))?;
        let len_bytes = store.len_bytes();
        let is_whole = |one: &Interval| one.settled.is_some() && one.place(header.grain).end <= len_bytes;
        if header.intervals.is_empty() || !header.intervals.iter().all(is_whole) {
            return Err(not_whole(packed));
        }
        check_foreign(&header).at_path(packed)?;
        if header.disk_bytes != disk_bytes {
            let what = format!("it is of a disk of {} bytes, and this one has {disk_bytes}", header.disk_bytes);
            return Err(Error::new(ErrorKind::InvalidInput, what).at_path(packed));
        }
        (header.stamp, header.mount_id, header.number) = (found.stamp, found.mount_id, header.number + 1);
        header.forget_bitmaps();
        let bytes = Segments::copied(&header.to_bytes());
        for copy in 0..2 {
            store.write_at(StoreOffset(copy * COPY_BYTES as u64), &bytes, Via::Cached).await?;
        }
        store.sync().await?;
        drop(store);
        around.files.rename(packed, &side).await?;
        let opened = Self::open(around, disk, disk_bytes, found).await?;
        opened.ok_or_else(|| Error::new(ErrorKind::NotFound, "it is gone again").at_path(&side))
    }
}

/// Refuses what no program of ours would send: it would cost memory, or hide what users do not see.
fn check_foreign(header: &Header) -> Result<()> {
    let Grain { block_bytes, area_bytes } = header.grain;
    let is_grain = block_bytes >= 4096 && area_bytes == Grain::default().area_bytes.max(block_bytes);
    let fits = |one: &Interval| one.room_bytes <= header.disk_bytes && one.covered_bytes <= one.room_bytes;
    if !is_grain || !header.intervals.iter().all(fits) || header.number > 1 << 62 {
        return Err(Error::new(ErrorKind::Corrupt, "no disk of this size has such a file of changed blocks"));
    }
    let mut before = Header { intervals: Vec::new(), ..header.clone() };
    for one in &header.intervals {
        check_name(&before, &one.name)?;
        if is_hidden(&one.name) && !one.name.starts_with(BACK_THERE) {
            return Err(Error::new(ErrorKind::Corrupt, format!("{:?} cannot be the name of a checkpoint", one.name)));
        }
        before.intervals.push(one.clone());
    }
    Ok(())
}

fn not_whole(packed: &Path) -> Error {
    Error::new(ErrorKind::Corrupt, "this is no whole file of changed blocks").at_path(packed)
}

impl<S: Store> Packed<S> {
    fn put(&mut self, mut interval: Interval, parts: Vec<Arc<Tracked<S>>>) -> Result<()> {
        interval.offset_bytes = 0;
        let place = interval.place(self.header.grain);
        interval.offset_bytes = self.header.free_place(place.end - place.start);
        if !interval.fits(self.header.grain) {
            return Err(Error::new(ErrorKind::Exhausted, "the checkpoints are too large for one file"));
        }
        self.header.intervals.push(interval);
        self.parts.push(parts);
        Ok(())
    }

    /// How long the file is. A part of it that is not sent is zero.
    pub fn len_bytes(&self) -> u64 {
        let ends = self.header.intervals.iter().map(|interval| interval.place(self.header.grain).end);
        ends.max().unwrap_or_default().next_multiple_of(PAGE_BYTES)
    }

    /// Gives each piece of the file to `put`, with its place. What makes it a whole file comes last. Each bit is in it that was set when this began.
    ///
    /// # Errors
    /// Those of `put`; `Io` when changes are not noted any more.
    pub async fn send(mut self, put: Put<'_>) -> Result<()> {
        let grain = self.header.grain;
        for (interval, parts) in self.header.intervals.iter_mut().zip(&self.parts) {
            let (base, len) = (interval.offset_bytes + interval.marks_bytes(grain), interval.bits_bytes(grain));
            let (mut hash, mut piece) = (crc32fast::Hasher::new(), vec![0; PIECE_BYTES]);
            for at in (0..len as usize).step_by(PIECE_BYTES) {
                let piece = &mut piece[..PIECE_BYTES.min(len as usize - at)];
                piece.fill(0);
                parts.iter().for_each(|part| part.bits().add_to(at, piece));
                hash.update(piece);
                if piece.iter().any(|byte| *byte != 0) {
                    put(base + at as u64, Segments::copied(piece)).await?;
                }
                yield_now().await;
            }
            if parts.iter().any(|part| part.is_lost()) {
                return Err(Error::new(ErrorKind::Io, "changes are not noted any more"));
            }
            interval.settled = Some(hash.finalize());
        }
        let header = Segments::copied(&self.header.to_bytes());
        put(COPY_BYTES as u64, header.clone()).await?;
        put(0, header).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_another_host_is_bounded_by_the_disk_and_hides_nothing() {
        let one = |name: &str, room_bytes| {
            let (name, covered_bytes) = (name.to_owned(), 1 << 20);
            Interval {
                name,
                created_unix_s: 1,
                offset_bytes: 0,
                covered_bytes,
                room_bytes,
                settled: Some(0),
                is_bitmap: false,
            }
        };
        let header = |grain, intervals| Header { intervals, ..new_header(1 << 30, grain) };
        let usual = Grain::default();
        let back = format!("{BACK_THERE}a7");
        assert!(check_foreign(&header(usual, vec![one("a", 1 << 30), one(&back, 1 << 20)])).is_ok());
        let large = Grain { block_bytes: 128 << 20, area_bytes: 128 << 20 };
        assert!(check_foreign(&header(large, vec![one("a", 1 << 30)])).is_ok());
        for (grain, intervals) in [
            (Grain { block_bytes: 512, area_bytes: 512 }, vec![one("a", 1 << 30)]),
            (Grain { area_bytes: 64 << 10, ..usual }, vec![one("a", 1 << 30)]),
            (usual, vec![one("a", (1 << 30) + 1)]),
            (usual, vec![one("a", 1 << 19)]),
            (usual, vec![one("a", 1 << 30), one("a", 1 << 30)]),
            (usual, vec![one("\u{1}move", 1 << 30)]),
            (usual, vec![one("a\nb", 1 << 30)]),
        ] {
            assert!(check_foreign(&header(grain, intervals.clone())).is_err(), "{grain:?} {intervals:?}");
        }
        assert!(check_foreign(&Header { number: u64::MAX, ..header(usual, vec![one("a", 1 << 30)]) }).is_err());
    }
}
