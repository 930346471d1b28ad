//! The checkpoints of a disk that comes to the other host, as `spile receive` takes them in (`spile-server`, `receiving/marks.rs`).

use std::sync::Arc;

use spile_core::{Disk, Error, ErrorKind, Files, Result};
use spile_image::layer::Identity;
use spile_life::changes::{Broken as BrokenChanges, Changes};
use spile_life::motion::ReceivedPlace;
use spile_life::names;
use spile_node::Place;

use super::Broken;
use super::house::{House, Lease, MOST_LOOKS, Tracker, There, lock, refused};
use crate::motion::marks::{around, found_at};
use crate::turns::turns;

/// The file on its way is open under such a name. No disk is called so.
const MARKS: &str = "marks/";

/// True when `name` is that of a file on its way, and no disk's.
pub(super) fn is_of_marks(name: &str) -> bool {
    name.starts_with(MARKS)
}

impl House {
    /// What was noted of the changes of the disk at `place`, if something was.
    pub(super) async fn open_changes(&self, place: &ReceivedPlace, disk_bytes: u64) -> Result<Option<Tracker>> {
        let disk = names::disk_of_half(&place.path).unwrap_or_else(|| place.path.clone());
        let around = around(&self.world, BrokenChanges::Nothing);
        let opened = Changes::open(around, &disk, disk_bytes, found_at(&self.world, &place.path)).await?;
        Ok(opened.map(Arc::new))
    }

    /// The file for what has changed of the disk `name`, new and empty.
    pub(super) async fn take_marks(
        self: &Arc<Self>,
        name: &str,
        (id, len_bytes): (Identity, u64),
        link: Identity,
    ) -> Result<Arc<Lease>> {
        let file = format!("{MARKS}{name}");
        let place = {
            let _alone = self.busy.lock().await;
            lock(&self.open).remove(&file);
            lock(&self.adopted).remove(name);
            self.with_receiver(async |receiver| receiver.begin_marks(name, id, len_bytes).await).await.map_err(refused)?
        };
        self.wait(async |_| self.enter(&file, &place, Some(link), false).await).await
    }

    /// That file is whole, and the disk's from now on.
    pub(super) async fn adopt_marks(self: &Arc<Self>, name: &str, id: Identity) -> Result<()> {
        self.close_marks(&format!("{MARKS}{name}")).await?;
        self.with_receiver(async |receiver| receiver.half(name, id).await).await.map_err(refused)?;
        let lease = self.wait(async |receiver| {
            let (place, _) = receiver.go_on(name, id).await.map_err(refused)?;
            self.enter(name, &place, None, true).await
        });
        let lease = lease.await?;
        let _alone = self.busy.lock().await;
        self.adopt(name, &lease).await.map_err(refused)?;
        lock(&self.adopted).insert(name.to_owned());
        Ok(())
    }

    /// Waits until nobody has the file open any more.
    async fn close_marks(&self, file: &str) -> Result<()> {
        for _ in 0..MOST_LOOKS {
            let Some(open) = self.find_open(file) else { return Ok(()) };
            open.stop();
            drop(open);
            turns(10).await;
        }
        Err(Error::new(ErrorKind::Busy, "what came by a link before is still being written"))
    }

    async fn adopt(&self, name: &str, lease: &Lease) -> Result<()> {
        let disk = self.with_receiver(async |receiver| receiver.disk(name)).await?;
        let (packed, of) = (names::new_changes(&disk), &lease.of);
        let has_come = || self.world.file_number(&packed).is_some();
        // The answer was not heard.
        if lock(&of.changes).is_some() && !has_come() {
            return Ok(());
        }
        let graph = of.node.graph().await;
        let (found, bytes) = (found_at(&self.world, graph.handles()[0].path()), of.node.size_bytes());
        let around = around(&self.world, BrokenChanges::Nothing);
        let adopted = match Changes::adopt(around, &packed, &disk, bytes, found).await {
            Err(error) if has_come() => return Err(error),
            Err(error) => {
                of.node.replace(Place::ChangeTracking, None).await?;
                lock(&of.changes).take();
                let _ = self.files.remove(&names::changes(&disk)).await;
                return Err(error);
            }
            Ok(adopted) => Arc::new(adopted),
        };
        adopted.store().void_syncs(false);
        *lock(&of.changes) = Some(adopted.clone());
        match self.broken {
            Broken::AdoptedLate => Ok(()),
            _ => adopted.attach(&of.node).await,
        }
    }
}

impl There {
    /// What is noted of the changes of the disk `name`, while somebody is connected to it.
    pub(super) fn changes(&self, name: &str) -> Option<Tracker> {
        let open = self.house()?.find_open(name)?;
        let changes = lock(&open.changes);
        changes.clone()
    }

    /// All checkpoints of the disk `name` have come.
    pub(super) fn has_adopted(&self, name: &str) -> bool {
        lock(&self.adopted).contains(name)
    }
}
