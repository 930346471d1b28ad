//! A ring at work, and its event channel.

use spile_xen::blkif::{Request, op, status};

use crate::front::Front;

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
