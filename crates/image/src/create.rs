//! What to create, in a shape that every format understands.

use crate::formats::Format;
use crate::layer::Identity;

pub use crate::formats::qcow2::codec::header::Compression;

/// A new, empty image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewImage {
    /// The size of the virtual disk in bytes.
    pub size_bytes: u64,
    /// Which kind of the format, where there are several; `None` = what suits best.
    pub subformat: Option<String>,
    /// The parent, if the image is a child.
    pub parent: Option<NewParent>,
    /// Its UUID, for the copy of an image that has this one, where the format has a UUID; `None` = a new one.
    pub uuid: Option<Identity>,
    /// The unit of space (a block, a cluster), where the format has units of several sizes; `None` = the usual one.
    pub unit_bytes: Option<u32>,
    /// What only some formats let one choose.
    pub options: Options,
}

impl NewImage {
    /// An image of the usual kind, without a parent.
    pub fn new(size_bytes: u64) -> Self {
        Self { size_bytes, subformat: None, parent: None, uuid: None, unit_bytes: None, options: Options::default() }
    }
}

/// What a format with clusters lets one choose ([`About::has_options`](crate::formats::About::has_options)).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The version of the format, 2 or 3; `None` = 3.
    pub version: Option<u32>,
    /// The width of a refcount in bits; `None` = 16.
    pub refcount_bits: Option<u32>,
    /// Clusters have 32 parts that are allocated one by one; `None` = where the image has a parent and can have them.
    pub extended_l2: Option<bool>,
    /// Refcounts may be written late.
    pub lazy_refcounts: bool,
    /// How compressed clusters are compressed; `None` = deflate.
    pub compression: Option<Compression>,
    /// Each cluster of the disk has its place from the start.
    pub places_for_all: bool,
    /// The guest's data lie in another file, which is empty or reads as zeroes.
    pub data_file: Option<NewDataFile>,
}

/// The file that holds the data of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDataFile {
    /// Its path. QEMU takes one that is relative from its own working folder, and Spile from the image's, so a whole one is understood alike.
    pub path: String,
    /// It is the disk's content as it is, also for programs that know nothing of the image.
    pub is_raw: bool,
}

/// The parent of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewParent {
    /// The way from the child's folder to the parent, with `/` between its parts.
    pub relative_path: String,
    /// The parent's file name.
    pub name: String,
    /// The parent's format.
    pub format: Format,
    /// What tells the parent from other images, if its format keeps such a thing.
    pub identity: Option<Identity>,
    /// When the parent was last changed, as it says itself, in seconds since 1970-01-01 UTC.
    pub changed_unix_s: Option<u64>,
}
