//! Checkpoints and changed blocks in the control API.

use serde::{Deserialize, Serialize};
use spile_core::{Disk as _, Error, ErrorKind, Result, Store as _, yield_now};
use spile_image::Graph;
use spile_image::layer::Layer as _;
use spile_life::changes::{Changed, Checkpoint};
use spile_node::Node;
use spile_store::HostStore;
use utoipa::ToSchema;

use super::view::View;
use crate::checkpoints::Checkpoints;

/// What an answer has at most of the ranges of changed blocks, about.
const MOST_RANGES: usize = 16 << 10;
/// So many blocks are looked at in one go.
const STEP_BLOCKS: u64 = 1 << 18;

/// A call for a checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct NewCheckpoint {
    /// Its name: 1 to 88 bytes, none a control character.
    pub name: String,
    /// How finely changes are kept, in bytes: a power of two from 4096. 65536 when left out. The disk's first checkpoint says it for all.
    #[serde(default)]
    pub block_bytes: Option<u32>,
}

/// The checkpoints of a disk.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct CheckpointList {
    /// The disk's name on its server, or its path.
    pub disk: String,
    /// The path of the disk's image.
    pub path: String,
    /// How finely changes are kept, in bytes; `null` for a disk without checkpoints.
    pub block_bytes: Option<u32>,
    /// The checkpoints, oldest first.
    pub checkpoints: Vec<NamedCheckpoint>,
}

/// A moment of a disk that has a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NamedCheckpoint {
    /// Its name.
    pub name: String,
    /// When it was made, in seconds since 1970-01-01 UTC; of a bitmap inside the image, when Spile has first met it, or 0.
    pub created_unix_s: u64,
    /// The bytes in blocks that may have changed since.
    pub changed_bytes: u64,
    /// It is a bitmap inside the disk's image, which other programs read.
    #[serde(default)]
    pub in_image: bool,
}

/// The blocks of a disk that may have changed since a checkpoint: all that have, and a few more.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ChangedBlocks {
    /// The disk's name on its server, or its path.
    pub disk: String,
    /// The path of the disk's image.
    pub path: String,
    /// The checkpoint.
    pub since: String,
    /// When it was made, in seconds since 1970-01-01 UTC.
    #[serde(default)]
    pub since_unix_s: u64,
    /// The size of the disk now, in bytes.
    pub virtual_size_bytes: u64,
    /// The size of a block in bytes: ranges begin and end with blocks, or with the disk.
    pub block_bytes: u32,
    /// The bytes in all these ranges.
    pub changed_bytes: u64,
    /// Why more counts as changed than was written, if it does.
    pub warning: Option<String>,
    /// The ranges, in order; no two touch.
    pub ranges: Vec<ChangedRange>,
    /// Where the next part of the answer begins, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_offset_bytes: Option<u64>,
}

/// Blocks that may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ChangedRange {
    /// Where the range begins on the disk.
    pub offset_bytes: u64,
    /// Its length.
    pub length_bytes: u64,
}

impl From<Checkpoint> for NamedCheckpoint {
    fn from(Checkpoint { name, created_unix_s, changed_bytes, is_bitmap }: Checkpoint) -> Self {
        Self { name, created_unix_s, changed_bytes, in_image: is_bitmap }
    }
}

impl CheckpointList {
    /// What `checkpoints` has. `name` is what the disk is called.
    pub async fn of(name: &str, disk: &Node<Graph<HostStore>>, checkpoints: &Checkpoints) -> Self {
        let (list, block_bytes) = checkpoints.list(disk).await;
        let list = list.into_iter().map(NamedCheckpoint::from).collect();
        Self { disk: name.to_owned(), path: path_of(disk).await, block_bytes, checkpoints: list }
    }
}

impl ChangedBlocks {
    /// What `checkpoints` says has changed since `since`, from `offset_bytes` on. `name` is what the disk is called.
    ///
    /// # Errors
    /// As [`Checkpoints::changed`].
    pub async fn of(
        name: &str,
        disk: &Node<Graph<HostStore>>,
        checkpoints: &Checkpoints,
        since: &str,
        offset_bytes: u64,
    ) -> Result<Self> {
        let virtual_size_bytes = disk.size_bytes();
        let mut answer = Self {
            disk: name.to_owned(),
            path: path_of(disk).await,
            since: since.to_owned(),
            since_unix_s: checkpoints.made_at(since).await?,
            virtual_size_bytes,
            block_bytes: 0,
            changed_bytes: 0,
            warning: None,
            ranges: Vec::new(),
            next_offset_bytes: Some(offset_bytes),
        };
        while let Some(at) = answer.next_offset_bytes.filter(|_| answer.ranges.len() < MOST_RANGES) {
            let block_bytes = u64::from(answer.block_bytes.max(4096));
            let at = at / block_bytes * block_bytes;
            let end = at.saturating_add(STEP_BLOCKS * block_bytes).min(virtual_size_bytes);
            let Changed { ranges, block_bytes, warning } = checkpoints.changed(disk, since, None, at..end).await?;
            answer.block_bytes = block_bytes;
            answer.warning = answer.warning.or(warning);
            for range in ranges {
                answer.add(ChangedRange { offset_bytes: range.offset.0, length_bytes: range.len_bytes });
            }
            answer.next_offset_bytes = (end < virtual_size_bytes).then_some(end);
            yield_now().await;
        }
        Ok(answer)
    }

