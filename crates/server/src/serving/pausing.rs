//! Pauses: disks whose guests wait, so that their files can be copied.
//!
//! A task on a worker holds the disk's requests back, waits for those in flight, flushes the image, and then waits for whatever ends the
//! pause: its order, its time, or somebody who waits for the end of all requests, such as a ring that is stopped. The disk is claimed
//! meanwhile, so nothing else changes its images.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use futures_util::future::{Either, select};
use spile_core::{Error, ErrorKind, Result};
use spile_engine::{sleep, spawn};
use spile_node::InFlight;
use tokio::sync::oneshot;

use super::api::types::{NewPause, Paused};
use super::claims::Claim;
use super::disks::ServedDisk;
use super::jobs::Held;
use super::server::Server;

/// How long a pause lasts unless it is said.
pub const DEFAULT: Duration = Duration::from_secs(60);
/// The longest pause.
pub const LONGEST: Duration = Duration::from_secs(3600);

/// Whether a disk is paused.
#[derive(Default)]
pub struct Pausing(Mutex<State>);

#[derive(Default)]
struct State {
    now: Option<Now>,
    /// Why the last pause has ended by itself, until somebody asks for its end.
    broken: Option<String>,
}

/// The pause of now.
struct Now {
    begun: Instant,
    since_unix_s: u64,
    at_most: Duration,
    /// An order to end it, with the way to say that it has ended.
    resume: Option<oneshot::Sender<oneshot::Sender<()>>>,
}

/// A call for a pause, and where its answer goes.
pub struct PauseCall {
    /// The disk.
    pub name: String,
    /// For how long at most.
    pub at_most: Duration,
    reply: oneshot::Sender<Result<Paused>>,
}

/// What ends a pause.
enum End {
    /// Somebody asks for it, and hears when it has ended.
    Order(oneshot::Sender<()>),
    /// The time is over.
    Late,
    /// Somebody waits for the end of all requests.
    Hurry,
}

impl PauseCall {
    /// A call, and where its answer will come.
    ///
    /// # Errors
    /// `InvalidInput` for a time that no pause has.
    pub fn new(name: String, wanted: &NewPause) -> Result<(Self, oneshot::Receiver<Result<Paused>>)> {
        let at_most = wanted.at_most_s.map_or(Ok(DEFAULT), Duration::try_from_secs_f64);
        let at_most = at_most.ok().filter(|time| !time.is_zero() && *time <= LONGEST).ok_or_else(|| {
            let longest_s = LONGEST.as_secs();
            Error::new(ErrorKind::InvalidInput, "no pause lasts so long").hint(format!("say up to {longest_s} seconds"))
        })?;
        let (reply, answer) = oneshot::channel();
        Ok((Self { name, at_most, reply }, answer))
    }
}

impl Pausing {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pause of now, if there is one.
    pub fn now(&self) -> Option<Paused> {
        self.state().now.as_ref().map(Now::tell)
    }

    /// Ends the pause of now. What is returned comes when requests go on; `None` when there is no pause.
    ///
    /// # Errors
    /// `TimedOut` when the last pause has ended by itself, once.
    pub fn resume(&self) -> Result<Option<oneshot::Receiver<()>>> {
        let mut state = self.state();
        if let Some(why) = state.broken.take() {
            let error = Error::new(ErrorKind::TimedOut, format!("the pause has ended before: {why}"));
            return Err(error.hint(
                "what was copied of the disk's files since it began may be of different moments: copy it again",
            ));
        }
        let (done, ended) = oneshot::channel();
        match state.now.as_mut().and_then(|now| now.resume.take()) {
            // A pause that has just ended has nobody who listens, and drops this.
            Some(resume) => Ok(resume.send(done).is_ok().then_some(ended)),
            None => Ok(None),
        }
    }

    fn begin(&self, at_most: Duration) -> oneshot::Receiver<oneshot::Sender<()>> {
        let (resume, order) = oneshot::channel();
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let now = Now { begun: Instant::now(), since_unix_s: since.as_secs(), at_most, resume: Some(resume) };
        *self.state() = State { now: Some(now), broken: None };
        order
    }

    fn end(&self, broken: Option<String>) {
        *self.state() = State { now: None, broken };
    }
}

impl Now {
    fn tell(&self) -> Paused {
        Paused {
            since_unix_s: self.since_unix_s,
            time_s: self.begun.elapsed().as_secs_f64(),
            at_most_s: self.at_most.as_secs_f64(),
        }
    }
}

