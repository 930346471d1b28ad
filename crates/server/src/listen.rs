//! Sockets to listen on. A Unix socket listens only when it is said who may connect, and appears under its name only when it listens. A socket on which nobody answers is
//! replaced. In the end a server removes only its own socket. Sockets passed by systemd are used as they are.

use std::fs;
use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use spile_core::{Error, ErrorKind, Result, ResultExt};

use crate::socket_path::SocketPath;
use crate::uri::{Address, NbdUri, TlsQuery};

/// A socket that listens. A Unix socket that is to get a name does so from [`Bound::publish`] on, which makes the name.
#[derive(Debug)]
pub struct Bound {
    /// The socket.
    pub fd: OwnedFd,
    /// Where clients find it, as far as this is known.
    pub address: Option<Address>,
    /// The name that the socket is to get.
    pending: Option<PendingName>,
    /// Its name was made by another process.
    is_taken_over: bool,
}

/// Who may connect to Unix sockets for clients and guests: what is not given is as the umask and the process's group make it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketAccess {
    /// The permissions. To connect needs the permission to write.
    pub mode: Option<u32>,
    /// The group's number.
    pub group: Option<u32>,
}

/// Permissions as chmod takes them in octal.
///
/// # Errors
/// What is allowed.
pub fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| format!("`{text}` is no mode: use octal digits, such as 0660"))
}

/// A group by its name or number.
///
/// # Errors
/// That there is no such group.
pub fn parse_group(text: &str) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let found = nix::unistd::Group::from_name(text)
        .map_err(|errno| format!("the group `{text}` cannot be looked up: {errno}"))?;
    found.map(|group| group.gid.as_raw()).ok_or_else(|| format!("there is no group `{text}` on this host"))
}

#[derive(Debug)]
struct PendingName {
    temporary: PathBuf,
    wanted: PathBuf,
    question: Vec<u8>,
}

impl Drop for PendingName {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.temporary);
    }
}

/// A Unix socket's name; removed when this is dropped, unless another server has taken it over.
#[derive(Debug)]
pub struct Published {
    path: PathBuf,
    inode: (u64, u64),
}

impl Bound {
    /// Listens at `address`, for a server that speaks first; a Unix socket is not to be found there before
    /// [`Bound::publish`].
    ///
    /// # Errors
    /// `Busy` when another server answers there; the system's.
    pub fn new(address: &Address) -> Result<Self> {
        Self::after_asking(address, Vec::new())
    }

    /// As [`Bound::new`], for a server that waits for its clients to speak first. A live server of that kind answers `question`.
    ///
    /// # Errors
    /// As [`Bound::new`].
    pub fn after_asking(address: &Address, question: Vec<u8>) -> Result<Self> {
        match address {
            Address::Unix(path) => {
                let path = std::path::absolute(path).map_err(|e| Error::io("listen", e)).at_path(path)?;
                // Clients have to use it as it is.
                SocketAddr::from_pathname(&path).map_err(|e| cannot_listen(e, &path))?;
                bind_unix(path, question, None)
            }
            Address::Tcp(host, port) => bind_tcp(host, *port, &question),
        }
    }

    /// As [`Bound::after_asking`], at a Unix socket on which only this program speaks. Only this user and root may connect, whatever
    /// the umask is, and its path may be longer than the system takes ([`SocketPath`]).
    ///
    /// # Errors
    /// As [`Bound::new`].
    pub fn for_commands(path: &Path, question: Vec<u8>) -> Result<Self> {
        let path = std::path::absolute(path).map_err(|e| Error::io("listen", e)).at_path(path)?;
        bind_unix(path, question, Some(PRIVATE_MODE))
    }

