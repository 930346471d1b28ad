//! Whether a new disk fits its file system, and space that is taken before it is written.

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::process::geteuid;
use spile_core::{Disk, Error, ErrorKind, Extent, Result, ResultExt};
use spile_image::measure::{Count, Space};
use spile_server::new_file::folder_of;

use crate::units::format_size;

/// True for a block device.
pub fn is_block_device(stat: &Metadata) -> bool {
    stat.file_type().is_block_device()
}

/// The space that this user can still take on the file system of `path`, in bytes.
///
/// # Errors
/// The system's.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let stat =
        statvfs(path).map_err(|e| Error::io("cannot ask the file system for its space", e.into()).at_path(path))?;
    // Some of it is for root only.
    let blocks = if geteuid().is_root() { stat.f_bfree } else { stat.f_bavail };
    Ok(blocks.saturating_mul(stat.f_frsize))
}

/// Refuses what does not fit. `path` is where the space is looked for, and `dst` the disk's name.
///
/// # Errors
/// `NoSpace`, which says how much is missing; the system's.
pub fn check(path: &Path, dst: &Path, needed_bytes: u64) -> Result<()> {
    let free = free_bytes(path)?;
    if needed_bytes <= free {
        return Ok(());
    }
    let [needed, free, missing] = [needed_bytes, free, needed_bytes - free].map(format_size);
    let what = format!("the disk may need {needed}, and its file system has {free}: {missing} are missing");
    Err(Error::new(ErrorKind::NoSpace, what).at_path(dst))
}

/// Counts the data of `disk` as an image of the shape `space` would hold them.
///
/// # Errors
/// The disk's.
pub async fn count(disk: &impl Disk, space: &Space) -> Result<Count> {
    let (mut count, mut at, size) = (Count::default(), 0, disk.info().size_bytes);
    while at < size {
        let runs = disk.extents(Extent::from_range(at..size), 1024).await?;
        at = runs.last().map_or(size, |run| run.extent.end());
        runs.iter().for_each(|run| count.add(space, run));
    }
    Ok(count)
}

fn is_thin(dst: &Path) -> Error {
    let error = Error::new(ErrorKind::InvalidInput, "a disk of this kind takes its space as it is written");
    error.at_path(dst).hint("leave out --preallocate, or make it --subformat fixed")
}

/// Tells, before anything is changed, whether the space of a whole image of the shape `space` can be taken in a file that holds
/// `held_bytes` already. `path` is where the space is looked for, and `dst` the disk's name.
///
/// # Errors
/// `InvalidInput` for an image that grows with its data; as [`check`].
pub fn check_preallocation(space: &Space, path: &Path, dst: &Path, held_bytes: u64) -> Result<()> {
    if space.unit.is_some() {
        return Err(is_thin(dst));
    }
    let whole_bytes = space.measure(&Count::default()).fully_allocated_bytes;
    check(path, dst, whole_bytes.saturating_sub(held_bytes))
}

/// Takes the space of the whole file, which an image of `virtual_bytes` was made in.
///
/// # Errors
/// `InvalidInput` for an image that grows with its data; `NoSpace`, before anything is taken; the system's.
pub fn preallocate(file: &File, dst: &Path, virtual_bytes: u64) -> Result<()> {
    let len = file.metadata().map_err(|e| Error::io("cannot look at the file", e)).at_path(dst)?.len();
    if len < virtual_bytes {
        return Err(is_thin(dst));
    }
    take(file, dst, FallocateFlags::empty(), len)
}

/// As [`preallocate`], of a file that holds nothing yet, and holds nothing and has no length afterwards either: a process that is killed leaves it as it was.
///
/// # Errors
/// As there.
pub fn reserve(file: &File, dst: &Path, len_bytes: u64) -> Result<()> {
    take(file, dst, FallocateFlags::KEEP_SIZE, len_bytes)
}

fn take(file: &File, dst: &Path, how: FallocateFlags, len_bytes: u64) -> Result<()> {
    check(folder_of(dst), dst, len_bytes)?;
    fallocate(file, how, 0, len_bytes).map_err(|e| Error::io("cannot take the disk's space", e.into()).at_path(dst))
}

/// What is written at once.
const ZEROES_BYTES: u64 = 1 << 20;

/// Writes zeroes over all that was taken and never written, and makes it durable.
///
/// # Errors
/// The system's.
pub fn fill_holes(file: &File, dst: &Path) -> Result<()> {
    let failed = |error| Error::io("cannot write zeroes", error).at_path(dst);
    let len = file.metadata().map_err(failed)?.len();
    let mut at = 0;
    while at < len {
        let part = ZEROES_BYTES.min(len - at) as usize;
        let mut bytes = vec![0; part];
        // What is there is written again, as only the kernel knows where nothing was written yet.
        file.read_exact_at(&mut bytes, at).map_err(failed)?;
        file.write_all_at(&bytes, at).map_err(failed)?;
        at += part as u64;
    }
    file.sync_all().map_err(failed)
}
