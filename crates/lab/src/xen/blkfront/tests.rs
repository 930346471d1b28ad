//! Queues against answers that a test writes itself.

mod split;

use std::path::Path;
use std::sync::Arc;

use crate::queue::{Completion, GuestQueue};
use spile_core::ErrorKind;
use spile_xen::blkif::{Abi, RING_HEADER_BYTES, Request, Response, index, op, status};
use spile_xen::store::XenStore;
use spile_xen::{DomId, Grants};

use super::*;
use crate::xen::toolstack::{Vbd, add_vbd};
use crate::xen::{Guest, Host, Hypervisor};

struct World {
    queue: Queue,
    hypervisor: Hypervisor,
    _host: Host,
    _dir: tempfile::TempDir,
}

/// A front end whose back end has offered so many segments, and split rings to one that wants them, and nothing else.
fn front(dir: &Path, options: BlkfrontOptions) -> (Host, Blkfront) {
    let host = Host::start(dir).unwrap();
    let guest = Arc::new(Guest::create(dir, DomId(3), 32 << 20).unwrap());
    let mut store = XenStore::open(&host.xenstored()).unwrap();
    let mut vbd = Vbd::new(DomId(3), "x");
    for (key, value) in [("state", "2"), ("feature-max-indirect-segments", "256"), ("feature-persistent", "1")] {
        vbd.extra.push((key.into(), value.into()));
    }
    if options.split_response_order.is_some() {
        for (key, value) in [(spile_xen::blkif::split::FEATURE, "1"), ("max-ring-page-order", "2")] {
            vbd.extra.push((key.into(), value.into()));
        }
    }
    add_vbd(&mut store, &vbd).unwrap();
    let front = Blkfront::new(guest, vbd.device, options).unwrap();
    (host, front)
}

fn world(options: BlkfrontOptions) -> World {
    let dir = tempfile::tempdir().unwrap();
    let (host, mut front) = front(dir.path(), options);
    front.negotiate().unwrap();
    let queue = front.prepare().unwrap().remove(0);
    let hypervisor = Hypervisor::connect(dir.path()).unwrap();
    World { queue, hypervisor, _host: host, _dir: dir }
}

impl World {
    /// The request that was pushed `number`th.
    fn request(&self, number: u32) -> Request {
        Request::decode(self.queue.ring().abi(), &self.queue.ring().slot(number).to_vec())
    }

    /// Answers in the next place.
    fn answer(&self, response: Response) {
        let ring = self.queue.ring();
        let next = ring.index(index::RSP_PROD);
        let len = if ring.is_split() { 16 } else { ring.abi().response_bytes() };
        ring.response_slot(next).copy_from_slice(0, &response.encode()[..len]);
        ring.set_index(index::RSP_PROD, next.wrapping_add(1));
    }

    fn answer_well(&self, request: &Request) {
        self.answer(Response { id: request.id(), op: request.response_op(), status: status::OKAY });
    }
}

#[test]
fn requests_name_their_pages_and_these_are_granted_until_the_answer() {
    for abi in [Abi::X86_64, Abi::X86_32] {
        let mut world = world(BlkfrontOptions { abi, ..Default::default() });
        let refs: Vec<_> = world.queue.grants(2).collect();
        for (operation, is_writable) in [(Op::Read, true), (Op::Write, false)] {
            let number = world.queue.ring().index(index::REQ_PROD);
            world.queue.submit(2, operation, 8192, 4096 + 1024);
            world.queue.publish();
            let request = world.request(number);
            let Request::Plain(plain) = request else { panic!("{request:?}") };
            assert_eq!((plain.op, plain.nr_segments, plain.sector), (operation.raw(), 2, 16));
            let shown: Vec<_> = plain.segments[..2].iter().map(|s| (s.gref, s.first_sect, s.last_sect)).collect();
            assert_eq!(shown, [(refs[0], 0, 7), (refs[1], 0, 1)]);
            let map = |gref, is_writable| world.hypervisor.map(DomId(3), &[gref], is_writable);
            assert_eq!(map(refs[0], true).is_ok(), is_writable);
            assert!(map(refs[1], false).is_ok() && map(refs[2], false).is_err());
            world.answer_well(&request);
            assert_eq!(world.queue.take().unwrap(), Some(Completion { slot: 2, status: 0 }));
            let map = world.hypervisor.map(DomId(3), &refs[..1], false);
            assert!(map.is_err(), "revoked with the answer");
        }
    }
}

#[test]
fn many_segments_go_into_pages_of_their_own() {
    let options = BlkfrontOptions { depth: 2, data_bytes: 1 << 20, indirect_segments: 256, ..Default::default() };
    let mut world = world(options);
    world.queue.submit(1, Op::Write, 0, 12 * 4096 - 512);
    world.queue.publish();
    let Request::Indirect(indirect) = world.request(0) else { panic!() };
    assert_eq!((indirect.op, indirect.nr_segments), (op::WRITE, 12));
    let page = world.hypervisor.map(DomId(3), &indirect.pages[..1], false).unwrap();
    let refs: Vec<_> = world.queue.grants(1).take(12).collect();
    for (number, gref) in refs.iter().enumerate() {
        let bytes = page.as_slice()[0].read_array::<8>(8 * number);
        let last = if number == 11 { 6 } else { 7 };
        assert_eq!((bytes[..4].to_vec(), bytes[5]), (gref.0.to_le_bytes().to_vec(), last));
    }
    drop(page);
    // A back end that answers with 6 has lost this driver; so do we.
    world.answer(Response { id: indirect.id, op: op::INDIRECT, status: 0 });
    assert!(world.queue.take().unwrap_err().to_string().contains("which was operation 1"));
}

