//! Rings of hostile guests: indices, notices, padding, and slots that change while they are read (cases 1 to 12).

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::Duration;

use spile_core::Segment;
use spile_front_blkif::pages::Access;
use spile_front_blkif::ring::{Ring, SLOT_BYTES, SharedPages};
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op, Queue};
use spile_xen::blkif::{Abi, PlainRequest, RING_HEADER_BYTES, Request, Response, index, op, status};

use crate::common::disk::Did;
use crate::common::hostile::{ABIS, Street, ask_all, assert_reads, beside, next_response, numbered, options, plain};
use crate::common::{ACCESSES, PATIENCE, next, request, wait_until};

/// Case 1, with requests at work: they are answered, and no more is taken.
#[test]
fn an_index_too_far_ahead_breaks_the_ring() {
    for access in ACCESSES {
        let mut street = Street::new(access);
        let (front, mut queue) = street.connect(options(access));
        street.world.disk.hold();
        (0..3).for_each(|slot| queue.submit(slot, Op::Read, 4096 * slot as u64, 4096));
        queue.publish();
        wait_until("the reads are at work", || street.world.disk.held() == 3);
        queue.ring().set_index(index::REQ_PROD, 33);
        queue.kick();
        street.neighbour.assert_served();
        street.world.disk.release();
        let mut slots: Vec<_> = (0..3).map(|_| next(&mut queue)).collect();
        slots.sort_unstable();
        assert_eq!(slots, [(0, status::OKAY), (1, status::OKAY), (2, status::OKAY)]);
        street.wait_broken();
        street.world.disk.take_did();
        // Not even when its index makes sense again.
        queue.ring().set_index(index::REQ_PROD, 4);
        queue.kick();
        let before = street.rest();
        assert!(!queue.ring().has_response());
        assert_eq!(street.world.disk.take_did(), []);
        assert_eq!(street.rest(), before, "a broken ring costs nothing");
        street.assert_well(front, vec![queue]);
    }
}

/// Case 2.
#[test]
fn an_index_far_away_or_going_back_breaks_the_ring() {
    let mut street = Street::new(Access::Copy);
    for (taken, claimed) in [(0, 1 << 31), (0, u32::MAX), (3, 2), (3, 3 + (1 << 31)), (32, 31), (32, 0), (5, u32::MAX)]
    {
        let (front, mut queue) = street.connect(options(Access::Copy));
        (0..taken).for_each(|_| assert_reads(&mut queue));
        street.world.disk.take_did();
        queue.ring().set_index(index::REQ_PROD, claimed);
        queue.kick();
        street.wait_broken();
        assert_eq!(street.world.disk.take_did(), [], "{taken} {claimed}");
        assert_eq!(queue.ring().index(index::RSP_PROD), taken, "{taken} {claimed}");
        street.assert_well(front, vec![queue]);
    }
}

/// Case 3, at every way to the guest's memory and in both layouts.
#[test]
fn indices_wrap_while_the_ring_is_full() {
    for access in ACCESSES {
        let mut street = Street::new(access);
        for abi in ABIS {
            let options = BlkfrontOptions { abi, ..options(access) };
            let (mut front, mut queues) =
                street.prepare(options, |_, queues| queues[0].ring_mut().start_at(u32::MAX - 40));
            front.finish().unwrap();
            for round in 0..4 {
                street.world.disk.hold();
                let queue = &mut queues[0];
                (0..32).for_each(|slot| queue.submit(slot, Op::Write, 4096 * slot as u64, 512));
                queue.publish();
                wait_until("all are at work", || street.world.disk.held() == 32);
                street.world.disk.release();
                let mut slots: Vec<_> = (0..32).map(|_| next(queue)).collect();
                slots.sort_unstable();
                assert_eq!(slots, (0..32).map(|slot| (slot, status::OKAY)).collect::<Vec<_>>(), "{abi:?} {round}");
            }
            assert_eq!(queues[0].ring().index(index::RSP_PROD), (u32::MAX - 40).wrapping_add(128));
            street.assert_well(front, queues);
        }
    }
}

