//! What the command line calls a DISK, and how it is opened.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use spile_core::{Error, ErrorKind, Files, Locator, Result, Store};
use spile_engine::OsEnv;
use spile_image::formats::qcow2::is_dirty;
use spile_image::{Format, Graph, OpenOptions};
use spile_life::motion::{Moved, refuse_old_image, take_back};
use spile_node::{Limits, OnError, Policy};
use spile_store::own::{MOST_NOTE_BYTES, read_note};
use spile_store::{CacheMode, HostFiles, HostStore, OsFiles};

use crate::grow::{self, GrowOptions};
use crate::limits;
use crate::serving::passages;
use crate::tuned::ShapeChoice;
use crate::units::parse_duration;
use crate::{checkpoints, family, stamps};

/// What a command's DISK means: a locator, or the path of a file whose name is no UTF-8.
///
/// # Errors
/// As for a locator's text.
pub fn locate(disk: &Path) -> Result<Locator> {
    match disk.to_str() {
        Some(text) => text.parse(),
        None => Ok(disk.into()),
    }
}

/// The disk's name in messages: its path, or what was typed.
pub fn label(source: &Locator) -> String {
    match source {
        Locator::Null(_) => "null".to_owned(),
        Locator::Mem(_) => "mem".to_owned(),
        other => other.to_string(),
    }
}

/// The name of a disk's export when no other is given: the file's name without its extension.
pub fn stem(source: &Locator) -> String {
    match source {
        Locator::Path(path) => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        Locator::Nbd(_) => "nbd".to_owned(),
        Locator::Null(_) | Locator::Mem(_) => label(source),
    }
}

/// `DISK[,name=N][,serial=S][,format=F][,read-only][,on-error=report|pause][,pause-at-most=TIME][,shape=S]`, growth ([`grow::OPTIONS`]) and limits
/// ([`limits::OPTIONS`], `group=NAME`), as `serve` takes it. A comma in the path is doubled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    /// Where it is.
    pub source: Locator,
    /// The export's name, if given.
    pub name: Option<String>,
    /// The serial number that guests read, if given.
    pub serial: Option<String>,
    /// The format, if given.
    pub format: Option<Format>,
    /// Serve it for reading only.
    pub read_only: bool,
    /// What is done with requests that fail, if given.
    pub on_error: Option<OnError>,
    /// How long a request waits at most, if given.
    pub pause_at_most: Option<Duration>,
    /// How its device is made longer, as far as given.
    pub grow: GrowOptions,
    /// The shape of its requests, if given.
    pub shape: Option<ShapeChoice>,
    /// Its own limits, if given.
    pub limits: Option<Limits>,
    /// The group with which it shares limits, if given.
    pub group: Option<String>,
}

impl DiskSpec {
    /// A disk of which only its place is given.
    pub fn new(source: Locator) -> Self {
        Self {
            source,
            name: None,
            serial: None,
            format: None,
            read_only: false,
            on_error: None,
            pause_at_most: None,
            grow: GrowOptions::default(),
            shape: None,
            limits: None,
            group: None,
        }
    }

    /// The disk's policy for trouble below it; `default` is the server's.
    pub fn policy(&self, default: Policy) -> Policy {
        Policy {
            on_error: self.on_error.unwrap_or(default.on_error),
            pause_at_most: self.pause_at_most.or(default.pause_at_most),
        }
    }

    /// The disk's own name on its server: `name=N`, else its file's name without the extension.
    pub fn own_name(&self) -> String {
        self.name.clone().filter(|name| !name.is_empty()).unwrap_or_else(|| stem(&self.source))
    }
}

