//! The codecs of NBD over their fuzz corpora, and over mutations of them.

#[path = "../../../fuzz/short_run.rs"]
mod short_run;

use short_run::run;
use spile_front_nbd::{negotiate, wire};

#[test]
fn handshakes() {
    run("nbd_handshake", negotiate::fuzz_handshake);
}

#[test]
fn options() {
    run("nbd_options", wire::handshake::fuzz_options);
}

#[test]
fn requests() {
    run("nbd_request", wire::request::fuzz_requests);
}
