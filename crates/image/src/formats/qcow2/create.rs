//! Making an empty qcow2 image, as `layout` says where its parts go.
//!
//! The header is written last, behind a sync of all else: a file whose making was cut off is no image.

use spile_core::{Error, ErrorKind, Result, Segments, Store, StoreOffset, Via};

use super::codec::extension::{Extension, Extensions, FeatureName, kind};
use super::codec::header::{Header, NamePlace, feature};
use super::codec::{COPIED, MAX_CLUSTER_BITS, MAX_NAME_BYTES, MIN_CLUSTER_BITS, MIN_EXTENDED_CLUSTER_BITS, refcount};
use super::layout::{Layout, block_of_ones, full_metadata_bytes, last_cluster_bytes, max_size_bytes};
use crate::create::{Compression, NewDataFile, NewImage, NewParent, Options};
use crate::measure::{Space, Tables, Unit};

/// The usual cluster: 64 KiB.
const DEFAULT_CLUSTER_BYTES: u32 = 64 << 10;
/// The smallest cluster that QEMU puts the names of features into, as a power of two: 8 KiB.
const MIN_NAMES_CLUSTER_BITS: u32 = 13;
/// The length of a header of version 2, in bytes.
pub(super) const V2_HEADER_BYTES: u32 = 72;
/// The length of a header of version 3 as QEMU writes it, in bytes: with the compression type, padded to a multiple of 8.
pub(super) const V3_HEADER_BYTES: u32 = 112;
/// What is written at once of a table.
const WRITE_BYTES: u64 = 1 << 20;

/// The names of all features that the specification knows, for programs that do not know one of them.
const FEATURE_NAMES: [(u8, u8, &str); 8] = [
    (0, 0, "dirty bit"),
    (0, 1, "corrupt bit"),
    (0, 2, "external data file"),
    (0, 3, "compression type"),
    (0, 4, "extended L2 entries"),
    (1, 0, "lazy refcounts"),
    (2, 0, "bitmaps"),
    (2, 1, "raw external data"),
];

/// A new image: its header, without the places of tables, and what follows the header in the first cluster.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub header: Header,
    behind_header: Vec<u8>,
    places_for_all: bool,
}

impl Plan {
    /// What `new` asks for.
    ///
    /// # Errors
    /// `InvalidInput` for what the format cannot express.
    pub(super) fn new(new: &NewImage) -> Result<Self> {
        let mut header = header(new)?;
        check_size(&header)?;
        let data_file = new.options.data_file.as_ref();
        // A raw data file is the disk from the start: so is what the tables say.
        let places_for_all = new.options.places_for_all || data_file.is_some_and(|file| file.is_raw);
        if places_for_all {
            check_places(&header, new.parent.is_some())?;
        }
        let behind_header = behind_header(&mut header, new.parent.as_ref(), data_file)?;
        Ok(Self { header, behind_header, places_for_all })
    }

    /// The space that the new image takes.
    pub(super) fn space(&self) -> Space {
        let (header, layout) = (&self.header, Layout::new(&self.header, false));
        let unit = Unit { data_bytes: header.cluster_bytes(), lead_bytes: 0, stride_bytes: header.cluster_bytes() };
        let per_table = 1u64 << (header.cluster_bits - header.l2_entry_bits());
        // A table, and the refcount blocks that count it and its clusters.
        let counts = refcount::counts_per_block(header.cluster_bits, header.refcount_order);
        let clusters = 1 + (1 + per_table).div_ceil(counts);
        let table_bytes = clusters * header.cluster_bytes();
        let tables = Tables { covered_bytes: 1 << header.l2_coverage_bits(), table_bytes };
        Space {
            empty_bytes: full_metadata_bytes(header),
            written_bytes: layout.end * header.cluster_bytes(),
            tail_bytes: 0,
            unit: Some(unit),
            tables: Some(tables),
            virtual_bytes: header.size_bytes,
        }
    }

    /// The first cluster, up to the end of what it holds.
    pub(super) fn head_bytes(&self) -> Vec<u8> {
        let mut bytes = self.header.to_bytes();
        bytes.extend(&self.behind_header);
        bytes
    }
}

