//! [`Gate`]: whether a guest may use its disk here, or the disk was handed over to another host, where the guest goes on.
//!
//! The toolstack saves the guest and leaves it paused, the disk is handed over, and the guest is restored on the other host. From the hand-over on,
//! requests stay in the guest's rings here, untaken. They are taken when the guest is let in again, because its move has failed after all. The key
//! `handed-over` of the back end tells that to the disk's next process; it goes with the device's other keys.
//!
//! Xen has no stable way to ask whether a domain runs, so the rings tell: a guest that asks for anything for a while before they stop, or while they
//! stop, runs, and then the disk is not handed over. One that asks for nothing is not noticed. It waits from then on, as any other one.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use spile_core::{Disk, Error, ErrorKind, Result};
use spile_front::{Breakdown, Door, Passage, not_open};
use spile_xen::store::Tx;
use spile_xen::{EventChannels, Grants};

use crate::control::{Control, Order, send};

/// The key of the back end: the disk was handed over.
const HANDED_OVER: &str = "handed-over";
/// How long the rings are looked at before they stop.
const QUIET: Duration = Duration::from_millis(200);

/// The gate of one device.
pub struct Gate {
    is_shut: Arc<AtomicBool>,
    orders: mpsc::Sender<Order>,
    doorbell: Arc<OwnedFd>,
}

impl Gate {
    pub(crate) fn new(is_shut: Arc<AtomicBool>, orders: mpsc::Sender<Order>, doorbell: Arc<OwnedFd>) -> Self {
        Self { is_shut, orders, doorbell }
    }

    fn ask(&self, order: impl FnOnce(mpsc::Sender<Result<()>>) -> Order) -> Result<()> {
        let (reply, answer) = mpsc::channel();
        send(&self.orders, &self.doorbell, order(reply));
        let is_gone =
            |_| Error::new(ErrorKind::Shutdown, "the guest's device has ended, or xenstore cannot be reached");
        answer.recv().map_err(is_gone)?
    }
}

impl Door for Gate {
    fn passage(&self) -> Passage {
        if self.is_shut.load(Ordering::SeqCst) { Passage::Gone } else { Passage::Open }
    }

    fn shut(&self) -> Result<()> {
        self.ask(Order::Shut)
    }

    fn let_in(&self) -> Result<()> {
        if self.passage() == Passage::Open {
            return Ok(());
        }
        self.ask(Order::LetIn)
    }
}

impl<D: Disk, G: Grants, E: EventChannels> Control<D, G, E> {
    /// True while the disk is at another host.
    pub fn is_shut(&self) -> bool {
        self.is_shut.load(Ordering::SeqCst)
    }

    /// Learns from xenstore whether a process before this one has handed the disk over. True when it has.
    ///
    /// # Errors
    /// What the store says.
    pub fn meet_gate(&mut self) -> Result<bool> {
        let is_shut = self.read_key(HANDED_OVER)?.is_some();
        self.is_shut.store(is_shut, Ordering::SeqCst);
        if is_shut {
            let (disk, domain) = (&self.config.name, self.domain);
            tracing::warn!(%disk, %domain, "blkif: the disk was handed over to another host: its guest here waits until `spile resume`");
        }
        Ok(is_shut)
    }

    /// Shuts the gate, and says so to whoever has asked for it. When the disk is not handed over, its guest goes on.
    ///
    /// # Errors
    /// When it cannot go on.
    pub fn answer_shut(&mut self, reply: &mpsc::Sender<Result<()>>) -> Result<()> {
        let was_at_work = !self.rings.is_empty();
        let shut = self.shut();
        let is_to_go_on = was_at_work && shut.is_err() && self.rings.is_empty();
        // Who does not wait for the answer any more does not need it.
        let _ = reply.send(shut);
        if is_to_go_on { self.take_up() } else { Ok(()) }
    }

    fn shut(&mut self) -> Result<()> {
        if self.is_shut() {
            return Err(not_open());
        }
        if self.has_failed_flush() {
            let what = "a flush of the guest has failed, and its disk may lack what the guest was told is there";
            return Err(Error::new(ErrorKind::Busy, what).hint("end the guest first"));
        }
        let before = self.begun();
        std::thread::sleep(QUIET);
        let now = self.counters.total(Breakdown::Sum).requests;
        if self.begun() != before || now.in_flight() > 0 || self.stop_rings() {
            let hint = "have the toolstack stop it first, such as by `xl save -p`";
            return Err(Error::new(ErrorKind::Busy, "a guest uses the disk").hint(hint));
        }
        let own = self.own_state()?;
        if !self.write_keys(own, &[(HANDED_OVER, "1".into())], None)? {
            return Err(Error::new(ErrorKind::Busy, "the toolstack is just changing the device"));
        }
        self.is_shut.store(true, Ordering::SeqCst);
        let (disk, domain) = (&self.config.name, self.domain);
        tracing::info!(%disk, %domain, "blkif: the guest waits from now on, for its disk is handed over to another host");
        Ok(())
    }

    /// How many requests the guest has begun.
    fn begun(&self) -> u64 {
        self.counters.total(Breakdown::Sum).requests.total().begun
    }

    /// Opens the gate, and says so to whoever has asked for it.
    ///
    /// # Errors
    /// When the guest cannot go on.
    pub fn answer_let_in(&mut self, reply: &mpsc::Sender<Result<()>>) -> Result<()> {
        let was_shut = self.is_shut();
        let let_in = if was_shut { self.open_gate() } else { Ok(()) };
        let is_to_go_on = was_shut && let_in.is_ok();
        let _ = reply.send(let_in);
        if is_to_go_on { self.take_up() } else { Ok(()) }
    }

    fn open_gate(&mut self) -> Result<()> {
        match self.store.remove(Tx::NONE, &self.key(HANDED_OVER)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => self.is_shut.store(false, Ordering::SeqCst),
        }
        Ok(())
    }
}
