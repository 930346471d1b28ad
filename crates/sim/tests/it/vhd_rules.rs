//! The simulator bites: for each rule in the head of `spile_image::formats::vhd`, the store breaks that rule for one kind of
//! write on purpose, and some seed must find it, a seed that finds nothing while the store is honest.

use std::sync::Arc;

use spile_core::Via;
use spile_sim::explore::{Finding, Options, Summary, explore};
use spile_sim::faults::{Choice, How, Sabotage, Touch};
use spile_sim::image::{Image, Kind, LayerPlan};
use spile_sim::past::Past;
use spile_sim::plan::{Life, Plan, Weights};
use spile_sim::qcow2::Form;
use spile_sim::regions::{Part, empties_batmap, part_of};
use spile_sim::seeds::{Mode, run_seed};

const SEEDS: u64 = 600;

fn part(wanted: Part) -> Choice {
    Arc::new(move |view, touch| part_of(view, touch) == Some(wanted))
}

fn part_where(wanted: Part, also: fn(&Touch) -> bool) -> Choice {
    Arc::new(move |view, touch| also(touch) && part_of(view, touch) == Some(wanted))
}

/// Wrong content, as the oracle words it.
const CONTENT: &str = " reads ";

type Run = Result<Summary, Finding>;

/// As the seed draws it.
fn drawn(kind: Kind) -> impl Fn(u64, &Options) -> Run {
    move |seed, options| run_seed(seed, Some(kind), Mode::Random, options)
}

/// As the seed draws it, on block devices.
fn on_devices(seed: u64, options: &Options) -> Run {
    let image = Image::draw(seed, Some(Kind::Chain));
    let mut plan = Plan::draw(seed, image.leaf().size_bytes, image.leaf().block_bytes.into());
    plan.hardware.devices = true;
    explore(image, plan, options)
}

/// A child with blocks of 4 KiB, so that whole blocks are written, released and used again all the time, and lives
/// that end in order, so that a batmap is there.
fn small_blocks(seed: u64, options: &Options) -> Run {
    let layer = |kind, size_bytes| LayerPlan { kind, size_bytes, block_bytes: 4096, form: Form::default() };
    let layers = vec![layer(Kind::Dynamic, 4096), layer(Kind::Chain, 64 << 10)];
    let image = Image { layers, aligned: false, cache_bytes: 1 << 20, past: Past::default() };
    let mut plan = Plan::draw(seed, 64 << 10, 4096);
    plan.weights = Weights { write: 40, fua: 0, read: 10, flush: 10, discard: 40, zeroes: 0, extents: 0 };
    (plan.places.max_write, plan.places.max_discard) = (8, 24);
    plan.lives.truncate(3);
    let orderly = Life { crash_at: None, requests: 60, ..plan.lives[0].clone() };
    plan.lives.insert(0, orderly);
    explore(image, plan, options)
}

