//! The programs that are counted, and their runs under callgrind.

use super::{Case, FEW, MANY, Unit, Way, calls};
use crate::bench::kinds::Front;
use crate::bench::server::{Server, pinned, server_cores};
use crate::{Result, bench, shell};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The server's options. They leave out all that depends on time: polling, and a second worker.
pub const STEADY: &[&str] = &["--engine", "threads", "--poll", "0", "--workers", "1"];
/// The longest wait until a disk is served.
const LIMIT: Duration = Duration::from_secs(60);

/// The programs that are counted; each is built when the first case needs it.
pub struct Programs {
    built: RefCell<BTreeMap<&'static str, PathBuf>>,
    folder: PathBuf,
}

impl Programs {
    /// Nothing is built yet.
    pub fn new() -> Result<Self> {
        let folder = shell::target_dir().join("count");
        std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(Self { built: RefCell::default(), folder })
    }

    /// The figure of a case. Where a server takes part, it is the middle one of three: how many requests it finds at once depends on what
    /// else the host does, by some per cent when that is much.
    pub fn count(&self, case: &Case, unit: Unit) -> Result<u64> {
        let times = match case.way {
            Way::Vhost(_) | Way::VhostUncounted(_) | Way::Blkif(..) => 3,
            Way::Example(..) | Way::Traced(..) => 1,
        };
        let mut figures = (0..times).map(|_| self.count_once(case, unit)).collect::<Result<Vec<_>>>()?;
        figures.sort_unstable();
        Ok(figures[times / 2])
    }

    fn count_once(&self, case: &Case, unit: Unit) -> Result<u64> {
        let few = self.total(case, unit, FEW)?;
        let many = self.total(case, unit, MANY)?;
        Ok(many.saturating_sub(few) * unit.requests() / (MANY - FEW))
    }

    /// What a whole run with a number of requests costs.
    fn total(&self, case: &Case, unit: Unit, requests: u64) -> Result<u64> {
        let file = self.folder.join(format!("{}-{requests}.{}", case.name.replace([' ', ','], "-"), unit.program()));
        match case.way {
            Way::Traced(image, turn) => {
                return calls::count(
                    self.built("spile", bench::spile)?,
                    &self.folder,
                    &file,
                    image,
                    turn,
                    unit,
                    requests,
                );
            }
            Way::Vhost(load) => run_vhost(&self.built("spile", bench::spile)?, &file, "on", load, requests)?,
            Way::VhostUncounted(load) => {
                run_vhost(&self.built("spile", bench::spile)?, &file, "off", load, requests)?;
            }
            Way::Blkif(access, load) => run_blkif(&self.built("spile", bench::spile)?, &file, access, load, requests)?,
            Way::Example(name, words) => {
                run_example(&self.built(name, || example(name))?, &file, words, requests)?;
            }
        }
        let text = std::fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        match unit {
            Unit::Allocations => Ok(allocations(&text)),
            _ => instructions(&text).ok_or_else(|| format!("{}: no totals", file.display())),
        }
    }

    fn built(&self, name: &'static str, build: impl FnOnce() -> Result<PathBuf>) -> Result<PathBuf> {
        if let Some(program) = self.built.borrow().get(name) {
            return Ok(program.clone());
        }
        let program = build()?;
        self.built.borrow_mut().insert(name, program.clone());
        Ok(program)
    }
}

/// An example of the crate `image`, or of `life`, built for release.
fn example(name: &str) -> Result<PathBuf> {
    let package = if name == "count_stages" { "spile-life" } else { "spile-image" };
    shell::run(shell::cargo().args(["build", "--release", "--package", package, "--example", name]))?;
    Ok(shell::target_dir().join("release/examples").join(name))
}

fn run_example(program: &Path, file: &Path, words: &[&str], requests: u64) -> Result<()> {
    let mut command = Command::new("valgrind");
    command.args(["--quiet", "--tool=callgrind"]).arg(format!("--callgrind-out-file={}", file.display()));
    shell::run(command.arg(program).args(words).arg(requests.to_string()))
}

/// The client. It gets the core only while the server sleeps.
pub fn load(core: &str, spile: &Path, uri: &str, what: &[&str], requests: u64) -> Command {
    let mut command = pinned(core, "nice");
    command.args(["-n", "19"]).arg(spile).arg("load").arg(uri).arg("--json");
    command.args(what).args(["--ios", &requests.to_string()]).stdout(Stdio::null());
    command
}

