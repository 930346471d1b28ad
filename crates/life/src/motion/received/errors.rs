//! The errors of images that come from other hosts.

use std::path::Path;

use spile_core::{Code, Error, ErrorKind};

pub(super) fn other_half(half: &Path) -> Error {
    let what = "the file is not the one that this move has begun with";
    Error::new(ErrorKind::Denied, what).at_path(half).hint("remove it, or put it back")
}

/// The answer to [`Order::Find`](crate::motion::Order::Find) when nothing has the name.
pub fn is_free_here() -> Error {
    Error::new(ErrorKind::Denied, "nothing has this name here").coded(Code::NameFree)
}

/// The answer to an order that would change a copy which has its name.
pub(super) fn is_whole(disk: &Path) -> Error {
    let what = "this copy is complete and has its name: the job that made it no longer writes to it";
    let error = Error::new(ErrorKind::Denied, what).coded(Code::CopyComplete);
    error.at_path(disk).hint("another copy needs another name")
}

/// Refuses a name that is not the name of one file.
pub(super) fn bad_name() -> Error {
    let what =
        "a disk that comes needs the name of one file: letters, digits, and - _ . + @, first neither a dot nor a dash";
    Error::new(ErrorKind::InvalidInput, what).coded(Code::BadName)
}

pub(super) fn later_attempt(disk: &Path) -> Error {
    Error::new(ErrorKind::Denied, "a later attempt of this move is under way").at_path(disk)
}

pub(super) fn no_such_move(disk: &Path) -> Error {
    let what = "there is no image of this move here";
    Error::new(ErrorKind::NotFound, what).coded(Code::NoSuchMove).at_path(disk)
}

pub(super) fn no_old_image(disk: &Path) -> Error {
    Error::new(ErrorKind::NotFound, "there is no old image that this disk has left here").at_path(disk)
}

pub(super) fn no_such_disk(disk: &Path) -> Error {
    Error::new(ErrorKind::NotFound, "no disk of this name was moved here").at_path(disk)
}
