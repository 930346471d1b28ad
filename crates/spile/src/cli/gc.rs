//! `spile gc`: finishes what was begun with the disks of a folder, removes what was half-made, and merges what was deleted.
//!
//! Nothing goes that is not proven to be of no use. A snapshot is its user's: it goes only when `spile delete` has named it
//! ([`Gone`]), it is the same image still, and its only child is the same, too. What has been done is read off the folder in the end.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Args;
use nix::sys::signal::Signal;
use serde::Serialize;
use serde_json::json;
use spile_core::{Disk as _, Error, ErrorKind, Files as _, Locator, OpenMode, Result, ResultExt};
use spile_engine::OsEnv;
use spile_image::layer::Identity;
use spile_image::{Format, Graph, LayerInfo, OpenOptions, describe};
use spile_life::gone::Gone;
use spile_life::jobs::{Note, Plan, Wishes};
use spile_life::{merge, names};
use spile_node::Node;
use spile_server::checkpoints::Checkpoints;
use spile_server::family;
use spile_server::jobs::{self, Access};
use spile_server::serving::api::client::{CHANGE_PATIENCE, LOOK_PATIENCE, ask, call, typed};
use spile_server::serving::api::types::{Failure, Job};
use spile_server::serving::jobs::{DiskJob, What};
use spile_store::{CacheMode, HostFiles, HostStore, OsFiles};
use utoipa::ToSchema;

use super::coalesce::parse_rate;
use super::snapshot::find;
use super::{Exit, on_engine, print_json, say};
use crate::disks;
use crate::log::{complain, printable};
use crate::signals::EndSignals;
use crate::units::format_size;

/// Finish, remove and merge what nobody needs in a folder of disks
///
/// Merges and flattens that were broken off are finished, half-made files of snapshots that were broken off are removed, and images that
/// `spile delete` has marked are merged with their only child. Disks that a server has are worked on by it, while guests go on.
/// Several disks are worked on at a time. A kill or Ctrl-C loses nothing; the same command goes on.
#[derive(Debug, Args)]
pub struct GcArgs {
    /// The folder
    dir: PathBuf,
    /// For each disk, move no more than this in a second [default: as fast as guests leave room for]
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    rate: Option<u64>,
    /// Only say what there is to do
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What `gc` has found.
#[derive(Debug, Serialize, ToSchema)]
pub struct Collected {
    /// Each thing.
    found: Vec<Found>,
}

/// One thing that nobody needs, or that is not finished.
#[derive(Debug, Serialize, ToSchema)]
pub struct Found {
    /// `deleted`: an image that was deleted while it had a child. `job`: a merge or flatten that is not finished. `half-made`: a file of a
    /// snapshot that was broken off. `stale-note`: a note of an image that is gone.
    kind: String,
    /// The image, or the file.
    path: String,
    /// The disk that it belongs to; `null` where there is none that could be worked on.
    disk_path: Option<String>,
    /// The most space that is free when it is done, in bytes.
    frees_at_most_bytes: u64,
    /// `found` in a dry run, `done`, `waits`, or `failed`.
    state: String,
    /// Why it waits, or has failed.
    reason: Option<String>,
}

/// How many disks are worked on at a time.
const AT_ONCE: usize = 4;
/// How often is looked how far a server's job is.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Runs `spile gc`.
///
/// # Errors
/// When the folder cannot be read; when something that was begun has failed, after all the rest was done.
pub fn run(args: &GcArgs) -> Result<Exit> {
    let signals = EndSignals::block()?;
    let folder = args.dir.canonicalize().map_err(|e| Error::io("cannot be found", e)).at_path(&args.dir)?;
    let mut found = look(&folder)?;
    let ending = Ending::default();
    if !args.dry_run {
        let told = ending.clone();
        signals.on_first(move |_| told.end());
        let failures = work_on_all(&found, args.rate, &ending);
        found.iter_mut().for_each(|item| item.judge(&failures));
    }
    let has_failed = found.iter().any(|item| item.state == "failed");
    let collected = Collected { found };
    match args.json {
        true => print_json(&collected)?,
        false => show(&folder, &collected),
    }
    if ending.is_told() {
        complain(format_args!("{}: gc was ended; the same command goes on", args.dir.display()));
        return Ok(Exit::Ended(Signal::SIGINT));
    }
    match has_failed {
        true => Err(Error::new(ErrorKind::Io, "not all that was begun could be done").at_path(&folder)),
        false => Ok(Exit::Ok),
    }
}

fn show(folder: &Path, collected: &Collected) {
    for item in &collected.found {
        let what = match item.kind.as_str() {
            "deleted" => "was deleted, and is merged with its child",
            "job" => "a merge or flatten that is not finished",
            "half-made" => "left by a snapshot that was broken off",
            _ => "says nothing any more",
        };
        let frees = match item.frees_at_most_bytes {
            0 => String::new(),
            bytes => format!(", frees {} at most", format_size(bytes)),
        };
        let reason = item.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
        say(format_args!("{}: {what}{frees}: {}{reason}", printable(&item.path), item.state));
    }
    if collected.found.is_empty() {
        say(format_args!("{}: nothing to do", folder.display()));
    }
}

/// Whether the command was told to end, and the jobs that are to hear of it.
#[derive(Clone, Default)]
struct Ending {
    is_told: Arc<AtomicBool>,
    jobs: Arc<Mutex<Vec<Arc<DiskJob>>>>,
}

impl Ending {
    fn end(&self) {
        self.is_told.store(true, Ordering::SeqCst);
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.iter().for_each(|job| job.job().stop());
    }

