//! [`Passages`]: what this host knows of a disk that moves between hosts with its guest, for the servers after this one.
//!
//! A server that is killed and started again does not know that it had handed its disk over, or that the disk had come and its guest was let in. Its
//! clients and guests cannot be asked: one may lie, and keep others from the disk, or let itself in to a disk that is not whole. So it is noted on
//! the host, beside the marks of failed syncs and by the same keys ([`super::failed_syncs`]): in the folder of control sockets, for this boot.
//!
//! A disk that came is open to the guest that was let in there, and to no other one. That guest keeps a secret ([`Pass`]), which is in the note, too.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use spile_core::{Env, Error, ErrorKind, Result};
use spile_engine::OsEnv;
use spile_front_vhost::Pass;
use spile_image::Graph;
use spile_store::HostStore;

use super::failed_syncs::{Known, Marks, boot, known, stores_of};

/// What is noted of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kept {
    /// It was handed over to another host.
    Gone,
    /// It has come, and its guest was let in with this secret.
    Came([u64; 2]),
}

/// The note as a file.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    boot: String,
    born: Option<(i64, u32)>,
    kept: Kept,
}

/// What is known of one disk.
#[derive(Default)]
pub struct Passages {
    pass: Pass,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The disk's leaf; `None` when it has no identity that outlives its server.
    leaf: Option<Known>,
    kept: Option<Kept>,
}

impl Passages {
    /// What is noted of the disk that was opened as `graph`.
    pub fn of(graph: &Graph<HostStore>) -> Arc<Self> {
        let leaf = leaf_of(graph);
        let kept = leaf.as_ref().and_then(look);
        let passages = Self { pass: Pass::default(), state: Mutex::new(State { leaf, kept }) };
        if let Some(Kept::Came(secret)) = kept {
            passages.pass.set(Some(secret));
        }
        Arc::new(passages)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The secret of guests that were let in.
    pub fn pass(&self) -> Pass {
        self.pass.clone()
    }

    /// True when the disk was handed over to another host.
    pub fn is_gone(&self) -> bool {
        self.lock().kept == Some(Kept::Gone)
    }

    /// Notes that the disk is handed over to another host.
    ///
    /// # Errors
    /// When the next server would not know of it.
    pub fn note_gone(&self) -> Result<()> {
        let hint = "the disk is not handed over, as a server that is started after this one would not know of it: see to the folder of control sockets (SPILE_RUN_DIR)";
        self.note(Kept::Gone).map_err(|error| {
            let what = "it cannot be noted that the disk is handed over";
            Error::new(ErrorKind::Io, what).caused_by(error).hint(hint)
        })?;
        self.pass.set(None);
        Ok(())
    }

    /// Notes that guests may use the disk here. The next server lets in by itself those that are let in now.
    pub fn note_here(&self) {
        let bytes = OsEnv.random_16();
        let half = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        let secret = [half(0), half(8)];
        self.pass.set(Some(secret));
        if let Err(error) = self.note(Kept::Came(secret)) {
            tracing::warn!(
                "a server of the disk that is started after this one has its guest wait until `spile resume`, as it cannot be noted that the disk is here: {error}"
            );
        }
    }

    fn note(&self, kept: Kept) -> Result<()> {
        let mut state = self.lock();
        if let Some(leaf) = &state.leaf {
            write(leaf, kept)?;
        }
        state.kept = Some(kept);
        Ok(())
    }

    /// The disk has another leaf now: what is noted goes along.
    pub fn follow(&self, graph: &Graph<HostStore>) {
        let leaf = leaf_of(graph);
        let mut state = self.lock();
        if leaf == state.leaf {
            return;
        }
        let before = std::mem::replace(&mut state.leaf, leaf);
        let Some(kept) = state.kept else { return };
        let noted = state.leaf.iter().try_for_each(|leaf| write(leaf, kept));
        // The old image is a snapshot now, or left behind.
        let removed = before.iter().try_for_each(|(key, _)| Marks::of_passages()?.remove(key));
        if let Err(error) = noted.and(removed) {
            tracing::error!("a server that is started after this one does not know on which host the disk is: {error}");
        }
    }
}

/// Refuses to change a disk that no server has, and that was handed over to another host: its guest goes on there.
///
/// # Errors
/// `Denied`.
pub fn refuse_gone(graph: &Graph<HostStore>) -> Result<()> {
    if leaf_of(graph).as_ref().and_then(look) != Some(Kept::Gone) {
        return Ok(());
    }
    let what = "the disk was handed over to another host, where its guest goes on: nothing is changed here";
    Err(Error::new(ErrorKind::Denied, what).at_path(graph.handles()[0].path()).hint(
        "when it is certain that nobody uses it there: serve it here, and `spile resume` it; an image that nobody needs goes by `spile delete`",
    ))
}

fn leaf_of(graph: &Graph<HostStore>) -> Option<Known> {
    stores_of(&graph.handles()[0]).next().and_then(known)
}

fn write((key, born): &Known, kept: Kept) -> Result<()> {
    Marks::of_passages()?.put(key, &Note { boot: boot(), born: *born, kept })
}

fn look((key, born): &Known) -> Option<Kept> {
    let note: Note = Marks::of_passages().ok()?.read(key)?;
    (note.boot == boot() && note.born == *born).then_some(note.kept)
}
