//! [`Parents`]: the copies of a disk's parents, when the disk is moved with its chain.
//!
//! Parents never change. So their files are copied as they are, the lowest first, into the folder that the disk goes to, each under its own file name; only the
//! name of its own parent is written anew, so that it is the copy beside it. A copy is made under a hidden name ([`names::moving_parent`]), and gets its own when
//! all of it is durable. A process that ends meanwhile leaves whole copies, and one hidden half that nobody takes for anything.
//!
//! # An image that is there already
//!
//! An image that has a parent's name there is used again, with all that lies below it, if it is that parent: it has the same UUID, where its format has one, and
//! the same size, **and it reads the same from its first byte to its last**. Both are read for that. In any doubt the move is refused: no other image takes part in
//! a disk, and none is overwritten. While it is compared, and until the new image is its child, it is open here, so that nobody can write to it.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use spile_core::{
    Disk as _, Error, ErrorKind, Extent, ExtentKind, Files, Locator, OpenMode, Result, ResultExt, Store, StoreOffset,
    Via,
};
use spile_image::layer::Layer as _;
use spile_image::{Format, Graph, OpenOptions, made_layer, reopen_layer};
use spile_node::Aligned;

use super::note::{is_free, rename_to_free};
use super::place::{name_of_half, remove_half};
use super::status::Status;
use crate::gc::Tools;
use crate::gone::Gone;
use crate::lanes::{Lane, Lanes};
use crate::names;
use crate::snapshot::new_child;
use crate::work::{GraphOf, LayerOf, Work};

/// The copies of a disk's parents.
pub(super) struct Parents {
    /// Their places, the topmost first.
    names: Vec<PathBuf>,
    /// The one under way has this name.
    hidden: PathBuf,
    /// Which files the parents themselves are. `None` where nobody can tell later.
    sources: Option<Vec<String>>,
    /// How much has been copied and compared.
    done_bytes: Cell<u64>,
}

/// Files are read and written in multiples of this; only their last piece is shorter.
const PAGE_BYTES: u64 = 4096;
/// So many runs of a disk's map are asked for at a time.
pub(super) const RUNS_AT_ONCE: usize = 1000;

/// The file names of the parents of the disk of `source`, the topmost first, where their copies are to lie beside a `format` image at `to`.
///
/// # Errors
/// Why the chain cannot be kept.
pub(super) fn names_of_parents<S: Store>(source: &Graph<S>, to: &Path, format: Format) -> Result<Vec<String>> {
    let parents = &source.handles()[1..];
    if !parents.is_empty() && !format.about().has_parents {
        let what = format!("the chain cannot be kept: a {format} has no parent");
        let error = Error::new(ErrorKind::Unsupported, what).at_path(to);
        return Err(error.hint("move it to a .vhd or .qcow2, or flatten it: --chain flatten"));
    }
    let mut names: Vec<String> = Vec::new();
    for parent in parents {
        let (path, image) = (parent.path(), parent.image());
        let name = path.file_name().and_then(|name| name.to_str());
        let is_file = path.is_absolute() && image.store().info().grows_zeroed;
        let Some(name) = name.filter(|_| is_file) else {
            let what = "the chain cannot be kept: this parent is no file whose name is UTF-8";
            return Err(Error::new(ErrorKind::Unsupported, what).at_path(path).hint("flatten it: --chain flatten"));
        };
        if names.iter().any(|other| other == name) || to.file_name().is_some_and(|disk| disk == name) {
            let what =
                format!("the chain cannot be kept: two of its images would be {}", to.with_file_name(name).display());
            let error = Error::new(ErrorKind::Exists, what).at_path(path);
            return Err(error.hint("give the disk another name there, or flatten it: --chain flatten"));
        }
        names.push(name.to_owned());
    }
    Ok(names)
}

/// Which files the parents of the disk of `source` are. `None` where nobody can tell later.
pub(super) fn sources_of<S: Store>(source: &Graph<S>) -> Option<Vec<String>> {
    source.handles()[1..].iter().map(|parent| name_of_half(parent.image().store())).collect()
}

/// What all images of the disk of `source` take: about what is to be copied and compared, in bytes.
pub(super) async fn total_bytes<S: Store>(source: &Graph<S>) -> u64 {
    let mut bytes = 0;
    for layer in source.handles() {
        let store = layer.image().store();
        bytes += store.taken_bytes().await.unwrap_or_else(|| store.len_bytes()).min(store.len_bytes());
    }
    bytes
}

impl Parents {
    /// The copies of the parents of `source`, of a disk that goes to `to` as a `format`. `None` when it has no parent.
    ///
    /// # Errors
    /// Why the chain cannot be kept.
    pub fn of<S: Store>(source: &Graph<S>, to: &Path, format: Format) -> Result<Option<Self>> {
        let names = names_of_parents(source, to, format)?;
        if names.is_empty() {
            return Ok(None);
        }
        let names = names.iter().map(|name| to.with_file_name(name)).collect();
        let (hidden, done_bytes) = (names::moving_parent(to), Cell::new(0));
        Ok(Some(Self { names, hidden, sources: sources_of(source), done_bytes }))
    }

