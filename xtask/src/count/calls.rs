//! System calls that a server makes for a guest's writes, counted by strace.

use super::Unit;
use super::programs::{STEADY, load};
use crate::bench::kinds::Front;
use crate::bench::server::{Server, server_cores};
use crate::{Result, shell};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The calls that change a file.
const CHANGES: &[&str] = &["pwrite64", "pwritev", "pwritev2", "fallocate", "ftruncate", "fsync", "fdatasync"];
/// Those of them that make it durable.
const SYNCS: &[&str] = &["fsync", "fdatasync"];

/// More than any run writes.
const SIZE: &str = "1G";

/// The longest wait for strace's table.
const LIMIT: Duration = Duration::from_secs(30);

/// What is written to.
#[derive(Clone, Copy)]
pub enum Image {
    Raw,
    /// A dynamic VHD.
    Vhd,
    /// A differencing VHD, whose parent is empty.
    Child,
}

/// Which of a guest's writes to a place is counted.
#[derive(Clone, Copy, PartialEq)]
pub enum Turn {
    First,
    Again,
}

/// True when strace may trace a process of ours.
pub fn may_trace() -> bool {
    let mut command = Command::new("strace");
    let status = command.args(["-f", "-c", "-o", "/dev/null", "true"]).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// The calls of a server for so many writes of 4 KiB, one place after the other, to a new image in `folder`.
pub fn count(
    spile: PathBuf,
    folder: &Path,
    file: &Path,
    image: Image,
    turn: Turn,
    unit: Unit,
    requests: u64,
) -> Result<u64> {
    let disk = create(&spile, folder, image)?;
    if turn == Turn::Again {
        let mut command = Command::new(&spile);
        write(&mut command, &spile, &disk, requests)?;
    }
    let _ = std::fs::remove_file(file);
    let mut command = Command::new("strace");
    // With `-D` the server is the process that is started here, and that gets the signal to end.
    command.args(["-D", "-f", "-c", "-e", &format!("trace={}", CHANGES.join(",")), "-o"]).arg(file).arg(&spile);
    write(&mut command, &spile, &disk, requests)?;
    Ok(calls(&table_in(file)?, if unit == Unit::Syncs { SYNCS } else { CHANGES }))
}

/// The table that strace writes when the server has ended.
fn table_in(file: &Path) -> Result<String> {
    let end = Instant::now() + LIMIT;
    loop {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        if text.trim_end().ends_with(" total") {
            return Ok(text);
        }
        if Instant::now() > end {
            return Err(format!("{}: strace has written no table", file.display()));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Makes a new image, and its parent if it is to have one.
fn create(spile: &Path, folder: &Path, image: Image) -> Result<PathBuf> {
    let [parent, raw, vhd] = ["parent.raw", "disk.raw", "disk.vhd"].map(|name| folder.join(name));
    for path in [&parent, &raw, &vhd] {
        let _ = std::fs::remove_file(path);
    }
    let create = |path: &Path, words: &[&str]| {
        shell::run(Command::new(spile).arg("create").arg(path).args(words).stdout(Stdio::null()))
    };
    match image {
        Image::Raw => create(&raw, &["--size", SIZE]).map(|()| raw),
        Image::Vhd => create(&vhd, &["--size", SIZE]).map(|()| vhd),
        Image::Child => {
            create(&parent, &["--size", SIZE])?;
            create(&vhd, &["--parent", &parent.display().to_string()]).map(|()| vhd)
        }
    }
}

/// Has a server, which `command` starts, take writes from a guest.
fn write(command: &mut Command, spile: &Path, disk: &Path, requests: u64) -> Result<()> {
    let socket = std::env::temp_dir().join(format!("spile-count-{}.sock", std::process::id()));
    command.arg("serve").arg(disk).args(["--cache", "direct", "--vhost-user"]).arg(&socket).args(STEADY);
    let server = Server::spawn(command, socket, Front::Vhost)?;
    let what = ["--rw", "write", "--bs", "4k", "--depth", "32"];
    shell::run(&mut load(&server_cores(1), spile, &server.uri(), &what, requests))
}

/// The sum of the calls with these names in strace's table, whose columns are: time, seconds, microseconds a call, calls, errors
/// if there were any, name.
fn calls(table: &str, names: &[&str]) -> u64 {
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let counted = rows.filter(|row| row.last().is_some_and(|name| names.contains(name)));
    counted.filter_map(|row| row.get(3)?.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_read_from_straces_table() {
        let table = "% time     seconds  usecs/call     calls    errors syscall\n\
                     ------ ----------- ----------- --------- --------- ----------------\n\
                     90.00    0.100000          15      6400           pwritev\n  \
                     9.00    0.010000          10        11         2 fdatasync\n\
                     ------ ----------- ----------- --------- --------- ----------------\n\
                     100.00    0.110000          15      6411         2 total\n";
        assert_eq!(calls(table, CHANGES), 6411);
        assert_eq!(calls(table, SYNCS), 11);
    }
}
