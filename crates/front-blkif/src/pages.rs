//! The ways to a guest's pages.
//!
//! **Copy** (the default): data go through buffers of ours, copied by the hypervisor, all pieces of a turn's requests with
//! one call. What is being written cannot change under the disk, and nothing of the guest is mapped here.
//! **Map**: the pages are mapped for each request, and the disk works on them; or, as tapdisk2 did, on buffers that are
//! copied from and to them. **Persistent**: pages stay mapped, for a guest that uses the same ones again and
//! again and copies its data itself; those least recently used are let go when there are too many.
//!
//! Where the kernel must not work on mapped pages ([`Grants::can_be_pinned`]), the disk always works on buffers.

use std::collections::HashMap;
use std::sync::Arc;

use spile_core::{Segment, Segments};
use spile_engine::pool;
use spile_front::LogLimit;
use spile_xen::{CopyOp, DomId, GrantRef, GrantStatus, Grants, Way};

use crate::request::{Refusal, Request, range};

/// How a guest's pages are reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Grant copy.
    #[default]
    Copy,
    /// Grant map for each request; the disk works on the guest's pages.
    Map,
    /// Grant map for each request, and a copy to or from buffers of ours.
    MapCopy,
    /// Pages stay mapped, if the guest offers it; else as `Map`.
    Persistent,
}

/// Pages that stay mapped, of one ring: all that its guest uses at depth 32 and more.
const MAX_PERSISTENT: usize = 1056;
/// The same of one disk. Each is a mapping of its own, of which a process may have 65530 (vm.max_map_count).
const MAX_DISK_PERSISTENT: usize = 32768;

const BAD_PAGE: Refusal = Refusal::error("a page of the guest's is not granted as it must be");

/// The pages of one guest, as one ring reaches them.
pub struct Pages<G> {
    grants: Arc<G>,
    domain: DomId,
    access: Access,
    /// The disk works on buffers of ours and not on mapped pages.
    has_buffers: bool,
    kept: HashMap<GrantRef, Kept>,
    clock: u64,
    /// One call's pieces, whose they are, and how they ended. Kept for their room.
    ops: Vec<CopyOp>,
    owners: Vec<u32>,
    buffers: Vec<Segment>,
    statuses: Vec<GrantStatus>,
    bytes: Vec<u8>,
    max_persistent: usize,
    /// Calls that failed as a whole are counted among them.
    complaints: Arc<LogLimit>,
}

struct Kept {
    page: Segment,
    used: u64,
}

impl<G: Grants> Pages<G> {
    /// The pages of `domain`, for one of `rings`. What goes wrong is logged, but less and less often, by the number of
    /// `complaints`.
    pub fn new(grants: Arc<G>, domain: DomId, access: Access, rings: usize, complaints: Arc<LogLimit>) -> Self {
        let has_buffers = access == Access::MapCopy || !grants.can_be_pinned();
        Self {
            grants,
            domain,
            access,
            has_buffers,
            kept: HashMap::new(),
            clock: 0,
            ops: Vec::new(),
            owners: Vec::new(),
            buffers: Vec::new(),
            statuses: Vec::new(),
            bytes: Vec::new(),
            max_persistent: MAX_PERSISTENT.min(MAX_DISK_PERSISTENT / rings),
            complaints,
        }
    }

    /// Reads the segments of those requests that have them in pages of their own. Copied whatever the access is: they are
    /// read once and then checked.
    pub fn read_indirect(&mut self, requests: &mut [Box<Request>]) {
        for (number, request) in requests.iter().enumerate() {
            let (buffer, mut at) = (self.buffers.len() as u32, 0);
            for (gref, len) in request.indirect_pages() {
                self.ops.push(CopyOp { gref, page_offset: 0, len, buffer, buffer_offset: at });
                self.owners.push(number as u32);
                at += u32::from(len);
            }
            if at > 0 {
                self.buffers.push(pool().alloc(at as usize));
            }
        }
        self.copy(Way::FromGuest, requests);
        let buffers = std::mem::take(&mut self.buffers);
        let with_pages = requests.iter_mut().filter(|request| request.indirect.is_some());
        let with_pages = with_pages.filter(|request| request.refusal.is_none_or(|refusal| refusal == BAD_PAGE));
        for (request, buffer) in with_pages.zip(&buffers) {
            if request.refusal.is_none() {
                self.bytes.resize(buffer.len(), 0);
                buffer.copy_to_slice(0, &mut self.bytes);
                request.take_indirect(&self.bytes);
            }
        }
        self.buffers = buffers;
        self.buffers.clear();
    }

    /// Gives each request the memory that the disk works on, filled with what is to be written.
    pub fn load(&mut self, requests: &mut [Box<Request>]) {
        match self.access {
            Access::Copy => self.load_copies(requests),
            Access::Map | Access::MapCopy | Access::Persistent => {
                for request in with_data(requests) {
                    if self.map(request).is_none() {
                        request.refusal = Some(BAD_PAGE);
                        request.clear();
                    }
                }
            }
        }
    }

