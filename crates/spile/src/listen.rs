//! Sockets to listen on: a Unix socket appears under its name only when it already listens, one that nobody
//! answers is replaced, and only our own is removed. Sockets passed by systemd are taken as they are.

use std::fs;
use std::io::{ErrorKind as IoKind, Read};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use spile_core::{Error, ErrorKind, Result, ResultExt};

use crate::uri::{Address, NbdUri};

/// A socket that listens, and what must be removed when it ends.
#[derive(Debug)]
pub struct Bound {
    /// The socket.
    pub fd: OwnedFd,
    /// Where clients find it, as far as this is known.
    pub address: Option<Address>,
    /// The name in the file system, for [`Published`].
    pending: Option<PendingName>,
    /// Its name was made by another process and is ours now.
    is_taken_over: bool,
}

#[derive(Debug)]
struct PendingName {
    temporary: PathBuf,
    wanted: PathBuf,
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
    /// Listens at `address`; a Unix socket is not to be found there before [`Bound::publish`].
    ///
    /// # Errors
    /// `Busy` when another server answers there; the system's.
    pub fn new(address: &Address) -> Result<Self> {
        match address {
            Address::Unix(path) => bind_unix(path),
            Address::Tcp(host, port) => bind_tcp(host, *port),
        }
    }

    /// A socket that listens at `address` already, taken over from another process with its name.
    pub fn taken_over(fd: OwnedFd, address: Address) -> Self {
        Self { fd, address: Some(address), pending: None, is_taken_over: true }
    }

    /// Makes a Unix socket appear under its name, in one step.
    ///
    /// # Errors
    /// `Busy` when another server came first; the system's.
    pub fn publish(self) -> Result<(OwnedFd, Option<Published>)> {
        let published = match &self.pending {
            Some(name) => Some(name_socket(&name.temporary, &name.wanted)?),
            None => match &self.address {
                Some(Address::Unix(path)) if self.is_taken_over => Some(Published::adopt(path)?),
                _ => None,
            },
        };
        Ok((self.fd, published))
    }