    fn is_told(&self) -> bool {
        self.is_told.load(Ordering::SeqCst)
    }

    /// The job ends when the command is told to. One that begins after that ends at once.
    fn add(&self, job: &Arc<DiskJob>) {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).push(job.clone());
        if self.is_told() {
            job.job().stop();
        }
    }
}

impl Found {
    fn new(kind: &str, path: &Path, disk: Option<&Path>) -> Self {
        let text = |path: &Path| path.display().to_string();
        Self {
            kind: kind.to_owned(),
            path: text(path),
            disk_path: disk.map(text),
            frees_at_most_bytes: 0,
            state: "found".to_owned(),
            reason: None,
        }
    }

    /// Says what has become of it: by what is left in the folder, and by what has failed with its disk.
    fn judge(&mut self, failures: &BTreeMap<String, String>) {
        let failure = self.disk_path.as_ref().and_then(|disk| failures.get(disk));
        let state = match (Path::new(&self.path).exists(), failure) {
            (false, _) => "done",
            (true, Some(failure)) => {
                self.reason = Some(failure.clone());
                "failed"
            }
            (true, None) => "waits",
        };
        if state == "done" {
            self.reason = None;
        }
        self.state = state.to_owned();
    }
}

/// What the folder holds that there is something to do for.
fn look(folder: &Path) -> Result<Vec<Found>> {
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io("list", e)).at_path(folder)?;
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    on_engine(move || async move {
        let mut found = Vec::new();
        for path in paths {
            let Some(disk) = names::disk_of(&path) else { continue };
            if path == names::new_leaf(&disk) {
                found.push(half_made(&path, &disk));
            } else if path == names::job(&disk) {
                found.push(Found::new("job", &path, Some(&disk)));
            } else if names::is_gone(&path) {
                found.push(deleted(&path, &disk).await?);
            }
        }
        Ok(found)
    })
}

fn half_made(path: &Path, disk: &Path) -> Found {
    let mut found = Found::new("half-made", path, disk.exists().then_some(disk));
    found.frees_at_most_bytes = disks::used_bytes(path).unwrap_or(0);
    if !disk.exists() {
        found.reason = Some("its disk is gone: nobody can tell whether the file is of use".to_owned());
    }
    found
}

async fn deleted(note: &Path, image: &Path) -> Result<Found> {
    Ok(match verdict(image).await? {
        Verdict::Merge(leaf) => {
            let used = |path: &Path| disks::used_bytes(path).unwrap_or(0);
            let mut found = Found::new("deleted", image, Some(&leaf));
            found.frees_at_most_bytes = used(image).min(used(&leaf));
            found
        }
        Verdict::Stale => Found::new("stale-note", note, Some(image)),
        Verdict::Waits(reason, leaf) => Found { reason: Some(reason), ..Found::new("deleted", image, leaf.as_deref()) },
    })
}

/// What is to be done with an image that was deleted while it had a child.
enum Verdict {
    /// Its only child, the leaf of this disk, is merged into it.
    Merge(PathBuf),
    /// The image is gone, or is another one by now.
    Stale,
    /// Nothing, for this reason. The disk is the one whose end may change that.
    Waits(String, Option<PathBuf>),
}

