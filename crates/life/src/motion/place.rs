//! [`Place`]: where a disk is moved to, and what becomes of the place where it was.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use spile_core::{Code, Disk, Error, ErrorKind, Files, Locator, OpenMode, Result, ResultExt, Store};
use spile_image::create::NewImage;
use spile_image::layer::{Identity, Layer};
use spile_image::{Broken, Format, Graph, OpenOptions};

use super::note::{Moved, is_free, refuse_taken, refuse_unfinished};
use super::order::{self, Order};
use super::parents::{Held, JOINT, Parents};
use super::parents_there::{ParentsThere, Sending};
use super::pauses::Pauses;
use super::status::Status;
use super::{Move, old_image, remove_name_of_old_image};
use crate::jobs::Plan;
use crate::jobs::note::{Copied, Note, There, from_hex, to_hex};
use crate::names;
use crate::snapshot::{new_child, remove_if_there, unit_of};
use crate::work::{GraphOf, Work, is_no_image};

const BEGIN_AGAIN: &str = "nothing is lost: begin the move again";

/// How long the other host may take to remove what a cancelled move has left, or to say what it has.
const DROP_PATIENCE: Duration = Duration::from_secs(2);

/// Where a disk is moved to.
pub(super) struct Place {
    /// The path of the disk's old image, when it has a name that goes at the hand-over.
    pub disk: Option<PathBuf>,
    /// What the note beside the old image says.
    pub moved: Moved,
    /// The copy stays in step until somebody says that it is to end, and the disk is not handed over.
    pub stays: bool,
    /// The old image goes.
    pub deletes_source: bool,
    format: Format,
    /// The half was made here.
    is_made: Cell<bool>,
    /// The move, when the other host takes disks in. Known once it was asked.
    taken_in: Cell<Option<Identity>>,
    /// A process before has noted that it does.
    was_taken_in: Cell<bool>,
    /// The other host knows that its image may be the disk.
    is_told: Cell<bool>,
    /// The other host was told that the move is given up.
    is_dropped: Cell<bool>,
    /// What of the new image can be taken up by the next process is left when this one ends.
    pub keeps_half: Cell<bool>,
    /// The copies of the disk's parents, when its chain is kept on this host.
    parents: Option<Parents>,
    /// The same on another host, which takes disks in.
    parents_there: Option<ParentsThere>,
    /// The new image is a child of these copies: it gets what the disk's own image has.
    pub is_over_parents: Cell<bool>,
}

/// Which file a half of this host is, as it is noted. `None` where nobody can tell later.
pub(super) fn name_of_half<S: Store>(half: &S) -> Option<String> {
    half.file_identity().map(|identity| to_hex(Identity(identity)))
}

impl Place {
    /// The place of the disk of `source` as `plan` says.
    ///
    /// # Errors
    /// What refuses the move.
    pub async fn find<F: Files>(work: &Work<'_, F>, source: &GraphOf<F>, plan: &Move) -> Result<Self> {
        let disk = source.handles()[0].path().to_owned();
        let half = match &plan.to {
            Locator::Path(to) => Some(names::moving(to)),
            Locator::Nbd(_) => None,
            other => return Err(Error::new(ErrorKind::Unsupported, format!("a disk cannot be moved to {other}"))),
        };
        let store = source.handles()[0].image().store();
        let has_name = disk.is_absolute() && store.info().grows_zeroed;
        if !has_name && !plan.has_no_mark && !plan.stays {
            let what = "the disk is on a device or an export, which cannot tell the next server that it is not the disk any more";
            let hint =
                "--leave-unmarked moves it all the same: then see to it that nobody starts a server with the old place";
            return Err(Error::new(ErrorKind::Unsupported, what).at_path(&disk).hint(hint));
        }
        let (parents, parents_there) = match &plan.to {
            Locator::Path(to) if plan.keeps_chain => (Parents::of(source, to, plan.format)?, None),
            to if plan.keeps_chain => (None, ParentsThere::of(source, to)?),
            _ => (None, None),
        };
        let moved = Moved { to: plan.to.clone(), image: old_image(&disk), half, finish: None };
        let place = Self {
            disk: has_name.then_some(disk),
            moved,
            stays: plan.stays,
            deletes_source: plan.deletes_source,
            format: plan.format,
            is_made: Cell::new(false),
            taken_in: Cell::new(None),
            was_taken_in: Cell::new(false),
            is_told: Cell::new(false),
            is_dropped: Cell::new(false),
            keeps_half: Cell::new(false),
            parents,
            parents_there,
            is_over_parents: Cell::new(false),
        };
        place.check_names(work, store).await?;
        place.refuse_children(work, source).await?;
        if let Some(parents) = &place.parents {
            parents.check(work, source).await?;
        }
        Ok(place)
    }

