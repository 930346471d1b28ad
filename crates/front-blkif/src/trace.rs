//! [`Trace`]: the times at which each request passed each step, to find out where the time goes.
//!
//! Records lie in a file that its readers map; the newest record overwrites the oldest. The file has a header of 64
//! bytes (magic u32, version u32, number of records u32, 0 u32, records written so far u64) and records of 64 bytes.
//! Each record has eight numbers of 64 bits: the request's offset in bytes; the times at which it was taken from the ring, had its
//! memory (copied or mapped), was begun by the disk, was ended by the disk, was copied back, and was shown to the
//! guest, in ns of CLOCK_MONOTONIC; and its length in bytes times 256 plus its operation ([`spile_core::metrics::Op`]). All
//! numbers are little-endian.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use spile_core::metrics::span::{Record, calibrate};
use spile_core::{Error, Result, Segment};

const MAGIC: u32 = 0x5370_7472;
const VERSION: u32 = 2;
const HEADER_BYTES: usize = 64;
const RECORD_BYTES: usize = 64;
const NEXT_AT: usize = 16;

/// The file of records, mapped.
pub struct Trace {
    memory: Segment,
    records: u64,
    next: AtomicU64,
}

impl Trace {
    /// Makes a file at `path` for the times of the last `records` requests. An older file there is replaced.
    ///
    /// # Errors
    /// The system's, with the path.
    pub fn create(path: &Path, records: u32) -> Result<Self> {
        let problem = |source| Error::io("make a trace", source).at_path(path);
        let mut options = OpenOptions::new();
        let file =
            options.read(true).write(true).create(true).truncate(true).mode(0o600).open(path).map_err(problem)?;
        let len = HEADER_BYTES + records as usize * RECORD_BYTES;
        file.set_len(len as u64).map_err(problem)?;
        // Here and not in a ring's task, which would keep its worker from all guests meanwhile.
        calibrate();
        let memory = Segment::map_shared(&file, 0, len).map_err(problem)?;
        for (at, value) in [(4, VERSION), (8, records), (0, MAGIC)] {
            memory.store_u32(at, value, Ordering::Release);
        }
        Ok(Self { memory, records: u64::from(records), next: AtomicU64::new(0) })
    }

    /// Writes the record of a request that has ended.
    pub fn note(&self, request: &Record) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let at = HEADER_BYTES + (number % self.records) as usize * RECORD_BYTES;
        let [load, queue, limit, map, store, commit, trouble, unload, answer, _notify] = request.phases_ns;
        let what = request.what.len_bytes << 8 | request.what.op as u64;
        let loaded = request.taken_ns + load;
        let begun = loaded + queue;
        let ended = begun + limit + map + store + commit + trouble;
        let stored = ended + unload;
        let fields = [request.what.offset_bytes, request.taken_ns, loaded, begun, ended, stored, stored + answer, what];
        for (field, value) in fields.into_iter().enumerate() {
            self.memory.store_u64(at + 8 * field, value, Ordering::Relaxed);
        }
        self.memory.store_u64(NEXT_AT, number + 1, Ordering::Release);
    }
}
