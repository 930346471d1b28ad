//! One connection from its first byte to its last: handshake, perhaps TLS, requests, the end.
//!
//! A connection has two tasks. [`serve`] exchanges the messages. A watcher shuts the socket down when the handshake
//! takes too long or the server stops, which ends [`serve`]. So no receive is ever cancelled.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use spile_core::{Disk, Error, ErrorKind, Result};
use spile_engine::{Socket, sleep, spawn};
use spile_front::{Peer, Presence};
use spile_nbd_tls::{Tls, Transport};

use crate::finder::{Found, Wanted};
use crate::inbound::Inbound;
use crate::intake::take_requests;
use crate::negotiate::{self, Negotiator, Next, Offer, TlsMode};
use crate::outflow::send_replies;
use crate::server::ServerState;
use crate::session::Session;
use crate::signal::{Level, Signal};
use crate::wire::handshake::OPTION_HEADER_BYTES;
use crate::wire::reply::cut;

/// No more of a name that was refused is shown.
const MOST_SHOWN_BYTES: usize = 300;

/// So many bytes of the input are looked at in any case: data that are skipped go faster. Not all that have come, because a client may send many short options.
const LEAST_LOOK_BYTES: usize = 4 << 10;

/// How far a connection has come. Its watcher reads this.
#[derive(Default)]
struct Life {
    negotiated: Cell<bool>,
    over: Cell<bool>,
    changed: Signal,
}

impl Life {
    fn set(&self, what: &Cell<bool>) {
        what.set(true);
        self.changed.notify();
    }
}

/// Serves the connected socket `fd` to its end.
pub(crate) async fn serve<D: Disk>(server: Arc<ServerState<D>>, fd: OwnedFd, presence: Arc<Presence>) {
    prepare(&fd);
    let socket = match Socket::from_fd(fd) {
        Ok(socket) => socket,
        Err(error) => return tracing::debug!(%error, "NBD: a connection cannot be used"),
    };
    let transport = Rc::new(Transport::plain(socket));
    let life = Rc::new(Life::default());
    spawn(watch(server.clone(), transport.clone(), life.clone(), presence.clone()));
    if let Err(error) = talk(&server, &transport, &life, presence).await {
        tracing::debug!(%error, "NBD: a connection has ended");
    }
    transport.close().await;
    life.set(&life.over);
}

/// After so long without a word the system asks a TCP peer whether it is still there, then at this interval, so many times.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(60), Duration::from_secs(15), 4);
/// A TCP peer that has not taken what it was sent after so long is gone.
const TAKES_NOTHING: Duration = Duration::from_secs(120);

/// Sets TCP's options: short packets are sent at once, and a peer that is gone without a word is noticed after two minutes. The
/// system does that, so an idle connection wakes nobody here. Other sockets do not have these options, which is no error.
fn prepare(fd: &OwnedFd) {
    use rustix::net::sockopt;
    let (idle, interval, count) = KEEPALIVE;
    let _ = sockopt::set_tcp_nodelay(fd, true);
    let _ = sockopt::set_socket_keepalive(fd, true);
    let _ = sockopt::set_tcp_keepidle(fd, idle);
    let _ = sockopt::set_tcp_keepintvl(fd, interval);
    let _ = sockopt::set_tcp_keepcnt(fd, count);
    let _ = sockopt::set_tcp_user_timeout(fd, TAKES_NOTHING.as_millis() as u32);
}

async fn talk<D: Disk>(
    server: &Arc<ServerState<D>>,
    transport: &Rc<Transport>,
    life: &Life,
    presence: Arc<Presence>,
) -> Result<()> {
    let mut inbound = Inbound::new();
    let Some((agreed, found)) = negotiate(server, transport, &mut inbound).await? else { return Ok(()) };
    life.set(&life.negotiated);
    let (server, lease) = match found {
        Some(Found { server, lease, .. }) => (server.shared.clone(), Some(lease)),
        None => (server.clone(), None),
    };
    let connections = &server.metrics[agreed.export].connections;
    // Before it looks whether the export was withdrawn: whoever withdraws it counts its clients after that.
    connections.fetch_add(1, Ordering::SeqCst);
    let Some(session) = Session::new(server.clone(), agreed, transport.clone(), presence) else {
        connections.fetch_sub(1, Ordering::Relaxed);
        return Ok(());
    };
    let over = Rc::new(Signal::default());
    if lease.is_some() {
        spawn(watch_found(server.clone(), transport.clone(), over.clone()));
    }
    if session.agreed.names_link {
        session.export().set_left_whole(false);
    }
    spawn(send_replies(session.clone()));
    let result = take_requests(&session, &mut inbound).await;
    drop(inbound);
    session.drained().await;
    over.notify();
    session.end();
    if session.agreed.names_link && session.said_good_bye.get() {
        session.export().set_left_whole(true);
    }
    session.metrics().connections.fetch_sub(1, Ordering::Relaxed);
    // No request is in flight any more.
    drop((session, lease));
    result
}