    /// Says who may connect to a Unix socket that has no name yet.
    ///
    /// # Errors
    /// `Denied` when the socket may not be given to that group; else the system's.
    pub fn allow(&self, access: SocketAccess) -> Result<()> {
        let Some(PendingName { temporary, wanted, .. }) = &self.pending else { return Ok(()) };
        if access == SocketAccess::default() {
            return Ok(());
        }
        let socket = open_own_socket(temporary).map_err(|e| Error::io("find the new socket", e).at_path(wanted))?;
        // The link leads to what was opened, whatever lies under its name by now.
        let link = format!("/proc/self/fd/{}", socket.as_raw_fd());
        if let Some(group) = access.group {
            let hint = "start the server as root or as a member of the group";
            let given = std::os::unix::fs::chown(&link, None, Some(group));
            given.map_err(|e| Error::io("give the socket to its group", e).at_path(wanted).hint(hint))?;
        }
        if let Some(mode) = access.mode {
            let permissions = fs::Permissions::from_mode(mode);
            fs::set_permissions(&link, permissions)
                .map_err(|e| Error::io("set the socket's mode", e).at_path(wanted))?;
        }
        Ok(())
    }

    /// A socket that listens at `address` already, shared with the process that has made its name.
    pub fn taken_over(fd: OwnedFd, address: Address) -> Self {
        Self { fd, address: Some(address), pending: None, is_taken_over: true }
    }

    /// Makes a Unix socket appear under its name, in one step.
    ///
    /// # Errors
    /// `Busy` when another server came first; the system's.
    pub fn publish(self) -> Result<(OwnedFd, Option<Published>)> {
        let published = match (&self.pending, &self.address) {
            (Some(name), _) => {
                rustix::net::listen(&self.fd, BACKLOG)
                    .map_err(|errno| Error::io("cannot listen on this socket", errno.into()).at_path(&name.wanted))?;
                Some(name_socket(name)?)
            }
            (None, Some(Address::Unix(path))) if self.is_taken_over => Some(Published::of_another(path)),
            (None, _) => None,
        };
        Ok((self.fd, published))
    }

    /// The URI of `export` on this socket.
    pub fn uri(&self, export: &str, tls: bool) -> Option<NbdUri> {
        let address = self.address.clone()?;
        Some(NbdUri { tls: tls.then(TlsQuery::default), ..NbdUri::new(address, export) })
    }
}

/// The sockets that systemd passed, if it passed any to this process.
///
/// # Errors
/// When one of them is not a listening stream socket.
pub fn from_systemd() -> Result<Vec<Bound>> {
    let mut passed = listenfd::ListenFd::from_env();
    (0..passed.len()).map(|index| take_passed(&mut passed, index)).collect()
}

fn take_passed(passed: &mut listenfd::ListenFd, index: usize) -> Result<Bound> {
    let unusable = |e| Error::io(format!("LISTEN_FDS: socket {index} cannot be used"), e);
    if let Ok(Some(unix)) = passed.take_unix_listener(index) {
        let path = unix.local_addr().ok().and_then(|a| a.as_pathname().map(Path::to_owned));
        return Ok(Bound { address: path.map(Address::Unix), fd: unix.into(), pending: None, is_taken_over: false });
    }
    let tcp = passed.take_tcp_listener(index).map_err(unusable)?;
    let tcp = tcp.ok_or_else(|| unusable(IoKind::NotFound.into()))?;
    let address = tcp.local_addr().map_err(unusable)?;
    let address = Some(Address::Tcp(address.ip().to_string(), address.port()));
    Ok(Bound { fd: tcp.into(), address, pending: None, is_taken_over: false })
}

fn bind_tcp(host: &str, port: u16, question: &[u8]) -> Result<Bound> {
    let failed = |e: std::io::Error| {
        let in_use = e.kind() == IoKind::AddrInUse;
        let error = Error::io(format!("cannot listen on tcp:{host}:{port}"), e);
        let who = || listener_at(port).unwrap_or_else(|| "another program".to_owned());
        if in_use { error.hint(format!("{} listens there: end it, or choose another port", who())) } else { error }
    };
    let mut patience = Patience::new(format!("tcp:{host}:{port}"), Some(port));
    let listener = loop {
        match TcpListener::bind((host, port)) {
            Err(e) if e.kind() == IoKind::AddrInUse && !is_tcp_alive(host, port, question) && patience.has_more() => {}
            bound => break bound.map_err(failed)?,
        }
    };
    // The port that the system chose, if it was left to it.
    let port = listener.local_addr().map_err(failed)?.port();
    Ok(Bound {
        fd: listener.into(),
        address: Some(Address::Tcp(host.to_owned(), port)),
        pending: None,
        is_taken_over: false,
    })
}