    /// Brings what was read to the guest, of those requests that ended well; a page that cannot be written is an error.
    pub fn store(&mut self, requests: &mut [Box<Request>]) {
        match self.access {
            Access::Copy => {
                self.list_pieces(requests, |request| request.fills_pages());
                self.copy(Way::ToGuest, requests);
                self.buffers.clear();
            }
            Access::Map | Access::MapCopy | Access::Persistent if self.has_buffers => {
                for request in with_data(requests).filter(|request| request.fills_pages()) {
                    pages_of(request).copy_from(&request.data);
                }
            }
            Access::Map | Access::MapCopy | Access::Persistent => {}
        }
    }

    fn load_copies(&mut self, requests: &mut [Box<Request>]) {
        for request in with_data(requests) {
            request.data.push(pool().alloc(request.len_bytes as usize));
        }
        self.list_pieces(requests, |request| !request.fills_pages());
        self.copy(Way::FromGuest, requests);
        self.buffers.clear();
    }

    /// Lists the pieces of all requests that `is_wanted`, each with its buffer.
    fn list_pieces(&mut self, requests: &[Box<Request>], is_wanted: impl Fn(&Request) -> bool) {
        let wanted = |request: &Request| request.refusal.is_none() && request.len_bytes > 0 && is_wanted(request);
        for (number, request) in requests.iter().enumerate().filter(|(_, request)| wanted(request)) {
            let buffer = self.buffers.len() as u32;
            self.buffers.push(request.data.as_slice()[0].clone());
            let mut buffer_offset = 0;
            for segment in &request.segments {
                let (page_offset, len) = range(segment);
                let (page_offset, len) = (page_offset as u16, len as u16);
                self.ops.push(CopyOp { gref: segment.gref, page_offset, len, buffer, buffer_offset });
                self.owners.push(number as u32);
                buffer_offset += u32::from(len);
            }
        }
    }

    /// Copies the listed pieces; a request one of whose pieces failed is refused.
    fn copy(&mut self, way: Way, requests: &mut [Box<Request>]) {
        if !self.ops.is_empty() {
            self.statuses.clear();
            let copied = self.grants.copy(self.domain, way, &self.buffers, &self.ops, &mut self.statuses);
            if let Err(error) = &copied
                && let Some(count) = self.complaints.count()
            {
                tracing::warn!(domain = %self.domain, count, %error, "blkif: the guest's pages cannot be copied");
            }
            for (at, owner) in self.owners.iter().enumerate() {
                if copied.is_err() || !self.statuses.get(at).is_some_and(|status| status.is_okay()) {
                    requests[*owner as usize].refusal = Some(BAD_PAGE);
                }
            }
        }
        self.ops.clear();
        self.owners.clear();
    }

    /// Maps a request's pages.
    fn map(&mut self, request: &mut Request) -> Option<()> {
        request.mapped = match self.access {
            Access::Persistent => {
                request.segments.iter().map(|segment| self.keep(segment.gref)).collect::<Option<_>>()?
            }
            _ => {
                let refs: Vec<_> = request.segments.iter().map(|segment| segment.gref).collect();
                self.grants.map(self.domain, &refs, request.fills_pages()).ok()?
            }
        };
        let pages = pages_of(request);
        if self.has_buffers {
            request.data.push(pool().alloc(request.len_bytes as usize));
            if !request.fills_pages() {
                request.data.copy_from(&pages);
            }
        } else {
            request.data = pages;
        }
        Some(())
    }

    /// A page that stays mapped.
    fn keep(&mut self, gref: GrantRef) -> Option<Segment> {
        self.clock += 1;
        if let Some(kept) = self.kept.get_mut(&gref) {
            kept.used = self.clock;
            return Some(kept.page.clone());
        }
        if self.kept.len() >= self.max_persistent {
            self.drop_oldest();
        }
        let page = self.grants.map(self.domain, &[gref], true).ok()?.as_slice().first()?.clone();
        self.kept.insert(gref, Kept { page: page.clone(), used: self.clock });
        Some(page)
    }

    /// Lets go of an eighth of the pages, so that the search is rare.
    fn drop_oldest(&mut self) {
        let mut used: Vec<_> = self.kept.values().map(|kept| kept.used).collect();
        let (_, limit, _) = used.select_nth_unstable(self.max_persistent / 8);
        let limit = *limit;
        self.kept.retain(|_, kept| kept.used >= limit);
    }
}

/// Those that have data and are not refused.
fn with_data(requests: &mut [Box<Request>]) -> impl Iterator<Item = &mut Request> {
    let boxes = requests.iter_mut().map(|request| &mut **request);
    boxes.filter(|request| request.refusal.is_none() && request.len_bytes > 0)
}

/// The parts of the mapped pages that the segments name.
fn pages_of(request: &Request) -> Segments {
    let pairs = request.segments.iter().zip(request.mapped.iter());
    pairs.fold(Segments::new(), |mut all, (segment, page)| {
        let (from, len) = range(segment);
        all.push(page.slice(from..from + len));
        all
    })
}
