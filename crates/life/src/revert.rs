//! A disk goes back to what a snapshot holds: a new, empty leaf over the snapshot takes the disk's path in one step. No request is at the disk
//! in that moment. One that is served gets the graph over the new leaf in the same moment.
//!
//! The new leaf is made as that of a [snapshot](crate::snapshot), and a crash leaves no more: before the rename the disk is as it was, and
//! [`recover`](crate::recover) removes the new leaf.

use std::path::Path;
use std::sync::Arc;

use spile_core::{Disk, Env, Error, ErrorKind, Files, Result, Store};
use spile_image::create::NewImage;
use spile_image::layer::Layer;
use spile_image::{Format, Graph, GraphLayer, OpenOptions, open_layer};
use spile_node::{Node, OldEpoch, close_gates};

use crate::names;
use crate::recover::recover;
use crate::snapshot::{check_extension, child_format, refuse_job, remove_if_there};
use crate::work::refuse_data_file;

/// The way back of a disk.
pub struct Back<'a, F: Files> {
    /// The files of this host.
    pub files: &'a F,
    /// Random bytes and the time.
    pub env: Arc<dyn Env>,
    /// What the disk is to hold. It is open until this has ended: nobody can delete it or write to it.
    pub base: &'a Graph<F::Store>,
    /// The new leaf, a child of that.
    pub new: &'a NewImage,
    /// The format in which the disk is opened, if that was said.
    pub given: Option<Format>,
}

/// The new leaf of a disk that is served, and the graph with it on top.
pub struct Ready<S: Store, G> {
    leaf: Arc<GraphLayer<S>>,
    /// The graph that the disk is to have.
    pub graph: Arc<G>,
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
        self.prepare(graph).await?;
        self.place(graph).await
    }

    /// Makes all that a disk needs which is to go back while it is served, and which goes on meanwhile. `now` is what its path leads to. `options` are those
    /// for the new leaf; `wrap` makes the disk's graph of it and what is below.
    ///
    /// # Errors
    /// As [`Back::revert`]. Nothing has changed then.
    pub async fn make_ready<G: Disk>(
        &self,
        now: &Graph<F::Store>,
        options: &OpenOptions,
        wrap: impl FnOnce(Graph<F::Store>) -> G,
    ) -> Result<Ready<F::Store, G>> {
        let format = self.prepare(now).await?;
        let options = OpenOptions { format: Some(format), read_only: false, ..options.clone() };
        let at = names::new_leaf(now.handles()[0].path());
        let ready = async {
            let leaf = open_layer(self.files, self.env.clone(), at.as_path(), &options).await?;
            let graph = Arc::new(wrap(self.base.with_leaf(leaf.clone()).await?));
            Ok(Ready { leaf, graph })
        };
        match ready.await {
            Ok(ready) => Ok(ready),
            Err(error) => Err(self.given_up(now, error).await),
        }
    }

    /// Removes the new leaf that [`Back::make_ready`] has made, because of `error`, which is returned. What cannot be removed goes when the disk is opened next.
    pub async fn given_up(&self, now: &Graph<F::Store>, error: Error) -> Error {
        let _ = remove_if_there(self.files, &names::new_leaf(now.handles()[0].path())).await;
        error
    }

    /// Has the disk `node` go back. No request may be at it: they are held back, and those that began before have ended. `now` is what its path leads to.
    ///
    /// # Errors
    /// The storage's; `InvalidInput` when the new graph does not fit the disk, such as one of another size.
    pub async fn exchange<G: Disk>(
        &self,
        node: &Node<G>,
        now: &Graph<F::Store>,
        ready: &Ready<F::Store, G>,
    ) -> Result<OldEpoch<G>, Failure> {
        let (files, old) = (self.files, &now.handles()[0]);
        let path = old.path().to_owned();
        let gates = match close_gates(vec![(node, ready.graph.clone())]).await {
            Ok(gates) => gates,
            Err(error) => return Err(Failure::AsItWas(self.given_up(now, error).await)),
        };
        let Err(error) = self.place(now).await else {
            ready.leaf.image().store().set_path(&path);
            let mut old = gates.open();
            return Ok(old.remove(0));
        };
        if files.is_at(old.image().store(), &path).await.unwrap_or(false) {
            return Err(Failure::AsItWas(error));
        }
        drop(gates);
        // What it says does not matter any more.
        let _ = node.close().await;
        let hint = "the disk was closed, because a power cut could take away what is written from now on; attach it again when its storage is in order. \
                    It has gone back then, or holds what it held";
        Err(Failure::Closed(error.at_path(&path).hint(hint)))
    }

    /// Makes the new leaf, under [`names::new_leaf`], durably. Returns its format.
    async fn prepare(&self, graph: &Graph<F::Store>) -> Result<Format> {
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
        match self.make(&disk, format).await {
            Ok(()) => Ok(format),
            Err(error) => remove_if_there(files, &names::new_leaf(&disk)).await.and(Err(error)),
        }
    }

    async fn make(&self, disk: &Path, format: Format) -> Result<()> {
        let at = names::new_leaf(disk);
        let store = self.files.create(&at, 0).await?;
        format.create(&store, &*self.env, self.new).await?;
        drop(store);
        self.files.copy_access(disk, &at).await
    }

    /// The new leaf takes the path of the disk `graph`, durably. When that fails, there is no new leaf.
    async fn place(&self, graph: &Graph<F::Store>) -> Result<()> {
        let (files, leaf) = (self.files, graph.handles()[0].clone());
        let (disk, store) = (leaf.path().to_owned(), leaf.image().store());
        let new_leaf = names::new_leaf(&disk);
        match files.rename(&new_leaf, &disk).await {
            Ok(()) => Ok(()),
            // The rename was done, and what failed came behind it.
            Err(error) if !files.is_at(store, &disk).await? => {
                let hint =
                    "the disk has gone back, but a power cut may undo that: do it again when the storage is in order";
                Err(error.at_path(&disk).hint(hint))
            }
            Err(error) => remove_if_there(files, &new_leaf).await.and(Err(error)),
        }
    }
}
