//! Disks that go back to a snapshot while they are served.
//!
//! The main loop checks an order and claims its disk; a task on a worker does the rest. It makes all files while requests go on. Then it holds the
//! disk's requests back, and waits for those in flight: whatever was answered before belongs to what the disk held. The new leaf takes the disk's path,
//! and in the same moment the disk gets its graph. Requests that have waited meet what the snapshot holds.
//!
//! While requests are held back, nothing is awaited that a request could hold up: no checkpoint, which waits for a flush. Nobody makes one from before that on
//! ([`Noting`](spile_life::revert::Noting)).
//!
//! A guest keeps in its memory what it has read before, so a disk that a guest or a client is connected to goes back only by an order that says so.

use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use futures_util::future::{Either, select};
use spile_core::{Disk as _, Error, ErrorKind, Locator, Result};
use spile_engine::sleep;
use spile_image::{Format, Graph, OpenOptions};
use spile_life::revert::{Failure, Ready};
use spile_life::snapshot::{self, Plan};
use spile_store::{CacheMode, HostFiles, HostStore, OsFiles};
use tokio::sync::oneshot;

use super::api::types::{NewRevert, Reverted};
use super::claims::Claim;
use super::control::Event;
use super::disks::{Open, ServedDisk};
use super::jobs::Held;
use super::server::Server;
use crate::checkpoints::{Checkpoints, MutexGuardOfTurns};
use crate::revert::Ground;
use crate::units::format_size;

/// How long the requests in flight may take to their end, while others wait.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long the main loop may take to say who uses the disk.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);

type HostGraph = Graph<HostStore>;

/// A call for a way back, and where its answer goes.
pub struct RevertCall {
    name: String,
    order: NewRevert,
    reply: oneshot::Sender<Result<Reverted>>,
}

impl RevertCall {
    /// A call for the disk `name`, and where its answer will come.
    pub fn new(name: String, order: NewRevert) -> (Self, oneshot::Receiver<Result<Reverted>>) {
        let (reply, answer) = oneshot::channel();
        (Self { name, order, reply }, answer)
    }
}

impl Server {
    /// Begins to have a disk go back. The call is answered by the task that does it.
    pub(super) fn begin_revert(&self, call: RevertCall) {
        let RevertCall { name, order, mut reply } = call;
        match self.going_back(&name, order) {
            Ok(going) => self.engine.spawn_on(0, move || async move {
                let (done, claim) = going.run(&mut reply).await;
                drop(claim);
                let _ = reply.send(done);
            }),
            // A caller that has gone does not need the answer.
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    fn going_back(&self, name: &str, order: NewRevert) -> Result<Going> {
        let open = self.named(name)?;
        let snapshot = PathBuf::from(&order.snapshot_path);
        if !snapshot.is_absolute() {
            let what = format!("{} is no whole path", snapshot.display());
            return Err(Error::new(ErrorKind::InvalidInput, what));
        }
        if order.keep.is_some() == order.discard {
            let what = "say what becomes of what the disk holds now: either its name, or that it is lost";
            return Err(Error::new(ErrorKind::InvalidInput, what));
        }
        self.refuse_going_back(open, order.in_use)?;
        let claim = self.claims.take(std::slice::from_ref(&open.name), "a revert")?;
        let held = open.jobs.hold_for_revert()?;
        let plan = order.keep.as_deref().map(|keep| self.plan(open, keep)).transpose()?;
        Ok(Going {
            name: open.name.clone(),
            disk: open.disk.clone(),
            checkpoints: open.checkpoints.clone(),
            given: open.format,
            base: Locator::Path(snapshot),
            options: self.opening.options_of_parents(),
            cache: self.opening.cache,
            is_in_use: order.in_use,
            plan,
            events: self.sender.clone(),
            claim: (held, claim),
        })
    }

    fn refuse_going_back(&self, open: &Open, is_in_use: bool) -> Result<()> {
        let name = &open.name;
        if !matches!(open.source, Locator::Path(_)) {
            let what = format!("{} is no file beside which a new leaf could lie", open.label);
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        if open.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, format!("the disk {name:?} is served for reading only")));
        }
        match self.user_of(open).filter(|_| !is_in_use) {
            Some(user) => Err(in_use(name, &user)),
            None => Ok(()),
        }
    }

    /// Who uses a disk now, if somebody does.
    fn user_of(&self, open: &Open) -> Option<String> {
        match self.fronts.connections(&open.names) {
            _ if self.fronts.serves_xen() => Some("a Xen guest".to_owned()),
            0 => None,
            connections => Some(format!("{connections} connection(s)")),
        }
    }

    /// Tells who uses the disk `name` now.
    pub(super) fn tell_user(&self, name: &str, ask: oneshot::Sender<Option<String>>) {
        // A disk that is gone has no guest.
        let _ = ask.send(self.named(name).ok().and_then(|open| self.user_of(open)));
    }
}

fn in_use(name: &str, user: &str) -> Error {
    let what = format!("the disk {name:?} is in use by {user}, which would go on with what it has read before");
    let hint = "shut the virtual machine down first; or --in-use, if nothing in it has the disk mounted or open";
    Error::new(ErrorKind::Busy, what).hint(hint)
}

/// A disk that is to go back.
struct Going {
    name: String,
    disk: Arc<ServedDisk>,
    checkpoints: Arc<Checkpoints>,
    /// The format in which the disk was opened, if that was said.
    given: Option<Format>,
    base: Locator,
    options: OpenOptions,
    cache: CacheMode,
    is_in_use: bool,
    /// The snapshot of what the disk holds now, if that is kept.
    plan: Option<Plan>,
    events: mpsc::Sender<Event>,
    claim: (Held, Claim),
}

