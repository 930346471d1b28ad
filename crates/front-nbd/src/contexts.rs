//! Metadata contexts: what a client can ask of blocks besides their data. `base:allocation` is the protocol's; those that begin with `qemu:` are
//! QEMU's, whose document "QEMU NBD protocol support" describes them.
//!
//! | context | a descriptor's 32 bits |
//! |---|---|
//! | `base:allocation` | hole, zero |
//! | `qemu:allocation-depth` | the layer that has the bytes: 1 is the leaf, 2 its parent, and so on; 0: none has them |
//! | `qemu:dirty-bitmap:NAME` | bit 0: may have changed since the checkpoint NAME |

use std::pin::Pin;

use spile_core::{Extent, ExtentKind, ExtentStatus, Result};

use crate::wire::reply::{STATE_HOLE, STATE_ZERO};

const ALLOCATION: &str = "base:allocation";
const DEPTH: &str = "qemu:allocation-depth";
const BITMAP: &str = "qemu:dirty-bitmap:";
/// Queries of a list that stand for all contexts that begin so.
const WILDCARDS: [&str; 3] = ["base:", "qemu:", BITMAP];

/// The most contexts of a session: more would make a reply too long.
pub const MOST_CONTEXTS: usize = 16;

/// An answer about changed blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChangedPart {
    /// The ranges that may have changed, in order. They may begin before and end behind what was asked for.
    pub ranges: Vec<Extent>,
    /// The answer is about what lies before this byte of the disk.
    pub end: u64,
}

/// What has changed of a disk since moments that have names.
pub trait Checkpoints: Send + Sync {
    /// The names there are now, oldest first.
    fn names(&self) -> Vec<String>;

    /// What may have changed since the checkpoint `name` in `extent`, or in the first part of it.
    fn changed<'a>(&'a self, name: &'a str, extent: Extent) -> Pin<Box<dyn Future<Output = Result<ChangedPart>> + 'a>>;
}

/// One metadata context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Context {
    /// `base:allocation`.
    Allocation,
    /// `qemu:allocation-depth`.
    Depth,
    /// `qemu:dirty-bitmap:NAME`.
    Bitmap(String),
}

impl Context {
    /// The contexts of a disk with these checkpoints.
    pub fn all(checkpoints: &[String]) -> Vec<Self> {
        let bitmaps = checkpoints.iter().map(|name| Self::Bitmap(name.clone()));
        [Self::Allocation, Self::Depth].into_iter().chain(bitmaps).collect()
    }

    /// Its name on the wire.
    pub fn name(&self) -> String {
        match self {
            Self::Allocation => ALLOCATION.to_owned(),
            Self::Depth => DEPTH.to_owned(),
            Self::Bitmap(name) => format!("{BITMAP}{name}"),
        }
    }

    /// True when one of `queries` means it. In a list, a namespace stands for all that is in it, and no query for everything.
    pub fn is_meant(&self, queries: &[&str], is_list: bool) -> bool {
        let name = self.name();
        let meant = |query: &&str| **query == *name || is_list && WILDCARDS.contains(query) && name.starts_with(*query);
        queries.iter().any(meant) || is_list && queries.is_empty()
    }
}

/// A context that was selected, and its number in replies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selected {
    /// Its number.
    pub id: u32,
    /// What it is.
    pub context: Context,
}

/// A descriptor: a length in bytes, and what it says.
pub type Descriptor = (u32, u32);

/// The descriptors of a map, each with the value that `value` gives. Neighbours with the same value are joined. No descriptor goes past
/// `extent`. A map without runs gives one descriptor of unknown state.
pub(crate) fn describe(
    map: &[ExtentStatus],
    extent: Extent,
    limit: usize,
    value: fn(&ExtentStatus) -> u32,
) -> Vec<Descriptor> {
    let mut list = Descriptors::new(extent, limit);
    for run in map {
        if !list.add(run.extent.len_bytes, value(run)) {
            break;
        }
    }
    list.finish()
}

/// What `base:allocation` says of a run.
pub(crate) fn allocation_of(run: &ExtentStatus) -> u32 {
    match run.kind {
        ExtentKind::Data => 0,
        ExtentKind::Zero => STATE_ZERO,
        ExtentKind::Hole => STATE_HOLE | STATE_ZERO,
    }
}

/// What `qemu:allocation-depth` says of a run.
pub(crate) fn depth_of(run: &ExtentStatus) -> u32 {
    match run.kind {
        ExtentKind::Hole => 0,
        ExtentKind::Data | ExtentKind::Zero => u32::from(run.depth) + 1,
    }
}

