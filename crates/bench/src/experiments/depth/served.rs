//! The disks of `depth`, their server, and what each layer has counted.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use spile_core::Result;
use spile_core::metrics::{Op, Reading};
use spile_engine::{Config, Engine, OsEnv};
use spile_front_nbd::{Export, Server, ServerConfig};
use spile_image::Graph;
use spile_node::{Effect, Fault, Faults, Node, Place};
use spile_server::host_device::{DeviceReading, HostDevice};
use spile_server::listen::{Bound, Published};
use spile_server::serving::api::client::{LOOK_PATIENCE, ask};
use spile_server::serving::api::rates::LayerRates;
use spile_server::serving::api::stats::{DiskStats, LayerKind};
use spile_server::uri::{Address, NbdUri, Target};
use spile_store::{AnyStore, NullStore};

use super::{Layer, REQUEST_BYTES, Way};
use crate::experiments::filled::FilledFile;
use crate::experiments::process::{Tied, disk_argument};
use crate::load;
use crate::slow::SlowStore;

/// The size of the slow export in bytes.
const EXPORT_BYTES: u64 = 1 << 30;
/// The disk's name.
const DISK: &str = "depth";

/// A disk, its server, and its device.
pub struct Served {
    // The server ends before what it serves.
    _server: Tied,
    control: PathBuf,
    nbd: PathBuf,
    vhost: PathBuf,
    device: Device,
}

/// What is below the disk.
enum Device {
    /// A slow export in this process.
    Export(SlowExport),
    /// A file, and the host's device where the kernel names one.
    File { _file: FilledFile, host: Option<HostDevice> },
}

/// An NBD export in this process whose requests take longer. Its meter stands for a device that integrates its queue.
struct SlowExport {
    disk: Arc<Node<Graph<SlowStore>>>,
    server: Server<Node<Graph<SlowStore>>>,
    engine: Engine,
    _name: Option<Published>,
}

impl SlowExport {
    fn new(socket: &Path, delay: Duration) -> Result<Self> {
        let engine = Engine::start(Config { workers: 1, ..Config::default() })?;
        let store = SlowStore::no_slower(AnyStore::Null(NullStore::new(EXPORT_BYTES)));
        let disk = Arc::new(Node::new(Graph::from_raw_store(store, false)));
        let fault = Fault { ops: vec![Op::Read], extent: None, per_million: 1_000_000, effect: Effect::Delay(delay) };
        let faults = Arc::new(Faults::new(vec![fault], 1, Arc::new(OsEnv)));
        let slow = disk.clone();
        engine.run_on(0, move || async move { slow.attach(Place::Fault, faults).await })?;
        let export = Export {
            name: String::new(),
            description: String::new(),
            disk_name: "slow".to_owned(),
            disk: disk.clone(),
            read_only: false,
            checkpoints: None,
            kept: |_| None,
            withdrawn: Arc::default(),
        };
        let server = Server::new(engine.clone(), ServerConfig::default(), vec![export])?;
        let (fd, published) = Bound::new(&Address::Unix(socket.to_owned()))?.publish()?;
        server.listen(fd)?;
        Ok(Self { disk, server, engine, _name: published })
    }
}

impl Drop for SlowExport {
    fn drop(&mut self) {
        self.server.stop();
        self.server.wait_drained(Duration::from_secs(1));
        self.engine.shutdown();
    }
}

impl Served {
    /// A disk on an export whose requests take `delay` longer.
    ///
    /// # Errors
    /// When the server does not start.
    pub fn on_export(folder: &Path, name: &str, delay: Duration) -> Result<Self> {
        let socket = folder.join(format!("{name}.device"));
        let export = SlowExport::new(&socket, delay)?;
        let disk = format!("nbd+unix:///?socket={}", socket.display());
        Self::start(folder, name, disk.into(), Device::Export(export))
    }

    /// A disk in a raw file, past the page cache.
    ///
    /// # Errors
    /// When the file cannot be made, or the server does not start.
    pub fn on_file(folder: &Path, name: &str, on: &Path, len_bytes: u64) -> Result<Self> {
        let file = FilledFile::new(on, "depth.raw", len_bytes)?;
        let (disk, host) = (disk_argument(file.path(), ""), HostDevice::below(&file.path().display().to_string()).ok());
        Self::start(folder, name, disk, Device::File { _file: file, host })
    }

    fn start(folder: &Path, name: &str, disk: OsString, device: Device) -> Result<Self> {
        let [control, nbd, vhost] = ["control", "nbd", "vhost"].map(|what| folder.join(format!("{name}.{what}")));
        let mut args: Vec<OsString> = vec!["serve".into(), disk];
        args[1].push(format!(",name={DISK}"));
        args.extend(["--workers", "1", "--control"].map(OsString::from));
        args.extend([control.clone().into(), "--vhost-user".into(), vhost.clone().into(), "--nbd".into()]);
        args.push(format!("unix:{}", nbd.display()).into());
        let mut server = Tied::start(format!("the server `{name}`"), args)?;
        server.wait_for([&control, &nbd, &vhost])?;
        Ok(Self { _server: server, control, nbd, vhost, device })
    }

