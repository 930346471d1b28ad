//! What a connection has still to be sent.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

/// So much may wait for a client that does not read; whoever lets more gather loses the connection. It is more than the
/// answers to all requests that are taken at once.
const MAX_BYTES: usize = 8 << 20;
/// While so much waits, no further request is taken.
const BUSY_BYTES: usize = 64 << 10;

/// Messages in order.
#[derive(Debug, Default)]
pub(in crate::xen) struct Outbox {
    messages: VecDeque<Arc<[u8]>>,
    /// The events among them.
    events: HashSet<Arc<[u8]>>,
    bytes: usize,
    /// Bytes of the first that have gone.
    sent: usize,
    is_overrun: bool,
}

impl Outbox {
    /// Adds a reply.
    pub fn push(&mut self, message: Vec<u8>) {
        self.append(message.into());
    }

    /// Adds an event, unless the same one waits already: whoever takes that later sees this change too.
    pub fn push_event(&mut self, message: Vec<u8>) {
        let message: Arc<[u8]> = message.into();
        if self.events.insert(message.clone()) {
            self.append(message);
        }
    }

    fn append(&mut self, message: Arc<[u8]>) {
        self.bytes += message.len();
        self.messages.push_back(message);
        self.is_overrun |= self.bytes > MAX_BYTES;
    }

    /// What to send next.
    pub fn front(&self) -> Option<&[u8]> {
        self.messages.front().map(|message| &message[self.sent..])
    }

    /// So many bytes of the front have gone.
    pub fn advance(&mut self, bytes: usize) {
        self.sent += bytes;
        self.bytes -= bytes;
        if self.messages.front().is_some_and(|message| message.len() == self.sent) {
            let message = self.messages.pop_front();
            message.and_then(|message| self.events.take(&message));
            self.sent = 0;
        }
    }

    /// Too much waits for another request to be taken.
    pub fn is_busy(&self) -> bool {
        self.bytes > BUSY_BYTES
    }

    /// The client has let too much gather.
    pub fn is_overrun(&self) -> bool {
        self.is_overrun
    }
}
