//! The publication of a ring's indices under every interleaving of the two sides that the memory model allows: no
//! request and no response stays unseen, nobody sleeps for ever, and what is seen is whole. With one ring for both,
//! and with two, where a request's slot is used again as soon as it was taken.

use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, fence};
use loom::sync::{Arc, Notify};
use loom::thread;
use spile_front_blkif::ring::{Ring, SLOT_BYTES, SharedPages};
use spile_xen::blkif::{Abi, RING_HEADER_BYTES, Response, index, split, status};

/// Requests in all.
const COUNT: u32 = 2;

/// The header of a ring and its slots; of each slot's bytes only whether it was written.
struct Memory {
    numbers: [AtomicU32; 4],
    /// Fewer than the ring has: those with the next numbers are in the same places, as if the ring were so small.
    slots: Vec<UnsafeCell<u32>>,
    slot_bytes: usize,
}

impl Memory {
    fn new(slots: u32, slot_bytes: usize) -> Self {
        Self {
            // req_prod, req_event, rsp_prod, rsp_event: as a front end makes them.
            numbers: [0, 1, 0, 1].map(AtomicU32::new),
            slots: (0..slots).map(|_| UnsafeCell::new(0)).collect(),
            slot_bytes,
        }
    }

    fn slot(&self, at: usize) -> &UnsafeCell<u32> {
        &self.slots[(at - RING_HEADER_BYTES) / self.slot_bytes % self.slots.len()]
    }
}

/// What both sides share.
struct World {
    requests: Memory,
    /// With split rings.
    responses: Option<Memory>,
    /// The event channel's two ends.
    kick: Notify,
    call: Notify,
}

impl World {
    fn responses(&self) -> &Memory {
        self.responses.as_ref().unwrap_or(&self.requests)
    }
}

/// One of the memories, as the back end has it.
struct Side(Arc<World>, fn(&World) -> &Memory);

impl Side {
    fn memory(&self) -> &Memory {
        (self.1)(&self.0)
    }
}

impl SharedPages for Side {
    fn load(&self, at: usize, order: Ordering) -> u32 {
        self.memory().numbers[at / 4].load(order)
    }

    fn store(&self, at: usize, value: u32, order: Ordering) {
        self.memory().numbers[at / 4].store(value, order);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    fn read(&self, at: usize, into: &mut [u8]) {
        // The model reports a read that races with a write.
        into[0] = self.memory().slot(at).with(read) as u8;
    }

    fn write(&self, at: usize, from: &[u8]) {
        self.memory().slot(at).with_mut(|number| write(number, u32::from(from[0])));
    }
}

fn read(number: *const u32) -> u32 {
    // A pointer that the model has checked; without `unsafe` it can only be compared.
    u32::from(!number.is_null())
}

fn write(number: *mut u32, _value: u32) {
    assert!(!number.is_null());
}

/// What a front end does, as Linux's and our own do it (ring.h).
fn guest(world: &World) {
    let (requests, responses) = (&world.requests, world.responses());
    let places = requests.slots.len() as u32;
    for sent in 0..COUNT {
        // With one ring there is a place for each.
        while world.responses.is_some() && sent - requests.numbers[split::TAKEN / 4].load(Ordering::Acquire) >= places {
            thread::yield_now();
        }
        requests.slots[(sent % places) as usize].with_mut(|number| write(number, sent));
        requests.numbers[index::REQ_PROD / 4].store(sent + 1, Ordering::Release);
        fence(Ordering::SeqCst);
        let event = requests.numbers[index::REQ_EVENT / 4].load(Ordering::Relaxed);
        if (sent + 1).wrapping_sub(event) < 1 {
            world.kick.notify();
        }
    }
    let mut answered = 0;
    loop {
        let shown = responses.numbers[index::RSP_PROD / 4].load(Ordering::Acquire);
        for response in answered..shown {
            responses.slots[response as usize].with(read_response);
        }
        answered = shown;
        if answered == COUNT {
            return;
        }
        responses.numbers[index::RSP_EVENT / 4].store(answered + 1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if responses.numbers[index::RSP_PROD / 4].load(Ordering::Relaxed) == answered {
            world.call.wait();
        }
    }
}

fn read_response(number: *const u32) {
    read(number);
}

/// What a back end does, up to the last answer.
fn serve(ring: &Ring<Side>, world: &World) {
    let mut slot = [0; SLOT_BYTES];
    while ring.rsp_prod() < COUNT {
        while ring.pop(&mut slot).expect("the guest keeps to the rules") {
            ring.give_back();
            let before = ring.published();
            ring.put(&Response { id: 0, op: 0, status: status::OKAY });
            ring.publish();
            if ring.wants_notice(before) {
                world.call.notify();
            }
        }
        if ring.rsp_prod() < COUNT && !ring.arm() {
            world.kick.wait();
        }
    }
}

/// All that can happen with a request ring of so many places, and with responses in it or in a ring of their own.
fn check(places: u32, is_split: bool) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let world = Arc::new(World {
            requests: Memory::new(places, SLOT_BYTES),
            responses: is_split.then(|| Memory::new(COUNT, split::RESPONSE_BYTES)),
            kick: Notify::new(),
            call: Notify::new(),
        });
        let theirs = world.clone();
        let front = thread::spawn(move || guest(&theirs));
        let ring = Ring::over(Side(world.clone(), |world| &world.requests), Abi::X86_64, 0, 0, 0);
        let responses = || Side(world.clone(), World::responses);
        let ring = if is_split { ring.with_responses_over(responses(), 0) } else { ring };
        serve(&ring, &world);
        front.join().unwrap();
    });
}

#[test]
fn nothing_is_missed_whatever_the_order() {
    check(COUNT, false);
}

/// One place for two requests: the second is written when the first was taken, and not before.
#[test]
fn a_slot_is_used_again_when_its_request_was_taken() {
    check(1, true);
}

#[test]
fn nothing_is_missed_with_two_rings() {
    check(COUNT, true);
}
