//! The codecs of VHD over their fuzz corpora, and over mutations of them.

#[path = "../../../fuzz/short_run.rs"]
mod short_run;

use short_run::run;
use spile_image::vhd::codec::fuzz;

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
