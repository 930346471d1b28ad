//! Compressed clusters: a byte for compression and cluster size, then the stream.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| spile_image::formats::qcow2::codec::fuzz::fuzz_stream(data));
