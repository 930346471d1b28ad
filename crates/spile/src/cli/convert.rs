//! `spile convert`: the same disk in another format, or in another place.

use std::cell::Cell;
use std::fs::Metadata;
use std::io::{IsTerminal, stdin, stdout};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use rustix::fs::tell;
use serde::Serialize;
use spile_core::{Disk, Error, ErrorKind, Extent, Files, Locator, OpenMode, Result, ResultExt, Segments, Store};
use spile_engine::OsEnv;
use spile_image::containers::Container;
use spile_image::create::{Compression, NewImage};
use spile_image::formats::qcow2::fill::Filler;
use spile_image::layer::Layer as _;
use spile_image::measure::Space;
use spile_image::{Format, Graph, OpenOptions};
use spile_life::backup::Digests;
use spile_node::Aligned;
use spile_server::backup::check_size;
use spile_server::checkpoints;
use spile_server::host_device;
use spile_server::new_file::{HalfMade, exists};
use spile_store::{CacheMode, FileId, Folder, HostStore, OsFiles};
use utoipa::ToSchema;

use super::copy::{Chunks, for_each, read};
use super::create::check_new_name;
use super::fill::{Feed, Gather};
use super::options::{Chosen, FormatArgs, Preallocate, parse_compression};
use super::stream::{self, Beneath, put, zero};
use super::{
    Exit, ReadArgs, existing, format_of, on_engine, parse_cache, parse_format, parse_subformat, print_json,
    progress_bar, text_of,
};
use super::{onto, say, served, space};
use crate::log::complain;
use crate::signals::EndSignals;
use crate::units::{format_size, parse_size};
use crate::{disks, family};

/// Copy a disk into a new one of another format, or onto something that is there already
///
/// Holes and zeroes take no space in the new disk. A child is copied with all that its parents show. The new disk gets its
/// name when it is complete: a conversion that is killed leaves nothing (on a file system without files that have no name, such as NFS,
/// a hidden file .spile-*.part). One that would not fit its file system fails before it begins.
///
/// An NBD export (nbd://HOST:PORT/NAME, nbd+unix:///NAME?socket=PATH, or nbds for TLS) is overwritten, and so is a file or
/// block device with --onto, but never one that SRC is read from. An export or a raw device gets the bytes of SRC, and zeroes
/// behind them; it must be as long as SRC at least. A conversion that fails leaves it half written.
///
/// A SRC of - is raw bytes from stdin, a DST of - raw bytes on stdout.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// The disk to read: a file, a block device, the URI of an NBD export, or - for stdin
    src: PathBuf,
    /// The disk to make, which must not exist; the NBD export to overwrite; with --onto the file or block device to
    /// overwrite; or - for stdout
    dst: PathBuf,
    /// The format of SRC, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    from: Option<Format>,
    /// The format of DST, instead of what its extension says
    #[arg(short = 'O', long, value_name = "FORMAT", value_parser = parse_format)]
    to: Option<Format>,
    /// The kind of DST's format, where it has several: a VHD is dynamic unless this says fixed
    #[arg(long, value_name = "KIND", value_parser = parse_subformat)]
    subformat: Option<String>,
    /// Overwrite DST, a file or block device that is there
    #[arg(long)]
    onto: bool,
    /// With --onto, write over DST although an image in its folder names it as its parent. That image is of no use then
    #[arg(long, requires = "onto")]
    write_parent: bool,
    /// The size of DST, at least that of SRC; the rest reads as zeroes. When SRC is a pipe, only a raw file can be made
    /// without it
    #[arg(long, value_parser = parse_size)]
    size: Option<u64>,
    /// Take all of DST's space at once (a raw file, or a VHD with --subformat fixed)
    #[arg(long)]
    preallocate: bool,
    /// Compress a qcow2, by deflate unless it says zstd
    #[arg(short = 'c', long, value_name = "deflate|zstd", num_args = 0..=1, require_equals = true, value_parser = parse_compression)]
    compress: Option<Option<Compression>>,
    #[command(flatten)]
    kind: FormatArgs,
    /// Begin although DST might not fit its file system. What SRC holds may be zeroes, and that is known only when it is
    /// read
    #[arg(long, conflicts_with = "preallocate")]
    no_space_check: bool,
    /// Read and write past the page cache or through it, which keeps little of what was written
    #[arg(long, value_name = "direct|page", value_parser = parse_cache, default_value = "page")]
    cache: CacheMode,
    #[command(flatten)]
    read: ReadArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

