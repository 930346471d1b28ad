//! [`Work`]: what a job works with, whether the disk is served or not.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use spile_core::metrics::Op;
use spile_core::{Env, Error, ErrorKind, Extent, Files, OpenMode, Result, Segments, Store, Timer};
use spile_image::layer::Identity;
use spile_image::{Broken, Format, Graph, GraphLayer, reopen_layer};
use spile_node::Node;

use crate::gc::holds_data;
use crate::jobs::Job;

/// What a job works with.
pub struct Work<'a, F: Files> {
    /// Where the images are.
    pub files: &'a F,
    /// The same files, opened without locks: for images of others, which are only asked for their parents.
    pub asking: &'a F,
    /// Clock and randomness.
    pub env: &'a Arc<dyn Env>,
    /// Lets time pass between pieces.
    pub timer: &'a dyn Timer,
    /// The disk. It is open for writing.
    pub node: &'a Node<Graph<F::Store>>,
    /// What the job's users want of it.
    pub job: &'a Job,
    /// Finds files that may have one of the disk's images as their parent.
    pub neighbours: &'a dyn Neighbours,
    /// Notes durably what changes of the disk, where that can be done.
    pub marks: Option<&'a dyn Marks>,
    /// How much is moved at once.
    pub sizes: Sizes,
    /// A rule that the simulator breaks.
    pub broken: Broken,
}

/// Notes who is whose child.
pub trait NoteChild {
    /// Notes durably that the image at `child` is to be a child of the one at `parent`, both by whole paths: whoever looks for the children of that finds
    /// it from now on, in another folder, too.
    ///
    /// # Errors
    /// The system's.
    fn note_child<'a>(&'a self, parent: &'a Path, child: &'a Path) -> Later<'a, ()>;
}

/// All images lie in one folder.
impl NoteChild for () {
    fn note_child<'a>(&'a self, _: &'a Path, _: &'a Path) -> Later<'a, ()> {
        Box::pin(async { Ok(()) })
    }
}

/// Finds files that may have one of a disk's images as their parent.
pub trait Neighbours: NoteChild {
    /// All files that lie now in the folders of the disk's images.
    ///
    /// # Errors
    /// When a folder cannot be looked at.
    fn list(&self) -> Pin<Box<dyn Future<Output = Result<Vec<PathBuf>>> + '_>>;

    /// All files that lie now in the folder of the image at `image`, which the disk need not have.
    ///
    /// # Errors
    /// When the folder cannot be looked at.
    fn beside<'a>(&'a self, image: &'a Path) -> Pin<Box<dyn Future<Output = Result<Vec<PathBuf>>> + 'a>> {
        let _ = image;
        self.list()
    }
}

/// What is there later.
pub type Later<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + 'a>>;

/// Takes a piece of a file, with its place in bytes.
pub type Put<'a> = &'a dyn Fn(u64, Segments) -> Later<'a, ()>;

/// Notes what changes of a disk from some moments on, so that a kill or a power cut loses nothing of it: too much is marked then, never too little.
pub trait Marks {
    /// From now on it is noted under `name` what changes, in the place of what was noted under it before. All that was written before is durable.
    ///
    /// # Errors
    /// `Unsupported` where nothing can be noted; the system's.
    fn begin<'a>(&'a self, name: &'a str) -> Later<'a, ()>;

    /// The names of the hidden checkpoints that there are.
    ///
    /// # Errors
    /// The system's.
    fn names(&self) -> Later<'_, Vec<String>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    /// True when the disk has checkpoints that its user has made.
    fn are_seen(&self) -> bool {
        true
    }

    /// What has changed since [`Marks::begin`] in the part `within` of the disk, or may have. `None` when that is not known, or was never begun.
    ///
    /// # Errors
    /// The system's.
    fn changed<'a>(&'a self, name: &'a str, within: Range<u64>) -> Later<'a, Option<Vec<Extent>>>;

    /// Nothing is noted under `name` any more, if something was.
    ///
    /// # Errors
    /// The system's.
    fn end<'a>(&'a self, name: &'a str) -> Later<'a, ()>;

