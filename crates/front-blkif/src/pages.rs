//! [`Pages`]: gives requests the memory on which the disk works, and moves their data from and to the guest's pages.
//! There are three ways to do that:
//!
//! - **Copy** (the default): the disk works on our own buffers. The hypervisor copies between them and the guest's
//!   pages, all pieces of a turn's requests with one call. The data of a write cannot change while the disk works on
//!   them, and no page of the guest is mapped here.
//! - **Map**: the guest's pages are mapped for each request. The disk works on them, or, as in tapdisk2, on buffers
//!   that are copied from and to them.
//! - **Persistent**: pages stay mapped, for a guest that uses the same pages again and again and copies its data
//!   itself. When too many are mapped, those that were not used for the longest time are unmapped.
//!
//! Where the kernel must not work on mapped pages ([`Grants::can_be_pinned`]), the disk always works on buffers.

use std::collections::HashMap;
use std::sync::Arc;

use foldhash::fast::RandomState;
use spile_core::Segment;
use spile_engine::pool;
use spile_front::LogLimit;
use spile_xen::{CopyOp, DomId, GrantRef, GrantStatus, Grants, Way};

use crate::request::{Refusal, Request, range};

/// The way to a guest's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Grant copy.
    #[default]
    Copy,
    /// Grant map for each request; the disk works on the guest's pages.
    Map,
    /// Grant map for each request; the disk works on our own buffers, copied from or to the guest's pages.
    MapCopy,
    /// Pages stay mapped, if the guest offers that; else as `Map`.
    Persistent,
}

/// The most pages of one ring that stay mapped: all that its guest uses at depth 32 and more.
const MAX_PERSISTENT: usize = 1056;
/// The most pages of one disk that stay mapped. Each takes one mapping, and a process may have 65530
/// (vm.max_map_count).
const MAX_DISK_PERSISTENT: usize = 32768;

const BAD_PAGE: Refusal = Refusal::error("a page of the guest's is not granted as it must be");

/// The way of one ring to its guest's pages.
pub struct Pages<G> {
    grants: Arc<G>,
    domain: DomId,
    access: Access,
    /// True when the disk works on our own buffers and not on mapped pages.
    has_buffers: bool,
    kept: HashMap<GrantRef, Kept, RandomState>,
    clock: u64,
    /// The pieces of one call, the requests that own them, and how they ended. The lists are kept for their room.
    ops: Vec<CopyOp>,
    owners: Vec<u32>,
    /// Copies of the pages in which the segments of indirect requests lie.
    tables: Vec<Segment>,
    statuses: Vec<GrantStatus>,
    bytes: Vec<u8>,
    max_persistent: usize,
    /// Limits messages about calls that failed as a whole.
    complaints: Arc<LogLimit>,
}

struct Kept {
    page: Segment,
    used: u64,
}

impl<G: Grants> Pages<G> {
    /// The way to the pages of `domain`, for one of `rings` rings. Failed calls are logged as `complaints` allows.
    pub fn new(grants: Arc<G>, domain: DomId, access: Access, rings: usize, complaints: Arc<LogLimit>) -> Self {
        let has_buffers = access == Access::MapCopy || !grants.can_be_pinned();
        Self {
            grants,
            domain,
            access,
            has_buffers,
            kept: HashMap::default(),
            clock: 0,
            ops: Vec::new(),
            owners: Vec::new(),
            tables: Vec::new(),
            statuses: Vec::new(),
            bytes: Vec::new(),
            max_persistent: MAX_PERSISTENT.min(MAX_DISK_PERSISTENT / rings),
            complaints,
        }
    }

    /// Reads the segments of indirect requests, which lie in pages of the guest. They are copied whatever the access
    /// is, so that they are read once and then checked.
    pub fn read_indirect(&mut self, requests: &mut [Box<Request>]) {
        if requests.iter().all(|request| request.indirect.is_none()) {
            return;
        }
        let mut tables = std::mem::take(&mut self.tables);
        for (number, request) in requests.iter().enumerate() {
            let (buffer, mut at) = (tables.len() as u32, 0);
            for (gref, len) in request.indirect_pages() {
                self.ops.push(CopyOp { gref, page_offset: 0, len, buffer, buffer_offset: at });
                self.owners.push(number as u32);
                at += u32::from(len);
            }
            if at > 0 {
                tables.push(pool().alloc(at as usize));
            }
        }
        self.copy(Way::FromGuest, |number| &tables[number as usize]);
        self.refuse_failed(requests);
        let with_pages = requests.iter_mut().filter(|request| request.indirect.is_some());
        let with_pages = with_pages.filter(|request| request.refusal.is_none_or(|refusal| refusal == BAD_PAGE));
        for (request, table) in with_pages.zip(&tables) {
            if request.refusal.is_none() {
                self.bytes.resize(table.len(), 0);
                table.copy_to_slice(0, &mut self.bytes);
                request.take_indirect(&self.bytes);
            }
        }
        tables.clear();
        self.tables = tables;
    }