impl Server {
    /// Begins a pause. The call is answered by the task that sees it to its end.
    pub(super) fn begin_pause(&self, call: PauseCall) {
        let PauseCall { name, at_most, reply } = call;
        let begun = self.named(&name).and_then(|open| {
            let claim = self.claims.take(std::slice::from_ref(&open.name), "a pause")?;
            let held = open.jobs.hold("a pause")?;
            Ok((open.disk.clone(), open.pausing.clone(), (claim, held)))
        });
        match begun {
            Ok((disk, pausing, claim)) => {
                let run = Run { name, disk, pausing, at_most, claim };
                self.engine.spawn_on(0, move || run.run(reply));
            }
            // A caller that has gone does not need the answer.
            Err(error) => drop(reply.send(Err(error))),
        }
    }
}

/// One pause, from its begin to its end.
struct Run {
    name: String,
    disk: Arc<ServedDisk>,
    pausing: Arc<Pausing>,
    at_most: Duration,
    claim: (Claim, Held),
}

impl Run {
    async fn run(self, reply: oneshot::Sender<Result<Paused>>) {
        let Self { name, disk, pausing, at_most, claim } = self;
        let in_flight = match disk.hold().await {
            Ok(in_flight) => in_flight,
            Err(error) => return drop(reply.send(Err(error))),
        };
        let order = pausing.begin(at_most);
        let begun = Instant::now();
        let mut end = pin!(end(&disk, order, at_most));
        let settled = match select(pin!(settle(&disk, in_flight)), end.as_mut()).await {
            Either::Left((Ok(()), _)) => Ok(()),
            Either::Left((Err(error), _)) => Err((error, None)),
            Either::Right((why, _)) => {
                let error = Error::new(
                    ErrorKind::TimedOut,
                    format!("requests in flight have not ended: {}", why.tell(at_most)),
                );
                Err((error.hint("`spile slow` shows them; requests go on"), Some(why)))
            }
        };
        let (end, failed) = match settled {
            Ok(()) => {
                tracing::info!(
                    journal.disk = &*name,
                    "the disk {name:?} is paused, for {} s at most",
                    at_most.as_secs_f64()
                );
                // The caller may have gone: then the time ends the pause.
                let _ = reply.send(pausing.now().ok_or_else(|| Error::new(ErrorKind::Shutdown, "the pause has ended")));
                (Some(end.await), false)
            }
            Err((error, why)) => {
                let _ = reply.send(Err(error));
                (why, true)
            }
        };
        disk.let_go().await;
        let paused_s = begun.elapsed().as_secs_f64();
        let broken = end.as_ref().filter(|end| !failed && !matches!(end, End::Order(_))).map(|end| end.tell(at_most));
        match &broken {
            Some(why) => {
                tracing::warn!(journal.disk = &*name, "the disk {name:?} goes on after {paused_s:.3} s: {why}")
            }
            None => tracing::info!(journal.disk = &*name, "the disk {name:?} goes on after {paused_s:.3} s"),
        }
        pausing.end(broken);
        drop(claim);
        if let Some(End::Order(done)) = end {
            let _ = done.send(());
        }
    }
}

/// Waits for the requests in flight, and until the disk's files do not change any more. The flush is a task of its own: nobody drops it
/// halfway.
async fn settle(disk: &Arc<ServedDisk>, in_flight: InFlight) -> Result<()> {
    in_flight.ended().await;
    let (done, flushed) = oneshot::channel();
    let graph = disk.graph().await;
    spawn(async move { drop(done.send(graph.come_to_rest().await)) });
    flushed.await.unwrap_or_else(|_| Err(Error::new(ErrorKind::Shutdown, "the server ends")))
}

/// Waits for what ends a pause.
async fn end(disk: &ServedDisk, order: oneshot::Receiver<oneshot::Sender<()>>, at_most: Duration) -> End {
    let (late, hurried) = (pin!(sleep(at_most)), pin!(disk.hurried()));
    match select(order, select(late, hurried)).await {
        Either::Left((Ok(done), _)) => End::Order(done),
        // Its sender lasts as long as the pause.
        Either::Left((Err(_), alone)) => of_itself(alone.await),
        Either::Right((alone, _)) => of_itself(alone),
    }
}

fn of_itself<A, B>(end: Either<A, B>) -> End {
    match end {
        Either::Left(_) => End::Late,
        Either::Right(_) => End::Hurry,
    }
}

impl End {
    fn tell(&self, at_most: Duration) -> String {
        match self {
            Self::Order(_) => "somebody has ended the pause".to_owned(),
            Self::Late => format!("its {} s are over", at_most.as_secs_f64()),
            Self::Hurry => "a guest's device or the server was stopped, which waits for all requests".to_owned(),
        }
    }
}
