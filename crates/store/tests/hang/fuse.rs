//! A file system of three empty-looking files, by the kernel's own FUSE interface (linux/fuse.h), that can stop answering. Reads
//! give zeroes and writes are thrown away: only that they end, or do not end, matters here.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};

use crate::common::folder;
use crate::guard::Guardian;

pub const FILE_BYTES: u64 = 64 << 20;
/// The files; their nodes are numbered from 2 on.
const NAMES: [&str; 3] = ["disk", "closed", "opened"];

const ROOT: u64 = 1;
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;
const FALLOCATE: u32 = 43;
const LSEEK: u32 = 46;

/// The file system. At the end it answers again, and is unmounted.
pub struct Fuse {
    dir: tempfile::TempDir,
    gate: Arc<Gate>,
    guardian: Option<Guardian>,
}

#[derive(Default)]
struct Gate {
    is_shut: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut is_shut = self.is_shut.lock().unwrap();
        while *is_shut {
            is_shut = self.opened.wait(is_shut).unwrap();
        }
    }

    fn shut(&self, shut: bool) {
        *self.is_shut.lock().unwrap() = shut;
        self.opened.notify_all();
    }
}

impl Fuse {
    /// Mounts it. The error says why that cannot be done here.
    pub fn new() -> Result<Self, String> {
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = device.map_err(|error| format!("/dev/fuse: {error}"))?;
        // The program that mounts has to have it, too.
        rustix::io::fcntl_setfd(&device, rustix::io::FdFlags::empty()).unwrap();
        let dir = folder();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let arguments = ["-i", "-t", "fuse", "-o", &options, "spile-test"];
        let done = Command::new("mount").args(arguments).arg(dir.path()).output();
        let done = done.map_err(|error| format!("mount: {error}"))?;
        if !done.status.success() {
            return Err(String::from_utf8_lossy(&done.stderr).trim().to_owned());
        }
        rustix::io::fcntl_setfd(&device, rustix::io::FdFlags::CLOEXEC).unwrap();
        // The first command has the kernel fail what waits for an answer, also when this process has been killed.
        let at = dir.path().display();
        let guardian = Some(Guardian::new(&format!("umount -f '{at}'; umount -l '{at}'")));
        let gate = Arc::new(Gate::default());
        let ours = gate.clone();
        // The thread ends when the kernel has let go of the file system.
        std::thread::spawn(move || serve(device, &ours));
        Ok(Self { dir, gate, guardian })
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// From now on, no request is answered.
    pub fn stop(&self) {
        self.gate.shut(true);
    }

    /// Answers all that were not answered, and goes on.
    pub fn go_on(&self) {
        self.gate.shut(false);
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        self.go_on();
        drop(self.guardian.take());
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn serve(mut device: File, gate: &Gate) {
    let mut request = vec![0; (1 << 20) + 4096];
    while let Ok(len) = device.read(&mut request) {
        let request = &request[..len];
        let (code, unique) = (u32_at(request, 4), u64_at(request, 8));
        if [FORGET, BATCH_FORGET, INTERRUPT].contains(&code) {
            continue;
        }
        gate.pass();
        let answer = answer(code, u64_at(request, 16), &request[40..]);
        let (errno, body) = answer.map_or_else(|errno| (-errno, Vec::new()), |body| (0, body));
        let mut reply = (16 + body.len() as u32).to_ne_bytes().to_vec();
        reply.extend(i32::to_ne_bytes(errno));
        reply.extend(unique.to_ne_bytes());
        reply.extend(body);
        // It fails when nobody waits for the answer any more.
        let _ = device.write_all(&reply);
    }
}

fn answer(code: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
    match code {
        INIT => Ok(init()),
        LOOKUP => lookup(body),
        GETATTR | SETATTR => Ok([vec![0; 16], attributes(node)].concat()),
        OPEN => Ok(vec![0; 16]),
        READ => {
            let end = (u64_at(body, 8) + u64::from(u32_at(body, 16))).min(FILE_BYTES);
            Ok(vec![0; end.saturating_sub(u64_at(body, 8)) as usize])
        }
        WRITE => Ok([body[16..20].to_vec(), vec![0; 4]].concat()),
        STATFS => Ok(vec![0; 80]),
        LSEEK if u32_at(body, 16) == libc::SEEK_HOLE as u32 => Ok(FILE_BYTES.to_ne_bytes().to_vec()),
        LSEEK => Ok(body[8..16].to_vec()),
        RELEASE | FSYNC | FLUSH | FALLOCATE => Ok(Vec::new()),
        _ => Err(libc::ENOSYS),
    }
}

/// `struct fuse_init_out`: version 7.31, without any feature.
fn init() -> Vec<u8> {
    let words: [u32; 4] = [7, 31, 128 << 10, 0];
    let mut out: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    out.extend([200u16, 200].iter().flat_map(|half| half.to_ne_bytes()));
    out.extend((128u32 << 10).to_ne_bytes());
    out.resize(64, 0);
    out
}

fn lookup(name: &[u8]) -> Result<Vec<u8>, i32> {
    let index = NAMES.iter().position(|known| name == [known.as_bytes(), b"\0"].concat());
    let node = index.ok_or(libc::ENOENT)? as u64 + 2;
    let mut out = node.to_ne_bytes().to_vec();
    out.resize(40, 0);
    Ok([out, attributes(node)].concat())
}

/// `struct fuse_attr`.
fn attributes(node: u64) -> Vec<u8> {
    let (mode, size) = if node == ROOT { (0o040_755u32, 0) } else { (0o100_644, FILE_BYTES) };
    let longs = [node, size, size / 512, 0, 0, 0];
    let words = [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0];
    let mut out: Vec<u8> = longs.iter().flat_map(|long| long.to_ne_bytes()).collect();
    out.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
    out
}
