//! `spile tree`: which image is whose child in a folder, who has them open, and what is left of work that was broken off.
//!
//! Files are opened without locks, for reading a header only.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use spile_core::{Error, Files, Locator, OpenMode, Result, ResultExt};
use spile_engine::OsEnv;
use spile_image::{Format, MAX_LAYERS, describe};
use spile_life::names;
use spile_server::serving::api::discovery;
use spile_store::{CacheMode, FileId, OsFiles, openers};
use utoipa::ToSchema;

use super::snapshot::find;
use super::{Exit, on_engine, print_json, say};
use crate::disks;
use crate::log::printable;
use crate::units::format_size;

/// Show which disk is whose child
///
/// Of a folder all images are shown, of a disk those of its folder that are its family. For each: its size, the space that it takes, who
/// has it open, and how much a merge into its parent would free.
#[derive(Debug, Args)]
pub struct TreeArgs {
    /// A folder, or a disk by its path or by its name on a server
    #[arg(value_name = "DIR|DISK")]
    place: PathBuf,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// The images of a folder.
#[derive(Debug, Serialize, ToSchema)]
pub struct Tree {
    /// The images, parents before their children.
    images: Vec<TreeImage>,
    /// Files beside the disks that belong to work on them: of work that is under way, or that was broken off.
    beside: Vec<Beside>,
}

/// One image.
#[derive(Debug, Serialize, ToSchema)]
pub struct TreeImage {
    /// Its file.
    path: String,
    /// Its format.
    format: String,
    /// The size that guests see, in bytes; `null` when the image cannot be read.
    virtual_size_bytes: Option<u64>,
    /// The space that the file takes on its file system, in bytes.
    used_bytes: Option<u64>,
    /// How many parents it has in this folder; 255 also stands for more.
    depth: u64,
    /// Its parent's file; `null` for an image without one.
    parent_path: Option<String>,
    /// Its parent is not where the image says.
    parent_missing: bool,
    /// The disk's name on the server of this host that serves it as a leaf.
    disk: Option<String>,
    /// The processes that have it open, as far as this user may see them.
    open_by: Vec<Opener>,
    /// The most space that a merge into its parent frees, besides some tables: what both have is kept once. `null` without a parent, and while the parent has other
    /// children.
    coalesce_frees_bytes: Option<u64>,
    /// It was deleted while it had one child, and waits for `spile gc`.
    deleted: bool,
    /// It is a snapshot of several disks at one point in time that was broken off: of the others there may be none, or one of another moment.
    of_broken_set: bool,
    /// It is a second name of a disk's own file, for a snapshot that is not whole: when the disk is opened for writing, the name goes.
    half_made: bool,
    /// The most space that `spile gc` frees when it merges this image, which was deleted, with its only child, in bytes.
    gc_frees_at_most_bytes: Option<u64>,
    /// Why it cannot be read.
    trouble: Option<String>,
}

/// A process that has an image open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Opener {
    /// Its number.
    pub(super) pid: u32,
    /// Its program's name.
    pub(super) program: String,
}

/// A file that belongs to work on a disk.
#[derive(Debug, Serialize, ToSchema)]
pub struct Beside {
    /// The file.
    path: String,
    /// The disk.
    disk_path: String,
}

/// Runs `spile tree`.
///
/// # Errors
/// When there is no such folder or disk.
pub fn run(args: &TreeArgs) -> Result<Exit> {
    let (folder, disk) = place(&args.place)?;
    let (files, beside) = listed(&folder)?;
    let looked = on_engine(move || async move { Ok(look_at(&files).await) })?;
    let mut images = in_order(looked);
    if let Some(disk) = disk {
        images = family_of(images, &disk.display().to_string());
    }
    note_users(&folder, &mut images);
    let tree = Tree { images, beside };
    if args.json {
        return print_json(&tree).map(|()| Exit::Ok);
    }
    tree.images.iter().for_each(|image| say(line(image)));
    for Beside { path, disk_path } in &tree.beside {
        let name = |path: &str| printable(&Path::new(path).file_name().unwrap_or_default().to_string_lossy());
        let what = match Path::new(path) {
            file if file == names::changes(Path::new(disk_path)) => "the checkpoints of",
            file if file == names::moved(Path::new(disk_path)) => "says where the disk was moved to that was here as",
            file if file == names::came(Path::new(disk_path)) || file == names::left(Path::new(disk_path)) => {
                "says what the way back needs to know, of"
            }
            _ => "of work on",
        };
        say(format_args!("{}: {what} {}", name(path), name(disk_path)));
    }
    Ok(Exit::Ok)
}