    /// Refuses names that are taken.
    async fn check_names<F: Files>(&self, work: &Work<'_, F>, store: &F::Store) -> Result<()> {
        if let Some(disk) = &self.disk {
            if !work.files.is_at(store, disk).await? {
                return Err(
                    Error::new(ErrorKind::NotFound, "the disk's file is not at its path any more").at_path(disk)
                );
            }
            if !self.stays && self.moved.to == Locator::from(&self.moved.image) {
                let what = "the disk's old image gets this name at the hand-over";
                return Err(Error::new(ErrorKind::InvalidInput, what)
                    .at_path(&self.moved.image)
                    .hint("choose another name"));
            }
            self.remove_second_name(work.files, store).await?;
            if !self.stays && !is_free(work.files, &self.moved.image).await {
                let what =
                    "there is an old image of an earlier move already, of the name that the disk's image would get";
                return Err(taken(what, &self.moved.image));
            }
            if !self.stays {
                refuse_unfinished(work.files, disk, Some(&self.moved.to)).await?;
            }
        }
        let Locator::Path(to) = &self.moved.to else { return Ok(()) };
        refuse_taken(work.files, to).await?;
        refuse_unfinished(work.files, to, None).await
    }

    /// Refuses to move an image away that others name as their parent.
    async fn refuse_children<F: Files>(&self, work: &Work<'_, F>, source: &GraphOf<F>) -> Result<()> {
        if self.disk.is_none() || self.stays {
            return Ok(());
        }
        let leaf = &source.handles()[0];
        let neighbours = work.neighbours.list().await?;
        match work.other_children(&neighbours, leaf, &[]).await?.first() {
            Some(child) => {
                let what = format!("{} is a child of this disk", child.display());
                let hint = "it would not find its parent any more: flatten it first, or copy the disk (--mirror-only)";
                Err(Error::new(ErrorKind::Denied, what).at_path(leaf.path()).hint(hint))
            }
            None => Ok(()),
        }
    }

    /// Removes the name that the old image, which is `store`, gets before it loses its own.
    async fn remove_second_name<F: Files>(&self, files: &F, store: &F::Store) -> Result<()> {
        let Some(disk) = self.disk.as_ref().filter(|_| !self.stays) else { return Ok(()) };
        remove_name_of_old_image(files, store, disk).await
    }

    /// True when the place is on another host: what fails there may be there again later.
    pub fn may_come_back(&self) -> bool {
        self.moved.half.is_none()
    }

    /// True when all of the place is zero at first.
    pub fn is_new(&self) -> bool {
        self.moved.half.is_some()
    }

    /// Opens the half of which a process before has noted this. `None` when it is not there any more, or another file is in its place.
    ///
    /// # Errors
    /// `Busy` while somebody else has it open; what cannot take the disk's place; the stores'.
    pub async fn take_up<F: Files>(
        &mut self,
        work: &Work<'_, F>,
        source: &GraphOf<F>,
        plan: &Move,
        copied: &Copied,
    ) -> Result<Option<GraphOf<F>>> {
        if self.moved.half.is_none() {
            let (Some(of), Some(id)) = (noted_id(plan, copied), plan.id) else { return Ok(None) };
            self.be_taken_in(id);
            if let Some(order) = self.order(|id| Order::TakeOver { id, of }).filter(|_| of != id) {
                match order::give(work.files, &order).await {
                    Err(error) if error.kind() == ErrorKind::NotFound && order::is_refused_there(&error) => {
                        return Ok(None);
                    }
                    taken => taken?,
                }
            }
        }
        let keeps_parents = self.parents.is_some() || self.parents_there.is_some();
        self.is_over_parents.set(keeps_parents && Parents::are_below(&copied.half));
        let target = match self.open_again(work, source).await {
            // The system of this host says that of a socket, too, which is there again when the other host's process is.
            Err(error) if error.kind() == ErrorKind::NotFound && !self.may_be_missed(&error) => return Ok(None),
            // It was not made to its end, or is another file.
            Err(error) if self.moved.half.is_some() && is_no_image(error.kind()) => return Ok(None),
            opened => opened?,
        };
        // The identity in the name of a half there may be that of an earlier attempt, from which it was taken over.
        let skipped = if self.moved.half.is_none() { to_hex(Identity([0; 16])).len() } else { 0 };
        let is_same = self.which::<F>(&target).is_some_and(|name| name.get(skipped..) == copied.half.get(skipped..));
        if is_same || work.broken == Broken::AnyHalf {
            return Ok(Some(target));
        }
        let _ = target.close().await;
        // Begun once more by this attempt, it would be there still, and be taken for an empty one.
        if !self.sends_parents() {
            return Ok(None);
        }
        let what = "it is not certain any more that the half-made image on the other host lies over these parents";
        Err(Error::new(ErrorKind::Denied, what).coded(Code::CopyUnknown).hint(BEGIN_AGAIN))
    }

