//! What a verified load remembers of one region of the disk: the last issued and last acknowledged version of
//! each block. Eight bytes a block, so 16 MiB for 8 GiB in 4 KiB blocks.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use spile_core::{Error, ErrorKind, MAX_REQUEST_BYTES, Result};

use super::stamp::{Expected, SECTOR};

/// The versions of the blocks of one region; one connection writes a region, so no lock is needed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Model {
    run: u64,
    block_bytes: u32,
    first_block: u64,
    acked: Vec<u32>,
    issued: Vec<u32>,
}

impl Model {
    /// A region that this run has not written yet; `blocks` counts in units of `block_bytes` from the disk's start.
    pub fn new(run: u64, block_bytes: u32, blocks: Range<u64>) -> Self {
        let len = (blocks.end - blocks.start) as usize;
        let first_block = blocks.start;
        Self { run, block_bytes, first_block, acked: vec![0; len], issued: vec![0; len] }
    }

    /// Checks what came from a file.
    ///
    /// # Errors
    /// `InvalidInput` when it is no model that a load could have made.
    pub fn validate(&self) -> Result<()> {
        let (len, block) = (self.acked.len() as u64, u64::from(self.block_bytes));
        let end = self.first_block.checked_add(len).and_then(|end| end.checked_mul(block.max(1)));
        let versions =
            self.acked.len() == self.issued.len() && self.acked.iter().zip(&self.issued).all(|(a, i)| a <= i);
        let blocks = block > 0 && block.is_multiple_of(SECTOR as u64) && block <= MAX_REQUEST_BYTES;
        match versions && blocks && end.is_some() {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::InvalidInput, "the model contradicts itself")),
        }
    }

    /// The run's stamp.
    pub fn run(&self) -> u64 {
        self.run
    }

    /// The size of a block in bytes.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// The region, in blocks from the disk's start.
    pub fn blocks(&self) -> Range<u64> {
        self.first_block..self.first_block + self.acked.len() as u64
    }

    /// Notes that the next version of `block` is on its way, and returns it.
    pub fn issue(&mut self, block: u64) -> u32 {
        let version = &mut self.issued[(block - self.first_block) as usize];
        *version += 1;
        *version
    }

    /// Notes that `version` of `block` was acknowledged.
    pub fn acknowledge(&mut self, block: u64, version: u32) {
        self.acked[(block - self.first_block) as usize] = version;
    }

    /// The versions that `block` may have now.
    pub fn expected(&self, block: u64) -> Expected {
        let at = (block - self.first_block) as usize;
        Expected { acked: self.acked[at], issued: self.issued[at] }
    }

    /// The first block at or after `block` that this run has written or tried to.
    pub fn next_written(&self, block: u64) -> Option<u64> {
        let from = block.saturating_sub(self.first_block) as usize;
        let at = self.issued.get(from..)?.iter().position(|version| *version > 0)?;
        Some(self.first_block + (from + at) as u64)
    }

    /// How many blocks have an acknowledged write.
    pub fn acknowledged_blocks(&self) -> u64 {
        self.acked.iter().filter(|version| **version > 0).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_kept_by_block() {
        let mut model = Model::new(1, 4096, 10..20);
        assert_eq!((model.issue(12), model.issue(12), model.issue(19)), (1, 2, 1));
        model.acknowledge(12, 1);
        assert_eq!(model.expected(12), Expected { acked: 1, issued: 2 });
        assert_eq!(model.next_written(0), Some(12));
        assert_eq!((model.next_written(13), model.next_written(20)), (Some(19), None));
        assert_eq!(model.acknowledged_blocks(), 1);
    }
}