impl ConvertArgs {
    /// As the command line `spile convert SRC DST` without options.
    pub fn new(src: PathBuf, dst: PathBuf, read: ReadArgs) -> Self {
        Self {
            src,
            dst,
            from: None,
            to: None,
            subformat: None,
            onto: false,
            write_parent: false,
            size: None,
            preallocate: false,
            compress: None,
            kind: FormatArgs::default(),
            no_space_check: false,
            cache: CacheMode::Page,
            read,
            json: false,
        }
    }

    /// From and to these formats.
    pub fn with_formats(self, from: Option<Format>, to: Option<Format>) -> Self {
        Self { from, to, ..self }
    }

    /// Over what is there, if `onto` says so, and also over a parent, if `write_parent` does.
    pub fn with_onto(self, onto: bool, write_parent: bool) -> Self {
        Self { onto, write_parent, ..self }
    }

    /// With JSON on stdout.
    pub fn with_json(self, json: bool) -> Self {
        Self { json, ..self }
    }
}

/// What is known of a source: it is compared while it is copied.
pub struct Known {
    /// What its pieces hold.
    pub digests: Digests,
    /// So much of it is copied, in bytes.
    pub size_bytes: u64,
}

/// A disk that was copied to.
#[derive(Debug, Serialize, ToSchema)]
pub struct Copied {
    /// The new disk: its file, or the URI of its export.
    #[serde(serialize_with = "text_of")]
    #[schema(value_type = String)]
    path: PathBuf,
    /// Its format.
    format: String,
    /// The size that guests see, in bytes.
    virtual_size_bytes: u64,
    /// Bytes of data that were written to it.
    written_bytes: u64,
    /// The space that the file takes on its file system, in bytes.
    used_bytes: Option<u64>,
}

/// Where the bytes come from.
#[derive(Clone, Debug)]
enum Source {
    Disk(Locator),
    Stdin,
}

/// A source that is open.
enum Opened {
    Disk(Box<Aligned<Graph<HostStore>>>),
    Stdin,
}

impl Opened {
    /// Refuses `dst` when it is what is read here.
    fn refuse_onto(&self, dst: &Locator) -> Result<()> {
        match self {
            Self::Disk(disk) => onto::refuse_layers(disk.inner(), dst),
            Self::Stdin => onto::refuse_stdin(dst),
        }
    }
}

/// What all ways of converting need, for the worker that does it.
#[derive(Clone)]
struct Work {
    source: Source,
    read_options: OpenOptions,
    cache: CacheMode,
    to: Format,
    subformat: Option<String>,
    size: Option<u64>,
    preallocate: bool,
    kind: Chosen,
    compresses: bool,
    checks_space: bool,
    write_parent: bool,
    known: Option<Arc<Known>>,
    /// DST as the user knows it.
    dst: PathBuf,
}

/// Says that a raw source looks like another program's file. It is read as a raw disk all the same.
async fn warn_of_container(source: &Graph<HostStore>) {
    let image = source.handles()[0].image();
    if image.format() == Format::Raw
        && image.store().file_id().is_some()
        && let Some(found) = Container::of(&**image.store()).await
    {
        complain(format_args!("warning: {}: {}", image.store().path().display(), found.warning()));
    }
}

/// What a conversion made.
struct Converted {
    virtual_bytes: u64,
    written_bytes: u64,
}

