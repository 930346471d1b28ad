//! [`Vring`]: one queue as its front end describes it, stopped or at work.

use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};

use rustix::net::{Shutdown, shutdown};
use spile_core::{Disk, Error, ErrorKind, Result};
use spile_engine::Event;
use spile_front::FrontCounters;

use crate::config::feature;
use crate::execute::Target;
use crate::inflight::InflightRegion;
use crate::log::Log;
use crate::memory::GuestMemory;
use crate::queue::{Ended, Link, QueueLog, Setup, run};
use crate::ring::{Parts, Ring, available_bytes, descriptors_bytes, used_bytes};
use crate::server::ServerState;
use crate::wire::VringAddr;

/// What all queues of a connection need to start.
pub(crate) struct Context<D> {
    pub(crate) shared: Arc<ServerState<D>>,
    pub(crate) target: Arc<Target<Arc<D>>>,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) features: u64,
    pub(crate) log: Option<Log>,
    pub(crate) hang_up: Arc<OwnedFd>,
    /// The guest knows that its disk was handed over to another host.
    pub(crate) is_gone: bool,
}

impl<D> Context<D> {
    fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }
}

/// One queue.
pub(crate) struct Vring {
    /// The number of descriptors; 0 until the front end has told it.
    pub(crate) size: u16,
    pub(crate) addr: Option<VringAddr>,
    /// While the queue is stopped: the index of the available ring at which it goes on.
    pub(crate) base: u16,
    /// While the queue is stopped: chains before `base` that are still to be done. With an in-flight region there
    /// are none here, because that notes them.
    pub(crate) left: Vec<u16>,
    /// While the queue is stopped: the number of chains before `base` that were not answered, because the server ends.
    pub(crate) undone: usize,
    pub(crate) is_enabled: bool,
    pub(crate) kick: Option<Arc<Event>>,
    pub(crate) err: Option<Arc<Event>>,
    pub(crate) link: Arc<Link>,
    counters: Arc<FrontCounters>,
    /// While the queue is at work: receives how it ended.
    running: Option<mpsc::Receiver<Ended>>,
    /// True when the driver has broken the ring: the queue stays stopped until the front end describes it again.
    pub(crate) is_broken: bool,
    /// True when the queue's task has panicked, so that nobody knows what is in flight.
    has_panicked: bool,
}

impl Vring {
    pub(crate) fn new(counters: Arc<FrontCounters>) -> Self {
        Self {
            size: 0,
            addr: None,
            base: 0,
            left: Vec::new(),
            undone: 0,
            is_enabled: false,
            kick: None,
            err: None,
            link: Arc::default(),
            counters,
            running: None,
            is_broken: false,
            has_panicked: false,
        }
    }

    /// True while the queue is at work.
    pub(crate) fn is_at_work(&self) -> bool {
        self.running.is_some()
    }

    /// True when the front end has said all that the queue needs to start, and it has not started.
    pub(crate) fn is_ready(&self) -> bool {
        self.addr.is_some() && self.kick.is_some() && self.is_enabled && !self.is_broken && !self.is_at_work()
    }

    pub(crate) fn ask_to_stop(&self) {
        if self.running.is_some() {
            self.link.stop();
        }
    }

    /// Stops the queue because its description changes. A broken ring may be whole after that.
    pub(crate) fn stop_to_change(&mut self) {
        self.stop();
        self.left.clear();
        self.undone = 0;
        self.is_broken = self.has_panicked;
    }

    /// Stops the queue if it is at work. What is in flight is answered first.
    pub(crate) fn stop(&mut self) {
        let Some(running) = self.running.take() else { return };
        self.link.stop();
        match running.recv() {
            Ok(ended) => {
                self.base = ended.next_avail;
                self.left = ended.left;
                self.undone = ended.undone;
                self.is_broken = ended.broken.is_some();
            }
            // The task has panicked, which the panic hook has reported. Nobody knows how far it came.
            Err(mpsc::RecvError) => (self.is_broken, self.has_panicked) = (true, true),
        }
        self.link = Arc::new(self.link.fresh());
    }

    /// The index of the available ring at which the queue goes on.
    ///
    /// # Errors
    /// When chains before it are still to be done, which an index cannot tell, or the queue's task has panicked, so that nobody knows
    /// what is in flight: the connection has to end.
    pub(crate) fn base(&self) -> Result<u16> {
        if self.has_panicked {
            return Err(Error::new(ErrorKind::Io, "a queue's task has panicked"));
        }
        match self.undone {
            0 => Ok(self.base),
            undone => Err(Error::new(ErrorKind::Busy, format!("{undone} requests of a queue wait for another server"))),
        }
    }

