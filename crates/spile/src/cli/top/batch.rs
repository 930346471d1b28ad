//! `spile top` without a terminal: a list for each interval, in one of several forms.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::{Instant, SystemTime};

use serde::Serialize;
use spile_core::Result;
use spile_server::serving::api::rates::{DiskRates, LayerRates, OperationRates};
use spile_server::serving::api::types::Disk;
use utoipa::ToSchema;

use super::collect::once;
use super::draw::title;
use super::model::{Column, DiskRow, Figures, Key, Model};
use crate::cli::Exit;
use crate::cli::pace::{Pace, sleep_until};
use crate::cli::say::{json_line, put_lines};
use crate::log::printable;

/// What all disks of this host did in an interval.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TopInterval {
    /// The end of the interval, in seconds since 1970-01-01 UTC.
    pub at_unix_s: f64,
    /// Each disk, by name.
    pub disks: Vec<TopDisk>,
    /// The servers that do not answer.
    pub silent_servers: Vec<SilentServer>,
}

/// What one disk did in an interval.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TopDisk {
    /// The disk and its layers. There are no layers where there is no interval.
    #[serde(flatten)]
    pub rates: DiskRates,
    /// `running`, `paused`, `reverting`, `waiting` or `sync_failed`, as in `spile ls`.
    pub state: String,
    /// Why there is no interval: the disk has just come, its server was replaced, or does not answer.
    pub no_interval: Option<String>,
}

/// A server that does not answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct SilentServer {
    /// Its control socket.
    pub server: String,
    /// Why there is no answer.
    pub message: String,
}

/// Prints what `form` makes of the model, in every interval.
///
/// # Errors
/// When the servers cannot be asked, or stdout cannot be written to.
pub fn run(folder: &Path, pace: &Pace, form: &mut dyn FnMut(&Model) -> Result<String>) -> Result<Exit> {
    let mut model = Model::default();
    model.sort = Column::Name;
    let mut shown = 0;
    once(folder, pace.interval, |told| model.hear(told))?;
    let mut begun = Instant::now();
    while pace.count.is_none_or(|count| shown < count) {
        sleep_until(begun, pace.interval);
        begun = Instant::now();
        once(folder, pace.interval, |told| model.hear(told))?;
        if !put_lines(form(&model)?)? {
            break;
        }
        shown += 1;
    }
    Ok(Exit::Ok)
}

/// An object in a line.
pub fn json(model: &Model) -> Result<String> {
    let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let silent = model
        .silent()
        .map(|(socket, why)| SilentServer { server: socket.display().to_string(), message: why.to_owned() });
    json_line(&TopInterval {
        at_unix_s: at.as_secs_f64(),
        disks: model.shown().into_iter().map(|(_, row)| TopDisk::new(row)).collect(),
        silent_servers: silent.collect(),
    })
}

impl TopDisk {
    fn new(row: &DiskRow) -> Self {
        let Disk { name, path, server, pid, state, .. } = row.disk.clone();
        let rates = row.interval.as_ref().map(|interval| interval.rates());
        Self {
            no_interval: rates.is_none().then(|| row.why_none.clone()),
            rates: rates.unwrap_or_else(|| DiskRates { name, path, server, pid, layers: Vec::new() }),
            state,
        }
    }
}

/// A name that is one word.
fn word(name: &str) -> String {
    match name {
        "" => "\"\"".to_owned(),
        name => printable(name).replace(' ', "\\u{20}"),
    }
}

/// Servers and disks without numbers, as lines that begin with `#`.
fn remarks(model: &Model) -> String {
    let silent =
        model.silent().map(|(socket, why)| format!("# {}: {}\n", printable(&socket.to_string_lossy()), printable(why)));
    let shown = model.shown().into_iter();
    let rows = shown
        .filter(|(_, row)| !row.note().is_empty())
        .map(|(_, row)| format!("# {}: {}\n", word(&row.disk.name), row.note()));
    silent.chain(rows).collect()
}

/// The disks that have numbers.
fn counted(model: &Model) -> impl Iterator<Item = (Key, &DiskRow, &Figures)> {
    let rows = model.shown().into_iter();
    rows.filter_map(|(socket, row)| Some(((socket.to_owned(), row.disk.name.clone()), row, row.figures.as_ref()?)))
}

/// How wide the column of the names is: `least`, or as wide as the longest name.
fn width_of_names(model: &Model, least: usize) -> usize {
    counted(model).map(|(_, row, _)| word(&row.disk.name).chars().count()).fold(least, usize::max)
}

/// Columns of its own. Latencies are in microseconds, megabytes are 10^6 bytes.
pub fn plain(model: &Model) -> Result<String> {
    let is_time = |column: &Column| matches!(column, Column::Await | Column::P50 | Column::P99 | Column::P999);
    let width = width_of_names(model, 20);
    let mut text = format!("{:<width$}", title(Column::Name));
    // Writing to a string cannot fail.
    for column in &Column::ALL[1..] {
        let unit = if is_time(column) { "_us" } else { "" };
        let _ = write!(text, " {:>9}", format!("{}{unit}", title(*column)));
    }
    for (_, row, figures) in counted(model) {
        let _ = write!(text, "\n{:<width$}", word(&row.disk.name));
        for column in &Column::ALL[1..] {
            let _ = match column.value(figures) {
                Some(value) if is_time(column) => write!(text, " {value:>9.1}"),
                Some(value) => write!(text, " {value:>9.2}"),
                None => write!(text, " {:>9}", "-"),
            };
        }
    }
    Ok(format!("{text}\n{}", remarks(model)))
}

