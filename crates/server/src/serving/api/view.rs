//! [`View`]: what a server serves now, for callers that only look. They never wait for the server's main thread, which may be busy
//! with a slow disk.

use std::sync::{Arc, Mutex, PoisonError};

use spile_core::{Disk as _, Error, ErrorKind, Result};
use spile_front::FrontReading;

use super::types::{Disk, DiskDetail, DiskList, Export, Layer, Meter};
use crate::serving::disks::{Open, ServedDisk};

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
        Disk {
            name: self.name.clone(),
            path: self.label.clone(),
            format: self.layers.first().map_or_else(String::new, |leaf| leaf.format.clone()),
            virtual_size_bytes: self.disk.info().size_bytes,
            read_only: self.read_only,
            server: server.to_owned(),
            exports: self.exports.clone(),
        }
    }

    fn detail(&self, server: &str) -> DiskDetail {
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
            connections: meters.iter().map(|meter| meter.connections).sum(),
            meters,
        }
    }
}

/// What is served now.
#[derive(Default)]
pub struct View {
    /// `None` while the server hands over, and once it has ended.
    disks: Mutex<Option<Arc<Vec<DiskView>>>>,
}

impl View {
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
        Ok(self.disks()?.iter().map(|disk| disk.detail(server)).collect())
    }

    /// The disk of this name.
    ///
    /// # Errors
    /// `NotFound` with the names that there are; `Shutdown` while the server hands over.
    pub fn find(&self, server: &str, name: &str) -> Result<DiskDetail> {
        let disks = self.disks()?;
        let found = disks.iter().find(|disk| disk.name == name);
        found.map(|disk| disk.detail(server)).ok_or_else(|| no_disk(disks.iter().map(|disk| &disk.name), name))
    }
}

/// No disk has this name.
pub fn no_disk<'a>(known: impl Iterator<Item = &'a String>, name: &str) -> Error {
    let known: Vec<_> = known.map(|name| format!("{name:?}")).collect();
    Error::new(ErrorKind::NotFound, format!("no disk is named {name:?}")).hint(match known.is_empty() {
        true => "the server has no disk".to_owned(),
        false => format!("the disks are {}", known.join(", ")),
    })
}
