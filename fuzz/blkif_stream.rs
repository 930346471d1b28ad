//! A blkif ring at work on an engine, under a script: slots and bytes of the ring, indices, kicks, pages that are granted,
//! revoked and rewritten, a disk that holds back and fails, back ends that end and go on, rings of responses of their
//! own. Used by the fuzz target of this name and by its short run in the tests of `front-blkif`.
//!
//! Whatever the script, nothing panics, the ring's task ends, each request that was taken is answered once or held, the
//! disk is asked for nothing outside of it, no page stays in use, and no piece of a copy leaves its page. All waits are
//! bounded.

#[path = "../crates/front/tests/common/disk.rs"]
#[allow(dead_code, reason = "the tests need more of it")]
mod disk;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use disk::{Did, TestDisk};
use rustix::event::{EventfdFlags, eventfd};
use spile_core::{Error, ErrorKind, Result, Segment, Segments};
use spile_engine::{Config as EngineConfig, Engine, EngineKind, Event};
use spile_front_blkif::execute::Target;
use spile_front_blkif::journal::{Journal, journal_bytes};
use spile_front_blkif::metrics::DiskCounters;
use spile_front_blkif::pages::Access;
use spile_front_blkif::queue::{Link, Setup, run as serve};
use spile_front_blkif::request::Limits;
use spile_front_blkif::ring::{Broken, Ring, Slot, shared_rsp_prod};
use spile_xen::blkif::{
    Abi, Discard, IndirectRequest, PlainRequest, Request, SEGMENT_BYTES, SegmentEntry, index, op, split,
};
use spile_xen::{CopyOp, DomId, GrantRef, GrantStatus, Grants, Way};

use super::panics::{PANICS, count_panics};
use super::script::Script;

/// Steps of one script at most.
const STEPS: usize = 150;
/// How long a ring may take to come to an end.
const PATIENCE: Duration = Duration::from_secs(30);
const DISK_BYTES: u64 = 1 << 20;
const SLOTS: u32 = 32;
/// The guest's pages, of which each is granted by the number of its place. The last two are the rings.
const PAGES: usize = 16;
const RING_PAGE: usize = PAGES - 2;
const PAGE_BYTES: usize = 4096;
const GUEST: DomId = DomId(5);

/// Runs one script.
pub fn run(data: &[u8]) {
    static TURN: Mutex<()> = Mutex::new(());
    // The disk is one for all.
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    count_panics();
    let mut script = Script(data);
    let mut guest = FrontEnd::new(world(script.u8()), &mut script);
    for _ in 0..STEPS {
        if script.0.is_empty() {
            break;
        }
        guest.step(&mut script);
    }
    guest.end();
}

/// What lives as long as the process.
struct World {
    engine: Engine,
    disk: Arc<TestDisk>,
}

/// One world for each engine.
fn world(selector: u8) -> &'static World {
    static WORLDS: [OnceLock<World>; 3] = [const { OnceLock::new() }; 3];
    let which = usize::from(selector) % 3;
    WORLDS[which].get_or_init(|| {
        let kind = [EngineKind::Auto, EngineKind::Threads, EngineKind::Aio][which];
        let config = EngineConfig { kind, workers: 1, pool_bytes: 1 << 20, ..EngineConfig::default() };
        World { engine: Engine::start(config).expect("the engine starts"), disk: Arc::new(TestDisk::new(DISK_BYTES)) }
    })
}

/// A guest's pages in our own memory, with what a hypervisor checks.
struct Memory {
    pages: Segment,
    /// 0: not granted, 1: for reading, else for both.
    grants: [AtomicU8; PAGES],
}

impl Memory {
    fn page(&self, number: usize) -> Segment {
        self.pages.slice(number * PAGE_BYTES..(number + 1) * PAGE_BYTES)
    }

    fn granted(&self, gref: GrantRef, is_write: bool) -> Option<Segment> {
        let number = usize::try_from(gref.0).ok().filter(|number| *number < PAGES)?;
        let grant = self.grants[number].load(Ordering::Relaxed);
        (grant > u8::from(is_write)).then(|| self.page(number))
    }
}

