//! Images deleted, cloned and collected while everything may end at any step: nothing is found, and a rule that is broken on purpose is.

use crate::found;
use spile_sim::gc::{Broken, GcSummary, run_gc};

const SEEDS: u64 = 3000;

#[test]
fn two_hundred_seeds_find_nothing() {
    let mut all = GcSummary::default();
    for seed in 0..200 {
        let done = run_gc(seed, Broken::Nothing, false);
        all += done.unwrap_or_else(|finding| panic!("seed {seed}: {}", finding.message));
    }
    println!("{all:?}");
    assert!(all.marked > 60 && all.removed > 30 && all.refused > 30, "too little happened: {all:?}");
    assert!(all.cloned > 60 && all.snapshots > 60, "too little happened: {all:?}");
    assert!(all.merged > 60 && all.busy > 20 && all.resumed > 5, "too little happened: {all:?}");
    assert!(all.kept > 30, "too few snapshots were kept whose parent was deleted: {all:?}");
}

/// Seeds that once found something, and what.
const KEPT: [(u64, &str); 9] = [
    (59, "something that earlier versions did"),
    (119, "a collection failed because another one had just merged an image beneath its disk"),
    (432, "a collection failed because an image lost its name while its family was asked"),
    (653, "an image stayed whose child was deleted, too, and had lost its own child"),
    (1085, "a merge that failed before it began kept all others waiting for ever, for its layer was deleted, too"),
    (1103, "an image that was deleted once more lost its mark by a crash in the middle of its merge"),
    (1232, "a merge that was broken off kept all others waiting for ever, for its layer was deleted, too"),
    (519048, "a merge never ended, for somebody had written to the emptied layer as to a disk"),
    (700904, "a collection failed because another merge was just giving an image its second name"),
];

#[test]
fn kept_seeds_find_nothing() {
    for (seed, what) in KEPT {
        let done = run_gc(seed, Broken::Nothing, false);
        done.unwrap_or_else(|finding| panic!("seed {seed}, {what}: {}", finding.message));
    }
}

#[test]
fn a_seed_repeats() {
    let run = |seed| run_gc(seed, Broken::Nothing, false).map(|summary| summary.steps).ok();
    assert_eq!((run(3), run(4)), (run(3), run(4)));
}

/// A seed, `first` if it still does so, finds the broken rule by a message with `sign`.
fn bites(broken: Broken, first: u64, sign: &str) {
    found::bites(|seed, broken| run_gc(seed, broken, false), (broken, Broken::Nothing), (first, 0..SEEDS), sign);
}

#[test]
fn a_folder_that_is_asked_before_the_lock_is_found() {
    bites(Broken::AskedBeforeLock, 94, "does not open");
}

#[test]
fn a_clone_beside_the_beginning_of_a_merge_is_found() {
    bites(Broken::CloneBesideMerge, 73, "does not open");
}

#[test]
fn a_name_that_is_taken_before_the_children_know_its_new_owner_is_found() {
    bites(Broken::Names(spile_image::Broken::NameBeforeChildren), 20, "does not open");
}

#[test]
fn a_snapshot_whose_name_leads_nowhere_for_a_moment_is_found() {
    bites(Broken::Names(spile_image::Broken::NoNameBetween), 2055, "nobody has deleted it");
}

#[test]
fn an_old_name_that_goes_before_the_children_know_the_new_one_is_found() {
    bites(Broken::Names(spile_image::Broken::RemoveBeforeNames), 20, "does not open");
}
