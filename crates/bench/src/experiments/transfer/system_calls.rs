//! A transfer by this process itself, which calls the system for each block, as `dd` does it: the bare side of `layers`, `geometry` and
//! `warmup`.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Instant;

use rustix::fs::OFlags;
use spile_core::{Error, Result, ResultExt};

use super::{Job, Moved};

/// What O_DIRECT wants memory to be aligned to, on every device.
const ALIGN_BYTES: usize = 4096;

/// Moves the blocks one after the other, one at least.
///
/// # Errors
/// The system's, with the path: `InvalidInput` when the device takes no blocks of that size.
pub fn run(path: &Path, job: &Job) -> Result<Moved> {
    let file = open(path, job).map_err(|e| Error::io("open", e)).at_path(path)?;
    let mut memory = vec![0x5a; job.block_bytes as usize + ALIGN_BYTES];
    let first = memory.as_ptr().align_offset(ALIGN_BYTES);
    let block = &mut memory[first..first + job.block_bytes as usize];
    let (begun, mut moved) = (Instant::now(), 0);
    let result = loop {
        let is_late = moved > 0 && begun.elapsed() >= job.limit;
        if moved + job.block_bytes > job.total_bytes || is_late {
            break Ok(());
        }
        if let Err(error) = one(&file, block, job, job.start_bytes + moved) {
            break Err(error);
        }
        moved += job.block_bytes;
    };
    let seconds = begun.elapsed().as_secs_f64();
    result.map_err(|e| Error::io(job.operation.name(), e)).at_path(path)?;
    Ok(Moved { bytes: moved, seconds })
}

fn open(path: &Path, job: &Job) -> std::io::Result<File> {
    let is_read = job.operation.is_read();
    let mut options = OpenOptions::new();
    options.read(is_read).write(!is_read);
    if job.operation.is_direct() {
        options.custom_flags(OFlags::DIRECT.bits().cast_signed());
    }
    options.open(path)
}

fn one(file: &File, block: &mut [u8], job: &Job, offset_bytes: u64) -> std::io::Result<()> {
    match job.operation.is_read() {
        true => file.read_exact_at(block, offset_bytes),
        false => {
            // Some devices recognise blocks that repeat.
            block[..8].copy_from_slice(&offset_bytes.to_le_bytes());
            file.write_all_at(block, offset_bytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Operation;
    use super::*;

    fn job(operation: Operation) -> Job {
        let limit = Duration::from_secs(60);
        Job { operation, block_bytes: 4096, start_bytes: 4096, total_bytes: 10_000, limit }
    }

    #[test]
    fn whole_blocks_go_where_they_are_to_go() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, [1; 16384]).unwrap();
        let moved = run(&path, &job(Operation::WriteBuffered)).unwrap();
        assert_eq!(moved.bytes, 8192);
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes[..4096].iter().chain(&bytes[12288..]).all(|byte| *byte == 1));
        assert!(bytes[4104..8192].iter().chain(&bytes[8200..12288]).all(|byte| *byte == 0x5a));
        assert!(moved.bytes_per_s() > 0.0);
    }

    #[test]
    fn the_time_ends_a_transfer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, [1; 16384]).unwrap();
        let none = Job { limit: Duration::ZERO, ..job(Operation::WriteBuffered) };
        assert_eq!(run(&path, &none).unwrap().bytes, 4096);
    }
}
