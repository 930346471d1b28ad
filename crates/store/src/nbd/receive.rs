//! Replies as they come: each is matched with its request, checked against what was asked, and its data are received
//! straight into the caller's memory.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::ops::Range;

use spile_core::{Error, ErrorKind, Result, Segment, Segments};
use spile_nbd_tls::Transport;
use spile_nbd_wire::client::{ReplyHead, SIMPLE_REPLY_BYTES, chunk_block_status, chunk_error};
use spile_nbd_wire::reply::{TYPE_BLOCK_STATUS, TYPE_NONE, TYPE_OFFSET_DATA, TYPE_OFFSET_HOLE};

use super::call::{Ask, Call, Runs};
use super::link::Link;

/// Room for the answers to a batch of small reads, in bytes.
const BUFFER_BYTES: usize = 256 << 10;
/// The longest chunk beside one of data, in bytes.
const MAX_CHUNK_BYTES: usize = 1 << 20;
/// Data are received in pieces of this many bytes at most: after each the server counts as heard.
const PIECE_BYTES: usize = 256 << 10;
/// A read may come in parts of a sector, in any order; a small one in these many parts of any length.
const PART_BYTES: usize = 512;
const MIN_PARTS: usize = 64;

pub(super) fn broken(what: &str) -> Error {
    Error::new(ErrorKind::Protocol, format!("the server broke the protocol: {what}"))
}

/// Takes the replies of one connection.
pub(super) struct Receiver<'a> {
    link: &'a Link,
    transport: &'a Transport,
    structured: bool,
    allocation: Option<u32>,
    buffer: Segment,
    filled: Range<usize>,
    /// Structured replies of which some chunks have come.
    begun: HashMap<u64, Begun>,
}

/// What has come of a structured reply.
#[derive(Default)]
struct Begun {
    parts: Parts,
    runs: Runs,
    error: Option<Error>,
}

/// The parts of a read that have come: the ends of ranges by their starts. Ranges that touch are one.
#[derive(Default)]
struct Parts(BTreeMap<u64, u64>);

impl Parts {
    /// Adds a part. False when some of it has come already.
    fn add(&mut self, mut start: u64, mut end: u64) -> bool {
        let before = self.0.range(..end).next_back().map(|(start, end)| (*start, *end));
        match before {
            Some((_, before_end)) if before_end > start => return false,
            Some((before_start, before_end)) if before_end == start => start = before_start,
            _ => {}
        }
        if let Some(after_end) = self.0.remove(&end) {
            end = after_end;
        }
        self.0.insert(start, end);
        true
    }

    /// How many bytes have come.
    fn len_bytes(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }
}

impl<'a> Receiver<'a> {
    pub(super) fn new(link: &'a Link, transport: &'a Transport, structured: bool, allocation: Option<u32>) -> Self {
        let buffer = Segment::zeroed(BUFFER_BYTES);
        Self { link, transport, structured, allocation, buffer, filled: 0..0, begun: HashMap::new() }
    }

    /// Takes replies until the connection ends.
    pub(super) async fn run(&mut self) -> Result<Infallible> {
        loop {
            let head = self.take::<SIMPLE_REPLY_BYTES>().await?;
            match ReplyHead::parse(&head).ok_or_else(|| broken("a reply without its magic"))? {
                ReplyHead::Simple { errno, cookie } => self.simple(errno, cookie).await?,
                ReplyHead::Chunk { done, kind, cookie } if self.structured => self.chunk(done, kind, cookie).await?,
                ReplyHead::Chunk { .. } => return Err(broken("a structured reply that nobody asked for")),
            }
        }
    }

    async fn simple(&mut self, errno: u32, cookie: u64) -> Result<()> {
        let call = self.link.sent(cookie).ok_or_else(|| broken("a reply to nothing"))?;
        let outcome = match (&call.ask, errno) {
            (Ask::Status, 0) => return Err(broken("a block status without its runs")),
            (Ask::Read(_), 0) if self.structured => return Err(broken("a simple reply with data")),
            (Ask::Read(into), 0) => self.receive(into).await.map(|()| Runs::new())?,
            (_, 0) => Runs::new(),
            _ => {
                self.link.answer(cookie, Err(refused(&call, errno, "")));
                return Ok(());
            }
        };
        self.link.answer(cookie, Ok(outcome));
        Ok(())
    }

    async fn chunk(&mut self, done: bool, kind: u16, cookie: u64) -> Result<()> {
        let call = self.link.sent(cookie).ok_or_else(|| broken("a chunk for nothing"))?;
        let len = u32::from_be_bytes(self.take::<4>().await?) as usize;
        match (kind, &call.ask) {
            (TYPE_NONE, _) if len == 0 && done => {}
            (TYPE_OFFSET_DATA, Ask::Read(into)) if len > 8 => {
                let at = u64::from_be_bytes(self.take::<8>().await?);
                let part = self.part(&call, cookie, at, len as u64 - 8)?;
                self.receive(&into.slice(part)).await?;
            }
            (TYPE_OFFSET_HOLE, Ask::Read(into)) if len == 12 => {
                let at = u64::from_be_bytes(self.take::<8>().await?);
                let zeroes = u32::from_be_bytes(self.take::<4>().await?);
                let part = self.part(&call, cookie, at, u64::from(zeroes))?;
                into.slice(part).fill(0);
            }
            (TYPE_BLOCK_STATUS, Ask::Status) if len <= MAX_CHUNK_BYTES => {
                let data = self.take_vec(len).await?;
                let (context, runs) = chunk_block_status(&data).ok_or_else(|| broken("a bad block status"))?;
                if Some(context) == self.allocation {
                    self.begun.entry(cookie).or_default().runs = runs;
                }
            }
            (kind, _) if kind >> 15 == 1 && len <= MAX_CHUNK_BYTES => {
                let data = self.take_vec(len).await?;
                let (errno, words) = chunk_error(&data).ok_or_else(|| broken("a bad error"))?;
                self.begun.entry(cookie).or_default().error.get_or_insert_with(|| refused(&call, errno, &words));
            }
            _ => return Err(broken("a chunk that does not go with its request")),
        }
        if done { self.finish(&call, cookie) } else { Ok(()) }
    }

