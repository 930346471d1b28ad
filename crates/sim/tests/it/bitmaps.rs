//! Bitmaps inside a qcow2 image under load, deaths and power cuts: nothing is found, and a rule that is broken on purpose is.

use crate::found;
use spile_sim::bitmaps::{BitmapsSummary, Broken, run_bitmaps, run_every_step};

const NOT_SET: &str = "is not set in it";
const NOT_OWN: &str = "something else uses the space of a bitmap";
const SEEDS: u64 = 2000;

#[test]
fn three_hundred_seeds_find_nothing() {
    let mut all = BitmapsSummary::default();
    for seed in 0..300 {
        let done = run_bitmaps(seed, Broken::Nothing, false);
        all += done.unwrap_or_else(|finding| panic!("seed {seed}: {}", finding.message));
    }
    println!("{all:?}");
    assert!(all.crashes > 200 && all.cleared > 20, "too little happened: {all:?}");
    assert!(all.behind > 10 && all.parents > 10, "other programs wrote too rarely: {all:?}");
    assert!(all.believed > 500 && all.useful > 200 && all.in_use > 50, "too little was looked at: {all:?}");
}

#[test]
fn a_crash_at_every_step_and_another_after_it_find_nothing() {
    let mut all = BitmapsSummary::default();
    for seed in 0..3 {
        let done = run_every_step(seed, Broken::Nothing);
        all += done.unwrap_or_else(|finding| panic!("seed {seed}: {}", finding.message));
    }
    println!("{all:?}");
    assert!(all.crashes > 600, "too little happened: {all:?}");
}

/// A seed finds the broken rule by a message with `sign`.
fn bites(broken: Broken, sign: &str) {
    found::bites(|seed, broken| run_bitmaps(seed, broken, false), (broken, Broken::Nothing), (0, 0..SEEDS), sign);
}

#[test]
fn a_bitmap_that_is_in_use_too_late_is_found() {
    bites(Broken::InUseLate, NOT_SET);
}

#[test]
fn a_bit_that_is_dropped_is_found() {
    bites(Broken::BitDropped, NOT_SET);
}

#[test]
fn a_bitmap_that_lacks_what_its_parents_have_got_and_is_called_true_is_found() {
    bites(Broken::BehindLate, "lacks what its parents have got");
}

#[test]
fn a_directory_that_is_named_before_its_bits_are_durable_is_found() {
    // Only a power cut right behind that shows it.
    found::bites(run_every_step, (Broken::NamedEarly, Broken::Nothing), (5, 0..60), NOT_SET);
}

#[test]
fn space_that_is_free_before_the_new_directory_counts_is_found() {
    found::bites(run_every_step, (Broken::FreedEarly, Broken::Nothing), (0, 0..60), NOT_OWN);
}
