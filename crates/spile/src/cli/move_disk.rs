//! `spile move`: a disk goes to another place, by its server while guests use it or, when it has none, by the command itself.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use spile_core::{Error, ErrorKind, Locator, Result};
use spile_image::Format;
use spile_server::serving::api::types::{Job, NewJob};

use super::coalesce::{self, JobArgs};
use super::create::refuse_missing_folder;
use super::{Exit, parse_format, say};
use crate::units::{format_size, format_us};

/// Move a disk to another place while guests use it
///
/// What the disk holds is copied into a new image, with all that its parents show, or over copies of these (--chain keep): without that its snapshots stay
/// where they are, and the disk cannot go back to them any more. What guests change meanwhile is copied again, until next to
/// nothing is missing. Then requests wait for a moment, and guests go on with the new image. From then on there is no image at the old
/// path any more: the old one is called NAME.moved.EXTENSION, and a server that is started with the old path is told where the disk is. Change
/// the server's command line or configuration to the new path before it is started anew. Until the disk is handed over, nothing
/// has changed; when something fails, guests go on with the old image. The work is a job, as that of `spile coalesce`.
#[derive(Debug, Args)]
pub struct MoveArgs {
    #[command(flatten)]
    on: JobArgs,
    /// The new place: a file that is not there yet, or a folder, in which the disk keeps its file name; or an export of an NBD server that
    /// is exactly as large as the disk
    #[arg(long, value_name = "TARGET")]
    to: PathBuf,
    /// The format of the new image [default: what the extension says]
    #[arg(short = 'O', long, value_name = "FORMAT", value_parser = parse_format)]
    to_format: Option<Format>,
    /// What becomes of the disk's parents: `flatten` has the new image hold all that they show; `keep` copies them, too, as files of their own, beside the
    /// new image: to a path on this host, or to `spile receive` on another one
    #[arg(long, value_name = "HOW", default_value = "flatten")]
    chain: Chain,
    /// Remove the old image once the disk has been handed over
    #[arg(long)]
    delete_source: bool,
    /// Do not hand the disk over: keep its copy in step until `spile job ID finish`, which leaves it as it is at that moment
    #[arg(long, conflicts_with = "delete_source")]
    mirror_only: bool,
    /// Move a disk from a block device or an export, although nothing tells there that the disk is elsewhere: nobody may start a server with the
    /// old place any more
    #[arg(long)]
    leave_unmarked: bool,
}

/// What becomes of a disk's parents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Chain {
    /// The new image holds all that they show.
    Flatten,
    /// They are copied, too.
    Keep,
}

/// Runs `spile move`.
///
/// # Errors
/// When there is no such disk, when the move is refused, and when it fails: the disk is where it was then.
pub fn run(args: &MoveArgs) -> Result<Exit> {
    let to = match crate::disks::locate(&args.to)? {
        Locator::Path(path) => {
            refuse_host(&path)?;
            refuse_missing_folder(&path)?;
            text(&std::path::absolute(&path).map_err(|e| Error::io("cannot be found", e).at_path(&path))?)?
        }
        other => other.to_string(),
    };
    let to_format = args.to_format.map(|format| format.to_string());
    let chain = (args.chain == Chain::Keep).then(|| "keep".to_owned());
    let MoveArgs { delete_source, mirror_only, leave_unmarked, .. } = *args;
    let (kind, to) = ("move".to_owned(), Some(to));
    coalesce::run(
        &args.on,
        NewJob { kind, to, to_format, chain, delete_source, mirror_only, leave_unmarked, ..NewJob::default() },
    )
}

/// Refuses what scp would take for a file of another host.
fn refuse_host(to: &Path) -> Result<()> {
    let text = to.to_string_lossy();
    let Some((host, file)) = text.split_once(':').filter(|(host, _)| !host.is_empty() && !host.contains('/')) else {
        return Ok(());
    };
    if to.parent().is_none_or(|folder| folder == Path::new("") || folder.exists()) {
        return Ok(());
    }
    let what = format!("there is no folder {:?} here, and another host is not named so", format!("{host}:"));
    let name = Path::new(file).file_name().unwrap_or_default().to_string_lossy();
    let name = if name.is_empty() { "NAME".into() } else { name };
    let hint = format!("another host runs `spile receive`, and the place there is nbds://{host}/{name}");
    Err(Error::new(ErrorKind::NotFound, what).at_path(to).hint(hint))
}

fn text(path: &Path) -> Result<String> {
    let error =
        || Error::new(ErrorKind::Unsupported, "a disk cannot be moved to a path that is not UTF-8").at_path(path);
    path.to_str().map(str::to_owned).ok_or_else(error)
}

/// Says what has become of a disk that was moved, or copied, to `to`.
pub(super) fn say_done(job: &Job, to: &str) {
    if job.is_copy {
        return say(format_args!(
            "{}: {to} holds what it held at one point in time, {} copied",
            job.disk,
            format_size(job.done_bytes)
        ));
    }
    say(format_args!("{}: is at {to} now, {} copied", job.disk, format_size(job.done_bytes)));
    let Some(motion) = &job.motion else { return };
    if !job.server.is_empty() {
        let stall = format_us(motion.longest_stall_us);
        say(format_args!("requests waited for {stall} at most; start the server with the new path from now on"));
    }
    motion
        .old_image_path
        .iter()
        .for_each(|image| say(format_args!("the old image is {image}: remove it when you do not need it")));
    motion.trouble.iter().for_each(|trouble| say(format_args!("but {trouble}")));
}
