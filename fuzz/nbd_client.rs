//! The NBD client against a hostile server under a script: handshakes good and bad, replies of all kinds to requests in flight,
//! wrong cookies, offsets and lengths, bytes that mean nothing, an end at any point. Used by the fuzz target of this name
//! and by its short run in the tests of `store`.
//!
//! Whatever the server says, nothing panics, each request ends, a read that ended well was filled whole, and the next server is
//! spoken to. All waits are bounded.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use spile_core::{OpenMode, Result, Segments, Store, StoreOffset, Via};
use spile_engine::{Config, Engine, EngineKind};
use spile_nbd_wire::client::fuzz_client;
use spile_nbd_wire::handshake::{
    OPTION_HEADER_BYTES, OptionHeader, option, put_greeting, put_reply, rep, transmission,
};
use spile_nbd_wire::reply;
use spile_nbd_wire::request::{Command, REQUEST_BYTES, Request};
use spile_nbd_wire::uri::{Address, NbdUri};
use spile_store::{NbdOptions, NbdStore};

use super::panics::{PANICS, count_panics};
use super::script::Script;

/// Steps of one script at most.
const STEPS: usize = 100;
/// How long a request may take to end.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the server waits for the client before it goes on with its script.
const PAUSE: Duration = Duration::from_millis(2);
const SIZE_BYTES: u64 = 1 << 20;
/// What no server sends: it is left where a read was not filled.
const UNFILLED: u8 = 0xa5;
/// What servers send as data.
const DATA: u8 = 0x5a;
/// The number of the server's `base:allocation`.
const CONTEXT: u32 = 7;

/// Runs one script.
pub fn run(data: &[u8]) {
    count_panics();
    fuzz_client(data);
    let selector = data.first().copied().unwrap_or(0);
    let world = world(selector);
    let listener = UnixListener::bind(&world.path).expect("the name is free");
    world.scripts.send((listener, data.to_vec())).expect("the server lives");
    world.use_store(selector);
    world.ended.recv_timeout(PATIENCE).expect("it hangs: the server's end");
    std::fs::remove_file(&world.path).expect("the name is there");
    assert_eq!(PANICS.load(Ordering::Relaxed), 0, "a thread has panicked");
}

/// A client's engine, and the thread of its server. They live as long as the process.
struct World {
    engine: Engine,
    path: PathBuf,
    scripts: Sender<(UnixListener, Vec<u8>)>,
    ended: Receiver<()>,
}

