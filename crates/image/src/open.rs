//! Opening an image with all its parents. No format is named here: each child says what its parent's is.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::future::join_all;
use spile_core::{Env, Error, ErrorKind, Files, Locator, OpenMode, Result, ResultExt, Store, Via};

use crate::facts::LayerInfo;
use crate::formats::{AnyLayer, Format, OpenLayer};
use crate::graph::{GraphLayer, check_length};
use crate::layer::{Identity, Layer, ParentRef};
use crate::parents::{Policy, candidates, quoted};

/// How to open a chain.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The leaf's format; `None` = what its extension says.
    pub format: Option<Format>,
    /// Open the leaf for reading only.
    pub read_only: bool,
    /// Folders, besides the leaf's own, that parents may lie in.
    pub allow_parents: Vec<PathBuf>,
    /// Memory for maps that can be read again (bitmaps, merged zones), in bytes for the whole chain.
    pub metadata_cache_bytes: usize,
    /// The format of parents whose children do not name it. It is never guessed.
    pub parent_format: Option<Format>,
    /// Images may name another file that holds their data.
    pub allow_data_file: bool,
    /// Refuse an image that has a parent, wherever the parent lies.
    pub no_parents: bool,
    /// Take no locks on files. It is a word to whoever makes the `Files` that the chain is opened from: the chain itself
    /// knows no locks.
    pub no_lock: bool,
    /// Write to an image although another one names it as its parent. A word to the opener of the `Files`, as `no_lock` is.
    pub write_parent: bool,
    /// Refuse to write to an image whose refcounts may be wrong ([`is_dirty`](crate::formats::qcow2::is_dirty)), instead of making them anew.
    pub keeps_dirty: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            format: None,
            read_only: false,
            allow_parents: Vec::new(),
            metadata_cache_bytes: 64 << 20,
            parent_format: None,
            allow_data_file: false,
            no_parents: false,
            no_lock: false,
            write_parent: false,
            keeps_dirty: false,
        }
    }
}

/// What an image says by itself, with nothing open but its own file.
#[derive(Clone, Debug)]
pub struct Described {
    /// The image.
    pub layer: LayerInfo,
    /// The unit of offsets and lengths of requests, in bytes. `None` when the data lie in another file, which is not
    /// opened.
    pub request_align_bytes: Option<u32>,
    /// The name of that other file, as the image says it; empty for one that makes no sense.
    pub data_file: Option<PathBuf>,
}

/// A parent's own maps are needed only until its part of a zone is merged: a small cache for each.
const PARENT: OpenLayer = OpenLayer { read_only: true, lazy: false, cache_bytes: 1 << 20, keeps_dirty: false };

/// Memory for the maps of a parent that is open for writing.
const MERGED_CACHE_BYTES: usize = 16 << 20;

async fn canonical<F: Files>(files: &F, at: &Locator) -> Result<Locator> {
    match at {
        Locator::Path(path) => Ok(Locator::Path(files.canonical(path).await.at_path(path)?)),
        other => Ok(other.clone()),
    }
}

/// Opens the image at `at` alone, without its parents, to be put on top of a graph.
///
/// # Errors
/// As [`Graph::open`](crate::Graph::open).
pub async fn open_layer<F: Files>(
    files: &F,
    env: Arc<dyn Env>,
    at: impl Into<Locator>,
    options: &OpenOptions,
) -> Result<Arc<GraphLayer<F::Store>>> {
    let (_, image) = Search::from_leaf(files, &env, &at.into(), options).await?;
    Ok(GraphLayer::new(image, options.read_only))
}

/// The image in `store`, which this process has just made there: the file is used by the descriptor that has made it, as its name may lead elsewhere by now.
///
/// # Errors
/// As [`Graph::open`](crate::Graph::open), for this image alone.
pub async fn made_layer<S: Store>(
    store: S,
    env: &Arc<dyn Env>,
    format: Format,
    options: &OpenOptions,
) -> Result<Arc<GraphLayer<S>>> {
    let OpenOptions { keeps_dirty, .. } = *options;
    let how = OpenLayer { read_only: false, keeps_dirty, cache_bytes: options.metadata_cache_bytes / 2, ..PARENT };
    let path = store.path().to_owned();
    Ok(GraphLayer::new(format.open(store, env, how).await.at_path(&path)?, false))
}

/// Opens the file at a path that has no links. When the path leads elsewhere now, somebody has exchanged a part of it since it was looked at.
async fn open_there<F: Files>(files: &F, at: &Locator, mode: OpenMode) -> Result<F::Store> {
    let store = files.open(at, mode).await?;
    match at.as_path() {
        Some(path) if store.path() != path => {
            let what =
                format!("a link was put into this path while it was opened, and leads to {}", store.path().display());
            Err(Error::new(ErrorKind::Denied, what).at_path(path).hint("see who changes the folder"))
        }
        _ => Ok(store),
    }
}