/// Runs `spile convert`.
///
/// # Errors
/// What is wrong with SRC; `Exists` for DST; `NoSpace` when DST is too short or does not fit; I/O errors.
pub fn run(args: &ConvertArgs) -> Result<Exit> {
    convert(args, None)
}

/// As [`run`]. The source is compared with what is `known` of it.
///
/// # Errors
/// As there; `Corrupt` where the source differs.
pub fn convert(args: &ConvertArgs, known: Option<Arc<Known>>) -> Result<Exit> {
    let source = source(args)?;
    if is_dash(&args.dst) {
        return to_stdout(args, source);
    }
    let dst = disks::locate(&args.dst)?;
    let to = match (&dst, args.dst.metadata()) {
        (Locator::Path(path), Ok(stat)) if !args.onto || stat.is_dir() => return Err(exists(path)),
        (Locator::Path(path), Err(_)) if path.is_symlink() => return Err(exists(path)),
        _ => format_of(&dst, args.to, "--to")?,
    };
    let work = Work { known, ..work(args, source, to)? };
    let converted = match (&dst, args.onto) {
        (Locator::Path(_), false) => into_new(args, work)?,
        (Locator::Path(path), true) => onto_path(work, path)?,
        _ => onto_export(args, work, dst)?,
    };
    report(args, to, &converted)
}

fn is_dash(path: &Path) -> bool {
    path == Path::new("-")
}

/// The source. A file that stdin was opened from is read as any other file: it has a length and holes.
fn source(args: &ConvertArgs) -> Result<Source> {
    if !is_dash(&args.src) {
        let at = existing(&args.src)?;
        return format_of(&at, args.from, "--from").map(|_| Source::Disk(at));
    }
    if args.from.is_some_and(|format| format != Format::Raw) {
        return Err(invalid("only raw bytes can be read from stdin").hint("leave --from out, or name a file"));
    }
    if stdin().is_terminal() {
        return Err(invalid("stdin is a terminal, and no disk").hint("say `… | spile convert - DST`"));
    }
    let path = Path::new("/proc/self/fd/0");
    let is_disk = path.metadata().is_ok_and(|stat| stat.is_file() || space::is_block_device(&stat));
    let is_at_start = tell(stdin()).is_ok_and(|at| at == 0);
    Ok(if is_disk && is_at_start { Source::Disk(path.into()) } else { Source::Stdin })
}

fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, what)
}

fn work(args: &ConvertArgs, source: Source, to: Format) -> Result<Work> {
    let kind = chosen(args, to)?;
    let from = if is_dash(&args.src) { Some(Format::Raw) } else { args.from };
    Ok(Work {
        source,
        kind,
        compresses: args.compress.is_some(),
        read_options: args.read.read_only(from),
        cache: args.cache,
        to,
        subformat: args.subformat.clone(),
        size: args.size,
        preallocate: args.preallocate,
        checks_space: !args.no_space_check,
        write_parent: args.write_parent,
        known: None,
        dst: args.dst.clone(),
    })
}

/// What kind of image is made.
fn chosen(args: &ConvertArgs, to: Format) -> Result<Chosen> {
    let mut kind = args.kind.choose(to)?.refuse_data_file()?;
    if kind.preallocate.is_some_and(|takes| takes != Preallocate::Off) {
        return Err(invalid("a converted disk takes space for its data only").hint("leave preallocation out"));
    }
    match args.compress {
        Some(_) if !to.about().has_options => {
            Err(invalid("only a qcow2 can be compressed").at_path(&args.dst).hint("leave out --compress"))
        }
        Some(Some(compression)) => kind.compress(compression).map(|()| kind),
        _ => Ok(kind),
    }
}

