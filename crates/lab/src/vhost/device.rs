//! One vhost-user-blk device: negotiation, memory, rings, and taking up a broken connection again.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use spile_core::{Error, ErrorKind, Result, ResultExt};

use super::backend::BackendChannel;
use super::config::BlkConfig;
use super::connection::{self, Connection};
use super::link::Link;
use super::log::DirtyLog;
use super::memory::{GuestMemory, MemoryOptions, Region};
use super::proto::{InflightPayload, Request, VRING_LOG, VringAddresses, feature, protocol_feature};
use super::queue::{Queue, QueueHandles, signal};
use super::raw::broken;
use layout::Layout;

mod layout;

/// Virtio features that this front end knows how to use.
const KNOWN: u64 = feature::BLK_SIZE_MAX
    | feature::BLK_SEG_MAX
    | feature::BLK_RO
    | feature::BLK_BLK_SIZE
    | feature::BLK_FLUSH
    | feature::BLK_TOPOLOGY
    | feature::BLK_CONFIG_WCE
    | feature::BLK_MQ
    | feature::BLK_DISCARD
    | feature::BLK_WRITE_ZEROES
    | feature::INDIRECT_DESC
    | feature::EVENT_IDX
    | feature::PROTOCOL_FEATURES
    | feature::VERSION_1;

const KNOWN_PROTOCOL: u64 = protocol_feature::MQ
    | protocol_feature::LOG_SHMFD
    | protocol_feature::REPLY_ACK
    | protocol_feature::BACKEND_REQ
    | protocol_feature::CONFIG
    | protocol_feature::INFLIGHT_SHMFD
    | protocol_feature::CONFIGURE_MEM_SLOTS;

/// The wait between two tries to reach a server that is gone.
const RETRY: Duration = Duration::from_millis(5);

/// The features that may be negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceOptions {
    /// The virtio features that may be used.
    pub features: u64,
    /// The protocol features that may be used.
    pub protocol_features: u64,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        Self { features: KNOWN, protocol_features: KNOWN_PROTOCOL }
    }
}

impl DeviceOptions {
    /// All features except the given virtio features.
    pub fn without(features: u64) -> Self {
        Self { features: KNOWN & !features, ..Self::default() }
    }
}

/// The queues of a device and their memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueOptions {
    /// The number of queues.
    pub queues: u16,
    /// Slots of each: requests that can be outstanding.
    pub depth: u16,
    /// The most data of a request, in bytes.
    pub data_bytes: u32,
    /// Data lie in scattered segments of so many bytes, as in a guest with small pages; `None`: each request's in one piece.
    pub segment_bytes: Option<u32>,
    /// The least descriptors of a ring (a power of two); it has more when the slots need more.
    pub ring_size: u16,
    /// The number of regions of the memory.
    pub regions: usize,
    /// The number of unused guest addresses between two regions.
    pub gap_bytes: u64,
    /// Uses pages of 2 MiB.
    pub huge_pages: bool,
    /// Regions are added one by one (ADD_MEM_REG) instead of all at once (SET_MEM_TABLE).
    pub add_regions: bool,
}

impl Default for QueueOptions {
    /// One queue of 32 slots of 64 KiB.
    fn default() -> Self {
        Self {
            queues: 1,
            depth: 32,
            data_bytes: 64 << 10,
            segment_bytes: None,
            ring_size: 128,
            regions: 1,
            gap_bytes: 0,
            huge_pages: false,
            add_regions: false,
        }
    }
}

/// A connected device. It is needed to start, stop and reconnect; the data go by its [`Queue`]s.
#[derive(Debug)]
pub struct Device {
    path: PathBuf,
    options: DeviceOptions,
    connection: Connection,
    features: u64,
    config: BlkConfig,
    max_queues: u64,
    backend: Option<BackendChannel>,
    link: Arc<Link>,
    started: Option<Started>,
}

/// What the server gets when the queues are started, and gets again when it comes back.
#[derive(Debug)]
struct Started {
    memory: GuestMemory,
    add_regions: bool,
    queues: Vec<Arc<QueueHandles>>,
    inflight: Option<(InflightPayload, OwnedFd)>,
    log: Option<DirtyLog>,
}

