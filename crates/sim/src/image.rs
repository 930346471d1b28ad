//! The images of `spile-image` as a [`Subject`]: raw, fixed, dynamic, chains of differencing VHDs, and qcow2.

use std::path::PathBuf;
use std::str::FromStr;

use spile_core::{
    Disk, DiskInfo, Epoch, Error, ErrorKind, Extent, ExtentStatus, Files, Io, OpenMode, Result, Segments,
};
use spile_image::check::Severity;
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_image::formats::vhd::{self, CreateParams, VhdParent};
use spile_image::{Format, Graph, OpenOptions};
use spile_node::Aligned;
use std::sync::Arc;

use crate::pages::Pages;
use crate::past::Past;
use crate::qcow2::{DataFile, Form};
use crate::rng::Rng;
use crate::store::SimStore;
use crate::subject::Subject;
use crate::world::World;

/// The kinds of leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A raw file.
    Raw,
    /// A fixed VHD.
    Fixed,
    /// A dynamic VHD.
    Dynamic,
    /// A differencing VHD on one to three parents, the lowest of any other kind.
    Chain,
    /// A qcow2 image.
    Qcow2,
    /// A qcow2 image on one to three parents, the lowest of any other kind, the others qcow2.
    Qcow2Chain,
    /// A qcow2 image that keeps its data in another file.
    Qcow2Data,
    /// A qcow2 image whose data file is the disk as it is.
    Qcow2Raw,
    /// As [`Kind::Qcow2Raw`], where other programs have left something that the disk does not show.
    Qcow2RawStale,
    /// As [`Kind::Qcow2Chain`], with the data of the leaf and of some parents in other files.
    Qcow2DataChain,
}

/// All kinds.
const KINDS: [Kind; 10] = [
    Kind::Raw,
    Kind::Fixed,
    Kind::Dynamic,
    Kind::Chain,
    Kind::Qcow2,
    Kind::Qcow2Chain,
    Kind::Qcow2Data,
    Kind::Qcow2Raw,
    Kind::Qcow2RawStale,
    Kind::Qcow2DataChain,
];

/// The longest disk with a raw data file: all of it is compared after each life.
const RAW_BYTES: u64 = 4 << 20;

/// What the files that hold data are called, by the number of their layer.
const DATA_FILES: [&str; 4] = ["layer0.data", "layer1.data", "layer2.data", "layer3.data"];

impl Kind {
    /// The kind's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Raw => "raw",
            Kind::Fixed => "fixed",
            Kind::Dynamic => "dynamic",
            Kind::Chain => "chain",
            Kind::Qcow2 => "qcow2",
            Kind::Qcow2Chain => "qcow2-chain",
            Kind::Qcow2Data => "qcow2-data",
            Kind::Qcow2Raw => "qcow2-raw",
            Kind::Qcow2RawStale => "qcow2-raw-stale",
            Kind::Qcow2DataChain => "qcow2-data-chain",
        }
    }

    pub(crate) fn is_qcow2(self) -> bool {
        use Kind::{Qcow2, Qcow2Chain, Qcow2Data, Qcow2DataChain, Qcow2Raw, Qcow2RawStale};
        matches!(self, Qcow2 | Qcow2Chain | Qcow2Data | Qcow2Raw | Qcow2RawStale | Qcow2DataChain)
    }

    /// The extension of its files, and what qcow2 calls its format.
    fn extension(self) -> (&'static str, &'static str) {
        match self {
            Kind::Raw => ("raw", "raw"),
            Kind::Fixed | Kind::Dynamic | Kind::Chain => ("vhd", "vpc"),
            _ => ("qcow2", "qcow2"),
        }
    }

    fn draw(rng: &mut Rng) -> Self {
        *rng.pick(&[
            Kind::Raw,
            Kind::Fixed,
            Kind::Dynamic,
            Kind::Dynamic,
            Kind::Dynamic,
            Kind::Chain,
            Kind::Chain,
            Kind::Chain,
        ])
    }
}

impl FromStr for Kind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        KINDS
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| Error::new(ErrorKind::InvalidInput, format!("no such kind: {name}")))
    }
}

/// One layer of a chain.
#[derive(Clone, Debug)]
pub struct LayerPlan {
    /// The layer's kind; `Chain` is a differencing image.
    pub kind: Kind,
    /// The layer's size in bytes; never less than the size of the layer below.
    pub size_bytes: u64,
    /// The size of a block in bytes.
    pub block_bytes: u32,
    /// The form of a qcow2 image; its clusters are the blocks.
    pub form: Form,
}

