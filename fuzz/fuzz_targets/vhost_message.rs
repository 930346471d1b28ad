//! Messages of a vhost-user front end.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| spile_front_vhost::fuzz::messages(data));
