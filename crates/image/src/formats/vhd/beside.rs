//! Maintenance beside requests: preparing space, and retiring the bitmap journal.
//!
//! Both need syncs, and no request waits for one. The next step of space is prepared when the disk is put to use, and then
//! whenever the last step is used up by half. The journal's half is retired when it is half full, while records go on
//! in the rest. A request waits only when writes come faster than the file system syncs: when all prepared space is taken,
//! or the journal is full. So it does where nothing runs beside requests ([`Env::spawn`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use event_listener::Event;
use spile_core::{Env, Store};

use super::Sparse;

/// What runs beside the requests of one image: at most one of each kind.
pub(crate) struct Beside {
    env: Arc<dyn Env>,
    marks: Arc<Marks>,
}

/// Which kinds of work run.
#[derive(Default)]
struct Marks {
    prepares: AtomicBool,
    retires: AtomicBool,
    ended: Event,
}

impl Beside {
    pub(crate) fn new(env: Arc<dyn Env>) -> Self {
        Self { env, marks: Arc::default() }
    }

    /// Waits until no work has the image any more.
    pub(super) async fn wait_for_none(&self) {
        loop {
            let ended = self.marks.ended.listen();
            if !self.marks.prepares.load(Ordering::Acquire) && !self.marks.retires.load(Ordering::Acquire) {
                return;
            }
            ended.await;
        }
    }
}

/// Marks that a kind of work runs, until it is dropped: also when the work is dropped before its end.
struct Mark {
    marks: Arc<Marks>,
    of: fn(&Marks) -> &AtomicBool,
}

impl Drop for Mark {
    fn drop(&mut self) {
        (self.of)(&self.marks).store(false, Ordering::Release);
        self.marks.ended.notify(usize::MAX);
    }
}

/// The image, for work that runs beside requests. The order matters: the mark is dropped after the image.
struct Running<S: Store> {
    sparse: Arc<Sparse<S>>,
    _mark: Mark,
}

impl<S: Store> Running<S> {
    /// `None` when such work runs already.
    fn begin(sparse: &Arc<Sparse<S>>, of: fn(&Marks) -> &AtomicBool) -> Option<Self> {
        let marks = &sparse.beside.marks;
        let is_running = of(marks).swap(true, Ordering::AcqRel);
        (!is_running).then(|| Self { sparse: sparse.clone(), _mark: Mark { marks: marks.clone(), of } })
    }

    async fn prepare(self) {
        self.sparse.prepare_early().await;
    }

    async fn retire(self) {
        drop(self.sparse.flush().await);
    }
}

impl<S: Store> Sparse<S> {
    /// Begins to prepare the next step of space. A failure is not told here: the first write that finds no space gets it.
    pub(super) fn prepare_beside(self: &Arc<Self>) {
        if self.is_read_only() {
            return;
        }
        let Some(running) = Running::begin(self, |marks| &marks.prepares) else { return };
        self.beside.env.spawn(Box::pin(running.prepare()));
    }

    /// Begins a flush, which retires the journal's half. A failure is not told here: what the flush could not write stays
    /// pending, and the next flush of a guest gets the error.
    pub(super) fn retire_beside(self: &Arc<Self>) {
        let Some(running) = Running::begin(self, |marks| &marks.retires) else { return };
        self.beside.env.spawn(Box::pin(running.retire()));
    }
}
