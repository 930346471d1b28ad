//! The other file that a new image keeps its data in.

use std::path::{Path, PathBuf};

use spile_core::{Error, ErrorKind, Files as _, Locator, OpenMode, Result, ResultExt as _, Store as _};
use spile_image::Format;
use spile_image::create::{NewDataFile, NewImage};
use spile_life::names;
use spile_server::new_file::folder_of;
use spile_server::parents::{check_place, real};
use spile_store::{CacheMode, HostFiles, OsFiles};

use super::create::{create, make, publish};

/// A file that is to hold the data of a new image.
#[derive(Clone, Debug)]
pub struct DataFile {
    /// Its whole path.
    pub path: PathBuf,
    /// What the image says of it.
    pub named: NewDataFile,
    /// It is there, and empty.
    is_there: bool,
}

impl DataFile {
    /// The file at `path`, for the image at `image`. `allowed` are folders that are allowed when the image is opened.
    ///
    /// # Errors
    /// `Exists` for a file that holds something, and for what is no file: nothing is overwritten, and nothing that lies there is to come to light
    /// in the new disk. `Denied` where no command would follow the image to it; `InvalidInput` for the image itself, for a name that does not say that the file is raw; the system's.
    pub fn new(image: &Path, path: &Path, is_raw: bool, allowed: &[PathBuf]) -> Result<Self> {
        if names::format_of(path) != Some(Format::Raw) {
            // Files whose names do not say that they are raw are asked for their parents, and the guest would write the answer.
            let what = "the name of a file that holds a disk's data says that it is raw";
            return Err(Error::new(ErrorKind::InvalidInput, what).at_path(path).hint("let it end in .raw or .img"));
        }
        let stat = path.symlink_metadata();
        let is_there = stat.is_ok();
        if stat.is_ok_and(|stat| !stat.is_file() || stat.len() > 0) {
            let what = "there is something of this name already, and a new disk shows nothing of it";
            let error = Error::new(ErrorKind::Exists, what).at_path(path);
            return Err(error.hint("remove it, or choose another name; an empty file is taken"));
        }
        let (folder, home) = (real(folder_of(image))?, real(folder_of(path))?);
        let whole = home.join(path.file_name().unwrap_or_default());
        if Some(whole.as_path()) == image.file_name().map(|name| folder.join(name)).as_deref() {
            let error = Error::new(ErrorKind::InvalidInput, "a disk and the file that holds its data are two files");
            return Err(error.at_path(path).hint("choose another name for one of them"));
        }
        check_place(image, &[&whole], allowed).map_err(|error| {
            let what = format!("no command would follow the new disk to {}", whole.display());
            let error_kind = error.kind();
            Error::new(error_kind, what).at_path(image).hint(format!(
                "put both into one folder; or say --allow-parents {} now and whenever the disk is opened",
                home.display()
            ))
        })?;
        let path = whole.to_str().map(str::to_owned).ok_or_else(|| {
            let error = Error::new(ErrorKind::InvalidInput, "an image cannot name a file whose path is not UTF-8");
            error.at_path(&whole).hint("rename it, or its folder")
        })?;
        Ok(Self { path: whole, named: NewDataFile { path, is_raw }, is_there })
    }

    /// Has the file be there, with `size_bytes` of zeroes, durably.
    async fn make(&self, size_bytes: u64, no_lock: bool) -> Result<()> {
        let files = HostFiles::new(OsFiles::new(CacheMode::Page).without_locks(no_lock));
        if !self.is_there {
            return files.create(&self.path, size_bytes).await.map(drop);
        }
        let store = files.open(&Locator::from(&self.path), OpenMode::ReadWrite).await?;
        if store.len_bytes() > 0 {
            let what = "somebody has just written to it";
            return Err(Error::new(ErrorKind::Exists, what).at_path(&self.path).hint("choose another name"));
        }
        let made = async {
            store.set_len(size_bytes).await?;
            store.sync().await?;
            files.sync_names(&self.path).await
        };
        made.await.at_path(&self.path)
    }

    /// Leaves what was there before.
    pub fn take_back(&self) {
        let _ = match self.is_there {
            true => std::fs::File::options().write(true).open(&self.path).and_then(|file| file.set_len(0)),
            false => std::fs::remove_file(&self.path),
        };
    }
}

/// As [`create`], with its data in another file, if there is one.
///
/// # Errors
/// As there; [`DataFile::make`]'s. Nothing is left then.
pub async fn create_with(
    path: &Path,
    format: Format,
    new: &NewImage,
    data_file: Option<&DataFile>,
    no_lock: bool,
) -> Result<()> {
    let Some(data_file) = data_file else { return create(path, format, new, no_lock).await };
    let half = make(path, format, new, no_lock).await?;
    data_file.make(new.size_bytes, no_lock).await?;
    publish(half, path).inspect_err(|_| data_file.take_back())
}
