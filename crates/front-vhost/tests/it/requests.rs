//! Requests that make no sense to a block device (virtio 1.2, section 5.2.6): each is answered, and nothing else happens.

use spile_core::ErrorKind;
use spile_engine::EngineKind;
use spile_lab::vhost::proto::feature;
use spile_lab::vhost::{Area, Descriptor, DescriptorTable};

use crate::common::disk::{Did, TestDisk};
use crate::common::engines::{on_each_engine, run_on_aio};
use crate::common::guest::{
    DISCARD, FLUSH, GET_ID, Guest, INDIRECT, IOERR, NEXT, NONE, OK, Options, R, READ, UNSUPP, W, WRITE, WRITE_ZEROES,
};
use crate::common::{Rig, SIZE, rig, rig_with};

const LAST_SECTOR: u64 = SIZE / 512 - 1;

/// The list of ranges of a discard or a write of zeroes: sector, sectors, flags.
fn ranges(guest: &mut Guest, ranges: &[(u64, u32, u32)]) -> Area {
    let encode = |(sector, sectors, flags): &(u64, u32, u32)| {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
    };
    let bytes: Vec<u8> = ranges.iter().flat_map(encode).collect();
    let area = guest.take(bytes.len().max(1));
    area.bytes.copy_from_slice(0, &bytes);
    area
}

fn run_ranges(guest: &mut Guest, kind: u32, list: &[(u64, u32, u32)]) -> u8 {
    let area = ranges(guest, list);
    guest.run(0, kind, 0, &[(area.address, 16 * list.len() as u32, R)]).0
}

fn read_only(kind: EngineKind) -> Rig {
    rig_with(kind, |setup| setup.config.read_only = true)
}

