//! Batmaps: the header's 512 bytes, then the map.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| spile_image::formats::vhd::codec::fuzz::fuzz_batmap(data));
