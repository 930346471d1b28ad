//! Naming another parent, or none, while the image may be in use.
//!
//! The name of the backing file and its format are in the first cluster, and nowhere else: `first_cluster` says in which order that is written.
//! When the host or the process ends meanwhile, the image names the old parent by the old format, or the new one by the new format. Where
//! there is no room otherwise, the names of features are left out, which serve messages only; and when that does not suffice, the image
//! keeps its parent.
//!
//! Without a parent nothing else is to be done: clusters and subclusters that the image does not have read as zeroes then, for every
//! program.

use spile_core::{Error, ErrorKind, Result, ResultExt, Store};

use super::Qcow2;
use super::codec::extension::{Extension, kind};
use super::create::backing_name;
use super::first_cluster::{Change, change};
use super::open::{Head, read_head};
use crate::create::NewParent;

/// What to write so that the image of `head` names `parent`, or none.
fn plan(head: &Head, parent: Option<&NewParent>) -> Result<Change> {
    let format = parent.map(|parent| parent.format.backing_name().as_bytes());
    let name = parent.map(backing_name).transpose()?;
    let mut ways = ways(&head.extensions.all, format).into_iter();
    ways.find_map(|all| change(head, head.header.clone(), all, name.as_deref())).ok_or_else(|| {
        let len = name.as_ref().map_or(0, Vec::len);
        let what =
            format!("the image's first cluster has no room for another parent's format and its path of {len} bytes");
        Error::new(ErrorKind::InvalidInput, what)
            .hint("choose a shorter path; or name the parent by qemu-img rebase -u while nobody uses the image")
    })
}

/// The extensions that an image may have whose parent is of the format `format`, the best first.
fn ways(old: &[Extension], format: Option<&[u8]>) -> Vec<Vec<Extension>> {
    let is_format = |extension: &Extension| extension.kind == kind::BACKING_FORMAT;
    let others: Vec<Extension> = old.iter().filter(|extension| !is_format(extension)).cloned().collect();
    // A format without a parent says nothing.
    let Some(format) = format else { return vec![others, old.to_vec()] };
    let new = Extension { kind: kind::BACKING_FORMAT, data: format.to_vec() };
    let mut in_place = old.to_vec();
    in_place.iter_mut().filter(|extension| is_format(extension)).for_each(|extension| *extension = new.clone());
    let first = |others: Vec<Extension>| [vec![new.clone()], others].concat();
    let unnamed = others.iter().filter(|extension| extension.kind != kind::FEATURE_NAMES).cloned().collect();
    let mut ways = vec![first(others), first(unnamed)];
    if old.iter().any(is_format) {
        ways.insert(0, in_place);
    }
    ways
}

impl<S: Store> Qcow2<S> {
    /// Whether the image can name `parent`.
    pub(super) fn check_parent_name(&self, parent: &NewParent) -> Result<()> {
        plan(&self.now.head(), Some(parent)).map(drop).at_path(self.store.path())
    }

    /// Has the image name `parent`, or none.
    pub(super) async fn name_parent(&self, parent: Option<&NewParent>) -> Result<()> {
        let writing = self.writing().await?;
        if parent.is_some() && !self.has_parent() {
            let error = Error::new(ErrorKind::Unsupported, "an image without a parent does not get one");
            return Err(error.at_path(self.store.path()));
        }
        // What was copied here from the parents is durable before they are not there any more.
        self.flush_writing(writing).await?;
        let _alone = writing.header.lock().await;
        writing.check(&self.store)?;
        let change = plan(&read_head(&self.store).await?, parent).at_path(self.store.path())?;
        change.write(&self.store).await?;
        self.now.set_parent(read_head(&self.store).await?);
        Ok(())
    }
}
