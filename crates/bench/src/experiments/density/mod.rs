//! `density`: what do hundreds of idle guests cost the host?
//!
//! After Project Pulsar (2013), which counted what wakes the emulator of one idle guest in rows of 30 seconds: here one server has
//! hundreds of disks, with a guest on each if that is asked for, and nobody wants anything. A row has what has woken the
//! server's workers, by cause, the processor time of the whole process, its memory and its threads. Beside it, a few disks have a process each.
//!
//! Asking costs the server something, too. So it is asked between the rows only, and what it used meanwhile is in no row. What the
//! kernel says of a process (memory, threads, processor time, how often threads ran) is read without waking it.

mod served;
mod show;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result};
use spile_image::Format;
use spile_server::process::raise_file_limit;
use utoipa::ToSchema;

use super::world::Folder;
use super::{HostFacts, Outcome};
use served::{Counts, Hosts};
pub use show::{figures, found, text};

/// The memory that one disk of a shared process may take, in bytes.
pub const AIM_BYTES_A_DISK: u64 = 1 << 20;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// Disks of the shared process.
    pub disks: u32,
    /// Disks that have a process each.
    pub each: u32,
    /// A guest is connected to each disk.
    pub has_guests: bool,
    /// Queues of each guest.
    pub queues: u16,
    /// How long all is idle.
    pub idle: Duration,
    /// The length of a row.
    pub row: Duration,
    /// From the end of the attachment to the first idle row; it counts for the attachment.
    pub settle: Duration,
    /// The format of the images; none: disks without a medium.
    pub format: Option<Format>,
    /// The size of each disk in bytes.
    pub disk_bytes: u64,
    /// Where the images lie; in memory unless given.
    pub folder: Option<PathBuf>,
    /// A short run.
    pub is_quick: bool,
}

impl Parameters {
    /// 500 disks for five minutes, or a few for seconds.
    pub fn new(is_quick: bool) -> Self {
        let common = Self {
            disks: 500,
            each: 10,
            has_guests: false,
            queues: 1,
            idle: Duration::from_secs(300),
            row: Duration::from_secs(30),
            settle: Duration::from_secs(3),
            format: Some(Format::Vhd),
            disk_bytes: 20 << 30,
            folder: None,
            is_quick,
        };
        match is_quick {
            false => common,
            true => Self {
                disks: 20,
                each: 3,
                idle: Duration::from_secs(3),
                row: Duration::from_secs(1),
                settle: Duration::from_secs(1),
                ..common
            },
        }
    }

    fn check(&self) -> Result<()> {
        if self.disks == 0 || self.queues == 0 || self.rows() == 0 {
            return Err(Error::new(ErrorKind::InvalidInput, "there is nothing to measure"));
        }
        Ok(())
    }

    /// Idle rows. A time shorter than a row is one row.
    fn rows(&self) -> u32 {
        let rows = self.idle.as_secs_f64() / self.row.as_secs_f64();
        if self.idle.is_zero() { 0 } else { rows.round().max(1.0) as u32 }
    }

    fn row_length(&self) -> Duration {
        self.row.min(self.idle)
    }
}

/// [`Parameters`] as figures have them.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Asked {
    /// Disks of the shared process.
    pub disks: u32,
    /// Disks that have a process each.
    pub disks_each: u32,
    /// True when a guest is connected to each disk.
    pub guests: bool,
    /// Queues of each guest.
    pub queues: u16,
    /// The length of an idle row, in seconds.
    pub row_s: f64,
    /// The format of the images, or `null` as a disk's name has it: no medium.
    pub format: String,
    /// The size of each disk.
    pub virtual_size_bytes: u64,
    /// True for a short run, whose figures show that it works.
    pub quick: bool,
}

/// How disks are spread over processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// One process has all disks.
    Shared,
    /// Each disk has a process.
    Each,
}

/// What the time of a row was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The servers open the disks, and guests connect and read one sector on each queue.
    Attachment,
    /// Nobody wants anything.
    Idle,
}

/// One row.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// How the disks are spread.
    pub layout: Layout,
    /// What the time was.
    pub phase: Phase,
    /// When the row begins, in seconds from the start of the servers.
    pub at_s: f64,
    /// How long it is, in seconds.
    pub seconds: f64,
    /// Disks of all processes together.
    pub disks: u32,
    /// Processes.
    pub processes: u32,
    /// Wake-ups of workers by a guest or client.
    pub wakeups_kick: u64,
    /// Wake-ups of workers by a store that has done something.
    pub wakeups_completion: u64,
    /// Wake-ups of workers by another thread of the server.
    pub wakeups_control: u64,
    /// Wake-ups of workers because a time was over.
    pub wakeups_timer: u64,
    /// How often any thread of the processes was put on a processor, whatever it is for.
    pub thread_runs: u64,
    /// The processor time of all threads, in microseconds.
    pub cpu_us: u64,
    /// Memory in the host's RAM at the end of the row, in bytes; what processes share counts for each.
    pub resident_bytes: u64,
    /// The same, in which what several processes share counts once, in bytes.
    pub proportional_bytes: u64,
    /// Threads at the end of the row.
    pub threads: u64,
}

