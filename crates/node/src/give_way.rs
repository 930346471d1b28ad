//! [`give_way`]: lets other tasks run first.

use std::future::poll_fn;
use std::task::Poll;

/// Lets the other tasks of this thread that are ready run once.
pub(crate) async fn give_way() {
    let mut gave_way = false;
    poll_fn(|context| {
        if std::mem::replace(&mut gave_way, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
