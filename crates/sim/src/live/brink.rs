//! Ends that come near. Most steps of a life have little to do with a snapshot, so that an end at any of them seldom meets the few
//! that have. In some lives the end comes close behind one of these.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::exec::end_in;
use crate::rng::Rng;

/// A step of a snapshot, close behind which a life may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A file is about to get the disk's path.
    Renamed,
    /// The disk has its new graph.
    Exchanged,
    /// The old leaf has been sealed.
    Sealed,
}

/// Where the life ends, if it ends so: the place, and how many steps behind it.
#[derive(Clone, Default)]
pub(super) struct Brink {
    drawn: Arc<Mutex<Option<(Place, u64)>>>,
    has_renamed: Arc<AtomicBool>,
}

impl Brink {
    fn set(&self, to: Option<(Place, u64)>) {
        *self.drawn.lock().unwrap_or_else(PoisonError::into_inner) = to;
    }

    /// A new life begins, which ends as it would without. `was_killed`: the process before was. True when it was killed close behind the
    /// rename of a file, whose name may not be durable: a power cut may take it in this life, until somebody makes it so.
    pub fn begin_life(&self, was_killed: bool) -> bool {
        self.set(None);
        self.has_renamed.swap(false, Ordering::Relaxed) && was_killed
    }

    /// Draws for a life of `exchanges` whether it ends so.
    pub fn draw(&self, rng: &mut Rng, exchanges: bool) {
        let place = *rng.pick(&[Place::Renamed, Place::Exchanged, Place::Exchanged, Place::Sealed]);
        let steps = rng.skewed(if place == Place::Renamed { 30 } else { 300 });
        let is_drawn = rng.chance(1, 3) && exchanges;
        self.set(is_drawn.then_some((place, steps)));
    }

    /// This is such a step. True when the life ends behind it.
    pub fn at(&self, place: Place) -> bool {
        let mut drawn = self.drawn.lock().unwrap_or_else(PoisonError::into_inner);
        match drawn.take_if(|(drawn, _)| *drawn == place) {
            Some((_, steps)) => {
                self.has_renamed.store(place == Place::Renamed, Ordering::Relaxed);
                end_in(steps);
                true
            }
            None => false,
        }
    }
}
