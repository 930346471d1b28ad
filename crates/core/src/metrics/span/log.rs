//! [`SpanLog`]: what is kept of the requests of one queue, for anybody to read.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::slowest::Slowest;
use super::{Anchor, Raw, Record, Span, calibrate};
use crate::metrics::is_counting;
use crate::{Error, ErrorKind, Result};

/// What is kept of the requests of one queue: the slowest ones, those in flight, and all while a trace runs. One thread
/// at a time ends requests here.
#[derive(Debug, Default)]
pub struct SpanLog {
    pub(super) slowest: Slowest,
    pub(super) is_traced: AtomicBool,
    trace: Mutex<Option<Buffer>>,
    /// The spans of the queue, in flight or not.
    spans: Mutex<Vec<&'static Span>>,
}

/// Requests of a trace that nobody has taken yet. It never grows.
#[derive(Debug)]
struct Buffer {
    requests: Vec<Raw>,
    dropped: u64,
}

/// Spans that no queue has. They live as long as the process.
static UNUSED: Mutex<Vec<&'static Span>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SpanLog {
    /// The slowest requests of about the last two minutes, with their moments. Where nothing was answered for long they may be older.
    pub fn slowest(&self) -> Vec<Record> {
        self.slowest.read()
    }

    /// The requests in flight, with the moments that they have reached.
    pub fn in_flight(&self) -> Vec<Record> {
        lock(&self.spans).iter().filter_map(|span| span.look()).collect()
    }

    /// Notes all requests that begin from now on, until what is returned is dropped. Room for `capacity` requests is made;
    /// those that find none are counted. The first trace of a process waits until the time stamp counter is calibrated.
    ///
    /// # Errors
    /// `Busy` when a trace runs already; `Unsupported` when this process counts nothing.
    pub fn trace(self: &Arc<Self>, capacity: usize) -> Result<SpanTrace> {
        if !is_counting() {
            let what = "this server notes no moments of requests";
            return Err(Error::new(ErrorKind::Unsupported, what).hint("start it without SPILE_ACCOUNTING=off"));
        }
        calibrate();
        let mut trace = lock(&self.trace);
        if trace.is_some() {
            return Err(Error::new(ErrorKind::Busy, "a trace of the disk runs already").hint("wait until it ends"));
        }
        *trace = Some(Buffer { requests: Vec::with_capacity(capacity), dropped: 0 });
        self.is_traced.store(true, Relaxed);
        Ok(SpanTrace { log: self.clone(), anchor: Anchor::now(), spare: Vec::with_capacity(capacity) })
    }

    /// Notes a request of a trace. One that ends after its trace is left out.
    #[cold]
    pub(super) fn note(&self, request: Raw) {
        match &mut *lock(&self.trace) {
            Some(buffer) if buffer.requests.len() < buffer.requests.capacity() => buffer.requests.push(request),
            Some(buffer) => buffer.dropped += 1,
            None => {}
        }
    }

    /// A span for the queue: one that no other queue has, or a new one.
    #[cold]
    pub(super) fn lend(&self) -> &'static Span {
        let span = lock(&UNUSED).pop().unwrap_or_else(|| Box::leak(Box::default()));
        lock(&self.spans).push(span);
        span
    }

    /// Takes spans back, which have no request any more.
    pub(super) fn take_back(&self, spans: &[&'static Span]) {
        let is_meant = |span: &&Span| spans.iter().any(|other| std::ptr::eq(*other, *span));
        let back: Vec<_> = lock(&self.spans).extract_if(.., |span| is_meant(&&**span)).collect();
        back.iter().for_each(|span| span.rest());
        lock(&UNUSED).extend(back);
    }
}

/// A trace of one queue. It ends when this is dropped, and its memory is free then.
#[derive(Debug)]
pub struct SpanTrace {
    log: Arc<SpanLog>,
    anchor: Anchor,
    /// Empty; it takes the place of what is taken.
    spare: Vec<Raw>,
}

impl SpanTrace {
    /// Takes the requests that have ended since the last time, and returns how many found no room meanwhile. The queue waits
    /// for this only as long as it takes to exchange one list for another.
    pub fn take(&mut self, each: impl FnMut(Record)) -> u64 {
        let dropped = match &mut *lock(&self.log.trace) {
            Some(buffer) => {
                std::mem::swap(&mut buffer.requests, &mut self.spare);
                std::mem::take(&mut buffer.dropped)
            }
            None => 0,
        };
        self.spare.drain(..).map(|request| request.record(self.anchor)).for_each(each);
        dropped
    }

    /// True when this is the trace of `log`.
    pub fn is_of(&self, log: &Arc<SpanLog>) -> bool {
        Arc::ptr_eq(&self.log, log)
    }
}

impl Drop for SpanTrace {
    fn drop(&mut self) {
        self.log.is_traced.store(false, Relaxed);
        *lock(&self.log.trace) = None;
    }
}
