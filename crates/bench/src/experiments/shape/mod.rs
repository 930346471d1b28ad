//! `shape`: is a guest faster than bare metal when its large requests are split?
//!
//! After the article "When virtualised storage is faster than bare metal" (2015): large reads at depth 1, bare and by a guest on
//! vhost-user, whose disk keeps the requests as they are, splits them into parts of one size, or learns how to split them (`auto`).
//! The sides take turns, in an order that changes from round to round.
//!
//! The store is a solid-state disk with stated figures ([`crate::ssd`]), whose bytes lie nowhere: so the picture is the same on any machine. A
//! device or file of this machine can be given beside it, and then the last line says whether splitting pays there.

mod served;
mod show;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Files, Locator, OpenMode, Result, Store as _};
use spile_engine::{Config, Engine};
use spile_node::Shape;
use spile_store::{AnyStore, CacheMode, NullStore, OsFiles};
use utoipa::ToSchema;

use super::world::Folder;
use super::{HostFacts, Outcome};
use crate::slow::SlowStore;
use crate::ssd::{Figures, Ssd};
use served::Sides;
pub use show::{figures, found, text};

/// The length of the modelled disk in bytes.
const MODEL_BYTES: u64 = 8 << 30;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// Sizes of the reads in bytes.
    pub sizes: Vec<u64>,
    /// The size of the parts of the side that splits, in bytes (a power of two).
    pub part_bytes: u32,
    /// Rounds of one run for each side and size.
    pub rounds: u32,
    /// How long a run takes.
    pub runtime: Duration,
    /// How long `auto` may learn with each size before it is measured.
    pub learning: Duration,
    /// The figures of the modelled disk.
    pub model: Figures,
    /// A device or raw file of this machine that is read, too.
    pub store: Option<PathBuf>,
    /// A short run.
    pub is_quick: bool,
}

impl Parameters {
    /// As in the article, or little.
    pub fn new(is_quick: bool) -> Self {
        let (rounds, runtime_ms, learning_ms) = if is_quick { (1, 200, 2000) } else { (5, 1000, 4000) };
        let sizes = if is_quick { vec![1 << 20] } else { vec![512 << 10, 1 << 20, 2 << 20, 4 << 20] };
        Self {
            sizes,
            part_bytes: 64 << 10,
            rounds,
            runtime: Duration::from_millis(runtime_ms),
            learning: Duration::from_millis(learning_ms),
            model: Figures::default(),
            store: None,
            is_quick,
        }
    }

    fn check(&self) -> Result<()> {
        let invalid = |message: &str| Err(Error::new(ErrorKind::InvalidInput, message));
        match () {
            _ if self.sizes.is_empty() || self.rounds == 0 || self.runtime.is_zero() => {
                invalid("there is nothing to measure")
            }
            _ if self.sizes.iter().any(|size| !(4096..=16 << 20).contains(size) || !size.is_power_of_two()) => {
                invalid("sizes are powers of two from 4k to 16M")
            }
            _ => Ok(()),
        }
    }
}

/// [`Parameters`] as figures have them.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Asked {
    /// Sizes of the reads in bytes.
    pub request_sizes_bytes: Vec<u64>,
    /// Reads that the client keeps in flight.
    pub queue_depth: u32,
    /// The size of the parts of the side that splits, in bytes.
    pub part_bytes: u32,
    /// Rounds.
    pub rounds: u32,
    /// How long a run took, in seconds.
    pub runtime_s: f64,
    /// The figures of the modelled disk.
    pub model: Figures,
    /// The device or file of this machine, if one was given.
    #[schema(value_type = Option<String>)]
    pub store: Option<PathBuf>,
    /// True for a short run, whose figures show that it works.
    #[serde(default)]
    pub quick: bool,
}

/// Who reads, and what is done with the sizes of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The host, from the bare store.
    Bare,
    /// A guest; requests stay as they are.
    Off,
    /// A guest; requests are split into parts of one size.
    Split,
    /// A guest; the disk has learned how to split.
    Auto,
}

impl Side {
    const ALL: [Self; 4] = [Self::Bare, Self::Off, Self::Split, Self::Auto];

    fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Off => "guest, off",
            Self::Split => "guest, split",
            Self::Auto => "guest, auto",
        }
    }

    /// The shape of the guest's disk.
    fn shape(self, part_bytes: u32) -> Shape {
        match self {
            Self::Bare | Self::Off => Shape::Off,
            Self::Split => Shape::Split(part_bytes),
            Self::Auto => Shape::Auto,
        }
    }
}

/// What is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Store {
    /// The modelled disk.
    Model,
    /// The device or file of this machine.
    Given,
}

/// One run.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// What is read.
    pub store: Store,
    /// Who reads.
    pub side: Side,
    /// Bytes of a read.
    pub request_bytes: u64,
    /// The round, from 0.
    pub round: u32,
    /// Bytes read each second.
    pub bytes_per_s: f64,
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// `InvalidInput` when there is nothing to measure; else when the given store cannot be opened or a read fails.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Asked, Row>> {
    parameters.check()?;
    let host = HostFacts::at_some(parameters.store.as_deref());
    let folder = Folder::new()?;
    let engine = Engine::start(Config { workers: 1, ..Config::default() })?;
    let mut rows = Vec::new();
    let given = parameters.store.as_deref();
    let share = if given.is_some() { 0.5 } else { 1.0 };
    let ssd = Arc::new(Ssd::new(parameters.model));
    let model = || Ok(SlowStore::new(AnyStore::Null(NullStore::new(MODEL_BYTES)), ssd.clone()));
    let sides = Sides::new(&engine, folder.path(), parameters, model)?;
    measure(&sides, Store::Model, parameters, &mut rows, &mut |what, done| progress(what, done * share))?;
    drop(sides);
    if let Some(path) = given {
        let sides = Sides::new(&engine, folder.path(), parameters, || open(&engine, path.into()))?;
        measure(&sides, Store::Given, parameters, &mut rows, &mut |what, done| progress(what, share + done * share))?;
    }
    engine.shutdown();
    let asked = Asked {
        request_sizes_bytes: parameters.sizes.clone(),
        queue_depth: 1,
        part_bytes: parameters.part_bytes,
        rounds: parameters.rounds,
        runtime_s: parameters.runtime.as_secs_f64(),
        model: parameters.model,
        store: parameters.store.clone(),
        quick: parameters.is_quick,
    };
    Ok(Outcome { experiment: "shape".into(), host, parameters: asked, rows })
}

/// A device or file for reading, around the page cache.
fn open(engine: &Engine, at: Locator) -> Result<SlowStore> {
    let store =
        engine.run_on(0, move || async move { OsFiles::new(CacheMode::Direct).open(&at, OpenMode::ReadOnly).await })?;
    match store.len_bytes() {
        len if len < 64 << 20 => {
            Err(Error::new(ErrorKind::InvalidInput, "it has less than 64 MiB").at_path(store.path()))
        }
        _ => Ok(SlowStore::no_slower(store)),
    }
}

fn measure(
    sides: &Sides,
    store: Store,
    parameters: &Parameters,
    rows: &mut Vec<Row>,
    progress: &mut dyn FnMut(&str, f64),
) -> Result<()> {
    for &size in &parameters.sizes {
        progress("auto learns", 0.0);
        sides.learn(size, parameters.learning)?;
    }
    let runs = parameters.rounds as usize * parameters.sizes.len() * Side::ALL.len();
    let mut done = 0;
    for round in 0..parameters.rounds {
        for &request_bytes in &parameters.sizes {
            for number in 0..Side::ALL.len() {
                let side = Side::ALL[(number + round as usize) % Side::ALL.len()];
                progress(&format!("{}, {} KiB", side.name(), request_bytes >> 10), done as f64 / runs as f64);
                // Other places in each run: a device may have those of the last one at hand.
                let bytes_per_s = sides.read(side, request_bytes, parameters.runtime, rows.len() as u64 + 1)?;
                rows.push(Row { store, side, request_bytes, round, bytes_per_s });
                done += 1;
            }
        }
    }
    Ok(())
}
