//! A whole vhost-user server under a script: messages good and bad, descriptors of all kinds, rings, kicks, a disk that
//! holds back and fails, memory that is cut short, front ends that come and go. Used by the fuzz target of this name and
//! by its short run in the tests of `front-vhost`.
//!
//! Whatever the script, nothing panics, each connection ends, each request that was read is answered, no descriptor is
//! kept, and the next guest is served. All waits are bounded.

#[path = "../crates/front/tests/common/disk.rs"]
#[allow(dead_code, reason = "the tests need more of it")]
mod disk;

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use disk::TestDisk;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::ftruncate;
use spile_core::ErrorKind;
use spile_engine::{Config as EngineConfig, Engine, EngineKind};
use spile_front_vhost::{Config, Server};
use spile_lab::vhost::proto::{
    FLAG_NEED_REPLY, Header, InflightPayload, RegionPayload, VERSION, VringAddresses, config_payload, feature,
    protocol_feature, vring_state,
};
use spile_lab::vhost::{Area, Descriptor, DescriptorTable, GuestMemory, MemoryOptions, Region, RingParts, Socket};

use super::panics::{PANICS, count_panics};
use super::script::Script;

/// Steps of one script at most.
const STEPS: usize = 150;
/// How long the server may take to come to an end.
const PATIENCE: Duration = Duration::from_secs(30);
const DISK_BYTES: u64 = 1 << 20;
const QUEUES: usize = 3;
/// The guest's memory: two regions of 32 KiB.
const MEMORY: MemoryOptions =
    MemoryOptions { len_bytes: 64 << 10, regions: 2, gap_bytes: 0, guest_base: 1 << 16, huge_pages: false };
/// Where a queue's descriptor table, available and used ring lie in its 4 KiB.
const PARTS: [usize; 3] = [0, 0x800, 0xa00];
/// Where the rings end.
const DATA_AT: u64 = MEMORY.guest_base + 0x1000 * QUEUES as u64;

/// Runs one script.
pub fn run(data: &[u8]) {
    count_panics();
    let mut script = Script(data);
    let world = world(script.u8());
    let mut front_end = FrontEnd::new(world);
    for _ in 0..STEPS {
        if script.0.is_empty() {
            break;
        }
        front_end.step(&mut script);
    }
    drop(front_end);
    world.settle();
}

fn until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "it hangs: {what}");
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// A server that lives as long as the process.
struct World {
    server: Server<TestDisk>,
    disk: Arc<TestDisk>,
    address: SocketAddr,
    runs: AtomicU64,
    files: AtomicUsize,
}

/// One world for each engine.
fn world(selector: u8) -> &'static World {
    static WORLDS: [OnceLock<World>; 3] = [const { OnceLock::new() }; 3];
    let which = usize::from(selector) % 3;
    WORLDS[which].get_or_init(|| World::new([EngineKind::Auto, EngineKind::Threads, EngineKind::Aio][which]))
}