    /// How much has been copied and compared, in bytes.
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes.get()
    }

    /// Which half `target` is, whose parents are the copies: as it is noted. `None` where nobody can tell later.
    pub fn which<S: Store>(&self, target: &Graph<S>) -> Option<String> {
        let files: Option<Vec<_>> = target.handles().iter().map(|layer| name_of_half(layer.image().store())).collect();
        Some([files?, self.sources.clone()?].concat().join(JOINT))
    }

    /// True when a half of this name was made over copies.
    pub fn are_below(half: &str) -> bool {
        half.contains(JOINT)
    }

    /// Refuses names that other files have, as far as that is seen at once.
    ///
    /// # Errors
    /// `Exists`; the system's.
    pub async fn check<F: Files>(&self, work: &Work<'_, F>, source: &GraphOf<F>) -> Result<()> {
        match self.first_there(work).await {
            Some(number) => self.open_there(work, source, number).await.map(drop),
            None => Ok(()),
        }
    }

    /// The topmost parent that is there already.
    async fn first_there<F: Files>(&self, work: &Work<'_, F>) -> Option<usize> {
        for (number, name) in self.names.iter().enumerate() {
            if !is_free(work.files, name).await {
                return Some(number);
            }
        }
        None
    }

    /// Opens the image that is in the place of the parent `number`, counted from the topmost on.
    async fn open_there<F: Files>(&self, work: &Work<'_, F>, source: &GraphOf<F>, number: usize) -> Result<GraphOf<F>> {
        let (name, parent) = (&self.names[number], &source.handles()[1 + number]);
        let tools = Tools { files: work.files, asking: work.asking, env: work.env };
        crate::base::refuse_unfit(&tools, name, &work.neighbours.beside(name).await?).await?;
        let format = Some(parent.image().format());
        let options = OpenOptions { format, read_only: true, ..OpenOptions::default() };
        let opened = Graph::open(work.files, work.env.clone(), name.as_path(), &options).await;
        let there = opened.map_err(|error| match error.kind() {
            ErrorKind::Io => error,
            _ => other_image(name, parent.path(), &error.to_string()),
        })?;
        let (old, new) = (parent.image(), there.handles()[0].image());
        // An identity that does not last changes with the name of the parent's own parent. Both are compared as a whole anyway.
        if old.identity() != new.identity() && new.identity().is_none_or(Format::lasts) {
            return Err(other_image(name, parent.path(), "its UUID is another"));
        }
        if old.size_bytes() != new.size_bytes() {
            let what = format!("it has {} bytes, and not {}", new.size_bytes(), old.size_bytes());
            return Err(other_image(name, parent.path(), &what));
        }
        Ok(there)
    }

    /// Has all copies be there, and says what the topmost one is called and is. All of them are whole, durable, and open until what is returned is dropped.
    ///
    /// # Errors
    /// `Exists` for a name that another image has; `Shutdown` when the job is to end; the system's. What is whole stays.
    pub async fn have<F: Files>(&self, work: &Work<'_, F>, source: &GraphOf<F>, status: &Status) -> Result<Held<F>> {
        self.remove_hidden(work.files).await?;
        status.set_parents(0, self.names.len());
        let there = self.first_there(work).await.unwrap_or(self.names.len());
        let copier = Copier { work, parents: self, source, lanes: Lanes::new(work) };
        work.job.set_total(total_bytes(source).await);
        let mut held = Held { parents: Vec::new(), name: self.names[0].clone() };
        if there < self.names.len() {
            let image = Arc::new(self.open_there(work, source, there).await?);
            let is_same = work.files.is_at(source.handles()[1 + there].image().store(), &self.names[there]).await?;
            if !is_same {
                Box::pin(copier.compare(there, &image)).await?;
            }
            held.parents.extend(image.handles().iter().rev().cloned());
        }
        for number in (0..there).rev() {
            status.set_parents(self.names.len() - 1 - number, self.names.len());
            let below = held.parents.last().cloned();
            let copied = Box::pin(copier.copy(number, below.as_deref())).await;
            if copied.is_err() {
                // It is open nowhere any more, and half an image.
                let _ = remove_half(work.files, &self.hidden).await;
            }
            held.parents.push(copied?);
        }
        status.set_parents(self.names.len(), self.names.len());
        Ok(held)
    }

    /// Removes what a process before may have left under the hidden name.
    ///
    /// # Errors
    /// `Busy` when another disk is moved to the same place; the system's.
    pub async fn remove_hidden<F: Files>(&self, files: &F) -> Result<()> {
        // One that has got its name just before its process was killed may be in use under that.
        if let Ok(store) = files.open(&Locator::from(&self.hidden), OpenMode::ReadOnly).await {
            for name in &self.names {
                if files.is_at(&store, name).await? {
                    return files.remove_file(&store, &self.hidden).await;
                }
            }
        }
        remove_half(files, &self.hidden).await
    }
}

