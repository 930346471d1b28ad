//! BATs: a byte for the block size, two for the file's length, then entries.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| spile_image::formats::vhd::codec::fuzz::fuzz_bat(data));
