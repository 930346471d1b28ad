//! A blocking NBD client for tests: says exactly what it is told to, also what no client should.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use spile_front_nbd::wire::handshake::{INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, info, option, rep};
use spile_front_nbd::wire::reply::{
    FLAG_DONE, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, TYPE_BLOCK_STATUS, TYPE_ERROR, TYPE_ERROR_OFFSET, TYPE_NONE,
    TYPE_OFFSET_DATA, TYPE_OFFSET_HOLE,
};
use spile_front_nbd::wire::request::{Command, Request};

/// No answer within this time is a failed test, not a hung one.
const PATIENCE: Duration = Duration::from_secs(600);

/// A byte stream to the server: plain, or TLS in a test of its own.
pub trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

/// A client on a stream.
pub struct Client<S> {
    pub stream: S,
    next_cookie: u64,
}

/// One complete reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub cookie: u64,
    pub errno: u32,
    /// Text and offset of an error chunk.
    pub message: String,
    pub error_offset: Option<u64>,
    /// Chunks of content: offset, data (zeroes for a hole), is a hole.
    pub content: Vec<(u64, Vec<u8>, bool)>,
    /// Block status descriptors.
    pub status: Vec<(u32, u32)>,
}

impl Answer {
    /// A read's bytes, put together; panics when they do not cover the request.
    pub fn data(&self, offset: u64, len: usize) -> Vec<u8> {
        assert_eq!(self.errno, 0, "{self:?}");
        let mut bytes = vec![0xee; len];
        let mut covered = 0;
        for (at, part, _) in &self.content {
            let start = (at - offset) as usize;
            bytes[start..start + part.len()].copy_from_slice(part);
            covered += part.len();
        }
        assert_eq!(covered, len);
        bytes
    }
}

pub fn connect(path: &Path) -> Client<UnixStream> {
    let stream = UnixStream::connect(path).expect("the server listens");
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    Client::new(stream)
}

/// Connected, greeted, export chosen.
pub fn ready(path: &Path, structured: bool) -> Client<UnixStream> {
    let mut client = connect(path);
    client.greet();
    client.enter("", structured);
    client
}

impl Client<UnixStream> {
    /// True when the server has closed and owed nothing more.
    pub fn at_end(&mut self) -> bool {
        let mut byte = [0; 1];
        let read = loop {
            match self.stream.read(&mut byte) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                other => break other,
            }
        };
        match read {
            Ok(0) => true,
            Ok(_) => panic!("the server has more to say"),
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => true,
            Err(e) => panic!("neither an end nor a byte: {e}"),
        }
    }

    /// Everything up to the end of the stream.
    pub fn read_to_end(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        if let Err(e) = self.stream.read_to_end(&mut bytes) {
            assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset);
        }
        bytes
    }

    pub fn half_close(&self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }
}

impl<S: Stream> Client<S> {
    pub fn new(stream: S) -> Self {
        Self { stream, next_cookie: 1 }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the server reads");
    }

