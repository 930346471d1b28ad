//! Requests and responses, in the layouts of both ABIs.
//!
//! | | x86_64 | x86_32 (packed to 4) |
//! |---|---|---|
//! | request: op, segments, handle | 0, 1, 2 | 0, 1, 2 |
//! | id, sector, segments | 8, 16, 24: 112 bytes | 4, 12, 20: 108 bytes |
//! | segment: grant u32, first u8, last u8 | 0, 4, 5: 8 bytes | the same |
//! | discard: flag, handle, id, sector, sectors | 1, 2, 8, 16, 24 | 1, 2, 4, 12, 20 |
//! | indirect: op, real op, segments u16, id, sector, handle, grants | 0, 1, 2, 8, 16, 24, 28 | 0, 1, 2, 4, 12, 20, 24 |
//! | response: id, op, status i16 | 0, 8, 10: 16 bytes | 0, 8, 10: 12 bytes |

use crate::GrantRef;
use crate::blkif::{INDIRECT_PAGES, SLOT_SEGMENTS};

/// The bytes of a slot from the id on, in both layouts.
const REST_BYTES: usize = 104;

/// The bytes of one segment, in a slot and in an indirect page.
pub const SEGMENT_BYTES: usize = 8;

/// Operations (BLKIF_OP_*).
pub mod op {
    /// Read.
    pub const READ: u8 = 0;
    /// Write.
    pub const WRITE: u8 = 1;
    /// Write with a barrier: all requests before it are durable first, and no request after it begins before it has
    /// ended.
    pub const WRITE_BARRIER: u8 = 2;
    /// Make acknowledged writes durable.
    pub const FLUSH_DISKCACHE: u8 = 3;
    /// Free sectors.
    pub const DISCARD: u8 = 5;
    /// A read or write whose segments lie in separate pages.
    pub const INDIRECT: u8 = 6;
}

/// How a request ended (BLKIF_RSP_*).
pub mod status {
    /// Done.
    pub const OKAY: i16 = 0;
    /// Failed.
    pub const ERROR: i16 = -1;
    /// The operation is not known here.
    pub const EOPNOTSUPP: i16 = -2;
}

/// The layout of a guest's structures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Abi {
    /// `x86_64-abi`, and all other machines of 64 bits.
    #[default]
    X86_64,
    /// `x86_32-abi`: numbers of 64 bits are aligned to 4 bytes.
    X86_32,
}

impl Abi {
    /// Its name in xenstore.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-abi",
            Self::X86_32 => "x86_32-abi",
        }
    }

    /// The ABI of that name. The ABI of ARM has the layout of x86 with 64 bits (public/io/protocols.h).
    pub fn from_name(name: &str) -> Option<Self> {
        let name = if name == "arm-abi" { Self::X86_64.name() } else { name };
        [Self::X86_64, Self::X86_32].into_iter().find(|abi| abi.name() == name)
    }

    /// Bytes of a slot in a ring of requests and responses.
    pub const fn slot_bytes(self) -> usize {
        match self {
            Self::X86_64 => 112,
            Self::X86_32 => 108,
        }
    }

    /// Bytes of a response.
    pub const fn response_bytes(self) -> usize {
        match self {
            Self::X86_64 => 16,
            Self::X86_32 => 12,
        }
    }

    /// The offset of the first number of 64 bits. It differs between the ABIs, and everything after it is shifted by
    /// the same difference.
    const fn id_at(self) -> usize {
        match self {
            Self::X86_64 => 8,
            Self::X86_32 => 4,
        }
    }
}

/// A part of one granted page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentEntry {
    /// The page.
    pub gref: GrantRef,
    /// Its first sector, 0 to 7.
    pub first_sect: u8,
    /// Its last sector, inclusive.
    pub last_sect: u8,
}

impl SegmentEntry {
    /// Decodes a segment from its 8 bytes in a slot or an indirect page.
    pub fn decode(bytes: &[u8; SEGMENT_BYTES]) -> Self {
        Self { gref: GrantRef(u32_at(bytes, 0)), first_sect: bytes[4], last_sect: bytes[5] }
    }

