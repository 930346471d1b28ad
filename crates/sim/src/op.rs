//! One operation in flight: what it does, when it may go on, and how much of it is done.

use std::ops::Range;
use std::task::Waker;

use spile_core::{Result, Segments, Via};

use crate::faults::{Harm, How, Touch};

/// What an operation does.
pub(crate) enum Kind {
    Read {
        offset: u64,
        into: Segments,
    },
    Write {
        offset: u64,
        from: Segments,
        via: Via,
    },
    Zero {
        range: Range<u64>,
    },
    SetLen(u64),
    /// A sync, with the operations that were in flight when it was issued: the sync need not cover these.
    Sync {
        in_flight: Vec<u64>,
        number: u64,
    },
    /// Opening a file, or asking for its map: takes time, changes nothing.
    Ask,
}

impl Kind {
    pub fn name(&self) -> &'static str {
        match self {
            Kind::Read { .. } => "read",
            Kind::Write { via: Via::Direct, .. } => "write-direct",
            Kind::Write { .. } => "write-cached",
            Kind::Zero { .. } => "zero",
            Kind::SetLen(_) => "set-len",
            Kind::Sync { .. } => "sync",
            Kind::Ask => "ask",
        }
    }

    /// The bytes of the file that the operation touches. For `SetLen`, the range starts at the new length.
    pub fn range(&self) -> Range<u64> {
        match self {
            Kind::Read { offset, into } => *offset..offset + into.len() as u64,
            Kind::Write { offset, from, .. } => *offset..offset + from.len() as u64,
            Kind::Zero { range } => range.clone(),
            Kind::SetLen(len) => *len..*len,
            Kind::Sync { .. } | Kind::Ask => 0..0,
        }
    }

    /// The change it makes, if it makes one.
    pub fn touch(&self) -> Option<Touch> {
        let (how, bytes) = match self {
            Kind::Write { from, via, .. } => (How::Write(*via), from.to_vec()),
            Kind::Zero { .. } => (How::Zero, Vec::new()),
            Kind::SetLen(_) => (How::SetLen, Vec::new()),
            Kind::Read { .. } | Kind::Sync { .. } | Kind::Ask => return None,
        };
        Some(Touch { how, range: self.range(), bytes })
    }

    /// True when it changes the file.
    pub fn is_change(&self) -> bool {
        matches!(self, Kind::Write { .. } | Kind::Zero { .. } | Kind::SetLen(_))
    }
}

/// How far an operation has come.
pub(crate) enum Stage {
    /// `done_bytes` of it have taken effect.
    Working { done_bytes: usize },
    /// It has taken effect; the answer is on its way.
    Done(Result<()>),
}

pub(crate) struct Op {
    pub id: u64,
    pub file: usize,
    pub kind: Kind,
    /// The first step of the world at which the operation may go on.
    pub due: u64,
    pub stage: Stage,
    pub waker: Option<Waker>,
    /// True when the operation takes effect from its end backwards.
    pub backwards: bool,
    /// Sabotage: it answers before it takes effect.
    pub early: bool,
    /// The effects of sabotage on the change.
    pub harm: Harm,
}

impl Op {
    /// The next `len` bytes to take effect, after `done` bytes, counted from the operation's start.
    pub fn piece(&self, done: usize, len: usize) -> Range<usize> {
        let range = self.kind.range();
        let total = (range.end - range.start) as usize;
        if self.backwards { total - done - len..total - done } else { done..done + len }
    }
}
