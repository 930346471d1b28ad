//! `spile check`: is the image sound?

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use spile_core::{Error, ErrorKind, Files, Locator, OpenMode, Result, Store};
use spile_engine::OsEnv;
use spile_image::check::{self, Lost, Mend, Report, Severity};
use spile_image::containers::{Container, mistaken};
use spile_image::{Format, OpenOptions};
use spile_server::checkpoints;
use spile_server::stamps::{self, Doubt};
use spile_store::{CacheMode, OsFiles};
use utoipa::ToSchema;

use super::{Exit, OpenArgs, existing, format_of, on_engine, print_json, printable, say, text_of};
use crate::disks;
use crate::log::complain;
use crate::units::format_size;

/// Check a disk's metadata, and mend what can be mended
///
/// The disk must not be served meanwhile. A raw disk has no metadata: it is only opened. Parents are opened, so that a
/// missing or exchanged one is found, but only the disk itself is checked through; where its parents or its data file may
/// not be opened by the options that were given, a note says so. Exit code 0: sound; 1: the disk could not be checked, or
/// is sound and a file that it needs cannot be opened (result: incomplete); 3: corruption found, or the file is cut short;
/// 4: only leaked space found. With --repair, the exit code tells the state after the repair. A repair never gives up
/// data: a file that is cut short, such as an unfinished copy, is left as it is.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The disk: a file, a block device, or the URI of an NBD export
    disk: PathBuf,
    #[command(flatten)]
    open: OpenArgs,
    /// Mend what can be mended without guessing
    #[arg(long)]
    repair: bool,
    /// Also free blocks whose data are missing because the file is cut short. They then read as zeroes, or as the
    /// parent, and completing the copy no longer brings them back
    #[arg(long, requires = "repair")]
    discard_lost: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What a check found.
#[derive(Debug, Serialize, ToSchema)]
pub struct Checked {
    /// The disk.
    #[serde(serialize_with = "text_of")]
    #[schema(value_type = String)]
    path: PathBuf,
    /// Its format.
    format: String,
    /// `sound`, `leaks` or `corrupt`; `incomplete` when the image is not corrupt, and a file that it needs cannot be opened.
    result: &'static str,
    /// Blocks that the disk has room for; 0 when its format has none.
    total_blocks: u64,
    /// Blocks that have data.
    allocated_blocks: u64,
    /// Space in the file that belongs to nothing, in bytes.
    leaked_bytes: u64,
    /// How much the file is cut short, in bytes.
    missing_bytes: u64,
    /// What is wrong now.
    findings: Vec<Finding>,
    /// What was wrong before --repair.
    repaired: Vec<Finding>,
}

/// Something that is wrong, or worth knowing.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct Finding {
    /// `note`, `leak` or `corruption`.
    severity: &'static str,
    /// What it is, for people.
    message: String,
    /// Where in the file.
    offset_bytes: Option<u64>,
    /// `--repair` mends it.
    can_repair: bool,
    /// `--repair --discard-lost` gives up what is missing.
    can_discard_lost: bool,
}

/// Runs `spile check`.
///
/// # Errors
/// When the file cannot be opened or read, or is in use.
pub fn run(args: &CheckArgs) -> Result<Exit> {
    let (at, options) = (existing(&args.disk)?, args.open.read_only());
    let format = format_of(&at, args.open.format, "--format")?;
    let lost = if args.discard_lost { Lost::Discard } else { Lost::Keep };
    let repair = args.repair.then_some(lost);
    let outcome = on_engine(move || async move { check(&at, format, repair, &options).await });
    let found = match outcome {
        Ok(found) => found,
        Err(error) if error.kind() == ErrorKind::Corrupt => Found::unreadable(&error),
        Err(error) => return Err(error),
    };
    let (word, exit) = found.verdict();
    let checked = Checked::new(args, format, word, &found);
    match args.json {
        true => print_json(&checked)?,
        false => checked.print(),
    }
    Ok(exit)
}

/// What a check has found.
struct Found {
    now: Report,
    /// Before the repair.
    first: Report,
    /// Files that the image needs could be opened, or were not to be.
    is_complete: bool,
}

async fn check(at: &Locator, format: Format, repair: Option<Lost>, options: &OpenOptions) -> Result<Found> {
    let files = OsFiles::new(CacheMode::Page).without_locks(options.no_lock);
    let mode = if repair.is_some() { OpenMode::ReadWrite } else { OpenMode::ReadOnly };
    let store = files.open(at, mode).await?;
    refuse_other_format(&store, at, format, options).await?;
    if let (Some(_), Locator::Path(path)) = (repair, at) {
        lose_checkpoints(&files, path).await?;
    }
    let first = match repair {
        Some(lost) => format.repair(&store, &OsEnv, lost).await?,
        None => Report::default(),
    };
    let now = format.check(&store, &OsEnv).await?;
    drop(store);
    let mut found = Found { now, first, is_complete: true };
    if found.now.worst() != Some(Severity::Corruption) {
        match disks::open_with(&files, at, options).await {
            Ok(disk) => {
                let doubts = stamps::changed_parents(disk.layers()).await;
                found.now.findings.extend(doubts.into_iter().map(parent_finding));
            }
            Err(error) => found.note_chain(&error),
        }
    }
    Ok(found)
}

