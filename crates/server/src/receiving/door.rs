//! [`Door`]: where clients ask for disks, and the other hosts give their orders.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use spile_core::{Code, Error, ErrorKind, Result};
use spile_front_nbd::{Find, Found, Wanted};
use spile_image::layer::{Identity, Layer as _};
use spile_life::motion::{Order, ReceivedState, is_free_here, not_now};
use spile_store::{LINK_CONTEXT, READER_CONTEXT};

use super::house::{House, Lease, Room, Tried, Use, Who};
use crate::look;
use crate::serving::disks::ServedDisk;

/// Where clients ask for disks.
pub(super) struct Door(pub Arc<House>);

impl Find<ServedDisk> for Door {
    fn find<'a>(&'a self, wanted: &'a Wanted) -> Pin<Box<dyn Future<Output = Result<Found<ServedDisk>>> + 'a>> {
        Box::pin(async move {
            let (order, name) = match Order::of_export(&wanted.export) {
                Some((order, name)) => (Some(order), name),
                None if Order::is_meant(&wanted.export) => return Err(unknown_order()),
                None => (None, wanted.export.as_str()),
            };
            self.0.sweep().await;
            let room = self.0.room(name);
            let found = match order {
                Some(Order::GoOn { id, link }) => self.go_on(&room, wanted, id, link).await.map_err(not_now),
                Some(Order::Marks { id, len_bytes }) => self.take_marks(&room, wanted, id, len_bytes).await,
                Some(Order::Marked { id }) => self.adopt_marks(&room, id).await,
                Some(Order::Finish { id }) => self.finish(&room, id).await.map_err(not_now),
                // Whoever takes what may go by for an answer gives the move up, or begins it anew with all that the disk holds.
                Some(order) => self.obey(&room, wanted, order).await.map_err(not_now),
                None => self.whole(&room, wanted).await,
            };
            self.0.leave(room);
            found
        })
    }
}

/// What the other host is told of an order that is refused. To be told that there is no such thing, it would take this for a host without a
/// receiver.
pub(super) fn refused(error: Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound => Error::new(ErrorKind::Denied, error.message().to_owned()).caused_by(error),
        _ => error,
    }
}

fn unknown_order() -> Error {
    let what = "this `spile receive` does not know the order: the host that gives it has another version of Spile";
    Error::new(ErrorKind::Denied, what).coded(Code::OrderUnknown)
}

/// Refuses a name that is a link, also one that leads nowhere: nobody would be told of that before the end of the move.
fn refuse_link(disk: &Path) -> Result<()> {
    match disk.symlink_metadata() {
        Ok(stat) if stat.is_symlink() => {
            Err(Error::new(ErrorKind::Exists, "there is a link of this name").at_path(disk).hint("remove it"))
        }
        _ => Ok(()),
    }
}

/// Who asks, as far as that is told.
pub(super) fn who(wanted: &Wanted) -> Option<Who> {
    let queries = || wanted.queries.iter();
    if queries().any(|query| query == READER_CONTEXT) {
        return None;
    }
    let link = queries().find_map(|query| query.strip_prefix(LINK_CONTEXT)).filter(|link| link.len() == 32);
    let link = link.and_then(|link| u128::from_str_radix(link, 16).ok()).map(|link| Identity(link.to_be_bytes()));
    Some(link.map_or(Who::Nameless, Who::Named))
}

impl Door {
    /// Does what an order asks for that needs no link. Whoever gave it finds an export that says so.
    async fn obey(&self, room: &Arc<Room>, wanted: &Wanted, order: Order) -> Result<Found<ServedDisk>> {
        let _alone = room.alone().await?;
        let (house, name) = (&self.0, room.name.as_str());
        let receiver = house.receiver();
        match order {
            Order::Begin { id, size_bytes } => {
                refuse_link(&receiver.disk(name)?)?;
                let is_new = house.reserve(name, id, wanted.peer).await?;
                let begun = receiver.begin(name, id, size_bytes).await.map_err(refused);
                begun.inspect_err(|_| self.give_back(name, is_new))?;
            }
            Order::BeginInChain { id, size_bytes, image } => {
                refuse_link(&receiver.disk(name)?)?;
                let has_place = house.reserve(name, id, wanted.peer).await?;
                let begun = Box::pin(receiver.begin_in_chain(name, id, size_bytes, &image)).await.map_err(refused);
                let (_, is_new) = begun.inspect_err(|_| self.give_back(name, has_place))?;
                if is_new {
                    // Whoever is connected to the half of an earlier attempt writes to a file without a name.
                    room.forget();
                }
            }
            Order::TakeOver { id, of } => drop(receiver.take_over(name, id, of).await?),
            Order::Find { id, size_bytes, like } => {
                if !Box::pin(receiver.find_parent(name, id, size_bytes, &like)).await.map_err(refused)? {
                    return Err(is_free_here());
                }
            }
            Order::Back { id, of, size_bytes } => {
                refuse_link(&receiver.disk(name)?)?;
                let look = async |paths: &[PathBuf]| look::of_old_image(paths).await;
                receiver.take_back(name, (id, of), size_bytes, look).await.map_err(refused)?;
            }
            // Each has a method of its own.
            Order::GoOn { .. } | Order::Marks { .. } | Order::Marked { .. } | Order::Finish { .. } => {}
            Order::Ask { id } => drop(receiver.check_half(name, id).await?),
            Order::HandOver { id } => receiver.hand_over(name, id).await.map_err(refused)?,
            Order::Drop { id } => {
                receiver.drop_half(name, id).await.map_err(refused)?;
                house.quota.forget(name);
                // Whoever is connected still writes to a file without a name.
                room.forget();
                return Err(Error::new(ErrorKind::Denied, "the half-made image is removed"));
            }
        }
        Ok(house.answer())
    }

