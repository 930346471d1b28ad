//! Where a server listens: what the command line says, what systemd passed, what the server before gives.

use std::path::Path;

use spile_core::{Error, ErrorKind, Result};
use spile_store::own_folder;

use super::api::discovery;
use super::fronts::{self, Role, Socket};
use super::takeover::Inheritance;
use crate::listen::{self, Bound, SocketAccess};
use crate::socket_path::short_name;
use crate::uri::Address;

/// The most control sockets of servers whose first disks have the same name.
const MAX_SAME_NAMES: u32 = 100;

/// An address to listen at.
pub struct Endpoint {
    /// Who will listen there.
    pub role: Role,
    /// The address; a Unix socket's path is absolute.
    pub address: Address,
    /// As of [`fronts::key`].
    pub key: String,
}

impl Endpoint {
    /// The endpoint of this role at `address`. `disk` is the identity of the role's disk, if it has one.
    ///
    /// # Errors
    /// When the path of the current folder cannot be found.
    pub fn new(role: Role, disk: Option<&str>, address: &Address) -> Result<Self> {
        let address = absolute(address)?;
        Ok(Self { key: fronts::key(&role, disk, Some(&address)), role, address })
    }

    /// A new socket that listens there. It has no name yet. `access` is not for the control socket.
    ///
    /// # Errors
    /// `Busy` when another server answers there; the system's.
    pub fn bind(self, access: SocketAccess) -> Result<Socket> {
        let bound = match (&self.role, &self.address) {
            (Role::Control, Address::Unix(path)) => Bound::for_commands(path, self.role.question())?,
            _ => Bound::after_asking(&self.address, self.role.question())?,
        };
        if self.role != Role::Control {
            bound.allow(access)?;
        }
        Ok(Socket { role: self.role, key: self.key, bound })
    }
}

/// The address with an absolute path, so that it means the same socket in every folder.
///
/// # Errors
/// When the path of the current folder cannot be found.
pub fn absolute(address: &Address) -> Result<Address> {
    let absolute = |path| std::path::absolute(path).map_err(|e| Error::io("find this folder's path", e));
    Ok(if let Address::Unix(path) = address { Address::Unix(absolute(path)?) } else { address.clone() })
}

/// A control socket in the folder of control sockets, under the first name like `name` that is free. A server without a
/// control socket still serves, so a failure is only logged.
pub fn control_by_name(name: &str) -> Option<Socket> {
    let found = discovery::folder().and_then(|folder| {
        own_folder::make(&folder)?;
        first_free(&folder, name)
    });
    let failed = |error: &Error| tracing::warn!("there is no control socket: {error}");
    found.inspect_err(failed).ok()
}

/// Servers whose first disks have the same name get numbers: `NAME`, `NAME-2`, `NAME-3`. A disk's name may have slashes, and the file's has none:
/// the socket is in this folder, where servers are looked for. A name that is too long for a socket gets a shorter one: commands ask all sockets of the
/// folder for a disk, whatever their names.
fn first_free(folder: &Path, name: &str) -> Result<Socket> {
    let folder = std::path::absolute(folder).map_err(|e| Error::io("find this folder's path", e))?;
    let (name, mut number) = (name.replace('/', "-"), 1);
    loop {
        let file = if number == 1 { name.clone() } else { format!("{name}-{number}") };
        let file = short_name(&folder, &file, discovery::EXTENSION);
        let address = Address::Unix(folder.join(format!("{file}.{}", discovery::EXTENSION)));
        match Endpoint::new(Role::Control, None, &address).and_then(|endpoint| endpoint.bind(SocketAccess::default())) {
            Err(error) if error.kind() == ErrorKind::Busy && number < MAX_SAME_NAMES => number += 1,
            result => return result,
        }
    }
}

/// The sockets that systemd passed.
///
/// # Errors
/// When one of them is not a listening stream socket.
pub fn passed() -> Result<Vec<Socket>> {
    let bound = listen::from_systemd()?.into_iter();
    let socket =
        |bound: Bound| Socket { role: Role::Nbd, key: fronts::key(&Role::Nbd, None, bound.address.as_ref()), bound };
    Ok(bound.map(socket).collect())
}

/// The sockets to listen on: those passed by systemd, those taken over, and new ones for the rest.
///
/// # Errors
/// As [`Endpoint::bind`].
pub fn all(
    endpoints: Vec<Endpoint>,
    passed: Vec<Socket>,
    mut inheritance: Option<&mut Inheritance>,
    access: SocketAccess,
) -> Result<Vec<Socket>> {
    let mut sockets = passed;
    for endpoint in endpoints {
        let taken = inheritance.as_mut().and_then(|inheritance| inheritance.take_socket(&endpoint.key));
        sockets.push(match taken {
            Some(fd) => {
                let bound = Bound::taken_over(fd, endpoint.address);
                Socket { role: endpoint.role, key: endpoint.key, bound }
            }
            None => endpoint.bind(access)?,
        });
    }
    Ok(sockets)
}
