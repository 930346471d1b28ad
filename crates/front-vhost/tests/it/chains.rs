//! Descriptor chains as no driver should make them: which break the ring, which fail the request, and which are only odd.
//!
//! Whatever breaks a ring rings its error event, stops that queue only, and is over once the driver sets the queue up anew.

use spile_engine::EngineKind;
use spile_lab::vhost::proto::feature;
use spile_lab::vhost::{Area, Descriptor, DescriptorTable, MemoryOptions};

use crate::common::engines::{on_each_engine, run_on_aio};
use crate::common::guest::{FLUSH, Guest, INDIRECT, IOERR, NEXT, NONE, OK, Options, Part, R, READ, W, WRITE};
use crate::common::{Rig, rig};

/// Two regions that touch, and behind them nothing.
fn end_of_memory(guest: &Guest) -> u64 {
    guest.memory.end_address()
}

fn seam(guest: &Guest) -> u64 {
    guest.memory.regions()[1].guest_address
}

/// The bytes at a guest address, which may be anywhere in the memory.
fn at(guest: &Guest, address: u64, len: usize) -> Area {
    guest.memory.at(address, len).unwrap()
}

/// Header and status of a flush, which is what these chains would be if they were sound.
fn frame(guest: &mut Guest) -> (Part, Part) {
    let status = guest.status();
    (guest.header(FLUSH, 0), (status.address, 1, W))
}

/// Makes a chain available in ring 0.
fn offer(guest: &mut Guest, head: u16) {
    guest.rings[0].offer(head);
    guest.rings[0].publish_and_kick();
}

/// Runs `spoil` on a guest, whose ring 0 is then broken and whose ring 1 is not; and the ring can be set up anew.
fn breaks(kind: EngineKind, spoil: impl FnOnce(&mut Guest)) {
    breaks_with(kind, Options::default(), spoil);
}

fn breaks_with(kind: EngineKind, options: Options, spoil: impl FnOnce(&mut Guest)) {
    let rig = rig(kind);
    let mut guest = Guest::with(&rig.path(), options);
    guest.assert_works(0);
    spoil(&mut guest);
    guest.rings[0].assert_broken();
    assert_eq!(guest.rings[0].used(), 0, "a chain that breaks the ring is not answered");
    guest.assert_works(1);
    guest.reset_ring(0);
    guest.assert_works(0);
    guest.assert_works(1);
    rig.assert_serves();
    drop(guest);
    until_ended(&rig);
}

fn until_ended(rig: &Rig) {
    crate::common::until("all connections end", || rig.server.connections() == 0);
    let metrics = rig.server.metrics();
    assert_eq!(metrics.ring_starts, metrics.ring_stops);
}

/// Makes `descriptors` an indirect table, at which ring 0 is then sent.
fn indirect(guest: &mut Guest, descriptors: &[(Part, u16)]) -> (u64, u32) {
    let table = guest.take(16 * descriptors.len());
    for (index, ((address, len_bytes, flags), next)) in descriptors.iter().copied().enumerate() {
        let descriptor = Descriptor { address, len_bytes, flags, next };
        DescriptorTable(table.bytes.clone()).set(index, descriptor);
    }
    (table.address, table.bytes.len() as u32)
}

fn offer_indirect(guest: &mut Guest, address: u64, len: u32, flags: u16) {
    let head = guest.rings[0].chain(&[(address, len, INDIRECT | flags)]);
    offer(guest, head);
}

fn with_next(part: Part) -> Part {
    (part.0, part.1, part.2 | NEXT)
}

