//! The paths of the control API.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, patch, post, put};
use serde::Serialize;
use serde::de::DeserializeOwned;
use spile_core::{Error, ErrorKind, Result};
use utoipa::OpenApi;

use super::checkpoints::{ChangedBlocks, CheckpointList, NewCheckpoint};
use super::images::{Info, MapPart};
use super::jobs;
use super::limits::{ChangeLimits, GroupList};
use super::slow::SlowRequests;
use super::stats::{AllStats, DiskStats};
use super::trace::{Running, TraceLine};
use super::types::{
    Accepted, Attach, Change, Detached, DiskDetail, DiskList, Failure, Job, JobList, LogLevel, NewBackup, NewExport,
    NewJob, NewPause, NewRevert, NewSnapshot, Paused, Resume, Resumed, Reverted, Snapshot,
};
use super::view::View;
use super::workers::Workers;
use super::{Call, Order};
use crate::log;
use crate::serving::control::Event;
use crate::serving::events::{self, EventList};
use crate::serving::life::SnapshotCall;
use crate::serving::metrics::Exporter;
use crate::serving::metrics::listen::respond;
use crate::serving::metrics::off_the_thread;
use crate::serving::pausing::PauseCall;
use crate::serving::reverting::RevertCall;

/// The longest body in bytes.
const MAX_BODY_BYTES: usize = 64 << 10;
/// How long a body may take to come.
const BODY_PATIENCE: Duration = Duration::from_secs(5);

/// The longest wait for an event, in milliseconds: a call is answered before its caller is hung up on.
pub const LONGEST_WAIT_MS: u64 = 120_000;

/// The most runs in an answer about a map.
const MAX_RUNS: u64 = 4096;

/// What the handlers need.
#[derive(Clone)]
pub struct Context {
    /// What is served.
    pub view: Arc<View>,
    /// Answers scrapes.
    pub exporter: Exporter,
    /// The server's main thread.
    pub events: mpsc::Sender<Event>,
    /// The control socket's path.
    pub server: Arc<str>,
}

/// All paths.
pub fn router(context: Context) -> Router {
    Router::new()
        .route("/v1/openapi.json", get(openapi))
        .route("/v1/disks", get(list).post(attach))
        .route("/v1/disks/{name}", get(show).delete(detach).patch(change))
        .route("/v1/disks/{name}/info", get(info))
        .route("/v1/disks/{name}/map", get(map))
        .route("/v1/disks/{name}/checkpoints", get(checkpoints).post(make_checkpoint))
        .route("/v1/disks/{name}/checkpoints/{checkpoint}", delete(remove_checkpoint))
        .route("/v1/disks/{name}/checkpoints/{checkpoint}/changed", get(changed))
        .route("/v1/disks/{name}/stats", get(stats))
        .route("/v1/stats", get(all_stats))
        .route("/v1/disks/{name}/slow", get(slow))
        .route("/v1/disks/{name}/trace", post(trace))
        .route("/v1/disks/{name}/pause", post(pause))
        .route("/v1/disks/{name}/resume", post(resume))
        .route("/v1/disks/{name}/revert", post(revert))
        .route("/v1/disks/{name}/accept-loss", post(accept_loss))
        .route("/v1/events", get(events))
        .route("/v1/jobs", get(jobs::list).post(begin_job))
        .route("/v1/jobs/{id}", get(jobs::show).patch(jobs::change))
        .route("/v1/backups", post(begin_backup))
        .route("/v1/workers", get(workers))
        .route("/v1/groups", get(groups))
        .route("/v1/groups/{name}", patch(change_group))
        .route("/v1/snapshots", post(snapshot))
        .route("/v1/exports", post(add_export))
        .route("/v1/exports/{address}", delete(remove_export))
        .route("/v1/log-level", put(set_log_level))
        .route("/v1/shutdown", post(shutdown))
        .route("/metrics", get(metrics))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .with_state(context)
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Spile's control API",
        description = "What a server of disks can be asked and told.",
        license(name = "MIT OR Apache-2.0")
    ),
    paths(
        openapi,
        list,
        show,
        attach,
        detach,
        change,
        info,
        map,
        checkpoints,
        make_checkpoint,
        remove_checkpoint,
        changed,
        stats,
        slow,
        trace,
        events,
        workers,
        groups,
        change_group,
        all_stats,
        jobs::list,
        begin_job,
        jobs::show,
        jobs::change,
        begin_backup,
        pause,
        resume,
        accept_loss,
        revert,
        snapshot,
        add_export,
        remove_export,
        set_log_level,
        shutdown,
        metrics
    )
)]
struct Document;

