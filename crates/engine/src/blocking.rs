//! [`run_blocking`]: calls on a helper thread what would have a worker wait, such as opening a file.

use std::future::poll_fn;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use crate::file_pool::FilePool;
use crate::lanes::LaneKey;
use crate::shared::relock;

struct Answer<T> {
    result: Option<T>,
    waker: Option<Waker>,
}

/// Has a helper thread call `call`, and waits for its result. `path` is the name of the file that the call is about: calls for one
/// folder use a limited number of threads. The call goes on, and its result is dropped, when this future is dropped after it was
/// polled once.
pub async fn run_blocking<T: Send + 'static>(path: &Path, call: impl FnOnce() -> T + Send + 'static) -> T {
    let ours = Arc::new(Mutex::new(Answer { result: None, waker: None }));
    let theirs = ours.clone();
    FilePool::shared().lane(&LaneKey::of_name(path)).call(move || {
        let result = call();
        let mut answer = relock(&theirs);
        answer.result = Some(result);
        let waker = answer.waker.take();
        drop(answer);
        waker.into_iter().for_each(Waker::wake);
    });
    poll_fn(|context| {
        let mut answer = relock(&ours);
        match answer.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                answer.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    })
    .await
}
