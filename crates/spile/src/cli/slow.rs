//! `spile slow`: the slowest requests of a disk, and where their time went.

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use spile_core::Result;
use spile_server::serving::api::client::{LOOK_PATIENCE, ask};
use spile_server::serving::api::slow::{SlowRequest, SlowRequests};
use spile_server::serving::events::now_us;

use super::control::{Which, path_of};
use super::{Exit, print_json, say, say_lines};
use crate::units::{format_size, format_us};

/// Show the slowest requests of a disk that is served, and where their time went
///
/// A server always keeps the slowest requests of the minute that runs and of the one before, with their phases: `load` (data copied
/// in), `queue` (waits for a slot of the front), `map` (where the bytes lie), `store` (operations on files and devices), `commit`
/// (what was written becomes the guest's), `unload` (data copied out), `answer` (until the guest can see the answer). What is in
/// flight for more than 10 ms comes first, with the phase in which it is. Moments are those of a worker's turns: what it computes
/// within one turn counts as `answer`. `spile trace` measures each phase by itself.
#[derive(Debug, Args)]
pub struct SlowArgs {
    #[command(flatten)]
    which: Which,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `spile slow`.
///
/// # Errors
/// When there is no such disk.
pub fn run(args: &SlowArgs) -> Result<Exit> {
    let (socket, name) = args.which.find()?;
    let slow: SlowRequests = ask(&socket, "GET", &format!("{}/slow", path_of(&name)), LOOK_PATIENCE)?;
    if args.json {
        return print_json(&slow).map(|()| Exit::Ok);
    }
    let now_us = now_us();
    for (title, requests) in [("in flight", &slow.in_flight), ("slowest", &slow.answered)] {
        if !requests.is_empty() {
            say_lines(table(title, requests, now_us));
        }
    }
    if slow.in_flight.is_empty() && slow.answered.is_empty() {
        say("no request yet");
    }
    Ok(Exit::Ok)
}

fn table(title: &str, requests: &[SlowRequest], now_us: u64) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header([title, "operation", "offset", "length", "latency", "where the time went"]);
    for request in requests {
        let ago_us = now_us.saturating_sub(request.taken_unix_us);
        table.add_row([
            // Those of the last minutes are shown: parts of a second matter.
            format!("{} ago", format_us(ago_us as f64)),
            format!("{}{}", request.operation, if request.failed { " (failed)" } else { "" }),
            format!("{:#x}", request.offset_bytes),
            format_size(request.len_bytes),
            format_us(request.latency_us),
            where_time_went(request),
        ]);
    }
    for number in [2, 3, 4] {
        table.column_mut(number).into_iter().for_each(|column| {
            column.set_cell_alignment(CellAlignment::Right);
        });
    }
    table
}

/// The phases that took at least a hundredth of the latency, the longest first.
fn where_time_went(request: &SlowRequest) -> String {
    let mut phases: Vec<_> =
        request.phases.iter().filter(|phase| phase.time_us * 100.0 >= request.latency_us).collect();
    phases.sort_by(|one, other| other.time_us.total_cmp(&one.time_us));
    let operations = match request.store_operations {
        count if count > 1 => format!(" ({count} operations)"),
        _ => String::new(),
    };
    let text = phases.iter().map(|phase| {
        let operations = if phase.name == "store" { operations.as_str() } else { "" };
        format!("{} {}{operations}", phase.name, format_us(phase.time_us))
    });
    text.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use spile_server::serving::api::slow::PhaseTime;

    use super::*;

    #[test]
    fn the_longest_phase_comes_first_and_short_ones_are_left_out() {
        let phase = |name: &str, time_us| PhaseTime { name: name.to_owned(), time_us };
        let request = SlowRequest {
            front: "front nbd \"\"".to_owned(),
            queue: 0,
            operation: "write".to_owned(),
            offset_bytes: 0x2000,
            len_bytes: 4096,
            failed: true,
            taken_unix_us: 5_000_000,
            latency_us: 1000.0,
            store_operations: 2,
            phases: vec![phase("load", 9.0), phase("map", 91.0), phase("store", 900.0)],
        };
        assert_eq!(where_time_went(&request), "store 900 µs (2 operations), map 91.0 µs");
        let text = table("slowest", &[request], 7_000_000).to_string();
        for word in ["2.00 s ago", "write (failed)", "0x2000", "1.00 ms"] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
}
