//! `spile revert` and `spile delete`: disks go back to a snapshot, or go.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use serde_json::json;
use spile_core::{Error, ErrorKind, Files as _, Locator, Result, ResultExt, Store as _};
use spile_engine::OsEnv;
use spile_image::layer::Layer as _;
use spile_image::{Format, Graph, OpenOptions};
use spile_life::delete;
use spile_life::gc::{Family, Verdict, verdict};
use spile_life::merge::is_called;
use spile_life::revert::taken_back;
use spile_life::snapshot::{Plan, prepare};
use spile_server::backup::Manifest;
use spile_server::checkpoints::Checkpoints;
use spile_server::far_children::HostNotes;
use spile_server::host::Host;
use spile_server::jobs::Access;
use spile_server::revert::Ground;
use spile_server::serving::api::client::{CHANGE_PATIENCE, LOOK_PATIENCE, ask, call, typed};
use spile_server::serving::api::discovery;
use spile_server::serving::api::types::{DiskDetail, NewRevert, Reverted};
use spile_store::{CacheMode, FileId, HostFiles, HostStore, OsFiles};
use utoipa::ToSchema;

use super::control::path_of;
use super::snapshot::find;
use super::snapshots::{Of, are_several};
use super::{Exit, ParentArgs, existing, on_engine, parse_format, print_json, say};
use crate::disks;
use crate::units::format_size;

/// Have a disk go back to what a snapshot holds
///
/// The disk's path names a new, empty child of the snapshot then, in one step. What was written to the disk since is lost, or kept
/// under a name. A disk may stay served, but its virtual machine has to be off: a guest would go on with what it has read before.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("rest").required(true)))]
pub struct RevertArgs {
    /// The disk: by its name on a server, or by its path
    disk: PathBuf,
    /// The image to go back to: a snapshot of this disk by its name, or any image by its path
    snapshot: PathBuf,
    /// Lose what was written to the disk since its last snapshot
    #[arg(long, group = "rest")]
    discard: bool,
    /// Keep what the disk holds now under this name, as `spile snapshot --name` does
    #[arg(long, value_name = "NAME", group = "rest")]
    keep: Option<String>,
    /// Also while guests or clients are connected to the disk: say it only if nothing in the guest has it mounted or open
    #[arg(long)]
    in_use: bool,
    /// The format of a disk that is not served, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
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
    /// The image, by its path or file name; or with SNAPSHOT the disk that this is of
    disk: PathBuf,
    /// A snapshot of DISK, by the name that `spile snapshot --name` gave it: that is deleted, and not the disk
    snapshot: Option<PathBuf>,
    /// Keep an image after all that was marked, if `spile gc` has not begun to merge it
    #[arg(long, conflicts_with = "format")]
    undo: bool,
    /// The image's format, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    #[command(flatten)]
    parents: ParentArgs,
    /// Remove the file that holds the image's data, too, where that is another one; with --allow-data-file
    #[arg(long)]
    with_data_file: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
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
    /// The file that held its data, which is gone, too.
    data_path: Option<String>,
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
    let reverted = match find(&args.disk)? {
        Some((server, name)) => served(args, &server, &name)?,
        None => offline(args)?,
    };
    if args.json {
        return print_json(&reverted).map(|()| Exit::Ok);
    }
    say(format_args!("{} holds what {} holds", reverted.path, reverted.snapshot_path));
    reverted.kept_path.iter().for_each(|kept| say(format_args!("{kept}: what it held before")));
    reverted.trouble.iter().for_each(|trouble| say(format_args!("but {trouble}")));
    Ok(Exit::Ok)
}

