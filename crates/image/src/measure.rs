//! How much space a new image takes, before it is made.

use spile_core::{Extent, ExtentKind, ExtentStatus};

/// What a new image of a certain kind and size takes on its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// The length of the file without any data, but for a last footer, in bytes.
    pub empty_bytes: u64,
    /// Of these, how many are written when the image is made; the others are a hole.
    pub written_bytes: u64,
    /// The length of what stands behind the last data, in bytes.
    pub tail_bytes: u64,
    /// How the file grows with the data; `None` where it has its whole length from the start.
    pub unit: Option<Unit>,
    /// Tables that are written only for a part of the disk that has data; `empty_bytes` has room for all of them. Units of such
    /// an image are written whole.
    pub tables: Option<Tables>,
    /// The size of the disk in bytes.
    pub virtual_bytes: u64,
}

/// The unit in which a thin image takes space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    /// The bytes of the disk that one unit holds.
    pub data_bytes: u64,
    /// The bytes of the file between the end of an empty image's metadata and the data of the first unit.
    pub lead_bytes: u64,
    /// The bytes of the file from the start of one unit to that of the next.
    pub stride_bytes: u64,
}

/// Tables of which each says where a part of the disk lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tables {
    /// The bytes of the disk that one table covers.
    pub covered_bytes: u64,
    /// The length of a table in bytes.
    pub table_bytes: u64,
}

/// Which space a new image needs for certain data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measure {
    /// The length of the file: what a block device must have.
    pub required_bytes: u64,
    /// The length of the file once all of the disk was written.
    pub fully_allocated_bytes: u64,
    /// The space that the file takes on a file system that has holes.
    pub used_bytes: u64,
}

impl Measure {
    /// The same for an image whose space is all taken from the start.
    pub fn preallocated(self) -> Self {
        let all = self.fully_allocated_bytes;
        Self { required_bytes: all, used_bytes: all, ..self }
    }
}

/// Holes in files begin and end at multiples of this many bytes.
const PAGE_BYTES: u64 = 4096;

/// Counts the data of a disk, run by run, as a new image would hold them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Count {
    data_bytes: u64,
    units: u64,
    /// One past the last unit that was counted.
    counted: u64,
    tables: u64,
    /// One past the last table that was counted.
    counted_tables: u64,
}

/// Counts the pieces of `piece_bytes` that a run begins or goes on in, from the piece `counted` on, which moves behind them.
fn count(run: Extent, piece_bytes: u64, counted: &mut u64) -> u64 {
    let first = (run.start() / piece_bytes).max(*counted);
    let end = run.end().div_ceil(piece_bytes);
    *counted = end.max(*counted);
    end.saturating_sub(first)
}

impl Count {
    /// Counts a run of the disk. Runs come in order.
    pub fn add(&mut self, space: &Space, run: &ExtentStatus) {
        if run.kind != ExtentKind::Data || run.extent.is_empty() {
            return;
        }
        let pages = Extent::from_range(
            run.extent.start() / PAGE_BYTES * PAGE_BYTES..run.extent.end().next_multiple_of(PAGE_BYTES),
        );
        self.data_bytes += pages.len_bytes;
        if let Some(unit) = space.unit {
            self.units += count(run.extent, unit.data_bytes, &mut self.counted);
        }
        if let Some(tables) = space.tables {
            self.tables += count(run.extent, tables.covered_bytes, &mut self.counted_tables);
        }
    }

    /// Bytes of data, in whole pages.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }
}

impl Space {
    /// A file that has its whole length from the start: the disk, and `tail_bytes` behind it.
    pub(crate) fn whole(virtual_bytes: u64, tail_bytes: u64) -> Self {
        Self { empty_bytes: virtual_bytes, written_bytes: 0, tail_bytes, unit: None, tables: None, virtual_bytes }
    }

