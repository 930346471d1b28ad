//! One simulated file: the durable bytes of the disk, the bytes that the host's kernel shows, and the changes between the
//! two.
//!
//! Every change goes to the `view` (the page cache: it outlives the process) and onto the list of unsynced
//! effects. A sync applies effects to `durable` and takes them off the list; a power cut applies a random part
//! of the list and forgets the rest. Effects are always applied in the order in which they reached the view, so that
//! each sector ends as *some* version it had since the last sync: disks reorder different sectors, not the writes of one.

use std::collections::BTreeMap;
use std::ops::Range;

use spile_core::{Segment, Via};

use crate::faults::Harm;
use crate::pages::{PAGE, Pages};
use crate::rng::Rng;

/// One change of a file.
#[derive(Clone)]
pub(crate) enum Change {
    Write { offset: u64, bytes: Vec<u8> },
    Zero { range: Range<u64> },
    SetLen(u64),
}

impl Change {
    fn apply(&self, pages: &mut Pages) {
        match self {
            Change::Write { offset, bytes } => pages.write(*offset, bytes),
            Change::Zero { range } => pages.zero(range.clone()),
            Change::SetLen(len) => pages.set_len(*len),
        }
    }

    fn range(&self) -> Range<u64> {
        match self {
            Change::Write { offset, bytes } => *offset..offset + bytes.len() as u64,
            Change::Zero { range } => range.clone(),
            Change::SetLen(_) => 0..u64::MAX,
        }
    }
}

/// A change that reached the view and is not known to be durable.
pub(crate) struct Effect {
    /// The operation that the change belongs to.
    pub op: u64,
    /// How a write was done: directly or through the page cache.
    pub via: Option<Via>,
    /// The effect of sabotage on the change.
    pub harm: Harm,
    pub change: Change,
}

#[derive(Default)]
pub(crate) struct SimFile {
    pub view: Pages,
    durable: Pages,
    unsynced: Vec<Effect>,
    /// Memory that is a range of the file: where it begins, and the memory. Programs store there without an operation.
    mapped: Vec<(u64, Segment)>,
    /// Pages written since they were last clean, and which way: for the check on mixing.
    ways: BTreeMap<u64, Via>,
    /// True while a writer has the file open.
    pub locked: bool,
    /// The process that writes; 0 for one that takes no notice of others.
    pub writer: u64,
    /// The processes that have the file open for reading, each as often as it has.
    pub readers: Vec<u64>,
    /// Sabotage: syncs do nothing.
    pub syncs_nothing: bool,
    /// The error of the first failed sync. All later syncs fail with it.
    pub sync_failed: bool,
    /// The length up to which a device becomes longer, when somebody asks for its length.
    grows_to: u64,
}

