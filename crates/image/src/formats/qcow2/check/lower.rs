//! Mending refcounts that are only too high, where they are: nothing is written but what lies in the file already, so that it works on a full file system.
//!
//! Each count that falls is a leak less, and whatever is left of it after a crash is a leak again. COPIED bits are set when the counts are durable.

use spile_core::{Result, Store};

use super::super::codec::refcount;
use super::super::create::write;
use super::super::open::read;
use super::repair::mend_copied;
use super::window::{Findings, Window};
use super::{Walk, breathe};

/// What is written at once of a block of counts, in bytes: where a count is not zero, the file system has its space.
const PIECE_BYTES: usize = 512;

/// Lowers all counts to the references that there are, and ends a file behind the last cluster in use, the one before `used_end`. A check has found nothing wrong but
/// counts that are too high, and COPIED bits that are clear.
///
/// # Errors
/// I/O errors. What is not mended then is still a leak.
pub(super) async fn lower<S: Store>(store: &S, used_end: u64) -> Result<()> {
    let mut nothing = Findings::default();
    let walk = Walk::open(store, false, &mut nothing).await?;
    for mut pass in walk.passes() {
        walk.read_counts(&mut pass, &mut nothing).await?;
        walk.count(&mut pass, &mut nothing).await?;
        lower_in(&walk, &pass.window).await?;
        store.sync().await?;
        mend_copied(&walk, &pass.window).await?;
    }
    store.sync().await?;
    let end_bytes = used_end << walk.cluster_bits();
    if store.info().grows_zeroed && end_bytes < store.len_bytes() {
        store.set_len(end_bytes).await?;
        store.sync().await?;
    }
    Ok(())
}

/// Lowers the counts of the clusters of `window`.
async fn lower_in<S: Store>(walk: &Walk<'_, S>, window: &Window) -> Result<()> {
    let (bits, order) = (walk.cluster_bits(), walk.header().refcount_order);
    let per_block = refcount::counts_per_block(bits, order);
    for (number, entry) in (0u64..).zip(&walk.blocks) {
        let clusters = (number * per_block).max(window.first)..((number + 1) * per_block).min(window.end());
        let Ok(Some(offset)) = refcount::block(*entry, bits) else { continue };
        if clusters.is_empty() || offset >= walk.store.len_bytes() {
            continue;
        }
        let len = walk.cluster_bytes().min(walk.store.len_bytes() - offset);
        let old = read(walk.store, offset, len).await?;
        let mut new = old.clone();
        for cluster in clusters.start..clusters.end.min(number * per_block + ((len * 8) >> order)) {
            breathe(cluster).await;
            let index = cluster - number * per_block;
            // A window counts no further than this.
            let found = window.found(cluster << bits).filter(|found| *found < u16::MAX);
            if let Some(found) = found.map(u64::from).filter(|found| *found < refcount::get(&old, order, index)) {
                refcount::set(&mut new, order, index, found);
            }
        }
        let pieces = old.chunks(PIECE_BYTES).zip(new.chunks(PIECE_BYTES)).enumerate();
        for (at, (_, new)) in pieces.filter(|(_, (old, new))| old != new) {
            write(walk.store, offset + (at * PIECE_BYTES) as u64, new).await?;
        }
    }
    Ok(())
}
