//! [`Noted`]: what jobs have noted of a disk's changes, under names that no user sees, in its file of changed blocks.

use std::cell::RefCell;
use std::ops::Range;
use std::path::{Path, PathBuf};

use spile_core::{ErrorKind, Extent, Result};
use spile_image::Graph;
use spile_life::{Later, Marks};
use spile_node::Node;
use spile_store::HostStore;

use crate::checkpoints::{Carrying, Checkpoints};
use crate::look;

/// A disk and its checkpoints.
pub(crate) struct Noted<'d> {
    node: &'d Node<Graph<HostStore>>,
    checkpoints: &'d Checkpoints,
    /// The checkpoints are beside another image, too.
    carrying: RefCell<Option<Carrying<'d>>>,
}

impl<'d> Noted<'d> {
    pub fn new(node: &'d Node<Graph<HostStore>>, checkpoints: &'d Checkpoints) -> Self {
        Self { node, checkpoints, carrying: RefCell::default() }
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
        Box::pin(async move {
            self.end(to).await?;
            self.checkpoints.rename(name, to).await
        })
    }

    fn carry<'a>(&'a self, half: &'a Path, to: &'a Path, since: Option<&'a str>) -> Later<'a, bool> {
        Box::pin(async move {
            let carrying = self.checkpoints.carry(self.node, half, to, since).await?;
            let is_some = carrying.is_some();
            self.carrying.replace(carrying);
            Ok(is_some)
        })
    }

    fn carried<'a>(&'a self, is_there: bool) -> Later<'a, ()> {
        Box::pin(async move {
            let carrying = self.carrying.take();
            match carrying {
                Some(carrying) => self.checkpoints.carried(self.node, carrying, is_there).await,
                None => Ok(()),
            }
        })
    }

    fn look<'a>(&'a self, paths: &'a [PathBuf]) -> Later<'a, Option<String>> {
        Box::pin(async move { Ok(look::at_paths(paths).await) })
    }
}
