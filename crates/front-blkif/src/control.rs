//! [`Control`]: takes one device through the states of xenbus. It reads what the toolstack and the guest write in
//! xenstore, and answers there.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spile_core::{Disk, Error, ErrorKind, Result};
use spile_engine::Engine;
use spile_front::LogLimit;
use spile_xen::store::{Tx, XenStore};
use spile_xen::{DomId, EventChannels, Grants};

use crate::config::{Config, End};
use crate::execute::Target;
use crate::keeping::Keeping;
use crate::metrics::DiskCounters;
use crate::pause;
use crate::queue::{Link, Over};
use crate::trace::Trace;
use crate::xenbus::{Offer, State, disk_flag, features, properties, read_wish};

/// The most watches that are taken before orders and states are looked at again.
const MAX_NEWS: usize = 1024;
/// The pause before another try to reach a xenstore that is gone.
const STORE_PAUSE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// What the rest of the process asks of a device.
pub enum Order {
    Resized,
    Stop,
    /// The disk is about to be handed over to another host: the guest is not to use it here any more.
    Shut(mpsc::Sender<Result<()>>),
    /// The guest may use it again.
    LetIn(mpsc::Sender<Result<()>>),
}

/// Has the device's thread hear an order. One that has ended needs none.
pub fn send(orders: &mpsc::Sender<Order>, doorbell: &OwnedFd, order: Order) {
    let _ = orders.send(order);
    let _ = rustix::io::write(doorbell, &1u64.to_ne_bytes());
}

/// A ring at work.
pub struct Running {
    pub link: Arc<Link>,
    /// Receives how the ring's task has ended.
    pub ended: mpsc::Receiver<Over>,
}

/// A device as its thread sees it.
pub struct Control<D, G, E> {
    pub engine: Engine,
    pub target: Arc<Target<Arc<D>>>,
    pub store: XenStore,
    pub open_store: Box<dyn Fn() -> Result<XenStore> + Send>,
    pub grants: Arc<G>,
    pub events: Arc<E>,
    pub offer: Offer,
    pub config: Config,
    pub domain: DomId,
    pub keeping: Keeping,
    pub counters: Arc<DiskCounters>,
    pub trace: Option<Arc<Trace>>,
    pub frontend: String,
    /// The toolstack's `mode`, as it was when the device began; empty where there was none.
    pub mode: Option<String>,
    pub rings: Vec<Running>,
    pub orders: mpsc::Receiver<Order>,
    pub doorbell: Arc<OwnedFd>,
    /// Limits messages about refused connections, failed calls and broken rings: the guest decides how many there are.
    pub complaints: Arc<LogLimit>,
    /// The disk was handed over to another host: no ring starts.
    pub is_shut: Arc<AtomicBool>,
    /// The pause that is asked for was refused, and that was logged.
    pub has_refused_pause: bool,
}

impl<D: Disk, G: Grants, E: EventChannels> Control<D, G, E> {
    /// Serves the device until it ends, and returns how.
    pub fn run(&mut self) -> Result<End> {
        let result = loop {
            match self.serve() {
                Err(error) if self.store.is_lost() => {
                    tracing::error!(
                        disk = %self.config.name, domain = %self.domain, %error,
                        "blkif: the connection to xenstore is lost; the guest is served on, but the toolstack cannot be heard"
                    );
                    if let Some(end) = self.find_store() {
                        break Ok(end);
                    }
                }
                result => break result,
            }
        };
        self.stop_rings();
        match result {
            // A flush that was still at work when the pause began.
            Ok(End::Paused) if self.has_failed_flush() => Ok(End::Stopped),
            result => result,
        }
    }

