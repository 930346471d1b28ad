//! What is measured: groups of lines, and the sides that each line compares.

use super::Plan;
use super::server::Kind;

/// How a server holds the disk's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cache {
    /// In the page cache.
    Page,
    /// By O_DIRECT.
    Direct,
}

/// What an image is made of before a point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Every byte written once; made once and used by all.
    Full,
    /// New and empty before each point.
    Fresh,
    /// The server and image of the side before, as that side left them.
    Again,
    /// A VHD chain of that many files, every block partly written in every child.
    Chain(usize),
}

/// A format, by the name that Spile's and QEMU's commands share or translate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    Raw,
    /// Made and served by Spile.
    Vhd,
    /// QEMU's own VHD.
    Vpc,
    Qcow2,
}

/// One server on one image.
#[derive(Clone)]
pub struct Side {
    /// Its column.
    pub name: &'static str,
    pub server: Kind,
    pub format: Format,
    pub state: State,
    pub cache: Cache,
}

/// One load.
pub struct Line {
    /// As printed: pattern, size, depth, connections.
    pub name: String,
    pattern: &'static str,
    block: &'static str,
    depth: u32,
    connections: u32,
    /// Ends after so many requests instead of after the plan's time.
    requests: Option<u64>,
}

/// Lines that compare the same sides. The first side is Spile's; ratios are its to the best other.
pub struct Group {
    pub name: &'static str,
    pub about: &'static str,
    pub sides: Vec<Side>,
    pub lines: Vec<Line>,
}

impl Line {
    fn new(pattern: &'static str, block: &'static str, depth: u32, connections: u32) -> Line {
        let name = format!("{pattern} {block} depth {depth} × {connections}");
        Line { name, pattern, block, depth, connections, requests: None }
    }

    /// The same number of requests, and by the same seed the same ones, for every side.
    fn requests(mut self, plan: &Plan, count: u64) -> Line {
        self.requests = Some(if plan.quick { count / 100 } else { count });
        self
    }

    /// Does `--only` take it?
    pub fn is_asked_for(&self, plan: &Plan, group: &Group) -> bool {
        format!("{}/{}", group.name, self.name).contains(&plan.only)
    }

    /// Requests move whole pages or more: bytes a second say more than requests a second.
    pub fn is_bandwidth(&self) -> bool {
        self.block != "4k"
    }

    /// What `spile load` is told.
    pub fn load_arguments(&self, plan: &Plan) -> Vec<String> {
        let (depth, connections) = (self.depth.to_string(), self.connections.to_string());
        let mut words = vec!["--rw", self.pattern, "--bs", self.block, "--depth", &depth];
        words.extend(["--connections", &connections]);
        let limit = match self.requests {
            Some(count) => ["--ios".to_string(), count.to_string()],
            None => ["--runtime".to_string(), format!("{}ms", (plan.point_s * 1000.0) as u64)],
        };
        words.into_iter().map(str::to_string).chain(limit).collect()
    }
}

/// All groups; a quick plan keeps the first two lines of each.
pub fn groups(plan: &Plan) -> Vec<Group> {
    let mut groups = vec![raw_page(), raw_direct(), vhd(), chains(), fresh(), fresh_direct()];
    groups.push(rewrites(plan, "first", Format::Vhd, Cache::Page));
    groups.push(rewrites(plan, "first-direct", Format::Vhd, Cache::Direct));
    groups.push(rewrites(plan, "first-raw", Format::Raw, Cache::Page));
    groups.push(rewrites(plan, "first-raw-direct", Format::Raw, Cache::Direct));
    if plan.quick {
        for group in &mut groups {
            group.lines.truncate(2);
        }
    }
    groups
}

fn side(name: &'static str, server: Kind, format: Format, state: State, cache: Cache) -> Side {
    Side { name, server, format, state, cache }
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
        side("spile", Kind::Spile, Format::Raw, State::Full, Cache::Page),
        side("qemu-nbd", Kind::Qemu, Format::Raw, State::Full, Cache::Page),
        side("nbdkit file", Kind::Nbdkit, Format::Raw, State::Full, Cache::Page),
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
        side("spile", Kind::Spile, Format::Raw, State::Full, Cache::Direct),
        side("qemu-nbd", Kind::Qemu, Format::Raw, State::Full, Cache::Direct),
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
        side("spile vhd", Kind::Spile, Format::Vhd, State::Full, Cache::Page),
        side("qemu vpc", Kind::Qemu, Format::Vpc, State::Full, Cache::Page),
        side("qemu qcow2", Kind::Qemu, Format::Qcow2, State::Full, Cache::Page),
    ];
    Group { name: "vhd", about: "allocated image, page cache", sides, lines }
}

fn chains() -> Group {
    let lines = vec![
        Line::new("randread", "4k", 32, 1),
        Line::new("randread", "4k", 1, 1),
        Line::new("randread", "4k", 128, 4),
    ];
    let chain = |name, depth| side(name, Kind::Spile, Format::Vhd, State::Chain(depth), Cache::Page);
    let sides = vec![chain("depth 30", 30), chain("depth 10", 10), chain("depth 1", 1)];
    Group { name: "chain", about: "VHD chain, every block partly written in every child", sides, lines }
}

fn fresh_lines() -> Vec<Line> {
    vec![Line::new("randwrite", "4k", 32, 1), Line::new("write", "64k", 8, 1), Line::new("write", "1m", 8, 1)]
}

fn fresh_sides(cache: Cache) -> Vec<Side> {
    vec![
        side("spile vhd", Kind::Spile, Format::Vhd, State::Fresh, cache),
        side("qemu vpc", Kind::Qemu, Format::Vpc, State::Fresh, cache),
        side("qemu qcow2", Kind::Qemu, Format::Qcow2, State::Fresh, cache),
    ]
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
        side("first", Kind::Spile, format, State::Fresh, cache),
        side("rewrite", Kind::Spile, format, State::Again, cache),
    ];
    let about = match (format, cache) {
        (Format::Raw, Cache::Page) => "the same on a sparse raw file, page cache",
        (Format::Raw, Cache::Direct) => "the same on a sparse raw file, O_DIRECT",
        (_, Cache::Page) => "first writes into a VHD beside rewrites of the same places, page cache",
        (_, Cache::Direct) => "first writes into a VHD beside rewrites of the same places, O_DIRECT",
    };
    Group { name, about, sides, lines }
}