fn report(args: &ConvertArgs, to: Format, converted: &Converted) -> Result<Exit> {
    let used_bytes = disks::used_bytes(&args.dst);
    let &Converted { virtual_bytes, written_bytes } = converted;
    if args.json {
        let (path, format) = (args.dst.clone(), to.to_string());
        print_json(&Copied { path, format, virtual_size_bytes: virtual_bytes, written_bytes, used_bytes })?;
    } else {
        let used = used_bytes.map_or(String::new(), |used| format!(", {} used", format_size(used)));
        let (size, written) = (format_size(virtual_bytes), format_size(written_bytes));
        say(format_args!("{}: {size} {to}, {written} of data written{used}", args.dst.display()));
    }
    Ok(Exit::Ok)
}

/// Makes a new disk, which gets its name when all of it is durable.
fn into_new(args: &ConvertArgs, work: Work) -> Result<Converted> {
    check_new_name(&args.dst)?;
    let signals = EndSignals::block()?;
    let half = HalfMade::begin(&args.dst)?;
    signals.exit_after(half.clean_up());
    let path = half.path();
    let converted = match (&work.source, work.size) {
        (Source::Stdin, None) if work.to == Format::Raw && !work.preallocate => {
            stream::into_file(half.file()).map(Converted::whole)
        }
        _ => on_engine(move || async move {
            let source = work.open_source().await?;
            work.fill_new(&source, &path, Beneath::Zeroes).await
        }),
    };
    let converted = converted.map_err(|error| half.told_as(&args.dst, error))?;
    half.publish(&args.dst)?;
    Ok(converted)
}

impl Converted {
    fn whole((virtual_bytes, written_bytes): (u64, u64)) -> Self {
        Self { virtual_bytes, written_bytes }
    }
}

/// Makes the disk in a file or device that is there. Nothing of what it held is left. Before anything of it is changed, it is
/// known that neither the source nor, unless told otherwise, another image needs it.
fn onto_path(work: Work, path: &Path) -> Result<Converted> {
    let stat = path.metadata().map_err(|e| Error::io("cannot be found", e)).at_path(path)?;
    let _alone = space::is_block_device(&stat).then(|| host_device::claim(path)).transpose()?;
    let beneath = if space::is_block_device(&stat) { Beneath::Anything } else { Beneath::Zeroes };
    let path = path.to_owned();
    on_engine(move || async move {
        let source = work.open_source().await?;
        source.refuse_onto(&Locator::from(&path))?;
        if !work.write_parent {
            family::refuse_lost_parent(&path).await?;
        }
        disks::refuse_old_image_at(&path).await?;
        work.fill_new(&source, &path, beneath).await
    })
}

impl Work {
    fn write_options(&self) -> OpenOptions {
        OpenOptions {
            format: Some(self.to),
            no_lock: self.read_options.no_lock,
            write_parent: true,
            ..OpenOptions::default()
        }
    }

    async fn open_source(&self) -> Result<Opened> {
        match &self.source {
            Source::Stdin => Ok(Opened::Stdin),
            Source::Disk(at) => {
                let disk = served::open(self.cache, at, &self.read_options).await?;
                if let Some(known) = &self.known {
                    check_size(&disk, known.size_bytes).at_path(Path::new(&disks::label(at)))?;
                }
                warn_of_container(&disk).await;
                Ok(Opened::Disk(Box::new(Aligned::new(disk))))
            }
        }
    }

    /// How much of a source is copied.
    fn source_bytes(&self, disk: &impl Disk) -> u64 {
        self.known.as_ref().map_or_else(|| disk.size_bytes(), |known| known.size_bytes)
    }

    /// The size of the new disk.
    fn virtual_bytes(&self, source: &Opened) -> Result<u64> {
        let unit = self.to.about().size_unit_bytes;
        match (source, self.size) {
            (Opened::Disk(disk), Some(size)) if size < disk.info().size_bytes => {
                Err(too_short(disk.info().size_bytes, size).at_path(&self.dst))
            }
            (_, Some(size)) => Ok(size),
            (Opened::Disk(disk), None) => Ok(self.source_bytes(&**disk).next_multiple_of(unit)),
            (Opened::Stdin, None) => {
                Err(invalid("a pipe does not say how long the disk is").hint("say --size, or make a raw file"))
            }
        }
    }