impl FromStr for DiskSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = split_commas(text).into_iter();
        let source = parts.next().unwrap_or_default().parse().map_err(|e: Error| e.to_string())?;
        let mut spec = Self::new(source);
        for part in parts {
            match part.split_once('=') {
                Some(("name", name)) => spec.name = Some(name.to_owned()),
                Some(("serial", serial)) => spec.serial = Some(check_serial(serial)?.to_owned()),
                Some(("format", name)) => {
                    spec.format = Some(name.parse().map_err(|e: Error| e.to_string())?);
                }
                Some(("on-error", policy)) => {
                    spec.on_error = Some(policy.parse().map_err(|e: Error| e.to_string())?);
                }
                Some(("pause-at-most", time)) => spec.pause_at_most = Some(parse_duration(time)?),
                Some(("shape", shape)) => spec.shape = Some(shape.parse().map_err(|e: Error| e.to_string())?),
                Some(("group", group)) => spec.group = Some(group.to_owned()),
                Some((key, value)) if spec.grow.read_option(key, value)? => {}
                Some((key, value)) if limits::read_option(spec.limits.get_or_insert_default(), key, value)? => {}
                None if part == "read-only" => spec.read_only = true,
                _ => {
                    return Err(format!(
                        "`{part}` is not an option of a DISK; use name=N, serial=S, format=F, read-only, \
                         on-error=report|pause, pause-at-most=TIME, {}, shape=S, group=NAME, or one of {} (a comma in the path \
                         is doubled)",
                        grow::OPTIONS,
                        limits::OPTIONS
                    ));
                }
            }
        }
        Ok(spec)
    }
}

/// Refuses a serial number that a guest would not see whole.
fn check_serial(serial: &str) -> Result<&str, String> {
    match serial.len() {
        0..=SERIAL_BYTES => Ok(serial),
        len => Err(format!("the serial number {serial:?} has {len} bytes; a guest sees {SERIAL_BYTES} at most")),
    }
}

/// What virtio-blk has room for (VIRTIO_BLK_ID_BYTES).
const SERIAL_BYTES: usize = 20;

/// Splits at single commas; a double one stands for a comma.
pub fn split_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let last = parts.last_mut().expect("never empty");
        match c {
            ',' if chars.next_if_eq(&',').is_some() => last.push(','),
            ',' => parts.push(String::new()),
            c => last.push(c),
        }
    }
    parts
}

/// As [`open_keeping`], for whoever does not note which blocks it changes: in a disk that is opened for writing and has checkpoints,
/// everything counts as changed since.
///
/// # Errors
/// As there, and those of [`checkpoints::forget`].
pub async fn open(cache: CacheMode, source: &Locator, options: &OpenOptions) -> Result<Graph<HostStore>> {
    let disk = open_keeping(cache, source, options).await?;
    if !options.read_only {
        checkpoints::forget(&disk, options.no_lock).await?;
    }
    Ok(disk)
}

/// Opens the disk of `source` with its parents. A disk that is opened for writing must be no image's parent itself, as far as
/// its folder tells, unless the options allow that. A parent that was written after its child was made is one line in the log.
/// Nothing begins to prepare its writes before [`Graph::begin`]. The caller opens the disk's [`Checkpoints`](checkpoints::Checkpoints), and
/// closes them with the disk.
///
/// # Errors
/// As [`Graph::open`]; `Denied` for a parent, for the old image of a disk that was moved, and for a disk that was handed over to another host.
pub async fn open_keeping(cache: CacheMode, source: &Locator, options: &OpenOptions) -> Result<Graph<HostStore>> {
    let disk = open_to_serve(cache, source, options).await?;
    if !options.read_only && !options.write_moved {
        passages::refuse_gone(&disk)?;
    }
    Ok(disk)
}

/// Refuses to write to the old image of a disk that was moved away. A link is followed.
///
/// # Errors
/// As [`refuse_old_image`].
pub async fn refuse_old_image_at(path: &Path) -> Result<()> {
    match path.canonicalize() {
        Ok(path) => refuse_old_image(&HostFiles::new(OsFiles::new(CacheMode::Page)), &path).await,
        // What is not there is told by whoever opens it.
        Err(_) => Ok(()),
    }
}

