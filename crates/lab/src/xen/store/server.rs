//! Runs the requests of all connections to xenstored, and makes answers and events.

use std::collections::{BTreeMap, BTreeSet};

use rustix::io::Errno;
use spile_xen::DomId;
use spile_xen::store::Permission;
use spile_xen::store::wire::{self, Header, MAX_PAYLOAD_BYTES, MessageType};

use super::outbox::Outbox;
use super::tree::{Need, Tree, absolute, home, is_at_or_below};
use super::view::{Event, Transaction, View};

const INTRODUCE: &str = "@introduceDomain";
const RELEASE: &str = "@releaseDomain";
/// The longest token of a watch, in bytes.
const MAX_TOKEN_BYTES: usize = 1024;

/// The number of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::xen) struct ConnId(u64);

#[derive(Debug)]
struct Watch {
    /// The watched path: absolute, or a special one such as `@releaseDomain`.
    path: String,
    token: Vec<u8>,
    /// True when the path was given relative to the domain's folder. Its events are relative too.
    is_relative: bool,
}

#[derive(Debug)]
struct Connection {
    domain: DomId,
    watches: Vec<Watch>,
    transactions: BTreeMap<u32, Transaction>,
    outbox: Outbox,
}

impl Connection {
    /// The largest numbers of watches and transactions.
    fn limits(&self) -> (usize, usize) {
        if self.domain == DomId(0) { (8192, 256) } else { (128, 10) }
    }
}

/// The tree, and all connections.
#[derive(Debug)]
pub(in crate::xen) struct Xenstored {
    tree: Tree,
    connections: BTreeMap<ConnId, Connection>,
    domains: BTreeSet<DomId>,
    next_connection: u64,
    next_transaction: u32,
}

type Answer = Result<Vec<u8>, Errno>;

impl Xenstored {
    pub fn new() -> Self {
        let mut all = Self {
            tree: Tree::new(),
            connections: BTreeMap::new(),
            domains: BTreeSet::new(),
            next_connection: 0,
            next_transaction: 1,
        };
        all.introduce(DomId(0));
        all
    }

    /// Adds a domain, and makes its folder, which the domain may read.
    pub fn introduce(&mut self, domain: DomId) {
        self.domains.insert(domain);
        let path = home(domain);
        let owner = Permission { domain: DomId(0), access: wire::Access::None };
        let reader = Permission { domain, access: wire::Access::Read };
        let own = Permission { domain, access: wire::Access::None };
        let mut view = View { tree: &mut self.tree, transaction: None, who: DomId(0), events: Vec::new() };
        let mut set = |path: &str, value: &str, permissions: &[Permission]| {
            let done = view.write(path, value.as_bytes());
            // Domain 0 may do all, so only its bound on nodes can be in the way; a domain without a folder shows that.
            let _ = done.and_then(|()| view.set_permissions(path, permissions.to_vec()));
        };
        set(&path, "", &[owner, reader]);
        set(&format!("{path}/domid"), &domain.to_string(), &[owner, reader]);
        set(&format!("{path}/data"), "", &[own]);
        let events = view.events;
        events.iter().for_each(|event| self.fire(event));
        self.fire_special(INTRODUCE);
    }

    /// Ends a domain. Its nodes stay until somebody removes them, as on Xen.
    pub fn release(&mut self, domain: DomId) {
        self.domains.remove(&domain);
        self.fire_special(RELEASE);
    }

    pub fn connect(&mut self, domain: DomId) -> ConnId {
        let id = ConnId(self.next_connection);
        self.next_connection += 1;
        let (watches, transactions, outbox) = (Vec::new(), BTreeMap::new(), Outbox::default());
        self.connections.insert(id, Connection { domain, watches, transactions, outbox });
        id
    }

    pub fn disconnect(&mut self, id: ConnId) {
        self.connections.remove(&id);
    }

    /// The bytes that are still to be sent to a connection.
    ///
    /// # Panics
    /// When there is no such connection.
    pub fn outbox(&mut self, id: ConnId) -> &mut Outbox {
        &mut self.connection(id).outbox
    }

    fn connection(&mut self, id: ConnId) -> &mut Connection {
        self.connections.get_mut(&id).expect("the connection is open")
    }

    /// Runs one request. Its answer and all events are in the outboxes afterwards.
    pub fn handle(&mut self, id: ConnId, header: Header, payload: &[u8]) {
        let kind = header.message_type();
        let (answer, events) = match kind {
            Some(MessageType::TransactionEnd) => self.end_transaction(id, header.tx_id, payload),
            Some(kind) => self.request(id, kind, header.tx_id, payload),
            None => (Err(Errno::NOSYS), Vec::new()),
        };
        let answer =
            answer.and_then(|bytes| if bytes.len() > MAX_PAYLOAD_BYTES { Err(Errno::TOOBIG) } else { Ok(bytes) });
        let is_watch = kind == Some(MessageType::Watch) && answer.is_ok();
        self.reply(id, header, kind, answer);
        if is_watch {
            self.fire_first(id);
        }
        events.iter().for_each(|event| self.fire(event));
    }