/// Judges the image, which has a note.
async fn verdict(image: &Path) -> Result<Verdict> {
    let files = HostFiles::new(OsFiles::new(CacheMode::Page).without_locks(true));
    let identity = match described(image, None).await {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Verdict::Stale),
        described => described?.identity,
    };
    let Some(gone) = Gone::read(&files, image).await? else {
        let why = "the note beside it is not whole, or of another version: delete it again";
        return Ok(Verdict::Waits(why.to_owned(), None));
    };
    if identity != Some(gone.identity) {
        return Ok(Verdict::Stale);
    }
    let children = family::children_of(image).await?;
    let shown = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match &children[..] {
        // The child may have moved, or cannot be read now: that nothing is found proves nothing.
        [] => {
            let why = "no child of it is in this folder any more: delete it again if nobody needs it";
            Ok(Verdict::Waits(why.to_owned(), None))
        }
        [child] if described(child, None).await?.identity != Some(gone.child) => {
            let why =
                format!("its child was another one when it was deleted, and is {} now: delete it again", shown(child));
            Ok(Verdict::Waits(why, None))
        }
        [child] => match &family::children_of(child).await?[..] {
            [] => Ok(Verdict::Merge(child.clone())),
            [next, ..] => {
                let why = format!("its child {} is a parent itself, and keeps its name", shown(child));
                Ok(Verdict::Waits(why, Some(leaf_above(next).await?)))
            }
        },
        several => {
            let names: Vec<_> = several.iter().map(|child| shown(child)).collect();
            Ok(Verdict::Waits(format!("it has several children now: {}", names.join(", ")), None))
        }
    }
}

/// A leaf that needs the image.
async fn leaf_above(image: &Path) -> Result<PathBuf> {
    let mut leaf = image.to_owned();
    for _ in 0..spile_image::MAX_LAYERS {
        match family::children_of(&leaf).await?.into_iter().next() {
            Some(child) => leaf = child,
            None => break,
        }
    }
    Ok(leaf)
}

/// What there is to know of one image without its parents.
async fn described(image: &Path, format: Option<Format>) -> Result<LayerInfo> {
    let files = OsFiles::new(CacheMode::Page).without_locks(true);
    Ok(describe(&files, Arc::new(OsEnv), Locator::from(image), format).await?.layer)
}

/// Does all that was found. Returns what has failed, by the path of the disk.
fn work_on_all(found: &[Found], rate: Option<u64>, ending: &Ending) -> BTreeMap<String, String> {
    let disks: BTreeSet<_> = found.iter().filter_map(|item| item.disk_path.clone()).collect();
    let (queue, failures) = (Mutex::new(disks.into_iter()), Mutex::new(BTreeMap::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while !ending.is_told() {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some(disk) = next else { break };
                    if let Err(error) = work_on(Path::new(&disk), rate, ending) {
                        let error = error.to_string();
                        failures.lock().unwrap_or_else(PoisonError::into_inner).insert(disk, error);
                    }
                }
            });
        }
    });
    failures.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Does what there is to do for one disk.
fn work_on(disk: &Path, rate: Option<u64>, ending: &Ending) -> Result<()> {
    let at = disk.to_owned();
    if on_engine(move || async move { tidy(&at).await })? {
        return Ok(());
    }
    match find(disk)? {
        Some((server, name)) => by_server(disk, &server, &name, rate, ending),
        None => {
            let (at, ending) = (disk.to_owned(), ending.clone());
            on_engine(move || async move { by_itself(&at, rate, &ending).await })
        }
    }
}

/// Removes a note that says nothing. True when nothing else is to be done.
async fn tidy(image: &Path) -> Result<bool> {
    let files = HostFiles::new(OsFiles::new(CacheMode::Page));
    if files.canonical(&names::gone(image)).await.is_err() {
        return Ok(false);
    }
    match verdict(image).await? {
        Verdict::Stale => {}
        Verdict::Merge(_) | Verdict::Waits(..) => return Ok(false),
    }
    Gone::remove(&files, image).await?;
    Ok(!image.exists())
}

/// The deleted parent that the disk at `disk`, a leaf, is to be merged into.
async fn deleted_parent(disk: &Path) -> Result<Option<PathBuf>> {
    let files = OsFiles::new(CacheMode::Page).without_locks(true);
    let Some(format) = Format::from_extension(disk) else { return Ok(None) };
    let store = spile_core::Files::open(&files, &disk.into(), OpenMode::ReadOnly).await?;
    let Some(named) = format.named_parent(&store).await? else { return Ok(None) };
    drop(store);
    let folder = disk.parent().unwrap_or(Path::new("/"));
    for name in named.names {
        let Ok(parent) = files.canonical(&folder.join(name)).await else { continue };
        if files.canonical(&names::gone(&parent)).await.is_err() {
            return Ok(None);
        }
        let is_meant = matches!(verdict(&parent).await?, Verdict::Merge(leaf) if leaf == disk);
        return Ok(is_meant.then_some(parent));
    }
    Ok(None)
}

