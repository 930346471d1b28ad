//! The lines of `cargo xtask bench-vhost`: over vhost-user-blk, beside qemu-storage-daemon, and beside the medium itself
//! as fio has it with io_uring in one process.

use super::Plan;
use super::kinds::{Aim, Aio, Front, Kind, Role};
use super::lines::{Cache, Format, Group, Line, Memory, Side, State};
use super::server::core_count;

const SPILE: Kind = Kind::Spile(Front::Vhost);
const URING: Kind = Kind::Daemon(Aio::Uring);

/// All groups.
pub fn groups(plan: &Plan) -> Vec<Group> {
    vec![
        null(),
        page(),
        direct(),
        engines(),
        engines_first(plan),
        in_place("vhd-page", "allocated images, page cache", Cache::Page),
        in_place("vhd-direct", "allocated images, O_DIRECT", Cache::Direct),
        first(plan, "first-page", "writes into empty images, page cache", Cache::Page),
        first(plan, "first-direct", "writes into empty images, O_DIRECT", Cache::Direct),
        qcow2("qcow2-page", "allocated qcow2, page cache", Cache::Page, State::Full, in_place_lines()),
        qcow2("qcow2-direct", "allocated qcow2, O_DIRECT", Cache::Direct, State::Full, in_place_lines()),
        qcow2("qcow2-first-page", "writes into empty qcow2, page cache", Cache::Page, State::Fresh, first_lines(plan)),
        qcow2(
            "qcow2-first-direct",
            "writes into empty qcow2, O_DIRECT",
            Cache::Direct,
            State::Fresh,
            first_lines(plan),
        ),
        qcow2_child(plan, "qcow2-child-page", "writes into a new child of a full qcow2, page cache", Cache::Page),
        qcow2_child(plan, "qcow2-child-direct", "writes into a new child of a full qcow2, O_DIRECT", Cache::Direct),
        qcow2_missed(),
        large(),
        polling("poll-null", "adaptive polling, no medium: ÷peer is to --poll 0", Format::Null, Cache::Page),
        polling(
            "poll-direct",
            "adaptive polling, raw file, O_DIRECT: ÷peer is to --poll 0",
            Format::Raw,
            Cache::Direct,
        ),
        queues("queues-null", "several queues, no medium", Format::Null),
        queues("queues-page", "several queues, raw file, page cache", Format::Raw),
    ]
}

fn randread(depth: u32) -> Line {
    Line::new("randread", "4k", depth, 1)
}

fn randwrite(depth: u32) -> Line {
    Line::new("randwrite", "4k", depth, 1)
}

fn null() -> Group {
    let lines = vec![
        randread(32).aim(Aim::CpuOf(Role::Peer, 0.45)),
        randread(1).p50().aim(Aim::P50Of(Role::Peer, 0.55)),
        randread(1).polling().p50().aim(Aim::P50AtMost(1.0)),
        randread(128),
    ];
    let sides = vec![
        Side::new("spile", SPILE, Format::Null, Cache::Page),
        Side::new("q-s-d", URING, Format::Null, Cache::Page),
        // Spile's null fills the memory that is read into; this one leaves it as it is.
        Side::new("q-s-d, no fill", Kind::Daemon(Aio::NoFill), Format::Null, Cache::Page).role(Role::Shown),
    ];
    Group { name: "null", about: "no medium: the cost of the interface", sides, lines }
}

fn page() -> Group {
    let lines = vec![
        randread(32).aim(Aim::RateOf(Role::Bare, 0.9)).aim(Aim::CpuAtMost(2.2)),
        randwrite(32).aim(Aim::RateOf(Role::Bare, 1.2)),
        randread(128).aim(Aim::RateOf(Role::Bare, 0.9)).aim(Aim::CpuAtMost(2.2)),
        randread(1).p50(),
        Line::new("read", "64k", 1, 1).aim(Aim::RateOf(Role::Bare, 0.4)),
        Line::new("read", "256k", 1, 1).aim(Aim::RateOf(Role::Bare, 0.6)),
        Line::new("read", "1m", 1, 1),
        Line::new("read", "1m", 8, 1),
    ];
    let sides = vec![
        Side::new("spile", SPILE, Format::Raw, Cache::Page),
        Side::new("q-s-d io_uring", URING, Format::Raw, Cache::Page),
        Side::new("q-s-d threads", Kind::Daemon(Aio::Threads), Format::Raw, Cache::Page),
        Side::new("bare", Kind::Fio, Format::Raw, Cache::Page).role(Role::Bare),
    ];
    let about = "raw file, page cache (native AIO needs O_DIRECT: threads instead)";
    Group { name: "page", about, sides, lines }
}

