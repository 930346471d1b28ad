//! One good message of each kind, to be spoilt by tests.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use spile_core::{ErrorKind, Result};
use spile_lab::vhost::proto::{
    FLAG_NEED_REPLY, Header, InflightPayload, RegionPayload, VERSION, VringAddresses, config_payload, vring_state,
};
use spile_lab::vhost::{Connection, Message};

use super::guest::event;

/// A message with what belongs to it.
pub struct Good {
    pub request: u32,
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// A file in memory.
pub fn file(len: u64) -> OwnedFd {
    let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    file
}

/// A region of one page, away from all others.
pub fn region(number: u64) -> RegionPayload {
    let at = (1 << 40) + number * 8192;
    RegionPayload { guest_address: at, len_bytes: 4096, user_address: at, file_offset: 0 }
}

/// A good message of every kind that the server knows. They do not depend on each other; some are refused, because they
/// make no sense in a connection that has no memory yet, but each is whole.
pub fn all() -> Vec<Good> {
    let number = |number: u64| number.to_ne_bytes().to_vec();
    let inflight = InflightPayload { len_bytes: 4096, file_offset: 0, queues: 1, queue_size: 16 };
    let log = [16u64, 0].map(u64::to_ne_bytes).concat();
    let good = |request, payload, fds| Good { request, payload, fds };
    vec![
        good(1, vec![], vec![]),
        good(2, number(1 << 30), vec![]),
        good(3, vec![], vec![]),
        good(4, vec![], vec![]),
        good(5, RegionPayload::table(&[region(1), region(2)]), vec![file(4096), file(4096)]),
        good(6, log, vec![file(4096)]),
        good(7, vec![], vec![event()]),
        good(8, vring_state(0, 16), vec![]),
        good(9, VringAddresses::default().to_bytes(), vec![]),
        good(10, vring_state(0, 0), vec![]),
        good(11, vring_state(0, 0), vec![]),
        good(12, number(0), vec![event()]),
        good(13, number(0), vec![event()]),
        good(14, number(0), vec![event()]),
        good(15, vec![], vec![]),
        good(16, number(1 << 3), vec![]),
        good(17, vec![], vec![]),
        good(18, vring_state(0, 0), vec![]),
        good(21, vec![], vec![std::os::unix::net::UnixStream::pair().unwrap().0.into()]),
        good(24, config_payload(0, 0, &[0; 60]), vec![]),
        good(25, config_payload(32, 0, &[1]), vec![]),
        good(31, InflightPayload { len_bytes: 0, ..inflight }.to_bytes(), vec![]),
        good(32, inflight.to_bytes(), vec![file(4096)]),
        good(34, vec![], vec![]),
        good(36, vec![], vec![]),
        good(37, region(3).single(), vec![file(4096)]),
        good(38, region(4).single(), vec![]),
    ]
}

/// Sends a message that asks for an answer.
///
/// # Errors
/// When the connection is lost.
pub fn send(connection: &Connection, request: u32, payload: &[u8], fds: &[OwnedFd]) -> Result<()> {
    let header = Header { request, flags: VERSION | FLAG_NEED_REPLY, len_bytes: payload.len() as u32 };
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    connection.socket().send_raw(header, payload, &fds)
}

/// [`send`], and the answer; `None` when the server hangs up.
pub fn answer(connection: &Connection, request: u32, payload: &[u8], fds: &[OwnedFd]) -> Option<Message> {
    match send(connection, request, payload, fds).and_then(|()| connection.socket().receive()) {
        Ok(message) => {
            assert_eq!((message.header.request, message.header.flags), (request, 5));
            Some(message)
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Io, "request {request}: {error}");
            None
        }
    }
}