/// Writes an empty image into `store`, which is empty itself or a device. Everything is durable when it returns.
///
/// # Errors
/// `InvalidInput` for what the format cannot express; `Exists` when the store has bytes; `NoSpace` when a device is too
/// small; I/O errors. A failed creation may leave a part of the image behind, which is no image.
pub(super) async fn create<S: Store>(store: &S, new: &NewImage) -> Result<()> {
    let mut plan = Plan::new(new)?;
    let layout = Layout::new(&plan.header, plan.places_for_all);
    let cluster = plan.header.cluster_bytes();
    plan.header.l1_entries = plan.header.needed_l1_entries() as u32;
    plan.header.l1_offset = layout.l1 * cluster;
    plan.header.refcount_table_offset = layout.table * cluster;
    // A table is within 8 MiB, as an empty image with the largest L1 table shows, or it was checked.
    plan.header.refcount_table_clusters = layout.refcounts.table_clusters as u32;
    clear(store, end_bytes(&plan, &layout)).await?;
    write_refcounts(store, &plan.header, &layout).await?;
    if plan.places_for_all {
        write_maps(store, &plan.header, &layout).await?;
    }
    store.sync().await?;
    write(store, 0, &plan.head_bytes()).await?;
    store.sync().await
}

/// The header of a new image, without the places of its tables.
fn header(new: &NewImage) -> Result<Header> {
    let options = &new.options;
    let version = options.version.unwrap_or(3);
    let cluster_bits = cluster_bits(new.unit_bytes.unwrap_or(DEFAULT_CLUSTER_BYTES))?;
    let can_extend = version == 3 && cluster_bits >= MIN_EXTENDED_CLUSTER_BITS;
    let extended = options.extended_l2.unwrap_or(new.parent.is_some() && can_extend);
    let zstd = options.compression == Some(Compression::Zstd);
    let (data_file, raw) = (options.data_file.is_some(), options.data_file.as_ref().is_some_and(|file| file.is_raw));
    if raw && new.parent.is_some() {
        return Err(invalid("a raw data file is all of its disk, so its image has no parent")
            .hint("leave out --data-file-raw, or --parent"));
    }
    let refcount_order = refcount_order(options.refcount_bits.unwrap_or(16))?;
    match version {
        2 => refuse_in_version_2(extended, zstd, options, refcount_order)?,
        3 => {}
        _ => {
            return Err(invalid(format!("there is no version {version} of qcow2"))
                .hint("--compat 0.10 (version 2) or 1.1 (version 3)"));
        }
    }
    if extended && !can_extend {
        return Err(invalid("extended L2 entries need clusters of 16 KiB at least")
            .hint("choose a larger --cluster-size, or --extended-l2 off"));
    }
    let bit = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
    Ok(Header {
        version,
        backing: None,
        stray_name_bytes: 0,
        cluster_bits,
        size_bytes: new.size_bytes,
        crypt_method: 0,
        l1_entries: 0,
        l1_offset: 0,
        refcount_table_offset: 0,
        refcount_table_clusters: 0,
        snapshots: 0,
        snapshots_offset: 0,
        incompatible: bit(zstd, feature::COMPRESSION)
            | bit(extended, feature::EXTENDED_L2)
            | bit(data_file, feature::DATA_FILE),
        compatible: bit(options.lazy_refcounts, feature::LAZY_REFCOUNTS),
        autoclear: bit(raw, feature::RAW_DATA_FILE),
        refcount_order,
        header_bytes: if version == 2 { V2_HEADER_BYTES } else { V3_HEADER_BYTES },
        compression_type: u8::from(zstd),
        more: if version == 2 { Vec::new() } else { vec![0; 7] },
    })
}

fn cluster_bits(bytes: u32) -> Result<u32> {
    let bits = bytes.trailing_zeros();
    match bytes.is_power_of_two() && (MIN_CLUSTER_BITS..=MAX_CLUSTER_BITS).contains(&bits) {
        true => Ok(bits),
        false => Err(invalid(format!("the cluster size of {bytes} bytes cannot be"))
            .hint("--cluster-size is a power of two from 512 to 2M; 64K is usual")),
    }
}

fn refcount_order(bits: u32) -> Result<u32> {
    match bits.is_power_of_two() && bits <= 64 {
        true => Ok(bits.trailing_zeros()),
        false => Err(invalid(format!("refcounts of {bits} bits cannot be"))
            .hint("--refcount-bits is 1, 2, 4, 8, 16, 32 or 64; 16 is usual")),
    }
}

