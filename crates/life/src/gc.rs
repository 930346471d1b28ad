//! What becomes of images that were deleted while they had a child ([`crate::gone`]), and of what was broken off.
//!
//! Nothing goes that is not proven to be of no use. Of an image that was deleted nothing is lost: its only child is merged into it, and it takes the child's
//! name, whether that is a disk's own image or a snapshot that its user keeps. Everything else waits, and says why.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use spile_core::{Env, Error, ErrorKind, Files, Locator, OpenMode, Result};
use spile_image::{Format, Graph, GraphLayer, LayerInfo, MAX_LAYERS, describe};
use spile_node::Node;

use crate::gone::Gone;
use crate::jobs::note::is_there;
use crate::jobs::{Note, Plan, Wishes, which};
use crate::snapshot::remove_if_there;
use crate::work::{is_no_image, is_of_others};
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

/// Who is whose child among the images of a folder. A half that is on its way here, under a hidden name, is a child as every other one
/// ([`names::disk_of_half`]). A file whose name says raw may *claim* a parent, when it begins as a qcow2 image: libvirt's overlays often have such names,
/// and a guest can write that into a raw disk. What is claimed is kept. A claim says nothing else: not which disks there are.
#[derive(Debug, Default)]
pub struct Family {
    /// The children of each image, by its canonical path.
    children: BTreeMap<PathBuf, Vec<PathBuf>>,
    /// A file that claims the image as its parent.
    claims: BTreeMap<PathBuf, PathBuf>,
    /// What an image could not be asked for. It may be a child of any other.
    unread: Option<String>,
}

impl Family {
    /// Asks `paths`, the files of a folder, for their parents, and for files that hold their data. They may be in use.
    pub async fn ask<F: Files>(tools: &Tools<'_, F>, paths: &[PathBuf]) -> Self {
        let mut family = Self::default();
        for path in paths {
            if names::format_of(path) == Some(Format::Raw) {
                family.note_claims(tools, path, paths).await;
                continue;
            }
            let Some(format) = may_have_parent(path) else { continue };
            match named_files(tools.asking, path, format).await {
                Ok(files) if files.is_empty() || holds_data(tools.asking, path, paths).await => {}
                Ok(files) => {
                    for parent in files {
                        let children = family.children.entry(parent).or_default();
                        children.push(path.clone());
                        children.dedup();
                    }
                }
                // An image that makes no sense cannot be used as a child either. What the storage does not give may be a child, and so may be
                // what other programs understand.
                Err(error) if is_no_image(error.kind()) && !is_of_others(error.kind(), format) => {}
                Err(error) => family.unread = Some(error.at_path(path).to_string()),
            }
        }
        family
    }

    async fn note_claims<F: Files>(&mut self, tools: &Tools<'_, F>, path: &Path, all: &[PathBuf]) {
        match named_files(tools.asking, path, Format::Qcow2).await {
            Ok(parents) if parents.is_empty() || holds_data(tools.asking, path, all).await => {}
            Ok(parents) => {
                let others = parents.into_iter().filter(|parent| parent != path);
                self.claims.extend(others.map(|parent| (parent, path.to_owned())));
            }
            // It is a raw disk, or holds what its guest likes.
            Err(error) if is_no_image(error.kind()) => {}
            Err(error) => self.unread = Some(error.at_path(path).to_string()),
        }
    }

    /// The file that claims the image at `image`, a canonical path, as its parent, if there is one.
    pub(crate) fn claimed(&self, image: &Path) -> Option<&Path> {
        self.claims.get(image).map(|path| &**path)
    }

