//! [`Connections`]: how many a server has, where they are, and whether there is room for one more.
//!
//! A *peer* is a process or a host, its *owner* a user of this host or a network. When all places are taken, no peer keeps others out:
//!
//! 1. The peer that holds most places gives one up to a peer that holds fewer: its connection that said nothing for the longest time, if that
//!    time is long ([`IDLE_NS`]) and it waits for no answer. A quiet guest that is a peer of its own is never cut off for being quiet: its peer
//!    holds one place. The guests of one host, over TCP, are one peer: the quietest of them may be cut off, and connects again.
//! 2. Beside all places there is a *reserve* for such a newcomer, and another one for owners that hold fewer than the one that holds most:
//!    a user cannot take it with many processes.
//! 3. When the reserve is taken as well, a peer that holds more than its share loses a connection, also one that is busy.
//!
//! Else the newcomer is turned away.

use std::collections::HashMap;
use std::hash::Hash;
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

/// The most places that a client with many connections needs: no peer with fewer loses one that is busy.
const CLIENT_PLACES: usize = 16;
/// The most places of a reserve.
const MOST_RESERVED: usize = 64;

/// Who is at the other end of a connection, as far as that can be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Peer {
    /// A process of this host, on a Unix socket.
    Process {
        /// Its user.
        uid: u32,
        /// Its number.
        pid: i32,
    },
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
            Some(Ok(address)) => Self::Host(address.ip().to_canonical()),
            _ => sockopt::socket_peercred(&socket)
                .map_or(Self::Unknown, |peer| Self::Process { uid: peer.uid.as_raw(), pid: peer.pid.as_raw_pid() }),
        }
    }

    fn owner(self) -> Owner {
        match self {
            Self::Process { uid, .. } => Owner::User(uid),
            Self::Host(IpAddr::V4(address)) => Owner::Network(address.to_ipv6_mapped().to_bits()),
            // One host has as many addresses as it wants in its network of 64 bits.
            Self::Host(IpAddr::V6(address)) => Owner::Network(address.to_bits() >> 64 << 64),
            Self::Unknown => Owner::Unknown,
        }
    }
}

/// Who has many peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Owner {
    User(u32),
    Network(u128),
    Unknown,
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
    peer: Peer,
    presence: Arc<Presence>,
}

impl Open {
    /// Connections that keep their places.
    fn staying(&self) -> impl Iterator<Item = &Member> {
        self.members.values().filter(|member| !member.presence.is_cut())
    }

    /// How many places each has, of those that are known.
    fn held<K: Copy + Eq + Hash>(&self, key: impl Fn(Peer) -> K) -> HashMap<K, usize> {
        let mut held: HashMap<K, usize> = HashMap::new();
        let known = self.staying().filter(|member| member.peer != Peer::Unknown);
        known.for_each(|member| *held.entry(key(member.peer)).or_default() += 1);
        held
    }

    /// The peer that has most places, if that has more than `newcomer` would have, and how many.
    fn greediest(&self, newcomer: Peer) -> Option<(Peer, usize)> {
        let held = self.held(|peer| peer);
        let own = held.get(&newcomer).copied().unwrap_or(0);
        let most = held.into_iter().max_by_key(|(_, count)| *count);
        most.filter(|(_, count)| newcomer != Peer::Unknown && *count > own + 1)
    }

    /// True when the owner of `newcomer` would have fewer places than the one that has most.
    fn is_of_modest_owner(&self, newcomer: Peer) -> bool {
        let held = self.held(Peer::owner);
        let own = held.get(&newcomer.owner()).copied().unwrap_or(0);
        newcomer != Peer::Unknown && held.values().any(|count| *count > own + 1)
    }

