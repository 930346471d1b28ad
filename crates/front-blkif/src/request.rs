//! [`Request`]: decodes the slot of a ring, and checks what the request asks for before anything is done.
//!
//! A slot is a copy, so what is checked here cannot change any more. The segments of an indirect request lie in pages
//! of the guest; they are copied once too, and checked then. A request that makes no sense is answered with an error.
//! Nothing that a request says can break the ring.

use spile_core::metrics::span::{Span, What};
use spile_core::metrics::{Begun, Ended, Op};
use spile_core::{Extent, GuestOffset, MAX_REQUEST_BYTES, SECTOR_BYTES, Segments};
use spile_xen::GrantRef;

use spile_xen::XEN_PAGE_BYTES;
use spile_xen::blkif::{
    self, Abi, INDIRECT_PAGES, IndirectRequest, PlainRequest, SEGMENT_BYTES, SEGMENTS_PER_PAGE, SegmentEntry, op,
    status,
};

/// The number of sectors in a granted page.
const PAGE_SECTORS: u8 = (XEN_PAGE_BYTES as u64 / SECTOR_BYTES) as u8;
/// The flag of a secure discard, after which nobody can read the data again. We do not offer it.
const DISCARD_SECURE: u8 = 1;

/// What a request asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Command {
    /// Read sectors.
    #[default]
    Read,
    /// Write sectors.
    Write,
    /// Make all acknowledged writes durable; then write, if the request has data.
    Flush,
    /// A write with a barrier: all writes before it are durable before it begins, it is durable before it is answered,
    /// and no other request begins in between.
    Barrier,
    /// Free this number of sectors.
    Discard(u64),
}

impl Command {
    /// The kind under which the request is counted.
    pub fn op(self) -> Op {
        match self {
            Self::Read => Op::Read,
            Self::Write | Self::Barrier => Op::Write,
            Self::Flush => Op::Flush,
            Self::Discard(_) => Op::Discard,
        }
    }
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The status that the guest gets.
    pub status: i16,
    /// The reason in the log.
    pub reason: &'static str,
}

impl Refusal {
    /// The refusal of a request that makes no sense or cannot be done.
    pub const fn error(reason: &'static str) -> Self {
        Self { status: status::ERROR, reason }
    }

    const fn unsupported(reason: &'static str) -> Self {
        Self { status: status::EOPNOTSUPP, reason }
    }
}

/// What a front end may ask for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most segments of an indirect request.
    pub max_indirect: u16,
    /// True when nothing may be written.
    pub read_only: bool,
    /// True when sectors may be freed.
    pub discards: bool,
}

/// One request. The ring uses it again for another request, so its lists keep their room.
#[derive(Debug, Default)]
pub struct Request {
    /// The number of its entry in the journal.
    pub entry: u16,
    /// The id that the response repeats.
    pub id: u64,
    /// The operation that the response names.
    pub response_op: u8,
    /// What it asks for.
    pub command: Command,
    /// The first sector.
    pub sector: u64,
    /// The parts of the guest's pages.
    pub segments: Vec<SegmentEntry>,
    /// While the segments of an indirect request have not been read: the pages in which they lie, and how many segments
    /// there are.
    pub indirect: Option<([GrantRef; INDIRECT_PAGES], u16)>,
    /// The bytes of its data.
    pub len_bytes: u32,
    /// The memory that the disk fills or from which it takes the data.
    pub data: Segments,
    /// The parts of the guest's pages that hold the data, while they are mapped and `data` is a buffer of our own.
    pub pages: Segments,
    /// Why the request is refused, if it is.
    pub refusal: Option<Refusal>,
    /// When it was taken from the ring, in ns of CLOCK_MONOTONIC.
    pub taken_ns: u64,
    /// Where its moments are stamped, from when it was taken until it is answered.
    pub span: Option<&'static Span>,
}

impl Request {
    /// Decodes a slot. The segments of an indirect request have to be read after that ([`Request::take_indirect`]).
    pub fn decode(&mut self, abi: Abi, slot: &[u8], limits: &Limits) {
        let wire = blkif::Request::decode(abi, slot);
        (self.id, self.response_op) = (wire.id(), wire.response_op());
        (self.refusal, self.indirect, self.len_bytes, self.command) = (None, None, 0, Command::Read);
        self.segments.clear();
        let done = match wire {
            blkif::Request::Plain(plain) => self.plain(&plain),
            blkif::Request::Indirect(indirect) => self.start_indirect(&indirect, limits),
            blkif::Request::Discard(discard) => {
                (self.command, self.sector) = (Command::Discard(discard.nr_sectors), discard.sector);
                match discard.flag & DISCARD_SECURE {
                    0 if limits.discards => Ok(()),
                    0 => Err(Refusal::unsupported("discards are not offered")),
                    _ => Err(Refusal::unsupported("secure discards are not offered")),
                }
            }
        };
        let done = done.and_then(|()| match limits.read_only && self.writes() {
            true => Err(Refusal::error("the disk is served read-only")),
            false => Ok(()),
        });
        self.refusal = done.err();
    }

