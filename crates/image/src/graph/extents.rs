//! The map of a disk as fronts and tools see it.

use std::ops::Range;

use spile_core::{Extent, ExtentKind, ExtentStatus, Result, Store, StoreOffset};

use super::Graph;
use super::map::{At, Step};
use crate::layer::Layer;

/// A run of a disk's map, and where its bytes lie in the file of its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedRun {
    /// The run. Its depth is the number of the layer, the leaf's is 0.
    pub status: ExtentStatus,
    /// Where in the layer's data store the run begins; `None` when it has no bytes there, or compressed ones.
    pub offset: Option<StoreOffset>,
}

impl<S: Store> Graph<S> {
    /// The map of `extent`, with the places of the bytes: at most `max_runs` runs, of which two that touch differ in kind, depth
    /// or place.
    ///
    /// # Errors
    /// `OutOfRange`; errors of the stores; `Corrupt` for a damaged map, of which what comes before is returned first.
    pub async fn places(&self, extent: Extent, max_runs: usize) -> Result<Vec<PlacedRun>> {
        self.runs_of(extent, max_runs, true).await
    }

    pub(super) async fn extents_of(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        let runs = self.runs_of(extent, max_runs, false).await?;
        Ok(runs.into_iter().map(|run| run.status).collect())
    }

    async fn runs_of(&self, extent: Extent, max_runs: usize, by_place: bool) -> Result<Vec<PlacedRun>> {
        self.check(extent, false)?;
        let _readers = self.enter();
        let mut runs = Runs { list: Vec::new(), max_runs, by_place };
        let mut known = Known::default();
        let (mut at, mut last) = (extent.start(), None);
        while at < extent.end() && !runs.is_full() {
            let (step, len) = self.step(at, extent.end() - at, &last);
            let run = Extent::from_range(at..at + len);
            match step {
                Step::Bytes { layer, at: At::Plain(offset) } => {
                    self.add_data_runs(&mut runs, &mut known, run, layer, offset).await?
                }
                Step::Bytes { layer, .. } => {
                    runs.add(ExtentStatus { extent: run, kind: ExtentKind::Data, depth: layer as u16 }, None);
                }
                Step::Zero => runs.add(ExtentStatus { extent: run, kind: ExtentKind::Hole, depth: 0 }, None),
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
    async fn add_data_runs(
        &self,
        runs: &mut Runs,
        known: &mut Known,
        run: Extent,
        number: usize,
        offset: StoreOffset,
    ) -> Result<()> {
        let layer = self.image(number);
        let mut done = 0;
        while done < run.len_bytes && !runs.is_full() {
            let left = run.len_bytes - done;
            let known_bytes = known.data_bytes(number, offset.0 + done).min(left);
            if known_bytes > 0 {
                let extent = Extent::from_range(run.start() + done..run.start() + done + known_bytes);
                let status = ExtentStatus { extent, kind: ExtentKind::Data, depth: number as u16 };
                runs.add(status, Some(StoreOffset(offset.0 + done)));
                done += known_bytes;
                continue;
            }
            for found in layer.data_store().extents_at(StoreOffset(offset.0 + done), left, runs.room()).await? {
                if done == run.len_bytes || runs.is_full() {
                    break;
                }
                let len = found.len_bytes.clamp(1, run.len_bytes - done);
                let extent = Extent::from_range(run.start() + done..run.start() + done + len);
                if !found.is_hole && found.len_bytes > run.len_bytes - done {
                    let start = offset.0 + done;
                    known.note_data(number, start..start + found.len_bytes);
                }
                let kind = if found.is_hole { layer.hole_kind() } else { ExtentKind::Data };
                // The depth of a hole means nothing, and must not part it from another.
                let depth = if kind == ExtentKind::Hole { 0 } else { number as u16 };
                let place = (kind != ExtentKind::Hole).then_some(StoreOffset(offset.0 + done));
                runs.add(ExtentStatus { extent, kind, depth }, place);
                done += len;
            }
        }
        Ok(())
    }
}

/// The last run of data that the file of each layer was found to have, while one walk over the disk goes on: most files are asked once for many runs of the disk. Holes
/// are not kept, as a guest may fill one meanwhile.
#[derive(Default)]
pub struct Known(Vec<Range<u64>>);

impl Known {
    pub(super) fn note_data(&mut self, layer: usize, data: Range<u64>) {
        if self.0.len() <= layer {
            self.0.resize(layer + 1, 0..0);
        }
        self.0[layer] = data;
    }

    /// How many bytes from `offset` on are data in the file of this layer, as far as is known.
    pub(super) fn data_bytes(&self, layer: usize, offset: u64) -> u64 {
        self.0.get(layer).filter(|data| data.contains(&offset)).map_or(0, |data| data.end - offset)
    }
}

/// Collects runs, joining those that are alike. Keeps one more than asked for, until it is known where the last ends.
struct Runs {
    list: Vec<PlacedRun>,
    max_runs: usize,
    /// Runs that lie apart in the file are kept apart.
    by_place: bool,
}

impl Runs {
    fn add(&mut self, status: ExtentStatus, offset: Option<StoreOffset>) {
        let run = PlacedRun { status, offset };
        match self.list.last_mut() {
            Some(last) if last.is_followed_by(&run, self.by_place) => {
                last.status.extent = Extent::from_range(last.status.extent.start()..status.extent.end());
            }
            _ => self.list.push(run),
        }
    }

    fn is_full(&self) -> bool {
        self.list.len() > self.max_runs
    }

    /// How many runs more may be added.
    fn room(&self) -> usize {
        self.max_runs.saturating_add(1) - self.list.len()
    }

    /// The runs up to `end`, where a piece of a map that cannot be read begins. `None` when nothing is known before it.
    fn known_before(mut self, end: u64) -> Option<Vec<PlacedRun>> {
        self.list.retain(|run| run.status.extent.start() < end);
        let last = &mut self.list.last_mut()?.status;
        last.extent = Extent::from_range(last.extent.start()..last.extent.end().min(end));
        Some(self.finish())
    }

    fn finish(mut self) -> Vec<PlacedRun> {
        self.list.truncate(self.max_runs);
        self.list
    }
}

impl PlacedRun {
    /// True when `next`, which begins where this run ends, is a part of the same run.
    pub fn is_followed_by(&self, next: &Self, by_place: bool) -> bool {
        let (ours, theirs) = (&self.status, &next.status);
        let goes_on = self.offset.map(|at| StoreOffset(at.0 + ours.extent.len_bytes)) == next.offset;
        (ours.kind, ours.depth) == (theirs.kind, theirs.depth) && (!by_place || goes_on)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_of_a_layers_file_is_known_up_to_its_end_and_says_nothing_of_another() {
        let mut known = Known::default();
        known.note_data(2, 100..300);
        let asked = [(2, 99), (2, 100), (2, 299), (2, 300), (1, 100), (3, 100)];
        assert_eq!(asked.map(|(layer, offset)| known.data_bytes(layer, offset)), [0, 200, 1, 0, 0, 0]);
        known.note_data(2, 500..501);
        assert_eq!((known.data_bytes(2, 100), known.data_bytes(2, 500)), (0, 1));
    }
}