    /// Makes an image in the file or device at `path`, copies the source into it, and makes all of it durable.
    async fn fill_new(&self, source: &Opened, path: &Path, beneath: Beneath) -> Result<Converted> {
        let virtual_bytes = self.virtual_bytes(source)?;
        let new = self.kind.image(virtual_bytes, self.subformat.clone());
        let data_bytes = self.check_space(source, &new, path).await?;
        let options = self.write_options();
        checkpoints::lose(path, options.no_lock).await?;
        if self.to == Format::Qcow2 {
            return self.fill_in_order(source, path, &new, beneath, data_bytes).await;
        }
        self.create(path, &new, beneath).await?;
        // What was copied is not read again soon: it shall not fill the page cache.
        let cache = if self.cache == CacheMode::Page { CacheMode::Once } else { self.cache };
        let dst = Aligned::new(disks::open(cache, &path.into(), &options).await?);
        self.fill(source, &dst, beneath, virtual_bytes, data_bytes).await
    }

    /// Makes an image in the file or device at `path` that is written from its start to its end, with what the source has.
    async fn fill_in_order(
        &self,
        source: &Opened,
        path: &Path,
        new: &NewImage,
        beneath: Beneath,
        data_bytes: u64,
    ) -> Result<Converted> {
        // What was copied is not read again soon: it shall not fill the page cache.
        let cache = if self.cache == CacheMode::Page { CacheMode::Once } else { self.cache };
        let files = OsFiles::new(cache).without_locks(self.read_options.no_lock);
        let store = files.open(&path.into(), OpenMode::ReadWrite).await?;
        if beneath == Beneath::Zeroes {
            store.set_len(0).await?;
        }
        let bar = progress_bar(data_bytes, "converting");
        let mut feed = Feed::new(Filler::begin(store, new).await.at_path(path)?, self.compresses);
        let added = match (source, &self.known) {
            (Opened::Disk(disk), None) => feed.add_disk(&**disk, &bar).await,
            (Opened::Disk(disk), Some(known)) => add_known(known, &**disk, &mut feed, &bar).await,
            (Opened::Stdin, _) => feed.add_stdin(new.size_bytes, &bar).await,
        };
        let written = match added {
            Ok(()) => feed.finish().await,
            Err(error) => Err(error),
        };
        bar.finish_and_clear();
        Ok(Converted { virtual_bytes: new.size_bytes, written_bytes: written? })
    }

    /// Refuses what does not fit the file system of a new file, and space that cannot be taken at once. Returns how many bytes of
    /// data there seem to be.
    async fn check_space(&self, source: &Opened, new: &NewImage, path: &Path) -> Result<u64> {
        let shape = self.to.space(new)?;
        let stat = path.metadata().map_err(|e| Error::io("cannot be found", e)).at_path(path)?;
        let held = disks::used_bytes(path).unwrap_or(0);
        if self.preallocate {
            self.check_preallocation(&shape, path, &stat, held)?;
        }
        let Opened::Disk(disk) = source else { return Ok(new.size_bytes) };
        let count = space::count(&**disk, &shape).await?;
        if self.checks_space && !self.preallocate && !space::is_block_device(&stat) {
            let needed = shape.measure(&count).used_bytes.saturating_sub(held);
            // The name may lead elsewhere.
            space::check(path, &self.dst, needed).map_err(|error| match error.kind() {
                ErrorKind::NoSpace => {
                    error.hint("free some space; --no-space-check tries it, as some of it may be zeroes")
                }
                _ => error,
            })?;
        }
        Ok(count.data_bytes())
    }

    fn check_preallocation(&self, shape: &Space, path: &Path, stat: &Metadata, held_bytes: u64) -> Result<()> {
        if space::is_block_device(stat) {
            let error = invalid("a block device has all its space already").at_path(&self.dst);
            return Err(error.hint("leave out --preallocate"));
        }
        space::check_preallocation(shape, path, &self.dst, held_bytes)
    }

