//! The handshake through xenstore.

use std::sync::Arc;
use std::time::{Duration, Instant};

use spile_core::{Error, ErrorKind, Result};
use spile_mem::{Segment, Segments};
use spile_xen::blkif::{INDIRECT_PAGES, SEGMENTS_PER_PAGE, SLOT_SEGMENTS, ring_slots, split};
use spile_xen::store::{Tx, XenStore};
use spile_xen::{DomId, GrantRef, XEN_PAGE_BYTES};

use super::options::{BlkfrontOptions, Disk, Features, read_number};
use super::queue::{Queue, QueueParts};
use super::ring::Ring;
use super::slots::{Page, SlotMemory};
use crate::xen::guest::{Frames, Guest};
use crate::xen::state;

/// The front end of one virtual disk.
pub struct Blkfront {
    guest: Arc<Guest>,
    store: XenStore,
    /// The front end's folder in xenstore.
    path: String,
    device: u32,
    backend: String,
    backend_id: DomId,
    options: BlkfrontOptions,
    features: Features,
    disk: Disk,
}

impl Blkfront {
    /// Opens the front end of the disk with the number `device`, which the toolstack has added.
    ///
    /// # Errors
    /// `NotFound` when there is no such disk; else as xenstore reports.
    pub fn new(guest: Arc<Guest>, device: u32, options: BlkfrontOptions) -> Result<Self> {
        let mut store = XenStore::open(&guest.xenstored())?;
        let path = format!("/local/domain/{}/device/vbd/{device}", guest.id());
        let backend = store.read_string(Tx::NONE, &format!("{path}/backend"))?;
        let backend_id = DomId(read_number(&mut store, &path, "backend-id")? as u16);
        store.watch(&format!("{backend}/state"), "blkfront")?;
        let (features, disk) = (Features::default(), Disk::default());
        Ok(Self { guest, store, path, device, backend, backend_id, options, features, disk })
    }

    /// The guest.
    pub fn guest(&self) -> &Arc<Guest> {
        &self.guest
    }

    /// The connection to xenstore, as the guest.
    pub fn store(&mut self) -> &mut XenStore {
        &mut self.store
    }

    /// The front end's folder in xenstore.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The back end's folder in xenstore.
    pub fn backend_path(&self) -> &str {
        &self.backend
    }

    /// What the back end offers; known after [`Blkfront::negotiate`].
    pub fn features(&self) -> Features {
        self.features
    }

    /// The disk; known after [`Blkfront::start`].
    pub fn disk(&self) -> Disk {
        self.disk
    }

    /// The options that the front end was made with.
    pub fn options(&self) -> &BlkfrontOptions {
        &self.options
    }

    /// The largest number of bytes in a request, by the options and by what the back end offers.
    pub fn max_request_bytes(&self) -> u32 {
        self.options.data_bytes.min(self.max_segments() * XEN_PAGE_BYTES as u32)
    }

    fn max_segments(&self) -> u32 {
        let indirect = self.options.indirect_segments.min(self.features.max_indirect_segments);
        let most = (INDIRECT_PAGES * SEGMENTS_PER_PAGE) as u32;
        indirect.min(most).max(SLOT_SEGMENTS as u32)
    }

    /// Writes a key in the front end's folder.
    ///
    /// # Errors
    /// As xenstore reports.
    pub fn write_key(&mut self, key: &str, value: &str) -> Result<()> {
        self.store.write(Tx::NONE, &format!("{}/{key}", self.path), value)
    }

    /// Writes the front end's state.
    ///
    /// # Errors
    /// As xenstore reports.
    pub fn set_state(&mut self, to: u32) -> Result<()> {
        self.write_key("state", &to.to_string())
    }

    /// The back end's state.
    ///
    /// # Errors
    /// As xenstore reports.
    pub fn backend_state(&mut self) -> Result<u32> {
        Ok(read_number(&mut self.store, &self.backend, "state")? as u32)
    }

    /// Waits for a change of the back end's state, at most for `timeout`. Returns the state after that. xenstore may wake
    /// it without a change.
    ///
    /// # Errors
    /// As xenstore reports.
    pub fn next_change(&mut self, timeout: Duration) -> Result<u32> {
        self.store.next_event(Some(timeout))?;
        self.backend_state()
    }

    /// Waits until the back end is in one of these states, and says in which.
    ///
    /// # Errors
    /// `TimedOut` when the back end takes too long; `Io` when it closes instead.
    pub fn wait_for(&mut self, wanted: &[u32]) -> Result<u32> {
        let deadline = Instant::now() + self.options.patience;
        loop {
            let now = self.backend_state()?;
            if wanted.contains(&now) {
                return Ok(now);
            }
            if now >= state::CLOSING && !wanted.contains(&state::CLOSED) {
                return Err(Error::new(ErrorKind::Io, format!("the back end {} closes", self.backend)));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let message = format!("the back end {} stays in state {now}, not {wanted:?}", self.backend);
                return Err(Error::new(ErrorKind::TimedOut, message));
            }
            self.store.next_event(Some(left))?;
        }
    }

