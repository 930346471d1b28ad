//! The note beside each snapshot of a set that is made of several disks at one point in time ([`names::set`]). It is there until the set is whole.
//!
//! A process that is killed on the way leaves some of the snapshots, and their notes: what they hold may be of different moments.

use std::path::PathBuf;

use spile_core::{ErrorKind, Files, Result};

use crate::jobs::note::write_text;
use crate::names;
use crate::snapshot::remove_if_there;

/// The notes of a set that is being made.
#[derive(Debug)]
#[must_use = "the notes stay until `end`"]
pub struct Set(Vec<PathBuf>);

impl Set {
    /// Writes the notes of the set `snapshots`, durably, before the first of them is made. Of one snapshot alone there is none. An image that has
    /// the name of one already is of no set: its making will be refused.
    ///
    /// # Errors
    /// The system's. No note is left then, as far as they can be removed.
    pub async fn begin<F: Files>(files: &F, snapshots: &[PathBuf]) -> Result<Self> {
        let mut set = Self(Vec::new());
        if snapshots.len() < 2 {
            return Ok(set);
        }
        for snapshot in snapshots {
            if files.canonical(snapshot).await.is_err_and(|error| error.kind() == ErrorKind::NotFound) {
                let note = names::set(snapshot);
                set.0.push(note.clone());
                let written = match remove_if_there(files, &note).await {
                    Ok(()) => write_text(files, &note, TEXT).await,
                    failed => failed,
                };
                if let Err(error) = written {
                    let _ = set.end(files).await;
                    return Err(error.hint("no snapshot was made"));
                }
            }
        }
        Ok(set)
    }

    /// Removes the notes: the set is whole, or nothing of it is left.
    ///
    /// # Errors
    /// The system's; all notes were tried.
    pub async fn end<F: Files>(self, files: &F) -> Result<()> {
        let mut ended = Ok(());
        for note in &self.0 {
            ended = ended.and(remove_if_there(files, note).await);
        }
        ended
    }
}

/// The note is for people: that it is there says all.
const TEXT: &str = "This snapshot is one of a set that is not whole.\n";
