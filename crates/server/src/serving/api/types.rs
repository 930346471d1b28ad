//! The JSON bodies of the control API's requests and answers. The names of the types are those in the OpenAPI document.

use serde::{Deserialize, Serialize};
use spile_core::metrics::{Op, OpReading};
use spile_front::FrontReading;
use utoipa::ToSchema;

pub use super::failure::{Failure, FailureDetail};
use super::limits::{ChangeLimits, DiskLimits};
use crate::serving::failed_syncs;

/// The disks of a server.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct DiskList {
    /// The disks, in the order in which the server was given them.
    pub disks: Vec<Disk>,
}

/// What is left when a disk has been detached.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Detached {
    /// The disks that the server still has.
    pub disks: Vec<Disk>,
    /// The jobs of the disk that were under way, and were ended.
    #[serde(default)]
    pub ended_jobs: Vec<Job>,
}

/// A disk that is served.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Disk {
    /// Its name on this server.
    pub name: String,
    /// Where its bytes are: the path of the leaf, or the URI of an export.
    pub path: String,
    /// The leaf's format.
    pub format: String,
    /// The size that guests see, in bytes.
    pub virtual_size_bytes: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// `running`; `paused` while all requests wait, because of `spile pause`; `reverting` while they wait for those in flight to end, because
    /// of `spile revert`; `waiting` while requests wait for trouble below the disk to pass; `sync_failed` when a sync has failed, and so every
    /// flush fails; `memory_not_shared` while a guest waits for ever, because its monitor does not share its memory; `incoming` and `handed_over` while guests by vhost-user or blkif wait, because the disk is not yet here, or at another
    /// host.
    #[serde(default)]
    pub state: String,
    /// The pause of the disk, while there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<Paused>,
    /// What the disk waits for, while it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<Waiting>,
    /// Requests that have waited for trouble below the disk to pass since the server began. Those that wait now are not in it.
    #[serde(default)]
    pub waited_requests: u64,
    /// How long these have waited, all together, in seconds.
    #[serde(default)]
    pub waited_s: f64,
    /// The room on the block device below it, if its leaf is a thin image on one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub room: Option<Room>,
    /// The sync that has failed, until its loss is accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_sync: Option<FailedSync>,
    /// What is done with a request that fails because of trouble that may pass: `report` or `pause`.
    #[serde(default)]
    pub on_error: String,
    /// How long a request waits at most, in seconds, before it is reported as failed. Left out when it waits for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_at_most_s: Option<f64>,
    /// What is done with the sizes of its requests: `off`, `split=SIZE`, `merge=SIZE` or `auto`.
    #[serde(default)]
    pub shape: String,
    /// What `auto` has learned of its large requests so far.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shape_learned: Vec<Learned>,
    /// What limits it, and what that has delayed.
    #[serde(default)]
    pub limits: DiskLimits,
    /// The names of its checkpoints, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<String>,
    /// Why it is not noted any more what has changed since its checkpoints, if that is so: everything counts as changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoints_lost: Option<String>,
    /// The server's control socket.
    pub server: String,
    /// The server's process; 0 when it does not say that, as older builds do not.
    #[serde(default)]
    pub pid: u32,
    /// The ways in which guests and clients reach the disk.
    pub exports: Vec<Export>,
}

/// What `auto` has learned of one kind of a disk's requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Learned {
    /// `read` or `write`.
    pub operation: String,
    /// The length of the kind's shortest requests, in bytes; the longest ones are just below twice as long.
    pub from_bytes: u64,
    /// The number of parts that has served the shortest ones best; 1 when they are not split.
    pub parts: u64,
}

impl From<spile_node::Learned> for Learned {
    fn from(learned: spile_node::Learned) -> Self {
        let operation = if learned.writes { Op::Write } else { Op::Read };
        Self { operation: operation.name().to_owned(), from_bytes: learned.from_bytes, parts: learned.parts }
    }
}

/// A sync that has failed: what was written before it may be lost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FailedSync {
    /// The file, device or export that was to be made durable.
    pub path: String,
    /// Why that failed, for people.
    pub message: String,
    /// When, in seconds since 1970-01-01 UTC; 0 when that is not known.
    pub at_unix_s: u64,
}

impl From<&failed_syncs::FailedSync> for FailedSync {
    fn from(failed: &failed_syncs::FailedSync) -> Self {
        Self { path: failed.path.clone(), message: failed.to_string(), at_unix_s: failed.at_unix_s }
    }
}

