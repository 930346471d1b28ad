//! The running server's side of a takeover: it gives all it has to its successor, or goes on when that fails.
//!
//! No step waits without an end. While everything is still served, a disk that cannot be flushed in time refuses the takeover. Once guests
//! wait, a step that the storage holds up ends this process ([`within`]), as if it had been killed: guests then go on with the
//! next server. A successor gets the time of a message, and one that has the disks open [`HANGING_ROUNDS`] times that before it is
//! ended.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use spile_core::{Disk, Error, ErrorKind, OpenMode, Result, Store as _};
use spile_engine::{TakesPromised, take_promised};
use spile_store::{AnyStore, FileId, Folder};

use super::control::{Answer, Link};
use super::disks::{self, Open};
use super::failed_syncs;
use super::fronts::{Fronts, Role};
use super::identity::{self, Exported};
use super::limits::Kept;
use super::server::Server;
use super::takeover::{self, Orders};
use super::trouble::KeptPolicy;
use crate::panics;
use crate::process::Process;

/// How often the disks are opened again after a failed takeover, each time with the patience that a busy disk is given.
const REOPEN_ATTEMPTS: u32 = 60;
/// How often a successor that has the disks open and says nothing is waited for, each time as long as for any message. Then it
/// is ended: nobody else could serve the disks.
const HANGING_ROUNDS: u32 = 3;
/// The time between two tries to open the disks when descriptors or memory are short.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(500);
/// How long the disks may take to flush before anything stops. With the bounds of the steps after it, that is less than a successor
/// waits for our first answer.
const FLUSH_BOUND: Duration = Duration::from_secs(40);
/// How long requests that are in flight may take.
const DRAIN_BOUND: Duration = Duration::from_secs(40);
/// How long the disks may take to close.
const CLOSE_BOUND: Duration = Duration::from_secs(30);
/// How long the disks may take to open again, a busy disk's patience included.
const OPEN_BOUND: Duration = Duration::from_secs(60);

/// What a hand-over needs. All of it is there before anything is given away, so that no lack of it ends this server.
pub(super) struct Prepared {
    /// The process that will go on with everything.
    successor: Process,
    /// Fronts of nothing, for the time of the hand-over.
    nothing: Fronts,
    /// A share of each socket, to listen on again when the successor fails.
    shares: Vec<OwnedFd>,
}

