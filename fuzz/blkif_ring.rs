//! A blkif ring, its requests and its journal under a script, as pure code: slots and indices of a guest's, answers in any
//! order, and a back end that is killed and goes on. Used by the fuzz target of this name and by its short run in the
//! tests of `front-blkif`.
//!
//! Whatever the guest writes, nothing panics, what is accepted lies within pages and disk, and whoever goes on finds each
//! request that was taken and not answered once, in order.

use std::sync::atomic::Ordering;

use spile_core::{MAX_REQUEST_BYTES, Segment};
use spile_front_blkif::journal::{Journal, journal_bytes};
use spile_front_blkif::request::{Limits, Request, range};
use spile_front_blkif::ring::{Ring, SLOT_BYTES, Slot, shared_rsp_prod};
use spile_xen::blkif::{Abi, Response, index, status};

use super::script::Script;

const SLOTS: u32 = 32;
const STEPS: usize = 400;
const DISK_BYTES: u64 = 1 << 30;
const LIMITS: Limits = Limits { max_indirect: 256, read_only: false, discards: true };

/// Runs one script.
pub fn run(data: &[u8]) {
    let mut script = Script(data);
    let flags = script.u8();
    if flags & 0x80 != 0 {
        return damaged_journal(&mut script);
    }
    let abi = if flags & 1 == 0 { Abi::X86_64 } else { Abi::X86_32 };
    let start = [0, u32::MAX - 5, 1 << 31, 77][usize::from(flags >> 1 & 3)];
    let mut back_end = BackEnd::new(abi, start);
    for _ in 0..STEPS {
        if script.0.is_empty() || !back_end.step(&mut script) {
            break;
        }
    }
}

/// A request that was taken: its entry, its index, and its slot.
type Taken = (u16, u32, Slot);

struct BackEnd {
    abi: Abi,
    memory: Segment,
    kept: Segment,
    ring: Ring,
    journal: Journal,
    request: Request,
    at_work: Vec<Taken>,
    /// Answered, and not shown.
    unshown: Vec<Taken>,
    /// The guest has written over the index of responses.
    is_scribbled: bool,
}

impl BackEnd {
    fn new(abi: Abi, start: u32) -> Self {
        let (memory, kept) = (Segment::zeroed(4096), Segment::zeroed(journal_bytes(SLOTS)));
        for at in [index::REQ_PROD, index::RSP_PROD] {
            memory.store_u32(at, start, Ordering::Relaxed);
        }
        let ring = Ring::new(memory.clone(), abi, 0, start, start);
        let journal = Journal::begin(kept.clone(), SLOTS, start);
        let (at_work, unshown) = (Vec::new(), Vec::new());
        Self { abi, memory, kept, ring, journal, request: Request::default(), at_work, unshown, is_scribbled: false }
    }

    /// False when the ring is of no use any more.
    fn step(&mut self, script: &mut Script<'_>) -> bool {
        match script.u8() % 9 {
            0 | 1 => self.offer(script),
            2 => self.scribble(script),
            3 => {
                let ahead = script.u8();
                let claimed = if ahead < 200 { u32::from(ahead % 40) } else { script.u32() };
                self.claim(self.ring.req_cons().wrapping_add(claimed));
            }
            4 | 5 => return self.take(script),
            6 => self.answer(script),
            7 => self.publish(),
            _ => return self.die(script.u8()),
        }
        true
    }

    fn claim(&self, to: u32) {
        self.memory.store_u32(index::REQ_PROD, to, Ordering::Relaxed);
    }

    /// The next slot, with any bytes, and mostly the index one further.
    fn offer(&self, script: &mut Script<'_>) {
        let next = self.memory.load_u32(index::REQ_PROD, Ordering::Relaxed);
        let at = 64 + (next % SLOTS) as usize * self.abi.slot_bytes();
        let len = usize::from(script.u8()) % (self.abi.slot_bytes() + 1);
        self.memory.copy_from_slice(at, script.take(len));
        self.claim(next.wrapping_add(1));
    }

    fn scribble(&mut self, script: &mut Script<'_>) {
        let (at, len) = (script.u32() as usize % 4064, usize::from(script.u8() % 32));
        let before = shared_rsp_prod(&self.memory);
        self.memory.copy_from_slice(at, script.take(len));
        self.is_scribbled |= before != shared_rsp_prod(&self.memory);
    }

    fn take(&mut self, script: &mut Script<'_>) -> bool {
        self.publish();
        let mut slot = [0; SLOT_BYTES];
        loop {
            let next = self.ring.req_cons();
            match self.ring.pop(&mut slot) {
                Ok(true) => {}
                Ok(false) => {
                    assert_eq!(self.ring.req_cons(), next);
                    self.ring.arm();
                    return true;
                }
                // Nothing is taken of what makes no sense.
                Err(_) => return self.ring.req_cons() != next,
            }
            let entry = self.journal.take(next, &slot);
            assert!(self.at_work.iter().all(|(other, ..)| *other != entry), "an entry has two requests");
            self.at_work.push((entry, next, slot));
            assert!(self.at_work.len() <= SLOTS as usize);
            self.request.decode(self.abi, &slot, &LIMITS);
            check(&mut self.request, script);
        }
    }

