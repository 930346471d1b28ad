//! Reads: from the layers that have the bytes.

use std::pin::pin;

use futures_util::future::join_all;
use spile_core::metrics::Op;
use spile_core::{Extent, Result, ResultExt, Segments, Store, StoreOffset, Via};

use super::Graph;
use super::map::{At, LastZone, Step};
use crate::layer::{Found, Layer};

/// One store operation of a read.
struct Piece {
    layer: usize,
    at: At,
    start: usize,
    len: usize,
}

impl<S: Store> Graph<S> {
    pub(super) async fn read_extent(&self, extent: Extent, into: &Segments) -> Result<()> {
        self.check(extent, false)?;
        let _readers = self.enter();
        // The common read lies in one piece, most often of the leaf, and needs no list.
        let found = self.leaf().find(extent.start(), extent.len_bytes);
        if let (Found::Data(offset), len) = found
            && len == extent.len_bytes
        {
            return self.read_plain(0, offset, into).await;
        }
        if let (Step::Bytes { layer, at }, len) = self.step_from(found, extent.start(), &None)
            && len == extent.len_bytes
        {
            return self.read_at(layer, at, into).await;
        }
        let pieces = self.resolve(extent, into).await?;
        let reads = pieces.iter().map(async |piece| {
            self.read_at(piece.layer, piece.at, &into.slice(piece.start..piece.start + piece.len)).await
        });
        join_all(reads).await.into_iter().collect()
    }

    /// Resolves a read: zeroes are filled in at once, the rest is listed.
    async fn resolve(&self, extent: Extent, into: &Segments) -> Result<Vec<Piece>> {
        let mut pieces: Vec<Piece> = Vec::new();
        let mut last: LastZone = None;
        let mut at = extent.start();
        while at < extent.end() {
            let (step, len) = self.step(at, extent.end() - at, &last);
            let start = (at - extent.start()) as usize;
            match step {
                Step::Bytes { layer, at } => pieces.push(Piece { layer, at, start, len: len as usize }),
                Step::Zero => into.slice(start..start + len as usize).fill(0),
                Step::Load { .. } | Step::LoadZone(_) => {
                    self.load(step, &mut last).await?;
                    continue;
                }
            }
            at += len;
        }
        Ok(pieces)
    }

    /// Reads a run that lies in one piece.
    pub(super) async fn read_at(&self, layer: usize, at: At, into: &Segments) -> Result<()> {
        match at {
            At::Plain(offset) => self.read_plain(layer, offset, into).await,
            At::Encoded { unit, within_bytes } => {
                let image = self.image(layer);
                let read = pin!(image.read_encoded(unit, within_bytes, into));
                self.at_store(layer, Op::Read, into.len() as u64, read).await.at_path(image.store().path())
            }
        }
    }

    /// Reads from one layer's store, directly where everything is aligned for it.
    async fn read_plain(&self, layer: usize, offset: StoreOffset, into: &Segments) -> Result<()> {
        let (number, layer) = (layer, self.image(layer));
        let info = layer.data_store().info();
        let aligned = (offset.0 | into.len() as u64) & (u64::from(info.offset_align_bytes) - 1) == 0
            && into.is_aligned(info.memory_align_bytes as usize);
        let via = if aligned { layer.via() } else { Via::Cached };
        let read = pin!(layer.data_store().read_at(offset, into, via));
        self.at_store(number, Op::Read, into.len() as u64, read).await
    }
}
