//! [`View`]: what a server serves now, for callers that only look. They never wait for the server's main thread, which may be busy
//! with a slow disk.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use spile_core::metrics::span::SpanLog;
use spile_core::{Disk as _, Error, ErrorKind, Extent, Result, Store as _};
use spile_engine::Engine;
use spile_front::{Breakdown, FrontReading, Passage};
use spile_image::GraphLayer;
use spile_image::layer::Layer as _;
use spile_node::{Policy, Shape, Shaping, Troubles};
use spile_store::{HostStore, may_be_same_export};
use tokio::sync::oneshot;

use super::images::{Image, Info, MapLayer, MapPart, Run, ServedBy, map_layers};
use super::limits::{ChangeLimits, DiskLimits, GroupList};
use super::slow::{Gathered, SlowRequests};
use super::stats::{AllStats, DiskStats, LayerKind, LayerStats};
use super::trace::Queues;
use super::types::{
    self, Accepted, Change, Disk, DiskDetail, DiskList, Export, FailedSync, Layer, Learned, Meter, Resumed, Waiting,
};
use super::workers::Workers;
use crate::checkpoints::Checkpoints;
use crate::host_device::HostDevice;
use crate::serving::disks::{Open, ServedDisk, layers_of};
use crate::serving::doors::{Doors, blocking};
use crate::serving::failed_syncs;
use crate::serving::growing::{self, Growth};
use crate::serving::jobs::{DiskJob, DiskJobs};
use crate::serving::limits::{self, Groups};
use crate::serving::metrics::Detail;
use crate::serving::pausing::Pausing;
use crate::uri::{Address, NbdUri};

/// A way to a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontName {
    /// `nbd`, `vhost-user` or `xen`.
    pub protocol: &'static str,
    /// The name of the export, where there are exports.
    pub export: Option<String>,
}

impl fmt::Display for FrontName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "front {}", self.protocol)?;
        self.export.iter().try_for_each(|export| write!(f, " {export:?}"))
    }
}

/// Reads what a front has counted of a disk.
pub type ReadMeter = Arc<dyn Fn(Breakdown) -> FrontReading + Send + Sync>;

/// Finds what is kept of the requests of a front's queues, rings or workers.
pub type ReadSpans = Arc<dyn Fn() -> Vec<Arc<SpanLog>> + Send + Sync>;

/// The part of a disk whose map is asked for in one go. A worker is not kept from its guests for longer than this takes.
const MAP_STEP_BYTES: u64 = 4 << 30;
/// The time after which a part of a map is answered although it may be short.
const MAP_PATIENCE: Duration = Duration::from_secs(1);

/// One disk as callers see it.
pub struct DiskView {
    name: String,
    layers: Vec<Layer>,
    read_only: bool,
    disk: Arc<ServedDisk>,
    jobs: Arc<DiskJobs>,
    checkpoints: Arc<Checkpoints>,
    pausing: Arc<Pausing>,
    growth: Arc<Growth>,
    exports: Vec<Export>,
    meters: Vec<(FrontName, ReadMeter)>,
    spans: Vec<(FrontName, ReadSpans)>,
    doors: Doors,
}

impl DiskView {
    /// What is known of an open disk, with the ways to it and what its fronts count.
    pub fn new(
        open: &Open,
        exports: Vec<Export>,
        meters: Vec<(FrontName, ReadMeter)>,
        spans: Vec<(FrontName, ReadSpans)>,
        doors: Doors,
    ) -> Self {
        Self {
            name: open.name.clone(),
            layers: open.layers.clone(),
            read_only: open.read_only,
            disk: open.disk.clone(),
            jobs: open.jobs.clone(),
            checkpoints: open.checkpoints.clone(),
            pausing: open.pausing.clone(),
            growth: open.growth.clone(),
            exports,
            meters,
            spans,
            doors,
        }
    }

