//! What an exchange of graphs costs a guest: `cargo run --release -p spile-node --example exchange`.
//!
//! One worker keeps 32 writes in flight on a disk in whose way a stage delays each write by 100 ms. Another thread exchanges
//! the graph in every second window of time. It prints the median and the maximum, over all windows, of the longest
//! request that began in a window: without an exchange, with one, and by how much they differ.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use spile_core::metrics::Op;
use spile_core::{Disk, DiskInfo, Extent, ExtentStatus, Io, Result, Segments};
use spile_engine::{Config, Engine, OsEnv};
use spile_node::{Effect, Fault, Faults, Node, Place};

const DEPTH: u64 = 32;
const DELAY: Duration = Duration::from_millis(100);
/// Long enough for each of the 32 places to begin a request in it.
const WINDOW: Duration = Duration::from_millis(150);
const EXCHANGES: usize = 100;

/// A graph that answers at once.
struct NullGraph;

impl Disk for NullGraph {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size_bytes: 1 << 30,
            request_align_bytes: 1,
            memory_align_bytes: 1,
            preferred_bytes: 4096,
            discard_align_bytes: 4096,
            read_only: false,
            fast_zero: true,
        }
    }

    async fn execute(&self, _: Io<'_>) -> Result<()> {
        Ok(())
    }

    async fn extents(&self, _: Extent, _: usize) -> Result<Vec<ExtentStatus>> {
        Ok(Vec::new())
    }

    async fn resize(&self, _: u64) -> Result<()> {
        Ok(())
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// What the clients and the exchanging thread share.
struct Trial {
    node: Node<NullGraph>,
    start: Instant,
    is_over: AtomicBool,
    clients: AtomicU64,
}

thread_local! {
    /// When each request began, in microseconds since the start, and how long it took.
    static REQUESTS: RefCell<Vec<(u64, u64)>> = const { RefCell::new(Vec::new()) };
}

async fn write_on(trial: Arc<Trial>, place: u64) {
    let from = Segments::zeroed(4096);
    // Spread over the delay, so that requests do not all begin at one time.
    spile_engine::sleep(DELAY * place as u32 / DEPTH as u32).await;
    while !trial.is_over.load(Ordering::Relaxed) {
        let begun = trial.start.elapsed();
        trial.node.write(Extent::from_range(place * 4096..(place + 1) * 4096), &from, false).await.expect("it writes");
        let took = trial.start.elapsed() - begun;
        REQUESTS.with_borrow_mut(|list| list.push((begun.as_micros() as u64, took.as_micros() as u64)));
    }
    trial.clients.fetch_sub(1, Ordering::Relaxed);
}

/// The longest request that began in each of the windows of which `wanted` is the remainder of the number by 2.
fn longest_us(requests: &[(u64, u64)], wanted: usize) -> Vec<u64> {
    let window_us = WINDOW.as_micros() as u64;
    let mut longest = vec![0; 2 * EXCHANGES];
    for (begun, took) in requests {
        if let Some(longest) = longest.get_mut((begun / window_us) as usize) {
            *longest = (*longest).max(*took);
        }
    }
    let mut longest: Vec<_> = longest.into_iter().skip(wanted).step_by(2).collect();
    longest.sort_unstable();
    longest
}

fn show(name: &str, sorted: &[u64]) -> u64 {
    let (median, most) = (sorted[sorted.len() / 2], sorted[sorted.len() - 1]);
    println!("{name}: longest request, median {median} us, maximum {most} us over {} windows", sorted.len());
    median
}

fn main() -> Result<()> {
    let engine = Engine::start(Config { workers: 2, ..Config::default() })?;
    let delay = Fault { ops: vec![Op::Write], extent: None, per_million: 1_000_000, effect: Effect::Delay(DELAY) };
    let (start, is_over) = (Instant::now(), AtomicBool::new(false));
    let trial = Arc::new(Trial { node: Node::new(NullGraph), start, is_over, clients: AtomicU64::new(DEPTH) });
    let (setup, faults) = (trial.clone(), Arc::new(Faults::new(vec![delay], 1, Arc::new(OsEnv))));
    engine.run_on(0, move || async move { setup.node.attach(Place::Fault, faults).await })?;
    for place in 0..DEPTH {
        let trial = trial.clone();
        engine.spawn_on(0, move || write_on(trial, place));
    }
    let exchanging = trial.clone();
    let mut costs_us = engine.run_on(1, move || async move {
        let mut costs_us = Vec::new();
        for number in 0..EXCHANGES as u32 {
            // In the middle of each odd window.
            let at = WINDOW * (2 * number + 1) + WINDOW / 2;
            spile_engine::sleep(at.saturating_sub(exchanging.start.elapsed())).await;
            let begun = Instant::now();
            drop(exchanging.node.exchange(Arc::new(NullGraph)).await.expect("it fits"));
            costs_us.push(begun.elapsed().as_micros() as u64);
        }
        spile_engine::sleep(2 * WINDOW).await;
        exchanging.is_over.store(true, Ordering::Relaxed);
        while exchanging.clients.load(Ordering::Relaxed) > 0 {
            spile_engine::sleep(DELAY).await;
        }
        costs_us
    });
    let requests = engine.run_on(0, || async { REQUESTS.take() });
    costs_us.sort_unstable();
    println!("{} requests; an exchange takes {} us (median)", requests.len(), costs_us[costs_us.len() / 2]);
    let without = show("without an exchange", &longest_us(&requests, 0));
    let with = show("with an exchange", &longest_us(&requests, 1));
    println!("difference of the medians: {} us", with as i64 - without as i64);
    Ok(())
}
