//! A trace of a disk's requests: the body of `POST /v1/disks/{name}/trace`, which comes line by line while the trace runs.
//!
//! The queues of the disk's fronts note their requests in buffers that do not grow. A task of the control thread empties these buffers some
//! times a second. The trace ends at its time also when the caller does not read, and when the caller goes.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use serde::{Deserialize, Serialize};
use spile_core::metrics::span::{Record, SpanLog, SpanTrace};
use spile_core::{Error, ErrorKind, Result};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout_at};
use utoipa::ToSchema;

use super::view::View;
use crate::serving::metrics::off_the_thread;

/// How often buffers are emptied.
const STEP: Duration = Duration::from_millis(50);
/// The longest trace. A call of the control socket may not take longer than 150 s.
pub const LONGEST: Duration = Duration::from_secs(120);
/// The most requests of one trace that are answered.
pub const MAX_REQUESTS: u64 = 1_000_000;
/// Room for so many requests is shared out among the queues. Each queue has it twice, in the list that is filled and in the one that is told:
/// together about 15 MB. The lines of a full list are another 20 MB for a moment.
const ROOM: usize = 64 << 10;
/// Room for so many requests at most in one queue, and at least.
const ROOM_OF_QUEUE: (usize, usize) = (16 << 10, 64);

/// A line of the answer.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TraceLine {
    /// A queue whose requests are traced from now on. It comes before its requests.
    Queue(TracedQueue),
    /// A request that has ended.
    Request(TracedRequest),
    /// The last line: the trace has ended.
    End(TraceEnd),
}

/// A queue of a front.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct TracedQueue {
    /// Its number in this trace.
    pub number: u32,
    /// The front, such as `front nbd ""`.
    pub front: String,
    /// The number of the front's queue, ring or worker.
    pub queue: u32,
}

/// A request that has ended.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct TracedRequest {
    /// The number of its queue in this trace.
    pub queue: u32,
    /// `read`, `write`, `flush`, `discard`, `write_zeroes`, `extents` or `other`.
    pub operation: String,
    /// Where it begins on the disk, in bytes.
    pub offset_bytes: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// It was answered with an error.
    pub failed: bool,
    /// How many operations on stores it needed for its data.
    pub store_operations: u64,
    /// When it was taken from the ring or the socket, in nanoseconds of the host's CLOCK_MONOTONIC.
    pub taken_ns: u64,
    /// The time of each phase, in nanoseconds: `load`, `queue`, `map`, `store`, `commit`, `unload`, `answer`, and `notify`, which comes
    /// after the answer.
    pub phases_ns: Vec<u64>,
}

/// How a trace has ended.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct TraceEnd {
    /// Requests for which there was no room: in a buffer, or among those that were asked for.
    pub dropped: u64,
    /// How long it was, in seconds.
    pub time_s: f64,
    /// The server ends, or the disk is not served any more: the trace is shorter than it was to be.
    pub cut_short: bool,
}

/// A trace that runs.
pub struct Running {
    view: Arc<View>,
    name: String,
    begun: Instant,
    ends: Instant,
    next: Instant,
    /// Requests that may still be answered.
    left: u64,
    dropped: u64,
    queues: Vec<SpanTrace>,
    has_ended: bool,
}

impl Running {
    /// Begins to trace the disk of this name: for `time`, and for the first `max_requests` requests.
    ///
    /// # Errors
    /// `NotFound` when there is no such disk; `Busy` when it is traced already; `InvalidInput` when `time` is too long.
    pub async fn begin(view: Arc<View>, name: String, time: Duration, max_requests: u64) -> Result<Self> {
        if time > LONGEST {
            let what = format!("a trace of {} s is too long", time.as_secs());
            return Err(
                Error::new(ErrorKind::InvalidInput, what).hint(format!("it takes {} s at the most", LONGEST.as_secs()))
            );
        }
        let begin = move || {
            // The first trace of a process takes some time to find out how fast the time stamp counter counts.
            let queues = view.queues(&name)?;
            let traces = queues.iter().map(|(_, _, log)| log.trace(room(queues.len())));
            let traces = traces.collect::<Result<Vec<_>>>()?;
            Ok::<_, Error>((view, name, traces))
        };
        let (view, name, queues) = off_the_thread(begin).await?;
        let now = Instant::now();
        let left = max_requests.min(MAX_REQUESTS);
        Ok(Self { view, name, begun: now, ends: now + time, next: now, left, dropped: 0, queues, has_ended: false })
    }

