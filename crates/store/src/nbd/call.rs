//! [`Call`]: one request from the worker that asks to the connection that carries it, and its answer back.

use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use spile_core::{Result, Segments};
use spile_nbd_wire::request::{Command, FLAG_FUA, FLAG_NO_HOLE};

/// Locks without regard to a panic elsewhere: what is locked here is whole at every moment.
pub(super) fn relock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is asked of the server.
pub(super) enum Ask {
    /// Fill these bytes.
    Read(Segments),
    /// Write these bytes; `durable`: answer when they are durable.
    Write { from: Segments, durable: bool },
    /// Make durable what was answered.
    Flush,
    /// Make the range read as zeroes, and keep its space if said so.
    Zero { keep_space: bool },
    /// Tell what is data and what is not.
    Status,
}

impl Ask {
    /// True when no harm is done if a server that did not answer executes this late, after it was sent again.
    pub(super) fn may_come_late(&self) -> bool {
        matches!(self, Self::Read(_) | Self::Status)
    }

    /// The command and its flags.
    pub(super) fn command(&self) -> (Command, u16) {
        match self {
            Self::Read(_) => (Command::Read, 0),
            Self::Write { durable, .. } => (Command::Write, if *durable { FLAG_FUA } else { 0 }),
            Self::Flush => (Command::Flush, 0),
            Self::Zero { keep_space: true } => (Command::WriteZeroes, FLAG_NO_HOLE),
            Self::Zero { keep_space: false } => (Command::WriteZeroes, 0),
            Self::Status => (Command::BlockStatus, 0),
        }
    }
}

/// The runs of a block status as (length in bytes, flags); empty for every other request.
pub(super) type Runs = Vec<(u32, u32)>;

/// One request.
pub(super) struct Call {
    pub(super) ask: Ask,
    pub(super) offset: u64,
    pub(super) len: u32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    outcome: Option<Result<Runs>>,
    waker: Option<Waker>,
}

impl Call {
    pub(super) fn new(ask: Ask, offset: u64, len: u32) -> Self {
        Self { ask, offset, len, state: Mutex::default() }
    }

    /// Gives the answer to whoever waits for it.
    pub(super) fn end(&self, outcome: Result<Runs>) {
        let mut state = relock(&self.state);
        state.outcome = Some(outcome);
        let waker = state.waker.take();
        drop(state);
        waker.into_iter().for_each(Waker::wake);
    }

    /// Waits for the answer.
    pub(super) async fn wait(&self) -> Result<Runs> {
        poll_fn(|context| {
            let mut state = relock(&self.state);
            match state.outcome.take() {
                Some(outcome) => Poll::Ready(outcome),
                None => {
                    state.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// Wakes one waiter, from any thread: `notify` wakes whoever waits, or lets the next wait pass at once.
#[derive(Default)]
pub(super) struct Notify {
    state: Mutex<(bool, Option<Waker>)>,
}

impl Notify {
    pub(super) fn notify(&self) {
        let mut state = relock(&self.state);
        state.0 = true;
        let waker = state.1.take();
        drop(state);
        waker.into_iter().for_each(Waker::wake);
    }

    pub(super) async fn wait(&self) {
        poll_fn(|context| self.poll(context)).await;
    }

    fn poll(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut state = relock(&self.state);
        if std::mem::take(&mut state.0) {
            return Poll::Ready(());
        }
        state.1 = Some(context.waker().clone());
        Poll::Pending
    }
}