/// Opens the file of `layer` once more, in another mode: for writing while nobody else has it open, or for reading only once
/// all that was written is durable. Both layers may be in use until the older one is dropped.
///
/// # Errors
/// `Busy` when somebody else has the file open; `ReadOnly` for a format that cannot be written; `Unsupported` for an image that keeps its data in
/// another file; the store's.
pub async fn reopen_layer<F: Files>(
    files: &F,
    env: &Arc<dyn Env>,
    layer: &GraphLayer<F::Store>,
    mode: OpenMode,
) -> Result<Arc<GraphLayer<F::Store>>> {
    let (read_only, image) = (mode == OpenMode::ReadOnly, layer.image());
    let how = OpenLayer {
        read_only,
        lazy: false,
        cache_bytes: if read_only { PARENT.cache_bytes } else { MERGED_CACHE_BYTES },
        ..PARENT
    };
    if !matches!(image.data_file(), Ok(None)) {
        return Err(image.unsupported("an image that keeps its data in another file is not opened in another mode"));
    }
    let store = files.reopen(image.store(), mode).await?;
    let image = image.format().open(store, env, how).await?;
    Ok(GraphLayer::new(image, read_only))
}

/// Makes durable what `layers` hold, which are open for reading only and are to be the parents of an image that is not open over them. One whose last
/// writer was killed is closed as that writer would have done it: nobody else may have it open then, and it is not read by its layer afterwards, as its
/// file may be shorter.
///
/// # Errors
/// `Busy` when somebody else has such a layer open; the stores'.
pub async fn make_durable<F: Files>(files: &F, env: &Arc<dyn Env>, layers: &[Arc<GraphLayer<F::Store>>]) -> Result<()> {
    let (unflushed, others): (Vec<_>, Vec<_>) = layers.iter().partition(|layer| layer.image().is_unflushed());
    for layer in unflushed {
        let sealed = async { reopen_layer(files, env, layer, OpenMode::ReadWrite).await?.seal().await };
        sealed.await.map_err(|error| left_unflushed(error).at_path(layer.path()))?;
    }
    sync_all(others.into_iter().map(|layer| layer.image())).await
}

/// Describes the image at `at`. Neither parents nor a data file are opened, and the names that the image has for them are
/// not looked up.
///
/// # Errors
/// As [`Graph::open`](crate::Graph::open), for this image alone.
pub async fn describe<F: Files>(
    files: &F,
    env: Arc<dyn Env>,
    at: impl Into<Locator>,
    format: Option<Format>,
) -> Result<Described> {
    let at = at.into();
    let format = Format::at(&at, format)?;
    let at = canonical(files, &at).await?;
    let store = open_there(files, &at, OpenMode::ReadOnly).await?;
    let image = format.open(store, &env, PARENT).await?;
    let (align, least) = (image.store().info().offset_align_bytes, image.request_align_bytes());
    let align = if image.via() == Via::Direct { align.max(least) } else { least };
    // A data file whose name makes no sense is a data file, too.
    let data_file = image.data_file().unwrap_or_else(|_| Some(PathBuf::new()));
    let layer = GraphLayer::new(image, true).info();
    Ok(Described { layer, request_align_bytes: data_file.is_none().then_some(align), data_file })
}

/// Opens the image at `at` and all its parents; leaf first. With a leaf that is opened for writing, all parents are
/// durable when it returns.
pub(crate) async fn open_layers<F: Files>(
    files: &F,
    env: &Arc<dyn Env>,
    at: &Locator,
    options: &OpenOptions,
) -> Result<Vec<Arc<GraphLayer<F::Store>>>> {
    let (mut search, leaf) = Search::from_leaf(files, env, at, options).await?;
    let mut images = vec![leaf];
    while let Some(parent) = search.parent_of(&images[images.len() - 1]).await? {
        images.push(parent);
        check_length(images.len(), &search.visited[0])?;
    }
    if !options.read_only {
        sync_all(images[1..].iter()).await?;
    }
    let is_sealed = |number| number > 0 || options.read_only;
    Ok(images.into_iter().enumerate().map(|(number, image)| GraphLayer::new(image, is_sealed(number))).collect())
}

