//! Why a worker that slept goes on: what its first turn after the sleep has found.
//!
//! Each sleep is counted under one cause. Where a turn finds several, the first of this order counts: a kick, a completion, a
//! message of another thread, a timer. Whatever else ends a sleep, such as a signal, counts as control.

use crate::op::{Kind, Op};

/// What ends a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// A guest or a client has asked for something: an event rang, or a socket became ready.
    Kick,
    /// A store has answered, or a helper thread has done an operation of a file.
    Completion,
    /// Another thread of this process wants something.
    Control,
    /// The time of a task that slept is over.
    Timer,
}

/// What was found since the last sleep began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    kick: bool,
    completion: bool,
    bell: bool,
}

impl Found {
    /// Something of this operation has ended.
    #[inline]
    pub(crate) fn end_of(&mut self, op: &Op) {
        match op.kind {
            // Nobody sleeps for it.
            Kind::Ring => {}
            kind if kind.is_file() || op.fd.is_store => self.completion = true,
            _ => self.kick = true,
        }
    }

    /// A helper thread or AIO has done something.
    #[inline]
    pub(crate) fn completion(&mut self) {
        self.completion = true;
    }

    /// The worker's doorbell was rung: there is a message.
    #[inline]
    pub(crate) fn bell(&mut self) {
        self.bell = true;
    }

    /// The cause of the end of a sleep; `None` when only the worker's messages can tell. `is_due`: a timer has expired.
    pub(crate) fn cause(self, is_due: bool) -> Option<Cause> {
        match self {
            Self { kick: true, .. } => Some(Cause::Kick),
            Self { completion: true, .. } => Some(Cause::Completion),
            Self { bell: true, .. } => None,
            _ if is_due => Some(Cause::Timer),
            _ => Some(Cause::Control),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_cause_counts() {
        let (kick, completion, bell) = (true, true, true);
        let none = Found::default();
        assert_eq!(Found { kick, completion, bell }.cause(true), Some(Cause::Kick));
        assert_eq!(Found { completion, bell, ..none }.cause(true), Some(Cause::Completion));
        assert_eq!(Found { bell, ..none }.cause(true), None);
        assert_eq!(none.cause(true), Some(Cause::Timer));
        assert_eq!(none.cause(false), Some(Cause::Control));
    }
}
