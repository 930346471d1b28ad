//! Changed blocks under load, deaths and power cuts: nothing is found, and a rule that is broken on purpose is.

use crate::found;
use spile_sim::changes::{Broken, ChangesSummary, run_changes, run_every_step};

const NOT_MARKED: &str = "is not marked";

const SEEDS: u64 = 3000;

#[test]
fn three_hundred_seeds_find_nothing() {
    let mut all = ChangesSummary::default();
    for seed in 0..300 {
        let done = run_changes(seed, Broken::Nothing, false);
        all += done.unwrap_or_else(|finding| panic!("seed {seed}: {}", finding.message));
    }
    println!("{all:?}");
    assert!(all.made > 300 && all.removed > 80 && all.crashes > 300, "too little happened: {all:?}");
    assert!(all.given_up > 1 && all.noted > 300, "too little failed, or was noted: {all:?}");
    assert!(all.asked > 1000 && all.exact > 300 && all.exact < all.asked, "too little was asked: {all:?}");
}

#[test]
fn a_crash_at_every_step_and_another_after_it_find_nothing() {
    let mut all = ChangesSummary::default();
    for seed in 0..3 {
        let done = run_every_step(seed, Broken::Nothing);
        all += done.unwrap_or_else(|finding| panic!("seed {seed}: {}", finding.message));
    }
    println!("{all:?}");
    assert!(all.crashes > 600, "too little happened: {all:?}");
}

#[test]
fn a_seed_repeats() {
    let run = |seed| run_changes(seed, Broken::Nothing, false).map(|summary| summary.steps).ok();
    assert_eq!((run(3), run(4)), (run(3), run(4)));
}

/// A seed, `first` if it still does so, finds the broken rule by a block that is not marked.
fn bites(broken: Broken, first: u64) {
    found::bites(
        |seed, broken| run_changes(seed, broken, false),
        (broken, Broken::Nothing),
        (first, 0..SEEDS),
        NOT_MARKED,
    );
}

#[test]
fn a_bit_that_is_set_after_the_data_is_found() {
    bites(Broken::BitAfterData, 0);
}

#[test]
fn a_mark_that_nobody_waits_for_is_found() {
    bites(Broken::MarkNotDurable, 0);
}

#[test]
fn marks_that_are_cleared_too_early_are_found() {
    bites(Broken::MarksClearedEarly, 1195);
}

#[test]
fn an_interval_that_is_settled_before_the_last_sync_is_found() {
    // Only a power cut while the header is written shows it.
    found::bites(run_every_step, (Broken::SettledEarly, Broken::Nothing), (44, 30..60), NOT_MARKED);
}

#[test]
fn a_checkpoint_that_does_not_wait_for_requests_is_found() {
    bites(Broken::CheckpointWithoutWait, 0);
}

#[test]
fn a_checkpoint_that_does_not_flush_the_disk_is_found() {
    bites(Broken::CheckpointWithoutFlush, 89);
}

#[test]
fn a_header_that_is_written_before_marks_are_bits_is_found() {
    bites(Broken::BootBeforeBits, 1125);
}
