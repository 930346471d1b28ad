//! [`Target`]: where a backup is written to.

use std::path::{Path, PathBuf};

use spile_core::{Disk, Error, ErrorKind, Files as _, Locator, OpenMode, Result, format_size};
use spile_engine::{OsEnv, run_blocking};
use spile_image::create::NewImage;
use spile_image::{Format, Graph, OpenOptions};
use spile_life::backup::{Beneath, Digests};
use spile_node::Aligned;
use spile_store::{CacheMode, HostStore, OsFiles};

use super::manifest::Manifest;
use crate::disks;
use crate::new_file::{HalfMade, exists};

/// What is said of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetSpec {
    /// A file that is to be made, or an NBD export.
    pub at: Locator,
    /// The format of a file, instead of what its name says.
    pub format: Option<Format>,
    /// Where the manifest is to be, if not beside a file.
    pub manifest: Option<PathBuf>,
}

/// A target that is open.
pub struct Target {
    disk: Aligned<Graph<HostStore>>,
    /// The file that gets its name when the backup is whole, and that name.
    half: Option<(HalfMade, PathBuf)>,
    manifest: Option<PathBuf>,
    /// What the target reads as where nothing was written.
    pub beneath: Beneath,
    /// The digests of what it holds.
    pub digests: Digests,
}

impl TargetSpec {
    /// Refuses what cannot be a target, before anything is begun.
    ///
    /// # Errors
    /// `Exists` for a file that is there; `InvalidInput`; `Unsupported` for a format that cannot be written.
    pub fn check(&self) -> Result<()> {
        match &self.at {
            Locator::Path(path) => {
                let format = Format::of(path, self.format)?;
                if format.about().is_read_only {
                    let what = format!("a {format} cannot be written");
                    return Err(Error::new(ErrorKind::Unsupported, what).at_path(path).hint("use a VHD or a raw file"));
                }
                match path.symlink_metadata() {
                    Ok(_) => Err(exists(path).hint("remove it or choose another name: a full backup is a new file")),
                    Err(_) => Ok(()),
                }
            }
            Locator::Nbd(_) => match self.format {
                None | Some(Format::Raw) => Ok(()),
                Some(_) => Err(invalid("an NBD export is written as a raw disk").hint("leave --format out")),
            },
            Locator::Null(_) | Locator::Mem(_) => {
                Err(invalid("nothing is kept there").hint("name a file or an export"))
            }
        }
    }

    /// Where the manifest is.
    pub fn manifest(&self) -> Option<PathBuf> {
        let beside = if let Locator::Path(path) = &self.at { Some(Manifest::path_of(path)) } else { None };
        self.manifest.clone().or(beside)
    }

    /// Opens a target for a full backup of `size_bytes`.
    ///
    /// # Errors
    /// As [`TargetSpec::check`]; `NoSpace` for an export that is too short; the system's.
    pub async fn open(&self, size_bytes: u64) -> Result<Target> {
        self.check()?;
        match &self.at {
            Locator::Path(path) => self.open_new(path, size_bytes).await,
            _ => self.open_export(size_bytes).await,
        }
    }

    async fn open_new(&self, path: &Path, size_bytes: u64) -> Result<Target> {
        let format = Format::of(path, self.format)?;
        let name = path.to_owned();
        let half = run_blocking(path, move || HalfMade::begin(&name)).await?;
        let size_bytes = size_bytes.next_multiple_of(format.about().size_unit_bytes);
        let new = NewImage { size_bytes, subformat: None, parent: None, unit_bytes: None };
        let store = OsFiles::new(CacheMode::Page).open(&half.path().into(), OpenMode::ReadWrite).await?;
        format.create(&store, &OsEnv, &new).await.map_err(|error| half.told_as(path, error))?;
        drop(store);
        let options = OpenOptions { format: Some(format), write_parent: true, ..OpenOptions::default() };
        let disk = Aligned::new(disks::open(CacheMode::Once, &half.path().into(), &options).await?);
        Ok(Target {
            disk,
            half: Some((half, path.to_owned())),
            manifest: self.manifest(),
            beneath: Beneath::Zeroes,
            digests: Digests::default(),
        })
    }

    async fn open_export(&self, size_bytes: u64) -> Result<Target> {
        let options = OpenOptions { format: Some(Format::Raw), write_parent: true, ..OpenOptions::default() };
        let disk = Aligned::new(disks::open(CacheMode::Direct, &self.at, &options).await?);
        let there = disk.size_bytes();
        if there < size_bytes {
            let what = format!("it has {}, and the disk {}", format_size(there), format_size(size_bytes));
            let label = disks::label(&self.at);
            return Err(Error::new(ErrorKind::NoSpace, what).at_path(Path::new(&label)).hint("use a larger export"));
        }
        Ok(Target {
            disk,
            half: None,
            manifest: self.manifest(),
            beneath: Beneath::Anything,
            digests: Digests::default(),
        })
    }
}

fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, what)
}

impl Target {
    /// The disk that is written.
    pub fn disk(&self) -> &Aligned<Graph<HostStore>> {
        &self.disk
    }

    /// Closes the target after a backup that has failed. A file that was to be made is gone.
    pub async fn give_up(self) {
        let _ = self.disk.close().await;
    }

    /// Closes the target, which is whole, and gives it its name and its manifest.
    ///
    /// # Errors
    /// The system's.
    pub async fn finish(self, manifest: Manifest) -> Result<()> {
        let Self { disk, half, manifest: at, digests, .. } = self;
        let manifest = manifest.with_digests(&digests);
        disk.close().await.map_err(|error| match &half {
            Some((half, path)) => half.told_as(path, error),
            None => error,
        })?;
        drop(disk);
        let Some(label) = at.clone().or_else(|| half.as_ref().map(|(_, path)| path.clone())) else { return Ok(()) };
        // The manifest first: a backup that has its name is whole.
        let put = move || {
            at.as_deref().map_or(Ok(()), |at| manifest.write(at))?;
            half.map_or(Ok(()), |(half, path)| half.publish(&path))
        };
        run_blocking(&label, put).await
    }
}

/// An error of the backup's target, told with the name that its user knows.
pub fn told(at: &Locator, error: Error) -> Error {
    error.at_path(Path::new(&disks::label(at)))
}
