//! [`Device`]: one disk for one guest, from the first key in xenstore to the last.
//!
//! Each device has a thread, which sleeps until xenstore reports a change and then goes through the states of xenbus.
//! The rings are tasks on the engine's workers. Watches come late, twice or for nothing, so each step looks at what
//! xenstore says now.
//!
//! A device that is *stopped* leaves guest and xenstore as they are, and the guest waits until another process goes on.
//! A process that is killed leaves the same, and its journals tell the next process what was not answered. A device
//! that is *paused* is left until the toolstack ends the pause. A device *ends* when its guest or the toolstack closes
//! it.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};
use spile_core::metrics::span::SpanLog;
use spile_core::{Disk, Error, ErrorKind, Result};
use spile_engine::Engine;
use spile_front::{Breakdown, FrontReading};
use spile_xen::store::XenStore;
use spile_xen::{EventChannels, Grants};

pub use crate::config::{Config, End};
use crate::control::{Control, Order, send};
use crate::execute::Target;
use crate::gate::Gate;
use crate::metrics::{Board, DiskCounters};
use crate::trace::Trace;
use crate::xenbus::{Offer, guest_of};

/// One disk for one guest.
pub struct Device {
    orders: mpsc::Sender<Order>,
    doorbell: Arc<OwnedFd>,
    counters: Arc<DiskCounters>,
    is_shut: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<End>>>,
}

impl Device {
    /// Serves `disk` to the guest of `config.backend_path`. The device calls `on_end` just before it ends. When its
    /// connection to xenstore is lost, it makes another one with `open_store`; its rings go on meanwhile.
    ///
    /// # Errors
    /// When the path names no guest, xenstore cannot be reached, or the system gives no thread or eventfd. A later
    /// failure ends the device, and [`Device::wait`] returns it.
    pub fn start<D: Disk, G: Grants, E: EventChannels>(
        engine: Engine,
        disk: Arc<D>,
        open_store: impl Fn() -> Result<XenStore> + Send + 'static,
        grants: Arc<G>,
        events: Arc<E>,
        config: Config,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self> {
        let (domain, device) = guest_of(&config.backend_path)?;
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let doorbell = Arc::new(fd.map_err(|errno| Error::io("make an eventfd", errno.into()))?);
        let (sender, orders) = mpsc::channel();
        let counters = Arc::new(DiskCounters::default());
        let is_shut = Arc::new(AtomicBool::new(false));
        let read_only = config.read_only || disk.info().read_only;
        let offer = Offer {
            max_order: config.max_order,
            max_queues: config.max_queues,
            max_indirect: config.max_indirect,
            access: config.access,
            read_only,
            splits_rings: config.splits_rings,
        };
        let trace_path = config.run_dir.join(format!("{domain}-{device}.trace"));
        let trace = match config.trace_records {
            0 => None,
            records => Some(Arc::new(Trace::create(&trace_path, records)?)),
        };
        let target = Target {
            disk,
            name: config.name.clone(),
            failures: Arc::default(),
            has_failed_flush: config.failed_syncs.flag(),
        };
        let mut control = Control {
            engine,
            target: Arc::new(target),
            store: open_store()?,
            open_store: Box::new(open_store),
            grants,
            events,
            offer,
            keeping: config.failed_syncs.keeping(),
            config,
            domain,
            counters: counters.clone(),
            trace,
            frontend: String::new(),
            mode: None,
            rings: Vec::new(),
            orders,
            doorbell: doorbell.clone(),
            complaints: Arc::default(),
            is_shut: is_shut.clone(),
            has_refused_pause: false,
        };
        let thread = std::thread::Builder::new().name("spile-blkif".into()).spawn(move || {
            let result = control.run();
            on_end();
            result
        });
        let thread = thread.map_err(|source| Error::io("start a thread for a guest's disk", source))?;
        Ok(Self { orders: sender, doorbell, counters, is_shut, thread: Some(thread) })
    }

    fn send(&self, order: Order) {
        send(&self.orders, &self.doorbell, order);
    }

    /// What is shut while the disk is handed over to another host, for as long as it lives, also when the device has ended.
    #[must_use]
    pub fn gate(&self) -> Gate {
        Gate::new(self.is_shut.clone(), self.orders.clone(), self.doorbell.clone())
    }

    /// Tells the guest that the disk has another size.
    pub fn resized(&self) {
        self.send(Order::Resized);
    }

    /// Has the device answer the requests that it has taken, and end. Guest and xenstore are left as they are, for the
    /// next process. [`Device::wait`] returns when that is done.
    pub fn stop(&self) {
        self.send(Order::Stop);
    }

    /// True when the device has ended.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the device has ended.
    ///
    /// # Errors
    /// The failure that ended it: xenstore is gone, or the guest can be served no more.
    pub fn wait(&mut self) -> Result<End> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(end)) => end,
            Some(Err(_)) => Err(Error::new(ErrorKind::Io, "the thread of a guest's disk panicked")),
            None => Ok(End::Stopped),
        }
    }

    /// What each ring has counted, over all connections of the guest.
    pub fn metrics(&self) -> Vec<FrontReading> {
        self.counters.metrics()
    }

    /// Reads what all rings have counted, for as long as the reader lives, also when the device has ended.
    pub fn reader(&self) -> impl Fn(Breakdown) -> FrontReading + Send + Sync + 'static {
        let counters = self.counters.clone();
        move |breakdown| counters.total(breakdown)
    }

    /// Finds what is kept of the requests of each ring, for as long as the reader lives, also when the device has ended.
    pub fn spans(&self) -> impl Fn() -> Vec<Arc<SpanLog>> + Send + Sync + 'static {
        let counters = self.counters.clone();
        move || counters.spans()
    }

    /// Shows the sums of what the rings count on `board`, from now on, at the end of each turn. A device has one board;
    /// a second one is ignored.
    pub fn show_on(&self, board: Arc<dyn Board>) {
        self.counters.show_on(board);
    }
}
