//! Adaptive polling: what is watched is found without a ring, what is armed is rung for, and idle things cost nothing.

mod common;

use std::future::poll_fn;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use spile_engine::{Config, Engine, Event, Pollable, Watch};

each_engine![
    nothing_is_lost_between_looking_and_sleeping,
    what_is_armed_is_watched_no_more,
    an_idle_queue_costs_nothing,
    unwatched_things_are_not_woken,
    an_idle_queue_beside_a_busy_one_is_looked_at_no_more,
];

/// A mailbox as a guest's queue is one: a count that rises, and a ring that is used only when asked for.
#[derive(Default)]
struct Mailbox {
    sent: AtomicU64,
    wants_ring: AtomicBool,
    rings: AtomicU64,
    arms: AtomicU64,
}

impl Mailbox {
    fn send(&self, bell: &OwnedFd) {
        self.sent.fetch_add(1, Ordering::SeqCst);
        if self.wants_ring.swap(false, Ordering::SeqCst) {
            self.rings.fetch_add(1, Ordering::Relaxed);
            rustix::io::write(bell, &1u64.to_ne_bytes()).unwrap();
        }
    }
}

/// The reader's view of it.
struct Reader {
    mailbox: Arc<Mailbox>,
    taken: std::cell::Cell<u64>,
}

impl Pollable for Reader {
    fn is_ready(&self) -> bool {
        self.mailbox.sent.load(Ordering::SeqCst) != self.taken.get()
    }

    fn arm(&self) -> bool {
        self.mailbox.arms.fetch_add(1, Ordering::Relaxed);
        self.mailbox.wants_ring.store(true, Ordering::SeqCst);
        self.is_ready()
    }
}

/// Takes `count` letters, then `last` is told.
async fn read(mailbox: Arc<Mailbox>, bell: Event, count: u64, taken: Arc<AtomicU64>) {
    let reader = Rc::new(Reader { mailbox, taken: 0.into() });
    let watch = Watch::new(reader.clone());
    let mut rung = Box::pin(bell.wait());
    poll_fn(|context| {
        loop {
            let sent = reader.mailbox.sent.load(Ordering::SeqCst);
            reader.taken.set(sent);
            taken.store(sent, Ordering::SeqCst);
            if sent >= count {
                return Poll::Ready(());
            }
            if rung.as_mut().poll(context).is_pending() {
                watch.begin(context.waker(), 1);
                return Poll::Pending;
            }
            rung.set(bell.wait());
        }
    })
    .await;
}

fn bell() -> (OwnedFd, Event) {
    let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    (fd.try_clone().unwrap(), Event::from_fd(fd).unwrap())
}

/// Starts a reader of `count` letters on worker 0; the mailbox, its bell, and what was taken.
fn reader(engine: &Engine, count: u64) -> (Arc<Mailbox>, OwnedFd, Arc<AtomicU64>) {
    let (mailbox, taken) = (Arc::new(Mailbox::default()), Arc::new(AtomicU64::new(0)));
    let (fd, event) = bell();
    let (there, counted) = (mailbox.clone(), taken.clone());
    engine.spawn_on(0, move || read(there, event, count, counted));
    (mailbox, fd, taken)
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..20_000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    panic!("never: {what}");
}

fn nothing_is_lost_between_looking_and_sleeping(engine: &Engine) {
    const LETTERS: u64 = 3000;
    let (mailbox, fd, taken) = reader(engine, LETTERS);
    for number in 1..=LETTERS {
        mailbox.send(&fd);
        // Pauses around the length of the window, so that the letter comes while it spins, sleeps, or is in between.
        for _ in 0..number % 97 * 20 {
            std::hint::spin_loop();
        }
        if number % 16 == 0 {
            wait_until("each letter is taken", || taken.load(Ordering::SeqCst) >= number);
        }
    }
    wait_until("all are taken", || taken.load(Ordering::SeqCst) >= LETTERS);
}