    /// The parts of the ring in our memory.
    ///
    /// # Errors
    /// `InvalidInput` when a part lies outside the guest's memory, or its address is not aligned.
    pub(crate) fn parts(&self, memory: &GuestMemory, addr: &VringAddr) -> Result<Parts> {
        let size = self.size;
        let find = |what: &str, at: u64, len: usize, align: u64| {
            let found = memory.at_user(at, len).filter(|segment| (at | segment.as_ptr() as u64).is_multiple_of(align));
            found.ok_or_else(|| {
                let what = format!("its {what} at {at:#x} lies outside the guest's memory, or is not aligned");
                Error::new(ErrorKind::InvalidInput, what)
            })
        };
        if size == 0 {
            return Err(Error::new(ErrorKind::InvalidInput, "its size was not said before its addresses"));
        }
        Ok(Parts {
            size,
            descriptors: find("descriptor table", addr.descriptors, descriptors_bytes(size), 16)?,
            available: find("available ring", addr.available, available_bytes(size), 2)?,
            used: find("used ring", addr.used, used_bytes(size), 4)?,
        })
    }

    /// Starts the queue unless something is missing or it is at work already.
    pub(crate) fn start<D: Disk>(
        &mut self,
        index: usize,
        context: &Context<D>,
        inflight: Option<&InflightRegion>,
    ) -> Result<()> {
        let (Some(addr), Some(kick)) = (self.addr, self.kick.clone()) else { return Ok(()) };
        if self.running.is_some() || !self.is_enabled || self.is_broken {
            return Ok(());
        }
        // A ring whose memory was removed waits until the memory is back.
        let Ok(parts) = self.parts(&context.memory, &addr) else { return Ok(()) };
        if !context.shared.gate.lets_in(&context.target.name, context.is_gone) {
            return Ok(());
        }
        let inflight = inflight.map(|region| region.queue(index, self.size)).transpose()?;
        // A connection that has just ended may still have writes of the same guest in flight: they have to end first.
        context.shared.wait_for_ending(&context.hang_up)?;
        let (mut again, has_event_idx) = (Vec::new(), context.has(feature::EVENT_IDX));
        let mut ring = Ring::new(parts, has_event_idx, self.base);
        if let Some(left) = inflight.as_ref().and_then(|queue| queue.recover(ring.published())) {
            // Each request that was popped is either published or in flight.
            self.base = ring.published().wrapping_add(left.len() as u16);
            ring = Ring::new(self.parts(&context.memory, &addr)?, has_event_idx, self.base);
            again = left;
        }
        self.undone = 0;
        if inflight.is_none() {
            again = std::mem::take(&mut self.left);
        }
        let setup = Setup {
            target: context.target.clone(),
            memory: context.memory.clone(),
            ring,
            has_indirect: context.has(feature::INDIRECT_DESC),
            inflight,
            again,
            log: self.log(context, &addr),
            kick,
            pins_memory: context.shared.config.pins_memory,
            link: self.link.clone(),
            counters: self.counters.clone(),
        };
        self.spawn(index, context, setup);
        Ok(())
    }

    fn log<D>(&self, context: &Context<D>, addr: &VringAddr) -> Option<QueueLog> {
        let log = context.log.clone()?;
        let logs_data = context.has(feature::LOG_ALL);
        Some(QueueLog { log, logs_data, used_addr: addr.is_logged.then_some(addr.log) })
    }

    fn spawn<D: Disk>(&mut self, index: usize, context: &Context<D>, setup: Setup<Arc<D>>) {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.running = Some(receiver);
        let (err, hang_up) = (self.err.clone(), context.hang_up.clone());
        let name = context.target.name.clone();
        let shared = context.shared.clone();
        context.shared.engine.spawn_on(context.shared.worker(index), move || async move {
            let ended = run(setup).await;
            if let Some(broken) = ended.broken {
                if shared.may_complain() {
                    let why = broken.0;
                    tracing::warn!(disk = %name, queue = index, why, "a guest has broken the rules of its queue: the queue is stopped");
                }
                if let Some(err) = err {
                    err.ring();
                }
                if ended.is_lost {
                    // Nothing that the front end shares can be trusted any more.
                    let _ = shutdown(&*hang_up, Shutdown::Both);
                }
            }
            let _ = sender.send(ended);
        });
    }
}
