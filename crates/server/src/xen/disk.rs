//! One disk for one Xen guest, in a process of its own.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use rustix::fs::{FlockOperation, flock};
use spile_core::{Disk, Error, ErrorKind, Result};
use spile_engine::Engine;
use spile_front::FrontReading;
use spile_front_blkif::device::{Config, Device, End};
use spile_front_blkif::keeping::FailedSyncs;
use spile_front_blkif::pages::Access;
use spile_front_blkif::pause;
use spile_front_blkif::xenbus::guest_of;
use spile_xen::store::{Tx, XenStore};
use spile_xen::{EventChannels, Grants};

use crate::listen::Bound;
use crate::serving::api::http;
use crate::serving::api::types::Export;
use crate::serving::api::view::{DiskView, ReadMeter, View, no_disk};
use crate::serving::api::{Call, Command, Context};
use crate::serving::control::{Event, LineRequest, Request};
use crate::serving::disks::{self, Open, Opening};
use crate::serving::fronts::{Listening, Role, Socket};
use crate::signals::EndSignals;
use crate::uri::Address;
use crate::xen::stats::Stats;
use crate::xen::{OverXen, Place, params};

/// How a disk is served.
#[derive(Clone, Debug)]
pub struct Options<P> {
    /// Where the Xen is.
    pub place: P,
    /// For its pid, its control socket and what a successor needs.
    pub run_dir: PathBuf,
    /// How guests' pages are reached, unless the back end's key `spile-access` says it.
    pub access: Access,
    /// Rings at most.
    pub queues: u16,
    /// Segments of an indirect request at most.
    pub max_indirect: u16,
    /// Offer rings of their own for responses.
    pub splits_rings: bool,
    /// Note the times of so many requests.
    pub trace_records: u32,
}

/// The name of a disk's files in the run folder, without an extension.
///
/// # Errors
/// `InvalidInput` when the path is no back end's.
pub fn file_stem(backend_path: &str) -> Result<String> {
    let (domain, device) = guest_of(backend_path)?;
    Ok(format!("{domain}-{device}"))
}

/// `copy`, `map`, `map-copy` or `persistent`.
///
/// # Errors
/// What there is.
pub fn parse_access(text: &str) -> Result<Access, String> {
    match text {
        "copy" => Ok(Access::Copy),
        "map" => Ok(Access::Map),
        "map-copy" => Ok(Access::MapCopy),
        "persistent" => Ok(Access::Persistent),
        _ => Err(format!("there is no access `{text}`; use copy, map, map-copy or persistent")),
    }
}

/// The name of an access, as [`parse_access`] takes it.
pub fn access_name(access: Access) -> &'static str {
    match access {
        Access::Copy => "copy",
        Access::Map => "map",
        Access::MapCopy => "map-copy",
        Access::Persistent => "persistent",
    }
}

/// Serves the disk of a back end to the end, or until a signal, or until the toolstack pauses it.
///
/// # Errors
/// When the disk cannot be opened, the Xen cannot be reached, or another process serves it.
pub fn serve<P: Place>(
    engine: &Engine,
    backend_path: &str,
    options: &Options<P>,
    opening: Opening,
    signals: EndSignals,
) -> Result<End> {
    let stem = options.run_dir.join(file_stem(backend_path)?);
    let _claim = Claim::take(&stem.with_extension("pid"))?;
    let mut store = options.place.open()?;
    if pause::stays(&mut store, backend_path)? {
        return Ok(End::Paused);
    }
    let failed_syncs = FailedSyncs::new(&options.run_dir, backend_path)?;
    let hear = failed_syncs.clone();
    spile_engine::on_failed_sync(move || hear.note());
    let mut disks = Vec::new();
    let opened = open(engine, &mut store, backend_path, options, opening, &mut disks);
    // The device has one of its own.
    drop(store);
    let is_busy = opened.as_ref().is_err_and(|error| error.kind() == ErrorKind::Busy);
    let served = opened.and_then(|access| {
        let config = config(&disks[0], backend_path, access, options, failed_syncs.clone());
        serve_open(engine, options, config, signals, &disks[0])
    });
    let (end, served) = match served {
        Ok(end) => (Some(end), Ok(())),
        Err(error) => (None, Err(error)),
    };
    let closed = disks::close(engine, disks, served);
    let lets_go = match end {
        Some(end) => end == End::Paused && closed.is_ok(),
        // What is wrong with a disk that cannot be served can be mended in a pause. But one that is busy may be so with
        // requests of a process that was killed, and what a failed sync was to save must stay where it is.
        None => !is_busy && !failed_syncs.is_any(),
    };
    let told = if lets_go { pause_told(options, backend_path) } else { Ok(()) };
    closed.and(told).map(|()| end.expect("what failed was returned"))
}