    /// The images as they are now: snapshots and merges change them while the disk is served.
    fn layers(&self) -> Vec<Layer> {
        self.disk.graph_now().map_or_else(|| self.layers.clone(), |graph| layers_of(&graph))
    }

    fn summary(&self, server: &str) -> Disk {
        let troubles = self.disk.troubles();
        let waiting = troubles.and_then(Troubles::waiting);
        let waited = troubles.map(Troubles::waited).unwrap_or_default();
        let failed_sync = self.disk.graph_now().and_then(|graph| failed_syncs::find(&graph));
        let policy = troubles.map(Troubles::policy).unwrap_or_default();
        let (layers, paused) = (self.layers(), self.pausing.now());
        let leaf = layers.first();
        Disk {
            state: match (&paused, &waiting, &failed_sync) {
                (Some(_), ..) => "paused",
                // A pause, too, holds the disk for a moment before it is told, and after it has ended.
                _ if self.jobs.are_held_for_revert() && self.disk.is_held() => "reverting",
                (None, Some(_), _) => "waiting",
                (None, None, Some(_)) => "sync_failed",
                (None, None, None) => match self.doors.passage() {
                    Passage::Open if self.doors.lacks_memory() => "memory_not_shared",
                    Passage::Open => "running",
                    Passage::Coming => "incoming",
                    Passage::Gone => "handed_over",
                },
            }
            .to_owned(),
            paused,
            failed_sync: failed_sync.as_ref().map(FailedSync::from),
            waiting: waiting.as_ref().map(Waiting::new),
            waited_requests: waited.requests,
            waited_s: waited.time_ns as f64 / 1e9,
            room: self.growth.show(),
            on_error: policy.on_error.to_string(),
            pause_at_most_s: policy.pause_at_most.map(|time| time.as_secs_f64()),
            shape: self.disk.shaping().shape().to_string(),
            shape_learned: self.disk.shaping().learned().into_iter().map(Learned::from).collect(),
            checkpoints: self.checkpoints.names(),
            checkpoints_lost: self.checkpoints.loss(),
            limits: self.disk.limits().map(|limits| DiskLimits::from(&**limits)).unwrap_or_default(),
            name: self.name.clone(),
            path: self.leaf_path(),
            format: leaf.map_or_else(String::new, |leaf| leaf.format.clone()),
            virtual_size_bytes: self.disk.info().size_bytes,
            read_only: self.read_only,
            server: server.to_owned(),
            pid: std::process::id(),
            exports: self.exports.clone(),
        }
    }

    fn show_job(&self, job: &DiskJob, server: &str) -> types::Job {
        job.show(&self.name, &self.leaf_path(), server)
    }

    fn served_by(&self, server: &str) -> ServedBy {
        ServedBy { disk: self.name.clone(), server: server.to_owned(), pid: std::process::id() }
    }

    fn detail(&self, server: &str, engine: &Engine) -> DiskDetail {
        let without_front = |requests| FrontReading { requests, ..FrontReading::default() };
        let fronts = self.meters.iter().map(|(layer, read)| Meter::new(layer.to_string(), &read(Breakdown::Sum)));
        let disk = Meter::new("disk".to_owned(), &without_front(self.disk.meter().read()));
        let graph = self.disk.graph_now();
        let images = graph
            .iter()
            .flat_map(|graph| graph.handles())
            .map(|image| Meter::new(format!("image {}", image.path().display()), &without_front(image.meter().read())));
        let meters: Vec<Meter> = fronts.chain([disk]).chain(images).collect();
        DiskDetail {
            disk: self.summary(server),
            layers: self.layers(),
            engine: engine.kind().to_string(),
            engine_about: engine.about(),
            connections: meters.iter().map(|meter| meter.connections).sum(),
            meters,
        }
    }

    fn queues(&self) -> Queues {
        let of_front = |(front, read): &(FrontName, ReadSpans)| {
            let logs = read().into_iter().enumerate();
            logs.map(|(queue, log)| (front.to_string(), queue as u32, log)).collect::<Vec<_>>()
        };
        self.spans.iter().flat_map(of_front).collect()
    }