    fn reply(&mut self, id: ConnId, header: Header, kind: Option<MessageType>, answer: Answer) {
        let (kind, bytes) = match (kind, answer) {
            (Some(kind), Ok(bytes)) => (kind, bytes),
            (_, Err(errno)) => (MessageType::Error, wire::join([wire::errno_word(errno.raw_os_error())])),
            (None, Ok(_)) => return,
        };
        if let Ok(message) = wire::message(kind, header.req_id, header.tx_id, &bytes) {
            self.outbox(id).push(message);
        }
    }

    fn request(&mut self, id: ConnId, kind: MessageType, tx: u32, payload: &[u8]) -> (Answer, Vec<Event>) {
        let done = |result: Result<(), Errno>| result.map(|()| wire::join(["OK"]));
        let answer = match kind {
            MessageType::TransactionStart => self.start_transaction(id, tx),
            MessageType::Watch => done(self.watch(id, payload)),
            MessageType::Unwatch => done(self.unwatch(id, payload)),
            MessageType::ResetWatches => {
                let connection = self.connection(id);
                connection.watches.clear();
                connection.transactions.clear();
                done(Ok(()))
            }
            MessageType::GetDomainPath => domain_in(payload).map(|domain| wire::join([home(domain).as_str()])),
            MessageType::IsDomainIntroduced => {
                domain_in(payload).map(|domain| wire::join([if self.domains.contains(&domain) { "T" } else { "F" }]))
            }
            _ => return self.on_tree(id, kind, tx, payload),
        };
        (answer, Vec::new())
    }

    /// Runs a request about one node.
    fn on_tree(&mut self, id: ConnId, kind: MessageType, tx: u32, payload: &[u8]) -> (Answer, Vec<Event>) {
        let Some(connection) = self.connections.get_mut(&id) else { return (Err(Errno::BADF), Vec::new()) };
        let who = connection.domain;
        let transaction = connection.transactions.get_mut(&tx);
        if tx != 0 && transaction.is_none() {
            return (Err(Errno::NOENT), Vec::new());
        }
        if transaction.as_ref().is_some_and(|transaction| transaction.is_full(who)) {
            return (Err(Errno::NOSPC), Vec::new());
        }
        let (path, rest) = wire::split_first(payload).unwrap_or((payload, &[]));
        let Some(path) = absolute(path, who) else { return (Err(Errno::INVAL), Vec::new()) };
        let mut view = View { tree: &mut self.tree, transaction, who, events: Vec::new() };
        let answer = on_node(&mut view, kind, &path, rest);
        (answer, view.events)
    }

    fn start_transaction(&mut self, id: ConnId, tx: u32) -> Answer {
        if tx != 0 {
            return Err(Errno::BUSY);
        }
        let number = self.next_transaction;
        self.next_transaction = number.checked_add(1).unwrap_or(1);
        let connection = self.connection(id);
        if connection.transactions.len() >= connection.limits().1 {
            return Err(Errno::NOSPC);
        }
        connection.transactions.insert(number, Transaction::default());
        Ok(wire::join([number.to_string().as_str()]))
    }

    fn end_transaction(&mut self, id: ConnId, tx: u32, payload: &[u8]) -> (Answer, Vec<Event>) {
        let end = || {
            let is_commit = match wire::split(payload).next() {
                Some(b"T") => true,
                Some(b"F") => false,
                _ => return Err(Errno::INVAL),
            };
            let transaction = self.connection(id).transactions.remove(&tx).ok_or(Errno::NOENT)?;
            if is_commit { transaction.commit(&mut self.tree).ok_or(Errno::AGAIN) } else { Ok(Vec::new()) }
        };
        match { end }() {
            Ok(events) => (Ok(wire::join(["OK"])), events),
            Err(errno) => (Err(errno), Vec::new()),
        }
    }

    fn watch(&mut self, id: ConnId, payload: &[u8]) -> Result<(), Errno> {
        let connection = self.connection(id);
        let watch = watch_in(payload, connection.domain)?;
        if connection.watches.iter().any(|known| known.path == watch.path && known.token == watch.token) {
            return Err(Errno::EXIST);
        }
        if connection.watches.len() >= connection.limits().0 {
            return Err(Errno::TOOBIG);
        }
        connection.watches.push(watch);
        Ok(())
    }

    fn unwatch(&mut self, id: ConnId, payload: &[u8]) -> Result<(), Errno> {
        let connection = self.connection(id);
        let watch = watch_in(payload, connection.domain)?;
        let is_it = |known: &Watch| known.path == watch.path && known.token == watch.token;
        let place = connection.watches.iter().position(is_it).ok_or(Errno::NOENT)?;
        connection.watches.remove(place);
        Ok(())
    }

    /// Sends the event that every new watch gets at once.
    fn fire_first(&mut self, id: ConnId) {
        let connection = self.connection(id);
        let Some((last, watch)) = connection.watches.iter().enumerate().next_back() else { return };
        let shown = shown_path(watch, &watch.path, connection.domain).to_owned();
        self.send_event(id, last, &shown);
    }

