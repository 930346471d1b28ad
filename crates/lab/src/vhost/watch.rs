//! Looking after a device's connection while its queues work on other threads.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use spile_core::{Error, ErrorKind, Result};

use super::backend::{BackendRequest, is_readable};
use super::config::BlkConfig;
use super::device::Device;
use super::queue::signal;

/// Called with the new configuration when the server says that it has changed.
pub type OnConfig = Box<dyn FnMut(&BlkConfig) + Send>;

/// A thread that owns a device. It notices when the server goes away, takes the connection up again if it was told to, and
/// answers the server's requests. Queues see the state of the connection in their [`Link`](super::Link).
#[derive(Debug)]
pub struct Watch {
    thread: JoinHandle<Device>,
    stop: Arc<OwnedFd>,
}

impl Watch {
    /// Starts watching. With `patience`, a broken connection is taken up again; the server has that much time to come back.
    ///
    /// # Errors
    /// `Unsupported` when the server cannot take up requests in flight but `patience` was given.
    pub fn start(device: Device, patience: Option<Duration>, on_config: Option<OnConfig>) -> Result<Self> {
        if patience.is_some() && !device.can_reconnect() {
            let error = Error::new(ErrorKind::Unsupported, "the server does not track requests in flight");
            return Err(error.at_path(device.path()).hint("without that, nobody can go on after its end"));
        }
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let stop = Arc::new(stop.map_err(|e| Error::io("cannot make an eventfd", e.into()))?);
        let watcher = Watcher { device, patience, on_config, stop: stop.clone() };
        let thread = thread::Builder::new().name("vhost-watch".to_owned());
        let thread = thread.spawn(|| watcher.run()).map_err(|e| Error::io("cannot start a thread", e))?;
        Ok(Self { thread, stop })
    }

    /// Stops watching, and returns the device.
    ///
    /// # Panics
    /// When the callback has panicked.
    pub fn stop(self) -> Device {
        signal(&*self.stop);
        self.thread.join().expect("the watching thread panicked")
    }
}

struct Watcher {
    device: Device,
    patience: Option<Duration>,
    on_config: Option<OnConfig>,
    stop: Arc<OwnedFd>,
}

enum Event {
    Stop,
    /// The server's end of the connection is closed.
    Hangup,
    Backend,
}

impl Watcher {
    fn run(mut self) -> Device {
        loop {
            let result = match self.wait() {
                Ok(Event::Stop) => return self.device,
                Ok(Event::Backend) => self.serve_backend(),
                Ok(Event::Hangup) => self.reconnect(),
                Err(error) => Err(error),
            };
            if let Err(error) = result {
                self.device.link().set_lost(error);
                self.device.wake_all();
                return self.device;
            }
        }
    }

    fn wait(&self) -> Result<Event> {
        loop {
            let connection = self.device.connection();
            let mut fds = vec![PollFd::new(&*self.stop, PollFlags::IN), PollFd::new(connection, PollFlags::IN)];
            fds.extend(self.device.backend().map(|channel| PollFd::new(channel, PollFlags::IN)));
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Error::io("poll", e.into())),
            }
            let ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
            match (ready(0), ready(1), ready(2)) {
                (true, _, _) => return Ok(Event::Stop),
                // Nothing was asked, so what there is to read is the end.
                (_, true, _) => return Ok(Event::Hangup),
                (_, _, true) => return Ok(Event::Backend),
                _ => {}
            }
        }
    }

    fn serve_backend(&mut self) -> Result<()> {
        let request = self.device.backend().map(|channel| channel.next(Duration::ZERO)).transpose();
        match request {
            Ok(Some(Some(BackendRequest::ConfigChange))) => {
                let config = self.device.read_config()?;
                if let Some(on_config) = &mut self.on_config {
                    on_config(config);
                }
                Ok(())
            }
            Ok(_) => Ok(()),
            // The server has closed the channel. If it goes, the connection's end will say so.
            Err(_) => {
                self.device.close_backend();
                Ok(())
            }
        }
    }

    fn reconnect(&mut self) -> Result<()> {
        let Some(patience) = self.patience else {
            let error = Error::new(ErrorKind::Io, "the server closed the connection");
            return Err(error.at_path(self.device.path()));
        };
        self.device.link().set_broken();
        let stop = self.stop.clone();
        self.device.reconnect_while(patience, |pause| !is_readable(&*stop, pause).unwrap_or(true))?;
        self.device.link().set_up_again();
        // What the old server had answered without a call is taken now.
        self.device.wake_all();
        Ok(())
    }
}
