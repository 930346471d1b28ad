//! States in xenstore.

use spile_lab::xen::state;
use spile_xen::blkif::{Request, op};

use crate::front::Front;

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
