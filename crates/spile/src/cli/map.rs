//! `spile map`: where a disk's bytes lie.

use std::io::{BufWriter, Write};
use std::path::PathBuf;

use clap::Args;
use rustix::io::Errno;
use serde::Serialize;
use spile_core::{Disk, Error, Extent, ExtentKind, ExtentStatus, Result};
use spile_store::CacheMode;

use super::{Exit, OpenArgs, existing, on_engine};
use crate::disks;
use crate::units::format_size;

/// Show which runs of a disk hold data, and in which layer
///
/// Kinds: data = allocated; zero = allocated, reads as zeroes; hole = not allocated anywhere, reads as zeroes. Depth 0
/// is the disk itself, 1 its parent, and so on.
#[derive(Debug, Args)]
pub struct MapArgs {
    /// The disk: a file, a block device, or the URI of an NBD export
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
/// Runs are printed as they are found: a map may be longer than memory.
///
/// # Errors
/// When the disk cannot be opened or read, or stdout cannot be written to.
pub fn run(args: &MapArgs) -> Result<Exit> {
    let (source, options, json) = (existing(&args.disk)?, args.open.read_only(), args.json);
    let printed = on_engine(move || async move {
        let disk = disks::open(CacheMode::Page, &source, &options).await?;
        let mut printer = Printer::new(std::io::stdout().lock(), json);
        each_run(&disk, |run| printer.row(&Run::from(run))).await?;
        printer.finish()
    });
    match printed {
        // The reader of the output has gone (`spile map DISK | head`).
        Err(error) if error.os_errno() == Some(Errno::PIPE.raw_os_error()) => Ok(Exit::Ok),
        printed => printed.map(|()| Exit::Ok),
    }
}

/// A table or a JSON array on its way out.
struct Printer<W: Write> {
    out: BufWriter<W>,
    json: bool,
    rows: u64,
}

impl<W: Write> Printer<W> {
    fn new(out: W, json: bool) -> Self {
        Self { out: BufWriter::new(out), json, rows: 0 }
    }

    fn row(&mut self, run: &Run) -> Result<()> {
        let first = self.rows == 0;
        self.rows += 1;
        let (json, out) = (self.json, &mut self.out);
        let written = match (json, first) {
            (true, _) => serde_json::to_string(run)
                .map_err(std::io::Error::from)
                .and_then(|text| write!(out, "{}  {text}", if first { "[\n" } else { ",\n" })),
            (false, true) => writeln!(out, "{HEAD}\n{}", run.row()),
            (false, false) => writeln!(out, "{}", run.row()),
        };
        written.map_err(not_written)
    }

    fn finish(mut self) -> Result<()> {
        let end = match (self.json, self.rows) {
            (true, 0) => "[]\n".to_owned(),
            (true, _) => "\n]\n".to_owned(),
            (false, 0) => format!("{HEAD}\n"),
            (false, _) => String::new(),
        };
        self.out.write_all(end.as_bytes()).and_then(|()| self.out.flush()).map_err(not_written)
    }
}

const HEAD: &str = "          offset           length  kind  depth";

fn not_written(error: std::io::Error) -> Error {
    Error::io("cannot write to stdout", error)
}

/// Runs asked for at a time.
const RUNS_AT_ONCE: usize = 1024;

/// Calls `print` on each run of the whole of `disk`, adjacent ones different.
async fn each_run(disk: &impl Disk, mut print: impl FnMut(ExtentStatus) -> Result<()>) -> Result<()> {
    let size = disk.info().size_bytes;
    let (mut open, mut at) = (None::<ExtentStatus>, 0);
    while at < size {
        let part = match disk.extents(Extent::from_range(at..size), RUNS_AT_ONCE).await {
            Ok(part) => part,
            Err(error) => {
                // What comes before a damaged piece of the map is known.
                open.map_or(Ok(()), print)?;
                return Err(error);
            }
        };
        at = part.last().map_or(size, |run| run.extent.end());
        for run in part {
            match &mut open {
                Some(last) if same(last, &run) => last.extent.len_bytes += run.extent.len_bytes,
                _ => open.replace(run).map_or(Ok(()), &mut print)?,
            }
        }
    }
    open.map_or(Ok(()), print)
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
