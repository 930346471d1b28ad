//! [`Copy`]: copies what a disk held at a point in time to another disk.
//!
//! Some lanes take one piece after the other, each for itself: while one waits for the map, or looks at bytes, the storage has the transfers of the others.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use futures_util::future::join_all;
use spile_core::{Disk, Extent, Result, Segments, Store, Timer, yield_now};

use super::PointInTime;
use super::digests::{Digests, PIECE_BYTES};
use super::put::{Beneath, put, zero};
use crate::jobs::Job;

/// Pieces that are copied at a time.
const LANES: usize = 8;
/// Of these, so many while guests have requests, or a rate is to be kept.
const LANES_BESIDE_GUESTS: usize = 4;
/// So many pieces that are left out are gone through at once.
const TURN_PIECES: usize = 256;

/// A copy that is to be made.
pub struct Copy<'a, S: Store, G: Disk, D: Disk> {
    /// What is copied.
    pub from: &'a PointInTime<S, G>,
    /// Where it is copied to: a disk that is as long at least.
    pub to: &'a D,
    /// What that disk reads as where nothing was copied to.
    pub beneath: Beneath,
    /// Only these ranges are copied: in order, and no two touch. `None`: everything.
    pub changed: Option<&'a [Extent]>,
    /// What its users want of it.
    pub job: &'a Job,
    /// Lets time pass between pieces.
    pub timer: &'a dyn Timer,
}

/// What was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Bytes that were read, but for holes.
    pub read_bytes: u64,
    /// Bytes that were written as data.
    pub written_bytes: u64,
}

/// A piece to be copied, and the parts of it that are written.
struct Piece {
    extent: Extent,
    written: Vec<Extent>,
    /// It was a hole, but for what was saved of it.
    is_hole: bool,
}

/// What a lane has to do next.
enum Next {
    Copy(Piece),
    /// These bytes were zeroes.
    Zero(Extent),
}

/// What is known of what is left to do: one lane looks at it at a time.
struct Left {
    next: VecDeque<Next>,
    /// Runs of data of which nothing was begun. They are cut when their turn comes: a full disk is one run of millions of pieces.
    data: VecDeque<Extent>,
    /// From here on the disk's map was not looked at.
    at: u64,
}

/// What the lanes of a copy share.
struct Shared {
    left: async_lock::Mutex<Left>,
    digests: RefCell<Digests>,
    copied: Cell<Copied>,
    /// Bytes that were copied. Holes are no work, and do not count.
    done_bytes: Cell<u64>,
    /// A lane has failed.
    is_over: Cell<bool>,
    /// The count of guests' requests at the begin, until there were more.
    quiet_at: Cell<Option<u64>>,
}

