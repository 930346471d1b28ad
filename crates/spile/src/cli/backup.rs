//! `spile backup`, `spile verify`: what disks held at one point in time, in files or on NBD exports.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use clap::Args;
use serde::Serialize;
use serde_json::json;
use spile_core::{Disk as _, Error, ErrorKind, Locator, Result};
use spile_image::{Format, OpenOptions};
use spile_life::jobs::{State, Wishes};
use spile_node::{Aligned, Node};
use spile_server::backup::{self, Backup, Manifest, Options, TargetSpec};
use spile_server::checkpoints::Checkpoints;
use spile_server::jobs::Access;
use spile_server::serving::api::client::{CHANGE_PATIENCE, call, typed};
use spile_server::serving::api::types::{DiskBackup, Job, JobList, NewBackup};
use spile_server::serving::jobs::{DiskJob, What};
use spile_server::serving::offline::OwnJobs;
use spile_store::CacheMode;
use utoipa::ToSchema;

use super::coalesce::parse_rate;
use super::convert::{ConvertArgs, Known, convert};
use super::create::{check_new_name, refuse_missing_folder};
use super::snapshot::find;
use super::waiting::{Ended, LOOK_EVERY, WaitArgs, Waiting, Words};
use super::{
    Exit, ParentArgs, ReadArgs, existing, format_of, on_engine, onto, parse_format, print_json, progress_bar, say,
};
use crate::disks;
use crate::log::complain;
use crate::signals::EndSignals;
use crate::units::parse_size;

