//! Changes: writes, zeroes and discards go to the leaf, part by part; flushes to every layer that may still change.

use futures_util::future::join_all;
use spile_core::{ErrorKind, Extent, Result, Segments, Store, WriteZeroes};

use super::Graph;
use crate::layer::{Layer, Reserved};

impl<S: Store> Graph<S> {
    pub(super) async fn write_extent(&self, extent: Extent, from: &Segments, fua: bool) -> Result<()> {
        self.check_write(extent)?;
        match self.leaf().part_len(extent) == extent.len_bytes {
            _ if extent.is_empty() => {}
            true => self.write_part(extent, from).await?,
            false => self.write_parts(extent, from).await?,
        }
        match fua {
            // These bytes are in the leaf, whatever older requests do in its parents.
            true => self.leaf().flush().await,
            false => Ok(()),
        }
    }

    /// Writes a part of a request that one reservation covers.
    async fn write_part(&self, part: Extent, from: &Segments) -> Result<()> {
        let leaf = self.leaf();
        let reserved = leaf.reserve(part).await?;
        leaf.data_store().write_at(reserved.offset(), from, leaf.via()).await?;
        reserved.commit().await
    }

    /// Writes a request of several parts, all at the same time.
    async fn write_parts(&self, extent: Extent, from: &Segments) -> Result<()> {
        let mut parts = Vec::new();
        let mut at = extent.start();
        while at < extent.end() {
            let len = self.leaf().part_len(Extent::from_range(at..extent.end()));
            let start = (at - extent.start()) as usize;
            parts.push((Extent::from_range(at..at + len), from.slice(start..start + len as usize)));
            at += len;
        }
        let writes = parts.iter().map(|(part, from)| self.write_part(*part, from));
        join_all(writes).await.into_iter().collect()
    }

    pub(super) async fn flush_all(&self) -> Result<()> {
        match self.walked() {
            _ if self.is_read_only() => Ok(()),
            1 => self.leaf().flush().await,
            walked => {
                let flushes = self.layers[..walked].iter().map(|layer| layer.image().flush());
                join_all(flushes).await.into_iter().collect()
            }
        }
    }

    pub(super) async fn discard_extent(&self, extent: Extent) -> Result<()> {
        self.check_write(extent)?;
        self.each_part(extent, true, async |part| {
            let below = self.below_is_zero(self.leaf().unit(part)).await?;
            self.leaf().unmap(part, below).await
        })
        .await
    }

    pub(super) async fn zero_extent(&self, extent: Extent, how: WriteZeroes) -> Result<()> {
        self.check_write(extent)?;
        if how.only_if_fast && !self.info.fast_zero {
            return Err(self.error(ErrorKind::Unsupported, extent, "zeroes are not fast on this store"));
        }
        let only_held = self.layers.len() == 1 && how.may_unmap;
        self.each_part(extent, only_held, async |part| {
            let below = self.below_is_zero(self.leaf().unit(part)).await?;
            self.leaf().zero(part, how.may_unmap, below).await
        })
        .await
    }

    /// Runs `each` on every part of `extent`, or only on those that the leaf has space for, one after the other.
    async fn each_part(&self, extent: Extent, only_held: bool, each: impl AsyncFn(Extent) -> Result<()>) -> Result<()> {
        let mut at = extent.start();
        while at < extent.end() {
            let rest = Extent::from_range(at..extent.end());
            let part = match only_held {
                true => match self.leaf().next_held(rest) {
                    Some(part) => part,
                    None => return Ok(()),
                },
                false => Extent::from_range(at..at + self.leaf().part_len(rest)),
            };
            at = part.end();
            each(part).await?;
        }
        Ok(())
    }
}
