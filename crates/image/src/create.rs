//! What to create, in a shape that every format understands.

use crate::formats::Format;
use crate::layer::Identity;

/// A new, empty image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewImage {
    /// The size of the virtual disk in bytes.
    pub size_bytes: u64,
    /// Which kind of the format, where there are several; `None` = what suits best.
    pub subformat: Option<String>,
    /// The parent, if the image is a child.
    pub parent: Option<NewParent>,
    /// The unit of space (a block), where the format has units of several sizes; `None` = the usual one.
    pub unit_bytes: Option<u32>,
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
