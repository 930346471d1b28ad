//! [`ParentsThere`]: a disk's parents on another host, when the disk is moved to `spile receive` with its chain.
//!
//! # In this order
//!
//! 1. That host is asked for each parent, from the topmost on. The first one that it has is used again, if it is the same, with all that lies below it.
//! 2. Each parent that it lacks is sent, the lowest first. Its image is made there over the one before, under a hidden name. It is filled with what the parent's own
//!    image has, and flushed. Only then that host gives it its name.
//! 3. The disk's own image is made over the topmost one. The disk is copied to it as to any other half.
//!
//! # Why no other bytes get below the disk
//!
//! - A parent that was there is compared from its first byte to its last, *after* the image above it was begun: from then on it has a child there, and nobody writes to it.
//! - A parent that was sent is known by the move that has brought it. Whoever makes the image above it says which move that was. Once there was trouble with the other host,
//!   orders may be late, and have begun a parent anew: from then on, parents that were sent are compared as well.
//! - How far a parent is filled is known to this process alone, and only what was flushed counts. When the link is cut, it goes on behind that, with the same half
//!   or not at all. The next process knows nothing of it: it begins another attempt ([`next_attempt`](super::order::next_attempt)), for which the half is made anew.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use spile_core::{Code, Disk, Error, ErrorKind, Extent, ExtentKind, Files, Locator, Result, Store};
use spile_image::layer::{Identity, Layer as _};
use spile_image::{Broken, Format, Graph, OpenOptions};
use spile_node::Aligned;

use super::copier::put;
use super::order::{self, Below, InChain, Like, Order};
use super::parents::{JOINT, RUNS_AT_ONCE, compare, names_of_parents, sources_of, total_bytes};
use super::place::check_size;
use super::status::{Phase, Status};
use crate::lanes::{Lane, Lanes};
use crate::work::{GraphOf, Work};

/// The images of a disk that is moved with its parents: the disk's own first, the lowest parent last.
pub(super) struct ParentsThere {
    /// Their names there, as they stand in a locator.
    names: Vec<String>,
    /// The format of the disk's own image there.
    format: Format,
    /// Which files the parents themselves are. `None` where nobody can tell later.
    sources: Option<Vec<String>>,
    /// The image that this process has begun, and is not done with.
    begun: Cell<Option<Begun>>,
    /// The last parent that this process has sent, where no order can be late.
    sent: Cell<Option<usize>>,
    /// An order has failed that may come late.
    may_be_late: Cell<bool>,
    done_bytes: Cell<u64>,
}

/// An image that was begun there.
#[derive(Clone, Copy)]
struct Begun {
    /// Which of the images.
    number: usize,
    /// All before this was sent, and flushed.
    until_bytes: u64,
    /// The parent that was there was compared since.
    is_compared: bool,
}

/// What is needed to have the parents be there.
pub(super) struct Sending<'a, 'w, F: Files> {
    pub work: &'a Work<'w, F>,
    pub parents: &'a ParentsThere,
    pub source: &'a GraphOf<F>,
    /// The disk's place there.
    pub to: &'a Locator,
    /// This attempt of the move.
    pub id: Identity,
    pub status: &'a Status,
    /// Which of the images it is at.
    at: Cell<usize>,
    /// What has failed was the other host's affair.
    has_failed_there: Cell<bool>,
}

impl ParentsThere {
    /// The images of the disk of `source`, which goes to `to`. `None` when it has no parent.
    ///
    /// # Errors
    /// Why the chain cannot be kept.
    pub fn of<S: Store>(source: &Graph<S>, to: &Locator) -> Result<Option<Self>> {
        if source.handles().len() == 1 {
            return Ok(None);
        }
        let named = order::name_at(to).and_then(|text| Some((text, order::of_uri(text)?)));
        let Some((written, leaf)) = named else {
            let what = "the chain cannot be kept: the place there has no name";
            return Err(Error::new(ErrorKind::InvalidInput, what).hint("say nbds://HOST/NAME.vhd, or .qcow2"));
        };
        let format = Format::of(leaf.as_ref(), None)?;
        let parents = names_of_parents(source, leaf.as_ref(), format)?;
        if let Some(bad) = parents.iter().find(|name| !order::is_name(name)) {
            let what = format!("the chain cannot be kept: `spile receive` takes no file of the name {bad:?}");
            return Err(Error::new(ErrorKind::InvalidInput, what).hint("rename it; or flatten it: --chain flatten"));
        }
        let names = [written.to_owned()].into_iter().chain(parents.iter().map(|name| order::to_uri(name))).collect();
        let (begun, sent, may_be_late, done_bytes) = Default::default();
        Ok(Some(Self { names, format, sources: sources_of(source), begun, sent, may_be_late, done_bytes }))
    }

