//! A disk gets another parent. Nobody uses the disk meanwhile.
//!
//! The disk must read the same afterwards. So its content is compared over the old parent and over the new one, wherever its leaf has nothing of its
//! own. What differs can be copied into the leaf first. Each copy leaves the content as it was, and the leaf names the new parent only when
//! all copies and the new parent are durable: a process or host that ends meanwhile leaves the disk with the same content over one parent or the
//! other.

use std::sync::Arc;

use spile_core::{Disk as _, Env, Error, ErrorKind, Extent, Files, Result, Segments, Store};
use spile_image::create::NewParent;
use spile_image::layer::Layer as _;
use spile_image::{Graph, GraphLayer, make_durable};

use crate::snapshot::refuse_job;
use crate::work::refuse_inner_snapshots;

/// So much is compared at once, in bytes.
const PIECE_BYTES: u64 = 1 << 20;
/// What differs is counted, and copied, in units of so many bytes.
const GRANULE_BYTES: u64 = 4096;

/// Where a disk would not read the same with another parent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// The first byte that differs; `None` when the disk reads the same.
    pub first_at: Option<u64>,
    /// How many bytes are in units of 4 KiB that differ.
    pub bytes: u64,
}

/// Refuses a disk that cannot get `parent` as its parent, whatever the two hold: `leaf` is the disk's own image, which is to write `named` down.
/// It is asked before anything is compared, copied or removed.
///
/// # Errors
/// `Busy` while a job on the disk is not finished; `Unsupported` for a disk without a parent; `InvalidInput` when the parent is the disk itself, or a
/// child of it, and for a name that the disk's format cannot express.
pub async fn check<F: Files>(
    files: &F,
    leaf: &GraphLayer<F::Store>,
    parent: &Graph<F::Store>,
    named: &NewParent,
) -> Result<()> {
    refuse_job(files, leaf.path()).await?;
    for layer in parent.handles() {
        if files.is_at(leaf.image().store(), layer.path()).await? {
            let what = format!("the new parent is {} itself, or a child of it", leaf.path().display());
            return Err(Error::new(ErrorKind::InvalidInput, what).at_path(parent.handles()[0].path()));
        }
    }
    // A name that makes no sense is no reason: it is to be replaced.
    if matches!(leaf.image().parent().await, Ok(None)) {
        let error =
            Error::new(ErrorKind::Unsupported, "the disk has no parent, and a disk without one does not get one");
        return Err(error.at_path(leaf.path()).hint("a new child of that parent: spile create --parent"));
    }
    refuse_inner_snapshots(leaf, "they read what they lack from its parent")?;
    leaf.image().check_name(named)
}

/// Refuses `parent` when it says itself that it is another image than the one that `leaf` names.
///
/// # Errors
/// `Denied`.
pub async fn refuse_other<S: Store>(leaf: &GraphLayer<S>, parent: &Graph<S>) -> Result<()> {
    let named = leaf.image().parent().await.ok().flatten().and_then(|named| named.identity);
    let new = &parent.handles()[0];
    match (named, new.image().identity()) {
        (Some(named), Some(found)) if named != found => {
            let what = format!(
                "{} is not the image that the disk names as its parent: its UUID is another",
                new.path().display()
            );
            Err(Error::new(ErrorKind::Denied, what).at_path(leaf.path()))
        }
        _ => Ok(()),
    }
}

/// The disk `graph` with the layers of `parent` in the place of its own parents.
///
/// # Errors
/// `Unsupported` when the chain would be too long.
pub fn over<S: Store>(graph: &Graph<S>, parent: &Graph<S>) -> Result<Graph<S>> {
    graph.with_layers(graph.handles()[..1].iter().chain(parent.handles()).cloned().collect())
}

/// Compares what the disk reads over its own parents (`before`) with what it reads over other ones (`after`), where its leaf has nothing.
///
/// # Errors
/// The stores'.
pub async fn compare<S: Store>(before: &Graph<S>, after: &Graph<S>) -> Result<Difference> {
    each_piece(before, after, async |_, _| Ok(())).await
}

