//! The back end's side of the imitated Xen: grants and event channels as `spile-front-blkif` uses them.
//!
//! This process asks the host once about each domain. From then on it checks every operation against the domain's grant
//! table in shared memory, and does it together with the kernel. No third process takes part, as on Xen.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use rustix::io::Errno;
use spile_core::{Error, ErrorKind, Result};
use spile_mem::{Segment, Segments};
use spile_xen::{Channel, CopyOp, DomId, EventChannels, GrantRef, GrantStatus, Grants, Port, Way};

use super::copy;
use super::domain::Domain;
use super::message::{Link, call, fds};
use crate::sys::{Remote, map_run};

/// A connection to a host, as domain 0.
#[derive(Debug)]
pub struct Hypervisor {
    link: Link,
    domains: RwLock<HashMap<DomId, Arc<Domain>>>,
}

impl Hypervisor {
    /// Connects to the host in `dir`.
    ///
    /// # Errors
    /// When no host serves `dir`.
    pub fn connect(dir: &Path) -> Result<Self> {
        Ok(Self { link: Link::connect(dir)?, domains: RwLock::default() })
    }

    /// Ends a domain at once, as `xl destroy` does. Its process gets no other notice.
    ///
    /// # Errors
    /// `NotFound` when there is no such domain.
    pub fn destroy(&self, domain: DomId) -> Result<()> {
        self.link.call("cannot destroy the domain", &[call::DESTROY, u64::from(domain.0)], &[]).map(drop)
    }

    /// The description of a domain. The host is asked only when the domain is unknown or has ended.
    fn domain(&self, id: DomId) -> Result<Arc<Domain>> {
        let domains = self.domains.read().unwrap_or_else(PoisonError::into_inner);
        let known = domains.get(&id).filter(|domain| domain.is_alive()).cloned();
        drop(domains);
        match known {
            Some(domain) => Ok(domain),
            None => self.look_up(id),
        }
    }

    fn look_up(&self, id: DomId) -> Result<Arc<Domain>> {
        let reply = self.link.call("cannot use the domain's grants", &[call::LOOK_UP, u64::from(id.0)], &[]);
        let mut domains = self.domains.write().unwrap_or_else(PoisonError::into_inner);
        // Whoever else has asked meanwhile has been told the same; and there must be one count of uses only.
        if let Some(domain) = domains.get(&id).filter(|domain| domain.is_alive()) {
            return Ok(domain.clone());
        }
        domains.remove(&id);
        let reply = reply?;
        let [_, pid, base, ..] = reply.words;
        let remote = Remote { pid: pid as i32, base: base as usize };
        let domain = Arc::new(Domain::new(id, remote, fds(reply)?)?);
        domains.insert(id, domain.clone());
        Ok(domain)
    }
}

impl Grants for Hypervisor {
    fn copy<'a>(
        &self,
        domain: DomId,
        way: Way,
        buffer_of: impl Fn(u32) -> &'a Segment,
        ops: &[CopyOp],
        statuses: &mut Vec<GrantStatus>,
    ) -> Result<()> {
        statuses.clear();
        statuses.resize(ops.len(), GrantStatus::OKAY);
        match self.domain(domain) {
            Ok(domain) => copy::run(&domain, way, buffer_of, ops, statuses).map_err(|errno| copy_error(&domain, errno)),
            Err(e) if e.kind() == ErrorKind::NotFound => {
                statuses.fill(GrantStatus::BAD_DOMAIN);
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    fn map(&self, domain: DomId, refs: &[GrantRef], is_writable: bool) -> Result<Segments> {
        let domain = self.domain(domain)?;
        let (frames, uses) = domain.begin_all(refs, is_writable)?;
        let segments = domain.window(is_writable).and_then(|window| window.map(&frames, uses));
        segments.map_err(|e| Error::io("cannot map the guest's pages", e))
    }

    fn map_ring(&self, domain: DomId, refs: &[GrantRef]) -> Result<Segment> {
        let domain = self.domain(domain)?;
        let (frames, uses) = domain.begin_all(refs, true)?;
        map_run(domain.memory.as_fd(), &frames, uses).map_err(|e| Error::io("cannot map the guest's ring", e))
    }
}

impl EventChannels for Hypervisor {
    fn bind(&self, domain: DomId, port: Port) -> Result<Channel> {
        let words = [call::BIND, u64::from(domain.0), u64::from(port.0)];
        let reply = self.link.call(&format!("cannot bind to port {} of domain {domain}", port.0), &words, &[])?;
        let [kick, call] = fds(reply)?;
        Ok(Channel::Eventfds(kick, call))
    }
}

fn copy_error(domain: &Domain, errno: Errno) -> Error {
    let error = Error::io(format!("cannot copy to and from process {}", domain.remote().pid), errno.into());
    match errno {
        Errno::PERM | Errno::ACCESS => error.hint(
            "both processes need the same user and neither may be undumpable; \
             sysctl kernel.yama.ptrace_scope must be 0 or 1, and a container must not forbid process_vm_readv",
        ),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use spile_xen::XEN_PAGE_BYTES;

    use super::*;
    use crate::xen::{Guest, Host};

    /// As of a guest that has taken pages out of its process.
    #[test]
    fn pages_that_are_not_there_fail_by_themselves() {
        let dir = tempfile::tempdir().unwrap();
        let _host = Host::start(dir.path()).unwrap();
        let guest = Guest::create(dir.path(), DomId(3), 8 * XEN_PAGE_BYTES).unwrap();
        let grefs: Vec<_> = (0..8).map(|frame| guest.grant(DomId(0), frame, false).unwrap()).collect();
        let hypervisor = Hypervisor::connect(dir.path()).unwrap();
        let window = hypervisor.domain(DomId(3)).unwrap().window(true).unwrap();
        [0, 3, 4, 7].into_iter().for_each(|frame| window.forbid(frame));
        let op = |n: u32| CopyOp {
            gref: grefs[n as usize / 2],
            page_offset: (n % 2 * 1000) as u16,
            len: 10,
            buffer: n % 2,
            buffer_offset: n / 2 * 10,
        };
        let ops: Vec<_> = (0..16).map(op).collect();
        let buffers = [Segment::zeroed(80), Segment::zeroed(80)];
        buffers.iter().for_each(|buffer| buffer.fill(7));
        let mut statuses = Vec::new();
        for way in [Way::ToGuest, Way::FromGuest] {
            hypervisor.copy(DomId(3), way, |number| &buffers[number as usize], &ops, &mut statuses).unwrap();
            let good: Vec<_> = (0..8).filter(|frame| statuses[2 * frame].is_okay()).collect();
            assert_eq!(good, [1, 2, 5, 6]);
            assert!(statuses.chunks(2).all(|page| page[0] == page[1]));
        }
        for (frame, gref) in grefs.into_iter().enumerate() {
            let expected = if [1, 2, 5, 6].contains(&frame) { [7; 10] } else { [0; 10] };
            assert_eq!(guest.memory().read_array::<10>(frame * XEN_PAGE_BYTES + 1000), expected);
            assert!(guest.end_access(gref));
        }
    }
}
