//! Grants and event channels: the seams between a front and the hypervisor.

use std::fmt;
use std::os::fd::OwnedFd;

use spile_core::Result;
use spile_mem::{Segment, Segments};

/// A domain's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DomId(pub u16);

/// The number of an entry in a guest's grant table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantRef(pub u32);

/// A port of an event channel, as the domain numbers it that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Port(pub u32);

impl fmt::Display for DomId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The way of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the guest's pages to our memory.
    FromGuest,
    /// From our memory to the guest's pages.
    ToGuest,
}

/// One piece of a copy: bytes of one granted page, and where they are in our memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyOp {
    /// The granted page.
    pub gref: GrantRef,
    /// The first byte in the page.
    pub page_offset: u16,
    /// Bytes; with the offset at most a page, which who makes the piece has checked.
    pub len: u16,
    /// Which buffer of the call.
    pub buffer: u32,
    /// The first byte in the buffer.
    pub buffer_offset: u32,
}

/// How one piece of a copy ended: Xen's GNTST_* (public/grant_table.h).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantStatus(pub i16);

impl GrantStatus {
    /// Done.
    pub const OKAY: Self = Self(0);
    /// Refused for another reason: the entry grants nothing to us, or not what was asked for.
    pub const GENERAL_ERROR: Self = Self(-1);
    /// There is no such domain.
    pub const BAD_DOMAIN: Self = Self(-2);
    /// No such entry: the number is beyond the table.
    pub const BAD_GREF: Self = Self(-3);

    /// True when the bytes were copied.
    pub fn is_okay(self) -> bool {
        self == Self::OKAY
    }
}

/// The hypervisor's copies and mappings of pages that guests have granted to us.
pub trait Grants: Send + Sync + 'static {
    /// Copies all pieces `ops` of `buffers`, and puts into `statuses` how each ended: those after a failed one are done
    /// too. One call of the system where it can be.
    ///
    /// # Errors
    /// When nothing is known of any piece.
    ///
    /// # Panics
    /// When a piece is not inside a page, or not inside its buffer.
    fn copy(
        &self,
        domain: DomId,
        way: Way,
        buffers: &[Segment],
        ops: &[CopyOp],
        statuses: &mut Vec<GrantStatus>,
    ) -> Result<()>;

    /// Maps pages, for reading or for both: one segment for each, in order. They are unmapped together when the last
    /// segment is dropped.
    ///
    /// # Errors
    /// When any cannot be mapped; then none is.
    fn map(&self, domain: DomId, refs: &[GrantRef], is_writable: bool) -> Result<Segments>;

    /// True when the kernel may be told to work on mapped pages (direct I/O), and not only we ourselves.
    fn can_be_pinned(&self) -> bool {
        true
    }

    /// Maps pages for both as one run of bytes, for a ring.
    ///
    /// # Errors
    /// As [`Grants::map`].
    fn map_ring(&self, domain: DomId, refs: &[GrantRef]) -> Result<Segment>;
}

/// Our end of an event channel. It is closed when its descriptors are.
#[derive(Debug)]
pub enum Channel {
    /// A device file of its own (/dev/xen/evtchn), and the port by which that knows the channel.
    Device(OwnedFd, Port),
    /// Two eventfds: the guest rings the first, we ring the second.
    Eventfds(OwnedFd, OwnedFd),
}

/// Event channels to guests.
pub trait EventChannels: Send + Sync + 'static {
    /// Binds to a port that the domain has prepared for us. The channel is ringing when it is bound.
    ///
    /// # Errors
    /// When there is no such port, or it is not for us.
    fn bind(&self, domain: DomId, port: Port) -> Result<Channel>;
}
