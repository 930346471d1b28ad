use super::*;
use crate::vhost::memory::{GuestMemory, MemoryOptions};
use crate::vhost::request::{STATUS_NONE, STATUS_OK};
use spile_core::ErrorKind;

const RING: u16 = 16;
/// Header, two pieces of data, status.
const CHAIN: usize = 4;
const SHORT: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(30);

/// Four slots of two pieces of 512 bytes.
fn queue(indirect: bool) -> Queue {
    let mut memory = GuestMemory::new(&MemoryOptions::new(1 << 20)).unwrap();
    let mut take = |len| memory.take(len, 64).unwrap();
    let areas = RingParts::lengths(RING).map(&mut take);
    let meta = take(4 * META_BYTES);
    let tables = indirect.then(|| take(4 * CHAIN * super::super::ring::DESC_BYTES));
    let mut slot = || {
        let pieces = [take(512), take(512)];
        let data = pieces.iter().map(|piece| piece.bytes.clone()).collect();
        SlotMemory { pieces: pieces.map(|piece| (piece.address, 512)).into(), data }
    };
    let slots = (0..4).map(|_| slot()).collect();
    let shared = Arc::new(QueueHandles::new(areas, RING).unwrap());
    Queue::new(shared, Arc::default(), true, QueueMemory { meta, tables, chain: CHAIN, slots }).unwrap()
}

/// What a device would do with the chain at `head`: a status, and the next used element.
fn answer(queue: &Queue, head: u32, status: Option<u8>) {
    let parts = &queue.shared.parts;
    if let (Some(status), Some(slot)) = (status, queue.slot_of[head as usize]) {
        queue.meta.bytes.store_u8(usize::from(slot) * META_BYTES + STATUS_AT, status, Ordering::Relaxed);
    }
    let index = parts.used_index();
    parts.used.copy_from_slice(4 + 8 * usize::from(index % RING), &u64::from(head).to_le_bytes());
    parts.used.store_u16(2, index.wrapping_add(1).to_le(), Ordering::Release);
}

fn chain(table: &DescriptorTable, mut at: usize) -> Vec<Descriptor> {
    let mut all = Vec::new();
    loop {
        let descriptor = table.get(at);
        all.push(descriptor);
        if descriptor.flags & Descriptor::NEXT == 0 || all.len() > CHAIN {
            return all;
        }
        at = usize::from(descriptor.next);
    }
}

#[test]
fn chains_are_rewritten_when_the_request_changes_its_shape() {
    for indirect in [false, true] {
        let mut queue = queue(indirect);
        for (op, len, buffers) in [(Op::Write, 1024, 4), (Op::Flush, 0, 2), (Op::Read, 512, 3), (Op::Read, 512, 3)] {
            queue.submit(2, op, 4096, len);
            let head = queue.head(2);
            let mut table = (queue.tables.clone(), usize::from(head));
            if indirect {
                let outer = chain(&queue.shared.parts.descriptors, usize::from(head));
                assert_eq!((outer.len(), outer[0].flags), (1, Descriptor::INDIRECT));
                assert_eq!(outer[0].len_bytes as usize, buffers * 16);
                let at = (outer[0].address - queue.tables_address) as usize;
                let bytes = queue.tables.0.slice(at..at + buffers * 16);
                table = (DescriptorTable(bytes), 0);
            }
            let all = chain(&table.0, table.1);
            assert_eq!(all.len(), buffers, "{op:?}");
            assert_eq!((all[0].len_bytes, all[buffers - 1].len_bytes), (16, 1));
            assert_eq!(all[buffers - 1].flags, Descriptor::WRITE);
            let written = if op == Op::Read { Descriptor::WRITE } else { 0 };
            assert!(all[1..buffers - 1].iter().all(|d| d.flags == written | Descriptor::NEXT && d.len_bytes == 512));
            queue.publish();
            answer(&queue, u32::from(head), Some(STATUS_OK));
            assert_eq!(queue.take().unwrap().map(|done| (done.slot, done.status)), Some((2, STATUS_OK)));
        }
    }
}

#[test]
fn what_is_not_outstanding_cannot_be_answered() {
    for wrong in [0, 1, 15, 16, u32::MAX] {
        let mut queue = queue(false);
        queue.submit(1, Op::Flush, 0, 0);
        queue.submit(2, Op::Flush, 0, 0);
        queue.publish();
        answer(&queue, wrong.min(15), None);
        let at = 4;
        queue.shared.parts.used.copy_from_slice(at, &wrong.to_le_bytes());
        assert_eq!(queue.take().unwrap_err().kind(), ErrorKind::Protocol, "{wrong}");
    }
}

#[test]
fn a_second_answer_is_an_error() {
    let mut queue = queue(true);
    queue.submit(1, Op::Flush, 0, 0);
    queue.submit(3, Op::Flush, 0, 0);
    queue.publish();
    answer(&queue, 3, Some(STATUS_OK));
    answer(&queue, 3, Some(STATUS_OK));
    assert_eq!(queue.take().unwrap().unwrap().slot, 3);
    assert!(!queue.is_outstanding(3) && queue.is_outstanding(1));
    let error = queue.take().unwrap_err();
    assert!(error.to_string().contains("chain 3, which is not outstanding"), "{error}");
}

#[test]
fn a_status_that_was_not_written_is_noticed() {
    let mut queue = queue(true);
    for status in [Some(STATUS_OK), None] {
        queue.submit(0, Op::Flush, 0, 0);
        queue.publish();
        answer(&queue, 0, status);
        assert_eq!(queue.take().unwrap().unwrap().status, status.unwrap_or(STATUS_NONE));
    }
}

#[test]
fn a_sleeper_wakes_for_an_answer_and_for_a_loss_and_not_for_nothing() {
    let mut queue = queue(true);
    queue.submit(0, Op::Flush, 0, 0);
    queue.publish();
    assert!(!queue.sleep(SHORT).unwrap() && !queue.spin(SHORT).unwrap());
    queue.kick();
    signal(queue.call_fd());
    assert!(!queue.sleep(SHORT).unwrap(), "a call without an answer");
    let (parts, link, call) = (queue.shared.clone(), queue.link.clone(), queue.shared.clone());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            parts.parts.used.store_u16(2, 1u16.to_le(), Ordering::Release);
            signal(&parts.call);
        });
        assert!(queue.sleep(LONG).unwrap());
        queue.take().unwrap().unwrap();
        scope.spawn(move || {
            link.set_lost(Error::new(ErrorKind::Io, "gone"));
            signal(&call.call);
        });
        assert_eq!(queue.sleep(LONG).unwrap_err().message(), "gone");
    });
    assert_eq!(queue.spin(LONG).unwrap_err().message(), "gone");
}

#[test]
#[should_panic(expected = "slot 0 is taken")]
fn a_slot_holds_one_request() {
    let mut queue = queue(true);
    queue.submit(0, Op::Flush, 0, 0);
    queue.submit(0, Op::Flush, 0, 0);
}
