//! A backup of one or several disks at one point in time, while clients go on to write.
//!
//! The disks are raw images. Each client writes and zeroes pages of its own, on all disks, one request after the other; two clients share each
//! larger unit of a backup. What has to hold for what the backup has copied:
//!
//! - **Each page holds what it held at the point in time**: the last request that was answered before, or one that was in flight.
//! - **It is a moment of all disks**: of each client it has all requests up to one of them, and none behind it.
//! - **The digests are those of what was copied**, and the fleece is empty at the end.
//!
//! A second part makes chains of increments, with crashes: see `backup/chain.rs`.

mod chain;

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use spile_core::{Disk, Extent, Segments, Timer, WriteZeroes};
use spile_image::{Format, Graph, OpenOptions};
use spile_life::backup::{Around, Begun, Beneath, Copy, Digests, PIECE_BYTES, Subject, any_room, begin, fleece};
use spile_life::jobs::{Job, Wishes};
use spile_node::Node;

pub use spile_life::backup::Broken as BrokenCopy;

use crate::exec::{Ended, Executor};
use crate::explore::{Finding, catch_findings};
use crate::pages::{PAGE, Pages};
use crate::plan::Plan;
use crate::rng::Rng;
use crate::store::SimStore;
use crate::turns::{pause, turns};
use crate::world::World;

/// A rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// None, or one of the copy's own.
    Copy(BrokenCopy),
    /// The disks get their points in time one after the other.
    OneByOne,
    /// The checkpoint comes after the point in time.
    CheckpointLate,
}

summary! {
    /// What a run that found nothing did.
    pub struct BackupSummary {
        /// Requests of clients.
        pub requests: u64,
        /// Disks that were copied.
        pub copied: u64,
        /// Requests that began after the point in time and before the copy's end.
        pub beside: u64,
        /// Backups of what has changed since the one before.
        pub increments: u64,
        /// Crashes while a chain of backups was made.
        pub crashes: u64,
    }
}

/// A clock that stands still.
struct Still;

impl Timer for Still {
    fn sleep(&self, _: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(std::future::pending())
    }

    fn now_ns(&self) -> u64 {
        0
    }
}

type SimDisk = Arc<Node<Graph<SimStore>>>;

async fn open_raw(world: &World, path: &Path) -> SimDisk {
    let options = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
    let graph = Graph::open(&world.files(), world.env(), path, &options).await;
    Arc::new(Node::new(graph.unwrap_or_else(|error| panic!("the disk does not open: {error:?}"))))
}

/// Pages that one client has in a row.
const STRIPE: u64 = 8;

/// A request of a client: what it wrote to each of its pages; 0 for zeroes.
#[derive(Clone)]
struct Wrote {
    disk: usize,
    pages: std::ops::Range<u64>,
    stamp: u64,
    /// It was answered before the point in time was asked for.
    is_before: bool,
    /// It began after the point in time.
    is_after: bool,
}

struct Host {
    world: World,
    broken: Broken,
    around: Around,
    disks: usize,
    clients: u64,
    /// The requests of each client, in order.
    wrote: RefCell<Vec<Vec<Wrote>>>,
    is_after: Cell<bool>,
    is_done: Cell<bool>,
    summary: Cell<BackupSummary>,
}

fn image(disk: usize) -> PathBuf {
    format!("/images/disk{disk}.raw").into()
}

fn target(disk: usize) -> PathBuf {
    format!("/images/backup{disk}.raw").into()
}

/// Units of any size, and more or less room for what is saved and not in the fleece yet.
fn around(world: &World, seed: u64, broken: Broken) -> Around {
    let mut rng = Rng::new(seed).split(92);
    let unit_bytes = PAGE << rng.below(5);
    Around {
        env: world.env(),
        timer: Arc::new(Still),
        unit_bytes: Some(unit_bytes),
        most_kept_bytes: unit_bytes * *rng.pick(&[0, 2, 5, 1 << 20]),
        broken: if let Broken::Copy(broken) = broken { broken } else { BrokenCopy::Nothing },
    }
}

/// Runs one seed.
///
/// # Errors
/// What was found.
pub fn run_backup(seed: u64, broken: Broken, trace: bool) -> Result<BackupSummary, Finding> {
    let mut all = run_copies(seed, broken, trace)?;
    all += chain::run(seed, broken, trace)?;
    Ok(all)
}

