//! Requests that cannot be done, alone and in one batch with sound ones: unknown operations, counts of segments, segments
//! that are not in their page, sectors that are not in the disk, and indirect requests of what cannot be one.

use spile_xen::blkif::{Discard, PlainRequest, Request, op, status};

use crate::front::Front;
use crate::queue::Queue;

const OKAY: i16 = status::OKAY;
const ERROR: i16 = status::ERROR;
const UNSUPPORTED: i16 = status::EOPNOTSUPP;

/// A request, and how it is answered.
type Sent = (Request, i16);

fn refused(request: PlainRequest) -> Sent {
    (Request::Plain(request), ERROR)
}

fn bad_counts(queue: &Queue) -> Vec<Sent> {
    let counted = |kind, count| refused(PlainRequest { nr_segments: count, ..queue.plain(kind, 1, 0) });
    let mut all: Vec<_> =
        [op::READ, op::WRITE].into_iter().flat_map(|kind| [0, 12, 255].map(|n| counted(kind, n))).collect();
    all.extend([op::WRITE_BARRIER, op::FLUSH_DISKCACHE].map(|kind| counted(kind, 12)));
    all
}

fn bad_edges(queue: &Queue) -> Vec<Sent> {
    let mut all = Vec::new();
    for (kind, place) in [(op::READ, 0), (op::READ, 10), (op::WRITE, 0), (op::WRITE, 10)] {
        for (first_sect, last_sect) in [(0, 8), (0, 255), (8, 8), (255, 255), (5, 4)] {
            let mut request = queue.plain(kind, 11, 0);
            let segment = &mut request.segments[place];
            (segment.first_sect, segment.last_sect) = (first_sect, last_sect);
            all.push(refused(request));
        }
    }
    all
}

fn bad_places(queue: &Queue, sectors: u64) -> Vec<Sent> {
    let outside = [sectors - 7, sectors, u64::MAX, u64::MAX - 7, 1 << 55, 1 << 63];
    let mut all: Vec<_> = outside.map(|sector| refused(queue.plain(op::READ, 1, sector))).into();
    all.extend(outside.map(|sector| refused(queue.plain(op::WRITE, 1, sector))));
    let discard = |sector, nr_sectors, flag| Request::Discard(Discard { flag, handle: 0, id: 0, sector, nr_sectors });
    all.extend([(0, 0), (0, u64::MAX), (sectors, 1), (u64::MAX, 1)].map(|(at, len)| (discard(at, len, 0), ERROR)));
    all.push((discard(0, 8, 1), UNSUPPORTED));
    all
}

fn unknown(queue: &Queue) -> Vec<Sent> {
    [4, 7, 128, 255].map(|kind| (Request::Plain(queue.plain(kind, 1, 0)), UNSUPPORTED)).into()
}

/// Cases 13 to 18 and 29.
pub fn alone_and_together(front: &mut Front) {
    let mut queue = front.connect();
    let sectors = front.sectors();
    queue.fill(1);
    let good = Request::Plain(queue.plain(op::READ, 11, 0));
    assert_eq!(queue.ask(queue.plain(op::WRITE, 11, 0)), OKAY);
    let written = queue.bytes(11);
    let all = [bad_counts(&queue), bad_edges(&queue), bad_places(&queue, sectors), unknown(&queue)].concat();
    for (request, wanted) in &all {
        assert_eq!(queue.ask(*request), *wanted, "{request:?}");
    }
    for chunk in all.chunks(15) {
        queue.data.bytes.fill(0);
        let batch: Vec<_> = chunk.iter().flat_map(|(request, _)| [good, *request]).chain([good]).collect();
        let wanted: Vec<_> = chunk.iter().flat_map(|(_, wanted)| [OKAY, *wanted]).chain([OKAY]).collect();
        assert_eq!(queue.ask_all(&batch), wanted, "{chunk:?}");
        assert!(queue.bytes(11) == written, "a sound read beside {chunk:?}");
    }
    front.end();
}

/// Cases 19 and 20, and segments that are not in their page among those of a page.
pub fn indirect(front: &mut Front) {
    let mut queue = front.connect();
    let most = front.max_indirect();
    let sound: Vec<_> = (0..32).map(|page| queue.segment(page)).collect();
    queue.put_segments(&sound);
    queue.fill(2);
    assert_eq!(queue.ask(queue.indirect(op::WRITE, 32, 0)), OKAY);
    let written = queue.bytes(32);
    for kind in [op::WRITE_BARRIER, op::FLUSH_DISKCACHE, op::DISCARD, op::INDIRECT, 4, 255] {
        assert_eq!(queue.ask(queue.indirect(kind, 2, 0)), ERROR, "indirect {kind}");
    }
    for (kind, count) in [0, most + 1, 512, 4096, 65535].iter().flat_map(|n| [(op::READ, *n), (op::WRITE, *n)]) {
        assert_eq!(queue.ask(queue.indirect(kind, count, 0)), ERROR, "{count} segments");
    }
    for (place, last_sect) in [(0, 8), (17, 255), (31, 8)] {
        let mut segments = sound.clone();
        segments[place].last_sect = last_sect;
        queue.put_segments(&segments);
        assert_eq!(queue.ask(queue.indirect(op::READ, 32, 0)), ERROR, "{place} ends at {last_sect}");
        assert_eq!(queue.ask(queue.indirect(op::WRITE, 32, 0)), ERROR, "{place} ends at {last_sect}");
    }
    queue.put_segments(&sound);
    queue.data.bytes.fill(0);
    assert_eq!(queue.ask(queue.indirect(op::READ, 32, 0)), OKAY);
    assert!(queue.bytes(32) == written, "other data are read than were written");
    front.end();
}
