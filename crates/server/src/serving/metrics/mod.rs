//! What was counted, for Prometheus: `GET /metrics` on the control socket, and on a TCP address if the operator asks for one.
//!
//! A scrape reads the same cumulative counts as the control API ([`super::api::stats`]). The server keeps nothing between two
//! scrapes, so several Prometheus servers do not disturb each other, and nothing runs when nobody asks.
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

use spile_core::Result;

use super::api::view::View;
use accept::Format;
use families::Families;

/// How many series a disk has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Detail {
    /// The fronts of a disk together, with histograms of reads, writes and flushes: at most 121 series a disk.
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
    pub source: Source,
    /// How many series a disk has, unless the caller says it.
    pub detail: Detail,
}

/// The answer to a scrape.
pub struct Exposition {
    /// The format, as the header `content-type` has it.
    pub content_type: &'static str,
    /// All series.
    pub body: Vec<u8>,
}

impl Exporter {
    /// All series now, in the format that the header `accept` prefers.
    ///
    /// # Errors
    /// `Shutdown` while the server hands over; when the folder cannot be read.
    pub async fn answer(&self, accept: &str, detail: Option<Detail>) -> Result<Exposition> {
        let format = accept::choose(accept);
        let detail = detail.unwrap_or(self.detail);
        let families = match &self.source {
            Source::Server(view) => of_server(view, detail)?,
            Source::Folder(folder) => folder::collect(folder, detail).await?,
        };
        let families = families.into_vec();
        let body = match format {
            Format::Protobuf => families::encode(&families),
            Format::OpenMetrics => text::open_metrics(&families).into_bytes(),
            Format::Text => text::prometheus(&families).into_bytes(),
        };
        Ok(Exposition { content_type: format.content_type(), body })
    }
}

fn of_server(view: &View, detail: Detail) -> Result<Families> {
    let mut families = Families::default();
    disks::collect(&mut families, view, detail)?;
    process::collect(&mut families);
    Ok(families)
}
