//! `spile create`: an empty raw disk or VHD.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use spile_core::{Error, ErrorKind, Result, ResultExt, Store};
use spile_engine::{CacheMode, OsEnv, OsFiles};
use spile_image::vhd::codec::footer::DiskType;
use spile_image::vhd::{self, CreateParams, ParentRef};
use spile_image::{Format, LayerInfo};

use super::{Exit, ParentArgs, on_engine, parse_format, print_json, say};
use crate::disks::{self, Source};
use crate::units::{format_size, parse_size};

/// What kind of VHD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Subformat {
    /// Thin: takes space as it is written
    Dynamic,
    /// As long as the disk, readable as raw
    Fixed,
}

/// Create an empty disk
///
/// With --parent, the new disk is a child (a differencing VHD): it reads as the parent until it is written. The parent
/// must not be changed from then on.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// The file to make; it must not exist
    disk: PathBuf,
    /// The size of the disk, such as 20G; a child's is its parent's unless given
    #[arg(long, value_parser = parse_size, required_unless_present = "parent")]
    size: Option<u64>,
    /// The format, instead of what the extension says
    #[arg(long, value_name = "raw|vhd", value_parser = parse_format)]
    format: Option<Format>,
    /// The kind of VHD (dynamic unless given)
    #[arg(long, value_enum)]
    subformat: Option<Subformat>,
    /// The disk that the new one is a child of
    #[arg(long, value_name = "DISK")]
    parent: Option<PathBuf>,
    /// The parent's format, instead of what its extension says
    #[arg(long, value_name = "raw|vhd", value_parser = parse_format, requires = "parent")]
    parent_format: Option<Format>,
    #[command(flatten)]
    parents: ParentArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Runs `spile create`.
///
/// # Errors
/// `Exists` when there is something at the path; what the format cannot do; the system's.
pub fn run(args: &CreateArgs) -> Result<Exit> {
    let format = Format::of(&args.disk, args.format)?;
    let parent = args.parent.as_deref().map(|path| find_parent(args, path)).transpose()?;
    let size_bytes = match (args.size, &parent) {
        (Some(size), _) => size,
        (None, Some(parent)) => parent.virtual_bytes,
        (None, None) => return Err(Error::new(ErrorKind::InvalidInput, "--size is missing")),
    };
    let reference = parent.map(|parent| parent_ref(&args.disk, &parent)).transpose()?;
    let kind = Kind::new(format, args.subformat, size_bytes, reference)?;
    let path = args.disk.clone();
    on_engine(move || async move { create(&path, &kind).await })?;
    let used_bytes = disks::used_bytes(&args.disk);
    if args.json {
        print_json(&serde_json::json!({
            "path": args.disk.to_string_lossy(), "format": format.to_string(),
            "size_bytes": size_bytes, "used_bytes": used_bytes,
        }))?;
    } else {
        let (path, size) = (args.disk.display(), format_size(size_bytes));
        let used = format_size(used_bytes.unwrap_or(0));
        say(format_args!("created {path}: {size} {format}, {used} used"));
    }
    Ok(Exit::Ok)
}

/// What to create.
#[derive(Clone, Debug)]
pub enum Kind {
    /// A raw file of that many bytes.
    Raw(u64),
    /// A VHD.
    Vhd(CreateParams),
}

