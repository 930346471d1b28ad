//! Ways to one disk, each of which can be asked for timed requests, one after the other.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use spile_core::{Disk, Error, ErrorKind, Extent, Result, Segments};
use spile_engine::{Config, Engine};
use spile_store::CacheMode;

use crate::experiments::Direction;
use crate::experiments::guest::{Answer, Order, Times};
use crate::experiments::process::Tied;
use crate::experiments::rings::RingPath;
use crate::experiments::trace::{self, Phases};
use crate::experiments::world::{Disks, WantedDisk, World};
use crate::load::{self, Options, Pattern};
use spile_server::serving::disks::{Open, Opening};
use spile_server::uri::{Address, NbdUri, Target};

/// Records that a back end keeps: 4 MiB in parts of 44 KiB, a few hundred times.
const RECORDS: u32 = 1 << 16;
/// The guest's number.
const GUEST: u16 = 1;
/// How long a server may take to come up.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often, and after what pause, a trace is read that has not all of the requests.
const NOTE_TRIES: u32 = 20;
const NOTE_PAUSE: Duration = Duration::from_millis(2);

/// Requests of one kind.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    /// Which way.
    pub direction: Direction,
    /// Bytes of each.
    pub request_bytes: u64,
    /// How many.
    pub requests: u32,
    /// The part of the disk that is used.
    pub span_bytes: u64,
}

/// A request's latency, and where it went.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Its latency in ns.
    pub latency_ns: u64,
    /// The guest's times, where there is a guest.
    pub times: Option<Times>,
}

impl From<u64> for Sample {
    fn from(latency_ns: u64) -> Self {
        Self { latency_ns, times: None }
    }
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No front, no guest: the disk's own interface in this process.
    HostDirect,
    /// Through a ring.
    Ring(RingPath),
    /// Through vhost-user-blk.
    VhostUser,
    /// Through a socket.
    Nbd,
}

impl Kind {
    /// It is measured unless others are named.
    pub fn is_usual(self) -> bool {
        if let Self::Ring(ring) = self { ring.is_usual } else { true }
    }

    /// Its name in figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::HostDirect => "host-direct",
            Self::Ring(ring) => ring.name,
            Self::VhostUser => "vhost-user",
            Self::Nbd => "nbd",
        }
    }
}

/// All ways that were asked for, ready.
pub struct Ways {
    ways: Vec<(Kind, Way)>,
    world: World,
    _servers: Vec<Tied>,
    disks: Disks,
}

enum Way {
    Host(Engine, Box<Open>),
    /// The number of the guest's disk.
    Guest(usize),
    Server(Target),
}

impl Ways {
    /// Makes a disk and a way to it for each of `kinds`, in `folder`.
    ///
    /// # Errors
    /// When a process does not start, or something cannot connect.
    pub fn open(folder: &Path, kinds: &[Kind], mut disks: Disks, max_request_bytes: u64) -> Result<Self> {
        let mut world = World::new(folder)?;
        let rings: Vec<RingPath> =
            kinds.iter().filter_map(|kind| if let Kind::Ring(ring) = kind { Some(*ring) } else { None }).collect();
        let wanted = rings.iter().map(|ring| {
            let params = disks.add(ring.name)?;
            Ok(WantedDisk { path: *ring, params, max_request_bytes, traced: RECORDS, arguments: &[] })
        });
        let wanted: Vec<WantedDisk> = wanted.collect::<Result<_>>()?;
        if !wanted.is_empty() {
            world.add_guest(GUEST, &wanted)?;
        }
        let (mut ways, mut servers) = (Vec::new(), Vec::new());
        for kind in kinds {
            let way = match kind {
                Kind::HostDirect => host(&disks.add("host")?)?,
                Kind::Ring(ring) => Way::Guest(rings.iter().position(|other| other == ring).expect("it is among them")),
                Kind::VhostUser | Kind::Nbd => {
                    let socket = folder.join(kind.name());
                    servers.push(serve(*kind, &disks.add(kind.name())?, &socket)?);
                    Way::Server(target(*kind, &socket))
                }
            };
            ways.push((*kind, way));
        }
        Ok(Self { ways, world, _servers: servers, disks })
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.ways.len()
    }

    /// Which way that is.
    pub fn kind(&self, number: usize) -> Kind {
        self.ways[number].0
    }

    /// Writes every disk's `span_bytes`, unless it is of a kind that keeps nothing.
    ///
    /// # Errors
    /// As [`Ways::measure`].
    pub fn fill(&mut self, span_bytes: u64, request_bytes: u64) -> Result<()> {
        if !self.disks.keep_data() {
            return Ok(());
        }
        let requests = span_bytes.div_ceil(request_bytes) as u32;
        let batch = Batch { direction: Direction::Write, request_bytes, requests, span_bytes };
        (0..self.count()).try_for_each(|number| self.measure(number, batch).map(drop))
    }