    /// An image was not begun: its place is free, if it has got one.
    fn give_back(&self, name: &str, has_place: bool) {
        if has_place {
            self.0.quota.forget(name);
        }
    }

    /// The image of the move `id` gets its name. It is open meanwhile: what is noted of its changes is known for certain then. One that has its name may be in use here.
    async fn finish(&self, room: &Arc<Room>, id: Identity) -> Result<Found<ServedDisk>> {
        let (house, name) = (&self.0, room.name.as_str());
        let receiver = house.receiver();
        let (place, state) = receiver.go_on(name, id).await.map_err(refused)?;
        if place.is_parent {
            return self.finish_parent(room, id).await;
        }
        let lease = match state {
            ReceivedState::Whole => None,
            _ => Some(self.have_open(room, id).await?),
        };
        let _alone = room.alone().await?;
        if let Some(lease) = &lease {
            lease.open().flush_half().await?;
        }
        let graph = lease.as_ref().and_then(|lease| lease.open().disk.graph_now());
        let store = graph.as_ref().map(|graph| graph.handles()[0].image().store());
        let place = receiver.finish(name, id, store).await.map_err(refused)?;
        house.quota.forget(name);
        tracing::info!("{}: is whole, and was handed over", place.path.display());
        Ok(house.answer())
    }

    /// As [`Door::finish`], of a parent. Nobody writes to it any more when it has its name, so no link that writes is there by then; and it is closed before anybody
    /// uses it, because it is open for writing here.
    async fn finish_parent(&self, room: &Arc<Room>, id: Identity) -> Result<Found<ServedDisk>> {
        let (house, name) = (&self.0, room.name.as_str());
        let lease = room.wait(async || {
            let receiver = house.receiver();
            let (place, state) = receiver.go_on(name, id).await.map_err(refused)?;
            let lease = match house.enter(room, &place, Use::Reads).await? {
                Tried::In(lease) if state == ReceivedState::Whole || !lease.stop_writer() => lease,
                Tried::In(_) => {
                    let what = "what came by a link is still being written";
                    return Ok(Tried::Busy(Error::new(ErrorKind::Busy, what)));
                }
                busy => return Ok(busy),
            };
            if state != ReceivedState::Whole {
                lease.open().flush_half().await?;
            }
            let graph = lease.open().disk.graph_now();
            let store = graph.as_ref().map(|graph| graph.handles()[0].image().store());
            receiver.finish(name, id, store).await.map_err(refused)?;
            house.quota.forget(name);
            // In this order: who comes next opens it for reading only.
            room.forget();
            lease.open().close(name).await?;
            house.end_link(name);
            Ok(Tried::In(lease))
        });
        drop(lease.await?);
        tracing::info!("{name:?}: is whole, as the parent of a disk that comes");
        Ok(house.answer())
    }

    /// The image of the move `id`, which is open for as long as the result is there.
    pub(super) async fn have_open(&self, room: &Arc<Room>, id: Identity) -> Result<Lease> {
        let house = &self.0;
        room.wait(async || {
            let receiver = house.receiver();
            let (place, _) = receiver.go_on(&room.name, id).await.map_err(refused)?;
            house.enter(room, &place, Use::Reads).await
        })
        .await
    }

    /// The image of a move, by the link that its old host uses: half, or whole when it was handed over.
    async fn go_on(
        &self,
        room: &Arc<Room>,
        wanted: &Wanted,
        id: Identity,
        link: Identity,
    ) -> Result<Found<ServedDisk>> {
        let house = &self.0;
        room.wait(async || {
            let receiver = house.receiver();
            let (place, state) = receiver.write_on(&room.name, id).await?;
            house.quota.note_used(&room.name);
            let is_half = state != ReceivedState::Whole;
            house.enter(room, &place, Use::Writes { who: Who::Named(link), peer: wanted.peer, is_half }).await
        })
        .await
        .map(found)
    }

    /// The disk of this name that was handed over.
    async fn whole(&self, room: &Arc<Room>, wanted: &Wanted) -> Result<Found<ServedDisk>> {
        let house = &self.0;
        let how = match who(wanted) {
            None => Use::Reads,
            Some(who) => Use::Writes { who, peer: wanted.peer, is_half: false },
        };
        room.wait(async || {
            let receiver = house.receiver();
            let place = receiver.whole(&room.name).await?;
            let how = if place.is_sealed { Use::Reads } else { how };
            house.enter(room, &place, how).await
        })
        .await
        .map(found)
    }
}

pub(super) fn found(lease: Lease) -> Found<ServedDisk> {
    let (server, is_alone) = (lease.server(), lease.is_alone());
    let lease: Box<dyn Any + Send + Sync> = Box::new(lease);
    Found { server, lease, is_alone }
}
