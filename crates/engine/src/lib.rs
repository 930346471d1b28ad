//! Worker threads with their reactors, and what runs on them: tasks, sockets, timers, operations on files.
//!
//! The contract: an [`Engine`] owns N worker threads. Each has one reactor (io_uring; or epoll with Linux AIO, or
//! with helper threads alone, where io_uring is missing or forbidden), one single-threaded executor, one buffer [`pool`].
//! Futures belong to the worker that polls them; objects ([`RawFile`], [`Socket`]) are shared by all, and an
//! operation runs on the reactor of the worker that polls it. File and socket operations, [`sleep`], [`spawn`],
//! [`pool`] and [`current_worker`] therefore panic outside a worker.
//!
//! What holds for all engines: an operation in flight owns clones of its buffers and of its file until the
//! kernel has answered, also when its future is dropped; short transfers are continued, EINTR and EAGAIN are
//! retried; an idle worker sleeps in one system call without a time-out.

mod aio;
mod aio_context;
mod align;
mod blocking;
mod closing;
mod config;
mod engine;
mod env;
mod epoll;
mod event;
mod fd;
mod file_pool;
mod file_table;
mod fixed;
mod lanes;
mod lock;
mod op;
mod raw_file;
mod refusal;
mod ring_setup;
mod shared;
mod shares;
mod socket;
mod spin;
mod sys;
mod time;
mod uring;
mod uring_slot;
mod wake;
mod worker;

pub use align::{DirectAlign, find as direct_align};
pub use blocking::run_blocking;
pub use closing::{FileKey, LOCAL_FILE_SYSTEMS, wait_for_unlocks};
pub use config::{Config, EngineKind};
pub use engine::Engine;
pub use env::OsEnv;
pub use event::{Event, EventDevice};
pub use fd::on_failed_sync;
pub use fixed::{Pinned, pin_memory};
pub use lock::{TakesPromised, promise, take_promised};
pub use raw_file::{LockProbe, RawExtent, RawFile};
pub use shared::WorkerStats;
pub use socket::{Listener, Socket, peer_process};
/// The reactor gets its turn after a bounded number of tasks, however often tasks call this.
pub use spile_core::yield_now;
pub use spin::{Pollable, Watch};
pub use time::sleep;
pub use worker::{current_worker, pool, spawn};