    /// Tries to reach xenstore until it is there. `Some` when the device is told to stop before that.
    fn find_store(&mut self) -> Option<End> {
        loop {
            // It does not matter why the wait is over.
            let _ = poll(&mut [PollFd::new(&*self.doorbell, PollFlags::IN)], Some(&STORE_PAUSE));
            let _ = rustix::io::read(self.doorbell.as_fd(), &mut [0; 8]);
            // An order to publish a new size may be dropped: the size is published when xenstore is reached.
            if self.orders.try_iter().any(|order| matches!(order, Order::Stop)) {
                return Some(End::Stopped);
            }
            if let Ok(store) = (self.open_store)() {
                self.store = store;
                return None;
            }
        }
    }

    fn serve(&mut self) -> Result<End> {
        self.begin()?;
        loop {
            if let Some(end) = self.step()? {
                return Ok(end);
            }
            if self.rings.is_empty() && self.has_failed_flush() && !self.is_shut() {
                return Ok(End::FailedSync);
            }
            self.wait_news()?;
            while let Ok(order) = self.orders.try_recv() {
                match order {
                    Order::Resized => self.publish_size()?,
                    Order::Stop => return Ok(End::Stopped),
                    Order::Shut(reply) => self.answer_shut(&reply)?,
                    Order::LetIn(reply) => self.answer_let_in(&reply)?,
                }
            }
        }
    }

    /// Watches the keys that can change, and goes on where another process has ended.
    fn begin(&mut self) -> Result<()> {
        self.frontend = self.store.read_string(Tx::NONE, &self.key("frontend"))?;
        let domain_path = self.store.domain_path(self.domain)?;
        // Whoever may write our keys is trusted, but a mistake there must not make us read another guest's keys.
        if !self.frontend.starts_with(&format!("{domain_path}/")) || self.frontend.contains("..") {
            let what = format!("{} is not a path of domain {}", self.frontend, self.domain);
            return Err(Error::new(ErrorKind::InvalidInput, what));
        }
        let mode = self.read_key("mode")?.unwrap_or_default();
        self.offer.read_only |= !mode.contains('w');
        self.mode.get_or_insert(mode);
        self.store.watch(&format!("{}/state", self.frontend), "front")?;
        self.store.watch(&self.config.backend_path.clone(), "back")?;
        if !self.rings.is_empty() {
            // Only xenstore was gone: the rings are at work.
            return self.publish_size();
        }
        if self.own_state()? == Some(State::Initialising) && self.is_another()? {
            let what = format!("another image was attached as {} while this one was opened", self.config.backend_path);
            return Err(Error::new(ErrorKind::Busy, what));
        }
        if self.meet_gate()? { Ok(()) } else { self.take_up() }
    }

    /// Begins to serve the guest, or goes on where its rings were left.
    ///
    /// # Errors
    /// What the store says; when the rings cannot be started now.
    pub fn take_up(&mut self) -> Result<()> {
        let (own, front) = (self.own_state()?, self.front_state()?);
        match (own, front) {
            // A front end in state 3 has seen our state 4, or is about to see it. A device that is closing has requests
            // that have to be answered first.
            (Some(State::Connected | State::Closing), Some(State::Connected | State::Initialised | State::Closing)) => {
                return self.resume(own);
            }
            (Some(State::Closing), _) => return Ok(()),
            _ => {}
        }
        self.keeping.forget();
        self.offer_features(own)
    }