    /// The images that name the one at `image`, a canonical path, as their parent, or as the file that holds their data.
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

/// The format in which the file at `path` is asked for its parent. Its name says that. Of files whose names say no format many are qcow2:
/// other programs take the name of a snapshot for the extension.
pub fn may_have_parent(path: &Path) -> Option<Format> {
    let named = names::format_of(path);
    let is_unnamed = named.is_none() && names::disk_of(path).is_none();
    named.or(is_unnamed.then_some(Format::Qcow2)).filter(|format| format.about().has_parents)
}

/// True when the file at `path`, which says that it needs other files, says nothing: it holds the data of an image among `images`, so its guest has written
/// that. An image is believed by its name alone: what has another name may be a guest's work itself.
pub async fn holds_data<F: Files>(asking: &F, path: &Path, images: &[PathBuf]) -> bool {
    let names_format = |path: &Path| names::format_of(path).filter(|format| format.about().has_parents);
    if names_format(path).is_some() {
        return false;
    }
    let Ok(path) = asking.canonical(path).await else { return false };
    for image in images {
        let Some(format) = names_format(image) else { continue };
        if named_data_file(asking, image, format).await.is_ok_and(|data| data.as_ref() == Some(&path)) {
            return true;
        }
    }
    false
}

/// The files without which the image at `path` is of no use, as far as they are there.
async fn named_files<F: Files>(asking: &F, path: &Path, format: Format) -> Result<Vec<PathBuf>> {
    let mut found = named_parents(asking, path, format).await?;
    found.extend(named_data_file(asking, path, format).await?);
    Ok(found)
}

/// The file that the image at `path` says holds its data, if that is there.
///
/// # Errors
/// The storage's.
pub async fn named_data_file<F: Files>(asking: &F, path: &Path, format: Format) -> Result<Option<PathBuf>> {
    let store = asking.open(&path.into(), OpenMode::ReadOnly).await?;
    let Some(name) = format.named_data_file(&store).await? else { return Ok(None) };
    Ok(asking.canonical(&path.parent().unwrap_or(Path::new("/")).join(name)).await.ok())
}

/// The files that the image at `path` names as its parent, as far as they are there.
pub(crate) async fn named_parents<F: Files>(asking: &F, path: &Path, format: Format) -> Result<Vec<PathBuf>> {
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
    /// Its only child is merged into it.
    Merge {
        /// The child.
        child: PathBuf,
        /// The disks that have both, of which one is to be opened for it. The child itself, when that is a disk's own image. Those come first of which a
        /// job is not finished.
        disks: Vec<PathBuf>,
    },
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
    match judge(tools, family, image).await {
        // Another process merges its relatives right now, and they change their names.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Ok(Verdict::waits(format!("a file of its family has just gone: {error}")))
        }
        judged => judged,
    }
}

async fn judge<F: Files>(tools: &Tools<'_, F>, family: &Family, image: &Path) -> Result<Verdict> {
    let asking = tools.asking;
    let info = match described(tools, image, None).await {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Verdict::Stale),
        // Another image may be made under this name right now.
        Err(error) if is_no_image(error.kind()) => return Ok(Verdict::waits(error.to_string())),
        described => described?,
    };
    let Some(gone) = Gone::read(asking, image).await? else {
        return Ok(Verdict::waits("the note beside it is not whole, or of another version: delete it again"));
    };
    if info.which != Some(gone.identity) {
        // A file that is known by its place only may be a copy, which is half merged, too.
        return Ok(match gone.is_merged && !info.format.has_lasting_identities() {
            true => Verdict::waits(
                "a merge into it was begun with another file of this name, of which it may be a copy: merge its child into it by spile coalesce, or remove the note",
            ),
            false => Verdict::Stale,
        });
    }
    if asking.canonical(image).await? != image {
        return Ok(Verdict::waits("its name is a link: what it leads to lies in another place"));
    }
    let shown = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if let Some(claims) = family.claimed(image) {
        return Ok(Verdict::waits(format!("{} may be a child of it: {}", shown(claims), crate::delete::OF_A_RAW_NAME)));
    }
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
    for image in [image, child] {
        if keeps_data_elsewhere(tools, image).await? {
            return Ok(Verdict::waits(format!("{} keeps its data in another file, and is not merged", shown(image))));
        }
    }
    if described(tools, child, None).await?.which != Some(gone.child) {
        let now = shown(child);
        let why = format!("its child was another one when it was deleted, and is {now} now: delete it again");
        return Ok(Verdict::waits(why));
    }
    let disks = disks_above(asking, family, child).await?;
    let is_deleted = Gone::read(asking, child).await?.is_some_and(|there| there.identity == gone.child);
    Ok(match disks.first() {
        Some(disk) if is_deleted && disk == child => {
            let child = shown(child);
            Verdict::waits(format!("its child {child} was deleted, too, and has none any more: delete {child} again"))
        }
        None => Verdict::waits(format!("no disk of this folder has its child {} among its images", shown(child))),
        Some(disk) if is_deleted => {
            let why = format!("its child {} was deleted, too, and goes first", shown(child));
            Verdict::Waits { why, disk: Some(disk.clone()) }
        }
        Some(_) => Verdict::Merge { child: child.clone(), disks },
    })
}

