//! [`Manifest`]: what a file beside a backup says of it: of which disk it is and of what moment, and the digests of its pieces.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{BufReader, BufWriter, ErrorKind as IoKind, Read, Seek as _, Take, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, OpenMode, Result, ResultExt};
use spile_life::backup::{Digests, PIECE_BYTES, Summer};
use spile_store::own::unless_foreign;
use spile_store::{FileId, Folder, OsFiles};

use super::digest_text;
use super::target::Since;

/// The version that this program writes.
const VERSION: u32 = 1;
/// No manifest is longer: that of a disk with 15 TiB of data.
const MOST_BYTES: u64 = 512 << 20;
/// Nor is a line of one: what is read of one text at a time is bounded.
const MOST_LINE_BYTES: usize = 16 << 20;
/// What a manifest is made with; the umask takes its part.
const FILE_MODE: Mode = Mode::from_raw_mode(0o666);
/// The name of the digests' algorithm.
const DIGEST: &str = "xxh3-64";

/// Whether a backup can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// All of it is there, and durable.
    Whole,
    /// An older backup is being changed into this one. What it holds is of no moment.
    UnderWay,
}

/// What is known of a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    version: u32,
    /// Whether it can be used.
    pub state: State,
    /// The path of the disk.
    pub disk: String,
    /// The size of the disk in bytes.
    pub virtual_size_bytes: u64,
    /// The moment whose content it has, in seconds since 1970 UTC.
    pub point_in_time_unix_s: u64,
    /// The checkpoint of the disk that was made at that moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// When that checkpoint was made, in seconds since 1970 UTC: another one of its name is not meant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_unix_s: Option<u64>,
    /// Which disk that checkpoint is of, wherever the disk goes: as its file of changed blocks says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_id: Option<String>,
    /// The checkpoint since which it has the changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// The file name of the backup that this one is a child of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    piece_bytes: u64,
    digest: String,
    /// The digest of the manifest itself, as it is written without this one. One that a former program has written has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    checksum: Option<String>,
    /// By the number of the piece; pieces that hold zeroes are left out.
    #[serde(with = "digest_text")]
    digests: BTreeMap<u64, u64>,
}

