//! The slot of one operation of a ring: what the kernel needs of it until the completion has come, and its entry for the submission
//! queue.

use std::task::Waker;

use io_uring::{opcode, squeue, types};

use crate::file_table::Target;
use crate::op::{Kind, Op, Outcome};
use crate::sys::{self, IoVecs};

/// An operation, or a free place for one.
pub(crate) struct Slot {
    pub(crate) generation: u32,
    pub(crate) state: State,
    pub(crate) kind: Kind,
    /// True when the entry in the kernel is a poll: the socket was not ready, and the kernel has answered that at once
    /// instead of waiting.
    pub(crate) polls: bool,
    /// The store whose share a transfer in the ring belongs to.
    pub(crate) share: Option<usize>,
    /// The operation; `None` while a helper thread has it.
    pub(crate) op: Option<Op>,
    iovecs: IoVecs,
    message: libc::msghdr,
}

/// How far the operation of a slot is.
pub(crate) enum State {
    /// There is none.
    Free,
    /// It is in flight, and this task waits for its end.
    Waits(Waker),
    /// It has ended, and its future has not seen that yet.
    Ended(Outcome),
    /// It is in flight, and nobody waits for its end any more.
    Abandoned,
}

/// Calls the builder `$make` with the operation's file, registered or not.
macro_rules! with_target {
    ($target:expr, $fd:ident => $make:expr) => {
        match $target {
            Target::Fixed(index) => {
                let $fd = types::Fixed(index);
                $make.build()
            }
            Target::Plain(raw) => {
                let $fd = types::Fd(raw);
                $make.build()
            }
        }
    };
}

impl Slot {
    pub(crate) fn new() -> Self {
        Self {
            generation: 0,
            state: State::Free,
            kind: Kind::Sync,
            polls: false,
            share: None,
            op: None,
            iovecs: IoVecs::new(),
            // SAFETY: a msghdr of zeroes is valid: no name, no vectors, no control data.
            message: unsafe { std::mem::zeroed() },
        }
    }

    /// An accepted connection that nobody takes is closed.
    pub(crate) fn close_unclaimed(&self, outcome: Outcome) {
        if let (Kind::Accept, Ok(fd)) = (self.kind, outcome) {
            sys::close_unclaimed(fd);
        }
    }

    /// Builds the entry for the rest of the operation.
    pub(crate) fn entry(&mut self, target: Target, fixed: Option<u16>) -> squeue::Entry {
        let op = self.op.as_ref().expect("an operation in flight is in its slot");
        if self.polls {
            // Kernels before 5.19 answer EAGAIN on a socket that is set not to block: tried again at once, for ever,
            // that would be a busy loop.
            let sends = matches!(op.kind, Kind::Send | Kind::Ring);
            let events = if sends { libc::POLLOUT } else { libc::POLLIN };
            return with_target!(target, fd => opcode::PollAdd::new(fd, events as u32));
        }
        match op.kind {
            Kind::Read | Kind::Write => self.transfer(target, fixed),
            Kind::Send => self.send(target),
            Kind::Recv => recv(op, target, 0),
            Kind::RecvExact => recv(op, target, libc::MSG_WAITALL),
            Kind::Ring => {
                let one = op.segments.as_slice()[0].as_ptr();
                with_target!(target, fd => opcode::Write::new(fd, one, 8))
            }
            Kind::Event => with_target!(target, fd => opcode::PollAdd::new(fd, libc::POLLIN as u32)),
            Kind::Accept => {
                let (null, flags) = (std::ptr::null_mut(), libc::SOCK_CLOEXEC);
                with_target!(target, fd => opcode::Accept::new(fd, null, null.cast()).flags(flags))
            }
            Kind::Sync | Kind::Len | Kind::Fallocate(_) | Kind::Truncate | Kind::Extent => {
                unreachable!("a helper thread does this")
            }
        }
    }

    fn transfer(&mut self, target: Target, fixed: Option<u16>) -> squeue::Entry {
        let op = self.op.as_ref().expect("an operation in flight is in its slot");
        let is_read = op.kind == Kind::Read;
        let at = op.offset + op.done as u64;
        // Without it the ring would put what must wait on a kernel thread.
        let flags = libc::RWF_NOWAIT;
        sys::fill_iovecs(op.segments.as_slice(), op.done, &mut self.iovecs);
        if let [one] = self.iovecs.as_slice() {
            let (ptr, len) = (one.iov_base.cast::<u8>(), one.iov_len as u32);
            return match (is_read, fixed) {
                (true, Some(index)) => {
                    with_target!(target, fd => opcode::ReadFixed::new(fd, ptr, len, index).offset(at).rw_flags(flags))
                }
                (true, None) => {
                    with_target!(target, fd => opcode::Read::new(fd, ptr, len).offset(at).rw_flags(flags))
                }
                (false, Some(index)) => {
                    with_target!(target, fd => opcode::WriteFixed::new(fd, ptr, len, index).offset(at).rw_flags(flags))
                }
                (false, None) => {
                    with_target!(target, fd => opcode::Write::new(fd, ptr, len).offset(at).rw_flags(flags))
                }
            };
        }
        let (ptr, count) = (self.iovecs.as_ptr(), self.iovecs.len() as u32);
        if is_read {
            with_target!(target, fd => opcode::Readv::new(fd, ptr, count).offset(at).rw_flags(flags))
        } else {
            with_target!(target, fd => opcode::Writev::new(fd, ptr, count).offset(at).rw_flags(flags))
        }
    }

    fn send(&mut self, target: Target) -> squeue::Entry {
        let op = self.op.as_ref().expect("an operation in flight is in its slot");
        sys::fill_iovecs(op.segments.as_slice(), op.done, &mut self.iovecs);
        // A new kernel goes on by itself after it has received a part.
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        if let [one] = self.iovecs.as_slice() {
            let (ptr, len) = (one.iov_base.cast::<u8>(), one.iov_len as u32);
            return with_target!(target, fd => opcode::Send::new(fd, ptr, len).flags(flags));
        }
        self.message.msg_iov = self.iovecs.as_mut_ptr();
        self.message.msg_iovlen = self.iovecs.len() as _;
        let message = &raw const self.message;
        with_target!(target, fd => opcode::SendMsg::new(fd, message).flags(flags as u32))
    }
}

fn recv(op: &Op, target: Target, flags: i32) -> squeue::Entry {
    let segment = &op.segments.as_slice()[0];
    let len = (segment.len() - op.done).min(sys::MAX_TRANSFER) as u32;
    let ptr = segment.as_ptr().wrapping_add(op.done);
    with_target!(target, fd => opcode::Recv::new(fd, ptr, len).flags(flags))
}
