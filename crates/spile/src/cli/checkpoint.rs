//! `spile checkpoint` and `spile changed`: which blocks of a disk have changed since a moment that has a name.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use spile_core::{Disk as _, Env as _, Error, ErrorKind, Locator, Result};
use spile_engine::OsEnv;
use spile_image::{Format, Graph, OpenOptions};
use spile_node::Node;
use spile_server::checkpoints::Checkpoints;
use spile_server::jobs::Access;
use spile_server::serving::api::checkpoints::{ChangedBlocks, CheckpointList, NewCheckpoint};
use spile_server::serving::api::client::{CHANGE_PATIENCE, ask, call, escape, typed};
use spile_store::{CacheMode, HostStore};

use super::control::path_of;
use super::snapshot::find;
use super::{Exit, ParentArgs, cbtlog, existing, on_engine, parse_format, print_json, printable, say, say_lines};
use crate::disks;
use crate::units::{format_age, format_size, parse_size};

/// Give the present moment of a disk a name, so that it can be told later which blocks have changed since
///
/// A checkpoint keeps no data: it takes one bit for each block of the disk, in a file beside it. Guests that use the disk go on
/// meanwhile. From now on `spile changed` tells what has changed, whatever happens to the server or the host in between.
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    #[command(flatten)]
    which: WhichDisk,
    /// The checkpoint's name
    #[arg(required_unless_present = "list")]
    name: Option<String>,
    /// Remove the checkpoint. What has changed since earlier ones stays known
    #[arg(long)]
    remove: bool,
    /// Only show the disk's checkpoints
    #[arg(long, conflicts_with_all = ["name", "remove", "block_bytes"])]
    list: bool,
    /// How finely changes are kept: a power of two from 4K [default: 64K]. The disk's first checkpoint says it for all
    #[arg(long, value_name = "SIZE", value_parser = parse_block, conflicts_with = "remove")]
    block_bytes: Option<u32>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Show which blocks of a disk have changed since a checkpoint
///
/// All blocks that have changed are shown, and perhaps a few more: after a power cut, for example, those near others that were
/// written shortly before. When it is not known what has changed, the whole disk is shown, with a warning that says why.
#[derive(Debug, Args)]
pub struct ChangedArgs {
    #[command(flatten)]
    which: WhichDisk,
    /// The checkpoint
    #[arg(long, value_name = "NAME")]
    since: String,
    /// Write the blocks to this new file, too, as a log of changed blocks (CBT log) of XenServer
    #[arg(long, value_name = "FILE")]
    cbtlog: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// A disk that a server has, or nobody.
#[derive(Debug, Args)]
struct WhichDisk {
    /// The disk: by its name on a server, or by its path
    disk: PathBuf,
    /// The format of a disk that no server has, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    #[command(flatten)]
    parents: ParentArgs,
}

fn parse_block(text: &str) -> Result<u32, String> {
    parse_size(text)?.try_into().map_err(|_| "no block is that large".to_owned())
}

/// A disk that nobody else has open.
type OwnDisk = Node<Graph<HostStore>>;

impl WhichDisk {
    /// Opens a disk that no server has with its checkpoints, and has `work` do something with them. Nobody else can write to it meanwhile.
    fn by_itself<T: Send + 'static>(
        &self,
        read_only: bool,
        work: impl AsyncFnOnce(&str, &OwnDisk, &Checkpoints) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let at = existing(&self.disk)?;
        if !matches!(at, Locator::Path(_)) {
            let error = Error::new(ErrorKind::Unsupported, "only disks in files have checkpoints");
            return Err(error.at_path(Path::new(&disks::label(&at))));
        }
        let options = OpenOptions { read_only, ..self.parents.read_only(self.format) };
        let name = self.disk.display().to_string();
        on_engine(move || async move {
            let graph = disks::open_keeping(CacheMode::Page, &at, &options).await?;
            let checkpoints = Checkpoints::none(Access { cache: CacheMode::Page, no_lock: options.no_lock });
            checkpoints.open(&graph).await?;
            let disk = Node::new(graph);
            let done = work(&name, &disk, &checkpoints).await;
            let graph = disk.graph().await;
            disk.close().await?;
            checkpoints.close(&graph).await;
            done
        })
    }
}

