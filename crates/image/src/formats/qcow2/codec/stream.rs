//! Decompression of one cluster, in steps.
//!
//! A stream is hostile until it has been read: output stops at one cluster, memory is the cluster's and at most another
//! cluster and a half of a decoder's, whatever window a stream asks for, and no input can make it panic. A step ends after
//! 64 KiB of output (zstd: after the block in which that many are reached, at most 128 KiB more), so that the caller can
//! let others run in between.

use std::io::Read as _;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress, inflate_flags};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::header::Compression;

/// The output of one step, in bytes.
const STEP_BYTES: usize = 64 << 10;
/// The most zstd frames of one cluster. Programs write one; each costs a new decoder.
const MAX_FRAMES: usize = 64;

/// Why a stream gives no cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum StreamFault {
    /// The bytes are no such stream.
    #[error("the compressed data are damaged")]
    Damaged,
    /// The stream ends before the cluster is full.
    #[error("the compressed data end before the cluster is full")]
    EndsEarly,
    /// A zstd frame holds more than a cluster.
    #[error("the compressed data hold more than a cluster")]
    TooLong,
}

/// A cluster that is being decompressed.
pub struct Decompressor {
    stream: Stream,
    cluster: Vec<u8>,
    filled: usize,
    /// Bytes of the input that have been used.
    used: usize,
}

enum Stream {
    Deflate(Box<DecompressorOxide>),
    Zstd(Zstd),
}

impl Decompressor {
    /// For a cluster of `cluster_bytes`.
    pub fn new(compression: Compression, cluster_bytes: usize) -> Self {
        let stream = match compression {
            Compression::Deflate => Stream::Deflate(Box::default()),
            Compression::Zstd => Stream::Zstd(Zstd::default()),
        };
        Self { stream, cluster: vec![0; cluster_bytes], filled: 0, used: 0 }
    }

    /// Goes on by one step; true when the cluster is complete. `input` is the whole of the compressed data, the same in
    /// each step.
    ///
    /// # Errors
    /// Why the stream gives no cluster.
    pub fn step(&mut self, input: &[u8]) -> Result<bool, StreamFault> {
        let rest = &input[self.used..];
        let (used, made) = match &mut self.stream {
            Stream::Deflate(inflate) => inflate_step(inflate, rest, &mut self.cluster, self.filled)?,
            Stream::Zstd(zstd) => zstd.step(rest, &mut self.cluster, self.filled)?,
        };
        self.used += used;
        self.filled += made;
        Ok(self.filled == self.cluster.len())
    }

    /// The cluster, once a step said that it is complete.
    pub fn into_cluster(self) -> Vec<u8> {
        self.cluster
    }
}

/// Returns how many bytes of `input` were used and how many of `cluster`, from `filled`, were made.
fn inflate_step(
    inflate: &mut DecompressorOxide,
    input: &[u8],
    cluster: &mut [u8],
    filled: usize,
) -> Result<(usize, usize), StreamFault> {
    let end = cluster.len().min(filled + STEP_BYTES);
    let flags = inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, used, made) = decompress(inflate, input, &mut cluster[..end], filled, flags);
    match status {
        _ if filled + made == cluster.len() => Ok((used, made)),
        TINFLStatus::HasMoreOutput => Ok((used, made)),
        TINFLStatus::Done | TINFLStatus::NeedsMoreInput | TINFLStatus::FailedCannotMakeProgress => {
            Err(StreamFault::EndsEarly)
        }
        _ => Err(StreamFault::Damaged),
    }
}

/// A stream of zstd frames; nearly always one.
#[derive(Default)]
struct Zstd {
    /// A decoder serves one frame: it would keep the window of the last one for the next.
    frame: Option<Box<FrameDecoder>>,
    /// Steps of this frame that did not end it: each made at least a step's bytes.
    steps: usize,
    /// Frames that were begun.
    frames: usize,
}

impl Zstd {
    fn step(&mut self, mut input: &[u8], cluster: &mut [u8], filled: usize) -> Result<(usize, usize), StreamFault> {
        let whole = input.len();
        let fault = |left: &[u8]| if left.is_empty() { StreamFault::EndsEarly } else { StreamFault::Damaged };
        let mut frame = match self.frame.take() {
            Some(frame) => frame,
            None if self.frames == MAX_FRAMES => return Err(StreamFault::Damaged),
            None => {
                self.frames += 1;
                let mut frame = Box::new(FrameDecoder::new());
                frame.init(&mut input).map_err(|_| fault(input))?;
                frame
            }
        };
        let step = STEP_BYTES.min(cluster.len());
        let done = frame.decode_blocks(&mut input, BlockDecodingStrategy::UptoBytes(step)).map_err(|_| fault(input))?;
        let made = frame.read(&mut cluster[filled..]).map_err(|_| StreamFault::Damaged)?;
        if frame.can_collect() > 0 {
            return Err(StreamFault::TooLong);
        }
        if done && made == 0 && self.steps == 0 {
            // Frames without output could go on for the whole of the input.
            return Err(StreamFault::Damaged);
        }
        self.steps = if done { 0 } else { self.steps + 1 };
        if self.steps * step > cluster.len() {
            return Err(StreamFault::TooLong);
        }
        self.frame = (!done).then_some(frame);
        Ok((whole - input.len(), made))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(compression: Compression, input: &[u8], cluster_bytes: usize) -> Result<Vec<u8>, StreamFault> {
        let mut decompressor = Decompressor::new(compression, cluster_bytes);
        while !decompressor.step(input)? {}
        Ok(decompressor.into_cluster())
    }

    fn deflate(bytes: &[u8]) -> Vec<u8> {
        miniz_oxide::deflate::compress_to_vec(bytes, 6)
    }

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
    }

