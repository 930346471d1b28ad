//! Parent locators: the entry's 24 bytes, then its text.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| spile_image::formats::vhd::codec::fuzz::fuzz_locator(data));