/// What came of accepting a loss.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Accepted {
    /// The failed sync; `null` when there was none.
    pub failed_sync: Option<FailedSync>,
    /// Failed syncs of the disk's parents, for which its flushes still fail. Each is accepted by its own path.
    #[serde(default)]
    pub remaining: Vec<FailedSync>,
}

/// What a disk waits for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Waiting {
    /// How many requests wait.
    pub requests: u64,
    /// When the first of them began to wait, in seconds since 1970-01-01 UTC.
    pub since_unix_s: u64,
    /// How long ago that is, in seconds.
    pub time_s: f64,
    /// The operation that failed last: `read`, `write`, `flush`, `discard` or `write_zeroes`.
    pub operation: String,
    /// Why it failed.
    pub error: FailureDetail,
}

impl Waiting {
    /// What the node says.
    pub fn new(waiting: &spile_node::Waiting) -> Self {
        Self {
            requests: waiting.requests,
            since_unix_s: waiting.since_unix_s,
            time_s: waiting.time.as_secs_f64(),
            operation: waiting.op.name().to_owned(),
            error: Failure::of(&waiting.error).1.error,
        }
    }
}

/// The room of a thin image on a block device, which does not grow by itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Room {
    /// The device's path.
    pub device: String,
    /// The device's length in bytes, as far as the image uses it. Left out until the image takes some room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_bytes: Option<u64>,
    /// How much of that is free, as far as the image has looked. Left out until the image takes some room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// The length that the device should have; left out while there is enough room. Whoever makes the device longer tells the server: `POST
    /// /v1/disks/{name}/resume`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wants_bytes: Option<u64>,
    /// With less than this free, a longer device is wanted.
    pub ahead_bytes: u64,
    /// The program that the server runs to make the device longer. Left out when it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// The program runs now; requests that find no room wait for it.
    pub is_growing: bool,
    /// How often the program has made the device longer since the server began.
    pub grown_total: u64,
    /// How often that has failed.
    pub failed_total: u64,
    /// The last failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<GrowthFailure>,
}

/// A device was not made longer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GrowthFailure {
    /// Why, for people.
    pub message: String,
    /// When, in seconds since 1970-01-01 UTC.
    pub at_unix_s: u64,
}

/// A way to a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Export {
    /// `nbd`, `vhost-user` or `xen`.
    pub protocol: String,
    /// The socket: `unix:PATH` or `tcp:HOST:PORT`; for Xen the back end's path in xenstore.
    pub address: String,
    /// The name that NBD clients ask for; empty for the default export.
    pub name: String,
    /// Whether NBD clients use TLS: `none`, `offered` or `required`. `none` for the other protocols.
    #[serde(default)]
    pub tls: String,
}

/// A disk with all that is known of it.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct DiskDetail {
    /// What the list of disks says of it.
    #[serde(flatten)]
    pub disk: Disk,
    /// The images that it is made of, the leaf first.
    pub layers: Vec<Layer>,
    /// Connections to it that are open: of guests and of NBD clients.
    pub connections: u64,
    /// The engine that does the server's I/O: `uring`, `aio` or `threads`.
    #[serde(default)]
    pub engine: String,
    /// The engine in words: why it is not a better one, and what would have to be set for that.
    #[serde(default)]
    pub engine_about: String,
    /// What was counted by each layer that a request passes, the guest's side first.
    pub meters: Vec<Meter>,
}

/// One image of a disk.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Layer {
    /// The file.
    pub path: String,
    /// Its format.
    pub format: String,
    /// The size of the disk that it describes.
    pub virtual_size_bytes: u64,
}

/// What one layer has counted since the server began.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Meter {
    /// Which layer: `front nbd ""`, `front vhost-user …`, `front xen`, `disk`, or `image PATH` for each image of the disk, the
    /// leaf first. What an image counts are the disk's operations on its data, not those on its own metadata.
    pub layer: String,
    /// Connections that are open; 0 for a layer that has none.
    pub connections: u64,
    /// What was counted of each kind of request. Kinds that never came are left out.
    pub operations: Vec<Operation>,
}

/// What was counted of one kind of request.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Operation {
    /// `read`, `write`, `flush`, `discard`, `write_zeroes`, `extents` or `other`.
    pub operation: String,
    /// Requests that have ended.
    pub requests: u64,
    /// Of these, how many failed.
    pub errors: u64,
    /// Bytes that were asked for.
    pub bytes: u64,
    /// Requests in flight now.
    pub in_flight: u64,
    /// The average latency in microseconds.
    pub latency_mean_us: f64,
    /// The latency that half of the requests did not exceed, in microseconds.
    pub latency_p50_us: f64,
    /// The latency that 99 of 100 requests did not exceed, in microseconds.
    pub latency_p99_us: f64,
    /// The latency that 999 of 1000 requests did not exceed, in microseconds.
    pub latency_p999_us: f64,
    /// The longest latency in microseconds.
    pub latency_max_us: f64,
}