/// The OpenAPI document of this build.
pub fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}

/// An error as an answer.
pub(super) struct Refusal(Error);

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let (status, failure) = Failure::of(&self.0);
        json(StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), &failure)
    }
}

/// An error as an answer, for connections that no path is asked on.
pub fn refusal(error: Error) -> Response {
    Refusal(error).into_response()
}

pub(super) type Answer = std::result::Result<Response, Refusal>;

pub(super) fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(text) => (status, [(header::CONTENT_TYPE, "application/json")], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Reads a JSON body within its bounds.
pub(super) async fn read<T: DeserializeOwned>(body: Body) -> Result<T> {
    parse(&bytes_of(body).await?)
}

async fn bytes_of(body: Body) -> Result<Bytes> {
    let late = |_| Error::new(ErrorKind::TimedOut, "the body of the request does not come");
    let bytes = tokio::time::timeout(BODY_PATIENCE, to_bytes(body, MAX_BODY_BYTES)).await.map_err(late)?;
    bytes.map_err(|e| Error::new(ErrorKind::InvalidInput, "cannot take the body").caused_by(e))
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes)
        .map_err(|e| Error::new(ErrorKind::InvalidInput, "the body is not understood").caused_by(e))
}

impl Context {
    /// Has the main thread carry out `order`, and waits for its answer.
    async fn ask(&self, order: Order) -> Result<()> {
        let (call, answer) = Call::new(order);
        self.events.send(Event::Called(call)).map_err(|_| ends())?;
        answer.await.map_err(|_| ends())?
    }

    fn disk(&self, status: StatusCode, name: &str) -> Answer {
        Ok(json(status, &self.view.find(&self.server, name)?))
    }

    fn disks(&self, status: StatusCode) -> Answer {
        Ok(json(status, &self.view.list(&self.server)?))
    }
}

fn ends() -> Error {
    Error::new(ErrorKind::Shutdown, "the server hands over or ends").hint("ask again")
}

/// This document.
#[utoipa::path(get, path = "/v1/openapi.json", responses((status = 200, description = "the OpenAPI document")))]
async fn openapi() -> Response {
    json(StatusCode::OK, &document())
}

/// The disks that are served.
#[utoipa::path(get, path = "/v1/disks", responses((status = 200, description = "what was asked for", body = DiskList), (status = "default", description = "why it has failed", body = Failure)))]
async fn list(State(context): State<Context>) -> Answer {
    context.disks(StatusCode::OK)
}

/// A disk with its layers and what was counted of it.
#[utoipa::path(get, path = "/v1/disks/{name}", params(("name" = String, Path, description = "the disk's name")),
    responses((status = 200, description = "what was asked for", body = DiskDetail), (status = "default", description = "why it has failed", body = Failure)))]
async fn show(State(context): State<Context>, Path(name): Path<String>) -> Answer {
    context.disk(StatusCode::OK, &name)
}

/// Serves one more disk. The answer lists all disks.
#[utoipa::path(post, path = "/v1/disks", request_body = Attach,
    responses((status = 201, description = "what there is now", body = DiskList), (status = "default", description = "why it has failed", body = Failure)))]
async fn attach(State(context): State<Context>, body: Body) -> Answer {
    context.ask(Order::Attach(read(body).await?)).await?;
    context.disks(StatusCode::CREATED)
}

/// Serves a disk no more and closes it. Refused while guests or clients are connected to it or it has a job, unless the query is `force`.
#[utoipa::path(delete, path = "/v1/disks/{name}", params(("name" = String, Path, description = "the disk's name"),
    ("force" = Option<bool>, Query, description = "also when it is in use: its guests and NBD clients are cut off, and its job is ended")),
    responses((status = 200, description = "what was asked for", body = Detached), (status = "default", description = "why it has failed", body = Failure)))]
