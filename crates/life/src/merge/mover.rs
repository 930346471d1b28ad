//! [`Mover`]: moves what a layer has into its parent, one batch after the other.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use spile_core::{Disk, Extent, Files, Result, Segments};
use spile_image::{Broken, Sinking};
use spile_node::Aligned;

use crate::work::{GraphOf, Work};

/// So many units are counted before guests have their turn.
const COUNTED_AT_ONCE: u64 = 4096;
/// Long enough for all that is ready to be done.
const A_TURN: Duration = Duration::from_micros(1);

/// A merge that moves data.
pub(super) struct Mover<'a, 'w, F: Files> {
    work: &'a Work<'w, F>,
    /// The graph whose leaf is merged.
    source: Arc<GraphOf<F>>,
    /// The parent with what is below it.
    target: Aligned<Arc<GraphOf<F>>>,
    /// When the leaf of the disk itself is merged.
    sinking: Option<Arc<Sinking<F::Store>>>,
    buffer: Segments,
    done_bytes: u64,
}

impl<'a, 'w, F: Files> Mover<'a, 'w, F> {
    pub(super) fn new(
        work: &'a Work<'w, F>,
        source: Arc<GraphOf<F>>,
        target: Arc<GraphOf<F>>,
        sinking: Option<Arc<Sinking<F::Store>>>,
    ) -> Self {
        let buffer = Segments::zeroed(work.sizes.piece_bytes as usize);
        Self { work, source, target: Aligned::new(target), sinking, buffer, done_bytes: 0 }
    }

    fn whole(&self) -> Extent {
        Extent::from_range(0..self.source.size_bytes())
    }

    /// The units that the layer has in `within`, until they are `most_bytes` long or longer.
    fn units(&self, within: Extent, most_bytes: u64) -> Vec<Extent> {
        let (mut units, mut bytes, mut at) = (Vec::new(), 0, within.start());
        while bytes < most_bytes
            && at < within.end()
            && let Some(held) = self.source.next_own(Extent::from_range(at..within.end()))
        {
            let unit = self.source.unit_of(held);
            (bytes, at) = (bytes + unit.len_bytes, unit.end());
            units.push(unit);
        }
        units
    }

    /// How many bytes the layer has in all. A large disk has millions of units, and guests are served between some thousand of them.
    async fn total_bytes(&self) -> u64 {
        let (mut total_bytes, mut at, end) = (0, 0, self.whole().end());
        for counted in 1_u64.. {
            let held = (at < end).then(|| self.source.next_own(Extent::from_range(at..end))).flatten();
            let Some(unit) = held.map(|held| self.source.unit_of(held)) else { break };
            (total_bytes, at) = (total_bytes + unit.len_bytes, unit.end());
            if counted.is_multiple_of(COUNTED_AT_ONCE) {
                self.work.timer.sleep(A_TURN).await;
            }
        }
        total_bytes
    }

    /// Moves all that the layer has.
    pub(super) async fn run(&mut self) -> Result<()> {
        self.work.job.set_total(self.total_bytes().await);
        let mut from = 0;
        loop {
            let units = self.units(Extent::from_range(from..self.whole().end()), self.work.sizes.batch_bytes);
            match units.last() {
                Some(last) => from = last.end(),
                // What a change has allocated behind the mover while the merge began.
                None if from > 0 => {
                    from = 0;
                    continue;
                }
                None => return Ok(()),
            }
            self.batch(&units).await?;
        }
    }

    async fn batch(&mut self, units: &[Extent]) -> Result<()> {
        if let Some(sinking) = &self.sinking {
            self.work.put(self.source.sinking(sinking, units.to_vec())).await?;
        }
        let before = self.done_bytes;
        loop {
            let failures = self.failures();
            self.done_bytes = before;
            for unit in units {
                self.copy(*unit).await?;
            }
            if self.work.broken != Broken::ForgetBeforeSync {
                self.target.flush().await?;
            }
            if self.forget(units, failures).await? {
                break;
            }
        }
        if self.work.broken == Broken::ForgetBeforeSync {
            self.source.flush_own().await?;
            return self.target.flush().await;
        }
        self.source.flush_own().await
    }

    fn failures(&self) -> u64 {
        self.sinking.as_ref().map_or(0, |sinking| sinking.failures())
    }

    /// Copies a unit, piece by piece.
    async fn copy(&mut self, unit: Extent) -> Result<()> {
        let mut at = unit.start();
        while at < unit.end() {
            let piece = Extent::from_range(at..unit.end().min(at + self.work.sizes.piece_bytes));
            let Work { job, timer, broken, .. } = self.work;
            let copy = async {
                let _alone = match &self.sinking {
                    Some(sinking) if *broken != Broken::CopyWithoutLock => Some(sinking.hold(range(piece)).await),
                    _ => None,
                };
                self.source.copy_own(piece, &self.target, &self.buffer).await
            };
            job.piece(*timer, piece.len_bytes, || self.work.guests(), copy).await?;
            self.done_bytes += piece.len_bytes;
            job.set_done(self.done_bytes);
            at = piece.end();
        }
        Ok(())
    }

    /// Has the layer give up `units`, whose copies are durable. False when a guest's change has failed since there were `failures`: then the
    /// copies of the units that are left may be wrong.
    async fn forget(&self, units: &[Extent], failures: u64) -> Result<bool> {
        for unit in units {
            let _alone = match &self.sinking {
                Some(sinking) => Some(sinking.hold(range(*unit)).await),
                None => None,
            };
            if self.failures() != failures {
                return Ok(false);
            }
            self.source.forget_own(*unit).await?;
        }
        Ok(true)
    }
}

fn range(extent: Extent) -> Range<u64> {
    extent.start()..extent.end()
}
