//! [`Session`]: what a front end has told us (features, memory, rings). It applies the front end's messages one by one.
//!
//! A message either takes effect as a whole or fails and changes nothing. A queue at work is never changed under way:
//! it is stopped (what is in flight is answered), changed, and started again where it ended. Only the notification of
//! answers changes while it works, because front ends do that often.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use spile_core::{Disk, Error, ErrorKind, Result};
use spile_engine::Event;

use crate::channel::{Fds, Notices};
use crate::config::{self, WRITEBACK_AT, feature};
use crate::execute::Target;
use crate::inflight::InflightRegion;
use crate::log::Log;
use crate::memory::{GuestMemory, MAX_SLOTS, Region};
use crate::ring::MAX_QUEUE_SIZE;
use crate::server::ServerState;
use crate::shared;
use crate::vring::{Context, Vring};
use crate::wire::{self, Message, RegionInfo, VringAddr, protocol};

/// The answer to a message.
pub(crate) enum Reply {
    /// No payload: nothing is sent, unless the front end has asked for an acknowledgement.
    Done,
    /// A payload.
    Payload(Vec<u8>),
    /// A payload and a descriptor.
    WithFd(Vec<u8>, Arc<OwnedFd>),
}

impl Reply {
    fn number(number: u64) -> Self {
        Self::Payload(number.to_ne_bytes().to_vec())
    }
}

const PROTOCOL_FEATURES: u64 = protocol::MQ
    | protocol::LOG_SHMFD
    | protocol::REPLY_ACK
    | protocol::BACKEND_REQ
    | protocol::CONFIG
    | protocol::INFLIGHT_SHMFD
    | protocol::RESET_DEVICE
    | protocol::CONFIGURE_MEM_SLOTS;

/// One connection's state.
pub(crate) struct Session<D> {
    pub(crate) shared: Arc<ServerState<D>>,
    pub(crate) target: Arc<Target<Arc<D>>>,
    /// The socket, by which a queue can end the connection.
    pub(crate) hang_up: Arc<OwnedFd>,
    pub(crate) features: u64,
    pub(crate) protocol: u64,
    pub(crate) memory: Arc<GuestMemory>,
    /// So many regions were removed and none has come in their place, while the front end may still be about to share one.
    pub(crate) missing: usize,
    pub(crate) queues: Vec<Vring>,
    pub(crate) inflight: Option<InflightRegion>,
    pub(crate) log: Option<Log>,
    /// The socket for requests from us to the front end.
    pub(crate) notices: Arc<Notices>,
    pub(crate) is_writeback: bool,
    /// The region of requests in flight says that the disk was handed over to another host: the queues wait.
    pub(crate) is_gone: bool,
    /// Whether the front end has a copy of its own of the memory; `None` before that was looked at.
    is_private: Option<bool>,
}

impl<D: Disk> Session<D> {
    pub(crate) fn new(shared: Arc<ServerState<D>>, hang_up: Arc<OwnedFd>) -> Self {
        let queues = (0..shared.config.queues).map(|index| Vring::new(shared.counters(index))).collect();
        Self {
            target: Arc::new(shared.target()),
            shared,
            hang_up,
            features: 0,
            protocol: 0,
            memory: Arc::default(),
            missing: 0,
            queues,
            inflight: None,
            log: None,
            notices: Arc::default(),
            is_writeback: true,
            is_gone: false,
            is_private: None,
        }
    }

    /// True when the front end has shared memory of its guest.
    pub(crate) fn has_memory(&self) -> bool {
        !self.memory.is_empty()
    }

    /// True when features were agreed on.
    pub(crate) fn has_agreed(&self) -> bool {
        self.features | self.protocol != 0
    }

    fn offers(&self) -> u64 {
        config::features(self.target.read_only)
    }

    /// True when messages that are no questions are acknowledged if they ask for it.
    pub(crate) fn acknowledges(&self) -> bool {
        self.protocol & protocol::REPLY_ACK != 0
    }