/// Copy what disks hold at this moment, while their guests go on
///
/// The backup of a disk is a new raw file, VHD or qcow2 image, which gets its name when it is whole, or an NBD export (nbd://, nbd+unix://, nbds://) that is
/// overwritten; --overwrite takes the place of a file, or overwrites a block device. With several disks, TARGET is a folder that gets one file for each disk, and all of them are of one moment. What guests change
/// meanwhile is kept in the fleece, a file without a name beside the disk: a target that is slow, or hangs, costs guests nothing else, and when
/// the fleece is full, the backup fails, alone.
///
/// The backup is a job of the disk's server, or of this command when no server has the disk. The command waits for its end, and Ctrl-C stops it; `spile jobs`
/// shows how far it is. A file beside the backup, TARGET.spile-backup, says what it is of, and has the digests that `spile verify` and `spile restore` compare.
#[derive(Debug, Args)]
pub struct BackupArgs {
    /// The disks, by their names on a server or by their paths; and where their backup goes
    #[arg(required = true, num_args = 2.., value_names = ["DISK", "TARGET"])]
    disks_and_target: Vec<PathBuf>,
    /// The format of the backup [default: what the name of TARGET says; with several disks: vhd]
    #[arg(short = 'O', long, value_name = "FORMAT", value_parser = parse_format)]
    to: Option<Format>,
    /// Give the moment of the backup this name, as `spile checkpoint` does, so that the next backup can have only what has changed since
    #[arg(long, value_name = "NAME")]
    checkpoint: Option<String>,
    /// Copy only what has changed since this checkpoint: to a child of the older backup that was made with it (--parent), or onto that older
    /// backup, a raw file or an export, which is TARGET
    #[arg(long, value_name = "NAME")]
    since: Option<String>,
    /// With --since: the older backup, in the folder of TARGET, of which TARGET becomes a child
    #[arg(long, value_name = "BACKUP", requires = "since")]
    parent: Option<PathBuf>,
    /// Overwrite TARGET, a file or block device that is there. A file stays as it is until the backup is whole and takes its place
    #[arg(long, conflicts_with = "since")]
    overwrite: bool,
    /// Keep what guests change meanwhile in a file in this folder [default: the disk's]
    #[arg(long, value_name = "DIR")]
    fleece: Option<PathBuf>,
    /// Let the backup fail when guests have changed more than this that was not copied yet [default: a tenth of the disk, 64 MiB at least]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    fleece_limit: Option<u64>,
    /// Where the manifest goes, of a backup on an NBD export or a block device [default: there is none]
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    /// Copy no more than this in a second [default: as fast as guests leave room for]
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    rate: Option<u64>,
    #[command(flatten)]
    waiting: WaitArgs,
    /// The format of a disk that no server has, instead of what the extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    #[command(flatten)]
    parents: ParentArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Read a backup, and compare it with its digests
///
/// A child is read with its parents. The first places that differ are told.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The backup: a file or an NBD export
    backup: PathBuf,
    /// Its format, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Its manifest [default: BACKUP.spile-backup]
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    #[command(flatten)]
    parents: ParentArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Make a disk of a backup
///
/// What is copied is compared with the digests of the backup; a disk that is made gets its name only if all of it is right. A disk that is
/// in use is refused.
#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// The backup: a file or an NBD export
    backup: PathBuf,
    /// The disk to make, which must not exist; an NBD export to overwrite; or with --onto a file or block device to overwrite
    disk: PathBuf,
    /// Overwrite DISK, a file or block device that is there
    #[arg(long)]
    onto: bool,
    /// With --onto, write over DISK although an image in its folder names it as its parent. That image is of no use then
    #[arg(long, requires = "onto")]
    write_parent: bool,
    /// The format of DISK, instead of what its extension says
    #[arg(short = 'O', long, value_name = "FORMAT", value_parser = parse_format)]
    to: Option<Format>,
    /// The format of the backup, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// The backup's manifest [default: BACKUP.spile-backup]
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    #[command(flatten)]
    read: ReadArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What a backup is, and whether it is right.
#[derive(Debug, Serialize, ToSchema)]
pub struct Verified {
    /// The backup.
    path: String,
    /// The disk that it is of.
    disk: String,
    /// The moment whose content it has, in seconds since 1970 UTC.
    point_in_time_unix_s: u64,
    /// The size of the disk, in bytes.
    virtual_size_bytes: u64,
    /// True when it holds what it should.
    is_right: bool,
    /// Where pieces of 1 MiB begin that differ, in bytes: the first hundred.
    differs_at_offset_bytes: Vec<u64>,
}

/// So many places that differ are told.
const MOST_TOLD: usize = 100;

/// A disk, and where its backup goes.
struct Pair {
    disk: PathBuf,
    target: TargetSpec,
}

/// Runs `spile backup`.
///
/// # Errors
/// When there is no such disk, the target cannot be made, and when the backup fails.
pub fn run(args: &BackupArgs) -> Result<Exit> {
    let disks = args.disks_and_target.split_last().map_or(&[][..], |(_, disks)| disks);
    let found: Vec<_> = disks.iter().map(|disk| find(disk)).collect::<Result<_>>()?;
    let pairs = pairs(args, &found)?;
    if !args.overwrite && args.since.is_none() {
        let hint = "choose another place; or --overwrite writes over the disk, once no guest uses it";
        pairs.iter().try_for_each(|pair| onto::refuse_served_here(&pair.target.at, hint))?;
    }
    let served: Vec<_> = found.iter().flatten().collect();
    let Some((server, _)) = served.first() else { return by_itself(args, pairs) };
    if served.len() < pairs.len() || served.iter().any(|(other, _)| other != server) {
        let what = "these disks are not all served by one server, and have no common point in time";
        return Err(Error::new(ErrorKind::InvalidInput, what).hint("make a backup of each by itself"));
    }
    let disks = served.iter().zip(&pairs).map(|((_, name), pair)| wish(name, &pair.target)).collect::<Result<_>>()?;
    let order = json!(NewBackup {
        disks,
        checkpoint: args.checkpoint.clone(),
        since: args.since.clone(),
        fleece_dir: args.fleece.as_deref().map(whole).transpose()?,
        fleece_limit_bytes: args.fleece_limit,
        limit_bytes_per_s: args.rate,
    });
    let begin = || typed::<JobList>(call(server, "POST", "/v1/backups", Some(&order), CHANGE_PATIENCE)?);
    if !args.waiting.waits(false) {
        return show(args, begin()?);
    }
    let is_new = pairs.iter().all(|pair| pair.target.is_new_file(args.since.is_some()));
    let left: fn(&Job) -> String = if is_new { |_| was_stopped(true) } else { |_| was_stopped(false) };
    let words = Words { doing: "copying", again: "if the server has ended, begin the backup anew", left };
    let waiting = Waiting::begin()?;
    match waiting.until_over(server, begin()?.jobs, &words)? {
        Ended::Done(jobs) => show(args, JobList { jobs }),
        Ended::Stopped(signal) => Ok(Exit::Ended(signal)),
    }
}

/// What is said of a backup that was stopped.
fn was_stopped(is_new: bool) -> String {
    format!("was stopped; {}", what_is_left(is_new))
}

fn wish(disk: &str, target: &TargetSpec) -> Result<DiskBackup> {
    let at = whole_place(&target.at)?;
    let manifest = target.manifest.as_deref().map(whole).transpose()?;
    let parent = target.parent.as_deref().map(whole).transpose()?;
    Ok(DiskBackup {
        disk: disk.to_owned(),
        target: at,
        format: target.format.map(|format| format.to_string()),
        parent,
        manifest,
        overwrite: target.overwrite,
    })
}

/// The places of a disk and of its backup with whole paths: what is told of them is of use in every folder.
fn absolute(disk: Locator, mut target: TargetSpec) -> Result<(Locator, TargetSpec)> {
    let absolute = |at: Locator| match at {
        Locator::Path(path) => absolute_path(&path).map(Locator::Path),
        at => Ok(at),
    };
    target.at = absolute(target.at)?;
    Ok((absolute(disk)?, target))
}

/// A whole path, or the URI of an export.
fn whole_place(at: &Locator) -> Result<String> {
    match at {
        Locator::Path(path) => whole(path),
        other => Ok(other.to_string()),
    }
}

fn absolute_path(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| Error::io("cannot be found", error).at_path(path))
}

