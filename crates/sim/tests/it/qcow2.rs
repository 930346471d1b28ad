//! qcow2 under the simulator: seeds that find nothing, a crash at every step, and each rule of the order of writes (the head of
//! `formats/qcow2/write.rs` in `spile-image`) broken on purpose by the store, which some seed must find.

use std::sync::Arc;

use spile_core::Via;
use spile_sim::explore::{Finding, Options, Summary, explore};
use spile_sim::faults::{Choice, How, Sabotage, Touch};
use spile_sim::image::{Image, Kind};
use spile_sim::oracle::Crash;
use spile_sim::pages::Pages;
use spile_sim::past::Past;
use spile_sim::plan::{Life, Plan, Weights};
use spile_sim::rng::Rng;
use spile_sim::seeds::{Mode, report, run_seeds};

const SEEDS: u64 = 300;
/// Wrong content, as the oracle words it.
const CONTENT: &str = " reads ";

fn finds_nothing(kind: Kind, seeds: std::ops::Range<u64>, mode: Mode) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let totals = run_seeds(seeds, Some(kind), mode, &Options::default(), threads, 5);
    assert!(totals.findings.is_empty(), "\n{}", report(&totals.findings, Some(kind), mode));
    assert!(totals.crashes > 0, "{totals:?}");
}

#[test]
fn seeds_of_images_find_nothing() {
    finds_nothing(Kind::Qcow2, 0..300, Mode::Random);
}

#[test]
fn seeds_of_chains_find_nothing() {
    finds_nothing(Kind::Qcow2Chain, 0..300, Mode::Random);
}

/// Each image gets compressed clusters and an internal snapshot after its first life, which the lives after copy out and count down.
fn aged(kind: Kind) -> impl Fn(u64, &Options) -> Result<Summary, Finding> {
    move |seed, options| {
        let mut image = Image::draw(seed, Some(kind));
        image.past = Past::full();
        let mut plan = Plan::draw(seed, image.leaf().size_bytes, image.leaf().block_bytes.into());
        plan.hardware.devices = false;
        explore(image, plan, options)
    }
}

/// Long lives of many clients, who read while others discard, flush and write anew. No buffer is between them and the image.
fn reading(is_aged: bool) -> impl Fn(u64, &Options) -> Result<Summary, Finding> {
    move |seed, options| {
        let mut image = Image::draw(seed, Some(Kind::Qcow2));
        image.past = if is_aged { Past::full() } else { Past::default() };
        image.aligned = false;
        let mut plan = Plan::draw(seed, image.leaf().size_bytes, image.leaf().block_bytes.into());
        plan.hardware.devices = false;
        plan.weights = Weights { write: 35, fua: 0, read: 20, flush: 15, discard: 25, zeroes: 0, extents: 0 };
        plan.lives = vec![Life::quiet(30, 2), Life::quiet(600, 6)];
        explore(image, plan, options)
    }
}

#[test]
fn seeds_of_images_with_a_past_find_nothing() {
    for kind in [Kind::Qcow2, Kind::Qcow2Chain] {
        for seed in 0..200 {
            let done = aged(kind)(seed, &Options::default());
            done.unwrap_or_else(|finding| panic!("seed {seed} of {}: {}", kind.name(), finding.message));
        }
    }
}

#[test]
fn a_crash_at_every_step_finds_nothing() {
    finds_nothing(Kind::Qcow2, 0..2, Mode::EveryStep);
    finds_nothing(Kind::Qcow2Chain, 0..1, Mode::EveryStep);
}

/// An image as the seed draws it, on files, with many discards and zeroes at the same places.
fn busy(kind: Kind) -> impl Fn(u64, &Options) -> Result<Summary, Finding> {
    move |seed, options| {
        let image = Image::draw(seed, Some(kind));
        let mut plan = Plan::draw(seed, image.leaf().size_bytes, image.leaf().block_bytes.into());
        plan.hardware.devices = false;
        plan.weights = Weights { write: 40, fua: 2, read: 10, flush: 10, discard: 20, zeroes: 20, extents: 0 };
        explore(image, plan, options)
    }
}

/// Lives that are cut off soon after their first writes, with no flush between: what a life syncs before it writes is all that is durable.
fn cut_short(seed: u64, options: &Options) -> Result<Summary, Finding> {
    let image = Image::draw(seed, Some(Kind::Qcow2));
    let mut plan = Plan::draw(seed, image.leaf().size_bytes, image.leaf().block_bytes.into());
    plan.hardware.devices = false;
    plan.weights = Weights { write: 40, fua: 0, read: 10, flush: 0, discard: 0, zeroes: 0, extents: 0 };
    let mut rng = Rng::new(seed).split(90);
    plan.lives = (0..6).map(|_| cut_life(&mut rng)).collect();
    explore(image, plan, options)
}

fn cut_life(rng: &mut Rng) -> Life {
    Life { crash_at: Some(rng.between(20, 200)), crash: Crash::PowerCut, ..Life::quiet(100, 8) }
}