/// Has the disk `name` of `server` go back.
fn served(args: &RevertArgs, server: &Path, name: &str) -> Result<Reverted> {
    let format = args.format.map(|_| "--format".into());
    if let Some(option) = format.into_iter().chain(args.parents.arguments()).next() {
        let what = format!("{} is for a disk that no server has, and {name:?} is served", option.to_string_lossy());
        let hint =
            "the disk's server opens images with its own options: start it with this one, or detach the disk first";
        return Err(Error::new(ErrorKind::InvalidInput, what).hint(hint));
    }
    let detail: DiskDetail = ask(server, "GET", &path_of(name), LOOK_PATIENCE)?;
    let leaf = detail.layers.first().map_or_else(|| PathBuf::from(&detail.disk.path), |leaf| leaf.path.clone().into());
    let snapshot = snapshot_of(&args.snapshot, &leaf, &parents_of(&detail))?;
    let snapshot = std::path::absolute(&snapshot).map_err(|e| Error::io("find", e)).at_path(&snapshot)?;
    let order = json!(NewRevert {
        snapshot_path: snapshot.display().to_string(),
        keep: args.keep.clone(),
        discard: args.discard,
        in_use: args.in_use,
    });
    typed(call(server, "POST", &format!("{}/revert", path_of(name)), Some(&order), CHANGE_PATIENCE)?)
}

/// Has a disk go back that nobody serves.
fn offline(args: &RevertArgs) -> Result<Reverted> {
    let at = file_at(&args.disk)?;
    let parents = parents_in(&at, &args.parents.read_only(args.format));
    let base = file_at(&snapshot_of(&args.snapshot, &args.disk, &parents)?)?;
    let read = args.parents.read_only(None);
    let write = OpenOptions { format: args.format, read_only: false, ..read.clone() };
    let keep = args.keep.clone();
    let path = |path: PathBuf| path.display().to_string();
    let (disk, snapshot, kept) = on_engine(move || async move { go_back(&at, &base, &read, &write, keep).await })?;
    Ok(Reverted { path: path(disk), snapshot_path: path(snapshot), kept_path: kept.map(path), trouble: None })
}

/// The image that a disk whose leaf lies at `disk`, over `parents`, is to go back to.
fn snapshot_of(snapshot: &Path, disk: &Path, parents: &[PathBuf]) -> Result<PathBuf> {
    let found = Of { disk, parents }.find(snapshot, || named_image(snapshot, Some(disk), || Ok(Vec::new())))?;
    if is_same_file(disk, &found) {
        let error = Error::new(ErrorKind::InvalidInput, "this is the disk itself").at_path(&found);
        return Err(error.hint("name the snapshot that it is to go back to; `spile tree` shows them"));
    }
    Ok(found)
}

/// The parents of a disk that no server has. None where it cannot be opened: whoever opens it next says why.
pub(super) fn parents_in(at: &Locator, options: &OpenOptions) -> Vec<PathBuf> {
    // Their names are looked at only: another program may have the disk open.
    let (at, options) = (at.clone(), OpenOptions { read_only: true, no_lock: true, ..options.clone() });
    let layers = on_engine(move || async move { Ok(disks::open(CacheMode::Page, &at, &options).await?.layers()) });
    layers.map_or_else(|_| Vec::new(), |layers| layers.into_iter().skip(1).map(|layer| layer.path).collect())
}

/// The image that `spile delete` is to delete.
fn image_of(args: &DeleteArgs) -> Result<PathBuf> {
    if let Some(snapshot) = &args.snapshot {
        return match find(&args.disk)? {
            Some((server, name)) => {
                let detail: DiskDetail = ask(&server, "GET", &path_of(&name), LOOK_PATIENCE)?;
                snapshot_of(snapshot, Path::new(&detail.disk.path), &parents_of(&detail))
            }
            None => {
                let parents = parents_in(&file_at(&args.disk)?, &args.parents.read_only(args.format));
                snapshot_of(snapshot, &args.disk, &parents)
            }
        };
    }
    // Disks that are served by this name are refused later.
    match is_image(&args.disk) || matches!(find(&args.disk), Ok(Some(_))) {
        true => Ok(args.disk.clone()),
        false => named_image(&args.disk, None, served_parents),
    }
}

/// `path` with one more extension.
fn longer(path: &Path, extension: &str) -> PathBuf {
    let mut longer = path.as_os_str().to_owned();
    longer.push(".");
    longer.push(extension);
    longer.into()
}

