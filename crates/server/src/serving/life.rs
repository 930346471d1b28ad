//! Snapshots of disks while they are served.
//!
//! The main loop checks an order and claims its disks; a task on a worker does the rest, and waits for the storage where need be. So a
//! server whose storage is slow still answers its callers. What has changed of a disk comes back to the main loop as an event.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::{Either, join_all, select};
use spile_core::{Error, ErrorKind, Locator, Result, ResultExt as _};
use spile_engine::{Engine, OsEnv, sleep, spawn};
use spile_image::Graph;
use spile_life::set::Set;
use spile_life::snapshot::{self, Made, Plan, Prepared};
use spile_node::{OldEpoch, close_gates};
use spile_store::{HostFiles, HostStore, OsFiles};
use tokio::sync::oneshot;

use super::api::types::{DiskSnapshot, NewSnapshot, Snapshot};
use super::claims::Claim;
use super::control::Event;
use super::disks::{Open, ServedDisk};
use super::fronts::{Role, key};
use super::jobs::Held;
use super::server::Server;
use crate::checkpoints::Checkpoints;
use crate::far_children::HostNotes;

/// How long an answer waits for the requests that began before the snapshot, and for its sealing.
const SETTLE_PATIENCE: Duration = Duration::from_secs(10);

/// A disk whose snapshot is to be made.
struct Subject {
    name: String,
    disk: Arc<ServedDisk>,
    checkpoints: Arc<Checkpoints>,
    plan: Plan,
}

/// A disk whose files are in place, and the graph that it is to have.
type Ready = (Subject, Made<HostStore>, Arc<Graph<HostStore>>);

/// A snapshot that has been made: the disk goes on with its new graph.
struct Taken {
    subject: Subject,
    made: Made<HostStore>,
    graph: Arc<Graph<HostStore>>,
    old: OldEpoch<Graph<HostStore>>,
}

/// A call for a snapshot, and where its answer goes.
pub struct SnapshotCall {
    /// What is to be done.
    pub order: NewSnapshot,
    reply: oneshot::Sender<Result<Snapshot>>,
}

impl SnapshotCall {
    /// A call, and where its answer will come.
    pub fn new(order: NewSnapshot) -> (Self, oneshot::Receiver<Result<Snapshot>>) {
        let (reply, answer) = oneshot::channel();
        (Self { order, reply }, answer)
    }
}

impl Server {
    /// Begins a snapshot. The call is answered by the task that makes it.
    pub(super) fn begin_snapshot(&self, call: SnapshotCall) {
        let SnapshotCall { order, reply } = call;
        let begun = self.subjects(&order).and_then(|subjects| {
            let names: Vec<_> = subjects.iter().map(|subject| subject.name.clone()).collect();
            let claims = self.claims.take(&names, "a snapshot")?.split();
            let held: Vec<Held> =
                names.iter().map(|name| self.named(name)?.jobs.hold_for_snapshot()).collect::<Result<_>>()?;
            Ok((subjects, claims.into_iter().zip(held).collect::<Vec<_>>()))
        });
        let (subjects, claims) = match begun {
            Ok(begun) => begun,
            // A caller that has gone does not need the answer.
            Err(error) => return drop(reply.send(Err(error))),
        };
        let files = HostFiles::new(OsFiles::new(self.opening.cache).without_locks(self.opening.no_lock));
        let events = self.sender.clone();
        self.engine.spawn_on(0, move || async move {
            match take(&files, subjects).await {
                Ok((taken, stall, ended)) => {
                    let disks: Vec<_> = taken.iter().map(Taken::tell).collect();
                    for Taken { subject, graph, .. } in &taken {
                        let _ = events.send(Event::Exchanged(subject.name.clone(), Arc::downgrade(graph)));
                    }
                    // From its answer on, a process that is killed costs no checkpoint.
                    join_all(taken.iter().map(|one| one.subject.checkpoints.note_images(&one.graph))).await;
                    let trouble = settle_within(&files, taken.into_iter().zip(claims).collect())
                        .await
                        .and(ended)
                        .err()
                        .map(|error| error.to_string());
                    let snapshot_path = disks[0].snapshot_path.clone();
                    let longest_stall_us = stall.as_nanos() as f64 / 1e3;
                    let _ = reply.send(Ok(Snapshot { snapshot_path, longest_stall_us, disks, trouble }));
                }
                Err(error) => {
                    drop(claims);
                    let _ = reply.send(Err(error));
                }
            }
        });
    }

