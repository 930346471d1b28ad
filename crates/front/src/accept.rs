//! [`Listeners`]: the sockets on which a server accepts connections.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use spile_core::{Error, ErrorKind, Result};
use spile_engine::{Engine, Listener, sleep};

use crate::LogLimit;

/// After an accept that failed for want of descriptors or memory, the listener rests so long.
const REST: Duration = Duration::from_millis(100);

/// So many of the descriptors that this process may have are not for connections: the control socket, and disks that are opened or
/// handed over, need some when clients have taken all others.
const RESERVED_DESCRIPTORS: u64 = 64;

/// The listening sockets of one server. Each has a task that accepts.
pub struct Listeners {
    front: &'static str,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    sockets: Mutex<Sockets>,
    one_is_over: Condvar,
}

#[derive(Default)]
struct Sockets {
    open: Vec<Arc<Listener>>,
    is_closed: bool,
    /// Tasks that have not ended.
    accepting: usize,
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Sockets> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a task as accepting for as long as it lives.
struct Accepting(Arc<State>);

impl Drop for Accepting {
    fn drop(&mut self) {
        self.0.lock().accepting -= 1;
        self.0.one_is_over.notify_all();
    }
}

impl Listeners {
    /// No sockets yet. `front` is the server's name in the log.
    pub fn new(front: &'static str) -> Self {
        Self { front, state: Arc::default() }
    }

    /// Accepts connections from `fd`, a bound and listening stream socket, on that worker, and calls `admit` with each.
    ///
    /// # Errors
    /// `Shutdown` after [`Listeners::close`]; `InvalidInput` when `fd` is no listening stream socket.
    pub fn listen(
        &self,
        engine: &Engine,
        worker: usize,
        fd: OwnedFd,
        admit: impl Fn(OwnedFd) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        if !rustix::net::sockopt::socket_acceptconn(&fd).unwrap_or(false) {
            return Err(Error::new(ErrorKind::InvalidInput, "the descriptor is not a listening socket"));
        }
        let listener = Arc::new(Listener::from_fd(fd)?);
        let mut sockets = self.state.lock();
        if sockets.is_closed {
            return Err(Error::new(ErrorKind::Shutdown, "the server is stopping"));
        }
        sockets.open.push(listener.clone());
        sockets.accepting += 1;
        drop(sockets);
        let (front, accepting) = (self.front, Accepting(self.state.clone()));
        // Without the lock: when the workers have ended, this drops the task at once, and with it `accepting`.
        engine.spawn_on(worker, move || async move {
            accept_all(front, &listener, admit).await;
            drop(accepting);
        });
        Ok(())
    }

    /// Closes the sockets that are open now. Others may be listened on later.
    pub fn pause(&self) {
        self.state.lock().open.drain(..).for_each(|listener| listener.close());
    }

    /// Closes all sockets. Their tasks end as soon as their workers come to them.
    pub fn close(&self) {
        let mut sockets = self.state.lock();
        sockets.is_closed = true;
        sockets.open.drain(..).for_each(|listener| listener.close());
    }

    /// Waits, after [`Listeners::close`], until nothing is admitted any more. Not to be called on a worker.
    pub fn wait_closed(&self) {
        let busy = |sockets: &mut Sockets| sockets.accepting > 0;
        drop(self.state.one_is_over.wait_while(self.state.lock(), busy).unwrap_or_else(PoisonError::into_inner));
    }
}

async fn accept_all(front: &'static str, listener: &Listener, admit: impl Fn(OwnedFd) -> Result<()>) {
    let failures = LogLimit::default();
    loop {
        let admitted = match listener.accept().await {
            Ok(fd) if is_reserved(&fd) => {
                Err(Error::new(ErrorKind::Exhausted, "too few descriptors are left (ulimit -n)"))
            }
            Ok(fd) => admit(fd),
            Err(error) if error.kind() == ErrorKind::Shutdown => return,
            Err(error) => Err(error),
        };
        if let Err(error) = admitted {
            if let Some(count) = failures.count() {
                tracing::warn!(count, %error, "{front}: a connection could not be accepted");
            }
            sleep(REST).await;
        }
    }
}

/// True for one of the last descriptors. The system gives the lowest number that is free.
fn is_reserved(fd: &OwnedFd) -> bool {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    fd.as_raw_fd() as u64 >= limit.saturating_sub(RESERVED_DESCRIPTORS).max(limit / 2)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use spile_engine::{Config, EngineKind};

    use super::*;

    #[test]
    fn listening_on_workers_that_have_ended_holds_up_nobody() {
        let config = Config { kind: EngineKind::Threads, workers: 1, ..Config::default() };
        let engine = Engine::start(config).unwrap();
        engine.shutdown();
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let listeners = Listeners::new("test");
            let socket = TcpListener::bind("127.0.0.1:0").unwrap();
            listeners.listen(&engine, 0, socket.into(), |_| Ok(())).unwrap();
            listeners.close();
            listeners.wait_closed();
            done.send(()).unwrap();
        });
        is_done.recv_timeout(Duration::from_secs(60)).expect("it waits for itself");
    }

    #[test]
    fn nobody_listens_after_the_end() {
        let config = Config { kind: EngineKind::Threads, workers: 1, ..Config::default() };
        let engine = Engine::start(config).unwrap();
        let listeners = Listeners::new("test");
        listeners.close();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let error = listeners.listen(&engine, 0, socket.into(), |_| Ok(())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Shutdown);
        listeners.wait_closed();
        engine.shutdown();
    }
}
