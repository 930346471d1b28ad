//! What a simulated host does wrong: honest faults, and sabotage that breaks the contract of a store on purpose.

use std::ops::Range;
use std::sync::Arc;

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
    /// A failed sync is followed by syncs that claim success, as some kernels' do, while the data is lost:
    /// breaks the contract of `Store::sync`.
    pub forgetful_sync: bool,
    /// Bytes that all files together may take (`None`: no bound).
    pub space_bytes: Option<u64>,
    /// Operations that take far longer than others.
    pub slow: u64,
}

/// Names a region of files: gets what the file shows now, and the byte range of a write.
pub type Region = Arc<dyn Fn(&Pages, Range<u64>) -> bool + Send + Sync>;

/// A broken promise of the store, to prove that the simulator finds code that relies on it less than it should:
/// each stands for an image that has left out or misplaced one step of its write order.
#[derive(Clone, Default)]
pub enum Sabotage {
    /// None.
    #[default]
    None,
    /// Of every `every` syncs the one numbered `phase` does nothing.
    SkipSync {
        /// The period.
        every: u64,
        /// Which of them, from 0.
        phase: u64,
    },
    /// Every sync answers before it has happened.
    EarlySync,
    /// Syncs leave writes to this region out, as if they had been sent after the sync.
    UnsyncedRegion(Region),
    /// Writes to this region answer at once and take effect much later, as if they had been sent after the answer.
    LateRegion(Region),
    /// Writes to this region never take effect, as if they had been forgotten.
    LostRegion(Region),
}

impl std::fmt::Debug for Sabotage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Sabotage::None => "none",
            Sabotage::SkipSync { .. } => "skip-sync",
            Sabotage::EarlySync => "early-sync",
            Sabotage::UnsyncedRegion(_) => "unsynced-region",
            Sabotage::LateRegion(_) => "late-region",
            Sabotage::LostRegion(_) => "lost-region",
        })
    }
}

impl Sabotage {
    fn is_in(region: &Region, view: &Pages, range: &Range<u64>) -> bool {
        region(view, range.clone())
    }

    /// The write of `range` answers before it takes effect.
    pub(crate) fn is_late(&self, view: &Pages, range: &Range<u64>) -> bool {
        matches!(self, Sabotage::LateRegion(r) if Self::is_in(r, view, range))
    }

    /// The write of `range` has no effect.
    pub(crate) fn is_lost(&self, view: &Pages, range: &Range<u64>) -> bool {
        matches!(self, Sabotage::LostRegion(r) if Self::is_in(r, view, range))
    }

    /// Syncs leave the write of `range` out.
    pub(crate) fn is_unsynced(&self, view: &Pages, range: &Range<u64>) -> bool {
        matches!(self, Sabotage::UnsyncedRegion(r) if Self::is_in(r, view, range))
    }

    /// The sync with this running number does nothing.
    pub(crate) fn skips_sync(&self, number: u64) -> bool {
        matches!(self, Sabotage::SkipSync { every, phase } if number % every == *phase)
    }

    /// Syncs answer before they have happened.
    pub(crate) fn is_early_sync(&self) -> bool {
        matches!(self, Sabotage::EarlySync)
    }
}
