//! XenServer's log of changed blocks, as `cbt-util` and the storage manager read it: a header of 48 bytes, and a bit for each 64 KiB of the disk,
//! the lowest bit of a byte first. Numbers are little-endian.
//!
//! | byte | bytes | what |
//! |---|---|---|
//! | 0 | 16 | UUID of the log before it; zero here, `cbt-util set -p` sets it |
//! | 16 | 16 | UUID of the log after it; zero here, `cbt-util set -c` sets it |
//! | 32 | 4 | 1: the log is whole |
//! | 40 | 8 | size of the disk in bytes |

use std::io::Write as _;
use std::path::Path;

use spile_core::{Error, ErrorKind, Result};
use spile_server::new_file::{HalfMade, exists};
use spile_server::serving::api::checkpoints::{ChangedBlocks, ChangedRange};

const HEADER_BYTES: usize = 48;
const BLOCK_BYTES: u64 = 64 << 10;

/// The log of what has changed.
fn bytes_of(size_bytes: u64, ranges: &[ChangedRange]) -> Vec<u8> {
    let blocks = size_bytes.div_ceil(BLOCK_BYTES);
    let mut log = vec![0; HEADER_BYTES + blocks.div_ceil(8) as usize];
    log[32..36].copy_from_slice(&1_i32.to_le_bytes());
    log[40..48].copy_from_slice(&size_bytes.to_le_bytes());
    for range in ranges {
        let end = (range.offset_bytes + range.length_bytes).div_ceil(BLOCK_BYTES);
        for block in range.offset_bytes / BLOCK_BYTES..end.min(blocks) {
            log[HEADER_BYTES + (block / 8) as usize] |= 1 << (block % 8);
        }
    }
    log
}

/// Writes the log of `changed` to a new file, durably.
///
/// # Errors
/// `Exists` when there is something at `path`; the system's.
pub fn write(path: &Path, changed: &ChangedBlocks) -> Result<()> {
    let log = bytes_of(changed.virtual_size_bytes, &changed.ranges);
    // The file has its name once all of it is there: half of it would say that the rest has not changed.
    let half = HalfMade::begin(path)?;
    let mut file = half.file();
    let written = file.write_all(&log).and_then(|()| file.sync_all());
    written.map_err(|source| Error::io("write", source).at_path(path))?;
    half.publish(path).map_err(|error| match error.kind() {
        ErrorKind::Exists => exists(path).hint("choose another name"),
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_has_the_layout_of_xenservers() {
        let range = |offset_bytes, length_bytes| ChangedRange { offset_bytes, length_bytes };
        // 17 blocks, the last of them short. A range of smaller blocks takes those of 64 KiB that it touches.
        let size = 16 * BLOCK_BYTES + 512;
        let ranges = [range(0, BLOCK_BYTES), range(9 * BLOCK_BYTES + 4096, BLOCK_BYTES), range(16 * BLOCK_BYTES, 512)];
        let log = bytes_of(size, &ranges);
        assert_eq!(log.len(), 48 + 3);
        assert_eq!(log[..32], [0; 32]);
        assert_eq!(log[32..40], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(log[40..48], size.to_le_bytes());
        assert_eq!(log[48..], [0b0000_0001, 0b0000_0110, 0b0000_0001]);
    }
}