/// What all versions of a manifest have.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl Manifest {
    /// The manifest of a whole backup of the disk at `disk`, made at a moment.
    pub fn new(disk: String, virtual_size_bytes: u64, point_in_time_unix_s: u64) -> Self {
        Self {
            version: VERSION,
            state: State::Whole,
            disk,
            virtual_size_bytes,
            point_in_time_unix_s,
            checkpoint: None,
            checkpoint_unix_s: None,
            disk_id: None,
            since: None,
            parent: None,
            piece_bytes: PIECE_BYTES,
            digest: DIGEST.to_owned(),
            checksum: None,
            digests: BTreeMap::new(),
        }
    }

    /// With these digests.
    pub fn with_digests(self, digests: &Digests) -> Self {
        Self { digests: digests.0.clone(), ..self }
    }

    /// As the manifest of a child of the backup of this file name.
    pub fn with_parent(self, parent: Option<String>) -> Self {
        Self { parent, ..self }
    }

    /// As long as the backup is being changed into a newer one.
    pub fn under_way(self) -> Self {
        Self { state: State::UnderWay, ..self }
    }

    /// The file beside the backup `target`.
    pub fn path_of(target: &Path) -> PathBuf {
        let mut name = OsString::from(target);
        name.push(".spile-backup");
        name.into()
    }

    /// Reads the manifest at `path`, of a backup that can be used.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt` for what is no manifest; `Unsupported` for a newer one; `Busy` for a backup that is half changed; the system's.
    pub fn read_whole(path: &Path) -> Result<Self> {
        let manifest = Self::read(path)?;
        match manifest.state {
            State::Whole => Ok(manifest),
            State::UnderWay => {
                let what = "the backup is half changed into a newer one: it holds no moment of its disk";
                Err(Error::new(ErrorKind::Busy, what)
                    .at_path(path)
                    .hint("if no backup is under way any more, remove it and make a full one, or overwrite it"))
            }
        }
    }

    /// Refuses anything at `path` that is no manifest: one would take its place.
    ///
    /// # Errors
    /// `Exists`; the system's.
    pub fn refuse_other(path: &Path) -> Result<()> {
        match path.symlink_metadata() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            found => found.map_err(|error| Error::io("cannot be looked at", error)).at_path(path)?,
        };
        if Self::read(path).is_ok() {
            return Ok(());
        }
        let what = "the backup's manifest would take the place of something else";
        Err(Error::new(ErrorKind::Exists, what).at_path(path).hint("remove it, or say --manifest FILE"))
    }

    /// Reads the manifest as it comes: what is none is not read to its end.
    fn read(path: &Path) -> Result<Self> {
        let missing = |error: Error| match error.kind() {
            ErrorKind::NotFound => Error::new(ErrorKind::NotFound, "the backup has no manifest here")
                .hint("`spile backup` writes it beside a file; --manifest names another place"),
            _ => error,
        };
        let file = Folder::find(path).and_then(|place| place.open(OpenMode::ReadOnly)).map_err(missing);
        file.and_then(|file| Self::parse(&file)).at_path(path)
    }

    fn parse(mut file: &File) -> Result<Self> {
        let corrupt = |why: &str| Error::new(ErrorKind::Corrupt, format!("this is no manifest of a backup: {why}"));
        let unclear = |error: serde_json::Error| match error.is_io() {
            true if error.io_error_kind() == Some(IoKind::InvalidData) => corrupt("a line of it is too long"),
            true => Error::io("cannot be read", error.into()),
            false => corrupt("it is not understood").caused_by(error),
        };
        let newer = || {
            let error = Error::new(ErrorKind::Unsupported, "a newer program has written the backup");
            Err(error.hint("use that program, or a newer one"))
        };
        let stat = file.metadata().map_err(|error| Error::io("cannot be read", error))?;
        if !stat.is_file() || stat.len() > MOST_BYTES {
            let len = stat.len();
            return Err(corrupt(&format!("it has {len} bytes, and a manifest has {MOST_BYTES} at most")));
        }
        // The fields of a newer one may be others.
        let text = |file| BufReader::new(ShortLines { file: Read::take(file, MOST_BYTES), len_bytes: 0 });
        if serde_json::from_reader::<_, Versioned>(text(file)).map_err(unclear)?.version > VERSION {
            return newer();
        }
        file.rewind().map_err(|error| Error::io("cannot be read", error))?;
        let mut manifest = serde_json::from_reader::<_, Self>(text(file)).map_err(unclear)?;
        if manifest.piece_bytes != PIECE_BYTES || manifest.digest != DIGEST {
            return newer();
        }
        match manifest.checksum.take() {
            Some(checksum) if checksum != manifest.sum()? => Err(corrupt("it is damaged")),
            _ => Ok(manifest),
        }
    }

    /// Writes it to the begin of `file`, which is empty, and makes that durable.
    fn fill(&mut self, file: &File) -> Result<()> {
        self.checksum = Some(self.sum()?);
        let mut out = BufWriter::new(file);
        serde_json::to_writer_pretty(&mut out, self).map_err(|error| unwritten(error.into()))?;
        out.flush().and_then(|()| file.sync_all()).map_err(unwritten)?;
        let len = file.metadata().map_err(unwritten)?.len();
        if len <= MOST_BYTES {
            return Ok(());
        }
        let what = format!("the backup's manifest would have {len} bytes, and may have {MOST_BYTES} at most");
        Err(Error::new(ErrorKind::Unsupported, what))
    }

    /// The digest of all but the checksum.
    fn sum(&mut self) -> Result<String> {
        let (checksum, mut summer) = (self.checksum.take(), Summer::default());
        let written = serde_json::to_writer_pretty(&mut summer, self);
        self.checksum = checksum;
        written.map_err(|error| Error::new(ErrorKind::InvalidInput, "cannot write the manifest").caused_by(error))?;
        Ok(format!("{:016x}", summer.sum()))
    }

    /// Refuses a backup that the changes `since` a checkpoint cannot make newer.
    ///
    /// # Errors
    /// `InvalidInput`.
    pub fn check_since(&self, since: &Since) -> Result<()> {
        let Since { disk, disk_id, name: since, made_unix_s } = since;
        let is_moved = self.has_id(disk_id.as_deref());
        let has = |name: &str| format!("the backup is of the checkpoint {name:?}");
        let what = match &self.checkpoint {
            _ if self.disk != *disk && !is_moved => format!("the backup is of another disk, {}", self.disk),
            None => "the backup was made without a checkpoint".to_owned(),
            Some(name) if name != since => has(name),
            Some(name) if self.checkpoint_unix_s != Some(*made_unix_s) => {
                format!("{}, and the disk has another one of that name by now", has(name))
            }
            Some(_) => return Ok(()),
        };
        let what = format!("{what}: the changes since {since:?} are not what it lacks");
        Err(Error::new(ErrorKind::InvalidInput, what).hint("make a full backup with --checkpoint"))
    }

    /// True when the disk is known to be this one, which may have been moved.
    fn has_id(&self, disk_id: Option<&str>) -> bool {
        disk_id.is_some() && self.disk_id.as_deref() == disk_id
    }

    /// Refuses a backup of another disk at `path`, the manifest of a backup that is to be overwritten. Both disks are files that are there: one that is gone may have
    /// been renamed, and devices and exports have several names. What is no manifest says nothing.
    ///
    /// # Errors
    /// `Denied`, with the disk; as [`Manifest::refuse_other`].
    pub fn refuse_of_another(path: &Path, disk: &str, disk_id: Option<&str>) -> Result<()> {
        Self::refuse_other(path)?;
        let Ok(there) = Self::read(path) else { return Ok(()) };
        let file = |disk: &str| std::fs::canonicalize(disk).ok().filter(|path| path.is_file());
        match (file(disk), file(&there.disk)) {
            (Some(here), Some(other)) if here != other && !there.has_id(disk_id) => {
                let what = format!("it is the manifest of a backup of another disk, {}", there.disk);
                let error = Error::new(ErrorKind::Denied, what).at_path(path);
                Err(error.hint("choose another place; or remove that backup and its manifest, if nobody needs them"))
            }
            _ => Ok(()),
        }
    }

    /// The digests of the pieces.
    ///
    /// # Errors
    /// `Corrupt` when one is of no piece of the disk.
    pub fn digests(&self) -> Result<Digests> {
        let pieces = self.virtual_size_bytes.div_ceil(PIECE_BYTES);
        match self.digests.keys().next_back().filter(|piece| **piece >= pieces) {
            Some(piece) => Err(Error::new(ErrorKind::Corrupt, format!("the disk has no piece {piece}"))),
            None => Ok(Digests(self.digests.clone())),
        }
    }

    /// Puts the manifest at `path`, in the place of what is there, and makes that durable.
    ///
    /// # Errors
    /// `Exists` while another backup is getting its name; the system's.
    pub fn write(&self, path: &Path) -> Result<()> {
        let (folder, name) = Folder::of(path)?;
        let Some((file, part)) = half_of(&folder, &name).at_path(path)? else { return Err(getting_it(path)) };
        file.set_len(0).map_err(unwritten).at_path(path)?;
        self.put(&file, (&folder, &part), &name).at_path(path)
    }

    /// As [`Manifest::write`], and then has `name` give the backup its name. A process that is killed in between leaves a manifest alone, whose place the next backup takes. When `is_taken` says that the name is taken by now, nothing changes; when
    /// `name` fails, what was at `path` is there again. Nobody else puts a manifest there meanwhile: the one that is there in the end is that of the backup.
    ///
    /// # Errors
    /// `Exists` while another backup is getting its name; those of `name`; the system's.
    pub fn write_before(
        &self,
        path: &Path,
        is_taken: impl FnOnce() -> bool,
        name: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let (folder, manifest) = Folder::of(path)?;
        // The lock goes along with the file when that gets its name.
        let Some((file, part)) = half_of(&folder, &manifest).at_path(path)? else { return Err(getting_it(path)) };
        if is_other_locked(&folder, &manifest) {
            return Err(getting_it(path));
        }
        // Another backup has got the name since: the manifest that is there is its own.
        if is_taken() {
            let _ = folder.remove(&part, id_of(&file)?);
            return Err(Error::new(ErrorKind::Exists, "there is a file of this name by now").at_path(path));
        }
        let before = folder.read(&manifest, MOST_BYTES).inspect_err(|_| {
            // What was there before could not be put back.
            let _ = id_of(&file).map(|own| folder.remove(&part, own));
        })?;
        file.set_len(0).map_err(unwritten).at_path(path)?;
        self.put(&file, (&folder, &part), &manifest).at_path(path)?;
        name().inspect_err(|_| {
            let own = id_of(&file);
            if own.is_ok_and(|own| restore(&folder, &manifest, own, before.as_deref()).is_ok()) {
                let _ = OsFiles::default().sync_name(path);
            }
        })
    }

    /// Writes the manifest to `file`, which is at `part`, and gives it its name.
    fn put(&self, file: &File, (folder, part): (&Folder, &OsStr), name: &OsStr) -> Result<()> {
        let own = id_of(file)?;
        let put = self.clone().fill(file).and_then(|()| put_over(folder, (part, own), name));
        if put.is_err() {
            let _ = folder.remove(part, own);
        }
        put?;
        OsFiles::default().sync_name(&folder.path_of(name))
    }
}

