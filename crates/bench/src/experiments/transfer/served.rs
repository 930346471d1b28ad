//! Places that are served by every front at once, so that the ways to them can take turns.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use spile_core::{Error, ErrorKind, Result};
use spile_server::uri::{Address, NbdUri, Target};

use super::{Job, Moved, Way, sync, system_calls};
use crate::experiments::Direction;
use crate::experiments::guest::{Answer, Order};
use crate::experiments::process::{Tied, disk_argument};
use crate::experiments::rings::find;
use crate::experiments::world::{WantedDisk, World};
use crate::load;

/// The path of the Xen guest: Spile's default.
const RING: &str = "grant-copy";
/// The Xen guest's number.
const GUEST: u16 = 1;
/// So often a transfer is tried that moves nothing.
const TRIES: u32 = 10;

/// A place and a way to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// The number of the place, in the order in which they were given.
    pub place: usize,
    /// The way.
    pub way: Way,
}

/// Places, with a server of each for direct transfers and one for those through the page cache.
pub struct Sides {
    // Guests and clients end before their servers.
    xen: Option<World>,
    servers: Vec<Served>,
    places: Vec<PathBuf>,
    modes: &'static [&'static str],
}

/// One place in one cache mode, served by NBD and vhost-user.
struct Served {
    process: Tied,
    nbd: PathBuf,
    vhost: PathBuf,
}

/// The modes in which each place is served: `--cache` of the server.
const MODES: [&str; 2] = ["direct", "page"];

impl Sides {
    /// Serves the raw bytes of each place by the ways that are wanted. Sockets go into `folder`.
    ///
    /// # Errors
    /// When a server does not start.
    pub fn new(folder: &Path, places: &[PathBuf], ways: &[Way], max_block_bytes: u64) -> Result<Self> {
        let mut sides = Self { xen: None, servers: Vec::new(), places: places.to_vec(), modes: &MODES };
        if ways.iter().any(|way| matches!(way, Way::Nbd | Way::VhostUser)) {
            sides.serve(folder, "")?;
        }
        if ways.contains(&Way::Xen) {
            let mut world = World::new(folder)?;
            let wanted: Vec<_> = places.iter().flat_map(|place| wanted(place, max_block_bytes)).collect();
            world.add_guest(GUEST, &wanted)?;
            sides.xen = Some(world);
        }
        Ok(sides)
    }

    /// Serves the raw bytes of each place for direct reads alone, by NBD and vhost-user.
    ///
    /// # Errors
    /// When a server does not start.
    pub fn only_read(folder: &Path, places: &[PathBuf]) -> Result<Self> {
        let mut sides = Self { xen: None, servers: Vec::new(), places: places.to_vec(), modes: &MODES[..1] };
        sides.serve(folder, ",read-only")?;
        Ok(sides)
    }

    /// Starts the servers of all places. `options` are those of the disks.
    fn serve(&mut self, folder: &Path, options: &str) -> Result<()> {
        for (number, place) in self.places.iter().enumerate() {
            for mode in self.modes {
                self.servers.push(Served::start(folder, &format!("{number}-{mode}"), (place, options), mode)?);
            }
        }
        Ok(())
    }

    /// Moves blocks to or from a place. What goes through the page cache is synced at the end, and the time of that counts.
    ///
    /// # Errors
    /// When a request fails, or a server has ended.
    pub fn run(&mut self, side: Side, job: &Job) -> Result<Moved> {
        let disk = self.modes.len() * side.place + usize::from(!job.operation.is_direct());
        let mut moved = match side.way {
            Way::Bare => system_calls::run(&self.places[side.place], job)?,
            Way::Nbd | Way::VhostUser => at_least_one(|| self.servers[disk].run(side.way, job))?,
            Way::Xen => self.in_guest(disk, job)?,
        };
        if !job.operation.is_direct() {
            moved.seconds += sync(&self.places[side.place])?.as_secs_f64();
        }
        Ok(moved)
    }

    fn in_guest(&mut self, disk: usize, job: &Job) -> Result<Moved> {
        let world = self.xen.as_mut().ok_or_else(|| Error::new(ErrorKind::NotFound, "there is no Xen guest"))?;
        let order = Order::Once {
            disk,
            direction: if job.operation.is_read() { Direction::Read } else { Direction::Write },
            request_bytes: job.block_bytes,
            start_bytes: job.start_bytes,
            total_bytes: job.total_bytes,
            limit: job.limit,
        };
        world.tell(GUEST, &order)?;
        match world.hear(GUEST, job.limit)? {
            Answer::Moved(moved) => Ok(moved),
            _ => Err(Error::new(ErrorKind::Protocol, "the guest answers something else")),
        }
    }
}

/// Transfers until one has moved something: on a busy host the time of a short one may be over before its first block.
fn at_least_one(mut transfer: impl FnMut() -> Result<Moved>) -> Result<Moved> {
    for _ in 0..TRIES {
        let moved = transfer()?;
        if moved.bytes > 0 {
            return Ok(moved);
        }
    }
    let what = format!("no block was moved in {TRIES} transfers");
    Err(Error::new(ErrorKind::TimedOut, what).hint("give them more time with --seconds"))
}

/// The disks of the Xen guest: the place in each mode.
fn wanted(place: &Path, max_request_bytes: u64) -> impl Iterator<Item = WantedDisk> {
    let params = format!("raw:{}", place.display());
    let path = find(RING).expect("the default path is in the table");
    [&["--no-lock"][..], &["--no-lock", "--cache", "page"]].into_iter().map(move |arguments| WantedDisk {
        path,
        params: params.clone(),
        max_request_bytes,
        traced: 0,
        arguments,
    })
}

impl Served {
    fn start(folder: &Path, name: &str, (place, options): (&Path, &str), mode: &str) -> Result<Self> {
        let [nbd, vhost] = ["nbd", "vhost"].map(|what| folder.join(format!("{name}.{what}")));
        let disk = disk_argument(place, &format!(",format=raw{options}"));
        let mut args: Vec<OsString> = vec!["serve".into(), disk];
        // Two servers have the place open, of which one at a time is used.
        args.extend(["--workers", "1", "--control", "none", "--no-lock", "--cache", mode].map(OsString::from));
        args.extend(["--vhost-user".into(), vhost.clone().into(), "--nbd".into()]);
        args.push(format!("unix:{}", nbd.display()).into());
        let mut process = Tied::start(format!("the server `{name}`"), args)?;
        process.wait_for([&nbd, &vhost])?;
        Ok(Self { process, nbd, vhost })
    }

    fn run(&mut self, way: Way, job: &Job) -> Result<Moved> {
        let target = match way {
            Way::VhostUser => Target::Vhost(self.vhost.clone()),
            _ => Target::Nbd(NbdUri::new(Address::Unix(self.nbd.clone()), "")),
        };
        let options = load::Options {
            pattern: load::Pattern { random: false, read_percent: if job.operation.is_read() { 100 } else { 0 } },
            block_bytes: u32::try_from(job.block_bytes)
                .map_err(|_| Error::new(ErrorKind::InvalidInput, "a block is shorter than 4 GiB"))?,
            depth: 1,
            runtime: Some(job.limit),
            ios: Some(job.total_bytes / job.block_bytes),
            start_bytes: job.start_bytes,
            span_bytes: Some(job.total_bytes),
            ..load::Options::new(target)
        };
        let report = load::measure(&options)?;
        self.process.check()?;
        Ok(Moved { bytes: report.read.bytes + report.write.bytes, seconds: report.runtime_s })
    }
}
