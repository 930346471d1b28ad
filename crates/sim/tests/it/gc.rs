//! Images deleted, cloned and collected while everything may end at any step: nothing is found, and a rule that is broken on purpose is.

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
}

#[test]
fn a_seed_repeats() {
    let run = |seed| run_gc(seed, Broken::Nothing, false).map(|summary| summary.steps).ok();
    assert_eq!((run(3), run(4)), (run(3), run(4)));
}

/// A seed finds the broken rule by a message with `sign`, and nothing while the rule is kept.
fn bites(broken: Broken, sign: &str) {
    let found = (0..SEEDS).find_map(|seed| {
        let finding = run_gc(seed, broken, false).err().filter(|found| found.message.contains(sign))?;
        run_gc(seed, Broken::Nothing, false).is_ok().then_some((seed, finding))
    });
    match found {
        Some((seed, finding)) => println!("{broken:?}: seed {seed}: {}", finding.message),
        None => panic!("no seed below {SEEDS} found {broken:?}"),
    }
}

#[test]
fn a_folder_that_is_asked_before_the_lock_is_found() {
    bites(Broken::AskedBeforeLock, "does not open");
}

#[test]
fn a_clone_beside_the_beginning_of_a_merge_is_found() {
    bites(Broken::CloneBesideMerge, "does not open");
}
