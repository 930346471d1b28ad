//! The lines on images: clones, deletes, cold snapshots, and copies that stay sparse.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Instant;

use rustix::fs::{Advice, fadvise};
use serde_json::{Value, json};
use spile_core::{Error, ErrorKind, Result, ResultExt};
use spile_server::serving::api::client::escape;
use spile_server::serving::api::types::Attach;
use spile_server::uri::Target;

use super::super::live::{Live, allow_parents, beside, chains, create, create_child, run_to_end};
use super::super::process::disk_argument;
use super::{Figure, Seen, World, in_turns};
use crate::load::{self, Options};

/// Writes of 64 KiB into the disk of which clones are made.
const CLONED_WRITES: u64 = 64;
/// Random writes of 4 KiB into each layer of the chain under a cold disk.
const LAYER_WRITES: u64 = 1024;
/// The sparse disk has a piece of data after each so many bytes.
const SPARSE_PIECES: u64 = 64;
const SPARSE_PIECE_BYTES: usize = 256 << 10;

/// A clone of a large disk that is in use, and one of its snapshot, which nobody writes. Each is served by the same server, and read.
pub(super) fn clone(world: &World, round: u32) -> Result<Seen> {
    let disk = world.images.join("disk.qcow2");
    create(&disk, world.parameters.cloned_bytes)?;
    let live = Live::start(world.sockets, std::slice::from_ref(&disk), None)?;
    live.scatter(0, 64 << 10, CLONED_WRITES, 1)?;
    let parent = world.images.join("disk-parent.qcow2");
    live.snapshot("parent")?;
    live.scatter(0, 64 << 10, CLONED_WRITES, 2)?;
    let (quiet, used) = in_turns(
        round,
        || clone_and_read(&live, &parent, &world.images.join("quiet.qcow2")),
        || clone_and_read(&live, &disk, &world.images.join("used.qcow2")),
    )?;
    live.end()?;
    Ok(vec![(Figure::CloneMs, quiet.0), (Figure::CloneFirstAnswerMs, quiet.1), (Figure::CloneOfADiskInUseMs, used.1)])
}

/// Milliseconds that the command takes, and until a client has read something of the clone.
fn clone_and_read(live: &Live, parent: &Path, child: &Path) -> Result<(f64, f64)> {
    let name = child.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let begun = Instant::now();
    let words = ["clone".into(), parent.into(), child.into()].into_iter().chain(allow_parents(parent));
    run_to_end(words.collect())?;
    let command_ms = ms(begun);
    let disk = disk_argument(child, &format!(",name={name}")).to_string_lossy().into_owned();
    let attach = Attach { disk, vhost_user: Vec::new(), nbd: Vec::new() };
    let _: Value = live.call("POST", "/v1/disks", Some(&json!(attach)))?;
    load::measure(&Options { ios: Some(1), depth: 1, ..Options::new(Target::Nbd(live.nbd(&name))) })?;
    let read_ms = ms(begun);
    // The client's end may not have been noticed yet.
    let _: Value = live.call("DELETE", &format!("/v1/disks/{}?force", escape(&name)), None)?;
    Ok((command_ms, read_ms))
}

fn ms(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e3
}

/// A snapshot in the middle of a chain is deleted while a guest uses the disk, and `spile gc` merges the leaf with it.
pub(super) fn delete(world: &World, round: u32) -> Result<Seen> {
    let guest = |live: &Live| live.guests(world.parameters.depth);
    let new_chain = || {
        world.clear()?;
        chains(world.sockets, &world.images, 1, world.parameters.disk_bytes / 2)
    };
    let without = || {
        let live = new_chain()?;
        world.quiet(guest(&live))
    };
    let with = || {
        let live = new_chain()?;
        beside(guest(&live), || {
            let begun = Instant::now();
            run_to_end(command("delete", &world.images.join("disk0-middle.vhd")))?;
            let delete_ms = ms(begun);
            run_to_end(command("gc", &world.images))?;
            let freed_ms = ms(begun);
            let is_left = |name: &str| world.images.join(name).exists();
            match is_left("disk0-middle.vhd") || !is_left("disk0-base.vhd") {
                true => Err(Error::new(ErrorKind::Io, "spile gc has not merged what was deleted")),
                false => Ok((delete_ms, freed_ms)),
            }
        })
    };
    let (quiet, ((delete_ms, freed_ms), felt)) = in_turns(round, without, with)?;
    Ok(vec![
        (Figure::DeleteMs, delete_ms),
        (Figure::DeleteSpaceS, freed_ms / 1e3),
        (Figure::DeleteP99Ratio, felt.p99_us / quiet.p99_us.max(1.0)),
    ])
}

