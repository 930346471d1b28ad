//! What is granted can be used, and nothing else.

use spile_core::ErrorKind;
use spile_lab::xen::{Entry, GRANT_ENTRIES, Guest, flag};
use spile_mem::Segment;
use spile_xen::{CopyOp, DomId, GrantRef, Grants, Way};

use crate::common::{BAD_DOMAIN, BAD_GREF, BAD_PAGE, DOMAIN, GENERAL_ERROR, OKAY, World, copy, piece};

#[test]
fn copies_go_where_they_should_and_nowhere_else() {
    let world = World::new(4);
    let frames = world.guest.take_frames(3).unwrap();
    let grefs: Vec<_> = (0..3).map(|n| world.guest.grant(DomId(0), frames.first + n, false).unwrap()).collect();
    let buffer = Segment::zeroed(4096);
    for number in 0..8 {
        frames.bytes.slice(512 * number..512 * (number + 1)).fill(number as u8 + 1);
    }
    // Eight sectors of one page, backwards.
    let ops: Vec<_> = (0..8).map(|n| CopyOp { buffer_offset: 512 * u32::from(7 - n), ..piece(grefs[0], n) }).collect();
    assert_eq!(world.copy(Way::FromGuest, &buffer, &ops), [OKAY; 8]);
    let got: Vec<_> = (0..8).map(|n| buffer.read_array::<1>(512 * n + 511)[0]).collect();
    assert_eq!(got, [8, 7, 6, 5, 4, 3, 2, 1]);
    // Odd pieces of two pages.
    let odd = |gref, page_offset, len, buffer_offset| CopyOp { gref, page_offset, len, buffer: 0, buffer_offset };
    let ops = [odd(grefs[1], 4095, 1, 0), odd(grefs[2], 1, 3, 5), odd(grefs[2], 7, 0, 0)];
    buffer.copy_from_slice(0, b"abcdefgh");
    assert_eq!(world.copy(Way::ToGuest, &buffer, &ops), [OKAY; 3]);
    assert_eq!(frames.page(1).read_array::<2>(4094), [0, b'a']);
    assert_eq!(frames.page(2).read_array::<5>(0), [0, b'f', b'g', b'h', 0]);
    let used = |gref| world.guest.table().get(gref).flags & (flag::READING | flag::WRITING);
    assert_eq!(grefs.into_iter().map(used).collect::<Vec<_>>(), [0; 3], "no mark of use is left");
}

#[test]
fn many_pieces_go_in_one_call() {
    let world = World::new(64);
    let frames = world.guest.take_frames(64).unwrap();
    let grefs: Vec<_> = (0..64).map(|n| world.guest.grant(DomId(0), frames.first + n, false).unwrap()).collect();
    let pages = Segment::zeroed(64 * 4096);
    let bytes: Vec<u8> = (0..64 * 4096u32).map(|at| (at / 64 % 251) as u8).collect();
    pages.copy_from_slice(0, &bytes);
    let op = |n: u32| CopyOp {
        gref: grefs[n as usize / 64],
        page_offset: (n % 64 * 64) as u16,
        len: 64,
        buffer: 0,
        buffer_offset: n * 64,
    };
    let mut ops: Vec<_> = (0..4096).map(op).collect();
    ops[1500].gref = GrantRef(1);
    let statuses = world.copy(Way::ToGuest, &pages, &ops);
    let bad: Vec<_> = (0..4096).filter(|n| statuses[*n] != OKAY).collect();
    assert_eq!((bad, statuses[1500]), (vec![1500], GENERAL_ERROR));
    let mut expected = bytes;
    expected[1500 * 64..1501 * 64].fill(0);
    assert!(frames.bytes.to_vec() == expected);
}

