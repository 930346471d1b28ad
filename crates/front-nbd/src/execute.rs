//! Executes the commands of clients on the disk.

use std::cell::Cell;

use spile_core::metrics::now_ns;
use spile_core::{
    Disk, Error, ErrorKind, Extent, ExtentStatus, GuestOffset, Io, MAX_REQUEST_BYTES, Result, Segments, WriteZeroes,
};

use crate::contexts::{ChangedPart, Context, Selected, allocation_of, depth_of, describe, dirty};
use crate::errors::{wire_errno, wire_message};
use crate::session::{Answer, Job, Runs, Session};
use crate::wire::reply::STATE_ZERO;
use crate::wire::request::{Command, FLAG_DF, FLAG_FAST_ZERO, FLAG_FUA, FLAG_NO_HOLE, FLAG_REQ_ONE, Request};

/// For shorter reads, in bytes, the disk is not asked for holes: the question would cost more than sending zeroes.
const PROBE_BYTES: u64 = 64 << 10;
/// Shorter holes inside a read, in bytes, are sent as zeroes: another chunk costs the client more than copying them.
const MIN_HOLE_BYTES: u64 = 16 << 10;
/// The most runs into which a read is cut; the rest is sent as data.
const MAX_READ_RUNS: usize = 16;
/// The most descriptors of a block status reply.
const MAX_DESCRIPTORS: usize = 4096;
/// Buffers come from the pool in pieces of this many bytes: its largest class.
const PIECE_BYTES: usize = 2 << 20;

/// Page-aligned memory of `len` bytes, from this worker's pool.
///
/// # Errors
/// `Exhausted` when the system has no memory for it.
pub(crate) fn buffers(len: usize) -> Result<Segments> {
    let pool = spile_engine::pool();
    let found = match len {
        1..=PIECE_BYTES => pool.try_alloc(len).map(Segments::from),
        _ => (0..len).step_by(PIECE_BYTES).map(|at| pool.try_alloc(PIECE_BYTES.min(len - at))).collect(),
    };
    found.ok_or_else(|| Error::new(ErrorKind::Exhausted, "there is no memory for the data of this request"))
}

/// Learns whether it is worth while to ask the disk for holes. The question may take long, so after one that found no
/// hole none is asked for [`REST`] times as long as it took. The reads of a full disk thus lose at most 2 % of their
/// time, and holes in a sparse disk are found soon. A hole that was found has saved a read, so the next read asks
/// again.
#[derive(Default)]
pub(crate) struct HoleProbe {
    /// No question is asked before this time.
    next_ns: Cell<u64>,
}

const REST: u64 = 50;

impl HoleProbe {
    fn may_ask(&self, now_ns: u64) -> bool {
        now_ns >= self.next_ns.get()
    }

    fn learn(&self, asked_ns: u64, now_ns: u64, found: bool) {
        let rest_ns = if found { 0 } else { now_ns.saturating_sub(asked_ns) * REST };
        self.next_ns.set(now_ns + rest_ns);
    }
}

impl<D: Disk> Session<D> {
    /// Performs a checked request.
    pub(crate) async fn perform(&self, job: &Job) -> Answer {
        let request = &job.request;
        let done = match request.command {
            Command::Read => self.read(request).await,
            Command::Write => self.write(job).await.map(|()| Answer::Done),
            Command::Flush => self.execute(Io::flush()).await.map(|()| Answer::Done),
            Command::Trim => self.trim(request).await.map(|()| Answer::Done),
            Command::WriteZeroes => self.write_zeroes(request).await.map(|()| Answer::Done),
            Command::BlockStatus => self.block_status(request).await,
            // This command is a hint to fill a cache, and the data path keeps no cache of data.
            Command::Cache => Ok(Answer::Done),
            Command::Disconnect | Command::Unknown(_) => {
                Err(Error::new(ErrorKind::InvalidInput, "not a command to perform"))
            }
        };
        done.unwrap_or_else(|error| self.failed(request, &error))
    }

    fn failed(&self, request: &Request, error: &Error) -> Answer {
        if error.kind() == ErrorKind::Shutdown {
            // The request was left undone. An error would be a false answer: the client does it again on its next connection.
            self.cut_off();
        }
        let expected = error.kind() == ErrorKind::Unsupported;
        if !expected {
            self.server.log_failure(self.agreed.export, request, error);
        }
        let at_start = request.len_bytes > 0
            && matches!(request.command, Command::Read | Command::Write | Command::Trim | Command::BlockStatus);
        let errno = wire_errno(error, request.command, request.flags);
        Answer::Failed { errno, message: wire_message(error), at_start }
    }

