//! [`Names`]: the names of the simulated files. A change of names is seen at once, and durable once the folder was synced; a
//! power cut keeps the first ones of those that were not, as a file system with a journal does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::rng::Rng;

/// A change of names. Files go by their numbers.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// The file gets this name, also when it has others.
    Add(PathBuf, usize),
    /// The name goes.
    Remove(PathBuf),
    /// The file of the first name has the second one instead; what had that name has lost it.
    Rename(PathBuf, PathBuf),
}

type Map = BTreeMap<PathBuf, usize>;

/// The names as processes see them, and as a power cut would leave them.
#[derive(Default)]
pub(crate) struct Names {
    seen: Map,
    durable: Map,
    /// Changes that are not durable yet, oldest first.
    pending: Vec<Change>,
    /// How many changes are durable.
    synced: usize,
}

impl Names {
    pub fn get(&self, path: &Path) -> Option<usize> {
        self.seen.get(path).copied()
    }

    /// All names with their files.
    pub fn all(&self) -> impl Iterator<Item = (&PathBuf, usize)> {
        self.seen.iter().map(|(path, file)| (path, *file))
    }

    /// A file has this name, durably.
    pub fn install(&mut self, path: PathBuf, file: usize) {
        let _ = self.change(Change::Add(path, file));
        self.sync(usize::MAX);
    }

    /// Makes a change. Returns its number for [`Names::sync`].
    pub fn change(&mut self, change: Change) -> usize {
        apply(&mut self.seen, &change);
        self.pending.push(change);
        self.synced + self.pending.len()
    }

    /// Makes all changes up to this number durable.
    pub fn sync(&mut self, up_to: usize) {
        let count = up_to.saturating_sub(self.synced).min(self.pending.len());
        self.pending.drain(..count).for_each(|change| apply(&mut self.durable, &change));
        self.synced += count;
    }

    /// The power goes.
    pub fn power_cut(&mut self, rng: &mut Rng) {
        if !self.pending.is_empty() {
            self.sync(self.synced + rng.index(self.pending.len() + 1));
        }
        self.synced += self.pending.len();
        self.pending.clear();
        self.seen.clone_from(&self.durable);
    }
}

fn apply(names: &mut Map, change: &Change) {
    match change {
        Change::Add(path, file) => drop(names.insert(path.clone(), *file)),
        Change::Remove(path) => drop(names.remove(path)),
        Change::Rename(from, to) => {
            // Two names of one file stay as they are, as POSIX says.
            if let Some(&file) = names.get(from).filter(|file| names.get(to) != Some(file)) {
                names.remove(from);
                names.insert(to.clone(), file);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> PathBuf {
        PathBuf::from(name)
    }

    #[test]
    fn a_power_cut_keeps_the_first_changes_and_all_that_were_synced() {
        for seed in 0..50 {
            let mut names = Names::default();
            names.install(path("/a"), 1);
            let linked = names.change(Change::Add(path("/b"), 1));
            names.sync(linked);
            names.install(path("/new"), 2);
            names.change(Change::Rename(path("/new"), path("/a")));
            names.change(Change::Remove(path("/b")));
            assert_eq!((names.get(&path("/a")), names.get(&path("/b"))), (Some(2), None));
            names.power_cut(&mut Rng::new(seed));
            let left = ["/a", "/b", "/new"].map(|name| names.get(&path(name)));
            let allowed = [[Some(1), Some(1), Some(2)], [Some(2), Some(1), None], [Some(2), None, None]];
            assert!(allowed.contains(&left), "{left:?}");
        }
    }

    #[test]
    fn two_names_of_a_file_are_not_renamed_to_one() {
        let mut names = Names::default();
        names.install(path("/a"), 1);
        names.install(path("/b"), 1);
        names.change(Change::Rename(path("/b"), path("/a")));
        assert_eq!((names.get(&path("/a")), names.get(&path("/b"))), (Some(1), Some(1)));
    }
}
