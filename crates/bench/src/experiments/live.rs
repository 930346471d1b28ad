//! Disks in use: a server with guests on its disks, for measurements of what is done to the disks' images meanwhile.
//!
//! The server is a process of its own, as in production. Guests are loads over vhost-user, in this process. What is done to
//! the images is asked for over the server's control socket.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde_json::json;
use spile_core::{Error, ErrorKind, Result, ResultExt};
use spile_server::serving::api::client::{CHANGE_PATIENCE, LOOK_PATIENCE, ask, call, escape, typed};
use spile_server::serving::api::types::{Job, NewJob, NewSnapshot, Snapshot};
use spile_server::serving::faults::SLOW_VARIABLE;
use spile_server::uri::{Address, NbdUri, Target};

use super::process::{Tied, disk_argument};
use crate::load::{self, Options, Pattern};

/// Bytes at the start of each disk to which requests take longer when the server is started with a delay. [`Live::guest`] leaves them alone.
pub const SLOW_BYTES: u64 = 1 << 20;
/// How long guests run before anything else begins.
const SETTLE: Duration = Duration::from_millis(100);
/// How often a job is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Bytes of a request that fills a disk.
const FILL_BYTES: u32 = 1 << 20;

/// Of a hundred requests of a guest, 70 are reads and 30 are writes, here and there.
pub const MIXED: Pattern = Pattern { random: true, read_percent: 70 };
/// A guest that only writes, here and there.
pub const WRITES: Pattern = Pattern { random: true, read_percent: 0 };

/// A server of disks that are written.
pub struct Live {
    process: Tied,
    folder: PathBuf,
    disks: usize,
}

/// What guests felt: the requests of all of them together.
#[derive(Clone, Copy, Debug)]
pub struct Felt {
    /// Half of the requests took no longer.
    pub p50_us: f64,
    /// 99 of 100 took no longer.
    pub p99_us: f64,
    /// The longest one.
    pub longest_us: f64,
    /// Requests a second.
    pub iops: f64,
}

/// The name of a disk on its server.
fn name(disk: usize) -> String {
    format!("d{disk}")
}

impl Live {
    /// Serves `images` as the disks 0, 1 and so on; its sockets are in `folder`. With `slow`, each request to the first
    /// [`SLOW_BYTES`] of a disk takes so much longer.
    ///
    /// # Errors
    /// When the server does not start.
    pub fn start(folder: &Path, images: &[PathBuf], slow: Option<Duration>) -> Result<Self> {
        let disks = images.len();
        let sockets = (0..disks).map(|disk| guest_socket(folder, disk));
        let sockets: Vec<_> = sockets.chain([control(folder), nbd_socket(folder)]).collect();
        // Those of an earlier server are not waited for.
        sockets.iter().for_each(|socket| drop(std::fs::remove_file(socket)));
        let mut args: Vec<OsString> = ["serve", "--workers", "2"].map(OsString::from).into();
        for (disk, image) in images.iter().enumerate() {
            args.push(disk_argument(image, &format!(",name={}", name(disk))));
            let socket = format!("{},export={}", guest_socket(folder, disk).display(), name(disk));
            args.extend(["--vhost-user".into(), socket.into()]);
        }
        args.extend(images.first().into_iter().flat_map(|image| allow_parents(image)));
        args.extend(["--control".into(), control(folder).into_os_string()]);
        args.extend(["--nbd".into(), format!("unix:{}", nbd_socket(folder).display()).into()]);
        let slow = slow.map(|delay| (SLOW_VARIABLE, format!("{}:{SLOW_BYTES}", delay.as_millis())));
        let mut process = Tied::start_with("the server", args, slow)?;
        process.wait_for(&sockets)?;
        Ok(Self { process, folder: folder.to_owned(), disks })
    }

    /// Ends the server, and waits until its disks are closed and may be used by others. When it is dropped it is killed.
    ///
    /// # Errors
    /// When a disk cannot be closed.
    pub fn end(self) -> Result<()> {
        self.process.stop()
    }

    /// A guest's load of 4 KiB requests on a disk, without an end.
    pub fn guest(&self, disk: usize, pattern: Pattern, depth: u32) -> Options {
        let uri = Target::Vhost(guest_socket(&self.folder, disk));
        Options { pattern, depth, start_bytes: SLOW_BYTES, seed: disk as u64 + 1, ..Options::new(uri) }
    }

