//! The journal of a ring: what the next back end needs when this one is killed at any instruction.
//!
//! A response is written over the slot of a request, perhaps of one that is still at work. So the ring alone does not
//! tell which requests were taken and not answered. The journal keeps a copy of each such request in memory that
//! outlives the process.
//!
//! The journal rests on the order of writes, because a killed process leaves its writes in program order:
//!
//! 1. Take: write the copy of the slot and its index; *then* mark the entry as taken; then count the request as taken.
//! 2. Answer: note the index of the response in the entry; then write the response to the ring.
//! 3. Publish: note the index that will be shown (`next`); then show it to the guest; then note that it is shown; then
//!    free the entries that were answered.
//!
//! The next back end finds one of two indices in the ring. If it is `next`, the guest has been shown all answers. If it
//! is the index that was shown before, the later answers are void, and their requests are done again. That is safe:
//! those requests were not acknowledged, their pages are still granted, and doing them twice has the same result as
//! doing them once. Each request is answered once.
//!
//! The guest cannot reach the journal, but it can write over the ring's index of responses. When the next back end
//! finds neither of the two indices there, nobody can say what the guest has seen, and the ring is given up.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::sync::atomic::Ordering;

use spile_core::Segment;

use crate::ring::{Broken, SLOT_BYTES, Slot};

const MAGIC: u32 = 0x5370_4a31;

const HEADER_BYTES: usize = 64;
const MAGIC_AT: usize = 0;
const SLOTS_AT: usize = 4;
const REQ_CONS_AT: usize = 8;
const SHOWN_AT: usize = 12;
const NEXT_AT: usize = 16;
pub(crate) const FAILED_AT: usize = 20;

const ENTRY_BYTES: usize = 128;
const STATE: usize = 0;
const INDEX: usize = 4;
const ANSWER: usize = 8;
const SLOT: usize = 16;

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const ANSWERED: u32 = 2;

/// The bytes that the journal of a ring of `slots` slots takes.
pub fn journal_bytes(slots: u32) -> usize {
    HEADER_BYTES + slots as usize * ENTRY_BYTES
}

/// The number of slots of the journal that `read` reads: `read` fills its second argument with the bytes at the offset
/// in its first. `None` when there is no journal.
///
/// # Errors
/// The errors of `read`, except the end of the file.
pub(crate) fn slots_of(read: impl Fn(u64, &mut [u8]) -> std::io::Result<()>) -> std::io::Result<Option<u32>> {
    let mut head = [0; SLOTS_AT + 4];
    match read(0, &mut head) {
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        result => result?,
    }
    let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
    Ok((word(MAGIC_AT) == MAGIC).then(|| word(SLOTS_AT)))
}

/// The journal of one ring.
pub struct Journal {
    memory: Segment,
    slots: u32,
    own: RefCell<Own>,
}

struct Own {
    free: Vec<u16>,
    /// Entries whose responses are written but not shown to the guest.
    answered: Vec<u16>,
}

/// Where the last back end has ended, and what it has left undone.
#[derive(Debug, PartialEq, Eq)]
pub struct Left {
    /// The index of the next request to take.
    pub req_cons: u32,
    /// The index of the next response to show.
    pub rsp_prod: u32,
    /// True when a flush has failed: data that the guest believes to become durable may be lost.
    pub has_failed_flush: bool,
    /// Requests that were taken and not answered, oldest first: each with its entry and the copy of its slot.
    pub again: Vec<(u16, Slot)>,
}

impl Journal {
    /// A journal for a new ring. Its index of requests and its index of responses are both `start`.
    ///
    /// # Panics
    /// When `memory` is shorter than [`journal_bytes`].
    pub fn begin(memory: Segment, slots: u32, start: u32) -> Self {
        // A journal that is half written must not look like a whole one.
        memory.store_u32(MAGIC_AT, 0, Ordering::Release);
        let journal = Self::over(memory, slots);
        (0..slots as u16).for_each(|entry| journal.set(entry, STATE, FREE));
        for (at, value) in
            [(SLOTS_AT, slots), (REQ_CONS_AT, start), (SHOWN_AT, start), (NEXT_AT, start), (FAILED_AT, 0)]
        {
            journal.memory.store_u32(at, value, Ordering::Relaxed);
        }
        journal.memory.store_u32(MAGIC_AT, MAGIC, Ordering::Release);
        journal.own.borrow_mut().free.extend((0..slots as u16).rev());
        journal
    }

