//! `cargo xtask count`: what one request costs in instructions, allocations and system calls.
//!
//! Times differ from machine to machine and from minute to minute; these figures hardly do. A program runs
//! twice, once with few requests and once with many. The difference, divided by the number of requests between the two,
//! leaves out the costs of start and end. There are several sets of cases; `--only SET,SET` counts some of them:
//!
//! - `null`: instructions. The release build serves an empty disk (`null:`) over vhost-user and to a guest of the imitated Xen.
//! - `image`: instructions. The example `count_reads` of the crate `image` reads 4 KiB at a time from a disk of each format, and from a chain
//!   of thirty VHDs. All maps are in memory, and the store answers at once, so the figures are of the image code alone.
//! - `writes`, `allocations`: instructions and allocations of the example `count_writes`, in the same way: writes that need the range
//!   lock and writes that do not, first writes and rewrites.
//! - `stages`: instructions of the example `count_stages` of the crate `life`: a write with a checkpoint, or a limit, beside one without.
//! - `calls`, `syncs`: strace counts the system calls that change files, and those of them that make a file durable, while a guest
//!   writes to an image for the first time or again. valgrind cannot count these.
//!
//! The client of a server is an ordinary `spile load` on the same core, with the lowest priority. So the server has always answered
//! everything and gone to sleep before it sees the next batch, and a batch costs the same each time. Instructions repeat to
//! 0.2 % on a quiet host. Single requests are not counted: whether the server sleeps before the next one depends on the host's other work
//! (12 % between two runs).
//!
//! io_uring does not work under every valgrind, so the threads engine runs; on this path only its way to sleep differs.
//! Reads are of 512 bytes, because some machines count a long fill with zeroes as one instruction a byte.
//!
//! The figures are kept in `xtask/counts/SET.json`. Growth beyond the set's tolerance is a failure. A figure that shrinks by more is
//! reported, so that somebody runs `cargo xtask count --update`. Another compiler makes other code: then growth is a skip. A set
//! may also have bounds: one figure is at most so many times another one.

mod calls;
mod kept;
mod programs;

use crate::{Result, shell};
use kept::{Kept, Outcome};
use programs::Programs;
use std::collections::BTreeMap;

/// Cases whose figures are kept in one file.
struct Set {
    /// The file's name without the extension.
    name: &'static str,
    /// What the file says of its figures.
    about: &'static str,
    unit: Unit,
    cases: &'static [Case],
    bounds: &'static [Bound],
}

/// What is counted. Its name is the key in the file.
struct Case {
    name: &'static str,
    way: Way,
}

/// The way of the counted requests.
enum Way {
    /// A load on the server over vhost-user.
    Vhost(&'static [&'static str]),
    /// The same on a server that counts nothing (`SPILE_ACCOUNTING=off`).
    VhostUncounted(&'static [&'static str]),
    /// A load on the server from a Xen guest, with this access to the guest's memory.
    Blkif(&'static str, &'static [&'static str]),
    /// An example of the crate `image` or `life`, with these words before the number of requests.
    Example(&'static str, &'static [&'static str]),
    /// Writes in sequence to a server with a new image.
    Traced(calls::Image, calls::Turn),
}

/// What a figure is a number of.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Unit {
    Instructions,
    Allocations,
    /// System calls that change files.
    Calls,
    /// System calls that make a file durable.
    Syncs,
}

impl Unit {
    /// The key of the figures in the file, and their unit in messages.
    fn name(self) -> &'static str {
        match self {
            Unit::Instructions => "instructions_per_request",
            Unit::Allocations => "allocations_per_1000_requests",
            Unit::Calls => "file_changing_calls_per_1000_requests",
            Unit::Syncs => "syncs_per_1000_requests",
        }
    }

    /// A figure is for so many requests.
    fn requests(self) -> u64 {
        if self == Unit::Instructions { 1 } else { 1000 }
    }

    /// The change of a figure that is not reported: in per cent, and at least by so much.
    fn tolerance(self) -> (u64, u64) {
        match self {
            Unit::Instructions => (5, 0),
            Unit::Allocations => (2, 2),
            // How many records of a journal are written together depends on the time.
            Unit::Calls => (15, 20),
            Unit::Syncs => (0, 3),
        }
    }

    /// The program that counts it.
    fn program(self) -> &'static str {
        match self {
            Unit::Instructions | Unit::Allocations => "valgrind",
            Unit::Calls | Unit::Syncs => "strace",
        }
    }
}

/// The figure of `case` is at most `percent` per cent of that of `of`.
struct Bound {
    case: &'static str,
    of: &'static str,
    percent: u64,
}

const READ: &[&str] = &["--rw", "randread", "--bs", "512", "--depth", "32"];
const WRITE: &[&str] = &["--rw", "randwrite", "--bs", "4k", "--depth", "32"];

