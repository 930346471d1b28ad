//! Streams of requests, 28 bytes each.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| spile_front_nbd::wire::request::fuzz_requests(data));
