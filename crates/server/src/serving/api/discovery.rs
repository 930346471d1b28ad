//! Control sockets by name: a folder has one for each server, so that nobody types paths.

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::stream::{StreamExt as _, iter};
use rustix::process::geteuid;
use serde::de::DeserializeOwned;
use spile_core::{Error, ErrorKind, Result};
use spile_image::Format;
use spile_nbd_wire::uri::{Address, NbdUri};

use super::client::{LOOK_PATIENCE, ask, runtime, typed, within};
use super::types::{Disk, DiskList, Job, JobList};
use crate::disks;
use crate::socket_path::short_name;

/// The extension of a control socket's file name.
pub const EXTENSION: &str = "control";
/// That of the socket of a command that works on a disk which no server has: it has jobs, and no disks.
pub const JOBS_EXTENSION: &str = "jobs";

/// How long a server may take to answer one who looks for a disk or a job. All are asked at once, so one that hangs costs this once.
const FIND_PATIENCE: Duration = Duration::from_secs(2);
/// How long a server that hands over is given before it, or the one that has its disks then, is asked again.
const HAND_OVER: Duration = Duration::from_millis(500);
/// So many are asked at a time: each takes a descriptor.
pub const AT_ONCE: usize = 256;

/// The folder of control sockets: `$SPILE_RUN_DIR`, else `/run/spile` for root, else `$XDG_RUNTIME_DIR/spile`.
///
/// # Errors
/// `NotFound` when no variable names one.
pub fn folder() -> Result<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|text| !text.is_empty()).map(PathBuf::from);
    if let Some(folder) = variable("SPILE_RUN_DIR") {
        return Ok(folder);
    }
    if geteuid().is_root() {
        return Ok("/run/spile".into());
    }
    variable("XDG_RUNTIME_DIR").map(|dir| dir.join("spile")).ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "XDG_RUNTIME_DIR is not set, so there is no folder for control sockets")
            .hint("set it, or name the control socket by its path")
    })
}

/// Each server that answers, with its disks, in the order of the sockets' names. Sockets of dead servers are passed over; a
/// server that does not answer in time is one line in the log.
///
/// # Errors
/// When the folder cannot be read.
pub fn servers() -> Result<Vec<(PathBuf, Vec<Disk>)>> {
    Ok(told(asked()?))
}

/// All who have jobs, with their jobs: servers, then commands that work on disks that no server has. As [`servers`] otherwise; a server that is too old to
/// have jobs has none.
///
/// # Errors
/// When the folder cannot be read.
pub fn jobs() -> Result<Vec<(PathBuf, Vec<Job>)>> {
    let folder = folder()?;
    let sockets = sockets(&folder)?.into_iter().chain(sockets_of_commands(&folder)?).collect();
    let lists = told(ask_all::<JobList>(sockets, "/v1/jobs")?);
    Ok(lists.into_iter().map(|(socket, list)| (socket, list.jobs)).collect())
}

/// The jobs of commands that work on disks that no server has, with the sockets of the commands. As [`servers`] otherwise.
///
/// # Errors
/// When the folder cannot be read.
pub fn jobs_of_commands() -> Result<Vec<(PathBuf, Job)>> {
    let lists = told(ask_all::<JobList>(sockets_of_commands(&folder()?)?, "/v1/jobs")?);
    let each = |(socket, list): (PathBuf, JobList)| list.jobs.into_iter().map(move |job| (socket.clone(), job));
    Ok(lists.into_iter().flat_map(each).collect())
}

/// True for the socket of a command, which has jobs and no disks.
pub fn is_of_command(socket: &Path) -> bool {
    socket.extension().is_some_and(|extension| extension == JOBS_EXTENSION)
}

/// Those that have answered. One that has not is a line in the log.
fn told<T>(answers: Vec<(PathBuf, Result<T>)>) -> Vec<(PathBuf, T)> {
    let answered = |(socket, answer): (PathBuf, Result<T>)| match answer {
        Ok(answer) => Some((socket, answer)),
        Err(error) => {
            tracing::warn!("{error}");
            None
        }
    };
    answers.into_iter().filter_map(answered).collect()
}

