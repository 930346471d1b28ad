//! What is looked at while a file is opened: whether it has its name still, and what it can do.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;

use rustix::fs::{FallocateFlags, OFlags};
use spile_core::{Error, ErrorKind, Result};
use spile_engine::{DirectAlign, RawFile, direct_align};

use crate::file::FileId;
use crate::folder::Place;

/// Refuses a file that has lost its name before it was locked: a snapshot has put another file in its place, which is to be opened instead,
/// or the file was deleted.
pub(crate) fn check_name(place: &Place, id: FileId) -> Result<()> {
    let what = match place.id() {
        Ok(Some(found)) if found != id => "another file was put in the place of this one while it was opened",
        Ok(None) => "this file lost its name while it was opened",
        _ => return Ok(()),
    };
    Err(Error::new(ErrorKind::Busy, what).hint("try again"))
}

/// Opens the second descriptor, for direct I/O. `None` where there is no direct I/O, or where its alignment cannot be
/// found out.
pub(crate) fn open_direct(
    again: impl Fn(OFlags) -> Result<File>,
    stat: &std::fs::Metadata,
) -> Option<(File, DirectAlign)> {
    let file = again(OFlags::DIRECT).ok()?;
    let again = file.metadata().ok()?;
    // The name may have been given to another file meanwhile.
    let same = (again.dev(), again.ino()) == (stat.dev(), stat.ino());
    let align = direct_align(&file).filter(|_| same)?;
    Some((file, align))
}

/// Asks the file system by punching past the end of the file, where there is nothing.
pub(crate) fn file_punches(file: &RawFile, len: u64) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, len.next_multiple_of(1 << 20), 4096).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::Folder;

    #[test]
    fn a_file_that_has_lost_its_name_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let [path, old] = ["a", "b"].map(|name| dir.path().join(name));
        std::fs::write(&path, "old").unwrap();
        let place = Folder::find(&path).unwrap();
        let id = FileId::of(&std::fs::metadata(&path).unwrap());
        check_name(&place, id).unwrap();
        std::fs::rename(&path, &old).unwrap();
        assert_eq!(check_name(&place, id).unwrap_err().kind(), ErrorKind::Busy);
        std::fs::write(&path, "new").unwrap();
        assert_eq!(check_name(&place, id).unwrap_err().kind(), ErrorKind::Busy);
    }
}
