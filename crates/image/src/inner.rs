//! Snapshots inside an image: earlier states of the disk that lie in the same file, as qcow2 has them. They are not the snapshots of
//! `life`, which are files of their own.

use std::pin::Pin;

use spile_core::{Error, ErrorKind, Result};

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

/// Who hears of a change of the snapshots inside an image while it is made. `()` is nobody.
pub trait InnerWatch {
    /// The disk is about to hold what a snapshot holds: all is checked and has its room, and only the storage can refuse it still. When this fails, the disk
    /// stays as it is, and space may be leaked.
    fn before_apply(&self) -> Pin<Box<dyn Future<Output = Result<()>> + '_>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

impl InnerWatch for () {}

/// Which snapshot inside an image is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Which {
    /// Its id or its name.
    pub text: String,
    /// The text is an id, and no name.
    pub is_id: bool,
}

impl Which {
    /// The number of the snapshot that is meant among all those of its image. A snapshot is meant by its id as by its name; where that would be two, it
    /// is none.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` when several are meant.
    pub fn find(&self, all: &[InnerSnapshot]) -> Result<usize> {
        let text = &self.text;
        let is_it = |one: &InnerSnapshot| one.id == *text || (!self.is_id && one.name == *text);
        let found: Vec<_> = (0..all.len()).filter(|number| is_it(&all[*number])).collect();
        let kind = if self.is_id { "id" } else { "id or name" };
        match found[..] {
            [number] => Ok(number),
            [] => {
                let what = format!("no snapshot inside the image has the {kind} {text:?}");
                let hint = "spile internal-snapshot --list shows those that there are";
                Err(Error::new(ErrorKind::NotFound, what).hint(hint))
            }
            _ => {
                let what = format!("{} snapshots inside the image have the {kind} {text:?}", found.len());
                let hint = "say --id, and the id of the one that is meant; spile internal-snapshot --list shows it";
                Err(Error::new(ErrorKind::InvalidInput, what).hint(hint))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(id: &str, name: &str) -> InnerSnapshot {
        InnerSnapshot { id: id.into(), name: name.into(), taken_unix_s: 0, size_bytes: None, state_bytes: 0 }
    }

    #[test]
    fn a_snapshot_is_found_by_id_or_name_and_never_by_chance() {
        let all = [snapshot("1", "a"), snapshot("2", "b"), snapshot("3", "b"), snapshot("4", "1")];
        let found = |text: &str, is_id| Which { text: text.into(), is_id }.find(&all).map_err(|error| error.kind());
        assert_eq!((found("a", false), found("2", false), found("2", true)), (Ok(0), Ok(1), Ok(1)));
        let several = Err(ErrorKind::InvalidInput);
        assert_eq!((found("b", false), found("1", false)), (several, several));
        assert_eq!((found("1", true), found("a", true)), (Ok(0), Err(ErrorKind::NotFound)));
        assert_eq!((found("", false), found("c", false)), (Err(ErrorKind::NotFound), Err(ErrorKind::NotFound)));
    }
}