/// A path as the server understands it, which works in another folder.
fn whole(path: &Path) -> Result<String> {
    let text = absolute_path(path)?.to_str().map(str::to_owned);
    text.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "the path is not UTF-8").at_path(path))
}

/// Each disk and the place of its backup. `found` are the disks that servers have.
fn pairs(args: &BackupArgs, found: &[Option<(PathBuf, String)>]) -> Result<Vec<Pair>> {
    let Some((target, disks)) = args.disks_and_target.split_last() else { return Ok(Vec::new()) };
    let manifest = args.manifest.clone();
    match disks {
        [disk] if !target.is_dir() => {
            let (at, parent) = (disks::locate(target)?, args.parent.clone());
            if matches!(at, Locator::Path(_)) {
                refuse_missing_folder(target)?;
                check_new_name(target)?;
                format_of(&at, args.to, "--to")?;
            }
            let target = TargetSpec { at, format: args.to, manifest, parent, overwrite: args.overwrite };
            Ok(vec![Pair { disk: disk.clone(), target }])
        }
        _ if !target.is_dir() => {
            let error = Error::new(ErrorKind::InvalidInput, "with several disks, TARGET is a folder").at_path(target);
            Err(error.hint("make the folder, or make a backup of each disk by itself"))
        }
        _ if args.parent.is_some() => {
            Err(Error::new(ErrorKind::InvalidInput, "in a folder, no backup becomes a child of another one")
                .hint("name the file to make, or keep raw backups, which are changed in place: --to raw"))
        }
        _ if manifest.is_some() => {
            Err(Error::new(ErrorKind::InvalidInput, "in a folder, each backup has its manifest beside it"))
        }
        _ => {
            let format = args.to.unwrap_or(Format::Vhd);
            let pair = |(disk, found): (&PathBuf, &Option<(PathBuf, String)>)| {
                let mut name = match found {
                    // A name, which may have dots in it, is no file's.
                    Some((_, name)) if disk.as_os_str() == &**name => disk.file_name(),
                    _ => disk.file_stem(),
                }
                .unwrap_or_default()
                .to_owned();
                name.push(format!(".{}", format.about().name));
                let at = Locator::Path(target.join(name));
                let (format, overwrite) = (Some(format), args.overwrite);
                Pair { disk: disk.clone(), target: TargetSpec { at, format, manifest: None, parent: None, overwrite } }
            };
            let pairs: Vec<_> = disks.iter().zip(found).map(pair).collect();
            for (number, pair) in pairs.iter().enumerate() {
                if pairs[..number].iter().any(|other| other.target == pair.target) {
                    let what = format!("two disks would have their backup in {}", disks::label(&pair.target.at));
                    return Err(Error::new(ErrorKind::InvalidInput, what).hint("make a backup of each by itself"));
                }
            }
            Ok(pairs)
        }
    }
}

fn show(args: &BackupArgs, list: JobList) -> Result<Exit> {
    if args.json {
        return print_json(&list).map(|()| Exit::Ok);
    }
    for Job { id, disk, to, state, .. } in &list.jobs {
        let target = to.as_deref().unwrap_or_default();
        match state.as_str() {
            "done" => say(format_args!("{disk}: its backup is {target}")),
            state => say(format_args!(
                "{disk}: the backup to {target} is {state} as job {id}; `spile jobs` shows how far it is"
            )),
        }
    }
    Ok(Exit::Ok)
}

