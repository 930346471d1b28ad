//! [`Sharing`]: whether front ends share their guests' memory, which `share=on` of QEMU says and is easily forgotten.
//!
//! Then a front end shares no memory, or files of which it has made a copy of its own for its guest (MAP_PRIVATE): what the guest writes never comes
//! here, and its disk seems to hang. The second shows in the file /proc/PID/maps of its process, when this process may read that.

use std::fmt;
use std::io::Read;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use rustix::fs::{fstat, major, minor};
use rustix::net::sockopt::socket_peercred;

use crate::memory::GuestMemory;

/// What an operator is told.
pub const NOT_SHARED: &str = "the memory of a guest is not shared with this server, so the guest waits for its disk for ever: start it with share=on (memory-backend-memfd), or with <access mode='shared'/> (libvirt)";

/// No longer text is looked at: processes with more mappings are not guests.
const MOST_BYTES: u64 = 16 << 20;

type Hear = dyn Fn(&str) + Send + Sync;

/// Hears, once, that a guest's memory is not shared. Must not wait.
#[derive(Clone, Default)]
pub struct Tell(Option<Arc<Hear>>);

impl Tell {
    /// Has `hear` called.
    pub fn new(hear: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(hear)))
    }
}

impl fmt::Debug for Tell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tell")
    }
}

/// What is known of the front ends of one disk.
#[derive(Default)]
pub(crate) struct Sharing {
    is_missing: AtomicBool,
}

impl Sharing {
    /// A guest was about to use the disk, and its memory is not shared.
    pub fn is_missing(&self) -> bool {
        self.is_missing.load(SeqCst)
    }

    /// Notes that a guest's memory is not shared, and tells it the first time.
    pub fn miss(&self, disk: &str, tell: &Tell) {
        if self.is_missing.swap(true, SeqCst) {
            return;
        }
        tracing::warn!(journal.disk = disk, "vhost-user: {NOT_SHARED}");
        if let Some(hear) = &tell.0 {
            hear(NOT_SHARED);
        }
    }

    /// A guest begins to use the disk by memory that is shared.
    pub fn found(&self) {
        self.is_missing.store(false, SeqCst);
    }
}

/// True when the process at the other end of `socket` is known to have a copy of its own of some of this memory.
pub fn is_private(socket: BorrowedFd<'_>, memory: &GuestMemory) -> bool {
    let Ok(peer) = socket_peercred(socket) else { return false };
    let Ok(file) = std::fs::File::open(format!("/proc/{}/maps", peer.pid.as_raw_pid())) else { return false };
    let mut maps = String::new();
    if file.take(MOST_BYTES).read_to_string(&mut maps).is_err() {
        return false;
    }
    let stats = memory.regions().iter().filter_map(|region| fstat(&region.file).ok());
    stats
        .map(|stat| format!("{:02x}:{:02x} {}", major(stat.st_dev), minor(stat.st_dev), stat.st_ino))
        .any(|file| is_private_in(&maps, &file))
}

/// True when the file `DEVICE INODE` is mapped in this text of /proc/PID/maps (proc(5)), and never shared, but written to.
fn is_private_in(maps: &str, file: &str) -> bool {
    let permissions = maps.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (permissions, device, inode) = (words.nth(1)?, words.nth(1)?, words.next()?);
        (file.split_once(' ') == Some((device, inode))).then_some(permissions)
    });
    let all: Vec<&str> = permissions.collect();
    all.iter().all(|permissions| permissions.ends_with('p')) && all.iter().any(|permissions| permissions.contains('w'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_private_when_it_is_mapped_for_writing_and_never_shared() {
        let maps = "7f00-7f10 rw-p 00000000 00:01 1034  /memfd:ram (deleted)\n\
                    7f20-7f30 rw-s 00000000 00:01 1035  /memfd:shared (deleted)\n\
                    7f40-7f50 rw-p 00000000 00:01 1035  /memfd:shared (deleted)\n\
                    7f60-7f70 r--p 00000000 08:01 1036  /rom\n\
                    7f80-7f90 rw-p 00000000 00:00 0\n";
        let private = |file: &str| is_private_in(maps, file);
        assert!(private("00:01 1034"));
        assert!(!private("00:01 1035") && !private("08:01 1036") && !private("00:01 9") && !private("08:01 1034"));
    }
}
