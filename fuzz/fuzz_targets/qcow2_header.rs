//! Headers of qcow2 images and their extensions: the first bytes of an image.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| spile_image::formats::qcow2::codec::fuzz::fuzz_header(data));
