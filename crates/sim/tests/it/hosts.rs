//! Simulated hosts with one store.

use spile_sim::rng::Rng;
use spile_sim::{Hardware, World};

/// A host with an empty file at `path`, or with a device of `device_bytes`, which holds old bytes, in one of `one_in` hosts.
pub fn with_file_or_device(seed: u64, rng: &mut Rng, one_in: u64, path: &str, device_bytes: u64) -> World {
    let devices = rng.chance(1, one_in);
    let align_bytes = if rng.chance(1, 2) { 512 } else { 4096 };
    let world = World::new(seed, Hardware { align_bytes, punches: !devices, devices });
    match devices {
        true => world.install_device(path, device_bytes, device_bytes),
        false => world.install_empty(path, 0),
    }
    world
}
