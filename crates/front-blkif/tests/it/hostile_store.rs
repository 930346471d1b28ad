//! What hostile guests do in xenstore (cases 31 to 38 and 40).

use std::sync::atomic::{AtomicU32, Ordering};

use spile_core::ErrorKind;
use spile_front_blkif::device::End;
use spile_front_blkif::pages::Access;
use spile_lab::GuestQueue;
use spile_lab::xen::Blkfront;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op, Queue};
use spile_lab::xen::toolstack::{add_vbd, remove_vbd};
use spile_xen::blkif::{Abi, status};
use spile_xen::store::{Tx, XenStore};

use crate::common::hostile::{Street, beside, options};
use crate::common::{read, request, wait_until, write};

fn small() -> BlkfrontOptions {
    options(Access::Copy)
}

/// Each of these keys, with what the front end writes else, is refused; the same front end is served afterwards.
fn refused(options: &BlkfrontOptions, cases: &[(&str, &str)]) {
    let mut street = Street::new(Access::Copy);
    for (key, value) in cases {
        let shown = format!("{key} = {:?}", &value[..value.len().min(40)]);
        let rude = |front: &mut Blkfront, _: &mut [Queue]| front.write_key(key, value).unwrap();
        let (mut front, queues) = street.prepare(options.clone(), rude);
        street.assert_refused(&shown, &mut front);
        remove_key(&mut front, key);
        street.assert_well(front, queues);
    }
}

fn remove_key(front: &mut Blkfront, key: &str) {
    let path = format!("{}/{key}", front.path());
    front.store().remove(Tx::NONE, &path).unwrap();
}

const NO_NUMBERS: [&str; 9] = ["-1", "", " 1", "+1", "1 ", "0x4", "one", "4294967296", "00000000001"];

/// Case 31.
#[test]
fn orders_of_rings() {
    let long = "1".repeat(2000);
    let mut cases: Vec<_> = NO_NUMBERS.map(|value| ("ring-page-order", value)).into();
    // Of order 4 and 1 there are not the pages.
    cases.extend(["5", "31", "32", "4", "1", &long].map(|value| ("ring-page-order", value)));
    cases.extend(["0", "3", "17", "32", "16", &long].map(|value| ("num-ring-pages", value)));
    refused(&small(), &cases);
}

/// Case 32.
#[test]
fn numbers_of_queues() {
    let mut cases: Vec<_> = NO_NUMBERS.map(|value| ("multi-queue-num-queues", value)).into();
    // Of two there is but one.
    cases.extend(["0", "5", "65537", "2"].map(|value| ("multi-queue-num-queues", value)));
    refused(&small(), &cases);
}

/// Case 32, again.
#[test]
fn queues_that_share_pages_or_are_not_whole() {
    let mut street = Street::new(Access::Copy);
    let options = BlkfrontOptions { queues: 2, ring_order: 1, ..small() };
    for (key, from) in [("queue-1/ring-ref1", "queue-0/ring-ref0"), ("queue-0/ring-ref1", "queue-0/ring-ref0")] {
        let (mut front, queues) = street.prepare(options.clone(), |front, _| {
            let path = format!("{}/{from}", front.path());
            let other = front.store().read_string(Tx::NONE, &path).unwrap();
            front.write_key(key, &other).unwrap();
        });
        street.assert_refused(key, &mut front);
        street.assert_well(front, queues);
    }
    for key in ["queue-1", "queue-1/event-channel", "queue-0/ring-ref1"] {
        let (mut front, queues) = street.prepare(options.clone(), |front, _| remove_key(front, key));
        street.assert_refused(key, &mut front);
        street.assert_well(front, queues);
    }
}

/// Case 33.
#[test]
fn rings_and_event_channels() {
    let mut cases: Vec<_> = NO_NUMBERS.map(|value| ("ring-ref", value)).into();
    cases.extend(NO_NUMBERS.map(|value| ("event-channel", value)));
    cases.extend([("event-channel", "0"), ("event-channel", "999"), ("event-channel", "4294967295")]);
    refused(&small(), &cases);
    let mut street = Street::new(Access::Copy);
    for key in ["ring-ref", "event-channel"] {
        let (mut front, queues) = street.prepare(small(), |front, _| remove_key(front, key));
        street.assert_refused(key, &mut front);
        street.assert_well(front, queues);
    }
}

/// Case 33, again: nobody looks at them any more, until another back end does.
#[test]
fn keys_that_change_after_the_connection() {
    for (key, value) in
        [("ring-ref", "77"), ("event-channel", "zero"), ("protocol", "x86_32-abi"), ("ring-page-order", "4")]
    {
        let mut street = Street::new(Access::Copy);
        let (mut front, mut queue) = street.connect(small());
        front.write_key(key, value).unwrap();
        write(&mut queue, 0, &[3; 512]);
        assert_eq!(read(&mut queue, 0, 512), [3; 512]);
        assert_eq!(street.world.stop(), End::Stopped);
        street.world.serve();
        assert_eq!(front.wait_for(&[5]).unwrap(), 5, "{key}: the new one closes");
        street.neighbour.assert_served();
        remove_key(&mut front, key);
        street.assert_well(front, vec![queue]);
    }
}