    /// Encodes the segment in 8 bytes; bytes without meaning are 0.
    pub fn encode(&self) -> [u8; SEGMENT_BYTES] {
        let mut bytes = [0; SEGMENT_BYTES];
        bytes[..4].copy_from_slice(&self.gref.0.to_le_bytes());
        (bytes[4], bytes[5]) = (self.first_sect, self.last_sect);
        bytes
    }
}

/// A read, write, barrier or flush.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlainRequest {
    /// What to do.
    pub op: u8,
    /// The number of segments that are used, as the guest says. It is not checked.
    pub nr_segments: u8,
    /// The guest's number for the disk. It has no meaning for us.
    pub handle: u16,
    /// The id that the response repeats.
    pub id: u64,
    /// The first sector.
    pub sector: u64,
    /// The segments. Those past `nr_segments` have no meaning, and are not decoded.
    pub segments: [SegmentEntry; SLOT_SEGMENTS],
}

/// A discard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Discard {
    /// The flags. Bit 0 asks for a secure discard, after which nobody can read the data again.
    pub flag: u8,
    /// As in [`PlainRequest`].
    pub handle: u16,
    /// As in [`PlainRequest`].
    pub id: u64,
    /// The first sector.
    pub sector: u64,
    /// The number of sectors.
    pub nr_sectors: u64,
}

/// A read or write whose segments lie in separate pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndirectRequest {
    /// What to do.
    pub op: u8,
    /// The number of segments, as the guest says. It is not checked.
    pub nr_segments: u16,
    /// As in [`PlainRequest`].
    pub id: u64,
    /// The first sector.
    pub sector: u64,
    /// As in [`PlainRequest`].
    pub handle: u16,
    /// The grants of the pages in which the segments lie.
    pub pages: [GrantRef; INDIRECT_PAGES],
}

/// A request, as a slot holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// A read, write, barrier or flush; or an operation that is not known, of which only the id has a meaning.
    Plain(PlainRequest),
    /// A discard.
    Discard(Discard),
    /// A read or write whose segments lie in separate pages.
    Indirect(IndirectRequest),
}

impl From<PlainRequest> for Request {
    fn from(plain: PlainRequest) -> Self {
        Self::Plain(plain)
    }
}

impl From<IndirectRequest> for Request {
    fn from(indirect: IndirectRequest) -> Self {
        Self::Indirect(indirect)
    }
}

impl Request {
    /// Reads a slot of at least [`Abi::slot_bytes`].
    ///
    /// # Panics
    /// When `slot` is shorter.
    #[inline]
    pub fn decode(abi: Abi, slot: &[u8]) -> Self {
        let (start, rest) = slot.split_at(abi.id_at());
        let rest: &[u8; REST_BYTES] = rest.first_chunk().expect("the slot is long enough");
        let (op, second, third) = (start[0], start[1], u16_at(start, 2));
        let (id, sector) = (u64_at(rest, 0), u64_at(rest, 8));
        match op {
            op::DISCARD => {
                Self::Discard(Discard { flag: second, handle: third, id, sector, nr_sectors: u64_at(rest, 16) })
            }
            op::INDIRECT => Self::Indirect(IndirectRequest {
                op: second,
                nr_segments: third,
                id,
                sector,
                handle: u16_at(rest, 16),
                pages: std::array::from_fn(|page| GrantRef(u32_at(rest, 20 + 4 * page))),
            }),
            op => Self::Plain(PlainRequest {
                op,
                nr_segments: second,
                handle: third,
                id,
                sector,
                segments: segments_in(&rest[16..], usize::from(second)),
            }),
        }
    }