    /// The URI of `export` on this socket.
    pub fn uri(&self, export: &str, tls: bool) -> Option<NbdUri> {
        let address = self.address.clone()?;
        Some(NbdUri { address, export: export.to_owned(), tls })
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

fn bind_tcp(host: &str, port: u16) -> Result<Bound> {
    let failed = |e: std::io::Error| {
        let in_use = e.kind() == IoKind::AddrInUse;
        let error = Error::io(format!("cannot listen on tcp:{host}:{port}"), e);
        if in_use { error.hint("another program listens there") } else { error }
    };
    let listener = TcpListener::bind((host, port)).map_err(failed)?;
    // The port that the system chose, if it was left to it.
    let port = listener.local_addr().map_err(failed)?.port();
    Ok(Bound {
        fd: listener.into(),
        address: Some(Address::Tcp(host.to_owned(), port)),
        pending: None,
        is_taken_over: false,
    })
}

fn bind_unix(path: &Path) -> Result<Bound> {
    let path = std::path::absolute(path).map_err(|e| Error::io("listen", e)).at_path(path)?;
    refuse_busy(&path)?;
    let name = format!(".spile-{}-{}", std::process::id(), next_number());
    let temporary = path.with_file_name(name);
    let _ = fs::remove_file(&temporary);
    let listener =
        UnixListener::bind(&temporary).map_err(|e| Error::io("cannot listen on this socket", e)).at_path(&path)?;
    let pending = Some(PendingName { temporary, wanted: path.clone() });
    Ok(Bound { fd: listener.into(), address: Some(Address::Unix(path)), pending, is_taken_over: false })
}

fn next_number() -> u32 {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Refuses a path where a server answers, or where something lies that is no socket.
fn refuse_busy(path: &Path) -> Result<()> {
    let Ok(meta) = fs::symlink_metadata(path) else { return Ok(()) };
    if !meta.file_type().is_socket() {
        return Err(Error::new(ErrorKind::Exists, "a file that is no socket is in the way")
            .at_path(path)
            .hint("remove it or choose another path"));
    }
    for _ in 0..ATTEMPTS {
        match UnixStream::connect(path) {
            Err(e) if e.kind() == IoKind::ConnectionRefused => return Ok(()),
            Ok(stream) if !greets(&stream) => std::thread::sleep(PAUSE),
            _ => break,
        }
    }
    Err(busy(path))
}

/// How often a socket is tried that takes connections and drops them.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(20);

/// True unless the connection ends without a word. A server that was just killed is like that: the kernel keeps its
/// socket for as long as it takes to wind up its io_uring, which may be some time after the process was reaped.
fn greets(mut stream: &UnixStream) -> bool {
    let patient = stream.set_read_timeout(Some(Duration::from_secs(2)));
    let first = patient.and_then(|()| stream.read(&mut [0]));
    match first {
        Ok(len) => len > 0,
        Err(e) => e.kind() != IoKind::ConnectionReset,
    }
}

fn busy(path: &Path) -> Error {
    Error::new(ErrorKind::Busy, "another server listens on this socket")
        .at_path(path)
        .hint("stop it or choose another path")
}

/// Gives the socket at `temporary` the name `wanted`. `link` fails where a name exists, so of two servers that
/// start at the same moment one gets the name and the other is told.
fn name_socket(temporary: &Path, wanted: &Path) -> Result<Published> {
    let failed = |e| Error::io("cannot make the socket appear", e).at_path(wanted);
    if let Err(e) = fs::hard_link(temporary, wanted) {
        if e.kind() != IoKind::AlreadyExists {
            return Err(failed(e));
        }
        refuse_busy(wanted)?;
        take_over(temporary, wanted)?;
    }
    let meta = fs::symlink_metadata(wanted).map_err(failed)?;
    Ok(Published { path: wanted.to_owned(), inode: (meta.dev(), meta.ino()) })
}

/// Puts our socket in the place of one that nobody answers. By now another server may have done the same, so what is
/// there is moved aside and looked at once more before it is removed; one that lives gets its name back.
fn take_over(temporary: &Path, wanted: &Path) -> Result<()> {
    let failed = |e| Error::io("cannot replace the socket of a dead server", e).at_path(wanted);
    let aside = temporary.with_extension("old");
    match fs::rename(wanted, &aside) {
        Err(e) if e.kind() != IoKind::NotFound => return Err(failed(e)),
        Err(_) => {}
        Ok(()) => {
            let alive = refuse_busy(&aside).is_err();
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
    /// The name of a socket that another process has made and that is ours from now on.
    ///
    /// # Errors
    /// The system's.
    pub fn adopt(path: &Path) -> Result<Self> {
        let meta = fs::symlink_metadata(path).map_err(|e| Error::io("look at a socket", e)).at_path(path)?;
        Ok(Self { path: path.to_owned(), inode: (meta.dev(), meta.ino()) })
    }

    /// Leaves the name to another process.
    pub fn leave(mut self) {
        self.inode = (0, 0);
    }
}

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
    use super::*;

    fn bound(path: &Path) -> Result<(OwnedFd, Option<Published>)> {
        Bound::new(&Address::Unix(path.to_owned()))?.publish()
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
    fn a_live_server_is_busy_and_a_dead_ones_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (fd, first) = bound(&path).unwrap();
        assert_eq!(bound(&path).unwrap_err().kind(), ErrorKind::Busy);
        drop(fd);
        let (_second_fd, second) = bound(&path).unwrap();
        drop(first);
        assert!(UnixStream::connect(&path).is_ok(), "the first must not remove the second's");
        drop(second);
        assert!(!path.exists());
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

    /// What happens when two servers find the same dead socket: the second to come must see the first.
    #[test]
    fn a_server_that_came_first_keeps_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("s"), dir.path().join("other"));
        let (_fd, _published) = bound(&path).unwrap();
        let _second = UnixListener::bind(&other).unwrap();
        assert_eq!(take_over(&other, &path).unwrap_err().kind(), ErrorKind::Busy);
        UnixStream::connect(&path).expect("the first still answers");
        let mut names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["other", "s"]);
    }
}
