//! The header of a file of changed blocks: a value, [`Header`], and its bytes.
//!
//! All numbers are little-endian. The header lies in the file twice, one copy after the other:
//!
//! | byte | bytes | what |
//! |---|---|---|
//! | 0 | 8 | `SpileCBT` |
//! | 8 | 4 | version: 1 |
//! | 12 | 4 | CRC-32 of the copy, with zero in the place of this number |
//! | 16 | 8 | number of the header: the copy with the higher one counts |
//! | 24 | 8 | size of the disk in bytes |
//! | 32 | 16 | the boot of the host in which the file was last opened |
//! | 48 | 32 | what the disk's image looked like when it was last opened, exchanged, or closed in order |
//! | 80 | 4 | bytes of a block: a power of two |
//! | 84 | 4 | number of intervals |
//! | 88 | 4 | bytes of an area: a power of two, no less than a block |
//! | 96 | 8 | the mount in which the file was last opened; 0: not known |
//! | 104 | 16 | which disk it is of, wherever that goes; zero: not said |
//! | 256 | 128 each | the intervals, oldest first |
//!
//! An interval:
//!
//! | byte | bytes | what |
//! |---|---|---|
//! | 0 | 8 | where its bits are in the file; its marks come before them |
//! | 8 | 8 | so many bytes of the disk have bits; all after them counts as changed |
//! | 16 | 8 | when its checkpoint was made, in seconds since 1970 UTC |
//! | 24 | 4 | CRC-32 of the bits when they are settled |
//! | 28 | 1 | 1: the bits are settled: all of them are durable, and none is set any more |
//! | 29 | 1 | bytes of the name |
//! | 30 | 1 | 1: the disk's image has a bitmap of this name, which is kept up |
//! | 32 | 8 | so many bytes of the disk have room for bits in the file |
//! | 40 | 88 | name of the checkpoint that the interval begins with, UTF-8 |

use std::ops::Range;

/// The bytes of one copy of the header.
pub const COPY_BYTES: usize = 16 << 10;
/// No disk has more checkpoints.
pub const MOST_CHECKPOINTS: usize = (COPY_BYTES - FIRST_INTERVAL) / INTERVAL_BYTES;
/// The longest name of a checkpoint in bytes.
pub const LONGEST_NAME_BYTES: usize = 88;
/// The file's space is given out in pieces of so many bytes.
pub const PAGE_BYTES: u64 = 4096;

/// No interval lies behind this place of the file, so that opening the file takes bounded time and memory, whatever it says.
pub const MOST_FILE_BYTES: u64 = 4 << 30;
/// No interval has more areas: each takes a few bytes of memory.
pub const MOST_AREAS: u64 = 1 << 20;

const MAGIC: &[u8; 8] = b"SpileCBT";
const VERSION: u32 = 1;
const FIRST_INTERVAL: usize = 256;
const INTERVAL_BYTES: usize = 128;

/// What the image of a disk looks like from outside. The first half tells which file it is, the second one how long it is and when it was
/// written; the last 8 bytes of that tell of its parents. The whole differs when another program has written to the image since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp(pub [u8; 32]);

impl Stamp {
    /// True when both are looks at parents that nobody has written to in between.
    pub fn has_same_parents(&self, other: &Self) -> bool {
        self.0[24..] == other.0[24..]
    }

    /// This look, with the parents as `other` has seen them.
    #[must_use]
    pub fn with_parents_of(mut self, other: &Self) -> Self {
        self.0[24..].copy_from_slice(&other.0[24..]);
        self
    }

    /// True when both are looks at the same file.
    pub fn is_same_file(&self, other: &Self) -> bool {
        self.0[..16] == other.0[..16]
    }
}

/// How finely changes are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grain {
    /// The bytes of the disk that share a bit: a power of two.
    pub block_bytes: u32,
    /// The bytes of the disk that share a mark: a power of two, no less than a block.
    pub area_bytes: u32,
}

