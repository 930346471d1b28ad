//! Helper threads for file operations. The reactor without io_uring gives them all file operations; the reactor with
//! io_uring gives them those that cannot be done without waiting. Their number is bounded. A thread is started when it
//! is needed, and sleeps on a condition variable, without a timer, when it is not.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};

use crate::op::{Kind, Op};
use crate::shared::{Message, WorkerLink, relock};
use crate::sys;

/// The most helper threads: enough to keep a device busy, and few enough to be cheap.
const MAX_THREADS: usize = 16;

/// One operation, and the worker that is told of its end.
pub(crate) struct Job {
    pub(crate) op: Op,
    pub(crate) key: u64,
    pub(crate) worker: Arc<WorkerLink>,
}

pub(crate) struct FilePool {
    inner: Arc<Inner>,
}

struct Inner {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    waiting: usize,
    closed: bool,
}

impl FilePool {
    pub(crate) fn new() -> Arc<Self> {
        let inner = Arc::new(Inner { state: Mutex::default(), work: Condvar::new() });
        Arc::new(Self { inner })
    }

    /// Queues a job. It is always done: when no helper thread can be started at all, the calling thread does it.
    pub(crate) fn push(&self, job: Job) {
        let mut state = relock(&self.inner.state);
        state.jobs.push_back(job);
        if state.jobs.len() > state.waiting && state.threads < MAX_THREADS {
            state.threads += 1;
            drop(state);
            self.start_thread();
        } else {
            drop(state);
            self.inner.work.notify_one();
        }
    }

    fn start_thread(&self) {
        let inner = self.inner.clone();
        let builder = std::thread::Builder::new().name("spile-file".into());
        if builder.spawn(move || inner.run()).is_ok() {
            return;
        }
        self.do_without();
    }

    /// Handles that a thread could not be started. When there is no other helper thread, nobody would do the queued
    /// jobs, neither this caller's nor those of callers that expected this thread. So they are done here.
    fn do_without(&self) {
        let mut state = relock(&self.inner.state);
        state.threads -= 1;
        let jobs = if state.threads == 0 { std::mem::take(&mut state.jobs) } else { VecDeque::new() };
        drop(state);
        jobs.into_iter().for_each(do_job);
    }
}

impl Drop for FilePool {
    fn drop(&mut self) {
        relock(&self.inner.state).closed = true;
        self.inner.work.notify_all();
    }
}

impl Inner {
    fn run(&self) {
        while let Some(job) = self.next() {
            do_job(job);
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = relock(&self.state);
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            state.waiting += 1;
            state = self.work.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
            state.waiting -= 1;
        }
    }
}

fn do_job(mut job: Job) {
    let outcome = sys::run_file_op(&mut job.op);
    if let (Kind::Sync, Err(errno)) = (job.op.kind, outcome) {
        job.op.fd.note_sync(errno);
    }
    // The buffers and the file are dropped first: whoever is told of the end may rely on that.
    drop(job.op);
    job.worker.push(Message::Done(job.key, outcome));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fd::Fd;

    #[test]
    fn without_any_helper_no_job_is_left_behind() {
        let (pool, worker) = (FilePool::new(), Arc::new(WorkerLink::new(0, None).unwrap()));
        let file = Fd::file(tempfile::tempfile().unwrap().into());
        let job = |key| Job { op: Op::sync(&file), key, worker: worker.clone() };
        // Two workers have queued one each, and neither gets its thread.
        *relock(&pool.inner.state) = State { jobs: [job(1), job(2)].into(), threads: 2, ..State::default() };
        pool.do_without();
        pool.do_without();
        let mut messages = VecDeque::new();
        worker.take(&mut messages);
        let keys: Vec<_> = messages.iter().map(|m| matches!(m, Message::Done(_, Ok(0)))).collect();
        assert_eq!(keys, [true, true]);
    }
}
