//! `spile snapshot` and `spile clone`: of disks that are served and of those that nobody uses.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use serde_json::json;
use spile_core::{Code, Disk as _, Error, ErrorKind, Locator, Result, ResultExt};
use spile_engine::OsEnv;
use spile_image::create::NewImage;
use spile_image::{Format, Graph, OpenOptions};
use spile_life::set::Set;
use spile_life::snapshot::{self, Made, Plan};
use spile_server::checkpoints::Checkpoints;
use spile_server::far_children::HostNotes;
use spile_server::host::Host;
use spile_server::jobs::Access;
use spile_server::parents::check_place;
use spile_server::serving::api::client::{CHANGE_PATIENCE, LOOK_PATIENCE, ask, call, typed};
use spile_server::serving::api::discovery;
use spile_server::serving::api::types::{DiskDetail, DiskSnapshot, Layer, NewSnapshot, Snapshot};
use spile_store::{CacheMode, HostFiles, HostStore, OsFiles};
use utoipa::ToSchema;

use super::control::path_of;
use super::create::{Child, check_new_name};
use super::options::Preallocate;
use super::revert::is_same_file;
use super::{Exit, ParentArgs, existing, on_engine, parse_format, print_json, printable, say};
use crate::disks;
use crate::log::complain;
use crate::units::format_us;

/// Make a snapshot of one disk, or of several at one point in time
///
/// What the disk holds now becomes the snapshot NAME of this disk, in a file DISK-NAME beside it with its extension, and never changes again. Other disks in
/// the folder may have snapshots of the same name. The disk goes on under its own path, as the snapshot's child. Guests that use it go on meanwhile, and no request fails. A disk that
/// nobody serves is locked for a moment.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// The disks: by their names on a server, or by their paths. Several disks that are served must be one server's
    #[arg(required = true, value_name = "DISK")]
    disks: Vec<PathBuf>,
    /// The snapshot's name. One that begins with the disk's name and a dash, or ends with its extension, is the name of the file
    #[arg(long)]
    name: String,
    /// The format of a disk that is not served, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    #[command(flatten)]
    parents: ParentArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Make a new disk that begins with what another one holds now
