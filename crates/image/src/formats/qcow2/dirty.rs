//! An image whose refcounts may be wrong ("dirty"): a program that lets them lag behind was killed. Opening it for writing makes them
//! anew first, as `spile check --repair` does.
//!
//! # Order of writes
//!
//! That of a repair (`check/repair`): the new refcounts, durably, in clusters that nothing refers to; the header that points at them; the
//! flag falls last. What ends before that leaves an image that is dirty still, and shows its guest the same bytes: the next
//! opening counts again. Each try that is broken off may leave the file longer by as much as its refcounts take, which is free space for
//! the next writer.
//!
//! The repair alone clears the flag, and Spile never sets it: its refcounts do not lag.
//!
//! An image that is opened for reading only, alone or as a parent, stays as it is.

use spile_core::{Code, Error, ErrorKind, Result, Store};

use super::check::repair;
use super::codec::header::feature;
use super::open::{Head, read_head};

const HINT: &str = "open it for reading only; `spile check` lists what is wrong, and `spile convert` copies what can be read into a new image";

/// True for the error of an image whose refcounts may be wrong, and which was to keep them ([`keeps_dirty`](crate::OpenOptions::keeps_dirty)).
pub fn is_dirty(error: &Error) -> bool {
    error.is(Code::ImageDirty)
}

/// The head of the image in `store`, which may be written now: where `head` says that the image is dirty, its refcounts are made anew, unless it
/// `keeps_dirty` ones.
///
/// # Errors
/// `Unsupported` for an image that keeps them ([`is_dirty`]); `Corrupt` when the image contradicts itself, so that nobody can tell what is in use; as [`repair`]. The image is as dirty as it was.
pub(super) async fn mended<S: Store>(store: &S, head: Head, keeps_dirty: bool) -> Result<Head> {
    if !head.header.has(feature::DIRTY) {
        return Ok(head);
    }
    if keeps_dirty {
        let what = "the image is marked dirty, as its last writer was killed: its refcounts may be wrong";
        let error = Error::new(ErrorKind::Unsupported, what).coded(Code::ImageDirty).at_path(store.path());
        return Err(error.hint("spile check --repair makes them anew, while no other program has the image open"));
    }
    let path = store.path().display();
    tracing::warn!("{path}: the image is dirty, as its last writer was killed: its refcounts are made anew");
    if let Some(hindrance) = Box::pin(repair(store)).await.map_err(with_hint)?.hindrance {
        let what = "the image is dirty, and its refcounts cannot be made anew";
        return Err(hindrance.error(what).at_path(store.path()).hint(HINT));
    }
    tracing::warn!("{path}: the refcounts are right, and the image is not dirty any more");
    read_head(store).await
}

fn with_hint(error: Error) -> Error {
    if error.hint_text().is_some() { error } else { error.hint(HINT) }
}
