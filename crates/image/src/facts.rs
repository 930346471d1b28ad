//! Facts about a layer, in types that belong to no format.

use std::path::PathBuf;

use crate::formats::Format;
use crate::layer::Identity;

/// Facts about one layer.
#[derive(Clone, Debug)]
pub struct LayerInfo {
    /// Where the image is.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// The size that it shows to a guest, in bytes.
    pub virtual_bytes: u64,
    /// The length of its store, in bytes.
    pub file_bytes: u64,
    /// True when its data are read and written in the way the store was opened for; false when they need the page
    /// cache.
    pub direct: bool,
    /// What tells it from other images, if its format keeps such a thing.
    pub identity: Option<Identity>,
    /// Which image it is, for a note that is read when the image was written to; `None` where nobody can tell later.
    pub which: Option<Identity>,
    /// True when an earlier process died and left acknowledged writes that only an open for writing makes durable.
    pub unflushed: bool,
    /// What only its format knows.
    pub facts: Facts,
}

/// What a format knows of an image, for programs (`values`) and for people (`lines`).
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Which kind of the format the image is, where there are several: `fixed`, `dynamic`.
    pub subformat: Option<&'static str>,
    /// When the image was made or last changed, as it says itself, in seconds since 1970-01-01 UTC.
    pub changed_unix_s: Option<u64>,
    /// The time of its parent that the image holds, in seconds since 1970-01-01 UTC.
    pub parent_changed_unix_s: Option<u64>,
    /// True when Spile made the image, as far as that shows.
    pub is_ours: bool,
    /// Named values. Each name says its unit, and never changes its meaning.
    pub values: Record,
    /// A label and a text for each line of output.
    pub lines: Vec<(&'static str, String)>,
}

/// Named values, in the order in which they are shown.
pub type Record = Vec<(&'static str, Value)>;

/// The value of a fact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Not known, or not applicable to this image.
    None,
    /// Yes or no.
    Bool(bool),
    /// A number; its name says the unit.
    Number(u64),
    /// A text. It may come from the image and hold any characters.
    Text(String),
    /// Several things of one kind, such as snapshots.
    List(Vec<Record>),
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Self::Number(value)
    }
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Self::Number(value.into())
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Self::Text(value)
    }
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::None, Into::into)
    }
}