    /// The disk's parents are sent to another host before it.
    pub fn sends_parents(&self) -> bool {
        self.parents_there.is_some()
    }

    /// True when `error` says only that the other host cannot be reached.
    fn may_be_missed(&self, error: &Error) -> bool {
        self.may_come_back() && !order::is_refused_there(error)
    }

    /// Which half `target` is, as it is noted. `None` where nobody can tell later.
    pub fn which<F: Files>(&self, target: &GraphOf<F>) -> Option<String> {
        let over = self.parents.as_ref().filter(|_| self.is_over_parents.get());
        match (&self.moved.half, self.taken_in.get()) {
            (Some(_), _) if let Some(over) = over => over.which(target),
            (Some(_), _) => name_of_half(target.handles()[0].image().store()),
            (None, id) => match self.parents_there.as_ref().filter(|_| self.is_over_parents.get()) {
                Some(parents) => parents.which(to_hex(id?)),
                None => id.map(to_hex),
            },
        }
    }

    /// What a process before has noted of the other host. True when all that is left is that it gives the copy its name.
    pub fn go_on(&mut self, plan: &Move, note: &Note) -> bool {
        self.was_taken_in.set(note.there.is_some());
        // An earlier attempt may have begun the copy.
        let id = note.copied.as_ref().and_then(|copied| noted_id(plan, copied)).or(plan.id);
        match (id, note.there) {
            (Some(id), Some(There::Naming)) => {
                self.be_taken_in(id);
                true
            }
            _ => false,
        }
    }

    /// The other host takes this disk in, by the move `id`.
    pub fn be_taken_in(&mut self, id: Identity) {
        self.taken_in.set(Some(id));
        self.moved.finish = self.order(|id| Order::Finish { id });
    }

    /// Nobody knows whether the other host takes this disk in: it is told nothing.
    pub fn be_unknown(&mut self) {
        self.taken_in.set(None);
        self.moved.finish = None;
    }

    /// Makes a new image, as large as the disk of `source`, and opens it. What an earlier move has left there goes.
    ///
    /// # Errors
    /// What cannot take the disk's place; the stores'.
    pub async fn make<F: Files>(
        &mut self,
        work: &Work<'_, F>,
        source: &GraphOf<F>,
        plan: &Move,
        status: &Arc<Status>,
    ) -> Result<GraphOf<F>> {
        if self.parents_there.is_some() {
            return Box::pin(self.open_with_parents(work, source, plan, status)).await;
        }
        let Some(half) = &self.moved.half else { return self.open_there(work, source, plan).await };
        remove_half(work.files, half).await?;
        // All is refused by now that can be refused at once.
        let parents = match &self.parents {
            Some(parents) => {
                work.job.set_status(status.clone());
                work.job.accept();
                Some(Box::pin(parents.have(work, source, status)).await?)
            }
            None => None,
        };
        self.is_over_parents.set(parents.is_some());
        let new = self.new_image(source, parents.as_ref())?;
        let store = work.files.create(half, 0).await?;
        self.is_made.set(true);
        self.format.create(&store, &**work.env, &new).await?;
        drop(store);
        let target = self.open(work, source).await?;
        if let Some(parents) = &parents {
            check_parent(work.files, &target, parents.top().1).await?;
        }
        // Nobody else removes it while it is open here.
        self.check_half(work.files, target.handles()[0].image().store()).await?;
        if self.disk.is_some() {
            let (old, new) = (source.handles()[0].image().store(), target.handles()[0].image().store());
            work.files.copy_access(old, new).await?;
        }
        Ok(target)
    }