/// Case 4: at worst a notice too many or too few, of which the guest cannot complain. All is answered.
#[test]
fn event_indices_may_be_scribbled_on() {
    let mut street = Street::new(Access::Copy);
    let (front, mut queue) = street.connect(options(Access::Copy));
    let bytes = queue.ring().bytes().clone();
    let scribble = |round: u32| {
        let at = if round.is_multiple_of(2) { index::REQ_EVENT } else { index::RSP_EVENT };
        bytes.store_u32(at, round.wrapping_mul(0x9e37_79b9), Ordering::Relaxed);
    };
    beside(scribble, || {
        for round in 0..500 {
            queue.submit(0, Op::Read, 512 * (round % 8), 512);
            queue.publish();
            queue.kick();
            assert!(queue.spin(PATIENCE).unwrap(), "no answer");
            assert_eq!(queue.take().unwrap().map(|done| done.status), Some(status::OKAY));
        }
    });
    street.rest();
    street.assert_well(front, vec![queue]);
}

/// Case 5.
#[test]
fn the_index_of_responses_may_be_written_over() {
    let mut street = Street::new(Access::Copy);
    let (front, mut queue) = street.connect(options(Access::Copy));
    for round in 0..200u32 {
        queue.ring().set_index(index::RSP_PROD, [0, round.wrapping_sub(1), 7777, u32::MAX][round as usize % 4]);
        queue.submit(0, Op::Read, 0, 512);
        queue.publish();
        queue.kick();
        wait_until("the back end's own index", || queue.ring().index(index::RSP_PROD) == round + 1);
        assert_eq!(queue.take().unwrap().map(|done| (done.slot, done.status)), Some((0, status::OKAY)));
    }
    street.assert_well(front, vec![queue]);
}

/// Slots are rewritten between two readings while the back end takes them, `rounds` times all of them; what the disk
/// was asked for.
fn race(street: &mut Street, queue: &mut Queue, rounds: usize, readings: [Request; 2]) -> Vec<Did> {
    let (abi, ring) = (queue.ring().abi(), queue.ring().bytes().clone());
    let slots = readings.map(|reading| {
        let mut slot = [0; 112];
        reading.encode(abi, &mut slot);
        slot
    });
    // All but the id.
    let id_at = if abi == Abi::X86_64 { 8 } else { 4 };
    let flip = |round: u32| {
        let slot = &slots[(round / 32 % 2) as usize];
        let at = RING_HEADER_BYTES + (round % 32) as usize * abi.slot_bytes();
        ring.copy_from_slice(at, &slot[..4]);
        ring.copy_from_slice(at + id_at + 8, &slot[id_at + 8..abi.slot_bytes()]);
    };
    street.world.disk.take_did();
    beside(flip, || {
        for _ in 0..rounds {
            (0..32).for_each(|id| {
                // The upper half of a response's number lies where no request is rewritten.
                queue.ring_mut().push(&numbered(readings[0], id << 32));
            });
            queue.publish();
            queue.kick();
            assert_answered_once(queue, 32);
        }
    });
    street.world.disk.take_did()
}

/// Takes so many answers, whose ids are all different and below that; the racing thread may write over all else.
fn assert_answered_once(queue: &mut Queue, count: usize) {
    let mut seen = vec![false; count];
    for _ in 0..count {
        // Asleep, so that the racing thread and the back end have the processors.
        while !queue.ring().has_response() {
            assert!(queue.sleep(PATIENCE).unwrap(), "no answer");
        }
        let response = queue.ring_mut().pop().unwrap().unwrap();
        let seen = &mut seen[(response.id >> 32) as usize];
        assert!(!std::mem::replace(seen, true), "{} is answered twice", response.id);
    }
    assert!(!queue.ring().has_response());
}

/// Cases 6 and 7.
#[test]
fn slots_that_change_while_they_are_read_have_one_meaning() {
    for access in ACCESSES {
        let mut street = Street::new(access);
        for abi in ABIS {
            let (front, mut queue) = street.connect(BlkfrontOptions { abi, ..options(access) });
            queue.grant_all(0);
            let short = Request::Plain(plain(&queue, op::READ, 1, 0));
            let long = Request::Plain(plain(&queue, op::WRITE, 11, 1024));
            let asked = race(&mut street, &mut queue, 60, [short, long]);
            assert!(!asked.is_empty());
            for did in asked {
                // A mixture of both is a request too, as the guest may have sent it.
                let is_one = match did {
                    Did::Read(at, len) | Did::Write { at, len, fua: false } => {
                        [0, 1024 * 512].contains(&at) && [4096, 11 * 4096].contains(&len)
                    }
                    _ => false,
                };
                assert!(is_one, "{access:?} {abi:?}: {did:?}");
            }
            street.assert_well(front, vec![queue]);
        }
    }
}