fn refuse_in_version_2(extended: bool, zstd: bool, options: &Options, refcount_order: u32) -> Result<()> {
    let asked = [
        (options.data_file.is_some(), "external data file (--data-file)"),
        (extended, "extended L2 entries (--extended-l2)"),
        (zstd, "zstd (--compression-type)"),
        (options.lazy_refcounts, "lazy refcounts (--lazy-refcounts)"),
        (refcount_order != 4, "refcounts of another width than 16 bits (--refcount-bits)"),
    ];
    match asked.iter().find(|(is_asked, _)| *is_asked) {
        Some((_, what)) => Err(invalid(format!("version 2 of qcow2 has no {what}")).hint("leave out --compat 0.10")),
        None => Ok(()),
    }
}

fn check_size(header: &Header) -> Result<()> {
    let (size, most) = (header.size_bytes, max_size_bytes(header));
    if size == 0 || !size.is_multiple_of(512) {
        return Err(invalid(format!("the size of {size} bytes is not a positive multiple of 512"))
            .hint(format!("the next larger size is {}", size.checked_next_multiple_of(512).unwrap_or(most).max(512))));
    }
    if size > most {
        let cluster = header.cluster_bytes();
        let kind = if header.has(feature::EXTENDED_L2) { " and extended L2 entries" } else { "" };
        let what = format!("a disk of {size} bytes is too large for clusters of {cluster} bytes{kind}");
        return Err(invalid(what).hint(format!("at most {most} bytes; choose a larger --cluster-size for more")));
    }
    Ok(())
}

fn check_places(header: &Header, has_parent: bool) -> Result<()> {
    if has_parent && (!header.has(feature::EXTENDED_L2) || header.has(feature::DATA_FILE)) {
        return Err(invalid("clusters that have their places from the start would hide the parent")
            .hint("--preallocate with --parent needs --extended-l2 on"));
    }
    let refcounts = Layout::new(header, true).refcounts;
    match refcounts.fits(header.cluster_bits) {
        true => Ok(()),
        false => {
            let (size, cluster) = (header.size_bytes, header.cluster_bytes());
            let what = format!("a refcount table cannot count all of {size} bytes in clusters of {cluster} bytes");
            Err(invalid(what).hint("choose a larger --cluster-size, or narrower --refcount-bits"))
        }
    }
}

/// The extensions and the name of the parent; the header learns where that is.
fn behind_header(header: &mut Header, parent: Option<&NewParent>, data_file: Option<&NewDataFile>) -> Result<Vec<u8>> {
    let room = (header.cluster_bytes() - u64::from(header.header_bytes)) as usize;
    let (format, name) = match parent {
        Some(parent) => (Some(parent.format.backing_name().as_bytes().to_vec()), backing_name(parent)?),
        None => (None, Vec::new()),
    };
    let format = format.map(|data| Extension { kind: kind::BACKING_FORMAT, data });
    let data_file = match data_file {
        Some(file) => Some(Extension { kind: kind::DATA_FILE, data: path_name("data file", &file.path)? }),
        None => None,
    };
    // The names of features serve messages only. Where there is little room, they are left out.
    let names = (header.version >= 3 && header.cluster_bits >= MIN_NAMES_CLUSTER_BITS).then(feature_names);
    for names in [names, None] {
        let all = data_file.clone().into_iter().chain(format.clone()).chain(names).collect();
        let mut bytes = Extensions { all, ..Extensions::default() }.to_bytes();
        if bytes.len() + name.len() <= room {
            if !name.is_empty() {
                let offset = u64::from(header.header_bytes) + bytes.len() as u64;
                header.backing = Some(NamePlace { offset, len_bytes: name.len() as u32 });
            }
            bytes.extend(&name);
            return Ok(bytes);
        }
    }
    let len = name.len() + data_file.map_or(0, |name| name.data.len());
    Err(invalid(format!("paths of {len} bytes to the image's other files have no room in its first cluster"))
        .hint("choose a larger --cluster-size, or a shorter path"))
}

/// The path as QEMU understands it: what stands before a colon would be a protocol, unless a slash comes first.
pub(super) fn backing_name(parent: &NewParent) -> Result<Vec<u8>> {
    path_name("parent", &parent.relative_path)
}