    fn text(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at as u64).wrapping_mul(0x9e37_79b9).to_be_bytes()[5] & 0x3f).collect()
    }

    type Compress = fn(&[u8]) -> Vec<u8>;
    const KINDS: [(Compression, Compress); 2] = [(Compression::Deflate, deflate), (Compression::Zstd, zstd)];

    #[test]
    fn clusters_of_all_sizes_come_back() {
        for (kind, compress) in KINDS {
            for bits in [9, 12, 16, 17, 21] {
                let cluster = text(1 << bits);
                assert_eq!(run(kind, &compress(&cluster), 1 << bits), Ok(cluster), "{kind:?} {bits}");
            }
        }
    }

    #[test]
    fn what_lies_behind_the_stream_is_not_read() {
        for (kind, compress) in KINDS {
            let cluster = text(65536);
            let mut input = compress(&cluster);
            input.extend([0xff; 700]);
            assert_eq!(run(kind, &input, 65536), Ok(cluster), "{kind:?}");
        }
    }

    #[test]
    fn a_stream_that_ends_early_is_an_error() {
        for (kind, compress) in KINDS {
            let input = compress(&text(65536));
            assert_eq!(run(kind, &input, 131_072), Err(StreamFault::EndsEarly), "{kind:?}");
            for len in [0, 1, 10, input.len() / 2] {
                assert!(run(kind, &input[..len], 65536).is_err(), "{kind:?} cut at {len}");
            }
        }
    }

    #[test]
    fn output_stops_at_one_cluster() {
        let bomb = vec![0; 8 << 20];
        assert_eq!(run(Compression::Deflate, &deflate(&bomb), 4096), Ok(vec![0; 4096]));
        assert_eq!(run(Compression::Zstd, &zstd(&bomb), 65536), Err(StreamFault::TooLong));
        // A block that is one byte repeated: 4 bytes of input make 128 KiB.
        let block = |last: u8| [2 | last, 0, 16, 7];
        let frame =
            |blocks: usize| [&[0x28, 0xb5, 0x2f, 0xfd, 0, 0x88][..], &block(0).repeat(blocks), &block(1)].concat();
        assert_eq!(run(Compression::Zstd, &frame(99), 512), Err(StreamFault::TooLong));
        assert_eq!(run(Compression::Zstd, &frame(1), 262_144), Ok(vec![7; 262_144]));
    }

    #[test]
    fn a_zstd_frame_may_ask_for_a_large_window_and_come_in_pieces() {
        // No content size, a window of 128 MiB, one raw block of 512 bytes.
        let frame = |byte| [&[0x28, 0xb5, 0x2f, 0xfd, 0, 0x88, 0x01, 0x10, 0][..], &[byte; 512]].concat();
        assert_eq!(run(Compression::Zstd, &frame(1), 512), Ok(vec![1; 512]));
        let two = [frame(1), frame(2)].concat();
        assert_eq!(run(Compression::Zstd, &two, 1024), Ok([[1; 512], [2; 512]].concat()));
        // A window of terabytes is no stream of anybody.
        let giant = [&[0x28, 0xb5, 0x2f, 0xfd, 0, 0xff, 0x01, 0x10, 0][..], &[1; 512]].concat();
        assert_eq!(run(Compression::Zstd, &giant, 512), Err(StreamFault::Damaged));
    }

    #[test]
    fn zstd_frames_are_counted_and_empty_ones_are_damage() {
        let frame = |content: &[u8]| {
            [&[0x28, 0xb5, 0x2f, 0xfd, 0, 0x88, 1 | (content.len() as u8) << 3, 0, 0][..], content].concat()
        };
        let full = frame(&[7; 8]);
        assert_eq!(run(Compression::Zstd, &full.repeat(MAX_FRAMES), 512), Ok(vec![7; 512]));
        assert_eq!(run(Compression::Zstd, &full.repeat(MAX_FRAMES + 1), 520), Err(StreamFault::Damaged));
        let empty_first = [frame(&[]), full.repeat(64)].concat();
        assert_eq!(run(Compression::Zstd, &empty_first, 512), Err(StreamFault::Damaged));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn what_is_compressed_comes_back(bytes in proptest::collection::vec(0u8..9, 4096..4097), repeat in 1usize..40) {
            let cluster = bytes.repeat(repeat);
            for (kind, compress) in KINDS {
                prop_assert_eq!(run(kind, &compress(&cluster), cluster.len()), Ok(cluster.clone()));
            }
        }
    }
}