/// What a new connection has brought.
struct Negotiated {
    connection: Connection,
    features: u64,
    config: BlkConfig,
    max_queues: u64,
    backend: Option<BackendChannel>,
}

impl Device {
    /// Connects to the server at `path`, negotiates and reads the configuration.
    ///
    /// # Errors
    /// With the path; `Unsupported` when the server is no virtio 1 block device that tells its configuration.
    pub fn connect(path: &Path, options: DeviceOptions) -> Result<Self> {
        let Negotiated { connection, features, config, max_queues, backend } =
            negotiate(path, options).at_path(path)?;
        Ok(Self {
            path: path.to_owned(),
            options,
            connection,
            features,
            config,
            max_queues,
            backend,
            link: Arc::default(),
            started: None,
        })
    }

    /// The virtio features in use.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The configuration as last read.
    pub fn config(&self) -> &BlkConfig {
        &self.config
    }

    /// The most queues.
    pub fn max_queues(&self) -> u64 {
        self.max_queues
    }

    /// The connection, for messages that a test sends itself.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// The channel for the server's requests, when there is one.
    pub fn backend(&self) -> Option<&BackendChannel> {
        self.backend.as_ref()
    }

    /// The connection's state, as its queues see it.
    pub fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// The guest's memory, once queues were started.
    pub fn memory(&self) -> Option<&GuestMemory> {
        self.started.as_ref().map(|started| &started.memory)
    }

    /// The region of requests in flight: its description and its file, once queues were started and if the server has one.
    pub fn inflight(&self) -> Option<(InflightPayload, BorrowedFd<'_>)> {
        let (payload, fd) = self.started.as_ref()?.inflight.as_ref()?;
        Some((*payload, fd.as_fd()))
    }

    /// The dirty log, while one is kept.
    pub fn log(&self) -> Option<&DirtyLog> {
        self.started.as_ref()?.log.as_ref()
    }

    /// Reads the configuration again.
    ///
    /// # Errors
    /// When the server does not tell it.
    pub fn read_config(&mut self) -> Result<&BlkConfig> {
        self.config = self.connection.config().at_path(&self.path)?;
        Ok(&self.config)
    }