    /// The status that the guest gets, once the request has ended.
    pub fn status(&self) -> i16 {
        self.refusal.map_or(status::OKAY, |refusal| refusal.status)
    }

    /// Its begin, to be counted.
    pub fn begun(&self) -> Begun {
        Begun { op: self.command.op(), len_bytes: self.len_bytes.into(), begun_ns: self.taken_ns }
    }

    /// What it is, for its span.
    pub fn what(&self) -> What {
        let offset_bytes = self.sector.saturating_mul(SECTOR_BYTES);
        What { op: self.command.op(), offset_bytes, len_bytes: self.len_bytes.into() }
    }

    /// Its end, to be counted.
    pub fn ended(&self) -> Ended {
        Ended { op: self.command.op(), failed: self.status() != status::OKAY, begun_ns: self.taken_ns }
    }

    /// True when it changes the disk.
    fn writes(&self) -> bool {
        match self.command {
            Command::Read => false,
            Command::Write | Command::Discard(_) => true,
            Command::Flush | Command::Barrier => !self.segments.is_empty(),
        }
    }

    /// True when the disk puts data into the guest's pages.
    pub fn fills_pages(&self) -> bool {
        self.command == Command::Read
    }

    fn plain(&mut self, plain: &PlainRequest) -> Result<(), Refusal> {
        self.command = match plain.op {
            op::READ => Command::Read,
            op::WRITE => Command::Write,
            op::FLUSH_DISKCACHE => Command::Flush,
            op::WRITE_BARRIER => Command::Barrier,
            _ => return Err(Refusal::unsupported("an unknown operation")),
        };
        self.sector = plain.sector;
        let segments = plain.segments.get(..usize::from(plain.nr_segments));
        let segments = segments.ok_or(Refusal::error("more segments than a slot holds"))?;
        if segments.is_empty() && matches!(self.command, Command::Read | Command::Write) {
            return Err(Refusal::error("no segments"));
        }
        self.segments.extend_from_slice(segments);
        self.check_segments()
    }

    fn start_indirect(&mut self, indirect: &IndirectRequest, limits: &Limits) -> Result<(), Refusal> {
        self.command = match indirect.op {
            op::READ => Command::Read,
            op::WRITE => Command::Write,
            _ => return Err(Refusal::error("an indirect request that is neither read nor write")),
        };
        self.sector = indirect.sector;
        if !(1..=limits.max_indirect).contains(&indirect.nr_segments) {
            return Err(Refusal::error("an indirect request of no segments, or more than are offered"));
        }
        self.indirect = Some((indirect.pages, indirect.nr_segments));
        Ok(())
    }

    /// The pages in which the segments of an indirect request lie, each with the number of bytes that are used.
    pub fn indirect_pages(&self) -> impl Iterator<Item = (GrantRef, u16)> + use<> {
        let (pages, count) = self.indirect.filter(|_| self.refusal.is_none()).unwrap_or_default();
        let count = usize::from(count);
        let used = count.div_ceil(SEGMENTS_PER_PAGE);
        pages.into_iter().take(used).enumerate().map(move |(page, gref)| {
            let here = (count - page * SEGMENTS_PER_PAGE).min(SEGMENTS_PER_PAGE);
            (gref, (here * SEGMENT_BYTES) as u16)
        })
    }

    /// Takes the segments of an indirect request from a copy of its pages.
    pub fn take_indirect(&mut self, bytes: &[u8]) {
        let (segments, _) = bytes.as_chunks::<SEGMENT_BYTES>();
        self.segments.extend(segments.iter().map(SegmentEntry::decode));
        self.indirect = None;
        self.refusal = self.check_segments().err();
    }

    /// Checks that each segment lies in its page and that the request is not too long; sets its length.
    fn check_segments(&mut self) -> Result<(), Refusal> {
        let mut sectors = 0;
        for segment in &self.segments {
            if segment.first_sect > segment.last_sect || segment.last_sect >= PAGE_SECTORS {
                return Err(Refusal::error("a segment is not within its page"));
            }
            sectors += u64::from(segment.last_sect - segment.first_sect) + 1;
        }
        let len_bytes = sectors * SECTOR_BYTES;
        if len_bytes > MAX_REQUEST_BYTES {
            return Err(Refusal::error("more data than a request may have"));
        }
        self.len_bytes = len_bytes as u32;
        Ok(())
    }