fn overlaps(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// The pages that lie wholly or partly in `range`.
fn pages_of(range: &Range<u64>) -> Range<u64> {
    range.start / PAGE..range.end.div_ceil(PAGE)
}

impl SimFile {
    /// Has the file hold these bytes, durably.
    pub fn poke(&mut self, offset: u64, bytes: &[u8]) {
        self.view.write(offset, bytes);
        self.durable.write(offset, bytes);
    }

    /// A device of these bytes that becomes longer, up to `grows_to`.
    pub fn growing(pages: Pages, grows_to: u64) -> Self {
        Self { grows_to, ..Self::durable(pages) }
    }

    /// A device becomes longer, for good, by a part of what it has, or by as much as there is. Nobody of this host does that, so no sync is needed for it.
    pub fn lengthen(&mut self) {
        // So that the largest block has a place in what is gained.
        let step = (self.view.len() / 8).next_multiple_of(1 << 16).max(3 << 20);
        let len = (self.view.len() + step).min(self.grows_to);
        self.view.add_old_bytes(len);
        self.durable.add_old_bytes(len);
    }

    /// A file whose content is durable from the start.
    pub fn durable(pages: Pages) -> Self {
        Self { view: pages.clone(), durable: pages, ..Self::default() }
    }

    /// Notes that a write of `range` by `via` begins; an error when a page has an unsynced write of the other way.
    pub fn note_way(&mut self, range: Range<u64>, via: Via) -> Result<(), String> {
        for page in pages_of(&range) {
            let before = *self.ways.entry(page).or_insert(via);
            if before != via {
                return Err(format!(
                    "a {via:?} write of {range:#x?} mixes with an unsynced {before:?} write in the 4 KiB page at {:#x}",
                    page * PAGE
                ));
            }
        }
        Ok(())
    }

    /// Memory that is `len` bytes of the file from `offset`, until the process ends.
    pub fn map(&mut self, offset: u64, len: usize) -> Segment {
        let range = offset..offset + len as u64;
        // Nobody uses other memory of the same range any more.
        self.look_at_mapped(0);
        self.mapped.retain(|(at, memory)| !overlaps(&range, &(*at..at + memory.len() as u64)));
        self.mapped.push((offset, Segment::zeroed(len)));
        self.show_mapped(offset..offset + len as u64);
        self.mapped.last().expect("just put there").1.clone()
    }

    /// Takes what programs have stored into mapped memory into the view, sector by sector, as changes of the operation `op`: what the
    /// kernel finds when it looks at its pages.
    pub fn look_at_mapped(&mut self, op: u64) {
        let mut changed = Vec::new();
        for (offset, memory) in &self.mapped {
            let (now, mut seen) = (memory.to_vec(), vec![0; memory.len()]);
            self.view.read(*offset, &mut seen);
            let sectors = now.chunks(512).zip(seen.chunks(512)).enumerate();
            let differ = sectors.filter(|(_, (now, seen))| now != seen);
            changed.extend(differ.map(|(number, (now, _))| (offset + number as u64 * 512, now.to_vec())));
        }
        for (offset, bytes) in changed {
            let change = Change::Write { offset, bytes };
            change.apply(&mut self.view);
            self.unsynced.push(Effect { op, via: None, harm: Harm::default(), change });
        }
    }

    /// True when memory is shared with the file.
    pub fn is_mapped(&self) -> bool {
        !self.mapped.is_empty()
    }

    /// Has mapped memory show what the view has in `range`.
    fn show_mapped(&mut self, range: Range<u64>) {
        for (offset, memory) in
            self.mapped.iter().filter(|(at, memory)| overlaps(&range, &(*at..at + memory.len() as u64)))
        {
            let mut bytes = vec![0; memory.len()];
            self.view.read(*offset, &mut bytes);
            memory.copy_from_slice(0, &bytes);
        }
    }

    /// Puts a change into the view.
    pub fn apply(&mut self, effect: Effect) {
        effect.change.apply(&mut self.view);
        if self.is_mapped() {
            self.show_mapped(effect.change.range());
        }
        if let Change::Zero { range } = &effect.change {
            let whole = range.start.div_ceil(PAGE)..range.end / PAGE;
            self.ways.retain(|page, _| !whole.contains(page));
        }
        self.unsynced.push(effect);
    }

    /// Makes effects durable: all whose operation is not `optional`, and each optional one by chance.
    /// `writing` lists the ranges and ways of writes in flight.
    pub fn sync(&mut self, rng: &mut Rng, optional: impl Fn(u64) -> bool, writing: &[(Range<u64>, Via)]) {
        let mut stays = vec![false; self.unsynced.len()];
        for at in (0..self.unsynced.len()).rev() {
            let effect = &self.unsynced[at];
            // An effect that is not applied now must not be applied after a later effect in the same place.
            let overtaken = || {
                let range = effect.change.range();
                (at + 1..stays.len())
                    .any(|later| !stays[later] && overlaps(&range, &self.unsynced[later].change.range()))
            };
            stays[at] = effect.harm.unsynced || (optional(effect.op) && rng.chance(1, 2) && !overtaken());
        }
        let mut stays = stays.into_iter();
        let durable = &mut self.durable;
        self.unsynced.retain(|effect| {
            let stay = stays.next().unwrap_or(false);
            if !stay {
                effect.change.apply(durable);
            }
            stay
        });
        self.forget_ways(writing);
    }

    /// Sabotage: a sync of what is unsynced now does nothing.
    pub fn is_sync_void(&self) -> bool {
        let any = |harm: fn(&Harm) -> bool| self.unsynced.iter().any(|effect| harm(&effect.harm));
        self.syncs_nothing || any(|harm| harm.voids_sync) && !any(|harm| harm.saves_sync)
    }

    /// Rebuilds the notes on mixing from what is still unsynced or in flight.
    fn forget_ways(&mut self, writing: &[(Range<u64>, Via)]) {
        let unsynced = self.unsynced.iter().filter_map(|e| Some((e.change.range(), e.via?)));
        self.ways = unsynced
            .chain(writing.iter().cloned())
            .flat_map(|(range, via)| pages_of(&range).map(move |page| (page, via)))
            .collect();
    }

    /// A failed sync: the kernel forgets that the pages were dirty. They stay in the view but never become durable.
    pub fn lose_unsynced(&mut self) {
        self.unsynced.clear();
    }

    /// The process dies: the view stays, and descriptors close.
    pub fn process_death(&mut self) {
        self.look_at_mapped(0);
        self.mapped.clear();
        self.readers.clear();
        self.locked = false;
        self.sync_failed = false;
    }

    /// The power goes: a random part of the unsynced effects is kept, in pieces of `granule` bytes.
    pub fn power_cut(&mut self, rng: &mut Rng, granule: u64) {
        let style = Style::draw(rng, self.unsynced.len());
        for (at, effect) in std::mem::take(&mut self.unsynced).into_iter().enumerate() {
            keep(&mut self.durable, &effect.change, rng, granule, style.chance(at));
        }
        self.view = self.durable.clone();
        self.ways.clear();
        self.readers.clear();
        self.locked = false;
        self.sync_failed = false;
    }
}

/// How a power cut chooses the effects that survive.
enum Style {
    /// Each piece survives with this chance in 100.
    Pieces(u64),
    /// All effects before this one survive, pieces of this one by chance, and none after it.
    Prefix(usize),
    /// Each effect survives wholly or not at all, by the bits of this word.
    Whole(u64),
}

impl Style {
    fn draw(rng: &mut Rng, effects: usize) -> Self {
        match rng.below(6) {
            0 => Style::Pieces(0),
            1 => Style::Pieces(100),
            2 => Style::Prefix(rng.index(effects + 1)),
            3 => Style::Whole(rng.word()),
            _ => Style::Pieces(*rng.pick(&[3, 20, 50, 80, 97])),
        }
    }

    fn chance(&self, at: usize) -> u64 {
        match self {
            Style::Pieces(chance) => *chance,
            Style::Prefix(end) if at == *end => 50,
            Style::Prefix(end) => {
                if at < *end {
                    100
                } else {
                    0
                }
            }
            Style::Whole(bits) => (crate::rng::mix(bits ^ at as u64) & 1) * 100,
        }
    }
}

/// The parts of `range` between multiples of `step`.
fn pieces(range: Range<u64>, step: u64) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let piece = at..((at / step + 1) * step).min(range.end);
        at = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Applies each `granule`-sized piece of `change` with a chance of `chance` in 100.
fn keep(pages: &mut Pages, change: &Change, rng: &mut Rng, granule: u64, chance: u64) {
    match change {
        Change::Write { offset, bytes } => {
            let end = offset + bytes.len() as u64;
            // A longer length may survive without the bytes that made it longer.
            if end > pages.len() && rng.chance(chance, 100) {
                pages.set_len(end);
            }
            for piece in pieces(*offset..end, granule).filter(|_| rng.chance(chance, 100)) {
                let part = (piece.start - offset) as usize..(piece.end - offset) as usize;
                pages.write(piece.start, &bytes[part]);
            }
        }
        // Holes are made extent by extent.
        Change::Zero { range } => {
            pieces(range.clone(), 16 * PAGE).filter(|_| rng.chance(chance, 100)).for_each(|piece| pages.zero(piece))
        }
        Change::SetLen(len) => {
            if rng.chance(chance, 100) {
                pages.set_len(*len);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(file: &mut SimFile, op: u64, offset: u64, byte: u8, len: usize) {
        let change = Change::Write { offset, bytes: vec![byte; len] };
        file.apply(Effect { op, via: Some(Via::Cached), harm: Harm::default(), change });
    }

    fn byte(file: &SimFile, offset: u64) -> u8 {
        let mut out = [0];
        file.view.read(offset, &mut out);
        out[0]
    }

    /// The bytes at `offsets` after a power cut, for many seeds.
    fn after_cuts(make: impl Fn() -> SimFile, offsets: &[u64]) -> std::collections::BTreeSet<Vec<u8>> {
        (0..400)
            .map(|seed| {
                let mut file = make();
                file.power_cut(&mut Rng::new(seed), 512);
                offsets.iter().map(|at| byte(&file, *at)).collect()
            })
            .collect()
    }

    #[test]
    fn unsynced_writes_survive_in_any_combination() {
        let make = || {
            let mut file = SimFile::default();
            write(&mut file, 1, 0, 1, 512);
            write(&mut file, 2, 4096, 2, 512);
            file
        };
        let seen = after_cuts(make, &[0, 4096]);
        let all = [[0, 0], [0, 2], [1, 0], [1, 2]].map(|s| s.to_vec());
        assert_eq!(seen, all.into_iter().collect());
    }

    #[test]
    fn a_write_tears_and_a_sector_never_goes_back_over_a_sync() {
        let make = || {
            let mut file = SimFile::default();
            write(&mut file, 1, 0, 1, 1024);
            file.sync(&mut Rng::new(0), |_| false, &[]);
            write(&mut file, 2, 0, 2, 1024);
            file
        };
        let seen = after_cuts(make, &[0, 512]);
        let all = [[1, 1], [1, 2], [2, 1], [2, 2]].map(|s| s.to_vec());
        assert_eq!(seen, all.into_iter().collect());
    }

    #[test]
    fn a_sync_may_leave_out_what_had_not_returned_but_keeps_the_order() {
        let make = |seed| {
            let mut file = SimFile::default();
            write(&mut file, 1, 0, 1, 512);
            write(&mut file, 9, 512, 1, 512);
            write(&mut file, 2, 0, 2, 512);
            file.sync(&mut Rng::new(seed), |op| op != 2, &[]);
            file
        };
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..64 {
            seen.extend(after_cuts(|| make(seed), &[0, 512]));
        }
        assert_eq!(seen, [[2, 0], [2, 1]].map(|s| s.to_vec()).into_iter().collect());
    }

    #[test]
    fn a_length_may_be_lost_or_survive_without_its_bytes() {
        let seen: std::collections::BTreeSet<(u64, u8)> = (0..400)
            .map(|seed| {
                let mut file = SimFile::default();
                write(&mut file, 1, 1024, 1, 512);
                file.power_cut(&mut Rng::new(seed), 512);
                (file.view.len(), byte(&file, 1024))
            })
            .collect();
        assert_eq!(seen, [(0, 0), (1536, 0), (1536, 1)].into_iter().collect());
    }

    #[test]
    fn mixing_ways_in_a_page_is_found_until_it_is_clean() {
        let mut file = SimFile::default();
        file.note_way(0..512, Via::Cached).unwrap();
        write(&mut file, 1, 0, 1, 512);
        file.note_way(4096..8192, Via::Direct).unwrap();
        assert!(file.note_way(0..4096, Via::Direct).is_err());
        file.sync(&mut Rng::new(0), |_| false, &[(4096..8192, Via::Direct)]);
        file.note_way(0..4096, Via::Direct).unwrap();
        assert!(file.note_way(4608..5120, Via::Cached).is_err());
    }
}
