//! The region of requests in flight, as a server finds it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| spile_front_vhost::fuzz::inflight(data));
