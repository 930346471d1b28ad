//! Merges as they are done: a clone that is made while one begins is not changed by it, and how a layer gives its space back.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use crate::common::mount::Mount;
use crate::common::moves::job;
use crate::common::nbd::Client;
use crate::common::{Served, eventually, host, json, ok};
use spile_core::metrics::Op;
use spile_core::{Disk as _, Env, Error, ErrorKind, Result};
use spile_engine::{Config, Engine, OsEnv};
use spile_image::layer::Layer as _;
use spile_image::{Broken, OpenOptions};
use spile_life::jobs::{Job, Plan, Wishes};
use spile_life::merge::plan;
use spile_life::{Later, Neighbours, NoteChild, Sizes, Work};
use spile_node::Node;
use spile_server::disks;
use spile_server::far_children::HostNotes;
use spile_store::{CacheMode, HostFiles, OsFiles};

const MIB: usize = 1 << 20;

/// The folder of a disk, in which `spile clone PARENT new.vhd` runs and ends just after the folder's files were listed for the second time.
struct CloneBehind {
    folder: PathBuf,
    parent: &'static str,
    asked: Cell<u32>,
}

impl Neighbours for CloneBehind {
    fn list(&self) -> Pin<Box<dyn Future<Output = Result<Vec<PathBuf>>> + '_>> {
        let names = fs::read_dir(&self.folder).unwrap();
        let files = names.map(|name| name.unwrap().path()).collect();
        self.asked.set(self.asked.get() + 1);
        // First a merge looks for files of two names, then for children.
        if self.asked.get() == 2 {
            ok(&self.folder, &["clone", self.parent, "new.vhd"]);
        }
        Box::pin(async { Ok(files) })
    }
}

impl NoteChild for CloneBehind {
    fn note_child<'a>(&'a self, parent: &'a Path, child: &'a Path) -> Later<'a, ()> {
        ().note_child(parent, child)
    }
}

/// Makes leaf.vhd over middle.vhd over base.vhd, each with 1 MiB of its own at the start and at another place.
fn make(dir: &Path) {
    for (number, name) in ["base", "middle", "leaf"].into_iter().enumerate() {
        let (image, byte) = (format!("{name}.vhd"), number as u8 + 1);
        match number {
            0 => ok(dir, &["create", &image, "--size", "16M"]),
            _ => ok(dir, &["create", &image, "--parent", ["base.vhd", "middle.vhd"][number - 1]]),
        };
        let served = Served::try_start(dir, &[&image, "--control", "none"]).unwrap();
        let client = Client::connect(&served.uri()).unwrap();
        // The leaf has some blocks that its parent lacks.
        for at in [0, 4 * number, 10, 12, 14].into_iter().take(if number == 2 { 5 } else { 2 }).map(|mib| mib * MIB) {
            client.write(at as u64, &vec![byte; MIB], true).unwrap();
        }
        drop(client);
        assert!(served.terminate().success());
    }
}

fn content(dir: &Path, disk: &str) -> Vec<u8> {
    ok(dir, &["convert", disk, "out.raw"]);
    let bytes = fs::read(dir.join("out.raw")).unwrap();
    fs::remove_file(dir.join("out.raw")).unwrap();
    bytes
}

/// Merges a layer of leaf.vhd, while `parent` is cloned.
fn merge_beside(dir: &Path, layer: Option<&'static str>, parent: &'static str) -> Result<()> {
    let neighbours = CloneBehind { folder: dir.to_owned(), parent, asked: Cell::new(0) };
    merge(dir, layer, neighbours, Sizes::default()).map(drop)
}

