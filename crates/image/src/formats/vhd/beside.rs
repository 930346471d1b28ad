//! Maintenance beside requests: preparing space, and retiring the bitmap journal.
//!
//! Both need syncs, and no request waits for one. The next step of space is prepared when the disk is put to use, and then
//! whenever the last step is used up by half. The journal's half is retired when it is half full, while records go on
//! in the rest. A request waits only when writes come faster than the file system syncs: when all prepared space is taken,
//! or the journal is full. So it does where nothing runs beside requests ([`Env::spawn`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use spile_core::{Env, Store};

use super::Sparse;

/// What runs beside the requests of one image: at most one of each kind.
pub(crate) struct Beside {
    env: Arc<dyn Env>,
    prepares: AtomicBool,
    retires: AtomicBool,
}

impl Beside {
    pub(crate) fn new(env: Arc<dyn Env>) -> Self {
        Self { env, prepares: AtomicBool::new(false), retires: AtomicBool::new(false) }
    }
}

/// Marks that a kind of work runs, until it is dropped: also when the work is dropped before its end.
struct Running<S: Store> {
    sparse: Arc<Sparse<S>>,
    mark: fn(&Beside) -> &AtomicBool,
}

impl<S: Store> Running<S> {
    /// `None` when such work runs already.
    fn begin(sparse: &Arc<Sparse<S>>, mark: fn(&Beside) -> &AtomicBool) -> Option<Self> {
        let is_running = mark(&sparse.beside).swap(true, Ordering::AcqRel);
        (!is_running).then(|| Self { sparse: sparse.clone(), mark })
    }
}

impl<S: Store> Drop for Running<S> {
    fn drop(&mut self) {
        (self.mark)(&self.sparse.beside).store(false, Ordering::Release);
    }
}

impl<S: Store> Sparse<S> {
    /// Begins to prepare the next step of space. A failure is not told here: the first write that finds no space gets it.
    pub(super) fn prepare_beside(self: &Arc<Self>) {
        if self.is_read_only() {
            return;
        }
        let Some(running) = Running::begin(self, |beside| &beside.prepares) else { return };
        self.beside.env.spawn(Box::pin(async move { running.sparse.prepare_early().await }));
    }

    /// Begins a flush, which retires the journal's half. A failure is not told here: what the flush could not write stays
    /// pending, and the next flush of a guest gets the error.
    pub(super) fn retire_beside(self: &Arc<Self>) {
        let Some(running) = Running::begin(self, |beside| &beside.retires) else { return };
        self.beside.env.spawn(Box::pin(async move { drop(running.sparse.flush().await) }));
    }
}