/// True when a server answers at this address, or it cannot be asked. Where nobody listens, none does.
fn is_tcp_alive(host: &str, port: u16, question: &[u8]) -> bool {
    let Ok(mut places) = (host, port).to_socket_addrs() else { return true };
    let Some(place) = places.next() else { return true };
    match TcpStream::connect_timeout(&place, ANSWER) {
        Ok(stream) => answers(&stream, question),
        Err(e) => e.kind() != IoKind::ConnectionRefused && e.kind() != IoKind::TimedOut,
    }
}

fn cannot_listen(source: std::io::Error, path: &Path) -> Error {
    let is_too_long = source.kind() == IoKind::InvalidInput;
    let error = Error::io("cannot listen on this socket", source).at_path(path);
    if is_too_long { error.hint("choose a shorter path") } else { error }
}

fn bind_unix(path: PathBuf, question: Vec<u8>, mode: Option<Mode>) -> Result<Bound> {
    refuse_busy(&path, &question)?;
    let (fd, temporary) = bind_hidden(&path, mode).map_err(|e| cannot_listen(e, &path))?;
    let pending = Some(PendingName { temporary, wanted: path.clone(), question });
    Ok(Bound { fd, address: Some(Address::Unix(path)), pending, is_taken_over: false })
}

/// How many clients may wait to be accepted: as many as the system allows.
const BACKLOG: i32 = -1;

/// For the owner alone.
const PRIVATE_MODE: Mode = Mode::from_raw_mode(0o700);
/// So many random names are tried.
const NAME_TRIES: usize = 16;

/// A socket beside `path`, under a name that nobody can foretell and that is not much longer than others.
fn bind_hidden(path: &Path, mode: Option<Mode>) -> std::io::Result<(OwnedFd, PathBuf)> {
    let mut tried = Err(Errno::ADDRINUSE.into());
    for _ in 0..NAME_TRIES {
        let temporary = path.with_file_name(format!(".spile-{:08x}", random()));
        match bind_silently(&temporary, mode) {
            Err(error) if error.kind() == IoKind::AddrInUse => tried = Err(error),
            bound => return bound.map(|fd| (fd, temporary)),
        }
    }
    tried
}

/// The keys of a new RandomState come from the kernel's random numbers.
fn random() -> u32 {
    use std::hash::{BuildHasher as _, Hasher as _, RandomState};
    RandomState::new().build_hasher().finish() as u32
}

/// A socket that is bound to `path` and does not listen: nobody can connect before it is said who may. Its file has the mode that the socket has before it is
/// bound.
fn bind_silently(path: &Path, mode: Option<Mode>) -> std::io::Result<OwnedFd> {
    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if let Some(mode) = mode {
        rustix::fs::fchmod(&fd, mode)?;
    }
    // This name may be longer than the one that the socket is to get.
    rustix::net::bind(&fd, &SocketAddrUnix::new(SocketPath::of(path)?.path())?)?;
    Ok(fd)
}

/// True when nobody listens on the socket at `path`. Never waits: a server that hangs takes no client, and lives.
pub(crate) fn is_dead(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connect = || {
        let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let reached = reach(path)?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(reached.path())?)
    };
    connect() == Err(Errno::CONNREFUSED)
}

/// The socket at `path`, which this process has made there. Others who may write in its folder may have put something else in its
/// place, such as a link to a file that is none of theirs: that is refused.
fn open_own_socket(path: &Path) -> std::io::Result<OwnedFd> {
    let fd = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&fd)?;
    let is_ours =
        FileType::from_raw_mode(stat.st_mode) == FileType::Socket && stat.st_uid == rustix::process::geteuid().as_raw();
    is_ours.then_some(fd).ok_or_else(|| std::io::Error::other("something else lies in its place"))
}

