//! Commands for running servers: `ls`, `show`, `attach`, `detach`, `resize`.

use std::path::{Path, PathBuf};

use clap::Args;
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;
use serde_json::{Value, json};
use spile_core::{Disk as _, Error, ErrorKind, Extent, Locator, Result};
use spile_image::{Format, OpenOptions};
use spile_server::checkpoints::Checkpoints;
use spile_server::jobs::Access;
use spile_server::serving::api::client::{CHANGE_PATIENCE, LOOK_PATIENCE, ask, call, escape, typed};
use spile_server::serving::api::discovery;
use spile_server::serving::api::types::{Detached, Disk, DiskDetail, DiskList, Failure, Job, Meter, Paused, Waiting};
use spile_store::CacheMode;
use utoipa::ToSchema;

use super::trouble::policy_text;
use super::{Exit, existing, limit, on_engine, parse_format, print_json, printable, say, say_lines, shape, space};
use crate::disks::{self, DiskSpec, split_commas};
use crate::log;
use crate::units::{format_count, format_size, format_us, parse_size};
use crate::uri::Address;

/// List the disks that are served on this host
///
/// Every server has a control socket in /run/spile ($XDG_RUNTIME_DIR/spile without root; $SPILE_RUN_DIR names another
/// folder). A socket without a server is one of a server that was killed: it is named below the list.
#[derive(Debug, Args)]
pub struct LsArgs {
    /// Only the disks of this server: the path of its control socket, its name in the folder, or one of its disks
    server: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Show a disk that is served: its images, the ways to it, and what was counted
#[derive(Debug, Args)]
pub struct ShowArgs {
    #[command(flatten)]
    which: Which,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Which disk of which server.
#[derive(Debug, Args)]
pub(super) struct Which {
    /// The disk: its name, the path of its image, or the control socket of its server
    disk: String,
    /// With a control socket: the disk's name there, if it is not the first disk
    #[arg(long = "disk", value_name = "NAME", alias = "name")]
    name: Option<String>,
}

/// Have a running server serve one more disk
///
/// NBD clients find it under its name on the server's NBD sockets; virtual machines on the --vhost-user sockets given here.
#[derive(Debug, Args)]
pub struct AttachArgs {
    /// The server: the path of its control socket, its name in the folder, or one of its disks
    server: String,
    /// The disk, as for `spile serve`
    #[arg(value_name = "DISK[,OPTION]...")]
    disk: String,
    /// Serve it to virtual machines on this Unix socket (may be given several times)
    #[arg(long, value_name = "PATH")]
    vhost_user: Vec<PathBuf>,
    /// One more address for NBD clients of this server (may be given several times)
    #[arg(long, value_name = "unix:PATH|tcp:HOST:PORT")]
    nbd: Vec<Address>,
}

/// Have a running server serve a disk no more
///
/// The disk is flushed and closed. A disk in use is left alone, unless --force is given; so is one with a job, such as a backup or a move.
#[derive(Debug, Args)]
pub struct DetachArgs {
    #[command(flatten)]
    which: Which,
    /// Cut off the guests and NBD clients that use it, and end its job: a backup is gone then, any other job goes on when the disk is served
    /// again. NBD clients of the server's other disks may be cut off with them, and connect again
    #[arg(long)]
    force: bool,
    /// Print one JSON object: the server's other disks, and the jobs that were ended
    #[arg(long)]
    json: bool,
}

/// Make a disk longer, while it is served or while nobody uses it
///
/// Guests see the new size at once, without a reboot (vhost-user, Xen); NBD clients see it when they connect anew. Raw images and
/// block devices, VHDs of every kind and qcow2 images grow while they are served; a block device has to be made longer first (lvextend). A
/// `resize` that is killed leaves the old size or the new one. What a disk gains reads as zeroes, so a child that is shorter than
/// its parent does not grow.
///
/// With --shrink, a raw file, a VHD or a qcow2 image is made shorter while nobody serves it. What lies behind the new end must be zero; with
/// --discard, it is lost.
#[derive(Debug, Args)]
pub struct ResizeArgs {
    #[command(flatten)]
    which: Which,
    /// The new size; with a + in front, by how much the disk grows
    #[arg(value_name = "[+]SIZE", value_parser = parse_new_size)]
    size: NewSize,
    /// The format of a disk that is not served, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Make the disk shorter, if all that lies behind the new end is zero
    #[arg(long)]
    shrink: bool,
    /// With --shrink: lose what lies behind the new end
    #[arg(long, requires = "shrink")]
    discard: bool,
    /// Resize the disk although an image in its folder names it as its parent
    #[arg(long)]
    write_parent: bool,
    /// Follow parents of a disk that is not served into this folder, too (may be given several times)
    #[arg(long, value_name = "DIR")]
    allow_parents: Vec<PathBuf>,
    /// Let images of a disk that is not served keep their data in other files, which they name themselves and which lie where parents may
    #[arg(long)]
    allow_data_file: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What size a disk is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NewSize {
    /// So many bytes.
    Of(u64),
    /// So many bytes more than it has.
    More(u64),
}

fn parse_new_size(text: &str) -> Result<NewSize, String> {
    match text.strip_prefix('+') {
        Some(more) => parse_size(more).map(NewSize::More),
        None => parse_size(text).map(NewSize::Of),
    }
}

impl NewSize {
    /// The size in bytes of a disk that has `old` bytes.
    fn of(self, old: u64) -> Result<u64> {
        match self {
            Self::Of(size) => Ok(size),
            Self::More(more) => {
                old.checked_add(more).ok_or_else(|| Error::new(ErrorKind::InvalidInput, "no disk is that large"))
            }
        }
    }
}

/// A disk of another size.
#[derive(Debug, Serialize, ToSchema)]
pub struct Resized {
    /// The disk's name on its server; `null` when nobody serves it.
    disk: Option<String>,
    /// Where its bytes are: the path of the leaf, or the URI of an export.
    path: String,
    /// Its size now, in bytes.
    virtual_size_bytes: u64,
    /// Its size before, in bytes.
    old_virtual_size_bytes: u64,
}

impl Which {
    /// True when the words may mean a file that is there.
    pub(super) fn may_be_file(&self) -> bool {
        let is_disk = |stat: std::fs::Metadata| stat.is_file() || space::is_block_device(&stat);
        self.name.is_none() && Path::new(&self.disk).metadata().is_ok_and(is_disk)
    }

