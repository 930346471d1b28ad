//! Sockets and listeners, on both reactors.

mod common;

use std::future::Future;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use common::*;
use spile_core::{ErrorKind, Segment};
use spile_engine::{Engine, Listener, Socket, pool, sleep, spawn, yield_now};

each_engine!(
    large_sends_to_a_slow_reader,
    both_ways_at_once,
    the_end_and_a_dead_peer,
    shutdown_wakes_the_receiver,
    a_dropped_receive_takes_nothing,
    an_exact_receive_is_whole,
    an_exact_receive_ends_with_the_stream,
    receives_dropped_before_they_were_submitted_end,
    many_parts,
    connections_are_accepted_until_closed,
    a_dropped_accept_leaves_the_listener_well,
    only_stream_sockets,
    many_idle_connections_do_not_stop_files,
);

fn pair() -> (Socket, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Socket::from_fd(ours.into()).unwrap(), theirs)
}

fn filled(start: usize, len: usize) -> Segment {
    let segment = Segment::zeroed(len);
    segment.copy_from_slice(0, &pattern(start, len));
    segment
}

/// Reads to the end, in small bites.
fn read_slowly(mut from: impl Read) -> Vec<u8> {
    let (mut all, mut bite) = (Vec::new(), vec![0; 100_000]);
    loop {
        let count = from.read(&mut bite).unwrap();
        if count == 0 {
            return all;
        }
        all.extend_from_slice(&bite[..count]);
        if all.len() % 7 == 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

fn large_sends_to_a_slow_reader(engine: &Engine) {
    let (socket, peer) = pair();
    let reader = std::thread::spawn(move || read_slowly(peer));
    engine.run_on(0, move || async move {
        socket.send(&[filled(0, 16), filled(16, 32 * MIB - 16)]).await.unwrap();
        socket.send(&[]).await.unwrap();
    });
    assert!(reader.join().unwrap() == pattern(0, 32 * MIB));
}

async fn receive_all(socket: &Socket, len: usize) -> Vec<u8> {
    let (into, mut all) = (pool().alloc(64 * KIB), Vec::new());
    while all.len() < len {
        let count = socket.recv(&into).await.unwrap();
        assert!(count > 0, "the end came after {} bytes", all.len());
        all.extend_from_slice(&into.slice(0..count).to_vec());
    }
    all
}

fn both_ways_at_once(engine: &Engine) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let ours: OwnedFd = listener.accept().unwrap().0.into();
    let mut writer = peer.try_clone().unwrap();
    let writes = std::thread::spawn(move || writer.write_all(&pattern(3, 8 * MIB)).unwrap());
    let reads = std::thread::spawn(move || {
        let mut all = vec![0; 8 * MIB];
        peer.read_exact(&mut all).unwrap();
        all
    });
    let received = engine.run_on(0, move || async move {
        let socket = Arc::new(Socket::from_fd(ours).unwrap());
        let sender = socket.clone();
        spawn(async move { sender.send(&[filled(5, 8 * MIB)]).await.unwrap() });
        receive_all(&socket, 8 * MIB).await
    });
    writes.join().unwrap();
    assert!(received == pattern(3, 8 * MIB) && reads.join().unwrap() == pattern(5, 8 * MIB));
}

fn the_end_and_a_dead_peer(engine: &Engine) {
    let (socket, peer) = pair();
    drop(peer);
    engine.run_on(0, move || async move {
        assert_eq!(socket.recv(&Segment::zeroed(10)).await.unwrap(), 0);
        let error = socket.send(&[filled(0, MIB)]).await.unwrap_err();
        assert_eq!((error.kind(), error.os_errno()), (ErrorKind::Io, Some(32)));
        let empty = socket.recv(&Segment::zeroed(0)).await.unwrap_err();
        assert_eq!(empty.kind(), ErrorKind::InvalidInput);
    });
    let (socket, peer) = pair();
    engine.run_on(1, move || async move {
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            drop(peer);
        });
        socket.send(&[filled(0, 32 * MIB)]).await.unwrap_err();
    });
}

