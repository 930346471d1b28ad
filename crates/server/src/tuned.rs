//! [`ShapeChoice`]: the shape of a disk's requests as an operator says it. `tuned` means what `spile tune` has found out about the device on
//! which the disk lies, and keeps in a small file ([`Tuned`]).
//!
//! The file is `tune/DEVICE.json` in `$SPILE_STATE_DIR`, or in `/var/lib/spile`. DEVICE is the identity that the device itself tells
//! ([`HostDevice::identity`]). For a device that tells none nothing is kept, so that another device that gets its name or number later is not
//! taken for it. The files on a device share its parallelism, so they share what was found out about one of them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Locator, Result, ResultExt};
use spile_node::Shape;
use spile_store::own::read_note;
use spile_store::own_folder;
use utoipa::ToSchema;

use crate::host_device::HostDevice;

/// The shape of a disk's requests as an operator says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShapeChoice {
    /// This one.
    Exactly(Shape),
    /// What `spile tune` recommends for the disk's device.
    Tuned,
}

impl FromStr for ShapeChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "tuned" => Ok(Self::Tuned),
            text => Shape::parse(text, "off, split=SIZE, merge=SIZE, auto or tuned").map(Self::Exactly),
        }
    }
}

impl fmt::Display for ShapeChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exactly(shape) => shape.fmt(f),
            Self::Tuned => f.write_str("tuned"),
        }
    }
}

impl ShapeChoice {
    /// The shape for the disk at `source`. Where nothing is known of its device, that is off, and the log says it.
    pub fn resolve(self, source: &Locator) -> Shape {
        match self {
            Self::Exactly(shape) => shape,
            Self::Tuned => tuned(source).unwrap_or_else(|error| {
                tracing::warn!("the shape of requests to {source} is off: {error}");
                Shape::Off
            }),
        }
    }
}

/// No file of that is longer.
const MOST_BYTES: u64 = 64 << 10;

/// What `spile tune` has found out about a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Tuned {
    /// The recommended shape: `off` or `split=SIZE`.
    pub shape: String,
    /// How many times as fast large requests are in parts of the best size as whole.
    pub gain: f64,
    /// What was measured: a path.
    pub target: String,
    /// The device's identity.
    pub device: String,
    /// `read` or `write`.
    pub operation: String,
    /// How often each pair of sizes was measured.
    pub rounds: u32,
    /// When, by UTC.
    pub date_utc: String,
}

/// What [`Tuned::save`] has done.
#[derive(Clone, Debug, PartialEq)]
pub enum Saved {
    /// It is kept in this file.
    Kept(PathBuf),
    /// This file stays as it is, because this tells more.
    Stays(PathBuf, Tuned),
}

impl Tuned {
    /// Keeps this for servers, unless they have something that tells more: more rounds, or reads, which guests wait for, where this is
    /// of writes.
    ///
    /// # Errors
    /// The system's, with the path.
    pub fn save(&self) -> Result<Saved> {
        self.save_in(&folder())
    }

    fn save_in(&self, folder: &Path) -> Result<Saved> {
        let path = file_of(folder, &self.device);
        let kept = read(&path).ok().flatten();
        if let Some(kept) = kept.filter(|kept| kept.tells_more_than(self)) {
            return Ok(Saved::Stays(path, kept));
        }
        own_folder::make(folder)?;
        let text = serde_json::to_string_pretty(self).expect("it has plain keys") + "\n";
        // A server that reads at this moment gets the old file or the new one.
        let new = path.with_extension("new");
        let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &path));
        written.map_err(|e| Error::io("cannot write", e).at_path(&path))?;
        Ok(Saved::Kept(path))
    }

    fn tells_more_than(&self, other: &Self) -> bool {
        match self.operation == other.operation {
            true => self.rounds > other.rounds,
            false => self.operation == "read",
        }
    }
}

fn tuned(source: &Locator) -> Result<Shape> {
    let nothing_known =
        || Error::new(ErrorKind::NotFound, "nothing is known of its device").hint("run `spile tune` with it");
    let Some(path) = source.as_path() else { return Err(nothing_known()) };
    let file = file_of(&folder(), &device_of(path)?);
    let tuned = read(&file)?.ok_or_else(nothing_known)?;
    tuned.shape.parse().at_path(&file)
}

