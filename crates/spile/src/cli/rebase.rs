//! `spile rebase`: a disk that nobody uses gets another parent.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use spile_core::{Disk as _, Error, ErrorKind, Files as _, Locator, Result};
use spile_engine::OsEnv;
use spile_image::layer::Layer as _;
use spile_image::{Format, Graph, OpenOptions, open_layer};
use spile_life::rebase::{Difference, compare, copy_differing, name_parent, over};
use spile_server::{checkpoints, family};
use spile_store::{CacheMode, HostFiles, HostStore, OsFiles};
use utoipa::ToSchema;

use super::create::{check_place, new_parent};
use super::revert::{file_at, refuse_served};
use super::{Exit, ParentArgs, on_engine, parse_format, print_json, say};
use crate::disks;
use crate::units::format_size;

/// Give a disk another parent
///
/// The disk must read the same as before. So Spile compares the old parent with the new one wherever the disk has no data of its own, and refuses
/// a parent that differs there, unless --copy has the disk take its own copy of what differs. Nobody may use the disk meanwhile. The old
/// parent stays as it is. Exit code 1 with --check: the disk would not read the same.
#[derive(Debug, Args)]
pub struct RebaseArgs {
    /// The disk, by its path
    disk: PathBuf,
    /// The new parent
    #[arg(long, value_name = "DISK")]
    parent: PathBuf,
    /// Only compare, and change nothing
    #[arg(long)]
    check: bool,
    /// Copy what differs into the disk first
    #[arg(long, conflicts_with = "check")]
    copy: bool,
    /// Compare nothing, and do not open the old parent: for a parent that has moved and is the same. If it is not, the disk's content
    /// changes
    #[arg(long, conflicts_with_all = ["check", "copy"])]
    trust: bool,
    /// The disk's format, instead of what its extension says
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// The new parent's format, instead of what its extension says
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    parent_format: Option<Format>,
    #[command(flatten)]
    parents: ParentArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What a rebase has found and done.
#[derive(Debug, Serialize, ToSchema)]
pub struct Rebased {
    /// The disk.
    path: String,
    /// The new parent.
    parent_path: String,
    /// The disk names the new parent now.
    rebased: bool,
    /// Whether the disk reads the same over both parents without a copy; null when they were not compared.
    same: Option<bool>,
    /// The first byte in which they differ.
    differs_at_offset_bytes: Option<u64>,
    /// Bytes in units of 4 KiB in which they differ.
    differing_bytes: u64,
    /// Bytes that were copied into the disk.
    copied_bytes: u64,
}

/// What is to be done, on the engine.
struct Order {
    disk: Locator,
    parent: Locator,
    read: OpenOptions,
    write: OpenOptions,
    way: Way,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Check,
    Refuse,
    Copy,
    Trust,
}

/// Runs `spile rebase`.
///
/// # Errors
/// `Denied` when the disk would not read the same; `Busy` for a disk that is in use, or has a job that is not finished; what the format cannot
/// do; the storage's. The disk reads as before then.
pub fn run(args: &RebaseArgs) -> Result<Exit> {
    refuse_served(&args.disk)?;
    let way = match (args.check, args.copy, args.trust) {
        (true, ..) => Way::Check,
        (_, true, _) => Way::Copy,
        (.., true) => Way::Trust,
        _ => Way::Refuse,
    };
    let read = args.parents.read_only(args.parent_format);
    let write = OpenOptions { read_only: way == Way::Check, ..args.parents.read_only(args.format) };
    let order = Order { disk: file_at(&args.disk)?, parent: file_at(&args.parent)?, read, write, way };
    let (difference, paths) = on_engine(move || async move { order.carry_out().await })?;
    let [path, parent_path] = paths.map(|path| path.display().to_string());
    let (first, bytes) = difference.map_or((None, 0), |found| (found.first_at, found.bytes));
    let rebased = Rebased {
        path,
        parent_path,
        rebased: way != Way::Check,
        same: difference.map(|found| found.first_at.is_none()),
        differs_at_offset_bytes: first,
        differing_bytes: bytes,
        copied_bytes: if way == Way::Copy { bytes } else { 0 },
    };
    match args.json {
        true => print_json(&rebased)?,
        false => tell(&rebased),
    }
    Ok(if way == Way::Check && first.is_some() { Exit::Differs } else { Exit::Ok })
}

fn tell(rebased: &Rebased) {
    let Rebased { path, parent_path, copied_bytes, .. } = rebased;
    match (rebased.rebased, rebased.differs_at_offset_bytes) {
        (true, _) if *copied_bytes > 0 => {
            say(format_args!("{path} is a child of {parent_path}; {} were copied into it", format_size(*copied_bytes)));
        }
        (true, _) => say(format_args!("{path} is a child of {parent_path}")),
        (false, None) => say(format_args!("{path} would read the same over {parent_path}")),
        (false, Some(at)) => {
            let differing = format_size(rebased.differing_bytes);
            say(format_args!(
                "{path} would not read the same over {parent_path}: {differing} differ, first at {at:#x}"
            ));
        }
    }
}

impl Order {
    /// Returns what differed, unless nothing was compared, and the paths of disk and parent.
    async fn carry_out(&self) -> Result<(Option<Difference>, [PathBuf; 2])> {
        let files = HostFiles::new(OsFiles::new(CacheMode::Page).without_locks(self.write.no_lock));
        // Open until the disk names it: nobody can delete it or write to it before.
        let parent = disks::open(CacheMode::Page, &self.parent, &self.read).await?;
        let above = parent.handles()[0].path().to_owned();
        let Locator::Path(disk) = &self.disk else { return Err(no_file(&above)) };
        let layers = parent.layers();
        let paths: Vec<_> = layers.iter().map(|layer| layer.path.as_path()).collect();
        check_place(disk, &paths, &self.write.allow_parents)?;
        let named = new_parent(disk, &layers[0])?;
        if self.way == Way::Trust {
            let leaf = open_layer(&files, Arc::new(OsEnv), self.disk.clone(), &self.write).await?;
            family::refuse_parent(&[leaf.info()]).await?;
            // Nobody looks what differs.
            if let Some(side) = checkpoints::file_of(leaf.path()) {
                files.remove(&side).await?;
            }
            name_parent(&files, &leaf, &named).await?;
            leaf.image().seal().await?;
            return Ok((None, [leaf.path().to_owned(), above]));
        }
        let graph = disks::open(CacheMode::Page, &self.disk, &self.write).await?;
        let path = graph.handles()[0].path().to_owned();
        let after = over(&files, &graph, &parent).await?;
        let found = self.meet(&graph, &after).await?;
        if self.way != Way::Check {
            name_parent(&files, &graph.handles()[0], &named).await?;
            graph.close().await?;
        }
        Ok((Some(found), [path, above]))
    }

    /// Makes sure that the disk reads the same over both, unless that is only to be told.
    async fn meet(&self, graph: &Graph<HostStore>, after: &Graph<HostStore>) -> Result<Difference> {
        if self.way == Way::Copy {
            return copy_differing(graph, after).await;
        }
        let found = compare(graph, after).await?;
        match found.first_at {
            Some(at) if self.way == Way::Refuse => {
                let size = format_size(found.bytes);
                let what =
                    format!("the disk would not read the same with that parent: {size} differ, first at {at:#x}");
                let error = Error::new(ErrorKind::Denied, what).at_path(graph.handles()[0].path());
                Err(error.hint("--copy has the disk take its own copy of what differs"))
            }
            _ => Ok(found),
        }
    }
}

fn no_file(path: &Path) -> Error {
    Error::new(ErrorKind::Unsupported, "this is done to files only").at_path(path)
}
