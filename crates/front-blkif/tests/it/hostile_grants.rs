//! Grants of hostile guests (cases 27, 28 and 30; 29 is among the requests).

use spile_front_blkif::device::End;
use spile_front_blkif::pages::Access;
use spile_lab::xen::Entry;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op, Queue};
use spile_xen::blkif::{PlainRequest, Request, SegmentEntry, op, status};
use spile_xen::{DomId, GrantRef};

use crate::common::hostile::{Street, ask, ask_all, assert_reads, beside, fill_indirect, indirect, options, plain};
use crate::common::{ACCESSES, read, wait_until, write};

const OKAY: i16 = status::OKAY;
const ERROR: i16 = status::ERROR;

fn large(access: Access) -> BlkfrontOptions {
    BlkfrontOptions { indirect_segments: 256, data_bytes: 128 << 10, depth: 4, ..options(access) }
}

/// Grants that are none, or not ours.
fn bad_grants(queue: &Queue) -> Vec<(&'static str, GrantRef)> {
    let guest = queue.guest();
    let frames = guest.take_frames(1).unwrap();
    let foreign = guest.grant(DomId(3), frames.first, false).unwrap();
    let freed = guest.grant(DomId(0), frames.first, false).unwrap();
    assert!(guest.table().end_access(freed));
    let outside = guest.grant(DomId(0), u32::MAX, false).unwrap();
    vec![
        ("never granted", GrantRef(0)),
        ("behind the table", GrantRef(guest.table().entries())),
        ("far behind it", GrantRef(u32::MAX)),
        ("foreign", foreign),
        ("freed", freed),
        ("of a page that the guest has not", outside),
    ]
}

/// Case 27.
#[test]
fn grants_that_are_none_fail_their_request_only() {
    for access in ACCESSES {
        let mut street = Street::new(access);
        let (front, mut queue) = street.connect(large(access));
        queue.grant_all(0);
        for (what, gref) in bad_grants(&queue) {
            for kind in [op::READ, op::WRITE, op::WRITE_BARRIER, op::FLUSH_DISKCACHE] {
                let good = Request::Plain(plain(&queue, kind, 11, 8));
                let mut bad = plain(&queue, kind, 11, 8);
                bad.segments[10].gref = gref;
                let statuses = ask_all(&mut queue, &[good, Request::Plain(bad), good, good]);
                assert_eq!(statuses, [OKAY, ERROR, OKAY, OKAY], "{access:?} {what} {kind}");
            }
            for kind in [op::READ, op::WRITE] {
                // Its pages of segments are the same for all; so it goes alone.
                let all: Vec<_> =
                    queue.grants(0).map(|gref| SegmentEntry { gref, first_sect: 0, last_sect: 7 }).collect();
                for place in [0, 17, 31] {
                    let mut segments = all.clone();
                    segments[place].gref = gref;
                    let pages = fill_indirect(&queue, &segments);
                    assert_eq!(ask(&mut queue, indirect(kind, 32, 8, &pages)), ERROR, "{access:?} {what} {place}");
                    let pages = fill_indirect(&queue, &all);
                    assert_eq!(ask(&mut queue, indirect(kind, 32, 8, &pages)), OKAY, "{access:?} {what} {place}");
                }
            }
        }
        street.assert_well(front, vec![queue]);
    }
}

/// What is not granted is not written to the disk: neither whole nor in part.
#[test]
fn a_write_of_which_a_page_is_bad_changes_nothing() {
    for access in ACCESSES {
        let mut street = Street::new(access);
        let (front, mut queue) = street.connect(options(access));
        queue.grant_all(0);
        street.world.disk.take_did();
        let mut bad = plain(&queue, op::WRITE, 11, 8);
        bad.segments[5].gref = GrantRef(u32::MAX);
        assert_eq!(ask(&mut queue, bad), ERROR);
        assert_eq!(street.world.disk.take_did(), [], "{access:?}");
        street.assert_well(front, vec![queue]);
    }
}

/// Case 28, first half: nobody writes to a page that was granted for reading.
#[test]
fn a_page_granted_for_reading_is_not_written() {
    for access in ACCESSES {
        let mut street = Street::new(access);
        street.world.disk.set_bytes(0, &[0x55; 4096]);
        let (front, mut queue) = street.connect(options(access));
        let frames = queue.guest().take_frames(1).unwrap();
        let gref = queue.guest().grant(DomId(0), frames.first, true).unwrap();
        frames.bytes.fill(0x11);
        let mut request = plain(&queue, op::READ, 1, 0);
        request.segments[0].gref = gref;
        assert_eq!(ask(&mut queue, request), ERROR, "{access:?}");
        assert_eq!(frames.bytes.to_vec(), [0x11; 4096], "{access:?}");
        // Pages that stay mapped have to be good for both.
        let wanted = if access == Access::Persistent { ERROR } else { OKAY };
        assert_eq!(ask(&mut queue, PlainRequest { op: op::WRITE, sector: 8, ..request }), wanted, "{access:?}");
        assert_reads(&mut queue);
        assert!(queue.guest().end_access(gref), "{access:?}: it is in use no more");
        street.assert_well(front, vec![queue]);
    }
}