#[test]
fn what_is_not_outstanding_cannot_be_answered() {
    for change in [1u64, 1 << 16, 1 << 63] {
        let mut world = world(BlkfrontOptions::default());
        world.queue.submit(1, Op::Flush, 0, 0);
        world.queue.publish();
        let request = world.request(0);
        world.answer(Response { id: request.id() ^ change, op: op::FLUSH_DISKCACHE, status: 0 });
        assert_eq!(world.queue.take().unwrap_err().kind(), ErrorKind::Protocol, "{change:#x}");
    }
}

#[test]
fn a_second_answer_and_answers_without_requests_are_errors() {
    let mut world = world(BlkfrontOptions::default());
    world.queue.submit(1, Op::Flush, 0, 0);
    world.queue.submit(2, Op::Discard(false), 0, 512);
    world.queue.publish();
    let request = world.request(0);
    world.answer_well(&request);
    world.answer_well(&request);
    assert_eq!(world.queue.take().unwrap().map(|done| done.slot), Some(1));
    assert!(world.queue.is_outstanding(2) && !world.queue.is_outstanding(1));
    assert!(world.queue.take().unwrap_err().to_string().contains("not outstanding"));
    world.queue.ring().set_index(index::RSP_PROD, 1000);
    assert!(world.queue.take().unwrap_err().to_string().contains("more answers"));
}

#[test]
fn an_answer_before_the_pages_are_given_back_is_an_error() {
    let mut world = world(BlkfrontOptions::default());
    world.queue.submit(0, Op::Read, 0, 4096);
    world.queue.publish();
    let refs: Vec<_> = world.queue.grants(0).take(1).collect();
    let mapped = world.hypervisor.map(DomId(3), &refs, true).unwrap();
    world.answer_well(&world.request(0));
    assert!(world.queue.take().unwrap_err().to_string().contains("still uses"));
    drop(mapped);
}

#[test]
fn persistent_pages_stay_granted_and_the_guest_copies() {
    let mut world = world(BlkfrontOptions { persistent: true, ..Default::default() });
    let refs: Vec<_> = world.queue.grants(0).take(1).collect();
    let mapped = world.hypervisor.map(DomId(3), &refs, true).unwrap();
    world.queue.data(0).fill(1);
    world.queue.submit(0, Op::Write, 0, 4096);
    world.queue.publish();
    world.queue.data(0).fill(2);
    assert_eq!(mapped.as_slice()[0].read_array(4095), [1], "what was submitted");
    world.answer_well(&world.request(0));
    world.queue.take().unwrap().unwrap();
    world.queue.submit(0, Op::Read, 0, 4096);
    world.queue.publish();
    mapped.fill(3);
    assert_eq!(world.queue.data(0).as_slice()[0].read_array(0), [2]);
    world.answer_well(&world.request(1));
    world.queue.take().unwrap().unwrap();
    assert_eq!(world.queue.data(0).as_slice()[0].read_array(4095), [3]);
}

#[test]
fn scattered_pages_are_never_neighbours() {
    for scatter in [false, true] {
        let world = world(BlkfrontOptions { scatter, depth: 8, ..Default::default() });
        let addresses: Vec<_> = world.queue.data(1).iter().map(|page| page.as_ptr() as usize).collect();
        assert!(addresses.windows(2).all(|pair| (pair[1] - pair[0] == 4096) != scatter));
    }
}

#[test]
fn the_ring_says_when_the_back_end_wants_to_be_told() {
    let mut world = world(BlkfrontOptions::default());
    let ring = world.queue.ring_mut();
    ring.start_at(u32::MAX - 1);
    // req_event, requests that are pushed, whether it is told.
    for (event, count, told) in [(u32::MAX, 1, true), (u32::MAX, 1, false), (1, 1, true), (3, 1, false), (3, 2, true)] {
        ring.set_index(index::REQ_EVENT, event);
        (0..count).for_each(|_| ring.push_bytes(&[0; 8]));
        assert_eq!(ring.publish(), told, "{event:#x} at {:#x}", ring.index(index::REQ_PROD));
        assert!(!ring.publish(), "nothing new");
    }
    assert_eq!(ring.free(), 32 - 6);
    assert_eq!(ring.slot(32).as_ptr(), ring.slot(0).as_ptr(), "they go round");
    assert_eq!(ring.bytes().as_ptr() as usize + RING_HEADER_BYTES, ring.slot(0).as_ptr() as usize);
}

#[test]
fn a_back_end_that_does_not_come_is_not_waited_for_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let patience = std::time::Duration::from_millis(20);
    let (_host, mut front) = front(dir.path(), BlkfrontOptions { patience, ..Default::default() });
    front.negotiate().unwrap();
    front.prepare().unwrap();
    assert_eq!(front.finish().unwrap_err().kind(), ErrorKind::TimedOut);
    let error = Blkfront::new(front.guest().clone(), 51728, BlkfrontOptions::default()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}
