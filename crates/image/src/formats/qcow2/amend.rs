//! Another version, and lazy refcounts, of an image that nobody uses.
//!
//! # Order of writes
//!
//! 1. A sync: what was looked at to decide is durable, such as clusters that have no zero flag any more.
//! 2. The first sector of the header, by itself or with a name as `first_cluster` says; then a sync.
//!
//! So the image has its old version or the new one, whatever ends meanwhile. Nothing but the first cluster changes: no table, no count and no
//! data. Autoclear bits that are not known here are cleared in the same write. Bitmaps stay true, as the disk shows what it showed.
//!
//! Version 2 has no place for what came with version 3. An image that has some of that keeps its version, for to drop it would change what the
//! disk shows, or lose it.

use spile_core::{Error, ErrorKind, Result, ResultExt, Store};

use super::Qcow2;
use super::check::{Counted, count};
use super::codec::extension::{Extension, kind};
use super::codec::header::{Compression, Header, feature};
use super::create::{V2_HEADER_BYTES, V3_HEADER_BYTES, write};
use super::data_file::sound_autoclear;
use super::first_cluster::change;
use super::open::{Head, read_head};
use crate::amend::{Amended, Amendment, Revision};
use crate::layer::Layer as _;

/// Where the header has its compatible features; the autoclear ones follow.
const COMPATIBLE_AT: u64 = 80;
/// The least extra data of a snapshot in version 3, in bytes: the sizes of its state and of its disk.
const V3_SNAPSHOT_EXTRA_BYTES: usize = 16;

impl<S: Store> Qcow2<S> {
    /// Changes what is asked for while nobody uses the image, and seals it.
    pub(super) async fn amend_alone(&self, asked: &Amendment) -> Result<Amended> {
        let writing = self.writing.as_ref().ok_or_else(|| self.read_only_error())?;
        writing.check(&self.store)?;
        let head = read_head(&self.store).await?;
        let before = revision(&head.header);
        let after = wanted(before, asked).at_path(self.store.path())?;
        if before != after {
            self.store.sync().await?;
            match before.version == after.version {
                true => self.write_features(&head.header, after).await?,
                false => self.write_version(&head, after).await.at_path(self.store.path())?,
            }
        }
        self.seal_writing(writing).await?;
        Ok(Amended { before, after })
    }

    async fn write_features(&self, header: &Header, after: Revision) -> Result<()> {
        let fields = [compatible(header, after), sound_autoclear(header)];
        write(&self.store, COMPATIBLE_AT, &fields.map(u64::to_be_bytes).concat()).await?;
        self.store.sync().await
    }

    async fn write_version(&self, head: &Head, after: Revision) -> Result<()> {
        let counted = count(&self.store).await?;
        refuse_contradictions(&counted)?;
        let hindrances = match after.version {
            2 => what_version_2_lacks(head, &counted),
            _ => what_version_3_lacks(&counted),
        };
        if !hindrances.is_empty() {
            return Err(cannot_be(after.version, &hindrances));
        }
        let (header, extensions) = (header_of(&head.header, after), extensions_of(head, after.version));
        let change = change(head, header, extensions, head.backing.as_deref());
        change.ok_or_else(|| no_room(after.version))?.write(&self.store).await
    }
}

fn revision(header: &Header) -> Revision {
    Revision { version: header.version, lazy_refcounts: header.compatible & feature::LAZY_REFCOUNTS != 0 }
}

/// What the image is to be. An image that gets version 2 has no lazy refcounts any more.
fn wanted(before: Revision, asked: &Amendment) -> Result<Revision> {
    let version = asked.version.unwrap_or(before.version);
    let lazy_refcounts = asked.lazy_refcounts.unwrap_or(before.lazy_refcounts && version == 3);
    match version {
        2 if lazy_refcounts => Err(Error::new(ErrorKind::InvalidInput, "version 2 of qcow2 has no lazy refcounts")
            .hint("--compat 1.1 gives the image version 3 (as qemu-img's compat=1.1)")),
        2 | 3 => Ok(Revision { version, lazy_refcounts }),
        _ => Err(Error::new(ErrorKind::InvalidInput, format!("there is no version {version} of qcow2"))
            .hint("--compat 0.10 (version 2) or 1.1 (version 3)")),
    }
}

