//! Where a Xen is: on this host, or in a folder of the program's stand-in for Xen.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use spile_core::Result;
use spile_xen::store::XenStore;
use spile_xen::sys::{Evtchn, Gntdev};
use spile_xen::{EventChannels, Grants};

/// A Xen: its xenstore, and the ways to its guests' pages and events. This crate has [`HostXen`]; the program adds one that is
/// made of ordinary processes.
pub trait Place: Clone + Send + 'static {
    /// Connects to xenstore.
    ///
    /// # Errors
    /// The sockets and devices that were tried, and why they do not answer.
    fn open(&self) -> Result<XenStore>;

    /// The folder in which tools look for statistics of disks.
    fn stats_root(&self) -> PathBuf;

    /// The arguments by which another process of this program uses the same Xen.
    fn arguments(&self) -> Vec<OsString>;

    /// Opens the ways to guests' pages and events, and runs `work` over them.
    ///
    /// # Errors
    /// Which device is missing, and what brings it.
    fn run<W: OverXen>(&self, work: W) -> Result<W::Output>;
}

/// Work that needs the grants and event channels of a Xen, of whichever type these are.
pub trait OverXen {
    /// What the work returns.
    type Output;

    /// Does the work.
    fn run<G: Grants, E: EventChannels>(self, grants: Arc<G>, events: Arc<E>) -> Self::Output;
}

/// The Xen of this host.
#[derive(Clone, Debug)]
pub struct HostXen {
    /// The socket or device of xenstore, unless it is at one of the usual places.
    pub xenstore: Option<PathBuf>,
}

impl Place for HostXen {
    fn open(&self) -> Result<XenStore> {
        self.xenstore.as_ref().map_or_else(XenStore::open_default, |path| XenStore::open(path))
    }

    fn stats_root(&self) -> PathBuf {
        "/dev/shm".into()
    }

    fn arguments(&self) -> Vec<OsString> {
        self.xenstore.iter().flat_map(|path| ["--xenstore".into(), path.clone().into()]).collect()
    }

    fn run<W: OverXen>(&self, work: W) -> Result<W::Output> {
        Ok(work.run(Arc::new(Gntdev::open()?), Arc::new(Evtchn::open()?)))
    }
}
