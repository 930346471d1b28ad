//! Backups of disks of this host, served or not: [`spile_life::backup`] with targets, manifests and jobs.

mod digest_text;
mod manifest;
mod since;
mod target;

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::{Either, select, select_all};
use rustix::fs::{StatVfs, statvfs};
use spile_core::{Disk as _, Env as _, Error, ErrorKind, Files as _, Locator, OpenMode, Result};
use spile_engine::{OsEnv, run_blocking, sleep, spawn};
use spile_image::Graph;
use spile_image::layer::Layer as _;
use spile_life::backup::{self, Around, Broken, Copied, Copy, KEPT_BYTES, PointInTime, Room, Subject};
use spile_node::{Node, OldEpoch};
use spile_store::{FileId, HostFiles, HostStore, OsFiles};
use tokio::sync::oneshot;

pub use self::manifest::{Manifest, State};
use self::since::{HostBegun, Names};
use self::target::Since;
pub use self::target::{Target, TargetSpec};
use crate::beneath::may_share_bytes;
use crate::checkpoints::Checkpoints;
use crate::jobs::{Access, refuse_failed_syncs};
use crate::new_file::folder_of;
use crate::serving::jobs::DiskJob;

/// A fleece may hold this part of its disk, unless its user says another limit.
const FLEECE_SHARE: u64 = 10;
/// The least limit of a fleece that nobody has limited, in bytes.
const LEAST_FLEECE_BYTES: u64 = 64 << 20;
/// This part of a file system is left to guests by fleeces.
const RESERVE_SHARE: u64 = 20;
/// And no more than this, in bytes.
const MOST_RESERVE_BYTES: u64 = 1 << 30;
/// How long a backup that was told to end may take to the end of its piece. Then nobody waits for its target any more.
const GRACE: Duration = Duration::from_millis(500);
/// How long a backup that was told to end may go on to get its name, once it has begun to.
const NAME_PATIENCE: Duration = Duration::from_secs(15);

type HostNode = Node<Graph<HostStore>>;

/// A backup of one disk that is to be made.
pub struct Backup {
    /// The disk.
    pub node: Arc<HostNode>,
    /// Its path, or what its user knows it by.
    pub disk: Locator,
    /// Where its backup goes.
    pub target: TargetSpec,
    /// Its checkpoints, if it has some that are open.
    pub checkpoints: Option<Arc<Checkpoints>>,
    /// What its users want of it, and how far it is.
    pub job: Arc<DiskJob>,
}

impl Backup {
    /// Which disk it is, wherever it goes; `None` for one without checkpoints.
    async fn disk_id(&self) -> Option<String> {
        match &self.checkpoints {
            Some(checkpoints) => since::disk_id(checkpoints).await,
            None => None,
        }
    }
}

/// How backups are made.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The folder of the fleece, if not the disk's.
    pub fleece_dir: Option<PathBuf>,
    /// The most bytes that the fleece of a disk may hold.
    pub fleece_limit_bytes: Option<u64>,
    /// A checkpoint that the disks get in the moment of the backup.
    pub checkpoint: Option<String>,
    /// Only what has changed since this checkpoint is copied.
    pub since: Option<String>,
    /// How the disks' files are opened.
    pub access: Access,
    /// Nobody changes the disks meanwhile.
    pub is_offline: bool,
}

/// Makes backups of these disks at one point in time, and says in each job how it ended. It is to run on a worker.
pub async fn run(backups: Vec<Backup>, options: Options) {
    let jobs: Vec<_> = backups.iter().map(|backup| backup.job.clone()).collect();
    let begun = match begin(backups, &options).await {
        Ok(begun) => begun,
        Err(error) => return jobs.iter().for_each(|job| job.job().end(&Err(error.duplicate()))),
    };
    for running in begun {
        running.job.job().accept();
        spawn(running.see_through());
    }
    for job in jobs {
        job.job().over().await;
    }
}

/// A backup whose point in time has come.
struct Running {
    node: Arc<HostNode>,
    job: Arc<DiskJob>,
    at: Locator,
    target: Target,
    point: Arc<PointInTime<HostStore, Graph<HostStore>>>,
    before: OldEpoch<Graph<HostStore>>,
    manifest: Manifest,
    checkpoints: Option<Arc<Checkpoints>>,
    names: Names,
    /// Whether the backup gets its name: whoever asks first decides.
    is_wanted: Arc<OnceLock<bool>>,
}

