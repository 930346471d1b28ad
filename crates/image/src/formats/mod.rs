//! The formats, each in a folder of its own, and the one table that names them.
//!
//! A new format is a folder with an [`ImageFormat`] and its [`Layer`], and a line in the table below. Everything else
//! (graphs, creating, converting, checking, showing) works through the table and names no format.
//!
//! Which format a file is in is never guessed from its content: a guest that owns a raw disk owns its first sector,
//! and could make the host read any file by writing a header there (CVE-2008-2004 and similar ones).

#[macro_use]
mod table;

mod bytes;
pub mod qcow2;
pub mod raw;
pub mod vhd;

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use spile_core::{
    Env, Error, ErrorKind, Extent, ExtentKind, Locator, Result, ResultExt, Segments, Store, StoreOffset, Timer, Via,
};

use crate::amend::{Amended, Amendment};
use crate::bitmaps::{BitmapPart, InnerBitmap, KeptBitmaps};
use crate::check::{Lost, Report};
use crate::containers;
use crate::create::{NewImage, NewParent, Options};
use crate::facts::Facts;
use crate::grace::Reader;
use crate::inner::{InnerChange, InnerSnapshot, InnerWatch};
use crate::layer::{EncodedUnit, Found, GivenBack, Identity, Layer, MapPiece, ParentRef, Reserved};
use crate::measure::Space;
use crate::range_lock::RangeGuard;
use crate::room::HearRoom;

formats! {
    "The guest's bytes as they are.",
    Raw => raw::RawFormat;
    "Virtual Hard Disk: fixed, dynamic or differencing.",
    Vhd => vhd::VhdFormat;
    "qcow2, of QEMU.",
    Qcow2 => qcow2::Qcow2Format;
}

/// A format: its names and abilities, and how its images are opened, made and checked.
pub trait ImageFormat {
    /// Names and abilities.
    const ABOUT: About;
    /// An opened image.
    type Layer<S: Store>: Layer<S>;

    /// Opens the image in `store`. Whatever the image claims is checked before it is believed.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported`, saying which field is wrong; I/O errors.
    fn open<S: Store>(store: S, env: &Arc<dyn Env>, how: OpenLayer) -> impl Future<Output = Result<Self::Layer<S>>>;

    /// What the image in `store` says of its parent, if it has one. Reads a header or two and neither maps nor data.
    ///
    /// # Errors
    /// As [`ImageFormat::open`].
    fn named_parent<S: Store>(store: &S) -> impl Future<Output = Result<Option<ParentRef>>>;

    /// The file that the image in `store` says holds its data, if that is another one: a path, relative to the image's folder.
    ///
    /// # Errors
    /// As [`ImageFormat::open`].
    fn named_data_file<S: Store>(store: &S) -> impl Future<Output = Result<Option<PathBuf>>> {
        let _ = store;
        async { Ok(None) }
    }

    /// Writes an empty image into `store`, which is empty itself or a device. Everything is durable when it returns.
    ///
    /// # Errors
    /// `InvalidInput` for what the format cannot express; `Exists`, `NoSpace`; I/O errors. A failed creation may leave a
    /// part of the image behind.
    fn create<S: Store>(store: &S, env: &dyn Env, new: &NewImage) -> impl Future<Output = Result<()>>;

    /// The space that a new image takes.
    ///
    /// # Errors
    /// `InvalidInput` for what the format cannot express.
    fn space(new: &NewImage) -> Result<Space>;

    /// Checks the image in `store` for contradictions; its parents are not looked at.
    ///
    /// # Errors
    /// When the image is too damaged to be read at all; I/O errors.
    fn check<S: Store>(store: &S, env: &dyn Env) -> impl Future<Output = Result<Report>>;

    /// Mends what a check says can be mended, and returns what was found before. Gives up data that the file no longer has
    /// only when `lost` says so.
    ///
    /// # Errors
    /// As [`ImageFormat::check`]; `ReadOnly` when the store cannot be written; `Unsupported` where the format has no repair.
    fn repair<S: Store>(store: &S, env: &dyn Env, lost: Lost) -> impl Future<Output = Result<Report>>;
}

/// How a layer is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenLayer {
    /// Open it for reading only.
    pub read_only: bool,
    /// Of an image that is open for reading only, read what says where the bytes lie when it is needed, and check it then.
    pub lazy: bool,
    /// Memory for pieces of the map that can be read again, in bytes.
    pub cache_bytes: usize,
    /// Refuse to write to an image whose refcounts may be wrong, instead of making them anew.
    pub keeps_dirty: bool,
}