/// The same between a sound request and one that is refused, in both of what a slot can be.
#[test]
fn slots_that_change_to_what_is_refused_are_done_or_refused() {
    let mut street = Street::new(Access::Copy);
    let (front, mut queue) = street.connect(options(Access::Copy));
    queue.grant_all(0);
    let good = plain(&queue, op::READ, 2, 8);
    let mut bad = PlainRequest { nr_segments: 255, sector: u64::MAX, op: op::DISCARD, ..good };
    bad.segments.iter_mut().for_each(|segment| segment.last_sect = 9);
    let asked = race(&mut street, &mut queue, 3000, [Request::Plain(good), Request::Plain(bad)]);
    for did in asked {
        match did {
            Did::Read(at, len) => assert!(at % 512 == 0 && at + len <= crate::common::SIZE && len == 8192, "{did:?}"),
            // Of the two readings' bytes some make a discard that lies within the disk.
            Did::Discard(at, len) => assert!(at + len <= crate::common::SIZE, "{did:?}"),
            _ => panic!("{did:?}"),
        }
    }
    street.assert_well(front, vec![queue]);
}

/// Memory that is another at each look, and counts the looks.
#[derive(Default)]
struct Restless {
    loads: Cell<u32>,
    reads: Cell<u32>,
}

impl SharedPages for &Restless {
    fn load(&self, _: usize, _: Ordering) -> u32 {
        self.loads.set(self.loads.get() + 1);
        self.loads.get()
    }

    fn store(&self, _: usize, _: u32, _: Ordering) {}

    fn fence(&self) {}

    fn read(&self, at: usize, into: &mut [u8]) {
        assert!(at >= RING_HEADER_BYTES && at + into.len() <= 4096);
        self.reads.set(self.reads.get() + 1);
        into.fill(self.reads.get() as u8);
    }

    fn write(&self, _: usize, _: &[u8]) {}
}

/// Cases 6 and 7 without luck: there is no second look that could see anything else.
#[test]
fn indices_and_slots_are_looked_at_once() {
    for abi in ABIS {
        let memory = Restless::default();
        let ring = Ring::over(&memory, abi, 0, 0, 0);
        for taken in 1..=32 {
            let mut slot = [0; SLOT_BYTES];
            assert_eq!(ring.pop(&mut slot), Ok(true));
            assert_eq!((memory.loads.get(), memory.reads.get()), (taken, taken));
            assert_eq!(slot[..abi.slot_bytes()], vec![taken as u8; abi.slot_bytes()]);
        }
    }
}

/// Case 8.
#[test]
fn requests_of_the_same_number_are_all_answered() {
    let mut street = Street::new(Access::Copy);
    let (front, mut queue) = street.connect(options(Access::Copy));
    queue.grant_all(0);
    street.world.disk.hold();
    let same: Vec<_> = [op::READ, op::WRITE, op::READ, op::FLUSH_DISKCACHE]
        .map(|kind| PlainRequest { id: 42, ..plain(&queue, kind, usize::from(kind != op::FLUSH_DISKCACHE), 0) })
        .into();
    same.iter().for_each(|request| queue.ring_mut().push(&Request::Plain(*request)));
    queue.publish();
    wait_until("all are at work", || street.world.disk.held() == 4);
    street.world.disk.release();
    let mut ops: Vec<_> = (0..4)
        .map(|number| {
            let response = next_response(&mut queue, number);
            assert_eq!((response.id, response.status), (42, status::OKAY));
            response.op
        })
        .collect();
    ops.sort_unstable();
    assert_eq!(ops, [op::READ, op::READ, op::WRITE, op::FLUSH_DISKCACHE]);
    street.assert_well(front, vec![queue]);
}

/// Case 9.
#[test]
fn a_storm_of_kicks_on_an_empty_ring_costs_no_more_than_its_kicks() {
    const KICKS: u64 = 20_000;
    let mut street = Street::new(Access::Copy);
    let (front, queue) = street.connect(options(Access::Copy));
    let before = street.rest();
    let notices = street.world.device().metrics()[0].notifications;
    (0..KICKS).for_each(|_| queue.kick());
    street.neighbour.assert_served();
    let after = street.rest();
    assert!(after.0 - before.0 <= 2 * KICKS + 100, "{KICKS} kicks led to {} polls", after.0 - before.0);
    assert!(after.1 - before.1 <= 2 * KICKS + 100, "{KICKS} kicks led to {} sleeps", after.1 - before.1);
    assert_eq!(street.world.device().metrics()[0].notifications, notices, "there is nothing to tell");
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(street.rest(), after, "an idle ring causes no wake-up at all");
    street.assert_well(front, vec![queue]);
}

