//! One sync of a file at a time: callers that come while it runs share the next one.
//!
//! Two reasons. It is a group commit: a hundred flushes cost two. And the kernel reports a failed write-back to one
//! sync only: with two in flight, the one that was told nothing could succeed before the error of the other is known.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

#[derive(Default)]
pub(crate) struct SyncGate {
    state: Mutex<State>,
}

/// Locks the state, also after another holder has panicked: the state is whole at every moment.
fn relock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
struct State {
    running: bool,
    started: u64,
    ended: u64,
    waiting: Vec<Waker>,
}

/// What a waiter has to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Start a sync and call [`SyncGate::end`] at its end.
    Run,
    /// A sync that began after the ticket was drawn has ended.
    Over,
}

impl SyncGate {
    /// The number of the first sync that will cover all that returned before this call.
    pub(crate) fn ticket(&self) -> u64 {
        relock(&self.state).started + 1
    }

    pub(crate) fn poll(&self, ticket: u64, context: &mut Context<'_>) -> Poll<Turn> {
        let mut state = relock(&self.state);
        if state.ended >= ticket {
            return Poll::Ready(Turn::Over);
        }
        if !state.running {
            state.running = true;
            state.started += 1;
            return Poll::Ready(Turn::Run);
        }
        // A waiter may be polled many times during one sync.
        if !state.waiting.iter().any(|waker| waker.will_wake(context.waker())) {
            state.waiting.push(context.waker().clone());
        }
        Poll::Pending
    }

    /// How many syncs have begun.
    pub(crate) fn started(&self) -> u64 {
        relock(&self.state).started
    }

    /// The running sync has ended.
    pub(crate) fn end(&self) {
        let mut state = relock(&self.state);
        state.running = false;
        state.ended = state.started;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_during_a_sync_waits_for_the_next() {
        let gate = SyncGate::default();
        let context = &mut Context::from_waker(Waker::noop());
        let first = gate.ticket();
        assert_eq!(gate.poll(first, context), Poll::Ready(Turn::Run));
        let (second, third) = (gate.ticket(), gate.ticket());
        assert!(gate.poll(second, context).is_pending() && gate.poll(third, context).is_pending());
        gate.end();
        assert_eq!(gate.poll(first, context), Poll::Ready(Turn::Over));
        assert_eq!(gate.poll(second, context), Poll::Ready(Turn::Run));
        assert!(gate.poll(third, context).is_pending());
        gate.end();
        assert_eq!(gate.poll(third, context), Poll::Ready(Turn::Over));
    }

    #[test]
    fn who_asks_again_and_again_waits_once() {
        struct Nothing;
        impl std::task::Wake for Nothing {
            fn wake(self: std::sync::Arc<Self>) {}
        }
        let gate = SyncGate::default();
        let wakers = [(); 2].map(|()| Waker::from(std::sync::Arc::new(Nothing)));
        assert_eq!(gate.poll(gate.ticket(), &mut Context::from_waker(&wakers[0])), Poll::Ready(Turn::Run));
        let next = gate.ticket();
        for _ in 0..100 {
            assert!(wakers.iter().all(|waker| gate.poll(next, &mut Context::from_waker(waker)).is_pending()));
        }
        assert_eq!(relock(&gate.state).waiting.len(), 2);
    }
}