fn raw_direct_sides() -> Vec<Side> {
    vec![
        Side::new("spile", SPILE, Format::Raw, Cache::Direct),
        Side::new("q-s-d io_uring", URING, Format::Raw, Cache::Direct),
        Side::new("q-s-d native AIO", Kind::Daemon(Aio::Native), Format::Raw, Cache::Direct),
        Side::new("bare", Kind::Fio, Format::Raw, Cache::Direct).role(Role::Bare),
    ]
}

fn direct() -> Group {
    let lines = vec![
        randread(1).p50().aim(Aim::RateOf(Role::Bare, 0.8)),
        randwrite(32).aim(Aim::RateOf(Role::Bare, 0.97)).aim(Aim::CpuAtMost(6.0)),
        randread(32).aim(Aim::RateOf(Role::Bare, 0.97)).aim(Aim::CpuAtMost(5.5)),
        randread(128).aim(Aim::RateOf(Role::Bare, 1.0)).aim(Aim::CpuAtMost(5.5)),
        randwrite(1).p50(),
    ];
    Group { name: "direct", about: "raw file, O_DIRECT", sides: raw_direct_sides(), lines }
}

/// Spile's engines beside each other, the first of them Linux AIO.
fn engine_sides() -> Vec<Side> {
    let ours = |name, options| Side::new(name, SPILE, Format::Raw, Cache::Direct).options(options);
    vec![
        ours("aio", &["--engine", "aio"]),
        ours("uring", &["--engine", "uring"]).role(Role::Uring),
        ours("threads", &["--engine", "threads"]).role(Role::Shown),
        Side::new("q-s-d native AIO", Kind::Daemon(Aio::Native), Format::Raw, Cache::Direct),
    ]
}

fn engines() -> Group {
    let deep = |line: Line| line.aim(Aim::RateOf(Role::Uring, 0.9)).aim(Aim::RateOf(Role::Peer, 1.0));
    let shallow = |line: Line| line.p50().aim(Aim::RateOf(Role::Uring, 0.8)).aim(Aim::RateOf(Role::Peer, 1.0));
    let lines = vec![
        deep(randread(32)),
        deep(randwrite(32)),
        shallow(randread(1)),
        shallow(randwrite(1)),
        randread(128),
        Line::new("read", "256k", 8, 1),
    ];
    Group {
        name: "engines",
        about: "Linux AIO beside the other engines, raw file, O_DIRECT",
        sides: engine_sides(),
        lines,
    }
}

fn engines_first(plan: &Plan) -> Group {
    let sides = engine_sides().into_iter().map(|side| side.state(State::Fresh)).collect();
    let lines = vec![randwrite(32).requests(plan, 20_000), Line::new("write", "64k", 8, 1).requests(plan, 16_000)];
    Group { name: "engines-first", about: "the same, writes into an empty raw file, O_DIRECT", sides, lines }
}

fn format_sides(cache: Cache, state: State) -> Vec<Side> {
    let sides = [
        Side::new("spile vhd", SPILE, Format::Vhd, cache),
        Side::new("spile raw", SPILE, Format::Raw, cache).role(Role::Raw),
        Side::new("q-s-d vpc", URING, Format::Vpc, cache),
        Side::new("q-s-d qcow2", URING, Format::Qcow2, cache),
        Side::new("q-s-d raw", URING, Format::Raw, cache).role(Role::Shown),
    ];
    sides.map(|side| side.state(state)).to_vec()
}

fn in_place(name: &'static str, about: &'static str, cache: Cache) -> Group {
    let lines = vec![randwrite(32).aim(Aim::RateOf(Role::Raw, 0.95)), randread(32), randread(1).p50(), randread(128)];
    Group { name, about, sides: format_sides(cache, State::Full), lines }
}

/// The same requests for every side: by time, the faster ones would write more.
fn first(plan: &Plan, name: &'static str, about: &'static str, cache: Cache) -> Group {
    let lines = vec![
        randwrite(32).requests(plan, 20_000).aim(Aim::RateOf(Role::Raw, 0.9)),
        Line::new("write", "64k", 8, 1).requests(plan, 16_000).aim(Aim::RateOf(Role::Raw, 0.9)),
    ];
    Group { name, about, sides: format_sides(cache, State::Fresh), lines }
}

/// What a qcow2 costs at most of the CPU time for a request of its best peer.
const QCOW2_CPU: Aim = Aim::CpuOf(Role::Peer, 0.6);