    pub fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).expect("the server answers");
        bytes
    }

    pub fn take_vec(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).expect("the server answers");
        bytes
    }

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take())
    }

    /// Greeting and client flags, both fixed newstyle and no zeroes.
    pub fn greet(&mut self) {
        assert_eq!((self.u64(), self.u64(), self.u16()), (INIT_MAGIC, OPTION_MAGIC, 3));
        self.send(&3u32.to_be_bytes());
    }

    pub fn option(&mut self, option: u32, data: &[u8]) {
        self.send(&option_bytes(option, data));
    }

    /// One option reply: type and data.
    pub fn option_reply(&mut self, option: u32) -> (u32, Vec<u8>) {
        assert_eq!((self.u64(), self.u32()), (OPTION_REPLY_MAGIC, option));
        let (kind, len) = (self.u32(), self.u32() as usize);
        assert!(len <= 70_000, "an option reply of {len} bytes");
        (kind, self.take_vec(len))
    }

    /// Sends an option; all its replies.
    pub fn ask(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.option(option, data);
        let mut replies = vec![self.option_reply(option)];
        while replies.last().is_some_and(|(kind, _)| *kind != rep::ACK && kind >> 31 == 0) {
            replies.push(self.option_reply(option));
        }
        replies
    }

    /// Negotiates up to the transmission phase; with structured replies also `base:allocation`. The size.
    pub fn enter(&mut self, name: &str, structured: bool) -> (u64, u16) {
        if structured {
            assert_eq!(self.ask(option::STRUCTURED_REPLY, &[])[0].0, rep::ACK);
            let replies = self.ask(option::SET_META_CONTEXT, &meta_data(name, &["base:allocation"]));
            assert_eq!(replies[0].0, rep::META_CONTEXT);
        }
        let replies = self.ask(option::GO, &go_data(name));
        assert_eq!(replies.last().unwrap().0, rep::ACK, "{replies:?}");
        let export = replies.iter().find(|(_, data)| data.starts_with(&info::EXPORT.to_be_bytes()));
        let data = &export.expect("GO tells of the export").1;
        (u64::from_be_bytes(data[2..10].try_into().unwrap()), u16::from_be_bytes(data[10..12].try_into().unwrap()))
    }

    /// Sends a request; its cookie.
    pub fn request(&mut self, command: Command, flags: u16, offset: u64, len: u32) -> u64 {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let request = Request { flags, command, cookie, offset_bytes: offset, len_bytes: len };
        self.send(&request.encode());
        cookie
    }

    /// Sends a write with its payload; its cookie.
    pub fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> u64 {
        let cookie = self.request(Command::Write, flags, offset, data.len() as u32);
        self.send(data);
        cookie
    }

    /// The next whole reply. `read_len` tells how much data a successful simple reply of this cookie carries.
    pub fn answer(&mut self, read_len: impl Fn(u64) -> Option<(u64, u32)>) -> Answer {
        let mut answer = Answer {
            cookie: 0,
            errno: 0,
            message: String::new(),
            error_offset: None,
            content: Vec::new(),
            status: Vec::new(),
        };
        match self.u32() {
            SIMPLE_REPLY_MAGIC => {
                (answer.errno, answer.cookie) = (self.u32(), self.u64());
                if let (0, Some((offset, len))) = (answer.errno, read_len(answer.cookie)) {
                    let data = self.take_vec(len as usize);
                    answer.content.push((offset, data, false));
                }
            }
            STRUCTURED_REPLY_MAGIC => {
                // Our server sends the chunks of one reply in a row.
                while !self.chunk(&mut answer) {
                    assert_eq!(self.u32(), STRUCTURED_REPLY_MAGIC);
                }
            }
            other => panic!("a reply begins with {other:#x}"),
        }
        answer
    }

    /// One chunk behind its magic; true when it was the last.
    fn chunk(&mut self, answer: &mut Answer) -> bool {
        let (flags, kind, cookie, len) = (self.u16(), self.u16(), self.u64(), self.u32() as usize);
        assert!(answer.cookie == 0 || answer.cookie == cookie);
        answer.cookie = cookie;
        let payload = self.take_vec(len);
        let word = |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_be_bytes(payload[at..at + 8].try_into().unwrap());
        match kind {
            TYPE_NONE => assert_eq!((len, flags), (0, FLAG_DONE)),
            TYPE_OFFSET_DATA => answer.content.push((long(0), payload[8..].to_vec(), false)),
            TYPE_OFFSET_HOLE => {
                answer.content.push((long(0), vec![0; word(8) as usize], true));
            }
            TYPE_BLOCK_STATUS => {
                assert_eq!(word(0), 1);
                let pairs = (4..len).step_by(8).map(|at| (word(at), word(at + 4)));
                answer.status.extend(pairs);
            }
            TYPE_ERROR | TYPE_ERROR_OFFSET => {
                let text = 6 + u16::from_be_bytes([payload[4], payload[5]]) as usize;
                answer.errno = word(0);
                answer.message = String::from_utf8(payload[6..text].to_vec()).unwrap();
                answer.error_offset = (kind == TYPE_ERROR_OFFSET).then(|| long(text));
            }
            other => panic!("an unknown chunk of type {other}"),
        }
        flags & FLAG_DONE != 0
    }

    /// Sends a request without payload and takes its reply, which must be the next.
    pub fn call(&mut self, command: Command, flags: u16, offset: u64, len: u32) -> Answer {
        let cookie = self.request(command, flags, offset, len);
        let read = command == Command::Read;
        let answer = self.answer(|_| read.then_some((offset, len)));
        assert_eq!(answer.cookie, cookie);
        answer
    }

    /// Writes and takes the reply, which must be the next.
    pub fn call_write(&mut self, flags: u16, offset: u64, data: &[u8]) -> Answer {
        let cookie = self.write(flags, offset, data);
        let answer = self.answer(|_| None);
        assert_eq!(answer.cookie, cookie);
        answer
    }

    /// Reads; the bytes.
    pub fn read(&mut self, offset: u64, len: u32) -> Vec<u8> {
        self.call(Command::Read, 0, offset, len).data(offset, len as usize)
    }
}

pub fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u32).to_be_bytes();
    [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &len, data].concat()
}

fn counted(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

pub fn go_data(name: &str) -> Vec<u8> {
    let mut data = counted(name);
    data.extend_from_slice(&1u16.to_be_bytes());
    data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
    data
}

pub fn meta_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = counted(name);
    data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend_from_slice(&counted(query)));
    data
}
