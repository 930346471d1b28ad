//! Files that are shorter than their metadata say. The rule: a repair gives up no data unless it is told to, so that an
//! unfinished copy can still be completed.

use std::sync::Arc;

use crate::support::*;
use spile_core::{Disk, ErrorKind};
use spile_image::check::{Lost, Mend, Report, Severity};
use spile_image::formats::vhd;
use spile_image::formats::vhd::codec::footer::DiskType;

const MIB: u64 = 1 << 20;
const BLOCK: u32 = 2 << 20;
const A: &str = "/vm/a.vhd";
const P: &str = "/vm/p.vhd";

/// A dynamic disk of four blocks, the first two written, closed. Block 1 lies behind block 0.
fn sample() -> (World, Arc<MemFile>) {
    let world = World::new();
    let file = world.vhd(A, DiskType::Dynamic, 8 * MIB, BLOCK);
    let disk = world.open(A);
    write(&disk, 0, &pattern(1, BLOCK as usize));
    write(&disk, 2 * MIB, &pattern(2, BLOCK as usize));
    block_on(disk.close()).unwrap();
    (world, file)
}

/// Where the bitmap of a block lies, in bytes.
fn place(file: &MemFile, block: u64) -> u64 {
    u64::from(entry(file, block)) * 512
}

fn check(world: &World) -> spile_core::Result<Report> {
    block_on(vhd::check(&world.files.store(A), &*world.env))
}

fn repair(world: &World, lost: Lost) -> Report {
    block_on(vhd::repair(&world.files.store(A), &*world.env, lost)).unwrap()
}

fn content(file: &MemFile) -> Vec<u8> {
    file.bytes(0, file.len() as usize)
}

/// The only finding that a repair does not mend.
fn cut(report: &Report) -> (Mend, &str) {
    let mut found = report.findings.iter().filter(|found| found.severity == Severity::Corruption);
    let only = found.next().expect("no corruption was found");
    assert!(found.next().is_none(), "{:?}", report.findings);
    (only.mend, &only.message)
}

/// Cuts the sample at each place, and completes the copy after a repair.
fn survives_a_repair(at: impl Fn(&MemFile) -> u64, mend: Mend) {
    let (world, file) = sample();
    let whole = content(&file);
    let len = at(&file);
    file.set_len(len);
    let report = check(&world).unwrap();
    assert_eq!(cut(&report).0, mend, "{:?}", report.findings);
    assert!(cut(&report).1.contains("cut short"), "{}", cut(&report).1);
    assert_eq!(report.missing_bytes, whole.len() as u64 - len);
    assert!(cut(&report).1.contains(&format!("{} bytes", report.missing_bytes)), "{}", cut(&report).1);
    world.refused(A, ErrorKind::Corrupt, "cut short");
    repair(&world, Lost::Keep);
    assert!(content(&file) == whole[..len as usize], "the repair changed the file");
    assert_eq!(check(&world).unwrap().worst(), Some(Severity::Corruption));
    file.patch(len, &whole[len as usize..]);
    assert_eq!(check(&world).unwrap().worst(), None);
    let disk = world.open(A);
    assert!(read(&disk, 0..2 * MIB) == pattern(1, BLOCK as usize));
    assert!(read(&disk, 2 * MIB..4 * MIB) == pattern(2, BLOCK as usize));
}

#[test]
fn an_unfinished_copy_can_be_completed_after_a_repair() {
    survives_a_repair(|file| place(file, 0) + 100, Mend::DiscardLost);
    survives_a_repair(|file| place(file, 0) + 512 + 4096, Mend::DiscardLost);
    survives_a_repair(|file| place(file, 0) + 512 + u64::from(BLOCK), Mend::DiscardLost);
    survives_a_repair(|file| place(file, 1), Mend::DiscardLost);
    survives_a_repair(|file| place(file, 1) + 511, Mend::DiscardLost);
    survives_a_repair(|file| place(file, 1) + 512, Mend::DiscardLost);
    survives_a_repair(|file| place(file, 1) + 512 + 4096, Mend::DiscardLost);
    survives_a_repair(|file| place(file, 1) + 512 + u64::from(BLOCK) - 1, Mend::DiscardLost);
    // In the batmap, and in front of it.
    survives_a_repair(|file| header_of(file).bat_end_bytes() + 512, Mend::No);
    survives_a_repair(|file| header_of(file).bat_end_bytes() + 511, Mend::No);
    survives_a_repair(|file| header_of(file).bat_end_bytes(), Mend::No);
}

#[test]
fn a_file_that_lacks_only_its_footer_has_all_data() {
    for missing in [1, 511, 512] {
        let (world, file) = sample();
        let whole = content(&file);
        file.set_len(file.len() - missing);
        let report = check(&world).unwrap();
        assert_eq!((report.worst(), report.missing_bytes), (Some(Severity::Note), 0), "{:?}", report.findings);
        repair(&world, Lost::Keep);
        assert!(content(&file) == whole, "{missing} bytes missing");
    }
}

#[test]
fn a_file_that_ends_in_its_header_or_bat_says_so() {
    for len in [1000, 1535, 1540] {
        let (world, file) = sample();
        file.set_len(len);
        let error = check(&world).unwrap_err();
        assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains("cut short"), "{error}");
    }
}

