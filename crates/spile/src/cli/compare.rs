//! `spile compare`: do two disks read the same?

use std::cell::Cell;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use spile_core::{Disk, Extent, Locator, Result, Segments};
use spile_image::{Format, OpenOptions};
use spile_node::Aligned;
use spile_store::CacheMode;
use utoipa::ToSchema;

use super::copy::{CHUNK_BYTES, Chunks, for_each, read};
use super::{
    Exit, ReadArgs, existing, format_of, on_engine, parse_cache, parse_format, print_json, progress_bar, say, served,
    text_of,
};
use crate::units::format_size;

/// Compare what two disks show to a guest
///
/// Formats and space may differ. Disks of different sizes are the same when the longer one's rest is zero (this is
/// said). Exit code 0: the same; 1: different; 2: failure.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// One disk
    a: PathBuf,
    /// The other
    b: PathBuf,
    /// The format of A, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    from: Option<Format>,
    /// The format of B, instead of what its extension says
    #[arg(short = 'F', long, value_name = "FORMAT", value_parser = parse_format)]
    to: Option<Format>,
    /// Read past the page cache or through it
    #[arg(long, value_name = "direct|page", value_parser = parse_cache, default_value = "page")]
    cache: CacheMode,
    #[command(flatten)]
    read: ReadArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Whether two disks read the same.
#[derive(Debug, Serialize, ToSchema)]
pub struct Comparison {
    /// They do. The longer one's rest reads as zeroes.
    same: bool,
    /// The first byte in which they differ.
    differs_at_offset_bytes: Option<u64>,
    /// The first disk.
    a: Side,
    /// The second disk.
    b: Side,
}

/// One of two disks.
#[derive(Debug, Serialize, ToSchema)]
struct Side {
    /// As it was typed.
    #[serde(serialize_with = "text_of")]
    #[schema(value_type = String)]
    path: PathBuf,
    /// The size that guests see, in bytes.
    virtual_size_bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Compared {
    sizes: [u64; 2],
    differs_at: Option<u64>,
}

/// Runs `spile compare`.
///
/// # Errors
/// When a disk cannot be opened or read.
pub fn run(args: &CompareArgs) -> Result<Exit> {
    let a = (existing(&args.a)?, args.read.read_only(args.from));
    let b = (existing(&args.b)?, args.read.read_only(args.to));
    format_of(&a.0, args.from, "--from").and_then(|_| format_of(&b.0, args.to, "--to"))?;
    let cache = args.cache;
    let compared = on_engine(move || async move {
        let a = open(cache, &a.0, &a.1).await?;
        let b = open(cache, &b.0, &b.1).await?;
        compare(&a, &b).await
    })?;
    report(args, compared)?;
    Ok(if compared.differs_at.is_some() { Exit::Differs } else { Exit::Ok })
}

fn report(args: &CompareArgs, compared: Compared) -> Result<()> {
    let Compared { sizes: [a, b], differs_at } = compared;
    if args.json {
        let side = |path: &Path, virtual_size_bytes| Side { path: path.to_owned(), virtual_size_bytes };
        let differs_at_offset_bytes = differs_at;
        let (a, b, same) = (side(&args.a, a), side(&args.b, b), differs_at.is_none());
        return print_json(&Comparison { same, differs_at_offset_bytes, a, b });
    }
    if a != b {
        say(format_args!("the sizes differ: {} and {} ({a} and {b} bytes)", format_size(a), format_size(b)));
    }
    match differs_at {
        Some(at) => say(format_args!("the disks differ, first at offset {at:#x}")),
        None if a != b => say("the disks are the same; the longer one's rest reads as zeroes"),
        None => say("the disks are the same"),
    }
    Ok(())
}

async fn open(cache: CacheMode, source: &Locator, options: &OpenOptions) -> Result<Aligned<impl Disk + use<>>> {
    Ok(Aligned::new(served::open(cache, source, options).await?))
}

async fn compare(a: &impl Disk, b: &impl Disk) -> Result<Compared> {
    let sizes = [a.info().size_bytes, b.info().size_bytes];
    let common = Extent::from_range(0..sizes[0].min(sizes[1]));
    let bar = progress_bar(sizes[0].max(sizes[1]), "comparing");
    let first = Cell::new(None);
    for_each(Chunks::new(a, common), async |chunk| {
        let found = match (chunk.is_data, first.get()) {
            (_, Some(at)) if at < chunk.extent.start() => None,
            (true, _) => first_difference(a, b, chunk.extent).await?,
            // One of the two reads as zeroes here, so only the other one is read.
            (false, _) => first_data(b, chunk.extent).await?,
        };
        note_first(&first, found);
        bar.inc(chunk.extent.len_bytes);
        Ok(())
    })
    .await?;
    if first.get().is_none() {
        let rest = |size| Extent::from_range(common.end()..size);
        note_first(&first, first_data(a, rest(sizes[0])).await?);
        note_first(&first, first_data(b, rest(sizes[1])).await?);
    }
    bar.finish_and_clear();
    Ok(Compared { sizes, differs_at: first.get() })
}

fn note_first(first: &Cell<Option<u64>>, found: Option<u64>) {
    let both = [first.get(), found];
    first.set(both.into_iter().flatten().min());
}

async fn first_difference(a: &impl Disk, b: &impl Disk, extent: Extent) -> Result<Option<u64>> {
    let (a, b) = (read(a, extent).await?, read(b, extent).await?);
    let (a, b) = (a.to_vec(), b.to_vec());
    let at = if a == b { None } else { a.iter().zip(&b).position(|(a, b)| a != b) };
    Ok(at.map(|at| extent.start() + at as u64))
}

/// The first byte of `extent` that is not zero.
async fn first_data(disk: &impl Disk, extent: Extent) -> Result<Option<u64>> {
    let first = Cell::new(None);
    for_each(Chunks::new(disk, extent), async |chunk| {
        if chunk.is_data && first.get().is_none_or(|at| at > chunk.extent.start()) {
            debug_assert!(chunk.extent.len_bytes <= CHUNK_BYTES);
            let bytes = read(disk, chunk.extent).await?;
            note_first(&first, first_byte(&bytes).map(|at| chunk.extent.start() + at));
        }
        Ok(())
    })
    .await?;
    Ok(first.get())
}

fn first_byte(bytes: &Segments) -> Option<u64> {
    if bytes.is_zero() {
        return None;
    }
    bytes.to_vec().iter().position(|byte| *byte != 0).map(|at| at as u64)
}
