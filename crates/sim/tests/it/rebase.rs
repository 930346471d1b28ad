//! A disk gets another parent, and then the host loses its power: what the disk held is there, also what only the new parent has. The rule that the
//! new parent is durable before it is named is broken on purpose, too, and must be found.

use std::path::Path;
use std::sync::Arc;

use spile_core::{Disk, Env, Extent, Files, OpenMode, Segments};
use spile_image::create::NewParent;
use spile_image::formats::vhd::{self, CreateParams, VhdParent};
use spile_image::layer::{Identity, Layer};
use spile_image::{Format, Graph, OpenOptions};
use spile_life::rebase::{check, compare, name_parent, over};
use spile_sim::exec::block_on;
use spile_sim::{Hardware, SimStore, World};

const OLD: &str = "/old.raw";
const NEW: &str = "/new.raw";
const MIDDLE: &str = "/middle.vhd";
const LEAF: &str = "/leaf.vhd";
const BLOCK: u64 = 16 << 10;
const SIZE: u64 = 8 * BLOCK;
const SEEDS: u64 = 40;

/// What becomes the parent.
#[derive(Clone, Copy, PartialEq)]
enum Parent {
    /// A copy that a program has just made.
    Copy,
    /// A child whose server was killed.
    Killed,
}

fn whole() -> Extent {
    Extent::from_range(0..SIZE)
}

fn content() -> Vec<u8> {
    (0..SIZE).map(|at| 1 + (at / 512 % 250) as u8).collect()
}

async fn open(world: &World, path: &str, read_only: bool) -> Graph<SimStore> {
    let options = OpenOptions { read_only, ..OpenOptions::default() };
    Graph::open(&world.files(), world.env(), Path::new(path), &options).await.unwrap()
}

/// Makes an empty, durable child of the raw image at `parent`.
fn child(world: &World, path: &'static str, parent: &'static str) {
    world.install_empty(path, 0);
    let host = world.clone();
    block_on(world, async move {
        let (name, uuid) = (parent[1..].to_owned(), [0; 16]);
        let parent = VhdParent { relative_path: name.clone(), absolute_path: None, uuid, timestamp: 0, name };
        let params = CreateParams { block_size_bytes: BLOCK as u32, ..CreateParams::child(SIZE, parent) };
        let store = host.files().open(&Path::new(path).into(), OpenMode::ReadWrite).await.unwrap();
        vhd::create(&store, &*host.env(), &params).await.unwrap();
    });
    world.settle(Path::new(path));
}

/// Makes the new parent with the disk's content, of which nothing is durable.
fn make(world: &World, parent: Parent) -> &'static str {
    let path = match parent {
        Parent::Copy => NEW,
        Parent::Killed => MIDDLE,
    };
    world.install_empty(NEW, SIZE);
    if parent == Parent::Killed {
        child(world, MIDDLE, NEW);
    }
    let host = world.clone();
    block_on(world, async move {
        let disk = open(&host, path, false).await;
        // In two pieces of a block, so that its bits come one after the other.
        for at in (0..SIZE).step_by(4096) {
            let part = Extent::from_range(at..at + 4096);
            disk.write(part, &Segments::copied(&content()[at as usize..][..4096]), false).await.unwrap();
        }
    });
    world.kill();
    path
}

/// Whether the disk has its content after the power cut.
fn survives(seed: u64, parent: Parent, sound: bool) -> bool {
    let world = World::new(seed, Hardware { align_bytes: 512, punches: true, devices: false });
    world.install(OLD, &content());
    child(&world, LEAF, OLD);
    let path = make(&world, parent);
    let host = world.clone();
    block_on(&world, async move {
        let (files, env): (_, Arc<dyn Env>) = (host.files(), host.env());
        let (graph, new) = (open(&host, LEAF, false).await, open(&host, path, true).await);
        let image = &new.layers()[0];
        let (name, format) = (path[1..].to_owned(), image.format);
        let identity = (format == Format::Vhd).then(|| Identity(image.identity.unwrap().0));
        let named = NewParent { relative_path: name.clone(), name, format, identity, changed_unix_s: None };
        let leaf = &graph.handles()[0];
        check(&files, leaf, &new, &named).await.unwrap();
        let found = compare(&graph, &over(&graph, &new).unwrap()).await.unwrap();
        assert_eq!(found.first_at, None, "the new parent holds the same");
        match sound {
            true => name_parent(&files, &env, leaf, &new, &named).await.unwrap(),
            false => leaf.image().set_parent(Some(&named)).await.unwrap(),
        }
    });
    world.cut_power();
    let host = world.clone();
    block_on(&world, async move {
        let disk = open(&host, LEAF, true).await;
        assert_eq!(disk.handles()[1].path(), Path::new(path));
        let bytes = Segments::zeroed(SIZE as usize);
        disk.read(whole(), &bytes).await.is_ok() && bytes.to_vec() == content()
    })
}

#[test]
fn the_new_parent_is_durable_before_the_disk_names_it() {
    for parent in [Parent::Copy, Parent::Killed] {
        for seed in 0..SEEDS {
            assert!(survives(seed, parent, true), "seed {seed}: the power cut has taken what the disk held");
        }
    }
}

#[test]
fn a_parent_that_is_named_before_it_is_durable_is_found() {
    for parent in [Parent::Copy, Parent::Killed] {
        assert!((0..SEEDS).any(|seed| !survives(seed, parent, false)), "no seed has found it");
    }
}
