//! The name that a disk on its way here is to get, and who has it.

use std::path::Path;

use spile_core::{ErrorKind, Files, OpenMode, Result, Store as _};

use super::Receiver;
use crate::motion::note::{is_free, refuse_taken};
use crate::names;
use crate::snapshot::remove_if_there;

impl<F: Files> Receiver<'_, F> {
    /// True for the empty file that keeps a name. Where there is something else by now, it was not made here.
    pub(super) async fn is_keeper(&self, disk: &Path) -> Result<bool> {
        match self.files.canonical(disk).await {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Ok(canonical) if canonical != disk => Ok(false),
            Ok(_) => Ok(self.asking.open(&disk.into(), OpenMode::ReadOnly).await?.len_bytes() == 0),
            Err(error) => Err(error),
        }
    }

    /// True when nothing has the name of the disk `disk`, or only what keeps it for the image on its way. Else what lies beside that name is another disk's.
    ///
    /// # Errors
    /// The system's.
    pub async fn has_name(&self, disk: &Path) -> Result<bool> {
        Ok(is_free(self.files, disk).await || self.is_keeper(disk).await?)
    }

    /// Refuses what is to lie beside the name of the disk `name`, which is on its way, when another disk has got that name.
    ///
    /// # Errors
    /// `Exists`; the system's.
    pub async fn check_name(&self, name: &str) -> Result<()> {
        let disk = self.disk(name)?;
        match self.has_name(&disk).await? {
            true => Ok(()),
            false => refuse_taken(self.files, &disk).await,
        }
    }

    pub(super) async fn remove_keeper(&self, disk: &Path) -> Result<()> {
        if self.is_keeper(disk).await? { remove_if_there(self.files, disk).await } else { Ok(()) }
    }

    /// Removes what is noted of the changes of the image on its way to `disk`. Where another disk has got that name, the file beside it is that one's.
    pub(super) async fn forget_changes(&self, disk: &Path) -> Result<()> {
        if self.has_name(disk).await? {
            remove_if_there(self.files, &names::changes(disk)).await?;
        }
        remove_if_there(self.files, &names::new_changes(disk)).await
    }
}
