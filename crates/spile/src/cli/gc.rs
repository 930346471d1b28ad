//! `spile gc`: finishes what was begun with the disks of a folder, removes what was half-made, and merges what was deleted.
//!
//! Nothing goes that is not proven to be of no use. A snapshot is its user's: it goes only when `spile delete` has named it
//! ([`Gone`]), it is the same image still, and its only child is the same, too. What has been done is read off the folder in the end.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Args;
use nix::sys::signal::Signal;
use serde::Serialize;
use serde_json::json;
use spile_core::{Disk as _, Error, ErrorKind, Locator, Result, ResultExt};
use spile_image::{Graph, OpenOptions};
use spile_life::gc::{self, Kind, Next, next_merge};
use spile_life::jobs::{Merged, Note, Plan, State, Wishes};
use spile_node::Node;
use spile_server::checkpoints::Checkpoints;
use spile_server::family;
use spile_server::host::Host;
use spile_server::jobs::{self, Access};
use spile_server::serving::api::client::{CHANGE_PATIENCE, LOOK_PATIENCE, ask, call, typed};
use spile_server::serving::api::types::{Failure, Job, JobList};
use spile_server::serving::jobs::{DiskJob, What};
use spile_server::serving::offline::OwnJobs;
use spile_store::{CacheMode, HostStore};
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
    /// Let images of these disks keep their data in other files, which they name themselves and which lie in the folder
    #[arg(long)]
    allow_data_file: bool,
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
    /// snapshot that was broken off. `stale-note`: a note of an image that is gone. `second-name`: one more name of an image, left by a merge that was
    /// broken off.
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
    let own = if args.dry_run { OwnJobs::unseen() } else { OwnJobs::open("gc") };
    let ending = Ending::new(own);
    if args.dry_run {
        found.iter_mut().for_each(Found::note_server);
    } else {
        let told = ending.clone();
        signals.on_first(move |_| told.end());
        let how = How { rate: args.rate, allow_data_file: args.allow_data_file };
        let troubles = work_on_all(&found, how, &ending);
        found.iter_mut().for_each(|item| item.judge(&troubles));
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
            "deleted" => "deleted",
            "job" => "of work that is not finished",
            "half-made" => "left by a snapshot that was broken off",
            "second-name" => "one more name of an image, left by a merge that was broken off",
            _ => "a note that says nothing any more",
        };
        let name = Path::new(&item.path).file_name().unwrap_or_default().to_string_lossy();
        let frees = match item.frees_at_most_bytes {
            0 => String::new(),
            bytes => format!(", frees {} at most", format_size(bytes)),
        };
        say(format_args!("{}: {what}{frees}: {}", printable(&name), item.state));
        item.reason.iter().for_each(|reason| say(format_args!("  {reason}")));
    }
    if collected.found.is_empty() {
        say(format_args!("{}: nothing to do", folder.display()));
    }
}

/// Whether the command was told to end, and the jobs that are to hear of it. Callers see and steer those, too.
#[derive(Clone)]
struct Ending {
    is_told: Arc<AtomicBool>,
    jobs: Arc<Mutex<Vec<Arc<DiskJob>>>>,
    own: Arc<OwnJobs>,
}

impl Ending {
    fn new(own: OwnJobs) -> Self {
        Self { is_told: Arc::default(), jobs: Arc::default(), own: Arc::new(own) }
    }

    fn end(&self) {
        self.is_told.store(true, Ordering::SeqCst);
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.iter().for_each(|job| job.job().stop());
    }

    fn is_told(&self) -> bool {
        self.is_told.load(Ordering::SeqCst)
    }

    /// The job ends when the command is told to. One that begins after that ends at once.
    fn add(&self, job: &Arc<DiskJob>, disk: &Path) {
        self.own.add(job, &disks::stem(&disk.into()), &disk.display().to_string());
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).push(job.clone());
        if self.is_told() {
            job.job().stop();
        }
    }
}