    /// Gives each request the memory on which the disk works. For writes it is filled with their data.
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

    /// Brings the data of reads that ended well to the guest. A request with a page that cannot be written is refused.
    pub fn store(&mut self, requests: &mut [Box<Request>]) {
        match self.access {
            Access::Copy => {
                self.copy_data(Way::ToGuest, requests, |request| request.fills_pages());
            }
            Access::Map | Access::MapCopy | Access::Persistent if self.has_buffers => {
                for request in with_data(requests).filter(|request| request.fills_pages()) {
                    request.pages.copy_from(&request.data);
                }
            }
            Access::Map | Access::MapCopy | Access::Persistent => {}
        }
    }

    fn load_copies(&mut self, requests: &mut [Box<Request>]) {
        let pool = pool();
        for request in with_data(requests) {
            request.data.push(pool.alloc(request.len_bytes as usize));
        }
        self.copy_data(Way::FromGuest, requests, |request| !request.fills_pages());
    }

    /// Copies between the guest's pages and the buffers of all requests for which `is_wanted` is true.
    fn copy_data(&mut self, way: Way, requests: &mut [Box<Request>], is_wanted: impl Fn(&Request) -> bool) {
        let wanted = |request: &Request| request.refusal.is_none() && request.len_bytes > 0 && is_wanted(request);
        for (number, request) in requests.iter().enumerate().filter(|(_, request)| wanted(request)) {
            let (number, mut buffer_offset) = (number as u32, 0);
            for segment in &request.segments {
                let (page_offset, len) = range(segment);
                let (page_offset, len) = (page_offset as u16, len as u16);
                self.ops.push(CopyOp { gref: segment.gref, page_offset, len, buffer: number, buffer_offset });
                self.owners.push(number);
                buffer_offset += u32::from(len);
            }
        }
        self.copy(way, |number| &requests[number as usize].data.as_slice()[0]);
        self.refuse_failed(requests);
    }

    /// Copies the listed pieces, and notes how each ended.
    fn copy<'a>(&mut self, way: Way, buffer_of: impl Fn(u32) -> &'a Segment) {
        self.statuses.clear();
        if self.ops.is_empty() {
            return;
        }
        if let Err(error) = self.grants.copy(self.domain, way, buffer_of, &self.ops, &mut self.statuses) {
            self.statuses.clear();
            if let Some(count) = self.complaints.count() {
                tracing::warn!(domain = %self.domain, count, %error, "blkif: the guest's pages cannot be copied");
            }
        }
    }

    /// Refuses each request that has a piece which was not copied.
    fn refuse_failed(&mut self, requests: &mut [Box<Request>]) {
        for (at, owner) in self.owners.iter().enumerate() {
            if !self.statuses.get(at).is_some_and(|status| status.is_okay()) {
                requests[*owner as usize].refusal = Some(BAD_PAGE);
            }
        }
        self.ops.clear();
        self.owners.clear();
    }

    /// Maps the pages of one request; `None` when they cannot be mapped.
    fn map(&mut self, request: &mut Request) -> Option<()> {
        if self.access == Access::Persistent {
            for segment in &request.segments {
                let (from, len) = range(segment);
                request.pages.push(self.keep(segment.gref)?.into_slice(from..from + len));
            }
        } else {
            let refs: Vec<_> = request.segments.iter().map(|segment| segment.gref).collect();
            let mapped = self.grants.map(self.domain, &refs, request.fills_pages()).ok()?;
            for (segment, page) in request.segments.iter().zip(mapped.iter()) {
                let (from, len) = range(segment);
                request.pages.push(page.slice(from..from + len));
            }
        }
        if self.has_buffers {
            request.data.push(pool().alloc(request.len_bytes as usize));
            if !request.fills_pages() {
                request.data.copy_from(&request.pages);
            }
        } else {
            std::mem::swap(&mut request.data, &mut request.pages);
        }
        Some(())
    }

    /// The page of one grant, which is mapped and stays mapped; `None` when it cannot be mapped.
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

    /// Unmaps an eighth of the pages, those unused for the longest time. A search for the oldest is then rare.
    fn drop_oldest(&mut self) {
        let mut used: Vec<_> = self.kept.values().map(|kept| kept.used).collect();
        let (_, limit, _) = used.select_nth_unstable(self.max_persistent / 8);
        let limit = *limit;
        self.kept.retain(|_, kept| kept.used >= limit);
    }
}

/// The requests that have data and are not refused.
fn with_data(requests: &mut [Box<Request>]) -> impl Iterator<Item = &mut Request> {
    let boxes = requests.iter_mut().map(|request| &mut **request);
    boxes.filter(|request| request.refusal.is_none() && request.len_bytes > 0)
}