/// Syncs the stores of the parents. A process that was killed may have written to a parent while it was still the
/// leaf, and those bytes may be in the page cache only. A flush of the chain promises them, too, but syncs the leaf
/// only.
async fn sync_all<'a, S: Store>(parents: impl Iterator<Item = &'a AnyLayer<S>>) -> Result<()> {
    let syncs = parents.flat_map(|layer| {
        let (image, data) = (layer.store(), layer.data_store());
        std::iter::once(image).chain((!std::ptr::eq(image, data)).then_some(data))
    });
    let syncs = syncs.map(async |store: &S| store.sync().await.at_path(store.path()));
    join_all(syncs).await.into_iter().collect()
}

/// An image, and the path of the file that holds its data if that is another one.
type Opened<S> = (AnyLayer<S>, Option<PathBuf>);

/// A search for the parents of a leaf, one after the other.
struct Search<'a, F: Files> {
    files: &'a F,
    env: &'a Arc<dyn Env>,
    policy: Policy,
    /// Canonical paths of the layers so far.
    visited: Vec<PathBuf>,
    /// Canonical paths of the files that hold their data.
    data_files: Vec<PathBuf>,
    /// True when the leaf takes writes: then all parents must be durable.
    needs_durable_parents: bool,
    options: &'a OpenOptions,
}