/// Makes backups of disks that no server has. They are locked against writers meanwhile.
fn by_itself(args: &BackupArgs, pairs: Vec<Pair>) -> Result<Exit> {
    args.waiting.refuse_background()?;
    let signals = EndSignals::block()?;
    let options = OpenOptions { read_only: args.checkpoint.is_none(), ..args.parents.read_only(args.format) };
    let found: Vec<_> =
        pairs.into_iter().map(|pair| absolute(existing(&pair.disk)?, pair.target)).collect::<Result<Vec<_>>>()?;
    // Files get their names in the end; all else is written at once.
    let is_new = found.iter().all(|(_, target)| target.is_new_file(args.since.is_some()));
    let wishes = Wishes { limit_bytes_per_s: args.rate, ..Wishes::default() };
    let job = |at: &Locator| DiskJob::new(What::Backup(disks::label(at)), wishes);
    let jobs: Vec<_> = found.iter().map(|(_, target)| job(&target.at)).collect();
    let own = OwnJobs::open("backup");
    for (job, (disk, _)) in jobs.iter().zip(&found) {
        own.add(job, &disks::stem(disk), &disks::label(disk));
    }
    let (watched, stopped) = (jobs.clone(), jobs.clone());
    let told = Arc::new(OnceLock::new());
    let tell = told.clone();
    signals.on_first_whole(move |signal| {
        let _ = tell.set(signal);
        stopped.iter().for_each(|job| job.job().cancel());
    });
    let watch = std::thread::spawn(move || watched.iter().for_each(watch));
    let (worked, labels) = (jobs.clone(), found.iter().map(|(at, _)| at.clone()).collect::<Vec<_>>());
    let how = Options {
        checkpoint: args.checkpoint.clone(),
        since: args.since.clone(),
        is_offline: true,
        ..Options::default()
    };
    let done = on_engine(move || async move {
        let opened = match open_all(&found, &options).await {
            Ok(opened) => opened,
            Err(error) => {
                worked.iter().for_each(|job| job.job().end(&Err(error.duplicate())));
                return Err(error);
            }
        };
        let backups = opened.iter().zip(found).zip(worked).map(|((own, (disk, target)), job)| {
            // A backup does not keep its disk open.
            Backup { node: own.node.clone(), disk, target, checkpoints: own.checkpoints.clone(), job }
        });
        backup::run(backups.collect(), how).await;
        close_all(opened).await
    });
    let _ = watch.join();
    labels.iter().for_each(|disk| own.leave(&disks::label(disk)));
    done?;
    for job in &jobs {
        let report = job.job().report();
        match (report.state, report.error, told.get()) {
            (State::Done, ..) => {}
            (_, Some(error), _) => return Err(error),
            (.., Some(signal)) => {
                complain(format_args!("the backup {}", was_stopped(is_new)));
                return Ok(Exit::Ended(*signal));
            }
            (.., None) => {
                let what = format!("the backup was cancelled; {}", what_is_left(is_new));
                return Err(Error::new(ErrorKind::Shutdown, what));
            }
        }
    }
    let shown = jobs.iter().zip(&labels).map(|(job, at)| job.show(&disks::stem(at), &disks::label(at), ""));
    show(args, JobList { jobs: shown.collect() })
}

/// What is left of a backup that did not come to its end.
fn what_is_left(is_new: bool) -> &'static str {
    match is_new {
        true => "nothing of it is left",
        false => "what it overwrites is of no use until the next full one is whole",
    }
}

/// A disk that no server has, while it is backed up.
struct Opened {
    node: Arc<Node<spile_image::Graph<spile_store::HostStore>>>,
    checkpoints: Option<Arc<Checkpoints>>,
}

/// Opens the disks, for writing only where they are to get a checkpoint.
async fn open_all(found: &[(Locator, TargetSpec)], options: &OpenOptions) -> Result<Vec<Opened>> {
    let mut opened = Vec::new();
    for (at, _) in found {
        let graph = disks::open_keeping(CacheMode::Direct, at, options).await?;
        let checkpoints = match at {
            Locator::Path(_) => {
                let checkpoints = Checkpoints::none(Access { cache: CacheMode::Direct, no_lock: options.no_lock });
                checkpoints.open(&graph).await?;
                Some(Arc::new(checkpoints))
            }
            _ => None,
        };
        opened.push(Opened { node: Arc::new(Node::new(graph)), checkpoints });
    }
    Ok(opened)
}