/// Merges a layer of leaf.vhd. Returns how many holes were punched into the leaf's file.
fn merge(
    dir: &Path,
    layer: Option<&'static str>,
    neighbours: impl Neighbours + Send + 'static,
    sizes: Sizes,
) -> Result<u64> {
    let disk = dir.join("leaf.vhd");
    let engine = Engine::start(Config { workers: 1, ..Config::default() }).unwrap();
    let merged = engine.run_on(0, move || {
        Box::pin(async move {
            let graph = disks::open(CacheMode::Page, &disk.into(), &OpenOptions::default()).await?;
            let plan = Plan::Coalesce(plan(&graph, layer)?);
            let meter = graph.handles()[0].image().store().meter().clone();
            let (node, job) = (Node::new(graph), Job::new(Wishes::default()));
            let (files, asking) = (OsFiles::new(CacheMode::Page), OsFiles::new(CacheMode::Page).without_locks(true));
            let (files, asking) = (HostFiles::new(files), HostFiles::new(asking));
            let env: Arc<dyn Env> = Arc::new(OsEnv);
            let work = Work {
                files: &files,
                asking: &asking,
                env: &env,
                timer: &OsEnv,
                node: &node,
                job: &job,
                neighbours: &neighbours,
                marks: None,
                sizes,
                broken: Broken::Nothing,
            };
            let merged = spile_life::run(&work, &plan).await;
            node.close().await.and(merged)?;
            Ok(meter.read().op(Op::Discard).ended)
        })
    });
    engine.shutdown();
    merged
}

/// A merge that a clone has come into, what it says, and that it changed nothing.
fn refused(layer: Option<&'static str>, parent: &'static str, says: &str) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir);
    let before = [content(dir, parent), content(dir, "leaf.vhd")];
    let error: Error = merge_beside(dir, layer, parent).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error:?}");
    assert!(error.to_string().contains(says), "{error}");
    let after = [content(dir, "new.vhd"), content(dir, "leaf.vhd")];
    assert!(after == before, "a clone or the disk has changed");
    assert_eq!(json(dir, &["info", "leaf.vhd", "--chain"])["layers"].as_array().unwrap().len(), 3);
    assert!(!dir.join(".leaf.vhd.spile-job").exists(), "its note is there");
    // Nobody has the images locked, and without the clone the same merge is done.
    fs::remove_file(dir.join("new.vhd")).unwrap();
    let mut words = vec!["coalesce", "leaf.vhd"];
    words.extend(layer.iter().flat_map(|layer| ["--layer", layer]));
    ok(dir, &words);
    assert!(content(dir, "leaf.vhd") == before[1], "the disk has changed");
}

#[test]
fn a_clone_of_the_leafs_parent() {
    refused(None, "middle.vhd", "new.vhd is a child of this image, too");
}

#[test]
fn a_clone_of_a_layers_parent() {
    refused(Some("middle"), "base.vhd", "new.vhd is a child of this image, too");
}

#[test]
fn a_clone_of_the_layer_itself() {
    refused(Some("middle"), "middle.vhd", "new.vhd has just become a child of this image");
}

/// How many holes a merge of the leaf punches into its file, in batches of 1 MiB, while the files may take so much more than before.
fn punches(held_bytes: u64) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir);
    let before = content(dir, "leaf.vhd");
    let neighbours: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|name| name.unwrap().path()).collect();
    let sizes = Sizes { batch_bytes: MIB as u64, held_bytes, ..Sizes::default() };
    let punches = merge(dir, None, neighbours, sizes).unwrap();
    assert!(content(dir, "leaf.vhd") == before, "the disk has changed");
    punches
}

#[test]
fn a_layers_space_is_given_back_before_its_end_only_where_it_is_needed() {
    assert_eq!(punches(Sizes::default().held_bytes), 0);
    assert_ne!(punches(0), 0);
}

