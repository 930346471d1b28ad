//! What one small request costs: a server of the engine answers 4 KiB reads or writes of a file over a Unix socket,
//! like an NBD server does, to one pipelining client. Ways to do it run beside each other, interleaved, and the
//! medians are printed with system calls per request.
//!
//! Usage: `request_loop [FILE_MIB] [SECONDS_PER_RUN] [ROUNDS]`

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use spile_core::{OpenMode, Segments, Store, StoreOffset, Via};
use spile_engine::{CacheMode, Config, Engine, EngineKind, FileStore, Socket, pool, spawn, tuning, yield_now};

const BLOCK: usize = 4096;
const REQUEST: usize = 16;

#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    kind: EngineKind,
    read_at_once: bool,
    write_at_once: bool,
    send_at_once: bool,
    recv_at_once: bool,
    /// The sender lets the other answers of this batch come first.
    gather: bool,
}

const BASE: Way = Way {
    name: "ring only",
    kind: EngineKind::Uring,
    read_at_once: false,
    write_at_once: false,
    send_at_once: false,
    recv_at_once: false,
    gather: false,
};

const WAYS: [Way; 8] = [
    BASE,
    Way { name: "gather", gather: true, ..BASE },
    Way { name: "gather+send", gather: true, send_at_once: true, ..BASE },
    GATHER_READ_SEND,
    Way { name: "same, no gather", gather: false, ..GATHER_READ_SEND },
    Way { name: "+recv", recv_at_once: true, ..GATHER_READ_SEND },
    Way { name: "+write", write_at_once: true, ..GATHER_READ_SEND },
    Way { name: "threads", kind: EngineKind::Threads, ..GATHER_READ_SEND },
];

const GATHER_READ_SEND: Way =
    Way { name: "gather+read+send", gather: true, read_at_once: true, send_at_once: true, ..BASE };

fn apply(way: Way) {
    tuning::READ_AT_ONCE.store(way.read_at_once, Relaxed);
    tuning::SEND_AT_ONCE.store(way.send_at_once, Relaxed);
    tuning::RECV_AT_ONCE.store(way.recv_at_once, Relaxed);
    tuning::WRITE_AT_ONCE_BYTES.store(if way.write_at_once { 65536 } else { 0 }, Relaxed);
}

#[derive(Clone, Copy)]
struct Load {
    via: Via,
    write: bool,
    depth: usize,
    gather: bool,
}

async fn answer(socket: Arc<Socket>, lock: Arc<Turns>, store: FileStore, at: u64, load: Load) {
    let data = pool().alloc(BLOCK);
    let segments = Segments::from(data.clone());
    let offset = StoreOffset(at);
    if load.write {
        store.write_at(offset, &segments, load.via).await.expect("write");
    } else {
        store.read_at(offset, &segments, load.via).await.expect("read");
    }
    let header = pool().alloc(REQUEST);
    header.copy_from_slice(0, &at.to_le_bytes());
    lock.queue.borrow_mut().push(header);
    if !load.write {
        lock.queue.borrow_mut().push(data);
    }
    if lock.sending.replace(true) {
        return;
    }
    loop {
        if load.gather {
            yield_now().await;
        }
        let parts = std::mem::take(&mut *lock.queue.borrow_mut());
        if parts.is_empty() {
            return lock.sending.set(false);
        }
        // The client goes when its time is over, without waiting for the rest.
        let _ = socket.send(&parts).await;
    }
}

/// Answers that wait for their turn on the socket; all that wait go out together.
#[derive(Default)]
struct Turns {
    queue: std::cell::RefCell<Vec<spile_core::Segment>>,
    sending: std::cell::Cell<bool>,
}

async fn serve(fd: std::os::fd::OwnedFd, store: FileStore, load: Load) {
    let socket = Arc::new(Socket::from_fd(fd).expect("a socket"));
    #[expect(clippy::arc_with_non_send_sync, reason = "stays on its worker")]
    let lock = Arc::new(Turns::default());
    let into = pool().alloc(64 << 10);
    let mut held = 0;
    loop {
        let count = socket.recv(&into.slice(held..into.len())).await.unwrap_or(0);
        if count == 0 {
            return;
        }
        let total = held + count;
        for start in (0..total / REQUEST).map(|n| n * REQUEST) {
            let mut at = [0; 8];
            into.copy_to_slice(start, &mut at);
            let at = u64::from_le_bytes(at);
            spawn(answer(socket.clone(), lock.clone(), store.clone(), at, load));
        }
        held = total % REQUEST;
        let rest = into.slice(total - held..total).to_vec();
        into.copy_from_slice(0, &rest);
    }
}