    /// The disks of an order, each with the plan of its snapshot.
    fn subjects(&self, order: &NewSnapshot) -> Result<Vec<Subject>> {
        if order.disks.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "no disk is named"));
        }
        let mut subjects: Vec<Subject> = Vec::new();
        for name in &order.disks {
            let open = self.named(name)?;
            if subjects.iter().any(|other| other.name == open.name) {
                return Err(Error::new(ErrorKind::InvalidInput, format!("the disk {name:?} is named twice")));
            }
            let stem = crate::disks::stem(&open.source);
            let plan = self.plan(open, &snapshot::name_of_one(&stem, order.disks.len(), &order.name))?;
            let (name, disk, checkpoints) = (open.name.clone(), open.disk.clone(), open.checkpoints.clone());
            subjects.push(Subject { name, disk, checkpoints, plan });
        }
        Ok(subjects)
    }

    /// The plan of the snapshot `name` of a disk.
    pub(super) fn plan(&self, open: &Open, name: &str) -> Result<Plan> {
        if !matches!(open.source, Locator::Path(_)) {
            let what = format!("{} has no folder in which a snapshot could lie", open.label);
            return Err(Error::new(ErrorKind::Unsupported, what).hint("only disks in files have snapshots"));
        }
        if open.read_only {
            let error = Error::new(ErrorKind::ReadOnly, format!("the disk {:?} is served for reading only", open.name));
            return Err(error.hint("what cannot change needs no snapshot: make a child of it by spile clone"));
        }
        let graph =
            open.disk.graph_now().ok_or_else(|| Error::new(ErrorKind::Busy, "the disk's graph is exchanged"))?;
        snapshot::refuse_device(&graph)?;
        let layers = graph.layers();
        if let Some(failed) = super::failed_syncs::find(&graph) {
            let error = Error::new(ErrorKind::Denied, format!("{failed}: a snapshot could hold what was lost"));
            return Err(error.hint(format!("spile accept-loss {}", open.name)));
        }
        let allowed = self.opening.allow_parents.iter().map(|dir| {
            dir.canonicalize().map_err(|e| Error::io("find a folder of parents (--allow-parents)", e)).at_path(dir)
        });
        let allowed = allowed.collect::<Result<Vec<PathBuf>>>()?;
        let leaf = &layers[0];
        let child = snapshot::child_format(leaf.format);
        Plan::new(&layers, open.format, name, &allowed).map_err(|error| {
            let is_movable = error.kind() == ErrorKind::Unsupported && child != leaf.format;
            if !is_movable || !snapshot::fits(child, leaf.virtual_bytes) {
                return error;
            }
            let to = leaf.path.with_extension(child.about().name);
            error.hint(format!(
                "`spile move {} --to {} --wait` makes it a {child} while guests go on: then snapshots and clones work",
                open.name,
                to.display()
            ))
        })
    }

    /// The disk of this name has another graph now: whoever looks, and a successor that asks, learns of it.
    pub(super) fn note_exchange(&mut self, name: &str, graph: &Weak<Graph<HostStore>>) {
        // One that is gone has been followed by another one, or its disk is closed.
        let disk = self.disks.iter_mut().find(|open| open.name == name);
        if let (Some(open), Some(graph)) = (disk, graph.upgrade()) {
            open.look_at(&graph);
            note_images(&self.engine, open);
        }
        self.follow_moves();
        self.show();
    }

    /// Takes note of disks that were moved: a successor that is given their new places goes on with them, and whatever is opened again is
    /// opened there.
    pub(super) fn follow_moves(&mut self) {
        for open in &mut self.disks {
            let Some(moved) = open.jobs.moved().filter(|moved| moved.to != open.source) else { continue };
            self.opening.move_disk(open, &moved);
            for socket in &mut self.listening {
                let Role::Vhost(export) = &socket.role else { continue };
                if open.names.contains(export)
                    && let Ok(disk) = self.opening.identity(export)
                {
                    socket.key = key(&socket.role, Some(&disk), socket.address.as_ref());
                }
            }
        }
    }
}

