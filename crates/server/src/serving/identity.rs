//! What tells one disk from every other, so that a successor never serves other bytes under the names of a running server.
//!
//! A disk's path is no part of it: a file may be renamed while it is served, and another file may be put in its place. So the
//! identity of an open disk comes from the file that was opened ([`Identity::with_opened`]). What a path names now
//! ([`Identity::of`]) is good enough to ask with; it may be another file when the disk is opened.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Locator, Result};
use spile_image::Format;
use spile_image::Graph;
use spile_image::layer::Layer as _;
use spile_nbd_wire::uri::NbdUri;
use spile_store::{FileId, HostStore};

use crate::disks::DiskSpec;

/// Where a disk's bytes are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// A file.
    File {
        /// The file system's device number.
        device: u64,
        /// The number of the file in it.
        inode: u64,
    },
    /// A block device, by its own device number.
    BlockDevice(u64),
    /// Something that is no file, as it was typed: `null:1048576`.
    Locator(String),
    /// A file that is not there, or whose folder may not be searched.
    Missing,
}

/// What a disk is, whatever it is called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Where its bytes are.
    pub place: Place,
    /// The format that its bytes are read as.
    pub format: String,
    /// The format of a parent that its child does not name, where one was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_format: Option<String>,
    /// Writes are refused.
    pub read_only: bool,
    /// For messages: its path, or what was typed. Two identities with other labels may be the same.
    pub label: String,
}

impl Identity {
    /// The identity of what `spec` names now; `format` is for a disk that says none itself, `parent_format` for a parent
    /// whose child says none.
    pub fn of(spec: &DiskSpec, format: Option<Format>, parent_format: Option<Format>) -> Self {
        let format = spec.format.or(format);
        let (place, format) = match &spec.source {
            Locator::Path(path) => (place_of(path), format.or_else(|| Format::from_extension(path))),
            Locator::Nbd(uri) => (Place::Locator(uri.clone()), format.or(Some(Format::Raw))),
            other => (Place::Locator(other.to_string()), Some(Format::Raw)),
        };
        let format = format.map_or_else(|| "unknown".to_owned(), |format| format.to_string());
        Self {
            place,
            format,
            parent_format: parent_format.map(|format| format.to_string()),
            read_only: spec.read_only,
            label: crate::disks::label(&spec.source),
        }
    }

    /// The same identity, with the file that was opened as `graph` in the place of the file that the path names.
    pub fn with_opened(self, graph: &Graph<HostStore>) -> Self {
        let leaf = graph.handles().first().and_then(|layer| layer.image().store().file_id());
        Self { place: leaf.map_or(self.place, Place::from), ..self }
    }

    /// True when a server may serve this disk beside `other`. Two disks in memory are never the same. A file may also be
    /// read where it is written, as its lock allows. An export of an NBD server has no lock, so it is served several times
    /// only when nobody writes to it.
    pub fn goes_with(&self, other: &Self) -> bool {
        match (&self.place, &other.place) {
            (Place::Missing, _) => true,
            (Place::Locator(ours), Place::Locator(theirs)) => {
                self.read_only && other.read_only || !is_same_export(ours, theirs)
            }
            (ours, theirs) => self.read_only || ours != theirs,
        }
    }

    /// True when both are the same disk, read in the same way.
    pub fn is_same(&self, other: &Self) -> bool {
        let key = |disk: &Self| (disk.place.clone(), disk.format.clone(), disk.parent_format.clone(), disk.read_only);
        key(self) == key(other) && self.place != Place::Missing
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let read_only = if self.read_only { ", read-only" } else { "" };
        write!(f, "{} ({}", self.label, self.format)?;
        if let Some(format) = &self.parent_format {
            write!(f, " over {format}")?;
        }
        f.write_str(read_only)?;
        match &self.place {
            Place::File { device, inode } => write!(f, ", inode {inode} on device {device})"),
            Place::BlockDevice(number) => write!(f, ", block device {number})"),
            Place::Locator(text) => write!(f, ", {text})"),
            Place::Missing => write!(f, ", not found)"),
        }
    }
}

impl From<FileId> for Place {
    fn from(id: FileId) -> Self {
        match id {
            FileId::File { device, inode } => Self::File { device, inode },
            FileId::BlockDevice(number) => Self::BlockDevice(number),
        }
    }
}

