//! A blkif ring, its requests and its journal, driven by a script of slots, indices and deaths.
#![no_main]

#[path = "../blkif_ring.rs"]
mod blkif_ring;
#[path = "../script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|data: &[u8]| blkif_ring::run(data));
