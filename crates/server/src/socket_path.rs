//! [`SocketPath`]: how a Unix socket is reached whose path is longer than the system takes.
//!
//! unix(7) has room for 107 bytes. A folder that is opened has a short path of its own, by its descriptor, so only the name in it counts then.
//! Other programs do not do that: this is for sockets on which only this program speaks.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open};
use rustix::net::SocketAddrUnix;

/// A path that the system takes for a socket, as long as this lives.
pub struct SocketPath {
    path: PathBuf,
    _folder: Option<OwnedFd>,
}

impl SocketPath {
    /// How the socket at `path` is reached.
    ///
    /// # Errors
    /// `InvalidInput` when its name alone is too long; the system's, when its folder cannot be opened.
    pub fn of(path: &Path) -> io::Result<Self> {
        if fits(path) {
            return Ok(Self { path: path.to_owned(), _folder: None });
        }
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let folder = open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let short = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
        SocketAddrUnix::new(&short)?;
        Ok(Self { path: short, _folder: Some(folder) })
    }

    /// The path to bind or to connect to.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// True when the system takes this path for a socket.
pub fn fits(path: &Path) -> bool {
    SocketAddrUnix::new(path).is_ok()
}

/// `name` if it fits into `folder` with `extension`, else a shorter one: its begin, and a checksum (FNV-1a) of all of it.
pub fn short_name(folder: &Path, name: &str, extension: &str) -> String {
    if fits(&folder.join(format!("{name}.{extension}"))) {
        return name.to_owned();
    }
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, mix);
    let begin: String = name.chars().take(16).collect();
    let short = format!("{begin}-{hash:016x}");
    match fits(&folder.join(format!("{short}.{extension}"))) {
        true => short,
        false => format!("{hash:016x}"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_socket_in_a_folder_with_a_long_path_is_reached() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("x".repeat(150));
        std::fs::create_dir(&folder).unwrap();
        let path = folder.join("s");
        assert!(UnixListener::bind(&path).is_err(), "it is not too long");
        let _listener = UnixListener::bind(SocketPath::of(&path).unwrap().path()).unwrap();
        UnixStream::connect(SocketPath::of(&path).unwrap().path()).unwrap();
        assert!(path.exists());
        assert!(SocketPath::of(&folder.join("y".repeat(120))).is_err());
        assert_eq!(SocketPath::of(Path::new("/a/b")).unwrap().path(), Path::new("/a/b"));
    }

    #[test]
    fn long_names_get_short_ones_that_differ() {
        let folder = Path::new("/run/spile");
        let [long, other] = ["a", "b"].map(|last| format!("{}{last}", "x".repeat(200)));
        let [short, short_other] = [&long, &other].map(|name| short_name(folder, name, "control"));
        assert!(fits(&folder.join(format!("{short}.control"))) && short.starts_with("xxx") && short != short_other);
        assert_eq!(short_name(folder, "disk", "control"), "disk");
        // Where even that is too long for its folder, the name alone is short.
        assert_eq!(short_name(Path::new(&format!("/{}", "f".repeat(90))), "disk.of.a.guest", "control").len(), 16);
    }
}