impl Kind {
    /// # Errors
    /// `InvalidInput` for what the format does not have.
    pub fn new(
        format: Format,
        subformat: Option<Subformat>,
        size_bytes: u64,
        parent: Option<ParentRef>,
    ) -> Result<Self> {
        let refuse = |message| Err(Error::new(ErrorKind::InvalidInput, message));
        match (format, subformat, parent) {
            (Format::Raw, None, None) => Ok(Self::Raw(size_bytes)),
            (Format::Raw, Some(_), _) => refuse("a raw disk has no --subformat"),
            (Format::Raw, None, Some(_)) => refuse("a raw disk has no parent; use --format vhd"),
            (Format::Vhd, Some(Subformat::Fixed), Some(_)) => {
                refuse("a fixed VHD has no parent; leave out --subformat")
            }
            (Format::Vhd, _, Some(parent)) => Ok(Self::Vhd(CreateParams::child(size_bytes, parent))),
            (Format::Vhd, Some(Subformat::Fixed), None) => {
                Ok(Self::Vhd(CreateParams::new(DiskType::Fixed, size_bytes)))
            }
            (Format::Vhd, _, None) => Ok(Self::Vhd(CreateParams::new(DiskType::Dynamic, size_bytes))),
        }
    }
}

/// Creates the file; it and its name are durable then. A half-made one is removed.
///
/// # Errors
/// `Exists` when there is something at the path; the system's.
pub async fn create(path: &Path, kind: &Kind) -> Result<()> {
    let len_bytes = if let Kind::Raw(size_bytes) = kind { *size_bytes } else { 0 };
    let store = OsFiles::new(CacheMode::Page).create(path, len_bytes)?;
    let made = match kind {
        Kind::Raw(_) => store.sync().await,
        Kind::Vhd(params) => vhd::create(&store, &OsEnv, params).await,
    };
    made.inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })
}

/// The folder that `path` lies in.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."))
}

fn find_parent(args: &CreateArgs, path: &Path) -> Result<LayerInfo> {
    let source = Source::File(path.to_owned());
    let options = args.parents.read_only(args.parent_format);
    on_engine(move || async move {
        let chain = disks::open(CacheMode::Page, &source, &options).await?;
        Ok(chain.layers().swap_remove(0))
    })
}

fn parent_ref(child: &Path, parent: &LayerInfo) -> Result<ParentRef> {
    let real = |path: &Path| path.canonicalize().map_err(|e| Error::io("find", e)).at_path(path);
    let folder = real(folder_of(child))?;
    let path = real(&parent.path)?;
    let relative_path = relative(&folder, &path).ok_or_else(|| {
        let error = Error::new(ErrorKind::InvalidInput, "a VHD cannot name a parent whose path is not UTF-8");
        error.at_path(&path).hint("rename the parent, or its folder")
    })?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let facts = parent.vhd.as_ref();
    Ok(ParentRef {
        relative_path,
        absolute_path: None,
        uuid: facts.map_or([0; 16], |facts| facts.footer.uuid),
        timestamp: facts.map_or(0, |facts| facts.footer.timestamp),
        name,
    })
}

/// The way from one folder to a file, both canonical; `None` when it is not UTF-8.
fn relative(folder: &Path, file: &Path) -> Option<String> {
    let shared = folder.components().zip(file.components()).take_while(|(a, b)| a == b).count();
    let ups = folder.components().skip(shared).map(|_| Some(".."));
    let downs = file.components().skip(shared).map(|part| part.as_os_str().to_str());
    ups.chain(downs).collect::<Option<Vec<_>>>().map(|parts| parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_between_folders() {
        let way = |folder, file| relative(Path::new(folder), Path::new(file)).unwrap();
        assert_eq!(way("/a/b", "/a/b/p.vhd"), "p.vhd");
        assert_eq!(way("/a/b", "/a/c/p.vhd"), "../c/p.vhd");
        assert_eq!(way("/", "/p.vhd"), "p.vhd");
    }

    #[test]
    fn what_a_format_has_not_is_refused() {
        let parent =
            ParentRef { relative_path: "p".into(), absolute_path: None, uuid: [0; 16], timestamp: 0, name: "p".into() };
        assert!(Kind::new(Format::Raw, Some(Subformat::Fixed), 512, None).is_err());
        assert!(Kind::new(Format::Raw, None, 512, Some(parent.clone())).is_err());
        assert!(Kind::new(Format::Vhd, Some(Subformat::Fixed), 512, Some(parent)).is_err());
    }
}
