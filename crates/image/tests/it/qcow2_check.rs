//! The check of qcow2 images: what it finds, and what an image with one thing wrong looks like to it.

use crate::qcow2_image::{COPIED, Image};
use crate::support::{FILE, World, block_on};
use spile_core::ErrorKind;
use spile_image::Format;
use spile_image::check::{Report, Severity};

const PATH: &str = "/d/a.qcow2";
const CLUSTER: u64 = 65536;

fn check_bytes(bytes: &[u8]) -> Report {
    let world = World::new();
    world.raw(PATH, bytes);
    let report = block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap();
    // A check reads: not a byte may differ afterwards.
    assert_eq!(world.files.file(PATH).bytes(0, bytes.len()), bytes);
    report
}

fn check(change: impl FnOnce(&mut Image)) -> Report {
    let mut image = Image::usual();
    image.data(0, 1);
    image.data(1, 2);
    change(&mut image);
    check_bytes(&image.finish())
}

/// Exactly these findings: severity, offset, a part of the message.
#[track_caller]
fn finds(report: &Report, expected: &[(Severity, u64, &str)]) {
    let told: Vec<_> = report.findings.iter().map(|f| (f.severity, f.offset_bytes.unwrap_or(0), &f.message)).collect();
    let fits = |(one, two): (&(Severity, u64, &String), &(Severity, u64, &str))| {
        (one.0, one.1) == (two.0, two.1) && one.2.contains(two.2)
    };
    assert!(told.len() == expected.len() && told.iter().zip(expected).all(fits), "{told:#?}");
}

const CORRUPTION: Severity = Severity::Corruption;
const L2: u64 = 4 * CLUSTER;

#[test]
fn a_sound_image_has_nothing_to_tell() {
    let report = check(|_| ());
    finds(&report, &[]);
    assert_eq!((report.total_blocks, report.allocated_blocks, report.leaked_bytes), (16, 2, 0));
}

#[test]
fn every_kind_of_reference_is_counted() {
    let report = check(|image| {
        // Besides these, a snapshot that shares all of it, and a bitmap.
        let (at, zero) = image.two_streams_and_a_zero_cluster();
        image.set_l2(5, 1);
        let l1 = image.append(&L2.to_be_bytes());
        image.put64(3 * CLUSTER, L2);
        let mut entry = l1.to_be_bytes().to_vec();
        entry.extend([0, 0, 0, 1, 0, 1, 0, 1]);
        entry.extend([&[0; 20][..], &[0, 0, 0, 16], &[0; 16], b"1a"].concat());
        let table = image.append(&entry);
        image.put32(60, 1);
        image.put64(64, table);
        for index in [0, 1] {
            let at = image.get64(image.l2_at(index)) & !COPIED;
            image.set_l2(index, at);
            image.counts.push((at / CLUSTER, 2));
        }
        image.counts.extend([(4, 2), (at / CLUSTER, 4), (zero / CLUSTER, 2)]);
        let bits = image.append(&[1]);
        let map = image.append(&bits.to_be_bytes());
        let mut entry = map.to_be_bytes().to_vec();
        entry.extend([0, 0, 0, 1, 0, 0, 0, 2, 1, 16, 0, 3, 0, 0, 0, 0]);
        entry.extend(b"map\0\0\0\0\0");
        let directory = image.append(&entry);
        image.extension(
            0x2385_2875,
            &[&[0, 0, 0, 1, 0, 0, 0, 0][..], &32u64.to_be_bytes(), &directory.to_be_bytes()].concat(),
        );
    });
    finds(&report, &[]);
    assert_eq!(report.allocated_blocks, 5);
}

#[test]
fn case_10_all_refcount_widths_are_counted() {
    for order in 0..7u32 {
        let mut image = Image::usual();
        image.data(0, 1);
        image.put32(96, order);
        let mut bytes = image.finish();
        let block = 2 * CLUSTER as usize;
        bytes[block..block + 512].fill(0);
        for cluster in 0..6u64 {
            assert!(spile_image::formats::qcow2::codec::refcount::set(
                &mut bytes[block..block + 512],
                order,
                cluster,
                1
            ));
        }
        finds(&check_bytes(&bytes), &[]);
        // A count too many: a leak; one too few: corruption.
        assert!(spile_image::formats::qcow2::codec::refcount::set(&mut bytes[block..block + 512], order, 5, 0));
        let report = check_bytes(&bytes);
        finds(&report, &[(CORRUPTION, L2, "COPIED set"), (CORRUPTION, 5 * CLUSTER, "refcount 0, but 1")]);
    }
}

