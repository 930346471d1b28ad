//! Room on a block device, which does not grow with the image: how much is left, and what the device has gained meanwhile.
//!
//! A device that was made longer needs no change of the image: its refcounts say that all it has gained is free. What lies there is
//! anything, so it is emptied before it is used, like every cluster of a device (`alloc`). Nothing more is written, so a crash between any
//! two steps leaves what a crash of an allocation leaves.

use spile_core::{ErrorKind, Result, Store};

use super::Qcow2;
use super::layout::{clusters_inside, full_metadata_bytes};
use super::refcounts::Refcounts;
use crate::room::Room;

impl<S: Store> Qcow2<S> {
    /// Takes up what a device has gained. True when it is longer now. The caller holds the refcounts.
    pub(super) async fn has_grown(&self) -> Result<bool> {
        let before = self.store.len_bytes();
        let now = self.store.look_for_growth().await?;
        if now > before {
            self.map.set_file_bytes(now);
        }
        Ok(now > before)
    }

    /// Tells how much room there is, after something has taken some of it, or has failed to.
    pub(super) fn tell_room<T>(&self, counts: &Refcounts, taken: &Result<T>) {
        let Some(writing) = self.writing.as_ref().filter(|_| !self.store.info().grows_zeroed) else { return };
        let is_out = match taken {
            Ok(_) => false,
            Err(error) if error.kind() == ErrorKind::NoSpace => true,
            Err(_) => return,
        };
        writing.room.tell(|| self.room(counts, is_out));
    }

    fn room(&self, counts: &Refcounts, is_out: bool) -> Room {
        let head = self.now.head();
        let device_bytes = self.store.len_bytes();
        let clusters = device_bytes >> counts.cluster_bits;
        Room {
            device_bytes,
            free_bytes: counts.free_within(clusters) << counts.cluster_bits,
            most_bytes: full_metadata_bytes(&head.header) + clusters_inside(&head.header) * head.header.cluster_bytes(),
            is_out,
        }
    }

    /// Takes up what a device has gained, and tells the room anew. An image that has not looked for free clusters yet does not know its room.
    pub(super) async fn look_for_more(&self) -> Result<()> {
        let Some(writing) = &self.writing else { return Ok(()) };
        let counts = writing.counts.lock().await;
        writing.check(&self.store)?;
        self.has_grown().await?;
        if counts.was_searched() {
            self.tell_room(&counts, &Ok(()));
        }
        Ok(())
    }
}
