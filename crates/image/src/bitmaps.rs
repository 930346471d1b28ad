//! Bitmaps inside an image: each remembers which parts of the disk have changed since it was made, as qcow2 has them for other programs.
//! While Spile changes the disk somebody else remembers that ([`ChangedSince`]), and an image that is closed in order has it in its bitmaps.

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use spile_core::{Extent, Result};

/// A bitmap inside an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InnerBitmap {
    /// Its name, which no other bitmap of the image has.
    pub name: String,
    /// The bytes of the disk that share a bit.
    pub granularity_bytes: u64,
    /// Every change of the disk is to be noted in it.
    pub records: bool,
    /// Whether its bits are to be believed.
    pub state: BitmapState,
}

/// Whether the bits of a bitmap are to be believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapState {
    /// It was closed in order.
    Good,
    /// It was not: a program has it in memory, or was killed.
    InUse,
    /// As [`BitmapState::InUse`], and nobody has written to the image since but who keeps its bitmaps up here ([`KeptBitmaps`]).
    KeptUp,
    /// It has data that are not known here, or is of a kind that is not kept up.
    Unknown,
}

/// Which parts of the disk are set in a bitmap, from somewhere to [`BitmapPart::end`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BitmapPart {
    /// The parts, in order.
    pub ranges: Vec<Extent>,
    /// Where the next answer begins, or the disk ends.
    pub end: u64,
}

/// Some parts of a disk, when they are known.
pub type LaterRanges<'a> = Pin<Box<dyn Future<Output = Result<Vec<Extent>>> + 'a>>;

/// Who knows what has changed of a disk while it is open.
pub trait ChangedSince: Send + Sync {
    /// What may have changed in `within`, a part of the disk, since the bitmap `name` of its image was made. The disk is `disk_bytes` long now. All that has
    /// changed is in the answer; it may be more, and go beyond that part.
    ///
    /// # Errors
    /// `NotFound` where nobody knows of this bitmap.
    fn changed<'a>(&'a self, name: &'a str, within: Range<u64>, disk_bytes: u64) -> LaterRanges<'a>;
}

/// The bitmaps of an image that somebody keeps up.
#[derive(Clone)]
pub struct KeptBitmaps {
    /// Their names.
    pub names: Vec<String>,
    /// Who knows what has changed since each of them was made.
    pub changed: Arc<dyn ChangedSince>,
    /// The bits in the image lack what is known to have changed. So they are in use at once, durably, and not only before the first change: else who opens the
    /// image after a kill would believe them.
    pub is_behind: bool,
    /// A rule that the simulator breaks.
    pub broken: BrokenBitmaps,
}

/// A rule of the order of writes of bitmaps that the simulator breaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BrokenBitmaps {
    /// No rule.
    #[default]
    Nothing,
    /// The image is changed before its bitmaps are in use, durably.
    InUseLate,
    /// The directory names the new bits before these are durable.
    NamedEarly,
    /// The last bit of each range is left out.
    BitDropped,
    /// What the old directory names is free before the new one counts.
    FreedEarly,
    /// Bits that lack what is known to have changed are in use only before the first change.
    BehindLate,
}