impl Found {
    fn new(found: gc::Found) -> Self {
        let used = |path: &Path| disks::used_bytes(path).unwrap_or(0);
        // Only the server of a disk that is served can merge the images that it has open.
        let is_served = |disk: &&PathBuf| matches!(find(disk), Ok(Some(_)));
        let served =
            if found.others.is_empty() { None } else { found.disk.iter().chain(&found.others).find(is_served) };
        let disk = served.or(found.disk.as_ref()).cloned();
        let (kind, frees_at_most_bytes) = match found.kind {
            Kind::Deleted => ("deleted", found.child.as_deref().map_or(0, |child| used(&found.path).min(used(child)))),
            Kind::Job => ("job", 0),
            Kind::HalfMade => ("half-made", used(&found.path)),
            Kind::StaleNote => ("stale-note", 0),
            Kind::SecondName => ("second-name", 0),
        };
        let text = |path: PathBuf| path.display().to_string();
        Self {
            kind: kind.to_owned(),
            path: text(found.path),
            disk_path: disk.map(text),
            frees_at_most_bytes,
            state: "found".to_owned(),
            reason: found.why,
        }
    }

    /// A job of a disk that a server has is under way there, and was not broken off.
    fn note_server(&mut self) {
        let disk = self.disk_path.as_ref().filter(|_| self.kind == "job" && self.reason.is_some());
        if disk.is_some_and(|disk| matches!(find(Path::new(disk)), Ok(Some(_)))) {
            self.reason = Some("the disk's server has it: `spile jobs` shows how far it is".to_owned());
        }
    }

    /// Says what has become of it: by what is left in the folder, and by what was met at its disk.
    fn judge(&mut self, troubles: &BTreeMap<String, Trouble>) {
        let is_gone = || matches!(std::fs::symlink_metadata(&self.path), Err(e) if e.kind() == io::ErrorKind::NotFound);
        let (state, reason) = match self.disk_path.as_ref().and_then(|disk| troubles.get(disk)) {
            _ if is_gone() => ("done", None),
            Some(Trouble::Failed(why)) => ("failed", Some(why.clone())),
            Some(Trouble::Waits(why) | Trouble::InUse(why)) => {
                ("waits", Some(self.reason.take().unwrap_or_else(|| why.clone())))
            }
            None => ("waits", Some(self.reason.take().unwrap_or_else(|| "it has changed meanwhile".to_owned()))),
        };
        (self.state, self.reason) = (state.to_owned(), reason);
    }
}

/// How disks are worked on.
#[derive(Clone, Copy)]
struct How {
    /// No more than this is moved in a second.
    rate: Option<u64>,
    /// Their images may keep their data in other files.
    allow_data_file: bool,
}

/// What keeps a disk from being worked on to the end.
enum Trouble {
    /// It waits, and nothing is wrong.
    Waits(String),
    /// Somebody uses the disk or its images, or does something else with them.
    InUse(String),
    /// It has failed.
    Failed(String),
}

/// What the folder holds that there is something to do for.
fn look(folder: &Path) -> Result<Vec<Found>> {
    let folder = folder.to_owned();
    on_engine(move || async move {
        let paths = family::files_in(&folder).await?;
        let host = Host::new();
        Ok(gc::look(&host.tools(), &paths).await.into_iter().map(Found::new).collect())
    })
}

/// Does all that was found. Returns what was met, by the path of the disk.
fn work_on_all(found: &[Found], how: How, ending: &Ending) -> BTreeMap<String, Trouble> {
    let paths = |is_note: bool| {
        let items = found.iter().filter(move |item| matches!(&*item.kind, "stale-note" | "second-name") == is_note);
        items.filter_map(|item| item.disk_path.clone()).collect::<BTreeSet<_>>()
    };
    let mut troubles = BTreeMap::new();
    for image in paths(true) {
        let at = PathBuf::from(&image);
        let tidied = on_engine(move || async move { Host::new().tidy(&at).await });
        troubles.extend(tidied.err().map(|error| (image, Trouble::Failed(error.to_string()))));
    }
    let (queue, troubles) = (Mutex::new(paths(false).into_iter()), Mutex::new(troubles));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some(disk) = next else { break };
                    let trouble = work_on(Path::new(&disk), how, ending);
                    let mut troubles = troubles.lock().unwrap_or_else(PoisonError::into_inner);
                    troubles.extend(trouble.map(|trouble| (disk, trouble)));
                }
            });
        }
    });
    let mut troubles = troubles.into_inner().unwrap_or_else(PoisonError::into_inner);
    // Disks that share images were in each other's way.
    let in_use = troubles.iter().filter(|(_, trouble)| matches!(trouble, Trouble::InUse(_)));
    let in_use: Vec<_> = in_use.map(|(disk, _)| disk.clone()).collect();
    for disk in in_use {
        troubles.remove(&disk);
        troubles.extend(work_on(Path::new(&disk), how, ending).map(|trouble| (disk, trouble)));
    }
    troubles
}

