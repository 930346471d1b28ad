//! [`XenStore`]: a client of xenstore.

use std::env;
use std::fs::{self, OpenOptions};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use spile_core::{Error, ErrorKind, Result};

use super::connection::{Connection, WatchEvent, within};
use super::wire::{self, MAX_PATH_BYTES, MessageType, Permission};
use crate::DomId;

/// The places at which the store is looked for when the environment names none.
const USUAL_PATHS: [&str; 3] = ["/run/xenstored/socket", "/var/run/xenstored/socket", "/dev/xen/xenbus"];
/// A transaction that failed so often, because others changed the same nodes, is given up.
const MAX_TRANSACTION_TRIES: usize = 100;
/// The most bytes of all names below one node. A store with more is broken.
const MAX_NAMES_BYTES: usize = 1 << 20;
/// Reading a long list is given up when the list has changed so often meanwhile.
const MAX_LIST_TRIES: usize = 20;

/// A transaction, or none. Others see the changes of a transaction at its end, all of them or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tx(u32);

impl Tx {
    /// No transaction: each request takes effect by itself.
    pub const NONE: Self = Self(0);
}

/// A connection to xenstore. It has one request at a time, which waits for its answer, at most a minute. Watches and
/// transactions belong to the connection and end with it.
///
/// Every method fails with `NotFound`, `Denied` and so on when the store answers so; the store's word is in the
/// message. It fails with `InvalidInput` when a path or a message would be too long, and with `Protocol`, `TimedOut` or
/// `Io` when the store cannot be understood or reached. After those three the connection cannot be used any more.
pub struct XenStore {
    connection: Connection,
}