    /// Checks that a part of a read lies within the request and came only once.
    fn part(&mut self, call: &Call, cookie: u64, at: u64, len: u64) -> Result<Range<usize>> {
        let start = at.checked_sub(call.offset).ok_or_else(|| broken("data before what was asked for"))?;
        let end = start.checked_add(len).filter(|end| *end <= u64::from(call.len));
        let end = end.ok_or_else(|| broken("data past what was asked for"))?;
        let parts = &mut self.begun.entry(cookie).or_default().parts;
        let most = (call.len as usize / PART_BYTES).max(MIN_PARTS);
        if len == 0 || parts.0.len() >= most || !parts.add(start, end) {
            return Err(broken("a read's data in parts that make no sense"));
        }
        Ok(start as usize..end as usize)
    }

    fn finish(&mut self, call: &Call, cookie: u64) -> Result<()> {
        let begun = self.begun.remove(&cookie).unwrap_or_default();
        let outcome = match (begun.error, &call.ask) {
            (Some(error), _) => Err(error),
            (None, Ask::Read(_)) if begun.parts.len_bytes() != u64::from(call.len) => {
                return Err(broken("a read without all of its data"));
            }
            (None, Ask::Status) if begun.runs.is_empty() => return Err(broken("a block status without its runs")),
            (None, _) => Ok(begun.runs),
        };
        self.link.answer(cookie, outcome);
        Ok(())
    }

    async fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.take_slice(&mut bytes).await?;
        Ok(bytes)
    }

    async fn take_vec(&mut self, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.take_slice(&mut bytes).await?;
        Ok(bytes)
    }

    async fn take_slice(&mut self, bytes: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            if self.filled.is_empty() {
                // Boxed, and so are other rare waits: what a future may hold is moved at each call.
                let got = Box::pin(self.transport.recv(&self.buffer)).await?;
                if got == 0 {
                    return Err(hung_up());
                }
                self.filled = 0..got;
                self.link.heard();
            }
            let len = self.filled.len().min(bytes.len() - done);
            self.buffer.copy_to_slice(self.filled.start, &mut bytes[done..done + len]);
            self.filled.start += len;
            done += len;
        }
        Ok(())
    }

    /// Receives data: what has come already is copied, the rest goes where it belongs.
    async fn receive(&mut self, into: &Segments) -> Result<()> {
        for segment in into.iter() {
            let here = self.filled.len().min(segment.len());
            segment.slice(0..here).copy_from(&self.buffer.slice(self.filled.start..self.filled.start + here));
            self.filled.start += here;
            for start in (here..segment.len()).step_by(PIECE_BYTES) {
                let piece = segment.slice(start..segment.len().min(start + PIECE_BYTES));
                if !Box::pin(self.transport.recv_exact(&piece)).await? {
                    return Err(hung_up());
                }
                self.link.heard();
            }
        }
        Ok(())
    }
}

fn hung_up() -> Error {
    Error::new(ErrorKind::Io, "the server hung up")
}

/// The error that the server reports. Its numbers are those of Linux, as far as the protocol has them.
fn refused(call: &Call, errno: u32, words: &str) -> Error {
    let what = match call.ask {
        Ask::Read(_) => "the server failed to read",
        Ask::Write { .. } => "the server failed to write",
        Ask::Flush => "the server failed to flush",
        Ask::Zero { .. } => "the server failed to write zeroes",
        Ask::Status => "the server failed to tell what is data",
    };
    let words: String = words.chars().take(200).collect();
    let what = if words.is_empty() { what.to_owned() } else { format!("{what} ({words:?})") };
    match errno {
        1 | 5 | 12 | 22 | 28 | 75 | 95 => Error::errno(what, errno as i32),
        108 => Error::new(ErrorKind::Io, format!("{what}: it is shutting down")),
        _ => Error::new(ErrorKind::Io, format!("{what}: error {errno}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_touch_are_one_and_none_comes_twice() {
        let mut parts = Parts::default();
        for (start, end) in [(8, 12), (0, 4), (20, 24), (12, 20)] {
            assert!(parts.add(start, end), "{start}");
        }
        assert_eq!(parts.0, BTreeMap::from([(0, 4), (8, 24)]));
        for (start, end) in [(0, 1), (3, 5), (7, 9), (4, 9), (0, 30), (4, 30), (10, 11), (23, 25)] {
            assert!(!parts.add(start, end), "{start}");
        }
        assert!(parts.add(4, 8));
        assert_eq!((parts.0.len(), parts.len_bytes()), (1, 24));
    }
}