fn shutdown_wakes_the_receiver(engine: &Engine) {
    let (socket, _peer) = pair();
    engine.run_on(0, move || async move {
        let socket = Arc::new(socket);
        let other = socket.clone();
        spawn(async move {
            sleep(Duration::from_millis(10)).await;
            other.shutdown(Shutdown::Both);
        });
        assert_eq!(socket.recv(&Segment::zeroed(10)).await.unwrap(), 0);
    });
}

/// Polls once, expects to wait, drops.
fn poll_and_drop(future: impl Future) {
    assert!(pin!(future).poll(&mut Context::from_waker(Waker::noop())).is_pending());
}

/// True when the pool has all its buffers back within some seconds.
async fn all_buffers_are_back() -> bool {
    for _ in 0..1000 {
        if pool().stats().in_use_chunks == 0 {
            return true;
        }
        sleep(Duration::from_millis(2)).await;
    }
    false
}

fn a_dropped_receive_takes_nothing(engine: &Engine) {
    let (socket, mut peer) = pair();
    engine.run_on(0, move || async move {
        poll_and_drop(socket.recv(&pool().alloc(4096)));
        assert!(all_buffers_are_back().await);
        poll_and_drop(socket.recv_exact(&pool().alloc(4096)));
        assert!(all_buffers_are_back().await);
        let reused = pool().alloc(4096);
        reused.fill(0xaa);
        peer.write_all(&pattern(0, 4096)).unwrap();
        sleep(Duration::from_millis(20)).await;
        assert!(reused.to_vec() == vec![0xaa; 4096], "a dropped receive wrote into memory");
        assert!(receive_all(&socket, 4096).await == pattern(0, 4096));
    });
}

fn an_exact_receive_is_whole(engine: &Engine) {
    let (socket, mut peer) = pair();
    let writer = std::thread::spawn(move || {
        for number in 0..256 {
            peer.write_all(&pattern(number * 4099, 4099)).unwrap();
            if number % 16 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
    engine.run_on(0, move || async move {
        let into = pool().alloc(256 * 4099);
        // Behind what has come another way, and not a byte more than asked for.
        assert_eq!(socket.recv_exact(&into.slice(0..5)).await.unwrap(), 5);
        let last = into.len() - 10;
        assert_eq!(socket.recv_exact(&into.slice(5..last)).await.unwrap(), last - 5);
        assert_eq!(socket.recv_exact(&into.slice(last..last)).await.unwrap(), 0);
        assert_eq!(socket.recv_exact(&into.slice(last..into.len())).await.unwrap(), 10);
        assert!(into.to_vec() == pattern(0, 256 * 4099));
    });
    writer.join().unwrap();
}

fn an_exact_receive_ends_with_the_stream(engine: &Engine) {
    let (socket, mut peer) = pair();
    peer.write_all(&pattern(0, 1000)).unwrap();
    engine.run_on(0, move || async move {
        let hangs_up = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(10));
            peer.write_all(&pattern(1000, 1000)).unwrap();
        });
        let into = Segment::zeroed(4096);
        assert_eq!(socket.recv_exact(&into).await.unwrap(), 2000);
        assert_eq!(into.slice(0..2000).to_vec(), pattern(0, 2000));
        assert_eq!(socket.recv_exact(&into).await.unwrap(), 0);
        hangs_up.join().unwrap();
    });
}