impl Operation {
    fn new(op: Op, reading: &OpReading) -> Self {
        let us = |ns: u64| ns as f64 / 1e3;
        let latency = &reading.latency;
        Self {
            operation: op.name().to_owned(),
            requests: reading.ended,
            errors: reading.errors,
            bytes: reading.bytes,
            in_flight: reading.in_flight.max(0) as u64,
            latency_mean_us: us(latency.mean_ns()),
            latency_p50_us: us(latency.quantile_ns(0.5)),
            latency_p99_us: us(latency.quantile_ns(0.99)),
            latency_p999_us: us(latency.quantile_ns(0.999)),
            latency_max_us: us(latency.max_ns),
        }
    }
}

impl Meter {
    /// The counters of `reading`, as the layer `layer`.
    pub fn new(layer: String, reading: &FrontReading) -> Self {
        let ops = Op::ALL.into_iter().map(|op| (op, reading.requests.op(op)));
        let operations = ops.filter(|(_, reading)| reading.begun > 0).map(|(op, reading)| Operation::new(op, reading));
        Self { layer, connections: reading.connections, operations: operations.collect() }
    }
}

/// A disk to be served as well.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    /// The disk, as `spile serve` takes it: `DISK[,name=N][,serial=S][,format=F][,read-only]` and so on. Paths must be absolute.
    pub disk: String,
    /// Unix sockets on which virtual machines reach it.
    #[serde(default)]
    pub vhost_user: Vec<String>,
    /// More sockets for NBD clients of all disks: `unix:PATH` or `tcp:HOST:PORT`.
    #[serde(default)]
    pub nbd: Vec<String>,
}

/// A change of a disk.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// The new size in bytes. A disk can only grow.
    #[serde(default, alias = "size_bytes")]
    pub virtual_size_bytes: Option<u64>,
    /// What is done from now on with a request that fails because of trouble that may pass: `report` or `pause`.
    #[serde(default)]
    pub on_error: Option<String>,
    /// How long a request waits at most from now on, in seconds; 0: for ever.
    #[serde(default)]
    pub pause_at_most_s: Option<f64>,
    /// What is done from now on with the sizes of requests: `off`, `split=SIZE`, `merge=SIZE` or `auto`.
    #[serde(default)]
    pub shape: Option<String>,
    /// How many requests and bytes may pass in a second from now on.
    #[serde(default)]
    pub limits: Option<ChangeLimits>,
}

/// A snapshot that is to be made: of one disk, or of several at one point in time.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSnapshot {
    /// The names of the disks.
    pub disks: Vec<String>,
    /// The snapshot's name: a file beside the disk with the disk's extension. Of several disks each has its own name in it, too:
    /// `DISK-NAME`.
    pub name: String,
}

/// What a disk is to go back to. Either `keep` or `discard` is to be said.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewRevert {
    /// The image that the disk is to hold: a snapshot of it, or any other, by its whole path.
    pub snapshot_path: String,
    /// The name under which what the disk holds now is kept, as a snapshot's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<String>,
    /// What was written to the disk since its last snapshot is lost.
    #[serde(default)]
    pub discard: bool,
    /// Also while guests or clients are connected. They go on with what they have read before.
    #[serde(default)]
    pub in_use: bool,
}

/// A disk that has gone back.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Reverted {
    /// The disk.
    pub path: String,
    /// What it holds now.
    pub snapshot_path: String,
    /// What it held before, if that was kept.
    pub kept_path: Option<String>,
    /// What has failed once the disk had gone back. Left out when all is well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// A snapshot that was made. Each disk goes on as the child of its snapshot.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    /// The first disk's snapshot.
    pub snapshot_path: String,
    /// How long requests of the disks had to wait at most, in microseconds: the time in which their gates were closed. 0 for disks
    /// that nobody serves.
    pub longest_stall_us: f64,
    /// Each disk with its snapshot.
    pub disks: Vec<DiskSnapshot>,
    /// Why the snapshot stays locked, so that it cannot be cloned: it could not be made durable, or requests that began before it
    /// have not ended. Left out when all is well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// A disk's snapshot.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct DiskSnapshot {
    /// The disk: its name on its server, or its path.
    pub disk: String,
    /// The disk's path, which names its new leaf now.
    pub path: String,
    /// The path of the snapshot.
    pub snapshot_path: String,
}

