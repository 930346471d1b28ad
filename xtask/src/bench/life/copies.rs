//! Copies of whole disks: between files, out of an NBD server and into one.

use super::super::Plan;
use super::super::images::fill;
use super::{Side, Task, World, measure};
use crate::Result;
use serde_json::Value;
use std::process::Command;

/// Which way a copy goes.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    /// What is copied, and what it is called in qemu-img.
    from: (&'static str, &'static str),
    to: (&'static str, &'static str),
}

const FULL: &str = "full.raw";
const FULL_VHD: &str = "full.vhd";
const NEW: &str = "new.raw";
const NEW_VHD: &str = "new.vhd";
/// Stands for the export of the NBD server.
const EXPORT: &str = "export";

const FILES: [Way; 3] = [
    Way { name: "copy raw to raw", from: (FULL, "raw"), to: (NEW, "raw") },
    Way { name: "copy raw to VHD", from: (FULL, "raw"), to: (NEW_VHD, "vpc") },
    Way { name: "copy VHD to raw", from: (FULL_VHD, "vpc"), to: (NEW, "raw") },
];
const OUT: Way = Way { name: "copy NBD to raw", from: (EXPORT, "raw"), to: (NEW, "raw") };
const IN: Way = Way { name: "copy raw to NBD", from: (FULL, "raw"), to: (EXPORT, "raw") };

/// Measures all copies.
pub fn run(plan: &Plan, world: &mut World) -> Result<Vec<Value>> {
    let ways = [&FILES[..], &[OUT, IN]].concat();
    if !ways.iter().any(|way| plan.asks_for(way.name)) {
        return Ok(Vec::new());
    }
    fill(&world.path(FULL), world.size_bytes)?;
    let mut convert = world.spile(&["convert"]);
    convert.arg(world.path(FULL)).arg(world.path(FULL_VHD));
    world.run(convert)?;
    let mut results = Vec::new();
    for way in ways {
        match (way.from.0, way.to.0) {
            (EXPORT, _) => world.serve(&world.path(FULL))?,
            (_, EXPORT) => {
                let mut create = world.spile(&["create", "--size", &world.size_bytes.to_string()]);
                create.arg(world.path("target.raw"));
                world.run(create)?;
                world.serve(&world.path("target.raw"))?;
            }
            _ => {}
        }
        results.extend(measure(plan, world, &task(way))?);
    }
    Ok(results)
}

/// Removes what a side before has made.
fn clean(world: &World) -> Result<()> {
    for name in [NEW, NEW_VHD] {
        let _ = std::fs::remove_file(world.path(name));
    }
    Ok(())
}

/// Where a copy begins or ends.
fn place(world: &World, name: &str) -> std::ffi::OsString {
    if name == EXPORT { world.uri().into() } else { world.path(name).into() }
}

fn task(way: Way) -> Task {
    let is_raw = [way.from.1, way.to.1] == ["raw", "raw"];
    let mut sides = vec![
        Side::new("spile", clean, move |world| {
            let mut command = world.spile(&["convert"]);
            command.arg(place(world, way.from.0)).arg(place(world, way.to.0));
            command
        }),
        Side::new("qemu-img", clean, move |world| {
            let mut command = Command::new("qemu-img");
            // Its usual way leaves the bytes in the page cache. An export is there already.
            command.args(["convert", "-t", "writeback", "-f", way.from.1, "-O", way.to.1]);
            command.args((way.to.0 == EXPORT).then_some("-n"));
            command.arg(place(world, way.from.0)).arg(place(world, way.to.0));
            command
        }),
    ];
    if is_raw {
        sides.push(Side::new("nbdcopy", clean, move |world| {
            let mut command = Command::new("nbdcopy");
            command.arg("--flush").arg(place(world, way.from.0)).arg(place(world, way.to.0));
            command
        }));
    }
    Task { name: way.name.to_string(), sides, aim: 1.0 }
}