    /// The extent on the disk.
    ///
    /// # Errors
    /// When it does not lie within `size_bytes`.
    pub fn extent(&self, size_bytes: u64) -> Result<Extent, Refusal> {
        let outside = Refusal::error("some sectors lie behind the end of the disk");
        let len_bytes = match self.command {
            Command::Discard(sectors) => sectors.checked_mul(SECTOR_BYTES).filter(|len| *len > 0).ok_or(outside)?,
            _ => u64::from(self.len_bytes),
        };
        let offset = self.sector.checked_mul(SECTOR_BYTES).ok_or(outside)?;
        let end = offset.checked_add(len_bytes).filter(|end| *end <= size_bytes);
        end.map(|_| Extent { offset: GuestOffset(offset), len_bytes }).ok_or(outside)
    }

    /// Drops the references to the guest's memory and the buffers, which an idle request must not keep. The list of
    /// segments keeps its room, 2 KiB at most.
    pub fn clear(&mut self) {
        self.data.clear();
        if !self.pages.is_empty() {
            self.pages = Segments::new();
        }
    }
}

/// The offset in bytes of a segment in its page, and its length in bytes.
pub fn range(segment: &SegmentEntry) -> (usize, usize) {
    let sector = SECTOR_BYTES as usize;
    let sectors = usize::from(segment.last_sect - segment.first_sect) + 1;
    (usize::from(segment.first_sect) * sector, sectors * sector)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::SLOT_BYTES;
    use spile_xen::blkif::{Discard, SLOT_SEGMENTS};

    const SIZE_BYTES: u64 = 1 << 30;
    const LIMITS: Limits = Limits { max_indirect: 256, read_only: false, discards: true };

    fn segment(first_sect: u8, last_sect: u8) -> SegmentEntry {
        SegmentEntry { gref: GrantRef(8), first_sect, last_sect }
    }

    fn plain(op: u8, nr_segments: u8) -> PlainRequest {
        PlainRequest { op, nr_segments, id: 5, segments: [segment(0, 7); SLOT_SEGMENTS], ..PlainRequest::default() }
    }

    fn decode(wire: blkif::Request, limits: &Limits) -> Request {
        let both = [Abi::X86_64, Abi::X86_32].map(|abi| {
            let (mut slot, mut request) = ([0xff; SLOT_BYTES], Request::default());
            wire.encode(abi, &mut slot);
            request.decode(abi, &slot, limits);
            request
        });
        assert_eq!(format!("{:?}", both[0]), format!("{:?}", both[1]));
        let [request, _] = both;
        request
    }

    fn status_of(wire: blkif::Request) -> i16 {
        decode(wire, &LIMITS).refusal.map_or(status::OKAY, |refusal| refusal.status)
    }

    /// Cases 13 and 17.
    #[test]
    fn counts_and_operations_are_checked() {
        for (count, wanted) in [(0, -1), (1, 0), (11, 0), (12, -1), (32, -1), (255, -1)] {
            assert_eq!(status_of(blkif::Request::Plain(plain(op::READ, count))), wanted, "{count}");
            assert_eq!(status_of(blkif::Request::Plain(plain(op::WRITE, count))), wanted, "{count}");
        }
        assert_eq!(status_of(blkif::Request::Plain(plain(op::FLUSH_DISKCACHE, 0))), 0);
        assert_eq!(status_of(blkif::Request::Plain(plain(op::WRITE_BARRIER, 0))), 0);
        assert_eq!(status_of(blkif::Request::Plain(plain(op::WRITE_BARRIER, 12))), -1);
        for unknown in [4, 7, 255] {
            assert_eq!(status_of(blkif::Request::Plain(plain(unknown, 1))), status::EOPNOTSUPP, "{unknown}");
        }
    }

    /// Case 14.
    #[test]
    fn segments_lie_within_their_pages() {
        for (first, last, wanted) in [(0, 7, 0), (7, 7, 0), (0, 8, -1), (0, 255, -1), (8, 8, -1), (5, 4, -1)] {
            let mut request = plain(op::READ, 2);
            request.segments[1] = segment(first, last);
            assert_eq!(status_of(blkif::Request::Plain(request)), wanted, "{first} {last}");
        }
        let mut request = plain(op::READ, 2);
        (request.segments[0], request.segments[1]) = (segment(7, 7), segment(2, 4));
        let request = decode(blkif::Request::Plain(request), &LIMITS);
        assert_eq!((request.len_bytes, range(&request.segments[1])), (4 * 512, (1024, 1536)));
    }

    /// Case 15.
    #[test]
    fn extents_lie_within_the_disk() {
        let last = SIZE_BYTES / 512 - 8;
        for (sector, fits) in
            [(last, true), (last + 1, false), (u64::MAX, false), (u64::MAX / 512, false), (1 << 55, false)]
        {
            let request = decode(blkif::Request::Plain(PlainRequest { sector, ..plain(op::READ, 1) }), &LIMITS);
            assert_eq!(request.refusal, None);
            assert_eq!(request.extent(SIZE_BYTES).is_ok(), fits, "{sector}");
        }
    }

    /// Case 18.
    #[test]
    fn discards_are_checked() {
        let discard = |sector, nr_sectors, flag| Discard { sector, nr_sectors, flag, ..Discard::default() };
        for (sectors, fits) in [(0, false), (1, true), (SIZE_BYTES / 512, true), (u64::MAX, false), (1 << 55, false)] {
            let request = decode(blkif::Request::Discard(discard(0, sectors, 0)), &LIMITS);
            assert_eq!(request.extent(SIZE_BYTES).is_ok(), fits, "{sectors}");
        }
        assert_eq!(status_of(blkif::Request::Discard(discard(0, 8, 1))), status::EOPNOTSUPP);
    }

    /// Case 16.
    #[test]
    fn a_read_only_disk_takes_no_writes() {
        let limits = Limits { read_only: true, ..LIMITS };
        let is_refused = |wire| decode(wire, &limits).refusal.is_some();
        assert!(is_refused(blkif::Request::Plain(plain(op::WRITE, 1))));
        assert!(is_refused(blkif::Request::Plain(plain(op::FLUSH_DISKCACHE, 1))));
        assert!(is_refused(blkif::Request::Plain(plain(op::WRITE_BARRIER, 1))));
        assert!(is_refused(blkif::Request::Discard(Discard { nr_sectors: 8, ..Discard::default() })));
        let indirect = IndirectRequest { op: op::WRITE, nr_segments: 20, ..IndirectRequest::default() };
        assert!(is_refused(blkif::Request::Indirect(indirect)));
        assert!(!is_refused(blkif::Request::Plain(plain(op::FLUSH_DISKCACHE, 0))));
        assert!(!is_refused(blkif::Request::Plain(plain(op::READ, 1))));
    }

    /// Cases 19 and 20.
    #[test]
    fn indirect_requests_are_checked_before_their_pages_are_read() {
        let indirect = |op, nr_segments| IndirectRequest { op, nr_segments, id: 9, ..IndirectRequest::default() };
        for (op, count, wanted) in [
            (op::READ, 1, 0),
            (op::WRITE, 256, 0),
            (op::READ, 0, -1),
            (op::READ, 257, -1),
            (op::READ, 65535, -1),
            (op::WRITE_BARRIER, 20, -1),
            (op::DISCARD, 20, -1),
            (op::INDIRECT, 20, -1),
            (op::FLUSH_DISKCACHE, 1, -1),
        ] {
            let request = decode(blkif::Request::Indirect(indirect(op, count)), &LIMITS);
            assert_eq!(request.refusal.map_or(0, |refusal| refusal.status), wanted, "{op} {count}");
            assert_eq!(request.indirect_pages().count(), usize::from(wanted == 0));
            assert_eq!((request.id, request.response_op), (9, op), "the answer names the real operation");
        }
        let none = Limits { max_indirect: 0, ..LIMITS };
        assert!(decode(blkif::Request::Indirect(indirect(op::READ, 1)), &none).refusal.is_some());
    }

    #[test]
    fn indirect_segments_are_checked_once_they_are_read() {
        let wire = IndirectRequest { op: op::READ, nr_segments: 3, ..IndirectRequest::default() };
        let mut request = decode(blkif::Request::Indirect(wire), &LIMITS);
        assert_eq!(request.indirect_pages().map(|(_, len)| len).collect::<Vec<_>>(), [24]);
        let bytes: Vec<_> =
            [segment(0, 7), segment(1, 2), segment(3, 3)].iter().flat_map(SegmentEntry::encode).collect();
        request.take_indirect(&bytes);
        assert_eq!((request.refusal, request.len_bytes, request.segments.len()), (None, 11 * 512, 3));
        let mut request = decode(blkif::Request::Indirect(wire), &LIMITS);
        request.take_indirect(&segment(3, 8).encode());
        assert!(request.refusal.is_some());
    }

    #[test]
    fn a_request_that_is_used_again_has_nothing_of_the_one_before() {
        let mut request = Request::default();
        let mut slot = [0; SLOT_BYTES];
        blkif::Request::Plain(plain(77, 255)).encode(Abi::X86_64, &mut slot);
        request.decode(Abi::X86_64, &slot, &LIMITS);
        blkif::Request::Plain(plain(op::READ, 1)).encode(Abi::X86_64, &mut slot);
        request.decode(Abi::X86_64, &slot, &LIMITS);
        assert_eq!((request.refusal, request.len_bytes, request.segments.len()), (None, 4096, 1));
    }
}
