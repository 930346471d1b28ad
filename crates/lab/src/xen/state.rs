//! The states of a device's two sides (XenbusState in public/io/xenbus.h).

/// Unknown: there is no such node, or its value is not a state.
pub const UNKNOWN: u32 = 0;
/// Initialising: the device is being set up.
pub const INITIALISING: u32 = 1;
/// InitWait: the back end has written its offers, and waits for the front end's keys.
pub const INIT_WAIT: u32 = 2;
/// Initialised: the front end has written where its ring is.
pub const INITIALISED: u32 = 3;
/// Connected: the device is in use.
pub const CONNECTED: u32 = 4;
/// Closing: this side wants to end the connection.
pub const CLOSING: u32 = 5;
/// Closed: the connection has ended.
pub const CLOSED: u32 = 6;