/// Has the disk's checkpoints know its new leaf.
fn note_images(engine: &Engine, open: &Open) {
    let (checkpoints, disk) = (open.checkpoints.clone(), open.disk.clone());
    engine.spawn_on(0, move || async move {
        let graph = disk.graph().await;
        checkpoints.note_images(&graph).await;
    });
}

impl Taken {
    fn tell(&self) -> DiskSnapshot {
        let Subject { name, plan, .. } = &self.subject;
        let text = |path: &std::path::Path| path.display().to_string();
        DiskSnapshot { disk: name.clone(), path: text(plan.disk()), snapshot_path: text(plan.snapshot()) }
    }
}

/// Makes the snapshots of all disks at one point in time, or none. Returns how long the disks' gates were closed, and whether the notes of the set
/// are gone.
async fn take(files: &HostFiles, subjects: Vec<Subject>) -> Result<(Vec<Taken>, Duration, Result<()>)> {
    let snapshots: Vec<_> = subjects.iter().map(|subject| subject.plan.snapshot().to_owned()).collect();
    let set = Set::begin(files, &snapshots).await?;
    let taken = take_all(files, subjects).await;
    let ended = set.end(files, taken.is_ok()).await;
    if let Err(left) = &ended {
        tracing::error!("a note that a set of snapshots is not whole could not be removed: {left}");
    }
    let ended = ended.map_err(|error| error.hint("the set is whole, and this note says that it is not: remove it"));
    taken.map(|(taken, stall)| (taken, stall, ended))
}

async fn take_all(files: &HostFiles, subjects: Vec<Subject>) -> Result<(Vec<Taken>, Duration)> {
    let checkpoints: Vec<_> = subjects.iter().map(|subject| subject.checkpoints.clone()).collect();
    let _turns = join_all(checkpoints.iter().map(|checkpoints| checkpoints.hold())).await;
    let mut ready = Vec::new();
    for subject in subjects {
        let prepared = prepare(files, &subject).await;
        match prepared {
            Ok(prepared) => {
                let (made, graph) = prepared.into_parts();
                ready.push((subject, made, Arc::new(graph)));
            }
            Err(error) => return Err(take_back(files, ready, error).await),
        }
    }
    match exchange(&ready).await {
        Ok((old, stall)) => {
            let taken = old.into_iter().zip(ready);
            Ok((taken.map(|(old, (subject, made, graph))| Taken { subject, made, graph, old }).collect(), stall))
        }
        Err(error) => Err(take_back(files, ready, error).await),
    }
}

/// Gives all disks their new graphs at one point in time. Returns how long their gates were closed.
async fn exchange(ready: &[Ready]) -> Result<(Vec<OldEpoch<Graph<HostStore>>>, Duration)> {
    let changes = ready.iter().map(|(subject, _, graph)| (&*subject.disk, graph.clone())).collect();
    let gates = close_gates(changes).await?;
    let closed_at = gates.closed_at();
    let old = gates.open();
    Ok((old, closed_at.elapsed()))
}

async fn prepare(files: &HostFiles, subject: &Subject) -> Result<Prepared<HostStore>> {
    let graph = subject.disk.graph().await;
    snapshot::prepare(files, Arc::new(OsEnv), &HostNotes, &graph, &subject.plan).await
}

/// Gives the disks of a snapshot that has failed their paths back. Returns why it has failed.
async fn take_back(files: &HostFiles, ready: Vec<Ready>, error: Error) -> Error {
    for (_, made, _) in ready {
        if let Err(left) = snapshot::take_back(files, &made).await {
            tracing::error!("a snapshot that has failed could not be taken back: {left}");
        }
    }
    error
}