    /// The journal that another back end has left. The ring now shows the index of responses `shared_rsp_prod`.
    ///
    /// # Errors
    /// When there is no journal of a ring of that size, or it contradicts the ring.
    pub fn resume(memory: Segment, slots: u32, shared_rsp_prod: u32) -> Result<(Self, Left), Broken> {
        let is_ours = memory.len() >= journal_bytes(slots)
            && memory.load_u32(MAGIC_AT, Ordering::Acquire) == MAGIC
            && memory.load_u32(SLOTS_AT, Ordering::Relaxed) == slots;
        if !is_ours {
            return Err(Broken("there is no journal of this ring"));
        }
        let journal = Self::over(memory, slots);
        let [req_cons, shown, next] = [REQ_CONS_AT, SHOWN_AT, NEXT_AT].map(|at| journal.header(at));
        if shared_rsp_prod != shown && shared_rsp_prod != next {
            return Err(Broken("the ring's index of responses is none that the journal has noted"));
        }
        let left = journal.read(req_cons, shared_rsp_prod)?;
        for (at, value) in [(SHOWN_AT, left.rsp_prod), (NEXT_AT, left.rsp_prod), (REQ_CONS_AT, left.req_cons)] {
            journal.memory.store_u32(at, value, Ordering::Release);
        }
        Ok((journal, left))
    }

    fn over(memory: Segment, slots: u32) -> Self {
        assert!(memory.len() >= journal_bytes(slots), "the journal's memory is too short");
        let room = slots as usize;
        let own = RefCell::new(Own { free: Vec::with_capacity(room), answered: Vec::with_capacity(room) });
        Self { memory, slots, own }
    }

    /// Sorts the entries into those whose requests are to be done again and those that are free.
    fn read(&self, req_cons: u32, rsp_prod: u32) -> Result<Left, Broken> {
        let mut again = Vec::new();
        for entry in 0..self.slots as u16 {
            let is_shown = self.get(entry, ANSWER).wrapping_sub(rsp_prod) > u32::MAX / 2;
            let state = self.get(entry, STATE);
            if state == FREE || (state == ANSWERED && is_shown) {
                self.set(entry, STATE, FREE);
                self.own.borrow_mut().free.push(entry);
                continue;
            }
            self.set(entry, STATE, TAKEN);
            let mut slot = [0; SLOT_BYTES];
            self.memory.copy_to_slice(at(entry, SLOT), &mut slot);
            again.push((self.get(entry, INDEX), entry, slot));
        }
        // The last request may have been taken but not yet counted.
        let counted = req_cons.wrapping_sub(rsp_prod) as usize;
        let has_one_more = again.len() == counted + 1 && again.iter().any(|(index, ..)| *index == req_cons);
        if again.len() != counted && !has_one_more {
            return Err(Broken("the journal's count of requests contradicts its entries"));
        }
        let req_cons = req_cons.wrapping_add(u32::from(has_one_more));
        again.sort_by_key(|(index, ..)| Reverse(req_cons.wrapping_sub(*index)));
        let has_failed_flush = self.header(FAILED_AT) != 0;
        Ok(Left {
            req_cons,
            rsp_prod,
            has_failed_flush,
            again: again.into_iter().map(|(_, entry, slot)| (entry, slot)).collect(),
        })
    }

    /// Notes that the request with that index was taken; `slot` is its copy. Returns its entry.
    ///
    /// # Panics
    /// When more requests are in flight than the ring has slots.
    pub fn take(&self, index: u32, slot: &Slot) -> u16 {
        let entry = self.own.borrow_mut().free.pop().expect("no more are in flight than a ring has slots");
        self.memory.copy_from_slice(at(entry, SLOT), slot);
        self.set(entry, INDEX, index);
        self.memory.store_u32(at(entry, STATE), TAKEN, Ordering::Release);
        self.memory.store_u32(REQ_CONS_AT, index.wrapping_add(1), Ordering::Release);
        entry
    }

