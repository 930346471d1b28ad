//! [`Gate`]: whether guests may use the disk now, or it is on its way from one host to another.
//!
//! A guest that moves to another host with its disk is connected on both for a moment. It must not run there before the disk is whole, nor
//! here any more from then on. So while the gate is shut, no queue starts: its requests stay in the guest's ring, untaken.
//!
//! A server that is killed and started again does not know by itself that it had handed its disk over, or that the disk had come. Its own notes on
//! the host tell ([`crate::Config::passage`]). A region of requests in flight is memory of the front end, who may write anything there: it decides about
//! its own queues only. One thing it can prove: that its guest was let in to the disk on this host, by the secret that it got then ([`Pass`]).

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

use spile_front::Passage;

use crate::inflight::InflightRegion;

const ALL: [Passage; 3] = [Passage::Open, Passage::Coming, Passage::Gone];

/// The secret of a disk that has come to this host. Each guest that is let in keeps it in its region of requests in flight, and whoever brings it
/// to the next server is let in there, too. Its owner keeps it where no guest reads.
#[derive(Clone, Default)]
pub struct Pass(Arc<Mutex<Option<[u64; 2]>>>);

impl Pass {
    /// The secret from now on; `None`: there is none, and nobody can show it.
    pub fn set(&self, secret: Option<[u64; 2]>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = secret;
    }

    fn get(&self) -> Option<[u64; 2]> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pass")
    }
}

/// The gate of one disk, for all its guests.
pub(crate) struct Gate {
    passage: AtomicU8,
    pass: Pass,
    /// [`crate::Config::belongs_to_guest`].
    belongs_to_guest: Arc<AtomicBool>,
    /// It was told that a guest waits.
    is_told: AtomicBool,
}

impl Gate {
    pub fn new(passage: Passage, pass: Pass, belongs_to_guest: Arc<AtomicBool>) -> Self {
        Self { passage: AtomicU8::new(passage as u8), pass, belongs_to_guest, is_told: AtomicBool::new(false) }
    }

    pub fn passage(&self) -> Passage {
        ALL[usize::from(self.passage.load(SeqCst))]
    }

    /// Returns what was before.
    pub fn set(&self, passage: Passage) -> Passage {
        self.is_told.store(false, SeqCst);
        ALL[usize::from(self.passage.swap(passage as u8, SeqCst))]
    }

    /// A guest has a queue that could start. `is_gone`: its own region says that the disk was handed over. True when it may; else that is told, once.
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

    /// A front end has brought the region of requests in flight that it keeps for its guest. True when its queues have to wait, because a
    /// build before this one has noted there that the disk was handed over.
    pub fn meet(&self, region: &InflightRegion) -> bool {
        let is_gone = region.is_gone();
        let shows_pass = || self.pass.get().is_some_and(|secret| region.pass() == Some(secret));
        match self.passage() {
            // A server before this one has let the guest in already.
            Passage::Coming if !is_gone && shows_pass() => self.let_on(),
            Passage::Open if !is_gone => self.give_pass(region),
            Passage::Coming | Passage::Open | Passage::Gone => {}
        }
        is_gone
    }

    /// The guest that keeps this region is let in: the next server knows it by that.
    pub fn give_pass(&self, region: &InflightRegion) {
        if let Some(secret) = self.pass.get() {
            region.keep_pass(secret);
        }
    }

    /// The server before this one hands a guest's connection over. It `said` whether it had let the guest in; builds before this one do not say
    /// that, and believed the guest's region.
    pub fn adopt(&self, said: Option<bool>, region: Option<&InflightRegion>) {
        let believed = || region.is_some_and(|region| region.is_used() && !region.is_gone());
        if said.is_none() && region.is_some_and(InflightRegion::is_gone) {
            self.belongs_to_guest.store(true, SeqCst);
            self.set(Passage::Gone);
        } else if self.passage() == Passage::Coming && said.unwrap_or_else(believed) {
            self.let_on();
        }
    }

    fn let_on(&self) {
        self.belongs_to_guest.store(true, SeqCst);
        self.set(Passage::Open);
    }
}
