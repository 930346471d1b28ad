//! vhost-user-blk under load: requests in the memory that a guest of ours shares with the server.

use std::path::Path;
use std::time::Duration;

use spile_core::{MAX_REQUEST_BYTES, Result};
use spile_lab::vhost::proto::feature;
use spile_lab::vhost::{Device, DeviceOptions, LinkState, Queue, QueueOptions, Watch};

use super::guest::GuestTransport;
use super::transport::{Endpoint, Info, Shape};

/// How our guest behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VhostOptions {
    /// It looks for answers all the time instead of sleeping until it is called.
    pub poll: bool,
    /// Its memory has pages of 2 MiB.
    pub huge_pages: bool,
    /// Its requests' data lie in scattered segments of so many bytes; `None`: in one piece.
    pub segment_bytes: Option<u32>,
    /// It goes on over a restart of the server, and waits so long for it.
    pub reconnect: Option<Duration>,
}

/// A connected device.
pub struct VhostEndpoint {
    device: Device,
    queues: u16,
    options: VhostOptions,
}

impl VhostEndpoint {
    /// Connects to the server at `path`, for so many queues.
    ///
    /// # Errors
    /// As [`Device::connect`].
    pub fn connect(path: &Path, queues: u32, options: VhostOptions) -> Result<Self> {
        let device = Device::connect(path, DeviceOptions::default())?;
        Ok(Self { device, queues: queues.try_into().unwrap_or(u16::MAX), options })
    }
}

impl Endpoint for VhostEndpoint {
    type Ready = GuestTransport<Queue>;

    fn info(&self) -> Info {
        let (config, features) = (self.device.config(), self.device.features());
        let segment = self.options.segment_bytes.unwrap_or(u32::MAX).min(config.max_segment_bytes(features));
        let max_bytes = u64::from(config.max_segments(features)) * u64::from(segment);
        Info {
            size_bytes: config.size_bytes(),
            read_only: features & feature::BLK_RO != 0,
            flush: features & feature::BLK_FLUSH != 0,
            fua: false,
            min_block_bytes: config.unit_bytes(features),
            max_block_bytes: max_bytes.min(MAX_REQUEST_BYTES) as u32,
        }
    }

    fn run<R>(mut self, shape: Shape, run: impl FnOnce(Vec<GuestTransport<Queue>>) -> Result<R>) -> Result<(R, u32)> {
        let queues = self.device.start(&QueueOptions {
            queues: self.queues,
            depth: shape.depth.try_into().unwrap_or(u16::MAX),
            data_bytes: shape.block_bytes,
            segment_bytes: self.options.segment_bytes,
            huge_pages: self.options.huge_pages,
            ..QueueOptions::default()
        })?;
        let link = self.device.link().clone();
        let watch = Watch::start(self.device, self.options.reconnect, None)?;
        let new = |queue| GuestTransport::new(queue, shape, self.options.poll);
        let result = run(queues.into_iter().map(new).collect());
        let device = watch.stop();
        if link.state() == LinkState::Up {
            // The orderly end. Whether the server hears it changes nothing.
            let _ = device.stop();
        }
        Ok((result?, link.reconnects()))
    }
}
