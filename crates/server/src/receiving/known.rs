//! What a folder has of disks that have come, or are on their way; for those who look, and for what a move has left.

use std::path::Path;

use spile_core::{Error, ErrorKind, Files as _, Locator, OpenMode, Result};
use spile_life::motion::{Received, ReceivedState};
use spile_life::names;
use spile_store::CacheMode;

use super::{Tools, find_folder, host_files};

/// One disk of the folder.
pub struct Known {
    /// The disk's name.
    pub name: String,
    /// What its note says.
    pub note: Received,
    /// The file that the note is about is there.
    pub is_there: bool,
}

/// The disks that have come to `folder`, or are on their way, by name.
///
/// # Errors
/// When the folder cannot be read.
pub async fn list(folder: &Path) -> Result<Vec<Known>> {
    let folder = find_folder(folder)?;
    let files = host_files(CacheMode::Page, true);
    let entries = std::fs::read_dir(&folder).map_err(|e| Error::io("cannot be read", e).at_path(&folder))?;
    let mut known = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| Error::io("cannot be read", e).at_path(&folder))?.path();
        let Some(disk) = names::disk_of(&path).filter(|disk| names::received(disk) == path) else { continue };
        let (Some(note), Some(name)) =
            (Received::read(&files, &disk).await?, disk.file_name().and_then(|name| name.to_str()))
        else {
            continue;
        };
        let file = if note.state == ReceivedState::Whole { disk.clone() } else { names::receiving(&disk) };
        known.push(Known { name: name.to_owned(), note, is_there: file.exists() });
    }
    known.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(known)
}

/// Removes the half of the disk `name` that a move which is given up has left in `folder`. One that may be the disk goes only when the caller has looked at the other
/// host: `is_known_half`.
///
/// # Errors
/// `NotFound` when there is none; `Busy` while it is being written; `Denied` when the disk is whole, or may be; the system's.
pub async fn remove_half(folder: &Path, name: &str, is_known_half: bool) -> Result<()> {
    let folder = find_folder(folder)?;
    let tools = Tools::new(CacheMode::Page);
    let (receiver, files) = (tools.receiver(&folder), &tools.files);
    let disk = receiver.disk(name)?;
    let Some(note) = Received::read(files, &disk).await? else {
        return Err(Error::new(ErrorKind::NotFound, "no move has left anything of this disk here").at_path(&disk));
    };
    if note.state == ReceivedState::HandingOver && !is_known_half {
        let what = "this may be the disk: its old host was about to hand it over, and has not said how that ended";
        let hint = "ask there: when the disk is at its old path, the half may go (--force); when it is not, a server that is started there with the old path has this one named";
        return Err(Error::new(ErrorKind::Denied, what).at_path(&disk).hint(hint));
    }
    let half = names::receiving(&disk);
    // Whoever is at work on it has it locked.
    let locked = match files.open(&Locator::from(&half), OpenMode::ReadWrite).await {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) if error.kind() == ErrorKind::Busy => {
            return Err(error.hint("the move goes on: cancel it on the other host"));
        }
        opened => Some(opened?),
    };
    let removed = receiver.drop_half(name, note.id).await;
    drop(locked);
    removed
}
