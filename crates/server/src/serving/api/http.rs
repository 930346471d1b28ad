//! The thread of the control socket: it decides which callers are let in, for how long, and which of the two languages a caller
//! speaks.
//!
//! A caller that begins with a capital letter speaks HTTP (`GET /…`). Everything else is a line of JSON, which a successor
//! uses because it is given descriptors beside it ([`super::super::control`]).
//!
//! Only the server's user and root are let in. At most [`MAX_CONNECTIONS`] are open, and [`MAX_OF_A_PROCESS`] of one process, and [`RESERVED`] are for
//! those that have none, so that a few callers cannot take all places; each connection takes one request, which has to come within seconds. An idle server's thread sleeps
//! without a timer.
//!
//! From the moment a whole line was heard until it is answered, nobody is let in: when everything is given to a successor, the next
//! caller belongs to the successor.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener as StdListener;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::{RecvFlags, recv, sockopt};
use spile_core::{Error, ErrorKind, Result};
use spile_front::{Connections, Peer};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc as async_mpsc, oneshot};
use tokio::time::{sleep, timeout};

use super::routes::refusal;
use crate::serving::control::{Event, answer_line, refuse_line};

/// The most connections at a time. A further caller gets an error and is hung up on.
const MAX_CONNECTIONS: usize = 64;
/// The most connections of one process at a time.
const MAX_OF_A_PROCESS: usize = 16;
/// So many of all places are for processes that have no connection: a few processes together cannot take all.
const RESERVED: usize = 16;
/// The most callers at a time that are told why they are refused. Further ones are hung up on without a word.
const MAX_REFUSED: usize = 16;
/// How long a caller may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a call may take, its answer included. To close a disk may take long.
const CALL_PATIENCE: Duration = Duration::from_secs(150);
/// How long the thread rests after an accept that failed.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// A caller whose line was heard. Nobody is let in until it is answered.
pub struct Pause {
    /// A message comes here once nobody is let in any more.
    pub closed: mpsc::Sender<()>,
    /// A message here lets callers in again. When it is dropped, nobody is ever let in again.
    pub open_again: oneshot::Receiver<()>,
}

/// The callers that are refused, in the place of a process. No process has this number.
const REFUSED: i32 = 0;

/// The number of open connections of each process.
#[derive(Clone, Default)]
struct OpenConnections(Arc<Mutex<HashMap<i32, usize>>>);

/// An open connection, counted until this is dropped.
struct Counted {
    all: OpenConnections,
    process: i32,
}

impl OpenConnections {
    /// Counts one more caller that is refused; `None` when there are too many of these.
    fn enter_refused(&self) -> Option<Counted> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let refused = open.entry(REFUSED).or_default();
        if *refused >= MAX_REFUSED {
            return None;
        }
        *refused += 1;
        Some(Counted { all: self.clone(), process: REFUSED })
    }

    /// Counts one more connection of `process`; `None` when it would be too many.
    fn enter(&self, process: i32) -> Option<Counted> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = open.iter().filter(|(process, _)| **process != REFUSED).map(|(_, count)| count).sum();
        let own = open.entry(process).or_default();
        let places = if *own == 0 { MAX_CONNECTIONS } else { MAX_CONNECTIONS - RESERVED };
        if all >= places || *own >= MAX_OF_A_PROCESS {
            open.retain(|_, own| *own > 0);
            return None;
        }
        *own += 1;
        Some(Counted { all: self.clone(), process })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut open = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = open.get_mut(&self.process) {
            *own -= 1;
        }
        open.retain(|_, own| *own > 0);
    }
}

/// Who answers on a control socket.
#[derive(Clone)]
pub struct Answering {
    /// What is answered to HTTP.
    pub router: Router,
    /// Counts the calls that are being answered.
    pub calls: Arc<Connections>,
    /// Who takes lines of JSON. Whoever takes none refuses them.
    pub events: Option<mpsc::Sender<Event>>,
}

/// Hears the control socket on a thread of its own.
///
/// # Errors
/// When the thread or its runtime cannot be started.
pub fn listen(fd: OwnedFd, answering: Answering) -> Result<()> {
    let failed = |source| Error::io("start the control socket's thread", source);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let listener = StdListener::from(fd);
    listener.set_nonblocking(true).map_err(failed)?;
    let thread = std::thread::Builder::new().name("spile-control".to_owned());
    let body = move || {
        // It ends with the process.
        runtime.block_on(async {
            match UnixListener::from_std(listener) {
                Ok(listener) => accept(listener, answering).await,
                Err(error) => tracing::error!(%error, "the control socket cannot be heard"),
            }
        });
    };
    thread.spawn(body).map(drop).map_err(failed)
}

async fn accept(listener: UnixListener, answering: Answering) {
    let (pauses, mut paused) = async_mpsc::channel::<Pause>(MAX_CONNECTIONS);
    let open = OpenConnections::default();
    let door = Door { answering, pauses };
    loop {
        tokio::select! {
            biased;
            Some(pause) = paused.recv() => keep_closed(&listener, pause).await,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => door.let_in(&open, stream),
                // Such as for want of descriptors, and then the next try fails as well.
                Err(_) => sleep(ACCEPT_REST).await,
            },
        }
    }
}

