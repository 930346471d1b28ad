//! Snapshot tables of qcow2 images.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| spile_image::formats::qcow2::codec::fuzz::fuzz_snapshots(data));