    fn answer(&mut self, script: &mut Script<'_>) {
        if self.at_work.is_empty() {
            return;
        }
        let taken = self.at_work.swap_remove(usize::from(script.u8()) % self.at_work.len());
        self.journal.answer(taken.0, self.ring.rsp_prod());
        self.ring.put(&Response { id: 1, op: 0, status: status::OKAY });
        self.unshown.push(taken);
    }

    fn publish(&mut self) {
        let (before, next) = (self.ring.published(), self.ring.rsp_prod());
        if before != next {
            self.journal.will_show(next);
            self.show(next);
            self.ring.wants_notice(before);
        }
    }

    fn show(&mut self, next: u32) {
        self.ring.publish();
        self.journal.has_shown(next);
        self.unshown.clear();
        self.is_scribbled = false;
    }

    /// The back end is killed somewhere in a publication, and another goes on. With an index that the guest has written
    /// over, it may find out or not, but not fall.
    fn die(&mut self, at: u8) -> bool {
        let next = self.ring.rsp_prod();
        if !at.is_multiple_of(3) {
            self.journal.will_show(next);
        }
        if at % 3 > 1 {
            self.ring.publish();
            self.unshown.clear();
            self.is_scribbled = false;
        }
        let found = Journal::resume(self.kept.clone(), SLOTS, shared_rsp_prod(&self.memory));
        let Ok((journal, left)) = found else {
            assert!(self.is_scribbled, "a journal that is sound is refused");
            return false;
        };
        let mut lost: Vec<Taken> = self.at_work.drain(..).chain(self.unshown.drain(..)).collect();
        lost.sort_by_key(|(_, index, _)| left.req_cons.wrapping_sub(*index));
        lost.reverse();
        if !self.is_scribbled {
            assert!(left.again.iter().map(|(_, slot)| slot).eq(lost.iter().map(|(.., slot)| slot)));
            assert_eq!(left.req_cons, self.ring.req_cons());
        }
        let count = left.again.len() as u32;
        assert_eq!(left.req_cons.wrapping_sub(left.rsp_prod), count);
        let first = left.req_cons.wrapping_sub(count);
        let numbered = left.again.into_iter().zip(0..);
        // Their indices are known only when the guest was honest; what follows does not need them.
        self.at_work = numbered
            .map(|((entry, slot), number)| (entry, lost.get(number).map_or(first, |(_, index, _)| *index), slot))
            .collect();
        self.ring = Ring::new(self.memory.clone(), self.abi, 0, left.req_cons, left.rsp_prod);
        self.journal = journal;
        !self.is_scribbled
    }
}

/// What was accepted makes sense.
fn check(request: &mut Request, script: &mut Script<'_>) {
    let wanted: usize = request.indirect_pages().map(|(_, len)| usize::from(len)).sum();
    if wanted > 0 {
        let mut bytes = vec![0; wanted];
        let given = script.take(wanted);
        bytes[..given.len()].copy_from_slice(given);
        request.take_indirect(&bytes);
        assert!(request.refusal.is_some() || request.segments.len() == wanted / 8);
    }
    if request.refusal.is_some() {
        return;
    }
    let lens = request.segments.iter().map(|segment| {
        let (from, len) = range(segment);
        assert!(len > 0 && from + len <= 4096, "{segment:?} is not in its page");
        len as u64
    });
    let len: u64 = lens.sum();
    assert!(len == u64::from(request.len_bytes) && len <= MAX_REQUEST_BYTES);
    if let Ok(extent) = request.extent(DISK_BYTES) {
        assert!(extent.start().checked_add(extent.len_bytes).is_some_and(|end| end <= DISK_BYTES));
    }
    request.clear();
}

/// A journal of any bytes is refused, or serves.
fn damaged_journal(script: &mut Script<'_>) {
    let kept = Segment::zeroed(journal_bytes(SLOTS));
    drop(Journal::begin(kept.clone(), SLOTS, script.u32()));
    for _ in 0..script.u8() % 16 {
        let (at, value) = (script.u32() as usize % (kept.len() / 4) * 4, script.u32());
        // Mostly small numbers, which are states and indices.
        kept.store_u32(at, if value & 1 == 0 { value >> 1 & 63 } else { value }, Ordering::Relaxed);
    }
    let shown = kept.load_u32(12, Ordering::Relaxed);
    let Ok((journal, left)) = Journal::resume(kept, SLOTS, shown) else { return };
    assert!(left.again.len() <= SLOTS as usize);
    for number in 0..SLOTS - left.again.len() as u32 {
        journal.take(left.req_cons.wrapping_add(number), &[0; SLOT_BYTES]);
    }
}