    fn slow(&self, server: &str) -> SlowRequests {
        let mut gathered = Gathered::default();
        self.queues().iter().for_each(|(front, queue, log)| gathered.add(front, *queue, log));
        let [in_flight, answered] = gathered.lists();
        let ServedBy { disk, server, pid } = self.served_by(server);
        SlowRequests { disk, server, pid, in_flight, answered }
    }

    /// What was counted of the disk, as finely as `detail` wants it. What it does not want is not read.
    fn stats(&self, server: &str, detail: Detail) -> DiskStats {
        let breakdown = if detail == Detail::Queue { Breakdown::Queues } else { Breakdown::Sum };
        let mut layers: Vec<_> =
            self.meters.iter().map(|(name, read)| LayerStats::of_front(name, &read(breakdown))).collect();
        if detail != Detail::Disk {
            layers.push(self.stats_of_disk());
            let graph = self.disk.graph_now();
            layers.extend(graph.iter().flat_map(|graph| graph.handles()).flat_map(|image| stats_of_image(image)));
        }
        DiskStats {
            name: self.name.clone(),
            path: self.leaf_path(),
            server: server.to_owned(),
            pid: std::process::id(),
            host_device: None,
            no_host_device: None,
            layers,
        }
    }

    fn stats_of_disk(&self) -> LayerStats {
        let (bounces, bounced_bytes) = self.disk.bounced();
        let mut disk = LayerStats::of_meter(LayerKind::Disk, "disk".to_owned(), self.disk.meter())
            .with_counters([("bounces_total", bounces), ("bounced_bytes_total", bounced_bytes)]);
        disk.counters.extend(shaping_counters(self.disk.shaping()));
        disk
    }

    /// Where the disk's bytes are: a path, or the URI of an export.
    fn leaf_path(&self) -> String {
        self.layers().first().map_or_else(String::new, |leaf| leaf.path.clone())
    }
}

/// What an image of a disk and the stores below it have counted.
fn stats_of_image(image: &GraphLayer<HostStore>) -> Vec<LayerStats> {
    let name = format!("image {}", image.path().display());
    let counters = [("map_loads_total", image.map_loads()), ("allocations_total", image.image().allocations())];
    let stats = LayerStats::of_meter(LayerKind::Image, name, image.meter()).with_counters(counters);
    let (own, data) = (image.image().store(), image.image().data_store());
    let data = (!std::ptr::eq(own, data)).then_some(data);
    [stats].into_iter().chain([own].into_iter().chain(data).map(stats_of_store)).collect()
}

fn stats_of_store(store: &HostStore) -> LayerStats {
    let name = format!("store {}", store.path().display());
    let stats = LayerStats::of_meter(LayerKind::Store, name, store.meter());
    match store.syncs() {
        Some(syncs) => stats.with_counters([("syncs_total", syncs)]),
        None => stats,
    }
}

/// What is served now.
pub struct View {
    engine: Engine,
    groups: Arc<Groups>,
    /// `None` while the server hands over, and once it has ended.
    disks: Mutex<Option<Arc<Vec<DiskView>>>>,
    /// The jobs of disks that were detached, the oldest first.
    left_jobs: Mutex<Vec<types::Job>>,
}

/// So many jobs of disks that were detached are kept.
const MOST_LEFT_JOBS: usize = 32;

impl View {
    /// Nothing is served yet. `engine` does the I/O, and disks share limits in `groups`.
    pub fn new(engine: Engine, groups: Arc<Groups>) -> Self {
        Self { engine, groups, disks: Mutex::default(), left_jobs: Mutex::default() }
    }

    /// From now on callers see these disks. `None`: callers are told to ask again later.
    pub fn show(&self, disks: Option<Vec<DiskView>>) {
        *self.disks.lock().unwrap_or_else(PoisonError::into_inner) = disks.map(Arc::new);
    }

    fn disks(&self) -> Result<Arc<Vec<DiskView>>> {
        let disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        disks.ok_or_else(ended)
    }

