//! `spile limit`: how many requests and bytes of a disk, or of a group of disks, may pass in a second.

use std::path::Path;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use serde_json::{Map, Value, json};
use spile_core::{Error, ErrorKind, Result};
use spile_server::serving::api::client::{LOOK_PATIENCE, ask, call, escape};
use spile_server::serving::api::limits::{DiskLimits, GroupLimits, Limits};
use spile_server::serving::api::types::DiskDetail;
use utoipa::ToSchema;

use super::control::{Which, path_of};
use super::{Exit, print_json, printable, say};
use crate::limits::{parse_bps, parse_iops};
use crate::units::{format_limit, format_us, parse_duration};

/// Limit how many requests and bytes of a disk may pass in a second
///
/// A limit that is not named stays as it is, and 0 takes one away. Without any, what holds now is printed. A change holds at once, also
/// for requests that wait already, until the server ends; a server that takes over keeps it, unless it is given limits itself.
///
/// A request passes when no limit is in debt, and then takes what it costs; so a request that is larger than the allowance passes, too,
/// and the next one waits for longer. A write of zeroes counts its bytes, a discard counts as a write of no bytes, a flush
/// counts nothing and never waits.
///
/// With --group the disk shares the limits of that group with the group's other disks in the same server, beside its own. When they
/// want more than there is, each gets the same. --whole-group sets the limits of the group in the place of the disk's own.
#[derive(Debug, Args)]
pub struct LimitArgs {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    rates: RateArgs,
    /// How long unused allowance adds up: after a pause of T as much may pass at once as else in T. From 10ms to 1h [default: 100ms]
    #[arg(long, value_name = "T", value_parser = parse_duration)]
    burst: Option<Duration>,
    /// Put the disk into this group, which is made if there is none of that name
    #[arg(long, value_name = "G", conflicts_with = "no_group")]
    group: Option<String>,
    /// Take the disk out of its group
    #[arg(long)]
    no_group: bool,
    /// Change the limits that the disk's group shares, instead of the disk's own
    #[arg(long, conflicts_with = "no_group")]
    whole_group: bool,
    /// Take all limits away that are not given here
    #[arg(long)]
    off: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct RateArgs {
    /// Requests in a second, of all kinds but flushes
    #[arg(long, value_name = "N", value_parser = parse_iops)]
    iops: Option<u64>,
    /// Reads in a second
    #[arg(long, value_name = "N", value_parser = parse_iops)]
    read_iops: Option<u64>,
    /// Writes in a second
    #[arg(long, value_name = "N", value_parser = parse_iops)]
    write_iops: Option<u64>,
    /// Bytes in a second
    #[arg(long, value_name = "N", value_parser = parse_bps)]
    bps: Option<u64>,
    /// Bytes read in a second
    #[arg(long, value_name = "N", value_parser = parse_bps)]
    read_bps: Option<u64>,
    /// Bytes written in a second
    #[arg(long, value_name = "N", value_parser = parse_bps)]
    write_bps: Option<u64>,
}

/// What limits a disk.
#[derive(Debug, Serialize, ToSchema)]
pub struct Limited {
    /// The disk's name.
    disk: String,
    /// The control socket of its server.
    server: String,
    /// What limits it, and what that has delayed.
    #[serde(flatten)]
    limits: DiskLimits,
}

impl LimitArgs {
    /// The change of limits that was asked for, as the control API takes it; empty when none was.
    fn change(&self) -> Map<String, Value> {
        let RateArgs { iops, read_iops, write_iops, bps, read_bps, write_bps } = self.rates;
        let numbers = [
            ("iops", iops),
            ("read_iops", read_iops),
            ("write_iops", write_iops),
            ("bps", bps),
            ("read_bps", read_bps),
            ("write_bps", write_bps),
        ];
        let numbers = numbers.into_iter().filter_map(|(name, rate)| Some((name.to_owned(), json!(rate?))));
        let burst = self.burst.map(|burst| ("burst_s".to_owned(), json!(burst.as_secs_f64())));
        numbers.chain(burst).chain(self.off.then(|| ("off".to_owned(), json!(true)))).collect()
    }

