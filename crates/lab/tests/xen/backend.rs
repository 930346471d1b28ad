//! A back end of the simplest kind: one thread, a disk in memory, one request after the other.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, spawn};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use spile_lab::xen::toolstack::Vbd;
use spile_lab::xen::{Hypervisor, state};
use spile_mem::{Segment, Segments};
use spile_xen::blkif::{Abi, RING_HEADER_BYTES, Request, Response, SegmentEntry, index, op, status};
use spile_xen::store::{Tx, XenStore};
use spile_xen::{Channel, CopyOp, EventChannels, GrantRef, Grants, Port, Way};

/// What it offers.
#[derive(Clone)]
pub struct Offers {
    pub dir: PathBuf,
    pub vbd: Vbd,
    pub keys: Vec<(&'static str, String)>,
    pub disk: Arc<Mutex<Vec<u8>>>,
}

/// A running one. Dropped, it dies as one that is killed: nothing is said to anybody.
pub struct Backend {
    stop: Arc<(AtomicBool, OwnedFd)>,
    thread: Option<JoinHandle<()>>,
}

impl Backend {
    pub fn start(offers: Offers) -> Self {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let stop = Arc::new((AtomicBool::new(false), event));
        let seen = stop.clone();
        let thread = Some(spawn(move || Worker::new(offers, seen).run()));
        Self { stop, thread }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.stop.0.store(true, Ordering::Relaxed);
        rustix::io::write(&self.stop.1, &1u64.to_ne_bytes()).unwrap();
        let result = self.thread.take().unwrap().join();
        assert!(result.is_ok() || std::thread::panicking());
    }
}

struct Queue {
    ring: Segment,
    kick: OwnedFd,
    call: OwnedFd,
    slots: u32,
    taken: u32,
}

struct Worker {
    offers: Offers,
    stop: Arc<(AtomicBool, OwnedFd)>,
    store: XenStore,
    hypervisor: Hypervisor,
    abi: Abi,
    queues: Vec<Queue>,
    persistent: Option<HashMap<GrantRef, Segments>>,
}

impl Worker {
    fn new(offers: Offers, stop: Arc<(AtomicBool, OwnedFd)>) -> Self {
        let store = XenStore::open(&offers.dir.join("xenstored")).unwrap();
        let hypervisor = Hypervisor::connect(&offers.dir).unwrap();
        Self { offers, stop, store, hypervisor, abi: Abi::X86_64, queues: Vec::new(), persistent: None }
    }

    fn run(mut self) {
        let (front, back) = (self.offers.vbd.frontend_path(), self.offers.vbd.backend_path());
        for path in [&front, &back] {
            self.store.watch(&format!("{path}/state"), "w").unwrap();
        }
        while !self.stop.0.load(Ordering::Relaxed) {
            let (ours, theirs) = (self.state(&back), self.state(&front));
            match (ours, theirs) {
                (state::INITIALISING | state::CLOSED, state::INITIALISING) => self.offer(&back),
                (state::INIT_WAIT | state::CONNECTED, state::INITIALISED | state::CONNECTED)
                    if self.queues.is_empty() =>
                {
                    self.connect(&front, &back);
                }
                (state::CONNECTED, state::CLOSING) => self.set_state(&back, state::CLOSING),
                (state::CONNECTED | state::CLOSING, state::CLOSED) => {
                    self.queues.clear();
                    self.persistent = None;
                    self.set_state(&back, state::CLOSED);
                }
                _ => {}
            }
            (0..self.queues.len()).for_each(|number| self.serve(number));
            self.wait();
        }
    }

    fn state(&mut self, path: &str) -> u32 {
        let text = self.store.read_optional(Tx::NONE, &format!("{path}/state")).unwrap();
        text.map_or(0, |text| text.parse().unwrap())
    }

    fn set_state(&mut self, path: &str, to: u32) {
        self.store.write(Tx::NONE, &format!("{path}/state"), &to.to_string()).unwrap();
    }

    fn offer(&mut self, back: &str) {
        for (key, value) in self.offers.keys.clone() {
            self.store.write(Tx::NONE, &format!("{back}/{key}"), &value).unwrap();
        }
        self.set_state(back, state::INIT_WAIT);
    }

