//! Room on a block device, which does not grow with the image: how much is left, and what the device has gained meanwhile.
//!
//! # Order of writes
//!
//! The footer lies in the last sector of a device. A device that was made longer ends with anything: even with the footer of another image
//! that lay there before. From the moment in which it is longer, the image opens by the footer's copy at the start. So:
//!
//! 0. Whoever opens the image for writes puts the footer at the device's end, if that is no footer of this image (`open`); sync.
//! 1. The copy at the start is whole and durable before the first block of a session is prepared, whoever makes the device longer and when.
//! 2. The footer is written at the new end; sync.
//! 3. Only then blocks are placed behind the old end. The old footer is within a block's place, or in a gap in front of one, from then on.
//!
//! A crash before step 2 has ended leaves the copy. A footer that was left at the new end then does not count where it describes another disk
//! than the copy (`footers`). A crash afterwards leaves both. Each session begins with steps 0 and 1
//! again, so two crashes in a row leave no more than one does.

use spile_core::{ErrorKind, Result, Store};

use super::{SECTOR, Sparse};
use crate::room::Room;

/// Data of blocks begin at multiples of this, in bytes.
const BLOCK_ALIGN: u64 = 4096;

impl<S: Store> Sparse<S> {
    /// Where blocks on a device have to end: the footer follows.
    pub(super) fn blocks_limit(&self) -> u64 {
        self.alloc.lock().device_end.saturating_sub(SECTOR)
    }

    /// Takes up what a device has gained. True when it is longer now. The caller keeps others from preparing space.
    pub(super) async fn has_grown(&self) -> Result<bool> {
        let end = self.store.look_for_growth().await?;
        if end <= self.alloc.lock().device_end {
            return Ok(false);
        }
        self.write_footer_at(end - SECTOR).await?;
        self.store.sync().await?;
        self.alloc.set_trailing_is_gone(false);
        self.alloc.lock().device_end = end;
        Ok(true)
    }

    /// Tells how much room there is, after something has taken some of it, or has failed to.
    pub(super) fn tell_room(&self, taken: &Result<()>) {
        match taken {
            Ok(()) => self.room.tell(|| self.room_now(false)),
            Err(error) if error.kind() == ErrorKind::NoSpace => self.room.tell(|| self.room_now(true)),
            Err(_) => {}
        }
    }

    fn room_now(&self, is_out: bool) -> Room {
        let (lacking, span) = (self.lacking_blocks(), self.layout.bitmap_bytes + self.layout.block_bytes);
        let state = self.alloc.lock();
        Room {
            device_bytes: state.device_end,
            free_bytes: state.device_end.saturating_sub(state.next_free + SECTOR),
            most_bytes: state.next_free + lacking * (span + SECTOR).next_multiple_of(BLOCK_ALIGN) + BLOCK_ALIGN,
            is_out,
        }
    }

    /// Takes up what a device has gained, and tells the room anew.
    pub(super) async fn look_for_more(&self) -> Result<()> {
        if self.is_read_only() || self.store.info().grows_zeroed {
            return Ok(());
        }
        let _one = self.alloc.preparing().await;
        self.mend_copy().await?;
        self.has_grown().await?;
        self.tell_room(&Ok(()));
        Ok(())
    }
}