#[test]
fn bad_foreign_and_readonly_grants_fail_by_themselves() {
    let world = World::new(4);
    let frame = world.guest.take_frames(1).unwrap().first;
    let set = |number, flags, domain, frame| {
        world.guest.table().set(GrantRef(number), Entry { flags, domain, frame });
        GrantRef(number)
    };
    let permit = flag::PERMIT_ACCESS;
    let good = world.guest.grant(DomId(0), frame, false).unwrap();
    let readonly = world.guest.grant(DomId(0), frame, true).unwrap();
    let foreign = set(100, permit, 5, frame);
    let (transfer, outside) = (set(101, 2, 0, frame), set(102, permit, 0, 4));
    let far = set(103, permit, 0, u32::MAX);
    let grefs = [good, readonly, foreign, transfer, outside, far, GrantRef(200), GrantRef(GRANT_ENTRIES), good];
    let ops: Vec<_> = grefs.iter().zip([0, 1, 2, 3, 4, 5, 6, 7, 6]).map(|(gref, n)| piece(*gref, n)).collect();
    let buffer = Segment::zeroed(4096);
    let mut expected = [OKAY, OKAY, GENERAL_ERROR, GENERAL_ERROR, BAD_PAGE, BAD_PAGE, GENERAL_ERROR, BAD_GREF, OKAY];
    assert_eq!(world.copy(Way::FromGuest, &buffer, &ops), expected);
    expected[1] = GENERAL_ERROR;
    assert_eq!(world.copy(Way::ToGuest, &buffer, &ops), expected);
    for gref in &grefs[2..8] {
        let error = world.hypervisor.map(DOMAIN, &[good, *gref], false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    }
    assert_eq!(world.hypervisor.map(DOMAIN, &[good, readonly], false).unwrap().len(), 8192);
    assert!(world.hypervisor.map(DOMAIN, &[good, readonly], true).is_err());
    assert!(world.hypervisor.map_ring(DOMAIN, &[readonly]).is_err());
    for gref in [good, readonly, outside, far] {
        assert!(world.guest.end_access(gref), "{gref:?} is held after a failure");
    }
}

#[test]
#[should_panic(expected = "over its page's end")]
fn a_piece_over_the_pages_end_is_the_callers_fault() {
    let world = World::new(4);
    world.copy(Way::FromGuest, &Segment::zeroed(8192), &[CopyOp { page_offset: 3585, ..piece(GrantRef(8), 0) }]);
}

#[test]
#[should_panic(expected = "over its buffer's end")]
fn a_piece_over_the_buffers_end_is_the_callers_fault() {
    let world = World::new(4);
    world.copy(Way::FromGuest, &Segment::zeroed(512), &[piece(GrantRef(8), 1)]);
}

#[test]
fn revoked_grants_are_refused_and_used_ones_cannot_be_revoked() {
    let world = World::new(4);
    let frame = world.guest.take_frames(1).unwrap().first;
    let gref = world.guest.grant(DomId(0), frame, false).unwrap();
    let buffer = Segment::zeroed(4096);
    for is_writable in [false, true] {
        let first = world.hypervisor.map(DOMAIN, &[gref], is_writable).unwrap();
        let second = world.hypervisor.map(DOMAIN, &[gref], is_writable).unwrap();
        let flags = if is_writable { flag::READING | flag::WRITING } else { flag::READING };
        assert_eq!(world.guest.table().get(gref).flags, flag::PERMIT_ACCESS | flags);
        // A copy that ends meanwhile takes no mark away that is not its own.
        assert_eq!(world.copy(Way::ToGuest, &buffer, &[piece(gref, 0)]), [OKAY]);
        assert_eq!(world.guest.table().get(gref).flags, flag::PERMIT_ACCESS | flags);
        drop(first);
        assert!(!world.guest.end_access(gref));
        let part = second.slice(10..20);
        drop(second);
        assert!(!world.guest.end_access(gref), "a part of it is held");
        drop(part);
    }
    assert!(world.guest.end_access(gref));
    assert_eq!(world.copy(Way::FromGuest, &buffer, &[piece(gref, 0)]), [GENERAL_ERROR]);
    assert!(world.hypervisor.map(DOMAIN, &[gref], false).is_err());
    assert_eq!(world.guest.grant(DomId(0), frame, false).unwrap(), gref, "the entry is used again");
}

#[test]
fn who_reads_may_not_write_because_of_that() {
    let world = World::new(4);
    let frame = world.guest.take_frames(1).unwrap().first;
    let readonly = world.guest.grant(DomId(0), frame, true).unwrap();
    let both = world.guest.grant(DomId(0), frame, false).unwrap();
    let reading = world.hypervisor.map(DOMAIN, &[readonly, both], false).unwrap();
    let ops = [piece(readonly, 0), piece(both, 1)];
    assert_eq!(world.copy(Way::ToGuest, &Segment::zeroed(4096), &ops), [GENERAL_ERROR, OKAY]);
    assert!(world.hypervisor.map(DOMAIN, &[readonly], true).is_err());
    let writing = world.hypervisor.map(DOMAIN, &[both], true).unwrap();
    let marks = || world.guest.table().get(both).flags & (flag::READING | flag::WRITING);
    assert_eq!(marks(), flag::READING | flag::WRITING);
    drop(writing);
    assert_eq!(marks(), flag::READING);
    drop(reading);
    assert_eq!(marks(), 0);
}

#[test]
fn a_grant_in_use_stays_where_it_is() {
    let world = World::new(4);
    let frames = world.guest.take_frames(2).unwrap();
    let gref = world.guest.grant(DomId(0), frames.first, false).unwrap();
    let mapped = world.hypervisor.map(DOMAIN, &[gref], true).unwrap();
    let entry = world.guest.table().get(gref);
    world.guest.table().set(gref, Entry { frame: frames.first + 1, ..entry });
    let buffer = Segment::zeroed(4096);
    buffer.fill(7);
    assert_eq!(world.copy(Way::ToGuest, &buffer, &[piece(gref, 0)]), [OKAY]);
    assert_eq!((frames.page(0).read_array(0), frames.page(1).read_array(0)), ([7], [0]));
    drop(mapped);
    assert_eq!(world.copy(Way::ToGuest, &buffer, &[piece(gref, 0)]), [OKAY]);
    assert_eq!(frames.page(1).read_array(0), [7]);
}

#[test]
fn maps_show_the_guests_pages_in_the_order_asked_for() {
    let world = World::new(8);
    let frames = world.guest.take_frames(6).unwrap();
    let grefs = [5, 0, 1, 2, 4].map(|n| world.guest.grant(DomId(0), frames.first + n, false).unwrap());
    (0..6).for_each(|n| frames.page(n).fill(n as u8));
    let mapped = world.hypervisor.map(DOMAIN, &grefs, true).unwrap();
    let pages: Vec<_> = mapped.iter().map(|page| (page.len(), page.read_array::<1>(100)[0])).collect();
    assert_eq!(pages, [(4096, 5), (4096, 0), (4096, 1), (4096, 2), (4096, 4)]);
    mapped.as_slice()[3].fill(9);
    assert_eq!(frames.page(2).read_array(4095), [9]);
    let ring = world.hypervisor.map_ring(DOMAIN, &grefs).unwrap();
    assert_eq!([0, 4096, 8192, 16384].map(|at| ring.read_array::<1>(at)[0]), [5, 0, 1, 4]);
    ring.copy_from_slice(8190, b"over");
    assert_eq!((frames.page(0).read_array(4094), frames.page(1).read_array(0)), (*b"ov", *b"er"));
    drop(mapped);
    assert!(!world.guest.end_access(grefs[0]), "the ring is mapped");
    drop(ring);
    assert!(grefs.iter().all(|gref| world.guest.end_access(*gref)));
}

#[test]
fn an_unmapped_page_leaves_the_page_tables() {
    let world = World::new(ODD_PAGES);
    let frames = world.guest.take_frames(200).unwrap();
    let grefs: Vec<_> = (0..200).map(|n| world.guest.grant(DomId(0), frames.first + n, false).unwrap()).collect();
    frames.bytes.fill(1);
    // The guest's own mapping counts too, and stays.
    let before = resident_shared_pages();
    let mapped = world.hypervisor.map(DOMAIN, &grefs, true).unwrap();
    let during = resident_shared_pages();
    assert!(during >= before + 200, "{during} pages after {before}");
    drop(mapped);
    let after = resident_shared_pages();
    assert!(after < before + 20, "{after} pages after {before}");
}

/// A guest's size that no other test here has.
const ODD_PAGES: usize = 257;

/// How many pages of such a guest this process has in its page tables.
fn resident_shared_pages() -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut is_guest, mut all) = (false, 0);
    for line in smaps.lines() {
        let kib = |rest: &str| rest.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
        if let Some(rest) = line.strip_prefix("Size:") {
            is_guest = kib(rest) == ODD_PAGES as u64 * 4;
        } else if let Some(rest) = line.strip_prefix("Rss:").filter(|_| is_guest) {
            all += kib(rest) / 4;
        }
    }
    all
}