/// Has the server of a disk merge it into its deleted parents, one after the other.
fn by_server(disk: &Path, server: &Path, name: &str, rate: Option<u64>, ending: &Ending) -> Result<()> {
    loop {
        let at = disk.to_owned();
        let Some(parent) = on_engine(move || async move { deleted_parent(&at).await })? else { return Ok(()) };
        let order = json!({ "disk": name, "kind": "coalesce", "into": parent, "limit_bytes_per_s": rate });
        let mut job: Job = typed(call(server, "POST", "/v1/jobs", Some(&order), CHANGE_PATIENCE)?)?;
        while matches!(job.state.as_str(), "running" | "paused") {
            if job.state == "paused" {
                let error = Error::new(ErrorKind::Busy, format!("its job {} was paused", job.id));
                return Err(error.at_path(disk).hint(format!("spile job {} resume", job.id)));
            }
            // The server goes on with it.
            if ending.is_told() {
                return Ok(());
            }
            std::thread::sleep(LOOK_EVERY);
            job = ask(server, "GET", &format!("/v1/jobs/{}", job.id), LOOK_PATIENCE)?;
        }
        match (&job.error, job.state.as_str()) {
            (Some(error), _) => return Err(Failure { error: error.clone() }.into_error()),
            (None, "done") => {}
            (None, state) => return Err(Error::new(ErrorKind::Shutdown, format!("the merge was {state}"))),
        }
        on_engine(move || async move { tidy(&parent).await })?;
    }
}

/// Does what there is to do for a disk that no server has. Opening it removes what is half-made.
async fn by_itself(disk: &Path, rate: Option<u64>, ending: &Ending) -> Result<()> {
    let graph = disks::open_keeping(CacheMode::Direct, &Locator::from(disk), &OpenOptions::default()).await?;
    let checkpoints = Checkpoints::none(Access::default());
    checkpoints.open(&graph).await?;
    let node = Node::new(graph);
    let done = finish_and_merge(&node, disk, rate, ending).await;
    let graph = node.graph().await;
    let closed = node.close().await;
    if closed.is_ok() {
        checkpoints.close(&graph).await;
    }
    done.and(closed)
}

async fn finish_and_merge(
    node: &Node<Graph<HostStore>>,
    disk: &Path,
    rate: Option<u64>,
    ending: &Ending,
) -> Result<()> {
    let left = jobs::left(&*node.graph().await).await?;
    if let Some(Note { plan, wishes }) = left {
        refuse_other(&plan, wishes.is_paused).map_err(|error| error.at_path(disk))?;
        run_job(node, plan, rate.or(wishes.limit_bytes_per_s), ending).await?;
    }
    while let Some(parent) = deleted_parent(disk).await? {
        let graph = node.graph().await;
        if graph.handles().get(1).is_none_or(|layer| layer.path() != parent) {
            return Ok(());
        }
        let merge = Plan::Coalesce(merge::plan(&graph, None)?);
        drop(graph);
        run_job(node, merge, rate, ending).await?;
        tidy(&parent).await?;
    }
    Ok(())
}

/// Refuses to go on with what its user has paused, and with what takes a disk elsewhere.
fn refuse_other(plan: &Plan, is_paused: bool) -> Result<()> {
    let error = match plan {
        _ if is_paused => Error::new(ErrorKind::Busy, "the job was paused").hint("serve the disk, and resume the job"),
        Plan::Coalesce(_) | Plan::Flatten => return Ok(()),
        other => Error::new(ErrorKind::Busy, format!("a {} of the disk was broken off", other.kind()))
            .hint("serve the disk, and it goes on; or begin the same once more"),
    };
    Err(error)
}

async fn run_job(
    node: &Node<Graph<HostStore>>,
    plan: Plan,
    limit_bytes_per_s: Option<u64>,
    ending: &Ending,
) -> Result<()> {
    let wishes = Wishes { limit_bytes_per_s, ..Wishes::default() };
    let job = DiskJob::new(What::Images(plan.clone()), wishes);
    ending.add(&job);
    jobs::run(node, Access::default(), job.job(), &plan).await
}

/// Marks `image` as one that goes when it can be merged with `child`, the only one that it has.
///
/// # Errors
/// `Unsupported` when that could never be done; the storage's.
pub(super) async fn mark(image: &Path, format: Option<Format>, child: &Path) -> Result<()> {
    let (parent, leaf) = (described(image, format).await?, described(child, None).await?);
    let refuse = |why: String| {
        let hint =
            format!("spile flatten {0}, and then delete this; or merge {0} by hand: spile coalesce", child.display());
        Err(Error::new(ErrorKind::Unsupported, why).at_path(image).hint(hint))
    };
    let (Some(identity), Some(child_identity)) = (parent.identity, leaf.identity) else {
        return refuse(format!("a {} image cannot take the name of its child {}", parent.format, child.display()));
    };
    if parent.format != leaf.format {
        return refuse(format!("a {} image cannot take the name of {}", parent.format, child.display()));
    }
    if parent.virtual_bytes > leaf.virtual_bytes {
        return refuse(format!(
            "it is longer than its child {}, which hides what lies behind its end",
            child.display()
        ));
    }
    let files = HostFiles::new(OsFiles::new(CacheMode::Page));
    let child: Identity = child_identity;
    Gone { identity, child }.write(&files, image).await
}
