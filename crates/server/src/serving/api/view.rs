//! [`View`]: what a server serves now, for callers that only look. They never wait for the server's main thread, which may be busy
//! with a slow disk.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use spile_core::{Disk as _, Error, ErrorKind, Result};
use spile_engine::Engine;
use spile_front::FrontReading;
use spile_node::{Policy, Troubles};

use super::types::{Change, Disk, DiskDetail, DiskList, Export, FailedSync, Layer, Meter, Waiting};
use crate::serving::disks::{Open, ServedDisk};
use crate::serving::failed_syncs;

/// Reads what a front has counted of a disk.
pub type ReadMeter = Arc<dyn Fn() -> FrontReading + Send + Sync>;

/// One disk as callers see it.
pub struct DiskView {
    name: String,
    label: String,
    layers: Vec<Layer>,
    read_only: bool,
    disk: Arc<ServedDisk>,
    exports: Vec<Export>,
    meters: Vec<(String, ReadMeter)>,
}

impl DiskView {
    /// What is known of an open disk, with the ways to it and what its fronts count.
    pub fn new(open: &Open, exports: Vec<Export>, meters: Vec<(String, ReadMeter)>) -> Self {
        Self {
            name: open.name.clone(),
            label: open.label.clone(),
            layers: open.layers.clone(),
            read_only: open.read_only,
            disk: open.disk.clone(),
            exports,
            meters,
        }
    }

    fn summary(&self, server: &str) -> Disk {
        let troubles = self.disk.troubles();
        let waiting = troubles.and_then(Troubles::waiting);
        let failed_sync = self.disk.graph_now().and_then(|graph| failed_syncs::find(&graph));
        let policy = troubles.map(Troubles::policy).unwrap_or_default();
        Disk {
            state: match (&waiting, &failed_sync) {
                (Some(_), _) => "waiting",
                (None, Some(_)) => "sync_failed",
                (None, None) => "running",
            }
            .to_owned(),
            failed_sync: failed_sync.as_ref().map(FailedSync::from),
            waiting: waiting.as_ref().map(Waiting::new),
            on_error: policy.on_error.to_string(),
            pause_at_most_s: policy.pause_at_most.map(|time| time.as_secs_f64()),
            name: self.name.clone(),
            path: self.label.clone(),
            format: self.layers.first().map_or_else(String::new, |leaf| leaf.format.clone()),
            virtual_size_bytes: self.disk.info().size_bytes,
            read_only: self.read_only,
            server: server.to_owned(),
            exports: self.exports.clone(),
        }
    }

    fn detail(&self, server: &str, engine: &Engine) -> DiskDetail {
        let without_front = |requests| FrontReading { requests, ..FrontReading::default() };
        let fronts = self.meters.iter().map(|(layer, read)| Meter::new(layer.clone(), &read()));
        let disk = Meter::new("disk".to_owned(), &without_front(self.disk.meter().read()));
        let graph = self.disk.graph_now();
        let images = graph
            .iter()
            .flat_map(|graph| graph.handles())
            .map(|image| Meter::new(format!("image {}", image.path().display()), &without_front(image.meter().read())));
        let meters: Vec<Meter> = fronts.chain([disk]).chain(images).collect();
        DiskDetail {
            disk: self.summary(server),
            layers: self.layers.clone(),
            engine: engine.kind().to_string(),
            engine_about: engine.about(),
            connections: meters.iter().map(|meter| meter.connections).sum(),
            meters,
        }
    }
}

/// What is served now.
pub struct View {
    engine: Engine,
    /// `None` while the server hands over, and once it has ended.
    disks: Mutex<Option<Arc<Vec<DiskView>>>>,
}

impl View {
    /// Nothing is served yet. `engine` does the I/O.
    pub fn new(engine: Engine) -> Self {
        Self { engine, disks: Mutex::default() }
    }

    /// From now on callers see these disks. `None`: callers are told to ask again later.
    pub fn show(&self, disks: Option<Vec<DiskView>>) {
        *self.disks.lock().unwrap_or_else(PoisonError::into_inner) = disks.map(Arc::new);
    }

    fn disks(&self) -> Result<Arc<Vec<DiskView>>> {
        let disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        disks.ok_or_else(|| Error::new(ErrorKind::Shutdown, "the server hands over or ends").hint("ask again"))
    }

    /// All disks.
    ///
    /// # Errors
    /// `Shutdown` while the server hands over.
    pub fn list(&self, server: &str) -> Result<DiskList> {
        Ok(DiskList { disks: self.disks()?.iter().map(|disk| disk.summary(server)).collect() })
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

    fn with<T>(&self, name: &str, act: impl FnOnce(&DiskView) -> Result<T>) -> Result<T> {
        let disks = self.disks()?;
        let found = disks.iter().find(|disk| disk.name == name);
        act(found.ok_or_else(|| no_disk(disks.iter().map(|disk| &disk.name), name))?)
    }

    /// Tries all requests again that wait for trouble below the disk of this name to pass. Returns how many there are.
    ///
    /// # Errors
    /// As [`View::find`].
    pub fn resume(&self, name: &str) -> Result<u64> {
        self.with(name, |disk| Ok(disk.disk.troubles().map_or(0, Troubles::try_again)))
    }

    /// Accepts what a failed sync of the disk of this name may have lost: its flushes succeed again. Returns that sync, if there was one.
    ///
    /// # Errors
    /// As [`View::find`]; `Busy` in the moment of an exchange; the system's, when it cannot be made known to the next server.
    pub fn accept_loss(&self, name: &str) -> Result<Option<FailedSync>> {
        self.with(name, |disk| {
            let changes = || Error::new(ErrorKind::Busy, "the images of the disk are just exchanged").hint("try again");
            let graph = disk.disk.graph_now().ok_or_else(changes)?;
            Ok(failed_syncs::accept(&graph)?.as_ref().map(FailedSync::from))
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