const VHOST_READ: &str = "vhost-user read 512 depth 32";
const VHOST_READ_UNCOUNTED: &str = "vhost-user read 512 depth 32, uncounted";
const VHOST_WRITE: &str = "vhost-user write 4k depth 32";
const VHOST_WRITE_UNCOUNTED: &str = "vhost-user write 4k depth 32, uncounted";

const RAW_AGAIN: &str = "raw rewrite 4k";
const RAW_FIRST: &str = "raw first write 4k";
const VHD_AGAIN: &str = "vhd rewrite 4k";
const VHD_FIRST: &str = "vhd first write 4k";
const CHILD_AGAIN: &str = "vhd child rewrite 4k";
const CHILD_FIRST: &str = "vhd child first write 4k";

const PLAIN: &str = "raw write 4k";
const TRACKED: &str = "raw write 4k with a checkpoint";
const TRACKED_NEW: &str = "raw write 4k with a checkpoint, every 16th to a new block";
const LIMITED: &str = "raw write 4k with a limit";

const WRITES: &[Case] = &[
    Case { name: "write 4k without range lock", way: Way::Example("count_writes", &["free"]) },
    Case { name: "write 4k with range lock", way: Way::Example("count_writes", &["locked"]) },
    Case { name: RAW_FIRST, way: Way::Example("count_writes", &["raw", "first"]) },
    Case { name: RAW_AGAIN, way: Way::Example("count_writes", &["raw", "again"]) },
    Case { name: VHD_FIRST, way: Way::Example("count_writes", &["vhd", "first"]) },
    Case { name: VHD_AGAIN, way: Way::Example("count_writes", &["vhd", "again"]) },
    Case { name: CHILD_FIRST, way: Way::Example("count_writes", &["child", "first"]) },
    Case { name: CHILD_AGAIN, way: Way::Example("count_writes", &["child", "again"]) },
];

const TRACED: &[Case] = &[
    Case { name: RAW_FIRST, way: Way::Traced(calls::Image::Raw, calls::Turn::First) },
    Case { name: RAW_AGAIN, way: Way::Traced(calls::Image::Raw, calls::Turn::Again) },
    Case { name: VHD_FIRST, way: Way::Traced(calls::Image::Vhd, calls::Turn::First) },
    Case { name: VHD_AGAIN, way: Way::Traced(calls::Image::Vhd, calls::Turn::Again) },
    Case { name: CHILD_FIRST, way: Way::Traced(calls::Image::Child, calls::Turn::First) },
    Case { name: CHILD_AGAIN, way: Way::Traced(calls::Image::Child, calls::Turn::Again) },
];

const SETS: &[Set] = &[
    Set {
        name: "null",
        about: "Instructions of the server for one request without a medium. Written by `cargo xtask count --update`.",
        unit: Unit::Instructions,
        cases: &[
            Case { name: VHOST_READ, way: Way::Vhost(READ) },
            Case { name: VHOST_READ_UNCOUNTED, way: Way::VhostUncounted(READ) },
            Case { name: VHOST_WRITE, way: Way::Vhost(WRITE) },
            Case { name: VHOST_WRITE_UNCOUNTED, way: Way::VhostUncounted(WRITE) },
            Case { name: "blkif persistent read 512 depth 32", way: Way::Blkif("persistent", READ) },
            Case { name: "blkif persistent write 4k depth 32", way: Way::Blkif("persistent", WRITE) },
            Case { name: "blkif copy write 4k depth 32", way: Way::Blkif("copy", WRITE) },
        ],
        // What accounting costs: the counters of four layers, and the moments of each request.
        bounds: &[
            Bound { case: VHOST_READ, of: VHOST_READ_UNCOUNTED, percent: 105 },
            Bound { case: VHOST_WRITE, of: VHOST_WRITE_UNCOUNTED, percent: 105 },
        ],
    },
    Set {
        name: "image",
        about: "Instructions of the image code for one read of 4 KiB, its maps in memory. Written by `cargo xtask count --update`.",
        unit: Unit::Instructions,
        cases: &[
            Case { name: "raw read 4k", way: Way::Example("count_reads", &["raw"]) },
            Case { name: "vhd read 4k", way: Way::Example("count_reads", &["vhd"]) },
            Case { name: "vhd chain of 30 read 4k", way: Way::Example("count_reads", &["chain"]) },
            Case { name: "qcow2 read 4k", way: Way::Example("count_reads", &["qcow2"]) },
        ],
        bounds: &[],
    },
    Set {
        name: "writes",
        about: "Instructions of the node and the image code for one write of 4 KiB, one place after the other. Written by `cargo xtask count --update`.",
        unit: Unit::Instructions,
        cases: WRITES,
        // A write to a VHD looks into its map and holds its block, a first one as well as any other: that is 1.8 of raw.
        bounds: &[Bound { case: VHD_FIRST, of: VHD_AGAIN, percent: 130 }],
    },
    Set {
        name: "stages",
        about: "Instructions of the node, what is put into it, and the image code for one write of 4 KiB to a raw image. Written by `cargo xtask count --update`.",
        unit: Unit::Instructions,
        cases: &[
            Case { name: PLAIN, way: Way::Example("count_stages", &["none"]) },
            Case { name: TRACKED, way: Way::Example("count_stages", &["checkpoint"]) },
            Case { name: TRACKED_NEW, way: Way::Example("count_stages", &["checkpoint-new"]) },
            Case { name: LIMITED, way: Way::Example("count_stages", &["limit"]) },
        ],
        bounds: &[],
    },
    Set {
        name: "allocations",
        about: "Allocations of the node and the image code for 1000 writes of 4 KiB, one place after the other. Written by `cargo xtask count --update`.",
        unit: Unit::Allocations,
        cases: WRITES,
        bounds: &[],
    },
    Set {
        name: "calls",
        about: "System calls of the server that change files, for 1000 writes of 4 KiB, one place after the other at depth 32. Written by `cargo xtask count --update`.",
        unit: Unit::Calls,
        cases: TRACED,
        bounds: &[
            Bound { case: VHD_FIRST, of: RAW_FIRST, percent: 130 },
            Bound { case: CHILD_FIRST, of: RAW_FIRST, percent: 130 },
        ],
    },
    Set {
        name: "syncs",
        about: "Syncs of the server for 1000 writes of 4 KiB, one place after the other at depth 32: all are maintenance beside requests. Written by `cargo xtask count --update`.",
        unit: Unit::Syncs,
        cases: TRACED,
        bounds: &[],
    },
];

