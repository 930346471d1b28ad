//! `spile convert`: the same disk in another format.

use std::io::ErrorKind as IoKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::Args;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use spile_core::{Disk, Error, ErrorKind, Extent, Locator, Result, WriteZeroes};
use spile_image::create::NewImage;
use spile_image::{Format, OpenOptions};
use spile_node::Aligned;
use spile_store::{CacheMode, OsFiles};

use super::copy::{Chunks, data_runs, for_each, read};
use super::create;
use super::{Exit, ReadArgs, on_engine, parse_cache, parse_format, parse_subformat, print_json, progress_bar, say};
use crate::disks;
use crate::signals::EndSignals;
use crate::units::format_size;

/// Copy a disk into a new one of another format, or onto an NBD export
///
/// Holes and zeroes take no space in the new disk. A child is copied with all that its parents show. The new disk gets
/// its name when it is complete; a conversion that was killed leaves a hidden file .spile-*.part beside it.
///
/// An NBD export (nbd://HOST:PORT/NAME, nbd+unix:///NAME?socket=PATH, or nbds for TLS) is there already and is overwritten: it
/// becomes a raw disk with the bytes of SRC, and what it has behind them becomes zeroes. It must be as long as SRC at least. A
/// conversion that fails leaves it half written.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// The disk to read: a file, a block device, or the URI of an NBD export
    src: PathBuf,
    /// The disk to make, which must not exist; or the NBD export to overwrite
    dst: PathBuf,
    /// The format of SRC, instead of what its extension says
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    from: Option<Format>,
    /// The format of DST, instead of what its extension says
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    to: Option<Format>,
    /// The kind of DST's format, where it has several: a VHD is dynamic unless this says fixed
    #[arg(long, value_name = "KIND", value_parser = parse_subformat)]
    subformat: Option<String>,
    /// Read and write past the page cache or through it
    #[arg(long, value_name = "direct|page", value_parser = parse_cache, default_value = "page")]
    cache: CacheMode,
    #[command(flatten)]
    read: ReadArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What a conversion made.
struct Converted {
    size_bytes: u64,
    written_bytes: u64,
}

/// Runs `spile convert`.
///
/// DST gets its name when all of it is durable: whatever ends the program before leaves no disk that looks whole.
///
/// # Errors
/// What is wrong with SRC; `Exists` for DST, `NoSpace` for an export that is too short; I/O errors. A half-made DST is removed, if
/// it is no export.
pub fn run(args: &ConvertArgs) -> Result<Exit> {
    let dst = disks::locate(&args.dst)?;
    if let Locator::Nbd(_) = dst {
        return overwrite(args, dst);
    }
    let signals = EndSignals::block()?;
    let to = Format::of(&args.dst, args.to)?;
    if args.dst.symlink_metadata().is_ok() {
        return Err(exists(&args.dst));
    }
    let half = HalfMade::beside(&args.dst);
    let path = half.path.clone();
    signals.exit_after(move || drop(std::fs::remove_file(path)));
    let converted = convert(args, to, half.path.clone()).map_err(|error| half.told_as(&args.dst, error))?;
    half.publish(&args.dst)?;
    report(args, to, &converted)
}

fn exists(path: &Path) -> Error {
    let error = Error::new(ErrorKind::Exists, "there is something of this name already");
    error.at_path(path).hint("remove it or choose another name")
}

fn report(args: &ConvertArgs, to: Format, converted: &Converted) -> Result<Exit> {
    let used_bytes = disks::used_bytes(&args.dst);
    let &Converted { size_bytes, written_bytes } = converted;
    if args.json {
        print_json(&serde_json::json!({
            "path": args.dst.to_string_lossy(), "format": to.to_string(), "size_bytes": size_bytes,
            "written_bytes": written_bytes, "used_bytes": used_bytes,
        }))?;
    } else {
        let used = used_bytes.map_or(String::new(), |used| format!(", {} used", format_size(used)));
        let (size, written) = (format_size(size_bytes), format_size(written_bytes));
        say(format_args!("{}: {size} {to}, {written} of data written{used}", args.dst.display()));
    }
    Ok(Exit::Ok)
}

/// The new disk, under a temporary name in its folder. The file is removed when this is dropped.
struct HalfMade {
    path: PathBuf,
}

impl HalfMade {
    fn beside(dst: &Path) -> Self {
        let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let now_ns = since_1970.map_or(0, |time| time.as_nanos());
        let name = format!(".spile-{}-{now_ns:x}.part", std::process::id());
        Self { path: create::folder_of(dst).join(name) }
    }

    /// Gives the disk its name, which nothing may have by now, and makes that durable.
    fn publish(self, dst: &Path) -> Result<()> {
        let failed = |e: std::io::Error| match e.kind() {
            IoKind::AlreadyExists => exists(dst),
            _ => Error::io("cannot give the disk its name", e).at_path(dst),
        };
        match renameat_with(CWD, &self.path, CWD, dst, RenameFlags::NOREPLACE) {
            // Not every file system can rename without replacing. A hard link does not replace either.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                std::fs::hard_link(&self.path, dst).map_err(failed)?
            }
            renamed => renamed.map_err(|e| failed(e.into()))?,
        }
        OsFiles::default().sync_name(dst)
    }

    /// An error about the temporary name, changed to one about the name that the user knows.
    fn told_as(&self, dst: &Path, error: Error) -> Error {
        if error.path().and_then(Path::file_name) != self.path.file_name() {
            return error;
        }
        let mut told = Error::new(error.kind(), error.message()).at_path(dst);
        if let Some(offset) = error.offset_bytes() {
            told = told.at_offset(offset);
        }
        if let Some(source) = std::error::Error::source(&error) {
            told = told.caused_by(source.to_string());
        }
        match (error.kind(), error.hint_text()) {
            (ErrorKind::NoSpace, _) => told.hint("free some space; the half-made disk was removed"),
            (_, Some(hint)) => told.hint(hint),
            _ => told,
        }
    }
}

