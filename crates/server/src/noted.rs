//! [`Noted`]: what jobs have noted of a disk's changes, under names that no user sees, in its file of changed blocks.

use std::cell::RefCell;
use std::ops::Range;
use std::path::{Path, PathBuf};

use spile_core::{ErrorKind, Extent, Files, Result};
use spile_image::Graph;
use spile_life::{Later, Marks, Put};
use spile_node::Node;
use spile_store::{HostStore, OsFiles};

use crate::checkpoints::{Carrying, Checkpoints, MutexGuardOfTurns};
use crate::look;

/// A disk and its checkpoints.
pub(crate) struct Noted<'d> {
    node: &'d Node<Graph<HostStore>>,
    checkpoints: &'d Checkpoints,
    /// The checkpoints are beside another image, too.
    carrying: RefCell<Option<Carrying<'d>>>,
    /// They are to be sent to another host.
    packed: RefCell<Option<Packed>>,
    /// Nobody makes or removes one until they have got there.
    held: RefCell<Option<MutexGuardOfTurns<'d>>>,
}

type Packed = spile_life::changes::Packed<<OsFiles as Files>::Store>;

impl<'d> Noted<'d> {
    pub fn new(node: &'d Node<Graph<HostStore>>, checkpoints: &'d Checkpoints) -> Self {
        let (carrying, packed, held) = (RefCell::default(), RefCell::default(), RefCell::default());
        Self { node, checkpoints, carrying, packed, held }
    }
}

fn unless_missing<T>(result: Result<T>, missing: T) -> Result<T> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(missing),
        other => other,
    }
}

impl Marks for Noted<'_> {
    fn begin<'a>(&'a self, name: &'a str) -> Later<'a, ()> {
        Box::pin(async move {
            self.end(name).await?;
            self.checkpoints.make_hidden(self.node, name).await
        })
    }

    fn names(&self) -> Later<'_, Vec<String>> {
        Box::pin(async move { Ok(self.checkpoints.hidden().await) })
    }

    fn are_seen(&self) -> bool {
        !self.checkpoints.names().is_empty()
    }

    fn changed<'a>(&'a self, name: &'a str, within: Range<u64>) -> Later<'a, Option<Vec<Extent>>> {
        Box::pin(async move {
            let changed = self.checkpoints.changed(self.node, name, None, within).await;
            unless_missing(changed.map(|changed| changed.warning.is_none().then_some(changed.ranges)), None)
        })
    }

    fn end<'a>(&'a self, name: &'a str) -> Later<'a, ()> {
        Box::pin(async move { unless_missing(self.checkpoints.remove(self.node, name).await, ()) })
    }

    fn rename<'a>(&'a self, name: &'a str, to: &'a str) -> Later<'a, ()> {
        Box::pin(async move { self.checkpoints.rename(self.node, name, to).await })
    }

    fn carry<'a>(&'a self, half: &'a Path, to: &'a Path, since: Option<&'a str>) -> Later<'a, bool> {
        Box::pin(async move {
            let (carrying, carried) = self.checkpoints.carry(self.node, half, to, since).await;
            let has_some = carrying.has_some();
            self.carrying.replace(Some(carrying));
            carried.map(|()| has_some)
        })
    }

    fn carried<'a>(&'a self, is_there: bool) -> Later<'a, ()> {
        Box::pin(async move {
            // What was sent to another host stays here, too, until the disk is closed. Nobody may take it for that of the old image.
            let is_elsewhere = self.held.take().is_some();
            drop(self.packed.take());
            if is_there && is_elsewhere {
                self.checkpoints.note_elsewhere().await?;
            }
            let carrying = self.carrying.take();
            match carrying {
                Some(carrying) => self.checkpoints.carried(self.node, carrying, is_there).await,
                None => Ok(()),
            }
        })
    }

    fn pack<'a>(&'a self, since: Option<&'a str>, goes: bool) -> Later<'a, Option<u64>> {
        Box::pin(async move {
            let (guard, packed) = self.checkpoints.pack(self.node, since, goes).await?;
            let len_bytes = packed.as_ref().map(Packed::len_bytes);
            self.held.replace(Some(guard));
            self.packed.replace(packed);
            Ok(len_bytes)
        })
    }

    fn send<'a>(&'a self, put: Put<'a>) -> Later<'a, ()> {
        Box::pin(async move {
            let packed = self.packed.take();
            match packed {
                Some(packed) => packed.send(put).await,
                None => Ok(()),
            }
        })
    }

    fn look<'a>(&'a self, paths: &'a [PathBuf]) -> Later<'a, Option<String>> {
        Box::pin(async move { Ok(look::of_old_image(paths).await) })
    }
}