/// A chain to be tested.
#[derive(Clone, Debug)]
pub struct Image {
    /// The layers, the base first.
    pub layers: Vec<LayerPlan>,
    /// True to put [`Aligned`] over the chain.
    pub aligned: bool,
    /// The size of the metadata cache in bytes.
    pub cache_bytes: usize,
    /// What happens to qcow2 images after their first lives.
    pub past: Past,
}

impl Image {
    /// Draws the image of a seed; of the given kind, if there is one.
    pub fn draw(seed: u64, kind: Option<Kind>) -> Self {
        let mut rng = Rng::new(seed).split(30);
        let drawn = Kind::draw(&mut rng);
        let kind = kind.unwrap_or(drawn);
        let mut layers = vec![LayerPlan::draw(&mut rng, kind, 0)];
        if kind == Kind::Chain {
            let base = *rng.pick(&[Kind::Raw, Kind::Fixed, Kind::Dynamic, Kind::Dynamic]);
            layers[0].kind = base;
            for _ in 0..rng.between(1, 3) {
                let least = layers[layers.len() - 1].size_bytes;
                layers.push(LayerPlan::draw(&mut rng, Kind::Chain, least));
            }
        }
        if matches!(kind, Kind::Qcow2Chain | Kind::Qcow2DataChain) {
            let base = *rng.pick(&[Kind::Raw, Kind::Fixed, Kind::Dynamic, Kind::Qcow2]);
            layers[0] = LayerPlan::draw(&mut rng, base, 0);
            for _ in 0..rng.between(1, 3) {
                let least = layers[layers.len() - 1].size_bytes;
                layers.push(LayerPlan::draw(&mut rng, kind, least));
            }
        }
        let apart = |layer: usize, is_raw, is_stale| DataFile { name: DATA_FILES[layer], is_raw, is_stale };
        let leaf = layers.len() - 1;
        match kind {
            Kind::Qcow2Data | Kind::Qcow2Raw | Kind::Qcow2RawStale => {
                let data_file = apart(0, kind != Kind::Qcow2Data, kind != Kind::Qcow2Raw);
                layers[0].form = layers[0].form.with_data_file(data_file);
            }
            Kind::Qcow2DataChain => {
                for (number, layer) in layers.iter_mut().enumerate().filter(|(_, layer)| layer.kind == kind) {
                    if number == leaf || rng.chance(1, 2) {
                        layer.form = layer.form.with_data_file(apart(number, false, true));
                    }
                }
            }
            _ => {}
        }
        let cache_bytes = *rng.pick(&[64 << 10, 1 << 20, 64 << 20]);
        Self { layers, aligned: rng.chance(1, 2), cache_bytes, past: Past::draw(&mut Rng::new(seed).split(31)) }
    }

    /// The leaf.
    pub fn leaf(&self) -> &LayerPlan {
        &self.layers[self.layers.len() - 1]
    }

    fn name(&self, layer: usize) -> String {
        let (extension, _) = self.layers[layer].kind.extension();
        format!("layer{layer}.{extension}")
    }

    pub(crate) async fn chain(&self, world: &World, layer: usize, read_only: bool) -> Result<Graph<SimStore>> {
        let (metadata_cache_bytes, allow_data_file) = (self.cache_bytes, true);
        let options = OpenOptions { read_only, metadata_cache_bytes, allow_data_file, ..OpenOptions::default() };
        Graph::open(&world.files(), world.env(), &self.path(layer), &options).await
    }

    async fn params(&self, world: &World, layer: usize) -> Result<CreateParams> {
        let plan = &self.layers[layer];
        let mut params = match plan.kind {
            Kind::Dynamic => CreateParams::new(DiskType::Dynamic, plan.size_bytes),
            Kind::Chain => {
                let parent = self.chain(world, layer - 1, true).await?.layers().swap_remove(0);
                let name = self.name(layer - 1);
                CreateParams::child(
                    plan.size_bytes,
                    VhdParent {
                        relative_path: name.clone(),
                        absolute_path: None,
                        uuid: parent.identity.map_or([0; 16], |identity| identity.0),
                        timestamp: 0,
                        name,
                    },
                )
            }
            _ => CreateParams::new(DiskType::Fixed, plan.size_bytes),
        };
        params.block_size_bytes = plan.block_bytes;
        Ok(params)
    }

