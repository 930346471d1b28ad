//! [`Target`]: where a backup is written to.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use spile_core::{Disk, Error, ErrorKind, Files as _, Locator, OpenMode, Result, ResultExt, Store as _, format_size};
use spile_engine::{OsEnv, run_blocking};
use spile_image::create::NewImage;
use spile_image::layer::Layer as _;
use spile_image::{Format, Graph, OpenOptions, open_layer};
use spile_life::backup::{Beneath, Digests};
use spile_life::snapshot::new_child;
use spile_node::Aligned;
use spile_store::{AnyStore, CacheMode, HostFiles, HostStore, OsFiles};

use super::manifest::Manifest;
use crate::new_file::{HalfMade, exists, folder_of};
use crate::{disks, family, host_device};

const FULL_IS_NEW: &str =
    "remove it or choose another name: a full backup is a new file; --overwrite has it take the place of this one";

/// What is said of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetSpec {
    /// A file that is to be made, or an NBD export.
    pub at: Locator,
    /// The format of a file, instead of what its name says.
    pub format: Option<Format>,
    /// Where the manifest is to be, if not beside a file.
    pub manifest: Option<PathBuf>,
    /// An older backup, of which this one is to be a child.
    pub parent: Option<PathBuf>,
    /// A file or block device that is there is overwritten by a full backup.
    pub overwrite: bool,
}

/// True for the path of a device: nothing is kept beside it.
pub(super) fn is_device(path: &Path) -> bool {
    path.starts_with("/dev") && !path.starts_with("/dev/shm")
}

/// What an older backup has to be, so that changes make it newer.
pub struct Since {
    /// The path of the disk.
    pub disk: String,
    /// Which disk it is, wherever it goes.
    pub disk_id: Option<String>,
    /// The checkpoint.
    pub name: String,
    /// When it was made, in seconds since 1970 UTC.
    pub made_unix_s: u64,
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
    /// The file name of the backup that it is a child of.
    pub parent: Option<String>,
    /// The file whose place it takes in the end, and which stays locked until then.
    older: Option<AnyStore>,
    /// A block device that nobody else mounts meanwhile.
    _claimed: Option<File>,
}

/// The file at `path` whose place a backup is to take. It has to be nobody's parent, and in use by nobody.
///
/// # Errors
/// `Denied` for a parent; `Busy`; the system's.
async fn older(path: &Path) -> Result<Option<AnyStore>> {
    match OsFiles::new(CacheMode::Page).open(&path.into(), OpenMode::ReadWrite).await {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        opened => {
            let older = opened?;
            let hint = "choose another place; or remove the child first, if it is of no use any more";
            family::refuse_lost_parent(path).await.map_err(|error| error.hint(hint))?;
            disks::refuse_old_image_at(path).await?;
            Ok(Some(older))
        }
    }
}

