//! What was counted, for Prometheus: `GET /metrics` on the control socket, and on a TCP address if the operator asks for one.
//!
//! A scrape reads the same cumulative counts as the control API ([`super::api::stats`]), so several Prometheus servers do not disturb each
//! other, and nothing runs when nobody asks. What is kept between two scrapes is only the last answer over TCP, for a second
//! ([`listen`]), and what was told of each depth, which must not fall ([`disks`]).
//!
//! - [`families`]: the metrics as families of series, in the types of Prometheus's protobuf exposition. All formats are made of them.
//! - [`disks`], [`process`]: where the series come from. [`latency`]: histograms, classic and native.
//! - [`folder`]: all servers of a folder under one address.
//! - [`text`]: the two text formats. [`accept`]: which format the caller wants. [`listen`]: the TCP address.
//!
//! docs/metrics.md lists every metric; a test compares it with what a server says.

mod accept;
mod disks;
mod families;
mod folder;
mod latency;
pub mod listen;
mod process;
mod text;

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use spile_core::{Error, ErrorKind, Result};

use super::api::view::View;
use accept::Format;
pub use disks::ROOM_METRICS;
use disks::Told;
use families::{Families, Family};

/// How many series a disk has, from few to many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Detail {
    /// The fronts of a disk together, with histograms of reads, writes and flushes: at most 126 series a disk, one for each of its limits, and five for a thin image on a device.
    #[default]
    Disk,
    /// Each front, the disk, and each image and store below it, with histograms of all operations.
    Layer,
    /// As [`Detail::Layer`], and each queue of a front by itself.
    Queue,
}

impl Detail {
    const ALL: [(Self, &'static str); 3] = [(Self::Disk, "disk"), (Self::Layer, "layer"), (Self::Queue, "queue")];
}

impl FromStr for Detail {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(_, name)| *name == text);
        found.map(|(detail, _)| *detail).ok_or_else(|| format!("there is no detail `{text}`; use disk, layer or queue"))
    }
}

impl fmt::Display for Detail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = Self::ALL.iter().find(|(detail, _)| detail == self);
        f.write_str(found.map_or("", |(_, name)| *name))
    }
}

/// Whose series are told.
#[derive(Clone)]
pub enum Source {
    /// This server's.
    Server(Arc<View>),
    /// Those of all servers whose control sockets are in this folder.
    Folder(Arc<Path>),
}

/// Answers scrapes.
#[derive(Clone)]
pub struct Exporter {
    /// Whose series are told.
    source: Source,
    /// How many series a disk has, unless the caller says it.
    detail: Detail,
    /// What was told before.
    told: Arc<Told>,
}

impl Exporter {
    /// Tells the series of `source`, as finely as `detail` says where the caller does not say it.
    pub fn new(source: Source, detail: Detail) -> Self {
        Self { source, detail, told: Arc::default() }
    }

    /// All series now.
    ///
    /// # Errors
    /// `Shutdown` while the server hands over; when the folder cannot be read.
    async fn collect(&self, detail: Detail) -> Result<Vec<Family>> {
        let families = match &self.source {
            Source::Server(view) => {
                let (view, told) = (view.clone(), self.told.clone());
                off_the_thread(move || of_server(&view, detail, &told)).await?
            }
            Source::Folder(folder) => folder::collect(folder, detail).await?,
        };
        Ok(families.into_vec())
    }
}

/// These series in that format.
fn written(families: &[Family], format: Format) -> Vec<u8> {
    match format {
        Format::Protobuf => families::encode(families),
        Format::OpenMetrics => text::open_metrics(families).into_bytes(),
        Format::Text => text::prometheus(families).into_bytes(),
    }
}

fn of_server(view: &View, detail: Detail, told: &Told) -> Result<Families> {
    let mut families = Families::default();
    disks::collect(&mut families, view, detail, told)?;
    process::collect(&mut families);
    Ok(families)
}

/// Does work that takes long beside the thread that hears callers.
///
/// # Errors
/// The work's.
pub async fn off_the_thread<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let panicked = |e| Error::new(ErrorKind::Io, "the thread that works for this call panicked").caused_by(e);
    tokio::task::spawn_blocking(work).await.map_err(panicked)?
}
