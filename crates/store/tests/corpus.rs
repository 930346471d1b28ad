//! The short run of this crate's fuzz target.

#![forbid(unsafe_code)]

#[path = "../../../fuzz/nbd_client.rs"]
mod nbd_client;
#[path = "../../../fuzz/panics.rs"]
mod panics;
#[path = "../../../fuzz/script.rs"]
mod script;
#[path = "../../../fuzz/short_run.rs"]
mod short_run;

#[test]
fn hostile_servers() {
    short_run::run_times("nbd_client", 2000, nbd_client::run);
}

#[test]
fn replies() {
    short_run::run("nbd_client", spile_nbd_wire::client::fuzz_client);
}
