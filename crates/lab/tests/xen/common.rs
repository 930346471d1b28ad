//! A host, a guest in this process, and a back end.

use spile_lab::xen::{Guest, Host, Hypervisor};
use spile_mem::Segment;
use spile_xen::{CopyOp, DomId, GrantRef, GrantStatus, Grants, Way};

pub const DOMAIN: DomId = DomId(3);
pub const OKAY: i16 = 0;
pub const GENERAL_ERROR: i16 = -1;
pub const BAD_DOMAIN: i16 = -2;
pub const BAD_GREF: i16 = -3;
pub const BAD_PAGE: i16 = -9;

pub struct World {
    pub hypervisor: Hypervisor,
    pub guest: Guest,
    pub host: Host,
    pub dir: tempfile::TempDir,
}

impl World {
    /// With a guest of so many pages.
    pub fn new(pages: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::start(dir.path()).unwrap();
        let guest = Guest::create(dir.path(), DOMAIN, pages * 4096).unwrap();
        let hypervisor = Hypervisor::connect(dir.path()).unwrap();
        Self { hypervisor, guest, host, dir }
    }

    /// Copies `ops` and says how each ended.
    pub fn copy(&self, way: Way, buffer: &Segment, ops: &[CopyOp]) -> Vec<i16> {
        copy(&self.hypervisor, DOMAIN, way, buffer, ops)
    }
}

pub fn copy(from: &Hypervisor, domain: DomId, way: Way, buffer: &Segment, ops: &[CopyOp]) -> Vec<i16> {
    let mut statuses = vec![GrantStatus(9); 3];
    from.copy(domain, way, |_| buffer, ops, &mut statuses).unwrap();
    statuses.iter().map(|status| status.0).collect()
}

/// A piece of 512 bytes, the `number`th of page and buffer.
pub fn piece(gref: GrantRef, number: u16) -> CopyOp {
    CopyOp { gref, page_offset: 512 * number, len: 512, buffer: 0, buffer_offset: 512 * u32::from(number) }
}
