//! The rings of one connection: maps them, binds their event channels and starts them, from the beginning or where
//! another process has ended.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};

use spile_core::{Disk, Error, ErrorKind, Result, Segment};
use spile_engine::{Event, EventDevice};
use spile_xen::sys::evtchn;
use spile_xen::{Channel, EventChannels, Grants, Port};

use crate::control::{Control, Running};
use crate::journal::Journal;
use crate::pages::Access;
use crate::queue::{Link, Setup, run};
use crate::request::Limits;
use crate::ring::{Broken, Ring, Slot, shared_rsp_prod};
use crate::xenbus::{Offer, RingWish, State, Wish, read_wish};

/// A ring's pages.
struct RingMemory {
    requests: Segment,
    responses: Option<Segment>,
}

impl RingMemory {
    fn rsp_prod(&self) -> u32 {
        shared_rsp_prod(self.responses.as_ref().unwrap_or(&self.requests))
    }

    fn ring(self, wish: &Wish, ring: &RingWish, req_cons: u32, rsp_prod: u32) -> Ring {
        let made = Ring::new(self.requests, wish.abi, ring.order, req_cons, rsp_prod);
        match self.responses {
            Some(memory) => made.with_responses(memory, ring.response_refs.len().ilog2()),
            None => made,
        }
    }
}

/// What all rings of a connection have in common.
struct Terms {
    access: Access,
    limits: Limits,
}

/// A ring as another process has left it.
struct LeftRing {
    ring: Ring,
    journal: Journal,
    /// Requests that were taken and not answered, oldest first.
    again: Vec<(u16, Slot)>,
}

impl<D: Disk, G: Grants, E: EventChannels> Control<D, G, E> {
    /// Starts the rings that the front end has named, from their beginning.
    ///
    /// # Errors
    /// When a ring cannot be mapped, bound or started.
    pub fn connect(&mut self, wish: &Wish) -> Result<()> {
        // Rings may be at work if xenstore was lost before our state could be written.
        self.stop_rings();
        let terms = self.terms(wish, self.offer.max_indirect, self.offer.access == Access::Persistent)?;
        let slots: Vec<_> = wish.rings.iter().map(RingWish::max_in_flight).collect();
        let journals = self.keeping.begin(&slots)?;
        for (ring_wish, journal) in wish.rings.iter().zip(journals) {
            let memory = self.map(ring_wish)?;
            let start = memory.rsp_prod();
            let journal = Journal::begin(journal, ring_wish.max_in_flight(), start);
            let ring = memory.ring(wish, ring_wish, start, start);
            self.start_ring(ring_wish, wish, &terms, ring, journal, Vec::new())?;
        }
        self.keeping.keep(wish)
    }

    /// Goes on where another process has ended. `seen` is the state of our end that it has left.
    ///
    /// # Errors
    /// When it cannot be done now, but perhaps by the next process.
    pub fn resume(&mut self, seen: Option<State>) -> Result<()> {
        // What the other process has agreed on with the guest holds, whatever we would offer now.
        let keeps_pages = self.read_key("feature-persistent")?.as_deref() == Some("1");
        let wish = read_wish(&mut self.store, &self.frontend, &Offer::WIDEST);
        let left = wish.and_then(|wish| Ok((self.read_left(&wish, keeps_pages)?, wish)));
        let error = match left {
            Ok(((terms, rings), wish)) => {
                // All rings are started or none, so that the next process can try again.
                self.start_again(&wish, &terms, rings).inspect_err(|_| _ = self.stop_rings())?;
                self.write_keys(seen, &[("kthread-pid", std::process::id().to_string())], None)?;
                // The disk may have grown while nobody served it, or just before the other process was killed.
                return self.publish_size();
            }
            Err(error) => error,
        };
        if !is_verdict(&error) {
            return Err(error);
        }
        tracing::error!(
            disk = %self.config.name, domain = %self.domain, %error,
            "blkif: the requests that the last process has left cannot be taken up; the guest's disk is closed"
        );
        self.disconnect();
        self.set_state(seen, State::Closing).map(drop)
    }

    /// Reads what the other process has left in each ring, and whether a flush has failed in any of them: no ring starts before that is known of all.
    fn read_left(&mut self, wish: &Wish, keeps_pages: bool) -> Result<(Terms, Vec<LeftRing>)> {
        let terms = self.terms(wish, Offer::WIDEST.max_indirect, keeps_pages)?;
        let slots: Vec<_> = wish.rings.iter().map(RingWish::max_in_flight).collect();
        let journals = self.keeping.resume(wish, &slots)?;
        let mut rings = Vec::new();
        for (ring_wish, journal) in wish.rings.iter().zip(journals) {
            let memory = self.map(ring_wish)?;
            let (journal, left) = Journal::resume(journal, ring_wish.max_in_flight(), memory.rsp_prod())
                .map_err(|Broken(why)| Error::new(ErrorKind::Corrupt, why))?;
            if left.has_failed_flush {
                self.target.has_failed_flush.store(true, Ordering::Release);
            }
            let ring = memory.ring(wish, ring_wish, left.req_cons, left.rsp_prod);
            rings.push(LeftRing { ring, journal, again: left.again });
        }
        Ok((terms, rings))
    }

