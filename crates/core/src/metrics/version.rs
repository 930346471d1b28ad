//! [`Version`]: how a reader knows that what it has read belongs together, while one thread at a time writes without a lock.
//!
//! The version is odd while the writer changes something, and another one afterwards (a "seqlock"). All that is written and read are
//! atomics, so a reader that comes at a bad moment sees old and new values side by side, but nothing undefined. It looks again.

use std::sync::atomic::{AtomicU64, Ordering, Ordering::Relaxed, fence};

/// The version of what one thread at a time writes, and any number of threads read.
#[derive(Debug, Default)]
pub(super) struct Version(AtomicU64);

/// Ends a change when it is dropped.
struct Whole<'a> {
    version: &'a AtomicU64,
    next: u64,
}

impl Drop for Whole<'_> {
    #[inline]
    fn drop(&mut self) {
        self.version.store(self.next, Ordering::Release);
    }
}

impl Version {
    /// Changes what readers must see as a whole.
    #[inline]
    pub(super) fn change(&self, change: impl FnOnce()) {
        let version = self.0.load(Relaxed);
        self.0.store(version.wrapping_add(1), Relaxed);
        fence(Ordering::Release);
        // Also when `change` panics: a reader would wait for ever.
        let _whole = Whole { version: &self.0, next: version.wrapping_add(2) };
        change();
    }

    /// What `read` finds while nothing changes. Where the writer is interrupted in the middle of a change, the reader gives way to it.
    pub(super) fn read<T>(&self, mut read: impl FnMut() -> T) -> T {
        loop {
            if let Some(found) = self.try_read(&mut read) {
                return found;
            }
            std::thread::yield_now();
        }
    }

    /// What `read` finds; `None` when something changes meanwhile.
    pub(super) fn try_read<T>(&self, read: impl FnOnce() -> T) -> Option<T> {
        let before = self.0.load(Ordering::Acquire);
        if before & 1 != 0 {
            return None;
        }
        let found = read();
        fence(Ordering::Acquire);
        (self.0.load(Relaxed) == before).then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_read_as_a_whole() {
        let (version, pair) = (Version::default(), [AtomicU64::new(0), AtomicU64::new(0)]);
        let both = || [pair[0].load(Relaxed), pair[1].load(Relaxed)];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..=100_000 {
                    version.change(|| pair.iter().for_each(|part| part.store(number, Relaxed)));
                }
            });
            for _ in 0..20_000 {
                let [one, other] = version.read(both);
                assert_eq!(one, other);
            }
        });
        assert_eq!(version.read(both), [100_000, 100_000]);
    }

    #[test]
    fn nothing_is_read_in_the_middle_of_a_change() {
        let version = Version::default();
        version.change(|| assert_eq!(version.try_read(|| 7), None));
        assert_eq!(version.try_read(|| 7), Some(7));
        let meanwhile = version.try_read(|| version.change(|| ()));
        assert_eq!(meanwhile, None, "what was read may be old");
    }
}
