//! The images that are served, open for as long as they are.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use spile_core::{Disk, Error, ErrorKind, Locator, Result, Store as _};
use spile_engine::{Engine, FileKey};
use spile_image::layer::Layer as _;
use spile_image::{Format, Graph, GraphLayer, OpenOptions};
use spile_life::motion::Move;
use spile_node::{Node, Policy, Shape, Troubles};
use spile_store::openers::BUSY_PATIENCE;
use spile_store::{CacheMode, FileId, HostStore};

use super::api::types::Layer;
use super::control::Event;
use super::failed_syncs::{self, FailedSync};
use super::faults;
use super::growing::Growth;
use super::identity::{Exported, Identity};
use super::jobs::{self, DiskJob, DiskJobs};
use super::limits::{self, Groups};
use super::passages::Passages;
use super::pausing::Pausing;
use super::trouble;
use crate::checkpoints::Checkpoints;
use crate::disks::{self, DiskSpec};
use crate::grow::GrowOptions;
use crate::jobs::Access;
use crate::tuned::ShapeChoice;

/// The time between two tries to open a busy disk.
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// How long the begin of a server waits for what was left of jobs. It goes on without it.
const LEFT_PATIENCE: Duration = Duration::from_secs(2);

/// A disk as fronts see it.
pub type ServedDisk = Node<Graph<HostStore>>;

/// One DISK, open.
pub struct Open {
    /// The disk.
    pub disk: Arc<ServedDisk>,
    /// What is being done to its images.
    pub jobs: Arc<DiskJobs>,
    /// Its checkpoints, and what has changed since.
    pub checkpoints: Arc<Checkpoints>,
    /// How the device below it grows, if its leaf is a thin image on one.
    pub growth: Arc<Growth>,
    /// Whether its guests wait, so that its files can be copied.
    pub pausing: Arc<Pausing>,
    /// Its own name on this server: what callers of the control API know it by.
    pub name: String,
    /// Whether it was handed over to another host, or has come from one.
    pub passages: Arc<Passages>,
    /// No NBD client may choose it any more: it has come from another host, and is its guest's, or it was handed over.
    pub withdrawn: Arc<AtomicBool>,
    /// A hand-over has done that: it is taken back when the disk stays here after all.
    pub withdrawn_to_go: Arc<AtomicBool>,
    /// The images that it is made of, the leaf first.
    pub layers: Vec<Layer>,
    /// Its exports' names.
    pub names: Vec<String>,
    /// What the guest reads as its serial number.
    pub serial: String,
    /// Where it is.
    pub source: Locator,
    /// The format in which it was opened, if that was said.
    pub format: Option<Format>,
    /// Where it is, for messages.
    pub label: String,
    /// What it is, for messages: `raw`, or `vhd, 3 layers`.
    pub kind: String,
    /// Refuse writes.
    pub read_only: bool,
    /// Syncs of its layers that have failed in earlier processes.
    pub failed_syncs: Vec<FailedSync>,
    /// Which disk it is: the file that was opened.
    pub identity: Identity,
    /// True when this server was told the shape of its requests; else it keeps the one that a server before it had given it.
    pub has_own_shape: bool,
    /// True when this server was told the disk's limits or group; else it keeps those that a server before it had given it.
    pub has_own_limits: bool,
    /// Its policy for trouble as the server was started with it. Another one was set by an order.
    pub first_policy: Policy,
}

impl Open {
    /// Takes note of what the disk is made of, because its graph is another one now.
    pub fn look_at(&mut self, graph: &Graph<HostStore>) {
        self.layers = layers_of(graph);
        self.kind = disks::describe(graph);
        self.growth.watch(graph);
        self.passages.follow(graph);
        self.identity = self.identity.clone().with_opened(graph);
    }

    /// Each of its exports.
    fn exported(&self) -> impl Iterator<Item = Exported> {
        // A snapshot or a merge gives the disk another leaf.
        let identity = self.identity.clone();
        let identity = match self.disk.graph_now() {
            Some(graph) => identity.with_opened(&graph),
            None => identity,
        };
        self.names.iter().map(move |name| Exported { name: name.clone(), disk: identity.clone() })
    }
}

