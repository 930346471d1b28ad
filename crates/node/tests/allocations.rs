//! A request allocates nothing, aligned or bounced, while no stage is attached.
//!
//! A program of its own, with an allocator that counts, and one test that has it to itself.
#![forbid(unsafe_code)]

mod common;

use std::alloc::System;
use std::cell::OnceCell;

use common::{TestGraph, at, now, one_of_each};
use spile_core::{Disk, Segments};
use spile_mem::Pool;
use spile_node::Node;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

thread_local!(static POOL: OnceCell<Pool> = const { OnceCell::new() });

fn from_pool(len: usize) -> Option<Segments> {
    POOL.with(|pool| pool.get_or_init(|| Pool::new(8 << 20).unwrap()).try_alloc(len).map(Segments::from))
}

async fn odd_requests(node: &Node<TestGraph>, memory: &Segments) {
    node.read(at(1, 4096), memory).await.unwrap();
    node.write(at(513, 4096), memory, true).await.unwrap();
    node.write_zeroes(at(700, 4096), Default::default()).await.unwrap();
    node.discard(at(700, 4096)).await.unwrap();
}

#[test]
fn requests_allocate_nothing() {
    let node = Node::with_buffers(TestGraph::with_alignment(512), from_pool);
    let memory = Segments::zeroed(4096);
    let aligned = async || {
        node.read(at(0, 4096), &memory).await.unwrap();
        node.write(at(0, 4096), &memory, true).await.unwrap();
        node.flush().await.unwrap();
        node.discard(at(0, 4096)).await.unwrap();
    };
    now(one_of_each(&node)).unwrap();
    now(odd_requests(&node, &memory));
    for (name, kind) in [("aligned", true), ("bounced", false)] {
        let count = || {
            let region = Region::new(ALLOCATOR);
            for _ in 0..100 {
                match kind {
                    true => now(aligned()),
                    false => now(odd_requests(&node, &memory)),
                }
            }
            region.change().allocations + region.change().reallocations
        };
        // The test harness has a thread, too, which may allocate something at the same time.
        let counts = [(); 3].map(|()| count());
        assert!(counts.contains(&0), "{name}: {counts:?} allocations in 100 rounds");
    }
}
