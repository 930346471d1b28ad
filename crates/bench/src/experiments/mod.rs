//! Experiments: measurements that anyone can repeat. [`about`] says what each of them shows, and which article it repeats.
//!
//! - Queues and sizes of requests: [`depth`] shows how many requests wait at each layer. [`shape`] shows what splitting them brings, and
//!   [`tune`] which sizes suit a device.
//! - What lies below a disk: [`layers`] sets a file beside a partition and a volume, [`geometry`] one address beside another, and
//!   [`warmup`] small amounts of data beside large ones. [`transfer`] moves their bytes.
//! - Many disks: [`density`] shows what idle ones cost the host, and [`crowd`] what they cost a busy one. [`hung`] has two disks on one worker,
//!   and shows what the one feels when the other's store stops answering. [`limit`] shows whether limits hold what they promise. [`exchange`] has a disk in this process, and shows what its
//!   clients feel of an exchange of graphs.
//! - The life of a disk: [`snapshot`] and [`merge`] show what guests feel while their disks' images are changed, [`checkpoint`] what it costs them that
//!   changes are tracked. [`promises`] has the rest of what is promised of it, line by line. [`live`] starts the server and the guests of all four.
//! - Ways to a Xen guest's memory: [`paths`] has one guest and one disk, and shows where a request's time goes; [`aggregate`] has many
//!   of both. There is a process for each disk ([`world`] starts them), and one for each guest ([`guest`]). On a host without Xen
//!   the guests are those of `spile_lab::xen`: the order of the paths and the shape of their curves mean something there, Xen's
//!   absolute costs do not.

pub mod about;
pub mod aggregate;
pub mod checkpoint;
pub mod crowd;
pub mod density;
pub mod depth;
mod engine_transfer;
pub mod exchange;
mod filled;
pub mod findings;
pub mod folder;
pub mod geometry;
pub mod guest;
mod host;
pub mod hung;
pub mod layers;
pub mod limit;
mod live;
pub mod merge;
pub mod paths;
pub mod plot;
pub mod process;
pub mod promises;
mod ratios;
pub mod rings;
pub mod sample;
pub mod shape;
pub mod snapshot;
pub mod trace;
pub mod transfer;
pub mod tune;
mod usage;
pub mod warmup;
pub mod world;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use comfy_table::{Cell, CellAlignment, LineStyle, Table, TableStyle};
use serde::{Deserialize, Serialize};
use spile_core::{Error, Result, ResultExt};
use spile_lab::xen::blkfront::Op;

pub use host::HostFacts;
use plot::Figure;
use utoipa::ToSchema;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

impl Direction {
    /// Its name in figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }

    fn op(self) -> Op {
        match self {
            Self::Read => Op::Read,
            Self::Write => Op::Write,
        }
    }
}

/// What came of an experiment. `spile report` reads it again, so rows and parameters are deserialized as well, and figures are made
/// of it alone. All parameters have a key `quick`, which is true for a short run: its figures have a mark.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Outcome<P, R> {
    /// Its name.
    pub experiment: String,
    /// Where and when.
    pub host: HostFacts,
    /// What was asked for.
    pub parameters: P,
    /// The figures.
    pub rows: Vec<R>,
}

/// The sizes from 512 bytes to 4 MiB, each twice the one before.
pub fn all_sizes() -> Vec<u64> {
    (9..=22).map(|power| 1 << power).collect()
}

/// Puts a text file into `dir`, which is made if it is not there; its path. An older one of that name is there until the new one is whole.
///
/// # Errors
/// With the path that could not be written.
pub fn save(dir: &Path, name: &str, text: &str) -> Result<PathBuf> {
    std::fs::create_dir_all(dir).map_err(|e| Error::io("make the folder", e)).at_path(dir)?;
    let (path, new) = (dir.join(name), dir.join(format!(".{name}.new")));
    // What a killed run has left, or a link that somebody else has put there, is not written to.
    let _ = std::fs::remove_file(&new);
    let written = File::create_new(&new).and_then(|mut file| file.write_all(text.as_bytes()));
    let written = written.and_then(|()| std::fs::rename(&new, &path));
    if written.is_err() {
        let _ = std::fs::remove_file(&new);
    }
    written.map_err(|e| Error::io("cannot write", e)).at_path(&path)?;
    Ok(path)
}

/// At most four of `sizes`, evenly apart, with the first and the last: a figure has room for so many panels.
fn few(sizes: &[u64]) -> Vec<u64> {
    const MOST: usize = 4;
    match sizes.len() {
        0..=MOST => sizes.to_vec(),
        count => (0..MOST).map(|number| sizes[number * (count - 1) / (MOST - 1)]).collect(),
    }
}

/// The mark of a figure of a short run.
fn quick_mark(is_quick: bool) -> Option<String> {
    is_quick.then(|| plot::QUICK.to_owned())
}

/// Figures and the names of their files, without the extension.
pub type Figures = Vec<(String, Figure)>;

/// Lines above, below and under the header: what is between them has many rows.
const STYLE: TableStyle = TableStyle::new()
    .top_border(LineStyle::none().fill('─').junction('─'))
    .header_separator(LineStyle::none().fill('─').junction('─'))
    .bottom_border(LineStyle::none().fill('─').junction('─'));

fn table(header: impl IntoIterator<Item = String>) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE);
    table.set_header(header.into_iter().map(Cell::new));
    table
}

fn right(text: impl Into<String>) -> Cell {
    Cell::new(text.into()).set_alignment(CellAlignment::Right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_of_many_sizes_are_evenly_apart() {
        assert_eq!(few(&[1, 2, 3]), [1, 2, 3]);
        assert_eq!(few(&all_sizes()), [512, 8 << 10, 128 << 10, 4 << 20]);
    }
}
