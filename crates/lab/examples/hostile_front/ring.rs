//! A ring's indices and its event channel.

use spile_xen::blkif::{Request, index, op, status};

use crate::front::{Front, QUIET};

/// Cases 1 and 2: an index of requests that jumps too far, far away, or back. The ring is served no more, also when the index
/// makes sense again.
pub fn jumps(front: &mut Front) {
    let one_too_many = |taken: u32| taken + 33;
    for (taken, claimed) in
        [(0, one_too_many(0)), (5, one_too_many(5)), (0, 1 << 31), (3, 3 + (1 << 31)), (3, 2), (32, 0), (0, u32::MAX)]
    {
        let mut queue = front.connect();
        for _ in 0..taken {
            assert_eq!(queue.ask(queue.plain(op::READ, 1, 0)), status::OKAY);
        }
        queue.ring.set_index(index::REQ_PROD, claimed);
        queue.channel.notify();
        assert!(!queue.channel.wait(QUIET).expect("an event channel"), "{taken} → {claimed}: it is rung");
        let read = Request::Plain(queue.plain(op::READ, 1, 0));
        queue.push(&[read]);
        queue.channel.notify();
        queue.channel.wait(QUIET).expect("an event channel");
        assert_eq!(queue.ring.index(index::RSP_PROD), taken, "{taken} → {claimed}: it is answered");
        front.end();
    }
}

/// Case 9: rings of the bell without requests, and then one.
pub fn kicks(front: &mut Front) {
    let mut queue = front.connect();
    for _ in 0..20 {
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
        let requests = requests.map(|(kind, place)| {
            Request::Indirect(queue.indirect(kind, 32, 256 * ((round + place) % 64)))
        });
        let requests: Vec<_> = requests.collect();
        assert!(queue.ask_all(&requests).iter().all(|status| *status == status::OKAY));
    }
}