impl Server {
    /// Compares what the successor at the other end of `link` says with what there is here. That takes no time and stops nothing.
    ///
    /// # Errors
    /// Why it cannot go on with what this server has.
    pub(super) fn compare(
        &self,
        link: &Link,
        its_sockets: &[String],
        its_queues: u16,
        its_disks: Option<&[Exported]>,
    ) -> Result<Process> {
        let successor = link.peer()?;
        if self.fronts.serves_xen() {
            let what = "a Xen guest's disk is not handed over: end this process, and the next one goes on";
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        takeover::compare_disks(&disks::exported(&self.disks), &self.listening, its_disks)?;
        takeover::compare(&self.listening, self.options.queues, its_sockets, its_queues)?;
        if !self.opening.is_lasting() {
            return Err(Error::new(ErrorKind::Unsupported, "a disk in memory (mem:) would be empty"));
        }
        Ok(successor)
    }

    /// Finds out whether the successor at the other end of `link`, with these sockets, queues and disks, can go on with what
    /// this server has, and whether this server can go on when the successor fails.
    ///
    /// # Errors
    /// Why not; nothing has changed then.
    pub(super) fn prepare(
        &self,
        link: &Link,
        its_sockets: &[String],
        its_queues: u16,
        its_disks: Option<&[Exported]>,
    ) -> Result<Prepared> {
        // A merge or a move may have come to its end meanwhile.
        let successor = self.compare(link, its_sockets, its_queues, its_disks)?;
        let nothing = Fronts::of_nothing(&self.engine, &self.options)?;
        // A guest has to be told when its data could not be flushed. Its successor may know of it by a mark, but such marks can be
        // lost, so a disk that cannot be flushed is not handed over.
        disks::flush(&self.engine, &self.disks, FLUSH_BOUND)?;
        let shares = self.share_sockets()?;
        // The flush may have taken seconds.
        match successor.has_ended() {
            true => Err(Error::new(ErrorKind::Shutdown, "the successor has ended")),
            false => Ok(Prepared { successor, nothing, shares }),
        }
    }

    /// Gives everything to the process at the other end. When that fails, this server goes on as before, and the reason is returned.
    ///
    /// # Errors
    /// When this server cannot go on either.
    pub(super) fn hand_over(&mut self, prepared: Prepared, layout: u32, link: &mut Link) -> Result<Option<Error>> {
        let Prepared { successor, nothing, shares } = prepared;
        let roles: Vec<Role> = self.listening.iter().map(|socket| socket.role.clone()).collect();
        let fronts = std::mem::replace(&mut self.fronts, nothing);
        let clients = fronts.nbd_connections();
        if clients > 0 {
            tracing::warn!(
                "a takeover cuts off {clients} NBD client(s): they have to connect again (guests on vhost-user go on)"
            );
        }
        disks::leave_waiting(&self.disks);
        let connections = within("what is in flight is not answered", DRAIN_BOUND, || fronts.hand_over());
        // From here to the end others find the disks' files busy, also while nobody has them open.
        let _promised = match self.opening.no_lock {
            true => None,
            false => Some(within("the disks' files cannot be promised", DRAIN_BOUND, || promise(&self.disks))),
        };
        let (sizes, served) = (self.sizes(), disks::exported(&self.disks));
        let orders = Orders {
            shapes: disks::shapes(&self.disks),
            limits: Kept::of(&self.disks, &self.opening.groups),
            policies: KeptPolicy::of(&self.disks),
            detached: self.changes.detached.clone(),
            closed: self.changes.closed.clone(),
        };
        if let Err(error) = self.close_disks() {
            // Data that a guest believes to be durable may be lost, so the guest must not go on as if nothing had happened.
            let _ = link.send(&Answer::Error(format!("a disk could not be closed: {error}")), &[]);
            return Err(error);
        }
        let mut given = takeover::give(link, layout, sizes, orders.clone(), &self.listening, &connections);
        let (mut attempts, mut silences) = (0, 0);
        let failure = loop {
            let Err(failure) = given.and_then(|()| takeover::make_it_the_server(link)) else { return Ok(None) };
            tracing::warn!("nothing is handed over: {failure}");
            match self.open_again(&roles, &served) {
                Ok(()) => break failure,
                // The successor is silent but has the disks open. It may still answer, and nobody else can serve them.
                Err(error) if error.kind() == ErrorKind::Busy && failure.kind() == ErrorKind::TimedOut => {
                    silences += 1;
                    self.close_disks()?;
                    given = if silences < HANGING_ROUNDS { Ok(()) } else { Err(end_hanging(&successor)) };
                }
                // The successor has ended after it had opened the disks. The kernel keeps their locks until its last request has ended.
                Err(error) if error.kind() == ErrorKind::Busy && attempts < REOPEN_ATTEMPTS => {
                    attempts += 1;
                    self.close_disks()?;
                    given = Err(failure);
                }
                // Others have taken the descriptors that the disks had. They may give some back.
                Err(error) if error.kind() == ErrorKind::Exhausted && attempts < REOPEN_ATTEMPTS => {
                    attempts += 1;
                    tracing::warn!("the disks are tried again: {error}");
                    self.close_disks()?;
                    std::thread::sleep(SHORTAGE_PAUSE);
                    given = Err(failure);
                }
                Err(error) => return Err(error),
            }
        };
        KeptPolicy::restore(&orders.policies, &self.disks);
        disks::set_shapes(&self.engine, &self.disks, &orders.shapes)?;
        orders.limits.restore(&self.engine, &self.disks, &self.opening.groups, |_| true)?;
        disks::begin(&self.engine, &self.disks, &self.sender);
        self.listen(shares)?;
        self.adopt(connections);
        tracing::warn!("this server goes on");
        Ok(Some(failure))
    }

    /// Opens the disks as before. Another disk may lie at one of their paths by now; guests must not get it in the place of theirs.
    fn open_again(&mut self, roles: &[Role], served: &[Exported]) -> Result<()> {
        let names: Vec<String> = served.iter().map(|exported| exported.name.clone()).collect();
        within("the disks cannot be opened again", OPEN_BOUND, || self.open(roles, &names))?;
        identity::compare(served, &disks::exported(&self.disks)).map_err(|error| {
            let what = "after a takeover that failed, another disk lies in the place of one that was served";
            Error::new(ErrorKind::NotFound, what)
                .caused_by(error)
                .hint("start the server anew with the disk that is meant")
        })
    }

    /// The size of each export.
    fn sizes(&self) -> Vec<(String, u64)> {
        let of = |open: &Open| {
            let size_bytes = open.disk.info().size_bytes;
            open.names.clone().into_iter().map(move |name| (name, size_bytes))
        };
        self.disks.iter().flat_map(of).collect()
    }

    fn close_disks(&mut self) -> Result<()> {
        let disks = std::mem::take(&mut self.disks);
        within("the disks cannot be closed", CLOSE_BOUND, || disks::close(&self.engine, disks, Ok(())))
    }
}

/// Keeps everybody but this server and its successor from opening the files that these disks write, as long as what is returned lives: others may read
/// the parents. What cannot be promised is only less safe.
fn promise(disks: &[Open]) -> (TakesPromised, Vec<File>) {
    let takes = take_promised();
    let written = disks.iter().filter(|open| !open.read_only);
    let graphs: Vec<_> = written.filter_map(|open| open.disk.graph_now()).collect();
    let stores = graphs.iter().flat_map(|graph| failed_syncs::stores_of(&graph.handles()[0]));
    let promise = |store: &AnyStore| {
        let id = store.file_id()?;
        let (folder, name) = Folder::of(store.path()).ok()?;
        let file = folder.open_file(&name, OpenMode::ReadOnly).ok()?;
        let is_it = file.metadata().is_ok_and(|stat| FileId::of(&stat) == id);
        (is_it && spile_engine::promise(&file).is_ok()).then_some(file)
    };
    (takes, stores.filter_map(promise).collect())
}

/// Does a step that guests wait for. When it has not ended after `bound`, this process ends: the storage does not answer, so this server
/// can neither hand over nor go on.
fn within<T>(trouble: &str, bound: Duration, step: impl FnOnce() -> T) -> T {
    let (end, is_over) = mpsc::channel::<()>();
    let trouble = trouble.to_owned();
    let watch = move || {
        if is_over.recv_timeout(bound) == Err(RecvTimeoutError::Timeout) {
            panics::say(&format!(
                "spile: {trouble} after {} s of a takeover: this server ends at once. Guests wait, and go on with the next server on \
                 the same sockets\n",
                bound.as_secs()
            ));
            std::process::exit(1);
        }
    };
    // Where no thread can be started, the step has no bound.
    let _ = std::thread::Builder::new().name("spile-bound".to_owned()).spawn(watch);
    let done = step();
    drop(end);
    done
}

/// Ends a successor that hangs with the disks open, so that they can be served again.
fn end_hanging(successor: &Process) -> Error {
    let how = if successor.kill().is_ok() { "was ended" } else { "cannot be ended" };
    Error::new(ErrorKind::Shutdown, format!("the successor hangs with the disks open, and {how}"))
}