/// Refuses a file that is not of this format, as far as that shows. To call it corrupt would tell nothing.
async fn refuse_other_format(store: &impl Store, at: &Locator, format: Format, options: &OpenOptions) -> Result<()> {
    match format.named_parent(store).await {
        Err(error) if error.kind() == ErrorKind::Corrupt => {}
        _ => return Ok(()),
    }
    if let Some(error) = mistaken(store, format).await {
        return Err(error);
    }
    let by_extension = at.as_path().and_then(Format::from_extension);
    match by_extension.filter(|other| options.format == Some(format) && *other != format) {
        Some(other) if Container::of(store).await.is_none() => {
            let what = format!("nothing in the file says that it is a {format}");
            let error = Error::new(ErrorKind::InvalidInput, what).at_path(store.path());
            Err(error.hint(format!("leave out --format: by its extension it is {other}")))
        }
        _ => Ok(()),
    }
}

/// Removes the checkpoints of a disk whose image is to be repaired: nobody notes which blocks that changes.
async fn lose_checkpoints(files: &OsFiles, disk: &Path) -> Result<()> {
    let Some(side) = checkpoints::file_of(&files.canonical(disk).await?) else { return Ok(()) };
    complain(format_args!("note: a repair may change any block: the disk's checkpoints are removed"));
    files.remove(&side).await
}

/// A parent that seems to have changed. The image itself is sound.
fn parent_finding(doubt: Doubt) -> check::Finding {
    finding(Severity::Note, format!("{}: what the child shows may be wrong", doubt.message))
}

/// The offset is in the message.
fn finding(severity: Severity, message: String) -> check::Finding {
    check::Finding { severity, message, offset_bytes: None, mend: Mend::No }
}

impl Found {
    /// The report on an image too damaged to be read.
    fn unreadable(error: &Error) -> Self {
        let findings = vec![finding(Severity::Corruption, error.to_string())];
        Self { now: Report { findings, ..Report::default() }, first: Report::default(), is_complete: true }
    }

    /// The image itself is not corrupt, and it cannot be opened with all that it needs.
    fn note_chain(&mut self, error: &Error) {
        let (severity, what) = match error.kind() {
            ErrorKind::Corrupt => (Severity::Corruption, "the chain cannot be opened"),
            // What the options do not allow, or what is not read here, as encrypted data.
            ErrorKind::Denied | ErrorKind::Unsupported if error.os_errno().is_none() => {
                (Severity::Note, "the image itself was checked, and no other file")
            }
            _ => {
                self.is_complete = false;
                (Severity::Note, "the image itself was checked, but a file that it needs cannot be opened")
            }
        };
        self.now.findings.push(finding(severity, format!("{what}: {error}")));
    }

    fn verdict(&self) -> (&'static str, Exit) {
        match self.now.worst() {
            Some(Severity::Corruption) => ("corrupt", Exit::Corrupt),
            _ if !self.is_complete => ("incomplete", Exit::Incomplete),
            Some(Severity::Leak) => ("leaks", Exit::Leaks),
            Some(Severity::Note) | None => ("sound", Exit::Ok),
        }
    }
}

impl Checked {
    fn new(args: &CheckArgs, format: Format, result: &'static str, found: &Found) -> Self {
        let (report, first) = (&found.now, &found.first);
        let left = |finding: &check::Finding| report.findings.iter().any(|other| other.message == finding.message);
        Self {
            path: args.disk.clone(),
            format: format.to_string(),
            result,
            total_blocks: report.total_blocks,
            allocated_blocks: report.allocated_blocks,
            leaked_bytes: report.leaked_bytes,
            missing_bytes: report.missing_bytes,
            findings: report.findings.iter().map(Finding::from).collect(),
            repaired: first.findings.iter().filter(|f| !left(f)).map(Finding::from).collect(),
        }
    }

    fn print(&self) {
        self.repaired.iter().for_each(|finding| say(format_args!("repaired: {}", printable(&finding.message))));
        self.findings.iter().for_each(|finding| say(finding.line()));
        let path = self.path.display();
        match self.total_blocks {
            0 => say(format_args!("{path}: {}", self.result)),
            total => say(format_args!(
                "{path}: {} ({} of {total} blocks allocated, {} leaked)",
                self.result,
                self.allocated_blocks,
                format_size(self.leaked_bytes)
            )),
        }
    }
}

impl From<&check::Finding> for Finding {
    fn from(finding: &check::Finding) -> Self {
        Self {
            severity: match finding.severity {
                Severity::Note => "note",
                Severity::Leak => "leak",
                Severity::Corruption => "corruption",
            },
            message: finding.message.clone(),
            offset_bytes: finding.offset_bytes,
            can_repair: finding.mend == Mend::Repair,
            can_discard_lost: finding.mend == Mend::DiscardLost,
        }
    }
}

impl Finding {
    fn line(&self) -> String {
        let at = self.offset_bytes.map_or(String::new(), |offset| format!(" at offset {offset:#x}"));
        let mend = match (self.can_repair, self.can_discard_lost) {
            (true, _) => " (--repair mends this)",
            (_, true) => " (complete the copy if it is one; --repair --discard-lost gives up what is missing)",
            _ => "",
        };
        format!("{}: {}{at}{mend}", self.severity, printable(&self.message))
    }
}