fn in_place_lines() -> Vec<Line> {
    let write = randwrite(32).aim(Aim::RateOf(Role::Peer, 1.3)).aim(Aim::RateOf(Role::Raw, 0.97)).aim(QCOW2_CPU);
    let read = randread(32).aim(Aim::RateOf(Role::Peer, 1.3)).aim(Aim::RateOf(Role::Raw, 0.97)).aim(QCOW2_CPU);
    vec![write, read, randread(1).p50().aim(QCOW2_CPU)]
}

/// The same requests for every side, as in [`first`].
fn first_lines(plan: &Plan) -> Vec<Line> {
    let lines = [
        randwrite(32).requests(plan, 20_000),
        Line::new("write", "4k", 32, 1).requests(plan, 40_000),
        Line::new("write", "64k", 8, 1).requests(plan, 16_000),
    ];
    let aimed = |line: Line| line.aim(Aim::RateOf(Role::Peer, 1.3)).aim(Aim::RateOf(Role::Raw, 0.9)).aim(QCOW2_CPU);
    lines.map(aimed).into()
}

fn qcow2(name: &'static str, about: &'static str, cache: Cache, state: State, lines: Vec<Line>) -> Group {
    let mut sides = qcow2_alone(cache, state);
    sides.insert(1, Side::new("spile raw", SPILE, Format::Raw, cache).role(Role::Raw).state(state));
    Group { name, about, sides, lines }
}

fn qcow2_alone(cache: Cache, state: State) -> Vec<Side> {
    let sides =
        [Side::new("spile qcow2", SPILE, Format::Qcow2, cache), Side::new("q-s-d qcow2", URING, Format::Qcow2, cache)];
    sides.map(|side| side.state(state)).into()
}

fn qcow2_child(plan: &Plan, name: &'static str, about: &'static str, cache: Cache) -> Group {
    let line = randwrite(32).requests(plan, 20_000).aim(Aim::RateOf(Role::Peer, 5.0)).aim(QCOW2_CPU);
    Group { name, about, sides: qcow2_alone(cache, State::Child), lines: vec![line] }
}

fn qcow2_missed() -> Group {
    let aimed = |line: Line| line.aim(Aim::RateOf(Role::Peer, 2.0)).aim(QCOW2_CPU);
    let lines = vec![aimed(randread(32)), aimed(randread(1).p50())];
    let about = "qcow2 whose tables are four times as large as the cache of each server, page cache";
    Group { name: "qcow2-missed", about, sides: qcow2_alone(Cache::Page, State::Mapped), lines }
}

fn large() -> Group {
    let read = |block, depth| Line::new("read", block, depth, 1);
    let mut lines = vec![
        read("256k", 1).memory(Memory::Scattered),
        read("1m", 8).memory(Memory::Pages),
        read("256k", 8).memory(Memory::Scattered),
        read("1m", 1).memory(Memory::Pages),
    ];
    for block in ["256k", "1m", "2m"] {
        let huge = [1, 8].map(|depth| read(block, depth).memory(Memory::Huge).aim(Aim::RateOf(Role::Bare, 0.97)));
        lines.extend(huge);
    }
    Group { name: "large", about: "large reads, raw file, O_DIRECT", sides: raw_direct_sides(), lines }
}

fn polling(name: &'static str, about: &'static str, format: Format, cache: Cache) -> Group {
    let lines = vec![randread(1).p50(), randread(1).rate(1000).p50(), randread(32)];
    let sides = vec![
        Side::new("spile", SPILE, format, cache),
        Side::new("spile --poll 0", SPILE, format, cache).options(&["--poll", "0"]),
        Side::new("q-s-d", URING, format, cache).role(Role::Shown),
    ];
    Group { name, about, sides, lines }
}

/// One queue and two: with a worker for each where there are cores for two workers and two clients.
fn queues(name: &'static str, about: &'static str, format: Format) -> Group {
    let lines = [1, 2].map(|queues| Line::new("randread", "4k", 32, queues)).into();
    let (ours, options, cores): (_, &[&str], _) = match core_count() {
        0..4 => ("spile, 1 worker", &[], 1),
        _ => ("spile, 2 workers", &["--workers", "2"], 2),
    };
    let sides = vec![
        Side::new(ours, SPILE, format, Cache::Page).options(options).cores(cores),
        Side::new("q-s-d", URING, format, Cache::Page).cores(cores),
    ];
    Group { name, about, sides, lines }
}
