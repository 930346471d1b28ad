//! The errors of images that come from other hosts.

use std::path::Path;

use spile_core::{Error, ErrorKind};

use crate::motion::order::IS_FREE;

pub(super) fn other_half(half: &Path) -> Error {
    let what = "the file is not the one that this move has begun with";
    Error::new(ErrorKind::Denied, what).at_path(half).hint("remove it, or put it back")
}

/// What whoever asks for a parent is told when nothing has its name.
pub fn is_free_here() -> Error {
    Error::new(ErrorKind::Denied, IS_FREE)
}

/// What the other host is told of a copy that has its name, in these words.
pub(in crate::motion) const IS_WHOLE: &str =
    "this copy is whole and has its name: nothing more is written to it by the job that has made it";

pub(super) fn is_whole(disk: &Path) -> Error {
    Error::new(ErrorKind::Denied, IS_WHOLE).at_path(disk).hint("another copy needs another name")
}

/// What whoever gives an order about an image is told that is not there, or is another move's by now.
pub(in crate::motion) const NO_IMAGE: &str = "there is no image of this move here";

pub(super) fn later_attempt(disk: &Path) -> Error {
    Error::new(ErrorKind::Denied, "a later attempt of this move is under way").at_path(disk)
}

pub(super) fn no_such_move(disk: &Path) -> Error {
    Error::new(ErrorKind::NotFound, NO_IMAGE).at_path(disk)
}

pub(super) fn no_old_image(disk: &Path) -> Error {
    Error::new(ErrorKind::NotFound, "there is no old image that this disk has left here").at_path(disk)
}

pub(super) fn no_such_disk(disk: &Path) -> Error {
    Error::new(ErrorKind::NotFound, "no disk of this name was moved here").at_path(disk)
}
