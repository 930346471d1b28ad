//! One operation on a file or socket, the same for all reactors, and the future that waits for it.
//!
//! An [`Op`] owns clones of its segments and a share of its file. A reactor takes it by value and keeps it until
//! the kernel has answered; the future only holds a key. So a dropped future never frees memory the kernel writes to.

use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use spile_mem::{Segment, Segments};

use crate::fd::Fd;
use crate::worker;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Fills the segments from `offset`; ends short only at the end of the file.
    Read,
    /// Writes all segments at `offset`.
    Write,
    /// Makes the file's data durable (fdatasync); the result is the file's length then ([`Kind::Len`]).
    Sync,
    /// Finds the file's length, as far as this host knows it; `usize::MAX` where it cannot be told.
    Len,
    /// Calls fallocate with this mode, for `len` bytes at `offset`.
    Fallocate(i32),
    /// Sets the file's length to `len` bytes (ftruncate).
    Truncate,
    /// Finds the end of the run of data or of the hole at `offset` (`sys::find_extent`).
    Extent,
    /// Receives once into the first segment: at least one byte, or 0 at the end of the stream.
    Recv,
    /// Fills the first segment; ends short only at the end of the stream.
    RecvExact,
    /// Sends all segments.
    Send,
    /// Takes one connection; the result is its descriptor.
    Accept,
    /// Waits until an eventfd is rung.
    Event,
    /// Rings an eventfd.
    Ring,
}

impl Kind {
    /// True for operations that end by themselves, however the peer behaves.
    pub(crate) fn is_file(self) -> bool {
        !matches!(self, Self::Recv | Self::RecvExact | Self::Send | Self::Accept | Self::Event | Self::Ring)
    }
}

/// The result of an operation: a number of bytes, a descriptor, or 0; else an errno.
pub(crate) type Outcome = Result<usize, i32>;

/// True for the errnos by which the kernel refuses a transfer instead of waiting: EAGAIN, and EOPNOTSUPP where the file
/// system or the device has no direct transfer that does not wait.
pub(crate) fn must_wait(errno: i32, direct: bool) -> bool {
    errno == libc::EAGAIN || (direct && errno == libc::EOPNOTSUPP)
}

/// How a reactor has started an operation.
pub(crate) enum Started {
    /// The operation was done at once.
    Ended(Outcome),
    /// The operation is in flight; the key names it.
    Waits(u64),
}

/// An operation with everything that it needs.
pub(crate) struct Op {
    pub(crate) kind: Kind,
    pub(crate) fd: Arc<Fd>,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) segments: Segments,
    /// The bytes that are done so far.
    pub(crate) done: usize,
    /// AIO may make this write wait (module `aio`), because it did not go without.
    pub(crate) may_wait_in_aio: bool,
}

impl Op {
    fn new(kind: Kind, fd: &Arc<Fd>, offset: u64, len: u64, segments: Segments) -> Self {
        Self { kind, fd: fd.clone(), offset, len, segments, done: 0, may_wait_in_aio: false }
    }

    pub(crate) fn read(fd: &Arc<Fd>, offset: u64, into: &Segments) -> Self {
        Self::new(Kind::Read, fd, offset, into.len() as u64, into.clone())
    }

    pub(crate) fn write(fd: &Arc<Fd>, offset: u64, from: &Segments) -> Self {
        Self::new(Kind::Write, fd, offset, from.len() as u64, from.clone())
    }

    pub(crate) fn sync(fd: &Arc<Fd>) -> Self {
        Self::new(Kind::Sync, fd, 0, 0, Segments::new())
    }

    pub(crate) fn len(fd: &Arc<Fd>) -> Self {
        Self::new(Kind::Len, fd, 0, 0, Segments::new())
    }

    pub(crate) fn fallocate(fd: &Arc<Fd>, mode: i32, offset: u64, len: u64) -> Self {
        Self::new(Kind::Fallocate(mode), fd, offset, len, Segments::new())
    }

    pub(crate) fn truncate(fd: &Arc<Fd>, len: u64) -> Self {
        Self::new(Kind::Truncate, fd, 0, len, Segments::new())
    }

    pub(crate) fn extent(fd: &Arc<Fd>, offset: u64) -> Self {
        Self::new(Kind::Extent, fd, offset, 0, Segments::new())
    }

    pub(crate) fn recv(fd: &Arc<Fd>, into: &Segment) -> Self {
        Self::new(Kind::Recv, fd, 0, into.len() as u64, into.clone().into())
    }

    pub(crate) fn recv_exact(fd: &Arc<Fd>, into: &Segment) -> Self {
        Self { kind: Kind::RecvExact, ..Self::recv(fd, into) }
    }

