//! The map of a disk as fronts and tools see it.

use spile_core::{Extent, ExtentKind, ExtentStatus, Result, Store, StoreOffset};

use super::Graph;
use super::map::{At, Step};
use crate::layer::Layer;

impl<S: Store> Graph<S> {
    pub(super) async fn extents_of(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        self.check(extent, false)?;
        let _readers = self.enter();
        let mut runs = Runs { list: Vec::new(), max_runs };
        let (mut at, mut last) = (extent.start(), None);
        while at < extent.end() && !runs.is_full() {
            let (step, len) = self.step(at, extent.end() - at, &last);
            let run = Extent::from_range(at..at + len);
            match step {
                Step::Bytes { layer, at: At::Plain(offset) } => {
                    self.add_data_runs(&mut runs, run, layer, offset).await?
                }
                Step::Bytes { layer, .. } => {
                    runs.add(ExtentStatus { extent: run, kind: ExtentKind::Data, depth: layer as u16 });
                }
                Step::Zero => runs.add(ExtentStatus { extent: run, kind: ExtentKind::Hole, depth: 0 }),
                Step::Load { .. } | Step::LoadZone(_) => match self.load(step, &mut last).await {
                    Ok(()) => continue,
                    Err(error) => return runs.known_before(self.align_down(at)).ok_or(error),
                },
            }
            at += len;
        }
        Ok(runs.finish())
    }

    /// A caller that asks for whole units must be able to go on where an answer ended.
    fn align_down(&self, at: u64) -> u64 {
        at - at % u64::from(self.info.request_align_bytes)
    }

    /// Data as the format sees it may be a hole to the store: asked run by run.
    async fn add_data_runs(&self, runs: &mut Runs, run: Extent, number: usize, offset: StoreOffset) -> Result<()> {
        let layer = self.image(number);
        let mut done = 0;
        while done < run.len_bytes && !runs.is_full() {
            let found = layer.data_store().extent_at(StoreOffset(offset.0 + done)).await?;
            let len = found.len_bytes.clamp(1, run.len_bytes - done);
            let extent = Extent::from_range(run.start() + done..run.start() + done + len);
            let kind = if found.is_hole { layer.hole_kind() } else { ExtentKind::Data };
            // The depth of a hole means nothing, and must not part it from another.
            let depth = if kind == ExtentKind::Hole { 0 } else { number as u16 };
            runs.add(ExtentStatus { extent, kind, depth });
            done += len;
        }
        Ok(())
    }
}

/// Collects runs, joining those that are alike. Keeps one more than asked for, until it is known where the last ends.
struct Runs {
    list: Vec<ExtentStatus>,
    max_runs: usize,
}

impl Runs {
    fn add(&mut self, run: ExtentStatus) {
        match self.list.last_mut() {
            Some(last) if (last.kind, last.depth) == (run.kind, run.depth) => {
                last.extent = Extent::from_range(last.extent.start()..run.extent.end());
            }
            _ => self.list.push(run),
        }
    }

    fn is_full(&self) -> bool {
        self.list.len() > self.max_runs
    }

    /// The runs up to `end`, where a piece of a map that cannot be read begins. `None` when nothing is known before it.
    fn known_before(mut self, end: u64) -> Option<Vec<ExtentStatus>> {
        self.list.retain(|run| run.extent.start() < end);
        let last = self.list.last_mut()?;
        last.extent = Extent::from_range(last.extent.start()..last.extent.end().min(end));
        Some(self.finish())
    }

    fn finish(mut self) -> Vec<ExtentStatus> {
        self.list.truncate(self.max_runs);
        self.list
    }
}