/// What is there before requests are held back.
struct Prepared<'c> {
    ground: Ground,
    /// The disk's graph.
    before: Arc<HostGraph>,
    ready: Ready<HostStore, HostGraph, MutexGuardOfTurns<'c>>,
}

impl Going {
    async fn run(self, reply: &mut oneshot::Sender<Result<Reverted>>) -> (Result<Reverted>, (Held, Claim)) {
        let done = self.go_back(reply).await;
        let name = &*self.name;
        match &done {
            Ok(Reverted { snapshot_path, kept_path, .. }) => {
                let kept = kept_path.as_ref().map(|kept| format!("; what it held is in {kept}")).unwrap_or_default();
                tracing::info!(journal.disk = name, "the disk {name:?} holds what {snapshot_path} holds{kept}");
            }
            Err(error) => tracing::info!(journal.disk = name, "the disk {name:?} has not gone back: {error}"),
        }
        (done, self.claim)
    }

    async fn go_back(&self, reply: &mut oneshot::Sender<Result<Reverted>>) -> Result<Reverted> {
        let files = self.files();
        let prepared = Box::pin(self.prepare(&files)).await?;
        let exchanged = match reply.is_closed() {
            true => Err(Failure::AsItWas(Error::new(ErrorKind::Shutdown, "nobody waits for the answer any more"))),
            false => Box::pin(self.exchange_quiet(&files, &prepared)).await,
        };
        if let Err(failure) = exchanged {
            let Prepared { ground, before, ready } = prepared;
            return Err(ground.back(&files, self.given).take_back(&before, ready, failure).await);
        }
        let Prepared { ground, before, ready } = prepared;
        drop(before);
        let (graph, kept) = ready.into_parts();
        let _ = self.events.send(Event::Exchanged(self.name.clone(), Arc::downgrade(&graph)));
        // From its answer on, a process that is killed costs no checkpoint.
        self.checkpoints.note_images(&graph).await;
        let (mut kept_path, mut trouble) = (None, None);
        if let Some((made, over)) = &kept {
            kept_path = Some(made.plan().snapshot().display().to_string());
            let settled = snapshot::settle(&files, made, over).await;
            trouble = settled.err().map(|error| format!("what the disk held may not be durable: {error}"));
        }
        let text = |graph: &HostGraph| graph.handles()[0].path().display().to_string();
        Ok(Reverted { path: text(&graph), snapshot_path: text(&ground.base), kept_path, trouble })
    }

    /// Makes all files, while requests go on.
    async fn prepare(&self, files: &HostFiles) -> Result<Prepared<'_>> {
        let before = self.disk.graph().await;
        let mut ground = Ground::open(self.cache, before.handles()[0].path(), &self.base, &self.options).await?;
        self.keep_size(&mut ground)?;
        let (back, noting) = (ground.back(files, self.given), &*self.checkpoints);
        let ready = back.make_ready(&before, self.plan.as_ref(), &noting, &self.options, |graph| graph).await?;
        Ok(Prepared { ground, before, ready })
    }

    /// A disk that is served keeps its size. What lies behind the end of a shorter snapshot holds zeroes.
    fn keep_size(&self, ground: &mut Ground) -> Result<()> {
        let (size, base_size) = (self.disk.size_bytes(), ground.base.size_bytes());
        if base_size > size {
            let what = format!("the snapshot has {}, and the disk only {}", format_size(base_size), format_size(size));
            let hint =
                format!("spile resize {} {base_size}; or detach it first: then it gets the snapshot's size", self.name);
            return Err(Error::new(ErrorKind::InvalidInput, what).hint(hint));
        }
        ground.new.size_bytes = size;
        Ok(())
    }

    /// Exchanges the disk's graph while no request is at it.
    async fn exchange_quiet(&self, files: &HostFiles, prepared: &Prepared<'_>) -> Result<(), Failure> {
        let in_flight = self.disk.hold().await.map_err(Failure::AsItWas)?;
        let (late, hurried) = (pin!(sleep(PATIENCE)), pin!(self.disk.hurried()));
        let done = match select(pin!(in_flight.ended()), select(late, hurried)).await {
            Either::Left(_) => self.exchange(files, prepared).await,
            Either::Right((Either::Left(_), _)) => {
                let what = format!("requests in flight have not ended in {} s", PATIENCE.as_secs());
                let error = Error::new(ErrorKind::TimedOut, what).hint("`spile slow` shows them; requests go on");
                Err(Failure::AsItWas(error))
            }
            Either::Right((Either::Right(_), _)) => {
                let what = "a guest's device or the server was stopped, which waits for all requests";
                Err(Failure::AsItWas(Error::new(ErrorKind::Busy, what).hint("try again")))
            }
        };
        self.disk.let_go().await;
        done
    }

    async fn exchange(&self, files: &HostFiles, prepared: &Prepared<'_>) -> Result<(), Failure> {
        // Whoever connects from now on meets what the snapshot holds.
        let (ask, answer) = oneshot::channel();
        let _ = self.events.send(Event::InUse(self.name.clone(), ask));
        // A server that ends may not answer.
        match select(answer, pin!(sleep(ANSWER_PATIENCE))).await {
            Either::Left((Ok(Some(user)), _)) if !self.is_in_use => {
                return Err(Failure::AsItWas(in_use(&self.name, &user)));
            }
            Either::Left((Ok(_), _)) => {}
            _ => return Err(Failure::AsItWas(Error::new(ErrorKind::Shutdown, "the server ends, or is busy"))),
        }
        let Prepared { ground, before, ready } = prepared;
        ground.back(files, self.given).exchange(&self.disk, before, ready).await.map(drop)
    }

    fn files(&self) -> HostFiles {
        HostFiles::new(OsFiles::new(self.cache).without_locks(self.options.no_lock))
    }
}