/// As [`open_keeping`], for a server: guests of a disk that was handed over wait there until they may go on.
///
/// # Errors
/// As [`open_keeping`].
pub async fn open_to_serve(cache: CacheMode, source: &Locator, options: &OpenOptions) -> Result<Graph<HostStore>> {
    let files = HostFiles::new(OsFiles::new(cache).without_locks(options.no_lock));
    look_for_moved(&files, source, !options.read_only).await?;
    if let (Locator::Path(path), false) = (source, options.read_only || options.write_moved) {
        refuse_old_image_at(path).await?;
    }
    let disk = open_unless_dirty(&files, source, options).await?;
    let layers = disk.layers();
    if let (Locator::Path(_), false) = (source, options.read_only || options.write_parent) {
        family::refuse_parent(&layers).await?;
        family::refuse_shared_data(&disk).await?;
    }
    if let (Locator::Path(_), false) = (source, options.read_only) {
        for path in spile_life::recover(&files, &disk).await? {
            tracing::warn!("{}: left by a snapshot that was broken off, and removed", path.display());
        }
    }
    for doubt in stamps::changed_parents(layers).await.iter().filter(|doubt| doubt.is_evident) {
        tracing::warn!("{}: what the child shows may be wrong", doubt.message);
    }
    Ok(disk)
}

/// As [`open_with`]. A qcow2 image that is to get new refcounts, as its last writer was killed, must be no image's parent: what is refused is not
/// changed. Without locks nobody can tell whether that writer lives, so such an image is refused then.
async fn open_unless_dirty(files: &HostFiles, source: &Locator, options: &OpenOptions) -> Result<Graph<HostStore>> {
    match open_with(files, source, &OpenOptions { keeps_dirty: true, ..options.clone() }).await {
        Err(error) if is_dirty(&error) && !options.no_lock => {}
        opened => return opened,
    }
    if let (Locator::Path(_), false) = (source, options.write_parent) {
        let read = open_with(files, source, &OpenOptions { read_only: true, ..options.clone() }).await?;
        family::refuse_parent(&read.layers()).await?;
    }
    open_with(files, source, options).await
}

/// Looks for a disk that is not at its path: it may have been moved, and a hand-over that was broken off is taken back.
///
/// # Errors
/// `NotFound` with the place that the disk was moved to; the system's.
async fn look_for_moved(files: &HostFiles, source: &Locator, may_change: bool) -> Result<()> {
    if let Some(path) = missing(source)
        && take_back(files, &path, may_change).await?
    {
        tracing::warn!("{}: it was about to be moved when a process ended, and goes on here", path.display());
    }
    Ok(())
}

/// What is known of a disk that is not at its path.
pub fn moved(source: &Locator) -> Option<Moved> {
    let disk = missing(source)?;
    let note = read_note(&spile_life::names::moved(&disk), MOST_NOTE_BYTES).ok()??;
    Moved::of_disk(&String::from_utf8_lossy(&note), &disk)
}

/// The whole path of a file that is not there: of the one that a link names, if there is a link.
fn missing(source: &Locator) -> Option<PathBuf> {
    let Locator::Path(path) = source else { return None };
    let mut path = std::path::absolute(path).ok()?;
    for _ in 0..MOST_LINKS {
        match path.symlink_metadata() {
            Ok(stat) if stat.is_symlink() => path = path.parent()?.join(path.read_link().ok()?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
            }
            _ => return None,
        }
    }
    None
}

/// So many links are followed to a name, as the system does.
const MOST_LINKS: usize = 40;

/// [`open`] over any kind of files.
///
/// # Errors
/// As [`Graph::open`].
pub async fn open_with<F: Files>(files: &F, source: &Locator, options: &OpenOptions) -> Result<Graph<F::Store>> {
    find(source)?;
    Graph::open(files, Arc::new(OsEnv), source, options).await
}

/// Looks whether there is something that may be a disk. What is missing is told first, before any doubt about its format.
///
/// # Errors
/// `NotFound` and other errors of the system; `InvalidInput` for a folder.
pub fn find(source: &Locator) -> Result<()> {
    let Locator::Path(path) = source else { return Ok(()) };
    match path.metadata() {
        Err(error) => match moved(source) {
            // A hand-over that was broken off is taken back when the disk is opened.
            Some(Moved { to: Locator::Path(to), half: Some(half), .. }) if half.exists() && !to.exists() => Ok(()),
            Some(moved) => Err(moved.told(path)),
            None => Err(Error::io("cannot be found", error).at_path(path)),
        },
        Ok(stat) if stat.is_dir() => Err(Error::new(ErrorKind::InvalidInput, "is a folder, not a disk").at_path(path)),
        Ok(_) => Ok(()),
    }
}