/// The folder to look at, and the disk whose family is meant, both canonical.
fn place(place: &Path) -> Result<(PathBuf, Option<PathBuf>)> {
    let real = |path: &Path| path.canonicalize().map_err(|e| Error::io("cannot be found", e)).at_path(path);
    if place.is_dir() {
        return Ok((real(place)?, None));
    }
    let disk = match find(place)? {
        Some((server, name)) => {
            let disks = discovery::disks_of(&server)?;
            disks.into_iter().find(|disk| disk.name == name).map_or_else(|| place.to_owned(), |disk| disk.path.into())
        }
        None => place.to_owned(),
    };
    let disk = real(&disk)?;
    Ok((disk.parent().unwrap_or(Path::new("/")).to_owned(), Some(disk)))
}

/// The images in a folder by their extensions, sorted, and the files that belong to work on them.
fn listed(folder: &Path) -> Result<(Vec<PathBuf>, Vec<Beside>)> {
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io("list", e)).at_path(folder)?;
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let text = |path: &Path| path.display().to_string();
    let beside = paths.iter().filter(|path| !names::is_gone(path)).filter_map(|path| {
        let is_told =
            |disk: &PathBuf| *path == names::children(disk) || (*path == names::set(disk) && paths.contains(disk));
        let disk = names::disk_of(path).filter(|disk| !is_told(disk))?;
        Some(Beside { path: text(path), disk_path: text(&disk) })
    });
    let beside = beside.collect();
    paths.retain(|path| path.is_file() && Format::from_extension(path).is_some());
    // A link to an image of this folder is that image.
    let is_here = |path: &PathBuf| path.canonicalize().is_ok_and(|real| real.parent() == Some(folder));
    paths.retain(|path| !path.is_symlink() || !is_here(path));
    Ok((paths, beside))
}

async fn look_at(paths: &[PathBuf]) -> Vec<TreeImage> {
    let files = OsFiles::new(CacheMode::Page).without_locks(true);
    let mut images = Vec::new();
    for path in paths {
        images.push(look(&files, path).await);
    }
    note_half_made(&mut images);
    images
}

/// Notes which images are a disk's own file under the name of a snapshot. The disk's new leaf, which is to take the disk's path, tells that it is not whole.
fn note_half_made(images: &mut [TreeImage]) {
    let id = |path: &str| std::fs::metadata(path).ok().map(|stat| FileId::of(&stat));
    let is_begun = |path: &&String| names::new_leaf(Path::new(path)).exists();
    let begun: Vec<_> = images.iter().map(|image| image.path.clone()).filter(|path| is_begun(&path)).collect();
    for disk in begun {
        let own = id(&disk);
        let others = images.iter_mut().filter(|image| image.path != disk && own.is_some());
        others.filter(|image| id(&image.path) == own).for_each(|image| image.half_made = true);
    }
}

async fn look(files: &OsFiles, path: &Path) -> TreeImage {
    let format = Format::from_extension(path).unwrap_or(Format::Raw);
    let mut image = TreeImage {
        path: path.display().to_string(),
        format: format.to_string(),
        virtual_size_bytes: None,
        used_bytes: disks::used_bytes(path),
        depth: 0,
        parent_path: None,
        parent_missing: false,
        disk: None,
        open_by: Vec::new(),
        coalesce_frees_bytes: None,
        deleted: names::gone(path).exists(),
        of_broken_set: names::set(path).exists(),
        half_made: false,
        gc_frees_at_most_bytes: None,
        trouble: None,
    };
    match read(files, path, format).await {
        Ok((size_bytes, parents)) => {
            image.virtual_size_bytes = Some(size_bytes);
            image.parent_missing = !parents.is_empty();
            // An image's parent lies beside its file, not beside a link to that.
            let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
            for name in parents {
                let at = real.parent().unwrap_or(Path::new("/")).join(name);
                if let (true, Ok(found)) = (image.parent_missing, files.canonical(&at).await) {
                    (image.parent_path, image.parent_missing) = (Some(found.display().to_string()), false);
                } else if image.parent_path.is_none() {
                    image.parent_path = Some(at.display().to_string());
                }
            }
        }
        Err(error) => image.trouble = Some(error.to_string()),
    }
    image
}

