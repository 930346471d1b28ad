//! [`yield_now`]: lets other tasks run first.

use std::future::poll_fn;
use std::task::Poll;

/// Lets the other tasks that are ready run first: the task goes to the end of the queue of its thread, without a system call. A
/// task that collects what others produce, such as replies for one send, calls this once before it takes them.
pub async fn yield_now() {
    let mut yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