///
/// The new disk is a child: it takes the space of what is written to it. A parent that is served for writing gets a snapshot
/// first, of which the new disk is the child, and goes on. Any other parent is the new disk's parent itself, and cannot be
/// written by Spile from then on.
#[derive(Debug, Args)]
pub struct CloneArgs {
    /// The disk to begin with: by its name on a server, or by its path
    parent: PathBuf,
    /// The file to make; it must not exist
    child: PathBuf,
    /// The name of the snapshot of a parent that is served [default: before-CHILD]
    #[arg(long)]
    name: Option<String>,
    /// The parent's format, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    #[command(flatten)]
    parents: ParentArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// A new disk over another one.
#[derive(Debug, Serialize, ToSchema)]
pub struct Cloned {
    /// The new disk.
    path: String,
    /// What it is a child of.
    parent_path: String,
    /// The snapshot that was made for it, when its parent is served for writing.
    snapshot: Option<Snapshot>,
}

/// Runs `spile snapshot`.
///
/// # Errors
/// When there is no such disk, the name is taken, the disk cannot have snapshots, or its storage fails; nothing has changed then.
pub fn run(args: &SnapshotArgs) -> Result<Exit> {
    let made = make(&args.disks, &args.name, args.format, &args.parents)?;
    if args.json {
        return print_json(&made).map(|()| Exit::Ok);
    }
    for DiskSnapshot { path, snapshot_path, .. } in &made.disks {
        let (snapshot_path, path) = (printable(snapshot_path), printable(path));
        say(format_args!("{snapshot_path}: what the disk held"));
        say(format_args!("{path} goes on as its child"));
    }
    if made.longest_stall_us > 0.0 {
        say(format_args!("requests waited for {} at most", format_us(made.longest_stall_us)));
    }
    made.trouble.iter().for_each(|trouble| say(format_args!("but {trouble}")));
    Ok(Exit::Ok)
}

/// Makes a snapshot by the disks' server, or of files that nobody serves.
fn make(paths: &[PathBuf], name: &str, format: Option<Format>, parents: &ParentArgs) -> Result<Snapshot> {
    let found: Vec<_> = paths.iter().map(|path| find(path)).collect::<Result<_>>()?;
    let served: Vec<_> = found.iter().flatten().collect();
    let Some((server, _)) = served.first() else {
        return offline(paths, name, format, parents);
    };
    if served.len() < paths.len() || served.iter().any(|(other, _)| other != server) {
        let what = "these disks are not all served by one server, and have no common point in time";
        return Err(Error::new(ErrorKind::InvalidInput, what).hint("make a snapshot of each by itself"));
    }
    let disks = served.iter().map(|(_, name)| name.clone()).collect();
    let order = json!(NewSnapshot { disks, name: name.to_owned() });
    typed(call(server, "POST", "/v1/snapshots", Some(&order), CHANGE_PATIENCE)?)
}

/// The server and the name of a disk that is served; `None` for a file that no server has. The control socket of a server with one disk
/// means that disk.
pub(super) fn find(disk: &Path) -> Result<Option<(PathBuf, String)>> {
    if discovery::is_socket(disk) {
        return match &discovery::disks_of(disk)?[..] {
            [one] => Ok(Some((disk.to_owned(), one.name.clone()))),
            _ => Err(Error::new(ErrorKind::InvalidInput, "this server has several disks, or none")
                .at_path(disk)
                .hint("name the disk; `spile ls` lists them")),
        };
    }
    let text = disk.to_string_lossy();
    match discovery::find_disk(&text) {
        Err(error) if error.kind() == ErrorKind::NotFound && disk.exists() => Ok(None),
        found => found.map(Some),
    }
}

/// A disk that nobody uses, open for writing.
struct Offline {
    graph: Graph<HostStore>,
    checkpoints: Checkpoints,
    plan: Plan,
}

/// A disk whose snapshot's files are in place, and its new graph.
type Ready = (Made<HostStore>, Graph<HostStore>, Checkpoints);

fn offline(paths: &[PathBuf], name: &str, format: Option<Format>, parents: &ParentArgs) -> Result<Snapshot> {
    for (number, path) in paths.iter().enumerate() {
        if paths[..number].iter().any(|other| is_same_file(other, path)) {
            let what = format!("the disk {} is named twice", path.display());
            return Err(Error::new(ErrorKind::InvalidInput, what));
        }
    }
    let options = OpenOptions { read_only: false, ..parents.read_only(format) };
    let named = |path: &PathBuf| {
        let at = existing(path)?;
        let name = snapshot::name_of_one(&disks::stem(&at), paths.len(), name);
        Ok((at, name))
    };
    let named: Vec<(Locator, String)> = paths.iter().map(named).collect::<Result<_>>()?;
    let names = paths.to_vec();
    on_engine(move || async move {
        let files = HostFiles::new(OsFiles::new(CacheMode::Page).without_locks(options.no_lock));
        let mut disks = Vec::new();
        for (at, name) in &named {
            disks.push(open(at, name, &options).await?);
        }
        let made = take(&files, disks).await?;
        let tell = |(made, path): (&Made<HostStore>, PathBuf)| told(made, &path);
        let disks: Vec<_> = made.iter().zip(names).map(tell).collect();
        Ok(Snapshot { snapshot_path: disks[0].snapshot_path.clone(), longest_stall_us: 0.0, disks, trouble: None })
    })
}

fn told(made: &Made<HostStore>, disk: &Path) -> DiskSnapshot {
    let text = |path: &Path| path.display().to_string();
    DiskSnapshot { disk: text(disk), path: text(made.plan().disk()), snapshot_path: text(made.plan().snapshot()) }
}

async fn open(at: &Locator, name: &str, options: &OpenOptions) -> Result<Offline> {
    let Locator::Path(path) = at else {
        let error = Error::new(ErrorKind::Unsupported, "only disks in files have snapshots");
        return Err(error.at_path(Path::new(&disks::label(at))));
    };
    let graph = disks::open_keeping(CacheMode::Page, at, options).await?;
    let checkpoints = Checkpoints::none(Access { no_lock: options.no_lock, ..Access::default() });
    checkpoints.open(&graph).await?;
    let allowed = options.allow_parents.iter().map(|folder| folder.canonicalize());
    let allowed: Vec<_> =
        allowed.collect::<std::io::Result<_>>().map_err(|e| Error::io("find a folder of parents", e)).at_path(path)?;
    snapshot::refuse_device(&graph)?;
    let plan = Plan::new(&graph.layers(), options.format, name, &allowed)?;
    Ok(Offline { graph, checkpoints, plan })
}

/// Makes the snapshots of all disks, or none, and closes the disks.
async fn take(files: &HostFiles, disks: Vec<Offline>) -> Result<Vec<Made<HostStore>>> {
    let snapshots: Vec<_> = disks.iter().map(|disk| disk.plan.snapshot().to_owned()).collect();
    let set = Set::begin(files, &snapshots).await?;
    let taken = take_all(files, disks).await;
    let ended = set.end(files, taken.is_ok()).await;
    let taken = taken?;
    ended.map_err(|error| {
        error.hint("the snapshots are whole; this note beside one says that they are not: remove it")
    })?;
    Ok(taken)
}

async fn take_all(files: &HostFiles, disks: Vec<Offline>) -> Result<Vec<Made<HostStore>>> {
    let mut ready: Vec<Ready> = Vec::new();
    for Offline { graph, checkpoints, plan } in disks {
        match snapshot::prepare(files, Arc::new(OsEnv), &HostNotes, &graph, &plan).await {
            Ok(prepared) => {
                let (made, graph) = prepared.into_parts();
                ready.push((made, graph, checkpoints));
            }
            Err(error) => {
                // What cannot be taken back is told beside the cause, and keeps no other disk from being taken back.
                for (made, ..) in &ready {
                    if let Err(left) = snapshot::take_back(files, made).await {
                        complain(format!("a snapshot that was made before is not taken back: {left}"));
                    }
                }
                return Err(error);
            }
        }
    }
    let (mut all, mut closed) = (Vec::new(), Ok(()));
    for (made, graph, checkpoints) in ready {
        let done = graph.close().await;
        if done.is_ok() {
            checkpoints.close(&graph).await;
        }
        closed = closed.and(done);
        all.push(made);
    }
    closed.map(|()| all)
}

/// Runs `spile clone`.
///
/// # Errors
/// As [`run`] and `spile create`.
pub fn clone(args: &CloneArgs) -> Result<Exit> {
    let format = Format::of(&args.child, None)?;
    if !format.about().has_parents {
        let error = Error::new(ErrorKind::InvalidInput, format!("a {format} disk has no parent, so it is no clone"));
        return Err(error
            .at_path(&args.child)
            .hint("give the new disk a name that ends in .vhd or .qcow2; or spile convert copies all"));
    }
    check_new_name(&args.child)?;
    if args.child.exists() {
        let error = Error::new(ErrorKind::Exists, "there is a file of this name already").at_path(&args.child);
        return Err(error.hint("choose another name"));
    }
    let snapshot = match find(&args.parent)? {
        Some((server, name)) if is_written(&server, &name)? => {
            // Before the snapshot: what can be refused leaves nothing.
            let disk: DiskDetail = ask(&server, "GET", &path_of(&name), LOOK_PATIENCE)?;
            let layers: Vec<_> = disk.layers.iter().map(|layer| Path::new(&layer.path)).collect();
            check_place(&args.child, &layers, &args.parents.allow_parents)?;
            args.refuse_data_file(&disk)?;
            Some(before(args)?)
        }
        Some(_) | None => None,
    };
    let parent =
        snapshot.as_ref().map_or_else(|| path_of_parent(&args.parent), |made| Ok((&made.snapshot_path).into()))?;
    let given = args.format.filter(|_| snapshot.is_none());
    let child = Child {
        path: args.child.clone(),
        format,
        size_bytes: None,
        like: NewImage::new(0),
        data_file: None,
        takes: Preallocate::Off,
        parent: parent.clone(),
        options: args.parents.read_only(given),
    };
    on_engine(move || async move { child.create().await }).map_err(|error| match &snapshot {
        Some(made) => {
            let (what, hint) =
                (&made.snapshot_path, error.hint_text().map(|hint| format!("{hint}; ")).unwrap_or_default());
            let (child, more) = (args.child.display(), args.more());
            let hint = format!(
                "{hint}the snapshot {what} was made and stays: `spile clone {what} {child}{more}` goes on with it"
            );
            error.hint(hint)
        }
        None if error.is(Code::FormatLimit) => {
            error.hint("a vhd ends at 2040 GiB: give the clone a name that ends in .qcow2")
        }
        None => error,
    })?;
    let cloned = Cloned { path: args.child.display().to_string(), parent_path: parent.display().to_string(), snapshot };
    if args.json {
        return print_json(&cloned).map(|()| Exit::Ok);
    }
    say(format_args!("{}: begins with what {} holds", cloned.path, cloned.parent_path));
    if cloned.snapshot.is_none() {
        say(format_args!("{} is a parent now: Spile does not write to it any more", cloned.parent_path));
    }
    Ok(Exit::Ok)
}

impl CloneArgs {
    /// What a command has to say, too, that goes on with the snapshot of this one.
    fn more(&self) -> &'static str {
        if self.parents.allow_data_file { " --allow-data-file" } else { "" }
    }

