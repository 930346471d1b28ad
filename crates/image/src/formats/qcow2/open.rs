//! Opening: everything an image claims is checked here, before anything is believed.
//!
//! What is read: the first cluster, the part of the L1 table that the virtual size needs (256 KiB at 16 TiB and 64 KiB
//! clusters, at most 32 MiB), and at most 64 KiB each of the tables of snapshots and bitmaps. Neither the refcounts nor
//! any L2 table are looked at, so the time does not depend on how much is in the image. An image that is dirty is walked through when it is
//! opened for writing ([`dirty`]).

use spile_core::{Error, ErrorKind, Result, ResultExt, Segments, Store, StoreOffset, Via};

use super::bitmaps::SeenDirectory;
use super::clusters::Clusters;
use super::codec::extension::{Extensions, feature_names_of};
use super::codec::header::{Encryption, Header, feature};
use super::codec::table::{Rules, decode};
use super::lists::Lists;
use super::map::Map;
use super::now::Now;
use super::writing::{self, Writing};
use super::{Qcow2, dirty};
use crate::formats::OpenLayer;

/// What is read of the file at first: enough for the first cluster of most images.
const HEAD_BYTES: u64 = 64 << 10;
/// The most that is read of the L1 table at once.
const L1_READ_BYTES: u64 = 256 << 10;

/// The header and what follows it in the first cluster.
#[derive(Clone)]
pub(super) struct Head {
    pub header: Header,
    pub extensions: Extensions,
    /// The backing file's name.
    pub backing: Option<Vec<u8>>,
    /// The first bytes of the file, to the end of what counts of them.
    pub used: Vec<u8>,
}

/// Opens the qcow2 image in `store`.
///
/// # Errors
/// `Corrupt` or `Unsupported`, saying which field is wrong; I/O errors.
pub(super) async fn open<S: Store>(store: S, how: OpenLayer) -> Result<Qcow2<S>> {
    let mut head = read_head(&store).await?;
    refuse_encryption(&head.header)?;
    if !how.read_only {
        writing::refuse(&head)?;
        head = dirty::mended(&store, head, how.keeps_dirty).await?;
    }
    let rules = rules(&head.header);
    let needed = head.header.needed_l1_entries();
    let l1 = read_l1(&store, head.header.l1_offset, u64::from(head.header.l1_entries), needed).await?;
    let lists = Lists::read(&store, &head).await;
    let writing = if how.read_only { None } else { Some(Writing::open(&store, &head, &l1).await?) };
    let map = Map::new(&head.header, rules, l1, store.len_bytes(), how);
    let clusters = Clusters::new(head.header.compression(), head.header.cluster_bits);
    let via = via(&store, &head.header, writing.is_some());
    let now = Now::new(head.clone());
    let seen_directory = SeenDirectory::default();
    Ok(Qcow2 { store, data: None, head, now, rules, map, clusters, lists, seen_directory, via, writing })
}

/// Data in `store` can be reached directly where whole clusters and the whole disk are aligned for it. In an image that is written,
/// no page may hold data and a table, too, nor data of two clusters: those of one may become zero, through the page cache, while the other is written.
pub(super) fn via<S: Store>(store: &S, header: &Header, is_written: bool) -> Via {
    let align = u64::from(store.info().offset_align_bytes);
    if is_written && header.cluster_bytes() < 4096 {
        return Via::Cached;
    }
    match header.cluster_bytes().is_multiple_of(align) && header.size_bytes.is_multiple_of(align) {
        true => Via::Direct,
        false => Via::Cached,
    }
}

/// How entries of L1 and L2 tables are to be read.
pub(super) fn rules(header: &Header) -> Rules {
    Rules {
        cluster_bits: header.cluster_bits,
        version: header.version,
        extended: header.has(feature::EXTENDED_L2),
        data_file: header.has(feature::DATA_FILE),
    }
}

/// Reads and checks the first cluster.
pub(super) async fn read_head<S: Store>(store: &S) -> Result<Head> {
    let mut bytes = read(store, 0, HEAD_BYTES.min(store.len_bytes())).await?;
    let cluster = (1 << Header::cluster_bits_of(&bytes)?).min(store.len_bytes());
    if cluster > HEAD_BYTES {
        bytes = read(store, 0, cluster).await?;
    }
    let header = Header::parse(&bytes)?;
    bytes.truncate(cluster as usize);
    let after_header = bytes.get(header.header_bytes as usize..).unwrap_or_default();
    header.check(&feature_names_of(after_header))?;
    let end = header.backing.map_or(bytes.len(), |place| place.range().start);
    let area = bytes.get(header.header_bytes as usize..end).unwrap_or_default();
    let extensions = Extensions::parse(area, header.cluster_bits)?;
    let backing = match header.backing {
        Some(place) => Some(bytes.get(place.range()).ok_or_else(past_the_end)?.to_vec()),
        None => None,
    };
    let end = header.header_bytes as usize + extensions.to_bytes().len();
    bytes.truncate(header.backing.map_or(end, |place| end.max(place.range().end)));
    Ok(Head { header, extensions, backing, used: bytes })
}

fn past_the_end() -> Error {
    Error::new(ErrorKind::Corrupt, "the name of the backing file goes past the end of the file")
}

fn refuse_encryption(header: &Header) -> Result<()> {
    let what = match header.encryption()? {
        Encryption::None => return Ok(()),
        Encryption::Aes => "AES-CBC",
        Encryption::Luks => "LUKS",
    };
    Err(Error::new(ErrorKind::Unsupported, format!("the image is encrypted ({what}); encrypted images are not read"))
        .hint("decrypt it into another image with qemu-img convert first"))
}

/// The first `needed` entries of an L1 table of `entries` entries, all of which have to be in the file.
pub(super) async fn read_l1<S: Store>(store: &S, offset: u64, entries: u64, needed: u64) -> Result<Vec<u64>> {
    let len = entries * 8;
    if len == 0 {
        // Where it lies says nothing.
        return Ok(Vec::new());
    }
    if offset.checked_add(len).is_none_or(|end| end > store.len_bytes()) {
        let what = format!("the L1 table of {entries} entries goes past the end of the file");
        return Err(Error::new(ErrorKind::Corrupt, what).at_offset(offset));
    }
    let mut l1 = Vec::with_capacity(needed as usize);
    let end = offset + needed.min(entries) * 8;
    let mut at = offset;
    while at < end {
        let bytes = read(store, at, L1_READ_BYTES.min(end - at)).await?;
        l1.extend(decode(&bytes));
        at += bytes.len() as u64;
    }
    Ok(l1)
}

/// The bytes of the file from `offset`.
pub(super) async fn read<S: Store>(store: &S, offset: u64, len_bytes: u64) -> Result<Vec<u8>> {
    let bytes = Segments::zeroed(len_bytes as usize);
    if len_bytes > 0 {
        store.read_at(StoreOffset(offset), &bytes, Via::Cached).await.at_offset(offset)?;
    }
    Ok(bytes.to_vec())
}
