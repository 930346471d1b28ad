//! A disk goes back to what a snapshot holds: a new, empty leaf over the snapshot takes the disk's path in one step. No request is at the disk
//! in that moment. One that is served gets the graph over the new leaf in the same moment.
//!
//! What a served disk's checkpoints have to know comes first of all ([`Back::make_ready`]): by the new leaf the disk gets another content, and no request says so.
//!
//! The new leaf is made as that of a [snapshot](crate::snapshot), and a crash leaves no more: before the rename the disk is as it was, and
//! [`recover`](crate::recover) removes the new leaf.

use std::path::Path;
use std::sync::Arc;

use spile_core::{Disk, Env, Error, ErrorKind, Files, Result, Store};
use spile_image::create::NewImage;
use spile_image::layer::Layer;
use spile_image::{Format, Graph, GraphLayer, OpenOptions, made_layer};
use spile_node::{Node, OldEpoch, close_gates};

use crate::names;
use crate::recover::recover;
use crate::snapshot::{self, Made, Plan, check_extension, child_format, refuse_job, remove_if_there};
use crate::work::{NoteChild, refuse_data_file};

/// The way back of a disk.
pub struct Back<'a, F: Files> {
    /// The files of this host.
    pub files: &'a F,
    /// Random bytes and the time.
    pub env: Arc<dyn Env>,
    /// What the disk is to hold. It is open until this has ended: nobody can delete it or write to it.
    pub base: &'a Graph<F::Store>,
    /// Notes who is whose child.
    pub notes: &'a dyn NoteChild,
    /// The new leaf, a child of that.
    pub new: &'a NewImage,
    /// The format in which the disk is opened, if that was said.
    pub given: Option<Format>,
}

/// Notes what a way back changes of a disk.
pub trait Noting<S: Store> {
    /// While this is there, nobody makes or removes a checkpoint of the disk: one that is made now would not have marked what was noted before.
    type Turn;

    /// What differs between the disk `from` and what it is to be, `to`, counts as changed from now on, durably.
    ///
    /// # Errors
    /// Those of the images; the system's.
    fn note_difference(&self, from: &Graph<S>, to: &Graph<S>) -> impl Future<Output = Result<Self::Turn>>;
}

/// What a disk that is served has got for its way back, and goes on without meanwhile.
pub struct Ready<S: Store, G, T> {
    kept: Option<Kept<S>>,
    leaf: Arc<GraphLayer<S>>,
    /// The graph that the disk is to have.
    graph: Arc<G>,
    /// Nobody makes or removes checkpoints.
    _turn: T,
}

/// The snapshot of what the disk held, and the graph over it that the disk did not get.
pub type Kept<S> = (Made<S>, Graph<S>);

impl<S: Store, G, T> Ready<S, G, T> {
    /// The graph that the disk has got, and what was kept of what it held before. From now on others may make checkpoints.
    pub fn into_parts(self) -> (Arc<G>, Option<Kept<S>>) {
        (self.graph, self.kept)
    }

    /// The graph that the disk is to have.
    pub fn graph(&self) -> &Arc<G> {
        &self.graph
    }
}

/// What the path of a disk leads to whose graph is `before`.
fn now<'a, S: Store>(before: &'a Graph<S>, kept: Option<&'a Kept<S>>) -> &'a Graph<S> {
    kept.map_or(before, |(_, over)| over)
}

/// Why a disk that is served has not gone back.
pub enum Failure {
    /// It is as it was, and goes on.
    AsItWas(Error),
    /// Its storage has failed while its path changed. Nobody knows which image that names after a power cut, so the disk was closed: what guests wrote from
    /// then on could be lost.
    Closed(Error),
}

