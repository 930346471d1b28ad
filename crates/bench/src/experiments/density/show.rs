//! The figures of `density` as tables and plots.

use std::time::Duration;

use comfy_table::Table;

use super::{AIM_BYTES_A_DISK, Asked, Layout, Phase, Row};
use crate::experiments::{Figures, Outcome, right, table};
use spile_server::units::format_size;

type Density = Outcome<Asked, Row>;

fn of(outcome: &Density, layout: Layout) -> Vec<&Row> {
    outcome.rows.iter().filter(|row| row.layout == layout).collect()
}

/// The figures as tables, and whether the aims are reached.
pub fn text(outcome: &Density) -> String {
    let Asked { guests, format, .. } = &outcome.parameters;
    let shared = of(outcome, Layout::Shared);
    let with = if *guests { "a guest on each" } else { "no guest connected" };
    let disks = shared.first().map_or(0, |row| row.disks);
    let each = of(outcome, Layout::Each);
    let (table, aims) = (rows(&shared), aims(&shared, each.last().copied()));
    let mut text = format!("{disks} disks ({format}) in one process, {with}\n{table}\n\n{aims}");
    if let Some(last) = each.last() {
        text += &format!("\n\n{} disks with a process each\n{}\n\n{}", last.disks, rows(&each), of_each(last));
    }
    text
}

/// The table of Project Pulsar, with what it costs.
fn rows(rows: &[&Row]) -> Table {
    let header =
        ["from", "seconds", "kick", "completion", "control", "timer", "threads ran", "CPU ms", "memory", "threads"];
    let mut table = table(header.map(str::to_owned));
    for row in rows {
        let from = match row.phase {
            Phase::Attachment => "attachment".to_owned(),
            Phase::Idle => format!("{:.0} s", row.at_s),
        };
        let cells = [
            from,
            format!("{:.1}", row.seconds),
            row.wakeups_kick.to_string(),
            row.wakeups_completion.to_string(),
            row.wakeups_control.to_string(),
            row.wakeups_timer.to_string(),
            row.thread_runs.to_string(),
            format!("{:.2}", row.cpu_us as f64 / 1000.0),
            format_size(row.resident_bytes),
            row.threads.to_string(),
        ];
        table.add_row(cells.map(right));
    }
    table
}

/// The sentences below the table of the shared process; `each` is the last row of the disks with a process each.
fn aims(shared: &[&Row], each: Option<&Row>) -> String {
    let idle: Vec<&&Row> = shared.iter().filter(|row| row.phase == Phase::Idle).collect();
    let Some(last) = idle.last() else { return String::new() };
    let wakeups: u64 = idle.iter().map(|row| row.wakeups()).sum();
    let runs: u64 = idle.iter().map(|row| row.thread_runs).sum();
    let cpu = Duration::from_micros(idle.iter().map(|row| row.cpu_us).sum());
    let a_disk = last.resident_bytes / u64::from(last.disks.max(1));
    let further = each.map(|each| {
        let first = each.resident_bytes / u64::from(each.processes.max(1));
        let more = last.resident_bytes.saturating_sub(first) / u64::from(last.disks.max(2) - 1);
        format!("; each disk after the first takes {}", format_size(more))
    });
    format!(
        "after the attachment: {wakeups} wake-ups, threads ran {runs} times, {:.2} ms of processor time in {:.0} s (aim: zero): {}\n\
         memory: {} a disk (aim: under {}): {}{}",
        cpu.as_secs_f64() * 1e3,
        idle.iter().map(|row| row.seconds).sum::<f64>(),
        verdict(wakeups == 0 && runs == 0),
        format_size(a_disk),
        format_size(AIM_BYTES_A_DISK),
        verdict(a_disk < AIM_BYTES_A_DISK),
        further.unwrap_or_default(),
    )
}

fn verdict(reached: bool) -> &'static str {
    if reached { "reached" } else { "not reached" }
}

/// The sentence below the table of disks with a process each.
fn of_each(row: &Row) -> String {
    let processes = u64::from(row.processes.max(1));
    format!(
        "memory of a process: {}, of which {} are its own when the program is shared; {} threads",
        format_size(row.resident_bytes / processes),
        format_size(row.proportional_bytes / processes),
        row.threads / processes
    )
}

/// The plots and their names.
pub fn figures(_: &Density) -> Figures {
    Figures::new()
}
