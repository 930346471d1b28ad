//! An NBD server in memory that breaks one write on purpose, to show that a verified load finds it.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The size of its disk.
pub const SIZE: usize = 1 << 20;

/// What happens to one write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing wrong.
    None,
    /// Acknowledged and dropped.
    Lose,
    /// Written at half its offset.
    Misplace,
    /// Half of each sector is written.
    Tear,
    /// Answered with EIO.
    Refuse,
    /// Answered with another request's cookie.
    WrongCookie,
    /// The connection is closed instead of an answer.
    HangUp,
}

struct Shared {
    bytes: Mutex<Vec<u8>>,
    fault: Fault,
    writes: AtomicU64,
    /// The error with which every write is answered; 0 for none.
    refuses: Arc<AtomicU32>,
}

/// `NBD_OPT_GO`.
const GO: u32 = 7;
/// `NBD_REP_ERR_UNSUP`.
const UNSUPPORTED: u32 = 0x8000_0001;

/// The write that breaks, counted from 0.
const BROKEN_WRITE: u64 = 100;

/// Serves at `path` until the process ends.
pub fn serve(path: &Path, fault: Fault) {
    serve_refusing(path, fault, Arc::default());
}

/// The same; as long as `refuses` is not 0, every write is answered with that error.
pub fn serve_refusing(path: &Path, fault: Fault, refuses: Arc<AtomicU32>) {
    let listener = UnixListener::bind(path).expect("the socket can be made");
    let shared = Shared { bytes: Mutex::new(vec![0; SIZE]), fault, writes: AtomicU64::new(0), refuses };
    let shared = Arc::new(shared);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let shared = shared.clone();
            // It ends with an error when the client goes.
            std::thread::spawn(move || drop(connection(stream, &shared)));
        }
    });
}

fn connection(mut stream: UnixStream, shared: &Shared) -> std::io::Result<()> {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    read(&mut stream, 4)?;
    loop {
        let head = read(&mut stream, 16)?;
        let option = be32(&head[8..]);
        read(&mut stream, be32(&head[12..]) as usize)?;
        if option == GO {
            break;
        }
        option_reply(&mut stream, option, UNSUPPORTED, &[])?;
    }
    let mut info = vec![0, 0];
    info.extend((SIZE as u64).to_be_bytes());
    info.extend(0b1_0000_1101u16.to_be_bytes()); // flags, flush, FUA, several connections
    option_reply(&mut stream, GO, 3, &info)?;
    option_reply(&mut stream, GO, 1, &[])?;
    loop {
        let head = read(&mut stream, 28)?;
        request(&mut stream, shared, &head)?;
    }
}

fn option_reply(stream: &mut UnixStream, option: u32, kind: u32, data: &[u8]) -> std::io::Result<()> {
    let mut bytes = 0x0003_e889_0455_65a9u64.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    stream.write_all(&bytes)
}

fn request(stream: &mut UnixStream, shared: &Shared, head: &[u8]) -> std::io::Result<()> {
    let (command, len) = (head[7], be32(&head[24..]) as usize);
    let offset = be32(&head[20..]) as usize;
    let mut cookie = head[8..16].to_vec();
    let mut errno = 0u32;
    let mut data = Vec::new();
    match command {
        0 => data = shared.bytes.lock().unwrap()[offset..offset + len].to_vec(),
        1 => {
            let bytes = read(stream, len)?;
            let refused = shared.refuses.load(Ordering::Relaxed);
            if refused != 0 {
                return answer(stream, refused, &cookie, &[]);
            }
            let broken = shared.writes.fetch_add(1, Ordering::Relaxed) == BROKEN_WRITE;
            let fault = if broken { shared.fault } else { Fault::None };
            write(&mut shared.bytes.lock().unwrap(), offset, &bytes, fault);
            match fault {
                Fault::Refuse => errno = 5,
                Fault::WrongCookie => cookie[0] ^= 1,
                Fault::HangUp => return Err(std::io::ErrorKind::Other.into()),
                _ => {}
            }
        }
        2 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
        _ => {}
    }
    answer(stream, errno, &cookie, &data)
}

fn answer(stream: &mut UnixStream, errno: u32, cookie: &[u8], data: &[u8]) -> std::io::Result<()> {
    let mut reply = 0x6744_6698u32.to_be_bytes().to_vec();
    reply.extend(errno.to_be_bytes());
    reply.extend(cookie);
    reply.extend(data);
    stream.write_all(&reply)
}

fn write(disk: &mut [u8], offset: usize, bytes: &[u8], fault: Fault) {
    match fault {
        Fault::Lose => {}
        Fault::Misplace => {
            let at = offset / 2;
            disk[at..at + bytes.len()].copy_from_slice(bytes);
        }
        Fault::Tear => {
            for (sector, new) in disk[offset..].chunks_mut(512).zip(bytes.chunks(512)) {
                sector[..256].copy_from_slice(&new[..256]);
            }
        }
        _ => disk[offset..offset + bytes.len()].copy_from_slice(bytes),
    }
}

fn read(stream: &mut UnixStream, len: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}
