//! What a front end asks for, and what a back end offers.

use std::time::Duration;

use spile_core::Result;
use spile_xen::blkif::{Abi, split};
use spile_xen::store::{Tx, XenStore};

/// How a front end behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlkfrontOptions {
    /// The layout of requests and responses.
    pub abi: Abi,
    /// The ring has at most 2 to this many pages; fewer where the back end offers fewer.
    pub ring_order: u32,
    /// The number of queues. The front end uses fewer where the back end offers fewer.
    pub queues: u32,
    /// Responses come in rings of their own, of at most 2 to this many pages, where the back end offers that
    /// ([`spile_xen::blkif::split`]); else, and with `None`, in the ring of requests.
    pub split_response_order: Option<u32>,
    /// Requests in flight in each queue, at most the ring's slots; with split rings at most those of the ring of
    /// responses.
    pub depth: usize,
    /// The largest number of bytes of data in a request. The number of segments may allow less.
    pub data_bytes: u32,
    /// The most segments of an indirect request; 0 or up to 11: none.
    pub indirect_segments: u32,
    /// Uses persistent grants where the back end offers them: pages stay granted, and the guest copies.
    pub persistent: bool,
    /// No two pages of a request lie side by side.
    pub scatter: bool,
    /// Writes `ring-ref0` and `ring-page-order` even for a ring of one page, as some front ends do.
    pub numbered_ring_ref: bool,
    /// How long the back end may take over a step of the handshake.
    pub patience: Duration,
}

impl Default for BlkfrontOptions {
    fn default() -> Self {
        Self {
            abi: Abi::X86_64,
            ring_order: 0,
            queues: 1,
            split_response_order: None,
            depth: 32,
            data_bytes: 44 << 10,
            indirect_segments: 0,
            persistent: false,
            scatter: false,
            numbered_ring_ref: false,
            patience: Duration::from_secs(600),
        }
    }
}

/// What a back end offers, before the front end says where its ring is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// `feature-flush-cache`.
    pub flush: bool,
    /// `feature-barrier`.
    pub barrier: bool,
    /// `feature-discard`.
    pub discard: bool,
    /// `discard-secure`.
    pub discard_secure: bool,
    /// `feature-persistent`.
    pub persistent: bool,
    /// `feature-max-indirect-segments`; 0: none.
    pub max_indirect_segments: u32,
    /// `max-ring-page-order`.
    pub max_ring_order: u32,
    /// `multi-queue-max-queues`, at least 1.
    pub max_queues: u32,
    /// `feature-spile-split-rings`.
    pub splits_rings: bool,
}

impl Features {
    pub(super) fn read(store: &mut XenStore, backend: &str) -> Result<Self> {
        let mut number = |key: &str| read_number(store, backend, key);
        Ok(Self {
            flush: number("feature-flush-cache")? == 1,
            barrier: number("feature-barrier")? == 1,
            discard: number("feature-discard")? == 1,
            discard_secure: number("discard-secure")? == 1,
            persistent: number("feature-persistent")? == 1,
            max_indirect_segments: number("feature-max-indirect-segments")? as u32,
            max_ring_order: number("max-ring-page-order")? as u32,
            max_queues: number("multi-queue-max-queues")?.max(1) as u32,
            splits_rings: number(split::FEATURE)? == 1,
        })
    }
}

/// The disk, as the back end describes it when it has connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    /// The size in units of 512 bytes, whatever `sector_bytes` says.
    pub sectors: u64,
    /// `sector-size`.
    pub sector_bytes: u32,
    /// `physical-sector-size`, or the other where it is missing.
    pub physical_sector_bytes: u32,
    /// `info`: VDISK_* bits.
    pub info: u32,
    /// `discard-granularity` in bytes; 0 where it is missing.
    pub discard_granularity: u32,
    /// `discard-alignment` in bytes.
    pub discard_alignment: u32,
}

impl Disk {
    /// Its size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.sectors.saturating_mul(512)
    }

    /// True when the back end refuses writes (VDISK_READONLY).
    pub fn is_readonly(&self) -> bool {
        self.info & 4 != 0
    }

    pub(super) fn read(store: &mut XenStore, backend: &str) -> Result<Self> {
        let mut number = |key: &str| read_number(store, backend, key);
        let sector_bytes = number("sector-size")? as u32;
        let physical = number("physical-sector-size")? as u32;
        Ok(Self {
            sectors: number("sectors")?,
            sector_bytes,
            physical_sector_bytes: if physical == 0 { sector_bytes } else { physical },
            info: number("info")? as u32,
            discard_granularity: number("discard-granularity")? as u32,
            discard_alignment: number("discard-alignment")? as u32,
        })
    }
}

/// A number in a folder; 0 where there is none.
pub(super) fn read_number(store: &mut XenStore, folder: &str, key: &str) -> Result<u64> {
    let text = store.read_optional(Tx::NONE, &format!("{folder}/{key}"))?;
    Ok(text.and_then(|text| text.trim().parse().ok()).unwrap_or(0))
}