/// Stands between the files in the name of a half.
pub(super) const JOINT: &str = "+";

/// Copies that are whole, and open.
pub(super) struct Held<F: Files> {
    /// The lowest first.
    parents: Vec<LayerOf<F>>,
    /// The place of the topmost one.
    name: PathBuf,
}

impl<F: Files> Held<F> {
    /// The topmost one.
    pub fn top(&self) -> (&LayerOf<F>, &Path) {
        (self.parents.last().expect("a disk whose chain is kept has a parent"), &self.name)
    }
}

fn other_image(name: &Path, parent: &Path, why: &str) -> Error {
    let what = format!("the parent {} gets this name there, and another file has it: {why}", parent.display());
    let hint = "move the disk to another folder; or flatten it there: --chain flatten";
    Error::new(ErrorKind::Exists, what).at_path(name).hint(hint)
}

/// Copies and compares parents.
struct Copier<'a, 'w, F: Files> {
    work: &'a Work<'w, F>,
    parents: &'a Parents,
    source: &'a GraphOf<F>,
    lanes: Lanes<'a, 'w, F>,
}

impl<F: Files> Copier<'_, '_, F> {
    fn count(&self, bytes: u64) {
        self.parents.done_bytes.set(self.parents.done_bytes.get() + bytes);
        self.work.job.set_done(self.parents.done_bytes.get());
    }

    /// Copies the parent `number`, and has the copy get its name. It is a child of `below`, if there is one.
    async fn copy(&self, number: usize, below: Option<&GraphLayerOf<F>>) -> Result<LayerOf<F>> {
        let (files, env, hidden) = (self.work.files, self.work.env, &self.parents.hidden);
        let (name, parent) = (&self.parents.names[number], &self.source.handles()[1 + number]);
        let from = parent.image().store();
        let to = files.create(hidden, from.len_bytes()).await?;
        to.set_copy(true);
        Box::pin(self.copy_file(from, &to)).await?;
        to.sync().await?;
        to.set_copy(false);
        let copy = made_layer(to, env, parent.image().format(), &OpenOptions::default()).await?;
        if let Some(below) = below {
            let named = new_child(&below.info(), copy.image().size_bytes(), &self.parents.names[number + 1])?.parent;
            copy.image().set_parent(named.as_ref()).await?;
        }
        copy.seal().await?;
        copy.image().store().sync().await?;
        let sealed = reopen_layer(files, env, &copy, OpenMode::ReadOnly).await?;
        drop(copy);
        files.copy_access(from, sealed.image().store()).await?;
        if !files.is_at(sealed.image().store(), hidden).await? {
            let what = "the copy of a parent has lost this name: somebody has removed it";
            return Err(Error::new(ErrorKind::Busy, what).at_path(hidden).hint("`spile jobs` shows other moves"));
        }
        if !is_free(files, name).await {
            let what = "another move has put an image of this name there meanwhile";
            return Err(Error::new(ErrorKind::Busy, what).at_path(name).hint("begin the move again: it uses that one"));
        }
        // An image of this name may have been deleted, and merged by other means than a gc.
        Gone::remove(files, name).await?;
        rename_to_free(files, (sealed.image().store(), hidden), name).await.at_path(name)?;
        sealed.image().store().set_path(name);
        Ok(sealed)
    }

    /// Copies what the file `from` has to `to`, which is as long, and all zero.
    async fn copy_file(&self, from: &F::Store, to: &F::Store) -> Result<()> {
        let cursor = async_lock::Mutex::new(FileCursor::default());
        let step = async |lane: &Lane<'_, '_, F>| {
            let next = cursor.lock().await.next(from, lane.piece_bytes()).await?;
            let Some(piece) = next else { return Ok(false) };
            let copy = async {
                let buffer = lane.buffer().slice(0..piece.len_bytes as usize);
                for (part, via) in parts(piece) {
                    let bytes = buffer.slice(0..part.len_bytes as usize);
                    from.read_at(StoreOffset(part.start()), &bytes, via).await?;
                    if !bytes.is_zero() {
                        to.write_at(StoreOffset(part.start()), &bytes, via).await?;
                    }
                }
                Ok(piece.len_bytes)
            };
            lane.piece(copy).await?;
            self.count(piece.len_bytes);
            Ok(true)
        };
        self.lanes.run(step).await
    }

