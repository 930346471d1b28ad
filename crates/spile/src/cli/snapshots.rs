//! Which image the name of a snapshot means: names of snapshots belong to their disk.

use std::path::{Path, PathBuf};

use spile_core::{Error, ErrorKind, Locator, Result};
use spile_image::{Format, OpenOptions};
use spile_life::merge::is_called;
use spile_life::names;
use spile_life::snapshot::{file_names, name_of};
use spile_store::CacheMode;

use super::on_engine;
use super::revert::{is_image, is_same_file};
use crate::disks;
use crate::log::printable;

/// The disk whose snapshot is meant.
pub(super) struct Of<'a> {
    /// The path of its leaf.
    pub disk: &'a Path,
    /// The paths of what is below the leaf.
    pub parents: &'a [PathBuf],
}

impl Of<'_> {
    /// The image that `image` means: a path, a whole file name, or the name of a snapshot of this disk. What `by_name` finds by a part of its file name counts only
    /// when it has an image in common with the disk, since another disk of the folder may have a snapshot of that name.
    ///
    /// # Errors
    /// `NotFound`, with the snapshots that there are; `InvalidInput` when several images are called so.
    pub fn find(&self, image: &Path, by_name: impl FnOnce() -> Result<PathBuf>) -> Result<PathBuf> {
        let is_name = image.parent() == Some(Path::new(""));
        if is_name && let Some(own) = self.own(&image.to_string_lossy())? {
            return Ok(own);
        }
        let found = by_name()?;
        if found.symlink_metadata().is_err() {
            return Err(self.unknown(image));
        }
        let is_file_name = found.file_name() == Some(image.as_os_str());
        if is_name && !is_file_name && !self.is_related(&found) {
            let what = format!(
                "{} has no snapshot of this name, and this image has nothing in common with it",
                self.disk.display()
            );
            let path = if found.parent() == Some(Path::new("")) { Path::new(".").join(&found) } else { found.clone() };
            let hint = format!("name it by a path, if it is meant all the same: {}", path.display());
            return Err(Error::new(ErrorKind::InvalidInput, what).at_path(&found).hint(hint));
        }
        Ok(found)
    }

    /// The snapshot `name` of the disk, if it has one.
    fn own(&self, name: &str) -> Result<Option<PathBuf>> {
        let mut found: Vec<_> = self.parents.iter().filter(|path| is_called(self.disk, path, name)).cloned().collect();
        let [file, plain] = file_names(self.disk, name);
        let called_so = self.disk.with_file_name(&file);
        // A disk of its own may be called so.
        if file.starts_with(&self.prefix()) && is_image(&called_so) && self.has_common(&called_so) == Some(true) {
            add(&mut found, called_so);
        }
        // A file of this name in the folder of the user, when the disk lies elsewhere.
        if !found.is_empty() && !self.is_here() {
            [name, &plain].into_iter().for_each(|here| add(&mut found, here.into()));
        }
        match &found[..] {
            [] => Ok(None),
            [one] => Ok(Some(one.clone())),
            several => Err(are_several(name, several)),
        }
    }

    /// How the names of files of its snapshots begin.
    fn prefix(&self) -> String {
        format!("{}-", self.disk.file_stem().unwrap_or_default().to_string_lossy())
    }

    /// True when the disk lies in the user's folder.
    fn is_here(&self) -> bool {
        is_same_file(folder_of(self.disk), Path::new("."))
    }

    /// True when `image` and the disk have an image in common, or nobody knows: whoever opens it next says why.
    fn is_related(&self, image: &Path) -> bool {
        self.has_common(image).unwrap_or(true)
    }

    /// Do `image` and the disk have an image in common? `None` when the image cannot be opened.
    fn has_common(&self, image: &Path) -> Option<bool> {
        let options = OpenOptions { read_only: true, no_lock: true, ..OpenOptions::default() };
        let at = Locator::from(image);
        let layers = on_engine(move || async move { Ok(disks::open(CacheMode::Page, &at, &options).await?.layers()) });
        let layers = layers.ok()?;
        let own = || self.parents.iter().map(PathBuf::as_path).chain([self.disk]);
        Some(layers.iter().any(|layer| own().any(|path| is_same_file(path, &layer.path))))
    }

    /// There is no such image.
    fn unknown(&self, image: &Path) -> Error {
        let what = match image.parent() == Some(Path::new("")) {
            true => format!("the disk has no snapshot {:?}", image.to_string_lossy()),
            false => format!("{} cannot be found", image.display()),
        };
        let names: Vec<_> = self.names().iter().map(|name| printable(name)).collect();
        let [file, _] = file_names(self.disk, &image.to_string_lossy());
        let called_so = self.disk.with_file_name(file);
        let hint = match &names[..] {
            _ if is_image(&called_so) => {
                let file = called_so.display();
                format!("{file} is called so, and has no image in common with the disk, as after a flatten, or cannot be opened: if it is meant, name it by its path")
            }
            [] if names::came(self.disk).exists() => {
                "it has none: it was moved here, and what is below a disk goes along only with `spile move --chain keep`".to_owned()
            }
            [] => "it has none; any image is named by its path".to_owned(),
            names => format!("its snapshots are {}", names.join(", ")),
        };
        Error::new(ErrorKind::NotFound, what).at_path(self.disk).hint(hint)
    }

    /// The names of the disk's snapshots: of what is below it, the newest first, and then of files that are called so.
    pub fn names(&self) -> Vec<String> {
        let name = |path: &Path| match is_same_file(folder_of(path), folder_of(self.disk)) {
            true => name_of(self.disk, path),
            false => path.display().to_string(),
        };
        let mut names: Vec<_> = self.parents.iter().map(|path| name(path)).collect();
        let entries = std::fs::read_dir(folder_of(self.disk)).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut others: Vec<_> = entries
            .filter(|path| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&self.prefix())))
            .filter(|path| path.extension() == self.disk.extension() && Format::from_extension(path).is_some())
            .filter(|path| self.has_common(path) == Some(true))
            .map(|path| name_of(self.disk, &path))
            .filter(|name| !names.contains(name))
            .collect();
        others.sort();
        names.append(&mut others);
        names
    }
}

/// The folder of a path, which may be that of the process.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."))
}

/// Adds an image that is there and was not found yet.
fn add(found: &mut Vec<PathBuf>, path: PathBuf) {
    if is_image(&path) && !found.iter().any(|other| is_same_file(other, &path)) {
        found.push(path);
    }
}

/// The error that more than one image is called `name`.
pub(super) fn are_several(name: &str, several: &[PathBuf]) -> Error {
    let names: Vec<_> = several.iter().map(|path| path.display().to_string()).collect();
    let hint = format!("say which, by a path with a / in it: {}", names.join(", "));
    Error::new(ErrorKind::InvalidInput, format!("several images are called {name}")).hint(hint)
}
