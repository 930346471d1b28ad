//! One more disk for a running server. A thread opens it, so a disk whose storage hangs, or whose file somebody else has for a moment, holds up none of the
//! others; the main loop then serves it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use spile_core::{Error, ErrorKind, Result};

use super::api::Call;
use super::api::types::Attach;
use super::changes::{Gone, is_being_detached};
use super::claims::Claim;
use super::control::Event;
use super::disks::{self, Open, Served};
use super::fronts::{Leaving, Role};
use super::identity::Identity;
use super::limits;
use super::server::Server;
use super::sockets::absolute;
use crate::disks::DiskSpec;
use crate::uri::Address;

/// A disk that a thread opens, to be served then.
pub(super) struct Coming {
    name: String,
    /// As the caller has given it.
    text: String,
    spec: DiskSpec,
    /// The sockets that it is to have.
    addresses: Vec<(Role, Address)>,
    pub thread: JoinHandle<Result<Open>>,
    /// Keeps others from attaching a disk of this name, and successors from coming meanwhile.
    claim: Claim,
}

/// Waits for a thread that opens a disk.
pub(super) fn opened(thread: JoinHandle<Result<Open>>) -> Result<Open> {
    let panicked = |_| Err(Error::new(ErrorKind::Io, "the thread that opens a disk has panicked"));
    thread.join().unwrap_or_else(panicked)
}

/// Which disks are being opened, and those that have been since the first of these threads looked at what is served. Clones are the same list.
#[derive(Clone, Default)]
pub(super) struct Arrivals(Arc<Mutex<Vec<(String, Identity)>>>);

impl Arrivals {
    /// Notes a disk, unless another one of the list is the same. The export of an NBD server has no lock that would tell.
    ///
    /// # Errors
    /// `Busy` with the name of that one.
    fn enter(&self, name: &str, identity: &Identity) -> Result<()> {
        let mut list = self.list();
        if let Some((other, _)) = list.iter().find(|(_, other)| !identity.goes_with(other)) {
            let what = format!("this disk is being attached, as {other:?}");
            return Err(Error::new(ErrorKind::Busy, what).hint("try again when it is served"));
        }
        list.push((name.to_owned(), identity.clone()));
        Ok(())
    }

    /// Forgets a disk that is not open any more.
    pub fn leave(&self, name: &str) {
        self.list().retain(|(other, _)| other != name);
    }

    fn list(&self) -> MutexGuard<'_, Vec<(String, Identity)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Server {
    /// Begins to serve one more disk. The caller is answered when it is served, or not.
    pub(super) fn begin_attach(&mut self, attach: &Attach, call: Call) {
        match self.start_to_open(attach) {
            Ok(coming) => self.coming.push((coming, call)),
            Err(error) => call.answer(Err(error)),
        }
    }

    /// Serves the disk of this name, which a thread has opened, or not, and answers the caller. When it fails, nothing has changed.
    pub(super) fn end_attach(&mut self, name: &str) {
        let Some(at) = self.coming.iter().position(|(coming, _)| coming.name == name) else { return };
        let (Coming { text, spec, addresses, thread, claim, .. }, call) = self.coming.remove(at);
        match opened(thread) {
            Ok(open) => {
                let name = open.name.clone();
                if self.serve_too(open, spec, addresses, claim, call) {
                    self.changes.attach(&name, &text);
                }
            }
            Err(error) => {
                self.arrivals.leave(name);
                drop(claim);
                call.answer(Err(error));
            }
        }
        if self.coming.is_empty() {
            // Threads that start from now on look at all that is served, or is being closed, now.
            self.arrivals.list().clear();
        }
    }