    async fn create(&self, path: &Path, new: &NewImage, beneath: Beneath) -> Result<()> {
        let files = OsFiles::new(CacheMode::Page).without_locks(self.read_options.no_lock);
        let store = files.open(&path.into(), OpenMode::ReadWrite).await?;
        if beneath == Beneath::Zeroes {
            store.set_len(0).await?;
        }
        self.to.create(&store, &OsEnv, new).await?;
        if self.preallocate {
            let file = Folder::find(path)?.open(OpenMode::ReadWrite)?;
            if store.file_id() != file.metadata().ok().map(|stat| FileId::of(&stat)) {
                return Err(spile_core::exchanged(&self.dst));
            }
            space::preallocate(&file, &self.dst, new.size_bytes)?;
        }
        Ok(())
    }

    /// Copies all of the source to `dst`, makes it durable and closes it. `data_bytes` is how much there seems to be.
    async fn fill(
        &self,
        source: &Opened,
        dst: &Aligned<Graph<HostStore>>,
        beneath: Beneath,
        least_bytes: u64,
        data_bytes: u64,
    ) -> Result<Converted> {
        let virtual_bytes = dst.info().size_bytes;
        if virtual_bytes < least_bytes {
            return Err(too_short(least_bytes, virtual_bytes));
        }
        let bar = progress_bar(data_bytes, "converting");
        let written = match source {
            Opened::Disk(disk) => match &self.known {
                Some(known) => copy_known(known, &**disk, dst, beneath, &bar).await,
                None => copy(&**disk, dst, beneath, &bar).await,
            },
            Opened::Stdin => stream::into_disk(dst, beneath, &bar).await,
        };
        if written.is_ok() {
            dst.inner().handles()[0].image().store().set_copy(false);
        }
        // The disk is closed after a failure, too: the file will be removed, but its locks and tasks must end.
        let closed = dst.close().await;
        bar.finish_and_clear();
        written.and_then(|written_bytes| closed.map(|()| Converted { virtual_bytes, written_bytes }))
    }
}

/// Copies onto an export, which has to be there. Nothing tells a half-written export from a whole one but the exit code, and Spile's good-bye to its server.
fn onto_export(args: &ConvertArgs, work: Work, dst: Locator) -> Result<Converted> {
    if !matches!(dst, Locator::Nbd(_)) {
        return Err(invalid("nothing is kept there").at_path(&args.dst).hint("name a file, a device or an NBD export"));
    }
    if work.to != Format::at(&dst, None)? || args.subformat.is_some() || args.preallocate || args.size.is_some() {
        let what = "an NBD export can only be overwritten as a raw disk of the size that it has";
        let error = Error::new(ErrorKind::Unsupported, what).at_path(&args.dst);
        return Err(error.hint("leave --to, --subformat, --size and --preallocate out, or convert to a file"));
    }
    on_engine(move || async move {
        let source = work.open_source().await?;
        source.refuse_onto(&dst)?;
        let options = work.write_options();
        let dst = Aligned::new(disks::open(work.cache, &dst, &options).await?);
        dst.inner().handles()[0].image().store().set_copy(true);
        let least = if let Opened::Disk(disk) = &source { work.source_bytes(&**disk) } else { 0 };
        let size = dst.info().size_bytes;
        work.fill(&source, &dst, Beneath::Anything, least, size).await.map_err(|error| error.at_path(&work.dst))
    })
}

fn too_short(src_bytes: u64, dst_bytes: u64) -> Error {
    let (src, dst) = (format_size(src_bytes), format_size(dst_bytes));
    let error = Error::new(ErrorKind::NoSpace, format!("it has {dst}, and the disk {src}"));
    error.hint(format!("it needs {src_bytes} bytes at least"))
}

