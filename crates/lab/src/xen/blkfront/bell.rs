//! Sleeping until the back end signals an event channel. A sleep is one system call: the eventfd is watched
//! edge-triggered, so nobody has to read it.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use spile_core::{Error, Result};

#[derive(Debug)]
pub(super) struct Bell {
    epoll: OwnedFd,
}

impl Bell {
    pub fn new(eventfd: &OwnedFd) -> Result<Self> {
        let failed = |e: Errno| Error::io("cannot watch an eventfd", e.into());
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(failed)?;
        epoll::add(&epoll, eventfd, EventData::new_u64(0), EventFlags::IN | EventFlags::ET).map_err(failed)?;
        Ok(Self { epoll })
    }

    /// Waits for a signal, at most for `timeout`.
    pub fn wait(&self, mut timeout: Duration) -> Result<()> {
        let failed = |e: Errno| Error::io("cannot wait for the back end", e.into());
        // The second system call may count in milliseconds, which is too coarse for one who paces requests.
        if timeout < Duration::from_secs(1) {
            let limit = Timespec::try_from(timeout).ok();
            match poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], limit.as_ref()) {
                Ok(0) | Err(Errno::INTR) => return Ok(()),
                Ok(_) => timeout = Duration::ZERO,
                Err(e) => return Err(failed(e)),
            }
        }
        let limit = Timespec::try_from(timeout).ok();
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }];
        match epoll::wait(&self.epoll, &mut events, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(failed(e)),
        }
    }
}
