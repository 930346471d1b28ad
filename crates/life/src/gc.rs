//! What becomes of images that were deleted while they had a child ([`crate::gone`]), and of what was broken off.
//!
//! Nothing goes that is not proven to be of no use. Of an image that was deleted nothing is lost: its only child, when that is a disk's own
//! image, is merged into it. Everything else waits, and says why.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use spile_core::{Env, Error, ErrorKind, Files, Locator, OpenMode, Result};
use spile_image::{Format, Graph, LayerInfo, MAX_LAYERS, describe};
use spile_node::Node;

use crate::gone::Gone;
use crate::jobs::{Note, Plan, Wishes, which};
use crate::snapshot::remove_if_there;
use crate::work::is_no_image;
use crate::{merge, names};

/// What the collection works with.
#[derive(Clone, Copy)]
pub struct Tools<'a, F: Files> {
    /// Where the images are.
    pub files: &'a F,
    /// The same files, opened without locks: for images of others, which are only asked.
    pub asking: &'a F,
    /// Clock and randomness.
    pub env: &'a Arc<dyn Env>,
}

/// Who is whose child among the images of a folder. Only their names say which files are images: a guest can write what looks like one into
/// a raw disk. A half that is on its way here, under a hidden name, is a child as every other one ([`names::disk_of_half`]).
#[derive(Debug, Default)]
pub struct Family {
    /// The children of each image, by its canonical path.
    children: BTreeMap<PathBuf, Vec<PathBuf>>,
    /// What an image could not be asked for. It may be a child of any other.
    unread: Option<String>,
}

impl Family {
    /// Asks `paths`, the files of a folder, for their parents. They may be in use.
    pub async fn ask<F: Files>(tools: &Tools<'_, F>, paths: &[PathBuf]) -> Self {
        let mut family = Self::default();
        for path in paths {
            let Some(format) = names::format_of(path).filter(|format| format.about().has_parents) else {
                continue;
            };
            match named_parents(tools.asking, path, format).await {
                Ok(parents) => {
                    for parent in parents {
                        let children = family.children.entry(parent).or_default();
                        children.push(path.clone());
                        children.dedup();
                    }
                }
                // An image that makes no sense cannot be used as a child either. What the storage does not give may be a child.
                Err(error) if is_no_image(error.kind()) => {}
                Err(error) => family.unread = Some(error.at_path(path).to_string()),
            }
        }
        family
    }

    /// The images that name the one at `image`, a canonical path, as their parent.
    ///
    /// # Errors
    /// `Denied` when an image could not be asked.
    pub fn children_of(&self, image: &Path) -> Result<&[PathBuf]> {
        match &self.unread {
            Some(why) => {
                let what = format!("an image in its folder may be a child of this one, and cannot be read: {why}");
                Err(Error::new(ErrorKind::Denied, what).at_path(image).hint("make it readable, or move it elsewhere"))
            }
            None => Ok(self.children.get(image).map_or(&[], |children| &children[..])),
        }
    }
}

/// The files that the image at `path` names as its parent, as far as they are there.
async fn named_parents<F: Files>(asking: &F, path: &Path, format: Format) -> Result<Vec<PathBuf>> {
    let store = asking.open(&path.into(), OpenMode::ReadOnly).await?;
    let Some(named) = format.named_parent(&store).await? else { return Ok(Vec::new()) };
    let folder = path.parent().unwrap_or(Path::new("/"));
    let mut found = Vec::new();
    for name in named.names {
        if let Ok(parent) = asking.canonical(&folder.join(name)).await {
            found.push(parent);
        }
    }
    Ok(found)
}

/// What is to be done with an image that was deleted while it had a child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Its only child, the leaf of this disk, is merged into it.
    Merge(PathBuf),
    /// The image is gone, or is another one by now: the note says nothing.
    Stale,
    /// Nothing, for this reason.
    Waits {
        /// Why.
        why: String,
        /// The disk whose merge into images that were deleted, too, may change that.
        disk: Option<PathBuf>,
    },
}

impl Verdict {
    fn waits(why: impl Into<String>) -> Self {
        Self::Waits { why: why.into(), disk: None }
    }
}

