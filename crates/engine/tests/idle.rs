//! An idle engine costs nothing. Alone in its program: other tests' threads would be counted too.

mod common;

use std::collections::BTreeMap;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use common::*;
use spile_core::{Segment, Store, Via};
use spile_engine::{Engine, Listener, Socket, sleep, spawn};

/// How often each thread whose name starts with `prefix` has gone to sleep by itself.
fn sleeps(prefix: &str) -> BTreeMap<String, u64> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let counts = tasks.filter_map(|task| {
        let dir = task.unwrap().path();
        let name = std::fs::read_to_string(dir.join("comm")).ok()?;
        let status = std::fs::read_to_string(dir.join("status")).ok()?;
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"))?;
        let count = line.split_whitespace().nth(1)?.parse().ok()?;
        let id = dir.file_name()?.to_string_lossy().into_owned();
        name.starts_with(prefix).then(|| (format!("{} {id}", name.trim()), count))
    });
    counts.collect()
}

/// Files used, connections that wait, a listener that waits, a sleep that is over: what an idle server has.
fn settle(engine: &Engine) -> (tempfile::TempDir, Vec<UnixStream>) {
    let (dir, path, store) = patterned(MIB);
    let mut peers = Vec::new();
    for number in 0..20 {
        let (ours, theirs) = UnixStream::pair().unwrap();
        peers.push(theirs);
        engine.spawn_on(number, move || async move {
            let socket = Socket::from_fd(ours.into()).unwrap();
            assert_eq!(socket.recv(&Segment::zeroed(100)).await.unwrap(), 0);
        });
    }
    let listener = UnixListener::bind(path.with_extension("sock")).unwrap();
    engine.run_on(0, move || async move {
        let listener = std::sync::Arc::new(Listener::from_fd(listener.into()).unwrap());
        let other = listener.clone();
        spawn(async move { drop(listener.accept().await) });
        store.read_at(at(0), &segments(&[4096]), Via::Direct).await.unwrap();
        store.write_at(at(0), &segments(&[4096]), Via::Cached).await.unwrap();
        store.write_at(at(0), &segments(&[MIB]), Via::Cached).await.unwrap();
        store.write_at(at(8 * MIB), &segments(&[4096]), Via::Direct).await.unwrap();
        store.punch_hole(at(0), 65536).await.unwrap();
        store.write_at(at(0), &segments(&[4096]), Via::Direct).await.unwrap();
        store.set_len(16 << 20).await.unwrap();
        store.sync().await.unwrap();
        sleep(Duration::from_millis(1)).await;
        other.close();
    });
    (dir, peers)
}

fn an_idle_engine_makes_no_wake_up(engine: &Engine) {
    let kept = settle(engine);
    std::thread::sleep(Duration::from_millis(300));
    let before = (sleeps("spile-"), engine.stats());
    assert!(before.0.len() >= 2, "{before:?}");
    // The kernel's threads for a ring, which wake every five seconds, must not have come into being.
    assert_eq!(sleeps("iou-").len(), 0, "{:?}", sleeps("iou-"));
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!((sleeps("spile-"), engine.stats()), before);
    drop(kept);
}

#[test]
fn idle_engines_make_no_wake_up() {
    run("uring", an_idle_engine_makes_no_wake_up);
    run("aio", an_idle_engine_makes_no_wake_up);
    run("threads", an_idle_engine_makes_no_wake_up);
}