/// Every export of `disks` with the disk behind it.
pub fn exported(disks: &[Open]) -> Vec<Exported> {
    disks.iter().flat_map(Open::exported).collect()
}

/// What is to be opened, and how.
#[derive(Clone, Debug)]
pub struct Opening {
    /// The disks, each with the names of its exports.
    specs: Vec<(DiskSpec, Vec<String>)>,
    /// Their format, where they do not say it.
    pub format: Option<Format>,
    /// How their bytes are reached.
    pub cache: CacheMode,
    /// Folders that parents may lie in.
    pub allow_parents: Vec<std::path::PathBuf>,
    /// The format of parents whose children do not name it.
    pub parent_format: Option<Format>,
    /// Images may name another file that holds their data.
    pub allow_data_file: bool,
    /// Take no locks on files.
    pub no_lock: bool,
    /// What is done about trouble below disks that do not say it.
    pub policy: Policy,
    /// How devices are made longer under disks that do not say it.
    pub grow: GrowOptions,
    /// The shape of requests to disks that do not say it; `None`: as a server before it had it, or off.
    pub shape: Option<ShapeChoice>,
    /// Write to images although others name them as their parents.
    pub write_parent: bool,
    /// Write to old images of disks that were moved away.
    pub write_moved: bool,
    /// The groups in which disks share limits.
    pub groups: Arc<Groups>,
}

impl Opening {
    /// How disks will be opened; there is no disk yet.
    pub fn new(format: Option<Format>, cache: CacheMode, allow_parents: Vec<std::path::PathBuf>) -> Self {
        Self {
            specs: Vec::new(),
            format,
            cache,
            allow_parents,
            parent_format: None,
            allow_data_file: false,
            no_lock: false,
            policy: Policy::default(),
            grow: GrowOptions::default(),
            shape: None,
            write_parent: false,
            write_moved: false,
            groups: Arc::default(),
        }
    }

    /// With these disks. Their exports' names follow the rule in the help of `spile serve`.
    pub fn with_disks(mut self, specs: Vec<DiskSpec>) -> Self {
        let names = export_names(&specs);
        self.specs = specs.into_iter().zip(names).collect();
        self
    }

    /// One more disk, exported under its own name only.
    pub fn add(&mut self, spec: DiskSpec) {
        let names = vec![spec.own_name()];
        self.specs.push((spec, names));
    }

    /// The disk `open` was moved. It keeps its names and its serial number, which may have come from its old place.
    pub fn move_disk(&mut self, open: &mut Open, moved: &Move) {
        let Some((spec, _)) = self.specs.iter_mut().find(|(spec, _)| spec.own_name() == open.name) else { return };
        tracing::warn!(
            "{}: the disk {:?} is at {} now: start the next server with it",
            open.label,
            open.name,
            moved.to
        );
        (spec.source, spec.format) = (moved.to.clone(), Some(moved.format));
        (spec.name, spec.serial) = (Some(open.name.clone()), Some(open.serial.clone()));
        let spec = spec.clone();
        let identity = self.identity_of(&spec);
        open.identity = match open.disk.graph_now() {
            Some(graph) => identity.with_opened(&graph),
            None => identity,
        };
        (open.source, open.format, open.label) = (spec.source.clone(), spec.format, disks::label(&spec.source));
    }

    /// The identity of what `spec` names now.
    pub fn identity_of(&self, spec: &DiskSpec) -> Identity {
        Identity::of(spec, self.format, self.parent_format)
    }

    /// Forgets the disk of this name.
    pub fn remove(&mut self, name: &str) {
        self.specs.retain(|(spec, _)| spec.own_name() != name);
    }

    /// The disk of this name, as it was given.
    pub fn spec(&self, name: &str) -> Option<&DiskSpec> {
        self.specs.iter().map(|(spec, _)| spec).find(|spec| spec.own_name() == name)
    }