/// Does what there is to do for one disk. Returns what was met.
fn work_on(disk: &Path, how: How, ending: &Ending) -> Option<Trouble> {
    let ended = || Some(Trouble::Waits("gc was ended before; the same command goes on".to_owned()));
    if ending.is_told() {
        return ended();
    }
    let (done, of_server) = match find(disk) {
        Ok(Some((server, name))) => (by_server(disk, &server, &name, how.rate, ending), true),
        Ok(None) => {
            let (at, told) = (disk.to_owned(), ending.clone());
            let done = on_engine(move || async move { by_itself(&at, how, &told).await });
            ending.own.leave(&disk.display().to_string());
            (done, false)
        }
        Err(error) => (Err(error), false),
    };
    match done {
        Ok(()) if of_server => Some(Trouble::Waits("the disk's server goes on with it".to_owned())),
        Ok(()) => None,
        Err(error) if error.kind() == ErrorKind::Shutdown && ending.is_told() => ended(),
        // Who has ended it does not want it to begin again.
        Err(error) if error.kind() == ErrorKind::Shutdown => Some(Trouble::Waits(error.to_string())),
        Err(error) if error.kind() == ErrorKind::Busy => Some(Trouble::InUse(error.to_string())),
        Err(error) => Some(Trouble::Failed(error.to_string())),
    }
}

/// Has the server of a disk merge it into its deleted parents, one after the other, and its other images into theirs.
fn by_server(disk: &Path, server: &Path, name: &str, rate: Option<u64>, ending: &Ending) -> Result<()> {
    if let Some((next, running)) = begun_merge(disk, server, name)? {
        let job = running.map_or_else(|| merge_by(server, name, disk, &next, rate), Ok)?;
        if !follow(server, job, disk, ending)? {
            return Ok(());
        }
        on_engine(move || async move { Host::new().tidy(&next.parent).await })?;
    }
    let (mut left_out, mut in_use) = (Vec::new(), Ok(()));
    loop {
        let (at, out) = (disk.to_owned(), left_out.clone());
        let next = on_engine(move || async move {
            let host = Host::new();
            let next = next_merge(&host.tools(), &host.beside(&at).await?, &at, &out).await?;
            match &next {
                Some(next) if !gc::begin_merge(&host.tools(), &next.parent).await? => Ok(None),
                _ => Ok(next),
            }
        })?;
        let Some(next) = next else { return in_use };
        let job = match running(server, name, &next.child)? {
            // An earlier gc has begun it.
            Some(job) => job,
            None => match merge_by(server, name, disk, &next, rate) {
                // Another disk has it, or somebody reads it. What lies deeper may be free.
                Err(error) if error.kind() == ErrorKind::Busy && next.child != disk => {
                    left_out.push(next.parent);
                    in_use = Err(error);
                    continue;
                }
                begun => begun?,
            },
        };
        if !follow(server, job, disk, ending)? {
            return Ok(());
        }
        on_engine(move || async move { Host::new().tidy(&next.parent).await })?;
    }
}

/// Has the server of the disk `name`, which lies at `disk`, begin a merge.
fn merge_by(server: &Path, name: &str, disk: &Path, next: &Next, rate: Option<u64>) -> Result<Job> {
    let order = json!({
        "disk": name, "kind": "coalesce", "layer": (next.child != disk).then_some(&next.child), "into": next.parent,
        "keep_name": true, "limit_bytes_per_s": rate,
    });
    typed(call(server, "POST", "/v1/jobs", Some(&order), CHANGE_PATIENCE)?)
}