impl Grants for Memory {
    fn copy<'a>(
        &self,
        _domain: DomId,
        way: Way,
        buffer_of: impl Fn(u32) -> &'a Segment,
        ops: &[CopyOp],
        statuses: &mut Vec<GrantStatus>,
    ) -> Result<()> {
        statuses.clear();
        for piece in ops {
            let (from, len, at) =
                (usize::from(piece.page_offset), usize::from(piece.len), piece.buffer_offset as usize);
            assert!(len > 0 && from + len <= PAGE_BYTES, "{piece:?} leaves its page");
            let buffer = buffer_of(piece.buffer).slice(at..at + len);
            let Some(page) = self.granted(piece.gref, way == Way::ToGuest) else {
                statuses.push(GrantStatus::BAD_GREF);
                continue;
            };
            let (page, buffer) = (Segments::from(page.slice(from..from + len)), Segments::from(buffer));
            if way == Way::ToGuest {
                page.copy_from(&buffer)
            } else {
                buffer.copy_from(&page)
            }
            statuses.push(GrantStatus::OKAY);
        }
        Ok(())
    }

    fn map(&self, _domain: DomId, refs: &[GrantRef], is_writable: bool) -> Result<Segments> {
        let refused = || Error::new(ErrorKind::Denied, "it is not granted");
        let mut all = Segments::new();
        for gref in refs {
            all.push(self.granted(*gref, is_writable).ok_or_else(refused)?);
        }
        Ok(all)
    }

    fn map_ring(&self, _domain: DomId, _refs: &[GrantRef]) -> Result<Segment> {
        Err(Error::new(ErrorKind::Unsupported, "the script brings its ring"))
    }
}

impl Script<'_> {
    /// A number at which things tend to break, or any.
    fn number(&mut self) -> u64 {
        let selector = self.u8();
        match selector >> 5 {
            0..=2 => u64::from(selector & 31) * 8,
            3 => u64::MAX - u64::from(selector & 31),
            4 => 1 << (selector & 31),
            5 => DISK_BYTES / 512 - u64::from(selector & 31),
            6 => 1 << (32 + (selector & 31)),
            _ => self.u64(),
        }
    }

    /// A page, mostly one that is there.
    fn gref(&mut self) -> GrantRef {
        let number = self.u8();
        GrantRef(if number < 240 { u32::from(number) % PAGES as u32 } else { u32::MAX - u32::from(number) })
    }
}

fn event() -> (OwnedFd, Arc<Event>) {
    let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("descriptors are to be had");
    let ours = fd.try_clone().expect("descriptors are to be had");
    (ours, Arc::new(Event::from_fd(fd).expect("it is an eventfd")))
}

struct FrontEnd {
    world: &'static World,
    memory: Arc<Memory>,
    abi: Abi,
    access: Access,
    read_only: bool,
    is_split: bool,
    kept: Segment,
    kick: OwnedFd,
    link: Arc<Link>,
    ended: mpsc::Receiver<Option<Broken>>,
    counters: Arc<DiskCounters>,
    /// Requests that an earlier back end has left, all in all.
    again: u64,
}

impl FrontEnd {
    fn new(world: &'static World, script: &mut Script<'_>) -> Self {
        let pages = Segment::zeroed(PAGES * PAGE_BYTES);
        let memory = Arc::new(Memory { pages, grants: std::array::from_fn(|_| AtomicU8::new(2)) });
        let flags = script.u8();
        let start = [0, u32::MAX - 3][usize::from(flags >> 5 & 1)];
        let is_split = flags & 16 != 0;
        let slots = if is_split { split::response_slots(0) } else { SLOTS };
        let mut front_end = Self {
            world,
            memory,
            abi: if flags & 1 == 0 { Abi::X86_64 } else { Abi::X86_32 },
            access: [Access::Copy, Access::Map, Access::MapCopy, Access::Persistent][usize::from(flags >> 1 & 3)],
            read_only: flags & 8 != 0,
            is_split,
            kept: Segment::zeroed(journal_bytes(slots)),
            kick: event().0,
            link: Arc::default(),
            ended: mpsc::channel().1,
            counters: Arc::default(),
            again: 0,
        };
        for page in [RING_PAGE, RING_PAGE + 1] {
            for at in [index::REQ_PROD, index::RSP_PROD] {
                front_end.memory.page(page).store_u32(at, start, Ordering::Relaxed);
            }
        }
        front_end.begin(start);
        front_end
    }