/// One world for each engine.
fn world(selector: u8) -> MutexGuard<'static, World> {
    static WORLDS: [OnceLock<Mutex<World>>; 3] = [const { OnceLock::new() }; 3];
    let which = usize::from(selector) % 3;
    let new = || Mutex::new(World::new([EngineKind::Auto, EngineKind::Threads, EngineKind::Aio][which]));
    WORLDS[which].get_or_init(new).lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    fn new(kind: EngineKind) -> Self {
        let config = Config { kind, workers: 1, pool_bytes: 1 << 20, ..Config::default() };
        let engine = Engine::start(config).expect("the engine starts");
        let path = std::env::temp_dir().join(format!("spile-fuzz-nbd-{}-{kind}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let ((scripts, script), (end, ended)) = (channel::<(UnixListener, Vec<u8>)>(), channel());
        std::thread::spawn(move || {
            for (listener, script) in script {
                let (stream, _) = listener.accept().expect("the client connects");
                Server { stream, script: Script(&script), seen: Vec::new() }.run();
                end.send(()).expect("somebody waits");
            }
        });
        Self { engine, path, scripts, ended }
    }

    /// Connects and has some requests in flight at a time.
    fn use_store(&self, selector: u8) {
        let uri = NbdUri::new(Address::Unix(self.path.clone()), "");
        let options = NbdOptions {
            connections: 1,
            answer_limit: PATIENCE,
            reconnect_limit: Duration::ZERO,
            structured: selector & 2 == 0,
        };
        let open = move || NbdStore::open_with(uri, OpenMode::ReadWrite, options);
        let Ok(store) = self.wait("the handshake", open) else { return };
        let (done, all_done) = channel();
        let asks: [fn(NbdStore) -> Ask; 6] = [
            |store| Box::pin(async move { read(&store, 0, 512).await }),
            |store| Box::pin(async move { read(&store, 4096, 70_000).await }),
            |store| Box::pin(async move { read(&store, SIZE_BYTES - 300_000, 300_000).await }),
            |store| {
                Box::pin(async move { store.write_at(StoreOffset(512), &Segments::zeroed(9000), Via::Direct).await })
            },
            |store| Box::pin(async move { store.sync().await }),
            |store| Box::pin(async move { store.extent_at(StoreOffset(1000)).await.map(drop) }),
        ];
        for ask in asks {
            let (store, done) = (store.clone(), done.clone());
            self.engine.spawn_on(0, move || async move {
                let _ = ask(store).await;
                let _ = done.send(());
            });
        }
        asks.iter().for_each(|_| all_done.recv_timeout(PATIENCE).expect("it hangs: a request"));
    }

    fn wait<T, Fut>(&self, what: &str, make: impl FnOnce() -> Fut + Send + 'static) -> T
    where
        T: Send + 'static,
        Fut: Future<Output = T> + 'static,
    {
        let (done, is_done) = channel();
        self.engine.spawn_on(0, move || {
            let future = make();
            async move { drop(done.send(future.await)) }
        });
        is_done.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("it hangs: {what}"))
    }
}

type Ask = std::pin::Pin<Box<dyn Future<Output = Result<()>>>>;

async fn read(store: &NbdStore, offset: u64, len: usize) -> Result<()> {
    let into = Segments::copied(&vec![UNFILLED; len]);
    store.read_at(StoreOffset(offset), &into, Via::Direct).await?;
    assert!(!into.to_vec().contains(&UNFILLED), "a read that ended well was not filled");
    Ok(())
}

/// One connection, from the server's side.
struct Server<'a> {
    stream: UnixStream,
    script: Script<'a>,
    /// The cookies of the requests that came.
    seen: Vec<u64>,
}