/// A seed finds the broken rule by a message with `sign`, and finds nothing while the rule is kept.
fn bites(kind: Kind, rule: &str, sign: &str, sabotage: Sabotage) {
    bites_in(busy(kind), rule, sign, sabotage);
}

fn bites_in(run: impl Fn(u64, &Options) -> Result<Summary, Finding>, rule: &str, sign: &str, sabotage: Sabotage) {
    let broken = Options { sabotage, ..Options::default() };
    let found = (0..SEEDS).find_map(|seed| {
        let finding = run(seed, &broken).err().filter(|found| found.message.contains(sign))?;
        run(seed, &Options::default()).is_ok().then_some((seed, finding))
    });
    match found {
        Some((seed, finding)) => println!("{rule}: seed {seed}: {}", finding.message),
        None => panic!("no seed below {SEEDS} found: {rule}"),
    }
}

/// The write of an L1 or L2 entry, and no header field or count.
fn is_entry(touch: &Touch) -> bool {
    touch.how == How::Write(Via::Cached) && touch.range.start >= 512 && matches!(touch.bytes.len(), 8 | 16) && {
        let word = touch.bytes[..8].iter().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
        word == 0 || word >> 63 == 1 || word == 1
    }
}

fn entries(wanted: fn(&Touch) -> bool) -> Choice {
    Arc::new(move |_, touch| is_entry(touch) && wanted(touch))
}

/// The write of refcounts, in a block that the refcount table names.
fn counts() -> Choice {
    Arc::new(|view, touch| {
        let word = |at| {
            let mut bytes = [0; 8];
            view.read(at, &mut bytes);
            u64::from_be_bytes(bytes)
        };
        let (table, cluster) = (word(48), 1 << (word(16) & 0xff));
        let blocks = (0..cluster / 8).map(|entry| word(table + entry * 8)).take_while(|block| *block != 0);
        let mut ranges = blocks.map(|block| block..block + cluster);
        touch.how == How::Write(Via::Cached) && ranges.any(|range| range.contains(&touch.range.start))
    })
}

#[test]
fn case_35_a_cluster_is_counted_durably_before_it_is_used() {
    let sabotage = Sabotage::Unsynced(counts());
    bites_in(cut_short, "clusters are used before their counts are durable", "but the refcount is 0", sabotage);
}

#[test]
fn case_50_a_hole_is_punched_before_the_cluster_is_used_again() {
    let sabotage = Sabotage::Late(Arc::new(|_, touch| touch.how == How::Zero));
    bites(Kind::Qcow2, "a hole is punched after the cluster got new data", CONTENT, sabotage);
}

#[test]
fn an_entry_is_written_before_the_answer() {
    let sabotage = Sabotage::Late(entries(|touch| touch.bytes[0] & 0x80 != 0));
    bites(Kind::Qcow2, "an entry is written after the answer", CONTENT, sabotage);
}

#[test]
fn case_49_and_50_a_cluster_is_used_again_only_when_its_release_is_durable() {
    let sabotage = Sabotage::Unsynced(entries(|touch| touch.bytes[0] & 0x80 == 0));
    bites(Kind::Qcow2, "clusters are used again before nothing points at them durably", CONTENT, sabotage);
}

#[test]
fn case_50_a_cluster_that_is_given_up_waits_for_its_last_reader() {
    bites_in(reading(false), "clusters are used again under their readers", CONTENT, Sabotage::SlowReaders);
    bites_in(reading(true), "shared clusters are used again under their readers", CONTENT, Sabotage::SlowReaders);
}

#[test]
fn case_50_a_cluster_that_is_used_again_is_zero() {
    let sabotage = Sabotage::Lost(Arc::new(|_, touch| touch.how == How::Zero));
    bites(Kind::Qcow2, "clusters are used again with their old bytes", CONTENT, sabotage);
}

#[test]
fn case_51_a_zero_flag_hides_the_parent() {
    let sabotage = Sabotage::Lost(entries(|touch| touch.bytes[7] & 1 == 1));
    bites(Kind::Qcow2Chain, "zero flags are lost", CONTENT, sabotage);
}

#[test]
fn case_52_data_are_durable_before_the_entry_that_shows_them() {
    let data: Choice = Arc::new(|_, touch| matches!(touch.how, How::Write(_)) && touch.bytes.len() >= 512);
    let entry: Choice = entries(|_| true);
    let sabotage = Sabotage::SkipSyncOf { of: data, unless: entry };
    bites(Kind::Qcow2Chain, "an entry is written without a sync of the data before", CONTENT, sabotage);
}

/// True for the data file: the image has its magic at its start, and no guest writes that.
fn is_data_file(view: &Pages) -> bool {
    let mut magic = [0; 4];
    view.read(0, &mut magic);
    &magic != b"QFI\xfb"
}

