//! Writing header, extensions and the name of the parent anew, all of which are in the first cluster.
//!
//! The first sector holds the header, which says where all else is. A sector is there as a whole or not at all.
//!
//! # Order of writes
//!
//! 1. The name of the parent is written where the first cluster has nothing that counts, then a sync. A name that fits into the first sector needs
//!    no step of its own.
//! 2. The first sector, then a sync.
//!
//! So after each step, and when the host or the process ends within one, the image says what it said or all that it is to say. Extensions
//! behind the first sector stay where they are, byte for byte: a change that would move them is none.

use spile_core::{Result, Segments, Store, StoreOffset, Via};

use super::codec::extension::{Extension, Extensions};
use super::codec::header::{Header, NamePlace};
use super::open::Head;

/// What a power cut leaves whole, in bytes.
const SECTOR: usize = 512;

/// What is written so that the first cluster says something else.
pub(super) struct Change {
    /// A name and its place, durable before the first sector says so.
    name: Option<(u64, Vec<u8>)>,
    sector: Vec<u8>,
}

impl Change {
    /// Makes the change. It is durable when this returns.
    ///
    /// # Errors
    /// The store's: the image says what it said, or all that it is to say.
    pub(super) async fn write<S: Store>(&self, store: &S) -> Result<()> {
        if let Some((at, name)) = &self.name {
            store.write_at(StoreOffset(*at), &Segments::copied(name), Via::Cached).await?;
            store.sync().await?;
        }
        store.write_at(StoreOffset(0), &Segments::copied(&self.sector), Via::Cached).await?;
        store.sync().await
    }
}

/// What to write so that the image of `head` has the header `header` (but for the place of the name), the extensions `all` and the name `name`;
/// `None` when that cannot be done in one step.
pub(super) fn change(head: &Head, header: Header, all: Vec<Extension>, name: Option<&[u8]>) -> Option<Change> {
    let start = header.header_bytes as usize;
    let is_same = all == head.extensions.all && header.header_bytes == head.header.header_bytes;
    let area = Extensions { all, ..Extensions::default() }.to_bytes();
    let end = start + area.len();
    let mut bytes = head.used.clone();
    bytes.resize(bytes.len().max(end).max(SECTOR), 0);
    // What is the same stays as it is, but for its end, which the name itself may have been.
    let from = if is_same { area.len() - 8 } else { 0 };
    bytes[start + from..end].copy_from_slice(&area[from..]);
    if end > SECTOR && head.used.get(SECTOR..end) != Some(&bytes[SECTOR..end]) {
        return None;
    }
    let place = match name {
        Some(name) => Some(place_of(head, end, name.len())?),
        None => None,
    };
    let header = Header { backing: place, stray_name_bytes: 0, ..header }.to_bytes();
    bytes[..header.len()].copy_from_slice(&header);
    if let (Some(name), Some(place)) = (name, place) {
        bytes.resize(bytes.len().max(place.range().end), 0);
        bytes[place.range()].copy_from_slice(name);
    }
    bytes.truncate(SECTOR);
    let is_beyond = place.filter(|place| place.range().end > SECTOR);
    let name = is_beyond.and_then(|place| Some((place.offset, name?.to_vec())));
    Some(Change { name, sector: bytes })
}

/// Where a name of `len` bytes goes when the extensions end at `end`: into the first sector, or where neither the old extensions nor
/// the old name are.
fn place_of(head: &Head, end: usize, len: usize) -> Option<NamePlace> {
    let place = |at: usize| NamePlace { offset: at as u64, len_bytes: len as u32 };
    if end + len <= SECTOR {
        return Some(place(end));
    }
    let old_end = head.header.header_bytes as usize + head.extensions.to_bytes().len();
    let old = head.header.backing.map_or(0..0, |place| place.range());
    let first = end.max(old_end).next_multiple_of(8);
    let behind = first.max(old.end.next_multiple_of(8));
    let is_free = |at: &usize| at + len <= old.start || *at >= old.end;
    let fits = |at: &usize| (at + len) as u64 <= head.header.cluster_bytes();
    [first, behind].into_iter().find(|at| is_free(at) && fits(at)).map(place)
}
