//! [`Connections`]: how many a server has, where they are, and whether there is room for one more.
//!
//! When all places are taken, the peer that holds most of them gives one up to a peer that holds fewer: its connection that said
//! nothing for the longest time, if that time is long ([`IDLE_NS`]) and it waits for no answer. So a client that collects idle connections
//! shuts nobody out, and a quiet guest that is a peer of its own is never cut off for being quiet: its peer holds one place. The guests of
//! one host, over TCP, are one peer: the quietest of them may be cut off, and connects again. Where there is no such connection, the newcomer is turned away.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{getpeername, sockopt};
use spile_core::LogLimit;
use spile_core::metrics::now_ns;

/// A connection that has said nothing for so long may have to give its place up.
const IDLE_NS: u64 = 10_000_000_000;

/// Who is at the other end of a connection, as far as that can be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Peer {
    /// A process of this host, on a Unix socket.
    Process(i32),
    /// A host.
    Host(IpAddr),
    /// Not known. Nobody's place is given to such a peer.
    Unknown,
}

impl Peer {
    /// The peer of a connected socket.
    pub fn of(socket: impl AsFd) -> Self {
        let Ok(address) = getpeername(&socket) else { return Self::Unknown };
        match address.map(SocketAddr::try_from) {
            Some(Ok(address)) => Self::Host(address.ip()),
            _ => sockopt::socket_peercred(&socket).map_or(Self::Unknown, |peer| Self::Process(peer.pid.as_raw_pid())),
        }
    }
}

/// True when the peer has closed its side of the connection, also when not all it has sent has been received.
pub fn has_hung_up(socket: impl AsFd) -> bool {
    is_ready(socket, PollFlags::RDHUP)
}

/// True when the system says one of `events` of the socket, or its end. Does not wait.
pub fn is_ready(socket: impl AsFd, events: PollFlags) -> bool {
    poll(&mut [PollFd::new(&socket, events)], Some(&Timespec::default())).is_ok_and(|count| count > 0)
}

/// Counts the open connections of a server by worker, and limits them.
pub struct Connections {
    front: &'static str,
    max: usize,
    open: Mutex<Open>,
    one_is_over: Condvar,
    turned_away: LogLimit,
}

struct Open {
    /// The number of connections of each worker.
    by_worker: Vec<usize>,
    members: HashMap<u64, Member>,
    next: u64,
}

struct Member {
    peer: Peer,
    presence: Arc<Presence>,
}

