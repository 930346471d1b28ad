//! Jobs on the images of the disks that are served. A disk has one job at a time; the last ones that have ended are kept for those who look.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use spile_core::{Env as _, Error, ErrorKind, Locator, Result};
use spile_engine::{Engine, OsEnv};
use spile_image::layer::Identity;
use spile_image::{Format, Graph};
use spile_life::jobs::{Job, Note, Plan, State as JobState, Wishes, which};
use spile_life::merge;
use spile_life::motion::{Move, Phase};
use spile_store::{CacheMode, HostFiles, HostStore, OsFiles};
use tokio::sync::oneshot;

use super::api::types::{self, FailureDetail, JobChange, NewJob};
use super::control::Event;
use super::disks::ServedDisk;
use super::events::{self, JobEnded};
use crate::checkpoints::Checkpoints;
use crate::jobs::{self, Access};

/// So many jobs that have ended are kept for each disk.
const KEPT: usize = 7;

/// What keeps jobs away while a disk goes back to a snapshot, in words.
const REVERT: &str = "a revert";

/// Keeps jobs of a disk from beginning until it is dropped.
pub struct Held(Option<Arc<DiskJobs>>);

impl Held {
    fn of(jobs: &Arc<DiskJobs>) -> Self {
        Self(Some(jobs.clone()))
    }

    /// Gives way to this job: nothing else comes in between.
    ///
    /// # Errors
    /// As [`DiskJobs::add`].
    fn give_way(mut self, new: Arc<DiskJob>) -> Result<()> {
        let Some(jobs) = self.0.take() else { return Ok(()) };
        let mut state = jobs.state();
        state.held_for = None;
        state.add(new)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(jobs) = &self.0 {
            jobs.state().held_for = None;
        }
    }
}

/// One job of a disk that is served.
pub struct DiskJob {
    /// Its name: no other job of this host has it.
    id: String,
    what: What,
    job: Job,
}

/// What a job does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// It changes the disk's images.
    Images(Plan),
    /// It copies what the disk held at a moment to this place.
    Backup(String),
}

impl What {
    /// It reads the disk, whatever becomes of its images meanwhile: a backup goes together with what changes them.
    fn only_reads(&self) -> bool {
        matches!(self, Self::Backup(_))
    }

    /// It changes the disk's images, and the disk stays where it is: a backup can begin meanwhile.
    fn stays_here(&self) -> bool {
        !matches!(self, Self::Backup(_) | Self::Images(Plan::Move(_)))
    }

    /// Its name in JSON and in tables.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Images(plan) => plan.kind(),
            Self::Backup(_) => "backup",
        }
    }
}

/// The jobs of one disk.
pub struct DiskJobs {
    access: Access,
    checkpoints: Arc<Checkpoints>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The disk is about to be closed: no job begins any more.
    is_closed: bool,
    /// What else changes the disk's images now: no job begins meanwhile.
    held_for: Option<&'static str>,
    /// The oldest first.
    jobs: Vec<Arc<DiskJob>>,
    /// The disk's name, and who hears that it has another graph.
    listener: Option<(String, mpsc::Sender<Event>)>,
}

impl State {
    /// Refuses a change of the images while there is another one, and a job that does not go together with one that is under way.
    fn check_free(&self, goes_with: fn(&What) -> bool) -> Result<()> {
        if let Some(what) = self.held_for {
            return Err(Error::new(ErrorKind::Busy, format!("the disk has {what}")).hint("try again when it has ended"));
        }
        let Some(other) = self.open().find(|job| !goes_with(&job.what)) else { return Ok(()) };
        let what = format!("the disk has a job already, {}: a {}", other.id, other.what.kind());
        Err(Error::new(ErrorKind::Busy, what).hint(format!("wait for it, or `spile job {} cancel`", other.id)))
    }

    /// The jobs that are not over.
    fn open(&self) -> impl Iterator<Item = &Arc<DiskJob>> {
        self.jobs.iter().filter(|job| !job.job.state().is_over())
    }