    /// All disks.
    ///
    /// # Errors
    /// `Shutdown` while the server hands over.
    pub fn list(&self, server: &str) -> Result<DiskList> {
        Ok(DiskList { disks: self.disks()?.iter().map(|disk| disk.summary(server)).collect() })
    }

    /// All disks with what was counted of them, as finely as `detail` wants it.
    ///
    /// # Errors
    /// `Shutdown` while the server hands over.
    pub fn readings(&self, detail: Detail) -> Result<Vec<(Disk, DiskStats)>> {
        Ok(self.disks()?.iter().map(|disk| (disk.summary(""), disk.stats("", detail))).collect())
    }

    /// What does the I/O: `uring`, `aio` or `threads`.
    pub fn engine(&self) -> String {
        self.engine.kind().to_string()
    }

    /// All disks with all that is known of them.
    ///
    /// # Errors
    /// `Shutdown` while the server hands over.
    pub fn details(&self, server: &str) -> Result<Vec<DiskDetail>> {
        Ok(self.disks()?.iter().map(|disk| disk.detail(server, &self.engine)).collect())
    }

    /// The disk of this name.
    ///
    /// # Errors
    /// `NotFound` with the names that there are; `Shutdown` while the server hands over.
    pub fn find(&self, server: &str, name: &str) -> Result<DiskDetail> {
        self.with(name, |disk| Ok(disk.detail(server, &self.engine)))
    }

    /// What was counted of the disk of this name, and the device below it, if the file system tells that soon.
    ///
    /// # Errors
    /// As [`View::find`].
    pub fn stats(&self, server: &str, name: &str) -> Result<DiskStats> {
        let mut stats = self.with(name, |disk| Ok(disk.stats(server, Detail::Queue)))?;
        match HostDevice::below_soon(&stats.path) {
            Ok(device) => stats.host_device = Some(device),
            Err(why) => stats.no_host_device = Some(why.to_string()),
        }
        Ok(stats)
    }

    /// What the server's workers have done.
    pub fn workers(&self, server: &str) -> Workers {
        Workers::new(server, &self.engine)
    }

    /// What was counted of all disks.
    ///
    /// # Errors
    /// `Shutdown` while the server hands over.
    pub fn all_stats(&self, server: &str) -> Result<AllStats> {
        Ok(AllStats { disks: self.disks()?.iter().map(|disk| disk.stats(server, Detail::Queue)).collect() })
    }

    /// The slowest requests of the disk of this name.
    ///
    /// # Errors
    /// As [`View::find`].
    pub fn slow(&self, server: &str, name: &str) -> Result<SlowRequests> {
        self.with(name, |disk| Ok(disk.slow(server)))
    }

    /// The queues of the fronts of the disk of this name.
    ///
    /// # Errors
    /// As [`View::find`].
    pub fn queues(&self, name: &str) -> Result<Queues> {
        self.with(name, |disk| Ok(disk.queues()))
    }

    /// What the images of the disk of this name say of themselves now.
    ///
    /// # Errors
    /// As [`View::find`]; `Busy` in the moment of an exchange.
    pub fn info(&self, server: &str, name: &str) -> Result<Info> {
        self.with(name, |disk| {
            let graph = disk.disk.graph_now().ok_or_else(changes)?;
            let layers = graph.layers().iter().map(|layer| Image::new(layer, true)).collect();
            Ok(Info::new(Some(graph.info().request_align_bytes), layers, Some(disk.served_by(server))))
        })
    }

