//! Snapshots inside an image: earlier states of the disk that lie in the same file, as qcow2 has them. They are not the snapshots of
//! `life`, which are files of their own.

/// A snapshot inside an image. Text from the image is escaped, so that it can go to a terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InnerSnapshot {
    /// What tells it from the others in its image: a number, as a text.
    pub id: String,
    /// Its name.
    pub name: String,
    /// When it was made, in seconds since 1970-01-01 UTC.
    pub taken_unix_s: u32,
    /// The size of the disk then, in bytes; `None` where old images do not say it.
    pub size_bytes: Option<u64>,
    /// The size of the state of a running virtual machine that was kept with it, in bytes; 0 for a snapshot of the disk alone.
    pub state_bytes: u64,
}

/// A change of the snapshots inside an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InnerChange {
    /// Keeps what the disk holds now under a name that no other snapshot of the image has.
    Create {
        /// The name.
        name: String,
        /// The time that it notes, in seconds since 1970-01-01 UTC.
        now_unix_s: u64,
    },
    /// The disk holds what the snapshot holds, and gets its size. What the disk held is lost; the snapshot stays.
    Apply(Which),
    /// The snapshot goes, and with it what only it holds.
    Delete(Which),
}

/// Which snapshot inside an image is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Which {
    /// Its id or its name.
    pub text: String,
    /// The text is an id, and no name.
    pub is_id: bool,
}
