//! The host: a folder of sockets, and one thread that serves them.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, eventfd};
use spile_core::{Error, Result, ResultExt};

use super::serve::Broker;

/// A Xen host. It ends when this value is dropped.
#[derive(Debug)]
pub struct Host {
    dir: PathBuf,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Host {
    /// Starts a host in the folder `dir`, which is made if it does not exist. Sockets that a killed host has left are
    /// replaced.
    ///
    /// # Errors
    /// `Busy` when a host serves the folder already; else with the path that could not be made.
    pub fn start(dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(|e| Error::io("cannot make the host's folder", e)).at_path(dir)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| Error::io("cannot make an eventfd", e.into()))?;
        let stop = Arc::new(stop);
        let broker = Broker::new(dir, stop.clone())?;
        let thread = thread::Builder::new().name("xen-host".into()).spawn(move || broker.run());
        let thread = thread.map_err(|e| Error::io("cannot start a thread", e))?;
        Ok(Self { dir: dir.to_owned(), stop, thread: Some(thread) })
    }

    /// The host's folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The socket on which domain 0 speaks to xenstored.
    pub fn xenstored(&self) -> PathBuf {
        self.dir.join("xenstored")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // Its panic has been printed.
            let _ = thread.join();
        }
    }
}
