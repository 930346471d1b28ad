//! Grants and event channels: the seams between a front and the hypervisor.

use std::fmt;
use std::os::fd::OwnedFd;

use spile_core::Result;
use spile_mem::{Segment, Segments};

/// The number of a domain: a guest, or the host's own domain 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DomId(pub u16);

/// The number of an entry in a guest's grant table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantRef(pub u32);

/// A port: the number of an event channel in the domain that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Port(pub u32);

impl fmt::Display for DomId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The direction of a copy.
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
    /// The length in bytes. The piece has to end within its page; whoever makes the piece has checked that.
    pub len: u16,
    /// The index of the buffer among those of the call.
    pub buffer: u32,
    /// The first byte in the buffer.
    pub buffer_offset: u32,
}

/// How one piece of a copy ended: Xen's GNTST_* (public/grant_table.h).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantStatus(pub i16);

impl GrantStatus {
    /// The bytes were copied.
    pub const OKAY: Self = Self(0);
    /// Refused for a reason that has no number of its own: the entry grants nothing to us, or not this access.
    pub const GENERAL_ERROR: Self = Self(-1);
    /// There is no such domain.
    pub const BAD_DOMAIN: Self = Self(-2);
    /// There is no such entry: the number is beyond the table.
    pub const BAD_GREF: Self = Self(-3);

    /// True when the bytes were copied.
    pub fn is_okay(self) -> bool {
        self == Self::OKAY
    }
}

/// Access to pages that guests have granted to us: by copies of the hypervisor, or by mapping them.
pub trait Grants: Send + Sync + 'static {
    /// Copies all pieces `ops` between the guest's pages and our buffers, and puts into `statuses` how each piece ended.
    /// `buffer_of` finds the buffer that has the number [`CopyOp::buffer`]. Pieces after a failed one are copied too. This is
    /// one system call where that is possible.
    ///
    /// # Errors
    /// When the call failed as a whole: nothing is known of any piece.
    ///
    /// # Panics
    /// When a piece is not inside a page, or not inside its buffer.
    fn copy<'a>(
        &self,
        domain: DomId,
        way: Way,
        buffer_of: impl Fn(u32) -> &'a Segment,
        ops: &[CopyOp],
        statuses: &mut Vec<GrantStatus>,
    ) -> Result<()>;

    /// Maps pages for reading, or for reading and writing. Returns one segment for each page, in order. The pages are
    /// unmapped together when the last segment is dropped.
    ///
    /// # Errors
    /// When a page cannot be mapped; then none is.
    fn map(&self, domain: DomId, refs: &[GrantRef], is_writable: bool) -> Result<Segments>;

    /// True when the kernel may work on mapped pages as well (direct I/O), and not only this process.
    fn can_be_pinned(&self) -> bool {
        true
    }

    /// Maps pages for reading and writing as one run of bytes, for a ring.
    ///
    /// # Errors
    /// As [`Grants::map`].
    fn map_ring(&self, domain: DomId, refs: &[GrantRef]) -> Result<Segment>;
}

/// Our end of an event channel. It is closed when its descriptors are closed.
#[derive(Debug)]
pub enum Channel {
    /// An open device file (/dev/xen/evtchn) for this channel alone, and the number by which that file knows the
    /// channel.
    Device(OwnedFd, Port),
    /// Two eventfds: the guest rings the first, we ring the second.
    Eventfds(OwnedFd, OwnedFd),
}

/// Event channels to guests.
pub trait EventChannels: Send + Sync + 'static {
    /// Binds to a port that the domain has prepared for us. A channel that was just bound counts as rung.
    ///
    /// # Errors
    /// When there is no such port, or the domain has not prepared it for us.
    fn bind(&self, domain: DomId, port: Port) -> Result<Channel>;
}
