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
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use spile_core::{Error, ErrorKind, Result, ResultExt};
use spile_server::serving::api::checkpoints::CheckpointList;
use spile_server::serving::api::client::{CHANGE_PATIENCE, LOOK_PATIENCE, ask, call, escape, typed};
use spile_server::serving::api::discovery::EXTENSION;
use spile_server::serving::api::types::{Job, JobList, NewJob, NewSnapshot, Snapshot};
use spile_server::serving::faults::SLOW_VARIABLE;
use spile_server::uri::{Address, NbdUri, Target};

use super::process::{Tied, disk_argument};
use crate::load::{self, Options, Pattern};

/// Bytes at the start of each disk to which requests take longer when the server is started with a delay. [`Live::guest`] leaves them alone.
pub const SLOW_BYTES: u64 = 1 << 20;
/// How long guests run before anything else begins.
const SETTLE: Duration = Duration::from_millis(100);
/// How often a job is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(2);
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
pub fn name(disk: usize) -> String {
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
        Options { depth: 1, span_bytes: Some(SLOW_BYTES), ..Options::new(Target::Nbd(self.nbd(&name(disk)))) }
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
        let made: Snapshot = self.call("POST", "/v1/snapshots", Some(&json!(order)))?;
        match &made.trouble {
            Some(trouble) => Err(Error::new(ErrorKind::Io, format!("a snapshot was made, but {trouble}"))),
            None => Ok(made),
        }
    }

    /// Calls the server: `path` begins with `/v1/`. The answer is one of the API's types, or a plain value.
    ///
    /// # Errors
    /// What the server answers.
    pub fn call<T: DeserializeOwned>(&self, method: &str, path: &str, body: Option<&Value>) -> Result<T> {
        typed(call(&self.control(), method, path, body, CHANGE_PATIENCE)?)
    }

    /// The disk 0 gets a checkpoint of that name.
    ///
    /// # Errors
    /// When it is refused or cannot be made.
    pub fn checkpoint(&self, checkpoint: &str) -> Result<()> {
        let path = format!("/v1/disks/{}/checkpoints", name(0));
        self.call("POST", &path, Some(&json!({ "name": checkpoint }))).map(|_: Value| ())
    }

    /// Bytes in the blocks of the disk 0 that have changed since the checkpoint of that name.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub fn changed_bytes(&self, checkpoint: &str) -> Result<u64> {
        let told: CheckpointList = self.call("GET", &format!("/v1/disks/{}/checkpoints", name(0)), None)?;
        let found = told.checkpoints.into_iter().find(|told| told.name == checkpoint);
        let found = found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("no checkpoint {checkpoint}")))?;
        Ok(found.changed_bytes)
    }

    /// The disk 0 loses the checkpoint of that name.
    ///
    /// # Errors
    /// When there is none, or its file cannot be written.
    pub fn remove_checkpoint(&self, checkpoint: &str) -> Result<()> {
        let path = format!("/v1/disks/{}/checkpoints/{checkpoint}", name(0));
        self.call("DELETE", &path, None).map(|_: Value| ())
    }

    /// The server's process.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Its control socket. Commands that [`run_to_end`] runs find the server by it.
    pub fn control(&self) -> PathBuf {
        control(&self.folder)
    }

    /// The address of an NBD export of this server.
    pub fn nbd(&self, export: &str) -> NbdUri {
        NbdUri::new(Address::Unix(nbd_socket(&self.folder)), export.to_owned())
    }

    /// Begins a job.
    ///
    /// # Errors
    /// When it is refused.
    pub fn begin(&self, order: &NewJob) -> Result<Job> {
        self.call("POST", "/v1/jobs", Some(&json!(order)))
    }

    /// How far a job is.
    ///
    /// # Errors
    /// When there is no such job.
    pub fn job(&self, id: &str) -> Result<Job> {
        ask(&self.control(), "GET", &job_path(id), LOOK_PATIENCE)
    }

    /// The job that the disk 0 has, or had last.
    ///
    /// # Errors
    /// `NotFound` when it has none.
    pub fn last_job(&self) -> Result<Job> {
        let told: JobList = self.call("GET", "/v1/jobs", None)?;
        let found = told.jobs.into_iter().rfind(|job| job.disk == name(0));
        found.ok_or_else(|| Error::new(ErrorKind::NotFound, "the disk has no job"))
    }

    /// Has a job do something else from now on.
    ///
    /// # Errors
    /// When it is refused.
    pub fn change_job(&self, id: &str, change: &Value) -> Result<()> {
        self.call("PATCH", &job_path(id), Some(change)).map(|_: Value| ())
    }

    /// Waits until a job is so, for `patience` at most; it is looked at every few milliseconds. `None` when it was not so by then.
    ///
    /// # Errors
    /// When it fails or is cancelled before, or the server has ended.
    pub fn wait_for(
        &mut self,
        id: &str,
        patience: Duration,
        mut is_so: impl FnMut(&Job) -> bool,
    ) -> Result<Option<Job>> {
        let end = Instant::now() + patience;
        loop {
            let job = self.job(id)?;
            match job.state.as_str() {
                _ if is_so(&job) => return Ok(Some(job)),
                "running" if Instant::now() > end => return Ok(None),
                "running" => std::thread::sleep(LOOK_EVERY),
                other => {
                    self.process.check()?;
                    let why = job.error.map(|error| format!(": {}", error.message)).unwrap_or_default();
                    return Err(Error::new(ErrorKind::Io, format!("the {} has {other}{why}", job.kind)));
                }
            }
        }
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
        let layer = layer.map(str::to_owned);
        let job = self.begin(&NewJob { disk: name(0), kind: kind.to_owned(), layer, ..NewJob::default() })?;
        let ended = self.wait_for(&job.id, patience, |job| {
            each();
            job.state == "done"
        })?;
        if ended.is_none() {
            self.change_job(&job.id, &json!({ "state": "cancelled" }))?;
        }
        Ok(ended)
    }
}