    /// What was noted under `name` is noted under `to` from now on, in the place of what was there. A crash leaves one of both under `to`, or nothing.
    ///
    /// # Errors
    /// `NotFound`; the system's.
    fn rename<'a>(&'a self, name: &'a str, to: &'a str) -> Later<'a, ()>;

    /// The disk is to be the image at `half` soon, under the name `to`: from now on what changes is noted beside that, too, together with all that is known, so
    /// that the disk's checkpoints are there when it is. There is no file of changed blocks beside `to` yet. `since` is one more name to note it under. False when there is nothing to take along. Until
    /// [`Marks::carried`] nobody makes or removes checkpoints, in either case: one that is made now would stay behind.
    ///
    /// # Errors
    /// Why that cannot be: then there is nothing beside `half`.
    fn carry<'a>(&'a self, half: &'a Path, to: &'a Path, since: Option<&'a str>) -> Later<'a, bool>;

    /// As [`Marks::carry`], to another host: how many bytes long the file is that [`Marks::send`] sends there. `goes`: the disk itself goes, and not a copy. `None` when there is nothing to send. Until
    /// [`Marks::carried`] nobody makes or removes checkpoints, in either case.
    ///
    /// # Errors
    /// Why that cannot be.
    fn pack<'a>(&'a self, since: Option<&'a str>, goes: bool) -> Later<'a, Option<u64>> {
        let _ = (since, goes);
        Box::pin(async { Ok(None) })
    }

    /// Gives `put` what [`Marks::pack`] has promised: pieces of a file, each with its place; all else in it is zero. What had changed when this began is in it.
    ///
    /// # Errors
    /// Those of `put`; `Io` when what has changed is not known any more.
    fn send<'a>(&'a self, put: Put<'a>) -> Later<'a, ()> {
        let _ = put;
        Box::pin(async { Ok(()) })
    }

    /// The end of what [`Marks::carry`] or [`Marks::pack`] began: the disk has got there, or stays where it is.
    ///
    /// # Errors
    /// The system's.
    fn carried<'a>(&'a self, is_there: bool) -> Later<'a, ()>;

    /// What these files look like from outside: which they are, how long, and when they were last written. One line, which is another one after each write that
    /// begins later. `None` when nobody can tell, or when another image is a child of the first one.
    ///
    /// # Errors
    /// The system's.
    fn look<'a>(&'a self, paths: &'a [PathBuf]) -> Later<'a, Option<String>>;
}

impl NoteChild for Vec<PathBuf> {
    fn note_child<'a>(&'a self, parent: &'a Path, child: &'a Path) -> Later<'a, ()> {
        ().note_child(parent, child)
    }
}

/// Folders in which nothing changes.
impl Neighbours for Vec<PathBuf> {
    fn list(&self) -> Pin<Box<dyn Future<Output = Result<Vec<PathBuf>>> + '_>> {
        Box::pin(async { Ok(self.clone()) })
    }
}

/// In blocks of so many bytes a job follows what guests change of a disk of `size_bytes`: 4 KiB, a guest's page, up to 128 GiB, and 64 KiB from 2 TiB
/// on. So a bit for each block takes 4 MiB at most up to there, and a small write has little more copied than it wrote.
pub(crate) fn grain_bytes(size_bytes: u64) -> u64 {
    const MOST_BLOCKS: u64 = 32 << 20;
    let few_enough = size_bytes.div_ceil(MOST_BLOCKS).max(1).next_power_of_two();
    few_enough.clamp(4 << 10, MOST_GRAIN_BYTES)
}

/// The most that [`grain_bytes`] says.
pub(crate) const MOST_GRAIN_BYTES: u64 = 64 << 10;