    /// Refuses the image `there`, in the place of the parent `number`, when it does not read as that parent does.
    async fn compare(&self, number: usize, there: &Arc<GraphOf<F>>) -> Result<()> {
        let parent = self.source.with_layers(self.source.handles()[1 + number..].to_vec())?;
        let ends = [Aligned::new(Arc::new(parent)), Aligned::new(there.clone())];
        match compare(&self.lanes, &ends, &|bytes| self.count(bytes), &|| {}).await? {
            Some(at) => {
                let (name, parent) = (&self.parents.names[number], self.source.handles()[1 + number].path());
                Err(other_image(name, parent, &format!("what it shows differs, first about byte {at}")))
            }
            None => Ok(()),
        }
    }
}

/// Where the second one of `ends` first differs from the first one, about; `None` when both show the same. Both are as long. `count` hears of bytes that were compared, and
/// `has_failed` when the second one has failed.
pub(super) async fn compare<F: Files>(
    lanes: &Lanes<'_, '_, F>,
    ends: &[Aligned<Arc<GraphOf<F>>>; 2],
    count: &impl Fn(u64),
    has_failed: &impl Fn(),
) -> Result<Option<u64>> {
    let (cursor, differs_at) = (async_lock::Mutex::new(0), Cell::new(None));
    let failed = |error: Error| {
        has_failed();
        error
    };
    let step = async |lane: &Lane<'_, '_, F>| {
        let most_bytes = (lane.piece_bytes() / 2).max(512);
        let next = {
            let mut at = cursor.lock().await;
            let starts =
                [next_data(ends[0].inner(), *at).await?, next_data(ends[1].inner(), *at).await.map_err(failed)?];
            let size_bytes = ends[0].inner().size_bytes();
            let next = starts
                .into_iter()
                .flatten()
                .min()
                .map(|start| Extent::from_range(start..size_bytes.min((start / most_bytes + 1) * most_bytes)));
            *at = next.map_or(*at, |piece| piece.end());
            next
        };
        let Some(piece) = next else { return Ok(false) };
        let compare = async {
            let len = piece.len_bytes as usize;
            let both = [lane.buffer().slice(0..len), lane.buffer().slice(len..2 * len)];
            ends[0].read(piece, &both[0]).await?;
            ends[1].read(piece, &both[1]).await.map_err(failed)?;
            if both[0].to_vec() != both[1].to_vec() {
                differs_at.set(Some(piece.start()));
            }
            Ok(piece.len_bytes)
        };
        lane.piece(compare).await?;
        count(piece.len_bytes);
        Ok(differs_at.get().is_none())
    };
    lanes.run(step).await?;
    Ok(differs_at.get())
}

type GraphLayerOf<F> = spile_image::GraphLayer<<F as Files>::Store>;

/// Where `disk` has data from `at` on.
async fn next_data<S: Store>(disk: &Graph<S>, mut at: u64) -> Result<Option<u64>> {
    while at < disk.size_bytes() {
        for run in disk.extents(Extent::from_range(at..disk.size_bytes()), RUNS_AT_ONCE).await? {
            if run.kind == ExtentKind::Data {
                return Ok(Some(run.extent.start()));
            }
            at = run.extent.end();
        }
    }
    Ok(None)
}

/// How far a file is copied.
#[derive(Default)]
struct FileCursor {
    at: u64,
    /// The run of data that was found last.
    data: Option<Extent>,
}

impl FileCursor {
    /// The next piece that has data, at most `most_bytes` long.
    async fn next<S: Store>(&mut self, file: &S, most_bytes: u64) -> Result<Option<Extent>> {
        let len_bytes = file.len_bytes();
        while self.at < len_bytes {
            let Some(data) = self.data.filter(|data| data.end() > self.at) else {
                let run = file.extent_at(StoreOffset(self.at)).await?;
                let end = len_bytes.min(self.at + run.len_bytes.max(1));
                match run.is_hole {
                    true => self.at = end,
                    false => self.data = Some(Extent::from_range(self.at..end)),
                }
                continue;
            };
            let start = self.at / PAGE_BYTES * PAGE_BYTES;
            let end = data.end().next_multiple_of(PAGE_BYTES).min((start / most_bytes + 1) * most_bytes).min(len_bytes);
            self.at = end;
            return Ok(Some(Extent::from_range(start..end)));
        }
        Ok(None)
    }
}

/// The parts of a piece of a file, whole pages and the rest at the end of the file, with the ways to them: no page is written by both.
fn parts(piece: Extent) -> impl Iterator<Item = (Extent, Via)> {
    let middle = piece.end() / PAGE_BYTES * PAGE_BYTES;
    let parts = [
        (piece.start()..middle.max(piece.start()), Via::Direct),
        (middle.max(piece.start())..piece.end(), Via::Cached),
    ];
    parts.into_iter().filter(|(range, _)| !range.is_empty()).map(|(range, via)| (Extent::from_range(range), via))
}