/// A text of lines that are not too long.
struct ShortLines<'f> {
    file: Take<&'f File>,
    /// Of the line that was begun.
    len_bytes: usize,
}

impl Read for ShortLines<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let len = self.file.read(into)?;
        self.len_bytes = match into[..len].iter().rposition(|byte| *byte == b'\n') {
            Some(end) => len - end,
            None => self.len_bytes + len,
        };
        if self.len_bytes > MOST_LINE_BYTES { Err(IoKind::InvalidData.into()) } else { Ok(len) }
    }
}

/// Gives the file `own`, which is at `part`, the name `name`, in the place of the file that has it.
fn put_over(folder: &Folder, (part, own): (&OsStr, FileId), name: &OsStr) -> Result<()> {
    let over = folder.id(name).map_err(unwritten)?;
    folder.rename((part, own), folder, (name, over)).map_err(as_unwritten)
}

/// Puts `before` in the place of the manifest `own` at `name`, which nobody needs; `None`: there was none.
fn restore(folder: &Folder, name: &OsStr, own: FileId, before: Option<&[u8]>) -> Result<()> {
    let Some(text) = before else { return folder.remove(name, own) };
    let (mut file, part) = folder.create_hidden(name, FILE_MODE)?;
    file.write_all(text).and_then(|()| file.sync_all()).map_err(unwritten)?;
    folder.rename((&part, id_of(&file)?), folder, (name, Some(own)))
}