impl<F: Files> Back<'_, F> {
    /// Has the disk `graph`, which is open for writing here and nowhere else, go back. What its leaf holds is lost, unless the file has another name.
    ///
    /// # Errors
    /// `InvalidInput` when the snapshot needs the disk's own leaf; `Unsupported` when the disk's path would belie the new leaf's format;
    /// `NotFound` when the disk's file is not at its path; `Busy` while a job on the disk is not finished; the storage's. The disk is as it
    /// was then, unless the hint says that it has gone back: when the storage has failed behind the change of its path.
    pub async fn revert(&self, graph: &Graph<F::Store>) -> Result<()> {
        let (_, new) = self.prepare(graph).await?;
        self.place(graph, &new).await
    }

    /// Makes all that a disk needs which is to go back while it is served, and which goes on meanwhile. `before` is its graph; what it holds is kept by the
    /// snapshot `keep`. `options` are those for the new leaf; `wrap` makes the disk's graph of it and what is below. What the disk's requests change from now on
    /// is noted by themselves, and lies in what is kept or lost.
    ///
    /// # Errors
    /// As [`Back::revert`], [`snapshot::prepare`] and [`Noting::note_difference`]. The disk is as it was then, unless the error says that what it held could not
    /// be taken back.
    pub async fn make_ready<G: Disk, N: Noting<F::Store>>(
        &self,
        before: &Graph<F::Store>,
        keep: Option<&Plan>,
        noting: &N,
        options: &OpenOptions,
        wrap: impl FnOnce(Graph<F::Store>) -> G,
    ) -> Result<Ready<F::Store, G, N::Turn>> {
        let turn = noting.note_difference(before, self.base).await?;
        let kept = match keep {
            Some(plan) => {
                Some(snapshot::prepare(self.files, self.env.clone(), self.notes, before, plan).await?.into_parts())
            }
            None => None,
        };
        match self.make_leaf(now(before, kept.as_ref()), options, wrap).await {
            Ok((leaf, graph)) => Ok(Ready { kept, leaf, graph, _turn: turn }),
            Err(error) => Err(self.without_kept(kept.as_ref(), error).await),
        }
    }

    async fn make_leaf<G: Disk>(
        &self,
        now: &Graph<F::Store>,
        options: &OpenOptions,
        wrap: impl FnOnce(Graph<F::Store>) -> G,
    ) -> Result<(Arc<GraphLayer<F::Store>>, Arc<G>)> {
        let (format, store) = self.prepare(now).await?;
        let options = OpenOptions { format: Some(format), read_only: false, ..options.clone() };
        let made = async {
            let leaf = made_layer(store, &self.env, format, &options).await?;
            let graph = Arc::new(wrap(self.base.with_leaf(leaf.clone()).await?));
            Ok((leaf, graph))
        };
        match made.await {
            Ok(made) => Ok(made),
            Err(error) => Err(self.given_up(now, error).await),
        }
    }

    /// Removes the new leaf, because of `error`, which is returned. What cannot be removed goes when the disk is opened next.
    async fn given_up(&self, now: &Graph<F::Store>, error: Error) -> Error {
        let _ = remove_if_there(self.files, &names::new_leaf(now.handles()[0].path())).await;
        error
    }

    /// Takes back the snapshot of what the disk holds, if there is one, because of `error`, which is returned.
    async fn without_kept(&self, kept: Option<&Kept<F::Store>>, error: Error) -> Error {
        match kept {
            Some((made, _)) => taken_back(error, self.files, made).await,
            None => error,
        }
    }

    /// Removes what was made ready for the disk whose graph is `before`, and which has not gone back because of `failure`. The error says what could not be
    /// removed, and what the disk is.
    pub async fn take_back<G, T>(
        &self,
        before: &Graph<F::Store>,
        ready: Ready<F::Store, G, T>,
        failure: Failure,
    ) -> Error {
        let error = match failure {
            Failure::AsItWas(error) => error,
            // The path names an image that is whole. Another change of names could make it worse.
            Failure::Closed(error) => return error,
        };
        let kept = ready.kept.as_ref();
        let error = self.given_up(now(before, kept), error).await;
        self.without_kept(kept, error).await
    }

    /// Has the disk `node`, whose graph is `before`, go back. No request may be at it: they are held back, and those that began before have ended.
    ///
    /// # Errors
    /// The storage's; `InvalidInput` when the new graph does not fit the disk, such as one of another size.
    pub async fn exchange<G: Disk, T>(
        &self,
        node: &Node<G>,
        before: &Graph<F::Store>,
        ready: &Ready<F::Store, G, T>,
    ) -> Result<OldEpoch<G>, Failure> {
        let now = now(before, ready.kept.as_ref());
        let (files, old) = (self.files, &now.handles()[0]);
        let path = old.path().to_owned();
        let gates = match close_gates(vec![(node, ready.graph.clone())]).await {
            Ok(gates) => gates,
            Err(error) => return Err(Failure::AsItWas(self.given_up(now, error).await)),
        };
        let new = ready.leaf.image().store();
        let Err(error) = self.place(now, new).await else {
            ready.leaf.image().store().set_path(&path);
            let mut old = gates.open();
            return Ok(old.remove(0));
        };
        // Where another file has the path, that was not replaced: nothing has changed.
        let is_as_it_was = files.is_at(old.image().store(), &path).await.unwrap_or(false)
            || files.is_at(new, &path).await.is_ok_and(|is_new| !is_new);
        if is_as_it_was {
            return Err(Failure::AsItWas(error));
        }
        drop(gates);
        // What it says does not matter any more.
        let _ = node.close().await;
        let hint = "the disk was closed, because a power cut could take away what is written from now on; attach it again when its storage is in order. \
                    It has gone back then, or holds what it held";
        Err(Failure::Closed(error.at_path(&path).hint(hint)))
    }

    /// Makes the new leaf, under [`names::new_leaf`], durably. Returns its format and its file.
    async fn prepare(&self, graph: &Graph<F::Store>) -> Result<(Format, F::Store)> {
        let (files, leaf) = (self.files, graph.handles()[0].clone());
        let (disk, store) = (leaf.path().to_owned(), leaf.image().store());
        refuse_job(files, &disk).await?;
        refuse_data_file(
            &leaf,
            "a disk that goes back would leave that file behind",
            "make a snapshot of the disk first, and go back then: spile snapshot",
        )?;
        for layer in self.base.handles() {
            if files.is_at(store, layer.path()).await? {
                let what = format!("{} needs what would be lost: it is {0} itself, or a child of it", disk.display());
                return Err(Error::new(ErrorKind::InvalidInput, what).at_path(layer.path()));
            }
        }
        let format = child_format(self.base.handles()[0].image().format());
        check_extension(&disk, self.given, format)?;
        if !files.is_at(store, &disk).await? {
            return Err(Error::new(ErrorKind::NotFound, "the disk's file is not at its path any more").at_path(&disk));
        }
        recover(files, graph).await?;
        match self.make(store, &disk, format).await {
            Ok(new) => Ok((format, new)),
            Err(error) => remove_if_there(files, &names::new_leaf(&disk)).await.and(Err(error)),
        }
    }

    async fn make(&self, old: &F::Store, disk: &Path, format: Format) -> Result<F::Store> {
        let store = self.files.create(&names::new_leaf(disk), 0).await?;
        format.create(&store, &*self.env, self.new).await?;
        self.files.copy_access(old, &store).await?;
        Ok(store)
    }

    /// The new leaf takes the path of the disk `graph`, durably. When that fails, there is no new leaf.
    async fn place(&self, graph: &Graph<F::Store>, new: &F::Store) -> Result<()> {
        let (files, leaf) = (self.files, graph.handles()[0].clone());
        let (disk, store) = (leaf.path().to_owned(), leaf.image().store());
        let new_leaf = names::new_leaf(&disk);
        match files.rename_file((new, &new_leaf), (&disk, Some(store))).await {
            Ok(()) => Ok(()),
            // The rename was done, and what failed came behind it.
            Err(error) if files.is_at(new, &disk).await? => {
                let hint =
                    "the disk has gone back, but a power cut may undo that: do it again when the storage is in order";
                Err(error.at_path(&disk).hint(hint))
            }
            Err(error) => remove_if_there(files, &new_leaf).await.and(Err(error)),
        }
    }
}

/// Takes back the snapshot `made` of what a disk holds that could not go back, because of `error`, which is returned. It says it when that fails, too.
pub async fn taken_back<F: Files>(error: Error, files: &F, made: &Made<F::Store>) -> Error {
    match snapshot::take_back(files, made).await {
        Ok(()) => error,
        Err(left) => {
            let kept = made.plan().snapshot().display();
            error.hint(format!("what the disk held is in {kept}, which could not be taken back ({left})"))
        }
    }
}
