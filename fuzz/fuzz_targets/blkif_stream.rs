//! A blkif ring at work, driven by a script of bytes, indices, kicks and faults.
#![no_main]

#[path = "../blkif_stream.rs"]
mod blkif_stream;
#[path = "../panics.rs"]
mod panics;
#[path = "../script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|data: &[u8]| blkif_stream::run(data));
