//! [`End`]: a moment that comes once and that many may wait for.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use event_listener::Event;
use spile_core::Epoch;

/// Tells whether the last [`Ender`] is gone.
#[derive(Default)]
pub(crate) struct End {
    has_come: AtomicBool,
    event: Event,
}

/// Brings its [`End`] about when it is dropped. Whoever must have ended before that shares it.
pub(crate) struct Ender(Arc<End>);

impl End {
    /// An end, and what brings it about.
    pub(crate) fn new() -> (Arc<Self>, Ender) {
        let end = Arc::new(Self::default());
        (end.clone(), Ender(end))
    }

    pub(crate) fn has_come(&self) -> bool {
        self.has_come.load(Ordering::SeqCst)
    }

    /// Waits until the end has come.
    pub(crate) async fn wait(&self) {
        while !self.has_come() {
            let listener = self.event.listen();
            // Once more, now that the end cannot be missed.
            if !self.has_come() {
                listener.await;
            }
        }
    }
}

impl Epoch for End {
    fn has_ended(&self) -> bool {
        self.has_come()
    }

    fn ended(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(self.wait())
    }
}

impl Drop for Ender {
    fn drop(&mut self) {
        self.0.has_come.store(true, Ordering::SeqCst);
        self.0.event.notify(usize::MAX);
    }
}