    /// Notes that the response with the index `rsp_index` answers the entry. Call it before the response is written.
    pub fn answer(&self, entry: u16, rsp_index: u32) {
        self.set(entry, ANSWER, rsp_index);
        self.memory.store_u32(at(entry, STATE), ANSWERED, Ordering::Release);
        self.own.borrow_mut().answered.push(entry);
    }

    /// Notes that a flush has failed. The kernel reports a failed sync once only: the next process would see success.
    pub fn flush_failed(&self) {
        self.memory.store_u32(FAILED_AT, 1, Ordering::Release);
    }

    /// Notes that the responses before the index `next` are going to be shown.
    pub fn will_show(&self, next: u32) {
        self.memory.store_u32(NEXT_AT, next, Ordering::Release);
    }

    /// Notes that the responses before the index `next` have been shown, and frees their entries.
    pub fn has_shown(&self, next: u32) {
        self.memory.store_u32(SHOWN_AT, next, Ordering::Release);
        let mut own = self.own.borrow_mut();
        let Own { free, answered } = &mut *own;
        for entry in answered.drain(..) {
            self.memory.store_u32(at(entry, STATE), FREE, Ordering::Release);
            free.push(entry);
        }
    }

    fn header(&self, at: usize) -> u32 {
        self.memory.load_u32(at, Ordering::Acquire)
    }

    fn get(&self, entry: u16, field: usize) -> u32 {
        self.memory.load_u32(at(entry, field), Ordering::Acquire)
    }

    fn set(&self, entry: u16, field: usize, value: u32) {
        self.memory.store_u32(at(entry, field), value, Ordering::Relaxed);
    }
}