impl World {
    fn new(kind: EngineKind) -> Self {
        let config = EngineConfig { kind, workers: 1, pool_bytes: 1 << 20, ..EngineConfig::default() };
        let engine = Engine::start(config).expect("the engine starts");
        let disk = Arc::new(TestDisk::new(DISK_BYTES));
        let (serial, max_connections) = ("fuzz".to_owned(), 16);
        let config = Config { queues: QUEUES as u16, serial, max_connections, pins_memory: true, ..Config::default() };
        let server = Server::new(engine, disk.clone(), config).expect("the server starts");
        let name = format!("spile-fuzz-{}-{kind}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).expect("a name is a name");
        let listener = UnixListener::bind_addr(&address).expect("the name is free");
        server.listen(listener.into()).expect("the server listens");
        Self { server, disk, address, runs: AtomicU64::new(0), files: AtomicUsize::new(usize::MAX) }
    }

    fn connect(&self) -> Socket {
        let socket = Socket::new(UnixStream::connect_addr(&self.address).expect("the server accepts"));
        let socket = socket.expect("a socket has time limits");
        // A server that waits for its disk takes no message meanwhile: so the script must not wait for the server.
        socket.set_patience(Duration::from_millis(20)).expect("a socket has time limits");
        socket
    }

    /// All has come to an end as it should.
    fn settle(&self) {
        self.disk.release();
        self.disk.fail(None);
        until("a connection's end", || self.server.connections() == 0);
        assert_eq!(PANICS.load(Ordering::Relaxed), 0, "a thread has panicked");
        let metrics = self.server.metrics();
        assert_eq!(metrics.ring_starts, metrics.ring_stops, "{metrics:?}");
        assert_eq!(metrics.requests.total().begun, metrics.answered(), "{metrics:?}");
        self.disk.take_did();
        let runs = self.runs.fetch_add(1, Ordering::Relaxed);
        if runs % 64 == 10 {
            self.assert_serves();
            self.assert_few_files();
        }
    }

    fn assert_serves(&self) {
        let mut front_end = FrontEnd::new(self);
        front_end.set_up(0, 4);
        let asked = front_end.request(0, 8, 0, 20);
        until("a sound request", || asked.load_u8(0, Ordering::Acquire) != 0xee);
        assert_eq!(asked.load_u8(0, Ordering::Acquire), 0, "GET_ID after a script");
        drop(front_end);
        until("a connection's end", || self.server.connections() == 0);
    }

    /// The other world may have come to life in between, with a few of its own.
    fn assert_few_files(&self) {
        let count = || std::fs::read_dir("/proc/self/fd").expect("/proc is mounted").count();
        let before = self.files.load(Ordering::Relaxed);
        until("descriptors are closed", || count() <= before.saturating_add(30));
        self.files.fetch_min(count(), Ordering::Relaxed);
    }
}

impl Script<'_> {
    /// A number at which things tend to break, or any.
    fn number(&mut self) -> u64 {
        let selector = self.u8();
        match selector >> 5 {
            0 => u64::from(selector & 31),
            1 => 1 << (selector & 31),
            2 => (1 << (selector & 31)) - 1,
            3 => u64::MAX - u64::from(selector & 31),
            4 => MEMORY.guest_base + (u64::from(selector & 31) << 11),
            5 => DISK_BYTES / 512 - u64::from(selector & 31),
            6 => 1 << (32 + (selector & 31)),
            _ => self.u64(),
        }
    }
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("descriptors are to be had")
}

struct FrontEnd<'a> {
    world: &'a World,
    socket: Socket,
    is_up: Cell<bool>,
    memory: GuestMemory,
    rings: Vec<RingParts>,
    kicks: Vec<OwnedFd>,
    next: [u16; QUEUES],
    ring_size: u16,
    inflight: Option<(InflightPayload, OwnedFd)>,
}

impl<'a> FrontEnd<'a> {
    fn new(world: &'a World) -> Self {
        let memory = GuestMemory::new(&MEMORY).expect("memory is to be had");
        let rings = (0..QUEUES).map(|queue| ring(&memory, queue, 16)).collect();
        let kicks = (0..QUEUES).map(|_| event()).collect();
        let socket = world.connect();
        Self {
            world,
            socket,
            is_up: Cell::new(true),
            memory,
            rings,
            kicks,
            next: [0; QUEUES],
            ring_size: 16,
            inflight: None,
        }
    }

    fn step(&mut self, script: &mut Script<'_>) {
        match script.u8() % 16 {
            0 => {
                let (options, size) = (script.u8(), script.u8());
                self.set_up(options, u32::from(size % 6));
            }
            1 | 2 => self.message(script),
            3 => self.bytes(script),
            4 => self.poke(script),
            5 | 6 => self.describe(script),
            7 => self.offer(script),
            8 => self.kick(script),
            9 | 10 => {
                let (queue, kind) = (script.u8(), script.u8());
                self.request(
                    usize::from(queue) % QUEUES,
                    u32::from(kind % 16),
                    script.number(),
                    script.number() as u32,
                );
            }
            11 => self.hear(),
            12 => self.disturb(script),
            13 => self.reconnect(script),
            14 => self.scribble(script),
            _ => std::thread::sleep(Duration::from_micros(u64::from(script.u8()))),
        }
    }

    /// Sends a message.
    fn send(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let header = Header { request, flags: VERSION | FLAG_NEED_REPLY, len_bytes: payload.len() as u32 };
        self.send_bytes(&[&header.to_bytes(), payload].concat(), fds);
    }