    /// Applies a message and returns its answer.
    ///
    /// # Errors
    /// When the message makes no sense now, or cannot be carried out; nothing has changed then.
    pub(crate) fn apply(&mut self, message: Message, fds: Fds) -> Result<Reply> {
        let reply = match message {
            Message::GetFeatures => Reply::number(self.offers()),
            Message::GetProtocolFeatures => Reply::number(PROTOCOL_FEATURES),
            Message::GetQueueNum => Reply::number(self.queues.len() as u64),
            Message::GetMaxMemSlots => Reply::number(MAX_SLOTS),
            Message::GetConfig { offset, len, flags } => self.get_config(offset, len, flags),
            Message::GetVringBase { index } => self.get_base(index)?,
            Message::GetInflightFd { info, len } => self.get_inflight(info, len)?,
            other => return self.change(other, fds),
        };
        Ok(reply)
    }

    /// Applies a message that changes something.
    fn change(&mut self, message: Message, mut fds: Fds) -> Result<Reply> {
        match message {
            Message::SetFeatures(bits) => self.set_features(bits)?,
            Message::SetProtocolFeatures(bits) => self.set_protocol_features(bits)?,
            Message::SetMemTable(regions) => self.set_memory(&regions, fds)?,
            Message::AddMemReg(info) => {
                let memory = self.memory.with(map(info, fds.pop())?)?;
                self.replace_memory(memory);
                self.missing = self.missing.saturating_sub(1);
            }
            Message::RemMemReg(info) => {
                let memory = self.memory.without(&info)?;
                self.replace_memory(memory);
                self.missing += 1;
            }
            Message::SetConfig { offset, bytes } => self.set_config(offset, &bytes)?,
            Message::SetLogBase { len_bytes, file_offset_bytes } => {
                let log = Log::map(Arc::new(only(fds.pop())?), file_offset_bytes, len_bytes)?;
                self.stop_queues();
                self.log = Some(log);
                self.start_queues()?;
                // This message is always answered, whether or not the front end has asked for that.
                return Ok(Reply::number(0));
            }
            Message::SetInflightFd(info) => {
                let file = Arc::new(only(fds.pop())?);
                let region = InflightRegion::map(info, file, self.shared.config.queues)?;
                self.stop_queues();
                self.recall_write_cache(&region);
                self.is_gone = self.shared.gate.meet(&region);
                self.inflight = Some(region);
            }
            Message::SetBackendReqFd => self.notices.set_socket(fds.pop()),
            Message::ResetOwner | Message::ResetDevice => self.reset(),
            // The descriptor that could be rung for the log is not needed: the front end looks at the log when it
            // wants.
            Message::SetLogFd | Message::SetOwner => (),
            other => self.change_queue(other, fds)?,
        }
        self.start_queues()?;
        Ok(Reply::Done)
    }

    fn change_queue(&mut self, message: Message, mut fds: Fds) -> Result<()> {
        match message {
            Message::SetVringNum { index, num } => {
                let queue = self.queue(index)?;
                let size = u16::try_from(num).ok().filter(|n| n.is_power_of_two() && *n <= MAX_QUEUE_SIZE);
                let size = size.ok_or_else(|| invalid(format!("queue {index}: {num} is no size of a queue")))?;
                queue.stop_to_change();
                queue.size = size;
            }
            Message::SetVringAddr { index, addr } => self.set_addr(index, addr)?,
            Message::SetVringBase { index, base } => {
                let queue = self.queue(index)?;
                let base =
                    u16::try_from(base).map_err(|_| invalid(format!("queue {index}: base {base} has no 16 bits")))?;
                queue.stop_to_change();
                queue.base = base;
            }
            Message::SetVringEnable { index, enable } => {
                let queue = self.queue(index)?;
                queue.is_enabled = enable;
                if !enable {
                    queue.stop();
                }
            }
            Message::SetVringKick { index } => {
                let queue = self.queue(index.into())?;
                let kick = fds.pop().map(Event::from_fd).transpose()?;
                let kick = kick.ok_or_else(|| {
                    Error::new(
                        ErrorKind::Unsupported,
                        format!("queue {index}: a queue without a kick is not polled for ever"),
                    )
                })?;
                queue.stop_to_change();
                queue.kick = Some(Arc::new(kick));
            }
            Message::SetVringCall { index } => {
                let queue = self.queue(index.into())?;
                let call = fds.pop().map(Event::from_fd).transpose()?;
                queue.link.set_call(call.map(Arc::new));
            }
            Message::SetVringErr { index } => {
                let queue = self.queue(index.into())?;
                let err = fds.pop().map(Event::from_fd).transpose()?;
                queue.stop();
                queue.err = err.map(Arc::new);
            }
            other => unreachable!("{other:?} is applied elsewhere"),
        }
        Ok(())
    }