/// Case 34.
#[test]
fn protocols() {
    refused(&small(), &["", "x86_128-abi", "X86_64-ABI", "x86_64-abi ", "native"].map(|value| ("protocol", value)));
    let mut street = Street::new(Access::Copy);
    let options = BlkfrontOptions { abi: Abi::X86_32, ..small() };
    let (mut front, mut queues) = street.prepare(options, |front, _| remove_key(front, "protocol"));
    front.finish().unwrap();
    write(&mut queues[0], 0, &[9; 512]);
    street.assert_well(front, queues);
}

/// Writes of the guest's own, beside those of its front end.
struct Scribbler {
    store: XenStore,
    path: String,
}

impl Scribbler {
    fn new(street: &Street) -> Self {
        let store = XenStore::open(&street.world.guest.xenstored()).unwrap();
        Self { store, path: street.world.vbd.frontend_path() }
    }

    fn write(&mut self, key: &str, value: &str) {
        self.store.write(Tx::NONE, &format!("{}/{key}", self.path), value).unwrap();
    }
}

/// Case 35: one ring, in and out of use as fast as the store goes, with requests in it all the while.
#[test]
fn states_at_full_rate() {
    for access in [Access::Copy, Access::Persistent] {
        let mut street = Street::new(access);
        let (mut front, mut queue) = street.connect(options(access));
        let scribbler = std::sync::Mutex::new(Scribbler::new(&street));
        let storm = |round: u32| {
            let states = ["3", "6", "3", "1", "3", "4", "6", "1", "3", "5", "6", "3", "1"];
            scribbler.lock().unwrap().write("state", states[round as usize % states.len()]);
        };
        beside(storm, || {
            for round in 0..60u64 {
                let slot = round as usize % queue.slots();
                if !queue.is_outstanding(slot) {
                    queue.submit(slot, Op::Write, 4096 * round, 4096);
                    queue.publish();
                }
                queue.kick();
                street.neighbour.assert_served();
                while queue.take().unwrap().is_some() {}
            }
        });
        // A state of before may still be on its way.
        Street::begin_again(&mut front);
        assert!(!street.world.device().has_ended());
        street.assert_well(front, vec![queue]);
    }
}

/// Case 36: what is no state ends the connection, as the end of the guest's folder does.
#[test]
fn states_that_are_none() {
    let long = "4".repeat(2000);
    let mut street = Street::new(Access::Copy);
    for state in ["0", "7", "8", "9", "-1", "", "four", "4\n", "\u{fffd}", &long] {
        let (mut front, mut queue) = street.connect(small());
        front.write_key("state", state).unwrap();
        assert_eq!(front.wait_for(&[6]).unwrap(), 6, "{state:?}");
        // It says 4 again, without a handshake: nobody serves its ring.
        front.set_state(4).unwrap();
        street.world.disk.take_did();
        queue.submit(0, Op::Write, 0, 512);
        queue.publish();
        queue.kick();
        street.neighbour.assert_served();
        street.rest();
        assert_eq!(street.world.disk.take_did(), [], "{state:?}");
        street.assert_well(front, vec![queue]);
    }
}

/// Case 36, again.
#[test]
fn a_guest_that_removes_its_folder() {
    let mut street = Street::new(Access::Copy);
    let (mut front, mut queue) = street.connect(small());
    write(&mut queue, 0, &[1; 512]);
    let path = front.path().to_owned();
    front.store().remove(Tx::NONE, &path).unwrap();
    assert_eq!(front.wait_for(&[6]).unwrap(), 6);
    street.neighbour.assert_served();
    assert!(!street.world.device().has_ended(), "the toolstack may add it again");
    add_vbd(&mut street.world.store, &street.world.vbd.clone()).unwrap();
    let (mut again, mut queues) = street.world.connect(small());
    assert_eq!(read(&mut queues[0], 0, 512), [1; 512]);
    again.stop(queues).unwrap();
    remove_vbd(&mut street.world.store, &street.world.vbd.clone()).unwrap();
    assert_eq!(street.world.ended(), End::Closed);
}

