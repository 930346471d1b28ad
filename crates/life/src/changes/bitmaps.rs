//! The bitmaps inside a disk's image are checkpoints of the disk while it is open: [`Changes::follow_bitmaps`].
//!
//! # Rules
//! 1. A bitmap that was closed in order is true: whoever has written to the image since has noted it there. So it is taken up anew whenever anybody else may
//!    have written, and its checkpoint of before goes. When nobody has, its checkpoint knows as much.
//!    What has changed in the image's parents no bitmap tells: when they are others than they were, all of the disk counts as changed.
//! 2. A bitmap that is in use is believed by nobody, but for one that was taken up before, in an image that nobody else has written to since
//!    ([`BitmapState::KeptUp`]): then this file knows what has changed. It is kept up, and the image gets it back. When somebody else has written, all
//!    checkpoints have everything count as changed, and the bitmap stays in use.
//!    A bitmap that the image calls true and that lacks a change which is known here is in use at once ([`Followed::is_behind`]): what is known would go with a
//!    kill before the first change of the image, for then the bitmap is taken up anew. Closed in order, the image has it with all bits.
//! 3. A checkpoint whose bitmap was removed from the image goes, too. When the disk has another image, its checkpoints stay, and are those of bitmaps no more.
//! 4. Bits of a bitmap are durable here before the header has its checkpoint. The header is written before any request, and so before the image has the bitmap
//!    in use.
//!
//! Each checkpoint counts what has changed since later ones, too. So bitmaps are taken up behind all others, and the one with more bits comes first: of two that both note
//! all changes that is the older one. Where it is not, it says too much.

use std::ops::Range;
use std::sync::Arc;

use spile_core::{Error, ErrorKind, Extent, Files, Result, Store};
use spile_image::bitmaps::{BitmapState, ChangedSince, InnerBitmap, LaterRanges};
use spile_image::layer::Layer;

use super::header::{Header, Interval};
use super::tracked::Tracked;
use super::{Changes, State, check_name, find, forget_last, is_hidden};

/// What becomes of the bitmaps of an image.
#[derive(Debug, Default)]
pub struct Followed {
    /// They are checkpoints of the disk, and the image is to have them back.
    pub kept: Vec<String>,
    /// They note changes and are not kept up, with the reason of each.
    pub left: Vec<(String, Error)>,
    /// Bitmaps that the image calls true lack what is known to have changed. They are to be in use at once, durably ([`KeptBitmaps::is_behind`]).
    ///
    /// [`KeptBitmaps::is_behind`]: spile_image::bitmaps::KeptBitmaps::is_behind
    pub is_behind: bool,
}

type Taken<S> = (Interval, Arc<Tracked<S>>);

impl<F: Files + Clone> Changes<F> {
    /// Has the bitmaps of the disk's image be checkpoints, where they can. The disk is `disk_bytes` long. To be called before [`Changes::attach`]. When the file cannot be
    /// written, tracking is given up, and no bitmap is kept.
    ///
    /// # Errors
    /// Those of the image.
    pub async fn follow_bitmaps<S: Store>(&self, image: &impl Layer<S>, disk_bytes: u64) -> Result<Followed> {
        let there = image.bitmaps().await?;
        let mut state = self.state.lock().await;
        if self.check_usable(&state).is_err() {
            return Ok(Followed { is_behind: are_behind(&state, there.as_deref()), ..Followed::default() });
        }
        let followed = self.follow(&mut state, image, there.as_deref(), disk_bytes).await;
        let is_behind = are_behind(&state, there.as_deref());
        match followed {
            Err(error) if state.is_stuck => {
                drop(state);
                self.giving.up(&error).await;
                Ok(Followed { is_behind, ..Followed::default() })
            }
            followed => Ok(Followed { is_behind, ..followed? }),
        }
    }

    async fn follow<S: Store>(
        &self,
        state: &mut State<F::Store>,
        image: &impl Layer<S>,
        there: Option<&[InnerBitmap]>,
        disk_bytes: u64,
    ) -> Result<Followed> {
        self.drop_gone(state, there).await?;
        let (mut followed, mut taken) = (Followed::default(), Vec::<Taken<F::Store>>::new());
        let is_known =
            |header: &Header, name: &str| header.intervals.iter().any(|one| one.is_bitmap && one.name == name);
        // The place and the name of each new interval are taken in this header.
        let mut header = state.header.clone();
        for bitmap in there.unwrap_or_default() {
            if is_known(&state.header, &bitmap.name) {
                followed.kept.push(bitmap.name.clone());
            } else if bitmap.records && bitmap.state == BitmapState::Good {
                match self.take_up_bitmap(&header, image, bitmap, disk_bytes).await {
                    Ok(mut new) => {
                        if state.has_other_parents {
                            new.0.covered_bytes = 0;
                        }
                        header.intervals.push(new.0.clone());
                        taken.push(new);
                    }
                    Err(error) => followed.left.push((bitmap.name.clone(), error)),
                }
            }
        }
        if !taken.is_empty() {
            followed.kept.extend(taken.iter().map(|(interval, _)| interval.name.clone()));
            self.put_behind(state, taken).await?;
        }
        Ok(followed)
    }