fn at(entry: u16, field: usize) -> usize {
    HEADER_BYTES + usize::from(entry) * ENTRY_BYTES + field
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::{Ring, shared_rsp_prod};
    use spile_xen::blkif::{Abi, PlainRequest, Request, Response, index, op, status};

    const SLOTS: u32 = 32;

    /// A back end over memory that can be copied at any write, as if the process had been killed there.
    struct Bench {
        ring_memory: Segment,
        journal_memory: Segment,
        offered: u32,
    }

    impl Bench {
        fn new(start: u32) -> Self {
            let bench = Self {
                ring_memory: Segment::zeroed(4096),
                journal_memory: Segment::zeroed(journal_bytes(SLOTS)),
                offered: start,
            };
            for at in [index::REQ_PROD, index::RSP_PROD] {
                bench.ring_memory.store_u32(at, start, Ordering::Relaxed);
            }
            bench
        }

        fn offer(&mut self, id: u64) {
            let mut slot = [0; SLOT_BYTES];
            Request::Plain(PlainRequest { id, op: op::WRITE, ..PlainRequest::default() })
                .encode(Abi::X86_64, &mut slot);
            self.ring_memory.copy_from_slice(64 + (self.offered % SLOTS) as usize * SLOT_BYTES, &slot);
            self.offered = self.offered.wrapping_add(1);
            self.ring_memory.store_u32(index::REQ_PROD, self.offered, Ordering::Release);
        }

        fn ring(&self, req_cons: u32, rsp_prod: u32) -> Ring {
            Ring::new(self.ring_memory.clone(), Abi::X86_64, 0, req_cons, rsp_prod)
        }

        fn resume(&self) -> Result<Left, Broken> {
            let (_, left) = Journal::resume(self.journal_memory.clone(), SLOTS, shared_rsp_prod(&self.ring_memory))?;
            Ok(left)
        }
    }

    fn take(ring: &Ring, journal: &Journal) -> u16 {
        let mut slot = [0; SLOT_BYTES];
        let index = ring.req_cons();
        assert!(ring.pop(&mut slot).unwrap());
        journal.take(index, &slot)
    }

    fn answer(ring: &Ring, journal: &Journal, entry: u16, id: u64) {
        journal.answer(entry, ring.rsp_prod());
        ring.put(&Response { id, op: op::WRITE, status: status::OKAY });
    }

    fn ids(left: &Left) -> Vec<u64> {
        left.again.iter().map(|(_, slot)| Request::decode(Abi::X86_64, slot).id()).collect()
    }

    /// Requests 0 to 3 are taken, 2 and 0 answered and shown, and 3 answered; at each step, what is left.
    #[test]
    fn a_kill_between_any_two_steps_leaves_each_request_once() {
        for start in [0, u32::MAX - 2] {
            let mut bench = Bench::new(start);
            let ring = bench.ring(start, start);
            let journal = Journal::begin(bench.journal_memory.clone(), SLOTS, start);
            (0..4).for_each(|id| bench.offer(id));
            let entries: Vec<_> = (0..4).map(|_| take(&ring, &journal)).collect();
            assert_eq!(ids(&bench.resume().unwrap()), [0, 1, 2, 3]);
            answer(&ring, &journal, entries[2], 2);
            answer(&ring, &journal, entries[0], 0);
            // The responses lie over the slots of 0 and 1 now.
            let snapshot = bench.journal_memory.to_vec();
            journal.will_show(ring.rsp_prod());
            assert_eq!(ids(&bench.resume().unwrap()), [0, 1, 2, 3]);
            bench.journal_memory.copy_from_slice(0, &snapshot);
            journal.will_show(ring.rsp_prod());
            ring.publish();
            let before_noted = bench.journal_memory.to_vec();
            assert_eq!(ids(&bench.resume().unwrap()), [1, 3]);
            bench.journal_memory.copy_from_slice(0, &before_noted);
            journal.has_shown(ring.rsp_prod());
            assert_eq!(ids(&bench.resume().unwrap()), [1, 3]);
            answer(&ring, &journal, entries[3], 3);
            let left = bench.resume().unwrap();
            assert_eq!(ids(&left), [1, 3]);
            assert_eq!((left.req_cons, left.rsp_prod), (start.wrapping_add(4), start.wrapping_add(2)));
        }
    }

    #[test]
    fn a_request_that_was_taken_and_not_counted_is_there() {
        let mut bench = Bench::new(9);
        let ring = bench.ring(9, 9);
        let journal = Journal::begin(bench.journal_memory.clone(), SLOTS, 9);
        bench.offer(5);
        take(&ring, &journal);
        bench.journal_memory.store_u32(REQ_CONS_AT, 9, Ordering::Relaxed);
        let left = bench.resume().unwrap();
        assert_eq!((left.req_cons, ids(&left)), (10, vec![5]));
    }

    #[test]
    fn a_recovery_that_is_killed_is_done_again() {
        let mut bench = Bench::new(0);
        let ring = bench.ring(0, 0);
        let journal = Journal::begin(bench.journal_memory.clone(), SLOTS, 0);
        (0..3).for_each(|id| bench.offer(id));
        let entries: Vec<_> = (0..3).map(|_| take(&ring, &journal)).collect();
        answer(&ring, &journal, entries[1], 1);
        journal.will_show(1);
        ring.publish();
        let old = [REQ_CONS_AT, SHOWN_AT, NEXT_AT].map(|at| (at, bench.journal_memory.load_u32(at, Ordering::Relaxed)));
        let left = bench.resume().unwrap();
        // Killed before the header was written.
        old.iter().for_each(|(at, value)| bench.journal_memory.store_u32(*at, *value, Ordering::Relaxed));
        assert_eq!(bench.resume().unwrap(), left);
        assert_eq!(ids(&left), [0, 2]);
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let mut bench = Bench::new(0);
        assert!(bench.resume().is_err(), "no journal");
        let ring = bench.ring(0, 0);
        let journal = Journal::begin(bench.journal_memory.clone(), SLOTS, 0);
        bench.offer(0);
        take(&ring, &journal);
        bench.ring_memory.store_u32(index::RSP_PROD, 17, Ordering::Relaxed);
        assert!(bench.resume().is_err(), "the guest wrote over the index");
        bench.ring_memory.store_u32(index::RSP_PROD, 0, Ordering::Relaxed);
        assert!(bench.resume().is_ok());
        bench.journal_memory.store_u32(REQ_CONS_AT, 4, Ordering::Relaxed);
        assert!(bench.resume().is_err(), "a wrong count");
        let long = Segment::zeroed(journal_bytes(64));
        assert!(Journal::resume(long, 64, 0).is_err(), "of another ring");
    }
}