async fn detach(State(context): State<Context>, Path(name): Path<String>, RawQuery(query): RawQuery) -> Answer {
    let force = query.is_some_and(|query| matches!(query.as_str(), "force" | "force=true"));
    let jobs =
        |view: &View| Ok::<_, Error>(view.jobs(&context.server)?.into_iter().filter(|job| job.disk == name).collect());
    let mut before: Vec<Job> = jobs(&context.view)?;
    before.retain(Job::is_under_way);
    context.ask(Order::Detach { name: name.clone(), force }).await?;
    let mut ended_jobs: Vec<Job> = jobs(&context.view)?;
    ended_jobs.retain(|job| job.state != "done" && before.iter().any(|other| other.id == job.id));
    let DiskList { disks } = context.view.list(&context.server)?;
    Ok(json(StatusCode::OK, &Detached { disks, ended_jobs }))
}

/// Changes a disk: makes it longer, which its guests see at once, or changes what is done about trouble below it
/// or with the sizes of its requests, or what limits it.
#[utoipa::path(patch, path = "/v1/disks/{name}", params(("name" = String, Path, description = "the disk's name")), request_body = Change,
    responses((status = 200, description = "what was asked for", body = DiskDetail), (status = "default", description = "why it has failed", body = Failure)))]
async fn change(State(context): State<Context>, Path(name): Path<String>, body: Body) -> Answer {
    let change: Change = read(body).await?;
    // What is no shape is refused before anything has changed.
    let shape = change.shape.as_ref().map(|shape| shape.parse()).transpose()?;
    context.view.set_policy(&name, &change)?;
    if let Some(shape) = shape {
        context.view.set_shape(&name, shape).await?;
    }
    if let Some(limits) = change.limits {
        context.view.set_limits(&name, limits).await?;
    }
    if let Some(size_bytes) = change.virtual_size_bytes {
        context.ask(Order::Resize { name: name.clone(), size_bytes }).await?;
    }
    context.disk(StatusCode::OK, &name)
}

/// What the disk's images say of themselves. `spile info` prints the same.
#[utoipa::path(get, path = "/v1/disks/{name}/info", params(("name" = String, Path, description = "the disk's name")),
    responses((status = 200, description = "what was asked for", body = Info), (status = "default", description = "why it has failed", body = Failure)))]
async fn info(State(context): State<Context>, Path(name): Path<String>) -> Answer {
    Ok(json(StatusCode::OK, &context.view.info(&context.server, &name)?))
}

/// What was counted of the disk since its server began, in each layer that a request passes: requests, bytes, latencies and queue sizes.
/// Two answers give what happened between them.
#[utoipa::path(get, path = "/v1/disks/{name}/stats", params(("name" = String, Path, description = "the disk's name")),
    responses((status = 200, description = "what was asked for", body = DiskStats), (status = "default", description = "why it has failed", body = Failure)))]
async fn stats(State(context): State<Context>, Path(name): Path<String>) -> Answer {
    Ok(off_the_thread(move || Ok(json(StatusCode::OK, &context.view.stats(&context.server, &name)?))).await?)
}

/// Begins a job on a disk's images. The answer comes once it is known that nothing refuses it.
#[utoipa::path(post, path = "/v1/jobs", request_body = NewJob,
    responses((status = 201, description = "what there is now", body = Job), (status = "default", description = "why it has failed", body = Failure)))]
async fn begin_job(State(context): State<Context>, body: Body) -> Answer {
    let new: NewJob = read(body).await?;
    Ok(json(StatusCode::CREATED, &context.view.begin_job(&context.server, &new).await?))
}

/// Begins backups of one disk, or of several at one point in time: a job for each disk. The answer comes once the point in time has come.
#[utoipa::path(post, path = "/v1/backups", request_body = NewBackup,
    responses((status = 201, description = "what there is now", body = JobList), (status = "default", description = "why it has failed", body = Failure)))]
