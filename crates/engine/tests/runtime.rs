//! Tasks, wakes, timers and the end, on both reactors.

mod common;

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use spile_engine::{Config, Engine, EngineKind, current_worker, pool, sleep, spawn, yield_now};

each_engine!(
    results_come_back_from_every_worker,
    wakes_from_other_threads_are_not_lost,
    workers_wake_each_other,
    sleepers_wake_in_order,
    a_dropped_sleep_is_forgotten,
    giving_way_lets_others_run,
    a_busy_task_does_not_stop_timers,
    shutdown_waits_for_all,
    a_panic_ends_one_task_only,
    pools_are_the_workers_own,
);

fn results_come_back_from_every_worker(engine: &Engine) {
    for worker in 0..4 {
        let got = engine.run_on(worker, || async { (current_worker(), 42) });
        assert_eq!(got, (worker % 2, 42));
    }
}

#[derive(Default)]
struct Flag {
    set: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Flag {
    fn set(&self) {
        self.set.store(true, Ordering::SeqCst);
        let waker = self.waker.lock().unwrap().take();
        waker.into_iter().for_each(Waker::wake);
    }

    async fn wait(&self) {
        poll_fn(|context| {
            *self.waker.lock().unwrap() = Some(context.waker().clone());
            if self.set.swap(false, Ordering::SeqCst) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    fn wait_blocking(&self) {
        let start = Instant::now();
        while !self.set.swap(false, Ordering::SeqCst) {
            assert!(start.elapsed() < Duration::from_secs(600), "a wake was lost");
            std::thread::yield_now();
        }
    }
}

fn wakes_from_other_threads_are_not_lost(engine: &Engine) {
    const ROUNDS: usize = 5_000;
    let threads: Vec<_> = (0..2)
        .map(|number| {
            let (ping, pong) = (Arc::new(Flag::default()), Arc::new(Flag::default()));
            let (theirs, back) = (ping.clone(), pong.clone());
            engine.spawn_on(number, move || async move {
                for _ in 0..ROUNDS {
                    theirs.wait().await;
                    back.set();
                }
            });
            std::thread::spawn(move || {
                for round in 0..ROUNDS {
                    if round % 3 == 0 {
                        std::thread::yield_now();
                    }
                    ping.set();
                    pong.wait_blocking();
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

fn workers_wake_each_other(engine: &Engine) {
    let flags: [Arc<Flag>; 2] = Default::default();
    let done = Arc::new(AtomicUsize::new(0));
    for worker in 0..2 {
        let (flags, done) = (flags.clone(), done.clone());
        engine.spawn_on(worker, move || async move {
            for _ in 0..5_000 {
                flags[1 - worker].set();
                flags[worker].wait().await;
            }
            done.fetch_add(1, Ordering::SeqCst);
            flags[1 - worker].set();
        });
    }
    engine.shutdown();
    assert_eq!(done.load(Ordering::SeqCst), 2);
}

fn sleepers_wake_in_order(engine: &Engine) {
    let order = engine.run_on(0, || async {
        let order = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
        for delay_ms in [300u64, 100, 200, 0] {
            let order = order.clone();
            spawn(async move {
                let start = Instant::now();
                sleep(Duration::from_millis(delay_ms)).await;
                assert!(start.elapsed() >= Duration::from_millis(delay_ms));
                order.borrow_mut().push(delay_ms);
            });
        }
        while order.borrow().len() < 4 {
            sleep(Duration::from_millis(10)).await;
        }
        order.take()
    });
    assert_eq!(order, [0, 100, 200, 300]);
}

fn a_dropped_sleep_is_forgotten(engine: &Engine) {
    engine.run_on(0, || async {
        let mut long = Box::pin(sleep(Duration::from_secs(3600)));
        let first = poll_fn(|context| Poll::Ready(long.as_mut().poll(context).is_pending())).await;
        assert!(first);
        drop(long);
        sleep(Duration::from_millis(1)).await;
        let mut endless = Box::pin(sleep(Duration::MAX));
        assert!(poll_fn(|context| Poll::Ready(endless.as_mut().poll(context).is_pending())).await);
    });
}

fn giving_way_lets_others_run(engine: &Engine) {
    let log = engine.run_on(0, || async {
        let log = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
        for name in ['a', 'b'] {
            let log = log.clone();
            spawn(async move {
                for _ in 0..3 {
                    log.borrow_mut().push(name);
                    yield_now().await;
                }
            });
        }
        sleep(Duration::from_millis(5)).await;
        log.take()
    });
    assert_eq!(log, ['a', 'b', 'a', 'b', 'a', 'b']);
}

fn a_busy_task_does_not_stop_timers(engine: &Engine) {
    let stop = Arc::new(AtomicBool::new(false));
    let busy = stop.clone();
    engine.spawn_on(0, move || async move {
        while !busy.load(Ordering::Relaxed) {
            yield_now().await;
        }
    });
    engine.run_on(0, move || async move {
        sleep(Duration::from_millis(5)).await;
        stop.store(true, Ordering::Relaxed);
    });
}

fn shutdown_waits_for_all(engine: &Engine) {
    let done = Arc::new(AtomicUsize::new(0));
    for number in 0..100u64 {
        let done = done.clone();
        engine.spawn_on(number as usize, move || async move {
            sleep(Duration::from_millis(number % 7)).await;
            let inner = done.clone();
            spawn(async move {
                sleep(Duration::from_millis(3)).await;
                inner.fetch_add(1, Ordering::SeqCst);
            });
        });
    }
    engine.shutdown();
    assert_eq!(done.load(Ordering::SeqCst), 100);
    engine.shutdown();
    let (dropped, ran) = (Arc::new(()), Arc::new(AtomicBool::new(false)));
    let (kept, set) = (dropped.clone(), ran.clone());
    engine.spawn_on(0, move || async move {
        set.store(true, Ordering::SeqCst);
        drop(kept);
    });
    assert_eq!(Arc::strong_count(&dropped), 1, "what comes after the end is kept");
    assert!(!ran.load(Ordering::SeqCst));
}

fn a_panic_ends_one_task_only(engine: &Engine) {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        engine.run_on(0, || async {
            if current_worker() == 0 {
                panic!("expected by the test")
            }
        })
    }));
    assert!(caught.is_err());
    engine.spawn_on(0, || -> std::future::Ready<()> { panic!("expected by the test") });
    assert_eq!(engine.run_on(0, || async { 7 }), 7);
}

fn pools_are_the_workers_own(engine: &Engine) {
    let arena = |worker| engine.run_on(worker, || async { pool().arena().0 as usize });
    assert_ne!(arena(0), arena(1));
    assert_eq!(arena(0), arena(2));
}

#[test]
fn run_on_refuses_to_block_a_worker() {
    let engine = Engine::start(Config { workers: 1, ..Config::default() }).unwrap();
    assert_ne!(engine.kind(), EngineKind::Auto);
    let inner = engine.clone();
    let refused = engine.run_on(0, move || async move {
        let call = std::panic::AssertUnwindSafe(|| inner.run_on(0, || async {}));
        std::panic::catch_unwind(call).is_err()
    });
    assert!(refused);
    engine.shutdown();
}

#[test]
fn an_engine_that_is_dropped_ends_its_threads() {
    let weak = {
        let engine = Engine::start(Config { workers: 1, ..Config::default() }).unwrap();
        let alive = Arc::new(());
        let weak = Arc::downgrade(&alive);
        engine.spawn_on(0, move || async move {
            sleep(Duration::from_millis(10)).await;
            drop(alive);
        });
        weak
    };
    let start = Instant::now();
    while weak.upgrade().is_some() {
        assert!(start.elapsed() < Duration::from_secs(600));
        std::thread::sleep(Duration::from_millis(1));
    }
}

const INSIDE: &str = "SPILE_TEST_PANIC_IN_LOOP";

/// Wakes by a panic: what no task can catch.
struct Panics;

impl std::task::Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("expected by the test");
    }
}

#[test]
fn a_worker_whose_loop_panics_ends_the_process() {
    use std::os::unix::process::ExitStatusExt;
    if std::env::var_os(INSIDE).is_some() {
        let engine = Engine::start(Config { workers: 1, ..Config::default() }).unwrap();
        engine.spawn_on(0, || async {
            let mut nap = Box::pin(sleep(Duration::from_millis(1)));
            let waker = Waker::from(Arc::new(Panics));
            assert!(nap.as_mut().poll(&mut std::task::Context::from_waker(&waker)).is_pending());
            sleep(Duration::from_millis(50)).await;
        });
        engine.shutdown();
        return;
    }
    let name = "a_worker_whose_loop_panics_ends_the_process";
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", name]).env(INSIDE, "1").output().unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{output:?}");
}