on_each_engine! {
    fn a_circular_chain_breaks_the_ring(kind) {
        breaks(kind, |guest| {
            let (header, status) = frame(guest);
            let head = guest.rings[0].chain(&[header, status, status]);
            let last = usize::from(head + 2) % 16;
            let circle = Descriptor { flags: W | NEXT, next: head + 1, ..guest.rings[0].parts.descriptors.get(last) };
            guest.rings[0].parts.descriptors.set(last, circle);
            offer(guest, head);
        });
    }

    fn a_chain_that_is_its_own_next_breaks_the_ring(kind) {
        breaks(kind, |guest| {
            let (header, _) = frame(guest);
            let circle = Descriptor { address: header.0, len_bytes: 16, flags: NEXT, next: 9 };
            guest.rings[0].parts.descriptors.set(9, circle);
            offer(guest, 9);
        });
    }

    fn a_next_outside_the_table_breaks_the_ring(kind) {
        for next in [16, 17, u16::MAX] {
            breaks(kind, |guest| {
                let (header, _) = frame(guest);
                let descriptor = Descriptor { address: header.0, len_bytes: 16, flags: NEXT, next };
                guest.rings[0].parts.descriptors.set(3, descriptor);
                offer(guest, 3);
            });
        }
    }

    fn a_head_outside_the_table_breaks_the_ring(kind) {
        for head in [16, u16::MAX] {
            breaks(kind, |guest| offer(guest, head));
        }
    }

    fn a_descriptor_of_no_bytes_breaks_the_ring(kind) {
        breaks(kind, |guest| {
            let (header, status) = frame(guest);
            let head = guest.rings[0].chain(&[header, (header.0, 0, R), status]);
            offer(guest, head);
        });
    }

    fn a_status_that_cannot_be_written_breaks_the_ring(kind) {
        breaks(kind, |guest| {
            let (header, status) = frame(guest);
            let head = guest.rings[0].chain(&[header, (status.0, 1, R)]);
            offer(guest, head);
        });
    }

    fn a_chain_of_only_a_header_breaks_the_ring(kind) {
        breaks(kind, |guest| {
            let (header, _) = frame(guest);
            let head = guest.rings[0].chain(&[header]);
            offer(guest, head);
        });
    }

    fn a_status_outside_the_memory_breaks_the_ring(kind) {
        for (back, len) in [(0, 1), (1, 2), (8, 9)] {
            breaks(kind, |guest| {
                let ((header, _), end) = (frame(guest), end_of_memory(guest));
                let head = guest.rings[0].chain(&[header, (end - back, len, W)]);
                offer(guest, head);
            });
        }
    }

    fn a_status_whose_address_overflows_breaks_the_ring(kind) {
        for (address, len) in [(u64::MAX, 2), (u64::MAX - 3, u32::MAX), (u64::MAX, 1)] {
            breaks(kind, |guest| {
                let (header, _) = frame(guest);
                let head = guest.rings[0].chain(&[header, (address, len, W)]);
                offer(guest, head);
            });
        }
    }

    fn something_to_read_behind_something_to_write_breaks_the_ring(kind) {
        breaks(kind, |guest| {
            let (header, status) = frame(guest);
            let head = guest.rings[0].chain(&[status, header]);
            offer(guest, head);
        });
    }

    fn an_indirect_descriptor_that_was_not_agreed_on_breaks_the_ring(kind) {
        let features = !(feature::INDIRECT_DESC | feature::LOG_ALL);
        breaks_with(kind, Options { features, ..Options::default() }, |guest| {
            let (header, status) = frame(guest);
            let (address, len) = indirect(guest, &[(with_next(header), 1), (status, 0)]);
            offer_indirect(guest, address, len, 0);
        });
    }

    fn an_indirect_table_in_an_indirect_table_breaks_the_ring(kind) {
        breaks(kind, |guest| {
            let (header, status) = frame(guest);
            let (inner, len) = indirect(guest, &[(with_next(header), 1), (status, 0)]);
            // Taken for a buffer to be read, it would be the header of a sound chain.
            let (outer, len) = indirect(guest, &[(with_next((inner, len, INDIRECT)), 1), (status, 0)]);
            offer_indirect(guest, outer, len, 0);
        });
    }

    fn an_indirect_table_that_contains_itself_breaks_the_ring(kind) {
        breaks(kind, |guest| {
            let table = guest.take(16);
            let descriptor = Descriptor { address: table.address, len_bytes: 16, flags: INDIRECT, next: 0 };
            DescriptorTable(table.bytes).set(0, descriptor);
            offer_indirect(guest, table.address, 16, 0);
        });
    }

    fn an_indirect_chain_in_a_circle_breaks_the_ring(kind) {
        breaks(kind, |guest| {
            let (header, status) = frame(guest);
            let (address, len) = indirect(guest, &[(with_next(header), 1), (with_next(status), 1)]);
            offer_indirect(guest, address, len, 0);
        });
    }

    fn a_next_outside_its_indirect_table_breaks_the_ring(kind) {
        for next in [2, 16, u16::MAX] {
            breaks(kind, |guest| {
                let (header, status) = frame(guest);
                let (address, len) = indirect(guest, &[(with_next(header), next), (status, 0)]);
                offer_indirect(guest, address, len, 0);
            });
        }
    }

    fn an_indirect_descriptor_with_a_next_breaks_the_ring(kind) {
        breaks(kind, |guest| {
            let (header, status) = frame(guest);
            let (address, len) = indirect(guest, &[(with_next(header), 1), (status, 0)]);
            let head = guest.rings[0].chain(&[(address, len, INDIRECT), status]);
            offer(guest, head);
        });
    }

    fn an_indirect_table_of_an_odd_length_breaks_the_ring(kind) {
        for len in [0, 1, 15, 17, 31, 33, 47] {
            breaks(kind, |guest| {
                let (header, status) = frame(guest);
                let (address, _) = indirect(guest, &[(with_next(header), 1), (status, 0)]);
                offer_indirect(guest, address, len, 0);
            });
        }
    }

    fn an_indirect_table_outside_the_memory_breaks_the_ring(kind) {
        for back in [0, 16, 31] {
            breaks(kind, |guest| offer_indirect(guest, end_of_memory(guest) - back, 32, 0));
        }
        breaks(kind, |guest| offer_indirect(guest, u64::MAX - 15, 16, 0));
        breaks(kind, |guest| offer_indirect(guest, guest.memory.regions()[0].guest_address, !15, 0));
    }

    fn an_overlong_indirect_chain_breaks_the_ring(kind) {
        // One more than 1024, and more links than a link can count.
        for count in [1025, 65_536 + 1] {
            let memory = MemoryOptions { regions: 2, ..MemoryOptions::new(8 << 20) };
            breaks_with(kind, Options { memory, ..Options::default() }, |guest| {
                let (header, status) = frame(guest);
                let one = |index: usize| ((status.0, 1, W | NEXT), (index as u16).wrapping_add(1));
                let mut table: Vec<_> = (0..count).map(one).collect();
                table[0].0 = with_next(header);
                table[count - 1].0 = status;
                let (address, len) = indirect(guest, &table);
                offer_indirect(guest, address, len, 0);
            });
        }
    }

    fn an_available_index_too_far_ahead_or_behind_breaks_the_ring(kind) {
        for ahead in [17, 1 << 15, u16::MAX] {
            breaks(kind, |guest| {
                let ring = &guest.rings[0];
                ring.parts.set_available_index(ring.next_avail.wrapping_add(ahead));
                ring.kick();
            });
        }
    }

    fn the_longest_indirect_chain_is_served(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        rig.disk.set_bytes(0, &[5; 511 * 1024]);
        let (header, status, data) = (guest.header(READ, 0), guest.status(), guest.take(512));
        // Header, 1022 pieces, status.
        let mut table = vec![(with_next(header), 1)];
        table.extend((1..1023).map(|index| ((data.address, 512, W | NEXT), index + 1)));
        table.push(((status.address, 1, W), 0));
        let (address, len) = indirect(&mut guest, &table);
        offer_indirect(&mut guest, address, len, 0);
        assert_eq!(guest.rings[0].take().len_bytes, 1022 * 512 + 1);
        assert_eq!((status.bytes.to_vec(), data.bytes.to_vec()), (vec![OK], vec![5; 512]));
    }

    fn an_indirect_descriptor_may_say_that_it_is_written_and_come_last(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let (header, status) = frame(&mut guest);
        let (address, len) = indirect(&mut guest, &[(with_next(header), 1), (status, 0)]);
        offer_indirect(&mut guest, address, len, W);
        guest.rings[0].take();
        // The header in the ring's own table, the rest in an indirect one.
        let (header, status) = (guest.header(FLUSH, 0), guest.status());
        let (address, len) = indirect(&mut guest, &[((status.address, 1, W), 0)]);
        let head = guest.rings[0].chain(&[header, (address, len, INDIRECT)]);
        offer(&mut guest, head);
        assert_eq!((guest.rings[0].take().id, status.bytes.to_vec()), (head.into(), vec![OK]));
    }

    fn a_header_in_three_parts_is_read(kind) {
        let rig = rig(kind);
        rig.disk.set_bytes(3 * 512, &[6; 512]);
        let mut guest = rig.guest();
        let ((header, ..), status, data) = (guest.header(READ, 3), guest.status(), guest.take(512));
        for cuts in [[1, 2], [4, 8], [15, 16], [7, 15]] {
            data.bytes.fill(0);
            let [a, b] = cuts;
            let parts = [(header, a, R), (header + a as u64, b - a, R), (header + b as u64, 16 - b, R)];
            let parts = parts.into_iter().filter(|part| part.1 > 0);
            let chain: Vec<Part> = parts.chain([(data.address, 512, W), (status.address, 1, W)]).collect();
            let head = guest.rings[0].chain(&chain);
            offer(&mut guest, head);
            guest.rings[0].take();
            assert_eq!((status.bytes.to_vec(), data.bytes.to_vec()), (vec![OK], vec![6; 512]), "{cuts:?}");
        }
    }

    fn header_data_and_status_may_share_descriptors(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        // Header and data of a write in one; data and status of a read in one.
        let both = guest.take(16 + 512);
        both.bytes.fill(7);
        both.bytes.copy_from_slice(0, &[1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        let status = guest.status();
        let head = guest.rings[0].chain(&[(both.address, 16 + 512, R), (status.address, 1, W)]);
        offer(&mut guest, head);
        guest.rings[0].take();
        assert_eq!((status.bytes.to_vec(), rig.disk.bytes(1024, 512)), (vec![OK], vec![7; 512]));
        let (header, both) = (guest.header(READ, 2), guest.take(513));
        both.bytes.fill(NONE);
        let head = guest.rings[0].chain(&[header, (both.address, 513, W)]);
        offer(&mut guest, head);
        assert_eq!(guest.rings[0].take().len_bytes, 513);
        assert_eq!(both.bytes.to_vec(), [vec![7; 512], vec![OK]].concat());
    }

    fn a_range_over_two_regions_is_one_range(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let seam = seam(&guest);
        let halves = [at(&guest, seam - 256, 256), at(&guest, seam, 256)];
        halves[0].bytes.fill(1);
        halves[1].bytes.fill(2);
        assert_eq!(guest.run(0, WRITE, 0, &[(seam - 256, 512, R)]), (OK, 1));
        assert_eq!(rig.disk.bytes(0, 512), [[1; 256], [2; 256]].concat());
        rig.disk.set_bytes(0, &[9; 512]);
        assert_eq!(guest.run(0, READ, 0, &[(seam - 256, 512, W)]), (OK, 513));
        assert!(halves.iter().all(|half| half.bytes.to_vec() == [9; 256]));
        // A header over the seam as well.
        let status = guest.status();
        at(&guest, seam - 8, 8).bytes.copy_from_slice(0, &[4, 0, 0, 0, 0, 0, 0, 0]);
        at(&guest, seam, 8).bytes.fill(0);
        let head = guest.rings[0].chain(&[(seam - 8, 16, R), (status.address, 1, W)]);
        offer(&mut guest, head);
        guest.rings[0].take();
        assert_eq!(status.bytes.to_vec(), [OK]);
    }

    fn data_in_a_hole_fail_their_request_only(kind) {
        let rig = rig(kind);
        let memory = MemoryOptions { regions: 2, gap_bytes: 8192, ..MemoryOptions::new(2 << 20) };
        let mut guest = Guest::with(&rig.path(), Options { memory, ..Options::default() });
        let hole = seam(&guest) - 8192;
        let end = end_of_memory(&guest);
        for address in [hole - 512, hole, hole + 4096, seam(&guest) - 512, end - 512, end, 0, u64::MAX - 511, 1 << 63] {
            assert_eq!(guest.run(0, READ, 0, &[(address, 1024, W)]), (IOERR, 1), "{address:#x}");
            assert_eq!(guest.run(0, WRITE, 0, &[(address, 1024, R)]), (IOERR, 1), "{address:#x}");
        }
        assert_eq!(guest.run(0, READ, 0, &[(hole - 512, u32::MAX, W)]).0, IOERR);
        assert_eq!(rig.disk.take_did(), [], "nothing of it came to the disk");
        guest.assert_works(0);
    }

    fn a_header_in_a_hole_or_too_short_fails_its_request_only(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let (header, end) = (guest.header(FLUSH, 0).0, end_of_memory(&guest));
        let odd: [&[Part]; 6] = [
            &[(end, 16, R)],
            &[(end - 15, 16, R)],
            &[(u64::MAX - 3, 16, R)],
            &[(header, 15, R)],
            &[(header, 8, R), (end, 8, R)],
            &[],
        ];
        for parts in odd {
            let status = guest.status();
            let head = guest.rings[0].chain(&[parts, &[(status.address, 1, W)]].concat());
            offer(&mut guest, head);
            assert_eq!((guest.rings[0].take().id, status.bytes.to_vec()), (head.into(), vec![IOERR]), "{parts:x?}");
        }
        assert_eq!(rig.disk.take_did(), []);
        guest.assert_works(0);
    }
}