fn pause_told<P: Place>(options: &Options<P>, backend_path: &str) -> Result<()> {
    pause::tell(&mut options.place.open()?, backend_path)
}

/// Opens what the toolstack has written; how the guest's pages are to be reached.
fn open<P: Place>(
    engine: &Engine,
    store: &mut XenStore,
    backend_path: &str,
    options: &Options<P>,
    mut opening: Opening,
    disks: &mut Vec<Open>,
) -> Result<Access> {
    let wanted = Wanted::read(store, backend_path, options.access)?;
    let spec = params::parse(&wanted.params, wanted.read_only)?;
    opening = opening.with_disks(vec![spec]);
    opening.open(engine, disks).map(|()| wanted.access)
}

fn config<P>(
    open: &Open,
    backend_path: &str,
    access: Access,
    options: &Options<P>,
    failed_syncs: FailedSyncs,
) -> Config {
    Config {
        name: open.label.clone(),
        backend_path: backend_path.to_owned(),
        access,
        max_queues: options.queues,
        max_order: spile_front_blkif::xenbus::MAX_RING_ORDER,
        max_indirect: options.max_indirect,
        splits_rings: options.splits_rings,
        trace_records: options.trace_records,
        read_only: open.read_only,
        run_dir: options.run_dir.clone(),
        failed_syncs,
    }
}

/// Serves the disk until it ends or is to end.
fn serve_open<P: Place>(
    engine: &Engine,
    options: &Options<P>,
    config: Config,
    signals: EndSignals,
    open: &Open,
) -> Result<End> {
    let control = options.run_dir.join(file_stem(&config.backend_path)?).with_extension("control");
    let stats = Stats::begin(&options.place, &config.backend_path);
    let place = options.place.clone();
    options.place.run(Serve { engine, open, place, config, control, signals, stats })?
}

/// What the toolstack has written of a disk.
struct Wanted {
    params: String,
    read_only: bool,
    access: Access,
}

impl Wanted {
    fn read(store: &mut XenStore, path: &str, default: Access) -> Result<Self> {
        let params = store.read_string(Tx::NONE, &format!("{path}/params"))?;
        let mode = store.read_optional(Tx::NONE, &format!("{path}/mode"))?;
        let access = store.read_optional(Tx::NONE, &format!("{path}/spile-access"))?;
        let access = access.map(|text| parse_access(&text)).transpose();
        let access =
            access.map_err(|why| Error::new(ErrorKind::InvalidInput, format!("{path}/spile-access: {why}")))?;
        let read_only = !mode.is_some_and(|mode| mode.contains('w'));
        Ok(Self { params, read_only, access: access.unwrap_or(default) })
    }
}

struct Serve<'a, P> {
    engine: &'a Engine,
    open: &'a Open,
    place: P,
    config: Config,
    control: PathBuf,
    signals: EndSignals,
    stats: Option<Stats>,
}

impl<P: Place> OverXen for Serve<'_, P> {
    type Output = Result<End>;

    fn run<G: Grants, E: EventChannels>(self, grants: Arc<G>, channels: Arc<E>) -> Result<End> {
        let (sender, events) = mpsc::channel();
        let server = self.control.display().to_string();
        let address = Address::Unix(self.control);
        let export =
            Export { protocol: "xen".to_owned(), address: self.config.backend_path.clone(), name: String::new() };
        let (key, role) = (address.to_string(), Role::Control);
        let bound = Bound::after_asking(&address, role.question())?;
        let listening = Listening::publish(Socket { role, key, bound })?;
        let ended = sender.clone();
        let disk = self.open.disk.clone();
        let tell = move || drop(ended.send(Event::Ended));
        let (engine, place) = (self.engine.clone(), self.place);
        let mut device = Device::start(engine, disk, move || place.open(), grants, channels, self.config, tell)?;
        self.stats.iter().for_each(|stats| device.show_on(stats.board()));
        let view = show(self.open, &device, export);
        let context = Context { view: view.clone(), events: sender.clone(), server: server.into() };
        http::listen(listening.share()?, context)?;
        self.signals.on_first(move |_| drop(sender.send(Event::Signal)));
        work(self.engine, self.open, &device, &events);
        view.show(None);
        device.stop();
        device.wait()
    }
}