    /// The answer, line by line.
    pub fn body(self) -> Body {
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(self.tell(sender));
        Body::from_stream(futures_util::stream::unfold(receiver, |mut receiver| async move {
            let lines = receiver.recv().await?;
            Some((Ok::<_, std::convert::Infallible>(lines), receiver))
        }))
    }

    /// Sends the lines of each moment to `caller`, until the trace has ended or the caller has gone.
    async fn tell(mut self, caller: mpsc::Sender<Vec<u8>>) {
        while let Some(mut lines) = self.lines().await {
            let place = match timeout_at(self.ends, caller.reserve()).await {
                Ok(place) => place,
                // The caller does not read. The trace ends, and its rest waits for the caller.
                Err(_) => {
                    self.end(false, &mut lines);
                    caller.reserve().await
                }
            };
            let Ok(place) = place else { return };
            place.send(lines);
        }
    }

    /// The lines of the next moment; `None` once the trace has ended.
    async fn lines(&mut self) -> Option<Vec<u8>> {
        if self.has_ended {
            return None;
        }
        let mut lines = Vec::new();
        if self.begun == self.next {
            // The caller learns the queues at once.
            self.tell_queues(0, &mut lines);
        }
        sleep_until(self.next).await;
        self.next = (Instant::now() + STEP).min(self.ends);
        self.take(&mut lines);
        let is_served = self.find_new_queues(&mut lines).is_ok();
        let is_full = self.left == 0;
        if !is_served || is_full || Instant::now() >= self.ends {
            self.end(!is_served, &mut lines);
        }
        if lines.is_empty() {
            // An empty line tells the caller that the server still answers: of a disk without requests there is nothing to say.
            lines.push(b'\n');
        }
        Some(lines)
    }

    /// Ends the trace if it has not ended: the queues note nothing from now on.
    fn end(&mut self, cut_short: bool, lines: &mut Vec<u8>) {
        if self.has_ended {
            return;
        }
        self.has_ended = true;
        self.take(lines);
        self.queues.clear();
        let time_s = self.begun.elapsed().as_secs_f64();
        put(&TraceLine::End(TraceEnd { dropped: self.dropped, time_s, cut_short }), lines);
    }

    /// Guests may have connected since the last look.
    fn find_new_queues(&mut self, lines: &mut Vec<u8>) -> Result<()> {
        let before = self.queues.len();
        let found = self.view.queues(&self.name)?;
        for (_, _, log) in &found {
            if !self.queues.iter().any(|trace| trace.is_of(log)) {
                self.queues.extend(log.trace(room(found.len())));
            }
        }
        self.tell_queues(before, lines);
        Ok(())
    }

    /// Tells the caller of all queues from the one with the number `first` on.
    fn tell_queues(&self, first: usize, lines: &mut Vec<u8>) {
        let Ok(found) = self.view.queues(&self.name) else { return };
        for (number, trace) in self.queues.iter().enumerate().skip(first) {
            if let Some((front, queue, _)) = found.iter().find(|(_, _, log)| trace.is_of(log)) {
                let queue = TracedQueue { number: number as u32, front: front.clone(), queue: *queue };
                put(&TraceLine::Queue(queue), lines);
            }
        }
    }

    fn take(&mut self, lines: &mut Vec<u8>) {
        let (left, mut beyond) = (&mut self.left, 0);
        for (number, queue) in self.queues.iter_mut().enumerate() {
            self.dropped += queue.take(|record| match *left {
                0 => beyond += 1,
                _ => {
                    *left -= 1;
                    put(&TraceLine::Request(TracedRequest::new(number as u32, &record)), lines);
                }
            });
        }
        self.dropped += beyond;
    }
}

impl TracedRequest {
    fn new(queue: u32, record: &Record) -> Self {
        Self {
            queue,
            operation: record.what.op.name().to_owned(),
            offset_bytes: record.what.offset_bytes,
            len_bytes: record.what.len_bytes,
            failed: record.failed,
            store_operations: record.store_operations,
            taken_ns: record.taken_ns,
            phases_ns: record.phases_ns.to_vec(),
        }
    }
}

/// The queues of a disk: the front, the number of its queue, and what is kept of its requests.
pub type Queues = Vec<(String, u32, Arc<SpanLog>)>;

fn room(queues: usize) -> usize {
    (ROOM / queues.max(1)).clamp(ROOM_OF_QUEUE.1, ROOM_OF_QUEUE.0)
}

fn put(line: &TraceLine, lines: &mut Vec<u8>) {
    // To write plain numbers and texts to memory cannot fail.
    let _ = serde_json::to_writer(&mut *lines, line);
    lines.push(b'\n');
}
