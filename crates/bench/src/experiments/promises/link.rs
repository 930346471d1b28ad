//! A link between two hosts that can be cut: clients connect here, and what they say goes on to the other host, and is counted.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use spile_core::{Error, Result, ResultExt};

/// Bytes that go on at a time.
const PIECE_BYTES: usize = 256 << 10;

/// A socket in front of another one. It ends when this is dropped.
pub(super) struct Link {
    path: PathBuf,
    shared: Arc<Shared>,
}

struct Shared {
    /// The other host's socket.
    to: PathBuf,
    is_cut: AtomicBool,
    /// The thread that listens is to end.
    is_over: AtomicBool,
    /// Bytes that clients have sent to the other host.
    sent_bytes: AtomicU64,
    /// The connections that are open, both ends of each.
    open: Mutex<Vec<UnixStream>>,
}

impl Link {
    /// Listens at `path` for what is to go to the socket `to`.
    ///
    /// # Errors
    /// When it cannot listen there.
    pub(super) fn new(path: &Path, to: &Path) -> Result<Self> {
        let shared = Arc::new(Shared {
            to: to.to_owned(),
            is_cut: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            sent_bytes: AtomicU64::new(0),
            open: Mutex::default(),
        });
        // That of the round before is not in the way.
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).map_err(|e| Error::io("listen", e)).at_path(path)?;
        let takes = shared.clone();
        let accept = move || {
            while let Ok((client, _)) = listener.accept() {
                // A client that cannot be connected sees its connection end, as on a host that is away.
                let _ = connect(&takes, client);
                if takes.is_over.load(Ordering::SeqCst) {
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name("bench-link".into())
            .spawn(accept)
            .map_err(|e| Error::io("start a thread", e))?;
        Ok(Self { path: path.to_owned(), shared })
    }

    /// Where clients connect.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that clients have sent to the other host until now.
    pub(super) fn sent_bytes(&self) -> u64 {
        self.shared.sent_bytes.load(Ordering::Relaxed)
    }

    /// Cuts all connections. Until [`Link::restore`], each new one is cut at once.
    pub(super) fn cut(&self) {
        self.shared.is_cut.store(true, Ordering::SeqCst);
        self.shared.close_all();
    }

    /// Lets connections through again.
    pub(super) fn restore(&self) {
        self.shared.is_cut.store(false, Ordering::SeqCst);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.cut();
        self.shared.is_over.store(true, Ordering::SeqCst);
        // The thread that listens wakes up by this.
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Shared {
    fn open(&self) -> MutexGuard<'_, Vec<UnixStream>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close_all(&self) {
        for stream in self.open().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Connects a client to the other host, unless the link is cut.
fn connect(shared: &Arc<Shared>, client: UnixStream) -> std::io::Result<()> {
    if shared.is_cut.load(Ordering::SeqCst) {
        return Ok(());
    }
    let server = UnixStream::connect(&shared.to)?;
    shared.open().extend([client.try_clone()?, server.try_clone()?]);
    // The link may have been cut in between.
    if shared.is_cut.load(Ordering::SeqCst) {
        shared.close_all();
    }
    let (counts, to_client, to_server) = (shared.clone(), client.try_clone()?, server.try_clone()?);
    let count = move |bytes| {
        counts.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
    };
    let there = move || pass_on(client, to_server, count);
    std::thread::Builder::new().name("bench-link-there".into()).spawn(there)?;
    let back = move || pass_on(server, to_client, |_| {});
    std::thread::Builder::new().name("bench-link-back".into()).spawn(back)?;
    Ok(())
}

/// Passes bytes on until one side ends; then both do.
fn pass_on(mut from: UnixStream, mut to: UnixStream, counted: impl Fn(u64)) {
    let mut piece = vec![0; PIECE_BYTES];
    while let Ok(len) = from.read(&mut piece)
        && len > 0
    {
        // First: whoever has the answer finds its question counted.
        counted(len as u64);
        if to.write_all(&piece[..len]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that answers each byte with the next one.
    fn server(path: &Path) {
        let listener = UnixListener::bind(path).unwrap();
        std::thread::spawn(move || {
            for mut client in listener.incoming().flatten() {
                std::thread::spawn(move || {
                    let mut byte = [0];
                    while client.read_exact(&mut byte).is_ok() && client.write_all(&[byte[0] + 1]).is_ok() {}
                });
            }
        });
    }

    #[test]
    fn a_link_counts_what_is_sent_and_can_be_cut() {
        let dir = tempfile::tempdir().unwrap();
        server(&dir.path().join("server"));
        let link = Link::new(&dir.path().join("link"), &dir.path().join("server")).unwrap();
        let ask = |client: &mut UnixStream, byte: u8| {
            let mut answer = [0];
            client.write_all(&[byte]).and_then(|()| client.read_exact(&mut answer)).map(|()| answer[0])
        };
        let mut client = UnixStream::connect(link.path()).unwrap();
        assert_eq!((ask(&mut client, 1).unwrap(), ask(&mut client, 5).unwrap()), (2, 6));
        assert_eq!(link.sent_bytes(), 2);
        link.cut();
        assert!(ask(&mut client, 1).is_err());
        assert!(ask(&mut UnixStream::connect(link.path()).unwrap(), 1).is_err());
        link.restore();
        assert_eq!(ask(&mut UnixStream::connect(link.path()).unwrap(), 7).unwrap(), 8);
        assert_eq!(link.sent_bytes(), 3);
        let path = link.path().to_owned();
        drop(link);
        assert!(UnixStream::connect(path).is_err());
    }
}
