//! A guest: a process with memory and a grant table of its own.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::process::{PTracer, set_ptracer};
use spile_core::{Error, ErrorKind, Result};
use spile_mem::Segment;
use spile_xen::{DomId, GrantRef, Port, XEN_PAGE_BYTES};

use super::message::{Link, call, fds};
use super::table::{Entry, Table, flag};

/// The number of entries of a guest's grant table, as on Xen by default: 64 pages of 512 entries.
pub const GRANT_ENTRIES: u32 = 64 * 512;
/// The first entries belong to the toolstack on Xen.
const FIRST_GRANT: u32 = 8;

/// A run of pages of the guest's memory.
#[derive(Clone, Debug)]
pub struct Frames {
    /// The frame number of the first page.
    pub first: u32,
    /// The bytes of all pages.
    pub bytes: Segment,
}

impl Frames {
    /// The number of pages.
    pub fn count(&self) -> u32 {
        (self.bytes.len() / XEN_PAGE_BYTES) as u32
    }

    /// The bytes of one page.
    ///
    /// # Panics
    /// When the run has fewer pages.
    pub fn page(&self, number: u32) -> Segment {
        let at = number as usize * XEN_PAGE_BYTES;
        self.bytes.slice(at..at + XEN_PAGE_BYTES)
    }
}

/// The guest's end of an event channel.
#[derive(Debug)]
pub struct EventPort {
    /// The channel's port.
    pub port: Port,
    /// The eventfd by which the guest signals the back end.
    pub kick: OwnedFd,
    /// The eventfd by which the back end signals the guest.
    pub call: OwnedFd,
}

impl EventPort {
    /// Signals the back end. This can fail only when the eventfd's counter is full, and then the back end will look anyway.
    pub fn notify(&self) {
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
    }
}

#[derive(Debug)]
struct Free {
    /// The number of frames that were taken.
    taken: u32,
    /// Runs of frames that were given back.
    frames: Vec<Frames>,
    /// The first entry that was never used.
    next: u32,
    /// Entries of the grant table that were given back.
    grants: Vec<GrantRef>,
}

/// A domain. It ends when this value is dropped. Its process allows other processes of the same user to copy from and to
/// its memory.
pub struct Guest {
    id: DomId,
    dir: PathBuf,
    link: Link,
    memory: Segment,
    table: Table,
    free: Mutex<Free>,
}

impl Guest {
    /// Makes domain `id` on the host in `dir`, with `memory_bytes` of zeroed memory, rounded up to pages.
    ///
    /// # Errors
    /// `Exists` when there is such a domain, `InvalidInput` for domain 0, or when there is no host.
    pub fn create(dir: &Path, id: DomId, memory_bytes: usize) -> Result<Self> {
        Self::create_with_grants(dir, id, memory_bytes, GRANT_ENTRIES)
    }

    /// As [`Guest::create`], with a grant table of a given number of entries (at least 512).
    ///
    /// # Errors
    /// As [`Guest::create`].
    pub fn create_with_grants(dir: &Path, id: DomId, memory_bytes: usize, entries: u32) -> Result<Self> {
        let table_bytes = entries.max(512) as usize * 8;
        let memory_bytes = memory_bytes.max(1).next_multiple_of(XEN_PAGE_BYTES);
        let memory_file = sealed_file("guest", memory_bytes)?;
        let table_file = sealed_file("grants", table_bytes)?;
        let map = |file: &OwnedFd, len| {
            Segment::map_shared(file, 0, len).map_err(|e| Error::io("cannot map the guest's memory", e))
        };
        let (memory, table) = (map(&memory_file, memory_bytes)?, map(&table_file, table_bytes)?);
        // Without the security module that this is for there is nothing to allow.
        let _ = set_ptracer(PTracer::Any);
        let link = Link::connect(dir)?;
        let words = [call::CREATE, u64::from(id.0), memory.as_ptr() as u64];
        link.call(&format!("cannot create domain {id}"), &words, &[memory_file.as_fd(), table_file.as_fd()])?;
        let free = Mutex::new(Free { taken: 0, frames: Vec::new(), next: FIRST_GRANT, grants: Vec::new() });
        Ok(Self { id, dir: dir.to_owned(), link, memory, table: Table::new(table), free })
    }