    /// The group that the disk is to be in; empty for none.
    fn group(&self) -> Option<&str> {
        if self.no_group { Some("") } else { self.group.as_deref() }
    }
}

/// Runs `spile limit`.
///
/// # Errors
/// When there is no such disk; when the limits cannot be kept.
pub fn run(args: &LimitArgs) -> Result<Exit> {
    if args.group.as_deref() == Some("") {
        let error = Error::new(ErrorKind::InvalidInput, "a group has a name");
        return Err(error.hint("--no-group takes the disk out of its group"));
    }
    let (socket, name) = args.which.find()?;
    let mut of_disk = args.change();
    let of_group = if args.whole_group { std::mem::take(&mut of_disk) } else { Map::new() };
    args.group().into_iter().for_each(|group| drop(of_disk.insert("group".to_owned(), json!(group))));
    if !of_disk.is_empty() {
        let body = json!({ "limits": of_disk });
        let _: Value = call(&socket, "PATCH", &path_of(&name), Some(&body), LOOK_PATIENCE)?;
    }
    if args.whole_group {
        change_group(&socket, &name, of_group)?;
    }
    let disk = look(&socket, &name)?.disk;
    let limited = Limited { disk: disk.name, server: disk.server, limits: disk.limits };
    if args.json {
        return print_json(&limited).map(|()| Exit::Ok);
    }
    lines(&limited.limits).into_iter().for_each(say);
    Ok(Exit::Ok)
}

fn look(socket: &Path, name: &str) -> Result<DiskDetail> {
    ask(socket, "GET", &path_of(name), LOOK_PATIENCE)
}

/// Changes the limits of the group that the disk is in.
fn change_group(socket: &Path, disk: &str, change: Map<String, Value>) -> Result<()> {
    let group = look(socket, disk)?.disk.limits.group.ok_or_else(|| {
        Error::new(ErrorKind::InvalidInput, format!("the disk {disk:?} is in no group")).hint("say --group NAME, too")
    })?;
    if change.is_empty() {
        return Ok(());
    }
    let path = format!("/v1/groups/{}", escape(&group.name));
    call(socket, "PATCH", &path, Some(&Value::Object(change)), LOOK_PATIENCE).map(|_: Value| ())
}

/// What limits a disk and what that has delayed, a line for each fact.
pub(super) fn lines(limits: &DiskLimits) -> Vec<String> {
    let DiskLimits { own, group, job, delayed_requests, delayed_s, waiting_requests } = limits;
    let mut lines = vec![format!("limits: {}", describe(own))];
    if let Some(GroupLimits { name, disk_count, limits }) = group {
        lines.push(format!("group {}, shared by {disk_count} disk(s): {}", printable(name), describe(limits)));
    }
    lines.extend(job.iter().map(|job| format!("for a job: {}", describe(job))));
    if *delayed_requests > 0 {
        let time = format_us(delayed_s * 1e6);
        lines.push(format!("delayed: {delayed_requests} request(s), {time} in all; {waiting_requests} wait now"));
    }
    lines
}

/// Limits in words.
fn describe(limits: &Limits) -> String {
    let of = |who: &str, iops: Option<u64>, bps: Option<u64>| {
        let iops = iops.map(|iops| format!("{who}{iops} requests/s"));
        let bps = bps.map(|bps| format!("{who}{}", format_limit(bps)));
        iops.into_iter().chain(bps)
    };
    let all = of("", limits.iops, limits.bps);
    let reads = of("reads ", limits.read_iops, limits.read_bps);
    let rates: Vec<_> = all.chain(reads).chain(of("writes ", limits.write_iops, limits.write_bps)).collect();
    if rates.is_empty() {
        return "none".to_owned();
    }
    let burst = limits.burst_s.map(|burst_s| format!("; bursts of {}", format_us(burst_s * 1e6)));
    format!("{}{}", rates.join(", "), burst.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_told_in_words() {
        let limits = DiskLimits {
            own: Limits { iops: Some(500), write_bps: Some(5 << 20), burst_s: Some(0.5), ..Limits::default() },
            group: Some(GroupLimits { name: "g".to_owned(), disk_count: 2, limits: Limits::default() }),
            delayed_requests: 3,
            delayed_s: 1.5,
            ..DiskLimits::default()
        };
        let wanted = [
            "limits: 500 requests/s, writes 5M (5.24 MB/s); bursts of 500 ms",
            "group g, shared by 2 disk(s): none",
            "delayed: 3 request(s), 1.50 s in all; 0 wait now",
        ];
        assert_eq!(lines(&limits), wanted);
        assert_eq!(lines(&DiskLimits::default()), ["limits: none"]);
    }
}
