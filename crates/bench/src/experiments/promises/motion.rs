//! The lines on another host: mirrors, hand-overs, links that are cut, and the way back. The other host is `spile receive`, a process of its own
//! on this one: both hosts share the processors and the device, so what the one takes the other one lacks.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use spile_core::{Error, ErrorKind, Result};
use spile_server::serving::api::types::{Job, NewJob};
use spile_server::uri::{Address, NbdUri};

use super::super::live::{Felt, Live, MIXED, beside, create, name};
use super::super::process::Tied;
use super::link::Link;
use super::{Figure, PATIENCE, Seen, World, in_turns, mib};
use crate::load::{Options, Pattern};

/// A guest that does not use all that the disk has, in requests a second: while a disk is handed over, and while a link is cut.
const STEADY_IOPS: f64 = 1000.0;
/// Bytes of the writes one after the other, and how many are in flight.
const LARGE_BYTES: u32 = 256 << 10;
const LARGE_DEPTH: u32 = 8;
/// How often the lag of a mirror is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// How long the other host may take to let go of a disk.
const LET_GO: Duration = Duration::from_secs(10);
/// The checkpoint by which changes are counted.
const SINCE: &str = "since";

/// Another host, which takes disks in for a folder.
struct Host {
    process: Tied,
    socket: PathBuf,
}

impl Host {
    fn new(world: &World, folder: &Path) -> Result<Self> {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let socket = world.sockets.join(format!("host-{name}"));
        let _ = std::fs::remove_file(&socket);
        let nbd = format!("unix:{}", socket.display());
        let args = ["receive".into(), folder.into(), "--nbd".into(), nbd.into()];
        let mut process = Tied::start("the other host", args)?;
        process.wait_for([&socket])?;
        Ok(Self { process, socket })
    }