    /// What the new image is to be, over these copies of the disk's parents.
    fn new_image<F: Files>(&self, source: &GraphOf<F>, parents: Option<&Held<F>>) -> Result<NewImage> {
        let (size_bytes, leaf) = (source.size_bytes(), source.handles()[0].image());
        let Some((top, name)) = parents.map(Held::top) else {
            return Ok(NewImage::new(size_bytes));
        };
        let unit_bytes = (leaf.format() == self.format).then(|| unit_of(leaf)).flatten();
        Ok(NewImage { unit_bytes, ..new_child(&top.info(), size_bytes, name)? })
    }

    /// How much of the disk's parents was copied and compared, in bytes.
    pub fn parents_bytes(&self) -> u64 {
        let here = self.parents.as_ref().map(Parents::done_bytes);
        here.or(self.parents_there.as_ref().map(ParentsThere::done_bytes)).unwrap_or_default()
    }

    /// Has a host that takes disks in have the disk's parents, and opens a new image over them. What of that fails and may go by is tried again.
    async fn open_with_parents<F: Files>(
        &mut self,
        work: &Work<'_, F>,
        source: &GraphOf<F>,
        plan: &Move,
        status: &Arc<Status>,
    ) -> Result<GraphOf<F>> {
        let Some(id) = plan.id else {
            return Err(Error::new(ErrorKind::InvalidInput, "a move to another host has no identity"));
        };
        self.be_taken_in(id);
        self.is_over_parents.set(true);
        let Some(parents) = &self.parents_there else { return self.open(work, source).await };
        let sending = Sending::new((work, source), parents, (&plan.to, id), status);
        let pauses = Pauses::new();
        loop {
            // In boxes: together the futures would need much of a worker's stack.
            let tried = Box::pin(async {
                let there = Box::pin(sending.first_there()).await?;
                self.be_begun(work, plan, status).await?;
                Box::pin(sending.have(there)).await?;
                sending.of_there(Box::pin(self.open(work, source))).await
            });
            // It ends by itself when the job is told to end, unless the other host hangs: an order that is on its way is not left behind.
            let late = async {
                work.job.told_to_end().await;
                work.timer.sleep(DROP_PATIENCE).await;
            };
            let tried = match select(tried, pin!(late)).await {
                Either::Left((tried, _)) => tried,
                Either::Right(_) => Err(Error::new(ErrorKind::Shutdown, "the job was told to end")),
            };
            match tried {
                // One that has not begun fails, as any move to a host that does not answer.
                Err(error) if self.was_taken_in.get() && sending.may_pass(&error) => {
                    work.job.set_status(status.clone());
                    status.note_failure(error.to_string());
                }
                tried => return tried,
            }
            pauses.pass(work).await?;
        }
    }

    /// Nothing refuses the move any more: from now on it goes on through all trouble of the other host, also in the next process.
    async fn be_begun<F: Files>(&self, work: &Work<'_, F>, plan: &Move, status: &Arc<Status>) -> Result<()> {
        if !self.was_taken_in.replace(true)
            && let Some(disk) = &self.disk
        {
            Note::say_there(work.files, disk, &Plan::Move(plan.clone()), There::TakenIn).await?;
        }
        work.job.set_status(status.clone());
        work.job.accept();
        Ok(())
    }