impl<'a, F: Files> Search<'a, F> {
    /// Opens the image at `at` as a leaf, to go down from there.
    async fn from_leaf(
        files: &'a F,
        env: &'a Arc<dyn Env>,
        at: &Locator,
        options: &'a OpenOptions,
    ) -> Result<(Self, AnyLayer<F::Store>)> {
        let format = Format::at(at, options.format)?;
        let at = canonical(files, at).await?;
        let policy = Policy::new(files, at.as_path(), &options.allow_parents).await?;
        let mode = if options.read_only { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
        let OpenOptions { read_only, keeps_dirty, .. } = *options;
        let how = OpenLayer { read_only, keeps_dirty, cache_bytes: options.metadata_cache_bytes / 2, ..PARENT };
        let store = open_there(files, &at, mode).await?;
        let leaf = store.path().to_owned();
        let needs_durable_parents = !options.read_only;
        let (visited, data_files) = (vec![leaf], Vec::new());
        let mut search = Self { files, env, policy, visited, data_files, needs_durable_parents, options };
        let mut image = format.open(store, env, how).await?;
        search.data_files.extend(search.attach_data_file(&mut image, mode).await?);
        Ok((search, image))
    }

    /// The parent that `child` names, if it names one.
    async fn parent_of(&mut self, child: &AnyLayer<F::Store>) -> Result<Option<AnyLayer<F::Store>>> {
        let path = child.store().path();
        let Some(parent) = child.parent().await.at_path(path)? else { return Ok(None) };
        if self.options.no_parents {
            return Err(parents_denied(path, &parent.names));
        }
        let format = parent.format.or(self.options.parent_format).ok_or_else(|| unnamed_format(path))?;
        let mut first_error = None;
        for candidate in candidates(self.files, path, &parent.names, &self.policy).await? {
            match self.open(&candidate, format, &parent).await {
                Ok((layer, data_file)) => {
                    self.visited.push(candidate);
                    self.data_files.extend(data_file);
                    return Ok(Some(layer));
                }
                // Another name may be the right one. If none is, the caller gets the error of the first name, which is
                // the best one.
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        let error = first_error.unwrap_or_else(|| Error::new(ErrorKind::NotFound, "no parent was found"));
        Err(error.at_path(path))
    }

    /// A parent, and the file that holds its data if that is another one.
    async fn open(&self, path: &PathBuf, format: Format, parent: &ParentRef) -> Result<Opened<F::Store>> {
        if self.visited.contains(path) {
            return Err(Error::new(ErrorKind::Corrupt, format!("the chain loops back to {}", path.display())));
        }
        if self.data_files.contains(path) {
            return Err(used_twice(path));
        }
        let opened = self.open_parent(path, format, parent).await?;
        if !self.needs_durable_parents || !opened.0.is_unflushed() {
            return Ok(opened);
        }
        drop(opened);
        self.make_durable(path, format).await?;
        self.open_parent(path, format, parent).await
    }

    async fn open_parent(&self, path: &Path, format: Format, parent: &ParentRef) -> Result<Opened<F::Store>> {
        let store = open_there(self.files, &path.into(), OpenMode::ReadOnly).await?;
        // Whoever only looks at a chain wants to know all of it at once.
        let how = OpenLayer { lazy: !self.options.read_only, ..PARENT };
        let mut layer = format.open(store, self.env, how).await?;
        let data_file = self.attach_data_file(&mut layer, OpenMode::ReadOnly).await?;
        // An identity may have to be computed from the image's tables: only a child that expects one asks.
        let Some(expected) = parent.identity else { return Ok((layer, data_file)) };
        match layer.identity() {
            Some(found) if found != expected => Err(wrong_parent(path, expected, found)),
            _ => Ok((layer, data_file)),
        }
    }

    /// Opens the file that holds the data of `layer`, if the image names one. The user must have allowed it, and it
    /// must lie in an allowed folder, and be no other file of the chain. Returns its path.
    async fn attach_data_file(&self, layer: &mut AnyLayer<F::Store>, mode: OpenMode) -> Result<Option<PathBuf>> {
        let image = layer.store().path().to_owned();
        let Some(name) = layer.data_file().at_path(&image)? else { return Ok(None) };
        if !self.options.allow_data_file {
            return Err(data_file_denied(&image, &name));
        }
        let mut found = candidates(self.files, &image, &[name], &self.policy).await.map_err(of_data_file)?;
        let path = found.swap_remove(0);
        if path == image || self.visited.contains(&path) || self.data_files.contains(&path) {
            return Err(used_twice(&path).at_path(&image));
        }
        layer.attach_data_file(open_there(self.files, &Locator::from(&path), mode).await?);
        Ok(Some(path))
    }

    /// Flushes and closes a parent that was a leaf when its process was killed. The guest may outlive that process and
    /// see a snapshot taken. From then on its flushes go to the new leaf only, but they promise what the guest wrote
    /// before, too.
    async fn make_durable(&self, path: &Path, format: Format) -> Result<()> {
        let done = async {
            let store = open_there(self.files, &path.into(), OpenMode::ReadWrite).await?;
            format.open(store, self.env, OpenLayer { read_only: false, ..PARENT }).await?.seal().await
        };
        done.await.map_err(left_unflushed)
    }
}

/// Refuses a child that names another parent than `parent`.
pub(crate) async fn check_parent<S: Store>(child: &AnyLayer<S>, parent: &AnyLayer<S>) -> Result<()> {
    let (child_path, path) = (child.store().path(), parent.store().path());
    let named = child.parent().await?;
    let format = named.as_ref().and_then(|named| named.format);
    match (named.as_ref().and_then(|named| named.identity), parent.identity()) {
        (Some(expected), Some(found)) if found != expected => {
            Err(wrong_parent(path, expected, found).at_path(child_path))
        }
        _ if format != Some(parent.format()) => {
            let what = format!("the new leaf does not name {} ({}) as its parent", path.display(), parent.format());
            Err(Error::new(ErrorKind::Corrupt, what).at_path(child_path))
        }
        _ => Ok(()),
    }
}

/// The error of a parent that cannot be made durable.
fn left_unflushed(error: Error) -> Error {
    error.hint(
        "this parent's last writer was killed; what it wrote must be made durable before a child takes writes: end \
         other processes that have it open",
    )
}

fn unnamed_format(child: &Path) -> Error {
    Error::new(ErrorKind::Unsupported, "the image does not say which format its parent has, and it is never guessed")
        .at_path(child)
        .hint("name it with --backing-format")
}

fn parents_denied(child: &Path, names: &[PathBuf]) -> Error {
    Error::new(ErrorKind::Denied, format!("the image has a parent, which it names itself: {}", quoted(names)))
        .at_path(child)
        .hint("parents are not followed with --no-parents")
}

fn data_file_denied(image: &Path, name: &Path) -> Error {
    Error::new(ErrorKind::Denied, format!("the image keeps its data in another file, {name:?}, which it names itself"))
        .at_path(image)
        .hint("if you trust the image, allow it with --allow-data-file")
}

/// The error of a file that holds an image's data and is something else in the chain, too.
fn used_twice(data_file: &Path) -> Error {
    let what = format!("{} holds the data of an image of this chain, and is used twice in it", data_file.display());
    Error::new(ErrorKind::Corrupt, what)
}

/// The error of [`candidates`], which speaks of parents, for a file that holds the data of an image.
fn of_data_file(error: Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound => {
            let path = error.path().map(Path::to_owned).unwrap_or_default();
            let what = error.message().replacen("the parent is", "the file that holds the image's data is", 1);
            let hint = "it is looked for only where the image says: put it there again";
            Error::new(ErrorKind::NotFound, what).at_path(&path).hint(hint)
        }
        _ => error,
    }
}

fn wrong_parent(path: &Path, expected: Identity, found: Identity) -> Error {
    let hex = |id: Identity| id.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    Error::new(
        ErrorKind::Corrupt,
        format!("the parent {} has UUID {}, the child expects {}", path.display(), hex(found), hex(expected)),
    )
    .hint("another image has taken the parent's name")
}