#[test]
fn case_07_a_refcount_table_that_cannot_be() {
    let report = check(|image| image.put32(56, 0));
    assert!(report.findings[0].message.contains("refcount table") && report.worst() == Some(CORRUPTION));
    let report = check(|image| image.put64(48, 99 * CLUSTER));
    assert!(report.findings[0].message.contains("past the end"));
}

#[test]
fn case_14_and_15_corrupt_and_dirty_marks_are_told() {
    finds(&check(|image| image.incompatible(1)), &[(Severity::Note, 0, "dirty")]);
    finds(&check(|image| image.incompatible(2)), &[(CORRUPTION, 0, "marked corrupt")]);
}

#[test]
fn case_24_and_26_clusters_with_two_kinds_of_users() {
    let report = check(|image| image.set_l2(3, 3 * CLUSTER));
    finds(
        &report,
        &[
            (CORRUPTION, 3 * CLUSTER, "guest data overlaps the image's own metadata"),
            (Severity::Leak, L2 + 24, "COPIED clear"),
            (CORRUPTION, 3 * CLUSTER, "refcount 1, but 2 references"),
        ],
    );
    let report = check(|image| image.set_l2(3, L2 | COPIED));
    assert!(report.findings.iter().any(|f| f.message == "guest data overlaps an L2 table"));
    let report = check(|image| image.put64(3 * CLUSTER, (3 * CLUSTER) | COPIED));
    assert!(report.findings.iter().any(|f| f.message == "an L2 table overlaps the image's own metadata"));
}

#[test]
fn case_25_two_entries_with_copied_for_one_cluster() {
    let report = check(|image| image.set_l2(9, (5 * CLUSTER) | COPIED));
    finds(&report, &[(CORRUPTION, 5 * CLUSTER, "refcount 1, but 2 references")]);
    let report = check(|image| {
        image.set_l2(9, (5 * CLUSTER) | COPIED);
        image.counts.push((5, 2));
    });
    let copied = |at| (CORRUPTION, at, "COPIED set, but the refcount is 2");
    finds(&report, &[copied(L2), copied(L2 + 72)]);
}

#[test]
fn copied_that_is_clear_without_need_costs_a_copy_and_harms_nobody() {
    let report = check(|image| {
        image.set_l2(0, image.get64(image.l2_at(0)) & !COPIED);
        image.put64(image.l1_at(), 4 * CLUSTER);
    });
    let clear = |at| (Severity::Leak, at, "COPIED clear, but the refcount is 1");
    finds(&report, &[clear(3 * CLUSTER), clear(L2)]);
}

#[test]
fn case_27_entries_past_the_end() {
    finds(&check(|image| image.set_l2(3, (99 * CLUSTER) | COPIED)), &[(CORRUPTION, L2 + 24, "past the end")]);
    let report = check(|image| image.put64(3 * CLUSTER, (99 * CLUSTER) | COPIED));
    assert!(report.findings[0].message.contains("L1 entry") && report.findings[0].message.contains("past the end"));
    // A last cluster that is cut short is no fault.
    let mut image = Image::usual();
    image.data(0, 1);
    let mut bytes = image.finish();
    bytes.truncate(bytes.len() - 1000);
    finds(&check_bytes(&bytes), &[]);
}

#[test]
fn case_28_29_and_31_entries_that_cannot_be_followed() {
    finds(&check(|image| image.set_l2(3, 5 * CLUSTER + 512)), &[(CORRUPTION, L2 + 24, "multiple of the cluster")]);
    finds(&check(|image| image.set_l2(3, 1 << 58)), &[(CORRUPTION, L2 + 24, "reserved")]);
    let report = check(|image| {
        image.put32(4, 2);
        image.put(72, &[0; 40]);
        image.set_l2(3, 1);
    });
    finds(&report, &[(CORRUPTION, L2 + 24, "zero flag")]);
}

