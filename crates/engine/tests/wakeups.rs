//! Each sleep of a worker is counted under what ended it.

mod common;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use common::*;
use spile_core::{Segment, Store, Via};
use spile_engine::{Engine, Event, Socket, WorkerStats, sleep};

/// What worker 1 has done.
fn stats(engine: &Engine) -> WorkerStats {
    engine.stats()[1]
}

fn is_asleep(stats: &WorkerStats) -> bool {
    stats.sleeps == wakeups(stats) + 1
}

fn wakeups(stats: &WorkerStats) -> u64 {
    stats.wakeups_kick + stats.wakeups_completion + stats.wakeups_control + stats.wakeups_timer
}

/// What worker 1 has done once it sleeps and nothing wakes it any more.
fn at_rest(engine: &Engine) -> WorkerStats {
    let mut last = stats(engine);
    loop {
        std::thread::sleep(Duration::from_millis(20));
        let now = stats(engine);
        if now == last && is_asleep(&now) {
            return now;
        }
        last = now;
    }
}

fn a_message_is_control(engine: &Engine) {
    let before = at_rest(engine);
    (0..5).for_each(|_| {
        engine.run_on(1, || async {});
        at_rest(engine);
    });
    let after = at_rest(engine);
    assert_eq!((after.wakeups_control - before.wakeups_control, wakeups(&after) - wakeups(&before)), (5, 5));
}

fn the_end_of_a_sleep_is_a_timer(engine: &Engine) {
    let before = at_rest(engine);
    engine.run_on(1, || async {
        for _ in 0..3 {
            sleep(Duration::from_millis(3)).await;
        }
    });
    let after = at_rest(engine);
    assert_eq!(after.wakeups_timer - before.wakeups_timer, 3, "{before:?} {after:?}");
    assert_eq!(after.wakeups_control - before.wakeups_control, 1);
}

fn a_sync_and_a_transfer_are_completions(engine: &Engine) {
    let (_dir, _path, store) = patterned(MIB);
    let before = at_rest(engine);
    engine.run_on(1, move || async move {
        store.write_at(at(0), &segments(&[4096]), Via::Cached).await.unwrap();
        store.sync().await.unwrap();
        store.read_at(at(0), &segments(&[4096]), Via::Direct).await.unwrap();
    });
    let after = at_rest(engine);
    // An operation may end before the worker sleeps.
    assert!((1..=3).contains(&(after.wakeups_completion - before.wakeups_completion)), "{before:?} {after:?}");
    assert_eq!((after.wakeups_kick, after.wakeups_timer), (before.wakeups_kick, before.wakeups_timer));
}

/// What comes on a socket is a guest's or a client's, unless the socket is one to a store.
fn bytes_on_a_socket(engine: &Engine, of_store: bool) -> [u64; 2] {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (sender, received) = std::sync::mpsc::channel();
    engine.spawn_on(1, move || async move {
        let socket = if of_store { Socket::to_store(ours.into()) } else { Socket::from_fd(ours.into()) }.unwrap();
        let into = Segment::zeroed(8);
        while socket.recv(&into).await.unwrap() > 0 {
            sender.send(()).unwrap();
        }
    });
    let before = at_rest(engine);
    for _ in 0..4 {
        theirs.write_all(&[1]).unwrap();
        received.recv().unwrap();
        at_rest(engine);
    }
    let after = at_rest(engine);
    assert_eq!(after.wakeups_timer, before.wakeups_timer, "{before:?} {after:?}");
    [after.wakeups_kick - before.wakeups_kick, after.wakeups_completion - before.wakeups_completion]
}

fn what_a_client_sends_is_a_kick(engine: &Engine) {
    assert_eq!(bytes_on_a_socket(engine, false), [4, 0]);
}

fn what_a_store_sends_is_a_completion(engine: &Engine) {
    assert_eq!(bytes_on_a_socket(engine, true), [0, 4]);
}

fn a_ring_of_an_event_is_a_kick(engine: &Engine) {
    let ours = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let theirs = ours.try_clone().unwrap();
    let (sender, received) = std::sync::mpsc::channel();
    engine.spawn_on(1, move || async move {
        let event = Event::from_fd(ours).unwrap();
        for _ in 0..3 {
            event.wait().await.unwrap();
            sender.send(()).unwrap();
        }
    });
    let before = at_rest(engine);
    for _ in 0..3 {
        rustix::io::write(&theirs, &1u64.to_ne_bytes()).unwrap();
        received.recv().unwrap();
        at_rest(engine);
    }
    let after = at_rest(engine);
    assert_eq!(after.wakeups_kick - before.wakeups_kick, 3, "{before:?} {after:?}");
    assert_eq!((after.wakeups_completion, after.wakeups_timer), (before.wakeups_completion, before.wakeups_timer));
}

fn the_processor_time_rises_with_work(engine: &Engine) {
    let read = || engine.cpu_ns()[1].expect("it lives");
    let before = read();
    engine.run_on(1, || async {
        let begun = std::time::Instant::now();
        while begun.elapsed() < Duration::from_millis(30) {
            std::hint::spin_loop();
        }
    });
    assert!(read() > before);
}

each_engine!(
    a_message_is_control,
    the_end_of_a_sleep_is_a_timer,
    a_sync_and_a_transfer_are_completions,
    what_a_client_sends_is_a_kick,
    what_a_store_sends_is_a_completion,
    a_ring_of_an_event_is_a_kick,
    the_processor_time_rises_with_work,
);
