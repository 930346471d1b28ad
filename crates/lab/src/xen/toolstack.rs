//! What `xl` writes into xenstore: disks that come and go, and what a domain leaves behind.

use std::time::{Duration, Instant};

use spile_core::{Error, ErrorKind, Result};
use spile_xen::DomId;
use spile_xen::store::{Access, Permission, Tx, XenStore};

use super::state;

/// A virtual disk of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vbd {
    /// The guest that uses the disk.
    pub guest: DomId,
    /// The domain of the back end.
    pub backend: DomId,
    /// The name of the folder under `backend` in xenstore. It is "vbd" unless another kind of back end serves the disk.
    pub kind: String,
    /// The disk's number in the guest: 51712 is xvda.
    pub device: u32,
    /// The key `params`: the image that is served.
    pub params: String,
    /// The guest may only read.
    pub is_readonly: bool,
    /// More keys for the back end's folder. They replace keys of the same name.
    pub extra: Vec<(String, String)>,
}

impl Vbd {
    /// A writable disk xvda of `guest`, served by domain 0.
    pub fn new(guest: DomId, params: impl Into<String>) -> Self {
        let (backend, kind, params) = (DomId(0), "vbd".to_owned(), params.into());
        Self { guest, backend, kind, device: 51712, params, is_readonly: false, extra: Vec::new() }
    }

    /// The back end's folder.
    pub fn backend_path(&self) -> String {
        format!("/local/domain/{}/backend/{}/{}/{}", self.backend, self.kind, self.guest, self.device)
    }

    /// The front end's folder.
    pub fn frontend_path(&self) -> String {
        format!("/local/domain/{}/device/vbd/{}", self.guest, self.device)
    }

    /// The name that Linux gives to the device, such as xvda.
    fn name(&self) -> String {
        let letter = (self.device.saturating_sub(51712) / 16 % 26) as u8;
        format!("xvd{}", char::from(b'a' + letter))
    }

    fn backend_keys(&self) -> Vec<(&str, String)> {
        let mode = if self.is_readonly { "r" } else { "w" };
        vec![
            ("frontend", self.frontend_path()),
            ("params", self.params.clone()),
            ("frontend-id", self.guest.to_string()),
            ("online", "1".into()),
            ("removable", "0".into()),
            ("bootable", "1".into()),
            ("state", state::INITIALISING.to_string()),
            ("dev", self.name()),
            ("type", "phy".into()),
            ("mode", mode.into()),
            ("device-type", "disk".into()),
            ("discard-enable", "1".into()),
            ("direct-io-safe", "0".into()),
            ("trusted", "1".into()),
        ]
    }

    fn frontend_keys(&self) -> Vec<(&str, String)> {
        vec![
            ("backend", self.backend_path()),
            ("backend-id", self.backend.to_string()),
            ("state", state::INITIALISING.to_string()),
            ("virtual-device", self.device.to_string()),
            ("device-type", "disk".into()),
            ("trusted", "1".into()),
        ]
    }
}

/// Adds a disk in one transaction. The back end owns its folder and the guest may read it; the guest owns the front end's
/// folder and the back end may read it.
///
/// # Errors
/// As xenstore reports.
pub fn add_vbd(store: &mut XenStore, vbd: &Vbd) -> Result<()> {
    let (front, back) = (vbd.frontend_path(), vbd.backend_path());
    let permissions = |owner, reader| {
        [(owner, Access::None), (reader, Access::Read)].map(|(domain, access)| Permission { domain, access })
    };
    store.transaction(|store, tx| {
        for path in [&front, &back] {
            store.make_folder(tx, path)?;
            store.remove(tx, path)?;
            store.make_folder(tx, path)?;
        }
        store.set_permissions(tx, &front, &permissions(vbd.guest, vbd.backend))?;
        store.set_permissions(tx, &back, &permissions(vbd.backend, vbd.guest))?;
        for (key, value) in vbd.frontend_keys() {
            store.write(tx, &format!("{front}/{key}"), &value)?;
        }
        let extra = vbd.extra.iter().map(|(key, value)| (key.as_str(), value.clone()));
        for (key, value) in vbd.backend_keys().into_iter().chain(extra) {
            store.write(tx, &format!("{back}/{key}"), &value)?;
        }
        Ok(())
    })
}

/// Asks the back end to let a disk go, as `xl block-detach` does. [`wait_closed`] waits until it has done so.
///
/// # Errors
/// As xenstore reports.
pub fn detach_vbd(store: &mut XenStore, vbd: &Vbd) -> Result<()> {
    let back = vbd.backend_path();
    store.transaction(|store, tx| {
        store.write(tx, &format!("{back}/online"), "0")?;
        store.write(tx, &format!("{back}/state"), &state::CLOSING.to_string())
    })
}

/// Waits until the back end has closed.
///
/// # Errors
/// `TimedOut` when the back end takes too long; else as xenstore reports.
pub fn wait_closed(store: &mut XenStore, vbd: &Vbd, patience: Duration) -> Result<()> {
    let path = format!("{}/state", vbd.backend_path());
    store.watch(&path, "toolstack")?;
    let deadline = Instant::now() + patience;
    let result = loop {
        let now = store.read_optional(Tx::NONE, &path)?;
        if now.is_none_or(|now| now == state::CLOSED.to_string()) {
            break Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break Err(Error::new(ErrorKind::TimedOut, format!("the back end of {path} does not close")));
        }
        store.next_event(Some(left))?;
    };
    store.unwatch(&path, "toolstack")?;
    result
}

/// Removes both folders of a disk, whatever state they are in.
///
/// # Errors
/// As xenstore reports.
pub fn remove_vbd(store: &mut XenStore, vbd: &Vbd) -> Result<()> {
    let (front, back) = (vbd.frontend_path(), vbd.backend_path());
    store.transaction(|store, tx| remove_if_there(store, tx, &front).and_then(|()| remove_if_there(store, tx, &back)))
}

/// Removes what a domain that has ended leaves behind: its own folder, and those of its disks' back ends in domain 0.
///
/// # Errors
/// As xenstore reports.
pub fn remove_domain(store: &mut XenStore, domain: DomId) -> Result<()> {
    store.transaction(|store, tx| {
        remove_if_there(store, tx, &format!("/local/domain/{domain}"))?;
        remove_if_there(store, tx, &format!("/local/domain/0/backend/vbd/{domain}"))
    })
}

fn remove_if_there(store: &mut XenStore, tx: Tx, path: &str) -> Result<()> {
    match store.remove(tx, path) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