/// Seals the snapshots, each by itself: a disk whose requests hang keeps none of the others claimed. Waits for all of them for some time at most: the
/// sealing goes on without its caller.
async fn settle_within(files: &HostFiles, taken: Vec<(Taken, (Claim, Held))>) -> Result<()> {
    let trouble = Troubles::default();
    let begin = |(taken, claim): (Taken, (Claim, Held))| {
        let (files, trouble, (done, ended)) = (*files, trouble.clone(), oneshot::channel());
        spawn(async move {
            let settled = settle(&files, taken, &trouble).await;
            if let Err(error) = &settled {
                tracing::error!("a snapshot could not be made durable, and stays locked: {error}");
            }
            drop(claim);
            let _ = done.send(settled);
        });
        ended
    };
    let all = join_all(taken.into_iter().map(begin).collect::<Vec<_>>());
    match select(all, pin!(sleep(SETTLE_PATIENCE))).await {
        Either::Left((settled, _)) => settled.into_iter().filter_map(std::result::Result::ok).collect(),
        Either::Right(_) => {
            let trouble = trouble.lock().unwrap_or_else(PoisonError::into_inner);
            let told: Vec<_> = trouble.iter().map(|(name, why)| format!("of {name:?}: {why}")).collect();
            Err(match told.is_empty() {
                false => {
                    let what = "a snapshot is not durable yet, and it is tried again";
                    Error::new(ErrorKind::Io, format!("{what}: {}", told.join("; ")))
                }
                true => {
                    let what = "requests that began before the snapshot have not ended yet: it stays locked until then";
                    Error::new(ErrorKind::TimedOut, what)
                }
            })
        }
    }
}

/// Why the snapshots of disks are not sealed yet, by the disks' names.
type Troubles = Arc<Mutex<BTreeMap<String, String>>>;

/// Seals the old leaf. What fails is tried again, unless a sync has failed: no later one may claim to have made up for it.
async fn settle(files: &HostFiles, taken: Taken, trouble: &Troubles) -> Result<()> {
    let Taken { subject, made, graph, old } = taken;
    old.ended().await;
    let seal = async || snapshot::settle(files, &made, &graph).await;
    let may_pass = || super::failed_syncs::find(&graph).is_none();
    let troubles = || trouble.lock().unwrap_or_else(PoisonError::into_inner);
    let sealed = tried_again(seal, may_pass, |error, pause| {
        tracing::warn!(
            "the snapshot of {:?} is not durable yet ({error}): it is tried again in {pause:?}",
            subject.name
        );
        troubles().insert(subject.name.clone(), error.to_string());
    })
    .await;
    troubles().remove(&subject.name);
    sealed
}

/// How long is waited before each new try of a sealing that has failed.
const PAUSES_S: [u64; 6] = [1, 2, 4, 8, 16, 32];

/// Does `work` until it succeeds, a bounded number of times, with longer and longer pauses. `tell` hears of each failure that is followed by
/// another try; there is none when `may_pass` says no.
async fn tried_again(
    work: impl AsyncFn() -> Result<()>,
    may_pass: impl Fn() -> bool,
    tell: impl Fn(&Error, Duration),
) -> Result<()> {
    for pause in PAUSES_S.map(Duration::from_secs) {
        match work().await {
            Err(error) if may_pass() => tell(&error, pause),
            done => return done,
        }
        sleep(pause).await;
    }
    work().await
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn what_may_pass_is_tried_again_and_a_failed_sync_is_not() {
        let tries = Cell::new(0);
        let failing = async || {
            tries.set(tries.get() + 1);
            Err(Error::new(ErrorKind::Io, "the disk is away"))
        };
        let failed = tried_again(failing, || false, |_, _| panic!("it is not tried again")).now_or_never().unwrap();
        assert_eq!((failed.unwrap_err().kind(), tries.get()), (ErrorKind::Io, 1));
        // The second try is after a pause.
        let engine = Engine::start(spile_engine::Config { workers: 1, ..Default::default() }).unwrap();
        let told = engine.run_on(0, || async {
            let (left, told) = (Cell::new(1), Cell::new(0));
            let full = async || match left.replace(left.get() - 1) {
                1 => Err(Error::new(ErrorKind::NoSpace, "full")),
                _ => Ok(()),
            };
            tried_again(full, || true, |_, _| told.set(told.get() + 1)).await.map(|()| told.get())
        });
        assert_eq!(told.unwrap(), 1);
        engine.shutdown();
    }
}