    async fn create_qcow2(&self, world: &World, layer: usize) -> Result<()> {
        let (plan, path) = (&self.layers[layer], self.path(layer));
        match world.hardware().devices {
            true => world.install_device(&path, plan.first_device_bytes(), plan.device_bytes()),
            false => world.install_empty(&path, 0),
        }
        let parent = matches!(plan.kind, Kind::Qcow2Chain | Kind::Qcow2DataChain)
            .then(|| (self.name(layer - 1), self.layers[layer - 1].kind.extension().1));
        let parent = parent.as_ref().map(|(name, format)| (name.as_str(), *format));
        if let Some(data) = self.data_path(layer) {
            plan.form.install_data_file(world, &data, plan.size_bytes);
        }
        plan.form.install(world, &path, plan.size_bytes, plan.block_bytes, parent).await
    }

    /// The path of the file that holds the data of a layer, if that is another one.
    fn data_path(&self, layer: usize) -> Option<PathBuf> {
        self.layers[layer].form.data_file.map(|data| PathBuf::from("/images").join(data.name))
    }

    /// A raw data file is the disk, for whoever knows nothing of the image, unless there was something else in it from the start.
    async fn check_raw(&self, world: &World, layer: usize) -> Result<(), String> {
        let is_raw = self.layers[layer].form.data_file.is_some_and(|data| data.is_raw && !data.is_stale);
        let Some(data) = self.data_path(layer).filter(|_| is_raw).and_then(|path| world.view(&path)) else {
            return Ok(());
        };
        let disk = self.chain(world, layer, true).await.map_err(|error| format!("{error:?}"))?;
        let (size, mut at) = (disk.info().size_bytes, 0);
        while at < size {
            let len = (size - at).min(64 << 10);
            let bytes = Segments::zeroed(len as usize);
            disk.read(Extent::from_range(at..at + len), &bytes).await.map_err(|error| format!("{error:?}"))?;
            let mut alone = vec![0; len as usize];
            data.read(at, &mut alone);
            if bytes.to_vec() != alone {
                return Err(format!("the raw data file is not what the disk shows, behind {at:#x}"));
            }
            at += len;
        }
        Ok(())
    }

    async fn check_layer(&self, world: &World, layer: usize) -> Result<(), String> {
        let path = self.path(layer);
        let checked = async {
            let store = world.files().open(&path.into(), OpenMode::ReadOnly).await?;
            self.layers[layer].format().check(&store, &*world.env()).await
        };
        let report = checked.await.map_err(|error| format!("{error:?}"))?;
        match report.findings.iter().find(|found| found.severity == Severity::Corruption) {
            Some(found) => Err(format!("layer {layer}, at {:#x?}: {}", found.offset_bytes, found.message)),
            None => Ok(()),
        }
    }
}

impl LayerPlan {
    fn format(&self) -> Format {
        match self.kind {
            Kind::Raw => Format::Raw,
            Kind::Fixed | Kind::Dynamic | Kind::Chain => Format::Vhd,
            _ => Format::Qcow2,
        }
    }

    /// A device with room for all blocks, and some to spare. A qcow2 image loses some of it with each crash.
    fn device_bytes(&self) -> u64 {
        let block = u64::from(self.block_bytes);
        if self.kind.is_qcow2() {
            return (self.size_bytes * 2).next_multiple_of(block) + (32 << 20) + 512;
        }
        (self.size_bytes.div_ceil(block) + 1) * (block + 8192) + (4 << 20)
    }

    /// The device as it is at first: under a thin image with room for an empty one and a few blocks. It becomes longer as the image asks.
    fn first_device_bytes(&self) -> u64 {
        let block = u64::from(self.block_bytes);
        match self.kind {
            Kind::Raw | Kind::Fixed => self.device_bytes(),
            Kind::Dynamic | Kind::Chain => (4 << 20) + block + 8192,
            _ => self.form.empty_image(self.size_bytes, self.block_bytes, None).len() as u64 + 8 * block,
        }
    }