fn id_of(file: &File) -> Result<FileId> {
    file.metadata().map(|stat| FileId::of(&stat)).map_err(unwritten)
}

/// The file that is to be the manifest `name`, locked: nobody else makes that one then. `None` when somebody does. What a backup that was killed has left
/// is taken up. Where the name is that of something else, the file gets one that nobody can foretell.
fn half_of(folder: &Folder, name: &OsStr) -> Result<Option<(File, OsString)>> {
    let part = part_of(name);
    let file = match folder.create_with(&part, FILE_MODE) {
        Err(error) if error.kind() == ErrorKind::Exists => {
            unless_foreign(folder.open_own(&part, OpenMode::ReadWrite, None))?
        }
        made => Some(made.map_err(as_unwritten)?),
    };
    let Some(file) = file else { return folder.create_hidden(name, FILE_MODE).map(Some).map_err(as_unwritten) };
    let is_ours = !is_locked(&file) && folder.id(&part).map_err(unwritten)? == Some(id_of(&file)?);
    Ok(is_ours.then_some((file, part)))
}

/// True when the file that has the name of the manifest is just getting it.
fn is_other_locked(folder: &Folder, name: &OsStr) -> bool {
    folder.open_file(name, OpenMode::ReadOnly).is_ok_and(|other| is_locked(&other))
}

