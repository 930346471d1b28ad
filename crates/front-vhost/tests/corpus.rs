//! The readers of hostile bytes and the server as a whole, over their fuzz corpora and over mutations of them.
#![forbid(unsafe_code)]

#[path = "../../../fuzz/panics.rs"]
mod panics;
#[path = "../../../fuzz/script.rs"]
mod script;
#[path = "../../../fuzz/short_run.rs"]
mod short_run;
#[path = "../../../fuzz/vhost_stream.rs"]
mod vhost_stream;

use short_run::{run, run_times};
use spile_front_vhost::fuzz;

#[test]
fn messages() {
    run("vhost_message", fuzz::messages);
}

#[test]
fn chains() {
    run("vhost_chain", fuzz::chain);
}

#[test]
fn regions_of_requests_in_flight() {
    run("vhost_inflight", fuzz::inflight);
}

#[test]
fn streams() {
    run_times("vhost_stream", 1000, vhost_stream::run);
}
