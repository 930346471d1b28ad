//! The content that the workload writes. All bytes of a sector say where the sector belongs and which write it is from.

use crate::rng::mix;

/// The size of a sector in bytes.
pub const SECTOR: usize = 512;

const MAGIC: u64 = 0x5370_696C_6553_696D;
const WORDS: usize = SECTOR / 8;

/// The content of one sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Value {
    /// All zeroes.
    Zero,
    /// The stamp of the write with this number.
    Stamp(u64),
}

fn word(sector: u64, write: u64, at: usize) -> u64 {
    match at {
        0 => MAGIC ^ sector,
        1 => write,
        _ => mix(write.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ sector).wrapping_add(at as u64),
    }
}

fn read_word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at * 8..at * 8 + 8]);
    u64::from_le_bytes(word)
}

/// Fills one sector with the stamp of `write`.
pub fn stamp(sector: u64, write: u64, into: &mut [u8]) {
    let base = word(sector, write, 2).wrapping_sub(2);
    for (at, bytes) in into.chunks_exact_mut(8).enumerate() {
        let word = if at < 2 { word(sector, write, at) } else { base.wrapping_add(at as u64) };
        bytes.copy_from_slice(&word.to_le_bytes());
    }
}

/// What one sector holds; when it is neither zero nor one whole stamp of this sector, a description of it.
///
/// # Errors
/// The description.
pub fn decode(sector: u64, bytes: &[u8]) -> Result<Value, String> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(Value::Zero);
    }
    let (place, write) = (read_word(bytes, 0) ^ MAGIC, read_word(bytes, 1));
    let mut expected = [0; SECTOR];
    stamp(place, write, &mut expected);
    match (bytes == expected, place == sector) {
        (true, true) => Ok(Value::Stamp(write)),
        (true, false) => Err(format!("the content of sector {place:#x}, write {write}")),
        _ => Err(describe_torn(bytes)),
    }
}

fn describe_torn(bytes: &[u8]) -> String {
    let words: Vec<u64> = (0..WORDS).map(|at| read_word(bytes, at)).collect();
    let zeroes = words.iter().filter(|word| **word == 0).count();
    format!("no stamp: {:#018x} {:#018x} ..., {zeroes} of {WORDS} words zero", words[0], words[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_is_read_back_only_whole_and_in_its_place() {
        let mut bytes = [0; SECTOR];
        assert_eq!(decode(3, &bytes), Ok(Value::Zero));
        stamp(3, 77, &mut bytes);
        assert_eq!(decode(3, &bytes), Ok(Value::Stamp(77)));
        assert!(decode(4, &bytes).unwrap_err().contains("sector 0x3"));
        bytes[511] ^= 1;
        assert!(decode(3, &bytes).is_err());
    }
}