    /// The exports of the disk of this name.
    pub fn exports_of(&self, name: &str) -> Option<Vec<String>> {
        self.specs.iter().find(|(spec, _)| spec.own_name() == name).map(|(_, exports)| exports.clone())
    }

    /// The path of the first disk, if it is a file or a device.
    pub fn first_path(&self) -> Option<&std::path::Path> {
        match &self.specs.first()?.0.source {
            Locator::Path(path) => Some(path),
            Locator::Nbd(_) | Locator::Null(_) | Locator::Mem(_) => None,
        }
    }

    /// What will be exported under `name`, as a part of its sockets' [`key`](super::fronts::key).
    ///
    /// # Errors
    /// `NotFound` with the names that there are.
    pub fn identity(&self, name: &str) -> Result<String> {
        let found = self.specs.iter().find(|(_, names)| names.iter().any(|other| other == name));
        let (spec, _) = found.ok_or_else(|| no_export(self.specs.iter().map(|(_, names)| names), name))?;
        let path = match &spec.source {
            // A file that is not there cannot be opened either, and the open tells why.
            Locator::Path(path) => std::fs::canonicalize(path).unwrap_or_else(|_| path.clone()).display().to_string(),
            other => disks::label(other),
        };
        Ok(if spec.read_only { format!("{path}, read-only") } else { path })
    }

    /// Every export with the disk behind it, as the disks' paths are now.
    pub fn exported(&self) -> Vec<Exported> {
        let each = |(spec, names): &(DiskSpec, Vec<String>)| {
            let disk = self.identity_of(spec);
            names.clone().into_iter().map(move |name| Exported { name, disk: disk.clone() })
        };
        self.specs.iter().flat_map(each).collect()
    }

    /// True when everything that was written is still there after the disks were closed.
    pub fn is_lasting(&self) -> bool {
        !self.specs.iter().any(|(spec, _)| matches!(spec.source, Locator::Mem(_)))
    }

    /// Opens the disks; those that were opened before one failed are in `into`. Exports named in `were_served` go on from a server before,
    /// so their disks are opened even if they are parents by now: a refusal could only end what guests already use.
    ///
    /// # Errors
    /// As [`Graph::open`]; `Exists` for a disk that is given twice and would be written.
    pub fn open(&self, engine: &Engine, into: &mut Vec<Open>, were_served: &[String]) -> Result<()> {
        self.specs.iter().try_for_each(|(spec, names)| {
            let disk = self.identity_of(spec);
            if let Some(other) =
                into.iter().find(|open| !disk.goes_with(&open.identity) || !open.identity.goes_with(&disk))
            {
                let what = format!("{} is given twice: as {:?} and as {:?}", disk.label, other.name, spec.own_name());
                return Err(Error::new(ErrorKind::Exists, what).hint("give it once, or say read-only for both"));
            }
            let was_served = names.iter().any(|name| were_served.contains(name));
            let open = self.open_one(engine, spec, names.clone(), &|file| holder(into, file), was_served)?;
            into.push(open);
            Ok(())
        })
    }

    /// Opens one more disk, which is to be [added](Opening::add), beside those that are `served`. On any thread.
    ///
    /// # Errors
    /// As [`Graph::open`].
    pub fn open_beside(&self, engine: &Engine, spec: &DiskSpec, served: &Served) -> Result<Open> {
        self.open_one(engine, spec, vec![spec.own_name()], &|file| served.holder(file), false)
    }

    /// How an image is opened that is to be the parent of a disk.
    pub fn options_of_parents(&self) -> OpenOptions {
        OpenOptions {
            read_only: true,
            allow_parents: self.allow_parents.clone(),
            parent_format: self.parent_format,
            allow_data_file: self.allow_data_file,
            no_lock: self.no_lock,
            ..OpenOptions::default()
        }
    }