/// A seed below [`SEEDS`] finds the broken rule by a message with `sign`, and finds nothing while the rule is kept.
fn bites(run: impl Fn(u64, &Options) -> Run, rule: &str, sign: &str, sabotage: Sabotage) {
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

fn is_cached(touch: &Touch) -> bool {
    touch.how == How::Write(Via::Cached)
}

fn releases(touch: &Touch) -> bool {
    is_cached(touch) && touch.bytes == [0xff; 4]
}

fn places(touch: &Touch) -> bool {
    is_cached(touch) && touch.bytes.len() == 4 && touch.bytes != [0xff; 4]
}

#[test]
fn rule_1_space_before_use() {
    bites(drawn(Kind::Dynamic), "the new length is not synced", "past the end", Sabotage::Unsynced(part(Part::Length)));
}

#[test]
fn rule_1_on_a_device_the_place_of_a_block_is_emptied() {
    let emptied: Choice = Arc::new(|view, touch| {
        let zeroes = touch.bytes.iter().all(|byte| *byte == 0);
        zeroes && matches!(part_of(view, touch), Some(Part::Block | Part::Bitmap))
    });
    bites(on_devices, "a new block shows what the device held", CONTENT, Sabotage::Lost(emptied.clone()));
    bites(on_devices, "the emptying of a place is not synced", CONTENT, Sabotage::Unsynced(emptied));
}

#[test]
fn rule_2_the_entry_before_the_answer() {
    let sabotage = Sabotage::Late(part_where(Part::Bat, places));
    bites(drawn(Kind::Dynamic), "a block's entry is written after the answer", CONTENT, sabotage);
}

#[test]
fn rule_2_the_bitmap_before_the_entry() {
    bites(
        drawn(Kind::Dynamic),
        "a new block's bitmap is written after its entry",
        CONTENT,
        Sabotage::Late(part(Part::Bitmap)),
    );
}

#[test]
fn rule_3_the_record_before_the_answer() {
    bites(drawn(Kind::Chain), "a record is written after the answer", CONTENT, Sabotage::Late(part(Part::Journal)));
}

#[test]
fn rule_3_the_data_before_the_record() {
    bites(drawn(Kind::Chain), "the data are written after their record", CONTENT, Sabotage::Late(part(Part::Data)));
}

#[test]
fn rule_3_a_sync_of_the_data_before_their_bitmap() {
    let sabotage = Sabotage::SkipSyncOf { of: part(Part::Data), unless: part(Part::Bitmap) };
    bites(drawn(Kind::Chain), "the bitmap is written without a sync of the data", CONTENT, sabotage);
}

#[test]
fn rule_4_a_sync_behind_the_bitmaps() {
    let sabotage = Sabotage::Unsynced(part(Part::Bitmap));
    bites(drawn(Kind::Chain), "a flush answers without a sync of the bitmaps", CONTENT, sabotage);
}

#[test]
fn rule_4_the_bitmaps_before_the_record_goes() {
    let sabotage = Sabotage::Late(part(Part::Bitmap));
    bites(drawn(Kind::Chain), "records are dropped before the bitmaps are written", CONTENT, sabotage);
}

#[test]
fn rule_5_a_sync_between_release_and_reuse() {
    let sabotage = Sabotage::Unsynced(part_where(Part::Bat, releases));
    bites(drawn(Kind::Dynamic), "a block is used again before its release is durable", CONTENT, sabotage);
}

#[test]
fn rule_5_a_released_block_is_emptied() {
    bites(
        drawn(Kind::Chain),
        "a released block keeps its bytes and bitmap",
        CONTENT,
        Sabotage::Lost(part(Part::Block)),
    );
}

#[test]
fn rule_5_a_sync_between_emptying_and_reuse() {
    let sabotage = Sabotage::Unsynced(part(Part::Block));
    bites(drawn(Kind::Chain), "a block is used again before its emptying is durable", CONTENT, sabotage);
}

#[test]
fn rule_6_the_footer_at_the_end() {
    let sabotage = Sabotage::Lost(part(Part::TrailingFooter));
    bites(drawn(Kind::Dynamic), "the close writes no footer", "without a footer", sabotage);
}

#[test]
fn rule_6_a_sync_behind_the_footer() {
    let sabotage = Sabotage::Unsynced(part(Part::TrailingFooter));
    bites(drawn(Kind::Dynamic), "the close does not sync its footer", "without a footer", sabotage);
}

#[test]
fn the_batmap_is_void_before_a_release() {
    bites(small_blocks, "the batmap stays valid", "batmap calls", Sabotage::Lost(Arc::new(empties_batmap)));
}

#[test]
fn the_void_batmap_is_synced_before_a_release() {
    let sabotage = Sabotage::Unsynced(Arc::new(empties_batmap));
    bites(small_blocks, "the void batmap is not synced", "batmap calls", sabotage);
}

#[test]
fn the_parents_are_durable_before_their_child_takes_writes() {
    bites(drawn(Kind::Chain), "a killed parent is not synced", CONTENT, Sabotage::ReadersSync);
}
