//! The log of dirty pages: exactly what the server has written, before the driver hears of it.

use std::os::fd::AsFd;

use spile_lab::vhost::proto::{Request, VRING_LOG, VringAddresses, feature};
use spile_lab::vhost::{Area, Descriptor, DescriptorTable, DirtyLog, MemoryOptions};

use crate::common::engines::{on_each_engine, run_on_aio};
use crate::common::guest::{
    FLUSH, GET_ID, Guest, INDIRECT, IOERR, NEXT, OK, Options, Part, R, READ, UNSUPP, W, WRITE, assert_refused,
};
use crate::common::messages::file;
use crate::common::{SIZE, rig, until};

const PAGE: u64 = 4096;

/// A guest whose writes are logged; the used ring of ring 0 too.
fn logged(path: &std::path::Path) -> (Guest, DirtyLog) {
    let mut guest = Guest::with(path, Options { features: u64::MAX, ..Options::default() });
    let log = DirtyLog::new(guest.memory.end_address()).unwrap();
    guest.connection.set_log(log.len_bytes(), 0, log.file()).unwrap();
    let addresses = VringAddresses { flags: VRING_LOG, ..guest.addresses(0) };
    guest.connection.set_vring_addresses(addresses).unwrap();
    guest.assert_works(0);
    log.clear();
    (guest, log)
}

fn page(address: u64) -> u64 {
    address / PAGE * PAGE
}

/// Whole pages of the guest.
fn take_pages(guest: &mut Guest, count: usize) -> Area {
    guest.memory.take(count * PAGE as usize, PAGE as usize).unwrap()
}

/// Runs a request whose status lies on a page of its own; what it dirties beside the page of the used ring.
fn dirtied(guest: &mut Guest, log: &DirtyLog, kind: u32, data: &[Part]) -> (u8, Vec<u64>) {
    let (header, status) = (guest.header(kind, 0), take_pages(guest, 1));
    status.bytes.fill(0xee);
    log.clear();
    let head = guest.rings[0].chain(&[&[header], data, &[(status.address, 1, W)]].concat());
    guest.rings[0].offer(head);
    guest.rings[0].publish_and_kick();
    guest.rings[0].take();
    // The used ring is logged after it is published: the front end looks for the last time when all is stopped.
    let used = page(guest.rings[0].areas[2].address);
    until("the used ring is logged", || log.is_dirty(used));
    let pages = log.dirty_pages().into_iter().filter(|at| *at != used && *at != status.address);
    let pages = pages.collect();
    assert!(log.is_dirty(status.address), "the status is a write as well");
    (status.bytes.to_vec()[0], pages)
}

