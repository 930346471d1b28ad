//! The data of one option.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| spile_front_nbd::wire::handshake::fuzz_options(data));