/// Refuses a path where a server is, or where something lies that is no socket.
fn refuse_busy(path: &Path, question: &[u8]) -> Result<()> {
    let Ok(meta) = fs::symlink_metadata(path) else { return Ok(()) };
    if !meta.file_type().is_socket() {
        return Err(Error::new(ErrorKind::Exists, "a file that is no socket is in the way")
            .at_path(path)
            .hint("remove it or choose another path"));
    }
    let mut patience = Patience::new(path.display().to_string(), None);
    loop {
        match connect(path) {
            Err(Errno::CONNREFUSED | Errno::NOENT) => return Ok(()),
            Ok(stream) if !answers(&stream, question) && patience.has_more() => {}
            // A server that hangs has taken all the clients that it can have waiting.
            Ok(_) | Err(Errno::AGAIN) => return Err(busy(path)),
            Err(errno) => {
                let error = Error::io("cannot ask who listens on this socket", errno.into()).at_path(path);
                return Err(error.hint("remove it, if no server listens there, or choose another path"));
            }
        }
    }
}

/// The program that listens at this TCP port, as far as this user may see it: `nginx (process 4711)`. A process that was killed has no sockets any more, also while the
/// kernel keeps them.
fn listener_at(port: u16) -> Option<String> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|table| fs::read_to_string(table).unwrap_or_default());
    let inodes: Vec<_> = tables.iter().flat_map(|table| listening_inodes(table, port)).collect();
    let is_it = |link: fs::DirEntry| {
        let link = fs::read_link(link.path()).unwrap_or_default();
        inodes.iter().any(|inode| link.as_os_str() == &*format!("socket:[{inode}]"))
    };
    // Beside the processes there is `self`, which is one of them.
    let is_process = |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit);
    let mut processes = fs::read_dir("/proc").ok()?.flatten().filter(is_process);
    let process = processes
        .find(|process| fs::read_dir(process.path().join("fd")).is_ok_and(|links| links.flatten().any(is_it)))?;
    let name = fs::read_to_string(process.path().join("comm")).ok()?;
    Some(format!("{} (process {})", name.trim(), process.file_name().to_string_lossy()))
}

/// The inodes of the sockets that listen at this port, by a table of the kernel's (proc_net_tcp).
fn listening_inodes(table: &str, port: u16) -> Vec<&str> {
    table.lines().skip(1).filter_map(|line| listening_inode(line, port)).collect()
}

fn listening_inode(line: &str, port: u16) -> Option<&str> {
    const LISTEN: &str = "0A";
    let words: Vec<&str> = line.split_whitespace().collect();
    let (_, local) = words.get(1)?.rsplit_once(':')?;
    let is_it = u16::from_str_radix(local, 16) == Ok(port) && *words.get(3)? == LISTEN;
    words.get(9).copied().filter(|_| is_it)
}

/// Connects to the socket at `path`, and waits for [`ANSWER`] at most.
fn connect(path: &Path) -> rustix::io::Result<UnixStream> {
    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&fd, Timeout::Send, Some(ANSWER))?;
    let reached = reach(path)?;
    rustix::net::connect(&fd, &SocketAddrUnix::new(reached.path())?)?;
    Ok(fd.into())
}

fn reach(path: &Path) -> rustix::io::Result<SocketPath> {
    SocketPath::of(path).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NAMETOOLONG))
}

/// How long a socket that takes connections and answers nothing is given before it counts as that of a live server. The socket of
/// a server that was just killed is like that: the kernel keeps it until it has wound up the server's io_uring, which may take
/// some time after the process was reaped (seconds, where hundreds of rings end at once).
const WIND_UP: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_millis(20);
/// A live server answers within this time.
const ANSWER: Duration = Duration::from_secs(1);

/// Waits for the end of a server that was just killed, for [`WIND_UP`] at most, and says so once.
struct Patience {
    /// The socket, for people.
    place: String,
    /// Its port, if it has one.
    port: Option<u16>,
    end: Instant,
    is_told: bool,
}

