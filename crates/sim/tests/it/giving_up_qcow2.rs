//! A qcow2 child gives up what it has, gets another parent or none, and grows, in a host that ends at any step, as [`crate::giving_up`] does it
//! with VHDs. Each rule of the order of writes is broken on purpose, and must be found.

use std::sync::Arc;

use spile_image::Format;
use spile_sim::faults::{Choice, Sabotage};

use crate::giving_up::{self, BLOCK, CONTENT, Done, Host, bites, finds_nothing};

/// The first sector of the image.
fn first_sector() -> Choice {
    Arc::new(|_, touch| touch.range.start == 0 && touch.bytes.starts_with(b"QFI\xfb"))
}

/// Size, and length and place of the L1 table.
fn sizes() -> Choice {
    Arc::new(|_, touch| touch.range.start == 24)
}

/// A name in the first cluster, behind the first sector.
fn names() -> Choice {
    Arc::new(|_, touch| touch.range.start >= 112 && touch.range.start < 4096 && touch.bytes.ends_with(b".qcow2"))
}

/// An entry of a cluster that is cleared.
fn clears() -> Choice {
    Arc::new(|view, touch| {
        let mut magic = [0; 4];
        view.read(0, &mut magic);
        &magic == b"QFI\xfb" && matches!(touch.bytes.len(), 8 | 16) && touch.bytes.iter().all(|byte| *byte == 0)
    })
}

fn give_up(seed: u64, sabotage: Sabotage) -> Done {
    giving_up::give_up_of(&Host::new(seed, Format::Qcow2, BLOCK as u32), seed, sabotage)
}

fn change_parents(seed: u64, sabotage: Sabotage) -> Done {
    giving_up::change_parents_of(&Host::new(seed, Format::Qcow2, BLOCK as u32), seed, sabotage)
}

/// Clusters of 512 bytes have the L1 table move.
fn grow(seed: u64, sabotage: Sabotage) -> Done {
    let cluster_bytes = if seed.is_multiple_of(3) { BLOCK as u32 } else { 512 };
    giving_up::grow_of(&Host::new(seed, Format::Qcow2, cluster_bytes), seed, sabotage)
}

#[test]
fn what_a_qcow2_gives_up_at_any_step_reads_right() {
    finds_nothing(give_up);
}

#[test]
fn a_parent_of_a_qcow2_that_changes_at_any_step_is_one_of_the_two() {
    finds_nothing(change_parents);
}

#[test]
fn a_qcow2_that_grows_at_any_step_has_one_of_the_two_sizes() {
    finds_nothing(grow);
}

#[test]
fn a_cluster_is_given_up_before_the_answer() {
    bites(give_up, "the entry is cleared after the answer", CONTENT, Sabotage::Late(clears()));
}

#[test]
fn a_flush_covers_clusters_that_were_given_up() {
    bites(give_up, "a cluster comes back behind a flush", CONTENT, Sabotage::Unsynced(clears()));
}

#[test]
fn a_name_is_durable_before_the_first_sector_says_where_it_is() {
    bites(change_parents, "the name is not synced", "", Sabotage::Unsynced(names()));
}

#[test]
fn the_first_sector_is_durable_before_the_answer() {
    bites(change_parents, "the first sector is not synced", "the leaf names", Sabotage::Unsynced(first_sector()));
    bites(
        change_parents,
        "the first sector is written after the answer",
        "the leaf names",
        Sabotage::Late(first_sector()),
    );
}

#[test]
fn the_new_size_of_a_qcow2_is_durable_before_it_is_told() {
    bites(grow, "the size is not synced", "the leaf has", Sabotage::Unsynced(sizes()));
}