/// Case 28, second half: a thread of the guest's revokes grants and grants anew, in use or not, all the while.
#[test]
fn grants_that_come_and_go_under_copies() {
    for access in ACCESSES {
        let mut street = Street::new(access);
        let (front, mut queue) = street.connect(options(access));
        queue.grant_all(0);
        let (table, grefs) = (queue.guest().table().clone(), queue.grants(0).collect::<Vec<_>>());
        let entries: Vec<_> = grefs.iter().map(|gref| table.get(*gref)).collect();
        let come_and_go = |round: u32| {
            // Never another frame: an entry is not written at once, and the other page could be the ring.
            let (gref, entry) = (grefs[round as usize % 2], entries[round as usize % 2]);
            let shown =
                [entry, Entry { flags: 0, ..entry }, Entry { domain: 3, ..entry }, entry][round as usize / 2 % 4];
            table.set(gref, shown);
        };
        let (reads, writes) = (plain(&queue, op::READ, 11, 0), plain(&queue, op::WRITE, 11, 128));
        beside(come_and_go, || {
            for _ in 0..40 {
                let one = |number| Request::Plain(if number % 2 == 0 { reads } else { writes });
                let statuses = ask_all(&mut queue, &(0..32).map(one).collect::<Vec<_>>());
                assert!(statuses.iter().all(|status| [OKAY, ERROR].contains(status)), "{access:?} {statuses:?}");
            }
        });
        // Whatever marks of use the guest has wiped away or put back.
        grefs.iter().zip(&entries).for_each(|(gref, entry)| table.set(*gref, *entry));
        street.neighbour.assert_served();
        drop((front, queue));
    }
}

/// Case 30: what was mapped stays mapped, whatever the guest's table says; a new back end cannot map it, and says so.
#[test]
fn a_ring_that_is_revoked_is_served_until_the_end_of_its_back_end() {
    for access in ACCESSES {
        let mut street = Street::new(access);
        let (mut front, mut queue) = street.connect(options(access));
        let gref = queue.ring_refs()[0];
        let other = queue.guest().take_frames(1).unwrap();
        let entry = queue.guest().table().get(gref);
        for shown in [Entry::default(), Entry { frame: other.first, ..entry }, Entry { domain: 3, ..entry }] {
            queue.guest().table().set(gref, shown);
            write(&mut queue, 0, &[7; 512]);
            assert_eq!(read(&mut queue, 0, 512), [7; 512]);
        }
        assert_eq!(street.world.stop(), End::Stopped);
        street.world.serve();
        assert_eq!(front.wait_for(&[5]).unwrap(), 5, "{access:?}");
        assert!(!street.world.device().has_ended(), "{access:?}: the guest may begin anew");
        street.assert_well(front, vec![queue]);
    }
}

/// Case 30, again: the ring's page becomes another after the guest has said where it is, and before it is mapped.
#[test]
fn a_ring_of_pages_that_are_not_granted_is_refused() {
    for gref in [0, 32768, u32::MAX] {
        let mut street = Street::new(Access::Copy);
        let (mut front, queues) = street.prepare(options(Access::Copy), |front, _| {
            front.write_key("ring-ref", &gref.to_string()).unwrap();
        });
        street.assert_refused(&format!("ring {gref}"), &mut front);
        street.assert_well(front, queues);
    }
    let mut street = Street::new(Access::Copy);
    let (mut front, queues) = street.prepare(options(Access::Copy), |_, queues| {
        let gref = queues[0].ring_refs()[0];
        let entry = queues[0].guest().table().get(gref);
        queues[0].guest().table().set(gref, Entry { flags: entry.flags | spile_lab::xen::flag::READONLY, ..entry });
    });
    street.assert_refused("a ring granted for reading", &mut front);
    street.assert_well(front, queues);
}

/// With pages that stay mapped, a guest may have as many as it likes: few are kept.
#[test]
fn pages_that_stay_mapped_are_bounded() {
    let mut street = Street::new(Access::Persistent);
    let (front, mut queue) = street.connect(options(Access::Persistent));
    let guest = queue.guest().clone();
    let frames = guest.take_frames(3000).unwrap();
    let grefs: Vec<_> = (0..3000).map(|n| guest.grant(DomId(0), frames.first + n, false).unwrap()).collect();
    for chunk in grefs.chunks(10) {
        let mut request = plain(&queue, op::READ, chunk.len(), 0);
        request.segments.iter_mut().zip(chunk).for_each(|(segment, gref)| segment.gref = *gref);
        assert_eq!(ask(&mut queue, request), OKAY);
    }
    let in_use = |gref: &&GrantRef| guest.table().get(**gref).flags & spile_lab::xen::flag::READING != 0;
    let kept = grefs.iter().filter(in_use).count();
    assert!((900..=1056).contains(&kept), "{kept} are kept");
    assert_eq!(super::common::request(&mut queue, Op::Flush, 0, 0), OKAY);
    street.assert_well(front, vec![queue]);
    wait_until("all are let go", || grefs.iter().filter(in_use).count() == 0);
}