/// Opens all targets and fleeces, and then makes the point in time.
async fn begin(backups: Vec<Backup>, options: &Options) -> Result<Vec<Running>> {
    refuse_common_targets(&backups)?;
    for backup in &backups {
        backup.target.check_kind(options.since.is_some())?;
        refuse_failed_syncs(&*backup.node.graph().await)?;
    }
    let since = since_of(&backups, options).await?;
    let made_unix_s: Vec<_> = since.iter().map(|since| since.as_ref().map(|since| since.made_unix_s)).collect();
    let targets = open_targets(&backups, since).await?;
    let begun = match begin_all(&backups, options).await {
        Ok(begun) => begun,
        Err(error) => {
            give_up(targets);
            return Err(error);
        }
    };
    let now = OsEnv.now_unix_s();
    let running = |((((point, before), backup), target), made_unix_s): (((HostBegun, Backup), Target), Option<u64>)| {
        let manifest = Manifest::new(crate::disks::label(&backup.disk), point.size_bytes(), now);
        let Backup { node, target: spec, job, checkpoints, .. } = backup;
        let names = Names { made: options.checkpoint.clone(), since: options.since.clone().zip(made_unix_s) };
        let (point, is_wanted) = (Arc::new(point), Arc::default());
        Running { node, job, at: spec.at, target, point, before, manifest, checkpoints, names, is_wanted }
    };
    Ok(begun.into_iter().zip(backups).zip(targets).zip(made_unix_s).map(running).collect())
}

/// Refuses backups that would overwrite each other.
fn refuse_common_targets(backups: &[Backup]) -> Result<()> {
    for (number, one) in backups.iter().enumerate() {
        let manifest = one.target.manifest();
        let is_common = |other: &Backup| {
            other.target.at == one.target.at || (manifest.is_some() && other.target.manifest() == manifest)
        };
        if backups[..number].iter().any(is_common) {
            let what = format!("two disks would have their backup in {}", crate::disks::label(&one.target.at));
            return Err(Error::new(ErrorKind::InvalidInput, what).hint("make a backup of each by itself"));
        }
    }
    Ok(())
}

/// A disk, as its target is looked at.
struct Owner {
    /// Its path, or what its user knows it by.
    label: String,
    /// Which disk it is, wherever it goes.
    id: Option<String>,
    /// The files and devices that it lies in.
    files: Vec<FileId>,
}

impl Owner {
    async fn of(backup: &Backup) -> Self {
        let id = backup.disk_id().await;
        let graph = backup.node.graph().await;
        let stores = graph.handles().iter().flat_map(|layer| [layer.image().store(), layer.image().data_store()]);
        let files = stores.filter_map(|store| store.file_id()).collect();
        Self { label: crate::disks::label(&backup.disk), id, files }
    }

    /// Refuses to overwrite the backup of another disk, and a device that the disk itself lies on or beneath. The target's storage may hang.
    async fn refuse_target(self, target: &TargetSpec) -> Result<()> {
        let Locator::Path(path) = target.at.clone() else { return Ok(()) };
        let manifest = target.manifest().filter(|_| target.overwrite);
        let label = path.clone();
        let look = move || {
            if let Some(manifest) = manifest {
                Manifest::refuse_of_another(&manifest, &self.label, self.id.as_deref())?;
            }
            let there = path.metadata().ok().map(|stat| FileId::of(&stat));
            match there.is_some_and(|there| self.files.iter().any(|file| may_share_bytes(*file, there))) {
                true => {
                    let what = "the disk itself lies there: it cannot be written over while it is copied";
                    Err(Error::new(ErrorKind::InvalidInput, what).at_path(&path).hint("choose another place"))
                }
                false => Ok(()),
            }
        };
        run_blocking(&label, look).await
    }
}

/// The checkpoints since which the changes are to be copied.
async fn since_of(backups: &[Backup], options: &Options) -> Result<Vec<Option<Since>>> {
    let mut all = Vec::new();
    for backup in backups {
        all.push(match &options.since {
            None => None,
            Some(name) => {
                let made_unix_s = since::made_at(backup, name).await?;
                let disk_id = backup.disk_id().await;
                let disk = crate::disks::label(&backup.disk);
                Some(Since { disk, disk_id, name: name.clone(), made_unix_s })
            }
        });
    }
    Ok(all)
}

/// Opens all targets, in a task of its own: one that hangs keeps no job from being cancelled.
async fn open_targets(backups: &[Backup], since: Vec<Option<Since>>) -> Result<Vec<Target>> {
    let mut wanted = Vec::new();
    for (backup, since) in backups.iter().zip(since) {
        wanted.push((backup.target.clone(), Owner::of(backup).await, backup.node.size_bytes(), since));
    }
    let (done, opened) = oneshot::channel();
    spawn(async move {
        if let Err(Ok(targets)) = done.send(open_each(wanted).await) {
            give_up(targets);
        }
    });
    let told = select_all(backups.iter().map(|backup| Box::pin(backup.job.job().told_to_end())));
    match select(opened, told).await {
        Either::Left((opened, _)) => opened.unwrap_or_else(|_| Err(ended())),
        Either::Right(_) => Err(ended()),
    }
}

