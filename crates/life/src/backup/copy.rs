//! [`Copy`]: copies what a disk held at a point in time to another disk.

use std::cell::{Cell, RefCell};

use futures_util::future::join_all;
use spile_core::{Disk, Extent, Result, Segments, Store, Timer, yield_now};

use super::digests::{Digests, PIECE_BYTES};
use super::put::{Beneath, put, zero};
use super::{Part, PointInTime, UNIT_BYTES};
use crate::jobs::Job;

/// Pieces that are copied at a time.
const IN_FLIGHT: usize = 4;
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

impl<S: Store, G: Disk, D: Disk> Copy<'_, S, G, D> {
    /// Makes the copy and makes it durable. `digests` are those of what `to` holds before, and then of what the disk held.
    ///
    /// # Errors
    /// `Shutdown` when the job is to end; why the backup has failed; those of both disks.
    pub async fn run(&self, digests: &mut Digests) -> Result<Copied> {
        let copied = Cell::new(Copied::default());
        let noted = RefCell::new(std::mem::take(digests));
        let done = match self.changed {
            None => self.copy_all(&noted, &copied).await,
            Some(changed) => self.copy_changed(changed, &noted, &copied).await,
        };
        *digests = noted.into_inner();
        done?;
        self.to.flush().await?;
        self.from.check()?;
        Ok(copied.get())
    }

    async fn copy_all(&self, digests: &RefCell<Digests>, copied: &Cell<Copied>) -> Result<()> {
        let size = self.from.size_bytes();
        self.job.set_total(size);
        let mut at = 0;
        while at < size {
            for part in self.from.parts(at).await? {
                self.part(part, digests, copied).await?;
                at = part.extent.end();
                self.job.set_done(at);
            }
        }
        zero(self.to, self.beneath, size..self.to.info().size_bytes).await
    }

    async fn part(&self, part: Part, digests: &RefCell<Digests>, copied: &Cell<Copied>) -> Result<()> {
        let whole = |extent: Extent| Piece { extent, written: vec![extent], is_hole: part.is_hole };
        if !part.is_hole {
            return self.pieces(pieces_of(part.extent).map(whole).collect(), digests, copied).await;
        }
        let mut saved: Vec<u64> =
            self.from.take_hole(part.extent).iter().map(|unit| unit * UNIT_BYTES / PIECE_BYTES).collect();
        saved.dedup();
        digests.borrow_mut().note_hole(part.extent);
        let mut done = part.extent.start();
        for piece in &saved {
            zero(self.to, self.beneath, done..piece * PIECE_BYTES).await?;
            done = ((piece + 1) * PIECE_BYTES).min(part.extent.end());
        }
        let rest = async { zero(self.to, self.beneath, done..part.extent.end()).await };
        self.job.piece(self.timer, 0, || 0, rest).await?;
        let extent =
            |piece: &u64| Extent::from_range(piece * PIECE_BYTES..((piece + 1) * PIECE_BYTES).min(part.extent.end()));
        self.pieces(saved.iter().map(|piece| whole(extent(piece))).collect(), digests, copied).await
    }

    async fn copy_changed(&self, changed: &[Extent], digests: &RefCell<Digests>, copied: &Cell<Copied>) -> Result<()> {
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
        let mut done = 0;
        for (number, piece) in pieces.iter().enumerate() {
            if number % TURN_PIECES == 0 {
                yield_now().await;
            }
            self.from.leave_out(Extent::from_range(done..piece.extent.start())).await;
            done = piece.extent.end();
        }
        self.from.leave_out(Extent::from_range(done..size)).await;
        self.job.set_total(pieces.iter().map(|piece| piece.extent.len_bytes).sum());
        let mut pieces = pieces.into_iter();
        let mut moved = 0;
        loop {
            let batch: Vec<Piece> = pieces.by_ref().take(IN_FLIGHT).collect();
            if batch.is_empty() {
                return Ok(());
            }
            moved += batch.iter().map(|piece| piece.extent.len_bytes).sum::<u64>();
            self.pieces(batch, digests, copied).await?;
            self.job.set_done(moved);
        }
    }

    /// Copies these pieces, some at a time.
    async fn pieces(&self, pieces: Vec<Piece>, digests: &RefCell<Digests>, copied: &Cell<Copied>) -> Result<()> {
        for batch in pieces.chunks(IN_FLIGHT) {
            let bytes = batch.iter().map(|piece| piece.extent.len_bytes).sum();
            let work = async {
                let done = join_all(batch.iter().map(|piece| self.piece(piece, digests, copied))).await;
                done.into_iter().collect()
            };
            self.job.piece(self.timer, bytes, || self.from.guests(), work).await?;
            let last = batch[batch.len() - 1].extent.end();
            if self.changed.is_none() {
                self.job.set_done(last);
            }
        }
        Ok(())
    }

    async fn piece(&self, piece: &Piece, digests: &RefCell<Digests>, copied: &Cell<Copied>) -> Result<()> {
        let bytes = Segments::zeroed(piece.extent.len_bytes as usize);
        match piece.is_hole {
            true => self.from.take_saved(piece.extent, &bytes).await?,
            false => self.from.take(piece.extent, &bytes).await?,
        }
        digests.borrow_mut().note(piece.extent.start() / PIECE_BYTES, &bytes);
        // To look at a mebibyte takes some tenths of a millisecond.
        yield_now().await;
        let mut written = 0;
        for part in &piece.written {
            let from = (part.start() - piece.extent.start()) as usize;
            let part_bytes = bytes.slice(from..from + part.len_bytes as usize);
            written += put(self.to, self.beneath, part.start(), &part_bytes).await?;
        }
        let before = copied.get();
        copied.set(Copied {
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
