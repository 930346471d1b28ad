//! [`Gate`]: whether guests may use the disk now, or it is on its way from one host to another.
//!
//! A guest that moves to another host with its disk is connected on both for a moment. It must not run there before the disk is whole, nor
//! here any more from then on. So while the gate is shut, no queue starts: its requests stay in the guest's ring, untaken.
//!
//! A server that is killed and started again does not know that it had handed its disk over, or that the disk had come. The region of requests
//! in flight tells: its front end keeps it for as long as its guest lasts ([`InflightRegion::keep_gone`]). A front end may lie: that it is gone
//! keeps only its own connection and clients that are no guests from its disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};

use spile_front::Passage;

use crate::inflight::InflightRegion;

const ALL: [Passage; 3] = [Passage::Open, Passage::Coming, Passage::Gone];

/// The gate of one disk, for all its guests.
pub(crate) struct Gate {
    passage: AtomicU8,
    /// [`crate::Config::belongs_to_guest`].
    belongs_to_guest: Arc<AtomicBool>,
    /// It was told that a guest waits.
    is_told: AtomicBool,
}

impl Gate {
    pub fn new(passage: Passage, belongs_to_guest: Arc<AtomicBool>) -> Self {
        Self { passage: AtomicU8::new(passage as u8), belongs_to_guest, is_told: AtomicBool::new(false) }
    }

    pub fn passage(&self) -> Passage {
        ALL[usize::from(self.passage.load(SeqCst))]
    }

    /// Returns what was before.
    pub fn set(&self, passage: Passage) -> Passage {
        self.is_told.store(false, SeqCst);
        ALL[usize::from(self.passage.swap(passage as u8, SeqCst))]
    }

    /// A guest has a queue that could start. `is_gone`: it knows that the disk was handed over. True when it may; else that is told, once.
    pub fn lets_in(&self, disk: &str, is_gone: bool) -> bool {
        let why = match self.passage() {
            Passage::Open if !is_gone => return true,
            Passage::Coming => "is still on its way from another host",
            Passage::Open | Passage::Gone => "was handed over to another host",
        };
        if !self.is_told.swap(true, SeqCst) {
            tracing::warn!(
                journal.disk = disk,
                "a guest wants to use the disk {disk:?}, which {why}: it waits until `spile resume`"
            );
        }
        false
    }

    /// A front end has brought the region of requests in flight that it keeps for its guest. True when the disk was handed over.
    pub fn meet(&self, region: &InflightRegion) -> bool {
        match self.passage() {
            Passage::Gone => region.keep_gone(true),
            // A server before this one has served the guest here already.
            Passage::Coming if region.is_used() && !region.is_gone() => {
                self.belongs_to_guest.store(true, SeqCst);
                self.set(Passage::Open);
            }
            Passage::Coming | Passage::Open => {}
        }
        let is_gone = region.is_gone();
        if is_gone {
            self.belongs_to_guest.store(true, SeqCst);
        }
        is_gone
    }
}
