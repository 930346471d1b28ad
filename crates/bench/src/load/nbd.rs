//! NBD under load: pipelined requests on one socket.
//!
//! All that waits goes out in one `sendmsg`; one blocking `recv` takes as many replies as there are. Sending never blocks (a
//! server may stop reading until its replies are taken); only when the socket is full does a wait look in both directions.

use std::collections::VecDeque;
use std::io::{ErrorKind as IoKind, IoSlice, Read, Write};
use std::ops::Range;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use smallvec::SmallVec;
use spile_core::{Error, ErrorKind, Result};

use super::pump::{STUCK_AFTER, stuck};
use super::transport::{Endpoint, Info, Kind, Shape, Transport};
use crate::nbd_client::{
    Client, Command, FLAG_FUA, REPLY_BYTES, REQUEST_BYTES, Stream, parse_reply, request_header, server_error,
};
use spile_server::uri::NbdUri;

/// Slices in one `sendmsg` (the system allows 1024).
const SLICES: usize = 256;

/// Connections after their handshake.
pub struct NbdEndpoint {
    clients: Vec<Client>,
}

impl NbdEndpoint {
    /// Connects so often to one export.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect(uri: &NbdUri, connections: u32) -> Result<Self> {
        let clients = (0..connections).map(|_| Client::connect(uri)).collect::<Result<_>>()?;
        Ok(Self { clients })
    }
}

impl Endpoint for NbdEndpoint {
    type Transport = NbdTransport;

    fn info(&self) -> Info {
        let export = self.clients[0].info();
        Info {
            size_bytes: export.size_bytes,
            read_only: export.flags.read_only(),
            flush: export.flags.flush(),
            fua: export.flags.fua(),
            min_block_bytes: export.min_block_bytes.max(1),
            max_block_bytes: export.max_block_bytes,
        }
    }

    fn run<R>(self, shape: Shape, run: impl FnOnce(Vec<NbdTransport>) -> Result<R>) -> Result<(R, u32)> {
        let transports = self.clients.into_iter().map(|client| NbdTransport::new(shape, client.into_stream()));
        Ok((run(transports.collect())?, 0))
    }
}

#[derive(Debug)]
struct Slot {
    kind: Kind,
    /// The cookie of the request in flight; 0 = free.
    cookie: u64,
    offset_bytes: u64,
    header: [u8; REQUEST_BYTES],
    payload: Vec<u8>,
}

/// Bytes from the socket that were not looked at yet.
#[derive(Debug)]
struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// A read's data that nobody wants: its slot, and the bytes still to come.
    skipping: Option<(usize, usize)>,
    /// The data of the read that was taken last.
    data: Range<usize>,
}

/// One connection.
#[derive(Debug)]
pub struct NbdTransport {
    shape: Shape,
    stream: Stream,
    slots: Vec<Slot>,
    outgoing: VecDeque<usize>,
    /// Bytes of the first outgoing request that were sent.
    sent: usize,
    inbox: Inbox,
    next_cookie: u64,
}

impl NbdTransport {
    fn new(shape: Shape, stream: Stream) -> Self {
        let reply = shape.block_bytes as usize + REPLY_BYTES;
        let slots: Vec<Slot> = (0..shape.depth).map(|_| Slot::new(shape)).collect();
        Self {
            outgoing: VecDeque::with_capacity(slots.len()),
            slots,
            sent: 0,
            inbox: Inbox::new((2 * reply).max(256 << 10)),
            next_cookie: 1,
            shape,
            stream,
        }
    }

    fn slices(&self) -> SmallVec<[IoSlice<'_>; SLICES]> {
        let mut slices = SmallVec::new();
        let mut skip = self.sent;
        for slot in &self.outgoing {
            if slices.len() + 2 > SLICES {
                break;
            }
            for part in self.slots[*slot].parts() {
                let cut = skip.min(part.len());
                skip -= cut;
                if cut < part.len() {
                    slices.push(IoSlice::new(&part[cut..]));
                }
            }
        }
        slices
    }

    fn note_sent(&mut self, len: usize) {
        self.sent += len;
        while let Some(slot) = self.outgoing.front() {
            let whole: usize = self.slots[*slot].parts().iter().map(|part| part.len()).sum();
            if self.sent < whole {
                break;
            }
            self.sent -= whole;
            self.outgoing.pop_front();
        }
    }

