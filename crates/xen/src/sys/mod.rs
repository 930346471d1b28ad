//! The device files of a real Xen, as Linux gives them: [`Gntdev`] for the pages that guests grant, [`Evtchn`] for
//! their event channels. The numbers and structures are those of include/uapi/xen/gntdev.h and evtchn.h.
//!
//! This is the only place of the crate with `unsafe`: system calls with structures, and memory that they map.
#![allow(unsafe_code)]

pub mod evtchn;
mod gntdev;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use spile_core::Error;

pub use evtchn::Evtchn;
pub use gntdev::Gntdev;

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the structures that the devices take are those of machines with addresses of 64 bits");

/// The number of an ioctl: _IOC(_IOC_NONE, device, number, bytes of the argument).
const fn request(device: u8, number: u8, argument_bytes: usize) -> u32 {
    (argument_bytes as u32) << 16 | (device as u32) << 8 | number as u32
}

/// Calls a device (ioctl) with the address of an argument, again when a signal has interrupted it. Returns what the
/// device returns.
///
/// # Safety
/// `argument` is what `request` takes: as long, writable where the device writes, and with addresses in it that may be
/// read and written as the device does.
unsafe fn call<T: ?Sized>(device: BorrowedFd<'_>, request: u32, argument: *mut T) -> io::Result<u32> {
    loop {
        // SAFETY: the descriptor is open as long as it is borrowed; the argument is right by this function's contract.
        let answer = unsafe { libc::ioctl(device.as_raw_fd(), request as libc::Ioctl, argument.cast::<u8>()) };
        if let Ok(answer) = u32::try_from(answer) {
            return Ok(answer);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Opens a device for reading and writing. Children of this process do not inherit it.
fn open_device(path: &Path, module: &str, flags: i32) -> Result<File, Error> {
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).map_err(|e| {
        let hint = match e.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
                format!("is this a domain of Xen? The device is there when the module is loaded: modprobe {module}")
            }
            _ => "the user who runs this must be allowed to read and write the device".into(),
        };
        Error::io("open the device", e).at_path(path).hint(hint)
    })
}