    /// How much has been copied and compared, in bytes.
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes.get()
    }

    /// Which half the move `id` has there, as it is noted. `None` where nobody can tell later whether these are its parents.
    pub fn which(&self, id: String) -> Option<String> {
        Some([vec![id], self.sources.clone()?].concat().join(JOINT))
    }

    /// Where the halves are that the other host may have of the move `id`: the orders to drop them.
    pub fn drops(&self, to: &Locator, id: Identity) -> Vec<Locator> {
        self.names[1..].iter().filter_map(|name| Order::Drop { id }.locator(&order::beside(to, name)?)).collect()
    }
}

impl<'a, 'w, F: Files> Sending<'a, 'w, F> {
    pub fn new(
        (work, source): (&'a Work<'w, F>, &'a GraphOf<F>),
        parents: &'a ParentsThere,
        (to, id): (&'a Locator, Identity),
        status: &'a Status,
    ) -> Self {
        let (at, has_failed_there) = Default::default();
        Self { work, parents, source, to, id, status, at, has_failed_there }
    }

    /// True when `error` is one of the other host, or of the link, which may go by: it is worth another try.
    pub fn may_pass(&self, error: &Error) -> bool {
        self.parents.may_be_late.set(true);
        // An order that was on its way for long may just have given a parent its name. And another move may send the same parent instead of this one, whose link was cut.
        let is_of_another = matches!(error.code(), Some(Code::CopyComplete | Code::NoSuchMove));
        let is_sent_otherwise = self.at.get() > 0 && is_of_another;
        self.has_failed_there.get() && (is_sent_otherwise || !order::is_refused_there(error))
    }

    /// Has all parents be there, whole, and the image of the disk begun over them. `there` is what [`Sending::first_there`] has said. Again after a failure, it goes on where that
    /// was.
    ///
    /// # Errors
    /// `Exists` for a name that another image has there; `Shutdown` when the job is to end; the stores'. What is whole stays there.
    pub async fn have(&self, there: usize) -> Result<()> {
        self.status.set_phase(Phase::Parents);
        self.work.job.set_total(total_bytes(self.source).await);
        let all = self.parents.names.len();
        for number in (0..there).rev() {
            self.work.job.go_on().await?;
            self.at.set(number);
            self.status.set_parents(all - 1 - number, all - 1);
            Box::pin(self.begin(number)).await?;
            if number + 1 < all && self.parents.sent.get() != Some(number + 1) {
                Box::pin(self.compare(number)).await?;
            }
            if number > 0 {
                Box::pin(self.fill(number)).await?;
                Box::pin(self.give(number, Order::Finish { id: self.id })).await?;
                self.parents.sent.set((!self.parents.may_be_late.get()).then_some(number));
                self.parents.begun.set(None);
            }
        }
        Ok(())
    }

    /// The topmost parent that is there already; the number of all images when there is none.
    ///
    /// # Errors
    /// `Exists` for a name that another image has there; `Unsupported` where there is no `spile receive` of this version; the link's.
    pub async fn first_there(&self) -> Result<usize> {
        self.has_failed_there.set(false);
        self.at.set(0);
        match Box::pin(self.find(0)).await {
            Ok(false) => {}
            Ok(true) => {
                let what = "a parent of another disk has this name there";
                return Err(Error::new(ErrorKind::Exists, what).hint("give the disk another name there"));
            }
            Err(error) => return Err(self.explain(error)),
        }
        for number in 1..self.parents.names.len() {
            if Box::pin(self.find(number)).await? {
                return Ok(number);
            }
        }
        Ok(self.parents.names.len())
    }

    /// True when the image `number` is there. False when its name is free.
    async fn find(&self, number: usize) -> Result<bool> {
        let (size_bytes, like) = (self.size_bytes(number), self.like(number));
        match self.give(number, Order::Find { id: self.id, size_bytes, like }).await {
            Ok(()) => Ok(true),
            Err(error) if error.is(Code::NameFree) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// `error` of the first order. Another server, and an older `spile receive`, do not know it.
    fn explain(&self, error: Error) -> Error {
        let is_older = error.is(Code::OrderUnknown);
        if !order::is_refused_there(&error) || error.kind() != ErrorKind::NotFound && !is_older {
            return error;
        }
        let what = "the chain cannot be kept: --chain keep needs a `spile receive` of this version there";
        let hint = "start that one there; or flatten the disk: --chain flatten";
        Error::new(ErrorKind::Unsupported, what).caused_by(error).hint(hint)
    }

    fn size_bytes(&self, number: usize) -> u64 {
        self.source.handles()[number].image().size_bytes()
    }

    /// What the image `number` there is to have from the one here.
    fn like(&self, number: usize) -> Like {
        let image = self.source.handles()[number].image();
        // Some programs write a UUID of zeroes, which tells nothing.
        let is_uuid = |identity: &Identity| Format::lasts(*identity) && identity.0 != [0; 16];
        match number {
            0 => Like { format: self.parents.format, uuid: None },
            _ => Like { format: image.format(), uuid: image.identity().filter(is_uuid) },
        }
    }

    /// Has the image `number` be begun there. One that this process has begun must be there still.
    async fn begin(&self, number: usize) -> Result<()> {
        if self.parents.begun.get().is_some_and(|begun| begun.number == number) {
            match self.give(number, Order::Ask { id: self.id }).await {
                Err(error) if order::is_refused_there(&error) => self.parents.begun.set(None),
                asked => return asked,
            }
        }
        let name = self.parents.names.get(number + 1);
        let by = (self.parents.sent.get() == Some(number + 1)).then_some(self.id);
        let below = name.map(|name| Below { name: name.clone(), by });
        let image = InChain { is_parent: number > 0, like: self.like(number), below };
        let order = Order::BeginInChain { id: self.id, size_bytes: self.size_bytes(number), image };
        self.give(number, order).await?;
        self.parents.begun.set(Some(Begun { number, until_bytes: 0, is_compared: false }));
        Ok(())
    }

    async fn give(&self, number: usize, order: Order) -> Result<()> {
        let at = self.order_at(number, &order)?;
        self.of_there(Box::pin(order::give(self.work.files, &at))).await
    }

    /// The place of the image `number` there.
    fn place(&self, number: usize) -> Result<Locator> {
        order::beside(self.to, &self.parents.names[number]).ok_or_else(no_name)
    }

    /// Where `order` is given about the image `number`.
    fn order_at(&self, number: usize, order: &Order) -> Result<Locator> {
        order.locator(&self.place(number)?).ok_or_else(no_name)
    }

    /// Does `work`, which is what the other host does. Its failure is not one of this host.
    pub async fn of_there<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let done = work.await;
        self.has_failed_there.set(self.has_failed_there.get() || done.is_err());
        done
    }

    fn count(&self, bytes: u64) {
        self.parents.done_bytes.set(self.parents.done_bytes.get() + bytes);
        self.work.job.set_done(self.parents.done_bytes.get());
    }

    /// What the image `number` and those below it show.
    fn shown(&self, number: usize) -> Result<Arc<GraphOf<F>>> {
        self.source.with_layers(self.source.handles()[number..].to_vec()).map(Arc::new)
    }

    /// Refuses the parent below the image `above`, which was there, when it does not read as the one here.
    async fn compare(&self, above: usize) -> Result<()> {
        let Some(begun) = self.parents.begun.get().filter(|begun| !begun.is_compared) else { return Ok(()) };
        let number = above + 1;
        let at = self.place(number)?;
        let options = OpenOptions { format: Some(Format::Raw), read_only: true, ..OpenOptions::default() };
        let opened = Box::pin(Graph::open(self.work.files, self.work.env.clone(), at.clone(), &options));
        let (there, here) = (Arc::new(self.of_there(opened).await?), self.shown(number)?);
        check_size(here.size_bytes(), &there)?;
        let ends = [Aligned::new(here), Aligned::new(there)];
        let lanes = Lanes::new(self.work);
        let failed = || self.has_failed_there.set(true);
        if let Some(at_bytes) = Box::pin(compare(&lanes, &ends, &|bytes| self.count(bytes), &failed)).await? {
            let parent = self.source.handles()[number].path().display();
            let what = format!(
                "the parent {parent} gets the name {at}, and another image has it: what it shows differs, first about byte {at_bytes}"
            );
            let hint = "move the disk to another folder; or flatten it there: --chain flatten";
            return Err(Error::new(ErrorKind::Exists, what).hint(hint));
        }
        self.parents.begun.set(Some(Begun { is_compared: true, ..begun }));
        Ok(())
    }

    /// Sends what the image `number` has itself and the other host lacks, and has it flushed there.
    async fn fill(&self, number: usize) -> Result<()> {
        let Some(begun) = self.parents.begun.get() else { return Ok(()) };
        let (target, parent) = (Box::pin(self.open(number)).await?, self.shown(number)?);
        let (mut at, size_bytes) = (begun.until_bytes, parent.size_bytes());
        let piece_bytes = self.work.sizes.piece_bytes;
        let most_bytes = self.work.sizes.noted_bytes.max(piece_bytes);
        while let Some(first) = self.runs(&parent, number, at..size_bytes, 1).await?.first() {
            let until = size_bytes.min((first.start() + most_bytes).next_multiple_of(piece_bytes));
            Box::pin(self.fill_part(&parent, number, &target, first.start()..until)).await?;
            self.flush(&target).await?;
            at = until;
            self.parents.begun.set(Some(Begun { until_bytes: until, ..begun }));
        }
        // Also of an image that has nothing itself.
        self.flush(&target).await
    }

    async fn flush(&self, target: &Aligned<Arc<GraphOf<F>>>) -> Result<()> {
        match self.work.broken {
            Broken::ParentUnflushed => Ok(()),
            _ => self.of_there(target.inner().flush()).await,
        }
    }

    /// The image `number`, through a new link.
    async fn open(&self, number: usize) -> Result<Aligned<Arc<GraphOf<F>>>> {
        let link = Identity(self.work.env.random_16());
        let at = self.order_at(number, &Order::GoOn { id: self.id, link })?;
        let options = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
        let target = self.of_there(Box::pin(Graph::open(self.work.files, self.work.env.clone(), at, &options))).await?;
        check_size(self.size_bytes(number), &target)?;
        target.handles()[0].image().store().set_copy(true);
        target.begin();
        Ok(Aligned::new(Arc::new(target)))
    }

    /// The runs of `within` that the image `number`, which is the first one of `parent`, has itself.
    async fn runs(
        &self,
        parent: &GraphOf<F>,
        number: usize,
        within: std::ops::Range<u64>,
        most: usize,
    ) -> Result<Vec<Extent>> {
        if number + 1 < self.parents.names.len() {
            return parent.own_runs_of(1, Extent::from_range(within), most).await;
        }
        // Nothing lies below it: what it lacks is zero, as in a new image.
        let mut at = within.start;
        while at < within.end {
            let runs = parent.extents(Extent::from_range(at..within.end), RUNS_AT_ONCE).await?;
            let data: Vec<_> = runs.iter().filter(|run| run.kind == ExtentKind::Data).map(|run| run.extent).collect();
            if !data.is_empty() {
                return Ok(data);
            }
            at = runs.last().map_or(within.end, |run| run.extent.end());
        }
        Ok(Vec::new())
    }

    async fn fill_part(
        &self,
        parent: &Arc<GraphOf<F>>,
        number: usize,
        target: &Aligned<Arc<GraphOf<F>>>,
        within: std::ops::Range<u64>,
    ) -> Result<()> {
        let (source, cursor) = (Aligned::new(parent.clone()), async_lock::Mutex::new(within.start));
        // Those that were found and are not sent yet, the last one first.
        let found: RefCell<Vec<Extent>> = RefCell::default();
        let next = async |most_bytes: u64| {
            let mut at = cursor.lock().await;
            if found.borrow().is_empty() {
                let mut runs = self.runs(parent, number, *at..within.end, RUNS_AT_ONCE).await?;
                runs.reverse();
                found.replace(runs);
            }
            let Some(run) = found.borrow_mut().pop() else { return Ok::<_, Error>(None) };
            let piece = Extent::from_range(run.start()..run.end().min((run.start() / most_bytes + 1) * most_bytes));
            if piece.end() < run.end() {
                found.borrow_mut().push(Extent::from_range(piece.end()..run.end()));
            }
            *at = piece.end();
            Ok(Some(piece))
        };
        let step = async |lane: &Lane<'_, '_, F>| {
            let Some(piece) = next(lane.piece_bytes()).await? else { return Ok(false) };
            let copy = async {
                let bytes = lane.buffer().slice(0..piece.len_bytes as usize);
                source.read(piece, &bytes).await?;
                self.of_there(put(target, piece, &bytes)).await?;
                Ok(piece.len_bytes)
            };
            lane.piece(copy).await?;
            self.count(piece.len_bytes);
            Ok(true)
        };
        Lanes::new(self.work).run(step).await
    }
}

fn no_name() -> Error {
    Error::new(ErrorKind::InvalidInput, "the place there has no name")
}
