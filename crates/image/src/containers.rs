//! What other programs' files are, by their first or last bytes. It serves messages only: which format a file is in is never decided by its content, as a
//! guest can write whatever it likes into a raw disk.

use spile_core::{
    Env, Error, ErrorKind, Files, Locator, OpenMode, Result, ResultExt, Segments, Store, StoreOffset, Via,
};

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::formats::{AnyLayer, Format, OpenLayer};

/// A kind of file that holds a disk, known by its content or its extension.
#[derive(Debug, PartialEq, Eq)]
pub struct Container {
    /// What it is called.
    pub name: &'static str,
    /// The format, where it is one that is read here.
    pub format: Option<Format>,
    extensions: &'static [&'static str],
    marks: &'static [Mark],
    way: Way,
}

/// Bytes at a place of the file.
#[derive(Debug, PartialEq, Eq)]
enum Mark {
    /// From this offset on.
    At(usize, &'static [u8]),
    /// At the start of the last 512 bytes.
    Last(&'static [u8]),
}

/// How the disk inside is reached.
#[derive(Debug, PartialEq, Eq)]
enum Way {
    /// qemu-img reads it, by this name.
    QemuImg(&'static str),
    /// This does it.
    By(&'static str),
    /// It is read here.
    Here,
}

/// So much is looked at, at the start and at the end of a file, in bytes.
const LOOK_BYTES: u64 = 512;

const fn container(
    name: &'static str,
    extensions: &'static [&'static str],
    marks: &'static [Mark],
    way: Way,
) -> Container {
    Container { name, format: None, extensions, marks, way }
}

use Mark::{At, Last};
use Way::{By, QemuImg};

/// All that are known. The first whose mark is there counts.
const CONTAINERS: &[Container] = &[
    container("LUKS 1 container", &[], &[At(0, b"LUKS\xba\xbe\0\x01")], By(CRYPTSETUP)),
    container("LUKS 2 container", &[], &[At(0, b"LUKS\xba\xbe\0\x02")], By(CRYPTSETUP)),
    container("LUKS container", &["luks"], &[At(0, b"LUKS\xba\xbe")], By(CRYPTSETUP)),
    container("qcow image of version 1", &["qcow"], &[At(0, b"QFI\xfb\0\0\0\x01")], QemuImg("qcow")),
    Container {
        format: Some(Format::Qcow2),
        ..container("qcow2 image", &[], &[At(0, b"QFI\xfb\0\0\0\x02"), At(0, b"QFI\xfb\0\0\0\x03")], Way::Here)
    },
    container(
        "VMDK",
        &["vmdk"],
        &[At(0, b"KDMV"), At(0, b"COWD"), At(0, b"# Disk DescriptorFile"), At(0, b"\xbe\xba\xfe\xca\0\0\0")],
        QemuImg("vmdk"),
    ),
    container("VDI", &["vdi"], &[At(0x40, b"\x7f\x10\xda\xbe")], QemuImg("vdi")),
    container("VHDX", &["vhdx", "avhdx"], &[At(0, b"vhdxfile")], QemuImg("vhdx")),
    container("QED image", &["qed"], &[At(0, b"QED\0")], QemuImg("qed")),
    container(
        "Parallels image",
        &["hdd", "hds"],
        &[At(0, b"WithoutFreeSpace"), At(0, b"WithouFreSpacExt")],
        QemuImg("parallels"),
    ),
    container("Bochs image", &["bochs"], &[At(0, b"Bochs Virtual HD Image")], QemuImg("bochs")),
    container(
        "cloop image",
        &["cloop"],
        &[At(0, b"#!/bin/sh\n#V2.0 Format"), At(0, b"#!/bin/sh\n#V1.0 Format")],
        QemuImg("cloop"),
    ),
    container("DMG image", &["dmg"], &[Last(b"koly")], QemuImg("dmg")),
    container("EWF image", &["e01"], &[At(0, b"EVF\x09\x0d\x0a\xff\0")], By("`ewfmount` of libewf shows its disk")),
    container("VMA archive of Proxmox", &["vma"], &[At(0, b"VMA\0")], By("`vma extract` unpacks it")),
    container("Android sparse image", &[], &[At(0, b"\x3a\xff\x26\xed\x01\0")], By("`simg2img` unpacks it")),
    container("gzip file", &["gz"], &[At(0, b"\x1f\x8b\x08")], By("`gzip -d` unpacks it")),
    container("xz file", &["xz"], &[At(0, b"\xfd7zXZ\0")], By("`xz -d` unpacks it")),
    container("zstd file", &["zst"], &[At(0, b"\x28\xb5\x2f\xfd")], By("`zstd -d` unpacks it")),
    container("bzip2 file", &["bz2"], &[At(4, b"1AY&SY")], By("`bzip2 -d` unpacks it")),
    container("lz4 file", &["lz4"], &[At(0, b"\x04\x22\x4d\x18")], By("`lz4 -d` unpacks it")),
    container("zip archive", &["zip"], &[At(0, b"PK\x03\x04")], By("`unzip` unpacks it")),
    container("7z archive", &["7z"], &[At(0, b"7z\xbc\xaf\x27\x1c")], By("`7z x` unpacks it")),
    container("tar archive", &["ova", "xva", "tar"], &[At(257, b"ustar")], By("`tar -x` unpacks it")),
    Container {
        format: Some(Format::Vhd),
        ..container("VHD", &[], &[At(0, b"conectix"), Last(b"conectix")], Way::Here)
    },
];

const CRYPTSETUP: &str = "`cryptsetup open FILE NAME` shows the disk inside as /dev/mapper/NAME, which is raw";

impl Mark {
    fn is_in(&self, first: &[u8], last: &[u8]) -> bool {
        match self {
            At(at, mark) => first.get(*at..).is_some_and(|bytes| bytes.starts_with(mark)),
            Last(mark) => last.starts_with(mark),
        }
    }
}

impl Container {
    /// What a file is that begins with `first` and ends with `last`, which is a whole sector.
    fn of_bytes(first: &[u8], last: &[u8]) -> Option<&'static Self> {
        CONTAINERS.iter().find(|container| container.marks.iter().any(|mark| mark.is_in(first, last)))
    }

    /// What the extension says; nothing of what is read here.
    fn of_extension(path: &Path) -> Option<&'static Self> {
        let extension = path.extension()?.to_str()?.to_ascii_lowercase();
        CONTAINERS.iter().find(|container| container.extensions.contains(&extension.as_str()))
    }

    /// What `store` is, as far as its first and last bytes show it. A store that cannot be read shows nothing.
    pub async fn of<S: Store>(store: &S) -> Option<&'static Self> {
        let len = store.len_bytes();
        let first = read(store, 0..LOOK_BYTES.min(len)).await?;
        let last = read(store, len.saturating_sub(LOOK_BYTES)..len).await?;
        Self::of_bytes(&first, &last)
    }

