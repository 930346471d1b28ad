//! `spile revert` and `spile delete`: disks that nobody uses go back to a snapshot, or go.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use spile_core::{Disk as _, Error, ErrorKind, Extent, Files as _, Locator, Result, ResultExt};
use spile_engine::OsEnv;
use spile_image::create::NewImage;
use spile_image::{Format, Graph, LayerInfo, OpenOptions, check_new_child};
use spile_life::delete;
use spile_life::gc::{Family, Verdict, verdict};
use spile_life::merge::is_called;
use spile_life::revert::revert;
use spile_life::snapshot::{Made, Plan, prepare, take_back};
use spile_server::backup::Manifest;
use spile_server::checkpoints::Checkpoints;
use spile_server::jobs::Access;
use spile_server::serving::api::client::{LOOK_PATIENCE, ask};
use spile_server::serving::api::discovery;
use spile_server::serving::api::types::DiskDetail;
use spile_store::{CacheMode, FileId, HostFiles, HostStore, OsFiles};
use utoipa::ToSchema;

use super::control::path_of;
use super::create::{new_parent, note_child};
use super::gc::Host;
use super::snapshot::find;
use super::{Exit, ParentArgs, existing, on_engine, parse_format, print_json, say};
use crate::disks;
use crate::units::format_size;

