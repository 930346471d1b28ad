//! Event channels through /dev/xen/evtchn.
//!
//! Each channel has its own open device file, which is readable when the guest has rung. A read gives the port, as a
//! u32, and masks it: further rings are held back until the port is written to the same file. Rings between the two
//! become one.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use spile_core::{Error, Result};

use super::{call, open_device, request};
use crate::{Channel, DomId, EventChannels, Port};

const DEVICE: &str = "/dev/xen/evtchn";
const MODULE: &str = "xen-evtchn";

/// struct ioctl_evtchn_bind_interdomain.
#[repr(C)]
struct BindInterdomain {
    remote_domain: u32,
    remote_port: u32,
}

/// struct ioctl_evtchn_notify.
#[repr(C)]
struct Notify {
    port: u32,
}

const BIND_INTERDOMAIN: u32 = request(b'E', 1, size_of::<BindInterdomain>());
const NOTIFY: u32 = request(b'E', 4, size_of::<Notify>());

/// Reads which ports of the device file `channel` were rung, which masks them, and unmasks them. The file is set not to
/// block; nothing happens when no port was rung.
///
/// # Errors
/// The system's.
pub fn take_ring(channel: BorrowedFd<'_>) -> io::Result<()> {
    let mut ports = [0; 16];
    let count = match rustix::io::retry_on_intr(|| rustix::io::read(channel, &mut ports)) {
        Err(Errno::AGAIN) => return Ok(()),
        count => count?,
    };
    rustix::io::retry_on_intr(|| rustix::io::write(channel, &ports[..count]))?;
    Ok(())
}

/// Rings the other end of the channel that the device file `channel` knows as `port`. It fails only when the other end
/// is gone, and then nobody listens. A hypercall: there is nothing that it could wait for.
pub fn ring(channel: BorrowedFd<'_>, port: Port) {
    let mut argument = Notify { port: port.0 };
    // SAFETY: the argument of this call, which the device only reads.
    let _ = unsafe { call(channel, NOTIFY, &raw mut argument) };
}

/// Event channels of a real Xen.
#[derive(Debug)]
pub struct Evtchn {
    path: PathBuf,
}

impl Evtchn {
    /// The event channels of this machine. The device is opened once to see that it can be.
    ///
    /// # Errors
    /// When /dev/xen/evtchn cannot be opened; the message says what to do.
    pub fn open() -> Result<Self> {
        Self::open_at(Path::new(DEVICE))
    }

    fn open_at(path: &Path) -> Result<Self> {
        open_device(path, MODULE, 0)?;
        Ok(Self { path: path.to_owned() })
    }
}

impl EventChannels for Evtchn {
    fn bind(&self, domain: DomId, port: Port) -> Result<Channel> {
        let device = open_device(&self.path, MODULE, libc::O_NONBLOCK)?;
        let mut argument = BindInterdomain { remote_domain: domain.0.into(), remote_port: port.0 };
        // SAFETY: the argument of this call, which the device only reads.
        let bound = unsafe { call(device.as_fd(), BIND_INTERDOMAIN, &raw mut argument) };
        match bound {
            Ok(ours) => Ok(Channel::Device(device.into(), Port(ours))),
            Err(e) => {
                Err(Error::io(format!("bind to event channel {} of domain {domain}", port.0), e).at_path(&self.path))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use spile_core::ErrorKind;

    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_header_file() {
        assert_eq!((BIND_INTERDOMAIN, NOTIFY), (0x0008_4501, 0x0004_4504));
    }

    #[test]
    fn a_missing_device_is_named_with_its_module() {
        let folder = tempfile::tempdir().unwrap();
        let error = Evtchn::open_at(&folder.path().join("evtchn")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        let text = error.to_string();
        assert!(text.contains("/evtchn: open the device") && text.contains("modprobe xen-evtchn"), "{text}");
    }

    #[test]
    fn what_the_device_refuses_is_an_error_with_all_names() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let channels = Evtchn::open_at(file.path()).unwrap();
        let error = channels.bind(DomId(3), Port(9)).unwrap_err();
        assert_eq!(error.os_errno(), Some(libc::ENOTTY));
        assert!(error.to_string().contains("bind to event channel 9 of domain 3"), "{error}");
    }
}