fn run_vhost(spile: &Path, file: &Path, accounting: &str, what: &[&str], requests: u64) -> Result<()> {
    let socket = std::env::temp_dir().join(format!("spile-count-{}.sock", std::process::id()));
    let core = server_cores(1);
    let mut command = pinned(&core, "valgrind");
    command.arg("--tool=callgrind").arg(format!("--callgrind-out-file={}", file.display()));
    command.arg(spile).args(["serve", "null:1G", "--vhost-user"]).arg(&socket).args(STEADY);
    command.env("SPILE_ACCOUNTING", accounting);
    // It writes the file when it ends.
    let server = Server::spawn(&mut command, socket, Front::Vhost)?;
    shell::run(&mut load(&core, spile, &server.uri(), what, requests))
}

/// The disk's process ends, and writes the file, when the load takes its disk away.
fn run_blkif(spile: &Path, file: &Path, access: &str, what: &[&str], requests: u64) -> Result<()> {
    let lab = std::env::temp_dir().join(format!("spile-count-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&lab);
    std::fs::create_dir_all(&lab).map_err(|error| format!("{}: {error}", lab.display()))?;
    let _ = std::fs::remove_file(file);
    let core = server_cores(1);
    let host = Server::spawn(Command::new(spile).arg("xen-lab").arg(&lab), lab.join("xenstored"), Front::Nbd)?;
    let uri = format!("xen-lab:{}", lab.display());
    let what = [what, &["--params", "null:1G", "--access", access, "--domain", "7"]].concat();
    let mut client = load(&core, spile, &uri, &what, requests);
    let mut client = client.spawn().map_err(|error| format!("cannot run {client:?}: {error}"))?;
    let end = Instant::now() + LIMIT;
    loop {
        // Until the client has made its disk, there is nothing to serve.
        let mut command = pinned(&core, "valgrind");
        command.args(["--quiet", "--tool=callgrind"]).arg(format!("--callgrind-out-file={}", file.display()));
        command.arg(spile).arg("xen-disk").arg("--lab").arg(&lab).arg("--run-dir").arg(&lab).args(STEADY);
        command.arg("/local/domain/0/backend/vbd/7/51712").stdin(Stdio::null()).stdout(Stdio::null());
        let served = command.stderr(Stdio::null()).status();
        let served = served.map_err(|error| format!("cannot run {command:?}: {error}"))?;
        if served.success() || Instant::now() > end {
            break;
        }
    }
    let client = client.wait().map_err(|error| format!("the client: {error}"))?;
    drop(host);
    let _ = std::fs::remove_dir_all(&lab);
    if client.success() { Ok(()) } else { Err(format!("the client: {client}")) }
}

/// The sum in callgrind's file.
fn instructions(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("summary:").or(line.strip_prefix("totals:")));
    line?.trim().parse().ok()
}

/// The calls of functions that allocate, in callgrind's file. A function's name stands there once, behind its number. A line with
/// the function that is called (`cfn=`) is followed by one with the number of calls.
fn allocations(text: &str) -> u64 {
    const ALLOCATE: [&str; 5] = ["malloc", "calloc", "realloc", "posix_memalign", "aligned_alloc"];
    let mut numbers = Vec::new();
    let mut is_allocation = false;
    let mut sum = 0;
    for line in text.lines() {
        let function = line.strip_prefix("cfn=").or(line.strip_prefix("fn="));
        if let Some((number, name)) = function.map(|function| function.split_once(' ').unwrap_or((function, ""))) {
            if ALLOCATE.contains(&name) {
                numbers.push(number);
            }
            is_allocation = line.starts_with('c') && numbers.contains(&number);
        } else if let Some(calls) = line.strip_prefix("calls=").filter(|_| is_allocation) {
            let count = calls.split(' ').next().and_then(|count| count.parse::<u64>().ok());
            sum += count.unwrap_or(0);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_found_in_callgrinds_file() {
        assert_eq!(instructions("version: 1\nevents: Ir\nsummary: 123\n\nfn=(1) main\n1 2\n"), Some(123));
        assert_eq!(instructions("events: Ir\ntotals: 7\n"), Some(7));
        assert_eq!(instructions("events: Ir\n"), None);
    }

    #[test]
    fn allocations_are_counted_by_whom_is_called() {
        let text = "fn=(1) main\n3 4\ncfn=(2) malloc\ncalls=5 0\n1 9\ncfn=(3) free\ncalls=7 0\n1 9\n\
                    fn=(2)\n1 2\ncfn=(4) sbrk\ncalls=1 0\n\
                    fn=(5) other\ncfi=(9) malloc.c\ncfn=(2)\ncalls=2 0\n1 9\ncfn=(6) realloc\ncalls=1 0\n";
        assert_eq!(allocations(text), 8);
        assert_eq!(allocations("fn=(1) main\n"), 0);
    }
}