    /// Waits until it has no file of that name open any more.
    fn lets_go(&self, path: &Path) -> Result<()> {
        let end = Instant::now() + LET_GO;
        let has_it = || {
            let open = std::fs::read_dir(format!("/proc/{}/fd", self.process.id())).into_iter().flatten().flatten();
            open.filter_map(|entry| std::fs::read_link(entry.path()).ok()).any(|file| file == path)
        };
        while has_it() {
            if Instant::now() > end {
                return Err(Error::new(ErrorKind::TimedOut, "the other host does not let go of the disk").at_path(path));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }
}

/// The place of a disk at the host that is reached by `socket`.
fn at(socket: &Path, disk: &str) -> String {
    NbdUri::new(Address::Unix(socket.to_owned()), disk.to_owned()).to_string()
}

fn order(to: String, mirror_only: bool) -> NewJob {
    NewJob { disk: name(0), kind: "move".to_owned(), to: Some(to), mirror_only, ..NewJob::default() }
}

/// A server of a full disk in `folder`.
fn full_disk(world: &World, folder: &Path) -> Result<Live> {
    let disk = folder.join("disk.vhd");
    create(&disk, world.parameters.disk_bytes)?;
    let live = quiet(Live::start(world.sockets, &[disk], None)?)?;
    live.fill(0, world.parameters.disk_bytes)?;
    Ok(live)
}

/// A server that does not say that its disk has moved, or its link is cut: that is what is done here, and no news to the user.
fn quiet(live: Live) -> Result<Live> {
    let _: Value = live.call("PUT", "/v1/log-level", Some(&json!({ "level": "error" })))?;
    Ok(live)
}

fn in_step(live: &mut Live, id: &str) -> Result<Job> {
    let is_in_step = |job: &Job| {
        job.motion.as_ref().is_some_and(|motion| motion.phase == "in step" && motion.failing_for_s.is_none())
    };
    let told = live.wait_for(id, PATIENCE, is_in_step)?;
    told.ok_or_else(|| Error::new(ErrorKind::TimedOut, "the mirror does not come in step"))
}

fn cancel(live: &mut Live, id: &str) -> Result<()> {
    live.change_job(id, &json!({ "state": "cancelled" }))?;
    match live.wait_for(id, PATIENCE, |job| job.state == "cancelled")? {
        Some(_) => Ok(()),
        None => Err(Error::new(ErrorKind::TimedOut, "the mirror does not end")),
    }
}

/// A guest with as many requests as the disk takes, without a mirror and with one, which is in step when the run begins.
pub(super) fn mirror(world: &World, round: u32) -> Result<Seen> {
    let (here, there) = world.hosts()?;
    let host = Host::new(world, &there)?;
    let live = std::cell::RefCell::new(full_disk(world, &here)?);
    let small = live.borrow().guest(0, MIXED, world.parameters.depth);
    let sequence = Pattern { random: false, read_percent: 0 };
    let large = Options { block_bytes: LARGE_BYTES, ..live.borrow().guest(0, sequence, LARGE_DEPTH) };
    let mut seen = Seen::new();
    for (figure, guest) in [(Figure::MirrorCostSmallRatio, &small), (Figure::MirrorCostLargeRatio, &large)] {
        let without = || world.quiet(vec![guest.clone()]);
        let with = || mirrored(world, &mut live.borrow_mut(), &host, guest);
        let (without, (lag, with)) = in_turns(round, without, with)?;
        seen.push((figure, 1.0 - with.iops / without.iops.max(1.0)));
        if figure == Figure::MirrorCostLargeRatio {
            seen.push((Figure::MirrorInStepRatio, f64::from(lag.in_step) / f64::from(lag.looks.max(1))));
            seen.extend([(Figure::MirrorLagMib, mib(lag.bytes)), (Figure::MirrorLagMs, lag.ms as f64)]);
        }
    }
    Ok(seen)
}

/// The most by which a mirror was behind, how often it was looked at, and how often it was in step then.
#[derive(Clone, Copy, Default)]
struct Lag {
    bytes: u64,
    ms: u64,
    looks: u32,
    in_step: u32,
}

/// A run of a guest on a disk with a mirror.
fn mirrored(world: &World, live: &mut Live, host: &Host, guest: &Options) -> Result<(Lag, Felt)> {
    let job = live.begin(&order(at(&host.socket, "disk.vhd"), true))?;
    in_step(live, &job.id)?;
    let seen = beside(vec![guest.clone()], || {
        let end = Instant::now() + Duration::from_secs_f64(world.parameters.seconds);
        let mut most = Lag::default();
        while Instant::now() < end {
            std::thread::sleep(LOOK_EVERY);
            let Some(motion) = live.job(&job.id)?.motion else { continue };
            most.looks += 1;
            most.in_step += u32::from(motion.phase == "in step");
            most.bytes = most.bytes.max(motion.lag_bytes);
            most.ms = most.ms.max(motion.lag_ms.unwrap_or(0));
        }
        Ok(most)
    });
    cancel(live, &job.id)?;
    seen
}

/// A guest on a disk that goes to another host, beside one on a disk that stays.
pub(super) fn hand_over(world: &World, round: u32) -> Result<Seen> {
    let (here, there) = world.hosts()?;
    let host = Host::new(world, &there)?;
    let mut live = full_disk(world, &here)?;
    let guest = Options { rate: Some(STEADY_IOPS), ..live.guest(0, MIXED, world.parameters.depth) };
    let stays = || world.quiet(vec![guest.clone()]);
    // The disk goes one way in a round, so it is here, or there by then, in the run without a move.
    let moved = || {
        beside(vec![guest.clone()], || {
            let job = live.begin(&order(at(&host.socket, "disk.vhd"), false))?;
            let done = live.wait_for(&job.id, PATIENCE, |job| job.state == "done")?;
            world.rest()?;
            done.and_then(|job| job.motion)
                .ok_or_else(|| Error::new(ErrorKind::TimedOut, "the disk does not get to the other host"))
        })
    };
    let (stayed, (motion, felt)) = in_turns(round, stays, moved)?;
    Ok(vec![
        (Figure::HandOverMs, motion.longest_stall_us / 1e3),
        (Figure::HandOverLongestMs, (felt.longest_us - stayed.longest_us) / 1e3),
    ])
}

/// A mirror whose link is cut for some time, and comes back, while a guest goes on. The guest stops before the link is back, so that
/// what is sent then can be set beside what had changed.
pub(super) fn link_cut(world: &World, round: u32) -> Result<Seen> {
    let (here, there) = world.hosts()?;
    let host = Host::new(world, &there)?;
    let link = Link::new(&world.sockets.join("link"), &host.socket)?;
    let live = std::cell::RefCell::new(full_disk(world, &here)?);
    let guest = Options { rate: Some(STEADY_IOPS), ..live.borrow().guest(0, MIXED, world.parameters.depth) };
    let job = live.borrow().begin(&order(at(link.path(), "disk.vhd"), true))?;
    in_step(&mut live.borrow_mut(), &job.id)?;
    let up = || world.quiet(vec![guest.clone()]);
    let down = || cut(world, &mut live.borrow_mut(), &link, &job.id, &guest);
    let (up, ((sent_bytes, changed_bytes), felt)) = in_turns(round, up, down)?;
    cancel(&mut live.borrow_mut(), &job.id)?;
    Ok(vec![
        (Figure::LinkCutSentRatio, sent_bytes as f64 / changed_bytes.max(1) as f64),
        (Figure::LinkCutSentMib, mib(sent_bytes)),
        (Figure::LinkCutP99Ratio, felt.p99_us / up.p99_us.max(1.0)),
    ])
}

/// Bytes that were sent when the link was back, and those that had changed since it was cut; and what the guest felt in between.
fn cut(world: &World, live: &mut Live, link: &Link, job: &str, guest: &Options) -> Result<((u64, u64), Felt)> {
    live.checkpoint(SINCE)?;
    link.cut();
    let ((), felt) = beside(vec![guest.clone()], || {
        std::thread::sleep(Duration::from_secs_f64(world.parameters.cut_s));
        Ok(())
    })?;
    let (changed_bytes, before_bytes) = (live.changed_bytes(SINCE)?, link.sent_bytes());
    link.restore();
    let in_step = |job: &Job| {
        let motion = job.motion.as_ref();
        motion
            .is_some_and(|motion| motion.phase == "in step" && motion.lag_bytes == 0 && motion.failing_for_s.is_none())
    };
    if live.wait_for(job, PATIENCE, in_step)?.is_none() {
        return Err(Error::new(ErrorKind::TimedOut, "the mirror does not come in step when the link is back"));
    }
    let sent_bytes = link.sent_bytes() - before_bytes;
    live.remove_checkpoint(SINCE)?;
    Ok(((sent_bytes, changed_bytes), felt))
}

/// A disk that has gone to another host, was written to there, and comes back to where its old image lies.
pub(super) fn return_trip(world: &World) -> Result<Seen> {
    let (here, there) = world.hosts()?;
    let (first, second) = (Host::new(world, &here)?, Host::new(world, &there)?);
    let link = Link::new(&world.sockets.join("link"), &first.socket)?;
    let mut live = full_disk(world, &here)?;
    go(&mut live, at(&second.socket, "disk.vhd"))?;
    live.end()?;
    let disk = there.join("disk.vhd");
    second.lets_go(&disk)?;
    let mut live = quiet(Live::start(world.sockets, &[disk], None)?)?;
    live.checkpoint(SINCE)?;
    live.scatter(0, 4096, world.parameters.disk_bytes >> 19, 1)?;
    let (changed_bytes, before_bytes) = (live.changed_bytes(SINCE)?, link.sent_bytes());
    go(&mut live, at(link.path(), "disk.vhd"))?;
    let sent_bytes = link.sent_bytes() - before_bytes;
    Ok(vec![
        (Figure::ReturnTripSentRatio, sent_bytes as f64 / changed_bytes.max(1) as f64),
        (Figure::ReturnTripOfDiskRatio, sent_bytes as f64 / world.parameters.disk_bytes as f64),
    ])
}

fn go(live: &mut Live, to: String) -> Result<()> {
    let job = live.begin(&order(to, false))?;
    match live.wait_for(&job.id, PATIENCE, |job| job.state == "done")? {
        Some(_) => Ok(()),
        None => Err(Error::new(ErrorKind::TimedOut, "the disk does not get to the other host")),
    }
}