/// An image's size in bytes, and the names that it has for its parent.
async fn read(files: &OsFiles, path: &Path, format: Format) -> Result<(u64, Vec<PathBuf>)> {
    let at = Locator::from(path);
    let described = describe(files, std::sync::Arc::new(OsEnv), at.clone(), Some(format)).await?;
    let store = files.open(&at, OpenMode::ReadOnly).await?;
    let parent = format.named_parent(&store).await?;
    Ok((described.layer.virtual_bytes, parent.map(|parent| parent.names).unwrap_or_default()))
}

/// Puts parents before their children, and says how deep each image lies and what a merge of it frees.
fn in_order(images: Vec<TreeImage>) -> Vec<TreeImage> {
    let mut children: HashMap<String, Vec<usize>> = HashMap::new();
    for (number, image) in images.iter().enumerate() {
        image.parent_path.iter().for_each(|parent| children.entry(parent.clone()).or_default().push(number));
    }
    let used: Vec<_> = images.iter().map(|image| image.used_bytes).collect();
    let is_parent: Vec<_> = images.iter().map(|image| children.contains_key(&image.path)).collect();
    let is_deleted: Vec<_> = images.iter().map(|image| image.deleted).collect();
    let used_at: HashMap<_, _> = images.iter().map(|image| (image.path.clone(), image.used_bytes)).collect();
    let format_at: HashMap<_, _> = images.iter().map(|image| (image.path.clone(), image.format.clone())).collect();
    let has_parent =
        |number: &usize| images[*number].parent_path.as_ref().is_some_and(|path| used_at.contains_key(path));
    // Images that are each other's parents come last, as they are.
    let (in_circles, roots): (Vec<_>, Vec<_>) = (0..images.len()).partition(has_parent);
    let mut left: Vec<_> = images.into_iter().map(Some).collect();
    let mut ordered = Vec::new();
    for root in roots.into_iter().chain(in_circles) {
        let mut work = vec![(root, 0)];
        while let Some((number, depth)) = work.pop() {
            let Some(mut image) = left[number].take() else { continue };
            let below = children.get(&image.path).into_iter().flatten().rev();
            work.extend(below.map(|child| (*child, depth + 1)));
            let only_of = image.parent_path.as_ref().filter(|parent| children[*parent].len() == 1);
            // The parent of a leaf takes its name, which says the format.
            let only_of =
                only_of.filter(|parent| is_parent[number] || format_at.get(*parent).is_none_or(|f| *f == image.format));
            // What the parent lacks takes as much space there.
            let of_parent = only_of.and_then(|parent| used_at.get(parent).copied().flatten());
            image.coalesce_frees_bytes = image.used_bytes.and_then(|used| Some(used.min(of_parent?)));
            let list = children.get(&image.path).map_or(&[][..], |list| &list[..]);
            // A child that was deleted, too, is merged with its own child first.
            if let (true, [child]) = (image.deleted, list)
                && !is_deleted[*child]
            {
                image.gc_frees_at_most_bytes = image.used_bytes.min(used[*child]);
            }
            note_depth(&mut image, depth);
            ordered.push(image);
        }
    }
    ordered
}

/// Says how deep an image lies. No disk has so many layers that the depth would have to go on from there.
fn note_depth(image: &mut TreeImage, depth: usize) {
    image.depth = depth.min(MAX_LAYERS) as u64;
    if depth >= MAX_LAYERS {
        image.trouble = Some(format!("its chain is longer than {MAX_LAYERS} images"));
    }
}

/// The images of the tree that the disk at `path` is in.
fn family_of(images: Vec<TreeImage>, path: &str) -> Vec<TreeImage> {
    let mut families: Vec<Vec<TreeImage>> = Vec::new();
    for image in images {
        match families.last_mut() {
            Some(family) if image.depth > 0 => family.push(image),
            _ => families.push(vec![image]),
        }
    }
    families.into_iter().find(|family| family.iter().any(|image| image.path == path)).unwrap_or_default()
}

/// Notes who has the images open.
fn note_users(folder: &Path, images: &mut [TreeImage]) {
    let id = |path: &str| std::fs::metadata(path).ok().map(|stat| FileId::of(&stat));
    let served = discovery::servers().unwrap_or_default();
    let openers = openers::in_folder(folder).into_iter();
    let openers: Vec<_> = openers.filter_map(|(file, pid)| Some((file, Opener::of(pid)?))).collect();
    for image in images {
        let id = id(&image.path);
        image.open_by =
            openers.iter().filter(|(file, _)| Some(*file) == id).map(|(_, opener)| opener.clone()).collect();
        let disks = served.iter().flat_map(|(_, disks)| disks);
        image.disk = disks.filter(|disk| disk.path == image.path).map(|disk| disk.name.clone()).next();
    }
}

