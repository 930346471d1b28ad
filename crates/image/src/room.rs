//! [`Room`]: how much room an image has left on a device, for whoever can make the device longer.
//!
//! A file grows by itself. A block device (a logical volume) has a length of its own, and an image that is thinner than its disk needs
//! more of it as its guest writes. The image tells its room where it takes some of it, and where it finds none. Nobody has to ask, so a
//! disk that is idle costs nothing.

use std::sync::{Arc, Mutex, PoisonError};

/// What an image on a device knows of its room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The length of the device, as far as the image uses it.
    pub device_bytes: u64,
    /// So much of that is unused, as far as the image has looked.
    pub free_bytes: u64,
    /// With a device of this length the whole disk can be written. Snapshots inside the image, and what killed processes have left, come on top.
    pub most_bytes: u64,
    /// The last thing that needed room found none.
    pub is_out: bool,
}

/// Lengths are wanted in steps of this: volume managers round them up to their own extents.
const STEP_BYTES: u64 = 1 << 20;

impl Room {
    /// The length that the device should have when at least `ahead_bytes` are to be free: then twice as much is free afterwards. `None` when
    /// there is enough, or when all of the disk has its place.
    pub fn wanted_bytes(&self, ahead_bytes: u64) -> Option<u64> {
        if !self.is_out && (self.free_bytes >= ahead_bytes || self.device_bytes >= self.most_bytes) {
            return None;
        }
        let used_bytes = self.device_bytes.saturating_sub(self.free_bytes);
        let wanted = used_bytes.saturating_add(ahead_bytes.saturating_mul(2)).max(self.device_bytes + STEP_BYTES);
        let most = if self.most_bytes > self.device_bytes { self.most_bytes } else { u64::MAX };
        wanted.min(most).checked_next_multiple_of(STEP_BYTES)
    }
}

/// Hears of an image's room. It is called by the worker that has taken some, and must not wait.
pub type HearRoom = Arc<dyn Fn(Room) + Send + Sync>;

/// Who hears of an image's room.
#[derive(Default)]
pub(crate) struct RoomWatch(Mutex<Option<HearRoom>>);

impl RoomWatch {
    /// From now on `hear` is told, and nobody else.
    pub fn set(&self, hear: HearRoom) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(hear);
    }

    /// Tells `room`, if somebody wants to know.
    pub fn tell(&self, room: impl FnOnce() -> Room) {
        let hear = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(hear) = hear {
            hear(room());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn room(free_bytes: u64, is_out: bool) -> Room {
        Room { device_bytes: 100 * MIB, free_bytes, most_bytes: 1000 * MIB, is_out }
    }

    #[test]
    fn a_device_is_wanted_so_long_that_twice_the_margin_is_free() {
        assert_eq!(room(10 * MIB, false).wanted_bytes(10 * MIB), None);
        assert_eq!(room(9 * MIB, false).wanted_bytes(10 * MIB), Some(111 * MIB));
        assert_eq!(room(0, true).wanted_bytes(10 * MIB), Some(120 * MIB));
        assert_eq!(room(0, true).wanted_bytes(u64::MAX), Some(1000 * MIB));
        // There is room, but not for what was needed.
        assert_eq!(room(60 * MIB, true).wanted_bytes(0), Some(101 * MIB));
    }

    #[test]
    fn no_device_is_wanted_longer_than_the_disk_can_use_unless_it_is_out_of_room() {
        assert_eq!(room(0, false).wanted_bytes(5000 * MIB), Some(1000 * MIB));
        let whole = Room { most_bytes: 100 * MIB, ..room(0, false) };
        assert_eq!(whole.wanted_bytes(MIB), None);
        assert_eq!(Room { is_out: true, ..whole }.wanted_bytes(MIB), Some(102 * MIB));
    }
}