async fn begin_backup(State(context): State<Context>, body: Body) -> Answer {
    let new: NewBackup = read(body).await?;
    Ok(json(StatusCode::CREATED, &JobList { jobs: context.view.begin_backup(&context.server, &new).await? }))
}

/// What the server's workers have done since it began, and what has woken them up. Two answers give what happened between them.
#[utoipa::path(get, path = "/v1/workers", responses((status = 200, description = "what was asked for", body = Workers), (status = "default", description = "why it has failed", body = Failure)))]
async fn workers(State(context): State<Context>) -> Response {
    json(StatusCode::OK, &context.view.workers(&context.server))
}

/// The groups in which disks of this server share limits.
#[utoipa::path(get, path = "/v1/groups", responses((status = 200, description = "what was asked for", body = GroupList)))]
async fn groups(State(context): State<Context>) -> Response {
    json(StatusCode::OK, &context.view.groups())
}

/// Changes the limits that the disks of a group share. The group is made if there is none of this name.
#[utoipa::path(patch, path = "/v1/groups/{name}", params(("name" = String, Path, description = "the group's name")), request_body = ChangeLimits,
    responses((status = 200, description = "what was asked for", body = GroupList), (status = "default", description = "why it has failed", body = Failure)))]
async fn change_group(State(context): State<Context>, Path(name): Path<String>, body: Body) -> Answer {
    context.view.set_group_limits(&name, &read(body).await?).await?;
    Ok(json(StatusCode::OK, &context.view.groups()))
}

/// What was counted of all disks since the server began, as in `/v1/disks/{name}/stats`.
#[utoipa::path(get, path = "/v1/stats",
    responses((status = 200, description = "what was asked for", body = AllStats), (status = "default", description = "why it has failed", body = Failure)))]
async fn all_stats(State(context): State<Context>) -> Answer {
    Ok(off_the_thread(move || Ok(json(StatusCode::OK, &context.view.all_stats(&context.server)?))).await?)
}

/// Where the disk's bytes lie, part by part: each answer says where the next part begins. Guests may write meanwhile: each part is
/// right for the moment in which it was found.
#[utoipa::path(get, path = "/v1/disks/{name}/map", params(("name" = String, Path, description = "the disk's name"),
    ("offset_bytes" = Option<u64>, Query, description = "where the part begins; 0 when left out"),
    ("max_runs" = Option<u64>, Query, description = "the most runs in the answer, up to 4096, which it is when left out")),
    responses((status = 200, description = "what was asked for", body = MapPart), (status = "default", description = "why it has failed", body = Failure)))]
async fn map(State(context): State<Context>, Path(name): Path<String>, RawQuery(query): RawQuery) -> Answer {
    let (mut offset_bytes, mut max_runs) = (0, MAX_RUNS);
    for (key, value) in numbers(query.as_deref().unwrap_or_default())? {
        match key {
            "offset_bytes" => offset_bytes = value,
            "max_runs" => max_runs = value.clamp(1, MAX_RUNS),
            _ => return Err(unknown_key(key).into()),
        }
    }
    Ok(json(StatusCode::OK, &context.view.map(&context.server, &name, offset_bytes, max_runs as usize).await?))
}

/// The disk's checkpoints.
#[utoipa::path(get, path = "/v1/disks/{name}/checkpoints", params(("name" = String, Path, description = "the disk's name")),
    responses((status = 200, description = "what was asked for", body = CheckpointList), (status = "default", description = "why it has failed", body = Failure)))]
async fn checkpoints(State(context): State<Context>, Path(name): Path<String>) -> Answer {
    Ok(json(StatusCode::OK, &context.view.checkpoints(&name).await?))
}

/// Makes a checkpoint of the disk. From now on it is known which blocks have changed since. Guests go on meanwhile.
#[utoipa::path(post, path = "/v1/disks/{name}/checkpoints", params(("name" = String, Path, description = "the disk's name")),
    request_body = NewCheckpoint,
    responses((status = 201, description = "what there is now", body = CheckpointList), (status = "default", description = "why it has failed", body = Failure)))]
async fn make_checkpoint(State(context): State<Context>, Path(name): Path<String>, body: Body) -> Answer {
    let new: NewCheckpoint = read(body).await?;
    Ok(json(StatusCode::CREATED, &context.view.make_checkpoint(&name, new).await?))
}

