//! Layers merged and leaves flattened under load, crashes and power cuts: nothing is found, and a rule that is broken on purpose is.

use crate::found;
use spile_sim::merge::{Broken, MergeSummary, run_merge};

const SEEDS: u64 = 3000;

#[test]
fn two_hundred_seeds_find_nothing() {
    let mut all = MergeSummary::default();
    for seed in 0..200 {
        let done = run_merge(seed, Broken::Nothing, false);
        all += done.unwrap_or_else(|finding| panic!("seed {seed}: {}", finding.message));
    }
    println!("{all:?}");
    assert!(all.merged > 40 && all.leaves > 40 && all.flattened > 40, "too little happened: {all:?}");
    assert!(all.resumed > 60 && all.ended_early > 30 && all.refused > 30, "too little happened: {all:?}");
}

/// Seeds that once found something, and what.
const KEPT: [(u64, &str); 4] = [
    (212_063, "a write to the parent of a leaf that sinks waited for itself when that parent became the leaf"),
    (
        2_010_528,
        "a child named its new parent although that had failed, and the layer that was left kept the next merge away",
    ),
    (5_000_117, "a job that was cancelled while it stopped left its note"),
    (5_000_759, "a merge failed behind its last step, and the second child's parent was not told"),
];

#[test]
fn kept_seeds_find_nothing() {
    for (seed, what) in KEPT {
        let done = run_merge(seed, Broken::Nothing, false);
        done.unwrap_or_else(|finding| panic!("seed {seed}, {what}: {}", finding.message));
    }
}

#[test]
fn a_seed_repeats() {
    let run = |seed| run_merge(seed, Broken::Nothing, false).map(|summary| summary.steps).ok();
    assert_eq!((run(3), run(4)), (run(3), run(4)));
}

/// A seed, `first` if it still does so, finds the broken rule by a message with `sign`.
fn bites(broken: Broken, first: u64, sign: &str) {
    found::bites(|seed, broken| run_merge(seed, broken, false), (broken, Broken::Nothing), (first, 0..SEEDS), sign);
}

#[test]
fn a_layer_that_gives_up_before_its_parent_is_synced_is_found() {
    bites(Broken::ForgetBeforeSync, 385, " reads ");
}

#[test]
fn a_layer_that_is_removed_before_its_child_names_another_parent_is_found() {
    bites(Broken::RemoveBeforeNames, 3, "does not open");
}

#[test]
fn a_change_in_the_batch_that_goes_to_the_leaf_only_is_found() {
    bites(Broken::BatchInLeafOnly, 25, " reads ");
}

#[test]
fn a_change_that_goes_below_while_an_older_one_copies_from_there_is_found() {
    bites(Broken::CopiedMeanwhile, 168, " reads ");
}

#[test]
fn a_flush_that_covers_the_leaf_only_is_found() {
    bites(Broken::FlushOfLeafOnly, 102, " reads ");
}

#[test]
fn a_copy_that_does_not_keep_guests_out_is_found() {
    bites(Broken::CopyWithoutLock, 19, " reads ");
}
