//! qcow2 images with a past: after their first life clusters are compressed, and an internal snapshot shares what there is. What is written later copies these clusters
//! out and counts them down, while others read them.

use std::sync::{Arc, Mutex, PoisonError};

use spile_core::{Disk, Error, ErrorKind, Extent, Files, OpenMode, Result, Segments};
use spile_image::Graph;
use spile_image::create::{NewImage, Options};
use spile_image::formats::qcow2::codec::compress::compress;
use spile_image::formats::qcow2::fill::{Content, Filler};
use spile_image::inner::{InnerChange, Which};
use spile_image::layer::Layer as _;
use spile_node::Aligned;

use crate::image::{Image, LayerPlan};
use crate::rng::Rng;
use crate::store::SimStore;
use crate::subject::Subject as _;
use crate::world::World;

/// Larger disks are left as they are: all of a disk is read.
const MOST_BYTES: u64 = 8 << 20;

/// The name of the internal snapshot.
const SNAPSHOT: &str = "before";

/// What happens to the images of a run after their first lives.
#[derive(Clone, Debug, Default)]
pub struct Past {
    /// Clusters of images without a parent are compressed, two of three.
    pub compresses: bool,
    /// The leaf gets an internal snapshot.
    pub snapshots: bool,
    /// What the snapshot holds, once there is one.
    held: Arc<Mutex<Option<Vec<u8>>>>,
}

impl Past {
    /// Draws it.
    pub fn draw(rng: &mut Rng) -> Self {
        Self { compresses: rng.chance(1, 3), snapshots: rng.chance(1, 3), held: Arc::default() }
    }

    /// A past of both kinds.
    pub fn full() -> Self {
        Self { compresses: true, snapshots: true, held: Arc::default() }
    }

    fn hold(&self, content: Option<Vec<u8>>) -> Option<Vec<u8>> {
        std::mem::replace(&mut *self.held.lock().unwrap_or_else(PoisonError::into_inner), content)
    }
}

/// All that the disk holds. It is closed.
async fn content(graph: Graph<SimStore>) -> Result<Vec<u8>> {
    let disk = Aligned::new(graph);
    let size_bytes = disk.info().size_bytes;
    let into = Segments::zeroed(size_bytes as usize);
    disk.read(Extent::from_range(0..size_bytes), &into).await?;
    disk.close().await?;
    Ok(into.to_vec())
}

impl Image {
    /// Gives the image of `layer`, which nobody uses, its past.
    pub(crate) async fn give_past(&self, world: &World, layer: usize) -> Result<()> {
        let (plan, past) = (&self.layers[layer], &self.past);
        let is_leaf = layer + 1 == self.layers.len();
        past.hold(None);
        let may_have_one = plan.kind.is_qcow2() && plan.form.data_file.is_none();
        if !may_have_one || plan.size_bytes > MOST_BYTES || world.hardware().devices {
            return Ok(());
        }
        let held = content(self.chain(world, layer, false).await?).await?;
        if past.compresses && layer == 0 {
            self.compress(world, plan, &held).await?;
        }
        if past.snapshots && is_leaf {
            let create = InnerChange::Create { name: SNAPSHOT.to_owned(), now_unix_s: 7 };
            match self.change_inner(world, layer, create).await {
                Ok(()) => drop(past.hold(Some(held))),
                // Counts of one bit.
                Err(error) if error.kind() == ErrorKind::Unsupported => {}
                Err(error) => return Err(error),
            }
        }
        world.settle(&self.path(layer));
        Ok(())
    }

    /// Makes the image of the lowest layer anew, of the same form, with compressed clusters.
    async fn compress(&self, world: &World, plan: &LayerPlan, held: &[u8]) -> Result<()> {
        let path = self.path(0);
        let options = Options {
            version: Some(if plan.form.is_version_2 { 2 } else { 3 }),
            refcount_bits: Some(1 << plan.form.refcount_order),
            extended_l2: Some(plan.form.is_extended),
            ..Options::default()
        };
        let new = NewImage { unit_bytes: Some(plan.block_bytes), options, ..NewImage::new(plan.size_bytes) };
        world.install_empty(&path, 0);
        let store = world.files().open(&path.as_path().into(), OpenMode::ReadWrite).await?;
        let mut filler = Filler::begin(store, &new).await?;
        let (compression, cluster_bytes) = (filler.compression(), plan.block_bytes as usize);
        for (number, bytes) in (0..).zip(held.chunks(cluster_bytes)) {
            let mut cluster = bytes.to_vec();
            cluster.resize(cluster_bytes, 0);
            if cluster.iter().all(|byte| *byte == 0) {
                continue;
            }
            let plain = || Content::Plain(Segments::copied(&cluster));
            let content = match compress(compression, &cluster).filter(|_| number % 3 < 2) {
                Some(bytes) => Content::Compressed(bytes),
                None => plain(),
            };
            filler.put(number, content).await?;
        }
        filler.finish().await?;
        world.settle(&path);
        Ok(())
    }

    async fn change_inner(&self, world: &World, layer: usize, change: InnerChange) -> Result<()> {
        let graph = self.chain(world, layer, false).await?;
        let done = graph.handles()[0].image().change_inner_unused(&change, &()).await;
        graph.close().await?;
        done.map(drop)
    }

    /// The snapshot holds what it held, and goes; then nothing is left but the disk.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) async fn look_at_past(&self, world: &World) -> Result<(), String> {
        let (leaf, Some(held)) = (self.layers.len() - 1, self.past.hold(None)) else { return Ok(()) };
        let named = || Which { text: SNAPSHOT.to_owned(), is_id: false };
        let looked = async {
            self.change_inner(world, leaf, InnerChange::Apply(named())).await?;
            let now = content(self.chain(world, leaf, false).await?).await?;
            self.change_inner(world, leaf, InnerChange::Delete(named())).await?;
            Ok::<_, Error>(now)
        };
        match looked.await {
            Ok(now) if now == held => Ok(()),
            // A cluster may be counted too often after a crash, and narrow counts have no room then.
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(()),
            Ok(_) => Err("the internal snapshot reads as something else than it held".to_owned()),
            Err(error) => Err(format!("the internal snapshot cannot be used: {error:?}")),
        }
    }
}
