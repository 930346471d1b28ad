//! Merges of a child into its parent, and a child that is made to need no parent: on images that nobody uses.
//!
//! Spile works on VHDs, qemu-img on qcow2, for it has no children of VHDs. The parents are full and the same, and so are the writes that
//! the children have got. The plain copy has as many bytes as there are to be moved.

use super::super::Plan;
use super::super::images::{fill, forget};
use super::{Side, Task, World, measure};
use crate::{Result, shell};
use serde_json::Value;
use std::process::Command;

/// The images as they are before each command, and as the commands find them. A child names its parent by its name alone.
pub const MASTERS: &str = "masters";
pub const SPILE: [&str; 2] = ["parent.vhd", "child.vhd"];
pub const QEMU: [&str; 2] = ["parent.qcow2", "child.qcow2"];

/// Measures merges and flattening.
pub fn run(plan: &Plan, world: &mut World) -> Result<Vec<Value>> {
    let tasks = [merge(), flatten()];
    if !tasks.iter().any(|task| plan.asks_for(&task.name)) || !shell::on_path("qemu-img") {
        return Ok(Vec::new());
    }
    make(world)?;
    let mut results = Vec::new();
    for task in tasks {
        results.extend(measure(plan, world, &task)?);
    }
    Ok(results)
}

fn merge() -> Task {
    let spile =
        Side::new("spile", |world| put(world, &SPILE), |world| with(world.spile(&["coalesce"]), world, SPILE[1]));
    let qemu = Side::new(
        "qemu-img commit",
        |world| put(world, &QEMU),
        |world| durable(&["commit", "-t", "writeback", "-d", "-f", "qcow2"], world, QEMU[0]),
    );
    Task { name: "merge into the parent".to_string(), sides: vec![spile, qemu, copied(SPILE[1])], aim: 1.0 }
}

fn flatten() -> Task {
    let spile =
        Side::new("spile", |world| put(world, &SPILE), |world| with(world.spile(&["flatten"]), world, SPILE[1]));
    let qemu = Side::new(
        "qemu-img rebase",
        |world| put(world, &QEMU),
        |world| durable(&["rebase", "-t", "writeback", "-f", "qcow2", "-b", ""], world, QEMU[1]),
    );
    Task { name: "flatten the child".to_string(), sides: vec![spile, qemu, copied(SPILE[0])], aim: 1.0 }
}

/// A plain copy of one of the images, made durable: what moving its bytes costs at least.
fn copied(name: &'static str) -> Side {
    Side::new(
        "plain copy",
        move |world| put(world, &[]).and_then(|()| forget(&world.path(MASTERS).join(name))),
        move |world| {
            let mut command = Command::new("dd");
            command.args(["bs=1M", "conv=fsync"]);
            command.arg(format!("if={}", world.path(MASTERS).join(name).display()));
            command.arg(format!("of={}", world.path("copy").display()));
            command
        },
    )
    .bound()
}

fn with(mut command: Command, world: &World, name: &str) -> Command {
    command.arg(world.path(name));
    command
}

fn qemu_img(words: &[&str]) -> Command {
    let mut command = Command::new("qemu-img");
    command.args(words);
    command
}

/// qemu-img's work on the child, after which the image `changed` is durable, as Spile's is: qemu-img by itself leaves it to the page cache.
fn durable(words: &[&str], world: &World, changed: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", r#"changed=$1; shift; qemu-img "$@" && sync "$changed""#, "sh"]).arg(world.path(changed));
    command.args(words).arg(world.path(QEMU[1]));
    command
}

/// Makes the images: a full parent, a child with scattered writes of 64 KiB, a fourth of the disk.
pub fn make(world: &mut World) -> Result<()> {
    let masters = world.path(MASTERS);
    std::fs::create_dir_all(&masters).map_err(|error| format!("{}: {error}", masters.display()))?;
    let at = |name: &str| masters.join(name);
    fill(&at("full.raw"), world.size_bytes)?;
    let mut convert = world.spile(&["convert"]);
    convert.arg(at("full.raw")).arg(at(SPILE[0]));
    world.run(convert)?;
    let mut child = world.spile(&["create"]);
    child.arg(at(SPILE[1])).arg("--parent").arg(at(SPILE[0]));
    world.run(child)?;
    let mut convert = qemu_img(&["convert", "-O", "qcow2"]);
    convert.arg(at("full.raw")).arg(at(QEMU[0]));
    world.run(convert)?;
    let mut child = qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", QEMU[0]]);
    child.arg(at(QEMU[1]));
    world.run(child)?;
    world.serve(&at(SPILE[1]))?;
    write(world)?;
    let mut server = Command::new("qemu-nbd");
    server.args(["--persistent", "--export-name=", "--format=qcow2", "--socket"]).arg(world.socket()).arg(at(QEMU[1]));
    world.serve_by(server)?;
    write(world)?;
    world.server = None;
    std::fs::remove_file(at("full.raw")).map_err(|error| format!("{}: {error}", masters.display()))
}

fn write(world: &World) -> Result<()> {
    let writes = (world.size_bytes / 4 / (64 << 10)).to_string();
    let mut load =
        world.spile(&["load", "--rw", "randwrite", "--bs", "64k", "--seed", "1", "--json", "--ios", &writes]);
    load.arg(world.uri());
    world.run(load)
}

/// Puts these images where the command finds them, durably and out of the page cache, and removes what commands before have left: no command pays for that, and
/// none finds in memory what disks that are in use for days do not have there.
pub fn put(world: &World, names: &[&str]) -> Result<()> {
    for name in [SPILE[0], SPILE[1], QEMU[0], QEMU[1], "copy"] {
        let _ = std::fs::remove_file(world.path(name));
    }
    for name in names {
        let mut copy = Command::new("cp");
        copy.arg("--sparse=always").arg(world.path(MASTERS).join(name)).arg(world.path(name));
        world.run(copy)?;
    }
    world.run(Command::new("sync"))?;
    names.iter().try_for_each(|name| forget(&world.path(name)))
}
