//! Grant copies. Each piece is checked by itself. All pieces that pass are copied with one system call.

use std::cell::RefCell;

use rustix::io::Errno;
use spile_mem::Segment;
use spile_xen::{CopyOp, GrantStatus, Way, XEN_PAGE_BYTES};

use super::domain::Domain;
use crate::sys::{BATCH, Piece, transfer};

thread_local! {
    /// The pieces that passed, with their frames. Kept, so that copies allocate nothing.
    static PASSED: RefCell<Vec<(usize, u32)>> = const { RefCell::new(Vec::new()) };
}

/// Runs the copies `ops`, and writes the status of each that fails to `statuses`. All statuses must be good at first.
///
/// # Errors
/// When this process may not reach into the guest's at all.
///
/// # Panics
/// When a piece is not inside a page, or not inside its buffer.
pub(super) fn run<'a>(
    domain: &Domain,
    way: Way,
    buffer_of: impl Fn(u32) -> &'a Segment,
    ops: &[CopyOp],
    statuses: &mut [GrantStatus],
) -> Result<(), Errno> {
    let is_write = way == Way::ToGuest;
    for op in ops {
        let (len, buffer) = (usize::from(op.len), buffer_of(op.buffer));
        assert!(usize::from(op.page_offset) + len <= XEN_PAGE_BYTES, "a piece over its page's end");
        assert!(op.buffer_offset as usize + len <= buffer.len(), "a piece over its buffer's end");
    }
    PASSED.with_borrow_mut(|passed| {
        passed.clear();
        begin(domain, is_write, ops, statuses, passed);
        let result = move_all(domain, way, &buffer_of, ops, statuses, passed);
        let mut pins = domain.pins();
        passed.iter().for_each(|(number, _)| pins.end(ops[*number].gref, is_write));
        result
    })
}

fn begin(
    domain: &Domain,
    is_write: bool,
    ops: &[CopyOp],
    statuses: &mut [GrantStatus],
    passed: &mut Vec<(usize, u32)>,
) {
    let mut pins = domain.pins();
    for (number, op) in ops.iter().enumerate() {
        match pins.begin(op.gref, is_write) {
            Ok(frame) => passed.push((number, frame)),
            Err(status) => statuses[number] = status,
        }
    }
}

/// Moves the bytes of `passed`. The kernel stops at the first piece it cannot copy; all after that are tried again.
fn move_all<'a>(
    domain: &Domain,
    way: Way,
    buffer_of: &impl Fn(u32) -> &'a Segment,
    ops: &[CopyOp],
    statuses: &mut [GrantStatus],
    passed: &[(usize, u32)],
) -> Result<(), Errno> {
    let mut left = passed;
    while !left.is_empty() {
        let batch = &left[..left.len().min(BATCH)];
        let pieces = batch.iter().map(|(number, frame)| {
            let op = &ops[*number];
            let remote_offset = *frame as usize * XEN_PAGE_BYTES + usize::from(op.page_offset);
            let segment = buffer_of(op.buffer);
            Piece { segment, at: op.buffer_offset as usize, len: usize::from(op.len), remote_offset }
        });
        let moved = match transfer(domain.remote(), way, pieces) {
            Ok(bytes) => bytes,
            Err(e) => match Errno::from_io_error(&e) {
                // These bytes are not there.
                Some(Errno::FAULT) => 0,
                // The guest has just died.
                Some(Errno::SRCH) => {
                    left.iter().for_each(|(number, _)| statuses[*number] = GrantStatus::GENERAL_ERROR);
                    return Ok(());
                }
                errno => return Err(errno.unwrap_or(Errno::IO)),
            },
        };
        let whole = whole_pieces(batch, ops, moved);
        if let Some((number, _)) = batch.get(whole) {
            statuses[*number] = GrantStatus::GENERAL_ERROR;
        }
        left = &left[(whole + 1).min(batch.len())..];
    }
    Ok(())
}

/// The number of pieces of the batch that lie wholly within its first `moved` bytes.
fn whole_pieces(batch: &[(usize, u32)], ops: &[CopyOp], moved: usize) -> usize {
    let mut end = 0;
    let is_whole = |(number, _): &&(usize, u32)| {
        end += usize::from(ops[*number].len);
        end <= moved
    };
    batch.iter().take_while(is_whole).count()
}