    /// What to say of a raw disk that looks like it.
    pub fn warning(&self) -> String {
        let name = self.name;
        let what = format!("it looks like a {name}, and is read as a raw disk, as its extension or an option says");
        match self.format {
            Some(format) => format!("{what}; if it is a {name}, say that its format is {format}"),
            None => format!("{what}; if it is a {name}: {}", self.way()),
        }
    }

    fn way(&self) -> String {
        match self.way {
            QemuImg(format) => format!("`qemu-img convert -f {format} -O qcow2 FILE DISK.qcow2` copies its disk"),
            By(what) => what.to_owned(),
            Way::Here => String::new(),
        }
    }

    /// The error of a file that is one, and whose format nobody has told.
    fn error(&self, path: &Path) -> Error {
        let refuse = |what: String| Error::new(ErrorKind::InvalidInput, what).at_path(path);
        match self.format {
            Some(format) => {
                refuse(format!("the format is not told, and the file looks like a {}", self.name)).hint(format!(
                    "say --format {format} if it is one; the content alone does not decide, as a guest could forge it"
                ))
            }
            None => refuse(format!("this is a {}, which is not read here", self.name))
                .hint(format!("{}; a --format is needed only where it is a disk that looks so", self.way())),
        }
    }
}

async fn read<S: Store>(store: &S, range: Range<u64>) -> Option<Vec<u8>> {
    let bytes = Segments::zeroed((range.end - range.start) as usize);
    store.read_at(StoreOffset(range.start), &bytes, Via::Cached).await.ok()?;
    Some(bytes.to_vec())
}