    /// Goes on with the next part of the answer.
    ///
    /// # Errors
    /// `Busy` when the checkpoint has been made anew since the first part.
    pub fn extend(&mut self, next: Self) -> Result<()> {
        if next.since_unix_s != self.since_unix_s {
            let what = format!("the checkpoint {:?} was just made anew", self.since);
            return Err(Error::new(ErrorKind::Busy, what).hint("ask again"));
        }
        next.ranges.into_iter().for_each(|range| self.add(range));
        self.next_offset_bytes = next.next_offset_bytes;
        self.virtual_size_bytes = next.virtual_size_bytes;
        self.warning = self.warning.take().or(next.warning);
        Ok(())
    }

    /// Adds a range that comes behind the others, or goes on with the last one. Blocks that are there already are left out.
    fn add(&mut self, range: ChangedRange) {
        let end = range.offset_bytes + range.length_bytes;
        let last_end = self.ranges.last().map(|last| last.offset_bytes + last.length_bytes);
        let start = range.offset_bytes.max(last_end.unwrap_or(0));
        if start >= end {
            return;
        }
        self.changed_bytes += end - start;
        match self.ranges.last_mut() {
            Some(last) if last_end == Some(start) => last.length_bytes += end - start,
            _ => self.ranges.push(ChangedRange { offset_bytes: start, length_bytes: end - start }),
        }
    }
}

async fn path_of(disk: &Node<Graph<HostStore>>) -> String {
    disk.graph().await.handles()[0].image().store().path().display().to_string()
}

impl View {
    /// The checkpoints of the disk of this name.
    ///
    /// # Errors
    /// As [`View::find`].
    pub async fn checkpoints(&self, name: &str) -> Result<CheckpointList> {
        let own = name.to_owned();
        self.with_checkpoints(
            name,
            async move |disk, checkpoints| Ok(CheckpointList::of(&own, disk, checkpoints).await),
        )
        .await
    }

    /// Makes a checkpoint of the disk of this name.
    ///
    /// # Errors
    /// As [`View::find`] and [`Checkpoints::make`]; `Busy` while the disk is paused.
    pub async fn make_checkpoint(&self, name: &str, new: NewCheckpoint) -> Result<CheckpointList> {
        self.refuse_paused(name)?;
        let make = async move |disk: &Node<_>, checkpoints: &Checkpoints| {
            checkpoints.make(disk, &new.name, new.block_bytes).await
        };
        self.with_checkpoints(name, make).await?;
        self.checkpoints(name).await
    }

    /// Removes a checkpoint of the disk of this name.
    ///
    /// # Errors
    /// As [`View::find`] and [`Checkpoints::remove`]; `Busy` while the disk is paused.
    pub async fn remove_checkpoint(&self, name: &str, checkpoint: String) -> Result<CheckpointList> {
        self.refuse_paused(name)?;
        let remove = async move |disk: &Node<_>, checkpoints: &Checkpoints| checkpoints.remove(disk, &checkpoint).await;
        self.with_checkpoints(name, remove).await?;
        self.checkpoints(name).await
    }

    /// What has changed of the disk of this name since a checkpoint, from `offset_bytes` on.
    ///
    /// # Errors
    /// As [`View::find`] and [`Checkpoints::changed`].
    pub async fn changed(&self, name: &str, since: String, offset_bytes: u64) -> Result<ChangedBlocks> {
        let own = name.to_owned();
        let look = async move |disk: &Node<_>, checkpoints: &Checkpoints| {
            ChangedBlocks::of(&own, disk, checkpoints, &since, offset_bytes).await
        };
        self.with_checkpoints(name, look).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_an_answer_join() {
        let part = |ranges: &[(u64, u64)], next_offset_bytes| {
            let mut answer = ChangedBlocks {
                disk: "a".to_owned(),
                path: "/a".to_owned(),
                since: "b".to_owned(),
                since_unix_s: 1,
                virtual_size_bytes: 1 << 30,
                block_bytes: 4096,
                changed_bytes: 0,
                warning: None,
                ranges: Vec::new(),
                next_offset_bytes,
            };
            for &(offset_bytes, length_bytes) in ranges {
                answer.add(ChangedRange { offset_bytes, length_bytes });
            }
            answer
        };
        let mut all = part(&[(0, 4096), (4096, 4096), (16384, 4096)], Some(20480));
        all.extend(part(&[(16384, 8192), (40960, 4096)], None)).unwrap();
        let ranges: Vec<_> = all.ranges.iter().map(|range| (range.offset_bytes, range.length_bytes)).collect();
        assert_eq!(ranges, [(0, 8192), (16384, 8192), (40960, 4096)]);
        assert_eq!((all.changed_bytes, all.next_offset_bytes), (20480, None));
        let other = ChangedBlocks { since_unix_s: 2, ..part(&[], None) };
        assert_eq!(all.extend(other).unwrap_err().kind(), ErrorKind::Busy);
    }
}