#[test]
fn a_layer_is_found_by_a_path_from_where_the_user_is() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, sub) = (dir.path(), dir.path().join("sub"));
    fs::create_dir(&sub).unwrap();
    make(&sub);
    ok(&sub, &["create", "top.vhd", "--parent", "leaf.vhd"]);
    let before = content(&sub, "top.vhd");
    ok(dir, &["coalesce", "sub/top.vhd", "--layer", "sub/leaf.vhd"]);
    let served = Served::try_start(&sub, &["top.vhd", "--control", "c"]).unwrap();
    ok(dir, &["coalesce", "sub/c", "--layer", "./sub/middle.vhd", "--wait"]);
    assert!(served.terminate().success());
    assert!(content(&sub, "top.vhd") == before, "the disk has changed");
    assert_eq!(json(&sub, &["info", "top.vhd", "--chain"])["layers"].as_array().unwrap().len(), 2);
}

#[test]
fn what_a_merge_frees_is_not_told_larger_than_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "leaf.vhd", "--size", "16M"]);
    ok(dir, &["snapshot", "leaf.vhd", "--name", "base.vhd"]);
    let served = Served::try_start(dir, &["leaf.vhd", "--control", "none"]).unwrap();
    Client::connect(&served.uri()).unwrap().write(0, &vec![1; 4 * MIB], true).unwrap();
    assert!(served.terminate().success());
    let taken = || -> i64 {
        let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap());
        files.map(|stat| std::os::unix::fs::MetadataExt::blocks(&stat) as i64 * 512).sum()
    };
    let tree = json(dir, &["tree", "."]);
    let images = tree["images"].as_array().unwrap();
    let told = images.iter().find_map(|image| image["coalesce_frees_bytes"].as_i64()).unwrap();
    let before = taken();
    ok(dir, &["coalesce", "leaf.vhd"]);
    let freed = before - taken();
    // The base had nothing: what was moved into it takes as much space as before.
    let tables = 64 << 10;
    assert!(freed <= told + tables && told < MIB as i64, "{freed} bytes were freed, and {told} told");
}

/// On a full file system, what was moved over bytes that the parent has makes room for what it lacks.
#[test]
fn where_no_space_is_left_the_layer_gives_back_what_was_moved() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mount) = Mount::new(dir.path(), 128 << 20, "where_no_space_is_left") else { return };
    let dir = mount.path.as_path();
    ok(dir, &["create", "leaf.vhd", "--size", "64M"]);
    for snapshot in [Some("base.vhd"), None] {
        let served = Served::try_start(dir, &["leaf.vhd", "--control", "none"]).unwrap();
        let client = Client::connect(&served.uri()).unwrap();
        // The leaf gets another 16 MiB over those of the base, and 16 MiB of its own.
        let blocks = if snapshot.is_some() { 0..8 } else { 0..16 };
        for block in blocks {
            client.write(2 * block * MIB as u64, &vec![1 + block as u8; 2 * MIB], true).unwrap();
        }
        drop(client);
        assert!(served.terminate().success());
        snapshot.map(|name| ok(dir, &["snapshot", "leaf.vhd", "--name", name]));
    }
    let guest_sees = || {
        let served = Served::try_start(dir, &["leaf.vhd,read-only", "--control", "none"]).unwrap();
        let mut bytes = vec![0; 32 * MIB];
        Client::connect(&served.uri()).unwrap().read(0, &mut bytes).unwrap();
        assert!(served.terminate().success());
        bytes
    };
    let before = guest_sees();
    let room = rustix::fs::statvfs(dir).unwrap();
    let ballast = fs::File::create(dir.join("ballast")).unwrap();
    let ballast_bytes = room.f_bfree * room.f_frsize - 6 * MIB as u64;
    rustix::fs::fallocate(&ballast, rustix::fs::FallocateFlags::empty(), 0, ballast_bytes).unwrap();
    ok(dir, &["coalesce", "leaf.vhd"]);
    assert!(guest_sees() == before, "the disk has changed");
}

