//! [`Status`]: how far a move is, for those who look.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::mirror::Mirror;

/// What a move is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The disk's parents are copied, or compared with what is there.
    Parents,
    /// What the disk held at the begin is copied.
    Copying,
    /// What has changed since is copied.
    CatchingUp,
    /// The copy lacks next to nothing.
    InStep,
    /// The new place fails, and is tried again.
    Failing,
    /// The copy is whole. The other host is told to give it its name, and has not answered yet that it has.
    Naming,
    /// The disk is at its new place.
    Done,
}

impl Phase {
    /// Its name in JSON and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Parents => "copying parents",
            Self::Copying => "copying",
            Self::CatchingUp => "catching up",
            Self::InStep => "in step",
            Self::Failing => "failing",
            Self::Naming => "naming",
            Self::Done => "done",
        }
    }
}

/// How far a move is.
#[derive(Clone, Debug, PartialEq)]
pub struct Motion {
    /// What it is at.
    pub phase: Phase,
    /// How many of the disk's parents are at the new place, and how many are to be; `None` when the disk's chain is not kept.
    pub parents: Option<(usize, usize)>,
    /// Bytes in blocks that the copy lacks, or may lack.
    pub lag_bytes: u64,
    /// All that was written up to so many milliseconds ago is in the copy. `None` until all of the disk was copied once.
    pub lag_ms: Option<u64>,
    /// Guests' writes are held back now, because they come faster than they can be copied.
    pub is_holding: bool,
    /// How many writes were held back.
    pub held_writes: u64,
    /// The longest time for which requests waited for a hand-over, in microseconds; also for one that was put off.
    pub longest_stall_us: f64,
    /// For how many seconds the new place has failed.
    pub failing_for_s: Option<u64>,
    /// What has failed and is not the end of the move.
    pub trouble: Option<String>,
    /// Where the old image is, once the disk was handed over.
    pub old_image: Option<PathBuf>,
}

/// How far a move is, kept up to date by whoever does it.
pub struct Status {
    mirror: Arc<Mirror>,
    now: Mutex<Now>,
}

struct Now {
    phase: Phase,
    parents: Option<(usize, usize)>,
    /// What had ended by then is in the copy.
    copied_until: Option<Instant>,
    longest_stall: Duration,
    failing_since: Option<Instant>,
    trouble: Option<String>,
    old_image: Option<PathBuf>,
}

impl Status {
    pub(super) fn new(mirror: Arc<Mirror>) -> Self {
        let (copied_until, longest_stall) = (None, Duration::ZERO);
        let (phase, failing_since, trouble, old_image) = (Phase::Copying, None, None, None);
        let now = Now { phase, parents: None, copied_until, longest_stall, failing_since, trouble, old_image };
        Self { mirror, now: Mutex::new(now) }
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The job goes on with `phase`. When the new place has failed until now, that is over.
    pub(super) fn set_phase(&self, phase: Phase) {
        let mut now = self.now();
        if now.phase == Phase::Failing {
            (now.failing_since, now.trouble) = (None, None);
        }
        now.phase = phase;
    }

    /// So many of the disk's parents are at the new place.
    pub(super) fn set_parents(&self, done: usize, total: usize) {
        let mut now = self.now();
        now.parents = Some((done, total));
        now.phase = if done < total { Phase::Parents } else { Phase::Copying };
    }

    pub(super) fn set_copied_until(&self, moment: Instant) {
        self.now().copied_until = Some(moment);
    }

    pub(super) fn note_stall(&self, stall: Duration) {
        let mut now = self.now();
        now.longest_stall = now.longest_stall.max(stall);
    }

    /// The new place fails with this.
    pub(super) fn note_failure(&self, trouble: String) {
        let mut now = self.now();
        now.failing_since.get_or_insert_with(Instant::now);
        (now.phase, now.trouble) = (Phase::Failing, Some(trouble));
    }

    pub(super) fn set_trouble(&self, trouble: Option<String>) {
        self.now().trouble = trouble;
    }

    pub(super) fn set_old_image(&self, old_image: Option<PathBuf>) {
        self.now().old_image = old_image;
    }

    /// How far it is now.
    pub fn look(&self) -> Motion {
        let now = self.now();
        let is_done = now.phase == Phase::Done;
        let lag_bytes = if is_done { 0 } else { self.mirror.lag_bytes() };
        let lag = now.copied_until.map(|until| if lag_bytes == 0 { Duration::ZERO } else { until.elapsed() });
        Motion {
            phase: now.phase,
            parents: now.parents,
            lag_bytes,
            lag_ms: lag.map(|lag| lag.as_millis() as u64),
            is_holding: self.mirror.is_holding(),
            held_writes: self.mirror.held(),
            longest_stall_us: now.longest_stall.as_nanos() as f64 / 1e3,
            failing_for_s: now.failing_since.map(|since| since.elapsed().as_secs()),
            trouble: now.trouble.clone(),
            old_image: now.old_image.clone(),
        }
    }
}
