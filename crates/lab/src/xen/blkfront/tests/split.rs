//! Split rings: what a front end does when its back end has taken requests, or says so.

use std::time::Duration;

use crate::queue::{Completion, GuestQueue};
use spile_xen::blkif::split;
use spile_xen::store::Tx;

use super::*;

const INSTANT: Duration = Duration::from_micros(1);

fn split_world(abi: Abi, depth: usize) -> World {
    world(BlkfrontOptions { abi, depth, split_response_order: Some(0), data_bytes: 4096, ..Default::default() })
}

impl World {
    /// The back end has taken so many in all; the front end has a moment to see it.
    fn have_taken(&mut self, count: u32) {
        self.queue.ring().set_requests_taken(count);
        assert!(!self.queue.sleep(INSTANT).unwrap(), "nothing is answered");
        assert_eq!(self.queue.take().unwrap(), None);
    }

    /// The slot that the `number`th request is of.
    fn slot_of(&self, number: u32) -> u64 {
        self.request(number).id() & 0xffff
    }
}

/// A page holds 32 requests and the back end takes some at a time: all come, in order, never more than there is room
/// for.
#[test]
fn requests_for_which_there_is_no_slot_wait_until_others_are_taken() {
    for (abi, start) in [(Abi::X86_64, 0), (Abi::X86_32, u32::MAX - 70)] {
        let mut world = split_world(abi, 1000);
        world.queue.ring_mut().start_at(start);
        assert_eq!((world.queue.slots(), world.queue.ring().slots()), (128, 32));
        (0..100).for_each(|slot| world.queue.submit(slot, Op::Flush, 0, 0));
        world.queue.publish();
        assert_eq!((world.queue.waiting(), world.queue.ring().index(index::REQ_PROD)), (68, start.wrapping_add(32)));
        let (mut taken, mut seen) = (0, 0);
        let mut requests = Vec::new();
        while taken < 128 {
            let shown = world.queue.ring().index(index::REQ_PROD).wrapping_sub(start);
            assert!(shown <= taken + 32, "{shown} are shown, and {taken} taken");
            for number in seen..shown {
                assert_eq!(world.slot_of(start.wrapping_add(number)), u64::from(number), "they come in order");
                requests.push(world.request(start.wrapping_add(number)));
            }
            seen = shown;
            if taken == 30 {
                // Now there is a slot, and still those that wait go first.
                world.queue.ring().set_requests_taken(start.wrapping_add(45));
                (100..128).for_each(|slot| world.queue.submit(slot, Op::Flush, 0, 0));
                world.queue.publish();
            }
            taken = (taken + 15).min(seen);
            world.have_taken(start.wrapping_add(taken));
        }
        assert_eq!((world.queue.waiting(), world.queue.outstanding()), (0, 128));
        assert_eq!(world.queue.ring().free(), 0, "so many answers have room");
        requests.iter().for_each(|request| world.answer_well(request));
        for slot in 0..128 {
            assert_eq!(world.queue.take().unwrap(), Some(Completion { slot, status: 0 }));
        }
        assert_eq!((world.queue.take().unwrap(), world.queue.ring().free()), (None, 32));
    }
}

#[test]
fn a_slot_that_is_free_again_is_used_within_whatever_one_does() {
    let steps: [fn(&mut Queue); 4] = [
        Queue::publish,
        |queue| assert_eq!(queue.take().unwrap(), None),
        |queue| assert!(!queue.sleep(Duration::from_millis(5)).unwrap()),
        |queue| assert!(!queue.spin(INSTANT).unwrap()),
    ];
    for (number, step) in steps.into_iter().enumerate() {
        let mut world = split_world(Abi::X86_64, 128);
        (0..40).for_each(|slot| world.queue.submit(slot, Op::Flush, 0, 0));
        world.queue.publish();
        assert_eq!((world.queue.waiting(), world.queue.ring().free()), (8, 0));
        world.queue.ring().set_requests_taken(5);
        step(&mut world.queue);
        let shown = world.queue.ring().index(index::REQ_PROD);
        assert_eq!((shown, world.queue.waiting(), world.slot_of(36)), (37, 3, 36), "{number}");
    }
}

