//! [`PathCell`]: a path that can change while others look at it.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A path that can be set again through a shared reference. Each path that it ever had stays in memory until the cell is
/// dropped, so that a look needs no lock: for paths that change a few times in their life.
#[derive(Debug)]
pub struct PathCell {
    path: PathBuf,
    next: OnceLock<Box<PathCell>>,
}

impl PathCell {
    /// A cell with this path.
    pub fn new(path: PathBuf) -> Self {
        Self { path, next: OnceLock::new() }
    }

    /// The path that was set last.
    pub fn get(&self) -> &Path {
        &self.last().path
    }

    /// Sets the path.
    pub fn set(&self, path: &Path) {
        let mut last = self.last();
        while last.path != path && last.next.set(Box::new(Self::new(path.to_owned()))).is_err() {
            last = last.last();
        }
    }

    fn last(&self) -> &Self {
        let mut last = self;
        while let Some(next) = last.next.get() {
            last = next;
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_path_counts_and_older_ones_stay_readable() {
        let cell = PathCell::new("/a".into());
        let before = cell.get();
        for path in ["/b", "/b", "/a"] {
            cell.set(Path::new(path));
            assert_eq!(cell.get(), Path::new(path));
        }
        assert_eq!(before, Path::new("/a"));
    }
}
