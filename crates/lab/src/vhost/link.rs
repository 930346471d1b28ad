//! The state of a connection, as another thread's queues see it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use spile_core::{Error, ErrorKind};

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum LinkState {
    /// The server is connected, as far as is known.
    Up = 0,
    /// The server is gone and may come back. Requests in flight stay in flight.
    Broken = 1,
    /// The server is gone for good.
    Lost = 2,
}

/// The state of a device's connection, shared with its queues.
#[derive(Debug, Default)]
pub struct Link {
    state: AtomicU8,
    reconnects: AtomicU32,
    why: Mutex<Option<Error>>,
}

impl Link {
    /// The state now.
    pub fn state(&self) -> LinkState {
        match self.state.load(Ordering::Acquire) {
            0 => LinkState::Up,
            1 => LinkState::Broken,
            _ => LinkState::Lost,
        }
    }

    /// The number of times that the connection was taken up again.
    pub fn reconnects(&self) -> u32 {
        self.reconnects.load(Ordering::Relaxed)
    }

    /// Why the connection is lost.
    pub fn error(&self) -> Error {
        let why = self.why.lock().unwrap_or_else(|e| e.into_inner());
        why.as_ref().map_or_else(|| Error::new(ErrorKind::Io, "the connection was lost"), Error::duplicate)
    }

    pub(crate) fn set_broken(&self) {
        self.state.store(LinkState::Broken as u8, Ordering::Release);
    }

    pub(crate) fn set_up_again(&self) {
        self.reconnects.fetch_add(1, Ordering::Relaxed);
        self.state.store(LinkState::Up as u8, Ordering::Release);
    }

    pub(crate) fn set_lost(&self, why: Error) {
        *self.why.lock().unwrap_or_else(|e| e.into_inner()) = Some(why);
        self.state.store(LinkState::Lost as u8, Ordering::Release);
    }
}
