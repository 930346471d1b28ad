//! The other file that a new image keeps its data in.

use std::fs::File;
use std::path::{Path, PathBuf};

use spile_core::{Error, ErrorKind, Files as _, Locator, OpenMode, Result, ResultExt as _, Store as _};
use spile_image::Format;
use spile_image::create::{NewDataFile, NewImage};
use spile_life::names;
use spile_server::new_file::{HalfMade, folder_of};
use spile_server::parents::{check_place, real};
use spile_store::{CacheMode, FileId, Folder, HostFiles, HostStore, OsFiles};

use super::create::{give_name, make, publish, take_space};
use super::options::Preallocate;
use super::space;

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
            let left = "remove it, also where a spile create that was killed in its last moment has left it; or choose another name";
            return Err(error.hint(format!("{left}; an empty file is taken")));
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

    /// Makes the file, with `size_bytes` of zeroes and the space that is to be taken at once. A process that is killed meanwhile leaves what was there before.
    ///
    /// # Errors
    /// `Exists` where somebody has just written to the empty file that was there; `NoSpace`; the system's. All is as before then.
    async fn make(&self, size_bytes: u64, takes: Preallocate, no_lock: bool) -> Result<Made> {
        if self.is_there {
            return self.prepare(size_bytes, takes, no_lock).await;
        }
        let half = HalfMade::begin(&self.path)?;
        let failed = |error| Error::io("cannot be made", error);
        half.file().set_len(size_bytes).map_err(failed).at_path(&self.path)?;
        take_space(half.file(), &self.path, size_bytes, takes).await?;
        half.file().sync_all().map_err(failed).at_path(&self.path)?;
        Ok(Made::New(half))
    }

    async fn prepare(&self, size_bytes: u64, takes: Preallocate, no_lock: bool) -> Result<Made> {
        let files = HostFiles::new(OsFiles::new(CacheMode::Page).without_locks(no_lock));
        let locked = files.open(&Locator::from(&self.path), OpenMode::ReadWrite).await?;
        if locked.len_bytes() > 0 {
            let what = "somebody has just written to it";
            return Err(Error::new(ErrorKind::Exists, what).at_path(&self.path).hint("choose another name"));
        }
        let file = Folder::find(&self.path)?.open(OpenMode::ReadWrite)?;
        if locked.file_id() != file.metadata().ok().map(|stat| FileId::of(&stat)) {
            return Err(spile_core::exchanged(&self.path));
        }
        if matches!(takes, Preallocate::Falloc | Preallocate::Full) {
            space::reserve(&file, &self.path, size_bytes).inspect_err(|_| self.take_back(&file))?;
        }
        Ok(Made::There { file, _locked: locked })
    }

    /// Gives a new file its name, and one that was there its length. Returns the file.
    ///
    /// # Errors
    /// `Exists`; the system's. All is as before then.
    fn show(&self, made: Made, size_bytes: u64, takes: Preallocate) -> Result<File> {
        match made {
            Made::New(half) => {
                let file = half.file().try_clone().map_err(|e| Error::io("cannot be made", e)).at_path(&self.path)?;
                half.name(&self.path).map(|()| file)
            }
            Made::There { file, .. } => {
                let failed = |error| Error::io("cannot set its length", error);
                let lengthened = file.set_len(size_bytes).map_err(failed).at_path(&self.path);
                let filled = lengthened.and_then(|()| match takes {
                    Preallocate::Full => space::fill_holes(&file, &self.path),
                    _ => file.sync_all().map_err(failed).at_path(&self.path),
                });
                filled.inspect_err(|_| self.take_back(&file))?;
                Ok(file)
            }
        }
    }

    /// Leaves what was there before. `file` is the one that was made, or has got a length.
    fn take_back(&self, file: &File) {
        if self.is_there {
            let _ = file.set_len(0);
        } else if let (Ok((folder, name)), Ok(stat)) = (Folder::of(&self.path), file.metadata()) {
            let _ = folder.remove(&name, FileId::of(&stat));
        }
    }
}

/// The file, once it is made but for its last step.
enum Made {
    /// It has no name yet.
    New(HalfMade),
    /// It was there, and has no length yet.
    There { file: File, _locked: HostStore },
}

/// Creates the image at `path`, with its data in another file, if there is one, and takes the space that is to be taken at once. All of it is durable then, also
/// their names. These come last, the one right after the other: a process that is killed before leaves nothing.
///
/// # Errors
/// As [`make`]; as [`take_space`]; `Exists`, where the data file is one that somebody has just made or written to. Nothing is left then.
pub async fn create_with(
    path: &Path,
    format: Format,
    new: &NewImage,
    data_file: Option<&DataFile>,
    takes: Preallocate,
    no_lock: bool,
) -> Result<()> {
    let half = make(path, format, new, no_lock).await?;
    let Some(data_file) = data_file else {
        take_space(half.file(), path, new.size_bytes, takes).await?;
        return publish(half, path);
    };
    let made = data_file.make(new.size_bytes, takes, no_lock).await?;
    let shown = data_file.show(made, new.size_bytes, takes)?;
    let is_elsewhere = real(folder_of(path)).ok().as_deref() != data_file.path.parent();
    // In one folder, their names become durable together.
    let durable = if is_elsewhere { OsFiles::default().sync_name(&data_file.path) } else { Ok(()) };
    // What has its name stays, and needs the data file, also when that is not durable.
    durable.and_then(|()| give_name(half, path)).inspect_err(|_| data_file.take_back(&shown))?;
    OsFiles::default().sync_name(path)
}