    /// A connection that has ended takes nothing more, and one that is full is given up; neither is a finding.
    fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        self.is_up.set(self.is_up.get() && self.socket.send_bytes(bytes, fds).is_ok());
    }

    /// Takes the replies that are there. Only set_up waits for one, and for no longer than the server may take.
    fn hear(&self) {
        while is_readable(&self.socket, Duration::ZERO) && self.socket.receive().is_ok() {}
    }

    /// Everything that a front end says before its guest works, in one go.
    fn set_up(&mut self, options: u8, log2: u32) {
        let has = |bit: u32| options & 1 << bit != 0;
        let without = [(3, feature::EVENT_IDX), (4, feature::INDIRECT_DESC), (6, feature::BLK_FLUSH)];
        let without = without.into_iter().filter(|(bit, _)| has(*bit)).fold(0, |all, (_, feature)| all | feature);
        let log = if has(2) { feature::LOG_ALL } else { 0 };
        let features = feature::VERSION_1 | feature::PROTOCOL_FEATURES | feature::EVENT_IDX | feature::INDIRECT_DESC;
        let features = (features | feature::BLK_FLUSH | feature::BLK_CONFIG_WCE | log) & !without;
        let protocol = if has(0) { 0 } else { protocol_feature::REPLY_ACK };
        self.send(16, &protocol.to_ne_bytes(), &[]);
        self.send(2, &features.to_ne_bytes(), &[]);
        let regions: Vec<_> = self.memory.regions().iter().map(Region::payload).collect();
        self.send(5, &RegionPayload::table(&regions), &vec![self.memory.file(); regions.len()]);
        if has(2) {
            self.send(6, &[8u64, 0].map(u64::to_ne_bytes).concat(), &[self.memory.file()]);
        }
        self.ring_size = 1 << log2;
        if has(1) {
            self.ask_for_inflight();
        }
        let base = if has(5) { 65_530 } else { 0 };
        (0..QUEUES).for_each(|queue| self.set_up_ring(queue, base, has(2)));
    }

    fn set_up_ring(&mut self, queue: usize, base: u16, logs: bool) {
        self.rings[queue] = ring(&self.memory, queue, self.ring_size);
        self.next[queue] = base;
        self.rings[queue].set_available_index(base);
        self.rings[queue].used.store_u16(2, base, Ordering::Release);
        let index = queue as u32;
        self.send(8, &vring_state(index, self.ring_size.into()), &[]);
        self.send(10, &vring_state(index, base.into()), &[]);
        let addresses = VringAddresses { flags: u32::from(logs), ..addresses(&self.rings[queue], index) };
        self.send(9, &addresses.to_bytes(), &[]);
        self.send(12, &(queue as u64).to_ne_bytes(), &[self.kicks[queue].as_fd()]);
        self.send(13, &(queue as u64).to_ne_bytes(), &[event().as_fd()]);
        self.send(18, &vring_state(index, 1), &[]);
    }

    fn ask_for_inflight(&mut self) {
        let asked = InflightPayload { queues: QUEUES as u16, queue_size: self.ring_size, ..Default::default() };
        self.send(31, &asked.to_bytes(), &[]);
        while is_readable(&self.socket, Duration::from_millis(100)) {
            let Ok(mut reply) = self.socket.receive() else { return };
            if let (31, Some(payload), Some(fd)) =
                (reply.header.request, InflightPayload::parse(&reply.payload), reply.fds.pop())
            {
                self.send(32, &payload.to_bytes(), &[fd.as_fd()]);
                self.inflight = Some((payload, fd));
                return;
            }
        }
    }

    /// A message of a kind that the server knows, with numbers and descriptors that fit or do not.
    fn message(&mut self, script: &mut Script<'_>) {
        let request = u32::from(script.u8() % 40);
        let index = script.number() as u32;
        let payload = match request {
            2 | 12..=14 | 16 => script.number().to_ne_bytes().to_vec(),
            5 | 37 | 38 => self.regions(request, script),
            6 => [script.number(), script.number()].map(u64::to_ne_bytes).concat(),
            8 | 10 | 11 | 18 => vring_state(index, script.number() as u32),
            9 => self.addresses(index, script),
            24 | 25 => {
                let len = script.number() % 300;
                config_payload(index, 0, script.take(len as usize))
            }
            31 | 32 => {
                let (len_bytes, file_offset) = (script.number(), script.number());
                let (queues, queue_size) = (script.number() as u16, script.number() as u16);
                InflightPayload { len_bytes, file_offset, queues, queue_size }.to_bytes()
            }
            _ => Vec::new(),
        };
        let fds = self.descriptors(request, &payload, script.u8());
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        self.send(request, &payload, &fds);
    }

    fn regions(&self, request: u32, script: &mut Script<'_>) -> Vec<u8> {
        let own: Vec<_> = self.memory.regions().iter().map(Region::payload).collect();
        let odd = |script: &mut Script<'_>| {
            let own = own[usize::from(script.u8()) % own.len()];
            match script.u8() % 6 {
                0 => RegionPayload { guest_address: script.number(), ..own },
                1 => RegionPayload { len_bytes: script.number(), ..own },
                2 => RegionPayload { user_address: script.number(), ..own },
                3 => RegionPayload { file_offset: script.number(), ..own },
                _ => own,
            }
        };
        match request {
            5 => RegionPayload::table(&(0..script.u8() % 4).map(|_| odd(script)).collect::<Vec<_>>()),
            _ => odd(script).single(),
        }
    }

    fn addresses(&self, index: u32, script: &mut Script<'_>) -> Vec<u8> {
        let mut addresses = addresses(&self.rings[index as usize % QUEUES], index);
        let delta = script.number();
        match script.u8() % 6 {
            0 => addresses.descriptors = addresses.descriptors.wrapping_add(delta),
            1 => addresses.used = addresses.used.wrapping_add(delta),
            2 => addresses.available = addresses.available.wrapping_add(delta),
            3 => (addresses.flags, addresses.log) = (1, delta),
            _ => {}
        }
        addresses.to_bytes()
    }

    /// Those that belong to a message, and what `how` says of more, fewer and others.
    fn descriptors(&self, request: u32, payload: &[u8], how: u8) -> Vec<OwnedFd> {
        let memory = || self.memory.file().try_clone_to_owned().expect("descriptors are to be had");
        let one = || if how & 0x40 == 0 { memory() } else { event() };
        let mut fds: Vec<OwnedFd> = match request {
            5 => (0..payload.len().saturating_sub(8) / 32).map(|_| one()).collect(),
            6 | 7 | 32 | 37 => vec![one()],
            12..=14 if payload[1] & 1 == 0 => vec![if how & 0x40 == 0 { event() } else { memory() }],
            21 => UnixStream::pair().map(|(ours, _)| vec![ours.into()]).unwrap_or_default(),
            _ => Vec::new(),
        };
        match how & 0x87 {
            0x81 => drop(fds.pop()),
            0x82 => fds.push(event()),
            0x83 => fds.extend((0..12).map(|_| event())),
            _ => {}
        }
        fds
    }

    /// Any bytes on the socket, whether they are a message or not.
    fn bytes(&mut self, script: &mut Script<'_>) {
        let len = usize::from(script.u8() % 64);
        let fds: Vec<OwnedFd> = (0..script.u8() % 3).map(|_| event()).collect();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        self.send_bytes(script.take(len), &fds);
    }

    fn poke(&mut self, script: &mut Script<'_>) {
        let (at, len) = (usize::from(script.u8()) << 8 | usize::from(script.u8()), usize::from(script.u8() % 32));
        let bytes = script.take(len);
        let region = &self.memory.regions()[at >> 15].bytes;
        let at = (at & 0x7fff).min(region.len() - bytes.len());
        region.copy_from_slice(at, bytes);
    }

    fn describe(&mut self, script: &mut Script<'_>) {
        let (queue, index) = (usize::from(script.u8()) % QUEUES, usize::from(script.u8()));
        let (address, len_bytes) = (script.number(), script.number() as u32);
        let (flags, next) = (u16::from(script.u8() % 8), u16::from(script.u8() % 40));
        let ring = &self.rings[queue];
        ring.descriptors.set(index % usize::from(ring.size), Descriptor { address, len_bytes, flags, next });
    }

    fn offer(&mut self, script: &mut Script<'_>) {
        let (queue, head, ahead) = (usize::from(script.u8()) % QUEUES, script.u8(), script.u8());
        let (ring, next) = (&self.rings[queue], &mut self.next[queue]);
        ring.set_available(*next, u16::from(head % 40));
        // Mostly one further, sometimes far away.
        *next = next.wrapping_add(if ahead < 0xf0 { u16::from(ahead % 4) } else { u16::from(ahead) << 8 });
        ring.set_available_index(*next);
    }

    fn kick(&self, script: &mut Script<'_>) {
        let _ = rustix::io::write(&self.kicks[usize::from(script.u8()) % QUEUES], &1u64.to_ne_bytes());
    }

    /// A sound request of any kind at a sector, with `len` bytes of data; the byte of its status.
    fn request(&mut self, queue: usize, kind: u32, sector: u64, len: u32) -> spile_core::Segment {
        let at = DATA_AT + u64::from(self.next[queue] % 16) * 1024;
        let (header, status) = (self.at(at, 16), self.at(at + 16, 1));
        header.bytes.copy_from_slice(0, &kind.to_le_bytes());
        header.bytes.copy_from_slice(8, &sector.to_le_bytes());
        status.bytes.fill(0xee);
        let (ring, size) = (&self.rings[queue], usize::from(self.ring_size));
        let table = self.at(at + 32, 48);
        let write = if matches!(kind, 0 | 8) { Descriptor::WRITE } else { 0 };
        let parts = [
            (header.address, 16, Descriptor::NEXT),
            (at + 512, len.clamp(1, 8192), write | Descriptor::NEXT),
            (status.address, 1, Descriptor::WRITE),
        ];
        let indirect = size < 4 || sector.is_multiple_of(2);
        let (into, first) = if indirect { (&DescriptorTable(table.bytes.clone()), 0) } else { (&ring.descriptors, 1) };
        for (index, (address, len_bytes, flags)) in parts.into_iter().enumerate() {
            into.set(first + index, Descriptor { address, len_bytes, flags, next: (first + index + 1) as u16 });
        }
        let head = if indirect { 0 } else { 1 };
        if indirect {
            let descriptor = Descriptor { address: table.address, len_bytes: 48, flags: Descriptor::INDIRECT, next: 0 };
            ring.descriptors.set(0, descriptor);
        }
        ring.set_available(self.next[queue], head);
        self.next[queue] = self.next[queue].wrapping_add(1);
        ring.set_available_index(self.next[queue]);
        let _ = rustix::io::write(&self.kicks[queue], &1u64.to_ne_bytes());
        status.bytes
    }

    fn at(&self, address: u64, len: usize) -> Area {
        self.memory.at(address, len).expect("data lie in the memory")
    }

    fn disturb(&mut self, script: &mut Script<'_>) {
        match script.u8() {
            0..100 => self.world.disk.hold(),
            100..180 => self.world.disk.release(),
            180..200 => self.world.disk.fail(Some(ErrorKind::Io)),
            200..220 => self.world.disk.fail(None),
            220..240 => self.world.server.disk_has_changed(),
            // Ours is cut too; its handler puts zeroes there.
            pages => drop(ftruncate(self.memory.file(), u64::from(pages - 240) << 12)),
        }
    }

    /// As a front end does whose connection broke: with the same memory, and with the same region of requests in flight.
    fn reconnect(&mut self, script: &mut Script<'_>) {
        (self.socket, self.is_up) = (self.world.connect(), Cell::new(true));
        if script.u8().is_multiple_of(2) {
            if let Some((payload, fd)) = &self.inflight {
                self.send(32, &payload.to_bytes(), &[fd.as_fd()]);
            }
            let options = script.u8() & !(1 << 1);
            self.set_up(options, self.ring_size.ilog2());
        }
    }

    fn scribble(&mut self, script: &mut Script<'_>) {
        let (ring, value) = (&self.rings[usize::from(script.u8()) % QUEUES], script.number() as u16);
        match script.u8() % 4 {
            0 => ring.used.store_u16(2, value, Ordering::Relaxed),
            1 => ring.used.store_u16(4 + 8 * usize::from(ring.size), value, Ordering::Relaxed),
            2 => ring.set_used_event(value),
            _ => ring.set_available_flags(value),
        }
    }
}

fn is_readable(fd: impl AsFd, timeout: Duration) -> bool {
    let timeout = Timespec::try_from(timeout).ok();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], timeout.as_ref()).is_ok_and(|count| count > 0)
}

/// The memory of a queue's ring.
fn ring(memory: &GuestMemory, queue: usize, size: u16) -> RingParts {
    let all = &memory.regions()[0].bytes;
    let mut parts = PARTS.iter().zip(RingParts::lengths(size)).map(|(at, len)| {
        let at = 0x1000 * queue + at;
        all.slice(at..at + len)
    });
    let mut next = || parts.next().expect("a ring has three parts");
    RingParts { descriptors: DescriptorTable(next()), available: next(), used: next(), size }
}

fn addresses(ring: &RingParts, index: u32) -> VringAddresses {
    let [descriptors, used, available] =
        [&ring.descriptors.0, &ring.used, &ring.available].map(|part| part.as_ptr() as u64);
    VringAddresses { index, flags: 0, descriptors, used, available, log: 0 }
}