/// The disks of the folder that have `image` among their images, or are it: those first of which a job is not finished.
async fn disks_above<F: Files>(asking: &F, family: &Family, image: &Path) -> Result<Vec<PathBuf>> {
    let (mut disks, mut asked, mut left) = (Vec::new(), BTreeSet::new(), vec![image]);
    while let Some(next) = left.pop() {
        // Images may name each other.
        if !asked.insert(next) || names::disk_of_half(next).is_some() || next.parent() != image.parent() {
            continue;
        }
        match family.children_of(next)? {
            [] => disks.push(next.to_owned()),
            children => left.extend(children.iter().map(|child| &**child)),
        }
    }
    disks.sort_unstable();
    let mut ordered = Vec::new();
    for disk in disks {
        let is_first = is_there(asking, &names::job(&disk)).await?;
        ordered.insert(if is_first { 0 } else { ordered.len() }, disk);
    }
    Ok(ordered)
}

/// What there is to know of one image without its parents.
pub(crate) async fn described<F: Files>(
    tools: &Tools<'_, F>,
    image: &Path,
    format: Option<Format>,
) -> Result<LayerInfo> {
    Ok(describe(tools.asking, tools.env.clone(), Locator::from(image), format).await?.layer)
}

/// True when the data of the image at `image` lie in another file.
pub(crate) async fn keeps_data_elsewhere<F: Files>(tools: &Tools<'_, F>, image: &Path) -> Result<bool> {
    let described = describe(tools.asking, tools.env.clone(), Locator::from(image), None).await?;
    Ok(described.data_file.is_some())
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
    /// One more name of an image, which a merge has given it and that was broken off ([`names::taking`]).
    SecondName,
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
    /// Other disks that could be opened for it as well.
    pub others: Vec<PathBuf>,
    /// The image that an image that was deleted is merged with.
    pub child: Option<PathBuf>,
    /// Why it waits.
    pub why: Option<String>,
}

impl Found {
    fn of(kind: Kind, path: &Path, disk: Option<PathBuf>, why: Option<String>) -> Self {
        Self { kind, path: path.to_owned(), disk, others: Vec::new(), child: None, why }
    }

    fn with_others(self, others: Vec<PathBuf>) -> Self {
        Self { others, ..self }
    }
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
        if is_of_a_stranger(tools.asking, path, &disk).await {
            continue;
        }
        if names::is_gone(path) {
            found.push(deleted(tools, &family, path, &disk).await);
        } else if *path == names::set(&disk) {
            if !paths.contains(&disk) {
                found.push(Found::of(Kind::StaleNote, path, Some(disk), None));
            }
        } else if *path == names::taking(&disk) {
            let why = needed_because(tools, paths, path, &disk).await;
            let image = why.is_none().then_some(disk);
            found.push(Found::of(Kind::SecondName, path, image, why));
        } else if let Some(kind) = kind_of(path, &disk) {
            let has_disk = tools.asking.canonical(&disk).await.is_ok();
            let why = match has_disk {
                true if kind == Kind::Job => waits_because(tools.asking, &disk).await,
                true => None,
                false => Some("its disk is gone: nobody can tell whether the file is of use".to_owned()),
            };
            found.push(Found::of(kind, path, has_disk.then_some(disk), why));
        }
    }
    found
}