/// Judges the image at `image`, which has a note.
///
/// # Errors
/// The storage's: then nothing is known.
pub async fn verdict<F: Files>(tools: &Tools<'_, F>, family: &Family, image: &Path) -> Result<Verdict> {
    let asking = tools.asking;
    let identity = match described(tools, image, None).await {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Verdict::Stale),
        // Another image may be made under this name right now.
        Err(error) if is_no_image(error.kind()) => return Ok(Verdict::waits(error.to_string())),
        described => described?.identity,
    };
    let Some(gone) = Gone::read(asking, image).await? else {
        return Ok(Verdict::waits("the note beside it is not whole, or of another version: delete it again"));
    };
    if identity != Some(gone.identity) {
        return Ok(Verdict::Stale);
    }
    if asking.canonical(image).await? != image {
        return Ok(Verdict::waits("its name is a link: what it leads to lies in another place"));
    }
    let shown = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let child = match family.children_of(image)? {
        [child] => child,
        // The child may have moved: that nothing is found proves nothing.
        [] => {
            return Ok(Verdict::waits("no child of it is in this folder any more: delete it again if nobody needs it"));
        }
        several => {
            let names: Vec<_> = several.iter().map(|child| shown(child)).collect();
            return Ok(Verdict::waits(format!("it has several children now: {}", names.join(", "))));
        }
    };
    if names::disk_of_half(child).is_some() {
        let what = format!("its child {} is being moved, and has no name of its own yet", shown(child));
        return Ok(Verdict::waits(what));
    }
    if described(tools, child, None).await?.identity != Some(gone.child) {
        let now = shown(child);
        let why = format!("its child was another one when it was deleted, and is {now} now: delete it again");
        return Ok(Verdict::waits(why));
    }
    Ok(match family.children_of(child)? {
        [] => Verdict::Merge(child.clone()),
        _ => {
            let why = format!("its child {} is a parent itself, and keeps its name", shown(child));
            Verdict::Waits { why, disk: disk_above(asking, family, child).await? }
        }
    })
}

/// The disk whose leaf is to be merged into `image`, when that was deleted, and all images between were, too.
async fn disk_above<F: Files>(asking: &F, family: &Family, image: &Path) -> Result<Option<PathBuf>> {
    let mut image = image;
    for _ in 0..MAX_LAYERS {
        image = match family.children_of(image)? {
            [] => return Ok(names::disk_of_half(image).is_none().then(|| image.to_owned())),
            [child] if asking.canonical(&names::gone(image)).await.is_ok() => child,
            _ => return Ok(None),
        };
    }
    Ok(None)
}

/// What there is to know of one image without its parents.
pub(crate) async fn described<F: Files>(
    tools: &Tools<'_, F>,
    image: &Path,
    format: Option<Format>,
) -> Result<LayerInfo> {
    Ok(describe(tools.asking, tools.env.clone(), Locator::from(image), format).await?.layer)
}

/// What is there to be done, or to be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An image that was deleted while it had a child.
    Deleted,
    /// A job that is not finished.
    Job,
    /// A file of a snapshot, or of the note of a job, that was broken off.
    HalfMade,
    /// The note of an image that is gone, or of a set that it was of.
    StaleNote,
}

/// One thing that nobody needs, or that is not finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// What it is.
    pub kind: Kind,
    /// The image, or the file.
    pub path: PathBuf,
    /// The disk to open for it; for a note that says nothing, the image that it is of.
    pub disk: Option<PathBuf>,
    /// Why it waits.
    pub why: Option<String>,
}

/// What there is to do among `paths`, the files of a folder, canonical. What cannot be judged waits, and says why.
pub async fn look<F: Files>(tools: &Tools<'_, F>, paths: &[PathBuf]) -> Vec<Found> {
    let family = match paths.iter().any(|path| names::is_gone(path)) {
        true => Family::ask(tools, paths).await,
        false => Family::default(),
    };
    let mut found = Vec::new();
    for path in paths {
        let Some(disk) = names::disk_of(path) else { continue };
        if names::is_gone(path) {
            found.push(deleted(tools, &family, path, &disk).await);
        } else if *path == names::set(&disk) {
            if !paths.contains(&disk) {
                found.push(Found { kind: Kind::StaleNote, path: path.clone(), disk: Some(disk), why: None });
            }
        } else if let Some(kind) = kind_of(path, &disk) {
            let is_there = tools.asking.canonical(&disk).await.is_ok();
            let why = match is_there {
                true if kind == Kind::Job => waits_because(tools.asking, &disk).await,
                true => None,
                false => Some("its disk is gone: nobody can tell whether the file is of use".to_owned()),
            };
            found.push(Found { kind, path: path.clone(), disk: is_there.then_some(disk), why });
        }
    }
    found
}

fn kind_of(path: &Path, disk: &Path) -> Option<Kind> {
    match path {
        path if path == names::job(disk) => Some(Kind::Job),
        path if path == names::new_leaf(disk) || path == names::new_job(disk) => Some(Kind::HalfMade),
        _ => None,
    }
}

async fn deleted<F: Files>(tools: &Tools<'_, F>, family: &Family, note: &Path, image: &Path) -> Found {
    let (kind, path) = (Kind::Deleted, image.to_owned());
    match verdict(tools, family, image).await {
        Ok(Verdict::Merge(leaf)) => Found { kind, path, disk: Some(leaf), why: None },
        Ok(Verdict::Stale) => {
            Found { kind: Kind::StaleNote, path: note.to_owned(), disk: Some(image.to_owned()), why: None }
        }
        Ok(Verdict::Waits { why, disk }) => Found { kind, path, disk, why: Some(why) },
        Err(error) => Found { kind, path, disk: None, why: Some(error.to_string()) },
    }
}