    fn open_one(
        &self,
        engine: &Engine,
        spec: &DiskSpec,
        names: Vec<String>,
        holder: &dyn Fn(FileId) -> Option<String>,
        was_served: bool,
    ) -> Result<Open> {
        let options = OpenOptions {
            format: spec.format.or(self.format),
            read_only: spec.read_only,
            write_parent: self.write_parent || was_served,
            write_moved: self.write_moved || was_served,
            ..self.options_of_parents()
        };
        let (graph, checkpoints) = self.open_patiently(engine, spec, &options, holder)?;
        let open = self.opened(graph, checkpoints, spec, names);
        open.growth.check(&spec.grow.or(&self.grow), &open.label)?;
        attach_checkpoints(engine, &open)?;
        faults::attach(engine, &open)?;
        if let Some(choice) = spec.shape.or(self.shape) {
            set_shape(engine, &open, choice.resolve(&spec.source))?;
        }
        if open.has_own_limits {
            limits::set(engine, &open, &self.groups, spec.limits.unwrap_or_default(), spec.group.as_deref())?;
        }
        Ok(open)
    }

    /// The disk of `spec`, which was opened as `graph`.
    fn opened(&self, graph: Graph<HostStore>, checkpoints: Checkpoints, spec: &DiskSpec, names: Vec<String>) -> Open {
        let serial = spec.serial.clone().or_else(|| spec.name.clone()).unwrap_or_else(|| disks::stem(&spec.source));
        let failed_syncs = if spec.read_only { Vec::new() } else { failed_syncs::recall(&graph) };
        tell_failed_syncs(&graph, &spec.own_name(), &failed_syncs);
        let growth = Growth::new(spec.own_name(), &spec.grow.or(&self.grow));
        growth.watch(&graph);
        let mut troubles = trouble::of_disk(spec.own_name(), spec.policy(self.policy));
        if growth.has_command() {
            let makes_room = growth.clone();
            troubles = troubles.with_room_maker(Box::new(move || makes_room.is_at_work()));
        }
        let checkpoints = Arc::new(checkpoints);
        let passages = if spec.read_only { Arc::default() } else { Passages::of(&graph) };
        let is_gone = passages.is_gone();
        Open {
            name: spec.own_name(),
            passages,
            layers: layers_of(&graph),
            names,
            serial,
            source: spec.source.clone(),
            format: spec.format.or(self.format),
            label: disks::label(&spec.source),
            kind: disks::describe(&graph),
            read_only: spec.read_only,
            failed_syncs,
            identity: self.identity_of(spec).with_opened(&graph),
            has_own_shape: spec.shape.or(self.shape).is_some(),
            has_own_limits: spec.limits.is_some() || spec.group.is_some(),
            first_policy: spec.policy(self.policy),
            jobs: DiskJobs::new(self.access(), checkpoints.clone()),
            checkpoints,
            growth,
            pausing: Arc::default(),
            withdrawn: Arc::new(AtomicBool::new(is_gone)),
            withdrawn_to_go: Arc::new(AtomicBool::new(is_gone)),
            disk: Arc::new(
                Node::with_buffers(graph, |len| spile_engine::pool().try_alloc(len).map(Into::into))
                    .with_troubles(troubles)
                    .with_limits(limits::of_disk()),
            ),
        }
    }

    fn access(&self) -> Access {
        Access { cache: self.cache, no_lock: self.no_lock }
    }

    /// Opens a disk and its checkpoints; a disk that is busy is tried for some time. A server that was just killed may be the reason: the kernel keeps
    /// its files open and locked until it has wound up the server's io_uring. `holder` tells which disk of this server has a file open.
    fn open_patiently(
        &self,
        engine: &Engine,
        spec: &DiskSpec,
        options: &OpenOptions,
        holder: &dyn Fn(FileId) -> Option<String>,
    ) -> Result<(Graph<HostStore>, Checkpoints)> {
        let end = Instant::now() + BUSY_PATIENCE;
        let mut is_told = false;
        loop {
            let (access, source, options) = (self.access(), spec.source.clone(), options.clone());
            let open = move || async move {
                let graph = disks::open_to_serve(access.cache, &source, &options).await?;
                let checkpoints = Checkpoints::none(access);
                checkpoints.open(&graph).await?;
                Ok::<_, Error>((graph, checkpoints))
            };
            match engine.run_on(0, open) {
                Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < end => {
                    refuse_our_own(&error, holder)?;
                    if !std::mem::replace(&mut is_told, true) {
                        tracing::warn!("{error}: waiting {} s for it", BUSY_PATIENCE.as_secs());
                    }
                    std::thread::sleep(BUSY_PAUSE);
                }
                result => return result,
            }
        }
    }
}

