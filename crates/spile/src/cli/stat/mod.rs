//! `spile stat`: what one disk does, in an interval, layer by layer.

mod table;

use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use spile_core::{ErrorKind, Result};
use spile_server::host_device::DeviceReading;
use spile_server::serving::api::client::{LOOK_PATIENCE, ask};
use spile_server::serving::api::rates::{DiskRates, Interval, NoInterval};
use spile_server::serving::api::stats::DiskStats;
use utoipa::ToSchema;

pub use table::{name_of, number, remarks};

use super::control::{Which, path_of};
use super::pace::{Pace, sleep_until};
use super::say::{put_json, put_lines};
use super::{Exit, print_json};
use crate::log;

/// Show what a disk does: requests and bytes per second, queue sizes and latencies of an interval
///
/// With --layers it shows the average queue size and the latency where the guest's requests come in (front), at the disk, at
/// its images, at their stores, and at the host's device below, which is read from /proc/diskstats.
#[derive(Debug, Args)]
pub struct StatArgs {
    #[command(flatten)]
    which: Which,
    /// Show each layer that a request passes
    #[arg(long)]
    layers: bool,
    #[command(flatten)]
    pace: Pace,
    /// Print JSON: one object, or with --count one for each interval, each in a line
    #[arg(long)]
    json: bool,
}

/// What a disk did in an interval. The host's device is the last of the layers, where there is one.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct DiskStat {
    /// What each layer did.
    #[serde(flatten)]
    pub rates: DiskRates,
    /// The device of the host below the leaf, such as `sda1`.
    pub host_device: Option<String>,
    /// Why no device of the host is among the layers.
    pub no_host_device: Option<String>,
}

/// What was counted of a disk and of the device below it, at one moment.
struct Sample {
    stats: DiskStats,
    device: Option<DeviceReading>,
}

impl Sample {
    fn new(stats: DiskStats) -> Self {
        let device = stats.host_device.as_ref().and_then(|device| device.read().ok());
        Self { stats, device }
    }
}

/// Runs `spile stat`.
///
/// # Errors
/// When there is no such disk, or its server does not answer.
pub fn run(args: &StatArgs) -> Result<Exit> {
    let (socket, name) = args.which.find()?;
    let first = stats_of(&socket, &name)?;
    let (mut before, mut shown, mut begun) = (Sample::new(first), 0, Instant::now());
    while shown < args.pace.count.unwrap_or(1) {
        sleep_until(begun, args.pace.interval);
        begun = Instant::now();
        let after = Sample::new(stats_of(&socket, &name)?);
        match DiskStat::between(&before, &after) {
            Ok(stat) if !show(args, &stat)? => break,
            Ok(_) => shown += 1,
            Err(why) => log::complain(why),
        }
        before = after;
    }
    Ok(Exit::Ok)
}

/// What was counted of the disk up to now. While its server hands over to another one, this waits for the other one.
fn stats_of(socket: &Path, name: &str) -> Result<DiskStats> {
    let (path, begun) = (format!("{}/stats", path_of(name)), Instant::now());
    loop {
        match ask(socket, "GET", &path, LOOK_PATIENCE) {
            Err(error) if error.kind() == ErrorKind::Shutdown && begun.elapsed() < LOOK_PATIENCE => {
                std::thread::sleep(Duration::from_millis(50));
            }
            answer => return answer,
        }
    }
}

/// False when nobody reads what is shown.
fn show(args: &StatArgs, stat: &DiskStat) -> Result<bool> {
    match (args.json, args.pace.count) {
        (true, None) => print_json(stat).map(|()| true),
        (true, Some(_)) => put_json(stat),
        (false, _) if args.layers => put_lines(table::layers(stat)),
        (false, _) => put_lines(table::operations(stat)),
    }
}

impl DiskStat {
    fn between(before: &Sample, after: &Sample) -> Result<Self, NoInterval> {
        let mut rates = Interval::between(&before.stats, &after.stats)?.rates();
        let unknown = || after.stats.no_host_device.clone().unwrap_or_else(|| "the server does not tell it".to_owned());
        let (host_device, no_host_device) = match (&after.stats.host_device, before.device, after.device) {
            (Some(device), Some(earlier), Some(later)) if before.stats.host_device.as_ref() == Some(device) => {
                rates.layers.push(device.rates(&earlier, &later));
                (Some(device.name.clone()), None)
            }
            (Some(device), _, _) => (None, Some(format!("the device {} cannot be read", device.name))),
            (None, _, _) => (None, Some(unknown())),
        };
        Ok(Self { rates, host_device, no_host_device })
    }
}
