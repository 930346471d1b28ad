//! Names of the files that Spile keeps beside a disk. They are hidden, begin with the disk's whole file name, and lie in its folder, so that
//! a rename between them and the disk is one step, and nobody has to be told where they are.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use spile_image::Format;

/// The image that is to become the disk's leaf, while it is made.
pub fn new_leaf(disk: &Path) -> PathBuf {
    beside(disk, "new")
}

/// What is being done to the disk, so that it goes on after the death of the process.
pub fn job(disk: &Path) -> PathBuf {
    beside(disk, "job")
}

/// What is to take the place of [`job`], while it is written.
pub fn new_job(disk: &Path) -> PathBuf {
    beside(disk, "new-job")
}

/// What is to take this name in one step, in the place of the image that has it: another image, which has one more name meanwhile.
pub fn taking(image: &Path) -> PathBuf {
    beside(image, "taking")
}

/// The blocks that have changed since each checkpoint of the disk.
pub fn changes(disk: &Path) -> PathBuf {
    beside(disk, "changes")
}

/// What another host sends of its [`changes`] of the disk, until it has come as a whole.
pub fn new_changes(disk: &Path) -> PathBuf {
    beside(disk, "new-changes")
}

/// The copy of another disk that is to be the disk at this path, while it is made.
pub fn moving(disk: &Path) -> PathBuf {
    beside(disk, "moving")
}

/// The copy of a parent of a disk that is to be the disk at this path, while it is made.
pub fn moving_parent(disk: &Path) -> PathBuf {
    beside(disk, "moving-parent")
}

/// Where the disk was moved to.
pub fn moved(disk: &Path) -> PathBuf {
    beside(disk, "moved")
}

/// What is to take the place of [`moved`], while it is written.
pub fn new_moved(disk: &Path) -> PathBuf {
    beside(disk, "new-moved")
}

/// Where the disk was before it was moved here.
pub fn came(disk: &Path) -> PathBuf {
    beside(disk, "came")
}

/// What is to take the place of [`came`], while it is written.
pub fn new_came(disk: &Path) -> PathBuf {
    beside(disk, "new-came")
}

/// What the disk's old image was left like when the disk went to another host.
pub fn left(disk: &Path) -> PathBuf {
    beside(disk, "left")
}

/// What is to take the place of [`left`], while it is written.
pub fn new_left(disk: &Path) -> PathBuf {
    beside(disk, "new-left")
}

/// True when a file system can have a file of the name of `path`.
pub fn fits(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.len() <= LONGEST_NAME_BYTES)
}

/// True when the files that Spile keeps beside a disk can have their names, when this is the disk's path.
pub fn fits_a_disk(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.len() <= LONGEST_DISK_NAME_BYTES)
}

/// The most bytes of a file's name.
const LONGEST_NAME_BYTES: usize = 255;
/// The most bytes of a disk's name. The longest name beside it is that of [`moving_parent`], and a disk that was moved leaves its old image
/// with `.moved` in its name.
pub const LONGEST_DISK_NAME_BYTES: usize =
    LONGEST_NAME_BYTES - ".".len() - MARK.len() - "moving-parent".len() - ".moved".len();

/// The disk that another host moves here, until it is whole.
pub fn receiving(disk: &Path) -> PathBuf {
    beside(disk, "receiving")
}

/// True for the name of a file that [`receiving`] names.
pub fn is_receiving(name: &OsStr) -> bool {
    let path = Path::new(name);
    disk_of(path).is_some_and(|disk| receiving(&disk) == path)
}

/// Which move the disk has come by.
pub fn received(disk: &Path) -> PathBuf {
    beside(disk, "received")
}

/// What is to take the place of [`received`], while it is written.
pub fn new_received(disk: &Path) -> PathBuf {
    beside(disk, "new-received")
}

/// What is saved of the disk for a backup. The file has this name for the moment of its making only.
pub fn fleece(disk: &Path) -> PathBuf {
    beside(disk, "fleece")
}

/// That the image is not needed as one of its own any more ([`crate::gone`]).
pub fn gone(image: &Path) -> PathBuf {
    beside(image, "gone")
}

/// What is to take the place of [`gone`], while it is written.
pub fn new_gone(image: &Path) -> PathBuf {
    beside(image, "new-gone")
}

