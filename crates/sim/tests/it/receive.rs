//! Disks moved to another host under load, crashes, power cuts and cut links: nothing is found, and a rule that is broken on purpose is.

use crate::found;
use spile_sim::motion::Broken as BrokenMove;
use spile_sim::receive::{Broken, ReceiveSummary, run_receive};

const SEEDS: u64 = 9000;
/// Of those in which checkpoints go along and disks come back.
const TRACKED_SEEDS: u64 = 1000;

#[test]
fn three_hundred_seeds_find_nothing() {
    let mut all = ReceiveSummary::default();
    for seed in 0..300 {
        let done = run_receive(seed, Broken::Nothing, false);
        all += done.unwrap_or_else(|finding| panic!("seed {seed}: {}", finding.message));
    }
    println!("{all:?}");
    assert!(all.moved > 100 && all.busy > 80 && all.found > 200, "too little happened: {all:?}");
    assert!(all.troubled > 15 && all.taken_up > 15 && all.resumed > 80, "too little trouble: {all:?}");
    assert!(all.kept > 15 && all.parents_found > 8, "too few parents went along: {all:?}");
    assert!(all.used > 8 && all.ended_early > 40 && all.left > 5, "too little happened: {all:?}");
    assert!(all.compared > 8, "too few copies were compared: {all:?}");
    assert!(all.arrived > 20 && all.asked > 300 && all.useful > 50, "too little was asked of checkpoints: {all:?}");
    assert!(all.back > 8 && all.back_by_less > 3 && all.written_behind > 3, "too few disks went back: {all:?}");
}

/// That is rare.
#[test]
fn a_disk_that_keeps_its_chain_goes_back() {
    let goes_back = |seed: &u64| {
        let done = run_receive(*seed, Broken::Nothing, false);
        done.unwrap_or_else(|finding| panic!("seed {seed}: {}", finding.message)).back_with_chain > 0
    };
    let seed = found::tried(395, 300..SEEDS).find(goes_back);
    println!("seed {}", seed.expect("no disk that keeps its chain went back"));
}

/// Seed 50023 was told to stop before anything was noted of its half there, and was cancelled a moment later: nobody told the other host. It drew another disk then.
#[test]
fn a_move_that_is_cancelled_while_it_stops_leaves_nothing_there() {
    run_receive(50023, Broken::Nothing, false).unwrap_or_else(|finding| panic!("{}", finding.message));
}

#[test]
fn a_seed_repeats() {
    let run = |seed| run_receive(seed, Broken::Nothing, false).map(|summary| summary.steps).ok();
    assert_eq!((run(3), run(4)), (run(3), run(4)));
}

/// A seed, `first` if it still does so, finds the broken rule by a message with `sign`.
fn bites(broken: Broken, first: u64, sign: &str) {
    found::bites(|seed, broken| run_receive(seed, broken, false), (broken, Broken::Nothing), (first, 0..SEEDS), sign);
}

#[test]
fn what_comes_late_by_an_old_link_is_found() {
    bites(Broken::LinksNotFenced, 4136, " reads ");
}

#[test]
fn a_write_that_is_sent_again_by_the_same_link_is_found() {
    bites(Broken::SentAgain, 175, " reads ");
}

#[test]
fn a_copy_that_is_whole_and_is_gone_on_with_is_found() {
    // Whoever uses it finds that, or who compares it with the disk.
    bites(Broken::WholeIsHalf, 1138, "copy");
}

#[test]
fn a_half_that_is_noted_before_it_is_durable_is_found() {
    bites(Broken::HalfNotDurable, 420, "without a fault");
}

#[test]
fn a_name_that_is_told_of_before_it_is_there_is_found() {
    bites(Broken::FinishedLate, 1, " no name");
}

#[test]
fn a_name_that_is_not_kept_for_a_disk_that_comes_is_found() {
    bites(Broken::NameNotKept, 132, "does not open there");
}

#[test]
fn a_parent_that_gets_its_name_before_it_is_durable_is_found() {
    bites(Broken::Move(BrokenMove::ParentUnflushed), 14, "the parent ");
}

#[test]
fn a_host_that_does_not_know_that_it_may_have_the_disk_is_found() {
    bites(Broken::Move(BrokenMove::NotTold), 151, "no disk at all");
}

#[test]
fn a_new_name_before_the_old_one_is_gone_is_found() {
    bites(Broken::Move(BrokenMove::TwoNames), 1, "at both paths");
}

#[test]
fn an_old_name_that_is_lost_without_a_note_is_found() {
    bites(Broken::Move(BrokenMove::NotNoted), 1, "no disk at all");
}

#[test]
fn a_hand_over_before_the_copy_is_durable_there_is_found() {
    bites(Broken::Move(BrokenMove::HandOverUnflushed), 703, " reads ");
}

#[test]
fn a_hand_over_that_does_not_wait_for_requests_in_flight_is_found() {
    bites(Broken::Move(BrokenMove::HandOverInFlight), 646, " reads ");
}

#[test]
fn changes_that_are_not_copied_again_are_found() {
    bites(Broken::Move(BrokenMove::ChangesLeftOut), 6, " reads ");
}

/// As [`bites`], of the seeds alone in which checkpoints go along and disks come back; `first` counts these.
fn bites_tracked(broken: Broken, first: u64, sign: &str) {
    let run = |number: u64, broken| run_receive(number / 2 * 7 + 3 + number % 2 * 2, broken, false);
    found::bites(run, (broken, Broken::Nothing), (first, 0..TRACKED_SEEDS), sign);
}

#[test]
fn changes_that_are_noted_there_too_late_are_found() {
    // By a checkpoint that is gone, or by a block that is not marked.
    bites_tracked(Broken::MarksLate, 71, "");
}

#[test]
fn changes_that_are_not_noted_there_are_found() {
    bites_tracked(Broken::MarksNotMet, 7, "is not marked");
}

#[test]
fn an_old_image_that_somebody_wrote_to_and_that_is_used_again_is_found() {
    bites_tracked(Broken::OldImageAsIs, 28, " reads ");
}