async fn open_each(wanted: Vec<(TargetSpec, Owner, u64, Option<Since>)>) -> Result<Vec<Target>> {
    let mut targets = Vec::new();
    for (spec, owner, size_bytes, since) in wanted {
        let opened = match (owner.refuse_target(&spec).await, since) {
            (Err(error), _) => Err(error),
            (Ok(()), None) => spec.open(size_bytes).await,
            (Ok(()), Some(since)) => spec.open_since(size_bytes, since).await,
        };
        match opened {
            Ok(target) => targets.push(target),
            Err(error) => {
                give_up(targets);
                return Err(target::told(&spec.at, error));
            }
        }
    }
    Ok(targets)
}

/// Closes targets that nothing was written to. Nobody waits for that.
fn give_up(targets: Vec<Target>) {
    for target in targets {
        spawn(target.give_up());
    }
}

/// Opens all fleeces, and then makes the point in time.
async fn begin_all(backups: &[Backup], options: &Options) -> Result<Vec<HostBegun>> {
    let mut subjects = Vec::new();
    for backup in backups {
        let size = backup.node.size_bytes();
        let limit = options.fleece_limit_bytes.unwrap_or((size / FLEECE_SHARE).max(LEAST_FLEECE_BYTES));
        let (fleece, room) = fleece(backup, options).await?;
        subjects.push(Subject { node: &backup.node, fleece, limit_bytes: limit, room });
    }
    let around = Around {
        env: Arc::new(OsEnv),
        timer: Arc::new(OsEnv),
        unit_bytes: None,
        most_kept_bytes: KEPT_BYTES,
        broken: Broken::Nothing,
    };
    since::begin(backups, subjects, &around, options).await
}

/// A file for what is saved of a disk, and how much it may take.
async fn fleece(backup: &Backup, options: &Options) -> Result<(HostStore, Room)> {
    let files = HostFiles::new(OsFiles::new(options.access.cache).without_locks(options.access.no_lock));
    let size = backup.node.size_bytes();
    if options.is_offline {
        // Nothing will be saved.
        return Ok((files.open(&Locator::Mem(0), OpenMode::ReadWrite).await?, backup::any_room()));
    }
    let graph = backup.node.graph().await;
    let leaf = graph.handles()[0].path();
    let is_file = leaf.is_absolute() && !target::is_device(leaf);
    let (disk, folder) = match (&options.fleece_dir, is_file) {
        (Some(folder), true) => (leaf, Some(folder.as_path())),
        (Some(folder), false) => (Path::new("disk"), Some(folder.as_path())),
        (None, true) => (leaf, None),
        (None, false) => {
            let what = "the disk lies in no folder where what guests change meanwhile could be kept for the backup";
            let label = crate::disks::label(&backup.disk);
            return Err(Error::new(ErrorKind::InvalidInput, what).at_path(Path::new(&label)).hint("say --fleece DIR"));
        }
    };
    let made = backup::fleece(&files, disk, folder, size).await;
    let room = room_in(folder.unwrap_or(folder_of(disk)));
    made.map(|fleece| (fleece, room))
        .map_err(|error| error.hint("a backup keeps there what guests change meanwhile; --fleece names another folder"))
}

/// What a fleece may take of the space in `folder`: a reserve stays for guests.
fn room_in(folder: &Path) -> Room {
    let folder = folder.to_owned();
    Box::new(move || {
        let (folder, label) = (folder.clone(), folder.clone());
        Box::pin(async move { run_blocking(&label, move || spare_bytes(&statvfs(&folder).ok()?)).await })
    })
}

fn spare_bytes(space: &StatVfs) -> Option<u64> {
    let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
    let reserve = (bytes(space.f_blocks) / RESERVE_SHARE).min(MOST_RESERVE_BYTES);
    // Some file systems tell nothing of their space.
    (space.f_blocks > 0).then(|| bytes(space.f_bavail).saturating_sub(reserve))
}