    /// The disk as a path.
    pub(super) fn disk_path(&self) -> &Path {
        Path::new(&self.disk)
    }

    /// The server's control socket and the disk's name.
    pub(super) fn find(&self) -> Result<(PathBuf, String)> {
        find_named(&self.disk, self.name.as_deref())
    }
}

/// The server's control socket and the disk's name, of `disk`: a name, the path of an image, or that of a control socket, with the disk's `name` there.
///
/// # Errors
/// As [`discovery::find_disk`].
pub(super) fn find_named(disk: &str, name: Option<&str>) -> Result<(PathBuf, String)> {
    let path = Path::new(disk);
    if !discovery::is_socket(path) {
        return match name {
            Some(_) => Err(no_server(path)),
            None => discovery::find_disk(disk),
        };
    }
    let disks = discovery::disks_of(path)?;
    let is_meant = |disk: &&Disk| match name {
        Some(name) => disk.name == name || disk.exports.iter().any(|export| export.name == name),
        None => true,
    };
    let found = disks.iter().find(is_meant).map(|disk| (path.to_owned(), disk.name.clone()));
    found.ok_or_else(|| {
        let known: Vec<_> = disks.iter().map(|disk| format!("{:?}", disk.name)).collect();
        let what = format!("no disk is exported as {:?}", name.unwrap_or_default());
        Error::new(ErrorKind::NotFound, what).hint(format!("the disks are {}", known.join(", ")))
    })
}

fn no_server(path: &Path) -> Error {
    Error::new(ErrorKind::NotFound, "no server listens on this control socket")
        .at_path(path)
        .hint("start `spile serve` with --control")
}

/// Runs `spile ls`.
///
/// # Errors
/// When the folder or the server that was named cannot be asked.
pub fn ls(args: &LsArgs) -> Result<Exit> {
    log::to_stderr();
    let disks = match &args.server {
        Some(server) => discovery::disks_of(&discovery::find_server(server)?)?,
        None => discovery::servers()?.into_iter().flat_map(|(_, disks)| disks).collect(),
    };
    if args.json {
        return print_json(&DiskList { disks }).map(|()| Exit::Ok);
    }
    let mut table = fitting_table();
    table.set_header(["NAME", "STATE", "SIZE", "FORMAT", "WAYS", "PATH"]);
    for disk in &disks {
        let mut ways: Vec<_> = disk.exports.iter().map(|export| export.protocol.as_str()).collect();
        ways.dedup();
        let access = if disk.read_only { " (read-only)" } else { "" };
        let format = format!("{}{access}", disk.format);
        let size = format_size(disk.virtual_size_bytes);
        let row = [&disk.name, &state_of(disk), &size, &format, &ways.join(", "), &disk.path];
        table.add_row(row.map(|text| printable(text)));
    }
    table.column_iter_mut().last().into_iter().for_each(|path| {
        path.set_delimiter('/');
    });
    say_lines(table);
    disks.iter().filter_map(is_paused).for_each(say);
    disks.iter().filter_map(goes_back).for_each(say);
    disks.iter().filter_map(waits_for).for_each(say);
    disks.iter().filter_map(lacks_memory).for_each(say);
    if args.server.is_none() {
        discovery::ended()?.iter().map(|socket| has_ended(socket)).for_each(say);
    }
    for (disk, failed) in disks.iter().filter_map(|disk| Some((disk, disk.failed_sync.as_ref()?))) {
        say(format_args!("{}: every flush fails: {}", disk.name, failed.message));
    }
    Ok(Exit::Ok)
}

/// The disk's state, and whether requests of it wait for a limit now.
fn state_of(disk: &Disk) -> String {
    match disk.limits.waiting_requests {
        0 => disk.state.clone(),
        _ => format!("{}, limited", disk.state),
    }
}

/// A line for a server that was killed, by the socket that it has left.
fn has_ended(socket: &Path) -> String {
    let name = socket.file_stem().unwrap_or_default().to_string_lossy();
    let socket = socket.display().to_string();
    format!(
        "{}: its server has ended without an end in order, as by kill -9: a guest that it had waits for the next one; start it again (or remove {}, \
         if nobody is to serve the disk)",
        printable(&name),
        printable(&socket)
    )
}

/// A line for a disk that is paused.
fn is_paused(disk: &Disk) -> Option<String> {
    let Paused { id, time_s, at_most_s, .. } = disk.paused.as_ref()?;
    let name = &disk.name;
    let end = format!("spile resume {name} --pause {id}");
    Some(format!("{name}: paused since {time_s:.0} s, for {at_most_s:.0} s at most; `{end}` ends that"))
}

/// A line for a disk that is about to go back to a snapshot.
fn goes_back(disk: &Disk) -> Option<String> {
    let name = &disk.name;
    let why = "all requests wait for those in flight, because of `spile revert`; `spile slow` shows these";
    (disk.state == "reverting").then(|| format!("{name}: {why}"))
}

/// A line for a disk that waits: what for, since when, and how many requests.
fn waits_for(disk: &Disk) -> Option<String> {
    let Waiting { requests, time_s, operation, error, .. } = disk.waiting.as_ref()?;
    let why = Failure { error: error.clone() }.into_error();
    Some(format!("{}: {requests} request(s) wait, since {time_s:.0} s, for a {operation} to succeed: {why}", disk.name))
}

/// A line for a disk whose guest does not share its memory.
fn lacks_memory(disk: &Disk) -> Option<String> {
    let what = "the memory of its guest is not shared, so the guest waits for ever: start it with share=on (QEMU), or <access mode='shared'/> (libvirt)";
    (disk.state == "memory_not_shared").then(|| format!("{}: {what}", disk.name))
}

/// Lines about the room on the device of a disk.
fn room_of(disk: &Disk) -> Vec<String> {
    let Some(room) = &disk.room else { return Vec::new() };
    let device = &room.device;
    let free = match (room.device_bytes, room.free_bytes) {
        (Some(device_bytes), Some(free_bytes)) => {
            format!("{} of {}", format_size(free_bytes), format_size(device_bytes))
        }
        _ => "not known before the first write".to_owned(),
    };
    let grown = match (room.grown_total, room.failed_total) {
        (0, 0) => String::new(),
        (grown, failed) => format!("; made longer {grown} time(s), failed {failed} time(s)"),
    };
    let mut lines = vec![format!("room on {device}: {free}{grown}")];
    lines.extend(room.wants_bytes.map(|bytes| match room.is_growing {
        true => format!("{}: {device} is being made {bytes} bytes long", disk.name),
        false => format!(
            "{}: wants {device} to be {bytes} bytes long; `spile resume {}` takes that up",
            disk.name, disk.name
        ),
    }));
    let failure = room.last_failure.as_ref();
    lines.extend(failure.map(|failure| format!("no room was made the last time: {}", failure.message)));
    lines
}

/// Runs `spile show`.
///
/// # Errors
/// When there is no such disk.
pub fn show(args: &ShowArgs) -> Result<Exit> {
    let (socket, name) = args.which.find()?;
    let detail: DiskDetail = ask(&socket, "GET", &path_of(&name), LOOK_PATIENCE)?;
    if args.json {
        return print_json(&detail).map(|()| Exit::Ok);
    }
    let DiskDetail { disk, layers, connections, engine_about, meters, .. } = &detail;
    let access = if disk.read_only { ", read-only" } else { "" };
    say(format_args!("{}: {} {}{access}", disk.name, format_size(disk.virtual_size_bytes), disk.format));
    say(format_args!("server: {}", disk.server));
    say(policy_text(&disk.on_error, disk.pause_at_most_s));
    say(format_args!("shape: {}", shape::describe(disk)));
    limit::lines(&disk.limits).into_iter().for_each(say);
    is_paused(disk).into_iter().for_each(say);
    goes_back(disk).into_iter().for_each(say);
    waits_for(disk).into_iter().for_each(say);
    lacks_memory(disk).into_iter().for_each(say);
    room_of(disk).into_iter().for_each(say);
    disk.failed_sync.iter().for_each(|failed| say(format_args!("every flush fails: {}", failed.message)));
    if !disk.checkpoints.is_empty() {
        say(format_args!("checkpoints: {}", disk.checkpoints.join(", ")));
    }
    let lost = disk.checkpoints_lost.iter();
    lost.for_each(|why| say(format_args!("the checkpoints are lost, as changes are not noted any more: {why}")));
    for layer in layers {
        say(format_args!("image: {} ({}, {})", layer.path, layer.format, format_size(layer.virtual_size_bytes)));
    }
    for export in &disk.exports {
        say(format_args!("way: {} on {} as {:?}", export.protocol, export.address, export.name));
    }
    say(format_args!("connections: {connections}"));
    if !engine_about.is_empty() {
        say(engine_about);
    }
    meters.iter().filter(|meter| !meter.operations.is_empty()).for_each(show_meter);
    Ok(Exit::Ok)
}

/// An empty table that gets no wider than the terminal, or than 80 columns where there is none: longer texts go on in the next
/// line.
pub(super) fn fitting_table() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    if table.width().is_none() {
        table.set_width(80);
    }
    table
}

fn show_meter(meter: &Meter) {
    let mut table = fitting_table();
    let layer = printable(&meter.layer);
    table.set_header([layer.as_str(), "requests", "failed", "in flight", "half", "99 %", "longest"]);
    for op in &meter.operations {
        table.add_row([
            op.operation.clone(),
            format_count(op.requests as f64),
            op.errors.to_string(),
            op.in_flight.to_string(),
            format_us(op.latency_p50_us),
            format_us(op.latency_p99_us),
            format_us(op.latency_max_us),
        ]);
    }
    say_lines(table);
}

/// Runs `spile attach`.
///
/// # Errors
/// When there is no such server, or the disk cannot be served.
pub fn attach(args: &AttachArgs) -> Result<Exit> {
    let socket = discovery::find_server(&args.server)?;
    let absolute = |path: &Path| std::path::absolute(path).map_err(|e| Error::io("find this folder's path", e));
    let mut sockets = Vec::new();
    for path in &args.vhost_user {
        sockets.push(absolute(path)?.display().to_string());
    }
    let mut nbd = Vec::new();
    for address in &args.nbd {
        let address = if let Address::Unix(path) = address { Address::Unix(absolute(path)?) } else { address.clone() };
        nbd.push(address.to_string());
    }
    let body = json!({ "disk": absolute_disk(&args.disk)?, "vhost_user": sockets, "nbd": nbd });
    call(&socket, "POST", "/v1/disks", Some(&body), CHANGE_PATIENCE).map(|_: Value| Exit::Ok)
}

/// The disk with an absolute path: the server works in another folder.
fn absolute_disk(text: &str) -> Result<String> {
    let spec: DiskSpec = text.parse().map_err(|why: String| Error::new(ErrorKind::InvalidInput, why))?;
    let Locator::Path(path) = &spec.source else { return Ok(text.to_owned()) };
    let path = std::path::absolute(path).map_err(|e| Error::io("find this folder's path", e))?;
    let mut parts = split_commas(text);
    parts[0] = path.display().to_string();
    Ok(parts.iter().map(|part| part.replace(',', ",,")).collect::<Vec<_>>().join(","))
}

/// Runs `spile detach`.
///
/// # Errors
/// When there is no such disk, it is in use or has a job, or it could not be closed.
pub fn detach(args: &DetachArgs) -> Result<Exit> {
    let (socket, name) = args.which.find()?;
    let force = if args.force { "?force" } else { "" };
    let left: Detached = typed(call(&socket, "DELETE", &format!("{}{force}", path_of(&name)), None, CHANGE_PATIENCE)?)?;
    if args.json {
        return print_json(&left).map(|()| Exit::Ok);
    }
    for Job { id, kind, .. } in &left.ended_jobs {
        let after = match kind.as_str() {
            "backup" => "begin it anew when the disk is served again",
            _ => "whoever serves the disk goes on with it",
        };
        say(format_args!("the job {id}, a {kind}, was ended: {after}"));
    }
    Ok(Exit::Ok)
}

/// Runs `spile resize`.
///
/// # Errors
/// When there is no such disk, or it cannot get that size.
pub fn resize(args: &ResizeArgs) -> Result<Exit> {
    let resized = match args.which.find() {
        Err(error) if error.kind() == ErrorKind::NotFound && args.which.may_be_file() => resize_file(args)?,
        found => resize_served(args, found?)?,
    };
    if args.json {
        return print_json(&resized).map(|()| Exit::Ok);
    }
    let Resized { disk, path, virtual_size_bytes: size, old_virtual_size_bytes: old } = &resized;
    let (disk, exact) = (printable(disk.as_ref().unwrap_or(path)), format_size(*size));
    match old == size {
        true => say(format_args!("{disk}: has {exact} ({size} bytes) already")),
        false => say(format_args!("{disk}: has {exact} ({size} bytes) now, and had {}", format_size(*old))),
    }
    Ok(Exit::Ok)
}

fn resize_served(args: &ResizeArgs, (socket, name): (PathBuf, String)) -> Result<Resized> {
    if args.shrink {
        let what = format!("the disk {name:?} is served, and only a disk that nobody serves can be made shorter");
        return Err(Error::new(ErrorKind::Busy, what).hint(format!("detach {name:?} first, or end its server")));
    }
    let DiskDetail { disk: before, .. } = ask(&socket, "GET", &path_of(&name), LOOK_PATIENCE)?;
    let body = json!({ "virtual_size_bytes": args.size.of(before.virtual_size_bytes)? });
    let DiskDetail { disk, .. } = typed(call(&socket, "PATCH", &path_of(&name), Some(&body), CHANGE_PATIENCE)?)?;
    Ok(Resized {
        disk: Some(disk.name),
        path: disk.path,
        virtual_size_bytes: disk.virtual_size_bytes,
        old_virtual_size_bytes: before.virtual_size_bytes,
    })
}

/// Resizes a disk that no server has. The image is locked meanwhile, so nobody else has it open.
fn resize_file(args: &ResizeArgs) -> Result<Resized> {
    let (at, new_size) = (existing(Path::new(&args.which.disk))?, args.size);
    let (shrinks, discards) = (args.shrink, args.discard);
    let options = OpenOptions {
        format: args.format,
        write_parent: args.write_parent,
        allow_parents: args.allow_parents.clone(),
        allow_data_file: args.allow_data_file,
        ..OpenOptions::default()
    };
    on_engine(move || async move {
        let disk = disks::open_keeping(CacheMode::Page, &at, &options).await?;
        let checkpoints = Checkpoints::none(Access::default());
        checkpoints.open(&disk).await?;
        let old = disk.info().size_bytes;
        let size = new_size.of(old)?;
        let refuse = |what: String, hint: &str| {
            Err(Error::new(ErrorKind::InvalidInput, what).at_path(Path::new(&disks::label(&at))).hint(hint))
        };
        if size > old && shrinks {
            let what = format!("the disk has {old} bytes, and --shrink would make it longer");
            return refuse(what, "without --shrink it grows");
        }
        if size < old && !shrinks {
            let what = format!("the disk has {old} bytes: what lies behind {size} would be cut off");
            return refuse(what, "--shrink makes it shorter, if nothing but zeroes lies there");
        }
        if size < old
            && !discards
            && let Some(first) = disk.first_nonzero(Extent::from_range(size..old)).await?
        {
            let what = format!("the disk has data behind {size}, the first at {first}");
            return refuse(what, "--discard loses it; first make partitions and file systems shorter");
        }
        if size < old {
            // What lies behind the new end in the last block is zeroed first, and a kill behind that leaves the old size.
            checkpoints.note_extent(Extent::from_range(size..old)).await?;
        }
        // A share of the disk keeps it locked until its checkpoints are closed.
        let locked = disk.with_layers(disk.handles().to_vec())?;
        disk.resize_unused(size).await?;
        checkpoints.close(&locked).await;
        let path = locked.handles()[0].path().display().to_string();
        Ok(Resized { disk: None, path, virtual_size_bytes: size, old_virtual_size_bytes: old })
    })
}

pub(super) fn path_of(name: &str) -> String {
    format!("/v1/disks/{}", escape(name))
}
