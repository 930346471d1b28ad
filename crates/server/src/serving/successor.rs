//! [`Told`]: what a running server tells a successor that it would refuse: what it serves beside its own command line.
//!
//! A disk that was attached to a running server is not in the command line of the next one. So a successor that is refused asks what the running
//! server has, and asks again with that. What was detached since, and on what the running server listens no more, it says when it hands over: the
//! successor leaves that out. Each server keeps this for the one after it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result};
use spile_image::Format;

use super::api::discovery;
use super::fronts::{Listening, Role, VhostSpec};
use super::serve::{ControlPlace, Settings};
use super::server::Server;
use super::sockets::{Endpoint, absolute};
use super::takeover::Inheritance;
use crate::disks::DiskSpec;
use crate::uri::Address;

/// What has become of a server's command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Disks that were attached.
    pub attached: Vec<Attached>,
    /// The names of disks that were detached.
    pub detached: Vec<String>,
    /// Addresses on which it listens no more.
    pub closed: Vec<String>,
}

/// A disk that was attached to a running server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// Its name on the server.
    pub name: String,
    /// As it was given: `DISK[,OPTION]...`.
    pub disk: String,
    /// Where it is since it was moved, and its format and serial number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved: Option<(String, Option<String>, Option<String>)>,
}

/// A socket of a running server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToldSocket {
    /// The export of a socket for guests; left out for one of NBD clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
    /// Where it is.
    pub address: String,
}

/// What a running server tells.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// Disks that were attached to it.
    pub attached: Vec<Attached>,
    /// Its sockets for guests and NBD clients.
    pub sockets: Vec<ToldSocket>,
}

impl Changes {
    /// A disk was attached.
    pub fn attach(&mut self, name: &str, disk: &str) {
        self.detached.retain(|other| other != name);
        self.attached.retain(|other| other.name != name);
        self.attached.push(Attached { name: name.to_owned(), disk: disk.to_owned(), moved: None });
    }

    /// A disk was detached.
    pub fn detach(&mut self, name: &str) {
        let before = self.attached.len();
        self.attached.retain(|other| other.name != name);
        if self.attached.len() == before {
            self.detached.push(name.to_owned());
        }
    }
}

impl Attached {
    /// The disk as a successor serves it. What it was limited and shaped to goes from server to server by itself.
    fn spec(&self) -> Result<DiskSpec> {
        let bad = |why| Error::new(ErrorKind::InvalidInput, why);
        let mut spec: DiskSpec = self.disk.parse().map_err(bad)?;
        (spec.limits, spec.group, spec.shape) = (None, None, None);
        if let Some((to, format, serial)) = &self.moved {
            spec.source = to.parse()?;
            spec.format = format.as_ref().map(|format| format.parse::<Format>()).transpose()?;
            (spec.name, spec.serial) = (Some(self.name.clone()), serial.clone());
        }
        Ok(spec)
    }
}

impl Server {
    /// What a successor asks for.
    pub(super) fn told(&self) -> Told {
        let attached = self.changes.attached.iter().map(|attached| {
            let moved = self.opening.spec(&attached.name).zip(attached.spec().ok()).and_then(|(now, before)| {
                let format = now.format.map(|format| format.to_string());
                (now.source != before.source).then(|| (now.source.to_string(), format, now.serial.clone()))
            });
            Attached { moved, ..attached.clone() }
        });
        Told { attached: attached.collect(), sockets: self.listening.iter().filter_map(told_socket).collect() }
    }
}

fn told_socket(socket: &Listening) -> Option<ToldSocket> {
    let export = match &socket.role {
        Role::Nbd => None,
        Role::Vhost(export) => Some(export.clone()),
        Role::Control | Role::Metrics => return None,
    };
    Some(ToldSocket { export, address: socket.address.as_ref()?.to_string() })
}

impl Settings {
    /// Serves what the running server has, too. True when that is more than before.
    ///
    /// # Errors
    /// When it is not understood.
    pub fn follow(&mut self, told: &Told) -> Result<bool> {
        let mut is_more = false;
        for attached in &told.attached {
            let spec = attached.spec()?;
            let identity = self.opening.identity_of(&spec);
            match self.opening.spec(&attached.name).map(|own| self.opening.identity_of(own)) {
                Some(own) if own.is_same(&identity) => continue,
                Some(_) => self.opening.remove(&attached.name),
                None => {}
            }
            tracing::warn!(
                "the disk {:?}, which was attached to the running server, is taken over, too",
                attached.name
            );
            self.opening.add(spec);
            self.changes.attached.push(attached.clone());
            is_more = true;
        }
        for socket in &told.sockets {
            is_more |= self.follow_socket(socket)?;
        }
        Ok(is_more)
    }