    /// The path of a key in the back end's folder.
    pub fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.config.backend_path)
    }

    /// The value of a key in the back end's folder.
    pub fn read_key(&mut self, key: &str) -> Result<Option<String>> {
        self.store.read_optional(Tx::NONE, &self.key(key))
    }

    /// Our state, as xenstore has it.
    ///
    /// # Errors
    /// What the store says.
    pub fn own_state(&mut self) -> Result<Option<State>> {
        Ok(self.read_key("state")?.and_then(|text| State::parse(&text)))
    }

    fn front_state(&mut self) -> Result<Option<State>> {
        let text = self.store.read_optional(Tx::NONE, &format!("{}/state", self.frontend));
        match text {
            // A value that is not text, or that the guest does not let us read, is no state.
            Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Denied) => Ok(None),
            text => Ok(text?.and_then(|text| State::parse(&text))),
        }
    }

    /// Writes keys and then our state in one transaction. Returns false and writes nothing when the toolstack has
    /// removed the device or has changed our state from `seen`: its change must not be lost, and a watch will tell us
    /// of it.
    pub fn write_keys(
        &mut self,
        seen: Option<State>,
        keys: &[(&'static str, String)],
        state: Option<State>,
    ) -> Result<bool> {
        let path = self.config.backend_path.clone();
        self.store.transaction(|store, tx| {
            let text = store.read_optional(tx, &format!("{path}/state"))?;
            if text.is_none_or(|text| State::parse(&text) != seen) {
                return Ok(false);
            }
            for (key, value) in keys {
                store.write(tx, &format!("{path}/{key}"), value)?;
            }
            if let Some(state) = state {
                store.write(tx, &format!("{path}/state"), state.text())?;
            }
            Ok(true)
        })
    }

    /// Writes our state, as [`Control::write_keys`] does, unless it is that state already.
    pub fn set_state(&mut self, seen: Option<State>, state: State) -> Result<bool> {
        if seen == Some(state) { Ok(true) } else { self.write_keys(seen, &[], Some(state)) }
    }

    /// True when the guest may discard: the toolstack can forbid it, so that an image keeps all of its space.
    pub fn may_discard(&mut self) -> Result<bool> {
        Ok(self.read_key("discard-enable")?.is_none_or(|value| value != "0"))
    }

    fn offer_features(&mut self, seen: Option<State>) -> Result<()> {
        let may_discard = self.may_discard()?;
        let mut keys = features(&self.offer, &self.target.disk.info(), may_discard);
        keys.push(("hotplug-status", "connected".into()));
        keys.push(("kthread-pid", std::process::id().to_string()));
        self.write_keys(seen, &keys, Some(State::InitWait)).map(drop)
    }

    /// True when a flush of the guest has failed and is not answered.
    pub fn has_failed_flush(&self) -> bool {
        self.target.has_failed_flush.load(Ordering::Acquire)
    }

    /// Does what the states of both ends ask for. `Some` when the device has ended.
    fn step(&mut self) -> Result<Option<End>> {
        let Some(online) = self.read_key("online")? else {
            // The toolstack has removed the device.
            self.disconnect();
            return Ok(Some(End::Closed));
        };
        if self.is_to_pause()? {
            return Ok(Some(End::Paused));
        }
        let (own, front, is_wanted) = (self.own_state()?, self.front_state()?, online != "0");
        // Only the toolstack writes this state. It may have removed the device and made another one while we waited for the image.
        if own == Some(State::Initialising) && self.is_another()? {
            self.disconnect();
            return Ok(Some(End::Closed));
        }
        match front {
            // The guest goes on using the disk until it is closed: with a mounted file system that may take long.
            Some(State::Closing) => drop(self.set_state(own, State::Closing)?),
            // The device never began, and is to close.
            Some(State::Initialising | State::InitWait) if own == Some(State::Closing) && !is_wanted => {
                return Ok(self.set_state(own, State::Closed)?.then_some(End::Closed));
            }
            // The front end has not begun yet.
            None | Some(State::Closed) if own == Some(State::InitWait) && is_wanted => {}
            None | Some(State::Closed) => {
                self.disconnect();
                let is_told = self.set_state(own, State::Closed)?;
                return Ok((is_told && !is_wanted).then_some(End::Closed));
            }
            // The front end begins again, perhaps without having closed: another kernel was started in the guest.
            Some(State::Initialising | State::InitWait) if own != Some(State::InitWait) && is_wanted => {
                self.disconnect();
                self.offer_features(own)?;
            }
            // An image that cannot be flushed any more serves no new guest: the next process opens it again.
            // A guest whose disk is at another host waits.
            Some(State::Initialised | State::Connected)
                if own == Some(State::InitWait) && !self.has_failed_flush() && !self.is_shut() =>
            {
                if self.is_another()? {
                    self.disconnect();
                    return Ok(Some(End::Closed));
                }
                self.connect_or_close()?;
            }
            _ => {}
        }
        Ok(None)
    }

    /// True when the toolstack has made another device at this path: what we have opened is not what the guest is to get.
    fn is_another(&mut self) -> Result<bool> {
        let (params, mode) = (self.read_key("params")?, self.read_key("mode")?.unwrap_or_default());
        Ok(params.as_ref() != Some(&self.config.params) || self.mode.as_ref() != Some(&mode))
    }

    /// True when the toolstack asks for a pause and may have it. After a failed flush it may not: the data that the
    /// flush was to make durable are in the page cache only as long as nobody closes the image.
    fn is_to_pause(&mut self) -> Result<bool> {
        let is_asked = pause::is_asked(&mut self.store, &self.config.backend_path)?;
        let is_refused = is_asked && self.has_failed_flush();
        if is_refused && !self.has_refused_pause {
            let (disk, domain) = (&self.config.name, self.domain);
            tracing::error!(%disk, %domain, "blkif: the pause is refused, because a flush has failed and is not answered; end the guest first");
        }
        self.has_refused_pause = is_refused;
        Ok(is_asked && !is_refused)
    }

    /// Waits for a watch or an order, and takes all watches.
    fn wait_news(&mut self) -> Result<()> {
        // A watch may have come along with an answer. It waits in memory then, and not in the socket.
        if self.store.next_event(Some(Duration::ZERO))?.is_none() {
            let mut fds = [
                PollFd::new(&*self.doorbell, PollFlags::IN),
                PollFd::from_borrowed_fd(self.store.as_fd(), PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(Error::errno("wait for xenstore", errno.raw_os_error())),
            }
            let _ = rustix::io::read(self.doorbell.as_fd(), &mut [0; 8]);
        }
        // There is a limit, because a guest may write all the time. The watches that are left wake us at once.
        for _ in 0..MAX_NEWS {
            if self.store.next_event(Some(Duration::ZERO))?.is_none() {
                break;
            }
        }
        Ok(())
    }

    /// Connects to the rings that the front end has written. A front end that cannot be served learns it from our
    /// state.
    fn connect_or_close(&mut self) -> Result<()> {
        let seen = Some(State::InitWait);
        let connected = read_wish(&mut self.store, &self.frontend, &self.offer).and_then(|wish| self.connect(&wish));
        if let Err(error) = connected {
            if let Some(count) = self.complaints.count() {
                let (disk, domain) = (&self.config.name, self.domain);
                tracing::error!(%disk, %domain, count, %error, "blkif: the guest cannot be served");
            }
            self.disconnect();
            return self.set_state(seen, State::Closing).map(drop);
        }
        let mut flags = if self.offer.read_only { disk_flag::READONLY } else { 0 };
        for (key, wanted, flag) in
            [("device-type", "cdrom", disk_flag::CDROM), ("removable", "1", disk_flag::REMOVABLE)]
        {
            flags |= if self.read_key(key)?.as_deref() == Some(wanted) { flag } else { 0 };
        }
        let keys = properties(&self.target.disk.info(), flags);
        self.write_keys(seen, &keys, Some(State::Connected)).map(drop)
    }

    /// Publishes the disk's size. Writing our state once more makes the front end look at it.
    pub fn publish_size(&mut self) -> Result<()> {
        let sectors = properties(&self.target.disk.info(), 0).swap_remove(0);
        if self.read_key(sectors.0)?.as_ref() == Some(&sectors.1) {
            return Ok(());
        }
        self.write_keys(Some(State::Connected), &[sectors], Some(State::Connected)).map(drop)
    }
}