    /// Opens the export. A host that takes disks in makes the image; any other one has an export of this name already.
    async fn open_there<F: Files>(
        &mut self,
        work: &Work<'_, F>,
        source: &GraphOf<F>,
        plan: &Move,
    ) -> Result<GraphOf<F>> {
        let Some(id) = plan.id.filter(|_| self.format == Format::Raw) else { return self.open(work, source).await };
        self.be_taken_in(id);
        // Made by an order of its own: a link that is cut and made again must not find a new half in the place of one that is gone.
        let begun = match self.order(|id| Order::Begin { id, size_bytes: source.size_bytes() }) {
            Some(order) => order::give(work.files, &order).await,
            None => Err(Error::new(ErrorKind::NotFound, "the export has no name")),
        };
        match begun {
            // Nobody has answered.
            Err(error) if !order::is_refused_there(&error) => Err(error),
            Err(error) if error.kind() == ErrorKind::NotFound && self.was_taken_in.get() => {
                let what = "`spile receive` had taken this disk in, and there is another server now: its export may be a disk that is used";
                let error = Error::new(ErrorKind::Denied, what).caused_by(error);
                Err(error.hint("start `spile receive` there again, and move the disk anew"))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.be_unknown();
                self.open(work, source).await
            }
            begun => {
                begun?;
                if let Some(disk) = &self.disk {
                    Note::say_there(work.files, disk, &Plan::Move(plan.clone()), There::TakenIn).await?;
                }
                self.open(work, source).await
            }
        }
    }

    /// Where an order to the host that takes this disk in is given.
    fn order(&self, order: impl FnOnce(Identity) -> Order) -> Option<Locator> {
        order(self.taken_in.get()?).locator(&self.moved.to)
    }

    /// Where a host that takes this disk in wants the file of `len_bytes` of what has changed, and where it is told that this is whole. `None` for any
    /// other place.
    pub fn marks_there(&self, len_bytes: u64) -> Option<(Locator, Locator)> {
        Some((self.order(|id| Order::Marks { id, len_bytes })?, self.order(|id| Order::Marked { id })?))
    }

    /// The move, as the other host knows it that takes this disk in.
    pub fn taken_in(&self) -> Option<Identity> {
        self.taken_in.get()
    }

    /// Tells a host that takes disks in that its image may be the disk from now on: once for all attempts of a hand-over.
    ///
    /// # Errors
    /// Why it does not know that.
    pub async fn tell_hand_over<F: Files>(&self, work: &Work<'_, F>) -> Result<()> {
        let is_due = !self.is_told.get() && work.broken != Broken::NotTold;
        let Some(order) = self.order(|id| Order::HandOver { id }).filter(|_| is_due) else {
            return Ok(());
        };
        order::give(work.files, &order).await?;
        self.is_told.set(true);
        Ok(())
    }

    /// Has the other host take the copy back that it was to give a name, because the job is cancelled. True when it has its name already.
    ///
    /// # Errors
    /// When that is not known.
    pub async fn take_copy_back<F: Files>(&self, work: &Work<'_, F>) -> Result<bool> {
        self.drop_there(work).await;
        let Some(order) = self.order(|id| Order::Ask { id }) else { return Ok(false) };
        let asked = pin!(order::give(work.files, &order));
        let unknown = match select(asked, work.timer.sleep(DROP_PATIENCE)).await {
            Either::Left((Err(error), _)) if error.kind() == ErrorKind::NotFound && order::is_refused_there(&error) => {
                return Ok(false);
            }
            Either::Left((Err(error), _)) if error.is(Code::CopyComplete) => return Ok(true),
            Either::Left((Err(error), _)) => error,
            Either::Left((Ok(_), _)) => Error::new(ErrorKind::Busy, "it was not removed there"),
            Either::Right(_) => Error::new(ErrorKind::TimedOut, "the other host does not answer"),
        };
        let what = format!("it is not known whether {} has got its name", self.moved.to);
        let hint = "look there (`spile receive DIR --list`): `whole` says that it has, and is a disk of that host then";
        Err(Error::new(ErrorKind::TimedOut, what).caused_by(unknown).hint(hint))
    }

    /// Has the other host give the new image its name, if it takes disks in: tried until it says that this is done. `tell` hears what has failed.
    ///
    /// # Errors
    /// `Shutdown` when the job is told to end before.
    pub async fn finish<F: Files>(&self, work: &Work<'_, F>, tell: impl Fn(&Error)) -> Result<()> {
        let Some(order) = &self.moved.finish else { return Ok(()) };
        let pauses = Pauses::new();
        loop {
            match order::give(work.files, order).await {
                Ok(()) => return Ok(()),
                Err(error) => tell(&error),
            }
            pauses.pass(work).await?;
        }
    }

