//! The checkpoints of a disk that goes from place to place: what the disk held when each was made, to compare with what is said to have changed since.
//!
//! - **Each block that differs from what the disk held at a checkpoint counts as changed since**, wherever the disk is by then.
//! - **A checkpoint is there after every crash and every move**, unless something has failed: then the disk goes on without it.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::sync::Arc;

use spile_core::{Disk, ErrorKind, Extent, Files as _, GuestOffset, Segments};
use spile_life::changes::{Changes, is_hidden};
use spile_life::names;
use spile_node::Node;

use crate::rng::Rng;
use crate::store::SimFiles;
use crate::turns::pause;

type Tracker = Arc<Changes<SimFiles>>;

/// Where the file of changed blocks of the disk at `disk` could not be removed, an operator does that: the alarm says so.
pub(crate) async fn heed_alarm(files: &SimFiles, disk: &Path) {
    match files.remove(&names::changes(disk)).await {
        Err(error) if error.kind() != ErrorKind::NotFound => panic!("the file cannot be removed: {error:?}"),
        _ => {}
    }
}

/// A checkpoint as the run knows it.
struct Known {
    name: String,
    /// What the disk held.
    content: Vec<u8>,
    /// The call that makes it has returned.
    is_made: bool,
    /// A call to remove it has begun.
    is_going: bool,
}

/// All of them, over all lives of the processes that have the disk.
#[derive(Default)]
pub(crate) struct Checkpoints {
    known: RefCell<Vec<Known>>,
    names: Cell<u64>,
    /// Something has failed since it was last looked which of them there are.
    may_be_gone: Cell<bool>,
    /// How many questions were answered.
    pub asked: Cell<u64>,
    /// In how many answers some block had not changed.
    pub useful: Cell<u64>,
}

/// Who has the changed blocks of the disk, and whether something fails meanwhile.
pub(crate) struct Asked<'a, G: Disk> {
    pub node: &'a Node<G>,
    /// The changed blocks that requests are noted in now.
    pub tracker: &'a dyn Fn() -> Option<Tracker>,
    /// Something has failed in this life.
    pub has_failed: &'a dyn Fn() -> bool,
}

/// All that the disk holds; `None` when it cannot be read.
async fn content(disk: &impl Disk) -> Option<Vec<u8>> {
    let (size, mut all) = (disk.info().size_bytes, Vec::new());
    for start in (0..size).step_by(PIECE_BYTES as usize) {
        let len_bytes = PIECE_BYTES.min(size - start);
        let into = Segments::zeroed(len_bytes as usize);
        disk.read(Extent { offset: GuestOffset(start), len_bytes }, &into).await.ok()?;
        all.extend(into.to_vec());
    }
    Some(all)
}

const PIECE_BYTES: u64 = 128 << 10;

impl Checkpoints {
    /// What is known of them, for another host to which the disk has gone.
    pub fn hand_on(&self) -> Self {
        let (known, names) = (RefCell::new(self.known.take()), self.names.clone());
        Self { known, names, ..Self::default() }
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.known.borrow().len() as u64
    }

    /// Looks which of them there are, when the disk was just opened, and what has changed since each.
    pub async fn look<G: Disk>(&self, disk: &Asked<'_, G>) {
        let there = match (disk.tracker)() {
            Some(changes) => changes.names().await.0,
            None => Vec::new(),
        };
        let there: Vec<_> = there.into_iter().filter(|name| !is_hidden(name)).collect();
        let may_be_gone = self.may_be_gone.take() || (disk.has_failed)();
        {
            let mut known = self.known.borrow_mut();
            for known in known.iter().filter(|known| known.is_made && !known.is_going) {
                assert!(may_be_gone || there.contains(&known.name), "the checkpoint {} is gone", known.name);
            }
            known.retain(|known| there.contains(&known.name));
            known.iter_mut().for_each(|known| (known.is_made, known.is_going) = (true, false));
        }
        self.check(disk).await;
    }

    /// Something has failed in the life that has ended.
    pub fn note_failure(&self) {
        self.may_be_gone.set(true);
    }

