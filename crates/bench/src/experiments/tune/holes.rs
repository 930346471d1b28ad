//! Refuses files with holes: what reads them never comes to the device.

use std::fs::File;
use std::path::Path;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use spile_core::{Error, ErrorKind, Result, ResultExt};
use spile_server::units::format_size;

/// A file may have one of so many bytes in holes.
const ONE_OF: u64 = 100;

/// Refuses the file at `path` when too much of it was never written.
///
/// # Errors
/// `InvalidInput` for such a file; the system's, with the path.
pub fn refuse(path: &Path) -> Result<()> {
    let failed = |error: std::io::Error| Error::io("look for holes", error).at_path(path);
    let file = File::open(path).map_err(failed)?;
    let len_bytes = file.metadata().map_err(failed)?.len();
    let data_bytes = data_bytes(&file, len_bytes).map_err(|errno| failed(errno.into()))?;
    if len_bytes - data_bytes <= len_bytes / ONE_OF {
        return Ok(());
    }
    let what = format!(
        "{} of its {} were never written: what reads them never comes to the device",
        format_size(len_bytes - data_bytes),
        format_size(len_bytes)
    );
    Err(Error::new(ErrorKind::InvalidInput, what).hint("name its folder: then a file with data is made there"))
        .at_path(path)
}

/// The bytes of a file of `len_bytes` that were written. File systems take space that was allocated and not written for a hole as well
/// (lseek(2), `SEEK_HOLE`).
fn data_bytes(file: &File, len_bytes: u64) -> std::result::Result<u64, Errno> {
    let (mut at, mut found) = (0, 0);
    while at < len_bytes {
        let start = match seek(file, SeekFrom::Data(at)) {
            // No data follow.
            Err(Errno::NXIO) => break,
            start => start?,
        };
        at = seek(file, SeekFrom::Hole(start))?.min(len_bytes);
        found += at.saturating_sub(start);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_file_that_was_not_written_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let file = File::create(&path).unwrap();
        file.set_len(8 << 20).unwrap();
        let refused = refuse(&path).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidInput);
        assert!(refused.to_string().contains("8 MiB of its 8 MiB were never written"), "{refused}");
        file.write_all_at(&vec![1; 4 << 20], 2 << 20).unwrap();
        let refused = refuse(&path).unwrap_err();
        assert!(refused.to_string().contains("4 MiB of its 8 MiB"), "{refused}");
        file.write_all_at(&vec![1; 8 << 20], 0).unwrap();
        refuse(&path).unwrap();
    }
}