    /// Refuses a disk of a server whose data lie in another file, which this command was not told to follow to.
    fn refuse_data_file(&self, disk: &DiskDetail) -> Result<()> {
        if self.parents.allow_data_file {
            return Ok(());
        }
        let of = |layer: &Layer| Some((PathBuf::from(&layer.path), parse_format(&layer.format).ok()?));
        let images: Vec<_> = disk.layers.iter().filter_map(of).collect();
        let found = on_engine(move || async move { Ok(Host::new().data_file_of(&images).await) })?;
        let Some((image, data)) = found else { return Ok(()) };
        let what = format!("the image keeps its data in another file, {}", data.display());
        let error = Error::new(ErrorKind::Denied, what).at_path(&image);
        Err(error.hint("say --allow-data-file now and whenever the clone is opened"))
    }
}

/// True for a disk that its server may write.
fn is_written(server: &Path, name: &str) -> Result<bool> {
    Ok(discovery::disks_of(server)?.iter().any(|disk| disk.name == *name && !disk.read_only))
}

/// The path of a disk that may be named by its name on a server.
fn path_of_parent(parent: &Path) -> Result<PathBuf> {
    match find(parent)? {
        Some((server, name)) => {
            let disks = discovery::disks_of(&server)?;
            Ok(disks
                .into_iter()
                .find(|disk| disk.name == name)
                .map_or_else(|| parent.to_owned(), |disk| disk.path.into()))
        }
        None => Ok(parent.to_owned()),
    }
}

/// The snapshot that a clone of a served disk is the child of.
fn before(args: &CloneArgs) -> Result<Snapshot> {
    let stem = |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let name = args.name.clone().unwrap_or_else(|| format!("before-{}", stem(&args.child)));
    let made = make(std::slice::from_ref(&args.parent), &name, args.format, &args.parents).map_err(|error| {
        let Some(there) = error.path().filter(|_| error.kind() == ErrorKind::Exists) else { return error };
        let (there, child, more) = (there.display(), args.child.display(), args.more());
        let hint = format!(
            "if an earlier clone was broken off, `spile clone {there} {child}{more}` goes on with its snapshot; or choose another name: --name"
        );
        error.hint(hint)
    })?;
    match &made.trouble {
        Some(trouble) => {
            let error = Error::new(ErrorKind::Busy, format!("its snapshot was made, but {trouble}"));
            Err(error.at_path(Path::new(&made.snapshot_path)).hint("clone the snapshot itself later"))
        }
        None => Ok(made),
    }
}