/// Removes the notes of `image` when they say nothing. `paths` are the files of its folder.
///
/// # Errors
/// The storage's.
pub async fn tidy<F: Files>(tools: &Tools<'_, F>, paths: &[PathBuf], image: &Path) -> Result<()> {
    if !paths.iter().any(|path| path == image) {
        remove_if_there(tools.files, &names::set(image)).await?;
    }
    match tools.asking.canonical(&names::gone(image)).await {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        there => there?,
    };
    match verdict(tools, &Family::ask(tools, paths).await, image).await? {
        Verdict::Stale => Gone::remove(tools.files, image).await,
        Verdict::Merge(_) | Verdict::Waits { .. } => Ok(()),
    }
}

/// The deleted image that the disk at `disk`, a leaf, is to be merged into now. `paths` are the files of its folder.
///
/// # Errors
/// The storage's.
pub async fn deleted_parent<F: Files>(tools: &Tools<'_, F>, paths: &[PathBuf], disk: &Path) -> Result<Option<PathBuf>> {
    let Some(format) = Format::from_extension(disk) else { return Ok(None) };
    // The disk may be in use, and grow or shrink while it is read.
    let torn = |error: Error| match is_no_image(error.kind()) {
        true => Error::new(ErrorKind::Busy, format!("the image was being changed while it was read: {error}")),
        false => error,
    };
    for parent in named_parents(tools.asking, disk, format).await.map_err(torn)? {
        if tools.asking.canonical(&names::gone(&parent)).await.is_err() {
            continue;
        }
        let verdict = verdict(tools, &Family::ask(tools, paths).await, &parent).await?;
        return Ok((verdict == Verdict::Merge(disk.to_owned())).then_some(parent));
    }
    Ok(None)
}

/// Notes that the merge into `image`, which was deleted, begins. False when its user has taken that back.
///
/// # Errors
/// `Busy` while its user does; the system's.
pub async fn begin_merge<F: Files>(tools: &Tools<'_, F>, image: &Path) -> Result<bool> {
    Gone::begin_merge(tools.files, tools.asking, image).await
}

/// Does what there is to do for the disk `node`, which is open for writing here: goes on with its merge or flatten, and merges it into its
/// deleted parents, one after the other. `list` gives the files of the disk's folder, and `run` does a job.
///
/// # Errors
/// `Busy` when the disk has a job that its user has paused, or that takes it elsewhere; the jobs' and the storage's.
pub async fn collect<F: Files>(
    tools: &Tools<'_, F>,
    node: &Node<Graph<F::Store>>,
    list: impl AsyncFn() -> Result<Vec<PathBuf>>,
    run: impl AsyncFn(Plan, Wishes) -> Result<()>,
) -> Result<()> {
    let graph = node.graph().await;
    let (leaf, which) = (graph.handles()[0].clone(), which(&graph));
    drop(graph);
    let disk = leaf.path().to_owned();
    match Note::read(tools.files, &disk).await? {
        // Another disk of that name has left it.
        Some(note) if !note.is_of(which) => Plan::remove(tools.files, &disk).await?,
        Some(Note { plan, wishes, .. }) => {
            refuse_other(&disk, &plan, wishes.is_paused)?;
            run(plan, wishes).await?;
        }
        None => {}
    }
    drop(leaf);
    // Nobody writes a note of a job but who has the disk open for writing.
    remove_if_there(tools.files, &names::new_job(&disk)).await?;
    while let Some(parent) = deleted_parent(tools, &list().await?, &disk).await? {
        let graph = node.graph().await;
        if graph.handles().get(1).is_none_or(|layer| layer.path() != parent) {
            return Ok(());
        }
        if !begin_merge(tools, &parent).await? {
            return Ok(());
        }
        let merge = Plan::Coalesce(merge::plan(&graph, None)?);
        drop(graph);
        run(merge, Wishes::default()).await?;
        tidy(tools, &list().await?, &parent).await?;
    }
    Ok(())
}

/// Refuses to go on with what its user has paused, and with what takes a disk elsewhere.
fn refuse_other(disk: &Path, plan: &Plan, is_paused: bool) -> Result<()> {
    let (what, hint) = match plan {
        _ if is_paused => ("the job was paused".to_owned(), "serve the disk, and resume the job"),
        Plan::Coalesce(_) | Plan::Flatten => return Ok(()),
        other => {
            let what = format!("a {} of the disk was broken off", other.kind());
            (what, "serve the disk, and it goes on; or begin the same once more")
        }
    };
    let hint = format!("{hint}; or give it up: `spile job {} cancel`", disk.display());
    Err(Error::new(ErrorKind::Busy, what).at_path(disk).hint(hint))
}

/// Why nothing is done about the job of `disk` that is not finished, if that is so.
async fn waits_because<F: Files>(asking: &F, disk: &Path) -> Option<String> {
    let note = Note::look(asking, disk).await.ok()??;
    refuse_other(disk, &note.plan, note.wishes.is_paused).err().map(|error| error.to_string())
}