/// The image that is meant by `image`: its path; or, when it is only a name, an image that is called so, with or without its extension, in this folder
/// or beside `disk`, if one is given; or when there is none, one of what `parents` returns that is called so. An extension that is left out is that of the
/// disk.
///
/// # Errors
/// `InvalidInput` when several are called so.
fn named_image(image: &Path, disk: Option<&Path>, parents: impl FnOnce() -> Result<Vec<PathBuf>>) -> Result<PathBuf> {
    let is_name = image.parent() == Some(Path::new(""));
    let of_disk = disk.and_then(Path::extension).map(|extension| extension.to_string_lossy().into_owned());
    let extensions = of_disk.map_or_else(
        || Format::ALL.iter().map(|format| format.about().name.to_owned()).collect(),
        |extension| vec![extension],
    );
    let beside = disk.filter(|_| is_name).map(|disk| disk.with_file_name(image));
    let mut found: Vec<PathBuf> = Vec::new();
    for place in std::iter::once(image.to_owned()).chain(beside) {
        // The name as it was said goes before longer ones.
        let longer = extensions.iter().map(|extension| longer(&place, extension));
        let there: Vec<_> = match is_image(&place) {
            true => vec![place],
            false => longer.filter(|path| is_image(path)).collect(),
        };
        for path in there {
            if !found.iter().any(|other| is_same_file(other, &path)) {
                found.push(path);
            }
        }
    }
    if found.is_empty() && is_name {
        let name = image.to_string_lossy();
        found = parents()?.into_iter().filter(|path| is_called(path, path, &name)).collect();
        found.sort_unstable();
        found.dedup();
    }
    match &found[..] {
        [] => Ok(image.to_owned()),
        [one] => Ok(one.clone()),
        several => Err(are_several(&image.to_string_lossy(), several)),
    }
}

/// True for what can be an image: a file or a block device, or a link to one, which may lead nowhere.
pub(super) fn is_image(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|stat| !stat.is_dir())
}

/// The parents of all disks that servers of this host have.
///
/// # Errors
/// When a server does not say what it has: an image of the name that is looked for may be its.
fn served_parents() -> Result<Vec<PathBuf>> {
    let mut parents = Vec::new();
    for disk in discovery::all_disks()? {
        let asked = ask::<DiskDetail>(Path::new(&disk.server), "GET", &path_of(&disk.name), LOOK_PATIENCE);
        match asked {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            detail => parents.extend(parents_of(&detail?)),
        }
    }
    Ok(parents)
}

fn parents_of(disk: &DiskDetail) -> Vec<PathBuf> {
    disk.layers.iter().skip(1).map(|layer| PathBuf::from(&layer.path)).collect()
}

/// True when both paths lead to one file.
pub(super) fn is_same_file(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| path.metadata().ok().map(|stat| FileId::of(&stat));
    id(one).is_some() && id(one) == id(other)
}

/// Has a disk that nobody uses go back. Returns the paths of the disk, of the snapshot, and of what was kept.
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
    let ground = Ground::open(CacheMode::Page, &disk, base, read).await?;
    let snapshot = ground.base.handles()[0].path().to_owned();
    let checkpoints = Checkpoints::none(Access { no_lock: write.no_lock, ..Access::default() });
    checkpoints.open(&graph).await?;
    let turn = checkpoints.note_difference(&graph, &ground.base).await?;
    let went = go_back_over(&files, &graph, &ground, write.format, keep).await;
    drop((turn, ground));
    // The disk's image is the one that its path names now. Where that cannot be opened, everything counts as changed.
    drop(graph);
    if let Ok(now) = disks::open_keeping(CacheMode::Page, at, write).await {
        checkpoints.close(&now).await;
    }
    Ok((disk, snapshot, went?))
}

