//! [`Ground`]: what a disk goes back to, opened and asked. The disk itself may be served or not.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use spile_core::{Disk as _, Env, Error, Locator, Result};
use spile_engine::{OsEnv, run_blocking};
use spile_image::create::NewImage;
use spile_image::layer::Layer as _;
use spile_image::{Format, Graph, OpenOptions, check_new_child, make_durable};
use spile_life::revert::Back;
use spile_store::{CacheMode, HostFiles, HostStore, OsFiles};

use crate::disks;
use crate::far_children::{self, HostNotes};
use crate::host::Host;
use crate::jobs::refuse_failed_syncs;
use crate::parents::{all_real, new_parent};

/// What a disk is to go back to. It is open until this is dropped: nobody can delete it or write to it.
pub struct Ground {
    /// The image that the disk's new leaf is a child of.
    pub base: Graph<HostStore>,
    /// The new leaf, as long as the image.
    pub new: NewImage,
    /// The folders that parents may lie in besides the disk's own, canonical.
    pub allowed: Vec<PathBuf>,
}

impl Ground {
    /// Opens the image at `base` for a new leaf at `disk`, a whole path, makes it durable with its parents, and notes beside it that it has a child there.
    ///
    /// # Errors
    /// Those of opening it; `Denied` when the leaf could not be opened with it, or when a sync of it has failed; `Busy` for an image that can be no parent
    /// now; the storage's.
    pub async fn open(cache: CacheMode, disk: &Path, base: &Locator, options: &OpenOptions) -> Result<Self> {
        let mut opened = disks::open(cache, base, options).await?;
        refuse_failed_syncs(&opened)?;
        let (leaf, layers) = (opened.handles()[0].path().to_owned(), opened.layers());
        Host::new().refuse_unfit(&leaf).await?;
        let (allowed, child) = (options.allow_parents.clone(), disk.to_owned());
        let named = move || {
            let allowed = all_real(&allowed)?;
            check_new_child(child.parent().unwrap_or(Path::new("/")), &layers, &allowed)?;
            let parent = new_parent(&child, &layers[0])?;
            far_children::note(&layers[0].path, &child)?;
            Ok::<_, Error>((allowed, parent))
        };
        let (allowed, parent) = run_blocking(&leaf, named).await?;
        let files = HostFiles::new(OsFiles::new(cache).without_locks(options.no_lock));
        let was_left = opened.handles().iter().any(|layer| layer.image().is_unflushed());
        make_durable(&files, &(Arc::new(OsEnv) as Arc<dyn Env>), opened.handles()).await?;
        if was_left {
            drop(opened);
            opened = disks::open(cache, base, options).await?;
        }
        let new = NewImage { parent: Some(parent), ..NewImage::new(opened.size_bytes()) };
        Ok(Self { base: opened, new, allowed })
    }

    /// The way back, of a disk that is opened in the format `given` if that is said.
    pub fn back<'a>(&'a self, files: &'a HostFiles, given: Option<Format>) -> Back<'a, HostFiles> {
        Back { files, env: Arc::new(OsEnv), base: &self.base, notes: &HostNotes, new: &self.new, given }
    }
}
