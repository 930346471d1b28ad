//! Pauses: for some time a toolstack has an image for itself, to replace it by a child or to give it a shorter chain.
//!
//! The toolstack writes the key `pause`. The disk's process answers the requests that it has taken, closes the image,
//! writes `pause-done` and ends; the guest waits. When the toolstack removes `pause`, another process removes
//! `pause-done`, opens the image that the other keys name *then*, and goes on as after any other end. Until then no
//! process of ours touches the image, whatever the other keys say: a device that is to go away during a pause (`online`
//! is 0) goes when the pause has ended, or when its keys are removed.

use spile_core::Result;
use spile_xen::store::{Tx, XenStore};

fn has(store: &mut XenStore, tx: Tx, backend_path: &str, key: &str) -> Result<bool> {
    Ok(store.read_optional(tx, &format!("{backend_path}/{key}"))?.is_some())
}

/// True when the toolstack asks for a pause.
///
/// # Errors
/// The errors of [`XenStore`].
pub fn is_asked(store: &mut XenStore, backend_path: &str) -> Result<bool> {
    has(store, Tx::NONE, backend_path, "pause")
}

/// True during a pause: the image belongs to the toolstack and must not be touched.
///
/// # Errors
/// The errors of [`XenStore`].
pub fn goes_on(store: &mut XenStore, backend_path: &str) -> Result<bool> {
    // In this order, because a toolstack asks for another pause only after it has seen the end of the one before.
    Ok(has(store, Tx::NONE, backend_path, "pause-done")? && is_asked(store, backend_path)?)
}

/// To be called before an image is opened. True during a pause. Otherwise `pause-done` is removed: a toolstack that
/// asks for a pause from now on waits until it is told that the image is closed ([`tell`]).
///
/// # Errors
/// The errors of [`XenStore`].
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

/// Tells the toolstack that the image is closed, if it still asks for a pause.
///
/// # Errors
/// The errors of [`XenStore`].
pub fn tell(store: &mut XenStore, backend_path: &str) -> Result<()> {
    store.transaction(|store, tx| match has(store, tx, backend_path, "pause")? {
        true => store.write(tx, &format!("{backend_path}/pause-done"), ""),
        false => Ok(()),
    })
}
