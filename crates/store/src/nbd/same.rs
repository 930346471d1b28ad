//! Whether two URIs lead to the same disk, however they are spelled.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use spile_nbd_wire::uri::{Address, NbdUri};

/// True when two exports may be the same disk: they have one address, and not two names that are said and differ. A default export
/// is the same disk as one that has a name. Looks at sockets and asks for the addresses of hosts, which may take long.
pub fn may_be_same_export(a: &NbdUri, b: &NbdUri) -> bool {
    let names_differ = a.export != b.export && !a.export.is_empty() && !b.export.is_empty();
    !names_differ && is_same_address(&a.address, &b.address)
}

/// An address in the spelling that all spellings of a Unix socket's path have in common. The socket need not be there.
pub fn canonical_address(address: &Address) -> Address {
    match address {
        Address::Unix(path) => Address::Unix(canonical_socket(path).unwrap_or_else(|| path.clone())),
        Address::Tcp(host, port) => Address::Tcp(host.to_ascii_lowercase(), *port),
    }
}

fn canonical_socket(path: &Path) -> Option<PathBuf> {
    let whole = std::path::absolute(path).ok()?;
    Some(whole.parent()?.canonicalize().ok()?.join(whole.file_name()?))
}

fn is_same_address(a: &Address, b: &Address) -> bool {
    match (a, b) {
        (Address::Unix(a), Address::Unix(b)) => is_same_file(a, b),
        (Address::Tcp(a, a_port), Address::Tcp(b, b_port)) => a_port == b_port && is_same_host(a, b),
        _ => false,
    }
}

fn is_same_file(a: &Path, b: &Path) -> bool {
    let id = |path: &Path| path.metadata().ok().map(|stat| (stat.dev(), stat.ino()));
    a == b || id(a).is_some_and(|a| id(b) == Some(a))
}

fn is_same_host(a: &str, b: &str) -> bool {
    if a.eq_ignore_ascii_case(b) {
        return true;
    }
    let (a, b) = (addresses(a), addresses(b));
    a.iter().any(|a| b.iter().any(|b| is_same_ip(*a, *b)))
}

/// The addresses of a host; none when nothing is known of it.
fn addresses(host: &str) -> Vec<IpAddr> {
    let found = (host, 0).to_socket_addrs().into_iter().flatten();
    found.map(|address| address.ip().to_canonical()).collect()
}

/// A server that listens on "any address" is reached by each one of its host.
fn is_same_ip(a: IpAddr, b: IpAddr) -> bool {
    a == b || a.is_unspecified() && is_of_this_host(b) || b.is_unspecified() && is_of_this_host(a)
}

fn is_of_this_host(ip: IpAddr) -> bool {
    ip.is_loopback() || UdpSocket::bind(SocketAddr::new(ip, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same(a: &str, b: &str) -> bool {
        let [a, b] = [a, b].map(|uri| uri.parse().unwrap());
        assert_eq!(may_be_same_export(&a, &b), may_be_same_export(&b, &a));
        may_be_same_export(&a, &b)
    }

    #[test]
    fn a_host_is_known_by_its_address() {
        assert!(same("nbd://localhost/a", "nbd://127.0.0.1:10809/a") || same("nbd://localhost/a", "nbd://[::1]/a"));
        assert!(
            same("nbd://LOCALHOST/a", "nbds://localhost/a") && same("nbd://[::ffff:127.0.0.1]/", "nbd://127.0.0.1/")
        );
        assert!(same("nbd://0.0.0.0/a", "nbd://127.0.0.1/a") && !same("nbd://0.0.0.0/a", "nbd://192.0.2.1/a"));
        assert!(!same("nbd://127.0.0.1:1/a", "nbd://127.0.0.1:2/a") && !same("nbd://127.0.0.1/", "nbd://127.0.0.2/"));
    }

    #[test]
    fn a_default_export_may_be_any_of_its_server() {
        assert!(same("nbd://127.0.0.1/a", "nbd://127.0.0.1/") && same("nbd://127.0.0.1", "nbd://127.0.0.1/"));
        assert!(!same("nbd://127.0.0.1/a", "nbd://127.0.0.1/b"));
    }

    #[test]
    fn a_socket_is_known_by_its_inode() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| format!("nbd+unix:///?socket={}", dir.path().join(name).display());
        std::fs::write(dir.path().join("s"), "").unwrap();
        std::fs::write(dir.path().join("other"), "").unwrap();
        std::os::unix::fs::symlink("s", dir.path().join("link")).unwrap();
        assert!(same(&at("s"), &at("link")) && same(&at("s"), &at("./s")) && same(&at("gone"), &at("gone")));
        assert!(!same(&at("s"), &at("other")) && !same(&at("s"), &at("gone")));
        assert!(!same(&at("s"), "nbd://127.0.0.1/"));
    }

    #[test]
    fn a_path_of_a_socket_that_is_gone_has_one_spelling() {
        let dir = tempfile::tempdir().unwrap();
        let whole = dir.path().canonicalize().unwrap().join("s");
        std::os::unix::fs::symlink(".", dir.path().join("link")).unwrap();
        for name in ["s", "./s", "link/s"] {
            assert_eq!(canonical_address(&Address::Unix(dir.path().join(name))), Address::Unix(whole.clone()));
        }
    }
}
