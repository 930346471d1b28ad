//! The guest's memory: what is no memory, what is taken away, and what changes under load.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, ftruncate};
use spile_core::OpenMode;
use spile_lab::vhost::proto::{InflightPayload, RegionPayload, Request, feature};
use spile_lab::vhost::{Connection, Device, DeviceOptions, MemoryOptions, QueueOptions};
use spile_store::{CacheMode, FileStore};

use crate::common::engines::{on_each_engine, run_on_aio};
use crate::common::guest::{
    FLUSH, Guest, INDIRECT, IOERR, NONE, OK, Options, R, READ, W, WRITE, assert_hung_up, assert_refused, is_readable,
    negotiate,
};
use crate::common::load::{under_load, wait_for_more};
use crate::common::messages::{answer, file, region};
use crate::common::{Rig, rig, rig_with, until};

fn connect(rig: &Rig) -> Connection {
    negotiate(&rig.path(), &Options::default()).0
}

fn page() -> OwnedFd {
    file(4096)
}

/// Two regions in one file, with nothing between them; data go to the second, which can be cut off.
fn cut_off(guest: &Guest, keep: usize) {
    let len: usize = guest.memory.regions()[..keep].iter().map(|region| region.bytes.len()).sum();
    ftruncate(guest.memory.file(), len as u64).unwrap();
}

/// A device under load, and an unrelated region for it.
fn device(rig: &Rig, options: &QueueOptions) -> (Device, Vec<spile_lab::vhost::Queue>) {
    let mut device = Device::connect(&rig.path(), DeviceOptions::default()).unwrap();
    let queues = device.start(options).unwrap();
    (device, queues)
}