/// Full backups of several disks at one moment.
fn run_copies(seed: u64, broken: Broken, trace: bool) -> Result<BackupSummary, Finding> {
    let mut plan = Plan::draw(seed, 1 << 20, 64 << 10);
    plan.hardware.devices = false;
    let world = World::new(seed, plan.hardware);
    if trace {
        world.keep_trace();
    }
    let mut rng = Rng::new(seed).split(90);
    let (disks, clients) = (1 + rng.index(3), 2 + rng.below(3));
    for disk in 0..disks {
        let bytes = rng.between(20, 2 * PIECE_BYTES / PAGE + 40) * PAGE;
        world.install_empty(image(disk), bytes);
        world.install_empty(target(disk), bytes);
    }
    let host = Rc::new(Host {
        world: world.clone(),
        broken,
        around: around(&world, seed, broken),
        disks,
        clients,
        wrote: RefCell::new(vec![Vec::new(); clients as usize]),
        is_after: Cell::new(false),
        is_done: Cell::new(false),
        summary: Cell::default(),
    });
    catch_findings(&world, move || {
        let mut executor = Executor::new(host.world.clone(), Rng::new(rng.word()));
        executor.spawn(host.clone().run(rng));
        assert_eq!(executor.run(u64::MAX), Ended::Done, "something waits for ever");
        host.summary.get()
    })
}

impl Host {
    async fn open(&self, path: &Path) -> SimDisk {
        open_raw(&self.world, path).await
    }

    async fn run(self: Rc<Self>, mut rng: Rng) {
        let mut nodes = Vec::new();
        for disk in 0..self.disks {
            nodes.push(self.open(&image(disk)).await);
        }
        for client in 0..self.clients {
            crate::exec::spawn_beside(Box::pin(self.clone().client(client, nodes.clone(), Rng::new(rng.word()))));
        }
        pause(&mut rng, 400).await;
        self.back_up(&nodes).await;
        self.is_done.set(true);
    }

    /// Writes until the backup is done, and a little longer.
    async fn client(self: Rc<Self>, client: u64, nodes: Vec<SimDisk>, mut rng: Rng) {
        let mut left = 20 + rng.below(60);
        while left > 0 {
            left -= u64::from(self.is_done.get() || rng.chance(1, 2));
            let disk = rng.index(self.disks);
            let pages = nodes[disk].size_bytes() / PAGE;
            let stripes = pages / STRIPE / self.clients;
            if stripes == 0 {
                continue;
            }
            // Most requests meet in a few places.
            let stripe = (rng.skewed(stripes + 1) - 1).min(stripes - 1) * self.clients + client;
            let first = rng.below(STRIPE);
            let range = stripe * STRIPE + first..stripe * STRIPE + rng.between(first + 1, STRIPE);
            self.request(client, disk, &nodes[disk], range, &mut rng).await;
            pause(&mut rng, 20).await;
        }
    }

    async fn request(&self, client: u64, disk: usize, node: &SimDisk, pages: std::ops::Range<u64>, rng: &mut Rng) {
        let number = self.wrote.borrow()[client as usize].len();
        let is_zero = rng.chance(1, 4);
        let stamp = if is_zero { 0 } else { client << 32 | (number as u64 + 1) };
        let is_after = self.is_after.get();
        let wrote = Wrote { disk, pages: pages.clone(), stamp, is_before: false, is_after };
        self.wrote.borrow_mut()[client as usize].push(wrote);
        let mut summary = self.summary.get();
        summary.requests += 1;
        summary.beside += u64::from(is_after && !self.is_done.get());
        self.summary.set(summary);
        let extent = Extent::from_range(pages.start * PAGE..pages.end * PAGE);
        let done = match is_zero {
            true => node.write_zeroes(extent, WriteZeroes { may_unmap: rng.chance(1, 2), only_if_fast: false }).await,
            false => {
                let bytes = Segments::zeroed(extent.len_bytes as usize);
                for page in 0..pages.end - pages.start {
                    bytes.copy_from_slice((page * PAGE) as usize, &stamp.to_le_bytes());
                }
                node.write(extent, &bytes, false).await
            }
        };
        done.unwrap_or_else(|error| panic!("a request failed: {error:?}"));
        // Only what was answered before the point in time was asked for has to be in it.
        self.wrote.borrow_mut()[client as usize][number].is_before = !self.is_after.get() && !self.is_asked();
    }

