//! Worker threads with their reactors, the sockets and timers on them, and the stores of this host.
//!
//! The contract: an [`Engine`] owns N worker threads. Each has one reactor (an io_uring, or an epoll with a few
//! helper threads where io_uring is missing or forbidden), one single-threaded executor, one buffer [`pool`].
//! Futures belong to the worker that polls them; objects ([`FileStore`], [`Socket`]) are shared by all, and an
//! operation runs on the reactor of the worker that polls it. Store and socket operations, [`sleep`], [`spawn`],
//! [`pool`] and [`current_worker`] therefore panic outside a worker.
//!
//! What holds for both reactors: an operation in flight owns clones of its buffers and of its file until the
//! kernel has answered, also when its future is dropped; short transfers are continued, EINTR and EAGAIN are
//! retried; an idle worker sleeps in one system call without a time-out.

mod aio;
mod align;
mod config;
mod engine;
mod env;
mod event;
mod fd;
mod file_pool;
mod file_table;
mod files;
mod fixed;
mod lock;
mod memory;
mod op;
mod shared;
mod socket;
mod spin;
mod store;
mod sync_gate;
mod sys;
mod threads;
mod time;
#[doc(hidden)]
pub mod tuning;
mod uring;
mod worker;

pub use config::{Config, EngineKind};
pub use engine::Engine;
pub use env::OsEnv;
pub use event::{Event, EventDevice};
pub use fd::on_failed_sync;
pub use files::{AnyStore, CacheMode, OsFiles};
pub use fixed::{Pinned, pin_memory};
pub use memory::{MemStore, NullStore};
pub use shared::WorkerStats;
pub use socket::{Listener, Socket};
pub use spin::{Pollable, unwatch, watch};
pub use store::FileStore;
pub use time::{sleep, yield_now};
pub use worker::{current_worker, pool, spawn};
