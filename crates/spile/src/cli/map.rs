//! `spile map`: where a disk's bytes lie.

use std::io::{BufWriter, Write};
use std::path::PathBuf;

use clap::Args;
use rustix::io::Errno;
use serde::Serialize;
use spile_core::{Disk, Error, ErrorKind, Extent, Locator, Result};
use spile_image::Graph;
use spile_server::serving::api::images::{MapLayer, Run, RunKind, ServedBy, map_layers};
use spile_store::{CacheMode, HostStore};
use utoipa::ToSchema;

use super::served::{self, Served};
use super::{Exit, OpenArgs, existing, on_engine, printable};
use crate::disks;
use crate::units::format_size;

/// Show where a disk's bytes lie: in which layer, and where in its file
///
/// Kinds: data = allocated; zero = allocated, reads as zeroes; hole = not allocated anywhere, reads as zeroes. Depth 0
/// is the disk itself, 1 its parent, and so on. `at` is the offset in that layer's file; compressed data have none. Of a
/// disk that is served for writing its server is asked, and the last line says so.
#[derive(Debug, Args)]
pub struct MapArgs {
    /// The disk: a file, a block device, or the URI of an NBD export
    disk: PathBuf,
    #[command(flatten)]
    open: OpenArgs,
    /// Print one JSON object instead of a table: `runs`, the `layers` that `depth` counts, and `summary`
    #[arg(long)]
    json: bool,
}

/// Where a disk's bytes lie.
#[derive(Debug, Serialize, ToSchema)]
pub struct Mapped {
    /// Runs in their order, without gaps; two that touch are different.
    runs: Vec<Run>,
    /// The layers that `depth` counts.
    layers: Vec<MapLayer>,
    /// The runs together.
    summary: Summary,
    /// The server that says so; `null` when the images were read directly.
    served_by: Option<ServedBy>,
}

/// The runs of a map together.
#[derive(Debug, Default, Serialize, ToSchema)]
struct Summary {
    /// How many there are.
    run_count: u64,
    /// Bytes of the disk that are allocated and may be anything.
    data_bytes: u64,
    /// Bytes that are allocated, and read as zeroes.
    zero_bytes: u64,
    /// Bytes that are not allocated anywhere.
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
    let asked = source.clone();
    let printed = on_engine(move || async move {
        let disk = disks::open(CacheMode::Page, &source, &options).await?;
        let mut printer = Printer::new(std::io::stdout().lock(), json);
        each_run(&disk, &mut printer).await?;
        printer.finish(map_layers(disk.handles()), None)
    });
    let printed = printed.or_else(|error| from_server(&asked, args, error));
    match printed {
        // The reader of the output has gone (`spile map DISK | head`).
        Err(error) if error.os_errno() == Some(Errno::PIPE.raw_os_error()) => Ok(Exit::Ok),
        printed => printed.map(|()| Exit::Ok),
    }
}

/// Prints the map as the server says that has the disk open; the `error` when none does, or one that is too old to be asked.
fn from_server(source: &Locator, args: &MapArgs, error: Error) -> Result<()> {
    let Some(served) = Served::of(&error, source, args.open.format) else { return Err(error) };
    let mut part = match served.map(0) {
        Err(answer) if answer.kind() == ErrorKind::NotFound => return Err(error),
        answered => answered?,
    };
    let mut printer = Printer::new(std::io::stdout().lock(), args.json);
    loop {
        part.runs.iter().try_for_each(|run| printer.add(*run))?;
        match part.next_offset_bytes {
            Some(next) => part = served.map(next)?,
            None => return printer.finish(part.layers, Some(part.served_by)),
        }
    }
}

/// A table or a JSON object on its way out.
struct Printer<W: Write> {
    out: BufWriter<W>,
    json: bool,
    summary: Summary,
    /// The last run, which may go on.
    open: Option<Run>,
}

impl<W: Write> Printer<W> {
    fn new(out: W, json: bool) -> Self {
        Self { out: BufWriter::new(out), json, summary: Summary::default(), open: None }
    }

    /// Takes the next run, and prints the one before when that has ended.
    fn add(&mut self, run: Run) -> Result<()> {
        match &mut self.open {
            Some(last) if last.is_followed_by(&run) => {
                last.len_bytes += run.len_bytes;
                Ok(())
            }
            _ => self.open.replace(run).map_or(Ok(()), |ended| self.row(&ended)),
        }
    }

