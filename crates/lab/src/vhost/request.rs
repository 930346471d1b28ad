//! One virtio-blk request as buffers (virtio 1.2, 5.2.6).

use super::ring::Descriptor;

/// The request was done.
pub const STATUS_OK: u8 = 0;
/// The device or the request failed.
pub const STATUS_IOERR: u8 = 1;
/// The device does not know the request.
pub const STATUS_UNSUPP: u8 = 2;
/// Put where the status will be, so that a device that writes none is noticed.
pub const STATUS_NONE: u8 = 0xff;

/// Bytes of the memory beside the data that each request has: two cache lines, the second written by the device only.
pub const META_BYTES: usize = 128;
/// Where in it the header is.
pub const HEADER_AT: usize = 0;
/// Where the range of a discard or a write zeroes is.
pub const RANGE_AT: usize = 16;
/// Where the device's name goes.
pub const ID_AT: usize = 64;
/// Where the status goes.
pub const STATUS_AT: usize = 96;
/// Bytes of the device's name.
pub const ID_BYTES: usize = 20;

const HEADER_BYTES: usize = 16;
const RANGE_BYTES: usize = 16;

/// What is asked of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Bytes come.
    Read,
    /// Bytes go.
    Write,
    /// What was written becomes durable.
    Flush,
    /// The range may be freed.
    Discard,
    /// The range becomes zeroes.
    WriteZeroes {
        /// Its space may be freed.
        unmap: bool,
    },
    /// The disk's name, 20 bytes.
    GetId,
}

impl Op {
    fn code(self) -> u32 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Flush => 4,
            Self::GetId => 8,
            Self::Discard => 11,
            Self::WriteZeroes { .. } => 13,
        }
    }

    /// The header for a request at `offset_bytes`. Its sector is that of reads and writes only; zero in all others.
    pub(crate) fn header(self, offset_bytes: u64) -> [u8; HEADER_BYTES] {
        let sector = if matches!(self, Self::Read | Self::Write) { offset_bytes / 512 } else { 0 };
        (u128::from(self.code()) | u128::from(sector) << 64).to_le_bytes()
    }

    /// The range of a discard or a write zeroes.
    pub(crate) fn range(self, offset_bytes: u64, len_bytes: u32) -> Option<[u8; RANGE_BYTES]> {
        let flags = match self {
            Self::Discard => 0,
            Self::WriteZeroes { unmap } => u32::from(unmap),
            _ => return None,
        };
        let word = u128::from(offset_bytes / 512) | u128::from(len_bytes / 512) << 64 | u128::from(flags) << 96;
        Some(word.to_le_bytes())
    }

    /// The buffers of a request with `len_bytes` of data in the pieces `data` (guest address, length): first the header,
    /// last the status. Flags say which of them the device writes.
    pub(crate) fn buffers(self, len_bytes: u32, meta: u64, data: &[(u64, u32)], mut emit: impl FnMut(u64, u32, u16)) {
        emit(meta + HEADER_AT as u64, HEADER_BYTES as u32, 0);
        match self {
            Self::Read => pieces(len_bytes, data, |address, len| emit(address, len, Descriptor::WRITE)),
            Self::Write => pieces(len_bytes, data, |address, len| emit(address, len, 0)),
            Self::Discard | Self::WriteZeroes { .. } => emit(meta + RANGE_AT as u64, RANGE_BYTES as u32, 0),
            Self::GetId => emit(meta + ID_AT as u64, ID_BYTES as u32, Descriptor::WRITE),
            Self::Flush => {}
        }
        emit(meta + STATUS_AT as u64, 1, Descriptor::WRITE);
    }
}

fn pieces(len_bytes: u32, data: &[(u64, u32)], mut emit: impl FnMut(u64, u32)) {
    let mut left = len_bytes;
    for (address, len) in data {
        if left == 0 {
            break;
        }
        let part = left.min(*len);
        emit(*address, part);
        left -= part;
    }
    assert_eq!(left, 0, "a request of {len_bytes} bytes has no room for its data");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffers(op: Op, len: u32) -> Vec<(u64, u32, u16)> {
        let mut all = Vec::new();
        op.buffers(len, 0x1000, &[(0x9000, 512), (0x5000, 512)], |a, l, f| all.push((a, l, f)));
        all
    }

    #[test]
    fn each_operation_has_its_buffers() {
        let (head, status) = ((0x1000, 16, 0), (0x1060, 1, 2));
        assert_eq!(buffers(Op::Read, 1024), [head, (0x9000, 512, 2), (0x5000, 512, 2), status]);
        assert_eq!(buffers(Op::Write, 700), [head, (0x9000, 512, 0), (0x5000, 188, 0), status]);
        assert_eq!(buffers(Op::Write, 512), [head, (0x9000, 512, 0), status]);
        assert_eq!(buffers(Op::Flush, 0), [head, status]);
        assert_eq!(buffers(Op::Discard, 9), [head, (0x1010, 16, 0), status]);
        assert_eq!(buffers(Op::GetId, 0), [head, (0x1040, 20, 2), status]);
    }

    #[test]
    fn headers_and_ranges_lie_as_specified() {
        let write = Op::Write.header(0x0400 * 512);
        assert_eq!(write, [1, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Op::Flush.header(512), Op::Flush.header(0));
        let range = Op::WriteZeroes { unmap: true }.range(512, 1024).unwrap();
        assert_eq!(range, [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(Op::Read.range(0, 512), None);
    }

    #[test]
    #[should_panic(expected = "no room for its data")]
    fn more_than_the_pieces_hold_panics() {
        buffers(Op::Read, 1025);
    }
}