/// What a connection lets its server know, and the other way round.
#[derive(Default)]
pub struct Presence {
    /// When the client was heard last, by [`now_ns`].
    heard_ns: AtomicU64,
    /// The requests that are at work. Only the connection's worker changes it.
    at_work: AtomicU32,
    is_cut: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Presence {
    fn new() -> Arc<Self> {
        Arc::new(Self { heard_ns: AtomicU64::new(now_ns()), ..Self::default() })
    }

    /// Notes that a request is at work, for whose end the client has to wait.
    pub fn begins(&self) {
        self.at_work.store(self.at_work.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Notes that such a request has ended.
    pub fn ends(&self) {
        self.at_work.store(self.at_work.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
    }

    /// Notes that the client was heard at this time, or has taken something.
    pub fn heard(&self, now_ns: u64) {
        self.heard_ns.store(now_ns, Ordering::Relaxed);
    }

    /// Ready when the connection has to give up its place. One task may wait.
    pub fn poll_cut(&self, cx: &mut Context<'_>) -> Poll<()> {
        // The waker is there before the mark is read, so whoever sets it finds the waker.
        *self.waker.lock().unwrap_or_else(PoisonError::into_inner) = Some(cx.waker().clone());
        if self.is_cut() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// True when the connection has to give up its place.
    pub fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Acquire)
    }

    /// Has the connection give up its place, and what it holds.
    pub fn cut(&self) {
        self.is_cut.store(true, Ordering::Release);
        if let Some(waker) = self.waker.lock().unwrap_or_else(PoisonError::into_inner).take() {
            waker.wake();
        }
    }
}

/// One open connection. It counts for as long as this lives.
pub struct Place {
    connections: Arc<Connections>,
    number: u64,
    worker: usize,
    presence: Arc<Presence>,
}

impl Open {
    /// Connections that keep their places.
    fn staying(&self) -> impl Iterator<Item = &Member> {
        self.members.values().filter(|member| !member.presence.is_cut())
    }

    /// Takes the place of an idle connection of the peer that has most, if that has more than `newcomer` would have. True when there
    /// was such a connection.
    fn cut_one_for(&self, newcomer: Peer, now_ns: u64) -> bool {
        let mut held: HashMap<Peer, usize> = HashMap::new();
        self.staying().for_each(|member| *held.entry(member.peer).or_default() += 1);
        let own = held.get(&newcomer).copied().unwrap_or(0);
        held.remove(&Peer::Unknown);
        let most = held.into_iter().max_by_key(|(_, count)| *count);
        let Some((greediest, _)) = most.filter(|(_, count)| newcomer != Peer::Unknown && *count > own + 1) else {
            return false;
        };
        let heard = |member: &&Member| member.presence.heard_ns.load(Ordering::Relaxed);
        let may_be_cut =
            |member: &&Member| member.peer == greediest && member.presence.at_work.load(Ordering::Relaxed) == 0;
        let idle = self.staying().filter(may_be_cut).min_by_key(heard);
        let idle = idle.filter(|member| now_ns.saturating_sub(heard(member)) >= IDLE_NS);
        if let Some(member) = idle {
            member.presence.cut();
        }
        idle.is_some()
    }
}

impl Connections {
    /// At most `max` connections at a time, spread over so many workers. `front` is the server's name in the log.
    pub fn new(front: &'static str, max: usize, workers: usize) -> Arc<Self> {
        let open = Open { by_worker: vec![0; workers], members: HashMap::new(), next: 0 };
        Arc::new(Self {
            front,
            max,
            open: Mutex::new(open),
            one_is_over: Condvar::new(),
            turned_away: LogLimit::default(),
        })
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for one more connection of `peer`, on the worker that has the fewest; `None` when there are too many, which the log
    /// says at a bounded rate.
    pub fn enter(self: &Arc<Self>, peer: Peer) -> Option<Place> {
        let mut open = self.open();
        // Those that were cut off are still here for a moment.
        let is_full = open.members.len() >= self.max.saturating_mul(2);
        if is_full || open.staying().count() >= self.max && !open.cut_one_for(peer, now_ns()) {
            drop(open);
            self.turn_away(peer);
            return None;
        }
        Some(self.enter_locked(&mut open, peer))
    }

    /// Says in the log, at a bounded rate, that somebody was turned away.
    pub fn turn_away(&self, peer: Peer) {
        if let Some(count) = self.turned_away.count() {
            tracing::warn!(
                count,
                ?peer,
                "{}: all {} places for connections are taken, one was turned away",
                self.front,
                self.max
            );
        }
    }

    /// A place for one more connection even when there are too many: one that another process has handed over.
    pub fn enter_anyway(self: &Arc<Self>) -> Place {
        self.enter_locked(&mut self.open(), Peer::Unknown)
    }

    fn enter_locked(self: &Arc<Self>, open: &mut Open, peer: Peer) -> Place {
        let worker = (0..open.by_worker.len()).min_by_key(|worker| open.by_worker[*worker]).unwrap_or(0);
        open.by_worker[worker] += 1;
        let (number, presence) = (open.next, Presence::new());
        open.next += 1;
        open.members.insert(number, Member { peer, presence: presence.clone() });
        Place { connections: self.clone(), number, worker, presence }
    }

    /// How many connections are open.
    pub fn count(&self) -> usize {
        self.open().members.len()
    }

    /// Waits until no connection is open, at most for `patience`. True when none is.
    pub fn wait_for_none(&self, patience: Duration) -> bool {
        let busy = |open: &mut Open| !open.members.is_empty();
        let waited = self.one_is_over.wait_timeout_while(self.open(), patience, busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

impl Place {
    /// The worker that is to serve the connection.
    pub fn worker(&self) -> usize {
        self.worker
    }

    /// What the connection lets its server know.
    pub fn presence(&self) -> Arc<Presence> {
        self.presence.clone()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.connections.open();
        open.by_worker[self.worker] -= 1;
        open.members.remove(&self.number);
        drop(open);
        self.connections.one_is_over.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Peer = Peer::Process(1);
    const B: Peer = Peer::Process(2);

    #[test]
    fn a_peer_is_a_process_or_a_host() {
        let (unix, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(Peer::of(&unix), Peer::Process(std::process::id() as i32));
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(Peer::of(&tcp), Peer::Host([127, 0, 0, 1].into()));
        assert_eq!(Peer::of(&listener), Peer::Unknown);
    }

    #[test]
    fn connections_are_spread_and_limited() {
        let connections = Connections::new("test", 3, 2);
        let places: Vec<_> = (0..3).map(|_| connections.enter(Peer::Unknown).unwrap()).collect();
        assert_eq!(places.iter().map(Place::worker).collect::<Vec<_>>(), [0, 1, 0]);
        assert!(connections.enter(Peer::Unknown).is_none());
        let one_more = connections.enter_anyway();
        assert_eq!((one_more.worker(), connections.count()), (1, 4));
        drop(places);
        assert_eq!(connections.enter(A).unwrap().worker(), 0);
    }

    /// Says that a connection was heard long ago, `seconds` after the beginning of all time.
    fn was_idle(place: &Place, seconds: u64) {
        place.presence.heard(seconds);
    }

    #[test]
    fn the_peer_with_most_places_gives_up_the_one_that_was_idle_for_longest() {
        let connections = Connections::new("test", 4, 1);
        let greedy: Vec<_> = (0..4).map(|_| connections.enter(A).unwrap()).collect();
        let cut = || greedy.iter().map(|place| place.presence.is_cut()).collect::<Vec<_>>();
        assert!(connections.enter(B).is_none(), "none is idle for long enough");
        greedy.iter().zip([5, 3, 4, 6]).for_each(|(place, heard)| was_idle(place, heard));
        assert!(connections.enter(A).is_none(), "not for itself");
        let one = connections.enter(B).unwrap();
        assert_eq!(cut(), [false, true, false, false]);
        let two = connections.enter(B).unwrap();
        assert_eq!(cut(), [false, true, true, false]);
        [&one, &two].into_iter().for_each(|place| was_idle(place, 1));
        assert!(connections.enter(B).is_none() && connections.enter(A).is_none(), "both have as many");
        assert!(connections.enter(Peer::Host([127, 0, 0, 1].into())).is_some(), "one of two is given to a third peer");
    }

    #[test]
    fn quiet_peers_with_one_connection_each_keep_it() {
        let connections = Connections::new("test", 3, 1);
        let quiet: Vec<_> = (0..3).map(|pid| connections.enter(Peer::Process(pid)).unwrap()).collect();
        quiet.iter().for_each(|place| was_idle(place, 0));
        assert!(connections.enter(Peer::Process(9)).is_none());
        assert!(quiet.iter().all(|place| !place.presence.is_cut()));
    }

    #[test]
    fn a_connection_that_waits_for_an_answer_is_not_idle() {
        let connections = Connections::new("test", 2, 1);
        let greedy = [connections.enter(A).unwrap(), connections.enter(A).unwrap()];
        greedy.iter().for_each(|place| {
            was_idle(place, 0);
            place.presence.begins();
        });
        assert!(connections.enter(B).is_none(), "a connection with a request at work is cut off");
        greedy[1].presence.ends();
        assert!(connections.enter(B).is_some());
        assert!(greedy[1].presence.is_cut() && !greedy[0].presence.is_cut());
    }

    #[test]
    fn a_cut_wakes_the_task_that_waits_for_it() {
        let presence = Presence::new();
        let mut cx = Context::from_waker(Waker::noop());
        assert!(presence.poll_cut(&mut cx).is_pending());
        presence.cut();
        assert!(presence.poll_cut(&mut cx).is_ready());
    }

    #[test]
    fn the_end_of_the_last_connection_is_noticed() {
        let connections = Connections::new("test", 3, 1);
        let place = connections.enter(A).unwrap();
        assert!(!connections.wait_for_none(Duration::from_millis(1)));
        let waiter = connections.clone();
        let thread = std::thread::spawn(move || waiter.wait_for_none(Duration::from_secs(60)));
        drop(place);
        assert!(thread.join().unwrap());
    }
}
