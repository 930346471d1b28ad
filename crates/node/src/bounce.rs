//! [`Bounce`]: a buffer for a request that the disk below would not take as it is. All disks of a worker share its memory for them.
//!
//! A request that finds no memory waits for its turn. One whose disk has no buffer on this worker gets a small one at once, and goes
//! through it in more steps, so that no number of disks that hang stops another one.

use std::future::poll_fn;
use std::rc::Rc;

use spile_core::budget::{Budget, Share, Wanted};
use spile_core::{Error, ErrorKind, Result, Segments};

/// Makes a buffer of so many bytes, aligned to a page. Its content does not matter: whoever takes one fills it first. `None` when there
/// is no memory.
pub type Allocate = fn(usize) -> Option<Segments>;

/// The memory of all bounce buffers of a worker: 64 MiB.
const BUDGET_BYTES: u64 = 64 << 20;
/// Buffers are counted in pages of this size.
const PAGE_BYTES: usize = 4096;

thread_local! {
    static OF_WORKER: Rc<Budget> = Budget::new(BUDGET_BYTES);
}

/// A buffer, counted.
pub(crate) struct Bounce {
    pub(crate) bytes: Segments,
    /// After the bytes, so that they are freed before another request takes their place.
    _held: Held,
}

struct Held {
    budget: Rc<Budget>,
    share: Rc<Share>,
    bytes: u64,
}

impl Bounce {
    /// Waits for a buffer for a request to `disk`: of `bytes`, or of `least_bytes` if only that can be had at once.
    ///
    /// # Errors
    /// `Exhausted` when the system has no memory.
    pub(crate) async fn take<D>(disk: &D, bytes: usize, least_bytes: usize, allocate: Allocate) -> Result<Self> {
        let budget = OF_WORKER.with(Rc::clone);
        let share = budget.share_of(std::ptr::from_ref(disk).addr());
        let pages = |bytes: usize| bytes.next_multiple_of(PAGE_BYTES) as u64;
        let wanted = Wanted { bytes: pages(bytes), least_bytes: pages(least_bytes) };
        let granted = match budget.try_take(&share, wanted) {
            Some(granted) => granted,
            None => wait_in_line(&budget, &share, wanted).await,
        };
        let held = Held { budget, share, bytes: granted };
        let len = if granted < wanted.bytes { least_bytes } else { bytes };
        let bytes = allocate(len).ok_or_else(no_memory)?;
        Ok(Self { bytes, _held: held })
    }
}

async fn wait_in_line(budget: &Rc<Budget>, share: &Rc<Share>, wanted: Wanted) -> u64 {
    let turn = budget.line_up(share, wanted);
    let granted = poll_fn(|context| turn.poll(context)).await;
    turn.accept();
    granted
}

fn no_memory() -> Error {
    Error::new(ErrorKind::Exhausted, "there is no memory for the bounce buffer of a request that is not aligned")
        .caused_by(std::io::Error::from_raw_os_error(ENOMEM))
        .hint("give the process more memory, or have the guest use aligned requests")
}

const ENOMEM: i32 = 12;

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.give_back(&self.share, self.bytes);
    }
}

#[cfg(test)]
impl Bounce {
    /// What is left for buffers on this thread.
    pub(crate) fn free_bytes() -> i64 {
        OF_WORKER.with(|budget| budget.free_bytes())
    }

    /// Takes all but so many bytes away for the life of the result, as other disks would.
    pub(crate) fn leave_only(bytes: u64) -> impl Drop {
        let budget = OF_WORKER.with(Rc::clone);
        let share = budget.share_of(0);
        let rest = Wanted { bytes: budget.free_bytes() as u64 - bytes, least_bytes: 0 };
        let bytes = budget.try_take(&share, rest).expect("nobody else has any");
        Held { budget, share, bytes }
    }
}