    /// True when there may be a half of this move still. On another host it is there from the first order on, also when nothing was noted of it.
    pub fn may_have_left(&self) -> bool {
        self.keeps_half.get() || self.taken_in.get().is_some() && !self.is_dropped.get()
    }

    /// Has a host that takes disks in remove the half-made images of a move that was cancelled: the disk's own, and then that of a parent. When it does not answer soon, it keeps them,
    /// and knows it.
    pub async fn drop_there<F: Files>(&self, work: &Work<'_, F>) {
        let (Some(id), Some(order)) = (self.taken_in.get(), self.order(|id| Order::Drop { id })) else { return };
        self.is_dropped.set(true);
        let parents = self.parents_there.as_ref().map(|parents| parents.drops(&self.moved.to, id)).unwrap_or_default();
        let drop_all = async {
            for order in [order].iter().chain(&parents) {
                // One that is not there, or is whole, is refused.
                let _ = Box::pin(order::give(work.files, order)).await;
            }
        };
        let _either = select(pin!(drop_all), work.timer.sleep(DROP_PATIENCE)).await;
    }

    /// Removes the half of a process before, when the move is given up before that could be opened.
    pub async fn give_left_half_up<F: Files>(&self, work: &Work<'_, F>) {
        self.remove_hidden_parent(work.files).await;
        match &self.moved.half {
            // Somebody else may have it open: then it is not ours any more.
            Some(half) => _ = remove_half(work.files, half).await,
            None => self.drop_there(work).await,
        }
    }

    /// Refuses a new image, which is `new`, that has lost its hidden name.
    ///
    /// # Errors
    /// `Busy`; the system's.
    pub async fn check_half<F: Files>(&self, files: &F, new: &F::Store) -> Result<()> {
        let Some(half) = &self.moved.half else { return Ok(()) };
        match files.is_at(new, half).await? {
            true => Ok(()),
            false => {
                let what =
                    "the new image has lost this name: somebody has removed it, or another disk is moved to this place";
                Err(Error::new(ErrorKind::Busy, what).at_path(half).hint("`spile jobs` shows other moves"))
            }
        }
    }

    /// Opens the new image, which another process has begun, or which was away for a while. A host that has taken it in is asked before: another server may be
    /// there now, and have an export of any name; and a copy that got its name meanwhile is somebody's disk.
    ///
    /// # Errors
    /// As [`Place::make`]; `NotFound` where there is no `spile receive`, or no such image; `Denied` when the copy has its name.
    pub async fn open_again<F: Files>(&self, work: &Work<'_, F>, source: &GraphOf<F>) -> Result<GraphOf<F>> {
        if let Some(order) = self.order(|id| Order::Ask { id }) {
            order::give(work.files, &order).await?;
            // It takes its image for a half again.
            self.is_told.set(false);
        }
        match self.open(work, source).await {
            // It has said that the half is there. What it does not find is something else, such as a parent of that: the half is not begun anew for it.
            Err(error) if self.sends_parents() && error.kind() == ErrorKind::NotFound => {
                let what = "the other host has the half-made image, and cannot open it";
                Err(Error::new(ErrorKind::Busy, what).caused_by(error))
            }
            opened => opened,
        }
    }

    /// Opens the new image.
    ///
    /// # Errors
    /// As [`Place::make`].
    async fn open<F: Files>(&self, work: &Work<'_, F>, source: &GraphOf<F>) -> Result<GraphOf<F>> {
        let half = self.moved.half.as_ref().map(Locator::from);
        let link = Identity(work.env.random_16());
        let there = || self.order(|id| Order::GoOn { id, link });
        let at = half.or_else(there).unwrap_or_else(|| self.moved.to.clone());
        let options = OpenOptions { format: Some(self.format), ..OpenOptions::default() };
        let target = Graph::open(work.files, work.env.clone(), at, &options).await?;
        check_fits(work, source, &target).at_path(target.handles()[0].path())?;
        target.handles()[0].image().store().set_copy(true);
        target.begin();
        Ok(target)
    }

    /// Removes the hidden name, if it is that of the new image `new`.
    ///
    /// # Errors
    /// The system's.
    pub async fn remove_hidden_name<F: Files>(&self, files: &F, new: &GraphOf<F>) -> Result<()> {
        let Some(half) = &self.moved.half else { return Ok(()) };
        let store = new.handles()[0].image().store();
        match files.is_at(store, half).await? {
            true => files.remove_file(store, half).await,
            false => Ok(()),
        }
    }

