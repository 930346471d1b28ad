//! Backups under load: nothing is found, and a rule that is broken on purpose is.

use crate::found;
use spile_sim::backup::{BackupSummary, Broken, BrokenCopy, run_backup};

const KEPT: Broken = Broken::Copy(BrokenCopy::Nothing);

const SEEDS: u64 = 1000;

#[test]
fn a_hundred_and_fifty_seeds_find_nothing() {
    let mut all = BackupSummary::default();
    for seed in 0..150 {
        all += run_backup(seed, KEPT, false).unwrap_or_else(|finding| panic!("seed {seed}: {}", finding.message));
    }
    println!("{all:?}");
    assert!(all.copied > 200 && all.beside > 5_000, "too little happened: {all:?}");
    assert!(all.increments > 100 && all.crashes > 100, "too little happened: {all:?}");
}

/// A hole of which a part was saved, and the rest was written to before its piece was copied.
#[test]
fn a_seed_that_found_a_hole_read_too_late_finds_nothing() {
    run_backup(584, KEPT, false).unwrap_or_else(|finding| panic!("{}", finding.message));
}

/// A disk that ends inside of a unit: an increment left nothing out at its end, and with it that unit.
#[test]
fn a_seed_that_found_the_last_unit_left_out_finds_nothing() {
    run_backup(2, KEPT, false).unwrap_or_else(|finding| panic!("{}", finding.message));
}

/// A seed, `first` if it still does so, finds the broken rule by a message with `sign`.
fn bites(broken: Broken, first: u64, sign: &str) {
    found::bites(|seed, broken| run_backup(seed, broken, false), (broken, KEPT), (first, 0..SEEDS), sign);
}

#[test]
fn a_unit_that_is_saved_after_the_write_is_found() {
    bites(Broken::Copy(BrokenCopy::SavedLate), 0, "request");
}

#[test]
fn what_was_saved_while_it_was_read_and_is_not_read_again_is_found() {
    bites(Broken::Copy(BrokenCopy::NotReadAgain), 0, "request");
}

#[test]
fn a_fleece_that_is_read_before_it_is_written_is_found() {
    bites(Broken::Copy(BrokenCopy::FleeceTooEarly), 28, "request");
}

#[test]
fn a_checkpoint_that_comes_after_its_backup_is_found() {
    bites(Broken::CheckpointLate, 0, "the digest of");
}

#[test]
fn disks_whose_points_in_time_come_one_after_the_other_are_found() {
    bites(Broken::OneByOne, 2, "lacks request");
}
