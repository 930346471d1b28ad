//! What hostile guests leave behind when they do the same over and over: no descriptor, no mapping, no memory to speak of,
//! and few lines in the log.
//!
//! A program of its own: the counts are those of the whole process.
#![forbid(unsafe_code)]

mod common;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::hostile::{Street, ask, ask_all, options, plain};
use common::{ACCESSES, GUEST, Setup, wait_until, write};
use spile_front_blkif::pages::Access;
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op};
use spile_xen::GrantRef;
use spile_xen::blkif::{Request, index, op, status};
use spile_xen::store::{Tx, XenStore};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// The tests take turns.
static TURN: Mutex<()> = Mutex::new(());

/// Counts what is logged.
struct Lines;

static LINES: AtomicUsize = AtomicUsize::new(0);

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        LINES.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Files that are open, and mappings.
fn kept() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (std::fs::read_dir("/proc/self/fd").unwrap().count(), maps.lines().count())
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Runs `each` often; nothing is left of it but what the first few times have left.
fn stays_flat(access: Access, rounds: usize, each: impl FnMut(&mut Street, usize)) {
    let lines = stays_small(access, rounds, each);
    assert!(lines <= 24, "{rounds} times have cost {lines} lines in the log");
}

/// The same with any number of lines in the log, which it tells.
fn stays_small(access: Access, rounds: usize, mut each: impl FnMut(&mut Street, usize)) -> usize {
    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    let _ = tracing::subscriber::set_global_default(Lines);
    let mut street = Street::new(access);
    (0..8).for_each(|round| each(&mut street, round));
    street.rest();
    let ((files, maps), memory, lines) = (kept(), resident_kib(), LINES.load(Ordering::Relaxed));
    (8..rounds).for_each(|round| each(&mut street, round));
    // What the engine lets go of, it may let go of a moment later. The system's allocator keeps a few mappings of its own.
    wait_until("files are closed", || kept().0 <= files + 2);
    wait_until("mappings are gone", || kept().1 <= maps + 24);
    let grown = resident_kib().saturating_sub(memory);
    assert!(grown < 24 << 10, "{rounds} times have cost {grown} KiB");
    street.neighbour.assert_served();
    LINES.load(Ordering::Relaxed) - lines
}

#[test]
fn connections() {
    for access in ACCESSES {
        stays_flat(access, 60, |street, _| {
            let several = BlkfrontOptions { queues: 3, ring_order: 2, depth: 4, ..options(access) };
            let (front, mut queues) = street.world.connect(several);
            queues.iter_mut().for_each(|queue| write(queue, 0, &[1; 4096]));
            street.assert_well(front, queues);
        });
    }
}

#[test]
fn back_ends() {
    stays_flat(Access::Persistent, 60, |street, _| {
        let (front, mut queue) = street.connect(options(Access::Persistent));
        write(&mut queue, 0, &[1; 4096]);
        street.world.stop();
        queue.submit(0, Op::Read, 0, 4096);
        queue.publish();
        street.world.serve();
        assert_eq!(common::next(&mut queue), (0, status::OKAY));
        street.assert_well(front, vec![queue]);
    });
}

#[test]
fn rings_that_are_broken() {
    for access in ACCESSES {
        stays_flat(access, 80, |street, round| {
            let (front, mut queue) = street.connect(options(access));
            write(&mut queue, 0, &[1; 4096]);
            queue.ring().set_index(index::REQ_PROD, [77, 0, 1 << 31][round % 3]);
            queue.kick();
            street.wait_broken();
            street.assert_well(front, vec![queue]);
        });
    }
}

/// What is wrong is found at the last of several queues, when the others are at work.
#[test]
fn handshakes_that_are_refused() {
    for (key, value) in [("queue-1/event-channel", "999"), ("queue-1/ring-ref", "31000"), ("queue-1/ring-ref", "x")] {
        // Each time another back end complains, once.
        stays_small(Access::Copy, 80, |street, _| {
            let several = BlkfrontOptions { queues: 2, depth: 4, ..options(Access::Copy) };
            let (mut front, queues) = street.prepare(several, |front, _| front.write_key(key, value).unwrap());
            street.assert_refused(key, &mut front);
            let path = format!("{}/queue-1", front.path());
            front.store().remove(Tx::NONE, &path).unwrap();
            street.assert_well(front, queues);
        });
    }
}

#[test]
fn handshakes_that_one_back_end_refuses() {
    stays_flat(Access::Copy, 150, |street, _| {
        let mut front = street.world.front(options(Access::Copy));
        front.negotiate().unwrap();
        front.write_key("ring-page-order", "31").unwrap();
        let queues = front.prepare().unwrap();
        street.assert_refused("a ring of 2^31 pages", &mut front);
        let path = format!("{}/ring-page-order", front.path());
        front.store().remove(Tx::NONE, &path).unwrap();
        street.assert_well(front, queues);
    });
}

#[test]
fn requests_that_are_refused() {
    for access in ACCESSES {
        stays_flat(access, 200, |street, round| {
            let (front, mut queue) = street.connect(options(access));
            queue.grant_all(0);
            let mut bad = plain(&queue, [op::READ, op::WRITE][round % 2], 11, 0);
            bad.segments[round % 11].gref = GrantRef(u32::MAX);
            let batch = [Request::Plain(bad); 32];
            (0..10).for_each(|_| assert_eq!(ask_all(&mut queue, &batch), [status::ERROR; 32]));
            let outside = plain(&queue, op::READ, 1, u64::MAX);
            assert_eq!(ask(&mut queue, outside), status::ERROR);
            front_goes(front, queue);
        });
    }
}

/// Ends a connection as quickly as it goes.
fn front_goes(mut front: spile_lab::xen::Blkfront, queue: spile_lab::xen::blkfront::Queue) {
    front.stop(vec![queue]).unwrap();
    front.set_state(1).unwrap();
    wait_until("another offer", || front.backend_state().unwrap() == 2);
}

/// Case 37.
#[test]
fn floods_of_writes_to_what_is_watched() {
    stays_flat(Access::Copy, 60, |street, round| {
        let mut store = XenStore::open(&street.world.guest.xenstored()).unwrap();
        let state = format!("/local/domain/{GUEST}/device/vbd/51712/state");
        for number in 0..200 {
            store.write(Tx::NONE, &format!("{state}/{round}-{number}"), "x").unwrap();
        }
        (0..200).for_each(|number| store.remove(Tx::NONE, &format!("{state}/{round}-{number}")).unwrap());
        let (front, mut queue) = street.connect(options(Access::Copy));
        write(&mut queue, 0, &[1; 512]);
        front_goes(front, queue);
    });
}

/// What the tests above rely on.
#[test]
fn what_is_logged_is_counted() {
    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    let _ = tracing::subscriber::set_global_default(Lines);
    let mut street = Street::with(Setup::new(Access::Copy));
    let before = LINES.load(Ordering::Relaxed);
    let (front, mut queue) = street.connect(options(Access::Copy));
    let outside = plain(&queue, op::READ, 1, u64::MAX);
    assert_eq!(ask(&mut queue, outside), status::ERROR);
    wait_until("the line", || LINES.load(Ordering::Relaxed) > before);
    street.assert_well(front, vec![queue]);
}