/// The names and abilities of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About {
    /// Its name on the command line and in JSON.
    pub name: &'static str,
    /// Other names that it goes by, in command lines and in images that name their parent's format.
    pub aliases: &'static [&'static str],
    /// The file extensions that mean it, in lower case.
    pub extensions: &'static [&'static str],
    /// The kinds of it that can be created by name; the first is the usual one.
    pub subformats: &'static [&'static str],
    /// Its images can have parents.
    pub has_parents: bool,
    /// A new image can have [`Options`](crate::create::Options) and units of a chosen size.
    pub has_options: bool,
    /// Virtual sizes are multiples of this many bytes.
    pub size_unit_bytes: u64,
    /// The first bytes of each identity of its images, where a child can tell the format of its parent by them. Such an identity is made of
    /// what lies where in the image: it stays as long as nobody writes to the image.
    pub identity_mark: Option<[u8; 4]>,
}

impl Format {
    /// The name by which other programs know the format, in an image that names its parent's.
    pub fn backing_name(self) -> &'static str {
        self.about().aliases.first().copied().unwrap_or(self.about().name)
    }

    /// The format that `name` means, if any: a name or an alias.
    pub fn named(name: &str) -> Option<Self> {
        let means = |format: &Self| format.about().name == name || format.about().aliases.contains(&name);
        Self::ALL.iter().copied().find(means)
    }

    /// The format whose mark `identity` has, if any.
    pub fn marked(identity: Identity) -> Option<Self> {
        let has_mark = |format: &Self| format.about().identity_mark.is_some_and(|mark| identity.0.starts_with(&mark));
        Self::ALL.iter().copied().find(has_mark)
    }

    /// True when no identity of this format's images changes while they are written to.
    pub fn has_lasting_identities(self) -> bool {
        self.about().identity_mark.is_none()
    }

    /// True when `identity` stays the same while its image is written to.
    pub fn lasts(identity: Identity) -> bool {
        Self::marked(identity).is_none()
    }

    /// The format that the file's extension means, if any.
    pub fn from_extension(path: &Path) -> Option<Self> {
        let extension = path.extension()?.to_str()?.to_ascii_lowercase();
        Self::ALL.iter().copied().find(|format| format.about().extensions.contains(&extension.as_str()))
    }

    /// `given`, else what the extension says, else an error that says what to type.
    ///
    /// # Errors
    /// `InvalidInput` when neither names a format.
    pub fn of(path: &Path, given: Option<Self>) -> Result<Self> {
        given.or_else(|| Self::from_extension(path)).ok_or_else(|| {
            if let Some(error) = containers::foreign(path) {
                return error;
            }
            let choices = Self::names("--format ");
            Error::new(ErrorKind::InvalidInput, "cannot tell the format from the file's extension")
                .at_path(path)
                .hint(format!("say {choices}; the content is never probed, as a guest could forge it"))
        })
    }

    /// The format of what is at a locator: as [`Format::of`] for a file; `given` or raw for an NBD export; raw for the others.
    ///
    /// # Errors
    /// As [`Format::of`].
    pub fn at(at: &Locator, given: Option<Self>) -> Result<Self> {
        match at {
            Locator::Path(path) => Self::of(path, given),
            Locator::Nbd(_) => Ok(given.unwrap_or(Self::Raw)),
            Locator::Null(_) | Locator::Mem(_) => Ok(Self::Raw),
        }
    }

    /// All names for a message, each with `before` in front: `raw, vhd or qcow2`.
    fn names(before: &str) -> String {
        let names: Vec<_> = Self::ALL.iter().map(|format| format!("{before}{format}")).collect();
        match names.split_last() {
            Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
            _ => names.concat(),
        }
    }

    /// Opens the image in `store` as this format.
    ///
    /// # Errors
    /// As [`ImageFormat::open`].
    pub async fn open<S: Store>(self, store: S, env: &Arc<dyn Env>, how: OpenLayer) -> Result<AnyLayer<S>> {
        let path = store.path().to_owned();
        self.open_any(store, env, how).await.at_path(&path)
    }

    /// Writes an empty image of this format into `store`, as [`ImageFormat::create`] says.
    ///
    /// # Errors
    /// `InvalidInput` for what the format does not have; as [`ImageFormat::create`].
    pub async fn create<S: Store>(self, store: &S, env: &dyn Env, new: &NewImage) -> Result<()> {
        self.check_new(new)?;
        self.create_any(store, env, new).await.at_path(store.path())
    }

    /// The space that a new image takes, before anything is made.
    ///
    /// # Errors
    /// As [`Format::check_new`].
    pub fn space(self, new: &NewImage) -> Result<Space> {
        self.check_new(new)?;
        self.space_any(new)
    }

    /// Tells, before anything is made, whether the format has what `new` asks for.
    ///
    /// # Errors
    /// `InvalidInput` for a subformat, parent or options that the format does not have.
    pub fn check_new(self, new: &NewImage) -> Result<()> {
        let about = self.about();
        let refuse = |what: String| Err(Error::new(ErrorKind::InvalidInput, what));
        if new.options != Options::default() && !about.has_options {
            return refuse(format!("a {self} disk has no clusters, refcounts or compression to choose"));
        }
        match &new.subformat {
            Some(_) if about.subformats.is_empty() => return refuse(format!("a {self} disk has no --subformat")),
            Some(kind) if !about.subformats.contains(&kind.as_str()) => {
                return refuse(format!("{self} has no subformat {kind:?}; it has {}", about.subformats.join(", ")));
            }
            _ => {}
        }
        match &new.parent {
            Some(_) if !about.has_parents => {
                let able = Self::ALL.iter().find(|format| format.about().has_parents);
                let hint = able.map_or(String::new(), |format| format!("; use --format {format}"));
                refuse(format!("a {self} disk has no parent{hint}"))
            }
            _ => Ok(()),
        }
    }
}