    fn follow_socket(&mut self, socket: &ToldSocket) -> Result<bool> {
        let bad = |why| Error::new(ErrorKind::InvalidInput, why);
        let address: Address = socket.address.parse().map_err(bad)?;
        let is_known = |other: &Address| absolute(other).is_ok_and(|other| other == address);
        match (&socket.export, address.clone()) {
            (None, _) if !self.nbd.iter().any(is_known) => self.nbd.push(address),
            (Some(export), Address::Unix(path))
                if !self.vhost_user.iter().any(|spec| is_known(&Address::Unix(spec.path.clone())))
                    && self.opening.identity(export).is_ok() =>
            {
                self.vhost_user.push(VhostSpec { path, export: export.clone(), is_incoming: false });
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Leaves out what the running server, which hands over, does not serve any more, and keeps the addresses of its metrics unless others are
    /// given.
    pub fn leave_out(&mut self, inheritance: &mut Inheritance, endpoints: &mut Vec<Endpoint>) -> Result<()> {
        let (detached, closed) = (inheritance.orders.detached.clone(), inheritance.orders.closed.clone());
        for name in &detached {
            if let Some(exports) = self.opening.exports_of(name) {
                tracing::warn!("the disk {name:?} is left out: it was detached from the running server");
                endpoints.retain(|endpoint| !matches!(&endpoint.role, Role::Vhost(export) if exports.contains(export)));
                inheritance.forget(&exports);
                self.opening.remove(name);
            }
        }
        let is_open = |endpoint: &Endpoint| {
            matches!(endpoint.role, Role::Control | Role::Metrics) || !closed.contains(&endpoint.address.to_string())
        };
        endpoints.retain(is_open);
        (self.changes.detached, self.changes.closed) = (detached, closed);
        self.keep_metrics(inheritance, endpoints)
    }

    fn keep_metrics(&self, inheritance: &Inheritance, endpoints: &mut Vec<Endpoint>) -> Result<()> {
        let of_metrics = inheritance.keys().filter_map(|key| key.strip_prefix("metrics "));
        let addresses: Vec<Address> = of_metrics.filter_map(|address| address.parse().ok()).collect();
        for address in addresses {
            let endpoint = Endpoint::new(Role::Metrics, None, &address)?;
            if endpoints.iter().any(|other| other.key == endpoint.key) {
                continue;
            }
            match self.metrics.is_empty() && self.keeps_metrics {
                true => endpoints.push(endpoint),
                false => tracing::warn!("metrics are answered at {address} no more, where the running server did"),
            }
        }
        Ok(())
    }

    /// Where the running server is, for a takeover: a control socket that is given by a server's name, or is not given, is looked for among the
    /// control sockets of this host. Where none is found, the place stays as it is.
    pub fn find_running(&mut self) {
        let found = match &self.control {
            ControlPlace::At(path) if !discovery::is_socket(path) && path.components().count() == 1 => {
                path.to_str().and_then(|name| discovery::find_server(name).ok())
            }
            ControlPlace::ByName => self.server_of_first_disk(),
            ControlPlace::At(_) | ControlPlace::None => None,
        };
        if let Some(found) = found {
            self.control = ControlPlace::At(found);
        }
    }

    /// The control socket of the server that has our first disk: by its image, else by the names of both.
    fn server_of_first_disk(&self) -> Option<PathBuf> {
        let path = std::fs::canonicalize(self.opening.first_path()?).ok();
        let servers = discovery::servers().ok()?;
        let has = |is_it: &dyn Fn(&super::api::types::Disk) -> bool| {
            servers.iter().find(|(_, disks)| disks.iter().any(is_it)).map(|(socket, _)| socket.clone())
        };
        let by_path = has(&|disk| path.is_some() && std::fs::canonicalize(&disk.path).ok() == path);
        by_path.or_else(|| has(&|disk| disk.name == self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_attached_and_detached_is_known() {
        let mut changes = Changes::default();
        changes.detach("a");
        changes.attach("b", "/b.raw,name=b,iops=7");
        changes.attach("c", "/c.raw");
        changes.detach("c");
        assert_eq!((changes.detached.as_slice(), changes.attached.len()), (&["a".to_owned()][..], 1));
        // Another file under the name of one that was detached.
        changes.attach("a", "/other.raw,name=a");
        assert!(changes.detached.is_empty() && changes.attached.len() == 2);
        let spec = changes.attached[0].spec().unwrap();
        assert_eq!((spec.own_name().as_str(), spec.limits), ("b", None));
        let moved = Some(("/new/b.vhd".to_owned(), Some("vhd".to_owned()), None));
        let spec = Attached { moved, ..changes.attached[0].clone() }.spec().unwrap();
        assert_eq!((spec.source, spec.format), ("/new/b.vhd".parse().unwrap(), Some(Format::Vhd)));
    }
}