#[test]
fn an_empty_image_cut_in_its_metadata_is_not_sound() {
    let world = World::new();
    let file = world.vhd(A, DiskType::Dynamic, 8 * MIB, BLOCK);
    let whole = content(&file);
    file.set_len(header_of(&file).bat_end_bytes() + 512);
    assert_eq!(cut(&check(&world).unwrap()).0, Mend::No);
    assert_eq!(cut(&repair(&world, Lost::Discard)).0, Mend::No);
    file.patch(file.len(), &whole[file.len() as usize..]);
    assert_eq!(check(&world).unwrap().worst(), None);
}

#[test]
fn a_fixed_disk_that_is_cut_short_is_refused() {
    for (len, names) in [(MIB, "cut off"), (MIB / 2, "cut off"), (MIB + 510, "cut off")] {
        let world = World::new();
        let file = world.vhd(A, DiskType::Fixed, MIB, BLOCK);
        file.set_len(len);
        let error = check(&world).unwrap_err();
        assert!(format!("{error} {:?}", error.hint_text()).contains(names), "{error}");
    }
}

/// A footer of 511 bytes, and data right before it, as in a file that Spile did not make.
#[test]
fn a_footer_that_lacks_its_last_byte_takes_none_of_the_data() {
    let (world, file) = sample();
    edit_footer(&file, |footer| footer.creator = *b"vpc ");
    let before = content(&file);
    file.set_len(file.len() - 1);
    assert_eq!(check(&world).unwrap().worst(), Some(Severity::Note));
    repair(&world, Lost::Keep);
    assert!(content(&file) == before);
}

#[test]
fn what_is_missing_is_given_up_only_on_demand() {
    let (world, file) = sample();
    file.set_len(place(&file, 0) + 512 + MIB);
    repair(&world, Lost::Discard);
    let report = check(&world).unwrap();
    assert_eq!((report.worst(), report.allocated_blocks), (None, 1), "{:?}", report.findings);
    let disk = world.open(A);
    assert!(read(&disk, 0..MIB) == pattern(1, BLOCK as usize)[..MIB as usize]);
    assert!(read(&disk, MIB..8 * MIB) == vec![0; 7 << 20]);
}

#[test]
fn a_footer_behind_the_cut_makes_no_difference_to_lost_blocks() {
    let (world, file) = sample();
    let footer = file.bytes(0, 512);
    let end = place(&file, 1);
    file.set_len(end);
    file.patch(end - 512, &footer);
    let before = content(&file);
    let report = repair(&world, Lost::Keep);
    assert_eq!(cut(&report).0, Mend::DiscardLost, "{:?}", report.findings);
    assert!(content(&file) == before);
    // In a block, nobody knows which is right: the block or the footer.
    file.set_len(end + 4096);
    file.patch(end + 4096 - 512, &footer);
    assert_eq!(cut(&repair(&world, Lost::Discard)).0, Mend::No);
}

#[test]
fn a_copy_onto_a_device_that_is_too_small_keeps_its_bat() {
    let (world, file) = sample();
    let device = world.files.add("/dev/a.vhd", DEVICE);
    device.patch(0, &file.bytes(0, place(&file, 1) as usize));
    let before = content(&device);
    let store = world.files.store("/dev/a.vhd");
    let report = block_on(vhd::repair(&store, &*world.env, Lost::Keep)).unwrap();
    assert_eq!(cut(&report).0, Mend::DiscardLost);
    assert!(content(&device) == before);
}

/// As tapdisk leaves a disk when it is killed: the last block ends with the last sector that was written, its bitmap has
/// only what was written, and there is no footer at the end.
fn killed_tapdisk(written_sectors: u64, kept_sectors: u64) -> (World, Arc<MemFile>, u64) {
    let (world, file) = sample();
    let last = place(&file, 1);
    let mut bitmap = vec![0; 512];
    bitmap[..written_sectors as usize / 8].fill(0xff);
    file.patch(last, &bitmap);
    file.patch(header_of(&file).bat_end_bytes() + 24, &[0; 4]);
    file.set_len(last + 512 + kept_sectors * 512);
    (world, file, last)
}

#[test]
fn a_last_block_that_was_never_written_to_its_end_is_extended() {
    let (world, file, last) = killed_tapdisk(64, 64);
    let report = check(&world).unwrap();
    assert_eq!(cut(&report).0, Mend::Repair, "{:?}", report.findings);
    repair(&world, Lost::Keep);
    assert_eq!(check(&world).unwrap().worst(), None);
    assert_eq!(file.len(), last + 512 + u64::from(BLOCK) + 512);
    let disk = world.open(A);
    assert!(read(&disk, 2 * MIB..2 * MIB + 32768) == pattern(2, 32768));
    assert!(read(&disk, 2 * MIB + 32768..4 * MIB) == vec![0; (BLOCK - 32768) as usize]);
}

#[test]
fn a_last_block_that_was_written_behind_the_cut_is_kept() {
    let (world, file, _) = killed_tapdisk(72, 71);
    let before = content(&file);
    assert_eq!(cut(&repair(&world, Lost::Keep)).0, Mend::DiscardLost);
    assert!(content(&file) == before);
}

#[test]
fn a_bit_that_only_the_journal_has_counts_as_data() {
    let world = World::new();
    world.vhd(P, DiskType::Dynamic, 8 * MIB, BLOCK);
    let file = world.child(A, P, 8 * MIB, BLOCK);
    let disk = world.open(A);
    write(&disk, 0, &pattern(1, 4096));
    drop(disk);
    file.set_len(place(&file, 0) + 512 + 2048);
    assert_eq!(cut(&check(&world).unwrap()).0, Mend::DiscardLost);
    // Another boot of the host: the journal is void, and the write was never flushed.
    world.env.reboot();
    assert_eq!(cut(&check(&world).unwrap()).0, Mend::Repair);
}
