//! The ring, its requests, its journal and its task, and what xenstore brings, over their fuzz corpora and over mutations
//! of them.
#![forbid(unsafe_code)]

#[path = "../../../fuzz/blkif_ring.rs"]
mod blkif_ring;
#[path = "../../../fuzz/blkif_stream.rs"]
mod blkif_stream;
#[path = "../../../fuzz/panics.rs"]
mod panics;
#[path = "../../../fuzz/script.rs"]
mod script;
#[path = "../../../fuzz/short_run.rs"]
mod short_run;
#[path = "../../../fuzz/xen_wire.rs"]
mod xen_wire;

use short_run::{run, run_times};

#[test]
fn rings() {
    run("blkif_ring", blkif_ring::run);
}

#[test]
fn streams() {
    run_times("blkif_stream", 3000, blkif_stream::run);
}

#[test]
fn words_of_xenstore() {
    run_times("xen_wire", 10_000, xen_wire::run);
}
