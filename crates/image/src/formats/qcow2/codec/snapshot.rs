//! The table of internal snapshots: entries of variable length, one after the other.

use super::table::encode;
use super::{CodecError, be16, be32, be64, check_offset, need, put};

/// The fixed part of an entry.
const FIXED_BYTES: usize = 40;
/// The most extra data of an entry, in bytes, as in QEMU.
pub const MAX_EXTRA_BYTES: u32 = 1024;
/// The longest table, in bytes, as in QEMU.
pub const MAX_TABLE_BYTES: u64 = 64 << 20;
/// The longest entry, in bytes.
pub const MAX_ENTRY_BYTES: usize = FIXED_BYTES + MAX_EXTRA_BYTES as usize + 2 * 65535 + 8;

/// The instruction count of a guest whose instructions nobody counts.
const NO_INSTRUCTION_COUNT: u64 = u64::MAX;

/// An internal snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Where its L1 table starts.
    pub l1_offset: u64,
    /// Entries of its L1 table; may be fewer than the disk needs now.
    pub l1_entries: u32,
    /// When it was taken: seconds since 1970-01-01 UTC.
    pub taken_s: u32,
    /// The rest of that time in nanoseconds.
    pub taken_ns: u32,
    /// How long the guest had run, in nanoseconds.
    pub guest_clock_ns: u64,
    /// The size of the guest's memory and devices, as the fixed part says it; [`Snapshot::state_bytes`] is the right one.
    pub short_state_bytes: u32,
    /// Extra data: 8 bytes each of state size, disk size, and instruction count, as far as it goes.
    pub extra: Vec<u8>,
    /// Its identity, unique in the image.
    pub id: Vec<u8>,
    /// Its name.
    pub name: Vec<u8>,
}

impl Snapshot {
    /// Reads the entry at the start of `bytes`; returns how long it is with its padding.
    ///
    /// # Errors
    /// `TooShort`; `SnapshotExtra`.
    pub fn parse(bytes: &[u8]) -> Result<(Self, usize), CodecError> {
        need("snapshot entry", bytes, FIXED_BYTES)?;
        let extra_bytes = be32(bytes, 36);
        if extra_bytes > MAX_EXTRA_BYTES {
            return Err(CodecError::SnapshotExtra(extra_bytes));
        }
        let extra_end = FIXED_BYTES + extra_bytes as usize;
        let id_end = extra_end + usize::from(be16(bytes, 12));
        let name_end = id_end + usize::from(be16(bytes, 14));
        need("snapshot entry", bytes, name_end)?;
        let snapshot = Self {
            l1_offset: be64(bytes, 0),
            l1_entries: be32(bytes, 8),
            taken_s: be32(bytes, 16),
            taken_ns: be32(bytes, 20),
            guest_clock_ns: be64(bytes, 24),
            short_state_bytes: be32(bytes, 32),
            extra: bytes[FIXED_BYTES..extra_end].to_vec(),
            id: bytes[extra_end..id_end].to_vec(),
            name: bytes[id_end..name_end].to_vec(),
        };
        Ok((snapshot, name_end.next_multiple_of(8)))
    }

