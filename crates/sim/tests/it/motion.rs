//! Disks moved under load, crashes and power cuts: nothing is found, and a rule that is broken on purpose is.

use crate::found;
use spile_sim::motion::{Broken, MotionSummary, run_motion};

const SEEDS: u64 = 3000;

#[test]
fn three_hundred_seeds_find_nothing() {
    let mut all = MotionSummary::default();
    for seed in 0..300 {
        let done = run_motion(seed, Broken::Nothing, false);
        all += done.unwrap_or_else(|finding| panic!("seed {seed}: {}", finding.message));
    }
    println!("{all:?}");
    assert!(all.moved > 100 && all.busy > 60, "too little happened: {all:?}");
    assert!(all.found > 10 && all.taken_back > 10, "no crash between the names, or right after them: {all:?}");
    assert!(all.put_off > 5, "no hand-over was put off: {all:?}");
    assert!(all.taken_up > 15 && all.replaced > 3, "too few halves were there to go on with: {all:?}");
    assert!(all.back > 15 && all.written_behind > 0, "too few disks went back: {all:?}");
    assert!(all.kept > 15 && all.reused > 3 && all.spoiled > 0, "too few disks took their parents along: {all:?}");
    assert!(all.resumed > 30 && all.ended_early > 30, "too little happened: {all:?}");
    assert!(all.asked > 300 && all.useful > 100, "too little was asked of checkpoints: {all:?}");
    assert!(all.copied > 10 && all.forward > 50 && all.ended_forward > 10, "too few disks were copied: {all:?}");
}

/// Seeds that once found something.
const KEPT: [u64; 4] = [355, 1185, 1377, 3178];

#[test]
fn kept_seeds_find_nothing() {
    for seed in KEPT {
        let done = run_motion(seed, Broken::Nothing, false);
        done.unwrap_or_else(|finding| panic!("seed {seed}: {}", finding.message));
    }
}

#[test]
fn a_seed_repeats() {
    let run = |seed| run_motion(seed, Broken::Nothing, false).map(|summary| summary.steps).ok();
    assert_eq!((run(3), run(4)), (run(3), run(4)));
}

/// A seed, `first` if it still does so, finds the broken rule by a message with `sign`.
fn bites(broken: Broken, first: u64, sign: &str) {
    found::bites(|seed, broken| run_motion(seed, broken, false), (broken, Broken::Nothing), (first, 0..SEEDS), sign);
}

#[test]
fn a_block_that_counts_as_copied_only_when_it_was_read_is_found() {
    bites(Broken::ClearAfterRead, 231, " reads ");
}

#[test]
fn a_block_that_is_marked_when_a_write_begins_is_found() {
    bites(Broken::MarkBeforeWrite, 0, " reads ");
}

#[test]
fn a_hand_over_that_does_not_wait_for_requests_in_flight_is_found() {
    bites(Broken::HandOverInFlight, 30, " reads ");
}

#[test]
fn a_hand_over_before_the_new_image_is_durable_is_found() {
    bites(Broken::HandOverUnflushed, 23, " reads ");
}

#[test]
fn a_half_that_is_noted_before_it_is_durable_is_found() {
    bites(Broken::NotedBeforeFlush, 1399, " reads ");
}

/// As [`bites`], of the seeds alone in which disks are copied and stay; `first` counts these.
fn bites_copied(broken: Broken, first: u64, sign: &str) {
    let run = |number: u64, broken| run_motion(number * 7, broken, false);
    found::bites(run, (broken, Broken::Nothing), (first, 0..SEEDS / 7), sign);
}

#[test]
fn changes_that_are_forgotten_before_they_are_copied_are_found() {
    bites_copied(Broken::ForwardBeforeFlush, 45, "the copy is not the disk");
}

#[test]
fn a_half_that_is_another_file_is_found() {
    bites(Broken::AnyHalf, 79, " reads ");
}

#[test]
fn changes_that_are_not_copied_again_are_found() {
    bites(Broken::ChangesLeftOut, 12, " reads ");
}

#[test]
fn an_old_image_that_somebody_wrote_to_is_found() {
    bites(Broken::OldImageAsIs, 4, " reads ");
}

#[test]
fn what_the_disk_has_given_up_since_it_was_copied_is_found() {
    bites(Broken::GivenUpLeftOut, 370, " reads ");
}

#[test]
fn changes_that_are_noted_beside_the_new_image_too_late_are_found() {
    // By a block that is not marked, or by what the disk reads after a way back.
    bites(Broken::CarriedLate, 88, "");
}

#[test]
fn a_new_name_before_the_old_one_is_gone_is_found() {
    bites(Broken::TwoNames, 141, "at both paths");
}
