//! The figures of a run, for people and for programs.

use std::fmt::Write as _;

use comfy_table::{Table, presets};
use serde::Serialize;
use spile_server::serving::api::types::{Failure, FailureDetail};

use super::{Lane, LoadOutcome, Options};
use spile_server::units::{format_count, format_rate, format_size, format_us};
use utoipa::ToSchema;

/// One direction's figures. Latencies are in microseconds, from just before the send to just after the receive.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct LaneReport {
    /// Completed requests.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Requests a second.
    pub iops: f64,
    /// Bytes a second.
    pub bytes_per_s: f64,
    /// Mean latency.
    pub latency_mean_us: f64,
    /// Half are at or below.
    pub latency_p50_us: f64,
    /// 99 of 100 are at or below.
    pub latency_p99_us: f64,
    /// 999 of 1000 are at or below.
    pub latency_p999_us: f64,
    /// The longest.
    pub latency_max_us: f64,
}

/// The whole run's figures: the `--json` output of `spile load`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Report {
    /// The disk.
    pub uri: String,
    /// Bytes in a request.
    pub request_bytes: u32,
    /// Requests in flight on each connection.
    pub queue_depth: u32,
    /// Connections; with vhost-user, queues.
    pub connections: u32,
    /// From the first issue to the last completion.
    pub runtime_s: f64,
    /// Reads.
    pub read: LaneReport,
    /// Writes.
    pub write: LaneReport,
    /// Flushes.
    pub flush: LaneReport,
    /// Requests a second, all lanes.
    pub iops: f64,
    /// Bytes a second, both directions.
    pub bytes_per_s: f64,
    /// Average queue depth: ∫n dt / T.
    pub queue_depth_avg: f64,
    /// The same by Little's law: arrival rate times mean latency.
    pub queue_depth_little: f64,
    /// This process's CPU time for each request, in microseconds.
    pub client_cpu_us_per_request: f64,
    /// The server's CPU time for each request, in microseconds, if its process was given.
    pub server_cpu_us_per_request: Option<f64>,
    /// True when stamps were checked.
    pub verified: bool,
    /// Blocks read back right after the run.
    pub read_back_blocks: u64,
    /// The first wrong sectors, as text.
    pub mismatches: Vec<String>,
    /// Why it stopped early.
    pub error: Option<FailureDetail>,
    /// It was ended early by a signal; what was written was not read back, or not all.
    pub interrupted: bool,
    /// How often a connection was taken up again after the server's end.
    pub reconnects: u32,
}

impl Report {
    /// The figures of `outcome`.
    pub fn new(options: &Options, outcome: &LoadOutcome) -> Self {
        let stats = &outcome.stats;
        let (start_ns, end_ns) = stats.span_ns.unwrap_or((0, 0));
        let runtime_s = (end_ns - start_ns) as f64 / 1e9;
        let [read, write, flush] = stats.lanes().map(|lane| LaneReport::new(lane, runtime_s));
        let ios = (read.requests + write.requests + flush.requests).max(1) as f64;
        let busy_us: f64 = [&read, &write, &flush].iter().map(|l| l.latency_mean_us * l.requests as f64).sum();
        Self {
            uri: options.uri.to_string(),
            request_bytes: options.block_bytes,
            queue_depth: options.depth,
            connections: options.connections,
            runtime_s,
            iops: read.iops + write.iops + flush.iops,
            bytes_per_s: read.bytes_per_s + write.bytes_per_s,
            queue_depth_avg: per(stats.depth_integral_ns as f64 / 1e9, runtime_s),
            queue_depth_little: per(busy_us / 1e6, runtime_s),
            client_cpu_us_per_request: outcome.client_cpu.as_secs_f64() * 1e6 / ios,
            server_cpu_us_per_request: outcome.server_cpu.map(|cpu| cpu.as_secs_f64() * 1e6 / ios),
            verified: !outcome.models.is_empty(),
            read_back_blocks: outcome.read_back_blocks,
            mismatches: outcome.mismatches.iter().map(ToString::to_string).collect(),
            error: outcome.error.as_ref().map(|error| Failure::of(error).1.error),
            interrupted: outcome.interrupted,
            reconnects: outcome.reconnects,
            read,
            write,
            flush,
        }
    }

    /// True when the two ways to the average queue depth agree within 2 %.
    pub fn depths_agree(&self) -> bool {
        (self.queue_depth_avg - self.queue_depth_little).abs() <= 0.02 * self.queue_depth_avg
    }

    /// The figures as a table and a few lines.
    pub fn to_text(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_HORIZONTAL_ONLY);
        table.set_header(["", "IOPS", "rate", "p50", "p99", "p99.9", "max"]);
        for (name, lane) in [("read", &self.read), ("write", &self.write), ("flush", &self.flush)] {
            if lane.requests > 0 {
                table.add_row(lane.row(name));
            }
        }
        format!("{table}\n{}", self.summary())
    }

    /// The lines below the table: shape of the load, queue depth, CPU time, verification.
    pub fn summary(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_lines(&mut text);
        text
    }

    fn write_lines(&self, text: &mut String) -> std::fmt::Result {
        let size = format_size(u64::from(self.request_bytes));
        writeln!(
            text,
            "{size} requests, depth {} × {} connections, {:.2} s",
            self.queue_depth, self.connections, self.runtime_s
        )?;
        // A run that has failed has requests that were counted and have no latency.
        let is_whole = self.error.is_none() && !self.interrupted;
        let agree = if self.depths_agree() || !is_whole { "" } else { "  ← these should agree within 2 %" };
        writeln!(
            text,
            "average queue depth {:.2} (∫n dt / T), {:.2} (λ·W){agree}",
            self.queue_depth_avg, self.queue_depth_little
        )?;
        write!(text, "CPU: {:.2} µs per request here", self.client_cpu_us_per_request)?;
        match self.server_cpu_us_per_request {
            Some(us) => writeln!(text, ", {us:.2} µs in the server")?,
            None => writeln!(text)?,
        }
        if self.reconnects > 0 {
            writeln!(text, "taken up again after the server's end: {} times", self.reconnects)?;
        }
        let right = self.mismatches.is_empty() && self.error.is_none();
        match (self.verified && right, self.interrupted) {
            (true, false) => writeln!(text, "verified: {} blocks read back, all right", self.read_back_blocks),
            (true, true) => writeln!(text, "ended early: only {} blocks were read back", self.read_back_blocks),
            (false, _) => Ok(()),
        }
    }
}

impl LaneReport {
    fn new(lane: &Lane, runtime_s: f64) -> Self {
        let us = |ns: u64| ns as f64 / 1e3;
        let at = |quantile| us(lane.latency_ns.value_at_quantile(quantile));
        Self {
            requests: lane.ios,
            bytes: lane.bytes,
            iops: per(lane.ios as f64, runtime_s),
            bytes_per_s: per(lane.bytes as f64, runtime_s),
            latency_mean_us: lane.latency_ns.mean() / 1e3,
            latency_p50_us: at(0.5),
            latency_p99_us: at(0.99),
            latency_p999_us: at(0.999),
            latency_max_us: us(lane.latency_ns.max()),
        }
    }

    fn row(&self, name: &str) -> [String; 7] {
        [
            name.to_owned(),
            format_count(self.iops),
            format_rate(self.bytes_per_s),
            format_us(self.latency_p50_us),
            format_us(self.latency_p99_us),
            format_us(self.latency_p999_us),
            format_us(self.latency_max_us),
        ]
    }
}

fn per(amount: f64, time_s: f64) -> f64 {
    if time_s > 0.0 { amount / time_s } else { 0.0 }
}
