//! The front end against a simple back end of its own.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use spile_core::ErrorKind;
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{Blkfront, BlkfrontOptions, Op, Queue};
use spile_lab::xen::toolstack::{Vbd, add_vbd, detach_vbd, remove_domain, remove_vbd, wait_closed};
use spile_lab::xen::{Guest, Host, state};
use spile_xen::blkif::{Abi, index, status};
use spile_xen::store::{Tx, XenStore};

use crate::backend::{Backend, Offers, has_node};
use crate::common::DOMAIN;

const DISK_BYTES: usize = 8 << 20;
const PATIENCE: Duration = Duration::from_secs(600);

struct World {
    backend: Option<Backend>,
    front: Blkfront,
    store: XenStore,
    offers: Offers,
    _host: Host,
    dir: tempfile::TempDir,
}

fn world(options: BlkfrontOptions) -> World {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(dir.path()).unwrap();
    let guest = Arc::new(Guest::create(dir.path(), DOMAIN, 64 << 20).unwrap());
    let mut store = XenStore::open(&host.xenstored()).unwrap();
    let vbd = Vbd::new(DOMAIN, "memory");
    add_vbd(&mut store, &vbd).unwrap();
    let keys = [
        ("feature-flush-cache", "1"),
        ("feature-persistent", "1"),
        ("feature-max-indirect-segments", "256"),
        ("max-ring-page-order", "4"),
        ("multi-queue-max-queues", "4"),
    ];
    let keys = keys.map(|(key, value)| (key, value.to_owned())).into();
    let disk = Arc::new(Mutex::new(vec![0; DISK_BYTES]));
    let offers = Offers { dir: dir.path().to_owned(), vbd, keys, disk };
    let front = Blkfront::new(guest, offers.vbd.device, options).unwrap();
    let backend = Some(Backend::start(offers.clone()));
    World { backend, front, store, offers, _host: host, dir }
}

/// Bytes that are others at each place.
fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| ((at / 512 * 31 + at + seed * 7) % 251) as u8).collect()
}

/// Fills all slots at once, again and again, with writes and then with reads.
fn write_and_read(queue: &mut Queue, base: u64, len: u32) {
    let slots = queue.slots();
    let offset = |slot: usize| base + slot as u64 * u64::from(len);
    for round in 0..3 {
        for op in [Op::Write, Op::Read] {
            for slot in 0..slots {
                let bytes = if op == Op::Write { pattern(slot + round, len as usize) } else { vec![0; len as usize] };
                queue.data(slot).copy_from_slice(0, &bytes);
                queue.submit(slot, op, offset(slot), len);
            }
            queue.publish();
            finish_all(queue);
        }
        for slot in 0..slots {
            assert!(queue.data(slot).slice(0..len as usize).to_vec() == pattern(slot + round, len as usize));
        }
    }
}

fn finish_all(queue: &mut Queue) {
    while queue.outstanding() > 0 {
        match queue.take().unwrap() {
            Some(done) => assert_eq!(done.status, status::OKAY),
            None => assert!(queue.sleep(PATIENCE).unwrap(), "no answer"),
        }
    }
}

#[test]
fn data_come_back_whatever_was_negotiated() {
    let plain = BlkfrontOptions::default;
    let cases = [
        plain(),
        BlkfrontOptions { abi: Abi::X86_32, ring_order: 4, depth: 64, data_bytes: 8192, ..plain() },
        BlkfrontOptions { numbered_ring_ref: true, persistent: true, ..plain() },
        BlkfrontOptions { ring_order: 1, indirect_segments: 256, data_bytes: 1 << 20, depth: 4, ..plain() },
        BlkfrontOptions { ring_order: 9, abi: Abi::X86_32, scatter: true, indirect_segments: 32, ..plain() },
        BlkfrontOptions {
            queues: 9,
            depth: 8,
            persistent: true,
            indirect_segments: 16,
            data_bytes: 1 << 16,
            ..plain()
        },
    ];
    for (number, options) in cases.into_iter().enumerate() {
        let mut world = world(options.clone());
        let mut queues = world.front.start().unwrap();
        assert_eq!(queues.len(), if options.queues == 1 { 1 } else { 4 });
        assert_eq!((world.front.disk().size_bytes(), world.front.features().flush), (DISK_BYTES as u64, true));
        let len = world.front.max_request_bytes();
        assert_eq!(len, if options.indirect_segments == 32 { 44 << 10 } else { options.data_bytes });
        for (place, queue) in queues.iter_mut().enumerate() {
            write_and_read(queue, place as u64 * (2 << 20), len);
        }
        let disk = world.offers.disk.lock().unwrap().clone();
        assert!(disk[..len as usize] == pattern(2, len as usize), "case {number}");
        queues[0].run_well(Op::Flush, 0, 0).unwrap();
        assert_eq!(queues[0].run_well(Op::Barrier, 0, 512).unwrap_err().kind(), ErrorKind::Unsupported);
        queues[0].run_well(Op::Discard(false), 512, 1024).unwrap();
        let expected = [&pattern(2, 512)[..], &[0; 1024]].concat();
        assert_eq!(queues[0].read(0, 1536).unwrap(), expected);
        assert_eq!(queues[0].read(DISK_BYTES as u64, 512).unwrap_err().kind(), ErrorKind::Io);
        world.front.stop(queues).unwrap();
    }
}

