//! A Xen guest of the stand-in under load: its disk is made for it, and taken away again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use spile_core::{Error, ErrorKind, MAX_REQUEST_BYTES, Result};
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Queue};
use spile_lab::xen::toolstack::{Vbd, add_vbd, detach_vbd, wait_closed};
use spile_lab::xen::{Blkfront, Guest};
use spile_xen::DomId;
use spile_xen::blkif::Abi;
use spile_xen::store::XenStore;

use super::guest::GuestTransport;
use super::transport::{Endpoint, Info, Shape};

/// How long a back end may take to serve a disk, or to let it go.
const PATIENCE: Duration = Duration::from_secs(30);
/// The guest's memory, of which what is not used costs nothing.
const GUEST_BYTES: usize = 2 << 30;
/// Domains for guests that come and go. Others have small numbers.
const FIRST_DOMAIN: u32 = 1000;
const DOMAINS: u32 = 30_000;

/// How our guest behaves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestOptions {
    /// Its number, if not just any.
    pub domain: Option<u16>,
    /// What is served: the key `params`.
    pub params: Option<String>,
    /// The key `spile-access`: how the back end reaches our memory.
    pub access: Option<String>,
    /// It looks for answers all the time instead of sleeping until it is called.
    pub poll: bool,
    /// Its ring has 2 to this many pages.
    pub ring_order: u32,
    /// Responses come in rings of their own of 2 to this many pages, which the back end has to offer.
    pub split_responses: Option<u32>,
    /// Segments of an indirect request at most; 0: none.
    pub indirect_segments: u32,
    /// Its structures are those of a guest of 32 bits.
    pub is_32_bit: bool,
}

/// A disk that our guest has seen.
pub struct BlkifEndpoint {
    guest: Arc<Guest>,
    disk: AttachedDisk,
    info: Info,
    queues: u32,
    options: GuestOptions,
}

/// A disk that the toolstack has made, and takes away again.
struct AttachedDisk {
    vbd: Vbd,
    xenstored: PathBuf,
}

impl Drop for AttachedDisk {
    fn drop(&mut self) {
        let Ok(mut store) = XenStore::open(&self.xenstored) else { return };
        if detach_vbd(&mut store, &self.vbd).is_ok() {
            let _ = wait_closed(&mut store, &self.vbd, PATIENCE);
        }
        for path in [self.vbd.frontend_path(), self.vbd.backend_path()] {
            let _ = store.remove(spile_xen::store::Tx::NONE, &path);
        }
    }
}

impl BlkifEndpoint {
    /// Makes a guest on the stand-in in `dir`, and a disk for it.
    ///
    /// # Errors
    /// When there is no stand-in, or nobody serves the disk; `Unsupported` when rings shall be split and the back end
    /// does not offer that.
    pub fn connect(dir: &Path, queues: u32, options: GuestOptions) -> Result<Self> {
        let params = options.params.clone().ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, "it is not said what to serve").hint("say --params [vhd:|raw:]PATH")
        })?;
        let any = (FIRST_DOMAIN + std::process::id() % DOMAINS) as u16;
        let guest = Arc::new(Guest::create(dir, DomId(options.domain.unwrap_or(any)), GUEST_BYTES)?);
        let mut vbd = Vbd::new(guest.id(), params);
        vbd.extra.extend(options.access.clone().map(|access| ("spile-access".to_owned(), access)));
        let xenstored = dir.join("xenstored");
        let mut store = XenStore::open(&xenstored)?;
        add_vbd(&mut store, &vbd)?;
        let disk = AttachedDisk { vbd, xenstored };
        let wanted = BlkfrontOptions { patience: PATIENCE, ..BlkfrontOptions::default() };
        let mut front = Blkfront::new(guest.clone(), disk.vbd.device, wanted)?;
        let rings = front.start()?;
        let (seen, features) = (front.disk(), front.features());
        let most = if options.indirect_segments > 11 { options.indirect_segments } else { 11 };
        let info = Info {
            size_bytes: seen.size_bytes(),
            read_only: seen.is_readonly(),
            flush: features.flush,
            fua: false,
            min_block_bytes: seen.sector_bytes,
            max_block_bytes: (most.min(features.max_indirect_segments.max(11)) * 4096).min(MAX_REQUEST_BYTES as u32),
        };
        front.stop(rings)?;
        if options.split_responses.is_some() && !features.splits_rings {
            let what = "the back end does not offer rings of their own for responses";
            return Err(Error::new(ErrorKind::Unsupported, what)
                .hint("start spile xen-backend with --split-rings, or leave --split-responses out"));
        }
        Ok(Self { guest, disk, info, queues, options })
    }
}

impl Endpoint for BlkifEndpoint {
    type Ready = GuestTransport<Queue>;

    fn info(&self) -> Info {
        self.info
    }

    fn run<R>(self, shape: Shape, run: impl FnOnce(Vec<GuestTransport<Queue>>) -> Result<R>) -> Result<(R, u32)> {
        let Self { guest, disk, queues, options, .. } = self;
        let wanted = BlkfrontOptions {
            abi: if options.is_32_bit { Abi::X86_32 } else { Abi::X86_64 },
            ring_order: options.ring_order,
            split_response_order: options.split_responses,
            queues,
            depth: shape.depth as usize,
            data_bytes: shape.block_bytes,
            indirect_segments: options.indirect_segments,
            persistent: true,
            patience: PATIENCE,
            ..BlkfrontOptions::default()
        };
        let mut front = Blkfront::new(guest, disk.vbd.device, wanted)?;
        let rings = front.restart()?;
        if rings.len() < queues as usize || rings.iter().any(|ring| ring.slots() < shape.depth as usize) {
            let what = "the back end offers fewer queues, or a smaller ring, than the load needs";
            return Err(Error::new(ErrorKind::Unsupported, what)
                .hint("use fewer --queues, a lower --depth, a higher --ring-order or --split-responses"));
        }
        let transports = rings.into_iter().map(|ring| GuestTransport::new(ring, shape, options.poll)).collect();
        let result = run(transports)?;
        // The guest goes with its process; the disk is taken away by its drop.
        front.set_state(spile_lab::xen::state::CLOSED)?;
        drop(disk);
        Ok((result, 0))
    }
}