    /// Compares what is said to have changed since each checkpoint with what has.
    pub async fn check<G: Disk>(&self, disk: &Asked<'_, G>) {
        let names: Vec<_> = {
            let known = self.known.borrow();
            known.iter().filter(|known| known.is_made && !known.is_going).map(|known| known.name.clone()).collect()
        };
        if names.is_empty() {
            return;
        }
        // The disk is looked at before the question.
        let Some(now) = content(disk.node).await else { return };
        let Some(changes) = (disk.tracker)() else {
            let may_be = (disk.has_failed)() || self.may_be_gone.get();
            assert!(may_be, "nothing notes changes, and there are checkpoints");
            return;
        };
        for name in names {
            self.check_one(&changes, &now, &name, disk.has_failed).await;
        }
    }

    async fn check_one(&self, changes: &Changes<SimFiles>, now: &[u8], name: &str, has_failed: &dyn Fn() -> bool) {
        let changed = match changes.since(name, now.len() as u64).await {
            Ok(changed) => changed,
            Err(error) => {
                let known = self.known.borrow();
                let is_going = !known.iter().any(|known| known.name == name && !known.is_going);
                let is_gone = error.kind() == ErrorKind::NotFound && (is_going || has_failed());
                return assert!(is_gone, "{name}: {error:?}");
            }
        };
        let known = self.known.borrow();
        let Some(known) = known.iter().find(|known| known.name == name) else { return };
        let block_bytes = changed.block_bytes as usize;
        let is_marked = |block: usize| {
            let at = (block * block_bytes) as u64;
            changed.ranges.iter().any(|range| (range.offset.0..range.offset.0 + range.len_bytes).contains(&at))
        };
        for (block, bytes) in now.chunks(block_bytes).enumerate() {
            let before = known.content.get(block * block_bytes..block * block_bytes + bytes.len());
            assert!(
                before == Some(bytes) || is_marked(block),
                "block {block} has changed since {name}, and is not marked"
            );
        }
        self.asked.set(self.asked.get() + 1);
        self.useful.set(self.useful.get() + u64::from(changed.bytes() < now.len() as u64));
    }

    /// Makes a checkpoint. Nobody else makes or removes one, or takes them to another place.
    pub async fn make<G: Disk>(&self, disk: &Asked<'_, G>, changes: &Changes<SimFiles>) {
        let name = format!("c{}", self.names.replace(self.names.get() + 1));
        let made = changes.checkpoint_with(disk.node, &name, async || {
            // Whoever changes what is read has its bit set in the new interval.
            if let Some(content) = content(disk.node).await {
                self.known.borrow_mut().push(Known { name: name.clone(), content, is_made: false, is_going: false });
            }
            Ok(())
        });
        match made.await {
            Ok(()) => {
                let mut known = self.known.borrow_mut();
                known.iter_mut().filter(|known| known.name == name).for_each(|known| known.is_made = true);
            }
            Err(error) => assert!((disk.has_failed)(), "no checkpoint was made, without a fault: {error:?}"),
        }
    }

    /// Removes one, as [`Self::make`] makes one.
    pub async fn remove<G: Disk>(&self, disk: &Asked<'_, G>, changes: &Changes<SimFiles>, rng: &mut Rng) {
        let name = {
            let mut known = self.known.borrow_mut();
            let count = known.iter().filter(|known| known.is_made && !known.is_going).count();
            let mut made = known.iter_mut().filter(|known| known.is_made && !known.is_going);
            let Some(known) = (count > 0).then(|| made.nth(rng.index(count))).flatten() else { return };
            known.is_going = true;
            known.name.clone()
        };
        match changes.remove(disk.node, &name).await {
            Ok(()) => self.known.borrow_mut().retain(|known| known.name != name),
            Err(error) => assert!((disk.has_failed)(), "a checkpoint was not removed, without a fault: {error:?}"),
        }
    }

    /// Lets some time pass, and says what is to be done next.
    pub async fn next(rng: &mut Rng) -> Action {
        pause(rng, 200).await;
        match rng.below(5) {
            0 | 1 => Action::Make,
            2 => Action::Remove,
            _ => Action::Check,
        }
    }
}

/// What is done with checkpoints.
pub(crate) enum Action {
    Make,
    Remove,
    Check,
}
