//! One disk for one Xen guest, in a process of its own: a [`Server`] whose front is the back end of that guest.
//!
//! This file has what only a Xen disk has: the claim on the disk, the keys that the toolstack has written in xenstore, and
//! pauses ([`pause`]).

use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock, Weak};

use spile_core::{Error, ErrorKind, Result};
use spile_engine::{Config as EngineConfig, Engine};
use spile_front_blkif::device::{Config, Device, End};
use spile_front_blkif::keeping::FailedSyncs;
use spile_front_blkif::pages::Access;
use spile_front_blkif::pause;
use spile_front_nbd::ServerConfig as NbdConfig;
use spile_xen::store::{Tx, XenStore};
use spile_xen::{EventChannels, Grants};

use crate::listen::SocketAccess;
use crate::serving::control::Event;
use crate::serving::disks::{Open, Opening, ServedDisk};
use crate::serving::failed_syncs::{is_export_of, is_file_of};
use crate::serving::fronts::{self, Role, XenFront};
use crate::serving::server::{Beginning, Server, StartXen};
use crate::serving::sockets::Endpoint;
use crate::signals::ServerSignals;
use crate::uri::Address;
use crate::xen::claim::{Claim, file_stem};
use crate::xen::stats::Stats;
use crate::xen::{OverXen, Place, params};

/// How a disk is served.
#[derive(Clone, Debug)]
pub struct Options<P> {
    /// Where the Xen is.
    pub place: P,
    /// The folder for the disk's pid file, its control socket, and what the next process needs.
    pub run_dir: PathBuf,
    /// How guests' pages are reached, unless the back end's key `spile-access` says it.
    pub access: Access,
    /// The most rings that a guest may use.
    pub queues: u16,
    /// The most segments of an indirect request.
    pub max_indirect: u16,
    /// Offer rings of their own for responses.
    pub splits_rings: bool,
    /// The number of last requests whose times are kept; 0 for none.
    pub trace_records: u32,
}

/// The access of this name: `copy`, `map`, `map-copy` or `persistent`.
///
/// # Errors
/// The names that there are.
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

/// Serves the disk of the back end at `backend_path` until the guest or the toolstack closes it, a signal comes, or the
/// toolstack pauses it.
///
/// # Errors
/// When the disk cannot be opened, the Xen cannot be reached, or another process serves the disk.
pub fn serve<P: Place>(
    backend_path: &str,
    options: &Options<P>,
    engine: EngineConfig,
    opening: Opening,
    signals: ServerSignals,
) -> Result<End> {
    let stem = options.run_dir.join(file_stem(backend_path)?);
    let _claim = Claim::take(&stem.with_extension("pid"))?;
    let mut store = options.place.open()?;
    if pause::stays(&mut store, backend_path)? {
        return Ok(End::Paused);
    }
    let failed_syncs = FailedSyncs::new(&options.run_dir, backend_path)?;
    let served_disk = Arc::default();
    hear_of_losses(&failed_syncs, &served_disk);
    let fronts = fronts::Options {
        nbd: NbdConfig::default(),
        queues: 1,
        pins_memory: false,
        incoming: Vec::new(),
        access: SocketAccess::default(),
    };
    let mut server = Server::new(opening, fronts, engine)?;
    server.hear(signals);
    let opened = open(&mut server, &mut store, backend_path, options);
    // The device has a connection of its own.
    drop(store);
    let is_busy = opened.as_ref().is_err_and(|error| error.kind() == ErrorKind::Busy);
    let front = Front { options, backend_path, failed_syncs: failed_syncs.clone(), served_disk };
    let served = opened.and_then(|wanted| front.serve(&mut server, wanted, &stem));
    let (end, served) = match served {
        Ok(end) => (Some(end), Ok(())),
        Err(error) => (None, Err(error)),
    };
    let closed = server.close(served);
    let lets_go = match end {
        Some(end) => end == End::Paused && closed.is_ok(),
        // A disk that cannot be served can be mended in a pause. But a disk that is busy may still have requests of a process that
        // was killed, and after a failed sync the data that it was to save must stay where they are.
        None => !is_busy && !failed_syncs.is_any(),
    };
    let told = if lets_go { pause_told(options, backend_path) } else { Ok(()) };
    closed.and(told).map(|()| end.expect("what failed was returned"))
}

/// The disk, once it is served.
type ServedOnce = Arc<OnceLock<Weak<ServedDisk>>>;