on_each_engine! {
    fn reads_of_the_disk_dirty_exactly_their_pages(kind) {
        let rig = rig(kind);
        let (mut guest, log) = logged(&rig.path());
        let area = take_pages(&mut guest, 6);
        let at = area.address;
        let mut dirty = |data: &[Part]| dirtied(&mut guest, &log, READ, data);
        assert_eq!(dirty(&[(at, 4096, W)]), (OK, vec![at]));
        assert_eq!(dirty(&[(at + PAGE - 256, 512, W)]), (OK, vec![at, at + PAGE]));
        assert_eq!(dirty(&[(at + 2 * PAGE, 512, W), (at + 5 * PAGE - 512, 512, W)]), (OK, vec![at + 2 * PAGE, at + 4 * PAGE]));
        assert_eq!(dirty(&[(at + PAGE, 8192, W)]), (OK, vec![at + PAGE, at + 2 * PAGE]));
    }

    fn what_only_reads_memory_dirties_its_status_only(kind) {
        let rig = rig(kind);
        let (mut guest, log) = logged(&rig.path());
        let area = take_pages(&mut guest, 2);
        assert_eq!(dirtied(&mut guest, &log, WRITE, &[(area.address, 8192, R)]), (OK, vec![]));
        assert_eq!(dirtied(&mut guest, &log, FLUSH, &[]), (OK, vec![]));
        assert_eq!(dirtied(&mut guest, &log, 99, &[(area.address, 4096, W)]), (UNSUPP, vec![]));
        assert_eq!(dirtied(&mut guest, &log, WRITE, &[(area.address, 512, R), (area.address + PAGE, 512, W)]), (OK, vec![]));
        assert_eq!(dirtied(&mut guest, &log, GET_ID, &[(area.address, 20, W)]), (OK, vec![area.address]));
    }

    fn what_is_refused_unread_marks_nothing_however_long(kind) {
        let rig = rig(kind);
        let (mut guest, log) = logged(&rig.path());
        let end = guest.memory.end_address();
        // Lengths that would take the log minutes to walk, were they believed.
        let data = [(0, u32::MAX, W), (0, u32::MAX, W), (1 << 20, u32::MAX, W), (end, u32::MAX, W), (u64::MAX - 1, 9, W)];
        assert_eq!(dirtied(&mut guest, &log, READ, &data), (IOERR, vec![]));
    }

    fn what_is_refused_for_its_length_marks_nothing(kind) {
        let rig = rig(kind);
        let (mut guest, log) = logged(&rig.path());
        let memory = guest.memory.regions()[0].guest_address;
        let (header, status, table) = (guest.header(READ, 0), take_pages(&mut guest, 1), guest.take(16 * 20));
        // Eighteen times the whole memory: 36 MiB, all of it there.
        let mut parts = vec![header];
        parts.resize(19, (memory, 2 << 20, W));
        parts.push((status.address, 1, W));
        for (index, (address, len_bytes, flags)) in parts.iter().copied().enumerate() {
            let flags = if index < 19 { flags | NEXT } else { flags };
            let descriptor = Descriptor { address, len_bytes, flags, next: index as u16 + 1 };
            DescriptorTable(table.bytes.clone()).set(index, descriptor);
        }
        log.clear();
        let head = guest.rings[0].chain(&[(table.address, 16 * 20, INDIRECT)]);
        guest.rings[0].offer(head);
        guest.rings[0].publish_and_kick();
        guest.rings[0].take();
        let used = page(guest.rings[0].areas[2].address);
        until("the used ring is logged", || log.is_dirty(used));
        assert_eq!((status.bytes.to_vec()[0], log.dirty_pages().len()), (IOERR, 2), "status and used ring");
    }

    fn a_used_ring_is_logged_at_the_address_it_was_told(kind) {
        let rig = rig(kind);
        let (mut guest, log) = logged(&rig.path());
        let elsewhere = take_pages(&mut guest, 1).address;
        let addresses = VringAddresses { flags: VRING_LOG, log: elsewhere, ..guest.addresses(0) };
        guest.connection.set_vring_addresses(addresses).unwrap();
        log.clear();
        guest.ask(0, FLUSH, 0, &[]);
        guest.rings[0].take();
        until("it is logged there", || log.is_dirty(elsewhere));
        assert!(!log.is_dirty(page(guest.rings[0].areas[2].address)));
        // An address that overflows is nobody's.
        for nowhere in [u64::MAX, u64::MAX - 4, 1 << 63] {
            let addresses = VringAddresses { flags: VRING_LOG, log: nowhere, ..guest.addresses(0) };
            guest.connection.set_vring_addresses(addresses).unwrap();
            guest.assert_works(0);
        }
        // Not at all, when it was not asked for.
        guest.connection.set_vring_addresses(guest.addresses(0)).unwrap();
        log.clear();
        guest.ask(0, FLUSH, 0, &[]);
        guest.rings[0].take();
        guest.connection.stop_vring(0).unwrap();
        assert!(!log.is_dirty(elsewhere));
    }

    fn a_large_used_ring_is_logged_where_it_was_written(kind) {
        let rig = rig(kind);
        let options = Options { features: u64::MAX, ring_size: 2048, queues: 1, base: 510, ..Options::default() };
        let mut guest = Guest::with(&rig.path(), options);
        let log = DirtyLog::new(guest.memory.end_address()).unwrap();
        guest.connection.set_log(log.len_bytes(), 0, log.file()).unwrap();
        guest.connection.set_vring_addresses(VringAddresses { flags: VRING_LOG, ..guest.addresses(0) }).unwrap();
        let used = page(guest.rings[0].areas[2].address);
        // A server marks the whole of it when it starts: the one before may have been killed before it could.
        until("the ring is at work", || log.is_dirty(used + 3 * PAGE));
        // Element 510 lies in the first page, 511 over the seam, 512 in the second; the index is in the first.
        for expected in [&[used][..], &[used, used + PAGE], &[used, used + PAGE]] {
            log.clear();
            guest.ask(0, FLUSH, 0, &[]);
            guest.rings[0].take();
            until("the used ring is logged", || log.is_dirty(used));
            let of_ring = log.dirty_pages().into_iter().filter(|at| (used..used + 4 * PAGE).contains(at));
            assert_eq!(of_ring.collect::<Vec<_>>(), expected);
        }
    }

    fn a_log_that_is_too_short_is_not_written_beyond(kind) {
        let rig = rig(kind);
        let (mut guest, whole) = logged(&rig.path());
        // 64 pages, of which the memory at 1 MiB has none; and a file that goes on behind it.
        let short = file(4096);
        guest.connection.set_log(8, 16, short.as_fd()).unwrap();
        whole.clear();
        let area = take_pages(&mut guest, 1);
        assert_eq!(guest.run(0, READ, 0, &[(area.address, 4096, W)]).0, OK);
        guest.connection.stop_vring(0).unwrap();
        let mut bytes = [0; 4096];
        assert_eq!(rustix::io::pread(&short, &mut bytes, 0).unwrap(), 4096);
        assert_eq!((bytes, whole.dirty_pages()), ([0; 4096], vec![]));
    }

    fn logs_that_cannot_be_mapped_are_refused(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let set = |len: u64, offset: u64| {
            let payload = [len, offset].map(u64::to_ne_bytes).concat();
            guest.connection.tell(Request::SetLogBase, &payload, &[file(4096).as_fd()])
        };
        for (len, offset) in [(0, 0), (4097, 0), (1, 4096), (4096, 1), (u64::MAX, 0), (8, u64::MAX), (1 << 63, 1 << 63)] {
            assert_refused("a log", set(len, offset));
        }
        set(4096, 0).unwrap();
        guest.assert_works(0);
        let long = [(1u64 << 30) + 1, 0].map(u64::to_ne_bytes).concat();
        let log = file((1 << 30) + 1);
        assert_refused("a log of nobody's", guest.connection.tell(Request::SetLogBase, &long, &[log.as_fd()]));
    }

    fn the_log_ends_with_its_feature(kind) {
        let rig = rig(kind);
        let (mut guest, log) = logged(&rig.path());
        guest.connection.set_features(guest.features & !feature::LOG_ALL).unwrap();
        guest.connection.set_vring_addresses(guest.addresses(0)).unwrap();
        log.clear();
        guest.assert_works(0);
        guest.assert_works(1);
        guest.connection.stop_vring(0).unwrap();
        assert!(log.dirty_pages().is_empty());
    }
}

/// What a memory of many GiB would have.
#[test]
fn a_log_of_a_large_memory_is_marked_at_its_far_end() {
    let rig = rig(Default::default());
    let memory = MemoryOptions { regions: 2, gap_bytes: 1 << 30, ..MemoryOptions::new(32 << 30) };
    let mut guest = Guest::with(&rig.path(), Options { features: u64::MAX, memory, ..Options::default() });
    let log = DirtyLog::new(guest.memory.end_address()).unwrap();
    guest.connection.set_log(log.len_bytes(), 0, log.file()).unwrap();
    let far = guest.memory.end_address() - PAGE;
    assert_eq!(guest.run(0, READ, SIZE / 512 - 8, &[(far, 4096, W)]), (OK, 4097));
    assert!(log.is_dirty(far) && !log.is_dirty(far - PAGE));
}