/// What callers of the control API see of the disk.
fn show(open: &Open, device: &Device, export: Export) -> Arc<View> {
    let read = device.reader();
    let meter: ReadMeter = Arc::new(move || {
        read().into_iter().fold(FrontReading::default(), |mut sum, ring| {
            sum += &ring;
            sum
        })
    });
    let view = Arc::new(View::default());
    view.show(Some(vec![DiskView::new(open, vec![export], vec![("front xen".to_owned(), meter)])]));
    view
}

/// Does what is asked until the end.
fn work(engine: &Engine, open: &Open, device: &Device, events: &mpsc::Receiver<Event>) {
    loop {
        match events.recv() {
            Ok(Event::Line(line)) => answer_line(engine, open, device, line),
            Ok(Event::Called(call)) => {
                if answer_call(engine, open, device, call) {
                    return;
                }
            }
            Ok(Event::Signal | Event::Ended) | Err(_) => return,
        }
    }
}

fn answer_line(engine: &Engine, open: &Open, device: &Device, line: LineRequest) {
    let done = match line.request {
        Request::Resize { size_bytes, .. } => resize(engine, open, device, size_bytes),
        Request::TakeOver { .. } => {
            let what = "a Xen guest's disk is not handed over: end this process, and the next one goes on";
            Err(Error::new(ErrorKind::Unsupported, what))
        }
    };
    line.answer(&done);
}

/// Does what the control API was asked for. True when the process is to end.
fn answer_call(engine: &Engine, open: &Open, device: &Device, call: Call) -> bool {
    let done = match &call.command {
        Command::Shutdown => {
            call.answer(Ok(()));
            return true;
        }
        Command::Resize { name, size_bytes } if *name == open.name => resize(engine, open, device, *size_bytes),
        Command::Resize { name, .. } => Err(no_disk([&open.name].into_iter(), name)),
        Command::Attach(_) | Command::Detach { .. } | Command::AddExport(_) | Command::RemoveExport { .. } => {
            let what = "the process of a Xen guest's disk serves that disk only";
            Err(Error::new(ErrorKind::Unsupported, what).hint("the toolstack attaches and detaches it"))
        }
    };
    call.answer(done);
    false
}

fn resize(engine: &Engine, open: &Open, device: &Device, size_bytes: u64) -> Result<()> {
    let disk = open.disk.clone();
    engine.run_on(0, move || async move { disk.resize(size_bytes).await })?;
    device.resized();
    Ok(())
}

/// The right to serve a disk: its pid file, locked for as long as the process lives.
pub struct Claim {
    path: PathBuf,
    /// Unlocked when it is closed.
    _file: File,
}

impl Claim {
    /// Takes it.
    ///
    /// # Errors
    /// `Busy` when another process has it.
    pub fn take(path: &Path) -> Result<Self> {
        let problem = |source| Error::io("write", source).at_path(path);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        loop {
            let mut file = options.open(path).map_err(problem)?;
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                return Err(Error::new(ErrorKind::Busy, "another process serves this disk").at_path(path));
            }
            // Whoever had it may have removed it in between: then it is not the one that others find.
            let (ours, found) = (file.metadata().map_err(problem)?, fs::metadata(path));
            if !found.is_ok_and(|found| (found.dev(), found.ino()) == (ours.dev(), ours.ino())) {
                continue;
            }
            file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(problem)?;
            return Ok(Self { path: path.to_owned(), _file: file });
        }
    }

    /// The process that has it, if any has.
    pub fn holder(path: &Path) -> Option<i32> {
        let file = File::open(path).ok()?;
        flock(&file, FlockOperation::NonBlockingLockShared).is_err().then_some(())?;
        fs::read_to_string(path).ok()?.trim().parse().ok()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // While it is locked, so that it is ours.
        let _ = fs::remove_file(&self.path);
    }
}
