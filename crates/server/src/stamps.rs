//! Tells that a parent has been written after its child was made, as far as times say so.
//!
//! A child is of no use once its parent has changed, and nothing in its content shows it. A VHD child holds its parent's
//! UUID, which is compared whenever the chain is opened, and a time. What programs write there differs: Spile the time in the
//! parent's footer, blktap the time at which the parent's file was last written. So the two are never asked to be equal.
//! What counts as evidence:
//!
//! - The parent says of itself that it is younger than its child. No program changes that time when it writes data.
//! - The parent's file was written after the child was made, but is older than the child by its time of birth. A file that was
//!   copied later has a later birth, and is in no doubt.
//!
//! The time at which the child was made is the later of its own and the one that it holds of its parent: blktap sets the latter when
//! it gives the child another parent, which it writes before. Times of blktap are off by the host's time zone.
//!
//! Spile writes to a parent itself when it makes what a killed writer has left there durable. That looks the same, so a parent of
//! Spile's making is in doubt for `spile check` only.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use spile_engine::run_blocking;
use spile_image::LayerInfo;
use spile_image::facts::Facts;

/// What a parent's last requests may take longer than the making of its child, in seconds.
const SLACK_S: u64 = 60;
/// The most by which a time can be off that a program took from its time zone, in seconds.
const TIME_ZONES_S: u64 = 15 * 3600;

/// A parent that seems to have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doubt {
    /// What a person should know, in one sentence.
    pub message: String,
    /// False when the parent may have been written for its children's good.
    pub is_evident: bool,
}

/// The times of one layer, in seconds since 1970.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    /// When the image was made, as it says itself.
    made: Option<u64>,
    /// The time that it holds of its parent.
    of_parent: Option<u64>,
    /// Spile made it.
    is_ours: bool,
    /// When its file was made, and when it was last written.
    file: Option<(u64, u64)>,
}

/// Looks among the layers of a disk, leaf first, for parents that have been written after their children were made.
pub async fn changed_parents(layers: Vec<LayerInfo>) -> Vec<Doubt> {
    let Some(leaf) = layers.first().filter(|leaf| layers.len() > 1 && leaf.path.is_absolute()) else {
        return Vec::new();
    };
    let at: PathBuf = leaf.path.clone();
    run_blocking(&at, move || layers.windows(2).filter_map(|pair| doubt(&pair[0], &pair[1])).collect()).await
}

fn doubt(child: &LayerInfo, parent: &LayerInfo) -> Option<Doubt> {
    let parent_times = Times { file: file_times(&parent.path), ..Times::of(&parent.facts) };
    let (why, is_evident) = judge(Times::of(&child.facts), parent_times)?;
    let (parent, child) = (parent.path.display(), child.path.display());
    let sure = if is_evident { "" } else { ", or made durable after its writer was killed" };
    Some(Doubt { message: format!("the parent {parent} {why} its child {child} was made{sure}"), is_evident })
}

impl Times {
    fn of(facts: &Facts) -> Self {
        let Facts { changed_unix_s, parent_changed_unix_s, is_ours, .. } = *facts;
        Self { made: changed_unix_s, of_parent: parent_changed_unix_s, is_ours, file: None }
    }
}

/// What shows that the parent has changed, and whether that is evident.
fn judge(child: Times, parent: Times) -> Option<(String, bool)> {
    let made = child.made?.max(child.of_parent.unwrap_or(0));
    let latest = made + if child.is_ours { SLACK_S } else { TIME_ZONES_S };
    if let Some(says) = parent.made.filter(|&says| says > latest) {
        return Some((format!("says that it was made or changed {} s after", says - made), true));
    }
    let (born, written) = parent.file?;
    let is_written = born <= made && written > latest;
    is_written.then(|| (format!("was written {} s after", written - made), !parent.is_ours))
}

/// When a file was made and last written; `None` for a device, and where the file system does not tell.
fn file_times(path: &Path) -> Option<(u64, u64)> {
    let stat = std::fs::metadata(path).ok().filter(|stat| stat.is_file())?;
    let unix_s = |time: SystemTime| time.duration_since(UNIX_EPOCH).ok().map(|time| time.as_secs());
    Some((unix_s(stat.created().ok()?)?, unix_s(stat.modified().ok()?)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MADE: u64 = 1_700_000_000;
    const HOUR: u64 = 3600;

    /// A child of Spile's making, whose parent was made a day before it.
    const CHILD: Times = Times { made: Some(MADE), of_parent: Some(MADE - 24 * HOUR), is_ours: true, file: None };

    fn parent(born: u64, written: u64) -> Times {
        Times { made: Some(MADE - 24 * HOUR), of_parent: None, is_ours: false, file: Some((born, written)) }
    }

    fn is_evident(child: Times, parent: Times) -> Option<bool> {
        judge(child, parent).map(|(_, is_evident)| is_evident)
    }

    #[test]
    fn a_parent_that_is_written_later_is_in_doubt() {
        let old = MADE - 24 * HOUR;
        assert_eq!(is_evident(CHILD, parent(old, MADE + HOUR)), Some(true));
        assert_eq!(is_evident(CHILD, Times { is_ours: true, ..parent(old, MADE + HOUR) }), Some(false));
        assert_eq!(is_evident(CHILD, Times { made: None, ..parent(old, MADE + HOUR) }), Some(true), "a raw one");
        assert_eq!(is_evident(CHILD, Times { made: Some(MADE + HOUR), file: None, ..parent(0, 0) }), Some(true));
    }

    #[test]
    fn what_is_usual_raises_no_doubt() {
        let old = MADE - 24 * HOUR;
        for (what, born, written) in [
            ("it was closed, then the child was made", old, MADE - 5),
            ("its last requests ended while the child was made", old, MADE + 30),
            ("a copy", MADE + HOUR, MADE + HOUR),
            ("a copy that keeps its times", MADE + HOUR, old),
        ] {
            assert_eq!(is_evident(CHILD, parent(born, written)), None, "{what}");
        }
        assert_eq!(is_evident(CHILD, Times { file: None, ..parent(0, 0) }), None, "nothing is known of the file");
        assert_eq!(is_evident(Times { made: None, ..CHILD }, parent(old, MADE + HOUR)), None, "a child without times");
    }

    /// blktap in New York: its times are five hours early. It may also have given the child another parent.
    #[test]
    fn times_of_other_programs_are_taken_with_care() {
        let foreign =
            Times { made: Some(MADE - 5 * HOUR), of_parent: Some(MADE - 6 * HOUR), is_ours: false, file: None };
        assert_eq!(is_evident(foreign, parent(MADE - 24 * HOUR, MADE - HOUR)), None);
        assert_eq!(is_evident(foreign, parent(MADE - 24 * HOUR, MADE + 24 * HOUR)), Some(true));
        let moved = Times { of_parent: Some(MADE + 240 * HOUR), ..foreign };
        assert_eq!(is_evident(moved, parent(MADE - 24 * HOUR, MADE + 240 * HOUR)), None);
    }
}