/// A command on one image or folder.
fn command(verb: &str, at: &Path) -> Vec<OsString> {
    vec![verb.into(), at.into()]
}

/// A disk over a chain of images whose pages are not in memory, and whose server has just been started. In one of two runs it gets a
/// snapshot at once.
pub(super) fn cold_snapshot(world: &World, round: u32) -> Result<Seen> {
    let parent = world.images.join("parent.vhd");
    create(&parent, world.parameters.disk_bytes)?;
    let live = Live::start(world.sockets, std::slice::from_ref(&parent), None)?;
    live.fill(0, world.parameters.disk_bytes)?;
    for layer in 2..world.parameters.chain {
        live.snapshot(&format!("layer{layer}"))?;
        live.scatter(0, 4096, LAYER_WRITES, layer.into())?;
    }
    live.end()?;
    let cold = |name: &str, has_snapshot: bool| {
        let disk = world.images.join(format!("{name}.vhd"));
        create_child(&disk, &parent)?;
        forget(&world.images)?;
        let live = Live::start(world.sockets, std::slice::from_ref(&disk), None)?;
        beside(live.guests(world.parameters.depth), || {
            let made = has_snapshot.then(|| live.snapshot("cold")).transpose()?;
            world.rest()?;
            Ok(made.map_or(0.0, |made| made.longest_stall_us))
        })
    };
    let ((_, without), (stall_us, with)) = in_turns(round, || cold("without", false), || cold("with", true))?;
    Ok(vec![
        (Figure::ColdSnapshotLongerMs, (with.longest_us - without.longest_us) / 1e3),
        (Figure::ColdSnapshotStallMs, stall_us / 1e3),
    ])
}

/// Has the kernel drop what it has of the files of a folder in its page cache.
fn forget(folder: &Path) -> Result<()> {
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io("read the folder", e)).at_path(folder)?;
    for path in entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file()) {
        let file = File::open(&path).map_err(|e| Error::io("open", e)).at_path(&path)?;
        // Pages that are not written yet stay.
        file.sync_all().map_err(|e| Error::io("sync", e)).at_path(&path)?;
        fadvise(&file, 0, None, Advice::DontNeed)
            .map_err(|e| Error::io("drop the pages of", e.into()))
            .at_path(&path)?;
    }
    Ok(())
}

/// A raw disk with a piece of data here and there is copied by several commands.
pub(super) fn sparse(world: &World) -> Result<Seen> {
    let source = world.images.join("disk.raw");
    let size_bytes = 4 * world.parameters.disk_bytes;
    make_sparse(&source, size_bytes).map_err(|e| Error::io("make a sparse file", e)).at_path(&source)?;
    let source_bytes = taken_bytes(&source)?;
    let mut seen = Seen::new();
    // The move comes last: it takes the source away.
    for (figure, verb, target) in [
        (Figure::SparseRawRatio, "convert", "convert.raw"),
        (Figure::SparseVhdRatio, "convert", "convert.vhd"),
        (Figure::SparseBackupRatio, "backup", "backup.raw"),
        (Figure::SparseMoveRatio, "move", "move.raw"),
    ] {
        let target = world.images.join(target);
        let to = (verb == "move").then(|| OsString::from("--to"));
        run_to_end(
            [verb.into(), source.clone().into()].into_iter().chain(to).chain([target.clone().into()]).collect(),
        )?;
        seen.push((figure, taken_bytes(&target)? as f64 / source_bytes as f64));
    }
    Ok(seen)
}

fn make_sparse(path: &Path, size_bytes: u64) -> std::io::Result<()> {
    let file = File::create_new(path)?;
    file.set_len(size_bytes)?;
    let piece = vec![0x5a; SPARSE_PIECE_BYTES];
    // Not where a block of a VHD begins: a copy by whole blocks would take more.
    let each = size_bytes / SPARSE_PIECES;
    (0..SPARSE_PIECES).try_for_each(|number| file.write_all_at(&piece, number * each + each / 4))
}

/// The space that a file takes on the host, once all of it is written.
fn taken_bytes(path: &Path) -> Result<u64> {
    const UNIT_BYTES: u64 = 512;
    let file = File::open(path).and_then(|file| file.sync_all().map(|()| file));
    let about = file.and_then(|file| file.metadata());
    about.map(|about| about.blocks() * UNIT_BYTES).map_err(|e| Error::io("look at", e)).at_path(path)
}
