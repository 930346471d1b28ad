//! A request allocates nothing, aligned or bounced, while no stage is attached; and neither does one that its disk's shape leaves as it is, or
//! that its disk's limits need not hold back.
//!
//! A program of its own, with an allocator that counts what each thread allocates: the test harness has a thread, too.
#![forbid(unsafe_code)]

mod common;

use std::cell::OnceCell;
use std::sync::Arc;

use allocation_counter::measure;
use common::{TestGraph, at, now, one_of_each};
use spile_core::{Disk, Segments};
use spile_mem::Pool;
use spile_node::{DiskLimits, Group, Limits, Node, Shape};

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
    let cases = [
        ("aligned", true, Shape::Off),
        ("bounced", false, Shape::Off),
        ("aligned and not split", true, Shape::Split(4096)),
        ("bounced and not split", false, Shape::Split(8192)),
        ("aligned and too short for auto", true, Shape::Auto),
    ];
    for (name, kind, shape) in cases {
        now(node.set_shape(shape)).unwrap();
        let counted = measure(|| {
            for _ in 0..300 {
                match kind {
                    true => now(aligned()),
                    false => now(odd_requests(&node, &memory)),
                }
            }
        });
        assert_eq!(counted.count_total, 0, "{name}: allocations in 300 rounds");
    }
}

#[test]
fn a_request_that_limits_let_pass_allocates_nothing() {
    let node = Node::new(TestGraph::new()).with_limits(DiskLimits::new(Arc::new(spile_engine::OsEnv)));
    let most = 1 << 60;
    now(node.set_limits(Limits { iops: Some(most), write_bps: Some(most), ..Limits::default() })).unwrap();
    let group = Group::new("g", Arc::new(spile_engine::OsEnv));
    group.set_limits(Limits { bps: Some(most), ..Limits::default() }).unwrap();
    now(node.join_group(Some(group))).unwrap();
    let memory = Segments::zeroed(4096);
    let requests = async || {
        node.read(at(0, 4096), &memory).await.unwrap();
        node.write(at(0, 4096), &memory, true).await.unwrap();
        node.flush().await.unwrap();
        node.discard(at(0, 4096)).await.unwrap();
    };
    now(requests());
    let counted = measure(|| (0..300).for_each(|_| now(requests())));
    assert_eq!((counted.count_total, node.limits().unwrap().delays().requests), (0, 0));
}