/// Has the disk's requests be noted from the first one on.
fn attach_checkpoints(engine: &Engine, open: &Open) -> Result<()> {
    let (checkpoints, disk) = (open.checkpoints.clone(), open.disk.clone());
    engine.run_on(0, move || async move { checkpoints.attach(&disk).await })
}

/// Says why every flush of a disk fails, and which commands end that.
fn tell_failed_syncs(graph: &Graph<HostStore>, name: &str, failed_syncs: &[FailedSync]) {
    if failed_syncs.is_empty() {
        return;
    }
    failed_syncs.iter().for_each(|failed| tracing::error!("{failed}"));
    let own: Vec<_> =
        failed_syncs::stores_of(&graph.handles()[0]).map(|store| store.path().display().to_string()).collect();
    let parents =
        failed_syncs.iter().map(|failed| failed.path.as_str()).filter(|path| own.iter().all(|own| own != path));
    let commands: Vec<_> = parents.chain([name]).map(|disk| format!("`spile accept-loss {disk}`")).collect();
    tracing::error!("every flush of the disk {name:?} fails until {}", commands.join(" and then "));
}

/// Refuses to wait for a file that this server has open itself, as a part of another disk.
fn refuse_our_own(busy: &Error, holder: &dyn Fn(FileId) -> Option<String>) -> Result<()> {
    let Some(path) = busy.path() else { return Ok(()) };
    let Ok(file) = std::fs::metadata(path).map(|stat| FileId::of(&stat)) else { return Ok(()) };
    let Some(name) = holder(file) else { return Ok(()) };
    Err(Error::new(ErrorKind::Busy, format!("the file is in use by the disk {name:?} of this server"))
        .at_path(path)
        .hint("a parent may be served beside its children only with read-only"))
}

/// The name of the disk among `served` that has this file open.
fn holder(served: &[Open], file: FileId) -> Option<String> {
    served.iter().find(|open| file_ids(open).contains(&file)).map(|open| open.name.clone())
}

/// The files of a disk's images, and those that hold their data.
fn file_ids(open: &Open) -> Vec<FileId> {
    let graph = open.disk.graph_now();
    graph.iter().flat_map(|graph| failed_syncs::stores(graph)).filter_map(|store| store.file_id()).collect()
}

/// What a disk that comes must not be, nor need for itself: the disks of a server at one moment. It keeps nothing of them open.
pub struct Served(Vec<(String, Identity, Vec<FileId>)>);

impl Served {
    /// These disks.
    pub fn of(disks: &[Open]) -> Self {
        Self(disks.iter().map(|open| (open.name.clone(), open.identity.clone(), file_ids(open))).collect())
    }

    fn holder(&self, file: FileId) -> Option<String> {
        self.0.iter().find(|(_, _, files)| files.contains(&file)).map(|(name, ..)| name.clone())
    }

    /// Refuses a disk that may not be served beside these.
    ///
    /// # Errors
    /// `Exists` with the name that it is served under.
    pub fn refuse_twice(&self, disk: &Identity) -> Result<()> {
        let Some((name, ..)) = self.0.iter().find(|(_, identity, _)| !disk.goes_with(identity)) else { return Ok(()) };
        let what = format!("this disk is served already, as {name:?}");
        Err(Error::new(ErrorKind::Exists, what).hint("detach that one first, or serve both read-only"))
    }
}