/// The heads of the columns behind the name.
const IOSTAT_HEAD: &str = "     r/s     rMB/s   rrqm/s  %rrqm r_await rareq-sz     w/s     wMB/s   wrqm/s  %wrqm w_await wareq-sz     \
     d/s     dMB/s   drqm/s  %drqm d_await dareq-sz     f/s f_await  aqu-sz  %util";

/// The columns of `iostat -xm` (sysstat 12.7): megabytes are MiB here, and nowhere else, times milliseconds, request sizes KiB, and `aqu-sz` is computed as there.
/// Nothing is merged before the front. `%util` is the average queue size up to 1: at most so much of the time a request was in flight.
pub fn iostat(model: &Model) -> Result<String> {
    let width = width_of_names(model, 13);
    let mut text = format!("{:<width$}{IOSTAT_HEAD}", "Device");
    for (_, row, Figures { guests, .. }) in counted(model) {
        // Writing to a string cannot fail.
        let _ = write!(text, "\n{:<width$}", word(&row.disk.name));
        ["read", "write", "discard"].into_iter().for_each(|operation| text.push_str(&iostat_of(guests, operation)));
        let flush = operation_of(guests, "flush");
        let busy = guests.queue_size().min(1.0) * 100.0;
        let _ = write!(text, " {:>7.2} {:>7.2}", flush.requests_per_s, millis(&flush));
        let _ = write!(text, " {:>7.2} {busy:>6.2}", guests.queue_size_iostat);
    }
    Ok(format!("{text}\n{}", remarks(model)))
}

fn iostat_of(layer: &LayerRates, operation: &str) -> String {
    let op = operation_of(layer, operation);
    let (rate, mib) = (op.requests_per_s, op.bytes_per_s / f64::from(1 << 20));
    let size_kib = if rate > 0.0 { op.bytes_per_s / rate / 1024.0 } else { 0.0 };
    let merged = 0.0;
    format!(" {rate:>7.2} {mib:>9.2} {merged:>8.2} {merged:>6.2} {:>7.2} {size_kib:>8.2}", millis(&op))
}

/// The operation of that name, or one of which there were no requests.
fn operation_of(layer: &LayerRates, operation: &str) -> OperationRates {
    layer.operations.iter().find(|op| op.operation == operation).cloned().unwrap_or_default()
}

fn millis(op: &OperationRates) -> f64 {
    op.latency_mean_us.unwrap_or(0.0) / 1e3
}

const XSIOSTAT_HEAD: &str = "--------------------------------------------------------------------\n  \
     DOM   VBD         r/s        w/s    rMB/s    wMB/s rAvgQs wAvgQs\n";

/// The columns of XenServer's xsiostat: requests that came (not those that ended), megabytes of 10^6 bytes, and average queue sizes by the
/// times of those that ended. A disk that no Xen guest has is of domain 0, with a number that a line with `#` explains.
pub fn xsiostat() -> impl FnMut(&Model) -> Result<String> {
    let mut numbers: HashMap<Key, usize> = HashMap::new();
    let mut head = XSIOSTAT_HEAD;
    move |model| {
        let mut text = std::mem::take(&mut head).to_owned();
        for (key, row, Figures { guests, .. }) in counted(model) {
            let next = numbers.len() + 1;
            let is_new = !numbers.contains_key(&key);
            let number = *numbers.entry(key).or_insert(next);
            let vbd = xen_vbd(&row.disk);
            // Writing to a string cannot fail.
            if is_new && vbd.is_none() {
                let _ = writeln!(text, "# 0,{number}: {}", word(&row.disk.name));
            }
            let (domain, device) = vbd.unwrap_or((0, number as u64));
            let [read, write] = ["read", "write"].map(|operation| operation_of(guests, operation));
            let _ = write!(text, "{domain:>5},{device:>5}: {:>10.2} {:>10.2}", read.begun_per_s, write.begun_per_s);
            let _ = write!(text, " {:>8.2} {:>8.2}", read.bytes_per_s / 1e6, write.bytes_per_s / 1e6);
            let _ = writeln!(text, " {:>6.2} {:>6.2}", read.queue_size_iostat, write.queue_size_iostat);
        }
        text.push_str(&remarks(model));
        Ok(text.trim_end_matches('\n').to_owned())
    }
}

/// The domain and the device of a Xen guest's disk, which are at the end of the back end's path in xenstore.
fn xen_vbd(disk: &Disk) -> Option<(u64, u64)> {
    let way = disk.exports.iter().find(|export| export.protocol == "xen")?;
    let mut parts = way.address.rsplit('/');
    let device = parts.next()?.parse().ok()?;
    Some((parts.next()?.parse().ok()?, device))
}