#[test]
fn case_34_refcount_blocks_past_the_end_or_shared() {
    let report = check(|image| image.put64(CLUSTER + 8, 99 * CLUSTER));
    finds(&report, &[(CORRUPTION, 99 * CLUSTER, "refcount block lies past the end")]);
    let report = check(|image| image.put64(CLUSTER + 8, 2 * CLUSTER));
    assert!(report.findings.iter().any(|f| f.message.contains("metadata overlaps the image's own metadata")));
    let report = check(|image| image.put64(CLUSTER + 8, CLUSTER));
    assert_eq!(report.worst(), Some(CORRUPTION));
    let report = check(|image| image.put64(CLUSTER + 8, 77));
    assert_eq!(report.worst(), Some(CORRUPTION));
}

#[test]
fn case_35_a_count_of_0_for_a_cluster_in_use() {
    let report = check(|image| image.counts.push((6, 0)));
    finds(&report, &[(CORRUPTION, L2 + 8, "COPIED set"), (CORRUPTION, 6 * CLUSTER, "refcount 0, but 1")]);
}

#[test]
fn case_36_leaked_clusters() {
    let report = check(|image| {
        image.append(&[1; 3 * CLUSTER as usize]);
    });
    finds(&report, &[(Severity::Leak, 7 * CLUSTER, "3 clusters in a row have refcount 1, but 0 references")]);
    assert_eq!(report.leaked_bytes, 3 * CLUSTER);
}

#[test]
fn case_46_and_48_damaged_lists_are_told() {
    let report = check(|image| {
        image.put32(60, 1);
        image.put64(64, 99 * CLUSTER);
    });
    finds(&report, &[(CORRUPTION, 0, "snapshots only 0 can be read")]);
}

#[test]
fn a_large_sparse_file_costs_little_memory_and_several_walks() {
    let mut image = Image::usual();
    image.data(0, 1);
    let bytes = image.finish();
    let world = World::new();
    let file = world.files.add(PATH, FILE);
    file.set_len(3 << 40);
    file.patch(0, &bytes);
    // References that only the third walk can count, to clusters that no refcount block covers.
    file.patch(L2 + 8, &((2u64 << 40) | COPIED).to_be_bytes());
    let report = block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap();
    finds(&report, &[(CORRUPTION, L2 + 8, "COPIED set"), (CORRUPTION, 2 << 40, "refcount 0, but 1 references")]);
    assert_eq!(report.allocated_blocks, 2);
}

#[test]
fn an_l2_table_that_all_l1_entries_name_is_read_once() {
    let mut image = Image::usual();
    image.data(0, 1);
    image.put32(36, 8192);
    for number in 0..8192 {
        image.put64(image.l1_at() + number * 8, L2);
    }
    // The L1 table is one cluster, as before: the refcounts and the L2 table stay where they are.
    let (world, bytes) = (World::new(), image.finish());
    world.raw(PATH, &bytes);
    let report = block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap();
    assert!(report.findings.iter().any(|f| f.message.contains("that another one names")), "{:?}", report.findings[0]);
    let read = world.files.reads().0;
    assert!(read <= 2 * bytes.len() as u64, "{read} bytes were read");
}

#[test]
fn snapshots_that_share_an_l1_table_are_walked_through_once() {
    let mut image = Image::usual();
    image.data(0, 1);
    let l1 = image.append(&L2.to_be_bytes());
    let mut entry = l1.to_be_bytes().to_vec();
    entry.extend([0, 0, 0, 1, 0, 1, 0, 1]);
    entry.extend([&[0; 20][..], &[0, 0, 0, 16], &[0; 16], b"1a"].concat());
    entry.resize(entry.len().next_multiple_of(8), 0);
    let table = image.append(&entry.repeat(500));
    image.put32(60, 500);
    image.put64(64, table);
    let (world, bytes) = (World::new(), image.finish());
    world.raw(PATH, &bytes);
    let report = block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap();
    assert!(report.findings[0].message.contains("499 snapshots name an L1 table"), "{:?}", report.findings[0]);
    let read = world.files.reads().0;
    assert!(read <= 2 * bytes.len() as u64, "{read} bytes were read");
}

#[test]
fn a_sparse_file_without_end_is_refused() {
    let bytes = Image::new(9, 1 << 14).finish();
    let world = World::new();
    let file = world.files.add(PATH, FILE);
    file.set_len(1 << 62);
    file.patch(0, &bytes);
    let error = block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("clusters"), "{error}");
    assert!(world.files.reads().0 <= 65536);
}