    /// Part of the map of the disk of this name, from `offset_bytes` on: at most `max_runs` runs, and what is found in about a
    /// second. It may wait for the disk's store, as a guest's request does.
    ///
    /// # Errors
    /// As [`View::find`]; the images'.
    pub async fn map(&self, server: &str, name: &str, offset_bytes: u64, max_runs: usize) -> Result<MapPart> {
        let (disk, served_by) = self.with(name, |disk| Ok((disk.disk.clone(), disk.served_by(server))))?;
        let (mut runs, mut at, begun) = (Vec::new(), offset_bytes, Instant::now());
        let layers = loop {
            let (found, layers) = self.step_of_map(&disk, at, max_runs - runs.len()).await?;
            at = found.last().map_or(u64::MAX, |run| run.offset_bytes + run.len_bytes);
            runs.extend(found);
            if at >= disk.size_bytes() || runs.len() >= max_runs || begun.elapsed() > MAP_PATIENCE {
                break layers;
            }
        };
        Ok(MapPart { runs, next_offset_bytes: (at < disk.size_bytes()).then_some(at), layers, served_by })
    }

    /// The runs of a piece of the disk that begins at `at`, found on a worker; none from the disk's end on.
    async fn step_of_map(&self, disk: &Arc<ServedDisk>, at: u64, max_runs: usize) -> Result<(Vec<Run>, Vec<MapLayer>)> {
        let (disk, (sender, found)) = (disk.clone(), oneshot::channel());
        self.engine.spawn_on(0, move || async move {
            let end = at.saturating_add(MAP_STEP_BYTES).min(disk.size_bytes());
            let look = disk.look(async |graph| {
                let runs =
                    if at < end { graph.places(Extent::from_range(at..end), max_runs).await? } else { Vec::new() };
                Ok((runs.into_iter().map(Run::from).collect(), map_layers(graph.handles())))
            });
            // A caller that has gone does not need the answer.
            let _ = sender.send(look.await);
        });
        found.await.map_err(|_| ended())?
    }

    fn with<T>(&self, name: &str, act: impl FnOnce(&DiskView) -> Result<T>) -> Result<T> {
        let disks = self.disks()?;
        let found = disks.iter().find(|disk| disk.name == name);
        act(found.ok_or_else(|| no_disk(disks.iter().map(|disk| &disk.name), name))?)
    }

    /// Keeps these jobs of the disk `name` at `path`, which is detached, as they are now: for those who look later.
    pub fn keep_jobs(&self, name: &str, path: &str, jobs: &[Arc<DiskJob>]) {
        let mut left = self.left_jobs.lock().unwrap_or_else(PoisonError::into_inner);
        left.retain(|old| !jobs.iter().any(|job| job.id() == old.id));
        left.extend(jobs.iter().map(|job| job.show(name, path, "")));
        let most = left.len().saturating_sub(MOST_LEFT_JOBS);
        left.drain(..most);
    }

    /// The jobs of disks that were detached.
    fn left_jobs(&self, server: &str) -> Vec<types::Job> {
        let left = self.left_jobs.lock().unwrap_or_else(PoisonError::into_inner).clone();
        left.into_iter().map(|job| types::Job { server: server.to_owned(), ..job }).collect()
    }

    /// The jobs of all disks, also of those that were detached.
    ///
    /// # Errors
    /// `Shutdown` when the server ends.
    pub fn jobs(&self, server: &str) -> Result<Vec<types::Job>> {
        let disks = self.disks()?;
        let shown = disks.iter().flat_map(|disk| disk.jobs.list().into_iter().map(|job| disk.show_job(&job, server)));
        Ok(self.left_jobs(server).into_iter().chain(shown).collect())
    }

    /// The job of this name.
    ///
    /// # Errors
    /// `NotFound`; `Shutdown` when the server ends.
    pub fn job(&self, server: &str, id: &str) -> Result<types::Job> {
        match self.left_jobs(server).into_iter().find(|job| job.id == id) {
            Some(job) => Ok(job),
            None => self.with_job(id, |disk, job| Ok(disk.show_job(job, server))),
        }
    }

    /// Does what `change` says with the job of this name.
    ///
    /// # Errors
    /// As [`View::job`]; `InvalidInput` for a state that nobody can ask for.
    pub fn change_job(&self, id: &str, change: &types::JobChange) -> Result<()> {
        self.with_job(id, |_, job| job.change(change))
    }