impl TargetSpec {
    /// Refuses what cannot be a target, before anything is begun.
    ///
    /// # Errors
    /// `Exists` for a file that is there, and for one that is no manifest where that is to be; `InvalidInput`; `Unsupported` for a format that
    /// cannot be written.
    fn check(&self) -> Result<()> {
        if let Some(manifest) = self.manifest() {
            if self.at == Locator::Path(manifest.clone()) {
                return Err(invalid("the manifest is another file than the backup").at_path(&manifest));
            }
            Manifest::refuse_other(&manifest)?;
        }
        match &self.at {
            Locator::Path(path) => {
                let format = Format::of(path, self.format)?;
                if is_device(path) && format != Format::Raw {
                    return Err(invalid("a block device is written as a raw disk").at_path(path).hint("--to raw"));
                }
                match path.symlink_metadata() {
                    Err(_) => Ok(()),
                    Ok(_) if !self.overwrite => Err(exists(path).hint(FULL_IS_NEW)),
                    Ok(stat) if stat.is_file() || is_device(path) => Ok(()),
                    Ok(_) => Err(invalid("only a file or a block device is overwritten").at_path(path)),
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

    /// Refuses what does not fit to a full backup, or to one of what has changed.
    ///
    /// # Errors
    /// `InvalidInput`.
    pub fn check_kind(&self, is_since: bool) -> Result<()> {
        let error = match (self.parent.is_some(), self.overwrite, is_since) {
            (true, _, false) => {
                invalid("a backup becomes a child only of one whose checkpoint it is since").hint("--since NAME")
            }
            (_, true, true) => invalid("a backup of what has changed overwrites nothing")
                .hint("make a full backup, or leave --overwrite out"),
            _ => return Ok(()),
        };
        Err(told(&self.at, error))
    }

    /// As [`TargetSpec::check`], off the worker: the folder's storage may hang.
    async fn checked(&self) -> Result<()> {
        let (spec, label) = (self.clone(), self.manifest().unwrap_or_default());
        run_blocking(&label, move || spec.check()).await
    }

    /// True when nothing is left of the backup until it is whole: it becomes a new file.
    pub fn is_new_file(&self, is_since: bool) -> bool {
        matches!(&self.at, Locator::Path(path) if !is_device(path) && (!is_since || self.parent.is_some()))
    }

    /// Where the manifest is.
    pub fn manifest(&self) -> Option<PathBuf> {
        let beside = match &self.at {
            Locator::Path(path) if !is_device(path) => Some(Manifest::path_of(path)),
            _ => None,
        };
        self.manifest.clone().or(beside)
    }

    /// Opens a target for a full backup of `size_bytes`.
    ///
    /// # Errors
    /// `Exists` for a file that is there and may not be overwritten; `Busy` and `Denied` for one that is in use or a parent; `InvalidInput`; `Unsupported`
    /// for a format that cannot be written; `NoSpace` for an export or a device that is too short; the system's.
    pub async fn open(&self, size_bytes: u64) -> Result<Target> {
        self.checked().await?;
        match &self.at {
            Locator::Path(path) if !is_device(path) => self.open_new(path, size_bytes).await,
            _ => self.open_export(size_bytes).await,
        }
    }

    async fn open_new(&self, path: &Path, size_bytes: u64) -> Result<Target> {
        let format = Format::of(path, self.format)?;
        let older = if self.overwrite { older(path).await? } else { None };
        let name = path.to_owned();
        let half = run_blocking(path, move || HalfMade::begin(&name)).await?;
        let size_bytes = size_bytes.next_multiple_of(format.about().size_unit_bytes);
        let new = NewImage::new(size_bytes);
        let store = OsFiles::new(CacheMode::Page).open(&half.path().into(), OpenMode::ReadWrite).await?;
        format.create(&store, &OsEnv, &new).await.map_err(|error| half.told_as(path, error))?;
        drop(store);
        let options = OpenOptions { format: Some(format), write_parent: true, ..OpenOptions::default() };
        let disk = Aligned::new(disks::open(CacheMode::Direct, &half.path().into(), &options).await?);
        disk.inner().handles()[0].image().store().set_copy(true);
        Ok(Target {
            disk,
            half: Some((half, path.to_owned())),
            manifest: self.manifest(),
            beneath: Beneath::Zeroes,
            digests: Digests::default(),
            parent: None,
            older,
            _claimed: None,
        })
    }

    /// Opens a target for the changes since a checkpoint: a new child of an older backup, or the older backup itself.
    ///
    /// # Errors
    /// As [`TargetSpec::open`]; as [`Manifest::read_whole`] and [`Manifest::check_since`].
    pub async fn open_since(&self, size_bytes: u64, since: Since) -> Result<Target> {
        let older = match (&self.parent, &self.at, self.manifest()) {
            (Some(parent), ..) => Manifest::path_of(parent),
            (None, Locator::Path(path), _) if Format::of(path, self.format)? != Format::Raw => {
                let error = invalid("the changes since a checkpoint become a child of the older backup").at_path(path);
                return Err(error.hint("name that one by --parent, or keep raw backups, which are changed in place"));
            }
            (None, _, Some(manifest)) => manifest,
            (None, _, None) => return Err(invalid("an export has no manifest beside it").hint("say --manifest FILE")),
        };
        let label = older.clone();
        let read = move || {
            let manifest = Manifest::read_whole(&older)?;
            manifest.check_since(&since).at_path(&older)?;
            manifest.digests()
        };
        let digests = run_blocking(&label, read).await?;
        let mut target = match &self.parent {
            Some(parent) => self.open_child(parent, size_bytes).await?,
            None => self.open_older(size_bytes).await?,
        };
        (target.digests, target.beneath) = (digests, Beneath::Anything);
        Ok(target)
    }

    /// A new image over the older backup at `parent`, which lies in the same folder.
    async fn open_child(&self, parent: &Path, size_bytes: u64) -> Result<Target> {
        self.checked().await?;
        let Locator::Path(path) = &self.at else {
            return Err(invalid("an export has no parent").hint("leave --parent out"));
        };
        let format = Format::of(path, self.format)?;
        if !format.about().has_parents {
            let error = invalid("a backup with a parent has a format that has parents").at_path(path);
            return Err(error.hint("use a VHD, or leave --parent out to change the older backup in place"));
        }
        let (one, other) = (parent.to_owned(), path.to_owned());
        let folder = |path: &Path| folder_of(path).canonicalize().ok();
        if !run_blocking(path, move || folder(&one) == folder(&other)).await {
            let error = invalid("a backup lies in the folder of its parent").at_path(path);
            return Err(error.hint("or nobody finds the parent from there"));
        }
        let name = path.to_owned();
        let half = run_blocking(path, move || HalfMade::begin(&name)).await?;
        let read = OpenOptions { read_only: true, ..OpenOptions::default() };
        let below = disks::open(CacheMode::Page, &parent.into(), &read).await?;
        let size_bytes = size_bytes.next_multiple_of(format.about().size_unit_bytes);
        let new = new_child(&below.handles()[0].info(), size_bytes, parent)?;
        let files = HostFiles::new(OsFiles::new(CacheMode::Direct));
        let at: Locator = half.path().into();
        let store = files.open(&at, OpenMode::ReadWrite).await?;
        format.create(&store, &OsEnv, &new).await.map_err(|error| half.told_as(path, error))?;
        drop(store);
        let options = OpenOptions { format: Some(format), ..OpenOptions::default() };
        let leaf = open_layer(&files, Arc::new(OsEnv), at, &options).await?;
        leaf.image().store().set_copy(true);
        let parent = parent.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(Target {
            disk: Aligned::new(below.with_leaf(leaf).await?),
            half: Some((half, path.to_owned())),
            manifest: self.manifest(),
            beneath: Beneath::Anything,
            digests: Digests::default(),
            parent,
            older: None,
            _claimed: None,
        })
    }

    /// The older backup itself: a raw file, which [`Target::begin`] lets grow with its disk, or an export.
    async fn open_older(&self, size_bytes: u64) -> Result<Target> {
        let is_file = matches!(self.at, Locator::Path(_));
        self.open_export(if is_file { 0 } else { size_bytes }).await.map_err(|error| match error.kind() {
            // Its child would show a mixture of two moments.
            ErrorKind::Denied if is_file => error.hint("make a full backup under another name"),
            _ => error,
        })
    }

    async fn open_export(&self, size_bytes: u64) -> Result<Target> {
        let claimed = match &self.at {
            Locator::Path(path) if is_device(path) => {
                let device = path.clone();
                Some(run_blocking(path, move || host_device::claim(&device)).await?)
            }
            _ => None,
        };
        let options = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
        let disk = Aligned::new(disks::open(CacheMode::Direct, &self.at, &options).await?);
        let there = disk.size_bytes();
        if there < size_bytes {
            let what = format!("it has {}, and the disk {}", format_size(there), format_size(size_bytes));
            let label = disks::label(&self.at);
            return Err(Error::new(ErrorKind::NoSpace, what).at_path(Path::new(&label)).hint("use a larger export"));
        }
        disk.inner().handles()[0].image().store().set_copy(true);
        Ok(Target {
            disk,
            half: None,
            manifest: self.manifest(),
            beneath: Beneath::Anything,
            digests: Digests::default(),
            parent: None,
            older: None,
            _claimed: claimed,
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

    /// Notes, durably, that what is there is being changed into the backup of `manifest`: until [`Target::finish`] it is of no use. The disk may have
    /// grown since the target was opened.
    ///
    /// # Errors
    /// The system's.
    pub async fn begin(&self, manifest: &Manifest) -> Result<()> {
        if let Some(path) = self.manifest.clone().filter(|_| self.half.is_none()) {
            let (label, under_way) = (path.clone(), manifest.clone().under_way());
            run_blocking(&label, move || under_way.write(&path)).await?;
        }
        if self.disk.size_bytes() < manifest.virtual_size_bytes {
            self.disk.resize(manifest.virtual_size_bytes).await?;
        }
        Ok(())
    }

    /// `error` with the name that the user knows: a file that has no name yet is told by its descriptor.
    pub fn told(&self, error: Error) -> Error {
        match &self.half {
            Some((half, path)) => half.told_as(path, error),
            None => error,
        }
    }

    /// Closes the target after a backup that has failed. A file that was to be made is gone.
    pub async fn give_up(self) {
        let Self { disk, half, older, .. } = self;
        let _ = disk.close().await;
        drop((disk, older));
        if let Some((half, path)) = half {
            run_blocking(&path, move || drop(half)).await;
        }
    }

    /// Closes the target, which is whole, and gives it its name and its manifest, unless `is_wanted` says no in the last moment.
    ///
    /// # Errors
    /// `Shutdown` when it is not wanted; `Exists` when something else has got its name meanwhile; the system's.
    pub async fn finish(self, manifest: Manifest, is_wanted: impl FnOnce() -> bool + Send + 'static) -> Result<()> {
        let Self { disk, half, manifest: at, digests, parent, older, .. } = self;
        let older_id = older.as_ref().and_then(AnyStore::file_id);
        if let Err(error) = disk.close().await {
            let Some((half, path)) = half else { return Err(error) };
            let error = half.told_as(&path, error);
            drop(disk);
            run_blocking(&path, move || drop(half)).await;
            return Err(error);
        }
        disk.inner().handles()[0].image().store().set_copy(false);
        let Some(label) = at.clone().or_else(|| half.as_ref().map(|(_, path)| path.clone())) else { return Ok(()) };
        let put = move || {
            if !is_wanted() {
                return Err(super::ended());
            }
            let manifest = manifest.with_digests(&digests).with_parent(parent);
            match (half, at) {
                (None, at) => at.map_or(Ok(()), |at| manifest.write(&at)),
                // A process that is killed in between leaves a manifest that says so. The same command makes both anew.
                (Some((half, path)), Some(at)) if older.is_some() => {
                    manifest.clone().under_way().write_before(&at, || false, || half.replace(&path, older_id))?;
                    manifest.write(&at)
                }
                (Some((half, path)), None) if older.is_some() => half.replace(&path, older_id),
                // The manifest first: a file would be in the way of the same command.
                (Some((half, path)), Some(at)) => {
                    manifest
                        .write_before(&at, || path.symlink_metadata().is_ok(), || half.name(&path))
                        .map_err(|error| taken(&path, error))?;
                    OsFiles::default().sync_name(&path)
                }
                (Some((half, path)), None) => half.publish(&path).map_err(|error| taken(&path, error)),
            }
        };
        let put = run_blocking(&label, put).await;
        // It holds the parent of a backup until that has its name.
        drop(disk);
        put
    }
}

/// An error of giving a backup its name.
fn taken(path: &Path, error: Error) -> Error {
    match error.kind() {
        ErrorKind::Exists => exists(path).hint(FULL_IS_NEW),
        _ => error,
    }
}

/// An error of the backup's target, told with the name that its user knows.
pub fn told(at: &Locator, error: Error) -> Error {
    error.at_path(Path::new(&disks::label(at)))
}
