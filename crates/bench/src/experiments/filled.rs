//! Files that experiments read: every block is written, because a hole would cost less to read.

use std::io::Write;
use std::path::{Path, PathBuf};

use spile_core::{Error, Result, ResultExt};

use super::world::remove_with_folder;

/// What is written at a time, in bytes.
const PIECE_BYTES: usize = 1 << 20;

/// A file with data in every block, on the device and not only in the page cache. It is removed when this is dropped.
pub struct FilledFile(PathBuf);

impl FilledFile {
    /// Makes the file `spile-bench-PID-NAME` in `folder`, with `len_bytes` of data.
    ///
    /// # Errors
    /// `Exists` when it is there; the system's, with the path.
    pub fn new(folder: &Path, name: &str, len_bytes: u64) -> Result<Self> {
        let path = folder.join(format!("spile-bench-{}-{name}", std::process::id()));
        let file = std::fs::File::create_new(&path).map_err(|e| Error::io("make a file", e)).at_path(&path)?;
        remove_with_folder(path.clone());
        let made = Self(path);
        made.fill(file, len_bytes).map_err(|e| Error::io("fill a file", e)).at_path(&made.0)?;
        Ok(made)
    }

    fn fill(&self, mut file: std::fs::File, len_bytes: u64) -> std::io::Result<()> {
        // Some file systems recognise pieces of zeroes, and some pieces that repeat.
        let mut piece: Vec<u8> = (0..PIECE_BYTES).map(|at| (at.wrapping_mul(0x9e37_79b1) >> 13) as u8).collect();
        let mut left = len_bytes;
        while left > 0 {
            let now = left.min(PIECE_BYTES as u64);
            piece[..8].copy_from_slice(&left.to_le_bytes());
            file.write_all(&piece[..now as usize])?;
            left -= now;
        }
        file.sync_all()
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for FilledFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
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
