//! Copies between this process and another, done by the kernel.

use std::cell::RefCell;
use std::io;

use spile_mem::Segment;
use spile_xen::Way;

/// The largest number of pieces in one system call (UIO_MAXIOV).
pub(crate) const BATCH: usize = 1024;

/// The other process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remote {
    pub pid: i32,
    /// The address of the guest's memory in that process.
    pub base: usize,
}

/// A piece of a copy: bytes of this process, and their place in the other process's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a> {
    pub segment: &'a Segment,
    pub at: usize,
    pub len: usize,
    /// The offset from the start of the other process's memory, in bytes.
    pub remote_offset: usize,
}

#[derive(Default)]
struct Vectors {
    local: Vec<libc::iovec>,
    remote: Vec<libc::iovec>,
}

thread_local! {
    /// Room for one call, kept so that copies allocate nothing.
    static VECTORS: RefCell<Vectors> = RefCell::default();
}

/// Copies at most [`BATCH`] pieces with one system call, and returns how many bytes went, from the first on. No memory of
/// this process is written but the pieces', unless the other is this process: then who calls answers for the range at
/// `remote.base`, which must be memory that is only ever reached by raw copies.
///
/// # Errors
/// The system's error, when nothing was copied.
///
/// # Panics
/// When a piece is not inside its segment, or there are too many.
pub(crate) fn transfer<'a>(
    remote: Remote,
    way: Way,
    pieces: impl ExactSizeIterator<Item = Piece<'a>>,
) -> io::Result<usize> {
    assert!(pieces.len() <= BATCH, "{} pieces in one call", pieces.len());
    VECTORS.with_borrow_mut(|vectors| {
        vectors.local.clear();
        vectors.remote.clear();
        for piece in pieces {
            let (len, at) = (piece.len, piece.at);
            assert!(at <= piece.segment.len() && len <= piece.segment.len() - at, "{len} bytes at {at} of a buffer");
            let local = piece.segment.as_ptr().wrapping_add(at);
            let there = remote.base.wrapping_add(piece.remote_offset);
            vectors.local.push(libc::iovec { iov_base: local.cast(), iov_len: len });
            vectors.remote.push(libc::iovec { iov_base: std::ptr::without_provenance_mut(there), iov_len: len });
        }
        call(remote.pid, way, vectors)
    })
}

fn call(pid: i32, way: Way, vectors: &Vectors) -> io::Result<usize> {
    let (local, remote) = (&vectors.local, &vectors.remote);
    let (locals, remotes) = (local.len() as libc::c_ulong, remote.len() as libc::c_ulong);
    let done = match way {
        // SAFETY: the local ranges are inside segments that the caller holds for the time of the call, and segments are
        // only ever reached by raw copies; the remote ones are checked by the kernel.
        Way::FromGuest => unsafe { libc::process_vm_readv(pid, local.as_ptr(), locals, remote.as_ptr(), remotes, 0) },
        // SAFETY: as above.
        Way::ToGuest => unsafe { libc::process_vm_writev(pid, local.as_ptr(), locals, remote.as_ptr(), remotes, 0) },
    };
    usize::try_from(done).map_err(|_| io::Error::last_os_error())
}
