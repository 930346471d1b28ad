//! `spile create`: an empty disk in any format that can be made.

use std::fs::File;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use spile_core::{Error, ErrorKind, Files as _, Locator, OpenMode, Result, ResultExt};
use spile_engine::{OsEnv, run_blocking};
use spile_image::create::NewImage;
use spile_image::{Format, OpenOptions};
use spile_life::names;
use spile_server::far_children;
use spile_server::host::Host;
use spile_server::new_file::{HalfMade, folder_of};
use spile_server::parents::{check_place, new_parent, real};
use spile_store::{CacheMode, OsFiles};
use utoipa::ToSchema;

use super::data_file::{DataFile, create_with};
use super::options::{Chosen, FormatArgs, Preallocate};
use super::{Exit, ParentArgs, on_engine, parse_format, parse_subformat, print_json, say, space, text_of};
use crate::disks;
use crate::units::{format_size, parse_size};

/// Create an empty disk
///
/// With --parent, the new disk is a child (a differencing VHD, or a qcow2 with a backing file): it reads as the parent until
/// it is written. The parent must not be changed from then on.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// The file to make; it must not exist
    disk: PathBuf,
    /// The size of the disk, such as 20G; a child's is its parent's unless given. The same as --size
    #[arg(value_name = "SIZE", value_parser = parse_size, required_unless_present_any = ["parent", "size"])]
    of_size: Option<u64>,
    /// The size of the disk
    #[arg(long, value_parser = parse_size, conflicts_with = "of_size")]
    size: Option<u64>,
    /// The format, instead of what the extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// The kind of the format, where it has several: a VHD is dynamic (takes space as it is written) unless this says
    /// fixed (as long as the disk, readable as raw)
    #[arg(long, value_name = "KIND", value_parser = parse_subformat)]
    subformat: Option<String>,
    /// The disk that the new one is a child of
    #[arg(short = 'b', long, value_name = "DISK")]
    parent: Option<PathBuf>,
    /// The parent's format, instead of what its extension says
    #[arg(short = 'F', long, value_name = "FORMAT", value_parser = parse_format, requires = "parent")]
    parent_format: Option<Format>,
    /// Take all of the disk's space at once (a raw file, a VHD with --subformat fixed, or a qcow2): falloc unless it says
    /// full, which writes zeroes. Of a qcow2, metadata gives each cluster its place and takes no space for data
    #[arg(long, value_name = "HOW", num_args = 0..=1, require_equals = true, default_missing_value = "falloc")]
    preallocate: Option<Preallocate>,
    /// Of a qcow2: keep its data in this file, which is made; one that is there is taken only if it is empty. Whoever opens the disk says
    /// --allow-data-file
    #[arg(long, value_name = "FILE")]
    data_file: Option<PathBuf>,
    /// The data file is the disk as it is, also for programs that know nothing of the qcow2
    #[arg(long)]
    data_file_raw: bool,
    #[command(flatten)]
    kind: FormatArgs,
    #[command(flatten)]
    parents: ParentArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// A new disk.
#[derive(Debug, Serialize, ToSchema)]
pub struct Created {
    /// Its file.
    #[serde(serialize_with = "text_of")]
    #[schema(value_type = String)]
    path: PathBuf,
    /// Its format.
    format: String,
    /// The size that guests see, in bytes.
    virtual_size_bytes: u64,
    /// The space that the file takes on its file system, in bytes.
    used_bytes: Option<u64>,
    /// The file that holds its data, if that is another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    data_file: Option<String>,
}

impl CreateArgs {
    fn size(&self) -> Option<u64> {
        self.size.or(self.of_size)
    }
}

