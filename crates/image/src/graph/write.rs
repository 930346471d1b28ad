//! Changes: writes, zeroes and discards go to the leaf, part by part; flushes to every layer that may still change.

use std::pin::{Pin, pin};

use futures_util::future::{join, join_all};
use spile_core::{Error, ErrorKind, Extent, Result, Segments, Store, StoreOffset, WriteZeroes, metrics};

use super::Graph;
use super::moving::Change;
use crate::layer::{Layer, Reserved};

impl<S: Store> Graph<S> {
    pub(super) async fn write_extent(&self, extent: Extent, from: &Segments, fua: bool) -> Result<()> {
        self.check_write(extent)?;
        let leaf = self.leaf();
        match leaf.in_place(extent) {
            _ if extent.is_empty() => {}
            Some(offset) => self.write_at(offset, from).await?,
            None if let Some(moving) = &self.moving => {
                self.change_moving(moving, extent, Change::Write(from)).await?;
                return if fua { self.flush_all().await } else { Ok(()) };
            }
            None if leaf.part_len(extent) == extent.len_bytes => self.write_part(extent, from).await?,
            None => self.write_parts(extent, from).await?,
        }
        match fua {
            // These bytes are in the leaf, whatever older requests do in its parents.
            true => self.flush(0).await,
            false => Ok(()),
        }
    }

    /// Writes to the leaf's store.
    async fn write_at(&self, offset: StoreOffset, from: &Segments) -> Result<()> {
        let written = pin!(self.leaf().data_store().write_at(offset, from, self.leaf().via()));
        self.at_store(0, metrics::Op::Write, from.len() as u64, written).await
    }

    /// Flushes one layer.
    pub(super) async fn flush(&self, layer: usize) -> Result<()> {
        self.at_store(layer, metrics::Op::Flush, 0, pin!(self.image(layer).flush())).await
    }

    /// Writes a part of a request that one reservation covers. Where the leaf copies what lies around the part, it hides what lies below there from then on:
    /// that waits for the writes to a parent that began when that was the leaf.
    pub(super) async fn write_part(&self, part: Extent, from: &Segments) -> Result<()> {
        let mut reserved = self.leaf().reserve(part).await?;
        if reserved.around() != (0, 0) && !self.layers[0].do_parents_rest() {
            // Without the reservation: what it locks, nobody has to wait for.
            reserved.abandon();
            Box::pin(self.layers[0].parents_rest()).await;
            reserved = self.leaf().reserve(part).await?;
        }
        if reserved.publishes() {
            return Box::pin(self.write_published(reserved, from)).await;
        }
        if let Err(error) = self.write_at(reserved.offset(), from).await {
            return Err(give_up(reserved, error));
        }
        let around = reserved.around();
        if around != (0, 0)
            && let Err(error) = self.copy_around(part, reserved.offset(), around).await
        {
            return Err(give_up(reserved, error));
        }
        reserved.commit().await
    }

    /// Writes to a place that reads as the guest's old bytes: the data, and at the same time what says where they are.
    async fn write_published(&self, mut reserved: impl Reserved, from: &Segments) -> Result<()> {
        let offset = reserved.offset();
        let (written, published) = join(self.write_at(offset, from), reserved.publish()).await;
        match written {
            Err(error) => Err(give_up(reserved, error)),
            Ok(()) => {
                published?;
                reserved.commit().await
            }
        }
    }

    /// Writes what the disk shows around `part` to the bytes around `offset`, which is the place of the part in the leaf: no
    /// parent changes any more. In a box, so that the futures of other writes stay small.
    fn copy_around(
        &self,
        part: Extent,
        offset: StoreOffset,
        (before, after): (u64, u64),
    ) -> Pin<Box<dyn Future<Output = Result<()>> + '_>> {
        Box::pin(async move {
            let sides = [
                (part.start() - before..part.start(), offset.0 - before),
                (part.end()..part.end() + after, offset.0 + part.len_bytes),
            ];
            for (range, offset) in sides.into_iter().filter(|(range, _)| !range.is_empty()) {
                let extent = Extent::from_range(range);
                let bytes = Segments::zeroed(extent.len_bytes as usize);
                self.read_extent(extent, &bytes).await?;
                self.write_at(StoreOffset(offset), &bytes).await?;
            }
            Ok(())
        })
    }

    /// Makes `part` zero: one part of the leaf.
    pub(super) async fn zero_leaf_part(&self, part: Extent, may_unmap: bool, below_is_zero: bool) -> Result<()> {
        if self.leaf().zero(part, may_unmap, below_is_zero).await? {
            return Ok(());
        }
        self.write_part(part, &Segments::zeroed(part.len_bytes as usize)).await
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
            1 => self.flush(0).await,
            walked => self.flush_moving(walked).await,
        }
    }

    pub(super) async fn discard_extent(&self, extent: Extent) -> Result<()> {
        self.check_write(extent)?;
        match &self.moving {
            Some(moving) => self.change_moving(moving, extent, Change::Discard).await,
            None => self.discard_in_leaf(extent).await,
        }
    }

    async fn discard_in_leaf(&self, extent: Extent) -> Result<()> {
        self.each_part(extent, true, async |part| {
            let below = self.below_is_zero(self.leaf().unit(part)).await?;
            let unmapped = pin!(self.leaf().unmap(part, below));
            self.at_store(0, metrics::Op::Discard, part.len_bytes, unmapped).await
        })
        .await
    }

    pub(super) async fn zero_extent(&self, extent: Extent, how: WriteZeroes) -> Result<()> {
        self.check_write(extent)?;
        if how.only_if_fast && !self.info.fast_zero {
            return Err(self.error(ErrorKind::Unsupported, extent, "zeroes are not fast on this store"));
        }
        match &self.moving {
            Some(moving) => self.change_moving(moving, extent, Change::Zero(how)).await,
            None => self.zero_in_leaf(extent, how).await,
        }
    }

    async fn zero_in_leaf(&self, extent: Extent, how: WriteZeroes) -> Result<()> {
        let only_held = self.layers.len() == 1 && how.may_unmap;
        self.each_part(extent, only_held, async |part| {
            let below = self.below_is_zero(self.leaf().unit(part)).await?;
            let zeroed = pin!(self.zero_leaf_part(part, how.may_unmap, below));
            self.at_store(0, metrics::Op::WriteZeroes, part.len_bytes, zeroed).await
        })
        .await
    }

    /// Changes the leaf, whatever is moved.
    pub(super) async fn change_leaf(&self, extent: Extent, change: Change<'_>) -> Result<()> {
        match change {
            Change::Write(from) => self.write_parts(extent, from).await,
            Change::Zero(how) => self.zero_in_leaf(extent, how).await,
            Change::Discard => self.discard_in_leaf(extent).await,
        }
    }

    /// Runs `each` on every part of `extent`, or only on those that the leaf has space for, one after the other.
    pub(super) async fn each_part(
        &self,
        extent: Extent,
        only_held: bool,
        each: impl AsyncFn(Extent) -> Result<()>,
    ) -> Result<()> {
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

/// A write to `reserved` has failed. Space is there for other writes where there was too little for this one, unless the place is the disk's already.
#[cold]
fn give_up(reserved: impl Reserved, error: Error) -> Error {
    if error.kind() == ErrorKind::NoSpace {
        reserved.abandon();
    }
    error
}
