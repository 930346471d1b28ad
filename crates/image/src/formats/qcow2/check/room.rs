//! Whether the refcounts have room for one more reference to all that an L1 table names. Nothing is changed before that is known.

use spile_core::{Error, ErrorKind, Result, Store, yield_now};

use super::Walk;
use super::window::Findings;

/// Refcounts of 32 bits and more have room for all references that 65536 snapshots can make.
const ROOMY_ORDER: u32 = 5;

/// Refuses an image whose refcounts are too narrow for one more reference to each cluster that the `l1_entries` entries of the L1 table at
/// `l1_offset` name, and to each that their L2 tables name. The image was checked, and is sound.
///
/// # Errors
/// `Unsupported`; the store's.
pub(in crate::formats::qcow2) async fn refuse_full<S: Store>(store: &S, l1_offset: u64, l1_entries: u32) -> Result<()> {
    let mut unheard = Findings::default();
    let walk = Walk::open(store, false, &mut unheard).await?;
    let order = walk.header().refcount_order;
    if order >= ROOMY_ORDER {
        return Ok(());
    }
    let bits = 1 << order;
    for mut pass in walk.passes() {
        walk.read_counts(&mut pass, &mut unheard).await?;
        walk.walk_l1(l1_offset, l1_entries, &mut pass, &mut unheard).await?;
        for part in pass.window.parts() {
            if let Some(cluster) = pass.window.first_full(&part, (1 << bits) - 1) {
                let what = format!("refcounts of {bits} bits cannot count one more reference to a cluster");
                let error = Error::new(ErrorKind::Unsupported, what).at_path(store.path());
                return Err(error.at_offset(cluster << walk.cluster_bits()).hint(
                    "counts that are too high after a crash are mended by spile check --repair; else delete snapshots inside the image, or copy \
                     the disk into an image with refcounts of 16 bits: spile convert --refcount-bits 16; spile snapshot needs none",
                ));
            }
            yield_now().await;
        }
    }
    Ok(())
}
