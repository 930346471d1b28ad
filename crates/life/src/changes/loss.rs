//! [`Giving`]: the end of tracking, when the file of changed blocks cannot be made durable any more.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use async_lock::OnceCell;
use spile_core::{Error, ErrorKind, Files, Result, Segments, Store as _, StoreOffset, Via};

use super::Surroundings;
use super::header::COPY_BYTES;

/// Why changes are not tracked any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// What has failed, for people.
    pub why: String,
    /// The file's name is gone, durably. Else a power cut could bring back a file that knows too little.
    pub is_removed: bool,
    /// Whoever opens the disk next is not told too little: the file's name is gone, or its header says nothing any more, durably.
    pub is_void: bool,
}

type Act = Box<dyn Fn() -> Pin<Box<dyn Future<Output = Result<()>>>> + Send + Sync>;

/// Removes the file of `store`, which was at `path`. What is there may be that of another disk by now, or of this one, which has come back.
pub(super) async fn remove_own<F: Files>(files: &F, store: &F::Store, path: &Path) -> Result<()> {
    match files.is_at(store, path).await? {
        true => files.remove_file(store, path).await,
        false => Ok(()),
    }
}

/// Gives the tracking of a disk up, once. The disk's requests matter more than what is known of them.
pub(super) struct Giving {
    path: PathBuf,
    remove: Act,
    /// Overwrites the header.
    wipe: Act,
    alarm: fn(&Path, &Error),
    loss: OnceCell<Loss>,
    has_begun: OnceLock<()>,
}

impl Giving {
    pub fn new<F: Files + Clone>(around: &Surroundings<F>, path: &Path, store: Arc<F::Store>) -> Self {
        let (files, at) = (around.files.clone(), path.to_owned());
        let own = store.clone();
        let remove: Act = Box::new(move || {
            let (files, at, own) = (files.clone(), at.clone(), own.clone());
            Box::pin(async move { remove_own(&files, &own, &at).await })
        });
        let wipe: Act = Box::new(move || {
            let store = store.clone();
            Box::pin(async move {
                let nothing = Segments::zeroed(2 * COPY_BYTES);
                store.write_at(StoreOffset(0), &nothing, Via::Cached).await?;
                store.sync().await
            })
        });
        let (path, alarm) = (path.to_owned(), around.alarm);
        Self { path, remove, wipe, alarm, loss: OnceCell::new(), has_begun: OnceLock::new() }
    }

    /// Gives up because of `error`. When it returns, a process that comes later finds no file, or the alarm has told that it may.
    pub async fn up(&self, error: &Error) {
        let _ = self.has_begun.set(());
        let give = async {
            (self.alarm)(&self.path, error);
            let left = self.void().await;
            Loss {
                why: error.to_string(),
                is_removed: left.is_none(),
                is_void: left.is_none_or(|(_, is_void)| is_void),
            }
        };
        self.loss.get_or_init(|| give).await;
    }

    /// Removes the file, or has it say nothing where its name may be left: then the alarm is told. Returns what has left the name, and whether the file says
    /// nothing, durably. No request may need the file any more.
    pub async fn void(&self) -> Option<(Error, bool)> {
        let left = match (self.remove)().await {
            Err(left) if left.kind() != ErrorKind::NotFound => left,
            _ => return None,
        };
        let is_void = (self.wipe)().await.is_ok();
        let hint = match is_void {
            true => "remove this file: it says nothing any more, so everything counts as changed",
            false => "remove this file: what it says is too little",
        };
        let left = left.hint(hint);
        (self.alarm)(&self.path, &left);
        Some((left, is_void))
    }

    /// True from the moment in which tracking is given up: what is known is too little.
    pub fn has_begun(&self) -> bool {
        self.has_begun.get().is_some()
    }

    /// Why tracking was given up, once that is done.
    pub fn loss(&self) -> Option<&Loss> {
        self.loss.get()
    }
}