    /// Sends events to all watches of a changed node whose domains may read it.
    fn fire(&mut self, event: &Event) {
        let mut due = Vec::new();
        for (id, connection) in &self.connections {
            if !event.node.allows(connection.domain, Need::Read) {
                continue;
            }
            for (number, watch) in connection.watches.iter().enumerate() {
                let is_for =
                    if event.is_exact { event.path == watch.path } else { is_at_or_below(&event.path, &watch.path) };
                if is_for {
                    due.push((*id, number, shown_path(watch, &event.path, connection.domain).to_owned()));
                }
            }
        }
        due.iter().for_each(|(id, number, path)| self.send_event(*id, *number, path));
    }

    /// Sends events about domains that come and go. Only domain 0 gets them.
    fn fire_special(&mut self, name: &str) {
        let mut due = Vec::new();
        for (id, connection) in self.connections.iter().filter(|(_, connection)| connection.domain == DomId(0)) {
            let numbers = connection.watches.iter().enumerate().filter(|(_, watch)| watch.path == name);
            due.extend(numbers.map(|(number, _)| (*id, number)));
        }
        due.iter().for_each(|(id, number)| self.send_event(*id, *number, name));
    }

    fn send_event(&mut self, id: ConnId, watch: usize, path: &str) {
        let connection = self.connection(id);
        let mut bytes = wire::join([path]);
        bytes.extend_from_slice(&connection.watches[watch].token);
        bytes.push(0);
        if let Ok(message) = wire::message(MessageType::WatchEvent, 0, 0, &bytes) {
            connection.outbox.push_event(message);
        }
    }
}

fn on_node(view: &mut View<'_>, kind: MessageType, path: &str, rest: &[u8]) -> Answer {
    let done = |result: Result<(), Errno>| result.map(|()| wire::join(["OK"]));
    match kind {
        MessageType::Read => view.find(path, Need::Read).map(|node| node.value.clone()),
        MessageType::Directory => {
            view.find(path, Need::Read).map(|node| wire::join(node.children.iter().map(String::as_str)))
        }
        MessageType::DirectoryPart => {
            let node = view.find(path, Need::Read)?;
            directory_part(node.generation, &wire::join(node.children.iter().map(String::as_str)), rest)
        }
        MessageType::GetPerms => view.find(path, Need::Read).map(|node| {
            let texts: Vec<String> = node.permissions.iter().map(Permission::to_string).collect();
            wire::join(texts.iter().map(String::as_str))
        }),
        MessageType::Write => done(view.write(path, rest)),
        MessageType::Mkdir => done(view.make(path)),
        MessageType::Rm => done(view.remove(path)),
        MessageType::SetPerms => {
            let permissions: Result<Vec<_>, _> = wire::split(rest).map(Permission::parse).collect();
            done(permissions.map_err(|_| Errno::INVAL).and_then(|list| view.set_permissions(path, list)))
        }
        _ => Err(Errno::NOSYS),
    }
}

/// The generation, then whole names from an offset on, and an empty one at the end of all.
fn directory_part(generation: u64, names: &[u8], rest: &[u8]) -> Answer {
    let offset = wire::split(rest).next().and_then(wire::decimal).ok_or(Errno::INVAL)? as usize;
    let mut bytes = wire::join([generation.to_string().as_str()]);
    let mut left = names.get(offset..).unwrap_or_default();
    while let Some(end) = left.iter().position(|byte| *byte == 0) {
        if bytes.len() + end + 2 > MAX_PAYLOAD_BYTES {
            return Ok(bytes);
        }
        bytes.extend_from_slice(&left[..=end]);
        left = &left[end + 1..];
    }
    bytes.push(0);
    Ok(bytes)
}

fn domain_in(payload: &[u8]) -> Result<DomId, Errno> {
    let number = wire::split(payload).next().and_then(wire::decimal);
    number.and_then(|number| u16::try_from(number).ok()).map(DomId).ok_or(Errno::INVAL)
}

fn watch_in(payload: &[u8], who: DomId) -> Result<Watch, Errno> {
    let mut texts = wire::split(payload);
    let (Some(path), Some(token)) = (texts.next(), texts.next()) else { return Err(Errno::INVAL) };
    if token.len() > MAX_TOKEN_BYTES {
        return Err(Errno::INVAL);
    }
    let token = token.to_vec();
    if let Some(name) = [INTRODUCE, RELEASE].into_iter().find(|name| name.as_bytes() == path) {
        return Ok(Watch { path: name.to_owned(), token, is_relative: false });
    }
    let whole = absolute(path, who).filter(|_| !path.starts_with(b"@")).ok_or(Errno::INVAL)?;
    Ok(Watch { path: whole, token, is_relative: !path.starts_with(b"/") })
}

/// A path as the watch's owner wrote it.
fn shown_path<'a>(watch: &Watch, path: &'a str, domain: DomId) -> &'a str {
    if !watch.is_relative {
        return path;
    }
    path.strip_prefix(home(domain).as_str()).and_then(|rest| rest.strip_prefix('/')).unwrap_or(path)
}