#[test]
fn a_domain_that_is_gone_is_bad_and_a_new_one_is_another() {
    let World { hypervisor, guest, host, dir } = World::new(4);
    let frames = guest.take_frames(1).unwrap();
    let gref = guest.grant(DomId(0), frames.first, false).unwrap();
    let buffer = Segment::zeroed(4096);
    assert_eq!(copy(&hypervisor, DomId(9), Way::FromGuest, &buffer, &[piece(gref, 0)]), [BAD_DOMAIN]);
    let mapped = hypervisor.map(DOMAIN, &[gref], false).unwrap();
    hypervisor.destroy(DOMAIN).unwrap();
    assert_eq!(copy(&hypervisor, DOMAIN, Way::FromGuest, &buffer, &[piece(gref, 0)]), [BAD_DOMAIN]);
    assert_eq!(hypervisor.map(DOMAIN, &[gref], false).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(mapped.to_vec().len(), 4096, "what is mapped stays so");
    for number in 3..6 {
        let again = Guest::create(dir.path(), DOMAIN, 8192).unwrap();
        again.memory().fill(number);
        let gref = again.grant(DomId(0), 1, true).unwrap();
        assert_eq!(copy(&hypervisor, DOMAIN, Way::FromGuest, &buffer, &[piece(gref, 7)]), [OKAY]);
        assert_eq!(buffer.read_array(4095), [number]);
    }
    assert_eq!(copy(&hypervisor, DOMAIN, Way::FromGuest, &buffer, &[piece(gref, 0)]), [BAD_DOMAIN]);
    drop((mapped, guest, host));
}