    /// `done` bytes of the parts were sent already.
    pub(crate) fn send(fd: &Arc<Fd>, parts: &[Segment], done: usize) -> Self {
        let segments: Segments = parts.iter().cloned().collect();
        let len = segments.len() as u64;
        Self { done, ..Self::new(Kind::Send, fd, 0, len, segments) }
    }

    pub(crate) fn accept(fd: &Arc<Fd>) -> Self {
        Self::new(Kind::Accept, fd, 0, 0, Segments::new())
    }

    pub(crate) fn event(fd: &Arc<Fd>) -> Self {
        Self::new(Kind::Event, fd, 0, 0, Segments::new())
    }

    pub(crate) fn ring(fd: &Arc<Fd>, one: &Segment) -> Self {
        Self::new(Kind::Ring, fd, 0, one.len() as u64, one.clone().into())
    }

    /// Takes one result of the kernel for a part of the transfer. `Some` when the operation is over.
    pub(crate) fn advance(&mut self, count: usize) -> Option<Outcome> {
        match self.kind {
            Kind::Read | Kind::RecvExact | Kind::Write | Kind::Send => {
                self.done += count;
                let may_end_short = matches!(self.kind, Kind::Read | Kind::RecvExact);
                let over = self.done as u64 >= self.len || (may_end_short && count == 0);
                match (over, count) {
                    (true, _) => Some(Ok(self.done)),
                    // A write that takes nothing would be repeated for ever.
                    (false, 0) => Some(Err(libc::EIO)),
                    (false, _) => None,
                }
            }
            _ => Some(Ok(count)),
        }
    }

    /// Chooses AIO that may wait, once, for a direct transfer that the kernel refuses with `errno` instead of waiting. It suits:
    ///
    /// - a write to a file that is refused with EAGAIN: most likely it goes to a hole. A device has no holes: a transfer must
    ///   wait there when the device is out of tags;
    /// - a device with EOPNOTSUPP: one that lies over others, such as a volume of LVM, has no transfer that does not wait on older
    ///   kernels, but its transfers are as asynchronous as others. Of a file system that is not known.
    pub(crate) fn choose_aio(&mut self, errno: i32) -> bool {
        let suits = match errno {
            libc::EAGAIN => self.kind == Kind::Write && self.fd.may_need_space,
            _ => self.fd.is_device(),
        };
        suits && !std::mem::replace(&mut self.may_wait_in_aio, true)
    }

    /// Starts the operation when first polled, on the reactor of the polling worker.
    pub(crate) fn run(self) -> OpFuture {
        OpFuture { state: State::Ready(Some(self)), stays: PhantomData }
    }
}

/// The future that waits for an operation.
pub(crate) struct OpFuture {
    state: State,
    stays: Stays,
}

/// Makes a future `!Send`, because its key is valid only for the reactor of its worker.
pub(crate) type Stays = PhantomData<*const ()>;

enum State {
    Ready(Option<Op>),
    Started(u64),
    Over,
}

impl Future for OpFuture {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        let answer = match &mut self.state {
            State::Ready(op) => {
                let op = op.take().expect("an operation is started once");
                match worker::with(|w| w.reactor.borrow_mut().start(op, context.waker())) {
                    Started::Ended(outcome) => Poll::Ready(outcome),
                    Started::Waits(key) => {
                        self.state = State::Started(key);
                        Poll::Pending
                    }
                }
            }
            State::Started(key) => worker::with(|w| w.reactor.borrow_mut().poll(*key, context.waker())),
            State::Over => panic!("an operation was polled after its end"),
        };
        if answer.is_ready() {
            self.state = State::Over;
        }
        answer
    }
}

impl Drop for OpFuture {
    fn drop(&mut self) {
        if let State::Started(key) = self.state {
            // There is no worker only when the worker ends, and then its reactor waits for what is in flight.
            worker::try_with(|w| w.reactor.borrow_mut().abandon(key));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ways to be it for what is `Send`, so that naming it is ambiguous and does not compile.
    trait NotSend<T> {
        const IS: bool = true;
    }
    impl<F> NotSend<()> for F {}
    impl<F: Send> NotSend<u8> for F {}

    fn is_not_send<F: NotSend<T>, T>(_: F) -> bool {
        F::IS
    }

    #[test]
    fn futures_stay_on_their_worker() {
        let file = Fd::file(tempfile::tempfile().unwrap().into());
        assert!(is_not_send(Op::sync(&file).run()));
        assert!(is_not_send(crate::sleep(std::time::Duration::ZERO)));
    }
}
