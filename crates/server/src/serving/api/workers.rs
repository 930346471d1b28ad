//! What each worker of a server has done, and what has woken it up: the body of `GET /v1/workers`.

use serde::{Deserialize, Serialize};
use spile_core::metrics::now_ns;
use spile_engine::{Engine, WorkerStats};
use utoipa::ToSchema;

/// What the workers of a server have done up to one moment. All numbers only rise.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Workers {
    /// The server's control socket.
    pub server: String,
    /// The server's process. Counts of another process cannot be compared with these.
    pub pid: u32,
    /// When the counters were read, in nanoseconds of the host's CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// The workers: threads that serve guests and clients.
    pub workers: Vec<Worker>,
}

/// What one worker has done. Each sleep that has ended is counted once among the wake-ups.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Worker {
    /// Its number, from 0.
    pub number: usize,
    /// Wake-ups by a guest or a client: it kicked, sent something, connected, or made room for answers.
    pub wakeups_kick: u64,
    /// Wake-ups by a store: an operation was done.
    pub wakeups_completion: u64,
    /// Wake-ups by another thread of the server, such as the one that obeys the control socket, and by signals.
    pub wakeups_control: u64,
    /// Wake-ups because a time was over.
    pub wakeups_timer: u64,
    /// Times that the worker went to sleep.
    pub sleeps: u64,
    /// Times that a task was polled.
    pub polls: u64,
    /// Operations that were given to the kernel or to a helper thread.
    pub submissions: u64,
    /// Of these, how many have ended.
    pub completions: u64,
    /// System calls that gave operations to the kernel, asked for those that have ended, or slept.
    pub system_calls: u64,
    /// The processor time that the worker's thread has used, in microseconds. Helper threads are not in it.
    pub cpu_us: u64,
}

impl Workers {
    /// What the workers of `engine` have done.
    pub fn new(server: &str, engine: &Engine) -> Self {
        let each = engine.stats().into_iter().zip(engine.cpu_ns()).enumerate();
        Self {
            server: server.to_owned(),
            pid: std::process::id(),
            at_ns: now_ns(),
            workers: each.map(|(number, (stats, cpu_ns))| Worker::new(number, &stats, cpu_ns.unwrap_or(0))).collect(),
        }
    }
}

impl Worker {
    fn new(number: usize, stats: &WorkerStats, cpu_ns: u64) -> Self {
        Self {
            number,
            wakeups_kick: stats.wakeups_kick,
            wakeups_completion: stats.wakeups_completion,
            wakeups_control: stats.wakeups_control,
            wakeups_timer: stats.wakeups_timer,
            sleeps: stats.sleeps,
            polls: stats.polls,
            submissions: stats.sqes,
            completions: stats.cqes,
            system_calls: stats.enters,
            cpu_us: cpu_ns / 1000,
        }
    }
}
