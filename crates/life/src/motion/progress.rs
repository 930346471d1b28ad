//! [`Progress`]: how far a copy is, durably, so that the process after a kill or a power cut, on either side, copies only what is missing and what has
//! changed.
//!
//! # What is kept
//! From the begin of a move on, the disk's changed blocks are noted under the name [`MARK`] ([`Marks`](crate::Marks)). Blocks are copied from the begin of the
//! disk to its end, and the job's note says up to where they are durable in the half ([`Copied`]). So the half lacks at most what is behind that, and what has
//! changed since [`MARK`], whatever has been copied of it meanwhile.
//!
//! # Rules
//! 1. [`MARK`] is begun before the first block is read. Marks are durable before the data that they stand for.
//! 2. The note names a place in the disk only when all before it was copied, and a flush of the half that began after that has ended.
//! 3. The note names the half. It is forgotten before there can be another half that could be taken for this one.
//! 4. [`MARK`] moves forward, so that a copy that is kept in step for long does not have all to copy again that has changed since it began: changes are
//!    noted under [`NEXT`], too. All that was marked in the mirror when that has begun is copied, and the half flushed. Then [`NEXT`] takes the place of [`MARK`], in one
//!    step.
//! 5. Who goes on compares the half with the note, and asks whether the marks are known. In any doubt all is copied anew, into a new half.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::time::Duration;

use spile_core::{Error, Files};

use crate::jobs::Plan;
use crate::jobs::note::{Copied, Note};
use crate::work::{Marks, Work};

/// What the disk's changes are noted under while it is moved. No user can give that name.
pub(super) const MARK: &str = "\u{1}move";

/// What is to take the place of [`MARK`].
const NEXT: &str = "\u{1}move-next";

/// How often [`MARK`] moves forward, at most.
const FORWARD_EVERY: Duration = Duration::from_secs(5);

/// It moves forward only when so many times less was copied since than what is noted of a copy at once: 4 MiB.
const FORWARD_SHARE: u64 = 64;

/// How often the note is written anew, at most.
const NOTED_EVERY: Duration = Duration::from_secs(1);

/// Nothing is noted for a move any more.
///
/// # Errors
/// The system's.
pub(super) async fn forget_marks(marks: &dyn Marks) -> Result<(), Error> {
    marks.end(NEXT).await.and(marks.end(MARK).await)
}

/// How far a copy is.
pub(super) struct Progress {
    /// The disk and what is done with it, when that is noted.
    of: Option<(PathBuf, Plan)>,
    /// Which half it is, as the note says it. `None`: nothing can be noted.
    half: RefCell<Option<String>>,
    /// All before this is copied, but for what has changed since.
    reached_bytes: Cell<u64>,
    /// The same, as the note says it: it is durable.
    noted_bytes: Cell<u64>,
    noted_ns: Cell<u64>,
    /// When [`MARK`] began, or moved forward; and how much had been copied then.
    forward_ns: Cell<u64>,
    forward_bytes: Cell<u64>,
}

impl Progress {
    /// Nothing is copied yet by `plan`, which moves the disk at this path, if its job has a note.
    pub fn new(disk: Option<PathBuf>, plan: &Plan) -> Self {
        Self {
            of: disk.map(|disk| (disk, plan.clone())),
            half: RefCell::default(),
            reached_bytes: Cell::new(0),
            noted_bytes: Cell::new(0),
            noted_ns: Cell::new(0),
            forward_ns: Cell::new(0),
            forward_bytes: Cell::new(0),
        }
    }

    /// What a process before has noted, if the changes since are known.
    ///
    /// # Errors
    /// The system's.
    pub async fn left<F: Files>(&self, work: &Work<'_, F>) -> Result<Option<Copied>, Error> {
        let (Some((disk, _)), Some(marks)) = (&self.of, work.marks) else { return Ok(None) };
        let Some(copied) = Note::read(work.files, disk).await?.and_then(|note| note.copied) else { return Ok(None) };
        Ok(marks.changed(MARK, 0..0).await?.map(|_| copied))
    }

    /// The note says this from now on.
    ///
    /// # Errors
    /// The system's.
    pub async fn say<F: Files>(&self, work: &Work<'_, F>, copied: &Copied) -> Result<(), Error> {
        match &self.of {
            Some((disk, plan)) => Note::say_copied(work.files, disk, plan, Some(copied.clone())).await,
            None => Ok(()),
        }
    }

    /// From now on the note says nothing of what is copied: the half is to be another one. True when it said something.
    ///
    /// # Errors
    /// The system's.
    pub async fn forget<F: Files>(&self, work: &Work<'_, F>) -> Result<bool, Error> {
        let Some((disk, plan)) = &self.of else { return Ok(false) };
        let has_said = Note::read(work.files, disk).await?.is_some_and(|note| note.copied.is_some());
        if has_said {
            Note::say_copied(work.files, disk, plan, None).await?;
        }
        Ok(has_said)
    }