fn receives_dropped_before_they_were_submitted_end(engine: &Engine) {
    let (socket, peer) = pair();
    let ended = engine.run_on(0, move || async move {
        // More than the submission queue holds.
        let buffers: Vec<_> = (0..1000).map(|_| pool().alloc(1)).collect();
        let mut waiting: Vec<_> = buffers.iter().map(|into| Box::pin(socket.recv(into))).collect();
        let context = &mut Context::from_waker(Waker::noop());
        assert!(waiting.iter_mut().all(|receive| receive.as_mut().poll(context).is_pending()));
        // Long enough for the reactor to have one turn, which submits the first of them.
        for _ in 0..300 {
            yield_now().await;
        }
        // The last first: the queue has room now, and they still wait for a place in it.
        while let Some(receive) = waiting.pop() {
            drop(receive);
        }
        drop(waiting);
        drop(buffers);
        let ended = all_buffers_are_back().await;
        drop(peer);
        ended
    });
    assert!(ended, "a receive that nobody waits for was never cancelled");
}

fn many_parts(engine: &Engine) {
    let (socket, peer) = pair();
    let reader = std::thread::spawn(move || read_slowly(peer));
    engine.run_on(0, move || async move {
        let parts: Vec<_> = (0..3000).map(|n| filled(n * 500, 500)).collect();
        socket.send(&parts).await.unwrap();
    });
    assert!(reader.join().unwrap() == pattern(0, 3000 * 500));
}

fn tcp_listener() -> (Listener, std::net::SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (Listener::from_fd(listener.into()).unwrap(), address)
}

fn connections_are_accepted_until_closed(engine: &Engine) {
    let (listener, address) = tcp_listener();
    let listener = Arc::new(listener);
    let other = listener.clone();
    let client = std::thread::spawn(move || {
        for _ in 0..20 {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"hello").unwrap();
            stream.read_exact(&mut [0; 1]).unwrap();
        }
        other.close();
    });
    let texts = engine.run_on(0, move || async move {
        let mut texts = 0;
        let end = loop {
            match listener.accept().await {
                Ok(fd) => {
                    let socket = Socket::from_fd(fd).unwrap();
                    assert_eq!(receive_all(&socket, 5).await, b"hello");
                    socket.send(&[filled(0, 1)]).await.unwrap();
                    texts += 1;
                }
                Err(error) => break error,
            }
        };
        assert_eq!(end.kind(), ErrorKind::Shutdown);
        assert_eq!(listener.accept().await.unwrap_err().kind(), ErrorKind::Shutdown);
        texts
    });
    client.join().unwrap();
    assert_eq!(texts, 20);
}

fn a_dropped_accept_leaves_the_listener_well(engine: &Engine) {
    let (listener, address) = tcp_listener();
    engine.run_on(0, move || async move {
        poll_and_drop(listener.accept());
        sleep(Duration::from_millis(5)).await;
        let client = TcpStream::connect(address).unwrap();
        let socket = Socket::from_fd(listener.accept().await.unwrap()).unwrap();
        socket.send(&[filled(0, 5)]).await.unwrap();
        let mut got = [0; 5];
        (&client).read_exact(&mut got).unwrap();
        assert_eq!(got[..], pattern(0, 5));
    });
}

fn only_stream_sockets(_: &Engine) {
    let file = std::fs::File::open("/dev/null").unwrap();
    let error = Socket::from_fd(file.into()).err().expect("no socket");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let datagrams = std::os::unix::net::UnixDatagram::unbound().unwrap();
    assert!(Listener::from_fd(datagrams.into()).is_err());
}

fn many_idle_connections_do_not_stop_files(engine: &Engine) {
    let (_dir, _, store) = patterned(MIB);
    let peers = engine.run_on(0, move || async move {
        let mut peers = Vec::new();
        for _ in 0..1500 {
            let Ok((ours, theirs)) = UnixStream::pair() else { break };
            let socket = Socket::from_fd(ours.into()).unwrap();
            peers.push(theirs);
            spawn(async move {
                assert_eq!(socket.recv(&Segment::zeroed(1)).await.unwrap(), 0);
            });
        }
        for _ in 0..10 {
            yield_now().await;
        }
        use spile_core::{Store, Via};
        store.read_at(at(0), &segments(&[MIB]), Via::Direct).await.unwrap();
        peers
    });
    assert!(peers.len() > 100);
}
