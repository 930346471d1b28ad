//! Descriptor chains of a virtqueue, and the requests in them.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| spile_front_vhost::fuzz::chain(data));