/// The space that the file at `path` takes on its file system, in bytes; `None` when there is none.
pub fn used_bytes(path: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).ok().map(|meta| meta.blocks() * 512)
}

/// A short word for what a chain is: `raw`, `vhd`, or `vhd, 3 layers`.
pub fn describe<S: Store>(chain: &Graph<S>) -> String {
    let layers = chain.layers();
    match layers.len() {
        1 => layers[0].format.to_string(),
        n => format!("{}, {n} layers", layers[0].format),
    }
}

#[cfg(test)]
mod tests {
    use spile_node::Shape;

    use super::*;

    fn file(path: &str) -> Locator {
        Locator::Path(path.into())
    }

    #[test]
    fn disks_have_options() {
        let spec: DiskSpec = "a.vhd,name=x,format=raw,read-only".parse().unwrap();
        assert_eq!((spec.source, spec.name.as_deref()), (file("a.vhd"), Some("x")));
        assert_eq!((spec.format, spec.read_only), (Some(Format::Raw), true));
    }

    #[test]
    fn a_disk_has_its_own_policy_or_the_servers() {
        let servers = Policy { on_error: OnError::Pause, pause_at_most: Some(Duration::from_secs(9)) };
        let of = |text: &str| text.parse::<DiskSpec>().unwrap().policy(servers);
        assert_eq!(of("a"), servers);
        assert_eq!(of("a,on-error=report"), Policy { on_error: OnError::Report, ..servers });
        assert_eq!(of("a,pause-at-most=2m"), Policy { pause_at_most: Some(Duration::from_secs(120)), ..servers });
        assert!("a,on-error=stop".parse::<DiskSpec>().unwrap_err().contains("report or pause"));
    }

    #[test]
    fn a_disk_has_a_shape_of_its_own() {
        let of = |text: &str| text.parse::<DiskSpec>().map(|spec| spec.shape);
        assert_eq!(of("a"), Ok(None));
        assert_eq!(of("a,shape=split=128k"), Ok(Some(ShapeChoice::Exactly(Shape::Split(128 << 10)))));
        assert_eq!(of("a,shape=tuned,read-only"), Ok(Some(ShapeChoice::Tuned)));
        assert!(of("a,shape=wide").unwrap_err().contains("not a shape"));
    }

    #[test]
    fn a_disk_has_limits_and_a_group() {
        let of = |text: &str| text.parse::<DiskSpec>().map(|spec| (spec.limits, spec.group));
        assert_eq!(of("a"), Ok((None, None)));
        let limits = Limits { iops: Some(100), read_bps: Some(1 << 20), ..Limits::default() };
        assert_eq!(of("a,iops=100,read-bps=1M,group=g"), Ok((Some(limits), Some("g".to_owned()))));
        assert!(of("a,write-iops=0").unwrap_err().contains("let nothing pass"));
    }

    #[test]
    fn a_doubled_comma_is_a_comma() {
        let spec: DiskSpec = "a,,b,,,name=".parse().unwrap();
        assert_eq!((spec.source, spec.name.as_deref()), (file("a,b,"), Some("")));
    }

    #[test]
    fn a_serial_number_that_a_guest_would_not_see_whole_is_refused() {
        assert_eq!("a,serial=12345678901234567890".parse::<DiskSpec>().unwrap().serial.unwrap().len(), 20);
        assert!("a,serial=123456789012345678901".parse::<DiskSpec>().unwrap_err().contains("20 at most"));
    }

    #[test]
    fn an_unknown_option_is_refused() {
        assert!("a,b".parse::<DiskSpec>().unwrap_err().contains("`b`"));
    }

    #[test]
    fn stems_name_exports() {
        assert_eq!(stem(&file("/x/disk.0.vhd")), "disk.0");
    }
}
