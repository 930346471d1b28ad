//! Pauses: disks whose guests wait, so that their files can be copied.
//!
//! A task on a worker holds the disk's requests back, waits for those in flight, flushes the image, and then waits for whatever ends the
//! pause: its order, its time, or somebody who waits for the end of all requests, such as a ring that is stopped. The disk is claimed
//! meanwhile, so nothing else changes its images.
//!
//! Each pause has an id that no other one has, in any server. Whoever copies the disk's files ends the pause by its id, and only then knows that the pause has
//! lasted until then. Any other end, and any other id, is an error: the server may be another one by now, and the disk may be paused by somebody else.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use futures_util::future::{Either, select};
use spile_core::{Env as _, Error, ErrorKind, Result};
use spile_engine::{OsEnv, sleep, spawn};
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
/// How long a pause waits for the requests in flight. Its guests wait meanwhile, and it is worth nothing yet.
const SETTLE_PATIENCE: Duration = Duration::from_secs(30);

/// Whether a disk is paused.
#[derive(Default)]
pub struct Pausing(Mutex<State>);

#[derive(Default)]
struct State {
    now: Option<Now>,
    /// The id of the last pause that is over, and what has ended it.
    last: Option<(String, String)>,
}

/// The pause of now.
struct Now {
    id: String,
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
    /// It has not come about, or its caller has gone before it was told.
    Forsaken,
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

    /// Ends the pause `id`. Returns how long it has lasted, once requests go on: until this call nothing has ended it.
    ///
    /// # Errors
    /// `TimedOut` when this very pause is over.
    pub async fn resume(&self, id: &str) -> Result<Duration> {
        let (lasted, ended) = {
            let mut state = self.state();
            let now = state.now.as_mut().filter(|now| now.id == id);
            let ordered = now.and_then(|now| Some((now.begun.elapsed(), now.resume.take()?)));
            let (lasted, resume) = ordered.ok_or_else(|| state.over(id))?;
            let (done, ended) = oneshot::channel();
            resume.send(done).map_err(|_| state.over(id))?;
            (lasted, ended)
        };
        // An error: something else has ended it at the same moment.
        ended.await.map(|()| lasted).map_err(|_| self.state().over(id))
    }

    /// Refuses to end a pause for somebody who does not say which.
    ///
    /// # Errors
    /// `Busy` while the disk is paused.
    pub fn refuse(&self, disk: &str) -> Result<()> {
        let Some(Paused { id, .. }) = self.now() else { return Ok(()) };
        let error = Error::new(ErrorKind::Busy, "the disk is paused, for somebody who copies its files");
        Err(error
            .hint(format!("spile resume {disk} --pause {id} ends that pause; if it is not yours, the copy is lost")))
    }

    fn begin(&self, at_most: Duration) -> oneshot::Receiver<oneshot::Sender<()>> {
        let (resume, order) = oneshot::channel();
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let [a, b, c, d, e, f, ..] = OsEnv.random_16();
        let id = format!("{:012x}", u64::from_be_bytes([0, 0, a, b, c, d, e, f]));
        let now = Now { id, begun: Instant::now(), since_unix_s: since.as_secs(), at_most, resume: Some(resume) };
        self.state().now = Some(now);
        order
    }

    /// The pause is over, because of `why`. Requests do not go on before.
    fn end(&self, why: String) {
        let mut state = self.state();
        state.last = state.now.take().map(|now| (now.id, why));
    }
}

impl State {
    /// The error of whoever wants to end the pause `id`, which is over.
    fn over(&self, id: &str) -> Error {
        let why = match &self.last {
            Some((last, why)) if last == id => format!("the pause has ended before: {why}"),
            _ => format!(
                "the pause {id:?} is not the disk's pause of now: it has ended before, or another server has begun it"
            ),
        };
        Error::new(ErrorKind::TimedOut, why)
            .hint("what was copied of the disk's files since it began may be of different moments: copy it again")
    }
}

impl Now {
    fn tell(&self) -> Paused {
        Paused {
            id: self.id.clone(),
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
            let held = open.jobs.hold_for_pause()?;
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
    async fn run(self, mut reply: oneshot::Sender<Result<Paused>>) {
        let in_flight = match self.disk.hold().await {
            Ok(in_flight) => in_flight,
            Err(error) => return drop(reply.send(Err(error))),
        };
        let order = self.pausing.begin(self.at_most);
        let begun = Instant::now();
        let mut end = pin!(end(&self.disk, order, self.at_most));
        let settled = match select(pin!(self.settle(in_flight, &mut reply)), end.as_mut()).await {
            Either::Left((settled, _)) => settled,
            Either::Right((why, _)) => Err(unsettled(&why.tell(self.at_most))),
        };
        let end = match (settled, self.pausing.now()) {
            (Ok(()), Some(paused)) => {
                let (name, at_most_s) = (&*self.name, self.at_most.as_secs_f64());
                tracing::info!(journal.disk = name, "the disk {name:?} is paused, for {at_most_s} s at most");
                // A caller that has gone knows of no pause.
                match reply.send(Ok(paused)) {
                    Ok(()) => end.await,
                    Err(_) => End::Forsaken,
                }
            }
            (settled, _) => {
                if let Err(error) = settled {
                    drop(reply.send(Err(error)));
                }
                End::Forsaken
            }
        };
        // Who comes from now on to end it comes too late, though no request has gone on yet.
        let why = end.tell(self.at_most);
        self.pausing.end(why.clone());
        self.disk.let_go().await;
        let (name, paused_s) = (&*self.name, begun.elapsed().as_secs_f64());
        match &end {
            End::Late | End::Hurry => {
                tracing::warn!(journal.disk = name, "the disk {name:?} goes on after {paused_s:.3} s: {why}")
            }
            _ => tracing::info!(journal.disk = name, "the disk {name:?} goes on after {paused_s:.3} s"),
        }
        drop(self.claim);
        if let End::Order(done) = end {
            let _ = done.send(());
        }
    }

    /// Waits for the requests in flight, as long as there is somebody to hear that they have ended.
    async fn settle(&self, in_flight: InFlight, reply: &mut oneshot::Sender<Result<Paused>>) -> Result<()> {
        let (late, gone) = (pin!(sleep(SETTLE_PATIENCE)), pin!(reply.closed()));
        match select(pin!(settle(&self.disk, in_flight)), select(late, gone)).await {
            Either::Left((settled, _)) => settled,
            Either::Right((Either::Left(_), _)) => Err(unsettled(&format!("{} s are over", SETTLE_PATIENCE.as_secs()))),
            Either::Right((Either::Right(_), _)) => Err(unsettled("nobody waits for that any more")),
        }
    }
}

fn unsettled(why: &str) -> Error {
    Error::new(ErrorKind::TimedOut, format!("requests in flight have not ended: {why}"))
        .hint("`spile slow` shows them; requests go on")
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
            Self::Order(_) => "somebody has ended it".to_owned(),
            Self::Late => format!("its {} s are over", at_most.as_secs_f64()),
            Self::Hurry => "a guest's device or the server was stopped, which waits for all requests".to_owned(),
            Self::Forsaken => "it was not told to whoever asked for it".to_owned(),
        }
    }
}
