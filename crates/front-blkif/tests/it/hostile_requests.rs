//! Requests of hostile guests (cases 13 to 26), in both layouts and by every way to the guest's memory. Each is sent
//! alone and in one batch with all others, among sound ones.

use spile_core::metrics::Op;
use spile_front_blkif::pages::Access;
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Queue};
use spile_lab::xen::toolstack::Vbd;
use spile_xen::GrantRef;
use spile_xen::blkif::{PlainRequest, Request, SegmentEntry, op, status};

use crate::common::disk::Did;
use crate::common::hostile::{
    ABIS, Street, ask, ask_all, assert_reads, beside, discard, fill_indirect, indirect, options, page, plain,
};
use crate::common::{ACCESSES, GUEST, SIZE, Setup, pattern};

const OKAY: i16 = status::OKAY;
const ERROR: i16 = status::ERROR;
const UNSUPPORTED: i16 = status::EOPNOTSUPP;

/// What is sent, how it is answered, and what the disk is asked for that.
type Case = (Request, i16, Option<Did>);

fn sent(request: PlainRequest, status: i16, did: Option<Did>) -> Case {
    (Request::Plain(request), status, did)
}

fn refused(request: PlainRequest) -> Case {
    sent(request, ERROR, None)
}

/// Sends all cases one by one and then at once; nobody else notices, and the guest can connect again.
fn run(setup: impl Fn(Access) -> Setup, sizes: BlkfrontOptions, cases: impl Fn(&Queue) -> Vec<Case>) {
    for access in ACCESSES {
        let mut street = Street::with(setup(access));
        for abi in ABIS {
            let persistent = access == Access::Persistent;
            let (front, mut queue) = street.connect(BlkfrontOptions { abi, persistent, ..sizes.clone() });
            queue.grant_all(0);
            let cases = cases(&queue);
            street.world.disk.take_did();
            for (request, wanted, did) in &cases {
                assert_eq!(ask(&mut queue, *request), *wanted, "{access:?} {abi:?}: {request:?}");
                let done = street.world.disk.take_did();
                assert_eq!(done, did.iter().copied().collect::<Vec<_>>(), "{access:?} {abi:?}: {request:?}");
                if *wanted != OKAY {
                    assert_reads(&mut queue);
                    street.world.disk.take_did();
                    queue.grant_all(0);
                }
            }
            let good = Request::Plain(plain(&queue, op::READ, 1, 0));
            for chunk in cases.chunks(15) {
                let mut batch: Vec<_> = chunk.iter().flat_map(|(request, ..)| [good, *request]).collect();
                batch.push(good);
                let mut wanted: Vec<_> = chunk.iter().flat_map(|(_, wanted, _)| [OKAY, *wanted]).collect();
                wanted.push(OKAY);
                assert_eq!(ask_all(&mut queue, &batch), wanted, "{access:?} {abi:?}: {chunk:?}");
            }
            street.assert_well(front, vec![queue]);
        }
    }
}

fn small() -> BlkfrontOptions {
    options(Access::Copy)
}

/// Case 13.
#[test]
fn counts_of_segments() {
    run(Setup::new, small(), |queue| {
        let mut cases = Vec::new();
        for kind in [op::READ, op::WRITE] {
            cases.extend(
                [0, 12, 32, 255].map(|count| refused(PlainRequest { nr_segments: count, ..plain(queue, kind, 1, 0) })),
            );
        }
        for kind in [op::FLUSH_DISKCACHE, op::WRITE_BARRIER] {
            cases.extend(
                [12, 255].map(|count| refused(PlainRequest { nr_segments: count, ..plain(queue, kind, 1, 0) })),
            );
        }
        cases.push(sent(plain(queue, op::READ, 11, 8), OKAY, Some(Did::Read(4096, 11 * 4096))));
        cases
    });
}

/// Cases 14 and 29: alone, and in one copy with sound ones.
#[test]
fn segments_that_are_not_in_their_page() {
    run(Setup::new, small(), |queue| {
        let edges = [(0, 8), (0, 255), (8, 8), (255, 255), (5, 4), (7, 0), (255, 0)];
        let mut cases = Vec::new();
        for kind in [op::READ, op::WRITE] {
            for place in [0, 10] {
                cases.extend(edges.map(|(first_sect, last_sect)| {
                    let mut request = plain(queue, kind, 11, 0);
                    let segment = &mut request.segments[place];
                    (segment.first_sect, segment.last_sect) = (first_sect, last_sect);
                    refused(request)
                }));
            }
        }
        let mut request = plain(queue, op::READ, 2, 0);
        (request.segments[0].first_sect, request.segments[1].last_sect) = (7, 0);
        // What is behind the last that counts is not looked at.
        (request.segments[2].first_sect, request.segments[2].last_sect) = (255, 255);
        cases.push(sent(request, OKAY, Some(Did::Read(0, 1024))));
        cases
    });
}