    /// Switches the write cache on or off.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn set_writeback(&self, on: bool) -> Result<()> {
        self.connection.set_config(BlkConfig::WRITEBACK_AT, &[u8::from(on)]).at_path(&self.path)
    }

    /// Makes the guest's memory and the rings, hands them to the server, and starts the queues.
    ///
    /// # Errors
    /// `InvalidInput` when the device cannot take such requests or so many queues; else what the server or the system says.
    pub fn start(&mut self, options: &QueueOptions) -> Result<Vec<Queue>> {
        if u64::from(options.queues) > self.max_queues {
            let message = format!("the server has at most {} queues", self.max_queues);
            return Err(Error::new(ErrorKind::InvalidInput, message).at_path(&self.path));
        }
        let layout = Layout::new(options, self.features, &self.config)?;
        let mut memory = GuestMemory::new(&MemoryOptions {
            regions: options.regions,
            gap_bytes: options.gap_bytes,
            huge_pages: options.huge_pages,
            ..MemoryOptions::new(layout.memory_bytes(options))
        })?;
        let event_idx = self.features & feature::EVENT_IDX != 0;
        let (mut shared, mut queues) = (Vec::new(), Vec::new());
        for _ in 0..options.queues {
            let ring = Arc::new(QueueHandles::new(layout.take_ring(&mut memory)?, layout.ring_size)?);
            let queue_memory = layout.take_queue(&mut memory)?;
            queues.push(Queue::new(ring.clone(), self.link.clone(), event_idx, queue_memory)?);
            shared.push(ring);
        }
        let add_regions = options.add_regions;
        let mut started = Started { memory, add_regions, queues: shared, inflight: None, log: None };
        if self.connection.protocol_features() & protocol_feature::INFLIGHT_SHMFD != 0 {
            let inflight = self.connection.inflight(options.queues, layout.ring_size);
            started.inflight = Some(inflight.at_path(&self.path)?);
        }
        let started = self.started.insert(started);
        let bases = vec![0; started.queues.len()];
        set_up(&self.connection, self.features, started, &bases).at_path(&self.path)?;
        Ok(queues)
    }

    /// Stops all rings. The server answers the requests that it has taken first. Returns the base of each ring, for
    /// [`Device::resume`].
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn stop(&self) -> Result<Vec<u16>> {
        let count = self.started.as_ref().map_or(0, |started| started.queues.len());
        (0..count as u32).map(|index| self.connection.stop_vring(index)).collect::<Result<_>>().at_path(&self.path)
    }

    /// Starts the rings again after [`Device::stop`], from the bases that it returned.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn resume(&self, bases: &[u16]) -> Result<()> {
        let Some(started) = &self.started else { return Ok(()) };
        set_up_rings(&self.connection, started, bases).at_path(&self.path)
    }

    /// Begins to log the pages that the server writes to.
    ///
    /// # Errors
    /// `Unsupported` when the server cannot, `InvalidInput` before the queues are started.
    pub fn start_log(&mut self) -> Result<&DirtyLog> {
        let invalid = || Error::new(ErrorKind::InvalidInput, "the log needs started queues");
        let started = self.started.as_mut().ok_or_else(invalid)?;
        if self.connection.protocol_features() & protocol_feature::LOG_SHMFD == 0 {
            return Err(Error::new(ErrorKind::Unsupported, "the server keeps no dirty log").at_path(&self.path));
        }
        let log = started.log.insert(DirtyLog::new(started.memory.end_address())?);
        self.connection.set_log(log.len_bytes(), 0, log.file())?;
        self.connection.set_features(self.features | feature::LOG_ALL)?;
        set_addresses(&self.connection, started)?;
        Ok(started.log.as_ref().expect("just made"))
    }

    /// Ends the log.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn stop_log(&mut self) -> Result<Option<DirtyLog>> {
        let Some(started) = self.started.as_mut() else { return Ok(None) };
        let log = started.log.take();
        self.connection.set_features(self.features)?;
        set_addresses(&self.connection, started)?;
        Ok(log)
    }

    /// True when the server can take up requests that were in flight when it ended.
    pub fn can_reconnect(&self) -> bool {
        self.connection.protocol_features() & protocol_feature::INFLIGHT_SHMFD != 0
    }

    /// Waits at most `patience` for a server at the same path, and goes on there: the same memory, rings and region of
    /// requests in flight, rings from their used index on (as QEMU does), then a kick of each. The back end adds what is in
    /// flight to the used index and so knows where it was ("Inflight I/O tracking").
    ///
    /// # Errors
    /// `Unsupported` when the server keeps no requests in flight; `TimedOut` when none answers in time; else what the new
    /// one says.
    pub fn reconnect(&mut self, patience: Duration) -> Result<()> {
        self.reconnect_while(patience, |pause| {
            std::thread::sleep(pause);
            true
        })
    }

    /// As [`Device::reconnect`]. `pause` waits between two tries, and returns false to give up.
    pub(crate) fn reconnect_while(&mut self, patience: Duration, pause: impl Fn(Duration) -> bool) -> Result<()> {
        if !self.can_reconnect() {
            let error =
                Error::new(ErrorKind::Unsupported, "the server is gone, and it did not track requests in flight");
            return Err(error.at_path(&self.path));
        }
        let deadline = Instant::now() + patience;
        loop {
            match self.try_again() {
                Err(error) if is_absence(&error) && Instant::now() < deadline => {
                    if !pause(RETRY) {
                        return Err(error);
                    }
                }
                Err(error) if is_absence(&error) => {
                    let message = format!("the server did not come back within {} s", patience.as_secs_f64());
                    return Err(Error::new(ErrorKind::TimedOut, message).caused_by(error));
                }
                result => return result,
            }
        }
    }

    fn try_again(&mut self) -> Result<()> {
        let new = negotiate(&self.path, self.options).at_path(&self.path)?;
        let lost = self.features & !new.features;
        if lost != 0 || new.connection.protocol_features() & protocol_feature::INFLIGHT_SHMFD == 0 {
            let message = format!("the server came back without features {lost:#x} or without tracking requests");
            return Err(broken(message).at_path(&self.path));
        }
        if let Some(started) = &self.started {
            let bases: Vec<u16> = started.queues.iter().map(|queue| queue.parts.used_index()).collect();
            set_up(&new.connection, self.features, started, &bases).at_path(&self.path)?;
        }
        self.connection = new.connection;
        self.config = new.config;
        self.backend = new.backend;
        Ok(())
    }

    /// Wakes every queue that sleeps, so that it looks at its ring and at the connection's state.
    pub(crate) fn wake_all(&self) {
        let queues = self.started.iter().flat_map(|started| &started.queues);
        queues.for_each(|queue| signal(&queue.call));
    }

    /// Gives up the channel for the server's requests.
    pub(crate) fn close_backend(&mut self) {
        self.backend = None;
    }

    /// The path of the server's socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A server that is not there yet, or went away while we spoke to it.