    /// Hands the disk over whose copy the job of this name keeps in step on another host: its guests do not use it here any more.
    ///
    /// # Errors
    /// As [`View::job`] and [`Doors::hand_over`].
    pub async fn hand_over(&self, id: &str) -> Result<()> {
        let (job, doors) = self.with_job(id, |disk, job| {
            job.refuse_hand_over()?;
            Ok((job.clone(), disk.doors.clone()))
        })?;
        // It comes to its end, whether or not the caller waits for that.
        let done = tokio::spawn(doors.hand_over(job)).await;
        done.unwrap_or_else(|_| Err(Error::new(ErrorKind::Shutdown, "the server ends")))
    }

    /// Begins a job on a disk, and waits until it is known whether it is refused.
    ///
    /// # Errors
    /// As [`View::find`]; why it is refused.
    pub async fn begin_job(&self, server: &str, new: &types::NewJob) -> Result<types::Job> {
        let (disk, jobs) = self.with(&new.disk, |disk| Ok((disk.disk.clone(), disk.jobs.clone())))?;
        self.refuse_own_export(new.to.as_deref(), "a disk cannot be moved to where it is served").await?;
        let job = jobs.begin(&self.engine, &disk, new).await?;
        self.with(&new.disk, |disk| Ok(disk.show_job(&job, server)))
    }

    /// The disk of this name, its jobs, and its path.
    ///
    /// # Errors
    /// As [`View::find`].
    pub(super) fn served(&self, name: &str) -> Result<(Arc<ServedDisk>, Arc<DiskJobs>, String)> {
        self.with(name, |disk| Ok((disk.disk.clone(), disk.jobs.clone(), disk.leaf_path())))
    }

    /// The checkpoints of the disk of this name.
    ///
    /// # Errors
    /// As [`View::find`].
    pub(super) fn checkpoints_of(&self, name: &str) -> Result<Arc<Checkpoints>> {
        self.with(name, |disk| Ok(disk.checkpoints.clone()))
    }

