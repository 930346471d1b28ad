//! `spile internal-snapshot`: snapshots inside a qcow2 image, as `qemu-img snapshot` has them.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use clap::{ArgGroup, Args};
use serde::Serialize;
use spile_core::{Disk as _, Env as _, Error, ErrorKind, Locator, Result};
use spile_engine::OsEnv;
use spile_image::inner::{InnerChange, InnerSnapshot, InnerWatch, Which};
use spile_image::layer::Layer as _;
use spile_image::{Format, OpenOptions, open_layer};
use spile_life::snapshot::refuse_job;
use spile_server::checkpoints::Checkpoints;
use spile_server::jobs::Access;
use spile_store::{CacheMode, HostFiles, OsFiles};
use utoipa::ToSchema;

use super::control::fitting_table;
use super::revert::file_at;
use super::snapshot::find;
use super::{Exit, ParentArgs, on_engine, parse_format, print_json, printable, say, say_lines};
use crate::disks;
use crate::units::{format_age, format_size};

/// List, make, apply or delete snapshots inside a qcow2 image
///
/// They lie in the disk's own file, as those of `qemu-img snapshot` do, and are for exchange with QEMU, libvirt, virt-manager and
/// Proxmox. Nobody may use the disk meanwhile: `spile snapshot` makes a snapshot while guests go on, as a file of its own. The image is checked
/// first, and one that contradicts itself is left as it is. A power cut at any moment leaves the disk as it was or as it is to be. --apply loses
/// what the disk holds now, and asks nothing: keep it first, by --create. The state of a virtual machine that a snapshot of QEMU may hold is
/// not restored.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("what").required(true)))]
pub struct InternalSnapshotArgs {
    /// The disk, by its path
    disk: PathBuf,
    /// List the snapshots
    #[arg(short, long, group = "what")]
    list: bool,
    /// Make a snapshot of what the disk holds, with this name
    #[arg(short, long, value_name = "NAME", group = "what")]
    create: Option<String>,
    /// Have the disk hold what the snapshot with this id or name holds, and have its size
    #[arg(short, long, value_name = "NAME", group = "what")]
    apply: Option<String>,
    /// Delete the snapshot with this id or name
    #[arg(short, long, value_name = "NAME", group = "what")]
    delete: Option<String>,
    /// NAME is the id of a snapshot and no name, where several have it
    #[arg(long, conflicts_with_all = ["list", "create"])]
    id: bool,
    /// The disk's format, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Also of a disk that an image in its folder names as its parent. --apply changes what that child shows
    #[arg(long, conflicts_with = "list")]
    write_parent: bool,
    #[command(flatten)]
    parents: ParentArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Snapshots inside an image.
#[derive(Debug, Serialize, ToSchema)]
pub struct InternalSnapshots {
    /// The image's path.
    path: String,
    /// With --list all that there are; else the one that was made, applied or deleted.
    snapshots: Vec<InternalSnapshot>,
}

/// A snapshot inside an image.
#[derive(Debug, Serialize, ToSchema)]
pub struct InternalSnapshot {
    /// What tells it from the others in its image.
    id: String,
    /// Its name.
    name: String,
    /// When it was made, in seconds since 1970-01-01 UTC.
    taken_unix_s: u32,
    /// The size of the disk then, in bytes; null where an old image does not say it.
    disk_bytes: Option<u64>,
    /// The size of the state of a virtual machine that it holds, in bytes; 0 for one of the disk alone.
    guest_state_bytes: u64,
}

impl From<InnerSnapshot> for InternalSnapshot {
    fn from(snapshot: InnerSnapshot) -> Self {
        let InnerSnapshot { id, name, taken_unix_s, size_bytes, state_bytes } = snapshot;
        Self { id, name, taken_unix_s, disk_bytes: size_bytes, guest_state_bytes: state_bytes }
    }
}

/// Runs `spile internal-snapshot`.
///
/// # Errors
/// `Busy` for a disk that is in use; what the image does not have or cannot have; `Corrupt` for one that contradicts itself; the storage's.
pub fn run(args: &InternalSnapshotArgs) -> Result<Exit> {
    let at = file_at(&args.disk)?;
    let options = OpenOptions { write_parent: args.write_parent, ..args.parents.read_only(args.format) };
    let change = args.change();
    let found = match &change {
        Some(change) => {
            refuse_served(&args.disk)?;
            let (change, options) = (change.clone(), OpenOptions { read_only: false, ..options });
            on_engine(move || async move { carry_out(&at, &options, &change).await })?
        }
        None => on_engine(move || async move { list(&at, &options).await })?,
    };
    match args.json {
        true => print_json(&found)?,
        false => tell(&found, change.as_ref()),
    }
    Ok(Exit::Ok)
}

impl InternalSnapshotArgs {
    /// What is to be changed; `None` when the snapshots are to be listed.
    fn change(&self) -> Option<InnerChange> {
        let which = |text: &String| Which { text: text.clone(), is_id: self.id };
        let create = |name: &String| InnerChange::Create { name: name.clone(), now_unix_s: OsEnv.now_unix_s() };
        let apply = self.apply.as_ref().map(|text| InnerChange::Apply(which(text)));
        let delete = self.delete.as_ref().map(|text| InnerChange::Delete(which(text)));
        self.create.as_ref().map(create).or(apply).or(delete)
    }
}

/// Refuses a disk that a server has.
fn refuse_served(disk: &Path) -> Result<()> {
    let Some((server, name)) = find(disk)? else { return Ok(()) };
    let what = format!(
        "{} is served as {name:?} by {}, and snapshots inside an image change while nobody uses it",
        disk.display(),
        server.display()
    );
    Err(Error::new(ErrorKind::Busy, what).hint(format!(
        "spile snapshot {name} --name NAME makes one while guests go on, as a file of its own; those inside an image are for \
         exchange with QEMU, libvirt and Proxmox: spile detach {name} first, or end the server"
    )))
}

/// The snapshots inside the image at `at`. Nothing else is opened.
async fn list(at: &Locator, options: &OpenOptions) -> Result<InternalSnapshots> {
    let files = HostFiles::new(OsFiles::new(CacheMode::Page).without_locks(options.no_lock));
    let opened = open_layer(&files, Arc::new(OsEnv), at.clone(), options).await;
    let layer = opened.map_err(|error| match error.kind() {
        ErrorKind::Busy => Error::new(ErrorKind::Busy, format!("{at}: {}", error.message()))
            .hint("if a server has the disk, spile info shows its snapshots"),
        _ => error,
    })?;
    let all = layer.image().inner_snapshots().await?;
    let snapshots = all.into_iter().map(InternalSnapshot::from).collect();
    Ok(InternalSnapshots { path: layer.path().display().to_string(), snapshots })
}

/// Changes the snapshots inside the image at `at`.
async fn carry_out(at: &Locator, options: &OpenOptions, change: &InnerChange) -> Result<InternalSnapshots> {
    let files = HostFiles::new(OsFiles::new(CacheMode::Page).without_locks(options.no_lock));
    let graph = disks::open_keeping(CacheMode::Page, at, options).await?;
    let leaf = &graph.handles()[0];
    refuse_job(&files, leaf.path()).await?;
    let checkpoints = Checkpoints::none(Access { no_lock: options.no_lock, ..Access::default() });
    checkpoints.open(&graph).await?;
    let done = leaf.image().change_inner_unused(change, &Forgets(&checkpoints)).await;
    let closed = graph.close().await;
    checkpoints.close(&graph).await;
    let snapshot = done.and_then(|snapshot| closed.map(|()| snapshot))?;
    Ok(InternalSnapshots { path: leaf.path().display().to_string(), snapshots: vec![snapshot.into()] })
}

/// Nobody looks where the disk differs from a snapshot that is applied: everything counts as changed before the disk holds that, and not where it is refused.
struct Forgets<'a>(&'a Checkpoints);