/// How much a job moves at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// A merge copies about so many bytes, the batch, before it has the layer give them up.
    pub batch_bytes: u64,
    /// While the two files of a merge take no more than so many bytes more than before, the layer's file keeps the space of what the layer
    /// has given up. With more it gives space back: then at most four batches take space in two places.
    pub held_bytes: u64,
    /// So many bytes at most are copied at once: what a guest's request to them may have to wait for.
    pub piece_bytes: u64,
    /// The same while guests have no requests.
    pub quiet_piece_bytes: u64,
    /// How many pieces are copied at a time while guests have no requests.
    pub lanes: usize,
    /// A move marks what guests change in blocks of so many bytes, a power of two; `None`: in those that fit the disk's size.
    pub marked_bytes: Option<u64>,
    /// A move makes its copy durable, and notes how far it is, after so many bytes at most.
    pub noted_bytes: u64,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            batch_bytes: 16 << 20,
            held_bytes: 16 << 20,
            piece_bytes: 256 << 10,
            quiet_piece_bytes: 1 << 20,
            lanes: 8,
            marked_bytes: None,
            noted_bytes: 256 << 20,
        }
    }
}

/// One open layer.
pub(crate) type LayerOf<F> = Arc<GraphLayer<<F as Files>::Store>>;
/// A graph.
pub(crate) type GraphOf<F> = Graph<<F as Files>::Store>;

impl<F: Files> Work<'_, F> {
    /// Has requests that begin from now on use `graph`, and waits until all that began before have ended.
    pub(crate) async fn put(&self, graph: GraphOf<F>) -> Result<Arc<GraphOf<F>>> {
        let graph = Arc::new(graph);
        self.node.exchange(graph.clone()).await?.ended().await;
        Ok(graph)
    }

    /// The disk's graph, of which all parents are sealed.
    pub(crate) async fn settled(&self) -> Result<Arc<GraphOf<F>>> {
        let graph = self.node.graph().await;
        let leaf = &graph.handles()[0];
        if leaf.is_sealed() {
            let error = Error::new(ErrorKind::ReadOnly, "the disk is open for reading only");
            return Err(error.at_path(leaf.path()).hint("open it for writing: its images are to be changed"));
        }
        match graph.handles()[1..].iter().find(|layer| !layer.is_sealed()) {
            Some(layer) => {
                let what = "the image is being changed: a snapshot or another job is not finished";
                Err(Error::new(ErrorKind::Busy, what).at_path(layer.path()).hint("try again in a moment"))
            }
            None => Ok(graph),
        }
    }

    /// `layer` in another mode.
    pub(crate) async fn reopen(&self, layer: &LayerOf<F>, mode: OpenMode) -> Result<LayerOf<F>> {
        reopen_layer(self.files, self.env, layer, mode).await
    }

    /// `layer` for reading only, once all of it is durable. A layer that is so already is returned as it is.
    pub(crate) async fn sealed(&self, layer: &LayerOf<F>) -> Result<LayerOf<F>> {
        if layer.is_sealed() {
            return Ok(layer.clone());
        }
        layer.seal().await?;
        self.reopen(layer, OpenMode::ReadOnly).await
    }

    /// Counts requests of guests. It changes when there were some.
    pub(crate) fn guests(&self) -> u64 {
        let reading = self.node.meter().read();
        Op::ALL.iter().map(|op| reading.op(*op).ended).sum()
    }

    /// Notes that the image of `layer` of `graph` is to have the name `name`, in its folder, beside its parent.
    pub(crate) async fn note_new_name(&self, graph: &GraphOf<F>, layer: &LayerOf<F>, name: &Path) -> Result<()> {
        let mut from_there = graph.handles().iter().skip_while(|other| other.id() != layer.id());
        let Some(parent) = from_there.nth(1) else { return Ok(()) };
        let (parent, path) = (self.files.canonical(parent.path()).await?, self.files.canonical(layer.path()).await?);
        self.neighbours.note_child(&parent, &path.with_file_name(name.file_name().unwrap_or_default())).await
    }

    /// The path of the disk.
    pub(crate) async fn disk_path(&self) -> PathBuf {
        let graph = self.node.graph().await;
        graph.handles()[0].path().to_owned()
    }

    /// Those of `neighbours` that name the image at `parent` as their parent, but for `known`.
    pub(crate) async fn other_children(
        &self,
        neighbours: &[PathBuf],
        parent: &GraphLayer<F::Store>,
        known: &[&Path],
    ) -> Result<Vec<PathBuf>> {
        use spile_image::layer::Layer as _;
        self.children_at(neighbours, parent.path(), parent.image().identity(), known).await
    }

    /// As [`Work::other_children`], of the image of this identity under the name `parent`: a file may have two names.
    pub(crate) async fn children_at(
        &self,
        neighbours: &[PathBuf],
        parent: &Path,
        identity: Option<Identity>,
        known: &[&Path],
    ) -> Result<Vec<PathBuf>> {
        let path = self.files.canonical(parent).await?;
        let mut all_known = Vec::new();
        for known in known {
            all_known.push(self.files.canonical(known).await?);
        }
        let mut found = Vec::new();
        for neighbour in neighbours {
            let Ok(neighbour) = self.files.canonical(neighbour).await else { continue };
            let is_known = all_known.contains(&neighbour) || neighbour == path || found.contains(&neighbour);
            if is_known {
                continue;
            }
            if self.is_child(&neighbour, &path, identity).await?
                && !holds_data(self.asking, &neighbour, neighbours).await
            {
                found.push(neighbour);
            }
        }
        Ok(found)
    }

    /// True when the file at `image` names the image at `parent` as its parent. Its name says little: it is asked in every format that has
    /// parents.
    async fn is_child(&self, image: &Path, parent: &Path, identity: Option<Identity>) -> Result<bool> {
        for format in Format::ALL.iter().filter(|format| format.about().has_parents) {
            match spile_image::is_child_of(self.asking, image, *format, parent, identity).await {
                Ok(false) => {}
                Ok(true) => return Ok(true),
                // An image that makes no sense cannot be used as a child either. What the storage does not give may be a child, and so may be
                // what other programs understand.
                Err(error) if is_no_image(error.kind()) && !is_of_others(error.kind(), *format) => {}
                Err(error) => {
                    return Err(error.hint("it may be a child of the disk's images: make it readable, or move it"));
                }
            }
        }
        Ok(false)
    }
}