/// True when both are URIs of the same export of the same NBD server.
fn is_same_export(one: &str, other: &str) -> bool {
    let export = |text: &str| text.parse().ok().map(|NbdUri { address, export, .. }| (address, export));
    export(one).is_some_and(|one| export(other) == Some(one))
}

fn place_of(path: &Path) -> Place {
    std::fs::metadata(path).map_or(Place::Missing, |stat| FileId::of(&stat).into())
}

/// A disk under the name that NBD clients and vhost-user sockets know it by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exported {
    /// The export's name; empty for the default export.
    pub name: String,
    /// Which disk that is.
    pub disk: Identity,
}

/// Refuses a successor that would serve another disk, or none, under one of our names.
///
/// # Errors
/// `InvalidInput` with the disk that is served and the one that was asked for.
pub fn compare(ours: &[Exported], theirs: &[Exported]) -> Result<()> {
    let refuse = |what| Err(Error::new(ErrorKind::InvalidInput, what).hint("serve with the same disks as before"));
    for Exported { name, disk } in ours {
        match theirs.iter().find(|other| other.name == *name) {
            None => return refuse(format!("export {name:?} is {disk}, and the successor has no such export")),
            Some(other) if !disk.is_same(&other.disk) => {
                return refuse(format!("export {name:?} is {disk}, and the successor asks for {}", other.disk));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(spec: &str) -> Identity {
        Identity::of(&spec.parse().unwrap(), None, None)
    }

    #[test]
    fn a_parent_that_is_read_as_another_format_makes_another_disk() {
        let of = |format| Identity::of(&"null:1M".parse().unwrap(), None, format);
        assert!(of(Some(Format::Raw)).is_same(&of(Some(Format::Raw))));
        assert!(!of(Some(Format::Raw)).is_same(&of(Some(Format::Vhd))) && !of(None).is_same(&of(Some(Format::Raw))));
    }

    #[test]
    fn an_nbd_export_is_written_by_one_disk_and_read_by_no_other_then() {
        let goes_with = |one: &str, other: &str| {
            let (one, other) = (identity(one), identity(other));
            assert_eq!(one.goes_with(&other), other.goes_with(&one));
            one.goes_with(&other)
        };
        assert!(!goes_with("nbd://h/x", "nbd://h/x,format=vhd,name=b"));
        assert!(!goes_with("nbd://h/x", "nbd://h:10809/x,read-only"));
        assert!(!goes_with("nbd://h/x", "nbds://h/x"));
        assert!(goes_with("nbd://h/x,read-only", "nbd://h:10809/x,format=vhd,read-only"));
        assert!(goes_with("nbd://h/x", "nbd://h/y") && goes_with("nbd://h/x", "nbd://g/x"));
        assert!(goes_with("null:1M", "null:1M") && goes_with("mem:1M", "mem:1M"));
    }

    #[test]
    fn a_disk_is_its_file_and_not_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let of = |name: &str| identity(&path(name).display().to_string());
        std::fs::write(path("a.raw"), [0; 512]).unwrap();
        std::fs::write(path("b.raw"), [0; 512]).unwrap();
        std::fs::hard_link(path("a.raw"), path("c.raw")).unwrap();
        std::os::unix::fs::symlink(path("a.raw"), path("d.raw")).unwrap();
        let a = of("a.raw");
        assert!(a.is_same(&of("c.raw")) && a.is_same(&of("d.raw")));
        assert!(!a.is_same(&of("b.raw")));
        assert!(!a.is_same(&of("a.raw,read-only")) && !a.is_same(&of("a.raw,format=vhd")));
        // Another file under the same name is another disk.
        std::fs::rename(path("b.raw"), path("a.raw")).unwrap();
        assert!(!a.is_same(&of("a.raw")) && a.is_same(&of("c.raw")));
        assert!(!of("gone.raw").is_same(&of("gone.raw")));
        assert!(identity("null:1M").is_same(&identity("null:1024k")));
        assert!(!identity("null:1M").is_same(&identity("null:2M")));
        assert!(!identity("null:1M").is_same(&identity("mem:1M")));
    }
}