    fn is_asked(&self) -> bool {
        self.summary.get().copied > 0
    }

    async fn back_up(&self, nodes: &[SimDisk]) {
        let files = self.world.files();
        let mut subjects = Vec::new();
        for (disk, node) in nodes.iter().enumerate() {
            let fleece = fleece(&files, &image(disk), None, node.size_bytes()).await;
            let fleece = fleece.unwrap_or_else(|error| panic!("there is no fleece: {error:?}"));
            subjects.push(Subject { node, fleece, limit_bytes: u64::MAX, room: any_room() });
        }
        // From here on nobody knows of a request whether it is in the backup, until the gates are open again.
        self.summary.set(BackupSummary { copied: nodes.len() as u64, ..self.summary.get() });
        let mut begun = Vec::new();
        let sets = if self.broken == Broken::OneByOne {
            subjects.into_iter().map(|subject| vec![subject]).collect()
        } else {
            vec![subjects]
        };
        for set in sets {
            turns(if self.broken == Broken::OneByOne { 50 } else { 0 }).await;
            begun.extend(begin(set, &self.around).await.unwrap_or_else(|error| panic!("no point in time: {error:?}")));
        }
        self.is_after.set(true);
        for (disk, one) in begun.into_iter().enumerate() {
            self.copy(disk, one).await;
        }
        self.check();
    }

    async fn copy(&self, disk: usize, (point, before): Begun<SimStore, Graph<SimStore>>) {
        before.ended().await;
        let (to, job, mut digests) = (self.open(&target(disk)).await, Job::new(Wishes::default()), Digests::default());
        let copy = Copy { from: &point, to: &*to, beneath: Beneath::Zeroes, changed: None, job: &job, timer: &Still };
        copy.run(&mut digests).await.unwrap_or_else(|error| panic!("the backup failed: {error:?}"));
        point.end().await;
        let whole = async |_: Extent, _: Option<Segments>, fits: bool| {
            assert!(fits, "a digest is wrong");
            Ok(())
        };
        let compared = digests.compare(&*to, to.size_bytes(), whole).await;
        compared.unwrap_or_else(|error| panic!("the backup cannot be read: {error:?}"));
        to.close().await.unwrap_or_else(|error| panic!("the backup does not close: {error:?}"));
    }

    /// Compares the backups with what the clients know.
    fn check(&self) {
        let copies: Vec<Pages> =
            (0..self.disks).map(|disk| self.world.view(&target(disk)).expect("the backup is there")).collect();
        let stamp_at = |disk: usize, page: u64| {
            let mut bytes = [0; 8];
            copies[disk].read(page * PAGE, &mut bytes);
            u64::from_le_bytes(bytes)
        };
        for (client, wrote) in self.wrote.borrow().iter().enumerate() {
            // The newest request that is seen, or that has to be.
            let is_seen = |wrote: &Wrote| {
                wrote.stamp != 0 && wrote.pages.clone().any(|page| stamp_at(wrote.disk, page) == wrote.stamp)
            };
            let newest = wrote.iter().rposition(|one| one.is_before || is_seen(one));
            for (number, one) in wrote.iter().enumerate() {
                assert!(
                    !(one.is_after && is_seen(one)),
                    "client {client}: request {number} came after the point in time"
                );
                for page in one.pages.clone() {
                    let is_later = |later: &&Wrote| later.disk == one.disk && later.pages.contains(&page);
                    let later = || wrote[number + 1..].iter().filter(is_later);
                    let is_overwritten = newest.is_some_and(|newest| {
                        newest > number && wrote[number + 1..=newest].iter().any(|later| is_later(&later))
                    });
                    let found = stamp_at(one.disk, page);
                    // A request that zeroes cannot be told from another one.
                    let may_be_zero = later().any(|later| later.stamp == 0 && !later.is_after);
                    let is_right = found == one.stamp || found == 0 && may_be_zero || is_overwritten;
                    // One that was in flight at the point in time may be there in part.
                    let has_to_be = one.is_before || newest.is_some_and(|newest| number < newest);
                    assert!(
                        !has_to_be || is_right,
                        "client {client}: page {page} of disk {} lacks request {number}",
                        one.disk
                    );
                }
            }
        }
    }
}
