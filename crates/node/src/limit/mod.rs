//! Limits: how many requests and bytes of a disk may pass in a second.
//!
//! A disk has limits of its own, those of the group that it is in, and those of a job that works on it ([`Limits`]). Each
//! limit is a bucket of allowance, which fills at the limit's rate. A request passes when no bucket that concerns it is in debt,
//! and then takes what it costs from each of them. So whichever limit makes it wait for longest decides.
//!
//! A request of more bytes than come in the time of the shortest burst passes in parts: it takes so many bytes at once, and waits in line
//! for the rest. So the debt that it leaves at a time is at most a burst, and the disk's other line and the group's other disks have their
//! turns in between.
//!
//! - **What counts.** A read or write counts as one request and its length in bytes. So does a write of zeroes, because the store
//!   may have to write them. A discard counts as one write request and no bytes. A flush counts nothing and never waits: it moves
//!   no data of its own, and a guest that waits for one is soon a guest that hangs.
//! - **Order.** Reads wait in one line and writes in another, so a limit on writes never delays reads. Within a group the disk that
//!   has had least of the group's rate comes first ([`Group`]): disks that want more than there is get the same each.
//! - **What a request holds while it waits**: its own memory and its front's slot. It has no share of an epoch, no lock of a range
//!   and no bounce buffer yet, because it waits above all of these. So neither an exchange nor other disks wait for it.
//! - **Waking up.** One of the requests that wait in a group has a timer, for the moment when the first of them may pass. It wakes
//!   the others. There is no timer while nothing waits. When a limit changes, all are looked at anew at once.
//! - **An end.** While a front stops a ring, or the server ends, no request waits here ([`DiskLimits::hurry`]): those that
//!   wait go on at once, and their cost is a debt like any other.

mod bucket;
mod group;
mod line;
mod rates;
mod stage;

pub use group::Group;
pub use rates::Limits;
pub use stage::{Delays, DiskLimits};