impl Default for Grain {
    fn default() -> Self {
        Self { block_bytes: 64 << 10, area_bytes: 64 << 20 }
    }
}

impl Grain {
    /// True for sizes that a file can have.
    pub fn is_sound(self) -> bool {
        let are_powers = self.block_bytes.is_power_of_two() && self.area_bytes.is_power_of_two();
        are_powers && self.block_bytes >= 512 && self.block_bytes <= self.area_bytes && self.area_bytes <= 1 << 30
    }
}

/// The header as a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The higher number counts.
    pub number: u64,
    /// The size of the disk in bytes.
    pub disk_bytes: u64,
    /// The boot of the host in which the file was last opened.
    pub boot_id: [u8; 16],
    /// The mount in which the file was last opened; 0 when that is not known.
    pub mount_id: u64,
    /// The image when the disk was last opened, got another image, or was closed in order. Unless it was closed in order, only the
    /// first half counts.
    pub stamp: Stamp,
    /// The sizes of blocks and areas.
    pub grain: Grain,
    /// Which disk it is of: the same wherever the disk goes. Zero where that is not said.
    pub id: [u8; 16],
    /// Oldest first. Marks go to the last one.
    pub intervals: Vec<Interval>,
}

/// The time from one checkpoint to the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interval {
    /// The name of the checkpoint that it begins with.
    pub name: String,
    /// When that was made, in seconds since 1970 UTC.
    pub created_unix_s: u64,
    /// Where the marks of its areas begin in the file. The bits come after them.
    pub offset_bytes: u64,
    /// So many bytes of the disk have bits that count. All after them counts as changed.
    pub covered_bytes: u64,
    /// So many bytes of the disk have room for bits.
    pub room_bytes: u64,
    /// The checksum of the bits, when all of them are durable and none is set any more.
    pub settled: Option<u32>,
    /// The disk's image has a bitmap of this name. What has changed since the checkpoint is to be in that, too.
    pub is_bitmap: bool,
}

/// Why bytes are no header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// They are damaged, or were not written to their end.
    Damaged,
    /// A newer program has written them.
    Version(u32),
}