    /// What comes before the first run.
    fn head(&self) -> &'static str {
        if self.json { JSON_HEAD } else { HEAD }
    }

    fn row(&mut self, run: &Run) -> Result<()> {
        let first = self.summary.run_count == 0;
        self.summary.add(run);
        let (head, json, out) = (self.head(), self.json, &mut self.out);
        let written = match json {
            true => serde_json::to_string(run)
                .map_err(std::io::Error::from)
                .and_then(|text| write!(out, "{}\n  {text}", if first { head } else { "," })),
            false => writeln!(out, "{}{}", if first { head } else { "" }, row(run)),
        };
        written.map_err(not_written)
    }

    /// Prints the last run. What comes after it may be unknown.
    fn end_runs(&mut self) -> Result<()> {
        self.open.take().map_or(Ok(()), |last| self.row(&last))
    }

    fn finish(mut self, layers: Vec<MapLayer>, served_by: Option<ServedBy>) -> Result<()> {
        self.end_runs()?;
        let begin = if self.summary.run_count == 0 { self.head() } else { "" };
        let end = match self.json {
            true => {
                let rest = Mapped { runs: Vec::new(), layers, summary: self.summary, served_by };
                let rest = serde_json::to_string(&rest).map_err(|e| not_written(e.into()))?;
                // The runs were printed as they were found.
                format!("{begin}\n{}\n", rest.strip_prefix(JSON_HEAD).unwrap_or(&rest))
            }
            false => {
                let served = served_by.map_or(String::new(), |by| format!("{}\n", served::line(&by)));
                format!("{begin}{}{served}", self.summary.to_text(&layers))
            }
        };
        self.out.write_all(end.as_bytes()).and_then(|()| self.out.flush()).map_err(not_written)
    }
}

impl Summary {
    fn add(&mut self, run: &Run) {
        self.run_count += 1;
        *match run.kind {
            RunKind::Data => &mut self.data_bytes,
            RunKind::Zero => &mut self.zero_bytes,
            RunKind::Hole => &mut self.hole_bytes,
        } += run.len_bytes;
    }

    fn to_text(&self, layers: &[MapLayer]) -> String {
        let [data, zero, hole] = [self.data_bytes, self.zero_bytes, self.hole_bytes].map(format_size);
        let mut text = format!("\n{} runs: {data} data, {zero} zero, {hole} hole\n", self.run_count);
        for layer in layers {
            // Writing to a string cannot fail.
            let _ = std::fmt::Write::write_fmt(
                &mut text,
                format_args!("depth {}: {}\n", layer.depth, printable(&layer.path)),
            );
        }
        text
    }
}

const JSON_HEAD: &str = "{\"runs\":[";
const HEAD: &str = "        offset         length kind depth             at  size\n";

fn not_written(error: std::io::Error) -> Error {
    Error::io("cannot write to stdout", error)
}

/// Runs asked for at a time.
const RUNS_AT_ONCE: usize = 1024;

/// Prints each run of the whole of `disk`, adjacent ones different.
async fn each_run<W: Write>(disk: &Graph<HostStore>, printer: &mut Printer<W>) -> Result<()> {
    let size = disk.info().size_bytes;
    let mut at = 0;
    while at < size {
        let part = match disk.places(Extent::from_range(at..size), RUNS_AT_ONCE).await {
            Ok(part) => part,
            Err(error) => {
                // What comes before a damaged piece of the map is known.
                printer.end_runs()?;
                return Err(error);
            }
        };
        at = part.last().map_or(size, |run| run.status.extent.end());
        part.into_iter().try_for_each(|run| printer.add(run.into()))?;
    }
    Ok(())
}

fn row(run: &Run) -> String {
    let kind = match run.kind {
        RunKind::Data => "data",
        RunKind::Zero => "zero",
        RunKind::Hole => "hole",
    };
    let depth = run.depth.map_or("-".to_owned(), |depth| depth.to_string());
    let (offset, len) = (format!("{:#x}", run.offset_bytes), format!("{:#x}", run.len_bytes));
    let at = run.file_offset_bytes.map_or("-".to_owned(), |at| format!("{at:#x}"));
    let size = format_size(run.len_bytes);
    format!("{offset:>14} {len:>14} {kind} {depth:>5} {at:>14}  {size}")
}
