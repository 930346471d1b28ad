//! [`Target`]: where a served disk is found, by any protocol. The URIs and addresses of NBD are those of `spile-nbd-wire`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

pub use spile_nbd_wire::uri::{Address, NBD_PORT, NbdUri, TlsQuery};

/// Where a served disk is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// An export of an NBD server.
    Nbd(NbdUri),
    /// The socket of a vhost-user-blk server.
    Vhost(PathBuf),
    /// The folder of a stand-in for Xen.
    Lab(PathBuf),
}

/// An NBD URI, `vhost-user:PATH` or `xen-lab:DIR`.
impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("vhost-user", "")) => Err("`vhost-user:` needs the path of a socket".to_owned()),
            Some(("vhost-user", path)) => Ok(Self::Vhost(path.into())),
            Some(("xen-lab", "")) => Err("`xen-lab:` needs a folder".to_owned()),
            Some(("xen-lab", dir)) => Ok(Self::Lab(dir.into())),
            _ => text.parse().map(Self::Nbd).map_err(|e| format!("{e}, or vhost-user:PATH or xen-lab:DIR")),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nbd(uri) => uri.fmt(f),
            Self::Vhost(path) => write!(f, "vhost-user:{}", path.display()),
            Self::Lab(path) => write!(f, "xen-lab:{}", path.display()),
        }
    }
}

impl From<NbdUri> for Target {
    fn from(uri: NbdUri) -> Self {
        Self::Nbd(uri)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_read_back() {
        for text in ["nbd://localhost:10809/", "vhost-user:/run/a b"] {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
        }
        assert!("vhost-user:".parse::<Target>().is_err());
        assert!("vhost:/x".parse::<Target>().unwrap_err().contains("vhost-user:PATH"));
    }
}