impl XenStore {
    /// Connects to the store at `path`: the daemon's Unix socket, or the device.
    ///
    /// # Errors
    /// `NotFound` when nothing is there, `InvalidInput` when it is neither a socket nor a device; else the system's.
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |e| Error::io("connect to xenstore", e).at_path(path);
        let file_type = fs::metadata(path).map_err(failed)?.file_type();
        if file_type.is_socket() {
            return UnixStream::connect(path).map(Self::from_socket).map_err(failed);
        }
        if !file_type.is_char_device() {
            let message = "connect to xenstore: this is neither a socket nor a device";
            return Err(Error::new(ErrorKind::InvalidInput, message).at_path(path));
        }
        let device = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
        Ok(Self { connection: Connection::new(device.into(), false) })
    }

    /// A connection to the store at the other end of `socket`.
    pub fn from_socket(socket: UnixStream) -> Self {
        Self { connection: Connection::new(OwnedFd::from(socket), true) }
    }

    /// Connects to the store of this machine. When the environment has `XENSTORED_PATH`, that place alone is tried;
    /// else /run/xenstored/socket, /var/run/xenstored/socket and /dev/xen/xenbus, in this order.
    ///
    /// # Errors
    /// When no place has a store. The message names all places that were tried, and why each failed.
    pub fn open_default() -> Result<Self> {
        match env::var_os("XENSTORED_PATH").filter(|path| !path.is_empty()) {
            Some(path) => Self::open(Path::new(&path)),
            None => Self::open_first(&USUAL_PATHS.map(PathBuf::from)),
        }
    }

    pub(super) fn open_first(paths: &[PathBuf]) -> Result<Self> {
        let mut kind = ErrorKind::NotFound;
        let mut tried = Vec::new();
        for path in paths {
            match Self::open(path) {
                Ok(store) => return Ok(store),
                Err(error) => {
                    if kind == ErrorKind::NotFound {
                        kind = error.kind();
                    }
                    tried.push(error.to_string());
                }
            }
        }
        Err(Error::new(kind, format!("no xenstore can be reached: {}", tried.join("; ")))
            .hint("is this a domain of Xen, and does xenstored run? XENSTORED_PATH names another place"))
    }

    /// True when the store could not be understood or reached, so that only another connection helps.
    pub fn is_lost(&self) -> bool {
        self.connection.is_broken()
    }

    /// The value at `path`.
    ///
    /// # Errors
    /// `NotFound` when there is no such node; otherwise see [`XenStore`].
    pub fn read(&mut self, tx: Tx, path: &str) -> Result<Vec<u8>> {
        self.ask(MessageType::Read, tx, path, &[])
    }

    /// The value at `path`, which has to be text.
    ///
    /// # Errors
    /// As [`XenStore::read`]; `InvalidInput` when it is not UTF-8.
    pub fn read_string(&mut self, tx: Tx, path: &str) -> Result<String> {
        String::from_utf8(self.read(tx, path)?)
            .map_err(|_| Error::new(ErrorKind::InvalidInput, format!("read {path}: the value is not text")))
    }

    /// The text at `path`, or `None` when there is no such node.
    ///
    /// # Errors
    /// As [`XenStore::read_string`], without `NotFound`.
    pub fn read_optional(&mut self, tx: Tx, path: &str) -> Result<Option<String>> {
        match self.read_string(tx, path) {
            Err(error) if error.os_errno() == Some(libc::ENOENT) => Ok(None),
            value => value.map(Some),
        }
    }

    /// Sets the value at `path`. Missing nodes above it are made.
    ///
    /// # Errors
    /// See [`XenStore`].
    pub fn write(&mut self, tx: Tx, path: &str, value: &str) -> Result<()> {
        let what = what(MessageType::Write, path);
        check_path(&what, path)?;
        let mut payload = wire::join([path]);
        payload.extend_from_slice(value.as_bytes());
        self.do_so(MessageType::Write, tx, &what, &payload)
    }

    /// The names of the nodes right below `path`.
    ///
    /// # Errors
    /// `NotFound` when there is no such node; otherwise see [`XenStore`].
    pub fn list(&mut self, tx: Tx, path: &str) -> Result<Vec<String>> {
        match self.ask(MessageType::Directory, tx, path, &[]) {
            Ok(payload) => names(path, &payload),
            Err(error) if error.os_errno() == Some(libc::E2BIG) => self.list_in_parts(tx, path),
            Err(error) => Err(error),
        }
    }

    /// Removes the node at `path` and all nodes below it.
    ///
    /// # Errors
    /// `NotFound` when the node above does not exist (with some stores, when the node itself does not); see
    /// [`XenStore`].
    pub fn remove(&mut self, tx: Tx, path: &str) -> Result<()> {
        self.tell(MessageType::Rm, tx, path, &[])
    }

    /// Makes a node with an empty value at `path`, and missing nodes above it. A node that exists stays as it is.
    ///
    /// # Errors
    /// See [`XenStore`].
    pub fn make_folder(&mut self, tx: Tx, path: &str) -> Result<()> {
        self.tell(MessageType::Mkdir, tx, path, &[])
    }

    /// The permissions of `path`, the owner's first.
    ///
    /// # Errors
    /// See [`XenStore`].
    pub fn permissions(&mut self, tx: Tx, path: &str) -> Result<Vec<Permission>> {
        let payload = self.ask(MessageType::GetPerms, tx, path, &[])?;
        let permissions: Result<_> = wire::split(&payload).map(Permission::parse).collect();
        permissions.map_err(|e| within(&what(MessageType::GetPerms, path), &e))
    }

    /// Sets the permissions of `path`, the owner's first.
    ///
    /// # Errors
    /// See [`XenStore`].
    pub fn set_permissions(&mut self, tx: Tx, path: &str, permissions: &[Permission]) -> Result<()> {
        let entries: Vec<String> = permissions.iter().map(Permission::to_string).collect();
        let entries: Vec<&str> = entries.iter().map(String::as_str).collect();
        self.tell(MessageType::SetPerms, tx, path, &entries)
    }

    /// Watches `path` and everything below it. Each change comes as an event with `token`; one event comes at once.
    ///
    /// # Errors
    /// `Exists` when there is such a watch already; see [`XenStore`].
    pub fn watch(&mut self, path: &str, token: &str) -> Result<()> {
        self.tell(MessageType::Watch, Tx::NONE, path, &[token])
    }

    /// Ends a watch. Events that the store has already sent may still come.
    ///
    /// # Errors
    /// `NotFound` when there is no such watch; see [`XenStore`].
    pub fn unwatch(&mut self, path: &str, token: &str) -> Result<()> {
        self.tell(MessageType::Unwatch, Tx::NONE, path, &[token])
    }

    /// The next event. Waits at most `timeout` for it, or without end when that is `None`; returns `None` when no event
    /// has come. Events that come while a request waits for its answer are kept until they are taken here, even when
    /// the connection fails meanwhile. Take events until there are none before you wait for [`XenStore::as_fd`].
    ///
    /// # Errors
    /// `Exhausted` when thousands of different events wait; see [`XenStore`].
    pub fn next_event(&mut self, timeout: Option<Duration>) -> Result<Option<WatchEvent>> {
        self.connection.next_event(timeout)
    }

    /// Runs `f` as one transaction. When others have changed the same nodes meanwhile, `f` runs again from its start.
    /// When `f` fails, the transaction changes nothing.
    ///
    /// # Errors
    /// The errors of `f`; `Busy` when others changed the nodes a hundred times; see [`XenStore`].
    pub fn transaction<T>(&mut self, mut f: impl FnMut(&mut Self, Tx) -> Result<T>) -> Result<T> {
        for _ in 0..MAX_TRANSACTION_TRIES {
            let tx = self.start_transaction()?;
            let value = match f(self, tx) {
                Ok(value) => value,
                Err(error) => {
                    // The error of `f` matters, and not how the transaction ends: a store that is gone has ended it
                    // too.
                    let _ = self.end_transaction(tx, "F");
                    return Err(error);
                }
            };
            match self.end_transaction(tx, "T") {
                Ok(()) => return Ok(value),
                Err(error) if error.os_errno() == Some(libc::EAGAIN) => {}
                Err(error) => return Err(error),
            }
        }
        let message = format!("a transaction of xenstore was crossed by others {MAX_TRANSACTION_TRIES} times");
        Err(Error::new(ErrorKind::Busy, message))
    }

    /// The path below which the nodes of a domain lie, such as /local/domain/3.
    ///
    /// # Errors
    /// See [`XenStore`].
    pub fn domain_path(&mut self, domain: DomId) -> Result<String> {
        let what = format!("get the path of domain {domain}");
        let payload = wire::join([domain.to_string().as_str()]);
        let reply = self.connection.exchange(MessageType::GetDomainPath, 0, &what, &payload)?;
        let path = wire::split(&reply).next().unwrap_or_default();
        wire::text(path).map(str::to_owned).map_err(|e| within(&what, &e))
    }

    /// The number of the domain in which this process runs.
    ///
    /// # Errors
    /// `Protocol` when the store holds no number there; see [`XenStore`].
    pub fn own_domid(&mut self) -> Result<DomId> {
        let value = self.read_string(Tx::NONE, "domid")?;
        value.trim().parse().map(DomId).map_err(|e| {
            let shown = value.escape_default();
            Error::new(ErrorKind::Protocol, format!("read domid: `{shown}` is no domain's number")).caused_by(e)
        })
    }

    /// The descriptor, which is readable when a message has come. It does not show events that are kept in memory
    /// already ([`XenStore::next_event`]).
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    #[cfg(test)]
    pub(super) fn set_reply_limit(&mut self, limit: Duration) {
        self.connection.reply_limit = limit;
    }

    /// Sends a request with `path` and the texts `more`, and returns the answer.
    fn ask(&mut self, kind: MessageType, tx: Tx, path: &str, more: &[&str]) -> Result<Vec<u8>> {
        let what = what(kind, path);
        check_path(&what, path)?;
        if more.iter().any(|text| text.contains('\0')) {
            return Err(Error::new(ErrorKind::InvalidInput, format!("{what}: a NUL in what goes with the path")));
        }
        let payload = wire::join([path].into_iter().chain(more.iter().copied()));
        self.connection.exchange(kind, tx.0, &what, &payload)
    }

    /// As [`Self::ask`], for requests whose answer says only that they are done.
    fn tell(&mut self, kind: MessageType, tx: Tx, path: &str, more: &[&str]) -> Result<()> {
        self.ask(kind, tx, path, more).and_then(|reply| check_done(&what(kind, path), &reply))
    }

    fn do_so(&mut self, kind: MessageType, tx: Tx, what: &str, payload: &[u8]) -> Result<()> {
        self.connection.exchange(kind, tx.0, what, payload).and_then(|reply| check_done(what, &reply))
    }

    fn start_transaction(&mut self) -> Result<Tx> {
        let what = "start a transaction of xenstore";
        let reply = self.connection.exchange(MessageType::TransactionStart, 0, what, b"\0")?;
        let id = wire::split(&reply).next().and_then(wire::decimal).filter(|id| *id != 0);
        id.map(Tx).ok_or_else(|| Error::new(ErrorKind::Protocol, format!("{what}: the store gave no number for it")))
    }

    fn end_transaction(&mut self, tx: Tx, verdict: &str) -> Result<()> {
        let what = "end a transaction of xenstore";
        self.do_so(MessageType::TransactionEnd, tx, what, &wire::join([verdict]))
    }

    /// As [`Self::list`], when the names do not fit into one message. They come in parts, each with the node's
    /// generation. When the generation changes in between, the list is read again from its start.
    fn list_in_parts(&mut self, tx: Tx, path: &str) -> Result<Vec<String>> {
        'anew: for _ in 0..MAX_LIST_TRIES {
            let (mut all, mut generation) = (Vec::new(), None);
            while all.len() <= MAX_NAMES_BYTES {
                let reply = self.ask(MessageType::DirectoryPart, tx, path, &[&all.len().to_string()])?;
                let Some((now, part, is_end)) = split_part(&reply) else {
                    let message = format!("list {path}: a part that is not a generation and names");
                    return Err(Error::new(ErrorKind::Protocol, message));
                };
                if generation.get_or_insert_with(|| now.to_vec()) != now {
                    continue 'anew;
                }
                all.extend_from_slice(part);
                if is_end {
                    return names(path, &all);
                }
            }
            let message = format!("list {path}: over {MAX_NAMES_BYTES} bytes of names");
            return Err(Error::new(ErrorKind::Protocol, message));
        }
        let message = format!("list {path}: it changed {MAX_LIST_TRIES} times while it was read");
        Err(Error::new(ErrorKind::Busy, message))
    }
}