/// The processes of this host that have the file at `path` open, this one left out.
pub(super) fn openers_of(path: &Path) -> Vec<Opener> {
    openers::of_file(path).into_iter().filter_map(Opener::of).collect()
}

impl Opener {
    /// The process of this number; `None` for this one.
    fn of(pid: u32) -> Option<Self> {
        let program = || std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned();
        (pid != std::process::id()).then(|| Self { pid, program: program() })
    }
}

fn line(image: &TreeImage) -> String {
    let name = Path::new(&image.path).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let indent = "  ".repeat(image.depth as usize);
    let size = image.virtual_size_bytes.map_or_else(|| "?".to_owned(), format_size);
    let used = format_size(image.used_bytes.unwrap_or(0));
    let mut line = format!("{indent}{}  {size} {}, {used} used", printable(&name), image.format);
    let mut add = |text: String| line.push_str(&format!("; {text}"));
    image.disk.iter().for_each(|name| add(format!("served as {name:?}")));
    let by = image.open_by.iter().map(|opener| format!("{} ({})", printable(&opener.program), opener.pid));
    let by: Vec<_> = by.collect();
    if !by.is_empty() {
        add(format!("open in {}", by.join(", ")));
    }
    if image.half_made {
        add("of a snapshot that is not whole: this name goes when its disk is opened for writing".to_owned());
    }
    if image.deleted {
        let frees = image.gc_frees_at_most_bytes.map(|bytes| format!(", which frees {} at most", format_size(bytes)));
        add(format!("deleted, waits for gc{}", frees.unwrap_or_default()));
    }
    if image.of_broken_set {
        add("of a set of snapshots that was broken off".to_owned());
    }
    image.coalesce_frees_bytes.iter().for_each(|bytes| add(format!("a merge frees {} at most", format_size(*bytes))));
    if image.parent_missing {
        add(format!("its parent {} is missing", printable(image.parent_path.as_deref().unwrap_or("?"))));
    }
    image.trouble.iter().for_each(|trouble| add(trouble.clone()));
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(path: &str, parent: Option<&str>) -> TreeImage {
        TreeImage {
            path: path.to_owned(),
            format: "vhd".to_owned(),
            virtual_size_bytes: Some(512),
            used_bytes: Some(4096),
            depth: 0,
            parent_path: parent.map(str::to_owned),
            parent_missing: false,
            disk: None,
            open_by: Vec::new(),
            coalesce_frees_bytes: None,
            deleted: false,
            of_broken_set: false,
            half_made: false,
            gc_frees_at_most_bytes: None,
            trouble: None,
        }
    }

    #[test]
    fn parents_come_before_their_children_and_only_an_only_child_is_merged() {
        let mut images =
            vec![image("/a", Some("/m")), image("/b", Some("/p")), image("/m", Some("/p")), image("/p", None)];
        // What the parent does not have is not freed.
        images[0].used_bytes = Some(1 << 20);
        let ordered = in_order(images);
        let shown: Vec<_> = ordered.iter().map(|i| (&*i.path, i.depth, i.coalesce_frees_bytes)).collect();
        assert_eq!(shown, [("/p", 0, None), ("/b", 1, None), ("/m", 1, None), ("/a", 2, Some(4096))]);
        assert_eq!(family_of(ordered, "/a").len(), 4);
    }

    #[test]
    fn images_that_name_each_other_do_not_hang_it() {
        assert_eq!(in_order(vec![image("/a", Some("/b")), image("/b", Some("/a"))]).len(), 2);
        assert_eq!(in_order(vec![image("/a", Some("/a"))]).len(), 1);
    }

    #[test]
    fn a_chain_that_nobody_can_open_is_shown_without_a_deep_stack() {
        let parent = |number: u32| number.checked_sub(1).map(|parent| format!("/{parent}"));
        let images = (0..100_000).rev().map(|number| image(&format!("/{number}"), parent(number).as_deref()));
        let ordered = in_order(images.collect());
        let last = ordered.last().unwrap();
        assert_eq!((ordered.len(), &*last.path, last.depth), (100_000, "/99999", MAX_LAYERS as u64));
        let troubles = ordered.iter().filter(|image| image.trouble.is_some());
        assert_eq!(troubles.count(), 100_000 - MAX_LAYERS);
    }
}