/// Case 10: requests at all moments of the back end's falling asleep, with kicks only when they are asked for.
#[test]
fn no_request_is_lost_when_the_back_end_falls_asleep() {
    let mut street = Street::new(Access::Copy);
    let (front, mut queue) = street.connect(options(Access::Copy));
    for round in 0..1500u32 {
        assert_eq!(request(&mut queue, Op::Flush, 0, 0), status::OKAY);
        (0..(round * 37) % 3000).for_each(|_| std::hint::spin_loop());
    }
    street.rest();
    // Shown without a kick though one was asked for: whatever the next kick is for, it is found.
    let flush = plain(&queue, op::FLUSH_DISKCACHE, 0, 0);
    queue.ring_mut().push(&Request::Plain(flush));
    assert!(queue.ring_mut().publish(), "a kick is asked for");
    street.rest();
    queue.kick();
    assert_eq!(next_response(&mut queue, 1500).status, status::OKAY);
    street.assert_well(front, vec![queue]);
}

/// Puts a request into a slot, whatever is there.
fn overwrite(ring: &Segment, abi: Abi, number: u32, request: &Request) {
    let mut slot = [0; 112];
    request.encode(abi, &mut slot);
    ring.copy_from_slice(RING_HEADER_BYTES + (number % 32) as usize * abi.slot_bytes(), &slot[..abi.slot_bytes()]);
}

/// Case 11: the responses are the guest's to lose.
#[test]
fn responses_that_nobody_takes_hold_up_nothing() {
    for access in [Access::Copy, Access::Persistent] {
        let mut street = Street::new(access);
        let (front, queue) = street.connect(options(access));
        queue.grant_all(0);
        let (ring, abi) = (queue.ring().bytes().clone(), queue.ring().abi());
        for round in 0..20u32 {
            for number in 32 * round..32 * (round + 1) {
                let wanted = PlainRequest { id: u64::from(number), ..plain(&queue, op::READ, 1, 0) };
                overwrite(&ring, abi, number, &Request::Plain(wanted));
            }
            queue.ring().set_index(index::REQ_PROD, 32 * (round + 1));
            queue.kick();
            wait_until("the answers", || queue.ring().index(index::RSP_PROD) == 32 * (round + 1));
            let answers: Vec<_> = (0..32).map(|number| Response::decode(&queue.ring().slot(number).to_vec())).collect();
            let mut ids: Vec<_> = answers.iter().map(|answer| answer.id).collect();
            ids.sort_unstable();
            assert_eq!(ids, (u64::from(32 * round)..u64::from(32 * (round + 1))).collect::<Vec<_>>());
        }
        street.assert_well(front, vec![queue]);
    }
}

/// Case 12: no byte of ours that is not meant for the guest is in a response ([`next_response`] looks at those of all
/// tests), and none behind it.
#[test]
fn bytes_of_responses_that_mean_nothing_are_zero() {
    for abi in ABIS {
        let mut street = Street::new(Access::Copy);
        let (front, mut queue) = street.connect(BlkfrontOptions { abi, ..options(Access::Copy) });
        queue.grant_all(0);
        for (number, id) in [0, 1, u64::MAX, 0x0102_0304_0506_0708].into_iter().enumerate() {
            let mut slot = vec![0; abi.slot_bytes()];
            let wanted = PlainRequest { id, ..plain(&queue, op::READ, 11, 0) };
            Request::Plain(wanted).encode(abi, &mut slot);
            queue.ring_mut().push_bytes(&slot);
            queue.publish();
            assert_eq!(next_response(&mut queue, number as u32), Response { id, op: op::READ, status: status::OKAY });
            let left = queue.ring().slot(number as u32).to_vec();
            assert_eq!(left[abi.response_bytes()..], slot[abi.response_bytes()..], "the guest's own bytes");
        }
        let unknown = Request::Plain(plain(&queue, 255, 1, 0));
        assert_eq!(ask_all(&mut queue, &[unknown]), [status::EOPNOTSUPP]);
        street.assert_well(front, vec![queue]);
    }
}
