//! Compression of one cluster.

use super::header::Compression;

/// The level of deflate. As fast as what QEMU uses, and about as small.
const DEFLATE_LEVEL: u8 = 6;
/// The level of zstd that QEMU uses.
const ZSTD_LEVEL: i32 = 3;

/// The compressed bytes of a cluster; `None` where they would not be shorter.
pub fn compress(compression: Compression, cluster: &[u8]) -> Option<Vec<u8>> {
    let bytes = match compression {
        Compression::Deflate => miniz_oxide::deflate::compress_to_vec(cluster, DEFLATE_LEVEL),
        // It fails for lack of memory only; the cluster is kept as it is then.
        Compression::Zstd => zstd::bulk::compress(cluster, ZSTD_LEVEL).ok()?,
    };
    (bytes.len() < cluster.len()).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::stream::Decompressor;
    use super::*;
    use proptest::prelude::*;

    fn decompressed(compression: Compression, bytes: &[u8], len: usize) -> Vec<u8> {
        let mut stream = Decompressor::new(compression, len);
        while !stream.step(bytes).unwrap() {}
        stream.into_cluster()
    }

    #[test]
    fn what_does_not_shrink_is_not_compressed() {
        let mut word = 1u64;
        let noise: Vec<u8> = (0..4096)
            .map(|_| {
                word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                (word >> 56) as u8
            })
            .collect();
        assert_eq!(compress(Compression::Deflate, &noise), None);
        assert_eq!(compress(Compression::Zstd, &noise), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// What was compressed is read again by the code that reads hostile images.
        #[test]
        fn what_was_compressed_comes_back(words in proptest::collection::vec(any::<u8>(), 1..200), bits in 9u32..=21) {
            let cluster: Vec<u8> = words.iter().copied().cycle().take(1 << bits).collect();
            for compression in [Compression::Deflate, Compression::Zstd] {
                if let Some(bytes) = compress(compression, &cluster) {
                    prop_assert!(decompressed(compression, &bytes, cluster.len()) == cluster);
                }
            }
        }
    }
}
