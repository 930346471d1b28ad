//! A snapshot: the leaf of a disk becomes a parent under a name of its own, and a new, empty leaf takes the disk's path.
//!
//! What is done to the disk's folder, in this order, each step durable before the next:
//!
//! 1. The new leaf is made under [`names::new_leaf`]. It names the snapshot's path as its parent's.
//! 2. The old leaf gets the snapshot's path as a second name.
//! 3. The new leaf is renamed to the disk's path.
//! 4. Only then the graph is exchanged, of all disks of a set at one point in time. Until then guests write to the old leaf, and
//!    the new one is empty: the disk's path reads the same before and after step 3.
//! 5. When all requests have ended that began before the exchange, the old leaf is sealed, and its lock becomes that of a reader, so
//!    that clones can be opened.
//!
//! [`prepare`] does the first three and takes them back when one fails; [`take_back`] is for an exchange that fails; [`settle`] is the
//! last step. What a crash leaves is taken back by [`recover`](crate::recover).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use spile_core::{Disk, Env, Error, ErrorKind, Extent, Files, OpenMode, Result, ResultExt, Store};
use spile_image::create::{NewImage, NewParent};
use spile_image::formats::AnyLayer;
use spile_image::layer::Layer;
use spile_image::{Format, Graph, GraphLayer, LayerInfo, OpenOptions, check_new_child, made_layer};

use crate::gone::Gone;
use crate::jobs::note::is_there;
use crate::names;
use crate::recover::recover;
use crate::work::NoteChild;

/// A snapshot that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    disk: PathBuf,
    snapshot: PathBuf,
    format: Format,
}

/// A disk's new leaf, which has the disk's path already, and the graph with it on top.
pub struct Prepared<S: Store> {
    plan: Plan,
    old: Arc<GraphLayer<S>>,
    graph: Graph<S>,
}

impl Plan {
    /// Plans the snapshot `name` of the disk with the layers `layers`, leaf first. `given` is the format in which the disk is opened, if that was
    /// said; `allowed` are the folders that parents may lie in besides the disk's own, canonical.
    ///
    /// # Errors
    /// `InvalidInput` for a name that is none; `Exists` for one that a snapshot of the disk has; `Unsupported` for a disk that is no file, for one whose path would belie the format of its
    /// new leaf, and for a chain that would be too long; `Denied` when the new leaf could not be opened with its parents.
    pub fn new(layers: &[LayerInfo], given: Option<Format>, name: &str, allowed: &[PathBuf]) -> Result<Self> {
        let Some(leaf) = layers.first().filter(|leaf| leaf.path.is_absolute()) else {
            return Err(Error::new(ErrorKind::Unsupported, "only a disk in a file can have snapshots"));
        };
        let snapshot = snapshot_path(&leaf.path, name)?;
        refuse_taken(layers, &snapshot)?;
        let format = child_format(leaf.format);
        check_extension(&leaf.path, given, format).map_err(|error| match fits(format, leaf.virtual_bytes) {
            true => error,
            false => error.hint("a vhd ends at 2040 GiB: `spile convert` to qcow2 makes a disk of this size that has snapshots and clones"),
        })?;
        check_new_child(leaf.path.parent().unwrap_or(Path::new("/")), layers, allowed)?;
        Ok(Self { disk: leaf.path.clone(), snapshot, format })
    }

    /// The disk's path.
    pub fn disk(&self) -> &Path {
        &self.disk
    }

    /// The path that the old leaf gets.
    pub fn snapshot(&self) -> &Path {
        &self.snapshot
    }
}

impl<S: Store> Prepared<S> {
    /// What was planned.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The graph that the disk is to have.
    pub fn into_parts(self) -> (Made<S>, Graph<S>) {
        (Made { plan: self.plan, old: self.old, new: self.graph.handles()[0].clone() }, self.graph)
    }
}

/// A snapshot whose files are in place.
pub struct Made<S: Store> {
    plan: Plan,
    old: Arc<GraphLayer<S>>,
    new: Arc<GraphLayer<S>>,
}

