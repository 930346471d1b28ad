//! `spile info`: what a disk is, and with `--chain` what its parents are.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{ArgGroup, Args};
use spile_core::{Disk, Error, ErrorKind, Locator, Result};
use spile_engine::OsEnv;
use spile_image::{LayerInfo, OpenOptions, describe};
use spile_server::serving::api::images::{Image, Info};
use spile_store::{CacheMode, OsFiles};

use super::served::{self, Served};
use super::{Exit, OpenArgs, existing, on_engine, print_json, printable, say_lines};
use crate::disks;
use crate::units::format_size;

/// Show what a disk is: format, sizes, alignment, and what it says of its parent
///
/// Only DISK itself is opened, so that an image from elsewhere can be looked at before it is trusted. With --chain, its
/// parents are opened and shown, too; then a parent that is missing or wrong is an error. Of a disk that is served for
/// writing its server is asked, and the last line says so.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("parents").args(PARENT_OPTIONS).multiple(true).requires("chain")))]
pub struct InfoArgs {
    /// The disk: a file, a block device, or the URI of an NBD export
    disk: PathBuf,
    /// Open and show the parents, too
    #[arg(long, visible_alias = "backing-chain")]
    chain: bool,
    #[command(flatten)]
    open: OpenArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// The options that speak of files other than DISK.
const PARENT_OPTIONS: [&str; 3] = ["allow_parents", "backing_format", "allow_data_file"];

/// Runs `spile info`.
///
/// # Errors
/// When the disk cannot be opened.
pub fn run(args: &InfoArgs) -> Result<Exit> {
    let (source, options) = (existing(&args.disk)?, args.open.read_only());
    let (chain, asked) = (args.chain, source.clone());
    let found = match chain {
        true => on_engine(move || async move { chain_info(&source, &options).await }),
        false => on_engine(move || async move { image_info(&source, &options).await }),
    };
    let info = match found {
        Err(error) => from_server(&asked, args, error)?,
        found => found?,
    };
    match args.json {
        true => print_json(&without_lines(info))?,
        false => say_lines(to_text(&info).trim_end()),
    }
    Ok(Exit::Ok)
}

/// What the server says that has the disk open; the `error` when none does, or one that is too old to be asked.
fn from_server(source: &Locator, args: &InfoArgs, error: Error) -> Result<Info> {
    let Some(served) = Served::of(&error, source, args.open.format) else { return Err(error) };
    let mut info = match served.info() {
        Err(answer) if answer.kind() == ErrorKind::NotFound => return Err(error),
        answered => answered?,
    };
    if !args.chain {
        info.layers.truncate(1);
    }
    Ok(info)
}

/// What the image itself says. Nothing else is opened.
async fn image_info(source: &Locator, options: &OpenOptions) -> Result<Info> {
    let files = OsFiles::new(CacheMode::Direct).without_locks(options.no_lock);
    let image = describe(&files, Arc::new(OsEnv), source.clone(), options.format).await?;
    let align = image.request_align_bytes;
    let is_data_here = align.is_some();
    Ok(Info::new(align, vec![read(&image.layer, is_data_here)], None))
}

/// What each image of the chain says.
async fn chain_info(source: &Locator, options: &OpenOptions) -> Result<Info> {
    let chain = disks::open(CacheMode::Direct, source, options).await?;
    let layers = chain.layers().iter().map(|layer| read(layer, true)).collect();
    Ok(Info::new(Some(chain.info().request_align_bytes), layers, None))
}

/// What an image says that this process has open.
fn read(layer: &LayerInfo, knows_access: bool) -> Image {
    Image { used_bytes: disks::used_bytes(&layer.path), ..Image::new(layer, knows_access) }
}

/// Programs have the facts.
fn without_lines(mut info: Info) -> Info {
    info.layers.iter_mut().for_each(|layer| layer.lines.clear());
    info
}

fn to_text(info: &Info) -> String {
    let mut text = String::new();
    for (number, layer) in info.layers.iter().enumerate() {
        // Writing to a string cannot fail.
        let _ = write_image(layer, number, &mut text);
    }
    if let Some(by) = &info.served_by {
        let _ = writeln!(text, "{}", served::line(by));
    }
    text
}

fn write_image(image: &Image, number: usize, text: &mut String) -> std::fmt::Result {
    match number {
        0 => writeln!(text, "disk:           {}", printable(&image.path))?,
        n => writeln!(text, "\nparent {n}:       {}", printable(&image.path))?,
    }
    let subformat = image.subformat.as_ref().map_or(String::new(), |subformat| format!(", {subformat}"));
    writeln!(text, "format:         {}{subformat}", image.format)?;
    let size = image.virtual_size_bytes;
    writeln!(text, "virtual size:   {} ({size} bytes)", format_size(size))?;
    writeln!(text, "file length:    {}", format_size(image.file_bytes))?;
    if let Some(used) = image.used_bytes {
        writeln!(text, "space used:     {}", format_size(used))?;
    }
    let access = match image.needs_page_cache {
        None => "not known: another file holds the data",
        Some(false) => "direct",
        Some(true) => "through the page cache (the data are not aligned for direct I/O)",
    };
    writeln!(text, "data access:    {access}")?;
    for line in &image.lines {
        writeln!(text, "{:<16}{}", format!("{}:", line.label), printable(&line.text))?;
    }
    Ok(())
}
