//! [`Event`]: an eventfd that another process rings, or that we ring.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use spile_core::{Error, ErrorKind, Result};

use crate::fd::Fd;
use crate::op::Op;
use crate::sys;

/// An eventfd, as the kicks and calls of a virtqueue use it. Its count does not matter.
pub struct Event {
    fd: Arc<Fd>,
}

impl Event {
    /// Takes over an eventfd and makes it non-blocking, also for those who share it: else a peer could fill it and have
    /// us wait for room.
    ///
    /// # Errors
    /// `InvalidInput` when the descriptor is something else: reading another file might block the worker.
    pub fn from_fd(fd: OwnedFd) -> Result<Self> {
        let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        match rustix::fs::readlink(&link, Vec::new()) {
            Ok(name) if name.as_bytes() == b"anon_inode:[eventfd]" => {
                sys::set_nonblocking(&fd).map_err(|source| Error::io("prepare an eventfd", source))?;
                Ok(Self { fd: Fd::socket(fd) })
            }
            Ok(name) => {
                let name = name.to_string_lossy().into_owned();
                Err(Error::new(ErrorKind::InvalidInput, format!("the descriptor is {name:?} and no eventfd")))
            }
            Err(errno) => Err(Error::io("look at a descriptor under /proc/self/fd", errno.into())),
        }
    }

    /// Waits until it has been rung since the last wait. One wait at a time.
    ///
    /// # Errors
    /// `Io` with the errno.
    pub async fn wait(&self) -> Result<()> {
        Op::event(&self.fd).run().await.map_err(|errno| Error::errno("wait for an eventfd", errno))?;
        sys::eventfd_read(self.fd.raw());
        Ok(())
    }

    /// Rings it. Never blocks: one that is full is ringing already.
    pub fn ring(&self) {
        sys::eventfd_write(self.fd.raw());
    }

    /// The descriptor, to pass it on.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Engine, EngineKind};

    #[test]
    fn other_files_are_refused() {
        let error = Event::from_fd(tempfile::tempfile().unwrap().into()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains("no eventfd"), "{error}");
    }

    #[test]
    fn a_full_event_is_rung_without_blocking() {
        let fd = sys::eventfd().unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        Event::from_fd(fd).unwrap().ring();
    }

    #[test]
    fn waits_end_with_a_ring_before_or_after_on_both_engines() {
        for kind in [EngineKind::Uring, EngineKind::Threads] {
            let config = Config { kind, workers: 1, ..Config::default() };
            let Ok(engine) = Engine::start(config) else {
                println!("SKIP events on {kind}: the engine cannot be had");
                continue;
            };
            for _ in 0..2 {
                let fd = sys::eventfd().unwrap();
                let other = fd.try_clone().unwrap();
                let event = Event::from_fd(fd).unwrap();
                event.ring();
                let event = engine.run_on(0, move || async move {
                    event.wait().await.unwrap();
                    event
                });
                let ringer = std::thread::spawn(move || {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    rustix::io::write(&other, &1u64.to_ne_bytes()).unwrap();
                });
                engine.run_on(0, move || async move { event.wait().await.unwrap() });
                ringer.join().unwrap();
            }
            engine.shutdown();
        }
    }
}
