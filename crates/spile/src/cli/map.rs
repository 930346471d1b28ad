//! `spile map`: where a disk's bytes lie.

use std::io::{BufWriter, Write};
use std::path::PathBuf;

use clap::Args;
use rustix::io::Errno;
use serde::Serialize;
use spile_core::{Disk, Error, Extent, ExtentKind, Result};
use spile_image::{Graph, PlacedRun};
use spile_store::{AnyStore, CacheMode};

use super::{Exit, OpenArgs, existing, on_engine, printable, text_of};
use crate::disks;
use crate::units::format_size;

/// Show where a disk's bytes lie: in which layer, and where in its file
///
/// Kinds: data = allocated; zero = allocated, reads as zeroes; hole = not allocated anywhere, reads as zeroes. Depth 0
/// is the disk itself, 1 its parent, and so on. `at` is the offset in that layer's file; compressed data have none.
#[derive(Debug, Args)]
pub struct MapArgs {
    /// The disk: a file, a block device, or the URI of an NBD export
    disk: PathBuf,
    #[command(flatten)]
    open: OpenArgs,
    /// Print one JSON object instead of a table: `runs`, the `layers` that their depths mean, and `summary`
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Run {
    offset_bytes: u64,
    len_bytes: u64,
    kind: &'static str,
    depth: Option<u16>,
    /// Where the bytes lie in the file of the layer `depth`.
    file_offset_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Layer {
    depth: usize,
    #[serde(serialize_with = "text_of")]
    path: PathBuf,
}

#[derive(Debug, Default, Serialize)]
struct Summary {
    runs: u64,
    data_bytes: u64,
    zero_bytes: u64,
    hole_bytes: u64,
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
        let layers = disk.layers().into_iter().enumerate().map(|(depth, layer)| Layer { depth, path: layer.path });
        printer.finish(&layers.collect::<Vec<_>>())
    });
    match printed {
        // The reader of the output has gone (`spile map DISK | head`).
        Err(error) if error.os_errno() == Some(Errno::PIPE.raw_os_error()) => Ok(Exit::Ok),
        printed => printed.map(|()| Exit::Ok),
    }
}

/// A table or a JSON object on its way out.
struct Printer<W: Write> {
    out: BufWriter<W>,
    json: bool,
    summary: Summary,
}

impl<W: Write> Printer<W> {
    fn new(out: W, json: bool) -> Self {
        Self { out: BufWriter::new(out), json, summary: Summary::default() }
    }

    fn row(&mut self, run: &Run) -> Result<()> {
        let first = self.summary.runs == 0;
        self.summary.add(run);
        let (json, out) = (self.json, &mut self.out);
        let written = match (json, first) {
            (true, _) => serde_json::to_string(run)
                .map_err(std::io::Error::from)
                .and_then(|text| write!(out, "{}  {text}", if first { JSON_HEAD } else { ",\n" })),
            (false, true) => writeln!(out, "{HEAD}\n{}", run.row()),
            (false, false) => writeln!(out, "{}", run.row()),
        };
        written.map_err(not_written)
    }

    fn finish(mut self, layers: &[Layer]) -> Result<()> {
        let end = match (self.json, self.summary.runs) {
            (true, runs) => {
                let text = |value: serde_json::Result<String>| value.map_err(|e| not_written(e.into()));
                let (layers, summary) =
                    (text(serde_json::to_string(layers))?, text(serde_json::to_string(&self.summary))?);
                let begin = if runs == 0 { JSON_HEAD } else { "" };
                format!("{begin}\n], \"layers\": {layers},\n\"summary\": {summary}}}\n")
            }
            (false, runs) => format!("{}{}", if runs == 0 { HEAD_LINE } else { "" }, self.summary.to_text(layers)),
        };
        self.out.write_all(end.as_bytes()).and_then(|()| self.out.flush()).map_err(not_written)
    }
}

impl Summary {
    fn add(&mut self, run: &Run) {
        self.runs += 1;
        *match run.kind {
            "data" => &mut self.data_bytes,
            "zero" => &mut self.zero_bytes,
            _ => &mut self.hole_bytes,
        } += run.len_bytes;
    }

    fn to_text(&self, layers: &[Layer]) -> String {
        let [data, zero, hole] = [self.data_bytes, self.zero_bytes, self.hole_bytes].map(format_size);
        let mut text = format!("\n{} runs: {data} data, {zero} zero, {hole} hole\n", self.runs);
        for layer in layers {
            // Writing to a string cannot fail.
            let _ = std::fmt::Write::write_fmt(
                &mut text,
                format_args!("depth {}: {}\n", layer.depth, printable(&layer.path.to_string_lossy())),
            );
        }
        text
    }
}

const JSON_HEAD: &str = "{\"runs\": [\n";
const HEAD: &str = "        offset         length kind depth             at  size";
const HEAD_LINE: &str = "        offset         length kind depth             at  size\n";

fn not_written(error: std::io::Error) -> Error {
    Error::io("cannot write to stdout", error)
}

/// Runs asked for at a time.
const RUNS_AT_ONCE: usize = 1024;

/// Calls `print` on each run of the whole of `disk`, adjacent ones different.
async fn each_run(disk: &Graph<AnyStore>, mut print: impl FnMut(PlacedRun) -> Result<()>) -> Result<()> {
    let size = disk.info().size_bytes;
    let (mut open, mut at) = (None::<PlacedRun>, 0);
    while at < size {
        let part = match disk.places(Extent::from_range(at..size), RUNS_AT_ONCE).await {
            Ok(part) => part,
            Err(error) => {
                // What comes before a damaged piece of the map is known.
                open.map_or(Ok(()), print)?;
                return Err(error);
            }
        };
        at = part.last().map_or(size, |run| run.status.extent.end());
        for run in part {
            match &mut open {
                Some(last) if last.is_followed_by(&run, true) => {
                    last.status.extent.len_bytes += run.status.extent.len_bytes
                }
                _ => open.replace(run).map_or(Ok(()), &mut print)?,
            }
        }
    }
    open.map_or(Ok(()), print)
}

impl From<PlacedRun> for Run {
    fn from(PlacedRun { status, offset }: PlacedRun) -> Self {
        let kind = match status.kind {
            ExtentKind::Data => "data",
            ExtentKind::Zero => "zero",
            ExtentKind::Hole => "hole",
        };
        let depth = (status.kind != ExtentKind::Hole).then_some(status.depth);
        let file_offset_bytes = offset.map(|offset| offset.0);
        Self { offset_bytes: status.extent.start(), len_bytes: status.extent.len_bytes, kind, depth, file_offset_bytes }
    }
}

impl Run {
    fn row(&self) -> String {
        let depth = self.depth.map_or("-".to_owned(), |depth| depth.to_string());
        let (offset, len) = (format!("{:#x}", self.offset_bytes), format!("{:#x}", self.len_bytes));
        let at = self.file_offset_bytes.map_or("-".to_owned(), |at| format!("{at:#x}"));
        let size = format_size(self.len_bytes);
        format!("{offset:>14} {len:>14} {} {depth:>5} {at:>14}  {size}", self.kind)
    }
}