on_each_engine! {
    fn what_is_no_region_is_refused(kind) {
        let rig = rig(kind);
        let connection = connect(&rig);
        let good = region(0);
        let spoilt = [
            RegionPayload { len_bytes: 0, ..good },
            RegionPayload { len_bytes: 4097, ..good },
            RegionPayload { len_bytes: u64::MAX, ..good },
            RegionPayload { len_bytes: 1 << 63, guest_address: 0, user_address: 0, ..good },
            RegionPayload { guest_address: u64::MAX - 100, ..good },
            RegionPayload { user_address: u64::MAX - 4094, ..good },
            RegionPayload { file_offset: 1, ..good },
            RegionPayload { file_offset: 4096, ..good },
            RegionPayload { file_offset: u64::MAX, ..good },
            RegionPayload { file_offset: 1 << 63, ..good },
        ];
        for spoilt in spoilt {
            assert_refused("a region", connection.add_memory_region(spoilt, page().as_fd()));
            assert_refused("a table", connection.set_memory_table(&[region(1), spoilt], &[page().as_fd(), page().as_fd()]));
        }
        connection.add_memory_region(good, page().as_fd()).unwrap();
        // More than a guest may have, of a file that is as long as it says: in one, and in parts.
        let (huge, file) = (RegionPayload { len_bytes: 4 << 40, ..region(1 << 10) }, file(4 << 40));
        assert_refused("4 TiB beside a page", connection.add_memory_region(huge, file.as_fd()));
        connection.remove_memory_region(good).unwrap();
        connection.add_memory_region(huge, file.as_fd()).unwrap();
    }

    fn what_is_no_memory_is_refused(kind) {
        let rig = rig(kind);
        let connection = connect(&rig);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, [0; 4096]).unwrap();
        let open = |path: &str, flags| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let (pipe, _end) = rustix::pipe::pipe().unwrap();
        let bad = [
            open("/", OFlags::RDONLY),
            open("/dev/zero", OFlags::RDWR),
            open(path.to_str().unwrap(), OFlags::RDONLY),
            open(path.to_str().unwrap(), OFlags::WRONLY),
            open(path.to_str().unwrap(), OFlags::PATH),
            crate::common::guest::event(),
            pipe,
            std::os::unix::net::UnixStream::pair().unwrap().0.into(),
        ];
        for (number, fd) in bad.iter().enumerate() {
            let refused = |what: &str, result| assert_refused(&format!("{what} {number}"), result);
            refused("region", connection.add_memory_region(region(0), fd.as_fd()));
            refused("table", connection.set_memory_table(&[region(0)], &[fd.as_fd()]));
            let inflight = InflightPayload { len_bytes: 4096, file_offset: 0, queues: 1, queue_size: 16 };
            refused("inflight", connection.set_inflight(inflight, fd.as_fd()));
            let log = [64u64, 0].map(u64::to_ne_bytes).concat();
            refused("log", connection.tell(Request::SetLogBase, &log, &[fd.as_fd()]));
        }
        connection.add_memory_region(region(0), open(path.to_str().unwrap(), OFlags::RDWR).as_fd()).unwrap();
    }

    fn regions_do_not_overlap_and_are_removed_as_they_were_added(kind) {
        let rig = rig(kind);
        let connection = connect(&rig);
        let add = |region: RegionPayload| connection.add_memory_region(region, page().as_fd());
        let first = region(0);
        add(first).unwrap();
        assert_refused("the same twice", add(first));
        assert_refused("the guest's end", add(RegionPayload { guest_address: first.guest_address + 4095, ..region(9) }));
        assert_refused("the guest's start", add(RegionPayload { guest_address: first.guest_address - 4095, ..region(9) }));
        assert_refused("the front end's", add(RegionPayload { user_address: first.user_address + 1, ..region(9) }));
        add(RegionPayload { guest_address: first.guest_address + 4096, ..region(2) }).unwrap();
        let remove = |region: RegionPayload| connection.remove_memory_region(region);
        assert_refused("unknown", remove(region(5)));
        assert_refused("another length", remove(RegionPayload { len_bytes: 4095, ..first }));
        assert_refused("another place", remove(RegionPayload { user_address: first.user_address + 4096, ..first }));
        remove(first).unwrap();
        assert_refused("twice", remove(first));
        add(first).unwrap();
    }

    fn tables_have_up_to_8_regions_and_slots_are_counted(kind) {
        let rig = rig(kind);
        let connection = connect(&rig);
        let regions: Vec<_> = (0..9).map(region).collect();
        let memory: Vec<OwnedFd> = (0..9).map(|_| page()).collect();
        let fds: Vec<BorrowedFd<'_>> = memory.iter().map(AsFd::as_fd).collect();
        connection.set_memory_table(&regions[..8], &fds[..8]).unwrap();
        connection.set_memory_table(&[], &[]).unwrap();
        let spoilt = |count: u32| [&count.to_ne_bytes()[..], &RegionPayload::table(&regions[..8])[4..]].concat();
        for (payload, count) in [(RegionPayload::table(&regions), 8), (spoilt(7), 7), (spoilt(9), 8), (spoilt(u32::MAX), 8)] {
            let fds: Vec<OwnedFd> = (0..count).map(|_| page()).collect();
            assert!(answer(&connect(&rig), Request::SetMemTable as u32, &payload, &fds).is_none());
        }
        let slots = connection.max_memory_slots().unwrap();
        for number in 0..slots {
            connection.add_memory_region(region(number), fds[0]).unwrap();
        }
        assert_refused("a slot too many", connection.add_memory_region(region(slots), fds[0]));
        rig.assert_serves();
    }

    fn a_ring_whose_memory_is_taken_away_rests_until_it_is_back(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        guest.assert_works(0);
        let first = guest.memory.regions()[0].payload();
        // No harm to the message, nor to any that comes after it.
        guest.connection.remove_memory_region(first).unwrap();
        let asked = guest.ask(0, FLUSH, 0, &[]);
        guest.connection.set_vring_base(1, guest.rings[1].next_avail).unwrap();
        guest.connection.set_owner().unwrap();
        assert_eq!(guest.rings[0].used(), 0);
        guest.connection.add_memory_region(first, guest.memory.file()).unwrap();
        guest.rings[0].take();
        assert_eq!(asked.status(), OK);
        guest.assert_works(1);
    }

    fn data_in_a_region_that_was_removed_fail_their_request(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let second = guest.memory.regions()[1].payload();
        let data = [(second.guest_address, 512, W)];
        assert_eq!(guest.run(0, READ, 0, &data).0, OK);
        guest.connection.remove_memory_region(second).unwrap();
        assert_eq!(guest.run(0, READ, 0, &data).0, IOERR);
        guest.connection.add_memory_region(second, guest.memory.file()).unwrap();
        assert_eq!(guest.run(0, READ, 0, &data).0, OK);
    }

    /// A front end that changes a region removes it and then adds it, while its guest has requests there.
    fn a_request_waits_for_memory_that_is_exchanged(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let second = guest.memory.regions()[1].payload();
        // The time for it is short, and the machine may be busy.
        let is_in_time = (0..50).any(|_| {
            guest.connection.remove_memory_region(second).unwrap();
            let removed = Instant::now();
            let asked = guest.ask(0, READ, 0, &[(second.guest_address, 512, W)]);
            std::thread::sleep(Duration::from_millis(5));
            guest.connection.add_memory_region(second, guest.memory.file()).unwrap();
            let is_in_time = removed.elapsed() < Duration::from_millis(40);
            guest.rings[0].take();
            assert!(asked.status() == OK || !is_in_time, "it was done without its memory");
            is_in_time
        });
        assert!(is_in_time, "never in time");
    }

    fn a_region_is_removed_only_after_what_uses_it(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let second = guest.memory.regions()[1].payload();
        rig.disk.set_bytes(0, &[8; 512]);
        rig.disk.hold();
        guest.ask(0, READ, 0, &[(second.guest_address, 512, W)]);
        until("it is in flight", || rig.disk.held() == 1);
        std::thread::scope(|scope| {
            let removed = scope.spawn(|| guest.connection.remove_memory_region(second));
            std::thread::sleep(Duration::from_millis(30));
            assert!(!removed.is_finished(), "it was removed while a request wrote to it");
            rig.disk.release();
            removed.join().unwrap().unwrap();
        });
        guest.rings[0].take();
        assert_eq!(guest.memory.at(second.guest_address, 512).unwrap().bytes.to_vec(), [8; 512]);
    }

    fn data_cut_off_end_their_connection_only(kind) {
        let rig = rig(kind);
        let (mut guest, mut other) = (rig.guest(), rig.guest());
        let second = guest.memory.regions()[1].guest_address;
        guest.assert_works(0);
        let (header, status) = (guest.header(READ, 0), guest.status());
        let head = guest.rings[0].chain(&[header, (second, 512, W), (status.address, 1, W)]);
        guest.rings[0].offer(head);
        cut_off(&guest, 1);
        guest.rings[0].publish_and_kick();
        assert_hung_up("the guest without its memory", &guest.connection);
        guest.rings[0].assert_broken();
        other.assert_works(0);
        rig.assert_serves();
    }

    fn data_cut_off_that_the_kernel_copies_fail_their_request_at_least(kind) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::fs::File::create(&path).unwrap().set_len(crate::common::SIZE).unwrap();
        let store = FileStore::open(&path, OpenMode::ReadWrite, CacheMode::Page).unwrap();
        let rig = rig_with(kind, |setup| setup.disk.file = Some(store));
        let mut other = rig.guest();
        other.assert_works(0);
        for (request, flags) in [(READ, W), (WRITE, R)] {
            let mut guest = rig.guest();
            guest.assert_works(0);
            let second = guest.memory.regions()[1].guest_address;
            let asked = guest.offer(0, request, 8, &[(second, 4096, flags)]);
            cut_off(&guest, 1);
            guest.rings[0].publish_and_kick();
            let (ring, now) = (&guest.rings[0], Duration::ZERO);
            until("an answer or the end", || ring.used() > 0 || is_readable(&ring.err, now));
            assert_ne!(asked.status(), OK);
            other.assert_works(0);
        }
        rig.assert_serves();
    }

    fn memory_that_the_kernel_has_pinned_is_as_any_other(kind) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::fs::File::create(&path).unwrap().set_len(crate::common::SIZE).unwrap();
        let store = FileStore::open(&path, OpenMode::ReadWrite, CacheMode::Page).unwrap();
        let rig = rig_with(kind, |setup| (setup.disk.file, setup.config.pins_memory) = (Some(store), true));
        let (device, queues) = device(&rig, &QueueOptions { depth: 8, data_bytes: 4096, ..QueueOptions::default() });
        let more = page();
        under_load(queues, |answered| {
            for round in 0..10 {
                device.connection().add_memory_region(region(round), more.as_fd()).unwrap();
                wait_for_more(answered);
                device.connection().remove_memory_region(region(round)).unwrap();
            }
        });
        let mut guest = rig.guest();
        let second = guest.memory.regions()[1].guest_address;
        assert_eq!(guest.run(0, WRITE, 8, &[(second, 4096, R)]).0, OK);
        cut_off(&guest, 1);
        // The pages are still there for the kernel; whether it takes them or the server notices is no matter.
        let asked = guest.offer(0, READ, 8, &[(second, 4096, W)]);
        guest.rings[0].publish_and_kick();
        let (ring, now) = (&guest.rings[0], Duration::ZERO);
        until("an answer or the end", || ring.used() > 0 || is_readable(&ring.err, now));
        assert!(asked.status() != NONE || is_readable(&ring.err, now));
        drop((guest, device));
        rig.assert_serves();
        rig.assert_quiet();
    }

    fn rings_cut_off_end_their_connection_only(kind) {
        let rig = rig(kind);
        let (fresh, mut used, mut other) = (rig.guest(), rig.guest(), rig.guest());
        used.assert_works(0);
        for guest in [fresh, used] {
            cut_off(&guest, 0);
            other.assert_works(0);
            // Our own mapping is cut as well: only the kick can be used.
            guest.rings[0].kick();
            assert_hung_up("the guest without its rings", &guest.connection);
            other.assert_works(0);
        }
        rig.assert_serves();
    }

    fn a_header_or_a_table_cut_off_ends_its_connection_only(kind) {
        let rig = rig(kind);
        let mut other = rig.guest();
        for (flags, parts) in [(R, 2), (INDIRECT, 1)] {
            let mut guest = rig.guest();
            let (second, status) = (guest.memory.regions()[1].guest_address, guest.status());
            let chain = [(second, 16, flags), (status.address, 1, W)];
            let head = guest.rings[0].chain(&chain[..parts]);
            guest.rings[0].offer(head);
            cut_off(&guest, 1);
            guest.rings[0].publish_and_kick();
            assert_hung_up("the guest without its memory", &guest.connection);
            other.assert_works(0);
        }
        rig.assert_serves();
    }

    fn a_log_or_an_inflight_region_cut_off_ends_its_connection_only(kind) {
        let rig = rig(kind);
        let mut other = rig.guest();
        let inflight = file(4096);
        let guest = Guest::negotiated(&rig.path(), Options::default());
        guest.share_memory().unwrap();
        let payload = InflightPayload { len_bytes: 4096, file_offset: 0, queues: 2, queue_size: 16 };
        guest.connection.set_inflight(payload, inflight.as_fd()).unwrap();
        expect_end_when_cut(guest, &inflight);
        other.assert_works(0);
        let log = file(4096);
        let guest = Guest::negotiated(&rig.path(), Options { features: u64::MAX, ..Options::default() });
        assert_ne!(guest.features & feature::LOG_ALL, 0);
        guest.connection.set_log(4096, 0, log.as_fd()).unwrap();
        guest.share_memory().unwrap();
        expect_end_when_cut(guest, &log);
        other.assert_works(0);
        rig.assert_serves();
    }

    fn memory_changes_under_load(kind) {
        let rig = rig(kind);
        for add_regions in [false, true] {
            let options = QueueOptions { queues: 2, depth: 8, data_bytes: 4096, regions: 3, add_regions, ..QueueOptions::default() };
            let (device, queues) = device(&rig, &options);
            let connection = device.connection();
            let memory = device.memory().unwrap();
            let table: Vec<_> = memory.regions().iter().map(|region| region.payload()).collect();
            let more = page();
            under_load(queues, |answered| {
                for round in 0..30 {
                    wait_for_more(answered);
                    connection.add_memory_region(region(round), more.as_fd()).unwrap();
                    wait_for_more(answered);
                    if round % 2 == 0 {
                        connection.remove_memory_region(region(round)).unwrap();
                    } else {
                        connection.set_memory_table(&table, &vec![memory.file(); table.len()]).unwrap();
                    }
                }
                wait_for_more(answered);
            });
        }
        rig.assert_quiet();
    }
}

/// Sets the rings up, cuts `file` short, and sees the connection end at the next request.
fn expect_end_when_cut(mut guest: Guest, file: &OwnedFd) {
    (0..2).for_each(|index| guest.set_up_ring(index, 0).unwrap());
    guest.assert_works(0);
    ftruncate(file, 0).unwrap();
    let area = guest.take(512);
    guest.ask(0, READ, 0, &[(area.address, 512, W)]);
    guest.rings[0].assert_broken();
    assert_hung_up("a guest whose shared memory is gone", &guest.connection);
}

/// A guest with more memory than this host has, in regions that are never touched.
#[test]
fn memory_that_is_never_touched_costs_nothing() {
    let rig = rig(Default::default());
    let memory = MemoryOptions { regions: 4, gap_bytes: 4096, ..MemoryOptions::new(64 << 30) };
    let mut guest = Guest::with(&rig.path(), Options { memory, ..Options::default() });
    guest.assert_works(0);
    let far = guest.memory.end_address() - 512;
    assert_eq!(guest.run(0, READ, 0, &[(far, 512, W)]), (OK, 513));
}