impl<S: Store> Made<S> {
    /// What was planned.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}

/// The path of the disk's snapshot `name`: beside the disk, as [`file_name`] says.
///
/// # Errors
/// `InvalidInput` for what is no name of a file, and for one that begins with a dot.
pub fn snapshot_path(disk: &Path, name: &str) -> Result<PathBuf> {
    let bad =
        |why: &str| Err(Error::new(ErrorKind::InvalidInput, format!("{name:?} is no name for a snapshot: {why}")));
    if name.is_empty() || name.contains(['/', '\0']) {
        return bad("it is the name of a file beside the disk, without a folder");
    }
    if name.contains(char::is_control) {
        return bad("it has a control character in it, such as a line end");
    }
    if name.starts_with('.') {
        return bad("files whose names begin with a dot are hidden");
    }
    // Files that tell of it lie beside it, under longer names.
    let paths = file_names(disk, name).map(|file| disk.with_file_name(file));
    paths.into_iter().find(|path| names::fits_a_disk(path)).map_or_else(|| bad("it is too long"), Ok)
}

/// The names that the file of the disk's snapshot `name` may have: the first of them that is short enough is that of a new one. Names of snapshots
/// belong to their disk, and other disks may lie in its folder, so the file's name says both: `DISK-NAME` with the disk's extension. The last one is what earlier
/// versions called it, and what a file is called whose name would be too long. A `name` that has the disk's extension, or begins with the disk's own
/// name, is the file's.
pub fn file_names(disk: &Path, name: &str) -> [String; 2] {
    let extension = disk.extension().and_then(|extension| extension.to_str()).map(|extension| format!(".{extension}"));
    let extension = extension.unwrap_or_default();
    let stem = disk.file_stem().unwrap_or_default().to_string_lossy();
    let is_whole = !extension.is_empty() && name.ends_with(&extension);
    let plain = if is_whole { name.to_owned() } else { format!("{name}{extension}") };
    match is_whole || name.starts_with(&format!("{stem}-")) {
        true => [plain.clone(), plain],
        false => [format!("{stem}-{plain}"), plain],
    }
}

/// What the snapshot at `path` is called among those of the disk at `disk`.
pub fn name_of(disk: &Path, path: &Path) -> String {
    let stem = |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let file = stem(path);
    file.strip_prefix(&format!("{}-", stem(disk))).filter(|name| !name.is_empty()).unwrap_or(&file).to_owned()
}

/// Refuses a name that a layer below the disk has already, be it as the one or as the other of [`file_names`].
fn refuse_taken(layers: &[LayerInfo], snapshot: &Path) -> Result<()> {
    let disk = &layers[0].path;
    let name = name_of(disk, snapshot);
    match layers[1..].iter().find(|layer| layer.path.parent() == disk.parent() && name_of(disk, &layer.path) == name) {
        Some(layer) => {
            let what = format!("the disk has a snapshot {name} already");
            Err(Error::new(ErrorKind::Exists, what).at_path(&layer.path).hint("choose another name"))
        }
        None => Ok(()),
    }
}

/// The format of a new leaf over an image of the format `parent`.
pub fn child_format(parent: Format) -> Format {
    if parent.about().has_parents { parent } else { Format::Vhd }
}

/// True when an image of this format can be as large as `size_bytes`.
pub fn fits(format: Format, size_bytes: u64) -> bool {
    let size_bytes = size_bytes.next_multiple_of(512).max(512);
    format.space(&NewImage::new(size_bytes)).is_ok()
}

/// Refuses a disk that is opened in another format than its new leaf will have, or whose name does not say that format: nothing looks into
/// a file to find out, and whoever asks the images of a folder for their parents goes by their names.
pub(crate) fn check_extension(disk: &Path, given: Option<Format>, child: Format) -> Result<()> {
    let named = Format::from_extension(disk);
    let why = match (given, named) {
        (Some(given), _) if given != child => format!("it is opened as {given}"),
        (_, Some(named)) if named != child => format!("its name says {named}"),
        (_, None) => "its name does not say so".to_owned(),
        _ => return Ok(()),
    };
    let what = format!("the disk's new leaf is a {child}, and {why}: whoever opens it next would misread it");
    let error = Error::new(ErrorKind::Unsupported, what).at_path(disk);
    let name = disk.with_extension(child.about().name);
    let (disk, name) = (disk.display(), name.display());
    Err(match given.or(named) {
        Some(format) if format == child => error.hint(format!("end its server, and rename it to {name} first")),
        _ => error.hint(format!(
            "`spile convert {disk} {name}` makes a {child} of it, which has snapshots; or go on with a child of another name: \
             `spile clone {disk} CHILD.{child}`"
        )),
    })
}

/// Makes the new leaf and has it take the disk's path. `graph` is what the disk is now; its leaf is open for writing. When it fails,
/// everything is as it was. `notes` notes the snapshot beside its parent.
///
/// # Errors
/// `ReadOnly`; `Exists` when the snapshot's name is taken; `NotFound` when the disk's file is not at its path any more; `Unsupported`
/// for a block device and where there are no hard links; what a flush of the disk or the storage says.
pub async fn prepare<F: Files>(
    files: &F,
    env: Arc<dyn Env>,
    notes: &dyn NoteChild,
    graph: &Graph<F::Store>,
    plan: &Plan,
) -> Result<Prepared<F::Store>> {
    let old = graph.handles()[0].clone();
    check_disk(files, graph, plan).await?;
    if let Some(parent) = graph.handles().get(1) {
        notes.note_child(&files.canonical(parent.path()).await?, &plan.snapshot).await?;
    }
    // What cannot be made durable is told before anything has changed, and little is left for the sealing.
    old.image()
        .flush()
        .await
        .map_err(|error| error.hint("a snapshot begins with a flush of the disk, which has failed"))?;
    let (error, made) = match make_child(files, env, graph, plan).await {
        Ok(graph) => match put_in_place(files, &old, plan, &graph).await {
            Ok(()) => return Ok(Prepared { plan: plan.clone(), old, graph }),
            Err(error) => (error, Some(graph)),
        },
        Err(error) => (error, None),
    };
    let is_ours = error.kind() != ErrorKind::Exists;
    let new = made.as_ref().map(|graph| &*graph.handles()[0]);
    Err(told(error, restore(files, (&old, new), plan, is_ours).await))
}

/// Refuses the disk `graph` when it lies on a block device: the file of a snapshot would lie beside it.
///
/// # Errors
/// `Unsupported`.
pub fn refuse_device<S: Store>(graph: &Graph<S>) -> Result<()> {
    let leaf = &graph.handles()[0];
    if leaf.image().store().info().grows_zeroed {
        return Ok(());
    }
    let error = Error::new(ErrorKind::Unsupported, "a disk on a block device has no room beside it for a snapshot");
    Err(error.at_path(leaf.path()).hint("copy it to a VHD or qcow2 file: spile convert"))
}

/// Looks whether the disk is where its path says, and the snapshot's name is free.
async fn check_disk<F: Files>(files: &F, graph: &Graph<F::Store>, plan: &Plan) -> Result<()> {
    let store = graph.handles()[0].image().store();
    if graph.info().read_only {
        return Err(Error::new(ErrorKind::ReadOnly, "the disk is open for reading only").at_path(&plan.disk));
    }
    refuse_device(graph)?;
    if !files.is_at(store, &plan.disk).await? {
        let error = Error::new(ErrorKind::NotFound, "the disk's file is not at its path any more");
        return Err(error.at_path(&plan.disk).hint("give it its name back"));
    }
    refuse_job(files, &plan.disk).await?;
    // What an earlier snapshot could not take back, and what tells of it, goes before the next one is made.
    recover(files, graph).await?;
    match files.canonical(&plan.snapshot).await {
        Ok(_) => {
            let error = Error::new(ErrorKind::Exists, "there is a file of the snapshot's name already");
            Err(error.at_path(&plan.snapshot).hint("choose another name"))
        }
        Err(_) => Ok(()),
    }
}

/// Refuses a disk with a merge or a flatten that has not come to its end: its images hold what the disk holds only together.
///
/// # Errors
/// `Busy`.
pub async fn refuse_job<F: Files>(files: &F, disk: &Path) -> Result<()> {
    match is_there(files, &names::job(disk)).await? {
        true => {
            let error = Error::new(ErrorKind::Busy, "a job on the disk's images has not come to its end");
            let hint = format!(
                "`spile jobs` shows it while the disk is served; if it is not there, begin the same job again, or give it up: \
                 `spile job {} cancel`",
                disk.display()
            );
            Err(error.at_path(disk).hint(hint))
        }
        false => Ok(()),
    }
}

/// The name of the snapshot of a disk whose file is called `stem`, when `count` disks get one that is called `name`. Of several disks each
/// has its own name in it, also when `name` has an extension: they may lie in one folder.
pub fn name_of_one(stem: &str, count: usize, name: &str) -> String {
    if count == 1 { name.to_owned() } else { format!("{stem}-{name}") }
}

/// Step 1: the new leaf under its name for the time of its making, and the graph with it on top.
async fn make_child<F: Files>(
    files: &F,
    env: Arc<dyn Env>,
    graph: &Graph<F::Store>,
    plan: &Plan,
) -> Result<Graph<F::Store>> {
    let at = names::new_leaf(&plan.disk);
    let old = &graph.handles()[0];
    let new = new_child(&old.info(), graph.size_bytes(), &plan.snapshot)?;
    // Units of one size are merged whole.
    let new =
        NewImage { unit_bytes: (old.image().format() == plan.format).then(|| unit_of(old.image())).flatten(), ..new };
    let store = files.create(&at, 0).await?;
    plan.format.create(&store, &*env, &new).await?;
    files.copy_access(old.image().store(), &store).await?;
    let leaf = made_layer(store, &env, plan.format, &OpenOptions::default()).await?;
    graph.with_leaf(leaf).await
}

/// The unit in which an image takes space; `None` for one that has no units.
pub(crate) fn unit_of<S: Store>(image: &AnyLayer<S>) -> Option<u32> {
    let part = Extent::from_range(0..1);
    u32::try_from(image.unit(part).len_bytes).ok().filter(|len| len.is_power_of_two() && *len >= 4096)
}

/// An empty child of an image that lies, or will lie, at `parent` in the child's own folder.
pub fn new_child(image: &LayerInfo, size_bytes: u64, parent: &Path) -> Result<NewImage> {
    let name = parent.file_name().and_then(|name| name.to_str()).ok_or_else(|| {
        let error = Error::new(ErrorKind::InvalidInput, "an image cannot name a parent whose path is not UTF-8");
        error.at_path(parent).hint("rename it")
    })?;
    let parent = NewParent {
        relative_path: name.to_owned(),
        name: name.to_owned(),
        format: image.format,
        identity: image.identity,
        changed_unix_s: image.facts.changed_unix_s,
    };
    Ok(NewImage { parent: Some(parent), ..NewImage::new(size_bytes) })
}

/// Steps 2 and 3.
async fn put_in_place<F: Files>(
    files: &F,
    old: &GraphLayer<F::Store>,
    plan: &Plan,
    graph: &Graph<F::Store>,
) -> Result<()> {
    // A snapshot of this name may have been deleted, and merged by other means than a gc.
    Gone::remove(files, &plan.snapshot).await?;
    let (old, new) = (old.image().store(), graph.handles()[0].image().store());
    files.link_file((old, &plan.disk), &plan.snapshot).await?;
    files.rename_file((new, &names::new_leaf(&plan.disk)), (&plan.disk, Some(old))).await?;
    old.set_path(&plan.snapshot);
    new.set_path(&plan.disk);
    Ok(())
}

/// Takes back what [`prepare`] has done, because the exchange has failed. The disk goes on with its old leaf, at its path.
///
/// # Errors
/// The storage's. What is left then, the next one who opens the disk takes back or goes on with; nothing is lost.
pub async fn take_back<F: Files>(files: &F, made: &Made<F::Store>) -> Result<()> {
    restore(files, (&made.old, Some(&made.new)), &made.plan, true).await
}

/// Gives the old leaf the disk's path again, and no other. `is_linked`: the snapshot's name, if it is there, is of our making.
/// `new` is the new leaf, if it was made.
async fn restore<F: Files>(
    files: &F,
    (old, new): (&GraphLayer<F::Store>, Option<&GraphLayer<F::Store>>),
    plan: &Plan,
    is_linked: bool,
) -> Result<()> {
    let store = old.image().store();
    if is_linked && files.is_at(store, &plan.snapshot).await? {
        match files.is_at(store, &plan.disk).await? {
            true => files.remove_file(store, &plan.snapshot).await?,
            // One step: the new leaf, which holds nothing, gives way, and nothing else does.
            false => {
                let over = match new.map(|new| new.image().store()) {
                    Some(new) if files.is_at(new, &plan.disk).await? => Some(new),
                    _ => None,
                };
                files.rename_file((store, &plan.snapshot), (&plan.disk, over)).await?;
            }
        }
    }
    store.set_path(&plan.disk);
    remove_if_there(files, &names::new_leaf(&plan.disk)).await
}

pub(crate) async fn remove_if_there<F: Files>(files: &F, path: &Path) -> Result<()> {
    match files.remove(path).await {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Removes the name `path` of the file of `store`, if it has that still.
pub(crate) async fn remove_own<F: Files>(files: &F, store: &F::Store, path: &Path) -> Result<()> {
    match files.is_at(store, path).await? {
        true => files.remove_file(store, path).await,
        false => Ok(()),
    }
}

/// The error, with what could not be taken back.
fn told(error: Error, taken_back: Result<()>) -> Error {
    match taken_back {
        Ok(()) => error,
        Err(left) => {
            error.hint(format!("what was begun could not be taken back ({left}); the next open of the disk does that"))
        }
    }
}

/// Step 5, once every request has ended that began before the exchange: makes the snapshot and all below it durable and
/// read-only, and lets others read it. `graph` is the disk's new graph.
///
/// # Errors
/// The storage's. The snapshot stays locked then, and the disk's flushes go on to cover it.
pub async fn settle<F: Files>(files: &F, made: &Made<F::Store>, graph: &Graph<F::Store>) -> Result<()> {
    graph.seal_parents().await.at_path(&made.plan.snapshot)?;
    let (image, data) = (made.old.image().store(), made.old.image().data_store());
    if !std::ptr::eq(image, data) {
        files.reopen(data, OpenMode::ReadOnly).await?;
    }
    // The old store reads on under the reader's lock that this leaves to it.
    files.reopen(image, OpenMode::ReadOnly).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use spile_image::facts::Facts;

    fn layer(path: &str, format: Format) -> LayerInfo {
        let facts = Facts::default();
        LayerInfo {
            path: path.into(),
            format,
            virtual_bytes: 512,
            file_bytes: 512,
            direct: true,
            identity: None,
            which: None,
            unflushed: false,
            facts,
        }
    }

    #[test]
    fn a_snapshot_lies_beside_its_disk_with_the_same_extension() {
        let path = |disk: &str, name: &str| snapshot_path(Path::new(disk), name).map(|path| path.display().to_string());
        assert_eq!(path("/vm/a.vhd", "monday").unwrap(), "/vm/a-monday.vhd");
        assert_eq!(path("/vm/b.vhd", "monday").unwrap(), "/vm/b-monday.vhd");
        assert_eq!(path("/vm/a.vhd", "a-monday").unwrap(), "/vm/a-monday.vhd");
        assert_eq!(path("/vm/a.vhd", "monday.vhd").unwrap(), "/vm/monday.vhd");
        assert_eq!(path("/vm/a", "mon.day").unwrap(), "/vm/a-mon.day");
        // One name of the two is too long.
        let long = "x".repeat(names::LONGEST_DISK_NAME_BYTES - 10);
        assert_eq!(path(&format!("/vm/{long}.vhd"), "monday").unwrap(), "/vm/monday.vhd");
        for bad in ["", "x/y", "..", ".x", "a\0b", &"x".repeat(252)] {
            assert_eq!(path("/vm/a.vhd", bad).unwrap_err().kind(), ErrorKind::InvalidInput, "{bad:?}");
        }
    }

    #[test]
    fn a_snapshots_name_belongs_to_its_disk() {
        let disk = Path::new("/vm/a.vhd");
        for (file, name) in
            [("a-daily.vhd", "daily"), ("daily.vhd", "daily"), ("b-daily.vhd", "b-daily"), ("a-.vhd", "a-")]
        {
            assert_eq!(name_of(disk, &disk.with_file_name(file)), name, "{file}");
        }
        // One that an earlier version has made has the name, too.
        for there in ["/vm/a-daily.vhd", "/vm/daily.vhd"] {
            let layers = [layer("/vm/a.vhd", Format::Vhd), layer(there, Format::Vhd)];
            let error = Plan::new(&layers, None, "daily", &[]).unwrap_err();
            assert!(error.kind() == ErrorKind::Exists && error.to_string().contains(there), "{error}");
            assert!(Plan::new(&layers, None, "weekly", &[]).is_ok());
        }
    }

    #[test]
    fn a_path_never_belies_the_format_of_its_leaf() {
        let plan = |path: &str, format, given| Plan::new(&[layer(path, format)], given, "s", &[]);
        assert_eq!(plan("/vm/a.vhd", Format::Vhd, None).unwrap().snapshot(), Path::new("/vm/a-s.vhd"));
        let error = plan("/vm/a", Format::Vhd, Some(Format::Vhd)).unwrap_err();
        assert!(error.kind() == ErrorKind::Unsupported && error.hint_text().unwrap().contains("/vm/a.vhd"), "{error}");
        for (path, given) in [("/vm/a.raw", None), ("/vm/a", Some(Format::Raw)), ("/vm/a.vhd", Some(Format::Raw))] {
            let error = plan(path, Format::Raw, given).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains("misread") && error.hint_text().unwrap().contains("spile convert"));
        }
        assert_eq!(plan("null", Format::Raw, None).unwrap_err().kind(), ErrorKind::Unsupported);
    }
}
