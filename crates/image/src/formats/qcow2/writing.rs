//! What an image that is open for writing has beside its map, and what is done once before its first change.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use spile_core::{Error, ErrorKind, Result, Store};

use super::Qcow2;
use super::alloc::Space;
use super::codec::header::feature;
use super::data_file;
use super::flush::Flushes;
use super::open::Head;
use super::refcounts::Refcounts;
use crate::bitmaps::KeptBitmaps;
use crate::grace::Grace;
use crate::layer::Layer as _;
use crate::range_lock::RangeLock;
use crate::room::RoomWatch;

/// Where the header has its incompatible and its autoclear features.
pub(super) const INCOMPATIBLE_AT: u64 = 72;
pub(super) const AUTOCLEAR_AT: u64 = 88;

/// The state of an image that is open for writing.
pub(super) struct Writing {
    /// Locks by guest cluster: shared for a write in place, exclusive where the cluster's entry changes.
    pub clusters: RangeLock,
    pub grace: Grace,
    /// Held while clusters are made ready. Whoever holds it waits for no lock of the image but that of the refcounts.
    pub preparing: async_lock::Mutex<()>,
    /// Held while refcounts are looked up or changed. Whoever holds it waits for no other lock of the image.
    pub counts: async_lock::Mutex<Refcounts>,
    pub space: Mutex<Space>,
    pub flushes: Flushes,
    pub room: RoomWatch,
    /// Held while the header is changed. Whoever holds it waits for no other lock of the image.
    pub header: async_lock::Mutex<()>,
    /// Held shared while an L1 entry changes, and alone while the L1 table gets another place.
    pub l1: async_lock::RwLock<()>,
    /// Held while the size changes.
    pub resizing: async_lock::Mutex<()>,
    /// Bitmaps that somebody keeps up. Held while the directory of bitmaps changes.
    pub bitmaps: async_lock::Mutex<Option<KeptBitmaps>>,
    /// Flushes keep what was given up.
    pub holds: AtomicBool,
    begun: AtomicBool,
    beginning: async_lock::Mutex<()>,
    /// The file may differ from what is in memory, or contradicts itself.
    broken: AtomicBool,
    sealed: AtomicBool,
}

impl Writing {
    /// Looks at what an image needs to be written.
    ///
    /// # Errors
    /// `Corrupt` for an image whose tables contradict each other; the store's.
    pub(super) async fn open<S: Store>(store: &S, head: &Head, l1: &[u64]) -> Result<Self> {
        let counts = Refcounts::open(store, &head.header, l1).await.map_err(|error| {
            error.hint(
                "open it for reading only, and check it: spile check; spile check --repair mends counts and flags",
            )
        })?;
        Ok(Self {
            clusters: RangeLock::default(),
            grace: Grace::default(),
            preparing: async_lock::Mutex::new(()),
            counts: async_lock::Mutex::new(counts),
            space: Mutex::default(),
            flushes: Flushes::default(),
            room: RoomWatch::default(),
            header: async_lock::Mutex::new(()),
            l1: async_lock::RwLock::new(()),
            resizing: async_lock::Mutex::new(()),
            bitmaps: async_lock::Mutex::new(None),
            holds: AtomicBool::new(false),
            begun: AtomicBool::new(false),
            beginning: async_lock::Mutex::new(()),
            broken: AtomicBool::new(false),
            sealed: AtomicBool::new(false),
        })
    }

    /// From now on every write fails, until the image is opened again.
    pub(super) fn refuse_writes(&self) {
        self.broken.store(true, Ordering::Release);
    }

    pub(super) fn seal(&self) {
        self.sealed.store(true, Ordering::Release);
    }

    pub(super) fn is_sealed(&self) -> bool {
        self.sealed.load(Ordering::Acquire)
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// True when the image may have been changed.
    pub(super) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Acquire)
    }

    /// Refuses a change that may not be made any more.
    pub(super) fn check<S: Store>(&self, store: &S) -> Result<()> {
        let what = match (self.is_sealed(), self.is_broken()) {
            (true, _) => "the image was closed",
            (_, true) => "the image takes no more writes after an error in its tables; open it again",
            _ => return Ok(()),
        };
        Err(Error::new(ErrorKind::ReadOnly, what).at_path(store.path()))
    }
}

/// Refuses what is not written.
///
/// # Errors
/// `Unsupported`; `Corrupt` for an image that is marked so.
pub(super) fn refuse(head: &Head) -> Result<()> {
    let header = &head.header;
    if let Some((what, hint)) = data_file::hindrance(header) {
        return Err(Error::new(ErrorKind::Unsupported, what).hint(hint));
    }
    let (kind, what, hint) = match () {
        () if header.has(feature::CORRUPT) => (
            ErrorKind::Corrupt,
            "the image is marked corrupt, and is not written",
            "open it for reading only, or repair it: spile check --repair",
        ),
        () => return Ok(()),
    };
    Err(Error::new(kind, what).hint(hint))
}

impl<S: Store> Qcow2<S> {
    /// The state of writing, ready for a change.
    ///
    /// # Errors
    /// `ReadOnly`; the store's.
    pub(super) async fn writing(&self) -> Result<&Writing> {
        let Some(writing) = &self.writing else {
            return Err(self.read_only_error());
        };
        writing.check(&self.store)?;
        self.check_data_file()?;
        if !writing.has_begun() {
            Box::pin(self.begin_writing(writing)).await?;
        }
        Ok(writing)
    }

    /// Once, before the first change: what a killed writer left is made durable, for its clusters may be used again; bitmaps are in use, and features that say
    /// something of the content and that are not kept up are cleared, durably; the file ends with a whole cluster, and a data file has room for the disk.
    #[cold]
    async fn begin_writing(&self, writing: &Writing) -> Result<()> {
        let _one = writing.beginning.lock().await;
        if writing.has_begun() {
            return Ok(());
        }
        let header = &self.head.header;
        // Bitmaps stay consistent as a whole: each that is to note all changes is in use from now on.
        let kept = self.use_bitmaps(writing).await? | data_file::kept_autoclear(header);
        if header.version >= 3 && header.autoclear != kept {
            self.write_header(AUTOCLEAR_AT, &kept.to_be_bytes()).await?;
        }
        self.begin_data_file().await?;
        let len = self.store.len_bytes();
        let whole = len.next_multiple_of(header.cluster_bytes());
        if whole > len && self.store.info().grows_zeroed {
            self.store.set_len(whole).await?;
            self.map.set_file_bytes(whole);
        }
        self.store.sync().await?;
        writing.begun.store(true, Ordering::Release);
        Ok(())
    }

    /// The error of an image that contradicts itself at `offset`. It is marked corrupt, and takes no more writes.
    pub(super) async fn corrupt(&self, offset: u64, what: &str) -> Error {
        if let Some(writing) = &self.writing {
            let is_first = !writing.is_broken();
            writing.refuse_writes();
            if is_first && self.head.header.version >= 3 {
                let bits = self.head.header.incompatible | feature::CORRUPT;
                // The image stays as it is when this fails; nothing more is written in either case.
                if self.write_header(INCOMPATIBLE_AT, &bits.to_be_bytes()).await.is_ok() {
                    let _ = self.store.sync().await;
                }
            }
        }
        Error::new(ErrorKind::Corrupt, what)
            .at_path(self.store.path())
            .at_offset(offset)
            .hint("the image takes no more writes; check it: spile check; spile check --repair mends counts and flags")
    }
}