/// The images of a disk as callers see them, the leaf first.
pub fn layers_of(graph: &Graph<HostStore>) -> Vec<Layer> {
    let layer = |layer: &Arc<GraphLayer<HostStore>>| Layer {
        path: layer.path().display().to_string(),
        format: layer.image().format().to_string(),
        virtual_size_bytes: layer.image().size_bytes(),
    };
    graph.handles().iter().map(layer).collect()
}

/// Begins what the first writes to the disks would wait for. It changes images, so it is done once the disks are sure to be
/// served. `events` hears of each disk whose images a job has changed. Jobs that a server before has left are there when this returns, unless the
/// storage is slow: whoever comes first does not take their place.
pub fn begin(engine: &Engine, disks: &[Open], events: &mpsc::Sender<Event>) {
    let mut looks = Vec::new();
    for open in disks {
        let disk = open.disk.clone();
        engine.spawn_on(0, move || async move {
            if let Some(graph) = disk.graph_now() {
                graph.begin();
            }
        });
        open.growth.tell_to(events.clone());
        if !open.read_only {
            open.jobs.tell_to(open.name.clone(), events.clone());
            looks.push(open.jobs.go_on(engine, &open.disk));
        }
    }
    jobs::wait_for_all(&looks, Instant::now() + LEFT_PATIENCE);
}

/// Flushes the disks, so that closing them soon after takes little time. It does not wait for trouble to pass. After `bound` nobody waits any more; the flushes go on.
///
/// # Errors
/// The first failure; `TimedOut` with the name of a disk that is not flushed in time.
pub fn flush(engine: &Engine, disks: &[Open], bound: Duration) -> Result<()> {
    let end = Instant::now() + bound;
    let begin = |open: &Open| {
        let (disk, (sender, flushed)) = (open.disk.clone(), mpsc::channel());
        engine.spawn_on(0, move || async move { drop(sender.send(disk.flush_once().await)) });
        (open.label.clone(), flushed)
    };
    let begun: Vec<_> = disks.iter().map(begin).collect();
    begun.into_iter().try_for_each(|(label, flushed)| {
        let late = |_| {
            let what = format!("{label} could not be flushed in {} s", bound.as_secs());
            Error::new(ErrorKind::TimedOut, what).hint("try again when its storage answers")
        };
        flushed.recv_timeout(end.saturating_duration_since(Instant::now())).map_err(late)?
    })
}

/// Gives the requests of a disk a shape.
///
/// # Errors
/// `Shutdown` when the disk is closed.
fn set_shape(engine: &Engine, open: &Open, shape: Shape) -> Result<()> {
    let disk = open.disk.clone();
    engine.run_on(0, move || async move { disk.set_shape(shape).await })
}

/// The shape of the requests to each export as it is now.
pub fn shapes(disks: &[Open]) -> Vec<(String, String)> {
    let of = |open: &Open| {
        let shape = open.disk.shaping().shape().to_string();
        open.names.clone().into_iter().map(move |name| (name, shape.clone()))
    };
    disks.iter().flat_map(of).collect()
}

/// Gives each disk its shape of `shapes`, if there is one.
///
/// # Errors
/// `Shutdown` when a disk is closed.
pub fn set_shapes<'a>(
    engine: &Engine,
    disks: impl IntoIterator<Item = &'a Open>,
    shapes: &[(String, String)],
) -> Result<()> {
    for open in disks {
        let shape = shapes.iter().find(|(export, _)| open.names.contains(export));
        if let Some(shape) = shape.and_then(|(_, shape)| shape.parse().ok()) {
            set_shape(engine, open, shape)?;
        }
    }
    Ok(())
}

/// Gives each disk the shape of `shapes` that it had before, unless this server was told another one. A shape that this build does not
/// know is left out.
///
/// # Errors
/// `Shutdown` when a disk is closed.
pub fn keep_shapes(engine: &Engine, disks: &[Open], shapes: &[(String, String)]) -> Result<()> {
    set_shapes(engine, disks.iter().filter(|open| !open.has_own_shape), shapes)
}

/// Has no request wait for a limit any more: the disks come to their end.
pub fn hurry<'a>(disks: impl IntoIterator<Item = &'a Open>) {
    disks.into_iter().for_each(|open| open.disk.hurry(true));
}

