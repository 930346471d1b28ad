//! Keys in xenstore, and states.

use spile_lab::xen::{UnboundPort, state};
use spile_xen::blkif::{Request, op, status};

use crate::front::{BACK_END, Front};

/// Cases 32 and 33: channels that are none, are closed, or another's; keys that are missing or no numbers.
pub fn keys(front: &mut Front) {
    for port in ["0", "1", "4095", "4294967295", "-1", "x", ""] {
        front.assert_refused(&[("event-channel", Some(port))]);
    }
    for gref in ["", "-1", "0x10", "4294967296"] {
        front.assert_refused(&[("ring-ref", Some(gref))]);
    }
    let queue = front.queue();
    let closed = UnboundPort::new(BACK_END).expect("an event channel").port().0.to_string();
    front.assert_refuses(&queue, &[("event-channel", Some(&closed))]);
    front.assert_refused(&[("event-channel", None)]);
    front.assert_refused(&[("ring-ref", None)]);
    for order in ["1", "5", "4294967296", "x"] {
        front.assert_refused(&[("ring-page-order", Some(order))]);
    }
    for queues in ["0", "2", "65537"] {
        front.assert_refused(&[("multi-queue-num-queues", Some(queues))]);
    }
    front.assert_refused(&[("protocol", Some("x86_128-abi"))]);
}

/// Case 35: the states of one connection after the other, as fast as they can be written, with requests in the ring.
pub fn states(front: &mut Front) {
    let mut queue = front.connect();
    let storm = [3, 6, 3, 1, 3, 4, 6, 1, 3, 5, 6, 3, 1];
    for round in 0..8u64 {
        if queue.ring.free() >= 4 {
            let write = |place| Request::Plain(queue.plain(op::WRITE, 11, 88 * (4 * round + place)));
            let writes: Vec<_> = (0..4).map(write).collect();
            queue.push(&writes);
        }
        storm.iter().for_each(|state| front.set_state(*state));
        queue.channel.notify();
        // Its end may have come between any two.
        while queue.ring.has_response() && matches!(queue.ring.pop(), Ok(Some(_))) {}
    }
    // A state of before may still be on its way.
    front.settle();
    front.set_state(state::CLOSED);
    front.settle();
}

/// Case 40: an earlier driver used a larger ring, and has left its keys.
pub fn stale(front: &mut Front) {
    let left: Vec<_> = (0..4).map(|page| format!("ring-ref{page}")).collect();
    let left: Vec<_> = left.iter().map(|key| (key.as_str(), Some("31000"))).collect();
    for more in [("queue-0/ring-ref", Some("31000")), ("num-ring-pages", None)] {
        let mut queue = front.queue();
        let changed: Vec<_> = left.iter().copied().chain(more.1.map(|_| more)).collect();
        front.tell(&queue, &changed);
        front.finish();
        assert_eq!(queue.ask(queue.plain(op::READ, 1, 0)), status::OKAY);
        front.end();
    }
}