/// Removes a checkpoint. What has changed since earlier ones stays known.
#[utoipa::path(delete, path = "/v1/disks/{name}/checkpoints/{checkpoint}", params(("name" = String, Path, description = "the disk's name"),
    ("checkpoint" = String, Path, description = "the checkpoint's name")),
    responses((status = 200, description = "what was asked for", body = CheckpointList), (status = "default", description = "why it has failed", body = Failure)))]
async fn remove_checkpoint(State(context): State<Context>, Path((name, checkpoint)): Path<(String, String)>) -> Answer {
    Ok(json(StatusCode::OK, &context.view.remove_checkpoint(&name, checkpoint).await?))
}

/// The blocks that may have changed since the checkpoint, part by part: each answer says where the next part begins. All blocks
/// that had changed when the first part was asked for are among them.
#[utoipa::path(get, path = "/v1/disks/{name}/checkpoints/{checkpoint}/changed",
    params(("name" = String, Path, description = "the disk's name"), ("checkpoint" = String, Path, description = "the checkpoint's name"),
    ("offset_bytes" = Option<u64>, Query, description = "where the part begins; 0 when left out")),
    responses((status = 200, description = "what was asked for", body = ChangedBlocks), (status = "default", description = "why it has failed", body = Failure)))]
async fn changed(
    State(context): State<Context>,
    Path((name, checkpoint)): Path<(String, String)>,
    RawQuery(query): RawQuery,
) -> Answer {
    let mut offset_bytes = 0;
    for (key, value) in numbers(query.as_deref().unwrap_or_default())? {
        match key {
            "offset_bytes" => offset_bytes = value,
            _ => return Err(unknown_key(key).into()),
        }
    }
    Ok(json(StatusCode::OK, &context.view.changed(&name, checkpoint, offset_bytes).await?))
}

/// The keys and values of a query whose values are all numbers.
fn numbers(query: &str) -> Result<Vec<(&str, u64)>> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let number = pair.split_once('=').and_then(|(key, value)| Some((key, value.parse().ok()?)));
        number.ok_or_else(|| Error::new(ErrorKind::InvalidInput, format!("the query has no number in {pair:?}")))
    });
    pairs.collect()
}

/// The slowest requests of about the last two minutes, and those that are in flight for long, with the phases in which their time
/// went.
#[utoipa::path(get, path = "/v1/disks/{name}/slow", params(("name" = String, Path, description = "the disk's name")),
    responses((status = 200, description = "what was asked for", body = SlowRequests), (status = "default", description = "why it has failed", body = Failure)))]
async fn slow(State(context): State<Context>, Path(name): Path<String>) -> Answer {
    Ok(json(StatusCode::OK, &context.view.slow(&context.server, &name)?))
}

/// Traces the disk's requests for a time: each phase of each request by the processor's time stamp counter. The answer comes line
/// by line while the trace runs, each line a JSON object. The trace ends earlier when the caller hangs up.
#[utoipa::path(post, path = "/v1/disks/{name}/trace", params(("name" = String, Path, description = "the disk's name"),
    ("for_ms" = Option<u64>, Query, description = "how long, in milliseconds, up to 120000; 5000 when left out"),
    ("max_requests" = Option<u64>, Query,
     description = "the most requests in the answer, up to 1000000; 100000 when left out. Further ones are counted as dropped")),
    responses((status = 200, description = "what was asked for", body = TraceLine, content_type = "application/x-ndjson"),
        (status = "default", description = "why it has failed", body = Failure)))]
async fn trace(State(context): State<Context>, Path(name): Path<String>, RawQuery(query): RawQuery) -> Answer {
    let (mut for_ms, mut max_requests) = (5000, 100_000);
    for (key, value) in numbers(query.as_deref().unwrap_or_default())? {
        match key {
            "for_ms" => for_ms = value,
            "max_requests" => max_requests = value,
            _ => return Err(unknown_key(key).into()),
        }
    }
    let time = Duration::from_millis(for_ms);
    let running = Running::begin(context.view.clone(), name, time, max_requests).await?;
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], running.body()).into_response())
}