    fn number(&mut self, path: &str) -> Option<u32> {
        self.store.read_optional(Tx::NONE, path).unwrap().map(|text| text.parse().unwrap())
    }

    fn connect(&mut self, front: &str, back: &str) {
        let protocol = self.store.read_string(Tx::NONE, &format!("{front}/protocol")).unwrap();
        self.abi = Abi::from_name(&protocol).unwrap();
        let is_persistent = self.number(&format!("{front}/feature-persistent")) == Some(1);
        self.persistent = is_persistent.then(HashMap::new);
        let order = self.number(&format!("{front}/ring-page-order"));
        let count = self.number(&format!("{front}/multi-queue-num-queues")).unwrap_or(1);
        for queue in 0..count {
            let folder = if count > 1 { format!("{front}/queue-{queue}") } else { front.to_owned() };
            let refs: Vec<_> = match order {
                None => vec![format!("{folder}/ring-ref")],
                Some(order) => (0..1 << order).map(|page| format!("{folder}/ring-ref{page}")).collect(),
            };
            let refs: Vec<_> = refs.iter().map(|path| GrantRef(self.number(path).unwrap())).collect();
            let port = Port(self.number(&format!("{folder}/event-channel")).unwrap());
            let ring = self.hypervisor.map_ring(self.offers.vbd.guest, &refs).unwrap();
            let Channel::Eventfds(kick, call) = self.hypervisor.bind(self.offers.vbd.guest, port).unwrap() else {
                panic!()
            };
            let taken = ring.load_u32(index::RSP_PROD, Ordering::Acquire);
            self.queues.push(Queue { ring, kick, call, slots: 32 * refs.len() as u32, taken });
        }
        let sectors = self.offers.disk.lock().unwrap().len() / 512;
        self.store.write(Tx::NONE, &format!("{back}/sectors"), &sectors.to_string()).unwrap();
        self.store.write(Tx::NONE, &format!("{back}/sector-size"), "512").unwrap();
        self.set_state(back, state::CONNECTED);
    }

    fn wait(&mut self) {
        // An event that was read beside an answer shows in no descriptor.
        if self.store.next_event(Some(Duration::ZERO)).unwrap().is_some() {
            return;
        }
        let mut fds = vec![PollFd::new(&self.stop.1, PollFlags::IN)];
        let store = self.store.as_fd();
        fds.push(PollFd::new(&store, PollFlags::IN));
        fds.extend(self.queues.iter().map(|queue| PollFd::new(&queue.kick, PollFlags::IN)));
        poll(&mut fds, Some(&Timespec::try_from(Duration::from_secs(600)).unwrap())).unwrap();
        for queue in &self.queues {
            let _ = rustix::io::read(queue.kick.as_fd(), &mut [0; 8]);
        }
    }

    fn serve(&mut self, number: usize) {
        loop {
            let queue = &mut self.queues[number];
            let produced = queue.ring.load_u32(index::REQ_PROD, Ordering::Acquire);
            if produced == queue.taken {
                queue.ring.store_u32(index::REQ_EVENT, queue.taken.wrapping_add(1), Ordering::Release);
                fence(Ordering::SeqCst);
                if queue.ring.load_u32(index::REQ_PROD, Ordering::Acquire) == queue.taken {
                    return;
                }
                continue;
            }
            let at = RING_HEADER_BYTES + (queue.taken % queue.slots) as usize * self.abi.slot_bytes();
            let slot = queue.ring.slice(at..at + self.abi.slot_bytes());
            queue.taken = queue.taken.wrapping_add(1);
            let request = Request::decode(self.abi, &slot.to_vec());
            let answer = self.execute(&request);
            let response = Response { id: request.id(), op: request.response_op(), status: answer };
            slot.copy_from_slice(0, &response.encode()[..self.abi.response_bytes()]);
            let queue = &self.queues[number];
            let old = queue.ring.load_u32(index::RSP_PROD, Ordering::Relaxed);
            let new = old.wrapping_add(1);
            queue.ring.store_u32(index::RSP_PROD, new, Ordering::Release);
            fence(Ordering::SeqCst);
            let event = queue.ring.load_u32(index::RSP_EVENT, Ordering::Acquire);
            if new.wrapping_sub(event) < new.wrapping_sub(old) {
                rustix::io::write(&queue.call, &1u64.to_ne_bytes()).unwrap();
            }
        }
    }