    fn queue(&mut self, index: u32) -> Result<&mut Vring> {
        let count = self.queues.len();
        let queue = usize::try_from(index).ok().and_then(|index| self.queues.get_mut(index));
        queue.ok_or_else(|| invalid(format!("there is no queue {index}, only {count}")))
    }

    fn set_features(&mut self, bits: u64) -> Result<()> {
        let unknown = bits & !self.offers();
        if unknown != 0 {
            return Err(invalid(format!("features {unknown:#x} were not offered")));
        }
        self.stop_queues();
        self.features = bits;
        if bits & feature::PROTOCOL_FEATURES == 0 {
            self.queues.iter_mut().for_each(|queue| queue.is_enabled = true);
        }
        self.update_write_cache();
        Ok(())
    }

    fn set_protocol_features(&mut self, bits: u64) -> Result<()> {
        let unknown = bits & !PROTOCOL_FEATURES;
        if unknown != 0 {
            return Err(invalid(format!("protocol features {unknown:#x} were not offered")));
        }
        self.protocol = bits;
        self.notices.agree(bits & protocol::BACKEND_REQ != 0);
        Ok(())
    }

    /// Sets whether writes are made durable before they are answered. That is so for a driver that cannot flush
    /// (section 5.2.5.1) and for one that has switched the write cache off.
    pub(crate) fn update_write_cache(&self) {
        let can_flush = self.features & feature::FLUSH != 0;
        self.target.is_write_through.store(!can_flush || !self.is_writeback, Ordering::Relaxed);
    }

    /// Takes up how the guest has switched the write cache. After a server was killed the front end does not tell that
    /// again, but the in-flight region does.
    fn recall_write_cache(&mut self, region: &InflightRegion) {
        match region.kept_write_cache() {
            Some(is_writeback) => self.is_writeback = is_writeback,
            None => region.keep_write_cache(self.is_writeback),
        }
        self.update_write_cache();
    }

    fn set_memory(&mut self, regions: &[RegionInfo], fds: Fds) -> Result<()> {
        let each = regions.iter().zip(fds);
        let memory = each
            .into_iter()
            .try_fold(GuestMemory::default(), |memory, (info, fd)| memory.with(map(*info, Some(fd))?))?;
        self.replace_memory(memory);
        self.missing = 0;
        Ok(())
    }

    fn replace_memory(&mut self, memory: GuestMemory) {
        self.stop_queues();
        self.memory = Arc::new(memory);
        self.is_private = None;
    }

    /// A part of the configuration space. A question that goes beyond the space is answered with no bytes, as the
    /// specification says.
    fn get_config(&self, offset: u32, len: u32, _flags: u32) -> Reply {
        if !wire::config_fits(offset, len) {
            return Reply::Payload(Vec::new());
        }
        let space = config::space(&self.shared.disk.info(), self.shared.config.queues, self.is_writeback);
        let byte = |at: u32| space.get(at as usize).copied().unwrap_or(0);
        let mut payload: Vec<u8> = [offset, len, 0].iter().flat_map(|number| number.to_ne_bytes()).collect();
        payload.extend((offset..offset + len).map(byte));
        Reply::Payload(payload)
    }

    /// Writes to the configuration space. Only the switch of the write cache can be written. The front end of a guest
    /// that has moved here writes the whole space as it was read there: everything but the switch is ignored.
    fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<()> {
        let switch = WRITEBACK_AT.checked_sub(offset).and_then(|at| bytes.get(at as usize));
        let Some(switch) = switch else { return Err(invalid("only the write cache can be configured".into())) };
        if self.features & feature::CONFIG_WCE != 0 || bytes.len() > 1 {
            self.is_writeback = *switch != 0;
            self.update_write_cache();
            if let Some(region) = &self.inflight {
                region.keep_write_cache(self.is_writeback);
            }
            return Ok(());
        }
        Err(invalid("the write cache cannot be switched: CONFIG_WCE was not agreed on".into()))
    }

