//! Refcount blocks: a byte for the width, then counts.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| spile_image::formats::qcow2::codec::fuzz::fuzz_refcount(data));