/// This back end knows nothing of split rings.
#[test]
fn one_ring_is_enough_where_two_are_not_offered() {
    let mut world = world(BlkfrontOptions { split_response_order: Some(1), depth: 128, ..Default::default() });
    let mut queue = world.front.start().unwrap().remove(0);
    assert!(!world.front.features().splits_rings && !queue.ring().is_split());
    assert_eq!((queue.slots(), queue.ring().max_in_flight()), (32, 32));
    write_and_read(&mut queue, 0, 4096);
    world.front.stop(vec![queue]).unwrap();
}

#[test]
fn indices_go_round() {
    let mut world = world(BlkfrontOptions::default());
    world.front.negotiate().unwrap();
    let mut queues = world.front.make_queues().unwrap();
    queues[0].ring_mut().start_at(u32::MAX - 70);
    world.front.write_keys(&queues).unwrap();
    world.front.set_state(state::INITIALISED).unwrap();
    world.front.finish().unwrap();
    write_and_read(&mut queues[0], 0, 4096);
    assert_eq!(queues[0].ring().index(index::RSP_PROD), (3 * 2 * 32u32).wrapping_sub(71));
}

#[test]
fn a_front_end_stops_and_starts_without_using_more() {
    let mut world = world(BlkfrontOptions::default());
    let mut queues = world.front.start().unwrap();
    for round in 0..60 {
        queues[0].write(round * 512, &[round as u8; 512]).unwrap();
        world.front.stop(queues).unwrap();
        queues = world.front.restart().unwrap();
    }
    assert_eq!(queues[0].read(59 * 512, 512).unwrap(), [59; 512]);
}

#[test]
fn a_killed_back_ends_successor_goes_on() {
    let mut world = world(BlkfrontOptions::default());
    let mut queue = world.front.start().unwrap().remove(0);
    queue.write(0, &[1; 512]).unwrap();
    for round in 0..5 {
        world.backend = None;
        // What is asked while nobody is there, is answered by the next.
        queue.submit(0, Op::Write, 512 * round, 512);
        queue.submit(1, Op::Read, 0, 512);
        queue.publish();
        assert!(!queue.sleep(Duration::from_millis(1)).unwrap());
        world.backend = Some(Backend::start(world.offers.clone()));
        finish_all(&mut queue);
        assert_eq!(world.front.backend_state().unwrap(), state::CONNECTED);
    }
}

#[test]
fn waiting_and_looking_both_find_an_answer_and_an_end() {
    let mut world = world(BlkfrontOptions::default());
    let mut queue = world.front.start().unwrap().remove(0);
    assert!(!queue.spin(Duration::from_millis(1)).unwrap() && !queue.sleep(Duration::from_millis(1)).unwrap());
    queue.submit(0, Op::Flush, 0, 0);
    queue.publish();
    assert!(queue.spin(PATIENCE).unwrap());
    assert!(queue.sleep(Duration::ZERO).unwrap());
    assert!(queue.take().unwrap().is_some());
}

#[test]
fn a_disk_is_detached_and_a_domain_leaves_nothing() {
    let mut world = world(BlkfrontOptions::default());
    let queues = world.front.start().unwrap();
    let back = world.offers.vbd.backend_path();
    detach_vbd(&mut world.store, &world.offers.vbd).unwrap();
    assert_eq!(world.store.read_string(Tx::NONE, &format!("{back}/online")).unwrap(), "0");
    assert_eq!(world.front.wait_for(&[state::CLOSING, state::CLOSED]).unwrap(), state::CLOSING);
    let brief = Duration::from_millis(10);
    assert_eq!(wait_closed(&mut world.store, &world.offers.vbd, brief).unwrap_err().kind(), ErrorKind::TimedOut);
    world.front.stop(queues).unwrap();
    wait_closed(&mut world.store, &world.offers.vbd, PATIENCE).unwrap();
    world.backend = None;
    remove_vbd(&mut world.store, &world.offers.vbd).unwrap();
    remove_vbd(&mut world.store, &world.offers.vbd).unwrap();
    assert!(!has_node(world.dir.path(), &back) && !has_node(world.dir.path(), world.front.path()));
    assert!(has_node(world.dir.path(), "/local/domain/3/domid"));
    remove_domain(&mut world.store, DOMAIN).unwrap();
    assert!(
        !has_node(world.dir.path(), "/local/domain/3") && !has_node(world.dir.path(), "/local/domain/0/backend/vbd/3")
    );
}

#[test]
fn each_side_may_write_its_own_folder_only() {
    let mut world = world(BlkfrontOptions::default());
    world.front.write_key("anything", "\u{e4}").unwrap();
    let path = format!("{}/state", world.front.backend_path());
    let store = world.front.store();
    assert_eq!(store.read_string(Tx::NONE, &path).unwrap().len(), 1);
    assert_eq!(store.write(Tx::NONE, &path, "4").unwrap_err().kind(), ErrorKind::Denied);
    assert_eq!(store.remove(Tx::NONE, &path).unwrap_err().kind(), ErrorKind::Denied);
}