impl Drop for HalfMade {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Copies into a new disk at `half`, and makes it durable.
fn convert(args: &ConvertArgs, to: Format, half: PathBuf) -> Result<Converted> {
    let (src, cache, subformat) = (args.src.clone(), args.cache, args.subformat.clone());
    let read_options = args.read.read_only(args.from);
    let no_lock = read_options.no_lock;
    let write_options = OpenOptions { format: Some(to), no_lock, write_parent: true, ..OpenOptions::default() };
    on_engine(move || async move {
        let src = open(cache, &src, &read_options).await?;
        let src_bytes = src.info().size_bytes;
        let size_bytes = src_bytes.next_multiple_of(to.about().size_unit_bytes);
        create::create(&half, to, &NewImage { size_bytes, subformat, parent: None }, no_lock).await?;
        let dst = open(cache, &half, &write_options).await?;
        let bar = progress_bar(src_bytes, "converting");
        let written = copy(&src, &dst, Beneath::Zeroes, &bar).await;
        // The disk is closed after a failure, too: the file will be removed, but its locks and tasks must end.
        let closed = dst.close().await;
        bar.finish_and_clear();
        written.and_then(|written_bytes| closed.map(|()| Converted { size_bytes, written_bytes }))
    })
}

async fn open(cache: CacheMode, path: &Path, options: &OpenOptions) -> Result<Aligned<impl Disk + use<>>> {
    Ok(Aligned::new(disks::open(cache, &disks::locate(path)?, options).await?))
}

/// Copies onto an export, which has to be there. Nothing tells a half-written export from a whole one but the exit code.
fn overwrite(args: &ConvertArgs, dst: Locator) -> Result<Exit> {
    let to = Format::at(&dst, args.to)?;
    if to != Format::at(&dst, None)? || args.subformat.is_some() {
        let what = "an NBD export can only be overwritten as a raw disk";
        let error = Error::new(ErrorKind::Unsupported, what).at_path(&args.dst);
        return Err(error.hint("leave --to and --subformat out, or convert to a file"));
    }
    let (src, cache, label) = (disks::locate(&args.src)?, args.cache, args.dst.clone());
    let read_options = args.read.read_only(args.from);
    let no_lock = read_options.no_lock;
    let write_options = OpenOptions { format: Some(to), no_lock, write_parent: true, ..OpenOptions::default() };
    let converted = on_engine(move || async move {
        let src = Aligned::new(disks::open(cache, &src, &read_options).await?);
        let dst = Aligned::new(disks::open(cache, &dst, &write_options).await?);
        let sizes = (src.info().size_bytes, dst.info().size_bytes);
        if sizes.0 > sizes.1 {
            return Err(too_short(sizes).at_path(&label));
        }
        let bar = progress_bar(sizes.0, "converting");
        let written = copy(&src, &dst, Beneath::Anything, &bar).await;
        let closed = dst.close().await;
        bar.finish_and_clear();
        written.and_then(|written_bytes| closed.map(|()| Converted { size_bytes: sizes.1, written_bytes }))
    })?;
    report(args, to, &converted)
}

fn too_short((src_bytes, dst_bytes): (u64, u64)) -> Error {
    let (src, dst) = (format_size(src_bytes), format_size(dst_bytes));
    let error = Error::new(ErrorKind::NoSpace, format!("the export has {dst} and the disk {src}"));
    error.hint(format!("use an export of {src_bytes} bytes at least"))
}

/// What a destination reads as before it is written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Beneath {
    /// It is new.
    Zeroes,
    /// It is overwritten: zeroes have to be written too.
    Anything,
}

/// Copies all of `src` and makes it durable; returns how many bytes of data were written.
async fn copy(src: &impl Disk, dst: &impl Disk, beneath: Beneath, bar: &indicatif::ProgressBar) -> Result<u64> {
    let all = Extent::from_range(0..src.info().size_bytes);
    let written = std::cell::Cell::new(0);
    for_each(Chunks::new(src, all), async |chunk| {
        let mut at = chunk.extent.start();
        if chunk.is_data {
            let bytes = read(src, chunk.extent).await?;
            for run in data_runs(&bytes) {
                written.set(written.get() + run.len() as u64);
                let extent =
                    Extent::from_range(chunk.extent.start() + run.start as u64..chunk.extent.start() + run.end as u64);
                zero(dst, beneath, at..extent.start()).await?;
                dst.write(extent, &bytes.slice(run), false).await?;
                at = extent.end();
            }
        }
        zero(dst, beneath, at..chunk.extent.end()).await?;
        bar.inc(chunk.extent.len_bytes);
        Ok(())
    })
    .await?;
    zero(dst, beneath, all.end()..dst.info().size_bytes).await?;
    dst.flush().await?;
    Ok(written.get())
}

/// Makes the range read as zeroes, where it may read as something else.
async fn zero(dst: &impl Disk, beneath: Beneath, range: Range<u64>) -> Result<()> {
    if beneath == Beneath::Zeroes || range.is_empty() {
        return Ok(());
    }
    dst.write_zeroes(Extent::from_range(range), WriteZeroes { may_unmap: true, only_if_fast: false }).await
}
