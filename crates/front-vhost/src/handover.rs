//! [`Handover`]: a connection as one process hands it over to another, which is its state as numbers, and its
//! descriptors in a fixed order.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use spile_core::{Disk, Error, ErrorKind, Result};
use spile_engine::Event;
use spile_front::Passage;

use crate::config;
use crate::inflight::InflightRegion;
use crate::log::Log;
use crate::memory::Region;
use crate::server::ServerState;
use crate::session::Session;
use crate::wire::{InflightInfo, RegionInfo, VringAddr, protocol};

/// A connection on its way to another process.
pub struct Handover {
    /// The front end's socket.
    pub socket: OwnedFd,
    /// Everything that is not a descriptor.
    pub state: ConnectionState,
    /// The descriptors that belong to the state, in its order.
    pub fds: Vec<OwnedFd>,
}

/// What a front end has told us. Each `true` here, and each entry that has a file, has one descriptor, in the order of
/// the fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionState {
    features: u64,
    protocol: u64,
    is_writeback: bool,
    memory: Vec<RegionInfo>,
    inflight: Option<InflightInfo>,
    log: Option<LogState>,
    has_backend: bool,
    queues: Vec<QueueState>,
    /// Regions that were removed, in the place of which others may be about to come. Builds before this field start the queues without them.
    #[serde(default, skip_serializing_if = "is_zero")]
    missing: usize,
    /// Whether the guest was let in to its disk, which may be on its way between hosts. Builds before this field do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    is_let_in: Option<bool>,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct LogState {
    file_offset_bytes: u64,
    len_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct QueueState {
    size: u16,
    addr: Option<VringAddr>,
    base: u16,
    /// Chains before `base` that were left undone, where no in-flight region notes them. Builds before this field answered all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    left: Vec<u16>,
    is_enabled: bool,
    is_broken: bool,
    has_kick: bool,
    has_call: bool,
    has_err: bool,
}

impl ConnectionState {
    /// True when chains were left undone that only this state notes: a build that does not know of them would never do them.
    pub fn has_left(&self) -> bool {
        self.queues.iter().any(|queue| !queue.left.is_empty())
    }
}

fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    fd.try_clone_to_owned().map_err(|source| Error::io("duplicate a descriptor to hand it over", source))
}

fn file_of(event: &Event) -> Result<OwnedFd> {
    duplicate(event.as_fd())
}

impl<D: Disk> Session<D> {
    /// Everything that another process needs to go on with this session. The queues have to be stopped.
    ///
    /// # Errors
    /// `Exhausted` when descriptors are short.
    pub(crate) fn save(&self, socket: BorrowedFd<'_>) -> Result<Handover> {
        use std::os::fd::AsFd;
        let mut fds = Vec::new();
        for region in self.memory.regions() {
            fds.push(duplicate(region.file.as_fd())?);
        }
        let files = [self.inflight.as_ref().map(|region| &region.file), self.log.as_ref().map(|log| &log.file)];
        for file in files.into_iter().flatten() {
            fds.push(duplicate(file.as_fd())?);
        }
        let notices = self.notices.duplicate();
        let notices = notices.map_err(|source| Error::io("duplicate a descriptor to hand it over", source))?;
        let has_backend = notices.is_some();
        fds.extend(notices);
        let mut queues = Vec::new();
        for queue in &self.queues {
            let call = queue.link.call();
            let events = [queue.kick.as_ref(), call.as_ref(), queue.err.as_ref()];
            for event in events.into_iter().flatten() {
                fds.push(file_of(event)?);
            }
            let [has_kick, has_call, has_err] = events.map(|event| event.is_some());
            let (size, addr, base, is_enabled) = (queue.size, queue.addr, queue.base, queue.is_enabled);
            let (left, is_broken) = (queue.left.clone(), queue.is_broken);
            queues.push(QueueState { size, addr, base, left, is_enabled, is_broken, has_kick, has_call, has_err });
        }
        let log = self.log.as_ref();
        let state = ConnectionState {
            features: self.features,
            protocol: self.protocol,
            is_writeback: self.is_writeback,
            memory: self.memory.regions().iter().map(|region| region.info).collect(),
            inflight: self.inflight.as_ref().map(|region| region.info),
            log: log.map(|log| LogState { file_offset_bytes: log.file_offset_bytes, len_bytes: log.len_bytes() }),
            has_backend,
            queues,
            missing: self.missing,
            is_let_in: Some(self.shared.gate.passage() == Passage::Open),
        };
        Ok(Handover { socket: duplicate(socket)?, state, fds })
    }

    /// Makes a session of what another process has saved. Its queues are stopped.
    ///
    /// # Errors
    /// `InvalidInput` when descriptors are missing, or the session has more queues than this server; else the error of
    /// mapping the guest's memory.
    pub(crate) fn restore(
        shared: Arc<ServerState<D>>,
        hang_up: Arc<OwnedFd>,
        state: ConnectionState,
        fds: Vec<OwnedFd>,
    ) -> Result<Self> {
        let max_queues = shared.config.queues;
        let mut session = Self::new(shared, hang_up);
        let mut fds = fds.into_iter();
        let mut next =
            || fds.next().ok_or_else(|| Error::new(ErrorKind::InvalidInput, "a descriptor of the handover is missing"));
        let offered = config::features(session.target.read_only);
        if state.features & !offered != 0
            || state.queues.iter().skip(max_queues.into()).any(|queue| queue.addr.is_some())
        {
            let what = "the guest has agreed on features or queues that this server does not have";
            return Err(Error::new(ErrorKind::InvalidInput, what).hint("serve with the same options as before"));
        }
        let mut memory = crate::memory::GuestMemory::default();
        for info in &state.memory {
            memory = memory.with(Region::map(*info, Arc::new(next()?))?)?;
        }
        session.memory = Arc::new(memory);
        if let Some(info) = state.inflight {
            let region = InflightRegion::map(info, Arc::new(next()?), max_queues)?;
            session.inflight = Some(region);
        }
        session.shared.gate.adopt(state.is_let_in, session.inflight.as_ref());
        session.is_gone = session.inflight.as_ref().is_some_and(|region| session.shared.gate.meet(region));
        if let Some(LogState { file_offset_bytes, len_bytes }) = state.log {
            session.log = Some(Log::map(Arc::new(next()?), file_offset_bytes, len_bytes)?);
        }
        session.notices.set_socket(state.has_backend.then(&mut next).transpose()?);
        session.notices.agree(state.protocol & protocol::BACKEND_REQ != 0);
        (session.features, session.protocol) = (state.features, state.protocol);
        session.is_writeback = state.is_writeback;
        session.update_write_cache();
        for (queue, saved) in session.queues.iter_mut().zip(state.queues) {
            let mut event = |has: bool| -> Result<Option<Arc<Event>>> {
                has.then(&mut next).transpose()?.map(Event::from_fd).transpose().map(|event| event.map(Arc::new))
            };
            (queue.size, queue.addr, queue.base) = (saved.size, saved.addr, saved.base);
            queue.left = saved.left.into_iter().filter(|head| *head < saved.size).collect();
            queue.undone = queue.left.len();
            queue.is_enabled = saved.is_enabled;
            queue.is_broken = saved.is_broken;
            queue.kick = event(saved.has_kick)?;
            queue.link.set_call(event(saved.has_call)?);
            queue.err = event(saved.has_err)?;
        }
        session.missing = state.missing;
        Ok(session)
    }
}