    fn slots(&self) -> u32 {
        if self.is_split { split::response_slots(0) } else { SLOTS }
    }

    /// Where responses are.
    fn responses(&self) -> Segment {
        self.memory.page(if self.is_split { RING_PAGE + 1 } else { RING_PAGE })
    }

    fn ring(&self) -> Segment {
        self.memory.page(RING_PAGE)
    }

    fn begin(&mut self, start: u32) {
        let journal = Journal::begin(self.kept.clone(), self.slots(), start);
        self.start(start, start, journal, Vec::new());
    }

    fn start(&mut self, req_cons: u32, rsp_prod: u32, journal: Journal, again: Vec<(u16, Slot)>) {
        let mut ring = Ring::new(self.ring(), self.abi, 0, req_cons, rsp_prod);
        if self.is_split {
            ring = ring.with_responses(self.responses(), 0);
        }
        self.again += again.len() as u64;
        let (kick_fd, kick) = event();
        self.kick = kick_fd;
        self.link = Arc::default();
        let setup = Setup {
            target: Arc::new(Target {
                disk: self.world.disk.clone(),
                name: "fuzz".into(),
                failures: Arc::default(),
                has_failed_flush: Default::default(),
            }),
            grants: self.memory.clone(),
            domain: GUEST,
            access: self.access,
            limits: Limits { max_indirect: 256, read_only: self.read_only, discards: true },
            share: 1,
            complaints: Arc::default(),
            ring,
            journal,
            again,
            kick,
            call: event().1,
            link: self.link.clone(),
            counters: self.counters.of_ring(0),
            disk_counters: self.counters.clone(),
            trace: None,
        };
        let (tell, ended) = mpsc::channel();
        self.ended = ended;
        self.world.engine.spawn_on(0, move || async move {
            let _ = tell.send(serve(setup).await.broken);
        });
        self.kick();
    }

    fn step(&mut self, script: &mut Script<'_>) {
        match script.u8() % 14 {
            0..=3 => self.request(script),
            4 => self.poke(script),
            5 => self.indirect_page(script),
            6 => {
                let (at, value) = (script.u8() % 4, script.number() as u32);
                self.ring().store_u32(usize::from(at) * 4, value, Ordering::Relaxed);
            }
            7 => self.kick(),
            8 | 9 => self.disturb(script.u8()),
            10 => {
                let (number, how) = (usize::from(script.u8()) % PAGES, script.u8() % 3);
                self.memory.grants[number].store(how, Ordering::Relaxed);
            }
            11 => self.go_on(),
            12 => std::thread::yield_now(),
            _ => self.responses().store_u32(index::RSP_EVENT, script.number() as u32, Ordering::Relaxed),
        }
    }

    fn kick(&self) {
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
    }

