//! Files that commands write beside their work: a trace, a model, a page. A disk that is named by mistake is not replaced.

use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use spile_core::{Error, ErrorKind, Result};

/// Opens the file at `path` for writing, and makes it when there is none. What it holds stays until [`empty`]. All files of this kind begin with `begin`.
///
/// # Errors
/// `Exists` for a file that begins with something else, and for a block device; the system's.
pub fn report_file(path: &Path, begin: &str) -> Result<File> {
    let open = || {
        let is_file = path.metadata().map_or(true, |stat| stat.is_file());
        // Whoever reads at a pipe does not hear that all others have gone.
        let file = File::options().read(is_file).write(true).create(is_file).truncate(false).open(path)?;
        let stat = file.metadata()?;
        let is_other = match stat.is_file() {
            true => !starts_with(&file, begin.as_bytes())?,
            // A pipe or a terminal.
            false => stat.file_type().is_block_device(),
        };
        Ok::<_, io::Error>((file, is_other))
    };
    match open() {
        Ok((file, false)) => Ok(file),
        Ok(_) => {
            let error = Error::new(ErrorKind::Exists, "there is something else of this name").at_path(path);
            Err(error.hint("choose another name: only a file of the same kind is replaced"))
        }
        Err(source) => Err(Error::io("open", source).at_path(path)),
    }
}

/// True for an empty file, and for one that begins so.
fn starts_with(mut file: &File, begin: &[u8]) -> io::Result<bool> {
    let mut found = Vec::new();
    file.take(begin.len() as u64).read_to_end(&mut found)?;
    file.rewind()?;
    Ok(found.is_empty() || found == begin)
}

/// Removes what the file holds, as what takes its place is there.
///
/// # Errors
/// The system's.
pub fn empty(file: &File) -> io::Result<()> {
    if file.metadata()?.is_file() { file.set_len(0) } else { Ok(()) }
}

/// Puts `bytes`, which begin with `begin`, into the file at `path`.
///
/// # Errors
/// As [`report_file`].
pub fn write_report(path: &Path, begin: &str, bytes: &[u8]) -> Result<()> {
    let mut file = report_file(path, begin)?;
    let written = empty(&file).and_then(|()| io::Write::write_all(&mut file, bytes));
    written.map_err(|source| Error::io("write", source).at_path(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_of_the_same_kind_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("disk"), [0; 4096]).unwrap();
        std::fs::write(at("short"), "[").unwrap();
        for name in ["disk", "short"] {
            let before = std::fs::read(at(name)).unwrap();
            let refused = write_report(&at(name), "[{", b"[{}]").unwrap_err();
            assert!(refused.kind() == ErrorKind::Exists && refused.to_string().contains(name), "{refused}");
            assert_eq!(std::fs::read(at(name)).unwrap(), before);
        }
        for text in ["[{\"a\":1}]", "[{}]"] {
            write_report(&at("new"), "[{", text.as_bytes()).unwrap();
            assert_eq!(std::fs::read_to_string(at("new")).unwrap(), text);
        }
        // What is there stays until there is something new.
        drop(report_file(&at("new"), "[{").unwrap());
        assert_eq!(std::fs::read_to_string(at("new")).unwrap(), "[{}]");
        write_report(Path::new("/dev/null"), "[{", b"[{}]").unwrap();
    }
}
