//! [`Haste`]: who wants no request of a disk to wait.

use std::sync::atomic::{AtomicUsize, Ordering};

use event_listener::Event;

/// The callers that want no request to wait now.
#[derive(Default)]
pub(crate) struct Haste {
    callers: AtomicUsize,
    begun: Event,
}

impl Haste {
    /// One more caller, or one less.
    pub(crate) fn hurry(&self, begins: bool) {
        match begins {
            true => {
                self.callers.fetch_add(1, Ordering::SeqCst);
                self.begun.notify(usize::MAX);
            }
            false => _ = self.callers.fetch_sub(1, Ordering::SeqCst),
        }
    }

    /// Comes when there is one.
    pub(crate) async fn come(&self) {
        loop {
            let begun = self.begun.listen();
            if self.callers.load(Ordering::SeqCst) > 0 {
                return;
            }
            begun.await;
        }
    }
}
