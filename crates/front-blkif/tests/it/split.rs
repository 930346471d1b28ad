//! Split rings: responses in a ring of their own, of guests that keep to the rules, of others, and over restarts.

use spile_front_blkif::device::End;
use spile_front_blkif::pages::Access;
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op, Queue};
use spile_xen::blkif::{index, split, status};
use spile_xen::store::Tx;

use crate::common::hostile::{ABIS, Street, options};
use crate::common::{ACCESSES, Setup, World, next, pattern, wait_until};

/// Requests in flight with one page of responses; a page of requests has 32.
const DEPTH: usize = 128;

fn split_options(access: Access) -> BlkfrontOptions {
    BlkfrontOptions { split_response_order: Some(0), depth: 1000, ..options(access) }
}

/// Takes so many answers: all good, of the slots from 0 on, one for each.
fn take_all(queue: &mut Queue, count: usize) {
    let mut slots: Vec<_> = (0..count).map(|_| next(queue)).collect();
    slots.sort_unstable();
    assert_eq!(slots, (0..count).map(|slot| (slot, status::OKAY)).collect::<Vec<_>>());
}

/// Asks for `len` bytes from each slot, side by side on the disk from `base` on.
fn submit_all(queue: &mut Queue, op: Op, base: u64, len: u32) {
    (0..queue.slots()).for_each(|slot| queue.submit(slot, op, base + u64::from(len) * slot as u64, len));
    queue.publish();
}

/// Writes from all slots at once, and reads with all.
fn write_and_read(queue: &mut Queue, base: u64, len: u32, seed: u64) {
    let slots = queue.slots();
    (0..slots).for_each(|slot| queue.data(slot).copy_from_slice(0, &pattern(seed + slot as u64, len as usize)));
    submit_all(queue, Op::Write, base, len);
    take_all(queue, slots);
    (0..slots).for_each(|slot| queue.data(slot).fill(0xee));
    submit_all(queue, Op::Read, base, len);
    take_all(queue, slots);
    for slot in 0..slots {
        let got = queue.data(slot).slice(0..len as usize).to_vec();
        assert!(got == pattern(seed + slot as u64, len as usize), "slot {slot}");
    }
}

/// Submits from all slots while the disk answers nothing, and waits until it has all of them.
fn fill(world: &World, queue: &mut Queue, op: Op) {
    world.disk.hold();
    submit_all(queue, op, 0, 512);
    wait_until("all are at work", || {
        // Here the front end sees that slots are free again.
        assert_eq!(queue.take().unwrap(), None);
        world.disk.held() == queue.slots()
    });
}

#[test]
fn data_are_right_at_a_depth_of_128_on_one_page() {
    for access in ACCESSES {
        let mut street = Street::new(access);
        for abi in ABIS {
            let (front, mut queue) = street.connect(BlkfrontOptions { abi, ..split_options(access) });
            assert_eq!((queue.slots(), queue.ring().slots(), queue.ring_refs().len()), (DEPTH, 32, 1));
            for round in 0..4 {
                write_and_read(&mut queue, 0, 8192, round * 1000);
                assert!(street.world.disk.bytes(8192 * 127, 8192) == pattern(round * 1000 + 127, 8192), "{access:?}");
            }
            street.assert_well(front, vec![queue]);
        }
    }
}

#[test]
fn larger_rings_several_queues_and_indirect_requests_are_split_too() {
    for access in [Access::Copy, Access::Persistent] {
        let many =
            BlkfrontOptions { split_response_order: Some(2), ring_order: 1, data_bytes: 512, ..split_options(access) };
        let long = BlkfrontOptions {
            queues: 3,
            indirect_segments: 16,
            data_bytes: 64 << 10,
            depth: 40,
            ..split_options(access)
        };
        for (options, rings, slots) in [(many, 1, 512), (long, 3, 40)] {
            let mut street = Street::new(access);
            let (front, mut queues) = street.world.connect(options);
            assert_eq!((queues.len(), queues[0].slots()), (rings, slots));
            let len = front.max_request_bytes();
            for round in 0..3 {
                queues.iter_mut().enumerate().for_each(|(number, queue)| {
                    write_and_read(queue, 0, len, 100 * round + number as u64);
                });
            }
            street.assert_well(front, queues);
        }
    }
}