/// Has the disk `graph` go back, and keeps what it holds under the name that is given. Returns where that is.
async fn go_back_over(
    files: &HostFiles,
    graph: &Graph<HostStore>,
    ground: &Ground,
    given: Option<Format>,
    keep: Option<String>,
) -> Result<Option<PathBuf>> {
    let Some(name) = keep else {
        return ground.back(files, given).revert(graph).await.map(|()| None);
    };
    // First a snapshot: whatever ends this process, the disk holds what it held or what it goes back to.
    let plan = Plan::new(&graph.layers(), given, &name, &ground.allowed)?;
    let (made, over) = prepare(files, Arc::new(OsEnv), &HostNotes, graph, &plan).await?.into_parts();
    let back = async {
        over.seal_parents().await?;
        ground.back(files, given).revert(&over).await
    };
    match back.await {
        Ok(()) => Ok(Some(made.plan().snapshot().to_owned())),
        Err(error) => Err(taken_back(error, files, &made).await),
    }
}

/// Runs `spile delete`.
///
/// # Errors
/// `Denied`, naming the child, for an image that another one needs, or when not all images of its folder could be asked; `Busy` for one that
/// is open, or has a job that is not finished; the storage's.
pub fn delete(args: &DeleteArgs) -> Result<Exit> {
    let image = image_of(args)?;
    if args.undo {
        return keep(args, &image);
    }
    refuse_served(&image)?;
    let at = file_at(&image)?;
    // Children are asked for below.
    let options =
        OpenOptions { read_only: false, write_parent: true, write_moved: true, ..args.parents.read_only(args.format) };
    let (disk, format, with_data_file) = (image, args.format, args.with_data_file);
    let Gone { path, data, freed_bytes, child, why } = on_engine(move || async move {
        let (host, path) = (Host::new(), whole_path(&disk).await?);
        let list = async || host.beside(&path).await;
        let family = Family::ask(&host.tools(), &list().await?).await;
        let children = family.children_of(&path)?;
        // Who has it open does not matter then.
        if let [child, _, ..] = children {
            return Err(delete::needed(&path, child));
        }
        if let [child] = children {
            delete::mark(&host.tools(), &path, format, child, list).await?;
            let why = match verdict(&host.tools(), &family, &path).await? {
                Verdict::Waits { why, .. } => Some(why),
                Verdict::Merge { .. } | Verdict::Stale => None,
            };
            return Ok(Gone { path, data: None, freed_bytes: 0, child: Some(child.clone()), why });
        }
        let mut freed_bytes = disks::used_bytes(&path).unwrap_or(0);
        let (path, data) = match disks::open_keeping(CacheMode::Page, &at, &options).await {
            Ok(graph) => {
                let image = graph.handles()[0].image();
                if !std::ptr::eq(image.store(), image.data_store()) {
                    freed_bytes += disks::used_bytes(image.data_store().path()).unwrap_or(0);
                }
                delete::remove(&host.tools(), &graph, with_data_file, list).await?
            }
            // The image itself is there: it is a parent that is not.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                (delete::remove_orphan(&host.tools(), &path, format, list).await?, None)
            }
            Err(error) => return Err(error),
        };
        Ok(Gone { path, data, freed_bytes, child: None, why: None })
    })?;
    let manifest_path = if child.is_some() { None } else { remove_manifest(&path)? };
    let child_path = child.map(|child| child.display().to_string());
    let path = path.display().to_string();
    let data_path = data.map(|data| data.display().to_string());
    let deleted =
        Deleted { path, is_kept: false, freed_bytes, child_path, waits_because: why, manifest_path, data_path };
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
        (None, _) => {
            let data = deleted.data_path.map(|data| format!(" and {data}")).unwrap_or_default();
            say(format_args!("deleted {}{data}: {} are free", deleted.path, format_size(freed_bytes)));
        }
    }
    Ok(Exit::Ok)
}

/// What a delete has removed, or has marked.
struct Gone {
    path: PathBuf,
    /// The file that held its data.
    data: Option<PathBuf>,
    freed_bytes: u64,
    /// The image is there until it is merged with this one.
    child: Option<PathBuf>,
    /// Why that does not happen now.
    why: Option<String>,
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
