//! [`OsEnv`]: this host's clock, randomness and boot identity.

use std::pin::Pin;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use spile_core::{Env, Timer, Work};

/// The clock, randomness and boot identity of this host.
#[derive(Clone, Copy, Debug, Default)]
pub struct OsEnv;

impl Env for OsEnv {
    fn now_unix_s(&self) -> u64 {
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }

    /// # Panics
    /// When the kernel gives no randomness, which it always does once it has booted.
    fn random_16(&self) -> [u8; 16] {
        let mut bytes = [0u8; 16];
        // SAFETY: the buffer is live and has the length given.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        assert_eq!(got, 16, "the kernel gave no randomness");
        bytes
    }

    /// The identity of this boot. Where /proc does not tell it, an identity of this process is used: it may say
    /// "another boot" when it is the same, but never the other way round.
    fn boot_id(&self) -> [u8; 16] {
        static FOUND: OnceLock<[u8; 16]> = OnceLock::new();
        *FOUND.get_or_init(|| {
            std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
                .ok()
                .and_then(|text| parse_uuid(text.trim()))
                .unwrap_or_else(|| self.random_16())
        })
    }

    fn spawn(&self, work: Work) -> bool {
        let is_worker = crate::worker::is_here();
        if is_worker {
            crate::spawn(work);
        }
        is_worker
    }
}

impl Timer for OsEnv {
    fn sleep(&self, time: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(crate::sleep(time))
    }
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    (digits.len() == 32).then_some(())?;
    u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_boot_is_one_and_randomness_is_not() {
        assert_eq!(OsEnv.boot_id(), OsEnv.boot_id());
        assert_ne!(OsEnv.boot_id(), [0; 16]);
        assert_ne!(OsEnv.random_16(), OsEnv.random_16());
        assert!(OsEnv.now_unix_s() > 1_700_000_000);
    }

    #[test]
    fn a_uuid_has_32_digits() {
        let id = parse_uuid("00112233-4455-6677-8899-aabbccddeeff").unwrap();
        assert_eq!((id[0], id[1], id[15]), (0x00, 0x11, 0xff));
        assert!(parse_uuid("0011").is_none() && parse_uuid(&"x".repeat(32)).is_none());
    }
}