/// What has happened to the disks: the events behind the number `after`, as soon as there is one. A caller asks again with `last`, and misses none
/// meanwhile.
#[utoipa::path(get, path = "/v1/events", params(
    ("after" = Option<u64>, Query, description = "the `last` of the answer before; all events that are kept when left out"),
    ("wait_ms" = Option<u64>, Query, description = "how long to wait for the first event, in milliseconds, up to 120000; 0 when left out")),
    responses((status = 200, description = "what was asked for", body = EventList), (status = "default", description = "why it has failed", body = Failure)))]
async fn events(RawQuery(query): RawQuery) -> Answer {
    let (mut after, mut wait_ms) = (None, 0);
    for (key, value) in numbers(query.as_deref().unwrap_or_default())? {
        match key {
            "after" => after = Some(value),
            "wait_ms" if value <= LONGEST_WAIT_MS => wait_ms = value,
            "wait_ms" => {
                let what = format!("a wait of {value} ms is too long");
                let error = Error::new(ErrorKind::InvalidInput, what);
                return Err(error.hint(format!("it takes {LONGEST_WAIT_MS} ms at the most: ask again")).into());
            }
            _ => return Err(unknown_key(key).into()),
        }
    }
    Ok(json(StatusCode::OK, &events::after(after, Duration::from_millis(wait_ms)).await?))
}

fn unknown_key(key: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("the query has an unknown key {key:?}"))
}

/// Holds all requests of the disk's guests back: when the answer comes, none is in flight, all is flushed, and the disk's files do not
/// change any more. A caller that hangs up before gets no pause.
#[utoipa::path(post, path = "/v1/disks/{name}/pause", params(("name" = String, Path, description = "the disk's name")), request_body = NewPause,
    responses((status = 200, description = "what was asked for", body = Paused), (status = "default", description = "why it has failed", body = Failure)))]
async fn pause(State(context): State<Context>, Path(name): Path<String>, body: Body) -> Answer {
    let (call, answer) = PauseCall::new(name, &read(body).await?)?;
    context.events.send(Event::Pause(call)).map_err(|_| ends())?;
    Ok(json(StatusCode::OK, &answer.await.map_err(|_| ends())??))
}

/// Tries all requests again that wait for trouble below the disk to pass, and lets its guests in that wait because it moves between hosts. Or, when
/// the body names a pause, ends that pause, and fails when this very pause is over: what was copied since it began may be of different moments.
/// Without a body it fails while the disk is paused.
#[utoipa::path(post, path = "/v1/disks/{name}/resume", params(("name" = String, Path, description = "the disk's name")),
    request_body = Option<Resume>, responses((status = 200, description = "what was asked for", body = Resumed), (status = "default", description = "why it has failed", body = Failure)))]
async fn resume(State(context): State<Context>, Path(name): Path<String>, body: Body) -> Answer {
    let bytes = bytes_of(body).await?;
    let Resume { pause, as_it_is } = if bytes.is_empty() { Resume::default() } else { parse(&bytes)? };
    Ok(json(StatusCode::OK, &context.view.resume(&name, pause.as_deref(), as_it_is).await?))
}

/// Accepts what a failed sync of the disk may have lost: its flushes succeed again.
#[utoipa::path(post, path = "/v1/disks/{name}/accept-loss", params(("name" = String, Path, description = "the disk's name")),
    responses((status = 200, description = "what was asked for", body = Accepted), (status = "default", description = "why it has failed", body = Failure)))]
async fn accept_loss(State(context): State<Context>, Path(name): Path<String>) -> Answer {
    Ok(json(StatusCode::OK, &context.view.accept_loss(&name)?))
}

/// Has the disk go back to what a snapshot holds. Requests that come meanwhile wait. Refused while guests or clients are connected, unless the
/// order says `in_use`.
#[utoipa::path(post, path = "/v1/disks/{name}/revert", params(("name" = String, Path, description = "the disk's name")),
    request_body = NewRevert, responses((status = 200, description = "what was asked for", body = Reverted), (status = "default", description = "why it has failed", body = Failure)))]
