//! The note beside each snapshot of a set that is made of several disks at one point in time ([`names::set`]). It is there until the set is whole.
//!
//! A process that is killed on the way leaves some of the snapshots, and their notes: what they hold may be of different moments.

use std::path::{Path, PathBuf};

use spile_core::{ErrorKind, Files, Result};

use crate::jobs::note::write_text;
use crate::names;
use crate::snapshot::remove_if_there;

/// The snapshots of a set that is being made, which have notes.
#[derive(Debug)]
#[must_use = "the notes stay until `end`"]
pub struct Set(Vec<PathBuf>);

impl Set {
    /// Writes the notes of the set `snapshots`, durably, before the first of them is made. Of one snapshot alone there is none, and one that a set
    /// before has left goes. An image that has the name of one already is of no set: its making will be refused.
    ///
    /// # Errors
    /// The system's. No note is left then, as far as they can be removed.
    pub async fn begin<F: Files>(files: &F, snapshots: &[PathBuf]) -> Result<Self> {
        let mut set = Self(Vec::new());
        for snapshot in snapshots {
            if is_free(files, snapshot).await
                && let Err(error) = set.note(files, snapshot, snapshots.len() > 1).await
            {
                let _ = set.end(files, false).await;
                return Err(error.hint("no snapshot was made"));
            }
        }
        Ok(set)
    }

    async fn note<F: Files>(&mut self, files: &F, snapshot: &Path, is_one_of_many: bool) -> Result<()> {
        let note = names::set(snapshot);
        remove_if_there(files, &note).await?;
        if is_one_of_many {
            self.0.push(snapshot.to_owned());
            write_text(files, &note, TEXT).await?;
        }
        Ok(())
    }

    /// Removes the notes. When the set is not whole, those of the snapshots stay that could not be taken back.
    ///
    /// # Errors
    /// The system's; all notes were tried.
    pub async fn end<F: Files>(self, files: &F, is_whole: bool) -> Result<()> {
        let mut ended = Ok(());
        for snapshot in &self.0 {
            if is_whole || is_free(files, snapshot).await {
                ended = ended.and(remove_if_there(files, &names::set(snapshot)).await);
            }
        }
        ended
    }
}

async fn is_free<F: Files>(files: &F, path: &Path) -> bool {
    files.canonical(path).await.is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// The note is for people: that it is there says all.
const TEXT: &str = "This snapshot is one of a set that is not whole.\n";
