//! The NBD client, driven by a server that follows a script.
#![no_main]

#[path = "../nbd_client.rs"]
mod nbd_client;
#[path = "../panics.rs"]
mod panics;
#[path = "../script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|data: &[u8]| nbd_client::run(data));