    /// Guests on all disks, with `depth` requests in flight in all, as far as each disk has one.
    pub fn guests(&self, depth: u32) -> Vec<Options> {
        let each = (depth / self.disks as u32).max(1);
        (0..self.disks).map(|disk| self.guest(disk, MIXED, each)).collect()
    }

    /// A client on the part of a disk whose requests take longer: there is always one of its reads in flight.
    pub fn slow_client(&self, disk: usize) -> Options {
        let uri = NbdUri::new(Address::Unix(nbd_socket(&self.folder)), name(disk));
        Options { depth: 1, span_bytes: Some(SLOW_BYTES), ..Options::new(Target::Nbd(uri)) }
    }

    /// Writes all of a disk once.
    ///
    /// # Errors
    /// When a request fails.
    pub fn fill(&self, disk: usize, size_bytes: u64) -> Result<()> {
        let pattern = Pattern { random: false, read_percent: 0 };
        let ios = Some(size_bytes / u64::from(FILL_BYTES));
        let all = Options { start_bytes: 0, ios, block_bytes: FILL_BYTES, ..self.guest(disk, pattern, 4) };
        load::measure(&all).map(drop)
    }

    /// Writes `ios` times `block_bytes` here and there; the same places for the same `seed`.
    ///
    /// # Errors
    /// When a request fails.
    pub fn scatter(&self, disk: usize, block_bytes: u32, ios: u64, seed: u64) -> Result<()> {
        let some = Options { start_bytes: 0, ios: Some(ios), block_bytes, seed, ..self.guest(disk, WRITES, 16) };
        load::measure(&some).map(drop)
    }

    /// Makes a snapshot of all disks at one point in time.
    ///
    /// # Errors
    /// When it is refused or cannot be made durable.
    pub fn snapshot(&self, snapshot: &str) -> Result<Snapshot> {
        let order = NewSnapshot { disks: (0..self.disks).map(name).collect(), name: snapshot.to_owned() };
        let made = call(&control(&self.folder), "POST", "/v1/snapshots", Some(&json!(order)), CHANGE_PATIENCE)?;
        let made: Snapshot = typed(made)?;
        match &made.trouble {
            Some(trouble) => Err(Error::new(ErrorKind::Io, format!("a snapshot was made, but {trouble}"))),
            None => Ok(made),
        }
    }

    /// The disk 0 gets a checkpoint of that name.
    ///
    /// # Errors
    /// When it is refused or cannot be made.
    pub fn checkpoint(&self, checkpoint: &str) -> Result<()> {
        let path = format!("/v1/disks/{}/checkpoints", name(0));
        call(&control(&self.folder), "POST", &path, Some(&json!({ "name": checkpoint })), CHANGE_PATIENCE).map(drop)
    }

    /// The disk 0 loses the checkpoint of that name.
    ///
    /// # Errors
    /// When there is none, or its file cannot be written.
    pub fn remove_checkpoint(&self, checkpoint: &str) -> Result<()> {
        let path = format!("/v1/disks/{}/checkpoints/{checkpoint}", name(0));
        call(&control(&self.folder), "DELETE", &path, None, CHANGE_PATIENCE).map(drop)
    }

    /// The server's process.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Has a job do its work on the disk 0, and waits for its end, for `patience` at most. `None` when it had not ended by then: it is
    /// cancelled. `each` is called every few milliseconds meanwhile.
    ///
    /// # Errors
    /// When it is refused or fails.
    pub fn work(
        &mut self,
        kind: &str,
        layer: Option<&str>,
        patience: Duration,
        mut each: impl FnMut(),
    ) -> Result<Option<Job>> {
        let order =
            NewJob { disk: name(0), kind: kind.to_owned(), layer: layer.map(str::to_owned), ..NewJob::default() };
        let end = Instant::now() + patience;
        let job: Job = typed(call(&control(&self.folder), "POST", "/v1/jobs", Some(&json!(order)), CHANGE_PATIENCE)?)?;
        let path = format!("/v1/jobs/{}", escape(&job.id));
        loop {
            let job: Job = ask(&control(&self.folder), "GET", &path, LOOK_PATIENCE)?;
            each();
            match job.state.as_str() {
                "done" => return Ok(Some(job)),
                "running" if Instant::now() < end => std::thread::sleep(LOOK_EVERY),
                "running" => {
                    let cancel = json!({ "state": "cancelled" });
                    call(&control(&self.folder), "PATCH", &path, Some(&cancel), CHANGE_PATIENCE)?;
                    return Ok(None);
                }
                other => {
                    self.process.check()?;
                    let why = job.error.map(|error| format!(": {}", error.message)).unwrap_or_default();
                    return Err(Error::new(ErrorKind::Io, format!("the {kind} has {other}{why}")));
                }
            }
        }
    }
}

