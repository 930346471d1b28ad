//! Panics of the code under test, on whichever thread.

use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many there were.
pub static PANICS: AtomicUsize = AtomicUsize::new(0);

/// A panic on any thread, caught or not, is a finding.
pub fn count_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Ordering::Relaxed);
            before(info);
        }));
    });
}
