//! Grants that are none, not the back end's, for reading only, or gone.

use spile_xen::blkif::{PlainRequest, Request, op, status};
use spile_xen::{DomId, GrantRef};

use crate::front::{BACK_END, Front};
use crate::queue::Queue;

const OKAY: i16 = status::OKAY;
const ERROR: i16 = status::ERROR;
/// A domain that there is not.
const NOBODY: DomId = DomId(77);
/// Enough pages that what is freed first is used again last, for the kernel takes first what was freed last.
const BURIED_UNDER: u32 = 600;

/// A read, write and barrier in which one grant is bad, each among 31 sound ones; and indirect requests.
fn assert_refused(queue: &mut Queue, what: &str, gref: GrantRef) {
    let good = Request::Plain(queue.plain(op::READ, 11, 0));
    for (kind, place) in [(op::READ, 10), (op::WRITE, 0), (op::WRITE_BARRIER, 5)] {
        let mut bad = queue.plain(kind, 11, 0);
        bad.segments[place].gref = gref;
        let mut batch = [good; 32];
        batch[17] = Request::Plain(bad);
        let mut wanted = [OKAY; 32];
        wanted[17] = ERROR;
        queue.data.bytes.fill(0);
        assert_eq!(queue.ask_all(&batch), wanted, "{what}, {kind}");
        assert_sound(queue, what);
    }
    // From the same sector on, for a read that is refused may have been brought in part.
    let sound: Vec<_> = (0..32).map(|page| queue.segment(page)).collect();
    for (kind, place) in [(op::READ, 0), (op::READ, 31), (op::WRITE, 17)] {
        let mut segments = sound.clone();
        segments[place].gref = gref;
        queue.put_segments(&segments);
        let batch = [good, Request::Indirect(queue.indirect(kind, 32, 0)), good];
        assert_eq!(queue.ask_all(&batch), [OKAY, ERROR, OKAY], "{what}, indirect {kind}");
        assert_sound(queue, what);
    }
    let mut request = queue.indirect(op::READ, 32, 0);
    request.pages[0] = gref;
    assert_eq!(queue.ask(request), ERROR, "{what}: the page of segments");
}

/// The sound reads have brought what [`begin`] has written.
fn assert_sound(queue: &Queue, what: &str) {
    let read = queue.bytes(11);
    assert!(read.iter().step_by(64).all(|byte| *byte == 3), "{what}: a sound read beside it");
}

/// A connection, and data at the disk's start.
fn begin(front: &mut Front) -> Queue {
    let mut queue = front.connect();
    queue.fill(3);
    assert_eq!(queue.ask(queue.plain(op::WRITE, 11, 0)), OKAY);
    queue
}

/// Case 27, but for grants that are gone.
pub fn bad(front: &mut Front) {
    let mut queue = begin(front);
    let foreign = front.gntalloc.grant(NOBODY, 1, true).expect("a page");
    let all = [
        ("never granted", GrantRef(0)),
        ("behind the table", GrantRef(64 * 512)),
        ("far behind it", GrantRef(u32::MAX)),
        ("foreign", foreign.refs[0]),
    ];
    for (what, gref) in all {
        assert_refused(&mut queue, what, gref);
    }
    assert!(foreign.bytes.is_zero(), "a page that is granted to another was written");
    front.end();
}

/// Case 27: a grant that is gone.
pub fn freed(front: &mut Front) {
    let mut queue = begin(front);
    let pages = front.gntalloc.grant(BACK_END, BURIED_UNDER, true).expect("pages");
    let gref = pages.refs[0];
    drop(pages);
    assert_refused(&mut queue, "freed", gref);
    front.end();
}

/// Case 28, first half: a page that may only be read is not written.
pub fn readonly(front: &mut Front) {
    let mut queue = begin(front);
    let page = front.gntalloc.grant(BACK_END, 1, false).expect("a page");
    page.bytes.fill(0x11);
    let mut request = queue.plain(op::READ, 1, 0);
    request.segments[0].gref = page.refs[0];
    assert_eq!(queue.ask(request), ERROR);
    let mut middle = queue.plain(op::READ, 11, 0);
    middle.segments[5].gref = page.refs[0];
    assert_eq!(queue.ask(middle), ERROR);
    assert_eq!(page.bytes.to_vec(), [0x11; 4096], "a page that may only be read was written");
    // Pages that stay mapped have to be good for both.
    let wanted = if front.is_persistent { ERROR } else { OKAY };
    assert_eq!(queue.ask(PlainRequest { op: op::WRITE, sector: 800, ..request }), wanted);
    assert_eq!(queue.ask(queue.plain(op::READ, 1, 0)), OKAY);
    front.end();
}

/// Case 28, second half: all pages are revoked, and gone, while the ring is full of requests for them.
pub fn revoked(front: &mut Front) {
    let mut queue = begin(front);
    for _ in 0..8 {
        let sound: Vec<_> = (0..32).map(|page| queue.segment(page)).collect();
        queue.put_segments(&sound);
        let requests: Vec<_> = (0..32)
            .map(|place| Request::Indirect(queue.indirect(if place % 2 == 0 { op::WRITE } else { op::READ }, 32, 0)))
            .collect();
        queue.push(&requests);
        let others = front.gntalloc.grant(BACK_END, 32, true).expect("pages");
        drop(std::mem::replace(&mut queue.data, others));
        let statuses = queue.answers(&requests);
        assert!(statuses.iter().all(|status| [OKAY, ERROR].contains(status)), "{statuses:?}");
        assert_eq!(queue.ask(queue.plain(op::READ, 11, 0)), OKAY, "pages that are there");
    }
    front.end();
}

/// Case 30: a ring of a page that is not granted, not to the back end, or for reading only.
pub fn of_rings(front: &mut Front) {
    let foreign = front.gntalloc.grant(NOBODY, 1, true).expect("a page");
    let readonly = front.gntalloc.grant(BACK_END, 1, false).expect("a page");
    for gref in [GrantRef(0), GrantRef(64 * 512), GrantRef(u32::MAX), foreign.refs[0], readonly.refs[0]] {
        front.assert_refused(&[("ring-ref", Some(&gref.0.to_string()))]);
    }
}

/// Case 30: the ring's page is given back while the back end serves it. Nobody can be told of that.
pub fn ring_freed(front: &mut Front) {
    let queue = begin(front);
    let channel = queue.forget_all();
    (0..100).for_each(|_| channel.notify());
    front.end();
    // The same, and the front end does not even say that it has ended.
    let queue = begin(front);
    queue.forget_all().notify();
}
