//! Time in a run: turns of the executor, in which others may go on.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use spile_core::Timer;

use crate::rng::Rng;

/// Lets up to `most` steps of this task pass.
pub(crate) async fn pause(rng: &mut Rng, most: u64) {
    turns(rng.skewed(most)).await;
}

/// Lets others run so many times.
pub(crate) async fn turns(mut left: u64) {
    poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(());
        }
        left -= 1;
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// A clock on which time goes by only in sleeps, each of which is some turns of the executor.
#[derive(Default)]
pub(crate) struct Turns {
    now_ns: AtomicU64,
    /// A longer sleep has more turns.
    is_longer: bool,
}

impl Turns {
    /// A clock whose longer sleeps have more turns: one for each two milliseconds.
    pub fn of_time() -> Self {
        Self { is_longer: true, ..Self::default() }
    }
}

impl Timer for Turns {
    fn sleep(&self, time: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        self.now_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        Box::pin(turns(2 + if self.is_longer { time.as_millis() as u64 / 2 } else { 0 }))
    }

    fn now_ns(&self) -> u64 {
        self.now_ns.fetch_add(1000, Ordering::Relaxed)
    }
}

/// A clock by which some seconds go by between two looks, and no sleep takes time.
#[derive(Default)]
pub(crate) struct Seconds(AtomicU64);

impl Timer for Seconds {
    fn sleep(&self, _: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(std::future::ready(()))
    }

    fn now_ns(&self) -> u64 {
        Duration::from_secs(self.0.fetch_add(1, Ordering::Relaxed) * 4).as_nanos() as u64
    }
}