fn job_path(id: &str) -> String {
    format!("/v1/jobs/{}", escape(id))
}

fn guest_socket(folder: &Path, disk: usize) -> PathBuf {
    folder.join(format!("{}.vhost", name(disk)))
}

fn nbd_socket(folder: &Path) -> PathBuf {
    folder.join("nbd")
}

fn control(folder: &Path) -> PathBuf {
    folder.join(format!("live.{EXTENSION}"))
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
pub fn allow_parents(image: &Path) -> [OsString; 2] {
    ["--allow-parents".into(), image.parent().unwrap_or(image).into()]
}

/// Runs a command of this program, and waits until it has succeeded. What it says is dropped.
///
/// # Errors
/// When it fails; it has said why on stderr.
pub fn run_to_end(args: Vec<OsString>) -> Result<()> {
    let name = format!("spile {}", args[0].display());
    Tied::start(name, args)?.wait_for_success()
}

/// Bytes of the writes that the upper images of [`chains`] have got.
const CHAIN_WRITE_BYTES: u32 = 64 << 10;

/// A server of disks `disk0.vhd`, `disk1.vhd` and so on in `images`, each with a chain of three: a full image, `base`; one with a fourth of the
/// disk, `middle`; and the leaf with an eighth, written here and there. The names of the images begin with the disk's.
///
/// # Errors
/// When an image cannot be made, or the server does not start.
pub fn chains(sockets: &Path, images: &Path, disks: usize, size_bytes: u64) -> Result<Live> {
    let paths: Vec<PathBuf> = (0..disks).map(|disk| images.join(format!("disk{disk}.vhd"))).collect();
    paths.iter().try_for_each(|path| create(path, size_bytes))?;
    let live = Live::start(sockets, &paths, None)?;
    let writes = size_bytes / u64::from(CHAIN_WRITE_BYTES);
    (0..disks).try_for_each(|disk| live.fill(disk, size_bytes))?;
    for (snapshot, share, seed) in [("base", 4, 1), ("middle", 8, 2)] {
        live.snapshot(snapshot)?;
        (0..disks).try_for_each(|disk| live.scatter(disk, CHAIN_WRITE_BYTES, writes / share, seed))?;
    }
    Ok(live)
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
