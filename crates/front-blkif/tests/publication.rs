//! The publication of a ring's indices under every interleaving of the two sides that the memory model allows: no request
//! and no response stays unseen, nobody sleeps for ever, and what is seen is whole.

use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, fence};
use loom::sync::{Arc, Notify};
use loom::thread;
use spile_front_blkif::ring::{Ring, SLOT_BYTES, Shared};
use spile_xen::blkif::{Abi, RING_HEADER_BYTES, Response, index, status};

/// Requests in all.
const COUNT: u32 = 2;

/// The header of a ring and its first slots; of each slot's bytes only whether it was written.
struct Memory {
    numbers: [AtomicU32; 4],
    slots: Vec<UnsafeCell<u32>>,
    /// The event channel's two ends.
    kick: Notify,
    call: Notify,
}

impl Memory {
    fn new() -> Self {
        Self {
            // req_prod, req_event, rsp_prod, rsp_event: as a front end makes them.
            numbers: [0, 1, 0, 1].map(AtomicU32::new),
            slots: (0..COUNT).map(|_| UnsafeCell::new(0)).collect(),
            kick: Notify::new(),
            call: Notify::new(),
        }
    }

    fn slot(&self, at: usize) -> &UnsafeCell<u32> {
        &self.slots[(at - RING_HEADER_BYTES) / SLOT_BYTES]
    }
}

struct Side(Arc<Memory>);

impl Shared for Side {
    fn load(&self, at: usize, order: Ordering) -> u32 {
        self.0.numbers[at / 4].load(order)
    }

    fn store(&self, at: usize, value: u32, order: Ordering) {
        self.0.numbers[at / 4].store(value, order);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    fn read(&self, at: usize, into: &mut [u8]) {
        // The model reports a read that races with a write.
        into[0] = self.0.slot(at).with(read) as u8;
    }

    fn write(&self, at: usize, from: &[u8]) {
        self.0.slot(at).with_mut(|number| write(number, u32::from(from[0])));
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
fn guest(memory: &Memory) {
    let load = |at: usize, order| memory.numbers[at / 4].load(order);
    let mut answered = 0;
    for sent in 1..=COUNT {
        memory.slots[sent as usize - 1].with_mut(|number| write(number, sent));
        memory.numbers[index::REQ_PROD / 4].store(sent, Ordering::Release);
        fence(Ordering::SeqCst);
        let event = load(index::REQ_EVENT, Ordering::Relaxed);
        if sent.wrapping_sub(event) < 1 {
            memory.kick.notify();
        }
    }
    while answered < COUNT {
        let shown = load(index::RSP_PROD, Ordering::Acquire);
        for response in answered..shown {
            memory.slots[response as usize].with(read_response);
        }
        answered = shown;
        if answered == COUNT {
            return;
        }
        memory.numbers[index::RSP_EVENT / 4].store(answered + 1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if load(index::RSP_PROD, Ordering::Relaxed) == answered {
            memory.call.wait();
        }
    }
}

fn read_response(number: *const u32) {
    read(number);
}

#[test]
fn nothing_is_missed_whatever_the_order() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let memory = Arc::new(Memory::new());
        let theirs = memory.clone();
        let front = thread::spawn(move || guest(&theirs));
        let ring = Ring::over(Side(memory.clone()), Abi::X86_64, 0, 0, 0);
        let mut slot = [0; SLOT_BYTES];
        while ring.rsp_prod() < COUNT {
            while ring.pop(&mut slot).expect("the guest keeps to the rules") {
                let before = ring.published();
                ring.put(&Response { id: 0, op: 0, status: status::OKAY });
                ring.publish();
                if ring.wants_notice(before) {
                    memory.call.notify();
                }
            }
            if ring.rsp_prod() < COUNT && !ring.arm() {
                memory.kick.wait();
            }
        }
        front.join().unwrap();
    });
}