on_each_engine! {
    fn nothing_is_written_to_a_read_only_disk(kind) {
        for rig in [read_only(kind), rig_with(kind, |setup| setup.disk.read_only = true)] {
            let mut guest = rig.guest();
            assert_ne!(guest.features & feature::BLK_RO, 0);
            assert_eq!(guest.features & (feature::BLK_DISCARD | feature::BLK_WRITE_ZEROES | feature::BLK_CONFIG_WCE), 0);
            assert_eq!(guest.write(0, 0, &[1; 512]), IOERR);
            assert_eq!(run_ranges(&mut guest, DISCARD, &[(0, 8, 0)]), IOERR);
            assert_eq!(run_ranges(&mut guest, WRITE_ZEROES, &[(0, 8, 1)]), IOERR);
            assert_eq!(rig.disk.take_did(), []);
            assert_eq!(guest.read(0, 0, 512), [0; 512]);
            // With data or without: a flush writes nothing of the guest's.
            assert_eq!(guest.run(0, FLUSH, 0, &[]), (OK, 1));
            let area = guest.take(512);
            assert_eq!(guest.run(0, FLUSH, 0, &[(area.address, 512, R)]), (OK, 1));
        }
    }

    fn unknown_types_are_unsupported(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let area = guest.take(512);
        area.bytes.fill(NONE);
        // 2, 3, 5: of old; 10: lifetime; 14: secure erase; 15 and on: zones.
        for number in [2, 3, 5, 6, 7, 9, 10, 12, 14, 15, 16, 17, 24, 255, 1 << 31, u32::MAX] {
            assert_eq!(guest.run(0, number, 0, &[(area.address, 512, W)]), (UNSUPP, 1), "type {number}");
            assert_eq!(guest.run(0, number, 0, &[(area.address, 512, R)]), (UNSUPP, 1), "type {number}");
        }
        assert_eq!(area.bytes.to_vec(), [NONE; 512], "nothing was written");
        assert_eq!(rig.disk.take_did(), []);
    }

    fn get_id_fills_what_there_is_room_for(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        for len in [1, 19, 20, 21, 4096] {
            let area = guest.take(len);
            area.bytes.fill(NONE);
            let filled = len.min(20);
            assert_eq!(guest.run(0, GET_ID, 0, &[(area.address, len as u32, W)]), (OK, filled as u32 + 1));
            let expected = [&b"serial-0123456789-to"[..filled], &vec![NONE; len - filled]].concat();
            assert_eq!(area.bytes.to_vec(), expected, "{len}");
        }
        assert_eq!(guest.run(0, GET_ID, 0, &[]), (OK, 1));
    }

    fn a_sector_that_overflows_or_lies_past_the_end_is_an_error(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let area = guest.take(1024);
        area.bytes.fill(NONE);
        let mut both = |sector: u64, len: u32| {
            let read = guest.run(0, READ, sector, &[(area.address, len, W)]);
            (read.0, guest.run(0, WRITE, sector, &[(area.address, len, R)]).0)
        };
        assert_eq!(both(LAST_SECTOR, 512), (OK, OK));
        area.bytes.fill(NONE);
        for (sector, len) in [(LAST_SECTOR, 1024), (LAST_SECTOR + 1, 512), (1 << 54, 512), (1 << 55, 512)] {
            assert_eq!(both(sector, len), (IOERR, IOERR), "{sector:#x} + {len}");
        }
        for sector in [u64::MAX, u64::MAX / 512, u64::MAX / 512 + 1, 1 << 63] {
            assert_eq!(both(sector, 512), (IOERR, IOERR), "{sector:#x}");
        }
        assert_eq!(area.bytes.to_vec(), [NONE; 1024], "nothing was read");
    }

    fn lengths_are_whole_sectors(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let area = guest.take(1024);
        for len in [1, 511, 513, 1023] {
            assert_eq!(guest.run(0, READ, 0, &[(area.address, len, W)]), (IOERR, 1), "{len}");
            assert_eq!(guest.run(0, WRITE, 0, &[(area.address, len, R)]), (IOERR, 1), "{len}");
        }
        // Cut as one likes, as long as the whole is whole.
        assert_eq!(guest.run(0, READ, 0, &[(area.address, 1, W), (area.address + 1, 511, W)]), (OK, 513));
    }

    fn a_request_of_more_than_32_mib_is_refused(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let region = guest.memory.regions()[0].guest_address;
        for (pieces, expected) in [(33, vec![Did::Read(0, 32 << 20)]), (34, vec![])] {
            let (header, status) = (guest.header(READ, 0), guest.status());
            let table = guest.take(16 * (pieces + 1));
            let set = |index, address, len_bytes, flags| {
                let descriptor = Descriptor { address, len_bytes, flags, next: index as u16 + 1 };
                DescriptorTable(table.bytes.clone()).set(index, descriptor);
            };
            set(0, header.0, 16, NEXT);
            (1..pieces).for_each(|index| set(index, region, 1 << 20, W | NEXT));
            set(pieces, status.address, 1, W);
            let head = guest.rings[0].chain(&[(table.address, table.bytes.len() as u32, INDIRECT)]);
            guest.rings[0].offer(head);
            guest.rings[0].publish_and_kick();
            guest.rings[0].take();
            assert_eq!(status.bytes.to_vec(), [IOERR], "the disk is smaller anyway");
            // The one went to the disk, which refused it; the other did not.
            assert_eq!(rig.disk.take_did(), expected);
        }
    }

    fn requests_without_data_are_answered(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        assert_eq!(guest.run(0, READ, 0, &[]), (OK, 1));
        assert_eq!(guest.run(0, WRITE, 0, &[]), (OK, 1));
        assert_eq!(guest.run(0, READ, u64::MAX, &[]).0, IOERR);
        assert_eq!(guest.run(0, DISCARD, 0, &[]), (IOERR, 1));
        // Data of the wrong direction are no data.
        let area = guest.take(512);
        assert_eq!(guest.run(0, READ, 0, &[(area.address, 512, R)]), (OK, 1));
        area.bytes.fill(NONE);
        assert_eq!(guest.run(0, WRITE, 0, &[(area.address, 512, W)]), (OK, 1));
        assert_eq!(area.bytes.to_vec(), [NONE; 512]);
        let moved = |did: &Did| !matches!(did, Did::Read(_, 0) | Did::Write { len: 0, .. });
        assert!(!rig.disk.take_did().iter().any(moved));
    }

    fn lists_of_ranges_are_whole_and_short(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let area = ranges(&mut guest, &[(0, 8, 0); 18]);
        for request in [DISCARD, WRITE_ZEROES] {
            for len in [1, 15, 17, 31, 16 * 17, 16 * 18, 16 * 16 + 1] {
                assert_eq!(guest.run(0, request, 0, &[(area.address, len, R)]), (IOERR, 1), "{request}: {len}");
            }
            assert_eq!(rig.disk.take_did(), []);
            assert_eq!(guest.run(0, request, 0, &[(area.address, 16 * 16, R)]), (OK, 1));
            assert_eq!(rig.disk.take_did().len(), 16);
            // Cut as one likes.
            let cut = [(area.address, 5, R), (area.address + 5, 27, R)];
            assert_eq!(guest.run(0, request, 0, &cut), (OK, 1));
            assert_eq!(rig.disk.take_did().len(), 2);
        }
    }

    fn ranges_lie_within_the_disk_and_the_limits(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        for request in [DISCARD, WRITE_ZEROES] {
            for (sector, sectors) in [
                (LAST_SECTOR, 2),
                (LAST_SECTOR + 2, 0),
                (u64::MAX, 1),
                (u64::MAX / 512, 1),
                (1 << 55, 1),
                (0, u32::MAX),
                (0, (4 << 20) + 1),
            ] {
                let status = run_ranges(&mut guest, request, &[(0, 1, 0), (sector, sectors, 0)]);
                assert_eq!(status, IOERR, "{request}: {sector:#x} + {sectors:#x}");
            }
            assert_eq!(rig.disk.take_did(), [], "not even the good one before it");
            assert_eq!(run_ranges(&mut guest, request, &[(LAST_SECTOR, 1, 0)]), OK);
            rig.disk.take_did();
        }
    }

    fn ranges_of_more_than_2_gib_are_refused(kind) {
        let rig = rig_with(kind, |setup| setup.disk = TestDisk::new(4 << 30));
        let mut guest = rig.guest();
        for request in [DISCARD, WRITE_ZEROES] {
            assert_eq!(run_ranges(&mut guest, request, &[(0, (4 << 20) + 1, 0)]), IOERR);
        }
        assert_eq!(rig.disk.take_did(), []);
    }

    fn flags_of_ranges_that_are_not_known_are_unsupported(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        for flags in [1, 2, 1 << 31, u32::MAX] {
            assert_eq!(run_ranges(&mut guest, DISCARD, &[(0, 8, flags)]), UNSUPP, "{flags:#x}");
        }
        for flags in [2, 3, 1 << 31, u32::MAX] {
            assert_eq!(run_ranges(&mut guest, WRITE_ZEROES, &[(0, 8, 0), (0, 8, flags)]), UNSUPP, "{flags:#x}");
        }
        assert_eq!(rig.disk.take_did(), []);
        assert_eq!(run_ranges(&mut guest, WRITE_ZEROES, &[(8, 8, 1), (24, 8, 0)]), OK);
        let zeroes = |at, may_unmap| Did::Zeroes { at, len: 4096, may_unmap };
        assert_eq!(rig.disk.take_did(), [zeroes(4096, true), zeroes(12288, false)]);
    }

    fn a_disk_that_fails_fails_the_request_only(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        for (error, status) in [(ErrorKind::Io, IOERR), (ErrorKind::NoSpace, IOERR), (ErrorKind::Unsupported, UNSUPP)] {
            rig.disk.fail(Some(error));
            assert_eq!(guest.write(0, 0, &[1; 512]), status);
            assert_eq!(guest.run(0, FLUSH, 0, &[]), (status, 1));
            let area = guest.take(512);
            assert_eq!(guest.run(0, READ, 0, &[(area.address, 512, W)]), (status, 1));
            assert_eq!(run_ranges(&mut guest, DISCARD, &[(0, 8, 0)]), status);
        }
        rig.disk.fail(None);
        guest.assert_works(0);
        assert_eq!(rig.server.metrics().errors(), 12);
    }

    fn a_disk_that_panics_costs_its_queue_only(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        rig.disk.panic_next();
        guest.ask(0, FLUSH, 0, &[]);
        crate::common::until("the panic", || !rig.disk.take_did().is_empty());
        guest.assert_works(1);
        // Nobody knows how far the queue had come: it does not start again, and there is no answer to where it ended.
        let starts = rig.server.metrics().ring_starts;
        let base = guest.rings[0].next_avail;
        guest.set_up_ring(0, base).unwrap();
        guest.rings[0].kick();
        guest.assert_works(1);
        assert_eq!(rig.server.metrics().ring_starts, starts);
        assert!(guest.connection.stop_vring(0).is_err());
        crate::common::until("the connection ends", || rig.server.connections() == 0);
        rig.assert_serves();
    }

    fn what_is_written_back_is_durable_only_after_a_flush(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        guest.write(0, 0, &[1; 512]);
        assert_eq!(run_ranges(&mut guest, WRITE_ZEROES, &[(0, 1, 0)]), OK);
        assert_eq!(guest.run(0, FLUSH, 0, &[]), (OK, 1));
        let zeroes = Did::Zeroes { at: 0, len: 512, may_unmap: false };
        assert_eq!(rig.disk.take_did(), [Did::Write { at: 0, len: 512, fua: false }, zeroes, Did::Flush]);
    }

    fn a_driver_that_cannot_flush_finds_every_answered_write_durable(kind) {
        let rig = rig(kind);
        let features = !(feature::BLK_FLUSH | feature::LOG_ALL);
        let mut guest = Guest::with(&rig.path(), Options { features, ..Options::default() });
        guest.write(0, 0, &[1; 512]);
        assert_eq!(run_ranges(&mut guest, WRITE_ZEROES, &[(0, 1, 0)]), OK);
        assert_eq!(run_ranges(&mut guest, DISCARD, &[(1, 1, 0)]), OK);
        let zeroes = Did::Zeroes { at: 0, len: 512, may_unmap: false };
        let written = Did::Write { at: 0, len: 512, fua: true };
        let expected = [written, zeroes, Did::Flush, Did::Discard(512, 512), Did::Flush];
        assert_eq!(rig.disk.take_did(), expected);
    }

    fn without_its_cache_the_disk_writes_through(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let fua = |guest: &mut Guest| {
            guest.write(0, 0, &[1; 512]);
            matches!(rig.disk.take_did()[..], [Did::Write { fua: true, .. }])
        };
        for (switch, expected) in [(0, true), (1, false), (0, true), (255, false)] {
            guest.connection.set_config(32, &[switch]).unwrap();
            assert_eq!(guest.connection.config().unwrap().writeback, u8::from(switch != 0));
            assert_eq!(fua(&mut guest), expected, "switch {switch}");
        }
        // The switch is this guest's, not another's.
        guest.connection.set_config(32, &[0]).unwrap();
        assert!(!fua(&mut rig.guest()) && fua(&mut guest));
    }
}
