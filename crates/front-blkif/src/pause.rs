//! Pauses: a toolstack wants an image for itself for a while, to replace it by a child or to give it a shorter chain.
//!
//! It writes the key `pause`. The disk's process answers what it has taken, closes the image, writes `pause-done` and
//! ends; the guest waits. When `pause` is removed, another process removes `pause-done`, opens what the other keys say
//! *then*, and goes on as after any other end. A disk that is to go away (`online` is 0) has no pauses: its guest waits
//! for its end.

use spile_core::Result;
use spile_xen::store::{Tx, XenStore};

fn has(store: &mut XenStore, tx: Tx, backend_path: &str, key: &str) -> Result<bool> {
    Ok(store.read_optional(tx, &format!("{backend_path}/{key}"))?.is_some())
}

fn is_asked_within(store: &mut XenStore, tx: Tx, backend_path: &str) -> Result<bool> {
    let online = store.read_optional(tx, &format!("{backend_path}/online"))?;
    Ok(online.is_some_and(|online| online != "0") && has(store, tx, backend_path, "pause")?)
}

/// The toolstack asks for a pause.
///
/// # Errors
/// What the store says.
pub fn is_asked(store: &mut XenStore, backend_path: &str) -> Result<bool> {
    is_asked_within(store, Tx::NONE, backend_path)
}

/// A pause goes on: the image is the toolstack's, and not to be touched.
///
/// # Errors
/// What the store says.
pub fn goes_on(store: &mut XenStore, backend_path: &str) -> Result<bool> {
    // In this order: who asks for another pause has seen the end of the one before.
    Ok(has(store, Tx::NONE, backend_path, "pause-done")? && is_asked(store, backend_path)?)
}

/// Before an image is opened: true when a pause goes on. Otherwise none is said to be, from now on: a toolstack that asks
/// for one after this waits until it is told ([`tell`]).
///
/// # Errors
/// What the store says.
pub fn stays(store: &mut XenStore, backend_path: &str) -> Result<bool> {
    store.transaction(|store, tx| {
        if !has(store, tx, backend_path, "pause-done")? {
            return Ok(false);
        }
        let stays = is_asked_within(store, tx, backend_path)?;
        if !stays {
            store.remove(tx, &format!("{backend_path}/pause-done"))?;
        }
        Ok(stays)
    })
}

/// Tells a toolstack that still asks for it that the image is closed.
///
/// # Errors
/// What the store says.
pub fn tell(store: &mut XenStore, backend_path: &str) -> Result<()> {
    store.transaction(|store, tx| match is_asked_within(store, tx, backend_path)? {
        true => store.write(tx, &format!("{backend_path}/pause-done"), ""),
        false => Ok(()),
    })
}
