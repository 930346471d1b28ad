//! The messages that still have to be sent to a connection.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

/// The number of bytes that may wait for a client that does not read. A client that lets more gather loses its connection.
/// This is more than the answers to all requests that are taken at once.
const MAX_BYTES: usize = 8 << 20;
/// While this number of bytes waits, no further request is taken.
const BUSY_BYTES: usize = 64 << 10;

/// Messages in order.
#[derive(Debug, Default)]
pub(in crate::xen) struct Outbox {
    messages: VecDeque<Arc<[u8]>>,
    /// The events among the messages.
    events: HashSet<Arc<[u8]>>,
    bytes: usize,
    /// The number of bytes of the first message that have been sent.
    sent: usize,
    is_overrun: bool,
}

impl Outbox {
    /// Adds a reply.
    pub fn push(&mut self, message: Vec<u8>) {
        self.append(message.into());
    }

    /// Adds an event, unless an equal one waits already: a client that reads that one later sees this change too.
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

    /// The bytes to send next.
    pub fn front(&self) -> Option<&[u8]> {
        self.messages.front().map(|message| &message[self.sent..])
    }

    /// Removes the first `bytes` bytes: they have been sent.
    pub fn advance(&mut self, bytes: usize) {
        self.sent += bytes;
        self.bytes -= bytes;
        if self.messages.front().is_some_and(|message| message.len() == self.sent) {
            let message = self.messages.pop_front();
            message.and_then(|message| self.events.take(&message));
            self.sent = 0;
        }
    }

    /// True when so much waits that no further request may be taken.
    pub fn is_busy(&self) -> bool {
        self.bytes > BUSY_BYTES
    }

    /// True when so much waits that the client loses its connection.
    pub fn is_overrun(&self) -> bool {
        self.is_overrun
    }
}