    /// Takes the place of the connection of `peer` that was silent for longest, if that is [`IDLE_NS`] at least and it waits for no answer; also of
    /// one that is busy if `may_be_busy`. True when there was such a connection.
    fn cut_one_of(&self, peer: Peer, now_ns: u64, may_be_busy: bool) -> bool {
        let heard = |member: &Member| member.presence.heard_ns.load(Ordering::Relaxed);
        let is_at_work = |member: &Member| member.presence.at_work.load(Ordering::Relaxed) > 0;
        let may_be_cut = |member: &&Member| {
            let is_idle = !is_at_work(member) && now_ns.saturating_sub(heard(member)) >= IDLE_NS;
            member.peer == peer && (is_idle || may_be_busy)
        };
        let quietest = self.staying().filter(may_be_cut).min_by_key(|member| (is_at_work(member), heard(member)));
        if let Some(member) = quietest {
            member.presence.cut();
        }
        quietest.is_some()
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
        if !self.has_room(&open, peer) {
            drop(open);
            self.turn_away(peer);
            return None;
        }
        Some(self.enter_locked(&mut open, peer))
    }

    /// True when there is a place for `peer`, perhaps because another peer loses one.
    fn has_room(&self, open: &Open, peer: Peer) -> bool {
        // Those that were cut off are still here for a moment.
        if open.members.len() >= self.max.saturating_mul(2).saturating_add(2 * self.reserve()) {
            return false;
        }
        let (staying, now_ns) = (open.staying().count(), now_ns());
        if staying < self.max {
            return true;
        }
        let greediest = open.greediest(peer);
        if greediest.is_some_and(|(greediest, _)| open.cut_one_of(greediest, now_ns, false)) {
            return true;
        }
        if self.is_in_reserve(open, peer) {
            return true;
        }
        greediest.is_some_and(|(greediest, count)| count > self.share() && open.cut_one_of(greediest, now_ns, true))
    }

    /// True when the reserve has a place for `peer`.
    fn is_in_reserve(&self, open: &Open, peer: Peer) -> bool {
        let beyond = open.staying().count().saturating_sub(self.max);
        beyond < self.reserve() && open.greediest(peer).is_some()
            || beyond < 2 * self.reserve() && open.is_of_modest_owner(peer)
    }

    /// How many places there are beside all others for peers that hold few, and as many again for owners that hold few.
    fn reserve(&self) -> usize {
        (self.max / 8).clamp(1, MOST_RESERVED)
    }

    /// No peer loses a busy connection that holds at most so many.
    fn share(&self) -> usize {
        (self.max / 8).max(CLIENT_PLACES).min(self.max / 2)
    }

    /// A place of the reserve for one more connection of `peer`, for a server that decides by itself who gets the others. `None` when the
    /// reserve is taken, or is not for this peer.
    pub fn enter_reserve(self: &Arc<Self>, peer: Peer) -> Option<Place> {
        let mut open = self.open();
        self.is_in_reserve(&open, peer).then(|| self.enter_locked(&mut open, peer))
    }

