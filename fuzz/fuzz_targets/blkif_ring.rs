//! A blkif ring, its requests and its journal, driven by a script of slots, indices and deaths.
#![no_main]

#[path = "../blkif_ring.rs"]
mod blkif_ring;

libfuzzer_sys::fuzz_target!(|data: &[u8]| blkif_ring::run(data));