/// Both rings are full, and all four indices go round.
#[test]
fn as_many_are_in_flight_as_responses_have_room_when_indices_wrap() {
    for abi in ABIS {
        let mut street = Street::new(Access::Copy);
        let options = BlkfrontOptions { abi, ..split_options(Access::Copy) };
        let start = u32::MAX - 200;
        let (mut front, mut queues) = street.prepare(options, |_, queues| queues[0].ring_mut().start_at(start));
        front.finish().unwrap();
        for round in 1..=4 {
            let queue = &mut queues[0];
            fill(&street.world, queue, Op::Write);
            let shown = start.wrapping_add(DEPTH as u32 * round);
            wait_until("all are given back", || queue.ring().requests_taken() == shown);
            assert_eq!((queue.waiting(), queue.ring().free()), (0, 0), "{abi:?} {round}");
            street.world.disk.release();
            wait_until("a full ring of responses", || queue.ring().index(index::RSP_PROD) == shown);
            take_all(queue, DEPTH);
        }
        street.assert_well(front, queues);
    }
}

/// There is room in the ring for 32 that were not taken, and for 128 that were not answered.
#[test]
fn a_guest_that_claims_more_than_there_is_room_for_breaks_its_ring() {
    let cases = [(0, 33), (3, 33), (100, 29), (128, 1), (128, 32), (128, u32::MAX), (5, u32::MAX - 4), (0, 1 << 31)];
    let mut street = Street::new(Access::Copy);
    for (at_work, more) in cases {
        let options = BlkfrontOptions { depth: at_work.max(1), ..split_options(Access::Copy) };
        let (front, mut queue) = street.connect(options);
        if at_work > 0 {
            fill(&street.world, &mut queue, Op::Read);
        }
        street.world.disk.take_did();
        queue.ring().set_index(index::REQ_PROD, (at_work as u32).wrapping_add(more));
        queue.kick();
        street.neighbour.assert_served();
        street.world.disk.release();
        if at_work > 0 {
            take_all(&mut queue, at_work);
        }
        street.wait_broken();
        assert_eq!(queue.ring().index(index::RSP_PROD), at_work as u32, "{at_work} {more}: nothing else is answered");
        assert_eq!(queue.ring().requests_taken(), at_work as u32, "{at_work} {more}: nor taken");
        assert_eq!(street.world.disk.take_did().len(), 0, "{at_work} {more}");
        street.assert_well(front, vec![queue]);
    }
}

/// The back end reads none of what it writes itself.
#[test]
fn what_the_back_end_writes_may_be_written_over() {
    let mut street = Street::new(Access::Copy);
    let (front, mut queue) = street.connect(split_options(Access::Copy));
    for round in 0..100u32 {
        let rude = [0, round.wrapping_sub(1), 7777, u32::MAX][round as usize % 4];
        queue.ring().set_requests_taken(rude);
        queue.ring().set_index(index::RSP_PROD, rude);
        queue.ring_mut().bytes().store_u32(index::RSP_EVENT, rude, std::sync::atomic::Ordering::Relaxed);
        // By hand: the front end believes what it reads.
        let flush = queue.draft(0, Op::Flush, 0, 0);
        let mut slot = [0; 112];
        flush.encode(queue.ring().abi(), &mut slot);
        queue.ring().slot(round).copy_from_slice(0, &slot);
        queue.ring().set_index(index::REQ_PROD, round + 1);
        queue.kick();
        wait_until("the back end's own indices", || {
            (queue.ring().requests_taken(), queue.ring().index(index::RSP_PROD)) == (round + 1, round + 1)
        });
    }
    street.assert_well(front, vec![queue]);
}

/// Bytes that mean nothing are zero in responses of both layouts, and nothing is written behind a response.
#[test]
fn responses_are_16_bytes_in_both_layouts() {
    for abi in ABIS {
        let mut street = Street::new(Access::Copy);
        let (front, mut queue) = street.connect(BlkfrontOptions { abi, ..split_options(Access::Copy) });
        queue.ring().response_bytes().slice(64..4096).fill(0xee);
        submit_all(&mut queue, Op::Flush, 0, 0);
        take_all(&mut queue, DEPTH);
        submit_all(&mut queue, Op::Flush, 0, 0);
        // In this round the answers lie over those of the first.
        take_all(&mut queue, DEPTH);
        for number in 0..DEPTH as u32 {
            let bytes = queue.ring().response_slot(number).to_vec();
            assert_eq!((bytes.len(), bytes[8], bytes[9]), (16, 3, 0));
            assert_eq!(bytes[10..], [0; 6]);
        }
        let tail = queue.ring().response_bytes().slice(64 + 16 * DEPTH..4096).to_vec();
        assert!(tail.iter().all(|byte| *byte == 0xee), "{abi:?}");
        street.assert_well(front, vec![queue]);
    }
}

