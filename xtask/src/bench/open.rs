//! How long it takes to open the largest VHD with a chain of thirty, and what memory that takes.

use super::Plan;
use super::report::Report;
use super::server::{self, Server};
use crate::{Result, shell};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The largest size that VHD allows.
const SIZE: &str = "2040G";

/// Measures from exec to the first accepted connection, `rounds` times.
pub fn run(plan: &Plan, report: &mut Report) -> Result<()> {
    let depth = if plan.quick { 3 } else { 30 };
    let folder = plan.folder.join("open");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let leaf = chain(plan, &folder, depth)?;
    let mut times_ms = Vec::new();
    let mut memory_kib = Vec::new();
    for _ in 0..plan.rounds.max(3) {
        let (time_ms, peak_kib) = open_once(plan, &leaf)?;
        times_ms.push(time_ms);
        memory_kib.push(peak_kib);
    }
    report.add_opening(SIZE, depth, &mut times_ms, &mut memory_kib);
    std::fs::remove_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))
}

fn chain(plan: &Plan, folder: &Path, depth: usize) -> Result<PathBuf> {
    let mut leaf = folder.join("1.vhd");
    let mut create = Command::new(&plan.spile);
    create.arg("create").arg(&leaf).args(["--size", SIZE]);
    shell::run(create.stdout(Stdio::null()))?;
    for level in 2..=depth {
        let child = folder.join(format!("{level}.vhd"));
        let mut create = Command::new(&plan.spile);
        create.arg("create").arg(&child).arg("--parent").arg(&leaf);
        shell::run(create.stdout(Stdio::null()))?;
        leaf = child;
    }
    Ok(leaf)
}

/// Milliseconds until it accepts, and its peak memory in KiB by then.
fn open_once(plan: &Plan, leaf: &Path) -> Result<(f64, f64)> {
    let socket = std::env::temp_dir().join(format!("spile-open-{}.sock", std::process::id()));
    let mut command = server::pinned(1, &plan.spile);
    command.arg("serve").arg(leaf).arg("--nbd").arg(format!("unix:{}", socket.display()));
    let begun = Instant::now();
    let server = Server::spawn(&mut command, socket)?;
    let time_ms = begun.elapsed().as_secs_f64() * 1e3;
    Ok((time_ms, peak_memory_kib(server.pid())?))
}

fn peak_memory_kib(pid: u32) -> Result<f64> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    number.ok_or_else(|| format!("{path}: no VmHWM"))
}
