//! Faults of a simulated host. Honest faults keep the contract of a store; sabotage breaks it on purpose.

use std::ops::Range;
use std::sync::Arc;

use spile_core::Via;

use crate::pages::Pages;

/// Honest faults: what a store's contract allows. Chances are in 10,000 operations; all zero by default.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Reads that fail with EIO.
    pub read_eio: u64,
    /// Writes, punches and zeroings that fail with EIO, having taken effect wholly, partly or not.
    pub write_eio: u64,
    /// Writes that fail with ENOSPC before they took effect.
    pub no_space: u64,
    /// Syncs that fail with EIO; every later sync of that file in this life of the process fails too.
    pub sync_eio: u64,
    /// Changes of names that fail with EIO once they are seen: the sync of their folder has failed.
    pub names_eio: u64,
    /// A failed sync is followed by syncs that claim success, as some kernels' do, while the data is lost:
    /// breaks the contract of `Store::sync`.
    pub forgetful_sync: bool,
    /// Bytes that all files together may take (`None`: no bound).
    pub space_bytes: Option<u64>,
    /// Operations that take far longer than others.
    pub slow: u64,
}

impl Faults {
    /// True when syncs may fail and nothing else can.
    pub fn only_syncs_fail(&self) -> bool {
        self.read_eio + self.write_eio + self.no_space == 0 && self.space_bytes.is_none()
    }
}

/// How an operation changes a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// A write, and the way it takes.
    Write(Via),
    /// Zeroes or a hole.
    Zero,
    /// A new length: the range is empty and lies at the new end.
    SetLen,
}

/// One change of a file, as sabotage sees it when it is issued.
#[derive(Clone, Debug)]
pub struct Touch {
    /// The kind of change.
    pub how: How,
    /// The bytes of the file that change.
    pub range: Range<u64>,
    /// The bytes that are written; empty for other kinds of change.
    pub bytes: Vec<u8>,
}

/// Chooses changes: gets what the file shows before the change, and the change.
pub type Choice = Arc<dyn Fn(&Pages, &Touch) -> bool + Send + Sync>;

/// A broken promise of the store, to prove that the simulator finds code that relies on it less than it should:
/// each stands for an image that has left out or misplaced one step of its write order.
#[derive(Clone, Default)]
pub enum Sabotage {
    /// No promise is broken.
    #[default]
    None,
    /// Out of `every` syncs, the one with the number `phase` does nothing.
    SkipSync {
        /// The number of syncs in a period.
        every: u64,
        /// The number of the sync in its period, from 0.
        phase: u64,
    },
    /// Every sync answers before it has happened.
    EarlySync,
    /// A sync of a store that is open for reading only does nothing.
    ReadersSync,
    /// A sync does nothing when one of the changes it should cover is chosen by `of` and none by `unless`.
    SkipSyncOf {
        /// The sync does nothing when it should cover one of these changes,
        of: Choice,
        /// unless it should cover one of these, too.
        unless: Choice,
    },
    /// Syncs leave chosen changes out, as if they had been sent after the sync.
    Unsynced(Choice),
    /// Chosen changes answer at once and take effect much later, as if they had been sent after the answer.
    Late(Choice),
    /// Chosen changes never take effect, as if they had been forgotten.
    Lost(Choice),
    /// Reads into the memory of clients answer at once and come much later, as if the image had taken its readers to be gone before they are. The client
    /// waits for what comes.
    SlowReaders,
}

impl std::fmt::Debug for Sabotage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Sabotage::None => "none",
            Sabotage::SkipSync { .. } => "skip-sync",
            Sabotage::EarlySync => "early-sync",
            Sabotage::ReadersSync => "readers-sync",
            Sabotage::SkipSyncOf { .. } => "skip-sync-of",
            Sabotage::Unsynced(_) => "unsynced",
            Sabotage::Late(_) => "late",
            Sabotage::Lost(_) => "lost",
            Sabotage::SlowReaders => "slow-readers",
        })
    }
}

/// The effects of sabotage on one change.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Harm {
    /// The change is answered before it takes effect.
    pub late: bool,
    /// The change has no effect.
    pub lost: bool,
    /// Syncs leave the change out.
    pub unsynced: bool,
    /// A sync that should cover the change does nothing.
    pub voids_sync: bool,
    /// A sync that should cover the change works, also when another change of it is marked `voids_sync`.
    pub saves_sync: bool,
}

impl Sabotage {
    /// True when changes must be shown to [`Sabotage::harm`].
    pub(crate) fn chooses(&self) -> bool {
        use Sabotage::{EarlySync, None, ReadersSync, SkipSync, SlowReaders};
        !matches!(self, None | SkipSync { .. } | EarlySync | ReadersSync | SlowReaders)
    }

    /// What happens to this change.
    pub(crate) fn harm(&self, view: &Pages, touch: &Touch) -> Harm {
        let mut harm = Harm::default();
        match self {
            Sabotage::Late(choice) => harm.late = choice(view, touch),
            Sabotage::Lost(choice) => harm.lost = choice(view, touch),
            Sabotage::Unsynced(choice) => harm.unsynced = choice(view, touch),
            Sabotage::SkipSyncOf { of, unless } => {
                harm.voids_sync = of(view, touch);
                harm.saves_sync = unless(view, touch);
            }
            _ => {}
        }
        harm
    }

    /// The sync with this running number does nothing.
    pub(crate) fn skips_sync(&self, number: u64) -> bool {
        matches!(self, Sabotage::SkipSync { every, phase } if number % every == *phase)
    }

    /// Who only reads syncs nothing.
    pub(crate) fn voids_readers_sync(&self) -> bool {
        matches!(self, Sabotage::ReadersSync)
    }

    /// Syncs answer before they have happened.
    pub(crate) fn is_early_sync(&self) -> bool {
        matches!(self, Sabotage::EarlySync)
    }
}