    /// The name of the host's device below the disk, where there is one.
    pub fn device_name(&self) -> Option<String> {
        match &self.device {
            Device::Export(_) => None,
            Device::File { host, .. } => host.as_ref().map(|host| host.name.clone()),
        }
    }

    /// A load of reads.
    pub fn load(&self, way: Way, depth: u32, runtime: Duration, is_random: bool) -> load::Options {
        let target = match way {
            Way::Nbd => Target::Nbd(NbdUri::new(Address::Unix(self.nbd.clone()), "")),
            Way::VhostUser => Target::Vhost(self.vhost.clone()),
        };
        load::Options {
            pattern: load::Pattern { random: is_random, read_percent: 100 },
            block_bytes: REQUEST_BYTES,
            depth,
            runtime: Some(runtime),
            ..load::Options::new(target)
        }
    }

    /// What each layer has counted up to now.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn sample(&self) -> Result<Sample> {
        let stats: DiskStats = ask(&self.control, "GET", &format!("/v1/disks/{DISK}/stats"), LOOK_PATIENCE)?;
        let kinds = [LayerKind::Front, LayerKind::Disk, LayerKind::Image, LayerKind::Store];
        let of_kind = |kind: LayerKind| {
            let layers = stats.layers.iter().filter(|layer| layer.kind == kind).map(|layer| layer.reading());
            layers.reduce(|sum, reading| sum + reading)
        };
        let device = match &self.device {
            Device::Export(export) => DeviceSample::Metered(Box::new(export.disk.meter().read())),
            Device::File { host: Some(host), .. } => DeviceSample::Counted(host.clone(), host.read()?),
            Device::File { host: None, .. } => DeviceSample::Unknown,
        };
        Ok(Sample { layers: kinds.map(of_kind), device })
    }
}

/// What was counted up to one moment.
pub struct Sample {
    /// Front, disk, image and store.
    layers: [Option<Reading>; 4],
    device: DeviceSample,
}

/// What was counted of the device.
enum DeviceSample {
    Metered(Box<Reading>),
    Counted(HostDevice, DeviceReading),
    Unknown,
}

/// What was counted at one layer in an interval.
pub struct Since {
    /// Where.
    pub layer: Layer,
    /// Requests that have ended, each second.
    pub requests_per_s: f64,
    /// Requests in flight, integrated over time; none when the layer does not integrate.
    pub queue_size_avg: Option<f64>,
    /// The time that ended requests took, divided by the interval.
    pub queue_size_iostat: f64,
    /// The mean time of a request in microseconds.
    pub latency_mean_us: f64,
}

impl Sample {
    /// The time from `earlier` to this in seconds, by the disk's clock.
    pub fn seconds_since(&self, earlier: &Self) -> f64 {
        let at_ns = |sample: &Self| sample.layers[1].as_ref().map_or(0, |disk| disk.at_ns);
        at_ns(self).saturating_sub(at_ns(earlier)) as f64 / 1e9
    }

    /// What each layer counted from `earlier` up to this, an interval of `seconds`. Layers that the server does not count are
    /// left out.
    pub fn since(&self, earlier: &Self, seconds: f64) -> Vec<Since> {
        let layers = [Layer::Front, Layer::Disk, Layer::Image, Layer::Store];
        let of_server =
            layers.into_iter().zip(&self.layers).zip(&earlier.layers).filter_map(|((layer, now), before)| {
                Some(Since::new(layer, &rates(now.as_ref()?, before.as_ref()?), seconds))
            });
        let device = match (&self.device, &earlier.device) {
            (DeviceSample::Metered(now), DeviceSample::Metered(before)) => {
                Some(Since::new(Layer::HostDevice, &rates(now, before), seconds))
            }
            (DeviceSample::Counted(host, now), DeviceSample::Counted(_, before)) => {
                Some(Since::new(Layer::HostDevice, &host.rates(before, now), seconds))
            }
            _ => None,
        };
        of_server.chain(device).collect()
    }
}

impl Since {
    /// The readings lie a little further apart than the `seconds` that count, and nothing happens between them and these.
    fn new(layer: Layer, rates: &LayerRates, seconds: f64) -> Self {
        let stretch = rates.interval_s / seconds;
        Self {
            layer,
            requests_per_s: rates.requests_per_s * stretch,
            queue_size_avg: rates.queue_size_avg.map(|size| size * stretch),
            queue_size_iostat: rates.queue_size_iostat * stretch,
            latency_mean_us: rates.latency_mean_us.unwrap_or(0.0),
        }
    }
}

/// What was counted between two readings.
fn rates(later: &Reading, earlier: &Reading) -> LayerRates {
    LayerRates::new("", "", &later.since(earlier), later.at_ns.saturating_sub(earlier.at_ns))
}