/// Case 37: a guest that writes below what is watched without end, always another node.
#[test]
fn floods_of_writes_to_what_is_watched() {
    let mut street = Street::new(Access::Copy);
    let (front, mut queue) = street.connect(small());
    write(&mut queue, 0, &[2; 512]);
    let scribbler = std::sync::Mutex::new(Scribbler::new(&street));
    let written = AtomicU32::new(0);
    let flood = |round: u32| {
        let mut scribbler = scribbler.lock().unwrap();
        scribbler.write(&format!("state/{}", round % 500), "x");
        scribbler.write("state", "4");
        if round % 500 == 499 {
            (0..500).for_each(|node| {
                let path = format!("{}/state/{node}", scribbler.path);
                scribbler.store.remove(Tx::NONE, &path).unwrap();
            });
        }
        written.fetch_add(1, Ordering::Relaxed);
    };
    beside(flood, || {
        for round in 0..4 {
            wait_until("the flood", || written.load(Ordering::Relaxed) > 700 * (round + 1));
            assert_eq!(request(&mut queue, Op::Read, 0, 512), status::OKAY);
            street.neighbour.assert_served();
            // Whoever wants the back end to end is heard.
            assert_eq!(street.world.stop(), End::Stopped);
            street.world.serve();
        }
        assert_eq!(request(&mut queue, Op::Read, 0, 512), status::OKAY);
    });
    assert!(!street.world.device().has_ended());
    street.assert_well(front, vec![queue]);
}

/// Case 37, while the back end waits for its disk and takes no news.
#[test]
fn floods_of_writes_that_nobody_takes() {
    let mut street = Street::new(Access::Copy);
    let (mut front, mut queue) = street.connect(small());
    street.world.disk.hold();
    queue.submit(0, Op::Read, 0, 512);
    queue.publish();
    wait_until("the read is at work", || street.world.disk.held() == 1);
    front.set_state(6).unwrap();
    let mut scribbler = Scribbler::new(&street);
    for round in 0..12 {
        (0..500).for_each(|node| scribbler.write(&format!("state/{round}-{node}"), "x"));
        for node in 0..500 {
            let path = format!("{}/state/{round}-{node}", scribbler.path);
            scribbler.store.remove(Tx::NONE, &path).unwrap();
        }
    }
    street.neighbour.assert_served();
    street.world.disk.release();
    // A store that does not get rid of its news may hang up on us; then the next back end begins.
    let device = street.world.device.as_ref().unwrap();
    wait_until("the end", || device.has_ended() || front.backend_state().unwrap() == 6);
    if street.world.device().has_ended() {
        let error = street.world.device.take().unwrap().wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        street.world.serve();
    }
    street.assert_well(front, vec![queue]);
}

/// Case 38: a slip of the toolstack's does not have us read another guest's keys.
#[test]
fn front_ends_that_are_not_the_guests() {
    let mut street = Street::new(Access::Copy);
    let own = street.world.vbd.frontend_path();
    street.world.stop();
    let others = [
        "/local/domain/8/device/vbd/51712",
        "/local/domain/7/../8/device/vbd/51712",
        "/local/domain/70/device/vbd/51712",
        "/local/domain/7",
        "/local/domain/0/backend/vbd/8/51712",
        "device/vbd/51712",
        "/",
        "",
    ];
    for path in others {
        street.world.set_backend_key("frontend", path);
        street.world.set_backend_key("state", "1");
        street.world.serve();
        wait_until("its end", || street.world.device.as_ref().unwrap().has_ended());
        let error = street.world.device.take().unwrap().wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{path:?}: {error}");
        assert_eq!(street.world.backend_key("state").as_deref(), Some("1"), "{path:?}: nothing is offered");
        street.neighbour.assert_served();
    }
    street.world.set_backend_key("frontend", &own);
    street.world.serve();
    let (front, queue) = street.connect(small());
    street.assert_well(front, vec![queue]);
}

/// Case 38, the guest's half: where it says that its back end is concerns nobody but itself.
#[test]
fn a_guest_that_names_another_back_end() {
    let mut street = Street::new(Access::Copy);
    let rude = |front: &mut Blkfront, _: &mut [Queue]| {
        front.write_key("backend", "/local/domain/0/backend/vbd/8/51712").unwrap();
        front.write_key("backend-id", "8").unwrap();
    };
    let (mut front, mut queues) = street.prepare(small(), rude);
    front.finish().unwrap();
    write(&mut queues[0], 0, &[4; 512]);
    assert_eq!(street.world.disk.bytes(0, 512), [4; 512]);
    street.assert_well(front, queues);
}

/// Case 40: an earlier driver used a larger ring, and has left its keys.
#[test]
fn keys_that_an_earlier_driver_has_left() {
    let mut street = Street::new(Access::Copy);
    let (mut front, mut queues) = street.prepare(small(), |front, _| {
        (0..4).for_each(|page| front.write_key(&format!("ring-ref{page}"), "31000").unwrap());
        front.write_key("queue-0/ring-ref", "31000").unwrap();
    });
    front.finish().unwrap();
    write(&mut queues[0], 0, &[5; 512]);
    street.assert_well(front, queues);
    // One that writes the order and the numbered key beside the other's.
    let options = BlkfrontOptions { numbered_ring_ref: true, ..small() };
    let (mut front, mut queues) = street.prepare(options, |front, _| front.write_key("ring-ref", "31000").unwrap());
    front.finish().unwrap();
    write(&mut queues[0], 0, &[6; 512]);
    street.assert_well(front, queues);
}