/// True for a file that has the name of a note, and that Spile has not made.
async fn is_of_a_stranger<F: Files>(asking: &F, path: &Path, disk: &Path) -> bool {
    let is_note =
        names::is_gone(path) || [names::set(disk), names::job(disk), names::new_job(disk)].contains(&path.to_owned());
    // What cannot be asked is shown: its error says why.
    is_note && !is_there(asking, path).await.unwrap_or(true)
}

fn kind_of(path: &Path, disk: &Path) -> Option<Kind> {
    match path {
        path if path == names::job(disk) => Some(Kind::Job),
        path if path == names::new_leaf(disk) || path == names::new_job(disk) => Some(Kind::HalfMade),
        _ => None,
    }
}

async fn deleted<F: Files>(tools: &Tools<'_, F>, family: &Family, note: &Path, image: &Path) -> Found {
    let found = |disk, why| Found::of(Kind::Deleted, image, disk, why);
    match verdict(tools, family, image).await {
        Ok(Verdict::Merge { child, disks }) => {
            let mut disks = disks.into_iter();
            Found { child: Some(child), ..found(disks.next(), None) }.with_others(disks.collect())
        }
        Ok(Verdict::Stale) => Found::of(Kind::StaleNote, note, Some(image.to_owned()), None),
        Ok(Verdict::Waits { why, disk }) => found(disk, Some(why)),
        Err(error) => found(None, Some(error.to_string())),
    }
}

/// Why the name `taking`, which is to become `image`'s, has to stay, if that is so. Nothing is lost with it when its file has another name. `paths` are the files of the folder.
async fn needed_because<F: Files>(
    tools: &Tools<'_, F>,
    paths: &[PathBuf],
    taking: &Path,
    image: &Path,
) -> Option<String> {
    let shown = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    for path in paths {
        let Some(disk) = names::disk_of(path).filter(|disk| *path == names::job(disk)) else { continue };
        match Note::look(tools.asking, &disk).await {
            Ok(Some(Note { plan: Plan::Coalesce(merged), .. })) if merged.path == image => {
                return Some(format!("the merge of {} that gives its file this name was begun", shown(&disk)));
            }
            Ok(_) => {}
            Err(error) => return Some(format!("the note of a job of {} cannot be read: {error}", shown(&disk))),
        }
    }
    let has_other = async || -> Result<bool> {
        let store = tools.asking.open(&taking.into(), OpenMode::ReadOnly).await?;
        for path in paths.iter().filter(|path| *path != taking) {
            if tools.asking.is_at(&store, path).await? {
                return Ok(true);
            }
        }
        Ok(false)
    };
    match has_other().await {
        Ok(true) => None,
        Ok(false) => Some("its file has no other name in this folder: look what it is, and rename it".to_owned()),
        Err(error) => Some(error.to_string()),
    }
}

/// Removes the notes of `image` when they say nothing, and a name that a merge has left of it. `paths` are the files of its folder.
///
/// # Errors
/// The storage's.
pub async fn tidy<F: Files>(tools: &Tools<'_, F>, paths: &[PathBuf], image: &Path) -> Result<()> {
    if !paths.iter().any(|path| path == image) {
        remove_if_there(tools.files, &names::set(image)).await?;
    }
    let taking = names::taking(image);
    if paths.contains(&taking) && needed_because(tools, paths, &taking, image).await.is_none() {
        remove_if_there(tools.files, &taking).await?;
    }
    if !is_there(tools.asking, &names::gone(image)).await? {
        return Ok(());
    }
    match verdict(tools, &Family::ask(tools, paths).await, image).await? {
        Verdict::Stale => Gone::remove(tools.files, image).await,
        Verdict::Merge { .. } | Verdict::Waits { .. } => Ok(()),
    }
}

/// An image of a disk that is to be merged into its parent, which was deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Next {
    /// The image: the disk's own one, or a snapshot that is kept.
    pub child: PathBuf,
    /// Its parent.
    pub parent: PathBuf,
}