fn compatible(header: &Header, after: Revision) -> u64 {
    let others = header.compatible & !feature::LAZY_REFCOUNTS;
    if after.lazy_refcounts { others | feature::LAZY_REFCOUNTS } else { others }
}

/// The header of the image in another version, without the place of its parent's name.
fn header_of(old: &Header, after: Revision) -> Header {
    let (header_bytes, more) = match after.version {
        2 => (V2_HEADER_BYTES, Vec::new()),
        // Behind the byte of the compression type.
        _ => (V3_HEADER_BYTES, vec![0; 7]),
    };
    let compatible = compatible(old, after);
    Header { version: after.version, header_bytes, more, compatible, autoclear: 0, ..old.clone() }
}

/// All extensions. The names of features serve messages only, and version 2 has no features.
fn extensions_of(head: &Head, version: u32) -> Vec<Extension> {
    let stays = |extension: &&Extension| version > 2 || extension.kind != kind::FEATURE_NAMES;
    head.extensions.all.iter().filter(stays).cloned().collect()
}

/// Refuses an image of which nobody can tell what it holds. What one version calls damage may mean something in another one.
fn refuse_contradictions(counted: &Counted) -> Result<()> {
    let Some(found) = counted.report.corruption() else { return Ok(()) };
    let error = found.error("an image that is damaged keeps its version");
    Err(error.hint("spile check lists what is wrong; spile check --repair mends counts and flags"))
}

/// What the image has that version 2 has no place for.
fn what_version_2_lacks(head: &Head, counted: &Counted) -> Vec<String> {
    let header = &head.header;
    let some = |count: u64, what: &str| (count > 0).then(|| format!("{count} {what}"));
    let is = |is_so: bool, what: &str| is_so.then(|| what.to_owned());
    let bits = 1u32 << header.refcount_order;
    let bitmaps = head.extensions.bitmaps.map_or(0, |bitmaps| bitmaps.count.into());
    let hindrances = [
        is(header.has(feature::DATA_FILE), "an external data file"),
        is(header.has(feature::EXTENDED_L2), "extended L2 entries"),
        is(header.compression() == Compression::Zstd, "compression by zstd"),
        (bits != 16).then(|| format!("refcounts of {bits} bits")),
        some(counted.zero_clusters, "clusters that a flag calls zero"),
        some(header.snapshots.into(), "internal snapshots"),
        some(bitmaps, "bitmaps"),
        unknown_features(head).map(|names| format!("features that are not known here: {names}")),
        is(header.more.iter().any(|byte| *byte != 0), "fields of its header that are not known here"),
    ];
    hindrances.into_iter().flatten().collect()
}

/// The compatible features that are not known here, if there are some.
fn unknown_features(head: &Head) -> Option<String> {
    let unknown = head.header.compatible & !feature::LAZY_REFCOUNTS;
    let name = |bit: u32| {
        let named = head.extensions.feature_names.iter().find(|name| name.kind == 1 && u32::from(name.bit) == bit);
        named.map_or(format!("bit {bit}"), |name| format!("{} (bit {bit})", name.text()))
    };
    let names: Vec<String> = (0..64).filter(|bit| unknown >> bit & 1 == 1).map(name).collect();
    (unknown != 0).then(|| names.join(", "))
}

/// What the image lacks that version 3 must have.
fn what_version_3_lacks(counted: &Counted) -> Vec<String> {
    let are_short = counted.snapshots.iter().any(|snapshot| snapshot.extra.len() < V3_SNAPSHOT_EXTRA_BYTES);
    are_short.then(|| "internal snapshots that do not say how large their disk was".to_owned()).into_iter().collect()
}

fn cannot_be(version: u32, hindrances: &[String]) -> Error {
    let what = format!("the image cannot get version {version}, as it has {}", hindrances.join(", and "));
    let error = Error::new(ErrorKind::Unsupported, what);
    match version {
        2 => error.hint("spile convert --compat 0.10 copies the disk into an image of version 2"),
        _ => {
            error.hint("delete the snapshots first: spile internal-snapshot --delete; or copy the disk: spile convert")
        }
    }
}

fn no_room(version: u32) -> Error {
    let what = format!(
        "the image cannot get version {version}: its header and all that follows it do not fit into its first sector, or its parent's name finds no place behind them"
    );
    Error::new(ErrorKind::Unsupported, what)
        .hint("spile convert --compat copies the disk into an image of that version")
}
