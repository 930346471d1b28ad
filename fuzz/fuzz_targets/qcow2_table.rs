//! Entries of L1 and L2 tables: a byte for the cluster size, one for the kind of image, then entries.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| spile_image::formats::qcow2::codec::fuzz::fuzz_table(data));