impl Patience {
    fn new(place: String, port: Option<u16>) -> Self {
        Self { place, port, end: Instant::now() + WIND_UP, is_told: false }
    }

    /// Waits for a moment; false when there was time enough.
    fn has_more(&mut self) -> bool {
        if Instant::now() >= self.end {
            return false;
        }
        if !std::mem::replace(&mut self.is_told, true) {
            let (place, patience_s) = (&self.place, WIND_UP.as_secs());
            let who = self.port.and_then(listener_at).map_or_else(
                || "nobody answers on this socket, which a server that was just killed may still have".to_owned(),
                |who| format!("{who} listens on this port, and does not answer as a server of this kind"),
            );
            tracing::warn!("{place}: {who}: waiting {patience_s} s for its end");
        }
        std::thread::sleep(PAUSE);
        true
    }
}

fn answers(mut stream: impl Read + Write + AsFd, question: &[u8]) -> bool {
    let patient = [Timeout::Recv, Timeout::Send]
        .into_iter()
        .try_for_each(|which| set_socket_timeout(&stream, which, Some(ANSWER)))
        .map_err(std::io::Error::from);
    let asked = patient.and_then(|()| stream.write_all(question));
    asked.and_then(|()| stream.read(&mut [0])).is_ok_and(|len| len > 0)
}

fn busy(path: &Path) -> Error {
    Error::new(ErrorKind::Busy, "another server listens on this socket")
        .at_path(path)
        .hint("stop it or choose another path")
}

/// Gives the socket at `temporary` the name `wanted`. `link` fails where a name exists, so of two servers that
/// start at the same moment one gets the name and the other is told.
fn name_socket(name: &PendingName) -> Result<Published> {
    let PendingName { temporary, wanted, question } = name;
    let failed = |e| Error::io("cannot make the socket appear", e).at_path(wanted);
    if let Err(e) = fs::hard_link(temporary, wanted) {
        if e.kind() != IoKind::AlreadyExists {
            return Err(failed(e));
        }
        refuse_busy(wanted, question)?;
        take_over(name)?;
    }
    let meta = fs::symlink_metadata(wanted).map_err(failed)?;
    Ok(Published { path: wanted.to_owned(), inode: (meta.dev(), meta.ino()) })
}

/// Puts our socket in the place of a socket on which nobody answers. Meanwhile another server may have done the same. So the socket
/// that is there is moved aside and asked once more before it is removed; the socket of a live server gets its name back.
fn take_over(PendingName { temporary, wanted, question }: &PendingName) -> Result<()> {
    let failed = |e| Error::io("cannot replace the socket of a dead server", e).at_path(wanted);
    let aside = temporary.with_extension("old");
    match fs::rename(wanted, &aside) {
        Err(e) if e.kind() != IoKind::NotFound => return Err(failed(e)),
        Err(_) => {}
        Ok(()) => {
            let alive = refuse_busy(&aside, question).is_err();
            let back = if alive { fs::hard_link(&aside, wanted) } else { Ok(()) };
            fs::remove_file(&aside).and(back).map_err(failed)?;
        }
    }
    fs::hard_link(temporary, wanted).map_err(|e| match e.kind() {
        IoKind::AlreadyExists => busy(wanted),
        _ => failed(e),
    })
}

impl Published {
    /// The name of a socket that another process removes, until [`Published::take`].
    fn of_another(path: &Path) -> Self {
        Self { path: path.to_owned(), inode: NOBODYS }
    }

    /// From now on this process removes the name, if it is still there.
    pub fn take(&mut self) {
        self.inode = fs::symlink_metadata(&self.path).map_or(NOBODYS, |meta| (meta.dev(), meta.ino()));
    }

    /// From now on another process removes the name.
    pub fn leave(&mut self) {
        self.inode = NOBODYS;
    }
}

/// No file has this number.
const NOBODYS: (u64, u64) = (0, 0);

