//! The changed blocks of a disk go along when it gets another image at another place: [`Changes::carry`].

use std::path::Path;
use std::sync::Arc;

use spile_core::{Disk, Error, ErrorKind, Files, Result, Store as _};
use spile_node::Node;

use super::header::MOST_CHECKPOINTS;
use super::{Broken, Changes, Found, Surroundings, find};

impl<F: Files + Clone> Changes<F> {
    /// Makes the same beside another image, at `disk`, which is as `found` and is to be the disk of `node` soon: all that has changed until then and after has
    /// its bits in both files, and is durable in both as it was in one. `since` is one more checkpoint there: what has changed since this call began, or
    /// a little before.
    ///
    /// Until [`Changes::carried`] or [`Changes::left_behind`] nobody makes or removes checkpoints.
    ///
    /// # Errors
    /// As [`Changes::create`]. Nothing is there then.
    pub async fn carry<G: Disk>(
        &self,
        around: Surroundings<F>,
        node: &Node<G>,
        (disk, found): (&Path, Found),
        since: Option<&str>,
    ) -> Result<Self> {
        let (bytes, grain) = (node.size_bytes(), self.state.lock().await.header.grain);
        let new = Self::create(around, disk, bytes, grain, found).await?;
        if let Err(error) = self.fill(node, &new, since).await {
            // No request may wait for a file that is given up.
            let _ = self.attach(node).await;
            // The hand-over may go on without them, and then nobody may believe what is left.
            let _ = new.giving.void().await;
            return Err(error);
        }
        Ok(new)
    }

    async fn fill<G: Disk>(&self, node: &Node<G>, new: &Self, since: Option<&str>) -> Result<()> {
        let (own, mut other) = (self.state.lock().await, new.state.lock().await);
        self.check_usable(&own)?;
        if own.is_damaged || own.tracked.is_empty() {
            return Err(Error::new(ErrorKind::Corrupt, "the file of changed blocks is damaged").at_path(&self.path));
        }
        let (mut header, mut tracked) = (other.header.clone(), Vec::new());
        (header.disk_bytes, header.boot_id) = (node.size_bytes(), new.around.env.boot_id());
        header.id = own.header.id;
        for interval in &own.header.intervals {
            let mut copy = new.new_interval(&header, &interval.name, node.size_bytes()).await?;
            copy.created_unix_s = interval.created_unix_s;
            copy.covered_bytes = interval.covered_bytes.min(node.size_bytes());
            tracked.push(Arc::new(new.map(&copy, header.grain).await?));
            header.intervals.push(copy);
        }
        // The way back is of less use than the checkpoints.
        if let Some(name) = since.filter(|_| header.intervals.len() < MOST_CHECKPOINTS) {
            let interval = new.new_interval(&header, name, node.size_bytes()).await?;
            tracked.push(Arc::new(new.map(&interval, header.grain).await?));
            header.intervals.push(interval);
        }
        // From here on requests set the bits in both files.
        let count = own.tracked.len();
        if self.around.broken != Broken::CarriedLate {
            // No request waits for the storage of the new place, which may be slow, while the disk is not there yet.
            for tracked in &tracked[count - 1..] {
                tracked.mark_everywhere(new.around.timer.now_ns()).await?;
            }
            self.meet(node, own.tracked.last().into_iter().chain(&tracked[count - 1..])).await?;
        }
        for (from, into) in own.tracked.iter().zip(&tracked) {
            into.take_in(from).await;
            if from.is_lost() {
                return Err(Error::new(ErrorKind::Io, "changes are not noted any more").at_path(&self.path));
            }
        }
        new.store.sync().await?;
        for (interval, tracked) in header.intervals.iter_mut().zip(&tracked).take(count - 1) {
            interval.settled = Some(tracked.bits().crc().await);
        }
        new.write(&mut other, header).await?;
        other.tracked = tracked;
        Ok(())
    }

    /// The disk of `node` is the image that these were carried to: requests set the bits in this file only.
    ///
    /// # Errors
    /// The system's: then the bits are set as before, and one more interval counts as not settled.
    pub async fn carried<G: Disk>(&self, node: &Node<G>, since: Option<&str>) -> Result<()> {
        let mut state = self.state.lock().await;
        if self.around.broken == Broken::CarriedLate {
            return Ok(());
        }
        self.meet(node, state.tracked.last()).await?;
        // All areas have been marked beforehand.
        if let Some(last) = state.tracked.last() {
            last.cycle().await;
        }
        match since.and_then(|name| find(&state.header, name).ok()).and_then(|number| number.checked_sub(1)) {
            Some(before) => self.settle(&mut state, before).await,
            None => Ok(()),
        }
    }

    /// The disk stays where it is, and the file that these were carried to, `new`, goes.
    ///
    /// # Errors
    /// The system's.
    pub async fn left_behind<G: Disk>(&self, node: &Node<G>, new: Self) -> Result<()> {
        self.attach(node).await?;
        new.giving.void().await.map_or(Ok(()), |(left, _)| Err(left))
    }
}
