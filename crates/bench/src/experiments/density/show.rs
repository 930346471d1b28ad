//! The figures of `density` as tables and plots.

use comfy_table::Table;

use super::{AIM_BYTES_A_DISK, Asked, Layout, Phase, Row};
use crate::experiments::plot::{Axis, Bar, Figure, Marks, Panel, Style, style, styles};
use crate::experiments::{Figures, Outcome, quick_mark, right, table};
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
    let mut text = format!("{disks} disks ({format}) in one process, {with}\n{}\n\n", rows(&shared));
    if let Some(last) = each.last() {
        text += &format!("{} disks with a process each\n{}\n\n", last.disks, rows(&each));
    }
    text + &found(outcome).join("\n")
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

/// What was found, in sentences, and whether the aims are reached.
pub fn found(outcome: &Density) -> Vec<String> {
    let (shared, each) = (of(outcome, Layout::Shared), of(outcome, Layout::Each));
    let idle: Vec<&Row> = shared.into_iter().filter(|row| row.phase == Phase::Idle).collect();
    let Some(last) = idle.last() else { return Vec::new() };
    let of_each = each.last().map(|each| {
        let processes = u64::from(each.processes.max(1));
        format!(
            "With a process each, a disk takes {}, of which {} are its own, and {} threads.",
            format_size(each.resident_bytes / processes),
            format_size(each.proportional_bytes / processes),
            each.threads / processes
        )
    });
    [idleness(&idle), memory(last, each.last().copied())].into_iter().chain(of_each).collect()
}

/// The sentence on what has woken the shared process.
fn idleness(idle: &[&Row]) -> String {
    let sum = |value: fn(&Row) -> u64| idle.iter().map(|row| value(row)).sum::<u64>();
    let (wakeups, runs, cpu_us) = (sum(Row::wakeups), sum(|row| row.thread_runs), sum(|row| row.cpu_us));
    format!(
        "{} idle disks in one process, in the {:.0} s after the attachment: {wakeups} wake-ups, threads ran {runs} times, {:.2} ms of \
         processor time (aim: zero): {}.",
        idle.last().map_or(0, |row| row.disks),
        idle.iter().map(|row| row.seconds).sum::<f64>(),
        cpu_us as f64 / 1e3,
        verdict(wakeups == 0 && runs == 0),
    )
}

/// The sentence on the memory of the shared process; `each` is the last row of the disks with a process each.
fn memory(last: &Row, each: Option<&Row>) -> String {
    let a_disk = last.resident_bytes / u64::from(last.disks.max(1));
    let further = each.map(|each| {
        let first = each.resident_bytes / u64::from(each.processes.max(1));
        let more = last.resident_bytes.saturating_sub(first) / u64::from(last.disks.max(2) - 1);
        format!("; each disk after the first takes {}", format_size(more))
    });
    format!(
        "Memory: {} a disk (aim: under {}): {}{}; {} threads.",
        format_size(a_disk),
        format_size(AIM_BYTES_A_DISK),
        verdict(a_disk < AIM_BYTES_A_DISK),
        further.unwrap_or_default(),
        last.threads
    )
}

fn verdict(reached: bool) -> &'static str {
    if reached { "reached" } else { "not reached" }
}

/// What has woken a worker, in the order of the table.
const CAUSES: [&str; 4] = ["kick", "completion", "control", "timer"];

fn wakeups(row: &Row) -> [u64; 4] {
    [row.wakeups_kick, row.wakeups_completion, row.wakeups_control, row.wakeups_timer]
}

/// The plots and their names.
pub fn figures(outcome: &Density) -> Figures {
    let Asked { guests, format, quick, .. } = &outcome.parameters;
    let looks = styles(CAUSES);
    let shared = of(outcome, Layout::Shared);
    let disks = shared.first().map_or(0, |row| row.disks);
    let with = if *guests { "a guest on each" } else { "no guest connected" };
    let figure = Figure {
        title: format!("density: what {disks} idle disks in one process cost"),
        note: format!("{disks} disks ({format}), {with} · {}", outcome.host.summary()),
        mark: quick_mark(*quick),
        panels: vec![wakeup_bars(&shared, &looks), memory_bars(outcome)],
        columns: 2,
        keys: CAUSES.iter().map(|cause| (*cause).to_owned()).zip(looks).collect(),
    };
    vec![("density".to_owned(), figure)]
}

/// A bar for each row of the table.
fn wakeup_bars(shared: &[&Row], looks: &[Style]) -> Panel {
    let bars = shared.iter().map(|row| Bar {
        name: match row.phase {
            Phase::Attachment => "attachment".to_owned(),
            Phase::Idle => format!("{:.0} s", row.at_s),
        },
        note: row.wakeups().to_string(),
        parts: wakeups(row).iter().zip(looks).map(|(count, look)| (*count as f64, *look)).collect(),
        spread: None,
    });
    let most = shared.iter().map(|row| row.wakeups()).max().unwrap_or(0);
    let x = Axis::linear("wake-ups of the workers in a row", most as f64);
    Panel {
        title: "wake-ups by cause, row by row".to_owned(),
        marks: Marks::Bars { x, bars: bars.collect(), reference: None },
    }
}

/// The memory of one disk in a shared process and in a process of its own, at the end.
fn memory_bars(outcome: &Density) -> Panel {
    let bar = |layout: Layout, name: &str| {
        let row = *of(outcome, layout).last()?;
        let mib = row.resident_bytes as f64 / f64::from(row.disks.max(1)) / f64::from(1 << 20);
        let part = (mib, style("memory"));
        Some(Bar { name: name.to_owned(), note: format!("{mib:.2} MiB"), parts: vec![part], spread: None })
    };
    let bars: Vec<Bar> = [bar(Layout::Shared, "one process for all"), bar(Layout::Each, "a process each")]
        .into_iter()
        .flatten()
        .collect();
    let most = bars.iter().flat_map(|bar| bar.parts.iter().map(|part| part.0)).fold(0.0, f64::max);
    let x = Axis::linear("resident memory of a disk in MiB", most);
    let aim = AIM_BYTES_A_DISK as f64 / f64::from(1 << 20);
    Panel { title: "memory of a disk (line: the aim)".to_owned(), marks: Marks::Bars { x, bars, reference: Some(aim) } }
}