/// Closes all disks, also when one of them fails; the first failure is told.
async fn close_all(opened: Vec<Opened>) -> Result<()> {
    let mut all = Ok(());
    for Opened { node, checkpoints } in opened {
        let graph = node.graph().await;
        let closed = node.close().await;
        if let (Ok(()), Some(checkpoints)) = (&closed, checkpoints) {
            checkpoints.close(&graph).await;
        }
        all = all.and(closed);
    }
    all
}

/// Shows how far `job` is until it is over.
fn watch(job: &Arc<DiskJob>) {
    let bar = progress_bar(0, "copying");
    loop {
        let report = job.job().report();
        if report.state.is_over() {
            return bar.finish_and_clear();
        }
        bar.set_length(report.total_bytes);
        bar.set_position(report.done_bytes);
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Runs `spile verify`.
///
/// # Errors
/// When the backup or its manifest cannot be read.
pub fn verify(args: &VerifyArgs) -> Result<Exit> {
    let at = existing(&args.backup)?;
    let manifest = manifest_of(&at, args.manifest.as_deref())?;
    let (digests, size) = (manifest.digests()?, manifest.virtual_size_bytes);
    let options = args.parents.read_only(args.format);
    let differs = on_engine(move || async move {
        let disk = Aligned::new(disks::open(CacheMode::Page, &at, &options).await?);
        backup::check_size(&disk, size)?;
        let bar = progress_bar(size, "verifying");
        let mut differs = Vec::new();
        let each = async |extent: spile_core::Extent, _, fits: bool| {
            bar.set_position(extent.end());
            if !fits && differs.len() < MOST_TOLD {
                differs.push(extent.start());
            }
            Ok(())
        };
        let compared = digests.compare(&disk, size, each).await;
        bar.finish_and_clear();
        compared.map(|()| differs)
    })?;
    let verified = Verified {
        path: whole_place(&disks::locate(&args.backup)?)?,
        disk: manifest.disk,
        point_in_time_unix_s: manifest.point_in_time_unix_s,
        virtual_size_bytes: size,
        is_right: differs.is_empty(),
        differs_at_offset_bytes: differs,
    };
    let exit = if verified.is_right { Exit::Ok } else { Exit::Corrupt };
    if args.json {
        return print_json(&verified).map(|()| exit);
    }
    match verified.is_right {
        true => say(format_args!("{}: holds what {} held", verified.path, verified.disk)),
        false => {
            let at =
                |offset: &u64| say(format_args!("{}: differs from its digest at offset {offset:#x}", verified.path));
            verified.differs_at_offset_bytes.iter().for_each(at);
        }
    }
    Ok(exit)
}

/// Runs `spile restore`.
///
/// # Errors
/// When the backup or its manifest cannot be read, the backup differs from its digests, and as `spile convert`.
pub fn restore(args: &RestoreArgs) -> Result<Exit> {
    if args.disk == Path::new("-") {
        // What was written to stdout cannot be taken back when the backup turns out to be damaged.
        let error = Error::new(ErrorKind::InvalidInput, "a backup is not restored to stdout");
        return Err(error.hint("name a file; or `spile verify` it, and `spile convert BACKUP -`"));
    }
    let at = existing(&args.backup)?;
    if !args.onto {
        let hint = "restore to a new file; or --onto writes over the disk, once no guest uses it";
        onto::refuse_served_here(&disks::locate(&args.disk)?, hint)?;
    }
    let manifest = manifest_of(&at, args.manifest.as_deref())?;
    let known = Known { digests: manifest.digests()?, size_bytes: manifest.virtual_size_bytes };
    let copy = ConvertArgs::new(args.backup.clone(), args.disk.clone(), args.read.clone())
        .with_formats(args.format, args.to)
        .with_onto(args.onto, args.write_parent)
        .with_json(args.json);
    convert(&copy, Some(Arc::new(known)))
}

/// The manifest of the backup at `at`.
///
/// # Errors
/// As [`Manifest::read_whole`]; `InvalidInput` for a backup that has none beside it.
pub fn manifest_of(at: &Locator, given: Option<&Path>) -> Result<Manifest> {
    let manifest = given.map(Path::to_owned);
    let target = TargetSpec { at: at.clone(), format: None, manifest, parent: None, overwrite: false };
    match target.manifest() {
        Some(path) => Manifest::read_whole(&path),
        None => {
            Err(Error::new(ErrorKind::InvalidInput, "this backup has no manifest beside it")
                .hint("say --manifest FILE"))
        }
    }
}
