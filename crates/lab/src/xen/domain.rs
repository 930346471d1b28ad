//! A domain as a back end's process sees it: its memory, its grant table, and the uses of its grants.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use spile_core::{Error, ErrorKind, Result};
use spile_mem::Segment;
use spile_xen::{DomId, GrantRef, GrantStatus, XEN_PAGE_BYTES};

use super::pins::Pins;
use super::table::Table;
use crate::sys::{Remote, Window};

/// A domain, as the host has described it.
pub(super) struct Domain {
    id: DomId,
    remote: Remote,
    pub(super) memory: OwnedFd,
    memory_bytes: usize,
    pins: Mutex<Pins>,
    /// Its only number is 1 until the host knows that the domain has ended.
    life: Segment,
    /// For reading; for both.
    windows: [OnceLock<Arc<Window>>; 2],
}

impl Domain {
    pub(super) fn new(id: DomId, remote: Remote, [memory, table, life]: [OwnedFd; 3]) -> Result<Self> {
        let failed = |e| Error::io(format!("cannot map what domain {id} shares"), e);
        let len = |fd: &OwnedFd| rustix::fs::fstat(fd).map(|stat| stat.st_size as usize);
        let memory_bytes = len(&memory).map_err(|e| failed(e.into()))?;
        let table_bytes = len(&table).map_err(|e| failed(e.into()))?;
        let table = Table::new(Segment::map_shared(&table, 0, table_bytes).map_err(failed)?);
        let life = Segment::map_shared(&life, 0, 4).map_err(failed)?;
        let frames = u32::try_from(memory_bytes / XEN_PAGE_BYTES).unwrap_or(u32::MAX);
        let pins = Mutex::new(Pins::new(table, DomId(0), frames));
        let mut domain = Self { id, remote, memory, memory_bytes, pins, life, windows: Default::default() };
        if remote.pid == rustix::process::getpid().as_raw_nonzero().get() {
            // A guest in our own process may unmap its memory under a copy; our own mapping of it cannot go.
            domain.remote.base = domain.window(true).map_err(failed)?.address();
        }
        Ok(domain)
    }

    pub(super) fn is_alive(&self) -> bool {
        self.life.load_u32(0, Ordering::Relaxed) == 1
    }

    pub(super) fn pins(&self) -> MutexGuard<'_, Pins> {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn window(&self, is_writable: bool) -> std::io::Result<Arc<Window>> {
        let cell = &self.windows[usize::from(is_writable)];
        if let Some(window) = cell.get() {
            return Ok(window.clone());
        }
        let window = Arc::new(Window::new(&self.memory, self.memory_bytes, is_writable)?);
        Ok(cell.get_or_init(|| window).clone())
    }

    /// Begins uses of all `refs`, or of none of them.
    pub(super) fn begin_all(self: &Arc<Self>, refs: &[GrantRef], is_write: bool) -> Result<(Vec<u32>, Uses)> {
        let mut uses = Uses { domain: self.clone(), refs: Vec::with_capacity(refs.len()), is_write };
        let mut frames = Vec::with_capacity(refs.len());
        let mut pins = self.pins();
        for gref in refs {
            match pins.begin(*gref, is_write) {
                Ok(frame) => frames.push(frame),
                Err(status) => {
                    drop(pins);
                    return Err(refused(self.id, *gref, status));
                }
            }
            uses.refs.push(*gref);
        }
        drop(pins);
        Ok((frames, uses))
    }

    pub(super) fn remote(&self) -> Remote {
        self.remote
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Domain({}, {:?}, {} bytes)", self.id, self.remote, self.memory_bytes)
    }
}

fn refused(domain: DomId, gref: GrantRef, status: GrantStatus) -> Error {
    let message = format!("domain {domain} does not grant page {}: status {}", gref.0, status.0);
    Error::new(ErrorKind::Denied, message)
}

/// Uses that end together.
pub(super) struct Uses {
    domain: Arc<Domain>,
    refs: Vec<GrantRef>,
    is_write: bool,
}

impl Drop for Uses {
    fn drop(&mut self) {
        let mut pins = self.domain.pins();
        self.refs.iter().for_each(|gref| pins.end(*gref, self.is_write));
    }
}