impl Row {
    /// Wake-ups of workers, whatever caused them.
    pub fn wakeups(&self) -> u64 {
        self.wakeups_kick + self.wakeups_completion + self.wakeups_control + self.wakeups_timer
    }
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// `InvalidInput` when there is nothing to measure; else when a server does not start, or has ended.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Asked, Row>> {
    parameters.check()?;
    let host = HostFacts::at_some(parameters.folder.as_deref());
    raise_file_limit();
    let folder = Folder::new()?;
    let layouts = [(Layout::Each, parameters.each), (Layout::Shared, parameters.disks)];
    let steps = (parameters.rows() + 1) as f64 * 2.0;
    let mut rows = Vec::new();
    for (number, (layout, disks)) in layouts.into_iter().enumerate().filter(|(_, (_, disks))| *disks > 0) {
        let begun = number as f64 / 2.0;
        let mut watched = Watched::start(parameters, &folder, layout, disks, |what| progress(what, begun))?;
        rows.push(watched.attached(parameters.settle)?);
        // What wakes one process wakes each, and it is the shared one that runs for long.
        let count = if layout == Layout::Each { parameters.rows().min(1) } else { parameters.rows() };
        for row in 0..count {
            progress(&format!("{disks} disks are idle"), begun + f64::from(row + 1) / steps);
            rows.push(watched.idle(parameters.row_length())?);
        }
    }
    rows.sort_by_key(|row| row.layout == Layout::Each);
    let asked = Asked {
        disks: parameters.disks,
        disks_each: parameters.each,
        guests: parameters.has_guests,
        queues: parameters.queues,
        row_s: parameters.row_length().as_secs_f64(),
        format: parameters.format.map_or_else(|| "null".to_owned(), |format| format.to_string()),
        virtual_size_bytes: parameters.disk_bytes,
        quick: parameters.is_quick,
    };
    Ok(Outcome { experiment: "density".to_owned(), host, parameters: asked, rows })
}

/// Servers that are looked at, row after row.
struct Watched {
    hosts: Hosts,
    layout: Layout,
    disks: u32,
    begun: Instant,
}

impl Watched {
    fn start(
        parameters: &Parameters,
        folder: &Folder,
        layout: Layout,
        disks: u32,
        mut progress: impl FnMut(&str),
    ) -> Result<Self> {
        let begun = Instant::now();
        progress(&format!("{disks} disks start"));
        let mut hosts = Hosts::start(parameters, folder.path(), layout, disks)?;
        if parameters.has_guests {
            progress(&format!("{disks} guests connect"));
            hosts.connect(parameters.queues)?;
        }
        Ok(Self { hosts, layout, disks, begun })
    }

    /// The row of the attachment, which began with the processes.
    fn attached(&self, settle: Duration) -> Result<Row> {
        std::thread::sleep(settle);
        let times = (Duration::ZERO, self.begun.elapsed());
        Ok(self.row(Phase::Attachment, times, &Counts::default(), &self.hosts.counts()?))
    }

    /// The next row, in which nobody asks the servers anything.
    fn idle(&mut self, length: Duration) -> Result<Row> {
        let before = self.hosts.counts()?;
        let begun = self.begun.elapsed();
        std::thread::sleep(length);
        let times = (begun, self.begun.elapsed());
        Ok(self.row(Phase::Idle, times, &before, &self.hosts.counts()?))
    }

    /// The row between two moments since the start.
    fn row(&self, phase: Phase, (from, until): (Duration, Duration), before: &Counts, after: &Counts) -> Row {
        Row {
            layout: self.layout,
            phase,
            at_s: from.as_secs_f64(),
            seconds: (until - from).as_secs_f64(),
            disks: self.disks,
            processes: self.hosts.processes(),
            wakeups_kick: after.kick - before.kick,
            wakeups_completion: after.completion - before.completion,
            wakeups_control: after.control - before.control,
            wakeups_timer: after.timer - before.timer,
            thread_runs: after.row_end.runs.saturating_sub(before.row_start.runs),
            cpu_us: after.row_end.cpu.saturating_sub(before.row_start.cpu).as_micros() as u64,
            resident_bytes: after.row_end.resident_bytes,
            proportional_bytes: after.row_end.proportional_bytes,
            threads: after.row_end.threads,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_minutes_are_ten_rows() {
        let rows = |idle, row| {
            let (idle, row) = (Duration::from_secs_f64(idle), Duration::from_secs_f64(row));
            Parameters { idle, row, ..Parameters::new(true) }.rows()
        };
        assert_eq!((rows(300.0, 30.0), rows(0.5, 30.0), rows(0.0, 30.0), rows(3.0, 1.0)), (10, 1, 0, 3));
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [
            Parameters { disks: 0, ..Parameters::new(true) },
            Parameters { idle: Duration::ZERO, ..Parameters::new(true) },
        ] {
            assert_eq!(bad.check().unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }
}
