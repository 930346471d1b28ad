//! What has changed of a disk comes with it: the file of its changed blocks, which the other host sends before the hand-over.

use spile_core::Result;
use spile_image::layer::Identity;
use spile_life::motion::Receiver;
use spile_life::names;
use spile_store::HostFiles;

use super::{House, Used, refused};

/// The file on its way is served under this name. No disk is called so: a name has no `/`.
fn name_of_file(disk: &str) -> String {
    format!("marks/{disk}")
}

impl House {
    /// The file for what has changed of the disk `name`, new and empty. The caller holds `busy`.
    pub(super) async fn take_marks(
        &self,
        receiver: &Receiver<'_, HostFiles>,
        name: &str,
        id: Identity,
        len_bytes: u64,
    ) -> Result<Used> {
        let file = name_of_file(name);
        // A link that was cut may still be there. What it writes goes to a file without a name.
        self.open().remove(&file);
        let place = receiver.begin_marks(name, id, len_bytes).await.map_err(refused)?;
        self.use_disk(&file, &place, None).await
    }

    /// That file is whole, and the disk's from now on. The caller holds `busy`.
    pub(super) async fn adopt_marks(
        &self,
        receiver: &Receiver<'_, HostFiles>,
        name: &str,
        id: Identity,
    ) -> Result<Used> {
        let (file, packed) = (name_of_file(name), names::new_changes(&receiver.disk(name)?));
        if let Some(open) = self.find_open(&file) {
            self.shut(&file, &open).await?;
        }
        let place = receiver.check_half(name, id).await.map_err(refused)?;
        let used = self.use_disk(name, &place, None).await?;
        let adopted = used.1.checkpoints.adopt(&used.1.disk, &packed).await;
        if let Err(error) = &adopted {
            tracing::warn!("{name:?}: its checkpoints did not come along: {error}");
        }
        self.unless_failed(used, adopted.map_err(refused)).await
    }
}
