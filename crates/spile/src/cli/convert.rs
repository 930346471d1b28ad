//! `spile convert`: the same disk in another format.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use spile_core::{Disk, Error, ErrorKind, Extent, Result};
use spile_engine::CacheMode;
use spile_image::{Aligned, Format, OpenOptions};

use super::copy::{Chunks, data_runs, for_each, read};
use super::create::{self, Kind, Subformat};
use super::{Exit, ParentArgs, on_engine, parse_cache, parse_format, print_json, progress_bar, say};
use crate::disks::{self, Source};
use crate::units::format_size;

/// Copy a disk into a new one of another format
///
/// Holes and zeroes take no space in the new disk. A child is copied with all that its parents show.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// The disk to read
    src: PathBuf,
    /// The disk to make; it must not exist
    dst: PathBuf,
    /// The format of SRC, instead of what its extension says
    #[arg(long, value_name = "raw|vhd", value_parser = parse_format)]
    from: Option<Format>,
    /// The format of DST, instead of what its extension says
    #[arg(long, value_name = "raw|vhd", value_parser = parse_format)]
    to: Option<Format>,
    /// The kind of VHD to make (dynamic unless given)
    #[arg(long, value_enum)]
    subformat: Option<Subformat>,
    /// Read and write past the page cache or through it
    #[arg(long, value_name = "direct|page", value_parser = parse_cache, default_value = "page")]
    cache: CacheMode,
    #[command(flatten)]
    parents: ParentArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Runs `spile convert`.
///
/// # Errors
/// What is wrong with SRC; `Exists` for DST; I/O errors. A half-made DST is removed.
pub fn run(args: &ConvertArgs) -> Result<Exit> {
    let to = Format::of(&args.dst, args.to)?;
    let (source, options) = (Source::File(args.src.clone()), args.parents.read_only(args.from));
    let cache = args.cache;
    let size_bytes =
        on_engine(move || async move { Ok(disks::open(cache, &source, &options).await?.info().size_bytes) })?;
    let made_bytes = if to == Format::Vhd { size_bytes.next_multiple_of(512) } else { size_bytes };
    create::create(args.dst.clone(), Kind::new(to, args.subformat, made_bytes, None)?)?;
    let copied = copy_disk(args, to, size_bytes);
    if copied.is_err() {
        let _ = std::fs::remove_file(&args.dst);
    }
    report(args, to, size_bytes, copied?)
}

fn report(args: &ConvertArgs, to: Format, size_bytes: u64, data_bytes: u64) -> Result<Exit> {
    let used_bytes = disks::used_bytes(&args.dst);
    if args.json {
        print_json(&serde_json::json!({
            "path": args.dst, "format": to.to_string(), "size_bytes": size_bytes,
            "written_bytes": data_bytes, "used_bytes": used_bytes,
        }))?;
    } else {
        say(format_args!(
            "{}: {} {to}, {} of data written, {} used",
            args.dst.display(),
            format_size(size_bytes),
            format_size(data_bytes),
            format_size(used_bytes.unwrap_or(0))
        ));
    }
    Ok(Exit::Ok)
}

/// Copies and syncs; returns the bytes written.
fn copy_disk(args: &ConvertArgs, to: Format, size_bytes: u64) -> Result<u64> {
    let (src, dst) = (args.src.clone(), args.dst.clone());
    let (read_options, cache) = (args.parents.read_only(args.from), args.cache);
    let write_options = OpenOptions { format: Some(to), ..OpenOptions::default() };
    let bar = progress_bar(size_bytes, "converting");
    let result = on_engine(move || async move {
        let src = open(cache, &src, &read_options).await?;
        let dst = Arc::new(open(cache, &dst, &write_options).await?);
        let written = copy(&src, &*dst, &bar).await;
        // Close also what failed: the file is about to be removed, but its locks and tasks must end.
        let closed = dst.close().await;
        bar.finish_and_clear();
        written.and_then(|written| closed.map(|()| written))
    });
    result.map_err(|error| match error.kind() {
        ErrorKind::NoSpace => error.hint("the half-made disk was removed"),
        _ => error,
    })
}

async fn open(cache: CacheMode, path: &Path, options: &OpenOptions) -> Result<Aligned<impl Disk + use<>>> {
    Ok(Aligned::new(disks::open(cache, &Source::File(path.to_owned()), options).await?))
}

async fn copy(src: &impl Disk, dst: &impl Disk, bar: &indicatif::ProgressBar) -> Result<u64> {
    let all = Extent::from_range(0..src.info().size_bytes);
    let written = std::cell::Cell::new(0);
    for_each(Chunks::new(src, all), async |chunk| {
        if chunk.is_data {
            let bytes = read(src, chunk.extent).await?;
            for run in data_runs(&bytes) {
                written.set(written.get() + run.len() as u64);
                let at = chunk.extent.start() + run.start as u64;
                let extent = Extent::new(at, run.len() as u64).ok_or_else(overflow)?;
                dst.write(extent, &bytes.slice(run), false).await?;
            }
        }
        bar.inc(chunk.extent.len_bytes);
        Ok(())
    })
    .await?;
    dst.flush().await?;
    Ok(written.get())
}

fn overflow() -> Error {
    Error::new(ErrorKind::OutOfRange, "a run past 64 bits")
}