#[test]
fn rings_of_responses_that_cannot_be_are_refused() {
    let mut street = Street::new(Access::Copy);
    let first = format!("{}0", split::REF);
    let cases = [
        (split::WANTED, "2"),
        (split::ORDER, "5"),
        (split::ORDER, "-1"),
        (split::ORDER, ""),
        // Its second page is not told.
        (split::ORDER, "1"),
        (first.as_str(), "x"),
        (first.as_str(), "4294967295"),
        (first.as_str(), "the ring's"),
    ];
    for (key, value) in cases {
        let (mut front, queues) = street.prepare(split_options(Access::Copy), |front, queues| {
            let own = queues[0].ring_refs()[0].0.to_string();
            front.write_key(key, if value == "the ring's" { &own } else { value }).unwrap();
        });
        street.assert_refused(&format!("{key} = {value:?}"), &mut front);
        street.assert_well(front, queues);
    }
}

#[test]
fn a_successor_goes_on_with_split_rings() {
    for access in ACCESSES {
        let mut world = Setup::new(access).start();
        let (mut front, mut queues) = world.connect(BlkfrontOptions { queues: 2, ..split_options(access) });
        for round in 0..5u64 {
            queues.iter_mut().for_each(|queue| write_and_read(queue, 0, 1024, round));
            assert_eq!(world.stop(), End::Stopped);
            for (number, queue) in queues.iter_mut().enumerate() {
                (0..DEPTH).for_each(|slot| queue.data(slot).copy_from_slice(0, &pattern(round + slot as u64, 4096)));
                submit_all(queue, Op::Write, number as u64 * (1 << 20), 4096);
                assert_eq!(queue.waiting(), DEPTH - 32, "nobody takes them");
            }
            world.serve();
            queues.iter_mut().for_each(|queue| take_all(queue, DEPTH));
            for base in [0, 1 << 20] {
                assert!(world.disk.bytes(base + 127 * 4096, 4096) == pattern(round + 127, 4096), "{access:?}");
            }
            assert_eq!(front.backend_state().unwrap(), 4);
        }
    }
}

/// All that was taken is answered before the process ends, which is more than the ring of requests holds.
#[test]
fn a_stop_waits_for_all_that_was_taken() {
    let mut world = Setup::new(Access::Copy).start();
    let (_front, mut queue) = world.connect_one(split_options(Access::Copy));
    fill(&world, &mut queue, Op::Write);
    let device = world.device.as_ref().unwrap();
    device.stop();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(!device.has_ended());
    world.disk.release();
    assert_eq!(world.stop(), End::Stopped);
    world.disk.take_did();
    world.serve();
    take_all(&mut queue, DEPTH);
    assert_eq!(world.disk.take_did(), [], "nothing was done twice");
}

/// What one connection has agreed on is nothing to the next, nor to whoever takes that over.
#[test]
fn rings_are_split_only_while_that_is_offered() {
    let mut world = Setup::new(Access::Copy).start();
    let mut front = world.front(split_options(Access::Copy));
    let mut queues = front.start().unwrap();
    for offers in [true, false, true, false] {
        assert_eq!((queues[0].ring().is_split(), queues[0].slots()), (offers, if offers { DEPTH } else { 32 }));
        write_and_read(&mut queues[0], 0, 4096, 5);
        world.stop();
        world.config.splits_rings = !offers;
        world.serve();
        write_and_read(&mut queues[0], 0, 4096, 6);
        // As with another program, which offers what it has.
        let key = format!("{}/{}", world.vbd.backend_path(), split::FEATURE);
        let _ = world.store.remove(Tx::NONE, &key);
        let refs: Vec<_> = queues[0].ring_refs().iter().chain(queues[0].response_refs()).copied().collect();
        front.stop(queues).unwrap();
        assert!(refs.iter().all(|gref| world.guest.table().get(*gref).flags == 0), "no ring is granted any more");
        queues = front.restart().unwrap();
    }
}
