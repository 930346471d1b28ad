//! The states of a device's two sides (XenbusState in public/io/xenbus.h).

/// There is no such node, or it says nothing.
pub const UNKNOWN: u32 = 0;
/// Begins.
pub const INITIALISING: u32 = 1;
/// The back end waits for what the front end writes.
pub const INIT_WAIT: u32 = 2;
/// The front end has written where its ring is.
pub const INITIALISED: u32 = 3;
/// In use.
pub const CONNECTED: u32 = 4;
/// Wants to end.
pub const CLOSING: u32 = 5;
/// Has ended.
pub const CLOSED: u32 = 6;