    fn execute(&mut self, request: &Request) -> i16 {
        let (raw, sector, segments) = match request {
            Request::Plain(plain) => {
                (plain.op, plain.sector, plain.segments[..usize::from(plain.nr_segments).min(11)].to_vec())
            }
            Request::Discard(discard) => {
                let from = discard.sector as usize * 512;
                let to = from + discard.nr_sectors as usize * 512;
                self.offers.disk.lock().unwrap()[from..to].fill(0);
                return status::OKAY;
            }
            Request::Indirect(indirect) => {
                let count = usize::from(indirect.nr_segments);
                (indirect.op, indirect.sector, self.indirect_segments(&indirect.pages, count))
            }
        };
        match raw {
            op::READ | op::WRITE => self.transfer(raw == op::WRITE, sector as usize * 512, &segments),
            op::FLUSH_DISKCACHE => status::OKAY,
            _ => status::EOPNOTSUPP,
        }
    }

    fn indirect_segments(&mut self, pages: &[GrantRef], count: usize) -> Vec<SegmentEntry> {
        let used = &pages[..count.div_ceil(512)];
        let mapped = self.hypervisor.map(self.offers.vbd.guest, used, false).unwrap();
        let bytes = mapped.slice(0..count * 8).to_vec();
        bytes.as_chunks::<8>().0.iter().map(SegmentEntry::decode).collect()
    }

    fn transfer(&mut self, is_write: bool, offset: usize, segments: &[SegmentEntry]) -> i16 {
        let (mut ops, mut len) = (Vec::new(), 0);
        for segment in segments {
            let (first, last) = (u16::from(segment.first_sect), u16::from(segment.last_sect));
            let bytes = (last + 1 - first) * 512;
            let gref = segment.gref;
            ops.push(CopyOp { gref, page_offset: first * 512, len: bytes, buffer: 0, buffer_offset: len });
            len += u32::from(bytes);
        }
        let end = offset + len as usize;
        let mut disk = self.offers.disk.lock().unwrap();
        let Some(place) = disk.get_mut(offset..end) else { return status::ERROR };
        let buffer = Segment::zeroed(len as usize);
        if !is_write {
            buffer.copy_from_slice(0, place);
        }
        let is_done = match &mut self.persistent {
            Some(known) => copy_mapped(&self.hypervisor, &self.offers.vbd, known, is_write, &buffer, &ops),
            None => {
                let way = if is_write { Way::FromGuest } else { Way::ToGuest };
                let mut statuses = Vec::new();
                self.hypervisor.copy(self.offers.vbd.guest, way, |_| &buffer, &ops, &mut statuses).unwrap();
                statuses.iter().all(|status| status.is_okay())
            }
        };
        if is_write && is_done {
            buffer.copy_to_slice(0, place);
        }
        if is_done { status::OKAY } else { status::ERROR }
    }
}

/// By pages that are mapped once and stay so.
fn copy_mapped(
    hypervisor: &Hypervisor,
    vbd: &Vbd,
    known: &mut HashMap<GrantRef, Segments>,
    is_write: bool,
    buffer: &Segment,
    ops: &[CopyOp],
) -> bool {
    for op in ops {
        let page = known.entry(op.gref).or_insert_with(|| hypervisor.map(vbd.guest, &[op.gref], true).unwrap());
        let (at, len) = (usize::from(op.page_offset), usize::from(op.len));
        let page = page.as_slice()[0].slice(at..at + len);
        let part = buffer.slice(op.buffer_offset as usize..op.buffer_offset as usize + len);
        if is_write { part.copy_from(&page) } else { page.copy_from(&part) }
    }
    true
}

/// Whether there is a node, as domain 0 sees it.
pub fn has_node(dir: &Path, path: &str) -> bool {
    let mut store = XenStore::open(&dir.join("xenstored")).unwrap();
    store.read_optional(Tx::NONE, path).unwrap().is_some()
}
