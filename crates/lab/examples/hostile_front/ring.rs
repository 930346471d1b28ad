//! A ring's indices and its event channel.

use std::time::Duration;

use spile_xen::blkif::{Request, index, op, status};

use crate::front::{Front, QUIET};

/// Cases 1 and 2: an index of requests that jumps too far, far away, or back. The ring is served no more, also when the index
/// makes sense again.
pub fn jumps(front: &mut Front) {
    let far = 1 << 31;
    for (taken, claimed) in [(0, 33), (3, 3 + far), (3, 2), (32, 0)] {
        // A back end that looks late sees only the sound index.
        let is_given_up = (0..5).any(|tries| is_given_up(front, taken, claimed, QUIET * (1 << tries)));
        assert!(is_given_up, "{taken} → {claimed}: the ring is served");
    }
}

/// After so many requests the index jumps, and is a sound one again when the back end has had some time to look: is the
/// request not answered to which that belongs?
fn is_given_up(front: &mut Front, taken: u32, claimed: u32, time: Duration) -> bool {
    let mut queue = front.connect();
    for _ in 0..taken {
        assert_eq!(queue.ask(queue.plain(op::READ, 1, 0)), status::OKAY);
    }
    queue.ring.set_index(index::REQ_PROD, claimed);
    queue.channel.notify();
    std::thread::sleep(time);
    let read = Request::Plain(queue.plain(op::READ, 1, 0));
    queue.push(&[read]);
    queue.channel.notify();
    std::thread::sleep(time);
    let answered = queue.ring.index(index::RSP_PROD).wrapping_sub(taken);
    assert!(answered <= 1, "{taken} → {claimed}: {answered} answers to one request");
    front.end();
    answered == 0
}

/// Case 9: rings of the bell without requests, and then one.
pub fn kicks(front: &mut Front) {
    let mut queue = front.connect();
    for _ in 0..5 {
        (0..1000).for_each(|_| queue.channel.notify());
        assert_eq!(queue.ask(queue.plain(op::READ, 11, 8)), status::OKAY);
    }
    front.end();
}

/// Case 39: reads and writes without end, of all pages and with the ring full; for whoever ends this process.
pub fn work(front: &mut Front) {
    let mut queue = front.connect();
    let sound: Vec<_> = (0..32).map(|page| queue.segment(page)).collect();
    queue.put_segments(&sound);
    println!("at work");
    for round in 0..1_000_000u64 {
        let requests = [op::WRITE, op::READ].into_iter().cycle().zip(0..32);
        let requests =
            requests.map(|(kind, place)| Request::Indirect(queue.indirect(kind, 32, 256 * ((round + place) % 64))));
        let requests: Vec<_> = requests.collect();
        assert!(queue.ask_all(&requests).iter().all(|status| *status == status::OKAY));
    }
}
