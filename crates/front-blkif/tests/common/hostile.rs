//! What tests of hostile guests share: a back end with two guests on one engine, of which one is rude and the other, the
//! [`Neighbour`], must not notice; and requests that are put into a ring by hand.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use spile_core::Segment;
use spile_front_blkif::device::{Config, Device};
use spile_front_blkif::keeping::FailedSyncs;
use spile_front_blkif::pages::Access;
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op, Queue};
use spile_lab::xen::toolstack::{Vbd, add_vbd};
use spile_lab::xen::{Blkfront, Guest, Hypervisor};
use spile_xen::blkif::{
    Abi, Discard, IndirectRequest, PlainRequest, Request, Response, SEGMENT_BYTES, SEGMENTS_PER_PAGE, SegmentEntry,
    index, status,
};
use spile_xen::store::XenStore;
use spile_xen::{DomId, GrantRef, XEN_PAGE_BYTES};

use super::disk::TestDisk;
use super::{PATIENCE, SIZE, Setup, World, pattern, read, wait_until, write};

/// The other guest.
pub const NEIGHBOUR: DomId = DomId(8);

/// Small slots: a page each, so that a ring is made quickly.
pub fn options(access: Access) -> BlkfrontOptions {
    let persistent = access == Access::Persistent;
    BlkfrontOptions { persistent, data_bytes: 8192, ..BlkfrontOptions::default() }
}

/// A guest that keeps to the rules, with a disk of its own, beside the one that does not.
pub struct Neighbour {
    queue: Queue,
    device: Device,
    rounds: u64,
    _front: Blkfront,
}

impl Neighbour {
    /// Is served by the engine that serves the other.
    pub fn new(world: &mut World) -> Self {
        let vbd = Vbd::new(NEIGHBOUR, "neighbour");
        let guest = Arc::new(Guest::create(world.dir.path(), NEIGHBOUR, 8 << 20).unwrap());
        add_vbd(&mut world.store, &vbd).unwrap();
        let failed_syncs = FailedSyncs::new(world.dir.path(), &vbd.backend_path()).unwrap();
        let (name, backend_path, params) = ("neighbour".into(), vbd.backend_path(), vbd.params.clone());
        let config = Config { name, backend_path, params, failed_syncs, ..world.config.clone() };
        let xenstored = world.host.xenstored();
        let open_store = move || XenStore::open(&xenstored);
        let hypervisor = Arc::new(Hypervisor::connect(world.dir.path()).unwrap());
        let (engine, disk) = (world.engine.clone(), Arc::new(TestDisk::new(SIZE)));
        let device = Device::start(engine, disk, open_store, hypervisor.clone(), hypervisor, config, || {}).unwrap();
        let mut front = Blkfront::new(guest, vbd.device, options(world.config.access)).unwrap();
        let queue = front.start().unwrap().remove(0);
        Self { queue, device, rounds: 0, _front: front }
    }

    /// It is served well.
    pub fn assert_served(&mut self) {
        self.rounds += 1;
        let bytes = pattern(self.rounds, 4096);
        write(&mut self.queue, 4096 * (self.rounds % 8), &bytes);
        assert_eq!(read(&mut self.queue, 4096 * (self.rounds % 8), 4096), bytes);
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.device.stop();
        let _ = self.device.wait();
    }
}

/// A world with a neighbour.
pub struct Street {
    /// Goes first: its device works on the world's engine.
    pub neighbour: Neighbour,
    pub world: World,
}

impl Street {
    pub fn new(access: Access) -> Self {
        Self::with(Setup::new(access))
    }

    pub fn with(setup: Setup) -> Self {
        let mut world = setup.start();
        let mut neighbour = Neighbour::new(&mut world);
        neighbour.assert_served();
        Self { neighbour, world }
    }

    /// The rude guest's front end, connected.
    pub fn connect(&self, options: BlkfrontOptions) -> (Blkfront, Queue) {
        self.world.connect_one(options)
    }