    /// Writes the request into `slot`; bytes without meaning are 0.
    ///
    /// # Panics
    /// When `slot` is shorter than [`Abi::slot_bytes`].
    pub fn encode(&self, abi: Abi, slot: &mut [u8]) {
        let slot = &mut slot[..abi.slot_bytes()];
        slot.fill(0);
        let at = abi.id_at();
        let mut put = |at: usize, bytes: &[u8]| slot[at..at + bytes.len()].copy_from_slice(bytes);
        match self {
            Self::Plain(plain) => {
                put(0, &[plain.op, plain.nr_segments]);
                put(2, &plain.handle.to_le_bytes());
                put(at, &plain.id.to_le_bytes());
                put(at + 8, &plain.sector.to_le_bytes());
                for (index, segment) in plain.segments.iter().enumerate() {
                    put(at + 16 + SEGMENT_BYTES * index, &segment.encode());
                }
            }
            Self::Discard(discard) => {
                put(0, &[op::DISCARD, discard.flag]);
                put(2, &discard.handle.to_le_bytes());
                put(at, &discard.id.to_le_bytes());
                put(at + 8, &discard.sector.to_le_bytes());
                put(at + 16, &discard.nr_sectors.to_le_bytes());
            }
            Self::Indirect(indirect) => {
                put(0, &[op::INDIRECT, indirect.op]);
                put(2, &indirect.nr_segments.to_le_bytes());
                put(at, &indirect.id.to_le_bytes());
                put(at + 8, &indirect.sector.to_le_bytes());
                put(at + 16, &indirect.handle.to_le_bytes());
                for (page, gref) in indirect.pages.iter().enumerate() {
                    put(at + 20 + 4 * page, &gref.0.to_le_bytes());
                }
            }
        }
    }

    /// The id that the response repeats.
    #[inline]
    pub fn id(&self) -> u64 {
        match self {
            Self::Plain(plain) => plain.id,
            Self::Discard(discard) => discard.id,
            Self::Indirect(indirect) => indirect.id,
        }
    }

    /// The operation that the response has to name. For an indirect request it is the real operation: Linux gives up a
    /// disk whose back end answers with the number of an indirect request (6).
    #[inline]
    pub fn response_op(&self) -> u8 {
        match self {
            Self::Plain(plain) => plain.op,
            Self::Discard(_) => op::DISCARD,
            Self::Indirect(indirect) => indirect.op,
        }
    }
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// The id of the request.
    pub id: u64,
    /// The operation of the request ([`Request::response_op`]).
    pub op: u8,
    /// How the request ended ([`status`]).
    pub status: i16,
}

impl Response {
    /// Encodes the response. The first [`Abi::response_bytes`] bytes are used; bytes without meaning are 0.
    pub fn encode(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.id.to_le_bytes());
        bytes[8] = self.op;
        bytes[10..12].copy_from_slice(&self.status.to_le_bytes());
        bytes
    }

    /// Decodes the response from a slot of at least 12 bytes.
    ///
    /// # Panics
    /// When `slot` is shorter.
    pub fn decode(slot: &[u8]) -> Self {
        Self { id: u64_at(slot, 0), op: slot[8], status: u16_at(slot, 10) as i16 }
    }
}

/// The first `count` segments, or as many as a slot holds; the others are not looked at.
#[inline]
fn segments_in(bytes: &[u8], count: usize) -> [SegmentEntry; SLOT_SEGMENTS] {
    let mut segments = [SegmentEntry::default(); SLOT_SEGMENTS];
    let (encoded, _) = bytes.as_chunks();
    segments.iter_mut().zip(encoded).take(count).for_each(|(segment, bytes)| *segment = SegmentEntry::decode(bytes));
    segments
}

#[inline]
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(*bytes[at..].first_chunk().expect("the slot is long enough"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*bytes[at..].first_chunk().expect("the slot is long enough"))
}