/// Runs `spile create`.
///
/// # Errors
/// `Exists` when there is something at the path; what the format cannot do; a chain that could not be opened; the system's.
pub fn run(args: &CreateArgs) -> Result<Exit> {
    if let Locator::Nbd(_) = disks::locate(&args.disk)? {
        let error = Error::new(ErrorKind::Unsupported, "an NBD export cannot be created from here").at_path(&args.disk);
        return Err(error.hint("create the disk on its server, or overwrite an export by spile convert"));
    }
    refuse_missing_folder(&args.disk)?;
    let format = Format::of(&args.disk, args.format)?;
    let mut kind = args.kind.choose(format)?;
    let takes = args.preallocate.or(kind.preallocate).unwrap_or(Preallocate::Off);
    check_takes(args, format, takes)?;
    if format.about().has_options && takes != Preallocate::Off {
        kind.place_all();
    }
    let data_file = DataFile::asked(args, format, &kind)?;
    let mut new = kind.image(args.size().unwrap_or(0), args.subformat.clone());
    new.options.data_file = data_file.as_ref().map(|file| file.named.clone());
    let (path, no_lock) = (args.disk.clone(), args.parents.no_lock);
    let size_bytes = match &args.parent {
        Some(parent) => {
            let (parent, options) = (parent.clone(), args.parents.read_only(args.parent_format));
            let data_file = data_file.clone();
            let child = Child { path, format, size_bytes: args.size(), like: new, data_file, takes, parent, options };
            on_engine(move || async move { child.create().await })?
        }
        None if args.size().is_some() => {
            let size_bytes = new.size_bytes;
            let data_file = data_file.clone();
            on_engine(
                move || async move { create_with(&path, format, &new, data_file.as_ref(), takes, no_lock).await },
            )?;
            size_bytes
        }
        None => return Err(Error::new(ErrorKind::InvalidInput, "--size is missing")),
    };
    let used_bytes = disks::used_bytes(&args.disk);
    if args.json {
        let (path, format) = (args.disk.clone(), format.to_string());
        let data_file = data_file.map(|file| file.path.display().to_string());
        print_json(&Created { path, format, virtual_size_bytes: size_bytes, used_bytes, data_file })?;
    } else {
        let (path, size) = (args.disk.display(), format_size(size_bytes));
        let used = format_size(used_bytes.unwrap_or(0));
        say(format_args!("created {path}: {size} {format}, {used} used"));
        if let Some(DataFile { path, .. }) = data_file {
            say(format_args!("  its data are in {}; open it with --allow-data-file", path.display()));
        }
    }
    Ok(Exit::Ok)
}

impl DataFile {
    /// The data file that is asked for, if one is.
    fn asked(args: &CreateArgs, format: Format, kind: &Chosen) -> Result<Option<Self>> {
        let invalid = |what: &str, hint: &str| {
            Err(Error::new(ErrorKind::InvalidInput, what).at_path(&args.disk).hint(hint.to_owned()))
        };
        let (is_raw, named) = (args.data_file_raw || kind.data_file_raw, args.data_file.as_ref());
        match named.or(kind.data_file.as_ref()) {
            None if is_raw => invalid("no data file is named that could be raw", "name one: --data-file FILE"),
            None => Ok(None),
            Some(_) if !format.about().has_options => invalid(
                "only a qcow2 keeps its data in another file",
                "leave out --data-file, or choose --format qcow2",
            ),
            Some(path) if kind.data_file.as_ref().is_some_and(|other| other != path) => {
                invalid("--data-file and -o data_file differ", "name one of them")
            }
            Some(path) => Self::new(&args.disk, path, is_raw, &args.parents.allow_parents).map(Some),
        }
    }
}

/// Makes the image that [`publish`] gives the name `path`. All of it is durable then. Its name is the last that it gets: a process that is killed leaves the whole
/// image or none.
///
/// # Errors
/// `Exists` when there is something at the path; `InvalidInput` for what the format does not have; `Unsupported` or
/// `Denied` where the file cannot be locked, unless `no_lock` says so; the system's.
pub async fn make(path: &Path, format: Format, new: &NewImage, no_lock: bool) -> Result<HalfMade> {
    refuse_missing_folder(path)?;
    check_new_name(path)?;
    format.check_new(new)?;
    if path.symlink_metadata().is_ok() {
        return Err(taken(path));
    }
    let half = HalfMade::begin(path)?;
    let made = async {
        let files = OsFiles::new(CacheMode::Page).without_locks(no_lock);
        let store = files.open(&half.path().into(), OpenMode::ReadWrite).await?;
        format.create(&store, &OsEnv, new).await
    };
    made.await.map_err(|error| half.told_as(path, error))?;
    Ok(half)
}

/// Gives the image its name, durably.
///
/// # Errors
/// `Exists`; the system's.
pub fn publish(half: HalfMade, path: &Path) -> Result<()> {
    give_name(half, path)?;
    OsFiles::default().sync_name(path)
}

/// As [`publish`], of a disk whose name needs not be durable yet.
///
/// # Errors
/// As there.
pub fn give_name(half: HalfMade, path: &Path) -> Result<()> {
    half.name(path).map_err(|error| if error.kind() == ErrorKind::Exists { taken(path) } else { error })
}

fn taken(path: &Path) -> Error {
    let error = Error::new(ErrorKind::Exists, "there is a file of this name already").at_path(path);
    error.hint("remove it or choose another name")
}