/// Refuses an image with snapshots inside it, which `why` would be lost or changed with.
///
/// # Errors
/// `Unsupported`.
pub(crate) fn refuse_inner_snapshots<S: Store>(layer: &GraphLayer<S>, why: &str) -> Result<()> {
    use spile_image::layer::Layer as _;
    if !layer.image().has_inner_snapshots() {
        return Ok(());
    }
    let error = Error::new(ErrorKind::Unsupported, format!("the image has snapshots inside it, and {why}"));
    let hint = "spile internal-snapshot --list shows them, and --delete removes them; copy those that are needed first, by qemu-img convert -l";
    Err(error.at_path(layer.path()).hint(hint))
}

/// Refuses an image that keeps its data in another file, which `why` cannot be.
///
/// # Errors
/// `Unsupported`.
pub(crate) fn refuse_data_file<S: Store>(layer: &GraphLayer<S>, why: &str, hint: &str) -> Result<()> {
    use spile_image::layer::Layer as _;
    match layer.image().data_file() {
        Ok(None) => Ok(()),
        _ => {
            let error = Error::new(ErrorKind::Unsupported, format!("the image keeps its data in another file: {why}"));
            Err(error.at_path(layer.path()).hint(hint))
        }
    }
}

/// The size of the image of `layer` in bytes.
pub(crate) fn size_of<S: Store>(layer: &GraphLayer<S>) -> u64 {
    use spile_image::layer::Layer as _;
    layer.image().size_bytes()
}

/// True for the error of a file that is gone or holds no image.
pub(crate) fn is_no_image(kind: ErrorKind) -> bool {
    use ErrorKind::{Corrupt, InvalidInput, NotFound, OutOfRange, Unsupported};
    matches!(kind, Corrupt | InvalidInput | NotFound | OutOfRange | Unsupported)
}

/// True for the error of an image that other programs may understand, in a format that is theirs: it may have a parent, and nobody here knows
/// which.
pub(crate) fn is_of_others(kind: ErrorKind, format: Format) -> bool {
    kind == ErrorKind::Unsupported && format.about().identity_mark.is_some()
}