    /// Begins to note what changes, of a copy into the new half of this name.
    ///
    /// # Errors
    /// Why nothing can be noted: then the next process begins the move anew.
    pub async fn begin<F: Files>(&self, work: &Work<'_, F>, half: Option<String>) -> Result<(), Error> {
        let (Some(_), Some(half), Some(marks)) = (&self.of, half, work.marks) else { return Ok(()) };
        marks.begin(MARK).await?;
        self.half.replace(Some(half));
        Ok(())
    }

    /// Goes on with what was noted.
    pub fn go_on(&self, copied: Copied) {
        self.half.replace(Some(copied.half));
        self.noted_bytes.set(copied.until_bytes);
        self.reached_bytes.set(copied.until_bytes);
    }

    /// All before `until_bytes` is copied.
    pub fn reach(&self, until_bytes: u64) {
        self.reached_bytes.set(self.reached_bytes.get().max(until_bytes));
    }

    /// What was copied and not flushed may be lost.
    pub fn fall_back(&self) {
        self.reached_bytes.set(self.noted_bytes.get());
    }

    /// What [`Progress::note`] may say once a flush has ended that begins now.
    pub fn reached_bytes(&self) -> u64 {
        self.reached_bytes.get()
    }

    /// True when it is time to flush the half and to note that.
    pub fn is_due(&self, now_ns: u64) -> bool {
        let is_time = now_ns.saturating_sub(self.noted_ns.get()) >= NOTED_EVERY.as_nanos() as u64;
        is_time && self.half.borrow().is_some() && self.noted_bytes.get() < self.reached_bytes.get()
    }

    /// After what time [`MARK`] is to move forward, when `copied_bytes` were copied by now; `None` when it stays where it is.
    pub fn moves_in<F: Files>(&self, work: &Work<'_, F>, copied_bytes: u64) -> Option<Duration> {
        let is_much = copied_bytes - self.forward_bytes.get() >= work.sizes.noted_bytes / FORWARD_SHARE;
        let since = Duration::from_nanos(work.timer.now_ns().saturating_sub(self.forward_ns.get()));
        (is_much && self.is_noted()).then(|| FORWARD_EVERY.saturating_sub(since))
    }

    /// Begins to move [`MARK`] forward when it is time for that, and `copied_bytes` were copied by now. True: once all that is marked in the mirror now is
    /// copied, and the half flushed, [`Progress::moves_forward`] is to be called.
    pub async fn begins_to_move<F: Files>(&self, work: &Work<'_, F>, copied_bytes: u64) -> bool {
        let is_time = self.moves_in(work, copied_bytes) == Some(Duration::ZERO);
        let (Some(marks), true) = (work.marks, is_time) else { return false };
        let now_ns = work.timer.now_ns();
        self.forward_ns.set(now_ns);
        self.forward_bytes.set(copied_bytes);
        let has_begun = marks.begin(NEXT).await.is_ok();
        // A loss has taken both names, and the first one does not come back: then all is copied anew by the next process.
        has_begun && matches!(marks.changed(MARK, 0..0).await, Ok(Some(_)))
    }

    /// [`MARK`] is what was begun by [`Progress::begins_to_move`]. When that fails, it is where it was.
    pub async fn moves_forward<F: Files>(&self, work: &Work<'_, F>) {
        if let Some(marks) = work.marks {
            let _ = marks.rename(NEXT, MARK).await;
        }
    }

    /// True when the next process can go on with the half.
    pub fn is_noted(&self) -> bool {
        self.half.borrow().is_some() && self.noted_bytes.get() > 0
    }

    /// Notes that all before `until_bytes` is durable in the half. When that fails, the note says less, or this.
    pub async fn note<F: Files>(&self, work: &Work<'_, F>, until_bytes: u64) {
        self.noted_ns.set(work.timer.now_ns());
        let half = self.half.borrow().clone();
        let (Some((disk, plan)), Some(half)) = (&self.of, half) else { return };
        if until_bytes <= self.noted_bytes.get() {
            return;
        }
        let copied = Copied { until_bytes, half };
        if Note::say_copied(work.files, disk, plan, Some(copied)).await.is_ok() {
            self.noted_bytes.set(until_bytes);
        }
    }

    /// Nothing is noted any more: the move is over.
    ///
    /// # Errors
    /// The system's.
    pub async fn end<F: Files>(&self, work: &Work<'_, F>) -> Result<(), Error> {
        match work.marks {
            Some(marks) if self.of.is_some() => forget_marks(marks).await,
            _ => Ok(()),
        }
    }
}