/// What is to go on.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Resume {
    /// The `id` of the pause that is to end; when left out, only requests that wait for trouble to pass are tried again.
    #[serde(default)]
    pub pause: Option<String>,
    /// Guests use a disk that has come from another host although nobody has said here that its copy is whole.
    #[serde(default)]
    pub as_it_is: bool,
}

/// What came of an order to try again.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Resumed {
    /// How many requests are tried again now.
    pub requests: u64,
    /// How long the pause that was to end has lasted, in seconds. While it lasted the disk's files have not changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused_s: Option<f64>,
}

/// A pause that is to begin.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct NewPause {
    /// After this time in seconds the pause ends by itself; 60 when left out, 3600 at most.
    #[serde(default)]
    pub at_most_s: Option<f64>,
}

/// A pause: no request of a guest is in flight below the disk, and none goes on. Its files do not change.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Paused {
    /// What tells it from every other pause, of this server and of others. It is ended by it.
    pub id: String,
    /// When it began, in seconds since 1970.
    pub since_unix_s: u64,
    /// How long it lasts now, in seconds.
    pub time_s: f64,
    /// After this time in seconds it ends by itself.
    pub at_most_s: f64,
}

/// A way to a disk that is to be opened.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewExport {
    /// `nbd` (for all disks) or `vhost-user` (for `disk`).
    pub protocol: String,
    /// `unix:PATH`, or for NBD `tcp:HOST:PORT`.
    pub address: String,
    /// The disk's name; needed for vhost-user.
    #[serde(default)]
    pub disk: String,
}

/// What the server writes to its log.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LogLevel {
    /// `error`, `warn`, `info`, `debug` or `trace`.
    pub level: String,
}

/// The jobs of a server.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct JobList {
    /// The jobs: of each disk the one that is under way, and the last ones that have ended.
    pub jobs: Vec<Job>,
}

/// Long work on a disk's images.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// Its name, which no other job of this host has.
    pub id: String,
    /// `coalesce`, `flatten`, `move` or `backup`.
    pub kind: String,
    /// The disk's name on its server.
    pub disk: String,
    /// The disk's path.
    pub path: String,
    /// The image that is merged into its parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_path: Option<String>,
    /// `running`, `paused`, `done`, `cancelled`, `failed`, or `stopped` when the next server of the disk goes on with it.
    pub state: String,
    /// Bytes that are moved.
    pub done_bytes: u64,
    /// Bytes to be moved in all, as far as is known.
    pub total_bytes: u64,
    /// Bytes a second that it has moved on average, pauses left out.
    pub bytes_per_s: u64,
    /// The rate that it must not exceed, in bytes a second. Left out: as fast as guests leave room for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes_per_s: Option<u64>,
    /// How long it will take at this rate, in seconds, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_s: Option<u64>,
    /// Why it has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<FailureDetail>,
    /// Where the disk is moved to, or where its backup goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// The disk stays where it is, and `to` becomes its copy.
    #[serde(default)]
    pub is_copy: bool,
    /// How far a move is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub motion: Option<Motion>,
    /// The control socket of its server, or of the command that does it.
    pub server: String,
    /// The process that does it.
    pub pid: u32,
}

impl Job {
    /// It is not over: it runs, or is paused.
    pub fn is_under_way(&self) -> bool {
        matches!(self.state.as_str(), "running" | "paused")
    }
}

/// How far the move of a disk is.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Motion {
    /// `copying parents` of a disk whose chain is kept, `copying`, `catching up` with what guests have written since, `in step` when next to nothing is missing, `failing` while the new place
    /// fails and is tried again, `naming` when the copy is whole and the other host has not said yet that it has its name, or `done`.
    pub phase: String,
    /// How many of the disk's parents are at the new place. Absent when the chain is not kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parents_done: Option<u64>,
    /// How many parents are to be there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parents_total: Option<u64>,
    /// Bytes in blocks that the copy lacks, or may lack.
    pub lag_bytes: u64,
    /// All that was written up to so many milliseconds ago is in the copy. Absent until all of the disk was copied once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag_ms: Option<u64>,
    /// Guests' writes are held back now, each for a bounded time, because they come faster than they can be copied.
    pub held_back: bool,
    /// How many writes were held back.
    pub held_writes: u64,
    /// The longest time for which requests waited for the hand-over, in microseconds.
    pub longest_stall_us: f64,
    /// For how many seconds the new place has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing_for_s: Option<u64>,
    /// What has failed and is not the end of the move.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// Where the old image is, once the disk was handed over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old_image_path: Option<String>,
}