    async fn read(&self, request: &Request) -> Result<Answer> {
        let extent = extent_of(request);
        if extent.is_empty() {
            return Ok(Answer::Data(Segments::new(), Runs::Whole));
        }
        let runs = self.runs(request, extent).await;
        if let Runs::Mixed(list) = &runs
            && list.iter().all(|&(_, hole)| hole)
            && !self.disk.may_hold_back()
        {
            return Ok(Answer::Data(Segments::new(), runs));
        }
        let into = buffers(extent.len_bytes as usize)?;
        self.execute(Io::read(extent, &into)).await?;
        Ok(Answer::Data(into, runs))
    }

    /// Cuts a read into data and holes. When the map of the disk cannot be read, all of the read is data.
    async fn runs(&self, request: &Request, extent: Extent) -> Runs {
        let wanted = self.agreed.structured && request.flags & FLAG_DF == 0;
        if !wanted || extent.len_bytes < PROBE_BYTES {
            return Runs::Whole;
        }
        let asked_ns = now_ns();
        if !self.holes.may_ask(asked_ns) {
            return Runs::Whole;
        }
        let runs = match self.disk.extents(extent, MAX_READ_RUNS).await {
            Ok(map) => cut_runs(&map, extent),
            Err(_) => Runs::Whole,
        };
        let found = matches!(runs, Runs::Mixed(_));
        self.holes.learn(asked_ns, now_ns(), found);
        runs
    }

    async fn write(&self, job: &Job) -> Result<()> {
        let extent = extent_of(&job.request);
        if extent.is_empty() {
            return Ok(());
        }
        self.execute(Io::write(extent, &job.payload, job.request.flags & FLAG_FUA != 0)).await
    }

    async fn trim(&self, request: &Request) -> Result<()> {
        for part in parts(extent_of(request)) {
            self.check_heard()?;
            match self.execute(Io::discard(part)).await {
                // A trim is a hint: it succeeds also when the disk cannot free anything.
                Err(error) if error.kind() == ErrorKind::Unsupported => break,
                other => other?,
            }
        }
        self.flush_if(request.flags & FLAG_FUA != 0).await
    }

    async fn write_zeroes(&self, request: &Request) -> Result<()> {
        let how = WriteZeroes {
            may_unmap: request.flags & FLAG_NO_HOLE == 0,
            only_if_fast: request.flags & FLAG_FAST_ZERO != 0,
        };
        for part in parts(extent_of(request)) {
            self.check_heard()?;
            self.execute(Io::write_zeroes(part, how)).await?;
        }
        self.flush_if(request.flags & FLAG_FUA != 0).await
    }

    /// Checks, between the parts of a long request, whether the connection is over. A server that is to end does not
    /// wait until 4 GiB of zeroes are written.
    fn check_heard(&self) -> Result<()> {
        match self.is_forsaken() {
            true => Err(Error::new(ErrorKind::Shutdown, "the connection is over")),
            false => Ok(()),
        }
    }

    async fn flush_if(&self, fua: bool) -> Result<()> {
        if fua { self.execute(Io::flush()).await } else { Ok(()) }
    }

    /// One chunk for each context. Each describes the request's bytes from their start on, as far as its own descriptors go.
    async fn block_status(&self, request: &Request) -> Result<Answer> {
        let contexts = &self.agreed.contexts;
        let one = request.flags & FLAG_REQ_ONE != 0;
        let limit = if one { 1 } else { (MAX_DESCRIPTORS / contexts.len().max(1)).max(1) };
        let extent = extent_of(request);
        let needs_map = contexts.iter().any(|selected| !matches!(selected.context, Context::Bitmap(_)));
        // Runs that differ in what one context says may be one descriptor of another.
        let map = if needs_map { self.disk.extents(extent, limit).await? } else { Vec::new() };
        let mut chunks = Vec::with_capacity(contexts.len());
        for Selected { id, context } in contexts {
            let descriptors = match context {
                Context::Allocation => describe(&map, extent, limit, allocation_of),
                Context::Depth => describe(&map, extent, limit, depth_of),
                Context::Bitmap(name) => dirty(&self.changed(name, extent).await?, extent, limit),
            };
            let out = buffers(descriptors.len() * 8)?;
            for (at, (len, flags)) in descriptors.iter().enumerate() {
                out.copy_from_slice(at * 8, &len.to_be_bytes());
                out.copy_from_slice(at * 8 + 4, &flags.to_be_bytes());
            }
            chunks.push((*id, out, descriptors.len() as u32));
        }
        Ok(Answer::Status(chunks))
    }

    async fn changed(&self, name: &str, extent: Extent) -> Result<ChangedPart> {
        match &self.checkpoints {
            Some(checkpoints) => checkpoints.changed(name, extent).await,
            None => Err(Error::new(ErrorKind::NotFound, "the disk has no checkpoints any more")),
        }
    }
}

