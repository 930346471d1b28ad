//! The lines on jobs: several merges at a time, one that is killed, a backup whose target hangs, and what changes at once.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;
use spile_core::{Error, ErrorKind, Result};
use spile_server::serving::api::types::{Job, JobList, NewJob};

use super::super::live::{Live, beside, chains, create, name};
use super::super::world::Folder;
use super::super::{hung, limit};
use super::{Figure, PATIENCE, Seen, World, in_turns, mib};

/// Disks whose chains are merged at the same time.
const MERGES: usize = 4;
/// A merge that is killed, and a job that is cancelled, move so many bytes in a second.
const SLOW_BYTES_PER_S: u64 = 8 << 20;
/// Changes of a limit in each direction in a round.
const CHANGES: u32 = 3;
/// How often a job that ends is looked at.
const LOOK_EVERY: Duration = Duration::from_micros(500);

fn order(disk: usize, kind: &str) -> NewJob {
    NewJob { disk: name(disk), kind: kind.to_owned(), ..NewJob::default() }
}

/// The image in the middle of each of four disks' chains is merged, all at the same time, while guests use all disks.
pub(super) fn four_merges(world: &World, round: u32) -> Result<Seen> {
    let new_chains = || {
        world.clear()?;
        chains(world.sockets, &world.images, MERGES, world.parameters.disk_bytes / 2)
    };
    let without = || {
        let live = new_chains()?;
        world.quiet(live.guests(world.parameters.depth))
    };
    let with = || {
        let live = new_chains()?;
        beside(live.guests(world.parameters.depth), || merge_all(&live))
    };
    let (quiet, (merged, felt)) = in_turns(round, without, with)?;
    Ok(vec![
        (Figure::MergesAtOnce, merged.at_once as f64),
        (Figure::MergesMibPerS, mib(merged.bytes) / merged.seconds),
        (Figure::MergesP99Ratio, felt.p99_us / quiet.p99_us.max(1.0)),
    ])
}

/// What merges have done together.
struct Merged {
    /// The most that had moved something, and had not ended.
    at_once: usize,
    bytes: u64,
    seconds: f64,
}

