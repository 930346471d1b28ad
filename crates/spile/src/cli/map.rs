//! `spile map`: where a disk's bytes lie.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use spile_core::{Disk, Extent, ExtentKind, ExtentStatus, Result};
use spile_engine::CacheMode;

use super::{Exit, OpenArgs, on_engine, print_json, say};
use crate::disks::{self, Source};
use crate::units::format_size;

/// Show which runs of a disk hold data, and in which layer
///
/// Kinds: data = allocated; zero = allocated, reads as zeroes; hole = not allocated anywhere, reads as zeroes. Depth 0
/// is the disk itself, 1 its parent, and so on.
#[derive(Debug, Args)]
pub struct MapArgs {
    /// The disk
    disk: PathBuf,
    #[command(flatten)]
    open: OpenArgs,
    /// Print a JSON array instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Run {
    offset_bytes: u64,
    len_bytes: u64,
    kind: &'static str,
    depth: Option<u16>,
}

/// Runs `spile map`.
///
/// # Errors
/// When the disk cannot be opened or read.
pub fn run(args: &MapArgs) -> Result<Exit> {
    let (source, options) = (Source::File(args.disk.clone()), args.open.read_only());
    let runs = on_engine(move || async move { runs(&disks::open(CacheMode::Page, &source, &options).await?).await })?;
    let runs: Vec<Run> = runs.into_iter().map(Run::from).collect();
    if args.json {
        print_json(&runs)?;
    } else {
        say(format_args!("{:>16} {:>16}  {:<5} {:>5}", "offset", "length", "kind", "depth"));
        runs.iter().for_each(|run| say(run.row()));
    }
    Ok(Exit::Ok)
}

/// Runs asked for at a time.
const RUNS_AT_ONCE: usize = 1024;

/// The whole map of `disk`, adjacent runs different.
async fn runs(disk: &impl Disk) -> Result<Vec<ExtentStatus>> {
    let size = disk.info().size_bytes;
    let (mut all, mut at) = (Vec::<ExtentStatus>::new(), 0);
    while at < size {
        let part = disk.extents(Extent::from_range(at..size), RUNS_AT_ONCE).await?;
        at = part.last().map_or(size, |run| run.extent.end());
        for run in part {
            match all.last_mut() {
                Some(last) if same(last, &run) => last.extent.len_bytes += run.extent.len_bytes,
                _ => all.push(run),
            }
        }
    }
    Ok(all)
}

fn same(a: &ExtentStatus, b: &ExtentStatus) -> bool {
    a.kind == b.kind && (a.depth == b.depth || a.kind == ExtentKind::Hole)
}

impl From<ExtentStatus> for Run {
    fn from(run: ExtentStatus) -> Self {
        let kind = match run.kind {
            ExtentKind::Data => "data",
            ExtentKind::Zero => "zero",
            ExtentKind::Hole => "hole",
        };
        let depth = (run.kind != ExtentKind::Hole).then_some(run.depth);
        Self { offset_bytes: run.extent.start(), len_bytes: run.extent.len_bytes, kind, depth }
    }
}

impl Run {
    fn row(&self) -> String {
        let depth = self.depth.map_or("-".to_owned(), |depth| depth.to_string());
        let (offset, len) = (format!("{:#x}", self.offset_bytes), format!("{:#x}", self.len_bytes));
        let size = format_size(self.len_bytes);
        format!("{offset:>16} {len:>16}  {:<5} {depth:>5}  {size}", self.kind)
    }
}