fn getting_it(path: &Path) -> Error {
    let error = Error::new(ErrorKind::Exists, "another backup is just getting this name").at_path(path);
    error.hint("choose another name")
}

/// The name of what is to take the place of the manifest `name`, while it is written.
fn part_of(name: &OsStr) -> OsString {
    let mut part = OsString::from(".");
    part.push(name);
    part.push(".part");
    part
}

fn unwritten(error: std::io::Error) -> Error {
    Error::io("cannot write the backup's manifest", error)
}

fn as_unwritten(error: Error) -> Error {
    let told = Error::new(error.kind(), "cannot write the backup's manifest");
    told.caused_by(error)
}

/// Locks the file as long as it is open. True when somebody else has done that. Where files cannot be locked, nobody has.
fn is_locked(file: &File) -> bool {
    flock(file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_reads_back_and_a_half_changed_backup_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = Manifest::path_of(&folder.path().join("a.vhd"));
        assert_eq!(Manifest::read_whole(&path).unwrap_err().kind(), ErrorKind::NotFound);
        let digests = Digests([(3, 7), (9, u64::MAX)].into());
        let manifest = Manifest::new("/vm/a.vhd".to_owned(), 1 << 30, 5).with_digests(&digests);
        manifest.write(&path).unwrap();
        let read = Manifest::read_whole(&path).unwrap();
        assert!(read == manifest && read.digests().unwrap() == digests);
        Manifest { state: State::UnderWay, ..manifest.clone() }.write(&path).unwrap();
        assert_eq!(Manifest::read_whole(&path).unwrap_err().kind(), ErrorKind::Busy);
        Manifest { version: VERSION + 1, ..manifest }.write(&path).unwrap();
        assert_eq!(Manifest::read_whole(&path).unwrap_err().kind(), ErrorKind::Unsupported);
        std::fs::write(&path, format!("{{\"version\": {}, \"pieces\": []}}", VERSION + 1)).unwrap();
        assert_eq!(Manifest::read_whole(&path).unwrap_err().kind(), ErrorKind::Unsupported);
        std::fs::write(&path, "{").unwrap();
        assert_eq!(Manifest::read_whole(&path).unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_manifest_that_was_damaged_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let manifest = Manifest::new("/vm/a.vhd".to_owned(), 11 << 20, 5).with_digests(&Digests([(10, 7)].into()));
        manifest.write(&path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        for (right, wrong) in [("11534336", "10485760"), ("/vm/a", "/vm/b"), ("\"10\"", "\"9\""), ("0007", "0008")] {
            assert!(text.contains(right), "{text}");
            std::fs::write(&path, text.replace(right, wrong)).unwrap();
            assert_eq!(Manifest::read_whole(&path).unwrap_err().kind(), ErrorKind::Corrupt, "{wrong}");
        }
        // One without a checksum is from a former program. Its digests lie on the disk.
        let without: Vec<_> = text.lines().filter(|line| !line.contains("checksum")).collect();
        std::fs::write(&path, without.join("\n")).unwrap();
        assert_eq!(Manifest::read_whole(&path).unwrap(), manifest);
        std::fs::write(&path, without.join("\n").replace("11534336", "10485760")).unwrap();
        assert_eq!(Manifest::read_whole(&path).unwrap().digests().unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn a_manifest_that_is_too_long_is_refused_without_reading_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        for (begin, why) in [("{\"version\":1,", "536870912"), ("{\"version\":1,\"disk\":\"", "too long")] {
            std::fs::write(&path, begin).unwrap();
            let len = if why == "too long" { MOST_BYTES } else { 2 << 30 };
            // Holes read as zeroes, which end a JSON text but for one inside a string: that has letters.
            let mut file = File::options().append(true).open(&path).unwrap();
            match why {
                "too long" => file.write_all(&vec![b'a'; MOST_LINE_BYTES + (1 << 20)]).unwrap(),
                _ => file.set_len(len).unwrap(),
            }
            let error = Manifest::read_whole(&path).unwrap_err();
            assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn a_name_of_a_half_manifest_that_is_somebody_elses_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("victim"), "precious").unwrap();
        let manifest = Manifest::new("/vm/a.vhd".to_owned(), 1 << 30, 5);
        for round in 0..2 {
            let part = at(".a.json.part");
            match round {
                0 => std::os::unix::fs::symlink(at("victim"), &part).unwrap(),
                _ => std::fs::hard_link(at("victim"), &part).unwrap(),
            }
            manifest.write(&at("a.json")).unwrap();
            manifest.write_before(&at("b.json"), || false, || Ok(())).unwrap();
            assert_eq!(std::fs::read_to_string(at("victim")).unwrap(), "precious");
            assert!(at("a.json").symlink_metadata().unwrap().is_file());
            std::fs::remove_file(part).unwrap();
        }
        // What a backup that was killed has left is taken up.
        std::fs::write(at(".a.json.part"), "half").unwrap();
        manifest.write(&at("a.json")).unwrap();
        assert!(!at(".a.json.part").exists());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_manifest_takes_the_place_of_manifests_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        Manifest::refuse_other(&path).unwrap();
        for other in ["", "{", "{}", "conectix"] {
            std::fs::write(&path, other).unwrap();
            assert_eq!(Manifest::refuse_other(&path).unwrap_err().kind(), ErrorKind::Exists, "{other:?}");
        }
        Manifest::new("/vm/a.vhd".to_owned(), 1 << 30, 5).under_way().write(&path).unwrap();
        Manifest::refuse_other(&path).unwrap();
        assert_eq!(Manifest::refuse_other(folder.path()).unwrap_err().kind(), ErrorKind::Exists);
    }

    #[test]
    fn a_manifest_comes_before_the_name_of_its_backup_and_goes_when_that_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let of = |bytes| Manifest::new("/vm/a.vhd".to_owned(), bytes, 5);
        let taken = || Err(Error::new(ErrorKind::Exists, "taken"));
        let fails = |of: &Manifest, name: &mut dyn FnMut() -> Result<()>| {
            of.write_before(&path, || false, name).unwrap_err().kind()
        };
        assert_eq!(fails(&of(1 << 20), &mut || taken()), ErrorKind::Exists);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        of(1 << 20).write(&path).unwrap();
        // Another backup that gets its name at the same time has what it has put there.
        let mut name = || {
            assert_eq!(Manifest::read_whole(&path).unwrap(), of(2 << 20));
            let never = || unreachable!("the name is given to another one");
            assert_eq!(of(3 << 20).write_before(&path, || false, never).unwrap_err().kind(), ErrorKind::Exists);
            assert_eq!(Manifest::read_whole(&path).unwrap(), of(2 << 20));
            taken()
        };
        assert_eq!(fails(&of(2 << 20), &mut name), ErrorKind::Exists);
        assert_eq!(Manifest::read_whole(&path).unwrap(), of(1 << 20), "that of before is there again");
        let never = || unreachable!("it is taken");
        assert_eq!(of(3 << 20).write_before(&path, || true, never).unwrap_err().kind(), ErrorKind::Exists);
        assert_eq!(
            std::fs::read_dir(folder.path()).unwrap().count(),
            1,
            "the other one's manifest stays, and nothing else"
        );
        of(2 << 20).write_before(&path, || false, || Ok(())).unwrap();
        assert_eq!(Manifest::read_whole(&path).unwrap(), of(2 << 20));
    }
}