impl Header {
    /// The bytes of one copy.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; COPY_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.number.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.disk_bytes.to_le_bytes());
        bytes[32..48].copy_from_slice(&self.boot_id);
        bytes[48..80].copy_from_slice(&self.stamp.0);
        bytes[80..84].copy_from_slice(&self.grain.block_bytes.to_le_bytes());
        bytes[88..92].copy_from_slice(&self.grain.area_bytes.to_le_bytes());
        bytes[96..104].copy_from_slice(&self.mount_id.to_le_bytes());
        bytes[104..120].copy_from_slice(&self.id);
        bytes[84..88].copy_from_slice(&(self.intervals.len() as u32).to_le_bytes());
        for (interval, into) in self.intervals.iter().zip(bytes[FIRST_INTERVAL..].chunks_exact_mut(INTERVAL_BYTES)) {
            interval.write(into);
        }
        let crc = crc32fast::hash(&bytes);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// The header of one copy.
    ///
    /// # Errors
    /// The bytes are no header of this version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Unreadable> {
        if bytes.len() < COPY_BYTES || &bytes[..8] != MAGIC {
            return Err(Unreadable::Damaged);
        }
        let mut copy = bytes[..COPY_BYTES].to_vec();
        copy[12..16].fill(0);
        if crc32fast::hash(&copy) != u32_at(bytes, 12) {
            return Err(Unreadable::Damaged);
        }
        match u32_at(bytes, 8) {
            VERSION => Self::read(bytes).ok_or(Unreadable::Damaged),
            version => Err(Unreadable::Version(version)),
        }
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let grain = Grain { block_bytes: u32_at(bytes, 80), area_bytes: u32_at(bytes, 88) };
        let count = u32_at(bytes, 84) as usize;
        if !grain.is_sound() || count > MOST_CHECKPOINTS {
            return None;
        }
        let intervals = bytes[FIRST_INTERVAL..].chunks_exact(INTERVAL_BYTES).take(count);
        let header = Self {
            number: u64_at(bytes, 16),
            disk_bytes: u64_at(bytes, 24),
            boot_id: bytes[32..48].try_into().ok()?,
            mount_id: u64_at(bytes, 96),
            stamp: Stamp(bytes[48..80].try_into().ok()?),
            id: bytes[104..120].try_into().ok()?,
            grain,
            intervals: intervals.map(Interval::read).collect::<Option<_>>()?,
        };
        header.are_places_sound().then_some(header)
    }

    /// True when all intervals have a place that a file can have, and no two share a part of it.
    fn are_places_sound(&self) -> bool {
        let places = self.taken();
        let are_apart = places.windows(2).all(|two| two[0].end <= two[1].start);
        are_apart && self.intervals.iter().all(|one| one.fits(self.grain))
    }

    /// The places of all intervals, in order.
    fn taken(&self) -> Vec<Range<u64>> {
        let mut places: Vec<_> = self.intervals.iter().map(|one| one.place(self.grain)).collect();
        places.sort_by_key(|place| (place.start, place.end));
        places
    }

    /// The header of a file that begins with `bytes`: the copy that counts. One damaged copy does no harm, as the other says the same, or
    /// says what was true before the damaged one was written.
    ///
    /// # Errors
    /// Both copies are unreadable.
    pub fn of_file(bytes: &[u8]) -> Result<Self, Unreadable> {
        let (first, second) = bytes.split_at(COPY_BYTES.min(bytes.len()));
        match (Self::from_bytes(first), Self::from_bytes(second)) {
            (Ok(first), Ok(second)) => Ok(if first.number >= second.number { first } else { second }),
            (Err(Unreadable::Version(version)), _) | (_, Err(Unreadable::Version(version))) => {
                Err(Unreadable::Version(version))
            }
            (Ok(one), _) | (_, Ok(one)) => Ok(one),
            (Err(error), Err(_)) => Err(error),
        }
    }

    /// The disk has another image, whose bitmaps nobody has looked at.
    pub fn forget_bitmaps(&mut self) {
        self.intervals.iter_mut().for_each(|interval| interval.is_bitmap = false);
    }

    /// The disk's image looks like `stamp`.
    pub fn set_stamp(&mut self, stamp: Stamp) {
        if !self.stamp.is_same_file(&stamp) {
            self.forget_bitmaps();
        }
        self.stamp = stamp;
    }

    /// Where the first interval can lie.
    pub fn first_free() -> u64 {
        2 * COPY_BYTES as u64
    }

    /// A free place of `len` bytes for another interval.
    pub fn free_place(&self, len: u64) -> u64 {
        let from = Self::first_free();
        self.taken().iter().fold(from, |at, place| if at + len <= place.start { at } else { at.max(place.end) })
    }
}

impl Interval {
    fn write(&self, into: &mut [u8]) {
        into[..8].copy_from_slice(&self.offset_bytes.to_le_bytes());
        into[8..16].copy_from_slice(&self.covered_bytes.to_le_bytes());
        into[16..24].copy_from_slice(&self.created_unix_s.to_le_bytes());
        into[24..28].copy_from_slice(&self.settled.unwrap_or(0).to_le_bytes());
        into[28] = self.settled.is_some().into();
        into[29] = self.name.len() as u8;
        into[30] = self.is_bitmap.into();
        into[32..40].copy_from_slice(&self.room_bytes.to_le_bytes());
        into[40..40 + self.name.len()].copy_from_slice(self.name.as_bytes());
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let name = bytes[40..].get(..usize::from(bytes[29]))?;
        let interval = Self {
            name: std::str::from_utf8(name).ok()?.to_owned(),
            created_unix_s: u64_at(bytes, 16),
            offset_bytes: u64_at(bytes, 0),
            covered_bytes: u64_at(bytes, 8),
            room_bytes: u64_at(bytes, 32),
            settled: (bytes[28] != 0).then(|| u32_at(bytes, 24)),
            is_bitmap: bytes[30] != 0,
        };
        let is_sound = interval.offset_bytes >= Header::first_free()
            && interval.offset_bytes.is_multiple_of(PAGE_BYTES)
            && interval.offset_bytes < 1 << 48
            && interval.covered_bytes <= interval.room_bytes
            && interval.room_bytes < 1 << 56;
        is_sound.then_some(interval)
    }