async fn revert(State(context): State<Context>, Path(name): Path<String>, body: Body) -> Answer {
    let (call, answer) = RevertCall::new(name, read(body).await?);
    context.events.send(Event::Revert(call)).map_err(|_| ends())?;
    Ok(json(StatusCode::OK, &answer.await.map_err(|_| ends())??))
}

/// Makes a snapshot of one disk, or of several at one point in time. Guests go on meanwhile.
#[utoipa::path(post, path = "/v1/snapshots", request_body = NewSnapshot,
    responses((status = 201, description = "what there is now", body = Snapshot), (status = "default", description = "why it has failed", body = Failure)))]
async fn snapshot(State(context): State<Context>, body: Body) -> Answer {
    let (call, answer) = SnapshotCall::new(read(body).await?);
    context.events.send(Event::Snapshot(call)).map_err(|_| ends())?;
    Ok(json(StatusCode::CREATED, &answer.await.map_err(|_| ends())??))
}

/// Listens on one more socket.
#[utoipa::path(post, path = "/v1/exports", request_body = NewExport,
    responses((status = 201, description = "what there is now", body = DiskList), (status = "default", description = "why it has failed", body = Failure)))]
async fn add_export(State(context): State<Context>, body: Body) -> Answer {
    context.ask(Order::AddExport(read(body).await?)).await?;
    context.disks(StatusCode::CREATED)
}

/// Listens on a socket no more. Connections that are open go on.
#[utoipa::path(delete, path = "/v1/exports/{address}", params(("address" = String, Path, description = "such as unix:%2Frun%2Fa.sock")),
    responses((status = 200, description = "what was asked for", body = DiskList), (status = "default", description = "why it has failed", body = Failure)))]
async fn remove_export(State(context): State<Context>, Path(address): Path<String>) -> Answer {
    context.ask(Order::RemoveExport { address }).await?;
    context.disks(StatusCode::OK)
}

/// Sets what is written to the log from now on.
#[utoipa::path(put, path = "/v1/log-level", request_body = LogLevel,
    responses((status = 200, description = "what was asked for", body = LogLevel), (status = "default", description = "why it has failed", body = Failure)))]
async fn set_log_level(body: Body) -> Answer {
    let level: LogLevel = read(body).await?;
    let parsed = level.level.parse().map_err(|_| {
        Error::new(ErrorKind::InvalidInput, format!("there is no log level {:?}", level.level))
            .hint("use error, warn, info, debug or trace")
    })?;
    log::set_level(parsed);
    Ok(json(StatusCode::OK, &level))
}

/// Ends the server in order, as SIGTERM does. The answer comes before it has ended.
#[utoipa::path(post, path = "/v1/shutdown", responses((status = 202, description = "it ends"),
    (status = "default", description = "why it has failed", body = Failure)))]
async fn shutdown(State(context): State<Context>) -> Answer {
    context.ask(Order::Shutdown).await?;
    Ok(StatusCode::ACCEPTED.into_response())
}

/// What was counted, for Prometheus: in OpenMetrics text, in Prometheus's text, or as protobuf with native histograms, as the header
/// `accept` says.
#[utoipa::path(get, path = "/metrics",
    params(("detail" = Option<String>, Query, description = "`disk`, `layer` or `queue`; as the server was started when left out")),
    responses((status = 200, description = "all series", content_type = "text/plain; version=0.0.4", body = String),
        (status = "default", description = "why it has failed", body = Failure)))]
async fn metrics(State(context): State<Context>, headers: HeaderMap, RawQuery(query): RawQuery) -> Answer {
    Ok(respond(&context.exporter, &headers, query.as_deref()).await?)
}

pub(super) async fn unknown() -> Refusal {
    Refusal(Error::new(ErrorKind::NotFound, "there is no such path").hint("GET /v1/openapi.json lists them"))
}

pub(super) async fn wrong_method() -> Response {
    let what = Error::new(ErrorKind::InvalidInput, "this path does not know that method");
    let (_, failure) = Failure::of(&what.hint("GET /v1/openapi.json lists them"));
    json(StatusCode::METHOD_NOT_ALLOWED, &failure)
}
