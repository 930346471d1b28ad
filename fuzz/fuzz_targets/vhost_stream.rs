//! A vhost-user server as a whole, driven by a script of messages, rings and kicks.
#![no_main]

#[path = "../vhost_stream.rs"]
mod vhost_stream;
#[path = "../panics.rs"]
mod panics;
#[path = "../script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|data: &[u8]| vhost_stream::run(data));
