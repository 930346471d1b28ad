//! What has happened to the disks of this process, for callers that wait for it: `GET /v1/events`.
//!
//! Events are numbered, and the last [`KEPT`] are kept, so that a caller that asks again for those behind the last number it knows misses none
//! between two calls. A process numbers its events from the microsecond of its begin on: what a caller has learned from a server before this one
//! is older than all that this one says, and the caller is told that there may be more.
//!
//! Whoever tells of something takes a lock for a moment and waits for nobody. Nobody is woken when no caller waits.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result};
use tokio::sync::Notify;
use tokio::time::timeout_at;
use utoipa::ToSchema;

/// How many events are kept.
const KEPT: usize = 1024;

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskEvent {
    /// Its number: each event of a server has a larger one than the events before, and so has each server that is started later on this host.
    pub number: u64,
    /// When, in microseconds since 1970-01-01 UTC.
    pub at_unix_us: u64,
    /// The disk's name on its server; left out where a file may belong to several disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// What has happened: an object with one key.
    pub what: What,
}

/// What has happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// A thin disk wants a longer device, and has no command that makes it so: told once for each length of the device.
    RoomWanted(RoomWanted),
    /// The device of a thin disk has become longer.
    RoomMade(RoomMade),
    /// The command that was to make the device of a thin disk longer has failed.
    RoomFailed(Said),
    /// The first request of a disk waits, because of trouble below it that may pass.
    Waits(Waits),
    /// No request of a disk waits any more.
    GoesOn(GoesOn),
    /// A sync of a file has failed: what was written before it may be lost, and flushes of its disks fail.
    SyncFailed(Said),
    /// A guest wants to use a disk, and its memory is not shared with the server: it waits for ever.
    MemoryNotShared(Said),
    /// A job has ended.
    JobEnded(JobEnded),
}

/// A device that is too short.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RoomWanted {
    /// The device's path.
    pub device: String,
    /// Its length in bytes.
    pub device_bytes: u64,
    /// What is left of it, in bytes.
    pub free_bytes: u64,
    /// How long it is to become, in bytes.
    pub wants_bytes: u64,
}

/// A device that has grown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RoomMade {
    /// The device's length now, in bytes.
    pub device_bytes: u64,
}

/// What is told of something.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Said {
    /// As people read it.
    pub message: String,
}

/// A disk of which requests wait.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Waits {
    /// The operation that has failed, such as `write`.
    pub operation: String,
    /// Why.
    pub message: String,
}

/// A disk of which requests have waited.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GoesOn {
    /// How long it has had requests that waited, in seconds.
    pub time_s: f64,
    /// How many requests have waited.
    pub requests: u64,
    /// How many of them have failed in the end.
    pub reported: u64,
}

/// A job that has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobEnded {
    /// The job's name.
    pub id: String,
    /// `coalesce`, `flatten`, `move` or `backup`.
    pub kind: String,
    /// `done`, `cancelled`, `failed`, or `stopped` when the next server of the disk goes on with it.
    pub state: String,
    /// Why it has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// What has happened since a caller has last asked.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct EventList {
    /// The events, the oldest first.
    pub events: Vec<DiskEvent>,
    /// The number to ask with for those that come later.
    pub last: u64,
    /// There were events between those that the caller knows and these which are not kept any more, or which a server before this one may have had. Look at the
    /// disks' state.
    pub missed: bool,
    /// The server ends: no more events come from it.
    #[serde(default)]
    pub ended: bool,
}

/// How many callers may wait at a time. They hold connections to the control socket that others need.
const MOST_WAITING: usize = 16;

/// The events of this process.
static EVENTS: LazyLock<Events> = LazyLock::new(Events::new);

/// Begins to number events. A process that serves disks calls it once, at its begin.
pub fn begin() {
    LazyLock::force(&EVENTS);
}

/// Tells that something has happened to the disk of this name, or to a file.
pub fn tell(disk: Option<&str>, what: What) {
    EVENTS.tell(disk, what);
}

/// The events behind the number `after`; all that are kept when there is none. Waits for the first one, `patience` at most.
///
/// # Errors
/// `Exhausted` when too many callers wait already.
pub async fn after(number: Option<u64>, patience: Duration) -> Result<EventList> {
    EVENTS.after(number, patience).await
}

/// Callers that wait get their answer: the process ends.
pub fn end() {
    EVENTS.lock().has_ended = true;
    EVENTS.changed.notify_waiters();
}

struct Events {
    ring: Mutex<Ring>,
    changed: Notify,
    waiting: AtomicUsize,
}

