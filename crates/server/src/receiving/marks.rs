//! What has changed of a disk comes with it: the file of its changed blocks, which the other host sends before the hand-over.

use std::sync::Arc;

use spile_core::Result;
use spile_front_nbd::{Found, Wanted};
use spile_image::layer::Identity;
use spile_life::names;

use super::door::{Door, found, refused, who};
use super::house::{Room, Use, Who};
use crate::serving::disks::ServedDisk;

/// The file on its way is served under this name. No disk is called so: a name has no `/`.
fn name_of_file(disk: &str) -> String {
    format!("marks/{disk}")
}

impl Door {
    /// The file for what has changed of the disk of `room`, new and empty.
    pub(super) async fn take_marks(
        &self,
        room: &Arc<Room>,
        wanted: &Wanted,
        id: Identity,
        len_bytes: u64,
    ) -> Result<Found<ServedDisk>> {
        let house = &self.0;
        let receiver = house.receiver();
        let alone = room.alone().await?;
        let file = house.room(&name_of_file(&room.name));
        // A link that was cut may still be there. What it writes goes to a file without a name.
        file.forget();
        let begun = receiver.begin_marks(&room.name, id, len_bytes).await.map_err(refused);
        drop(alone);
        let writes = Use::Writes { who: who(wanted).unwrap_or(Who::Nameless), peer: wanted.peer, is_half: false };
        let entered = match begun {
            Ok(place) => file.wait(async || house.enter(&file, &place, writes).await).await,
            Err(error) => Err(error),
        };
        house.leave(file);
        entered.map(found)
    }

    /// That file is whole, and the disk's from now on.
    pub(super) async fn adopt_marks(&self, room: &Arc<Room>, id: Identity) -> Result<Found<ServedDisk>> {
        let house = &self.0;
        let receiver = house.receiver();
        let packed = names::new_changes(&receiver.disk(&room.name)?);
        let file = house.room(&name_of_file(&room.name));
        let closed = file.be_closed().await;
        house.leave(file);
        closed?;
        receiver.half(&room.name, id).await.map_err(refused)?;
        let lease = self.have_open(room, id).await?;
        let alone = room.alone().await?;
        // They are to lie beside the disk's name.
        receiver.check_name(&room.name).await.map_err(refused)?;
        let open = lease.open();
        let adopted = open.checkpoints.adopt(&open.disk, &packed).await;
        drop(alone);
        if let Err(error) = &adopted {
            tracing::warn!("{:?}: its checkpoints did not come along: {error}", room.name);
        }
        adopted.map_err(refused)?;
        // It stays open until the answer was taken: the link that goes on with it need not open it again.
        Ok(Found { lease: Box::new(lease), ..house.answer() })
    }
}