/// Requests in the short and in the long run.
const FEW: u64 = 640;
const MANY: u64 = 6400;

/// Counts the cases and compares them with the kept figures; `--update` keeps the new ones.
pub fn run(arguments: &[String]) -> Result<()> {
    let only = shell::option(arguments, "--only", String::new())?;
    let names: Vec<&str> = SETS.iter().map(|set| set.name).collect();
    let asked: Vec<&str> = if only.is_empty() { names.clone() } else { only.split(',').collect() };
    if let Some(other) = asked.iter().find(|name| !names.contains(name)) {
        return Err(format!("there is no set `{other}`; there are {}", names.join(", ")));
    }
    let sets: Vec<&Set> = SETS.iter().filter(|set| asked.contains(&set.name)).collect();
    let programs = Programs::new()?;
    let mut whole = Outcome::default();
    for set in sets {
        if let Some(why) = hindrance(set.unit) {
            whole.skip(set, &why);
            continue;
        }
        let count = |case: &Case| Ok((case.name, programs.count(case, set.unit)?));
        let counted: BTreeMap<&str, u64> = set.cases.iter().map(count).collect::<Result<_>>()?;
        match shell::flag(arguments, "--update") {
            true => kept::keep(set, &counted)?,
            false => {
                whole.add(kept::compare(set, &counted, &Kept::read(set)?, &kept::rustc()?));
                whole.add(kept::check_bounds(set, &counted));
            }
        }
    }
    if shell::flag(arguments, "--update") { Ok(()) } else { whole.tell() }
}

/// The sets in which a program counts alone: whatever else the machine does, the figures are the same.
pub const ALONE: &str = "image,writes,allocations,stages";
/// The sets in which a server has clients, and how many requests it finds at once depends on who else has work for the processors.
pub const SERVED: &str = "null,calls,syncs";

/// Why a set cannot be counted here.
fn hindrance(unit: Unit) -> Option<String> {
    let missing = [unit.program(), "nice"].into_iter().find(|program| !shell::on_path(program));
    match missing {
        Some(program) => Some(format!("no {program}")),
        None if unit.program() == "strace" && !calls::may_trace() => {
            Some("processes cannot be traced here".to_string())
        }
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_set_is_counted_by_the_tests() {
        let mut counted: Vec<&str> = [ALONE, SERVED].iter().flat_map(|sets| sets.split(',')).collect();
        let mut all: Vec<&str> = SETS.iter().map(|set| set.name).collect();
        counted.sort_unstable();
        all.sort_unstable();
        assert_eq!(counted, all);
    }

    #[test]
    fn every_case_is_kept() {
        for set in SETS {
            let kept = Kept::read(set).expect("the file is in the repository").figures;
            let names: Vec<&str> = kept.keys().map(String::as_str).collect();
            let mut cases: Vec<&str> = set.cases.iter().map(|case| case.name).collect();
            cases.sort_unstable();
            assert_eq!(names, cases);
        }
    }

    #[test]
    fn bounds_are_of_cases_of_their_set() {
        for set in SETS {
            let is_case = |name| set.cases.iter().any(|case| case.name == name);
            assert!(set.bounds.iter().all(|bound| is_case(bound.case) && is_case(bound.of)), "{}", set.name);
        }
    }
}
