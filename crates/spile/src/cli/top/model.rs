//! The servers and disks of this host as they were told last, and what of them is shown. Nothing here knows a terminal.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use spile_core::{ErrorKind, Result};
use spile_server::serving::api::rates::{Interval, LayerInterval, LayerRates};
use spile_server::serving::api::stats::{DiskStats, LayerKind};
use spile_server::serving::api::types::Disk;
use spile_server::serving::api::watch::Look;

use super::history::History;

/// A disk of a server: the server's control socket, and the disk's name there.
pub type Key = (PathBuf, String);

/// News of servers.
#[derive(Debug)]
pub enum Told {
    /// These are all control sockets that there are. What is no more among them has gone.
    Sockets(Vec<PathBuf>),
    /// What the server at this socket says, or why it does not answer.
    Look(PathBuf, Box<Result<Look>>),
}

/// All that was told.
#[derive(Debug, Default)]
pub struct Model {
    servers: BTreeMap<PathBuf, Server>,
    /// What the list is sorted by.
    pub sort: Column,
    /// The largest first.
    pub descending: bool,
    /// Only disks whose name, path or server has this text are shown.
    pub filter: String,
}

/// A server that is there.
#[derive(Debug, Default)]
struct Server {
    /// Why it has not answered the last time.
    silent: Option<String>,
    disks: Vec<DiskRow>,
}

/// A disk as the list shows it.
#[derive(Clone, Debug)]
pub struct DiskRow {
    /// What the server says of it.
    pub disk: Disk,
    /// What it did in the last interval; `None` in the first one, and after its server was replaced.
    pub interval: Option<Interval>,
    /// The numbers of the list.
    pub figures: Option<Figures>,
    /// What it did before.
    pub history: History,
    /// Why there are no numbers.
    pub why_none: String,
    stats: DiskStats,
}

/// The numbers that the list shows of a disk.
#[derive(Clone, Debug)]
pub struct Figures {
    /// All fronts of the disk together, or the disk itself where nobody can reach it.
    pub guests: LayerRates,
    /// The average queue size at all its stores together, or at its images where stores do not count.
    pub store_queue: Option<f64>,
}

/// A column of the list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Column {
    /// The disk's name.
    Name,
    /// Reads per second.
    #[default]
    Reads,
    /// Writes per second.
    Writes,
    /// Megabytes (10^6 bytes) read per second.
    ReadBytes,
    /// Megabytes written per second.
    WriteBytes,
    /// The average latency.
    Await,
    /// The average queue size at the front.
    FrontQueue,
    /// The average queue size at the store.
    StoreQueue,
    /// The latency that half of the requests keep within.
    P50,
    /// The latency that 99 % of the requests keep within.
    P99,
    /// The latency that 99.9 % of the requests keep within.
    P999,
}

impl Column {
    /// All columns, as they stand in the list.
    pub const ALL: [Column; 11] = [
        Self::Name,
        Self::Reads,
        Self::Writes,
        Self::ReadBytes,
        Self::WriteBytes,
        Self::Await,
        Self::FrontQueue,
        Self::StoreQueue,
        Self::P50,
        Self::P99,
        Self::P999,
    ];

    /// The column's number for a disk; `None` for the name, and where there is none.
    pub fn value(self, figures: &Figures) -> Option<f64> {
        let guests = &figures.guests;
        match self {
            Self::Name => None,
            Self::Reads => Some(guests.reads_per_s),
            Self::Writes => Some(guests.writes_per_s),
            Self::ReadBytes => Some(guests.read_bytes_per_s / 1e6),
            Self::WriteBytes => Some(guests.write_bytes_per_s / 1e6),
            Self::Await => guests.latency_mean_us,
            Self::FrontQueue => Some(guests.queue_size()),
            Self::StoreQueue => figures.store_queue,
            Self::P50 => guests.latency_p50_us,
            Self::P99 => guests.latency_p99_us,
            Self::P999 => guests.latency_p999_us,
        }
    }

    /// The column that stands so many places to the right; behind the last one comes the first.
    pub fn next(self, places: isize) -> Self {
        let count = Self::ALL.len() as isize;
        let at = Self::ALL.iter().position(|column| *column == self).unwrap_or(0) as isize;
        Self::ALL[(at + places).rem_euclid(count) as usize]
    }
}

impl Model {
    /// A model of no server, sorted by reads, the most first.
    pub fn new() -> Self {
        Self { descending: true, ..Self::default() }
    }

    /// Takes news.
    pub fn hear(&mut self, told: Told) {
        match told {
            Told::Sockets(sockets) => self.servers.retain(|socket, _| sockets.contains(socket)),
            Told::Look(socket, look) => self.take(socket, *look),
        }
    }

