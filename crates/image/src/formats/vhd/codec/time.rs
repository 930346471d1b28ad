//! VHD's clock: 32-bit seconds since 2000-01-01 UTC, which ends in February 2136.

/// 2000-01-01 UTC in Unix time, in seconds.
const EPOCH_UNIX_S: u64 = 946_684_800;

/// The VHD time of a Unix time in seconds; the nearest one for times VHD cannot express.
pub fn from_unix_s(unix_s: u64) -> u32 {
    u32::try_from(unix_s.saturating_sub(EPOCH_UNIX_S)).unwrap_or(u32::MAX)
}

/// The Unix time in seconds of a VHD time.
pub fn to_unix_s(vhd_s: u32) -> u64 {
    u64::from(vhd_s) + EPOCH_UNIX_S
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_instants_and_both_ends() {
        assert_eq!(from_unix_s(946_684_801), 1);
        assert_eq!(from_unix_s(0), 0);
        assert_eq!(from_unix_s(u64::MAX), u32::MAX);
        assert_eq!(to_unix_s(u32::MAX), 5_241_652_095);
        assert_eq!(from_unix_s(to_unix_s(123_456_789)), 123_456_789);
    }
}
