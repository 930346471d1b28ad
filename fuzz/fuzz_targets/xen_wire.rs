//! Messages of xenstore, and what a front end has written there.
#![no_main]

#[path = "../xen_wire.rs"]
mod xen_wire;

libfuzzer_sys::fuzz_target!(|data: &[u8]| xen_wire::run(data));