/// Refuses what is written as a folder, with a slash at its end, and is none that is there.
///
/// # Errors
/// `NotFound`.
pub fn refuse_missing_folder(place: &Path) -> Result<()> {
    use std::os::unix::ffi::OsStrExt as _;
    if place.as_os_str().as_bytes().ends_with(b"/") && !place.is_dir() {
        let error = Error::new(ErrorKind::NotFound, "there is no such folder").at_path(place);
        return Err(error.hint("make it first (mkdir -p), or leave the / at its end out to make a file of this name"));
    }
    Ok(())
}

/// Refuses to make a file whose name no line can show, and no note of a job can hold.
///
/// # Errors
/// `InvalidInput`.
pub fn check_new_name(path: &Path) -> Result<()> {
    let has_control = path.file_name().is_some_and(|name| name.to_string_lossy().contains(char::is_control));
    if has_control {
        let what = "the name has a control character in it, such as a line end";
        return Err(Error::new(ErrorKind::InvalidInput, what).at_path(path).hint("choose another name"));
    }
    if !names::fits_a_disk(path) {
        let what = "the name is too long: files that tell of a disk lie beside it, under longer names";
        let hint = format!("a disk's name may have {} bytes", names::LONGEST_DISK_NAME_BYTES);
        return Err(Error::new(ErrorKind::InvalidInput, what).at_path(path).hint(hint));
    }
    Ok(())
}

/// Refuses to take space where a disk cannot have it from the start.
fn check_takes(args: &CreateArgs, format: Format, takes: Preallocate) -> Result<()> {
    let invalid =
        |what: &str, hint: &str| Err(Error::new(ErrorKind::InvalidInput, what).at_path(&args.disk).hint(hint));
    match takes {
        Preallocate::Off => Ok(()),
        _ if format.about().has_options => Ok(()),
        _ if args.parent.is_some() => invalid("a child takes its space as it is written", "leave out --preallocate"),
        Preallocate::Metadata => {
            invalid("only a qcow2 can have places without space", "say --preallocate=falloc, or --format qcow2")
        }
        Preallocate::Falloc | Preallocate::Full => Ok(()),
    }
}

/// Takes the space of a new disk whose data are to be in `file`, durably. `path` is the name that this is to have.
///
/// # Errors
/// `NoSpace`; the system's.
pub async fn take_space(file: &File, path: &Path, size_bytes: u64, takes: Preallocate) -> Result<()> {
    if matches!(takes, Preallocate::Off | Preallocate::Metadata) {
        return Ok(());
    }
    let file = file.try_clone().map_err(|e| Error::io("cannot be opened", e)).at_path(path)?;
    let label = path.to_owned();
    let take = move || {
        space::preallocate(&file, &label, size_bytes)?;
        match takes {
            Preallocate::Full => space::fill_holes(&file, &label),
            _ => file.sync_all().map_err(|e| Error::io("cannot take the disk's space", e)).at_path(&label),
        }
    };
    run_blocking(path, take).await
}

/// A child that is to be made.
pub struct Child {
    /// The file to make.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// The size that guests see, in bytes; the parent's if `None`.
    pub size_bytes: Option<u64>,
    /// What it is like, but for its size and its parent.
    pub like: NewImage,
    /// The file that is to hold its data, if that is another one.
    pub data_file: Option<DataFile>,
    /// The space that is taken at once.
    pub takes: Preallocate,
    /// The parent.
    pub parent: PathBuf,
    /// How the parent is opened.
    pub options: OpenOptions,
}

impl Child {
    /// Creates the child and returns its size in bytes. The parent is open meanwhile, so that nobody can delete it or write to it
    /// before the child names it.
    ///
    /// # Errors
    /// As [`run`].
    pub async fn create(&self) -> Result<u64> {
        let base = disks::open(CacheMode::Page, &Locator::Path(self.parent.clone()), &self.options).await?;
        let layers = base.layers();
        let paths: Vec<_> = layers.iter().map(|layer| layer.path.as_path()).collect();
        check_place(&self.path, &paths, &self.options.allow_parents)?;
        Host::new().refuse_unfit(&layers[0].path).await?;
        let size_bytes = self.size_bytes.unwrap_or(layers[0].virtual_bytes);
        let parent = Some(new_parent(&self.path, &layers[0])?);
        far_children::note(
            &layers[0].path,
            &real(folder_of(&self.path))?.join(self.path.file_name().unwrap_or_default()),
        )?;
        let new = NewImage { size_bytes, parent, ..self.like.clone() };
        create_with(&self.path, self.format, &new, self.data_file.as_ref(), self.takes, self.options.no_lock).await?;
        drop(base);
        Ok(size_bytes)
    }
}