#[inline]
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().expect("the slot is long enough"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn segment() -> impl Strategy<Value = SegmentEntry> {
        (any::<u32>(), any::<u8>(), any::<u8>()).prop_map(|(gref, first_sect, last_sect)| SegmentEntry {
            gref: GrantRef(gref),
            first_sect,
            last_sect,
        })
    }

    fn request() -> impl Strategy<Value = Request> {
        let plain_op = any::<u8>().prop_filter("others have shapes of their own", |op| ![5, 6].contains(op));
        let segments = proptest::array::uniform11(segment());
        let plain = (plain_op, any::<u8>(), any::<u16>(), any::<u64>(), any::<u64>(), segments).prop_map(
            |(op, nr_segments, handle, id, sector, mut segments)| {
                segments.iter_mut().skip(nr_segments.into()).for_each(|unused| *unused = SegmentEntry::default());
                Request::Plain(PlainRequest { op, nr_segments, handle, id, sector, segments })
            },
        );
        let discard = any::<(u8, u16, u64, u64, u64)>().prop_map(|(flag, handle, id, sector, nr_sectors)| {
            Request::Discard(Discard { flag, handle, id, sector, nr_sectors })
        });
        let indirect = (any::<(u8, u16, u64, u64, u16)>(), any::<[u32; 8]>()).prop_map(
            |((op, nr_segments, id, sector, handle), pages)| {
                let pages = pages.map(GrantRef);
                Request::Indirect(IndirectRequest { op, nr_segments, id, sector, handle, pages })
            },
        );
        prop_oneof![plain, discard, indirect]
    }

    proptest! {
        #[test]
        fn requests_come_back_as_they_went(request in request()) {
            for abi in [Abi::X86_64, Abi::X86_32] {
                let mut slot = [0xff; 112];
                request.encode(abi, &mut slot);
                prop_assert_eq!(Request::decode(abi, &slot), request);
                prop_assert_eq!(slot[0] == op::INDIRECT, matches!(request, Request::Indirect(_)));
            }
        }

        #[test]
        fn any_slot_can_be_read(slot in proptest::collection::vec(any::<u8>(), 108..=112)) {
            let abi = if slot.len() == 112 { Abi::X86_64 } else { Abi::X86_32 };
            let request = Request::decode(abi, &slot);
            let at = if abi == Abi::X86_64 { 8 } else { 4 };
            prop_assert_eq!(&request.id().to_le_bytes(), &slot[at..at + 8]);
        }

        #[test]
        fn responses_come_back_as_they_went(id: u64, op: u8, status: i16) {
            let response = Response { id, op, status };
            prop_assert_eq!(Response::decode(&response.encode()[..12]), response);
        }
    }

    /// Against bytes as a C compiler lays them out (see the module's table).
    #[test]
    fn the_layouts_are_those_of_the_header() {
        let mut segments = [SegmentEntry::default(); SLOT_SEGMENTS];
        segments[10] = SegmentEntry { gref: GrantRef(0x0403_0201), first_sect: 5, last_sect: 6 };
        let plain = PlainRequest { op: 1, nr_segments: 11, handle: 0x0908, id: 7, sector: 0x1122, segments };
        let mut slot = [0; 112];
        Request::Plain(plain).encode(Abi::X86_64, &mut slot);
        assert_eq!((slot[8], slot[16], &slot[104..110]), (7, 0x22, &[1, 2, 3, 4, 5, 6][..]));
        Request::Plain(plain).encode(Abi::X86_32, &mut slot);
        assert_eq!((slot[4], slot[12], &slot[100..106]), (7, 0x22, &[1, 2, 3, 4, 5, 6][..]));
        let pages = [GrantRef(0xaabb); INDIRECT_PAGES];
        let indirect = IndirectRequest { op: 1, nr_segments: 0x102, id: 7, sector: 9, handle: 3, pages };
        Request::Indirect(indirect).encode(Abi::X86_64, &mut slot);
        assert_eq!((&slot[..4], slot[24], &slot[56..60]), (&[6, 1, 2, 1][..], 3, &[0xbb, 0xaa, 0, 0][..]));
        Request::Indirect(indirect).encode(Abi::X86_32, &mut slot);
        assert_eq!((slot[20], &slot[24..26], &slot[52..56]), (3, &[0xbb, 0xaa][..], &[0xbb, 0xaa, 0, 0][..]));
        assert_eq!(Request::decode(Abi::X86_32, &slot).response_op(), op::WRITE);
    }
}
