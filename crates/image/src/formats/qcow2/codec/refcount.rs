//! Refcounts: how many references each host cluster has. A table points at blocks of one cluster each.

use super::{CodecError, array, is_cluster_aligned};

/// How many counts fit into one block.
pub fn counts_per_block(cluster_bits: u32, order: u32) -> u64 {
    1 << (cluster_bits + 3 - order)
}

/// Where the block of a table entry lies; `None` when there is none and all its counts are 0.
///
/// # Errors
/// `TableOffset` when it is not the offset of a cluster.
pub fn block(entry: u64, cluster_bits: u32) -> Result<Option<u64>, CodecError> {
    match entry {
        0 => Ok(None),
        _ if is_cluster_aligned(entry, cluster_bits) => Ok(Some(entry)),
        _ => Err(CodecError::TableOffset { what: "refcount block", offset: entry }),
    }
}

/// The count number `index` of a block with counts of `1 << order` bits, `order` 0 to 6. Below 8 bits, the first count of
/// a byte is in its least significant bits.
pub fn get(block: &[u8], order: u32, index: u64) -> u64 {
    let at = ((index << order) / 8) as usize;
    match order {
        0..=2 => {
            let width = 1 << order;
            u64::from(block[at]) >> ((index << order) % 8) & ((1 << width) - 1)
        }
        3 => u64::from(block[at]),
        4 => u64::from(u16::from_be_bytes(array(block, at))),
        5 => u64::from(u32::from_be_bytes(array(block, at))),
        _ => u64::from_be_bytes(array(block, at)),
    }
}

/// Sets the count number `index`, as [`get`] reads it. False, and nothing changed, when `count` does not fit.
pub fn set(block: &mut [u8], order: u32, index: u64, count: u64) -> bool {
    let bits = 1u32 << order;
    if bits < 64 && count >> bits != 0 {
        return false;
    }
    let at = ((index << order) / 8) as usize;
    match order {
        0..=2 => {
            let shift = (index << order) % 8;
            let mask = ((1u8 << bits) - 1) << shift;
            block[at] = block[at] & !mask | (count as u8) << shift;
        }
        _ => {
            let len = bits as usize / 8;
            block[at..at + len].copy_from_slice(&count.to_be_bytes()[8 - len..]);
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn below_8_bits_the_least_significant_comes_first() {
        assert_eq!((get(&[0b0000_0010], 0, 0), get(&[0b0000_0010], 0, 1)), (0, 1));
        assert_eq!((get(&[0b0000_1101], 1, 0), get(&[0b0000_1101], 1, 1)), (1, 3));
        assert_eq!((get(&[0x5a], 2, 0), get(&[0x5a], 2, 1)), (0xa, 5));
        assert_eq!(get(&[0, 0, 1, 2], 4, 1), 0x102);
    }

    #[test]
    fn blocks_are_clusters() {
        assert_eq!(block(0, 16), Ok(None));
        assert_eq!(block(3 << 16, 16), Ok(Some(3 << 16)));
        assert!(block(3 << 15, 16).is_err());
        assert_eq!((counts_per_block(16, 4), counts_per_block(9, 6), counts_per_block(21, 0)), (32768, 64, 1 << 24));
    }

    proptest! {
        /// All widths agree with a list of numbers; a count that does not fit changes nothing.
        #[test]
        fn counts_agree_with_a_list(order in 0u32..7, writes in proptest::collection::vec((0u64..64, any::<u64>()), 0..40)) {
            let mut block = [0; 512];
            let mut model = [0u64; 64];
            for (index, count) in writes {
                let count = if index % 3 == 0 { count & 1 } else { count >> (64 - (1u32 << order).min(63)) };
                let fits = set(&mut block, order, index, count);
                prop_assert_eq!(fits, order == 6 || count < 1 << (1u32 << order));
                if fits {
                    model[index as usize] = count;
                }
            }
            for (index, count) in model.iter().enumerate() {
                prop_assert_eq!(get(&block, order, index as u64), *count);
            }
        }
    }
}