    /// No half of a parent is gone on with.
    async fn remove_hidden_parent<F: Files>(&self, files: &F) {
        if let Some(parents) = &self.parents {
            let _ = parents.remove_hidden(files).await;
        }
    }

    /// Removes what was made, after the job has failed: the disk is `source`, the new image `target`, if it could be opened. It is still open,
    /// so that nobody else can have the hidden name.
    ///
    /// # Errors
    /// The system's.
    pub async fn remove<F: Files>(&self, files: &F, source: &GraphOf<F>, target: Option<&GraphOf<F>>) -> Result<()> {
        self.remove_hidden_parent(files).await;
        let half = match (&self.moved.half, target) {
            _ if self.keeps_half.get() => Ok(()),
            (_, Some(target)) => self.remove_hidden_name(files, target).await,
            (Some(half), None) if self.is_made.get() => match remove_half(files, half).await {
                // Another disk is moved here by now.
                Err(error) if error.kind() == ErrorKind::Busy => Ok(()),
                removed => removed,
            },
            _ => Ok(()),
        };
        let name = self.remove_second_name(files, source.handles()[0].image().store()).await;
        // A copy has none.
        let note = match self.disk.as_ref().filter(|_| !self.stays) {
            Some(disk) => remove_if_there(files, &names::moved(disk)).await,
            None => Ok(()),
        };
        half.and(name).and(note)
    }
}

/// Refuses a new image that finds another parent than the one at `parent`.
async fn check_parent<F: Files>(files: &F, new: &GraphOf<F>, parent: &Path) -> Result<()> {
    match new.handles().get(1) {
        Some(found) if files.is_at(found.image().store(), parent).await? => Ok(()),
        _ => {
            let what = "the new image does not find the copy of its parent";
            Err(Error::new(ErrorKind::Busy, what).at_path(parent).hint("somebody has replaced it: try again"))
        }
    }
}

/// Which half there the note of a job means, when it is one of the move `plan`: an earlier attempt may have begun it.
fn noted_id(plan: &Move, copied: &Copied) -> Option<Identity> {
    let (id, noted) = (plan.id?, Identity(from_hex(copied.half.split(JOINT).next()?)?));
    (noted == id || order::is_earlier_attempt(noted, id)).then_some(noted)
}

/// Refuses an export `there` that is not as long as the disk.
///
/// # Errors
/// `InvalidInput`.
pub(super) fn check_size<S: Store>(size_bytes: u64, there: &Graph<S>) -> Result<()> {
    let new = there.info().size_bytes;
    if new == size_bytes {
        return Ok(());
    }
    let what = format!("the new place has {new} bytes, and the disk {size_bytes}");
    let hint = format!("it must have exactly as many: make it so (--size {size_bytes}), or choose raw");
    Err(Error::new(ErrorKind::InvalidInput, what).hint(hint))
}

fn taken(what: &'static str, path: &Path) -> Error {
    Error::new(ErrorKind::Exists, what).at_path(path).hint("remove it, or give it another name")
}

/// Removes a half-made image that nobody works on any more.
pub(super) async fn remove_half<F: Files>(files: &F, half: &Path) -> Result<()> {
    match files.open(&half.into(), OpenMode::ReadWrite).await {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == ErrorKind::Busy => {
            let error = Error::new(ErrorKind::Busy, "another disk is being moved to this place").at_path(half);
            Err(error.hint("`spile jobs` shows it"))
        }
        Err(error) => Err(error),
        // While it is open here, nobody else removes it, or makes another one of this name.
        Ok(store) => match files.is_at(&store, half).await? {
            true => files.remove_file(&store, half).await,
            false => Err(Error::new(ErrorKind::Busy, "another disk is just being moved to this place").at_path(half)),
        },
    }
}

/// Refuses an image that could not take the disk's place, before it is filled.
fn check_fits<F: Files>(work: &Work<'_, F>, source: &GraphOf<F>, target: &GraphOf<F>) -> Result<()> {
    check_size(source.size_bytes(), target)?;
    let hint = "guests may use smaller units than the new place takes: move the disk while nobody serves it";
    work.node.check_fits(target).map_err(|error| error.hint(hint))
}