    /// Removes checkpoints of bitmaps that are to be taken up anew, or that the image has no more.
    async fn drop_gone(&self, state: &mut State<F::Store>, there: Option<&[InnerBitmap]>) -> Result<()> {
        let mut number = 0;
        while number < state.header.intervals.len() {
            let interval = &state.header.intervals[number];
            let found = there.and_then(|all| all.iter().find(|bitmap| bitmap.name == interval.name));
            let is_kept = match found.map(|bitmap| bitmap.state) {
                Some(BitmapState::Good) => state.is_as_left,
                Some(BitmapState::KeptUp) => true,
                _ => false,
            };
            if !interval.is_bitmap || is_kept {
                number += 1;
            } else if there.is_some() && found.is_none_or(|bitmap| bitmap.state == BitmapState::Good) {
                self.drop_unused(state, number).await?;
            } else {
                let mut header = state.header.clone();
                header.intervals[number].is_bitmap = false;
                forget_last(&mut header);
                self.write(state, header).await?;
            }
        }
        Ok(())
    }

    /// Of a disk that is open for reading only, whose image has the bitmaps `there`: when somebody else has written to it since some of them are in use, everything
    /// counts as changed. True when its parents are others than they were, so that no bitmap of the image tells what has changed.
    pub async fn doubt_bitmaps(&self, there: Option<&[InnerBitmap]>) -> bool {
        let mut state = self.state.lock().await;
        let find = |name: &str| there.and_then(|all| all.iter().find(|bitmap| bitmap.name == name));
        let is_doubted = |interval: &Interval| {
            let found = find(&interval.name).map(|bitmap| bitmap.state);
            interval.is_bitmap && !matches!(found, Some(BitmapState::Good | BitmapState::KeptUp))
        };
        if state.header.intervals.iter().any(is_doubted) {
            forget_last(&mut state.header);
        }
        state.has_other_parents
    }

    /// The image could not be told that its bitmaps lack something ([`Followed::is_behind`]). So whoever opens it next is to notice that its parents are others, also
    /// when it is closed in order.
    pub async fn stay_behind(&self) {
        self.state.lock().await.stays_behind = true;
    }

    /// Of a disk that is open for reading only: true when its image tells what has changed since the bitmap `name` was made, and not this file.
    pub async fn is_told_by_image(&self, name: &str) -> bool {
        let state = self.state.lock().await;
        let Ok(number) = find(&state.header, name) else { return false };
        let is_behind = state.is_as_left && state.is_all_unknown(number);
        state.header.intervals[number].is_bitmap && !is_behind
    }

    /// Another file takes the place of this one: what has changed since the bitmaps of the image were made is not known here any more ([`Keeper`]).
    pub async fn be_replaced(&self) {
        self.state.lock().await.is_replaced = true;
    }

    /// Removes a checkpoint while no request sets bits. What has changed since earlier ones stays known.
    async fn drop_unused(&self, state: &mut State<F::Store>, number: usize) -> Result<()> {
        if let Some(before) = number.checked_sub(1) {
            let mut header = state.header.clone();
            header.intervals[before].settled = None;
            self.write(state, header).await?;
            let (into, from) = (state.tracked[before].clone(), state.tracked[number].clone());
            into.take_in(&from).await;
        }
        let mut header = state.header.clone();
        let removed = header.intervals.remove(number);
        let is_lost = state.tracked[number].is_lost();
        if let Some(before) = number.checked_sub(1) {
            let covered = &mut header.intervals[before].covered_bytes;
            *covered = if is_lost { 0 } else { removed.covered_bytes.min(*covered) };
        }
        let mut tracked = state.tracked.clone();
        tracked.remove(number);
        self.write_unused(state, header, tracked).await
    }