    fn get_base(&mut self, index: u32) -> Result<Reply> {
        let queue = self.queue(index)?;
        queue.stop();
        // The queue stays stopped until its kick is set again.
        queue.kick = None;
        let state = [index, u32::from(queue.base()?)];
        Ok(Reply::Payload(state.iter().flat_map(|number| number.to_ne_bytes()).collect()))
    }

    fn get_inflight(&mut self, info: wire::InflightInfo, len: usize) -> Result<Reply> {
        let region = InflightRegion::create(info.queues, info.queue_size, self.shared.config.queues)?;
        Ok(Reply::WithFd(region.info.encode(len), region.file))
    }

    fn set_addr(&mut self, index: u32, addr: VringAddr) -> Result<()> {
        let memory = self.memory.clone();
        if memory.is_empty() {
            self.shared.miss_memory();
            return Err(invalid(format!("queue {index}: {}", shared::NOT_SHARED)));
        }
        let queue = self.queue(index)?;
        queue.parts(&memory, &addr).map_err(|error| invalid(format!("queue {index}: {error}")))?;
        queue.stop_to_change();
        queue.addr = Some(addr);
        Ok(())
    }

    fn reset(&mut self) {
        self.stop_queues();
        self.missing = 0;
        for queue in &mut self.queues {
            queue.stop_to_change();
            queue.is_enabled = false;
            queue.kick = None;
        }
    }

    /// True while a queue is at work.
    pub(crate) fn is_at_work(&self) -> bool {
        self.queues.iter().any(Vring::is_at_work)
    }

    /// The guest may use the disk from now on.
    pub(crate) fn let_in(&mut self) {
        self.is_gone = false;
        if let Some(region) = &self.inflight {
            region.forget_gone();
            self.shared.gate.give_pass(region);
        }
    }

    /// True when memory was removed, and the queues wait for what may come in its place: a front end that changes a region removes
    /// it and then adds it again, while its guest runs on. A request in between would fail.
    pub(crate) fn waits_for_memory(&self) -> bool {
        self.missing > 0
    }

    /// The front end has been silent since it removed memory: nothing comes in its place.
    ///
    /// # Errors
    /// As [`Self::start_queues`].
    pub(crate) fn go_on_without(&mut self) -> Result<()> {
        self.missing = 0;
        self.start_queues()
    }

    /// Starts each queue for which nothing is missing.
    ///
    /// # Errors
    /// When one cannot be started. The others are started all the same.
    pub(crate) fn start_queues(&mut self) -> Result<()> {
        if self.waits_for_memory() || !self.queues.iter().any(Vring::is_ready) {
            return Ok(());
        }
        if self.is_private() {
            self.shared.miss_memory();
            return Ok(());
        }
        let context = Context {
            shared: self.shared.clone(),
            target: self.target.clone(),
            memory: self.memory.clone(),
            features: self.features,
            log: self.log.clone(),
            hang_up: self.hang_up.clone(),
            is_gone: self.is_gone,
        };
        let queues = self.queues.iter_mut().enumerate();
        let results = queues.map(|(index, queue)| queue.start(index, &context, self.inflight.as_ref()));
        let started = results.fold(Ok(()), Result::and);
        if self.is_at_work() {
            self.shared.find_memory();
        }
        started
    }

    /// True when the front end has a copy of its own of the guest's memory. That is looked at when a queue is about to start, for by then the
    /// monitor has made its guest's memory.
    fn is_private(&mut self) -> bool {
        *self.is_private.get_or_insert_with(|| shared::is_private(self.hang_up.as_fd(), &self.memory))
    }

    /// Stops all queues. All are told before the first is waited for, so that they end at the same time.
    pub(crate) fn stop_queues(&mut self) {
        self.queues.iter().for_each(Vring::ask_to_stop);
        self.queues.iter_mut().for_each(Vring::stop);
    }
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidInput, what)
}

fn only(fd: Option<OwnedFd>) -> Result<OwnedFd> {
    fd.ok_or_else(|| invalid("a descriptor is missing".into()))
}

fn map(info: RegionInfo, fd: Option<OwnedFd>) -> Result<Region> {
    Region::map(info, Arc::new(only(fd)?))
}