/// Does the handshake, and finds the export when that has to be found. `None` when it ended without one.
async fn negotiate<D: Disk>(
    server: &ServerState<D>,
    transport: &Transport,
    inbound: &mut Inbound,
) -> Result<Option<(negotiate::Session, Option<Found<D>>)>> {
    let (mut out, mut found) = (Vec::new(), None);
    let mut negotiator = Negotiator::new(server.offers_now(), server.tls_mode(), &mut out);
    loop {
        send_all(transport, &mut out).await?;
        let needed = negotiator.bytes_needed(&inbound.peek(OPTION_HEADER_BYTES));
        let most = needed.max(LEAST_LOOK_BYTES);
        if inbound.len() < needed {
            if !inbound.fill(transport).await? {
                return Ok(None);
            }
            continue;
        }
        if let (Some(finder), None) = (&server.finder, &found)
            && let Some((export, queries)) = negotiator.asks_for(&inbound.peek(most))
        {
            let wanted = Wanted { export, queries, peer: Peer::of(transport.socket().as_fd()) };
            let name = wanted.export.clone();
            match finder.find(&wanted).await {
                Ok(there) => {
                    let offer = there.server.shared.only_offer();
                    negotiator.offer(offer.map(|offer| Offer { name, is_alone: there.is_alone, ..offer }));
                    found = Some(there);
                }
                Err(error) => {
                    if let Some(count) = server.refusals.count() {
                        tracing::warn!(count, "NBD: the export {:?} is refused: {error}", cut(&name, MOST_SHOWN_BYTES));
                    }
                    negotiator.refuse(&name, &error);
                }
            }
        }
        let Some(step) = negotiator.step(&inbound.peek(most), &mut out) else { continue };
        inbound.consume(step.consumed);
        match step.next {
            Next::Continue => {}
            Next::StartTls => {
                start_tls(server, transport, inbound, &mut out).await?;
                negotiator.tls_started(server.offers_now());
                found = None;
            }
            Next::Transmit(session) => {
                send_all(transport, &mut out).await?;
                return Ok(Some((session, found)));
            }
            Next::HangUp => {
                send_all(transport, &mut out).await?;
                return Ok(None);
            }
        }
    }
}

async fn start_tls<D: Disk>(
    server: &ServerState<D>,
    transport: &Transport,
    inbound: &Inbound,
    out: &mut Vec<u8>,
) -> Result<()> {
    // CVE-2021-3716: a byte that came in plain text must never be taken for one that came through TLS.
    if inbound.len() > 0 {
        let what = "sent plain bytes behind STARTTLS";
        return Err(Error::new(ErrorKind::Protocol, what));
    }
    let Some(config) = server.tls.clone() else {
        return Err(Error::new(ErrorKind::Unsupported, "no TLS is configured"));
    };
    send_all(transport, out).await?;
    transport.start_tls(Tls::accept(transport.socket(), config).await?)
}

async fn send_all(transport: &Transport, out: &mut Vec<u8>) -> Result<()> {
    if out.is_empty() {
        return Ok(());
    }
    let segment = spile_engine::pool().alloc(out.len());
    segment.copy_from_slice(0, out);
    out.clear();
    transport.send(&[segment]).await
}

/// What ends the wait of a watcher.
enum Event {
    Over,
    TimedOut,
    /// The connection has to give up its place to another client.
    Cut,
    Stop(Level),
}

/// Shuts the socket down when the handshake takes too long, the connection has to give up its place or the server stops. After the handshake it has no timer, so
/// an idle connection causes no wake-up.
async fn watch<D: Disk>(
    server: Arc<ServerState<D>>,
    transport: Rc<Transport>,
    life: Rc<Life>,
    presence: Arc<Presence>,
) {
    let mut is_cut = false;
    let mut stop = server.stop.watch();
    let mut seen = Level::Run;
    let timeout = server.config.handshake_timeout;
    let mut timer: Option<Pin<Box<dyn Future<Output = ()>>>> = Some(Box::pin(sleep(timeout)));
    loop {
        let event = poll_fn(|cx| {
            if let Poll::Ready(level) = stop.poll_above(seen, cx) {
                return Poll::Ready(Event::Stop(level));
            }
            if !is_cut && presence.poll_cut(cx).is_ready() {
                return Poll::Ready(Event::Cut);
            }
            poll_life(&life, &mut timer, cx)
        });
        match event.await {
            Event::Over => return,
            Event::TimedOut => {
                tracing::debug!("NBD: the handshake took too long");
                timer = None;
                transport.socket().shutdown(Shutdown::Both);
            }
            Event::Cut => {
                is_cut = true;
                tracing::info!("NBD: a connection gives up its place, or the memory that it holds, to others");
                transport.socket().shutdown(Shutdown::Both);
            }
            Event::Stop(level) => {
                seen = level;
                let hang_up = level == Level::HangUp;
                transport.socket().shutdown(if hang_up { Shutdown::Both } else { Shutdown::Read });
            }
        }
    }
}

/// Shuts the socket down when the server stops that has the export which was found.
async fn watch_found<D: Disk>(server: Arc<ServerState<D>>, transport: Rc<Transport>, over: Rc<Signal>) {
    let mut stop = server.stop.watch();
    let mut seen = Level::Run;
    loop {
        let level = poll_fn(|cx| match stop.poll_above(seen, cx) {
            Poll::Ready(level) => Poll::Ready(Some(level)),
            Poll::Pending => over.poll_wait(cx).map(|()| None),
        });
        let Some(level) = level.await else { return };
        seen = level;
        transport.socket().shutdown(if level == Level::HangUp { Shutdown::Both } else { Shutdown::Read });
    }
}

fn poll_life(life: &Life, timer: &mut Option<Pin<Box<dyn Future<Output = ()>>>>, cx: &mut Context<'_>) -> Poll<Event> {
    while life.changed.poll_wait(cx).is_ready() {}
    if life.over.get() {
        return Poll::Ready(Event::Over);
    }
    if life.negotiated.get() {
        *timer = None;
    }
    match timer.as_mut().map(|timer| timer.as_mut().poll(cx)) {
        Some(Poll::Ready(())) => Poll::Ready(Event::TimedOut),
        _ => Poll::Pending,
    }
}

/// The TLS mode of a server: `required` is `None` without TLS, else whether TLS is required.
pub(crate) fn tls_mode(required: Option<bool>) -> TlsMode {
    match required {
        None => TlsMode::Off,
        Some(false) => TlsMode::Optional,
        Some(true) => TlsMode::Required,
    }
}