    /// A new interval with the bits of `bitmap`, durable, behind those of `header`.
    async fn take_up_bitmap<S: Store>(
        &self,
        header: &Header,
        image: &impl Layer<S>,
        bitmap: &InnerBitmap,
        disk_bytes: u64,
    ) -> Result<Taken<F::Store>> {
        if is_hidden(&bitmap.name) {
            return Err(Error::new(ErrorKind::InvalidInput, "no checkpoint can have such a name"));
        }
        check_name(header, &bitmap.name)?;
        let mut interval = self.new_interval(header, &bitmap.name, disk_bytes).await?;
        interval.is_bitmap = true;
        let tracked = Arc::new(self.map(&interval, header.grain).await?);
        let mut at = 0;
        while at < disk_bytes {
            let part = image.bitmap_part(&bitmap.name, at..disk_bytes).await?;
            part.ranges.iter().for_each(|range| tracked.set_unused(*range));
            at = part.end;
        }
        if tracked.is_lost() {
            return Err(Error::new(ErrorKind::Io, "the file of changed blocks was cut short").at_path(&self.path));
        }
        Ok((interval, tracked))
    }

    /// The intervals `taken` come behind all others.
    async fn put_behind(&self, state: &mut State<F::Store>, mut taken: Vec<Taken<F::Store>>) -> Result<()> {
        taken.sort_by_key(|(_, tracked)| std::cmp::Reverse(tracked.bits().count_ones()));
        let (mut header, mut tracked) = (state.header.clone(), state.tracked.clone());
        for (interval, new) in taken {
            header.intervals.push(interval);
            tracked.push(new);
        }
        self.write_unused(state, header, tracked).await
    }

    /// Makes bits and then `header` durable, while no request sets bits: all intervals but the last are settled.
    async fn write_unused(
        &self,
        state: &mut State<F::Store>,
        mut header: Header,
        tracked: Vec<Arc<Tracked<F::Store>>>,
    ) -> Result<()> {
        if let Err(error) = self.store.sync().await {
            // The kernel may give up the bits of a sync that has failed.
            state.is_stuck = true;
            return Err(error);
        }
        for (interval, tracked) in header.intervals.iter_mut().zip(&tracked) {
            interval.settled = Some(tracked.bits().crc().await);
        }
        if let Some(last) = header.intervals.last_mut() {
            last.settled = None;
        }
        header.boot_id = self.around.env.boot_id();
        self.write(state, header).await?;
        state.tracked = tracked;
        state.is_damaged = false;
        Ok(())
    }

    /// True when the checkpoint `name` is a bitmap of the disk's image.
    pub async fn is_bitmap(&self, name: &str) -> bool {
        let state = self.state.lock().await;
        find(&state.header, name).is_ok_and(|number| state.header.intervals[number].is_bitmap)
    }

    /// Who knows what has changed since these bitmaps were made, as long as their checkpoints are there.
    pub async fn keeper(self: &Arc<Self>, names: &[String]) -> Keeper<F> {
        let state = self.state.lock().await;
        let named = state.header.intervals.iter().map(|interval| interval.name.clone()).zip(state.tracked.clone());
        Keeper { kept: named.filter(|(name, _)| names.contains(name)).collect(), changes: self.clone() }
    }
}

/// True when bitmaps that note changes, and that the image calls true, lack what is known to have changed.
fn are_behind<S>(state: &State<S>, there: Option<&[InnerBitmap]>) -> bool {
    let is_all_unknown = |name: &str| {
        let number = find(&state.header, name).ok().filter(|number| state.header.intervals[*number].is_bitmap);
        number.is_some_and(|number| state.is_all_unknown(number))
    };
    let mut believed = there.unwrap_or_default().iter().filter(|one| one.records && one.state == BitmapState::Good);
    believed.any(|bitmap| state.has_other_parents || is_all_unknown(&bitmap.name))
}

/// What has changed since the bitmaps of an image were made, for when that is sealed: its disk may have another image by then, or other checkpoints of these
/// names. It waits while a checkpoint is made.
pub struct Keeper<F: Files> {
    changes: Arc<Changes<F>>,
    kept: Vec<(String, Arc<Tracked<F::Store>>)>,
}

impl<F: Files + Clone + Send + Sync> ChangedSince for Keeper<F>
where
    F::Store: Send + Sync,
{
    fn changed<'a>(&'a self, name: &'a str, within: Range<u64>, disk_bytes: u64) -> LaterRanges<'a> {
        Box::pin(async move {
            let state = self.changes.state.lock().await;
            let known = self.kept.iter().find(|(known, _)| known == name);
            let number = known.and_then(|(_, kept)| state.tracked.iter().position(|one| Arc::ptr_eq(one, kept)));
            match number.filter(|_| !state.is_replaced) {
                Some(_) if self.changes.giving.has_begun() => Ok(vec![Extent::from_range(within)]),
                Some(first) => Ok(state.between(first..state.tracked.len(), within, disk_bytes).ranges),
                None => Err(Error::new(ErrorKind::NotFound, format!("the checkpoint {name:?} is not there any more"))),
            }
        })
    }
}