    /// Does a batch of requests one way.
    ///
    /// # Errors
    /// When a request fails or takes very long.
    pub fn measure(&mut self, number: usize, batch: Batch) -> Result<Vec<Sample>> {
        match &self.ways[number].1 {
            Way::Host(engine, open) => on_host(engine, open, batch),
            Way::Server(target) => over_socket(target, batch),
            Way::Guest(disk) => in_guest(&mut self.world, *disk, batch),
        }
    }

    /// The phases of requests that were measured last on that way; `None` where nothing stamps them.
    ///
    /// # Errors
    /// When the back end's stamps cannot be read.
    pub fn phases(&self, number: usize, samples: &[Sample]) -> Result<Option<Phases>> {
        let Way::Guest(disk) = &self.ways[number].1 else { return Ok(None) };
        let times: Vec<Times> = samples.iter().filter_map(|sample| sample.times).collect();
        for _ in 0..NOTE_TRIES {
            let phases = Phases::of(&times, &trace::read(&self.world.trace(GUEST, *disk))?);
            if phases.is_some() {
                return Ok(phases);
            }
            // The back end notes a request after it has shown the answer, so that the guest may be first.
            std::thread::sleep(NOTE_PAUSE);
        }
        Ok(None)
    }
}

fn host(disk: &str) -> Result<Way> {
    let engine = Engine::start(Config { workers: 1, ..Config::default() })?;
    let spec = disk.parse().map_err(|why: String| Error::new(ErrorKind::InvalidInput, why))?;
    let opening = Opening::new(None, CacheMode::Direct, Vec::new()).with_disks(vec![spec]);
    let mut open = Vec::new();
    opening.open(&engine, &mut open, &[])?;
    Ok(Way::Host(engine, Box::new(open.remove(0))))
}

fn on_host(engine: &Engine, open: &Open, batch: Batch) -> Result<Vec<Sample>> {
    let disk = Arc::clone(&open.disk);
    engine.run_on(0, move || async move {
        let buffer = Segments::from(spile_engine::pool().alloc(batch.request_bytes as usize));
        buffer.fill(0x5a);
        let mut samples = Vec::with_capacity(batch.requests as usize);
        let mut at = 0;
        for _ in 0..batch.requests {
            at = if at + batch.request_bytes > batch.span_bytes { 0 } else { at };
            let extent = Extent::from_range(at..at + batch.request_bytes);
            let start = Instant::now();
            match batch.direction {
                Direction::Read => disk.read(extent, &buffer).await?,
                Direction::Write => disk.write(extent, &buffer, false).await?,
            }
            samples.push(Sample::from(start.elapsed().as_nanos() as u64));
            at += batch.request_bytes;
        }
        Ok(samples)
    })
}

fn in_guest(world: &mut World, disk: usize, batch: Batch) -> Result<Vec<Sample>> {
    let Batch { direction, request_bytes, requests, span_bytes } = batch;
    let answer = world.ask(GUEST, &Order::Each { disk, direction, request_bytes, requests, span_bytes })?;
    let Answer::Times(times) = answer else {
        return Err(Error::new(ErrorKind::Protocol, "the guest answers something else"));
    };
    let sample = |times: Times| Sample { latency_ns: times.done - times.started, times: Some(times) };
    Ok(times.into_iter().map(sample).collect())
}

fn serve(kind: Kind, disk: &str, socket: &Path) -> Result<Tied> {
    let path = socket.display();
    let front = match kind {
        Kind::VhostUser => ["--vhost-user".to_owned(), path.to_string()],
        _ => ["--nbd".to_owned(), format!("unix:{path}")],
    };
    let args = ["serve", disk, "--workers", "1"].map(str::to_owned).into_iter().chain(front);
    let mut server = Tied::start(format!("the server of {}", kind.name()), args.map(Into::into))?;
    let end = Instant::now() + PATIENCE;
    // The socket appears when it answers.
    while !socket.exists() {
        server.check()?;
        if Instant::now() > end {
            return Err(Error::new(ErrorKind::TimedOut, "the server does not come up").at_path(socket));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(server)
}

fn target(kind: Kind, socket: &Path) -> Target {
    match kind {
        Kind::VhostUser => Target::Vhost(socket.to_owned()),
        _ => Target::Nbd(NbdUri::new(Address::Unix(socket.to_owned()), "")),
    }
}

fn over_socket(target: &Target, batch: Batch) -> Result<Vec<Sample>> {
    let read_percent = if batch.direction == Direction::Read { 100 } else { 0 };
    let options = Options {
        pattern: Pattern { random: false, read_percent },
        block_bytes: batch.request_bytes as u32,
        depth: 1,
        ios: Some(batch.requests.into()),
        span_bytes: Some(batch.span_bytes),
        ..Options::new(target.clone())
    };
    let outcome = load::run_only(&options, |_| {})?;
    if let Some(error) = outcome.error {
        return Err(error);
    }
    let lane = if read_percent > 0 { &outcome.stats.read } else { &outcome.stats.write };
    let counted = lane.latency_ns.iter_recorded();
    let each = counted.flat_map(|step| std::iter::repeat_n(step.value_iterated_to(), step.count_at_value() as usize));
    Ok(each.map(Sample::from).collect())
}
