//! [`Pauses`]: how long a place that fails, or does not answer, is left alone before the next try.

use std::cell::Cell;
use std::pin::pin;
use std::time::Duration;

use futures_util::future::select;
use spile_core::{Files, Result};

use crate::work::Work;

const FIRST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(1);

/// Each pause is twice as long as the one before, up to [`LONGEST`].
pub(super) struct Pauses(Cell<Duration>);

impl Pauses {
    pub fn new() -> Self {
        Self(Cell::new(FIRST))
    }

    /// The place works: the next pause is the first one again.
    pub fn begin_anew(&self) {
        self.0.set(FIRST);
    }

    /// How long the pause is that begins now.
    pub fn next(&self) -> Duration {
        self.0.replace((self.0.get() * 2).min(LONGEST))
    }

    /// Waits for the time of the next pause, or until the job is told to end.
    ///
    /// # Errors
    /// `Shutdown` when the job is to end here.
    pub async fn pass<F: Files>(&self, work: &Work<'_, F>) -> Result<()> {
        let _either = select(work.timer.sleep(self.next()), pin!(work.job.told_to_end())).await;
        work.job.go_on().await.map(drop)
    }
}