fn is_absence(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Io | ErrorKind::NotFound | ErrorKind::TimedOut)
}

fn negotiate(path: &Path, options: DeviceOptions) -> Result<Negotiated> {
    let mut connection = connection::connect(path)?;
    connection.set_owner()?;
    let offered = connection.features()?;
    let needed = feature::VERSION_1 | feature::PROTOCOL_FEATURES;
    if offered & needed != needed {
        let message = format!("the server offers features {offered:#x}, without virtio 1 or without protocol features");
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    let protocol = connection.offered_protocol_features()? & options.protocol_features;
    connection.set_protocol_features(protocol)?;
    let max_queues = connection.max_queues()?;
    let mut backend = None;
    if protocol & protocol_feature::BACKEND_REQ != 0 {
        let (ours, theirs) = BackendChannel::new()?;
        connection.set_backend_channel(theirs.as_fd())?;
        backend = Some(ours);
    }
    let config = connection.config()?;
    Ok(Negotiated { features: offered & options.features, connection, config, max_queues, backend })
}

/// Everything a server must be told before it can work, in QEMU's order.
fn set_up(connection: &Connection, features: u64, started: &Started, bases: &[u16]) -> Result<()> {
    let log = if started.log.is_some() { feature::LOG_ALL } else { 0 };
    connection.set_features(features | log)?;
    if let Some((payload, fd)) = &started.inflight {
        connection.set_inflight(*payload, fd.as_fd())?;
    }
    if let Some(log) = &started.log {
        connection.set_log(log.len_bytes(), 0, log.file())?;
    }
    let (regions, file) = (started.memory.regions(), started.memory.file());
    match started.add_regions {
        true => regions.iter().try_for_each(|region| connection.add_memory_region(region.payload(), file))?,
        false => {
            let payloads: Vec<_> = regions.iter().map(Region::payload).collect();
            connection.set_memory_table(&payloads, &vec![file; regions.len()])?;
        }
    }
    set_up_rings(connection, started, bases)
}

fn set_up_rings(connection: &Connection, started: &Started, bases: &[u16]) -> Result<()> {
    for ((index, queue), base) in (0..).zip(&started.queues).zip(bases) {
        connection.set_vring_size(index, u32::from(queue.parts.size))?;
        connection.set_vring_base(index, *base)?;
        connection.set_vring_addresses(addresses(started, index))?;
        connection.set_vring_fd(Request::SetVringKick, index as u8, queue.kick.as_fd())?;
        connection.set_vring_fd(Request::SetVringCall, index as u8, queue.call.as_fd())?;
    }
    for (index, queue) in (0..).zip(&started.queues) {
        connection.enable_vring(index, true)?;
        // A ring starts with its first kick.
        signal(&queue.kick);
    }
    Ok(())
}

fn set_addresses(connection: &Connection, started: &Started) -> Result<()> {
    (0..started.queues.len() as u32).try_for_each(|index| connection.set_vring_addresses(addresses(started, index)))
}

fn addresses(started: &Started, index: u32) -> VringAddresses {
    let [descriptors, available, used] = &started.queues[index as usize].areas;
    VringAddresses {
        index,
        flags: if started.log.is_some() { VRING_LOG } else { 0 },
        descriptors: descriptors.user_address(),
        used: used.user_address(),
        available: available.user_address(),
        log: used.address,
    }
}