fn path_name(of: &str, path: &str) -> Result<Vec<u8>> {
    let has_colon = path.split('/').next().is_some_and(|first| first.contains(':'));
    let name = if has_colon { format!("./{path}") } else { path.to_owned() };
    match name.len() {
        1..=MAX_NAME_BYTES if !name.contains('\0') => Ok(name.into_bytes()),
        len => Err(invalid(format!("a qcow2 image cannot name the {of} by a path of {len} bytes"))
            .hint("at most 1023 bytes, none of them NUL")),
    }
}

fn feature_names() -> Extension {
    let names = FEATURE_NAMES.map(|(kind, bit, name)| FeatureName { kind, bit, name: name.into() });
    Extension { kind: kind::FEATURE_NAMES, data: names.iter().flat_map(FeatureName::to_bytes).collect() }
}

/// The length of the new file in bytes.
fn end_bytes(plan: &Plan, layout: &Layout) -> u64 {
    let cluster = plan.header.cluster_bytes();
    match (plan.places_for_all, layout.refcounts.blocks) {
        (true, _) if plan.header.has(feature::DATA_FILE) => layout.end * cluster,
        (true, _) => (layout.end - 1) * cluster + last_cluster_bytes(&plan.header),
        (false, 1) => layout.l1 * cluster + plan.header.needed_l1_entries() * 8,
        (false, _) => layout.end * cluster,
    }
}

/// Makes the first `end_bytes` of the store zero.
pub(super) async fn clear<S: Store>(store: &S, end_bytes: u64) -> Result<()> {
    let len = store.len_bytes();
    if store.info().grows_zeroed {
        return match len {
            0 => store.set_len(end_bytes).await,
            _ => Err(Error::new(ErrorKind::Exists, "the file to create a qcow2 image in is not empty")),
        };
    }
    if len < end_bytes {
        let message = format!("the device has {len} bytes; the empty qcow2 image needs {end_bytes}");
        return Err(Error::new(ErrorKind::NoSpace, message));
    }
    store.zero_range(StoreOffset(0), end_bytes).await
}

async fn write_refcounts<S: Store>(store: &S, header: &Header, layout: &Layout) -> Result<()> {
    let cluster = header.cluster_bytes();
    let mut table = Vec::new();
    for block in 0..layout.refcounts.blocks {
        let at = layout.block(block) * cluster;
        write(store, at, &block_of_ones(header, block, layout.end)).await?;
        table.extend(at.to_be_bytes());
    }
    write(store, layout.table * cluster, &table).await
}

/// Writes L1 and L2 tables that give each cluster its place.
async fn write_maps<S: Store>(store: &S, header: &Header, layout: &Layout) -> Result<()> {
    let (cluster, per_table) = (header.cluster_bytes(), 1u64 << (header.cluster_bits - header.l2_entry_bits()));
    let is_inside = !header.has(feature::DATA_FILE);
    // Inside the image no part is allocated: all read as they would without the place. A data file is shown from the start.
    let bitmap = if is_inside { [0; 8] } else { u64::from(u32::MAX).to_be_bytes() };
    let (mut at, mut done, all) = (layout.l2, 0, super::layout::data_clusters(header));
    let mut l1 = Vec::new();
    while done < all {
        let here = (all - done).min(per_table);
        let first = if is_inside { at + 1 } else { done };
        let mut l2 = Vec::with_capacity(cluster as usize);
        for data in first..first + here {
            l2.extend(((data * cluster) | COPIED).to_be_bytes());
            l2.extend(&bitmap[..(1 << header.l2_entry_bits()) - 8]);
        }
        write(store, at * cluster, &l2).await?;
        l1.extend(((at * cluster) | COPIED).to_be_bytes());
        at += 1 + if is_inside { here } else { 0 };
        done += here;
    }
    write(store, header.l1_offset, &l1).await
}

/// Writes `bytes` at `offset`, in pieces.
pub(super) async fn write<S: Store>(store: &S, offset: u64, bytes: &[u8]) -> Result<()> {
    let mut at = offset;
    for piece in bytes.chunks(WRITE_BYTES as usize) {
        store.write_at(StoreOffset(at), &Segments::copied(piece), Via::Cached).await?;
        at += piece.len() as u64;
    }
    Ok(())
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, message)
}