/// A caller that waits.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Ring {
    events: VecDeque<DiskEvent>,
    /// The number of the last event; before the first one, the number behind which they begin.
    last: u64,
    has_ended: bool,
}

impl Events {
    fn new() -> Self {
        let ring = Ring { events: VecDeque::new(), last: now_us(), has_ended: false };
        Self { ring: Mutex::new(ring), changed: Notify::new(), waiting: AtomicUsize::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, disk: Option<&str>, what: What) {
        let mut ring = self.lock();
        ring.last += 1;
        if ring.events.len() == KEPT {
            ring.events.pop_front();
        }
        let event = DiskEvent { number: ring.last, at_unix_us: now_us(), disk: disk.map(str::to_owned), what };
        ring.events.push_back(event);
        drop(ring);
        self.changed.notify_waiters();
    }

    async fn after(&self, number: Option<u64>, patience: Duration) -> Result<EventList> {
        let end = tokio::time::Instant::now() + patience;
        let before = self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waiting = Waiting(&self.waiting);
        if before >= MOST_WAITING && !patience.is_zero() {
            let what = format!("{MOST_WAITING} callers wait for events already");
            return Err(Error::new(ErrorKind::Exhausted, what).hint("ask without a wait (wait_ms=0)"));
        }
        loop {
            let mut changed = pin!(self.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            let list = self.now(number);
            if !list.events.is_empty() || list.ended || list.missed || timeout_at(end, changed).await.is_err() {
                return Ok(list);
            }
        }
    }

    fn now(&self, number: Option<u64>) -> EventList {
        let ring = self.lock();
        let events: Vec<_> =
            ring.events.iter().filter(|event| number.is_none_or(|known| event.number > known)).cloned().collect();
        let before = ring.last - ring.events.len() as u64;
        // A number of the future is no number of this server's.
        let missed = number.is_some_and(|known| known < before || known > ring.last);
        EventList { events, last: ring.last, missed, ended: ring.has_ended }
    }
}

/// Now, in microseconds since 1970-01-01 UTC.
pub fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn said(text: &str) -> What {
        What::SyncFailed(Said { message: text.to_owned() })
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn who_asks_again_misses_nothing_and_learns_what_is_gone() {
        run(async {
            let events = Events::new();
            let after = async |number, patience| events.after(number, patience).await.unwrap();
            let begin = after(None, Duration::ZERO).await;
            assert!(begin.events.is_empty() && !begin.missed);
            events.tell(Some("d"), said("one"));
            let one = after(Some(begin.last), Duration::from_secs(9)).await;
            assert_eq!((one.events.len(), one.last, one.missed), (1, begin.last + 1, false));
            assert_eq!((one.events[0].disk.as_deref(), &one.events[0].what), (Some("d"), &said("one")));
            (0..KEPT).for_each(|_| events.tell(None, said("more")));
            let more = after(Some(one.last), Duration::ZERO).await;
            assert_eq!((more.events.len(), more.missed), (KEPT, false));
            events.tell(None, said("too many"));
            let more = after(Some(one.last), Duration::ZERO).await;
            assert_eq!((more.events.len(), more.missed), (KEPT, true));
            // Of a server before this one, and of none.
            for other in [begin.last - 1000, more.last + 1] {
                assert!(after(Some(other), Duration::from_secs(9)).await.missed);
            }
        });
    }

    #[test]
    fn a_caller_waits_for_the_first_event_and_no_longer_than_it_likes() {
        run(async {
            const LONG: Duration = Duration::from_secs(600);
            let events = Events::new();
            let after = async |number, patience| events.after(number, patience).await.unwrap();
            let last = after(None, Duration::ZERO).await.last;
            assert!(after(Some(last), Duration::from_millis(1)).await.events.is_empty());
            let (list, ()) = tokio::join!(after(Some(last), LONG), async { events.tell(None, said("now")) });
            assert_eq!(list.events.len(), 1);
            let end = async {
                events.lock().has_ended = true;
                events.changed.notify_waiters();
            };
            let (list, ()) = tokio::join!(after(Some(list.last), LONG), end);
            assert!(list.events.is_empty() && list.ended);
            events.lock().has_ended = false;
            let mut waiting: Vec<_> =
                (0..MOST_WAITING).map(|_| Box::pin(events.after(Some(list.last), LONG))).collect();
            assert!(waiting.iter_mut().all(|one| one.as_mut().now_or_never().is_none()));
            assert_eq!(events.after(Some(list.last), LONG).await.unwrap_err().kind(), ErrorKind::Exhausted);
            drop(waiting);
            assert!(events.after(Some(list.last), Duration::from_millis(1)).await.is_ok());
        });
    }
}