    fn start_again(&mut self, wish: &Wish, terms: &Terms, rings: Vec<LeftRing>) -> Result<()> {
        for (ring_wish, LeftRing { ring, journal, again }) in wish.rings.iter().zip(rings) {
            self.start_ring(ring_wish, wish, terms, ring, journal, again)?;
        }
        Ok(())
    }

    /// What holds for all rings of the connection. `keeps_pages`: the guest was told that its pages may stay mapped. A
    /// guest that was not told so takes each page back after its request is answered.
    fn terms(&mut self, wish: &Wish, max_indirect: u16, keeps_pages: bool) -> Result<Terms> {
        let access = match self.config.access {
            Access::Persistent if !(wish.is_persistent && keeps_pages) => Access::Map,
            access => access,
        };
        let limits = Limits { max_indirect, read_only: self.offer.read_only, discards: self.may_discard()? };
        Ok(Terms { access, limits })
    }

    fn map(&self, ring: &RingWish) -> Result<RingMemory> {
        let requests = self.grants.map_ring(self.domain, &ring.refs)?;
        let responses = match ring.response_refs.as_slice() {
            [] => None,
            refs => Some(self.grants.map_ring(self.domain, refs)?),
        };
        Ok(RingMemory { requests, responses })
    }

    fn start_ring(
        &mut self,
        ring_wish: &RingWish,
        wish: &Wish,
        terms: &Terms,
        ring: Ring,
        journal: Journal,
        again: Vec<(u16, Slot)>,
    ) -> Result<()> {
        let (kick, call) = open_channel(self.events.bind(self.domain, ring_wish.port)?)?;
        let number = self.rings.len();
        let link = Arc::new(Link::default());
        let setup = Setup {
            target: self.target.clone(),
            grants: self.grants.clone(),
            domain: self.domain,
            access: terms.access,
            share: wish.rings.len(),
            complaints: self.complaints.clone(),
            limits: terms.limits,
            ring,
            journal,
            again,
            kick,
            call,
            link: link.clone(),
            counters: self.counters.of_ring(number),
            disk_counters: self.counters.clone(),
            trace: self.trace.clone(),
        };
        let (name, (tell, ended)) = (self.config.name.clone(), mpsc::channel());
        let (domain, complaints) = (self.domain, self.complaints.clone());
        self.engine.spawn_on(number, move || async move {
            let over = run(setup).await;
            if let Some((Broken(why), count)) = over.broken.and_then(|broken| Some((broken, complaints.count()?))) {
                tracing::error!(disk = %name, %domain, ring = number, count, why, "blkif: a guest has broken the rules of its ring; the ring is stopped");
            }
            let _ = tell.send(over);
        });
        self.rings.push(Running { link, ended });
        Ok(())
    }

    /// Stops all rings: answers the requests that they have taken, unmaps them and closes their channels. True when the guest has asked for more in
    /// one of them.
    pub fn stop_rings(&mut self) -> bool {
        self.rings.iter().for_each(|running| running.link.stop());
        // An error means that the task was dropped with its worker.
        let ended = self.rings.drain(..).map(|running| running.ended.recv().is_ok_and(|over| over.has_more));
        ended.fold(false, |any, has_more| any | has_more)
    }

    /// Ends the connection, as the guest has gone: stops its rings and removes the files that are kept for the next process. Requests that the disk
    /// holds back get no answer.
    pub fn disconnect(&mut self) {
        self.rings.iter().for_each(|running| running.link.forsake());
        self.stop_rings();
        self.keeping.forget();
    }
}

/// True when the next process would get the same error as it reads what was left, because the cause is what the guest has written or what was
/// kept. An error of the system may have gone by then: gntdev returns EINVAL for every failure, also for too many
/// mappings.
fn is_verdict(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::Corrupt | ErrorKind::NotFound | ErrorKind::Denied => true,
        ErrorKind::InvalidInput => error.os_errno().is_none(),
        _ => false,
    }
}

/// An event channel of a real Xen: the port that its device file is bound to.
struct XenChannel(Port);

impl EventDevice for XenChannel {
    fn take(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        evtchn::take_ring(fd)
    }

    fn ring(&self, fd: BorrowedFd<'_>) {
        evtchn::ring(fd, self.0);
    }
}

/// Our end of a channel, as two events of the engine: the first is what the guest rings, the second what we ring.
fn open_channel(channel: Channel) -> Result<(Arc<Event>, Arc<Event>)> {
    match channel {
        Channel::Device(fd, port) => {
            let event = Arc::new(Event::from_device(fd, Box::new(XenChannel(port)))?);
            Ok((event.clone(), event))
        }
        Channel::Eventfds(kick, call) => Ok((Arc::new(Event::from_fd(kick)?), Arc::new(Event::from_fd(call)?))),
    }
}
