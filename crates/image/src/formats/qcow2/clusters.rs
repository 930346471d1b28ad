//! Compressed clusters: read whole, decompressed in steps, and the last ones kept, so that small reads in a row do not
//! decompress the same cluster each time.
//!
//! Bounds, for each image: four clusters are decompressed at a time (each takes up to two clusters of compressed bytes
//! twice, one of output, and one and a half of a zstd decoder), and the kept ones are 1 MiB in all, or two clusters if
//! those are larger. Requests that want the same cluster at the same time share one decompression.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use async_lock::Semaphore;
use spile_core::{Error, ErrorKind, Result, ResultExt, Segments, Store, StoreOffset, Via, yield_now};

use super::codec::COPIED;
use super::codec::header::Compression;
use super::codec::stream::Decompressor;
use super::codec::table::Compressed;
use crate::range_lock::RangeLock;

/// How many clusters are decompressed at a time.
const AT_ONCE: usize = 4;
/// How many bytes of decompressed clusters are kept.
const KEPT_BYTES: usize = 1 << 20;

/// Decompresses clusters, and keeps the last ones.
pub(crate) struct Clusters {
    compression: Compression,
    cluster_bits: u32,
    kept: Mutex<VecDeque<(u64, Arc<[u8]>)>>,
    most_kept: usize,
    /// Locks by L2 entry without its bit COPIED. One is held while its cluster is decompressed.
    loads: RangeLock,
    turns: Semaphore,
}

impl Clusters {
    pub(crate) fn new(compression: Compression, cluster_bits: u32) -> Self {
        let most_kept = (KEPT_BYTES >> cluster_bits).clamp(2, 16);
        let turns = Semaphore::new(AT_ONCE);
        Self { compression, cluster_bits, kept: Mutex::default(), most_kept, loads: RangeLock::default(), turns }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(u64, Arc<[u8]>)>> {
        self.kept.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Returns a kept cluster. From now on, all others are dropped before it.
    fn get(&self, key: u64) -> Option<Arc<[u8]>> {
        let mut kept = self.lock();
        let at = kept.iter().position(|(other, _)| *other == key)?;
        let found = kept.remove(at)?;
        kept.push_back(found.clone());
        Some(found.1)
    }

    fn keep(&self, key: u64, cluster: &Arc<[u8]>) {
        let mut kept = self.lock();
        if kept.len() == self.most_kept {
            kept.pop_front();
        }
        kept.push_back((key, cluster.clone()));
    }

    /// The cluster whose L2 entry is `entry`, which says `place`.
    ///
    /// # Errors
    /// `Corrupt` when the compressed data give no cluster; errors of the store.
    pub(crate) async fn read<S: Store>(&self, store: &S, entry: u64, place: Compressed) -> Result<Arc<[u8]>> {
        // The bit says nothing of the data, and without it the range below ends within 64 bits.
        let key = entry & !COPIED;
        if let Some(cluster) = self.get(key) {
            return Ok(cluster);
        }
        let _one = self.loads.exclusive(key..key + 1).await;
        if let Some(cluster) = self.get(key) {
            return Ok(cluster);
        }
        let _turn = self.turns.acquire().await;
        let cluster: Arc<[u8]> = self.decompress(store, place).await.at_offset(place.offset)?.into();
        self.keep(key, &cluster);
        Ok(cluster)
    }

    async fn decompress<S: Store>(&self, store: &S, place: Compressed) -> Result<Vec<u8>> {
        // A stream goes on in the next cluster at most. What an entry claims beyond that, or beyond the end of the file,
        // is not needed by a stream that is sound.
        let last = ((place.offset >> self.cluster_bits) + 2) << self.cluster_bits;
        let end = (place.offset + place.len_bytes).min(last).min(store.len_bytes());
        if end <= place.offset {
            return Err(Error::new(ErrorKind::Corrupt, "a compressed cluster lies past the end of the file"));
        }
        let bytes = Segments::zeroed((end - place.offset) as usize);
        store.read_at(StoreOffset(place.offset), &bytes, Via::Cached).await?;
        let input = bytes.to_vec();
        drop(bytes);
        let mut decompressor = Decompressor::new(self.compression, 1 << self.cluster_bits);
        while !decompressor.step(&input).map_err(|fault| Error::new(ErrorKind::Corrupt, fault.to_string()))? {
            yield_now().await;
        }
        Ok(decompressor.into_cluster())
    }
}
