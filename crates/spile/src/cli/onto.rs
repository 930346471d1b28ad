//! What `convert` must not write over: the disk that it reads, and, unless told to, the parents of other images.

use std::path::Path;

use spile_core::{Error, ErrorKind, Locator, Result};
use spile_image::Graph;
use spile_image::layer::Layer as _;
use spile_store::{AnyStore, FileId};

use crate::disks;
use crate::uri::NbdUri;

/// What stdin was opened from, as a path.
const STDIN: &str = "/proc/self/fd/0";

/// Refuses `dst` when bytes of `disk` lie there: in any of its layers, under whatever name, whether or not files are locked.
///
/// # Errors
/// `InvalidInput`, naming the layer.
pub fn refuse_layers(disk: &Graph<AnyStore>, dst: &Locator) -> Result<()> {
    let layer = match dst {
        Locator::Path(path) => id_at(path).and_then(|id| layer_in(disk, id)),
        Locator::Nbd(uri) => layer_on(disk, uri),
        Locator::Null(_) | Locator::Mem(_) => None,
    };
    layer.map_or(Ok(()), |layer| Err(is_read(&format!("as {layer}"), dst)))
}

/// Refuses `dst` when stdin was opened from it.
///
/// # Errors
/// `InvalidInput`.
pub fn refuse_stdin(dst: &Locator) -> Result<()> {
    match dst.as_path().and_then(id_at) {
        Some(id) if id_at(Path::new(STDIN)) == Some(id) => Err(is_read("on stdin", dst)),
        _ => Ok(()),
    }
}

fn is_read(how: &str, dst: &Locator) -> Error {
    let what = format!("it is read {how}: a disk cannot be written over while it is copied");
    let error = Error::new(ErrorKind::InvalidInput, what).hint("choose another place");
    error.at_path(Path::new(&disks::label(dst)))
}

/// Which file a path leads to, through all links.
fn id_at(path: &Path) -> Option<FileId> {
    path.metadata().ok().map(|stat| FileId::of(&stat))
}

fn stores(disk: &Graph<AnyStore>) -> impl Iterator<Item = &AnyStore> {
    disk.handles().iter().flat_map(|layer| [layer.image().store(), layer.image().data_store()])
}

fn name(store: &AnyStore) -> String {
    spile_core::Store::path(store).display().to_string()
}

fn layer_in(disk: &Graph<AnyStore>, id: FileId) -> Option<String> {
    stores(disk).find(|store| store.file_id() == Some(id)).map(name)
}

fn layer_on(disk: &Graph<AnyStore>, uri: &str) -> Option<String> {
    let export = |uri: &str| uri.parse().ok().map(|NbdUri { address, export, .. }| (address, export));
    let wanted = export(uri)?;
    let is_same =
        |store: &&AnyStore| matches!(store, AnyStore::Nbd(_)) && export(&name(store)).is_some_and(|at| at == wanted);
    stores(disk).find(is_same).map(name)
}