fn merge_all(live: &Live) -> Result<Merged> {
    let begun = Instant::now();
    let begin = |disk| live.begin(&NewJob { layer: Some(format!("disk{disk}-middle")), ..order(disk, "coalesce") });
    // All at once: one that is begun last is not to find the first one at its end.
    let begun_jobs: Vec<Job> = std::thread::scope(|scope| {
        let orders: Vec<_> = (0..MERGES).map(|disk| scope.spawn(move || begin(disk))).collect();
        orders.into_iter().map(|order| order.join().expect("an order does not panic")).collect::<Result<_>>()
    })?;
    let mut at_once = 0;
    loop {
        let jobs: Vec<Job> = begun_jobs.iter().map(|job| live.job(&job.id)).collect::<Result<_>>()?;
        at_once = at_once.max(jobs.iter().filter(|job| job.is_under_way() && job.done_bytes > 0).count());
        if jobs.iter().all(|job| job.state == "done") {
            let (bytes, seconds) = (jobs.iter().map(|job| job.done_bytes).sum(), begun.elapsed().as_secs_f64());
            return Ok(Merged { at_once, bytes, seconds });
        }
        if let Some(failed) = jobs.iter().find(|job| job.state != "done" && job.state != "running") {
            let what = format!("the merge of {} is {}: {:?}", failed.disk, failed.state, failed.error);
            return Err(Error::new(ErrorKind::Io, what));
        }
        if begun.elapsed() > PATIENCE {
            return Err(Error::new(ErrorKind::TimedOut, "the merges do not end"));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// A server is killed in the middle of a merge of the leaf, and the next one goes on with it.
pub(super) fn killed_merge(world: &World) -> Result<Seen> {
    let disk = world.images.join("disk.vhd");
    create(&disk, world.parameters.disk_bytes)?;
    let mut live = Live::start(world.sockets, std::slice::from_ref(&disk), None)?;
    live.fill(0, world.parameters.disk_bytes)?;
    live.snapshot("base")?;
    // So many bytes are moved once.
    let leaf_bytes = world.parameters.disk_bytes / 4;
    live.fill(0, leaf_bytes)?;
    let slow = NewJob { limit_bytes_per_s: Some(SLOW_BYTES_PER_S), ..order(0, "coalesce") };
    let job = live.begin(&slow)?;
    let half = live.wait_for(&job.id, PATIENCE, |job| job.done_bytes > leaf_bytes / 2)?;
    let half = half.ok_or_else(|| Error::new(ErrorKind::TimedOut, "the merge does not come to its middle"))?;
    // Killed, not ended.
    drop(live);
    let (mut live, begun) = next_server(world, &disk)?;
    let id = live.last_job()?.id;
    if live.wait_for(&id, PATIENCE, |job| job.total_bytes > 0)?.is_none() {
        return Err(Error::new(ErrorKind::TimedOut, "the merge does not go on"));
    }
    let goes_on_ms = begun.elapsed().as_secs_f64() * 1e3;
    live.change_job(&id, &json!({ "limit_bytes_per_s": 0 }))?;
    let ended = live.wait_for(&id, PATIENCE, |job| job.state == "done")?;
    let ended = ended.ok_or_else(|| Error::new(ErrorKind::TimedOut, "the merge does not end after the kill"))?;
    live.end()?;
    let again_bytes = (half.done_bytes + ended.done_bytes).saturating_sub(leaf_bytes);
    Ok(vec![
        (Figure::KilledMergeAgainS, again_bytes as f64 / SLOW_BYTES_PER_S as f64),
        (Figure::KilledMergeGoesOnMs, goes_on_ms),
    ])
}

/// The server after one that was killed, and when it was started. The kernel may have the files of the killed one locked for some
/// seconds, so several may have to be tried.
fn next_server(world: &World, disk: &PathBuf) -> Result<(Live, Instant)> {
    let end = Instant::now() + PATIENCE;
    loop {
        let begun = Instant::now();
        match Live::start(world.sockets, std::slice::from_ref(disk), None) {
            Ok(live) => return Ok((live, begun)),
            Err(error) if begun > end => return Err(error),
            Err(_) => {}
        }
    }
}

/// A disk whose backup's target stops answering, beside the same disk without a backup.
pub(super) fn hung_backup(world: &World, round: u32) -> Result<Seen> {
    let sockets = Folder::inside(world.sockets, "hung")?;
    let parameters = hung::Parameters {
        depths: vec![world.parameters.depth],
        // Of two rounds the second one has the other order.
        rounds: 1 + round % 2,
        seconds: world.parameters.seconds,
        ..hung::Parameters::new(true)
    };
    let row = hung::beside_a_backup(sockets.path(), &world.images, &parameters)?.pop();
    let row = row.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "there is no round"))?;
    Ok(vec![(Figure::HungBackupP99Ratio, row.beside_p99_us / row.alone_p99_us.max(1.0))])
}

/// A limit is set and taken away; a merge, a flatten, a move and a backup of a disk in use are cancelled.
pub(super) fn changes(world: &World) -> Result<Seen> {
    let sockets = Folder::inside(world.sockets, "limits")?;
    let (holds_ms, gone_ms) = limit::changes_ms(sockets.path(), CHANGES)?;
    let mut live = chains(world.sockets, &world.images, 1, world.parameters.disk_bytes)?;
    let (mut seen, _) = beside(live.guests(world.parameters.depth), || {
        let kinds = [
            ("coalesce", Figure::CancelMergeMs),
            ("flatten", Figure::CancelFlattenMs),
            ("move", Figure::CancelMoveMs),
            ("backup", Figure::CancelBackupMs),
        ];
        kinds
            .into_iter()
            .map(|(kind, figure)| Ok((figure, cancel_ms(world, &mut live, kind)?)))
            .collect::<Result<Seen>>()
    })?;
    seen.extend([(Figure::LimitHoldsMs, holds_ms), (Figure::LimitGoneMs, gone_ms)]);
    Ok(seen)
}

/// Begins a job, cancels it once it has done something, and returns how long its end takes, in milliseconds.
fn cancel_ms(world: &World, live: &mut Live, kind: &str) -> Result<f64> {
    let target = world.images.join(format!("{kind}.raw"));
    let to = Some(target.display().to_string()).filter(|_| kind == "move");
    let layer = Some("middle".to_owned()).filter(|_| kind == "coalesce");
    let id = if kind == "backup" {
        // The guest may change all of the disk before the order to cancel.
        let fleece_bytes = 2 * world.parameters.disk_bytes;
        let order = json!({
            "disks": [{ "disk": name(0), "target": target }],
            "limit_bytes_per_s": SLOW_BYTES_PER_S,
            "fleece_limit_bytes": fleece_bytes,
        });
        let begun: JobList = live.call("POST", "/v1/backups", Some(&order))?;
        begun.jobs.into_iter().next().map(|job| job.id)
    } else {
        let slow = NewJob { to, layer, limit_bytes_per_s: Some(SLOW_BYTES_PER_S), ..order(0, kind) };
        Some(live.begin(&slow)?.id)
    };
    let id = id.ok_or_else(|| Error::new(ErrorKind::Protocol, "the server names no job"))?;
    if live.wait_for(&id, PATIENCE, |job| job.done_bytes > 0)?.is_none() {
        return Err(Error::new(ErrorKind::TimedOut, format!("the {kind} does not begin")));
    }
    let begun = Instant::now();
    live.change_job(&id, &json!({ "state": "cancelled" }))?;
    loop {
        let job = live.job(&id)?;
        match job.state.as_str() {
            "cancelled" => return Ok(begun.elapsed().as_secs_f64() * 1e3),
            "running" if begun.elapsed() < PATIENCE => std::thread::sleep(LOOK_EVERY),
            other => {
                let why = job.error.map(|error| format!(": {}", error.message)).unwrap_or_default();
                return Err(Error::new(ErrorKind::Io, format!("the {kind} that was cancelled is {other}{why}")));
            }
        }
    }
}