    /// What the image needs for the data that were counted.
    pub fn measure(&self, count: &Count) -> Measure {
        let len = |units: u64, unit: Unit| match units {
            0 => self.empty_bytes + self.tail_bytes,
            _ => {
                let units_bytes = (units - 1) * unit.stride_bytes + unit.data_bytes;
                self.empty_bytes + unit.lead_bytes + units_bytes + self.tail_bytes
            }
        };
        let (required, full, per_unit) = match self.unit {
            None => (self.empty_bytes + self.tail_bytes, self.empty_bytes + self.tail_bytes, 0),
            Some(unit) => {
                let all = self.virtual_bytes.div_ceil(unit.data_bytes);
                (len(count.units, unit), len(all, unit), unit.stride_bytes - unit.data_bytes)
            }
        };
        let tail = if self.tail_bytes > 0 { PAGE_BYTES } else { 0 };
        let tables = self.tables.map_or(0, |tables| count.tables * tables.table_bytes);
        let data = match (self.tables, self.unit) {
            (Some(_), Some(unit)) => count.units * unit.data_bytes,
            _ => count.data_bytes,
        };
        let used = self.written_bytes.next_multiple_of(PAGE_BYTES) + data + count.units * per_unit + tables + tail;
        Measure {
            required_bytes: required,
            fully_allocated_bytes: full,
            used_bytes: used.min(required.next_multiple_of(PAGE_BYTES)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(range: std::ops::Range<u64>, kind: ExtentKind) -> ExtentStatus {
        ExtentStatus { extent: Extent::from_range(range), kind, depth: 0 }
    }

    #[test]
    fn units_are_counted_once_and_only_where_data_are() {
        let unit = Unit { data_bytes: 1 << 20, lead_bytes: 512, stride_bytes: (1 << 20) + 4096 };
        let space = Space {
            empty_bytes: 8192,
            written_bytes: 4096,
            tail_bytes: 512,
            unit: Some(unit),
            tables: None,
            virtual_bytes: 16 << 20,
        };
        let mut count = Count::default();
        count.add(&space, &run(0..4096, ExtentKind::Data));
        count.add(&space, &run(4096..8192, ExtentKind::Zero));
        count.add(&space, &run(8192..12288, ExtentKind::Data));
        count.add(&space, &run((1 << 20) - 4096..(2 << 20) + 1, ExtentKind::Data));
        count.add(&space, &run(3 << 20..9 << 20, ExtentKind::Hole));
        let measure = space.measure(&count);
        assert_eq!(measure.required_bytes, 8192 + 512 + 3 * unit.stride_bytes - 4096 + 512);
        assert_eq!(measure.fully_allocated_bytes, 8192 + 512 + 16 * unit.stride_bytes - 4096 + 512);
        assert_eq!(count.data_bytes(), 4096 + 4096 + 4096 + (1 << 20) + 4096);
        assert_eq!(measure.used_bytes, 4096 + count.data_bytes() + 3 * 4096 + 4096);
    }

    #[test]
    fn tables_are_counted_where_data_are_and_units_are_whole() {
        let unit = Unit { data_bytes: 64 << 10, lead_bytes: 0, stride_bytes: 64 << 10 };
        let tables = Tables { covered_bytes: 1 << 20, table_bytes: 4096 };
        let space = Space {
            empty_bytes: 1 << 20,
            written_bytes: 8192,
            tail_bytes: 0,
            unit: Some(unit),
            tables: Some(tables),
            virtual_bytes: 8 << 20,
        };
        let mut count = Count::default();
        count.add(&space, &run(0..4096, ExtentKind::Data));
        count.add(&space, &run((2 << 20) - 4096..(2 << 20) + 4096, ExtentKind::Data));
        let measure = space.measure(&count);
        assert_eq!(measure.used_bytes, 8192 + 3 * (64 << 10) + 3 * 4096);
        assert_eq!(measure.required_bytes, (1 << 20) + 3 * (64 << 10));
        assert_eq!(measure.preallocated().required_bytes, (1 << 20) + (8 << 20));
    }

    #[test]
    fn a_whole_file_is_as_long_as_the_disk_and_takes_the_space_of_its_data() {
        let space = Space::whole(1 << 20, 512);
        let mut count = Count::default();
        assert_eq!(space.measure(&count).used_bytes, 4096);
        count.add(&space, &run(0..10, ExtentKind::Data));
        let measure = space.measure(&count);
        assert_eq!((measure.required_bytes, measure.fully_allocated_bytes), ((1 << 20) + 512, (1 << 20) + 512));
        assert_eq!(measure.used_bytes, 8192);
    }
}