impl From<spile_life::motion::Motion> for Motion {
    fn from(motion: spile_life::motion::Motion) -> Self {
        Self {
            phase: motion.phase.name().to_owned(),
            parents_done: motion.parents.map(|(done, _)| done as u64),
            parents_total: motion.parents.map(|(_, total)| total as u64),
            lag_bytes: motion.lag_bytes,
            lag_ms: motion.lag_ms,
            held_back: motion.is_holding,
            held_writes: motion.held_writes,
            longest_stall_us: motion.longest_stall_us,
            failing_for_s: motion.failing_for_s,
            trouble: motion.trouble,
            old_image_path: motion.old_image.map(|path| path.display().to_string()),
        }
    }
}

/// A job that is to begin.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct NewJob {
    /// The disk's name.
    pub disk: String,
    /// `coalesce`: a layer is merged into its parent and removed. `flatten`: the leaf gets all that it lacks from its parents. `move`: the disk
    /// goes to another place.
    pub kind: String,
    /// Which layer is merged: its path, its file name, or that without the extension. Left out: the leaf.
    #[serde(default)]
    pub layer: Option<String>,
    /// The path of the parent that the layer must be merged into. With another one by now, the job is refused.
    #[serde(default)]
    pub into: Option<String>,
    /// The layer is a snapshot that is kept, and its parent was deleted: in the end the parent takes the layer's name, as that of the leaf does.
    #[serde(default)]
    pub keep_name: bool,
    /// The rate that it must not exceed, in bytes a second. Left out: as fast as guests leave room for.
    #[serde(default)]
    pub limit_bytes_per_s: Option<u64>,
    /// Where a disk is moved to: the absolute path of a file that is not there, or of a folder; or the URI of an NBD export.
    #[serde(default)]
    pub to: Option<String>,
    /// The format of a moved disk. Left out: what the extension says.
    #[serde(default)]
    pub to_format: Option<String>,
    /// `flatten`: the new image of a moved disk holds all that its parents show. `keep`: the parents are copied as files of their own. Left out: `flatten`.
    #[serde(default)]
    pub chain: Option<String>,
    /// The old image of a moved disk is removed.
    #[serde(default)]
    pub delete_source: bool,
    /// The disk is not handed over: its copy stays in step until the job is `finished`.
    #[serde(default)]
    pub mirror_only: bool,
    /// A disk on a device or an export is moved although nothing tells there that it is elsewhere.
    #[serde(default)]
    pub leave_unmarked: bool,
}

/// What a job is to do from now on.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct JobChange {
    /// `paused`, `running`, `cancelled`; or `finished`, which has a copy that stays in step come to its end;
    /// or `handed_over`, which does that while no guest uses the disk, and lets none use it here after that.
    #[serde(default)]
    pub state: Option<String>,
    /// The rate that it must not exceed, in bytes a second; 0: as fast as guests leave room for.
    #[serde(default)]
    pub limit_bytes_per_s: Option<u64>,
}

/// Backups that are to begin, at one point in time.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct NewBackup {
    /// The disks.
    pub disks: Vec<DiskBackup>,
    /// A checkpoint that the disks get in the moment of the backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// Only what has changed since this checkpoint is copied: to a child of an older backup (`parent`), or onto the older one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// The folder that keeps what guests change meanwhile. Left out: that of each disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleece_dir: Option<String>,
    /// The most that is kept of a disk, in bytes. Left out: a tenth of it, and 64 MiB at least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleece_limit_bytes: Option<u64>,
    /// The rate that each copy must not exceed, in bytes a second. Left out: as fast as guests leave room for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes_per_s: Option<u64>,
}

/// One disk of which a backup is to be made.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct DiskBackup {
    /// The disk's name.
    pub disk: String,
    /// The file to make, with its whole path, or the URI of an NBD export to overwrite; or a block device (see `overwrite`).
    pub target: String,
    /// The file's format. Left out: what its name says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// The older backup of which this one is to be a child, with its whole path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Where the manifest is to be. Left out: beside a file; an export or a block device has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
    /// A file or block device that is there is overwritten by a full backup. A file stays as it is until the backup is whole.
    #[serde(default)]
    pub overwrite: bool,
}