    /// The peer that holds more than its share, and more than `newcomer` would.
    pub fn greedy(&self, newcomer: Peer) -> Option<Peer> {
        self.open().greediest(newcomer).filter(|(_, count)| *count > self.share()).map(|(peer, _)| peer)
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
    pub fn enter_anyway(self: &Arc<Self>, peer: Peer) -> Place {
        self.enter_locked(&mut self.open(), peer)
    }

    fn enter_locked(self: &Arc<Self>, open: &mut Open, peer: Peer) -> Place {
        let worker = (0..open.by_worker.len()).min_by_key(|worker| open.by_worker[*worker]).unwrap_or(0);
        open.by_worker[worker] += 1;
        let (number, presence) = (open.next, Presence::new());
        open.next += 1;
        open.members.insert(number, Member { peer, presence: presence.clone() });
        Place { connections: self.clone(), number, worker, peer, presence }
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

    /// Who is at the other end.
    pub fn peer(&self) -> Peer {
        self.peer
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

    const A: Peer = process(1);
    const B: Peer = process(2);

    const fn process(pid: i32) -> Peer {
        Peer::Process { uid: 7, pid }
    }

    /// Lets in as many of `peer` as get in, `most` at most, each heard just now.
    fn fill(connections: &Arc<Connections>, peer: Peer, most: usize) -> Vec<Place> {
        std::iter::from_fn(|| connections.enter(peer)).take(most).collect()
    }

    #[test]
    fn a_peer_is_a_process_or_a_host() {
        let (unix, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let uid = rustix::process::geteuid().as_raw();
        assert_eq!(Peer::of(&unix), Peer::Process { uid, pid: std::process::id() as i32 });
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
        let one_more = connections.enter_anyway(Peer::Unknown);
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
        let quiet: Vec<_> = (0..3).map(|pid| connections.enter(process(pid)).unwrap()).collect();
        quiet.iter().for_each(|place| was_idle(place, 0));
        assert!(connections.enter(process(9)).is_none());
        assert!(quiet.iter().all(|place| !place.presence.is_cut()));
    }

    #[test]
    fn a_connection_that_waits_for_an_answer_is_not_idle() {
        let connections = Connections::new("test", 4, 1);
        let greedy = [connections.enter(A).unwrap(), connections.enter(A).unwrap()];
        // The last one is in the reserve.
        let _others = [B, process(3), process(4)].map(|peer| connections.enter(peer).unwrap());
        greedy.iter().for_each(|place| {
            was_idle(place, 0);
            place.presence.begins();
        });
        assert!(connections.enter(process(5)).is_none(), "a connection with a request at work is cut off");
        greedy[1].presence.ends();
        assert!(connections.enter(process(5)).is_some());
        assert!(greedy[1].presence.is_cut() && !greedy[0].presence.is_cut());
    }

    #[test]
    fn a_busy_peer_that_holds_all_places_keeps_no_other_out() {
        let connections = Connections::new("test", 200, 1);
        let hog = fill(&connections, A, 1000);
        assert_eq!(hog.len(), 200);
        // A client with many connections gets all it wants, at first from the reserve.
        let client = fill(&connections, B, 16);
        assert_eq!((client.len(), connections.count()), (16, 216));
        assert!(hog.iter().all(|place| !place.presence.is_cut()), "the reserve is not used first");
        let more: Vec<_> = (3..40).map(|pid| connections.enter(process(pid)).expect("it is kept out")).collect();
        assert!(client.iter().chain(&more).all(|place| !place.presence.is_cut()), "who holds few loses one");
        assert!(hog.iter().any(|place| place.presence.is_cut()));
        assert!(connections.enter(A).is_none());
    }

    #[test]
    fn a_user_with_many_processes_keeps_no_other_user_out() {
        let connections = Connections::new("test", 40, 1);
        // Two each, so that the reserve for processes goes to them.
        let hogs: Vec<_> = (0..100).flat_map(|pid| fill(&connections, process(pid), 2)).collect();
        assert!(hogs.len() > 40 && connections.enter(process(200)).is_none());
        let other = Peer::Process { uid: 8, pid: 1 };
        let host = |last: u16| Peer::Host(std::net::Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last).into());
        let _places = (connections.enter(other).unwrap(), connections.enter(host(1)).unwrap());
        assert_eq!(host(1).owner(), host(2).owner());
        assert!(hogs.iter().all(|place| !place.presence.is_cut()));
    }

    #[test]
    fn the_reserve_is_for_whoever_holds_few() {
        let connections = Connections::new("test", 4, 1);
        let _greedy: Vec<_> = (0..4).map(|_| connections.enter_anyway(A)).collect();
        assert!(connections.enter_reserve(A).is_none() && connections.enter_reserve(Peer::Unknown).is_none());
        let _one = connections.enter_reserve(B).unwrap();
        assert!(connections.enter_reserve(process(3)).is_none(), "it has one place");
        assert_eq!((connections.greedy(B), connections.greedy(A)), (Some(A), None));
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