impl<S: Store, G: Disk, D: Disk> Copy<'_, S, G, D> {
    /// Makes the copy and makes it durable. `digests` are those of what `to` holds before, and then of what the disk held.
    ///
    /// # Errors
    /// `Shutdown` when the job is to end; why the backup has failed; those of both disks.
    pub async fn run(&self, digests: &mut Digests) -> Result<Copied> {
        let shared = Shared {
            left: async_lock::Mutex::new(Left { next: VecDeque::new(), data: VecDeque::new(), at: 0 }),
            digests: RefCell::new(std::mem::take(digests)),
            copied: Cell::default(),
            done_bytes: Cell::new(0),
            is_over: Cell::new(false),
            quiet_at: Cell::new(Some(self.from.guests())),
        };
        let done = self.run_lanes(&shared).await;
        *digests = shared.digests.into_inner();
        done?;
        if self.changed.is_none() {
            zero(self.to, self.beneath, self.from.size_bytes()..self.to.info().size_bytes).await?;
        }
        self.to.flush().await?;
        self.from.check()?;
        Ok(shared.copied.get())
    }

    async fn run_lanes(&self, shared: &Shared) -> Result<()> {
        match self.changed {
            None => self.job.set_total(self.data_bytes().await?),
            Some(changed) => {
                // The disk may have been longer.
                shared.digests.borrow_mut().cut(self.from.size_bytes());
                let pieces = self.changed_pieces(changed).await;
                self.job.set_total(pieces.iter().map(|piece| piece.extent.len_bytes).sum());
                let mut left = shared.left.lock().await;
                left.next = pieces.into_iter().map(Next::Copy).collect();
                left.at = self.from.size_bytes();
            }
        }
        let lanes = join_all((0..LANES).map(|number| self.lane(number, shared))).await;
        lanes.into_iter().collect::<Result<()>>()?;
        // Guests may have made holes, or data, meanwhile.
        self.job.set_total(shared.done_bytes.get());
        Ok(())
    }

    /// How much of the disk is data now. Its map is looked at before anything is copied, so that it can be told how far the work is.
    async fn data_bytes(&self) -> Result<u64> {
        let (mut at, mut bytes) = (0, 0);
        while at < self.from.size_bytes() {
            let parts = self.from.parts(at).await?;
            bytes += parts.iter().filter(|part| !part.is_hole).map(|part| part.extent.len_bytes).sum::<u64>();
            at = parts.last().map_or(self.from.size_bytes(), |part| part.extent.end());
            self.job.go_on().await?;
        }
        Ok(bytes)
    }

    /// Takes one piece after the other until none is left, or a lane has failed.
    async fn lane(&self, number: usize, shared: &Shared) -> Result<()> {
        let mut buffer = None;
        while !shared.is_over.get() {
            if number >= LANES_BESIDE_GUESTS && !self.is_quiet(shared) {
                return Ok(());
            }
            let done = match self.next(shared).await {
                Ok(Some(next)) => {
                    let buffer = buffer.get_or_insert_with(|| Segments::zeroed(PIECE_BYTES as usize));
                    self.step(number, next, buffer, shared).await
                }
                Ok(None) => return Ok(()),
                Err(error) => Err(error),
            };
            if done.is_err() {
                shared.is_over.set(true);
                return done;
            }
        }
        Ok(())
    }

    /// True while guests have had no requests since the copy began, and there is no rate to keep.
    fn is_quiet(&self, shared: &Shared) -> bool {
        let guests = self.from.guests();
        shared.quiet_at.set(shared.quiet_at.get().filter(|before| *before == guests));
        shared.quiet_at.get().is_some() && self.job.wishes().limit_bytes_per_s.is_none()
    }

    /// What is to be done next; `None` at the end.
    async fn next(&self, shared: &Shared) -> Result<Option<Next>> {
        let mut left = shared.left.lock().await;
        loop {
            if let Some(next) = left.next.pop_front() {
                return Ok(Some(next));
            }
            if let Some(run) = left.data.pop_front() {
                let extent = Extent::from_range(run.start()..run.end().min(run.start() + PIECE_BYTES));
                if extent.end() < run.end() {
                    left.data.push_front(Extent::from_range(extent.end()..run.end()));
                }
                return Ok(Some(Next::Copy(Piece { extent, written: vec![extent], is_hole: false })));
            }
            if left.at >= self.from.size_bytes() {
                return Ok(None);
            }
            for part in self.from.parts(left.at).await? {
                match part.is_hole {
                    true => self.take_hole(part.extent, &mut left.next, shared),
                    false => left.data.push_back(part.extent),
                }
                left.at = part.extent.end();
            }
            self.job.go_on().await?;
        }
    }

    /// Adds what is to be done for a hole, which begins with a piece.
    fn take_hole(&self, hole: Extent, next: &mut VecDeque<Next>, shared: &Shared) {
        let mut saved: Vec<u64> = self.from.take_hole(hole).iter().map(|offset| offset / PIECE_BYTES).collect();
        saved.dedup();
        shared.digests.borrow_mut().note_hole(hole);
        let (mut done, end) = (hole.start(), hole.end());
        for piece in &saved {
            let extent = Extent::from_range(piece * PIECE_BYTES..((piece + 1) * PIECE_BYTES).min(end));
            next.extend((done < extent.start()).then(|| Next::Zero(Extent::from_range(done..extent.start()))));
            next.push_back(Next::Copy(Piece { extent, written: vec![extent], is_hole: true }));
            done = extent.end();
        }
        next.extend((done < end).then(|| Next::Zero(Extent::from_range(done..end))));
    }

    /// Does what is next, once it may be done.
    async fn step(&self, number: usize, next: Next, buffer: &Segments, shared: &Shared) -> Result<()> {
        let (bytes, extent) = match &next {
            // All lanes together keep the rate.
            Next::Copy(piece) => (piece.extent.len_bytes * LANES_BESIDE_GUESTS as u64, piece.extent),
            Next::Zero(extent) => (0, *extent),
        };
        let work = async {
            match &next {
                Next::Copy(piece) => self.piece(piece, &buffer.slice(0..extent.len_bytes as usize), shared).await?,
                Next::Zero(extent) => zero(self.to, self.beneath, extent.start()..extent.end()).await?,
            }
            Ok(bytes)
        };
        let (busy, is_over) = (|| self.from.guests(), || shared.is_over.get());
        self.job.piece_in_lane(self.timer, number == 0, busy, is_over, work).await?;
        if matches!(next, Next::Copy(_)) {
            shared.done_bytes.set(shared.done_bytes.get() + extent.len_bytes);
        }
        self.job.set_done(shared.done_bytes.get());
        Ok(())
    }

    /// What is to be copied of `changed`. The rest is left out.
    async fn changed_pieces(&self, changed: &[Extent]) -> Vec<Piece> {
        let size = self.from.size_bytes();
        let clip = |extent: &Extent| Extent::from_range(extent.start().min(size)..extent.end().min(size));
        let mut pieces: Vec<Piece> = Vec::new();
        for (number, extent) in changed.iter().map(clip).filter(|extent| !extent.is_empty()).enumerate() {
            if number % TURN_PIECES == 0 {
                yield_now().await;
            }
            let whole =
                extent.start() / PIECE_BYTES * PIECE_BYTES..extent.end().next_multiple_of(PIECE_BYTES).min(size);
            for piece in pieces_of(Extent::from_range(whole)) {
                let part = extent.start().max(piece.start())..extent.end().min(piece.end());
                match pieces.last_mut() {
                    Some(last) if last.extent == piece => last.written.push(Extent::from_range(part)),
                    _ => pieces.push(Piece { extent: piece, written: vec![Extent::from_range(part)], is_hole: false }),
                }
            }
        }
        // The piece in which the disk ends now may have been longer: what it holds is looked at anew.
        let tail = size / PIECE_BYTES * PIECE_BYTES..size;
        if !tail.is_empty() && pieces.last().is_none_or(|last| last.extent.start() < tail.start) {
            pieces.push(Piece { extent: Extent::from_range(tail), written: Vec::new(), is_hole: false });
        }
        let mut done = 0;
        for (number, piece) in pieces.iter().enumerate() {
            if number % TURN_PIECES == 0 {
                yield_now().await;
            }
            self.from.leave_out(Extent::from_range(done..piece.extent.start())).await;
            done = piece.extent.end();
        }
        self.from.leave_out(Extent::from_range(done..size)).await;
        pieces
    }

    /// Copies a piece through `bytes`, which is as long.
    async fn piece(&self, piece: &Piece, bytes: &Segments, shared: &Shared) -> Result<()> {
        match piece.is_hole {
            true => self.from.take_saved(piece.extent, bytes).await?,
            false => self.from.take(piece.extent, bytes).await?,
        }
        shared.digests.borrow_mut().note(piece.extent.start() / PIECE_BYTES, bytes);
        // To look at a mebibyte takes some tenths of a millisecond.
        yield_now().await;
        let mut written = 0;
        for part in &piece.written {
            let from = (part.start() - piece.extent.start()) as usize;
            let part_bytes = bytes.slice(from..from + part.len_bytes as usize);
            written += put(self.to, self.beneath, part.start(), &part_bytes).await?;
        }
        let before = shared.copied.get();
        shared.copied.set(Copied {
            read_bytes: before.read_bytes + piece.extent.len_bytes,
            written_bytes: before.written_bytes + written,
        });
        Ok(())
    }
}

/// The pieces of `extent`, which begins with one.
fn pieces_of(extent: Extent) -> impl Iterator<Item = Extent> {
    let starts = (extent.start()..extent.end()).step_by(PIECE_BYTES as usize);
    starts.map(move |start| Extent::from_range(start..extent.end().min(start + PIECE_BYTES)))
}