/// The merge of which the disk has a note, and the job of its server that works on it. There is none when the server has given a merge of a layer in the
/// middle up, since the disk had that no more: the parent is to take its name still.
fn begun_merge(disk: &Path, server: &Path, name: &str) -> Result<Option<(Next, Option<Job>)>> {
    let noted = || -> Result<Option<Merged>> {
        let at = disk.to_owned();
        let left = on_engine(move || async move { Note::look(Host::new().tools().asking, &at).await })?;
        Ok(match left {
            Some(Note { plan: Plan::Coalesce(merged), .. }) => Some(merged),
            _ => None,
        })
    };
    let next = |Merged { path, parent, .. }: Merged| Next { child: path, parent };
    let Some(merged) = noted()? else { return Ok(None) };
    if let Some(job) = running(server, name, &merged.path)? {
        return Ok(Some((next(merged), Some(job))));
    }
    // The job may have ended since the note was read. It removes the note before it is done.
    Ok(noted()?.filter(|left| left.keeps_name).map(|left| (next(left), None)))
}

/// The merge of the layer at `child` of the disk `name` that its server has begun and not ended.
fn running(server: &Path, name: &str, child: &Path) -> Result<Option<Job>> {
    let jobs: JobList = ask(server, "GET", "/v1/jobs", LOOK_PATIENCE)?;
    let is_it = |layer: &Option<String>| layer.as_ref().is_some_and(|layer| Path::new(layer) == child);
    Ok(jobs
        .jobs
        .into_iter()
        .find(|job| job.is_under_way() && job.disk == name && job.kind == "coalesce" && is_it(&job.layer_path)))
}

/// Waits until the server's job is done. False when this command was told to end before: the server goes on.
fn follow(server: &Path, mut job: Job, disk: &Path, ending: &Ending) -> Result<bool> {
    while job.is_under_way() {
        if job.state == "paused" {
            let error = Error::new(ErrorKind::Busy, format!("its job {} was paused", job.id));
            return Err(error.at_path(disk).hint(format!("spile job {} resume", job.id)));
        }
        if ending.is_told() {
            return Ok(false);
        }
        std::thread::sleep(LOOK_EVERY);
        job = ask(server, "GET", &format!("/v1/jobs/{}", job.id), LOOK_PATIENCE)?;
    }
    match (&job.error, job.state.as_str()) {
        (Some(error), _) => Err(Failure { error: error.clone() }.into_error()),
        (None, "done") => Ok(true),
        // Somebody has cancelled it, or the server ends and the next one goes on.
        (None, state) => Err(Error::new(ErrorKind::Shutdown, format!("its job {} was {state}", job.id)).at_path(disk)),
    }
}

/// Does what there is to do for a disk that no server has. Opening it removes what is half-made.
async fn by_itself(disk: &Path, How { rate, allow_data_file }: How, ending: &Ending) -> Result<()> {
    let options = OpenOptions { allow_data_file, ..OpenOptions::default() };
    let graph = disks::open_keeping(CacheMode::Direct, &Locator::from(disk), &options).await?;
    let checkpoints = Checkpoints::none(Access::default());
    checkpoints.open(&graph).await?;
    let node = Node::new(graph);
    let host = Host::new();
    let run = async |plan, wishes: Wishes| {
        run_job((&node, disk), &checkpoints, plan, rate.or(wishes.limit_bytes_per_s), ending).await
    };
    let done = gc::collect(&host.tools(), &node, async || host.beside(disk).await, run).await;
    let graph = node.graph().await;
    let closed = node.close().await;
    if closed.is_ok() {
        checkpoints.close(&graph).await;
    }
    done.and(closed)
}

async fn run_job(
    (node, disk): (&Node<Graph<HostStore>>, &Path),
    checkpoints: &Checkpoints,
    plan: Plan,
    limit_bytes_per_s: Option<u64>,
    ending: &Ending,
) -> Result<()> {
    let wishes = Wishes { limit_bytes_per_s, ..Wishes::default() };
    let job = DiskJob::new(What::Images(plan.clone()), wishes);
    ending.add(&job, disk);
    let done = jobs::run(node, checkpoints, Access::default(), job.job(), &plan).await;
    match job.job().state() {
        State::Cancelled => {
            let error = Error::new(ErrorKind::Shutdown, format!("its job {} was cancelled", job.id())).at_path(disk);
            Err(error.hint("what it has done stays done"))
        }
        _ => done,
    }
}