/// Keeps `depth` requests going for a while; returns how many were answered.
fn client(mut socket: UnixStream, blocks: u64, load: Load, time: Duration) -> u64 {
    let reply = if load.write { REQUEST } else { REQUEST + BLOCK };
    let (mut seed, mut buffer, mut have) = (1u64, vec![0; 1 << 20], 0);
    let mut requests = |count: usize, out: &mut Vec<u8>| {
        out.clear();
        for _ in 0..count {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            out.extend_from_slice(&((seed >> 33) % blocks * BLOCK as u64).to_le_bytes());
            out.extend_from_slice(&[0; 8]);
        }
    };
    let (mut out, mut done, start) = (Vec::new(), 0, Instant::now());
    requests(load.depth, &mut out);
    socket.write_all(&out).expect("request");
    while start.elapsed() < time {
        have += socket.read(&mut buffer[have..]).expect("reply");
        let whole = have / reply;
        buffer.copy_within(whole * reply..have, 0);
        have -= whole * reply;
        done += whole as u64;
        requests(whole, &mut out);
        socket.write_all(&out).expect("request");
    }
    done
}

/// Requests a second, microseconds of server CPU and enters for each.
fn run(way: Way, path: &Path, load: Load, time: Duration) -> [f64; 3] {
    apply(way);
    let load = Load { gather: way.gather, ..load };
    let config = Config { kind: way.kind, workers: 1, pool_bytes: 64 << 20, ..Config::default() };
    let engine = Engine::start(config).expect("an engine");
    let store = FileStore::open(path, OpenMode::ReadWrite, CacheMode::Direct).expect("the file");
    let blocks = store.len_bytes() / BLOCK as u64;
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    engine.spawn_on(0, move || serve(ours.into(), store, load));
    let (start, cpu) = (Instant::now(), cpu_us() - thread_cpu_us());
    let done = client(theirs, blocks, load, time) as f64;
    let elapsed = start.elapsed().as_secs_f64();
    let cpu = cpu_us() - thread_cpu_us() - cpu;
    let enters = engine.stats()[0].enters as f64;
    engine.shutdown();
    [done / elapsed, cpu / done, enters / done]
}

fn usage_us(who: i32) -> f64 {
    // SAFETY: the structure is plain numbers, and it is live.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(who, &raw mut usage);
        usage
    };
    let us = |t: libc::timeval| t.tv_sec as f64 * 1e6 + t.tv_usec as f64;
    us(usage.ru_utime) + us(usage.ru_stime)
}

fn cpu_us() -> f64 {
    usage_us(libc::RUSAGE_SELF)
}

fn thread_cpu_us() -> f64 {
    usage_us(libc::RUSAGE_THREAD)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let args: Vec<f64> = std::env::args().skip(1).map(|a| a.parse().expect("a number")).collect();
    let get = |at: usize, default: f64| args.get(at).copied().unwrap_or(default);
    let (mib, seconds, rounds) = (get(0, 64.0) as usize, get(1, 0.3), get(2, 3.0) as usize);
    let dir = tempfile::tempdir_in(".").expect("a folder");
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![7; mib << 20]).expect("the file");
    println!("4 KiB requests, 1 worker, 1 connection: kIOPS | server CPU us | enters, per request");
    for (name, via, write) in [
        ("read cached", Via::Cached, false),
        ("read direct", Via::Direct, false),
        ("write cached", Via::Cached, true),
        ("write direct", Via::Direct, true),
    ] {
        for depth in [1, 32, 128] {
            println!("{name}, depth {depth}");
            let load = Load { via, write, depth, gather: false };
            let mut results = vec![Vec::new(); WAYS.len()];
            for _ in 0..rounds {
                for (way, into) in WAYS.iter().zip(&mut results) {
                    into.push(run(*way, &path, load, Duration::from_secs_f64(seconds)));
                }
            }
            for (way, runs) in WAYS.iter().zip(results) {
                let pick = |n: usize| median(runs.iter().map(|run| run[n]).collect());
                let (rate, cpu, enters) = (pick(0) / 1e3, pick(1), pick(2));
                println!("  {:<17} {rate:8.1} | {cpu:6.2} | {enters:5.2}", way.name);
            }
        }
    }
}