    /// The domain's number.
    pub fn id(&self) -> DomId {
        self.id
    }

    /// The socket on which the guest speaks to xenstored.
    pub fn xenstored(&self) -> PathBuf {
        self.dir.join(format!("xenstored-{}", self.id))
    }

    /// All memory of the guest.
    pub fn memory(&self) -> &Segment {
        &self.memory
    }

    /// The guest's grant table. A test can do with it what no well-behaved guest does.
    pub fn table(&self) -> &Table {
        &self.table
    }

    fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes pages of its memory.
    ///
    /// # Errors
    /// `Exhausted` when too few are left.
    pub fn take_frames(&self, count: u32) -> Result<Frames> {
        let mut free = self.free();
        if let Some(place) = free.frames.iter().position(|frames| frames.count() == count) {
            return Ok(free.frames.swap_remove(place));
        }
        let (first, all) = (free.taken, (self.memory.len() / XEN_PAGE_BYTES) as u32);
        if count > all - first {
            return Err(Error::new(ErrorKind::Exhausted, format!("the guest has no {count} pages left of {all}")));
        }
        free.taken += count;
        let at = first as usize * XEN_PAGE_BYTES;
        Ok(Frames { first, bytes: self.memory.slice(at..at + count as usize * XEN_PAGE_BYTES) })
    }

    /// Gives pages back. Their content stays, and the next taker of a run of that length gets them.
    pub fn give_frames(&self, frames: Frames) {
        self.free().frames.push(frames);
    }

    /// Takes an entry of the grant table. The entry grants nothing yet.
    ///
    /// # Errors
    /// `Exhausted` when the table is full.
    pub fn reserve_grant(&self) -> Result<GrantRef> {
        let mut free = self.free();
        let gref = free.grants.pop().unwrap_or(GrantRef(free.next));
        if gref.0 >= self.table.entries() {
            return Err(Error::new(ErrorKind::Exhausted, "the guest's grant table is full"));
        }
        free.next = free.next.max(gref.0 + 1);
        Ok(gref)
    }

    /// Grants a page to a domain.
    ///
    /// # Errors
    /// `Exhausted` when the table is full.
    pub fn grant(&self, to: DomId, frame: u32, is_readonly: bool) -> Result<GrantRef> {
        let gref = self.reserve_grant()?;
        let flags = if is_readonly { flag::PERMIT_ACCESS | flag::READONLY } else { flag::PERMIT_ACCESS };
        self.table.set(gref, Entry { flags, domain: to.0, frame });
        Ok(gref)
    }

    /// Revokes a grant. False when it is in use; then nothing has changed.
    pub fn end_access(&self, gref: GrantRef) -> bool {
        let is_ended = self.table.end_access(gref);
        if is_ended {
            self.free().grants.push(gref);
        }
        is_ended
    }

    /// Makes an event channel that `remote` may bind to.
    ///
    /// # Errors
    /// `NoSpace` when the guest has 1024 channels already.
    pub fn alloc_unbound(&self, remote: DomId) -> Result<EventPort> {
        let reply = self.link.call("cannot make an event channel", &[call::ALLOC_UNBOUND, u64::from(remote.0)], &[])?;
        let port = Port(reply.words[1] as u32);
        let [kick, call] = fds(reply)?;
        Ok(EventPort { port, kick, call })
    }

    /// Closes an event channel. The back end that is bound to it gets no more signals.
    ///
    /// # Errors
    /// `NotFound` when the guest has no such port.
    pub fn close(&self, port: Port) -> Result<()> {
        self.link.call("cannot close the event channel", &[call::CLOSE, u64::from(port.0)], &[]).map(drop)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // The memory goes after this, and nobody shall begin to copy to its address any more.
        self.link.leave();
    }
}

impl fmt::Debug for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Guest({}, {} bytes)", self.id, self.memory.len())
    }
}

fn sealed_file(name: &str, len_bytes: usize) -> Result<OwnedFd> {
    let make = || {
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len_bytes as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        Ok(file)
    };
    make().map_err(|e: Errno| Error::io("cannot make the guest's memory", e.into()))
}

/// Seals that keep a file's length as it is.
pub(super) const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
