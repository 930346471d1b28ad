//! Notes beside an image which children it has in other folders ([`names::children`]): a path in each line, the newest last.
//!
//! A note is written before the child names the image, whichever way it becomes its child: when it is made, by a snapshot of a child, by a merge. A file that is
//! noted need not be a child, and need not be there.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use spile_core::{Error, ErrorKind, OpenMode, Result, ResultExt as _};
use spile_engine::run_blocking;
use spile_life::{Later, NoteChild, names};
use spile_store::own::{MOST_NOTE_BYTES, read_note};
use spile_store::{FileId, Folder};

/// A note that is longer than this loses lines of files that are gone, before it gets another one.
const LONG_BYTES: usize = 256 << 10;
/// So many of the newest lines stay in any case: their files may just be made.
const NEWEST: usize = 1000;

/// The paths in the note at `note`.
///
/// # Errors
/// The system's; one for a note that is too long. One that Spile has not written is as none.
pub fn read(note: &Path) -> io::Result<Vec<PathBuf>> {
    let bytes = read_note(note, MOST_NOTE_BYTES).map_err(io::Error::other)?;
    Ok(lines(&String::from_utf8_lossy(&bytes.ok_or(io::ErrorKind::NotFound)?)).map(PathBuf::from).collect())
}

fn read_text(file: File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.take(MOST_NOTE_BYTES + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > MOST_NOTE_BYTES {
        true => Err(io::ErrorKind::FileTooLarge.into()),
        // A power cut may leave a part of a line.
        false => Ok(String::from_utf8_lossy(&bytes).into_owned()),
    }
}

fn lines(text: &str) -> impl DoubleEndedIterator<Item = &str> + Clone {
    text.lines().filter(|line| line.starts_with('/'))
}

/// Notes beside the image at `parent` that the file at `child`, in another folder, is to be a child of it: whoever asks the parent's folder for children
/// asks that file, too. Both paths are whole, and the child does not name the parent yet. Waits for others who note something there.
///
/// # Errors
/// The system's; where the parent's folder cannot be changed, that is one line in the log.
pub fn note(parent: &Path, child: &Path) -> Result<()> {
    match try_note(parent, child) {
        Err(error) if matches!(error.kind(), ErrorKind::ReadOnly | ErrorKind::Denied) => {
            let (parent, child) = (parent.display(), child.display());
            tracing::warn!("{error}: nobody who deletes or writes {parent} is told that {child} needs it");
            Ok(())
        }
        noted => noted,
    }
}

fn try_note(parent: &Path, child: &Path) -> Result<()> {
    if parent.parent() == child.parent() || parent.starts_with("/dev") {
        return Ok(());
    }
    let note = names::children(parent);
    let line = child.to_str().filter(|line| !line.contains('\n')).ok_or_else(|| {
        let error = Error::new(ErrorKind::InvalidInput, "the parent's folder cannot have a note of this name");
        error.at_path(child).hint("choose a name that is UTF-8, without line ends")
    })?;
    match add(&note, line) {
        // A folder that cannot be changed any more.
        Err(_) if read(&note).is_ok_and(|there| there.iter().any(|other| other == child)) => Ok(()),
        added => added.map_err(|source| Error::io("the parent's folder cannot note its child", source)).at_path(&note),
    }
}

fn add(note: &Path, line: &str) -> io::Result<()> {
    let (mut file, is_locked) = open(note)?;
    let text = read_text(file.try_clone()?)?;
    let (count, is_noted) = (lines(&text).count(), lines(&text).rev().take(NEWEST).any(|other| other == line));
    if is_noted {
        // Whoever has written it may have been killed before it was durable.
        file.sync_all()?;
    } else if text.len() > LONG_BYTES && is_locked {
        let kept = lines(&text).enumerate().filter(|(number, other)| number + NEWEST >= count || !is_gone(other));
        let text: String = kept.map(|(_, other)| other).chain([line]).flat_map(|line| [line, "\n"]).collect();
        let new = names::new_children(note);
        replace(note, &new, text.as_bytes()).map_err(io::Error::other)?;
    } else {
        let before = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
        file.write_all(format!("{before}{line}\n").as_bytes())?;
        file.sync_all()?;
    }
    File::open(note.parent().unwrap_or(Path::new("/")))?.sync_all()
}

/// The note's file, which nobody else changes. False where files cannot be locked.
fn open(note: &Path) -> io::Result<(File, bool)> {
    loop {
        let file = open_note(note).map_err(io::Error::other)?;
        let is_locked = file.lock().is_ok();
        // Another one may have taken its place meanwhile.
        let own = FileId::of(&file.metadata()?);
        match note.metadata() {
            Ok(there) if FileId::of(&there) == own => return Ok((file, is_locked)),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
}

/// The note's file, made if there is none. What is not Spile's is in the way.
fn open_note(note: &Path) -> Result<File> {
    let (folder, name) = Folder::of(note)?;
    let file = match folder.create(&name) {
        Err(error) if error.kind() == ErrorKind::Exists => folder.open_own(&name, OpenMode::ReadWrite, None)?,
        made => Some(made?),
    };
    // It goes between the two when another one takes its place.
    let file = file.map_or_else(|| folder.create(&name), Ok)?;
    let flags = rustix::fs::fcntl_getfl(&file).and_then(|flags| rustix::fs::fcntl_setfl(&file, flags | OFlags::APPEND));
    flags.map_err(|errno| Error::io("append to", errno.into())).at_path(note)?;
    Ok(file)
}

/// Puts `text` in the place of the note, which is locked, by way of the name `new`.
fn replace(note: &Path, new: &Path, text: &[u8]) -> Result<()> {
    let (folder, name) = Folder::of(note)?;
    let stem = new.file_name().unwrap_or(&name);
    let (mut file, new) = folder.create_hidden(stem, Mode::from_raw_mode(0o666))?;
    let written = file.write_all(text).and_then(|()| file.sync_all());
    let written = written.map_err(|source| Error::io("write", source)).at_path(note);
    let put = written.and_then(|()| folder.rename_over(&new, &folder, &name));
    if put.is_err() {
        let _ = folder.unlink(&new);
    }
    put
}

/// True when the file is not there, and its folder is not only missing or not mounted.
fn is_gone(child: &str) -> bool {
    let is_away = |error: io::Error| error.kind() == io::ErrorKind::NotFound;
    let others = Path::new(child).parent().map(std::fs::read_dir);
    Path::new(child).symlink_metadata().is_err_and(is_away)
        && others.is_some_and(|others| others.is_ok_and(|mut others| others.next().is_some()))
}

/// Notes children on this host ([`note`]).
pub struct HostNotes;

impl NoteChild for HostNotes {
    fn note_child<'a>(&'a self, parent: &'a Path, child: &'a Path) -> Later<'a, ()> {
        let (parent, child) = (parent.to_owned(), child.to_owned());
        Box::pin(async move { run_blocking(&parent.clone(), move || note(&parent, &child)).await })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_has_each_child_once_and_a_torn_line_harms_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let (parent, note_at) = (dir.path().join("p.vhd"), names::children(&dir.path().join("p.vhd")));
        note(&parent, &dir.path().join("c.vhd")).unwrap();
        assert!(!note_at.exists(), "it is in the same folder");
        for child in ["/a/c.vhd", "/a/d.vhd", "/a/c.vhd"] {
            note(&parent, Path::new(child)).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&note_at).unwrap(), "/a/c.vhd\n/a/d.vhd\n");
        let mut file = File::options().append(true).open(&note_at).unwrap();
        file.write_all(b"/b/\xc3").unwrap();
        note(&parent, Path::new("/b/e.vhd")).unwrap();
        assert!(read(&note_at).unwrap().contains(&PathBuf::from("/b/e.vhd")));
        assert!(note(&parent, Path::new("/b/two\nlines.vhd")).is_err());
    }

    #[test]
    fn a_long_note_loses_files_that_are_gone_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let (parent, note_at) = (dir.path().join("p.vhd"), names::children(&dir.path().join("p.vhd")));
        let (full, empty) = (dir.path().join("full"), dir.path().join("empty"));
        std::fs::create_dir(&full).unwrap();
        std::fs::create_dir(&empty).unwrap();
        File::create(full.join("there")).unwrap();
        let padding = "x".repeat(60);
        let old = [full.join("there"), full.join("gone"), empty.join("not-mounted"), dir.path().join("missing/child")];
        let newest = (0..4000).map(|number| full.join(format!("{padding}{number}")));
        let all: Vec<_> = old.iter().cloned().chain(newest).collect();
        std::fs::write(&note_at, all.iter().map(|path| format!("{}\n", path.display())).collect::<String>()).unwrap();
        note(&parent, Path::new("/a/new")).unwrap();
        let left = read(&note_at).unwrap();
        let is_left = |path: &Path| left.iter().any(|other| other == path);
        assert_eq!(old.each_ref().map(|path| is_left(path)), [true, false, true, true]);
        assert!(all[all.len() - NEWEST..].iter().all(|path| is_left(path)) && is_left(Path::new("/a/new")));
        assert_eq!(left.len(), 3 + NEWEST + 1);
        assert!(!names::new_children(&note_at).exists());
    }
}