/// The descriptors of a bitmap in `extent`.
pub(crate) fn dirty(changed: &ChangedPart, extent: Extent, limit: usize) -> Vec<Descriptor> {
    if changed.end <= extent.start() {
        // Nothing is known of it.
        return vec![(extent.len_bytes as u32, 1)];
    }
    let mut list = Descriptors::new(extent, limit);
    let end = changed.end.min(extent.end());
    let mut at = extent.start();
    for range in &changed.ranges {
        let (start, stop) = (range.start().clamp(at, end), range.end().clamp(at, end));
        if !list.add(start - at, 0) || !list.add(stop - start, 1) {
            return list.finish();
        }
        at = stop;
    }
    list.add(end - at, 0);
    list.finish()
}

/// Descriptors of an extent, one after the other.
struct Descriptors {
    list: Vec<Descriptor>,
    /// The bytes of the extent that are not described yet.
    left: u64,
    extent: Extent,
    limit: usize,
}

impl Descriptors {
    fn new(extent: Extent, limit: usize) -> Self {
        Self { list: Vec::new(), left: extent.len_bytes, extent, limit }
    }

    /// Adds `len` bytes with a value. False when there is no room for another descriptor.
    fn add(&mut self, len: u64, value: u32) -> bool {
        let len = len.min(self.left) as u32; // an extent comes with 32 bits of length
        self.left -= u64::from(len);
        let is_full = self.list.len() == self.limit;
        match self.list.last_mut() {
            _ if len == 0 => {}
            Some(last) if last.1 == value => last.0 += len,
            _ if is_full => return false,
            _ => self.list.push((len, value)),
        }
        true
    }

    fn finish(mut self) -> Vec<Descriptor> {
        if self.list.is_empty() {
            self.list.push((self.extent.len_bytes as u32, 0));
        }
        self.list
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(queries: &[&str], is_list: bool) -> Vec<String> {
        let all = Context::all(&["mon".to_owned(), "tue:x".to_owned()]);
        all.iter().filter(|context| context.is_meant(queries, is_list)).map(Context::name).collect()
    }

    #[test]
    fn queries_mean_what_qemu_and_the_protocol_say() {
        let all = [ALLOCATION, DEPTH, "qemu:dirty-bitmap:mon", "qemu:dirty-bitmap:tue:x"];
        assert_eq!(names(&[], true), all);
        assert_eq!(names(&["qemu:"], true), all[1..]);
        assert_eq!(names(&["qemu:dirty-bitmap:", "base:"], true), [all[0], all[2], all[3]]);
        assert_eq!(names(&["qemu:dirty-bitmap:tue:x"], true), all[3..]);
        assert_eq!(names(&["qemu:dirty-bitmap:t", "qem", "qemu:dirty", "x:"], true), [""; 0]);
        assert_eq!(names(&["qemu:", "base:", BITMAP], false), [""; 0]);
        assert_eq!(names(&[all[3], all[0]], false), [all[0], all[3]]);
    }

    proptest! {
        #[test]
        fn a_bitmap_says_of_each_byte_whether_it_changed(
            gaps in prop::collection::vec((0u64..90_000, 1u64..90_000), 0..12),
            (start, len) in (0u64..200_000, 1u64..600_000), end in 0u64..900_000, limit in 1usize..9
        ) {
            let (mut at, mut ranges) = (0, Vec::new());
            for (gap, len) in gaps {
                at += gap + 1;
                ranges.push(Extent::from_range(at..at + len));
                at += len;
            }
            let extent = Extent::from_range(start..start + len);
            let out = dirty(&ChangedPart { ranges: ranges.clone(), end }, extent, limit);
            if end <= start {
                prop_assert_eq!(out, [(len as u32, 1)]);
                return Ok(());
            }
            prop_assert!(!out.is_empty() && out.len() <= limit);
            prop_assert!(out.windows(2).all(|pair| pair[0].1 != pair[1].1));
            let mut at = start;
            for (len, value) in out {
                prop_assert!(len > 0);
                let next = at + u64::from(len);
                // The borders, and a byte in the middle.
                for byte in [at, (at + next) / 2, next - 1] {
                    let is_changed = ranges.iter().any(|range| range.start() <= byte && byte < range.end());
                    prop_assert_eq!(value == 1, is_changed, "byte {}", byte);
                }
                at = next;
            }
            prop_assert!(at <= extent.end() && at <= end);
            if limit == 8 && ranges.len() < 3 {
                prop_assert_eq!(at, end.min(extent.end()));
            }
        }
    }
}
