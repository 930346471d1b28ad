//! [`Node`]: the disk that fronts see, over a graph of images that can be exchanged while requests run.
//!
//! The way of a request, from the top:
//!
//! 1. The meter counts it ([`Node::meter`]). What fails further down because of trouble that may pass waits here and is tried
//!    again, if that is the disk's policy ([`Troubles`]).
//! 2. The stage at [`Place::Limit`] may hold the request back; usually there is none ([`DiskLimits`]).
//! 3. [`Aligned`] lets an aligned request pass, and bounces any other.
//! 4. The request takes the graph that is published now, and with it counts in the current *epoch* (`published`). While a
//!    gate is closed it waits there, and holds nothing but the range that [`Aligned`] has locked for it.
//! 5. The disk's [`Shape`] may make several requests of it, or one of several; usually it is off. Then the other stages that are attached
//!    see it ([`Stage`]); usually there are none.
//! 6. The graph executes it. The request keeps the graph alive until it ends.
//!
//! [`Aligned`] stands above the epochs for a reason. A write to a part of a sector reads the rest and writes the whole, under
//! a lock. Between two epochs, two such writes to one sector must still see each other: each takes the graph only when it has
//! the lock. It takes it once, for what it reads and what it writes ([`aligned::Enter`]). Else [`Node::hold`] could not tell that it is in
//! flight between the two, and it would write what it has read from one graph into another: when a disk goes back to a snapshot, bytes that
//! are gone.
#![forbid(unsafe_code)]

mod aligned;
mod bounce;
mod end;
mod exchange;
mod fault;
mod haste;
mod limit;
mod node;
mod published;
mod shape;
mod stage;
mod trouble;

pub use aligned::Aligned;
pub use bounce::Allocate;
pub use exchange::{Change, ClosedGates, OldEpoch, close_gates, exchange, hold_gates};
pub use fault::{Effect, Fault, Faults};
pub use limit::{Delays, DiskLimits, Group, Limits};
pub use node::{InFlight, Node};
pub use shape::{Learned, Shape, Shaping};
pub use stage::{Pending, Place, Stage};
pub use trouble::{MakesRoom, News, OnError, Policy, Tell, Troubles, Waited, Waiting};
