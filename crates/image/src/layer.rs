//! One file of a chain: what it knows of where bytes lie, and how it is opened.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use spile_core::{Env, Error, ErrorKind, Files, OpenMode, Result, Store, StoreOffset, Via};

use crate::format::Format;
use crate::parents::{Policy, candidates};
use crate::raw::Raw;
use crate::vhd::codec::footer::Footer;
use crate::vhd::codec::header::Header;
use crate::vhd::{Found, Opened, Sparse};

/// What there is to know of one layer.
#[derive(Clone, Debug)]
pub struct LayerInfo {
    /// Where it is.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// The size it shows, in bytes.
    pub virtual_bytes: u64,
    /// The length of its store, in bytes.
    pub file_bytes: u64,
    /// True when its data are reached as the store was opened; false when they need the page cache.
    pub direct: bool,
    /// More, for a VHD.
    pub vhd: Option<LayerFacts>,
}

/// A VHD's own facts.
#[derive(Clone, Debug)]
pub struct LayerFacts {
    /// Its footer.
    pub footer: Footer,
    /// Its header, unless it is fixed.
    pub header: Option<Header>,
    /// Blocks that are allocated.
    pub allocated_blocks: u64,
    /// True when a journal area lets first writes be acknowledged without a sync.
    pub has_journal: bool,
    /// True when bits are recorded that a flush has not yet written: an earlier process died.
    pub unflushed: bool,
}

/// One file of a chain.
pub(crate) enum Layer<S> {
    Raw(Raw<S>, Option<Footer>),
    Sparse(Box<Sparse<S>>),
}

impl<S: Store> Layer<S> {
    pub(crate) fn store(&self) -> &S {
        match self {
            Self::Raw(raw, _) => raw.store(),
            Self::Sparse(sparse) => sparse.store(),
        }
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        match self {
            Self::Raw(raw, _) => raw.size_bytes(),
            Self::Sparse(sparse) => sparse.layout().size_bytes,
        }
    }

    pub(crate) fn via(&self) -> Via {
        match self {
            Self::Raw(raw, _) => raw.via(),
            Self::Sparse(sparse) => sparse.via(),
        }
    }

    pub(crate) fn find(&self, at: u64, len_bytes: u64) -> (Found, u64) {
        match self {
            Self::Raw(..) => (Found::Data(StoreOffset(at)), len_bytes),
            Self::Sparse(sparse) => sparse.find(at, len_bytes),
        }
    }

    /// Where the bytes at `at` lie, known to be in this layer, and for how long that holds.
    pub(crate) fn locate(&self, at: u64, len_bytes: u64) -> Option<(StoreOffset, u64)> {
        match self {
            Self::Raw(..) => Some((StoreOffset(at), len_bytes)),
            Self::Sparse(sparse) => sparse.locate(at, len_bytes),
        }
    }

    pub(crate) fn info(&self) -> LayerInfo {
        let (format, vhd) = match self {
            Self::Raw(_, None) => (Format::Raw, None),
            Self::Raw(_, Some(footer)) => (Format::Vhd, Some((footer.clone(), None))),
            Self::Sparse(sparse) => (Format::Vhd, Some((sparse.footer().clone(), Some(sparse)))),
        };
        LayerInfo {
            path: self.store().path().to_owned(),
            format,
            virtual_bytes: self.size_bytes(),
            file_bytes: self.store().len_bytes(),
            direct: self.via() == Via::Direct,
            vhd: vhd.map(|(footer, sparse)| LayerFacts {
                footer,
                header: sparse.map(|s| s.header().clone()),
                allocated_blocks: sparse.map_or(0, |s| s.allocated_blocks()),
                has_journal: sparse.is_some_and(|s| s.layout().journal.is_some()),
                unflushed: sparse.is_some_and(|s| s.has_unflushed_bits()),
            }),
        }
    }

    /// True when a process that was killed left bits in the journal.
    fn is_unflushed(&self) -> bool {
        matches!(self, Self::Sparse(sparse) if sparse.has_unflushed_bits())
    }

    pub(crate) fn has_parent(&self) -> bool {
        matches!(self, Self::Sparse(sparse) if sparse.is_differencing())
    }

