//! Files that experiments read: every block is written, because a hole would cost less to read.

use std::io::{Seek, Write};
use std::path::{Path, PathBuf};

use spile_core::{Error, Result, ResultExt};

use super::world::remove_with_folder;

/// What is written at a time, in bytes.
const PIECE_BYTES: usize = 1 << 20;

/// A file with data in every block, on the device and not only in the page cache. It is removed when this is dropped.
pub struct FilledFile {
    path: PathBuf,
    file: std::fs::File,
}

impl FilledFile {
    /// Makes the file `spile-bench-PID-NAME` in `folder`, with `len_bytes` of data.
    ///
    /// # Errors
    /// `Exists` when it is there; the system's, with the path.
    pub fn new(folder: &Path, name: &str, len_bytes: u64) -> Result<Self> {
        let made = Self::sparse(folder, name, len_bytes)?;
        made.fill_to(len_bytes)?;
        Ok(made)
    }

    /// Makes such a file without data yet.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn sparse(folder: &Path, name: &str, len_bytes: u64) -> Result<Self> {
        let path = folder.join(format!("spile-bench-{}-{name}", std::process::id()));
        let file = std::fs::File::create_new(&path).map_err(|e| Error::io("make a file", e)).at_path(&path)?;
        remove_with_folder(path.clone());
        let made = Self { path, file };
        made.file.set_len(len_bytes).map_err(|e| Error::io("make a file", e)).at_path(&made.path)?;
        Ok(made)
    }

    /// Writes data up to `end_bytes`, from where the last call has ended.
    ///
    /// # Errors
    /// The system's, with the path.
    pub fn fill_to(&self, end_bytes: u64) -> Result<()> {
        self.fill(end_bytes).map_err(|e| Error::io("fill a file", e)).at_path(&self.path)
    }

    fn fill(&self, end_bytes: u64) -> std::io::Result<()> {
        let mut file = &self.file;
        let mut at = file.stream_position()?;
        // Some file systems recognise pieces of zeroes, and some pieces that repeat.
        let mut piece: Vec<u8> = (0..PIECE_BYTES).map(|at| (at.wrapping_mul(0x9e37_79b1) >> 13) as u8).collect();
        while at < end_bytes {
            let now = (end_bytes - at).min(PIECE_BYTES as u64);
            piece[..8].copy_from_slice(&(at + 1).to_le_bytes());
            file.write_all(&piece[..now as usize])?;
            at += now;
        }
        file.sync_all()
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for FilledFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn every_block_has_data_and_the_file_goes_in_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let file = FilledFile::new(folder.path(), "x", (2 << 20) + 100).unwrap();
        let about = std::fs::metadata(file.path()).unwrap();
        assert_eq!(about.len(), (2 << 20) + 100);
        assert!(about.blocks() * 512 >= 2 << 20);
        assert!(FilledFile::new(folder.path(), "x", 1).is_err());
        let path = file.path().to_owned();
        drop(file);
        assert!(!path.exists());
    }
}
