//! Transfers by the engine straight to a store, without a disk, a front and a guest: the bare side of `shape`, and what `tune` measures. (The
//! bare side of `layers`, `geometry` and `warmup` is [`transfer::system_calls`](super::transfer): there nothing of Spile is between.)

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use spile_core::{Result, Segments, Store, StoreOffset, Via};
use spile_engine::Engine;

use super::Direction;
use super::transfer::Moved;
use crate::load::Rng;

/// A row of transfers to a store.
#[derive(Clone, Copy, Debug)]
pub struct Transfers {
    /// Which way.
    pub direction: Direction,
    /// The length of each in bytes. They begin at multiples of it.
    pub block_bytes: u64,
    /// So many are in flight.
    pub depth: u32,
    /// They begin for so long; `depth` of them in any case. Those that are in flight then are waited for.
    pub runtime: Duration,
    /// The part of the store that is used, from its start, in bytes; a block at least.
    pub span_bytes: u64,
    /// The seed of the places.
    pub seed: u64,
}

/// Transfers blocks at random places of `store`, on the engine's first worker. The time ends when the last one has ended.
///
/// # Errors
/// The store's.
pub fn transfer<S: Store>(engine: &Engine, store: &Arc<S>, transfers: Transfers) -> Result<Moved> {
    let store = store.clone();
    engine.run_on(0, move || async move {
        let rng = Rc::new(RefCell::new(Rng::new(transfers.seed, 0)));
        let memory: Vec<Segments> = (0..transfers.depth).map(|_| filled(transfers.block_bytes)).collect();
        let begun = Instant::now();
        let lanes = memory.iter().map(|memory| lane(&*store, transfers, begun, memory, rng.clone()));
        let counts: Result<Vec<u64>> = join_all(lanes).await.into_iter().collect();
        let count: u64 = counts?.into_iter().sum();
        Ok(Moved { bytes: count * transfers.block_bytes, seconds: begun.elapsed().as_secs_f64() })
    })
}

/// Memory for a block, with some data.
fn filled(block_bytes: u64) -> Segments {
    let memory = Segments::zeroed(block_bytes as usize);
    memory.fill(0x5a);
    memory
}

/// One transfer after the other; how many there were.
async fn lane<S: Store>(
    store: &S,
    transfers: Transfers,
    begun: Instant,
    memory: &Segments,
    rng: Rc<RefCell<Rng>>,
) -> Result<u64> {
    let blocks = (transfers.span_bytes / transfers.block_bytes).max(1);
    let mut count = 0;
    while begun.elapsed() < transfers.runtime || count == 0 {
        let at = StoreOffset(rng.borrow_mut().below(blocks) * transfers.block_bytes);
        match transfers.direction {
            Direction::Read => store.read_at(at, memory, Via::Direct).await?,
            Direction::Write => store.write_at(at, memory, Via::Direct).await?,
        }
        count += 1;
    }
    Ok(count)
}