    fn draw(rng: &mut Rng, kind: Kind, least_bytes: u64) -> Self {
        let mut size_bytes = match rng.below(8) {
            0 => rng.between(8, 64) << 20,
            1 => rng.between(1, 16 << 11) << 9,
            2 => rng.between(1, 4096) << 12,
            _ => rng.between(1, 8) << 20,
        };
        if rng.chance(1, 3) {
            size_bytes = least_bytes;
        }
        let block_bytes = *rng.pick(&[4096, 64 << 10, 64 << 10, 128 << 10, 512 << 10, 2 << 20]);
        // A block of 4 KiB is for small disks: each is an entry.
        let block_bytes = if size_bytes > 8 << 20 { block_bytes.max(64 << 10) } else { block_bytes };
        let most_bytes = if matches!(kind, Kind::Qcow2Raw | Kind::Qcow2RawStale) { RAW_BYTES } else { u64::MAX };
        let size_bytes = size_bytes.max(least_bytes).clamp(4096, most_bytes);
        let form = Form::default();
        if !kind.is_qcow2() {
            return Self { kind, size_bytes, block_bytes, form };
        }
        let block_bytes = *rng.pick(&[512, 1024, 4096, 16 << 10, 64 << 10, 64 << 10, 256 << 10]);
        Self { kind, size_bytes, block_bytes, form: Form::draw(rng, block_bytes) }
    }
}

impl Subject for Image {
    type Disk = SimDisk;

    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn path(&self, layer: usize) -> PathBuf {
        PathBuf::from("/images").join(self.name(layer))
    }

    async fn create(&self, world: &World, layer: usize) -> Result<()> {
        let (plan, path) = (&self.layers[layer], self.path(layer));
        if plan.kind == Kind::Raw {
            return world.files().create(&path, plan.size_bytes).map(drop);
        }
        if plan.kind.is_qcow2() {
            return self.create_qcow2(world, layer).await;
        }
        let params = self.params(world, layer).await?;
        if world.hardware().devices {
            world.install_device(&path, plan.first_device_bytes(), plan.device_bytes());
        } else {
            world.install_empty(&path, 0);
        }
        let store = world.files().open(&path.into(), OpenMode::ReadWrite).await?;
        vhd::create(&store, &*world.env(), &params).await
    }

    async fn open(&self, world: &World, layer: usize) -> Result<SimDisk> {
        let chain = self.chain(world, layer, false).await?;
        chain.begin();
        Ok(if self.aligned { SimDisk::Aligned(Box::new(Aligned::new(chain))) } else { SimDisk::Plain(chain) })
    }

    async fn age(&self, world: &World, layer: usize) -> Result<()> {
        self.give_past(world, layer).await
    }

    async fn end(&self, world: &World) -> Result<(), String> {
        self.look_at_past(world).await?;
        self.check(world, true).await
    }

    async fn check(&self, world: &World, clean: bool) -> Result<(), String> {
        for layer in 0..self.layers.len() {
            if self.layers[layer].kind != Kind::Raw {
                self.check_layer(world, layer).await?;
            }
        }
        let leaf = self.layers.len() - 1;
        self.check_raw(world, leaf).await?;
        let sparse = matches!(self.leaf().kind, Kind::Dynamic | Kind::Chain);
        match world.view(&self.path(leaf)) {
            Some(view) if clean && sparse => check_closed(&view),
            _ => Ok(()),
        }
    }
}

/// A dynamic or differencing image that was closed in order ends with the same footer as it begins with.
fn check_closed(view: &Pages) -> Result<(), String> {
    let (mut copy, mut trailing) = ([0; 512], [0; 512]);
    view.read(0, &mut copy);
    view.read(view.len().saturating_sub(512), &mut trailing);
    if copy == trailing { Ok(()) } else { Err("closed, but without a footer at its end".to_owned()) }
}

/// A chain, with or without [`Aligned`] over it.
pub enum SimDisk {
    /// The graph alone.
    Plain(Graph<SimStore>),
    /// The graph behind [`Aligned`].
    Aligned(Box<Aligned<Graph<SimStore>>>),
}

impl Disk for SimDisk {
    fn info(&self) -> DiskInfo {
        match self {
            Self::Plain(disk) => disk.info(),
            Self::Aligned(disk) => disk.info(),
        }
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        match self {
            Self::Plain(disk) => disk.execute(io).await,
            Self::Aligned(disk) => disk.execute(io).await,
        }
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        match self {
            Self::Plain(disk) => disk.extents(extent, max_runs).await,
            Self::Aligned(disk) => disk.extents(extent, max_runs).await,
        }
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        match self {
            Self::Plain(disk) => disk.resize(size_bytes).await,
            Self::Aligned(disk) => disk.resize(size_bytes).await,
        }
    }

    fn follows(&self, epochs: &[Arc<dyn Epoch>]) {
        match self {
            Self::Plain(disk) => disk.follows(epochs),
            Self::Aligned(disk) => disk.follows(epochs),
        }
    }

    async fn close(&self) -> Result<()> {
        match self {
            Self::Plain(disk) => disk.close().await,
            Self::Aligned(disk) => disk.close().await,
        }
    }
}