/// Have a disk go back to what a snapshot holds
///
/// The disk's path names a new, empty child of the snapshot then, in one step. What was written to the disk since is lost, or kept
/// under a name. Nobody may use the disk meanwhile; end or detach its virtual machine first.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("rest").required(true)))]
pub struct RevertArgs {
    /// The disk, by its path
    disk: PathBuf,
    /// The image to go back to: a snapshot of this disk, by its name or its path, or any other image
    snapshot: PathBuf,
    /// Lose what was written to the disk since its last snapshot
    #[arg(long, group = "rest")]
    discard: bool,
    /// Keep what the disk holds now under this name, as `spile snapshot --name` does
    #[arg(long, value_name = "NAME", group = "rest")]
    keep: Option<String>,
    /// The disk's format, instead of what its extension says
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    #[command(flatten)]
    parents: ParentArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Delete a disk or a snapshot that no other image needs
///
/// The other images in its folder are asked whether it is their parent. A disk that is open anywhere, or has a merge that is
/// not finished, is left alone. What the image's own parents hold stays. An image with one child is only marked, also while it is in
/// use: `spile gc` merges the two, and the space is free then. The child keeps its name, and what it holds.
#[derive(Debug, Args)]
pub struct DeleteArgs {
    /// The image, by its path; a snapshot also by the name that `spile snapshot --name` gave it
    disk: PathBuf,
    /// Keep an image after all that was marked, if `spile gc` has not begun to merge it
    #[arg(long, conflicts_with = "format")]
    undo: bool,
    /// The image's format, instead of what its extension says
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    #[command(flatten)]
    parents: ParentArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// A disk that has gone back.
#[derive(Debug, Serialize, ToSchema)]
pub struct Reverted {
    /// The disk.
    path: String,
    /// What it holds now.
    snapshot_path: String,
    /// What it held before, if that was kept.
    kept_path: Option<String>,
}

/// An image that is gone, or is not to go after all.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct Deleted {
    /// Its path.
    path: String,
    /// It is kept: its mark was taken back.
    is_kept: bool,
    /// The space that it took on its file system, in bytes; 0 while it waits for `spile gc`.
    freed_bytes: u64,
    /// It is there until `spile gc` has merged it with this image, its only child.
    child_path: Option<String>,
    /// Why `spile gc` does not merge it now, if that is so.
    waits_because: Option<String>,
    /// The manifest of the backup that it was, which is gone, too.
    manifest_path: Option<String>,
}

/// Refuses a disk that a server has.
pub(super) fn refuse_served(disk: &Path) -> Result<()> {
    match find(disk)? {
        Some((server, name)) => {
            let what = format!("{} is served as {name:?} by {}", disk.display(), server.display());
            Err(Error::new(ErrorKind::Busy, what).hint(format!("spile detach {name}, or end the server")))
        }
        None => Ok(()),
    }
}

/// The locator of a disk that must be a file.
pub(super) fn file_at(disk: &Path) -> Result<Locator> {
    match existing(disk)? {
        at @ Locator::Path(_) => Ok(at),
        _ => Err(Error::new(ErrorKind::Unsupported, "this is done to files only").at_path(disk)),
    }
}

/// Runs `spile revert`.
///
/// # Errors
/// When the disk or the snapshot cannot be opened, or the disk is in use or has a job that is not finished; the storage's. The disk is
/// as it was then.
pub fn run(args: &RevertArgs) -> Result<Exit> {
    refuse_served(&args.disk)?;
    let snapshot = with_extension_of(&args.snapshot, &args.disk);
    let (at, base) = (file_at(&args.disk)?, file_at(&snapshot)?);
    if is_same_file(&args.disk, &snapshot) {
        let error = Error::new(ErrorKind::InvalidInput, "this is the disk itself").at_path(&snapshot);
        return Err(error.hint("name the snapshot that it is to go back to; `spile tree` shows them"));
    }
    let read = args.parents.read_only(None);
    let write = OpenOptions { format: args.format, read_only: false, ..read.clone() };
    let keep = args.keep.clone();
    let path = |path: PathBuf| path.display().to_string();
    let (disk, snapshot, kept) = on_engine(move || async move { go_back(&at, &base, &read, &write, keep).await })?;
    let reverted = Reverted { path: path(disk), snapshot_path: path(snapshot), kept_path: kept.map(path) };
    if args.json {
        return print_json(&reverted).map(|()| Exit::Ok);
    }
    say(format_args!("{} holds what {} holds", reverted.path, reverted.snapshot_path));
    reverted.kept_path.iter().for_each(|kept| say(format_args!("{kept}: what it held before")));
    Ok(Exit::Ok)
}

/// The snapshot that is meant by `snapshot`: its path, or that without the extension of the disk; what is only a name is looked for beside the
/// disk, too.
fn with_extension_of(snapshot: &Path, disk: &Path) -> PathBuf {
    let extension = disk.extension().unwrap_or_default().to_string_lossy().into_owned();
    let beside = is_only_name(snapshot).then(|| disk.with_file_name(snapshot));
    let places = std::iter::once(snapshot.to_owned()).chain(beside);
    let mut found = places.flat_map(|place| [place.clone(), longer(&place, &extension)]).filter(|path| path.exists());
    found.next().unwrap_or_else(|| snapshot.to_owned())
}

/// `path` with one more extension.
fn longer(path: &Path, extension: &str) -> PathBuf {
    let mut longer = path.as_os_str().to_owned();
    longer.push(".");
    longer.push(extension);
    longer.into()
}

fn is_only_name(path: &Path) -> bool {
    path.parent() == Some(Path::new(""))
}

/// The image that is meant by `image`: its path, or that without its extension; or what a disk that is served has as a parent called so.
///
/// # Errors
/// `InvalidInput` when several are called so.
fn named_image(image: &Path) -> Result<PathBuf> {
    if std::fs::symlink_metadata(image).is_ok() || find(image).is_ok() {
        return Ok(image.to_owned());
    }
    let extensions = Format::ALL.iter().map(|format| format.about().name);
    let mut found: Vec<_> = extensions.map(|extension| longer(image, extension)).filter(|path| path.exists()).collect();
    if found.is_empty() && is_only_name(image) {
        found = served_parents(&image.to_string_lossy());
    }
    match &found[..] {
        [] => Ok(image.to_owned()),
        [one] => Ok(one.clone()),
        several => {
            let names: Vec<_> = several.iter().map(|path| path.display().to_string()).collect();
            let what = format!("several images are called {}", image.display());
            Err(Error::new(ErrorKind::InvalidInput, what).hint(format!("say which: {}", names.join(", "))))
        }
    }
}

/// The parents called `name` of the disks that servers of this host have.
fn served_parents(name: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for (server, disks) in discovery::servers().unwrap_or_default() {
        for disk in disks {
            let detail: Result<DiskDetail> = ask(&server, "GET", &path_of(&disk.name), LOOK_PATIENCE);
            let layers = detail.map(|detail| detail.layers).unwrap_or_default();
            let parents = layers.into_iter().skip(1).map(|layer| PathBuf::from(layer.path));
            found.extend(parents.filter(|path| is_called(path, name)));
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// True when both paths lead to one file.
pub(super) fn is_same_file(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| path.metadata().ok().map(|stat| FileId::of(&stat));
    id(one).is_some() && id(one) == id(other)
}

/// Returns the paths of the disk, of the snapshot, and of what was kept.
async fn go_back(
    at: &Locator,
    base: &Locator,
    read: &OpenOptions,
    write: &OpenOptions,
    keep: Option<String>,
) -> Result<(PathBuf, PathBuf, Option<PathBuf>)> {
    let files = HostFiles::new(OsFiles::new(CacheMode::Page).without_locks(write.no_lock));
    let graph = disks::open_keeping(CacheMode::Page, at, write).await?;
    let disk = graph.handles()[0].path().to_owned();
    // Open until the disk is its child: nobody can delete it or write to it before.
    let base = disks::open(CacheMode::Page, base, read).await?;
    let layers = base.layers();
    Host::new().refuse_unfit(&layers[0].path).await?;
    let real = |folder: &PathBuf| folder.canonicalize().map_err(|e| Error::io("find", e)).at_path(folder);
    let allowed = write.allow_parents.iter().map(real).collect::<Result<Vec<_>>>()?;
    check_new_child(disk.parent().unwrap_or(Path::new("/")), &layers, &allowed)?;
    let (image, parent) = (&layers[0], Some(new_parent(&disk, &layers[0])?));
    note_child(image, &disk)?;
    let new = NewImage { parent, ..NewImage::new(image.virtual_bytes) };
    let checkpoints = Checkpoints::none(Access { no_lock: write.no_lock, ..Access::default() });
    checkpoints.open(&graph).await?;
    note_difference(&checkpoints, &graph, &base).await?;
    let went = go_back_over(&files, &graph, &base, &new, (write, keep, &allowed)).await;
    drop(base);
    // The disk's image is the one that its path names now. Where that cannot be opened, everything counts as changed.
    drop(graph);
    if let Ok(now) = disks::open_keeping(CacheMode::Page, at, write).await {
        checkpoints.close(&now).await;
    }
    Ok((disk, layers[0].path.clone(), went?))
}

/// What the disk loses and what it gets counts as changed since its checkpoints: all that is in the images that only one of both has.
async fn note_difference(checkpoints: &Checkpoints, graph: &Graph<HostStore>, base: &Graph<HostStore>) -> Result<()> {
    let (from, to) = (graph.layers(), base.layers());
    let shared = from.iter().rev().zip(to.iter().rev()).take_while(|(one, other)| one.path == other.path).count();
    // A disk that becomes shorter, and longer again later, has lost what lay there.
    let (size, was) = (base.size_bytes().min(graph.size_bytes()), graph.size_bytes());
    checkpoints.note_extent(Extent::from_range(size..was)).await?;
    checkpoints.note_layers(graph, from.len() - shared).await?;
    checkpoints.note_layers(base, to.len() - shared).await
}

/// Has the disk `graph` go back, and keeps what it holds under the name that is given. Returns where that is.
async fn go_back_over(
    files: &HostFiles,
    graph: &Graph<HostStore>,
    base: &Graph<HostStore>,
    new: &NewImage,
    (write, keep, allowed): (&OpenOptions, Option<String>, &[PathBuf]),
) -> Result<Option<PathBuf>> {
    let layers = base.layers();
    match keep {
        // First a snapshot: whatever ends this process, the disk holds what it held or what it goes back to.
        Some(name) => {
            let plan = Plan::new(&graph.layers(), write.format, &name, allowed)?;
            let (made, over) = prepare(files, Arc::new(OsEnv), graph, &plan).await?.into_parts();
            match go_back_from(files, &over, &layers, new, write.format).await {
                Ok(()) => Ok(Some(made.plan().snapshot().to_owned())),
                Err(error) => Err(taken_back(error, files, &made).await),
            }
        }
        None => revert(files, Arc::new(OsEnv), graph, &layers, new, write.format).await.map(|()| None),
    }
}

/// Has a disk go back whose leaf `over` is new: what the disk held is a snapshot.
async fn go_back_from(
    files: &HostFiles,
    over: &Graph<HostStore>,
    base: &[LayerInfo],
    new: &NewImage,
    given: Option<Format>,
) -> Result<()> {
    over.seal_parents().await?;
    revert(files, Arc::new(OsEnv), over, base, new, given).await
}

/// Takes back the snapshot of what the disk held. The error says it when that fails, too.
async fn taken_back(error: Error, files: &HostFiles, made: &Made<HostStore>) -> Error {
    match take_back(files, made).await {
        Ok(()) => error,
        Err(left) => {
            let kept = made.plan().snapshot().display();
            error.hint(format!("what the disk held is in {kept}, which could not be taken back ({left})"))
        }
    }
}

/// Runs `spile delete`.
///
/// # Errors
/// `Denied`, naming the child, for an image that another one needs, or when not all images of its folder could be asked; `Busy` for one that
/// is open, or has a job that is not finished; the storage's.
pub fn delete(args: &DeleteArgs) -> Result<Exit> {
    let image = named_image(&args.disk)?;
    if args.undo {
        return keep(args, &image);
    }
    refuse_served(&image)?;
    let at = file_at(&image)?;
    // Children are asked for below.
    let options = OpenOptions { read_only: false, write_parent: true, ..args.parents.read_only(args.format) };
    let used_bytes = disks::used_bytes(&image).unwrap_or(0);
    let (disk, format) = (image, args.format);
    let (path, child, why) = on_engine(move || async move {
        let (host, path) = (Host::new(), whole_path(&disk).await?);
        let list = async || host.beside(&path).await;
        let family = Family::ask(&host.tools(), &list().await?).await;
        if let [child] = family.children_of(&path)? {
            delete::mark(&host.tools(), &path, format, child, list).await?;
            let why = match verdict(&host.tools(), &family, &path).await? {
                Verdict::Waits { why, .. } => Some(why),
                Verdict::Merge { .. } | Verdict::Stale => None,
            };
            return Ok((path, Some(child.clone()), why));
        }
        let removed = match disks::open_keeping(CacheMode::Page, &at, &options).await {
            Ok(graph) => delete::remove(&host.tools(), &graph, list).await?,
            // The image itself is there: it is a parent that is not.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                delete::remove_orphan(&host.tools(), &path, format, list).await?
            }
            Err(error) => return Err(error),
        };
        Ok((removed, None, None))
    })?;
    let freed_bytes = if child.is_some() { 0 } else { used_bytes };
    let manifest_path = if child.is_some() { None } else { remove_manifest(&path)? };
    let child_path = child.map(|child| child.display().to_string());
    let path = path.display().to_string();
    let deleted = Deleted { path, is_kept: false, freed_bytes, child_path, waits_because: why, manifest_path };
    if args.json {
        return print_json(&deleted).map(|()| Exit::Ok);
    }
    match (&deleted.child_path, &deleted.waits_because) {
        (Some(_), Some(why)) => {
            say(format_args!("deleted {}: it waits for spile gc, which can do nothing now", deleted.path));
            say(format_args!("  {why}"));
        }
        (Some(child), None) => {
            say(format_args!("deleted {}: spile gc merges {child}, its only child, with it", deleted.path));
        }
        (None, _) => say(format_args!("deleted {}: {} are free", deleted.path, format_size(freed_bytes))),
    }
    Ok(Exit::Ok)
}

/// Runs `spile delete --undo`.
fn keep(args: &DeleteArgs, image: &Path) -> Result<Exit> {
    let disk = image.to_owned();
    let path = on_engine(move || async move {
        let path = whole_path(&disk).await?;
        delete::unmark(&Host::new().tools(), &path).await.map(|()| path.display().to_string())
    })?;
    if args.json {
        return print_json(&Deleted { path, is_kept: true, ..Deleted::default() }).map(|()| Exit::Ok);
    }
    say(format_args!("{path} is kept"));
    Ok(Exit::Ok)
}

/// Removes the manifest beside the backup at `path`, which is gone: it tells of nothing else. Returns its path, if there was one.
fn remove_manifest(path: &Path) -> Result<Option<String>> {
    let manifest = Manifest::path_of(path);
    match std::fs::remove_file(&manifest) {
        Ok(()) => Ok(Some(manifest.display().to_string())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            Err(Error::io("the backup is deleted, but its manifest cannot be removed", error).at_path(&manifest))
        }
    }
}

/// The path of an image without links in its folders.
///
/// # Errors
/// `InvalidInput` when the image itself is a link: other images may name it by that. The system's.
async fn whole_path(image: &Path) -> Result<PathBuf> {
    let path = OsFiles::default().canonical(image).await?;
    let is_link = std::fs::symlink_metadata(image).is_ok_and(|stat| stat.is_symlink());
    match is_link {
        true => {
            let what = format!("it is a link to {}, and images beside either may need it", path.display());
            let hint = "look which images name it (spile tree, in both folders), then delete the file that it leads to";
            Err(Error::new(ErrorKind::InvalidInput, what).at_path(image).hint(hint))
        }
        false => Ok(path),
    }
}