impl Running {
    /// Copies the disk, and says in the job how that ended. The disk's guests are free of the backup then, also when its target hangs.
    async fn see_through(self) {
        let (job, point, node) = (self.job.clone(), self.point.clone(), Arc::downgrade(&self.node));
        let made = self.checkpoints.clone().zip(self.names.made.clone());
        let is_wanted = self.is_wanted.clone();
        let (done, copied) = oneshot::channel();
        spawn(async move { drop(done.send(self.copy().await)) });
        let ending = async {
            let _ = select(pin!(point.failed()), pin!(job.job().told_to_end())).await;
        };
        let copied = match select(copied, pin!(ending)).await {
            Either::Left((copied, _)) => copied.unwrap_or_else(|_| Err(ended())),
            Either::Right((_, copied)) => {
                point.end().await;
                // What was begun with the target goes on to its end, and nobody waits for that.
                match select(copied, pin!(sleep(GRACE))).await {
                    Either::Left((copied, _)) => copied.unwrap_or_else(|_| Err(ended())),
                    Either::Right(_) if !is_wanted.get_or_init(|| false) => Err(ended()),
                    // It is just getting its name.
                    Either::Right((_, copied)) => match select(copied, pin!(sleep(NAME_PATIENCE))).await {
                        Either::Left((copied, _)) => copied.unwrap_or_else(|_| Err(ended())),
                        Either::Right(_) => Err(unnamed()),
                    },
                }
            }
        };
        point.end().await;
        let result = match (copied, point.check()) {
            // The target did not make that.
            (Err(_), Err(error)) if error.kind() != ErrorKind::Shutdown => Err(error),
            (copied, _) => copied,
        };
        let result = match result {
            // No other process can go on with it.
            Err(error) if error.kind() == ErrorKind::Shutdown && job.job().is_stopping() => Err(stopped()),
            other => other,
        };
        if let (Err(_), Some((checkpoints, name)), Some(node)) = (&result, made, node.upgrade()) {
            // When that fails, the checkpoint stays, and does no harm.
            let _ = checkpoints.remove(&node, &name).await;
        }
        job.job().end(&result);
    }

    async fn copy(self) -> Result<()> {
        let Self { node, job, at, mut target, point, before, mut manifest, checkpoints, names, is_wanted } = self;
        before.ended().await;
        drop(before);
        let looked_back = match &checkpoints {
            Some(checkpoints) => names.look_back(checkpoints, &node, &mut manifest).await,
            None => Ok(None),
        };
        // A target that hangs must not keep the disk's files open.
        drop((node, checkpoints));
        // What was cancelled by now has not begun to change an older backup.
        let changed = match point.check().and(looked_back) {
            Ok(changed) => changed,
            Err(error) => {
                target.give_up().await;
                return Err(error);
            }
        };
        if let Err(error) = target.begin(&manifest).await {
            target.give_up().await;
            return Err(target::told(&at, error));
        }
        let mut digests = std::mem::take(&mut target.digests);
        let copy = Copy {
            from: &point,
            to: target.disk(),
            beneath: target.beneath,
            changed: changed.as_deref(),
            job: job.job(),
            timer: &OsEnv,
        };
        let copied: Result<Copied> = copy.run(&mut digests).await;
        point.end().await;
        target.digests = digests;
        match copied {
            Ok(_) => target.finish(manifest, move || *is_wanted.get_or_init(|| true)).await,
            Err(error) => {
                let error = target.told(error);
                target.give_up().await;
                Err(if error.kind() == ErrorKind::Shutdown { error } else { target::told(&at, error) })
            }
        }
    }
}

fn ended() -> Error {
    Error::new(ErrorKind::Shutdown, "the backup was told to end")
}

fn unnamed() -> Error {
    let what =
        format!("the backup is whole, but its storage has not given it its name in {} s", NAME_PATIENCE.as_secs());
    Error::new(ErrorKind::TimedOut, what).hint("look whether it is there when the storage answers")
}

fn stopped() -> Error {
    Error::new(ErrorKind::Io, "the disk was detached, or its server has ended").hint("begin the backup anew")
}

/// Refuses a backup that is shorter than its disk was: something has cut it off.
///
/// # Errors
/// `Corrupt`.
pub fn check_size(backup: &impl spile_core::Disk, size_bytes: u64) -> Result<()> {
    let there = backup.size_bytes();
    if there >= size_bytes {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Corrupt, format!("the backup has {there} bytes, and its disk had {size_bytes}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserve_is_left_to_guests() {
        let of = |blocks, left| {
            let mut space = statvfs("/").unwrap();
            (space.f_frsize, space.f_blocks, space.f_bavail) = (4096, blocks, left);
            spare_bytes(&space)
        };
        // A twentieth of a small file system, and a gibibyte of a large one.
        assert_eq!(of(2000, 150), Some(50 * 4096));
        assert_eq!(of(2000, 100), Some(0));
        assert_eq!(of(2000, 99), Some(0));
        assert_eq!(of(1 << 30, 1 << 20), Some((4 << 30) - (1 << 30)));
        assert_eq!(of(0, 0), None);
    }
}
