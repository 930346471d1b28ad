//! Where a Xen is, as an option: this host's, or the stand-in made of ordinary processes.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use spile_core::Result;
use spile_lab::xen::Hypervisor;
use spile_server::xen::{HostXen, OverXen, Place};
use spile_xen::store::XenStore;

/// Where xenstore is.
#[derive(Clone, Debug, Args)]
pub struct XenPlace {
    /// The socket or device of xenstore ($XENSTORED_PATH, /run/xenstored/socket or /dev/xen/xenbus, unless given)
    #[arg(long, value_name = "PATH", conflicts_with = "lab")]
    xenstore: Option<PathBuf>,
    /// Use the Xen of `spile xen-lab` in this folder instead of this host's
    #[arg(long, value_name = "DIR")]
    lab: Option<PathBuf>,
}

impl XenPlace {
    fn host(&self) -> HostXen {
        HostXen { xenstore: self.xenstore.clone() }
    }
}

impl Place for XenPlace {
    fn open(&self) -> Result<XenStore> {
        self.lab.as_ref().map_or_else(|| self.host().open(), |dir| XenStore::open(&dir.join("xenstored")))
    }

    fn stats_root(&self) -> PathBuf {
        self.lab.as_ref().map_or_else(|| self.host().stats_root(), |dir| dir.join("shm"))
    }

    fn arguments(&self) -> Vec<OsString> {
        self.lab.as_ref().map_or_else(|| self.host().arguments(), |dir| vec!["--lab".into(), dir.into()])
    }

    fn run<W: OverXen>(&self, work: W) -> Result<W::Output> {
        let Some(dir) = &self.lab else { return self.host().run(work) };
        let hypervisor = Arc::new(Hypervisor::connect(dir)?);
        Ok(work.run(hypervisor.clone(), hypervisor))
    }
}
