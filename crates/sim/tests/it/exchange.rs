//! Graphs exchanged at random under load, crashes and power cuts: nothing is found, and a rule that is broken on purpose is.

use crate::found;
use spile_sim::live::{Broken, LiveSummary, run_live};

const SEEDS: u64 = 5000;

#[test]
fn four_hundred_seeds_find_nothing() {
    let mut all = LiveSummary::default();
    for seed in 0..400 {
        let done = run_live(seed, Broken::Nothing, false);
        all += done.unwrap_or_else(|finding| panic!("seed {seed}: {}", finding.message));
    }
    println!("{all:?}");
    assert!(all.exchanges > 250 && all.sealed > 250, "too little happened: {all:?}");
    assert!(
        all.failed > 5 && all.grown > 100 && all.went_back > 50 && all.half_sets > 0,
        "too little happened: {all:?}"
    );
    assert!(all.went_back_in_use > 20 && all.went_back_noted > 5, "too little happened: {all:?}");
    assert!(all.asked > 100 && all.useful > 50, "too little was asked of checkpoints: {all:?}");
}

/// Seeds that once found something, and what.
const KEPT: [(u64, &str); 9] = [
    (2895, "a disk that could not grow, for want of room for a footer, was cut short when it was closed"),
    (1_000_002, "zeroes that were tried again came after a write that overlapped them: the oracle was too strict"),
    (
        703_910,
        "a process was killed before the new leaf's name was durable; a power cut in the next life took name and writes away",
    ),
    (
        704_787,
        "a disk whose growth had failed, but for its telling, cannot grow above its snapshot: the oracle was too strict",
    ),
    (61_158, "a new qcow2 leaf copied what lay around a write before a write of the old epoch had landed there"),
    (
        85_295,
        "records went to a half of the bitmap journal whose header a failed write had taken away, and a kill lost them",
    ),
    (116_643, "a reader saw a write that failed then, and was taken back: the oracle was too strict"),
    (
        230_456,
        "a flush succeeded after one had failed for an image that a way back left behind: the oracle was too strict",
    ),
    (1_040_155, "a disk without room answered at once, and the run did not end"),
];

#[test]
fn kept_seeds_find_nothing() {
    for (seed, what) in KEPT {
        let done = run_live(seed, Broken::Nothing, false);
        done.unwrap_or_else(|finding| panic!("seed {seed}, {what}: {}", finding.message));
    }
}

#[test]
fn a_seed_repeats() {
    let run = |seed| run_live(seed, Broken::Nothing, false).map(|summary| summary.steps).ok();
    assert_eq!((run(3), run(4)), (run(3), run(4)));
}

/// A seed, `first` if it still does so, finds the broken rule by a message with `sign`.
fn bites(broken: Broken, first: u64, sign: &str) {
    found::bites(|seed, broken| run_live(seed, broken, false), (broken, Broken::Nothing), (first, 0..SEEDS), sign);
}

#[test]
fn disks_that_are_exchanged_one_after_the_other_are_found() {
    bites(Broken::OneByOne, 20, "frozen at one point in time");
}

#[test]
fn half_a_set_of_snapshots_that_does_not_say_so_is_found() {
    bites(Broken::SetNotNoted, 53, "half a set does not say so");
}

#[test]
fn a_leaf_that_is_sealed_before_its_epoch_has_ended_is_found() {
    // A request of the old epoch finds its leaf sealed.
    bites(Broken::SealedEarly, 131, "without a fault: ReadOnly");
}

#[test]
fn a_flush_that_covers_only_the_new_leaf_is_found() {
    bites(Broken::FlushOfLeaf, 141, " reads ");
}

#[test]
fn a_leaf_that_takes_the_disks_path_before_it_is_durable_is_found() {
    bites(Broken::LeafNotDurable, 102, "does not open");
}

#[test]
fn an_exchange_before_the_new_name_is_durable_is_found() {
    bites(Broken::RenameNotDurable, 6130, "a frozen parent does not open");
}

#[test]
fn a_path_that_changes_before_the_old_leaf_has_its_second_name_is_found() {
    bites(Broken::LinkedLate, 48, "does not open");
}

#[test]
fn a_disk_that_is_opened_before_its_name_is_durable_is_found() {
    bites(Broken::OldNamesNotSynced, 3903, " reads ");
}

#[test]
fn what_a_crash_has_left_and_nobody_takes_back_is_found() {
    bites(Broken::NotTakenBack, 2, "is left half-made");
}

#[test]
fn a_way_back_that_a_power_cut_undoes_is_found() {
    bites(Broken::BackNotDurable, 50, "has gone back, and is as it was before");
}

#[test]
fn a_way_back_of_a_disk_in_use_that_a_power_cut_undoes_is_found() {
    bites(Broken::BackNotDurable, 1561, " reads ");
}

#[test]
fn a_way_back_that_does_not_wait_for_requests_is_found() {
    bites(Broken::BackInFlight, 30, " reads ");
}

#[test]
fn a_way_back_to_a_leaf_that_is_not_durable_is_found() {
    bites(Broken::BackLeafNotDurable, 18, "does not open");
}

/// As [`bites`], of the seeds alone in which disks have checkpoints; `first` counts these.
fn bites_noted(broken: Broken, first: u64, sign: &str) {
    let run = |number: u64, broken| run_live(number * 7, broken, false);
    found::bites(run, (broken, Broken::Nothing), (first, 0..SEEDS / 7), sign);
}

#[test]
fn a_way_back_that_is_noted_too_late_is_found() {
    bites_noted(Broken::BackNotedLate, 16, "is not marked");
}

#[test]
fn a_checkpoint_that_is_made_during_a_way_back_is_found() {
    bites_noted(Broken::BackBesideCheckpoints, 16, "is not marked");
}

#[test]
fn a_disk_that_grows_while_its_snapshot_is_made_is_found() {
    bites(Broken::GrownMeanwhile, 142, "bytes, and not one of");
}

#[test]
fn a_request_that_should_wait_and_does_not_is_found() {
    bites(Broken::Impatient, 19, "did not wait");
}
