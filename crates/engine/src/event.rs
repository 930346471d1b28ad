//! [`Event`]: what another process or a guest rings to wake us, or what we ring to wake it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use spile_core::{Error, ErrorKind, Result, Segment};

use crate::fd::Fd;
use crate::op::Op;
use crate::{sys, worker};

/// An eventfd, such as the kick or the call of a virtqueue, whose count does not matter; or another device that rings
/// ([`EventDevice`]).
///
/// The other process that has the eventfd may set it to block, or not to block, at any moment. So nothing here relies
/// on that, and no worker ever waits in a system call for it.
pub struct Event {
    fd: Arc<Fd>,
    kind: Kind,
}

enum Kind {
    /// An eventfd, rung by writing these 8 bytes.
    Eventfd(Segment),
    Device(Box<dyn EventDevice>),
}

/// How a device other than an eventfd is rung. Its descriptor becomes readable when the other side has rung.
pub trait EventDevice: Send + Sync {
    /// Takes what the other side has rung, so that the next ring makes the descriptor readable again. Must not wait,
    /// also when there is nothing to take.
    ///
    /// # Errors
    /// The system's.
    fn take(&self, fd: BorrowedFd<'_>) -> io::Result<()>;

    /// Rings the other side. Must not wait. Nothing can be done when it fails: then nobody listens.
    fn ring(&self, fd: BorrowedFd<'_>);
}

impl Event {
    /// Takes over an eventfd.
    ///
    /// # Errors
    /// `InvalidInput` when the descriptor is something else: reading another file might block the worker.
    pub fn from_fd(fd: OwnedFd) -> Result<Self> {
        let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        match rustix::fs::readlink(&link, Vec::new()) {
            Ok(name) if name.as_bytes() == b"anon_inode:[eventfd]" => {
                // The ring then writes at once, without asking first whether there is room.
                sys::set_nonblocking(&fd).map_err(|source| Error::io("prepare an eventfd", source))?;
                let one = Segment::zeroed(8);
                one.copy_from_slice(0, &1u64.to_ne_bytes());
                Ok(Self { fd: Fd::shared_eventfd(fd), kind: Kind::Eventfd(one) })
            }
            Ok(name) => {
                let name = name.to_string_lossy().into_owned();
                Err(Error::new(ErrorKind::InvalidInput, format!("the descriptor is {name:?}, which is no eventfd")))
            }
            Err(errno) => Err(Error::io("look at a descriptor under /proc/self/fd", errno.into())),
        }
    }

    /// Takes over the descriptor of a device that rings.
    ///
    /// # Errors
    /// When it cannot be set not to block.
    pub fn from_device(fd: OwnedFd, device: Box<dyn EventDevice>) -> Result<Self> {
        sys::set_nonblocking(&fd).map_err(|source| Error::io("prepare an event device", source))?;
        Ok(Self { fd: Fd::socket(fd), kind: Kind::Device(device) })
    }

    /// Waits until it has been rung since the last wait. Only one wait may be pending.
    ///
    /// # Errors
    /// `Io` with the errno.
    pub async fn wait(&self) -> Result<()> {
        Op::event(&self.fd).run().await.map_err(|errno| Error::errno("wait for an eventfd", errno))?;
        match &self.kind {
            // Where it cannot be emptied without a wait, only the next ring ends the next wait.
            Kind::Eventfd(_) => _ = sys::eventfd_drain(self.fd.raw()),
            Kind::Device(device) => {
                device.take(self.as_fd()).map_err(|source| Error::io("read an event device", source))?;
            }
        }
        Ok(())
    }

    /// Rings it at the end of this worker's turn. Never waits: a full eventfd is rung already.
    ///
    /// # Panics
    /// Outside a worker.
    pub fn ring(&self) {
        let one = match &self.kind {
            Kind::Eventfd(one) => one,
            Kind::Device(device) => return device.ring(self.as_fd()),
        };
        worker::with(|w| {
            let mut reactor = w.reactor.borrow_mut();
            if !reactor.has_ring() || self.fd.begin_ring() {
                reactor.ring(&self.fd, one);
            }
        });
    }

    /// The descriptor, to hand it to another process.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fd::MAX_RINGS;
    use crate::{Config, Engine, EngineKind};

    #[test]
    fn other_files_are_refused() {
        let error = Event::from_fd(tempfile::tempfile().unwrap().into()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains("no eventfd"), "{error}");
    }

    fn on_each_engine(test: impl Fn(&Engine, EngineKind)) {
        for kind in EngineKind::ALL {
            let Ok(engine) = Engine::start(Config { kind, workers: 1, ..Config::default() }) else {
                println!("SKIP events on {kind}: the engine cannot be had");
                continue;
            };
            test(&engine, kind);
            engine.shutdown();
        }
    }

    /// As a peer does that wants us to wait: it is full, and set to block.
    fn fill(peer: &OwnedFd) {
        let set = |flags| rustix::fs::fcntl_setfl(peer, flags).unwrap();
        set(rustix::fs::OFlags::NONBLOCK);
        // A ring of before may still be on its way.
        while rustix::io::write(peer, &(u64::MAX - 1).to_ne_bytes()).is_err() {
            let _ = sys::eventfd_drain(std::os::fd::AsRawFd::as_raw_fd(peer));
        }
        set(rustix::fs::OFlags::empty());
    }

    /// A front end may clear O_NONBLOCK on its side at any moment, and fill or empty the count.
    #[test]
    fn a_peer_cannot_have_us_wait() {
        on_each_engine(|engine, _| {
            let fd = sys::eventfd().unwrap();
            let peer = fd.try_clone().unwrap();
            let event = Arc::new(Event::from_fd(fd).unwrap());
            fill(&peer);
            let (full, last) = (event.clone(), event.clone());
            engine.run_on(0, move || async move {
                (0..1000).for_each(|_| full.ring());
                crate::sleep(std::time::Duration::from_millis(1)).await;
            });
            // The worker goes on; once there is room, it rings again.
            rustix::io::read(&peer, &mut [0; 8]).unwrap();
            engine.run_on(0, move || async move {
                event.ring();
                event.wait().await.unwrap();
                (0..2).for_each(|_| _ = sys::eventfd_drain(event.fd.raw()));
            });
            fill(&peer);
            let full = last.clone();
            engine.run_on(0, move || async move { full.ring() });
            // Nobody waits for that ring, nor does the end.
        });
    }

    /// The guest may have heard all rings that are in flight before it waits for the next one.
    #[test]
    fn a_ring_after_many_that_were_heard_is_heard() {
        on_each_engine(|engine, kind| {
            let fd = sys::eventfd().unwrap();
            let peer = fd.try_clone().unwrap();
            let event = Event::from_fd(fd).unwrap();
            let heard = engine.run_on(0, move || async move {
                let listen = || {
                    let mut count = [0; 8];
                    rustix::io::read(&peer, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
                };
                (0..MAX_RINGS).for_each(|_| event.ring());
                let heard = listen();
                event.ring();
                crate::sleep(std::time::Duration::from_millis(5)).await;
                (heard, listen())
            });
            // Some of the many may come with the last one.
            assert!(heard.0 > 0 && heard.0 + heard.1 == u64::from(MAX_RINGS) + 1, "{kind}: {heard:?}");
        });
    }

    #[test]
    fn waits_end_with_a_ring_before_or_after_on_each_engine() {
        on_each_engine(|engine, _| {
            for _ in 0..2 {
                let fd = sys::eventfd().unwrap();
                let other = fd.try_clone().unwrap();
                let event = Event::from_fd(fd).unwrap();
                let event = engine.run_on(0, move || async move {
                    event.ring();
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
        });
    }
}