    fn uuid(&self) -> Option<[u8; 16]> {
        match self {
            Self::Raw(_, footer) => footer.as_ref().map(|footer| footer.uuid),
            Self::Sparse(sparse) => Some(sparse.footer().uuid),
        }
    }
}

/// What `store` holds, as `format`.
pub(crate) async fn open_layer<S: Store>(
    store: S,
    format: Format,
    env: &Arc<dyn Env>,
    read_only: bool,
    budget: usize,
) -> Result<Layer<S>> {
    match format {
        Format::Raw => {
            let size = store.len_bytes();
            Ok(Layer::Raw(Raw::new(store, size), None))
        }
        Format::Vhd => Ok(match crate::vhd::open(store, env, read_only, budget).await? {
            Opened::Fixed(footer, raw) => Layer::Raw(raw, Some(footer)),
            Opened::Sparse(sparse) => Layer::Sparse(sparse),
        }),
    }
}

/// Bitmaps of parents are needed only until their zone is merged: a small cache for each.
const PARENT_BITS_BYTES: usize = 1 << 20;

/// The parent that `child` names, and its canonical path.
pub(crate) async fn open_parent<F: Files>(
    files: &F,
    env: &Arc<dyn Env>,
    child: &Sparse<F::Store>,
    policy: &Policy,
    visited: &[PathBuf],
    settles: bool,
) -> Result<(PathBuf, Layer<F::Store>)> {
    let expected = child.header().parent_uuid;
    // A null UUID means a raw parent (blktap's convention).
    let format = if expected == [0; 16] { Format::Raw } else { Format::Vhd };
    let mut last = None;
    for path in candidates(files, child.store(), child.header(), policy).await? {
        if visited.contains(&path) {
            last.get_or_insert(Error::new(ErrorKind::Corrupt, format!("the chain loops back to {}", path.display())));
            continue;
        }
        match open_candidate(files, env, &path, format, &expected).await {
            Ok(layer) if settles && layer.is_unflushed() => {
                drop(layer);
                make_durable(files, env, &path).await?;
                return Ok((path.clone(), open_candidate(files, env, &path, format, &expected).await?));
            }
            Ok(layer) => return Ok((path, layer)),
            // Another locator may be the right one; the first, best one's error is the one to tell.
            Err(error) => {
                last.get_or_insert(error);
            }
        }
    }
    let error = last.unwrap_or_else(|| Error::new(ErrorKind::NotFound, "no parent was found"));
    Err(error.at_path(child.store().path()))
}

/// Flushes and closes a parent that was a leaf when its process was killed. A guest may live on over that and a
/// snapshot: its flushes go to the leaf from now on, and promise what it wrote before, too.
async fn make_durable<F: Files>(files: &F, env: &Arc<dyn Env>, path: &Path) -> Result<()> {
    let done = async {
        let store = files.open(path, OpenMode::ReadWrite).await?;
        match open_layer(store, Format::Vhd, env, false, PARENT_BITS_BYTES).await? {
            Layer::Sparse(sparse) => sparse.close().await,
            Layer::Raw(..) => Ok(()),
        }
    };
    done.await.map_err(|error| {
        error.hint(
            "this parent's last writer was killed; what it wrote must be made durable before a child takes writes: \
             end other processes that have it open",
        )
    })
}

async fn open_candidate<F: Files>(
    files: &F,
    env: &Arc<dyn Env>,
    path: &Path,
    format: Format,
    expected: &[u8; 16],
) -> Result<Layer<F::Store>> {
    let store = files.open(path, OpenMode::ReadOnly).await?;
    let layer = open_layer(store, format, env, true, PARENT_BITS_BYTES).await?;
    match layer.uuid() {
        Some(uuid) if uuid != *expected => Err(wrong_parent(path, expected, &uuid)),
        _ => Ok(layer),
    }
}

fn wrong_parent(path: &Path, expected: &[u8; 16], found: &[u8; 16]) -> Error {
    let hex = |uuid: &[u8; 16]| uuid.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    Error::new(
        ErrorKind::Corrupt,
        format!("the parent {} has UUID {}, the child expects {}", path.display(), hex(found), hex(expected)),
    )
    .hint("another image has taken the parent's name")
}
