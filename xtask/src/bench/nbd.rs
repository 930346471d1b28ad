//! The lines of `cargo xtask bench`: over NBD, beside qemu-nbd and nbdkit.

use super::Plan;
use super::kinds::{Aim, Front, Kind, Role};
use super::lines::{Cache, Format, Group, Line, Side, State};

const SPILE: Kind = Kind::Spile(Front::Nbd);

/// All groups.
pub fn groups(plan: &Plan) -> Vec<Group> {
    let mut groups = vec![raw_page(), raw_direct(), vhd(), chains(), fresh(), fresh_direct()];
    groups.push(rewrites(plan, "first", Format::Vhd, Cache::Page));
    groups.push(rewrites(plan, "first-direct", Format::Vhd, Cache::Direct));
    groups.push(rewrites(plan, "first-raw", Format::Raw, Cache::Page));
    groups.push(rewrites(plan, "first-raw-direct", Format::Raw, Cache::Direct));
    groups
}

fn raw_page() -> Group {
    let mut lines = Vec::new();
    for pattern in ["randread", "randwrite"] {
        for (depth, connections) in [(1, 1), (32, 1), (128, 1), (1, 4), (32, 4), (128, 4)] {
            lines.push(Line::new(pattern, "4k", depth, connections));
        }
    }
    for pattern in ["read", "write"] {
        for (block, depth) in [("64k", 1), ("64k", 8), ("1m", 1), ("1m", 8)] {
            lines.push(Line::new(pattern, block, depth, 1));
        }
    }
    let sides = vec![
        Side::new("spile", SPILE, Format::Raw, Cache::Page),
        Side::new("qemu-nbd", Kind::Qemu, Format::Raw, Cache::Page),
        Side::new("nbdkit file", Kind::Nbdkit, Format::Raw, Cache::Page),
    ];
    Group { name: "raw", about: "raw file, page cache", sides, lines }
}

fn raw_direct() -> Group {
    let mut lines = vec![
        Line::new("randread", "4k", 1, 1),
        Line::new("randread", "4k", 32, 1),
        Line::new("randread", "4k", 128, 4),
        Line::new("randwrite", "4k", 1, 1),
        Line::new("randwrite", "4k", 32, 1),
    ];
    lines.push(Line::new("read", "1m", 8, 1));
    lines.push(Line::new("write", "1m", 8, 1));
    let sides = vec![
        Side::new("spile", SPILE, Format::Raw, Cache::Direct),
        Side::new("qemu-nbd", Kind::Qemu, Format::Raw, Cache::Direct),
    ];
    let about = "raw file, O_DIRECT (qemu-nbd with --aio=io_uring; nbdkit's file plugin has none)";
    Group { name: "raw-direct", about, sides, lines }
}

fn vhd() -> Group {
    let lines = vec![
        Line::new("randread", "4k", 1, 1),
        Line::new("randread", "4k", 32, 1),
        Line::new("randread", "4k", 128, 4),
        Line::new("randwrite", "4k", 32, 1),
        Line::new("read", "64k", 8, 1),
        Line::new("write", "1m", 8, 1),
    ];
    let sides = vec![
        Side::new("spile vhd", SPILE, Format::Vhd, Cache::Page),
        Side::new("qemu vpc", Kind::Qemu, Format::Vpc, Cache::Page),
        Side::new("qemu qcow2", Kind::Qemu, Format::Qcow2, Cache::Page),
    ];
    Group { name: "vhd", about: "allocated image, page cache", sides, lines }
}

fn chains() -> Group {
    let aim = Aim::RateOf(Role::Peer, 0.95);
    let lines = vec![
        Line::new("randread", "4k", 32, 1).aim(aim),
        Line::new("randread", "4k", 1, 1).aim(aim),
        Line::new("randread", "4k", 128, 4).aim(aim),
    ];
    let chain = |name, depth| Side::new(name, SPILE, Format::Vhd, Cache::Page).state(State::Chain(depth));
    let sides = vec![chain("depth 30", 30), chain("depth 1", 1), chain("depth 10", 10).role(Role::Shown)];
    Group { name: "chain", about: "VHD chain, every block partly written in every child", sides, lines }
}

fn fresh_lines() -> Vec<Line> {
    vec![Line::new("randwrite", "4k", 32, 1), Line::new("write", "64k", 8, 1), Line::new("write", "1m", 8, 1)]
}

fn fresh_sides(cache: Cache) -> Vec<Side> {
    let sides = [
        Side::new("spile vhd", SPILE, Format::Vhd, cache),
        Side::new("qemu vpc", Kind::Qemu, Format::Vpc, cache),
        Side::new("qemu qcow2", Kind::Qemu, Format::Qcow2, cache),
    ];
    sides.map(|side| side.state(State::Fresh)).to_vec()
}

fn fresh() -> Group {
    let about = "writes into an empty image, page cache";
    Group { name: "fresh", about, sides: fresh_sides(Cache::Page), lines: fresh_lines() }
}

fn fresh_direct() -> Group {
    let about = "writes into an empty image, O_DIRECT";
    Group { name: "fresh-direct", about, sides: fresh_sides(Cache::Direct), lines: fresh_lines() }
}

/// The same requests twice to one server: the first allocate, the second find all in place. A sparse raw file shows
/// what of that is the host's file system's doing.
fn rewrites(plan: &Plan, name: &'static str, format: Format, cache: Cache) -> Group {
    let lines = vec![
        Line::new("randwrite", "4k", 32, 1).requests(plan, 60_000),
        Line::new("write", "64k", 8, 1).requests(plan, 16_000),
    ];
    let sides = vec![
        Side::new("first", SPILE, format, cache).state(State::Fresh),
        Side::new("rewrite", SPILE, format, cache).state(State::Again),
    ];
    let about = match (format, cache) {
        (Format::Raw, Cache::Page) => "the same on a sparse raw file, page cache",
        (Format::Raw, Cache::Direct) => "the same on a sparse raw file, O_DIRECT",
        (_, Cache::Page) => "first writes into a VHD beside rewrites of the same places, page cache",
        (_, Cache::Direct) => "first writes into a VHD beside rewrites of the same places, O_DIRECT",
    };
    Group { name, about, sides, lines }
}