fn what_is_armed_is_watched_no_more(engine: &Engine) {
    let (mailbox, fd, taken) = reader(engine, 3);
    wait_until("it is armed", || mailbox.wants_ring.load(Ordering::SeqCst));
    let arms = mailbox.arms.load(Ordering::Relaxed);
    // Without a ring the worker cannot know of it: it sleeps.
    mailbox.sent.fetch_add(1, Ordering::SeqCst);
    engine.run_on(0, || async {});
    engine.run_on(0, || async {});
    assert_eq!((taken.load(Ordering::SeqCst), mailbox.arms.load(Ordering::Relaxed)), (0, arms));
    mailbox.send(&fd);
    wait_until("the ring was heard", || taken.load(Ordering::SeqCst) == 2);
    mailbox.send(&fd);
    wait_until("the end", || taken.load(Ordering::SeqCst) == 3);
}

fn an_idle_queue_costs_nothing(engine: &Engine) {
    let (mailbox, fd, taken) = reader(engine, 100);
    for number in 1..100 {
        mailbox.send(&fd);
        wait_until("it is taken", || taken.load(Ordering::SeqCst) == number);
    }
    wait_until("it is armed", || mailbox.wants_ring.load(Ordering::SeqCst));
    std::thread::sleep(Duration::from_millis(50));
    let (before, arms) = (engine.stats()[0], mailbox.arms.load(Ordering::Relaxed));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(engine.stats()[0], before);
    assert_eq!(mailbox.arms.load(Ordering::Relaxed), arms);
    mailbox.send(&fd);
    wait_until("the end", || taken.load(Ordering::SeqCst) == 100);
}

fn unwatched_things_are_not_woken(engine: &Engine) {
    struct Ready(AtomicU64);
    impl Pollable for Ready {
        fn is_ready(&self) -> bool {
            self.0.fetch_add(1, Ordering::Relaxed);
            true
        }
        fn arm(&self) -> bool {
            true
        }
    }
    let looks = engine.run_on(0, || async {
        let ready = Rc::new(Ready(AtomicU64::new(0)));
        let watch = Watch::new(ready.clone());
        poll_fn(|context| {
            watch.begin(context.waker(), 1);
            Poll::Ready(())
        })
        .await;
        drop(watch);
        spile_engine::sleep(Duration::from_millis(1)).await;
        ready.0.load(Ordering::Relaxed)
    });
    assert_eq!(looks, 0);
}

/// The worker never sleeps, so it never arms all. What is idle must be armed all the same, or each turn would look at all
/// the idle queues of a host.
fn an_idle_queue_beside_a_busy_one_is_looked_at_no_more(engine: &Engine) {
    let (mailbox, fd, taken) = reader(engine, 1);
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    engine.spawn_on(0, move || async move {
        poll_fn(|context| {
            context.waker().wake_by_ref();
            if stopped.load(Ordering::SeqCst) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    });
    wait_until("it is armed", || mailbox.wants_ring.load(Ordering::SeqCst));
    let sleeps = engine.stats()[0].sleeps;
    mailbox.send(&fd);
    wait_until("the ring was heard", || taken.load(Ordering::SeqCst) == 1);
    assert_eq!(mailbox.rings.load(Ordering::Relaxed), 1);
    assert_eq!(engine.stats()[0].sleeps, sleeps, "the worker was busy all the time");
    stop.store(true, Ordering::SeqCst);
}

#[test]
fn polling_finds_without_a_ring_and_zero_switches_it_off() {
    for (poll, may_spin) in [(Duration::from_millis(5), true), (Duration::ZERO, false)] {
        let engine = Engine::start(Config { workers: 1, poll, ..Config::default() }).unwrap();
        const LETTERS: u64 = 300;
        let (mailbox, fd, taken) = reader(&engine, LETTERS);
        for number in 1..=LETTERS {
            mailbox.send(&fd);
            wait_until("it is taken", || taken.load(Ordering::SeqCst) >= number);
        }
        let rings = mailbox.rings.load(Ordering::Relaxed);
        if may_spin {
            assert!(rings < LETTERS / 2, "{rings} rings for {LETTERS} letters");
        } else {
            assert!(rings > LETTERS / 2, "{rings} rings for {LETTERS} letters");
        }
        engine.shutdown();
    }
}
