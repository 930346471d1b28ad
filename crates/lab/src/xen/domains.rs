//! The host's list of domains: their shared memory, and their event channels.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, fcntl_get_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use spile_mem::Segment;
use spile_xen::DomId;

use super::guest::SEALS;
use super::message::{Message, Words, call};

/// The largest number of event channels of a domain.
const MAX_PORTS: usize = 1024;
/// Domain numbers from here on have other meanings on Xen (DOMID_FIRST_RESERVED).
const MAX_DOMAIN: u16 = 0x7ff0;

struct Channel {
    remote: DomId,
    kick: OwnedFd,
    call: OwnedFd,
}

struct Domain {
    pid: i32,
    base: u64,
    memory: OwnedFd,
    table: OwnedFd,
    life_file: OwnedFd,
    life: Segment,
    channels: BTreeMap<u32, Channel>,
    next_port: u32,
}

impl Drop for Domain {
    fn drop(&mut self) {
        self.life.store_u32(0, 0, Ordering::Release);
    }
}

/// All domains but 0, which is the host itself.
#[derive(Default)]
pub(super) struct Domains {
    all: BTreeMap<DomId, Domain>,
}

/// A reply, whose first number is 0.
pub(super) struct Reply<'a> {
    pub words: Words,
    pub fds: Vec<BorrowedFd<'a>>,
}

impl Reply<'_> {
    fn empty() -> Self {
        Self { words: Words::default(), fds: Vec::new() }
    }
}

/// What a request has changed among the domains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The sender is now this domain.
    Created(DomId),
    /// This domain has ended.
    Destroyed(DomId),
}

impl Domains {
    /// Ends a domain.
    pub fn remove(&mut self, id: DomId) -> bool {
        self.all.remove(&id).is_some()
    }

    /// A request that makes or ends a domain; `None` for all others.
    pub fn change(
        &mut self,
        socket: BorrowedFd<'_>,
        sender: Option<DomId>,
        message: &mut Message,
    ) -> Option<Result<Change, Errno>> {
        match message.words[0] {
            call::CREATE if sender.is_some() => Some(Err(Errno::BUSY)),
            call::CREATE => Some(self.create(socket, message).map(Change::Created)),
            call::DESTROY => Some(self.destroy(sender, message.words[1]).map(Change::Destroyed)),
            _ => None,
        }
    }

    fn create(&mut self, socket: BorrowedFd<'_>, message: &mut Message) -> Result<DomId, Errno> {
        let [_, id, base, ..] = message.words;
        let id = u16::try_from(id).ok().filter(|id| (1..MAX_DOMAIN).contains(id)).map(DomId).ok_or(Errno::INVAL)?;
        if self.all.contains_key(&id) {
            return Err(Errno::EXIST);
        }
        let fds: [OwnedFd; 2] = std::mem::take(&mut message.fds).try_into().map_err(|_| Errno::INVAL)?;
        for fd in &fds {
            if !fcntl_get_seals(fd)?.contains(SEALS) || rustix::fs::fstat(fd)?.st_size < 4096 {
                return Err(Errno::INVAL);
            }
        }
        let [memory, table] = fds;
        let pid = socket_peercred(socket)?.pid.as_raw_nonzero().get();
        let life_file = memfd_create("life", MemfdFlags::CLOEXEC)?;
        ftruncate(&life_file, 4096)?;
        let life = Segment::map_shared(&life_file, 0, 4).map_err(|_| Errno::NOMEM)?;
        life.store_u32(0, 1, Ordering::Release);
        let channels = BTreeMap::new();
        self.all.insert(id, Domain { pid, base, memory, table, life_file, life, channels, next_port: 1 });
        Ok(id)
    }

    fn destroy(&mut self, sender: Option<DomId>, id: u64) -> Result<DomId, Errno> {
        if sender.is_some() {
            return Err(Errno::PERM);
        }
        let id = u16::try_from(id).map(DomId).map_err(|_| Errno::INVAL)?;
        if self.remove(id) { Ok(id) } else { Err(Errno::NOENT) }
    }

    fn get(&mut self, id: u64) -> Result<&mut Domain, Errno> {
        u16::try_from(id).ok().and_then(|id| self.all.get_mut(&DomId(id))).ok_or(Errno::NOENT)
    }

    /// Runs any other request. It is from domain 0 when `sender` is `None`.
    pub fn answer(&mut self, sender: Option<DomId>, words: &Words) -> Result<Reply<'_>, Errno> {
        let own = sender.map_or(u64::MAX, |id| u64::from(id.0));
        match (words[0], words[1]) {
            (call::LOOK_UP, id) if sender.is_none() => Ok(self.get(id)?.describe()),
            (call::ALLOC_UNBOUND, remote) => self.get(own)?.alloc(remote),
            (call::CLOSE, port) => self.get(own)?.close(port),
            (call::BIND, id) => self.get(id)?.bind(sender.unwrap_or(DomId(0)), words[2]),
            (call::LOOK_UP, _) => Err(Errno::PERM),
            _ => Err(Errno::INVAL),
        }
    }
}

impl Domain {
    fn describe(&self) -> Reply<'_> {
        let fds = vec![self.memory.as_fd(), self.table.as_fd(), self.life_file.as_fd()];
        Reply { words: [0, self.pid as u64, self.base, 0, 0, 0], fds }
    }

    fn alloc(&mut self, remote: u64) -> Result<Reply<'_>, Errno> {
        let remote = u16::try_from(remote).map(DomId).map_err(|_| Errno::INVAL)?;
        if self.channels.len() >= MAX_PORTS {
            return Err(Errno::NOSPC);
        }
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let channel = Channel { remote, kick: event()?, call: event()? };
        let port = self.next_port;
        self.next_port = port.checked_add(1).ok_or(Errno::NOSPC)?;
        let channel = self.channels.entry(port).or_insert(channel);
        Ok(Reply { words: [0, u64::from(port), 0, 0, 0, 0], fds: vec![channel.kick.as_fd(), channel.call.as_fd()] })
    }

    fn close(&mut self, port: u64) -> Result<Reply<'_>, Errno> {
        let port = u32::try_from(port).map_err(|_| Errno::NOENT)?;
        self.channels.remove(&port).ok_or(Errno::NOENT).map(|_| Reply::empty())
    }

    fn bind(&self, by: DomId, port: u64) -> Result<Reply<'_>, Errno> {
        let port = u32::try_from(port).map_err(|_| Errno::NOENT)?;
        let channel = self.channels.get(&port).ok_or(Errno::NOENT)?;
        if channel.remote != by {
            return Err(Errno::ACCESS);
        }
        // Ringing from the start, as on Xen. A full counter rings too.
        let _ = rustix::io::write(&channel.kick, &1u64.to_ne_bytes());
        Ok(Reply { words: Words::default(), fds: vec![channel.kick.as_fd(), channel.call.as_fd()] })
    }
}
