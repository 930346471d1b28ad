//! The simulator proves itself: right toys pass, every planted bug is found, and a seed repeats.

use std::sync::Arc;

use spile_sim::explore::{Finding, Options, Summary, explore, explore_every_step};
use spile_sim::faults::{Choice, Faults, Sabotage};
use spile_sim::plan::Plan;
use spile_sim::toys::{Bug, Toy};

const SIZE: u64 = 2 << 20;
const BLOCK: u64 = 64 << 10;

fn toy(thin: bool, bug: Bug) -> Toy {
    Toy { size_bytes: SIZE, thin, bug }
}

fn run(toy: &Toy, seed: u64, options: &Options) -> Result<Summary, Finding> {
    let mut plan = Plan::draw(seed, SIZE, BLOCK);
    // A toy file grows, as a device cannot; images are the ones to be tried on devices.
    plan.hardware.devices = false;
    explore(toy.clone(), plan, options)
}

/// The first finding within `seeds`, with its seed.
fn hunt(toy: &Toy, seeds: u64, options: &Options) -> Option<(u64, Finding)> {
    (0..seeds).find_map(|seed| run(toy, seed, options).err().map(|finding| (seed, finding)))
}

fn finds_nothing(thin: bool, bug: Bug) {
    if let Some((seed, finding)) = hunt(&toy(thin, bug), 150, &Options::default()) {
        panic!("seed {seed}: {}", finding.message);
    }
}

fn finds(thin: bool, bug: Bug) {
    let found = hunt(&toy(thin, bug), 150, &Options::default());
    assert!(found.is_some(), "{bug:?} was not found");
}

#[test]
fn a_right_raw_toy_passes() {
    finds_nothing(false, Bug::None);
}

#[test]
fn a_right_thin_toy_passes() {
    finds_nothing(true, Bug::None);
}

#[test]
fn an_entry_before_its_data_is_harmless_where_blocks_are_never_used_again() {
    finds_nothing(true, Bug::EntryBeforeData);
}

#[test]
fn an_answer_before_the_write_is_found() {
    finds(false, Bug::AnswersFirst);
}

#[test]
fn a_flush_without_sync_is_found() {
    finds(false, Bug::FlushWithoutSync);
}

#[test]
fn a_fua_write_without_sync_is_found() {
    finds(false, Bug::FuaWithoutSync);
}

#[test]
fn a_table_lost_at_death_is_found() {
    finds(true, Bug::TableInMemory);
}

#[test]
fn stale_bytes_in_a_leaked_block_are_found() {
    finds(true, Bug::ReusesLeakedBlocks);
}

#[test]
fn a_sector_lost_only_among_concurrent_writes_is_found() {
    finds(false, Bug::DropsConcurrent);
}

#[test]
fn a_discard_that_a_restart_forgets_is_found() {
    finds(false, Bug::DiscardInMemory);
}

#[test]
fn every_sabotage_of_the_store_is_found_on_a_right_toy() {
    let data = || -> Choice { Arc::new(|_, touch| touch.range.start >= 4096) };
    let sabotages = [
        Sabotage::SkipSync { every: 2, phase: 1 },
        Sabotage::EarlySync,
        Sabotage::SkipSyncOf { of: data(), unless: Arc::new(|_, _| false) },
        Sabotage::Unsynced(data()),
        Sabotage::Late(data()),
        Sabotage::Lost(Arc::new(|_, touch| touch.range.end <= 4096)),
    ];
    for sabotage in sabotages {
        let name = format!("{sabotage:?}");
        let options = Options { sabotage, ..Options::default() };
        assert!(hunt(&toy(true, Bug::None), 150, &options).is_some(), "{name} was not found");
    }
}

#[test]
fn a_seed_does_the_same_every_time() {
    let right = toy(true, Bug::None);
    let runs: Vec<Summary> = (0..40)
        .map(|seed| {
            let traced = Options { trace: true, ..Options::default() };
            let first = run(&right, seed, &Options::default()).unwrap();
            assert_eq!(first, run(&right, seed, &traced).unwrap());
            first
        })
        .collect();
    let hashes: std::collections::BTreeSet<u64> = runs.iter().map(|run| run.trace_hash).collect();
    assert_eq!(hashes.len(), runs.len());
}

#[test]
fn a_finding_carries_its_trace_when_asked() {
    let broken = toy(false, Bug::FlushWithoutSync);
    let (seed, _) = hunt(&broken, 150, &Options::default()).unwrap();
    let traced = Options { trace: true, ..Options::default() };
    let finding = run(&broken, seed, &traced).unwrap_err();
    assert!(finding.trace.iter().any(|line| line.contains("write-direct")));
}

#[test]
fn a_crash_at_every_step_of_a_short_run_passes() {
    let steps = explore_every_step(&toy(true, Bug::None), &Plan::short(3, SIZE, BLOCK), &Options::default());
    assert!(steps.unwrap_or_else(|finding| panic!("{}", finding.message)) > 40);
}

#[test]
fn a_crash_at_every_step_finds_a_table_lost_at_death() {
    let broken = toy(true, Bug::TableInMemory);
    let found = explore_every_step(&broken, &Plan::short(3, SIZE, BLOCK), &Options::default());
    assert!(found.unwrap_err().message.contains("Death at step"));
}

/// A right toy under these faults, in every life.
fn hunt_with_faults(faults: &Faults) -> Option<Finding> {
    (0..150).find_map(|seed| {
        let mut plan = Plan::draw(seed, SIZE, BLOCK);
        plan.lives.iter_mut().for_each(|life| life.faults = faults.clone());
        explore(toy(false, Bug::None), plan, &Options::default()).err()
    })
}

#[test]
fn honest_faults_break_no_promise() {
    let faults = Faults {
        names_eio: 0,
        read_eio: 100,
        write_eio: 100,
        no_space: 100,
        sync_eio: 500,
        slow: 500,
        space_bytes: Some(SIZE / 2),
        forgetful_sync: false,
    };
    let found = hunt_with_faults(&faults);
    assert!(found.is_none(), "{found:?}");
}

#[test]
fn a_sync_that_fails_once_and_then_lies_is_found() {
    let faults = Faults { sync_eio: 2000, forgetful_sync: true, ..Faults::default() };
    let message = hunt_with_faults(&faults).unwrap().message;
    assert!(message.contains("a flush succeeds after one that failed"), "{message}");
}
