//! What `convert` must not write over: the disk that it reads.

use std::path::Path;

use spile_core::{Error, ErrorKind, Locator, Result};
use spile_image::Graph;
use spile_image::layer::Layer as _;
use spile_server::beneath::may_share_bytes;
use spile_server::serving::api::discovery;
use spile_server::serving::api::types::{Disk, Export};
use spile_store::{AnyStore, FileId, HostStore, may_be_same_export};

use crate::disks;
use crate::uri::NbdUri;

/// What stdin was opened from, as a path.
const STDIN: &str = "/proc/self/fd/0";

/// Where bytes lie, or where they are reached.
enum Place {
    File(FileId),
    Export(NbdUri),
}

impl Place {
    fn of(at: &Locator) -> Option<Self> {
        match at {
            Locator::Path(path) => path.metadata().ok().map(|stat| Self::File(FileId::of(&stat))),
            Locator::Nbd(uri) => uri.parse().ok().map(Self::Export),
            Locator::Null(_) | Locator::Mem(_) => None,
        }
    }

    fn of_store(store: &AnyStore) -> Option<Self> {
        match store {
            AnyStore::Nbd(_) => name(store).parse().ok().map(Self::Export),
            _ => store.file_id().map(Self::File),
        }
    }

    fn of_export(export: &Export) -> Option<Self> {
        let address = export.address.parse().ok().filter(|_| export.protocol == "nbd")?;
        Some(Self::Export(NbdUri::new(address, &*export.name)))
    }

    /// True when what is written at one of the two may be read at the other.
    fn meets(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::File(a), Self::File(b)) => may_share_bytes(*a, *b),
            (Self::Export(a), Self::Export(b)) => may_be_same_export(a, b),
            _ => false,
        }
    }
}

/// Refuses `dst` when bytes of `disk` lie there: in any of its layers, under whatever name, whether or not files are locked. What a
/// server of this host makes of a layer counts as well: all its exports, and the image behind an export.
///
/// # Errors
/// `InvalidInput`, naming the layer.
pub fn refuse_layers(disk: &Graph<HostStore>, dst: &Locator) -> Result<()> {
    let Some(at) = Place::of(dst) else { return Ok(()) };
    let layers: Vec<_> = stores(disk).filter_map(|store| Some((name(store), Place::of_store(store)?))).collect();
    if let Some((layer, _)) = layers.iter().find(|(_, place)| place.meets(&at)) {
        return Err(is_read(&format!("as {layer}"), dst));
    }
    let is_read_at = |places: &[Place]| places.iter().any(|place| layers.iter().any(|(_, layer)| layer.meets(place)));
    let is_meant = |places: &[Place]| places.iter().any(|place| place.meets(&at));
    // Where no folder of servers can be read, none is known.
    let mut served = discovery::servers().unwrap_or_default().into_iter().flat_map(|(_, disks)| disks);
    let is_source = |disk: &Disk| {
        let places = places(disk);
        is_meant(&places) && is_read_at(&places)
    };
    match served.find(is_source) {
        Some(disk) => Err(is_read(&format!("as the disk {:?} of a server", disk.name), dst)),
        None => Ok(()),
    }
}

/// Refuses `dst` when a server of this host has it as an export of a disk: its guest may use it. `hint` says what to do.
///
/// # Errors
/// `InvalidInput`, naming the disk.
pub fn refuse_served_here(dst: &Locator, hint: &str) -> Result<()> {
    let Some(Place::Export(uri)) = Place::of(dst) else { return Ok(()) };
    let served: Vec<Disk> = discovery::servers().unwrap_or_default().into_iter().flat_map(|(_, disks)| disks).collect();
    // The first disk of a server has an export without a name, which may be any of that server's.
    let is_named = |disk: &&Disk| disk.exports.iter().any(|export| export.name == uri.export);
    let at = Place::Export(uri.clone());
    let is_meant = |disk: &&Disk| disk.exports.iter().filter_map(Place::of_export).any(|place| place.meets(&at));
    let mut meant = served.iter().filter(is_meant);
    match meant.clone().find(is_named).or_else(|| meant.next()) {
        Some(disk) => {
            let what = format!("it is the disk {:?} of a server of this host, and a guest may use it", disk.name);
            let error = Error::new(ErrorKind::InvalidInput, what).at_path(Path::new(&disks::label(dst)));
            Err(error.hint(hint))
        }
        None => Ok(()),
    }
}

/// Refuses `dst` when stdin was opened from it.
///
/// # Errors
/// `InvalidInput`.
pub fn refuse_stdin(dst: &Locator) -> Result<()> {
    match (Place::of(dst), Place::of(&Path::new(STDIN).into())) {
        (Some(at), Some(stdin)) if at.meets(&stdin) => Err(is_read("on stdin", dst)),
        _ => Ok(()),
    }
}

fn is_read(how: &str, dst: &Locator) -> Error {
    let what = format!("it is read {how}: a disk cannot be written over while it is copied");
    let error = Error::new(ErrorKind::InvalidInput, what).hint("choose another place");
    error.at_path(Path::new(&disks::label(dst)))
}

fn stores(disk: &Graph<HostStore>) -> impl Iterator<Item = &AnyStore> {
    disk.handles().iter().flat_map(|layer| [&**layer.image().store(), &**layer.image().data_store()])
}

fn name(store: &AnyStore) -> String {
    spile_core::Store::path(store).display().to_string()
}

/// Where a served disk's image lies, and where its bytes are reached.
fn places(disk: &Disk) -> Vec<Place> {
    let image = disk.path.parse().ok().and_then(|at| Place::of(&at));
    image.into_iter().chain(disk.exports.iter().filter_map(Place::of_export)).collect()
}