/// The error of a path whose extension names a format that is not read here. To read such a file as another format would make no sense.
pub(crate) fn foreign(path: &Path) -> Option<Error> {
    let found = Container::of_extension(path)?;
    let what = format!("by its extension this is a {}, which is not read here", found.name);
    let hint = format!("{}; say --format only if the extension is wrong", found.way());
    Some(Error::new(ErrorKind::InvalidInput, what).at_path(path).hint(hint))
}

/// [`Format::at`], and where no format is told, an error that says what the file is, as far as that shows.
///
/// # Errors
/// As there.
pub async fn format_at<F: Files>(files: &F, at: &Locator, given: Option<Format>) -> Result<Format> {
    let error = match Format::at(at, given) {
        Ok(format) => return Ok(format),
        Err(error) => error,
    };
    let (Locator::Path(path), Ok(store)) = (at, files.open(at, OpenMode::ReadOnly).await) else { return Err(error) };
    Err(Container::of(&store).await.map_or(error, |found| found.error(path)))
}

/// Opens the image in `store`, which is the file at `at`. The error of an image that is another program's file says so.
///
/// # Errors
/// As [`Format::open`].
pub(crate) async fn open_image<F: Files>(
    files: &F,
    at: &Locator,
    format: Format,
    store: F::Store,
    env: &Arc<dyn Env>,
    how: OpenLayer,
) -> Result<AnyLayer<F::Store>> {
    match format.open(store, env, how).await {
        Err(error) if error.kind() == ErrorKind::Corrupt => match files.open(at, OpenMode::ReadOnly).await {
            Ok(store) => Err(mistaken(&store, format).await.unwrap_or(error)).at_path(store.path()),
            Err(_) => Err(error),
        },
        opened => opened,
    }
}

/// The error of a file that cannot be read as `format`, where it shows that it is something else.
pub async fn mistaken<S: Store>(store: &S, format: Format) -> Option<Error> {
    let found = Container::of(store).await.filter(|found| found.format != Some(format))?;
    let what = format!("this is a {}, and no {format}", found.name);
    let error = Error::new(ErrorKind::InvalidInput, what).at_path(store.path());
    Some(match found.format {
        Some(format) => error.hint(format!("say that its format is {format}")),
        None => error.hint(format!("it is not read here: {}", found.way())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_of(first: &[u8], last: &[u8]) -> Option<&'static str> {
        Container::of_bytes(first, last).map(|found| found.name)
    }

    #[test]
    fn each_mark_means_its_container_and_no_bytes_mean_none() {
        for container in CONTAINERS {
            for mark in container.marks {
                let (mut first, mut last) = (vec![0; 512], vec![0; 512]);
                match mark {
                    At(at, mark) => first[*at..*at + mark.len()].copy_from_slice(mark),
                    Last(mark) => last[..mark.len()].copy_from_slice(mark),
                }
                assert_eq!(name_of(&first, &last), Some(container.name), "{mark:?}");
            }
        }
        assert_eq!((name_of(&[0; 512], &[0; 512]), name_of(&[], &[]), name_of(b"QFI", b"")), (None, None, None));
    }

    #[test]
    fn what_is_read_here_has_no_foreign_extension() {
        for extension in CONTAINERS.iter().flat_map(|container| container.extensions) {
            assert_eq!(Format::from_extension(Path::new(&format!("a.{extension}"))), None, "{extension}");
            let error = foreign(Path::new(&format!("a.{}", extension.to_ascii_uppercase()))).unwrap();
            assert!(!error.hint_text().unwrap().is_empty() && !error.to_string().contains("--format raw"), "{error}");
        }
        assert!(foreign(Path::new("a.raw")).is_none() && foreign(Path::new("gz")).is_none());
    }

    #[test]
    fn a_raw_disk_is_never_told_to_be_another_one_without_a_doubt() {
        for container in CONTAINERS {
            let says = container.warning();
            assert!(says.contains("looks like") && says.contains("if it is"), "{says}");
        }
    }
}
