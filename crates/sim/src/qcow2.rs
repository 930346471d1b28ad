//! Empty qcow2 images for simulated hosts, in any form that the format has.

use std::path::Path;

use spile_core::{Files, OpenMode, Result, Segments, Store as _, StoreOffset, Via};

use crate::rng::Rng;
use crate::world::World;

/// The form of a qcow2 image, beside its size and that of its clusters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Form {
    /// Version 2, without a zero flag.
    pub is_version_2: bool,
    /// L2 entries have 128 bits; clusters have 16 KiB or more.
    pub is_extended: bool,
    /// The width of a refcount in bits, as a power of two; 4 in version 2.
    pub refcount_order: u32,
    /// The file that holds the data, if that is another one; not in version 2.
    pub data_file: Option<DataFile>,
}

/// A file that holds an image's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataFile {
    /// Its name, beside the image.
    pub name: &'static str,
    /// It is the disk's content as it is.
    pub is_raw: bool,
    /// Somebody else has left something in it. In a raw one, which was discarded by other programs, no entry shows that.
    pub is_stale: bool,
}

/// True for the seeds that draw qcow2 images, in the modes that had VHDs only at first. The other seeds stay what they were, so those that
/// once found something do not change.
pub(crate) fn is_drawn(seed: u64) -> bool {
    matches!(seed % 5, 1 | 3)
}

impl Form {
    /// Draws a form for clusters of `cluster_bytes`.
    pub fn draw(rng: &mut Rng, cluster_bytes: u32) -> Self {
        let (is_version_2, extended, order) = (rng.chance(1, 5), rng.chance(1, 2), rng.below(7) as u32);
        match is_version_2 {
            true => Self { is_version_2, refcount_order: 4, ..Self::default() },
            false => {
                let is_extended = extended && cluster_bytes >= 16 << 10;
                Self { is_extended, refcount_order: order, ..Self::default() }
            }
        }
    }

    /// The same with its data in another file.
    pub fn with_data_file(self, data_file: DataFile) -> Self {
        let refcount_order = if self.is_version_2 { 4 } else { self.refcount_order };
        Self { is_version_2: false, refcount_order, data_file: Some(data_file), ..self }
    }

    /// Puts an empty image of `size_bytes` into the empty file or device at `path`, durable. `parent` is the name of its parent and what
    /// qcow2 calls that one's format.
    ///
    /// # Errors
    /// The store's.
    pub(crate) async fn install(
        &self,
        world: &World,
        path: &Path,
        size_bytes: u64,
        cluster_bytes: u32,
        parent: Option<(&str, &str)>,
    ) -> Result<()> {
        let bytes = self.empty_image(size_bytes, cluster_bytes, parent);
        let store = world.files().open(&path.into(), OpenMode::ReadWrite).await?;
        store.write_at(StoreOffset(0), &Segments::copied(&bytes), Via::Cached).await?;
        store.sync().await
    }

    /// Puts the file of so many bytes there that is to hold the data, if that is another one, durable: with what somebody else has left in it, if so.
    pub(crate) fn install_data_file(&self, world: &World, path: &Path, size_bytes: u64) {
        let Some(DataFile { is_stale, .. }) = self.data_file else { return };
        match (is_stale, world.hardware().devices) {
            (false, _) => world.install_empty(path, size_bytes),
            (true, true) => world.install_device(path, size_bytes, size_bytes),
            (true, false) => world.install(path, &vec![0xd7; size_bytes as usize]),
        }
    }

    /// The first bytes of an empty image, which is zero behind them: the header, the refcount table with the blocks that count all of
    /// it, and the L1 table.
    pub fn empty_image(&self, size_bytes: u64, cluster_bytes: u32, parent: Option<(&str, &str)>) -> Vec<u8> {
        let cluster = u64::from(cluster_bytes);
        let bits = cluster.ilog2();
        let entry_bits = if self.is_extended { 4 } else { 3 };
        let l1_entries = size_bytes.div_ceil(1 << (2 * bits - entry_bits)).max(1);
        let l1_clusters = (l1_entries * 8).div_ceil(cluster);
        let per_block = 1u64 << (bits + 3 - self.refcount_order);
        // The header, the refcount table of one cluster, blocks, L1.
        let mut blocks = 1;
        while blocks * per_block < 2 + blocks + l1_clusters {
            blocks += 1;
        }
        let used = 2 + blocks + l1_clusters;
        let mut bytes = vec![0; (used * cluster) as usize];
        let mut put = |at: u64, value: &[u8]| bytes[at as usize..at as usize + value.len()].copy_from_slice(value);
        for block in 0..blocks {
            put(cluster + block * 8, &((2 + block) * cluster).to_be_bytes());
        }
        for number in 0..used {
            let at = 2 * cluster + ((number << self.refcount_order) / 8);
            match self.refcount_order {
                0..=2 => {}
                order => put(at + (1 << (order - 3)) - 1, &[1]),
            }
        }
        put(0, b"QFI\xfb");
        put(4, &(if self.is_version_2 { 2u32 } else { 3 }).to_be_bytes());
        put(20, &bits.to_be_bytes());
        put(24, &size_bytes.to_be_bytes());
        put(36, &(l1_entries as u32).to_be_bytes());
        put(40, &((2 + blocks) * cluster).to_be_bytes());
        put(48, &cluster.to_be_bytes());
        put(56, &1u32.to_be_bytes());
        let mut at = 72;
        if !self.is_version_2 {
            let extended = if self.is_extended { 1u64 << 4 } else { 0 };
            let apart = if self.data_file.is_some() { 1 << 2 } else { 0 };
            put(72, &(extended | apart).to_be_bytes());
            put(96, &self.refcount_order.to_be_bytes());
            put(100, &112u32.to_be_bytes());
            at = 112;
        }
        if let Some(DataFile { name, is_raw, .. }) = self.data_file {
            put(88, &(if is_raw { 1u64 << 1 } else { 0 }).to_be_bytes());
            put(at, &0x4441_5441_u32.to_be_bytes());
            put(at + 4, &(name.len() as u32).to_be_bytes());
            put(at + 8, name.as_bytes());
            at += 8 + (name.len() as u64).next_multiple_of(8);
        }
        if let Some((name, format)) = parent {
            put(at, &0xe279_2aca_u32.to_be_bytes());
            put(at + 4, &(format.len() as u32).to_be_bytes());
            put(at + 8, format.as_bytes());
            let name_at = at + 8 + (format.len() as u64).next_multiple_of(8) + 8;
            put(8, &name_at.to_be_bytes());
            put(16, &(name.len() as u32).to_be_bytes());
            put(name_at, name.as_bytes());
        }
        if self.refcount_order < 3 {
            let width = 1u64 << self.refcount_order;
            for number in 0..used {
                bytes[(2 * cluster + number * width / 8) as usize] |= 1 << (number * width % 8);
            }
        }
        bytes
    }
}
