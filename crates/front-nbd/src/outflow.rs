//! The outflow: gathers the replies that are ready and sends them with one system call, one send at a time.

use std::rc::Rc;

use spile_core::metrics::{Ended, now_ns};
use spile_core::{Disk, Result, Segment, Segments};

use crate::contexts::MOST_CONTEXTS;
use crate::session::{Answer, Reply, Runs, Session};
use crate::wire::reply::{self, MAX_HEADER_BYTES};

/// The room for the headers of one send, in bytes.
const HEAD_BYTES: usize = 32 << 10;
/// The most header bytes of one reply: a chunk header for each run of a read.
const HEAD_RESERVE_BYTES: usize = 1 << 10;
/// The most parts of one send: the kernel takes 1024.
const MAX_PARTS: usize = 1000;
/// The most parts of one reply: a read of 32 MiB in pieces of 2 MiB, cut into runs.
const PARTS_RESERVE: usize = 64;
/// A send of so many bytes takes no further reply, so that its first reply does not wait for the last.
const SEND_BYTES: usize = 1 << 20;

const _: () = assert!(MAX_HEADER_BYTES < HEAD_RESERVE_BYTES);
const _: () = assert!(MOST_CONTEXTS * 24 < HEAD_RESERVE_BYTES && 2 * MOST_CONTEXTS < PARTS_RESERVE);

/// Sends replies until the session ends.
pub(crate) async fn send_replies<D: Disk>(session: Rc<Session<D>>) {
    let mut batch = Batch::new(session.agreed.structured);
    loop {
        while let Some(reply) = batch.has_room().then(|| session.next_reply()).flatten() {
            session.gathered(&reply);
            batch.add(reply);
        }
        if batch.finished.is_empty() {
            if session.ended.get() {
                return;
            }
            session.outgoing.wait().await;
            continue;
        }
        if !session.broken.get() {
            session.holder.sends(true);
            if send(&session, batch.bytes, batch.parts()).await.is_err() {
                session.cut_off();
            }
            session.holder.sends(false);
        }
        let held = batch.held_bytes;
        batch.parts.clear(); // the buffers are free before the next request is let in
        session.depart(&batch.finished, held);
        batch.clear();
    }
}

/// Sends `parts` of so many bytes. Much is sent in pieces, so that a client that takes it slowly is seen to take some.
async fn send<D: Disk>(session: &Session<D>, bytes: usize, parts: &[Segment]) -> Result<()> {
    if bytes <= 2 * SEND_BYTES {
        return session.transport.send(parts).await;
    }
    for part in parts {
        for start in (0..part.len()).step_by(SEND_BYTES) {
            let piece = part.slice(start..part.len().min(start + SEND_BYTES));
            session.transport.send(&[piece]).await?;
            session.holder.sends(true);
            session.presence.heard(now_ns());
        }
    }
    Ok(())
}

/// The replies of one send. Its memory is used again for the next.
struct Batch {
    structured: bool,
    head: Segment,
    head_end: usize,
    /// The offset of the headers that are not yet among the parts.
    run_start: usize,
    parts: Vec<Segment>,
    bytes: usize,
    finished: Vec<Ended>,
    held_bytes: u64,
}

impl Batch {
    fn new(structured: bool) -> Self {
        Self {
            structured,
            head: spile_engine::pool().alloc(HEAD_BYTES),
            head_end: 0,
            run_start: 0,
            parts: Vec::new(),
            bytes: 0,
            finished: Vec::new(),
            held_bytes: 0,
        }
    }

    fn has_room(&self) -> bool {
        self.head_end + HEAD_RESERVE_BYTES <= HEAD_BYTES
            && self.parts.len() + PARTS_RESERVE <= MAX_PARTS
            && self.bytes < SEND_BYTES
    }

    fn clear(&mut self) {
        self.parts.clear();
        self.finished.clear();
        (self.head_end, self.run_start, self.bytes, self.held_bytes) = (0, 0, 0, 0);
    }

    fn parts(&mut self) -> &[Segment] {
        self.close_run();
        &self.parts
    }

    fn add(&mut self, reply: Reply) {
        self.finished.push(reply.finished());
        self.held_bytes += reply.held_bytes;
        let (cookie, offset) = (reply.request.cookie, reply.request.offset_bytes);
        match reply.answer {
            Answer::Done => self.header(&reply::simple(cookie, 0)),
            Answer::Failed { errno, message, at_start } if self.structured => {
                let at = at_start.then_some(offset);
                self.header(&reply::error(cookie, errno, &message, at));
            }
            Answer::Failed { errno, .. } => self.header(&reply::simple(cookie, errno)),
            Answer::Data(data, _) if !self.structured => {
                self.header(&reply::simple(cookie, 0));
                self.data(&data);
            }
            Answer::Data(data, runs) => self.chunks(cookie, offset, &data, &runs),
            Answer::Status(contexts) => {
                for (number, (id, descriptors, count)) in contexts.iter().enumerate() {
                    let is_last = number + 1 == contexts.len();
                    self.header(&reply::block_status(cookie, is_last, *id, *count));
                    self.data(descriptors);
                }
            }
        }
    }

    /// Adds the chunks of a structured reply to a read.
    fn chunks(&mut self, cookie: u64, offset: u64, data: &Segments, runs: &Runs) {
        let list = match runs {
            Runs::Whole if data.is_empty() => return self.header(&reply::none(cookie)),
            Runs::Whole => {
                self.header(&reply::offset_data(cookie, true, offset, data.len() as u32));
                return self.data(data);
            }
            Runs::Mixed(list) => list,
        };
        let mut at = 0;
        for (index, &(len, hole)) in list.iter().enumerate() {
            let done = index + 1 == list.len();
            let (from, len32) = (offset + at as u64, len as u32);
            if hole {
                self.header(&reply::offset_hole(cookie, done, from, len32));
            } else {
                self.header(&reply::offset_data(cookie, done, from, len32));
                self.data(&data.slice(at..at + len as usize));
            }
            at += len as usize;
        }
    }

    fn header(&mut self, bytes: &[u8]) {
        self.head.copy_from_slice(self.head_end, bytes);
        self.head_end += bytes.len();
        self.bytes += bytes.len();
    }

    fn data(&mut self, data: &Segments) {
        self.close_run();
        self.bytes += data.len();
        self.parts.extend(data.iter().cloned());
    }

    /// Adds the headers since the last part as one part.
    fn close_run(&mut self) {
        if self.run_start < self.head_end {
            self.parts.push(self.head.slice(self.run_start..self.head_end));
            self.run_start = self.head_end;
        }
    }
}
