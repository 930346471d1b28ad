//! [`exchange`]: puts other graphs under running disks, all at one point in time.
//!
//! The gates of all disks close, then each opens to its new graph. So no request begins between the first exchange and
//! the last: a write to one disk that follows an acknowledged write to another is never in the old epoch when that other
//! write is in the new one. The exchange waits for no request in flight: each ends under the graph that it began with. The new graph is told of
//! them ([`Disk::follows`]), for they may still change what it has in common with the old one.
//!
//! An exchange waits for a change of size, a close, a stage being attached, or another exchange of one of its disks;
//! these wait for the exchange in turn. A disk that is closed cannot be exchanged any more.

use std::sync::Arc;
use std::time::Instant;

use async_lock::MutexGuard;
use spile_core::{Disk, Epoch, Error, ErrorKind, Result};

use crate::end::End;
use crate::node::Node;
use crate::published::{Control, Published};
use crate::stage::{Attached, Place, Stage};

/// A disk, and the graph it is to have.
pub type Change<'a, G> = (&'a Node<G>, Arc<G>);

/// What an exchange leaves behind: the old graph, under which requests may still run.
pub struct OldEpoch<G> {
    graph: Arc<G>,
    ends: Vec<Arc<End>>,
}

impl<G> OldEpoch<G> {
    /// The graph of before the exchange.
    pub fn graph(&self) -> &Arc<G> {
        &self.graph
    }

    /// True when every request that began before the exchange has ended.
    pub fn has_ended(&self) -> bool {
        self.ends.iter().all(|end| end.has_come())
    }

    /// Waits until every request that began before the exchange has ended. Then the old leaf changes no more and can
    /// be sealed. Requests of still older epochs count as well, so layers are sealed in the order of their epochs.
    pub async fn ended(&self) {
        for end in &self.ends {
            end.wait().await;
        }
    }
}

/// Disks whose gates are closed. Dropped without [`ClosedGates::open`], the gates open to the graphs of before.
pub struct ClosedGates<'a, G: Disk> {
    gates: Vec<Gate<'a, G>>,
    closed_at: Instant,
}

struct Gate<'a, G: Disk> {
    /// Its place in the caller's list.
    number: usize,
    disk: &'a Published<G>,
    control: MutexGuard<'a, Control<G>>,
    new: Arc<G>,
}

impl<G: Disk> Drop for Gate<'_, G> {
    fn drop(&mut self) {
        self.disk.open_with(&mut self.control);
    }
}

impl<G: Disk> ClosedGates<'_, G> {
    /// Has requests meet a stage at `place` once the gates are open: each disk its own, in the order of the caller's list. All disks get theirs
    /// at one point in time.
    ///
    /// # Errors
    /// `Busy` when a disk has a stage there already; no disk has got one then.
    pub fn attach(&mut self, place: Place, stages: Vec<Arc<dyn Stage>>) -> Result<()> {
        if self.gates.iter_mut().any(|gate| gate.control.stages.at(place).is_some()) {
            return Err(Error::new(ErrorKind::Busy, format!("the place {place:?} has a stage already")));
        }
        for gate in &mut self.gates {
            *gate.control.stages.at(place) = stages.get(gate.number).cloned().map(Attached::new);
        }
        Ok(())
    }

    /// When the first gate began to close. From then on requests wait.
    pub fn closed_at(&self) -> Instant {
        self.closed_at
    }

    /// Waits until every request has ended that began before the gates closed. From then on nothing uses the old graphs but whoever calls.
    pub async fn quiet(&self) {
        for gate in &self.gates {
            for end in &gate.control.epochs {
                end.wait().await;
            }
        }
    }

    /// Opens each gate to its new graph. The old epochs are in the order of the changes.
    pub fn open(self) -> Vec<OldEpoch<G>> {
        let mut old: Vec<_> = self.gates.into_iter().map(|gate| (gate.number, gate.open())).collect();
        old.sort_by_key(|(number, _)| *number);
        old.into_iter().map(|(_, old)| old).collect()
    }
}

impl<G: Disk> Gate<'_, G> {
    fn open(mut self) -> OldEpoch<G> {
        let (new, ends) = (self.new.clone(), self.control.epochs.clone());
        let epochs: Vec<_> = ends.iter().map(|end| end.clone() as Arc<dyn Epoch>).collect();
        new.follows(&epochs);
        OldEpoch { graph: std::mem::replace(&mut self.control.graph, new), ends }
    }
}

/// Exchanges the graphs of one or several disks at one point in time. On an error nothing has changed.
///
/// A graph's layers must already be durable as files: after a power cut the disk's path leads to the new leaf or the old one,
/// and both must be complete.
///
/// # Errors
/// `InvalidInput` when a graph differs from its disk in size (a change of size may have come first), in being
/// read-only, or wants a larger alignment, or when a disk is named twice; `Shutdown` when a disk is closed.
pub async fn exchange<G: Disk>(changes: Vec<Change<'_, G>>) -> Result<Vec<OldEpoch<G>>> {
    Ok(close_gates(changes).await?.open())
}

/// The first half of [`exchange`]: closes the gates. From here on requests to these disks wait.
///
/// # Errors
/// As [`exchange`]. All gates are open then.
pub async fn close_gates<G: Disk>(changes: Vec<Change<'_, G>>) -> Result<ClosedGates<'_, G>> {
    close(changes.into_iter().map(|(node, new)| (node, Some(new))).collect()).await
}

/// Closes the gates of disks that keep their graphs: for a point in time that several disks have in common.
///
/// # Errors
/// `InvalidInput` when a disk is named twice; `Shutdown` when a disk is closed. All gates are open then.
pub async fn hold_gates<'a, G: Disk>(disks: &[&'a Node<G>]) -> Result<ClosedGates<'a, G>> {
    close(disks.iter().map(|disk| (*disk, None)).collect()).await
}

/// Closes the gates of disks, each of which gets another graph or keeps the one it has.
async fn close<'a, G: Disk>(changes: Vec<(&'a Node<G>, Option<Arc<G>>)>) -> Result<ClosedGates<'a, G>> {
    let mut changes: Vec<_> = changes.into_iter().map(|(node, new)| (node.published(), new)).enumerate().collect();
    // Everybody locks in the same order, so that two exchanges of the same disks cannot wait for each other.
    changes.sort_by_key(|(_, (disk, _))| std::ptr::from_ref(*disk).addr());
    if changes.windows(2).any(|pair| std::ptr::eq(pair[0].1.0, pair[1].1.0)) {
        return Err(Error::new(ErrorKind::InvalidInput, "a disk is to be exchanged twice at once"));
    }
    let mut locked = Vec::new();
    for (number, (disk, new)) in changes {
        let control = disk.control.lock().await;
        control.check_open()?;
        let new = match new {
            Some(new) => disk.check_fits(&new).map(|()| new)?,
            None => control.graph.clone(),
        };
        locked.push((number, disk, control, new));
    }
    // All is checked and nothing is awaited any more: the gates stay closed for as short as can be.
    let (mut gates, closed_at) = (Vec::with_capacity(locked.len()), Instant::now());
    for (number, disk, control, new) in locked {
        disk.close_gate();
        gates.push(Gate { number, disk, control, new });
    }
    Ok(ClosedGates { gates, closed_at })
}