/// The merge that is to be done next for the disk at `disk`, a leaf: of those that can be done now the one that is nearest to it, but for those into the
/// parents `left_out`. `paths` are the files of its folder.
///
/// # Errors
/// The storage's.
pub async fn next_merge<F: Files>(
    tools: &Tools<'_, F>,
    paths: &[PathBuf],
    disk: &Path,
    left_out: &[PathBuf],
) -> Result<Option<Next>> {
    // The disk may be in use, and grow or shrink while it is read.
    let torn = |error: Error| match is_no_image(error.kind()) {
        true => Error::new(ErrorKind::Busy, format!("the image was being changed while it was read: {error}")),
        false => error,
    };
    // Images beneath the disk may be merged by other disks right now, and their names go.
    let is_away = |error: &Error| error.kind() == ErrorKind::NotFound;
    let (mut child, mut family) = (disk.to_owned(), None);
    for _ in 0..MAX_LAYERS {
        let Some(format) = Format::from_extension(&child) else { return Ok(None) };
        let named = match named_parents(tools.asking, &child, format).await {
            Err(error) if is_away(&error) && child != disk => return Ok(None),
            named => named.map_err(torn)?,
        };
        for parent in &named {
            if left_out.contains(parent) || !is_there(tools.asking, &names::gone(parent)).await? {
                continue;
            }
            if family.is_none() {
                family = Some(Family::ask(tools, paths).await);
            }
            let Some(family) = &family else { continue };
            match verdict(tools, family, parent).await? {
                Verdict::Merge { child: of, .. } if of == child => {
                    return Ok(Some(Next { child, parent: parent.clone() }));
                }
                _ => {}
            }
        }
        let Some(parent) = named.into_iter().next() else { return Ok(None) };
        child = parent;
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
/// deleted parents, one after the other, and its other images into theirs. `list` gives the files of the disk's folder, and `run` does a job.
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
    let disk = leaf.path().to_owned();
    let note = Note::read(tools.files, &disk).await?;
    let is_overtaken = match &note {
        Some(Note { plan: Plan::Coalesce(merged), .. }) => merge::is_overtaken(tools.asking, &graph, merged).await?,
        _ => false,
    };
    drop(graph);
    match note {
        // Another disk of that name has left it.
        Some(note) if !note.is_of(which) => Plan::remove(tools.files, &disk).await?,
        Some(Note { plan, wishes, .. }) => {
            refuse_other(&disk, &plan, wishes.is_paused)?;
            // The layer that was merged was deleted, too: what is above it comes first.
            match is_overtaken {
                true => Plan::remove(tools.files, &disk).await?,
                false => run(plan, wishes).await?,
            }
        }
        None => {}
    }
    drop(leaf);
    // Nobody writes a note of a job but who has the disk open for writing.
    remove_if_there(tools.files, &names::new_job(&disk)).await?;
    let (mut left_out, mut in_use) = (Vec::new(), Ok(()));
    while let Some(Next { child, parent }) = next_merge(tools, &list().await?, &disk, &left_out).await? {
        match merge_next(tools, node, &child, &parent, &run).await {
            // Another disk has it, or somebody reads it. What lies deeper may be free.
            Err(error) if error.kind() == ErrorKind::Busy && child != disk => {
                left_out.push(parent);
                in_use = Err(error);
            }
            Ok(false) => return Ok(()),
            done => {
                done?;
                tidy(tools, &list().await?, &parent).await?;
            }
        }
    }
    in_use
}

/// Merges the layer `child` of the disk `node` into `parent`, which was deleted. False when the disk has them no more, or somebody keeps the parent after all.
async fn merge_next<F: Files>(
    tools: &Tools<'_, F>,
    node: &Node<Graph<F::Store>>,
    child: &Path,
    parent: &Path,
    run: &impl AsyncFn(Plan, Wishes) -> Result<()>,
) -> Result<bool> {
    let graph = node.graph().await;
    let is_it = |pair: &[Arc<GraphLayer<F::Store>>]| pair[0].path() == child && pair[1].path() == parent;
    let Some(number) = graph.handles().windows(2).position(is_it) else { return Ok(false) };
    if !begin_merge(tools, parent).await? {
        return Ok(false);
    }
    let merge = Plan::Coalesce(merge::plan_keeping(&graph, number)?);
    drop(graph);
    run(merge, Wishes::default()).await?;
    Ok(true)
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
