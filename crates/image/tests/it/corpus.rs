//! The codecs of VHD and qcow2 over their fuzz corpora, and over mutations of them.

#[path = "../../../../fuzz/short_run.rs"]
mod short_run;

use short_run::run;
use spile_image::formats::qcow2::codec::fuzz as qcow2;
use spile_image::formats::vhd::codec::fuzz;

#[test]
fn footers() {
    run("vhd_footer", fuzz::fuzz_footer);
}

#[test]
fn headers() {
    run("vhd_header", fuzz::fuzz_header);
}

#[test]
fn bats() {
    run("vhd_bat", fuzz::fuzz_bat);
}

#[test]
fn locators() {
    run("vhd_locator", fuzz::fuzz_locator);
}

#[test]
fn batmaps() {
    run("vhd_batmap", fuzz::fuzz_batmap);
}

#[test]
fn qcow2_headers() {
    run("qcow2_header", qcow2::fuzz_header);
}

#[test]
fn qcow2_tables() {
    run("qcow2_table", qcow2::fuzz_table);
}

#[test]
fn qcow2_refcounts() {
    run("qcow2_refcount", qcow2::fuzz_refcount);
}

#[test]
fn qcow2_snapshots() {
    run("qcow2_snapshots", qcow2::fuzz_snapshots);
}

#[test]
fn qcow2_bitmaps() {
    run("qcow2_bitmaps", qcow2::fuzz_bitmaps);
}

#[test]
fn qcow2_streams() {
    run("qcow2_stream", qcow2::fuzz_stream);
}
