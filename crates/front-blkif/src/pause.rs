//! Pauses: a toolstack wants an image for itself for a while, to replace it by a child or to give it a shorter chain.
//!
//! It writes the key `pause`. The disk's process answers what it has taken, closes the image, writes `pause-done` and
//! ends; the guest waits. When `pause` is removed, another process removes `pause-done`, opens what the other keys say
//! *then*, and goes on as after any other end. Until then nobody touches the image, whatever the other keys say: one that
//! is to go away in a pause (`online` is 0) goes when the pause has ended, or when its keys are removed.

use spile_core::Result;
use spile_xen::store::{Tx, XenStore};

fn has(store: &mut XenStore, tx: Tx, backend_path: &str, key: &str) -> Result<bool> {
    Ok(store.read_optional(tx, &format!("{backend_path}/{key}"))?.is_some())
}

/// The toolstack asks for a pause.
///
/// # Errors
/// What the store says.
pub fn is_asked(store: &mut XenStore, backend_path: &str) -> Result<bool> {
    has(store, Tx::NONE, backend_path, "pause")
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
        let stays = has(store, tx, backend_path, "pause")?;
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
    store.transaction(|store, tx| match has(store, tx, backend_path, "pause")? {
        true => store.write(tx, &format!("{backend_path}/pause-done"), ""),
        false => Ok(()),
    })
}
