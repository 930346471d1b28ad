//! [`Digests`]: what the pieces of a disk hold, in a few bytes each.

use std::collections::BTreeMap;
use std::hash::Hasher;

use spile_core::{Disk, Extent, Result, Segments};
use twox_hash::XxHash3_64;

/// Each piece of so many bytes has a digest.
pub const PIECE_BYTES: u64 = 1 << 20;

/// The digests of the pieces of a disk that are not all zero, by the pieces' numbers: 64-bit XXH3. They find bytes that have changed by
/// accident, not those that somebody has forged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Digests(pub BTreeMap<u64, u64>);

/// So many bytes are copied out of a buffer at once to be looked at: they stay in the processor's cache.
const LOOKED_AT_ONCE: usize = 16 << 10;

fn digest(bytes: &Segments) -> Option<u64> {
    if bytes.is_zero() {
        return None;
    }
    let (mut hasher, mut part) = (XxHash3_64::new(), [0; LOOKED_AT_ONCE]);
    for start in (0..bytes.len()).step_by(LOOKED_AT_ONCE) {
        let part = &mut part[..LOOKED_AT_ONCE.min(bytes.len() - start)];
        bytes.copy_to_slice(start, part);
        hasher.write(part);
    }
    Some(hasher.finish())
}

/// The 64-bit XXH3 of all that is written to it.
#[derive(Default)]
pub struct Summer(XxHash3_64);

impl Summer {
    /// Of what was written up to now.
    pub fn sum(&self) -> u64 {
        self.0.finish()
    }
}

impl std::io::Write for Summer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Digests {
    /// Notes what the piece of number `piece` holds.
    pub fn note(&mut self, piece: u64, bytes: &Segments) {
        match digest(bytes) {
            Some(digest) => self.0.insert(piece, digest),
            None => self.0.remove(&piece),
        };
    }

    /// Notes that the pieces of `extent`, which begins with one, hold zeroes.
    pub fn note_hole(&mut self, extent: Extent) {
        let pieces = extent.start() / PIECE_BYTES..extent.end().div_ceil(PIECE_BYTES);
        let known: Vec<u64> = self.0.range(pieces).map(|(piece, _)| *piece).collect();
        for piece in known {
            self.0.remove(&piece);
        }
    }

    /// Forgets the pieces behind the end of a disk of `size_bytes`.
    pub fn cut(&mut self, size_bytes: u64) {
        self.0.split_off(&size_bytes.div_ceil(PIECE_BYTES));
    }

    /// True when the piece of number `piece` holds `bytes`.
    pub fn fits(&self, piece: u64, bytes: &Segments) -> bool {
        self.0.get(&piece).copied() == digest(bytes)
    }

    /// True when one of the pieces of `extent` is not all zero.
    pub fn has_data(&self, extent: Extent) -> bool {
        self.0.range(extent.start() / PIECE_BYTES..extent.end().div_ceil(PIECE_BYTES)).next().is_some()
    }

    /// Reads the first `size_bytes` of `disk` piece by piece, and passes each on to `each`: its place, its bytes
    /// (`None` for a long run of zeroes), and whether it holds what it should.
    ///
    /// # Errors
    /// The disk's; those of `each`.
    pub async fn compare<D: Disk>(
        &self,
        disk: &D,
        size_bytes: u64,
        mut each: impl AsyncFnMut(Extent, Option<Segments>, bool) -> Result<()>,
    ) -> Result<()> {
        let mut at = 0;
        while at < size_bytes {
            let whole = Extent::from_range(at..size_bytes);
            let runs = disk.extents(whole, super::RUNS_AT_ONCE).await?;
            for part in super::parts_of_map(at, size_bytes, &runs) {
                at = part.extent.end();
                if part.is_hole && !self.has_data(part.extent) {
                    each(part.extent, None, true).await?;
                    continue;
                }
                for start in (part.extent.start()..part.extent.end()).step_by(PIECE_BYTES as usize) {
                    let piece = Extent::from_range(start..part.extent.end().min(start + PIECE_BYTES));
                    let bytes = Segments::zeroed(piece.len_bytes as usize);
                    disk.read(piece, &bytes).await?;
                    let fits = self.fits(start / PIECE_BYTES, &bytes);
                    each(piece, Some(bytes), fits).await?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_does_not_depend_on_how_the_bytes_are_looked_at() {
        for len in [1, 512, LOOKED_AT_ONCE - 1, LOOKED_AT_ONCE, LOOKED_AT_ONCE + 512, PIECE_BYTES as usize] {
            let bytes: Vec<u8> = (0..len).map(|at| (at * 31 % 251) as u8 + 1).collect();
            assert_eq!(digest(&Segments::copied(&bytes)), Some(XxHash3_64::oneshot(&bytes)), "{len}");
        }
        assert_eq!(digest(&Segments::zeroed(LOOKED_AT_ONCE * 2)), None);
    }
}
