//! [`ShapeChoice`]: the shape of a disk's requests as an operator says it. `tuned` means what `spile tune` has found out about the device on
//! which the disk lies, and keeps in a small file ([`Tuned`]).
//!
//! The file is `tune/DEVICE.json` in `$SPILE_STATE_DIR`, or in `/var/lib/spile`. DEVICE is the identity that the device itself tells, as
//! far as it has one, so that another device that gets the same name later is not taken for it. The files on a device share its
//! parallelism, so they share what was found out about one of them.

use std::fmt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::{major, minor};
use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Locator, Result, ResultExt};
use spile_node::Shape;
use utoipa::ToSchema;

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
            text => match text.parse() {
                Ok(shape) => Ok(Self::Exactly(shape)),
                Err(error) if error.to_string().contains("is not a shape") => {
                    Err(error.hint("use off, split=SIZE, merge=SIZE, auto or tuned"))
                }
                Err(error) => Err(error),
            },
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
    /// When, by UTC.
    pub date_utc: String,
}

impl Tuned {
    /// Keeps this for servers. Returns the file's path.
    ///
    /// # Errors
    /// The system's, with the path.
    pub fn save(&self) -> Result<PathBuf> {
        let path = file_of(&self.device);
        let folder = folder();
        std::fs::create_dir_all(&folder).map_err(|e| Error::io("make the folder", e)).at_path(&folder)?;
        let text = serde_json::to_string_pretty(self).expect("it has plain keys") + "\n";
        // A server that reads at this moment gets the old file or the new one.
        let new = path.with_extension("new");
        let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &path));
        written.map_err(|e| Error::io("cannot write", e).at_path(&path)).map(|()| path)
    }
}

fn tuned(source: &Locator) -> Result<Shape> {
    let nothing_known =
        || Error::new(ErrorKind::NotFound, "nothing is known of its device").hint("run `spile tune` with it");
    let Some(path) = source.as_path() else { return Err(nothing_known()) };
    let file = file_of(&device_of(path)?);
    let text = match std::fs::read_to_string(&file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(nothing_known()),
        read => read.map_err(|e| Error::io("cannot read", e).at_path(&file))?,
    };
    let tuned: Tuned = serde_json::from_str(&text).map_err(|error| {
        Error::new(ErrorKind::Corrupt, "is not a file of `spile tune`").caused_by(error).at_path(&file)
    })?;
    tuned.shape.parse().at_path(&file)
}

fn folder() -> PathBuf {
    let state = std::env::var_os("SPILE_STATE_DIR").filter(|folder| !folder.is_empty());
    state.map_or_else(|| "/var/lib/spile".into(), PathBuf::from).join("tune")
}

fn file_of(device: &str) -> PathBuf {
    folder().join(format!("{device}.json"))
}

/// The identity of the device that `path` is or lies on. A partition is a part of its disk.
///
/// # Errors
/// The system's, with the path.
pub fn device_of(path: &Path) -> Result<String> {
    let stat = path.metadata().map_err(|e| Error::io("cannot be found", e)).at_path(path)?;
    let number = if stat.file_type().is_block_device() { stat.rdev() } else { stat.dev() };
    let name = format!("{}:{}", major(number), minor(number));
    let Ok(at) = std::fs::canonicalize(Path::new("/sys/dev/block").join(&name)) else { return Ok(plain(&name)) };
    let whole = match at.parent() {
        Some(disk) if at.join("partition").exists() => disk,
        _ => &at,
    };
    let read = |file: &str| std::fs::read_to_string(whole.join(file)).ok().map(|text| plain(text.trim()));
    let told = ["wwid", "device/wwid", "serial", "device/serial", "dev"].into_iter().filter_map(read);
    Ok(told.into_iter().find(|text| !text.is_empty()).unwrap_or_else(|| plain(&name)))
}

/// `text` as a part of a file's name.
fn plain(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let text: String = text.chars().map(|c| if is_plain(c) { c } else { '-' }).take(100).collect();
    text.trim_matches(['.', '-']).to_owned()
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
    fn identities_are_parts_of_file_names() {
        assert_eq!(plain("../naa.5000 c5/00"), "naa.5000-c5-00");
        assert_eq!(plain("8:16"), "8-16");
    }

    #[test]
    fn two_files_of_a_folder_lie_on_one_device() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| dir.path().join(name));
        [&a, &b].into_iter().for_each(|path| std::fs::write(path, "").unwrap());
        assert_eq!(device_of(&a).unwrap(), device_of(&b).unwrap());
        assert!(!device_of(&a).unwrap().is_empty());
    }

    #[test]
    fn a_disk_without_a_device_is_not_shaped() {
        assert_eq!(ShapeChoice::Tuned.resolve(&"null:1M".parse().unwrap()), Shape::Off);
    }
}