/// [`compare`], and copies what differs into the leaf, so that the disk reads the same over both. The copies are durable when it returns.
///
/// # Errors
/// The stores'. The disk reads as before.
pub async fn copy_differing<S: Store>(before: &Graph<S>, after: &Graph<S>) -> Result<Difference> {
    let copied = each_piece(before, after, async |run, bytes| before.write(run, &bytes, false).await).await?;
    before.flush().await?;
    Ok(copied)
}

/// Has `leaf`, which is open for writing and has passed [`check`], name `parent` as its parent, by the name `named`. The disk reads the same with
/// it. The parent is open for reading, and durable before it is named: so far no flush of the disk had to care for it.
///
/// # Errors
/// As [`make_durable`] and `Layer::set_parent`. The leaf names one of the two parents.
pub async fn name_parent<F: Files>(
    files: &F,
    env: &Arc<dyn Env>,
    leaf: &GraphLayer<F::Store>,
    parent: &Graph<F::Store>,
    named: &NewParent,
) -> Result<()> {
    make_durable(files, env, parent.handles()).await?;
    leaf.image().set_parent(Some(named)).await
}

/// Calls `differing` with each run that differs, and with its bytes over the old parents.
async fn each_piece<S: Store>(
    before: &Graph<S>,
    after: &Graph<S>,
    differing: impl AsyncFn(Extent, Segments) -> Result<()>,
) -> Result<Difference> {
    let size_bytes = before.size_bytes();
    let [old, new] = [(); 2].map(|()| Segments::zeroed(PIECE_BYTES as usize));
    let (mut at, mut found) = (0, Difference::default());
    while at < size_bytes {
        let rest = Extent::from_range(at..size_bytes);
        let nexts = [before.next_below(rest).await?, after.next_below(rest).await?];
        let Some(start) = nexts.into_iter().flatten().map(|next| next.start()).min() else { break };
        let start = start / GRANULE_BYTES * GRANULE_BYTES;
        let end = size_bytes.min((start / PIECE_BYTES + 1) * PIECE_BYTES);
        let piece = Extent::from_range(start..end);
        let [old, new] = [&old, &new].map(|whole| whole.slice(0..piece.len_bytes as usize));
        before.read(piece, &old).await?;
        after.read(piece, &new).await?;
        for run in runs_that_differ(&old.to_vec(), &new.to_vec()) {
            found.first_at.get_or_insert(start + run.first_at as u64);
            found.bytes += run.range.len() as u64;
            let extent = Extent::from_range(start + run.range.start as u64..start + run.range.end as u64);
            differing(extent, old.slice(run.range)).await?;
        }
        at = end;
    }
    Ok(found)
}

/// A run of granules that differ.
struct Run {
    range: std::ops::Range<usize>,
    /// The first byte in it that differs.
    first_at: usize,
}

fn runs_that_differ(old: &[u8], new: &[u8]) -> Vec<Run> {
    let granule = GRANULE_BYTES as usize;
    let mut runs: Vec<Run> = Vec::new();
    for (number, (a, b)) in old.chunks(granule).zip(new.chunks(granule)).enumerate() {
        let start = number * granule;
        let Some(first) = (a != b).then(|| a.iter().zip(b).position(|(a, b)| a != b)).flatten() else { continue };
        match runs.last_mut() {
            Some(last) if last.range.end == start => last.range.end = start + a.len(),
            _ => runs.push(Run { range: start..start + a.len(), first_at: start + first }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_that_differ_are_one_run() {
        let old = vec![0; 5 * 4096 - 512];
        let mut new = old.clone();
        for at in [4096 + 7, 2 * 4096, 4 * 4096 + 100] {
            new[at] = 1;
        }
        let runs: Vec<_> = runs_that_differ(&old, &new).into_iter().map(|run| (run.range, run.first_at)).collect();
        assert_eq!(runs, [(4096..3 * 4096, 4096 + 7), (4 * 4096..5 * 4096 - 512, 4 * 4096 + 100)]);
    }
}