/// Case 15.
#[test]
fn sectors_that_are_not_in_the_disk() {
    run(Setup::new, small(), |queue| {
        let end = SIZE / 512;
        let mut cases = Vec::new();
        let outside =
            [end - 7, end, u64::MAX, u64::MAX - 7, u64::MAX / 512, u64::MAX / 512 + 1, 1 << 55, (1 << 55) - 8, 1 << 63];
        for kind in [op::READ, op::WRITE] {
            cases.extend(outside.map(|sector| refused(plain(queue, kind, 1, sector))));
        }
        cases.push(sent(plain(queue, op::READ, 1, end - 8), OKAY, Some(Did::Read(SIZE - 4096, 4096))));
        cases
    });
}

/// Case 16.
#[test]
fn writes_to_a_disk_that_is_served_read_only() {
    let readonly = |access| Setup { vbd: Vbd { is_readonly: true, ..Vbd::new(GUEST, "test") }, ..Setup::new(access) };
    run(readonly, BlkfrontOptions { indirect_segments: 32, data_bytes: 65536, depth: 4, ..small() }, |queue| {
        let segments = plain(queue, op::WRITE, 1, 0).segments;
        let pages = fill_indirect(queue, &segments);
        vec![
            refused(plain(queue, op::WRITE, 1, 0)),
            refused(plain(queue, op::FLUSH_DISKCACHE, 1, 0)),
            refused(plain(queue, op::WRITE_BARRIER, 1, 0)),
            (discard(0, 8, 0), ERROR, None),
            (Request::Indirect(indirect(op::WRITE, 11, 0, &pages)), ERROR, None),
            (Request::Indirect(indirect(op::READ, 11, 0, &pages)), OKAY, Some(Did::Read(0, 11 * 4096))),
            sent(plain(queue, op::FLUSH_DISKCACHE, 0, 0), OKAY, Some(Did::Flush)),
            sent(plain(queue, op::READ, 1, 0), OKAY, Some(Did::Read(0, 4096))),
        ]
    });
}

/// Case 17.
#[test]
fn operations_that_nobody_knows() {
    run(Setup::new, small(), |queue| {
        let unknown = [4, 7, 8, 128, 255].map(|kind| sent(plain(queue, kind, 1, 0), UNSUPPORTED, None));
        let senseless =
            sent(PlainRequest { nr_segments: 255, sector: u64::MAX, ..plain(queue, 77, 1, 0) }, UNSUPPORTED, None);
        unknown.into_iter().chain([senseless]).collect()
    });
}

/// An operation that is not known is counted as none, whatever its slot's place was used for before.
#[test]
fn operations_that_nobody_knows_hold_up_nothing() {
    let mut street = Street::new(Access::Copy);
    let (front, mut queue) = street.connect(small());
    queue.grant_all(0);
    let barrier = Request::Plain(plain(&queue, op::WRITE_BARRIER, 1, 0));
    assert_eq!(ask_all(&mut queue, &[barrier; 4]), [OKAY; 4]);
    let (read, unknown) = (plain(&queue, op::READ, 1, 64), plain(&queue, 99, 1, 0));
    let writes = street.world.device().metrics()[0].requests.op(Op::Write).begun;
    street.world.disk.hold();
    queue.ring_mut().push(&Request::Plain(read));
    queue.ring_mut().push(&Request::Plain(unknown));
    queue.publish();
    let response = crate::common::hostile::next_response(&mut queue, 4);
    assert_eq!((response.op, response.status), (99, UNSUPPORTED), "it does not wait for the read");
    street.world.disk.release();
    assert_eq!(crate::common::hostile::next_response(&mut queue, 5).status, OKAY);
    assert_eq!(street.world.device().metrics()[0].requests.op(Op::Write).begun, writes);
    street.assert_well(front, vec![queue]);
}

/// Case 18.
#[test]
fn discards() {
    run(Setup::new, small(), |_| {
        let end = SIZE / 512;
        let mut cases: Vec<Case> =
            [(0, 0), (0, u64::MAX), (1, u64::MAX), (end, 1), (end - 1, 2), (u64::MAX, 1), (0, 1 << 55), (1 << 55, 8)]
                .map(|(sector, sectors)| (discard(sector, sectors, 0), ERROR, None))
                .into();
        cases.push((discard(0, 8, 1), UNSUPPORTED, None));
        cases.push((discard(0, 8, 255), UNSUPPORTED, None));
        // Not aligned to what is offered: the disk's to round.
        cases.push((discard(3, 5, 0), OKAY, Some(Did::Discard(1536, 2560))));
        cases.push((discard(0, end, 0), OKAY, Some(Did::Discard(0, SIZE))));
        cases
    });
}