    /// Runs what `make` makes on a worker.
    pub(super) fn spawn<Fut: Future<Output = ()> + 'static>(&self, make: impl FnOnce() -> Fut + Send + 'static) {
        self.engine.spawn_on(0, make);
    }

    /// Refuses to move or back up a disk to an export of this server, `to`: what is written there would be written to that disk or another one
    /// in use. `what` says what is not done.
    pub(super) async fn refuse_own_export(&self, to: Option<&str>, what: &str) -> Result<()> {
        let Some(to) = to.and_then(|to| to.parse::<NbdUri>().ok()) else { return Ok(()) };
        let disks = self.disks()?;
        let exports = disks.iter().flat_map(|disk| &disk.exports).filter(|export| export.protocol == "nbd");
        let addresses: Vec<Address> = exports.filter_map(|export| export.address.parse().ok()).collect();
        drop(disks);
        let ours = |address| NbdUri { address, export: String::new(), tls: None };
        // A name server may have to be asked.
        let is_ours = move || addresses.into_iter().any(|address| may_be_same_export(&ours(address), &to));
        match tokio::task::spawn_blocking(is_ours).await {
            Ok(true) => {
                let what = format!("this server serves the export itself: {what}");
                Err(Error::new(ErrorKind::InvalidInput, what).hint("name an export of another server"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses what has to wait for requests of the disk of this name while they are held back.
    ///
    /// # Errors
    /// As [`View::find`]; `Busy` while the disk is paused.
    pub(super) fn refuse_paused(&self, name: &str) -> Result<()> {
        match self.with(name, |disk| Ok(disk.pausing.now()))? {
            Some(_) => {
                let what = format!("a pause of the disk {name:?} is under way");
                Err(Error::new(ErrorKind::Busy, what).hint("try again when it has ended"))
            }
            None => Ok(()),
        }
    }

    fn with_job<T>(&self, id: &str, act: impl FnOnce(&DiskView, &Arc<DiskJob>) -> Result<T>) -> Result<T> {
        let disks = self.disks()?;
        let found = disks.iter().find_map(|disk| {
            let job = disk.jobs.list().into_iter().find(|job| job.id() == id)?;
            Some((disk, job))
        });
        let (disk, job) = found.ok_or_else(|| match self.left_jobs("").into_iter().find(|job| job.id == id) {
            Some(job) => super::super::jobs::is_over(id, &job.state),
            None => super::super::jobs::no_such_job(id),
        })?;
        act(disk, &job)
    }

    /// Ends the pause `pause` of the disk of this name. When none is given, lets guests in that wait for a disk that moves between hosts.
    /// Then tries all requests again that wait for trouble below it to pass, and has the disk take up what its device has gained.
    ///
    /// # Errors
    /// As [`View::find`]; `TimedOut` when this very pause is over; `Busy` when no pause is given and the disk is paused, or another host still
    /// writes to it.
    pub async fn resume(&self, name: &str, pause: Option<&str>, as_it_is: bool) -> Result<Resumed> {
        let (disk, growth) = self.with(name, |disk| Ok((disk.disk.clone(), disk.growth.clone())))?;
        let (pausing, doors, jobs) =
            self.with(name, |disk| Ok((disk.pausing.clone(), disk.doors.clone(), disk.jobs.clone())))?;
        let paused_s = match pause {
            Some(id) => Some(pausing.resume(id).await?.as_secs_f64()),
            None => {
                pausing.refuse(name)?;
                if doors.passage() == Passage::Gone {
                    jobs.refuse_open_copy()?;
                }
                blocking(move || doors.let_in(as_it_is)).await?;
                None
            }
        };
        let requests = disk.troubles().and_then(Troubles::waiting).map_or(0, |waiting| waiting.requests);
        self.try_again(&growth, disk);
        Ok(Resumed { requests, paused_s })
    }

    /// Tries all requests again that wait for trouble to pass. A disk on a device takes up before what that has gained, so that they find it. The caller
    /// does not wait for the disk's storage.
    fn try_again(&self, growth: &Growth, disk: Arc<ServedDisk>) {
        growth.forget_failures();
        if growth.show().is_none() {
            disk.troubles().map(Troubles::try_again);
            return;
        }
        self.spawn(move || async move {
            if let Err(error) = growing::look(&disk).await {
                tracing::warn!("what the disk's device may have gained cannot be taken up: {error}");
            }
            disk.troubles().map(Troubles::try_again);
        });
    }

    /// Accepts what a failed sync of the disk of this name may have lost: its flushes succeed again, unless a parent has lost something,
    /// too.
    ///
    /// # Errors
    /// As [`View::find`]; `Busy` in the moment of an exchange; the system's, when it cannot be made known to the next server.
    pub fn accept_loss(&self, name: &str) -> Result<Accepted> {
        self.with(name, |disk| {
            let graph = disk.disk.graph_now().ok_or_else(changes)?;
            let accepted = failed_syncs::accept(&graph)?;
            let remaining = accepted.remaining.iter().map(FailedSync::from).collect();
            Ok(Accepted { failed_sync: accepted.failed_sync.as_ref().map(FailedSync::from), remaining })
        })
    }

    /// Changes the policy of the disk of this name as `change` says, also for requests that wait already.
    ///
    /// # Errors
    /// As [`View::find`]; `InvalidInput` when `change` has no such policy or time.
    pub fn set_policy(&self, name: &str, change: &Change) -> Result<()> {
        self.with(name, |disk| {
            let Some(troubles) = disk.disk.troubles() else { return Ok(()) };
            let policy = changed(troubles.policy(), change)?;
            troubles.set_policy(policy);
            Ok(())
        })
    }

    /// Gives requests of the disk of this name that begin from now on another shape.
    ///
    /// # Errors
    /// As [`View::find`]; `Shutdown` when the disk is closed.
    pub async fn set_shape(&self, name: &str, shape: Shape) -> Result<()> {
        let disk = self.with(name, |disk| Ok(disk.disk.clone()))?;
        self.on_worker(async move || disk.set_shape(shape).await).await
    }

    /// Changes the limits of the disk of this name.
    ///
    /// # Errors
    /// As [`View::find`]; `InvalidInput` when they cannot be kept.
    pub async fn set_limits(&self, name: &str, change: ChangeLimits) -> Result<()> {
        let disk = self.with(name, |disk| Ok(disk.disk.clone()))?;
        let groups = self.groups.clone();
        self.on_worker(async move || groups.change_disk(&disk, &change).await).await
    }

    /// The groups in which disks share limits.
    pub fn groups(&self) -> GroupList {
        GroupList { groups: self.groups.list() }
    }

    /// Changes the limits that the disks of the group of this name share.
    ///
    /// # Errors
    /// `InvalidInput` when they cannot be kept; `Shutdown` while the server hands over.
    pub async fn set_group_limits(&self, name: &str, change: &ChangeLimits) -> Result<()> {
        self.disks()?;
        self.groups.change(name, change)?;
        // The list of now: a disk that is attached at this moment is in it, or meets the new limits when it comes there.
        let disks: Vec<_> = self.disks()?.iter().map(|disk| disk.disk.clone()).collect();
        self.on_worker(async move || limits::place_all(&disks).await).await
    }

    /// Has a worker do `work` with the disk of this name and its checkpoints, and waits for its end.
    ///
    /// # Errors
    /// As [`View::find`]; those of `work`.
    pub(super) async fn with_checkpoints<T: Send + 'static>(
        &self,
        name: &str,
        work: impl AsyncFnOnce(&ServedDisk, &Checkpoints) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (disk, checkpoints) = self.with(name, |disk| Ok((disk.disk.clone(), disk.checkpoints.clone())))?;
        self.on_worker(async move || work(&disk, &checkpoints).await).await
    }

    /// Has a worker do `work`, and waits for its end.
    async fn on_worker<T: Send + 'static>(&self, work: impl AsyncFnOnce() -> Result<T> + Send + 'static) -> Result<T> {
        let (sender, done) = oneshot::channel();
        self.engine.spawn_on(0, move || async move {
            // A caller that has gone does not need the answer.
            let _ = sender.send(work().await);
        });
        done.await.map_err(|_| ended())?
    }
}

/// What was counted of shaping the requests of a disk.
fn shaping_counters(shaping: &Shaping) -> [(String, u64); 2] {
    [("splits_total".to_owned(), shaping.splits()), ("merges_total".to_owned(), shaping.merges())]
}

/// The images of a disk are exchanged at this moment.
fn changes() -> Error {
    Error::new(ErrorKind::Busy, "the images of the disk are just exchanged").hint("try again")
}

/// The server answers no more.
fn ended() -> Error {
    Error::new(ErrorKind::Shutdown, "the server hands over or ends").hint("ask again")
}

/// The policy that becomes of `policy` by `change`.
fn changed(mut policy: Policy, change: &Change) -> Result<Policy> {
    if let Some(on_error) = &change.on_error {
        policy.on_error = on_error.parse()?;
    }
    if let Some(time_s) = change.pause_at_most_s {
        let bad = |_| Error::new(ErrorKind::InvalidInput, format!("{time_s} s is no time to wait"));
        policy.pause_at_most = Some(Duration::try_from_secs_f64(time_s).map_err(bad)?).filter(|time| !time.is_zero());
    }
    Ok(policy)
}

/// No disk has this name.
pub fn no_disk<'a>(known: impl Iterator<Item = &'a String>, name: &str) -> Error {
    let known: Vec<_> = known.map(|name| format!("{name:?}")).collect();
    Error::new(ErrorKind::NotFound, format!("no disk is named {name:?}")).hint(match known.is_empty() {
        true => "the server has no disk".to_owned(),
        false => format!("the disks are {}", known.join(", ")),
    })
}
