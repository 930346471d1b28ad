//! An idle disk costs nothing: a guest is connected and has had I/O, and then the server is not woken at all.

use super::Plan;
use super::kinds::{Aio, Front, Kind, Role};
use super::lines::{Cache, Format, Side};
use super::report::Report;
use super::server::{Server, client_cores, pinned};
use crate::{Result, shell};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// From the guest's last request until the server has to be quiet.
const SETTLE: Duration = Duration::from_secs(1);

/// Counts the wake-ups of Spile, which must be zero, and of a peer.
pub fn run(plan: &Plan, report: &mut Report) -> Result<()> {
    let watched = if plan.quick { Duration::from_secs(1) } else { Duration::from_secs(5) };
    println!("\nidle: a guest is connected, was served at full speed, and does nothing");
    let sides = [
        Side::new("spile", Kind::Spile(Front::Vhost), Format::Null, Cache::Page),
        Side::new("q-s-d", Kind::Daemon(Aio::Uring), Format::Null, Cache::Page).role(Role::Shown),
    ];
    for side in sides {
        match side.server.program().filter(|program| !shell::on_path(program)) {
            Some(program) => report.skip(&format!("bench idle/{}: no {program}", side.name)),
            None => measure(plan, &side, watched, report)?,
        }
    }
    Ok(())
}

fn measure(plan: &Plan, side: &Side, watched: Duration, report: &mut Report) -> Result<()> {
    let server = Server::start(plan, side, Path::new(super::images::NULL))?;
    // Short gaps between requests: if anything makes the server look for more, this does.
    let mut warm = load(plan, side, &server);
    shell::run(warm.args(["--depth", "1", "--runtime", "200ms"]).stdout(Stdio::null()))?;
    let guest = Guest::start(load(plan, side, &server).args(["--depth", "1", "--rate", "0.01", "--runtime", "60s"]))?;
    std::thread::sleep(SETTLE);
    let before = switches(server.pid())?;
    std::thread::sleep(watched);
    let after = switches(server.pid())?;
    guest.must_be_there()?;
    let wakeups: u64 = after.iter().map(|(task, count)| count - before.get(task).unwrap_or(&0)).sum();
    report.add_idle(side, wakeups, watched);
    Ok(())
}

fn load(plan: &Plan, side: &Side, server: &Server) -> Command {
    let mut command = pinned(&client_cores(side.cores), &plan.spile);
    command.arg("load").arg(server.uri()).arg("--json");
    command
}

/// A client that has sent one request and waits for the time of its next; ended when dropped.
struct Guest(Child);

impl Guest {
    fn start(command: &mut Command) -> Result<Guest> {
        let shown = format!("{command:?}");
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        child.map(Guest).map_err(|error| format!("cannot run {shown}: {error}"))
    }

    fn must_be_there(mut self) -> Result<()> {
        match self.0.try_wait() {
            Ok(None) => Ok(()),
            ended => Err(format!("the idle client is gone: {ended:?}")),
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// How often each thread of a process has been taken off its core: each time it was awake before.
fn switches(pid: u32) -> Result<BTreeMap<String, u64>> {
    let folder = format!("/proc/{pid}/task");
    let tasks = std::fs::read_dir(&folder).map_err(|error| format!("{folder}: {error}"))?;
    let count = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        Some((task.file_name().to_string_lossy().into_owned(), switches_in(&status)))
    };
    Ok(tasks.flatten().filter_map(count).collect())
}

/// The sum of voluntary and other switches.
fn switches_in(status: &str) -> u64 {
    let lines = status.lines().filter(|line| line.contains("ctxt_switches:"));
    lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_switches_count() {
        assert_eq!(switches_in("Name:\tx\nvoluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t2\n"), 9);
    }

    #[test]
    fn a_thread_that_sleeps_is_counted() {
        let before: u64 = switches(std::process::id()).expect("procfs").values().sum();
        std::thread::sleep(Duration::from_millis(1));
        let after: u64 = switches(std::process::id()).expect("procfs").values().sum();
        assert!(after > before);
    }
}
