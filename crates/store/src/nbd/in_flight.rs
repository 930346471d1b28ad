//! [`InFlight`]: what was sent and not answered, by the cookies of the wire.
//!
//! A cookie is a slot's number and, above it, the low bits of a sequence number. A server that answers a cookie of an earlier request
//! finds nothing, even when another request is in the slot.

use std::sync::Arc;

use super::call::Call;

/// A request that was sent and not answered.
pub(super) struct Sent {
    pub(super) call: Arc<Call>,
    /// A flush: how many writes of this link had been answered when it was sent.
    pub(super) covers: u64,
    /// Requests are sent in this order.
    sequence: u64,
}

/// The requests in flight on a connection. As many slots as were ever in use at a time.
#[derive(Default)]
pub(super) struct InFlight {
    slots: Vec<Option<Sent>>,
    free: Vec<u32>,
    next_sequence: u64,
}

impl InFlight {
    /// Notes a request, and returns the cookie to send it with.
    pub(super) fn insert(&mut self, call: Arc<Call>, covers: u64) -> u64 {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let sent = Some(Sent { call, covers, sequence });
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = sent;
                slot
            }
            None => {
                self.slots.push(sent);
                (self.slots.len() - 1) as u32
            }
        };
        cookie(slot, sequence)
    }

    fn slot(&self, wanted: u64) -> Option<u32> {
        let slot = wanted as u32;
        let sent = self.slots.get(slot as usize)?.as_ref()?;
        (cookie(slot, sent.sequence) == wanted).then_some(slot)
    }

    /// The request of this cookie.
    pub(super) fn get(&self, cookie: u64) -> Option<&Arc<Call>> {
        self.slots[self.slot(cookie)? as usize].as_ref().map(|sent| &sent.call)
    }

    /// Takes the request of this cookie out.
    pub(super) fn remove(&mut self, cookie: u64) -> Option<Sent> {
        let slot = self.slot(cookie)?;
        self.free.push(slot);
        self.slots[slot as usize].take()
    }

    /// Takes all out, in the order in which they were sent.
    pub(super) fn take_all(&mut self) -> Vec<Sent> {
        self.free.clear();
        let mut all: Vec<Sent> = self.slots.drain(..).flatten().collect();
        all.sort_by_key(|sent| sent.sequence);
        all
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }
}

fn cookie(slot: u32, sequence: u64) -> u64 {
    sequence << 32 | u64::from(slot)
}

#[cfg(test)]
mod tests {
    use super::super::call::Ask;
    use super::*;

    fn call(offset: u64) -> Arc<Call> {
        Arc::new(Call::new(Ask::Flush, offset, 0))
    }

    #[test]
    fn a_cookie_is_good_once() {
        let mut in_flight = InFlight::default();
        let first = in_flight.insert(call(1), 0);
        assert_eq!(in_flight.get(first).unwrap().offset, 1);
        assert!(in_flight.remove(first).is_some() && in_flight.is_empty());
        let second = in_flight.insert(call(2), 0);
        assert!(in_flight.get(first).is_none() && in_flight.remove(first).is_none(), "the slot has another request");
        assert_eq!(in_flight.get(second).unwrap().offset, 2);
        assert!(in_flight.get(second + 1).is_none() && in_flight.get(u64::MAX).is_none());
    }

    #[test]
    fn all_come_back_in_the_order_of_sending() {
        let mut in_flight = InFlight::default();
        let cookies: Vec<u64> = (0..4).map(|offset| in_flight.insert(call(offset), 0)).collect();
        in_flight.remove(cookies[1]).unwrap();
        in_flight.remove(cookies[0]).unwrap();
        in_flight.insert(call(4), 0);
        let offsets: Vec<u64> = in_flight.take_all().iter().map(|sent| sent.call.offset).collect();
        assert_eq!(offsets, [2, 3, 4]);
        assert!(in_flight.is_empty());
        // What was sent before is not known any more, on the next connection either.
        assert!(in_flight.get(cookies[2]).is_none());
        let next = in_flight.insert(call(5), 0);
        assert!(!cookies.contains(&next));
    }
}