/// Which children the image has in other folders, a path in each line.
pub fn children(image: &Path) -> PathBuf {
    beside(image, "children")
}

/// What is to take the place of the note [`children`] at `note`, while it is written.
pub fn new_children(note: &Path) -> PathBuf {
    beside(&disk_of(note).unwrap_or_else(|| note.to_owned()), "new-children")
}

/// That the snapshot is one of a set that is not whole ([`crate::set`]).
pub fn set(snapshot: &Path) -> PathBuf {
    beside(snapshot, "set")
}

/// True for the path of a note that an image was deleted.
pub fn is_gone(path: &Path) -> bool {
    disk_of(path).is_some_and(|image| gone(&image) == path)
}

/// The disk that the file `path` belongs to, if it has one of these names.
pub fn disk_of(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let (disk, _) = name.strip_prefix('.')?.rsplit_once(MARK)?;
    (!disk.is_empty()).then(|| path.with_file_name(disk))
}

/// The disk that the image at `path` is to be: one on its way, from another place of this host or from another host, has a hidden name until it
/// is whole. So has an old image on its way back.
pub fn disk_of_half(path: &Path) -> Option<PathBuf> {
    disk_of(path).filter(|disk| [receiving(disk), moving(disk)].iter().any(|half| half == path))
}

/// The format of the image at `path`, as its name says it. A half has that of the disk that it is to be.
pub fn format_of(path: &Path) -> Option<Format> {
    Format::from_extension(disk_of_half(path).as_deref().unwrap_or(path))
}

/// Stands between the disk's name and what the file is.
const MARK: &str = ".spile-";

fn beside(disk: &Path, what: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(disk.file_name().unwrap_or_default());
    name.push(MARK);
    name.push(what);
    disk.with_file_name(name)
}

/// The way from one folder to a file, both canonical; `None` when it is not UTF-8.
pub fn relative(folder: &Path, file: &Path) -> Option<String> {
    let shared = folder.components().zip(file.components()).take_while(|(a, b)| a == b).count();
    let ups = folder.components().skip(shared).map(|_| Some(".."));
    let downs = file.components().skip(shared).map(|part| part.as_os_str().to_str());
    ups.chain(downs).collect::<Option<Vec<_>>>().map(|parts| parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_beside_a_disk_lead_back_to_it() {
        let disk = Path::new("/vm/.a.spile-new.vhd");
        let here = [new_leaf, job, new_job, changes, moving, moved, new_moved, fleece, gone, new_gone, children, set]
            .map(|of| of(disk));
        let from_elsewhere =
            [receiving, received, new_received, new_changes, came, new_came, left, new_left, moving_parent, taking]
                .map(|of| of(disk));
        assert_eq!(disk_of(&new_children(&children(disk))).as_deref(), Some(disk));
        let named = here.into_iter().chain(from_elsewhere);
        for beside in named {
            assert_eq!(beside.parent(), disk.parent());
            assert_eq!(disk_of(&beside).as_deref(), Some(disk));
            assert_eq!(is_gone(&beside), beside == gone(disk));
            let is_half = beside == receiving(disk) || beside == moving(disk);
            assert_eq!(disk_of_half(&beside).is_some(), is_half, "{}", beside.display());
        }
        assert_eq!(format_of(&receiving(Path::new("/vm/a.vhd"))), Some(Format::Vhd));
        assert_eq!((format_of(Path::new("/vm/a.vhd")), format_of(&changes(disk))), (Some(Format::Vhd), None));
        assert_eq!(new_leaf(Path::new("/vm/a.vhd")), Path::new("/vm/.a.vhd.spile-new"));
        for other in ["/vm/a.vhd", "/vm/.a.vhd", "/vm/.spile-new", "/"] {
            assert_eq!(disk_of(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn ways_between_folders() {
        let way = |folder, file| relative(Path::new(folder), Path::new(file)).unwrap();
        assert_eq!(way("/a/b", "/a/b/p.vhd"), "p.vhd");
        assert_eq!(way("/a/b", "/a/c/p.vhd"), "../c/p.vhd");
        assert_eq!(way("/", "/p.vhd"), "p.vhd");
    }
}
