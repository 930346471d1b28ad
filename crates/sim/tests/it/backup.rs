//! Backups under load: nothing is found, and a rule that is broken on purpose is.

use spile_sim::backup::{BackupSummary, Broken, BrokenCopy, run_backup};

const KEPT: Broken = Broken::Copy(BrokenCopy::Nothing);

#[test]
fn three_hundred_seeds_find_nothing() {
    let mut all = BackupSummary::default();
    for seed in 0..300 {
        all += run_backup(seed, KEPT, false).unwrap_or_else(|finding| panic!("seed {seed}: {}", finding.message));
    }
    println!("{all:?}");
    assert!(all.copied > 400 && all.beside > 10_000, "too little happened: {all:?}");
    assert!(all.increments > 200 && all.crashes > 200, "too little happened: {all:?}");
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

/// One of so many seeds finds the broken rule by these words, and nothing while the rule is kept.
fn bites(broken: Broken, words: &str) {
    let found = (0..1000).find_map(|seed| {
        let finding = run_backup(seed, broken, false).err().filter(|found| found.message.contains(words))?;
        run_backup(seed, KEPT, false).is_ok().then_some((seed, finding))
    });
    match found {
        Some((seed, finding)) => println!("{broken:?}: seed {seed}: {}", finding.message),
        None => panic!("no seed below 1000 found {broken:?}"),
    }
}

#[test]
fn a_unit_that_is_saved_after_the_write_is_found() {
    bites(Broken::Copy(BrokenCopy::SavedLate), "request");
}

#[test]
fn what_was_saved_while_it_was_read_and_is_not_read_again_is_found() {
    bites(Broken::Copy(BrokenCopy::NotReadAgain), "request");
}

#[test]
fn a_checkpoint_that_comes_after_its_backup_is_found() {
    bites(Broken::CheckpointLate, "the digest of");
}

#[test]
fn disks_whose_points_in_time_come_one_after_the_other_are_found() {
    bites(Broken::OneByOne, "lacks request");
}
