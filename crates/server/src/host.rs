//! [`Host`]: the files and the clock of this host, for what is done to a family of images.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use spile_core::{Env, Result};
use spile_engine::OsEnv;
use spile_image::Format;
use spile_life::base;
use spile_life::gc::{self, Tools};
use spile_store::{CacheMode, HostFiles, OsFiles};

use crate::family;

/// The files and the clock of this host.
pub struct Host {
    files: HostFiles,
    asking: HostFiles,
    env: Arc<dyn Env>,
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}

impl Host {
    /// This host.
    pub fn new() -> Self {
        let files = HostFiles::new(OsFiles::new(CacheMode::Page));
        let asking = HostFiles::new(OsFiles::new(CacheMode::Page).without_locks(true));
        Self { files, asking, env: Arc::new(OsEnv) }
    }

    /// What the rules of a family of images ask for.
    pub fn tools(&self) -> Tools<'_, HostFiles> {
        Tools { files: &self.files, asking: &self.asking, env: &self.env }
    }

    /// The files of the folder of `image`, a whole path.
    ///
    /// # Errors
    /// As [`family::files_in`].
    pub async fn beside(&self, image: &Path) -> Result<Vec<PathBuf>> {
        family::files_in(image.parent().unwrap_or(Path::new("/"))).await
    }

    /// Refuses the image at `path` as a parent, as [`base::refuse_unfit`] does. Nothing that is no file can have become one that it refuses.
    ///
    /// # Errors
    /// As there.
    pub async fn refuse_unfit(&self, path: &Path) -> Result<()> {
        match path.is_absolute() && !path.starts_with("/dev") {
            true => base::refuse_unfit(&self.tools(), path, &self.beside(path).await?).await,
            false => Ok(()),
        }
    }

    /// The first of `images` that keeps its data in another file, and that file. One that cannot be asked is passed over.
    pub async fn data_file_of(&self, images: &[(PathBuf, Format)]) -> Option<(PathBuf, PathBuf)> {
        for (image, format) in images {
            if let Ok(Some(data)) = gc::named_data_file(&self.asking, image, *format).await {
                return Some((image.clone(), data));
            }
        }
        None
    }

    /// Removes the note of `image` when it says nothing.
    ///
    /// # Errors
    /// As [`gc::tidy`].
    pub async fn tidy(&self, image: &Path) -> Result<()> {
        gc::tidy(&self.tools(), &self.beside(image).await?, image).await
    }
}
