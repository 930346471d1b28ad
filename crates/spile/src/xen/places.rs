//! Where a Xen is: the one of this host, or the stand-in made of ordinary processes.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use spile_core::Result;
use spile_lab::xen::Hypervisor;
use spile_xen::store::XenStore;
use spile_xen::sys::{Evtchn, Gntdev};
use spile_xen::{EventChannels, Grants};

/// Where xenstore is.
#[derive(Clone, Debug, Args)]
pub struct StorePlace {
    /// The socket or device of xenstore ($XENSTORED_PATH, /run/xenstored/socket or /dev/xen/xenbus, unless given)
    #[arg(long, value_name = "PATH", conflicts_with = "lab")]
    pub xenstore: Option<PathBuf>,
    /// Use the Xen of `spile lab` in this folder instead of this host's
    #[arg(long, value_name = "DIR")]
    pub lab: Option<PathBuf>,
}

impl StorePlace {
    /// Connects to xenstore.
    ///
    /// # Errors
    /// What was tried, and why it is not there.
    pub fn open(&self) -> Result<XenStore> {
        match (&self.lab, &self.xenstore) {
            (Some(dir), _) => XenStore::open(&dir.join("xenstored")),
            (None, Some(path)) => XenStore::open(path),
            (None, None) => XenStore::open_default(),
        }
    }

    /// The same as arguments of another process.
    pub fn arguments(&self) -> Vec<std::ffi::OsString> {
        let pair = |option: &str, path: &Option<PathBuf>| {
            path.as_ref().map(|path| [option.into(), path.clone().into_os_string()])
        };
        [pair("--xenstore", &self.xenstore), pair("--lab", &self.lab)].into_iter().flatten().flatten().collect()
    }
}

/// Ways to guests' pages and events.
pub enum Places {
    /// The devices of this host.
    Host(Arc<Gntdev>, Arc<Evtchn>),
    /// The stand-in.
    Lab(Arc<Hypervisor>),
}

impl Places {
    /// Opens the devices, or connects to the stand-in.
    ///
    /// # Errors
    /// Which device is missing, and what brings it.
    pub fn open(place: &StorePlace) -> Result<Self> {
        match &place.lab {
            Some(dir) => Ok(Self::Lab(Arc::new(Hypervisor::connect(dir)?))),
            None => Ok(Self::Host(Arc::new(Gntdev::open()?), Arc::new(Evtchn::open()?))),
        }
    }
}

/// What is done over one or the other.
pub trait OverPlaces {
    /// What comes of it.
    type Output;

    /// Does it.
    fn run<G: Grants, E: EventChannels>(self, grants: Arc<G>, events: Arc<E>) -> Self::Output;
}

impl Places {
    /// Does `what` over these.
    pub fn run<W: OverPlaces>(&self, what: W) -> W::Output {
        match self {
            Self::Host(grants, events) => what.run(grants.clone(), events.clone()),
            Self::Lab(hypervisor) => what.run(hypervisor.clone(), hypervisor.clone()),
        }
    }
}