/// Decodes a part of a list: the generation, the names, and whether this is the last part. The list ends with an empty
/// name: a NUL alone, or a second NUL after the last name. A part that is not the last has at least one name.
fn split_part(reply: &[u8]) -> Option<(&[u8], &[u8], bool)> {
    let (generation, part) = wire::split_first(reply)?;
    match part {
        [0] => Some((generation, &[], true)),
        [names @ .., 0] if names.ends_with(&[0]) => Some((generation, names, true)),
        [_, .., 0] => Some((generation, part, false)),
        _ => None,
    }
}

/// The name of a request in error messages.
fn what(kind: MessageType, path: &str) -> String {
    let verb = match kind {
        MessageType::Read => "read",
        MessageType::Write => "write",
        MessageType::Directory | MessageType::DirectoryPart => "list",
        MessageType::Rm => "remove",
        MessageType::Mkdir => "make",
        MessageType::GetPerms => "get permissions of",
        MessageType::SetPerms => "set permissions of",
        MessageType::Watch => "watch",
        MessageType::Unwatch => "unwatch",
        _ => "ask for",
    };
    format!("{verb} {path}")
}

/// Checks a path. A NUL in it would end the path early, and the rest would be taken for something else.
fn check_path(what: &str, path: &str) -> Result<()> {
    let fault = match path {
        "" => "the path is empty",
        _ if path.contains('\0') => "the path has a NUL",
        _ if path.len() > MAX_PATH_BYTES => "a path has at most 3072 bytes",
        _ => return Ok(()),
    };
    let shown: String = what.chars().take(80).collect();
    Err(Error::new(ErrorKind::InvalidInput, format!("{}: {fault}", shown.escape_debug())))
}

fn check_done(what: &str, reply: &[u8]) -> Result<()> {
    match reply {
        b"OK" | b"OK\0" => Ok(()),
        _ => Err(Error::new(ErrorKind::Protocol, format!("{what}: the store's answer is not `OK`"))),
    }
}

fn names(path: &str, payload: &[u8]) -> Result<Vec<String>> {
    let names: Result<_> = wire::split(payload).map(|name| wire::text(name).map(str::to_owned)).collect();
    names.map_err(|e| within(&format!("list {path}"), &e))
}
