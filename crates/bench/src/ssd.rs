//! [`Ssd`]: how long transfers take on a solid-state disk with channels, as a model with stated figures.
//!
//! - The disk has N channels, and its pages are striped over them: page k is on channel k modulo N.
//! - A channel serves one page at a time, and each page takes the same time, whether all of it is wanted or a part.
//! - The controller works through the pages of one request in order, and has a few of them under way at a time.
//!
//! So one large request keeps few channels busy, and several requests in flight keep all of them busy. The SSDs of the article "When
//! virtualised storage is faster than bare metal" (2015) behaved like that: 512 KiB in flight as one request came just under 1 GB/s,
//! and as 64 requests of 8 KiB to twice that.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use spile_core::StoreOffset;
use spile_core::metrics::now_ns;
use utoipa::ToSchema;

use crate::slow::Timing;

/// The figures of a solid-state disk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Figures {
    /// Channels.
    pub channels: u32,
    /// The size of a page in bytes.
    pub page_bytes: u64,
    /// How long a channel takes for a page, in microseconds.
    pub page_us: f64,
    /// How many pages of one request are under way at a time.
    pub pages_at_once: u32,
}

impl Default for Figures {
    /// 16 channels with pages of 16 KiB, each in 200 µs; 4 pages of a request at a time. All channels together have 1.3 GB/s, a single
    /// request in flight a quarter of that: no processor is needed for more than that.
    fn default() -> Self {
        Self { channels: 16, page_bytes: 16 << 10, page_us: 200.0, pages_at_once: 4 }
    }
}

/// A solid-state disk at work.
pub struct Ssd {
    figures: Figures,
    /// Until when each channel is taken, in nanoseconds.
    channels: Mutex<Vec<u64>>,
}

impl Ssd {
    /// An idle disk with these figures. Each is one at least.
    pub fn new(figures: Figures) -> Self {
        let figures = Figures {
            channels: figures.channels.max(1),
            page_bytes: figures.page_bytes.max(1),
            pages_at_once: figures.pages_at_once.max(1),
            ..figures
        };
        Self { figures, channels: Mutex::new(vec![0; figures.channels as usize]) }
    }

    /// When a transfer ends that begins at `now_ns`.
    fn end_ns(&self, offset: u64, len_bytes: u64, now_ns: u64) -> u64 {
        let Figures { page_bytes, page_us, pages_at_once, .. } = self.figures;
        let page_ns = (page_us * 1e3) as u64;
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        // When the pages under way end, in order.
        let mut under_way = VecDeque::with_capacity(pages_at_once as usize);
        let mut end_ns = now_ns;
        for page in offset / page_bytes..(offset + len_bytes).div_ceil(page_bytes) {
            let begin_ns =
                if under_way.len() < pages_at_once as usize { now_ns } else { under_way.pop_front().unwrap_or(now_ns) };
            let channel = (page % channels.len() as u64) as usize;
            channels[channel] = channels[channel].max(begin_ns) + page_ns;
            under_way.push_back(channels[channel]);
            end_ns = end_ns.max(channels[channel]);
        }
        end_ns
    }
}

impl Timing for Ssd {
    fn read(&self, offset: StoreOffset, len_bytes: u64) -> Duration {
        let now_ns = now_ns();
        Duration::from_nanos(self.end_ns(offset.0, len_bytes, now_ns) - now_ns)
    }

    fn write(&self, offset: StoreOffset, len_bytes: u64) -> Duration {
        self.read(offset, len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The time in microseconds that `len` bytes take, in parts of `part` bytes that begin together.
    fn time_us(ssd: &Ssd, len: u64, part: u64) -> u64 {
        (0..len).step_by(part as usize).map(|at| ssd.end_ns(at, part, 0)).max().unwrap() / 1000
    }

    #[test]
    fn one_request_has_a_few_pages_under_way_and_several_have_all_channels() {
        let time = |part| time_us(&Ssd::new(Figures::default()), 512 << 10, part);
        // 32 pages, 4 at a time.
        assert_eq!(time(512 << 10), 1600);
        // 8 parts of 4 pages: two rounds of all 16 channels.
        assert_eq!(time(64 << 10), 400);
        assert!(time(128 << 10) < 800);
        // A part of a page takes as long as the page: both halves have to wait for the channel.
        assert_eq!(time(8 << 10), 800);
    }

    #[test]
    fn a_channel_serves_one_page_at_a_time() {
        let ssd = Ssd::new(Figures::default());
        assert_eq!([0, 0, 1].map(|page| ssd.end_ns(page * (16 << 10), 4096, 0)), [200_000, 400_000, 200_000]);
        assert_eq!(ssd.end_ns(0, 1, 1_000_000), 1_200_000, "an idle channel begins at once");
    }
}