/// The disks of all servers. Sockets of dead servers are passed over.
///
/// # Errors
/// When the folder cannot be read, or when a server lives and does not say which disks it has.
pub fn all_disks() -> Result<Vec<Disk>> {
    let disks = asked()?.into_iter().map(|(_, disks)| disks);
    disks.collect::<Result<Vec<_>>>().map(|disks| disks.into_iter().flatten().collect())
}

/// What each server that lives answers, in the order of the sockets' names.
fn asked() -> Result<Vec<(PathBuf, Result<Vec<Disk>>)>> {
    let lists = ask_all::<DiskList>(sockets(&folder()?)?, "/v1/disks")?;
    Ok(lists.into_iter().map(|(socket, list)| (socket, list.map(|list| list.disks))).collect())
}

/// As [`asked`]. A server that just hands over, or begins, is asked once more: it says nothing for a moment.
fn asked_again() -> Result<Vec<(PathBuf, Result<Vec<Disk>>)>> {
    let answers = asked()?;
    let is_busy = |answer: &Result<Vec<Disk>>| answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::Shutdown);
    if answers.iter().any(|(_, answer)| is_busy(answer)) {
        std::thread::sleep(HAND_OVER);
        return asked();
    }
    Ok(answers)
}

/// Asks at all these sockets side by side, and returns the answers in their order. Where nobody listens, there is none.
///
/// # Errors
/// The system's, when nothing can be asked at all.
fn ask_all<T: DeserializeOwned>(sockets: Vec<PathBuf>, path: &'static str) -> Result<Vec<(PathBuf, Result<T>)>> {
    let ask = async |socket: PathBuf| {
        let answer = within(&socket, "GET", path, None, FIND_PATIENCE).await.and_then(typed);
        (socket, answer)
    };
    let asked = iter(sockets).map(ask).buffered(AT_ONCE);
    let answers: Vec<(PathBuf, Result<T>)> = runtime()?.block_on(asked.collect());
    let is_dead = |answer: &Result<T>| answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound);
    Ok(answers.into_iter().filter(|(_, answer)| !is_dead(answer)).collect())
}

/// The control sockets in a folder, in the order of their names; none when there is no such folder.
///
/// # Errors
/// When the folder cannot be read.
pub fn sockets(folder: &Path) -> Result<Vec<PathBuf>> {
    with_extension(folder, EXTENSION)
}

/// The sockets of commands in a folder, as [`sockets`] has those of servers.
///
/// # Errors
/// As there.
pub fn sockets_of_commands(folder: &Path) -> Result<Vec<PathBuf>> {
    with_extension(folder, JOBS_EXTENSION)
}

fn with_extension(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io("list control sockets", error).at_path(folder)),
    };
    let paths = entries.flatten().map(|entry| entry.path());
    let mut sockets: Vec<_> = paths.filter(|path| path.extension().is_some_and(|e| e == extension)).collect();
    sockets.sort();
    Ok(sockets)
}

/// The disks of the server at a control socket.
///
/// # Errors
/// As [`call`].
pub fn disks_of(socket: &Path) -> Result<Vec<Disk>> {
    ask(socket, "GET", "/v1/disks", LOOK_PATIENCE).map(|list: DiskList| list.disks)
}

/// The address and the name of the NBD export that a URI means.
fn export_of(uri: &str) -> Option<(Address, String)> {
    uri.parse().ok().map(|NbdUri { address, export, .. }| (address, export))
}