/// A golden image is a sparse raw file: its holes are not copied into a child that is to need it no more, neither by a server nor without one.
#[test]
fn a_flatten_over_a_sparse_parent_takes_what_the_parent_has() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let base = fs::File::create(dir.join("base.raw")).unwrap();
    base.set_len(256 * MIB as u64).unwrap();
    for mib in [9, 100] {
        base.write_all_at(&vec![7; MIB], (mib * MIB) as u64).unwrap();
    }
    let used = |disk: &str| fs::metadata(dir.join(disk)).unwrap().blocks() * 512;
    for (disk, live) in [("offline.vhd", false), ("live.vhd", true)] {
        ok(dir, &["clone", "base.raw", disk]);
        let served = Served::try_start(dir, &[disk, "--control", "c"]).unwrap();
        Client::connect(&served.uri()).unwrap().write(50 * MIB as u64, &vec![8; MIB], true).unwrap();
        if live {
            ok(dir, &["flatten", "c", "--wait"]);
        }
        assert!(served.terminate().success());
        if !live {
            ok(dir, &["flatten", disk]);
        }
        assert!(used(disk) < 16 * MIB as u64, "{disk} takes {} bytes", used(disk));
        assert!(json(dir, &["info", disk])["parent"].is_null(), "{disk}");
        let bytes = content(dir, disk);
        let is = |mib: usize, byte: u8| bytes[mib * MIB..(mib + 1) * MIB].iter().all(|b| *b == byte);
        assert!(is(9, 7) && is(100, 7) && is(50, 8) && is(10, 0) && is(255, 0), "{disk}");
    }
}

#[test]
fn a_kill_makes_a_merge_do_little_of_its_work_again() {
    const LEAF_MIB: usize = 32;
    const RATE_MIB: u64 = 8;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "base.vhd", "--size", "64M"]);
    ok(dir, &["create", "leaf.vhd", "--parent", "base.vhd"]);
    let served = host::serve(dir, &["leaf.vhd"]);
    let client = Client::connect(&served.uri()).unwrap();
    (0..LEAF_MIB).for_each(|mib| client.write((mib * MIB) as u64, &vec![mib as u8 + 1; MIB], false).unwrap());
    drop(client);
    ok(dir, &["coalesce", "leaf.vhd", "--rate", &format!("{RATE_MIB}M"), "--background"]);
    let mib = |name: &str| job(dir, "leaf")[name].as_u64().unwrap() >> 20;
    eventually("it has done some", || mib("done_bytes") >= 13);
    let done = mib("done_bytes");
    served.kill();
    let served = host::serve(dir, &["leaf.vhd"]);
    eventually("it goes on", || mib("total_bytes") > 0);
    let again = (done + mib("total_bytes")).saturating_sub(LEAF_MIB as u64);
    // A second of work; and of the blocks of 2 MiB, the two that were copied but not given up.
    assert!(again <= RATE_MIB + 4, "{again} MiB are done again");
    ok(dir, &["job", "leaf", "rate", "none"]);
    eventually("it has ended", || job(dir, "leaf")["state"] == "done");
    assert!(served.terminate().success());
    let bytes = content(dir, "leaf.vhd");
    assert!((0..64).all(|mib| bytes[mib * MIB + 5] == if mib < LEAF_MIB { mib as u8 + 1 } else { 0 }));
}