/// Lives that are cut off by a power cut, with no flush between: whatever is shown then was shown before, or was written.
fn never_flushed(kind: Kind) -> impl Fn(u64, &Options) -> Result<Summary, Finding> {
    move |seed, options| {
        let image = Image::draw(seed, Some(kind));
        let mut plan = Plan::draw(seed, image.leaf().size_bytes, image.leaf().block_bytes.into());
        plan.hardware.devices = false;
        plan.weights = Weights { write: 40, fua: 0, read: 10, flush: 0, discard: 5, zeroes: 5, extents: 0 };
        let mut rng = Rng::new(seed).split(91);
        plan.lives = (0..6).map(|_| cut_life(&mut rng)).collect();
        explore(image, plan, options)
    }
}

#[test]
fn seeds_of_images_with_data_files_find_nothing() {
    finds_nothing(Kind::Qcow2Data, 0..200, Mode::Random);
    finds_nothing(Kind::Qcow2Raw, 0..200, Mode::Random);
    finds_nothing(Kind::Qcow2RawStale, 0..100, Mode::Random);
}

#[test]
fn seeds_of_chains_with_data_files_find_nothing() {
    finds_nothing(Kind::Qcow2DataChain, 0..200, Mode::Random);
}

#[test]
fn a_crash_at_every_step_of_images_with_data_files_finds_nothing() {
    for kind in [Kind::Qcow2Data, Kind::Qcow2Raw] {
        // Each of the many runs makes the data file anew: a small one.
        let is_small = |seed: &u64| Image::draw(*seed, Some(kind)).leaf().size_bytes <= 256 << 10;
        let seed = (0..).find(is_small).unwrap();
        finds_nothing(kind, seed..seed + 1, Mode::EveryStep);
    }
}

#[test]
fn what_a_data_file_holds_is_durable_before_an_entry_shows_it() {
    let data: Choice = Arc::new(|view, touch| is_data_file(view) && matches!(touch.how, How::Write(_) | How::Zero));
    let sabotage = Sabotage::SkipSyncOf { of: data, unless: Arc::new(|_, _| false) };
    bites_in(
        never_flushed(Kind::Qcow2Data),
        "an entry shows the data file before its bytes are durable",
        CONTENT,
        sabotage,
    );
}

#[test]
fn what_was_in_a_data_file_before_is_not_shown() {
    let sabotage = Sabotage::Lost(Arc::new(|view, touch| is_data_file(view) && touch.how == How::Zero));
    bites(Kind::Qcow2Data, "the rest of a cluster keeps its old bytes", CONTENT, sabotage);
}

#[test]
fn what_is_copied_around_a_write_is_there_before_the_data_file_is_shown() {
    // Of a write that copies, what comes from the parents is written behind the guest's bytes.
    let sabotage = Sabotage::Late(Arc::new(|view, touch| is_data_file(view) && matches!(touch.how, How::Write(_))));
    bites(Kind::Qcow2DataChain, "an entry shows the data file before it is written", CONTENT, sabotage);
}

#[test]
fn a_flush_syncs_the_data_file() {
    let data: Choice = Arc::new(|view, touch| is_data_file(view) && matches!(touch.how, How::Write(_)));
    for kind in [Kind::Qcow2Data, Kind::Qcow2Raw] {
        let sabotage = Sabotage::SkipSyncOf { of: data.clone(), unless: Arc::new(|_, _| false) };
        bites(kind, "a flush syncs the image only", CONTENT, sabotage);
    }
}

#[test]
fn a_flush_syncs_the_image_of_a_data_file() {
    let sabotage = Sabotage::SkipSyncOf { of: entries(|_| true), unless: Arc::new(|_, _| false) };
    bites(Kind::Qcow2Data, "a flush syncs the data file only", CONTENT, sabotage);
}

#[test]
fn an_entry_shows_a_raw_data_file_durably_before_it_is_written() {
    let sabotage = Sabotage::Unsynced(entries(|_| true));
    let sign = "the raw data file is not what the disk shows";
    bites_in(never_flushed(Kind::Qcow2Raw), "a raw data file is written before its entry is durable", sign, sabotage);
}

#[test]
fn a_discard_reaches_a_raw_data_file() {
    let sabotage = Sabotage::Lost(Arc::new(|view, touch| is_data_file(view) && touch.how == How::Zero));
    bites(Kind::Qcow2Raw, "zeroes do not reach the raw data file", CONTENT, sabotage);
}

#[test]
fn what_a_raw_data_file_has_hidden_is_made_zero() {
    let sabotage = Sabotage::Lost(Arc::new(|view, touch| is_data_file(view) && touch.how == How::Zero));
    bites(Kind::Qcow2RawStale, "a raw data file keeps what no entry has shown", CONTENT, sabotage);
}

#[test]
fn what_a_raw_data_file_has_hidden_is_zero_durably_before_an_entry_shows_it() {
    let zeroes: Choice = Arc::new(|view, touch| is_data_file(view) && touch.how == How::Zero);
    let sabotage = Sabotage::SkipSyncOf { of: zeroes, unless: Arc::new(|_, _| false) };
    let rule = "an entry shows a raw data file before its zeroes are durable";
    bites_in(never_flushed(Kind::Qcow2RawStale), rule, CONTENT, sabotage);
}
