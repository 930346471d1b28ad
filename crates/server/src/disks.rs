//! What the command line calls a DISK, and how it is opened.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use spile_core::{Error, ErrorKind, Files, Result, Store};
use spile_engine::OsEnv;
use spile_image::{Chain, Format, OpenOptions};
use spile_store::{AnyStore, CacheMode, MemStore, NullStore, OsFiles};

use crate::units::parse_size;

/// Where a disk's bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// An image file or block device.
    File(PathBuf),
    /// `null:SIZE`: reads zeroes, drops writes.
    Null(u64),
    /// `mem:SIZE`: memory, gone when the program ends.
    Mem(u64),
}

impl Source {
    /// For messages: the path, or what was typed.
    pub fn label(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Null(_) => "null".to_owned(),
            Self::Mem(_) => "mem".to_owned(),
        }
    }

    /// The name of its export when no other is given: the file's name without its extension.
    pub fn stem(&self) -> String {
        match self {
            Self::File(path) => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
            Self::Null(_) | Self::Mem(_) => self.label(),
        }
    }
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let size = |size| match parse_size(size)? {
            bytes if bytes.is_multiple_of(512) && bytes > 0 => Ok(bytes),
            _ => Err(format!("the size of `{text}` must be a positive multiple of 512 bytes")),
        };
        match text.split_once(':') {
            _ if text.is_empty() => Err("the DISK is empty".to_owned()),
            Some(("null", rest)) => size(rest).map(Self::Null),
            Some(("mem", rest)) => size(rest).map(Self::Mem),
            _ => Ok(Self::File(text.into())),
        }
    }
}

/// `DISK[,name=N][,serial=S][,format=F][,read-only]`, as `serve` takes it. A comma in the path is doubled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    /// Where it is.
    pub source: Source,
    /// The export's name, if given.
    pub name: Option<String>,
    /// The serial number that guests read, if given.
    pub serial: Option<String>,
    /// The format, if given.
    pub format: Option<Format>,
    /// Serve it for reading only.
    pub read_only: bool,
}

impl FromStr for DiskSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = split_commas(text).into_iter();
        let source = parts.next().unwrap_or_default().parse()?;
        let mut spec = Self { source, name: None, serial: None, format: None, read_only: false };
        for part in parts {
            match part.split_once('=') {
                Some(("name", name)) => spec.name = Some(name.to_owned()),
                Some(("serial", serial)) => spec.serial = Some(serial.to_owned()),
                Some(("format", name)) => {
                    spec.format = Some(name.parse().map_err(|e: Error| e.to_string())?);
                }
                None if part == "read-only" => spec.read_only = true,
                _ => {
                    return Err(format!(
                        "`{part}` is not an option of a DISK; use name=N, serial=S, format=F or read-only \
                         (a comma in the path is doubled)"
                    ));
                }
            }
        }
        Ok(spec)
    }
}

/// Splits at single commas; a double one stands for a comma.
pub(crate) fn split_commas(text: &str) -> Vec<String> {
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

/// Opens the disk of `source` with its parents.
///
/// # Errors
/// As [`Chain::open`].
pub async fn open(cache: CacheMode, source: &Source, options: &OpenOptions) -> Result<Chain<AnyStore>> {
    open_with(&OsFiles::new(cache), source, options, |store| store).await
}

/// [`open`] over any kind of files; `wrap` makes their kind of store from one that has no path.
///
/// # Errors
/// As [`Chain::open`].
pub async fn open_with<F: Files>(
    files: &F,
    source: &Source,
    options: &OpenOptions,
    wrap: impl FnOnce(AnyStore) -> F::Store,
) -> Result<Chain<F::Store>> {
    let from = |store| Chain::from_raw_store(wrap(store), options.read_only);
    match source {
        Source::File(path) => {
            refuse_folder(path)?;
            Chain::open(files, Arc::new(OsEnv), path, options).await
        }
        Source::Null(size) => Ok(from(AnyStore::Null(NullStore::new(*size)))),
        Source::Mem(size) => Ok(from(AnyStore::Mem(MemStore::new(*size)))),
    }
}

fn refuse_folder(path: &Path) -> Result<()> {
    match path.is_dir() {
        true => Err(Error::new(ErrorKind::InvalidInput, "is a folder, not a disk").at_path(path)),
        false => Ok(()),
    }
}

/// The space that the file at `path` takes on its file system, in bytes; `None` when there is none.
pub fn used_bytes(path: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).ok().map(|meta| meta.blocks() * 512)
}

/// A short word for what a chain is: `raw`, `vhd`, or `vhd, 3 layers`.
pub fn describe<S: Store>(chain: &Chain<S>) -> String {
    let layers = chain.layers();
    match layers.len() {
        1 => layers[0].format.to_string(),
        n => format!("{}, {n} layers", layers[0].format),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str) -> Source {
        Source::File(path.into())
    }

    #[test]
    fn disks_have_options() {
        let spec: DiskSpec = "a.vhd,name=x,format=raw,read-only".parse().unwrap();
        assert_eq!((spec.source, spec.name.as_deref()), (file("a.vhd"), Some("x")));
        assert_eq!((spec.format, spec.read_only), (Some(Format::Raw), true));
    }

    #[test]
    fn a_doubled_comma_is_a_comma() {
        let spec: DiskSpec = "a,,b,,,name=".parse().unwrap();
        assert_eq!((spec.source, spec.name.as_deref()), (file("a,b,"), Some("")));
    }

    #[test]
    fn disks_without_files() {
        assert_eq!("null:1T".parse(), Ok(Source::Null(1 << 40)));
        assert_eq!("mem:512".parse(), Ok(Source::Mem(512)));
        assert_eq!("./null:1T".parse(), Ok(file("./null:1T")));
        for text in ["", "null:", "mem:100", "null:x", "null:0"] {
            assert!(text.parse::<Source>().is_err(), "{text}");
        }
        assert!("a,b".parse::<DiskSpec>().unwrap_err().contains("`b`"));
    }

    #[test]
    fn stems_name_exports() {
        assert_eq!(file("/x/disk.0.vhd").stem(), "disk.0");
    }
}