    fn take(&mut self, socket: PathBuf, look: Result<Look>) {
        match look {
            Ok(look) => self.servers.entry(socket).or_default().take(look),
            // Nobody listens there: the server has ended without removing its socket.
            Err(error) if error.kind() == ErrorKind::NotFound => drop(self.servers.remove(&socket)),
            Err(error) => {
                let server = self.servers.entry(socket).or_default();
                server.silent = Some(error.message().to_owned());
                server.disks.iter_mut().for_each(DiskRow::fall_silent);
            }
        }
    }

    /// The disks that are shown, in their order. Those without numbers come last.
    pub fn shown(&self) -> Vec<(&Path, &DiskRow)> {
        let rows =
            self.servers.iter().flat_map(|(socket, server)| server.disks.iter().map(move |row| (&**socket, row)));
        let mut shown: Vec<_> = rows.filter(|(socket, row)| self.is_shown(socket, row)).collect();
        shown.sort_by(|(_, one), (_, other)| self.order(one, other));
        shown
    }

    fn is_shown(&self, socket: &Path, row: &DiskRow) -> bool {
        let filter = self.filter.to_lowercase();
        let has = |text: &str| text.to_lowercase().contains(&filter);
        has(&row.disk.name) || has(&row.disk.path) || has(&socket.to_string_lossy())
    }

    fn order(&self, one: &DiskRow, other: &DiskRow) -> Ordering {
        let by_name = one.disk.name.cmp(&other.disk.name);
        if self.sort == Column::Name {
            return if self.descending { by_name.reverse() } else { by_name };
        }
        let value = |row: &DiskRow| row.figures.as_ref().and_then(|figures| self.sort.value(figures));
        let ordered = match (value(one), value(other)) {
            (Some(one), Some(other)) if self.descending => other.total_cmp(&one),
            (Some(one), Some(other)) => one.total_cmp(&other),
            (one, other) => other.is_some().cmp(&one.is_some()),
        };
        ordered.then(by_name)
    }

    /// The disk with this key, if it is still there.
    pub fn find(&self, key: &Key) -> Option<&DiskRow> {
        self.servers.get(&key.0)?.disks.iter().find(|row| row.disk.name == key.1)
    }

    /// Servers that have not answered the last time, and why.
    pub fn silent(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.servers.iter().filter_map(|(socket, server)| Some((&**socket, server.silent.as_deref()?)))
    }

    /// How many servers and disks there are.
    pub fn counts(&self) -> (usize, usize) {
        (self.servers.len(), self.servers.values().map(|server| server.disks.len()).sum())
    }
}

impl Server {
    fn take(&mut self, Look { disks, stats }: Look) {
        let mut before = std::mem::take(&mut self.disks);
        self.silent = None;
        let rows = stats.into_iter().filter_map(|stats| {
            // A disk that came between the two questions is shown the next time.
            let disk = disks.iter().find(|disk| disk.name == stats.name)?.clone();
            let old = before.iter().position(|row| row.disk.name == stats.name).map(|at| before.swap_remove(at));
            Some(DiskRow::new(disk, stats, old))
        });
        self.disks = rows.collect();
    }
}

impl DiskRow {
    /// A disk as it is now, with what it was before.
    fn new(disk: Disk, stats: DiskStats, before: Option<Self>) -> Self {
        let Some(before) = before else {
            let why_none = "the first interval has begun".to_owned();
            return Self { disk, interval: None, figures: None, history: History::default(), why_none, stats };
        };
        let mut history = before.history;
        let (interval, why_none) = match Interval::between(&before.stats, &stats) {
            Ok(interval) => (Some(interval), String::new()),
            Err(why) => (None, why.to_string()),
        };
        let figures = interval.as_ref().map(|interval| Figures::new(interval, &mut history));
        Self { disk, interval, figures, history, why_none, stats }
    }

    /// Its server has not answered.
    fn fall_silent(&mut self) {
        self.interval = None;
        self.figures = None;
        self.why_none = "no answer".to_owned();
    }

    /// What is to be told of the disk beside its numbers; nothing when all is well.
    pub fn note(&self) -> String {
        let trouble = match self.disk.state.as_str() {
            "waiting" => "waits",
            "paused" => "paused",
            "reverting" => "goes back",
            "sync_failed" => "sync failed",
            "memory_not_shared" => "memory not shared",
            _ if self.disk.limits.waiting_requests > 0 => "limited",
            _ => "",
        };
        [trouble, &self.why_none].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(", ")
    }
}

impl Figures {
    fn new(interval: &Interval, history: &mut History) -> Self {
        let guests = interval.all_of(LayerKind::Front).or_else(|| interval.all_of(LayerKind::Disk));
        let rates = guests.as_ref().map(LayerInterval::rates).unwrap_or_default();
        if let Some(guests) = &guests {
            history.push(rates.requests_per_s, &guests.reading.total().latency);
        }
        let store = interval.all_of(LayerKind::Store).or_else(|| interval.all_of(LayerKind::Image));
        Self { guests: rates, store_queue: store.map(|store| store.rates().queue_size()) }
    }
}
