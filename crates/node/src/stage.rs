//! [`Stage`]: what can be put between a front and a graph while the disk runs.
//!
//! Stages have fixed places, in the order of [`Place`]. The set of stages is published together with the graph, so attaching
//! or detaching a stage begins an epoch, and a request sees the same stages from its begin to its end.
//! A request that finds none pays for one look at the set.

use std::pin::Pin;
use std::sync::Arc;

use spile_core::{Disk, Io, Result};

use crate::end::{End, Ender};

/// What a request waits for in a stage.
pub type Pending<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// Something that sees every request for data on its way to the graph, and its result on the way back.
///
/// A stage is called by dynamic dispatch: only requests that meet one pay for it. One that has nothing to wait for
/// returns `None`, and then allocates nothing.
pub trait Stage: Send + Sync + 'static {
    /// Sees a request before it goes on. `None` lets it go on at once; else it goes on when the future ends, and fails here
    /// when that is with an error.
    fn before<'a>(&'a self, io: Io<'a>) -> Option<Pending<'a>>;

    /// Sees the result of a request that this stage let go on. `None` leaves the result as it is; else the
    /// future's result takes its place.
    fn after<'a>(&'a self, io: Io<'a>, result: &Result<()>) -> Option<Pending<'a>>;
}

/// Where a stage stands. A request passes the places in this order, its result in the reverse one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Holds requests back to keep a rate.
    Limit,
    /// Holds requests back for the good of a job, such as a merge that must catch up.
    Shape,
    /// Notes which ranges change.
    ChangeTracking,
    /// Writes what is written to a second place as well.
    Mirror,
    /// Fails or delays requests, for tests.
    Fault,
}

impl Place {
    /// The number of places.
    pub const COUNT: usize = Self::ALL.len();

    /// All places, in the order in which a request passes them.
    pub const ALL: [Place; 5] = [Self::Limit, Self::Shape, Self::ChangeTracking, Self::Mirror, Self::Fault];
}

/// A stage at its place. Each set of stages that has it keeps a share, and so each request that passes it.
pub(crate) struct Attached {
    stage: Arc<dyn Stage>,
    end: Arc<End>,
    _ender: Ender,
}

impl Attached {
    pub(crate) fn new(stage: Arc<dyn Stage>) -> Arc<Self> {
        let (end, ender) = End::new();
        Arc::new(Self { stage, end, _ender: ender })
    }

    /// Comes when no request is inside the stage and none can get there.
    pub(crate) fn end(&self) -> Arc<End> {
        self.end.clone()
    }
}

/// The stages of one epoch, by place.
#[derive(Clone, Default)]
pub(crate) struct Stages([Option<Arc<Attached>>; Place::COUNT]);

impl Stages {
    pub(crate) fn at(&mut self, place: Place) -> &mut Option<Arc<Attached>> {
        &mut self.0[place as usize]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// Takes `io` through all stages, to `disk`, and back.
    pub(crate) async fn execute<D: Disk>(&self, disk: &D, io: Io<'_>) -> Result<()> {
        let mut result = Ok(());
        let mut passed = 0;
        for attached in self.0.iter() {
            if let Some(pending) = attached.as_ref().and_then(|attached| attached.stage.before(io)) {
                result = pending.await;
            }
            if result.is_err() {
                break;
            }
            passed += 1;
        }
        if result.is_ok() {
            result = disk.execute(io).await;
        }
        for attached in self.0[..passed].iter().rev().flatten() {
            if let Some(pending) = attached.stage.after(io, &result) {
                result = pending.await;
            }
        }
        result
    }
}