    /// The bytes of the entry with its padding.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![0; FIXED_BYTES];
        put(&mut out, 0, &self.l1_offset.to_be_bytes());
        put(&mut out, 8, &self.l1_entries.to_be_bytes());
        put(&mut out, 12, &(self.id.len() as u16).to_be_bytes());
        put(&mut out, 14, &(self.name.len() as u16).to_be_bytes());
        put(&mut out, 16, &self.taken_s.to_be_bytes());
        put(&mut out, 20, &self.taken_ns.to_be_bytes());
        put(&mut out, 24, &self.guest_clock_ns.to_be_bytes());
        put(&mut out, 32, &self.short_state_bytes.to_be_bytes());
        put(&mut out, 36, &(self.extra.len() as u32).to_be_bytes());
        out.extend(&self.extra);
        out.extend(&self.id);
        out.extend(&self.name);
        out.resize(out.len().next_multiple_of(8), 0);
        out
    }

    /// The size of the guest's memory and devices in bytes; 0 when only the disk was kept.
    pub fn state_bytes(&self) -> u64 {
        self.extra_u64(0).unwrap_or(u64::from(self.short_state_bytes))
    }

    /// The size of the disk when it was taken, in bytes; `None` in old images, which do not say.
    pub fn disk_bytes(&self) -> Option<u64> {
        self.extra_u64(8)
    }

    /// The entry with as much extra data as version 3 asks for and QEMU writes: an entry that does not tell the size of its disk gets
    /// `disk_bytes`.
    #[must_use]
    pub fn extended(mut self, disk_bytes: u64) -> Self {
        let all = [self.state_bytes(), disk_bytes, NO_INSTRUCTION_COUNT];
        let known = self.extra.len() / 8;
        if known < all.len() {
            self.extra.truncate(known * 8);
            self.extra.extend(encode(&all[known..]));
        }
        self
    }

    fn extra_u64(&self, at: usize) -> Option<u64> {
        (self.extra.len() >= at + 8).then(|| be64(&self.extra, at))
    }

    /// Checks that its L1 table can be where it says.
    ///
    /// # Errors
    /// `L1TooLarge`, `TableOffset`.
    pub fn check(&self, cluster_bits: u32) -> Result<(), CodecError> {
        match self.l1_entries {
            0 => Ok(()),
            entries if u64::from(entries) * 8 > super::MAX_L1_BYTES => Err(CodecError::L1TooLarge(entries)),
            _ => check_offset("snapshot's L1 table", self.l1_offset, cluster_bits),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_extra_state_size_counts_and_old_entries_have_none() {
        let mut bytes = [0; 40];
        bytes[35] = 7;
        let (old, _) = Snapshot::parse(&bytes).unwrap();
        assert_eq!((old.state_bytes(), old.disk_bytes()), (7, None));
        let extra = [9u64.to_be_bytes(), 5u64.to_be_bytes()].concat();
        let new = Snapshot { extra, ..old };
        assert_eq!((new.state_bytes(), new.disk_bytes()), (9, Some(5)));
    }

    #[test]
    fn an_entry_is_extended_by_what_it_does_not_say() {
        let words = |words: &[u64]| encode(words);
        let mut bytes = [0; 40];
        bytes[35] = 7;
        let (old, _) = Snapshot::parse(&bytes).unwrap();
        let with = |extra: Vec<u8>| Snapshot { extra, ..old.clone() }.extended(5).extra;
        assert_eq!(with(Vec::new()), words(&[7, 5, u64::MAX]));
        assert_eq!(with(words(&[9])), words(&[9, 5, u64::MAX]));
        assert_eq!(with([&words(&[9])[..], &[1, 2, 3]].concat()), words(&[9, 5, u64::MAX]));
        assert_eq!(with(words(&[9, 6])), words(&[9, 6, u64::MAX]));
        assert_eq!(with(words(&[9, 6, 1, 4])), words(&[9, 6, 1, 4]), "what is not known is kept");
    }

    #[test]
    fn extra_data_are_bounded() {
        assert_eq!(Snapshot::parse(&[1; 4096]), Err(CodecError::SnapshotExtra(0x0101_0101)));
    }

    #[test]
    fn a_name_past_the_end_is_refused() {
        let mut bytes = [0; 48];
        bytes[15] = 9;
        assert_eq!(
            Snapshot::parse(&bytes),
            Err(CodecError::TooShort { what: "snapshot entry", needed_bytes: 49, got_bytes: 48 })
        );
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            numbers in any::<[u64; 2]>(), small in any::<[u32; 4]>(), extra in proptest::collection::vec(any::<u8>(), 0..40),
            id in proptest::collection::vec(any::<u8>(), 0..20), name in proptest::collection::vec(any::<u8>(), 0..20)
        ) {
            let [l1_offset, guest_clock_ns] = numbers;
            let [l1_entries, taken_s, taken_ns, short_state_bytes] = small;
            let snapshot = Snapshot { l1_offset, l1_entries, taken_s, taken_ns, guest_clock_ns, short_state_bytes, extra, id, name };
            let bytes = snapshot.to_bytes();
            let len = bytes.len();
            prop_assert_eq!(Snapshot::parse(&bytes), Ok((snapshot, len)));
        }
    }
}
