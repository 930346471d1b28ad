//! The files of [`super`], which can break a rule of a snapshot's order on purpose.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use spile_core::{Files, Locator, OpenMode, Result};

use super::Broken;
use super::brink::{Brink, Place};
use crate::store::{SimFiles, SimStore};

/// The simulated files. What a broken rule puts off is shared by all handles of one snapshot.
#[derive(Clone)]
pub(super) struct LiveFiles {
    files: SimFiles,
    broken: Broken,
    brink: Brink,
    /// A second name that is to be given after the next rename.
    late_link: Arc<Mutex<Option<(PathBuf, PathBuf)>>>,
}

impl LiveFiles {
    pub fn new(files: SimFiles, broken: Broken, brink: Brink) -> Self {
        Self { files, broken, brink, late_link: Arc::default() }
    }

    fn late_link(&self) -> Option<(PathBuf, PathBuf)> {
        self.late_link.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Files for LiveFiles {
    type Store = SimStore;

    async fn open(&self, at: &Locator, mode: OpenMode) -> Result<SimStore> {
        self.files.open(at, mode).await
    }

    async fn create(&self, path: &Path, len_bytes: u64) -> Result<SimStore> {
        let store = Files::create(&self.files, path, len_bytes).await?;
        if self.broken == Broken::LeafNotDurable {
            store.void_syncs(true);
        }
        Ok(store)
    }

    async fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let late = self.late_link();
        let old = match &late {
            Some((old, _)) => Some(self.files.open(&old.as_path().into(), OpenMode::ReadOnly).await?),
            None => None,
        };
        self.brink.at(Place::Renamed);
        match self.broken {
            Broken::RenameNotDurable => self.files.rename_unsynced(from, to).await?,
            _ => self.files.rename(from, to).await?,
        }
        if let (Some((_, name)), Some(old)) = (late, old) {
            self.files.link_store(&old, &name).await?;
        }
        if self.broken == Broken::LeafNotDurable {
            self.files.open(&to.into(), OpenMode::ReadOnly).await?.void_syncs(false);
        }
        Ok(())
    }

    async fn link(&self, from: &Path, to: &Path) -> Result<()> {
        if self.broken == Broken::LinkedLate {
            let link = Some((from.to_owned(), to.to_owned()));
            *self.late_link.lock().unwrap_or_else(PoisonError::into_inner) = link;
            return Ok(());
        }
        self.files.link(from, to).await
    }

    async fn is_at(&self, store: &SimStore, path: &Path) -> Result<bool> {
        self.files.is_at(store, path).await
    }

    async fn reopen(&self, store: &SimStore, mode: OpenMode) -> Result<SimStore> {
        self.files.reopen(store, mode).await
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        self.files.remove(path).await
    }

    async fn sync_names(&self, path: &Path) -> Result<()> {
        match self.broken {
            Broken::OldNamesNotSynced => Ok(()),
            _ => self.files.sync_names(path).await,
        }
    }

    async fn canonical(&self, path: &Path) -> Result<PathBuf> {
        self.files.canonical(path).await
    }
}