/// The disk's header gets a place behind the space that was prepared, when the disk gets another parent. That space is not lost.
#[test]
fn a_check_calls_no_space_leaked_that_the_disk_has_prepared_before_a_merge() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "room.vhd", "--size", "256M"]);
    let served = host::serve(dir, &["room.vhd"]);
    let client = Client::connect(&served.uri()).unwrap();
    let write = |mib: usize, count: usize, byte: u8| {
        (mib..mib + count).for_each(|mib| client.write((mib * MIB) as u64, &vec![byte; MIB], false).unwrap());
    };
    for (number, snapshot) in ["s1.vhd", "s2.vhd"].into_iter().enumerate() {
        write(number * 10, 8, number as u8 + 1);
        ok(dir, &["snapshot", "room", "--name", snapshot]);
    }
    write(40, 8, 3);
    ok(dir, &["coalesce", "room", "--layer", "s2", "--wait"]);
    drop(client);
    assert!(served.terminate().success());
    let checked = json(dir, &["check", "room.vhd"]);
    let has_room = |one: &serde_json::Value| one["message"].as_str().unwrap().contains("room for the next blocks");
    assert!(checked["findings"].as_array().unwrap().iter().any(has_room), "{checked}");
    assert_eq!((&checked["result"], &checked["leaked_bytes"]), (&"sound".into(), &0.into()), "{checked}");
    let (before, len_bytes) = (host::bytes_of(dir, "room.vhd"), fs::metadata(dir.join("room.vhd")).unwrap().len());
    // The next blocks go there.
    let served = Served::start(dir, &["room.vhd"]);
    let client = Client::connect(&served.uri()).unwrap();
    (60..80).for_each(|mib| client.write(mib * MIB as u64, &vec![4; MIB], false).unwrap());
    drop(client);
    assert!(served.terminate().success());
    assert!(fs::metadata(dir.join("room.vhd")).unwrap().len() <= len_bytes, "the file has become longer");
    let after = host::bytes_of(dir, "room.vhd");
    assert!(after[..60 * MIB] == before[..60 * MIB] && after[60 * MIB..80 * MIB].iter().all(|byte| *byte == 4));
    ok(dir, &["check", "room.vhd"]);
}

/// All files of these folders. The merge fails before it gives the child `c.vhd` its new parent.
struct EndsBefore(Vec<PathBuf>);

impl Neighbours for EndsBefore {
    fn list(&self) -> Pin<Box<dyn Future<Output = Result<Vec<PathBuf>>> + '_>> {
        let files = self.0.iter().flat_map(|folder| fs::read_dir(folder).unwrap()).map(|name| name.unwrap().path());
        Box::pin(std::future::ready(Ok(files.collect())))
    }
}

impl NoteChild for EndsBefore {
    fn note_child<'a>(&'a self, parent: &'a Path, child: &'a Path) -> Later<'a, ()> {
        if child.ends_with("c.vhd") {
            return Box::pin(std::future::ready(Err(Error::new(ErrorKind::Io, "the merge ends here"))));
        }
        HostNotes.note_child(parent, child)
    }
}

#[test]
fn a_child_in_a_folder_that_the_disk_has_nothing_in_any_more_gets_its_new_parent() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for folder in ["between", "golden", "other"] {
        fs::create_dir(dir.join(folder)).unwrap();
    }
    ok(dir, &["create", "golden/base.vhd", "--size", "16M"]);
    ok(dir, &["clone", "golden/base.vhd", "between/middle.vhd", "--allow-parents", "."]);
    ok(dir, &["clone", "between/middle.vhd", "leaf.vhd", "--allow-parents", "."]);
    ok(dir, &["clone", "between/middle.vhd", "other/c.vhd", "--allow-parents", "."]);
    let folders = ["", "between", "golden", "other"].map(|folder| dir.join(folder)).to_vec();
    let error = merge(dir, Some("middle.vhd"), EndsBefore(folders), Sizes::default()).unwrap_err();
    assert!(error.to_string().contains("ends here"), "{error}");
    // The disk names the base now, and nothing in the base's folder tells of the other child.
    assert_eq!(json(dir, &["info", "leaf.vhd", "--chain"])["layers"].as_array().unwrap().len(), 2);
    assert!(!fs::read_to_string(dir.join("golden/.base.vhd.spile-children")).unwrap().contains("c.vhd"));
    ok(dir, &["gc", "."]);
    assert!(!dir.join("between/middle.vhd").exists() && !dir.join(".leaf.vhd.spile-job").exists());
    ok(dir, &["check", "other/c.vhd", "--allow-parents", "."]);
    assert!(fs::read_to_string(dir.join("golden/.base.vhd.spile-children")).unwrap().contains("c.vhd"));
}