    /// Waits for the back end's offers, and reads them.
    ///
    /// # Errors
    /// As [`Blkfront::wait_for`].
    pub fn negotiate(&mut self) -> Result<Features> {
        self.wait_for(&[state::INIT_WAIT])?;
        self.features = Features::read(&mut self.store, &self.backend)?;
        Ok(self.features)
    }

    /// Makes the queues. The back end does not know of them yet.
    ///
    /// # Errors
    /// `Exhausted` when the guest has too little memory; else as the host reports.
    pub fn make_queues(&self) -> Result<Vec<Queue>> {
        let count = self.options.queues.min(self.features.max_queues).max(1);
        (0..count).map(|_| self.make_queue()).collect()
    }

    /// Writes where the queues are, in one transaction.
    ///
    /// # Errors
    /// As xenstore reports.
    pub fn write_keys(&mut self, queues: &[Queue]) -> Result<()> {
        let keys = self.keys(queues);
        self.store.transaction(|store, tx| keys.iter().try_for_each(|(key, value)| store.write(tx, key, value)))
    }

    /// Makes the queues and writes where they are, up to state 3. A test can still break the rules before the back end
    /// connects ([`Blkfront::finish`]), or between the steps of this function.
    ///
    /// # Errors
    /// As the functions that it calls.
    pub fn prepare(&mut self) -> Result<Vec<Queue>> {
        let queues = self.make_queues()?;
        self.write_keys(&queues)?;
        self.set_state(state::INITIALISED)?;
        Ok(queues)
    }

    /// Waits until the back end has connected, and goes to that state too.
    ///
    /// # Errors
    /// As [`Blkfront::wait_for`].
    pub fn finish(&mut self) -> Result<()> {
        self.wait_for(&[state::CONNECTED])?;
        self.refresh()?;
        self.set_state(state::CONNECTED)
    }

    /// The whole handshake.
    ///
    /// # Errors
    /// As the functions that it calls.
    pub fn start(&mut self) -> Result<Vec<Queue>> {
        self.negotiate()?;
        let queues = self.prepare()?;
        self.finish()?;
        Ok(queues)
    }

    /// Reads the disk's properties anew, as after a change of its size.
    ///
    /// # Errors
    /// As xenstore reports.
    pub fn refresh(&mut self) -> Result<Disk> {
        self.disk = Disk::read(&mut self.store, &self.backend)?;
        Ok(self.disk)
    }

    /// Ends the connection in order: both sides close, and all grants are revoked. No request may be in flight. The front
    /// end may start again afterwards ([`Blkfront::restart`]).
    ///
    /// # Errors
    /// `TimedOut` when the back end does not close, `Protocol` when it has closed and still uses pages.
    pub fn stop(&mut self, queues: Vec<Queue>) -> Result<()> {
        self.set_state(state::CLOSING)?;
        self.wait_for(&[state::CLOSING, state::CLOSED, state::UNKNOWN])?;
        self.set_state(state::CLOSED)?;
        self.wait_for(&[state::CLOSED, state::UNKNOWN])?;
        queues.into_iter().map(Queue::close).fold(Ok(()), Result::and)
    }

    /// Begins anew after [`Blkfront::stop`], as a driver that is loaded again.
    ///
    /// # Errors
    /// As [`Blkfront::start`].
    pub fn restart(&mut self) -> Result<Vec<Queue>> {
        self.set_state(state::INITIALISING)?;
        let deadline = Instant::now() + self.options.patience;
        // Until it has seen that we are back, the back end is still closed.
        while self.backend_state()? == state::CLOSED && Instant::now() < deadline {
            self.next_change(deadline.saturating_duration_since(Instant::now()))?;
        }
        self.start()
    }

    fn is_persistent(&self) -> bool {
        self.options.persistent && self.features.persistent
    }

    fn make_queue(&self) -> Result<Queue> {
        let mut frames = Vec::new();
        let order = self.order_at_most(self.options.ring_order);
        let (bytes, ring_refs) = self.ring_pages(order, &mut frames)?;
        let mut ring = Ring::new(bytes, self.options.abi, ring_slots(order));
        let mut response_refs = Vec::new();
        if let Some(order) = self.split_order() {
            let (bytes, refs) = self.ring_pages(order, &mut frames)?;
            ring = ring.with_responses(bytes, split::response_slots(order));
            response_refs = refs;
        }
        let depth = self.options.depth.clamp(1, ring.max_in_flight() as usize);
        Queue::new(QueueParts {
            guest: self.guest.clone(),
            backend: self.backend_id,
            ring,
            ring_refs,
            response_refs,
            event: self.guest.alloc_unbound(self.backend_id)?,
            slots: self.make_slots(depth, &mut frames)?,
            frames,
            is_persistent: self.is_persistent(),
            handle: self.device as u16,
        })
    }