/// Notes every loss below the disk: a sync that has failed, and an NBD export that has lost what it had answered. What is lost of a copy or a
/// backup of the disk does not concern its guest.
fn hear_of_losses(failed_syncs: &FailedSyncs, served_disk: &ServedOnce) {
    let (of_file, of_export) = (failed_syncs.clone(), failed_syncs.clone());
    let (with_files, with_exports) = (served_disk.clone(), served_disk.clone());
    // While it is not certain what the disk is made of, everything concerns it.
    let graph = |disk: &ServedOnce| disk.get().and_then(Weak::upgrade).and_then(|disk| disk.graph_now());
    spile_engine::on_failed_sync(move |fd, _| {
        if graph(&with_files).is_none_or(|graph| is_file_of(&graph, fd)) {
            of_file.note();
        }
    });
    spile_store::on_lost_export(move |uri| {
        if graph(&with_exports).is_none_or(|graph| is_export_of(&graph, uri)) {
            of_export.note();
        }
    });
}

fn pause_told<P: Place>(options: &Options<P>, backend_path: &str) -> Result<()> {
    pause::tell(&mut options.place.open()?, backend_path)
}

/// Opens the disk that the toolstack has written.
fn open<P>(server: &mut Server, store: &mut XenStore, backend_path: &str, options: &Options<P>) -> Result<Wanted> {
    let wanted = Wanted::read(store, backend_path, options.access)?;
    server.set_disks(vec![params::parse(&wanted.params, wanted.read_only)?]);
    server.open_disks(&[])?;
    // A guest that connects anew to a disk of this process begins anew. What another server has seen may concern this guest.
    let failed: Vec<_> = server.failed_syncs().collect();
    let Some(first) = failed.first() else { return Ok(wanted) };
    let commands: Vec<_> = failed.iter().map(|failed| format!("`spile accept-loss {}`", failed.path)).collect();
    let hint = format!("it is served all the same after {}", commands.join(" and "));
    Err(Error::new(ErrorKind::Io, first.to_string()).hint(hint))
}

/// What the back end of the guest is made of.
struct Front<'a, P> {
    options: &'a Options<P>,
    backend_path: &'a str,
    failed_syncs: FailedSyncs,
    served_disk: ServedOnce,
}

impl<P: Place> Front<'_, P> {
    /// Serves the open disk until it ends or is to end.
    fn serve(self, server: &mut Server, wanted: Wanted, stem: &Path) -> Result<End> {
        let stats = Stats::begin(&self.options.place, self.backend_path);
        let control = Endpoint::new(Role::Control, None, &Address::Unix(stem.with_extension("control")))?;
        let sockets = vec![control.bind(SocketAccess::default())?];
        let start: StartXen<'_> = Box::new(|engine, open, events| {
            let device = self.start(engine, open, wanted, events)?;
            stats.iter().for_each(|stats| device.show_on(stats.board()));
            Ok(XenFront { backend_path: self.backend_path.to_owned(), device })
        });
        let end = server.run(Beginning { sockets, inheritance: None, xen: Some(start) }, |_| {})?;
        // Without an end there was no back end, and then the server has failed.
        end.ok_or_else(|| Error::new(ErrorKind::Shutdown, "the back end was not started"))
    }

    fn start(&self, engine: &Engine, open: &Open, wanted: Wanted, events: Sender<Event>) -> Result<Device> {
        let place = self.options.place.clone();
        let config = self.config(open, wanted);
        let (engine, disk) = (engine.clone(), open.disk.clone());
        let _ = self.served_disk.set(Arc::downgrade(&disk));
        self.options.place.run(StartDevice { engine, disk, place, config, events })?
    }

    fn config(&self, open: &Open, wanted: Wanted) -> Config {
        let options = self.options;
        Config {
            name: open.label.clone(),
            backend_path: self.backend_path.to_owned(),
            params: wanted.params,
            access: wanted.access,
            max_queues: options.queues,
            max_order: spile_front_blkif::xenbus::MAX_RING_ORDER,
            max_indirect: options.max_indirect,
            splits_rings: options.splits_rings,
            trace_records: options.trace_records,
            read_only: open.read_only,
            run_dir: options.run_dir.clone(),
            failed_syncs: self.failed_syncs.clone(),
        }
    }
}

/// Starts the back end once the ways to the guest's pages and events are open.
struct StartDevice<P> {
    engine: Engine,
    disk: Arc<ServedDisk>,
    place: P,
    config: Config,
    events: Sender<Event>,
}

impl<P: Place> OverXen for StartDevice<P> {
    type Output = Result<Device>;

    fn run<G: Grants, E: EventChannels>(self, grants: Arc<G>, channels: Arc<E>) -> Result<Device> {
        let Self { engine, disk, place, config, events } = self;
        let tell_ended = move || drop(events.send(Event::Ended));
        Device::start(engine, disk, move || place.open(), grants, channels, config, tell_ended)
    }
}

/// What the toolstack has written about a disk.
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