impl Drop for Published {
    fn drop(&mut self) {
        let ours = |meta: &fs::Metadata| (meta.dev(), meta.ino()) == self.inode;
        if fs::symlink_metadata(&self.path).is_ok_and(|meta| ours(&meta)) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn bound(path: &Path) -> Result<(OwnedFd, Option<Published>)> {
        Bound::new(&Address::Unix(path.to_owned()))?.publish()
    }

    /// Sends a byte to every client that connects, as an NBD server does.
    fn greet(fd: &OwnedFd) -> std::thread::JoinHandle<()> {
        let listener = UnixListener::from(fd.try_clone().unwrap());
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                // A client that only looked has gone already.
                let _ = stream.write_all(b"N");
            }
        })
    }

    #[test]
    fn who_listens_at_a_port_is_known_by_name() {
        let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        let who = listener_at(port).unwrap();
        assert!(who.ends_with(&format!("(process {})", std::process::id())), "{who}");
        drop(taken);
        assert_eq!(listener_at(port), None);
    }

    #[test]
    fn only_a_socket_without_a_listener_is_dead_and_one_that_takes_no_client_is_asked_without_a_wait() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        assert!(!is_dead(&path), "there is nothing");
        let listener = UnixListener::bind(&path).unwrap();
        // Nobody accepts, and the queue has one place.
        rustix::net::listen(&listener, 0).unwrap();
        let waiting = UnixStream::connect(&path).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let asked = path.clone();
        std::thread::spawn(move || tell.send(is_dead(&asked)));
        let is_dead_now = told.recv_timeout(Duration::from_secs(60)).expect("a full queue is waited for");
        assert!(!is_dead_now, "a server that hangs counts as dead");
        let (tell, told) = std::sync::mpsc::channel();
        let asked = path.clone();
        std::thread::spawn(move || tell.send(bound(&asked).map(drop).unwrap_err().kind()));
        let refused = told.recv_timeout(Duration::from_secs(60)).expect("who wants to listen there waits for ever");
        assert_eq!(refused, ErrorKind::Busy);
        drop((waiting, listener));
        assert!(is_dead(&path));
    }

    #[test]
    fn a_socket_answers_as_soon_as_it_is_there_and_goes_in_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let pending = Bound::new(&Address::Unix(path.clone())).unwrap();
        assert!(!path.exists());
        let (_fd, published) = pending.publish().unwrap();
        assert!(UnixStream::connect(&path).is_ok());
        drop(published);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn who_may_connect_is_said_before_the_socket_appears() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let pending = Bound::new(&Address::Unix(path.clone())).unwrap();
        let own = rustix::process::getegid().as_raw();
        pending.allow(SocketAccess { mode: Some(0o620), group: Some(own) }).unwrap();
        let (_fd, _published) = pending.publish().unwrap();
        let found = fs::metadata(&path).unwrap();
        assert_eq!((found.mode() & 0o777, found.gid()), (0o620, own));
        assert_eq!((parse_mode("0660"), parse_mode("660"), parse_group("0")), (Ok(0o660), Ok(0o660), Ok(0)));
        assert_eq!(parse_group("root"), Ok(0));
        assert!(["", "8", "1777", "rw"].iter().all(|text| parse_mode(text).is_err()));
        assert!(parse_group("no such group").unwrap_err().contains("there is no group"));
    }

    #[test]
    fn what_was_put_in_the_place_of_a_new_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let secret = dir.path().join("secret");
        fs::write(&secret, "x").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        let put: [fn(&Path, &Path) -> std::io::Result<()>; 2] =
            [|from, to| std::os::unix::fs::symlink(from, to), |from, to| fs::hard_link(from, to)];
        for put in put {
            let pending = Bound::new(&Address::Unix(dir.path().join("s"))).unwrap();
            let temporary = &pending.pending.as_ref().unwrap().temporary;
            fs::remove_file(temporary).unwrap();
            put(&secret, temporary).unwrap();
            let own = rustix::process::getegid().as_raw();
            pending.allow(SocketAccess { mode: Some(0o666), group: Some(own) }).unwrap_err();
            assert_eq!(fs::metadata(&secret).unwrap().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn nobody_connects_to_a_socket_before_it_is_said_who_may() {
        let dir = tempfile::tempdir().unwrap();
        let pending = Bound::new(&Address::Unix(dir.path().join("s"))).unwrap();
        let temporary = &pending.pending.as_ref().unwrap().temporary;
        assert_eq!(UnixStream::connect(temporary).unwrap_err().kind(), IoKind::ConnectionRefused);
    }

    /// The socket of a process that was killed may be there for a while: it takes connections, and says nothing.
    #[test]
    fn a_tcp_socket_of_a_dead_server_is_waited_for_and_that_of_a_live_one_is_not() {
        let dead = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let at = dead.local_addr().unwrap();
        let address = Address::Tcp("127.0.0.1".to_owned(), at.port());
        let (tell, told) = std::sync::mpsc::channel();
        let waits = address.clone();
        let binder = std::thread::spawn(move || {
            let bound = Bound::new(&waits);
            tell.send(()).unwrap();
            bound
        });
        // Whoever listens asks the one that is there.
        drop(dead.accept().unwrap());
        assert!(told.recv_timeout(Duration::from_millis(300)).is_err(), "nobody waits for its end");
        drop(dead);
        let live = TcpListener::from(binder.join().unwrap().unwrap().fd);
        let greeter = std::thread::spawn(move || live.accept().unwrap().0.write_all(b"N").unwrap());
        let begun = Instant::now();
        let refused = Bound::new(&address).unwrap_err();
        assert!(refused.to_string().contains("another program listens there"), "{refused}");
        assert!(begun.elapsed() < WIND_UP);
        greeter.join().unwrap();
    }

    #[test]
    fn a_live_server_is_busy_and_a_dead_ones_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (fd, first) = bound(&path).unwrap();
        let greeter = greet(&fd);
        assert_eq!(bound(&path).unwrap_err().kind(), ErrorKind::Busy);
        rustix::net::shutdown(&fd, rustix::net::Shutdown::Both).unwrap();
        greeter.join().unwrap();
        drop(fd);
        let (_second_fd, second) = bound(&path).unwrap();
        drop(first);
        assert!(UnixStream::connect(&path).is_ok(), "the first must not remove the second's");
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn a_server_that_is_spoken_to_answers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 3]).unwrap();
            stream.write_all(b"!").unwrap();
        });
        let bound = Bound::after_asking(&Address::Unix(path), b"ho?".to_vec());
        assert_eq!(bound.unwrap_err().kind(), ErrorKind::Busy);
    }

    /// The name under which a socket is bound first is longer than the shortest ones that it may get.
    #[test]
    fn a_path_that_just_fits_is_listened_on() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("x".repeat(107 - 3 - dir.path().as_os_str().len()));
        fs::create_dir(&folder).unwrap();
        let path = folder.join("s");
        assert_eq!(path.as_os_str().len(), 107);
        let (_fd, _published) = bound(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        let longer = folder.join("socket");
        assert!(bound(&longer).unwrap_err().to_string().contains("shorter path"), "no other program could connect");
        let (_fd, _published) = Bound::for_commands(&longer, Vec::new()).unwrap().publish().unwrap();
        connect(&longer).unwrap();
    }

    #[test]
    fn a_file_in_the_way_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        fs::write(&path, "precious").unwrap();
        assert_eq!(bound(&path).unwrap_err().kind(), ErrorKind::Exists);
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    /// Two servers find the same dead socket: the second one must notice the first.
    #[test]
    fn a_server_that_came_first_keeps_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("s"), dir.path().join("other"));
        let (fd, _published) = bound(&path).unwrap();
        greet(&fd);
        let _second = UnixListener::bind(&other).unwrap();
        let name = PendingName { temporary: other, wanted: path.clone(), question: Vec::new() };
        assert_eq!(take_over(&name).unwrap_err().kind(), ErrorKind::Busy);
        UnixStream::connect(&path).expect("the first still answers");
        let mut names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["other", "s"]);
    }
}