    /// A front end whose keys and ring `rude` changes before the back end looks at them. It is in state 3 then.
    pub fn prepare(
        &mut self,
        options: BlkfrontOptions,
        rude: impl FnOnce(&mut Blkfront, &mut [Queue]),
    ) -> (Blkfront, Vec<Queue>) {
        let mut front = self.world.front(options);
        front.negotiate().unwrap();
        let (front, queues) = self.present(front, rude);
        (front, queues)
    }

    /// The same, of a front end that knows what is offered.
    pub fn present(
        &mut self,
        mut front: Blkfront,
        rude: impl FnOnce(&mut Blkfront, &mut [Queue]),
    ) -> (Blkfront, Vec<Queue>) {
        self.world.stop();
        let mut queues = front.prepare().unwrap();
        rude(&mut front, &mut queues);
        self.world.serve();
        (front, queues)
    }

    /// The back end refuses what the front end has written, by its state.
    pub fn assert_refused(&mut self, what: &str, front: &mut Blkfront) {
        let answer = front.wait_for(&[4, 5]).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(answer, 5, "{what}: it is refused");
        self.neighbour.assert_served();
    }

    /// The neighbour is served, and so is the guest when it connects again; nothing of the old ring is in use then.
    pub fn assert_well(&mut self, mut front: Blkfront, queues: Vec<Queue>) {
        self.neighbour.assert_served();
        front.stop(queues).unwrap();
        Self::begin_again(&mut front);
        let mut queues = front.start().unwrap();
        if front.disk().is_readonly() {
            assert_reads(&mut queues[0]);
        } else {
            let bytes = pattern(77, 4096);
            write(&mut queues[0], 8192, &bytes);
            assert_eq!(read(&mut queues[0], 8192, 4096), bytes);
        }
        front.stop(queues).unwrap();
        Self::begin_again(&mut front);
    }

    /// Waits for an offer; whatever the back end's state is before, for a rude front end may have been quicker than it.
    pub fn begin_again(front: &mut Blkfront) {
        front.set_state(1).unwrap();
        wait_until("another offer", || front.backend_state().unwrap() == 2);
    }

    /// The first ring is served no more.
    pub fn wait_broken(&self) {
        let device = self.world.device.as_ref().unwrap();
        wait_until("the ring is given up", || device.metrics().first().is_some_and(|ring| ring.rings_at_work() == 0));
    }

    /// What the workers have done: tasks polled and sleeps, once they do nothing any more.
    pub fn rest(&self) -> (u64, u64) {
        let work = || {
            let stats = self.world.engine.stats();
            (stats.iter().map(|s| s.polls).sum(), stats.iter().map(|s| s.sleeps).sum())
        };
        let mut last = work();
        wait_until("the workers rest", || {
            std::thread::sleep(Duration::from_millis(20));
            let now = work();
            std::mem::replace(&mut last, now) == now
        });
        last
    }
}

/// A read, write, barrier or flush of whole pages of slot 0, or an operation that is not known.
pub fn plain(queue: &Queue, op: u8, pages: usize, sector: u64) -> PlainRequest {
    let mut grefs = queue.grants(0).collect::<Vec<_>>().into_iter().cycle();
    let whole = |gref| SegmentEntry { gref, first_sect: 0, last_sect: 7 };
    let segments = std::array::from_fn(|_| whole(grefs.next().unwrap()));
    PlainRequest { op, nr_segments: pages as u8, handle: 0, id: u64::from(op), sector, segments }
}

/// A discard.
pub fn discard(sector: u64, nr_sectors: u64, flag: u8) -> Request {
    Request::Discard(Discard { flag, handle: 0, id: 5, sector, nr_sectors })
}

/// A page that is granted.
pub fn page(queue: &Queue, gref: GrantRef) -> Segment {
    let at = queue.guest().table().get(gref).frame as usize * XEN_PAGE_BYTES;
    queue.guest().memory().slice(at..at + XEN_PAGE_BYTES)
}