/// Has requests that wait for trouble to pass end without an answer, and no request wait any more: the disks are about to be
/// closed, and the next server does these requests. Those that wait for a limit go on at once, and are answered.
pub fn leave_waiting<'a>(disks: impl IntoIterator<Item = &'a Open>) {
    for open in disks {
        open.disk.hurry(true);
        open.disk.troubles().into_iter().for_each(Troubles::leave);
    }
}

/// Closes the disks, all at the same time: one whose storage does not answer keeps none of the others from being closed. The first error, `result`'s
/// before all, is returned; the others are told at once.
///
/// # Errors
/// The first.
pub fn close(engine: &Engine, disks: Vec<Open>, mut result: Result<()>) -> Result<()> {
    // All are told before one is waited for.
    let stopped: Vec<_> = disks.iter().map(|open| open.jobs.stop()).collect();
    let files: Vec<_> = disks.iter().flat_map(files).collect();
    let begin = |(open, jobs): (Open, Vec<Arc<DiskJob>>)| {
        let (disk, checkpoints, (sender, closed)) = (open.disk, open.checkpoints, mpsc::channel());
        engine.spawn_on(0, move || async move {
            for job in jobs {
                job.job().over().await;
            }
            let graph = disk.graph().await;
            let closed = disk.close().await;
            if closed.is_ok() {
                checkpoints.close(&graph).await;
            }
            // Whoever hears of the end may open the files.
            drop((graph, disk, checkpoints));
            let _ = sender.send(closed);
        });
        closed
    };
    let begun: Vec<_> = disks.into_iter().zip(stopped).map(begin).collect();
    for closed in begun {
        let closed =
            closed.recv().unwrap_or_else(|_| Err(Error::new(ErrorKind::Shutdown, "a disk could not be closed")));
        match (&result, closed) {
            (Ok(()), closed) => result = closed,
            (Err(_), Err(another)) => tracing::error!("{another}"),
            (Err(_), Ok(())) => {}
        }
    }
    if !spile_engine::wait_for_unlocks(&files) {
        tracing::warn!("a file server does not answer: the locks of a disk may last until this process has ended");
    }
    result
}

/// The files of a disk's images, and those that hold their data.
fn files(open: &Open) -> Vec<FileKey> {
    let graph = open.disk.graph_now();
    let stores = graph.iter().flat_map(|graph| failed_syncs::stores(graph));
    stores.filter_map(|store| store.key()).chain(open.checkpoints.key()).collect()
}

/// Each disk's export names, by the rule in the help of `spile serve`.
fn export_names(disks: &[DiskSpec]) -> Vec<Vec<String>> {
    let several = disks.len() > 1;
    let names = disks.iter().enumerate().map(|(number, spec)| {
        let own = spec.name.clone().or_else(|| several.then(|| disks::stem(&spec.source)));
        let default = (number == 0).then(String::new);
        let mut names: Vec<String> = default.into_iter().chain(own).collect();
        names.dedup();
        names
    });
    names.collect()
}

/// The disk that is exported under `name`.
///
/// # Errors
/// `NotFound` with the names that there are.
pub fn find<'a>(disks: &'a [Open], name: &str) -> Result<&'a Open> {
    let found = disks.iter().find(|open| open.names.iter().any(|other| other == name));
    found.ok_or_else(|| no_export(disks.iter().map(|open| &open.names), name))
}

