//! [`Directory`]: the directory of bitmaps as the file has it, all of it checked.

use std::collections::HashSet;

use spile_core::{Error, ErrorKind, Result, ResultExt, Store};

use super::super::codec::bitmap::{Bitmap, BitmapsExtension, Bits, flag};
use super::super::codec::extension::{Extension, kind};
use super::super::codec::header::feature;
use super::super::codec::table::decode;
use super::super::open::{Head, read, read_head};

/// A directory that is longer is not kept up: it is read as a whole.
const MOST_BYTES: u64 = 1 << 20;
/// So much of a bitmap's table is read at once.
const TABLE_READ_BYTES: u64 = 256 << 10;
/// Where the entry of a bitmap has the place of its table, the table's length, and its flags.
const TABLE_AT: usize = 0;
const ENTRIES_AT: usize = 8;
const FLAGS_AT: usize = 12;

/// The directory of an image whose bitmaps are consistent as a whole.
pub(super) struct Directory {
    pub head: Head,
    pub place: BitmapsExtension,
    /// All of it, byte for byte.
    pub bytes: Vec<u8>,
    /// The bitmaps, and where the entry of each begins and ends.
    pub entries: Vec<(Bitmap, std::ops::Range<usize>)>,
}

/// What an image has.
pub(super) enum Found {
    /// No bitmaps.
    None,
    /// Bitmaps that are not consistent, or that cannot be told.
    Unsound,
    /// Bitmaps.
    Sound(Box<Directory>),
}

impl Found {
    /// The directory, and the number of the bitmap `name` in it.
    pub fn bitmap(&self, name: &str) -> Option<(&Directory, usize)> {
        let Self::Sound(directory) = self else { return None };
        directory.find(name).map(|number| (&**directory, number))
    }
}

impl Directory {
    /// The directory of the image in `store`.
    ///
    /// # Errors
    /// The store's.
    pub async fn read<S: Store>(store: &S) -> Result<Found> {
        let head = read_head(store).await?;
        let Some(place) = head.extensions.bitmaps else { return Ok(Found::None) };
        let end = place.directory_offset.checked_add(place.directory_bytes);
        let is_inside = end.is_some_and(|end| end <= store.len_bytes());
        let says_so = head.header.version >= 3 && head.header.autoclear & feature::BITMAPS != 0;
        if !says_so || !is_inside || place.directory_bytes > MOST_BYTES {
            return Ok(Found::Unsound);
        }
        let bytes = read(store, place.directory_offset, place.directory_bytes).await?;
        let Some(entries) = entries(&bytes, place.count, &head) else { return Ok(Found::Unsound) };
        Ok(Found::Sound(Box::new(Self { head, place, bytes, entries })))
    }

    /// The number of the bitmap `name`.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.entries.iter().position(|(bitmap, _)| bitmap.name == name.as_bytes())
    }

    /// The bitmap number `number` has these flags.
    pub fn set_flags(&mut self, number: usize, flags: u32) {
        self.entries[number].0.flags = flags;
        self.put(number, FLAGS_AT, flags);
    }

    /// The table of the bitmap number `number` is another one.
    pub fn set_table(&mut self, number: usize, offset: u64, entries: u32) {
        let at = self.entries[number].1.start + TABLE_AT;
        self.bytes[at..at + 8].copy_from_slice(&offset.to_be_bytes());
        self.put(number, ENTRIES_AT, entries);
        (self.entries[number].0.table_offset, self.entries[number].0.table_entries) = (offset, entries);
    }

    fn put(&mut self, number: usize, field: usize, value: u32) {
        let at = self.entries[number].1.start + field;
        self.bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }

    /// The clusters of the directory itself.
    pub fn clusters(&self) -> std::ops::Range<u64> {
        let bits = self.head.header.cluster_bits;
        let end = self.place.directory_offset + self.place.directory_bytes;
        self.place.directory_offset >> bits..end.div_ceil(1 << bits)
    }
}

/// All entries of a directory, if they are sound and end where it ends.
fn entries(bytes: &[u8], count: u32, head: &Head) -> Option<Vec<(Bitmap, std::ops::Range<usize>)>> {
    let (mut at, mut all, mut names) = (0, Vec::new(), HashSet::new());
    for _ in 0..count {
        let (bitmap, len) = Bitmap::parse(bytes.get(at..)?).ok()?;
        bitmap.check(head.header.size_bytes, head.header.cluster_bits).ok()?;
        if !names.insert(bitmap.name.clone()) {
            return None;
        }
        all.push((bitmap, at..at + len));
        at += len;
    }
    (at == bytes.len()).then_some(all)
}

/// Where the data of the extension that names the directory are in the file.
pub(super) fn extension_at(head: &Head) -> u64 {
    let before = head.extensions.all.iter().take_while(|extension| extension.kind != kind::BITMAPS);
    let bytes: u64 = before.map(extension_bytes).sum();
    u64::from(head.header.header_bytes) + bytes + 8
}

/// What an extension takes in the first cluster.
fn extension_bytes(extension: &Extension) -> u64 {
    8 + (extension.data.len() as u64).next_multiple_of(8)
}

/// True for a bitmap that must note all changes. Also for one that is in use by what is read: when the sync of that has failed before, the page cache has it,
/// and storage may not.
pub(super) fn must_note(bitmap: &Bitmap) -> bool {
    bitmap.flags & flag::AUTO != 0
}

/// The entries of the table of `bitmap`, from the one of number `first` on: as many as are read at once.
///
/// # Errors
/// `Corrupt` for a table that is not there, or says what cannot be; the store's.
pub(super) async fn table_part<S: Store>(store: &S, head: &Head, bitmap: &Bitmap, first: u64) -> Result<Vec<Bits>> {
    let (bits, len) = (head.header.cluster_bits, store.len_bytes());
    let corrupt = |what: &str| Error::new(ErrorKind::Corrupt, what.to_owned()).at_offset(bitmap.table_offset);
    let left = (u64::from(bitmap.table_entries).saturating_sub(first) * 8).min(TABLE_READ_BYTES);
    let at = bitmap.table_offset + first * 8;
    if at.checked_add(left).is_none_or(|end| end > len) {
        return Err(corrupt("the table of a bitmap goes past the end of the file"));
    }
    let mut all = Vec::new();
    for entry in decode(&read(store, at, left).await?) {
        let entry = Bits::parse(entry, bits).map_err(Error::from).at_offset(at)?;
        if let Bits::At(place) = entry
            && place + (1 << bits) > len
        {
            return Err(corrupt("bits of a bitmap lie past the end of the file"));
        }
        all.push(entry);
    }
    Ok(all)
}

/// The clusters of the table of `bitmap`, and those of its bits.
///
/// # Errors
/// As [`table_part`].
pub(super) async fn clusters_of<S: Store>(store: &S, head: &Head, bitmap: &Bitmap) -> Result<Vec<u64>> {
    let bits = head.header.cluster_bits;
    let table_bytes = u64::from(bitmap.table_entries) * 8;
    let first = bitmap.table_offset >> bits;
    let mut all: Vec<u64> = (first..first + table_bytes.div_ceil(1 << bits)).collect();
    let mut number = 0;
    while number < u64::from(bitmap.table_entries) {
        let part = table_part(store, head, bitmap, number).await?;
        number += part.len() as u64;
        all.extend(part.iter().filter_map(|entry| match entry {
            Bits::At(place) => Some(place >> bits),
            _ => None,
        }));
    }
    Ok(all)
}
