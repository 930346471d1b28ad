//! `spile rebase`: a disk that nobody uses gets another parent.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use spile_core::{Disk as _, Env, Error, ErrorKind, Files as _, Locator, Result};
use spile_engine::OsEnv;
use spile_image::create::NewParent;
use spile_image::layer::Layer as _;
use spile_image::{Format, Graph, OpenOptions, open_layer};
use spile_life::rebase::{Difference, check, compare, copy_differing, name_parent, over, refuse_other};
use spile_server::checkpoints::{self, Checkpoints};
use spile_server::family;
use spile_server::far_children;
use spile_server::host::Host;
use spile_server::jobs::Access;
use spile_server::parents::{check_place, new_parent};
use spile_store::{CacheMode, HostFiles, HostStore, OsFiles};
use utoipa::ToSchema;

use super::revert::{file_at, is_same_file, refuse_served};
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
    #[arg(short = 'b', long, value_name = "PARENT")]
    parent: PathBuf,
    /// Only compare, and change nothing
    #[arg(long)]
    check: bool,
    /// Copy what differs into the disk first
    #[arg(long, conflicts_with = "check")]
    copy: bool,
    /// Compare nothing, and do not open the old parent: for a parent that has moved and is the same. If it is not, the disk's content
    /// changes
    #[arg(short = 'u', long, conflicts_with_all = ["check", "copy"])]
    trust: bool,
    /// With --trust: the parent may have another UUID than the old one, as when it was restored from a backup
    #[arg(long, requires = "trust")]
    other_uuid: bool,
    /// The disk's format, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// The new parent's format, instead of what its extension says
    #[arg(short = 'F', long, value_name = "FORMAT", value_parser = parse_format)]
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
    other_uuid: bool,
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
/// do; the storage's. The disk reads as before then, and has its checkpoints.
pub fn run(args: &RebaseArgs) -> Result<Exit> {
    refuse_served(&args.disk)?;
    if is_same_file(&args.disk, &args.parent) {
        return Err(Error::new(ErrorKind::InvalidInput, "a disk cannot be its own parent").at_path(&args.parent));
    }
    let way = match (args.check, args.copy, args.trust) {
        (true, ..) => Way::Check,
        (_, true, _) => Way::Copy,
        (.., true) => Way::Trust,
        _ => Way::Refuse,
    };
    let read = args.parents.read_only(args.parent_format);
    let write = OpenOptions { read_only: way == Way::Check, ..args.parents.read_only(args.format) };
    let (disk, parent, other_uuid) = (file_at(&args.disk)?, file_at(&args.parent)?, args.other_uuid);
    let order = Order { disk, parent, read, write, way, other_uuid };
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
        Host::new().refuse_unfit(&above).await?;
        let named = self.name(&files, &parent).await?;
        let (found, disk) = match self.way {
            Way::Trust => (None, self.trust(&files, &parent, &named).await?),
            _ => {
                let (found, disk) = self.exchange(&files, &parent, &named).await?;
                (Some(found), disk)
            }
        };
        Ok((found, [disk, above]))
    }

    /// How the disk names the new parent. A disk that cannot have it is refused here, before it is open for writing.
    async fn name(&self, files: &HostFiles, parent: &Graph<HostStore>) -> Result<NewParent> {
        let look = OpenOptions { read_only: true, ..self.write.clone() };
        let leaf = open_layer(files, Arc::new(OsEnv), self.disk.clone(), &look).await?;
        let layers = parent.layers();
        let paths: Vec<_> = layers.iter().map(|layer| layer.path.as_path()).collect();
        // A layer's path is that of the file, and not of a link to it: from its folder the parent will be looked for.
        check_place(leaf.path(), &paths, &self.write.allow_parents)?;
        let named = new_parent(leaf.path(), &layers[0])?;
        check(files, &leaf, parent, &named).await?;
        if self.way == Way::Trust {
            family::refuse_parent(&[leaf.info()]).await?;
        }
        if self.way == Way::Trust && !self.other_uuid {
            let hint = "leave --trust out, and they are compared; --other-uuid if you know that it holds the same";
            refuse_other(&leaf, parent).await.map_err(|error| error.hint(hint))?;
        }
        if self.way != Way::Check {
            far_children::note(&layers[0].path, leaf.path())?;
        }
        Ok(named)
    }

    /// Has the disk name the new parent, without a look at the old one. Returns the disk's path.
    async fn trust(&self, files: &HostFiles, parent: &Graph<HostStore>, named: &NewParent) -> Result<PathBuf> {
        let env: Arc<dyn Env> = Arc::new(OsEnv);
        let leaf = open_layer(files, env.clone(), self.disk.clone(), &self.write).await?;
        // Somebody may have had it open since it was looked at.
        check(files, &leaf, parent, named).await?;
        // Nobody looks what differs.
        if let Some(side) = checkpoints::file_of(leaf.path()) {
            files.remove(&side).await?;
        }
        name_parent(files, &env, &leaf, parent, named).await?;
        leaf.image().seal().await?;
        Ok(leaf.path().to_owned())
    }

    /// Compares, and has the disk name the new parent unless that was not asked for. Returns the disk's path, too.
    async fn exchange(
        &self,
        files: &HostFiles,
        parent: &Graph<HostStore>,
        named: &NewParent,
    ) -> Result<(Difference, PathBuf)> {
        let graph = disks::open_keeping(CacheMode::Page, &self.disk, &self.write).await?;
        let (leaf, disk) = (&graph.handles()[0], graph.handles()[0].path().to_owned());
        check(files, leaf, parent, named).await?;
        let after = over(&graph, parent)?;
        if self.way == Way::Check {
            return Ok((compare(&graph, &after).await?, disk));
        }
        // The disk reads as before, whatever comes: nothing of it has changed since its checkpoints.
        let checkpoints = Checkpoints::none(Access { no_lock: self.write.no_lock, ..Access::default() });
        checkpoints.open(&graph).await?;
        let met = async {
            let found = self.meet(&graph, &after).await?;
            name_parent(files, &(Arc::new(OsEnv) as _), leaf, parent, named).await?;
            Ok((found, disk))
        };
        let met = met.await;
        match graph.close().await {
            // The disk's images are those that it names now.
            Ok(()) => checkpoints.close(if met.is_ok() { &after } else { &graph }).await,
            Err(error) => return met.and(Err(error)),
        }
        met
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