/// The server and the name of the disk that a user means: by its name, or by the path or URI of its image.
///
/// # Errors
/// `NotFound`; `InvalidInput` when several servers have such a disk, or when the words name a disk and another file; `TimedOut` for a name that a server may
/// have, too, which does not say which disks it has.
pub fn find_disk(text: &str) -> Result<(PathBuf, String)> {
    let (path, export) = (std::fs::canonicalize(text).ok(), export_of(text));
    let is_meant = |disk: &Disk| {
        disk.name == text
            || path.is_some() && std::fs::canonicalize(&disk.path).ok() == path
            || export.is_some() && export_of(&disk.path) == export
    };
    let (mut servers, mut silent, mut may_be_others) = (Vec::new(), Vec::new(), false);
    for (socket, disks) in asked_again()? {
        match disks {
            Ok(disks) => servers.push((socket, disks)),
            Err(error) => {
                // Where this user may not ask, he does not mean its disk.
                may_be_others |= error.kind() != ErrorKind::Denied;
                silent.push(format!("{} does not say which disks it has ({error})", socket.display()));
            }
        }
    }
    let disks = servers.iter().flat_map(|(socket, disks)| disks.iter().map(move |disk| (socket, disk)));
    let found: Vec<_> = disks.filter(|(_, disk)| is_meant(disk)).collect();
    if let Some((socket, disk)) = found.iter().find(|(_, disk)| is_other_file(disk, text)) {
        return Err(ambiguous(text, socket, disk));
    }
    match found.as_slice() {
        [] => Err(unknown(text, &silent)),
        // Any number of disks may have a name. Nobody else has the image.
        [(_, disk)] if disk.name == text && may_be_others && path.is_none() && export.is_none() => {
            let what = format!("whether one disk only is called {text:?} is not known: {}", silent.join(", "));
            let hint = format!("name the disk by its image, {}", disk.path);
            Err(Error::new(ErrorKind::TimedOut, what).hint(hint))
        }
        [(socket, disk)] => Ok(((*socket).clone(), disk.name.clone())),
        several => {
            let sockets: Vec<_> = several.iter().map(|(socket, _)| socket.display().to_string()).collect();
            Err(Error::new(ErrorKind::InvalidInput, format!("several servers have a disk {text:?}"))
                .hint(format!("name its image by its path; they are of {}", sockets.join(", "))))
        }
    }
}

/// No server has the disk that `text` means. What is written as a path, and is not there, is a slip of the pen.
fn unknown(text: &str, silent: &[String]) -> Error {
    let path = Path::new(text);
    let is_path = export_of(text).is_none() && (text.contains('/') || Format::from_extension(path).is_some());
    let is_missing = || matches!(path.symlink_metadata(), Err(e) if e.kind() == std::io::ErrorKind::NotFound);
    let error = match is_path && is_missing() {
        true => {
            if let Some(moved) = disks::moved(&path.into()) {
                return moved.told(path);
            }
            Error::new(ErrorKind::NotFound, "it cannot be found, and no server has a disk of that name").at_path(path)
        }
        false => Error::new(ErrorKind::NotFound, format!("no server has a disk {text:?}")),
    };
    error.hint(match silent {
        [] => "`spile ls` lists the disks; name a server's control socket by its path".to_owned(),
        silent => format!("one may have it that does not answer: {}", silent.join(", ")),
    })
}

/// True when `text` names a file that is there, and it is not the image of `disk`.
fn is_other_file(disk: &Disk, text: &str) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let is_disk = |stat: std::fs::Metadata| stat.is_file() || stat.file_type().is_block_device();
    std::fs::metadata(text).is_ok_and(is_disk)
        && std::fs::canonicalize(&disk.path).ok() != std::fs::canonicalize(text).ok()
}

/// `text` names the disk, and a file that is not its image.
fn ambiguous(text: &str, socket: &Path, disk: &Disk) -> Error {
    let (server, name, path) = (socket.display(), &disk.name, &disk.path);
    let what = format!("{text:?} is a file here, and the name of a disk whose image is another file, {path}");
    Error::new(ErrorKind::InvalidInput, what)
        .hint(format!("name the file as ./{text}, or the disk by its server: {server} --name {name}"))
}

/// The control socket of the server that a user means: a path, the name of a socket in the folder, or the name of one of
/// its disks.
///
/// # Errors
/// As [`find_disk`].
pub fn find_server(text: &str) -> Result<PathBuf> {
    if is_socket(Path::new(text)) {
        return Ok(text.into());
    }
    let folder = folder()?;
    let name = text.strip_suffix(".control").unwrap_or(text);
    let named = folder.join(format!("{}.{EXTENSION}", short_name(&folder, name, EXTENSION)));
    if is_socket(&named) { Ok(named) } else { find_disk(text).map(|(socket, _)| socket) }
}

/// True for a file that is a socket.
pub fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}
