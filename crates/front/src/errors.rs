//! The one table from kinds of error to what each wire says of them.

use spile_core::ErrorKind;

/// NBD's error numbers (doc/proto.md, "Error values").
pub mod nbd {
    /// `NBD_EPERM`: not allowed.
    pub const EPERM: u32 = 1;
    /// `NBD_EIO`: an I/O error.
    pub const EIO: u32 = 5;
    /// `NBD_ENOMEM`: out of memory.
    pub const ENOMEM: u32 = 12;
    /// `NBD_EINVAL`: an invalid request.
    pub const EINVAL: u32 = 22;
    /// `NBD_ENOSPC`: no space is left.
    pub const ENOSPC: u32 = 28;
    /// `NBD_EOVERFLOW`: a reply would be too long.
    pub const EOVERFLOW: u32 = 75;
    /// `NBD_ENOTSUP`: not supported; answers nothing but a fast zero.
    pub const ENOTSUP: u32 = 95;
    /// `NBD_ESHUTDOWN`: the server is shutting down.
    pub const ESHUTDOWN: u32 = 108;
}

/// The status byte of virtio-blk (virtio 1.2, section 5.2.6).
pub mod virtio {
    /// `VIRTIO_BLK_S_OK`: done.
    pub const OK: u8 = 0;
    /// `VIRTIO_BLK_S_IOERR`: failed.
    pub const IOERR: u8 = 1;
    /// `VIRTIO_BLK_S_UNSUPP`: not supported.
    pub const UNSUPP: u8 = 2;
}

/// The status of blkif (xen/include/public/io/blkif.h, `BLKIF_RSP_*`).
pub mod blkif {
    /// `BLKIF_RSP_OKAY`: done.
    pub const OKAY: i16 = 0;
    /// `BLKIF_RSP_ERROR`: failed.
    pub const ERROR: i16 = -1;
    /// `BLKIF_RSP_EOPNOTSUPP`: not supported.
    pub const EOPNOTSUPP: i16 = -2;
}

/// What each wire says of one kind of error. A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireStatus {
    /// NBD's error number. Two kinds depend on the command as well: the NBD front says where.
    pub nbd: u32,
    /// The status byte of virtio-blk.
    pub virtio: u8,
    /// The status of blkif.
    pub blkif: i16,
}

impl WireStatus {
    const fn new(nbd: u32, virtio: u8, blkif: i16) -> Self {
        Self { nbd, virtio, blkif }
    }

    /// The table.
    pub fn of(kind: ErrorKind) -> Self {
        use blkif::{EOPNOTSUPP, ERROR};
        use nbd::{EINVAL, EIO, ENOMEM, ENOSPC, EPERM, ESHUTDOWN};
        use virtio::{IOERR, UNSUPP};
        match kind {
            //                                     NBD        virtio  blkif
            ErrorKind::InvalidInput => Self::new(EINVAL, IOERR, ERROR),
            ErrorKind::OutOfRange => Self::new(EINVAL, IOERR, ERROR),
            ErrorKind::ReadOnly => Self::new(EPERM, IOERR, ERROR),
            ErrorKind::Denied => Self::new(EPERM, IOERR, ERROR),
            ErrorKind::NoSpace => Self::new(ENOSPC, IOERR, ERROR),
            ErrorKind::Exhausted => Self::new(ENOMEM, IOERR, ERROR),
            ErrorKind::Shutdown => Self::new(ESHUTDOWN, IOERR, ERROR),
            ErrorKind::Unsupported => Self::new(EINVAL, UNSUPP, EOPNOTSUPP),
            ErrorKind::Io => Self::new(EIO, IOERR, ERROR),
            ErrorKind::Corrupt => Self::new(EIO, IOERR, ERROR),
            ErrorKind::NotFound => Self::new(EIO, IOERR, ERROR),
            ErrorKind::Exists => Self::new(EIO, IOERR, ERROR),
            ErrorKind::Busy => Self::new(EIO, IOERR, ERROR),
            ErrorKind::Protocol => Self::new(EIO, IOERR, ERROR),
            ErrorKind::TimedOut => Self::new(EIO, IOERR, ERROR),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_not_supported_says_so() {
        let rows = [ErrorKind::Unsupported, ErrorKind::Io, ErrorKind::InvalidInput].map(WireStatus::of);
        assert_eq!(rows.map(|row| row.virtio), [virtio::UNSUPP, virtio::IOERR, virtio::IOERR]);
        assert_eq!(rows.map(|row| row.blkif), [blkif::EOPNOTSUPP, blkif::ERROR, blkif::ERROR]);
        assert_eq!(rows.map(|row| row.nbd), [nbd::EINVAL, nbd::EIO, nbd::EINVAL]);
    }

    #[test]
    fn unknown_trouble_is_an_io_error() {
        for kind in [ErrorKind::Corrupt, ErrorKind::TimedOut, ErrorKind::Busy] {
            assert_eq!(WireStatus::of(kind), WireStatus::of(ErrorKind::Io), "{kind:?}");
        }
    }
}
