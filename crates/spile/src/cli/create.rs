//! `spile create`: an empty disk in any format that can be made.

use std::fs::File;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use spile_core::{Error, ErrorKind, Locator, Result, ResultExt};
use spile_engine::OsEnv;
use spile_image::create::NewImage;
use spile_image::{Format, OpenOptions};
use spile_server::host::Host;
use spile_server::new_file::folder_of;
use spile_server::parents::{check_place, new_parent, note_child, real};
use spile_store::{CacheMode, OsFiles};
use utoipa::ToSchema;

use super::options::{FormatArgs, Preallocate};
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
    /// The size of the disk, such as 20G; a child's is its parent's unless given
    #[arg(long, value_parser = parse_size, required_unless_present = "parent")]
    size: Option<u64>,
    /// The format, instead of what the extension says
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// The kind of the format, where it has several: a VHD is dynamic (takes space as it is written) unless this says
    /// fixed (as long as the disk, readable as raw)
    #[arg(long, value_name = "KIND", value_parser = parse_subformat)]
    subformat: Option<String>,
    /// The disk that the new one is a child of
    #[arg(long, value_name = "DISK")]
    parent: Option<PathBuf>,
    /// The parent's format, instead of what its extension says
    #[arg(long, value_name = "FORMAT", value_parser = parse_format, requires = "parent")]
    parent_format: Option<Format>,
    /// Take all of the disk's space at once (a raw file, a VHD with --subformat fixed, or a qcow2): falloc unless it says
    /// full, which writes zeroes. Of a qcow2, metadata gives each cluster its place and takes no space for data
    #[arg(long, value_name = "HOW", num_args = 0..=1, require_equals = true, default_missing_value = "falloc")]
    preallocate: Option<Preallocate>,
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
    let format = Format::of(&args.disk, args.format)?;
    let mut kind = args.kind.choose(format)?;
    let takes = args.preallocate.or(kind.preallocate).unwrap_or(Preallocate::Off);
    check_takes(args, format, takes)?;
    if format.about().has_options && takes != Preallocate::Off {
        kind.place_all();
    }
    let new = kind.image(args.size.unwrap_or(0), args.subformat.clone());
    let (path, no_lock) = (args.disk.clone(), args.parents.no_lock);
    let size_bytes = match &args.parent {
        Some(parent) => {
            let (parent, options) = (parent.clone(), args.parents.read_only(args.parent_format));
            let child = Child { path, format, size_bytes: args.size, like: new, parent, options };
            on_engine(move || async move { child.create().await })?
        }
        None if args.size.is_some() => {
            let size_bytes = new.size_bytes;
            on_engine(move || async move { create(&path, format, &new, no_lock).await })?;
            size_bytes
        }
        None => return Err(Error::new(ErrorKind::InvalidInput, "--size is missing")),
    };
    take_space(&args.disk, size_bytes, takes)?;
    let used_bytes = disks::used_bytes(&args.disk);
    if args.json {
        let (path, format) = (args.disk.clone(), format.to_string());
        print_json(&Created { path, format, virtual_size_bytes: size_bytes, used_bytes })?;
    } else {
        let (path, size) = (args.disk.display(), format_size(size_bytes));
        let used = format_size(used_bytes.unwrap_or(0));
        say(format_args!("created {path}: {size} {format}, {used} used"));
    }
    Ok(Exit::Ok)
}

/// Creates the file; it and its name are durable then. A half-made one is removed.
///
/// # Errors
/// `Exists` when there is something at the path; `InvalidInput` for what the format does not have; `Unsupported` or
/// `Denied` where the file cannot be locked, unless `no_lock` says so; the system's.
pub async fn create(path: &Path, format: Format, new: &NewImage, no_lock: bool) -> Result<()> {
    check_new_name(path)?;
    format.check_new(new)?;
    let store = OsFiles::new(CacheMode::Page).without_locks(no_lock).create(path, 0)?;
    format.create(&store, &OsEnv, new).await.inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })
}

/// Refuses to make a file whose name no line can show, and no note of a job can hold.
///
/// # Errors
/// `InvalidInput`.
pub fn check_new_name(path: &Path) -> Result<()> {
    let has_control = path.file_name().is_some_and(|name| name.to_string_lossy().contains(char::is_control));
    match has_control {
        true => {
            let what = "the name has a control character in it, such as a line end";
            Err(Error::new(ErrorKind::InvalidInput, what).at_path(path).hint("choose another name"))
        }
        false => Ok(()),
    }
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

/// Takes the space of a new disk; one that does not fit is removed.
fn take_space(path: &Path, size_bytes: u64, takes: Preallocate) -> Result<()> {
    let taken = match takes {
        Preallocate::Off | Preallocate::Metadata => return Ok(()),
        Preallocate::Falloc | Preallocate::Full => {
            let file =
                File::options().read(true).write(true).open(path).map_err(|e| Error::io("open", e)).at_path(path);
            file.and_then(|file| {
                space::preallocate(&file, path, size_bytes)?;
                if takes == Preallocate::Full { space::fill_holes(&file, path) } else { Ok(()) }
            })
        }
    };
    taken.inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })
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
        note_child(&layers[0], &real(folder_of(&self.path))?.join(self.path.file_name().unwrap_or_default()))?;
        let new = NewImage { size_bytes, parent, ..self.like.clone() };
        create(&self.path, self.format, &new, self.options.no_lock).await?;
        drop(base);
        Ok(size_bytes)
    }
}