    /// The order of a ring: the smaller of what is wanted and what the back end offers.
    fn order_at_most(&self, wanted: u32) -> u32 {
        wanted.min(self.features.max_ring_order).min(4)
    }

    /// The order of the rings of responses, if these have rings of their own.
    fn split_order(&self) -> Option<u32> {
        let wanted = self.options.split_response_order.filter(|_| self.features.splits_rings);
        wanted.map(|order| self.order_at_most(order))
    }

    /// Takes the pages of a ring and grants them. They are added to `frames`.
    fn ring_pages(&self, order: u32, frames: &mut Vec<Frames>) -> Result<(Segment, Vec<GrantRef>)> {
        let pages = self.guest.take_frames(1 << order)?;
        let grant = |number| self.guest.grant(self.backend_id, pages.first + number, false);
        let refs = (0..pages.count()).map(grant).collect::<Result<_>>()?;
        frames.push(pages.clone());
        Ok((pages.bytes, refs))
    }

    /// Makes the slots. Their memory is added to `frames`.
    fn make_slots(&self, depth: usize, frames: &mut Vec<Frames>) -> Result<Vec<SlotMemory>> {
        let pages_each = self.max_request_bytes().div_ceil(XEN_PAGE_BYTES as u32).max(1) as usize;
        let indirect_each = if pages_each > SLOT_SEGMENTS { pages_each.div_ceil(SEGMENTS_PER_PAGE) } else { 0 };
        let pages = Page::take(&self.guest, (depth * pages_each) as u32, frames)?;
        let mut indirect = Page::take(&self.guest, (depth * indirect_each) as u32, frames)?.into_iter();
        let mut slots = Vec::with_capacity(depth);
        for slot in 0..depth {
            let place = |number| if self.options.scatter { number * depth + slot } else { slot * pages_each + number };
            let pages: Vec<Page> = (0..pages_each).map(|number| pages[place(number)].clone()).collect();
            let data = self.data_for(&pages, frames)?;
            let indirect = indirect.by_ref().take(indirect_each).collect();
            slots.push(SlotMemory { pages, indirect, data });
        }
        Ok(slots)
    }

    /// The memory that the guest's programs use: the granted pages, or other pages when grants are persistent.
    fn data_for(&self, pages: &[Page], frames: &mut Vec<Frames>) -> Result<Segments> {
        let mut data = Segments::new();
        if self.is_persistent() {
            let own = self.guest.take_frames(pages.len() as u32)?;
            (0..pages.len()).for_each(|number| data.push(own.page(number as u32)));
            frames.push(own);
        } else {
            pages.iter().for_each(|page| data.push(page.bytes.clone()));
        }
        Ok(data)
    }

    /// The front end's keys and values, with their whole paths.
    fn keys(&self, queues: &[Queue]) -> Vec<(String, String)> {
        let key = |name: &str| format!("{}/{name}", self.path);
        let mut keys = vec![
            (key("protocol"), self.options.abi.name().to_owned()),
            (key("feature-persistent"), u8::from(self.is_persistent()).to_string()),
        ];
        let order = queues[0].ring_refs().len().trailing_zeros();
        let is_numbered = order > 0 || self.options.numbered_ring_ref;
        if is_numbered {
            keys.push((key("ring-page-order"), order.to_string()));
        }
        if queues.len() > 1 {
            keys.push((key("multi-queue-num-queues"), queues.len().to_string()));
        }
        keys.extend(self.split_keys().map(|(name, value)| (key(name), value)));
        for (number, queue) in queues.iter().enumerate() {
            let folder = if queues.len() > 1 { key(&format!("queue-{number}")) } else { self.path.clone() };
            for (page, gref) in queue.ring_refs().iter().enumerate() {
                let name = if is_numbered { format!("ring-ref{page}") } else { "ring-ref".to_owned() };
                keys.push((format!("{folder}/{name}"), gref.0.to_string()));
            }
            for (page, gref) in queue.response_refs().iter().enumerate() {
                keys.push((format!("{folder}/{}{page}", split::REF), gref.0.to_string()));
            }
            keys.push((format!("{folder}/event-channel"), queue.event().port.0.to_string()));
        }
        keys
    }

    /// What is said of split rings. When they are wanted, the key is written even if they are not to be had: one of an
    /// earlier connection shall not stay. Other front ends write nothing.
    fn split_keys(&self) -> impl Iterator<Item = (&'static str, String)> {
        let order = self.split_order();
        let wanted = self.options.split_response_order.is_some() || self.features.splits_rings;
        let wanted = wanted.then(|| (split::WANTED, u8::from(order.is_some()).to_string()));
        wanted.into_iter().chain(order.map(|order| (split::ORDER, order.to_string())))
    }
}