/// A back end may say that it has taken what is shown, not more, and has to say so before it answers.
#[test]
fn a_wrong_count_of_what_was_taken_is_an_error() {
    for (told, answers) in [(4, 0), (1 << 31, 0), (u32::MAX, 0), (4, 1), (0, 1), (1, 2)] {
        let mut world = split_world(Abi::X86_64, 128);
        (0..3).for_each(|slot| world.queue.submit(slot, Op::Flush, 0, 0));
        world.queue.publish();
        (0..answers).for_each(|number| world.answer_well(&world.request(number)));
        world.queue.ring().set_requests_taken(told);
        let error = world.queue.take().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
        assert!(error.to_string().contains("which cannot be"), "{error}");
    }
}

/// One that takes its word back frees no slot that it may still have to read.
#[test]
fn a_count_that_goes_back_frees_nothing() {
    let mut world = split_world(Abi::X86_64, 128);
    (0..64).for_each(|slot| world.queue.submit(slot, Op::Flush, 0, 0));
    world.queue.publish();
    world.have_taken(32);
    assert_eq!(world.queue.ring().index(index::REQ_PROD), 64);
    world.queue.ring().set_requests_taken(16);
    assert_eq!(world.queue.ring().free(), 0);
    world.queue.submit(64, Op::Flush, 0, 0);
    assert_eq!(world.queue.waiting(), 1);
}

#[test]
fn the_keys_say_where_each_ring_is_and_how_large() {
    for (wanted, order) in [(0, 0), (1, 1), (9, 2)] {
        let dir = tempfile::tempdir().unwrap();
        let options =
            BlkfrontOptions { split_response_order: Some(wanted), depth: 1000, data_bytes: 4096, ..Default::default() };
        let (_host, mut front) = front(dir.path(), options);
        assert!(front.negotiate().unwrap().splits_rings);
        let queues = front.prepare().unwrap();
        let path = front.path().to_owned();
        let mut key = |name: &str| front.store().read_optional(Tx::NONE, &format!("{path}/{name}")).unwrap();
        assert_eq!((key(split::WANTED), key(split::ORDER)), (Some("1".into()), Some(order.to_string())));
        assert_eq!((queues[0].slots(), queues[0].response_refs().len()), (128 << order, 1 << order));
        for (page, gref) in queues[0].response_refs().iter().enumerate() {
            assert_eq!(key(&format!("spile-response-ref{page}")), Some(gref.0.to_string()));
        }
        let hypervisor = Hypervisor::connect(dir.path()).unwrap();
        let mapped = hypervisor.map_ring(DomId(3), queues[0].response_refs()).unwrap();
        queues[0].ring().response_bytes().fill(7);
        assert_eq!(mapped.read_array(4095), [7]);
        assert_ne!(queues[0].ring().bytes().read_array(4095), [7], "they are two rings");
    }
}

/// What an earlier connection has written would have the back end look for rings that are not there.
#[test]
fn a_front_end_that_wants_one_ring_says_so_where_split_ones_are_offered() {
    let dir = tempfile::tempdir().unwrap();
    let (_host, mut front) = front(dir.path(), BlkfrontOptions { split_response_order: Some(0), ..Default::default() });
    front.negotiate().unwrap();
    front.prepare().unwrap();
    let mut other = Blkfront::new(front.guest().clone(), 51712, BlkfrontOptions::default()).unwrap();
    other.negotiate().unwrap();
    let queues = other.prepare().unwrap();
    assert!(!queues[0].ring().is_split() && queues[0].response_refs().is_empty());
    let key = format!("{}/{}", other.path(), split::WANTED);
    assert_eq!(other.store().read_string(Tx::NONE, &key).unwrap(), "0");
}
