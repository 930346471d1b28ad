//! What opening a chain does to its parents: what a killed process left in them is made durable, and nothing else.

use crate::support::*;
use spile_image::OpenOptions;

const MIB: u64 = 1 << 20;

/// A guest may outlive the death of its server and see a snapshot taken. Its flushes promise what it wrote before
/// both.
#[test]
fn what_a_killed_process_left_in_a_parent_is_durable_before_a_child_takes_writes() {
    let world = World::new();
    let base = world.raw("/vm/base.raw", &pattern(1, 8 << 20));
    let parent = world.child("/vm/a.vhd", "/vm/base.raw", 8 * MIB, 2 << 20);
    let disk = world.open("/vm/a.vhd");
    write(&disk, 4096, &pattern(2, 4096));
    drop(disk);
    world.child("/vm/b.vhd", "/vm/a.vhd", 8 * MIB, 2 << 20);
    let looks = OpenOptions { read_only: true, ..OpenOptions::default() };
    let unflushed = |path| world.try_open(path, &looks).unwrap().layers().swap_remove(0).unflushed;
    assert!(unflushed("/vm/a.vhd"), "the parent has nothing to be made durable: the test shows nothing");
    let syncs = |file: &MemFile| file.syncs.load(std::sync::atomic::Ordering::Relaxed);
    let before = (syncs(&base), syncs(&parent));
    let child = world.open("/vm/b.vhd");
    assert!(syncs(&base) > before.0 && syncs(&parent) > before.1 + 1);
    assert!(!unflushed("/vm/a.vhd"));
    drop(child);
    world.env.reboot();
    assert_eq!(read(&world.open("/vm/b.vhd"), 4096..8192), pattern(2, 4096));
}

/// An open for reading only writes to no image.
#[test]
fn a_chain_that_is_only_read_changes_no_parent() {
    let world = World::new();
    world.raw("/vm/base.raw", &pattern(1, 8 << 20));
    let parent = world.child("/vm/a.vhd", "/vm/base.raw", 8 * MIB, 2 << 20);
    write(&world.open("/vm/a.vhd"), 4096, &pattern(2, 4096));
    world.child("/vm/b.vhd", "/vm/a.vhd", 8 * MIB, 2 << 20);
    let before = parent.bytes(0, parent.len() as usize);
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let chain = world.try_open("/vm/b.vhd", &options).unwrap();
    assert_eq!(read(&chain, 4096..8192), pattern(2, 4096));
    assert_eq!(parent.bytes(0, parent.len() as usize), before);
}
