//! The changed blocks of a disk as NBD clients ask for them: `qemu:dirty-bitmap:NAME`.

use std::pin::Pin;
use std::sync::Arc;

use spile_core::{Extent, Result};
use spile_front_nbd::contexts::{ChangedPart, Checkpoints as Asked};

use super::disks::{Open, ServedDisk};
use crate::checkpoints::Checkpoints;

/// So many blocks are looked at for one request.
const STEP_BLOCKS: u64 = 1 << 16;

/// A disk with its checkpoints.
struct Bitmaps {
    disk: Arc<ServedDisk>,
    checkpoints: Arc<Checkpoints>,
}

/// What the NBD front is to know of the checkpoints of a disk.
pub fn of(open: &Open) -> Arc<dyn Asked> {
    Arc::new(Bitmaps { disk: open.disk.clone(), checkpoints: open.checkpoints.clone() })
}

impl Asked for Bitmaps {
    fn names(&self) -> Vec<String> {
        self.checkpoints.names()
    }

    fn changed<'a>(&'a self, name: &'a str, extent: Extent) -> Pin<Box<dyn Future<Output = Result<ChangedPart>> + 'a>> {
        Box::pin(async move {
            let block_bytes = u64::from(self.checkpoints.block_bytes().await.unwrap_or(4096));
            let end = extent.end().min(extent.start() + STEP_BLOCKS * block_bytes);
            let within = extent.start()..end;
            let changed = self.checkpoints.changed(&self.disk, name, None, within).await?;
            Ok(ChangedPart { ranges: changed.ranges, end })
        })
    }
}
