//! What the system tells of a block device.

use rustix::fs::SeekFrom;
use spile_core::{Error, Result};
use spile_engine::RawFile;

/// A device punches when it can write zeroes by itself; on one that cannot, fallocate fails.
pub(crate) fn device_punches(device: &RawFile) -> bool {
    let Ok(number) = rustix::fs::fstat(device).map(|stat| stat.st_rdev) else { return false };
    let place = format!("/sys/dev/block/{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    // A partition's queue is its disk's.
    [place.clone() + "/queue", place + "/../queue"].iter().any(|queue| {
        let most = std::fs::read_to_string(format!("{queue}/write_zeroes_max_bytes"));
        most.is_ok_and(|most| most.trim() != "0")
    })
}

/// The length of a block device in bytes, as it is now.
///
/// # Errors
/// The system's.
pub(crate) fn device_len(device: impl std::os::fd::AsFd) -> Result<u64> {
    rustix::fs::seek(device, SeekFrom::End(0)).map_err(|errno| Error::io("find the device's length", errno.into()))
}

/// The size of a device's sectors, in bytes: the kernel zeroes and punches whole ones.
pub(crate) fn device_sector_bytes(device: impl std::os::fd::AsFd) -> u64 {
    const LARGEST: u32 = 4096;
    rustix::fs::ioctl_blksszget(device).unwrap_or(LARGEST).into()
}