/// Runs `spile checkpoint`.
///
/// # Errors
/// When there is no such disk or checkpoint, or there is one of this name already; when the disk is no file; the storage's.
pub fn checkpoint(args: &CheckpointArgs) -> Result<Exit> {
    let list = match find(&args.which.disk)? {
        Some((server, disk)) => by_server(args, &server, &format!("{}/checkpoints", path_of(&disk)))?,
        None => {
            let (name, remove, block_bytes) = (args.name.clone(), args.remove, args.block_bytes);
            args.which.by_itself(args.list, async move |own, disk, checkpoints| {
                match &name {
                    None => {}
                    Some(name) if remove => checkpoints.remove(disk, name).await?,
                    Some(name) => checkpoints.make(disk, name, block_bytes).await?,
                }
                Ok(CheckpointList::of(own, disk, checkpoints).await)
            })?
        }
    };
    if args.json {
        return print_json(&list).map(|()| Exit::Ok);
    }
    match &args.name {
        Some(name) if args.remove => say(format_args!("{}: the checkpoint {} is removed", list.disk, printable(name))),
        Some(name) => say(format_args!("{}: the checkpoint {} is made", list.disk, printable(name))),
        None => print_list(&list),
    }
    Ok(Exit::Ok)
}

fn by_server(args: &CheckpointArgs, server: &Path, path: &str) -> Result<CheckpointList> {
    match &args.name {
        None => ask(server, "GET", path, CHANGE_PATIENCE),
        Some(name) if args.remove => ask(server, "DELETE", &format!("{path}/{}", escape(name)), CHANGE_PATIENCE),
        Some(name) => {
            let new = json!(NewCheckpoint { name: name.clone(), block_bytes: args.block_bytes });
            typed(call(server, "POST", path, Some(&new), CHANGE_PATIENCE)?)
        }
    }
}

fn print_list(list: &CheckpointList) {
    let mut table = super::control::fitting_table();
    let (mut header, has_bitmaps) =
        (vec!["CHECKPOINT", "AGE", "CHANGED SINCE"], list.checkpoints.iter().any(|one| one.in_image));
    if has_bitmaps {
        header.push("IN THE IMAGE");
    }
    table.set_header(header);
    let now_unix_s = OsEnv.now_unix_s();
    for one in &list.checkpoints {
        let age = match one.created_unix_s {
            // Nobody knows how old a bitmap is that was not met before.
            0 => "-".to_owned(),
            created_unix_s => format_age(now_unix_s.saturating_sub(created_unix_s)),
        };
        let mut row = vec![printable(&one.name), age, format_size(one.changed_bytes)];
        if has_bitmaps {
            row.push(if one.in_image { "as a bitmap" } else { "" }.to_owned());
        }
        table.add_row(row);
    }
    say_lines(table);
}

/// Runs `spile changed`.
///
/// # Errors
/// When there is no such disk or checkpoint; the storage's.
pub fn changed(args: &ChangedArgs) -> Result<Exit> {
    let changed = match find(&args.which.disk)? {
        Some((server, disk)) => {
            let path = format!("{}/checkpoints/{}/changed", path_of(&disk), escape(&args.since));
            whole(|at| ask(&server, "GET", &format!("{path}?offset_bytes={at}"), CHANGE_PATIENCE))?
        }
        None => {
            let since = args.since.clone();
            args.which.by_itself(true, async move |own, disk, checkpoints| {
                let mut all = ChangedBlocks::of(own, disk, checkpoints, &since, 0).await?;
                while let Some(at) = all.next_offset_bytes {
                    all.extend(ChangedBlocks::of(own, disk, checkpoints, &since, at).await?)?;
                }
                Ok(all)
            })?
        }
    };
    if let Some(path) = &args.cbtlog {
        cbtlog::write(path, &changed)?;
    }
    if args.json {
        return print_json(&changed).map(|()| Exit::Ok);
    }
    for range in &changed.ranges {
        say(format_args!("{:>16} {:>16}", range.offset_bytes, range.length_bytes));
    }
    let (bytes, of) = (format_size(changed.changed_bytes), format_size(changed.virtual_size_bytes));
    say(format_args!("{}: {bytes} of {of} may have changed since {}", changed.disk, printable(&changed.since)));
    changed.warning.iter().for_each(|warning| say(format_args!("warning: {warning}")));
    Ok(Exit::Ok)
}

/// All parts of an answer.
fn whole(ask: impl Fn(u64) -> Result<ChangedBlocks>) -> Result<ChangedBlocks> {
    let mut all = ask(0)?;
    while let Some(at) = all.next_offset_bytes {
        all.extend(ask(at)?)?;
    }
    Ok(all)
}
