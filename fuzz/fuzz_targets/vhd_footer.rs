//! Footers: 511 or 512 bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| spile_image::formats::vhd::codec::fuzz::fuzz_footer(data));