fn extent_of(request: &Request) -> Extent {
    Extent { offset: GuestOffset(request.offset_bytes), len_bytes: u64::from(request.len_bytes) }
}

/// Cuts a long extent at multiples of the largest request: trims and zeroes have no limit on the wire.
fn parts(extent: Extent) -> impl Iterator<Item = Extent> {
    let mut at = extent.start();
    std::iter::from_fn(move || {
        let next = (at / MAX_REQUEST_BYTES + 1).saturating_mul(MAX_REQUEST_BYTES).min(extent.end());
        let part = Extent::from_range(at..next);
        at = next;
        (!part.is_empty()).then_some(part)
    })
}

/// The runs of a read. Small holes count as data, and so does what the map leaves out; neighbours of one kind are
/// joined.
fn cut_runs(map: &[ExtentStatus], extent: Extent) -> Runs {
    let mut runs: Vec<(u64, bool)> = Vec::new();
    let mut push = |len: u64, hole: bool| match runs.last_mut() {
        _ if len == 0 => {}
        Some(last) if last.1 == hole => last.0 += len,
        _ => runs.push((len, hole)),
    };
    let mut left = extent.len_bytes;
    for (len, flags) in describe(map, extent, usize::MAX, allocation_of) {
        let len = u64::from(len).min(left);
        push(len, flags & STATE_ZERO != 0 && len >= MIN_HOLE_BYTES.min(extent.len_bytes));
        left -= len;
    }
    push(left, false);
    if runs.iter().any(|run| run.1) { Runs::Mixed(runs) } else { Runs::Whole }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use spile_core::ExtentKind;

    use super::*;

    fn map(lens: &[(u64, u8)]) -> Vec<ExtentStatus> {
        let mut at = 0;
        let mut list = Vec::new();
        for &(len, kind) in lens {
            let kind = [ExtentKind::Data, ExtentKind::Zero, ExtentKind::Hole][kind as usize % 3];
            list.push(ExtentStatus { extent: Extent::from_range(at..at + len), kind, depth: 0 });
            at += len;
        }
        list
    }

    proptest! {
        #[test]
        fn runs_cover_the_read_exactly(lens in prop::collection::vec((1u64..200_000, any::<u8>()), 0..20), len in 1u64..2_000_000) {
            let extent = Extent::from_range(0..len);
            if let Runs::Mixed(runs) = cut_runs(&map(&lens), extent) {
                prop_assert_eq!(runs.iter().map(|run| run.0).sum::<u64>(), len);
                prop_assert!(runs.iter().all(|run| run.0 > 0));
                prop_assert!(runs.windows(2).all(|pair| pair[0].1 != pair[1].1));
            }
        }

        #[test]
        fn descriptors_never_pass_the_request(lens in prop::collection::vec((1u64..200_000, any::<u8>()), 0..20), len in 1u64..2_000_000, limit in 1usize..9) {
            let out = describe(&map(&lens), Extent::from_range(0..len), limit, allocation_of);
            prop_assert!(!out.is_empty() && out.len() <= limit);
            prop_assert!(out.iter().all(|descriptor| descriptor.0 > 0));
            prop_assert!(out.iter().map(|descriptor| u64::from(descriptor.0)).sum::<u64>() <= len);
            prop_assert!(out.windows(2).all(|pair| pair[0].1 != pair[1].1));
        }

        #[test]
        fn parts_cover_the_extent_at_multiples(start in 0u64..1 << 40, len in 0u64..1 << 32) {
            let extent = Extent::from_range(start..start + len);
            let mut at = start;
            for part in parts(extent) {
                prop_assert_eq!(part.start(), at);
                prop_assert!(part.len_bytes <= MAX_REQUEST_BYTES);
                prop_assert!(part.end() == extent.end() || part.end() % MAX_REQUEST_BYTES == 0);
                at = part.end();
            }
            prop_assert_eq!(at, extent.end());
        }
    }

    #[test]
    fn questions_take_a_small_share_of_the_time() {
        let probe = HoleProbe::default();
        let (mut now_ns, mut asking_ns) = (0, 0);
        while now_ns < 1_000_000 {
            if probe.may_ask(now_ns) {
                probe.learn(now_ns, now_ns + 1000, false);
                (now_ns, asking_ns) = (now_ns + 1000, asking_ns + 1000);
            }
            now_ns += 100;
        }
        assert!(asking_ns > 0 && asking_ns * 50 <= now_ns, "{asking_ns} of {now_ns}");
        probe.learn(now_ns, now_ns + 1000, true);
        assert!(probe.may_ask(now_ns + 1000), "a hole makes curious");
    }
}