/// The toolstack has said no: what is not offered is not done when it is asked for all the same.
#[test]
fn discards_that_are_not_offered() {
    let mut vbd = Vbd::new(GUEST, "test");
    vbd.extra.push(("discard-enable".into(), "0".into()));
    let mut street = Street::with(Setup { vbd, ..Setup::new(Access::Copy) });
    let (front, mut queue) = street.connect(small());
    assert!(!front.features().discard);
    assert_eq!(ask(&mut queue, discard(0, 8, 0)), UNSUPPORTED);
    assert_eq!(street.world.disk.take_did(), []);
    street.assert_well(front, vec![queue]);
}

fn large() -> BlkfrontOptions {
    BlkfrontOptions { indirect_segments: 256, data_bytes: 128 << 10, depth: 4, ..small() }
}

/// Cases 19 and 20.
#[test]
fn indirect_requests_of_what_cannot_be_indirect_and_of_no_or_too_many_segments() {
    run(Setup::new, large(), |queue| {
        let segments: Vec<_> = (0..32).map(|_| plain(queue, op::READ, 1, 0).segments[0]).collect();
        let pages = fill_indirect(queue, &segments);
        let case = |kind, count, status| (Request::Indirect(indirect(kind, count, 0, &pages)), status, None);
        let kinds = [op::WRITE_BARRIER, op::FLUSH_DISKCACHE, op::DISCARD, op::INDIRECT, 4, 255];
        let mut cases: Vec<Case> = kinds.map(|kind| case(kind, 2, ERROR)).into();
        for kind in [op::READ, op::WRITE] {
            cases.extend([0, 257, 512, 4096, 65535].map(|count| case(kind, count, ERROR)));
        }
        let read = |count| {
            (Request::Indirect(indirect(op::READ, count, 0, &pages)), OKAY, Some(Did::Read(0, u64::from(count) * 4096)))
        };
        cases.extend([read(1), read(32)]);
        // The rest of the page is zeroes: of grant 0, which is none.
        cases.push(case(op::WRITE, 33, ERROR));
        cases
    });
}

/// Segments in pages of their own are checked as those in slots are; pages of segments that are not granted are no
/// segments.
#[test]
fn indirect_segments_that_make_no_sense() {
    run(Setup::new, large(), |queue| {
        let good = plain(queue, op::READ, 1, 0).segments[0];
        let pages = fill_indirect(queue, &[good, SegmentEntry { last_sect: 8, ..good }, good]);
        let mut cases = vec![(Request::Indirect(indirect(op::READ, 3, 0, &pages)), ERROR, None)];
        for gref in [0, 32767, 32768, u32::MAX] {
            let pages = [GrantRef(gref)];
            cases.push((Request::Indirect(indirect(op::WRITE, 2, 0, &pages)), ERROR, None));
        }
        cases.push((Request::Indirect(indirect(op::READ, 1, SIZE / 512 - 7, &pages)), ERROR, None));
        cases
    });
}

/// Case 21: a racing thread rewrites the segments; each request has one meaning, and stays within the guest's pages.
#[test]
fn segments_that_are_rewritten_while_they_are_read() {
    for access in ACCESSES {
        let mut street = Street::new(access);
        let persistent = access == Access::Persistent;
        let (front, mut queue) = street.connect(BlkfrontOptions { persistent, ..large() });
        queue.grant_all(0);
        let whole: Vec<_> = queue.grants(0).map(|gref| SegmentEntry { gref, first_sect: 0, last_sect: 7 }).collect();
        let pages = fill_indirect(&queue, &whole);
        let bytes = page(&queue, pages[0]);
        let parts = [(0, 0), (0, 255), (8, 7), (0, 7)];
        let others = parts.map(|(first_sect, last_sect)| SegmentEntry { first_sect, last_sect, ..whole[0] });
        let bad = SegmentEntry { gref: GrantRef(u32::MAX), ..whole[0] };
        let rewrite = |round: u32| {
            let segment = if round % 7 == 6 { &bad } else { &others[round as usize % 4] };
            bytes.copy_from_slice(round as usize % 32 * 8, &segment.encode());
        };
        let sound = beside(rewrite, || {
            let each = |round| {
                let kind = if round % 2 == 0 { op::READ } else { op::WRITE };
                let request = Request::Indirect(indirect(kind, 32, 64, &pages));
                let statuses = ask_all(&mut queue, &[request; 4]);
                assert!(statuses.iter().all(|status| [OKAY, ERROR].contains(status)), "{statuses:?}");
                statuses.iter().filter(|status| **status == OKAY).count()
            };
            (0..40).map(each).sum::<usize>()
        });
        let asked = street.world.disk.take_did();
        // The disk is asked before the data are brought to pages that may be bad by then.
        assert!(asked.len() >= sound);
        for did in asked {
            let (Did::Read(at, len) | Did::Write { at, len, .. }) = did else { panic!("{did:?}") };
            assert!(at == 64 * 512 && len % 512 == 0 && (32 * 512..=32 * 4096).contains(&len), "{access:?} {did:?}");
        }
        street.assert_well(front, vec![queue]);
    }
}