    /// The number of its blocks.
    pub fn blocks(&self, grain: Grain) -> u64 {
        self.covered_bytes.div_ceil(grain.block_bytes.into())
    }

    /// The number of its areas.
    pub fn areas(&self, grain: Grain) -> u64 {
        self.covered_bytes.div_ceil(grain.area_bytes.into())
    }

    /// The bytes that its marks take in the file.
    pub fn marks_bytes(&self, grain: Grain) -> u64 {
        self.room_bytes.div_ceil(grain.area_bytes.into()).div_ceil(8).next_multiple_of(PAGE_BYTES)
    }

    /// The bytes that its bits take in the file.
    pub fn bits_bytes(&self, grain: Grain) -> u64 {
        self.room_bytes.div_ceil(grain.block_bytes.into()).div_ceil(8).next_multiple_of(PAGE_BYTES)
    }

    /// True when a file can have it.
    pub fn fits(&self, grain: Grain) -> bool {
        let areas = self.room_bytes.div_ceil(grain.area_bytes.into());
        areas <= MOST_AREAS && self.place(grain).end <= MOST_FILE_BYTES
    }

    /// Where it lies in the file.
    pub fn place(&self, grain: Grain) -> Range<u64> {
        self.offset_bytes..self.offset_bytes + self.marks_bytes(grain) + self.bits_bytes(grain)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn interval() -> impl Strategy<Value = Interval> {
        ("[a-zä-]{0,40}", any::<u32>(), 0..1u64 << 20, any::<Option<u32>>()).prop_map(
            |(name, created, covered_bytes, settled)| Interval {
                name,
                created_unix_s: created.into(),
                offset_bytes: 0,
                covered_bytes,
                room_bytes: covered_bytes + u64::from(created) % (1 << 20),
                settled,
                is_bitmap: created % 2 == 1,
            },
        )
    }

    /// Adds an interval at a free place.
    fn put(header: &mut Header, mut interval: Interval) {
        let place = interval.place(header.grain);
        interval.offset_bytes = header.free_place(place.end - place.start);
        header.intervals.push(interval);
    }

    fn header() -> impl Strategy<Value = Header> {
        let intervals = proptest::collection::vec(interval(), 0..MOST_CHECKPOINTS);
        (any::<[u64; 2]>(), any::<[u8; 16]>(), any::<[u8; 32]>(), (9..26u32, 0..5u32), intervals).prop_map(
            |([number, disk_bytes], boot_id, stamp, (shift, more), intervals)| {
                let grain = Grain { block_bytes: 1 << shift, area_bytes: 1 << (shift + more) };
                let mut header = Header {
                    number,
                    disk_bytes,
                    boot_id,
                    mount_id: 7,
                    stamp: Stamp(stamp),
                    grain,
                    id: [7; 16],
                    intervals: Vec::new(),
                };
                intervals.into_iter().for_each(|one| put(&mut header, one));
                header
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_header_is_read_back_and_no_changed_byte_goes_unseen(header in header(), at in 0..COPY_BYTES, bit in 0..8u32) {
            let mut bytes = header.to_bytes();
            prop_assert_eq!(Header::from_bytes(&bytes), Ok(header));
            bytes[at] ^= 1 << bit;
            prop_assert_eq!(Header::from_bytes(&bytes), Err(Unreadable::Damaged));
        }

        #[test]
        fn any_bytes_with_a_right_checksum_are_read_without_a_panic(
            start in proptest::collection::vec(any::<u8>(), 16..600)
        ) {
            let mut bytes = start;
            bytes.resize(COPY_BYTES, 0);
            bytes[..8].copy_from_slice(MAGIC);
            bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
            bytes[12..16].fill(0);
            let crc = crc32fast::hash(&bytes);
            bytes[12..16].copy_from_slice(&crc.to_le_bytes());
            if let Ok(header) = Header::from_bytes(&bytes) {
                header.intervals.iter().for_each(|one| assert!(one.place(header.grain).end >= one.offset_bytes));
            }
        }
    }

    fn plain(number: u64) -> Header {
        let (boot_id, stamp, grain) = ([1; 16], Stamp([2; 32]), Grain::default());
        Header { number, disk_bytes: 1 << 30, boot_id, mount_id: 0, stamp, grain, id: [3; 16], intervals: Vec::new() }
    }

    #[test]
    fn the_newer_copy_counts_and_one_damaged_copy_does_no_harm() {
        let (old, new) = (plain(4).to_bytes(), plain(5).to_bytes());
        let damaged = vec![0; COPY_BYTES];
        let of = |one: &[u8], other: &[u8]| Header::of_file(&[one, other].concat()).map(|header| header.number);
        assert_eq!((of(&old, &new), of(&new, &old)), (Ok(5), Ok(5)));
        assert_eq!((of(&old, &damaged), of(&damaged, &new)), (Ok(4), Ok(5)));
        assert_eq!((of(&damaged, &damaged), of(&[], &[])), (Err(Unreadable::Damaged), Err(Unreadable::Damaged)));
    }

    #[test]
    fn a_version_of_the_future_is_not_read() {
        let mut bytes = plain(1).to_bytes();
        bytes[8] = 2;
        bytes[12..16].fill(0);
        let crc = crc32fast::hash(&bytes);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(Header::from_bytes(&bytes), Err(Unreadable::Version(2)));
    }

    fn of_room(room_bytes: u64) -> Interval {
        let (name, covered_bytes) = ("a".to_owned(), room_bytes);
        let (created_unix_s, offset_bytes, settled, is_bitmap) = (0, 0, None, false);
        Interval { name, created_unix_s, offset_bytes, covered_bytes, room_bytes, settled, is_bitmap }
    }

    #[test]
    fn intervals_that_are_too_large_or_share_a_place_are_not_read() {
        let is_read = |header: &Header| Header::from_bytes(&header.to_bytes()).is_ok();
        let mut header = plain(1);
        put(&mut header, of_room(64 << 40));
        put(&mut header, of_room(0));
        put(&mut header, of_room(1 << 30));
        assert!(is_read(&header));
        let sound = header.clone();
        header.intervals[0].offset_bytes += PAGE_BYTES;
        assert!(!is_read(&header), "two intervals have the same bits");
        header = sound.clone();
        header.intervals[2].offset_bytes = MOST_FILE_BYTES;
        assert!(!is_read(&header), "the bits lie too far behind");
        header = sound;
        header.intervals.truncate(1);
        header.intervals[0].room_bytes += 1;
        assert!(!is_read(&header), "too many areas");
    }

    #[test]
    fn the_place_of_a_removed_interval_is_used_again() {
        let mut header = plain(1);
        (0..3).for_each(|_| put(&mut header, of_room(1 << 30)));
        assert_eq!(header.intervals[2].offset_bytes, Header::first_free() + 4 * PAGE_BYTES);
        let removed = header.intervals.remove(1);
        assert_eq!(header.free_place(2 * PAGE_BYTES), removed.offset_bytes);
        assert_eq!(header.free_place(3 * PAGE_BYTES), Header::first_free() + 6 * PAGE_BYTES);
    }
}