    /// Forgets the oldest of the jobs that are over, where they are too many. Whoever asks what is under way must find it here.
    fn forget_old(&mut self) {
        let is_over = |job: &Arc<DiskJob>| job.job.state().is_over();
        let mut too_many = self.jobs.iter().filter(|job| is_over(job)).count().saturating_sub(KEPT);
        self.jobs.retain(|job| {
            let goes = too_many > 0 && is_over(job);
            too_many -= usize::from(goes);
            !goes
        });
    }

    fn add(&mut self, new: Arc<DiskJob>) -> Result<()> {
        if self.is_closed {
            return Err(Error::new(ErrorKind::Shutdown, "the disk is closed"));
        }
        self.check_free(match &new.what {
            What::Backup(_) => What::stays_here,
            What::Images(Plan::Move(_)) => |_| false,
            What::Images(_) => What::only_reads,
        })?;
        self.jobs.push(new);
        self.forget_old();
        Ok(())
    }
}

impl DiskJobs {
    /// There is none yet for a disk that has these checkpoints, and whose files are opened by `access`.
    pub fn new(access: Access, checkpoints: Arc<Checkpoints>) -> Arc<Self> {
        Arc::new(Self { access, checkpoints, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How the disk's files are opened.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Forgets a job that was refused.
    pub fn forget(&self, id: &str) {
        self.state().jobs.retain(|job| job.id != id);
    }

    /// The jobs, the oldest first.
    pub fn list(&self) -> Vec<Arc<DiskJob>> {
        self.state().jobs.clone()
    }

    /// Begins what `new` asks for, and waits until it is known whether it is refused.
    ///
    /// # Errors
    /// `Busy` while the disk has a job; `InvalidInput` for a kind of job that there is not; why the job is refused.
    pub async fn begin(
        self: &Arc<Self>,
        engine: &Engine,
        disk: &Arc<ServedDisk>,
        new: &NewJob,
    ) -> Result<Arc<DiskJob>> {
        let Some(graph) = disk.graph_now() else { return Err(just_exchanged()) };
        let (leaf, format) = (graph.handles()[0].path().to_owned(), graph.handles()[0].image().format());
        let planned = (new.kind != "move").then(|| plan(&graph, new));
        drop(graph);
        let planned = match planned {
            Some(planned) => planned,
            // A move looks at folders, whose file system may not answer.
            None => {
                let new = new.clone();
                let planned = tokio::task::spawn_blocking(move || plan_move(&leaf, format, &new)).await;
                planned.map_err(|_| Error::new(ErrorKind::Shutdown, "the server ends"))?.map(Plan::Move)
            }
        };
        let plan = match planned {
            Err(error) if error.kind() == ErrorKind::NotFound => left_merge(engine, disk, new).await?.ok_or(error)?,
            planned => planned?,
        };
        if let (Some(into), Plan::Coalesce(merged)) = (&new.into, &plan)
            && merged.parent != Path::new(into)
        {
            let what = format!("the parent is {} by now, and not {into}", merged.parent.display());
            return Err(Error::new(ErrorKind::Busy, what).at_path(&merged.path).hint("look at the chain: spile show"));
        }
        let wishes = Wishes { limit_bytes_per_s: new.limit_bytes_per_s, ..Wishes::default() };
        let begun = self.spawn(engine, disk, Note::new(plan, wishes, None), None)?;
        match begun.job.accepted().await {
            Ok(()) => Ok(begun),
            Err(refused) => {
                self.forget(&begun.id);
                Err(refused)
            }
        }
    }

    /// Refuses to let a disk's guests go on while its copy, which they were to go on with on another host, may still become whole there.
    ///
    /// # Errors
    /// `Busy`, naming the job.
    pub fn refuse_open_copy(&self) -> Result<()> {
        let state = self.state();
        let is_copy = |job: &DiskJob| matches!(&job.what, What::Images(Plan::Move(to)) if to.stays);
        let is_open = |job: &&Arc<DiskJob>| !job.job.state().is_over() && is_copy(job);
        let Some(job) = state.jobs.iter().find(is_open) else { return Ok(()) };
        let what = match job.is_to_be_named() {
            true => "the other host may have the disk: it was told to give it its name, and has not answered",
            false => "the other host may have the disk: it was to be handed over, and how that ended is not known yet",
        };
        let hint = format!("`spile job {0} cancel` asks it: go on here only when the job is `cancelled` then", job.id);
        Err(Error::new(ErrorKind::Busy, what).hint(hint))
    }

    fn refuse_detach(&self, name: &str) -> Result<()> {
        let state = self.state();
        let Some(job) = state.open().next() else { return Ok(()) };
        let what = format!("the disk {name:?} has a job, {}: a {}", job.id, job.what.kind());
        Err(Error::new(ErrorKind::Busy, what)
            .hint(format!("wait for it, or `spile job {} cancel`; --force ends it with the disk", job.id)))
    }

    /// The last move of the disk that is done.
    pub fn moved(&self) -> Option<Move> {
        let state = self.state();
        let moved = |job: &Arc<DiskJob>| match &job.what {
            What::Images(Plan::Move(to)) if job.job.state() == JobState::Done && !to.stays => Some(to.clone()),
            _ => None,
        };
        state.jobs.iter().rev().find_map(moved)
    }

    /// Keeps jobs away while the disk gets a new size. A job that is under way goes on, but for a move: its copy has the old size.
    ///
    /// # Errors
    /// `Busy` while the disk is moved, or something else changes its images.
    pub fn hold_for_resize(self: &Arc<Self>) -> Result<Held> {
        self.hold_beside("a resize", |what| !matches!(what, What::Images(Plan::Move(_))))
    }

    /// From now on `events` hears when a job has changed the images of this disk, which is called `name`.
    pub fn tell_to(&self, name: String, events: mpsc::Sender<Event>) {
        self.state().listener = Some((name, events));
    }

    /// Tells that the disk has another graph.
    async fn tell(&self, disk: &ServedDisk) {
        let graph = disk.graph().await;
        if let Some((name, events)) = &self.state().listener {
            let _ = events.send(Event::Exchanged(name.clone(), Arc::downgrade(&graph)));
        }
    }

    /// Tells those who wait for events that `job` has ended. Not of a job that was refused.
    pub fn tell_end(&self, job: &DiskJob) {
        if !job.job.is_accepted() {
            return;
        }
        let report = job.job.report();
        let (disk, state) =
            (self.state().listener.as_ref().map(|(name, _)| name.clone()), report.state.name().to_owned());
        let (id, kind) = (job.id.clone(), job.what.kind().to_owned());
        let message = report.error.map(|error| error.to_string());
        events::tell(disk.as_deref(), events::What::JobEnded(JobEnded { id, kind, state, message }));
    }

    /// Goes on with what a process before has begun, if there is something. Until that is known, nothing else begins on the disk's images, and then
    /// what is returned hangs up.
    pub fn go_on(self: &Arc<Self>, engine: &Engine, disk: &Arc<ServedDisk>) -> mpsc::Receiver<()> {
        let (sender, is_known) = mpsc::channel();
        let (jobs, own, disk) = (self.clone(), engine.clone(), disk.clone());
        let held = self.reopen();
        engine.spawn_on(0, move || async move {
            // One that was stopped may be at its last piece still.
            for stopped in jobs.list() {
                stopped.job.over().await;
            }
            let graph = disk.graph().await;
            let path = graph.handles()[0].path().display().to_string();
            match jobs::left(&graph).await {
                Ok(None) => jobs::forget_what_is_over(&disk, &jobs.checkpoints).await,
                Ok(Some(note)) => {
                    let kind = note.plan.kind();
                    match jobs.spawn(&own, &disk, note, held) {
                        Ok(job) => tracing::info!("{path}: goes on with a {kind}, job {}", job.id),
                        Err(error) => tracing::warn!("{path}: a {kind} does not go on: {error}"),
                    }
                }
                Err(error) => tracing::warn!("{path}: what was begun with it cannot be read: {error}"),
            }
            drop(sender);
        });
        is_known
    }

    /// Jobs may begin again after [`DiskJobs::stop`]. Until what is returned is dropped, only the caller begins one.
    pub fn reopen(self: &Arc<Self>) -> Option<Held> {
        let mut state = self.state();
        state.is_closed = false;
        if state.held_for.is_some() {
            return None;
        }
        state.held_for = Some("a look at what was left of a job");
        drop(state);
        Some(Held::of(self))
    }

    /// Begins a job, in the place of `held` if that is there.
    fn spawn(
        self: &Arc<Self>,
        engine: &Engine,
        disk: &Arc<ServedDisk>,
        note: Note,
        held: Option<Held>,
    ) -> Result<Arc<DiskJob>> {
        let plan = note.plan.clone();
        let begun = DiskJob::new(What::Images(note.plan), note.wishes);
        match held {
            Some(held) => held.give_way(begun.clone())?,
            None => self.add(begun.clone())?,
        }
        let (jobs, disk, running) = (self.clone(), disk.clone(), begun.clone());
        engine.spawn_on(0, move || async move {
            if let Err(error) = jobs::run(&disk, &jobs.checkpoints, jobs.access, &running.job, &plan).await
                && running.job.report().error.is_some()
            {
                tracing::warn!("the job {} has failed: {error}", running.id);
            }
            jobs.tell(&disk).await;
            jobs.tell_end(&running);
            // Nobody listens to a server that ends any more.
            if let Plan::Move(Move { to, stays: false, .. }) = &plan
                && running.job.state() == JobState::Done
                && jobs.state().is_closed
            {
                let id = &running.id;
                match running.is_to_be_named() {
                    false => tracing::warn!("the job {id} has moved its disk to {to}: start the next server with it"),
                    true => tracing::warn!(
                        "the job {id} has moved its disk to {to}, whose host has not given it its name yet: start a server with the old path first, which has \
                         that done and says so, and then one with {to}"
                    ),
                }
            }
        });
        Ok(begun)
    }

    /// Notes a job that begins now.
    ///
    /// # Errors
    /// `Busy` while the disk has a job; `Shutdown` when it is closed.
    pub fn add(&self, new: Arc<DiskJob>) -> Result<()> {
        self.state().add(new)
    }

    /// Keeps jobs away while the disk gets a snapshot. A backup that is under way goes on.
    ///
    /// # Errors
    /// `Busy` while the disk has a job that changes its images, or something else does.
    pub fn hold_for_snapshot(self: &Arc<Self>) -> Result<Held> {
        self.hold_beside("a snapshot", What::only_reads)
    }

    /// Keeps jobs away while the disk is paused.
    ///
    /// # Errors
    /// `Busy` while the disk has a job, or something else changes its images.
    pub fn hold_for_pause(self: &Arc<Self>) -> Result<Held> {
        self.hold_beside("a pause", |_| false)
    }

    /// Keeps jobs away while the disk goes back to a snapshot.
    ///
    /// # Errors
    /// `Busy` while the disk has a job, or something else changes its images.
    pub fn hold_for_revert(self: &Arc<Self>) -> Result<Held> {
        self.hold_beside(REVERT, |_| false)
    }

    /// True while [`DiskJobs::hold_for_revert`] keeps jobs away.
    pub fn are_held_for_revert(&self) -> bool {
        self.state().held_for == Some(REVERT)
    }

    /// Keeps jobs away while the disk, which is called `name`, is detached.
    ///
    /// # Errors
    /// `Busy` while the disk has a job, naming it, or something else changes its images.
    pub fn hold_for_detach(self: &Arc<Self>, name: &str) -> Result<Held> {
        self.refuse_detach(name)?;
        self.hold_beside("a detach", |_| false)
    }

    fn hold_beside(self: &Arc<Self>, what: &'static str, goes_with: fn(&What) -> bool) -> Result<Held> {
        let mut state = self.state();
        state.check_free(goes_with)?;
        state.held_for = Some(what);
        drop(state);
        Ok(Held::of(self))
    }

    /// Has the jobs that are under way end at their next pieces. No other begins. The next server goes on with what can go on. What is returned are
    /// those jobs.
    pub fn stop(&self) -> Vec<Arc<DiskJob>> {
        let mut state = self.state();
        state.is_closed = true;
        let running: Vec<_> = state.open().cloned().collect();
        drop(state);
        running.iter().for_each(|job| job.job.stop());
        running
    }
}

impl DiskJob {
    /// A job that has not begun, of which its users want this.
    pub fn new(what: What, wishes: Wishes) -> Arc<Self> {
        Arc::new(Self { id: next_id(), what, job: Job::new(wishes) })
    }

    /// True while the other host has not said that the disk, or its copy, has got its name there.
    pub fn is_to_be_named(&self) -> bool {
        self.job.report().motion.is_some_and(|motion| motion.phase == Phase::Naming)
    }

    /// What its users want of it, and how far it is.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// What it does, for messages and in JSON.
    pub fn kind(&self) -> &'static str {
        self.what.kind()
    }

    /// Its name.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Does what `change` says.
    ///
    /// # Errors
    /// `InvalidInput` for a state that nobody can ask for, and for a job that is over.
    pub fn change(&self, change: &JobChange) -> Result<()> {
        let state = self.job.state();
        let is_so_already = state == JobState::Cancelled && change.state.as_deref() == Some("cancelled");
        if state.is_over() && !is_so_already {
            return Err(is_over(&self.id, state.name()));
        }
        match change.state.as_deref() {
            None => {}
            Some("running") => self.job.resume(),
            Some("paused") => self.job.pause(),
            Some("cancelled") => self.job.cancel(),
            Some("finished") => match &self.what {
                What::Images(Plan::Move(to)) if to.stays => self.job.finish(),
                _ => {
                    let what = "the job comes to its end by itself: only a copy that stays in step has to be told";
                    return Err(Error::new(ErrorKind::InvalidInput, what));
                }
            },
            Some(other) => {
                let what = format!("a job cannot be made {other:?}: running, paused, finished or cancelled");
                return Err(Error::new(ErrorKind::InvalidInput, what));
            }
        }
        if let Some(limit) = change.limit_bytes_per_s {
            self.job.set_limit((limit > 0).then_some(limit));
        }
        Ok(())
    }

    /// Refuses to hand the disk over to another host unless the job keeps a copy there that is in step, or nearly so.
    ///
    /// # Errors
    /// `InvalidInput` for another job; `Busy`.
    pub fn refuse_hand_over(&self) -> Result<()> {
        if !matches!(&self.what, What::Images(Plan::Move(to)) if to.stays) {
            let what = "the job keeps no copy in step: `spile move --mirror-only` begins one that can be handed over";
            return Err(Error::new(ErrorKind::InvalidInput, what));
        }
        let report = self.job.report();
        let refused = |what: String| {
            let error = Error::new(ErrorKind::Busy, format!("the disk cannot be handed over now: {what}"));
            Err(error
                .hint("nothing has changed, and guests may go on here: try again when `spile jobs` says `in step`"))
        };
        match (report.state, report.motion) {
            (JobState::Running, Some(motion)) if matches!(motion.phase, Phase::InStep | Phase::CatchingUp) => Ok(()),
            (JobState::Running, Some(motion)) => {
                let trouble = motion.trouble.map(|trouble| format!(" ({trouble})")).unwrap_or_default();
                refused(format!("its copy is {}{trouble}, and not in step", motion.phase.name()))
            }
            (state, _) => refused(format!("the job is {}", state.name())),
        }
    }

    /// What there is to tell of it. `disk` and `path` are the disk's name and path, `server` its server.
    pub fn show(&self, disk: &str, path: &str, server: &str) -> types::Job {
        let report = self.job.report();
        let (layer_path, to) = match &self.what {
            What::Images(Plan::Coalesce(merged)) => (Some(merged.path.display().to_string()), None),
            What::Images(Plan::Flatten) => (None, None),
            What::Images(Plan::Move(Move { to, .. })) => (None, Some(to.to_string())),
            What::Backup(to) => (None, Some(to.clone())),
        };
        types::Job {
            id: self.id.clone(),
            kind: self.what.kind().to_owned(),
            disk: disk.to_owned(),
            path: path.to_owned(),
            layer_path,
            state: report.state.name().to_owned(),
            done_bytes: report.done_bytes,
            total_bytes: report.total_bytes,
            bytes_per_s: report.bytes_per_s,
            limit_bytes_per_s: report.limit_bytes_per_s,
            eta_s: report.eta_s,
            error: report.error.as_ref().map(FailureDetail::of),
            to,
            is_copy: matches!(&self.what, What::Images(Plan::Move(plan)) if plan.stays),
            motion: report.motion.map(Into::into),
            server: server.to_owned(),
            pid: std::process::id(),
        }
    }
}

/// Why nothing is done with a job that is over.
pub(super) fn is_over(id: &str, state: &str) -> Error {
    let what = format!("the job {id:?} is over: it is {state}");
    Error::new(ErrorKind::InvalidInput, what).hint("nothing has changed by this")
}

/// There is no job of this name here.
pub(super) fn no_such_job(id: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no job {id:?} here")).hint("`spile jobs` lists them")
}

/// Ends the jobs of all `disks` at their next pieces, and waits for that, for at most `bound`.
///
/// # Errors
/// `TimedOut` when a job does not come to the end of its piece in time. It ends there all the same.
pub fn stop_within<'a>(
    engine: &Engine,
    disks: impl IntoIterator<Item = &'a Arc<DiskJobs>>,
    bound: Duration,
) -> Result<()> {
    let end = Instant::now() + bound;
    let running: Vec<_> = disks.into_iter().flat_map(|jobs| jobs.stop()).collect();
    let over = |job: Arc<DiskJob>| {
        let (sender, over) = mpsc::channel::<()>();
        engine.spawn_on(0, move || async move {
            job.job.over().await;
            drop(sender);
        });
        over
    };
    let all: Vec<_> = running.into_iter().map(over).collect();
    if wait_for_all(&all, end) {
        return Ok(());
    }
    let what = format!("a job did not come to the end of its piece in {} s", bound.as_secs());
    Err(Error::new(ErrorKind::TimedOut, what).hint("try again when the storage answers"))
}

/// Waits until all of these have hung up. False when that takes until `end`.
pub fn wait_for_all(all: &[mpsc::Receiver<()>], end: Instant) -> bool {
    let is_over = |one: &mpsc::Receiver<()>| {
        one.recv_timeout(end.saturating_duration_since(Instant::now())) != Err(mpsc::RecvTimeoutError::Timeout)
    };
    all.iter().all(is_over)
}

/// The plan of the job that is asked for, on the disk of `graph`.
///
/// # Errors
/// `InvalidInput` for a kind of job that there is not; as [`merge::plan`]; what is wrong with the new place of a disk that is to be moved.
pub fn plan(graph: &Graph<HostStore>, new: &NewJob) -> Result<Plan> {
    match new.kind.as_str() {
        "coalesce" if new.keep_name => {
            let number = merge::find_layer(graph, new.layer.as_deref())?;
            merge::plan_keeping(graph, number).map(Plan::Coalesce)
        }
        "coalesce" => merge::plan(graph, new.layer.as_deref()).map(Plan::Coalesce),
        "flatten" => Ok(Plan::Flatten),
        "move" => {
            let leaf = &graph.handles()[0];
            plan_move(leaf.path(), leaf.image().format(), new).map(Plan::Move)
        }
        other => {
            Err(Error::new(ErrorKind::InvalidInput, format!("there is no job {other:?}: coalesce, flatten or move")))
        }
    }
}

/// The merge that `new` asks for, when it was begun before and failed once the disk had the layer no more: then there is something left to do.
async fn left_merge(engine: &Engine, disk: &Arc<ServedDisk>, new: &NewJob) -> Result<Option<Plan>> {
    let Some(layer) = new.layer.clone().filter(|_| new.kind == "coalesce") else { return Ok(None) };
    let (reply, answer) = oneshot::channel();
    let disk = disk.clone();
    engine.spawn_on(0, move || async move {
        let graph = disk.graph().await;
        let files = HostFiles::new(OsFiles::new(CacheMode::Page).without_locks(true));
        // A job of the disk may be writing the note right now.
        let note = Note::look(&files, graph.handles()[0].path()).await;
        let note = note.map(|note| note.filter(|note| note.is_of(which(&graph))));
        let _ = reply.send(note.map(|note| (note, graph.handles()[0].path().to_owned())));
    });
    let (note, leaf) = answer.await.map_err(|_| Error::new(ErrorKind::Shutdown, "the server ends"))??;
    let is_it = |plan: &Plan| matches!(plan, Plan::Coalesce(merged) if merge::is_called(&leaf, &merged.path, &layer));
    Ok(note.map(|note| note.plan).filter(is_it))
}

/// The move that is asked for, of the disk whose leaf lies at `leaf` and is of the format `format`.
fn plan_move(leaf: &Path, format: Format, new: &NewJob) -> Result<Move> {
    let bad = |what: String| Error::new(ErrorKind::InvalidInput, what);
    let Some(to) = &new.to else { return Err(bad("a move needs a place to go `to`".to_owned())) };
    let given = new.to_format.as_deref().map(str::parse).transpose()?;
    let keeps_chain = match new.chain.as_deref() {
        None | Some("flatten") => false,
        Some("keep") => true,
        Some(other) => return Err(bad(format!("a chain cannot be moved by {other:?}: keep or flatten"))),
    };
    let plan = |to, format| Move {
        to,
        format,
        deletes_source: new.delete_source,
        keeps_chain,
        stays: new.mirror_only,
        has_no_mark: new.leave_unmarked,
        id: None,
    };
    let to = match to.parse()? {
        Locator::Path(to) => to,
        Locator::Nbd(_) if keeps_chain && given.is_some_and(|format| format != Format::Raw) => {
            let what =
                "with --chain keep, `spile receive` makes the image in the format that the extension of its name says";
            return Err(Error::new(ErrorKind::InvalidInput, what).hint("leave --to-format out, and name the disk so"));
        }
        Locator::Nbd(uri) => {
            let id = Some(Identity(OsEnv.random_16()));
            return Ok(Move { id, ..plan(Locator::Nbd(uri), given.unwrap_or(Format::Raw)) });
        }
        other => {
            let error = Error::new(ErrorKind::Unsupported, format!("a disk cannot be moved to {other}"));
            return Err(error.hint("name a file, a folder, or an export of an NBD server"));
        }
    };
    if !to.is_absolute() {
        return Err(bad(format!("{} is no absolute path", to.display())));
    }
    let name = |path: &Path| path.file_name().map(ToOwned::to_owned);
    // In a folder the disk keeps its file name, and its format where that does not say one.
    let (to, given) = match (to.is_dir(), name(leaf)) {
        (true, Some(name)) => {
            let of_leaf = Format::from_extension(Path::new(&name)).is_none().then_some(format);
            (to.join(name), given.or(of_leaf))
        }
        _ => (to, given),
    };
    let (Some(folder), Some(file)) = (to.parent(), name(&to)) else {
        return Err(bad("the path has no file name".to_owned()).at_path(&to));
    };
    let folder = folder.canonicalize().map_err(|e| Error::io("the new folder cannot be found", e).at_path(folder))?;
    let to = folder.join(file);
    let format = Format::of(&to, given).map_err(|error| {
        let hint = error.hint_text().map(|hint| hint.replace("--format", "--to-format"));
        error.hint(hint.unwrap_or_default())
    })?;
    Ok(plan(Locator::Path(to), format))
}

/// A name that no other job of this host has.
fn next_id() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn just_exchanged() -> Error {
    Error::new(ErrorKind::Busy, "the images of the disk are just exchanged").hint("try again")
}

#[cfg(test)]
mod tests {
    use spile_core::{Disk as _, Locator};
    use spile_engine::Config;
    use spile_image::{Format, OpenOptions};
    use spile_node::Node;
    use spile_store::CacheMode;

    use super::*;

    /// Who hands a server over does not look at its events, and the successor is to have the files.
    #[test]
    fn an_event_that_waits_keeps_no_file_open() {
        let engine = Engine::start(Config { workers: 1, ..Config::default() }).unwrap();
        let (sender, events) = mpsc::channel();
        let done = engine.run_on(0, move || async move {
            let options = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
            let graph = crate::disks::open_keeping(CacheMode::Page, &Locator::Mem(1 << 20), &options).await?;
            let disk = Node::new(graph);
            let access = Access::default();
            let jobs = DiskJobs::new(access, Arc::new(Checkpoints::none(access)));
            jobs.tell_to("d".to_owned(), sender);
            jobs.tell(&disk).await;
            let graph = Arc::downgrade(&disk.graph().await);
            disk.close().await?;
            drop(disk);
            Ok::<_, Error>(graph.upgrade().is_none())
        });
        assert!(matches!(events.try_recv(), Ok(Event::Exchanged(name, _)) if name == "d"));
        assert!(done.unwrap(), "the event keeps the disk's files open");
        engine.shutdown();
    }
}
