//! Why the kernel refuses an engine, and what would have to be set for it.

use std::io;

use spile_core::{Error, ErrorKind};

/// What of the host decides whether io_uring and AIO can be had.
#[derive(Debug, Default)]
struct Host {
    /// The kernel's release, such as `4.19.0-112`.
    release: String,
    /// The sysctl kernel.io_uring_disabled; empty where there is none.
    io_uring_disabled: String,
    /// The sysctls fs.aio-nr and fs.aio-max-nr.
    aio_nr: String,
    aio_max_nr: String,
}

impl Host {
    fn look() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        Self {
            release: read("/proc/sys/kernel/osrelease"),
            io_uring_disabled: read("/proc/sys/kernel/io_uring_disabled"),
            aio_nr: read("/proc/sys/fs/aio-nr"),
            aio_max_nr: read("/proc/sys/fs/aio-max-nr"),
        }
    }

    /// True when the kernel is older than version `major.minor`.
    fn is_before(&self, major: u32, minor: u32) -> bool {
        let mut numbers = self.release.split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse::<u32>().ok());
        numbers.next().zip(numbers.next()).is_some_and(|version| version < (major, minor))
    }

    fn uring_hint(&self, errno: Option<i32>) -> String {
        let is_disabled = !matches!(self.io_uring_disabled.as_str(), "" | "0");
        match errno {
            Some(libc::ENOMEM) => "raise the limit on locked memory (ulimit -l)".to_owned(),
            Some(libc::EMFILE | libc::ENFILE) => "raise the limit on open files (ulimit -n)".to_owned(),
            _ if self.is_before(5, 11) => format!("Linux 5.11 or later is needed, and this is {}", self.release),
            Some(libc::EPERM | libc::EACCES) if is_disabled => {
                format!("sysctl kernel.io_uring_disabled is {}: set it to 0", self.io_uring_disabled)
            }
            Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => {
                "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile (a container's has to \
                 name them) or the security module, or take a kernel that is built with io_uring"
                    .to_owned()
            }
            _ => "a kernel of Linux 5.11 or later is needed".to_owned(),
        }
    }

    fn aio_hint(&self, errno: Option<i32>) -> String {
        match errno {
            Some(libc::EAGAIN) => {
                format!(
                    "raise sysctl fs.aio-max-nr: it is {}, and {} of these are in use",
                    self.aio_max_nr, self.aio_nr
                )
            }
            Some(libc::EMFILE | libc::ENFILE) => "raise the limit on open files (ulimit -n)".to_owned(),
            Some(libc::ENOMEM) => "memory is short".to_owned(),
            _ => "allow io_setup, io_submit, io_getevents and io_destroy in the seccomp profile, or take a kernel that is \
                  built with AIO"
                .to_owned(),
        }
    }
}

fn kind_of(errno: Option<i32>) -> ErrorKind {
    match errno {
        Some(libc::ENOMEM | libc::EMFILE | libc::ENFILE | libc::EAGAIN) => ErrorKind::Exhausted,
        Some(libc::EPERM | libc::EACCES) => ErrorKind::Denied,
        _ => ErrorKind::Unsupported,
    }
}

/// Says that io_uring cannot be used, and what would have to be set.
pub(crate) fn of_uring(error: io::Error) -> Error {
    let errno = error.raw_os_error();
    let hint = Host::look().uring_hint(errno);
    Error::new(kind_of(errno), "io_uring cannot be used here").caused_by(error).hint(hint)
}

/// Says that Linux AIO cannot be used, and what would have to be set.
pub(crate) fn of_aio(error: io::Error) -> Error {
    let errno = error.raw_os_error();
    let hint = Host::look().aio_hint(errno);
    Error::new(kind_of(errno), "Linux AIO cannot be used here").caused_by(error).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(release: &str, io_uring_disabled: &str) -> Host {
        Host { release: release.to_owned(), io_uring_disabled: io_uring_disabled.to_owned(), ..Host::default() }
    }

    #[test]
    fn the_hint_names_what_refuses_io_uring() {
        let dom0 = host("4.19.0+1", "").uring_hint(Some(libc::ENOSYS));
        assert!(dom0.contains("5.11") && dom0.contains("4.19.0+1"), "{dom0}");
        let rhel = host("6.12.0-55.el10", "2").uring_hint(Some(libc::EPERM));
        assert!(rhel.contains("kernel.io_uring_disabled is 2"), "{rhel}");
        for errno in [libc::EPERM, libc::ENOSYS] {
            let container = host("6.12.0", "0").uring_hint(Some(errno));
            assert!(container.contains("seccomp"), "{container}");
        }
        let limit = host("5.10.0", "").uring_hint(Some(libc::ENOMEM));
        assert!(limit.contains("ulimit -l"), "{limit}");
    }

    #[test]
    fn the_hint_names_what_refuses_aio() {
        let full = Host { aio_nr: "65500".to_owned(), aio_max_nr: "65536".to_owned(), ..Host::default() };
        let hint = full.aio_hint(Some(libc::EAGAIN));
        assert!(hint.contains("fs.aio-max-nr: it is 65536, and 65500 of these"), "{hint}");
        assert!(full.aio_hint(Some(libc::ENOSYS)).contains("seccomp"));
    }

    #[test]
    fn releases_are_compared_as_numbers() {
        assert!(host("4.19.0-112", "").is_before(5, 11) && host("5.4", "").is_before(5, 11));
        assert!(!host("5.11.0", "").is_before(5, 11) && !host("10.0.1", "").is_before(5, 11));
        assert!(!host("unknown", "").is_before(5, 11));
    }
}