/// Case 22: the guest has its own pages written over, and nothing else.
#[test]
fn pages_of_segments_that_are_data_and_pages_of_the_ring() {
    for access in ACCESSES {
        let mut street = Street::new(access);
        street.world.disk.set_bytes(0, &pattern(5, 65536));
        let persistent = access == Access::Persistent;
        let (front, mut queue) = street.connect(BlkfrontOptions { persistent, ..large() });
        queue.grant_all(0);
        let gref = queue.indirect_grants(0).next().unwrap();
        let own = SegmentEntry { gref, first_sect: 0, last_sect: 7 };
        let pages = fill_indirect(&queue, &[own; 3]);
        let statuses = ask_all(&mut queue, &[Request::Indirect(indirect(op::READ, 3, 0, &pages)); 1]);
        assert_eq!(statuses, [OKAY], "{access:?}");
        assert_eq!(
            page(&queue, gref).to_vec(),
            pattern(5, 65536)[8192..12288],
            "the last of three lies over the others"
        );
        // The ring as a page of segments is whatever is in it, which makes no sense.
        let ring_ref = queue.ring_refs()[0];
        assert_eq!(ask(&mut queue, indirect(op::READ, 32, 0, &[ring_ref])), ERROR, "{access:?}");
        // The ring filled from the disk: an index that makes no sense ends it, or nothing does.
        let mut over = plain(&queue, op::READ, 1, 0);
        over.segments[0].gref = ring_ref;
        queue.ring_mut().push(&Request::Plain(over));
        queue.publish();
        queue.kick();
        street.wait_broken();
        street.assert_well(front, vec![queue]);
    }
}

/// Case 23, as far as it is rude: barriers alone, each after the other, with writes in between; see also
/// [`crate::requests`].
#[test]
fn barriers_back_to_back() {
    for access in ACCESSES {
        let mut street = Street::new(access);
        let (front, mut queue) = street.connect(options(access));
        queue.grant_all(0);
        let barrier = |pages, sector| Request::Plain(plain(&queue, op::WRITE_BARRIER, pages, sector));
        let bad = Request::Plain(PlainRequest { nr_segments: 99, ..plain(&queue, op::WRITE_BARRIER, 1, 0) });
        let read = Request::Plain(plain(&queue, op::READ, 1, 0));
        let mut batch = vec![read, read];
        (0..6).for_each(|_| batch.extend([barrier(0, 0), barrier(1, 8), bad, barrier(1, SIZE / 512), read]));
        let wanted: Vec<_> = [OKAY, OKAY].into_iter().chain([OKAY, OKAY, ERROR, ERROR, OKAY].repeat(6)).collect();
        assert_eq!(ask_all(&mut queue, &batch), wanted, "{access:?}");
        street.assert_well(front, vec![queue]);
    }
}

/// Case 24.
#[test]
fn one_page_in_all_segments_of_a_read() {
    for access in ACCESSES {
        let mut street = Street::new(access);
        street.world.disk.set_bytes(0, &pattern(9, 65536));
        let (front, mut queue) = street.connect(options(access));
        queue.grant_all(0);
        let mut request = plain(&queue, op::READ, 11, 0);
        let gref = request.segments[0].gref;
        request.segments.iter_mut().for_each(|segment| segment.gref = gref);
        assert_eq!(ask_all(&mut queue, &[Request::Plain(request); 8]), [OKAY; 8], "{access:?}");
        assert_eq!(page(&queue, gref).to_vec(), pattern(9, 65536)[40960..45056], "the last one's");
        street.assert_well(front, vec![queue]);
    }
}

/// Case 25: sectors are of 512 bytes whatever the disk is made of.
#[test]
fn requests_that_are_not_aligned_to_4096_bytes() {
    run(Setup::new, small(), |queue| {
        let mut odd = plain(queue, op::WRITE, 3, 7);
        let parts = [(1, 1), (3, 6), (7, 7)];
        odd.segments.iter_mut().zip(parts).for_each(|(segment, (first, last))| {
            (segment.first_sect, segment.last_sect) = (first, last);
        });
        vec![
            sent(odd, OKAY, Some(Did::Write { at: 3584, len: 3072, fua: false })),
            sent(PlainRequest { op: op::READ, sector: 1, ..odd }, OKAY, Some(Did::Read(512, 3072))),
        ]
    });
}