/// What is kept in `file`; `None` when there is no such file.
fn read(file: &Path) -> Result<Option<Tuned>> {
    let Some(text) = read_note(file, MOST_BYTES)? else { return Ok(None) };
    serde_json::from_slice(&text)
        .map(Some)
        .map_err(|error| Error::new(ErrorKind::Corrupt, "is not a file of `spile tune`").caused_by(error).at_path(file))
}

fn folder() -> PathBuf {
    let state = std::env::var_os("SPILE_STATE_DIR").filter(|folder| !folder.is_empty());
    state.map_or_else(|| "/var/lib/spile".into(), PathBuf::from).join("tune")
}

fn file_of(folder: &Path, device: &str) -> PathBuf {
    folder.join(format!("{device}.json"))
}

/// The identity of the device that `path` is or lies on.
///
/// # Errors
/// `NotFound` when there is no such device, or when it tells no identity.
pub fn device_of(path: &Path) -> Result<String> {
    let device = HostDevice::below_path(path).map_err(|why| Error::new(ErrorKind::NotFound, why.to_string()))?;
    device.identity().ok_or_else(|| {
        let what = format!("its device {} tells no identity: no wwid, no serial number, no UUID", device.name);
        Error::new(ErrorKind::NotFound, what).hint("say the shape itself, such as shape=split=64k").at_path(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_a_shape_or_tuned() {
        assert_eq!("tuned".parse::<ShapeChoice>().unwrap(), ShapeChoice::Tuned);
        assert!(
            ["tuned", "off", "split=64k"].iter().all(|text| text.parse::<ShapeChoice>().unwrap().to_string() == *text)
        );
        assert_eq!("merge=1M".parse::<ShapeChoice>().unwrap(), ShapeChoice::Exactly(Shape::Merge(1 << 20)));
        assert!("x".parse::<ShapeChoice>().unwrap_err().to_string().contains("not a shape"));
    }

    #[test]
    fn a_size_that_is_wrong_keeps_its_own_hint() {
        let hint = |text: &str| text.parse::<ShapeChoice>().unwrap_err().to_string();
        assert!(hint("x").contains("auto or tuned"), "{}", hint("x"));
        assert!(hint("split=3k").contains("a power of two") && !hint("split=3k").contains("tuned"));
    }

    #[test]
    fn what_tells_less_replaces_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let of = |operation: &str, rounds, shape: &str| Tuned {
            shape: shape.into(),
            gain: 2.0,
            target: "/dev/x".into(),
            device: "x".into(),
            operation: operation.into(),
            rounds,
            date_utc: "2026-01-01T00:00:00Z".into(),
        };
        let kept = || read(&file_of(dir.path(), "x")).unwrap().unwrap().shape;
        // A quick run of writes, replaced by a full one, then by one of reads, which stays, then by one of reads with more rounds.
        for (new, then) in [
            (of("write", 1, "off"), "off"),
            (of("write", 3, "split=4k"), "split=4k"),
            (of("read", 1, "split=8k"), "split=8k"),
            (of("write", 9, "off"), "split=8k"),
            (of("read", 3, "split=16k"), "split=16k"),
            (of("read", 1, "off"), "split=16k"),
            (of("read", 3, "split=32k"), "split=32k"),
        ] {
            let saved = new.save_in(dir.path()).unwrap();
            assert_eq!((kept().as_str(), matches!(saved, Saved::Kept(_))), (then, new.shape == then), "{new:?}");
        }
        std::fs::write(file_of(dir.path(), "x"), "{}").unwrap();
        of("read", 1, "off").save_in(dir.path()).unwrap();
        assert_eq!(kept(), "off", "what cannot be read is replaced");
    }

    #[test]
    fn a_path_on_no_device_says_why() {
        let error = device_of(Path::new("/proc/version")).unwrap_err().to_string();
        assert!(error.contains("no block device"), "{error}");
    }

    #[test]
    fn a_disk_without_a_device_is_not_shaped() {
        assert_eq!(ShapeChoice::Tuned.resolve(&"null:1M".parse().unwrap()), Shape::Off);
    }
}