/// Puts segments into the pages of slot 0 that are for them, which are granted; these pages.
pub fn fill_indirect(queue: &Queue, segments: &[SegmentEntry]) -> Vec<GrantRef> {
    let grefs: Vec<_> = queue.indirect_grants(0).collect();
    for (number, segment) in segments.iter().enumerate() {
        let bytes = page(queue, grefs[number / SEGMENTS_PER_PAGE]);
        bytes.copy_from_slice(number % SEGMENTS_PER_PAGE * SEGMENT_BYTES, &segment.encode());
    }
    grefs
}

/// An indirect request whose segments are in these pages.
pub fn indirect(op: u8, nr_segments: u16, sector: u64, pages: &[GrantRef]) -> IndirectRequest {
    let mut all = [GrantRef(0); 8];
    all.iter_mut().zip(pages).for_each(|(place, gref)| *place = *gref);
    IndirectRequest { op, nr_segments, id: 6, sector, handle: 0, pages: all }
}

/// Gives each request a number of its own, for the answers.
pub fn numbered(mut request: Request, number: u64) -> Request {
    match &mut request {
        Request::Plain(plain) => plain.id = number,
        Request::Discard(discard) => discard.id = number,
        Request::Indirect(indirect) => indirect.id = number,
    }
    request
}

/// The next answer, whose bytes without meaning are zero.
pub fn next_response(queue: &mut Queue, number: u32) -> Response {
    while !queue.ring().has_response() {
        let is_there = queue.sleep(PATIENCE).unwrap();
        let indices = [index::REQ_PROD, index::REQ_EVENT, index::RSP_PROD, index::RSP_EVENT];
        assert!(is_there, "no answer {number}; indices {:?}", indices.map(|at| queue.ring().index(at)));
    }
    let response = queue.ring_mut().pop().unwrap().expect("there is one");
    let ring = queue.ring();
    let len = ring.abi().response_bytes();
    assert_eq!(ring.slot(number).to_vec()[..len], response.encode()[..len], "stray bytes in an answer");
    response
}

/// Puts requests into the ring, all at once, and takes their answers: a status for each request, in the requests' order.
/// Each is answered once, with its operation.
pub fn ask_all(queue: &mut Queue, requests: &[Request]) -> Vec<i16> {
    let first = queue.ring().index(index::RSP_PROD);
    for (number, request) in requests.iter().enumerate() {
        queue.ring_mut().push(&numbered(*request, number as u64));
    }
    queue.publish();
    let mut statuses = vec![None; requests.len()];
    for place in 0..requests.len() as u32 {
        let response = next_response(queue, first.wrapping_add(place));
        let number = response.id as usize;
        assert_eq!(response.op, requests[number].response_op(), "{:?}", requests[number]);
        assert!(statuses[number].replace(response.status).is_none(), "{:?} is answered twice", requests[number]);
    }
    statuses.into_iter().map(|status| status.expect("all are answered")).collect()
}

/// One request's status.
pub fn ask(queue: &mut Queue, request: impl Into<Request>) -> i16 {
    ask_all(queue, &[request.into()])[0]
}

/// A sound read by the queue's own path, after requests by hand.
pub fn assert_reads(queue: &mut Queue) {
    assert_eq!(super::request(queue, Op::Read, 0, 4096), status::OKAY);
}

/// Runs `rude` over and over in a thread of the guest's, while `work` goes on.
pub fn beside<R>(rude: impl Fn(u32) + Send + Sync, work: impl FnOnce() -> R) -> R {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut round = 0u32;
            while !is_over.load(Ordering::Relaxed) {
                rude(round);
                round = round.wrapping_add(1);
                if round.is_multiple_of(4096) {
                    std::thread::yield_now();
                }
            }
        });
        /// Ends the thread even when the work fails.
        struct End<'a>(&'a AtomicBool);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _end = End(&is_over);
        work()
    })
}

/// Both layouts.
pub const ABIS: [Abi; 2] = [Abi::X86_64, Abi::X86_32];