fn guest_socket(folder: &Path, disk: usize) -> PathBuf {
    folder.join(format!("{}.vhost", name(disk)))
}

fn nbd_socket(folder: &Path) -> PathBuf {
    folder.join("nbd")
}

fn control(folder: &Path) -> PathBuf {
    folder.join("control")
}

/// Runs `loads` while `work` runs, and some time before. What `work` has done, and what the guests of the loads felt.
///
/// # Errors
/// Those of `work` and of the loads.
pub fn beside<T>(loads: Vec<Options>, work: impl FnOnce() -> Result<T>) -> Result<(T, Felt)> {
    let stop = Arc::new(AtomicBool::new(false));
    let loads = loads.into_iter().map(|load| Options { stop: stop.clone(), ..load });
    std::thread::scope(|scope| {
        let running: Vec<_> = loads.map(|load| scope.spawn(move || load::run_only(&load, |_| {}))).collect();
        std::thread::sleep(SETTLE);
        let done = work();
        stop.store(true, Ordering::Relaxed);
        let ended = running.into_iter().map(|load| load.join().expect("a load does not panic"));
        let ended: Vec<_> = ended.collect::<Result<_>>()?;
        Ok((done?, Felt::of(ended)?))
    })
}

impl Felt {
    fn of(loads: Vec<load::LoadOutcome>) -> Result<Self> {
        let mut times: Option<Histogram<u64>> = None;
        let mut iops = 0.0;
        for load in loads {
            load.error.map_or(Ok(()), Err)?;
            let (begun_ns, ended_ns) = load.stats.span_ns.unwrap_or_default();
            let requests: u64 = load.stats.lanes().iter().map(|lane| lane.ios).sum();
            iops += requests as f64 * 1e9 / (ended_ns - begun_ns).max(1) as f64;
            for lane in load.stats.lanes() {
                let times = times.get_or_insert_with(|| Histogram::new_from(&lane.latency_ns));
                times.add(&lane.latency_ns).expect("histograms of the same bounds");
            }
        }
        let times = times.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "there is no guest"))?;
        let us = |ns: u64| ns as f64 / 1e3;
        let [p50_us, p99_us] = [0.5, 0.99].map(|share| us(times.value_at_quantile(share)));
        Ok(Self { p50_us, p99_us, longest_us: us(times.max()), iops })
    }
}

/// Makes a VHD by `spile create`.
///
/// # Errors
/// When it cannot be made.
pub fn create(path: &Path, size_bytes: u64) -> Result<()> {
    run_to_end(vec!["create".into(), path.into(), "--size".into(), size_bytes.to_string().into()])
}

/// Makes a VHD that is a child of `parent`.
///
/// # Errors
/// When it cannot be made.
pub fn create_child(path: &Path, parent: &Path) -> Result<()> {
    let args = ["create".into(), path.into(), "--parent".into(), parent.into()];
    run_to_end(args.into_iter().chain(allow_parents(parent)).collect())
}

/// Folders of memory lie below `/dev`, where parents are looked for only when that is said.
fn allow_parents(image: &Path) -> [OsString; 2] {
    ["--allow-parents".into(), image.parent().unwrap_or(image).into()]
}

fn run_to_end(args: Vec<OsString>) -> Result<()> {
    let name = format!("spile {}", args[0].display());
    Tied::start(name, args)?.wait_for_success()
}

/// Bytes that the files of a folder take on the host.
///
/// # Errors
/// When the folder cannot be read.
pub fn allocated_bytes(folder: &Path) -> Result<u64> {
    const BLOCK_BYTES: u64 = 512;
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io("read the folder", e)).at_path(folder)?;
    // A file that goes meanwhile takes nothing.
    let files = entries.flatten().filter_map(|entry| entry.metadata().ok());
    Ok(files.map(|file| file.blocks() * BLOCK_BYTES).sum())
}