impl<S: Store> AnyLayer<S> {
    /// The whole of `store` as a raw disk, for stores that hold no image, such as memory.
    pub fn bare(store: S) -> Self {
        let size = store.len_bytes();
        Self::Raw(raw::Raw::new(store, size))
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.about().name)
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::named(name).ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, format!("unknown format '{name}'")).hint(Self::names(""))
        })
    }
}

/// The error for a structure that a codec refuses. `hint` says what the user can do, if there is something.
fn codec_error(kind: ErrorKind, what: &impl fmt::Display, hint: Option<&'static str>) -> Error {
    let error = Error::new(kind, what.to_string());
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_name_formats_and_nothing_else_does() {
        assert_eq!(Format::of(Path::new("a.VHD"), None).unwrap(), Format::Vhd);
        assert_eq!(Format::of(Path::new("a.img"), None).unwrap(), Format::Raw);
        assert_eq!(Format::of(Path::new("a.img"), Some(Format::Vhd)).unwrap(), Format::Vhd);
        assert_eq!(Format::of(Path::new("disk"), None).unwrap_err().kind(), ErrorKind::InvalidInput);
        let foreign = Format::of(Path::new("a.VHDX"), None).unwrap_err();
        assert!(foreign.to_string().contains("VHDX") && !foreign.to_string().contains("--format raw"), "{foreign}");
    }

    #[test]
    fn no_name_and_no_extension_means_two_formats() {
        let mut names = Vec::new();
        let mut extensions = Vec::new();
        for format in Format::ALL {
            let about = format.about();
            names.push(about.name);
            names.extend(about.aliases);
            extensions.extend(about.extensions);
            assert_eq!(about.name.parse::<Format>().unwrap(), *format);
        }
        for list in [&mut names, &mut extensions] {
            let all = list.len();
            list.sort_unstable();
            list.dedup();
            assert_eq!(list.len(), all, "{list:?}");
        }
        assert_eq!("vpc".parse::<Format>().unwrap(), Format::Vhd);
        assert!("vmdk".parse::<Format>().unwrap_err().hint_text().unwrap().contains("raw"));
    }

    #[test]
    fn what_a_format_does_not_have_is_refused() {
        let new = |subformat: Option<&str>, parent| NewImage {
            subformat: subformat.map(str::to_owned),
            parent,
            ..NewImage::new(512)
        };
        let parent = crate::create::NewParent {
            relative_path: "p".into(),
            name: "p".into(),
            format: Format::Raw,
            identity: None,
            changed_unix_s: None,
        };
        assert!(Format::Raw.check_new(&new(Some("fixed"), None)).is_err());
        assert!(Format::Raw.check_new(&new(None, Some(parent))).is_err());
        assert!(Format::Vhd.check_new(&new(Some("sparse"), None)).is_err());
        assert!(Format::Vhd.check_new(&new(Some("fixed"), None)).is_ok());
    }
}
