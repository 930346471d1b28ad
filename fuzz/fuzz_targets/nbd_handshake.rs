//! Whole handshakes, as a client sends them.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| spile_front_nbd::negotiate::fuzz_handshake(data));