/// Lets nobody in until the caller that was heard is answered. Meanwhile the socket blocks: older builds that take it over wait in
/// `accept` and expect that.
async fn keep_closed(listener: &UnixListener, pause: Pause) {
    let _ = rustix::io::ioctl_fionbio(listener, false);
    let _ = pause.closed.send(());
    if pause.open_again.await.is_err() {
        std::future::pending::<()>().await;
    }
    let _ = rustix::io::ioctl_fionbio(listener, true);
}

#[derive(Clone)]
struct Door {
    answering: Answering,
    pauses: async_mpsc::Sender<Pause>,
}

impl Door {
    fn let_in(&self, open: &OpenConnections, stream: UnixStream) {
        let own = rustix::process::geteuid();
        let Ok(peer) = sockopt::socket_peercred(&stream) else { return };
        let is_ours = peer.uid == own || peer.uid.is_root();
        let counted = if is_ours { open.enter(peer.pid.as_raw_nonzero().get()) } else { None };
        let is_refused = counted.is_none();
        let Some(counted) = counted.or_else(|| open.enter_refused()) else { return };
        let door = self.clone();
        tokio::spawn(async move {
            let Some(speaks_http) = language(&stream).await else { return };
            let refused = match (is_refused, is_ours) {
                (false, _) => None,
                (true, true) => Some(Error::new(ErrorKind::Exhausted, "too many connections to the control socket")),
                (true, false) => Some(Error::new(ErrorKind::Denied, "only the server's own user and root are heard")),
            };
            match speaks_http {
                true => {
                    door.serve(stream, refused).await;
                    drop(counted);
                }
                false => door.hear_line(stream, refused, counted),
            }
        });
    }

    /// One call by HTTP.
    async fn serve(&self, stream: UnixStream, refused: Option<Error>) {
        let _counted = self.answering.calls.enter_anyway(Peer::Unknown);
        let router = match refused {
            Some(error) => {
                let error = Arc::new(error);
                Router::new().fallback(move || std::future::ready(refusal(error.duplicate())))
            }
            None => self.answering.router.clone(),
        };
        let mut server = hyper::server::conn::http1::Builder::new();
        server.timer(TokioTimer::new()).header_read_timeout(PATIENCE).keep_alive(false).max_buf_size(16 << 10);
        let call = server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
        // What fails here the caller sees.
        let _ = timeout(CALL_PATIENCE, call).await;
    }

    /// A line of JSON and perhaps descriptors, on a thread of its own: lines are rare.
    fn hear_line(&self, stream: UnixStream, refused: Option<Error>, counted: Counted) {
        let Ok(stream) = stream.into_std() else { return };
        if stream.set_nonblocking(false).is_err() {
            return;
        }
        let is_command =
            || Error::new(ErrorKind::Unsupported, "a command listens here, and no server: it has jobs only");
        let events = match (refused, self.answering.events.clone()) {
            (None, Some(events)) => events,
            (refused, _) => return refuse_line(stream, &refused.unwrap_or_else(is_command)),
        };
        let pauses = self.pauses.clone();
        let hear = move || {
            answer_line(stream, &events, |pause| pauses.blocking_send(pause).is_ok());
            drop(counted);
        };
        let _ = std::thread::Builder::new().name("spile-line".to_owned()).spawn(hear);
    }
}

/// True when a caller speaks HTTP, false when it sends a line; `None` when it sends nothing.
async fn language(stream: &UnixStream) -> Option<bool> {
    let first = async {
        loop {
            stream.readable().await.ok()?;
            let mut byte = [0];
            let peeked = stream
                .try_io(Interest::READABLE, || Ok(recv(stream, &mut byte, RecvFlags::PEEK).map(|(_, count)| count)?));
            match peeked {
                Ok(0) => return None,
                Ok(_) => return Some(byte[0].is_ascii_uppercase()),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
    };
    timeout(PATIENCE, first).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_cannot_take_all_places() {
        let open = OpenConnections::default();
        let hostile: Vec<Counted> = std::iter::from_fn(|| open.enter(7)).collect();
        assert_eq!(hostile.len(), MAX_OF_A_PROCESS);
        let other = open.enter(8).expect("another process gets in");
        let more: Vec<Counted> = (9..100).filter_map(|process| open.enter(process)).collect();
        assert_eq!(hostile.len() + 1 + more.len(), MAX_CONNECTIONS);
        drop((hostile, other, more));
        assert!(open.enter(7).is_some());
    }

    #[test]
    fn a_few_processes_cannot_take_all_places() {
        let open = OpenConnections::default();
        let hostile: Vec<Counted> =
            (1..=8).flat_map(|pid| std::iter::from_fn(|| open.enter(pid)).collect::<Vec<_>>()).collect();
        assert!(hostile.len() < MAX_CONNECTIONS);
        let _another = open.enter(99).expect("another process gets in");
    }

    #[test]
    fn callers_that_are_refused_are_bounded_and_take_nobodys_place() {
        let open = OpenConnections::default();
        let refused: Vec<Counted> = std::iter::from_fn(|| open.enter_refused()).collect();
        assert_eq!(refused.len(), MAX_REFUSED);
        let others: Vec<Counted> = (1..=100).filter_map(|process| open.enter(process)).collect();
        assert_eq!(others.len(), MAX_CONNECTIONS);
        drop(refused);
        assert!(open.enter_refused().is_some());
    }
}
