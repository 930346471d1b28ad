//! [`Stage`]: what can be put between a front and a graph while the disk runs.
//!
//! Stages have fixed places, in the order of [`Place`]. The set of stages is published together with the graph, so attaching
//! or detaching a stage begins an epoch, and a request sees the same stages from its begin to its end.
//! A request that finds none pays for one look at the set.

use std::pin::Pin;
use std::sync::Arc;

use spile_core::{Disk, Io, Result};

use crate::end::{End, Ender};
use crate::shape::Shaper;

/// What a request waits for in a stage.
pub type Pending<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// Something that sees every request for data on its way to the graph, and its result on the way back.
///
/// A stage is called by dynamic dispatch: only requests that meet one pay for it. One that has nothing to wait for
/// returns `None`, and then allocates nothing.
pub trait Stage: Send + Sync + 'static {
    /// True when there is nothing to do for `io`, neither before it nor with its result: the stage is called no more for it then. To ask changes
    /// nothing.
    fn passes(&self, io: &Io<'_>) -> bool {
        let _ = io;
        false
    }

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
    /// Holds requests back: to keep a rate, or for the good of a job such as a merge that must catch up. This place stands above
    /// the epochs and above the bounce buffers, so a request that waits here holds neither. Behind it stands the
    /// disk's [`Shape`](crate::Shape), which is no [`Stage`], as it makes other requests of those that come.
    Limit,
    /// Notes which ranges change.
    ChangeTracking,
    /// Saves what a backup still has to copy, before a request changes it.
    Backup,
    /// Writes what is written to a second place as well.
    Mirror,
    /// Fails or delays requests, for tests.
    Fault,
}

impl Place {
    /// The number of places.
    pub const COUNT: usize = Self::ALL.len();

    /// All places, in the order in which a request passes them.
    pub const ALL: [Place; 5] = [Self::Limit, Self::ChangeTracking, Self::Backup, Self::Mirror, Self::Fault];

    /// The places behind the disk's shape begin with this one: they see parts of requests. [`Place::Limit`], before it, sees requests as
    /// the front made them.
    const BEHIND_SHAPE: usize = Self::ChangeTracking as usize;
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

    /// The stage itself.
    pub(crate) fn stage(&self) -> &dyn Stage {
        &*self.stage
    }
}

/// The stages of one epoch, by place.
#[derive(Clone, Default)]
pub(crate) struct Stages([Option<Arc<Attached>>; Place::COUNT]);

impl Stages {
    pub(crate) fn at(&mut self, place: Place) -> &mut Option<Arc<Attached>> {
        &mut self.0[place as usize]
    }

    /// The stage that holds requests back.
    pub(crate) fn limit(&self) -> Option<&Arc<Attached>> {
        self.0[Place::Limit as usize].as_ref()
    }

    pub(crate) fn behind_shape(&self) -> &[Option<Arc<Attached>>] {
        &self.0[Place::BEHIND_SHAPE..]
    }

    /// True when `io` keeps its shape, and the other stages have nothing to do for it.
    // A call of its own: the way of requests that meet no stage stays as short as it is.
    #[inline(never)]
    pub(crate) fn are_passed_by(&self, shaper: Option<&Shaper>, io: &Io<'_>) -> bool {
        self.behind_shape().iter().flatten().all(|attached| attached.stage.passes(io))
            && shaper.is_none_or(|shaper| !shaper.concerns(io))
    }

    /// True when there is none but perhaps the one at [`Place::Limit`].
    pub(crate) fn are_only_limits(&self) -> bool {
        self.behind_shape().iter().all(Option::is_none)
    }

    /// Takes `io`, which has passed [`Place::Limit`], through `shaper` and all other stages to `disk`, and back. `shaper` is `None` when
    /// requests stay as they are.
    pub(crate) async fn execute<D: Disk>(&self, disk: &D, shaper: Option<&Shaper>, io: Io<'_>) -> Result<()> {
        let stages = self.behind_shape();
        match shaper.filter(|shaper| shaper.concerns(&io)) {
            None => pass(stages, io, async || disk.execute(io).await).await,
            Some(shaper) => {
                shaper.execute(io, async |part| pass(stages, part, async || disk.execute(part).await).await).await
            }
        }
    }
}

/// Takes `io` through `stages`, has `on` do the rest, and takes the result back.
async fn pass(stages: &[Option<Arc<Attached>>], io: Io<'_>, on: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
    let mut result = Ok(());
    let mut passed = 0;
    for attached in stages {
        if let Some(pending) = attached.as_ref().and_then(|attached| attached.stage.before(io)) {
            result = pending.await;
        }
        if result.is_err() {
            break;
        }
        passed += 1;
    }
    if result.is_ok() {
        result = on().await;
    }
    for attached in stages[..passed].iter().rev().flatten() {
        if let Some(pending) = attached.stage.after(io, &result) {
            result = pending.await;
        }
    }
    result
}