fn no_export<'a>(known: impl IntoIterator<Item = &'a Vec<String>>, name: &str) -> Error {
    let known: Vec<_> = known.into_iter().flatten().map(|name| format!("{name:?}")).collect();
    Error::new(ErrorKind::NotFound, format!("no disk is exported as {name:?}"))
        .hint(format!("the exports are {}", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(disks: &[&str]) -> Vec<Vec<String>> {
        export_names(&disks.iter().map(|disk| disk.parse().unwrap()).collect::<Vec<_>>())
    }

    #[test]
    fn a_disk_is_the_file_that_was_opened_and_not_what_its_path_names_by_then() {
        let dir = tempfile::tempdir().unwrap();
        let [path, other] = ["a.raw", "b.raw"].map(|name| dir.path().join(name));
        [&path, &other].into_iter().for_each(|path| std::fs::write(path, [0; 4096]).unwrap());
        let spec: DiskSpec = path.display().to_string().parse().unwrap();
        let opening = Opening::new(None, CacheMode::Page, Vec::new());
        let engine = Engine::start(spile_engine::Config { workers: 1, ..Default::default() }).unwrap();
        let before = opening.identity_of(&spec);
        let (graph, checkpoints) = opening.open_patiently(&engine, &spec, &OpenOptions::default(), &|_| None).unwrap();
        std::fs::rename(&other, &path).unwrap();
        let open = opening.opened(graph, checkpoints, &spec, vec![String::new()]);
        assert!(open.identity.is_same(&before) && !open.identity.is_same(&opening.identity_of(&spec)));
        close(&engine, vec![open], Ok(())).unwrap();
        engine.shutdown();
    }

    #[test]
    fn an_image_is_prepared_for_writes_once_it_is_sure_to_be_served() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.vhd");
        let start = || Engine::start(spile_engine::Config { workers: 1, ..Default::default() }).unwrap();
        let (engine, made) = (start(), path.clone());
        let create = move || async move {
            let store = spile_store::OsFiles::new(CacheMode::Page).create(&made, 0)?;
            let new = spile_image::create::NewImage::new(64 << 20);
            Format::of(&made, None)?.create(&store, &spile_engine::OsEnv, &new).await
        };
        engine.run_on(0, create).unwrap();
        engine.shutdown();
        let len_bytes = || std::fs::metadata(&path).unwrap().len();
        let before = len_bytes();
        let spec = path.display().to_string().parse().unwrap();
        let opening = Opening::new(None, CacheMode::Page, Vec::new()).with_disks(vec![spec]);
        for is_served in [false, true] {
            let (engine, mut disks) = (start(), Vec::new());
            opening.open(&engine, &mut disks, &[]).unwrap();
            if is_served {
                begin(&engine, &disks, &mpsc::channel().0);
            }
            engine.shutdown();
            assert_eq!(len_bytes() > before, is_served);
        }
    }

    #[test]
    fn a_flush_that_does_not_end_is_waited_for_within_a_bound() {
        let engine = Engine::start(spile_engine::Config { workers: 1, ..Default::default() }).unwrap();
        let mut disks = Vec::new();
        let opening = Opening::new(None, CacheMode::Page, Vec::new()).with_disks(vec!["null:1M".parse().unwrap()]);
        opening.open(&engine, &mut disks, &[]).unwrap();
        flush(&engine, &disks, BUSY_PATIENCE).unwrap();
        let effect = spile_node::Effect::Delay(Duration::from_secs(2));
        let rule = spile_node::Fault { ops: Vec::new(), extent: None, per_million: 1_000_000, effect };
        let faults = Arc::new(spile_node::Faults::new(vec![rule], 1, Arc::new(spile_engine::OsEnv)));
        let disk = disks[0].disk.clone();
        engine.run_on(0, move || async move { disk.attach(spile_node::Place::Fault, faults).await }).unwrap();
        let late = flush(&engine, &disks, Duration::from_millis(1)).unwrap_err();
        assert!(late.kind() == ErrorKind::TimedOut && late.to_string().contains("null could not be flushed"), "{late}");
        close(&engine, disks, Ok(())).unwrap();
        engine.shutdown();
    }

    #[test]
    fn the_first_disk_is_the_default_export() {
        assert_eq!(names(&["a.vhd"]), [[""]]);
        assert_eq!(names(&["a.vhd,name=x"]), [["", "x"]]);
        assert_eq!(names(&["a.vhd,name="]), [[""]]);
        assert_eq!(names(&["a.vhd", "b.raw,name=y"]), [vec!["", "a"], vec!["y"]]);
    }
}