    /// Mostly sound, and where the guest's next request belongs.
    fn request(&self, script: &mut Script<'_>) {
        let (kind, count, sector) = (script.u8(), script.u8(), script.number());
        let entry = |script: &mut Script<'_>| {
            let (gref, sectors) = (script.gref(), script.u8());
            let (first_sect, last_sect) = if sectors < 128 { (0, 7) } else { (sectors >> 3 & 15, sectors & 15) };
            SegmentEntry { gref, first_sect, last_sect }
        };
        let request = match kind % 10 {
            0 => Request::Discard(Discard { flag: count & 1, handle: 0, id: 3, sector, nr_sectors: script.number() }),
            1 | 2 => {
                let mut pages = [GrantRef(0); 8];
                pages.iter_mut().take(2).for_each(|page| *page = script.gref());
                let nr_segments = if count < 200 { u16::from(count % 40) } else { u16::from(count) << 8 };
                Request::Indirect(IndirectRequest { op: kind / 10 % 7, nr_segments, id: 4, sector, handle: 0, pages })
            }
            _ => {
                let nr_segments = if count < 230 { count % 12 } else { count };
                let mut segments = [SegmentEntry::default(); 11];
                segments.iter_mut().take(usize::from(nr_segments)).for_each(|segment| *segment = entry(script));
                let kind = [op::READ, op::WRITE, op::READ, op::WRITE, op::FLUSH_DISKCACHE, op::WRITE_BARRIER, 99]
                    [usize::from(kind / 10 % 7)];
                Request::Plain(PlainRequest { op: kind, nr_segments, handle: 0, id: 5, sector, segments })
            }
        };
        let (ring, mut slot) = (self.ring(), [0; 112]);
        request.encode(self.abi, &mut slot);
        let next = ring.load_u32(index::REQ_PROD, Ordering::Relaxed);
        let len = self.abi.slot_bytes();
        ring.copy_from_slice(64 + (next % SLOTS) as usize * len, &slot[..len]);
        ring.store_u32(index::REQ_PROD, next.wrapping_add(1), Ordering::Release);
        if kind < 0xf0 {
            self.kick();
        }
    }

    fn poke(&self, script: &mut Script<'_>) {
        let (page, at, len) =
            (usize::from(script.u8()) % PAGES, script.number() as usize, usize::from(script.u8() % 64));
        self.memory.page(page).copy_from_slice(at % (PAGE_BYTES - 64), script.take(len));
    }

    fn indirect_page(&self, script: &mut Script<'_>) {
        let page = self.memory.page(usize::from(script.u8()) % RING_PAGE);
        for number in 0..usize::from(script.u8()) {
            let entry = SegmentEntry { gref: script.gref(), first_sect: 0, last_sect: script.u8() % 9 };
            page.copy_from_slice(number * SEGMENT_BYTES, &entry.encode());
        }
    }

    fn disturb(&self, how: u8) {
        match how {
            0..90 => self.world.disk.hold(),
            90..180 => self.world.disk.release(),
            180..220 => self.world.disk.fail(Some(ErrorKind::Io)),
            _ => self.world.disk.fail(None),
        }
    }

    /// The task ends, with all that it has taken.
    fn stop(&self) {
        self.world.disk.release();
        self.link.stop();
        let ended = self.ended.recv_timeout(PATIENCE);
        assert!(ended.is_ok(), "the ring's task does not end");
        assert_eq!(PANICS.load(Ordering::Relaxed), 0, "a thread has panicked");
        for did in self.world.disk.take_did() {
            let is_inside = match did {
                Did::Read(at, len) | Did::Discard(at, len) => at.checked_add(len).is_some_and(|end| end <= DISK_BYTES),
                Did::Write { at, len, .. } => {
                    !self.read_only && at.checked_add(len).is_some_and(|end| end <= DISK_BYTES)
                }
                Did::Flush => true,
                Did::Zeroes { .. } => false,
            };
            assert!(is_inside && (!self.read_only || !matches!(did, Did::Discard(..))), "{did:?}");
        }
    }

    /// Another back end takes the place of this one.
    fn go_on(&mut self) {
        self.stop();
        let shown = shared_rsp_prod(&self.responses());
        match Journal::resume(self.kept.clone(), self.slots(), shown) {
            Ok((journal, left)) => self.start(left.req_cons, left.rsp_prod, journal, left.again),
            // The guest has written over its index, and connects again.
            Err(_) => {
                self.ring().store_u32(index::REQ_PROD, shown, Ordering::Relaxed);
                self.begin(shown);
            }
        }
    }

    fn end(self) {
        self.world.disk.fail(None);
        self.stop();
        let sums = self.counters.metrics().remove(0);
        assert_eq!(sums.rings_at_work(), 0);
        let taken = sums.requests.total().begun;
        // What was held, and what waits for a barrier that is, is taken again by the next back end or not at all.
        if sums.held_flushes == 0 {
            assert!(self.again == 0 && taken == sums.answered(), "{sums:?}");
        }
        assert!(sums.answered() <= taken, "{sums:?}");
        let Ok(memory) = Arc::try_unwrap(self.memory) else { panic!("the guest's pages are in use") };
        drop(memory);
    }
}
