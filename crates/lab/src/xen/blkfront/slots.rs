//! The pages of a queue's requests, and how a request names them.

use spile_core::Result;
use spile_mem::{Segment, Segments};
use spile_xen::blkif::{
    Discard, INDIRECT_PAGES, IndirectRequest, PlainRequest, Request, SEGMENT_BYTES, SEGMENTS_PER_PAGE, SLOT_SEGMENTS,
    SegmentEntry, op,
};
use spile_xen::{DomId, GrantRef, XEN_PAGE_BYTES};

use crate::xen::guest::{Frames, Guest};
use crate::xen::table::{Entry, flag};

/// The operations of blkif.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reads data.
    Read,
    /// Writes data.
    Write,
    /// Writes data, if there are any. Writes that came before are made durable first, and later ones wait.
    Barrier,
    /// Makes earlier writes durable.
    Flush,
    /// Frees sectors. With `true`, nobody can read their old content again (secure discard).
    Discard(bool),
}

impl Op {
    /// The operation's number in a request (`BLKIF_OP_*`).
    pub fn raw(self) -> u8 {
        match self {
            Self::Read => op::READ,
            Self::Write => op::WRITE,
            Self::Barrier => op::WRITE_BARRIER,
            Self::Flush => op::FLUSH_DISKCACHE,
            Self::Discard(_) => op::DISCARD,
        }
    }

    /// True when a request of this operation carries data.
    pub fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write | Self::Barrier)
    }
}

/// A page that can be granted.
#[derive(Clone, Debug)]
pub(super) struct Page {
    pub frame: u32,
    pub bytes: Segment,
    pub gref: GrantRef,
}

impl Page {
    /// Takes `count` pages of the guest's memory, and as many entries of the grant table. Nothing is granted yet. The pages
    /// are also added to `taken`.
    pub fn take(guest: &Guest, count: u32, taken: &mut Vec<Frames>) -> Result<Vec<Self>> {
        let frames = guest.take_frames(count)?;
        let page = |number| {
            let gref = guest.reserve_grant()?;
            Ok(Self { frame: frames.first + number, bytes: frames.page(number), gref })
        };
        let pages = (0..count).map(page).collect();
        taken.push(frames);
        pages
    }

    /// Grants the page to the domain `to`.
    pub fn grant(&self, guest: &Guest, to: DomId, is_readonly: bool) {
        let flags = if is_readonly { flag::PERMIT_ACCESS | flag::READONLY } else { flag::PERMIT_ACCESS };
        guest.table().set(self.gref, Entry { flags, domain: to.0, frame: self.frame });
    }
}

/// The memory of one slot.
#[derive(Debug)]
pub(super) struct SlotMemory {
    /// The pages that the back end reads and writes.
    pub pages: Vec<Page>,
    /// Where the segments of an indirect request are written.
    pub indirect: Vec<Page>,
    /// The data as the guest's programs see them: those pages, or with persistent grants others.
    pub data: Segments,
}

/// A request as it goes into the ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub op: Op,
    pub id: u64,
    pub handle: u16,
    pub offset_bytes: u64,
    pub len_bytes: u32,
}

impl SlotMemory {
    /// The number of pages that hold a request's data.
    pub fn used_pages(asked: &Asked) -> usize {
        if asked.op.has_data() { (asked.len_bytes as usize).div_ceil(XEN_PAGE_BYTES) } else { 0 }
    }

    /// True when the segments do not fit into a slot of the ring, so that the request is an indirect one.
    pub fn is_indirect(asked: &Asked) -> bool {
        Self::used_pages(asked) > SLOT_SEGMENTS
    }

    /// Builds the request. The segments of an indirect one are written to the slot's indirect pages.
    ///
    /// # Panics
    /// When the slot has too few pages, or a length is not a whole number of sectors.
    pub fn request(&self, asked: &Asked) -> Request {
        let Asked { op, id, handle, offset_bytes, len_bytes } = *asked;
        let sector = offset_bytes / 512;
        if let Op::Discard(is_secure) = op {
            let nr_sectors = u64::from(len_bytes / 512);
            return Request::Discard(Discard { flag: u8::from(is_secure), handle, id, sector, nr_sectors });
        }
        let used = Self::used_pages(asked);
        assert!(len_bytes.is_multiple_of(512), "{len_bytes} bytes are no whole sectors");
        assert!(used <= self.pages.len(), "{len_bytes} bytes in a slot of {} pages", self.pages.len());
        let entry = |number: usize| {
            let sectors = (len_bytes as usize / 512 - number * 8).min(8);
            SegmentEntry { gref: self.pages[number].gref, first_sect: 0, last_sect: (sectors - 1) as u8 }
        };
        if used <= SLOT_SEGMENTS {
            let mut segments = [SegmentEntry::default(); SLOT_SEGMENTS];
            (0..used).for_each(|number| segments[number] = entry(number));
            let nr_segments = used as u8;
            return Request::Plain(PlainRequest { op: op.raw(), nr_segments, handle, id, sector, segments });
        }
        for number in 0..used {
            let page = &self.indirect[number / SEGMENTS_PER_PAGE].bytes;
            page.copy_from_slice(number % SEGMENTS_PER_PAGE * SEGMENT_BYTES, &entry(number).encode());
        }
        let mut pages = [GrantRef(0); INDIRECT_PAGES];
        pages.iter_mut().zip(&self.indirect).for_each(|(gref, page)| *gref = page.gref);
        Request::Indirect(IndirectRequest { op: op.raw(), nr_segments: used as u16, id, sector, handle, pages })
    }

    /// The pages that a request grants: first those of data, then those of segments.
    pub fn granted(&self, asked: &Asked) -> impl Iterator<Item = &Page> {
        let used = Self::used_pages(asked);
        let indirect = if Self::is_indirect(asked) { used.div_ceil(SEGMENTS_PER_PAGE) } else { 0 };
        self.pages[..used].iter().chain(&self.indirect[..indirect])
    }
}