impl Server<'_> {
    /// Follows the script, and then hangs up.
    fn run(mut self) {
        self.stream.set_read_timeout(Some(PAUSE)).expect("a socket has time limits");
        self.stream.set_write_timeout(Some(PAUSE)).expect("a socket has time limits");
        let mode = self.script.u8();
        if mode & 1 == 0 {
            self.shake_hands(mode);
        }
        for _ in 0..STEPS {
            if self.script.0.is_empty() {
                return;
            }
            self.step();
        }
    }

    fn say(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    fn hear<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).ok().map(|()| bytes)
    }

    /// An honest handshake, but for what the script refuses.
    fn shake_hands(&mut self, mode: u8) -> Option<()> {
        let mut out = Vec::new();
        put_greeting(&mut out);
        self.say(&out);
        self.hear::<4>()?;
        loop {
            let head = OptionHeader::parse(&self.hear::<OPTION_HEADER_BYTES>()?)?;
            let mut data = vec![0; head.len_bytes as usize];
            self.stream.read_exact(&mut data).ok()?;
            let mut out = Vec::new();
            match head.option {
                option::STRUCTURED_REPLY if mode & 4 != 0 => put_reply(&mut out, head.option, rep::ERR_UNSUP, &[b"no"]),
                option::SET_META_CONTEXT if mode & 8 == 0 => {
                    put_reply(&mut out, head.option, rep::META_CONTEXT, &[&CONTEXT.to_be_bytes(), b"base:allocation"]);
                    put_reply(&mut out, head.option, rep::ACK, &[]);
                }
                option::GO => {
                    let flags = transmission::HAS_FLAGS | transmission::SEND_FLUSH | transmission::SEND_WRITE_ZEROES;
                    put_reply(
                        &mut out,
                        head.option,
                        rep::INFO,
                        &[&[0, 0], &SIZE_BYTES.to_be_bytes(), &flags.to_be_bytes()],
                    );
                    put_reply(&mut out, head.option, rep::ACK, &[]);
                }
                _ => put_reply(&mut out, head.option, rep::ACK, &[]),
            }
            self.say(&out);
            if head.option == option::GO {
                return Some(());
            }
        }
    }

    /// Takes a request, if there is one, and does with it what the script says.
    fn step(&mut self) {
        let kind = self.script.u8();
        if kind & 0x0f == 0x0f {
            let len = usize::from(self.script.u8());
            let bytes: Vec<u8> =
                self.script.take(len).iter().map(|byte| if *byte == UNFILLED { 0 } else { *byte }).collect();
            return self.say(&bytes);
        }
        let Some(mut request) = self.hear::<REQUEST_BYTES>().and_then(|bytes| Request::parse(&bytes)) else { return };
        self.seen.push(request.cookie);
        if request.command == Command::Write {
            let mut data = vec![0; request.payload_bytes() as usize];
            let _ = self.stream.read_exact(&mut data);
        }
        if kind & 0x40 != 0 {
            // That of another request, answered or not, or of none.
            let other = self.seen.get(usize::from(self.script.u8()));
            request.cookie = other.copied().unwrap_or(u64::MAX);
        }
        let bytes = self.reply(kind, &request);
        self.say(&bytes);
    }

    fn reply(&mut self, kind: u8, request: &Request) -> Vec<u8> {
        let Request { cookie, offset_bytes, len_bytes, command, .. } = *request;
        let is_last = kind & 0x80 == 0;
        let near = |delta: u8| offset_bytes.wrapping_add(u64::from(delta)).wrapping_sub(128);
        match kind & 0x0f {
            0 if command == Command::Read => [&reply::simple(cookie, 0)[..], &vec![DATA; len_bytes as usize]].concat(),
            0 => reply::simple(cookie, 0).to_vec(),
            1 => reply::simple(cookie, self.script.u32()).to_vec(),
            2 => data(cookie, is_last, offset_bytes, len_bytes),
            3 => {
                let half = len_bytes / 2;
                let second = data(cookie, false, offset_bytes + u64::from(half), len_bytes - half);
                [second, data(cookie, is_last, offset_bytes, half)].concat()
            }
            4 => {
                let (at, len) = (near(self.script.u8()), self.script.u32() & 0xffff);
                data(cookie, is_last, at, len)
            }
            5 => reply::offset_hole(cookie, is_last, offset_bytes, len_bytes).to_vec(),
            6 => reply::offset_hole(cookie, is_last, near(self.script.u8()), self.script.u32()).to_vec(),
            7 => self.status(cookie, len_bytes),
            8 => reply::error(cookie, self.script.u32(), "what\u{1b}[2J", Some(offset_bytes)).to_vec(),
            9 => reply::none(cookie).to_vec(),
            10 => {
                let mut head = reply::offset_hole(cookie, is_last, offset_bytes, len_bytes).to_vec();
                let (at, byte) = (usize::from(self.script.u8()) % head.len(), self.script.u8());
                head[at] = byte;
                head
            }
            _ => Vec::new(),
        }
    }

    /// A block status with up to 3 runs.
    fn status(&mut self, cookie: u64, len_bytes: u32) -> Vec<u8> {
        let runs = u32::from(self.script.u8() % 4);
        let mut bytes = reply::block_status(cookie, true, CONTEXT, runs).to_vec();
        for _ in 0..runs {
            let len = if self.script.u8() & 1 == 0 { len_bytes / 2 } else { self.script.u32() };
            bytes.extend(len.to_be_bytes());
            bytes.extend(u32::from(self.script.u8()).to_be_bytes());
        }
        bytes
    }
}

fn data(cookie: u64, is_last: bool, offset_bytes: u64, len_bytes: u32) -> Vec<u8> {
    [&reply::offset_data(cookie, is_last, offset_bytes, len_bytes)[..], &vec![DATA; len_bytes as usize]].concat()
}
