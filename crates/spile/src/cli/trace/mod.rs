//! `spile trace`: where the time of a disk's requests goes, phase by phase.

mod perfetto;
mod phases;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use spile_core::{Error, ErrorKind, Result};
use spile_server::serving::api::client::{LOOK_PATIENCE, lines};
use spile_server::serving::api::trace::{TraceEnd, TraceLine, TracedQueue, TracedRequest};
use utoipa::ToSchema;

use self::phases::OperationPhases;
use super::control::{Which, path_of};
use super::{Exit, print_json, say};
use crate::log::complain;
use crate::units::{format_count, format_us, parse_duration};

/// Trace the requests of a disk that is served for some seconds: where their time goes, phase by phase
///
/// Each phase of each request is measured by the processor's time stamp counter. For each kind of request a table shows the mean time
/// of each phase, without the fastest and the slowest fifth of the requests, and beside it plain percentiles of all of them. The
/// server goes on as it is; the trace ends by itself, also when this command is interrupted. With --out every request is written to
/// a file that https://ui.perfetto.dev opens: one track for each request in flight of each queue.
#[derive(Debug, Args)]
pub struct TraceArgs {
    #[command(flatten)]
    which: Which,
    /// How long: up to two minutes
    #[arg(long = "for", value_name = "TIME", value_parser = parse_duration, default_value = "5s")]
    time: Duration,
    /// Write all requests to this file, as a trace that Perfetto and Chromium open
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// The trace ends when it has so many requests
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    max_requests: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What a trace has found.
#[derive(Debug, Serialize, ToSchema)]
pub struct Traced {
    /// The disk's name.
    pub disk: String,
    /// The server's control socket.
    pub server: String,
    /// How long the trace was, in seconds.
    pub time_s: f64,
    /// Requests that were traced.
    pub requests: u64,
    /// Requests for which there was no room. The figures are not of them.
    pub dropped: u64,
    /// What was found of each kind of request. Kinds that did not come are left out.
    pub operations: Vec<OperationPhases>,
}

/// What a server has sent.
#[derive(Default)]
struct Received {
    queues: Vec<TracedQueue>,
    requests: Vec<TracedRequest>,
    end: Option<TraceEnd>,
}

/// Runs `spile trace`.
///
/// # Errors
/// When there is no such disk, it is traced already, or the file cannot be written.
pub fn run(args: &TraceArgs) -> Result<Exit> {
    let (socket, name) = args.which.find()?;
    // A file that cannot be made is no reason to trace first.
    let out = args.out.as_deref().map(perfetto::create).transpose()?;
    let query = format!("for_ms={}&max_requests={}", args.time.as_millis(), args.max_requests);
    let mut received = Received::default();
    let path = format!("{}/trace?{query}", path_of(&name));
    lines(&socket, "POST", &path, LOOK_PATIENCE, |line| received.add(line))?;
    let cut = || Error::new(ErrorKind::Protocol, "the trace breaks off: the server has ended").at_path(&socket);
    let end = received.end.take().ok_or_else(cut)?;
    let traced = Traced {
        disk: name,
        server: socket.display().to_string(),
        time_s: end.time_s,
        requests: received.requests.len() as u64,
        dropped: end.dropped,
        operations: phases::of(&received.requests),
    };
    if let Some(out) = out {
        perfetto::write(out, &received.queues, &received.requests)?;
    }
    if end.cut_short {
        complain("the trace is shorter than it was to be: the server ends, or the disk is not served any more");
    }
    match args.json {
        true => print_json(&traced)?,
        false => show(&traced),
    }
    Ok(Exit::Ok)
}

impl Received {
    fn add(&mut self, line: TraceLine) {
        match line {
            TraceLine::Queue(queue) => self.queues.push(queue),
            TraceLine::Request(request) => self.requests.push(request),
            TraceLine::End(end) => self.end = Some(end),
        }
    }
}

fn show(traced: &Traced) {
    let dropped = match traced.dropped {
        0 => String::new(),
        dropped => format!("; {} more found no room", format_count(dropped as f64)),
    };
    say(format_args!("{} requests in {:.1} s{dropped}", format_count(traced.requests as f64), traced.time_s));
    traced.operations.iter().map(table).for_each(say);
}

fn table(operation: &OperationPhases) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let title = format!("{} ({})", operation.operation, format_count(operation.requests as f64));
    table.set_header([title.as_str(), "mean", "share", "half", "99 %", "longest", ""]);
    for phase in operation.phases.iter().chain([&operation.latency]) {
        let share = phase.share_percent.map_or(String::new(), |percent| format!("{percent:.0} %"));
        let [mean, half, most, longest] = [phase.mean_us, phase.p50_us, phase.p99_us, phase.max_us].map(format_us);
        table.add_row([&phase.name, &mean, &share, &half, &most, &longest, &phase.about]);
    }
    table.column_iter_mut().skip(1).take(5).for_each(|column| {
        column.set_cell_alignment(CellAlignment::Right);
    });
    table
}