    /// Waits where a blocking receive would wait for the wrong thing; true when a receive is due.
    fn ready_to_receive(&mut self, timeout: Option<Duration>) -> Result<bool> {
        let (events, timeout) = match timeout {
            _ if !self.outgoing.is_empty() => (PollFlags::IN | PollFlags::OUT, STUCK_AFTER),
            Some(timeout) => (PollFlags::IN, timeout),
            None => return Ok(true),
        };
        let mut fds = [PollFd::new(&self.stream, events)];
        let timeout = Timespec::try_from(timeout).ok();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) if !self.outgoing.is_empty() => Err(stuck()),
            Ok(_) => Ok(fds[0].revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR)),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(e) => Err(Error::io("poll", e.into())),
        }
    }

    /// Passes over data that nobody wants; its slot when that was the last of it.
    fn skip_data(&mut self, (slot, left): (usize, usize)) -> Option<usize> {
        let taken = left.min(self.inbox.len());
        self.inbox.start += taken;
        if taken < left {
            self.inbox.skipping = Some((slot, left - taken));
            return None;
        }
        self.slots[slot].cookie = 0;
        Some(slot)
    }

    fn slot_of(&self, cookie: u64) -> Result<usize> {
        let slot = (cookie & 0xffff_ffff) as usize;
        match self.slots.get(slot) {
            Some(entry) if entry.cookie == cookie => Ok(slot),
            _ => Err(Error::new(ErrorKind::Protocol, "the server answered what was not asked")),
        }
    }

    fn refused(&self, slot: usize, errno: u32) -> Error {
        let entry = &self.slots[slot];
        server_error(command(entry.kind), entry.offset_bytes, errno)
    }
}

impl Transport for NbdTransport {
    fn fill(&mut self, slot: usize, fill: impl FnOnce(&mut [u8])) {
        fill(&mut self.slots[slot].payload);
    }

    fn issue(&mut self, slot: usize, kind: Kind, offset_bytes: u64, fua: bool) {
        let cookie = self.next_cookie << 32 | slot as u64;
        self.next_cookie = self.next_cookie % u64::from(u32::MAX) + 1;
        let fua = if fua { FLAG_FUA } else { 0 };
        let (offset, len) = match kind {
            Kind::Read | Kind::Write => (offset_bytes, self.shape.block_bytes),
            Kind::Flush => (0, 0),
        };
        let entry = &mut self.slots[slot];
        (entry.kind, entry.cookie, entry.offset_bytes) = (kind, cookie, offset_bytes);
        entry.header = request_header(command(kind), fua, cookie, offset, len);
        self.outgoing.push_back(slot);
    }

    fn submit(&mut self) -> Result<()> {
        while !self.outgoing.is_empty() {
            let slices = self.slices();
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let control = &mut SendAncillaryBuffer::default();
            let result = sendmsg(self.stream.as_fd(), &slices, control, flags);
            drop(slices);
            match result {
                Ok(len) => self.note_sent(len),
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Error::io("the connection was lost while sending", e.into())),
            }
        }
        Ok(())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<bool> {
        if !self.ready_to_receive(timeout)? {
            return Ok(false);
        }
        let space = self.inbox.space();
        match self.stream.read(space) {
            Ok(0) => Err(Error::new(ErrorKind::Io, "the server closed the connection")),
            Ok(len) => {
                self.inbox.end += len;
                Ok(true)
            }
            Err(e) if e.kind() == IoKind::Interrupted => Ok(false),
            Err(e) if e.kind() == IoKind::WouldBlock => Err(stuck()),
            Err(e) => Err(Error::io("the connection was lost while receiving", e)),
        }
    }

    fn take(&mut self) -> Result<Option<usize>> {
        if let Some(skipping) = self.inbox.skipping.take() {
            return Ok(self.skip_data(skipping));
        }
        let Some(head) = self.inbox.unread().first_chunk::<REPLY_BYTES>() else {
            return Ok(None);
        };
        let reply = parse_reply(head)?;
        let slot = self.slot_of(reply.cookie)?;
        if reply.errno != 0 {
            return Err(self.refused(slot, reply.errno));
        }
        let data = if self.slots[slot].kind == Kind::Read { self.shape.block_bytes as usize } else { 0 };
        if self.shape.keep_data && self.inbox.len() < REPLY_BYTES + data {
            return Ok(None);
        }
        self.inbox.start += REPLY_BYTES;
        self.inbox.data = self.inbox.start..self.inbox.start + data;
        Ok(self.skip_data((slot, data)))
    }

    fn data(&mut self, _slot: usize) -> &[u8] {
        &self.inbox.bytes[self.inbox.data.clone()]
    }

    fn finish(&mut self) {
        // Whether the server hears it changes nothing.
        let _ = self.stream.write_all(&request_header(Command::Disconnect, 0, 0, 0, 0));
    }
}

fn command(kind: Kind) -> Command {
    match kind {
        Kind::Read => Command::Read,
        Kind::Write => Command::Write,
        Kind::Flush => Command::Flush,
    }
}

impl Slot {
    fn new(shape: Shape) -> Self {
        let payload = vec![0; if shape.writes { shape.block_bytes as usize } else { 0 }];
        Self { kind: Kind::Read, cookie: 0, offset_bytes: 0, header: [0; REQUEST_BYTES], payload }
    }

    fn parts(&self) -> [&[u8]; 2] {
        match self.kind {
            Kind::Write => [&self.header, &self.payload],
            Kind::Read | Kind::Flush => [&self.header, &[]],
        }
    }
}

impl Inbox {
    fn new(capacity: usize) -> Self {
        Self { bytes: vec![0; capacity], start: 0, end: 0, skipping: None, data: 0..0 }
    }

    fn len(&self) -> usize {
        self.end - self.start
    }

    fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Room to receive into; never empty, since less than one reply is left unread.
    fn space(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.bytes.len() - self.end < self.bytes.len() / 2 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.len());
        }
        &mut self.bytes[self.end..]
    }
}
