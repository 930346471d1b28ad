//! The bitmaps of a qcow2 image as another program reads them, byte by byte.

use crate::pages::Pages;
use crate::qcow2::Form;

/// A bitmap in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Raw {
    pub name: String,
    pub is_in_use: bool,
    pub granularity_bytes: u64,
    /// What is set, by number.
    pub bits: Vec<bool>,
    /// Where its table is.
    table_at: u64,
    table_entries: u64,
}

/// The bitmap that notes all changes.
pub const NOTING: &str = "b";
/// The bitmap that notes none.
pub const DISABLED: &str = "d";
/// The bitmap that was in use when the run began.
pub const LEFT_IN_USE: &str = "u";

const IN_USE: u32 = 1;
const AUTO: u32 = 2;

fn at<const N: usize>(file: &Pages, offset: u64) -> [u8; N] {
    let mut bytes = [0; N];
    file.read(offset, &mut bytes);
    bytes
}

fn u32_at(file: &Pages, offset: u64) -> u32 {
    u32::from_be_bytes(at(file, offset))
}

fn u64_at(file: &Pages, offset: u64) -> u64 {
    u64::from_be_bytes(at(file, offset))
}

/// The bitmaps of the image in `file`; `None` when it calls them inconsistent, or has none.
pub fn read(file: &Pages) -> Option<Vec<Raw>> {
    let (cluster_bits, size) = (u32_at(file, 20), u64_at(file, 24));
    if u64_at(file, 88) & 1 == 0 {
        return None;
    }
    let mut extension = u64::from(u32_at(file, 100));
    while u32_at(file, extension) != 0x2385_2875 {
        assert!(u32_at(file, extension) != 0, "bitmaps are called consistent, and there is no directory of them");
        extension += 8 + u64::from(u32_at(file, extension + 4)).next_multiple_of(8);
    }
    let (count, mut entry) = (u32_at(file, extension + 8), u64_at(file, extension + 24));
    let mut all = Vec::new();
    for _ in 0..count {
        let name_bytes = usize::from(u16::from_be_bytes(at(file, entry + 18)));
        let extra = u64::from(u32_at(file, entry + 20));
        let mut name = vec![0; name_bytes];
        file.read(entry + 24 + extra, &mut name);
        let [.., granularity_bits]: [u8; 2] = at(file, entry + 16);
        let mut raw = Raw {
            name: String::from_utf8(name).expect("the name is text"),
            is_in_use: u32_at(file, entry + 12) & IN_USE != 0,
            granularity_bytes: 1 << granularity_bits,
            bits: Vec::new(),
            table_at: u64_at(file, entry),
            table_entries: u64::from(u32_at(file, entry + 8)),
        };
        if !raw.is_in_use {
            raw.read_bits(file, cluster_bits, size);
        }
        all.push(raw);
        entry += (24 + extra + name_bytes as u64).next_multiple_of(8);
    }
    Some(all)
}

impl Raw {
    fn read_bits(&mut self, file: &Pages, cluster_bits: u32, size: u64) {
        let per_entry = 8u64 << cluster_bits;
        let count = size.div_ceil(self.granularity_bytes);
        assert_eq!(count.div_ceil(per_entry), self.table_entries, "the table of {} has another length", self.name);
        for bit in 0..count {
            let entry = u64_at(file, self.table_at + bit / per_entry * 8);
            let within = bit % per_entry;
            let is_set = match entry {
                0 | 1 => entry == 1,
                place => at::<1>(file, place + within / 8)[0] >> (within % 8) & 1 == 1,
            };
            self.bits.push(is_set);
        }
    }

    /// The entries of its table, to be written as zeroes by who clears it: where they are, and how many bytes.
    pub fn table(&self) -> (u64, u64) {
        (self.table_at, self.table_entries * 8)
    }
}

/// An empty image with bitmaps.
pub fn image(size_bytes: u64, cluster_bytes: u32, granularity_bits: u8, has_left_in_use: bool) -> Vec<u8> {
    let form = Form { is_version_2: false, is_extended: false, refcount_order: 4, data_file: None };
    let mut bytes = form.empty_image(size_bytes, cluster_bytes, None);
    let cluster = cluster_bytes as usize;
    let used = bytes.len() / cluster;
    let names = [NOTING, DISABLED, LEFT_IN_USE];
    let flags = [AUTO, 0, AUTO | IN_USE];
    let count = if has_left_in_use { 3 } else { 2 };
    let bits = size_bytes.div_ceil(1 << granularity_bits);
    let entries = bits.div_ceil(8).div_ceil(cluster_bytes.into());
    let table_clusters = (entries as usize * 8).div_ceil(cluster);
    bytes.resize((used + 1 + count * table_clusters) * cluster, 0);
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    let (directory, mut at) = (used * cluster, used * cluster);
    for number in 0..count {
        put(at, &(((used + 1 + number * table_clusters) * cluster) as u64).to_be_bytes());
        put(at + 8, &(entries as u32).to_be_bytes());
        put(at + 12, &u32::to_be_bytes(flags[number]));
        put(at + 16, &[1, granularity_bits, 0, names[number].len() as u8]);
        put(at + 24, names[number].as_bytes());
        at += 32;
    }
    // All of the bitmap that notes nothing is set, and of the one in use, too.
    for number in 1..count {
        for entry in 0..entries as usize {
            put((used + 1 + number * table_clusters) * cluster + entry * 8 + 7, &[1]);
        }
    }
    put(88, &1u64.to_be_bytes());
    put(112, &0x2385_2875_u32.to_be_bytes());
    put(116, &24u32.to_be_bytes());
    put(120, &(count as u32).to_be_bytes());
    put(128, &((at - directory) as u64).to_be_bytes());
    put(136, &(directory as u64).to_be_bytes());
    for number in used..used + 1 + count * table_clusters {
        put(2 * cluster + number * 2 + 1, &[1]);
    }
    bytes
}