    fn start_to_open(&self, attach: &Attach) -> Result<Coming> {
        self.refuse_for_xen()?;
        let bad = |why| Error::new(ErrorKind::InvalidInput, why);
        let spec: DiskSpec = attach.disk.parse().map_err(bad)?;
        let name = spec.own_name();
        let mut addresses = Vec::new();
        for path in &attach.vhost_user {
            addresses.push((Role::Vhost(name.clone()), absolute(&Address::Unix(path.into()))?));
        }
        for address in &attach.nbd {
            addresses.push((Role::Nbd, absolute(&address.parse().map_err(bad)?)?));
        }
        self.refuse_name(&name)?;
        let claim = self.claims.take(std::slice::from_ref(&name), "an attach")?;
        let going: Vec<_> = self.detaching.iter().map(|gone| (gone.name.clone(), gone.identity.clone())).collect();
        let (served, opening, arrivals) = (Served::of(&self.disks), self.opening.clone(), self.arrivals.clone());
        let (engine, events, to_open, to_tell) = (self.engine.clone(), self.sender.clone(), spec.clone(), name.clone());
        let open = move || {
            let identity = opening.identity_of(&to_open);
            if let Some((name, _)) = going.iter().find(|(_, other)| !identity.goes_with(other)) {
                return Err(is_being_detached(name));
            }
            served.refuse_twice(&identity)?;
            arrivals.enter(&to_open.own_name(), &identity)?;
            opening.open_beside(&engine, &to_open, &served)
        };
        let thread = std::thread::Builder::new().name("spile-attach".to_owned()).spawn(move || {
            let opened = open();
            // When the server ends, it closes the disk.
            let _ = events.send(Event::Attached(to_tell));
            opened
        });
        let thread = thread.map_err(|source| Error::io("start a thread to open a disk", source))?;
        Ok(Coming { name, text: attach.disk.clone(), spec, addresses, thread, claim })
    }

    /// Refuses a name that a disk of this server has.
    fn refuse_name(&self, name: &str) -> Result<()> {
        let is_known = |open: &Open| open.name == name || open.names.iter().any(|other| other == name);
        if self.disks.iter().any(is_known) {
            let what = format!("a disk named {name:?} is served already");
            return Err(Error::new(ErrorKind::Exists, what).hint("give the new one another name: name=N"));
        }
        let is_going = |gone: &&Gone| gone.name == name || gone.names.iter().any(|other| other == name);
        self.detaching.iter().find(is_going).map_or(Ok(()), |gone| Err(is_being_detached(&gone.name)))
    }

    /// Serves this disk, too, at these addresses, and returns true. When that fails, it is closed, and then the caller is told.
    fn serve_too(
        &mut self,
        open: Open,
        spec: DiskSpec,
        addresses: Vec<(Role, Address)>,
        claim: Claim,
        call: Call,
    ) -> bool {
        // Others may have come and gone while it was opened.
        if let Err(refused) = self.refuse_too(&open) {
            self.close_unused(open, Leaving::default(), claim, call, refused);
            return false;
        }
        let names = open.names.clone();
        self.opening.add(spec);
        self.disks.push(open);
        if let Err(why) = self.listen_on(addresses) {
            names.iter().for_each(|name| self.opening.remove(name));
            let servers = self.fronts.take_out(&names);
            if let Some(open) = self.disks.pop() {
                // NBD clients may find it already. When this fails, they find a disk that is closed.
                let _ = self.exchange_nbd();
                self.close_unused(open, servers, claim, call, why);
            }
            return false;
        }
        if let Some(open) = self.disks.last() {
            disks::begin(&self.engine, std::slice::from_ref(open), &self.sender);
            self.show();
            limits::place_new(&self.engine, open);
        }
        drop(claim);
        call.answer(Ok(()));
        true
    }

    /// Refuses a disk that is open now, and may not be served beside the others.
    fn refuse_too(&self, open: &Open) -> Result<()> {
        self.refuse_name(&open.name)?;
        if let Some(gone) = self.detaching.iter().find(|gone| !open.identity.goes_with(&gone.identity)) {
            return Err(is_being_detached(&gone.name));
        }
        Served::of(&self.disks).refuse_twice(&open.identity)
    }
}
