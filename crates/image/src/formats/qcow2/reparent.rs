//! Naming another parent, or none, while the image may be in use.
//!
//! The name of the backing file and its format are in the first cluster, and nowhere else. Its first sector holds the header, which says
//! where the name is, and most often the extension that says the format. A sector is there as a whole or not at all.
//!
//! # Order of writes
//!
//! 1. The new name is written where the first cluster has nothing that counts, then a sync. A name that fits into the first sector needs
//!    no step of its own.
//! 2. The first sector, with the place of the new name and the new format, then a sync.
//!
//! So after each step, and when the host or the process ends within one, the image names the old parent by the old format, or the new one
//! by the new format. Extensions behind the first sector stay byte for byte. Where the format would have to be written there, the names of
//! features are left out, which serve messages only; and when that does not suffice, the image keeps its parent.
//!
//! Without a parent nothing else is to be done: clusters and subclusters that the image does not have read as zeroes then, for every
//! program.

use spile_core::{Error, ErrorKind, Result, ResultExt, Segments, Store, StoreOffset, Via};

use super::Qcow2;
use super::codec::extension::{Extension, Extensions, kind};
use super::codec::header::{Header, NamePlace};
use super::create::backing_name;
use super::open::{Head, read_head};
use crate::create::NewParent;

/// What a power cut leaves whole, in bytes.
const SECTOR: usize = 512;

/// What is written so that an image names another parent.
struct Change {
    /// A name and its place, durable before the first sector says so.
    name: Option<(u64, Vec<u8>)>,
    sector: Vec<u8>,
}

/// What to write so that the image of `head` names `parent`, or none.
fn plan(head: &Head, parent: Option<&NewParent>) -> Result<Change> {
    let format = parent.map(|parent| parent.format.backing_name().as_bytes());
    let name = parent.map(backing_name).transpose()?;
    let mut ways = ways(&head.extensions.all, format).into_iter();
    ways.find_map(|all| change(head, all, name.as_deref())).ok_or_else(|| {
        let len = name.as_ref().map_or(0, Vec::len);
        let what =
            format!("the image's first cluster has no room for another parent's format and its path of {len} bytes");
        Error::new(ErrorKind::InvalidInput, what)
            .hint("choose a shorter path; or name the parent by qemu-img rebase -u while nobody uses the image")
    })
}

/// The extensions that an image may have whose parent is of the format `format`, the best first.
fn ways(old: &[Extension], format: Option<&[u8]>) -> Vec<Vec<Extension>> {
    let is_format = |extension: &Extension| extension.kind == kind::BACKING_FORMAT;
    let others: Vec<Extension> = old.iter().filter(|extension| !is_format(extension)).cloned().collect();
    // A format without a parent says nothing.
    let Some(format) = format else { return vec![others, old.to_vec()] };
    let new = Extension { kind: kind::BACKING_FORMAT, data: format.to_vec() };
    let mut in_place = old.to_vec();
    in_place.iter_mut().filter(|extension| is_format(extension)).for_each(|extension| *extension = new.clone());
    let first = |others: Vec<Extension>| [vec![new.clone()], others].concat();
    let unnamed = others.iter().filter(|extension| extension.kind != kind::FEATURE_NAMES).cloned().collect();
    let mut ways = vec![first(others), first(unnamed)];
    if old.iter().any(is_format) {
        ways.insert(0, in_place);
    }
    ways
}

/// What to write so that the image has the extensions `all` and the name `name`; `None` when that cannot be done in one step.
fn change(head: &Head, all: Vec<Extension>, name: Option<&[u8]>) -> Option<Change> {
    let is_same = all == head.extensions.all;
    let area = Extensions { all, ..Extensions::default() }.to_bytes();
    let start = head.header.header_bytes as usize;
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
    let header = Header { backing: place, ..head.header.clone() }.to_bytes();
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

impl<S: Store> Qcow2<S> {
    /// Whether the image can name `parent`.
    pub(super) fn check_parent_name(&self, parent: &NewParent) -> Result<()> {
        plan(&self.now.head(), Some(parent)).map(drop).at_path(self.store.path())
    }

    /// Has the image name `parent`, or none.
    pub(super) async fn name_parent(&self, parent: Option<&NewParent>) -> Result<()> {
        let writing = self.writing().await?;
        if parent.is_some() && !self.has_parent() {
            let error = Error::new(ErrorKind::Unsupported, "an image without a parent does not get one");
            return Err(error.at_path(self.store.path()));
        }
        // What was copied here from the parents is durable before they are not there any more.
        self.flush_writing(writing).await?;
        let _alone = writing.header.lock().await;
        writing.check(&self.store)?;
        let change = plan(&read_head(&self.store).await?, parent).at_path(self.store.path())?;
        if let Some((at, name)) = &change.name {
            self.store.write_at(StoreOffset(*at), &Segments::copied(name), Via::Cached).await?;
            self.store.sync().await?;
        }
        self.store.write_at(StoreOffset(0), &Segments::copied(&change.sector), Via::Cached).await?;
        self.store.sync().await?;
        self.now.set_parent(read_head(&self.store).await?);
        Ok(())
    }
}