/// Copies all of `src` and makes it durable; returns how many bytes of data were written.
async fn copy(src: &impl Disk, dst: &impl Disk, beneath: Beneath, bar: &super::Progress) -> Result<u64> {
    let all = Extent::from_range(0..src.info().size_bytes);
    let written = Cell::new(0);
    for_each(Chunks::new(src, all), async |chunk| {
        if !chunk.is_data {
            return zero(dst, beneath, chunk.extent.start()..chunk.extent.end()).await;
        }
        let bytes = read(src, chunk.extent).await?;
        let done = put(dst, beneath, chunk.extent.start(), &bytes).await?;
        written.set(written.get() + done);
        bar.inc(chunk.extent.len_bytes);
        Ok(())
    })
    .await?;
    zero(dst, beneath, all.end()..dst.info().size_bytes).await?;
    dst.flush().await?;
    Ok(written.get())
}

/// As [`copy`], of what is `known` of `src`.
async fn copy_known(
    known: &Known,
    src: &impl Disk,
    dst: &impl Disk,
    beneath: Beneath,
    bar: &super::Progress,
) -> Result<u64> {
    let mut written = 0;
    let each = async |extent: Extent, bytes: Option<Segments>, fits: bool| {
        check_fits(extent, fits)?;
        match bytes {
            Some(bytes) => written += put(dst, beneath, extent.start(), &bytes).await?,
            None => zero(dst, beneath, extent.start()..extent.end()).await?,
        }
        bar.inc(extent.len_bytes);
        Ok(())
    };
    known.digests.compare(src, known.size_bytes, each).await?;
    zero(dst, beneath, known.size_bytes..dst.info().size_bytes).await?;
    dst.flush().await?;
    Ok(written)
}

/// Adds what is `known` of `src` to an image that is written from its start to its end.
async fn add_known<S: Store>(
    known: &Known,
    src: &impl Disk,
    feed: &mut Feed<'_, S>,
    bar: &super::Progress,
) -> Result<()> {
    let mut gather = Gather::new(feed);
    let each = async |extent: Extent, bytes: Option<Segments>, fits: bool| {
        check_fits(extent, fits)?;
        bar.inc(extent.len_bytes);
        match bytes {
            Some(bytes) => gather.add(feed, extent.start(), &bytes).await,
            None => Ok(()),
        }
    };
    known.digests.compare(src, known.size_bytes, each).await?;
    gather.finish(feed).await
}

fn check_fits(extent: Extent, fits: bool) -> Result<()> {
    if fits {
        return Ok(());
    }
    let error = Error::new(ErrorKind::Corrupt, "the backup differs from its digest").at_offset(extent.start());
    Err(error.hint("`spile verify` finds all such places"))
}

/// Writes the disk's bytes to stdout, which then holds nothing else.
fn to_stdout(args: &ConvertArgs, source: Source) -> Result<Exit> {
    let Source::Disk(at) = source else { return Err(invalid("stdin to stdout is no conversion")) };
    if args.to.is_some_and(|to| to != Format::Raw)
        || args.subformat.is_some()
        || args.onto
        || args.preallocate
        || args.compress.is_some()
        || args.json
    {
        let error = invalid("only raw bytes can be written to stdout, and nothing beside them");
        return Err(error.hint("leave --to, --subformat, --onto, --preallocate, --compress and --json out"));
    }
    if stdout().is_terminal() {
        return Err(invalid("stdout is a terminal").hint("say `spile convert SRC - > FILE`"));
    }
    let (options, cache, size) = (args.read.read_only(args.from), args.cache, args.size);
    on_engine(move || async move {
        let disk = served::open(cache, &at, &options).await?;
        warn_of_container(&disk).await;
        let disk = Aligned::new(disk);
        onto::refuse_layers(disk.inner(), &Path::new("/proc/self/fd/1").into())?;
        let bytes = disk.info().size_bytes;
        if size.is_some_and(|size| size < bytes) {
            return Err(too_short(bytes, size.unwrap_or(0)));
        }
        stream::out_of_disk(&disk, size.unwrap_or(bytes)).await
    })?;
    Ok(Exit::Ok)
}