impl InnerWatch for Forgets<'_> {
    fn before_apply(&self) -> Pin<Box<dyn Future<Output = Result<()>> + '_>> {
        Box::pin(self.0.forget())
    }
}

fn tell(found: &InternalSnapshots, change: Option<&InnerChange>) {
    let (path, [one]) = (&found.path, &found.snapshots[..]) else { return print_list(found) };
    let name = format!("{} (id {})", printable(&one.name), printable(&one.id));
    match change {
        None => print_list(found),
        Some(InnerChange::Create { .. }) => say(format_args!("{path}: the snapshot {name} holds what the disk holds")),
        Some(InnerChange::Delete(_)) => say(format_args!("{path}: the snapshot {name} is gone")),
        Some(InnerChange::Apply(_)) => {
            say(format_args!("{path} holds what the snapshot {name} holds"));
            if one.guest_state_bytes > 0 {
                let state = format_size(one.guest_state_bytes);
                say(format_args!(
                    "the virtual machine's state in it ({state}) is not restored: the machine boots anew"
                ));
            }
        }
    }
}

fn print_list(found: &InternalSnapshots) {
    if found.snapshots.is_empty() {
        return say(format_args!("{}: no snapshots inside the image", found.path));
    }
    let mut table = fitting_table();
    table.set_header(["ID", "NAME", "AGE", "DISK", "MACHINE STATE"]);
    let now_unix_s = OsEnv.now_unix_s();
    for one in &found.snapshots {
        let age = match u64::from(one.taken_unix_s) {
            // Some programs do not note it.
            0 => "-".to_owned(),
            taken_unix_s => format_age(now_unix_s.saturating_sub(taken_unix_s)),
        };
        let disk = one.disk_bytes.map_or("not said".to_owned(), format_size);
        let state = if one.guest_state_bytes == 0 { "none".to_owned() } else { format_size(one.guest_state_bytes) };
        table.add_row([printable(&one.id), printable(&one.name), age, disk, state]);
    }
    say_lines(table);
}
