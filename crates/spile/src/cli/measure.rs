//! `spile measure`: how much space a disk would take in another format.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use spile_core::{Disk, Error, ErrorKind, Result};
use spile_image::Format;
use spile_image::create::NewImage;
use spile_image::measure::{Count, Measure};
use spile_store::CacheMode;
use utoipa::ToSchema;

use super::options::{FormatArgs, Preallocate};
use super::{Exit, ReadArgs, existing, on_engine, parse_format, parse_subformat, print_json, say, served, space};
use crate::units::{format_size, parse_size};

/// Say how much space a disk would take in a format
///
/// The figures are upper bounds: what SRC holds may be zeroes, which a conversion leaves out.
#[derive(Debug, Args)]
pub struct MeasureArgs {
    /// The disk to be converted: a file, a block device, or the URI of an NBD export
    #[arg(required_unless_present = "size")]
    src: Option<PathBuf>,
    /// The format that it would have
    #[arg(short = 'O', long, visible_alias = "format", value_name = "FORMAT", value_parser = parse_format)]
    to: Format,
    /// The kind of that format, where it has several
    #[arg(long, value_name = "KIND", value_parser = parse_subformat)]
    subformat: Option<String>,
    #[command(flatten)]
    kind: FormatArgs,
    /// The size of an empty disk, instead of SRC; with SRC: the size of the new disk
    #[arg(long, value_parser = parse_size)]
    size: Option<u64>,
    /// The format of SRC, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    from: Option<Format>,
    #[command(flatten)]
    read: ReadArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// How much space a disk would take. Upper bounds: what it holds may be zeroes.
#[derive(Debug, Serialize, ToSchema)]
pub struct Measured {
    /// The format that it would have.
    format: String,
    /// The size that guests would see, in bytes.
    virtual_size_bytes: u64,
    /// Bytes of the disk that are data.
    data_bytes: u64,
    /// The length of the file, in bytes.
    file_bytes: u64,
    /// The length of the file once all of the disk is written, in bytes.
    fully_allocated_file_bytes: u64,
    /// The space that the file would take on its file system, in bytes.
    used_bytes: u64,
}

/// Runs `spile measure`.
///
/// # Errors
/// When SRC cannot be read, or the format cannot hold such a disk.
pub fn run(args: &MeasureArgs) -> Result<Exit> {
    let (virtual_bytes, count, measure) = match &args.src {
        Some(src) => of_disk(args, src)?,
        None => {
            let size = args.size.unwrap_or(0);
            (size, Count::default(), args.to.space(&new_image(args, size)?)?.measure(&Count::default()))
        }
    };
    let takes_all = matches!(args.kind.choose(args.to)?.preallocate, Some(Preallocate::Falloc | Preallocate::Full));
    report(args, virtual_bytes, &count, if takes_all { measure.preallocated() } else { measure })
}

fn new_image(args: &MeasureArgs, size_bytes: u64) -> Result<NewImage> {
    Ok(args.kind.choose(args.to)?.refuse_data_file()?.image(size_bytes, args.subformat.clone()))
}

fn of_disk(args: &MeasureArgs, src: &Path) -> Result<(u64, Count, Measure)> {
    let at = existing(src)?;
    let (options, to, size) = (args.read.read_only(args.from), args.to, args.size);
    let mut new = new_image(args, 0)?;
    on_engine(move || async move {
        let disk = served::open(CacheMode::Page, &at, &options).await?;
        let bytes = disk.info().size_bytes;
        if size.is_some_and(|size| size < bytes) {
            let error = Error::new(ErrorKind::InvalidInput, format!("the disk has {bytes} bytes, more than --size"));
            return Err(error.hint("a disk is never made shorter"));
        }
        new.size_bytes = size.unwrap_or(bytes).next_multiple_of(to.about().size_unit_bytes);
        let shape = to.space(&new)?;
        let count = space::count(&disk, &shape).await?;
        Ok((new.size_bytes, count, shape.measure(&count)))
    })
}

fn report(args: &MeasureArgs, virtual_bytes: u64, count: &Count, measure: Measure) -> Result<Exit> {
    let Measure { required_bytes, fully_allocated_bytes, used_bytes } = measure;
    if args.json {
        print_json(&Measured {
            format: args.to.to_string(),
            virtual_size_bytes: virtual_bytes,
            data_bytes: count.data_bytes(),
            file_bytes: required_bytes,
            fully_allocated_file_bytes: fully_allocated_bytes,
            used_bytes,
        })?;
        return Ok(Exit::Ok);
    }
    let line = |label: &str, bytes: u64| say(format_args!("{label:<17}{} ({bytes} bytes)", format_size(bytes)));
    line("virtual size:", virtual_bytes);
    line("data:", count.data_bytes());
    line("file length:", required_bytes);
    line("fully allocated:", fully_allocated_bytes);
    line("space used:", used_bytes);
    Ok(Exit::Ok)
}
